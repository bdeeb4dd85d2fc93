"""Connections to engines, over real sockets: reuse, limits, stale ones, and engines that do not speak HTTP well."""

import asyncio
import gzip
from math import inf
from typing import Any

import pytest

from pointsman.domain.worker import Worker
from pointsman.flow.effects import Answer, Broken, Done, Lost
from pointsman.net.clock import Deadlines
from pointsman.net.limits import UpstreamLimits
from pointsman.net.observer import Silent
from pointsman.net.pool import Pool
from pointsman.net.relay import Relay
from pointsman.net.upstream import Upstream
from pointsman.testing.client import Client, Response, post
from pointsman.testing.gateways import counted, fronted, running
from pointsman.testing.origin import (
    Conversation,
    Origin,
    Script,
    answers,
    event,
    hangs,
    json_answer,
    resets,
    sse_chunk,
    sse_head,
    streams,
)

pytestmark = pytest.mark.anyio

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
STREAM = CHAT | {"stream": True}
OK = json_answer({"ok": 1})
DONE = b"data: [DONE]\n\n"


def says(*parts: bytes, close: bool = False) -> Script:
    """Send bytes as they are; then keep the connection, or close it in good order."""

    async def script(talk: Conversation) -> None:
        for part in parts:
            await talk.send(part)
        if close:
            talk.close()

    return script


async def at_once(gateway_address: tuple[str, int], count: int, body: object) -> list[Response]:
    """Send that many requests at the same time, each on a connection of its own."""

    async def one() -> Response:
        async with Client(gateway_address) as client:
            return await client.ask(post(body))

    return list(await asyncio.gather(*(one() for _ in range(count))))


# Reuse.


async def test_a_connection_is_reused_after_plain_and_streamed_answers() -> None:
    async with fronted(answers({}), streams("a"), says(OK)) as (origin, _, client):
        for body in (CHAT, STREAM, CHAT, CHAT):
            assert (await client.ask(post(body))).complete
    assert [request.connection for request in origin.requests] == [1, 1, 1, 1]


async def test_the_connection_that_was_used_last_is_used_first() -> None:
    released = [asyncio.Event() for _ in range(3)]

    async def waits(talk: Conversation) -> None:
        await released[talk.request.connection - 1].wait()
        await talk.send(OK)

    async with fronted(waits, waits, waits, answers({})) as (origin, gateway, client):
        clients = [client, Client(gateway.address), Client(gateway.address)]
        async with clients[1], clients[2]:
            for number, each in enumerate(clients, start=1):
                await each.send(post(CHAT))
                await origin.received(number)
            for number in (1, 3, 2):
                released[number - 1].set()
                assert (await clients[number - 1].response()).status == 200
            for each in clients:
                await each.ask(post(CHAT))
    assert [request.connection for request in origin.requests] == [1, 2, 3, 2, 2, 2]


async def test_an_idle_connection_is_closed_below_the_limit_of_engines() -> None:
    async with fronted(answers({}), upstream_keepalive_s=0.2) as (origin, gateway, client):
        await client.ask(post(CHAT))
        await origin.left(1)
        assert counted(gateway, 'tl_gateway_connections{side="upstream"}') == 0
        assert (await client.ask(post(CHAT))).status == 200
    assert origin.connections == 2
    assert counted(gateway, "tl_gateway_stale_connection_resends_total") == 0


async def test_no_more_idle_connections_are_kept_than_allowed() -> None:
    async with fronted(answers({}), upstream_idle_max=2) as (origin, gateway, _):
        assert all(each.status == 200 for each in await at_once(gateway.address, 6, CHAT))
        await origin.left(origin.connections - 2)
        assert counted(gateway, 'tl_gateway_connections{side="upstream"}') == 2


@pytest.mark.parametrize(
    "answer",
    [
        json_answer({}, headers=[("connection", "close")]),
        json_answer({}).replace(b"HTTP/1.1", b"HTTP/1.0"),
        json_answer({}) + b"surplus",
        json_answer({}) + OK,
        sse_head() + sse_chunk(event("a")) + b"0\r\n\r\n" + OK,
        sse_head() + sse_chunk(event("a")) + b"0\r\nx: y\r\n\r\n\r\n",
    ],
)
async def test_a_connection_that_cannot_be_trusted_is_not_reused(answer: bytes) -> None:
    async with fronted(says(answer), answers({"n": 2})) as (origin, _, client):
        assert (await client.ask(post(CHAT))).status == 200
        assert (await client.ask(post(CHAT))).body == b'{"n":2}'
    assert origin.connections == 2


