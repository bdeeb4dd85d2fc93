"""`GET /v1/models` over real sockets: from the registry, never from an engine (H17)."""

import msgspec
import pytest

from pointsman.domain.registry import WorkerReport
from pointsman.domain.routes import Backend, Route
from pointsman.net.clock import monotonic
from pointsman.testing.client import Client, Response, post
from pointsman.testing.gateways import fronted, running
from pointsman.testing.origin import Origin, dead_address

pytestmark = pytest.mark.anyio


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nhost: gateway\r\n\r\n".encode()


def ids(response: Response) -> list[str]:
    assert response.status == 200
    listed = msgspec.json.decode(response.body)
    assert listed["object"] == "list"
    for each in listed["data"]:
        assert each == {"id": each["id"], "object": "model", "created": 0, "owned_by": "tinyllm"}
    return [each["id"] for each in listed["data"]]


async def test_models_list() -> None:
    """H17: routes and routable workers, sorted, without asking any of them, dead ones included."""
    routes = (Route(model="chat", aliases=("alias",), backends=(Backend(model="m"),)),)
    async with Origin() as origin:
        workers = {"a": dead_address(), "b": origin.address}
        async with running(workers, routes=routes) as gateway, Client(gateway.address) as client:
            response = await client.ask(get("/v1/models"))
            assert ids(response) == ["chat", "m"]
            assert response.header("content-type") == "application/json"
            assert len(response.header("x-request-id") or "") == 32
            one = await client.ask(get("/v1/models/chat"))
            assert msgspec.json.decode(one.body)["id"] == "chat"
    assert origin.connections == 0


async def test_h17_only_routable_models_are_listed() -> None:
    def beats(name: str, model: str, *, draining: bool = False) -> WorkerReport:
        return WorkerReport(name, dead_address(), model, draining=draining)

    async with running() as gateway, Client(gateway.address) as client:
        assert ids(await client.ask(get("/v1/models"))) == []
        now = monotonic()
        gateway.registry.beat(beats("a", "living"), now)
        gateway.registry.beat(beats("b", "leaving", draining=True), now)
        gateway.registry.beat(beats("c", "drained"), now)
        gateway.registry.beat(beats("d", "dead"), now - 6.0)
        gateway.registry.drain("drained")
        assert ids(await client.ask(get("/v1/models"))) == ["living"]
        for gone in ("leaving", "drained", "dead", "never"):
            response = await client.ask(get(f"/v1/models/{gone}"))
            assert (response.status, response.error["code"]) == (404, "model_not_found")
            assert response.error["param"] == "model"


@pytest.mark.parametrize(
    ("model", "path"),
    [
        ("org/model", "org/model"),
        ("org/model", "org%2Fmodel"),
        ("org/model", "%6Frg%2fmodel?verbose=1"),
        ("modèle 北", "mod%C3%A8le%20%E5%8C%97"),
        ("a%b", "a%25b"),
        ("a+b", "a+b"),
    ],
)
async def test_ids_with_slashes_and_escapes_are_found(model: str, path: str) -> None:
    async with fronted(model=model) as (_, _, client):
        assert ids(await client.ask(get("/v1/models"))) == [model]
        response = await client.ask(get(f"/v1/models/{path}"))
        assert (response.status, msgspec.json.decode(response.body)["id"]) == (200, model)


@pytest.mark.parametrize(
    "path", ["/v1/models/", "/v1/models/%", "/v1/models/%ff%00", "/v1/models/m/"]
)
async def test_ids_that_are_none_are_404(path: str) -> None:
    async with fronted() as (_, _, client):
        response = await client.ask(get(path))
        assert (response.status, response.error["code"]) == (404, "model_not_found")


async def test_an_unknown_model_is_404_and_a_known_one_without_workers_503() -> None:
    async with running() as gateway, Client(gateway.address) as client:
        response = await client.ask(post({"model": "none"}))
        assert (response.status, response.error["code"]) == (404, "model_not_found")
        gateway.registry.remember("gone", monotonic())
        response = await client.ask(post({"model": "gone"}))
        assert (response.status, response.error["code"]) == (503, "no_capacity")
        assert response.header("retry-after") == "1"
