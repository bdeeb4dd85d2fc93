"""One client connection: requests in, in order; one answer at a time out.

llhttp parses. A request is handed on when it is whole, and the next one of a pipeline waits for the answer to the one
before. What is not HTTP/1.1, or too large, or too slow, is refused in OpenAI's error shape; the connection then closes
after a moment of reading on, because a reset would destroy an answer that the client has not read yet.
"""

import asyncio
from collections import deque
from enum import Enum
from math import inf
from typing import Protocol, cast

import httptools
from msgspec import Struct

from pointsman.errors import (
    BadRequest,
    BodyTooLarge,
    GatewayError,
    HeadTooLarge,
    MethodNotAllowed,
    NoCapacity,
    RequestTimeout,
)
from pointsman.net.clock import Deadlines
from pointsman.net.limits import DownstreamLimits
from pointsman.net.observer import Observer
from pointsman.net.sending import sender
from pointsman.wire.http1 import CONTINUE, Headers
from pointsman.wire.replies import error_reply

__all__ = ["Downstream", "Request", "Responder", "Server"]

NOTED = frozenset((b"expect", b"transfer-encoding", b"upgrade"))
PIPELINE_LIMIT = 16
PIPELINE_BYTES = 1 << 20
"""How many requests of a pipeline may wait before reading stops, or one whose body is larger than this."""

LINGER_S = 2.0
LINGER_BYTES = 64 << 20
"""How long, and for how many bytes, a refused client is read on: enough for the largest body by default."""


class Request(Struct, eq=False, gc=False):
    """One whole request. Header names are lower case; `path` is still percent-encoded."""

    method: bytes
    path: bytes
    query: bytes
    headers: Headers
    body: bytes
    keep_alive: bool = True
    http10: bool = False


class Responder(Protocol):
    """Whoever is answering a request: told when that is of no use any more."""

    def client_gone(self) -> None:
        """The client closed the connection."""

    def pause(self) -> None:
        """The client does not read: stop producing."""

    def resume(self) -> None:
        """The client reads again."""

    def stop(self) -> None:
        """The gateway stops: end the answer now."""


class Server(Protocol):
    """Who answers requests."""

    draining: bool
    limits: DownstreamLimits
    deadlines: Deadlines
    observer: Observer
    connections: "set[Downstream]"
    empty: asyncio.Event  # set while there are no connections

    def serve(self, client: "Downstream", request: Request) -> Responder | None:
        """Answer, through `client.write` and `client.finish`; return who to tell of an early end."""


class Phase(Enum):
    """What the client is doing."""

    IDLE = "idle"
    HEAD = "head"
    BODY = "body"
    REFUSED = "refused"  # an answer says no; what still comes is thrown away
    CLOSED = "closed"


# Reading a member off its class takes Python 3.11 some 70 ns, and happens several times for every request.
IDLE, HEAD, BODY, CLOSED = Phase.IDLE, Phase.HEAD, Phase.BODY, Phase.CLOSED


