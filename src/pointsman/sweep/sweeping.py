"""From two models' answers to a threshold: judged, scored, swept, and the choice with how certain it is.

All of it is arithmetic over answers that are there; random draws come from a seed. A threshold is chosen and measured
on the same prompts, which flatters it a little: the intervals are of the same data, and only other prompts can tell.
"""

import math
from collections.abc import Callable, Sequence
from decimal import Decimal
from enum import StrEnum
from functools import partial
from random import Random
from typing import NamedTuple

import msgspec

from pointsman.domain.acceptor import FEATURES, Acceptor, train
from pointsman.domain.cascade import Accept
from pointsman.domain.curve import (
    Keep,
    Point,
    Sample,
    apgr,
    best_for,
    cheapest_for,
    curve,
    interval,
    knee,
)
from pointsman.domain.judging import agreement, equals, mentions
from pointsman.domain.scores import SCORES, known
from pointsman.sweep.asking import Answer, SweepError
from pointsman.sweep.reading import Prompt

__all__ = [
    "LEARNED",
    "Choice",
    "Costs",
    "Judge",
    "Judged",
    "Learned",
    "Match",
    "Sweep",
    "auc",
    "learn",
    "metric_of",
    "rule",
    "sweep",
]

LEARNED = "score"
"""The metric that an acceptor computes."""
AGREES = 0.8
"""The agreement from which on an acceptor learns that an answer was right, where nobody knows the answers."""
TEST_SHARE = 0.3
"""Of the prompts, what an acceptor does not learn from."""

Interval = tuple[float, float] | None


class Match(StrEnum):
    """When a text is right: it says an expected answer somewhere, or nothing else."""

    MENTIONS = "mentions"
    EQUALS = "equals"


class Costs(msgspec.Struct, frozen=True):
    """What an answer costs: `flat` per request, else `price` per million completion tokens, else its seconds."""

    flat: float | None = None
    price: float | None = None

    def of(self, answer: Answer) -> float:
        """Return the cost of one answer.

        >>> answer = Answer("yes", (), (), prompt_tokens=9, completion_tokens=2, seconds=0.5)
        >>> Costs(flat=3.0).of(answer), Costs(price=50.0).of(answer), Costs().of(answer)
        (3.0, 0.0001, 0.5)
        """
        if self.flat is not None:
            return self.flat
        if self.price is not None:
            return self.price * answer.completion_tokens / 1e6
        return answer.seconds


class Judged(NamedTuple):
    """What both models answered to a prompt, and how good that is, 0.0 to 1.0."""

    prompt: Prompt
    small: Answer
    large: Answer
    small_quality: float
    large_quality: float


class Judge(msgspec.Struct, frozen=True):
    """How answers are judged: against what is expected or, `by_agreement`, the small one against the large one."""

    match: Match
    by_agreement: bool

    def of(self, prompt: Prompt, small: Answer, large: Answer) -> Judged:
        """Judge the two answers to a prompt."""
        if self.by_agreement:
            return Judged(prompt, small, large, agreement(small.text, large.text), 1.0)
        right = equals if self.match is Match.EQUALS else mentions
        marks = (float(right(each.text, prompt.answers)) for each in (small, large))
        return Judged(prompt, small, large, *marks)


class Choice(msgspec.Struct, frozen=True):
    """A point that was asked for, and 95 % intervals: of its threshold, and of cost and quality at that threshold."""

    wish: str
    point: Point
    tau: Interval
    cost: Interval
    quality: Interval


class Sweep(msgspec.Struct, frozen=True):
    """The curve and what was read off it. `missed` are the wishes that no threshold fulfils."""

    metric: str
    keep: Keep
    samples: Sequence[Sample]
    points: Sequence[Point]
    apgr: float | None
    apgr_interval: Interval
    auc: float | None
    choices: Sequence[Choice]
    missed: Sequence[str]

    @property
    def unscored(self) -> int:
        """How many small answers have no score, and so are never kept."""
        return sum(sample.value is None for sample in self.samples)


class Learned(msgspec.Struct, frozen=True):
    """An acceptor, and how it does on `tested` answers that it did not learn from.

    `accuracy` is how often it is right about them at 0.5, `majority` how often the same verdict for all would be; `auc`
    is its own, `auc_of_metric` that of the single score it should beat.
    """

    acceptor: Acceptor
    trained: int
    tested: int
    accuracy: float
    majority: float
    auc: float | None
    auc_of_metric: float | None


def metric_of(name: str, acceptor: Acceptor | None = None) -> Accept:
    """Return the metric of that name as a rule whose threshold does not matter yet.

    Raises:
        SweepError: there is no such score, or `score` has no acceptor.
    """
    if name == LEARNED:
        if acceptor is None:
            raise SweepError("the score 'score' needs --acceptor, a file that --train wrote")
        return Accept(LEARNED, ">=", 0.0, acceptor)
    if name not in SCORES:
        raise SweepError(f"{name!r} is no score; there are {', '.join((*SCORES, LEARNED))}")
    return Accept(name, "<=" if name == "perplexity" else ">=", 0.0)


