"""The sweeper, with a clock and a scheduler that tests turn by hand."""

from collections.abc import Callable

from pointsman.control.sweep import Sweeper
from pointsman.domain.registry import Registry, WorkerReport
from pointsman.domain.worker import Worker


class Call:
    """A call that waits for its moment."""

    def __init__(self, at: float, call: Callable[[], None]) -> None:
        self.at, self.call, self.cancelled = at, call, False

    def cancel(self) -> None:
        self.cancelled = True


class Clock:
    """Time that moves when it is told to, and runs what is due on the way."""

    def __init__(self) -> None:
        self.time = 0.0
        self.waiting: list[Call] = []
        self.wakes = 0

    def now(self) -> float:
        return self.time

    def call_later(self, delay: float, call: Callable[[], None]) -> Call:
        assert delay > 0
        self.waiting.append(Call(self.time + delay, call))
        return self.waiting[-1]

    def advance_to(self, time: float) -> None:
        while due := [call for call in self.waiting if call.at <= time and not call.cancelled]:
            first = min(due, key=lambda call: call.at)
            self.waiting.remove(first)
            self.time = first.at
            self.wakes += 1
            first.call()
        self.waiting = [call for call in self.waiting if not call.cancelled]
        self.time = time


def fleet() -> tuple[Clock, Registry, Sweeper, list[tuple[float, str]]]:
    clock, registry = Clock(), Registry()
    left: list[tuple[float, str]] = []
    registry.on_leave.append(lambda worker: left.append((clock.time, worker.id)))
    sweeper = Sweeper(registry, clock.now, clock.call_later)
    sweeper.start()
    return clock, registry, sweeper, left


def beat(registry: Registry, clock: Clock, worker_id: str) -> None:
    registry.beat(WorkerReport(worker_id, "h:1", "m"), clock.time)


def test_r01_a_silent_worker_leaves_an_idle_gateway_at_six_seconds() -> None:
    clock, registry, _, left = fleet()
    beat(registry, clock, "a")
    clock.advance_to(5.999)
    assert left == []
    clock.advance_to(6.002)
    assert [worker_id for _, worker_id in left] == ["a"]
    assert 6.0 <= left[0][0] <= 6.001
    assert registry.snapshot() == ()


def test_a_worker_that_beats_stays_and_costs_few_wakes() -> None:
    clock, registry, _, left = fleet()
    for second in range(0, 600, 2):
        clock.advance_to(float(second))
        beat(registry, clock, "a")
    assert left == []
    assert clock.wakes < 600
    clock.advance_to(620.0)
    assert [worker_id for _, worker_id in left] == ["a"]


def test_every_worker_leaves_at_its_own_time() -> None:
    clock, registry, _, left = fleet()
    for second, worker_id in enumerate("abc"):
        clock.advance_to(float(second))
        beat(registry, clock, worker_id)
    clock.advance_to(10.0)
    assert [(round(time), worker_id) for time, worker_id in left] == [(6, "a"), (7, "b"), (8, "c")]


def test_nothing_wakes_while_nobody_can_expire() -> None:
    clock, registry, _, _ = fleet()
    registry.add(Worker("s", model="m", http_address="h:1"))
    clock.advance_to(1000.0)
    assert clock.wakes == 0
    assert clock.waiting == []


def test_a_worker_that_joins_after_the_last_one_left_is_watched_again() -> None:
    clock, registry, _, left = fleet()
    beat(registry, clock, "a")
    clock.advance_to(100.0)
    assert clock.waiting == []
    beat(registry, clock, "b")
    clock.advance_to(200.0)
    assert [worker_id for _, worker_id in left] == ["a", "b"]


def test_a_worker_that_was_there_before_the_sweeper_is_watched() -> None:
    clock, registry = Clock(), Registry()
    beat(registry, clock, "a")
    Sweeper(registry, clock.now, clock.call_later).start()
    clock.advance_to(7.0)
    assert registry.snapshot() == ()


def test_a_stopped_sweeper_sweeps_no_more() -> None:
    clock, registry, sweeper, left = fleet()
    beat(registry, clock, "a")
    sweeper.stop()
    beat(registry, clock, "b")
    clock.advance_to(100.0)
    assert (left, clock.wakes) == ([], 0)


def test_stopping_an_idle_sweeper_is_fine() -> None:
    clock, registry, sweeper, _ = fleet()
    sweeper.stop()
    beat(registry, clock, "a")
    assert clock.waiting == []
