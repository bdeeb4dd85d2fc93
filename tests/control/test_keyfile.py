"""The key file: what is read, what is refused, and that no crash and no other writer loses a key. On real files."""

import asyncio
import errno
import fcntl
import json
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pointsman.control import keyfile
from pointsman.control.keyfile import KeyFile, KeyFileError, read_pepper
from pointsman.control.reload import Watch
from pointsman.domain.keys import Key, Keyring, Scope, digest
from pointsman.errors import InvalidKey

PEPPER = b"pepper"
NOW = 1_767_225_600  # 2026-01-01T00:00:00Z
RECORD: dict[str, object] = {
    **{"key_id": 12 * "a", "hmac": digest(PEPPER, 32 * b"A"), "tenant": "acme", "name": "laptop"},
    **{"scopes": ["infer", "debug"], "rpm": 1, "tpm": 0, "priority": -3, "models": ["smol"]},
    **{"created_at": "2026-01-01T00:00:00Z", "expires_at": None, "revoked": False},
}
BEARER = b"Bearer tl_aaaaaaaaaaaa_" + 32 * b"A"


def lines(*records: object) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def keyring() -> Keyring:
    return Keyring(PEPPER, wall=lambda: float(NOW), cache_key=bytes(16))


def made(keys: KeyFile, **fields: Any) -> tuple[Key, str]:
    usual: dict[str, Any] = {
        **{"tenant": "acme", "name": "n", "scopes": [Scope.INFER], "rpm": 60, "tpm": 0},
        **{"priority": 0, "models": [], "expires_at": None, "now": NOW},
    }
    return keys.create(**(usual | fields))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.jsonl"


# What is read.


def test_a_record_is_read_with_all_its_fields(path: Path) -> None:
    ring = keyring()
    path.write_text(lines(RECORD))
    KeyFile(path, ring).load()
    wanted = {
        **RECORD,
        "scopes": (Scope.INFER, Scope.DEBUG),
        "models": ("smol",),
        "created_at": NOW,
    }
    assert ring.keys() == [Key(**wanted)]  # type: ignore[arg-type]
    assert ring.admit(BEARER, 0.0).tenant == "acme"


def test_what_a_record_does_not_say_is_the_default(path: Path) -> None:
    path.write_text(lines({name: RECORD[name] for name in ("key_id", "hmac", "tenant", "name")}))
    [key] = KeyFile(path, None).list()
    assert (key.scopes, key.rpm, key.tpm, key.models) == ((Scope.INFER,), 60, 100_000, ())
    assert (key.expires_at, key.revoked) == (None, False)


@pytest.mark.parametrize(
    "expires_at",
    [
        *(NOW + 90, "2026-01-01T00:01:30Z", "2026-01-01T01:01:30+01:00"),
        *("2025-12-31T23:01:30.9-01:00", "2026-01-01t00:01:30z"),
    ],
)
def test_a_moment_is_seconds_or_rfc_3339(path: Path, expires_at: object) -> None:
    path.write_text(lines(RECORD | {"expires_at": expires_at}))
    [key] = KeyFile(path, None).list()
    assert key.expires_at == NOW + 90


def test_the_last_line_of_an_id_wins(path: Path) -> None:
    ring = keyring()
    path.write_text(lines(RECORD, RECORD | {"key_id": 12 * "b"}, RECORD | {"revoked": True}))
    KeyFile(path, ring).load()
    assert [(key.key_id[0], key.revoked) for key in ring.keys()] == [("b", False), ("a", True)]  # noqa: SIM118
    with pytest.raises(InvalidKey):
        ring.admit(BEARER, 0.0)


@pytest.mark.parametrize("ending", ["\n", "\r\n", "\n\n  \n"])
def test_blank_lines_and_other_line_ends_are_nothing(path: Path, ending: str) -> None:
    path.write_bytes((json.dumps(RECORD) + ending).encode() + json.dumps(RECORD).encode())
    assert len(KeyFile(path, None).list()) == 1


