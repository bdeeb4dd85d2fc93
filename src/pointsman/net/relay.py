"""The byte pump after the commit: one callback per read, no task, no queue, no parsing that nobody asked for.

While an answer streams, the relay is the protocol of the upstream transport. What it reads goes through the cut, which
finds where the body ends and where a chunk may be added, to the client's transport, as it came. A client that does not
read pauses the engine's socket; nothing piles up in between.

If the engine breaks off, an event stream is ended by the error event, after a blank line where an event was cut in
half; any other body just ends short, which its framing shows.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from math import inf

from pointsman.flow.effects import Broken, Done, Why
from pointsman.net.clock import Deadlines
from pointsman.net.upstream import Upstream
from pointsman.wire.framing import LAST_CHUNK, OpenCut, chunk, payload
from pointsman.wire.http1 import Framing, ProtocolError
from pointsman.wire.shape import Shape
from pointsman.wire.sse import ERROR_EVENT, ends_event, ends_stream

__all__ = ["Relay"]

MISSES = 4
"""Looks without a byte that make a gap: so it ends at most a quarter late, and no time is read per chunk."""


class Relay(asyncio.Protocol):
    """Pumps the rest of one committed answer.

    `write` is the client transport's; `chunked` says whether the client's framing is chunked; `ended` hears Done or
    Broken, once. `gap_s` is the limit between two reads, `total` the moment when the whole request must be over;
    `error_event` ends a broken event stream. `tail` gets the pieces as they pass, and keeps as many of the last as it
    holds.
    """

    __slots__ = (
        "_chunked",
        "_complete",
        "_cut",
        "_deadlines",
        "_ended",
        "_error_event",
        "_events",
        "_framing",
        "_gap_s",
        "_last",
        "_misses",
        "_paused",
        "_pieces",
        "_shape",
        "_total",
        "_touched",
        "_upstream",
        "_write",
        "deadline",
    )

    def __init__(
        self,
        upstream: Upstream,
        write: Callable[[bytes], None],
        *,
        framing: Framing,
        shape: Shape | None,
        chunked: bool,
        events: bool,
        first: bytes,
        gap_s: float,
        total: float,
        deadlines: Deadlines,
        ended: Callable[[Done | Broken], None],
        tail: deque[bytes] | None = None,
        error_event: bytes = ERROR_EVENT,
    ) -> None:
        self._upstream = upstream
        self._cut = upstream.cut
        self._write = write
        self._framing = framing
        self._shape = shape
        self._chunked = chunked
        self._events = events
        self._last = first
        self._gap_s = gap_s / MISSES
        self._total = total
        self._deadlines = deadlines
        self._ended = ended
        self._pieces = tail
        self._error_event = error_event
        self._misses = 0
        self._touched = False
        self._paused = False
        # A stream that was held may have ended already, and its connection not be lost yet.
        self._complete = upstream.ended
        self.deadline = min(deadlines.now() + self._gap_s, total)
        upstream.hand_over(self)
        deadlines.add(self)

    def data_received(self, data: bytes) -> None:
        """Pass on what the engine sent."""
        self._touched = True
        try:
            out = self._cut.feed(data)
        except ProtocolError:
            self.break_off(Why.PROTOCOL)
            return
        if out:
            self._last = out
            if self._pieces is not None:
                self._pieces.append(out)
            self._write(out if self._shape is None else self._shape.feed(out))
        if self._cut.done:
            self._finish()

    def eof_received(self) -> None:
        """Note that the engine ends the connection in good order, which over TLS takes more than a FIN."""
        self._complete = True

    def connection_lost(self, exc: Exception | None) -> None:
        """End an answer that ends with the connection, if it looks whole; else it broke."""
        self._upstream.relay_lost()
        until_close = self._framing is Framing.UNTIL_CLOSE
        if exc is None and self._complete and until_close and self._looks_whole():
            self._close()
            self._write_end()
            self._ended(Done())
        else:
            self._break(Why.RESET)

    def pause(self) -> None:
        """Stop reading from the engine: the client is behind."""
        self._paused = True
        if not self._upstream.closing:
            self._upstream.transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        self._paused = False
        self._touched = True
        if not self._upstream.closing:
            self._upstream.transport.resume_reading()

    def expired(self, now: float) -> None:
        """Break off after a whole gap without a byte; a gap that the client causes does not count."""
        if now >= self._total:
            self.break_off(Why.TIMED_OUT)
            return
        self._misses = 0 if self._touched or self._paused else self._misses + 1
        self._touched = False
        if self._misses >= MISSES:
            self.break_off(Why.TIMED_OUT)
        else:
            self.deadline = min(now + self._gap_s, self._total)

    def break_off(self, why: Why) -> None:
        """Close the engine's connection, and end the answer as broken."""
        self.abort()
        self._break(why)

    def abort(self) -> None:
        """Close the engine's connection, and say nothing: the client has left."""
        self._close()
        self._upstream.transport.set_protocol(self._upstream)
        self._upstream.abort()

    def _finish(self) -> None:
        self._close()
        self._write_end()
        if self._paused:
            self._upstream.transport.resume_reading()
        self._upstream.come_back()
        self._ended(Done())

    def _break(self, why: Why) -> None:
        self._close()
        if self._events and (self._chunked or self._framing is not Framing.COUNTED):
            gap = b"" if ends_event(self._tail()) else b"\n\n"
            event = gap + self._error_event
            self._write(chunk(event) + LAST_CHUNK if self._chunked else event)
        self._ended(Broken(why, told=self._events and self._chunked))

    def _write_end(self) -> None:
        end = self._shape.end() if self._shape is not None else b""
        if end:
            self._write(end)

    def _tail(self) -> bytes:
        """Return the last payload bytes; the line ends of a chunk are no part of them."""
        last = self._last
        return payload(last) if self._framing is Framing.CHUNKED else last

    def _looks_whole(self) -> bool:
        """Say whether a stream that just stopped had said that it ends."""
        cut = self._cut
        return not self._events or (isinstance(cut, OpenCut) and ends_stream(cut.tail))

    def _close(self) -> None:
        self.deadline = inf
        self._deadlines.discard(self)
