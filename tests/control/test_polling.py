"""The poller: a fleet of engines that are functions here, and a clock that the test moves."""

import asyncio
import gc
import logging
from collections.abc import Callable

import pytest

from pointsman.control.polling import Poller
from pointsman.dialect.engines import Probed
from pointsman.domain.registry import Registry, WorkerReport
from pointsman.domain.worker import Role, Worker
from pointsman.testing.clock import Clock

pytestmark = pytest.mark.anyio

LISTED = Probed(200, b'{"data":[{"id":"m"}]}')
REFUSED = Probed(0, b"", "connection refused")


def engine(id: str, *, model: str = "", interval_s: float = 2.0, timeout_s: float = 1.0) -> Worker:
    return Worker(
        id,
        model=model,
        http_address=f"{id}:8000",
        dialect="openai",
        static=True,
        polled=True,
        poll_interval_s=interval_s,
        poll_timeout_s=timeout_s,
    )


class Fleet:
    """A registry that is polled. `answers` has what each worker does when it is asked; `asked` are the times."""

    def __init__(self, *, random: Callable[[], float] = lambda: 0.5) -> None:
        self.clock = Clock()
        self.registry = Registry()
        self.answers: dict[str, Probed | Exception | None] = {}
        self.asked: list[tuple[float, str, str]] = []
        self.limits: set[float] = set()
        self.under_way = 0
        self.changed: list[tuple[str, bool]] = []
        self.faults = 0
        self.poller = Poller(
            self.registry,
            self.ask,
            now=self.clock.now,
            sleep=self.clock.sleep,
            random=random,
            miss_limit=3,
            hit_limit=2,
            on_change=lambda worker: self.changed.append((worker.id, worker.up)),
            on_fault=self.fault,
        )

    def fault(self) -> None:
        self.faults += 1

    def lists(self, *workers: Worker) -> None:
        self.registry.set_static(workers)

    def times(self, id: str) -> list[float]:
        return [at for at, asked, _ in self.asked if asked == id]

    def routable(self) -> list[str]:
        return [each.id for each in self.registry.routable("m", Role.UNIFIED)]

    async def ask(self, worker: Worker, path: str, timeout_s: float) -> Probed:
        self.asked.append((self.clock.time, worker.id, path))
        self.limits.add(timeout_s)
        answer = self.answers.get(worker.id, LISTED)
        if isinstance(answer, Exception):
            raise answer
        if answer is None:
            self.under_way += 1
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                self.under_way -= 1
        assert isinstance(answer, Probed)
        return answer


async def test_r14_nothing_waits_for_workers_that_are_not_there() -> None:
    fleet = Fleet()
    fleet.answers = {"a": REFUSED, "b": None}
    fleet.lists(engine("a"), engine("b"), engine("c"), engine("d"))
    fleet.poller.start()
    assert fleet.asked == []
    await fleet.clock.advance(0.2)
    assert fleet.routable() == ["c", "d"]
    # Those that appear later are taken as soon as they answer.
    fleet.answers = {}
    await fleet.clock.advance(3)
    assert fleet.routable() == ["a", "b", "c", "d"]
    await fleet.poller.stop()


@pytest.mark.parametrize("fault", [RuntimeError("no"), None, Probed(500), REFUSED])
async def test_r02_a_probe_that_fails_is_the_miss_of_its_worker_and_is_tried_again_for_ever(
    fault: Probed | Exception | None,
) -> None:
    """It may raise, hang, fail or be refused; all others are polled as if it were not there."""
    fleet = Fleet()
    fleet.answers["bad"] = fault
    fleet.lists(engine("bad"), engine("good"))
    fleet.poller.start()
    await fleet.clock.advance(200)
    assert fleet.routable() == ["good"]
    assert len(fleet.times("good")) == pytest.approx(100, abs=2)
    assert len(fleet.times("bad")) == pytest.approx(100, abs=2)
    fleet.answers.clear()
    await fleet.clock.advance(3)
    assert fleet.routable() == ["bad", "good"]
    assert fleet.faults == 0
    await fleet.poller.stop()


