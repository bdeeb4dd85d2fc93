"""Which policy answers most requests in time: every policy on five workloads, around what a fleet can take.

Run as `python bench/frontier.py [TRACE]`, where TRACE (or POINTSMAN_TRACE) is the conversation trace of Mooncake
(FAST25-release/traces/conversation_trace.jsonl, maybe with .gz); without it the four drawn workloads are compared.
`--quick` is one seed and three loads. What was done is kept in `bench/results/`, and a run that is there is not made
again, so it may be interrupted at any time; `--again POLICY` makes those of a policy again that has changed, `--setup`
all, from the knee on. The knee is looked for again, too, where there is another policy than last time.

- **Fleet**: 16 workers of the default profile (8,000 prompt tokens/s, 524,288 tokens of cache), one gateway.
- **Good**: the first token within 2 s, and 50 ms between two tokens.
- **Workloads**: `WORKLOADS`, and the whole trace. A cold prompt of 8,000 tokens costs a second there, and all that is
  shared is a multiple of what one worker can keep, so it matters where a prompt goes.
- **Knee**: the highest load at which the best of all policies still has 95% of the share of good answers that the best
  has at an eighth of `Workload.first`. Where that is 100% it is the load at which 95% are good. Of the trace it cannot
  be: nearly a quarter of its prompts have more than 16,000 tokens, which take more than 2 s wherever they are not
  cached.
- **Loads**: 0.5 to 1.2 times the knee.
- **Rivals at their best**: their defaults are of other GPUs. So each rival is there twice: as it is published, and with
  the best of `TUNABLES` for this very workload, found around its knee. Ours get no such thing.
- **Seeds**: 0 to 9, the same for all policies, so differences are paired; knees and tunables were found with others
  (`SETUP_SEEDS`). A seed of the trace draws when, within its ticks of 3 s, a request comes, and nothing else: its
  intervals are of that alone.

Written are `frontier.md`, and for each workload the runs as CSV and a picture as SVG.
"""

import multiprocessing
import os
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, TypeAlias

import msgspec
from msgspec import Struct

from pointsman.domain.policy import POLICIES
from pointsman.simulate.compare import (
    Combination,
    Experiment,
    Result,
    Row,
    combinations,
    difference,
    rows,
    run,
)
from pointsman.simulate.knee import find_knee
from pointsman.simulate.measures import ServiceLevel
from pointsman.simulate.plot import draw
from pointsman.simulate.report import markdown
from pointsman.simulate.runs import KeptRuns, read_runs, write_runs
from pointsman.simulate.sources import source_of

RESULTS = Path(__file__).parent / "results"
LEVEL = ServiceLevel.parse("ttft=2s,tpot=50ms")
WORKERS = 16
WANTED = 0.95
LIGHT = 8
FOLLOWED = 3
RELATIVE = (0.5, 0.7, 0.85, 1.0, 1.1, 1.2)
SEEDS = 10
QUICK = (0.7, 1.0, 1.2)
SETUP_SEEDS = (1000, 1001)
COLUMNS = (
    *("goodput", "good", "ttft_p50", "ttft_p99", "tpot_p99"),
    *("hit_rate", "imbalance"),
)

RIVALS = frozenset(
    {
        *("cache_aware", "kv_cost", "least_outstanding", "least_tokens", "peak_ewma"),
        *("power_of_two", "prefix_hash", "sticky_until_saturated", "weighted"),
    }
)
"""Whatever else is in `POLICIES` is ours."""

TUNABLES = {
    "cache_aware": [
        f"balance_abs={most},balance_rel={factor},cache_threshold={threshold}"
        for most, factor in ((4, 1.25), (16, 1.5), (64, 1.5))
        for threshold in (0.1, 0.3, 0.5)
    ],
    "kv_cost": [f"prefill_load_scale={scale}" for scale in (0.5, 2, 8, 32, 128)],
    "least_tokens": ["tokens_per_s=8000", "tokens_per_s=32000"],
    "peak_ewma": [f"decay_s={seconds}" for seconds in (1, 3, 30)],
    "prefix_hash": [
        f"prefix_tokens={tokens},load_margin={margin},load_factor={factor}"
        for tokens in (256, 1024, 4096)
        for margin, factor in ((0, 1.25), (3, 1.25), (10, 1.5))
    ],
    "sticky_until_saturated": [
        f"prefill_tokens_per_s=8000,ttft_penalty_s={seconds},sticky_score={score}"
        for seconds in (1, 2, 8, 36)
        for score in (0.1, 0.3, 0.8)
    ],
}
"""What rivals are tried with: constants around those of this engine. The others have none that could matter here."""


class Workload(NamedTuple):
    """What comes: a file or a recipe, how many requests of it, and a load to begin the search for its knee with."""

    spec: str
    requests: int
    first: float


