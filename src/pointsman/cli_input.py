"""The key that commands are given: its option, and what cannot be one."""

from typing import Any

import typer

__all__ = ["checked_key", "key_option"]


def key_option(what: str) -> Any:
    """Return the option `--key`; `what` is the sentence that says which key is wanted."""
    return typer.Option(
        envvar="POINTSMAN_KEY",
        show_default=False,
        help=f"{what} Other users of this machine can see it here, not in the environment.",
    )


def checked_key(key: str) -> str:
    """Return a key without the white space around it. What is none is wrong usage, and is not repeated.

    >>> checked_key(" secret ")
    'secret'
    """
    key = key.strip()
    if not (key.isascii() and key.isprintable()):
        raise typer.BadParameter("the key has characters that no key has")
    return key
