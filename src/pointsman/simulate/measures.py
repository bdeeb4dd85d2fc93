"""What a simulated run comes to: quantiles, goodput at a service level, cached tokens, balance, cost; and their means.

Every figure has one definition, which stands at its name. A request that failed met no service level and has no times.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from math import inf, isfinite, isnan, nan, sqrt
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import fields

from pointsman.domain.worker import Role
from pointsman.simulate.outcome import Outcome
from pointsman.simulate.sizes import nearest

__all__ = [
    "Mean",
    "Measures",
    "ServiceLevel",
    "mean_of",
    "means_of",
    "measure",
    "quantile",
    "timeline",
]

_UNITS = {"ms": 0.001, "s": 1.0, "": 1.0}


class ServiceLevel(Struct, frozen=True):
    """How long a request may take, in seconds, for its answer to be a good one; inf where that does not matter.

    >>> ServiceLevel.parse("ttft=2s,tpot=50ms")
    ServiceLevel(ttft=2.0, tpot=0.05, e2e=inf)
    """

    ttft: float = inf
    tpot: float = inf
    e2e: float = inf

    @classmethod
    def parse(cls, text: str) -> "ServiceLevel":
        """Read limits as a command line has them. Raises ValueError with one line."""
        limits: dict[str, float] = {}
        for part in text.split(","):
            key, _, value = part.strip().partition("=")
            if key not in cls.__struct_fields__:
                raise ValueError(f"there is no {key!r}, {nearest(key, cls.__struct_fields__)}")
            number = value.rstrip("ms")
            try:
                limits[key] = float(number) * _UNITS[value[len(number) :]]
            except (KeyError, ValueError):
                raise ValueError(f"{key}: {value!r} is no time such as 2s or 50ms") from None
            if not (isfinite(limits[key]) and limits[key] > 0):
                raise ValueError(f"{key}: {value!r} is not more than 0")
        return cls(**limits)

    def met(self, outcome: Outcome, index: int) -> bool:
        """Tell whether the answer to the request at `index` was a good one."""
        # What is not known is nan and breaks no limit: an answer of one token has no time between two.
        return not (
            outcome.failed(index)
            or outcome.ttft[index] > self.ttft
            or outcome.tpot[index] > self.tpot
            or outcome.e2e[index] > self.e2e
        )


class Measures(Struct, frozen=True, kw_only=True):
    """The figures of one run; nan where there is nothing to tell.

    `requests` came and `failed` of them had no whole answer. Of the others `ttft_*`, `tpot_*` and `e2e_*` are quantiles
    in seconds. `good` (0 to 1) is the share that met the service level, `goodput` those per second, from the first
    arrival to the last one. `hit_rate` is cached prompt tokens in all prompt tokens. `imbalance` is the busy time of
    the busiest worker in that of the mean one, 1 for perfect balance, and `variation` the coefficient of variation of
    these times, both among workers of one role, the worst of the roles. `migrations` is how often a request was sent to
    another worker. `cost` is worker seconds for a thousand good requests, inf without any. `handed_off` is the share of
    requests whose prompt another worker computed, and `prefill_busy` and `decode_busy` the share of time that a mean
    worker of the role had something to compute, nan where there are none.
    """

    requests: float
    failed: float
    ttft_p50: float
    ttft_p90: float
    ttft_p99: float
    tpot_p50: float
    tpot_p90: float
    tpot_p99: float
    e2e_p50: float
    e2e_p90: float
    e2e_p99: float
    good: float
    goodput: float
    hit_rate: float
    imbalance: float
    variation: float
    migrations: float
    cost: float
    handed_off: float
    prefill_busy: float
    decode_busy: float


class Mean(NamedTuple):
    """A mean over seeds, and half of its 95% confidence interval, which is nan for a single seed."""

    mean: float
    margin: float


def measure(outcome: Outcome, level: ServiceLevel, skip: float = 0.0) -> Measures:
    """Return the figures of a run, without those who came in the first part of its time, `skip` (0 to below 1) of it.

    Caches are cold then, and of the sessions that the load means only the first turns are there. What is told of
    workers is of the whole run all the same.

    >>> from pointsman.simulate.run import Scenario, simulate
    >>> from pointsman.simulate.workload import Arrival, Listed
    >>> arrivals = [Arrival(0.0, (), 8000, 2), Arrival(4.0, (), 16000, 2)]
    >>> seen = measure(simulate(Scenario(workload=Listed(arrivals), workers=1)), ServiceLevel(ttft=1.5))
    >>> seen.good, seen.goodput, seen.cost
    (0.5, 0.25, 4000.0)
    """
    whole = outcome.at[-1] - outcome.at[0] if len(outcome) else 0.0
    first = bisect_left(outcome.at, outcome.at[0] + skip * whole) if whole else 0
    count = len(outcome) - first
    good = sum([level.met(outcome, index) for index in range(first, len(outcome))])
    seconds = whole * (1 - skip) or outcome.ended_at
    imbalance, variation = _balance(outcome)
    prompt = sum(outcome.prompt[first:])
    ttft, tpot, e2e = (_known(each[first:]) for each in (outcome.ttft, outcome.tpot, outcome.e2e))
    return Measures(
        requests=count,
        failed=sum(map(isnan, outcome.e2e[first:])),
        ttft_p50=quantile(ttft, 0.5),
        ttft_p90=quantile(ttft, 0.9),
        ttft_p99=quantile(ttft, 0.99),
        tpot_p50=quantile(tpot, 0.5),
        tpot_p90=quantile(tpot, 0.9),
        tpot_p99=quantile(tpot, 0.99),
        e2e_p50=quantile(e2e, 0.5),
        e2e_p90=quantile(e2e, 0.9),
        e2e_p99=quantile(e2e, 0.99),
        good=good / count if count else nan,
        goodput=good / seconds if seconds else nan,
        hit_rate=sum(outcome.cached[first:]) / prompt if prompt else nan,
        imbalance=imbalance,
        variation=variation,
        migrations=sum([attempts - 1 for attempts in outcome.attempts[first:] if attempts > 1]),
        cost=1000 * len(outcome.workers) * seconds / good if good else inf,
        handed_off=sum([each >= 0 for each in outcome.prefill[first:]]) / count if count else nan,
        prefill_busy=_busy(outcome, Role.PREFILL),
        decode_busy=_busy(outcome, Role.DECODE),
    )


def _balance(outcome: Outcome) -> tuple[float, float]:
    """Return the imbalance of a run, and the coefficient of variation."""
    highest, spreads = [], []
    for role in Role:
        busy = [worker.busy_s for worker in outcome.workers if worker.role is role]
        mean = sum(busy) / len(busy) if busy else 0.0
        if mean:
            highest.append(max(busy) / mean)
            spreads.append(sqrt(sum([(each - mean) ** 2 for each in busy]) / len(busy)) / mean)
    return max(highest, default=nan), max(spreads, default=nan)


def _busy(outcome: Outcome, role: Role) -> float:
    busy = [worker.busy_s for worker in outcome.workers if worker.role is role]
    return sum(busy) / len(busy) / outcome.ended_at if busy and outcome.ended_at else nan


def quantile(ordered: Sequence[float], q: float) -> float:
    """Return the quantile `q` (0 to 1) of numbers in order, between two of them where it lies there; nan of none.

    >>> quantile([1.0, 2.0, 4.0], 0.5), quantile([1.0, 2.0], 0.75)
    (2.0, 1.75)
    """
    if not ordered:
        return nan
    place = q * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def mean_of(values: Sequence[float]) -> Mean:
    """Return the mean of some values (at least one) with Student's t for its confidence.

    >>> mean, margin = mean_of([1.0, 2.0, 3.0])
    >>> mean, round(margin, 3)
    (2.0, 2.484)
    """
    count = len(values)
    mean = sum(values) / count
    if count < 2:
        return Mean(mean, nan)
    if not isfinite(mean):
        return Mean(mean, nan)
    deviation = sqrt(sum([(each - mean) ** 2 for each in values]) / (count - 1))
    return Mean(mean, _student(count - 1) * deviation / sqrt(count))


def means_of(runs: Sequence[Measures]) -> dict[str, Mean]:
    """Return the mean of every figure of some runs (at least one).

    >>> from pointsman.simulate.outcome import Outcome
    >>> means_of([measure(Outcome(), ServiceLevel())])["requests"].mean
    0.0
    """
    return {
        field.name: mean_of([getattr(run, field.name) for run in runs])
        for field in fields(Measures)
    }


def timeline(outcome: Outcome, points: int) -> list[list[int]]:
    """Return, for each worker, how many requests it had at `points` moments (1 or more) from the start to the end.

    >>> from pointsman.simulate.run import Scenario, simulate
    >>> from pointsman.simulate.workload import Arrival, Listed
    >>> timeline(simulate(Scenario(workload=Listed([Arrival(0.0, (), 8000, 2)]), workers=1)), 2)
    [[1, 1]]
    """
    steps = [[0] * (points + 1) for _ in outcome.workers]
    scale = points / outcome.ended_at if outcome.ended_at else 0.0
    for at, lasted, worker in zip(outcome.at, outcome.e2e, outcome.worker, strict=True):
        if worker >= 0 and not isnan(lasted):
            steps[worker][min(int(at * scale), points)] += 1
            steps[worker][min(int((at + lasted) * scale) + 1, points)] -= 1
    lines = []
    for changes in steps:
        held, line = 0, []
        for change in changes[:points]:
            held += change
            line.append(held)
        lines.append(line)
    return lines


def _known(values: Iterable[float]) -> list[float]:
    return sorted([each for each in values if not isnan(each)])


_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""The 97.5% quantiles of Student's t for 1 to 10 degrees of freedom."""


def _student(freedom: int) -> float:
    """Return the 97.5% quantile: of a table, and by the expansion of Cornish and Fisher where that is exact enough."""
    if freedom <= len(_STUDENT):
        return _STUDENT[freedom - 1]
    z = 1.959964
    first = (z**3 + z) / (4 * freedom)
    return z + first + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
