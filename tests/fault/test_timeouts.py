"""Engines that are too slow, by each of the five limits (F06, F07)."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from pointsman.testing.client import Client, post
from pointsman.testing.gateways import counted, fronted, running
from pointsman.testing.origin import (
    Conversation,
    Origin,
    answers,
    event,
    hangs,
    json_answer,
    sse_chunk,
    sse_head,
    streams,
)
from pointsman.wire.sse import ERROR_EVENT

pytestmark = pytest.mark.anyio

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
STREAM = CHAT | {"stream": True}
MODELS = b"GET /v1/models HTTP/1.1\r\nhost: gateway\r\n\r\n"

HALF = json_answer(b'"%b"' % (b"x" * 1000))[:-500]

BEFORE_THE_COMMIT = [
    ("head_timeout_s", b"", CHAT),
    ("head_timeout_s", b"", STREAM),
    ("head_timeout_s", b"HTTP/1.1 200 OK\r\n", CHAT),
    ("head_timeout_s", b"HTTP/1.1 100 Continue\r\n\r\n", CHAT),
    ("first_byte_timeout_s", sse_head(), STREAM),
    ("first_byte_timeout_s", json_answer({})[:-2], CHAT),
    ("gap_timeout_s", HALF, CHAT),
]
"""Which limit it is, what the engine says before it falls silent, and to which request."""


@pytest.fixture
def full_backlog() -> Iterator[str]:
    """Give an address that takes no more connections: its queue is full and nobody accepts."""
    with ExitStack() as sockets:
        listener = sockets.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        host, port = listener.getsockname()
        for _ in range(8):
            caller = sockets.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex((host, port))
        yield f"{host}:{port}"


@pytest.mark.parametrize(("limit", "sent", "body"), BEFORE_THE_COMMIT)
async def test_f06_a_worker_that_is_too_slow_before_the_commit_fails_over(
    limit: str, sent: bytes, body: object
) -> None:
    async with Origin(hangs(sent)) as slow, Origin(answers({"ok": 1})) as good:
        workers = {"a": slow.address, "b": good.address}
        options: Any = {limit: 0.2}
        async with running(workers, **options) as gateway, Client(gateway.address) as client:
            response = await client.ask(post(body))
            assert (response.status, response.body) == (200, b'{"ok":1}')
            await slow.left(1)
            assert [worker.in_flight for worker in gateway.registry.snapshot()] == [0, 0]
            assert counted(gateway, 'tl_gateway_failovers_total{why="timed out"}') == 1


@pytest.mark.parametrize(
    ("limit", "sent", "body"), [*BEFORE_THE_COMMIT, ("total_timeout_s", HALF, CHAT)]
)
async def test_f06_a_timeout_of_the_last_worker_is_504(
    limit: str, sent: bytes, body: object
) -> None:
    async with fronted(hangs(sent), **{limit: 0.2}) as (origin, gateway, client):
        response = await client.ask(post(body))
        assert (response.status, response.error["code"]) == (504, "upstream_timeout")
        await origin.left(1)
        assert gateway.registry.snapshot()[0].in_flight == 0


async def test_connecting_is_limited_and_fails_over(full_backlog: str) -> None:
    async with Origin(answers({"ok": 1})) as good:
        workers = {"a": full_backlog, "b": good.address}
        async with (
            running(workers, connect_timeout_s=0.2) as gateway,
            Client(gateway.address) as client,
        ):
            assert (await client.ask(post(CHAT))).body == b'{"ok":1}'
            assert [worker.in_flight for worker in gateway.registry.snapshot()] == [0, 0]
            assert counted(gateway, 'tl_gateway_connections{side="upstream"}') == 1


async def test_connecting_that_takes_too_long_is_504(full_backlog: str) -> None:
    async with (
        running({"a": full_backlog}, connect_timeout_s=0.2) as gateway,
        Client(gateway.address) as client,
    ):
        response = await client.ask(post(CHAT))
        assert (response.status, response.error["code"]) == (504, "upstream_timeout")
        assert counted(gateway, 'tl_gateway_connections{side="upstream"}') == 0


@pytest.mark.parametrize("limit", ["gap_timeout_s", "total_timeout_s"])
async def test_f06_a_stream_that_stops_after_the_commit_ends_with_the_error_event(
    limit: str,
) -> None:
    async with Origin(hangs(sse_head() + sse_chunk(event("a")))) as slow, Origin() as second:
        workers = {"a": slow.address, "b": second.address}
        options: Any = {limit: 0.4}
        async with running(workers, **options) as gateway, Client(gateway.address) as client:
            response = await client.ask(post(STREAM))
            assert response.body == event("a") + ERROR_EVENT
            assert response.complete
            await slow.left(1)
            assert [worker.in_flight for worker in gateway.registry.snapshot()] == [0, 0]
    assert second.requests == []


async def test_the_total_limit_ends_a_stream_that_never_pauses() -> None:
    async def endless(talk: Conversation) -> None:
        await talk.send(sse_head())
        while True:
            await talk.send(sse_chunk(event("a")))
            await other.ask(MODELS)

    async with (
        fronted(endless, total_timeout_s=0.3) as (origin, gateway, client),
        Client(gateway.address) as other,
    ):
        response = await client.ask(post(STREAM))
        assert response.body.endswith(event("a") + ERROR_EVENT)
        await origin.left(1)


async def test_a_stream_that_goes_on_is_not_cut_by_the_gap_limit() -> None:
    """Every event comes within the limit, all of them together do not."""

    async def steady(talk: Conversation) -> None:
        await talk.send(sse_head())
        for _ in range(6):
            await talk.send(sse_chunk(event("a")))
            await a_while(0.15)
        await talk.send(sse_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    async def a_while(seconds: float) -> None:
        """Let time pass on the gateway's own clock, by a connection that it closes after that long."""
        async with running(keepalive_timeout_s=seconds) as watch, Client(watch.address) as client:
            await client.ask(MODELS)
            await client.rest()

    async with fronted(steady, gap_timeout_s=0.6) as (_, _, client):
        response = await client.ask(post(STREAM))
        assert response.body == event("a") * 6 + b"data: [DONE]\n\n"


