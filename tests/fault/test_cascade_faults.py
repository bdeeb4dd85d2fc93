"""Cascades over real sockets: what reaches the client, byte for byte, and what a worker that fails at any moment does.

The law of all these tests: an answer is the small model's or the large one's, never a byte of both, and when it is over
nothing is in flight.
"""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pointsman.app import Gateway
from pointsman.config import Config, GatewayConfig, StaticWorker
from pointsman.domain.acceptor import Acceptor, acceptor_to_json
from pointsman.domain.routes import Route, Step, StreamHold
from pointsman.testing.client import Client, Response, get, post
from pointsman.testing.gateways import ANY, PEPPER, Keys, bearer, configured, counted
from pointsman.testing.origin import (
    Conversation,
    Origin,
    Script,
    answers,
    dead_address,
    hangs,
    json_answer,
    resets,
    sse_chunk,
    sse_head,
)
from pointsman.wire.sse import ERROR_EVENT

pytestmark = pytest.mark.anyio

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "2+2?"}]}
STREAM = CHAT | {"stream": True}
RULE = "mean_logprob > -1.0"
DONE = b"data: [DONE]\n\n"
LAST_CHUNK = b"0\r\n\r\n"
LONG_S = 30.0
"""Seconds of a hold that no test waits for."""


def chat(*logprobs: float, model: str = "small", text: str = "four") -> bytes:
    """A chat answer as an engine writes it, in a spelling that no other encoder would choose."""
    content = [{"token": "t", "logprob": each, "top_logprobs": []} for each in logprobs]
    return (
        b'{ "id":"x\\u002d1", "choices" : [ {"index":0,"logprobs" : %b ,"message":{"role":"assistant",'
        b'"content":"%b-%b"},"finish_reason":"stop"} ],  "model":"%b","usage":{"prompt_tokens":3,'
        b'"completion_tokens":%d,"total_tokens":9}}\n'
    ) % (
        json.dumps({"content": content}).encode() if logprobs else b"null",
        model.encode(),
        text.encode(),
        model.encode(),
        len(logprobs),
    )


def event(*logprobs: float, model: str = "small", text: str = "x") -> bytes:
    """An event of a chat stream; without logprobs it has none."""
    content = [{"token": "t", "logprob": each, "top_logprobs": []} for each in logprobs]
    return (
        b'data: {"choices":[{"index":0, "delta":{"content":"%b-%b"},"logprobs":%b}],"model":"%b"}\n\n'
    ) % (
        model.encode(),
        text.encode(),
        json.dumps({"content": content}).encode() if logprobs else b"null",
        model.encode(),
    )


SURE, UNSURE, KEPT = (
    chat(-0.5, -0.5),
    chat(-2.0, -2.0),
    chat(text="four").replace(b'"completion_tokens":0', b'"completion_tokens":2'),
)
LARGE = chat(model="large")
LARGE_EVENTS = event(model="large", text="1") + event(model="large", text="2") + DONE


def sends(*parts: bytes, close: bool = False) -> Script:
    """Send bytes as they are; then keep the connection, or close it in good order."""

    async def script(talk: Conversation) -> None:
        for part in parts:
            await talk.send(part)
            await asyncio.sleep(0)
        if close:
            talk.close()

    return script


def chunked(*events: bytes) -> bytes:
    """A stream, one event per chunk, ended."""
    return b"".join(map(sse_chunk, events)) + LAST_CHUNK


LARGE_SCRIPT_STREAM = sends(sse_head() + chunked(LARGE_EVENTS))


async def large(talk: Conversation) -> None:
    """Answer as the large model, in the form that was asked for."""
    streamed = json.loads(talk.request.body).get("stream", False)
    await (LARGE_SCRIPT_STREAM if streamed else answers(LARGE))(talk)


