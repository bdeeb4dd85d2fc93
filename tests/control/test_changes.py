"""Changes of operators: their order, what a disk that is slow or full does to them, and who wins over the file."""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from pointsman.config import servable
from pointsman.control.changes import Changes
from pointsman.control.engines import EngineUnavailable
from pointsman.control.store import Document, Store, StoreError
from pointsman.domain.policy.least_outstanding import LeastOutstanding
from pointsman.domain.registry import STATIC, InvalidReport, Registry, WorkerReport
from pointsman.domain.router import Router
from pointsman.domain.routes import Backend, Route, RouteTable, Step
from pointsman.domain.worker import Worker
from pointsman.errors import (
    BadRequest,
    Conflict,
    EtagMismatch,
    GatewayError,
    IfMatchRequired,
    InvalidRoutes,
    NotFound,
    StateUnavailable,
)
from pointsman.parts import static_worker

pytestmark = pytest.mark.anyio

T = TypeVar("T")

FILE = (Route("file"),)
PUT = (Route("put"),)
OTHER = (Route("other"),)
UNSERVED = Route("d", cascade=(Step("s", "score > 0.5", acceptor="lost"), Step("l")))


class Disk(Store):
    """A store that a test can hold up or break before it writes. `most` is how many writes there were at a time."""

    def __init__(self, folder: Path | None) -> None:
        super().__init__(folder)
        self.broken = False
        self.reached = threading.Event()
        self.free = threading.Event()
        self.free.set()
        self.most = 0
        self._busy = 0

    def adopt(self, from_file: Mapping[str, bytes]) -> dict[str, Document]:
        with self._writing():
            return super().adopt(from_file)

    def save_document(self, name: str, document: Document) -> None:
        with self._writing():
            super().save_document(name, document)

    def save_drained(self, models: Iterable[str]) -> None:
        with self._writing():
            super().save_drained(models)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        self._busy += 1
        self.most = max(self.most, self._busy)
        self.reached.set()
        try:
            assert self.free.wait(10)
            if self.broken:
                raise StoreError("state_dir /state: the disk is full")
            yield
        finally:
            self._busy -= 1


class Life:
    """One life of a gateway over a state folder, with a clock that stands at `now`.

    `asked` are the engines that were asked to drain, `outcomes` how it went; `engine` is what each of them does.
    """

    def __init__(self, folder: Path | None = None, workers_max: int = 10) -> None:
        self.now = 0.0
        self.asked: list[tuple[str, float]] = []
        self.outcomes: asyncio.Queue[bool] = asyncio.Queue()
        self.engine: Callable[[], Awaitable[int]] = self.good_engine
        self.registry = Registry(workers_max=workers_max)
        self.router = Router(self.registry, LeastOutstanding(), RouteTable())
        self.disk = Disk(folder)
        self.changes = Changes(
            self.registry,
            self.router,
            self.disk,
            build=static_worker,
            permit=lambda values: None,
            servable=servable,
            now=lambda: self.now,
            drained=self.outcomes.put_nowait,
            drain_engine=self.drain_engine,
        )

    async def good_engine(self) -> int:
        return 0

    async def drain_engine(self, address: str, deadline_s: float) -> int:
        self.asked.append((address, deadline_s))
        return await self.engine()

    def beat(self, worker_id: str, model: str = "m", **fields: Any) -> Worker:
        self.registry.beat(WorkerReport(worker_id, "h:1", model, **fields), self.now)
        return self.worker(worker_id)

    def worker(self, worker_id: str) -> Worker:
        return next(each for each in self.registry.snapshot() if each.id == worker_id)

    def ids(self) -> list[str]:
        return [worker.id for worker in self.registry.snapshot()]

    def drained(self) -> list[str]:
        return sorted(self.registry.drained)

    def tables(self) -> tuple[str, int]:
        """The models of the routes in force, and their epoch, which engines must hear alike."""
        table = self.router.table
        assert self.registry.route_epoch == table.epoch
        return " ".join(table.models()), table.epoch

    async def begin(
        self, routes: Sequence[Route] = FILE, static: Sequence[dict[str, Any]] = ()
    ) -> None:
        """Start as the application does."""
        await self.changes.restore()
        await self.changes.adopt(routes, static)

    async def put(self, routes: Sequence[Route]) -> RouteTable:
        return await self.changes.put_routes(self.router.table.etag, lambda: routes)

    async def put_worker(self, worker_id: str, port: int = 1, **changes: Any) -> bool:
        wanted: dict[str, Any] = {"model": "m", "role": "unified", "capacity": 1}
        wanted |= {"url": f"http://h:{port}"} | changes
        return await self.changes.put_worker(worker_id, wanted)

    async def held_up(self, change: Awaitable[T]) -> "asyncio.Task[T]":
        """Begin a change, and return it while the disk is at work on it, until `disk.free` is set."""
        self.disk.free.clear()
        self.disk.reached.clear()
        task = asyncio.ensure_future(change)
        assert await asyncio.to_thread(self.disk.reached.wait, 10)
        return task


