"""The route table, which several people may edit at once without losing anything."""

from typing import Annotated

import msgspec

from pointsman.control.admin.endpoint import Answer, Body, Call, endpoint
from pointsman.control.admin.shapes import RoutesDocument, RoutesRequest
from pointsman.domain.routes import Route, RouteTable, routes_from_json
from pointsman.errors import BadRequest, EtagMismatch, IfMatchRequired, StateUnavailable

__all__ = ["get_routes", "put_routes"]

IfMatch = Annotated[str | None, msgspec.Meta(description="The `ETag` of the table that was read.")]

ETAG = {"ETag": "The version of the table, for `If-Match`."}


@endpoint("GET", "/admin/v1/routes", headers=ETAG)
async def get_routes(call: Call) -> Answer[RoutesDocument]:
    """Show the route table in force.

    What it can say is told in [routes.md](routes.md).
    """
    return _document(call.parts.router.table)


@endpoint(
    "PUT",
    "/admin/v1/routes",
    headers=ETAG,
    errors=(BadRequest, EtagMismatch, IfMatchRequired, StateUnavailable),
)
async def put_routes(
    call: Call, if_match: IfMatch, body: Body[RoutesRequest]
) -> Answer[RoutesDocument]:
    """Replace the whole route table.

    `If-Match` is the `ETag` of the table that was read; if somebody else has changed it since, nothing is changed and
    the answer is 412. It is compared exactly, without `*` or lists, and before the body is looked at. `param` of a 400
    names the place, such as `routes[0].backends[1].weight`. Requests that run are not affected.
    """
    table = await call.parts.changes.put_routes(if_match, lambda: _routes(body.data))
    return _document(table)


def _document(table: RouteTable) -> Answer[RoutesDocument]:
    return Answer(RoutesDocument(table.epoch, table.routes), 200, {"etag": table.etag})


class _Envelope(msgspec.Struct):
    """The body without a look into its routes, whose faults are named by `routes_from_json`."""

    routes: object


def _routes(data: bytes) -> tuple[Route, ...]:
    return routes_from_json(Body(data, _Envelope).read().routes)
