"""Tables that exist are good ones; the others say where they are wrong."""

import math

import msgspec
import pytest

from pointsman.domain.routes import (
    Backend,
    Route,
    RouteTable,
    Step,
    pick_backend,
    routes_from_config,
    routes_from_json,
)
from pointsman.errors import InvalidRoutes

CANARY = Route("smol", backends=(Backend("smol-v3", 0.9), Backend("smol-v4", 0.1)))
CASCADE = Route("auto", cascade=(Step("small", "mean_logprob > -1.2"), Step("large")))


def test_canary_split() -> None:
    drawn = [pick_backend(CANARY, f"req-{number}") for number in range(10_000)]
    assert drawn.count("smol-v4") == 974
    assert set(drawn) == {"smol-v3", "smol-v4"}
    # One id, one backend.
    assert {pick_backend(CANARY, "req-42") for _ in range(100)} == {drawn[42]}
    # No backends: the route's own model.
    assert pick_backend(Route("smol", aliases=("s",)), "req-1") == "smol"
    assert pick_backend(Route("smol", backends=(Backend("v3"),)), "req-1") == "v3"


def test_the_draw_follows_the_order_of_the_table() -> None:
    # unit("a") is 0.0107..., unit("b") 0.243..., unit("engine-a#1") 0.746...
    route = Route("m", backends=(Backend("x", 0.1), Backend("y", 0.2), Backend("z", 0.7)))
    assert [pick_backend(route, key) for key in ("a", "b", "engine-a#1")] == ["x", "y", "z"]


def test_weights_need_not_sum_to_one_for_the_draw() -> None:
    route = Route("m", backends=(Backend("x", 2.0), Backend("y", 6.0)))
    assert [pick_backend(route, key) for key in ("b", "foobar")] == ["x", "y"]


def test_a_backend_of_weight_zero_is_never_drawn_while_another_has_any() -> None:
    route = Route("m", backends=(Backend("x", 0.0), Backend("y", 1.0), Backend("z", 0.0)))
    assert {pick_backend(route, f"r{number}") for number in range(1000)} == {"y"}


def test_weights_of_nothing_go_to_the_last_backend() -> None:
    assert pick_backend(Route("m", backends=(Backend("x", 0.0), Backend("y", 0.0))), "r") == "y"


def test_a_request_id_with_a_lone_surrogate_draws_too() -> None:
    assert pick_backend(CANARY, "\ud800") in ("smol-v3", "smol-v4")


def test_lookup_is_by_id_and_by_alias() -> None:
    table = RouteTable([Route("smol-v3", aliases=("smol", "tiny")), CASCADE], epoch=3)
    for name in ("smol-v3", "smol", "tiny"):
        route = table.lookup(name)
        assert route is not None
        assert route.model == "smol-v3"
    assert table.lookup("small") is None
    assert table.models() == ["auto", "smol-v3"]
    assert table.etag == '"routes-3"'
    assert table.epoch == 3
    assert table.routes[1] is CASCADE


def test_a_table_names_ids_aliases_backends_and_steps() -> None:
    table = RouteTable([Route("m", aliases=("alias",)), CANARY, CASCADE])
    for name in ("m", "alias", "smol", "smol-v3", "smol-v4", "auto", "small", "large"):
        assert table.names(name)
    assert not table.names("other")


@pytest.mark.parametrize(
    ("name", "served"),
    [
        ("smol", ("smol-v3", "smol-v4")),
        ("auto", ("small", "large")),
        ("plain", ("plain",)),
        ("p", ("plain",)),
        ("same", ("v1",)),
        ("smol-v3", ("smol-v3",)),
        ("nobody", ("nobody",)),
    ],
)
def test_a_name_is_served_under_the_ids_of_its_route_each_named_once(
    name: str, served: tuple[str, ...]
) -> None:
    same = Route("same", backends=(Backend("v1", 0.5), Backend("v1", 0.5)))
    table = RouteTable([CANARY, CASCADE, Route("plain", aliases=("p",)), same])
    assert table.served(name) == served


def test_an_empty_table_has_the_first_epoch() -> None:
    table = RouteTable()
    assert (table.routes, table.models(), table.etag) == ((), [], '"routes-1"')


def test_empty_fields_are_left_out_when_encoded() -> None:
    assert msgspec.json.encode(Route("m")) == b'{"model":"m"}'
    assert msgspec.json.encode(CASCADE) == (
        b'{"model":"auto","cascade":[{"model":"small","accept_if":"mean_logprob > -1.2"},{"model":"large"}]}'
    )
    assert msgspec.json.encode(CANARY) == (
        b'{"model":"smol","backends":[{"model":"smol-v3","weight":0.9},{"model":"smol-v4","weight":0.1}]}'
    )


def test_routes_survive_a_round_trip() -> None:
    full = Route("d", ("e",), ("disaggregated", "unified"), default_max_tokens=7)
    for route in (Route("m"), CANARY, CASCADE, full):
        assert msgspec.json.decode(msgspec.json.encode(route), type=Route) == route
        assert routes_from_config([msgspec.to_builtins(route)]) == (route,)


# What is refused, and where.


