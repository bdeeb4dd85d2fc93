"""The programs that gateways are: found on the system, or installed from PyPI into an environment of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Missing", "environment", "output", "package_version", "program"]


class Missing(Exception):
    """The gateway is not on this machine, or does not work on it."""


def program(name: str) -> str:
    """Return the path of a program of the system. Raises `Missing`."""
    # Debian keeps servers in sbin, which is not on every user's path.
    found = shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")
    if found is None:
        raise Missing(f"{name} is not installed (a package of that name is in most distributions)")
    return found


def output(*command: str) -> str:
    """Return what a command says, wherever it says it."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.stdout.strip()


def environment(cache: Path, name: str, *installs: str) -> Path:
    """Return a virtual environment of that name, made the first time. Each of `installs` is what one `pip install`
    gets, in words. Raises `Missing`.
    """
    home = cache / name
    ready = home / "installed"
    if ready.exists():
        return home
    print(f"{name}: installing into a virtual environment of its own ...", file=sys.stderr)
    try:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
        for words in installs:
            pip = [str(home / "bin" / "pip"), "install", "-q", *words.split()]
            subprocess.run(pip, check=True)
    except subprocess.CalledProcessError as error:
        raise Missing(f"{name} cannot be installed: {error}") from error
    ready.touch()
    return home


def package_version(home: Path, package: str) -> str:
    """Return the version of a package in that environment."""
    ask = f"import importlib.metadata as m; print(m.version({package!r}))"
    return output(str(home / "bin" / "python"), "-c", ask)
