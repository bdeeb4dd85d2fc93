"""Two random candidates, the lower load of the two.

With n workers and one random choice each, the fullest holds about ln n / ln ln n more than its share; with the better
of two it is ln ln n / ln 2, an exponential gain for one more look. Gateways that do not know of each other do not herd
onto the same idle worker, because each looks at its own random two. It costs the same for 2 and for 1000 workers.

Source: Mitzenmacher, The Power of Two Choices in Randomized Load Balancing, 2001.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from pointsman.domain.policy.consideration import Consideration

if TYPE_CHECKING:
    from pointsman.domain.policy import RandomSource
    from pointsman.domain.request import InferenceRequest
    from pointsman.domain.worker import Worker

__all__ = ["PowerOfTwo", "draw_two"]


def draw_two(workers: "tuple[Worker, ...]", random: "RandomSource") -> "tuple[Worker, Worker]":
    """Return two different ones of at least two workers; every ordered pair is as likely.

    >>> from random import Random
    >>> from pointsman.domain.worker import Worker
    >>> fleet = tuple(Worker(name, model="m", http_address="127.0.0.1:8001") for name in "abc")
    >>> [worker.id for worker in draw_two(fleet, Random(1))]
    ['a', 'c']
    """
    n = len(workers)
    i = int(random.random() * n)
    # The second is drawn from the n - 1 others: those from i on are one place further.
    j = int(random.random() * (n - 1))
    if j >= i:
        j += 1
    return workers[i], workers[j]


class PowerOfTwo:
    """The lower load of two distinct random workers; of two equals the one drawn first, so ties are random too."""

    __slots__ = ("_random",)

    name: ClassVar[str] = "power_of_two"

    def __init__(self, random: "RandomSource") -> None:
        self._random = random

    def pick(
        self,
        workers: "tuple[Worker, ...]",
        load: "Callable[[Worker], int]",
        request: "InferenceRequest",
    ) -> "tuple[Worker, str]":
        """Return the better of two random workers, reason `load`.

        >>> from random import Random
        >>> from pointsman.domain.request import InferenceRequest
        >>> from pointsman.domain.worker import Worker, load_of
        >>> a = Worker("a", model="m", http_address="127.0.0.1:8001", queue_depth=2)
        >>> b = Worker("b", model="m", http_address="127.0.0.1:8002", queue_depth=1)
        >>> PowerOfTwo(Random(1)).pick((a, b), load_of, InferenceRequest("m", "r1"))[0].id
        'b'
        """
        if len(workers) == 1:
            return workers[0], "load"
        first, second = draw_two(workers, self._random)
        return (first if load(first) <= load(second) else second), "load"

    def consider(
        self,
        workers: "tuple[Worker, ...]",
        load: "Callable[[Worker], int]",
        request: "InferenceRequest",
    ) -> Consideration:
        """Return the chance of each worker as its score; nothing is drawn, so there is a pick only where it is certain.

        Of n (n - 1) equally likely draws of two, a worker wins the 2 with each busier one, and of the 2 with each that
        is as busy the one in which it came first.

        >>> from random import Random
        >>> from pointsman.domain.request import InferenceRequest
        >>> from pointsman.domain.worker import Worker, load_of
        >>> fleet = tuple(Worker(name, model="m", http_address="127.0.0.1:8001") for name in "abcde")
        >>> fleet[4].queue_depth = 1
        >>> PowerOfTwo(Random(1)).consider(fleet, load_of, InferenceRequest("m", "r1")).scores
        (0.25, 0.25, 0.25, 0.25, 0.0)
        """
        n = len(workers)
        loads = [load(worker) for worker in workers]
        busy = sorted(loads)
        scores = []
        for own in loads:
            busier = n - bisect_right(busy, own)
            equal = n - busier - bisect_left(busy, own) - 1
            scores.append((2 * busier + equal) / (n * (n - 1)) if n > 1 else 1.0)
        return Consideration(
            pick=workers[scores.index(1.0)] if 1.0 in scores else None,
            reason="load",
            scores=tuple(scores),
            notes=("",) * n,
            rule="two are drawn at random and the lower load of them wins; the score is the chance",
            repeatable=True,
        )
