"""Keys of a running gateway: the file is followed, whoever changes it, and a broken one changes nothing."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from pointsman.app import Gateway
from pointsman.config import Config, ConfigError, GatewayConfig
from pointsman.domain.keys import parse_key
from pointsman.testing.client import Client, get, post
from pointsman.testing.gateways import ANY, PEPPER, Keys, bearer, counted, fronted, running

pytestmark = pytest.mark.anyio

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
WITHIN_S = 5.0


def key_id(text: str) -> str:
    parsed = parse_key(text.encode())
    assert parsed is not None
    return parsed[0]


async def chat(client: Client, key: str) -> int:
    return (await client.ask(post(CHAT, headers=bearer(key)))).status


async def until(happened: Callable[[], Awaitable[bool]]) -> float:
    """Ask often, and return how many seconds it took. Raises AssertionError after five."""
    began = time.monotonic()
    while not await happened():
        assert time.monotonic() - began < WITHIN_S
        await asyncio.sleep(0.05)
    return time.monotonic() - began


@pytest.mark.slow
async def test_a_key_file_that_another_process_changes_is_followed_within_5_s(
    tmp_path: Path,
) -> None:
    """Time and again: a change right after another one is not missed."""
    keys = Keys(tmp_path)
    steady = keys.make("infer")
    async with fronted(**keys.options) as (origin, gateway, client):
        for _ in range(3):
            key = await asyncio.to_thread(keys.make, "infer")
            await until(lambda key=key: is_status(client, key, 200))  # type: ignore[misc]
            assert await chat(client, key) == 200  # It is remembered as a good one now.
            await asyncio.to_thread(keys.file.revoke, key_id(key))
            await until(lambda key=key: is_status(client, key, 401))  # type: ignore[misc]
            assert await chat(client, steady) == 200
        assert counted(gateway, "tl_gateway_config_last_reload_successful") == 1
        answered = len(origin.requests)
        assert await chat(client, key) == 401
        assert len(origin.requests) == answered


async def is_status(client: Client, key: str, status: int) -> bool:
    return await chat(client, key) == status


async def test_a_key_that_the_admin_api_revokes_is_bad_at_once(tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    admin, key = keys.make("admin"), keys.make("infer")
    async with fronted(**keys.options) as (_, _, client):
        assert await chat(client, key) == 200
        path = f"/admin/v1/keys/{key_id(key)}"
        gone = await client.ask(post(b"", path, bearer(admin), "DELETE"))
        assert gone.status in (200, 204)
        response = await client.ask(post(CHAT, headers=bearer(key)))
        assert (response.status, response.error["code"]) == (401, "invalid_api_key")


@pytest.mark.slow
async def test_a_broken_key_file_keeps_the_former_keys_and_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = Keys(tmp_path)
    key = keys.make("infer")
    path = Path(keys.options["keys_file"])
    good = read(path)
    successful = "tl_gateway_config_last_reload_successful"
    async with fronted(**keys.options) as (_, gateway, client):
        for broken in (good + "{not json\n", None):  # A line that is no key, and no file.
            write(path, broken)
            await until(lambda: is_metric(gateway, successful, 0))
            assert await chat(client, key) == 200
            assert path.name in caplog.text
            assert (broken is None) or "line 2" in caplog.text
            caplog.clear()
            write(path, good)
            await until(lambda: is_metric(gateway, successful, 1))
            assert await chat(client, key) == 200
        # Good keys do not hide that a configuration was refused.
        await gateway.reload("SIGHUP")  # There is no file to read it from.
        caplog.clear()
        added = await asyncio.to_thread(keys.make, "infer")
        await until(lambda: is_status(client, added, 200))
        assert counted(gateway, successful) == 0


def read(path: Path) -> str:
    return path.read_text()


def write(path: Path, contents: str | None) -> None:
    if contents is None:
        path.unlink()
    else:
        path.write_text(contents)


async def is_metric(gateway: Gateway, name: str, value: float) -> bool:
    return counted(gateway, name) == value


@pytest.mark.parametrize(
    ("contents", "environ", "named"),
    [
        ("", {}, "TL_GATEWAY_PEPPER"),
        ("", {"TL_GATEWAY_PEPPER": ""}, "TL_GATEWAY_PEPPER"),
        (None, PEPPER, "No such file"),
        ("{}\n", PEPPER, "line 1"),
    ],
)
async def test_keys_that_cannot_be_had_stop_the_start_and_are_named(
    tmp_path: Path, contents: str | None, environ: dict[str, str], named: str
) -> None:
    path = tmp_path / "keys.jsonl"
    path.touch()
    write(path, contents)
    options: dict[str, Any] = dict.fromkeys(("listen", "health_listen", "registry_listen"), ANY)
    with pytest.raises(ConfigError, match=r"gateway\.keys_file") as refused:
        Gateway(Config(gateway=GatewayConfig(keys_file=str(path), **options)), environ=environ)
    assert named in str(refused.value)


async def test_without_keys_only_the_machine_itself_may_administer(tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    async with running() as gateway, Client(gateway.address) as client:
        assert (await client.ask(get("/admin/v1/workers"))).status == 200
    async with running(**keys.options) as gateway, Client(gateway.address) as client:
        assert (await client.ask(get("/admin/v1/workers"))).status == 401
    everywhere: dict[str, Any] = {"listen": "0.0.0.0:0", "allow_unauthenticated": True}
    async with (
        running(**everywhere) as gateway,
        Client(("127.0.0.1", gateway.address[1])) as client,
    ):
        assert (await client.ask(get("/admin/v1/workers"))).status == 403
