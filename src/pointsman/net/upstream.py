"""One connection to an engine, up to the moment when its answer can be judged.

A connection is idle, or it waits for a head, or it collects a body. It reports to the request that asked it (`Judge`):
an answer, or how the attempt was lost. Once the story commits to an unfinished answer, the driver puts a `Relay` in the
transport's place of this protocol, and the bytes no longer come through here.
"""

import asyncio
import ssl
from enum import Enum
from math import inf
from typing import TYPE_CHECKING, Protocol, cast

import msgspec

from pointsman.flow.effects import Answer, Lost, Why
from pointsman.net.sending import sender
from pointsman.wire.framing import CountedCut, Cut, cut_for, payload
from pointsman.wire.http1 import Framing, ProtocolError, ResponseHead, parse_response_head
from pointsman.wire.sse import ends_stream

if TYPE_CHECKING:
    from pointsman.net.clock import Deadlines
    from pointsman.net.pool import Lane

__all__ = ["Judge", "Upstream"]

HEAD_LIMIT = 65536
"""The largest response head, in bytes, as for requests by default."""

INTERIM_LIMIT = 8
"""How many 1xx responses may come before the answer."""

LARGE = 65536
"""A body from this many bytes on is written beside its head: copying it costs more than a second buffer."""

WHOLE: Cut = CountedCut(0)


class Judge(Protocol):
    """The request that a connection works for."""

    deadline: float
    hold: int
    """Bytes of a plain answer that are held before it is judged, 0 for as many as the limits say."""

    def answered(self, answer: Answer) -> None:
        """Judge an answer; where it is complete, the connection is no longer the request's."""

    def lost(self, lost: Lost) -> None:
        """Learn that the attempt failed; the connection is gone."""

    def stale(self) -> None:
        """Learn that a reused connection had been closed by the engine before it read the request."""


class State(Enum):
    """What the next byte from the engine would be."""

    IDLE = "idle"
    HEAD = "head"
    BODY = "body"
    HANDED = "handed"  # a relay has it
    CLOSED = "closed"


# Reading a member off its class takes Python 3.11 some 70 ns, and happens several times for every request.
IDLE, HEAD, BODY = State.IDLE, State.HEAD, State.BODY


