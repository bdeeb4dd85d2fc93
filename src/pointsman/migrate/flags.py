"""The command line of another gateway: its flags and their values, from words or from the script that starts it.

It runs nothing and expands nothing: a variable of the shell stays as it is written.
"""

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from pointsman.migrate.draft import Unreadable
from pointsman.migrate.rules import Item

__all__ = ["Flags", "flag_items", "words_of_script"]

ENDS = re.compile(r"([0-9]?[<>]|&|\||;).*")
"""A word that ends a command, or sends its output elsewhere."""


def words_of_script(path: Path, program: re.Pattern[str]) -> list[str]:
    """Return the words after the name of the program in a shell script that starts it once.

    Raises Unreadable where the script cannot be read or does not start it once.
    """
    try:
        script = path.read_text(encoding="utf-8-sig")
        lines = re.sub(r"\\\r?\n", " ", script).splitlines()
        commands = [shlex.split(line, comments=True) for line in lines]
    except OSError as error:
        raise Unreadable(f"{path}: {error.strerror}") from None
    except ValueError as error:  # no UTF-8, or a quote that is not closed
        raise Unreadable(f"{path}: not a shell script: {error}") from None
    found = [
        words[index + 1 :]
        for words in commands
        for index, word in enumerate(words)
        if program.search(word) and any(other.startswith("--") for other in words[index + 1 :])
    ]
    if not found:
        raise Unreadable(f"{path}: no command here starts it with flags")
    if len(found) > 1 and found[0][-len(found[1]) :] != found[1]:
        raise Unreadable(f"{path}: more than one command starts it; leave one of them")
    return found[-1]


def flag_items(words: Sequence[str]) -> list[Item]:
    """Return what is said after each flag: True for nothing, a string for one word, else a list of strings.

    A flag that stands twice is two items. Words before the first flag (a subcommand) are passed over.
    """
    given: list[tuple[str, list[str]]] = []
    for word in words:
        if ENDS.fullmatch(word):
            break
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            given.append((flag.replace("_", "-"), [value] if equals else []))
        elif given:
            given[-1][1].append(word)
    return [
        Item(flag, flag, values[0] if len(values) == 1 else values or True)
        for flag, values in given
    ]


class Flags:
    """Flags by name; of one that stands twice, `one` is the last and `all` has every one."""

    def __init__(self, items: Sequence[Item]) -> None:
        self._items = items

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items)

    def __contains__(self, flag: str) -> bool:
        return any(item.key == flag for item in self._items)

    def all(self, flag: str) -> list[Item]:
        """Return every occurrence."""
        return [item for item in self._items if item.key == flag]

    def one(self, flag: str, default: str = "") -> Item:
        """Return the last occurrence, or an item with the default."""
        return next(iter(reversed(self.all(flag))), Item(flag, flag, default))

    def words(self, flag: str) -> list[Item]:
        """Return the values of all occurrences, an item for each."""
        found = []
        for item in self.all(flag):
            values = item.value if isinstance(item.value, list) else [item.value]
            found += [item._replace(value=value) for value in values]
        return found
