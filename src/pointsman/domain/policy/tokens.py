"""What policies that count tokens share: how many each worker has, and which workers have the least.

The tokens of this gateway's own requests are what the ledger counts (`Worker.active_tokens`, `Worker.pending_tokens`).
Of other gateways' requests only the engine's queue tells, and each of those counts as `QUEUED_TOKENS`. A queue is
that of others as far as it is longer than what this gateway has in flight there, so nothing is counted twice.

These loops are the cost of a pick with a thousand workers: hence one expression for all workers, and no call in it.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pointsman.domain.worker import Worker

__all__ = ["QUEUED_TOKENS", "lightest", "token_loads"]

QUEUED_TOKENS = 1024
"""What a waiting request of another gateway is thought to have: the mean prompt that SMG assumes."""


def token_loads(workers: "Sequence[Worker]", *, active: float, pending: float) -> list[float]:
    """Return for each worker `active` x its active + `pending` x its pending tokens + the queue of others.

    >>> from pointsman.domain.worker import Worker
    >>> a = Worker("a", model="m", http_address="127.0.0.1:8001", queue_depth=3)
    >>> a.in_flight, a.active_tokens, a.pending_tokens = 2, 500, 70
    >>> token_loads((a,), active=1, pending=0), token_loads((a,), active=0, pending=1)
    ([1524], [1094])
    """
    return [
        active * worker.active_tokens
        + pending * worker.pending_tokens
        + (
            (queued := worker.queue_depth)
            and (queued > (own := worker.in_flight))
            and (queued - own) * QUEUED_TOKENS
        )
        for worker in workers
    ]


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
