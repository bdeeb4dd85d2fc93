"""Workers and models: who is there, what each of them holds, and taking them in and out of service."""

from collections import Counter
from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from pointsman.control.admin.endpoint import Answer, Body, Call, endpoint
from pointsman.control.admin.parts import AdminParts
from pointsman.control.admin.shapes import (
    DrainRequest,
    Models,
    ModelState,
    WorkerRequest,
    Workers,
    WorkerState,
)
from pointsman.dialect.reading import faults
from pointsman.domain.worker import Role, Worker, load_of
from pointsman.errors import Conflict, NotFound, StateUnavailable

__all__ = [
    "delete_worker",
    "drain_model",
    "get_model",
    "list_models",
    "list_workers",
    "put_worker",
    "undrain_model",
]


class WorkersQuery(Struct, frozen=True):
    """Which workers to list."""

    model: Annotated[str, Meta(description="Only those of this model, route or alias.")] = ""


@endpoint("GET", "/admin/v1/workers")
async def list_workers(call: Call, query: WorkersQuery) -> Workers:
    """List the live workers.

    They are sorted by id. `route_epoch` is the version of the route table that requests are routed by.
    """
    parts = call.parts
    left = _Left(parts)
    wanted = {query.model, *parts.router.table.served(query.model)}
    return Workers(
        tuple(
            _worker_state(parts, worker, left)
            for worker in _live(parts)
            if not query.model or wanted.intersection(_served(worker))
        ),
        parts.router.table.epoch,
    )


@endpoint(
    "PUT",
    "/admin/v1/workers/{id}",
    status=(200, 201),
    errors=(Conflict, StateUnavailable),
)
async def put_worker(call: Call, id: str, body: Body[WorkerRequest]) -> Answer[WorkerState]:
    """Add or change a static worker.

    201 for a new one. Its API key is not sent here: `api_key_env` and `api_key_file` name where the gateway
    finds it, and can only name what its configuration file uses for that, too. A worker that announces itself
    cannot be changed here: its engine would say otherwise with the next heartbeat. With a new address it is a
    new worker, and the requests of the former one end where they are.
    """
    wanted = body.read()
    parts = call.parts
    is_new = await parts.changes.put_worker(id, msgspec.to_builtins(wanted))
    worker = next(each for each in _live(parts) if each.id == id)
    return Answer(_worker_state(parts, worker, _Left(parts)), 201 if is_new else 200, {})


@endpoint(
    "DELETE",
    "/admin/v1/workers/{id}",
    status=204,
    errors=(NotFound, Conflict, StateUnavailable),
)
async def delete_worker(call: Call, id: str) -> None:
    """Remove a static worker.

    It gets no new requests; those that it has end where they are.
    """
    await call.parts.changes.delete_worker(id)


@endpoint("GET", "/admin/v1/models")
async def list_models(call: Call) -> Models:
    """List the models that workers serve.

    These are the ids that engines know. What clients may ask for besides stands in the route table.
    """
    return Models(tuple(_model_states(call.parts).values()))


@endpoint("GET", "/admin/v1/models/{model}", errors=(NotFound,))
async def get_model(call: Call, model: str) -> ModelState:
    """Show one model, for instance how far a drain of it has come.

    The id or alias of a route that one model serves means that model.
    """
    states = _model_states(call.parts)
    served = call.parts.router.table.served(model)
    state = states.get(model) or (states.get(served[0]) if len(served) == 1 else None)
    if state is None:
        raise NotFound(f"no live worker serves the model {model[:256]!r}")
    return state


@endpoint(
    "POST",
    "/admin/v1/models/{model}:drain",
    status=202,
    errors=(NotFound, StateUnavailable),
    malformed="deadline_s",
)
async def drain_model(call: Call, model: str, body: Body[DrainRequest]) -> ModelState:
    """Stop routing to every worker of a model.

    It holds for workers that join later and over restarts, until it is taken back. Requests that run go on; the answer
    and `GET /admin/v1/models/{model}` tell how many are left. Workers with a `grpc_address` are told the deadline. The
    id or alias of a route that one model serves means that model, whose id the answer names.
    """
    deadline_s = body.read().deadline_s
    drained = await call.parts.changes.drain(model, deadline_s)
    return _model_states(call.parts, drained)[drained]


