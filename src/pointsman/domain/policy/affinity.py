"""Keep prompts that begin alike together, until their worker has its fair share.

An engine keeps the KV blocks of prompts it has seen, so a request is cheapest where its first block is warm already.
The leading bytes of the prompt (`InferenceRequest.prefix_key`) are placed on a consistent hash ring of the candidates,
with bounded loads: a hot prefix fills its owner up to the cap and then spills to the next worker clockwise, always in
the same order. No state about prompts is kept, so gateways agree without talking, also after a restart.
"""

from bisect import bisect_left
from collections.abc import Callable
from copy import copy
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, ClassVar

from pointsman.domain.policy.consideration import Consideration
from pointsman.domain.ring import Ring, bounded_cap, place_of

if TYPE_CHECKING:
    from pointsman.domain.request import InferenceRequest
    from pointsman.domain.worker import Worker

__all__ = ["Affinity"]

TUPLES = 256
"""How many tuples of candidates are remembered with their ring."""

MEMBERS = 4096
"""How many members all kept rings may have in sum; a place costs 16 bytes, so this is 10 MB."""

SPARE = 8
"""How many absent members a ring may have and still serve a smaller set of workers."""

KEYS = 8192
"""For how many keys, over all tuples, the first workers clockwise are kept."""

ORDER = 3
"""How many of these: all of them are full at once only on a busy fleet, and then the ring is walked."""

_ID = attrgetter("id")
_key_position = lru_cache(maxsize=8192)(place_of)


class _Fleet:
    """One tuple of candidates, its ring, and the first workers clockwise of the keys asked lately."""

    __slots__ = ("orders", "ring", "workers")

    def __init__(self, workers: "tuple[Worker, ...]", ring: Ring) -> None:
        self.workers = workers
        self.ring = ring
        self.orders: dict[bytes, tuple[Worker, ...]] = {}


