"""The route table as text for an editor: TOML, as in a configuration file, with `[[routes]]` at the top.

`render` and `parse` are each other's inverse for every table that a gateway accepts.
"""

import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from pointsman.domain.routes import RouteTable, routes_from_config
from pointsman.errors import InvalidRoutes
from pointsman.tomltext import toml_field, toml_key

__all__ = ["BadText", "parse", "render"]


class BadText(Exception):
    """Text that is no route table; the message says where."""


def render(routes: Sequence[Mapping[str, Any]], *comments: str) -> str:
    """Return routes, as the admin API has them, as TOML below some lines of comment.

    >>> print(render([{"model": "smol", "backends": [{"model": "smol-v3", "weight": 1.0}]}], "Routes."), end="")
    # Routes.
    <BLANKLINE>
    [[routes]]
    model = "smol"
    backends = [
      { model = "smol-v3", weight = 1.0 },
    ]
    """
    lines = [f"# {comment}".rstrip() for comment in comments]
    if not routes:
        lines += ["", "routes = []"]
    for route in routes:
        lines += ["", "[[routes]]"]
        lines += [
            f"{toml_key(key)} = {toml_field(value)}"
            for key, value in route.items()
            if value is not None
        ]
    return "\n".join(lines).lstrip("\n") + "\n"


def parse(text: str) -> list[dict[str, Any]]:
    """Return the routes of a text that `render` could have made.

    Raises `BadText` where it is not TOML, has a key that does not exist, or breaks a rule of route tables.

    >>> parse('[[routes]]\\nmodel = "smol"\\ntargets = ["unifed"]')
    Traceback (most recent call last):
    pointsman.remote.routefile.BadText: routes[0].targets[0]: unknown target 'unifed', did you mean 'unified'?
    """
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # not all that tomllib raises is its own
        raise BadText(f"this is no TOML: {error}") from None
    if "routes" not in document:
        raise BadText("there is no [[routes]]; a table without any route is written: routes = []")
    if len(document) > 1:
        other = next(key for key in document if key != "routes")
        raise BadText(f"{other!r} does not belong here: everything is in [[routes]]")
    routes = document["routes"]
    try:
        RouteTable.validate(routes_from_config(routes))
    except InvalidRoutes as error:
        raise BadText(error.message) from None
    return list(routes)
