"""From what was measured of a real engine to the numbers of its profile: least squares, and a few counts.

The model that is fitted is that of `pointsman.simulate.engine`, which is linear in what is looked for: a prompt that is
alone takes `start_s` + tokens / `prefill_tokens_per_s` + `prefill_context_s` x tokens^2 / 2, and a step of decoding
`decode_base_s` + `decode_per_sequence_s` x sequences + `decode_context_s` x tokens. Relative errors are what is made
small, since a millisecond matters in a step and not in a prompt; and no number is negative: of all sets of terms whose
coefficients are not, the one that fits best is taken.

Nothing here asks an engine (`pointsman.measure` does) or knows how noisy it was: give it medians.
"""

from collections.abc import Iterable, Sequence
from itertools import combinations, compress
from math import isfinite, log2, sqrt
from typing import NamedTuple

__all__ = [
    "DecodeSample",
    "Decoding",
    "Prefill",
    "PromptSample",
    "chunk_of",
    "fit_decoding",
    "fit_prompts",
    "most_at_once",
    "nonnegative_fit",
]

HIDDEN = 1.5
"""A prompt that takes less than this many times as long as the quickest one is hidden behind the base of a step."""

STEPS_MIN = 3
"""In fewer steps than these the size of a chunk cannot be seen: the last one is not full."""

BASE_MIN_S = 1e-6
"""The base of an engine that has none: each sequence costs it as much as the first."""


class PromptSample(NamedTuple):
    """A prompt of so many `tokens` that was alone at the engine: `seconds` until its first token, nothing cached."""

    tokens: int
    seconds: float


class DecodeSample(NamedTuple):
    """So many `sequences` that decoded together, with `context` tokens in all: `seconds` between two tokens of one."""

    sequences: int
    context: float
    seconds: float


class Prefill(NamedTuple):
    """How fast prompts are computed, in the terms of a profile; `error` is the root mean square of relative errors."""

    prefill_tokens_per_s: float
    prefill_context_s: float
    start_s: float
    error: float


class Decoding(NamedTuple):
    """How fast answers are, in the terms of a profile; `error` is the root mean square of relative errors."""

    decode_base_s: float
    decode_per_sequence_s: float
    decode_context_s: float
    error: float


def fit_prompts(samples: Iterable[PromptSample]) -> Prefill:
    """Fit the times of prompts, of at least 3 lengths that are not hidden behind the base of a step.

    Raises ValueError for fewer, for numbers that cannot be, and where time does not grow with length.

    >>> times = [PromptSample(n, 0.01 + n / 1000 + 1e-6 * n * n / 2) for n in (100, 200, 400, 800)]
    >>> [round(each, 6) for each in fit_prompts(times)]
    [1000.0, 1e-06, 0.01, 0.0]
    """
    measured = list(samples)
    for sample in measured:
        if not (sample.tokens > 0 and sample.seconds > 0 and isfinite(sample.seconds)):
            raise ValueError(f"no prompt of {sample.tokens} tokens takes {sample.seconds:g} s")
    quickest = min([sample.seconds for sample in measured], default=0.0)
    seen = [sample for sample in measured if sample.seconds >= HIDDEN * quickest]
    lengths = {sample.tokens for sample in seen}
    if len(lengths) < 3:
        raise ValueError(
            f"prompts of {len(lengths)} lengths take longer than the shortest one: 3 are needed, so ask longer ones"
        )
    rows = [(1.0, float(n), n * n / 2) for n, _ in seen]
    (start_s, token_s, context_s), error = nonnegative_fit(rows, [each.seconds for each in seen])
    if not token_s:
        raise ValueError("prompts do not take longer in proportion to their length: no speed fits")
    return Prefill(1 / token_s, context_s, start_s, error)


