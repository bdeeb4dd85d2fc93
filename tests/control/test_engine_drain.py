"""Asking engines to drain, over real gRPC on loopback: ones that answer, that are slow, broken, silent, and gone."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import grpc
import pytest

from pointsman.config import servable
from pointsman.control.changes import Changes
from pointsman.control.engines import EngineUnavailable, drain_engine
from pointsman.control.store import Store
from pointsman.domain.policy.least_outstanding import LeastOutstanding
from pointsman.domain.registry import Registry, WorkerReport
from pointsman.domain.router import Router
from pointsman.domain.routes import RouteTable
from pointsman.parts import static_worker
from pointsman.proto.engine_pb2 import DrainRequest, DrainResponse

pytestmark = pytest.mark.anyio


class Engine:
    """An engine's control service. `deadlines` are the drains that it was asked for, in milliseconds."""

    def __init__(self) -> None:
        self.deadlines: list[int] = []
        self.asked = asyncio.Event()
        self.drain: Callable[[Any], Awaitable[int]] = self.at_once
        self.address = ""

    async def at_once(self, context: Any) -> int:
        return 0

    async def serve(self, request: DrainRequest, context: Any) -> DrainResponse:
        self.deadlines.append(request.deadline_ms)
        self.asked.set()
        return DrainResponse(aborted=await self.drain(context))


@asynccontextmanager
async def engine() -> AsyncIterator[Engine]:
    served = Engine()
    server = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(
        served.serve,
        request_deserializer=DrainRequest.FromString,
        response_serializer=DrainResponse.SerializeToString,
    )
    calls = grpc.method_handlers_generic_handler("tl.engine.v1.EngineControl", {"Drain": handler})
    server.add_generic_rpc_handlers((calls,))
    served.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield served
    finally:
        await server.stop(None)


@contextmanager
def bound(*, listening: bool) -> Iterator[str]:
    """An address where nobody speaks: connections are refused, or accepted by the kernel and then left alone."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        if listening:
            taken.listen()
        yield f"127.0.0.1:{taken.getsockname()[1]}"


@pytest.mark.parametrize(("deadline_s", "deadline_ms"), [(0, 0), (30, 30_000), (0.0015, 2)])
async def test_an_engine_hears_the_deadline_and_tells_what_it_aborted(
    deadline_s: float, deadline_ms: int
) -> None:
    async def abort_seven(context: Any) -> int:
        return 7

    async with engine() as served:
        served.drain = abort_seven
        assert await drain_engine(served.address, deadline_s) == 7
        assert served.deadlines == [deadline_ms]


async def test_an_engine_that_is_down_is_told_at_once() -> None:
    with bound(listening=False) as address:
        began = time.monotonic()
        with pytest.raises(EngineUnavailable, match=r"^UNAVAILABLE: "):
            await drain_engine(address, 30)
        assert time.monotonic() - began < 10


async def test_an_engine_that_says_nothing_is_waited_for_as_long_as_connecting_may_take() -> None:
    with bound(listening=True) as address:
        began = time.monotonic()
        with pytest.raises(EngineUnavailable, match=r"^UNAVAILABLE: "):
            await drain_engine(address, 30, connect_s=0.2)
        assert 0.1 < time.monotonic() - began < 10


async def test_a_name_that_nobody_has_is_an_engine_that_cannot_be_asked() -> None:
    with pytest.raises(EngineUnavailable, match=r"^(UNAVAILABLE|DEADLINE_EXCEEDED): "):
        await drain_engine("engine.invalid:50051", 0, patience_s=2.0)


async def test_an_engine_is_waited_for_until_its_deadline_and_some_patience_beyond() -> None:
    async def never(context: Any) -> int:
        await asyncio.Event().wait()
        return 0

    async def late(context: Any) -> int:
        await asyncio.sleep(0.3)
        return 3

    async with engine() as served:
        served.drain = late
        assert await drain_engine(served.address, 0.2, patience_s=10) == 3
        served.drain = never
        with pytest.raises(EngineUnavailable, match=r"^DEADLINE_EXCEEDED: "):
            await drain_engine(served.address, 0.1, patience_s=0.1)


async def test_an_engine_that_refuses_says_why() -> None:
    async def refuse(context: Any) -> int:
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "already draining")
        return 0

    async with engine() as served:
        served.drain = refuse
        with pytest.raises(EngineUnavailable, match=r"^FAILED_PRECONDITION: already draining$"):
            await drain_engine(served.address, 1)


async def test_an_engine_without_the_call_is_one_that_cannot_be_asked() -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    with pytest.raises(EngineUnavailable, match=r"^UNIMPLEMENTED: "):
        await drain_engine(f"127.0.0.1:{port}", 1)
    await server.stop(None)


async def test_an_engine_is_asked_directly_whatever_proxy_leads_to_the_outside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with bound(listening=False) as nobody:
        for name in ("http_proxy", "https_proxy", "grpc_proxy"):
            monkeypatch.setenv(name, f"http://{nobody}")
        for name in ("no_proxy", "no_grpc_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        async with engine() as served:
            assert await drain_engine(served.address, 1) == 0


async def test_a_drain_reaches_the_engines_that_are_up_and_fails_for_none_that_is_down() -> None:
    outcomes: asyncio.Queue[bool] = asyncio.Queue()
    registry, store = Registry(), Store(None)
    changes = Changes(
        registry,
        Router(registry, LeastOutstanding(), RouteTable()),
        store,
        build=static_worker,
        permit=lambda values: None,
        servable=servable,
        now=lambda: 0.0,
        drained=outcomes.put_nowait,
    )
    async with engine() as first, engine() as second:
        with bound(listening=False) as down:
            for number, address in enumerate((first.address, second.address, down, "")):
                beat = WorkerReport(f"w{number}", f"h:{number + 1}", "m", grpc_address=address)
                registry.beat(beat, 0.0)
            assert await changes.drain("m", 5) == "m"
            assert sorted([await outcomes.get() for _ in range(3)]) == [False, True, True]
        assert (first.deadlines, second.deadlines) == ([5000], [5000])
    store.close()


async def test_an_end_does_not_wait_for_an_engine_that_is_still_draining() -> None:
    let_go = asyncio.Event()

    async def hang(context: Any) -> int:
        context.add_done_callback(lambda call: let_go.set())
        await asyncio.Event().wait()
        return 0

    registry, store = Registry(), Store(None)
    changes = Changes(
        registry,
        Router(registry, LeastOutstanding(), RouteTable()),
        store,
        build=static_worker,
        permit=lambda values: None,
        servable=servable,
        now=lambda: 0.0,
    )
    async with engine() as served:
        served.drain = hang
        registry.beat(WorkerReport("a", "h:1", "m", grpc_address=served.address), 0.0)
        await changes.drain("m", 3600)
        await served.asked.wait()
        await changes.stop()
        await let_go.wait()  # The call is over for the engine, too.
    store.close()
