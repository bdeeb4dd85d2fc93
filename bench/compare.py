"""Measure gateways side by side: what a request and a streamed event cost, in CPU time of the gateway's processes.

    python bench/compare.py                 # all of the field
    python bench/compare.py nginx sglang-router pointsman --seconds 8 --repeat 3

The method is in README.md. The raw results, the table (Markdown) and a picture go to bench/results/; --check makes
the project's own bounds (see BOUNDS) the exit code.
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
from harness import ENGINE_HOSTS, HERE, LoadReport, Process, build, engines, load
from pictures import Bar, bars, can_draw
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = [
    "BOUNDS",
    "CACHE",
    "FIELD",
    "MODES",
    "ONCE",
    "Measurement",
    "Mode",
    "Run",
    "available",
    "machine",
    "main",
    "markdown",
    "spread",
    "today",
    "wait_until_ready",
]

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "pointsman-bench"


class Mode(msgspec.Struct, frozen=True):
    """One kind of load. `per` names what the CPU time is divided by; a `rate` of 0 is a closed loop."""

    name: str
    about: str
    per: str
    connections: int
    stream_share: float = 0.0
    rate: float = 0.0
    warm_up_s: float = 1.0


MODES = {
    mode.name: mode
    for mode in (
        Mode("json", "2 kB chat requests, 32 connections, closed loop", "request", 32),
        Mode("rate", "1,000 chat requests a second, open loop", "request", 64, rate=1000.0),
        # Last: who cannot carry it is still busy with it for a while.
        Mode(
            "sse",
            "256 streams, one event per stream every 20 ms",
            "chunk",
            256,
            stream_share=1.0,
        ),
    )
}

FIELD = (
    *("direct", "nginx", "haproxy", "smg", "sglang-router", "vllm-router", "litellm"),
    "pointsman",
)
"""What is measured when nothing else is said."""

ONCE = ("litellm",)
"""Measured in the first repeat only: it starts slowly, and what it costs is a thousand times what repeats differ by."""

# (mode, other gateway, how many times its CPU time Pointsman may use)
BOUNDS = (
    ("json", "nginx", 2.5),
    *(("json", name, 0.5) for name in ("smg", "sglang-router", "vllm-router", "litellm")),
    ("sse", "nginx", 1.0),
)

_CARRIED = 0.98
"""Part of a rate that must have been answered for its latencies to say anything."""


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


def wait_until_ready(gateway: Gateway, process: Process, log: Path, patience_s: float = 90) -> None:
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
            with opener.open(ask, timeout=5) as answer:
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
        command = gateway.command(scratch, cache, ENGINE_HOSTS)
        with path.open("wb") as log, Process(command, log) as process:
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
            # Requests under way at the end would be work that counts for none. A rate that is not carried leaves too
            # many of them.
            drain=mode.per == "request" and not mode.rate,
            key=gateway.key,
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


def spread(values: Sequence[float], digits: int) -> str:
    """Return the median, and in parentheses the least and the most of the repeats."""
    middle = f"{statistics.median(values):.{digits}f}"
    if len(values) == 1:
        return middle
    return f"{middle} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


_Rows = list[Measurement]


def _cpu(of: _Rows) -> str:
    return spread([m.cpu_us for m in of], 1)


def _rps(of: _Rows) -> str:
    return f"{statistics.median(m.load.rps for m in of):,.0f}"


def _milliseconds(microseconds: Sequence[float]) -> str:
    return spread([us / 1000 for us in microseconds], 2)


def _added(of: _Rows, floor: _Rows, quantile: Callable[[LoadReport], int]) -> list[float]:
    """Microseconds more than without a gateway, in the same repeat; nothing if the rate was not carried."""
    without = {m.repeat: quantile(m.load) for m in floor}
    rate = MODES["rate"].rate
    return [
        quantile(m.load) - without.get(m.repeat, 0) for m in of if m.load.rps >= _CARRIED * rate
    ]


def _p50(report: LoadReport) -> int:
    return report.latency_us.p50


def _p99(report: LoadReport) -> int:
    return report.latency_us.p99


def _added_cells(of: _Rows, floor: _Rows) -> list[str]:
    p50, p99 = _added(of, floor, _p50), _added(of, floor, _p99)
    if len(p50) < len(of):
        return [f"carries {_rps(of)}/s", "", ""]
    return [_cpu(of), _milliseconds(p50), _milliseconds(p99)]


def _cells(mode: str, of: _Rows, floor: _Rows) -> list[str]:
    """What one gateway has in the columns of a mode; `floor` is what no gateway has."""
    if mode == "json":
        return [_cpu(of), _rps(of)]
    if mode == "rate":
        return _added_cells(of, floor)
    if not all(m.load.chunks for m in of):
        return ["no chunk came", ""]
    delays = [m.load.event_delay_us for m in of]
    p50, p99 = (statistics.median(getattr(d, q) for d in delays) / 1000 for q in ("p50", "p99"))
    return [_cpu(of), f"{p50:.2f} / {p99:.2f}"]


def _headings(mode: str, has_floor: bool) -> list[str]:
    if mode == "json":
        return ["json: µs CPU per request", "requests/s"]
    if mode == "rate":
        added = "added " if has_floor else ""
        return ["at 1,000/s: µs CPU per request", f"{added}p50 ms", f"{added}p99 ms"]
    return ["sse: µs CPU per chunk", "chunk delay p50 / p99 ms"]


def _of(run: Run, gateway: str, mode: str) -> _Rows:
    return [m for m in run.measurements if (m.gateway, m.mode) == (gateway, mode)]


def table_of(run: Run) -> tuple[list[str], list[list[str]]]:
    """Headings and rows, one row per gateway."""
    modes = [mode.name for mode in run.modes]
    headings = ["gateway"]
    for mode in modes:
        headings += _headings(mode, bool(_of(run, "direct", mode)))
    headings += ["RSS MiB", "errors"]
    rows = []
    for name, version in run.versions.items():
        own = [m for m in run.measurements if m.gateway == name]
        if not own:
            continue
        row = [f"{name} {version}".strip()]
        for mode in modes:
            of = _of(run, name, mode)
            # What stands for the gateway where there is none costs nothing, and its latency is the floor itself.
            cells = _cells(mode, of, [] if name == "direct" else _of(run, "direct", mode))
            row += ["", *cells[1:]] if name == "direct" else cells
        row.append("" if name == "direct" else f"{max(m.rss_bytes for m in own) / 2**20:.0f}")
        row.append(str(sum(m.load.errors for m in own)))
        rows.append(row)
    return headings, rows


def _panels(run: Run) -> dict[str, list[Bar]]:
    """What is drawn: a title, and a bar for each gateway."""
    panels: dict[str, list[Bar]] = {}
    for name in run.versions:
        if name == "direct":
            continue
        added = _added(_of(run, name, "rate"), _of(run, "direct", "rate"), _p99)
        figures = {
            "µs CPU per 2 kB request": [m.cpu_us for m in _of(run, name, "json")],
            "µs CPU per chunk": [m.cpu_us for m in _of(run, name, "sse") if m.load.chunks],
            "p99 ms added at 1,000/s": [max(us, 1) / 1000 for us in added],
            "memory, MiB": [m.rss_bytes / 2**20 for m in run.measurements if m.gateway == name],
        }
        for title, values in figures.items():
            if values:
                bar = Bar(name, statistics.median(values), min(values), max(values))
                panels.setdefault(title, []).append(bar)
    return panels


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


def show(run: Run) -> None:
    headings, rows = table_of(run)
    modes = "; ".join(f"{mode.name}: {mode.about}" for mode in run.modes)
    table = Table(title=f"{run.date}, {run.repeat} x {run.seconds:g} s", caption=modes)
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="right" if i else "left")
    for row in rows:
        table.add_row(*row)
    # Wide enough for the figures even where the output is a file.
    Console(width=max(Console().width, 190)).print(table)


def keep(run: Run, name: str) -> None:
    """Write the raw results, the table and, where matplotlib is installed, the picture."""
    results = HERE / "results"
    results.mkdir(exist_ok=True)
    raw = results / f"{run.date}-{name}.json"
    raw.write_bytes(msgspec.json.format(msgspec.json.encode(run), indent=1) + b"\n")
    raw.with_suffix(".md").write_text(markdown(*table_of(run)), encoding="utf-8")
    if can_draw():
        bars(_panels(run), raw.with_suffix(".svg"))
    else:
        _say("no picture: it needs the extra `plot`")


def available(names: Iterable[str], cache: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Return versions of the gateways that are here, installed if they must be, and why the others are not."""
    versions, skipped = {}, {}
    for name in names:
        try:
            with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
                GATEWAYS[name].command(Path(scratch), cache, ENGINE_HOSTS)
            versions[name] = GATEWAYS[name].version(cache)
        except Missing as reason:
            skipped[name] = str(reason)
            _say(f"skipped: {reason}")
    return versions, skipped


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("gateways", nargs="*", metavar="gateway", help=", ".join(GATEWAYS))
    parser.add_argument("--seconds", type=float, default=2.5, help="of each measurement")
    parser.add_argument("--repeat", type=int, default=3, help=f"of each, but for {', '.join(ONCE)}")
    parser.add_argument("--modes", default=",".join(MODES), help="of " + ", ".join(MODES))
    parser.add_argument("--name", default="compare", help="of the file in bench/results")
    parser.add_argument("--cache", type=Path, default=CACHE, help="where routers are installed")
    parser.add_argument("--check", action="store_true", help="exit 1 if a bound does not hold")
    args = parser.parse_args(arguments)
    args.gateways = args.gateways or list(FIELD)
    args.modes = args.modes.split(",")
    for name, known in ((args.gateways, GATEWAYS), (args.modes, MODES)):
        for wrong in set(name) - set(known):
            parser.error(f"{wrong} is none of {', '.join(known)}")
    return args


def main(arguments: Sequence[str]) -> int:
    args = _parse(arguments)
    build()
    versions, skipped = available(args.gateways, args.cache)
    measurements: list[Measurement] = []
    modes = [MODES[name] for name in args.modes]
    with engines():
        for repeat in range(args.repeat):
            # One after the other within each repeat: a slow minute of the machine hits them all alike.
            for name in [name for name in versions if name not in skipped]:
                if repeat and name in ONCE:
                    continue
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
        date=today(),
        machine=machine(),
        seconds=args.seconds,
        repeat=args.repeat,
        modes=modes,
        versions=versions,
        skipped=skipped,
        measurements=measurements,
    )
    keep(run, args.name)
    show(run)
    said = verdicts(run)
    for text, holds in said:
        _say(("ok    " if holds else "FAILS ") + text)
    return 1 if args.check and not all(holds for _, holds in said) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
