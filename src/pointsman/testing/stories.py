"""Plays the driver of a story, so that a test of a flow reads as a dialogue.

    Dialogue(flow).expects_send("b").gets(Lost(Why.REFUSED)).expects_send("c").gets(answer(200)).expects_relay()...

A dialogue that is left unfinished has proved nothing: `ends` or `raises` must be its last line, and as a context
manager it checks that.
"""

from types import TracebackType
from typing import Self

from pointsman.flow.effects import (
    Answer,
    Both,
    Call,
    Command,
    Done,
    Flow,
    Held,
    Hold,
    More,
    Relay,
    Result,
    Send,
)
from pointsman.wire.call import HttpCall
from pointsman.wire.http1 import parse_response_head

__all__ = ["Dialogue", "answer"]


def answer(status: int, body: bytes = b"{}", *, stream: bool = False) -> Answer:
    """Return an answer of an engine: a whole JSON one, or the beginning of an event stream."""
    if stream:
        head = "content-type: text/event-stream\r\ntransfer-encoding: chunked"
        body = b"%x\r\n%b\r\n" % (len(body), body)
    else:
        head = f"content-type: application/json\r\ncontent-length: {len(body)}"
    block = f"HTTP/1.1 {status} X\r\n{head}\r\n\r\n".encode()
    return Answer(parse_response_head(block), body, complete=not stream)


class Dialogue:
    """A story and its driver, line by line."""

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self._ended: BaseException | None = None
        self._over = False
        self.command: Command | None = None
        self._advance(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert error is not None or self._over, f"the story is not over: {self.command}"

    def expects_send(self, worker: str) -> Self:
        """The story asks this worker."""
        assert isinstance(self.command, Send), f"expected a Send to {worker}, got {self._now()}"
        assert self.command.target.worker.id == worker, self.command.target
        return self

    def expects_call(self, name: str, worker: str) -> Self:
        """The story asks this worker something beside the request: the end of a path or a gRPC method."""
        assert isinstance(self.command, Call), f"expected a Call of {name}, got {self._now()}"
        call = self.command.call
        where = call.path.decode() if isinstance(call, HttpCall) else call.method
        assert (where.rpartition("/")[2], call.worker.id) == (name, worker), (where, call.worker)
        return self

    def expects_both(self, prefill: str, decode: str) -> Self:
        """The story asks two workers at once, the first one by a call."""
        assert isinstance(self.command, Both), f"expected Both, got {self._now()}"
        asked = (self.command.call.call.worker.id, self.command.send.target.worker.id)
        assert asked == (prefill, decode), asked
        return self

    def expects_more(self) -> Self:
        """The story waits for more of an answer."""
        assert isinstance(self.command, More), f"expected More, got {self._now()}"
        return self

    def expects_hold(self, until: float) -> Self:
        """The story waits until then for somebody who can take the request."""
        assert isinstance(self.command, Hold), f"expected a Hold, got {self._now()}"
        assert self.command.until == until, self.command.until
        return self

    def looks_again(self, now: float) -> Self:
        """Something changed: the story goes on if it is ready, and waits on if it is not."""
        assert isinstance(self.command, Hold), f"expected a Hold, got {self._now()}"
        return self.gets(Held(ready=True)) if self.command.ready(now) else self

    def expects_relay(self, status: int = 200) -> Self:
        """The story commits to an answer of that status."""
        assert isinstance(self.command, Relay), f"expected a Relay, got {self._now()}"
        assert self.command.answer.head.status == status, self.command.answer
        return self

    def gets(self, result: Result) -> Self:
        """Give the story a result."""
        assert self.command is not None, f"the story is over: {self._now()}"
        self._advance(result)
        return self

    def throws(self, error: BaseException) -> Self:
        """Throw into the story, as the driver does with `ClientGone`."""
        try:
            self.command = self._flow.throw(error)
        except BaseException as raised:
            self.command = None
            self._ended = raised
        return self

    def ends(self) -> None:
        """The story is over, and fine."""
        self._over = True
        assert isinstance(self._ended, StopIteration), f"expected the end, got {self._now()}"

    def raises(self, kind: type[BaseException]) -> BaseException:
        """The story ended with this error, which is returned."""
        self._over = True
        assert isinstance(self._ended, kind), f"expected {kind.__name__}, got {self._now()}"
        return self._ended

    def relays_to_the_end(self, status: int = 200) -> None:
        """The story commits, the answer reaches the client, and that is all."""
        self.expects_relay(status).gets(Done()).ends()

    def _advance(self, result: Result | None) -> None:
        try:
            self.command = self._flow.send(result)  # type: ignore[arg-type]  # None starts it
        except BaseException as raised:
            self.command = None
            self._ended = raised

    def _now(self) -> str:
        return repr(self.command if self.command is not None else self._ended)
