"""Where Pointsman's own time goes: the functions that cost most per request, by time of their own.

    python bench/hotspots.py [--streams] [--seconds 8] [--top 25]

Runs `pointsman serve` under cProfile in a child process, puts the load of compare.py on it, ends it with SIGTERM and
reads what it wrote. The profiler slows every Python call but no C code, so the order is worth more than the figures;
for figures use compare.py. (Not named profile.py: that would hide the module of that name from cProfile.)
"""

from __future__ import annotations

import argparse
import pstats
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from compare import wait_until_ready
from gateways import GATEWAYS, Missing
from harness import HERE, Process, build, engines, load
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main", "profile"]

# A runner of our own, since `python -m cProfile` writes nothing when the program leaves through SystemExit in a
# signal's wake on some versions.
_RUNNER = """
import cProfile, sys
from pointsman.cli import main
target, *sys.argv[1:] = sys.argv[1:]
sys.argv[0] = "pointsman"
profiler = cProfile.Profile()
try:
    profiler.runcall(main)
finally:
    profiler.dump_stats(target)
"""

# file, line, function
_Place = tuple[str, int, str]
# primitive calls, calls, own seconds, seconds with callees, callers
_Costs = tuple[int, int, float, float, object]


def profile(seconds: float, streams: bool) -> tuple[list[tuple[_Place, int, float]], int]:
    """(place, calls, own seconds) of every function, most expensive first, and the requests or events relayed."""
    gateway = GATEWAYS["pointsman"]
    with engines(), tempfile.TemporaryDirectory(prefix="bench-") as directory:
        target, path = Path(directory) / "profile", Path(directory) / "log"
        serve = ["serve", "--config", str(HERE / "compare.toml")]
        command = [sys.executable, "-c", _RUNNER, str(target), *serve]
        with path.open("wb") as log, Process(command, log) as process:
            wait_until_ready(gateway, process, path)
            connections, share = (256, 1.0) if streams else (32, 0.0)
            report = load(
                gateway.port, connections=connections, stream_share=share, seconds=seconds
            )
            process.stop(patience_s=40)
        if not target.exists():
            raise Missing(f"no profile was written: {path.read_text(errors='replace')[-400:]}")
        stats: dict[_Place, _Costs] = pstats.Stats(str(target)).stats  # type: ignore[attr-defined]
    places = [(place, costs[1], costs[2]) for place, costs in stats.items()]
    places.sort(key=lambda item: item[2], reverse=True)
    return places, report.chunks if streams else report.requests


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", action="store_true", help="256 streams instead of completions")
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--top", type=int, default=25, help="how many functions to show")
    args = parser.parse_args(arguments)
    build()
    try:
        places, count = profile(args.seconds, args.streams)
    except Missing as reason:
        print(reason, file=sys.stderr)
        return 1
    unit = "event" if args.streams else "request"
    table = Table(title=f"{count} {unit}s under cProfile")
    for heading in ("own µs", "calls"):
        table.add_column(f"{heading} per {unit}", justify="right")
    table.add_column("function")
    for (file, line, name), calls, own in places[: args.top]:
        short = "/".join(Path(file).parts[-2:])
        table.add_row(f"{own * 1e6 / count:.2f}", f"{calls / count:.2f}", f"{short}:{line} {name}")
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
