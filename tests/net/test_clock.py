"""The shared tick, on a clock that a test turns by hand."""

import asyncio
from collections.abc import Callable
from math import inf

import pytest

from pointsman.net.clock import Deadlines

pytestmark = pytest.mark.anyio


class Limit:
    """Notes when it expired, and may do something then."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.expirations: list[float] = []
        self.then: Callable[[], None] = lambda: None

    def expired(self, now: float) -> None:
        self.expirations.append(now)
        self.deadline = inf
        self.then()


async def test_a_deadline_expires_once_and_not_before() -> None:
    time = [0.0]
    deadlines = Deadlines(asyncio.get_running_loop(), lambda: time[0])
    early, late = Limit(1.0), Limit(2.0)
    deadlines.add(early)
    deadlines.add(late)
    for now in (0.9, 1.0, 1.9, 2.5, 3.0):
        time[0] = now
        deadlines._tick()
    assert (early.expirations, late.expirations) == ([1.0], [2.5])
    deadlines.close()


async def test_a_deadline_that_another_one_moved_in_the_same_tick_holds() -> None:
    """A connection whose idle time is over may just have been given a request, by a failover in this very tick."""
    deadlines = Deadlines(asyncio.get_running_loop(), lambda: 5.0)
    pair = [Limit(1.0), Limit(1.0)]

    def moves(other: Limit) -> None:
        other.deadline = 9.0

    pair[0].then = lambda: moves(pair[1])
    pair[1].then = lambda: moves(pair[0])
    for each in pair:
        deadlines.add(each)
    deadlines._tick()
    assert sorted(len(each.expirations) for each in pair) == [0, 1]
    deadlines.close()


async def test_one_that_fails_does_not_stop_the_clock() -> None:
    over = asyncio.Event()
    deadlines = Deadlines(asyncio.get_running_loop(), lambda: 5.0)
    bad, good = Limit(1.0), Limit(inf)

    def fails() -> None:
        good.deadline = 2.0
        raise RuntimeError

    bad.then, good.then = fails, over.set
    deadlines.add(bad)
    deadlines.add(good)
    with pytest.raises(RuntimeError):
        deadlines._tick()
    await over.wait()
    deadlines.close()


async def test_nothing_ticks_while_nothing_is_watched() -> None:
    deadlines = Deadlines(asyncio.get_running_loop(), lambda: 5.0)
    limit = Limit(inf)
    deadlines.add(limit)
    deadlines.discard(limit)
    deadlines.discard(limit)
    deadlines._tick()
    assert deadlines._timer is None
