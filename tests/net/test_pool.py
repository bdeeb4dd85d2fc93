"""One lane to a real listener: connections that close on their way, and askers that leave at any moment."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from pointsman.domain.worker import Worker
from pointsman.flow.effects import Lost, Why
from pointsman.net.clock import Deadlines, Limited
from pointsman.net.limits import UpstreamLimits
from pointsman.net.observer import Silent
from pointsman.net.pool import Lane, Pool
from pointsman.net.upstream import Upstream
from pointsman.testing.origin import Origin, dead_address

pytestmark = pytest.mark.anyio


class Counts(Silent):
    """Counts connections as the metrics do."""

    def __init__(self) -> None:
        self.open = 0

    def opened(self, side: str) -> None:
        self.open += 1

    def closed(self, side: str) -> None:
        self.open -= 1


class Asker:
    """Somebody who asks for a connection, and what became of that."""

    def __init__(self) -> None:
        self.told = asyncio.Event()
        self.upstream: Upstream | None = None
        self.lost: Lost | None = None

    def connected(self, upstream: Upstream) -> None:
        assert not self.told.is_set(), "an asker hears once"
        self.upstream = upstream
        self.told.set()

    def unreachable(self, lost: Lost) -> None:
        assert not self.told.is_set(), "an asker hears once"
        self.lost = lost
        self.told.set()


async def turns(count: int) -> None:
    """Let the loop go round, so that what is scheduled now has run."""
    for _ in range(count):
        turn = asyncio.Event()
        asyncio.get_running_loop().call_soon(turn.set)
        await turn.wait()


class Watched(Deadlines):
    """Lets a test act at the moment when a connection is made."""

    then: Callable[[], object] | None = None

    def add(self, limited: Limited) -> None:
        super().add(limited)
        if self.then is not None:
            self.then()


@asynccontextmanager
async def a_lane(address: str, connections: int) -> AsyncIterator[tuple[Lane, Pool, Counts]]:
    deadlines = Watched(asyncio.get_running_loop())
    counts = Counts()
    pool = Pool(UpstreamLimits(connections=connections), deadlines, counts)
    try:
        yield pool.lane(Worker("a", model="m", http_address=address)), pool, counts
    finally:
        pool.close()
        deadlines.close()


async def connected(lane: Lane) -> Upstream:
    asker = Asker()
    lane.connect(asker)
    await asker.told.wait()
    assert asker.upstream is not None
    return asker.upstream


async def test_a_freed_connection_that_closes_on_its_way_is_not_handed_over() -> None:
    async with Origin() as origin, a_lane(origin.address, 1) as (lane, _, counts):
        first = await connected(lane)
        waiting = Asker()
        lane.connect(waiting)
        await turns(2)
        lane.give(first)
        first.abort()  # before the one that waits has run
        await waiting.told.wait()
        assert waiting.upstream is not None
        assert not waiting.upstream.closing
        assert (lane.open, counts.open) == (1, 1)


@pytest.mark.parametrize("closes", [False, True], ids=["freed", "closed"])
async def test_what_one_that_leaves_was_about_to_get_goes_to_the_next(closes: bool) -> None:
    async with Origin() as origin, a_lane(origin.address, 1) as (lane, _, counts):
        first = await connected(lane)
        leaving, staying = Asker(), Asker()
        task = lane.connect(leaving)
        lane.connect(staying)
        await turns(2)
        if closes:
            first.discard()
        else:
            lane.give(first)
        task.cancel()
        await staying.told.wait()
        assert not leaving.told.is_set()
        assert staying.upstream is not None
        assert (lane.open, counts.open) == (1, 1)


async def test_one_that_leaves_while_connecting_is_counted_out_once() -> None:
    """After any number of turns of the loop: before the connection is begun, under way, and there."""
    async with Origin() as origin, a_lane(origin.address, 0) as (lane, _, counts):
        for count in range(12):
            asker = Asker()
            task = lane.connect(asker)
            await turns(count)
            task.cancel()
            if asker.upstream is not None:
                asker.upstream.abort()
            await turns(12)
            assert (lane.open, counts.open) == (0, 0), count
            assert not lane.connecting


async def test_one_that_leaves_as_its_connection_is_made_is_counted_out_once() -> None:
    async with Origin() as origin, a_lane(origin.address, 0) as (lane, pool, counts):
        assert isinstance(pool.deadlines, Watched)
        asker = Asker()
        task = lane.connect(asker)
        pool.deadlines.then = task.cancel
        await origin.left(1)
        await turns(5)
        assert (lane.open, counts.open) == (0, 0)
        assert not asker.told.is_set()
        assert not pool.deadlines._watched


async def test_a_newcomer_that_is_faster_than_one_that_waits_does_not_break_the_limit() -> None:
    async with Origin() as origin, a_lane(origin.address, 1) as (lane, _, counts):
        first = await connected(lane)
        waiting, newcomer = Asker(), Asker()
        lane.connect(waiting)
        await turns(2)
        lane.connect(newcomer)
        first.abort()
        first.discard()
        for asker in (newcomer, waiting):
            await asker.told.wait()
            assert (lane.open, counts.open) == (1, 1)
            assert asker.upstream is not None
            lane.give(asker.upstream)


async def test_a_refused_connection_is_counted_out_once() -> None:
    async with a_lane(dead_address(), 1) as (lane, _, counts):
        for _ in range(3):
            asker = Asker()
            lane.connect(asker)
            await asker.told.wait()
            assert asker.lost is not None
            assert asker.lost.why is Why.REFUSED
        assert (lane.open, counts.open) == (0, 0)


async def test_a_lane_that_closes_tells_everybody_once() -> None:
    async with Origin() as origin, a_lane(origin.address, 1) as (lane, pool, counts):
        idle = await connected(lane)
        waiting = [Asker() for _ in range(3)]
        for each in waiting:
            lane.connect(each)
        await turns(2)
        lane.give(idle)  # on its way to the first one that waits
        pool.leave(lane.worker)
        for each in waiting:
            assert each.lost is not None
            assert each.lost.why is Why.EVICTED
        await origin.left(1)
        await turns(2)
        assert (lane.open, counts.open) == (0, 0)
        assert pool.lane(lane.worker) is not lane


async def test_the_limit_holds_when_everybody_comes_at_once() -> None:
    async with Origin() as origin, a_lane(origin.address, 3) as (lane, _, counts):
        askers = [Asker() for _ in range(20)]
        for each in askers:
            lane.connect(each)
        for each in askers:
            await each.told.wait()
            assert each.upstream is not None
            assert lane.open <= 3
            # Every other connection closes, so that leave to open one is passed on as well.
            if askers.index(each) % 2:
                each.upstream.abort()
            else:
                lane.give(each.upstream)
        assert lane.open <= 3
        assert counts.open == lane.open
