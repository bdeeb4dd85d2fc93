"""The whole way over real sockets: a file lists stand-ins of vLLM, they are polled, one dies, one needs a key."""

import asyncio
import logging
import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from pointsman.control.discovery.file import File
from pointsman.control.discovery.found import Found
from pointsman.control.discovery.sources import Sources, SourceSpec
from pointsman.control.polling import Poller
from pointsman.dialect.engines import Probed
from pointsman.domain.registry import Registry
from pointsman.domain.worker import Role, Worker
from pointsman.testing.client import Client
from pointsman.testing.engines import FakeVllm

pytestmark = pytest.mark.anyio

INTERVAL_S = 0.05


async def ask(worker: Worker, path: str, timeout_s: float) -> Probed:
    host, _, port = worker.http_address.rpartition(":")
    head = b"GET %b%b HTTP/1.1\r\nhost: a\r\n%b\r\n" % (
        worker.base_path.encode(),
        path.encode(),
        worker.credentials,
    )
    try:
        async with asyncio.timeout(timeout_s), Client((host, int(port))) as client:
            await client.send(head)
            response = await client.response()
    except (OSError, EOFError) as error:
        return Probed(0, error=type(error).__name__)
    return Probed(response.status, response.body)


def build(found: Found) -> Worker:
    key = found.labels.get("connector", "")  # Any label serves to tell who has a key here.
    return Worker(
        found.id,
        model="",
        http_address=found.address,
        dialect="",
        base_path=found.labels.get("path", ""),
        polled=True,
        poll_interval_s=INTERVAL_S,
        credentials=b"authorization: Bearer %b\r\n" % key.encode() if key else b"",
    )


class Gateway:
    """What of a gateway knows its workers, over one file."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.registry = Registry()
        self.changed = asyncio.Event()
        self.registry.on_leave.append(self.change)
        self.sources = Sources(self.registry, sleep=asyncio.sleep)
        self.poller = Poller(
            self.registry,
            ask,
            now=asyncio.get_running_loop().time,
            sleep=asyncio.sleep,
            random=random.Random(5).random,
            on_change=self.change,
        )

    def change(self, worker: Worker) -> None:
        self.changed.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until something holds that changes of workers bring about."""
        async with asyncio.timeout(20):
            while not holds():
                self.changed.clear()
                await self.changed.wait()

    def lists(self, *groups: tuple[str, dict[str, str]]) -> None:
        beside = self.file.with_name("new")
        beside.write_bytes(
            msgspec.json.encode([{"targets": [at], "labels": labels} for at, labels in groups])
        )
        beside.replace(self.file)

    async def __aenter__(self) -> "Gateway":
        self.poller.start()
        self.sources.set(
            [
                SourceSpec(
                    "file engines",
                    str(self.file),
                    lambda: File(self.file, sleep=lambda _: asyncio.sleep(0.02)),
                    build,
                )
            ]
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.sources.stop()
        await self.poller.stop()

    async def routes_to(self, *ids: str) -> None:
        """Wait until these workers, and no others, may take requests."""
        await self.until(
            lambda: tuple(w.id for w in self.registry.routable("m", Role.UNIFIED)) == ids
        )

    def worker(self, id: str) -> Worker:
        return next(each for each in self.registry.snapshot() if each.id == id)


async def test_engines_that_a_file_lists_come_are_read_go_and_come_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pointsman.control.polling")
    async with FakeVllm("a") as a, FakeVllm("b") as b, Gateway(tmp_path / "list.json") as gateway:
        a.load.waiting = 4
        gateway.lists((a.http.address, {"id": "a"}), (b.http.address, {"id": "b"}))
        await gateway.routes_to("a", "b")
        worker = gateway.worker("a")
        assert (worker.dialect, worker.model, worker.queue_depth) == ("vllm", "m", 4)
        assert worker.max_model_len == a.models[0].max_model_len
        assert worker.degraded == ""
        b.ready = False
        await gateway.routes_to("a")
        b.ready = True
        await gateway.routes_to("a", "b")
        await b.die()
        await gateway.routes_to("a")
        gateway.lists((a.http.address, {"id": "a"}))
        await gateway.until(lambda: gateway.registry.snapshot() == (worker,))
    said = [each.getMessage() for each in caplog.records]
    assert sorted(each for each in said if " a " in each) == ["worker a (m) is up"]
    assert [each.split(": ")[0].split(" (")[0] for each in said if " b " in each] == [
        "worker b"
    ] * 4


async def test_r12_every_probe_has_the_credentials_and_the_base_path_of_its_worker(
    tmp_path: Path,
) -> None:
    async with FakeVllm("a") as a, FakeVllm("b") as b, Gateway(tmp_path / "list.json") as gateway:
        a.key, a.base = "sk-a", "/engine"
        gateway.lists((a.http.address, {"id": "a", "connector": "sk-a", "path": "/engine"}))
        await gateway.routes_to("a")
        assert (gateway.worker("a").dialect, gateway.worker("a").degraded) == ("vllm", "")
        # R13: without a key it is there all the same, and says what is wrong with it.
        b.key = "sk-b"
        gateway.lists((b.http.address, {"id": "b"}))
        await gateway.until(lambda: [each.id for each in gateway.registry.snapshot()] == ["b"])
        await gateway.until(lambda: gateway.worker("b").up)
        assert gateway.worker("b").degraded == "models 401, its model is not known"