async def test_an_engine_that_speaks_unasked_is_not_believed() -> None:
    async def unasked(talk: Conversation) -> None:
        await talk.send(OK)
        await asked_again.wait()
        await talk.send(json_answer({"ok": "of nobody"}))
        await talk.peer_closed()

    asked_again = asyncio.Event()
    async with fronted(unasked, answers({"n": 2})) as (origin, _, client):
        await client.ask(post(CHAT))
        asked_again.set()
        await origin.left(1)
        assert (await client.ask(post(CHAT))).body == b'{"n":2}'
    assert origin.connections == 2


# Stale connections (F02).


async def test_f02_a_stale_connection_is_replaced_by_a_fresh_one() -> None:
    """The engine closes its idle connection at the very moment when the next request arrives there."""
    async with fronted(answers({}), resets(), answers({"n": 2})) as (origin, gateway, client):
        await client.ask(post(CHAT))
        response = await client.ask(post(CHAT))
        assert (response.status, response.body) == (200, b'{"n":2}')
        assert counted(gateway, "tl_gateway_stale_connection_resends_total") == 1
        assert counted(gateway, "tl_gateway_failovers_total") == 0
    assert [request.connection for request in origin.requests] == [1, 1, 2]


async def test_f02_an_idle_connection_closed_in_time_is_noticed() -> None:
    async with fronted(says(OK, close=True), answers({"n": 2})) as (origin, gateway, client):
        await client.ask(post(CHAT))
        await origin.left(1)
        assert (await client.ask(post(CHAT))).body == b'{"n":2}'
        assert counted(gateway, "tl_gateway_failovers_total") == 0


@pytest.mark.parametrize("way", [resets(), says(close=True)])
async def test_f02_two_stale_connections_in_a_row(way: Script) -> None:
    """Both idle connections are stale: the resend must not take the second one."""
    both = asyncio.Barrier(2)

    async def together(talk: Conversation) -> None:
        await both.wait()
        await talk.send(OK)

    async with fronted(together, together, way, answers({"n": 4})) as (origin, gateway, client):
        await at_once(gateway.address, 2, CHAT)
        response = await client.ask(post(CHAT))
        assert (response.status, response.body) == (200, b'{"n":4}')
        assert counted(gateway, "tl_gateway_stale_connection_resends_total") == 1
        assert counted(gateway, "tl_gateway_failovers_total") == 0
    assert origin.requests[3].connection == 3


async def test_f02_a_stale_connection_does_not_count_against_the_worker() -> None:
    """It is asked again although another worker is there, and even as the last one allowed."""
    async with Origin(answers({}), resets(), answers({"n": 2})) as first, Origin() as second:
        workers = {"a": first.address, "b": second.address}
        async with running(workers, max_attempts=1) as gateway, Client(gateway.address) as client:
            await client.ask(post(CHAT))
            assert (await client.ask(post(CHAT))).body == b'{"n":2}'
    assert second.requests == []


async def test_f02_a_fresh_connection_that_is_closed_is_a_failure() -> None:
    async with Origin(resets()) as first, Origin(answers({"n": 2})) as second:
        workers = {"a": first.address, "b": second.address}
        async with running(workers) as gateway, Client(gateway.address) as client:
            assert (await client.ask(post(CHAT))).body == b'{"n":2}'
            assert counted(gateway, "tl_gateway_stale_connection_resends_total") == 0
    assert len(first.requests) == 1


async def test_f02_a_reused_connection_that_broke_in_the_head_is_a_failure() -> None:
    """The engine had read the request, so that sending it again is not its due."""
    broken = resets(b"HTTP/1.1 200 OK\r\n")
    async with Origin(answers({}), broken) as first, Origin(answers({"n": 2})) as second:
        workers = {"a": first.address, "b": second.address}
        async with running(workers) as gateway, Client(gateway.address) as client:
            await client.ask(post(CHAT))
            assert (await client.ask(post(CHAT))).body == b'{"n":2}'
    assert len(first.requests) == 2


