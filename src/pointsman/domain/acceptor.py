"""A learned judge of answers: logistic regression over scores, trained on answers that are known to be right or wrong.

It is the place of FrugalGPT's scoring function, with features that an engine gives for nothing. The file is JSON that
people can read and check by hand. Training is for hundreds to some ten thousand samples; it is exact and draws nothing,
so the same samples give the same weights.

Sources: Chen, Zaharia, Zou, FrugalGPT, 2023, section 3; Hastie, Tibshirani, Friedman, The Elements of Statistical
Learning, 2nd edition, section 4.4.1 (Newton steps), 3.4.1 (ridge).
"""

import math
from collections.abc import Sequence

import msgspec

from pointsman.domain.scores import SCORES, Tokens, known
from pointsman.errors import BadRule

__all__ = ["FEATURES", "Acceptor", "acceptor_from_json", "acceptor_to_json", "train"]

FEATURES = ("mean_logprob", "min_logprob", "p10_logprob")
"""What is trained on if nothing else is said: what every engine can tell."""

FAR = 8.0
"""Scales from the mean beyond which a feature says no more: one wild score must not outvote the others."""

LARGEST = 1e100
"""The largest score that is learned from: squares and sums of such are still numbers."""

STEPS = 100
SMALLEST_STEP = 1e-10


class Acceptor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """P(the answer is right) = sigmoid(`bias` + sum of `weights` * (feature - `means`) / `scales`)."""

    features: tuple[str, ...]
    means: tuple[float, ...]
    scales: tuple[float, ...]
    weights: tuple[float, ...]
    bias: float

    @property
    def needs_margins(self) -> bool:
        """Whether one of the features does."""
        return any(SCORES[name].needs_margins for name in self.features)

    def probability(self, tokens: Tokens) -> float:
        """Return how probably the answer is right, 0 to 1. `tokens` are `known`, with margins if those are needed.

        >>> acceptor = Acceptor(("mean_logprob",), (-1.0,), (0.5,), (2.0,), bias=0.0)
        >>> acceptor.probability(Tokens([-1.0])), round(acceptor.probability(Tokens([-0.5])), 4)
        (0.5, 0.8808)
        """
        logit = self.bias
        for name, mean, scale, weight in zip(
            self.features, self.means, self.scales, self.weights, strict=True
        ):
            logit += weight * _standardised(SCORES[name].of(tokens), mean, scale)
        return _sigmoid(logit)


decode_acceptor = msgspec.json.Decoder(Acceptor).decode


