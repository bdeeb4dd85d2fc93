"""What measured runs of a real fleet come to, beside the same arrivals simulated: figures, orders, and a report.

Figures are those of the simulator, by its own code.
"""

from __future__ import annotations

import statistics
from array import array
from itertools import pairwise, permutations
from math import isfinite, nan
from typing import TYPE_CHECKING

import msgspec
from fleet_arrivals import WARMING, Conditions, simulated

from pointsman.simulate.measures import Mean, Measures, ServiceLevel, mean_of, means_of, measure
from pointsman.simulate.outcome import Outcome, WorkerOutcome
from pointsman.simulate.profile import EngineProfile

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = [
    "COLUMNS",
    "Run",
    "cell",
    "certain",
    "csv_lines",
    "kendall",
    "paired",
    "ranking",
    "table",
    "values",
]

CERTAIN_SEEDS = 20
"""Simulated runs that tell whether two policies differ: real ones are too dear for that many."""
COLUMNS = ("goodput", "good", "ttft_p50", "ttft_p90", "hit_rate", "imbalance")


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """A measured run. Lists have a place for each request, in order: seconds, nan where there was none, and tokens.

    `busy_s` is CPU time of each engine. `waited` is the part of the engines' wanted time in which others had the cores,
    `late_s` how late the latest request was sent, and `load` the load average of the machine at the start.
    """

    policy: str
    seed: int
    conditions: Conditions
    profile: EngineProfile
    at: list[float]
    ttft: list[float | None]
    tpot: list[float | None]
    e2e: list[float | None]
    prompt: list[int]
    output: list[int]
    cached: list[int]
    busy_s: list[float]
    waited: float
    late_s: float
    load: float
    began: str

    def measures(self) -> Measures:
        """Return the figures of this run, as the simulator has them."""
        outcome = Outcome(
            at=array("d", self.at),
            ttft=array("d", [nan if each is None else each for each in self.ttft]),
            tpot=array("d", [nan if each is None else each for each in self.tpot]),
            e2e=array("d", [nan if each is None else each for each in self.e2e]),
            prompt=array("q", self.prompt),
            output=array("q", self.output),
            cached=array("q", self.cached),
            worker=array("q", [-1] * len(self.at)),
            gateway=array("q", [0] * len(self.at)),
            attempts=array("q", [1] * len(self.at)),
            workers=[
                WorkerOutcome(f"w{number:04}", busy_s=busy)
                for number, busy in enumerate(self.busy_s)
            ],
            ended_at=self.conditions.seconds,
        )
        return measure(outcome, ServiceLevel.parse(self.conditions.slo), WARMING)


def ranking(figures: Mapping[str, float]) -> list[str]:
    """Return the names, the highest figure first, equals by name."""
    return sorted(figures, key=lambda name: (-figures[name], name))


def kendall(one: Mapping[str, float], other: Mapping[str, float]) -> float:
    """Return Kendall's tau-b of two figures of the same names: 1 the same order, -1 the reverse, nan if one has none.

    Raises ValueError if the names are not the same.
    """
    if one.keys() != other.keys():
        raise ValueError("the orders are of different names")
    names = sorted(one)
    agree, only_one, only_other = 0, 0, 0
    for at, left in enumerate(names):
        for right in names[at + 1 :]:
            first = _sign(one[left] - one[right])
            second = _sign(other[left] - other[right])
            agree += first * second
            only_one += first != 0
            only_other += second != 0
    return agree / (only_one * only_other) ** 0.5 if only_one and only_other else nan


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)


def paired(one: Mapping[int, float], other: Mapping[int, float]) -> Mean:
    """Return the mean of `one - other` over the seeds that both have, with its 95% interval.

    What a seed makes hard is hard for both, so this is much narrower than the intervals of the two.

    Raises ValueError where there is no such seed.
    """
    seeds = sorted(one.keys() & other.keys())
    if not seeds:
        raise ValueError("no seed is in both")
    return mean_of([one[seed] - other[seed] for seed in seeds])


def cell(mean: Mean, digits: int = 2) -> str:
    around = f" ± {mean.margin:.{digits}f}" if isfinite(mean.margin) else ""
    return f"{mean.mean:.{digits}f}{around}"


