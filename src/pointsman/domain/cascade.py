"""When a small model's answer is good enough, and what that costs: accept rules and the cost curve.

A cascade asks a small model first and keeps its answer when a rule such as `mean_logprob > -1.2` holds for the answer's
token logprobs; otherwise the next model is asked. Running the steps is not done here.

All means are plain left-to-right sums. The built-in `sum` of floats is compensated since CPython 3.12, and a threshold
that was tuned elsewhere must decide the same way here, to the last bit.

Source: Chen, Zaharia, Zou, FrugalGPT, 2023.
"""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from pointsman.errors import BadRule

__all__ = [
    "Accept",
    "CascadeSample",
    "CurvePoint",
    "cascade_curve",
    "logprobs_of",
    "parse_accept_if",
]

_METRICS = ("mean_logprob", "min_logprob")
_OPERATORS = (">", ">=", "<", "<=")
_DECIMAL = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Accept:
    """A rule over the token logprobs of an answer: call it with the list.

    An answer without tokens is never accepted, nor is one with a token whose logprob is unknown (NaN).
    """

    metric: str
    operator: str
    threshold: float

    def __call__(self, logprobs: Sequence[float]) -> bool:
        """Tell whether an answer with these token logprobs is kept."""
        if not logprobs or any(math.isnan(logprob) for logprob in logprobs):
            return False
        value = min(logprobs) if self.metric == "min_logprob" else _mean(logprobs)
        match self.operator:
            case ">":
                return value > self.threshold
            case ">=":
                return value >= self.threshold
            case "<":
                return value < self.threshold
            case _:
                return value <= self.threshold


@dataclass(frozen=True, slots=True)
class CascadeSample:
    """One prompt of an evaluation set: the small model's token logprobs, and which model answered right."""

    small_logprobs: Sequence[float]
    small_correct: bool
    large_correct: bool


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """What a threshold `tau` gives: the escalated fraction, the cost per prompt in large calls, the accuracy."""

    tau: float
    escalated: float
    cost: float
    accuracy: float


def parse_accept_if(rule: str) -> Accept:
    """Parse `<metric> <op> <number>`: `mean_logprob` or `min_logprob`, `>` `>=` `<` `<=`, a plain decimal.

    No exponents, infinities or hexadecimal: a rule that is read by people has one obvious spelling.

    Raises `BadRule`.

    >>> parse_accept_if("mean_logprob > -1.2")([-1.0, -1.3])
    True
    """
    fields = rule.split()
    if len(fields) != 3:
        raise BadRule("accept_if is not '<metric> <op> <number>'")
    metric, operator, number = fields
    if metric not in _METRICS:
        raise BadRule(f"accept_if: {metric[:64]!r} is not one of {', '.join(_METRICS)}")
    if operator not in _OPERATORS:
        raise BadRule(f"accept_if: {operator[:64]!r} is not one of {' '.join(_OPERATORS)}")
    if not _DECIMAL.fullmatch(number) or math.isinf(threshold := float(number)):
        raise BadRule(f"accept_if: {number[:64]!r} is not a plain decimal number")
    return Accept(metric, operator, threshold)


def logprobs_of(body: bytes) -> list[float]:
    """Return the token logprobs of the first choice of a chat or plain completion.

    The form is chosen by what is there: `logprobs.content[].logprob` if `content` is not null, else
    `logprobs.token_logprobs`. A null logprob becomes NaN, which no rule accepts: reading it as 0.0, the probability 1,
    would count the least known token as the surest.

    Raises `ValueError` where the body carries no readable logprobs.

    >>> logprobs_of(b'{"choices": [{"logprobs": {"token_logprobs": [-0.5, null]}}]}')
    [-0.5, nan]
    """
    try:
        answer = json.loads(body)
        logprobs = answer["choices"][0]["logprobs"]
        content = logprobs.get("content")
        values = logprobs["token_logprobs"] if content is None else [t["logprob"] for t in content]
        return [_logprob(value) for value in values]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError("the answer carries no readable logprobs") from error


def cascade_curve(
    samples: Sequence[CascadeSample], taus: Sequence[float], small_cost: float
) -> list[CurvePoint]:
    """Sweep the threshold of a two-step cascade over an evaluation set.

    An answer is kept when its mean logprob is at least `tau`. Every prompt pays `small_cost`, in units of one large
    call, and an escalated one pays 1 more. Source: specification, section 2.6.

    Raises `ValueError` for an empty set.

    >>> sure, unsure = CascadeSample([-0.1], True, True), CascadeSample([-2.0], False, True)
    >>> cascade_curve([sure, unsure], [-1.0], small_cost=0.1)
    [CurvePoint(tau=-1.0, escalated=0.5, cost=0.6, accuracy=1.0)]
    """
    if not samples:
        raise ValueError("no samples")
    return [_point(samples, tau, small_cost) for tau in taus]


def _point(samples: Sequence[CascadeSample], tau: float, small_cost: float) -> CurvePoint:
    accept = Accept("mean_logprob", ">=", tau)
    escalated = correct = 0
    cost = 0.0
    for sample in samples:
        cost += small_cost
        if accept(sample.small_logprobs):
            correct += sample.small_correct
        else:
            escalated += 1
            cost += 1.0
            correct += sample.large_correct
    n = len(samples)
    return CurvePoint(tau, escalated / n, cost / n, correct / n)


def _mean(values: Sequence[float]) -> float:
    total = 0.0
    for value in values:
        total += value
    return total / len(values)


def _logprob(value: object) -> float:
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError("a logprob is not a number")
    return float(value)
