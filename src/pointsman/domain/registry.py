"""Who is alive, and who may take requests: the registry of workers, as a pure object.

A worker is live while `now - last_heartbeat < miss_limit * interval` and routable while it is live, does not report
draining, and its model is not drained by the operator. With the defaults (3 misses of 2 s) a worker is still there
5.999 s after its last heartbeat and gone at 6 s. Liveness is by heartbeat alone: nobody has to report a death.

Workers that a source lists (the configuration, DNS, a file, Kubernetes) stay as long as it lists them. Whether one of
them is up is what polling found out, and a worker that its source calls terminating gets nothing more.

The hot path pays for none of this. `expire` is one float comparison while nothing is due, and `routable` answers the
same tuple until membership, draining, or a worker's model or role changes; heartbeats that only move numbers write them
into the `Worker` in place.

What it does not do: no clock (time is an argument), no network, no picking (see `pointsman.domain.policy`).
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from operator import attrgetter
from typing import NamedTuple

from msgspec import Struct

from pointsman.domain.observation import Observation
from pointsman.domain.worker import Role, ServedModel, Worker

__all__ = ["MEMORY_S", "STATIC", "Ack", "InvalidReport", "Registry", "RegistryFull", "WorkerReport"]

MEMORY_S = 3600.0
"""How long a model without workers is still known, so that asking for it is 503 and not 404, in seconds."""

STATIC = "static"
"""The source of the workers that the configuration and operators list."""

MEMORY_MODELS = 4096
"""How many models that memory holds at most; the ones seen longest ago are forgotten first."""

MAX_NAME = 256
"""The longest worker id or model name, in characters."""

CHECKED = 8192
"""How many names and addresses are known to be well-formed: heartbeats say the same ones again and again."""

NUMBERS = ("kv_format", "queue_depth", "running", "kv_free_blocks", "kv_total_blocks", "kv_tokens")

_BY_ID = attrgetter("id")
_NUMBERS = attrgetter(*NUMBERS)
_HOST_PORT = re.compile(
    r"(?:\[[0-9A-Fa-f:.]{2,45}(?:%[A-Za-z0-9._-]{1,15})?\]|[A-Za-z0-9._-]{1,253}):([0-9]{1,5})"
)
_SCHEME = re.compile("https?://")
_BASE_PATH = re.compile(r"(?:/[A-Za-z0-9._~!$&'()*+,;=:@%-]{1,255})+")
_ID = re.compile(r"[\x21-\x7e]{1,256}")


class InvalidReport(ValueError):
    """A heartbeat, or a static worker, that makes no sense. Nothing was changed."""


class RegistryFull(InvalidReport):
    """One worker more than may be registered. Nothing was changed."""


class Ack(NamedTuple):
    """The answer to a heartbeat: `drain` asks the worker to drain, `route_epoch` grows with every route table."""

    drain: bool
    route_epoch: int


class WorkerReport(Struct, frozen=True, gc=False):
    """One heartbeat: the fields of `tl.control.v1.WorkerStatus`.

    `incarnation` is None where the engine does not send one.
    """

    worker_id: str
    http_address: str
    model: str
    role: str = "unified"
    grpc_address: str = ""
    kv_address: str = ""
    kv_format: int = 1
    queue_depth: int = 0
    running: int = 0
    kv_free_blocks: int = 0
    kv_total_blocks: int = 0
    kv_tokens: int = 0
    draining: bool = False
    incarnation: int | None = None
    dialect: str = "tl"
    base_path: str = ""
    connector: str = ""
    bootstrap: str = ""
    served: tuple[ServedModel, ...] = ()
    max_model_len: int = 0
    lora_slots: int = 0
    slots: int = 0
    kv_usage: float = -1.0
    cached_tokens: int = -1
    remote_tokens: int = -1
    degraded: str = ""


class Registry:
    """The workers of the fleet, by heartbeat. All times are seconds of one monotonic clock.

    A worker that misses `miss_limit` (1 or more) heartbeats, one every `interval_s` seconds, is gone. There are at most
    `workers_max` (1 or more) at a time. Raises `ValueError` for values out of range.

    Call `expire(now)` before reading; it is free when nothing is due. `on_join` and `on_leave` are called with the
    worker when one joins, and when one is evicted or replaced by its next life. They are called after the change is
    complete, so they may read the registry. `on_reading` is called for a polled one whose numbers were all read
    anew: a heartbeat may repeat what its sender read long ago. `on_release` is called when what was reserved is free
    again, or taken. `on_change` is called whenever something changes about who may take requests, never by a heartbeat
    that only moves numbers; it may be amid a change, so that reading has to wait.
    """

    def __init__(
        self, miss_limit: int = 3, interval_s: float = 2.0, workers_max: int = 10_000
    ) -> None:
        if miss_limit < 1 or interval_s <= 0 or workers_max < 1:
            raise ValueError("miss_limit and workers_max must be at least 1, interval_s above 0")
        self.workers_max = workers_max
        self.lifetime_s = miss_limit * interval_s
        self.route_epoch = 0
        self.next_expiry = math.inf
        """No worker is due before this moment (it may be early, never late); infinity when nobody can expire."""
        self.on_join: list[Callable[[Worker], None]] = []
        self.on_leave: list[Callable[[Worker], None]] = []
        self.on_change: list[Callable[[], None]] = []
        self.on_reading: list[Callable[[Worker], None]] = []
        self.on_release: list[Callable[[], None]] = []
        self._workers: dict[str, Worker] = {}
        self._drained: frozenset[str] = frozenset()
        self._reserved: Set[str] = frozenset()
        self._seen: dict[str, float] = {}
        self._snapshot: tuple[Worker, ...] | None = ()
        self._routable: dict[tuple[str, Role], tuple[Worker, ...]] = {}
        self._served: dict[str, ServedModel] = {}
        self._parents: dict[str, str] = {}
        self._stale = False

    # What workers and operators change.

    def beat(self, report: WorkerReport, now: float) -> Ack:
        """Take one heartbeat that arrived at `now` (seconds, monotonic) and answer it.

        A new incarnation, or a new address, under an old id is a new worker: the old object leaves and a fresh one
        joins in one step. An incarnation that is omitted is taken to be the known one.

        Raises `InvalidReport` for an empty, over-long or unprintable id or model, an unknown role, a negative number,
        an address that is not `host:port` (`http_address` also after `http://` or `https://`), or the id of a static
        worker, and `RegistryFull` for a newcomer when there are `workers_max`. Nothing is changed then.
        """
        role = _check(report)
        self.expire(now)
        known = self._workers.get(report.worker_id)
        if known is not None and known.static:
            raise InvalidReport(f"worker_id {report.worker_id!r} belongs to a static worker")
        if known is None:
            self._check_newcomer(report.worker_id)
        for model in (report.model, *(each.id for each in report.served)):
            self._remember(model, now)
        if known is not None and _same_life(known, report):
            self._update(known, report, role, now)
        else:
            self._enter(_worker_of(report, role, now), known)
        return Ack(report.model in self._drained, self.route_epoch)

    def add(self, worker: Worker) -> None:
        """Add a static worker: it is always live, whatever its `static` flag said.

        Raises `InvalidReport` for an id that is taken or malformed, and `RegistryFull`.
        """
        if worker.id in self._workers:
            raise InvalidReport(f"worker_id {worker.id!r} is taken")
        self._check_room(len(self._workers) + 1)
        _check_names(worker.id, worker.model, required=not worker.polled)
        worker.static = True
        worker.source = STATIC
        self._enter(worker, None)

    def set_listed(self, source: str, workers: Sequence[Worker]) -> None:
        """Let the workers of a source be these, and no others. Other sources keep theirs.

        One whose address stays as it was, and the way it is spoken to, keeps its object, with its counts, and takes the
        new model, role and capacity; one with a new address is a new worker; one that is not among `workers` leaves.

        What operators list comes first: their worker takes the id of one that was found, which leaves. Raises
        `InvalidReport` for an id that is malformed, there twice, reserved, or of a worker that announces itself or that
        another source lists, and `RegistryFull`. Nothing is changed then.
        """
        self.check_listed(source, workers)
        ids = {worker.id for worker in workers}
        for gone in [each for each in self.snapshot() if _of(each, source) and each.id not in ids]:
            del self._workers[gone.id]
            self._change()
            _tell(self.on_leave, gone)
        for worker in workers:
            known = self._workers.get(worker.id)
            if known is not None and _of(known, source) and _same_place(known, worker):
                _adopt(known, worker)
                self._change()
            else:
                worker.static = True
                worker.source = source
                self._enter(worker, known)

    def check_listed(self, source: str, workers: Sequence[Worker]) -> None:
        """Raise what `set_listed` would raise, and change nothing."""
        ids: set[str] = set()
        for worker in workers:
            self.check_one(source, worker)
            if worker.id in ids:
                raise InvalidReport(f"worker_id {worker.id!r} is taken")
            ids.add(worker.id)
        if len(ids | self._others(source)) > self.workers_max:
            raise self._full()

    def check_one(self, source: str, worker: Worker) -> None:
        """Raise `InvalidReport` where a source may not list a worker, whatever else it lists. O(1); see `room`."""
        _check_names(worker.id, worker.model, required=not worker.polled)
        known = self._workers.get(worker.id)
        if known is not None and not _gives_way(known, source):
            raise InvalidReport(f"worker_id {worker.id!r} is taken")
        if known is None and source != STATIC and worker.id in self._reserved:
            raise InvalidReport(f"worker_id {worker.id!r} belongs to a static worker")

    def room(self, source: str) -> int:
        """Return how many workers a source may list, if none of them takes the place of another's.

        >>> registry = Registry(workers_max=3)
        >>> registry.add(Worker("a", model="m", http_address="127.0.0.1:8001"))
        >>> registry.room("dns engines"), registry.room(STATIC)
        (2, 3)
        """
        return self.workers_max - len(self._others(source))

    def set_static(self, workers: Sequence[Worker]) -> None:
        """Let the static workers be these: `set_listed` for those that the configuration and operators list."""
        self.set_listed(STATIC, workers)

    def check_static(self, workers: Sequence[Worker]) -> None:
        """Raise what `set_static` would raise, and change nothing."""
        self.check_listed(STATIC, workers)

    def observe(self, worker: Worker, seen: Observation, now: float) -> None:
        """Take what a round of probes found out about a worker, at `now` (monotonic seconds).

        One that is not in the registry any more is left alone. The numbers are written in place; where nothing changes
        about who may take requests for what, the cached tuples stay.
        """
        if self._workers.get(worker.id) is not worker:
            return
        before = _place_of(worker)
        if seen.up and not worker.up:
            worker.lacks.clear()
        worker.up = seen.up
        worker.model = seen.model
        worker.served = seen.served
        worker.draining = seen.draining
        worker.lora_slots = seen.lora_slots
        worker.max_model_len = seen.max_model_len
        if _place_of(worker) != before:
            self._change()
        worker.dialect = seen.dialect
        worker.degraded = seen.degraded
        worker.running = seen.running
        worker.queue_depth = seen.queue_depth
        worker.kv_free_blocks = seen.kv_free_blocks
        worker.kv_total_blocks = worker.capacity or seen.kv_total_blocks
        worker.kv_tokens = seen.kv_tokens
        worker.slots = seen.slots
        worker.kv_usage = seen.kv_usage
        worker.cached_tokens = seen.cached_tokens
        worker.remote_tokens = seen.remote_tokens
        if seen.up:
            worker.last_heartbeat = now
            for model in (worker.model, *(each.id for each in worker.served)):
                if model:
                    self._remember(model, now)
            if not seen.stale:
                _tell(self.on_reading, worker)

    @contextmanager
    def reserved(self, workers: Sequence[Worker]) -> Iterator[None]:
        """Keep the ids and the room for static workers: until the block ends, nobody else can take them.

        For a change that must be kept elsewhere before it takes effect, and cannot fail after that. Raises what
        `set_static` would raise. One block at a time.
        """
        self.check_static(workers)
        self._reserved = {worker.id for worker in workers}
        try:
            yield
        finally:
            self._reserved = frozenset()
            for listener in self.on_release:
                listener()

    def expire(self, now: float) -> None:
        """Evict every worker whose last heartbeat is `miss_limit * interval` seconds old or older."""
        if now < self.next_expiry:
            return
        beating = [worker for worker in self._workers.values() if not worker.static]
        gone = [w for w in beating if now - w.last_heartbeat >= self.lifetime_s]
        for worker in gone:
            del self._workers[worker.id]
        live = [w.last_heartbeat for w in beating if w.id in self._workers]
        self.next_expiry = self._due(min(live)) if live else math.inf
        if gone:
            self._change()
            with ExitStack() as calls:
                for worker in sorted(gone, key=_BY_ID, reverse=True):
                    calls.callback(_tell, self.on_leave, worker)

    def drain(self, model: str) -> None:
        """Stop routing to every worker of `model`, also to those that join later, until `undrain`."""
        self._drained |= {model}
        self._change()

    def undrain(self, model: str) -> None:
        """Take `drain` back. A model that is not drained is no error."""
        self._drained -= {model}
        self._change()

    def renew(self, route_epoch: int) -> None:
        """Announce a new table of routes: workers hear of its epoch with their next heartbeat."""
        self.route_epoch = route_epoch
        self._tell_change()

    def remember(self, model: str, at: float) -> None:
        """Note that `model` had a worker at `at` (monotonic seconds), for instance before a restart.

        Of too many, those noted longest ago are forgotten: tell the oldest first.
        """
        if at > self._seen.get(model, -math.inf):
            self._remember(model, at)

    # What everybody reads.

    @property
    def drained(self) -> frozenset[str]:
        """The models that the operator drains."""
        return self._drained

    def live(self, now: float) -> tuple[Worker, ...]:
        """Evict whoever is due, and return the others: every live worker, draining ones included, sorted by id."""
        self.expire(now)
        return self.snapshot()

    def snapshot(self) -> tuple[Worker, ...]:
        """Return every live worker, draining ones included, sorted by id."""
        if self._snapshot is None:
            self._snapshot = tuple(sorted(self._workers.values(), key=_BY_ID))
        return self._snapshot

    def routable(self, model: str, role: Role) -> tuple[Worker, ...]:
        """Return the workers that may take a request, sorted by id.

        It is the same tuple object from call to call while the workers in it stay the same, so that policies can keep
        what they derived from it.
        """
        if self._stale:
            self._index()
        return self._routable.get((model, role), ())

    def any_routable(self) -> bool:
        """Tell whether any worker of any role may take a request."""
        if self._stale:
            self._index()
        return bool(self._routable)

    def models(self) -> list[str]:
        """Return the models of all routable workers, sorted."""
        if self._stale:
            self._index()
        return sorted({model for model, _ in self._routable})

    def served(self, model: str) -> ServedModel:
        """Return what the routable workers of a model say about it: the shortest context, and whose adapter it is.

        >>> registry = Registry()
        >>> report = WorkerReport("a", "127.0.0.1:8001", "smol", served=(ServedModel("fr", "smol", 2048),))
        >>> _ = registry.beat(report, now=0.0)
        >>> registry.served("fr")
        ServedModel(id='fr', parent='smol', max_model_len=2048)
        """
        if self._stale:
            self._index()
        return self._served.get(model) or ServedModel(model)

    def knows(self, model: str, now: float) -> bool:
        """Tell whether a live worker (a draining one counts) or one of the last hour serves `model`."""
        if now - self._seen.get(model, -math.inf) <= MEMORY_S:
            return True
        return any(
            worker.model == model or any(each.id == model for each in worker.served)
            for worker in self._workers.values()
        )

    def seen(self) -> dict[str, float]:
        """Return when each model was last seen (monotonic seconds)."""
        return dict(self._seen)

    # How it is kept.

    def _check_newcomer(self, worker_id: str) -> None:
        if worker_id in self._reserved:
            raise InvalidReport(f"worker_id {worker_id!r} belongs to a static worker")
        expected = sum(each not in self._workers for each in self._reserved)
        self._check_room(len(self._workers) + expected + 1)

    def _others(self, source: str) -> Set[str]:
        """Return the ids that are not for a source to take."""
        others = {each.id for each in self._workers.values() if not _of(each, source)}
        return others if source == STATIC else others | self._reserved

    def _check_room(self, wanted: int) -> None:
        if wanted > self.workers_max:
            raise self._full()

    def _full(self) -> RegistryFull:
        return RegistryFull(f"there are {self.workers_max} workers, as many as there may be")

    def _update(self, worker: Worker, report: WorkerReport, role: Role, now: float) -> None:
        before = _place_of(worker)
        worker.draining = report.draining
        worker.model = report.model
        worker.role = role
        worker.served = report.served
        worker.max_model_len = report.max_model_len
        worker.lora_slots = report.lora_slots
        if _place_of(worker) != before:
            self._change()
        worker.kv_format = report.kv_format
        worker.queue_depth = report.queue_depth
        worker.running = report.running
        worker.kv_free_blocks = report.kv_free_blocks
        worker.kv_total_blocks = report.kv_total_blocks
        worker.kv_tokens = report.kv_tokens
        worker.slots = report.slots
        worker.kv_usage = report.kv_usage
        worker.cached_tokens = report.cached_tokens
        worker.remote_tokens = report.remote_tokens
        worker.degraded = report.degraded
        worker.last_heartbeat = now

    def _enter(self, worker: Worker, former: Worker | None) -> None:
        self._workers[worker.id] = worker
        if not worker.static:
            self.next_expiry = min(self.next_expiry, self._due(worker.last_heartbeat))
        self._change()
        if former is not None:
            _tell(self.on_leave, former)
        _tell(self.on_join, worker)

    def _remember(self, model: str, at: float) -> None:
        # The one that was seen last stands last: who is to be forgotten need not be looked for.
        self._seen.pop(model, None)
        self._seen[model] = at
        if len(self._seen) > MEMORY_MODELS:
            del self._seen[next(iter(self._seen))]

    def _due(self, last_heartbeat: float) -> float:
        # One step early, so that rounding in this sum can never hide what `now - last >= lifetime` would find.
        return math.nextafter(last_heartbeat + self.lifetime_s, -math.inf)

    def _change(self) -> None:
        self._snapshot = None
        self._stale = True
        self._tell_change()

    def _tell_change(self) -> None:
        for listener in self.on_change:
            listener()

    def _index(self) -> None:
        groups: dict[tuple[str, Role], list[Worker]] = {}
        self._served = {}
        for worker in self.snapshot():
            if worker.draining or worker.terminating or not worker.up or not worker.model:
                continue
            for served in _models_of(worker):
                if served.id not in self._drained:
                    groups.setdefault((served.id, worker.role), []).append(worker)
                    self._describe(served)
        self._lend(groups)
        before = self._routable
        after = {key: tuple(workers) for key, workers in groups.items()}
        self._routable = {
            key: before[key] if before.get(key) == workers else workers
            for key, workers in after.items()
        }
        self._stale = False

    def _describe(self, served: ServedModel) -> None:
        """Join what a worker says about a model to what others say: the shortest context fits everywhere."""
        known = self._served.get(served.id, served)
        lengths = [each.max_model_len for each in (known, served) if each.max_model_len]
        parents = [each.parent for each in (known, served) if each.parent]
        parent = min(parents, default="")
        self._served[served.id] = ServedModel(served.id, parent, min(lengths, default=0))
        if parent:
            self._parents[served.id] = parent

    def _lend(self, groups: dict[tuple[str, Role], list[Worker]]) -> None:
        """Let an adapter that nobody has loaded now be asked of those that can load one of its model."""
        for adapter, parent in tuple(self._parents.items()):
            if adapter not in self._seen:
                del self._parents[adapter]
            elif adapter not in self._drained:
                for role in Role:
                    able = [each for each in groups.get((parent, role), ()) if each.lora_slots]
                    if able and (adapter, role) not in groups:
                        groups[adapter, role] = able
                        self._describe(ServedModel(adapter, parent))


def _models_of(worker: Worker) -> list[ServedModel]:
    """Return the models of a worker, each once, its own first."""
    models = {worker.model: ServedModel(worker.model, "", worker.max_model_len)}
    for served in worker.served:
        if served.id == worker.model:
            length = served.max_model_len or worker.max_model_len
            served = ServedModel(served.id, served.parent, length)
        models[served.id] = served
    return list(models.values())


def _place_of(worker: Worker) -> tuple[object, ...]:
    """Return all that decides which requests a worker may get, and what is said of its models."""
    return (
        worker.up,
        worker.draining,
        worker.role,
        worker.model,
        worker.served,
        worker.max_model_len,
        worker.lora_slots > 0,
    )


def _of(worker: Worker, source: str) -> bool:
    return worker.static and worker.source == source


def _gives_way(known: Worker, source: str) -> bool:
    """Tell whether a worker keeps no source from listing its id: an operator's word comes before what was found."""
    return _of(known, source) or (source == STATIC and known.static)


