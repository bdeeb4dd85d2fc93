"""`pointsman demo`: a gateway and real engines on this machine, to look at, or to check that everything works.

The gateway runs in this process, the engines are processes of their own, as in real life: they announce themselves by
heartbeats, and one that is killed is really gone. What is checked is in `pointsman.trial`.
"""

import asyncio
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from contextlib import AsyncExitStack, suppress
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import uvloop
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from pointsman.app import Gateway
from pointsman.config import Config, GatewayConfig
from pointsman.domain.worker import Worker
from pointsman.flow.exchange import Exchange
from pointsman.observe.metrics import Metrics
from pointsman.trial import Trial

__all__ = ["Fleet", "demo"]

MODEL = "smollm2"
START_LIMIT_S = 900.0
REFRESH_S = 0.25
RECENT = 8


class Record(Metrics):
    """Metrics that also remember the latest requests, for people to look at."""

    def __init__(
        self, workers: Callable[[], Iterable[Worker]], paths: Collection[str], **options: Any
    ) -> None:
        super().__init__(workers, paths, **options)
        self.recent: deque[Exchange] = deque(maxlen=RECENT)
        self.served: Counter[str] = Counter()

    def finished(self, x: Exchange) -> None:
        """Count a request, and keep it for a while."""
        super().finished(x)
        self.recent.append(x)
        self.served[x.worker_id] += 1


class Fleet:
    """A gateway and its engines, as an async context manager; `kill` is a real SIGKILL."""

    def __init__(self, engines: int, port: int, console: Console) -> None:
        self._names = [f"engine-{number}" for number in range(1, engines + 1)]
        self._console = console
        self._logs = tempfile.TemporaryDirectory(prefix="pointsman-demo-")
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        options = GatewayConfig(
            listen=f"127.0.0.1:{port}",
            health_listen="127.0.0.1:0",
            registry_listen="127.0.0.1:0",
            access_log="off",  # the table of requests says it
        )
        self.gateway = Gateway(Config(gateway=options), Record)

    async def __aenter__(self) -> Self:
        await self.gateway.start()
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._stop)
            for name in self._names:
                self._processes[name] = self._start(name)
            with self._console.status(
                "the engines load their model (the first time it is fetched)"
            ):
                await self._joined()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._stack.aclose()

    @property
    def url(self) -> str:
        """The base address of the gateway."""
        host, port = self.gateway.address
        return f"http://{host}:{port}"

    @property
    def workers(self) -> tuple[Worker, ...]:
        """The live workers."""
        return self.gateway.registry.snapshot()

    @property
    def record(self) -> Record:
        """What the gateway did."""
        assert isinstance(self.gateway.metrics, Record)
        return self.gateway.metrics

    def kill(self, name: str) -> None:
        """End an engine as a crash would."""
        self._processes[name].kill()

    def _start(self, name: str) -> subprocess.Popen[bytes]:
        with self._log(name).open("wb") as log:
            return subprocess.Popen(
                [
                    *(sys.executable, "-m", "pointsman", "engine", "--listen", "127.0.0.1:0"),
                    *("--registry", f"127.0.0.1:{self.gateway.registry_port}"),
                    *("--worker-id", name, "--served-model", MODEL),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the demo, which then stops the engines.
            )

    def _log(self, name: str) -> Path:
        return Path(self._logs.name) / f"{name}.log"

    async def _joined(self) -> None:
        async with asyncio.timeout(START_LIMIT_S):
            while len(self.workers) < len(self._names):
                for name, process in self._processes.items():
                    if process.poll() is not None:
                        raise RuntimeError(f"{name} did not start:\n{self._log(name).read_text()}")
                await asyncio.sleep(0.1)

    async def _stop(self) -> None:
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            try:
                await asyncio.to_thread(process.wait, 5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        await self.gateway.stop()
        self._logs.cleanup()


def demo(*, check: bool, engines: int, port: int) -> int:
    """Run the demo; with `check` ask for everything once, kill a worker, and return 0 only if all was right."""
    console = Console()
    if find_spec("xllamacpp") is None:
        console.print("pointsman demo needs the engine extra: pip install 'pointsman\\[engine]'")
        return 2
    try:
        return uvloop.run(_check(console, engines) if check else _show(console, engines, port))
    except KeyboardInterrupt:
        return 0
    except (RuntimeError, OSError, TimeoutError) as error:
        console.print(f"[red]the demo failed[/]: {error}", highlight=False)
        return 1


async def _check(console: Console, engines: int) -> int:
    async with Fleet(max(engines, 2), 0, console) as fleet:
        console.print(f"gateway on {fleet.url}, engines: {', '.join(w.id for w in fleet.workers)}")
        trial = Trial(console, fleet.url, MODEL)
        await asyncio.to_thread(trial.kinds)
        await asyncio.to_thread(trial.death, lambda: _busiest(fleet))
        console.print(_workers(fleet))
        return trial.verdict()


def _busiest(fleet: Fleet) -> str:
    """Kill the worker with the most requests in flight, and return its name."""
    victim = max(fleet.workers, key=lambda worker: worker.in_flight)
    fleet.kill(victim.id)
    return victim.id


async def _show(console: Console, engines: int, port: int) -> int:
    async with Fleet(engines, port, console) as fleet:
        console.print(f"""
The gateway listens on [bold]{fleet.url}[/]; Ctrl-C ends it. Try, in another terminal:

  curl {fleet.url}/v1/chat/completions -d '{{"model": "{MODEL}", "stream": true,
    "messages": [{{"role": "user", "content": "Tell me a story about a lighthouse."}}]}}'

  OpenAI(base_url="{fleet.url}/v1", api_key="none")
""")
        ended = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, ended.set)
        with Live(console=console, auto_refresh=False) as live:
            while not ended.is_set():
                live.update(Group(_workers(fleet), _requests(fleet)), refresh=True)
                with suppress(TimeoutError):
                    await asyncio.wait_for(ended.wait(), REFRESH_S)
    return 0


def _workers(fleet: Fleet) -> Table:
    fleet.gateway.registry.expire(time.monotonic())
    table = Table(title="workers", title_justify="left")
    for column in ("worker", "state"):
        table.add_column(column)
    for column in ("in flight", "running", "queued", "KV blocks used", "requests"):
        table.add_column(column, justify="right")
    for worker in fleet.workers:
        used = worker.kv_total_blocks - worker.kv_free_blocks
        table.add_row(
            worker.id,
            "draining" if worker.draining else "routable",
            str(worker.in_flight),
            str(worker.running),
            str(worker.queue_depth),
            f"{used} of {worker.kv_total_blocks}",
            str(fleet.record.served[worker.id]),
        )
    return table


def _requests(fleet: Fleet) -> Table:
    table = Table(title="latest requests", title_justify="left")
    for column in ("path", "status", "worker", "why", "attempts", "first byte", "whole"):
        table.add_column(column)
    for x in fleet.record.recent:
        first = f"{x.first_byte_at - x.started:.3f} s" if x.first_byte_at else "-"
        table.add_row(
            x.path,
            f"{x.status} {x.error}".strip(),
            x.worker_id,
            x.reason,
            str(x.attempts),
            first,
            f"{x.finished_at - x.started:.3f} s",
        )
    return table
