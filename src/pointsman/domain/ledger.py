"""The gateway's own count of requests in flight, as leases on workers.

A lease is taken before an attempt is sent and closed when the attempt is over, however it ended. It holds the `Worker`
object and not the id: a request that began on one life of an engine can never change the count of the next life.
Nothing else may write `Worker.in_flight`.

Where the policy has said what the prompt costs the worker, the lease has that `Placement` and ends it, too.
"""

from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import TracebackType

    from pointsman.domain.placement import Placement
    from pointsman.domain.worker import Worker

__all__ = ["Lease"]


class Lease:
    """One request in flight on one worker, from its making until `close`.

    Usable as a context manager. Closing twice is the same as closing once.

    >>> from pointsman.domain.worker import Worker
    >>> worker = Worker("a", model="m", http_address="127.0.0.1:8000")
    >>> with Lease(worker):
    ...     worker.in_flight
    1
    >>> worker.in_flight
    0
    """

    __slots__ = ("_open", "placement", "worker")

    def __init__(self, worker: "Worker", placement: "Placement | None" = None) -> None:
        worker.in_flight += 1
        self.worker = worker
        self.placement = placement
        self._open = True

    def began(self, now: float) -> None:
        """Note that an answer that stands has arrived, at `now` in monotonic seconds."""
        if self.placement is not None:
            self.placement.began(now)

    def relieved(self) -> None:
        """Note that another worker computes the prompt, and hands it over to this one."""
        if self.placement is not None:
            self.placement.relieved()

    def close(self) -> None:
        """Take the request off the worker's count. Idempotent."""
        if self._open:
            self._open = False
            self.worker.in_flight -= 1
            if self.placement is not None:
                self.placement.ended()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: "TracebackType | None",
    ) -> None:
        self.close()
