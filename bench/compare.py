"""Measure gateways side by side: what a request and a streamed event cost, in CPU time of the gateway's processes.

    python bench/compare.py nginx sglang-router pointsman --seconds 8 --repeat 3

The method is in README.md. Raw results go to bench/results/; --markdown prints the table for docs/performance.md, and
--check makes the project's own bounds (see BOUNDS) the exit code.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import statistics
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from gateways import GATEWAYS, Gateway, Missing
from harness import HERE, LoadReport, Process, build, engines, load
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = ["BOUNDS", "CACHE", "MODES", "Measurement", "Mode", "Run", "main", "wait_until_ready"]

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "pointsman-bench"


class Mode(msgspec.Struct, frozen=True):
    """One kind of load. `per` names what the CPU time is divided by; a `rate` of 0 is a closed loop."""

    name: str
    about: str
    per: str
    connections: int
    stream_share: float = 0.0
    rate: float = 0.0
    warm_up_s: float = 2.0


MODES = {
    mode.name: mode
    for mode in (
        Mode("json", "2 kB chat requests, 32 connections, closed loop", "request", 32),
        Mode(
            "sse",
            "256 streams, one event per stream every 20 ms",
            "chunk",
            256,
            stream_share=1.0,
            warm_up_s=3.0,
        ),
        Mode("rate", "500 chat requests a second, open loop", "request", 64, rate=500.0),
    )
}

# (mode, other gateway, how many times its CPU time Pointsman may use)
BOUNDS = (("json", "nginx", 3.0), ("json", "sglang-router", 0.5), ("sse", "nginx", 1.3))


class Measurement(msgspec.Struct, frozen=True):
    """One gateway under one load, once. `cpu_us` is per request or per chunk, as the mode says."""

    gateway: str
    mode: str
    repeat: int
    cpu_us: float
    cpu_share: float
    rss_bytes: int
    load: LoadReport


class Run(msgspec.Struct, frozen=True):
    """Everything that is kept of one run."""

    date: str
    machine: dict[str, str]
    seconds: float
    repeat: int
    modes: list[Mode]
    versions: dict[str, str]
    skipped: dict[str, str]
    measurements: list[Measurement]


def wait_until_ready(gateway: Gateway, process: Process, log: Path, patience_s: float = 60) -> None:
    """Return once a chat request through the gateway is answered; raise `Missing` if that does not come."""
    body = b'{"model":"m","messages":[{"role":"user","content":"ready?"}]}'
    url = f"http://127.0.0.1:{gateway.port}/v1/chat/completions"
    headers = {"Content-Type": "application/json"}
    if gateway.key:
        headers["Authorization"] = f"Bearer {gateway.key}"
    ask = urllib.request.Request(url, body, headers)
    # A proxy of the environment must not stand between us and the loopback.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline and process.alive:
        try:
            with opener.open(ask, timeout=2) as answer:
                answer.read()
            return
        except OSError:
            time.sleep(0.1)
    tail = log.read_text(errors="replace")[-400:].strip()
    state = "is not ready" if process.alive else f"exited with {process.child.returncode}"
    raise Missing(f"{gateway.name} {state}: {tail or 'it said nothing'}")


def measure(
    gateway: Gateway, modes: Sequence[Mode], seconds: float, repeat: int, cache: Path
) -> Iterable[Measurement]:
    """Start the gateway afresh, put each load on it in turn, and stop it."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        scratch = Path(name)
        scratch.chmod(0o755)  # a server that gives up its privileges must still find its files
        path = scratch / "log"
        with path.open("wb") as log, Process(gateway.command(scratch, cache), log) as process:
            wait_until_ready(gateway, process, path)
            for mode in modes:
                yield _measure_once(gateway, process, mode, seconds, repeat)


