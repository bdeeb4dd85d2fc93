"""Smooth weighted round robin: spread requests in proportion to KV capacity, without runs.

On every pick each candidate's counter grows by its weight; the largest counter wins and pays the sum of all weights.
Worked example: weights 3 (big) and 1 (small) give big, big, small, big, repeating. Over any whole cycle (as many picks
as the weights sum to) the split is exact.

Source: the smooth weighted round robin of nginx (2012).
"""

from collections.abc import Callable
from itertools import islice
from operator import add, attrgetter
from typing import TYPE_CHECKING, ClassVar

from pointsman.domain.policy.consideration import Consideration

if TYPE_CHECKING:
    from pointsman.domain.request import InferenceRequest
    from pointsman.domain.worker import Worker

__all__ = ["Weighted"]

GENERATION = 4096
"""How many counters there may be of workers that have no place, before those that left one first are dropped."""

SEATED = 64
"""How many tuples of candidates have their counters at hand."""

_ID = attrgetter("id")


class _Round:
    """A tuple of candidates, their ids, and their counters in the same order."""

    __slots__ = ("counters", "ids", "workers")

    def __init__(
        self, workers: "tuple[Worker, ...]", ids: tuple[str, ...], counters: list[int]
    ) -> None:
        self.workers = workers
        self.ids = ids
        self.counters = counters


class Weighted:
    """Weight = `kv_total_blocks`, at least 1; among equal counters the smallest id, or the smallest `rank`.

    Counters are those of worker ids, whatever tuple they come in. They are kept in the order of the latest tuple that a
    worker was in, so that a turn is a few passes over lists; others wait until their worker is among candidates again.
    So the counters of workers that are gone are dropped at some time, and none is lost that was used since.
    """

    __slots__ = ("_counters", "_rank", "_rounds", "_seated")

    name: ClassVar[str] = "weighted"

    def __init__(self, rank: Callable[[str], int] | None = None) -> None:
        self._rank = rank
        self._counters: dict[str, int] = {}
        self._rounds: list[_Round] = []
        # By worker id. No worker is in two.
        self._seated: dict[str, _Round] = {}

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
        round = self._seated.get(workers[0].id)
        if round is None or round.workers is not workers:
            round = self._seat(workers)
        weights = [blocks if (blocks := worker.kv_total_blocks) > 0 else 1 for worker in workers]
        counters = round.counters = list(map(add, round.counters, weights))
        most = max(counters)
        place = counters.index(most)
        rank = self._rank
        if rank is not None and counters.count(most) > 1:
            equals = [each for each, counter in enumerate(counters) if counter == most]
            place = min(equals, key=lambda each: rank(workers[each].id))
        counters[place] -= sum(weights)
        return workers[place], "load"

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
        twin._counters = self._all()
        pick, reason = twin.pick(workers, load, request)
        weights = [max(worker.kv_total_blocks, 1) for worker in workers]
        counters = twin._all()
        counters[pick.id] += sum(weights)
        ties = "the smallest id" if self._rank is None else "this process's own order"
        return Consideration(
            pick=pick,
            reason=reason,
            scores=tuple([float(counters[worker.id]) for worker in workers]),
            notes=tuple([f"weight {weight}" for weight in weights]),
            rule=f"the highest counter wins and pays {sum(weights)}, {ties} among equals",
        )

    def _all(self) -> dict[str, int]:
        """Return every counter."""
        counters = self._counters.copy()
        for round in self._rounds:
            counters.update(zip(round.ids, round.counters, strict=True))
        return counters

    def _seat(self, workers: "tuple[Worker, ...]") -> _Round:
        """Return the round of `workers`; rounds that any of them is in end."""
        known = self._seated.get(workers[0].id)
        if known is not None and known.workers == workers:
            # The same ones for another model.
            known.workers = workers
            return known
        ids = tuple(map(_ID, workers))
        for worker_id in ids:
            former = self._seated.get(worker_id)
            if former is not None:
                self._rounds.remove(former)
                self._unseat(former)
        if len(self._rounds) >= SEATED:
            self._unseat(self._rounds.pop(0))
        round = _Round(workers, ids, [self._counters.pop(worker_id, 0) for worker_id in ids])
        self._rounds.append(round)
        self._seated.update(dict.fromkeys(ids, round))
        return round

    def _unseat(self, round: _Round) -> None:
        counters = self._counters
        for worker_id, counter in zip(round.ids, round.counters, strict=True):
            del self._seated[worker_id]
            counters[worker_id] = counter
        for worker_id in list(
            islice(counters, max(len(counters) - GENERATION - len(round.ids), 0))
        ):
            del counters[worker_id]
