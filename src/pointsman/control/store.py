"""What a restart must not forget, in one SQLite file: the models seen lately and the route epoch.

A gateway that restarts while a model is scaled to zero must still answer 503, not 404, and the
epoch that engines and ETags carry must never go back. Both change rarely. Nothing here is called
on the path of a request: the app saves every few seconds and when it stops.

Times are kept by the wall clock, for the monotonic one starts anew with the machine; the methods
translate. Workers are not kept: their next beat brings them back.
"""

import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from pointsman.domain.registry import MEMORY_S
from pointsman.domain.routes import Route

__all__ = ["FILE_NAME", "Store", "StoreError"]

FILE_NAME = "pointsman.sqlite3"

APPLICATION_ID = 0x504E544D
"""Marks the file as ours (`PNTM`), so that nobody else's database is written to."""

VERSION = 1

SCHEMA = f"""
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS seen (model TEXT PRIMARY KEY, at REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS route_table (
    one INTEGER PRIMARY KEY CHECK (one = 1), epoch INTEGER NOT NULL, routes BLOB NOT NULL
);
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {VERSION};
COMMIT;
"""


class StoreError(Exception):
    """The state folder cannot be used; the text names it and says why."""


class Store:
    """The state of one gateway under a folder, which is made where it is missing.

    Calls may come from any thread, one after another. Every method raises StoreError where the
    file cannot be read or written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"state_dir {folder}: {error.strerror}") from None
        with self._failing_clearly():
            self._db = sqlite3.connect(
                folder / FILE_NAME, timeout=1.0, isolation_level=None, check_same_thread=False
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
        if not new and version != VERSION:
            raise StoreError(
                f"state_dir {self._folder}: {FILE_NAME} has format {version}, "
                f"this version reads format {VERSION}"
            )
        self._db.execute("PRAGMA journal_mode = WAL")
        # In WAL mode only FULL survives a power cut, and an epoch that went back would make an old
        # ETag match a new table.
        self._db.execute("PRAGMA synchronous = FULL")
        if new:
            self._db.executescript(SCHEMA)

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

    def epoch_of(self, routes: Sequence[Route]) -> int:
        """Return the epoch of this route table, at least 1.

        It is the kept one where the table is as it was, and one more, kept at once, where it is
        not.
        """
        encoded = msgspec.json.encode(tuple(routes))
        with self._lock, self._failing_clearly(), self._transaction():
            kept = self._db.execute("SELECT epoch, routes FROM route_table").fetchone()
            if kept is not None and kept[1] == encoded:
                return int(kept[0])
            epoch = 1 if kept is None else int(kept[0]) + 1
            self._db.execute("REPLACE INTO route_table VALUES (1, ?, ?)", (epoch, encoded))
            return epoch

    def close(self) -> None:
        """Close the file. Safe to repeat."""
        with self._lock, self._failing_clearly():
            self._db.close()

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
