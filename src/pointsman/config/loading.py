"""From a file, the environment and `--set` to a `Config`, or to a message that names the key.

It reads the one file that it is given, and does not know what an option is good for.
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import inspect

from pointsman.config.checks import check
from pointsman.config.option import fields_of, type_of
from pointsman.config.options import Config, GatewayConfig
from pointsman.config.reading import from_text, read_table
from pointsman.config.values import ConfigError
from pointsman.config.words import shown, unknown

__all__ = ["load"]

ENV_NAME = re.compile(r"TL_([A-Z0-9]+)__(.+)")


def load(path: Path | None, sets: Sequence[str], environ: Mapping[str, str]) -> Config:
    """Return the configuration of a file (None: the defaults), the environment and `--set`.

    `TL_GATEWAY__<KEY>` beats the file, `gateway.key=value` of `sets` beats both; both are for
    scalars. Raises ConfigError for whatever is unknown, of the wrong type, out of its range, not
    served by this version, or open to the world without being said to be.
    """
    document = {} if path is None else _toml(path)
    sections = fields_of(Config)
    for section in document:
        if section not in sections:
            raise unknown(section, "section", section, sections)
    table = document.get("gateway", {})
    if not isinstance(table, dict):
        raise ConfigError(f"gateway = {shown(table)}: expected a table")

    origin: dict[str, str] = {}
    merged: dict[str, object] = dict(table)
    for key, text, place in [*_from_environment(environ), *_from_sets(sets)]:
        merged[key], origin[key] = text, f"gateway.{key} (from {place})"

    gateway = read_table(GatewayConfig, merged, "gateway", origin)
    ext = document.get("ext", {})
    if not isinstance(ext, dict):
        raise ConfigError(f"ext = {shown(ext)}: expected a table")
    check(gateway, origin)
    return Config(gateway=gateway, ext=ext)


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not a UTF-8 text") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


def _from_environment(environ: Mapping[str, str]) -> list[tuple[str, object, str]]:
    found = []
    for name in sorted(environ):
        match = ENV_NAME.fullmatch(name)
        if match is None or match[1] == "EXT":
            continue
        if match[1] != "GATEWAY":
            raise unknown(name, "section", match[1], {"GATEWAY": None, "EXT": None})
        found.append((*_scalar(match[2].lower(), environ[name], name), name))
    return found


def _from_sets(sets: Sequence[str]) -> list[tuple[str, object, str]]:
    found = []
    for assignment in sets:
        name, equals, text = assignment.partition("=")
        section, _, key = name.strip().partition(".")
        if not equals or not key:
            raise ConfigError(f"--set {assignment}: expected gateway.key=value")
        if section != "gateway":
            raise unknown(f"--set {assignment}", "section", section, {"gateway": None})
        found.append((*_scalar(key, text.strip(), f"--set {assignment}"), "--set"))
    return found


def _scalar(key: str, text: str, place: str) -> tuple[str, object]:
    """Return the key and the value that its declared type reads from the text."""
    fields = fields_of(GatewayConfig)
    if key not in fields:
        raise unknown(place, "key", key, fields)
    if isinstance(type_of(fields[key].type), inspect.VarTupleType):
        raise ConfigError(
            f"{place}: gateway.{key} is a list; lists belong in the configuration file"
        )
    return key, from_text(fields[key].type, text)
