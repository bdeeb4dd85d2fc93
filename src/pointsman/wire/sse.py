"""Server-Sent Events: the events that the gateway writes itself, and a cutter for those who must look inside.

The relay does not use the cutter: it forwards bytes. It is for the option that writes the public model id into every
event, and for observers. Rules: WHATWG HTML, section 9.2 (lines end with CRLF, LF or CR; a blank line ends an event;
`data` lines are joined by LF, one leading space removed; a line that starts with a colon is a comment).
"""

import re

__all__ = [
    "DONE",
    "ERROR_EVENT",
    "MESSAGES_ERROR_EVENT",
    "EventCut",
    "data_of",
    "ends_event",
    "ends_stream",
    "with_data",
]

DONE = b"[DONE]"

ERROR_EVENT = (
    b'data: {"error":{"message":"the upstream stream failed","type":"server_error",'
    b'"param":null,"code":null}}\n\n'
)

# Clients of the Messages API know events by their names, and errors by the types of that API.
MESSAGES_ERROR_EVENT = (
    b'event: error\ndata: {"type":"error","error":{"type":"api_error",'
    b'"message":"the upstream stream failed","param":null,"code":null}}\n\n'
)

BLANK_LINE = re.compile(rb"(?:\r\n|\r(?!\n)|\n){2}")
# The last events of the OpenAI and Messages APIs, as whole lines: model output is JSON-escaped inside a line.
LAST_EVENT = re.compile(
    rb"(?:^|[\r\n])(?:data: ?\[DONE\]"
    rb"|event: ?(?:message_stop|error|response\.(?:completed|failed|incomplete))[\r\n]+data:[^\r\n]*)[\r\n]*\Z"
)
DATA_LINE = re.compile(rb"(?:\A|(?<=[\r\n]))data(?=[:\r\n]|\Z)(?:: ?([^\r\n]*+))?+")
EVENT_LIMIT = 4 << 20
"""The largest event, in bytes, that is held until it is whole."""


def ends_event(tail: bytes) -> bool:
    """Say whether bytes end with a blank line, so that a further event may follow.

    >>> ends_event(b"data: x\\n\\n"), ends_event(b"data: x\\r\\n\\r\\n"), ends_event(b"data: x\\n")
    (True, True, False)
    """
    return tail.endswith((b"\n\n", b"\n\r\n", b"\n\r", b"\r\r", b"\r\r\n"))


def ends_stream(tail: bytes) -> bool:
    """Say whether bytes end with the event that ends a stream, as a whole line.

    >>> ends_stream(b"data: {}\\n\\ndata: [DONE]\\n\\n"), ends_stream(b'data: {"text":"data: [DONE]')
    (True, False)
    """
    return LAST_EVENT.search(tail) is not None


class EventCut:
    """Cuts a byte stream into whole events; bytes of a piece that is not whole yet are held.

    The concatenation of all that `feed` and `rest` return is the input, byte for byte. An event larger than `limit`
    comes in pieces, so that no more than that is ever held. Every byte is looked at once, however it arrives.
    """

    __slots__ = ("_held", "_limit", "_seen")

    def __init__(self, limit: int = EVENT_LIMIT) -> None:
        self._held = bytearray()
        self._seen = 0
        self._limit = limit

    def feed(self, data: bytes) -> list[bytes]:
        """Return the events that are now whole, each with the blank line that ends it."""
        held = self._held
        held += data
        events = []
        start = 0
        # A blank line that is not whole yet takes up to three bytes.
        for blank in BLANK_LINE.finditer(held, max(self._seen - 3, 0)):
            end = blank.end()
            # A CR at the very end may be the first half of CRLF: whether the line is blank is not known yet.
            if end == len(held) and held.endswith(b"\r"):
                break
            events.append(bytes(held[start:end]))
            start = end
        if len(held) - start > self._limit:
            events.append(bytes(held[start:]))
            start = len(held)
        del held[:start]
        self._seen = len(held)
        return events

    def rest(self) -> bytes:
        """Return what is held at the end of the stream: an event that was never ended."""
        held = bytes(self._held)
        self._held.clear()
        self._seen = 0
        return held


def data_of(event: bytes) -> bytes | None:
    """Return the data of an event: its `data` lines joined by LF, or None where it has none (a comment).

    >>> data_of(b"data: a\\r\\ndata:b\\r\\n: ping\\r\\n\\r\\n")
    b'a\\nb'
    """
    lines = [line[1] or b"" for line in DATA_LINE.finditer(event)]
    return b"\n".join(lines) if lines else None


def with_data(event: bytes, data: bytes) -> bytes:
    """Return the event with other data of as many lines, every other byte as it was.

    >>> with_data(b"id: 7\\ndata:a\\ndata: b\\n\\n", b"A\\nB")
    b'id: 7\\ndata:A\\ndata: B\\n\\n'
    """
    parts: list[bytes] = []
    position = 0
    for line, value in zip(DATA_LINE.finditer(event), data.split(b"\n"), strict=True):
        start, end = line.span(1) if line[1] is not None else (line.end(), line.end())
        parts += event[position:start], value
        position = end
    parts.append(event[position:])
    return b"".join(parts)
