"""The route table as text for an editor: TOML, as in a configuration file, with `[[routes]]` at the top.

`render` and `parse` are each other's inverse for every table that a gateway accepts.
"""

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from pointsman.domain.routes import RouteTable, routes_from_config
from pointsman.errors import InvalidRoutes

__all__ = ["BadText", "parse", "render"]

BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


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
            f"{_key(key)} = {_field(value)}" for key, value in route.items() if value is not None
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


def _field(value: object) -> str:
    """Write a list of tables with one table per line, anything else in one line."""
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return "".join(["[\n", *(f"  {_value(item)},\n" for item in value), "]"])
    return _value(value)


def _value(value: object) -> str:
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{_key(key)} = {_value(item)}' for key, item in value.items())} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, str):
        return _text(value)
    return json.dumps(value)  # of numbers and truth values both languages have the same idea


def _key(key: str) -> str:
    return key if BARE_KEY.fullmatch(key) else _text(key)


def _text(text: str) -> str:
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(char if char.isprintable() else _escaped(char) for char in quoted)


def _escaped(char: str) -> str:
    return f"\\u{ord(char):04x}" if ord(char) < 2**16 else f"\\U{ord(char):08x}"