class Upstream(asyncio.Protocol):
    """A connection to one worker."""

    __slots__ = (
        "_buffer",
        "_deadlines",
        "_ended",
        "_head",
        "_held",
        "_interims",
        "_judge",
        "_lane",
        "_send",
        "_size",
        "_used",
        "cut",
        "deadline",
        "state",
        "transport",
    )

    transport: asyncio.Transport
    cut: Cut

    def __init__(self, lane: "Lane", deadlines: "Deadlines") -> None:
        self._lane = lane
        self._deadlines = deadlines
        self._judge: Judge | None = None
        self._head: ResponseHead | None = None
        self._buffer = b""
        self._held: list[bytes] = []
        self._size = 0
        self._interims = 0
        self._used = False
        self._ended = False
        self.deadline = inf
        self.state = State.IDLE

    # What the pool and the driver call.

    @property
    def closing(self) -> bool:
        """Whether the connection can no longer be used."""
        return self.transport.is_closing()

    @property
    def ended(self) -> bool:
        """Whether the engine has ended the connection in good order: `connection_lost` follows."""
        return self._ended

    def ask(self, judge: Judge, head: bytes, body: bytes) -> None:
        """Send a request, whose outcome the judge hears once."""
        self._judge = judge
        self.state = HEAD
        self._interims = 0
        self._wait(self._lane.limits.head_s)
        if len(body) < LARGE:
            self._send(head + body)
        else:
            self.transport.writelines((head, body))

    def more(self, judge: Judge, answer: Answer) -> None:
        """Go on with an answer that was judged and not committed; the judge hears of it again."""
        self._judge = judge
        self._head = answer.head
        self._held = [answer.body]
        self._size = len(answer.body)
        self._wait(self._lane.limits.gap_s)

    def so_far(self, answer: Answer) -> Answer:
        """Return what has come of an answer that is waited for, and wait no longer."""
        self._judge = None
        return Answer(answer.head, self._joined(), False)

    def hold_on(self) -> None:
        """Read no more of an answer that was judged, until `go_on`."""
        self.transport.pause_reading()

    def go_on(self) -> bool:
        """Read again, and tell whether there is still somebody to read from."""
        if self.state is State.CLOSED or self.transport.is_closing():
            return False
        self.transport.resume_reading()
        return True

    def hand_over(self, protocol: asyncio.BaseProtocol) -> None:
        """Let a relay have the connection, for the rest of this answer."""
        self._judge = None
        self.state = State.HANDED
        self.deadline = inf
        self.transport.set_protocol(protocol)

    def come_back(self) -> None:
        """Return from a relay at the end of an answer, to be used again where that is possible."""
        self.transport.set_protocol(self)
        self._rest()

    def relay_lost(self) -> None:
        """Note that the connection closed while a relay had it."""
        self._close()

    def give_up(self, lost: Lost) -> None:
        """Lose the attempt at once, unless its answer has been committed."""
        if self.state is State.HEAD or self.state is State.BODY:
            self._lose(lost)

    def abort(self) -> None:
        """Close at once; nobody is told. That is how an engine learns to stop generating."""
        self._judge = None
        self.transport.abort()

    def discard(self) -> None:
        """Count as closed a connection that was never opened, or not to its end."""
        if self.state is not State.CLOSED:
            self._close()

    # What the transport calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start to be watched."""
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self._send = sender(self.transport)
        self._deadlines.add(self)

    def data_received(self, data: bytes) -> None:
        """Take bytes of the head or of the body."""
        try:
            if self.state is HEAD:
                self._take_head(data)
            elif self.state is BODY:
                self._take_body(data)
            else:  # An engine that speaks unasked cannot be trusted with a request.
                self.transport.abort()
        except ProtocolError as error:
            self._lose(Lost(Why.PROTOCOL, f"worker {self._lane.worker.id}: {error}"))

    def eof_received(self) -> None:
        """Note that the engine ends the connection in good order: by a FIN, or over TLS by its close_notify.

        Over TLS a FIN alone ends it too, but that can be forged, so a body must not end by it.
        """
        self._ended = True

    def connection_lost(self, exc: Exception | None) -> None:
        """Judge what is there, if the body may end this way; else the attempt is lost."""
        if self.state is State.CLOSED:
            return
        judge, state = self._judge, self.state
        self._close()
        if judge is None:
            return
        self._judge = None
        head = self._head
        if state is State.HEAD and not self._buffer and not self._interims and self._used:
            judge.stale()
        elif (
            state is State.BODY
            and exc is None
            and self._ended
            and head is not None
            and head.framing is Framing.UNTIL_CLOSE
            and self._is_whole(head)
        ):
            judge.answered(Answer(head, b"".join(self._held), True))
        else:
            # An alert, such as that it wants a certificate of ours, comes after the handshake in TLS 1.3.
            why = f": {exc}" if isinstance(exc, ssl.SSLError) else ""
            detail = f"worker {self._lane.worker.id} closed the connection{why}"
            judge.lost(Lost(Why.RESET, detail))

    def expired(self, now: float) -> None:
        """Give up waiting."""
        self.deadline = inf
        if self.state is State.IDLE:
            self.transport.abort()
        elif self.state is State.HEAD:
            self._lose(self._late("response head"))
        elif self.state is State.BODY:
            self._lose(self._late("next byte" if self._size else "first body byte"))

    # The rest is how.

    def _take_head(self, data: bytes) -> None:
        if self._buffer:
            data = self._buffer + data
        while True:
            end = data.find(b"\r\n\r\n") + 4
            if end < 4:
                if len(data) > HEAD_LIMIT or b"\n\n" in data:
                    raise ProtocolError("a response head without its end")
                self._buffer = data
                return
            head = parse_response_head(data[:end])
            data = data[end:]
            if head.status >= 200:
                break
            self._interims += 1
            if self._interims > INTERIM_LIMIT:
                raise ProtocolError("too many interim responses")
        self._buffer = b""
        self._head = head
        usual = head.framing is Framing.COUNTED and not head.event_stream
        if usual and len(data) == head.length > 0:
            self.cut = WHOLE  # The usual plain answer: all of it, in one read.
            self._complete(head, data)
            return
        self.cut = cut_for(head)
        self._held.clear()
        self._size = 0
        self.state = BODY
        if data or self.cut.done:
            self._take_body(data)
        else:
            self._wait(self._lane.limits.first_byte_s)

    def _take_body(self, data: bytes) -> None:
        head, cut = self._head, self.cut
        assert head is not None
        out = cut.feed(data)
        if out:
            self._held.append(out)
            self._size += len(out)
        if cut.done:
            self._complete(head, self._joined())
        elif out and ((head.event_stream and head.status < 300) or self._size >= self._limit()):
            judge = self._judge
            assert judge is not None
            # From here on the driver has the connection; its next command says what becomes of it.
            self._judge = None
            judge.answered(Answer(head, self._joined(), False))
        else:
            self._wait(self._lane.limits.gap_s)

    def _complete(self, head: ResponseHead, body: bytes) -> None:
        if head.event_stream and head.status < 300 and not self._payload(head, body):
            raise ProtocolError("an event stream without an event")
        judge = self._judge
        assert judge is not None
        self._judge = None
        self._rest()
        judge.answered(Answer(head, body, True))

    def _rest(self) -> None:
        """Go back to the pool, or close where the answer or the engine does not allow that."""
        head = self._head
        self._head = None
        self._used = True
        self.state = IDLE
        self.deadline = inf
        if head is not None and head.reusable and not self.cut.surplus:
            self._lane.give(self)
        else:
            self.transport.abort()

    def _limit(self) -> int:
        judge = self._judge
        assert judge is not None
        return judge.hold or self._lane.limits.hold_bytes

    def _is_whole(self, head: ResponseHead) -> bool:
        """Say whether a body that only the end of the connection ended can be trusted to be whole."""
        body = b"".join(self._held)
        if head.event_stream and head.status < 300 and not head.encoded:
            return ends_stream(body)  # It was held after its first event, as a cascade does.
        if not (head.get(b"content-type") or b"").startswith(b"application/json"):
            return bool(body)
        try:
            msgspec.json.decode(body, type=msgspec.Raw)
        except msgspec.DecodeError:
            return False
        return True

    def _joined(self) -> bytes:
        held = self._held
        body = held[0] if len(held) == 1 else b"".join(held)
        self._held = []
        return body

    def _payload(self, head: ResponseHead, body: bytes) -> bytes:
        return payload(body) if head.framing is Framing.CHUNKED else body

    def _wait(self, limit_s: float) -> None:
        judge = self._judge
        assert judge is not None
        deadline = self._deadlines.soon + limit_s
        self.deadline = deadline if deadline < judge.deadline else judge.deadline

    def _late(self, what: str) -> Lost:
        return Lost(Why.TIMED_OUT, f"worker {self._lane.worker.id} sent no {what} within the limit")

    def _lose(self, lost: Lost) -> None:
        judge = self._judge
        self._judge = None
        self._close()
        self.transport.abort()
        if judge is not None:
            judge.lost(lost)

    def _close(self) -> None:
        self.state = State.CLOSED
        self.deadline = inf
        self._deadlines.discard(self)
        self._lane.lost(self)
