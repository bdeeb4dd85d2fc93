"""How an option is declared, and how its declaration is read.

An option is one field of a struct: its name, type and default, and beside the type what `option` says of it.
"""

from typing import Any, NamedTuple

import msgspec
from msgspec import Meta, Struct, inspect

from pointsman.config.routes import ROUTE_DOCS

__all__ = ["Declaration", "declaration_of", "fields_of", "item_of", "option", "table_of", "type_of"]


def option(
    doc: str, *, unit: str = "", group: str = "", restart: bool = False, **limits: Any
) -> Meta:
    """Return the declaration of one option beside its type.

    A `group` opens a table of the page; `restart` says that a change takes effect with the next start only.
    """
    made: Meta = Meta(
        description=doc,
        extra={"unit": unit, "group": group, "restart": restart},
        extra_json_schema={"x-unit": unit} if unit else None,
        **limits,
    )
    return made


class Declaration(NamedTuple):
    """What is said of an option beside its type; `unit` and `group` are "" for none."""

    doc: str
    unit: str = ""
    group: str = ""
    restart: bool = False


def declaration_of(kind: type[Struct], field: msgspec.structs.FieldInfo) -> Declaration:
    """Return what is said of a field, wherever that stands."""
    declared = inspect.type_info(field.type)
    if isinstance(declared, inspect.Metadata):
        extra = declared.extra or {}
        doc = (declared.extra_json_schema or {})["description"]
        return Declaration(doc, extra["unit"], extra["group"], extra["restart"])
    return Declaration(ROUTE_DOCS[kind][field.name])


def fields_of(kind: type[Struct]) -> dict[str, msgspec.structs.FieldInfo]:
    """Return the fields of a struct by the name that they have in a file."""
    return {field.encode_name: field for field in msgspec.structs.fields(kind)}


def type_of(kind: Any) -> inspect.Type:
    """Return the type without its declaration."""
    found = inspect.type_info(kind)
    return found.type if isinstance(found, inspect.Metadata) else found


def item_of(kind: Any) -> type[Struct] | None:
    """Return the struct that a list holds, None for every other type."""
    plain = type_of(kind)
    if isinstance(plain, inspect.VarTupleType) and isinstance(plain.item_type, inspect.StructType):
        return plain.item_type.cls
    return None


def table_of(kind: Any) -> type[Struct] | None:
    """Return the struct that a key may hold beside nothing, None for every other type."""
    plain = type_of(kind)
    if isinstance(plain, inspect.UnionType):
        for each in plain.types:
            if isinstance(each, inspect.StructType):
                return each.cls
    return None
