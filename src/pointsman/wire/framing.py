"""Where a response body ends, and where it may be cut.

A cut takes the bytes of a body as the engine framed them, in whatever pieces the socket gives, and returns what may be
forwarded now. For chunked bodies that is everything up to the last *whole* chunk: only there may the gateway add a
chunk of its own, such as the error event. The tail is held; it is normally empty, because engines write one event per
chunk and a read sees whole writes.

Every cut has `feed(data) -> bytes`, `done` (the body has ended) and `surplus` (bytes after its end, which no engine
should send). Concatenated, what `feed` returns is the body in its framing, byte for byte, with one exception: a chunk
larger than `HOLD_LIMIT` is forwarded as several, so that no more than that is ever held.
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
LINE_LIMIT = 4096
TRAILER_LIMIT = 65536
TAIL = 65536

CHUNK_LINE = re.compile(rb"([0-9a-fA-F]{1,15})[ \t]*(?:;[^\r\n]*)?\r\n")


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

    __slots__ = ("done", "surplus", "tail")

    def __init__(self) -> None:
        self.done = False
        self.surplus = False
        self.tail = b""

    def feed(self, data: bytes) -> bytes:
        """Return the data."""
        self.tail = (self.tail + data)[-TAIL:]
        return data


class ChunkedCut:
    """A chunked body: forwarded up to its last whole chunk.

    `inside` is how many bytes of an oversized chunk, which is being forwarded as several, are still to come.
    """

    __slots__ = ("done", "held", "inside", "surplus")

    def __init__(self) -> None:
        self.held = b""
        self.inside = 0
        self.done = False
        self.surplus = False

    def feed(self, data: bytes) -> bytes:
        """Return the whole chunks that are here now, in their own framing."""
        if self.held:
            data = self.held + data
            self.held = b""
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
                self._check_partial_line(data, position)
                break
            length = int(line[1], 16)
            if length == 0:
                end = self._end(data, line.end())
                if end < 0:
                    break
                self.done = True
                self.surplus = end < size
                position = size = end
                break
            end = line.end() + length + 2
            if end > size:
                if length > HOLD_LIMIT and size - position > HOLD_LIMIT:
                    out += data[start:position]
                    self.inside = length
                    more, _ = self._oversized(data, line.end())
                    return out + more
                break
            if data[end - 2 : end] != b"\r\n":
                raise ProtocolError("a chunk that does not end where its size says")
            position = end
        if position < size:
            self.held = data[position:size]
        if start == 0 and position == len(data):
            return data
        return out + data[start:position]

    def _oversized(self, data: bytes, start: int) -> tuple[bytes, int]:
        """Forward what is here of an oversized chunk as a chunk of its own; hold what is not payload."""
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
        self.held = data[start + part :]
        return (chunk(data[start : start + part]) if part else b""), len(data)

    def _check_partial_line(self, data: bytes, position: int) -> None:
        """Raise if what stands where a size line must begin can never become one."""
        if len(data) - position > LINE_LIMIT or data.find(b"\n", position) >= 0:
            raise ProtocolError("a bad chunk size")

    def _end(self, data: bytes, position: int) -> int:
        """Return where the body ends, trailers included, or -1 if that is not here yet."""
        if data.startswith(b"\r\n", position):
            return position + 2
        end = data.find(b"\r\n\r\n", position)
        if end >= 0:
            return end + 4
        if len(data) - position > TRAILER_LIMIT:
            raise ProtocolError("endless trailers")
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
    """Return the payload of whole chunks, as `ChunkedCut.feed` returned them.

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
