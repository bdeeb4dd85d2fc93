"""From logits to a token: penalties, temperature, top-k, top-p, min-p, one uniform draw. Pure, in float64.

The order of the steps, and that every sum runs in ascending token id, are part of the contract: equal logits,
parameters and seed give the same token, so a request may prefill here and decode elsewhere.
Greedy decoding draws nothing; every sampled token costs exactly one uniform, which is how a decode worker knows
where to go on (`Sampler.skip`).

The generator is PCG-XSH-RR 64/32 (O'Neill 2014), its seed mixed per purpose by SplitMix64's finalizer.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pointsman.domain.ring import mix64

__all__ = ["SAMPLE", "Pcg32", "Sampled", "Sampler", "SamplingParams", "child_seed", "stream"]

Floats = NDArray[np.float64]

SAMPLE = 4
"""The purpose number of token sampling."""

_MASK = (1 << 64) - 1
_MULTIPLIER = 6364136223846793005
_GOLDEN = 0x9E3779B97F4A7C15


class Pcg32:
    """The generator PCG-XSH-RR 64/32; `seq` selects one of 2**63 streams.

    >>> [f"{Pcg32(42).next():08x}"]
    ['a15c02b7']
    """

    __slots__ = ("_increment", "_state")

    def __init__(self, seed: int, seq: int = 54) -> None:
        self._increment = (seq << 1 | 1) & _MASK
        self._state = 0
        self.next()
        self._state = (self._state + seed) & _MASK
        self.next()

    def next(self) -> int:
        """The next 32 bits."""
        old = self._state
        self._state = (old * _MULTIPLIER + self._increment) & _MASK
        word = ((old >> 18 ^ old) >> 27) & 0xFFFFFFFF
        turn = old >> 59
        return (word >> turn | word << (32 - turn)) & 0xFFFFFFFF

    def uniform(self) -> float:
        """A float in [0, 1) of 53 random bits, out of two words."""
        high, low = self.next() >> 5, self.next() >> 6
        return (high * 67108864 + low) / 9007199254740992


def child_seed(seed: int, purpose: int) -> int:
    """The seed of the sub-stream of one purpose; `seed` is taken modulo 2**64.

    >>> hex(child_seed(0, SAMPLE))
    '0xf88bb8a8724c81ec'
    """
    return mix64((seed + purpose * _GOLDEN) & _MASK)


def stream(seed: int, purpose: int) -> Pcg32:
    """The generator of one purpose.

    >>> stream(0, SAMPLE).uniform()
    0.8020949661137535
    """
    return Pcg32(child_seed(seed, purpose), purpose)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens. Ranges: temperature 0..2 (0 is greedy), top_p (0, 1], top_k >= 0 (0: all), min_p 0..1,
    repetition_penalty > 0, presence and frequency -2..2, seed any integer (modulo 2**64), top_logprobs 0..20."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    top_logprobs: int = 0


class Sampled(NamedTuple):
    """A chosen token, its log-probability (after the penalties, before the temperature), and the best alternatives."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Sampler:
    """The sampling state of one request: its generator, and the tokens it has seen.

    `prompt` counts for the repetition penalty only. Feed every token of the output through `pick`, in order.
    """

    __slots__ = ("_generated", "_params", "_random", "_seen")

    def __init__(self, params: SamplingParams, prompt: Sequence[int] = ()) -> None:
        self._params = params
        self._random = stream(params.seed, SAMPLE)
        self._seen = set(prompt)
        self._generated: Counter[int] = Counter()

    def skip(self, draws: int) -> None:
        """Pass over `draws` uniforms that another worker has used for the first tokens."""
        for _ in range(draws):
            self._random.uniform()

    def pick(self, logits: NDArray[np.floating]) -> Sampled:
        """Choose the next token from one row of logits, which are left as they are."""
        params = self._params
        scores = self._penalized(logits.astype(np.float64))
        logprobs = scores - scores.max()
        logprobs -= np.log(_total(np.exp(logprobs)))
        greedy = params.temperature == 0
        token = int(scores.argmax()) if greedy else self._draw(scores / params.temperature)
        self._seen.add(token)
        self._generated[token] += 1
        best = _largest(logprobs, params.top_logprobs) if params.top_logprobs else ()
        return Sampled(
            token, float(logprobs[token]), tuple((int(i), float(logprobs[i])) for i in best)
        )

    def _penalized(self, scores: Floats) -> Floats:
        params = self._params
        if params.repetition_penalty != 1 and self._seen:
            ids = np.fromiter(self._seen, np.intp, len(self._seen))
            seen = scores[ids]
            penalty = params.repetition_penalty
            scores[ids] = np.where(seen > 0, seen / penalty, seen * penalty)
        if params.frequency_penalty or params.presence_penalty:
            for token, count in self._generated.items():
                scores[token] -= params.frequency_penalty * count + params.presence_penalty
        return scores

    def _draw(self, scores: Floats) -> int:
        params = self._params
        if 0 < params.top_k < len(scores):
            scores = _only(scores, _largest(scores, params.top_k))
        q = _softmax(scores)
        if params.top_p < 1:
            scores = _only(scores, _nucleus(q, params.top_p))
            q = _softmax(scores)
        if params.min_p > 0:
            scores = _only(scores, np.flatnonzero(q >= params.min_p * q.max()))
            q = _softmax(scores)
        cumulative = np.cumsum(q)
        token = int(np.searchsorted(cumulative, self._random.uniform(), side="right"))
        # Rounding can leave the last sum below 1 and the draw above it.
        return token if token < len(q) else int(np.flatnonzero(q)[-1])


def _total(values: Floats) -> float:
    """The sum in ascending order; `np.sum` would add pairwise, and so depend on the machine's vector width."""
    return float(np.cumsum(values)[-1])


def _softmax(scores: Floats) -> Floats:
    q: Floats = np.exp(scores - scores.max())
    q /= _total(q)
    return q


def _only(scores: Floats, ids: NDArray[np.intp]) -> Floats:
    kept = np.full_like(scores, -np.inf)
    kept[ids] = scores[ids]
    return kept


def _largest(scores: Floats, count: int) -> NDArray[np.intp]:
    """The ids of the `count` largest scores, by (score descending, id ascending), without sorting the vocabulary."""
    count = min(count, len(scores))
    floor = np.partition(scores, len(scores) - count)[len(scores) - count]
    above = np.flatnonzero(scores > floor)
    ids = np.concatenate([above, np.flatnonzero(scores == floor)[: count - len(above)]])
    return ids[np.lexsort((ids, -scores[ids]))]


def _nucleus(q: Floats, top_p: float) -> NDArray[np.intp]:
    """The ids up to and including the one whose running sum, largest first, reaches `top_p`."""
    count = 64
    while True:
        ids = _largest(q, count)
        reached = int(np.searchsorted(np.cumsum(q[ids]), top_p, side="left"))
        if reached < len(ids):
            return ids[: reached + 1]
        if len(ids) == len(q):
            return ids
        count *= 8