async def test_f06_a_slow_client_is_no_gap_of_the_engine() -> None:
    """The client does not read for several times the limit; the engine cannot send meanwhile."""

    async def floods(talk: Conversation) -> None:
        await talk.send(sse_head())
        for _ in range(600):
            await talk.send(piece)
        await talk.send(b"0\r\n\r\n")

    piece = sse_chunk(b"data: %b\n\n" % (b"x" * 60000))
    options: Any = {"gap_timeout_s": 0.2, "keepalive_timeout_s": 0.8}
    async with fronted(floods, **options) as (_, gateway, client), Client(gateway.address) as watch:
        await client.send(post(STREAM))
        await client.head()
        client.stop_reading()
        await watch.ask(MODELS)
        assert await watch.rest() == b""  # closed as idle after 0.8 s
        client.go_on_reading()
        for _ in range(600):
            assert await client.read(len(piece)) == piece
        assert await client.read(5) == b"0\r\n\r\n"


async def test_f07_a_client_that_leaves_ends_all_further_tries() -> None:
    async with Origin(hangs()) as first, Origin(hangs()) as second, Origin() as third:
        workers = {"a": first.address, "b": second.address, "c": third.address}
        async with running(workers, head_timeout_s=0.2) as gateway:
            async with Client(gateway.address) as client:
                await client.send(post(CHAT))
                await second.received(1)  # the first one has run into its limit
                client.leave()
                await second.left(1)
            async with Client(gateway.address) as watch:
                while any(worker.in_flight for worker in gateway.registry.snapshot()):
                    await watch.ask(MODELS)
    assert third.requests == []


async def test_limits_hold_for_reused_connections() -> None:
    """What is set for one request does not run on into the next one, nor into idleness."""
    options: Any = {"head_timeout_s": 0.3, "gap_timeout_s": 0.3, "upstream_keepalive_s": 30.0}
    async with fronted(streams("a"), answers({}), hangs(), **options) as (origin, _, client):
        await client.ask(post(STREAM))
        async with running(keepalive_timeout_s=0.5) as watch, Client(watch.address) as idle:
            await idle.ask(MODELS)
            await idle.rest()
        assert (await client.ask(post(CHAT))).status == 200
        assert (await client.ask(post(CHAT))).status == 504
    assert origin.connections == 1
