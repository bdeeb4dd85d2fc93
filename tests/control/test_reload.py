"""The watch that starts reloads: files that changed are noticed once, whatever kind of change it was."""

import asyncio
from pathlib import Path

import pytest

from pointsman.control.reload import POLL_S, Watch, fingerprint

pytestmark = pytest.mark.anyio


class Clock:
    """A sleep that ends when the test says so."""

    def __init__(self) -> None:
        self._ticks: asyncio.Queue[None] = asyncio.Queue()
        self.asleep = asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        assert seconds == POLL_S
        self.asleep.set()
        await self._ticks.get()
        self.asleep.clear()

    async def tick(self) -> None:
        """Let one poll happen, and wait until the next one is waited for."""
        await self.asleep.wait()
        self.asleep.clear()
        self._ticks.put_nowait(None)
        await self.asleep.wait()


async def test_a_change_is_told_once_and_nothing_else_is() -> None:
    clock, told = Clock(), []
    state = "old"

    async def changed() -> None:
        told.append(state)

    watch = Watch(lambda: state, changed, clock.sleep)
    watch.start()
    await clock.tick()
    state = "new"
    await clock.tick()
    await clock.tick()
    assert told == ["new"]
    watch.stop()
    watch.stop()


def test_contents_count_and_times_do_not(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_text("1")
    before = fingerprint([file])
    file.write_text("1")
    assert fingerprint([file]) == before
    file.write_text("2")
    assert fingerprint([file]) != before


def test_a_swapped_link_and_a_file_that_comes_and_goes_are_changes(tmp_path: Path) -> None:
    for name in ("v1", "v2"):
        (tmp_path / name).write_text(name)
    link = tmp_path / "link"
    seen = [fingerprint([link])]
    for name in ("v1", "v2"):
        link.unlink(missing_ok=True)
        link.symlink_to(tmp_path / name)
        seen.append(fingerprint([link]))
    assert len(set(seen)) == 3
    link.unlink()
    assert fingerprint([link]) == seen[0]


async def test_nothing_that_fails_ends_the_watch(caplog: pytest.LogCaptureFixture) -> None:
    clock, told, faults = Clock(), [], []
    state = "old"

    def look() -> str:
        if state == "unreadable":
            raise RuntimeError(state)
        return state

    async def changed() -> None:
        told.append(state)
        if state == "unwanted":
            raise RuntimeError(state)

    watch = Watch(look, changed, clock.sleep, lambda: faults.append(state))
    watch.start()
    for state in ("unreadable", "unwanted", "new"):  # noqa: B007  # `look` reads it
        await clock.tick()
    watch.stop()
    assert told == ["unwanted", "new"]
    assert caplog.text.count("a watch failed") == 2
    assert faults == ["unreadable", "unwanted"]
