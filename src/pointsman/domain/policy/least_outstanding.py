"""Pick the worker that holds the fewest requests.

Good when requests differ much in size: a worker that is busy with a long one gets no more until the others are as busy.
It looks at every candidate once.
"""

from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, ClassVar

from pointsman.domain.policy.consideration import Consideration
from pointsman.domain.policy.tokens import lightest

if TYPE_CHECKING:
    from pointsman.domain.request import InferenceRequest
    from pointsman.domain.worker import Worker

__all__ = ["LeastOutstanding"]

_ID = attrgetter("id")


class LeastOutstanding:
    """The minimum load; among equals the smallest id, or the smallest `rank` of the id where one is given."""

    __slots__ = ("_rank",)

    name: ClassVar[str] = "least_outstanding"

    def __init__(self, rank: Callable[[str], int] | None = None) -> None:
        self._rank = rank

    def pick(
        self,
        workers: "tuple[Worker, ...]",
        load: "Callable[[Worker], int]",
        request: "InferenceRequest",
    ) -> "tuple[Worker, str]":
        """Return the least loaded worker, reason `load`.

        >>> from pointsman.domain.request import InferenceRequest
        >>> from pointsman.domain.worker import Worker, load_of
        >>> a = Worker("a", model="m", http_address="127.0.0.1:8001", queue_depth=2)
        >>> b = Worker("b", model="m", http_address="127.0.0.1:8002", queue_depth=1)
        >>> LeastOutstanding().pick((a, b), load_of, InferenceRequest("m", "r1"))[0].id
        'b'
        """
        rank = self._rank
        if rank is None:
            # They are sorted by id, and the first of equals is the minimum.
            return min(workers, key=load), "load"
        return self.first(lightest(workers, list(map(load, workers)))[1]), "load"

    def first(self, equals: "tuple[Worker, ...]") -> "Worker":
        """Return which of some equals is taken.

        >>> from pointsman.domain.worker import Worker
        >>> fleet = tuple(Worker(name, model="m", http_address="127.0.0.1:8001") for name in "ab")
        >>> LeastOutstanding().first(fleet).id, LeastOutstanding(lambda worker_id: -ord(worker_id)).first(fleet).id
        ('a', 'b')
        """
        rank = self._rank
        if rank is None or len(equals) == 1:
            return equals[0]
        ranks = list(map(rank, map(_ID, equals)))
        return equals[ranks.index(min(ranks))]

    def consider(
        self,
        workers: "tuple[Worker, ...]",
        load: "Callable[[Worker], int]",
        request: "InferenceRequest",
    ) -> Consideration:
        """Return the next pick; the scores are the loads.

        >>> from pointsman.domain.request import InferenceRequest
        >>> from pointsman.domain.worker import Worker, load_of
        >>> a = Worker("a", model="m", http_address="127.0.0.1:8001", queue_depth=2)
        >>> b = Worker("b", model="m", http_address="127.0.0.1:8002", queue_depth=1)
        >>> LeastOutstanding().consider((a, b), load_of, InferenceRequest("m", "r1")).scores
        (2.0, 1.0)
        """
        pick, reason = self.pick(workers, load, request)
        ties = "the smallest id" if self._rank is None else "this process's own order"
        return Consideration(
            pick=pick,
            reason=reason,
            scores=tuple([float(load(worker)) for worker in workers]),
            notes=("",) * len(workers),
            rule=f"the lowest load wins, {ties} among equals",
            repeatable=True,
        )
