"""The admin API as an ordinary ASGI application: a Starlette application over the declared endpoints."""

from collections import defaultdict
from functools import cache
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pointsman.control.admin import cascades, decisions, fleet, gateway, keys, routes
from pointsman.control.admin.endpoint import Call, Endpoint, Place, endpoint, error_response
from pointsman.control.admin.guard import Guard
from pointsman.control.admin.openapi import document
from pointsman.control.admin.parts import AdminParts
from pointsman.errors import GatewayError, InternalError, MethodNotAllowed, NotFound

__all__ = ["ENDPOINTS", "admin_app", "openapi"]


@endpoint("GET", "/admin/v1/openapi.json")
async def get_openapi(call: Call) -> dict[str, Any]:
    """Show the OpenAPI document of this API."""
    return openapi()


# In the order in which paths are tried: a model id may contain anything, so `models/{model}` comes after the drains.
ENDPOINTS: tuple[Endpoint, ...] = (
    fleet.list_workers,
    fleet.put_worker,
    fleet.delete_worker,
    fleet.list_models,
    fleet.drain_model,
    fleet.undrain_model,
    fleet.get_model,
    routes.get_routes,
    routes.put_routes,
    decisions.explain_route,
    decisions.list_decisions,
    cascades.list_cascades,
    keys.list_keys,
    keys.create_key,
    keys.revoke_key,
    gateway.get_stats,
    gateway.get_config,
    gateway.reload_config,
    get_openapi,
)
"""Every endpoint, in the order of the reference page."""


def admin_app(parts: AdminParts) -> Starlette:
    """Return the application, for the paths below `/admin/v1`.

    Whoever calls it has verified the key, and left `{"principal": Principal, "request_id": str}` in the `state` of the
    scope. An exception that nobody foresaw is answered with 500 and then raised, to be logged and counted.
    """
    places: dict[str, dict[str, Endpoint]] = defaultdict(dict)
    for each in ENDPOINTS:
        places[each.path][each.method] = each
    app = Starlette(
        routes=[
            # A name goes on to the end: those of models and workers may contain slashes.
            Route(path.replace("}", ":path}"), Place(parts, methods), methods=[*methods])
            for path, methods in places.items()
        ],
        middleware=[Middleware(Guard)],
        exception_handlers={
            GatewayError: _refuse,
            HTTPException: _misrouted,
            Exception: _fail,
        },
    )
    # A path is there or it is not; a redirect would lose the body of a client that does not follow it.
    app.router.redirect_slashes = False
    return app


@cache
def openapi() -> dict[str, Any]:
    """Return the OpenAPI document of the admin API as plain lists and dicts."""
    return document(ENDPOINTS)


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, GatewayError)
    return error_response(error)


async def _misrouted(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code != 405 or _is_drain(request):
        return error_response(NotFound("no such path"))
    # Starlette lists them in the order of a set.
    allowed = ", ".join(sorted((error.headers or {}).get("Allow", "").split(", ")))
    return error_response(
        MethodNotAllowed(f"the methods of this path are {allowed}"), {"allow": allowed}
    )


def _is_drain(request: Request) -> bool:
    """Tell whether it can only have been meant as one: a drain has no 405 (specification, section 2.6)."""
    path: str = request.scope["path"]
    return path.startswith("/admin/v1/models/") and (
        request.method == "POST" or path.endswith((":drain", ":undrain"))
    )


async def _fail(request: Request, error: Exception) -> Response:
    return error_response(InternalError("the gateway failed to answer; its log says why"))