class Fleet:
    """Workers of the small model, in the order in which they are asked, one of the large one, a gateway, a client."""

    def __init__(
        self, small: Sequence[Origin | None], large: Origin, gateway: Gateway, client: Client
    ) -> None:
        self._small = small
        self.large = large
        self.gateway = gateway
        self.client = client
        self.stopped = False

    async def stop(self) -> None:
        """Stop the gateway, which takes no more than a few seconds whatever is under way."""
        if not self.stopped:
            self.stopped = True
            await asyncio.wait_for(self.gateway.stop(), 5)

    @property
    def small(self) -> Origin:
        """The first of the small workers."""
        (first, *_) = self._small
        assert first is not None
        return first

    @property
    def small2(self) -> Origin:
        """The second one."""
        (_, second, *_) = self._small
        assert second is not None
        return second

    async def ask(self, body: object, headers: dict[str, str] | None = None) -> Response:
        """Ask, and check that no answer is of two models."""
        response = await self.client.ask(post(body, headers=headers))
        assert not (b"small" in response.body and b"large" in response.body), response.body
        return response

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """Answers of the first step that were kept, rejected, unscored; and how often none came."""
        counts = self.gateway.metrics.calibrations.of("m", 0)
        return counts.kept, counts.rejected, counts.unscored, counts.failed

    @property
    def in_flight(self) -> dict[str, int]:
        """Requests by worker, where there are any."""
        workers = self.gateway.registry.snapshot()
        return {worker.id: worker.in_flight for worker in workers if worker.in_flight}


@asynccontextmanager
async def fleet(
    *small: Script | None,
    last: Script = large,
    rule: str = RULE,
    hold: StreamHold | None = None,
    shadow: float = 0.0,
    **options: Any,
) -> AsyncIterator[Fleet]:
    """Run a cascade; a small worker that is None is not there. Nothing may be in flight at the end."""
    async with AsyncExitStack() as stack:
        origins = [
            await stack.enter_async_context(Origin(each)) if each else None for each in small
        ]
        end = await stack.enter_async_context(Origin(last))
        workers = [
            StaticWorker(
                f"a{n}", f"http://{each.address if each else dead_address()}", model="small"
            )
            for n, each in enumerate(origins)
        ]
        workers.append(StaticWorker("b", f"http://{end.address}", model="large"))
        route = Route(
            "m", cascade=(Step("small", rule), Step("large")), stream_hold=hold, shadow=shadow
        )
        listen = dict.fromkeys(("listen", "health_listen", "registry_listen"), ANY)
        options = {"route_policy": "least_outstanding", "access_log": "off", **listen, **options}
        config = GatewayConfig(workers=tuple(workers), routes=(route,), **options)
        gateway = Gateway(Config(gateway=config), environ=PEPPER)
        await gateway.start()
        client = Client(gateway.address)
        it = Fleet(origins, end, gateway, client)
        stack.push_async_callback(it.stop)
        await stack.enter_async_context(client)
        yield it
        assert it.in_flight == {}


# Plain answers that are kept.

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
CHUNKED_HEAD = HEAD + b"transfer-encoding: chunked\r\n\r\n"


def framed(body: bytes, framing: str) -> Script:
    """Return a script that sends a body in a framing."""
    match framing:
        case "counted":
            return sends(HEAD + b"content-length: %d\r\n\r\n" % len(body), body)
        case "chunked":
            return sends(CHUNKED_HEAD, sse_chunk(body) + LAST_CHUNK)
        case "a chunk per byte":
            chunks = b"".join(sse_chunk(body[n : n + 1]) for n in range(len(body)))
            return sends(CHUNKED_HEAD + chunks + LAST_CHUNK)
        case _:
            return sends(HEAD + b"\r\n" + body, close=True)


FRAMINGS = ["counted", "chunked", "a chunk per byte", "until close"]


@pytest.mark.parametrize("framing", FRAMINGS)
@pytest.mark.parametrize("version", ["1.1", "1.0"])
@pytest.mark.parametrize("named", ["served", "public"])
async def test_a_kept_answer_is_the_engines_but_for_logprobs(
    framing: str, version: str, named: str
) -> None:
    script = framed(SURE, framing)
    async with fleet(script, response_model=named) as it:
        request = post(CHAT).replace(b" HTTP/1.1\r\n", b" HTTP/%b\r\n" % version.encode())
        response = await it.client.ask(request)
        public = KEPT.replace(b'"model":"small"', b'"model":"m"')
        assert (response.status, response.complete) == (200, True)
        assert response.body == (KEPT if named == "served" else public)
        assert it.counts == (1, 0, 0, 0)
        assert it.large.requests == []
        assert json.loads(it.small.requests[0].body) == CHAT | {"model": "small", "logprobs": True}


