"""Answers on their way to the client, over real sockets: every byte as it came, wherever the engine cut its writes."""

import asyncio
import tracemalloc
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from pointsman.domain.routes import Backend, Route
from pointsman.testing.client import Client, post
from pointsman.testing.gateways import counted, fronted, running
from pointsman.testing.origin import (
    Conversation,
    Origin,
    Script,
    answers,
    event,
    json_answer,
    sse_chunk,
    sse_head,
    streams,
)
from pointsman.wire.sse import ERROR_EVENT, ends_event

pytestmark = pytest.mark.anyio

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
STREAM = CHAT | {"stream": True}
MODELS = b"GET /v1/models HTTP/1.1\r\nhost: gateway\r\n\r\n"
DONE = b"data: [DONE]\n\n"
END = b"0\r\n\r\n"

TEXTS = ["The", " 北", "京 😀", "data: [DONE]\n\n", "\u2028", '"}\\']
RECORDED = [
    b": ping\n\n",
    *map(event, TEXTS),
    b'data:{"no":"space"}\n\n',
    b'event: message\r\nid: 7\r\ndata: {"crlf":1}\r\n\r\n',
    b'data: {"multi":\ndata: "line"}\n\n',
    b"retry: 10\n\n",
    DONE,
]
"""Chunks as an engine writes them: one event each."""

SPLIT = [b"".join(RECORDED)[at : at + 31] for at in range(0, len(b"".join(RECORDED)), 31)]
"""The same bytes in chunks that end in the middle of events and of characters."""


def framed(chunks: list[bytes]) -> bytes:
    return b"".join(map(sse_chunk, chunks)) + END


def cut_at(data: bytes, positions: Iterator[int], other: Client, *, ends: bool = False) -> Script:
    """Send data in two pieces that the gateway reads apart, cut elsewhere for every request; or only the first one."""

    async def script(talk: Conversation) -> None:
        at = next(positions)
        await talk.send(data[:at])
        # Once another client has its answer, the gateway has read the first piece.
        await other.ask(MODELS)
        if ends:
            talk.reset()
        else:
            await talk.send(data[at:])

    return script


@pytest.mark.parametrize("chunks", [RECORDED, SPLIT], ids=["events", "pieces"])
async def test_s01_s02_s03_a_stream_is_relayed_byte_for_byte_at_every_cut(
    chunks: list[bytes],
) -> None:
    body = framed(chunks)
    head = sse_head()
    count = len(head + body) + 1
    async with fronted() as (origin, gateway, client), Client(gateway.address) as other:
        origin.scripts = [cut_at(head + body, iter(range(count)), other)]
        for position in range(count):
            await client.send(post(STREAM))
            status, headers = await client.head()
            assert (status, dict(headers)["transfer-encoding"]) == (200, "chunked")
            assert await client.read(len(body)) == body, position
    assert origin.connections == 1


async def test_s01_a_stream_may_come_byte_by_byte() -> None:
    body = framed(RECORDED)

    async def drips(talk: Conversation) -> None:
        for byte in sse_head() + body:
            await talk.send(bytes((byte,)))

    async with fronted(drips) as (_, _, client):
        await client.send(post(STREAM))
        await client.head()
        assert await client.read(len(body)) == body


async def test_events_reach_the_client_while_the_stream_runs() -> None:
    seen = asyncio.Event()

    async def waits(talk: Conversation) -> None:
        await talk.send(sse_head() + sse_chunk(b": ping\n\n"))
        await seen.wait()
        await talk.send(sse_chunk(event("a")) + END)

    async with fronted(waits) as (_, _, client):
        await client.send(post(STREAM))
        await client.head()
        assert await client.read_until(b"\n\n\r\n") == sse_chunk(b": ping\n\n")
        seen.set()
        assert await client.read_until(END) == sse_chunk(event("a")) + END


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_s06_include_usage_passes_through_exactly(path: str) -> None:
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":9, "completion_tokens":3}}\n\n'
    body = b'{"model":"m", "stream" : true,"stream_options":{"include_usage":true},"prompt":"x"}'
    chunks = [event("a"), usage, DONE]

    async def script(talk: Conversation) -> None:
        await talk.send(sse_head() + framed(chunks))

    async with fronted(script) as (origin, _, client):
        response = await client.ask(post(body, path))
        assert response.body == event("a") + usage + DONE
    assert origin.requests[0].body == body


