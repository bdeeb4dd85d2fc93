"""HTTP/1.1 heads: what is read of them, and how they are written.

Parsing itself is llhttp's (through httptools), which refuses what smuggling is made of: Content-Length beside
Transfer-Encoding, two Content-Lengths, bare LF, folded lines, bad tokens. This file adds the rules of a proxy: which
headers pass (RFC 9110 section 7.6.1), which ones are ours, and where a message ends (RFC 9112 section 6.3).
Header names are lower case throughout.
"""

import re
from enum import Enum
from functools import lru_cache
from http import HTTPStatus

import httptools

__all__ = [
    "CONTINUE",
    "Framing",
    "Headers",
    "ProtocolError",
    "ResponseHead",
    "identity_of",
    "parse_response_head",
    "render_request",
    "render_response",
    "status_line",
    "traceparent",
]

Headers = list[tuple[bytes, bytes]]

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
NOT_UPSTREAM = HOP_BY_HOP | {
    b"api-key",
    b"authorization",
    b"content-length",
    b"expect",
    b"host",
    b"traceparent",
    b"tracestate",
    b"x-api-key",
    b"x-request-id",
}
NOT_DOWNSTREAM = HOP_BY_HOP | {b"content-length", b"x-request-id"}
IDENTITY = frozenset((b"authorization", b"x-api-key", b"x-request-id"))
INTERNAL = b"x-tl-"
# What a Connection header may not take out of a message: without these the rest cannot be read.
ESSENTIAL = frozenset((b"content-encoding", b"content-type"))
USUAL_CONNECTIONS = frozenset((b"keep-alive", b"close", b"Keep-Alive", b"Close"))

KEPT_HEADS = 1024
KEPT_BYTES = 2048
"""How many parsed response heads are kept, and how many bytes each may have: 2 MiB at most."""

REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
TRACEPARENT = re.compile(rb"00-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-([0-9a-f]{2})")

REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}
STATUS_LINES = {n: b"HTTP/1.1 %d %b\r\n" % (n, REASONS.get(n, b"Status")) for n in range(200, 600)}


class ProtocolError(Exception):
    """The peer does not speak HTTP/1.1 as RFC 9112 has it."""


class Framing(Enum):
    """Where a message body ends."""

    NONE = "none"
    COUNTED = "counted"
    CHUNKED = "chunked"
    UNTIL_CLOSE = "until close"


class ResponseHead:
    """The head of an engine's response. It never changes, and is shared by equal responses.

    `length` is the body's bytes for COUNTED, else 0; `reusable` says whether the connection may carry another request
    after the body; `event_stream` whether the body is Server-Sent Events; `encoded` whether it has a content coding.
    `lines` is what of it passes to the client, status line included.
    """

    __slots__ = (
        "encoded",
        "event_stream",
        "framing",
        "headers",
        "length",
        "lines",
        "reusable",
        "status",
    )

    def __init__(self, status: int, headers: Headers, keep_alive: bool) -> None:
        self.status = status
        self.headers = headers
        self.length = 0
        self.event_stream = False
        self.encoded = False
        self.lines = status_line(status) + _end_to_end(headers)
        framing = Framing.UNTIL_CLOSE
        for name, value in headers:
            # llhttp has seen to it that this is the only one, and that no Transfer-Encoding is beside it.
            if name == b"content-length":
                framing = Framing.COUNTED
                self.length = int(value)
            elif name == b"transfer-encoding":
                if framing is Framing.CHUNKED or value.strip().lower() != b"chunked":
                    raise ProtocolError("a transfer coding other than chunked, once")
                framing = Framing.CHUNKED
            elif name == b"content-type":
                self.event_stream = value[:17].lower() == b"text/event-stream"
            elif name == b"content-encoding":
                self.encoded = value.strip().lower() != b"identity"
        if status == 204 or status == 304:
            framing = Framing.NONE
            self.length = 0  # what it says is about the answer to another request
        self.framing = framing
        self.reusable = keep_alive and framing is not Framing.UNTIL_CLOSE

    def get(self, name: bytes) -> bytes | None:
        """Return the value of the first header of that name."""
        return next((value for key, value in self.headers if key == name), None)


class _Collector:
    """Collects what httptools reports of a head."""

    __slots__ = ("complete", "headers", "keep_alive", "parser")

    def __init__(self) -> None:
        self.headers: Headers = []
        self.complete = False
        self.keep_alive = False
        self.parser = httptools.HttpResponseParser(self)

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.complete = True
        # Asked here, because llhttp forgets it where the message ends with its head.
        self.keep_alive = self.parser.should_keep_alive()


def parse_response_head(head: bytes) -> ResponseHead:
    """Parse a response head, given from its status line to its blank line.

    Engines send the same few heads over and over (a date changes once a second), so what was parsed last is kept.
    Raises ProtocolError for anything that RFC 9112 does not allow, and for 101 (nobody asked to switch protocols).
    """
    return _parse_small(head) if len(head) < KEPT_BYTES else _parse(head)


