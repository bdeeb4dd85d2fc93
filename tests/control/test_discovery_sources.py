"""Several sources over one registry: what they find joins, what cannot be taken keeps nobody else away."""

import asyncio
import logging
import sys
from collections.abc import Callable

import pytest

from pointsman.control.discovery.found import Found
from pointsman.control.discovery.sources import Sources, SourceSpec
from pointsman.domain.registry import STATIC, Registry, WorkerReport
from pointsman.domain.worker import Role, Worker
from pointsman.testing.clock import Clock

pytestmark = pytest.mark.anyio


def found(*ids: str) -> list[Found]:
    return [Found(id, f"{id}:80") for id in ids]


def build(found: Found, credentials: bytes = b"") -> Worker:
    if "bad" in found.labels:
        raise ValueError(found.labels["bad"])
    if ":" not in found.address:
        raise ValueError("the port is missing")
    return Worker(
        found.id,
        model=found.labels.get("model", "m"),
        http_address=found.address,
        terminating=found.draining,
        credentials=credentials,
    )


class Script:
    """A source that finds what the test says. `runs` counts how often it began."""

    def __init__(self) -> None:
        self.runs = 0
        self.running = 0
        self.fails: Exception | None = None
        self.tell: Callable[[list[Found]], None] = lambda found: None

    async def run(self, found: Callable[[list[Found]], None]) -> None:
        self.runs += 1
        self.tell = found
        if self.fails is not None:
            raise self.fails
        self.running += 1
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self.running -= 1


class Fleet:
    """Two sources, `one` and `two`, that are configured as the test says."""

    def __init__(self, workers_max: int = 10_000) -> None:
        self.clock = Clock()
        self.registry = Registry(workers_max=workers_max)
        self.one, self.two = Script(), Script()
        self.left_out: list[str] = []
        self.faults = 0
        self.left: list[str] = []
        self.registry.on_leave.append(lambda worker: self.left.append(worker.id))
        self.sources = Sources(
            self.registry,
            sleep=self.clock.sleep,
            on_left_out=self.left_out.append,
            on_fault=self.fault,
        )

    def fault(self) -> None:
        self.faults += 1

    def spec(self, name: str, settings: str = "") -> SourceSpec:
        return SourceSpec(name, settings, lambda: getattr(self, name), build)

    async def configure(self, *specs: SourceSpec) -> None:
        self.sources.set(specs)
        await self.clock.settle()

    async def both(self) -> None:
        await self.configure(self.spec("one"), self.spec("two"))

    def ids(self) -> dict[str, list[str]]:
        ids: dict[str, list[str]] = {}
        for worker in self.registry.snapshot():
            ids.setdefault(worker.source, []).append(worker.id)
        return ids


async def test_what_sources_find_joins_and_what_they_find_no_more_leaves() -> None:
    fleet = Fleet()
    await fleet.both()
    fleet.one.tell(found("a", "b"))
    fleet.two.tell(found("c"))
    assert fleet.ids() == {"one": ["a", "b"], "two": ["c"]}
    stays = fleet.registry.snapshot()[1]
    fleet.one.tell(found("b"))
    assert fleet.ids() == {"one": ["b"], "two": ["c"]}
    assert fleet.registry.snapshot()[0] is stays
    fleet.one.tell([])
    assert fleet.ids() == {"two": ["c"]}
    await fleet.sources.stop()


async def test_r04_a_worker_that_its_source_calls_terminating_gets_nothing_more() -> None:
    """The stricter signal wins: whatever the engine's own health says, it gets no request."""
    fleet = Fleet()
    await fleet.both()
    fleet.one.tell(found("a", "b"))
    (a, b) = fleet.registry.routable("m", Role.UNIFIED)
    fleet.one.tell([Found("a", "a:80", draining=True), *found("b")])
    assert fleet.registry.routable("m", Role.UNIFIED) == (b,)
    assert fleet.registry.snapshot() == (a, b)
    fleet.one.tell(found("a", "b"))
    assert fleet.registry.routable("m", Role.UNIFIED) == (a, b)
    await fleet.sources.stop()


