"""What policies that count tokens share: how many each worker has, and which workers have the least.

The tokens of this gateway's own requests are what the ledger counts (`Worker.active_tokens`, `Worker.pending_tokens`).
Of other gateways' requests only the engine's queue tells, and each of those counts as `QUEUED_TOKENS`. A queue is
that of others as far as it is longer than what this gateway has in flight there, so nothing is counted twice.

These loops are the cost of a pick with a thousand workers, so they call nothing.
"""

from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pointsman.domain.worker import Worker

__all__ = ["QUEUED_TOKENS", "lightest", "pending_loads", "with_others"]

QUEUED_TOKENS = 1024
"""What a waiting request of another gateway is thought to have: the mean prompt that SMG assumes."""

_PENDING = attrgetter("pending_tokens")


def with_others(workers: "Sequence[Worker]", tokens: list[float]) -> list[float]:
    """Return `tokens`, which is parallel to `workers`, with the queues of others added in place.

    >>> from pointsman.domain.worker import Worker
    >>> a = Worker("a", model="m", http_address="127.0.0.1:8001", queue_depth=3)
    >>> a.in_flight = 2
    >>> with_others((a,), [500])
    [1524]
    """
    for index, worker in enumerate(workers):
        if worker.queue_depth > worker.in_flight:
            tokens[index] += (worker.queue_depth - worker.in_flight) * QUEUED_TOKENS
    return tokens


def pending_loads(workers: "Sequence[Worker]") -> list[float]:
    """Return for each worker the tokens that wait to be computed there.

    >>> from pointsman.domain.worker import Worker
    >>> a = Worker("a", model="m", http_address="127.0.0.1:8001", queue_depth=1)
    >>> a.pending_tokens = 70
    >>> pending_loads((a,))
    [1094]
    """
    return with_others(workers, list(map(_PENDING, workers)))


def lightest(workers: "tuple[Worker, ...]", costs: Sequence[float]) -> "tuple[Worker, ...]":
    """Return the workers whose cost is the least, in their order; `costs` is parallel to `workers` (not empty).

    >>> from pointsman.domain.worker import Worker
    >>> fleet = tuple(Worker(name, model="m", http_address="127.0.0.1:8001") for name in "abc")
    >>> [worker.id for worker in lightest(fleet, (2, 1, 1))]
    ['b', 'c']
    """
    least = min(costs)
    equals = costs.count(least)
    if equals == 1:
        return (workers[costs.index(least)],)
    if equals == len(workers):
        return workers
    return tuple([worker for worker, cost in zip(workers, costs, strict=True) if cost == least])
