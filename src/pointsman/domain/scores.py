"""How sure a model was of its answer: scores over what it says of its own tokens.

Each score is one number for an answer, and a rule of a cascade compares it with a threshold. What stands here knows
neither rules nor JSON; what a learned acceptor makes of several scores is in `pointsman.domain.acceptor`.

All means are plain left-to-right sums. The built-in `sum` of floats is compensated since CPython 3.12, and a threshold
that was tuned elsewhere must decide the same way here, to the last bit.
"""

import math
from collections.abc import Callable, Sequence

from msgspec import Struct

__all__ = ["SCORES", "Score", "Tokens", "known"]


class Tokens(Struct, frozen=True):
    """What a model said of the tokens of an answer, in their order.

    `logprobs`: natural logarithm of each chosen token's probability. `margins`: how far the best token of the position
    lay above the second best, in the same unit; empty where nobody asked for it. NaN is what is not known.
    """

    logprobs: Sequence[float]
    margins: Sequence[float] = ()


class Score(Struct, frozen=True):
    """One number for an answer. `of` takes tokens that are `known`, with margins where the score `needs_margins`."""

    name: str
    needs_margins: bool
    of: Callable[[Tokens], float]


def known(tokens: Tokens, *, margins: bool) -> bool:
    """Tell whether there are tokens, each with its logprob and, if asked for, its margin.

    >>> known(Tokens([-0.5]), margins=False), known(Tokens([-0.5]), margins=True), known(Tokens([]), margins=False)
    (True, False, False)
    """
    logprobs = tokens.logprobs
    if not logprobs or any(map(math.isnan, logprobs)):
        return False
    if not margins:
        return True
    return len(tokens.margins) == len(logprobs) and not any(map(math.isnan, tokens.margins))


def _mean(values: Sequence[float]) -> float:
    total = 0.0
    for value in values:
        total += value
    return total / len(values)


def _perplexity(tokens: Tokens) -> float:
    try:
        return math.exp(-_mean(tokens.logprobs))
    except OverflowError:
        return math.inf


def _tenth_percentile(tokens: Tokens) -> float:
    rank = -(-len(tokens.logprobs) // 10)
    return sorted(tokens.logprobs)[rank - 1]


SCORES: dict[str, Score] = {
    score.name: score
    for score in (
        Score("mean_logprob", False, lambda tokens: _mean(tokens.logprobs)),
        Score("min_logprob", False, lambda tokens: min(tokens.logprobs)),
        Score("perplexity", False, _perplexity),
        Score("mean_margin", True, lambda tokens: _mean(tokens.margins)),
        Score("p10_logprob", False, _tenth_percentile),
    )
}
"""The scores that a rule can name.

- `mean_logprob`: the mean of the logprobs.
- `min_logprob`: the least sure token.
- `perplexity`: exp(-`mean_logprob`), 1 at best; infinite where that is too large for a float.
- `mean_margin`: the mean of the margins.
- `p10_logprob`: the 10th percentile of the logprobs by nearest rank, the ceil(n/10)-th smallest: like `min_logprob`,
  but one odd token of a long answer does not decide.
"""
