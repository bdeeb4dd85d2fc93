"""Workers, models and drains through the admin API: what the answers say, and every refusal."""

import asyncio
from typing import Any

import msgspec
import pytest

from pointsman.domain.observation import Observation
from pointsman.domain.routes import Backend, Route
from pointsman.domain.worker import ServedModel, Worker
from pointsman.testing.admin import Operated, Operator

pytestmark = pytest.mark.anyio

MODELS = [
    "smol",
    "org/smol:1b",
    "a/b/../c",
    "100%",
    "50%2F50",
    "x:drain",
    ":drain",
    "größe/模型",
    "a b?c#d&e=f",
    "-",
]


@pytest.fixture
def gateway() -> Operated:
    return Operated()


@pytest.fixture
def operator(gateway: Operated) -> Operator:
    return Operator(gateway.app)


def escaped(model: str) -> str:
    """Percent-encode everything that may be encoded, slashes too."""
    return "".join(f"%{byte:02X}" for byte in model.encode())


async def test_admin_routes_workers_drain(gateway: Operated, operator: Operator) -> None:
    gateway.beat("a")
    listed = await operator.get("/admin/v1/workers")
    assert [worker["worker_id"] for worker in listed["data"]] == ["a"]
    assert listed["route_epoch"] == 1

    routes = {"routes": [{"model": "chat", "backends": [{"model": "m", "weight": 1}]}]}
    first = await operator.ask("GET", "/admin/v1/routes")
    assert (first.body, first.header("etag")) == (b'{"route_epoch":1,"routes":[]}', '"routes-1"')
    refused = await operator.ask("PUT", "/admin/v1/routes", routes)
    assert (refused.status, refused.error["code"]) == (428, "if_match_required")
    refused = await operator.ask("PUT", "/admin/v1/routes", routes, if_match='"routes-0"')
    assert (refused.status, refused.error["code"]) == (412, "etag_mismatch")
    cascade = {"routes": [{"model": "c", "cascade": [{"model": "s"}, {"model": "l"}]}]}
    refused = await operator.ask("PUT", "/admin/v1/routes", cascade, if_match='"routes-1"')
    assert (refused.status, refused.error["param"]) == (400, "routes[0].cascade[0].accept_if")
    assert gateway.router.table.epoch == 1
    taken = await operator.ask("PUT", "/admin/v1/routes", routes, if_match='"routes-1"')
    assert (taken.status, taken.header("etag")) == (200, '"routes-2"')
    assert (await operator.get("/admin/v1/workers"))["route_epoch"] == 2

    drain = {"deadline_s": 30}
    gone = await operator.ask("POST", "/admin/v1/models/nobody:drain", drain)
    assert (gone.status, gone.error["code"], gone.error["param"]) == (404, "not_found", None)
    begun = await operator.ask("POST", "/admin/v1/models/m:drain", drain)
    assert begun.status == 202
    assert b'"model":"m"' in begun.body and b'"workers":1' in begun.body
    assert not gateway.registry.any_routable()


async def test_a_worker_is_shown_with_what_it_reported_and_what_the_gateway_holds(
    gateway: Operated, operator: Operator
) -> None:
    worker = gateway.beat(
        "a",
        role="decode",
        grpc_address="h:1",
        kv_address="h:2",
        kv_format=0,
        queue_depth=3,
        running=2,
        kv_free_blocks=5,
        kv_total_blocks=9,
        kv_tokens=144,
        kv_usage=0.5,
        max_model_len=2048,
        served=(ServedModel("fr", "m"),),
        degraded="metrics 404",
        draining=True,
    )
    worker.in_flight = 2
    gateway.live = [(worker, 990.0), (worker, 995.5)]
    gateway.now = 1001.25
    gateway.recomputed[worker] = 3
    gateway.registry.drain("m")
    (shown,) = (await operator.get("/admin/v1/workers"))["data"]
    assert shown == {
        "worker_id": "a",
        "role": "decode",
        "model": "m",
        "models": ["m", "fr"],
        "dialect": "tl",
        "source": "",
        "polled": False,
        "up": True,
        "degraded": "metrics 404",
        "http_address": "127.0.0.1:8001",
        "grpc_address": "h:1",
        "kv_address": "h:2",
        "kv_format": 1,
        "queue_depth": 3,
        "running": 2,
        "kv_free_blocks": 5,
        "kv_total_blocks": 9,
        "kv_tokens": 144,
        "kv_usage": 0.5,
        "max_model_len": 2048,
        "capacity": 0,
        "draining": True,
        "last_heartbeat_unix_ms": 1_700_000_000_000,
        "static": False,
        "drained": True,
        "in_flight": 2,
        "load": 5,
        "requests_left": 2,
        "oldest_request_s": 11.25,
        "handoffs_recomputed": 3,
    }


