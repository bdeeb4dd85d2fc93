"""Time for the sockets: one monotonic clock, and limits that cost nothing while they hold.

A connection does not arm and cancel a timer per request, let alone per chunk: it writes the moment at which it gives up
into its `deadline` attribute, and one shared tick looks at all of them. It need not even ask for the time: `soon` is
never earlier than now and at most one tick ahead. A limit is up to two ticks late, which no limit of a gateway
minds, and 10,000 connections cost about one hundredth of a core.
"""

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import Protocol

__all__ = ["TICK_S", "Deadlines", "Limited", "monotonic"]

TICK_S = 0.1


class Limited(Protocol):
    """Something that gives up at `deadline`, seconds of the monotonic clock, `inf` for never."""

    deadline: float

    def expired(self, now: float) -> None:
        """Give up, or set a later deadline."""


class Deadlines:
    """Watches the deadlines of connections; ticks only while there are any.

    `soon` is what deadlines are counted from while anything is watched: the moment of the next tick.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, now: Callable[[], float] = monotonic
    ) -> None:
        self.now = now
        self.soon = now() + TICK_S
        self._loop = loop
        self._watched: set[Limited] = set()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, limited: Limited) -> None:
        """Watch until `discard`."""
        self._watched.add(limited)
        if self._timer is None:
            self.soon = self.now() + TICK_S
            self._timer = self._loop.call_later(TICK_S, self._tick)

    def discard(self, limited: Limited) -> None:
        """Watch no longer; unknown ones are no error."""
        self._watched.discard(limited)

    def close(self) -> None:
        """Stop ticking and forget everything."""
        self._watched.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        # Armed first: whatever one of them does, the others stay watched.
        self._timer = self._loop.call_later(TICK_S, self._tick) if self._watched else None
        now = self.now()
        self.soon = now + TICK_S
        for limited in [each for each in self._watched if each.deadline <= now]:
            # What an earlier one did may have given it another deadline.
            if limited.deadline <= now:
                limited.expired(now)
