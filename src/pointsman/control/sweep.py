"""Evicts silent workers when no request comes along to do it.

The registry is exact without help: every routing decision calls `expire` first. Without traffic
nobody asks, and dead workers would stay in the metrics and keep their connections. The sweeper
wakes at the moment the next worker is due, and not at all while none can be.

It polls nothing and knows no clock: both come from outside.
"""

import math
from collections.abc import Callable
from typing import Protocol

from pointsman.domain.registry import Registry
from pointsman.domain.worker import Worker

__all__ = ["Sweeper", "Timer"]

SHORTEST_S = 0.001
"""Least time until the next look: `next_expiry` may be a little early, and that must not spin."""


class Timer(Protocol):
    """What a scheduler returns; `asyncio.TimerHandle` is one."""

    def cancel(self) -> None:
        """Forget the call."""


class Sweeper:
    """Calls `registry.expire` whenever a worker is due.

    `now` and the delay of `call_later` are in seconds of one monotonic clock;
    `asyncio.AbstractEventLoop` has both.
    """

    def __init__(
        self,
        registry: Registry,
        now: Callable[[], float],
        call_later: Callable[[float, Callable[[], None]], Timer],
    ) -> None:
        self._registry = registry
        self._now = now
        self._call_later = call_later
        self._timer: Timer | None = None

    def start(self) -> None:
        """Sweep now, and from now on whenever a worker is due."""
        self._registry.on_join.append(self._joined)
        self._sweep()

    def stop(self) -> None:
        """Sweep no more."""
        self._registry.on_join.remove(self._joined)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _sweep(self) -> None:
        self._timer = None
        self._registry.expire(self._now())
        self._arm()

    def _arm(self) -> None:
        due = self._registry.next_expiry
        if due < math.inf:
            self._timer = self._call_later(max(due - self._now(), SHORTEST_S), self._sweep)

    def _joined(self, worker: Worker) -> None:
        # A timer that runs fires early enough: whoever it waits for is due before the newcomer.
        if self._timer is None:
            self._arm()