async def test_a_static_worker_was_never_heard_of(gateway: Operated, operator: Operator) -> None:
    gateway.registry.add(Worker("s", model="m", http_address="h:1"))
    (shown,) = (await operator.get("/admin/v1/workers"))["data"]
    assert (shown["static"], shown["last_heartbeat_unix_ms"]) == (True, 0)
    assert (shown["source"], shown["up"], shown["polled"]) == ("static", True, False)
    assert (shown["kv_usage"], shown["max_model_len"]) == (None, None)
    assert (shown["requests_left"], shown["oldest_request_s"]) == (0, None)


async def test_workers_are_listed_by_model_and_only_while_they_live(
    gateway: Operated, operator: Operator
) -> None:
    gateway.beat("b", "n")
    gateway.beat("a", "m")
    assert [w["worker_id"] for w in (await operator.get("/admin/v1/workers"))["data"]] == ["a", "b"]
    listed = await operator.get("/admin/v1/workers?model=n&colour=red")
    assert [worker["worker_id"] for worker in listed["data"]] == ["b"]
    gateway.now += gateway.registry.lifetime_s
    assert (await operator.get("/admin/v1/workers"))["data"] == []


async def test_an_adapter_is_a_model_of_the_workers_that_loaded_it(
    gateway: Operated, operator: Operator
) -> None:
    gateway.beat("a", "m", served=(ServedModel("m"), ServedModel("fr", "m")))
    gateway.beat("b", "m")
    listed = await operator.get("/admin/v1/workers?model=fr")
    assert [worker["worker_id"] for worker in listed["data"]] == ["a"]
    models = (await operator.get("/admin/v1/models"))["data"]
    assert [(each["model"], each["workers"], each["routable"]) for each in models] == [
        ("fr", 1, 1),
        ("m", 2, 2),
    ]