def _adopt(known: Worker, worker: Worker) -> None:
    """Let a listed worker that stays have what its source says of it now."""
    if worker.configured_model or not known.polled:
        known.model = worker.model
    known.configured_model = worker.configured_model
    known.role = worker.role
    known.capacity = worker.capacity
    if worker.capacity or not known.polled:
        known.kv_total_blocks = worker.kv_total_blocks
    known.terminating = worker.terminating


def _tell(listeners: list[Callable[[Worker], None]], worker: Worker) -> None:
    # All of them hear of it, whatever one of them, maybe a policy that somebody else wrote, does about it.
    with ExitStack() as calls:
        for listener in reversed(listeners):
            calls.callback(listener, worker)


def _same_life(worker: Worker, report: WorkerReport) -> bool:
    return (
        report.incarnation in (None, worker.incarnation)
        and worker.http_address == report.http_address
        and worker.grpc_address == report.grpc_address
        and worker.kv_address == report.kv_address
        and worker.base_path == report.base_path
        and worker.dialect == report.dialect
        and worker.connector == report.connector
        and worker.bootstrap == report.bootstrap
    )


def _same_place(known: Worker, worker: Worker) -> bool:
    return _spoken_to(known) == _spoken_to(worker)


def _spoken_to(worker: Worker) -> tuple[object, ...]:
    return (
        worker.http_address,
        worker.base_path,
        worker.credentials,
        worker.configured_dialect,
        worker.connector,
        worker.bootstrap,
        worker.polled,
        worker.poll_interval_s,
        worker.poll_timeout_s,
        worker.kv_events,
        worker.kv_replay,
        worker.kv_ranks,
    )