@pytest.mark.parametrize("framing", FRAMINGS)
async def test_a_client_that_wants_logprobs_gets_every_byte(framing: str) -> None:
    script = framed(SURE, framing)
    async with fleet(script) as it:
        assert (await it.ask(CHAT | {"logprobs": True})).body == SURE


async def test_an_engine_is_not_invited_to_compress_and_one_that_does_is_not_kept() -> None:
    compressed = answers(gzip.compress(SURE), headers=[("content-encoding", "gzip")])
    async with fleet(compressed) as it:
        response = await it.ask(CHAT, {"accept-encoding": "gzip"})
        assert response.body == LARGE
        assert it.counts == (0, 0, 1, 0)
        assert it.small.requests[0].header("accept-encoding") is None


async def test_a_small_answer_larger_than_hold_bytes_is_judged_whole() -> None:
    long = chat(*[-0.5] * 500)
    async with fleet(answers(long), hold_bytes=1024) as it:
        assert len(long) > 20_000
        response = await it.ask(CHAT)
        assert json.loads(response.body)["choices"][0]["logprobs"] is None
        assert it.counts == (1, 0, 0, 0)


async def test_an_escalated_request_reaches_the_large_model_as_the_client_sent_it() -> None:
    async with fleet(answers(UNSURE)) as it:
        body = b'{ "messages":[{"role":"user","content":"2\\u002b2"}], "model":"m" ,"seed": 7}'
        response = await it.ask(body)
        assert response.body == LARGE
        assert it.large.requests[0].body == body.replace(b'"m"', b'"large"')
        assert it.counts == (0, 1, 0, 0)
        assert (await it.ask(CHAT)).body == LARGE
        assert (it.small.connections, it.large.connections) == (1, 1)


# Small workers that fail.

HALF = json_answer(SURE)[:-40]
FAILURES: dict[str, Script | None] = {
    "refused": None,
    "reset at once": resets(),
    "closed at once": sends(close=True),
    "reset in the head": resets(b"HTTP/1.1 200 OK\r\ncontent-ty"),
    "reset in the body": resets(HALF),
    "closed in the body": sends(HALF, close=True),
    "closed in an open body": sends(HEAD + b"\r\n" + SURE[:-40], close=True),
    "hangs": hangs(),
    "hangs in the head": hangs(b"HTTP/1.1 200 OK\r\n"),
    "hangs after the head": hangs(json_answer(SURE)[: -len(SURE)]),
    "hangs in the body": hangs(HALF),
    "no HTTP": sends(b"SSH-2.0\r\n\r\n"),
    "bad chunks": sends(CHUNKED_HEAD + b"zz\r\n"),
    "429": answers({"error": "full"}, 429),
    "503": answers({"error": "draining"}, 503),
}
QUICK: dict[str, Any] = dict.fromkeys(
    ("head_timeout_s", "first_byte_timeout_s", "gap_timeout_s"), 0.1
)


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("body", [CHAT, STREAM], ids=["plain", "stream"])
async def test_a_small_worker_that_fails_is_replaced_and_a_step_without_any_is_skipped(
    failure: str, body: dict[str, Any]
) -> None:
    hold = StreamHold(2, LONG_S)
    async with fleet(FAILURES[failure], hold=hold, **QUICK) as it:
        response = await it.ask(body)
        assert (response.status, response.complete) == (200, True)
        assert response.body == (LARGE_EVENTS if body is STREAM else LARGE)
        assert it.counts == (0, 0, 0, 1)

    good = sends(sse_head() + chunked(event(-0.5, -0.5), DONE)) if body is STREAM else answers(SURE)
    async with fleet(FAILURES[failure], good, hold=hold, **QUICK) as it:
        response = await it.ask(body)
        assert (response.status, response.complete) == (200, True)
        assert response.body == (event() + DONE if body is STREAM else KEPT)
        assert it.counts == (1, 0, 0, 0)
        assert it.large.requests == []


