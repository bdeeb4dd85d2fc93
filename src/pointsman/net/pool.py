"""Connections to the engines: one lane per worker, idle ones reused last-in first-out.

Last-in first-out keeps a few connections warm and lets the rest run into the idle limit, which lies below the engines'
usual five seconds, so that a request seldom meets a connection that its engine has just closed. When it does, the
driver sends it once more on a fresh one.

A lane belongs to one `Worker` object, that is to one life of an engine. When the registry gives the worker up, its idle
connections are closed, and requests that wait for a first byte there are failed over at once; streams that already
reached their clients run on. Where an operator removed it the engine is alive, so whatever it was sent runs on.

A worker that says `https://` is spoken to over TLS. One that cannot show that it is who it should be counts as refused,
like one that does not listen; it is also logged, once until it can, because only an operator can mend that.
"""

import asyncio
import logging
import ssl
from collections import deque
from typing import Protocol, cast

from pointsman.domain.worker import Worker
from pointsman.flow.effects import Lost, Why
from pointsman.net.clock import Deadlines
from pointsman.net.limits import UpstreamLimits
from pointsman.net.observer import Observer
from pointsman.net.tls import system_context
from pointsman.net.upstream import Upstream

__all__ = ["Asker", "Lane", "Pool"]

logger = logging.getLogger(__name__)


class Asker(Protocol):
    """Who asks for a connection."""

    def connected(self, upstream: Upstream) -> None:
        """Take a connection that has just been opened or freed."""

    def unreachable(self, lost: Lost) -> None:
        """Learn that there is none to be had."""


class Lane:
    """The connections to one worker."""

    __slots__ = (
        "_distrusted",
        "_openings",
        "_pool",
        "authority",
        "busy",
        "closed",
        "connecting",
        "host",
        "idle",
        "limits",
        "name",
        "open",
        "port",
        "waiting",
        "worker",
    )

    def __init__(self, pool: "Pool", worker: Worker) -> None:
        self.authority = worker.http_address.rpartition("//")[2]
        host, _, port = self.authority.rpartition(":")
        self._pool = pool
        self._distrusted = False
        self.worker = worker
        self.host = host.strip("[]")
        self.port = int(port)
        # Neither the zone of an address nor the root's dot is part of a name in a certificate.
        self.name = self.host.partition("%")[0].rstrip(".")
        self.limits = pool.limits
        self._openings: dict[bytes, bytes] = {}
        self.idle: list[Upstream] = []
        self.connecting: dict[asyncio.Task[None], Asker] = {}
        self.busy: set[Upstream] = set()
        self.waiting: deque[asyncio.Future[Upstream | None]] = deque()
        self.open = 0
        self.closed = False

    def opening(self, path: bytes) -> bytes:
        """Return the beginning of a request to a path of this worker, up to the value of Content-Length."""
        opening = self._openings.get(path)
        if opening is None:
            opening = self._request(b"POST", path) + b"content-length: "
            # The paths are few, and of the configuration; queries are the clients'.
            if b"?" not in path:
                self._openings[path] = opening
        return opening

    def getting(self, path: bytes) -> bytes:
        """Return the beginning of a GET of a path of this worker."""
        return self._request(b"GET", path)

    def _request(self, method: bytes, path: bytes) -> bytes:
        worker = self.worker
        return b"%b %b%b HTTP/1.1\r\nhost: %b\r\n%b" % (
            method,
            worker.base_path.encode(),
            path,
            self.authority.encode(),
            worker.credentials,
        )

    def take(self) -> Upstream | None:
        """Return the idle connection that was used last, or None."""
        idle = self.idle
        while idle:
            upstream = idle.pop()
            if not upstream.transport.is_closing():
                self.busy.add(upstream)
                return upstream
        return None

    def connect(self, asker: Asker, *, at_once: bool = False) -> "asyncio.Task[None]":
        """Open a connection for the asker, or wait for a free one where the lane is full, unless it is `at_once`.

        The task may be cancelled by the asker, who then hears nothing more.
        """
        task = self._pool.own(self._connect(asker, at_once))
        self.connecting[task] = asker
        task.add_done_callback(self._connected)
        return task

    def _connected(self, task: "asyncio.Task[None]") -> None:
        self.connecting.pop(task, None)

    async def _connect(self, asker: Asker, at_once: bool) -> None:
        lost: Lost | None = None
        try:
            if (
                self.closed
            ):  # What was sent to an idle connection that the engine had closed comes back here.
                raise ConnectionError("it left")
            async with asyncio.timeout(self.limits.connect_s):
                free = None if at_once else await self._free()
                upstream = free or await self._open()
        except TimeoutError:
            lost = Lost(Why.TIMED_OUT, f"no connection to {self.worker.id} within the limit")
        except ssl.SSLCertVerificationError as error:
            lost = self._distrust(error.verify_message)
        except (OSError, ValueError) as error:  # ValueError: no name that a certificate could have.
            lost = Lost(Why.REFUSED, f"no connection to {self.worker.id}: {error}")
        # The asker's answer may be to evict this worker, and `close` must not tell it a second time.
        self.connecting.pop(cast("asyncio.Task[None]", asyncio.current_task()), None)
        if lost is not None:
            asker.unreachable(lost)
        else:
            self.busy.add(upstream)
            asker.connected(upstream)

    async def _free(self) -> Upstream | None:
        """Wait while the lane is full; return a freed connection, or None when one may be opened."""
        if not self._full:
            return None
        self._pool.observer.pool_wait()
        upstream: Upstream | None = None
        while self._full and upstream is None:
            free = asyncio.get_running_loop().create_future()
            self.waiting.append(free)
            try:
                upstream = await free
            except asyncio.CancelledError:
                if free.done() and not free.cancelled():
                    self._pass_on(free.result())
                raise
            if upstream is not None and upstream.closing:  # It closed on its way here.
                upstream = None
        return upstream

    @property
    def _full(self) -> bool:
        return 0 < self.limits.connections <= self.open

    def _pass_on(self, upstream: Upstream | None) -> None:
        """Give what a waiter no longer wants, a connection or leave to open one, to the next."""
        if upstream is not None:
            self.give(upstream)
        elif (waiter := self._next_waiter()) is not None:
            waiter.set_result(None)

    async def _open(self) -> Upstream:
        self.open += 1
        self._pool.observer.opened("upstream")
        upstream = Upstream(self, self._pool.deadlines)
        try:
            if self.worker.tls:
                await asyncio.get_running_loop().create_connection(
                    lambda: upstream,
                    self.host,
                    self.port,
                    ssl=self._pool.tls or system_context(),
                    server_hostname=self.name,
                )
                self._distrusted = False
            else:
                await asyncio.get_running_loop().create_connection(
                    lambda: upstream, self.host, self.port
                )
        except BaseException:
            upstream.discard()
            raise
        return upstream

    def _distrust(self, why: str) -> Lost:
        """Say that the worker is not who it should be, or that nobody can tell."""
        detail = f"no connection to {self.worker.id}: its certificate is not trusted: {why}"
        if not self._distrusted:
            self._distrusted = True
            logger.warning("%s", detail)
        return Lost(Why.REFUSED, detail)

    def give(self, upstream: Upstream) -> None:
        """Take back a connection that may carry another request."""
        self.busy.discard(upstream)
        if self.closed or upstream.transport.is_closing():
            upstream.abort()
            return
        if self.waiting and (waiter := self._next_waiter()) is not None:
            waiter.set_result(upstream)
        elif len(self.idle) >= self.limits.idle_max:
            upstream.abort()
        else:
            upstream.deadline = self._pool.deadlines.soon + self.limits.keepalive_s
            self.idle.append(upstream)

    def lost(self, upstream: Upstream) -> None:
        """Forget a connection that has closed."""
        self.busy.discard(upstream)
        if upstream in self.idle:
            self.idle.remove(upstream)
        self.left()

    def left(self) -> None:
        """Count one connection less, and let one that waits open its own."""
        self.open -= 1
        self._pool.observer.closed("upstream")
        if self.waiting and (waiter := self._next_waiter()) is not None:
            waiter.set_result(None)

    def close(self, lost: Lost) -> None:
        """Close what is idle, and fail over what has not committed."""
        self.retire(lost)
        for upstream in tuple(self.busy):
            upstream.give_up(lost)

    def retire(self, lost: Lost) -> None:
        """Close what is idle, and fail over what has not been sent; what has been may still be answered."""
        self.closed = True
        for upstream in self.idle:
            upstream.abort()
        self.idle.clear()
        for task, asker in tuple(self.connecting.items()):
            task.cancel()
            asker.unreachable(lost)
        self.connecting.clear()

    def _next_waiter(self) -> "asyncio.Future[Upstream | None] | None":
        while self.waiting:
            waiter = self.waiting.popleft()
            if not waiter.done():
                return waiter
        return None


