"""A fleet that was scaled to zero comes back while clients wait (A10), over real sockets."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from pointsman.app import Gateway
from pointsman.config import StaticWorker
from pointsman.domain.registry import WorkerReport
from pointsman.net.clock import monotonic
from pointsman.testing.client import Client, Response, post
from pointsman.testing.engines import FakeVllm
from pointsman.testing.gateways import counted, running
from pointsman.testing.origin import Origin, answers

pytestmark = pytest.mark.anyio

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
HELD = "tl_gateway_held"


def beat(gateway: Gateway, address: str) -> None:
    gateway.registry.beat(WorkerReport("a", address, "m"), monotonic())


def known(gateway: Gateway) -> None:
    gateway.registry.remember("m", monotonic())


async def until(holds: Callable[[], object]) -> None:
    for _ in range(500):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise TimeoutError("it never came to that")


async def ask(gateway: Gateway) -> Response:
    async with Client(gateway.address) as client:
        return await client.ask(post(CHAT))


@asynccontextmanager
async def waiting(gateway: Gateway, number: int = 1) -> AsyncIterator[list[asyncio.Task[Response]]]:
    """Let requests be held; once the block ends, all of them have been answered."""
    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(ask(gateway)) for _ in range(number)]
        await until(lambda: counted(gateway, HELD) == number)
        yield asked


async def test_a10_a_request_is_answered_by_the_worker_that_comes_while_it_waits() -> None:
    async with Origin(answers({"ok": 1})) as engine, running(hold_timeout_s=30.0) as gateway:
        known(gateway)
        async with waiting(gateway, 3) as asked:
            beat(gateway, engine.address)
        assert [each.result().status for each in asked] == [200] * 3
        assert counted(gateway, 'tl_gateway_holds_total{outcome="routed"}') == 3
        assert counted(gateway, HELD) == 0
        assert [worker.in_flight for worker in gateway.registry.snapshot()] == [0]


async def test_a10_polling_that_finds_a_worker_up_ends_the_wait() -> None:
    async with FakeVllm("a") as engine:
        engine.ready = False
        listed = StaticWorker(
            id="a",
            url=f"http://{engine.http.address}",
            model="m",
            dialect="vllm",
            poll_interval_s=0.1,
        )
        async with running(listed=[listed], hold_timeout_s=30.0) as gateway:
            known(gateway)
            await until(lambda: not gateway.registry.snapshot()[0].up)
            async with waiting(gateway) as asked:
                engine.ready = True
            assert asked[0].result().status == 200


async def test_a10_a_model_that_is_drained_is_waited_for_until_the_drain_is_taken_back() -> None:
    async with (
        Origin(answers({"ok": 1})) as engine,
        running({"a": engine.address}, hold_timeout_s=30.0) as gateway,
    ):
        gateway.registry.drain("m")
        async with waiting(gateway) as asked:
            gateway.registry.undrain("m")
        assert asked[0].result().status == 200


async def test_a10_who_waits_in_vain_or_finds_no_room_gets_the_usual_503() -> None:
    async with running(hold_timeout_s=1.0, hold_max=1) as gateway:
        known(gateway)
        async with waiting(gateway) as asked:
            second = await ask(gateway)
            assert not asked[0].done()
        for response in (second, asked[0].result()):
            assert (response.status, response.header("retry-after")) == (503, "1")
            assert b"no_capacity" in response.body
        assert counted(gateway, 'tl_gateway_holds_total{outcome="refused"}') == 1
        assert counted(gateway, 'tl_gateway_holds_total{outcome="timed_out"}') == 1


async def test_a10_an_unknown_model_is_404_at_once_and_readiness_does_not_wait() -> None:
    async with running(hold_timeout_s=30.0) as gateway:
        assert (await ask(gateway)).status == 404
        known(gateway)
        async with Client(gateway.health_address) as client:
            ready = await client.ask(b"GET /readyz HTTP/1.1\r\nhost: gateway\r\n\r\n")
        assert ready.status == 503


@pytest.mark.parametrize("way", [Client.leave, Client.hang_up], ids=["reset", "in order"])
async def test_a10_a_client_that_leaves_is_waited_with_no_longer(
    way: Callable[[Client], None],
) -> None:
    async with Origin(answers({"ok": 1})) as engine, running(hold_timeout_s=30.0) as gateway:
        known(gateway)
        async with Client(gateway.address) as client:
            await client.send(post(CHAT))
            await until(lambda: counted(gateway, HELD) == 1)
            way(client)
            await until(lambda: counted(gateway, HELD) == 0)
        beat(gateway, engine.address)
        assert (await ask(gateway)).status == 200
        assert len(engine.requests) == 1
        assert counted(gateway, 'tl_gateway_holds_total{outcome="abandoned"}') == 1
        assert counted(gateway, "tl_gateway_faults_total") == 0


async def test_a10_a_gateway_that_drains_lets_those_who_wait_go() -> None:
    async with running(hold_timeout_s=30.0) as gateway:
        known(gateway)
        async with waiting(gateway) as asked:
            await gateway.drain()
        assert asked[0].result().status == 503
        assert counted(gateway, 'tl_gateway_holds_total{outcome="drained"}') == 1