async def test_r02_a_probe_that_is_given_up_under_us_is_a_miss_too() -> None:
    fleet = Fleet()
    fleet.answers["a"] = REFUSED

    async def ask(worker: Worker, path: str, timeout_s: float) -> Probed:
        fleet.asked.append((0.0, worker.id, path))
        raise asyncio.CancelledError

    poller = Poller(
        fleet.registry, ask, now=fleet.clock.now, sleep=fleet.clock.sleep, random=lambda: 0.5
    )
    fleet.lists(engine("a"))
    poller.start()
    await fleet.clock.advance(10)
    assert len(fleet.asked) == 5
    assert fleet.registry.snapshot()[0].degraded == "models: given up"
    await poller.stop()


async def test_r02_what_an_exception_says_is_not_shown() -> None:
    fleet = Fleet()
    fleet.answers["a"] = ValueError("bad header: authorization: Bearer sk-secret")
    fleet.lists(engine("a"))
    fleet.poller.start()
    await fleet.clock.advance(1)
    assert fleet.registry.snapshot()[0].degraded == "models: ValueError"
    await fleet.poller.stop()


async def test_r02_a_fault_of_the_gateway_itself_is_a_miss_is_told_once_and_ends_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fleet = Fleet()
    unreadable = Worker("a", model="m", http_address="h:1", dialect="nobody", polled=True)
    fleet.lists(unreadable, engine("b"))
    fleet.poller.start()
    await fleet.clock.advance(60)
    assert fleet.routable() == ["b"]
    assert unreadable.degraded == "the gateway failed on what it said: KeyError"
    assert fleet.faults == 1
    assert [each.levelno for each in caplog.records].count(logging.ERROR) == 1
    await fleet.poller.stop()


async def test_r17_a_worker_that_left_is_not_asked_again() -> None:
    fleet = Fleet()
    fleet.answers["b"] = None
    fleet.lists(engine("a"), engine("b"), engine("c"))
    fleet.poller.start()
    await fleet.clock.advance(0.5)
    assert fleet.under_way == 1
    fleet.lists(engine("c"), engine("d"))
    await fleet.clock.settle()
    assert fleet.under_way == 0
    left = fleet.clock.time
    await fleet.clock.advance(20)
    fleet.lists(engine("d"))
    again = fleet.clock.time
    await fleet.clock.advance(20)
    assert max(fleet.times("a")) <= left
    assert max(fleet.times("b")) <= left
    assert left < max(fleet.times("c")) <= again
    assert max(fleet.times("d")) > again
    await fleet.poller.stop()


async def test_polling_that_ends_amid_a_round_leaves_no_exception_behind() -> None:
    loop, left = asyncio.get_running_loop(), list[object]()
    loop.set_exception_handler(lambda _, context: left.append(context))
    fleet = Fleet()
    fleet.answers = {"a": None}
    fleet.lists(engine("a"))
    fleet.poller.start()
    await fleet.clock.advance(0.5)
    assert fleet.under_way == 1
    await fleet.poller.stop()
    await fleet.clock.settle()
    gc.collect()
    assert (fleet.under_way, left) == (0, [])


async def test_r17_not_even_when_it_leaves_between_the_decision_to_ask_and_the_asking() -> None:
    fleet = Fleet()
    fleet.lists(engine("a"))
    fleet.poller.start()
    # The first round of the spread is due at 0.1 s; every turn of the loop around it is tried.
    for turns in range(12):
        fleet.lists(engine("a", model=f"n{turns}", interval_s=2 + turns / 100))
        await fleet.clock.settle()
        sleeping = asyncio.get_running_loop().create_task(fleet.clock.advance(0.2))
        for _ in range(50 + turns):
            await asyncio.sleep(0)
        before = len(fleet.asked)
        fleet.lists()
        await sleeping
        assert len(fleet.asked) == before
    await fleet.poller.stop()


async def test_a_worker_with_a_new_address_is_polled_there_from_the_beginning() -> None:
    fleet = Fleet()
    fleet.lists(engine("a"))
    fleet.poller.start()
    await fleet.clock.advance(1)
    assert fleet.routable() == ["a"]
    moved = engine("a")
    moved.http_address = "elsewhere:1"
    fleet.answers["a"] = REFUSED
    fleet.lists(moved)
    await fleet.clock.advance(1)
    assert fleet.registry.snapshot() == (moved,)
    assert fleet.routable() == []
    await fleet.poller.stop()


