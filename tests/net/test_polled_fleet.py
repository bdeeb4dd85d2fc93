"""A gateway over engines that send no heartbeats: stand-ins of vLLM that it polls, on its own connections."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pointsman.app import Gateway
from pointsman.config import StaticWorker, WorkerFile
from pointsman.domain.worker import Worker
from pointsman.testing.client import Client, Response, post
from pointsman.testing.engines import FakeVllm
from pointsman.testing.gateways import running
from pointsman.testing.handoffs import Say
from pointsman.testing.origin import Conversation, Origin

pytestmark = pytest.mark.anyio

KEY = "sk-of-the-engine"


class Watched:
    """A gateway, looked at until something holds."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway

    def worker(self, id: str) -> Worker | None:
        found = [each for each in self.gateway.registry.snapshot() if each.id == id]
        return found[0] if found else None

    async def until(self, holds: Callable[[Worker], object], id: str = "a") -> Worker:
        """Wait until something holds for a worker, and return it."""
        for _ in range(1000):
            if (worker := self.worker(id)) is not None and holds(worker):
                return worker
            await asyncio.sleep(0.02)
        raise TimeoutError(f"{self.worker(id)} never got there")

    async def chat(self, model: str = "m") -> int:
        """Ask for a chat, and return the status."""
        messages = [{"role": "user", "content": "hi"}]
        body = {"model": model, "messages": messages, "max_tokens": 4}
        async with Client(self.gateway.address) as client:
            return (await client.ask(post(body))).status


@asynccontextmanager
async def watched(**options: Any) -> AsyncIterator[Watched]:
    async with running(**options) as gateway:
        yield Watched(gateway)


def listed(engine: FakeVllm, path: str = "", **options: Any) -> StaticWorker:
    url = f"http://{engine.http.address}{path}"
    return StaticWorker(id=engine.name, url=url, poll_interval_s=0.1, **options)


async def test_r12_probes_have_the_key_and_the_base_path_of_the_worker_and_so_have_requests(
    tmp_path: Path,
) -> None:
    key = tmp_path / "key"
    key.write_text(KEY + "\n")
    async with FakeVllm("a") as engine:
        engine.key, engine.base = KEY, "/engine"
        engine.load.waiting = 3
        async with watched(listed=[listed(engine, "/engine", api_key_file=str(key))]) as seen:
            worker = await seen.until(lambda worker: worker.up)
            assert (worker.dialect, worker.model, worker.degraded) == ("vllm", "m", "")
            assert worker.queue_depth == 3
            assert await seen.chat() == 200


async def test_the_admin_api_sends_no_secret_but_the_keys_of_engines_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, other = tmp_path / "key", tmp_path / "other"
    key.write_text(KEY)
    other.write_text("a-secret-of-the-host")
    monkeypatch.setenv("SOME_SECRET", "a-secret-of-the-gateway")
    async with FakeVllm("a") as engine, FakeVllm("b") as elsewhere:
        engine.key = elsewhere.key = KEY
        async with watched(listed=[listed(engine, api_key_file=str(key))]) as seen:

            async def put(**fields: str) -> Response:
                body = {"url": f"http://{elsewhere.http.address}", **fields}
                async with Client(seen.gateway.address) as client:
                    return await client.ask(post(body, "/admin/v1/workers/b", method="PUT"))

            for fields in (
                {"api_key_env": "SOME_SECRET"},
                {"api_key_env": "NO_SUCH_VARIABLE_OF_OURS"},
                {"api_key_file": str(other)},
                {"api_key_file": str(tmp_path / "none")},
            ):
                refused = await put(**fields)
                (param,) = fields
                assert (refused.status, refused.error["param"]) == (400, param)
                said = f"{param}: only what the configuration file itself uses"
                assert str(refused.error["message"]).startswith(said)
            assert seen.worker("b") is None
            assert (await put(api_key_file=str(key))).status == 201
            assert (await seen.until(lambda worker: worker.up, "b")).degraded == ""


