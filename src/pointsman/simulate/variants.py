"""A policy with constants of its own, as a command line names it: NAME, or NAME:option=value,...

So a policy is compared with itself by other numbers, and with others at their best. The options are those of
`PolicyOptions`; whatever is not named stays as it was.
"""

from dataclasses import fields, replace
from math import isfinite
from typing import TYPE_CHECKING, Any

from pointsman.simulate.sizes import nearest

if TYPE_CHECKING:
    from pointsman.domain.policy import PolicyOptions

__all__ = ["variant_of"]


def variant_of(text: str, options: "PolicyOptions") -> "tuple[str, PolicyOptions]":
    """Return the name of a policy, and `options` with the changes that stand behind it; the name is not looked up.

    Raises `ValueError` with one line for an option that there is not, or that is no number.

    >>> from pointsman.domain.policy import PolicyOptions
    >>> name, options = variant_of("kv_cost:prefill_load_scale=4", PolicyOptions())
    >>> name, options.prefill_load_scale
    ('kv_cost', 4.0)
    """
    name, _, changes = text.partition(":")
    if not changes:
        return name, options
    now = {field.name: getattr(options, field.name) for field in fields(options)}
    kinds = {key: type(value) for key, value in now.items() if type(value) in (int, float)}
    changed: dict[str, Any] = {}
    for change in changes.split(","):
        key, _, value = change.partition("=")
        if key not in kinds:
            raise ValueError(f"policy {name}: there is no {key!r}, {nearest(key, kinds)}")
        changed[key] = _number(value, kinds[key], f"policy {name}: {key}")
    return name, replace(options, **changed)


def _number(text: str, kind: type, where: str) -> int | float:
    try:
        value: int | float = kind(text)
    except ValueError:
        raise ValueError(f"{where}: {text!r} is no {'whole ' * (kind is int)}number") from None
    if not (isfinite(value) and value >= 0):
        raise ValueError(f"{where}: {text!r} is less than 0, or no finite number")
    return value