@pytest.mark.parametrize("option", ["served", "public"])
async def test_s10_s11_nothing_is_added_to_a_stream_of_tool_calls(option: str) -> None:
    def fragment(number: int) -> bytes:
        call = {"index": number % 2, "function": {"arguments": f'{{"{number}'}}
        delta = {"index": 0, "delta": {"tool_calls": [call]}, "finish_reason": None}
        return b"data: %b\n\n" % msgspec.json.encode({"choices": [delta]})

    last = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"tool_calls"}]}\n\n'
    chunks = [*map(fragment, range(50)), last, DONE]

    async def script(talk: Conversation) -> None:
        await talk.send(sse_head())
        for each in chunks:
            await talk.send(sse_chunk(each))
        await talk.send(END)

    async with fronted(script, response_model=option) as (_, _, client):
        response = await client.ask(post(STREAM))
        assert response.body == b"".join(chunks)
        assert response.complete


# Back-pressure.


def floods(sent: list[int], chunks: int, size: int = 65536) -> Script:
    """Stream many large events as fast as they are taken, and note the number of each that was."""

    async def script(talk: Conversation) -> None:
        await talk.send(sse_head())
        for number in range(chunks):
            data = b"data: %08d %b\n\n" % (number, b"x" * (size - 17))
            await talk.send(sse_chunk(data))
            sent.append(number)
        await talk.send(END)

    return script


async def standstill(sent: list[int], other: Client) -> None:
    """Wait until nothing more has been sent for a long time, in round trips through the gateway."""
    before, still = -1, 0
    while still < 100:
        still = still + 1 if len(sent) == before else 0
        before = len(sent)
        await other.ask(MODELS)


async def test_s13_a_client_that_does_not_read_stops_the_engine() -> None:
    sent: list[int] = []
    async with (
        fronted(floods(sent, 1000)) as (_, gateway, client),
        Client(gateway.address) as other,
    ):
        await client.send(post(STREAM))
        await client.head()
        client.stop_reading()
        await standstill(sent, other)
        # What is under way is in the kernel's buffers, and a bounded rest in the gateway's.
        assert len(sent) * 65536 < 24 << 20
        client.go_on_reading()
        for number in range(1000):
            assert await client.read_until(b"\r\n") == b"10000\r\n"
            assert (await client.read(65538))[:14] == b"data: %08d" % number
        assert await client.read(5) == END
        # The connection is in order on both sides.
        assert (await client.ask(MODELS)).status == 200


async def test_s12_the_memory_of_a_stream_does_not_grow_with_it() -> None:
    sent: list[int] = []
    chunks = 4000
    async with fronted(floods(sent, chunks, 4096)) as (_, _, client):
        await client.send(post(STREAM))
        await client.head()
        await client.read(1 << 20)
        tracemalloc.start()
        try:
            for _ in range(14):
                await client.read(1 << 20)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        # 14 MiB went through; the test's own reads are 1 MiB and their parts.
        assert peak < 8 << 20


async def test_a_plain_answer_over_the_hold_is_relayed_with_back_pressure() -> None:
    body = b'"%b"' % (b"x" * (40 << 20))
    sent: list[int] = []

    async def script(talk: Conversation) -> None:
        whole = json_answer(body)
        for at in range(0, len(whole), 1 << 20):
            await talk.send(whole[at : at + (1 << 20)])
            sent.append(at)

    async with fronted(script) as (_, gateway, client), Client(gateway.address) as other:
        await client.send(post(CHAT))
        client.stop_reading()
        await standstill(sent, other)
        assert len(sent) < 24
        client.go_on_reading()
        response = await client.response()
        assert (response.complete, response.body == body) == (True, True)


