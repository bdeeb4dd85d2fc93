"""Where a response body ends, and where it may be cut.

A cut takes the bytes of a body as the engine framed them, in whatever pieces the socket gives, and returns what may be
forwarded now. For chunked bodies that is everything up to the last *whole* chunk: only there may the gateway add a
chunk of its own, such as the error event. The tail is held; it is normally empty, because engines write one event per
chunk and a read sees whole writes.

Every cut has `feed(data) -> bytes`, `done` (the body has ended; it is fed no more then) and `surplus` (bytes after its
end, which no engine should send). Concatenated, what `feed` returns is the body in its framing, byte for byte, with one
exception: a chunk larger than `HOLD_LIMIT` may be forwarded as several, so that no more than that is ever held. Every
byte is looked at once, however the body arrives.
"""

import re
from typing import Protocol

from pointsman.wire.http1 import Framing, ProtocolError, ResponseHead

__all__ = [
    "LAST_CHUNK",
    "ChunkedCut",
    "CountedCut",
    "Cut",
    "OpenCut",
    "chunk",
    "cut_for",
    "payload",
]

LAST_CHUNK = b"0\r\n\r\n"
HOLD_LIMIT = 65536
"""The largest chunk, in bytes, that is held until it is whole: events are far smaller."""

TRAILER_LIMIT = 4096
TAIL = 65536
"""How many bytes are kept to look for the last event of a stream: it may carry a whole answer."""

# A size has at most eight digits: nobody has a chunk of 4 GiB. Possessive throughout, so that no input is read twice.
SIZE = rb"([0-9a-fA-F]{1,8}+)[ \t]{0,16}+(?:;[^\x00-\x08\x0a-\x1f\x7f]{0,4096}+)?+"
FIELD = rb"[^\x00-\x08\x0a-\x1f\x7f]"
CHUNK_LINE = re.compile(SIZE + rb"\r\n")
CHUNK_LINE_SO_FAR = re.compile(rb"(?:" + SIZE + rb"\r?+)?+\Z")
TRAILERS = re.compile(rb"(?:" + FIELD + rb"++\r\n)*+\r\n")
TRAILERS_SO_FAR = re.compile(rb"(?:" + FIELD + rb"++\r\n)*+" + FIELD + rb"*+\r?+\Z")


class Cut(Protocol):
    """A body on its way, in the engine's framing."""

    done: bool
    surplus: bool

    def feed(self, data: bytes) -> bytes:
        """Return what may be forwarded now. Raises ProtocolError where the framing is broken."""


class CountedCut:
    """A body of a known length: forwarded as it comes."""

    __slots__ = ("done", "left", "surplus")

    def __init__(self, length: int) -> None:
        self.left = length
        self.done = length == 0
        self.surplus = False

    def feed(self, data: bytes) -> bytes:
        """Return the data, without what exceeds the length."""
        left = self.left - len(data)
        if left > 0:
            self.left = left
            return data
        self.done = True
        if left < 0:
            self.surplus = True
            data = data[: self.left]
        self.left = 0
        return data


class OpenCut:
    """A body that ends with the connection; its `tail` tells whether it was at its end."""

    __slots__ = ("_last", "done", "surplus")

    def __init__(self) -> None:
        self.done = False
        self.surplus = False
        self._last = bytearray()

    def feed(self, data: bytes) -> bytes:
        """Return the data."""
        last = self._last
        last += data
        if len(last) > 2 * TAIL:
            del last[:-TAIL]
        return data

    @property
    def tail(self) -> bytes:
        """The last 64 KiB that passed."""
        return bytes(self._last[-TAIL:])