async def test_r02_a_worker_that_cannot_be_made_keeps_no_other_away(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fleet = Fleet()
    await fleet.both()
    bad = [
        Found("a", "a:80", {"bad": "role: no such role"}),
        Found("b", "no port"),
        Found("c c", "c:80"),
        Found("d" * 300, "d:80"),
    ]
    for _ in range(3):
        fleet.one.tell([*bad[:2], *found("good"), *bad[2:]])
    assert fleet.ids() == {"one": ["good"]}
    warned = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert len(warned) == 4
    assert warned[0] == "source one: worker 'a' is left out: role: no such role"
    assert all(len(each) < 1000 for each in warned)
    assert fleet.left_out == ["one"] * 4
    assert set(fleet.sources.left_out["one"]) == {each.id for each in bad}
    # What is put right is taken.
    fleet.one.tell(found("a", "good"))
    assert fleet.ids() == {"one": ["a", "good"]}
    assert fleet.sources.left_out == {"one": {}, "two": {}}
    await fleet.sources.stop()


async def test_r02_a_worker_that_was_taken_stays_as_it_was_while_it_makes_no_sense(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its key file may just be replaced. Where it moved, or is about to go, there is nothing to keep."""
    fleet = Fleet()
    await fleet.both()
    why = {"bad": "api_key_file: it is not there"}
    fleet.one.tell(found("a", "b"))
    before = fleet.registry.snapshot()
    for _ in range(3):
        fleet.one.tell([Found("a", "a:80", why), *found("b")])
        assert fleet.registry.snapshot() == before
    assert [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING] == [
        "source one: worker 'a' stays as it was: api_key_file: it is not there"
    ]
    fleet.one.tell([Found("a", "a:81", why), Found("b", "b:80", why, draining=True)])
    assert fleet.ids() == {}
    assert fleet.left_out == ["one", "one"]
    fleet.one.tell(found("a", "b"))
    assert fleet.ids() == {"one": ["a", "b"]}
    await fleet.sources.stop()


async def test_r02_an_id_of_somebody_else_is_left_out_and_taken_as_soon_as_it_is_free() -> None:
    fleet = Fleet()
    fleet.registry.set_static([Worker("listed", model="m", http_address="h:1")])
    fleet.registry.beat(WorkerReport("beats", "h:2", "m"), 0.0)
    await fleet.both()
    fleet.one.tell(found("a"))
    fleet.two.tell(found("a", "b", "beats", "listed"))
    assert fleet.ids() == {STATIC: ["listed"], "": ["beats"], "one": ["a"], "two": ["b"]}
    assert fleet.left_out == ["two"] * 3
    fleet.registry.set_static([])
    await fleet.clock.settle()
    assert fleet.ids() == {"": ["beats"], "one": ["a"], "two": ["b", "listed"]}
    fleet.registry.expire(6.0)
    await fleet.clock.settle()
    fleet.one.tell([])
    await fleet.clock.settle()
    assert fleet.ids() == {"two": ["a", "b", "beats", "listed"]}
    assert fleet.sources.left_out["two"] == {}
    await fleet.sources.stop()


async def test_a_retry_that_changes_nothing_says_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "pointsman.control.discovery")
    fleet = Fleet()
    await fleet.both()
    fleet.one.tell(found("a", "b"))
    fleet.two.tell(found("a"))
    fleet.one.tell(found("a"))
    before = len(caplog.records)
    await fleet.clock.settle()
    assert fleet.ids() == {"one": ["a"]}
    assert len(caplog.records) == before
    assert fleet.left_out == ["two"]
    await fleet.sources.stop()


async def test_an_id_that_is_there_twice_counts_once() -> None:
    fleet = Fleet()
    await fleet.both()
    fleet.one.tell([Found("a", "h:1"), Found("a", "h:2"), *found("b")])
    assert [(each.id, each.http_address) for each in fleet.registry.snapshot()] == [
        ("a", "h:1"),
        ("b", "b:80"),
    ]
    assert "twice" in fleet.sources.left_out["one"]["a"]
    await fleet.sources.stop()


async def test_a_full_registry_takes_as_many_as_there_is_room_for_and_more_when_there_is() -> None:
    fleet = Fleet(workers_max=3)
    await fleet.both()
    fleet.one.tell(found("a"))
    fleet.two.tell(found("b", "c", "d", "e"))
    assert fleet.ids() == {"one": ["a"], "two": ["b", "c"]}
    assert "3 workers already" in fleet.sources.left_out["two"]["d"]
    fleet.one.tell([])
    await fleet.clock.settle()
    assert fleet.ids() == {"two": ["b", "c", "d"]}
    fleet.one.tell(found("a"))
    assert fleet.ids() == {"two": ["b", "c", "d"]}
    await fleet.sources.stop()


async def calls_with_one_twice(count: int) -> int:
    """Return how many calls it takes to have so many workers, the first of them there twice."""
    fleet = Fleet()
    await fleet.both()
    listed = found(*(f"w{n}" for n in range(count)), "w0")
    calls = 0

    def counted(frame: object, event: str, arg: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(counted)
    fleet.one.tell(listed)
    fleet.one.tell(listed)
    sys.setprofile(None)
    assert len(fleet.registry.snapshot()) == count
    await fleet.sources.stop()
    return calls


async def test_one_worker_that_cannot_be_taken_costs_no_look_at_all_for_each_other() -> None:
    assert await calls_with_one_twice(400) < 3 * await calls_with_one_twice(200)


async def test_r17_a_source_that_was_removed_ends_and_its_workers_leave() -> None:
    fleet = Fleet()
    await fleet.both()
    fleet.one.tell(found("a"))
    fleet.two.tell(found("b"))
    await fleet.configure(fleet.spec("two"))
    assert (fleet.one.running, fleet.two.running) == (0, 1)
    assert fleet.ids() == {"two": ["b"]}
    # It may have been about to say something.
    fleet.one.tell(found("ghost"))
    assert fleet.ids() == {"two": ["b"]}
    await fleet.configure()
    assert fleet.ids() == {}
    assert fleet.left == ["a", "b"]
    await fleet.sources.stop()


async def test_a_source_that_stays_the_same_in_a_reload_keeps_running() -> None:
    fleet = Fleet()
    await fleet.both()
    fleet.one.tell(found("a"))
    await fleet.both()
    assert (fleet.one.runs, fleet.one.running) == (1, 1)
    assert fleet.left == []
    await fleet.sources.stop()


async def test_in_a_reload_workers_are_built_again_and_a_new_key_makes_new_ones() -> None:
    fleet = Fleet()
    await fleet.both()
    fleet.one.tell(found("a"))
    (before,) = fleet.registry.snapshot()
    await fleet.both()
    assert fleet.registry.snapshot() == (before,)
    keyed = fleet.spec("one")._replace(build=lambda found: build(found, b"authorization: b\r\n"))
    await fleet.configure(keyed, fleet.spec("two"))
    (after,) = fleet.registry.snapshot()
    assert after is not before
    assert after.credentials == b"authorization: b\r\n"
    assert fleet.one.runs == 1
    await fleet.sources.stop()


async def test_a_source_with_other_settings_begins_anew_and_nobody_leaves_for_that() -> None:
    fleet = Fleet()
    await fleet.both()
    fleet.one.tell(found("a", "b"))
    before = fleet.registry.snapshot()
    old = fleet.one.tell
    await fleet.configure(fleet.spec("one", "other"), fleet.spec("two"))
    assert (fleet.one.runs, fleet.one.running, fleet.two.runs) == (2, 1, 1)
    old([])
    assert fleet.registry.snapshot() == before
    fleet.one.tell(found("a"))
    assert fleet.registry.snapshot() == before[:1]
    await fleet.sources.stop()


async def test_r02_a_source_that_fails_begins_again_and_its_workers_stay(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fleet = Fleet()
    await fleet.both()
    fleet.one.tell(found("a"))
    fleet.one.fails = RuntimeError("no")
    await fleet.configure(fleet.spec("one", "other"), fleet.spec("two"))
    await fleet.clock.advance(12)
    assert (fleet.one.runs, fleet.faults) == (4, 3)
    assert fleet.ids() == {"one": ["a"]}
    assert "source one failed, and begins again" in caplog.text
    fleet.one.fails = None
    await fleet.clock.advance(5)
    fleet.one.tell(found("b"))
    assert fleet.ids() == {"one": ["b"]}
    await fleet.sources.stop()


async def test_two_sources_of_one_name_are_refused_and_change_nothing() -> None:
    fleet = Fleet()
    await fleet.both()
    with pytest.raises(ValueError, match="same name"):
        fleet.sources.set([fleet.spec("one", "x"), fleet.spec("one", "y")])
    await fleet.clock.settle()
    assert (fleet.one.runs, fleet.one.running) == (1, 1)
    await fleet.sources.stop()


async def test_the_stop_ends_all_sources_and_leaves_their_workers() -> None:
    fleet = Fleet()
    await fleet.both()
    fleet.one.tell(found("a"))
    fleet.two.tell(found("a", "b"))
    await fleet.sources.stop()
    assert (fleet.one.running, fleet.two.running) == (0, 0)
    fleet.two.tell(found("ghost"))
    fleet.registry.set_listed("one", ())
    await fleet.clock.settle()
    assert fleet.ids() == {"two": ["b"]}


async def test_a_retry_that_waits_when_the_stop_comes_is_not_made() -> None:
    fleet = Fleet()
    await fleet.both()
    fleet.one.tell(found("a"))
    fleet.two.tell(found("a"))
    fleet.registry.set_listed("one", ())
    await fleet.sources.stop()
    await fleet.clock.settle()
    assert fleet.ids() == {}


def static(id: str) -> Worker:
    return Worker(id, model="m", http_address="static:80")


async def test_an_operator_s_worker_comes_first_though_it_comes_later() -> None:
    fleet = Fleet()
    await fleet.both()
    fleet.one.tell(found("a", "b"))
    fleet.registry.set_static([static("a")])
    await fleet.clock.settle()
    assert fleet.ids() == {STATIC: ["a"], "one": ["b"]}
    assert fleet.sources.left_out["one"] == {"a": "worker_id 'a' is taken"}
    assert fleet.left_out == ["one"]
    fleet.registry.set_static([])
    await fleet.clock.settle()
    assert fleet.ids() == {"one": ["a", "b"]}
    assert fleet.sources.left_out["one"] == {}
    await fleet.sources.stop()


async def test_a_source_leaves_alone_what_an_operator_is_about_to_take() -> None:
    fleet = Fleet(workers_max=3)
    await fleet.both()
    with fleet.registry.reserved([static("t")]):
        fleet.one.tell(found("a", "t", "b", "c"))
        assert fleet.ids() == {"one": ["a", "b"]}
        assert fleet.faults == 0
        fleet.registry.set_static([static("t")])
    await fleet.clock.settle()
    assert fleet.ids() == {STATIC: ["t"], "one": ["a", "b"]}
    await fleet.sources.stop()


async def test_what_an_operator_did_not_take_after_all_is_the_source_s() -> None:
    fleet = Fleet()
    await fleet.both()
    with pytest.raises(OSError, match="disk"), fleet.registry.reserved([static("t")]):
        fleet.one.tell(found("a", "t"))
        raise OSError("disk")
    await fleet.clock.settle()
    assert fleet.ids() == {"one": ["a", "t"]}
    await fleet.sources.stop()