def _parse(head: bytes) -> ResponseHead:
    if not head.startswith(b"HTTP/1."):
        raise ProtocolError("not an HTTP/1 response")
    collector = _Collector()
    parser = collector.parser
    try:
        parser.feed_data(head)
    except httptools.HttpParserUpgrade:
        raise ProtocolError("the engine switched protocols") from None
    except httptools.HttpParserError as error:
        raise ProtocolError(str(error)) from None
    finally:
        del collector.parser  # the two refer to each other
    if not collector.complete:
        raise ProtocolError("an incomplete response head")
    status = parser.get_status_code()
    if status < 100:
        raise ProtocolError("a status below 100")
    # HTTP/1.0 had no agreed rules for reuse, and its framing is not to be trusted (RFC 9112 section 6.1).
    keep_alive = collector.keep_alive and head.startswith(b"HTTP/1.1")
    return ResponseHead(status, collector.headers, keep_alive)


_parse_small = lru_cache(maxsize=KEPT_HEADS)(_parse)


def identity_of(headers: Headers) -> tuple[str | None, bytes | None]:
    """Return the client's request id and its `Authorization`.

    The id is the first that is 1 to 128 bytes, all of them visible ASCII. `X-API-Key`, which clients of the Messages
    API send, is a bearer key too. Of several `Authorization` headers, or of two keys that differ, none counts: whoever
    stands before the gateway may have looked at another one.

    >>> identity_of([(b"x-api-key", b"sk-1"), (b"x-request-id", b"r")])
    ('r', b'Bearer sk-1')
    """
    request_id = authorization = key = None
    for name, value in headers:
        if name in IDENTITY:
            if name == b"authorization":
                authorization = value if authorization is None else b""
            elif name == b"x-api-key":
                key = value if key is None else b""
            elif request_id is None:
                value = value.strip(b" \t")
                if REQUEST_ID.fullmatch(value):
                    request_id = value.decode("ascii")
    if key is not None:
        bearer = b"Bearer %b" % key.strip(b" \t")
        authorization = bearer if authorization in (None, bearer) else b""
    return request_id, authorization


def traceparent(incoming: bytes | None, random_hex: str) -> tuple[bytes, bool]:
    """Return the W3C traceparent for the engine, and whether it continues the client's trace.

    `random_hex` is 48 random hex digits: a trace id for a new trace, and a span id. Source: W3C Trace Context.

    >>> traceparent(None, "a" * 32 + "b" * 16)
    (b'00-aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa-bbbbbbbbbbbbbbbb-01', False)
    """
    span = random_hex[32:48].encode()
    known = TRACEPARENT.fullmatch(incoming) if incoming is not None else None
    if known is not None:
        return b"00-%b-%b-%b" % (known[1], span, known[2]), True
    return b"00-%b-%b-01" % (random_hex[:32].encode(), span), False


def render_request(
    headers: Headers, request_id: str, random_hex: str, ours: bytes = b""
) -> tuple[bytes, bytes, bytes]:
    """Return what every attempt sends of the head, without the request line, and the two ends of its trace.

    Those are the traceparent that the engine gets, and the client's own, b"" where that is none.

    Dropped: hop-by-hop headers and those that `Connection` names, credentials, `x-tl-*`, and what is set anew. `ours`
    are further whole lines. `Host` and `Content-Length` belong to the attempt and are left to it.
    """
    named: frozenset[bytes] = frozenset()
    parent = state = None
    lines = []
    for name, value in headers:
        if name in NOT_UPSTREAM:
            if name == b"connection":
                if value not in USUAL_CONNECTIONS:
                    named |= _named(value)
            # Repeated, they are one list; that is none that a valid traceparent could be.
            elif name == b"traceparent":
                parent = value if parent is None else b"%b,%b" % (parent, value)
            elif name == b"tracestate":
                state = value if state is None else b"%b,%b" % (state, value)
        elif not name.startswith(INTERNAL):
            lines.append(b"%b: %b\r\n" % (name, value))
    if named:
        lines = [line for line in lines if line.partition(b":")[0] not in named]
    trace, continued = traceparent(parent, random_hex)
    lines.append(b"x-request-id: %b\r\ntraceparent: %b\r\n" % (request_id.encode(), trace))
    if not continued:
        parent = b""
    elif state is not None:
        lines.append(b"tracestate: %b\r\n" % state)
    lines.append(ours)
    return b"".join(lines), trace, parent or b""


def render_response(head: ResponseHead, ours: bytes, body: bytes) -> bytes:
    """Render what the client gets: the engine's end-to-end headers, `ours` (whole lines) after them, and body bytes.

    `ours` carries the framing, the connection header and the request id.
    """
    return b"%b%b\r\n%b" % (head.lines, ours, body)


def status_line(status: int) -> bytes:
    """Return the pre-rendered status line, CRLF included."""
    return STATUS_LINES.get(status) or b"HTTP/1.1 %d Status\r\n" % status


def _end_to_end(headers: Headers) -> bytes:
    """Render the headers of a response that pass to the client."""
    dropped: frozenset[bytes] = NOT_DOWNSTREAM
    for name, value in headers:
        if name == b"connection":
            dropped |= _named(value)
    return b"".join(
        [
            b"%b: %b\r\n" % (name, value)
            for name, value in headers
            if name not in dropped and not name.startswith(INTERNAL)
        ]
    )


def _named(connection: bytes) -> frozenset[bytes]:
    """Return the headers that a Connection header names, except those that must not be removed this way."""
    return frozenset(name.strip().lower() for name in connection.split(b",")) - ESSENTIAL
