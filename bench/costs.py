"""What a request costs, counted instead of timed: the same figures on every machine, in every run.

    python bench/costs.py                   # every way of a request; exit status 1 where a bound is broken
    python bench/costs.py --write           # what is counted now becomes the bounds of this Python
    python bench/costs.py --where json      # in which functions the instructions of that way are

Three figures for each way, of which two have bounds. `instructions` are those of Python's bytecode. `bytes` are what is
allocated: for each instruction, how far memory rises above what was there before it, so that what a C function takes
and gives back within one instruction counts too. `blocks` are what 100 requests leave behind under the default policy:
nothing, ever.

What they do not see is work in C that allocates nothing, such as a second search through a body; the call of it is
seen. Bounds are per minor version of Python, whose bytecodes differ.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
import tomllib
import tracemalloc
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import uvloop
from socketless import ANSWER, CHUNK, LAST, REFUSAL, STREAM_HEAD, Clock, Socketless, request

from pointsman.domain.policy import POLICIES

__all__ = ["BOUNDS", "Cost", "bounds_of", "count", "measure_all", "objections", "written"]

HERE = str(Path(__file__).parent)
BOUNDS = Path(__file__).parents[1] / "tests" / "costs" / "bounds.toml"
VERSION = "{}.{}".format(*sys.version_info)
COMMAND = "python bench/costs.py --write"

WARM = 30
"""Requests before the first that counts: caches are full then, and lists have their room."""

TRACED = 2
"""Of those that are traced, the first that do not count: tracing fills caches of its own."""

COUNTED = 3
KEPT, ROUNDS = 100, 10

ROOM = 0.01
"""How far below its bound a figure may fall until the bound has to follow, or it would let the next one pass."""

STEP_S = 0.001
PIECE = 256 * 1024
"""How much uvloop reads at most at a time, in bytes."""

SIZES = {"100 B": 100, "32 KiB": 32 << 10, "1 MiB": 1 << 20}
FLEETS = (1, 16, 1000)
BLOCKS = "least_delay"
"""The policy that also gets a large prompt, for all that compare prompts by blocks: they do it in one place."""


Trace = Callable[[FrameType, str, Any], Any]


class Cost(NamedTuple):
    """Of one request or chunk, rounded up from the mean of some; `blocks` of 100, which is no cost but a leak."""

    instructions: int
    bytes: int
    blocks: int = 0


def count(what: Callable[[], object], times: int = COUNTED) -> tuple[int, int]:
    """Return the instructions and the bytes of one call, rounded up from the mean of some.

    Code of this folder does not count. Whoever traces meanwhile, a debugger or the coverage of tests, sees nothing.
    """
    # An array keeps plain numbers: nothing that is counted here is itself an object that stays.
    sums = array(
        "q", [0, 0, 0]
    )  # instructions, bytes, and what was allocated before this instruction
    traced, reset = tracemalloc.get_traced_memory, tracemalloc.reset_peak

    def each(frame: FrameType, event: str, argument: Any) -> Trace:
        if event == "opcode":
            sums[1] += traced()[1] - sums[2]
            sums[0] += 1
            reset()
            sums[2] = traced()[0]
        return each

    def enter(frame: FrameType, event: str, argument: Any) -> Trace | None:
        if frame.f_code.co_filename.startswith(HERE):
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return each

    def run(what: Callable[[], object], times: int) -> tuple[int, int]:
        total = [0, 0]
        for turn in range(TRACED + times):
            sums[0] = sums[1] = 0
            reset()
            sums[2] = traced()[0]
            sys.settrace(enter)
            what()
            sys.settrace(None)
            if turn >= TRACED:
                total[0] += sums[0]
                total[1] += sums[1]
        return total[0], total[1]

    with _quiet():
        instructions, bytes_ = run(what, times)
        # Tracing itself takes the same for every instruction: so much less of it is the gateway's.
        few, more = run(_few, times), run(_more, times)
    own = (more[1] - few[1]) // (more[0] - few[0])
    return -(-instructions // times), -(-(bytes_ - own * instructions) // times)


class _quiet:
    """Nothing else traces, nothing is collected, and allocations are counted."""

    def __enter__(self) -> None:
        self._trace = sys.gettrace()
        gc.collect()
        gc.disable()
        tracemalloc.start()

    def __exit__(self, *exception: object) -> None:
        tracemalloc.stop()
        gc.enable()
        sys.settrace(self._trace)


# As if they were of another file, so that they count.
_SCOPE: dict[str, Any] = {}
exec(compile("def few(): pass\ndef more():\n" + "  a = b = None\n" * 50, "<few>", "exec"), _SCOPE)
_few, _more = _SCOPE["few"], _SCOPE["more"]


def where(what: Callable[[], object], times: int = COUNTED) -> Counter[CodeType]:
    """Return how many instructions of some calls are in which function."""
    found: Counter[CodeType] = Counter()

    def each(frame: FrameType, event: str, argument: Any) -> Trace:
        found[frame.f_code] += event == "opcode"
        return each

    def enter(frame: FrameType, event: str, argument: Any) -> Trace | None:
        if frame.f_code.co_filename.startswith(HERE):
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return each

    for turn in range(TRACED + times):
        if turn == TRACED:
            found.clear()
        sys.settrace(enter)
        what()
        sys.settrace(None)
    return found


def kept(what: Callable[[], object]) -> int:
    """Return how many blocks of memory 100 calls leave behind, once what fills up is full."""
    left = 0
    gc.collect()
    gc.disable()
    for _ in range(ROUNDS):
        before = sys.getallocatedblocks()
        for _ in range(KEPT):
            what()
        left = sys.getallocatedblocks() - before
        if left <= 0:
            break
    gc.enable()
    return max(left, 0)


class Ways:
    """What a client and an engine can do, each as something to call, on one gateway."""

    def __init__(self, gateway: Socketless, clock: Clock) -> None:
        self._gateway = gateway
        self._clock = clock

    def json(self, system: str | None = None, piece: int = 0) -> Callable[[], None]:
        """A chat whose answer comes at once and whole; its bytes come in pieces of so many, 0 for all at once."""
        gateway, clock = self._gateway, self._clock
        data = self._request(system=system)
        pieces = [data[at : at + piece] for at in range(0, len(data), piece)] if piece else [data]

        def once() -> None:
            clock.now_s += STEP_S
            for each in pieces:
                gateway.client(each)
            gateway.engine(ANSWER)

        return once

    def failover(self) -> Callable[[], None]:
        """The first engine is full."""
        gateway, clock, data = self._gateway, self._clock, self._request()

        def once() -> None:
            clock.now_s += STEP_S
            gateway.client(data)
            gateway.engine(REFUSAL)
            gateway.engine(ANSWER)

        return once

    def stream(self) -> Callable[[], None]:
        """A stream of two events, the last of them its end."""
        gateway, clock, data = self._gateway, self._clock, self._request(stream=True)

        def once() -> None:
            clock.now_s += STEP_S
            gateway.client(data)
            gateway.engine(STREAM_HEAD + CHUNK)
            gateway.engine(LAST)

        return once

    def chunk(self) -> Callable[[], None]:
        """One more event of a stream, which nobody ends: this comes last."""
        gateway = self._gateway
        gateway.client(self._request(stream=True))
        gateway.engine(STREAM_HEAD + CHUNK)
        return lambda: gateway.engine(CHUNK)

    def _request(self, *, stream: bool = False, system: str | None = None) -> bytes:
        key = self._gateway.key
        if system is None:
            return request(stream=stream, key=key)
        return request(stream=stream, key=key, system=system)


class Group(NamedTuple):
    """Ways on one gateway, which is made with `settings`; each under the policy that it names, if any."""

    settings: dict[str, Any]
    ways: dict[str, tuple[Callable[[Ways], Callable[[], None]], str]]


def _groups() -> Iterator[Group]:
    large = "x" * (1 << 20)
    ways: dict[str, tuple[Callable[[Ways], Callable[[], None]], str]] = {"json": (Ways.json, "")}
    for name, size in SIZES.items():
        ways[f"json, {name}"] = (partial(Ways.json, system="x" * size), "")
    ways["json, 1 MiB in pieces"] = (partial(Ways.json, system=large, piece=PIECE), "")
    ways |= {"failover": (Ways.failover, ""), "stream": (Ways.stream, "")}
    ways["chunk"] = (Ways.chunk, "")
    yield Group({}, ways)
    yield Group({"keys": True}, {"json with a key": (Ways.json, "")})
    yield Group({"decisions_kept": 0}, {"json without decisions": (Ways.json, "")})
    for size in FLEETS:
        fleet = "1 worker" if size == 1 else f"{size} workers"
        ways = {f"{policy}, {fleet}": (Ways.json, policy) for policy in sorted(POLICIES)}
        if size == 16:
            ways[f"{BLOCKS}, 64 KiB"] = (partial(Ways.json, system=large[: 64 << 10]), BLOCKS)
        yield Group({"workers": size}, ways)


async def _ways(wanted: str) -> AsyncIterator[tuple[str, Callable[[], None]]]:
    """Yield every way whose name begins with `wanted`: its name, and what to call once for one request."""
    clock = Clock()
    for group in _groups():
        chosen = {name: way for name, way in group.ways.items() if name.startswith(wanted)}
        if not chosen:
            continue
        gateway = Socketless(clock=clock, **group.settings)
        await gateway.start()
        ways = Ways(gateway, clock)
        for name, (make, policy) in chosen.items():
            if policy:
                gateway.use(policy)
            once = make(ways)
            for _ in range(WARM):
                once()
            yield name, once
        await gateway.stop()


async def measure_all(wanted: str = "") -> dict[str, Cost]:
    """Return what each way costs whose name begins with `wanted`."""
    costs = {}
    async for name, once in _ways(wanted):
        # Policies learn of their workers for long; what they keep is bounded elsewhere.
        blocks = 0 if name.partition(",")[0] in POLICIES else kept(once)
        costs[name] = Cost(*count(once), blocks)
    return costs


async def show_where(wanted: str) -> None:
    """Print the functions of each way whose name begins with `wanted`, the largest first."""
    async for name, once in _ways(wanted):
        found = where(once)
        print(f"{name}: {sum(found.values()) / COUNTED:.0f} instructions")
        for code, instructions in found.most_common(40):
            file = code.co_filename.rpartition("/src/")[2]
            print(f"{instructions / COUNTED:9.0f}  {file}:{code.co_firstlineno} {code.co_qualname}")


def bounds_of(text: str) -> dict[str, dict[str, Cost]]:
    """Return the bounds of each way, by the version of Python."""
    return {
        version: {name: Cost(*figures) for name, figures in table.items()}
        for version, table in tomllib.loads(text).items()
    }


def written(bounds: Mapping[str, Mapping[str, Cost]]) -> str:
    """Return bounds as text."""
    lines = [
        "# What one request or chunk may cost, by the version of Python: bytecode instructions, and bytes allocated.",
        "# Counted and written by bench/costs.py.",
    ]
    for version in sorted(bounds, key=lambda each: [int(part) for part in each.split(".")]):
        lines += ["", f'["{version}"]']
        lines += [
            f'"{name}" = [{cost.instructions}, {cost.bytes}]'
            for name, cost in bounds[version].items()
        ]
    return "\n".join(lines) + "\n"


def objections(costs: Mapping[str, Cost], bounds: Mapping[str, Cost]) -> list[str]:
    """Return what is dearer than its bound, or so much cheaper that the bound must follow; and what leaks."""
    found = [f"{name}: there is no such way any more" for name in bounds if name not in costs]
    for name, cost in costs.items():
        bound = bounds.get(name)
        if bound is None:
            found.append(f"{name}: it has no bound")
            continue
        for figure, now, before in zip(Cost._fields, cost, bound, strict=True):
            if now > before:
                found.append(f"{name}: {figure} grew from {before:,} to {now:,}")
            elif now < before * (1 - ROOM):
                found.append(
                    f"{name}: {figure} fell from {before:,} to {now:,}, and may stay there"
                )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="make what is measured the bounds")
    parser.add_argument("--json", action="store_true", help="print what is measured, as JSON")
    parser.add_argument("--only", default="", metavar="PREFIX", help="only ways that begin so")
    parser.add_argument("--where", metavar="PREFIX", help="in which functions the instructions are")
    parser.add_argument("--loop", choices=("uvloop", "asyncio"), default="uvloop")
    arguments = parser.parse_args()
    run = uvloop.run if arguments.loop == "uvloop" else asyncio.run
    if arguments.where is not None:
        run(show_where(arguments.where))
        return
    costs = run(measure_all(arguments.only))
    if arguments.json:
        print(json.dumps(costs))
        return
    bounds = bounds_of(BOUNDS.read_text()) if BOUNDS.exists() else {}
    ours = bounds.get(VERSION, {})
    for name, cost in costs.items():
        print(f"{name:32}", *(f"{each:10,}" for each in cost))
    asked = {name: each for name, each in ours.items() if name.startswith(arguments.only)}
    found = objections(costs, asked)
    if found:
        print("", *found, sep="\n")
    if arguments.write:
        others = {name: each for name, each in ours.items() if name not in asked}
        BOUNDS.write_text(written({**bounds, VERSION: {**others, **costs}}))
    elif found:
        sys.exit(1)


if __name__ == "__main__":
    main()
