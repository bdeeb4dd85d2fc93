"""A user's own endpoints: ASGI applications beside the gateway's, behind its keys, on its connections."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from pointsman.app import Gateway
from pointsman.config import Config, ConfigError, GatewayConfig, Mount
from pointsman.testing.client import Client, get, post
from pointsman.testing.gateways import ANY, Keys, bearer, running

pytestmark = pytest.mark.anyio

PAGES = """
import json

async def who(scope, receive, send):
    message = await receive()
    state = scope["state"]
    said = {
        "path": scope["path"],
        "body": message["body"].decode(),
        "key_id": state["principal"].key_id,
        "tenant": state["principal"].tenant,
        "request_id": state["request_id"],
    }
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": json.dumps(said).encode()})

async def fails(scope, receive, send):
    raise RuntimeError("on purpose")

number = 7
"""
REQUEST_ID = {"x-request-id": "3f1c"}


@pytest.fixture(autouse=True)
def pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_pages.py").write_text(PAGES)
    (tmp_path / "own_broken.py").write_text("raise RuntimeError('no database')")
    monkeypatch.syspath_prepend(tmp_path)


async def test_an_application_is_served_beside_the_gateways(tmp_path: Path) -> None:
    """Its scope is asked for; it sees who asks, and its answer has the request's id."""
    keys = Keys(tmp_path)
    admin, infer = keys.make("admin"), keys.make("infer")
    mounts = (
        Mount(path="/pages", app="own_pages:who", scope="infer"),
        Mount(path="/pages/deep", app="own_pages:who", scope="admin"),
        Mount(path="/open", app="own_pages:who", scope="none"),
    )
    async with (
        running(mounts=mounts, **keys.options) as gateway,
        Client(gateway.address) as client,
    ):
        response = await client.ask(post(b"hi", "/pages/a%20b", REQUEST_ID | bearer(infer)))
        assert response.status == 200
        assert msgspec.json.decode(response.body) == {
            **{"path": "/pages/a b", "body": "hi", "tenant": "acme", "request_id": "3f1c"},
            "key_id": infer.split("_")[1],
        }
        assert response.header("x-request-id") == "3f1c"

        expected: list[tuple[str, dict[str, str], int]] = [
            ("/pages", {}, 401),
            ("/pages", bearer("tl_x_y"), 401),
            ("/pages", bearer(admin), 403),
            ("/pages/deep", bearer(infer), 403),
            ("/pages/deep/er", bearer(infer), 403),
            ("/pages/deep", bearer(admin), 200),
            ("/pages/deeper", bearer(infer), 200),
            ("/open", {}, 200),
            ("/open/", bearer("tl_x_y"), 200),
            ("/opened", bearer(infer), 404),
            ("/v1/models", bearer(infer), 200),
        ]
        for path, headers, status in expected:
            response = await client.ask(get(path, headers | REQUEST_ID))
            assert (path, response.status) == (path, status)
            assert response.header("x-request-id") == "3f1c"
            if status in (401, 403):
                assert response.error["code"] in ("invalid_api_key", "insufficient_scope")

        nobody = msgspec.json.decode((await client.ask(get("/open"))).body)
        assert (nobody["key_id"], nobody["tenant"]) == ("", "anonymous")
        somebody = msgspec.json.decode((await client.ask(get("/open", bearer(infer)))).body)
        assert somebody["tenant"] == "acme"


async def test_an_application_that_fails_is_an_error_of_its_own(
    caplog: pytest.LogCaptureFixture,
) -> None:
    mounts = (Mount(path="/fails", app="own_pages:fails", scope="none"),)
    async with running(mounts=mounts) as gateway:
        async with Client(gateway.address) as client:
            response = await client.ask(get("/fails", REQUEST_ID))
            assert (response.status, response.error["code"]) == (500, "internal_error")
            assert response.header("x-request-id") == "3f1c"
        async with Client(gateway.address) as client:
            assert (await client.ask(get("/v1/models"))).status == 200
    assert "on purpose" in caplog.text
    caplog.clear()


@pytest.mark.parametrize(
    ("app", "why"),
    [
        ("own_absent:app", "own_absent"),
        ("own_pages:absent", "absent"),
        ("own_pages:number", "int"),
        ("own_broken:app", "no database"),
        ("own_pages", "package.module:name"),
    ],
)
async def test_a_mount_that_cannot_be_served_stops_the_start_and_is_named(
    app: str, why: str
) -> None:
    mounts = (Mount(path="/ok", app="own_pages:who"), Mount(path="/pages", app=app))
    options: dict[str, Any] = dict.fromkeys(("listen", "health_listen", "registry_listen"), ANY)
    with pytest.raises(ConfigError, match=r"gateway\.mounts: mount /pages") as refused:
        Gateway(Config(gateway=GatewayConfig(mounts=mounts, **options)))
    assert app in str(refused.value)
    assert why in str(refused.value)
