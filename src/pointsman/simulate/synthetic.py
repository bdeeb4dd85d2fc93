"""Workloads that are drawn: who comes when, and how prompts begin alike.

All of them are one recipe with other numbers. A session is a shared beginning (a system prompt, tools, a document; one
of `prefixes`, the k-th most popular with a probability proportional to k to the power of -`zipf`), and then turns: the
next prompt is the former one, its answer and a new text, and it comes after the answer and a pause. So a session of
several turns is a closed loop, and how fast the answers are decides when its next request comes; a session of one turn
is an open one. Sessions start as a Poisson process, or as one that changes between a calm and a burst (a
Markov-modulated Poisson process), with the same rate in the long run.

All that is random about a session is drawn when it starts, so two policies that are compared meet the same sessions,
whatever becomes of the answers.

What it does not do: text, tokenizers, clients that give up.
"""

from bisect import bisect
from collections.abc import Iterator, Mapping
from itertools import accumulate
from math import inf, isfinite
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct
from msgspec.structs import fields, replace

from pointsman.simulate.prompts import Prompt
from pointsman.simulate.sizes import Size, constant, exponential, geometric, lognormal, nearest
from pointsman.simulate.workload import Arrival

if TYPE_CHECKING:
    from random import Random

__all__ = ["RECIPES", "Recipe", "Synthetic", "recipe_of"]

BLOCK_TOKENS = 128
"""Tokens of a block: what the gateway hashes, too, unless told otherwise."""


class Recipe(Struct, frozen=True, kw_only=True):
    """What a synthetic workload is like. Sizes are in tokens.

    `preamble` is what all prompts begin with; `prefixes` is how many shared beginnings of size `prefix` there are after
    that, 0 for none, and `zipf` (0 or more) how unequal their popularity. `question` is the new text of each turn,
    `answer` what the model writes; `turns` is how many turns a session has, `think_s` the seconds between an answer and
    the next turn. A session ends where its prompt would be longer than `context`.

    With `burst` above 1, sessions come `burst` times as often for `burst_s` seconds as in the `calm_s` seconds between,
    both exponentially distributed with these means.
    """

    question: Size = lognormal(200, 1.0)
    answer: Size = lognormal(200, 0.8)
    preamble: int = 0
    prefixes: int = 0
    prefix: Size = lognormal(1500, 0.6)
    zipf: float = 1.0
    turns: Size = constant(1)
    think_s: Size = exponential(10)
    context: int = 131_072
    burst: float = 1.0
    burst_s: float = 10.0
    calm_s: float = 50.0


RECIPES: Mapping[str, Recipe] = {
    "poisson": Recipe(question=lognormal(1000, 1.0)),
    "bursty": Recipe(prefixes=200, burst=8.0),
    "sessions": Recipe(prefixes=20, prefix=lognormal(800, 0.6), turns=geometric(6)),
    "shared": Recipe(prefixes=500),
    "agents": Recipe(
        prefixes=20,
        prefix=lognormal(6000, 0.4),
        question=lognormal(400, 1.0),
        answer=lognormal(60, 0.6),
        turns=geometric(12),
        think_s=exponential(1),
    ),
    "rag": Recipe(
        preamble=300,
        prefixes=1000,
        prefix=lognormal(8000, 0.7),
        zipf=0.9,
        question=lognormal(60, 0.6),
        answer=lognormal(150, 0.6),
    ),
}
"""The synthetic workloads by name."""


class _Turn(NamedTuple):
    """A turn that is to come: the pause before it, its new text, and how long that and the answer are."""

    think_s: float
    text: int
    tokens: int
    output_tokens: int


class _Session:
    """The turns of a session that are to come, the next one last, and the prompt so far."""

    __slots__ = ("prompt", "turns")

    def __init__(self, prompt: Prompt, turns: list[_Turn]) -> None:
        self.prompt = prompt
        self.turns = turns

    def next_at(self, at: float, number: int) -> Arrival:
        """Return the next turn, which comes at `at`."""
        turn = self.turns.pop()
        asked = self.prompt.plus(turn.text, turn.tokens)
        # The answer is a text of its own, known by the number behind that of the question.
        self.prompt = asked.plus(turn.text + 1, turn.output_tokens)
        return Arrival(at, asked.blocks, asked.tokens, turn.output_tokens, number)


