"""Why a request goes where it goes: asked before it is sent, or looked up after it was answered."""

from typing import Annotated

from msgspec import Meta, Struct

from pointsman.control.admin.endpoint import Body, Call, endpoint
from pointsman.domain.explain import Decision, Explanation, explain
from pointsman.errors import BadRequest

__all__ = ["explain_route", "list_decisions"]


class ExplainQuery(Struct, frozen=True):
    """The circumstances to assume."""

    request_id: Annotated[
        str, Meta(description="Draws the canary backend; by default the id of this request.")
    ] = ""
    exclude: Annotated[
        tuple[str, ...],
        Meta(description="Id of a worker that is left out, as after a failure; repeatable."),
    ] = ()
    step: Annotated[int, Meta(description="Step of a cascade.", ge=0, le=1_000_000)] = 0


class InferenceBody(Struct, frozen=True):
    """Any inference request; what does not matter for routing is ignored."""

    model: Annotated[str, Meta(description="Public model id or alias.", min_length=1)]


@endpoint("POST", "/admin/v1/route:explain", errors=(BadRequest,))
async def explain_route(call: Call, query: ExplainQuery, body: Body[InferenceBody]) -> Explanation:
    """Explain where a request would go, and why.

    Nothing is sent and nothing changes. A request that would be refused is a good answer too: `refusal` says how.
    """
    parts = call.parts
    request = parts.parse(body.data, query.request_id or call.request_id)
    live = {worker.id: worker for worker in parts.registry.live(parts.now())}
    for worker_id in query.exclude:
        if worker_id not in live:
            raise BadRequest(f"no live worker is called {worker_id[:256]!r}", param="exclude")
    return explain(
        parts.router,
        parts.registry,
        request,
        excluded=[live[worker_id] for worker_id in query.exclude],
        step=query.step,
        now=parts.now(),
    )


class DecisionsQuery(Struct, frozen=True):
    """Which decisions to list."""

    model: Annotated[str, Meta(description="Only requests for this model id or alias.")] = ""
    worker: Annotated[str, Meta(description="Only requests that this worker was asked.")] = ""
    request_id: Annotated[str, Meta(description="Only the request with this id.")] = ""
    limit: Annotated[int, Meta(description="At most so many.", ge=1, le=10_000)] = 100


class Decisions(Struct, frozen=True):
    """What became of requests, newest first."""

    data: tuple[Decision, ...]


@endpoint("GET", "/admin/v1/decisions")
async def list_decisions(call: Call, query: DecisionsQuery) -> Decisions:
    """List the last requests and what was decided about them.

    How many are kept is said by `decisions_kept`.
    """
    found = call.parts.decisions(
        model=query.model or None,
        worker=query.worker or None,
        request_id=query.request_id or None,
        limit=query.limit,
    )
    return Decisions(tuple(found))
