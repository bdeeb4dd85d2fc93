"""Clients that leave: the engine's connection is closed at once, whatever was going on, and nothing is left behind."""

import asyncio
from collections.abc import Callable

import pytest

from pointsman.app import Gateway
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
)

pytestmark = pytest.mark.anyio

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
STREAM = CHAT | {"stream": True}
MODELS = b"GET /v1/models HTTP/1.1\r\nhost: gateway\r\n\r\n"

WAYS = pytest.mark.parametrize("way", [Client.leave, Client.hang_up], ids=["reset", "in order"])
Way = Callable[[Client], None]


def nothing_is_left(gateway: Gateway) -> None:
    assert [worker.in_flight for worker in gateway.registry.snapshot()] == [0]
    assert counted(gateway, 'tl_gateway_connections{side="upstream"}') == 0
    assert counted(gateway, "tl_gateway_faults_total") == 0


@WAYS
@pytest.mark.parametrize("body", [CHAT, STREAM], ids=["plain", "stream"])
async def test_d01_d03_a_client_that_leaves_before_the_head_ends_the_request(
    body: object, way: Way
) -> None:
    async with fronted(hangs()) as (origin, gateway, client):
        await client.send(post(body))
        await origin.received(1)
        assert gateway.registry.snapshot()[0].in_flight == 1
        way(client)
        await origin.left(1)
        nothing_is_left(gateway)
        assert counted(gateway, 'tl_gateway_client_disconnects_total{stage="waiting"}') == 1
        assert counted(gateway, 'tl_gateway_requests_total{code="499"') == 1


@WAYS
async def test_d01_a_client_that_leaves_during_a_plain_answer_ends_it(way: Way) -> None:
    """The head and half of the body are there, and held."""
    half = json_answer(b'"%b"' % (b"x" * 1000))[:-500]
    async with fronted(hangs(half)) as (origin, gateway, client), Client(gateway.address) as other:
        await client.send(post(CHAT))
        await origin.received(1)
        await other.ask(MODELS)
        way(client)
        await origin.left(1)
        nothing_is_left(gateway)


@WAYS
@pytest.mark.parametrize("sent", [sse_head(), sse_head() + b"100\r\ndata: "], ids=["head", "part"])
async def test_d03_a_client_that_leaves_before_the_first_event_ends_the_stream(
    sent: bytes, way: Way
) -> None:
    async with fronted(hangs(sent)) as (origin, gateway, client), Client(gateway.address) as other:
        await client.send(post(STREAM))
        await origin.received(1)
        await other.ask(MODELS)
        way(client)
        await origin.left(1)
        nothing_is_left(gateway)


@WAYS
async def test_d02_a_client_that_leaves_in_the_middle_of_a_stream_ends_it(way: Way) -> None:
    """No chunk is in flight: nothing but the client's side can tell."""
    async with fronted(hangs(sse_head() + sse_chunk(event("a")))) as (origin, gateway, client):
        await client.send(post(STREAM))
        await client.read_until(b"\n\n\r\n")
        assert gateway.registry.snapshot()[0].in_flight == 1
        way(client)
        await origin.left(1)
        nothing_is_left(gateway)
        assert counted(gateway, 'tl_gateway_client_disconnects_total{stage="relaying"}') == 1


async def test_d02_a_client_that_leaves_a_flood_ends_it() -> None:
    async def floods(talk: Conversation) -> None:
        await talk.send(sse_head())
        while True:
            await talk.send(sse_chunk(b"data: %b\n\n" % (b"x" * 60000)))

    async with fronted(floods) as (origin, gateway, client):
        await client.send(post(STREAM))
        await client.read(1 << 20)
        client.leave()
        await origin.left(1)
        nothing_is_left(gateway)


