"""Reload: a configuration takes effect as a whole or not at all, and nobody who is being served feels it (O06)."""

import asyncio
import os
import signal
import sqlite3
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pointsman.app import Gateway
from pointsman.config import Config, load
from pointsman.control.store import FILE_NAME
from pointsman.domain.policy.weighted import Weighted
from pointsman.domain.registry import WorkerReport
from pointsman.testing.certificates import Authority
from pointsman.testing.client import Client, Response, get, post
from pointsman.testing.gateways import (
    SETS,
    Keys,
    Served,
    bearer,
    configured,
    counted,
    running,
    served,
)
from pointsman.testing.origin import (
    Conversation,
    Origin,
    Script,
    answers,
    event,
    hangs,
    json_answer,
    sse_chunk,
    sse_head,
)

pytestmark = pytest.mark.anyio

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
STREAM = CHAT | {"stream": True}
BEGUN = sse_head() + sse_chunk(event("a"))
LAST = sse_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
RELOAD = "/admin/v1/config:reload"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tmp_path / "gateway.toml"


def written(
    source: Path,
    workers: Mapping[str, str] | None = None,
    *,
    model: str = "m",
    more: str = "",
    **options: Any,
) -> None:
    """Put a configuration file in the place of another one, in one step.

    `workers` are id -> `host:port`; `more` is TOML for the end of the file.
    """
    options = {"route_policy": "least_outstanding"} | options
    lines = ["[gateway]"]
    lines += [f"{key} = {msgspec.json.encode(value).decode()}" for key, value in options.items()]
    for name, address in (workers or {}).items():
        lines += ["[[gateway.workers]]", f'id = "{name}"', f'url = "http://{address}"']
        lines += [f'model = "{model}"']
    new = source.with_suffix(".new")
    new.write_text("\n".join([*lines, more, ""]))
    new.replace(source)


def route(model: str, served_model: str) -> str:
    return f'[[gateway.routes]]\nmodel = "{model}"\nbackends = [{{ model = "{served_model}" }}]'


def held(free: asyncio.Event) -> Script:
    """Begin a stream, or nothing of a plain answer, and end it when told."""

    async def script(talk: Conversation) -> None:
        streamed = b'"stream":true' in talk.request.body
        if streamed:
            await talk.send(BEGUN)
        await free.wait()
        await talk.send(LAST if streamed else json_answer({"held": True}))

    return script


def read(response: Response) -> Any:
    return msgspec.json.decode(response.body)


async def reloaded(client: Client) -> dict[str, Any]:
    """Reload through the admin API, which must like it, and return what became of it."""
    response = await client.ask(post(b"", RELOAD))
    assert response.status == 200, response.body
    outcome: dict[str, Any] = read(response)["last_reload"]
    assert outcome["ok"]
    return outcome


async def last_reload(client: Client) -> dict[str, Any]:
    found: dict[str, Any] = read(await client.ask(get("/admin/v1/config")))["last_reload"]
    return found


async def put_routes(client: Client, *models: tuple[str, str]) -> str:
    """Replace the routes through the admin API, and return the new tag."""
    tag = (await client.ask(get("/admin/v1/routes"))).header("etag")
    assert tag is not None
    routes = [{"model": model, "backends": [{"model": served, "weight": 1.0}]}
              for model, served in models]  # fmt: skip
    response = await client.ask(
        post({"routes": routes}, "/admin/v1/routes", {"if-match": tag}, "PUT")
    )
    assert response.status == 200, response.body
    return response.header("etag") or ""


async def served_models(client: Client) -> dict[str, str]:
    routes = read(await client.ask(get("/admin/v1/routes")))["routes"]
    return {each["model"]: each["backends"][0]["model"] for each in routes}


def epoch(tag: str) -> int:
    return int(tag.removeprefix('"routes-').removesuffix('"'))


# ------------------------------------------------------------------ what a good file changes