@endpoint("POST", "/admin/v1/models/{model}:undrain", errors=(NotFound, StateUnavailable))
async def undrain_model(call: Call, model: str) -> ModelState:
    """Take a drain back.

    A body is not needed. A model that is not drained is no error.
    """
    taken_back = await call.parts.changes.undrain(model)
    return _model_states(call.parts, taken_back)[taken_back]


def _live(parts: AdminParts) -> tuple[Worker, ...]:
    return parts.registry.live(parts.now())


class _Left:
    """The requests that are not over: how many, and the age of the oldest, by worker id and by model."""

    def __init__(self, parts: AdminParts) -> None:
        self._now = parts.now()
        self.by_worker: dict[str, list[float]] = {}
        self.by_model: dict[str, list[float]] = {}
        # Those of workers that left are among them: a stream may outlive its worker's last heartbeat.
        for worker, began in parts.running():
            self.by_worker.setdefault(worker.id, []).append(began)
            self.by_model.setdefault(worker.model, []).append(began)

    def oldest(self, begun: Iterable[float]) -> float | None:
        """Return the age of the oldest in seconds."""
        first = min(begun, default=None)
        return None if first is None else max(0.0, self._now - first)


def _served(worker: Worker) -> tuple[str, ...]:
    """Return the ids of the models that a worker serves, its own first; none as long as nobody knows."""
    listed = (worker.model, *(served.id for served in worker.served))
    return tuple(dict.fromkeys(id for id in listed if id))


def _worker_state(parts: AdminParts, worker: Worker, left: _Left) -> WorkerState:
    begun = left.by_worker.get(worker.id, [])
    heard = parts.wall() - (parts.now() - worker.last_heartbeat)
    was_heard = worker.last_heartbeat > 0 if worker.polled else not worker.static
    return WorkerState(
        worker_id=worker.id,
        role=worker.role,
        model=worker.model,
        models=_served(worker),
        dialect=worker.dialect,
        source=worker.source,
        polled=worker.polled,
        up=worker.up,
        degraded=faults(worker.degraded, worker.kv_fault),
        http_address=worker.http_address,
        grpc_address=worker.grpc_address,
        kv_address=worker.kv_address,
        kv_format=max(worker.kv_format, 1),
        queue_depth=worker.queue_depth,
        running=worker.running,
        kv_free_blocks=worker.kv_free_blocks,
        kv_total_blocks=worker.kv_total_blocks,
        kv_tokens=worker.kv_tokens or None,
        kv_usage=None if worker.kv_usage < 0 else worker.kv_usage,
        max_model_len=worker.max_model_len or None,
        capacity=worker.capacity,
        draining=worker.draining or worker.terminating,
        last_heartbeat_unix_ms=int(heard * 1000) if was_heard else 0,
        static=worker.static,
        drained=worker.model in parts.registry.drained,
        in_flight=worker.in_flight,
        load=load_of(worker),
        requests_left=len(begun),
        oldest_request_s=left.oldest(begun),
        handoffs_recomputed=parts.recomputed(worker),
    )


def _model_states(parts: AdminParts, *named: str) -> dict[str, ModelState]:
    """Return the models that there is something to say of, and those `named`, by id."""
    workers = _live(parts)
    left = _Left(parts)
    served = Counter(model for worker in workers for model in _served(worker))
    names = {*served, *parts.registry.drained, *left.by_model, *named}
    return {
        name: ModelState(
            model=name,
            drained=name in parts.registry.drained,
            workers=served[name],
            routable=sum(len(parts.registry.routable(name, role)) for role in Role),
            requests_left=len(left.by_model.get(name, [])),
            oldest_request_s=left.oldest(left.by_model.get(name, [])),
        )
        for name in sorted(names)
    }
