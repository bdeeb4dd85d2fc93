"""What a request costs where bodies are larger and engines more: CPU per request against each, gateways side by side.

    python bench/growth.py                                 # all of the field
    python bench/growth.py nginx pointsman --seconds 3 --workers 1,1000

Bodies of 100 B, 2 kB, 32 kB and 1 MiB in front of 16 engines; 2 kB in front of 1, 16, 64 and 1,000. The method is in
README.md. The raw results, the tables (Markdown) and a picture go to bench/results/.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from compare import CACHE, ONCE, available, machine, markdown, spread, today, wait_until_ready
from gateways import GATEWAYS, Gateway, Missing
from harness import HERE, LoadReport, Process, build, fleet, load, reached
from pictures import Bar, Curve, can_draw, curves

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["FIELD", "Point", "Run", "main", "tables_of"]

FIELD = (
    *("nginx", "haproxy", "smg", "sglang-router", "vllm-router", "litellm"),
    *("pointsman", "pointsman-beats"),
)
FEWER = {"litellm": (16, 1000), "pointsman-beats": (1000,)}
"""Measured with these numbers of engines only: the one starts slowly, of the other only the beats are of interest."""
GREETS_SLOWLY = ("sglang-router", 1000)
"""Measured in the first repeat only, as litellm is: it makes about ten acquaintances a second."""

BODIES = (100, 2048, 32 * 1024, 2**20)
WORKERS = (1, 16, 64, 1000)
USUAL_BODY, USUAL_WORKERS = 2048, 16
CONVERSATIONS, TEXT_BYTES = 1000, 16 * 2**20
"""As many conversations as engines, so that affinity uses most of these; fewer where they would be more text."""

WARM_UP_S = 0.5
QUIET_SHARE, PATIENCE_S = 0.1, 180.0
BEATS_S = 3.0
"""When every engine that beats has done so."""


class Point(msgspec.Struct, frozen=True):
    """One gateway with one size of bodies and one number of engines, once.

    `cpu_us` is per request; `idle_share` the part of a core that the gateway uses without a request, `reached` how
    many engines it had connections to afterwards.
    """

    gateway: str
    workers: int
    body_bytes: int
    repeat: int
    cpu_us: float
    idle_share: float
    reached: int
    rss_bytes: int
    load: LoadReport


class Run(msgspec.Struct, frozen=True):
    """Everything that is kept of one run. `skipped` names a gateway, or one with a number of engines."""

    date: str
    machine: dict[str, str]
    seconds: float
    repeat: int
    versions: dict[str, str]
    skipped: dict[str, str]
    points: list[Point]


def _settle(process: Process, beats: bool) -> float:
    """Wait until a gateway has greeted its engines; return the part of a core that it still uses.

    Raises `Missing` if it is not quiet in time: what it does beside would count for the requests.
    """
    share = 0.0
    if beats:  # it never falls quiet
        time.sleep(BEATS_S)
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        before, started = process.cpu_seconds(), time.monotonic()
        time.sleep(2.0 if beats else 0.5)
        share = (process.cpu_seconds() - before) / (time.monotonic() - started)
        if beats or share < QUIET_SHARE:
            return round(share, 3)
    raise Missing(f"it still greets its engines after {PATIENCE_S:g} s: {share:.0%} of a core")


def measure(
    gateway: Gateway, hosts: Sequence[str], bodies: Sequence[int], seconds: float, repeat: int
) -> Iterator[Point]:
    """Start the gateway in front of a fleet, send it bodies of each size in turn, and stop it."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        scratch = Path(name)
        scratch.chmod(0o755)  # a server that gives up its privileges must still find its files
        path = scratch / "log"
        command = gateway.command(scratch, CACHE, hosts)
        with contextlib.ExitStack() as stack:
            log = stack.enter_context(path.open("wb"))
            process = stack.enter_context(Process(command, log))
            if gateway.beside:
                stack.enter_context(Process(gateway.beside(hosts), log))
            wait_until_ready(gateway, process, path)
            idle = _settle(process, beats=gateway.beside is not None)
            for size in bodies:
                options: dict[str, int] = {
                    "connections": 32,
                    "drain": True,  # work that nobody waits for any more would count for nobody
                    "body_bytes": size,
                    "prompts": min(CONVERSATIONS, TEXT_BYTES // size),
                }
                load(gateway.port, key=gateway.key, seconds=WARM_UP_S, **options)
                before = process.cpu_seconds()
                report = load(gateway.port, key=gateway.key, seconds=seconds, **options)
                used = process.cpu_seconds() - before
                yield Point(
                    gateway=gateway.name,
                    workers=len(hosts),
                    body_bytes=size,
                    repeat=repeat,
                    cpu_us=round(used * 1e6 / max(report.requests, 1), 2),
                    idle_share=idle,
                    reached=reached(len(hosts)),
                    rss_bytes=process.rss_bytes(),
                    load=report,
                )


# What is said of them.


def _size(count: int) -> str:
    if count < 1024:
        return f"{count} B"
    return f"{count // 1024} kB" if count < 2**20 else f"{count // 2**20} MiB"


def _of(run: Run, gateway: str, body: int, workers: int) -> list[float]:
    return [
        point.cpu_us
        for point in run.points
        if (point.gateway, point.body_bytes, point.workers) == (gateway, body, workers)
    ]


def _over_bodies(run: Run, gateway: str) -> list[tuple[int, list[float]]]:
    sizes = sorted({point.body_bytes for point in run.points})
    of = [(size, _of(run, gateway, size, USUAL_WORKERS)) for size in sizes]
    return [(size, values) for size, values in of if values]


def _over_workers(run: Run, gateway: str) -> list[tuple[int, list[float]]]:
    counts = sorted({point.workers for point in run.points})
    of = [(count, _of(run, gateway, USUAL_BODY, count)) for count in counts]
    return [(count, values) for count, values in of if values]


def _per_kib(of: Sequence[tuple[int, list[float]]]) -> str:
    """How much one more KiB of body costs, from the smallest to the largest."""
    if len(of) < 2:
        return ""
    (small, low), (large, high) = of[0], of[-1]
    more = statistics.median(high) - statistics.median(low)
    return f"{more / (large - small) * 1024:.3f}"


def tables_of(run: Run) -> str:
    """Return both tables, as Markdown: CPU per request over the size of bodies, and over the number of engines."""
    bodies = sorted({p.body_bytes for p in run.points if p.workers == USUAL_WORKERS})
    fleets = sorted({p.workers for p in run.points})
    by_body, by_workers = [], []
    for name, version in run.versions.items():
        title = f"{name} {version}".strip()
        own = [point for point in run.points if point.gateway == name]
        errors = str(sum(point.load.errors for point in own))
        over = dict(_over_bodies(run, name))
        cells = [spread(over[size], 1) if size in over else "" for size in bodies]
        by_body.append([title, *cells, _per_kib(_over_bodies(run, name)), errors])
        fleet_cells = dict(_over_workers(run, name))
        cells = [spread(fleet_cells[n], 1) if n in fleet_cells else "" for n in fleets]
        largest = [point for point in own if point.workers == fleets[-1]]
        extra = ["", "", ""]
        if largest:
            extra = [
                f"{statistics.median(point.reached for point in largest):.0f}",
                f"{statistics.median(point.idle_share for point in largest):.1%}",
                f"{max(point.rss_bytes for point in largest) / 2**20:.0f}",
            ]
        by_workers.append([title, *cells, *extra])
    many = f"{fleets[-1]:,}"
    body_heads = ["gateway", *(_size(size) for size in bodies), "µs per further KiB", "errors"]
    fleet_heads = ["gateway", *(f"{count:,}" for count in fleets)]
    fleet_heads += [f"of {many} reached", f"idle with {many}", f"RSS MiB with {many}"]
    said = "".join(f"- {name}: {why}\n" for name, why in run.skipped.items())
    return (
        f"µs of CPU per request, bodies of each size, {USUAL_WORKERS} engines:\n\n"
        f"{markdown(body_heads, by_body)}\n"
        f"µs of CPU per 2 kB request, engines:\n\n{markdown(fleet_heads, by_workers)}"
        + (f"\nNot measured:\n\n{said}" if said else "")
    )


def _curves(
    run: Run, over: Callable[[Run, str], list[tuple[int, list[float]]]], unit: float
) -> list[Curve]:
    drawn = []
    for name in run.versions:
        of = over(run, name)
        if of:
            xs = [x / unit for x, _ in of]
            bars = [Bar(name, statistics.median(v), min(v), max(v)) for _, v in of]
            drawn.append(Curve(name, xs, bars))
    return drawn


def keep(run: Run, name: str) -> None:
    """Write the raw results, the tables and, where matplotlib is installed, the picture."""
    results = HERE / "results"
    results.mkdir(exist_ok=True)
    raw = results / f"{run.date}-{name}.json"
    raw.write_bytes(msgspec.json.format(msgspec.json.encode(run), indent=1) + b"\n")
    raw.with_suffix(".md").write_text(tables_of(run), encoding="utf-8")
    if can_draw():
        panels = {
            f"KiB of body, {USUAL_WORKERS} engines": _curves(run, _over_bodies, 1024),
            "engines, 2 kB of body": _curves(run, _over_workers, 1),
        }
        curves(panels, "µs of CPU per request", raw.with_suffix(".svg"))
    else:
        _say("no picture: it needs the extra `plot`")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("gateways", nargs="*", metavar="gateway", help=", ".join(FIELD))
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    parser.add_argument("--repeat", type=int, default=3, help="of each, but for slow starters")
    parser.add_argument("--workers", default=",".join(map(str, WORKERS)), help="sizes of the fleet")
    parser.add_argument("--name", default="growth", help="of the files in bench/results")
    args = parser.parse_args(arguments)
    args.gateways = args.gateways or list(FIELD)
    args.workers = [int(count) for count in args.workers.split(",")]
    for wrong in set(args.gateways) - set(GATEWAYS):
        parser.error(f"{wrong} is none of {', '.join(GATEWAYS)}")
    return args


def main(arguments: Sequence[str]) -> int:
    args = _parse(arguments)
    build()
    versions, skipped = available(args.gateways, CACHE)
    points: list[Point] = []
    for repeat in range(args.repeat):
        for count in args.workers:
            bodies = BODIES if count == USUAL_WORKERS else (USUAL_BODY,)
            with fleet(count) as hosts:
                for name in versions:
                    title = f"{name} with {count:,} engines"
                    once = name in ONCE or (name, count) == GREETS_SLOWLY
                    if (
                        title in skipped
                        or (once and repeat)
                        or count not in FEWER.get(name, [count])
                    ):
                        continue
                    try:
                        for p in measure(GATEWAYS[name], hosts, bodies, args.seconds, repeat):
                            points.append(p)
                            faults = f", faults {p.load.faults}" if p.load.errors else ""
                            _say(
                                f"{repeat + 1}/{args.repeat} {name:15} {count:5} engines {_size(p.body_bytes):>6}"
                                f" {p.cpu_us:10.1f} µs per request, {p.reached} reached{faults}"
                            )
                    except Missing as reason:
                        skipped[title] = str(reason)
                        _say(f"skipped: {title}: {reason}")
    if not points:
        _say("nothing was measured")
        return 1
    run = Run(
        date=today(),
        machine=machine(),
        seconds=args.seconds,
        repeat=args.repeat,
        versions=versions,
        skipped=skipped,
        points=points,
    )
    keep(run, args.name)
    print(tables_of(run))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