WORKLOADS: Mapping[str, Workload] = {
    # Chats: 40 system prompts, and each turn has all before it.
    "sessions": Workload(
        "sessions:prefixes=40,prefix=lognormal/3000/0.6,question=lognormal/2000/0.8,answer=lognormal/150/0.6,"
        "turns=geometric/4,think_s=exponential/2",
        2500,
        20.0,
    ),
    # One question each behind 300 system prompts, 2 million tokens in all: four times what a worker has room for.
    "shared": Workload("shared:prefixes=300,prefix=lognormal/6000/0.5", 2500, 20.0),
    # Loops of 8 calls a second apart, behind the tools of 20 agents, 6,000 tokens each.
    "agents": Workload("agents:turns=geometric/8", 2500, 20.0),
    # 400 documents of 8,000 tokens, seven times what a worker has room for, all behind the same 300 tokens.
    "rag": Workload("rag:prefixes=400,prefix=lognormal/8000/0.4", 2500, 20.0),
}


class Setup(Struct):
    """What has to be known of a workload before it is compared: its knee, and the best constants of rivals for it."""

    spec: str
    tried: list[str]
    ceiling: float
    knee: float
    tuned: list[str]


Runs: TypeAlias = Callable[[Experiment, Sequence[Combination]], Iterator[Result]]


def main() -> None:
    """Set up, run and report each workload in turn."""
    parser = ArgumentParser(description="Compare all policies on five workloads.")
    parser.add_argument("trace", nargs="?", default=os.environ.get("POINTSMAN_TRACE", ""))
    parser.add_argument("--policy", action="append", help="only this one; repeatable")
    parser.add_argument("--workload", action="append", help="only this one; repeatable")
    parser.add_argument("--again", action="append", default=[], help="forget a policy's runs")
    parser.add_argument("--setup", action="store_true", help="find knees and constants afresh")
    parser.add_argument("--quick", action="store_true", help="one seed and three loads")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    workloads = dict(WORKLOADS)
    if given.trace:
        workloads = {"mooncake": Workload(given.trace, 1_000_000, 2.0), **workloads}
    else:
        print("no TRACE: the drawn workloads only", file=sys.stderr)
    for name in given.workload or ():
        if name not in workloads:
            parser.error(f"there is no workload {name!r}, there are {', '.join(workloads)}")
    given.results.mkdir(exist_ok=True)
    relative, seeds = (QUICK, 1) if given.quick else (RELATIVE, SEEDS)
    setups = _kept_setups(given.results)
    with _spread(given.jobs) as runs:
        for name in given.workload or workloads:
            began = time.monotonic()
            workload = workloads[name]
            experiment = Experiment(
                source=source_of(workload.spec),
                level=LEVEL,
                requests=workload.requests,
                workers=WORKERS,
            )
            setup = setups.get(name)
            if setup is None or given.setup or not _is_of(setup, workload):
                setups[name] = setup = set_up(experiment, workload, runs)
                _keep_setups(given.results, setups)
            names = [
                each
                for each in (*sorted(POLICIES), *setup.tuned)
                if not given.policy or _plain(each) in given.policy
            ]
            path = given.results / f"frontier-{name}.csv"
            _forget(path, loads_of(setup, RELATIVE), given.again)
            made = make(
                experiment, combinations(names, loads_of(setup, relative), seeds), path, runs
            )
            seconds = time.monotonic() - began
            print(f"{name}: knee {setup.knee:g}, {made} runs, {seconds:.0f} s", file=sys.stderr)
            report(given.results, setups, relative, seeds)


# What comes first.


def set_up(experiment: Experiment, workload: Workload, runs: Runs) -> Setup:
    """Find the knee of a workload, the best constants of each rival around it, and with these the knee again."""
    plain = sorted(POLICIES)
    light = _shares(experiment, plain, workload.first / LIGHT, runs, "good")
    ceiling = max(light.values())
    wanted = WANTED * ceiling
    rough = _knee(experiment, plain, workload.first, wanted, 0.1, runs)
    print(f"about {rough:.3g}, of {ceiling:.1%} at light load", file=sys.stderr)
    tuned = _tuned(experiment, rough, runs)
    print(*tuned, sep="\n", file=sys.stderr)
    knee = _knee(experiment, [*tuned, *plain], rough * 1.1, wanted, 0.03, runs)
    return Setup(_named(workload), _tried(), round(ceiling, 4), float(f"{knee:.3g}"), tuned)


def loads_of(setup: Setup, relative: Sequence[float]) -> list[float]:
    """Return the loads of a workload, given as parts of its knee."""
    return [float(f"{setup.knee * each:.6g}") for each in relative]


