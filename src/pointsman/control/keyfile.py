"""The key file: JSON Lines, one API key per line, shared by gateways and people.

It is read whole or not at all, so that a slip in an editor leaves every key as it was, and rewritten in one step: a
crash leaves the old file or the new one. Whoever rewrites it holds a lock from the reading to the renaming, so that a
gateway and a command line lose nothing of each other's changes. What a line has beyond this version's fields stays.

It has digests, never secrets. What it does not do: check keys (see `pointsman.domain.keys`), or watch itself. Its calls
block for as long as the disk does, `create` and `revoke` also for the lock: from an event loop, call them in a thread.
"""

import fcntl
import hashlib
import os
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from pointsman.domain.keys import Key, Keyring, Scope, make_key
from pointsman.errors import StateUnavailable

__all__ = ["KeyFile", "KeyFileError", "read_pepper"]

TIMES = ("created_at", "expires_at")
"""Fields that are written as RFC 3339, and read as that or as seconds since 1970."""

PATIENCE_S = 5.0
"""How long to wait for somebody else who is rewriting the file, which takes milliseconds."""

RETRY_S = 0.01


class KeyFileError(StateUnavailable):
    """The file cannot be read, has a line that is no key, or cannot be written. The keys are as they were."""


class Line(NamedTuple):
    """One key of the file: its line as it stands there, and what it says."""

    text: bytes
    key: Key


def read_pepper(environ: Mapping[str, str], name: str) -> bytes:
    """Return the pepper of the key digests from the environment variable of this name.

    Raises ValueError, with a text for whoever set it up, where it is missing or empty.
    """
    pepper = environ.get(name, "")
    if not pepper:
        raise ValueError(
            f"{name} is empty or not set: this environment variable must hold the pepper of the key "
            "digests, a long random text, the same for every gateway that reads the key file"
        )
    return os.fsencode(pepper)


