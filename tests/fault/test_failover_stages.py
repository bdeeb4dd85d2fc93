"""What fails at which stage, and what becomes of the request: the truth table of failover over real sockets."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest

from pointsman.domain.registry import WorkerReport
from pointsman.net.clock import monotonic
from pointsman.testing.client import Client, post
from pointsman.testing.gateways import counted, fronted, running
from pointsman.testing.origin import (
    Conversation,
    Origin,
    Script,
    answers,
    dead_address,
    event,
    hangs,
    json_answer,
    resets,
    sse_chunk,
    sse_head,
    streams,
)
from pointsman.wire.sse import ERROR_EVENT

pytestmark = pytest.mark.anyio

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
STREAM = CHAT | {"stream": True}
DONE = b"data: [DONE]\n\n"
OLD_STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"


def closes(*parts: bytes) -> Script:
    """Send bytes as they are, then close in good order."""

    async def script(talk: Conversation) -> None:
        for part in parts:
            await talk.send(part)
        talk.close()

    return script


BEFORE_THE_COMMIT = {
    "reset at once": resets(),
    "closed at once": closes(),
    "reset in the status line": resets(b"HTTP/1."),
    "reset in the head": resets(b"HTTP/1.1 200 OK\r\ncontent-type: text/ev"),
    "reset after the head": resets(sse_head()),
    "reset in the first chunk": resets(sse_head() + b"100\r\ndata: {"),
    "reset in a plain answer": resets(json_answer({"a": "long enough"})[:-4]),
    "503": answers({"error": "draining"}, 503),
    "503 in chunks": closes(
        b"HTTP/1.1 503 X\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
    ),
    "503 cut short": resets(json_answer({"a": "long enough"}, 503)[:-4]),
    "503 as events": answers(b"", 503, [("content-type", "text/event-stream")]),
    "429": answers({"error": "full"}, 429),
}


@pytest.mark.parametrize("failure", BEFORE_THE_COMMIT)
@pytest.mark.parametrize("body", [CHAT, STREAM], ids=["plain", "stream"])
async def test_f11_before_the_commit_another_worker_answers(failure: str, body: object) -> None:
    async with Origin(BEFORE_THE_COMMIT[failure]) as bad, Origin(streams("whole")) as good:
        workers = {"a": bad.address, "b": good.address}
        async with running(workers) as gateway, Client(gateway.address) as client:
            response = await client.ask(post(body))
            assert (response.status, response.complete) == (200, True)
            assert response.body == event("whole") + DONE
            assert [worker.in_flight for worker in gateway.registry.snapshot()] == [0, 0]
            assert counted(gateway, "tl_gateway_failovers_total") == 1
    assert len(bad.requests) == len(good.requests) == 1
    assert bad.requests[0].body == good.requests[0].body


@pytest.mark.parametrize("failure", BEFORE_THE_COMMIT)
async def test_where_every_worker_fails_the_client_gets_one_error(failure: str) -> None:
    script = BEFORE_THE_COMMIT[failure]
    async with Origin(script) as first, Origin(script) as second:
        workers = {"a": first.address, "b": second.address}
        async with running(workers) as gateway, Client(gateway.address) as client:
            response = await client.ask(post(STREAM))
            assert response.header("retry-after") == "1"
            if failure == "429":
                assert (response.status, response.body) == (429, b'{"error":"full"}')
            else:
                assert (response.status, response.error["code"]) == (503, "no_capacity")
            assert [worker.in_flight for worker in gateway.registry.snapshot()] == [0, 0]
            assert (await client.ask(b"GET /v1/models HTTP/1.1\r\n\r\n")).status == 200


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 413, 422, 500, 501, 502, 504, 529])
async def test_every_other_status_is_an_answer_and_not_tried_elsewhere(status: int) -> None:
    body = b'{"error": {"message": "of the engine", "n": 1.0}}'
    told = answers(body, status, [("retry-after", "9"), ("x-engine", "1")])
    async with Origin(told) as first, Origin() as second:
        workers = {"a": first.address, "b": second.address}
        async with running(workers) as gateway, Client(gateway.address) as client:
            response = await client.ask(post(STREAM))
            assert (response.status, response.body) == (status, body)
            assert (response.header("retry-after"), response.header("x-engine")) == ("9", "1")
            assert response.header("connection") == "keep-alive"
    assert second.requests == []


async def test_the_last_429_is_relayed_with_the_engines_own_retry_after() -> None:
    first, second = (
        answers({"n": number}, 429, [("Retry-After", str(number))]) for number in (7, 8)
    )
    async with Origin(first) as one, Origin(second) as two:
        workers = {"a": one.address, "b": two.address}
        async with running(workers) as gateway, Client(gateway.address) as client:
            response = await client.ask(post(CHAT))
            assert (response.status, response.body) == (429, b'{"n":8}')
            assert response.header("retry-after") == "8"


@pytest.mark.parametrize("other", [answers({}, 503), resets()])
async def test_a_429_among_other_failures_is_503(other: Script) -> None:
    async with Origin(other) as one, Origin(answers({}, 429)) as two:
        for workers in ({"a": one, "b": two}, {"a": two, "b": one}):
            addresses = {name: origin.address for name, origin in workers.items()}
            async with running(addresses) as gateway, Client(gateway.address) as client:
                response = await client.ask(post(CHAT))
                assert (response.status, response.error["code"]) == (503, "no_capacity")


@pytest.mark.parametrize("status", [429, 503])
async def test_a_refusal_over_the_hold_leaves_no_connection_behind(status: int) -> None:
    endless = hangs(json_answer(b'"%b"' % (b"x" * 5000), status)[:-100])
    async with fronted(endless, hold_bytes=1000) as (origin, gateway, client):
        response = await client.ask(post(CHAT))
        assert (response.status, response.error["code"]) == (503, "no_capacity")
        await origin.left(1)
        assert gateway.registry.snapshot()[0].in_flight == 0
        assert (await client.ask(b"GET /v1/models HTTP/1.1\r\n\r\n")).status == 200


@pytest.mark.parametrize(("allowed", "asked"), [(None, 3), (1, 1), (2, 2), (5, 5)])
async def test_no_more_workers_are_asked_than_allowed(allowed: int | None, asked: int) -> None:
    async with Origin(answers({}, 503)) as bad:
        workers = dict.fromkeys("abcdef", bad.address)
        options: Any = {} if allowed is None else {"max_attempts": allowed}
        async with running(workers, **options) as gateway, Client(gateway.address) as client:
            assert (await client.ask(post(CHAT))).status == 503
    assert len(bad.requests) == asked


async def test_f01_a_broken_worker_is_not_asked_twice_for_one_request() -> None:
    """Even where affinity points at it, for every one of many prefixes, and three tries are allowed."""
    async with Origin(resets()) as bad, Origin(answers({"ok": 1})) as good:
        workers = {"a": bad.address, "b": good.address}
        async with running(workers, route_policy="affinity") as gateway:
            async with Client(gateway.address) as client:
                for number in range(40):
                    before = len(bad.requests)
                    message = [{"role": "user", "content": f"prefix {number}"}]
                    response = await client.ask(post(CHAT | {"messages": message}))
                    assert response.body == b'{"ok":1}'
                    assert len(bad.requests) - before <= 1
            assert counted(gateway, "tl_gateway_failovers_total") == len(bad.requests) > 5


async def test_a_plain_answer_fails_over_up_to_the_hold_and_not_beyond() -> None:
    cut = json_answer(b'"%b"' % (b"x" * 10_000))[:-5000]
    for hold, expected in ((100_000, b'{"ok":1}'), (1000, b'"' + b"x" * 5001)):
        async with Origin(closes(cut)) as bad, Origin(answers({"ok": 1})) as good:
            workers = {"a": bad.address, "b": good.address}
            async with (
                running(workers, hold_bytes=hold) as gateway,
                Client(gateway.address) as client,
            ):
                response = await client.ask(post(CHAT))
                assert response.body == expected
                assert response.complete == (hold == 100_000)


# Streams without their end (F16).


@pytest.mark.parametrize(
    "empty",
    [
        sse_head() + b"0\r\n\r\n",
        sse_head() + b"0\r\nx: y\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 0\r\n\r\n",
        OLD_STREAM,
    ],
)
async def test_f16_an_empty_stream_is_a_failure(empty: bytes) -> None:
    async with Origin(closes(empty)) as bad, Origin(streams("whole")) as good:
        workers = {"a": bad.address, "b": good.address}
        async with running(workers) as gateway, Client(gateway.address) as client:
            assert (await client.ask(post(STREAM))).body == event("whole") + DONE
    async with fronted(closes(empty)) as (_, _, client):
        assert (await client.ask(post(STREAM))).status == 503


@pytest.mark.parametrize("end", [closes, resets], ids=["closes", "resets"])
async def test_f16_a_stream_without_the_end_of_its_framing_is_broken(end: Any) -> None:
    async with fronted(end(sse_head() + sse_chunk(event("a")))) as (_, gateway, client):
        response = await client.ask(post(STREAM))
        assert response.body == event("a") + ERROR_EVENT
        assert counted(gateway, 'tl_gateway_attempts_total{outcome="broken"}') == 1


@pytest.mark.parametrize(
    ("sent", "whole"),
    [
        (event("a") + DONE, True),
        (event("a") + b"data: [DONE]\r\n\r\n", True),
        (event("a") + b'event: message_stop\ndata: {"type":"message_stop"}\n\n', True),
        (event("a"), False),
        (event("data: [DONE]\n\n"), False),
        (DONE + event("a"), False),
        (event("a") + b"data: [DON", False),
    ],
)
async def test_f16_a_stream_that_ends_with_the_connection_must_say_that_it_ends(
    sent: bytes, whole: bool
) -> None:
    async with fronted(closes(OLD_STREAM + sent)) as (_, _, client):
        response = await client.ask(post(STREAM))
        assert response.complete
        if whole:
            assert response.body == sent
        else:
            gap = b"" if sent.endswith(b"\n\n") else b"\n\n"
            assert response.body == sent + gap + ERROR_EVENT


# Workers that leave, and come back.


def beat(gateway: Any, name: str, address: str, now: float, **more: Any) -> None:
    gateway.registry.beat(WorkerReport(name, address, "m", **more), now)


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 200 OK\r\n", sse_head(), json_answer({})[:-2]])
async def test_r20_a_worker_that_is_evicted_is_left_at_once(sent: bytes) -> None:
    """The request waits at it, with nothing committed; no time limit is near."""
    async with (
        Origin(hangs(sent)) as silent,
        Origin(streams("whole")) as good,
        running({"b": good.address}) as gateway,
        Client(gateway.address) as client,
    ):
        now = monotonic()
        beat(gateway, "a", silent.address, now)
        await client.send(post(STREAM))
        await silent.received(1)
        gateway.registry.expire(now + 6.0)
        assert (await client.response()).body == event("whole") + DONE
        await silent.left(1)
        assert counted(gateway, 'tl_gateway_failovers_total{why="evicted"}') == 1


async def test_r20_requests_that_wait_for_a_connection_are_failed_over_as_well() -> None:
    async with AsyncExitStack() as stack:
        silent = await stack.enter_async_context(Origin(hangs()))
        good = await stack.enter_async_context(Origin(answers({"ok": 1})))
        gateway = await stack.enter_async_context(
            running({"b": good.address}, upstream_connections_max=1)
        )
        other = await stack.enter_async_context(Client(gateway.address))
        now = monotonic()
        beat(gateway, "a", silent.address, now)
        (first, second) = gateway.registry.snapshot()
        second.queue_depth = 100  # so that all of them go to the first one
        clients = [await stack.enter_async_context(Client(gateway.address)) for _ in range(5)]
        for number, client in enumerate(clients, start=1):
            await client.send(post(CHAT))
            while first.in_flight < number:
                await other.ask(b"GET /v1/models HTTP/1.1\r\n\r\n")
        gateway.registry.expire(now + 6.0)
        for client in clients:
            assert (await client.response()).body == b'{"ok":1}'
        assert (first.in_flight, second.in_flight) == (0, 0)
        assert len(silent.requests) == 1


async def test_r20_a_stream_that_is_committed_runs_on_after_an_eviction() -> None:
    """The registry may be wrong about a worker whose bytes still come."""
    evicted = asyncio.Event()

    async def slow(talk: Conversation) -> None:
        await talk.send(sse_head() + sse_chunk(event("a")))
        await evicted.wait()
        await talk.send(sse_chunk(DONE) + b"0\r\n\r\n")

    async with (
        Origin(slow) as origin,
        running() as gateway,
        Client(gateway.address) as client,
    ):
        now = monotonic()
        beat(gateway, "a", origin.address, now)
        (worker,) = gateway.registry.snapshot()
        await client.send(post(STREAM))
        await client.read_until(b"\n\n\r\n")
        gateway.registry.expire(now + 6.0)
        evicted.set()
        assert await client.read_until(b"0\r\n\r\n") == sse_chunk(DONE) + b"0\r\n\r\n"
        await origin.left(1)  # its connection is not kept
        assert worker.in_flight == 0


async def test_r21_a_worker_that_dies_after_it_took_the_request_is_left_at_once() -> None:
    async with Origin(hangs()) as dying, Origin(answers({"ok": 1})) as good:
        workers = {"a": dying.address, "b": good.address}
        async with running(workers) as gateway, Client(gateway.address) as client:
            await client.send(post(CHAT))
            await dying.received(1)
            await dying.stop()
            assert (await client.response()).body == b'{"ok":1}'
            assert [worker.in_flight for worker in gateway.registry.snapshot()] == [0, 0]


async def test_r21_a_reused_connection_of_a_dead_worker_is_a_failover_and_no_hang() -> None:
    """It looks stale, and its fresh connection is refused."""
    async with Origin(answers({}), hangs()) as dying, Origin(answers({"ok": 1})) as good:
        workers = {"a": dying.address, "b": good.address}
        async with running(workers) as gateway, Client(gateway.address) as client:
            await client.ask(post(CHAT))
            await client.send(post(CHAT))
            await dying.received(2)
            await dying.stop()
            assert (await client.response()).body == b'{"ok":1}'


async def test_r22_the_owner_of_a_hot_prefix_dies() -> None:
    async with Origin(answers({"n": 1})) as one, Origin(answers({"n": 2})) as two:
        workers = {"a": one.address, "b": two.address}
        async with (
            running(workers, route_policy="affinity") as gateway,
            Client(gateway.address) as client,
        ):
            for _ in range(5):
                assert (await client.ask(post(CHAT))).status == 200
            owner, other = (one, two) if one.requests else (two, one)
            assert (len(owner.requests), len(other.requests)) == (5, 0)
            await owner.stop()
            for _ in range(20):
                assert (await client.ask(post(CHAT))).status == 200
            assert len(other.requests) == 20


async def test_r05_an_address_change_moves_everything_that_is_not_committed() -> None:
    async with (
        Origin(answers({"at": "old"}), hangs()) as old,
        Origin(answers({"at": "new"})) as new,
        running() as gateway,
        Client(gateway.address) as client,
        Client(gateway.address) as second,
    ):
        now = monotonic()
        beat(gateway, "a", old.address, now)
        (before,) = gateway.registry.snapshot()
        # One idle connection, and one with a request that waits.
        assert (await client.ask(post(CHAT))).body == b'{"at":"old"}'
        await second.send(post(CHAT))
        await old.received(2)
        beat(gateway, "a", new.address, now)
        assert (await second.response()).body == b'{"at":"new"}'
        await old.left(old.connections)
        assert (await client.ask(post(CHAT))).body == b'{"at":"new"}'
        (after,) = gateway.registry.snapshot()
        assert (before.in_flight, after.in_flight) == (0, 0)
        assert counted(gateway, 'tl_gateway_connections{side="upstream"}') >= 1
    assert len(old.requests) == 2


async def test_b13_an_old_life_never_changes_the_count_of_the_new_one() -> None:
    async with Origin(hangs(sse_head() + sse_chunk(event("a")))) as origin, running() as gateway:
        now = monotonic()
        beat(gateway, "a", origin.address, now, incarnation=1)
        (old,) = gateway.registry.snapshot()
        async with Client(gateway.address) as first, Client(gateway.address) as second:
            await first.send(post(STREAM))
            await first.read_until(b"\n\n\r\n")
            beat(gateway, "a", origin.address, now, incarnation=2)
            (new,) = gateway.registry.snapshot()
            assert (old.in_flight, new.in_flight) == (1, 0)
            await second.send(post(STREAM))
            await second.read_until(b"\n\n\r\n")
            assert (old.in_flight, new.in_flight) == (1, 1)
            first.leave()
            await origin.left(1)
            assert (old.in_flight, new.in_flight) == (0, 1)
            second.leave()
            await origin.left(2)
            assert (old.in_flight, new.in_flight) == (0, 0)


@pytest.mark.parametrize(
    "failure",
    [None, resets(), answers({}, 503), hangs(json_answer(b"x" * 5000, 503)[:-100])],
    ids=["refused", "reset", "503", "503 over the hold"],
)
async def test_a_worker_that_is_evicted_by_the_very_failover_away_from_it(
    failure: Script | None,
) -> None:
    """Routing again is what notices that its heartbeats stopped: the request must not hear of it twice."""
    async with (
        Origin(failure or answers({})) as bad,
        Origin(answers({"ok": 1})) as good,
        running({"b": good.address}, hold_bytes=1000) as gateway,
        Client(gateway.address) as client,
    ):
        start = monotonic()
        beat(gateway, "a", bad.address if failure else dead_address(), start)
        worker = gateway.registry.snapshot()[0]
        # Time for the data plane: 6 s are over as soon as the worker has been asked.
        gateway.serving.deadlines.now = lambda: start + 6.0 * worker.in_flight
        response = await client.ask(post(CHAT))
        assert (response.status, response.body) == (200, b'{"ok":1}')
        assert [each.id for each in gateway.registry.snapshot()] == ["b"]
        assert counted(gateway, "tl_gateway_faults_total") == 0
        assert (await client.ask(post(CHAT))).body == b'{"ok":1}'
