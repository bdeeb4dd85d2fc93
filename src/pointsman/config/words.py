"""What refusals say: what would be right, what was given, and the valid name that is nearest to a wrong one."""

import difflib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import inspect

from pointsman.config.option import type_of
from pointsman.config.values import ConfigError

__all__ = ["allowed", "nearest", "shown", "unknown"]


def allowed(kind: Any) -> str:
    """Return in words what an option may be.

    >>> from typing import Annotated
    >>> from msgspec import Meta
    >>> allowed(Annotated[int, Meta(ge=1)])
    'an integer of at least 1'
    """
    return _in_words(type_of(kind))


def _in_words(kind: inspect.Type) -> str:
    match kind:
        case inspect.IntType():
            return "an integer" + _range(kind)
        case inspect.FloatType():
            return "a number" + _range(kind)
        case inspect.BoolType():
            return "true or false"
        case inspect.StrType():
            return "a string" if not kind.min_length else "a string that is not empty"
        case inspect.LiteralType():
            return " or ".join(map(shown, kind.values))
        case inspect.EnumType():
            return " or ".join(shown(member.value) for member in kind.cls)
        case inspect.VarTupleType() if isinstance(kind.item_type, inspect.StructType):
            return "a list of tables"
        case inspect.StructType():
            return "a table"
        case inspect.UnionType():
            return _in_words(kind.types[0])
        case _:
            return "a list of strings"


def _range(kind: inspect.IntType | inspect.FloatType) -> str:
    if kind.ge is not None and kind.le is not None:
        return f" in {_number(kind.ge)}..{_number(kind.le)}"
    if kind.ge is not None:
        return f" of at least {kind.ge:g}"
    if kind.gt is not None:
        return f" above {kind.gt:g}"
    return ""


def _number(value: float) -> str:
    # The general format would write a billion as a power of ten.
    return str(value) if isinstance(value, int) else f"{value:g}"


def unknown(where: str, what: str, name: str, valid: Mapping[str, object]) -> ConfigError:
    """Return the refusal of a name that stands at `where`; `what` is what it would be the name of."""
    return ConfigError(f"{where}: unknown {what}; the nearest valid name is {nearest(name, valid)}")


def nearest(name: str, valid: Mapping[str, object] | Sequence[str]) -> str:
    """Return the valid name that is most like the given one."""
    return difflib.get_close_matches(name, list(valid), n=1, cutoff=0.0)[0]


def shown(value: object) -> str:
    """Return a value as one would write it in TOML, at most 80 characters."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."
