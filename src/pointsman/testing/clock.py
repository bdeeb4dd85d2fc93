"""Time that moves when a test says so, for code that is given its clock and its sleep: `Clock`."""

import asyncio

__all__ = ["Clock"]

STEPS = 50
"""How many turns of the loop everything has that a sleeper does when it wakes up."""


class Clock:
    """A monotonic clock in seconds, and a sleep by it. Nobody wakes before `advance`."""

    def __init__(self) -> None:
        self.time = 0.0
        self._sleepers: list[tuple[float, asyncio.Event]] = []

    def now(self) -> float:
        """Return the time."""
        return self.time

    async def sleep(self, seconds: float) -> None:
        """Return when the time has moved that far. 0 is one turn of the loop."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        sleeper = (self.time + seconds, asyncio.Event())
        self._sleepers.append(sleeper)
        try:
            await sleeper[1].wait()
        finally:
            self._sleepers.remove(sleeper)

    async def advance(self, seconds: float) -> None:
        """Move the time, and wake whoever is due on the way, each at its own moment."""
        await self.settle()
        end = self.time + seconds
        while due := [
            (at, woken) for at, woken in self._sleepers if at <= end and not woken.is_set()
        ]:
            self.time, woken = min(due, key=lambda each: each[0])
            woken.set()
            await self.settle()
        self.time = end

    async def settle(self) -> None:
        """Let everything happen that needs no time."""
        for _ in range(STEPS):
            await asyncio.sleep(0)
