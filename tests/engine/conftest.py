"""Fakes of a model and of the machine that computes it, and an engine over real sockets around them."""

import contextlib
import importlib.util
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

NEEDED = ("jinja2", "numpy", "uvicorn")
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