def acceptor_from_json(data: bytes) -> Acceptor:
    """Read an acceptor's file.

    Raises `BadRule`, which says what is wrong.

    >>> acceptor_from_json(b'{"features":["min_logprob"],"means":[0],"scales":[1],"weights":[],"bias":0}')
    Traceback (most recent call last):
      ...
    pointsman.errors.BadRule: acceptor: `weights` has not as many numbers as there are features
    """
    try:
        acceptor = decode_acceptor(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRule(f"acceptor: {error}") from None
    if not acceptor.features:
        raise BadRule("acceptor: `features` is empty")
    if len(set(acceptor.features)) < len(acceptor.features):
        raise BadRule("acceptor: `features` names one twice")
    for name in acceptor.features:
        if name not in SCORES:
            raise BadRule(f"acceptor: {name[:64]!r} is not one of {', '.join(SCORES)}")
    for field in ("means", "scales", "weights"):
        values: tuple[float, ...] = getattr(acceptor, field)
        if len(values) != len(acceptor.features):
            raise BadRule(f"acceptor: `{field}` has not as many numbers as there are features")
    if min(acceptor.scales) <= 0:
        raise BadRule("acceptor: `scales` must be above 0")
    return acceptor


def acceptor_to_json(acceptor: Acceptor) -> bytes:
    """Write an acceptor's file; numbers keep every bit.

    >>> acceptor_to_json(Acceptor(("min_logprob",), (-2.0,), (1.0,), (0.5,), 0.25))
    b'{"features":["min_logprob"],"means":[-2.0],"scales":[1.0],"weights":[0.5],"bias":0.25}'
    """
    return msgspec.json.encode(acceptor)


def train(
    samples: Sequence[tuple[Tokens, bool]],
    features: Sequence[str] = FEATURES,
    ridge: float = 1.0,
) -> Acceptor:
    """Learn from answers and whether each was right.

    The weights minimise the log loss plus `ridge` / 2 times their sum of squares; the bias is free. Newton steps, each
    halved until it does not make things worse: the loss is convex, so what is found is the minimum. Means and scales
    are those of the middle 98 % of each feature.

    Raises `ValueError` where there is nothing to learn from: no answer that is right or none that is wrong, tokens that
    are not `known`, a score of 1e100 or more, an unknown feature or none, a ridge that is not above 0.

    >>> good, bad = Tokens([-0.1, -0.2]), Tokens([-1.5, -3.0])
    >>> acceptor = train([(good, True), (bad, False)])
    >>> acceptor.probability(good) > 0.6 > 0.4 > acceptor.probability(bad)
    True
    """
    if not features or not set(features) <= SCORES.keys() or len(set(features)) < len(features):
        raise ValueError(f"features are some of {', '.join(SCORES)}, each once")
    if not (ridge > 0 and math.isfinite(ridge)):
        raise ValueError("ridge must be above 0")
    if len({right for _, right in samples}) < 2:
        raise ValueError("training needs answers that are right and answers that are wrong")
    margins = any(SCORES[name].needs_margins for name in features)
    if not all(known(tokens, margins=margins) for tokens, _ in samples):
        raise ValueError("a sample has no tokens, or tokens of which something is unknown")
    rows = [[SCORES[name].of(tokens) for name in features] for tokens, _ in samples]
    if not all(abs(value) < LARGEST for row in rows for value in row):
        raise ValueError("a score is too large to learn from")
    columns = [_middle(column) for column in zip(*rows, strict=True)]
    means = tuple(math.fsum(column) / len(column) for column in columns)
    scales = tuple(_scale(column, mean) for column, mean in zip(columns, means, strict=True))
    # The constant column comes first: its weight is the bias.
    inputs = [[1.0, *map(_standardised, row, means, scales)] for row in rows]
    bias, *weights = _fit(inputs, [float(right) for _, right in samples], ridge)
    return Acceptor(tuple(features), means, scales, tuple(weights), bias)


def _middle(column: Sequence[float]) -> Sequence[float]:
    """Return the values without the outermost hundredth at either end: one wild score must not set the scale."""
    left_out = len(column) // 100
    return sorted(column)[left_out : len(column) - left_out]


def _scale(column: Sequence[float], mean: float) -> float:
    """Return the standard deviation; 1 for what never varies, as far as a float can tell."""
    deviation = math.hypot(*(value - mean for value in column)) / math.sqrt(len(column))
    return 1.0 if deviation <= 1e-12 * abs(mean) else deviation


def _standardised(value: float, mean: float, scale: float) -> float:
    return max(-FAR, min(FAR, (value - mean) / scale))


def _sigmoid(logit: float) -> float:
    if logit >= 0:
        return 1.0 / (1.0 + math.exp(-logit))
    odds = math.exp(logit)
    return odds / (1.0 + odds)


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return math.fsum(a * b for a, b in zip(left, right, strict=True))


def _fit(inputs: Sequence[Sequence[float]], right: Sequence[float], ridge: float) -> list[float]:
    weights = [0.0] * len(inputs[0])
    penalties = [0.0, *[ridge] * (len(weights) - 1)]
    loss = _loss(inputs, right, weights, penalties)
    size, steps = math.inf, 0
    while size > SMALLEST_STEP and steps < STEPS:
        step = _newton_step(inputs, right, weights, penalties)
        moved = _minus(weights, step)
        # A full step may jump over the minimum, where the loss is nearly flat; a halved one ends in no step at all.
        while (after := _loss(inputs, right, moved, penalties)) > loss:
            step = [change / 2 for change in step]
            moved = _minus(weights, step)
        size = max(map(abs, step))
        weights, loss = moved, after
        steps += 1
    return weights


def _minus(left: Sequence[float], right: Sequence[float]) -> list[float]:
    return [a - b for a, b in zip(left, right, strict=True)]


def _loss(
    inputs: Sequence[Sequence[float]],
    right: Sequence[float],
    weights: Sequence[float],
    penalties: Sequence[float],
) -> float:
    losses = []
    for row, label in zip(inputs, right, strict=True):
        logit = _dot(weights, row)
        # log(1 + exp(logit)) without overflow.
        losses.append(max(logit, 0.0) + math.log1p(math.exp(-abs(logit))) - label * logit)
    squares = (p * w * w for p, w in zip(penalties, weights, strict=True))
    return math.fsum(losses) + math.fsum(squares) / 2


def _newton_step(
    inputs: Sequence[Sequence[float]],
    right: Sequence[float],
    weights: Sequence[float],
    penalties: Sequence[float],
) -> list[float]:
    """Return the solution of Hessian * step = gradient."""
    size = len(weights)
    gradient = [p * w for p, w in zip(penalties, weights, strict=True)]
    hessian = [[penalties[i] if i == j else 0.0 for j in range(size)] for i in range(size)]
    for row, label in zip(inputs, right, strict=True):
        probability = _sigmoid(_dot(weights, row))
        curvature = probability * (1.0 - probability)
        for i, value in enumerate(row):
            gradient[i] += (probability - label) * value
            for j in range(i + 1):
                hessian[i][j] += curvature * value * row[j]
    return _solved(hessian, gradient)


def _solved(matrix: Sequence[Sequence[float]], vector: Sequence[float]) -> list[float]:
    """Solve a positive definite system, of which the lower triangle is read, by Cholesky's decomposition."""
    size = len(vector)
    lower = [[0.0] * size for _ in range(size)]
    for i in range(size):
        for j in range(i + 1):
            rest = matrix[i][j] - _dot(lower[i][:j], lower[j][:j])
            # What is left of a diagonal by rounding may not be a square.
            lower[i][j] = math.sqrt(max(rest, 1e-300)) if i == j else rest / lower[j][j]
    forward: list[float] = []
    for i in range(size):
        forward.append((vector[i] - _dot(lower[i][:i], forward)) / lower[i][i])
    solution = [0.0] * size
    for i in reversed(range(size)):
        below = math.fsum(lower[k][i] * solution[k] for k in range(i + 1, size))
        solution[i] = (forward[i] - below) / lower[i][i]
    return solution
