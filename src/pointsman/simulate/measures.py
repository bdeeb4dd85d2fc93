"""What a run is judged by: quantiles of what clients wait for, goodput at a service level, hit rate, and balance."""

import math
from collections.abc import Sequence
from statistics import fmean, stdev

from msgspec import Struct

from pointsman.simulate.outcome import Outcome

__all__ = ["Estimate", "Measures", "ServiceLevel", "estimate", "measure", "parse_level", "quantile"]

WARM = 0.1
"""The share of the requests, from the first on, that are not judged: they met empty caches and empty queues."""

# Student's t, two-sided 95%, for 1 to 30 degrees of freedom; beyond, the normal distribution's is near enough.
STUDENT = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
NORMAL = 1.96

UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


class ServiceLevel(Struct, frozen=True):
    """What a request must keep to, in seconds, infinity for anything."""

    ttft: float = math.inf
    tpot: float = math.inf
    e2e: float = math.inf


class Measures(Struct, frozen=True):
    """One run. Times are in seconds, rates per second.

    `good` is the share of all requests that kept to the service level (a refused one did not), `goodput` their number
    per second; `hit_rate` is cached over prompt tokens; `imbalance` the busiest engine's time over the mean;
    `migrations` how many requests needed more than one worker; `requests` how many were judged.
    """

    requests: int
    ttft_p50: float
    ttft_p95: float
    ttft_p99: float
    tpot_p50: float
    tpot_p95: float
    e2e_p50: float
    e2e_p95: float
    good: float
    goodput: float
    hit_rate: float
    imbalance: float
    migrations: int
    refused: int


class Estimate(Struct, frozen=True):
    """A mean over seeds, and half the width of its 95% confidence interval (0 for a single seed)."""

    mean: float
    half: float


def parse_level(text: str) -> ServiceLevel:
    """Read a service level such as `ttft=2s,tpot=50ms`. Raises ValueError, which names the part that is wrong.

    >>> parse_level("ttft=2s,tpot=50ms")
    ServiceLevel(ttft=2.0, tpot=0.05, e2e=inf)
    """
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in ServiceLevel.__struct_fields__:
            raise ValueError(f"{name!r} is none of {', '.join(ServiceLevel.__struct_fields__)}")
        number = value.rstrip("mus")
        unit = UNITS.get(value[len(number) :])
        try:
            seconds = float(number) * unit if unit else math.nan
        except ValueError:
            seconds = math.nan
        if not seconds > 0:
            raise ValueError(f"{part.strip()!r} is no time such as {name}=2s or {name}=50ms")
        found[name] = seconds
    return ServiceLevel(**found)


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the smallest of ascending values that `share` (0 to 1) of them do not exceed; 0 for no values.

    >>> quantile([1.0, 2.0, 3.0, 4.0], 0.5)
    2.0
    """
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)] if ordered else 0.0


def measure(outcome: Outcome, level: ServiceLevel) -> Measures:
    """Judge a run, but for the tenth of it that came first.

    Requests are judged by when they came, so that those that a slow policy still had at the end are not left out.
    """
    order = sorted(range(len(outcome)), key=outcome.at.__getitem__)[int(WARM * len(outcome)) :]
    ttft, tpot, e2e = (
        [values[each] for each in order] for values in (outcome.ttft, outcome.tpot, outcome.e2e)
    )
    good = sum(
        first <= level.ttft and between <= level.tpot and last <= level.e2e
        for first, between, last in zip(ttft, tpot, e2e, strict=True)
    )
    came = [outcome.at[each] for each in order]
    span = max(came[-1] - came[0], 1e-9) if came else 1.0
    prompt = sum(outcome.prompt[each] for each in order)
    busy = fmean(outcome.busy_s)
    ttft.sort()
    tpot.sort()
    e2e.sort()
    return Measures(
        requests=len(order),
        ttft_p50=quantile(ttft, 0.5),
        ttft_p95=quantile(ttft, 0.95),
        ttft_p99=quantile(ttft, 0.99),
        tpot_p50=quantile(tpot, 0.5),
        tpot_p95=quantile(tpot, 0.95),
        e2e_p50=quantile(e2e, 0.5),
        e2e_p95=quantile(e2e, 0.95),
        good=good / max(len(order) + outcome.refused, 1),
        goodput=good / span,
        hit_rate=sum(outcome.cached[each] for each in order) / prompt if prompt else 0.0,
        imbalance=max(outcome.busy_s) / busy if busy else 1.0,
        migrations=sum(outcome.attempts[each] > 1 for each in order),
        refused=outcome.refused,
    )


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of at least one value, with its confidence interval by Student's t.

    >>> estimate([1.0, 2.0, 3.0])
    Estimate(mean=2.0, half=2.4843377454084797)
    """
    count = len(values)
    if count == 1:
        return Estimate(values[0], 0.0)
    t = STUDENT[count - 2] if count - 2 < len(STUDENT) else NORMAL
    return Estimate(fmean(values), t * stdev(values) / math.sqrt(count))
