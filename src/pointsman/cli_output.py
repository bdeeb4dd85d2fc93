"""Where the tables of commands go: to a terminal as wide as that is, to a file or a pipe as wide as they are."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["WIDE", "check_writable", "output"]

WIDE = 10_000
"""Columns of an output that is no terminal: a line that is cut or folded is of no use to grep."""


def output() -> "Console":
    """Return a console on stdout. Rich is imported when a command needs it."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=WIDE)


def check_writable(path: Path) -> None:
    """Raise OSError where a file cannot be written, before there is anything to write. What is there stays."""
    there = path.exists()
    if there and not path.is_file():
        # A pipe would take the check for all that comes.
        return
    path.open("ab").close()
    if not there:
        path.unlink()
