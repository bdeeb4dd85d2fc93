"""What every measurement shares: building the C programs, mock engines, the load, and what a process tree costs.

It knows nothing of gateways (see gateways.py) and decides nothing about results (see compare.py, soak.py, kill.py).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Self

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

__all__ = [
    "BUILD",
    "ENGINE_HOSTS",
    "ENGINE_PORTS",
    "HERE",
    "LoadReport",
    "MockEngine",
    "Process",
    "Quantiles",
    "build",
    "engines",
    "fleet",
    "load",
    "load_command",
    "parse_report",
    "reached",
]

HERE = Path(__file__).resolve().parent
BUILD = HERE / "build"
ENGINE_PORTS = (9001, 9002)
ENGINE_HOSTS = tuple(f"127.0.0.1:{port}" for port in ENGINE_PORTS)
_FLEET_PORT = 10001  # the first of a fleet's
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Quantiles(msgspec.Struct, frozen=True):
    """Times in microseconds."""

    count: int
    p50: int
    p99: int
    max: int


class LoadReport(msgspec.Struct, frozen=True):
    """What load.c prints. `chunks` counts SSE events without [DONE]; `requests` counts answers and errors."""

    seconds: float
    requests: int
    plain: int
    streams: int
    broken_streams: int
    chunks: int
    bytes: int
    rps: float
    resent: int
    errors: int
    faults: dict[str, int]
    statuses: dict[str, int]
    workers: dict[str, int]
    latency_us: Quantiles
    first_event_us: Quantiles
    event_delay_us: Quantiles


class Process:
    """A child process with its descendants: started, measured, and ended with all of them."""

    def __init__(self, command: Sequence[str], log: IO[bytes] | None = None) -> None:
        output = subprocess.DEVNULL if log is None else log
        self.child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def alive(self) -> bool:
        return self.child.poll() is None

    def tree(self) -> list[int]:
        """The ids of the process and of its living descendants, parents first."""
        pids = [self.child.pid]
        for pid in pids:  # grows as it is read
            with contextlib.suppress(OSError):
                for thread in os.listdir(f"/proc/{pid}/task"):
                    children = Path(f"/proc/{pid}/task/{thread}/children").read_text()
                    pids.extend(map(int, children.split()))
        return pids

    def cpu_seconds(self) -> float:
        """User and system time so far of the process and its living descendants (proc(5), stat)."""
        ticks = 0
        for pid in self.tree():
            with contextlib.suppress(OSError):
                # The name in parentheses may hold spaces: fields are counted after it.
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
        return ticks / _TICKS_PER_SECOND

    def rss_bytes(self) -> int:
        """Resident memory of the process and its living descendants; shared pages count in each."""
        pages = 0
        for pid in self.tree():
            with contextlib.suppress(OSError):
                pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * _PAGE_BYTES

    def kill(self) -> None:
        """SIGKILL: no goodbye to anyone."""
        self.child.kill()
        self.child.wait()

    def stop(self, patience_s: float = 1.5) -> None:
        """SIGTERM, then SIGKILL for whatever of the tree is left after `patience_s`."""
        if not self.alive:
            return
        pids = self.tree()
        self.child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.child.wait(patience_s)
        for pid in reversed(pids):
            # Our own session leads them all, so an id that was reused by others is left alone.
            with contextlib.suppress(OSError):
                if os.getsid(pid) == self.child.pid:
                    os.kill(pid, signal.SIGKILL)
        self.child.wait()


class MockEngine(Process):
    """One process that is already listening as one mock engine, or as several on `ports` ports from `port` on."""

    def __init__(
        self, port: int, mark: str, *, ports: int = 1, events: int = 100, tick_ms: int = 20
    ) -> None:
        program = str(BUILD / "mock_engine")
        options = {"--port": port, "--mark": mark, "--events": events, "--tick-ms": tick_ms}
        options["--ports"] = ports
        super().__init__([program, *(str(part) for item in options.items() for part in item)])
        self.port = port
        self._last = port + ports - 1  # they are opened in order
        deadline = time.monotonic() + 5
        while not self._listening():
            if not self.alive:
                raise SystemExit(f"the mock engine could not listen on port {port}: is it in use?")
            if time.monotonic() > deadline:
                raise SystemExit(f"the mock engine on port {port} does not listen")
            time.sleep(0.01)

    def _listening(self) -> bool:
        # /proc instead of a connection: a port that someone else holds must not pass for ours.
        inodes = set()
        for row in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            fields = row.split()
            if fields[1].endswith(f":{self._last:04X}") and fields[3] == "0A":
                inodes.add(f"socket:[{fields[9]}]")
        with contextlib.suppress(OSError):
            descriptors = Path(f"/proc/{self.child.pid}/fd")
            return any(os.readlink(entry) in inodes for entry in descriptors.iterdir())
        return False


@contextlib.contextmanager
def engines(*, events: int = 100, tick_ms: int = 20) -> Iterator[list[MockEngine]]:
    """Two mock engines on ENGINE_PORTS, marked a and b."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(MockEngine(port, mark, events=events, tick_ms=tick_ms))
            for port, mark in zip(ENGINE_PORTS, "ab", strict=True)
        ]


@contextlib.contextmanager
def fleet(count: int) -> Iterator[list[str]]:
    """`count` mock engines on ports from 10001 on, in two processes (one for one): where they are, as host:port."""
    halves = [count] if count == 1 else [(count + 1) // 2, count // 2]
    with contextlib.ExitStack() as stack:
        first = _FLEET_PORT
        for mark, ports in zip("ab", halves, strict=False):
            stack.enter_context(MockEngine(first, mark, ports=ports, tick_ms=0))
            first += ports
        yield [f"127.0.0.1:{_FLEET_PORT + i}" for i in range(count)]


def reached(count: int) -> int:
    """How many of a fleet's engines somebody has a connection to."""
    ports = range(_FLEET_PORT, _FLEET_PORT + count)
    connected = set()
    for row in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = row.split()
        port = int(fields[1].rpartition(":")[2], 16)
        if fields[3] == "01" and port in ports:
            connected.add(port)
    return len(connected)


def build() -> None:
    """Compile mock_engine.c and load.c into BUILD when they are newer than their programs."""
    BUILD.mkdir(exist_ok=True)
    for name in ("mock_engine", "load"):
        source, program = HERE / f"{name}.c", BUILD / name
        if program.exists() and program.stat().st_mtime > source.stat().st_mtime:
            continue
        flags = ["-std=c11", "-O2", "-Wall", "-Wextra", "-Wshadow"]
        subprocess.run(["gcc", *flags, "-o", program, source], check=True)


def load_command(port: int, **options: float | bool | str) -> list[str]:
    """The command line of load.c; `stream_share=1` becomes `--stream-share 1`, and an empty text nothing."""
    command = [str(BUILD / "load"), "--port", str(port)]
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            command.append(flag)
        elif value is not False and value != "":
            command += [flag, str(value)]
    return command


def parse_report(output: bytes) -> LoadReport:
    return msgspec.json.decode(output, type=LoadReport)


def load(port: int, **options: float | bool | str) -> LoadReport:
    """Run the load to its end. What it says about bad answers goes to stderr."""
    done = subprocess.run(load_command(port, **options), stdout=subprocess.PIPE, check=True)
    return parse_report(done.stdout)