async def test_workers_that_send_heartbeats_and_those_that_are_only_listed_are_not_asked() -> None:
    fleet = Fleet()
    fleet.registry.beat(WorkerReport("beats", "h:1", "m"), 0.0)
    fleet.lists(Worker("listed", model="m", http_address="h:2", static=True))
    fleet.poller.start()
    await fleet.clock.advance(30)
    assert fleet.asked == []
    fleet.lists()
    fleet.registry.expire(30)
    assert fleet.registry.snapshot() == ()
    await fleet.poller.stop()


async def test_each_worker_has_its_own_interval_and_time_limit() -> None:
    fleet = Fleet()
    fleet.lists(
        engine("often", interval_s=0.5, timeout_s=0.25),
        engine("seldom", interval_s=30, timeout_s=5),
    )
    fleet.poller.start()
    await fleet.clock.advance(60)
    assert len(fleet.times("often")) == pytest.approx(120, abs=1)
    assert len(fleet.times("seldom")) == 2
    assert fleet.limits == {0.25, 5}
    await fleet.poller.stop()


async def test_a_black_hole_is_noticed_after_three_intervals_and_not_after_three_limits_more() -> (
    None
):
    fleet = Fleet()
    fleet.lists(engine("a", interval_s=2, timeout_s=2))
    fleet.poller.start()
    await fleet.clock.advance(10.1)
    fleet.answers["a"] = None
    assert fleet.routable() == ["a"]
    await fleet.clock.advance(10.5)
    assert fleet.routable() == []
    await fleet.poller.stop()


async def test_the_rounds_of_a_fleet_are_spread_and_stay_so() -> None:
    numbers = iter([step / 97 % 1 for step in range(100_000)])
    fleet = Fleet(random=lambda: next(numbers))
    fleet.lists(*(engine(f"w{n}") for n in range(20)))
    fleet.poller.start()
    await fleet.clock.advance(0.2)
    assert len({at for at, _, _ in fleet.asked}) == 20
    await fleet.clock.advance(60)
    gaps = [b - a for a, b in zip(fleet.times("w0"), fleet.times("w0")[1:], strict=False)]
    assert 1.8 <= min(gaps) < max(gaps) <= 2.2
    await fleet.poller.stop()


async def test_one_line_for_each_change_and_none_for_each_round(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "pointsman")
    fleet = Fleet()
    fleet.lists(engine("a", model="m"))
    fleet.poller.start()
    await fleet.clock.advance(60)
    fleet.answers["a"] = Probed(401)
    await fleet.clock.advance(60)
    fleet.answers["a"] = LISTED
    await fleet.clock.advance(60)
    fleet.answers["a"] = REFUSED
    await fleet.clock.advance(60)
    fleet.answers["a"] = Probed(404)
    await fleet.clock.advance(60)
    assert [each.getMessage() for each in caplog.records] == [
        "worker a (m) is up",
        "worker a (m) is degraded: models 401",
        "worker a (m) is not degraded any more",
        "worker a (a:8000) is down: models: connection refused",
        "worker a (m) is up, degraded: models 404",
    ]
    assert fleet.changed == [("a", True), ("a", True), ("a", True), ("a", False), ("a", True)]
    await fleet.poller.stop()


async def test_the_last_good_round_is_the_last_sign_of_life() -> None:
    fleet = Fleet()
    fleet.lists(engine("a"))
    fleet.poller.start()
    await fleet.clock.advance(1)
    seen = fleet.registry.snapshot()[0].last_heartbeat
    fleet.answers["a"] = REFUSED
    await fleet.clock.advance(30)
    assert fleet.registry.snapshot()[0].last_heartbeat == seen == pytest.approx(0.1)
    await fleet.poller.stop()


async def test_after_the_stop_nobody_is_asked_and_newcomers_are_left_alone() -> None:
    fleet = Fleet()
    fleet.answers["a"] = None
    fleet.lists(engine("a"))
    fleet.poller.start()
    await fleet.clock.advance(0.5)
    assert fleet.under_way == 1
    await fleet.poller.stop()
    assert fleet.under_way == 0
    count = len(fleet.asked)
    fleet.lists(engine("b"))
    await fleet.clock.advance(30)
    assert len(fleet.asked) == count
    fleet.poller.start()
    await fleet.clock.advance(1)
    assert fleet.times("b")
    await fleet.poller.stop()