@pytest.mark.parametrize("status", [400, 404, 500])
async def test_an_error_of_the_small_model_is_the_large_ones_to_answer(status: int) -> None:
    async with fleet(answers({"error": {"message": "small"}}, status)) as it:
        assert (await it.ask(CHAT)).body == LARGE
        assert it.counts == (0, 0, 1, 0)


async def test_when_all_are_full_the_client_gets_the_last_models_429() -> None:
    async with fleet(answers({"error": "small"}, 429), last=answers({"error": "large"}, 429)) as it:
        response = await it.ask(CHAT)
        assert (response.status, response.body) == (429, b'{"error":"large"}')
        assert response.header("retry-after") == "1"


# Streams that are held.

HOLD = StreamHold(2, LONG_S)
HEADS = {"chunked": sse_head(), "open": sse_head().replace(b"transfer-encoding: chunked\r\n", b"")}
FOUR = [event(-0.5, text=str(n)) for n in range(4)]
FOUR_UNSURE = [event(-2.0, text=str(n)) for n in range(4)]
FOUR_PLAIN = b"".join(event(text=str(n)) for n in range(4)) + DONE


async def test_a_stream_is_let_through_as_soon_as_enough_tokens_are_there() -> None:
    seen = asyncio.Event()

    async def waits(talk: Conversation) -> None:
        await talk.send(sse_head() + sse_chunk(FOUR[0]))
        await talk.send(sse_chunk(FOUR[1]))
        await seen.wait()
        await talk.send(chunked(FOUR[2], FOUR[3], DONE))

    async with fleet(waits, hold=HOLD) as it:
        await it.client.send(post(STREAM))
        first = await it.client.read_until(event(text="1"))
        assert first.startswith(b"HTTP/1.1 200 ")
        assert event(text="0") in first
        seen.set()
        await it.client.read_until(LAST_CHUNK)
        assert it.counts == (1, 0, 0, 0)
        assert it.large.requests == []


@pytest.mark.parametrize("logprob", [-0.5, -2.0])
async def test_a_stream_is_judged_by_what_is_there_when_its_time_is_over(logprob: float) -> None:
    async with fleet(
        hangs(sse_head() + sse_chunk(event(logprob, text="0"))), hold=StreamHold(1000, 0.05)
    ) as it:
        await it.client.send(post(STREAM))
        if logprob == -0.5:
            await it.client.read_until(event(text="0"))
            it.client.leave()
        else:
            assert (await it.client.response()).body == LARGE_EVENTS
        await it.small.left(1)
        assert it.counts == ((1, 0, 0, 0) if logprob == -0.5 else (0, 1, 0, 0))


@pytest.mark.parametrize("version", ["1.1", "1.0"])
@pytest.mark.parametrize("framing", HEADS)
@pytest.mark.parametrize("named", ["served", "public"])
@pytest.mark.parametrize("tokens", [1, 3, 1000])
async def test_a_kept_stream_is_the_engines_but_for_logprobs(
    version: str, framing: str, named: str, tokens: int
) -> None:
    body = chunked(*FOUR, DONE) if framing == "chunked" else b"".join(FOUR) + DONE
    script = sends(HEADS[framing], body, close=framing == "open")
    async with fleet(script, hold=StreamHold(tokens, LONG_S), response_model=named) as it:
        request = post(STREAM).replace(b" HTTP/1.1\r\n", b" HTTP/%b\r\n" % version.encode())
        response = await it.client.ask(request)
        public = FOUR_PLAIN.replace(b'"model":"small"', b'"model":"m"')
        assert response.complete
        assert response.body == (FOUR_PLAIN if named == "served" else public)