async def test_r13_without_the_key_the_worker_says_so_and_a_configured_model_is_routed() -> None:
    async with FakeVllm("a") as engine, FakeVllm("b") as other:
        engine.key = other.key = KEY
        workers = [
            listed(engine),
            listed(other, model="m", dialect="vllm"),
        ]
        async with watched(listed=workers) as seen:
            auto = await seen.until(lambda worker: worker.up)
            assert auto.degraded == "models 401, its model is not known"
            known = await seen.until(lambda worker: worker.up, "b")
            assert "health 401: credentials" in known.degraded
            assert await seen.chat() == 401  # The engine's own word, for it was asked.


async def test_r14_a_gateway_starts_without_its_engines_and_takes_them_when_they_appear() -> None:
    async with FakeVllm("a") as engine, FakeVllm("b") as other:
        engine.ready = False
        workers = [listed(engine, model="m", dialect="vllm"), listed(other, model="n")]
        async with watched(listed=workers) as seen:
            await seen.until(lambda worker: worker.degraded.startswith("health 503"))
            assert await seen.chat() == 503
            engine.ready = True
            await seen.until(lambda worker: worker.up)
            assert await seen.chat() == 200


async def test_r17_b02_a_file_of_workers_is_followed_and_load_that_is_missing_is_said(
    tmp_path: Path,
) -> None:
    file = tmp_path / "engines.json"

    def list_only(engine: FakeVllm) -> None:
        labels = {"id": engine.name}
        new = tmp_path / "new"
        new.write_bytes(msgspec.json.encode([{"targets": [engine.http.address], "labels": labels}]))
        new.replace(file)

    async with FakeVllm("a") as engine, FakeVllm("b") as other:
        list_only(engine)
        other.says["/metrics"] = other.says["/load"] = Say(404, {"detail": "Not Found"})
        options = WorkerFile(file=str(file), poll_interval_s=0.1)
        async with watched(worker_files=(options,)) as seen:
            assert (await seen.until(lambda worker: worker.up)).source == f"file {file}"
            list_only(other)
            degraded = await seen.until(lambda worker: worker.up, "b")
            assert "metrics 404" in degraded.degraded
            assert seen.worker("a") is None
            exposed = seen.gateway.metrics.render().decode()
            assert 'tl_gateway_worker_degraded{worker_id="b"} 1.0' in exposed
            assert 'tl_gateway_poll_changes_total{state="degraded"} 1.0' in exposed
            assert 'worker_id="a"' not in exposed
            probed = engine.seen("probed")
            await other.reached("probed", other.seen("probed") + 8)
            assert engine.seen("probed") == probed
            assert await seen.chat() == 200


async def test_an_answer_that_does_not_end_is_given_up_and_the_engine_is_used_without_it() -> None:
    sent = 0

    async def script(conversation: Conversation) -> None:
        nonlocal sent
        path = conversation.request.line.split()[1]
        if path != "/metrics":
            body = MODELS if path == "/v1/models" else b"{}"
            await conversation.send(
                b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body
            )
            return
        piece = 16 * (b"ffff\r\n" + 0xFFFF * b"x" + b"\r\n")
        await conversation.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        while sent < 256 << 20:
            await conversation.send(piece)
            sent += len(piece)

    async with Origin(script) as origin:
        url = f"http://{origin.address}"
        worker = StaticWorker(id="a", url=url, poll_interval_s=60.0, poll_timeout_s=30.0)
        async with watched(listed=[worker]) as seen:
            worker_now = await seen.until(lambda worker: worker.up)
            assert worker_now.model == "m"
            assert worker_now.degraded.startswith("metrics: an answer without an end")
    assert sent < 32 << 20  # 8 MiB, and what the kernel holds.


MODELS = b'{"data":[{"id":"m","owned_by":"vllm"}]}'
