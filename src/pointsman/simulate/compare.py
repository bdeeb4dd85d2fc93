"""Policies, loads and seeds against each other: every combination is one run, and rows are means over seeds.

A run depends on nothing but the experiment and its three coordinates, so whoever has several cores may spread them; how
is not decided here. Policies meet the same workload, drawn from the seed alone.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from math import nan
from pathlib import Path
from random import Random
from typing import NamedTuple

from msgspec import Struct

from pointsman.domain.pairing import PairingOptions
from pointsman.domain.policy import PolicyOptions
from pointsman.simulate.measures import (
    Mean,
    Measures,
    ServiceLevel,
    mean_of,
    means_of,
    measure,
    timeline,
)
from pointsman.simulate.profile import EngineProfile
from pointsman.simulate.recorded import RecordedTraffic, read_recording
from pointsman.simulate.run import PAUSE_MAX_S, Scenario, simulate
from pointsman.simulate.synthetic import Recipe, Synthetic
from pointsman.simulate.traces import AzureTrace, MooncakeTrace
from pointsman.simulate.variants import variant_of
from pointsman.simulate.workload import Arrival, Workload

__all__ = [
    "Combination",
    "Experiment",
    "Result",
    "Row",
    "Source",
    "combinations",
    "difference",
    "rows",
    "run",
]

POINTS = 200
"""Moments of a timeline."""


REQUESTS_MAX = 10_000_000
"""More requests than that are a mistake of the load: a run of them takes hours."""

LIFETIMES = 5
ANSWER_S = 4.0
"""How long an answer takes, about: it is only for how long a run has to be."""

WARMING = 0.2
"""The part of a run that is not looked at, of a recipe: a file is what it is."""


class Source(Struct, frozen=True, kw_only=True):
    """Where arrivals come from: a recipe, or a file of one of the kinds mooncake, azure and recorded.

    Of a recipe a load is requests per second, of a file a multiple of its own rate. Sessions have to come and go for
    some time until their number is what the load says, so of a recipe there are at least as many requests as come
    in five times as long as a session lasts, and the first fifth is not looked at.
    """

    recipe: Recipe | None = None
    path: str = ""
    kind: str = ""

    def workload(self, load: float, requests: int, seed: int) -> Workload:
        """Return the workload, which can be gone through once, of at most so many requests."""
        if self.recipe is not None:
            lasts = (self.recipe.turns.mean - 1) * (self.recipe.think_s.mean + ANSWER_S)
            if load * PAUSE_MAX_S < 1:
                raise ValueError(f"load: {load:g} is less than one request a day")
            needed = load * lasts * LIFETIMES
            if not needed <= REQUESTS_MAX:
                raise ValueError(f"load: {load:g} would take {needed:.0f} requests")
            requests = max(requests, round(needed))
            return Synthetic(self.recipe, load, requests, Random(f"workload {seed}"))
        path = Path(self.path)
        if self.kind == "recorded":
            with path.open("rb") as lines:
                return _First(RecordedTraffic(read_recording(lines), load), requests)
        trace = MooncakeTrace if self.kind == "mooncake" else AzureTrace
        return _First(trace(path, load, random=Random(f"workload {seed}")), requests)


class _First:
    """The first requests of an open workload."""

    def __init__(self, workload: Workload, requests: int) -> None:
        self.block_tokens = workload.block_tokens
        self._workload = workload
        self._requests = requests

    def __iter__(self) -> Iterator[Arrival]:
        return islice(iter(self._workload), self._requests)


class Experiment(Struct, frozen=True, kw_only=True):
    """What all runs have in common; see `Scenario` for what is not said here."""

    source: Source
    level: ServiceLevel
    requests: int = 2000
    workers: int = 16
    prefill_workers: int = 0
    decode_workers: int = 0
    pairing: PairingOptions | None = None
    gateways: int = 1
    profile: EngineProfile = EngineProfile()
    options: PolicyOptions = PolicyOptions()
    timelines: bool = False


class Combination(NamedTuple):
    """The coordinates of a run; `policy` is a name, or one with options of its own: see `variant_of`."""

    policy: str
    load: float
    seed: int


class Result(NamedTuple):
    """A run: its figures, and for each worker how many requests it had over time, if that was asked for."""

    combination: Combination
    measures: Measures
    timeline: list[list[int]]


class Row(NamedTuple):
    """A policy at a load: each figure as a mean over seeds."""

    policy: str
    load: float
    seeds: int
    means: dict[str, Mean]


def combinations(policies: Sequence[str], loads: Sequence[float], seeds: int) -> list[Combination]:
    """Return all runs of some policies at some loads with the seeds from 0 on.

    >>> len(combinations(["affinity", "weighted"], [1.0, 2.0, 3.0], 5))
    30
    """
    return [
        Combination(policy, load, seed)
        for load in loads
        for policy in policies
        for seed in range(seeds)
    ]


def run(experiment: Experiment, combination: Combination) -> Result:
    """Make one run.

    Raises `ValueError` for a policy or an option that nobody offers and for a file that cannot be understood or has no
    request, `OSError` for one that cannot be read.

    >>> source = Source(recipe=Recipe())
    >>> experiment = Experiment(source=source, level=ServiceLevel(ttft=2.0), requests=50, workers=2)
    >>> run(experiment, Combination("least_outstanding", 1.0, 0)).measures.good
    1.0
    """
    text, load, seed = combination
    policy, options = variant_of(text, experiment.options)
    outcome = simulate(
        Scenario(
            workload=experiment.source.workload(load, experiment.requests, seed),
            policy=policy,
            options=options,
            workers=experiment.workers,
            prefill_workers=experiment.prefill_workers,
            decode_workers=experiment.decode_workers,
            pairing=experiment.pairing,
            gateways=experiment.gateways,
            profile=experiment.profile,
            seed=seed,
        )
    )
    if not len(outcome):
        raise ValueError(f"workload {experiment.source.path}: there is no request in it")
    return Result(
        combination,
        measure(outcome, experiment.level, WARMING if experiment.source.recipe else 0.0),
        timeline(outcome, POINTS) if experiment.timelines else [],
    )


def rows(results: Iterable[Result]) -> list[Row]:
    """Return the rows of a table: by load, and the highest goodput first.

    >>> source = Source(recipe=Recipe())
    >>> experiment = Experiment(source=source, level=ServiceLevel(ttft=2.0), requests=50, workers=2)
    >>> both = [run(experiment, each) for each in combinations(["affinity", "weighted"], [1.0], 2)]
    >>> [(row.seeds, row.load) for row in rows(both)]
    [(2, 1.0), (2, 1.0)]
    """
    grouped: dict[tuple[float, str], list[Measures]] = {}
    for (policy, load, _), measures, _ in results:
        grouped.setdefault((load, policy), []).append(measures)
    made = [
        Row(policy, load, len(measures), means_of(measures))
        for (load, policy), measures in grouped.items()
    ]
    return sorted(made, key=lambda row: (row.load, -row.means["goodput"].mean, row.policy))


def difference(results: Iterable[Result], one: Row, other: Row, figure: str = "goodput") -> Mean:
    """Return by how much `one` is above `other` in a figure: the mean of the differences seed by seed.

    Both met the same workload with the same seed, so what that did to both is not in the interval. Of seeds that only
    one of them has nothing is taken; nan where they have none in common.

    >>> source = Source(recipe=Recipe())
    >>> experiment = Experiment(source=source, level=ServiceLevel(ttft=2.0), requests=50, workers=2)
    >>> both = [run(experiment, each) for each in combinations(["affinity", "weighted"], [1.0], 2)]
    >>> first, second = rows(both)
    >>> difference(both, first, second, "requests")
    Mean(mean=0.0, margin=0.0)
    """
    seen: dict[tuple[str, float], dict[int, float]] = {}
    for (policy, load, seed), measures, _ in results:
        seen.setdefault((policy, load), {})[seed] = getattr(measures, figure)
    ours, theirs = (seen.get((row.policy, row.load), {}) for row in (one, other))
    common = sorted(ours.keys() & theirs.keys())
    return mean_of([ours[seed] - theirs[seed] for seed in common]) if common else Mean(nan, nan)
