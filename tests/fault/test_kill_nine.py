"""`kill -9` in the middle of a thousand changes: the restart finds what was acknowledged last, or what came next.

A workload makes one change after another and says when each is acknowledged. Its process, or the gateway that it
talks to, is killed at a moment that it does not choose, and lives again over the same folder, until a thousand route
changes were acknowledged. As a program (`python test_kill_nine.py FOLDER CHANGES`) this is the process that is killed.
"""

import asyncio
import random
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import msgspec
import pytest

from pointsman.config import servable
from pointsman.control.changes import Changes
from pointsman.control.store import Store
from pointsman.domain.policy.least_outstanding import LeastOutstanding
from pointsman.domain.registry import Registry
from pointsman.domain.router import Router
from pointsman.domain.routes import Backend, Route, RouteTable
from pointsman.domain.worker import Role
from pointsman.parts import static_worker
from pointsman.testing.client import Client, Response, get, post
from pointsman.testing.gateways import served

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(180)]

ROUTE_CHANGES = 1000
MODELS = ("m0", "m1", "m2", "m3")
WEIGHED = "weighed"
"""The static worker whose capacity is changed."""
URL = "http://127.0.0.1:9"


class State(msgspec.Struct, frozen=True):
    """What must survive. `written` is the epoch that the routes in force were written for, which they tell."""

    epoch: int = 1
    written: int = 1
    drained: tuple[str, ...] = ()
    capacity: int = 1


