"""The route table through the admin API: every refusal, what is shown of it, and several who edit it at once."""

import asyncio
import json
from typing import Any

import msgspec
import pytest

from pointsman.domain.routes import Backend, Route, Step
from pointsman.testing.admin import Operated, Operator

pytestmark = pytest.mark.anyio

PATH = "/admin/v1/routes"


@pytest.fixture
def gateway() -> Operated:
    return Operated()


@pytest.fixture
def operator(gateway: Operated) -> Operator:
    return Operator(gateway.app)


async def test_a_table_is_shown_as_it_was_put_without_what_is_empty(
    gateway: Operated, operator: Operator
) -> None:
    routes: list[dict[str, Any]] = [
        {"model": "plain"},
        {"model": "canary", "backends": [{"model": "a", "weight": 1.0}]},
        {
            "model": "all",
            "aliases": ["every", "größe"],
            "targets": ["disaggregated", "unified"],
            "backends": [{"model": "a", "weight": 0.9}, {"model": "b", "weight": 0.1}],
            "default_max_tokens": 64,
        },
        {
            "model": "cascade",
            "cascade": [{"model": "s", "accept_if": "mean_logprob > -1"}, {"model": "l"}],
        },
    ]
    put = await operator.ask("PUT", PATH, {"routes": routes}, if_match='"routes-1"')
    assert put.status == 200
    assert msgspec.json.decode(put.body) == {"route_epoch": 2, "routes": routes}
    assert await operator.get(PATH) == {"route_epoch": 2, "routes": routes}
    assert gateway.registry.route_epoch == 2


async def test_what_other_tools_write_is_understood(gateway: Operated, operator: Operator) -> None:
    body = rb"""{"comment": {"by": "me"}, "route_epoch": 99, "routes": [
        {"model": "c", "owner": null, "aliases": [], "backends": [], "cascade": [
            {"model": "s", "accept_if": "mean_logprob \u003e -1", "colour": "red"}, {"model": "l"}]},
        {"model": "b", "backends": [{"model": "x", "weight": 1, "zone": [1]}]}]}"""
    put = await operator.ask("PUT", PATH, body, if_match='"routes-1"')
    assert put.status == 200
    assert gateway.router.table.routes == (
        Route("c", cascade=(Step("s", "mean_logprob > -1"), Step("l"))),
        Route("b", backends=(Backend("x"),)),
    )


@pytest.mark.parametrize(
    "if_match",
    ["", "*", "routes-1", 'W/"routes-1"', '"routes-1", "routes-2"', '"routes-2"', '"ROUTES-1"'],
)
async def test_only_the_very_tag_of_the_table_in_force_changes_it(
    gateway: Operated, operator: Operator, if_match: str
) -> None:
    # The body is not looked at before.
    bodies: list[Any] = [{"routes": []}, b"{"]
    for body in bodies:
        refused = await operator.ask("PUT", PATH, body, if_match=if_match)
        assert (refused.status, refused.error["code"]) == (412, "etag_mismatch")
    assert gateway.router.table.epoch == 1


async def test_without_a_tag_the_body_is_not_looked_at(
    gateway: Operated, operator: Operator
) -> None:
    refused = await operator.ask("PUT", PATH, b"{")
    assert (refused.status, refused.error["code"]) == (428, "if_match_required")
    assert refused.error["param"] is None


def table(**fields: Any) -> bytes:
    return json.dumps({"routes": [{"model": "ok"}, {"model": "m", **fields}]}).encode()


HALF = {"model": "a", "weight": 0.5}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"{", None),
        (b"\xff", None),
        (b'{"routes":[NaN]}', None),
        (b'{"routes":' + b"[" * 100_000, None),
        (b"[]", "routes"),
        (b"null", "routes"),
        (b"{}", "routes"),
        (b'{"routes":null}', "routes"),
        (b'{"routes":{}}', "routes"),
        (b'{"routes":[null]}', "routes[0]"),
        (b'{"routes":[{}]}', "routes[0]"),
        (table(model=""), "routes[1].model"),
        (table(model=7), "routes[1].model"),
        (table(model="ok"), "routes[1].model"),
        (table(aliases=["x", "ok"]), "routes[1].aliases[1]"),
        (table(aliases="x"), "routes[1].aliases"),
        (table(targets=["unifed"]), "routes[1].targets[0]"),
        (table(targets=[]), "routes[1].targets"),
        (table(backends=[HALF, {"model": "b", "weight": "0.5"}]), "routes[1].backends[1].weight"),
        (table(backends=[HALF, {"model": "b", "weight": True}]), "routes[1].backends[1].weight"),
        (table(backends=[HALF, {"model": "b", "weight": -0.5}]), "routes[1].backends[1].weight"),
        (table(backends=[HALF, {"model": "", "weight": 0.5}]), "routes[1].backends[1].model"),
        (table(backends=[HALF]), "routes[1].backends"),
        (table(cascade=[{"model": "s"}]), "routes[1].cascade"),
        (table(cascade=[{"model": "s"}, {"model": "l"}]), "routes[1].cascade[0].accept_if"),
        (table(default_max_tokens=0), "routes[1].default_max_tokens"),
        (table(default_max_tokens=1.5), "routes[1].default_max_tokens"),
    ],
)
async def test_a_table_that_breaks_a_rule_is_refused_with_the_place(
    gateway: Operated, operator: Operator, body: bytes, param: str | None
) -> None:
    refused = await operator.ask("PUT", PATH, body, if_match='"routes-1"')
    assert (refused.status, refused.error["type"]) == (400, "invalid_request_error")
    assert (refused.error["param"], refused.error["code"]) == (param, None)
    assert (gateway.router.table.epoch, gateway.router.table.routes) == (1, ())


async def test_of_two_editors_at_once_one_gets_412_and_nothing_is_lost(
    gateway: Operated, operator: Operator
) -> None:
    async def edit(name: str) -> int:
        """Add a route as a careful script does: read, change, write, and begin anew after a 412."""
        refusals = 0
        while True:
            read = await operator.ask("GET", PATH)
            routes = msgspec.json.decode(read.body)["routes"]
            await asyncio.sleep(0)
            body = {"routes": [*routes, {"model": name}]}
            put = await operator.ask("PUT", PATH, body, if_match=read.header("etag"))
            if put.status == 200:
                return refusals
            assert put.status == 412
            refusals += 1

    assert sorted(await asyncio.gather(edit("a"), edit("b"))) == [0, 1]
    assert {route.model for route in gateway.router.table.routes} == {"a", "b"}
    names = [f"m{number}" for number in range(20)]
    await asyncio.gather(*map(edit, names))
    assert {route.model for route in gateway.router.table.routes} == {"a", "b", *names}
    assert gateway.router.table.epoch == 23