# Limits on connections (D08).


async def test_d08_500_streams_at_a_time_pass() -> None:
    everybody = asyncio.Event()

    async def together(talk: Conversation) -> None:
        await talk.send(sse_head() + sse_chunk(event("a")))
        if len(origin.requests) == 500:
            everybody.set()
        await everybody.wait()
        await talk.send(sse_chunk(DONE) + b"0\r\n\r\n")

    async with Origin(together) as origin, running({"a": origin.address}) as gateway:
        responses = await at_once(gateway.address, 500, STREAM)
        assert {(each.status, each.body, each.complete) for each in responses} == {
            (200, event("a") + DONE, True)
        }
        assert counted(gateway, "tl_gateway_pool_waits_total") == 0
        assert gateway.registry.snapshot()[0].in_flight == 0


async def test_d08_a_request_over_the_limit_waits_and_is_counted() -> None:
    free = asyncio.Event()

    async def waits(talk: Conversation) -> None:
        await free.wait()
        await talk.send(OK)

    async with fronted(waits, upstream_connections_max=2) as (origin, gateway, client):
        others = asyncio.gather(at_once(gateway.address, 10, CHAT))
        await origin.received(2)
        while counted(gateway, "tl_gateway_pool_waits_total") < 8:
            assert (await client.ask(b"GET /v1/models HTTP/1.1\r\n\r\n")).status == 200
        assert (origin.connections, len(origin.requests)) == (2, 2)
        free.set()
        (responses,) = await others
        assert [each.status for each in responses] == [200] * 10
    assert origin.connections == 2


@pytest.mark.parametrize("ending", [json_answer({}, headers=[("connection", "close")]), OK])
async def test_d08_waiting_requests_get_fresh_connections_where_the_old_ones_close(
    ending: bytes,
) -> None:
    async with fronted(says(ending, close=True), upstream_connections_max=1) as (
        origin,
        gateway,
        _,
    ):
        responses = await at_once(gateway.address, 20, CHAT)
        assert [each.status for each in responses] == [200] * 20
        await origin.left(origin.connections)
    assert len(origin.requests) >= 20


async def test_d05_a_client_that_leaves_the_queue_takes_no_connection_with_it() -> None:
    free = asyncio.Event()

    async def waits(talk: Conversation) -> None:
        await free.wait()
        await talk.send(OK)

    async with fronted(waits, upstream_connections_max=1) as (origin, gateway, client):
        await client.send(post(CHAT))
        await origin.received(1)
        leaving = [Client(gateway.address) for _ in range(5)]
        for number, each in enumerate(leaving, start=1):
            async with each, Client(gateway.address) as other:
                await each.send(post(CHAT))
                while counted(gateway, "tl_gateway_pool_waits_total") < number:
                    await other.ask(b"GET /v1/models HTTP/1.1\r\n\r\n")
        async with Client(gateway.address) as last:
            await last.send(post(CHAT))
            free.set()
            assert (await client.response()).status == 200
            assert (await last.response()).status == 200
        assert gateway.registry.snapshot()[0].in_flight == 0
    assert origin.connections == 1
    assert len(origin.requests) == 2


async def test_waiting_for_a_connection_is_limited() -> None:
    options: Any = {"upstream_connections_max": 1, "connect_timeout_s": 0.2}
    async with fronted(hangs(), **options) as (origin, gateway, client):
        async with Client(gateway.address) as second:
            await client.send(post(CHAT))
            await origin.received(1)
            response = await second.ask(post(CHAT))
            assert (response.status, response.error["code"]) == (504, "upstream_timeout")
        assert gateway.registry.snapshot()[0].in_flight == 1


# Heads.


