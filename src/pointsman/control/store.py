"""What a restart must not forget, in one SQLite file: what operators changed, and the models seen lately.

A route table that was acknowledged must be in force after a crash, the epoch that engines and ETags
carry must never go back, a drained model must stay drained, and a model that is scaled to zero must
still be 503, not 404. All of it changes rarely. Nothing here is called on the path of a request.

What has two writers, the configuration file and the admin API, is a document: its value in force,
an epoch that grows with every change, and what the file said last. The last one to change it wins.

Times are kept by the wall clock, for the monotonic one starts anew with the machine; the methods
translate. Workers that send heartbeats are not kept: their next beat brings them back.
"""

import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from pointsman.domain.registry import MEMORY_S

__all__ = ["FILE_NAME", "Document", "Store", "StoreError"]

FILE_NAME = "pointsman.sqlite3"

APPLICATION_ID = 0x504E544D
"""Marks the file as ours (`PNTM`), so that nobody else's database is written to."""

VERSION = 2

SEEN = "CREATE TABLE seen (model TEXT PRIMARY KEY, at REAL NOT NULL) WITHOUT ROWID;"

CHANGES = """
CREATE TABLE document (
    name TEXT PRIMARY KEY, epoch INTEGER NOT NULL, value BLOB NOT NULL, from_file BLOB NOT NULL
) WITHOUT ROWID;
CREATE TABLE drained (model TEXT PRIMARY KEY) WITHOUT ROWID;
"""

# Format 1 had the routes of the file alone.
UPGRADE = f"""
BEGIN IMMEDIATE;
{CHANGES}
INSERT INTO document SELECT 'routes', epoch, routes, routes FROM route_table;
DROP TABLE route_table;
PRAGMA user_version = {VERSION};
COMMIT;
"""

SCHEMA = f"""
BEGIN IMMEDIATE;
{SEEN}
{CHANGES}
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {VERSION};
COMMIT;
"""


class Document(NamedTuple):
    """A value that is in force, and how often it has changed, counted from 1."""

    value: bytes
    epoch: int


class StoreError(Exception):
    """The state folder cannot be used; the text names it and says why."""


class Store:
    """The state of one gateway under a folder, which is made where it is missing.

    Without a folder it is kept in memory, and does not outlive the process.

    Calls may come from any thread, also at the same time. Every method raises StoreError where the
    file cannot be read or written.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise StoreError(f"state_dir {folder}: {error.strerror}") from None
        with self._failing_clearly():
            self._db = sqlite3.connect(
                ":memory:" if folder is None else folder / FILE_NAME,
                timeout=1.0,
                isolation_level=None,
                check_same_thread=False,
            )
        try:
            with self._failing_clearly():
                self._prepare()
        except StoreError:
            self._db.close()
            raise

    def _prepare(self) -> None:
        """Make the tables in a new file; refuse the file of another program or version."""
        mark, version = self._number("PRAGMA application_id"), self._number("PRAGMA user_version")
        new = self._number("SELECT count(*) FROM sqlite_master") == 0 and mark == version == 0
        if not new and mark != APPLICATION_ID:
            raise StoreError(f"state_dir {self._folder}: {FILE_NAME} belongs to another program")
        if not new and version not in (1, VERSION):
            raise StoreError(
                f"state_dir {self._folder}: {FILE_NAME} has format {version}, "
                f"this version reads format {VERSION}"
            )
        self._db.execute("PRAGMA journal_mode = WAL")
        # In WAL mode only FULL survives a power cut, and an epoch that went back would make an old
        # ETag match a new table.
        self._db.execute("PRAGMA synchronous = FULL")
        # The log is a quarter of a megabyte then, not four: state folders may be small.
        self._db.execute("PRAGMA wal_autocheckpoint = 64")
        if new:
            self._db.executescript(SCHEMA)
        elif version == 1:
            self._db.executescript(UPGRADE)

    def seen(self, *, wall: float, monotonic: float) -> dict[str, float]:
        """Return the models of the last hour and when each was last seen, in monotonic seconds.

        `wall` (seconds since 1970) and `monotonic` are readings of the two clocks at one moment.
        Times after that moment, from before a clock was set back, count as this moment.
        """
        with self._lock, self._failing_clearly():
            rows = self._db.execute("SELECT model, at FROM seen WHERE at > ?", (wall - MEMORY_S,))
            return {model: monotonic - max(wall - at, 0.0) for model, at in rows}

    def save_seen(self, seen: Mapping[str, float], *, wall: float, monotonic: float) -> None:
        """Keep the models of the last hour; `seen` maps each to a monotonic time. Drops the rest."""
        rows = [(model, wall - (monotonic - at)) for model, at in seen.items()]
        with self._lock, self._failing_clearly(), self._transaction():
            self._db.execute("DELETE FROM seen")
            self._db.executemany(
                "INSERT INTO seen VALUES (?, ?)", [row for row in rows if row[1] > wall - MEMORY_S]
            )

    def adopt(self, from_file: Mapping[str, bytes]) -> dict[str, Document]:
        """Return the documents in force, by name, after the configuration file was read.

        Where the file says what it said last time, what was saved since stays; where it says
        something else, that is in force from now on, with the next epoch.
        """
        with self._lock, self._failing_clearly(), self._transaction():
            return {name: self._adopt(name, value) for name, value in from_file.items()}

    def save_document(self, name: str, document: Document) -> None:
        """Put a document in force; it is durable when this returns.

        Raises StoreError, too, where the kept one is as new: then another gateway has the folder.
        """
        with self._lock, self._failing_clearly(), self._transaction():
            changed = self._db.execute(
                "INSERT INTO document VALUES (?, ?, ?, x'') ON CONFLICT (name) DO UPDATE "
                "SET value = excluded.value, epoch = excluded.epoch WHERE epoch < excluded.epoch",
                (name, document.epoch, document.value),
            )
            if changed.rowcount != 1:
                raise StoreError(
                    f"state_dir {self._folder}: another gateway has changed the {name} there"
                )

    def drained(self) -> set[str]:
        """Return the models that are drained."""
        with self._lock, self._failing_clearly():
            return {model for (model,) in self._db.execute("SELECT model FROM drained")}

    def save_drained(self, models: Iterable[str]) -> None:
        """Keep the models that are drained; they are durable when this returns."""
        with self._lock, self._failing_clearly(), self._transaction():
            self._db.execute("DELETE FROM drained")
            self._db.executemany("INSERT INTO drained VALUES (?)", [(each,) for each in models])

    def close(self) -> None:
        """Close the file. Safe to repeat."""
        with self._lock, self._failing_clearly():
            self._db.close()

    def _adopt(self, name: str, value: bytes) -> Document:
        kept = self._db.execute(
            "SELECT value, epoch, from_file FROM document WHERE name = ?", (name,)
        ).fetchone()
        if kept is None:
            found = Document(value, 1)
        elif kept[2] == value:
            return Document(kept[0], int(kept[1]))
        else:
            found = Document(value, int(kept[1]) + 1)
        self._db.execute(
            "REPLACE INTO document VALUES (?, ?, ?, ?)", (name, found.epoch, found.value, value)
        )
        return found

    def _number(self, query: str) -> int:
        return int(self._db.execute(query).fetchone()[0])

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        # IMMEDIATE: two gateways that share the folder must not read one epoch and both add one.
        self._db.execute("BEGIN IMMEDIATE")
        with self._db:
            yield

    @contextmanager
    def _failing_clearly(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise StoreError(f"state_dir {self._folder}: {FILE_NAME}: {error}") from None
