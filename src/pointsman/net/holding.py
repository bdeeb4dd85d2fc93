"""Requests that nobody can take yet: held for a while, and let go in the order in which they came.

A fleet that was scaled to zero comes back within seconds, and a client that waits is better off than one that is
refused and asks again. Nothing of an answer is sent meanwhile, so every end is open: any worker, or a proper 503.

It knows neither workers nor routes: each request brings along what tells whether it can go on, and is asked that when
the registry says that something changed. While nobody is held, a change costs one look at an empty collection. There is
no timer per request: the shared tick watches how long each may wait.
"""

from collections.abc import Callable

from pointsman.flow.effects import Held, Hold
from pointsman.net.clock import Deadlines
from pointsman.net.observer import Observer

__all__ = ["ABANDONED", "DRAINED", "REFUSED", "ROUTED", "TIMED_OUT", "Holding"]

ROUTED = "routed"
"""The wait was over: there is a worker, or the request turned out to be one that no worker will ever take."""

TIMED_OUT = "timed_out"
REFUSED = "refused"
"""There was no room to wait, or the gateway was draining already."""

DRAINED = "drained"
"""The gateway began to drain."""

ABANDONED = "abandoned"
"""The client left, or the gateway stopped."""


class Holding:
    """The requests of a gateway that wait, `room` of them (1 or more) at most.

    `soon` lets something be called by the loop as soon as it can, in the order given.
    """

    def __init__(
        self,
        deadlines: Deadlines,
        observer: Observer,
        soon: Callable[[Callable[[], None]], object],
    ) -> None:
        self.room = 1
        self._deadlines = deadlines
        self._observer = observer
        self._soon = soon
        self._waiting: dict[_Waiting, None] = {}
        self._looking = False
        self._closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    def hold(self, command: Hold, tell: Callable[[Held], None]) -> Callable[[], None] | None:
        """Let a request wait, and return what gives that up. None: there is no room for it."""
        if self._closed or len(self._waiting) >= self.room:
            self._observer.hold_ended(REFUSED)
            return None
        waiting = _Waiting(self, command, tell)
        self._waiting[waiting] = None
        self._deadlines.add(waiting)

        def give_up() -> None:
            self._end(waiting, ABANDONED)

        return give_up

    def changed(self) -> None:
        """Hear that something changed about who may take requests. It may not be complete yet: looked at soon."""
        if self._waiting and not self._looking:
            self._looking = True
            self._soon(self._look)

    def close(self) -> None:
        """Tell all who wait that it was in vain, and hold nobody any more."""
        self._closed = True
        for waiting in tuple(self._waiting):
            self._tell(waiting, DRAINED)

    def _look(self) -> None:
        self._looking = False
        # Each in a call of its own: what goes wrong with one of them is not to hold up the others.
        for waiting in self._waiting:
            self._soon(waiting.look)

    def _look_at(self, waiting: "_Waiting") -> None:
        if waiting not in self._waiting:
            return
        ready = True
        try:
            ready = waiting.command.ready(self._deadlines.now())
        finally:
            # What went wrong with the look goes wrong in the request as well, which is told to go on.
            if ready:
                self._tell(waiting, ROUTED)

    def _tell(self, waiting: "_Waiting", outcome: str) -> None:
        if self._end(waiting, outcome):
            waiting.tell(Held(ready=outcome == ROUTED))

    def _end(self, waiting: "_Waiting", outcome: str) -> bool:
        """Let one wait no longer. False: it did not."""
        if waiting not in self._waiting:
            return False
        del self._waiting[waiting]
        self._deadlines.discard(waiting)
        self._observer.hold_ended(outcome)
        return True


class _Waiting:
    """One request that waits, at most until `deadline`."""

    __slots__ = ("_holding", "command", "deadline", "tell")

    def __init__(self, holding: Holding, command: Hold, tell: Callable[[Held], None]) -> None:
        self._holding = holding
        self.command = command
        self.tell = tell
        self.deadline = command.until

    def look(self) -> None:
        """See whether the wait is over."""
        self._holding._look_at(self)

    def expired(self, now: float) -> None:
        """Wait no longer."""
        self._holding._tell(self, TIMED_OUT)