@pytest.mark.parametrize("framing", HEADS)
@pytest.mark.parametrize("events", [FOUR, FOUR_UNSURE], ids=["kept", "rejected"])
async def test_a_held_stream_may_be_cut_at_every_byte(framing: str, events: list[bytes]) -> None:
    body = chunked(*events[:3], DONE) if framing == "chunked" else b"".join(events[:3]) + DONE
    positions = iter(range(len(body)))

    async def cuts(talk: Conversation) -> None:
        cut = next(positions)
        await talk.send(HEADS[framing] + body[:cut])
        for _ in range(3):
            await asyncio.sleep(0)
        await talk.send(body[cut:])
        if framing == "open":
            talk.close()

    expected = b"".join(event(text=str(n)) for n in range(3)) + DONE
    async with fleet(cuts, hold=HOLD) as it:
        for _ in range(len(body)):
            response = await it.ask(STREAM)
            assert response.complete
            assert response.body == (expected if events is FOUR else LARGE_EVENTS)


async def test_a_held_stream_that_arrives_byte_by_byte_is_kept() -> None:
    stream = sse_head() + chunked(*FOUR, DONE)
    script = sends(*[stream[n : n + 1] for n in range(len(stream))])
    async with fleet(script, hold=HOLD) as it:
        assert (await it.ask(STREAM)).body == FOUR_PLAIN


async def test_a_stream_that_ends_while_it_is_held_leaves_its_connection_for_the_next() -> None:
    async with fleet(sends(sse_head() + chunked(*FOUR, DONE)), hold=StreamHold(1000, LONG_S)) as it:
        for _ in range(3):
            assert (await it.ask(STREAM)).body == FOUR_PLAIN
        assert it.small.connections == 1
        assert it.counts == (3, 0, 0, 0)


async def test_the_connection_of_a_dropped_stream_is_closed_and_never_used_again() -> None:
    begun = sse_head() + b"".join(map(sse_chunk, FOUR_UNSURE))

    async def goes_on(talk: Conversation) -> None:
        await talk.send(begun)
        await talk.peer_closed()

    async with fleet(goes_on, hold=HOLD) as it:
        for number in range(1, 4):
            assert (await it.ask(STREAM)).body == LARGE_EVENTS
            await it.small.left(number)
        assert it.small.connections == 3
        assert it.large.connections == 1


BROKEN_WHILE_HELD: dict[str, Script] = {
    "reset": resets(sse_head() + sse_chunk(FOUR[0])),
    "closed": sends(sse_head() + sse_chunk(FOUR[0]), close=True),
    "closed in a chunk": sends(sse_head() + sse_chunk(FOUR[0])[:-9], close=True),
    "closed in an open stream": sends(HEADS["open"] + FOUR[0], close=True),
    "closed in an event of an open stream": sends(HEADS["open"] + FOUR[0][:-9], close=True),
    "bad chunk": sends(sse_head() + sse_chunk(FOUR[0]), b"zz\r\n"),
    "silent": hangs(sse_head() + sse_chunk(FOUR[0])),
    "silent in a chunk": hangs(sse_head() + sse_chunk(FOUR[0]) + sse_chunk(FOUR[1])[:-9]),
}


@pytest.mark.parametrize("broken", BROKEN_WHILE_HELD)
async def test_a_stream_that_breaks_while_it_is_held_was_never_there(broken: str) -> None:
    second = sends(sse_head() + chunked(event(-0.1, -0.1, text="second"), DONE))
    hold = StreamHold(2, LONG_S)
    async with fleet(BROKEN_WHILE_HELD[broken], second, hold=hold, gap_timeout_s=0.1) as it:
        assert (await it.ask(STREAM)).body == event(text="second") + DONE
        assert it.counts == (1, 0, 0, 0)
        assert it.large.requests == []
    async with fleet(BROKEN_WHILE_HELD[broken], hold=hold, gap_timeout_s=0.1) as it:
        assert (await it.ask(STREAM)).body == LARGE_EVENTS
        assert it.counts == (0, 0, 0, 1)