async def test_o06_everything_that_can_change_is_in_force_at_once(source: Path) -> None:
    async with Origin() as first, Origin() as second:
        written(source, {"a": first.address}, more=route("chat", "m"))
        async with configured(source) as gateway, Client(gateway.address) as client:
            assert (await client.ask(post(CHAT | {"model": "chat"}))).status == 200
            written(
                source,
                {"b": second.address},
                model="n",
                more=route("talk", "n"),
                route_policy="weighted",
                max_body_bytes=100,
                max_header_bytes=1024,
                max_attempts=1,
                paths=["/v1/chat/completions", "/v1/more"],
                log_level="info",
                hold_bytes=7,
            )
            outcome = await reloaded(client)
            assert set(outcome["changed"]) == {
                *("workers", "routes", "route_policy", "max_body_bytes", "max_header_bytes"),
                *("max_attempts", "paths", "hold_bytes"),
            }
            assert outcome["needs_restart"] == []
            assert (outcome["trigger"], outcome["message"]) == (
                "api",
                "the configuration is in force",
            )

            # Workers and routes.
            assert (await client.ask(post(CHAT | {"model": "talk"}))).status == 200
            assert (await client.ask(post(CHAT | {"model": "chat"}))).status == 404
            assert [each.id for each in gateway.registry.snapshot()] == ["b"]
            assert (len(first.requests), len(second.requests)) == (1, 1)
            # The policy, and with it what explains it.
            assert isinstance(gateway.router.policy, Weighted)
            explained = await client.ask(post({"model": "n"}, "/admin/v1/route:explain"))
            assert read(explained)["policy"] == "weighted"
            # Limits and paths.
            assert (await client.ask(post(CHAT | {"model": "n"}, "/v1/more"))).status == 200
            assert (await client.ask(post(CHAT, "/v1/completions"))).status == 404
            async with Client(gateway.address) as other:
                assert (await other.ask(post(CHAT | {"user": 100 * "x"}))).status == 413
            for address in (gateway.address, gateway.health_address):
                async with Client(address) as other:
                    assert (await other.ask(get("/readyz", {"x": 2000 * "x"}))).status == 431
            # What is shown.
            shown = read(await client.ask(get("/admin/v1/config")))
            assert shown["source"] == str(source)
            assert shown["config"]["max_attempts"] == 1
            assert shown["loaded_at"] == outcome["at"]
            assert counted(gateway, "tl_gateway_config_reloads_total") == 1


async def test_o06_what_needs_a_restart_is_named_and_waits_and_the_rest_does_not(
    source: Path, tmp_path: Path
) -> None:
    async with Origin() as first, Origin() as second:
        written(source, {"a": first.address})
        async with configured(source) as gateway, Client(gateway.address) as client:
            waits: dict[str, Any] = {
                "state_dir": str(tmp_path / "state"),
                "workers_max": 5,
                "decisions_kept": 3,
            }
            written(source, {"b": second.address}, **waits, watch=True)
            for changed in (["workers"], []):  # It is named again for as long as it waits.
                outcome = await reloaded(client)
                assert outcome["changed"] == changed
                assert set(outcome["needs_restart"]) == {*waits, "watch"}
            shown = read(await client.ask(get("/admin/v1/config")))["config"]
            assert (shown["workers_max"], shown["state_dir"], shown["watch"]) == (10_000, "", False)
            assert not (tmp_path / "state").exists()
            await client.ask(post(CHAT))
            assert (len(first.requests), len(second.requests)) == (0, 1)