async def test_d02_a_client_that_leaves_while_it_does_not_read_ends_its_stream() -> None:
    async def floods(talk: Conversation) -> None:
        await talk.send(sse_head())
        while True:
            await talk.send(sse_chunk(b"data: %b\n\n" % (b"x" * 60000)))
            sent.append(1)

    sent: list[int] = []
    async with fronted(floods) as (origin, gateway, client), Client(gateway.address) as other:
        await client.send(post(STREAM))
        await client.head()
        client.stop_reading()
        before = -1
        while len(sent) != before:
            before = len(sent)
            for _ in range(50):
                await other.ask(MODELS)
        client.leave()
        await origin.left(1)
        nothing_is_left(gateway)


@WAYS
async def test_d03_a_client_that_leaves_while_the_gateway_connects_ends_that(way: Way) -> None:
    """The request waits for a connection: the worker's only one is taken."""
    async with fronted(hangs(), upstream_connections_max=1) as (origin, gateway, client):
        async with Client(gateway.address) as second, Client(gateway.address) as other:
            await client.send(post(CHAT))
            await origin.received(1)
            await second.send(post(CHAT))
            while gateway.registry.snapshot()[0].in_flight < 2:
                await other.ask(MODELS)
            way(second)
            while gateway.registry.snapshot()[0].in_flight > 1:
                await other.ask(MODELS)
        client.leave()
        await origin.left(1)
        nothing_is_left(gateway)
    assert len(origin.requests) == 1


async def test_a_client_that_leaves_is_not_failed_over() -> None:
    async with Origin(hangs()) as first, Origin(answers({})) as second:
        workers = {"a": first.address, "b": second.address}
        async with running(workers) as gateway, Client(gateway.address) as client:
            await client.send(post(CHAT))
            await first.received(1)
            client.leave()
            await first.left(1)
            assert [worker.in_flight for worker in gateway.registry.snapshot()] == [0, 0]
    assert second.requests == []


async def test_the_rest_of_a_pipeline_is_not_asked_for_a_client_that_left() -> None:
    async with fronted(hangs()) as (origin, gateway, client):
        await client.send(post(CHAT) * 10)
        await origin.received(1)
        client.leave()
        await origin.left(1)
        nothing_is_left(gateway)
    assert len(origin.requests) == 1


async def test_d05_a_request_counts_until_the_end_of_its_body() -> None:
    last = asyncio.Event()

    async def waits(talk: Conversation) -> None:
        await talk.send(sse_head() + sse_chunk(event("a")))
        await last.wait()
        await talk.send(sse_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    async with fronted(waits) as (_, gateway, client):
        await client.send(post(STREAM))
        await client.read_until(b"\n\n\r\n")
        assert gateway.registry.snapshot()[0].in_flight == 1
        last.set()
        await client.read_until(b"0\r\n\r\n")
        assert gateway.registry.snapshot()[0].in_flight == 0


async def test_d04_a_thousand_aborts_leave_nothing() -> None:
    """At every stage in turn: while connecting, before the head, before the first event, and while it streams."""
    stages = (b"", sse_head(), sse_head() + sse_chunk(event("a")))

    async def stops_somewhere(talk: Conversation) -> None:
        await talk.send(stages[len(origin.requests) % 3])
        await talk.peer_closed()

    async def leaves(number: int) -> None:
        async with Client(gateway.address) as client:
            await client.send(post(STREAM if number % 2 else CHAT))
            if number % 5 == 0:
                client.leave()
                return
            async with Client(gateway.address) as other:
                for _ in range(number % 5):
                    await other.ask(MODELS)
            client.leave()

    async with fronted(stops_somewhere) as (origin, gateway, _):
        for group in range(10):
            await asyncio.gather(*(leaves(group * 100 + number) for number in range(100)))
        async with Client(gateway.address) as other:
            while gateway.registry.snapshot()[0].in_flight:
                await other.ask(MODELS)
            await origin.left(origin.connections)
            while counted(gateway, 'tl_gateway_connections{side="upstream"}') > 0:
                await other.ask(MODELS)
        nothing_is_left(gateway)
        origin.scripts = [answers({"ok": 1})]
        async with Client(gateway.address) as client:
            assert (await client.ask(post(CHAT))).body == b'{"ok":1}'
        assert counted(gateway, 'tl_gateway_connections{side="upstream"}') == 1