class ChunkedCut:
    """A chunked body: forwarded up to its last whole chunk.

    `inside` is how many bytes of an oversized chunk, which is being forwarded as several, are still to come.
    """

    __slots__ = ("_held", "_wanted", "done", "inside", "surplus")

    def __init__(self) -> None:
        self._held: list[bytes] = []
        self._wanted = 0
        self.inside = 0
        self.done = False
        self.surplus = False

    @property
    def held(self) -> int:
        """How many bytes wait for the rest of their chunk."""
        return sum(map(len, self._held))

    def feed(self, data: bytes) -> bytes:
        """Return the whole chunks that are here now, in their own framing."""
        if self._held:
            self._held.append(data)
            self._wanted -= len(data)
            if self._wanted > 0:
                return b""
            data = b"".join(self._held)
            self._held.clear()
        out = b""
        position = 0
        size = len(data)
        if self.inside:
            out, position = self._oversized(data, 0)
            if self.inside:
                return out
        start = position
        while position < size:
            line = CHUNK_LINE.match(data, position)
            if line is None:
                if CHUNK_LINE_SO_FAR.match(data, position) is None:
                    raise ProtocolError("a bad chunk size")
                self._hold(data[position:], 1)
                break
            length = int(line[1], 16)
            if length == 0:
                end = self._end(data, line.end())
                if end < 0:
                    self._hold(data[position:], 1)
                    break
                self.done = True
                self.surplus = end < size
                position = end
                break
            end = line.end() + length + 2
            if end > size:
                wanted = end - size
                if length > HOLD_LIMIT:
                    wanted = min(wanted, HOLD_LIMIT + 1 - (size - position))
                    if wanted <= 0:
                        out += data[start:position]
                        self.inside = length
                        return out + self._oversized(data, line.end())[0]
                self._hold(data[position:], wanted)
                break
            if data[end - 2 : end] != b"\r\n":
                raise ProtocolError("a chunk that does not end where its size says")
            position = end
        if start == 0 and position == size:
            return data
        return out + data[start:position]

    def _hold(self, data: bytes, wanted: int) -> None:
        """Keep the beginning of a chunk; before `wanted` more bytes are here, there is nothing new to see."""
        self._held.append(data)
        self._wanted = wanted

    def _oversized(self, data: bytes, start: int) -> tuple[bytes, int]:
        """Return what is here of an oversized chunk, as a chunk of its own, and where that ended."""
        here = len(data) - start
        if here >= self.inside + 2:
            end = start + self.inside
            if data[end : end + 2] != b"\r\n":
                raise ProtocolError("a chunk that does not end where its size says")
            self.inside = 0
            return chunk(data[start:end]), end + 2
        # The last byte waits, so that the closing CRLF always belongs to a piece with payload.
        part = min(here, self.inside - 1)
        self.inside -= part
        if part < here:
            self._hold(data[start + part :], self.inside + 2 - (here - part))
        return (chunk(data[start : start + part]) if part else b""), len(data)

    def _end(self, data: bytes, position: int) -> int:
        """Return where the body ends, trailers included, or -1 if that is not here yet."""
        if data.startswith(b"\r\n", position):
            return position + 2
        trailers = TRAILERS.match(data, position, position + TRAILER_LIMIT)
        if trailers is not None:
            return trailers.end()
        if len(data) - position > TRAILER_LIMIT:
            raise ProtocolError("endless trailers")
        if TRAILERS_SO_FAR.match(data, position) is None:
            raise ProtocolError("a bad trailer")
        return -1


def cut_for(head: ResponseHead) -> Cut:
    """Return the cut for the body that follows a head."""
    if head.framing is Framing.CHUNKED:
        return ChunkedCut()
    if head.framing is Framing.UNTIL_CLOSE:
        return OpenCut()
    return CountedCut(head.length)


def chunk(data: bytes) -> bytes:
    """Return data, which is not empty, as one chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def payload(chunks: bytes) -> bytes:
    """Return the payload of whole chunks, as `ChunkedCut.feed` returned them. Raises ProtocolError for others.

    >>> payload(b"2\\r\\nab\\r\\n1\\r\\nc\\r\\n0\\r\\n\\r\\n")
    b'abc'
    """
    parts = []
    position = 0
    while position < len(chunks):
        line = CHUNK_LINE.match(chunks, position)
        if line is None:
            raise ProtocolError("a bad chunk size")
        length = int(line[1], 16)
        if length == 0:
            break
        parts.append(chunks[line.end() : line.end() + length])
        position = line.end() + length + 2
    return b"".join(parts)
