"""The agent over loopback: an engine that sends no heartbeats joins two gateways, and leaves them when it is gone."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import pytest
from typer.testing import CliRunner

from pointsman.agent import Agent, status_of
from pointsman.app import Gateway
from pointsman.cli import app
from pointsman.dialect.reading import CONTEXT_MAX
from pointsman.domain.worker import Role, ServedModel, Worker
from pointsman.testing.engines import FakeVllm
from pointsman.testing.gateways import running

pytestmark = pytest.mark.anyio


async def until(holds: Callable[[], object]) -> None:
    """Wait until something holds: what goes over sockets has no clock that a test could turn."""
    for _ in range(1000):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never held")


@asynccontextmanager
async def beside(engine: FakeVllm, *gateways: Gateway) -> AsyncIterator[Agent]:
    worker = Worker(
        engine.name,
        model="",
        http_address=engine.http.address,
        dialect="",
        polled=True,
        poll_interval_s=0.05,
        poll_timeout_s=2.0,
    )
    registries = [f"127.0.0.1:{gateway.registry_port}" for gateway in gateways]
    agent = Agent(worker, registries, address=engine.http.address)
    task = asyncio.ensure_future(agent.run())
    try:
        yield agent
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def only(gateway: Gateway) -> Worker | None:
    workers = gateway.registry.snapshot()
    return workers[0] if workers else None


async def test_an_engine_joins_every_gateway_and_they_share_one_view() -> None:
    async with FakeVllm("a") as engine, running() as one, running() as two:
        engine.load.waiting, engine.load.running = 3, 2
        async with beside(engine, one, two):
            await until(lambda: only(one) and only(two))
            worker = only(one)
            assert worker is not None
            assert (worker.model, worker.dialect, worker.static) == ("m", "vllm", False)
            assert (worker.queue_depth, worker.running) == (3, 2)
            engine.load.waiting = 7
            await until(lambda: [only(each).queue_depth for each in (one, two)] == [7, 7])  # type: ignore[union-attr]
            assert only(one) is worker


async def test_an_engine_that_is_gone_drains_at_once_and_comes_back_as_another_life() -> None:
    async with FakeVllm("a") as engine, running() as gateway, beside(engine, gateway):
        await until(lambda: only(gateway))
        former = only(gateway)
        engine.ready = False
        await until(lambda: only(gateway) is None or only(gateway).draining)  # type: ignore[union-attr]
        assert not gateway.registry.routable("m", Role.UNIFIED)
        engine.ready = True
        await until(lambda: gateway.registry.routable("m", Role.UNIFIED))
        assert only(gateway) is not former


async def test_an_agent_that_is_told_to_end_drains_its_engine() -> None:
    async with FakeVllm("a") as engine, running() as gateway:
        async with beside(engine, gateway):
            await until(lambda: only(gateway))
        worker = only(gateway)
        assert worker is not None
        assert worker.draining


async def test_an_engine_that_is_not_there_is_not_announced() -> None:
    async with FakeVllm("a") as engine, running() as gateway:
        engine.ready = False
        async with beside(engine, gateway):
            await asyncio.sleep(0.3)
        assert only(gateway) is None


def test_everything_that_is_read_is_said() -> None:
    worker = Worker("a", model="m", http_address="h:1", dialect="sglang", role=Role.PREFILL)
    worker.served = (ServedModel("fr", "m", 512),)
    worker.kv_usage, worker.cached_tokens, worker.remote_tokens = 0.5, 7, 8
    worker.kv_tokens = 4096
    worker.degraded = "load: 404"
    status = status_of(worker, "10.0.0.1:1")
    assert (status.http_address, status.role, status.dialect) == ("10.0.0.1:1", "prefill", "sglang")
    assert [(each.id, each.parent) for each in status.served] == [("fr", "m")]
    assert (status.kv_usage, status.cached_tokens, status.remote_tokens) == (0.5, 7, 8)
    assert status.kv_tokens == 4096
    assert status.degraded == "load: 404"
    nothing = status_of(Worker("a", model="m", http_address="h:1"), "h:1")
    assert not any(
        nothing.HasField(each)
        for each in ("kv_usage", "cached_tokens", "remote_tokens", "kv_tokens")
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--registry is missing"),
        (["--registry", "g:1", "--registry", "g"], "--registry g: the port is missing"),
        (["--registry", ":1"], "--registry :1: host or port is missing"),
        (["--registry", "g:1", "--engine", "nonsense"], "url"),
        (["--registry", "g:1", "--role", "prefill", "--dialect", "vllm"], "connector"),
        (["--registry", "g:1", "--api-key-env", "NO_SUCH_NAME"], "NO_SUCH_NAME"),
        (["--registry", "g:1", "--registry-ca", "/no/such/file"], "/no/such/file"),
        (["--registry", "g:1", "--worker-id", "two words"], "worker_id"),
        (["--registry", "g:1", "--model", "m" * 257], "model"),
    ],
)
def test_what_cannot_be_is_one_line(arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["agent", *arguments])
    assert (done.exit_code, said in done.output) == (2, True), done.output


def test_a_password_in_the_url_of_the_engine_is_refused_and_not_repeated() -> None:
    asked = ["agent", "--registry", "g:1", "--engine", "http://me:secret@127.0.0.1:9"]
    done = CliRunner().invoke(app, asked)
    assert (done.exit_code, "url" in done.output, "secret" in done.output) == (2, True, False)


async def test_an_engine_that_says_what_no_heartbeat_has_room_for_is_announced() -> None:
    async with FakeVllm("a") as engine, running() as gateway:
        engine.models = [ServedModel("m", "", 2**60)]
        async with beside(engine, gateway):
            await until(lambda: only(gateway))
            worker = only(gateway)
            assert worker is not None
            assert worker.max_model_len == worker.served[0].max_model_len == CONTEXT_MAX
