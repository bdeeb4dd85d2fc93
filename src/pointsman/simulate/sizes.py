"""How long things are: distributions with names, which a command line can write.

`lognormal/200/1` is a median of 200 with a sigma of 1 (of the logarithm), which prompts and answers come close to;
`constant/200`, `uniform/100/300`, `exponential/200` and `geometric/8` (both by their mean) are the others, and a bare
number is a constant. Randomness comes in as an argument.
"""

from collections.abc import Iterable
from difflib import get_close_matches
from math import exp, isfinite, log
from typing import TYPE_CHECKING, Self

from msgspec import Struct

if TYPE_CHECKING:
    from random import Random

__all__ = ["Size", "constant", "exponential", "geometric", "lognormal", "nearest", "uniform"]

SHAPES = {"constant": 1, "exponential": 1, "geometric": 1, "lognormal": 2, "uniform": 2}
"""How many numbers each distribution has."""


class Size(Struct, frozen=True):
    """A distribution: `shape` is its name, `first` and `second` its numbers.

    >>> from random import Random
    >>> Size.parse("uniform/200/300").draw(Random(1)) < 300
    True
    >>> Size.parse("constant/8") == Size.parse("8"), str(Size.parse("8"))
    (True, 'constant/8')
    """

    shape: str
    first: float
    second: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a size as `str` writes it, or a number. Raises ValueError with one line."""
        shape, *numbers = text.split("/")
        if not numbers:
            shape, numbers = "constant", [text]
        if shape not in SHAPES:
            raise ValueError(
                f"{text!r} is neither a number nor a distribution, {nearest(shape, SHAPES)}"
            )
        if len(numbers) != SHAPES[shape]:
            raise ValueError(f"{text!r}: {shape} has {SHAPES[shape]} numbers, not {len(numbers)}")
        try:
            values = [float(each) for each in numbers]
        except ValueError:
            raise ValueError(f"{text!r}: {'/'.join(numbers)} are no numbers") from None
        if not all(isfinite(each) and each >= 0 for each in values):
            raise ValueError(f"{text!r}: every number must be 0 or more")
        if shape == "lognormal" and not values[0]:
            raise ValueError(f"{text!r}: a median must be more than 0")
        if shape == "uniform" and values[0] > values[1]:
            raise ValueError(f"{text!r}: {values[0]:g} is more than {values[1]:g}")
        return cls(shape, *values)

    def __str__(self) -> str:
        numbers = (self.first, self.second)[: SHAPES[self.shape]]
        return "/".join([self.shape, *(f"{each:.12g}" for each in numbers)])

    @property
    def mean(self) -> float:
        """The mean of the distribution.

        >>> uniform(1, 2).mean, geometric(8).mean, round(lognormal(200, 1).mean)
        (1.5, 8, 330)
        """
        match self.shape:
            case "uniform":
                return (self.first + self.second) / 2
            case "lognormal":
                return self.first * exp(self.second**2 / 2)
        return self.first

    def draw(self, random: "Random") -> float:
        """Draw a number, 0 or more; a geometric one is whole, and at least 1."""
        first, second = self.first, self.second
        match self.shape:
            case "constant":
                return first
            case "exponential":
                return random.expovariate(1.0) * first
            case "lognormal":
                return random.lognormvariate(log(first), second)
            case "uniform":
                return random.uniform(first, second)
        if first <= 1:
            return 1.0
        return 1.0 + log(1.0 - random.random()) // log(1.0 - 1.0 / first)

    def tokens(self, random: "Random") -> int:
        """Draw a whole number, at least 1.

        >>> from random import Random
        >>> constant(0).tokens(Random(1))
        1
        """
        return max(round(self.draw(random)), 1)


def constant(value: float) -> Size:
    """Return the distribution of one value.

    >>> str(constant(3))
    'constant/3'
    """
    return Size("constant", value)


def exponential(mean: float) -> Size:
    """Return the exponential distribution.

    >>> str(exponential(3))
    'exponential/3'
    """
    return Size("exponential", mean)


def geometric(mean: float) -> Size:
    """Return the geometric distribution of whole numbers from 1 on; `mean` is at least 1.

    >>> str(geometric(3))
    'geometric/3'
    """
    return Size("geometric", mean)


def lognormal(median: float, sigma: float) -> Size:
    """Return the log-normal distribution.

    >>> str(lognormal(200, 1))
    'lognormal/200/1'
    """
    return Size("lognormal", median, sigma)


def uniform(least: float, most: float) -> Size:
    """Return the uniform distribution.

    >>> str(uniform(1, 2))
    'uniform/1/2'
    """
    return Size("uniform", least, most)


def nearest(name: str, names: Iterable[str]) -> str:
    """Return the half of a sentence that says which of some names was meant.

    >>> nearest("pois", ["poisson", "rag"]), nearest("x", ["poisson", "rag"])
    ('did you mean poisson?', 'there are poisson, rag')
    """
    known = sorted(names)
    close = get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
