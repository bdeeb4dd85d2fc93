"""The knee: the highest load at which most requests still meet the service level.

Loads are doubled or halved until one holds and its double does not, and then the gap is halved, on a scale of ratios,
until it is narrow. That finds the knee only where more load never helps, which holds but for noise; so the same seeds
are used at every load, and a load is what all of them say together.
"""

from collections.abc import Callable
from math import sqrt
from typing import NamedTuple

__all__ = ["Knee", "find_knee"]

DOUBLINGS = 24
"""How often a first guess is doubled or halved: it may be wrong by a factor of ten million."""


class Knee(NamedTuple):
    """`load` is the highest that held, 0.0 where none did; `above` did not, inf where all did; `tried` is how often."""

    load: float
    above: float
    tried: int


def find_knee(
    share: Callable[[float], float],
    first: float,
    *,
    wanted: float = 0.95,
    precision: float = 0.02,
    doublings: int = DOUBLINGS,
) -> Knee:
    """Return the highest load at which `share`, of a load, is at least `wanted`, within `precision` of it (above 0).

    `first` (above 0) is where to begin, and is doubled or halved `doublings` times at most. It is asked about ten
    times.

    >>> knee = find_knee(lambda load: 1.0 if load <= 13 else 0.5, 1.0)
    >>> 12.7 < knee.load <= 13 < knee.above < 13.3, knee.tried
    (True, 11)
    """
    tried = 0

    def holds(load: float) -> bool:
        nonlocal tried
        tried += 1
        return share(load) >= wanted

    low = high = first
    if holds(first):
        while True:
            high = low * 2
            if tried > doublings:
                return Knee(low, float("inf"), tried)
            if not holds(high):
                break
            low = high
    else:
        while True:
            low = high / 2
            if tried > doublings:
                return Knee(0.0, high, tried)
            if holds(low):
                break
            high = low
    while high > low * (1 + precision):
        middle = sqrt(low * high)
        if holds(middle):
            low = middle
        else:
            high = middle
    return Knee(low, high, tried)
