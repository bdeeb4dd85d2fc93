"""Files that list workers: both formats, and what happens while somebody writes them."""

import asyncio
import importlib
import logging
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from pointsman.control.discovery.file import File, Unreadable, read
from pointsman.control.discovery.found import Found

pytestmark = pytest.mark.anyio

FILE_SD = b"""[
  {"targets": ["10.0.0.7:8000", "[fd00::7]:8000"],
   "labels": {"__meta_pointsman_model": "smol", "pointsman_role": "prefill", "job": "engines"}},
  {"targets": ["https://engines.example/base/"], "labels": {"id": "far", "capacity": 4}},
  {"targets": []}
]"""

YAML = b"""
- targets: ['10.0.0.7:8000']
  labels:
    role: decode      # the one without a prefix
    capacity: 2
"""

MANIFEST = b"""{"version": 1, "workers": [
  {"id": "prefill-a", "url": "10.0.0.22:8000", "worker_type": "prefill", "bootstrap_port": 8998,
   "model_id": "smol", "kv_connector": "MooncakeConnector", "kv_role": "kv_producer", "kv_engine_id": "e"},
  {"url": "https://[fd00::1]/x", "worker_type": "regular"}
]}"""


def test_the_file_sd_of_prometheus() -> None:
    assert read(FILE_SD) == [
        Found("10.0.0.7:8000", "10.0.0.7:8000", {"model": "smol", "role": "prefill"}),
        Found("[fd00::7]:8000", "[fd00::7]:8000", {"model": "smol", "role": "prefill"}),
        Found("far", "engines.example:443", {"capacity": "4", "scheme": "https", "path": "/base"}),
    ]


def test_the_file_sd_of_prometheus_as_yaml() -> None:
    assert read(YAML, yaml=True) == [
        Found("10.0.0.7:8000", "10.0.0.7:8000", {"role": "decode", "capacity": "2"})
    ]
    assert read(b"", yaml=True) == []


def test_the_manifest_of_smg() -> None:
    assert read(MANIFEST) == [
        Found(
            "[fd00::1]:443", "[fd00::1]:443", {"role": "unified", "scheme": "https", "path": "/x"}
        ),
        Found(
            "prefill-a",
            "10.0.0.22:8000",
            {
                "role": "prefill",
                "model": "smol",
                "connector": "mooncake",
                "bootstrap_port": "8998",
            },
        ),
    ]
    assert read(b'{"version": 1, "workers": []}') == []


def test_what_a_manifest_has_and_we_have_not_is_left_to_who_makes_workers() -> None:
    entry = (
        b'{"version":1,"workers":[{"url":"grpc://a:1","worker_type":"encode","kv_connector":"X"}]}'
    )
    assert read(entry) == [
        Found("a:1", "a:1", {"role": "encode", "connector": "X", "scheme": "grpc"})
    ]


def test_a_label_of_ours_wins_over_one_that_may_mean_something_else() -> None:
    labels = (
        b'{"role":"db","__meta_role":"x","__meta_pointsman_role":"y","pointsman_role":"decode"}'
    )
    (found,) = read(b'[{"targets":["a:1"],"labels":%b}]' % labels)
    assert found.labels == {"role": "decode"}
    (found,) = read(b'[{"targets":["a:1"],"labels":{"__scheme__":"https","role":null}}]')
    assert found.labels == {"scheme": "https"}
    (found,) = read(b'[{"targets":["a:1"],"labels":{"__scheme__":"https","scheme":"http"}}]')
    assert found.labels == {"scheme": "http"}


@pytest.mark.parametrize(
    ("contents", "why"),
    [
        (b"[{", "not JSON"),
        (b"", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"\xff", "not JSON"),
        (b"1", "Expected `array`"),
        (b'[{"targets": "a:1"}]', r"Expected `array`, got `str` - at `\$\[0\]\.targets`"),
        (b'[{"labels": {}}]', "targets"),
        (b'[{"targets": ["a:1", "b:1"], "labels": {"id": "x"}}]', "'x' is that of 2 targets"),
        (b'[{"targets": ["http://[::1"]}]', "no URL"),
        (b'[{"targets": ["http://h:99999"]}]', "no URL"),
        (b'{"workers": []}', "`version` has to be 1"),
        (b'{"version": 2, "workers": [], "more": 1}', "`version` has to be 1"),
        (b'{"version": 1}', "workers"),
        (b'{"version": 1, "workers": [{"id": "a"}]}', "url"),
        (b'{"version": 1, "workers": [{"url": "a:1", "worker_tpye": "decode"}]}', "worker_tpye"),
    ],
)
def test_a_file_that_is_neither_says_why(contents: bytes, why: str) -> None:
    with pytest.raises(Unreadable, match=why):
        read(contents)


@pytest.mark.parametrize(
    "contents",
    [
        *(b"a: [", b"- !!python/object:os.system {}", b"\x00", b"- ]"),
        *(b"!!int ''", b"!!float ''", b"!!bool x", b"- !!timestamp x", b"!!binary x"),
    ],
)
def test_yaml_that_is_none_says_so_in_one_line(contents: bytes) -> None:
    with pytest.raises(Unreadable, match="not YAML") as raised:
        read(contents, yaml=True)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("target", ["http://admin:hunter2@a:1", "admin:hunter2@a:1"])
