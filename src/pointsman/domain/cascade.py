"""When a small model's answer is good enough, and what that costs: accept rules and the cost curve.

A cascade asks a small model first and keeps its answer when a rule such as `mean_logprob > -1.2` holds for the answer's
token logprobs; otherwise the next model is asked. Running the steps is not done here. The scores that a rule can name
are in `pointsman.domain.scores`, and a curve for any measure of quality and cost is in `pointsman.domain.curve`.

Source: Chen, Zaharia, Zou, FrugalGPT, 2023.
"""

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from pointsman.domain.acceptor import Acceptor
from pointsman.domain.scores import SCORES, Tokens, known
from pointsman.errors import BadRule

__all__ = [
    "Accept",
    "CascadeSample",
    "CurvePoint",
    "Logprobs",
    "cascade_curve",
    "check_accept_if",
    "logprobs_of",
    "parse_accept_if",
    "tokens_of",
]

_LEARNED = "score"
_METRICS = (*SCORES, _LEARNED)
_OPERATORS = (">", ">=", "<", "<=")
_DECIMAL = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Accept:
    """A rule over what a model said of the tokens of its answer.

    `metric` is one of `SCORES`, or `score`: the probability that `acceptor` gives. An answer without tokens is never
    accepted, nor is one with a token of which something is unknown that the metric needs.
    """

    metric: str
    operator: str
    threshold: float
    acceptor: Acceptor | None = None

    @property
    def needs_margins(self) -> bool:
        """Whether the two best logprobs of every position must be there."""
        return (self.acceptor or SCORES[self.metric]).needs_margins

    def value(self, tokens: Tokens) -> float | None:
        """Return the metric of an answer; None where there are no tokens, or something is unknown."""
        if not known(tokens, margins=self.needs_margins):
            return None
        judge = self.acceptor
        value = SCORES[self.metric].of(tokens) if judge is None else judge.probability(tokens)
        # An infinite logprob on either side can leave no number.
        return None if math.isnan(value) else value

    def holds(self, value: float | None) -> bool:
        """Tell whether an answer of this value is kept."""
        if value is None:
            return False
        match self.operator:
            case ">":
                return value > self.threshold
            case ">=":
                return value >= self.threshold
            case "<":
                return value < self.threshold
            case _:
                return value <= self.threshold

    def __call__(self, logprobs: Sequence[float]) -> bool:
        """Tell whether an answer with these token logprobs is kept."""
        return self.holds(self.value(Tokens(logprobs)))


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


def parse_accept_if(rule: str, acceptor: Acceptor | None = None) -> Accept:
    """Parse `<metric> <op> <number>`: one of `SCORES` or `score`, `>` `>=` `<` `<=`, a plain decimal.

    `score` is what `acceptor` says; for other metrics there may be one, and it is not asked. No exponents, infinities
    or hexadecimal: a rule that is read by people has one obvious spelling.

    Raises `BadRule`.

    >>> parse_accept_if("mean_logprob > -1.2")([-1.0, -1.3])
    True
    """
    metric, operator, threshold = _parsed(rule)
    if metric != _LEARNED:
        return Accept(metric, operator, threshold)
    if acceptor is None:
        raise BadRule(f"accept_if: `{_LEARNED}` needs an acceptor")
    return Accept(metric, operator, threshold, acceptor)


def check_accept_if(rule: str, *, acceptor_named: bool) -> None:
    """Check a rule before its acceptor, of which it is only said whether one is named, has been read.

    Raises `BadRule`.

    >>> check_accept_if("score > 0.8", acceptor_named=True)
    """
    metric, _, _ = _parsed(rule)
    if metric == _LEARNED and not acceptor_named:
        raise BadRule(f"accept_if: `{_LEARNED}` needs an acceptor")


class _Entry(msgspec.Struct, gc=False):
    logprob: float | None


