"""The store: what it remembers over restarts, and how it refuses a file that it cannot use."""

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pointsman.control.store import FILE_NAME, Document, Store, StoreError
from pointsman.domain.registry import Registry, WorkerReport


def reopen(store: Store, folder: Path) -> Store:
    store.close()
    return Store(folder)


def test_models_are_remembered_over_a_restart_of_the_machine(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save_seen({"m": 500.0, "n": 800.0}, wall=10_000.0, monotonic=1000.0)
    store = reopen(store, tmp_path)
    # 600 s later, and the monotonic clock began anew.
    assert store.seen(wall=10_600.0, monotonic=7.0) == {"m": 7.0 - 1100.0, "n": 7.0 - 800.0}
    store.close()


def test_r16_a_model_scaled_to_zero_is_still_known_after_a_restart_for_an_hour(
    tmp_path: Path,
) -> None:
    before = Registry()
    before.beat(WorkerReport("a", "h:1", "m"), 1000.0)
    before.expire(1006.0)
    store = Store(tmp_path)
    store.save_seen(before.seen(), wall=50_000.0, monotonic=1006.0)
    store = reopen(store, tmp_path)

    after = Registry()
    now = 3.0
    for model, at in store.seen(wall=50_060.0, monotonic=now).items():
        after.remember(model, at)
    assert after.knows("m", now)
    assert after.knows("m", now + 3600.0 - 66.0)
    assert not after.knows("m", now + 3600.0 - 65.0)
    assert not after.knows("never-seen", now)
    store.close()


def test_models_older_than_an_hour_are_forgotten(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save_seen({"old": 0.0, "new": 4000.0}, wall=10_000.0, monotonic=4000.0)
    assert store.seen(wall=10_000.0, monotonic=0.0) == {"new": 0.0}
    assert store.seen(wall=13_600.0, monotonic=0.0) == {}
    store.close()


def test_a_wall_clock_that_was_set_back_makes_no_time_in_the_future(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save_seen({"m": 0.0}, wall=10_000.0, monotonic=0.0)
    assert store.seen(wall=9_000.0, monotonic=5.0) == {"m": 5.0}
    store.close()


def test_what_is_saved_replaces_what_was(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save_seen({"m": 0.0, "n": 0.0}, wall=1.0, monotonic=0.0)
    store.save_seen({"n": 0.0}, wall=1.0, monotonic=0.0)
    assert list(store.seen(wall=1.0, monotonic=0.0)) == ["n"]
    store.close()


# Documents: two writers, and the last one to change it wins.


def value(store: Store, from_file: bytes) -> Document:
    """What is in force after the file said that."""
    return store.adopt({"routes": from_file})["routes"]


def test_the_epoch_grows_by_one_when_the_file_changes_and_never_goes_back(tmp_path: Path) -> None:
    store = Store(tmp_path)
    seen = []
    for says in (b"a", b"a", b"b", b"b", b"a", b"", b""):
        seen.append(value(store, says))
        store = reopen(store, tmp_path)
    assert seen == [(b"a", 1), (b"a", 1), (b"b", 2), (b"b", 2), (b"a", 3), (b"", 4), (b"", 4)]
    store.close()


def test_what_was_saved_stays_for_as_long_as_the_file_says_what_it_said(tmp_path: Path) -> None:
    store = Store(tmp_path)
    value(store, b"file")
    store.save_document("routes", Document(b"put", 2))
    store = reopen(store, tmp_path)
    assert value(store, b"file") == (b"put", 2)
    assert value(store, b"file") == (b"put", 2)
    store.close()


def test_a_file_that_says_something_else_wins_over_what_was_saved(tmp_path: Path) -> None:
    store = Store(tmp_path)
    value(store, b"file")
    store.save_document("routes", Document(b"put", 7))
    store = reopen(store, tmp_path)
    assert value(store, b"other") == (b"other", 8)
    assert value(store, b"file") == (b"file", 9)
    store.close()


def test_a_file_that_comes_to_say_what_was_saved_is_a_change_too(tmp_path: Path) -> None:
    store = Store(tmp_path)
    value(store, b"file")
    store.save_document("routes", Document(b"put", 2))
    assert value(store, b"put") == (b"put", 3)
    store.close()


def test_documents_have_nothing_to_do_with_each_other(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.adopt({"routes": b"r", "workers": b"w"})
    store.save_document("workers", Document(b"put", 2))
    store = reopen(store, tmp_path)
    assert store.adopt({"routes": b"R", "workers": b"w"}) == {
        "routes": Document(b"R", 2),
        "workers": Document(b"put", 2),
    }
    assert store.adopt({}) == {}
    store.close()


@pytest.mark.parametrize("epoch", [-1, 0, 1, 4, 5])
def test_a_document_is_never_saved_under_an_epoch_that_has_been(tmp_path: Path, epoch: int) -> None:
    store = Store(tmp_path)
    value(store, b"file")
    store.save_document("routes", Document(b"put", 5))
    with pytest.raises(StoreError, match="another gateway has changed the routes there"):
        store.save_document("routes", Document(b"late", epoch))
    assert value(store, b"file") == (b"put", 5)
    store.close()


def test_what_is_saved_before_any_file_was_read_is_kept_and_the_first_file_wins(
    tmp_path: Path,
) -> None:
    store = Store(tmp_path)
    store.save_document("routes", Document(b"put", 2))
    with pytest.raises(StoreError, match="another gateway"):
        store.save_document("routes", Document(b"late", 2))
    store = reopen(store, tmp_path)
    assert value(store, b"file") == (b"file", 3)
    store.close()


def test_two_gateways_on_one_folder_never_give_one_epoch_to_two_tables(tmp_path: Path) -> None:
    first, second = Store(tmp_path), Store(tmp_path)
    tables = [value(first, b"a"), value(second, b"b"), value(first, b"a")]
    assert tables == [(b"a", 1), (b"b", 2), (b"a", 3)]
    first.save_document("routes", Document(b"first", 4))
    with pytest.raises(StoreError, match="another gateway"):
        second.save_document("routes", Document(b"second", 4))
    assert value(second, b"a") == (b"first", 4)
    first.close()
    second.close()


# Drained models.


def test_drained_models_are_remembered(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store.drained() == set()
    store.save_drained({"m", "größe/模型 with spaces"})
    store = reopen(store, tmp_path)
    assert store.drained() == {"m", "größe/模型 with spaces"}
    store.save_drained({"n"})
    assert store.drained() == {"n"}
    store.save_drained(())
    store = reopen(store, tmp_path)
    assert store.drained() == set()
    store.close()


def test_a_change_that_fails_in_the_middle_changes_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save_drained({"m"})
    with pytest.raises(StoreError, match="UNIQUE"):
        store.save_drained(["n", "n"])
    assert store.drained() == {"m"}
    store.save_drained({"n"})
    assert store.drained() == {"n"}
    store.close()


# The file.


def format_1(folder: Path, script: str = "") -> None:
    """Make the file that the first version wrote, literally, and add to it."""
    db = sqlite3.connect(folder / FILE_NAME)
    db.executescript(f"""
        PRAGMA journal_mode = WAL;
        BEGIN IMMEDIATE;
        CREATE TABLE IF NOT EXISTS seen (model TEXT PRIMARY KEY, at REAL NOT NULL) WITHOUT ROWID;
        CREATE TABLE IF NOT EXISTS route_table (
            one INTEGER PRIMARY KEY CHECK (one = 1), epoch INTEGER NOT NULL, routes BLOB NOT NULL
        );
        PRAGMA application_id = 1347310669;
        PRAGMA user_version = 1;
        COMMIT;
        {script}
    """)
    db.close()


ROUTES_1 = b'[{"model":"smol","aliases":["s"],"backends":[{"model":"smol-v3","weight":1.0}]}]'


def test_a_file_of_format_1_is_taken_over_with_its_epoch_and_its_models(tmp_path: Path) -> None:
    format_1(
        tmp_path,
        f"""
        INSERT INTO route_table VALUES (1, 41, CAST('{ROUTES_1.decode()}' AS BLOB));
        INSERT INTO seen VALUES ('m', 9000.0);
        """,
    )
    store = Store(tmp_path)
    assert store.seen(wall=9001.0, monotonic=1.0) == {"m": 0.0}
    assert store.drained() == set()
    assert value(store, ROUTES_1) == (ROUTES_1, 41)
    store.save_document("routes", Document(b"put", 42))
    store.save_drained({"m"})
    store = reopen(store, tmp_path)
    assert value(store, ROUTES_1) == (b"put", 42)
    assert value(store, b"file") == (b"file", 43)
    assert store.drained() == {"m"}
    store.close()
    db = sqlite3.connect(tmp_path / FILE_NAME)
    assert db.execute("PRAGMA user_version").fetchone() == (2,)
    tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master")}
    assert tables == {"document", "drained", "seen"}
    db.close()


def test_a_file_of_format_1_without_routes_begins_at_1(tmp_path: Path) -> None:
    format_1(tmp_path)
    store = Store(tmp_path)
    assert value(store, b"file") == (b"file", 1)
    store.close()


def test_a_file_of_format_1_that_cannot_be_taken_over_is_left_as_it_was(tmp_path: Path) -> None:
    # What stands in the way comes late in the script, so there is something to take back.
    format_1(tmp_path, "INSERT INTO route_table VALUES (1, 41, 'x'); CREATE TABLE drained (x);")
    with pytest.raises(StoreError, match="table drained already exists"):
        Store(tmp_path)
    db = sqlite3.connect(tmp_path / FILE_NAME)
    assert db.execute("PRAGMA user_version").fetchone() == (1,)
    assert db.execute("SELECT epoch, routes FROM route_table").fetchall() == [(41, "x")]
    tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master")}
    assert tables == {"seen", "route_table", "drained"}
    db.close()


def test_what_is_written_is_on_the_disk_when_the_call_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[sqlite3.Connection] = []

    class Noted(sqlite3.Connection):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            opened.append(self)

    connect = sqlite3.connect
    monkeypatch.setattr(
        sqlite3, "connect", lambda *where, **options: connect(*where, factory=Noted, **options)
    )
    store = Store(tmp_path)
    (db,) = opened
    assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    full = 2  # NORMAL, which is 1, would lose the last changes in a power cut.
    assert db.execute("PRAGMA synchronous").fetchone() == (full,)
    assert not db.in_transaction
    for change in (
        lambda: store.adopt({"routes": b"file"}),
        lambda: store.save_document("routes", Document(b"put", 2)),
        lambda: store.save_drained({"m"}),
        lambda: store.save_seen({"m": 0.0}, wall=0.0, monotonic=0.0),
    ):
        change()
        assert not db.in_transaction
    store.close()


def test_without_a_folder_all_of_it_works_and_none_of_it_stays(tmp_path: Path) -> None:
    for _ in range(2):
        store = Store(None)
        assert value(store, b"file") == (b"file", 1)
        store.save_document("routes", Document(b"put", 2))
        assert value(store, b"file") == (b"put", 2)
        assert store.drained() == set()
        store.save_drained({"m"})
        assert store.drained() == {"m"}
        store.close()


def test_missing_folders_are_made(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    Store(folder).close()
    assert (folder / FILE_NAME).exists()


def test_closing_twice_is_fine(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.close()
    store.close()


def garbage(file: Path) -> None:
    file.write_bytes(b"this is no database, but it is long enough to be read as one" * 100)


def other_program(file: Path) -> None:
    db = sqlite3.connect(file)
    db.execute("CREATE TABLE theirs (x)")
    db.commit()
    db.close()


def other_mark(file: Path) -> None:
    db = sqlite3.connect(file)
    db.execute("PRAGMA application_id = 7")
    db.close()


def later_version(file: Path) -> None:
    Store(file.parent).close()
    db = sqlite3.connect(file)
    db.execute("PRAGMA user_version = 99")
    db.close()


def a_folder(file: Path) -> None:
    file.mkdir()


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (garbage, f"{FILE_NAME}: file is not a database"),
        (other_program, f"{FILE_NAME} belongs to another program"),
        (other_mark, f"{FILE_NAME} belongs to another program"),
        (later_version, f"{FILE_NAME} has format 99, this version reads format 2"),
        (a_folder, f"{FILE_NAME}: unable to open database file"),
    ],
)
def test_a_file_that_is_not_ours_is_refused_and_left_alone(
    tmp_path: Path, spoil: Callable[[Path], None], why: str
) -> None:
    file = tmp_path / FILE_NAME
    spoil(file)
    before = file.read_bytes() if file.is_file() else b""
    with pytest.raises(StoreError) as refused:
        Store(tmp_path)
    assert str(refused.value) == f"state_dir {tmp_path}: {why}"
    assert (file.read_bytes() if file.is_file() else b"") == before


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match=r"state_dir .*: (File exists|Not a directory)"):
        Store(tmp_path / "file")


def test_a_file_that_breaks_later_is_a_clear_error_too(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.close()
    calls: list[Callable[[], object]] = [
        lambda: store.seen(wall=0.0, monotonic=0.0),
        lambda: store.save_seen({}, wall=0.0, monotonic=0.0),
        lambda: store.adopt({"routes": b""}),
        lambda: store.save_document("routes", Document(b"", 1)),
        store.drained,
        lambda: store.save_drained(()),
    ]
    for call in calls:
        with pytest.raises(StoreError, match="Cannot operate on a closed database"):
            call()