async def test_a_client_that_leaves_while_its_stream_is_held_ends_it() -> None:
    async with fleet(hangs(sse_head() + sse_chunk(FOUR[0])), hold=StreamHold(9, 0.2)) as it:
        for number in range(1, 6):
            async with Client(it.gateway.address) as client:
                await client.send(post(STREAM))
                await it.small.received(number)
                client.leave()
            await it.small.left(number)
        # Longer than the hold: a timer that is still set would find a story that is over.
        await asyncio.sleep(0.3)
        assert it.large.requests == []
        assert it.counts == (0, 0, 0, 0)


async def test_a_client_that_does_not_read_gets_a_held_stream_whole() -> None:
    texts = [event(-0.5, text="x" * 4000) for _ in range(3000)]
    async with fleet(
        sends(sse_head() + chunked(*texts, DONE)), hold=StreamHold(1000, LONG_S)
    ) as it:
        await it.client.send(post(STREAM))
        it.client.stop_reading()
        await it.small.received(1)
        await asyncio.sleep(0.3)
        it.client.go_on_reading()
        response = await it.client.response()
        assert response.complete
        assert response.body == event(text="x" * 4000) * 3000 + DONE


async def test_a_gateway_that_stops_while_a_stream_is_held_says_so() -> None:
    async with fleet(hangs(sse_head() + sse_chunk(FOUR[0])), hold=StreamHold(9, 0.2)) as it:
        await it.client.send(post(STREAM))
        await it.small.received(1)
        await asyncio.sleep(0.05)
        await it.stop()
        response = await it.client.response()
        assert response.status == 503
        assert b"small" not in response.body
        await it.small.left(1)
        await asyncio.sleep(0.3)
        assert it.large.requests == []


async def test_what_arrives_just_when_the_time_is_over_is_in_its_place_or_nowhere() -> None:
    hold_s = 0.01

    async def at_the_moment(talk: Conversation) -> None:
        loop = asyncio.get_running_loop()
        number = len(it.small.requests)
        logprobs = FOUR if number % 2 else FOUR_UNSURE
        begun = loop.time()
        await talk.send(sse_head() + sse_chunk(logprobs[0]))
        # Around the end of the hold, by a millisecond to either side.
        await asyncio.sleep(begun + hold_s - 0.001 + number % 20 * 0.0001 - loop.time())
        await talk.send(sse_chunk(logprobs[1]))
        await talk.send(chunked(logprobs[2], logprobs[3], DONE))

    async with fleet(at_the_moment, hold=StreamHold(3, hold_s)) as it:
        for number in range(1, 101):
            response = await it.ask(STREAM)
            assert response.complete
            assert response.body == (FOUR_PLAIN if number % 2 else LARGE_EVENTS)


@pytest.mark.parametrize("end", ["whole", "broken"])
async def test_an_open_stream_that_ends_just_when_its_time_is_over_is_told_apart(end: str) -> None:
    hold_s = 0.01
    rest = DONE if end == "whole" else b""

    async def at_the_moment(talk: Conversation) -> None:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        await talk.send(HEADS["open"] + FOUR[0] + FOUR[1] + rest[:-1])
        number = len(it.small.requests)
        await asyncio.sleep(begun + hold_s - 0.001 + number % 20 * 0.0001 - loop.time())
        await talk.send(rest[-1:])
        talk.close()

    async with fleet(at_the_moment, hold=StreamHold(9, hold_s)) as it:
        for _ in range(100):
            response = await it.ask(STREAM)
            if end == "whole":
                assert response.body == event(text="0") + event(text="1") + DONE
            else:
                # Let through at that moment or dropped; what is let through says that it broke.
                both = event(text="0") + event(text="1")
                assert response.body in (LARGE_EVENTS, both + ERROR_EVENT)


async def test_a_request_whose_time_is_over_while_it_is_held_gets_a_504() -> None:
    script = hangs(sse_head() + sse_chunk(FOUR[0]))
    async with fleet(script, hold=StreamHold(9, LONG_S), total_timeout_s=0.2, last=hangs()) as it:
        response = await it.ask(STREAM)
        assert response.status == 504
        assert it.counts == (0, 0, 0, 1)
        await it.small.left(1)


# Shadows.


