"""All sources of workers at once: one task for each, and its list becomes the workers of that source.

A worker that cannot be taken (it makes no sense, or its id belongs to somebody else) is left out, with one log line,
and keeps no other one away; it is tried again whenever there is a place for it. Where an operator lists a worker of the
same id, theirs comes first, also when it comes later. One that was taken before, and makes no sense now, stays as it
was, unless it moved or drains: a key file that is being replaced shall cost no fleet. A source that stays the same in a
reload keeps running, and a source that fails begins again.

What a source is, and how a worker is made of what it found, comes from outside.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from pointsman.control.discovery.found import Found
from pointsman.domain.registry import InvalidReport, Registry
from pointsman.domain.worker import Worker

__all__ = ["Source", "SourceSpec", "Sources"]

logger = logging.getLogger(__name__)

AGAIN_S = 5.0
"""How long a source that failed waits before it begins again."""


class Source(Protocol):
    """Where workers are found."""

    async def run(self, found: Callable[[list[Found]], None]) -> None:
        """Hand over the whole list whenever it changed, until cancelled."""
        ...


class SourceSpec(NamedTuple):
    """A source as it is configured.

    `name` is its name in the registry ("dns engines.svc"), unique; `settings` are what it is made from: as long as they
    are equal it is the same. `source` makes it, and `build` makes a worker of what it found, or raises ValueError.
    """

    name: str
    settings: Hashable
    source: Callable[[], Source]
    build: Callable[[Found], Worker]


class _Running:
    """A source at work."""

    def __init__(
        self, spec: SourceSpec, run: Callable[["_Running"], Coroutine[Any, Any, None]]
    ) -> None:
        self.spec = spec
        self.task = asyncio.get_running_loop().create_task(run(self))
        self.found: list[Found] | None = None
        self.made: dict[str, tuple[str, Worker]] = {}
        self.left_out: dict[str, str] = {}
        self.kept: dict[str, str] = {}
        self.is_changing = False
        self.has_lost = False


class Sources:
    """The sources that are configured, and what they found, in a registry.

    `sleep` is in seconds. `on_left_out` is called with the name of a source for each worker that it finds and that
    cannot be taken; `on_fault` for an exception that nobody foresaw.
    """

    def __init__(
        self,
        registry: Registry,
        *,
        sleep: Callable[[float], Coroutine[Any, Any, object]],
        on_left_out: Callable[[str], None] = lambda source: None,
        on_fault: Callable[[], None] = lambda: None,
    ) -> None:
        self._registry = registry
        self._sleep = sleep
        self._on_left_out = on_left_out
        self._on_fault = on_fault
        self._running: dict[str, _Running] = {}
        self._retrying: asyncio.Handle | None = None
        registry.on_leave.append(self._somebody_left)
        registry.on_release.append(self._something_is_free)

    @property
    def left_out(self) -> dict[str, Mapping[str, str]]:
        """What could not be taken, and why: by the name of the source, by the id of the worker."""
        return {name: dict(each.left_out) for name, each in self._running.items()}

    def set(self, specs: Sequence[SourceSpec]) -> None:
        """Let these be the sources. Workers of those that are not among them leave; waits for nothing.

        A source with new settings begins anew; its workers stay until it has found something. One with the old ones
        goes on, and its workers are built again, for what they are built from may have changed. Raises ValueError for
        two sources of one name; nothing is changed then.
        """
        wanted = {spec.name: spec for spec in specs}
        if len(wanted) < len(specs):
            raise ValueError("two sources have the same name")
        for name in self._running.keys() - wanted.keys():
            self._running.pop(name).task.cancel()
            self._registry.set_listed(name, ())
            logger.info("source %s ended, and its workers left", name)
        for name, spec in wanted.items():
            known = self._running.get(name)
            if known is not None and known.spec.settings == spec.settings:
                known.spec = spec
                if known.found is not None:
                    self._take(known)
                continue
            if known is not None:
                known.task.cancel()
            self._running[name] = _Running(spec, self._run)

    async def stop(self) -> None:
        """End all sources. Their workers stay."""
        self._registry.on_leave.remove(self._somebody_left)
        self._registry.on_release.remove(self._something_is_free)
        if self._retrying is not None:
            self._retrying.cancel()
        tasks = [each.task for each in self._running.values()]
        self._running.clear()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _run(self, running: _Running) -> None:
        while True:
            try:
                await running.spec.source().run(lambda found: self._found(running, found))
            except Exception:
                self._on_fault()
                logger.exception("source %s failed, and begins again", running.spec.name)
            await self._sleep(AGAIN_S)

    def _found(self, running: _Running, found: list[Found]) -> None:
        if self._running.get(running.spec.name) is not running:
            return  # It was ended, and has not heard of it yet.
        running.found = found
        taken = self._take(running)
        logger.info(
            "source %s: workers taken: %d, left out: %d",
            running.spec.name,
            taken,
            len(running.left_out),
        )

    def _take(self, running: _Running) -> int:
        """Let the workers of a source be those that it found and that can be taken; return how many they are."""
        name, left_out, kept = running.spec.name, dict[str, str](), dict[str, str]()
        made: dict[str, tuple[str, Worker]] = {}
        workers: list[Worker] = []
        for each in running.found or ():
            try:
                worker = running.spec.build(each)
            except ValueError as error:
                address, worker_before = running.made.get(each.id, ("", None))
                if worker_before is None or address != each.address or each.draining:
                    left_out[each.id] = str(error)
                    continue
                kept[each.id] = str(error)
                worker = worker_before
            made[each.id] = each.address, worker
            workers.append(worker)
        running.made = made
        running.is_changing = True
        try:
            self._registry.set_listed(name, workers)
        except InvalidReport:
            workers, unfit = self._sound(name, workers)
            left_out |= unfit
            self._registry.set_listed(name, workers)
        finally:
            running.is_changing = running.has_lost = False
        for id in _news(running.left_out, left_out):
            logger.warning("source %s: worker %s is left out: %s", name, _shown(id), left_out[id])
            self._on_left_out(name)
        for id in _news(running.kept, kept):
            logger.warning("source %s: worker %s stays as it was: %s", name, _shown(id), kept[id])
        running.left_out, running.kept = left_out, kept
        return len(workers)

    def _sound(self, name: str, workers: Iterable[Worker]) -> tuple[list[Worker], dict[str, str]]:
        """Return those that the registry takes, and why it does not take the others."""
        registry = self._registry
        room = registry.room(name)
        sound: dict[str, Worker] = {}
        left_out: dict[str, str] = {}
        for worker in workers:
            try:
                if worker.id in sound:
                    raise InvalidReport(f"worker_id {worker.id!r} is there twice")
                registry.check_one(name, worker)
                if len(sound) >= room:
                    raise InvalidReport(f"there are {registry.workers_max} workers already")
            except InvalidReport as error:
                left_out[worker.id] = str(error)
            else:
                sound[worker.id] = worker
        return list(sound.values()), left_out

    def _somebody_left(self, worker: Worker) -> None:
        """See what that means for the sources: there is a place, or one of them has lost one to an operator."""
        running = self._running.get(worker.source)
        if running is not None and not running.is_changing:
            running.has_lost = True
        self._something_is_free()

    def _something_is_free(self) -> None:
        """Try again, as soon as whoever is changing the registry is done."""
        running = self._running.values()
        if self._retrying is None and any(each.left_out or each.has_lost for each in running):
            self._retrying = asyncio.get_running_loop().call_soon(self._retry)

    def _retry(self) -> None:
        self._retrying = None
        for running in list(self._running.values()):
            if running.left_out or running.has_lost:
                before = len(running.left_out)
                taken = self._take(running)
                if len(running.left_out) < before:
                    logger.info("source %s: %d workers now", running.spec.name, taken)


def _news(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the ids of what was not said already."""
    return [id for id, why in now.items() if before.get(id) != why]


def _shown(id: str) -> str:
    """Return an id as a log line can hold it: it comes from outside, and may be the reason."""
    return ascii(id[:64])