def _measure_once(
    gateway: Gateway, process: Process, mode: Mode, seconds: float, repeat: int
) -> Measurement:
    def apply(duration: float) -> LoadReport:
        return load(
            gateway.port,
            connections=mode.connections,
            seconds=duration,
            stream_share=mode.stream_share,
            rate=mode.rate,
            **({"key": gateway.key} if gateway.key else {}),
        )

    apply(mode.warm_up_s)
    before, started = process.cpu_seconds(), time.monotonic()
    report = apply(seconds)
    used, elapsed = process.cpu_seconds() - before, time.monotonic() - started
    count = report.chunks if mode.per == "chunk" else report.requests
    return Measurement(
        gateway=gateway.name,
        mode=mode.name,
        repeat=repeat,
        cpu_us=round(used * 1e6 / max(count, 1), 2),
        cpu_share=round(used / elapsed, 3),
        rss_bytes=process.rss_bytes(),
        load=report,
    )


def machine() -> dict[str, str]:
    """What the figures depend on, without the name of the machine."""
    cpu = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    return {
        "cpu": cpu,
        "cores": str(os.cpu_count()),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def _spread(values: Sequence[float], digits: int) -> str:
    """Median, and in parentheses the least and the most of the repeats."""
    middle = f"{statistics.median(values):.{digits}f}"
    if len(values) == 1:
        return middle
    return f"{middle} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def _milliseconds(p50: Iterable[int], p99: Iterable[int]) -> str:
    return f"{statistics.median(p50) / 1000:.2f} / {statistics.median(p99) / 1000:.2f}"


# The columns that a mode adds: (heading, what its cell says of the repeats).
_Cell = tuple[str, "Callable[[Sequence[Measurement]], str]"]
_COLUMNS: dict[str, tuple[_Cell, ...]] = {
    "json": (
        ("json: µs CPU per request", lambda rows: _spread([row.cpu_us for row in rows], 1)),
        ("requests/s", lambda rows: f"{statistics.median(row.load.rps for row in rows):.0f}"),
        (
            "p50 / p99 ms",
            lambda rows: _milliseconds(
                (row.load.latency_us.p50 for row in rows), (row.load.latency_us.p99 for row in rows)
            ),
        ),
    ),
    "sse": (
        ("sse: µs CPU per chunk", lambda rows: _spread([row.cpu_us for row in rows], 1)),
        (
            "chunk delay p50 / p99 ms",
            lambda rows: _milliseconds(
                (row.load.event_delay_us.p50 for row in rows),
                (row.load.event_delay_us.p99 for row in rows),
            ),
        ),
    ),
    "rate": (
        (
            "at 500/s: p50 / p99 ms",
            lambda rows: _milliseconds(
                (row.load.latency_us.p50 for row in rows), (row.load.latency_us.p99 for row in rows)
            ),
        ),
    ),
}


def table_of(run: Run) -> tuple[list[str], list[list[str]]]:
    """Headings and rows, one row per gateway."""
    modes = [mode.name for mode in run.modes]
    headings = ["gateway", *(heading for mode in modes for heading, _ in _COLUMNS[mode])]
    headings += ["RSS MiB", "errors"]
    rows = []
    for name, version in run.versions.items():
        own = [m for m in run.measurements if m.gateway == name]
        if not own:
            continue
        row = [f"{name} {version}".strip()]
        for mode in modes:
            of_mode = [m for m in own if m.mode == mode]
            row += [cell(of_mode) for _, cell in _COLUMNS[mode]]
        row.append(f"{max(m.rss_bytes for m in own) / 2**20:.0f}")
        row.append(str(sum(m.load.errors for m in own)))
        rows.append(row)
    return headings, rows


def verdicts(run: Run) -> list[tuple[str, bool]]:
    """Each bound of BOUNDS that this run can judge: a sentence, and whether it holds."""
    said = []
    for mode, other, factor in BOUNDS:
        of = {
            name: [m.cpu_us for m in run.measurements if (m.gateway, m.mode) == (name, mode)]
            for name in ("pointsman", other)
        }
        if all(of.values()):
            ratio = statistics.median(of["pointsman"]) / statistics.median(of[other])
            text = f"{mode}: {ratio:.2f} times the CPU time of {other} (bound {factor})"
            said.append((text, ratio <= factor))
    errors = sum(m.load.errors for m in run.measurements if m.gateway == "pointsman")
    if any(m.gateway == "pointsman" for m in run.measurements):
        said.append((f"pointsman: {errors} errors (bound 0)", errors == 0))
    return said


def show(run: Run, markdown: bool) -> None:
    headings, rows = table_of(run)
    if markdown:
        for cells in (headings, ["---"] * len(headings), *rows):
            print("| " + " | ".join(cells) + " |")
        return
    modes = "; ".join(f"{mode.name}: {mode.about}" for mode in run.modes)
    table = Table(title=f"{run.date}, {run.repeat} x {run.seconds:g} s", caption=modes)
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="right" if i else "left")
    for row in rows:
        table.add_row(*row)
    # Wide enough for the figures even where the output is a file.
    Console(width=max(Console().width, 150)).print(table)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("gateways", nargs="*", metavar="gateway", help=", ".join(GATEWAYS))
    parser.add_argument("--seconds", type=float, default=8, help="of each measurement")
    parser.add_argument("--repeat", type=int, default=3, help="how often each is measured")
    parser.add_argument("--modes", default=",".join(MODES), help="of " + ", ".join(MODES))
    parser.add_argument("--name", default="compare", help="of the file in bench/results")
    parser.add_argument("--cache", type=Path, default=CACHE, help="where routers are installed")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--check", action="store_true", help="exit 1 if a bound does not hold")
    args = parser.parse_args(arguments)
    args.gateways = args.gateways or list(GATEWAYS)
    args.modes = args.modes.split(",")
    for name, known in ((args.gateways, GATEWAYS), (args.modes, MODES)):
        for wrong in set(name) - set(known):
            parser.error(f"{wrong} is none of {', '.join(known)}")
    return args


