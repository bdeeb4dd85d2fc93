"""Every change that an operator makes: one at a time, and durable before it takes effect or is acknowledged.

So a crash loses nothing that was acknowledged, and whatever was in force at any moment is what a restart finds, or was
replaced by it. A caller that goes away in the middle changes nothing about that: a change that has begun is finished.

It knows neither HTTP nor files of configuration; those that may come from one are documents of the `Store`.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import msgspec

from pointsman.control.engines import EngineUnavailable, drain_engine
from pointsman.control.store import Document, Store, StoreError
from pointsman.domain.registry import InvalidReport, Registry
from pointsman.domain.router import Router
from pointsman.domain.routes import Route, RouteTable, routes_from_config
from pointsman.domain.worker import Worker
from pointsman.errors import (
    BadRequest,
    Conflict,
    EtagMismatch,
    IfMatchRequired,
    NotFound,
    StateUnavailable,
)

__all__ = ["Changes", "Static"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

Static = Mapping[str, Any]
"""A static worker as plain values, by the keys of the configuration."""

ROUTES = "routes"
WORKERS = "workers"


class Servable(Protocol):
    """Says whether routes can be served."""

    def __call__(self, routes: Sequence[Route]) -> None:
        """Raise InvalidRoutes for those that cannot."""


class Changes:
    """Changes the registry and the router of a gateway, and keeps what it changed in the store.

    `build` makes a worker of plain values, or raises BadRequest with `param`; `permit` raises that for values that only
    the configuration file may give; `now` is monotonic seconds; `drained` hears of every engine that was asked to
    drain, and whether it did.

    Every method but `stop` raises StateUnavailable where the store cannot be written; nothing has changed then.
    """

    def __init__(
        self,
        registry: Registry,
        router: Router,
        store: Store,
        *,
        build: Callable[[Static], Worker],
        permit: Callable[[Static], None],
        servable: Servable,
        now: Callable[[], float],
        drained: Callable[[bool], None] = lambda worked: None,
        drain_engine: Callable[[str, float], Coroutine[Any, Any, int]] = drain_engine,
    ) -> None:
        self._registry = registry
        self._router = router
        self._store = store
        self._build = build
        self._permit = permit
        self._servable = servable
        self._now = now
        self._heard = drained
        self._drain_engine = drain_engine
        self._static: tuple[Static, ...] = ()
        self._static_epoch = 0
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def adopt(self, routes: Sequence[Route], static: Sequence[Static]) -> None:
        """Take what the configuration file says, at the start and on every reload.

        Of routes and static workers alike, the file's are put in force where they differ from what it said last time;
        else what the admin API made of them stays. All of it or nothing takes effect. Raises BadRequest.
        """
        await self._finish(self._adopt(routes, static))

    async def restore(self) -> None:
        """Drain the models that were drained before the restart."""
        for model in sorted(await self._kept(self._store.drained)):
            self._registry.drain(model)

    async def put_routes(
        self, if_match: str | None, routes: Callable[[], Sequence[Route]]
    ) -> RouteTable:
        """Replace the route table by what `routes` returns, if `if_match` is the tag of the one in force.

        Raises, in this order, IfMatchRequired, EtagMismatch, what `routes` raises, and InvalidRoutes.
        """
        return await self._finish(self._put_routes(if_match, routes))

    async def drain(self, model: str, deadline_s: float) -> str:
        """Stop routing to a model, now and after restarts, and return its id as workers report it.

        `model` may also be a route's id or alias, if one model serves that. Workers with a gRPC address are asked to
        drain within `deadline_s`, in the background. Raises NotFound where no live worker has the model.
        """
        return await self._finish(self._drain(model, deadline_s))

    async def undrain(self, model: str) -> str:
        """Take a drain back, and return the id of the model.

        One that is not drained is no error. Raises NotFound for one that no live worker has besides.
        """
        return await self._finish(self._undrain(model))

    async def put_worker(self, worker_id: str, values: Static) -> bool:
        """Add or change a static worker, whose `id` need not stand in its values, and tell whether it is new.

        Raises BadRequest with `param`, and Conflict for a worker that announces itself.
        """
        return await self._finish(self._put_worker(worker_id, {**values, "id": worker_id}))

    async def delete_worker(self, worker_id: str) -> None:
        """Remove a static worker. Raises NotFound, and Conflict for a worker that announces itself."""
        await self._finish(self._delete_worker(worker_id))

    async def stop(self) -> None:
        """Finish what has begun, but wait for no engine."""
        async with self._lock:
            for task in self._tasks:
                task.cancel()

    # The changes themselves, each under the lock.

    async def _adopt(self, routes: Sequence[Route], static: Sequence[Static]) -> None:
        async with self._lock:
            self._servable(routes)
            RouteTable.validate(routes)
            documents = {ROUTES: _encoded(routes), WORKERS: _encoded(static)}
            with self._reserved(static):
                kept = await self._kept(self._store.adopt, documents)
                table, workers = kept[ROUTES], kept[WORKERS]
                try:
                    chosen = msgspec.json.decode(workers.value, type=tuple[dict[str, Any], ...])
                    found = routes_from_config(msgspec.json.decode(table.value))
                    in_force = RouteTable(found, table.epoch)
                    self._servable(found)
                    built = [self._build(each) for each in chosen]
                except (BadRequest, msgspec.MsgspecError, UnicodeDecodeError) as error:
                    raise StateUnavailable(
                        f"state_dir: the routes and workers kept there cannot be used: {error}"
                    ) from None
                self._registry.set_static(built)
            self._static, self._static_epoch = chosen, workers.epoch
            if in_force.epoch != self._router.table.epoch or found != self._router.table.routes:
                self._enforce(in_force)

    async def _put_routes(
        self, if_match: str | None, routes: Callable[[], Sequence[Route]]
    ) -> RouteTable:
        async with self._lock:
            table = self._router.table
            if if_match is None:
                raise IfMatchRequired("If-Match must name the version that this replaces")
            if if_match != table.etag:
                raise EtagMismatch("the routes are not those of If-Match: read them again")
            wanted = RouteTable(routes(), table.epoch + 1)
            self._servable(wanted.routes)
            document = Document(_encoded(wanted.routes), wanted.epoch)
            await self._kept(self._store.save_document, ROUTES, document)
            self._enforce(wanted)
            return wanted

    async def _drain(self, name: str, deadline_s: float) -> str:
        async with self._lock:
            model = self._model_of(name, {worker.model for worker in self._live()})
            drained = self._registry.drained | {model}
            await self._kept(self._store.save_drained, drained)
            self._registry.drain(model)
            logger.info("model %s is drained", model)
            for worker in self._live():
                if worker.model == model and worker.grpc_address:
                    self._own(self._tell(worker, deadline_s))
            return model

    async def _undrain(self, name: str) -> str:
        async with self._lock:
            drained = self._registry.drained
            model = self._model_of(name, drained | {worker.model for worker in self._live()})
            if model in drained:
                await self._kept(self._store.save_drained, drained - {model})
                self._registry.undrain(model)
                logger.info("model %s is no longer drained", model)
            return model

    async def _put_worker(self, worker_id: str, wanted: Static) -> bool:
        async with self._lock:
            self._permit(wanted)
            self._refuse_announced(worker_id)
            is_new = all(each["id"] != worker_id for each in self._static)
            others = [each for each in self._static if each["id"] != worker_id]
            await self._set_static([*others, wanted])
            return is_new

    async def _delete_worker(self, worker_id: str) -> None:
        async with self._lock:
            self._refuse_announced(worker_id)
            left = [each for each in self._static if each["id"] != worker_id]
            if len(left) == len(self._static):
                raise NotFound(f"no worker is called {worker_id[:256]!r}")
            await self._set_static(left)

    async def _set_static(self, static: Sequence[Static]) -> None:
        document = Document(_encoded(static), self._static_epoch + 1)
        with self._reserved(static) as workers:
            await self._kept(self._store.save_document, WORKERS, document)
            self._registry.set_static(workers)
        self._static, self._static_epoch = tuple(static), document.epoch

    # What they have in common.

    def _enforce(self, table: RouteTable) -> None:
        self._router.adopt(table)
        logger.info("routes with epoch %d are in force", table.epoch)

    @contextmanager
    def _reserved(self, static: Sequence[Static]) -> Iterator[list[Worker]]:
        """Make the workers of a list, which no heartbeat can keep from being put in force in this block."""
        workers = [self._build(each) for each in static]
        try:
            with self._registry.reserved(workers):
                yield workers
        except InvalidReport as error:
            raise BadRequest(str(error), param="id") from None

    def _live(self) -> tuple[Worker, ...]:
        return self._registry.live(self._now())

    def _model_of(self, name: str, known: Set[str]) -> str:
        """Return the one of the known models that a name means."""
        if name in known:
            return name
        served = self._router.table.served(name)
        if len(served) == 1 and served[0] in known:
            return served[0]
        hint = f"; it is served by {', '.join(served)}" if len(served) > 1 else ""
        raise NotFound(f"no live worker has the model {name[:256]!r}{hint}")

    def _refuse_announced(self, worker_id: str) -> None:
        for worker in self._live():
            if worker.id == worker_id and not worker.static:
                raise Conflict(f"{worker_id} announces itself; drain its model, or stop the engine")

    async def _kept(self, call: Callable[..., T], *arguments: object) -> T:
        """Call the store, in a thread: a disk may take its time."""
        try:
            return await asyncio.to_thread(call, *arguments)
        except StoreError as error:
            raise StateUnavailable(str(error)) from None

    async def _tell(self, worker: Worker, deadline_s: float) -> None:
        try:
            aborted = await self._drain_engine(worker.grpc_address, deadline_s)
        except EngineUnavailable as error:
            logger.warning("worker %s could not be asked to drain: %s", worker.id, error)
            self._heard(False)
        else:
            logger.info("worker %s drained and aborted %d requests", worker.id, aborted)
            self._heard(True)

    async def _finish(self, change: Coroutine[Any, Any, T]) -> T:
        """Make a change to its end, also if whoever asked for it goes away meanwhile."""
        return await asyncio.shield(self._own(change))

    def _own(self, coroutine: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _encoded(value: object) -> bytes:
    return msgspec.json.encode(value)
