"""The declaration of the options, printed: as JSON Schema and as the reference page."""

import json
from typing import Any

import msgspec
from msgspec import Struct

from pointsman.config.option import declaration_of, fields_of, item_of, table_of
from pointsman.config.options import Config, GatewayConfig
from pointsman.config.routes import ROUTE_DOCS
from pointsman.config.words import allowed

__all__ = ["reference", "schema"]

INTRODUCTION = """\
# Configuration

<!-- Made by `pointsman config reference`. Do not edit: the declaration is src/pointsman/config/options.py. -->

The gateway reads one TOML file: `pointsman serve --config FILE`. Every option has a default; an
option that does not exist is an error, and so is a section other than `gateway` and `ext`.

An environment variable `TL_GATEWAY__<KEY>` (such as `TL_GATEWAY__MAX_ATTEMPTS=2`) beats the file,
and `--set gateway.<key>=<value>` on the command line beats both. Both are for single values; lists
and tables belong in the file. Truth values are written true, false, 1 or 0.

`pointsman config schema` prints the same as a JSON Schema.

The file is read again on SIGHUP, on `POST /admin/v1/config:reload`, and when it changes where `watch = true`: all of it
takes effect or nothing does. What is marked *Restart* waits for the next start; the answer and the log name it.

A small file:

```toml
[gateway]
listen = "127.0.0.1:8080"
route_policy = "affinity"

[[gateway.workers]]
id = "a"
url = "http://127.0.0.1:8000"
model = "m"

[[gateway.routes]]
model = "chat"
backends = [{ model = "m" }]
```
"""


def schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a configuration file; `x-unit` names units."""
    made: dict[str, Any] = json.loads(msgspec.json.encode(msgspec.json.schema(Config)))
    for kind, docs in ROUTE_DOCS.items():
        for key, doc in docs.items():
            made["$defs"][kind.__name__]["properties"][key]["description"] = doc
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Pointsman configuration",
        **made,
    }


def reference() -> str:
    """Return the reference page of all options, as Markdown."""
    return INTRODUCTION + "".join(_section("[gateway]", GatewayConfig))


def _section(title: str, kind: type[Struct]) -> list[str]:
    """Return the section of one table, followed by those of the tables inside it."""
    lines = [f"\n## {title}\n\n{(kind.__doc__ or '').strip().partition(chr(10))[0]}\n"]
    inner: list[str] = []
    for index, (key, field) in enumerate(fields_of(kind).items()):
        doc, unit, group, restart = declaration_of(kind, field)
        if restart:
            doc += " *Restart.*"
        if group:
            lines.append(f"\n### {group}\n")
        if group or index == 0:
            lines.append("\n| key | allowed | default | unit | meaning |\n|---|---|---|---|---|\n")
        lines.append(f"| `{key}` | {allowed(field.type)} | {_default(field)} | {unit} | {doc} |\n")
        item = item_of(field.type)
        if item is not None:
            inner += _section(f"[[{title.strip('[]')}.{key}]]", item)
        table = table_of(field.type)
        if table is not None:
            inner += _section(f"[{title.strip('[]')}.{key}]", table)
    return lines + inner


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "required"
    return "none" if field.default is None else f"`{json.dumps(field.default)}`"