class Affinity:
    """The ring with bounded loads; `load_factor` is c, at least 1 (less counts as 1)."""

    __slots__ = ("_fleets", "_kept", "_latest", "_load_factor", "_rings")

    name: ClassVar[str] = "affinity"

    def __init__(self, load_factor: float = 1.25) -> None:
        self._load_factor = load_factor
        self._latest = _Fleet((), Ring())
        # By the id of the tuple; the entry holds the tuple itself, so no other object can have that id meanwhile.
        self._fleets: dict[int, _Fleet] = {}
        self._rings: list[Ring] = []
        self._kept = 0

    def pick(
        self,
        workers: "tuple[Worker, ...]",
        load: "Callable[[Worker], int]",
        request: "InferenceRequest",
    ) -> "tuple[Worker, str]":
        """Return the owner of the prefix, reason `affinity`, or, if that one is full, the next with reason `load`.

        >>> from pointsman.domain.request import InferenceRequest
        >>> from pointsman.domain.worker import Worker, load_of
        >>> fleet = tuple(Worker(name, model="m", http_address="127.0.0.1:8001") for name in "abcd")
        >>> request = InferenceRequest("m", "r1", prompt=b'"once"')
        >>> Affinity().pick(fleet, load_of, request)
        (<Worker d unified m routable load 0>, 'affinity')
        >>> fleet[3].in_flight = 3
        >>> Affinity().pick(fleet, load_of, request)
        (<Worker a unified m routable load 0>, 'load')
        """
        fleet = self._latest
        if workers is not fleet.workers:
            self._latest = fleet = self._fleet_of(workers)
        key = self._key_of(request)
        order = fleet.orders.get(key)
        if order is None:
            order = self._order_of(fleet, key)
        cap = self._cap_of(sum(map(load, workers)), len(workers))
        for worker in order:
            if load(worker) < cap:
                return worker, "affinity" if worker is order[0] else "load"
        fitting = {worker.id for worker in workers if load(worker) < cap}
        chosen = fleet.ring.clockwise(_key_position(key), fitting, 1)[0]
        return workers[_index_of(workers, chosen)], "load"

    def consider(
        self,
        workers: "tuple[Worker, ...]",
        load: "Callable[[Worker], int]",
        request: "InferenceRequest",
    ) -> Consideration:
        """Return the next pick; a score is a worker's place clockwise from the prefix, 0 for its owner.

        >>> from pointsman.domain.request import InferenceRequest
        >>> from pointsman.domain.worker import Worker, load_of
        >>> fleet = tuple(Worker(name, model="m", http_address="127.0.0.1:8001") for name in "abcd")
        >>> fleet[3].in_flight = 3
        >>> seen = Affinity().consider(fleet, load_of, InferenceRequest("m", "r1", prompt=b'"once"'))
        >>> seen.scores, seen.notes[3]
        ((1.0, 3.0, 2.0, 0.0), 'owner; full, the cap is 2')
        """
        ids = {worker.id for worker in workers}
        twin = copy(self)
        twin._latest, twin._fleets, twin._kept = _Fleet((), Ring()), {}, 0
        # A ring that has them all answers for them as it is; any other would be changed by the pick.
        twin._rings = [ring for ring in self._rings if all(name in ring for name in ids)]
        pick, reason = twin.pick(workers, load, request)
        position = place_of(self._key_of(request))
        order = twin._latest.ring.clockwise(position, ids, len(workers))
        places = {name: place for place, name in enumerate(order)}
        cap = self._cap_of(sum(map(load, workers)), len(workers))
        notes = []
        for worker in workers:
            words = ["owner"] if places[worker.id] == 0 else []
            if load(worker) >= cap:
                words.append(f"full, the cap is {cap}")
            notes.append("; ".join(words))
        return Consideration(
            pick=pick,
            reason=reason,
            scores=tuple([float(places[worker.id]) for worker in workers]),
            notes=tuple(notes),
            rule=f"the first clockwise from the prompt's beginning with a load below {cap} wins",
            repeatable=True,
        )

    def _key_of(self, request: "InferenceRequest") -> bytes:
        """Return what of a prompt is placed on the ring."""
        return request.prefix_key

    def _cap_of(self, total: int, n: int) -> int:
        """Return the load at which a worker is full; one of the `n` that hold `total` must stay below it."""
        return bounded_cap(total, n, self._load_factor)

    def _fleet_of(self, workers: "tuple[Worker, ...]") -> _Fleet:
        fleet = self._fleets.get(id(workers))
        if fleet is None:
            fleet = _Fleet(workers, self._covering([worker.id for worker in workers]))
            if len(self._fleets) >= TUPLES:
                del self._fleets[next(iter(self._fleets))]
            self._fleets[id(workers)] = fleet
        return fleet

    def _order_of(self, fleet: _Fleet, key: bytes) -> "tuple[Worker, ...]":
        workers = fleet.workers
        among = {worker.id for worker in workers}
        names = fleet.ring.clockwise(_key_position(key), among, min(len(workers), ORDER))
        order = tuple([workers[_index_of(workers, name)] for name in names])
        # Fleets that changed stay for a while, so it is the keys of all that must be bounded.
        if self._kept >= KEYS:
            self._kept = 0
            for known in self._fleets.values():
                known.orders.clear()
        self._kept += 1
        fleet.orders[key] = order
        return order

    def _covering(self, ids: list[str]) -> Ring:
        # A ring of more members answers like the exact one, since those without a load are walked past. So a retry
        # without the failed workers and a worker that left cost nothing, and one that joined is added to the ring.
        for ring in self._rings:
            absent = [worker_id for worker_id in ids if worker_id not in ring]
            spare = len(ring) + len(absent) - len(ids)
            if spare <= SPARE and len(absent) <= len(ids) // 4:
                for worker_id in absent:
                    ring.add(worker_id)
                return ring
        ring = Ring(ids)
        self._rings.insert(0, ring)
        while len(self._rings) > 1 and sum(map(len, self._rings)) > MEMBERS:
            self._rings.pop()
        return ring


def _index_of(workers: "tuple[Worker, ...]", worker_id: str) -> int:
    return bisect_left(workers, worker_id, key=_ID)