@pytest.mark.parametrize("interim", ["100 Continue", "102 Processing", "103 Early Hints"])
async def test_interim_responses_are_passed_over(interim: str) -> None:
    early = f"HTTP/1.1 {interim}\r\nlink: </x>\r\n\r\n".encode()
    async with fronted(says(early, early + OK), says(early * 3, OK)) as (origin, _, client):
        for _ in range(2):
            response = await client.ask(post(CHAT))
            assert (response.status, response.body) == (200, b'{"ok":1}')
            assert response.header("link") is None
    assert origin.connections == 1


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x15\x03\x01\x00\x02\x02\x28\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.9\r\n\r\n",
        b"HTTP/1.1\r\n\r\n",
        b"HTTP/1.1 abc OK\r\n\r\n",
        b"HTTP/1.1 20 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: a\0b\r\ncontent-length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nx: a\rb\r\ncontent-length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nx: a\r\n b\r\ncontent-length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\ncontent-length: -2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\n{}",
        b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" * 20,
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 100_000,
        b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 20_000,
        b"H" * 100_000,
    ],
    ids=lambda garbage: repr(garbage[:60]),
)
async def test_garbage_instead_of_a_head_fails_over_at_once(garbage: bytes) -> None:
    async with Origin(hangs(garbage)) as bad, Origin(answers({"ok": 1})) as good:
        workers = {"a": bad.address, "b": good.address}
        async with running(workers) as gateway, Client(gateway.address) as client:
            response = await client.ask(post(CHAT))
            assert (response.status, response.body) == (200, b'{"ok":1}')
            await bad.left(1)
            assert counted(gateway, "tl_gateway_faults_total") == 0
    assert len(bad.requests) == 1


async def test_a_head_may_come_byte_by_byte() -> None:
    async with fronted(says(*(bytes((byte,)) for byte in OK))) as (_, _, client):
        assert (await client.ask(post(CHAT))).body == b'{"ok":1}'


# Bodies.