def _knee(
    experiment: Experiment,
    names: Sequence[str],
    first: float,
    wanted: float,
    precision: float,
    runs: Runs,
) -> float:
    """Return the highest load at which at least one of some policies has the wanted share of good answers.

    Only those are followed that have the highest shares at `first`.
    """
    shares = _shares(experiment, names, first, runs, "good")
    best = sorted(names, key=shares.__getitem__, reverse=True)[:FOLLOWED]

    def share(load: float) -> float:
        return max(_shares(experiment, best, load, runs, "good").values())

    return find_knee(share, first, wanted=wanted, precision=precision).load


def _tuned(experiment: Experiment, knee: float, runs: Runs) -> list[str]:
    """Return for each rival that has constants those with the highest goodput around the knee, if its own have not.

    All are tried a little above it, and those that are best there below and above.
    """
    # Among equals the published constants win.
    sums = dict.fromkeys([*TUNABLES, *_variants()], 0.0)

    def best(name: str, count: int) -> list[str]:
        own = [each for each in sums if _plain(each) == name]
        return sorted(own, key=sums.__getitem__, reverse=True)[:count]

    names = list(sums)
    for load in (knee * 1.1, knee, knee * 1.2):
        for each, goodput in _shares(experiment, names, load, runs, "goodput").items():
            sums[each] += goodput
        names = [each for name in TUNABLES for each in best(name, FOLLOWED)]
    return [each for name in TUNABLES for each in best(name, 1) if each != name]


def _shares(
    experiment: Experiment, names: Sequence[str], load: float, runs: Runs, figure: str
) -> dict[str, float]:
    """Return a figure of each of some policies at a load, as a mean."""
    # Of a trace one seed says as much as two.
    seeds = SETUP_SEEDS if experiment.source.recipe is not None else SETUP_SEEDS[:1]
    sums = dict.fromkeys(names, 0.0)
    wanted = [Combination(name, load, seed) for name in names for seed in seeds]
    for result in runs(experiment, wanted):
        sums[result.combination.policy] += getattr(result.measures, figure) / len(seeds)
    return sums


def _is_of(setup: Setup, workload: Workload) -> bool:
    return setup.spec == _named(workload) and setup.tried == _tried()


def _tried() -> list[str]:
    return [*sorted(POLICIES), *_variants()]


def _variants() -> list[str]:
    return [f"{name}:{each}" for name, variants in TUNABLES.items() for each in variants]


def _named(workload: Workload) -> str:
    """Return what a workload is, without where a file is."""
    return workload.spec if ":" in workload.spec else Path(workload.spec).name


def _plain(name: str) -> str:
    return name.partition(":")[0]


def _kept_setups(results: Path) -> dict[str, Setup]:
    path = results / "frontier.json"
    return msgspec.json.decode(path.read_bytes(), type=dict[str, Setup]) if path.exists() else {}


def _keep_setups(results: Path, setups: Mapping[str, Setup]) -> None:
    encoded = msgspec.json.format(msgspec.json.encode(setups), indent=1)
    (results / "frontier.json").write_bytes(encoded + b"\n")


# The runs.


def make(experiment: Experiment, wanted: Sequence[Combination], path: Path, runs: Runs) -> int:
    """Make those of the wanted runs that a file lacks, and return how many."""
    with KeptRuns(path) as kept:
        lacking = kept.lacking(wanted)
        for result in runs(experiment, lacking):
            kept.add(result)
    return len(lacking)


def _forget(path: Path, loads: Sequence[float], again: Sequence[str]) -> None:
    """Take out of a file what is at another load than these, and some policies."""
    runs = read_runs(path)
    kept = [each for each in runs if each.combination.load in loads]
    write_runs([each for each in kept if _plain(each.combination.policy) not in again], path)