def listed(worker_id: str, port: int = 1, capacity: int = 1, model: str = "m") -> dict[str, Any]:
    """An entry of the static list in the configuration file."""
    return {
        "id": worker_id,
        "url": f"http://h:{port}",
        "model": model,
        "role": "unified",
        "capacity": capacity,
    }


@pytest.fixture
def life() -> Iterator[Life]:
    life = Life()
    yield life
    life.disk.close()


class Lives:
    """Lives of a gateway over one folder, one after another."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.present = Life(folder)

    def next(self) -> Life:
        """End the present life as a crash does, as far as a process can do that to itself."""
        self.present.disk.close()
        self.present = Life(self.folder)
        return self.present


@pytest.fixture
def lives(tmp_path: Path) -> Iterator[Lives]:
    lives = Lives(tmp_path)
    yield lives
    lives.present.disk.close()


def unread() -> Sequence[Route]:
    raise AssertionError("the body must not be looked at yet")


# Routes.


async def test_the_tag_is_asked_for_before_anything_else(life: Life) -> None:
    await life.begin()
    with pytest.raises(IfMatchRequired):
        await life.changes.put_routes(None, unread)


@pytest.mark.parametrize(
    "tag",
    [
        "",
        "*",
        "routes-1",
        'W/"routes-1"',
        ' "routes-1"',
        '"routes-1" ',
        '"routes-01"',
        '"ROUTES-1"',
        '"routes-2"',
        '"routes-0", "routes-1"',
    ],
)
async def test_only_the_very_tag_will_do_and_the_body_is_not_read_for_others(
    life: Life, tag: str
) -> None:
    await life.begin()
    with pytest.raises(EtagMismatch):
        await life.changes.put_routes(tag, unread)
    assert life.tables() == ("file", 1)


def malformed() -> Sequence[Route]:
    raise BadRequest("no JSON")


@pytest.mark.parametrize(
    ("routes", "error", "param"),
    [
        (malformed, BadRequest, None),
        (lambda: [Route("")], InvalidRoutes, "routes[0].model"),
        (
            lambda: [Route("a"), Route("c", cascade=(Step("s"), Step("l")))],
            InvalidRoutes,
            "routes[1].cascade[0].accept_if",
        ),
        (
            lambda: [UNSERVED],
            InvalidRoutes,
            "routes[0].cascade[0].acceptor",
        ),
    ],
)
async def test_routes_that_break_a_rule_or_cannot_be_served_change_nothing(
    lives: Lives, routes: Callable[[], Sequence[Route]], error: type[GatewayError], param: str
) -> None:
    life = lives.present
    await life.begin()
    with pytest.raises(error) as refused:
        await life.changes.put_routes('"routes-1"', routes)
    assert (type(refused.value), refused.value.param) == (error, param)
    assert life.tables() == ("file", 1)
    life = lives.next()
    await life.begin()
    assert life.tables() == ("file", 1)


async def test_a_new_table_has_the_next_epoch_and_is_there_after_a_restart(lives: Lives) -> None:
    life = lives.present
    await life.begin()
    table = await life.put(PUT)
    assert (table.epoch, table.etag, table.routes) == (2, '"routes-2"', PUT)
    assert life.router.table is table
    whole = (
        Route("a", aliases=("x", "größe"), backends=(Backend("b", 0.25), Backend("c", 0.75))),
        Route("d", targets=("unified", "disaggregated"), default_max_tokens=9),
    )
    await life.put(whole)
    life = lives.next()
    await life.begin()
    assert (life.router.table.routes, life.tables()) == (whole, ("a d", 3))


async def test_a_table_is_in_force_only_once_it_is_durable(life: Life) -> None:
    await life.begin()
    task = await life.held_up(life.put(PUT))
    assert life.tables() == ("file", 1)
    assert not task.done()
    life.disk.free.set()
    assert (await task).epoch == 2
    assert life.tables() == ("put", 2)


async def test_a_full_disk_refuses_every_change_and_leaves_all_as_it_was(lives: Lives) -> None:
    life = lives.present
    await life.begin(FILE, [listed("s")])
    life.beat("a", grpc_address="h:2")
    await life.changes.drain("m", 1)
    assert await life.outcomes.get()
    life.asked.clear()
    life.disk.broken = True
    for change in (
        life.put(PUT),
        life.changes.drain("m", 1),
        life.changes.undrain("m"),
        life.put_worker("t"),
        life.put_worker("s", capacity=5),
        life.changes.delete_worker("s"),
        life.changes.adopt(OTHER, []),
    ):
        with pytest.raises(StateUnavailable, match="the disk is full"):
            await change
    assert life.tables() == ("file", 1)
    assert (life.ids(), life.worker("s").kv_total_blocks) == (["a", "s"], 1)
    assert life.drained() == ["m"]
    assert life.asked == []
    life.disk.broken = False
    await life.put(PUT)
    await life.put_worker("t")
    life = lives.next()
    await life.begin(FILE, [listed("s")])
    assert (life.tables(), life.ids(), life.drained()) == (("put", 2), ["s", "t"], ["m"])


async def test_a_caller_that_leaves_in_the_middle_gets_what_it_asked_for_or_nothing(
    lives: Lives,
) -> None:
    life = lives.present
    await life.begin()
    task = await life.held_up(life.put(PUT))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert life.tables() == ("file", 1)
    life.disk.free.set()
    await life.changes.stop()  # which waits for what has begun
    assert life.tables() == ("put", 2)
    life = lives.next()
    await life.begin()
    assert life.tables() == ("put", 2)


async def test_a_caller_that_left_before_the_disk_failed_is_no_fault(
    life: Life, caplog: pytest.LogCaptureFixture
) -> None:
    await life.begin()
    task = await life.held_up(life.put(PUT))
    task.cancel()
    await asyncio.wait([task])
    life.disk.broken = True
    life.disk.free.set()
    await life.changes.stop()
    assert life.tables() == ("file", 1)
    life.disk.broken = False
    assert (await life.put(PUT)).epoch == 2
    assert [each for each in caplog.records if each.levelno >= logging.ERROR] == []


async def test_of_many_who_change_one_version_one_is_first_and_the_others_hear_of_it(
    life: Life,
) -> None:
    await life.begin()
    outcomes = await asyncio.gather(
        *(life.changes.put_routes('"routes-1"', lambda: PUT) for _ in range(20)),
        return_exceptions=True,
    )
    assert [type(each) for each in outcomes] == [RouteTable] + [EtagMismatch] * 19
    assert life.tables() == ("put", 2)


async def test_changes_of_all_kinds_at_once_are_made_one_at_a_time(lives: Lives) -> None:
    life = lives.present
    await life.begin()
    life.beat("a", "m")
    life.beat("b", "n")
    first = await life.held_up(life.put_worker("s0"))
    rest = asyncio.gather(
        *(life.put_worker(f"s{number}", number) for number in range(1, 5)),
        life.changes.drain("m", 1),
        life.changes.drain("n", 1),
        life.put(PUT),
        life.changes.delete_worker("s0"),
        life.changes.undrain("m"),
    )
    await asyncio.sleep(0)
    life.disk.free.set()
    await asyncio.gather(first, rest)
    assert life.disk.most == 1
    expected = (["s1", "s2", "s3", "s4"], ["n"], ("put", 2))
    assert (life.ids()[2:], life.drained(), life.tables()) == expected
    life = lives.next()
    await life.begin()
    assert (life.ids(), life.drained(), life.tables()) == expected


async def test_a_stop_waits_for_the_change_that_is_under_way(life: Life) -> None:
    await life.begin()
    task = await life.held_up(life.put(PUT))
    stop = asyncio.ensure_future(life.changes.stop())
    await asyncio.sleep(0)
    assert not stop.done()
    life.disk.free.set()
    await stop
    assert (await task).epoch == 2


# The file and the admin API: the last one to change it wins.


@pytest.mark.parametrize("restarts", [False, True])
async def test_the_last_one_to_change_the_routes_wins(lives: Lives, *, restarts: bool) -> None:
    story = [
        ("file", FILE, ("file", 1)),
        ("file", FILE, ("file", 1)),
        ("put", PUT, ("put", 2)),
        ("file", FILE, ("put", 2)),
        ("file", OTHER, ("other", 3)),
        ("file", OTHER, ("other", 3)),
        ("put", PUT, ("put", 4)),
        ("put", FILE, ("file", 5)),
        ("file", OTHER, ("file", 5)),
        ("file", FILE, ("file", 6)),
        ("file", (), ("", 7)),
        ("put", PUT, ("put", 8)),
        ("file", (), ("put", 8)),
    ]
    life = lives.present
    await life.begin(FILE)
    for who, routes, expected in story:
        if who == "put":
            await life.put(routes)
        elif restarts:
            life = lives.next()
            await life.begin(routes)
        else:
            await life.changes.adopt(routes, [])
        assert life.tables() == expected


@pytest.mark.parametrize("restarts", [False, True])
async def test_the_last_one_to_change_the_static_workers_wins(
    lives: Lives, *, restarts: bool
) -> None:
    life = lives.present

    async def says(*static: dict[str, Any]) -> list[str]:
        nonlocal life
        if restarts:
            life = lives.next()
            await life.begin(FILE, static)
        else:
            await life.changes.adopt(FILE, static)
        return life.ids()

    assert await says(listed("a")) == ["a"]
    assert await life.put_worker("b", 2)
    await life.changes.delete_worker("a")
    assert await says(listed("a")) == ["b"]
    assert await says(listed("a"), listed("c", 3)) == ["a", "c"]
    assert await says() == []
    assert await life.put_worker("b", 2)
    assert await says() == ["b"]
    assert life.tables() == ("file", 1)


async def test_a_file_that_changes_one_of_the_two_leaves_what_was_put_of_the_other(
    lives: Lives,
) -> None:
    life = lives.present
    await life.begin(FILE, [listed("a")])
    await life.put(PUT)
    await life.put_worker("b", 2)
    await life.changes.adopt(OTHER, [listed("a")])
    assert (life.tables(), life.ids()) == (("other", 3), ["a", "b"])
    await life.put(PUT)
    await life.changes.adopt(OTHER, [listed("c")])
    assert (life.tables(), life.ids()) == (("put", 4), ["c"])


async def test_a_file_that_says_nothing_new_touches_nothing(life: Life) -> None:
    await life.begin(FILE, [listed("a")])
    table, worker = life.router.table, life.worker("a")
    worker.in_flight = 3
    joined: list[Worker] = []
    life.registry.on_join.append(joined.append)
    life.registry.on_leave.append(joined.append)
    await life.changes.adopt(FILE, [listed("a")])
    assert life.router.table is table
    assert life.worker("a") is worker
    assert (worker.in_flight, joined) == (3, [])


@pytest.mark.parametrize(
    ("routes", "static", "param"),
    [
        ([Route("")], [listed("b", 2)], "routes[0].model"),
        ([UNSERVED], [listed("b", 2)], "routes[0].cascade[0].acceptor"),
        (OTHER, [listed("b", 2), listed("b", 3)], "id"),
        (OTHER, [listed("b", 2), listed("two words")], "id"),
        (OTHER, [listed("b", 2), listed("beats")], "id"),
        (OTHER, [listed("b", 2), listed("c") | {"url": "ftp://h"}], "url"),
        (OTHER, [listed("b", 2), listed("c") | {"role": "prefill"}], "grpc_address"),
        (OTHER, [listed(f"w{number}") for number in range(10)], "id"),
    ],
)
async def test_a_file_with_a_fault_changes_nothing_of_anything(
    lives: Lives, routes: Sequence[Route], static: Sequence[dict[str, Any]], param: str
) -> None:
    life = lives.present
    await life.begin(FILE, [listed("a")])
    life.beat("beats")
    await life.put(PUT)
    with pytest.raises(BadRequest) as refused:
        await life.changes.adopt(routes, static)
    assert refused.value.param == param
    assert (life.tables(), life.ids()) == (("put", 2), ["a", "beats"])
    # Nor has the store: the file says what it said before, so what was put stays.
    life = lives.next()
    await life.begin(FILE, [listed("a")])
    assert (life.tables(), life.ids()) == (("put", 2), ["a"])


async def test_what_another_gateway_changed_in_the_folder_is_not_overwritten(
    tmp_path: Path,
) -> None:
    one, other = Life(tmp_path), Life(tmp_path)
    await one.begin()
    await other.begin()
    await one.put(PUT)
    with pytest.raises(StateUnavailable, match="another gateway has changed the routes"):
        await other.put(OTHER)
    assert other.tables() == ("file", 1)
    await other.changes.adopt(FILE, [])
    assert other.tables() == ("put", 2)
    assert (await other.put(OTHER)).epoch == 3
    one.disk.close()
    other.disk.close()


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("routes", b"no JSON"),
        ("routes", b"\xff"),
        ("routes", b'[{"model":"a","colour":"red"}]'),
        ("routes", b'[{"model":"a"},{"model":"a"}]'),
        (
            "routes",
            b'[{"model":"a","cascade":[{"model":"s","accept_if":"score > 1","acceptor":"x"},{"model":"l"}]}]',
        ),
        ("workers", b"{}"),
        ("workers", b"\xff"),
        ("workers", b'[{"id":"s"}]'),
        ("workers", b'[{"id":"s","url":"ftp://h","model":"m"}]'),
    ],
)
async def test_what_is_kept_and_cannot_be_used_is_told_and_nothing_of_it_takes_effect(
    lives: Lives, name: str, kept: bytes
) -> None:
    """Another version may have written it: to go on without it would lose what operators changed."""
    life = lives.present
    await life.begin(FILE, [listed("a")])
    life.disk.save_document(name, Document(kept, 9))
    with pytest.raises(StateUnavailable, match="the routes and workers kept there cannot be used"):
        await life.changes.adopt(FILE, [listed("a")])
    assert (life.tables(), life.ids()) == (("file", 1), ["a"])
    life = lives.next()
    with pytest.raises(StateUnavailable, match="state_dir"):
        await life.begin(FILE, [listed("a")])
    assert (life.router.table.routes, life.ids()) == ((), [])
    # A file that says something new is the way out, and no epoch is used twice.
    await life.begin(OTHER, [listed("b", 2)])
    assert life.tables() == ("other", 10 if name == "routes" else 2)
    assert life.ids() == ["b"]


# Drains.


async def test_a_model_that_no_live_worker_has_cannot_be_drained(life: Life) -> None:
    await life.begin([Route("chat", backends=(Backend("v1"),))])
    life.beat("a", "m")
    life.now += life.registry.lifetime_s
    for name in ("m", "nobody", "chat", "v1", ""):
        with pytest.raises(NotFound):
            await life.changes.drain(name, 1)
    assert life.drained() == []


@pytest.mark.parametrize("role", ["unified", "prefill", "decode"])
async def test_a_drain_is_durable_before_it_takes_effect_and_holds_after_restarts(
    lives: Lives, role: str
) -> None:
    life = lives.present
    await life.begin()
    life.beat("a", "m", role=role)
    task = await life.held_up(life.changes.drain("m", 1))
    assert life.registry.any_routable()
    life.disk.free.set()
    assert await task == "m"
    assert not life.registry.any_routable()
    for _ in range(2):
        life = lives.next()
        await life.begin()
        assert life.drained() == ["m"]
        life.beat("a", "m", role=role)
        assert not life.registry.any_routable()
    assert await life.changes.undrain("m") == "m"
    assert life.registry.any_routable()
    life = lives.next()
    await life.begin()
    assert life.drained() == []


async def test_an_undrain_is_durable_before_it_takes_effect(life: Life) -> None:
    await life.begin()
    life.beat("a")
    await life.changes.drain("m", 1)
    task = await life.held_up(life.changes.undrain("m"))
    assert life.drained() == ["m"]
    life.disk.free.set()
    await task
    assert life.drained() == []


ROUTES = (
    Route("chat", ("c",), backends=(Backend("v1"),)),
    Route("twice", backends=(Backend("v1", 0.5), Backend("v1", 0.5))),
    Route("split", backends=(Backend("v1", 0.5), Backend("v2", 0.5))),
    Route("v3", backends=(Backend("v1"),)),
)


@pytest.mark.parametrize(
    ("name", "model"),
    [("v1", "v1"), ("chat", "v1"), ("c", "v1"), ("twice", "v1"), ("v2", "v2"), ("v3", "v3")],
)
async def test_a_name_means_the_one_model_that_serves_it_and_first_of_all_itself(
    life: Life, name: str, model: str
) -> None:
    await life.begin(ROUTES)
    for served in ("v1", "v2", "v3"):
        life.beat(served, served)
    assert await life.changes.drain(name, 1) == model
    assert life.drained() == [model]
    life.now += life.registry.lifetime_s  # Scaled to zero, and still drained.
    assert await life.changes.undrain(name) == model
    assert life.drained() == []


async def test_a_name_that_several_models_serve_is_told_and_means_none_of_them(life: Life) -> None:
    await life.begin(ROUTES)
    life.beat("a", "v1")
    life.beat("b", "v2")
    with pytest.raises(NotFound, match=r"'split'; it is served by v1, v2"):
        await life.changes.drain("split", 1)


async def test_what_is_not_drained_can_be_taken_back_and_what_nobody_knows_cannot(
    life: Life,
) -> None:
    await life.begin()
    life.beat("a")
    life.disk.broken = True  # Nothing is written for it.
    assert await life.changes.undrain("m") == "m"
    with pytest.raises(NotFound):
        await life.changes.undrain("nobody")


# Engines hear of a drain.


async def test_live_workers_of_the_model_with_a_grpc_address_are_asked_and_no_others(
    life: Life,
) -> None:
    await life.begin(FILE, [listed("static")])
    life.beat("gone", grpc_address="gone:1")
    life.now += 3
    life.beat("a", grpc_address="a:1")
    life.beat("b", grpc_address="b:1", draining=True, role="decode")
    life.beat("none")
    life.beat("other", "n", grpc_address="other:1")
    life.now += 3.5
    await life.changes.drain("m", 17)
    assert [await life.outcomes.get() for _ in range(2)] == [True, True]
    assert life.asked == [("a:1", 17), ("b:1", 17)]


async def test_an_engine_that_cannot_be_asked_is_counted_and_told_of_and_the_drain_holds(
    life: Life, caplog: pytest.LogCaptureFixture
) -> None:
    async def down() -> int:
        raise EngineUnavailable("UNAVAILABLE: refused")

    life.engine = down
    await life.begin()
    life.beat("a", grpc_address="a:1")
    assert await life.changes.drain("m", 1) == "m"
    assert await life.outcomes.get() is False
    warned = "worker a could not be asked to drain: UNAVAILABLE: refused"
    assert warned in [each.getMessage() for each in caplog.records]
    assert life.drained() == ["m"]


async def test_an_engine_that_hangs_holds_up_neither_drains_nor_the_end(life: Life) -> None:
    begun, left = asyncio.Event(), asyncio.Event()

    async def hanging() -> int:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            left.set()
        return 0

    life.engine = hanging
    await life.begin()
    life.beat("a", grpc_address="a:1")
    await life.changes.drain("m", 3600)
    await life.changes.undrain("m")
    await begun.wait()
    await life.changes.stop()
    await left.wait()
    assert life.outcomes.empty()


async def test_a_fault_in_asking_an_engine_is_not_swallowed(life: Life) -> None:
    faults: asyncio.Queue[BaseException] = asyncio.Queue()
    asyncio.get_running_loop().set_exception_handler(
        lambda loop, context: faults.put_nowait(context["exception"])
    )

    async def faulty() -> int:
        raise RuntimeError("a fault")

    life.engine = faulty
    await life.begin()
    life.beat("a", grpc_address="a:1")
    await life.changes.drain("m", 1)
    assert str(await faults.get()) == "a fault"


# Static workers.


async def test_r17_static_workers_are_added_changed_and_removed_and_are_so_after_a_restart(
    lives: Lives,
) -> None:
    life = lives.present
    await life.begin(FILE, [listed("a"), listed("b", 2)])
    left: list[str] = []
    life.registry.on_leave.append(lambda worker: left.append(worker.id))
    worker = life.worker("a")
    worker.in_flight = 2
    assert await life.put_worker("c", 3)
    await life.changes.delete_worker("b")
    assert not await life.put_worker("c", 4)
    assert life.worker("a") is worker
    assert (worker.in_flight, left) == (2, ["b", "c"])
    life = lives.next()
    await life.begin(FILE, [listed("a"), listed("b", 2)])
    assert [(each.id, each.http_address) for each in life.registry.snapshot()] == [
        ("a", "h:1"),
        ("c", "h:4"),
    ]


async def test_o08_a_put_that_changes_the_capacity_is_not_ignored(lives: Lives) -> None:
    life = lives.present
    await life.begin(FILE, [listed("a")])
    worker = life.worker("a")
    assert not await life.put_worker("a", capacity=7, model="n")
    assert life.worker("a") is worker
    assert (worker.kv_total_blocks, worker.model) == (7, "n")
    life = lives.next()
    await life.begin(FILE, [listed("a")])
    assert (life.worker("a").kv_total_blocks, life.worker("a").model) == (7, "n")


async def test_a_static_worker_is_in_force_only_once_it_is_durable(life: Life) -> None:
    await life.begin()
    task = await life.held_up(life.put_worker("s"))
    assert life.ids() == []
    life.disk.free.set()
    assert await task
    assert life.ids() == ["s"]


async def test_a_worker_that_announces_itself_is_neither_changed_nor_removed(life: Life) -> None:
    await life.begin()
    worker = life.beat("a")
    with pytest.raises(Conflict):
        await life.put_worker("a")
    with pytest.raises(Conflict):
        await life.changes.delete_worker("a")
    assert life.registry.snapshot() == (worker,)
    life.now += life.registry.lifetime_s
    with pytest.raises(NotFound):
        await life.changes.delete_worker("a")
    assert await life.put_worker("a")


@pytest.mark.parametrize(
    ("worker_id", "change", "param"),
    [
        ("two words", {}, "id"),
        ("", {}, None),
        ("s", {"url": "ftp://h"}, "url"),
        ("s", {"role": "prefill"}, "grpc_address"),
        ("s", {"capacity": -1}, None),
        ("s", {"model": "\n"}, "id"),
    ],
)
async def test_a_static_worker_that_makes_no_sense_changes_nothing(
    lives: Lives, worker_id: str, change: dict[str, Any], param: str | None
) -> None:
    life = lives.present
    await life.begin()
    with pytest.raises(BadRequest) as refused:
        await life.put_worker(worker_id, **change)
    assert refused.value.param == param
    assert life.ids() == []
    life = lives.next()
    await life.begin()
    assert life.ids() == []


async def test_o12_one_static_worker_too_many_is_refused_in_words(lives: Lives) -> None:
    life = lives.present
    await life.begin()
    for number in range(10):
        life.beat(f"w{number}")
    with pytest.raises(BadRequest, match="there are 10 workers, as many as there may be"):
        await life.put_worker("s")
    life = lives.next()
    await life.begin()
    assert life.ids() == []


async def test_a_heartbeat_cannot_take_the_id_of_a_static_worker_that_is_being_written(
    lives: Lives,
) -> None:
    """Else the worker would be durable and acknowledged, and not there."""
    life = lives.present
    await life.begin()
    task = await life.held_up(life.put_worker("s"))
    with pytest.raises(InvalidReport, match="static"):
        life.beat("s")
    life.disk.free.set()
    assert await task
    reload = await life.held_up(life.changes.adopt(FILE, [listed("t", 2)]))
    with pytest.raises(InvalidReport, match="static"):
        life.beat("t")
    life.disk.free.set()
    await reload
    assert life.ids() == ["t"]
    life.disk.broken = True
    with pytest.raises(StateUnavailable):
        await life.put_worker("u")
    assert life.beat("u").id == "u"


async def test_a_source_cannot_take_the_id_of_a_static_worker_that_is_being_written(
    lives: Lives,
) -> None:
    life = lives.present
    await life.begin()
    task = await life.held_up(life.put_worker("s"))
    with pytest.raises(InvalidReport, match="'s' belongs to a static worker"):
        life.registry.set_listed("dns", [Worker("s", model="m", http_address="h:9")])
    life.disk.free.set()
    assert await task
    assert life.worker("s").source == STATIC


async def test_a_worker_that_was_found_gives_way_to_the_one_that_an_operator_puts(
    lives: Lives,
) -> None:
    life = lives.present
    await life.begin()
    life.registry.set_listed("dns", [Worker("s", model="m", http_address="h:9")])
    with pytest.raises(NotFound):
        await life.changes.delete_worker("s")
    assert await life.put_worker("s")
    assert life.worker("s").source == STATIC
    life = lives.next()
    life.registry.set_listed("dns", [Worker("s", model="m", http_address="h:9")])
    await life.begin()
    assert life.worker("s").source == STATIC
    await life.changes.delete_worker("s")
    assert life.ids() == []
