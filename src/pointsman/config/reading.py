"""Values, read by the declared types: from a TOML table, from text, and from the labels of a discovered engine."""

import math
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import Struct, inspect

from pointsman.config.option import fields_of, item_of, table_of, type_of
from pointsman.config.values import ConfigError
from pointsman.config.words import allowed, shown, unknown

__all__ = ["from_text", "read_table", "read_value"]

S = TypeVar("S", bound=Struct)


def read_table(
    kind: type[S], table: object, where: str, origin: Mapping[str, str] | None = None
) -> S:
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
            values[field.name] = read_value(field.type, table[key], place)
        elif field.required:
            raise ConfigError(f"{place} is missing: expected {allowed(field.type)}")
    return kind(**values)


def read_value(kind: Any, value: object, where: str) -> object:
    """Return a value as its declaration has it. Raises ConfigError, which says where it stands."""
    item = item_of(kind)
    if item is not None and isinstance(value, list):
        return tuple(read_table(item, entry, f"{where}[{i}]") for i, entry in enumerate(value))
    table = table_of(kind)
    if table is not None and isinstance(value, dict):
        return read_table(table, value, where)
    try:
        read: object = msgspec.convert(value, kind)
    except msgspec.ValidationError:
        read = math.nan
    if isinstance(read, float) and not math.isfinite(read):
        raise ConfigError(f"{where} = {shown(value)}: expected {allowed(kind)}")
    return read


def from_text(kind: Any, text: str) -> object:
    """Return the value that a declared type reads from a text.

    Text that cannot be read stays text: `read_value`, which comes later, refuses it.

    >>> from_text(int, "7"), from_text(float, "0.5"), from_text(bool, "1"), from_text(int, "seven")
    (7, 0.5, True, 'seven')
    """
    match type_of(kind):
        case inspect.BoolType():
            return {"true": True, "1": True, "false": False, "0": False}.get(text.lower(), text)
        case inspect.IntType() if re.fullmatch(r"[+-]?[0-9]{1,18}", text):
            return int(text)
        case inspect.FloatType() if re.fullmatch(r"[+-]?[0-9.]+([eE][+-]?[0-9]+)?", text):
            try:
                return float(text)
            except ValueError:
                return text
    return text
