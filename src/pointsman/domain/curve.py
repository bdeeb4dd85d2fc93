"""What a threshold costs and what it gives: the curve of a two-step cascade over answers that both models gave.

Quality is anything from 0 to 1 (right or wrong, agreement, a judge's mark) and cost is anything that adds up (calls,
tokens, seconds, money). The curve of the specification, fixed to the last bit, is that of `pointsman.domain.cascade`;
this one is for choosing a threshold: its knee, the cheapest point for a target, and how certain all that is.

Sources: Satopaa, Albrecht, Irwin, Raghavan, Finding a "Kneedle" in a Haystack, 2011 (knee); Ong et al., RouteLLM, 2024
(performance gap recovered, its average, call-performance threshold); Efron, Tibshirani, An Introduction to the
Bootstrap, 1993, chapter 13 (percentile interval).
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Literal, TypeAlias, TypeVar

from msgspec import Struct

from pointsman.domain.policy import RandomSource

__all__ = [
    "Keep",
    "Point",
    "Sample",
    "apgr",
    "best_for",
    "cheapest_for",
    "cpt",
    "curve",
    "interval",
    "knee",
]

Keep: TypeAlias = Literal[">=", "<="]
"""When an answer is kept: its value is at least, or at most, the threshold."""

Drawn = TypeVar("Drawn")


class Sample(Struct, frozen=True):
    """One prompt that both models answered.

    `value` is the small answer's score, None where it has none: such an answer is never kept. Qualities are 0 to 1,
    costs 0 or more in one unit.
    """

    value: float | None
    small_quality: float
    large_quality: float
    small_cost: float
    large_cost: float


class Point(Struct, frozen=True):
    """What a threshold gives: the escalated fraction, and the mean cost and quality of a prompt."""

    tau: float
    escalated: float
    cost: float
    quality: float


def curve(
    samples: Sequence[Sample], taus: Sequence[float] | None = None, *, keep: Keep = ">="
) -> list[Point]:
    """Return a point for each threshold, in the order of `taus`.

    Without `taus`: one for every distinct value, from the threshold that keeps the most answers to the one that keeps
    the fewest, and one at a distance of 1 beyond, which keeps none. Every prompt pays the small answer, and an
    escalated one the large answer on top. O((n + thresholds) log n).

    Raises `ValueError` for no samples.

    >>> sure, unsure = Sample(-0.1, 1, 1, small_cost=1, large_cost=8), Sample(-2.0, 0, 1, small_cost=1, large_cost=8)
    >>> for point in curve([sure, unsure]): print(point)
    Point(tau=-2.0, escalated=0.0, cost=1.0, quality=0.5)
    Point(tau=-0.1, escalated=0.5, cost=5.0, quality=1.0)
    Point(tau=0.9, escalated=1.0, cost=9.0, quality=1.0)
    """
    if not samples:
        raise ValueError("no samples")
    sign = 1.0 if keep == ">=" else -1.0
    never = [sample for sample in samples if sample.value is None]
    scored = sorted(
        ((sign * sample.value, sample) for sample in samples if sample.value is not None),
        key=lambda pair: pair[0],
    )
    values = [value for value, _ in scored]
    # The order in which a rising threshold escalates; sums over its beginning, and over what is left.
    ordered = [*never, *(sample for _, sample in scored)]
    large_quality = list(accumulate((s.large_quality for s in ordered), initial=0.0))
    large_cost = list(accumulate((s.large_cost for s in ordered), initial=0.0))
    small_quality = list(accumulate((s.small_quality for s in reversed(ordered)), initial=0.0))
    small_cost = math.fsum(s.small_cost for s in ordered)
    if taus is None:
        distinct = list(dict.fromkeys(values))
        taus = [sign * value for value in distinct]
        taus.append(sign * (distinct[-1] + 1.0) if distinct else 0.0)
    n = len(ordered)
    points = []
    for tau in taus:
        escalated = len(never) + bisect_left(values, sign * tau)
        quality = large_quality[escalated] + small_quality[n - escalated]
        cost = small_cost + large_cost[escalated]
        points.append(Point(tau, escalated / n, cost / n, quality / n))
    return points


def knee(points: Sequence[Point]) -> Point | None:
    """Return the point where more cost begins to buy less quality, None where no point stands out.

    Both axes are scaled so that the cheapest point is at 0 and the dearest at 1; the knee is the point farthest above
    the chord between the two, the cheapest of several. Unlike Kneedle this fits no spline and takes the one largest
    difference: all points of the curve are known. None where no point lies above the chord, or there is no chord that
    rises.

    >>> knee([Point(0, 0, 0, 0.0), Point(1, 0.2, 2, 0.5), Point(2, 0.6, 6, 0.8), Point(3, 1, 10, 1.0)]).tau
    1
    """
    if not points:
        return None
    ordered = sorted(points, key=lambda point: (point.cost, -point.quality))
    first, last = ordered[0], max(points, key=lambda point: (point.cost, point.quality))
    width, height = last.cost - first.cost, last.quality - first.quality
    if width <= 0 or height <= 0:
        return None

    def above(point: Point) -> float:
        return (point.quality - first.quality) / height - (point.cost - first.cost) / width

    best = max(ordered, key=above)
    # Rounding puts points of a straight line a little off it.
    return best if above(best) > 1e-9 else None


def cheapest_for(points: Sequence[Point], quality: float) -> Point | None:
    """Return the cheapest point of at least that quality, the better of two at the same cost; None where there is none.

    >>> cheapest_for([Point(0, 0, 1, 0.5), Point(1, 0.5, 5, 0.8), Point(2, 1, 9, 0.9)], 0.75).tau
    1
    """
    enough = [point for point in points if point.quality >= quality]
    return min(enough, key=lambda point: (point.cost, -point.quality), default=None)


def best_for(points: Sequence[Point], cost: float) -> Point | None:
    """Return the best point of at most that cost, the cheaper of two as good; None where there is none.

    >>> best_for([Point(0, 0, 1, 0.5), Point(1, 0.5, 5, 0.8), Point(2, 1, 9, 0.9)], 6).tau
    1
    """
    affordable = [point for point in points if point.cost <= cost]
    return min(affordable, key=lambda point: (-point.quality, point.cost), default=None)


def apgr(samples: Sequence[Sample], *, keep: Keep = ">=") -> float | None:
    """Return the average performance gap recovered, None where the large model is not better.

    The gap recovered by a threshold is (its quality - the small model's) / (the large model's - the small model's). It
    is averaged over the escalated fraction from 0 to 1: the exact integral of the straight lines between all
    thresholds, from (0, 0) to (1, 1); between two neighbouring thresholds a coin reaches every point of the line.
    RouteLLM takes the mean at ten fractions instead, which approximates this. Escalating at random gives 0.5.

    Raises `ValueError` for no samples.

    >>> right = Sample(0.9, 1, 1, 1, 8)
    >>> wrong = Sample(0.1, 0, 1, 1, 8)
    >>> apgr([right, wrong])
    0.75
    """
    recovered = _recovered(samples, keep)
    if recovered is None:
        return None
    return math.fsum(
        (right - left) * (low + high) / 2 for (left, low), (right, high) in pairwise(recovered)
    )


def cpt(samples: Sequence[Sample], gap: float, *, keep: Keep = ">=") -> float | None:
    """Return the call-performance threshold: the least escalated fraction that recovers `gap`, 0 to 1, of the gap.

    It is read off the same lines as `apgr`. None where the large model is not better.

    Raises `ValueError` for no samples, and for a gap that is not in 0 to 1.

    >>> cpt([Sample(0.9, 1, 1, 1, 8), Sample(0.1, 0, 1, 1, 8)], 0.5)
    0.25
    """
    if not 0 <= gap <= 1:
        raise ValueError("a gap is 0 to 1")
    recovered = _recovered(samples, keep)
    if recovered is None:
        return None
    # The lines begin at 0 and end at 1, so one of them reaches any gap.
    (left, low), (right, high) = next(line for line in pairwise(recovered) if line[1][1] >= gap)
    return left if gap <= low else left + (right - left) * (gap - low) / (high - low)


def _recovered(samples: Sequence[Sample], keep: Keep) -> list[tuple[float, float]] | None:
    """Return (escalated fraction, gap recovered) of all thresholds, from (0, 0) to (1, 1)."""
    points = curve(samples, keep=keep)
    small = math.fsum(sample.small_quality for sample in samples) / len(samples)
    large = math.fsum(sample.large_quality for sample in samples) / len(samples)
    if large <= small:
        return None
    inner = [(p.escalated, (p.quality - small) / (large - small)) for p in points]
    return [(0.0, 0.0), *(at for at in inner if 0 < at[0] < 1), (1.0, 1.0)]


def interval(
    samples: Sequence[Drawn],
    statistic: Callable[[Sequence[Drawn]], float | None],
    random: RandomSource,
    *,
    resamples: int = 1000,
    level: float = 0.95,
) -> tuple[float, float] | None:
    """Return a percentile bootstrap confidence interval of a statistic of the samples.

    The statistic is taken of `resamples` sets of as many samples, drawn with replacement; the interval leaves out
    (1 - `level`) / 2 of the results at either end. Sets for which it is None do not count; where it is None for more
    than half of them, there is no interval, and None is returned.

    Raises `ValueError` for no samples, no resamples, or a level that is not between 0 and 1.

    >>> from random import Random
    >>> interval([0.0, 1.0] * 50, lambda drawn: sum(drawn) / len(drawn), Random(7))
    (0.4, 0.59)
    """
    if not samples or resamples < 1 or not 0 < level < 1:
        raise ValueError("an interval needs samples, resamples, and a level between 0 and 1")
    n = len(samples)
    results = []
    for _ in range(resamples):
        result = statistic([samples[int(random.random() * n)] for _ in range(n)])
        if result is not None:
            results.append(result)
    if 2 * len(results) < resamples:
        return None
    results.sort()
    # A level such as 0.9 is a little more or less than it says.
    left_out = int(len(results) * (1 - level) / 2 + 1e-9)
    return results[left_out], results[-1 - left_out]
