"""What becomes of one key or flag of another gateway, as a table: for the program and for the page about migrating.

A rule either writes a key of ours, or says why nothing can be written, or leaves it to the source's own code. Its words
are for people who know the other gateway.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple
from urllib.parse import urlsplit

from pointsman.migrate.draft import Draft, Unreadable

__all__ = [
    "Item",
    "Reader",
    "Rule",
    "apply",
    "made",
    "moot",
    "near",
    "none",
    "number",
    "place",
    "same",
    "table_of",
    "text",
    "whole",
]

Reader = Callable[["Item"], object]

OFF: tuple[object, ...] = (False, None, "", [], {}, "false")
"""What says that something is not wanted."""

UNKNOWN = "not known here; nothing is written for it"


class Item(NamedTuple):
    """One thing that they say: how to name it to people, its name in the rules, and its value as they wrote it."""

    name: str
    key: str
    value: object


class Rule(NamedTuple):
    """What is written (a key of `[gateway]`, or `each.` and a key of every engine's table), and what differs.

    Without `read` the source's own code writes it, or nothing is to be written. `noted` says whether `why` is a note.
    """

    to: str = ""
    why: str = ""
    read: Reader | None = None
    noted: bool = False


def same(to: str, read: Reader, why: str = "") -> Rule:
    """Return the rule for what means the same here; `why` is for the page only."""
    return Rule(to, why, read)


def near(to: str, read: Reader, why: str) -> Rule:
    """Return the rule for what has a counterpart that is not the same."""
    return Rule(to, why, read, noted=True)


def none(why: str) -> Rule:
    """Return the rule for what has no counterpart."""
    return Rule(why=why, noted=True)


def moot(why: str) -> Rule:
    """Return the rule for what needs no counterpart: it holds here without being said."""
    return Rule(why=why)


def made(to: str, why: str = "") -> Rule:
    """Return the rule for what the source's own code writes; it adds notes of its own."""
    return Rule(to, why)


def rule_for(rules: Mapping[str, Rule], key: str) -> Rule:
    """Return the rule of a key: its own, else that of the first pattern that fits (`--mesh-*`), else a note."""
    if key in rules:
        return rules[key]
    fitting = (
        rule for pattern, rule in rules.items() if "*" in pattern and fnmatchcase(key, pattern)
    )
    return next(fitting, none(UNKNOWN))


def apply(draft: Draft, rules: Mapping[str, Rule], items: Iterable[Item]) -> None:
    """Write what the rules write. What is switched off (false, empty) and has no counterpart needs no note.

    Raises Unreadable for a value that cannot be read.
    """
    for item in items:
        rule = rule_for(rules, item.key)
        scope, _, key = rule.to.rpartition(".")
        if rule.noted and (rule.read is not None or item.value not in OFF):
            draft.note(item.name, rule.why, above="" if scope else key)
        if rule.read is not None and scope:
            draft.each(key, rule.read(item))
        elif rule.read is not None:
            draft.gateway.put(key, rule.read(item))


def table_of(rules: Mapping[str, Rule]) -> str:
    """Return rules as a table of the page."""
    lines = ["| theirs | ours | what differs |", "| --- | --- | --- |"]
    for key, rule in rules.items():
        ours = (
            f"`{rule.to.replace('each.', '')}`"
            if rule.to
            else "-"
            if rule.noted
            else "nothing to write"
        )
        if rule.to.startswith("each."):
            ours += " of each worker"
        lines.append(f"| `{key}` | {ours} | {rule.why} |")
    return "\n".join(lines) + "\n"


# ------------------------------------------------------------------ values


def text(item: Item) -> str:
    """Read a string.

    Raises Unreadable for another value, and for a variable, whose value nobody knows here.
    """
    if not isinstance(item.value, str | int | float) or isinstance(item.value, bool):
        raise Unreadable(f"{item.name}: expected one value")
    read = str(item.value)
    if "$" in read or read.startswith("os.environ/"):
        raise Unreadable(f"{item.name}: the value of {read} is not known here; write it out")
    return read


def number(item: Item) -> float:
    """Read a number, an integer where it is one. Raises Unreadable."""
    read = text(item)
    try:
        value = float(read)
    except ValueError:
        raise Unreadable(f"{item.name}: expected a number, not {read!r}") from None
    if not abs(value) < 1e15:
        raise Unreadable(f"{item.name}: {read} is out of range")
    return int(value) if value == int(value) else value


def whole(item: Item) -> int:
    """Read an integer. Raises Unreadable."""
    value = number(item)
    if not isinstance(value, int):
        raise Unreadable(f"{item.name}: expected an integer, not {value}")
    return value


def place(item: Item) -> str:
    """Read the address of an engine; http is meant where no scheme stands. Raises Unreadable."""
    read = text(item)
    url = read if "://" in read else f"http://{read}"
    try:
        parts = urlsplit(url)
        good = parts.hostname and parts.scheme in ("http", "https") and parts.port != 0
    except ValueError:  # a port or an IPv6 address that is none
        good = False
    if not good or "@" in url or re.search(r"\s", url):
        raise Unreadable(f"{item.name}: expected http://host:port, and no credentials in it")
    return url
