"""Values as TOML text, for what people read and edit.

It writes values, not documents: which tables there are, and what is said about them, is for who makes a document.
"""

import json
import re

__all__ = ["toml_field", "toml_key", "toml_value"]

BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def toml_field(value: object) -> str:
    """Write a list of tables with one table per line, anything else in one line."""
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return "".join(["[\n", *(f"  {toml_value(item)},\n" for item in value), "]"])
    return toml_value(value)


def toml_value(value: object) -> str:
    """Write a string, number, truth value, list or table (of such values) in one line.

    >>> toml_value({"model": "smol", "weights": [0.5, 1]})
    '{ model = "smol", weights = [0.5, 1] }'
    """
    if isinstance(value, dict):
        items = (f"{toml_key(key)} = {toml_value(item)}" for key, item in value.items())
        return f"{{ {', '.join(items)} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, str):
        return _text(value)
    return json.dumps(value)  # of numbers and truth values both languages have the same idea


def toml_key(key: str) -> str:
    """Write a key, in quotes where it needs them."""
    return key if BARE_KEY.fullmatch(key) else _text(key)


def _text(text: str) -> str:
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(char if char.isprintable() else _escaped(char) for char in quoted)


def _escaped(char: str) -> str:
    return f"\\u{ord(char):04x}" if ord(char) < 2**16 else f"\\U{ord(char):08x}"
