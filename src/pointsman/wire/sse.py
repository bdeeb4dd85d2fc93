"""Server-Sent Events: the two events that the gateway writes itself, and a cutter for those who must look inside.

The relay does not use the cutter: it forwards bytes. It is for the option that writes the public model id into every
event, and for observers. Rules: WHATWG HTML, section 9.2 (lines end with CRLF, LF or CR; a blank line ends an event;
`data` lines are joined by LF, one leading space removed; a line that starts with a colon is a comment).
"""

import re

__all__ = ["DONE", "ERROR_EVENT", "EventCut", "data_of", "ends_event", "ends_stream"]

DONE = b"[DONE]"

ERROR_EVENT = (
    b'data: {"error":{"message":"the upstream stream failed","type":"server_error",'
    b'"param":null,"code":null}}\n\n'
)

BLANK_LINE = re.compile(rb"(?:\r\n|\r(?!\n)|\n){2}")
# The last events of the OpenAI and Messages APIs, as whole lines: model output is JSON-escaped inside a line.
LAST_EVENT = re.compile(
    rb"(?:^|[\r\n])(?:data: ?\[DONE\]"
    rb"|event: ?(?:message_stop|error|response\.(?:completed|failed|incomplete))[\r\n]+data:[^\r\n]*)[\r\n]*\Z"
)
LINE_END = re.compile(rb"\r\n|\n|\r")


def ends_event(tail: bytes) -> bool:
    """Say whether bytes end with a blank line, so that a further event may follow.

    >>> ends_event(b"data: x\\n\\n"), ends_event(b"data: x\\r\\n\\r\\n"), ends_event(b"data: x\\n")
    (True, True, False)
    """
    return tail.endswith((b"\n\n", b"\r\n\r\n", b"\r\r", b"\n\r\n"))


def ends_stream(tail: bytes) -> bool:
    """Say whether bytes end with the event that ends a stream, as a whole line.

    >>> ends_stream(b"data: {}\\n\\ndata: [DONE]\\n\\n"), ends_stream(b'data: {"text":"data: [DONE]')
    (True, False)
    """
    return LAST_EVENT.search(tail) is not None


class EventCut:
    """Cuts a byte stream into whole events; bytes of a piece that is not whole yet are held.

    The concatenation of all that `feed` and `rest` return is the input, byte for byte.
    """

    __slots__ = ("held",)

    def __init__(self) -> None:
        self.held = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the events that are now whole, each with the blank line that ends it."""
        data = self.held + data
        events = []
        start = 0
        for blank in BLANK_LINE.finditer(data):
            end = blank.end()
            # A CR at the very end may be the first half of CRLF: whether the line is blank is not known yet.
            if end == len(data) and data.endswith(b"\r"):
                break
            events.append(data[start:end])
            start = end
        self.held = data[start:]
        return events

    def rest(self) -> bytes:
        """Return what is held at the end of the stream: an event that was never ended."""
        held, self.held = self.held, b""
        return held


def data_of(event: bytes) -> bytes | None:
    """Return the data of an event: its `data` lines joined by LF, or None where it has none (a comment).

    >>> data_of(b"data: a\\r\\ndata:b\\r\\n: ping\\r\\n\\r\\n")
    b'a\\nb'
    """
    lines = []
    for line in LINE_END.split(event):
        field, _, value = line.partition(b":")
        if field == b"data":
            lines.append(value[1:] if value.startswith(b" ") else value)
    return b"\n".join(lines) if lines else None