def test_a_password_is_refused_and_not_repeated(target: str) -> None:
    with pytest.raises(Unreadable, match="credentials do not belong") as raised:
        read(b'[{"targets":["%b"]}]' % target.encode())
    assert "hunter2" not in str(raised.value)


def test_without_pyyaml_a_yaml_file_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> Any:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib, "import_module", refuse)
    with pytest.raises(Unreadable, match="PyYAML, which is not installed"):
        read(YAML, yaml=True)
    assert read(FILE_SD)


class Watched:
    """A file that is watched; `look` lets it be looked at once, and waits until that is done."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.told: list[list[str]] = []
        self._ticks: asyncio.Queue[None] = asyncio.Queue()
        self._asleep = asyncio.Event()
        self.file = File(path, sleep=self._sleep, on_fault=self._fault)
        self.faults = 0

    def _fault(self) -> None:
        self.faults += 1

    async def _sleep(self, seconds: float) -> None:
        self._asleep.set()
        await self._ticks.get()

    def found(self, found: list[Found]) -> None:
        self.told.append([each.id for each in found])

    async def look(self) -> None:
        self._asleep.clear()
        self._ticks.put_nowait(None)
        await self._asleep.wait()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.get_running_loop().create_task(self.file.run(self.found))
        await self._asleep.wait()
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()

    def replace(self, contents: str) -> None:
        """Write a new file beside it, and rename that."""
        beside = self.path.with_name("new")
        beside.write_text(contents)
        beside.replace(self.path)


def listing(*targets: str) -> str:
    return f'[{{"targets": [{", ".join(f"{chr(34)}{each}{chr(34)}" for each in targets)}]}}]'


async def test_a_file_is_read_at_once_and_only_changes_are_told(tmp_path: Path) -> None:
    watched = Watched(tmp_path / "engines.json")
    watched.path.write_text(listing("a:1"))
    async with watched.running():
        assert watched.told == [["a:1"]]
        await watched.look()
        watched.path.write_text(listing("a:1") + "\n")
        await watched.look()
        assert watched.told == [["a:1"]]
        watched.replace(listing("b:1", "a:1"))
        await watched.look()
        assert watched.told == [["a:1"], ["a:1", "b:1"]]


async def test_the_gateway_does_other_things_while_a_long_file_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyYAML takes seconds for thousands of workers."""
    threads = []

    def noted(contents: bytes, *, yaml: bool) -> list[Found]:
        threads.append(threading.current_thread())
        return read(contents, yaml=yaml)

    monkeypatch.setattr("pointsman.control.discovery.file.read", noted)
    watched = Watched(tmp_path / "engines.yml")
    watched.path.write_text(listing("a:1"))
    async with watched.running():
        await watched.look()
        watched.replace(listing("b:1"))
        await watched.look()
    assert watched.told == [["a:1"], ["b:1"]]
    assert len(threads) == 2 and threading.main_thread() not in threads


async def test_a_swapped_link_is_noticed(tmp_path: Path) -> None:
    """It is how Kubernetes replaces a mounted file."""
    for name, target in (("one", "a:1"), ("two", "b:1")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "engines.json").write_text(listing(target))
    (tmp_path / "data").symlink_to("one")
    watched = Watched(tmp_path / "data" / "engines.json")
    async with watched.running():
        (tmp_path / "next").symlink_to("two")
        (tmp_path / "next").replace(tmp_path / "data")
        await watched.look()
        assert watched.told == [["a:1"], ["b:1"]]


async def test_r02_a_broken_file_keeps_the_last_list_and_says_why_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pointsman.control.discovery")
    watched = Watched(tmp_path / "engines.json")
    watched.path.write_text(listing("a:1"))
    async with watched.running():
        watched.path.write_text("[{")
        for _ in range(3):
            await watched.look()
        watched.path.unlink()
        for _ in range(3):
            await watched.look()
        assert watched.told == [["a:1"]]
        watched.replace(listing("a:1"))
        await watched.look()
        assert watched.told == [["a:1"]]
        watched.replace(listing())
        await watched.look()
        assert watched.told == [["a:1"], []]
    broken, gone, again = (each.getMessage() for each in caplog.records)
    assert broken.startswith(f"file {watched.path}: not JSON: ")
    assert broken.endswith("; its workers stay")
    assert gone == f"file {watched.path}: No such file or directory; its workers stay"
    assert again == f"file {watched.path}: it can be read again"
    assert watched.faults == 0


async def test_r14_a_file_that_is_not_there_yet_is_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watched = Watched(tmp_path / "engines.yml")
    async with watched.running():
        assert watched.told == []
        assert "there are no workers yet" in caplog.text
        watched.replace("- targets: ['a:1']\n")
        await watched.look()
        assert watched.told == [["a:1"]]
