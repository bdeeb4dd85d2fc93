"""`pointsman routes edit`: the route table through an editor, put back only if nobody changed it meanwhile.

What a person has written is never lost: unless it is in force at the end, it stays in a file whose name is told.
"""

import shlex
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from difflib import unified_diff
from pathlib import Path
from typing import Any

import msgspec

from pointsman.remote.client import AdminClient, Refused, RemoteError, printable
from pointsman.remote.routefile import BadText, parse, render

__all__ = ["Editing", "Table", "editor_of", "fetch"]

STALE, BAD = 412, 400

DRAFT_MAX = 16 * 2**20
"""Bytes of a text that may be put."""


class Table(msgspec.Struct, frozen=True):
    """A route table as plain values, and the entity tag of its version."""

    routes: list[dict[str, Any]]
    etag: str = ""

    def text(self, *comments: str) -> str:
        """Return the table as text to read or to edit. Raises `RemoteError` for one that cannot be written."""
        try:
            return render(self.routes, *map(printable, comments))
        except RecursionError:
            raise RemoteError("the gateway's routes are nested too deeply") from None


def fetch(client: AdminClient) -> Table:
    """Return the table in force. Raises as `AdminClient.ask` does."""
    answer = client.get("/routes")
    return Table(answer.read(Table).routes, answer.etag)


def editor_of(environment: Mapping[str, str]) -> list[str]:
    """Return the command of the user's editor: $VISUAL, else $EDITOR, else vi; a blank one is none.

    Raises `RemoteError` for one that no shell would understand.

    >>> editor_of({"VISUAL": " ", "EDITOR": "code --wait"})
    ['code', '--wait']
    """
    for name in ("VISUAL", "EDITOR"):
        command = environment.get(name, "")
        try:
            words = shlex.split(command)
        except ValueError as error:
            raise RemoteError(f"{name} is no command: {error} in {command}") from None
        if words:
            return words
    return ["vi"]


class Editing:
    """One user's change of the table, as often as it takes.

    `ask` puts a question whose answer is yes or no, `say` tells something.
    """

    def __init__(
        self,
        client: AdminClient,
        editor: list[str],
        *,
        ask: Callable[[str], bool],
        say: Callable[[str], None],
    ) -> None:
        self._client = client
        self._editor = editor
        self._ask = ask
        self._say = say

    def run(self) -> bool:
        """Edit until the table is put, unchanged, or the user gives up; tell whether what they want is in force.

        Raises as `AdminClient.ask` does, and `RemoteError` where the editor cannot be run or leaves nothing to read.
        """
        table = fetch(self._client)
        comments = _comments(self._client.url, table)
        while True:
            draft = _Draft(table.text(*comments))
            try:
                newer = self._edit(draft, table)
            finally:
                draft.close(self._say)
            if isinstance(newer, bool):
                return newer
            table = newer
            comments = *_comments(self._client.url, table), f"What you wrote is in {draft.path}"

    def _edit(self, draft: "_Draft", table: Table) -> Table | bool:
        """Return whether the draft is in force, or the newer table to begin again with."""
        while True:
            self._open(draft)
            content = draft.read()
            if content == draft.original:
                self._say("nothing is changed, nothing was sent")
                return True
            try:
                routes = _parse(content)
                if routes == table.routes:
                    draft.done()
                    self._say("the routes are the same, nothing was sent")
                    return True
                self._put(routes, table)
            except BadText as error:
                self._say(printable(str(error)))
            except Refused as error:
                if error.status == STALE:
                    return self._redo(draft, table)
                if error.status != BAD:
                    raise
                self._say(str(error))
            else:
                draft.done()
                return True
            if not self._ask("Edit again?"):
                return False

    def _open(self, draft: "_Draft") -> None:
        try:
            status = subprocess.call([*self._editor, str(draft.path)])
        except (OSError, ValueError) as error:
            raise RemoteError(f"cannot run the editor: {error}; set VISUAL or EDITOR") from None
        if status:
            raise RemoteError(f"the editor ended with status {status}; nothing was sent")

    def _put(self, routes: list[dict[str, Any]], table: Table) -> None:
        body = msgspec.json.encode({"routes": routes})
        answer = self._client.ask("PUT", "/routes", body, if_match=table.etag)
        self._say(printable(f"the new table is in force: {table.etag} is now {answer.etag}"))

    def _redo(self, draft: "_Draft", table: Table) -> Table | bool:
        newer = fetch(self._client)
        self._say("somebody else changed the table meanwhile; nothing was put.")
        self._say(printable(f"{newer.etag}:"))
        for line in unified_diff(
            table.text().splitlines(), newer.text().splitlines(), lineterm="", n=2
        ):
            self._say(printable(line))
        draft.close(self._say)
        return newer if self._ask("Edit the new table?") else False


class _Draft:
    """A file of the user's own, readable by nobody else. Raises `RemoteError` where it cannot be made."""

    def __init__(self, original: str) -> None:
        self.original = original.encode()
        self._told = False
        try:
            descriptor, name = tempfile.mkstemp(prefix="pointsman-routes-", suffix=".toml")
            self.path = Path(name)
            with open(descriptor, "wb") as file:
                file.write(self.original)
        except OSError as error:
            raise RemoteError(f"cannot write a file for the editor: {error}") from None

    def read(self) -> bytes:
        """Return the text as it is now; editors may have replaced the file, or removed it, which is a `RemoteError`."""
        try:
            with self.path.open("rb") as file:
                return file.read(DRAFT_MAX + 1)
        except OSError as error:
            raise RemoteError(
                f"cannot read what the editor left: {error}; nothing was sent"
            ) from None

    def done(self) -> None:
        """Forget the text: it is in force, or says nothing new."""
        with suppress(OSError):
            self.path.unlink()

    def close(self, say: Callable[[str], None]) -> None:
        """Remove the file, or say once where it is if its text would be lost."""
        if self._told or not self.path.exists():
            return
        try:
            untouched = self.read() == self.original
        except RemoteError:
            untouched = False
        if untouched:
            self.done()
        else:
            self._told = True
            say(f"your text is kept in {self.path}")


def _parse(content: bytes) -> list[dict[str, Any]]:
    if len(content) > DRAFT_MAX:
        raise BadText(f"this is longer than {DRAFT_MAX} bytes")
    try:
        return parse(content.decode())
    except UnicodeDecodeError as error:
        raise BadText(f"this is no UTF-8: {error}") from None


def _comments(url: str, table: Table) -> tuple[str, ...]:
    return (
        f"The route table of {url}, version {table.etag}.",
        "Save and leave the editor to put it in force; leave it as it is to change nothing.",
    )
