"""The store: what it remembers over restarts, and how it refuses a file that it cannot use."""

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from pointsman.control.store import FILE_NAME, Store, StoreError
from pointsman.domain.registry import Registry, WorkerReport
from pointsman.domain.routes import Backend, Route

SMOL = (Route("smol", aliases=("s",), backends=(Backend("smol-v3"),)),)
LARGE = (Route("large"),)


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


def test_the_epoch_grows_by_one_when_the_routes_change_and_never_goes_back(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store.epoch_of(SMOL) == 1
    store = reopen(store, tmp_path)
    assert store.epoch_of(SMOL) == 1
    assert store.epoch_of(LARGE) == 2
    store = reopen(store, tmp_path)
    assert store.epoch_of(LARGE) == 2
    assert store.epoch_of(SMOL) == 3
    assert store.epoch_of(()) == 4
    assert store.epoch_of([]) == 4
    store.close()


def test_two_gateways_on_one_folder_never_give_one_epoch_to_two_tables(tmp_path: Path) -> None:
    first, second = Store(tmp_path), Store(tmp_path)
    assert [first.epoch_of(SMOL), second.epoch_of(LARGE), first.epoch_of(SMOL)] == [1, 2, 3]
    first.close()
    second.close()


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
        (later_version, f"{FILE_NAME} has format 99, this version reads format 1"),
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
    for call in (
        lambda: store.seen(wall=0.0, monotonic=0.0),
        lambda: store.save_seen({}, wall=0.0, monotonic=0.0),
        lambda: store.epoch_of(SMOL),
    ):
        with pytest.raises(StoreError, match="Cannot operate on a closed database"):
            call()
