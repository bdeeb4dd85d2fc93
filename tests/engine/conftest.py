"""Fakes of a model and of the machine that computes it, and an engine over real sockets around them."""

import asyncio
import contextlib
import functools
import importlib.util
import os
import queue
import re
import signal
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

NEEDED = ("google_crc32c", "jinja2", "numpy", "uvicorn")
# Test modules of the engine import what the [engine] extra brings. Without it they are left out, and
# `test_extra.py` says so.
collect_ignore_glob = (
    [] if all(importlib.util.find_spec(name) for name in NEEDED) else ["test_engine_*.py"]
)

CELL = struct.Struct("<iii")
"""One token of an exported sequence: what it is, and the shape of the batch that computed it."""
END = 256
START = 257


class ByteModel:
    """A vocabulary of the 256 bytes, an end token and a start token."""

    n_vocab = 258
    bos = START
    eos = END
    chat_template: str | None = None
    end_of_generation = frozenset({END})

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        return [START] * add_special + list(text.encode())

    def piece(self, token: int, *, special: bool = False) -> bytes:
        if token < END:
            return bytes([token])
        return {END: b"<end>", START: b"<start>"}[token] if special else b""


class FakeMachine:
    """Logits that depend on every token of a sequence *and on the shape of the batch that computed it*.

    So two runs agree only if each of their tokens was computed in the same way, as with real floating point.
    `script`, a function from the tokens of a sequence to the next one, makes the answer known instead. A batch
    takes `step_s` seconds, in which other threads may run, as they may while a real machine computes: a fake
    that never lets go of the interpreter would starve the event loop of an engine that has no end of work.
    """

    def __init__(
        self, script: Callable[[list[int]], int] | None = None, *, step_s: float = 0.0
    ) -> None:
        self.script = script
        self.step_s = step_s
        self.cells: dict[int, list[tuple[int, tuple[int, int]]]] = {}
        self.batches: list[list[Any]] = []
        self.broken = False

    def decode(self, rows: Sequence[Any]) -> Any:
        import numpy as np

        if self.broken:
            raise RuntimeError("the machine is broken")
        if self.step_s:
            time.sleep(self.step_s)
        self.batches.append(list(rows))
        sequences = {row.sequence for row in rows}
        assert len(sequences) in (1, len(rows)), "prefill and decode may not share a batch"
        logits = []
        for i, row in enumerate(rows):
            cells = self.cells.setdefault(row.sequence, [])
            assert row.position == len(cells), "positions follow each other"
            cells.append((row.token, (len(rows), i) if len(sequences) == 1 else (1, 0)))
            if row.output:
                logits.append(self._logits(cells))
        return np.array(logits, np.float32).reshape(len(logits), ByteModel.n_vocab)

    def forget(self, sequence: int, start: int = 0) -> None:
        del self.cells.setdefault(sequence, [])[start:]

    def export(self, sequence: int) -> bytes:
        return b"".join(CELL.pack(token, *how) for token, how in self.cells[sequence])

    def load(self, sequence: int, state: bytes) -> None:
        if self.broken:
            raise RuntimeError("the machine is broken")
        self.cells[sequence] = [(token, (rows, i)) for token, rows, i in CELL.iter_unpack(state)]

    def _logits(self, cells: list[tuple[int, tuple[int, int]]]) -> Any:
        import numpy as np

        if self.script is not None:
            row = np.zeros(ByteModel.n_vocab)
            row[self.script([token for token, _ in cells])] = 50
            return row
        seed = zlib.crc32(repr(cells).encode())
        row = np.random.default_rng(seed).normal(0, 2, ByteModel.n_vocab)
        row[END] = -50
        return row


def answering(text: str, prompt_length: int = 0) -> Callable[[list[int]], int]:
    """A script that says `text` after a prompt of a known length, and then ends."""
    said = list(text.encode())

    def script(tokens: list[int]) -> int:
        at = len(tokens) - prompt_length
        return said[at] if at < len(said) else END

    return script


@dataclass
class Engine:
    url: str
    scheduler: Any
    machine: FakeMachine

    def settled(self, condition: Callable[[], bool], within: float = 2.0) -> bool:
        """Whether `condition` comes true in time; the scheduler's own condition is what is waited on."""
        deadline = time.monotonic() + within
        while not condition():
            if time.monotonic() > deadline:
                return False
            self.scheduler.wait_idle(0.01)
        return True


class FakeLayout:
    """A fake machine's state in blocks: 16 cells of 12 bytes each, zeros behind the last one."""

    shape = (1, 1, 3, 16)

    def __init__(self) -> None:
        from pointsman.engine.kv.blocks import Shape

        self.shape = Shape(*self.shape)
        assert self.shape.payload_bytes == 16 * CELL.size

    def split(self, state: bytes, n_tokens: int) -> list[bytes]:
        size = 16 * CELL.size
        assert len(state) == n_tokens * CELL.size
        return [state[at : at + size].ljust(size, b"\0") for at in range(0, len(state), size)]

    def join(self, payloads: Sequence[bytes], n_tokens: int) -> bytes:
        return b"".join(payloads)[: n_tokens * CELL.size]


@dataclass
class Worker(Engine):
    """An engine in a role: HTTP, EngineControl and, where it decodes, KvTransferService, over real sockets."""

    ports: Any
    pool: Any
    served: Any
    stop: Callable[[], None]

    def status(self) -> Any:
        from pointsman.engine.roles import status_of

        return status_of(self.served, self.ports, worker_id="w", address=self.url)


