"""The commands against the real admin application over sockets: what one says the other understands."""

import asyncio
import shlex
import sys
from collections.abc import AsyncIterator, MutableMapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from pointsman.domain.explain import Decision, Tried
from pointsman.domain.routes import Backend, Route
from pointsman.net.asgi import AsgiServer
from pointsman.net.clock import Deadlines
from pointsman.net.downstream import Downstream
from pointsman.net.limits import DownstreamLimits
from pointsman.net.observer import Silent
from pointsman.testing.admin import ADMIN, Operated

if TYPE_CHECKING:
    from tests.remote.conftest import Run
    from typer.testing import Result

pytestmark = pytest.mark.anyio

SPLIT = Route("smol", aliases=("s",), backends=(Backend("org/smol", 0.75), Backend("new", 0.25)))


class Shell:
    """A shell whose commands reach the application; they run in threads, as the loop has to answer them."""

    def __init__(self, run: "Run", url: str) -> None:
        self._run = run
        self._url = url

    async def __call__(self, *arguments: str, **settings: Any) -> "Result":
        return await anyio.to_thread.run_sync(
            lambda: self._run(*arguments, POINTSMAN_URL=self._url, **settings)
        )


@asynccontextmanager
async def operated(run: "Run") -> AsyncIterator[tuple[Operated, Shell]]:
    """Serve the admin API of a gateway without a data plane."""
    gateway = Operated()

    async def admitted(scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        scope["state"] = {"principal": ADMIN, "request_id": "req-1"}
        await gateway.app(scope, receive, send)

    loop = asyncio.get_running_loop()
    deadlines = Deadlines(loop)
    server = AsgiServer(admitted, deadlines, Silent(), DownstreamLimits())
    listener = await loop.create_server(lambda: Downstream(server), "127.0.0.1", 0)
    host, port = listener.sockets[0].getsockname()
    try:
        yield gateway, Shell(run, f"http://{host}:{port}")
    finally:
        listener.close()
        for client in tuple(server.connections):
            client.stop()
        deadlines.close()


def squeezed(output: str) -> list[str]:
    return [" ".join(line.split()) for line in output.splitlines()]


async def test_workers_drains_and_progress(run: "Run") -> None:
    async with operated(run) as (gateway, shell):
        worker = gateway.beat("a", "org/smol")
        gateway.beat("b", "other")
        gateway.live.append((worker, gateway.now - 3.5))
        worker.in_flight = 1
        drained = await shell("drain", "org/smol", "--deadline", "9")
        assert drained.stdout == (
            "org/smol is draining: 1 worker, 1 request left, the oldest 3.5 s\n"
        )
        assert squeezed((await shell("workers", "--model", "org/smol")).stdout)[1:] == [
            "a org/smol unified tl drained 1 1 0 0 - 3.5 s 127.0.0.1:8001"
        ]
        gateway.live.clear()
        waited = await shell("drain", "org/smol", "--deadline", "9", "--wait")
        assert waited.stdout == "org/smol is drained: 1 worker, no requests left\n"
        undrained = await shell("undrain", "org/smol")
        assert undrained.stdout == "org/smol takes requests again: 1 worker\n"
        assert len(squeezed((await shell("workers")).stdout)) == 3
        assert (await shell("drain", "none", "--deadline", "9")).exit_code == 1


async def test_an_explanation_and_a_decision(run: "Run") -> None:
    async with operated(run) as (gateway, shell):
        gateway.router.set_routes([SPLIT])
        for name in ("a", "b"):
            gateway.beat(name, "org/smol", queue_depth=len(gateway.registry.snapshot()))
        told = squeezed((await shell("explain", "--model", "s", "--request-id", "req-1")).stdout)
        assert (
            told[0]
            == "request req-1: s is an alias of the route smol, served as org/smol (unified)"
        )
        assert told[1].endswith(": > org/smol [0, 0.75) new [0.75, 1)")
        assert [line for line in told if line.startswith("> a 0")]
        assert told[-1].startswith("It would go to a, because the draw by request id chose")
        other = await shell("explain", "--model", "s", "--request-id", "req-1", "--exclude", "a")
        assert squeezed(other.stdout)[-1].startswith("It would go to b, because the excluded")
        nobody = await shell("explain", "--model", "nobody")
        assert squeezed(nobody.stdout)[-1].endswith("(404 model_not_found)")
        tried = Tried(
            worker_id="a",
            served_model="org/smol",
            reason="canary",
            policy_reason="load",
            outcome="answered",
            after_s=0.0,
            candidates=(),
            candidate_count=1,
        )
        decision = Decision(
            **{"request_id": "req-1", "path": "/v1/completions", "model": "s", "error": ""},
            **{"key_id": "k", "tenant": "acme", "trace_id": ""},
            at=0.0,
            stream=False,
            status=200,
            seconds=0.25,
            first_byte_s=0.25,
            attempts=(tried,),
        )
        gateway.past.append(decision)
        listed = squeezed((await shell("decisions", "--worker", "a", "--limit", "3")).stdout)
        assert listed[1].endswith("req-1 s 200 a answered canary load 250 ms 250 ms acme")
        assert gateway.searched == {
            **{"model": None, "worker": "a", "request_id": None, "limit": 3}
        }


async def test_routes_are_shown_and_edited(run: "Run", tmp_path: Path) -> None:
    async with operated(run) as (gateway, shell):
        gateway.router.set_routes([SPLIT])
        script = tmp_path / "editor.py"
        script.write_text(
            "import pathlib, sys\npath = pathlib.Path(sys.argv[1])\n"
            "path.write_text(path.read_text().replace('0.75', '0.5').replace('0.25', '0.5'))\n"
        )
        editor = shlex.join([sys.executable, str(script)])
        edited = await shell("routes", "edit", EDITOR=editor)
        assert edited.stderr == 'the new table is in force: "routes-2" is now "routes-3"\n'
        assert [backend.weight for backend in gateway.router.table.routes[0].backends] == [0.5] * 2
        shown = (await shell("routes")).stdout
        assert shown.startswith('# version "routes-3"\n\n[[routes]]\nmodel = "smol"\n')


async def test_a_reload_and_top(run: "Run") -> None:
    async with operated(run) as (gateway, shell):
        gateway.beat("a")
        reloaded = await shell("reload")
        assert reloaded.stdout == "reloaded from pointsman.toml\nchanged: nothing\n"
        frame = squeezed((await shell("top", "--once", "--interval", "0.1")).stdout)
        assert frame[1] == "- requests/s, 0 in flight first byte - - failovers/s - errors/s"
        assert frame[-1] == "a m up 0 0 - -"