def test_an_empty_file_has_no_keys(path: Path) -> None:
    ring = keyring()
    path.touch()
    KeyFile(path, ring).load()
    assert ring.keys() == []


def test_a_file_that_was_emptied_ends_no_key(path: Path) -> None:
    """Whoever writes a file in place empties it first."""
    ring = keyring()
    path.write_text(lines(RECORD))
    keys = KeyFile(path, ring)
    keys.load()
    path.write_text("\n")
    with pytest.raises(KeyFileError, match="is empty; to end a key, revoke it"):
        keys.load()
    assert ring.admit(BEARER, 0.0).tenant == "acme"


def test_a_key_is_not_made_in_place_of_a_file_that_had_keys(path: Path) -> None:
    ring = keyring()
    path.write_text(lines(RECORD))
    keys = KeyFile(path, ring)
    keys.load()
    path.unlink()
    with pytest.raises(KeyFileError, match="No such file"):
        made(keys)
    assert not path.exists()
    assert ring.admit(BEARER, 0.0).tenant == "acme"


def test_a_revocation_is_read_while_somebody_waits_for_another_process(path: Path) -> None:
    ring = keyring()
    path.write_text(lines(RECORD))
    keys = KeyFile(path, ring, patience_s=60.0)
    keys.load()
    lock = os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    waiting = threading.Thread(target=made, args=(keys,))
    waiting.start()
    path.write_text(lines(RECORD | {"revoked": True}))
    keys.load()
    with pytest.raises(InvalidKey):
        ring.admit(BEARER, 0.0)
    os.close(lock)
    waiting.join()
    assert len(ring.keys()) == 2


# What is refused.

BAD: list[tuple[object, str]] = [
    ({"tenant": "Acme"}, "$.tenant"),
    ({"tenant": ""}, "$.tenant"),
    ({"tenant": "-a"}, "$.tenant"),
    ({"tenant": 64 * "a"}, "$.tenant"),
    ({"tenant": "acme\n"}, "$.tenant"),
    ({"name": ""}, "$.name"),
    ({"name": 129 * "ä"}, "$.name"),
    ({"priority": 101}, "$.priority"),
    ({"priority": -101}, "$.priority"),
    ({"priority": 1.5}, "$.priority"),
    ({"rpm": -1}, "$.rpm"),
    ({"tpm": -1}, "$.tpm"),
    ({"tpm": "60"}, "$.tpm"),
    ({"scopes": []}, "$.scopes"),
    ({"scopes": ["infer", "root"]}, "$.scopes[1]"),
    ({"scopes": "infer"}, "$.scopes"),
    ({"models": [""]}, "$.models[0]"),
    ({"key_id": "short"}, "$.key_id"),
    ({"key_id": 12 * "1"}, "$.key_id"),
    ({"hmac": 63 * "0"}, "$.hmac"),
    ({"hmac": 64 * "G"}, "$.hmac"),
    ({"hmac": 64 * "ä"}, "$.hmac"),
    ({"revoked": 1}, "$.revoked"),
    ({"created_at": "yesterday"}, "$.created_at"),
    ({"created_at": -1}, "$.created_at"),
    ({"expires_at": "2026-01-01T00:00:00"}, "timezone component - at `$.expires_at`"),
    ({"expires_at": "2026-01-01"}, "$.expires_at"),
    ({"expires_at": "1969-12-31T00:00:00Z"}, "$.expires_at"),
    ({"expires_at": NOW * 1000}, "$.expires_at"),
    ({"expires_at": True}, "$.expires_at"),
]


def kept(path: Path, contents: bytes) -> str:
    """Return what a load says of bad contents. The keys of before must be as they were."""
    ring = keyring()
    path.write_text(lines(RECORD))
    keys = KeyFile(path, ring)
    keys.load()
    path.write_bytes(contents)
    with pytest.raises(KeyFileError) as caught:
        keys.load()
    assert ring.admit(BEARER, 0.0).tenant == "acme"
    assert len(ring.keys()) == 1
    return str(caught.value)


