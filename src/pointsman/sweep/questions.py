"""A question set of the project's own: short questions of several kinds, with the answers that count as right.

Made for very small models, which get some of them right and some wrong: they are completions (a model of 135M
parameters gets more of them than as chats), with two worked examples before each, so that an answer is a word or a
number and can be judged without another model. One seed gives one set. It measures nothing else about a model.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

__all__ = ["KINDS", "Question", "questions"]

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    *("January", "February", "March", "April", "May", "June", "July"),
    *("August", "September", "October", "November", "December"),
)
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
WORDS = (
    *("apple", "bread", "chair", "cloud", "dance", "eagle", "flute", "grape", "horse", "island"),
    *("jacket", "knife", "lemon", "mouse", "night", "ocean", "paper", "queen", "river", "stone"),
    *("table", "uncle", "violin", "water", "yellow", "zebra"),
)
PLURALS = {"knife": "knives", "mouse": "mice"}
UNCOUNTED = frozenset({"bread", "water", "yellow"})
OPPOSITES = (
    *(("hot", "cold"), ("big", "small"), ("fast", "slow"), ("early", "late"), ("rich", "poor")),
    *(("light", "dark"), ("open", "closed"), ("old", "young"), ("wet", "dry"), ("up", "down")),
    *(("full", "empty"), ("hard", "soft"), ("left", "right"), ("true", "false")),
    *(("high", "low"), ("day", "night"), ("first", "last"), ("inside", "outside")),
)
CAPITALS = (
    *(("France", "Paris"), ("Italy", "Rome"), ("Japan", "Tokyo"), ("Spain", "Madrid")),
    *(("Germany", "Berlin"), ("Russia", "Moscow"), ("Egypt", "Cairo"), ("Greece", "Athens")),
    *(("Austria", "Vienna"), ("Norway", "Oslo"), ("Peru", "Lima"), ("Cuba", "Havana")),
    *(("Poland", "Warsaw"), ("Portugal", "Lisbon"), ("Kenya", "Nairobi"), ("Finland", "Helsinki")),
    *(
        ("Hungary", "Budapest"),
        ("Ireland", "Dublin"),
        ("Thailand", "Bangkok"),
        ("Chile", "Santiago"),
    ),
)
TRIES = 50
"""Draws of a kind before it counts as used up."""

Asked = tuple[str, str]
"""A question and its answer."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question, the kind it is of, and what is a right answer to it."""

    kind: str
    examples: tuple[Asked, Asked]
    text: str
    answer: str

    def line(self) -> dict[str, object]:
        """Return the question as a line of a prompt file: a completion after the examples, which ends with its line."""
        asked = "".join(f"Question: {text}\nAnswer: {answer}\n\n" for text, answer in self.examples)
        return {
            "kind": self.kind,
            "prompt": f"{asked}Question: {self.text}\nAnswer:",
            "stop": ["\n"],
            "answers": [self.answer],
        }


def questions(count: int, seed: int) -> list[Question]:
    """Return `count` different questions, the kinds in turn, the same ones for the same `seed`.

    >>> [question.kind for question in questions(3, seed=1)]
    ['addition of 1 digit', 'addition of 2 digits', 'addition of 3 digits']
    >>> questions(1, seed=1) == questions(1, seed=1) != questions(1, seed=2)
    True
    """
    return list(itertools.islice(_endless(Random(seed)), count))


def _endless(draws: Random) -> Iterator[Question]:
    """Yield questions for ever; the long additions are too many to be used up."""
    seen: set[str] = set()
    for kind, draw in itertools.cycle(KINDS.items()):
        # The examples of a kind are the same for all its questions: engines keep their KV cache.
        first, second = itertools.islice(_different(draw, Random(kind), set()), 2)
        taken = seen | {first[0], second[0]}
        for text, answer in itertools.islice(_different(draw, draws, taken), 1):
            seen.add(text)
            yield Question(kind, (first, second), text, answer)


