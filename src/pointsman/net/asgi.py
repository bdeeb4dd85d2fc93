"""Serves an ordinary ASGI application on our own connections, so that health and admin need no second HTTP server.

One task per request. The whole request body is there when the application starts; what it sends goes out as it comes,
with its own Content-Length or chunked. WebSockets and lifespan are not offered.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import unquote_to_bytes

from pointsman.errors import GatewayError, InternalError, NoCapacity
from pointsman.net.clock import Deadlines
from pointsman.net.downstream import Downstream, Request, Responder
from pointsman.net.limits import DownstreamLimits
from pointsman.net.observer import Observer
from pointsman.wire.framing import LAST_CHUNK, chunk
from pointsman.wire.http1 import status_line
from pointsman.wire.replies import error_reply

__all__ = ["AsgiServer"]

logger = logging.getLogger(__name__)

BODYLESS = frozenset((204, 304))
"""Statuses whose answers end with their heads."""

Message = MutableMapping[str, Any]
Application = Callable[
    [
        MutableMapping[str, Any],
        Callable[[], Awaitable[Message]],
        Callable[[Message], Awaitable[None]],
    ],
    Awaitable[None],
]


class AsgiServer:
    """Answers requests with one ASGI application: those of a listener, or those that somebody else hands on.

    `path` is what its answers are counted under, "" where they are not.
    """

    def __init__(
        self,
        application: Application,
        deadlines: Deadlines,
        observer: Observer,
        limits: DownstreamLimits,
        path: str = "",
    ) -> None:
        self.application = application
        self.path = path
        self.deadlines = deadlines
        self.observer = observer
        self.limits = limits
        self.draining = False
        self.connections: set[Downstream] = set()
        self.empty = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def serve(self, client: Downstream, request: Request) -> Responder:
        """Start the application on a request."""
        return self.call(client, request, {})

    def call(
        self, client: Downstream, request: Request, state: dict[str, Any], headers: bytes = b""
    ) -> Responder:
        """Start the application with a `state` in its scope; `headers` are whole lines to add to its answer."""
        call = _Call(self, client, request, state, headers)
        task = asyncio.get_running_loop().create_task(call.run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return call


class _Call:
    """One request that an application answers."""

    def __init__(
        self,
        server: AsgiServer,
        client: Downstream,
        request: Request,
        state: dict[str, Any],
        headers: bytes,
    ) -> None:
        self._server = server
        self._client = client
        self._request = request
        self._state = state
        self._headers = headers
        self._since = server.deadlines.now()
        self._keep = request.keep_alive and not server.draining
        self._received = False
        self._gone = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()
        self._started = False
        self._chunked = False
        self._left: int | None = None
        self._status = 0
        self._head = b""
        self._done = False

    async def run(self) -> None:
        request = self._request
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.0" if request.http10 else "1.1",
            "method": request.method.decode("ascii"),
            "scheme": self._scheme(),
            "path": unquote_to_bytes(request.path).decode("utf-8", "replace"),
            "raw_path": request.path,
            "query_string": request.query,
            "root_path": "",
            "headers": request.headers,
            "client": self._client.transport.get_extra_info("peername"),
            "server": self._client.transport.get_extra_info("sockname"),
            "state": self._state,
        }
        try:
            await self._server.application(scope, self._receive, self._send)
        except Exception:
            logger.exception("the application failed on %s", scope["path"])
            self._server.observer.fault("asgi")
        if not self._done and not self._gone.is_set():
            self._break(InternalError("the application failed"))

    async def _receive(self) -> Message:
        if not self._received:
            self._received = True
            return {"type": "http.request", "body": self._request.body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if self._gone.is_set():
            return
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._head = self._render(self._status, list(message.get("headers", ())))
            return
        assert message["type"] == "http.response.body", message["type"]
        body = message.get("body", b"")
        more = message.get("more_body", False)
        if self._request.method == b"HEAD" or self._status in BODYLESS:
            body = b""
        elif self._chunked:
            body = (chunk(body) if body else b"") + (b"" if more else LAST_CHUNK)
        elif self._left is not None:
            self._weigh(len(body), more=more)
        if not self._started:
            self._started = True
            self._count(self._status)
        self._client.write(self._head + body)
        self._head = b""
        if not more:
            self._done = True
            self._client.finish(self._keep)
        elif not self._writable.is_set():
            await self._writable.wait()

    def _render(self, status: int, headers: list[tuple[bytes, bytes]]) -> bytes:
        lines = [status_line(status)]
        lines += [b"%b: %b\r\n" % (name, value) for name, value in headers]
        lengths = [value for name, value in headers if name.lower() == b"content-length"]
        if lengths:
            self._left = int(lengths[0])
        elif status not in BODYLESS:
            self._chunked = not self._request.http10
            self._keep = self._keep and self._chunked
            if self._chunked:
                lines.append(b"transfer-encoding: chunked\r\n")
        lines.append(self._headers)
        lines.append(b"connection: %b\r\n\r\n" % (b"keep-alive" if self._keep else b"close"))
        return b"".join(lines)

    def _weigh(self, size: int, *, more: bool) -> None:
        """Raise RuntimeError where a body is not as long as it was said to be: what follows would be misread."""
        assert self._left is not None
        self._left -= size
        if self._left < 0 or (self._left and not more):
            raise RuntimeError("the body is not as long as its Content-Length says")

    def _break(self, error: GatewayError) -> None:
        """End what the application left unfinished, with an error where nothing of its answer is out yet."""
        self._done = True
        if not self._started:
            self._count(error.status)
            self._client.write(error_reply(error, self._headers, close=True))
        self._client.finish(False)

    def _count(self, status: int) -> None:
        server = self._server
        if server.path:
            method = self._request.method.decode("ascii", "replace")
            took = server.deadlines.now() - self._since
            server.observer.answered(method, server.path, status, took)

    def _scheme(self) -> str:
        secure = self._client.transport.get_extra_info("sslcontext") is not None
        return "https" if secure else "http"

    def client_gone(self) -> None:
        """Let the application hear of it."""
        self._gone.set()
        self._writable.set()

    def pause(self) -> None:
        """Let the application wait with its next message."""
        self._writable.clear()

    def resume(self) -> None:
        """Let it go on."""
        self._writable.set()

    def stop(self) -> None:
        """End the answer now."""
        self._gone.set()
        self._writable.set()
        if not self._done:
            self._break(NoCapacity("the gateway is shutting down"))