def main(arguments: Sequence[str]) -> int:
    args = _parse(arguments)
    build()
    skipped: dict[str, str] = {}
    versions: dict[str, str] = {}
    measurements: list[Measurement] = []
    modes = [MODES[name] for name in args.modes]
    for name in args.gateways:  # installs what it must before the clock runs
        try:
            with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
                GATEWAYS[name].command(Path(scratch), args.cache)
            versions[name] = GATEWAYS[name].version(args.cache)
        except Missing as reason:
            skipped[name] = str(reason)
            _say(f"skipped: {reason}")
    with engines():
        for repeat in range(args.repeat):
            # One after the other within each repeat: a slow minute of the machine hits them all alike.
            for name in [name for name in versions if name not in skipped]:
                try:
                    for m in measure(GATEWAYS[name], modes, args.seconds, repeat, args.cache):
                        measurements.append(m)
                        per = next(mode.per for mode in modes if mode.name == m.mode)
                        faults = f", faults {m.load.faults}" if m.load.errors else ""
                        _say(
                            f"{repeat + 1}/{args.repeat} {name:14} {m.mode:5} {m.cpu_us:8.1f} µs"
                            f" per {per}, {m.cpu_share:.0%} of a core{faults}"
                        )
                except Missing as reason:
                    skipped[name] = str(reason)
                    _say(f"skipped: {reason}")
    if not measurements:
        _say("nothing was measured")
        return 1
    run = Run(
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        machine=machine(),
        seconds=args.seconds,
        repeat=args.repeat,
        modes=modes,
        versions=versions,
        skipped=skipped,
        measurements=measurements,
    )
    results = HERE / "results"
    results.mkdir(exist_ok=True)
    raw = results / f"{run.date}-{args.name}.json"
    raw.write_bytes(msgspec.json.format(msgspec.json.encode(run), indent=1) + b"\n")
    show(run, args.markdown)
    said = verdicts(run)
    for text, holds in said:
        _say(("ok    " if holds else "FAILS ") + text)
    return 1 if args.check and not all(holds for _, holds in said) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