# Streams that break.


def whole_chunks(chunks: list[bytes], sent: bytes) -> bytes:
    """Return the payload of the chunks that are whole in what was sent."""
    found = b""
    for each in chunks:
        wire = sse_chunk(each)
        if not sent.startswith(wire):
            break
        found, sent = found + each, sent[len(wire) :]
    return found


@pytest.mark.parametrize("chunks", [RECORDED[:4], SPLIT[:4]], ids=["events", "pieces"])
async def test_f03_a_stream_that_breaks_anywhere_ends_with_one_error_event(
    chunks: list[bytes],
) -> None:
    """Between events, in the middle of one, in the middle of a chunk, before the first byte: no splice, no silence."""
    head, body = sse_head(), framed(chunks)
    count = len(head + body)
    async with Origin() as dying, Origin(streams("another")) as second:
        workers = {"a": dying.address, "b": second.address}
        async with running(workers) as gateway, Client(gateway.address) as other:
            dying.scripts = [cut_at(head + body, iter(range(count)), other, ends=True)]
            for position in range(count):
                asked = len(second.requests)
                async with Client(gateway.address) as client:
                    response = await client.ask(post(STREAM))
                assert (response.status, response.complete) == (200, True)
                came = whole_chunks(chunks, body[: max(0, position - len(head))])
                if came:
                    gap = b"" if ends_event(came) else b"\n\n"
                    assert response.body == came + gap + ERROR_EVENT, position
                    assert len(second.requests) == asked
                else:
                    assert response.body == event("another") + DONE, position
                    assert len(second.requests) == asked + 1
            assert [worker.in_flight for worker in gateway.registry.snapshot()] == [0, 0]
            assert counted(gateway, "tl_gateway_faults_total") == 0


@pytest.mark.parametrize("tail", [b"", b"5\r\nda", b"zz\r\n", b"2\r\nabc\r\n"])
async def test_a_stream_that_turns_to_nonsense_ends_with_the_error_event(tail: bytes) -> None:
    async def script(talk: Conversation) -> None:
        await talk.send(sse_head() + sse_chunk(event("a")))
        await seen.wait()
        await talk.send(tail)
        if tail == b"5\r\nda" or not tail:
            talk.close()
        else:
            await talk.peer_closed()

    seen = asyncio.Event()
    async with fronted(script) as (_, _, client):
        await client.send(post(STREAM))
        await client.head()
        await client.read_until(b"\n\n\r\n")
        seen.set()
        assert await client.read_until(END) == sse_chunk(ERROR_EVENT) + END


async def test_an_old_client_gets_the_error_event_without_chunks() -> None:
    async def script(talk: Conversation) -> None:
        await talk.send(sse_head() + sse_chunk(event("a")[:-1]))
        talk.close()

    async with fronted(script) as (_, _, client):
        response = await client.ask(post(STREAM).replace(b"HTTP/1.1", b"HTTP/1.0"))
        assert response.body == event("a")[:-1] + b"\n\n" + ERROR_EVENT


async def test_a_plain_answer_that_breaks_after_the_commit_ends_short() -> None:
    async def script(talk: Conversation) -> None:
        await talk.send(json_answer(b'"%b"' % (b"x" * 5000))[:-1000])
        await seen.wait()
        talk.reset()

    seen = asyncio.Event()
    async with Origin(script) as dying, Origin(answers({})) as second:
        workers = {"a": dying.address, "b": second.address}
        async with running(workers, hold_bytes=1000) as gateway, Client(gateway.address) as client:
            await client.send(post(CHAT))
            await client.head()
            seen.set()
            assert await client.rest() == b'"%b' % (b"x" * 4001)
    assert second.requests == []


# The public model id (H03).