class Synthetic:
    """An iterator of the first turns of sessions, in order; `next_after` has the other ones.

    `rate` is requests per second in the long run (more than 0); there are `requests` in all. Of sessions of several
    turns there are about so many: all that come in the time in which so many should come, so that there is no end in
    which only the longest sessions are left. It can be gone through once.

    >>> from random import Random
    >>> first, second = Synthetic(RECIPES["poisson"], 1.0, 2, Random(1))
    >>> first.at < second.at, len(first.blocks) == first.prompt_tokens // 128
    (True, True)
    """

    def __init__(
        self,
        recipe: Recipe,
        rate: float,
        requests: int,
        random: "Random",
        block_tokens: int = BLOCK_TOKENS,
    ) -> None:
        self.block_tokens = block_tokens
        self._recipe = recipe
        self._rate = rate
        self._requests = requests
        self._until = inf if recipe.turns == constant(1) else requests / rate
        self._random = random
        self._texts = 0
        empty = Prompt.empty(block_tokens)
        if recipe.preamble:
            empty = empty.plus(self._text(), recipe.preamble)
        self._beginnings = [
            empty.plus(self._text(), recipe.prefix.tokens(random)) for _ in range(recipe.prefixes)
        ] or [empty]
        ranks = range(1, len(self._beginnings) + 1)
        self._popularity = list(accumulate([rank**-recipe.zipf for rank in ranks]))
        self._to_come: dict[int, _Session] = {}

    def __iter__(self) -> Iterator[Arrival]:
        starts = self._starts(self._rate / max(self._recipe.turns.mean, 1.0))
        for number, at in enumerate(starts):
            if number == self._requests or at > self._until:
                return
            session = self._session()
            if len(session.turns) > 1:
                self._to_come[number] = session
            yield session.next_at(at, number)

    def next_after(self, arrival: Arrival, now: float) -> Arrival | None:
        """Return the turn that follows `arrival`, whose answer was complete at `now`; None after the last one."""
        session = self._to_come.get(arrival.session)
        if session is None:
            return None
        at = now + session.turns[-1].think_s
        if len(session.turns) == 1 or at > self._until:
            del self._to_come[arrival.session]
        return None if at > self._until else session.next_at(at, arrival.session)

    def _starts(self, rate: float) -> Iterator[float]:
        """Yield when sessions start, `rate` of them per second in the long run."""
        recipe, random = self._recipe, self._random
        both = recipe.calm_s + recipe.burst_s
        calm = rate * both / (recipe.calm_s + recipe.burst * recipe.burst_s)
        at, until, bursting = 0.0, random.expovariate(1 / recipe.calm_s), False
        while True:
            due = at + random.expovariate(calm * recipe.burst if bursting else calm)
            if due < until:
                at = due
                yield at
            else:
                # Nothing is remembered by an exponential distribution, so what was drawn may be drawn again.
                at, bursting = until, not bursting
                until += random.expovariate(1 / (recipe.burst_s if bursting else recipe.calm_s))

    def _session(self) -> _Session:
        recipe, random = self._recipe, self._random
        popularity = self._popularity
        beginning = self._beginnings[bisect(popularity, random.random() * popularity[-1])]
        room = recipe.context - beginning.tokens
        turns: list[_Turn] = []
        for _ in range(recipe.turns.tokens(random)):
            asked, output = recipe.question.tokens(random), recipe.answer.tokens(random)
            if turns and asked + output > room:
                break
            room -= asked + output
            turns.append(_Turn(recipe.think_s.draw(random), self._text(), asked, output))
            self._text()
        turns.reverse()
        return _Session(beginning, turns)

    def _text(self) -> int:
        self._texts += 1
        return self._texts


def recipe_of(text: str) -> Recipe:
    """Return the recipe `NAME` or `NAME:key=value,...` with some of its numbers changed.

    Raises ValueError with one line that names what is wrong, and the nearest that is right.

    >>> str(recipe_of("sessions:turns=geometric/3,prefixes=5").turns)
    'geometric/3'
    """
    name, _, changes = text.partition(":")
    recipe = RECIPES.get(name)
    if recipe is None:
        raise ValueError(f"no workload is called {name!r}, {nearest(name, RECIPES)}")
    kinds = {field.name: type(getattr(recipe, field.name)) for field in fields(Recipe)}
    changed: dict[str, Size | int | float] = {}
    for change in changes.split(",") if changes else ():
        key, _, value = change.partition("=")
        if key not in kinds:
            raise ValueError(f"workload {name}: there is no {key!r}, {nearest(key, kinds)}")
        try:
            changed[key] = Size.parse(value) if kinds[key] is Size else _number(value, kinds[key])
            if key == "burst" and float(value) < 1:
                raise ValueError(f"{value!r} is less than 1")
            if key in ("burst_s", "calm_s", "context") and float(value) <= 0:
                raise ValueError(f"{value!r} is not more than 0")
        except ValueError as error:
            raise ValueError(f"workload {name}: {key}: {error}") from None
    return replace(recipe, **changed)


def _number(text: str, kind: type) -> int | float:
    try:
        value: int | float = kind(text)
    except ValueError:
        raise ValueError(f"{text!r} is no {'whole ' if kind is int else ''}number") from None
    if not (isfinite(value) and value >= 0):
        raise ValueError(f"{text!r} is less than 0, or no finite number")
    return value
