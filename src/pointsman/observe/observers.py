"""One observer for the data plane, made of those that are on.

What is off is not asked: the list of those who hear of a request is made once, and where it has one member the data
plane calls that one directly.
"""

from collections.abc import Callable
from typing import Protocol

from pointsman.flow.exchange import Exchange
from pointsman.observe.access import Access
from pointsman.observe.metrics import Metrics

__all__ = ["Observers", "Recorder"]


class Recorder(Protocol):
    """Hears of each request that is over."""

    def finished(self, x: Exchange) -> None:
        """Hear of a request to an engine that is over."""


class Observers:
    """Hands events on to the metrics, and the requests that are over also to what else is there."""

    def __init__(
        self,
        metrics: Metrics,
        *,
        recording: Recorder | None = None,
        decisions: Recorder | None = None,
        access: Access | None = None,
        tracer: Recorder | None = None,
    ) -> None:
        self.stale_resend = metrics.stale_resend
        self.pool_wait = metrics.pool_wait
        self.hold_ended = metrics.hold_ended
        self.opened = metrics.opened
        self.closed = metrics.closed
        self.fault = metrics.fault
        self.finished = metrics.finished
        self.answered = metrics.answered
        # Decisions are kept without the prompts, which the recording has to see before.
        others = [each for each in (recording, decisions, access, tracer) if each is not None]
        self._all: tuple[Callable[[Exchange], None], ...] = (
            metrics.finished,
            *(each.finished for each in others),
        )
        if others:
            self.finished = self._finished
        if access is not None:
            self._counted = metrics.answered
            self._written = access.answered
            self.answered = self._answered

    def _finished(self, x: Exchange) -> None:
        for each in self._all:
            each(x)

    def _answered(
        self, method: str, path: str, status: int, seconds: float, error: str = ""
    ) -> None:
        self._counted(method, path, status, seconds, error)
        self._written(method, path, status, seconds, error)
