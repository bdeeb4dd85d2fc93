"""The health port, spoken to over ASGI without a socket."""

import asyncio

import httpx
import pytest
from starlette.applications import Starlette

from pointsman.control.health import health_app


def ask(app: Starlette, method: str, path: str) -> httpx.Response:
    async def one() -> httpx.Response:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            return await client.request(method, path)

    return asyncio.run(one())


def app(not_ready: str | None = None) -> Starlette:
    return health_app(lambda: not_ready, lambda: b"a_total 1\n")


@pytest.mark.parametrize(
    ("path", "not_ready", "status", "text"),
    [
        ("/healthz", None, 200, "ok\n"),
        ("/healthz", "draining", 200, "ok\n"),
        ("/readyz", None, 200, "ready\n"),
        ("/readyz", "draining", 503, "draining\n"),
        ("/readyz", "not ready: no worker", 503, "not ready: no worker\n"),
        ("/metrics", None, 200, "a_total 1\n"),
    ],
)
def test_each_page_says_its_line(path: str, not_ready: str | None, status: int, text: str) -> None:
    answer = ask(app(not_ready), "GET", path)
    assert (answer.status_code, answer.text) == (status, text)
    assert answer.headers["content-type"].startswith("text/plain")
    head = ask(app(not_ready), "HEAD", path)
    assert (head.status_code, head.content) == (status, b"")
    assert head.headers["content-length"] == str(len(text))


def test_readiness_is_asked_anew_each_time() -> None:
    state: list[str | None] = [None]
    live = health_app(lambda: state[0], lambda: b"")
    assert ask(live, "GET", "/readyz").status_code == 200
    state[0] = "draining"
    assert ask(live, "GET", "/readyz").status_code == 503


def test_the_exposition_has_prometheus_content_type() -> None:
    answer = ask(app(), "GET", "/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"


@pytest.mark.parametrize("path", ["/", "/health", "/metrics/x", "/v1/models", "/readyzz"])
def test_other_paths_are_not_found(path: str) -> None:
    assert ask(app(), "GET", path).status_code == 404


def test_other_methods_are_not_allowed() -> None:
    assert ask(app(), "POST", "/healthz").status_code == 405