async def test_o06_without_a_file_there_is_nothing_to_reload(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running() as gateway, Client(gateway.address) as client:
        response = await client.ask(post(b"", RELOAD))
        assert response.status == 400
        assert "without a configuration file" in (response.error["message"] or "")
        caplog.clear()


async def test_o06_whether_prompts_are_handed_off_follows_the_file(source: Path) -> None:
    handing = '[[gateway.routes]]\nmodel = "m"\ntargets = ["disaggregated", "unified"]'
    written(source, more=handing)
    async with configured(source) as gateway, Client(gateway.address) as client:
        assert gateway.router.pairing is None
        written(source, more=handing, disagg_pairing="quickest", disagg_stall_weight=0.5)
        await reloaded(client)
        assert gateway.router.pairing is not None
        assert gateway.router.pairing.options.stall == 0.5
        written(source, more=handing)
        await reloaded(client)
        assert gateway.router.pairing is None


# ------------------------------------------------------------------ what runs


async def test_o06_what_runs_ends_in_peace_on_a_worker_that_is_no_longer_listed(
    source: Path,
) -> None:
    free = asyncio.Event()
    async with Origin(held(free)) as first, Origin() as second:
        written(source, {"a": first.address})
        async with (
            configured(source) as gateway,
            Client(gateway.address) as stream,
            Client(gateway.address) as plain,
            Client(gateway.address) as client,
        ):
            await stream.send(post(STREAM))
            await stream.read_until(b"\n\n\r\n")
            await plain.send(post(CHAT))
            await first.received(2)
            # The model is gone as well: nobody else could serve what runs.
            written(source, {"b": second.address}, model="n", more=route("x", "n"))
            await reloaded(client)
            assert (await client.ask(post(CHAT | {"model": "n"}))).status == 200
            free.set()
            assert await stream.read_until(b"0\r\n\r\n") == LAST
            assert read(await plain.response()) == {"held": True}
            # Its connections go when they are free, and the clients' stay.
            await first.left(2)
            assert (await stream.ask(post(CHAT | {"model": "n"}))).status == 200
            assert (len(first.requests), len(second.requests)) == (2, 2)


@pytest.mark.slow
async def test_o06_what_runs_keeps_its_limits_and_what_comes_has_the_new_ones(source: Path) -> None:
    free = asyncio.Event()
    async with Origin(held(free), held(free), hangs()) as origin:
        written(source, {"a": origin.address})
        async with (
            configured(source) as gateway,
            Client(gateway.address) as stream,
            Client(gateway.address) as plain,
            Client(gateway.address) as client,
        ):
            await stream.send(post(STREAM))
            await stream.read_until(b"\n\n\r\n")
            await plain.send(post(CHAT))
            await origin.received(2)
            limits = dict.fromkeys(("head", "first_byte", "gap"), 0.2)
            options: dict[str, Any] = {f"{name}_timeout_s": each for name, each in limits.items()}
            written(source, {"a": origin.address}, max_body_bytes=500, **options)
            await reloaded(client)
            # This one waits longer than the others would be let, had they the new limits.
            assert (await client.ask(post(CHAT))).status == 504
            async with Client(gateway.address) as other:
                assert (await other.ask(post(CHAT | {"user": 500 * "x"}))).status == 413
            free.set()
            assert await stream.read_until(b"0\r\n\r\n") == LAST
            assert read(await plain.response()) == {"held": True}


async def test_o06_a_watched_file_that_changes_before_the_first_look_counts(source: Path) -> None:
    def read_file() -> Config:
        return load(source, SETS, {})

    async with Origin() as first, Origin() as second:
        written(source, {"a": first.address}, watch=True)
        gateway = Gateway(read_file(), load=read_file, source=str(source))
        written(source, {"b": second.address}, watch=True)
        await gateway.start()
        try:
            async with Client(gateway.address) as client:
                assert (await client.ask(post(CHAT))).status == 200
                assert (await last_reload(client))["changed"] == ["workers"]
        finally:
            await gateway.stop()
        assert (len(first.requests), len(second.requests)) == (0, 1)


@pytest.mark.slow
async def test_o06_nobody_notices_reload_after_reload_under_load(source: Path) -> None:
    """Each file has another worker than the one before, and another route to it."""
    origins = [Origin(answers({"from": name})) for name in "ab"]
    asked = 0

    async with origins[0], origins[1]:

        def write(turn: int) -> None:
            written(source, {"ab"[turn % 2]: origins[turn % 2].address}, model=f"m{turn}",
                    more=route("chat", f"m{turn}"))  # fmt: skip

        write(0)
        async with configured(source) as gateway, Client(gateway.address) as operator:
            over = asyncio.Event()

            async def asks() -> None:
                nonlocal asked
                async with Client(gateway.address) as client:
                    while not over.is_set():
                        response = await client.ask(post(CHAT | {"model": "chat"}))
                        assert response.status == 200, response.body
                        asked += 1

            async with asyncio.TaskGroup() as group:
                for _ in range(8):
                    group.create_task(asks())
                for turn in range(1, 30):
                    write(turn)
                    await reloaded(operator)
                over.set()
            assert gateway.router.table.epoch == 30
    assert asked > 100
    assert all(origin.requests for origin in origins)


async def test_what_workers_have_cached_outlives_the_policy_that_was_told(source: Path) -> None:
    async with Origin() as origin:
        written(source, {"a": origin.address, "b": origin.address}, route_policy="kv_cost")
        async with configured(source) as gateway, Client(gateway.address) as client:
            prompt = {"model": "m", "messages": [{"role": "user", "content": 2048 * "x"}]}
            for policy in ("kv_cost", "cache_aware", "sticky_until_saturated"):
                written(source, {"a": origin.address, "b": origin.address}, route_policy=policy)
                await reloaded(client)
                assert (await client.ask(post(prompt))).status == 200
            assert counted(gateway, "tl_gateway_prefix_index_blocks") > 0
            written(source, {"c": origin.address}, route_policy="least_outstanding")
            await reloaded(client)
            assert counted(gateway, "tl_gateway_prefix_index_blocks") == 0
            attempts = [each.attempts[0] for each in reversed(gateway.decisions.find())]
            assert [each.policy_reason for each in attempts] == ["load", "affinity", "affinity"]
            assert len({each.worker_id for each in attempts}) == 1


# ------------------------------------------------------------------ what a bad file changes: nothing

GOOD = "max_attempts = 9\n"
"""A change that would be good by itself."""

BAD = [
    ("a file that is no TOML", "[gateway]\nmax_attempts = = 2", "not valid TOML"),
    ("an unknown key", f"[gateway]\n{GOOD}max_atempts = 2", "max_attempts"),
    ("an unknown section", f"[gateway]\n{GOOD}[gatway]\nx = 1", "gateway"),
    ("a value of another type", f"[gateway]\n{GOOD}hold_bytes = 'x'", "gateway.hold_bytes"),
    ("a value out of its range", "[gateway]\nmax_attempts = 0", "gateway.max_attempts"),
    ("an unknown policy", f"[gateway]\n{GOOD}route_policy = 'afinity'", "gateway.route_policy"),
    ("a bad path", f"[gateway]\n{GOOD}paths = ['v1']", "gateway.paths[0]"),
    ("weights that are not 1",
     f"[gateway]\n{GOOD}[[gateway.routes]]\nmodel = 'x'\nbackends = [{{model = 'm', weight = 0.4}}]",
     "gateway.routes[0].backends"),
    ("two routes of a name",
     f"[gateway]\n{GOOD}" + 2 * "[[gateway.routes]]\nmodel = 'x'\n", "gateway.routes[1]"),
    ("an unknown target",
     f"[gateway]\n{GOOD}[[gateway.routes]]\nmodel = 'x'\ntargets = ['dissaggregated']",
     "gateway.routes[0].targets"),
    ("two workers of an id",
     f"[gateway]\n{GOOD}" + 2 * "[[gateway.workers]]\nid = 'b'\nurl = 'http://h:1'\nmodel = 'm'\n",
     "gateway.workers[1]"),
    ("a worker that announces itself",
     f"[gateway]\n{GOOD}[[gateway.workers]]\nid = 'beats'\nurl = 'http://h:1'\nmodel = 'm'",
     "'beats'"),
    ("a certificate that is missing",
     f"[gateway]\n{GOOD}tls_cert = 'none.pem'\ntls_key = 'none.key'", "gateway.tls_cert"),
    ("a mount in the way", f"[gateway]\n{GOOD}[[gateway.mounts]]\npath = '/admin'\napp = 'a:b'",
     "gateway.mounts[0].path"),
    ("bytes that are no text", b"[gateway]\n\xff", "UTF-8"),
    ("a file deeper than the parser", "x = " + 20_000 * "[", "RecursionError"),
    ("no file", None, "No such file"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("bad", "named"), [pytest.param(bad, named, id=name) for name, bad, named in BAD]
)
async def test_o06_a_bad_file_changes_nothing_and_is_reported_until_a_good_one_comes(
    source: Path, caplog: pytest.LogCaptureFixture, bad: str | bytes | None, named: str
) -> None:
    async with Origin() as first, Origin() as second:
        written(source, {"a": first.address}, more=route("chat", "m"))
        async with (
            configured(source) as gateway,
            Client(gateway.address) as client,
            Client(gateway.health_address) as health,
        ):
            gateway.registry.beat(WorkerReport("beats", first.address, "other"), 1e12)
            before = in_force(gateway)
            spoil(source, bad)
            response = await client.ask(post(b"", RELOAD))
            assert response.status == 400
            assert named in (response.error["message"] or "")

            assert in_force(gateway) == before
            assert (await client.ask(post(CHAT | {"model": "chat"}))).status == 200
            assert len(first.requests) == 1
            assert (await health.ask(get("/readyz"))).status == 200
            outcome = await last_reload(client)
            assert (outcome["ok"], outcome["changed"], outcome["needs_restart"]) == (False, [], [])
            assert named in outcome["message"]
            assert named in caplog.text
            caplog.clear()
            assert reports(gateway) == (0, 0, 1)

            written(source, {"b": second.address}, more=route("chat", "m"))
            assert (await reloaded(client))["changed"] == ["workers"]
            assert (await client.ask(post(CHAT | {"model": "chat"}))).status == 200
            assert len(second.requests) == 1
            assert reports(gateway) == (1, 1, 1)


def spoil(source: Path, contents: str | bytes | None) -> None:
    if contents is None:
        source.unlink()
    else:
        source.write_bytes(contents if isinstance(contents, bytes) else contents.encode())


def in_force(gateway: Gateway) -> list[object]:
    """Return all that a reload could change: equal lists for equal states, by identity where objects are kept."""
    table = gateway.router.table
    workers = [(worker, worker.model, worker.kv_total_blocks, worker.http_address)
               for worker in gateway.registry.snapshot()]  # fmt: skip
    return [gateway.config, gateway.configuration().loaded_at, table.epoch, table.routes, workers,
            gateway.router.policy, gateway.registry.drained]  # fmt: skip


def reports(gateway: Gateway) -> tuple[float, float, float]:
    """Return what the metrics tell: whether the last reload worked, how many did, how many did not."""
    total = "tl_gateway_config_reloads_total"
    return (
        counted(gateway, "tl_gateway_config_last_reload_successful"),
        counted(gateway, total + '{outcome="success"}'),
        counted(gateway, total + '{outcome="failure"}'),
    )


@pytest.mark.slow
async def test_o06_what_cannot_be_kept_is_not_put_in_force(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The disk fails after everything was found good: not even certificates have changed."""
    authority = Authority(tmp_path)
    cert, key = authority.issue("api")
    options = {"state_dir": str(tmp_path / "state"), "tls_cert": cert, "tls_key": key}
    async with Origin() as first, Origin() as second:
        written(source, {"a": first.address}, **options)
        async with (
            configured(source) as gateway,
            Client(gateway.address, tls=authority.client()) as client,
        ):
            before, shown = in_force(gateway), await certificate(gateway, authority)
            other = sqlite3.connect(tmp_path / "state" / FILE_NAME, isolation_level=None)
            other.execute("BEGIN IMMEDIATE")
            authority.issue("api")
            written(source, {"b": second.address}, max_attempts=9, **options)
            response = await client.ask(post(b"", RELOAD))
            assert response.status == 400
            assert "state_dir" in (response.error["message"] or "")
            assert in_force(gateway) == before
            assert await certificate(gateway, authority) == shown
            caplog.clear()
            other.execute("ROLLBACK")
            other.close()
            assert (await reloaded(client))["changed"] == ["max_attempts", "workers"]
            assert await certificate(gateway, authority) != shown


@pytest.mark.slow
async def test_o06_a_reload_that_is_refused_at_last_has_taken_no_keys(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key file is good and has changed, but the disk fails after everything was found good."""
    monkeypatch.setattr("pointsman.control.reload.POLL_S", 3600.0)
    keys = Keys(tmp_path)
    admin = bearer(keys.make("admin"))
    options = {"state_dir": str(tmp_path / "state"), **keys.options}
    async with Origin() as origin:
        written(source, {"a": origin.address}, **options)
        async with configured(source) as gateway, Client(gateway.address) as client:
            new = bearer(keys.make("infer"))
            other = sqlite3.connect(tmp_path / "state" / FILE_NAME, isolation_level=None)
            other.execute("BEGIN IMMEDIATE")
            refused = await client.ask(post(b"", RELOAD, admin))
            assert refused.status == 400
            assert (await client.ask(post(CHAT, headers=new))).status == 401
            caplog.clear()
            other.execute("ROLLBACK")
            other.close()
            assert (await client.ask(post(b"", RELOAD, admin))).status == 200
            assert (await client.ask(post(CHAT, headers=new))).status == 200


# ------------------------------------------------------------------ what starts it, and who goes away


async def test_o06_a_reload_that_has_begun_is_brought_to_its_end(source: Path) -> None:
    begun, go_on = threading.Event(), threading.Event()
    async with Origin() as first, Origin() as second:
        written(source, {"a": first.address})

        def slow() -> Any:
            begun.set()
            go_on.wait()
            return load(source, SETS, {})

        async with configured(source) as gateway:
            gateway._load = slow
            written(source, {"b": second.address}, max_attempts=9)
            async with Client(gateway.address) as client:
                await client.send(post(b"", RELOAD))
                await asyncio.to_thread(begun.wait)
                client.leave()
            caller = asyncio.get_running_loop().create_task(gateway.reload("watch"))
            await asyncio.sleep(0)
            caller.cancel()
            go_on.set()
            third = await gateway.reload("SIGHUP")  # They take turns.
            assert (third.ok, third.changed) == (True, ())
            assert gateway.config.max_attempts == 9
            assert [each.id for each in gateway.registry.snapshot()] == ["b"]
            assert counted(gateway, "tl_gateway_config_reloads_total") == 3
            # The end of the gateway waits for one too.
            go_on.clear()
            begun.clear()
            written(source, {"a": first.address}, max_attempts=8)
            caller = asyncio.get_running_loop().create_task(gateway.reload("SIGHUP"))
            await asyncio.to_thread(begun.wait)
            asyncio.get_running_loop().call_later(0.05, go_on.set)
        assert (await caller).ok
        assert gateway.config.max_attempts == 8


@pytest.mark.slow
@pytest.mark.parametrize("trigger", ["SIGHUP", "watch", "configmap", "api"])
async def test_o06_a_process_reloads_on_a_signal_a_changed_file_or_a_call(
    tmp_path: Path, trigger: str
) -> None:
    """What runs is unaffected; a bad file is refused and reported; a good one heals it."""
    free = asyncio.Event()
    source = tmp_path / "gateway.toml"
    options: dict[str, Any] = {"watch": True} if trigger in ("watch", "configmap") else {}
    version = 1
    if trigger == "configmap":
        (tmp_path / "..1").mkdir()
        (tmp_path / "..data").symlink_to("..1")
        source.symlink_to("..data/gateway.toml")

    def write(workers: Mapping[str, str], **more: Any) -> None:
        nonlocal version
        if trigger != "configmap":
            written(source, workers, **options, **more)
            return
        version += 1
        folder = tmp_path / f"..{version}"
        folder.mkdir()
        written(folder / "gateway.toml", workers, **options, **more)
        (tmp_path / "..next").symlink_to(folder.name)
        (tmp_path / "..next").replace(tmp_path / "..data")

    async def reload(gateway: Served, text: str) -> str:
        if trigger == "SIGHUP":
            gateway.process.send_signal(signal.SIGHUP)
        elif trigger == "api":
            async with Client(gateway.address) as client:
                await client.ask(post(b"", RELOAD))
        return await gateway.says(text)

    named = "watch" if trigger == "configmap" else trigger
    async with Origin(held(free)) as first, Origin() as second:
        write({"a": first.address})
        async with (
            served(source) as gateway,
            Client(gateway.address) as stream,
            Client(gateway.address) as plain,
            Client(gateway.address) as client,
            Client(gateway.health_address) as health,
        ):
            await stream.send(post(STREAM))
            await stream.read_until(b"\n\n\r\n")
            await plain.send(post(CHAT))
            await first.received(2)

            write({"b": second.address}, max_attempts=0)
            line = await reload(gateway, "was not taken")
            assert f"({named}): gateway.max_attempts = 0" in line
            assert "ERROR" in line
            assert (await health.ask(get("/readyz"))).status == 200
            metrics = (await health.ask(get("/metrics"))).body
            assert b"tl_gateway_config_last_reload_successful 0.0" in metrics
            outcome = await last_reload(client)
            assert (outcome["ok"], outcome["trigger"]) == (False, named)
            assert "gateway.max_attempts" in outcome["message"]

            write({"b": second.address}, max_attempts=1)
            line = await reload(gateway, "was read again")
            assert f"({named}): changed max_attempts, workers" in line
            metrics = (await health.ask(get("/metrics"))).body
            assert b"tl_gateway_config_last_reload_successful 1.0" in metrics
            assert (await last_reload(client))["ok"]
            assert (await client.ask(post(CHAT))).status == 200
            assert (len(first.requests), len(second.requests)) == (2, 1)
            free.set()
            assert await stream.read_until(b"0\r\n\r\n") == LAST
            assert read(await plain.response()) == {"held": True}
            gateway.process.terminate()
        assert not [line for line in gateway.said if "Traceback" in line]


# ------------------------------------------------------------------ two writers


async def test_routes_of_the_admin_api_stay_until_the_files_own_change(source: Path) -> None:
    async with Origin() as origin:
        workers = {"a": origin.address}
        written(source, workers, more=route("x", "m"))
        async with configured(source) as gateway, Client(gateway.address) as client:
            put = await put_routes(client, ("y", "m"))
            written(source, workers, more=route("x", "m"), max_attempts=2)
            assert (await reloaded(client))["changed"] == ["max_attempts"]
            assert await served_models(client) == {"y": "m"}
            assert (await client.ask(get("/admin/v1/routes"))).header("etag") == put

            written(source, workers, more=route("z", "m"), max_attempts=2)
            assert (await reloaded(client))["changed"] == ["routes"]
            assert await served_models(client) == {"z": "m"}
            tag = (await client.ask(get("/admin/v1/routes"))).header("etag") or ""
            assert epoch(tag) == epoch(put) + 1
            assert gateway.registry.route_epoch == epoch(tag)
            # Whoever read the former table cannot write over this one.
            late = post({"routes": []}, "/admin/v1/routes", {"if-match": put}, "PUT")
            assert (await client.ask(late)).status == 412


async def test_the_last_writer_of_routes_wins_over_restarts_too(
    source: Path, tmp_path: Path
) -> None:
    epochs = []
    async with Origin() as origin:
        workers, state = {"a": origin.address}, str(tmp_path / "state")

        async def lives(*put: tuple[str, str]) -> dict[str, str]:
            async with configured(source) as gateway, Client(gateway.address) as client:
                found = await served_models(client)
                epochs.append(gateway.router.table.epoch)
                if put:
                    await put_routes(client, *put)
                    epochs.append(gateway.router.table.epoch)
                return found

        written(source, workers, more=route("x", "m"), state_dir=state)
        assert await lives(("y", "m")) == {"x": "m"}
        assert await lives() == {"y": "m"}
        written(source, workers, more=route("z", "m"), state_dir=state)
        assert await lives(("y", "m")) == {"z": "m"}
        assert await lives() == {"y": "m"}
        # Back to what it said before is a change as well.
        written(source, workers, more=route("x", "m"), state_dir=state)
        assert await lives() == {"x": "m"}
    assert epochs == [1, 2, 2, 3, 4, 4, 5]


# ------------------------------------------------------------------ certificates


async def certificate(gateway: Gateway, authority: Authority) -> bytes:
    """Return what a new connection is shown."""
    async with Client(gateway.address, tls=authority.client()) as client:
        shown = client.ssl_object.getpeercert(binary_form=True)
        assert shown is not None
        return shown


async def test_a_reload_rotates_certificates_and_leaves_connections_alone(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.issue("api")
    async with Origin() as origin:
        written(source, {"a": origin.address}, tls_cert=cert, tls_key=key)
        async with (
            configured(source) as gateway,
            Client(gateway.address, tls=authority.client()) as client,
        ):
            first = await certificate(gateway, authority)
            authority.issue("api")
            assert await certificate(gateway, authority) == first
            assert (await reloaded(client))["changed"] == []
            second = await certificate(gateway, authority)
            assert second != first
            assert client.ssl_object.getpeercert(binary_form=True) == first
            assert (await client.ask(post(CHAT))).status == 200

            os.truncate(key, 0)
            response = await client.ask(post(b"", RELOAD))
            assert response.status == 400
            assert "gateway.tls_key" in (response.error["message"] or "")
            assert await certificate(gateway, authority) == second
            caplog.clear()


@pytest.mark.slow
async def test_a_watched_certificate_is_rotated_by_itself(source: Path, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.issue("api")
    async with Origin() as origin:
        written(source, {"a": origin.address}, tls_cert=cert, tls_key=key, watch=True)
        async with served(source) as gateway:

            async def shown() -> bytes | None:
                async with Client(gateway.address, tls=authority.client()) as client:
                    return client.ssl_object.getpeercert(binary_form=True)

            first = await shown()
            authority.issue("api")
            await gateway.says("was read again (watch)")
            assert await shown() != first
