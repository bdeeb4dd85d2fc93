"""The end of a gateway: what is told to balancers, to clients that wait and to streams that run (O01)."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from pointsman.testing.client import Client, post
from pointsman.testing.gateways import fronted
from pointsman.testing.origin import (
    Conversation,
    Origin,
    Script,
    event,
    hangs,
    json_answer,
    sse_chunk,
    sse_head,
)
from pointsman.wire.sse import ERROR_EVENT

pytestmark = pytest.mark.anyio

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
STREAM = CHAT | {"stream": True}
BEGUN = sse_head() + sse_chunk(event("a"))
LAST = sse_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nhost: gateway\r\n\r\n".encode()


def waits_for(free: asyncio.Event) -> Script:
    """Begin a stream, or nothing of a plain answer, and end it when told."""

    async def script(talk: Conversation) -> None:
        streamed = b'"stream":true' in talk.request.body
        if streamed:
            await talk.send(BEGUN)
        await free.wait()
        await talk.send(LAST if streamed else json_answer({"ok": 1}))

    return script


async def until_refused(address: tuple[str, int]) -> None:
    """Connect again and again, until nobody listens."""
    while True:
        try:
            async with Client(address) as client:
                await client.rest()
        except ConnectionRefusedError:
            return


# In this process.


async def test_o01_readiness_goes_first_and_connections_are_taken_meanwhile() -> None:
    async with (
        fronted(shutdown_grace_s=30.0) as (_, gateway, client),
        Client(gateway.health_address) as health,
    ):
        assert (await health.ask(get("/readyz"))).status == 200
        draining = asyncio.get_running_loop().create_task(gateway.drain())
        response = await health.ask(get("/readyz"))
        assert (response.status, response.body) == (503, b"draining\n")
        async with Client(gateway.address) as late:
            response = await late.ask(post(CHAT))
            assert (response.status, response.header("connection")) == (200, "close")
            assert await late.rest() == b""
        assert (await client.ask(post(CHAT))).header("connection") == "close"
        draining.cancel()


async def test_o01_what_runs_ends_in_peace() -> None:
    free = asyncio.Event()
    async with fronted(waits_for(free)) as (origin, gateway, idle):
        stream = Client(gateway.address)
        async with stream, Client(gateway.address) as plain:
            await idle.ask(get("/v1/models"))
            await stream.send(post(STREAM))
            await stream.read_until(b"\n\n\r\n")
            await plain.send(post(CHAT))
            await origin.received(2)
            draining = asyncio.get_running_loop().create_task(gateway.drain())
            await until_refused(gateway.address)
            assert await idle.rest() == b""  # had nothing to wait for
            assert not draining.done()
            free.set()
            assert await stream.rest() == LAST
            response = await plain.response()
            assert (response.status, response.header("connection")) == (200, "close")
            await draining


async def test_o01_a_request_that_is_being_sent_is_still_answered() -> None:
    request = post(CHAT)
    async with fronted() as (_, gateway, client), Client(gateway.address) as other:
        await client.send(request[:-5])
        await other.ask(get("/v1/models"))
        draining = asyncio.get_running_loop().create_task(gateway.drain())
        await until_refused(gateway.address)
        response = await client.ask(request[-5:])
        assert (response.status, response.header("connection")) == (200, "close")
        await draining


async def test_o01_the_drain_deadline_ends_what_still_runs_and_says_so() -> None:
    stubborn = hangs(BEGUN), hangs()
    async with fronted(*stubborn, drain_deadline_s=0.2) as (origin, gateway, stream):
        plain = Client(gateway.address)
        async with plain:
            await stream.send(post(STREAM))
            await stream.read_until(b"\n\n\r\n")
            await plain.send(post(CHAT))
            await origin.received(2)
            await gateway.drain()
            assert await stream.rest() == sse_chunk(ERROR_EVENT) + b"0\r\n\r\n"
            response = await plain.response()
            assert (response.status, response.error["code"]) == (503, "no_capacity")
            assert await plain.rest() == b""
            await origin.left(2)
            assert gateway.registry.snapshot()[0].in_flight == 0


# As a process of its own.


@asynccontextmanager
async def served(
    folder: Path, worker: str, **options: Any
) -> AsyncIterator[tuple[asyncio.subprocess.Process, tuple[str, int], tuple[str, int]]]:
    """Run `pointsman serve` over one worker; give the process, its address and that of its health port."""
    lines = [f"{key} = {value!r}" for key, value in options.items()]
    config = folder / "gateway.toml"
    config.write_text(
        "[gateway]\nlisten = '127.0.0.1:0'\nhealth_listen = '127.0.0.1:0'\n"
        "registry_listen = '127.0.0.1:0'\nlog_format = 'text'\n"
        + "\n".join(lines)
        + f"\n[[gateway.workers]]\nid = 'a'\nurl = 'http://{worker}'\nmodel = 'm'\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pointsman", "serve", "--config", str(config),
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stderr is not None
        line = ""
        while "serving on" not in line:
            line = (await process.stderr.readline()).decode()
            assert line, "the gateway ended before it served"
        words = line.replace(",", "").split()
        host, port = words[words.index("serving") + 2].rsplit(":", 1)
        health = words[words.index("health") + 2].rsplit(":", 1)
        yield process, (host, int(port)), (health[0], int(health[1]))
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_o01_a_signal_drains_and_exits_0(tmp_path: Path, number: signal.Signals) -> None:
    free = asyncio.Event()
    async with (
        Origin(waits_for(free)) as origin,
        served(tmp_path, origin.address) as (
            process,
            address,
            health,
        ),
    ):
        async with Client(address) as stream, Client(address) as plain, Client(health) as watch:
            assert (await watch.ask(get("/readyz"))).status == 200
            await stream.send(post(STREAM))
            await stream.read_until(b"\n\n\r\n")
            await plain.send(post(CHAT))
            await origin.received(2)
            process.send_signal(number)
            await until_refused(address)
            assert (await watch.ask(get("/readyz"))).body == b"draining\n"
            free.set()
            assert await stream.rest() == LAST
            assert (await plain.response()).status == 200
        assert await process.wait() == 0


async def test_o01_the_deadline_ends_a_stream_with_the_error_event_and_exits_0(
    tmp_path: Path,
) -> None:
    async with (
        Origin(hangs(BEGUN)) as origin,
        served(tmp_path, origin.address, drain_deadline_s=0.2) as (process, address, _),
        Client(address) as stream,
    ):
        await stream.send(post(STREAM))
        await stream.read_until(b"\n\n\r\n")
        process.terminate()
        assert await stream.rest() == sse_chunk(ERROR_EVENT) + b"0\r\n\r\n"
        assert await process.wait() == 0


async def test_o01_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    async with (
        Origin(hangs(BEGUN)) as origin,
        served(tmp_path, origin.address, drain_deadline_s=300.0) as (
            process,
            address,
            health,
        ),
    ):
        async with Client(address) as stream, Client(health) as watch:
            await stream.send(post(STREAM))
            await stream.read_until(b"\n\n\r\n")
            process.terminate()
            while (await watch.ask(get("/readyz"))).status == 200:
                pass
            process.terminate()
            assert await stream.rest() == sse_chunk(ERROR_EVENT) + b"0\r\n\r\n"
        assert await process.wait() == 0


@pytest.mark.slow
async def test_a_reload_that_hangs_keeps_no_gateway_from_ending(tmp_path: Path) -> None:
    """A file on a network that is gone does not answer; signals are heard, and the process ends."""
    async with (
        Origin() as origin,
        served(tmp_path, origin.address, drain_deadline_s=0.1) as (process, _, health),
        Client(health) as watch,
    ):
        config = tmp_path / "gateway.toml"
        config.unlink()
        os.mkfifo(config)
        for _ in range(50):
            process.send_signal(signal.SIGHUP)
        process.terminate()
        while (await watch.ask(get("/readyz"))).status == 200:
            pass
        assert await process.wait() == 0


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("gateway.max_atempts=3", "max_attempts"),
        ("gateway.max_attempts=0", "gateway.max_attempts"),
        ("gateway.route_policy=afinity", "affinity"),
        ("gateway.listen=0.0.0.0:0", "allow_unauthenticated"),
        ("gateway.listen=127.0.0.1:99999", "gateway.listen"),
        ("gateway.keys_file=keys", "gateway.keys_file"),
    ],
)
async def test_a_bad_configuration_exits_2_and_names_the_key(setting: str, named: str) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pointsman", "serve", "--set", setting,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    _, said = await process.communicate()
    assert process.returncode == 2
    assert named in said.decode()
    assert "Traceback" not in said.decode()


async def test_an_address_that_is_taken_exits_2_and_says_so() -> None:
    async with Origin() as origin:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "pointsman", "serve",
            "--set", f"gateway.listen={origin.address}",
            "--set", "gateway.health_listen=127.0.0.1:0",
            "--set", "gateway.registry_listen=127.0.0.1:0",
            stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        _, said = await process.communicate()
    assert process.returncode == 2
    assert "cannot listen" in said.decode()
    assert "Traceback" not in said.decode()
