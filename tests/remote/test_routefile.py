"""A table comes back from its text as it was, whatever is in it, and bad text is told where it is bad."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.domain.routes import Backend, Route, RouteTable, Step
from pointsman.errors import InvalidRoutes
from pointsman.remote.routefile import BadText, parse, render

names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)
shares = st.lists(st.floats(1e-9, 1), min_size=1, max_size=4)


@st.composite
def routes(draw: st.DrawFn) -> Route:
    parts = draw(shares)
    backends = tuple(Backend(draw(names), part / sum(parts)) for part in parts)
    steps = (Step(draw(names), "mean_logprob > -1.2"), Step(draw(names)))
    return Route(
        draw(names),
        aliases=tuple(draw(st.lists(names, max_size=3))),
        targets=draw(st.sampled_from([("unified",), ("disaggregated", "unified")])),
        backends=draw(st.sampled_from([(), backends])),
        cascade=draw(st.sampled_from([(), steps])),
        default_max_tokens=draw(st.none() | st.integers(1, 2**40)),
    )


@given(st.lists(routes(), max_size=4))
def test_every_table_that_a_gateway_accepts_comes_back(table: list[Route]) -> None:
    plain = msgspec.json.decode(msgspec.json.encode(table))
    try:
        RouteTable.validate(table)
    except InvalidRoutes as error:
        with pytest.raises(BadText) as refused:
            parse(render(plain))
        assert str(refused.value) == error.message
    else:
        assert parse(render(plain, "one", "two: # [[")) == plain


def test_the_text_is_what_a_configuration_file_has() -> None:
    route: dict[str, Any] = {"model": "smol", "aliases": ["a", 'b"'], "default_max_tokens": None}
    steps = [{"model": "x", "accept_if": "min_logprob > -1"}, {"model": "y z"}]
    assert render([route, {"model": "auto", "cascade": steps, "odd key": True}], "Hello", "") == (
        '# Hello\n#\n\n[[routes]]\nmodel = "smol"\naliases = ["a", "b\\""]\n\n'
        '[[routes]]\nmodel = "auto"\ncascade = [\n'
        '  { model = "x", accept_if = "min_logprob > -1" },\n  { model = "y z" },\n]\n'
        '"odd key" = true\n'
    )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "[[routes]\n",
            "this is no TOML: Expected ']]' at the end of an array declaration (at line 1",
        ),
        ("", "there is no [[routes]]"),
        ('[[gateway.routes]]\nmodel = "m"', "there is no [[routes]]"),
        ("routes = []\n[gateway]\n", "'gateway' does not belong here"),
        ("routes = 3", "routes: Expected `array`, got `int`"),
        ('[[routes]]\nmodle = "m"', "routes[0]: unknown key 'modle', did you mean 'model'?"),
        ("[[routes]]\nmodel = 2020-01-01", "routes[0].model: Expected `str`"),
        (
            '[[routes]]\nmodel = "m"\nbackends = [{ model = "a", weight = 0.5 }]',
            "routes[0].backends: weights sum to 0.5, not 1",
        ),
    ],
)
def test_bad_text_is_told_where(text: str, told: str) -> None:
    with pytest.raises(BadText) as refused:
        parse(text)
    assert str(refused.value).startswith(told)


def test_a_table_without_routes_has_to_be_meant() -> None:
    assert render([]) == "routes = []\n"
    assert parse(render([])) == []
