"""What became of reloads, and the watch that starts them: a file that changed is looked at again.

It loads and applies nothing itself; that is `pointsman.app`, which knows all the parts.
"""

import asyncio
import hashlib
import logging
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any

from msgspec import Struct

__all__ = ["Configuration", "Reload", "Watch", "fingerprint"]

logger = logging.getLogger(__name__)

POLL_S = 1.0
"""How often watched files are read; they are few and small."""


class Reload(Struct, frozen=True, kw_only=True):
    """One attempt to load the configuration again.

    `at` is in seconds since 1970; `trigger` is SIGHUP, watch or api; `message` says what was wrong, or what was done;
    `changed` are the options that took effect, `needs_restart` those that will with the next start.
    """

    at: float
    ok: bool
    trigger: str
    message: str
    changed: tuple[str, ...] = ()
    needs_restart: tuple[str, ...] = ()


class Configuration(Struct, frozen=True, kw_only=True):
    """What is in force: where it came from, since when (seconds since 1970), and the last attempt to replace it."""

    source: str
    loaded_at: float
    config: dict[str, Any]
    last_reload: Reload | None = None


def fingerprint(paths: Iterable[Path]) -> tuple[object, ...]:
    """Return what differs when one of the files has other contents; a file that is missing has some too.

    A swapped symbolic link, which is how Kubernetes replaces a mounted file, is a change as well.
    """
    return tuple(_contents(path) for path in paths)


def _contents(path: Path) -> bytes:
    try:
        return hashlib.sha256(path.read_bytes()).digest()
    except OSError as error:
        return str(error.errno).encode()


class Watch:
    """Calls `changed` when files do.

    `look` returns what differs then, and may block: it runs in a thread, once every `POLL_S` seconds. `changed` is
    awaited before the next look. The files count as known when the watch is made. Nothing that either raises ends it;
    `on_fault` is called for it.
    """

    def __init__(
        self,
        look: Callable[[], object],
        changed: Callable[[], Coroutine[Any, Any, object]],
        sleep: Callable[[float], Coroutine[Any, Any, object]] = asyncio.sleep,
        on_fault: Callable[[], None] = lambda: None,
    ) -> None:
        self._look = look
        self._changed = changed
        self._sleep = sleep
        self._on_fault = on_fault
        self._known = look()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Look from now on."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    def stop(self) -> None:
        """Look no more."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _run(self) -> None:
        while True:
            await self._sleep(POLL_S)
            try:
                seen = await asyncio.to_thread(self._look)
                if seen != self._known:
                    self._known = seen
                    await self._changed()
            except Exception:
                self._on_fault()
                logger.exception("a watch failed, and goes on")
