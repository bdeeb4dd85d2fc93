"""A request between the scheduler's thread and an event loop.

The scheduler tells its events on its own thread and must not be held up; whoever awaits them lives in a loop.
"""

import asyncio
import contextlib

from pointsman.engine import scheduler as sched

__all__ = ["Asked"]


class Asked:
    """A request, submitted from a running event loop.

    Raises:
        ValueError, QueueFull, Draining: as `Scheduler.submit` does.
    """

    def __init__(self, scheduler: sched.Scheduler, request: sched.Request) -> None:
        loop = asyncio.get_running_loop()
        self._scheduler = scheduler
        self._events: asyncio.Queue[sched.Event] = asyncio.Queue()

        def deliver(event: sched.Event) -> None:
            # The loop is closed when the server stopped without waiting: then nobody listens any more.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._events.put_nowait, event)

        self._generation = scheduler.submit(request, deliver)

    async def next(self) -> sched.Event:
        """The next event. After Finished, Prefilled or Failed there is none."""
        return await self._events.get()

    def cancel(self) -> None:
        """Stop generating; no event comes any more. Harmless at any time."""
        self._generation.cancel()
        self._scheduler.wake()
