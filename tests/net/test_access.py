"""Who gets in, over real sockets: keys, their scopes and models, and what a key's request carries further."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pointsman.app import Gateway
from pointsman.config import Mount
from pointsman.domain.routes import Backend, Route
from pointsman.testing.client import Client, Response, get, post
from pointsman.testing.gateways import Keys, bearer, counted, fronted, running
from pointsman.testing.origin import Origin, Script, answers, dead_address, streams

pytestmark = pytest.mark.anyio

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Once"}]}
PATHS = ("/v1/completions", "/v1/responses", "/v1/messages", "/v1/rerank", "/v1/score")

NEVER_MADE = "tl_aaaaaaaaaaaa_" + 32 * "A"
MALFORMED = (
    b"",
    b"Bearer",
    b"Bearer ",
    b"Bearer tl_bogus_key",
    b"Bearer sk-somebody-elses",
    b"Bearer \xff\xfe",
    b"Bearer " + b"x" * 10_000,
    b"Negotiate oYIBhg==",
)


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path)


@asynccontextmanager
async def guarded(
    keys: Keys, *scripts: Script, **options: Any
) -> AsyncIterator[tuple[Origin, Gateway, Client]]:
    """Run an origin (worker `a`, model `m`) behind a gateway with these keys, and a client of it."""
    async with fronted(*scripts, **keys.options, **options) as parts:
        yield parts


def raw(
    method: str, path: str, *authorizations: bytes, body: bytes = b"", more: bytes = b""
) -> bytes:
    """Return a request with `Authorization` headers as they are."""
    lines = b"".join(b"Authorization: %b\r\n" % each for each in authorizations)
    head = f"{method} {path} HTTP/1.1\r\nhost: gateway\r\ncontent-length: {len(body)}\r\n"
    return head.encode() + lines + more + b"\r\n" + body


def told(response: Response) -> tuple[int, str | None, str | None]:
    """Return the status, type and code of a refusal, whose error has all four keys."""
    return response.status, response.error["type"], response.error["code"]


NO_KEY = (401, "invalid_request_error", "invalid_api_key")
NO_SCOPE = (403, "permission_error", "insufficient_scope")


# Who is nobody.


async def test_every_key_that_is_not_good_gets_the_very_same_401(keys: Keys) -> None:
    good, revoked, expired, not_yet = [
        keys.make("infer", "embed", "admin", expires_at=end)
        for end in (None, None, int(time.time()), int(time.time()) + 3600)
    ]
    keys.file.revoke(revoked.split("_")[1])
    wrong = good[:-1] + ("A" if good[-1] != "A" else "B")
    whole = f"Bearer {good}".encode()
    refused = [(), *[(each,) for each in MALFORMED], (whole, whole), (b"", whole), (whole, b"")]
    refused += [(f"Bearer {text}".encode(),) for text in (revoked, expired, wrong, NEVER_MADE)]
    refused += [(whole + b", " + whole,), (whole + b"A",), (whole[:-1],), (good.encode(),)]
    refused += [(b"Basic " + good.encode(),), (whole.replace(b" ", b"\t"),)]
    bodies = set()
    async with guarded(keys) as (origin, gateway, client):
        for each in refused:
            for method, path in (
                ("POST", "/v1/chat/completions"),
                ("POST", "/v1/embeddings"),
                ("GET", "/v1/chat/completions"),
                ("GET", "/v1/models"),
                ("GET", "/v1/models/m"),
                ("GET", "/nowhere"),
                ("GET", "/admin/v1/keys"),
                ("DELETE", "/admin/v1/keys/x"),
            ):
                response = await client.ask(raw(method, path, *each))
                assert told(response) == NO_KEY, (method, path, each)
                assert response.header("www-authenticate") == "Bearer"
                assert response.header("connection") == "keep-alive"
                bodies.add(response.body)
        assert len(bodies) == 1
        assert counted(gateway, 'tl_gateway_requests_total{code="401"') == 8 * len(refused)
        for key in (good, not_yet):
            assert (await client.ask(post(CHAT, headers=bearer(key)))).status == 200
        assert len(origin.requests) == 2


@pytest.mark.parametrize("scheme", ["Bearer ", "bearer ", "BEARER ", "bEaReR    "])
async def test_the_scheme_may_be_in_any_case(keys: Keys, scheme: str) -> None:
    key = keys.make("infer")
    async with guarded(keys) as (_, _, client):
        response = await client.ask(post(CHAT, headers={"authorization": scheme + key}))
        assert response.status == 200


# A tab, and everything from a space on but DEL: the bytes that a header may have (RFC 9110 section 5.5).
LEGAL = st.integers(0x20, 0xFF).filter(lambda byte: byte != 0x7F) | st.just(0x09)
VALUES = st.builds(
    lambda start, rest: start + bytes(rest),
    st.sampled_from([b"", b"Bearer ", b"bearer tl_", b"Bearer " + NEVER_MADE[:20].encode()]),
    st.lists(LEGAL, max_size=80),
)


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(values=st.lists(st.lists(VALUES, min_size=1, max_size=3), min_size=1, max_size=8))
async def test_any_bytes_for_a_key_are_401_and_the_connection_goes_on(
    keyed: tuple[str, Client], values: list[list[bytes]]
) -> None:
    key, client = keyed
    for each in values:
        assert told(await client.ask(raw("POST", "/v1/completions", *each, body=b"x"))) == NO_KEY
    assert (await client.ask(get("/v1/models", bearer(key)))).status == 200


@pytest.fixture
async def keyed(keys: Keys) -> AsyncIterator[tuple[str, Client]]:
    key = keys.make("infer")
    async with running(**keys.options) as gateway, Client(gateway.address) as client:
        yield key, client


async def test_bytes_that_no_header_may_have_are_400_before_any_key(keys: Keys) -> None:
    keys.make("infer")
    async with running(**keys.options) as gateway:
        for byte in (b"\0", b"\x01", b"\x7f", b"a\rb"):
            async with Client(gateway.address) as client:
                response = await client.ask(raw("GET", "/v1/models", b"Bearer " + byte))
                assert (response.status, response.header("connection")) == (400, "close")


# What comes before what.


async def test_without_a_good_key_the_body_is_not_looked_at(keys: Keys) -> None:
    key = keys.make("infer")
    async with guarded(keys) as (origin, _, client):
        for body in (b"", b"{", b"[]", b"7", b"\xff", b'{"model": 7}'):
            assert told(await client.ask(post(body))) == NO_KEY
            refused = await client.ask(post(body, headers=bearer(key)))
            assert (refused.status, refused.error["type"]) == (400, "invalid_request_error"), body
        assert origin.requests == []


async def test_what_there_is_shows_only_to_keys(keys: Keys) -> None:
    key = keys.make("infer")
    table = [
        ("GET", "/", 404),
        ("GET", "/v1", 404),
        ("POST", "/v1/tokenize", 404),
        ("PUT", "/v1/models", 405),
        ("GET", "/v1/chat/completions", 405),
        ("GET", "/v1/models/none", 404),
        ("OPTIONS", "*", 404),
    ]
    async with guarded(keys) as (_, _, client):
        for method, path, status in table:
            assert told(await client.ask(raw(method, path))) == NO_KEY, path
            allowed = f"Bearer {key}".encode()
            assert (await client.ask(raw(method, path, allowed))).status == status, path


async def test_each_request_of_a_connection_is_looked_at(keys: Keys) -> None:
    key, operator = keys.make("infer"), keys.make("admin")
    async with guarded(keys) as (_, _, client):
        asked = [
            (post(CHAT, headers=bearer(key)), 200),
            (post(CHAT), 401),
            (get("/admin/v1/stats", bearer(operator)), 200),
            (get("/admin/v1/stats"), 401),
            (get("/admin/v1/stats", bearer(key)), 403),
            (post(CHAT, headers=bearer(operator)), 403),
            (get("/v1/models", bearer(key)), 200),
        ]
        for request, status in asked:
            assert (await client.ask(request)).status == status
        await client.send(b"".join(request for request, _ in asked))
        assert [(await client.response()).status for _ in asked] == [each for _, each in asked]


async def test_a_revoked_key_is_refused_at_once(keys: Keys) -> None:
    key, operator = keys.make("infer"), keys.make("admin")
    path = "/admin/v1/keys/" + key.split("_")[1]
    async with guarded(keys) as (_, gateway, client), Client(gateway.address) as admin:
        assert (await client.ask(post(CHAT, headers=bearer(key)))).status == 200
        revoked = await admin.ask(post(b"", path, bearer(operator), "DELETE"))
        assert revoked.status == 204
        assert told(await client.ask(post(CHAT, headers=bearer(key)))) == NO_KEY
        assert (await admin.ask(get("/admin/v1/stats", bearer(operator)))).status == 200


@pytest.mark.slow
async def test_a_key_that_another_process_revokes_is_refused_within_five_seconds(
    keys: Keys,
) -> None:
    key = keys.make("infer")
    async with guarded(keys) as (_, _, client):
        assert (await client.ask(post(CHAT, headers=bearer(key)))).status == 200
        keys.file.revoke(key.split("_")[1])
        since = time.monotonic()
        while (await client.ask(post(CHAT, headers=bearer(key)))).status == 200:
            assert time.monotonic() - since < 5.0


# Scopes.


async def test_each_path_needs_its_scope(keys: Keys) -> None:
    key = {scope: keys.make(scope) for scope in ("infer", "embed", "admin", "debug")}
    needs = dict.fromkeys(("/v1/chat/completions", *PATHS), "infer")
    needs["/v1/embeddings"] = "embed"
    async with guarded(keys) as (origin, _, client):
        for path, needed in needs.items():
            for scope in key:
                response = await client.ask(post(CHAT, path, bearer(key[scope])))
                assert response.status == (200 if scope == needed else 403), (path, scope)
                assert scope == needed or told(response) == NO_SCOPE
        for path in ("/v1/models", "/v1/models/m"):
            for scope in key:
                response = await client.ask(get(path, bearer(key[scope])))
                assert response.status == (200 if scope == "infer" else 403), (path, scope)
        for path in ("/admin/v1/workers", "/admin/v1/keys", "/admin/v1/openapi.json"):
            for scope in key:
                response = await client.ask(get(path, bearer(key[scope])))
                assert response.status == (200 if scope == "admin" else 403), (path, scope)
                assert scope == "admin" or told(response) == NO_SCOPE
        assert len(origin.requests) == len(needs)


# Models, under whichever name.

TABLE = (
    Route("chat", aliases=("c", "org/chat"), backends=(Backend("m"),)),
    Route("other", aliases=("o",), backends=(Backend("m"),)),
    Route("half", aliases=("h",), backends=(Backend("m", 0.5), Backend("m2", 0.5))),
)
NAMES = ("chat", "c", "org/chat", "other", "o", "half", "h", "m", "m2", "none")


@pytest.mark.parametrize(
    ("listed", "allowed"),
    [
        ((), NAMES),
        (("chat",), ("chat", "c", "org/chat")),
        (("c",), ("chat", "c", "org/chat")),
        (("org/chat", "o"), ("chat", "c", "org/chat", "other", "o")),
        (("half",), ("half", "h")),
        (("m",), ("m",)),
        (("none", "Chat", "cha"), ("none",)),
    ],
)
async def test_a_key_may_ask_for_its_models_under_every_name(
    keys: Keys, listed: tuple[str, ...], allowed: tuple[str, ...]
) -> None:
    key = keys.make("infer", "embed", models=listed)
    async with (
        Origin() as origin,
        running({"a": origin.address}, routes=TABLE, **keys.options) as gateway,
        Client(gateway.address) as client,
    ):
        for path in ("/v1/chat/completions", "/v1/embeddings"):
            got = []
            for name in NAMES:
                response = await client.ask(post({"model": name}, path, bearer(key)))
                assert response.status == 403 or name in allowed, name
                if response.status == 403:
                    assert told(response) == NO_SCOPE
                else:
                    got.append(name)
            assert tuple(got) == allowed


NAMED = {"chat": "chat", "c": "chat", "org/chat": "chat", "m": "m"}


async def test_one_table_names_models_for_every_path(keys: Keys) -> None:
    """An id, an alias, an alias with a slash and the served id mean the same wherever a model can be named."""
    routes = (Route("chat", aliases=("c", "org/chat"), backends=(Backend("m"),)),)
    operator = bearer(keys.make("infer", "admin"))
    allowed = {name: keys.make("infer", models=[name]) for name in NAMED}
    async with guarded(keys, routes=routes) as (origin, _, client):

        async def ask(request: bytes) -> Any:
            response = await client.ask(request)
            assert response.status < 300, response.body
            return msgspec.json.decode(response.body)

        for name, public in NAMED.items():
            for listed, key in allowed.items():
                asked = await client.ask(post({"model": name}, headers=bearer(key)))
                assert asked.status == (200 if NAMED[listed] == public else 403), (listed, name)
            assert msgspec.json.decode(origin.requests[-1].body)["model"] == "m"
            escaped = name.replace("/", "%2F")
            for spelled in {name, escaped}:
                one = await ask(get(f"/v1/models/{spelled}", operator))
                assert one["id"] == public
                path = f"/admin/v1/models/{spelled}"
                drained = await ask(post({"deadline_s": 0}, f"{path}:drain", operator))
                assert (drained["model"], drained["workers"]) == ("m", 1)
                refused = await client.ask(post({"model": name}, headers=operator))
                assert told(refused) == (503, "server_error", "no_capacity")
                assert (await ask(get(path, operator)))["drained"] is True
                explained = await ask(post({"model": name}, "/admin/v1/route:explain", operator))
                assert (explained["served_model"], explained["pick"]) == ("m", None)
                assert (await ask(post(b"", f"{path}:undrain", operator)))["model"] == "m"
            explained = await ask(post({"model": name}, "/admin/v1/route:explain", operator))
            assert (explained["served_model"], explained["pick"]) == ("m", "a")
            assert explained["route"] == (None if name == "m" else "chat")
            listed = await ask(get(f"/admin/v1/workers?model={escaped}", operator))
            assert [each["worker_id"] for each in listed["data"]] == ["a"]


# What the engine and the client see of it.


async def test_the_engine_sees_the_priority_of_the_key_and_no_credentials(keys: Keys) -> None:
    low, high = keys.make("infer", priority=-100), keys.make("infer", priority=7)
    async with guarded(keys) as (origin, _, client):
        forged = {"X-TL-Priority": "forged-by-client", "x-tl-PRIORITY": "100"}
        named = {"connection": "x-tl-priority, authorization"}
        for key, priority in ((low, "-100"), (high, "7")):
            for headers in ({}, forged, named, forged | named):
                await client.ask(post(CHAT, headers=bearer(key) | headers))
                seen = origin.requests[-1]
                internal = [each for each in seen.headers if each[0].startswith("x-tl-")]
                assert internal == [("x-tl-priority", priority)]
                assert seen.header("authorization") is None
                assert not any(key in value for _, value in seen.headers)


async def test_without_keys_the_engine_sees_no_priority_and_no_credentials() -> None:
    async with fronted() as (origin, _, client):
        forged = {"X-TL-Priority": "forged-by-client", "authorization": "Bearer whatever"}
        assert (await client.ask(post(CHAT, headers=forged))).status == 200
        names = [name for name, _ in origin.requests[0].headers]
        assert not {"authorization", "x-tl-priority"} & set(names)


LEAK = (("X-TL-Route", "leak"), ("x-tl-Internal", "leak"))


def shown(response: Response) -> list[tuple[str, str]]:
    """Return the internal headers of an answer."""
    return [each for each in response.headers if each[0].startswith("x-tl-")]


async def test_route_header_only_for_debug(keys: Keys) -> None:
    """Worker ids are for keys with the scope `debug`; what an engine says of itself is for nobody."""
    plain = keys.make("infer", "embed", "admin")
    debug = keys.make("infer", "debug")
    leaking, refusing = answers({}, headers=LEAK), answers({}, 400, LEAK)
    scripts = [leaking, refusing, answers({}, 429, LEAK), streams("a", "b")]
    named = [("x-tl-route", "a")]
    for key, route in ((plain, named[1:]), (debug, named)):
        async with guarded(keys, *scripts) as (_, _, client):
            for status in (200, 400, 429, 200):
                response = await client.ask(post(CHAT, headers=bearer(key)))
                assert (response.status, shown(response)) == (status, route)
            assert response.complete and b"[DONE]" in response.body
            for own in (b"{", b'{"model": "none"}'):
                assert shown(await client.ask(post(own, headers=bearer(key)))) == []
            for path in ("/v1/models", "/nowhere", "/admin/v1/stats"):
                assert shown(await client.ask(get(path, bearer(key)))) == []


async def test_the_route_header_names_the_worker_that_answered(keys: Keys) -> None:
    debug = bearer(keys.make("infer", "debug"))
    async with Origin(answers({}, 503, LEAK)) as full, Origin(streams("x")) as good:
        workers = {"a": dead_address(), "b": full.address, "c": good.address}
        async with running(workers, **keys.options) as gateway, Client(gateway.address) as client:
            response = await client.ask(post(CHAT, headers=debug))
            assert (response.status, shown(response)) == (200, [("x-tl-route", "c")])
        workers = {"a": dead_address(), "b": full.address}
        async with running(workers, **keys.options) as gateway, Client(gateway.address) as client:
            response = await client.ask(post(CHAT, headers=debug))
            assert (response.status, shown(response)) == (503, [])


async def test_a_gateway_without_keys_names_no_worker() -> None:
    async with fronted(answers({}, headers=LEAK), streams("a")) as (_, _, client):
        for _ in range(2):
            assert shown(await client.ask(post(CHAT, headers={"X-TL-Route": "a"}))) == []


# Applications, and the admin API.

PAGES = """
import json

