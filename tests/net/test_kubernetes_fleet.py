"""A whole gateway in a cluster: pods are engines, and the API server may be gone for longer than they are."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from pointsman.app import Gateway
from pointsman.config import KubernetesSource
from pointsman.testing.client import Client, post
from pointsman.testing.engines import FakeVllm
from pointsman.testing.gateways import running
from pointsman.testing.kubernetes import ApiServer, pod

pytestmark = pytest.mark.anyio

SOURCE = KubernetesSource(selector="app=vllm", poll_interval_s=0.1)


@pytest.fixture
async def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ApiServer]:
    kubeconfig = tmp_path / "kubeconfig"
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    async with ApiServer() as server:
        await asyncio.to_thread(kubeconfig.write_text, server.kubeconfig())
        yield server


def runs(engine: FakeVllm, *, ready: bool = True, terminating: bool = False) -> dict[str, object]:
    host, _, port = engine.http.address.rpartition(":")
    return pod(
        engine.name,
        ip=host,
        ready=ready,
        terminating=terminating,
        annotations={"pointsman.dev/port": port},
    )


def routable(gateway: Gateway) -> list[str]:
    return sorted(
        each.id
        for each in gateway.registry.snapshot()
        if each.up and each.model and not (each.terminating or each.draining)
    )


def degraded(gateway: Gateway) -> int:
    """What the metrics say of the source."""
    exposed = gateway.metrics.render().decode()
    (found,) = re.findall(r"^tl_gateway_source_degraded{.*} (\d)", exposed, re.MULTILINE)
    return int(found)


async def until(holds: Callable[[], object]) -> None:
    for _ in range(1000):
        if holds():
            return
        await asyncio.sleep(0.02)
    raise TimeoutError


async def chat(gateway: Gateway) -> int:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    async with Client(gateway.address) as client:
        return (await client.ask(post(body))).status


async def test_r03_r04_pods_serve_while_they_are_ready_whatever_their_engines_say(
    api: ApiServer,
) -> None:
    async with FakeVllm("a") as a, FakeVllm("b") as b:
        api.put(runs(a))
        async with running(kubernetes=[SOURCE]) as gateway:
            await until(lambda: routable(gateway) == ["a.default"])
            assert await chat(gateway) == 200
            api.put(runs(b))
            await until(lambda: routable(gateway) == ["a.default", "b.default"])
            api.put(runs(a, ready=False))
            await until(lambda: routable(gateway) == ["b.default"])
            assert await chat(gateway) == 200
            api.put(runs(b, terminating=True))
            await until(lambda: routable(gateway) == [])
            assert [each.id for each in gateway.registry.snapshot()] == ["b.default"]
            assert await chat(gateway) == 503
            api.delete("b")
            await until(lambda: not gateway.registry.snapshot())


async def test_r01_an_engine_that_was_deleted_while_the_api_was_away_is_gone_when_it_is_back(
    api: ApiServer,
) -> None:
    async with FakeVllm("a") as a, FakeVllm("b") as b:
        api.put(runs(a))
        api.put(runs(b))
        async with running(kubernetes=[SOURCE]) as gateway:
            await until(lambda: routable(gateway) == ["a.default", "b.default"])
            assert degraded(gateway) == 0
            await api.down()
            await until(lambda: degraded(gateway) == 1)
            api.delete("a")
            assert await chat(gateway) == 200, "requests do not need the API server"
            assert routable(gateway) == ["a.default", "b.default"]
            await api.up()
            await until(lambda: degraded(gateway) == 0)
            await until(lambda: routable(gateway) == ["b.default"])
            assert await chat(gateway) == 200