class KeyFile:
    """A file of keys, and the keyring that follows it (None where nobody asks for keys).

    `random_bytes` is what new keys are made of; `patience_s` is how long to wait for another writer, in seconds. Calls
    may come from several threads at once.
    """

    def __init__(
        self,
        path: Path,
        keyring: Keyring | None,
        *,
        random_bytes: Callable[[int], bytes] = secrets.token_bytes,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._path = path
        self._keyring = keyring
        self._random_bytes = random_bytes
        self._patience_s = patience_s
        # Held from reading the file to replacing the keys: a slow reader must not put the keys of
        # before a change in place of those after it.
        self._turn = threading.Lock()
        self._fingerprint: bytes | None = None
        self._signature: tuple[int, ...] | None = None
        self._settled = False
        self._changes = 0

    def load(self) -> None:
        """Read the file and hand its keys to the keyring.

        Raises KeyFileError, with the file and the line, where it is missing, a line is no key, or it is empty and was
        not; the keyring keeps what it has then.
        """
        with self._turn, self._failing_clearly():
            self._fingerprint = None
            contents = self._path.read_bytes()
            self._fingerprint = _digest(contents)
            self._follow(self._sound(contents))

    def check(self) -> None:
        """Raise what `load` would raise now, and change nothing."""
        with self._failing_clearly():
            self._sound(self._path.read_bytes())

    def changed(self) -> bool:
        """Tell whether the contents are others than when the file was last loaded, well or badly.

        A file that is missing has no contents. One that is left alone is not opened.
        """
        signature = _signature(self._path)
        if signature == self._signature and self._settled:
            return False
        # A file can change twice within one tick of the file system's clock. So its times are not
        # trusted before a second look, at least a tick later, finds them and the contents as they were.
        self._settled = signature == self._signature
        self._signature = signature
        try:
            return _digest(self._path.read_bytes()) != self._fingerprint
        except OSError:
            return self._fingerprint is not None

    def changes_seen(self) -> int:
        """Ask whether it changed, and return how often the answer was yes: what a `Watch` is to look at.

        A second change is another number than the first, and a load does not bring the old one back.
        """
        self._changes += self.changed()
        return self._changes

    def create(
        self,
        *,
        tenant: str,
        name: str,
        scopes: Sequence[Scope],
        rpm: int,
        tpm: int,
        priority: int,
        models: Sequence[str],
        expires_at: int | None,
        now: int,
    ) -> tuple[Key, str]:
        """Make a key at `now` (seconds since 1970) and return its record and its text, which is kept nowhere.

        A missing file is made, but not in place of one that had keys. Raises ValueError for what `Key` does not allow
        and where there is no keyring to take the pepper from, KeyFileError where the file cannot be read or written.
        """
        if self._keyring is None:
            raise ValueError("without a keyring there is no pepper to make a key with")
        with self._rewriting(make=not self._has_keys) as lines:
            while (made := make_key(self._random_bytes))[0] in lines:
                pass  # An id that is taken would take that key's place.
            key_id, text = made
            secret = text.rpartition("_")[2].encode()
            record = {
                "key_id": key_id,
                "hmac": self._keyring.digest(secret),
                "tenant": tenant,
                "name": name,
                "scopes": list(dict.fromkeys(scopes)),
                "rpm": rpm,
                "tpm": tpm,
                "priority": priority,
                "models": list(models),
                "created_at": now,
                "expires_at": expires_at,
                "revoked": False,
            }
            key = _key(record)
            lines[key_id] = Line(msgspec.json.encode(record | _rfc3339(record)), key)
        return key, text

    def revoke(self, key_id: str) -> bool:
        """Revoke a key and tell whether there is one of that id. Revoking it again changes nothing.

        Raises KeyFileError where the file cannot be read or written.
        """
        with self._rewriting() as lines:
            line = lines.get(key_id)
            if line is not None and not line.key.revoked:
                record = msgspec.json.decode(line.text) | {"revoked": True}
                lines[key_id] = Line(msgspec.json.encode(record), _key(record))
        return line is not None

    def list(self, tenant: str | None = None) -> list[Key]:
        """Return the keys of the file, newest first; those of one tenant if it is given.

        Revoked and expired ones are among them. Raises KeyFileError where the file cannot be read.
        """
        with self._failing_clearly():
            lines = self._read(self._path.read_bytes())
        keys = sorted(
            (line.key for line in reversed(lines.values())),
            key=lambda key: key.created_at,
            reverse=True,
        )
        return [key for key in keys if tenant is None or key.tenant == tenant]

    def _sound(self, contents: bytes) -> dict[str, Line]:
        """Return the keys of contents that the keyring may follow."""
        lines = self._read(contents)
        if not lines and self._has_keys:
            # Whoever writes in place empties it first; nobody means that all keys end.
            raise KeyFileError(f"{self._path} is empty; to end a key, revoke it")
        return lines

    def _read(self, contents: bytes) -> dict[str, Line]:
        """Return the keys of the file by id. Where one has several lines, it is the last one, in its place."""
        lines: dict[str, Line] = {}
        for number, text in enumerate(contents.split(b"\n"), 1):
            if text := text.strip():
                try:
                    key = _key(msgspec.json.decode(text, type=dict[str, Any]))
                except (ValueError, msgspec.MsgspecError, RecursionError) as error:
                    raise KeyFileError(f"{self._path}, line {number}: {error}") from None
                lines.pop(key.key_id, None)
                lines[key.key_id] = Line(text, key)
        return lines

    @property
    def _has_keys(self) -> bool:
        return self._keyring is not None and bool(self._keyring.keys())

    def _follow(self, lines: Mapping[str, Line]) -> None:
        if self._keyring is not None:
            self._keyring.replace(line.key for line in lines.values())

    @contextmanager
    def _rewriting(self, *, make: bool = False) -> Iterator[dict[str, Line]]:
        """Yield the keys of the file, and write it anew if they are others afterwards."""
        # A link stays one: what it points to is rewritten.
        target = Path(os.path.realpath(self._path))
        # Whoever waits for other processes must not keep a revocation from being read meanwhile.
        with self._failing_clearly(), self._lock(target), self._turn:
            try:
                before = self._read(target.read_bytes())
            except FileNotFoundError:
                if not make:
                    raise
                before = {}
            lines = dict(before)
            yield lines
            if lines != before:
                contents = b"".join(line.text + b"\n" for line in lines.values())
                _write(target, contents)
                self._fingerprint = _digest(contents)
                self._follow(lines)

    @contextmanager
    def _lock(self, target: Path) -> Iterator[None]:
        """Keep every other writer out; they may be in other processes. A process that dies lets go."""
        # Beside the file, because the file itself is another one after each change.
        lock = os.open(target.with_name(f"{target.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            with suppress(FileNotFoundError, PermissionError):
                # Made by an administrator, it must not keep out the gateway that owns the file.
                _resemble(lock, target.stat())
            give_up = time.monotonic() + self._patience_s
            while not _locked(lock):
                if time.monotonic() >= give_up:
                    raise KeyFileError(f"{self._path}: another process is changing it")
                time.sleep(RETRY_S)
            yield
        finally:
            os.close(lock)

    @contextmanager
    def _failing_clearly(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            place = error.filename or self._path
            raise KeyFileError(f"{place}: {error.strerror}") from None


def _key(record: Mapping[str, Any]) -> Key:
    """Return the key of a record. Raises ValueError, which names the field."""
    times = {name: _seconds(record[name], name) for name in TIMES if name in record}
    try:
        return msgspec.convert({**record, **times}, Key)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None


def _seconds(value: object, name: str) -> object:
    if not isinstance(value, str):
        return value
    try:
        return int(msgspec.convert(value, Annotated[datetime, Meta(tz=True)]).timestamp())
    except msgspec.ValidationError as error:
        raise ValueError(f"{error} - at `$.{name}`") from None


def _rfc3339(record: Mapping[str, Any]) -> dict[str, str]:
    return {
        name: datetime.fromtimestamp(record[name], UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        for name in TIMES
        if record[name] is not None
    }


def _digest(contents: bytes) -> bytes:
    return hashlib.sha256(contents).digest()


def _signature(path: Path) -> tuple[int, ...] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _resemble(file: int, model: os.stat_result) -> None:
    """Give an open file the owner and the mode of another one."""
    mine = os.fstat(file)
    if (mine.st_uid, mine.st_gid) != (model.st_uid, model.st_gid):
        os.fchown(file, model.st_uid, model.st_gid)
    os.fchmod(file, stat.S_IMODE(model.st_mode))


def _write(target: Path, contents: bytes) -> None:
    """Replace a file in one step that a crash cannot split, and keep its owner and mode."""
    # One name for all, under the lock: what a crash left behind is overwritten, not collected.
    new = target.with_name(f".{target.name}.new")
    new.unlink(missing_ok=True)
    try:
        file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(file, "wb") as stream:
            with suppress(FileNotFoundError):
                _resemble(file, target.stat())
            stream.write(contents)
            stream.flush()
            os.fsync(file)
        os.replace(new, target)
    finally:
        new.unlink(missing_ok=True)
    folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
