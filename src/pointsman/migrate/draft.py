"""The configuration that is being written: tables, keys, and notes on what has no counterpart.

A `Draft` is filled by a source and turned into TOML once. A note stands in the text above the key that it is about, or
at the end of its table, and in `Draft.notes`.
"""

import re
import textwrap
from collections.abc import Iterable
from typing import NamedTuple

from pointsman.tomltext import toml_field, toml_key

__all__ = ["Draft", "Note", "Table", "Unreadable"]

WIDTH = 98

NAMED = re.compile(r"os\.environ/([A-Za-z_][A-Za-z0-9_]*)|\$\{?([A-Za-z_][A-Za-z0-9_]*)\}?")
"""An environment variable, as YAML and shell scripts name it."""


class Unreadable(Exception):
    """What cannot be read at all; the text is one line for the person who wrote it."""


class Note(NamedTuple):
    """What has no counterpart, or another meaning here: their key or flag, and what to know about it."""

    item: str
    why: str

    def __str__(self) -> str:
        return f"{self.item}: {self.why}"


class Table:
    """One table of the file. Its keys keep their order; a key that is put again has its last value."""

    def __init__(self, header: str) -> None:
        self.header = header
        self.values: dict[str, object] = {}
        self._remarks: dict[str, list[str]] = {}

    def put(self, key: str, value: object) -> None:
        """Write a key."""
        self.values[key] = value

    def remark(self, text: str, *, above: str = "") -> None:
        """Write a comment above a key, or at the end of the table."""
        self._remarks.setdefault(above, []).append(text)

    def text(self) -> str:
        """Return the table as TOML."""
        lines = [self.header]
        for key, value in self.values.items():
            lines += _comments(self._remarks.get(key, ()))
            lines.append(f"{toml_key(key)} = {toml_field(value)}")
        for key, remarks in self._remarks.items():
            if key not in self.values:
                lines += _comments(remarks)
        return "\n".join(lines) + "\n"


class Draft:
    """A configuration in the making, from the source of a name such as `litellm`."""

    def __init__(self, source: str) -> None:
        self.notes: list[Note] = []
        self.gateway = Table("[gateway]")
        self._source = source
        self.engine_tables: list[Table] = []
        self._routes: dict[str, Table] = {}
        self._common: dict[str, object] = {}
        self._ids: set[str] = set()
        self._variables: dict[str, str] = {}

    def note(self, item: str, why: str, *, table: Table | None = None, above: str = "") -> None:
        """Say what has no counterpart: in its table (None: that of the gateway), above a key or at the end."""
        note = Note(item, why)
        if note not in self.notes:
            self.notes.append(note)
            (table or self.gateway).remark(f"note: {note}", above=above)

    def each(self, key: str, value: object) -> None:
        """Write a key into every table of engines, those that come later included, where it does not stand yet."""
        self._common[key] = value

    def worker(self, url: str, name: str = "") -> Table:
        """Add a worker. Its id is `name`, else what stands after the scheme; a number makes it unique."""
        wanted = name or url.partition("://")[2].rstrip("/")
        worker_id, number = wanted, 1
        while worker_id in self._ids:
            number += 1
            worker_id = f"{wanted}-{number}"
        self._ids.add(worker_id)
        table = self.engines("[[gateway.workers]]")
        table.put("id", worker_id)
        table.put("url", url)
        return table

    def variable(self, item: str, key: str) -> str:
        """Return the environment variable for a key: the one that stands in its place, else one to be filled."""
        named = NAMED.fullmatch(key)
        if named is not None:
            return named[1] or named[2]
        if key not in self._variables:
            number = len(self._variables) + 1
            self._variables[key] = f"ENGINE_API_KEY_{number}" if number > 1 else "ENGINE_API_KEY"
        name = self._variables[key]
        self.note(item, f"put the key into the environment variable {name}; it is not copied")
        return name

    def engines(self, header: str) -> Table:
        """Add a table that says where engines are."""
        self.engine_tables.append(Table(header))
        return self.engine_tables[-1]

    def route(self, model: str) -> Table:
        """Return the route of a public model id; the first time it is added."""
        if model not in self._routes:
            self._routes[model] = Table("[[gateway.routes]]")
            self._routes[model].put("model", model)
        return self._routes[model]

    def text(self) -> str:
        """Return the whole file."""
        for table in self.engine_tables:
            for key, value in self._common.items():
                if key not in table.values:
                    table.put(key, value)
        head = f"# Made by `pointsman import {self._source}`."
        if self.notes:
            head += " What has no counterpart, or another meaning, is marked `note:`."
        tables = [self.gateway, *self.engine_tables, *self._routes.values()]
        return "\n".join([f"{head}\n", *(table.text() for table in tables)])


def _comments(remarks: Iterable[str]) -> list[str]:
    """Return lines of comment. Whatever the text holds, it stays inside them."""
    lines = []
    for remark in remarks:
        plain = "".join(char if char.isprintable() else " " for char in remark)
        wrap = textwrap.TextWrapper(WIDTH, "# ", "#   ", break_on_hyphens=False)
        lines += wrap.wrap(plain)
    return lines