@pytest.mark.parametrize(
    ("routes", "param", "says"),
    [
        ([Route("")], "routes[0].model", "printable"),
        ([Route("m" * 257)], "routes[0].model", "256"),
        ([Route("a\nb")], "routes[0].model", "printable"),
        ([Route("m", aliases=("",))], "routes[0].aliases[0]", "printable"),
        ([Route("m"), Route("m")], "routes[1].model", "already the name of routes[0].model"),
        ([Route("m", aliases=("m",))], "routes[0].aliases[0]", "already"),
        ([Route("a", aliases=("x",)), Route("x")], "routes[1].model", "routes[0].aliases[0]"),
        (
            [Route("a", aliases=("x",)), Route("b", aliases=("y", "x"))],
            "routes[1].aliases[1]",
            "routes[0].aliases[0]",
        ),
        ([Route("m", targets=())], "routes[0].targets", "at least one"),
        ([Route("m", targets=("unifed",))], "routes[0].targets[0]", "did you mean 'unified'?"),
        (
            [Route("m", targets=("unified", "disagregated"))],
            "routes[0].targets[1]",
            "did you mean 'disaggregated'?",
        ),
        ([Route("m", targets=("?",))], "routes[0].targets[0]", "valid are unified, disaggregated"),
        ([Route("m", targets=("unified", "unified"))], "routes[0].targets[1]", "already"),
        ([Route("m", backends=(Backend(""),))], "routes[0].backends[0].model", "printable"),
        (
            [Route("a"), Route("m", backends=(Backend("x", 1.5), Backend("y", -0.5)))],
            "routes[1].backends[1].weight",
            "0 or more",
        ),
        ([Route("m", backends=(Backend("x", math.nan),))], "routes[0].backends[0].weight", "0 or"),
        ([Route("m", backends=(Backend("x", math.inf),))], "routes[0].backends[0].weight", "0 or"),
        ([Route("m", backends=(Backend("x", 0.998),))], "routes[0].backends", "sum to 0.998"),
        ([Route("m", backends=(Backend("x", 1.002),))], "routes[0].backends", "sum to 1.002"),
        ([Route("m", cascade=(Step("x"),))], "routes[0].cascade", "one step"),
        (
            [Route("m", cascade=(Step("", "min_logprob > -1"), Step("y")))],
            "routes[0].cascade[0].model",
            "printable",
        ),
        (
            [Route("m", cascade=(Step("x"), Step("y")))],
            "routes[0].cascade[0].accept_if",
            "needs a rule",
        ),
        (
            [Route("m", cascade=(Step("x", "min_logprob > -1"), Step("y", "nonsense"), Step("z")))],
            "routes[0].cascade[1].accept_if",
            "<metric> <op> <number>",
        ),
        (
            [Route("m", cascade=(Step("x", "min_logprob > -1"), Step("y", "min_logprob > -1")))],
            "routes[0].cascade[1].accept_if",
            "takes no rule",
        ),
        ([Route("m", default_max_tokens=0)], "routes[0].default_max_tokens", "at least 1"),
    ],
)
def test_a_table_that_breaks_a_rule_is_refused_with_the_place(
    routes: list[Route], param: str, says: str
) -> None:
    for build in (RouteTable.validate, RouteTable):
        with pytest.raises(InvalidRoutes) as caught:
            build(routes)
        assert caught.value.param == param
        assert caught.value.message.startswith(f"{param}: ")
        assert says in caught.value.message
        assert caught.value.status == 400


@pytest.mark.parametrize("weights", [(0.999,), (1.001,), (0.9, 0.1), (0.3, 0.3, 0.4), (0.0, 1.0)])
def test_weights_that_sum_to_one_give_or_take_rounding_are_taken(
    weights: tuple[float, ...],
) -> None:
    backends = tuple(Backend(f"b{index}", weight) for index, weight in enumerate(weights))
    RouteTable.validate([Route("m", backends=backends)])


@pytest.mark.parametrize(
    ("value", "param", "says"),
    [
        ([{}], "routes[0]", "model"),
        ([{"model": 7}], "routes[0].model", "str"),
        ([{"model": "m", "backends": [{"model": "x", "weight": "1"}]}], "routes[0].backends[0].weight", "float"),
        ([{"model": "m", "backends": [{"model": "x", "weight": True}]}], "routes[0].backends[0].weight", "float"),
        ([{"model": "m", "aliases": "x"}], "routes[0].aliases", "array"),
        ([{"model": "m", "default_max_tokens": 1.5}], "routes[0].default_max_tokens", "int"),
        ([7], "routes[0]", "object"),
        ({}, "routes", "array"),
        ("x", "routes", "array"),
    ],
)  # fmt: skip
def test_routes_of_the_wrong_shape_are_refused_with_the_place(
    value: object, param: str, says: str
) -> None:
    for read in (routes_from_config, routes_from_json):
        with pytest.raises(InvalidRoutes) as caught:
            read(value)
        assert caught.value.param == param
        assert says in caught.value.message


@pytest.mark.parametrize(
    ("value", "param", "says"),
    [
        ([{"model": "m", "alias": ["x"]}], "routes[0]", "did you mean 'aliases'?"),
        ([{"model": "m", "backends": [{"model": "x", "wieght": 1}]}], "routes[0].backends[0]", "'weight'"),
        ([{"model": "m", "cascade": [{"model": "x", "acceptif": ""}]}], "routes[0].cascade[0]", "'accept_if'"),
        ([{"model": "m", "zzz": 1}], "routes[0]", "valid are model, aliases"),
    ],
)  # fmt: skip
def test_unknown_keys_are_errors_in_a_configuration_and_ignored_in_json(
    value: list[object], param: str, says: str
) -> None:
    with pytest.raises(InvalidRoutes) as caught:
        routes_from_config(value)
    assert caught.value.param == param
    assert says in caught.value.message
    assert routes_from_json(value)[0].model == "m"
