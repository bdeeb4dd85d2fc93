"""From a file, the environment and `--set` to a `Config`, or to a message that names the key.

It reads the one file that it is given, and does not know what an option is good for.
"""

import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct, inspect

from pointsman.config.checks import check
from pointsman.config.option import fields_of, item_of, table_of, type_of
from pointsman.config.options import Config, GatewayConfig
from pointsman.config.values import ConfigError
from pointsman.config.words import allowed, shown, unknown

__all__ = ["load"]

S = TypeVar("S", bound=Struct)

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

    gateway = _read(GatewayConfig, merged, "gateway", origin)
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
    """Return the key and the value that its declared type reads from the text.

    Text that cannot be read stays text: the check of types, which comes later, refuses it.
    """
    fields = fields_of(GatewayConfig)
    if key not in fields:
        raise unknown(place, "key", key, fields)
    match type_of(fields[key].type):
        case inspect.BoolType():
            return key, {"true": True, "1": True, "false": False, "0": False}.get(
                text.lower(), text
            )
        case inspect.IntType() if re.fullmatch(r"[+-]?[0-9]{1,18}", text):
            return key, int(text)
        case inspect.FloatType() if re.fullmatch(r"[+-]?[0-9.]+([eE][+-]?[0-9]+)?", text):
            try:
                return key, float(text)
            except ValueError:
                return key, text
        case inspect.VarTupleType():
            raise ConfigError(
                f"{place}: gateway.{key} is a list; lists belong in the configuration file"
            )
    return key, text


def _read(kind: type[S], table: object, where: str, origin: Mapping[str, str] | None = None) -> S:
    """Return a struct from a TOML table, checked key by key so that a message can name the key."""
    if not isinstance(table, dict):
        raise ConfigError(f"{where} = {shown(table)}: expected a table")
    fields = fields_of(kind)
    for key in table:
        if key not in fields:
            raise unknown(f"{where}.{key}", "key", key, fields)
    values = {}
    for key, field in fields.items():
        place = (origin or {}).get(key, f"{where}.{key}")
        if key in table:
            values[field.name] = _value(field.type, table[key], place)
        elif field.required:
            raise ConfigError(f"{place} is missing: expected {allowed(field.type)}")
    return kind(**values)


def _value(kind: Any, value: object, where: str) -> object:
    item = item_of(kind)
    if item is not None and isinstance(value, list):
        return tuple(_read(item, entry, f"{where}[{i}]") for i, entry in enumerate(value))
    table = table_of(kind)
    if table is not None and isinstance(value, dict):
        return _read(table, value, where)
    try:
        read: object = msgspec.convert(value, kind)
    except msgspec.ValidationError:
        read = math.nan
    if isinstance(read, float) and not math.isfinite(read):
        raise ConfigError(f"{where} = {shown(value)}: expected {allowed(kind)}")
    return read
