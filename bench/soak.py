"""Endurance of one gateway: 60 s of 256 streams without an error, and memory that stays flat over 200,000 requests.

    python bench/soak.py [pointsman] [--part streams|memory]

Memory is called flat when the Theil-Sen slope of resident memory over the requests answered, once the first fifth of
them is left out as warm-up, is below 8 bytes per request: less than one pointer lost per request. (The allocator of
CPython takes memory in steps of 1 MiB; one such step in the 160,000 requests that count is 6.6 bytes per request, so
the bound is also about the smallest that can be told from nothing.) Exits 1 if either part fails.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from compare import CACHE, wait_until_ready
from gateways import GATEWAYS, Missing
from harness import ENGINE_HOSTS, LoadReport, Process, build, engines, load

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["main", "running", "slope"]

BOUND_BYTES_PER_REQUEST = 8.0
_WARM_UP_SHARE = 0.2


@contextlib.contextmanager
def running(name: str) -> Iterator[Process]:
    """The gateway of that name, ready; its engines must run already."""
    gateway = GATEWAYS[name]
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        scratch = Path(directory)
        scratch.chmod(0o755)
        path = scratch / "log"
        command = gateway.command(scratch, CACHE, ENGINE_HOSTS)
        with path.open("wb") as log, Process(command, log) as process:
            wait_until_ready(gateway, process, path)
            yield process
            if not process.alive:
                raise SystemExit(f"{name} died: {path.read_text(errors='replace')[-400:]}")


def slope(points: Sequence[tuple[float, float]]) -> float:
    """The Theil-Sen estimate: the median slope of all pairs of points, which a few odd samples do not move.

    >>> slope([(0, 1.0), (1, 3.0), (2, 5.0), (3, 99.0)])
    2.0
    """
    pairs = itertools.combinations(points, 2)
    slopes = [(y1 - y0) / (x1 - x0) for (x0, y0), (x1, y1) in pairs if x1 != x0]
    return statistics.median_low(slopes)


def _explain(report: LoadReport) -> str:
    return f"{report.errors} errors {report.faults or ''}, {report.broken_streams} broken streams"


def soak_streams(name: str, seconds: float) -> bool:
    """256 streams at all times for `seconds`, each read to its end."""
    with engines(), running(name) as process:
        report = load(
            GATEWAYS[name].port,
            key=GATEWAYS[name].key,
            connections=256,
            stream_share=1,
            seconds=seconds,
            drain=True,
        )
        memory = process.rss_bytes() / 2**20
    print(
        f"streams: {report.streams} whole streams, {report.chunks} events in {report.seconds:.0f} s,"
        f" {_explain(report)},"
        f" event delay p50 {report.event_delay_us.p50} µs, p99 {report.event_delay_us.p99} µs, {memory:.0f} MiB"
    )
    return report.errors == 0 and report.broken_streams == 0 and report.streams > 0


def soak_memory(name: str, requests: int, stream_share: float) -> bool:
    """`requests` requests, some of them streamed, with resident memory sampled all the while."""
    slices = 50
    points: list[tuple[float, float]] = []
    reports: list[LoadReport] = []
    # Streams come all at once here: it is their number that could leak, not their duration.
    with engines(events=10, tick_ms=0), running(name) as process:
        for i in range(slices):
            options = {"connections": 32, "stream_share": stream_share, "prompts": 4096}
            gateway, count = GATEWAYS[name], requests // slices
            reports.append(load(gateway.port, key=gateway.key, requests=count, **options))
            time.sleep(0.05)  # lets the gateway notice that the clients of this slice have left
            points.append(((i + 1) * (requests // slices), process.rss_bytes()))
    counted = points[int(slices * _WARM_UP_SHARE) :]
    growth = slope(counted)
    errors = sum(report.errors + report.broken_streams for report in reports)
    flat = growth < BOUND_BYTES_PER_REQUEST
    first, last = counted[0][1] / 2**20, counted[-1][1] / 2**20
    print(
        f"memory: {sum(r.requests for r in reports)} requests, {errors} errors, {first:.2f} MiB after the warm-up,"
        f" {last:.2f} MiB at the end, slope {growth:.2f} bytes per request (bound {BOUND_BYTES_PER_REQUEST:g}):"
        f" {'flat' if flat else 'NOT FLAT'}"
    )
    return flat and errors == 0


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("gateway", nargs="?", default="pointsman", choices=list(GATEWAYS))
    parser.add_argument("--part", choices=["streams", "memory"], help="only one of the two")
    parser.add_argument("--seconds", type=float, default=60, help="of streams")
    parser.add_argument("--requests", type=int, default=200_000, help="for memory")
    parser.add_argument("--stream-share", type=float, default=0.1, help="of those requests")
    args = parser.parse_args(arguments)
    build()
    try:
        passed = []
        if args.part != "memory":
            passed.append(soak_streams(args.gateway, args.seconds))
        if args.part != "streams":
            passed.append(soak_memory(args.gateway, args.requests, args.stream_share))
    except Missing as reason:
        print(reason, file=sys.stderr)
        return 1
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
