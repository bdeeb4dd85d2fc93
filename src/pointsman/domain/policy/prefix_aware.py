"""What policies that ask a prefix index share: the placement that fills it, and the cheapest worker.

A placement tells the ledger how many tokens of a prompt a worker has to compute, those of which the index did not know
that it has them. From then on the index believes that it has the whole prompt. Picking and considering only read.

The decision itself is each policy's own, in its file.
"""

from itertools import chain
from math import inf
from operator import attrgetter
from typing import TYPE_CHECKING

from pointsman.domain.placement import Placement
from pointsman.domain.policy.consideration import Consideration
from pointsman.domain.policy.least_outstanding import LeastOutstanding
from pointsman.domain.policy.tokens import those_at

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pointsman.domain.prefix_index import Group, PrefixIndex
    from pointsman.domain.request import InferenceRequest
    from pointsman.domain.worker import Worker

__all__ = ["PrefixAware", "cached_tokens", "ties_of"]

_ID = attrgetter("id")


def cached_tokens(request: "InferenceRequest", depth: int) -> int:
    """Return how many tokens of a prompt its first `depth` blocks have, never more than the prompt has.

    >>> from pointsman.domain.request import InferenceRequest
    >>> cached_tokens(InferenceRequest.of_blocks("m", "r1", (7, 8), 1000, 512), 1)
    512
    """
    return min(depth * request.block_tokens, request.prompt_tokens)


def ties_of(rank: "Callable[[str], int] | None") -> str:
    """Return what decides among equals, for the rule of an explanation.

    >>> ties_of(None)
    'the lowest load, then the smallest id, among equals'
    """
    order = "the smallest id" if rank is None else "this process's own order"
    return f"the lowest load, then {order}, among equals"


class PrefixAware:
    """The common part: an `index`, and the least loaded of equals (of these the smallest id, or `rank`)."""

    __slots__ = ("_least", "_rank", "index")

    def __init__(self, index: "PrefixIndex", rank: "Callable[[str], int] | None" = None) -> None:
        self.index = index
        self._rank = rank
        self._least = LeastOutstanding(rank)

    def placed(self, worker: "Worker", request: "InferenceRequest", now: float) -> Placement:
        """Count `request` as sent to `worker`, and believe from now on that its prompt is cached there.

        >>> from pointsman.domain.prefix_index import PrefixIndex
        >>> from pointsman.domain.request import InferenceRequest
        >>> from pointsman.domain.worker import Worker
        >>> policy = PrefixAware(PrefixIndex(1024, 60.0))
        >>> a = Worker("a", model="m", http_address="127.0.0.1:8001")
        >>> request = InferenceRequest.of_blocks("m", "r1", (7, 8), 1100, 512)
        >>> [policy.placed(a, request, now).uncached_tokens for now in (1.0, 2.0)]
        [1100, 76]
        """
        cached = self._cached(request, worker)
        self.index.insert(worker, request.blocks, now, request.block_tokens)
        return Placement(worker, request.prompt_tokens, request.prompt_tokens - cached, now)

    def left(self, worker: "Worker") -> None:
        """Forget what a worker that is gone had cached."""
        self.index.purge(worker)

    def _cached(self, request: "InferenceRequest", worker: "Worker") -> int:
        """Return how many tokens of a prompt one worker has."""
        found = self.index.match(request.blocks, (worker,))
        return cached_tokens(request, found[0][1]) if found else 0

    def _cheapest(
        self,
        workers: "tuple[Worker, ...]",
        reached: "Sequence[tuple[int, Group]]",
        load: "Callable[[Worker], int]",
        request: "InferenceRequest",
        costs: "Sequence[float]",
        credit: float = 1.0,
    ) -> "tuple[Worker, str]":
        """Return the worker of the lowest cost; reason `affinity` if it has some of the prompt, else `load`.

        `costs` are those with nothing cached, parallel to `workers`; a token that is costs `credit` (0 or more) less.
        `reached` is what the index says of `workers`.
        """
        floor = min(costs)
        least, equals = self._cheapest_having(workers, reached, request, costs, floor, credit)
        if floor < least:
            return self._lightest(those_at(floor, workers, costs), load, request), "load"
        return self._lightest(equals, load, request), "affinity"

    def _cheapest_having(
        self,
        workers: "tuple[Worker, ...]",
        reached: "Sequence[tuple[int, Group]]",
        request: "InferenceRequest",
        costs: "Sequence[float]",
        floor: float,
        credit: float = 1.0,
    ) -> "tuple[float, tuple[Worker, ...]]":
        """Return the lowest cost of those that have some of the prompt, and who of them has it; `floor` is that of all.

        Who is in a group and has more than it is judged too dear there, so it never wins by that. As soon as not even
        the cheapest of all could win with what a group has, nobody can with that or less.
        """
        least = inf
        won: list[tuple[float, tuple[Worker, ...], Sequence[float]]] = []
        for depth, group in reached:
            gain = credit * cached_tokens(request, depth)
            if floor - gain > least:
                break
            if len(group) == len(workers):
                lowest, among, having = floor, workers, costs
            else:
                having = group.of(costs)
                lowest, among = min(having), ()
            cost = lowest - gain
            if cost <= least:
                if cost < least:
                    won.clear()
                won.append((lowest, among or group.workers, having))
                least = cost
        equals = [those_at(*each) for each in won]
        return least, equals[0] if len(equals) == 1 else tuple(sorted(chain(*equals), key=_ID))

    def _lightest(
        self,
        equals: "tuple[Worker, ...]",
        load: "Callable[[Worker], int]",
        request: "InferenceRequest",
    ) -> "Worker":
        return equals[0] if len(equals) == 1 else self._least.pick(equals, load, request)[0]

    def _consider(
        self,
        workers: "tuple[Worker, ...]",
        pick: "tuple[Worker, str]",
        costs: "Sequence[float]",
        request: "InferenceRequest",
        rule: str,
    ) -> Consideration:
        """Return an explanation whose notes say what each worker has of the prompt."""
        depths = dict(self.index.match(request.blocks, workers))
        return Consideration(
            pick=pick[0],
            reason=pick[1],
            scores=tuple([float(cost) for cost in costs]),
            notes=tuple(
                [
                    f"has {cached_tokens(request, depths[worker])} of {request.prompt_tokens} tokens"
                    if worker in depths
                    else ""
                    for worker in workers
                ]
            ),
            rule=f"{rule}; {ties_of(self._rank)}",
        )