async def test_a_polled_worker_is_shown_as_polling_found_it_and_never_with_its_key(
    gateway: Operated, operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINE_KEY", "sk-not-for-your-eyes")
    wanted = {"url": "https://h:8000/x", "api_key_env": "ENGINE_KEY", "capacity": 3}
    wanted |= {"dialect": "auto", "poll_interval_s": 0.5, "poll_timeout_s": 0.25}
    put = await operator.ask("PUT", "/admin/v1/workers/s", wanted)
    assert put.status == 201
    shown = msgspec.json.decode(put.body)
    assert (shown["up"], shown["polled"], shown["models"], shown["dialect"]) == (
        False,
        True,
        [],
        "",
    )
    assert (shown["last_heartbeat_unix_ms"], shown["source"]) == (0, "static")
    assert (await operator.get("/admin/v1/models"))["data"] == []
    (worker,) = gateway.registry.snapshot()
    assert worker.credentials == b"authorization: Bearer sk-not-for-your-eyes\r\n"
    assert (worker.poll_interval_s, worker.poll_timeout_s) == (0.5, 0.25)
    seen = Observation(
        up=True, dialect="vllm", model="m", degraded="metrics 404", kv_usage=0.25, max_model_len=64
    )
    gateway.registry.observe(worker, seen, gateway.now)
    listed = await operator.ask("GET", "/admin/v1/workers")
    assert b"not-for-your-eyes" not in put.body + listed.body
    (shown,) = msgspec.json.decode(listed.body)["data"]
    assert (shown["up"], shown["dialect"], shown["models"]) == (True, "vllm", ["m"])
    assert (shown["degraded"], shown["kv_usage"], shown["max_model_len"]) == (
        "metrics 404",
        0.25,
        64,
    )
    assert (shown["capacity"], shown["kv_total_blocks"]) == (3, 3)
    assert shown["last_heartbeat_unix_ms"] > 0
    gateway.registry.observe(worker, msgspec.structs.replace(seen, up=False), gateway.now)
    (shown,) = (await operator.get("/admin/v1/workers"))["data"]
    assert shown["up"] is False


async def test_requests_of_a_worker_that_is_gone_are_still_left(
    gateway: Operated, operator: Operator
) -> None:
    worker = gateway.beat("a")
    gateway.live = [(worker, 999.0)]
    gateway.now += gateway.registry.lifetime_s
    assert await operator.get("/admin/v1/models") == {
        "data": [
            {
                "model": "m",
                "drained": False,
                "workers": 0,
                "routable": 0,
                "requests_left": 1,
                "oldest_request_s": 7.0,
            }
        ]
    }


async def test_models_are_those_of_workers_of_drains_and_of_requests(
    gateway: Operated, operator: Operator
) -> None:
    gateway.beat("a", "m")
    gateway.beat("b", "m", role="prefill")
    gateway.beat("c", "m", draining=True)
    gateway.registry.drain("z")
    models = (await operator.get("/admin/v1/models"))["data"]
    assert [(m["model"], m["workers"], m["routable"], m["drained"]) for m in models] == [
        ("m", 3, 2, False),
        ("z", 0, 0, True),
    ]
    assert await operator.get("/admin/v1/models/m") == models[0]
    assert (await operator.ask("GET", "/admin/v1/models/x")).error["code"] == "not_found"


@pytest.mark.parametrize("model", MODELS)
async def test_a_model_of_any_name_is_shown_drained_and_taken_back(
    gateway: Operated, operator: Operator, model: str
) -> None:
    gateway.beat("a", model)
    path = f"/admin/v1/models/{escaped(model)}"
    assert (await operator.get(path))["model"] == model
    begun = await operator.ask("POST", f"{path}:drain", {"deadline_s": 0})
    assert begun.status == 202
    assert gateway.registry.drained == {model}
    assert (await operator.get(path))["drained"] is True
    again = await operator.ask("POST", f"{path}:undrain")
    assert again.status == 200
    assert gateway.registry.drained == frozenset()


async def test_a_slash_in_a_model_may_stand_as_it_is(gateway: Operated, operator: Operator) -> None:
    gateway.beat("a", "org/smol:1b")
    begun = await operator.ask("POST", "/admin/v1/models/org/smol:1b:drain", {"deadline_s": 3600})
    assert begun.status == 202


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"30",
        b"{}",
        b'{"deadline_s":null}',
        b'{"deadline_s":true}',
        b'{"deadline_s":"30"}',
        b'{"deadline_s":30.0}',
        b'{"deadline_s":-1}',
        b'{"deadline_s":3601}',
        b'{"deadline_s":1e400}',
        b'{"deadline_s":NaN}',
        b'{"deadline_s":' + b"9" * 5000 + b"}",
        b'{"x":' + b"[" * 100_000,
        b"\xff\xfe",
    ],
)
async def test_a_drain_without_a_deadline_is_refused_and_changes_nothing(
    gateway: Operated, operator: Operator, body: bytes
) -> None:
    gateway.beat("a")
    refused = await operator.ask("POST", "/admin/v1/models/m:drain", body)
    assert (refused.status, refused.error["param"]) == (400, "deadline_s")
    assert gateway.registry.drained == frozenset()


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("DELETE", "/admin/v1/models/m:drain"),
        ("PUT", "/admin/v1/models/m:undrain"),
        ("GET", "/admin/v1/models/m:drain"),
        ("POST", "/admin/v1/models/:drain"),
        ("POST", "/admin/v1/models/m:drain/"),
        ("POST", "/admin/v1/models/m:drain%0A"),
        ("POST", "/admin/v1/models/m:Drain"),
        ("POST", "/admin/v1/models:drain"),
        ("POST", "/admin/v1/models/m"),
    ],
)
async def test_a_drain_by_another_path_or_method_is_not_found(
    gateway: Operated, operator: Operator, method: str, path: str
) -> None:
    gateway.beat("a")
    refused = await operator.ask(method, path, {"deadline_s": 1})
    assert (refused.status, refused.error["code"]) == (404, "not_found")
    assert gateway.registry.drained == frozenset()