class Downstream(asyncio.Protocol):
    """A client connection."""

    __slots__ = (
        "_body",
        "_discarded",
        "_expects",
        "_fields",
        "_head_bytes",
        "_headers",
        "_limited",
        "_parser",
        "_paused",
        "_phase",
        "_reading",
        "_ready",
        "_refusal",
        "_responder",
        "_server",
        "_serving",
        "_size",
        "_target",
        "_unsent",
        "_upgrading",
        "deadline",
        "transport",
        "write",
    )

    transport: asyncio.Transport

    def __init__(self, server: Server) -> None:
        self._server = server
        self._parser = httptools.HttpRequestParser(self)
        self._phase = Phase.IDLE
        self._limited = Phase.IDLE
        self._target = b""
        self._headers: Headers = []
        self._body: list[bytes] = []
        self._size = 0
        self._head_bytes = 0
        self._fields = 0
        self._expects = False
        self._upgrading = False
        self._refusal: GatewayError | None = None
        self._ready: deque[Request] = deque()
        self._serving = False
        self._responder: Responder | None = None
        self._paused = False
        self._reading = True
        self._unsent = 0
        self._discarded = 0
        self.deadline = inf

    # What the transport calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start to be watched."""
        server = self._server
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self.write = sender(self.transport)
        server.connections.add(self)
        server.empty.clear()
        server.observer.opened("downstream")
        server.deadlines.add(self)
        self.deadline = server.deadlines.soon + server.limits.head_s
        if 0 < server.limits.connections < len(server.connections):
            self._refusal = NoCapacity("the gateway has as many connections as it may")
            self._refuse()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell whoever is answering."""
        self._phase = Phase.CLOSED
        self.deadline = inf
        server = self._server
        server.deadlines.discard(self)
        server.connections.discard(self)
        if not server.connections:
            server.empty.set()
        server.observer.closed("downstream")
        self._ready.clear()
        responder, self._responder = self._responder, None
        if responder is not None:
            responder.client_gone()

    def data_received(self, data: bytes) -> None:
        """Parse, and serve what is whole."""
        if self._phase is Phase.REFUSED:
            self._discard(data)
            return
        self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._decline(memoryview(data)[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            self._malformed(error)
        if self._phase is not IDLE and self._head_bytes > self._server.limits.head_bytes:
            self._refusal = self._refusal or HeadTooLarge("the request head is too large")
        if not self._serving:
            if self._phase is BODY and self._limited is not BODY:
                self._weigh_body()
            self._serve_next()
            if self._phase is not self._limited and not self._serving:
                self._limit()

    def eof_received(self) -> bool:
        """Take a half-closed connection as closed: whoever still waits for an answer keeps its side open."""
        return False

    def pause_writing(self) -> None:
        """Pass the client's slowness on."""
        self._paused = True
        if self._responder is not None:
            self._responder.pause()

    def resume_writing(self) -> None:
        """Let the answer flow again."""
        self._paused = False
        if self._responder is not None:
            self._responder.resume()
        else:
            self._serve_next()

    def expired(self, now: float) -> None:
        """Refuse a client that is too slow; close one that is idle or reads nothing."""
        limits = self._server.limits
        unsent = self.transport.get_write_buffer_size()
        if self._serving or unsent:
            if unsent and unsent == self._unsent:
                self.transport.abort()
            else:
                self._unsent = unsent
                self.deadline = now + limits.stall_s
        elif self._phase is Phase.HEAD or self._phase is Phase.BODY:
            what = "head" if self._phase is Phase.HEAD else "body"
            self._refusal = RequestTimeout(f"the request {what} did not arrive in time")
            self._refuse()
        else:
            self.transport.abort()

    # What llhttp calls.

    def on_message_begin(self) -> None:
        """Start a request."""
        self._phase = HEAD
        self._target = b""
        self._headers = []
        self._body = []
        self._size = 0
        self._expects = self._upgrading = False

    def on_url(self, url: bytes) -> None:
        """Take (a part of) the request target."""
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header."""
        name = name.lower()
        self._headers.append((name, value))
        if name in NOTED:
            self._note(name, value)

    def on_headers_complete(self) -> None:
        """Weigh the head, and answer an expectation, before the body comes."""
        if self._upgrading and self._parser.should_upgrade():  # `_decline` starts over.
            return
        self._phase = BODY
        if self._head_bytes > self._server.limits.head_bytes:
            self._weigh()
        self._head_bytes = 0
        self._fields = len(self._headers)
        if self._expects:
            self._weigh_body()
            self._invite()

    def on_body(self, body: bytes) -> None:
        """Take a part of the body."""
        self._head_bytes = 0
        self._expects = False
        self._size += len(body)
        if self._size > (limit := self._server.limits.body_bytes):
            self._refusal = self._refusal or BodyTooLarge(f"the request body is over {limit} bytes")
            self._body.clear()
        elif self._refusal is None:
            self._body.append(body)

    def on_message_complete(self) -> None:
        """Queue a whole request."""
        parser = self._parser
        if parser.should_upgrade():
            return
        self._phase = IDLE
        self._expects = False
        version = parser.get_http_version()
        if version != "1.1" and version != "1.0":
            self._refusal = self._refusal or BadRequest(f"HTTP/{version} is not spoken here")
        if self._refusal is not None:
            return
        headers = self._headers
        if len(headers) > self._fields:
            del headers[self._fields :]  # Trailers are no headers.
        parts = self._body
        path, _, query = self._target.partition(b"?")
        self._ready.append(
            Request(
                parser.get_method(),
                path if path.startswith(b"/") else _path_of(path),
                query,
                headers,
                parts[0] if len(parts) == 1 else b"".join(parts),
                parser.should_keep_alive(),
                version == "1.0",
            )
        )
        self._body = []
        # A pipeline may be long or its bodies large, not both: they would all wait in memory.
        crowded = len(self._ready) >= PIPELINE_LIMIT or (
            self._size > PIPELINE_BYTES and self._serving
        )
        if crowded and self._reading:
            self._reading = False
            self.transport.pause_reading()

    # What the server calls.

    def finish(self, keep: bool) -> None:
        """End the answer: the next request may be served, or the connection closes."""
        self._serving = False
        self._responder = None
        self._unsent = 0
        if self._phase is CLOSED:
            return
        if not keep:
            self._ready.clear()
            if self._phase is IDLE:
                self.close()
            else:
                self._linger()
        else:
            if self._phase is IDLE:
                self._limited = IDLE
                self.deadline = self._server.deadlines.soon + self._server.limits.keepalive_s
            else:
                self._limit()
            if self._expects:
                self._invite()
            # A pipeline of answers that are ready at once must not become a tower of calls.
            if self._ready or self._refusal is not None:
                asyncio.get_running_loop().call_soon(self._serve_next)

    def stop(self) -> None:
        """End the answer that is being given, and close."""
        if self._responder is not None:
            self._responder.stop()
        else:
            self.close()

    def close_idle(self) -> None:
        """Close if no request is being answered or read."""
        if not self._serving and self._phase is Phase.IDLE and not self._ready:
            self.close()

    def close(self) -> None:
        """Close once everything written is sent."""
        if self._phase is not Phase.CLOSED:
            self._phase = Phase.REFUSED
            self.deadline = self._server.deadlines.soon + self._server.limits.stall_s
            self.transport.close()

    @property
    def responder(self) -> Responder | None:
        """Who is answering right now."""
        return self._responder

    @property
    def paused(self) -> bool:
        """Whether the client is behind with reading."""
        return self._paused

    # The rest is how.

    def _serve_next(self) -> None:
        # Who does not read answers gets no more of them.
        while not self._serving and not self._paused and self._phase is not CLOSED:
            if not self._ready:
                if self._refusal is not None:
                    self._refuse()
                return
            request = self._ready.popleft()
            if not self._reading and len(self._ready) < PIPELINE_LIMIT // 2:
                self._reading = True
                self.transport.resume_reading()
            server = self._server
            self._serving = True
            self._limited = CLOSED
            responder = server.serve(self, request)
            if self._serving:
                self._responder = responder
                self.deadline = server.deadlines.soon + server.limits.stall_s

    def _limit(self) -> None:
        """Set the limit for what the client does now."""
        limits = self._server.limits
        self._limited = phase = self._phase
        if phase is IDLE:
            seconds = limits.keepalive_s
        elif phase is HEAD:
            seconds = limits.head_s
        elif phase is BODY:
            seconds = limits.body_s
        else:
            return
        self.deadline = self._server.deadlines.soon + seconds

    def _note(self, name: bytes, value: bytes) -> None:
        """Judge what a header announces, before the body comes."""
        if name == b"transfer-encoding":
            if value.lower() != b"chunked" or self._parser.get_http_version() == "1.0":
                self._refusal = BadRequest("a transfer coding that this server does not take")
        elif name == b"expect":
            http10 = self._parser.get_http_version() == "1.0"
            self._expects = value.lower() == b"100-continue" and not http10
        else:
            self._upgrading = True

    def _invite(self) -> None:
        """Tell a client that waits for it to send its body, unless an answer is still due before that."""
        if self._refusal is None and not self._serving and not self._ready:
            self._expects = False
            self.write(CONTINUE)

    def _weigh_body(self) -> None:
        """Refuse a body that announces itself as too large, before it comes."""
        limit = self._server.limits.body_bytes
        for name, value in self._headers:
            if name == b"content-length" and int(value) > limit:
                self._refusal = BodyTooLarge(f"the request body is over {limit} bytes")

    def _weigh(self) -> None:
        """Refuse a head that came in one piece with more than a head may have."""
        size = len(self._target) + sum(len(name) + len(value) + 4 for name, value in self._headers)
        if size > self._server.limits.head_bytes:
            self._refusal = HeadTooLarge("the request head is too large")

    def _decline(self, rest: memoryview) -> None:
        """Take a request that invites to another protocol as if it did not, and read on.

        llhttp ends such a request at its head, whatever body it announces; what follows would be read as a request of
        its own. So the parser starts over, with the same head without the invitation.
        """
        while True:
            method, version = self._parser.get_method(), self._parser.get_http_version().encode()
            if method == b"CONNECT":
                self._refusal = self._refusal or MethodNotAllowed("CONNECT is not served")
                return
            fields = [b"%b: %b\r\n" % field for field in self._headers if field[0] != b"upgrade"]
            head = b"%b %b HTTP/%b\r\n%b\r\n" % (method, self._target, version, b"".join(fields))
            self._parser = httptools.HttpRequestParser(self)
            try:
                self._parser.feed_data(head)
                self._parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as upgrade:
                rest = rest[upgrade.args[0] :]
            except httptools.HttpParserError as error:
                self._malformed(error)
                return

    def _malformed(self, error: httptools.HttpParserError) -> None:
        self._refusal = self._refusal or BadRequest(f"not a valid HTTP/1.1 request: {error}")

    def _refuse(self) -> None:
        """Answer what could not be read, and close."""
        error = self._refusal
        assert error is not None
        self._refusal = None
        self._server.observer.answered("", "", error.status, 0.0, error.code or error.type)
        self.write(error_reply(error, close=True))
        self._linger()

    def _linger(self) -> None:
        """Close the sending side, and read on for a moment."""
        self._phase = Phase.REFUSED
        self._ready.clear()
        self._body.clear()
        self.deadline = self._server.deadlines.soon + LINGER_S
        if self.transport.can_write_eof():
            self.transport.write_eof()
        if not self._reading:
            self._reading = True
            self.transport.resume_reading()

    def _discard(self, data: bytes) -> None:
        self._discarded += len(data)
        if self._discarded > LINGER_BYTES:
            self.transport.abort()


def _path_of(target: bytes) -> bytes:
    """Return the path of an absolute-form target (RFC 9112 section 3.2.2); anything else stays what it is."""
    _, scheme, rest = target.partition(b"://")
    return b"/" + rest.partition(b"/")[2] if scheme else target
