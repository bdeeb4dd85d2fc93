"""Workers of a list: they come and go by reload and by the admin API, and leave nothing behind (R14, R17, O08)."""

import asyncio
import gc
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pointsman.app import Gateway
from pointsman.net.pool import Lane
from pointsman.net.upstream import Upstream
from pointsman.testing.client import Client, Response, get, post
from pointsman.testing.gateways import configured, counted, running
from pointsman.testing.origin import Conversation, Origin, answers, dead_address, json_answer

pytestmark = pytest.mark.anyio

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tmp_path / "gateway.toml"


def written(
    source: Path,
    workers: Mapping[str, str],
    *,
    models: Mapping[str, str] | None = None,
    capacities: Mapping[str, int] | None = None,
    policy: str = "least_outstanding",
) -> None:
    """Write a file with workers, id -> `host:port`, whose model is `m` and whose capacity is 1 where not said."""
    lines = ["[gateway]", f'route_policy = "{policy}"']
    for name, address in workers.items():
        model, capacity = (models or {}).get(name, "m"), (capacities or {}).get(name, 1)
        lines += ["[[gateway.workers]]", f'id = "{name}"', f'url = "http://{address}"']
        lines += [f'model = "{model}"', f"capacity = {capacity}"]
    source.write_text("\n".join(lines))


def read(response: Response) -> Any:
    return msgspec.json.decode(response.body)


async def reloaded(client: Client) -> None:
    response = await client.ask(post(b"", "/admin/v1/config:reload"))
    assert response.status == 200, response.body


async def workers(client: Client) -> dict[str, dict[str, Any]]:
    found = read(await client.ask(get("/admin/v1/workers")))["data"]
    return {each["worker_id"]: each for each in found}


async def put(client: Client, name: str, address: str, **more: object) -> int:
    wanted = {"url": f"http://{address}", "model": "m"} | more
    return (await client.ask(post(wanted, f"/admin/v1/workers/{name}", method="PUT"))).status


async def picks(client: Client, count: int) -> Counter[str]:
    """Ask that often, and count who answered."""
    answered: Counter[str] = Counter()
    for _ in range(count):
        answered[read(await client.ask(post(CHAT)))["from"]] += 1
    return answered


def lanes(gateway: Gateway) -> list[str]:
    """Return the ids of the workers that anything in a gateway has connections to, or could open one."""
    found = [each for each in gc.get_objects() if isinstance(each, Lane)]
    return sorted(
        each.worker.id
        for each in found
        if each._pool is gateway.serving.pool and not (each.closed and not each.open)
    )


# ------------------------------------------------------------------ R17


async def test_r17_a_worker_that_was_taken_from_the_list_is_left_alone(source: Path) -> None:
    """The list changes twice; each time one goes. No request, no connection, no timer and no task is left of it."""
    origins = {name: Origin(answers({"from": name})) for name in "abc"}
    async with origins["a"] as a, origins["b"] as b, origins["c"] as c:
        written(source, {"a": a.address, "b": b.address})
        async with configured(source) as gateway, Client(gateway.address) as client:
            await idle_connection_to_each(gateway.address, client, origins, "ab")
            for gone, listed in ((a, {"b": b, "c": c}), (b, {"c": c, "a": a})):
                written(source, {name: origin.address for name, origin in listed.items()})
                await reloaded(client)
                # Its idle connections are closed, long before the idle limit.
                await gone.left(gone.connections)
                asked = len(gone.requests)
                await idle_connection_to_each(gateway.address, client, origins, "".join(listed))
                assert len(gone.requests) == asked
                assert gone.closed == gone.connections
                assert {each.id for each in gateway.registry.snapshot()} == set(listed)
                assert counted(gateway, "tl_gateway_workers{") == 2
                assert lanes(gateway) == sorted(listed)
                watched = gateway.serving.deadlines._watched
                limited = [each for each in watched if isinstance(each, Upstream)]
                assert {each._lane.worker.id for each in limited} == set(listed)
                assert not gateway.serving.pool._tasks


async def idle_connection_to_each(
    address: tuple[str, int], client: Client, origins: Mapping[str, Origin], names: str
) -> None:
    """Let every worker answer once, and more often until each has."""
    while not all(origins[name].connections > origins[name].closed for name in names):
        # The least loaded one with the smallest id is asked: so two at once go to two.
        async with Client(address) as other:
            await client.send(post(CHAT))
            await other.send(post(CHAT))
            await client.response()
            await other.response()


async def test_r17_a_worker_at_a_new_address_is_a_new_worker(source: Path) -> None:
    async with Origin(answers({"from": "old"})) as old, Origin(answers({"from": "new"})) as new:
        written(source, {"a": old.address})
        async with configured(source) as gateway, Client(gateway.address) as client:
            assert await picks(client, 2) == {"old": 2}
            written(source, {"a": new.address})
            await reloaded(client)
            await old.left(1)
            assert await picks(client, 2) == {"new": 2}
            assert (len(old.requests), lanes(gateway)) == (2, ["a"])


