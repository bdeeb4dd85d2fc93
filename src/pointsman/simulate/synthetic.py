"""Traffic that is drawn instead of recorded. Everything is seeded, and its blocks tell exactly what begins alike.

Blocks are 64 tokens here: fine enough for short chats, and few enough to be fast. Sizes are log-normal, as those of
public traces roughly are: the median is named, and a sixth of them is more than twice that.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import accumulate, count
from random import Random
from typing import ClassVar

from msgspec import Struct

from pointsman.simulate.workload import Arrival

__all__ = ["BLOCK_TOKENS", "Bursts", "Conversations", "Documents", "SystemPrompts"]

BLOCK_TOKENS = 64

LONGEST = 16
"""No size is more than this many times its median."""


class SystemPrompts(Struct, frozen=True):
    """Chats of many applications, each with a long system prompt of its own, popular by Zipf's law."""

    rate: float
    requests: int = 5000
    seed: int = 0
    applications: int = 100
    exponent: float = 1.0
    system_tokens: int = 3000
    question_tokens: int = 200
    answer_tokens: int = 200

    def __iter__(self) -> Iterator[Arrival]:
        """Yield the requests in the order of time."""
        random, fresh, at = Random(f"system prompts {self.seed}"), count(), 0.0
        shares = list(accumulate((n + 1) ** -self.exponent for n in range(self.applications)))
        heads = [_new(fresh, _size(random, self.system_tokens)) for _ in range(self.applications)]
        for _ in range(self.requests):
            at += random.expovariate(self.rate)
            head = heads[bisect_left(shares, random.random() * shares[-1])]
            question = _new(fresh, _size(random, self.question_tokens))
            yield _arrival(at, (*head, *question), _size(random, self.answer_tokens))


class Sessions(Struct, frozen=True):
    """Sessions of several turns, which begin by themselves; a turn comes without waiting for the answer before it.

    `turns` is how many a session has on average, `pause_s` the mean time between two. Where it `grows`, each prompt is
    all that was said before, and more; else it is the beginning and one question.
    """

    rate: float
    requests: int = 5000
    seed: int = 0
    turns: int = 6
    pause_s: float = 20.0
    first_tokens: int = 1500
    turn_tokens: int = 300
    answer_tokens: int = 250
    grows: ClassVar[bool] = True

    def __iter__(self) -> Iterator[Arrival]:
        """Yield the requests in the order of time."""
        random, rate = Random(f"{type(self).__name__.lower()} {self.seed}"), self.rate / self.turns
        fresh, order = count(), count()
        begins = random.expovariate(rate)
        turn: list[tuple[float, int, int, tuple[int, ...]]] = []
        for _ in range(self.requests):
            if not turn or begins <= turn[0][0]:
                at, left = begins, 1 + int(random.expovariate(1 / max(self.turns - 1, 1e-9)))
                before: tuple[int, ...] = _new(fresh, _size(random, self.first_tokens))
                begins += random.expovariate(rate)
            else:
                at, _, left, before = heappop(turn)
            said = (*before, *_new(fresh, _size(random, self.turn_tokens)))
            spoken = _size(random, self.answer_tokens)
            yield _arrival(at, said, spoken)
            if left > 1:
                known = (*said, *_new(fresh, spoken)) if self.grows else before
                after = at + random.expovariate(1 / self.pause_s)
                heappush(turn, (after, next(order), left - 1, known))


class Conversations(Sessions, frozen=True):
    """Chats with time to think between the turns. An agent is the same with little time and a long beginning."""


class Documents(Sessions, frozen=True):
    """Questions about long documents, each asked several times within a while of its first."""

    pause_s: float = 30.0
    first_tokens: int = 16_000
    turn_tokens: int = 100
    answer_tokens: int = 300
    grows: ClassVar[bool] = False


class Bursts(Struct, frozen=True):
    """Prompts that have nothing in common, in bursts: `burst` times the rate for a `share` of the time."""

    rate: float
    requests: int = 5000
    seed: int = 0
    burst: float = 4.0
    share: float = 0.1
    length_s: float = 10.0
    prompt_tokens: int = 2000
    answer_tokens: int = 200

    def __iter__(self) -> Iterator[Arrival]:
        """Yield the requests in the order of time."""
        random, fresh, at = Random(f"bursts {self.seed}"), count(), 0.0
        calm = self.rate * max(1 - self.burst * self.share, 0.0) / (1 - self.share)
        bursting, until = False, 0.0
        sent = 0
        while sent < self.requests:
            rate = self.rate * self.burst if bursting else calm
            after = at + random.expovariate(rate) if rate else math.inf
            if after >= until:
                # Poisson arrivals have no memory, so a new phase may draw anew.
                at = until
                bursting = not bursting
                mean = self.length_s if bursting else self.length_s * (1 - self.share) / self.share
                until = at + random.expovariate(1 / mean)
                continue
            at = after
            sent += 1
            yield _arrival(
                at,
                _new(fresh, _size(random, self.prompt_tokens)),
                _size(random, self.answer_tokens),
            )


def _arrival(at: float, blocks: tuple[int, ...], output_tokens: int) -> Arrival:
    return Arrival(at, blocks, len(blocks) * BLOCK_TOKENS, output_tokens, BLOCK_TOKENS)


def _size(random: Random, median: int) -> int:
    return max(round(median * min(math.exp(random.gauss(0, 0.7)), LONGEST)), 1)


def _new(fresh: "count[int]", tokens: int) -> tuple[int, ...]:
    return tuple([next(fresh) for _ in range(-(-tokens // BLOCK_TOKENS))])
