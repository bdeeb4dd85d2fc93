"""The health port: `/healthz`, `/readyz` and `/metrics`, as a Starlette application.

It asks two functions and knows nothing of the registry, so it answers at once and never blocks.
"""

from collections.abc import Callable

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

__all__ = ["health_app"]

EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"
"""Content type of the Prometheus text format."""


def health_app(not_ready: Callable[[], str | None], metrics: Callable[[], bytes]) -> Starlette:
    """Return the application of the health port.

    `not_ready` returns None, or why the gateway should get no traffic (`draining`,
    `not ready: ...`); `metrics` returns the exposition.
    """

    async def healthz(request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(request: Request) -> Response:
        why = not_ready()
        if why is None:
            return PlainTextResponse("ready\n")
        return PlainTextResponse(f"{why}\n", status_code=503)

    async def exposition(request: Request) -> Response:
        return Response(metrics(), headers={"content-type": EXPOSITION})

    return Starlette(
        routes=[
            Route("/healthz", healthz),
            Route("/readyz", readyz),
            Route("/metrics", exposition),
        ]
    )