async def test_undrain_needs_no_body_and_reads_none(gateway: Operated, operator: Operator) -> None:
    gateway.beat("a")
    gateway.registry.drain("m")
    bodies: list[Any] = [b"", b"{", {"deadline_s": 1}]
    for body in bodies:
        taken = await operator.ask("POST", "/admin/v1/models/m:undrain", body)
        assert taken.status == 200
    assert gateway.registry.drained == frozenset()


async def test_a_drain_of_the_last_worker_that_left_can_be_taken_back(
    gateway: Operated, operator: Operator
) -> None:
    gateway.beat("a")
    await operator.ask("POST", "/admin/v1/models/m:drain", {"deadline_s": 1})
    gateway.now += gateway.registry.lifetime_s
    taken = await operator.ask("POST", "/admin/v1/models/m:undrain")
    assert (taken.status, b'"workers":0' in taken.body) == (200, True)
    assert (await operator.get("/admin/v1/models"))["data"] == []
    assert (await operator.ask("POST", "/admin/v1/models/m:undrain")).status == 404


async def test_a_route_or_alias_that_one_model_serves_means_that_model(
    gateway: Operated, operator: Operator
) -> None:
    gateway.beat("a", "org/v1")
    split = (Backend("org/v1", 0.5), Backend("org/v2", 0.5))
    gateway.router.set_routes(
        [Route("chat", ("c",), backends=(Backend("org/v1"),)), Route("two", backends=split)]
    )
    for name in ("chat", "c", "org/v1"):
        assert (await operator.get(f"/admin/v1/models/{name}"))["model"] == "org/v1"
        listed = await operator.get(f"/admin/v1/workers?model={name}")
        assert [worker["worker_id"] for worker in listed["data"]] == ["a"]
        begun = await operator.ask("POST", f"/admin/v1/models/{name}:drain", {"deadline_s": 1})
        assert b'"model":"org/v1"' in begun.body
        taken = await operator.ask("POST", f"/admin/v1/models/{name}:undrain")
        assert b'"model":"org/v1"' in taken.body
    assert (await operator.ask("GET", "/admin/v1/models/two")).status == 404
    refused = await operator.ask("POST", "/admin/v1/models/two:drain", {"deadline_s": 1})
    assert refused.status == 404
    assert gateway.registry.drained == frozenset()


async def test_an_engine_with_a_grpc_address_is_told_the_deadline(
    gateway: Operated, operator: Operator
) -> None:
    gateway.beat("a", grpc_address="h:50051")
    gateway.beat("b")
    await operator.ask("POST", "/admin/v1/models/m:drain", {"deadline_s": 17})
    await asyncio.sleep(0)
    assert gateway.engines_asked == [("h:50051", 17)]


# ------------------------------------------------------------------ static workers

WORKER = {"url": "http://10.0.0.7:8000/base", "model": "m"}