class Pool:
    """All lanes, and the tasks that open connections.

    `tls` is the context for workers that speak TLS; without one they are trusted by the CAs of the system.
    """

    def __init__(
        self,
        limits: UpstreamLimits,
        deadlines: Deadlines,
        observer: Observer,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.limits = limits
        self.deadlines = deadlines
        self.observer = observer
        self.tls = tls
        self._lanes: dict[Worker, Lane] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def lane(self, worker: Worker) -> Lane:
        """Return the worker's lane."""
        lane = self._lanes.get(worker)
        if lane is None:
            lane = self._lanes[worker] = Lane(self, worker)
        return lane

    def set_limits(self, limits: UpstreamLimits) -> None:
        """Put limits in force for what happens from now on."""
        self.limits = limits
        for lane in self._lanes.values():
            lane.limits = limits

    def leave(self, worker: Worker) -> None:
        """Close the lane of a worker that the registry gave up."""
        lane = self._lanes.pop(worker, None)
        if lane is not None:
            lane.close(Lost(Why.EVICTED, f"worker {worker.id} left"))

    def retire(self, worker: Worker) -> None:
        """Close the lane of a worker that an operator took from the list: what it has been sent it may answer."""
        lane = self._lanes.pop(worker, None)
        if lane is not None:
            lane.retire(Lost(Why.EVICTED, f"worker {worker.id} left"))

    def own(self, coroutine: "asyncio._CoroutineLike[None]") -> "asyncio.Task[None]":
        """Run a coroutine as a task that is kept until it ends."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def close(self) -> None:
        """Close everything; what has not committed fails."""
        for task in self._tasks:
            task.cancel()
        for lane in self._lanes.values():
            lane.close(Lost(Why.SHUTDOWN, "the gateway is shutting down"))
        self._lanes.clear()
