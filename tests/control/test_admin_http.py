"""The admin application as a whole: routing, errors, the second lock, and keeping web pages out."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from pointsman.cli_admin import admin_app_commands
from pointsman.control.admin import openapi
from pointsman.control.admin.endpoint import MAX_BODY
from pointsman.domain.keys import ANONYMOUS, Principal, Scope
from pointsman.errors import NotFound
from pointsman.testing.admin import ADMIN, Operated, Operator, call
from pointsman.wire.replies import error_body

pytestmark = pytest.mark.anyio

REFERENCE = Path(__file__).parents[2] / "docs" / "admin.md"
KEYLESS = Principal("", "anonymous", frozenset(Scope))


@pytest.fixture
def gateway() -> Operated:
    return Operated()


@pytest.fixture
def operator(gateway: Operated) -> Operator:
    return Operator(gateway.app)


# ------------------------------------------------------------------ paths and methods


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/admin",
        "/admin/v1",
        "/admin/v1/",
        "/admin/v1/workers/",
        "/admin/v1/models/",
        "/admin/v1/keys/",
        "/admin/v1/routes/",
        "/admin/v1//routes",
        "/admin/v1/Routes",
        "/admin/v1/routes%00",
        "/admin/v1/routes%0A",
        "/admin/v1/../v1/routes",
    ],
)
@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_what_does_not_exist_is_not_found(operator: Operator, method: str, path: str) -> None:
    refused = await operator.ask(method, path)
    if refused.status == 405:
        assert path in ("/admin/v1/workers/", "/admin/v1/models/", "/admin/v1/keys/")
    else:
        assert (refused.status, refused.error["code"]) == (404, "not_found")


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("POST", "/admin/v1/workers", "GET, HEAD"),
        ("GET", "/admin/v1/workers/a", "DELETE, PUT"),
        ("DELETE", "/admin/v1/routes", "GET, HEAD, PUT"),
        ("OPTIONS", "/admin/v1/routes", "GET, HEAD, PUT"),
        ("BREW", "/admin/v1/keys", "GET, HEAD, POST"),
        ("GET", "/admin/v1/config:reload", "POST"),
        ("get", "/admin/v1/stats", "GET, HEAD"),
    ],
)
async def test_another_method_is_told_which_there_are(
    operator: Operator, method: str, path: str, allowed: str
) -> None:
    refused = await operator.ask(method, path)
    assert (refused.status, refused.header("allow")) == (405, allowed)
    assert refused.error["code"] is None


async def test_head_is_get(operator: Operator) -> None:
    for path, methods in openapi()["paths"].items():
        if "get" in methods and "{" not in path:
            head = await operator.ask("HEAD", path)
            get = await operator.ask("GET", path)
            assert (head.status, head.headers) == (get.status, get.headers)


async def test_the_document_is_served_as_it_is_printed(operator: Operator) -> None:
    served = await operator.get("/admin/v1/openapi.json")
    printed = CliRunner().invoke(admin_app_commands, ["openapi"])
    assert served == json.loads(printed.stdout) == openapi()
    assert served["openapi"] == "3.1.0"


def test_the_reference_page_is_up_to_date() -> None:
    printed = CliRunner().invoke(admin_app_commands, ["reference"])
    assert REFERENCE.read_text(encoding="utf-8") == printed.stdout, (
        "run `pointsman admin reference > docs/admin.md`"
    )


# ------------------------------------------------------------------ errors


async def test_a_body_over_the_limit_is_refused(gateway: Operated, operator: Operator) -> None:
    gateway.beat("a")
    padding = b" " * (MAX_BODY - len(b'{"deadline_s":1}'))
    fits = await operator.ask("POST", "/admin/v1/models/m:drain", b'{"deadline_s":1}' + padding)
    assert fits.status == 202
    over = await operator.ask("POST", "/admin/v1/models/m:drain", b'{"deadline_s":1} ' + padding)
    assert (over.status, over.error["code"]) == (413, "request_too_large")


async def test_what_nobody_foresaw_is_500_without_a_word_of_it(gateway: Operated) -> None:
    def broken() -> Any:
        raise RuntimeError("the password is swordfish")

    app = gateway.rebuilt(stats=broken)
    answered: list[Any] = []

    async def recorded(scope: Any, receive: Any, send: Any) -> None:
        async def keep(message: Any) -> None:
            answered.append(message)

        # It is raised again after the answer, so that the bridge logs and counts it.
        with pytest.raises(RuntimeError, match="swordfish"):
            await app(scope, receive, keep)
        for message in answered:
            await send(message)

    response = await call(recorded, "GET", "/admin/v1/stats", state={"principal": ADMIN})
    assert (response.status, response.error["code"]) == (500, "internal_error")
    assert b"swordfish" not in response.body and b"Traceback" not in response.body


async def test_a_client_that_leaves_in_the_middle_of_its_body_is_no_fault(
    gateway: Operated,
) -> None:
    came: list[dict[str, Any]] = [
        {"type": "http.disconnect"},
        {"type": "http.request", "body": b"{", "more_body": True},
    ]

    async def cut(scope: Any, receive: Any, send: Any) -> None:
        async def hear() -> dict[str, Any]:
            return came.pop()

        await gateway.app(scope, hear, send)

    response = await call(cut, "POST", "/admin/v1/keys", state={"principal": ADMIN})
    assert response.status == 400


async def test_an_error_is_the_same_object_as_on_the_data_path(operator: Operator) -> None:
    refused = await operator.ask("GET", "/admin/v1/nothing")
    assert refused.body == error_body(NotFound("no such path"))


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=10001", "limit"),
        ("limit=x", "limit"),
        ("limit=", "limit"),
        ("limit=1_0", "limit"),
        ("limit=" + "9" * 5000, "limit"),
        ("limit=1&limit=2", "limit"),
        ("model=a&model=a", "model"),
    ],
)
async def test_a_bad_query_names_its_parameter(operator: Operator, query: str, param: str) -> None:
    refused = await operator.ask("GET", f"/admin/v1/decisions?{query}")
    assert (refused.status, refused.error["param"]) == (400, param)


# ------------------------------------------------------------------ who may ask


@pytest.mark.parametrize("path", ["/admin/v1/workers", "/admin/v1/nothing", "/"])
async def test_without_a_principal_nothing_is_answered(gateway: Operated, path: str) -> None:
    refused = await Operator(gateway.app, None).ask("GET", path)
    assert (refused.status, refused.error["code"]) == (401, "invalid_api_key")
    assert refused.header("www-authenticate") == "Bearer"


async def test_a_state_that_is_missing_is_no_principal(gateway: Operated) -> None:
    async def bare(scope: Any, receive: Any, send: Any) -> None:
        del scope["state"]
        await gateway.app(scope, receive, send)

    assert (await call(bare, "GET", "/admin/v1/workers")).status == 401


@pytest.mark.parametrize(
    "principal",
    [ANONYMOUS, Principal("k", "t", frozenset((Scope.INFER, Scope.EMBED, Scope.DEBUG)))],
)
async def test_a_key_without_the_scope_is_refused(gateway: Operated, principal: Principal) -> None:
    refused = await Operator(gateway.app, principal).ask("GET", "/admin/v1/workers")
    assert (refused.status, refused.error["code"]) == (403, "insufficient_scope")
    assert refused.error["type"] == "permission_error"


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        ("127.0.0.1:8080", None, 200),
        ("127.0.0.1:8080", "http://127.0.0.1:8080", 200),
        ("127.8.9.1", "http://127.8.9.1", 200),
        ("127.0.0.1:80", "http://127.0.0.1", 200),
        ("localhost:443", "https://LOCALHOST", 200),
        ("pages.localhost:8080", None, 200),
        ("localhost.:8080", None, 200),
        ("[::1]:8080", "http://[::1]:8080", 200),
        (None, None, 200),
        # Another page of this machine, another scheme's port, no page at all.
        ("127.0.0.1:8080", "http://127.0.0.1:3000", 403),
        ("127.0.0.1:8080", "http://localhost:8080", 403),
        ("127.0.0.1:8080", "https://127.0.0.1", 403),
        ("127.0.0.1:8080", "https://evil.example", 403),
        ("127.0.0.1:8080", "http://127.0.0.1:8080@evil.example", 403),
        ("127.0.0.1:8080", "http://127.0.0.1:8080.evil.example", 403),
        ("127.0.0.1:8080", "http://127.0.0.1:8080/evil", 403),
        ("127.0.0.1:8080", "null", 403),
        ("127.0.0.1:8080", "", 403),
        ("127.0.0.1:8080", "chrome-extension://abc", 403),
        (None, "http://127.0.0.1", 403),
        # A name that resolves to loopback today, and what a parser could take for one.
        ("rebound.example:8080", None, 403),
        ("rebound.example:8080", "http://rebound.example:8080", 403),
        ("localhost.evil.example", None, 403),
        ("evillocalhost", None, 403),
        ("127.0.0.1.evil.example", None, 403),
        ("2130706433", None, 403),
        ("0.0.0.0", None, 403),
        ("10.0.0.5:8080", None, 403),
        ("evil.example@127.0.0.1", None, 403),
        ("127.0.0.1:99999", None, 403),
        ("127.0.0.1:x", None, 403),
        ("[::1", None, 403),
        ("", None, 403),
    ],
)
async def test_without_a_key_only_this_machine_and_no_web_page(
    gateway: Operated, host: str | None, origin: str | None, status: int
) -> None:
    keyless = Operator(gateway.app, KEYLESS)
    for method, path in (("GET", "/admin/v1/stats"), ("POST", "/admin/v1/config:reload")):
        response = await keyless.ask(method, path, host=host, origin=origin)
        assert response.status == status, response.body
    # Whoever has a key came by it on purpose.
    keyed = await Operator(gateway.app).ask("GET", "/admin/v1/stats", host=host, origin=origin)
    assert keyed.status == 200


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("forwarded", "for=8.8.8.8"),
        ("via", "1.1 proxy"),
        ("x-forwarded-for", "8.8.8.8"),
        ("x-forwarded-host", "gateway.example"),
        ("x-forwarded-proto", "https"),
        ("x-real-ip", "8.8.8.8"),
        ("sec-fetch-site", "cross-site"),
        ("sec-fetch-site", "same-site"),
    ],
)
async def test_without_a_key_nobody_comes_through_a_proxy_or_from_another_page(
    gateway: Operated, name: str, value: str
) -> None:
    lines = [(b"host", b"127.0.0.1"), (name.encode(), value.encode())]
    state = {"principal": KEYLESS}
    refused = await call(gateway.app, "GET", "/admin/v1/stats", headers=lines, state=state)
    assert refused.status == 403
    lines[1] = (b"sec-fetch-site", b"same-origin")
    served = await call(gateway.app, "GET", "/admin/v1/stats", headers=lines, state=state)
    assert served.status == 200


@pytest.mark.parametrize("name", ["host", "origin"])
async def test_two_headers_where_there_can_be_one_are_refused(gateway: Operated, name: str) -> None:
    value = b"127.0.0.1" if name == "host" else b"http://127.0.0.1"
    lines = [(b"host", b"127.0.0.1"), (name.encode(), value), (name.encode(), value)]
    state = {"principal": KEYLESS}
    refused = await call(gateway.app, "GET", "/admin/v1/stats", headers=lines, state=state)
    assert refused.status == 403


# ------------------------------------------------------------------ the gateway itself


async def test_counts_are_shown(operator: Operator) -> None:
    stats = await operator.get("/admin/v1/stats")
    assert (stats["requests_total"], stats["failovers_total"]) == (7, 2)
    assert stats["workers"] == {"a": 7}


async def test_a_reload_answers_with_what_is_in_force(
    gateway: Operated, operator: Operator
) -> None:
    gateway.reloaded = msgspec.structs.replace(gateway.reloaded, changed=("max_attempts",))
    done = await operator.ask("POST", "/admin/v1/config:reload")
    assert done.status == 200
    shown = msgspec.json.decode(done.body)
    assert shown["last_reload"]["changed"] == ["max_attempts"]
    assert shown == await operator.get("/admin/v1/config")


async def test_a_reload_that_failed_says_why(gateway: Operated, operator: Operator) -> None:
    gateway.reloaded = msgspec.structs.replace(
        gateway.reloaded, ok=False, message="gateway.listen: the port is missing"
    )
    refused = await operator.ask("POST", "/admin/v1/config:reload")
    assert (refused.status, refused.error["message"]) == (
        400,
        "gateway.listen: the port is missing",
    )
    assert (await operator.get("/admin/v1/config"))["last_reload"]["ok"] is False