async def test_a_shadow_delays_nobody_and_its_comparison_is_kept() -> None:
    free = asyncio.Event()

    async def slow(talk: Conversation) -> None:
        await free.wait()
        await answers(LARGE)(talk)

    async with fleet(answers(SURE), last=slow, shadow=1.0) as it:
        assert (await it.ask(CHAT)).body == KEPT
        await it.large.received(1)
        assert it.in_flight == {"b": 1}
        assert json.loads(it.large.requests[0].body) == CHAT | {"model": "large"}
        free.set()
        while it.in_flight:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        (sample,) = it.gateway.metrics.calibrations.of("m", 0).samples
        assert sample.value == -0.5
        assert 0 <= sample.agreement < 1


@pytest.mark.parametrize("failure", [name for name, script in FAILURES.items() if script])
async def test_a_shadow_that_fails_is_nobodys_loss(failure: str) -> None:
    script = FAILURES[failure]
    assert script is not None
    async with fleet(answers(SURE), last=script, shadow=1.0, **QUICK) as it:
        assert (await it.ask(CHAT)).body == KEPT
        await it.large.received(1)
        while it.in_flight:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert not it.gateway.metrics.calibrations.of("m", 0).samples


async def test_an_answer_that_is_not_kept_is_compared_without_another_request() -> None:
    async with fleet(answers(UNSURE), shadow=1.0) as it:
        assert (await it.ask(CHAT)).body == LARGE
        (sample,) = it.gateway.metrics.calibrations.of("m", 0).samples
        assert sample.value == -2.0
        assert len(it.large.requests) == 1


async def test_shadows_that_hang_are_few_and_those_that_are_left_out_are_counted() -> None:
    async with fleet(answers(SURE), last=hangs(), shadow=1.0) as it:
        for _ in range(70):
            assert (await it.ask(CHAT)).body == KEPT
        await it.large.received(64)
        assert it.in_flight == {"b": 64}
        assert counted(it.gateway, 'tl_gateway_calls_dropped_total{kind="optional"}') == 6
        assert counted(it.gateway, 'tl_gateway_calls_dropped_total{kind="required"}') == 0
        await it.stop()


async def test_a_gateway_with_shadows_under_way_stops_in_time() -> None:
    async with fleet(answers(SURE), last=hangs(), shadow=1.0) as it:
        for _ in range(10):
            assert (await it.ask(CHAT)).body == KEPT
        await it.large.received(10)
        assert it.in_flight == {"b": 10}
        await it.stop()
        await it.large.left(10)


# What operators see.