@contextmanager
def _spread(jobs: int) -> Iterator[Runs]:
    """Yield what makes runs, in so many processes, each as soon as it is done."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:

        def runs(experiment: Experiment, wanted: Sequence[Combination]) -> Iterator[Result]:
            pending = [pool.submit(partial(run, experiment), each) for each in wanted]
            for future in as_completed(pending):
                yield future.result()

        try:
            yield runs
        finally:
            pool.shutdown(cancel_futures=True)


# What is said of them.


class Compared(NamedTuple):
    """A workload that was compared: its rows, loads as parts of its knee, and the runs that they are means of."""

    name: str
    setup: Setup
    rows: list[Row]
    results: list[Result]

    def against_rival(self, row: Row, rival: Row) -> str:
        """Return by how much a row is above one of a rival in goodput, seed by seed."""
        if row is rival:
            return "best rival"
        mean, margin = difference(self.results, row, rival)
        share = (
            f" ({mean / rival.means['goodput'].mean:+.1%})" if rival.means["goodput"].mean else ""
        )
        return f"{mean:+.2f}" + (f" ± {margin:.2g}" if margin == margin else "") + share


def report(
    results: Path,
    setups: Mapping[str, Setup],
    relative: Sequence[float],
    seeds: int,
) -> None:
    """Write the tables and the pictures of all workloads, of the runs that were wanted."""
    compared = []
    for name in ("mooncake", *WORKLOADS):
        setup = setups.get(name)
        if setup is None:
            continue
        parts = dict(zip(loads_of(setup, relative), relative, strict=True))
        known = {*sorted(POLICIES), *setup.tuned}
        seen = [
            each._replace(combination=each.combination._replace(load=parts[each.combination.load]))
            for each in read_runs(results / f"frontier-{name}.csv")
            if each.combination.load in parts
            and each.combination.policy in known
            and each.combination.seed < seeds
        ]
        if seen:
            compared.append(Compared(name, setup, rows(seen), seen))
    text = [HEAD.format(seeds=seeds, workers=WORKERS), _summary(compared)]
    for each in compared:
        text.append(_section(each))
        draw(
            each.rows,
            [],
            results / f"frontier-{each.name}.svg",
            unit=f"load, in parts of the knee ({_rate(each)})",
            at=1.0,
        )
    (results / "frontier.md").write_text("\n".join(text), encoding="utf-8")


HEAD = """# The frontier

Made by `bench/frontier.py`, whose text says what is compared, and how: {workers} workers, {seeds} seeds; good is a
first token within 2 s and 50 ms between tokens. Intervals are Student's, 95%. Rows with constants behind the name are
rivals tuned for that workload.
"""


def _best(of: Sequence[Row]) -> Row:
    return max(of, key=lambda row: row.means["goodput"].mean)


def _is_rival(row: Row) -> bool:
    return _plain(row.policy) in RIVALS


def _summary(compared: Sequence[Compared]) -> str:
    """Return tables of the highest goodput of each policy on each workload, and of how far it holds the level."""
    return (
        "Highest goodput (good answers/s) over all loads, and at which part of the knee; ours with the paired "
        f"difference to the highest of any rival, tuned ones included.\n\n{_table(compared, _highest)}\n"
        "Up to which part of the knee so many answers are good as the knee is defined by, between loads by a straight "
        f"line.\n\n{_table(compared, _reach)}"
    )


def _table(compared: Sequence[Compared], cell: Callable[[Compared, Sequence[Row]], str]) -> str:
    """Return a table of a line for each policy, and one for the tuned, and a column for each workload."""
    lines = [
        ["policy", *[each.name for each in compared]],
        ["---", *["---:"] * len(compared)],
    ]
    for policy in sorted({_plain(row.policy) for each in compared for row in each.rows}):
        for tuned in (False, True):
            cells = []
            for each in compared:
                own = [
                    row
                    for row in each.rows
                    if _plain(row.policy) == policy and (":" in row.policy) == tuned
                ]
                cells.append(cell(each, own) if own else "")
            if any(cells):
                lines.append([policy + " (tuned)" * tuned, *cells])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _highest(compared: Compared, own: Sequence[Row]) -> str:
    best = _best(own)
    text = f"{best.means['goodput'].mean:.2f} at {best.load:g}"
    rivals = [row for row in compared.rows if _is_rival(row)]
    if rivals and not _is_rival(best):
        text += f", {compared.against_rival(best, _best(rivals))}"
    return text


def _reach(compared: Compared, own: Sequence[Row]) -> str:
    """Return up to which load a policy holds the level, where it first falls below it."""
    wanted = WANTED * compared.setup.ceiling
    points = sorted((row.load, row.means["good"].mean) for row in own)
    if points[0][1] < wanted:
        return f"below {points[0][0]:g}"
    for (low, before), (high, after) in pairwise(points):
        if after < wanted:
            return f"{low + (high - low) * (before - wanted) / (before - after):.2f}"
    return f"above {points[-1][0]:g}"


def _section(compared: Compared) -> str:
    setup = compared.setup
    against = []
    for row in compared.rows:
        rivals = [each for each in compared.rows if each.load == row.load and _is_rival(each)]
        against.append(compared.against_rival(row, _best(rivals)) if rivals else "")
    table = markdown(compared.rows, COLUMNS, {"against the best rival": against})
    return (
        f"## {compared.name}\n\n`{setup.spec}`; knee: {_rate(compared)}, the highest load at which "
        f"{WANTED * setup.ceiling:.1%} are good.\n\n{table}"
    )


def _rate(compared: Compared) -> str:
    unit = "requests/s" if ":" in compared.setup.spec else "times its own rate"
    return f"{compared.setup.knee:g} {unit}"


if __name__ == "__main__":
    main()