async def test_r17_the_admin_api_takes_workers_away_as_well() -> None:
    free = asyncio.Event()

    async def held(talk: Conversation) -> None:
        await free.wait()
        await talk.send(json_answer({"from": "a"}))

    async with (
        Origin(held) as a,
        Origin(answers({"from": "b"})) as b,
        running({"a": a.address, "b": b.address}) as gateway,
        Client(gateway.address) as waiting,
        Client(gateway.address) as client,
    ):
        await waiting.send(post(CHAT))
        await a.received(1)
        gone = post(b"", "/admin/v1/workers/a", method="DELETE")
        assert (await client.ask(gone)).status == 204
        assert set(await workers(client)) == {"b"}
        assert await picks(client, 3) == {"b": 3}
        free.set()  # What it was sent before, it answers.
        assert read(await waiting.response()) == {"from": "a"}
        await a.left(1)
        assert lanes(gateway) == ["b"]
        assert (await client.ask(gone)).status == 404


# ------------------------------------------------------------------ O08


async def test_o08_a_capacity_that_is_put_is_shown_and_followed() -> None:
    async with (
        Origin(answers({"from": "a"})) as a,
        Origin(answers({"from": "b"})) as b,
        running({"a": a.address, "b": b.address}, route_policy="weighted") as gateway,
        Client(gateway.address) as client,
    ):
        assert await picks(client, 8) == {"a": 4, "b": 4}
        kept = gateway.registry.snapshot()[0]
        assert await put(client, "a", a.address, capacity=3) == 200
        assert (await workers(client))["a"]["kv_total_blocks"] == 3
        assert await picks(client, 8) == {"a": 6, "b": 2}
        assert await put(client, "a", a.address, capacity=1) == 200
        assert await put(client, "b", b.address, capacity=7) == 200
        assert await picks(client, 16) == {"a": 2, "b": 14}
        # It is the same worker all the time, with its connection.
        assert gateway.registry.snapshot()[0] is kept
        assert (a.connections, b.connections) == (1, 1)


@pytest.mark.parametrize("change", ["model", "url", "new"])
async def test_o08_whatever_is_put_takes_effect(change: str) -> None:
    async with (
        Origin(answers({"from": "a"})) as a,
        Origin(answers({"from": "b"})) as b,
        running({"a": a.address}) as gateway,
        Client(gateway.address) as client,
    ):
        assert await picks(client, 1) == {"a": 1}
        if change == "model":
            assert await put(client, "a", a.address, model="n") == 200
            assert (await workers(client))["a"]["model"] == "n"
            assert (await client.ask(post(CHAT | {"model": "n"}))).status == 200
            assert (await client.ask(post(CHAT))).status in (404, 503)
        elif change == "url":
            assert await put(client, "a", b.address) == 200
            assert (await workers(client))["a"]["http_address"] == b.address
            assert await picks(client, 1) == {"b": 1}
        else:
            assert await put(client, "0", b.address) == 201
            assert set(await workers(client)) == {"0", "a"}
            assert await picks(client, 1) == {"b": 1}


async def test_o08_a_capacity_of_the_file_is_followed_too(source: Path) -> None:
    async with Origin(answers({"from": "a"})) as a, Origin(answers({"from": "b"})) as b:
        listed = {"a": a.address, "b": b.address}
        written(source, listed, policy="weighted")
        async with configured(source) as gateway, Client(gateway.address) as client:
            assert await picks(client, 8) == {"a": 4, "b": 4}
            written(source, listed, policy="weighted", capacities={"b": 3})
            await reloaded(client)
            assert (await workers(client))["b"]["kv_total_blocks"] == 3
            assert await picks(client, 8) == {"a": 2, "b": 6}
            assert (a.connections, b.connections) == (1, 1)


async def test_workers_of_the_admin_api_stay_until_the_files_own_change(source: Path) -> None:
    async with Origin(answers({"from": "a"})) as a, Origin(answers({"from": "b"})) as b:
        written(source, {"a": a.address})
        async with configured(source) as gateway, Client(gateway.address) as client:
            assert await put(client, "b", b.address) == 201
            await reloaded(client)
            assert set(await workers(client)) == {"a", "b"}
            written(source, {"a": a.address}, capacities={"a": 2})
            await reloaded(client)
            assert set(await workers(client)) == {"a"}


# ------------------------------------------------------------------ R14


async def test_r14_a_listed_worker_that_is_down_delays_and_breaks_nothing_else(
    source: Path,
) -> None:
    down = dead_address()
    origins = [Origin(answers({"from": name})) for name in "abc"]
    async with origins[0] as a, origins[1] as b, origins[2] as c:
        listed = {"a": a.address, "b": b.address, "c": c.address, "d": down}
        models = {"a": "m", "b": "n", "c": "n", "d": "late"}
        written(source, listed, models=models)
        async with (
            configured(source) as gateway,
            Client(gateway.address) as client,
            Client(gateway.health_address) as health,
        ):
            assert (await health.ask(get("/readyz"))).status == 200
            for _ in range(2):
                for model in ("m", "n"):
                    assert (await client.ask(post(CHAT | {"model": model}))).status == 200
                response = await client.ask(post(CHAT | {"model": "late"}))
                assert (response.status, response.error["code"]) == (503, "no_capacity")
                assert int(response.header("retry-after") or 0) > 0
            async with Origin(answers({"from": "d"}), address=down):
                response = await client.ask(post(CHAT | {"model": "late"}))
                assert read(response) == {"from": "d"}


async def test_r14_a_model_with_one_worker_of_two_down_is_served_by_the_other(
    source: Path,
) -> None:
    async with Origin(answers({"from": "b"})) as b:
        written(source, {"a": dead_address(), "b": b.address})
        async with configured(source) as gateway, Client(gateway.address) as client:
            assert await picks(client, 4) == {"b": 4}
