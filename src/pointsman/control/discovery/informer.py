"""Follows the objects of one kind in a cluster: reads the list, watches what changes, reads it again after every gap.

A watch tells less than it seems to. It can be cut, hang, be refused or be told that its past is forgotten, and whatever
was deleted meanwhile is never mentioned again. So every end of a watch, for whatever reason, leads to the list, and
watches are given an end of their own: nothing here trusts that an event will come. While the list cannot be read, what
was known last stays.

What it does not do: speak HTTP (see `cluster`), or know what the objects mean.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Generic, Protocol, TypeVar

from msgspec import Raw, Struct

from pointsman.control.discovery.reflection import Gap, Kept, Reflection, page

__all__ = ["Clock", "Cluster", "Informer", "Pace", "backoff_s"]

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=Kept)

PAGE = "500"
"""How many objects are asked for at once."""

GONE = 410
"""The status of the API for a version that it has forgotten: a gap like any other, no fault."""

MISSING = 404


class Pace(Struct, frozen=True):
    """How long things take, in seconds.

    A watch ends after `relist_s`, give or take a tenth, and at once where not even a bookmark came for `silence_s`:
    the API sends one about every minute. While there is nothing at all it ends after `empty_s`. `request_s` is the
    limit of a list. After the n-th gap in a row the next list waits for about `backoff_s` times two to the n, at most
    `cap_s`; a watch that lasted for `steady_s` begins the count again.
    """

    relist_s: float = 300.0
    silence_s: float = 90.0
    empty_s: float = 30.0
    request_s: float = 30.0
    backoff_s: float = 0.2
    cap_s: float = 30.0
    steady_s: float = 10.0


class Clock(Struct, frozen=True):
    """Time, sleep and chance: `now` counts seconds from anywhere, `random` draws from 0 to 1."""

    random: Callable[[], float]
    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep


class Cluster(Protocol):
    """The API of a cluster. `namespace` is the one that we are in."""

    namespace: str

    async def get(self, path: str, query: Mapping[str, str], limit_s: float) -> bytes:
        """Return the body of an answer. Raises Gap where there is none, or none with status 200."""

    def watch(
        self, path: str, query: Mapping[str, str], limit_s: float, silence_s: float
    ) -> AsyncGenerator[bytes]:
        """Yield b"" when the answer has begun, then its lines. Raises Gap where it does not end in good order."""


def backoff_s(failures: int, pace: Pace, random: float) -> float:
    """Return how long to wait after so many gaps in a row, in seconds.

    >>> [backoff_s(n, Pace(), 1.0) for n in (0, 1, 4, 9, 10_000)]
    [0.2, 0.4, 3.2, 30.0, 30.0]
    >>> backoff_s(0, Pace(), 0.0)
    0.1
    """
    # The exponent is bounded since an outage of days is not an overflow.
    return min(pace.cap_s, pace.backoff_s * 2.0 ** min(failures, 30)) * (1 + random) / 2


class Informer(Generic[T]):
    """Follows what one of some paths of the API lists: the first that has anything.

    `changed` is called after every list and every event, with what there is now; `listed` says that there was a list.
    `degraded` says why the list or the watch cannot be had, "" where they can; `told` is called when it changes.
    """

    def __init__(
        self,
        kind: type[T],
        cluster: Cluster,
        paths: Sequence[str],
        query: Mapping[str, str],
        *,
        clock: Clock,
        pace: Pace,
        changed: Callable[[list[T]], None],
        told: Callable[[], None],
    ) -> None:
        self._reflection = Reflection(kind)
        self._cluster = cluster
        self._paths = paths
        self._query = query
        self._clock = clock
        self._pace = pace
        self._changed = changed
        self._told = told
        self.degraded = ""
        self.listed = False

    @property
    def objects(self) -> list[T]:
        """Return what there is, as far as is known."""
        return self._reflection.objects

    @property
    def unreadable(self) -> int:
        """Return how many objects of the last list made no sense."""
        return self._reflection.unreadable

    async def run(self) -> None:
        """Follow, until cancelled."""
        failures = 0
        while True:
            began = self._clock.now()
            try:
                path, version = await self._list()
                self._changed(self._reflection.objects)
                await self._watch(path, version)
            except Gap as gap:
                logger.debug("%s: %s", self._paths[0], gap)
            except Exception as error:
                # Whatever the list was handed to may fail, and so may a plug-in for credentials: follow all the same.
                logger.exception("following %s failed, and goes on", self._paths[0])
                self._say(f"{type(error).__name__}: {error}")
            steady = self._clock.now() - began >= self._pace.steady_s
            failures = 0 if steady else failures + 1
            await self._clock.sleep(backoff_s(failures, self._pace, self._clock.random()))

    async def _list(self) -> tuple[str, str]:
        """Read the whole list; return its path, and the version to watch on from. Raises Gap."""
        path, version, items = self._paths[0], "", []
        missing: Gap | None = None
        for each in self._paths:
            try:
                found, seen = await self._pages(each)
            except Gap as gap:
                if gap.status == MISSING:
                    missing = gap
                    continue
                if gap.status != GONE:
                    self._say(str(gap))
                raise
            if found or not version:
                path, version, items = each, seen, found
            if found:
                break
        if missing and not version:
            self._say(str(missing))
            raise missing
        self._reflection.replace(items)
        self.listed = True
        return path, version

    async def _pages(self, path: str) -> tuple[list[Raw], str]:
        items: list[Raw] = []
        query = {**self._query, "limit": PAGE}
        while True:
            part = page(await self._cluster.get(path, query, self._pace.request_s))
            items += part.items
            if not part.following:
                return items, part.version
            query["continue"] = part.following

    async def _watch(self, path: str, version: str) -> None:
        """Follow events to the end of a watch. Raises Gap where that is not a good one."""
        pace, random = self._pace, self._clock.random()
        lasts = pace.relist_s * (0.9 + 0.2 * random) if self._reflection.objects else pace.empty_s
        query = {
            **self._query,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(max(1, round(lasts))),
        }
        limit_s = lasts + pace.request_s
        begun = False
        try:
            async with aclosing(self._cluster.watch(path, query, limit_s, pace.silence_s)) as lines:
                async for line in lines:
                    if not begun:
                        begun = True
                        self._say("")
                    elif self._reflection.apply(line):
                        self._changed(self._reflection.objects)
        except Gap as gap:
            if not begun and gap.status != GONE:
                self._say(str(gap))
            raise

    def _say(self, reason: str) -> None:
        if reason != self.degraded:
            self.degraded = reason
            self._told()
