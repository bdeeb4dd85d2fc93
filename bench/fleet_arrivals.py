"""What is asked of a fleet of small real engines, as token ids, and the same for the simulator.

Everything is drawn from a seed beforehand, so it does not depend on what anybody answers.
"""

from __future__ import annotations

from bisect import bisect
from functools import lru_cache
from itertools import accumulate
from random import Random
from typing import NamedTuple

import msgspec

from pointsman.domain.blocks import TOKEN_BYTES, block_hashes
from pointsman.domain.prefix import render_prefix, render_prompt
from pointsman.simulate.measures import Measures, ServiceLevel, measure
from pointsman.simulate.profile import EngineProfile
from pointsman.simulate.run import Scenario, simulate
from pointsman.simulate.sizes import Size
from pointsman.simulate.workload import Arrival, Listed

__all__ = [
    "BLOCK_TOKENS",
    "KEY_BYTES",
    "WARMING",
    "Asked",
    "Conditions",
    "arrival",
    "drawn",
    "simulated",
    "text",
]

BLOCK_TOKENS = 32
"""Engines compute prompts in chunks of so many tokens; the gateway compares such blocks."""
KEY_BYTES = 8
"""Of the key that `affinity` hashes: as many as a block's hash has, so that the simulator can have the same one."""
WARMING = 0.25
"""The part of a run that is in no figure: caches are cold."""


class Conditions(msgspec.Struct, frozen=True, kw_only=True):
    """What all runs of a file have in common. Sizes are in tokens, times in seconds.

    A prompt is one of `prefixes` beginnings of `prefix` tokens, the k-th in proportion to 1/k, and what was said since:
    each of `turns` turns, `think_s` apart, has a question of `question` and an answer of `answer`; these are
    distributions, as recipes of the simulator have them. There are `rate` requests per second, for `seconds`. An engine
    has a slot of `context` tokens, and `cache_mib` MiB for prompts that are over, on `share` of a core.
    """

    rate: float = 2.5
    seconds: float = 60.0
    prefixes: int = 16
    prefix: str = "constant/256"
    question: str = "uniform/12/36"
    answer: str = "constant/8"
    turns: str = "geometric/2"
    think_s: str = "exponential/6"
    engines: int = 4
    context: int = 512
    cache_mib: int = 32
    share: float = 0.3
    slo: str = "ttft=5s"


class Asked(NamedTuple):
    """A request that is sent `at` seconds after the start: its prompt as token ids, and how much is to be answered."""

    at: float
    ids: list[int]
    answer: int


def drawn(conditions: Conditions, seed: int) -> list[Asked]:
    """Draw what is asked, in order: the same for everybody who has the seed."""
    random = Random(f"real fleet {seed}")
    prefix, question, answer, turns, think = (
        Size.parse(getattr(conditions, name))
        for name in ("prefix", "question", "answer", "turns", "think_s")
    )
    # A beginning leaves room for a question.
    longest = conditions.context * 3 // 4
    beginnings = [
        text(random, min(prefix.tokens(random), longest)) for _ in range(conditions.prefixes)
    ]
    popularity = list(accumulate(1 / rank for rank in range(1, conditions.prefixes + 1)))
    asked: list[Asked] = []
    # Sessions that began before have turns to come: the first ones start so early that most are over at 0.
    at = -10 * think.mean * turns.mean
    while (at := at + random.expovariate(conditions.rate / turns.mean)) < conditions.seconds:
        due = at
        ids = beginnings[bisect(popularity, random.random() * popularity[-1])]
        for _ in range(turns.tokens(random)):
            ids = ids + text(random, question.tokens(random))
            written = answer.tokens(random)
            if len(ids) + written > conditions.context or due >= conditions.seconds:
                break
            if due >= 0:
                asked.append(Asked(due, ids, written))
            # What an engine answers is not known beforehand, so something else of that length stands for it.
            ids = ids + text(random, written)
            due += think.draw(random)
    return sorted(asked, key=lambda each: each.at)


def text(random: Random, tokens: int) -> list[int]:
    """Draw a text of so many tokens that nobody has seen before."""
    # Ids of ordinary words: the first ones of a vocabulary are marks and single bytes.
    return [random.randrange(1000, 40_000) for _ in range(tokens)]


def arrival(asked: Asked) -> Arrival:
    """Return what the simulator is told of a request: the gateway's own blocks, with its key in place of the first."""
    raw = msgspec.json.encode(asked.ids)
    blocks = block_hashes(render_prompt(raw, None), BLOCK_TOKENS * TOKEN_BYTES)
    key = int.from_bytes(render_prefix(raw, None, KEY_BYTES), "big")
    return Arrival(asked.at, (key, *blocks[1:]), len(asked.ids), asked.answer)


def simulated(
    conditions: Conditions, profile: EngineProfile, policy: str, seed: int, chance: int = 0
) -> Measures:
    """Simulate what `run` measures; `chance` is the seed of a policy that draws at random."""
    listed = Listed(_arrivals(conditions, seed), BLOCK_TOKENS)
    scenario = Scenario(
        workload=listed, policy=policy, workers=conditions.engines, profile=profile, seed=chance
    )
    return measure(simulate(scenario), ServiceLevel.parse(conditions.slo), WARMING)


@lru_cache(maxsize=32)
def _arrivals(conditions: Conditions, seed: int) -> list[Arrival]:
    return [arrival(each) for each in drawn(conditions, seed)]