def fit_decoding(samples: Iterable[DecodeSample], *, alone: bool = False) -> Decoding:
    """Fit the times of steps, with at least 2 numbers of sequences, or one of an engine that never runs more (`alone`).

    Whether longer sequences cost more is looked at where some have at least twice as many tokens as others have.
    Raises ValueError for fewer, and for numbers that cannot be.

    >>> steps = [DecodeSample(k, k * 50, 0.006 + 0.0004 * k) for k in (1, 2, 4, 8)]
    >>> [round(each, 6) for each in fit_decoding(steps)]
    [0.006, 0.0004, 0.0, 0.0]
    """
    measured = list(samples)
    for sample in measured:
        if not (
            sample.sequences > 0
            and 0 <= sample.context < float("inf")
            and 0 < sample.seconds < float("inf")
        ):
            raise ValueError(
                f"no step of {sample.sequences} sequences with {sample.context:g} tokens takes {sample.seconds:g} s"
            )
    if not measured or (len({each.sequences for each in measured}) < 2 and not alone):
        raise ValueError("steps of at least 2 numbers of sequences are needed")
    means = [sample.context / sample.sequences for sample in measured]
    looked_at = (True, not alone, max(means) >= 2 * min(means))
    rows = [
        tuple(compress((1.0, float(sequences), context), looked_at))
        for sequences, context, _ in measured
    ]
    found, error = nonnegative_fit(rows, [each.seconds for each in measured])
    terms = iter(found)
    base_s, per_sequence_s, context_s = (next(terms) if each else 0.0 for each in looked_at)
    return Decoding(max(base_s, BASE_MIN_S), per_sequence_s, context_s, error)


def nonnegative_fit(
    rows: Sequence[Sequence[float]], values: Sequence[float]
) -> tuple[list[float], float]:
    """Return the coefficients, none negative, that make relative errors smallest, and their root mean square.

    `values` are above 0, as many as `rows`. Of columns that say the same only one is used. Raises ValueError where
    nothing fits.

    >>> nonnegative_fit([(1, 1), (1, 2), (1, 3)], [3, 5, 7])[0]
    [1.0, 2.0]
    """
    width = len(rows[0]) if rows else 0
    scaled = [[each / value for each in row] for row, value in zip(rows, values, strict=True)]
    best: list[float] | None = None
    least = float("inf")
    # There are three columns at most, so all sets of them can be tried; the large ones first, and the first best wins.
    for count in range(width, 0, -1):
        for chosen in combinations(range(width), count):
            solved = _solved([[row[column] for column in chosen] for row in scaled])
            if solved is None or min(solved) < 0:
                continue
            found = [0.0] * width
            for column, coefficient in zip(chosen, solved, strict=True):
                found[column] = coefficient
            error = sum(
                (sum(map(float.__mul__, map(float, row), found)) - 1) ** 2 for row in scaled
            )
            if error < least - 1e-15:
                best, least = found, error
    if best is None:
        raise ValueError("nothing fits what was measured")
    return [round(each, 15) for each in best], sqrt(least / len(rows))


def _solved(rows: list[list[float]]) -> list[float] | None:
    """Return the least squares for the value 1 in each row, None where columns depend on each other."""
    size = len(rows[0])
    # Columns of very different size would look as if they depended on each other.
    sizes = [sqrt(sum(row[i] ** 2 for row in rows)) for i in range(size)]
    if not all(sizes):
        return None
    rows = [[each / sizes[i] for i, each in enumerate(row)] for row in rows]
    matrix = [
        [*(sum(row[i] * row[j] for row in rows) for j in range(size)), sum(row[i] for row in rows)]
        for i in range(size)
    ]
    for i in range(size):
        pivot = max(range(i, size), key=lambda line: abs(matrix[line][i]))
        if abs(matrix[pivot][i]) < 1e-9:
            return None
        matrix[i], matrix[pivot] = matrix[pivot], matrix[i]
        for line in range(size):
            if line != i:
                factor = matrix[line][i] / matrix[i][i]
                matrix[line] = [
                    a - factor * b for a, b in zip(matrix[line], matrix[i], strict=True)
                ]
    return [matrix[i][size] / matrix[i][i] / sizes[i] for i in range(size)]


def chunk_of(prompt_tokens: int, steps: int) -> int | None:
    """Return the size of a chunk, a power of two, of a prompt that took so many steps; None where they are too few.

    >>> chunk_of(600, 19), chunk_of(600, 2)
    (32, None)
    """
    if steps < STEPS_MIN or prompt_tokens < steps:
        return None
    return 1 << round(log2(prompt_tokens / steps))


def most_at_once(spans: Iterable[tuple[float, float]]) -> int:
    """Return how many of some spans of time, each with its beginning and its end, there were at once at most.

    >>> most_at_once([(0, 2), (1, 3), (2, 4)])
    2
    """
    # What ends makes room for what begins at the same moment.
    changes = sorted(change for begin, end in spans for change in ((begin, 1), (end, -1)))
    most = now = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most