class _Token(msgspec.Struct, gc=False):
    logprob: float | None
    top_logprobs: list[_Entry] | None = None


class Logprobs(msgspec.Struct):
    """The `logprobs` of a choice: `content` in the form of chats, the other two in that of plain completions.

    The form is chosen by what is there, `content` first: llama.cpp's server answers plain completions in it, too.
    """

    content: list[_Token] | None = None
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float | None] | None] | None = None

    @property
    def silent(self) -> bool:
        """Whether neither form is there, as in events of a stream that bring no token."""
        return self.content is None and self.token_logprobs is None

    def tokens(self) -> Tokens:
        """Return what is said of the tokens; a null logprob is NaN, and so is a margin without two entries.

        The chosen token counts among the entries of its position, where it may be missing from the best; it is one of
        them if its logprob is there.

        Raises `ValueError` where neither form is there.
        """
        logprobs: list[float] = []
        margins: list[float] = []
        if self.content is not None:
            for token in self.content:
                logprob = math.nan if token.logprob is None else token.logprob
                logprobs.append(logprob)
                margins.append(_margin(logprob, [e.logprob for e in token.top_logprobs or ()]))
            return Tokens(logprobs, margins)
        if self.token_logprobs is None:
            raise ValueError(_UNREADABLE)
        logprobs = [math.nan if value is None else value for value in self.token_logprobs]
        # A list of another length says of no token which entries are its own.
        if self.top_logprobs is not None and len(self.top_logprobs) == len(logprobs):
            margins = [
                _margin(logprob, (entries or {}).values())
                for logprob, entries in zip(logprobs, self.top_logprobs, strict=True)
            ]
        return Tokens(logprobs, margins)


class _Choice(msgspec.Struct):
    logprobs: Logprobs | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]


_decode_answer = msgspec.json.Decoder(_Answer).decode
_UNREADABLE = "the answer carries no readable logprobs"


def tokens_of(body: bytes) -> Tokens:
    """Return what is said of the tokens of the first choice of a chat or plain completion.

    A null logprob becomes NaN, which no rule accepts: reading it as 0.0, the probability 1, would count the least known
    token as the surest. Margins are NaN for positions with fewer than two entries.

    Raises `ValueError` where the body carries no readable logprobs: an error, an answer that is a tool call alone.

    >>> tokens_of(b'{"choices": [{"logprobs": {"token_logprobs": [-0.5], "top_logprobs": [{"a": -0.5, "b": -2}]}}]}')
    Tokens(logprobs=[-0.5], margins=[1.5])
    """
    try:
        logprobs = _answer(body).choices[0].logprobs
    except (ValueError, IndexError, RecursionError) as error:
        raise ValueError(_UNREADABLE) from error
    if logprobs is None:
        raise ValueError(_UNREADABLE)
    return logprobs.tokens()


def logprobs_of(body: bytes) -> list[float]:
    """Return the token logprobs of the first choice of a chat or plain completion, as `tokens_of` does.

    Raises `ValueError` where the body carries no readable logprobs.

    >>> logprobs_of(b'{"choices": [{"logprobs": {"token_logprobs": [-0.5, null]}}]}')
    [-0.5, nan]
    """
    return list(tokens_of(body).logprobs)


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


def _parsed(rule: str) -> tuple[str, str, float]:
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
    return metric, operator, threshold


def _answer(body: bytes) -> _Answer:
    try:
        return _decode_answer(body)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        # Half of a surrogate pair in a token's text, or `-Infinity`: no JSON, and yet what some engines write.
        return msgspec.convert(json.loads(body), _Answer)


def _margin(chosen: float, entries: Iterable[float | None]) -> float:
    """Return how far the best entry lies above the second best, NaN where there are no two."""
    values = [value for value in entries if value is not None]
    if chosen not in values:
        values.append(chosen)
    if len(values) < 2 or math.isnan(chosen):
        return math.nan
    values.sort()
    return values[-1] - values[-2]