def sweep(
    judged: Sequence[Judged],
    metric: Accept,
    *,
    small: Costs,
    large: Costs,
    target_cost: float | None = None,
    target_quality: float | None = None,
    seed: int = 0,
    resamples: int = 1000,
) -> Sweep:
    """Return the curve over all thresholds of a metric, its knee, and the thresholds for the targets that are given.

    Raises:
        SweepError: there are no answers.
    """
    if not judged:
        raise SweepError("no prompt was answered by both models")
    keep: Keep = "<=" if metric.operator == "<=" else ">="
    samples = [
        Sample(
            _finite(metric.value(each.small.tokens())),
            each.small_quality,
            each.large_quality,
            small.of(each.small),
            large.of(each.large),
        )
        for each in judged
    ]
    points = curve(samples, keep=keep)
    wishes: dict[str, Callable[[Sequence[Point]], Point | None]] = {"knee": knee}
    if target_cost is not None:
        wishes[f"cost of at most {target_cost:g}"] = partial(best_for, cost=target_cost)
    if target_quality is not None:
        wishes[f"quality of at least {target_quality:g}"] = partial(
            cheapest_for, quality=target_quality
        )
    found = {wish: choose(points) for wish, choose in wishes.items()}
    choices = [
        _choice(wish, point, wishes[wish], samples, keep, seed, resamples)
        for wish, point in found.items()
        if point is not None
    ]
    return Sweep(
        metric=metric.metric,
        keep=keep,
        samples=samples,
        points=points,
        apgr=apgr(samples, keep=keep),
        apgr_interval=interval(
            samples, partial(apgr, keep=keep), Random(seed), resamples=resamples
        ),
        auc=_auc_of(samples, keep),
        choices=choices,
        missed=[wish for wish, point in found.items() if point is None],
    )


def rule(metric: str, keep: Keep, tau: float) -> str:
    """Return an `accept_if` with exactly this threshold, spelled as rules are: without an exponent.

    >>> rule("mean_logprob", ">=", -1e-05)
    'mean_logprob >= -0.00001'
    """
    return f"{metric} {keep} {Decimal(repr(tau)):f}"


def learn(
    judged: Sequence[Judged],
    metric: Accept,
    *,
    features: Sequence[str] = FEATURES,
    seed: int = 0,
) -> Learned:
    """Train an acceptor on some of the answers, drawn by `seed`, and test it on the rest.

    Answers of which a feature is unknown are left out: no rule accepts them.

    Raises:
        SweepError: there is too little to learn from.
    """
    unknown = set(features) - SCORES.keys()
    if unknown:
        raise SweepError(f"{min(unknown)!r} is no feature; there are {', '.join(SCORES)}")
    margins = any(SCORES[name].needs_margins for name in features)
    usable = [
        (each.small.tokens(), each.small_quality >= AGREES)
        for each in judged
        if known(each.small.tokens(), margins=margins)
    ]
    Random(seed).shuffle(usable)
    tested = math.ceil(len(usable) * TEST_SHARE)
    test, rest = usable[:tested], usable[tested:]
    try:
        acceptor = train(rest, features)
    except ValueError as error:
        raise SweepError(f"cannot train an acceptor on {len(rest)} answers: {error}") from None
    truths = [right for _, right in test]
    marks = [acceptor.probability(tokens) for tokens, _ in test]
    sign = -1.0 if metric.operator == "<=" else 1.0
    values = [metric.value(tokens) for tokens, _ in test]
    return Learned(
        acceptor=acceptor,
        trained=len(rest),
        tested=tested,
        accuracy=sum((m >= 0.5) == right for m, right in zip(marks, truths, strict=True)) / tested,
        majority=max(sum(truths), tested - sum(truths)) / tested,
        auc=auc(marks, truths),
        auc_of_metric=auc([-math.inf if v is None else sign * v for v in values], truths),
    )


def auc(values: Sequence[float], truths: Sequence[bool]) -> float | None:
    """Return how often the true one of a true and a false one has the higher value; a tie counts half.

    None where there are not both.

    >>> auc([0.9, 0.4, 0.4], [True, True, False]), auc([1.0], [True])
    (0.75, None)
    """
    ordered = sorted(zip(values, truths, strict=True), key=lambda pair: pair[0])
    positives = sum(truths)
    negatives = len(truths) - positives
    if not positives or not negatives:
        return None
    won = below = at = 0
    while at < len(ordered):
        value, hits, misses = ordered[at][0], 0, 0
        while at < len(ordered) and ordered[at][0] == value:
            hits += ordered[at][1]
            misses += not ordered[at][1]
            at += 1
        won += hits * (2 * below + misses)
        below += misses
    return won / (2 * positives * negatives)


def _choice(
    wish: str,
    point: Point,
    choose: Callable[[Sequence[Point]], Point | None],
    samples: Sequence[Sample],
    keep: Keep,
    seed: int,
    resamples: int,
) -> Choice:
    def tau(drawn: Sequence[Sample]) -> float | None:
        chosen = choose(curve(drawn, keep=keep))
        return None if chosen is None else chosen.tau

    def there(drawn: Sequence[Sample]) -> Point:
        return curve(drawn, [point.tau], keep=keep)[0]

    def of(statistic: Callable[[Sequence[Sample]], float | None]) -> Interval:
        return interval(samples, statistic, Random(seed), resamples=resamples)

    return Choice(
        wish,
        point,
        tau=of(tau),
        cost=of(lambda drawn: there(drawn).cost),
        quality=of(lambda drawn: there(drawn).quality),
    )


def _auc_of(samples: Sequence[Sample], keep: Keep) -> float | None:
    sign = -1.0 if keep == "<=" else 1.0
    scored = [(sign * s.value, s.small_quality >= AGREES) for s in samples if s.value is not None]
    return auc([value for value, _ in scored], [right for _, right in scored])


def _finite(value: float | None) -> float | None:
    """Return a value that a threshold can be: one that is infinite is as good as none."""
    return value if value is not None and math.isfinite(value) else None