def aliased(**options: Any) -> dict[str, Any]:
    return {
        "routes": (Route(model="public", aliases=("alias",), backends=(Backend(model="m"),)),),
        "response_model": "public",
        **options,
    }


ALIASED = STREAM | {"model": "alias"}
SERVED = [
    b'data: {"id":1, "model" : "m","choices":[{"delta":{"content":"\\"model\\":\\"m\\" m"}}]}\n\n',
    b": model m\n\n",
    b'event: x\r\ndata: {"response":{"model":"m","x":"m"},"model":"m"}\r\n\r\n',
    b'data: {"message":{"model":"m"}}\n\n',
    b'data: {"content":"m","nested":{"model":"m"}}\n\n',
    b"data: not json, model m\n\n",
    DONE,
]
PUBLIC = [
    b'data: {"id":1, "model" : "alias","choices":[{"delta":{"content":"\\"model\\":\\"m\\" m"}}]}\n\n',
    b": model m\n\n",
    b'event: x\r\ndata: {"response":{"model":"alias","x":"m"},"model":"alias"}\r\n\r\n',
    b'data: {"message":{"model":"alias"}}\n\n',
    *SERVED[4:],
]


async def test_h03_the_public_model_stands_in_every_event_at_every_cut() -> None:
    pieces = [b"".join(SERVED)[at : at + 29] for at in range(0, len(b"".join(SERVED)), 29)]
    for chunks in (SERVED, pieces):
        body = framed(chunks)
        count = len(body)
        async with (
            fronted(**aliased()) as (origin, gateway, client),
            Client(gateway.address) as other,
        ):
            cuts = iter(range(len(sse_head()), len(sse_head()) + count))
            origin.scripts = [cut_at(sse_head() + body, cuts, other)]
            for position in range(count):
                response = await client.ask(post(ALIASED))
                assert response.body == b"".join(PUBLIC), position
                assert response.complete


@pytest.mark.parametrize("framing", ["counted", "chunked", "until close"])
async def test_h03_the_public_model_stands_in_plain_answers(framing: str) -> None:
    body = b'{"id": 1.0,\n "model":"m", "choices":[{"text":"\\"model\\":\\"m\\""}], "usage":null}'
    kind = b"content-type: application/json\r\n"
    wire = {
        "counted": json_answer(body),
        "chunked": b"HTTP/1.1 200 OK\r\n%btransfer-encoding: chunked\r\n\r\n" % kind
        + sse_chunk(body[:11])
        + sse_chunk(body[11:])
        + END,
        "until close": b"HTTP/1.1 200 OK\r\n%b\r\n%b" % (kind, body),
    }

    async def script(talk: Conversation) -> None:
        await talk.send(wire[framing])
        if framing == "until close":
            talk.close()

    async with fronted(script, **aliased()) as (origin, _, client):
        response = await client.ask(post(CHAT | {"model": "alias"}))
        assert response.body == body.replace(b'"model":"m"', b'"model":"alias"', 1)
        assert response.complete
    assert msgspec.json.decode(origin.requests[0].body)["model"] == "m"


async def test_h03_a_stream_with_the_public_model_that_breaks_ends_with_the_error_event() -> None:
    async def script(talk: Conversation) -> None:
        await talk.send(sse_head() + sse_chunk(SERVED[0]) + sse_chunk(SERVED[3][:-3]))
        talk.close()

    async with fronted(script, **aliased()) as (_, _, client):
        response = await client.ask(post(ALIASED))
        assert response.body.startswith(PUBLIC[0])
        assert response.body.endswith(b"\n\n" + ERROR_EVENT)
        assert response.complete


async def test_by_default_the_model_is_relayed_as_the_engine_sent_it() -> None:
    options = aliased(response_model="served")
    body = b'{"model":"m"}'
    async with fronted(answers(body), **options) as (_, _, client):
        assert (await client.ask(post(CHAT | {"model": "alias"}))).body == body