def after(state: State, number: int) -> State:
    """Return what the next change makes of a state, the one with that number in its life."""
    if number % 8 == 3:
        drained = tuple(sorted({*state.drained} ^ {MODELS[number // 8 % len(MODELS)]}))
        return msgspec.structs.replace(state, drained=drained)
    if number % 8 == 7:
        return msgspec.structs.replace(state, capacity=state.capacity + 1)
    return msgspec.structs.replace(state, epoch=state.epoch + 1, written=state.epoch + 1)


def routes_of(epoch: int) -> tuple[Route, ...]:
    """Return routes that tell which epoch they were written for, in three places."""
    share = epoch % 100 / 100
    backends = (Backend("m0", share), Backend("m1", 1 - share))
    return (
        Route("canary", (f"alias-{epoch}",), backends=backends),
        Route("chat", default_max_tokens=epoch),
    )


def epoch_of(routes: tuple[Route, ...]) -> int:
    """Return which epoch routes were written for, -1 for a table that nobody wrote."""
    epoch = routes[-1].default_max_tokens or -1
    return epoch if routes == routes_of(epoch) else -1


class Operated(Protocol):
    """A gateway that is operated. A method returns when the change is acknowledged."""

    async def state(self) -> State: ...

    async def put_routes(self, before: int) -> int:
        """Replace the routes of an epoch by those of the next one, and return their epoch."""

    async def drain(self, model: str) -> None: ...

    async def undrain(self, model: str) -> None: ...

    async def weigh(self, capacity: int) -> None: ...


async def workload(gateway: Operated, changes: int, say: Callable[[State], None]) -> None:
    """Say the state that is found, make that many changes, and say after each what it came to."""
    state = await gateway.state()
    say(state)
    for number in range(changes):
        before, state = state, after(state, number)
        if state.epoch != before.epoch:
            assert await gateway.put_routes(before.epoch) == state.epoch
        for model in {*state.drained} - {*before.drained}:
            await gateway.drain(model)
        for model in {*before.drained} - {*state.drained}:
            await gateway.undrain(model)
        if state.capacity != before.capacity:
            await gateway.weigh(state.capacity)
        say(state)


class Killed(Protocol):
    """Run the workload over a folder, kill what holds the state after so many states were said, return all of them."""

    async def __call__(self, folder: Path, changes: int, kill_after: int) -> list[State]: ...


async def lives(folder: Path, killed: Killed, chance: random.Random) -> list[list[State]]:
    """Live and be killed until enough route changes were acknowledged; return what each life said."""
    told: list[list[State]] = []
    while sum(life[-1].epoch - life[0].epoch for life in told) < ROUTE_CHANGES:
        told.append(await killed(folder, 2 * ROUTE_CHANGES, chance.randint(1, 300)))
        assert told[-1], "it was killed before it said what it found"
    return told


def check(told: list[list[State]]) -> None:
    """Every life begins with what the one before acknowledged last, or with what it was about to."""
    assert len(told) > 1
    assert told[0][0] == State()
    for life, next_life in pairwise(told):
        acknowledged = life[-1]
        begun = after(acknowledged, len(life) - 1)
        assert next_life[0] in (acknowledged, begun)
    epochs = [state.epoch for life in told for state in life]
    assert epochs == sorted(epochs)


# The changes alone, in a process of their own.


class InProcess:
    """The changes of a gateway without its sockets."""

    def __init__(self, folder: Path) -> None:
        self._registry = Registry()
        self._router = Router(self._registry, LeastOutstanding(), RouteTable())
        self._changes = Changes(
            self._registry,
            self._router,
            Store(folder),
            build=static_worker,
            permit=lambda values: None,
            servable=servable,
            now=lambda: 0.0,
        )

    async def begin(self) -> None:
        """Start as the application does, with a file that always says the same."""
        static = [
            {"id": name, "url": URL, "model": name, "role": "unified", "capacity": 1}
            for name in (*MODELS, WEIGHED)
        ]
        await self._changes.restore()
        await self._changes.adopt(routes_of(1), static)

    async def state(self) -> State:
        table = self._router.table
        assert self._registry.route_epoch == table.epoch
        (weighed,) = self._registry.routable(WEIGHED, Role.UNIFIED)
        return State(
            epoch=table.epoch,
            written=epoch_of(table.routes),
            drained=tuple(sorted(self._registry.drained)),
            capacity=weighed.kv_total_blocks,
        )

    async def put_routes(self, before: int) -> int:
        tag = RouteTable(epoch=before).etag
        return (await self._changes.put_routes(tag, lambda: routes_of(before + 1))).epoch

    async def drain(self, model: str) -> None:
        await self._changes.drain(model, 1)

    async def undrain(self, model: str) -> None:
        await self._changes.undrain(model)

    async def weigh(self, capacity: int) -> None:
        await self._changes.put_worker(
            WEIGHED, {"url": URL, "model": WEIGHED, "capacity": capacity}
        )


async def killed_process(folder: Path, changes: int, kill_after: int) -> list[State]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, __file__, str(folder), str(changes)), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    lines = [await process.stdout.readline() for _ in range(kill_after)]
    process.kill()
    lines += (await process.stdout.read()).splitlines()  # What was said and not yet heard.
    await process.wait()
    return [msgspec.json.decode(line, type=State) for line in lines if line]


async def test_changes_that_were_acknowledged_survive_kill_nine(tmp_path: Path) -> None:
    check(await lives(tmp_path, killed_process, random.Random(9)))


# A whole gateway, over its admin API.


class OverHttp:
    """A gateway that is operated through its admin API."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def state(self) -> State:
        table = await self._read("routes")
        workers, models = (
            (await self._read("workers"))["data"],
            (await self._read("models"))["data"],
        )
        return State(
            epoch=table["route_epoch"],
            written=epoch_of(msgspec.convert(table["routes"], tuple[Route, ...])),
            drained=tuple(each["model"] for each in models if each["drained"]),
            capacity=next(x["kv_total_blocks"] for x in workers if x["worker_id"] == WEIGHED),
        )

    async def put_routes(self, before: int) -> int:
        body = {"routes": routes_of(before + 1)}
        tag = {"if-match": RouteTable(epoch=before).etag}
        answer = await self._do("PUT", "routes", body, tag)
        return int((answer.header("etag") or "").strip('"').removeprefix("routes-"))

    async def drain(self, model: str) -> None:
        await self._do("POST", f"models/{model}:drain", {"deadline_s": 1})

    async def undrain(self, model: str) -> None:
        await self._do("POST", f"models/{model}:undrain", b"")

    async def weigh(self, capacity: int) -> None:
        body = {"url": URL, "model": WEIGHED, "capacity": capacity}
        await self._do("PUT", f"workers/{WEIGHED}", body)

    async def _read(self, what: str) -> Any:
        answer = await self._client.ask(get(f"/admin/v1/{what}"))
        return msgspec.json.decode(answer.body)

    async def _do(
        self, method: str, what: str, body: object, headers: dict[str, str] | None = None
    ) -> Response:
        answer = await self._client.ask(post(body, f"/admin/v1/{what}", headers, method))
        if not answer.complete:
            raise ConnectionError("the answer was cut")
        assert answer.status in (200, 202), answer.body
        return answer


def configured(folder: Path) -> Path:
    """Return a configuration file that keeps its state in a folder, made once."""
    source = folder / "pointsman.toml"
    if not source.exists():
        document = {"state_dir": str(folder / "state"), "access_log": "off"}
        lines = ["[gateway]", *(f'{key} = "{value}"' for key, value in document.items())]
        for name in (*MODELS, WEIGHED):
            lines += [
                "[[gateway.workers]]",
                f'id = "{name}"',
                f'url = "{URL}"',
                f'model = "{name}"',
            ]
        for route in msgspec.to_builtins(routes_of(1)):
            lines += ["[[gateway.routes]]"]
            lines += [f"{key} = {inline(value)}" for key, value in route.items()]
        source.write_text("\n".join(lines))
    return source


def inline(value: object) -> str:
    """Write a value as TOML in one line."""
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {inline(each)}' for key, each in value.items())} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(inline, value))}]"
    return msgspec.json.encode(value).decode()


@asynccontextmanager
async def operated(folder: Path) -> AsyncIterator[tuple[OverHttp, Callable[[], None]]]:
    """Run a gateway as a process of its own; give what operates it, and what kills it."""
    async with served(configured(folder)) as gateway, Client(gateway.address) as client:
        yield OverHttp(client), gateway.process.kill


async def killed_gateway(folder: Path, changes: int, kill_after: int) -> list[State]:
    said: list[State] = []
    delay = random.Random(kill_after).uniform(0, 0.004)  # A change takes about that long.
    async with operated(folder) as (gateway, kill):

        def say(state: State) -> None:
            said.append(state)
            if len(said) == kill_after:
                asyncio.get_running_loop().call_later(delay, kill)

        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await workload(gateway, changes, say)
    return said


async def test_a_gateway_that_is_killed_is_what_it_acknowledged_last(tmp_path: Path) -> None:
    check(await lives(tmp_path, killed_gateway, random.Random(19)))


async def main(folder: Path, changes: int) -> None:
    """Be the process that is killed: one line of JSON for each state."""
    gateway = InProcess(folder)
    await gateway.begin()
    await workload(
        gateway, changes, lambda state: print(msgspec.json.encode(state).decode(), flush=True)
    )


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
