"""The knee of a policy: the highest rate at which the service level still holds."""

from collections.abc import Callable

__all__ = ["knee"]

DOUBLINGS = 12


def knee(
    good: Callable[[float], float], start: float, *, share: float = 0.95, within: float = 0.02
) -> float:
    """Return the highest rate (requests per second) at which at least `share` of the requests are good.

    `good` runs at a rate and returns that share. From `start` on the rate is doubled or halved until the knee lies
    between two rates, then bisected until they differ by `within` of the lower one. 0.0 if it holds at no rate that
    was tried. It takes the share to fall as the rate grows; where noise makes it do otherwise, one of the crossings is
    returned.

    >>> round(knee(lambda rate: 1.0 if rate < 7 else 0.5, 1.0), 1)
    6.9
    """
    low, high = 0.0, 0.0
    rate = start
    for _ in range(DOUBLINGS):
        if good(rate) >= share:
            low = rate
            if high:
                break
            rate *= 2
        else:
            high = rate
            if low:
                break
            rate /= 2
    if not low or not high:
        return low
    while high - low > within * low:
        middle = (low + high) / 2
        if good(middle) >= share:
            low = middle
        else:
            high = middle
    return low