@pytest.mark.parametrize(
    "broken",
    [
        resets(json_answer({"a": "long enough"})[:-5]),
        says(json_answer({"a": "long enough"})[:-5], close=True),
        says(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nab", close=True),
        says(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n", close=True),
        says(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n", close=True),
        hangs(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nab\r\n0\r\n\r\n"),
        hangs(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\nab\r\n0\r\n\r\n"),
        hangs(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n-2\r\nab\r\n0\r\n\r\n"),
        hangs(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\nab\n0\n\n"),
        hangs(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"f" * 5000),
        hangs(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n", b"x: y\r\n" * 20_000),
        says(b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n{"a": "cut', close=True),
        says(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n", close=True),
        says(b"HTTP/1.1 200 OK\r\n\r\n", close=True),
    ],
)
async def test_a_held_answer_that_breaks_fails_over(broken: Script) -> None:
    async with Origin(broken) as bad, Origin(answers({"ok": 1})) as good:
        workers = {"a": bad.address, "b": good.address}
        async with running(workers) as gateway, Client(gateway.address) as client:
            response = await client.ask(post(CHAT))
            assert (response.status, response.body, response.complete) == (200, b'{"ok":1}', True)
            await bad.left(1)
            assert gateway.registry.snapshot()[0].in_flight == 0


async def test_a_body_that_ends_with_the_connection_is_relayed_whole() -> None:
    text = b'HTTP/1.0 200 OK\r\ncontent-type: application/json\r\n\r\n{"a": 1}'
    async with fronted(says(text, close=True), answers({"n": 2})) as (origin, _, client):
        response = await client.ask(post(CHAT))
        assert (response.status, response.body, response.complete) == (200, b'{"a": 1}', True)
        assert response.header("content-length") == "8"
        assert (await client.ask(post(CHAT))).body == b'{"n":2}'
    assert origin.connections == 2


async def test_an_old_engines_stream_is_chunked_for_the_client() -> None:
    head = b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
    stream = says(head, event("a"), event("b") + DONE, close=True)
    async with fronted(stream) as (_, _, client):
        for _ in range(2):
            response = await client.ask(post(STREAM))
            assert (response.body, response.complete) == (event("a") + event("b") + DONE, True)
            assert response.header("transfer-encoding") == "chunked"


async def test_an_old_client_gets_a_stream_without_chunks() -> None:
    request = post(STREAM).replace(b"HTTP/1.1", b"HTTP/1.0")
    async with fronted(streams("a", "b")) as (_, _, client):
        response = await client.ask(request)
        assert response.body == event("a") + event("b") + DONE
        assert response.header("transfer-encoding") is None
        assert response.header("connection") == "close"


@pytest.mark.parametrize("chunked", [False, True])
async def test_h05_gzip_bodies_are_untouched(chunked: bool) -> None:
    packed = gzip.compress(b'{"model": "served", "text": "hello"}')
    framing, body = b"content-length: %d" % len(packed), packed
    if chunked:
        framing = b"transfer-encoding: chunked"
        body = sse_chunk(packed[:9]) + sse_chunk(packed[9:]) + b"0\r\n\r\n"
    head = (
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-encoding: gzip\r\n%b\r\n\r\n"
    )
    for option in ("served", "public"):
        async with fronted(says(head % framing + body), response_model=option) as (
            origin,
            _,
            client,
        ):
            response = await client.ask(post(CHAT, headers={"accept-encoding": "gzip"}))
            assert response.body == packed
            assert response.header("content-encoding") == "gzip"
        # An engine that is asked for no encoding may still send one; then the body stays as it is.
        asked_for = "gzip" if option == "served" else None
        assert origin.requests[0].header("accept-encoding") == asked_for


async def test_answers_without_a_body_leave_the_connection_in_order() -> None:
    empty = b"HTTP/1.1 204 No Content\r\n\r\n"
    for option in ("served", "public"):
        async with fronted(says(empty), says(OK), response_model=option) as (origin, _, client):
            await client.send(post(CHAT))
            status, headers = await client.head()
            assert status == 204
            assert {"content-length", "transfer-encoding"}.isdisjoint(dict(headers))
            assert (await client.ask(post(CHAT))).body == b'{"ok":1}'
        assert origin.connections == 1


async def test_a_head_in_bare_lf_is_not_waited_for() -> None:
    bare = hangs(b"HTTP/1.1 200 OK\ncontent-length: 2\n\n{}")
    async with fronted(bare) as (_, _, client):
        response = await client.ask(post({"model": "m"}))
    assert (response.status, response.error["code"]) == (503, "no_capacity")


class Socket(asyncio.Transport):
    """A transport that goes nowhere: a test says what the engine does, and when."""

    def __init__(self) -> None:
        super().__init__()
        self.protocol: asyncio.BaseProtocol | None = None

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Take it."""

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol

    def is_closing(self) -> bool:
        return False

    def abort(self) -> None:
        """Close."""


class Holding:
    """A request that holds an answer."""

    def __init__(self) -> None:
        self.deadline = inf
        self.hold = 0
        self.answer: Answer | None = None

    def answered(self, answer: Answer) -> None:
        self.answer = answer

    def lost(self, lost: Lost) -> None:
        raise AssertionError(lost)

    def stale(self) -> None:
        raise AssertionError


def discard(data: bytes) -> None:
    """Write to a client whom nobody asks."""


@pytest.mark.parametrize("whole", [True, False])
async def test_a_held_stream_may_be_let_through_between_its_end_and_the_loss_of_its_connection(
    whole: bool,
) -> None:
    deadlines = Deadlines(asyncio.get_running_loop())
    engine = Worker("a", model="m", http_address="127.0.0.1:1")
    lane = Pool(UpstreamLimits(), deadlines, Silent()).lane(engine)
    upstream, judge, transport = Upstream(lane, deadlines), Holding(), Socket()
    upstream.connection_made(transport)
    upstream.ask(judge, b"POST / HTTP/1.1\r\n\r\n", b"")
    upstream.data_received(
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + event("a")
    )
    assert judge.answer is not None
    upstream.more(judge, judge.answer)
    if whole:
        upstream.data_received(DONE)
        upstream.more(judge, judge.answer)
    upstream.eof_received()
    answer = upstream.so_far(judge.answer)
    ends: list[Done | Broken] = []
    relay = Relay(
        upstream,
        discard,
        framing=answer.head.framing,
        shape=None,
        chunked=False,
        events=True,
        first=answer.body,
        gap_s=1.0,
        total=inf,
        deadlines=deadlines,
        ended=ends.append,
    )
    assert transport.protocol is relay
    relay.connection_lost(None)
    deadlines.close()
    (end,) = ends
    assert isinstance(end, Done if whole else Broken)