async def application(scope, receive, send):
    body = json.dumps([scope["path"], scope["state"]["principal"].tenant]).encode()
    headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})
"""


async def test_a_mounted_application_needs_its_scope_and_is_told_who_asks(
    keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pages_of_this_test.py").write_text(PAGES)
    monkeypatch.syspath_prepend(tmp_path)
    app = "pages_of_this_test:application"
    mounts = (Mount("/ops", app), Mount("/pages", app, "infer"), Mount("/open", app, "none"))
    key, operator = keys.make("infer"), keys.make("admin")
    table: list[tuple[str, dict[str, str], int, str]] = [
        ("/ops", {}, 401, ""),
        ("/ops/x", bearer(key), 403, ""),
        ("/ops/../open", bearer(key), 403, ""),
        ("/open/../ops", {}, 200, "anonymous"),  # It is `/open` that gets it.
        ("/ops", bearer(operator), 200, "acme"),
        ("/pages/", bearer(key), 200, "acme"),
        ("/pages", bearer(operator), 403, ""),
        ("/pagesx", bearer(key), 404, ""),
        ("/open", {}, 200, "anonymous"),
        ("/open", bearer("tl_bogus_key"), 200, "anonymous"),
        ("/open", bearer(key), 200, "acme"),
    ]
    async with guarded(keys, mounts=mounts) as (_, _, client):
        for path, headers, status, tenant in table:
            response = await client.ask(get(path, headers))
            assert response.status == status, (path, headers)
            if status == 200:
                assert msgspec.json.decode(response.body) == [path, tenant]
                assert response.header("x-request-id")
            else:
                assert response.error["message"]


async def test_no_spelling_of_a_path_leads_around_the_check(keys: Keys) -> None:
    """Whoever is told anything by the admin API has shown a key with the scope `admin`."""
    outsider = f"Bearer {keys.make('infer', 'embed', 'debug')}".encode()
    operator = f"Bearer {keys.make('admin')}".encode()
    paths = [
        *("/admin", "/admin/", "/admin/v1/keys", "/admin/v1/keys/", "/admin/v1/keys?x=1"),
        *("//admin/v1/keys", "/admin//v1/keys", "///admin/v1/keys", "/./admin/v1/keys"),
        *("/%61dmin/v1/keys", "/admin%2Fv1%2Fkeys", "/admin/%76%31/keys", "/%2Fadmin/v1/keys"),
        *("/admin/../admin/v1/keys", "/v1/../admin/v1/keys", "/v1/models/../../admin/v1/keys"),
        *("/v1/models/%2e%2e/%2e%2e/admin/v1/keys", "/v1/models/..%2f..%2fadmin%2fv1%2fkeys"),
        *("/ADMIN/v1/keys", "/Admin/v1/keys", "/admin/V1/KEYS", "/admin;x/v1/keys"),
        *("/admin.json/v1/keys", "/administrator", "/admin\\v1\\keys", "/admin/v1/keys%00"),
        *("http://gateway/admin/v1/keys", "HTTP://gateway/admin/v1/keys", "http:///admin/v1/keys"),
        *("http://gateway//admin/v1/keys", "https://a@b:1/admin/v1/keys", "*"),
    ]
    answered = set()
    async with guarded(keys) as (_, gateway, _):
        for path in paths:
            for method in ("GET", "HEAD", "OPTIONS", "POST", "PUT", "DELETE", "PATCH"):
                async with Client(gateway.address) as client:
                    for authorization in ((), (outsider,), (outsider, operator)):
                        request = raw(method, path, *authorization)
                        if method == "HEAD":
                            await client.send(request)
                            status, _ = await client.head()
                            body = b""
                        else:
                            response = await client.ask(request)
                            status, body = response.status, response.body
                        tried = (method, path, len(authorization))
                        if status == 400:  # llhttp takes no such target.
                            break
                        expected = {403, 404, 405} if len(authorization) == 1 else {401}
                        assert status in expected, (status, tried)
                        assert b'"data"' not in body, tried
            async with Client(gateway.address) as client:
                if (await client.ask(raw("GET", path, operator))).status == 200:
                    answered.add(path)
    assert {"/admin/v1/keys", "http://gateway/admin/v1/keys"} <= answered
    assert not [path for path in answered if "admin/" not in path], answered


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        ("127.0.0.1", "", 200),
        ("localhost:8080", "", 200),
        ("[::1]:8080", "", 200),
        ("localhost:8080", "http://localhost:8080", 200),
        ("localhost:8080", "http://localhost:9999", 403),
        ("localhost:8080", "https://evil.example", 403),
        ("localhost:8080", "null", 403),
        ("evil.example", "", 403),
        ("localhost.evil.example", "", 403),
        ("127.0.0.1.evil.example", "", 403),
    ],
)
async def test_without_keys_only_this_machine_administers_and_no_web_page(
    host: str, origin: str, status: int
) -> None:
    headers = f"host: {host}\r\n" + (f"origin: {origin}\r\n" if origin else "")
    async with running() as gateway, Client(gateway.address) as client:
        for path in ("/admin/v1/stats", "http://localhost/admin/v1/stats"):
            request = f"GET {path} HTTP/1.1\r\n{headers}\r\n".encode()
            assert (await client.ask(request)).status == status


async def test_without_keys_nobody_administers_a_gateway_that_others_can_reach() -> None:
    options: dict[str, Any] = {"listen": "0.0.0.0:0", "allow_unauthenticated": True}
    async with (
        Origin() as origin,
        running({"a": origin.address}, **options) as gateway,
        Client(("127.0.0.1", gateway.address[1])) as client,
    ):
        assert (await client.ask(post(CHAT))).status == 200
        for path in ("/admin", "/admin/v1/stats", "/admin/v1/openapi.json"):
            request = f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode()
            assert told(await client.ask(request)) == NO_SCOPE


async def test_admin_routes_workers_drain_over_sockets(keys: Keys) -> None:
    """Read, replace under If-Match, drain and take back, and what each of it means for the next request."""
    key, operator = bearer(keys.make("infer")), bearer(keys.make("admin"))
    async with guarded(keys) as (origin, gateway, client), Client(gateway.address) as admin:
        routes = await admin.ask(get("/admin/v1/routes", operator))
        tag = routes.header("etag") or ""
        assert (routes.status, tag) == (200, '"routes-1"')
        table = {"routes": [{"model": "chat", "backends": [{"model": "m", "weight": 1.0}]}]}
        assert (await client.ask(post({"model": "chat"}, headers=key))).status == 404
        for if_match, status, code in (
            ("", 428, "if_match_required"),
            ('"routes-2"', 412, "etag_mismatch"),
            ("*", 412, "etag_mismatch"),
            (f"W/{tag}", 412, "etag_mismatch"),
        ):
            headers = operator | ({"if-match": if_match} if if_match else {})
            refused = await admin.ask(post(table, "/admin/v1/routes", headers, "PUT"))
            assert (refused.status, refused.error["code"]) == (status, code)
        assert (await client.ask(post({"model": "chat"}, headers=key))).status == 404
        put = await admin.ask(post(table, "/admin/v1/routes", operator | {"if-match": tag}, "PUT"))
        assert (put.status, put.header("etag")) == (200, '"routes-2"')
        assert (await client.ask(post({"model": "chat"}, headers=key))).status == 200
        again = await admin.ask(
            post(table, "/admin/v1/routes", operator | {"if-match": tag}, "PUT")
        )
        assert again.status == 412

        drain = "/admin/v1/models/m:drain"
        assert (await admin.ask(post({}, drain, operator))).error["param"] == "deadline_s"
        drained = await admin.ask(post({"deadline_s": 30}, drain, operator))
        assert drained.status == 202
        assert msgspec.json.decode(drained.body)["workers"] == 1
        assert (await client.ask(post({"model": "chat"}, headers=key))).status == 503
        workers = msgspec.json.decode((await admin.ask(get("/admin/v1/workers", operator))).body)
        assert workers["route_epoch"] == 2
        (worker,) = workers["data"]
        assert (worker["worker_id"], worker["drained"], worker["draining"]) == ("a", True, False)
        undrained = await admin.ask(post(b"", "/admin/v1/models/m:undrain", operator))
        assert undrained.status == 200
        assert (await client.ask(post({"model": "chat"}, headers=key))).status == 200
    assert len(origin.requests) == 2


async def test_a_key_for_some_models_must_name_its_model_once(keys: Keys) -> None:
    """An engine that reads the first of two would serve one that the key is not for."""
    some, every = keys.make("infer", models=["m"]), keys.make("infer")
    async with guarded(keys) as (origin, _, client):
        for body in (b'{"model":"n","model":"m"}', b'{"model":"n","mod\\u0065l":"m"}'):
            refused = await client.ask(post(body, headers=bearer(some)))
            assert (refused.status, refused.error["param"]) == (400, "model")
            assert (await client.ask(post(body, headers=bearer(every)))).status == 200
        assert len(origin.requests) == 2
