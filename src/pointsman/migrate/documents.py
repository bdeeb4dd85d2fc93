"""Files of settings: YAML, and JSON, which is YAML as well.

YAML needs the extra `pointsman[migrate]`.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pointsman.migrate.draft import Unreadable
from pointsman.migrate.rules import Item

__all__ = ["items_of", "read_document"]


def read_document(path: Path) -> dict[str, Any]:
    """Return the settings of a file.

    Raises Unreadable where it is no mapping of names to values, and without the extra.
    """
    try:
        import yaml
    except ImportError:
        raise Unreadable("YAML needs the extra: pip install 'pointsman[migrate]'") from None
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise Unreadable(f"{path}: {error.strerror}") from None
    except (UnicodeDecodeError, yaml.YAMLError, RecursionError, ValueError) as error:
        where = getattr(error, "problem_mark", None)
        line = f" in line {where.line + 1}" if where is not None else ""
        raise Unreadable(f"{path}: not a YAML text{line}") from None
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise Unreadable(f"{path}: expected keys and values")
    return found


def items_of(settings: object, prefix: str, *, key: str = "") -> Iterator[Item]:
    """Yield the items of one mapping: named `prefix.name`, and `key.name` in the rules (`prefix.name`, if not given).

    Nothing (None) has no items. Raises Unreadable where it is no mapping.
    """
    if settings is None:
        return
    if not isinstance(settings, Mapping):
        raise Unreadable(f"{prefix}: expected keys and values")
    for name, value in settings.items():
        yield Item(f"{prefix}.{name}", f"{key or prefix}.{name}", value)
