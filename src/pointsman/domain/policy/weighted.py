"""Smooth weighted round robin: spread requests in proportion to KV capacity, without runs.

On every pick each candidate's counter grows by its weight; the largest counter wins and pays the sum of all weights.
Worked example: weights 3 (big) and 1 (small) give big, big, small, big, repeating. Over any whole cycle (as many picks
as the weights sum to) the split is exact.

Source: the smooth weighted round robin of nginx (2012).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from pointsman.domain.policy.consideration import Consideration

if TYPE_CHECKING:
    from pointsman.domain.request import InferenceRequest
    from pointsman.domain.worker import Worker

__all__ = ["Weighted"]

GENERATION = 4096
"""How many counters there may be before those that nobody touches any more are dropped."""


class Weighted:
    """Weight = `kv_total_blocks`, at least 1; among equal counters the smallest id, or the smallest `rank`.

    Counters are kept by worker id. They are held in two generations: a full one becomes the former one, and a counter
    moves back to the present one when it is used. So the counters of workers that are gone are dropped at some time,
    and none is lost that was used since.
    """

    __slots__ = ("_former", "_present", "_rank")

    name: ClassVar[str] = "weighted"

    def __init__(self, rank: Callable[[str], int] | None = None) -> None:
        self._rank = rank
        self._present: dict[str, int] = {}
        self._former: dict[str, int] = {}

    def pick(
        self,
        workers: "tuple[Worker, ...]",
        load: "Callable[[Worker], int]",
        request: "InferenceRequest",
    ) -> "tuple[Worker, str]":
        """Return the worker whose turn it is, reason `load`.

        >>> from pointsman.domain.request import InferenceRequest
        >>> from pointsman.domain.worker import Worker, load_of
        >>> big = Worker("big", model="m", http_address="127.0.0.1:8001", kv_total_blocks=3)
        >>> small = Worker("small", model="m", http_address="127.0.0.1:8002", kv_total_blocks=1)
        >>> policy, request = Weighted(), InferenceRequest("m", "r1")
        >>> [policy.pick((big, small), load_of, request)[0].id for _ in range(4)]
        ['big', 'big', 'small', 'big']
        """
        counters, rank = self._present, self._rank
        if len(counters) > GENERATION + len(workers):
            self._former = counters
            counters = self._present = {}
        best = workers[0]
        most = None
        total = 0
        for worker in workers:
            worker_id = worker.id
            counter = counters.get(worker_id)
            if counter is None:
                counter = self._former.get(worker_id, 0)
            weight = worker.kv_total_blocks
            if weight < 1:
                weight = 1
            total += weight
            counter += weight
            counters[worker_id] = counter
            if most is None or counter > most:
                best, most = worker, counter
            elif rank is not None and counter == most and rank(worker_id) < rank(best.id):
                best = worker
        counters[best.id] -= total
        return best, "load"

    def consider(
        self,
        workers: "tuple[Worker, ...]",
        load: "Callable[[Worker], int]",
        request: "InferenceRequest",
    ) -> Consideration:
        """Return whose turn is next; the scores are the counters grown by the weights, before the winner pays.

        >>> from pointsman.domain.request import InferenceRequest
        >>> from pointsman.domain.worker import Worker, load_of
        >>> big = Worker("big", model="m", http_address="127.0.0.1:8001", kv_total_blocks=3)
        >>> small = Worker("small", model="m", http_address="127.0.0.1:8002", kv_total_blocks=1)
        >>> policy, request = Weighted(), InferenceRequest("m", "r1")
        >>> _ = policy.pick((big, small), load_of, request)
        >>> policy.consider((big, small), load_of, request).scores
        (2.0, 2.0)
        """
        twin = Weighted(self._rank)
        twin._present, twin._former = self._present.copy(), self._former
        pick, reason = twin.pick(workers, load, request)
        weights = [max(worker.kv_total_blocks, 1) for worker in workers]
        twin._present[pick.id] += sum(weights)
        ties = "the smallest id" if self._rank is None else "this process's own order"
        return Consideration(
            pick=pick,
            reason=reason,
            scores=tuple([float(twin._present[worker.id]) for worker in workers]),
            notes=tuple([f"weight {weight}" for weight in weights]),
            rule=f"the highest counter wins and pays {sum(weights)}, {ties} among equals",
        )