@pytest.fixture
def fakes() -> Any:
    class Fakes:
        Model = ByteModel
        Machine = FakeMachine
        answering = staticmethod(answering)
        end = END
        start = START

    return Fakes


@pytest.fixture
def serve() -> Iterator[Callable[..., Engine]]:
    """A factory: `serve(machine, slots=…, context=…, queue_capacity=…)` starts an engine on a free port."""
    from pointsman.engine.command import _computing, _listener, _server
    from pointsman.engine.http import engine_app
    from pointsman.engine.scheduler import Scheduler
    from pointsman.engine.served import Served

    with contextlib.ExitStack() as stack:

        def start(machine: FakeMachine, **options: Any) -> Engine:
            settings = {"slots": 4, "context": 512} | options
            scheduler = Scheduler(machine, ByteModel(), now=time.monotonic, **settings)
            stack.enter_context(_computing(scheduler, on_failure=lambda: None))
            listener = stack.enter_context(_listener("127.0.0.1:0"))
            server = _server(engine_app(Served("bytes", ByteModel(), scheduler)))
            thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})

            def stop() -> None:
                server.should_exit = True
                thread.join()

            thread.start()
            stack.callback(stop)
            return Engine(f"http://127.0.0.1:{listener.getsockname()[1]}", scheduler, machine)

        yield start


@pytest.fixture
def worker() -> Iterator[Callable[..., Worker]]:
    """A factory: `worker(role, machine, …)` starts an engine of that role, all its ports on one event loop."""
    from pointsman.engine.command import _computing, _listener, _server
    from pointsman.engine.http import engine_app
    from pointsman.engine.kv.pool import Pool
    from pointsman.engine.resume import Handles
    from pointsman.engine.roles import serve_role
    from pointsman.engine.scheduler import Scheduler
    from pointsman.engine.served import Served

    with contextlib.ExitStack() as stack:

        def start(
            role: str,
            machine: FakeMachine | None = None,
            *,
            push: Any = None,
            kv_blocks: int = 64,
            hold_s: float = 120.0,
            grpc_listen: str = "127.0.0.1:0",
            kv_listen: str = "127.0.0.1:0",
            **options: Any,
        ) -> Worker:
            machine = machine or FakeMachine()
            layout: Any = FakeLayout()
            settings = {"slots": 4, "context": 512} | options
            scheduler = Scheduler(machine, ByteModel(), now=time.monotonic, **settings)
            stack.enter_context(_computing(scheduler, on_failure=lambda: None))
            handles = None
            if role == "decode":
                handles = Handles(Pool(kv_blocks, now=time.monotonic, hold_s=hold_s), layout)
            served = Served("bytes", ByteModel(), scheduler, handles)
            listener = stack.enter_context(_listener("127.0.0.1:0"))
            server = _server(engine_app(served))
            started: queue.Queue[Any] = queue.Queue()

            async def main() -> None:
                async with serve_role(
                    served,
                    role=role,
                    layout=layout,
                    push=push,
                    grpc_listen=grpc_listen,
                    kv_listen=kv_listen,
                ) as ports:
                    started.put(ports)
                    await server.serve(sockets=[listener])

            thread = threading.Thread(target=asyncio.run, args=(main(),))

            def stop() -> None:
                server.should_exit = True
                thread.join()

            thread.start()
            stack.callback(stop)
            ports = started.get(timeout=10)
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            pool = handles.pool if handles else None
            return Worker(url, scheduler, machine, ports, pool, served, stop)

        yield start


class EngineProcess:
    """`pointsman engine` with the real model, on free ports."""

    def __init__(self, weights: Path, *options: str) -> None:
        command = [sys.executable, "-m", "pointsman.engine", "--listen", "127.0.0.1:0"]
        command += ["--model", str(weights), "--served-model", "smollm2", *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        lines = self.process.stdout.readline() + self.process.stdout.readline()
        found = re.fullmatch(
            r"engine (\S+) serves smollm2 on (127\.0\.0\.1:\d+)\n"
            r"(\S+): control on (127\.0\.0\.1:\d+)(?:, KV on (127\.0\.0\.1:\d+))?\n",
            lines,
        )
        assert found, lines
        self.worker_id, self.address, self.role, self.control, self.kv = found.groups()
        self.url = f"http://{self.address}"

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        assert self.process.stdout is not None
        try:
            return self.process.wait(20)
        finally:
            self.process.kill()
            self.process.stdout.close()

    def post(self, path: str, headers: dict[str, str] | None = None, **body: Any) -> dict[str, Any]:
        body = {"model": "smollm2", **body}
        answer = httpx.post(self.url + path, json=body, headers=headers, timeout=120)
        assert answer.status_code == 200, answer.text
        result: dict[str, Any] = answer.json()
        return result

    def health(self) -> dict[str, Any]:
        result: dict[str, Any] = httpx.get(self.url + "/health").json()
        return result

    def running(self) -> int:
        return int(self.health()["running"])


@pytest.fixture(scope="session")
def weights() -> Path:
    """The default model, fetched where it is not there yet."""
    from rich.console import Console

    from pointsman.engine.weights import FetchFailed, cache_folder, default_weights

    try:
        return default_weights(cache_folder(os.environ), Console(stderr=True))
    except FetchFailed as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def launch(weights: Path) -> Callable[..., EngineProcess]:
    """A factory: `launch("--role", "decode")` starts an engine process; whoever does so stops it."""
    return functools.partial(EngineProcess, weights)