async def test_who_answered_and_what_was_thought_of_it_can_be_seen(tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    debug, plain, admin = keys.make("infer", "debug"), keys.make("infer"), keys.make("admin")
    turn: list[Script] = [
        answers(SURE),
        answers(UNSURE),
        answers(SURE),
        answers(b"?"),
        resets(HALF),
    ]

    async def small(talk: Conversation) -> None:
        await turn[len(it.small.requests) - 1](talk)

    async with fleet(small, **keys.options) as it:
        response = await it.ask(CHAT, bearer(debug))
        assert response.header("x-tl-route") == "a0"
        response = await it.ask(CHAT, bearer(debug))
        assert response.header("x-tl-route") == "b"
        for _ in range(3):
            assert (await it.ask(CHAT, bearer(plain))).header("x-tl-route") is None

        seen = await it.client.ask(get("/admin/v1/cascades", bearer(admin)))
        ((step,),) = [each["steps"] for each in msgspec.json.decode(seen.body)["data"]]
        verdicts = ("kept", "rejected", "unscored", "failed")
        assert [step[each] for each in verdicts] == [2, 1, 1, 1]
        assert (step["model"], step["acceptance"]) == ("small", 0.5)
        assert (step["rejected_prompt_tokens"], step["rejected_completion_tokens"]) == (3, 2)
        for verdict, count in zip(verdicts, (2, 1, 1, 1), strict=True):
            name = f'tl_gateway_cascade_answers_total{{model="m",step="0",verdict="{verdict}"}}'
            assert counted(it.gateway, name) == count

        seen = await it.client.ask(get("/admin/v1/decisions", bearer(admin)))
        tries = [each["attempts"] for each in msgspec.json.decode(seen.body)["data"]][::-1]
        assert [[each["worker_id"] for each in attempts] for attempts in tries] == [
            ["a0"],
            ["a0", "b"],
            ["a0"],
            ["a0", "b"],
            ["a0", "b"],
        ]
        assert [attempts[0]["verdict"] for attempts in tries[:2]] == [
            {"value": -0.5, "kept": True, "prompt_tokens": 3, "completion_tokens": 2},
            {"value": -2.0, "kept": False, "prompt_tokens": 3, "completion_tokens": 2},
        ]


# Learned acceptors, and routes.

EASY = Acceptor(("mean_logprob",), (-1.0,), (0.5,), (4.0,), 0.0)
ALWAYS = Acceptor(("mean_logprob",), (-1.0,), (0.5,), (0.0,), 9.0)


def written(folder: Path, *origins: Origin, routed: str = "easy") -> Path:
    """Write a configuration in which the acceptor `easy` judges; its file is `easy.json`."""
    small, end = origins
    source = folder / "gateway.toml"
    source.write_text(
        f"""
        [gateway]
        access_log = "off"
        acceptors = [{{ name = "easy", file = "{folder / "easy.json"}" }}]
        [[gateway.workers]]
        id = "a"
        url = "http://{small.address}"
        model = "small"
        [[gateway.workers]]
        id = "b"
        url = "http://{end.address}"
        model = "large"
        [[gateway.routes]]
        model = "m"
        cascade = [
            {{ model = "small", accept_if = "score > 0.5", acceptor = "{routed}" }},
            {{ model = "large" }},
        ]
        """
    )
    return source


async def test_a_learned_acceptor_judges_and_a_bad_file_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "easy.json"
    file.write_bytes(acceptor_to_json(EASY))
    async with (
        Origin(answers(SURE), answers(UNSURE)) as small,
        Origin(large) as end,
        configured(written(tmp_path, small, end)) as gateway,
        Client(gateway.address) as client,
    ):
        assert (await client.ask(post(CHAT))).body == KEPT
        assert (await client.ask(post(CHAT))).body == LARGE
        reload = post(b"", "/admin/v1/config:reload")
        for bad in (b"", b"{", b'{"features":["nothing"]}', None):
            file.write_bytes(bad) if bad is not None else file.unlink()
            refused = await client.ask(reload)
            assert refused.status == 400, refused.body
            assert (await client.ask(post(CHAT))).body == LARGE
        file.write_bytes(acceptor_to_json(EASY))
        written(tmp_path, small, end, routed="hard")
        assert (await client.ask(reload)).status == 400
        assert (await client.ask(post(CHAT))).body == LARGE
        written(tmp_path, small, end)
        file.write_bytes(acceptor_to_json(ALWAYS))
        assert (await client.ask(reload)).status == 200
        assert b"small" in (await client.ask(post(CHAT))).body
    assert len(caplog.records) == 5
    caplog.clear()


async def test_a_route_whose_acceptor_nobody_knows_is_refused(tmp_path: Path) -> None:
    (tmp_path / "easy.json").write_bytes(acceptor_to_json(EASY))
    async with (
        Origin(answers(SURE)) as small,
        Origin(large) as end,
        configured(written(tmp_path, small, end)) as gateway,
        Client(gateway.address) as client,
    ):

        def routes(acceptor: str) -> bytes:
            step = {"model": "small", "accept_if": "score > 0.99", "acceptor": acceptor}
            body = {"routes": [{"model": "m", "cascade": [step, {"model": "large"}]}]}
            return post(body, "/admin/v1/routes", {"if-match": tag}, "PUT")

        tag = (await client.ask(get("/admin/v1/routes"))).header("etag") or "*"
        refused = await client.ask(routes("hard"))
        assert refused.status == 400
        assert refused.error["param"] == "routes[0].cascade[0].acceptor"
        assert (await client.ask(post(CHAT))).body == KEPT
        assert (await client.ask(routes("easy"))).status == 200
        assert (await client.ask(post(CHAT))).body == LARGE