def _worker_of(report: WorkerReport, role: Role, now: float) -> Worker:
    worker = Worker(
        report.worker_id,
        model=report.model,
        http_address=report.http_address,
        tls=report.http_address.startswith("https://"),
        role=role,
        grpc_address=report.grpc_address,
        kv_address=report.kv_address,
        kv_format=report.kv_format,
        queue_depth=report.queue_depth,
        running=report.running,
        kv_free_blocks=report.kv_free_blocks,
        kv_total_blocks=report.kv_total_blocks,
        kv_tokens=report.kv_tokens,
        draining=report.draining,
        incarnation=report.incarnation or 0,
        last_heartbeat=now,
        dialect=report.dialect,
        base_path=report.base_path,
        connector=report.connector,
        bootstrap=report.bootstrap,
    )
    worker.served = report.served
    worker.max_model_len = report.max_model_len
    worker.lora_slots = report.lora_slots
    worker.slots = report.slots
    worker.kv_usage = report.kv_usage
    worker.cached_tokens = report.cached_tokens
    worker.remote_tokens = report.remote_tokens
    worker.degraded = report.degraded
    return worker


def _check(report: WorkerReport) -> Role:
    _check_names(report.worker_id, report.model)
    try:
        role = Role(report.role)
    except ValueError:
        given = report.role[:MAX_NAME]
        raise InvalidReport(f"role {given!r} is not one of {', '.join(Role)}") from None
    _check_address("http_address", report.http_address, scheme=True)
    for each in report.served:
        _check_names(report.worker_id, each.id)
    for name in ("grpc_address", "kv_address", "bootstrap"):
        address = getattr(report, name)
        if address:
            _check_address(name, address)
    if report.base_path and not _BASE_PATH.fullmatch(report.base_path):
        raise InvalidReport(
            f"base_path {report.base_path[:MAX_NAME]!r} is not a path such as /engine"
        )
    if min(_NUMBERS(report)) < 0:
        name = next(name for name in NUMBERS if getattr(report, name) < 0)
        raise InvalidReport(f"{name} is negative")
    if report.incarnation is not None and report.incarnation < 0:
        raise InvalidReport("incarnation is negative")
    return role


@lru_cache(maxsize=CHECKED)
def _check_names(worker_id: str, model: str, *, required: bool = True) -> None:
    # An id travels in a header (X-TL-Route) and in metric labels, so it is printable ASCII without spaces.
    if not _ID.fullmatch(worker_id):
        raise InvalidReport(f"worker_id is not 1 to {MAX_NAME} printable ASCII characters")
    if not (required <= len(model) <= MAX_NAME and model.isprintable()):
        raise InvalidReport(f"model is not 1 to {MAX_NAME} printable characters")


@lru_cache(maxsize=CHECKED)
def _check_address(name: str, address: str, *, scheme: bool = False) -> None:
    start = _SCHEME.match(address) if scheme else None
    match = _HOST_PORT.fullmatch(address, start.end() if start else 0)
    if match is None or not 0 < int(match[1]) < 65536:
        raise InvalidReport(f"{name} {address[:MAX_NAME]!r} is not host:port")