def _different(draw: Callable[[Random], Asked], draws: Random, seen: set[str]) -> Iterator[Asked]:
    """Yield questions that are not in `seen` nor alike, until a kind gives none in `TRIES` draws."""
    seen = set(seen)
    for asked in iter(lambda: _fresh(draw, draws, seen), None):
        seen.add(asked[0])
        yield asked


def _fresh(draw: Callable[[Random], Asked], draws: Random, seen: set[str]) -> Asked | None:
    drawn = (draw(draws) for _ in range(TRIES))
    return next((asked for asked in drawn if asked[0] not in seen), None)


def _addition(digits: int) -> Callable[[Random], Asked]:
    def draw(draws: Random) -> Asked:
        low, high = 10 ** (digits - 1), 10**digits
        a, b = draws.randrange(low, high), draws.randrange(low, high)
        return f"What is {a} + {b}?", str(a + b)

    return draw


def _subtraction(draws: Random) -> Asked:
    a, b = sorted((draws.randrange(1, 20), draws.randrange(1, 20)), reverse=True)
    return f"What is {a} - {b}?", str(a - b)


def _comparison(draws: Random) -> Asked:
    a, b = draws.sample(range(1, 1000), 2)
    return f"Which number is larger, {a} or {b}?", str(max(a, b))


def _sequence(draws: Random) -> Asked:
    first, step = draws.randrange(1, 30), draws.choice((1, 2, 5, 10))
    shown = ", ".join(str(first + step * at) for at in range(4))
    return f"Which number comes next: {shown}?", str(first + step * 4)


def _number_word(draws: Random) -> Asked:
    value = draws.randrange(len(NUMBERS))
    return f"Write the number {value} as a word.", NUMBERS[value]


def _counting(draws: Random) -> Asked:
    word, times = draws.choice(WORDS), draws.randrange(1, 8)
    return f"How many words are in this line: {' '.join([word] * times)}", str(times)


def _spelling(draws: Random) -> Asked:
    word = draws.choice(WORDS)
    return f'Spell the word "{word}" with a dash between the letters.', "-".join(word)


def _letter(draws: Random) -> Asked:
    word, (place, at) = draws.choice(WORDS), draws.choice((("first", 0), ("last", -1)))
    return f'What is the {place} letter of the word "{word}"?', word[at]


def _around(names: tuple[str, ...], what: str) -> Callable[[Random], Asked]:
    def draw(draws: Random) -> Asked:
        at, (place, step) = (
            draws.randrange(len(names)),
            draws.choice((("after", 1), ("before", -1))),
        )
        return f"Which {what} comes {place} {names[at]}?", names[(at + step) % len(names)]

    return draw


def _plural(draws: Random) -> Asked:
    word = draws.choice(tuple(word for word in WORDS if word not in UNCOUNTED))
    return f'What is the plural of "{word}"?', PLURALS.get(word, f"{word}s")


def _opposite(draws: Random) -> Asked:
    word, other = draws.choice(OPPOSITES)
    return f'What is the opposite of "{word}"?', other


def _capital(draws: Random) -> Asked:
    country, capital = draws.choice(CAPITALS)
    return f"What is the capital of {country}?", capital


KINDS: dict[str, Callable[[Random], Asked]] = {
    "addition of 1 digit": _addition(1),
    "addition of 2 digits": _addition(2),
    "addition of 3 digits": _addition(3),
    "subtraction": _subtraction,
    "comparison": _comparison,
    "sequence": _sequence,
    "number word": _number_word,
    "counting": _counting,
    "spelling": _spelling,
    "letter": _letter,
    "day": _around(DAYS, "day"),
    "month": _around(MONTHS, "month"),
    "plural": _plural,
    "opposite": _opposite,
    "capital": _capital,
}
"""The kinds of questions by name, each a function that draws one."""