async def test_a_static_worker_is_added_changed_and_removed(
    gateway: Operated, operator: Operator
) -> None:
    added = await operator.ask("PUT", "/admin/v1/workers/rack/7", WORKER)
    assert added.status == 201
    (worker,) = gateway.registry.snapshot()
    assert (worker.id, worker.http_address, worker.base_path) == (
        "rack/7",
        "10.0.0.7:8000",
        "/base",
    )
    worker.in_flight = 3
    changed = await operator.ask("PUT", "/admin/v1/workers/rack/7", {**WORKER, "capacity": 4})
    assert changed.status == 200
    shown = msgspec.json.decode(changed.body)
    assert (shown["static"], shown["kv_total_blocks"], shown["in_flight"]) == (True, 4, 3)
    assert (await operator.get("/admin/v1/workers"))["data"] == [shown]
    assert (await operator.ask("DELETE", "/admin/v1/workers/rack/7")).status == 204
    assert gateway.registry.snapshot() == ()
    gone = await operator.ask("DELETE", "/admin/v1/workers/rack/7")
    assert (gone.status, gone.error["code"]) == (404, "not_found")


async def test_a_worker_that_announces_itself_is_its_own_to_change(
    gateway: Operated, operator: Operator
) -> None:
    worker = gateway.beat("a")
    for method in ("PUT", "DELETE"):
        refused = await operator.ask(method, "/admin/v1/workers/a", WORKER)
        assert (refused.status, refused.error["code"]) == (409, "conflict")
    assert gateway.registry.snapshot() == (worker,)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("a", {"url": None}, "url"),
        ("a", {"url": ""}, "url"),
        ("a", {"url": "h:8000"}, "url"),
        ("a", {"url": "http://h:99999"}, "url"),
        ("a", {"url": "http://u:p@h:8000"}, "url"),
        ("a", {"url": "http://[::1"}, "url"),
        ("a", {"model": ""}, "model"),
        ("a", {"model": "m" * 257}, "model"),
        ("a", {"role": "chief"}, "role"),
        ("a", {"role": "prefill"}, "grpc_address"),
        ("a", {"role": "decode", "kv_address": "h"}, "kv_address"),
        ("a", {"role": "prefill", "dialect": "vllm"}, "connector"),
        ("a", {"role": "prefill", "dialect": "openai"}, "role"),
        ("a", {"dialect": "vlm"}, "dialect"),
        ("a", {"dialect": "sglang", "connector": "nixl"}, "connector"),
        ("a", {"poll_interval_s": 0}, "poll_interval_s"),
        ("a", {"poll_timeout_s": 0}, "poll_timeout_s"),
        ("a", {"bootstrap_port": 0}, "bootstrap_port"),
        ("a", {"api_key_env": "NO_SUCH_VARIABLE_OF_OURS"}, "api_key_env"),
        ("a", {"api_key_file": "no/such/key"}, "api_key_file"),
        ("a", {"api_key_env": "PATH", "api_key_file": "key"}, "api_key_file"),
        ("a", {"capacity": -1}, "capacity"),
        ("a", {"capacity": "4"}, "capacity"),
        ("%C3%BC", {}, "id"),
        ("a%20b", {}, "id"),
        ("a" * 257, {}, "id"),
    ],
)
async def test_a_static_worker_that_makes_no_sense_is_refused(
    gateway: Operated, operator: Operator, path: str, fields: dict[str, Any], param: str
) -> None:
    refused = await operator.ask("PUT", f"/admin/v1/workers/{path}", {**WORKER, **fields})
    assert (refused.status, refused.error["param"]) == (400, param)
    assert gateway.registry.snapshot() == ()


async def test_a_change_that_cannot_be_kept_is_not_made(
    gateway: Operated, operator: Operator
) -> None:
    gateway.beat("a")
    gateway.store.close()
    asked: list[tuple[str, str, Any]] = [
        ("PUT", "/admin/v1/workers/s", WORKER),
        ("PUT", "/admin/v1/routes", {"routes": [{"model": "x"}]}),
        ("POST", "/admin/v1/models/m:drain", {"deadline_s": 1}),
    ]
    for method, path, body in asked:
        refused = await operator.ask(method, path, body, if_match='"routes-1"')
        assert (refused.status, refused.error["code"]) == (503, "state_unavailable")
    assert [worker.id for worker in gateway.registry.snapshot()] == ["a"]
    assert (gateway.router.table.routes, gateway.registry.drained) == ((), frozenset())
