"""What policies that count tokens share: how many each worker has, and which workers have the least.

The tokens of this gateway's own requests are what the ledger counts (`Worker.active_tokens`, `Worker.pending_tokens`).
Of other gateways' requests only the engine's queue tells, and each of those counts as `QUEUED_TOKENS`. A queue is
that of others as far as it is longer than what this gateway has in flight there, so nothing is counted twice.

These loops are the cost of a pick with a thousand workers, so they call nothing but for a worker with others' queue:
its condition stands in each of them.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pointsman.domain.worker import Worker

__all__ = ["QUEUED_TOKENS", "lightest", "others_tokens", "pending_loads", "those_at"]

QUEUED_TOKENS = 1024
"""What a waiting request of another gateway is thought to have: the mean prompt that SMG assumes."""


def others_tokens(worker: "Worker") -> int:
    """Return what others have waiting at a worker whose queue is longer than what this gateway has in flight there.

    >>> from pointsman.domain.worker import Worker
    >>> a = Worker("a", model="m", http_address="127.0.0.1:8001", queue_depth=3)
    >>> a.in_flight = 2
    >>> others_tokens(a)
    1024
    """
    return (worker.queue_depth - worker.in_flight) * QUEUED_TOKENS


def pending_loads(workers: "Sequence[Worker]") -> list[float]:
    """Return for each worker the tokens that wait to be computed there.

    >>> from pointsman.domain.worker import Worker
    >>> a = Worker("a", model="m", http_address="127.0.0.1:8001", queue_depth=1)
    >>> a.pending_tokens = 70
    >>> pending_loads((a,))
    [1094]
    """
    return [
        worker.pending_tokens
        if worker.queue_depth <= worker.in_flight
        else worker.pending_tokens + others_tokens(worker)
        for worker in workers
    ]


def lightest(
    workers: "tuple[Worker, ...]", costs: Sequence[float]
) -> "tuple[float, tuple[Worker, ...]]":
    """Return the least cost and the workers that have it, in their order; `costs` is parallel to `workers` (not empty).

    >>> from pointsman.domain.worker import Worker
    >>> fleet = tuple(Worker(name, model="m", http_address="127.0.0.1:8001") for name in "abc")
    >>> least, having = lightest(fleet, (2, 1, 1))
    >>> least, [worker.id for worker in having]
    (1, ['b', 'c'])
    """
    least = min(costs)
    return least, those_at(least, workers, costs)


def those_at(
    cost: float, workers: "tuple[Worker, ...]", costs: Sequence[float]
) -> "tuple[Worker, ...]":
    """Return the workers that have a cost which at least one of them has, in their order.

    >>> from pointsman.domain.worker import Worker
    >>> fleet = tuple(Worker(name, model="m", http_address="127.0.0.1:8001") for name in "abc")
    >>> [worker.id for worker in those_at(2, fleet, (2, 1, 2))]
    ['a', 'c']
    """
    equals = costs.count(cost)
    if equals == 1:
        return (workers[costs.index(cost)],)
    if equals == len(workers):
        return workers
    return tuple([worker for worker, each in zip(workers, costs, strict=True) if each == cost])