def table(runs: Sequence[Run], profile: EngineProfile | None = None, chances: int = 1) -> list[str]:
    """Return the report of runs under the same conditions as Markdown, the policy of the highest goodput first.

    Simulated figures are of the same seeds, on `profile`, which is the median of the measured ones where there is none,
    and means over `chances` simulations: they differ in when engines tell of their queues, and in what policies draw.

    Raises ValueError for runs under different conditions, and where a policy lacks a seed.
    """
    conditions = runs[0].conditions
    if any(each.conditions != conditions for each in runs):
        raise ValueError("the runs are of different conditions")
    found: dict[str, dict[int, Measures]] = {}
    for each in runs:
        found.setdefault(each.policy, {})[each.seed] = each.measures()
    seeds = sorted({each.seed for each in runs})
    for policy, of_seeds in found.items():
        if sorted(of_seeds) != seeds:
            raise ValueError(f"{policy} does not have all the seeds")
    profile = profile or _typical([each.profile for each in runs])
    models = {
        policy: means_of(
            [
                simulated(conditions, profile, policy, seed, chance)
                for seed in seeds
                for chance in range(chances)
            ]
        )
        for policy in found
    }
    real = {policy: means_of(list(of_seeds.values())) for policy, of_seeds in found.items()}
    goodput = {policy: means["goodput"].mean for policy, means in real.items()}
    expected = {policy: means["goodput"].mean for policy, means in models.items()}
    order, foreseen = ranking(goodput), ranking(expected)
    lines = [
        f"| policy | {' | '.join(COLUMNS)} | to the next one, paired | simulated goodput | hit_rate | place |",
        f"| --- |{' ---: |' * (len(COLUMNS) + 4)}",
    ]
    by_seed = {
        policy: {seed: each.goodput for seed, each in of_seeds.items()}
        for policy, of_seeds in found.items()
    }
    ahead = {one: cell(paired(by_seed[one], by_seed[other])) for one, other in pairwise(order)}
    for policy in order:
        cells = [cell(real[policy][column]) for column in COLUMNS]
        model = models[policy]
        cells += [ahead.get(policy, ""), f"{expected[policy]:.2f}", f"{model['hit_rate'].mean:.2f}"]
        cells += [str(foreseen.index(policy) + 1)]
        lines.append(f"| `{policy}` | {' | '.join(cells)} |")
    tau = kendall(goodput, expected)
    sure = certain(conditions, profile, order)
    kept = sum(_sign(goodput[one] - goodput[other]) > 0 for one, other in sure)
    lines += [
        "",
        f"Measured: {', '.join(order)}.",
        f"Simulated: {', '.join(foreseen)}.",
        f"Kendall's tau {tau:.2f}; the first three are {'the same' if order[:3] == foreseen[:3] else 'not the same'}.",
        f"In {len(sure)} of {len(order) * (len(order) - 1) // 2} pairs the simulator tells which is better, over "
        f"{CERTAIN_SEEDS} seeds; in {kept} of these it is so measured.",
        "",
        f"{len(seeds)} seeds, {len(runs)} runs from {min(each.began for each in runs)} to "
        f"{max(each.began for each in runs)}; load average {min(each.load for each in runs):.1f} to "
        f"{max(each.load for each in runs):.1f} before a run; engines waited for a core in "
        f"{min(each.waited for each in runs):.0%} to {max(each.waited for each in runs):.0%} of the time in which they "
        f"wanted one; no request was sent more than {max(each.late_s for each in runs):.2f} s late; "
        f"{sum(each.e2e.count(None) for each in runs)} failed.",
        f"Engine: {values(profile)}.",
        f"Workload: {values(conditions)}.",
    ]
    return lines


def certain(
    conditions: Conditions, profile: EngineProfile, policies: Sequence[str]
) -> list[tuple[str, str]]:
    """Return the pairs, the better one first, whose simulated goodput differs by more than its paired interval."""
    of_seeds = {
        policy: {
            seed: simulated(conditions, profile, policy, seed, seed).goodput
            for seed in range(CERTAIN_SEEDS)
        }
        for policy in policies
    }
    return [
        (one, other)
        for one, other in permutations(policies, 2)
        if (gap := paired(of_seeds[one], of_seeds[other])).mean > gap.margin
    ]


def values(settings: msgspec.Struct) -> str:
    return ", ".join(f"{name} {value}" for name, value in msgspec.structs.asdict(settings).items())


def _typical(profiles: Sequence[EngineProfile]) -> EngineProfile:
    """Return a profile with the medians of some: each piece of a measurement has measured its own."""
    numbers = [msgspec.structs.asdict(each) for each in profiles]
    first = numbers[0]
    # What is no number is the same in all.
    middle = {
        name: type(value)(statistics.median([each[name] for each in numbers]))
        for name, value in first.items()
        if not isinstance(value, str)
    }
    return msgspec.convert(first | middle, EngineProfile)


def csv_lines(runs: Sequence[Run]) -> Iterator[str]:
    """Yield the figures of every run as CSV, a line each."""
    names = Measures.__struct_fields__
    yield ",".join(["policy", "seed", "waited", "load", *names])
    for each in runs:
        measures = each.measures()
        numbers = [each.waited, each.load, *(getattr(measures, name) for name in names)]
        yield ",".join([each.policy, str(each.seed), *(f"{number:.6g}" for number in numbers)])