@pytest.mark.parametrize(("fields", "place"), BAD)
def test_one_bad_field_refuses_the_whole_file(
    path: Path, fields: dict[str, object], place: str
) -> None:
    good = RECORD | {"key_id": 12 * "b"}
    told = kept(path, lines(good, RECORD | fields, good).encode())
    assert told.startswith(f"{path}, line 2: ")
    assert place in told
    assert str(RECORD["hmac"]) not in told


@pytest.mark.parametrize(
    "line",
    [
        *(b"nonsense", b"[]", b"null", b"{}", b'{"key_id":"', b"\xff\xfe", b"# a comment"),
        *(json.dumps(RECORD).encode()[:-10], 100_000 * b"[", b'{"a":' * 100_000, b"\xef\xbb\xbf{}"),
        json.dumps(RECORD).encode() + b" " + json.dumps(RECORD).encode(),
    ],
    ids=range(12),
)
def test_a_line_that_is_no_record_refuses_the_whole_file(path: Path, line: bytes) -> None:
    told = kept(path, lines(RECORD).encode() + b"\n" + line + b"\n" + lines(RECORD).encode())
    assert told.startswith(f"{path}, line 3: ")


ANYTHING = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)


@settings(deadline=None, derandomize=True, max_examples=200)
@given(
    st.dictionaries(
        st.sampled_from(sorted(RECORD)),
        ANYTHING
        | st.lists(ANYTHING, max_size=3)
        | st.dictionaries(st.text(), ANYTHING, max_size=2),
        min_size=1,
        max_size=2,
    )
)
def test_whatever_a_record_says_it_is_a_key_or_refused(
    tmp_path_factory: pytest.TempPathFactory, fields: dict[str, object]
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.jsonl"
    path.write_text(lines(RECORD | fields))
    keys = KeyFile(path, keyring())
    try:
        keys.load()
    except KeyFileError as error:
        assert f"{path}, line 1: " in str(error)
    else:
        # What was read can be written.
        for key in keys.list():
            assert keys.revoke(key.key_id)
            assert [again.revoked for again in keys.list()] == [True]


def test_a_file_that_is_missing_or_cannot_be_read_is_an_error(path: Path) -> None:
    for call in (KeyFile(path, keyring()).load, KeyFile(path, None).list):
        with pytest.raises(KeyFileError, match=r"keys\.jsonl: No such file"):
            call()
    with pytest.raises(KeyFileError, match=r"keys\.jsonl: No such file"):
        KeyFile(path, None).revoke(12 * "a")
    path.mkdir()
    with pytest.raises(KeyFileError, match=r"keys\.jsonl: Is a directory"):
        KeyFile(path, keyring()).load()


# Making, revoking, listing.


def test_a_key_is_good_at_once_and_after_a_restart(path: Path) -> None:
    ring = keyring()
    keys = KeyFile(path, ring)
    key, text = made(keys, scopes=[Scope.ADMIN, Scope.ADMIN, Scope.DEBUG], expires_at=NOW + 90)
    assert key.scopes == (Scope.ADMIN, Scope.DEBUG)
    assert ring.admit(f"Bearer {text}".encode(), 0.0).key_id == key.key_id
    assert not keys.changed()  # It knows what it wrote itself.
    later = keyring()
    KeyFile(path, later).load()
    assert later.keys() == [key]
    assert later.admit(f"Bearer {text}".encode(), 0.0).admin


def test_the_file_has_the_fields_of_the_contract_and_not_the_secret(path: Path) -> None:
    key, text = made(KeyFile(path, keyring()), expires_at=NOW + 90)
    [line] = path.read_text().splitlines()
    record = json.loads(line)
    assert list(record) == list(RECORD)
    assert record["created_at"] == "2026-01-01T00:00:00Z"
    assert record["expires_at"] == "2026-01-01T00:01:30Z"
    assert record["hmac"] == key.hmac == digest(PEPPER, text[-32:].encode())
    assert text[-32:] not in line


def test_what_no_key_may_have_makes_no_key(path: Path) -> None:
    keys = KeyFile(path, keyring())
    bad = {"tenant": "A", "name": "", "scopes": [], "expires_at": -1, "rpm": -1}
    for field, value in bad.items():
        with pytest.raises(ValueError, match=field):
            made(keys, **{field: value})
    with pytest.raises(ValueError, match="surrogates not allowed"):
        made(keys, name="\udcff")
    assert not path.exists()


def test_without_a_keyring_there_is_no_pepper_to_make_keys_with(path: Path) -> None:
    with pytest.raises(ValueError, match="pepper"):
        made(KeyFile(path, None))


def test_an_id_that_is_taken_is_not_given_twice(path: Path) -> None:
    drawn = iter([bytes(12), bytes(32), bytes(12), bytes(32), 12 * b"\1", bytes(32)])
    keys = KeyFile(path, keyring(), random_bytes=lambda _: next(drawn))
    assert [made(keys)[0].key_id for _ in range(2)] == [12 * "a", 12 * "b"]
    assert len(keys.list()) == 2


def test_a_revoked_key_is_refused_at_once_and_stays_in_the_list(path: Path) -> None:
    ring = keyring()
    keys = KeyFile(path, ring)
    key, text = made(keys)
    ring.admit(f"Bearer {text}".encode(), 0.0)
    assert keys.revoke(key.key_id)
    with pytest.raises(InvalidKey):
        ring.admit(f"Bearer {text}".encode(), 0.0)
    assert [each.revoked for each in keys.list()] == [True]


def test_revoking_again_or_nobody_leaves_the_file_alone(path: Path) -> None:
    path.write_text("\n" + lines(RECORD | {"revoked": True}))
    before = path.stat()
    keys = KeyFile(path, None)
    assert keys.revoke(12 * "a")
    assert not keys.revoke(12 * "b")
    assert path.stat().st_ino == before.st_ino
    assert path.read_text().startswith("\n")


def test_revoking_leaves_no_earlier_line_to_come_back(path: Path) -> None:
    path.write_text(lines(RECORD | {"name": "first"}, RECORD | {"name": "last"}))
    KeyFile(path, None).revoke(12 * "a")
    [record] = map(json.loads, path.read_text().splitlines())
    assert (record["name"], record["revoked"]) == ("last", True)


def test_the_newest_key_is_first_and_a_tenant_can_be_picked(path: Path) -> None:
    keys = KeyFile(path, keyring())
    for name, tenant, now in [("1", "a", 5), ("2", "b", 9), ("3", "a", 9), ("4", "a", 7)]:
        made(keys, name=name, tenant=tenant, now=now)
    assert [key.name for key in keys.list()] == ["3", "2", "4", "1"]
    assert [key.name for key in keys.list("a")] == ["3", "4", "1"]
    assert keys.list("c") == []


def test_what_a_later_version_wrote_stays(path: Path) -> None:
    odd = '{ "note": {"by": "a later version"},' + json.dumps(RECORD)[1:]
    path.write_text(odd + "\n" + lines(RECORD | {"key_id": 12 * "b", "budget": 7}))
    keys = KeyFile(path, keyring())
    made(keys)
    assert path.read_text().splitlines()[0] == odd  # Byte for byte: it was not its turn.
    keys.revoke(12 * "b")
    assert json.loads(path.read_text().splitlines()[1])["budget"] == 7


def test_a_bad_file_is_neither_rewritten_nor_followed(path: Path) -> None:
    ring = keyring()
    path.write_text(lines(RECORD) + "half a li")
    keys = KeyFile(path, ring)
    for change in (lambda: made(keys), lambda: keys.revoke(12 * "a"), keys.list):
        with pytest.raises(KeyFileError, match="line 2"):
            change()
    assert path.read_text().endswith("half a li")
    assert ring.keys() == []


# Noticing changes.


def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return the list that each reading of a file is added to."""
    seen: list[Path] = []
    real = Path.read_bytes

    def read(self: Path) -> bytes:
        seen.append(self)
        return real(self)

    monkeypatch.setattr(Path, "read_bytes", read)
    return seen


def test_a_change_is_told_until_it_was_loaded(path: Path) -> None:
    path.write_text(lines(RECORD))
    keys = KeyFile(path, keyring())
    assert keys.changed()  # It was never loaded.
    keys.load()
    assert not keys.changed()
    path.write_text(lines(RECORD, RECORD | {"key_id": 12 * "b"}))
    assert keys.changed()
    assert keys.changed()
    keys.load()
    assert not keys.changed()


def test_a_bad_file_is_told_once_and_so_is_a_missing_one(path: Path) -> None:
    path.write_text(lines(RECORD))
    keys = KeyFile(path, keyring())
    keys.load()
    path.write_text("nonsense")
    assert keys.changed()
    with pytest.raises(KeyFileError):
        keys.load()
    assert not keys.changed()
    path.unlink()
    assert keys.changed()
    with pytest.raises(KeyFileError):
        keys.load()
    assert not keys.changed()
    path.write_text("nonsense")
    assert keys.changed()


def test_a_file_that_is_left_alone_is_not_opened(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.write_text(lines(RECORD))
    keys = KeyFile(path, keyring())
    keys.load()
    for _ in range(2):
        assert not keys.changed()
    opened = reads(monkeypatch)
    for _ in range(10):
        assert not keys.changed()
    assert opened == []


def test_a_file_that_was_only_touched_has_not_changed(path: Path) -> None:
    path.write_text(lines(RECORD))
    keys = KeyFile(path, keyring())
    keys.load()
    os.utime(path, (1, 1))
    assert not keys.changed()


@pytest.mark.parametrize("looks", [0, 1])
def test_a_change_within_one_tick_of_the_clock_is_noticed(
    path: Path, monkeypatch: pytest.MonkeyPatch, looks: int
) -> None:
    """Same size, same inode, same times: nothing but the contents shows it."""
    monkeypatch.setattr(keyfile, "_signature", lambda path: (1, 2, 3))
    path.write_text(lines(RECORD | {"rpm": 1}))
    keys = KeyFile(path, keyring())
    keys.load()
    for _ in range(looks):
        assert not keys.changed()
    path.write_text(lines(RECORD | {"rpm": 2}))
    assert keys.changed()


def test_a_swapped_link_is_noticed_as_kubernetes_swaps_it(tmp_path: Path) -> None:
    """A mounted Secret is `keys.jsonl -> ..data/keys.jsonl`, `..data -> ..1`; only `..data` is ever replaced."""
    for name, record in (("..1", RECORD), ("..2", RECORD | {"revoked": True})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "keys.jsonl").write_text(lines(record))
        os.utime(tmp_path / name / "keys.jsonl", (1, 1))
    (tmp_path / "..data").symlink_to("..1")
    (tmp_path / "keys.jsonl").symlink_to("..data/keys.jsonl")
    ring = keyring()
    keys = KeyFile(tmp_path / "keys.jsonl", ring)
    keys.load()
    assert ring.admit(BEARER, 0.0)
    for _ in range(3):
        assert not keys.changed()
    (tmp_path / "..tmp").symlink_to("..2")
    (tmp_path / "..tmp").replace(tmp_path / "..data")
    assert keys.changed()
    keys.load()
    with pytest.raises(InvalidKey):
        ring.admit(BEARER, 0.0)


def say(path: Path, tenant: str) -> None:
    path.write_text(lines(RECORD | {"tenant": tenant}))


@pytest.mark.anyio
async def test_a_watch_loads_each_of_two_changes_in_a_row_and_nothing_twice(path: Path) -> None:
    say(path, "t0")
    ring, loads = keyring(), []
    keys = KeyFile(path, ring)
    keys.load()
    # Between the load at the start and the first look.
    say(path, "t1")
    turns: asyncio.Queue[None] = asyncio.Queue()
    looked = asyncio.Semaphore(0)

    async def sleep(seconds: float) -> None:
        looked.release()
        await turns.get()

    async def load() -> None:
        keys.load()
        loads.append(ring.keys()[0].tenant)

    watch = Watch(keys.changes_seen, load, sleep)
    watch.start()
    await looked.acquire()
    for tenant in ("t1", "t2", "t3", "t3", "t3", "t4"):
        say(path, tenant)
        turns.put_nowait(None)
        await looked.acquire()
    watch.stop()
    assert loads == ["t1", "t2", "t3", "t4"]


# Writing.


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask")
def test_a_new_file_is_nobody_elses_to_read(path: Path) -> None:
    made(KeyFile(path, keyring()))
    assert {stat.S_IMODE(each.stat().st_mode) for each in path.parent.iterdir()} == {0o600}


def test_an_existing_file_keeps_its_mode(path: Path) -> None:
    path.touch()
    path.chmod(0o640)
    made(KeyFile(path, keyring()))
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_an_existing_file_keeps_its_owner_who_can_lock_it_too(path: Path) -> None:
    path.touch()
    os.chown(path, 12345, 54321)
    made(KeyFile(path, keyring()))
    owners = {(each.stat().st_uid, each.stat().st_gid) for each in path.parent.iterdir()}
    assert owners == {(12345, 54321)}


def test_an_owner_that_cannot_be_kept_is_an_error_and_changes_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(file: int, model: os.stat_result) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    path.write_text(lines(RECORD))
    ring = keyring()
    monkeypatch.setattr(keyfile, "_resemble", refused)
    with pytest.raises(KeyFileError, match=r"keys\.jsonl: Operation not permitted"):
        made(KeyFile(path, ring))
    assert path.read_text() == lines(RECORD)
    assert ring.keys() == []


def test_a_link_stays_one_and_its_target_is_rewritten(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "link").symlink_to("etc/keys.jsonl")
    made(KeyFile(tmp_path / "link", keyring()))
    made(KeyFile(tmp_path / "etc" / "keys.jsonl", keyring()))
    assert (tmp_path / "link").is_symlink()
    assert len(KeyFile(tmp_path / "link", None).list()) == 2


class Crash(BaseException):
    """The process is gone: nothing after it runs but what the test undoes."""


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_crash_before_the_renaming_leaves_the_old_file(
    path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path.write_text(lines(RECORD))
    keys = KeyFile(path, keyring())

    def crash(*args: object) -> None:
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(os, call, crash)
        patch.setattr(Path, "unlink", lambda self, missing_ok=False: None)
        with pytest.raises(Crash):
            made(keys)
    assert path.read_text() == lines(RECORD)
    assert (path.parent / ".keys.jsonl.new").exists()
    made(keys)
    assert len(keys.list()) == 2
    assert {each.name for each in path.parent.iterdir()} == {"keys.jsonl", "keys.jsonl.lock"}


def test_a_new_file_is_on_disk_before_it_takes_the_name_and_the_name_before_the_answer(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = []
    fsync, replace = os.fsync, os.replace

    def synced(file: int) -> None:
        done.append("folder" if stat.S_ISDIR(os.fstat(file).st_mode) else "file")
        fsync(file)

    def renamed(old: Path, new: Path) -> None:
        done.append("rename")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    made(KeyFile(path, keyring()))
    assert done == ["file", "rename", "folder"]


def test_a_full_disk_is_an_error_and_changes_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    ring = keyring()
    path.write_text(lines(RECORD))
    keys = KeyFile(path, ring)
    keys.load()
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(KeyFileError, match=r"keys\.jsonl: No space left on device"):
        keys.revoke(12 * "a")
    assert ring.admit(BEARER, 0.0)
    assert path.read_text() == lines(RECORD)
    assert {each.name for each in path.parent.iterdir()} == {"keys.jsonl", "keys.jsonl.lock"}


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match=r"missing/keys\.jsonl\.lock: No such file"):
        made(KeyFile(tmp_path / "missing" / "keys.jsonl", keyring()))


def test_a_writer_that_does_not_finish_is_not_waited_for_forever(path: Path) -> None:
    lock = os.open(path.with_name("keys.jsonl.lock"), os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    keys = KeyFile(path, keyring(), patience_s=0.03)
    try:
        with pytest.raises(KeyFileError, match="another process is changing it"):
            made(keys)
    finally:
        os.close(lock)  # Which is what the end of its process does.
    made(keys)


EACH = 15
OTHER_PROCESS = """
import pathlib, sys
from pointsman.control.keyfile import KeyFile
from pointsman.domain.keys import Keyring, Scope

path, name, each = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
keys = KeyFile(path, Keyring(b"pepper", wall=lambda: 0.0, cache_key=bytes(16)))
for number in range(each):
    key, _ = keys.create(
        tenant="acme", name=f"{name}{number}", scopes=[Scope.INFER], rpm=0, tpm=0, priority=0,
        models=[], expires_at=None, now=0,
    )
    assert number % 3 or keys.revoke(key.key_id)
"""


def test_processes_and_threads_lose_nothing_of_each_other(path: Path) -> None:
    shared = KeyFile(path, keyring())

    def make(name: str) -> None:
        for number in range(EACH):
            made(shared, name=f"{name}{number}")

    processes = [
        subprocess.Popen([sys.executable, "-c", OTHER_PROCESS, str(path), name, str(EACH)])
        for name in ("a", "b")
    ]
    threads = [threading.Thread(target=make, args=(name,)) for name in ("c", "d")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [process.wait(30) for process in processes] == [0, 0]
    found = shared.list()
    wanted = {f"{name}{number}" for name in "abcd" for number in range(EACH)}
    assert {key.name for key in found} == wanted
    assert len(found) == len(wanted)
    revoked = {f"{name}{number}" for name in "ab" for number in range(0, EACH, 3)}
    assert {key.name for key in found if key.revoked} == revoked


def test_a_slow_load_does_not_put_old_keys_in_place_of_new_ones(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load has read the file, and a key is revoked before it hands on what it read."""
    path.write_text(lines(RECORD))
    ring = keyring()
    keys = KeyFile(path, ring)
    reading, go_on = threading.Event(), threading.Event()
    read = Path.read_bytes

    def slow(self: Path) -> bytes:
        contents = read(self)
        if threading.current_thread() is loader:
            reading.set()
            go_on.wait(5)
        return contents

    loader = threading.Thread(target=keys.load)
    revoker = threading.Thread(target=keys.revoke, args=(12 * "a",))
    monkeypatch.setattr(Path, "read_bytes", slow)
    loader.start()
    assert reading.wait(5)
    revoker.start()
    revoker.join(0.05)  # It would be done by now if it did not wait for its turn.
    go_on.set()
    loader.join()
    revoker.join()
    with pytest.raises(InvalidKey):
        ring.admit(BEARER, 0.0)


# The pepper.


def test_the_pepper_is_the_bytes_of_its_variable() -> None:
    assert read_pepper({"P": "p\u00e4pper\udcff"}, "P") == b"p\xc3\xa4pper\xff"


@pytest.mark.parametrize("environ", [{}, {"P": ""}, {"p": "pepper"}])
def test_a_missing_or_empty_pepper_is_refused_by_name(environ: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="P is empty or not set"):
        read_pepper(environ, "P")
