"""Runs one story: performs its commands on sockets and feeds the results back.

There is no task and no future per request. A story is a generator; whatever happens next on a socket, an answer, a
loss, the end of a relay, calls `_run` with the result, which runs the story up to its next command. Between two
commands a request is nothing but this object.

`_commit` is the one place where anything reaches the client.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from pointsman.errors import GatewayError, InternalError, NoCapacity
from pointsman.flow.effects import (
    Answer,
    Both,
    Broken,
    Call,
    ClientGone,
    Command,
    Done,
    Encode,
    Encoded,
    Flow,
    Held,
    Hold,
    Lost,
    More,
    Outcome,
    Pair,
    Relay,
    Result,
    Send,
    Why,
)
from pointsman.flow.exchange import CLIENT_GONE, Exchange, Stage
from pointsman.net.pool import Lane
from pointsman.net.relay import Relay as Pump
from pointsman.net.upstream import Upstream
from pointsman.wire.apis import is_messages
from pointsman.wire.body import with_fields, with_model
from pointsman.wire.form import with_model_at
from pointsman.wire.framing import payload
from pointsman.wire.http1 import Framing, ResponseHead, render_response
from pointsman.wire.replies import error_reply
from pointsman.wire.shape import Chunked, Edit, Edited, Shape, Unchunked, edited_json, public_json
from pointsman.wire.sse import ERROR_EVENT, MESSAGES_ERROR_EVENT

if TYPE_CHECKING:
    from pointsman.net.dataplane import DataPlane
    from pointsman.net.downstream import Downstream, Request

__all__ = ["Drive"]

logger = logging.getLogger(__name__)

CLIENT_CLOSED = 499  # what nginx logs for it; no client ever sees it
DONE = Done()
TAIL_BYTES = 4096
"""How much of the end of what came first is kept for whoever wants to see the end of an answer."""

FULL = 429


class _Half(Struct, eq=False):
    """What is there of two things that are asked for at once."""

    called: Outcome | None = None
    answer: Answer | Lost | None = None


class Drive(Struct, eq=False):
    """One request on its way: the story, the client, and the connection that is asked right now."""

    _plane: "DataPlane"
    _client: "Downstream"
    _request: "Request"
    _flow: Flow
    _head: bytes
    x: Exchange
    deadline: float
    _lane: Lane | None = None
    _upstream: Upstream | None = None
    _connecting: asyncio.Task[None] | None = None
    _give_up_calling: Callable[[], None] | None = None
    _pair: "_Half | None" = None
    _pump: Pump | None = None
    _enough: asyncio.TimerHandle | None = None
    hold: int = 0
    _sent_head: bytes = b""
    _sent_body: bytes = b""

    def start(self) -> None:
        """Run the story up to its first command."""
        self.x.now = self.x.started
        self._step(None)

    # The story's commands.

    def _run(self, result: Result) -> None:
        self.x.now = self._plane.deadlines.now()
        self._step(result)

    def _step(self, result: Result | None) -> None:
        try:
            while True:
                command = self._flow.send(result)  # type: ignore[arg-type]  # None starts it
                if self.x.after:
                    # Not at the end alone: what a worker holds in vain, others may be waiting for.
                    self._plane.calls.later(self.x.after)
                if type(command) is Send:
                    self._send(command)
                    return
                if type(command) is Relay:
                    result = self._relay(command)
                    if result is None:
                        return
                else:
                    self._other(command)
                    return
        except StopIteration:
            self._end()
        except GatewayError as error:
            self._answer(error)
        except Exception:
            logger.exception("request %s failed", self.x.request_id)
            self._plane.observer.fault("driver")
            self._fail()

    def _other(self, command: Command) -> None:
        """Perform what few stories ask for."""
        x = self.x
        if isinstance(command, Hold):
            self._give_up_calling = self._plane.holding.hold(command, self._called)
            if self._give_up_calling is None:
                self._run(Held(ready=False))
            return
        if isinstance(command, Call | Encode):
            # What an answer that was not taken came over is of no more use.
            if self._upstream is not None:
                self._drop_upstream()
            if isinstance(command, Encode):
                encoded = self._plane.tokenizing.at_once(command)
                if encoded is not None:
                    self._run(encoded)
                    return
                encoding = self._plane.tokenizing.encode(command, x.deadline, self._called)
                self._give_up_calling = encoding.cancel
            else:
                self._make(command)
            return
        if isinstance(command, Both):
            self._pair = _Half()
            self._send(command.send)
            self._make(command.call)
            return
        assert isinstance(command, More)
        upstream = self._upstream
        assert upstream is not None, "there is more of an unfinished answer only"
        if command.until < self.deadline:
            wait_s = max(command.until - x.now, 0.0)
            loop = asyncio.get_running_loop()
            self._enough = loop.call_later(wait_s, self._waited, command.answer)
        upstream.more(self, command.answer)

    def _make(self, command: Call) -> None:
        calls, settle = self._plane.calls, command.settle
        calling = calls.call(command.call, self.x.deadline, self._called)
        self._give_up_calling = (
            calling.cancel if settle is None else lambda: calls.settle(calling, settle)
        )

    def _called(self, outcome: Outcome | Encoded | Held) -> None:
        self._give_up_calling = None
        if self._pair is None:
            self._run(outcome)
            return
        assert not isinstance(outcome, Encoded | Held)
        if not _good(outcome):
            self._drop_upstream()
            self._run(Pair(outcome, None))
        elif self._pair.answer is None:
            self._pair.called = outcome
        else:
            self._run(Pair(outcome, self._taken_up(self._pair.answer)))

    def _half(self, answer: Answer | Lost) -> None:
        """Take the one of two that is the request itself; the other may still be under way."""
        pair = self._pair
        assert pair is not None
        if not _good(answer):
            self._pair = None
            self._stop_calling()
            self._run(Pair(None, answer))
        elif pair.called is not None:
            self._pair = None
            self._run(Pair(pair.called, answer))
        else:
            pair.answer = answer
            if self._upstream is not None:
                # Nobody takes what else comes before the story has heard of the other one.
                self._upstream.hold_on()

    def _taken_up(self, answer: Answer | Lost) -> Answer | Lost:
        """Return an answer that has waited, or that its connection was lost meanwhile."""
        self._pair = None
        upstream = self._upstream
        if upstream is None or upstream.go_on():
            return answer
        self._upstream = None
        return Lost(Why.RESET, "the connection was lost before the answer was wanted")

    def _stop_calling(self) -> None:
        give_up, self._give_up_calling = self._give_up_calling, None
        if give_up is not None:
            give_up()

    def _waited(self, answer: Answer) -> None:
        """Tell the story that nothing more came in time."""
        self._enough = None
        upstream = self._upstream
        assert upstream is not None
        self._run(upstream.so_far(answer))

    def _wait_no_more(self) -> None:
        assert self._enough is not None
        self._enough.cancel()
        self._enough = None

    def _send(self, command: Send) -> None:
        if self._upstream is not None:
            self._drop_upstream()
        target = command.target
        request = self._request
        body = request.body
        if command.fields:
            model = {"model": msgspec.json.encode(target.served_model)}
            body = with_fields(body, {**command.fields, **model})
        elif target.served_model != self.x.model:
            place = self.x.request.model_at
            body = (
                with_model(body, target.served_model)
                if place is None
                else with_model_at(body, place, target.served_model)
            )
        path = b"%b?%b" % (request.path, request.query) if request.query else request.path
        self._lane = lane = self._plane.pool.lane(target.worker)
        self._sent_body = body
        head = self._head
        if command.headers:
            head += command.headers
        self.hold = command.hold
        if command.request_id:
            head = _renamed(head, self.x.request_id, command.request_id)
        elif self.x.engine_id and target.worker.dialect != "tl":
            # The contract of tl has engines know a request by the id that its client gave it.
            head = _renamed(head, self.x.request_id, self.x.engine_id)
        self._sent_head = b"%b%d\r\n%b\r\n" % (lane.opening(path), len(body), head)
        upstream = lane.take()
        if upstream is not None:
            self._upstream = upstream
            upstream.ask(self, self._sent_head, body)
        else:
            self._connecting = lane.connect(self)

    def _relay(self, command: Relay) -> Result | None:
        """Commit to an answer. Returns None where the rest of it is still to come."""
        answer = command.answer
        head = answer.head
        request = self._request
        edits = command.edits
        if edits or self._plane.public_models:
            edits = self._edits(head, edits)
        tail = self.x.tail
        if tail is not None and not tail:
            tail.append(answer.body[-TAIL_BYTES:])
        if answer.complete:
            # The connection is back in the pool; what is left of an earlier, dropped one is not.
            body = answer.body
            chunked = head.framing is Framing.CHUNKED
            if chunked and (request.http10 or edits):
                body = payload(body)
                chunked = False
            if edits:
                body = self._edited_body(head, body, edits)
            if chunked:
                framing = b"transfer-encoding: chunked\r\n"
            elif head.framing is Framing.NONE:
                framing = b""
            else:
                framing = b"content-length: %d\r\n" % len(body)
            if head.status == FULL and head.get(b"retry-after") is None:
                framing += b"retry-after: 1\r\n"
            self._commit(head.status, render_response(head, self._ours(framing), body))
            return DONE
        upstream = self._upstream
        assert upstream is not None, "an unfinished answer has its connection"
        shape = self._shape(head, edits)
        chunked = head.framing is Framing.CHUNKED if shape is None else not request.http10
        if chunked:
            framing = b"transfer-encoding: chunked\r\n"
        elif head.framing is Framing.COUNTED and shape is None:
            framing = b"content-length: %d\r\n" % head.length
        else:
            framing = b""
            request.keep_alive = False
        first = answer.body if shape is None else shape.feed(answer.body)
        self._commit(head.status, render_response(head, self._ours(framing), first))
        limits = self._plane.upstream_limits
        self._pump = Pump(
            upstream,
            self._client.write,
            framing=head.framing,
            shape=shape,
            chunked=chunked,
            events=head.event_stream and not head.encoded,
            first=answer.body,
            gap_s=limits.gap_s,
            total=self.deadline,
            deadlines=self._plane.deadlines,
            ended=self._pumped,
            tail=self.x.tail,
            error_event=MESSAGES_ERROR_EVENT if is_messages(self.x.path) else ERROR_EVENT,
        )
        if self._client.paused:
            self._pump.pause()
        return None

    def _pumped(self, result: Done | Broken) -> None:
        self._pump = None
        self._upstream = None
        if isinstance(result, Broken) and not result.told:
            self._request.keep_alive = False
        self._run(result)

    # What the pool and the connection say.

    def connected(self, upstream: Upstream) -> None:
        """Send, on a new connection."""
        self._connecting = None
        self._upstream = upstream
        upstream.ask(self, self._sent_head, self._sent_body)

    def unreachable(self, lost: Lost) -> None:
        """Tell the story that there is no connection."""
        self._connecting = None
        self._tell_lost(lost)

    def answered(self, answer: Answer) -> None:
        """Tell the story what the engine answered."""
        if answer.complete:
            self._upstream = None
        if self._enough is not None:
            self._wait_no_more()
        if self._pair is not None:
            self._half(answer)
            return
        self.x.now = self._plane.deadlines.now()
        self._step(answer)

    def lost(self, lost: Lost) -> None:
        """Tell the story that the attempt failed."""
        self._upstream = None
        if self._enough is not None:
            self._wait_no_more()
        self._tell_lost(lost)

    def _tell_lost(self, lost: Lost) -> None:
        if self._pair is not None:
            self._half(lost)
        else:
            self._run(lost)

    def stale(self) -> None:
        """Send once more on a fresh connection: the engine had closed the idle one. The worker did nothing wrong."""
        assert self._lane is not None
        self._upstream = None
        self._plane.observer.stale_resend()
        self._connecting = self._lane.connect(self)

    # What the client's side says.

    def client_gone(self) -> None:
        """Close the engine's connection at once, and end the story."""
        self._drop_upstream()
        x = self.x
        x.now = self._plane.deadlines.now()
        if x.stage is Stage.OPEN:
            x.status = CLIENT_CLOSED
        x.error = CLIENT_GONE
        with suppress(ClientGone, StopIteration):
            self._flow.throw(ClientGone())
        self._close()

    def pause(self) -> None:
        """Stop reading from the engine."""
        if self._pump is not None:
            self._pump.pause()

    def resume(self) -> None:
        """Read on."""
        if self._pump is not None:
            self._pump.resume()

    def stop(self) -> None:
        """End now: the gateway's drain deadline has passed."""
        self._request.keep_alive = False
        self.x.now = self._plane.deadlines.now()
        if self._pump is not None:
            self._pump.break_off(Why.SHUTDOWN)
        else:
            self._flow.close()
            self._answer(NoCapacity("the gateway is shutting down"))

    # The end.

    def _commit(self, status: int, data: bytes) -> None:
        """Let the first bytes out: from here on there is no other worker."""
        x = self.x
        assert x.stage is Stage.OPEN, "a request commits once"
        x.stage = Stage.COMMITTED
        x.status = status
        x.first_byte_at = x.now
        self._client.write(data)

    def _answer(self, error: GatewayError) -> None:
        """Answer with an error of the gateway's own."""
        self._drop_upstream()
        x = self.x
        x.error = error.code or error.type
        headers = b"x-request-id: %b\r\n" % x.request_id.encode()
        close, messages = not self._keep, is_messages(x.path)
        self._commit(error.status, error_reply(error, headers, close=close, messages=messages))
        self._end()

    def _fail(self) -> None:
        """End after an exception that nobody foresaw."""
        self._drop_upstream()
        if self.x.stage is Stage.OPEN:
            self._answer(InternalError("the gateway failed on this request"))
        else:
            self.x.error = "internal_error"
            self._request.keep_alive = False
            self._end()

    def _end(self) -> None:
        self._close()
        self._client.finish(self._request.keep_alive and not self._plane.draining)

    def _close(self) -> None:
        x = self.x
        if x.after:
            self._plane.calls.later(x.after)
        x.stage = Stage.CLOSED
        x.finished_at = x.now
        self._plane.observer.finished(x)

    def _drop_upstream(self) -> None:
        """Stop what is being asked: closing its connection is how an engine learns to abort."""
        if self._connecting is not None:
            self._connecting.cancel()
            self._connecting = None
        self._stop_calling()
        self._pair = None
        if self._enough is not None:
            self._wait_no_more()
        if self._pump is not None:
            self._pump.abort()
            self._pump = None
        elif self._upstream is not None:
            self._upstream.abort()
        self._upstream = None

    @property
    def _keep(self) -> bool:
        return self._request.keep_alive and not self._plane.draining

    def _ours(self, framing: bytes) -> bytes:
        """Return the headers of the gateway's own in an answer."""
        x = self.x
        if x.principal.debug and x.tries:
            framing += b"x-tl-route: %b\r\n" % x.worker_id.encode()
        return b"%bx-request-id: %b\r\nconnection: %b\r\n" % (
            framing,
            x.request_id.encode(),
            b"keep-alive" if self._keep else b"close",
        )

    def _edits(self, head: ResponseHead, edits: Sequence[Edit]) -> Sequence[Edit]:
        """Return what is to be changed in the JSON of an answer, where it has any that can be read."""
        if head.encoded or head.framing is Framing.NONE:
            return ()
        if not self._plane.public_models:
            return edits
        model = self._plane.public_model(self.x)
        return (*edits, lambda body: public_json(body, model))

    def _shape(self, head: ResponseHead, edits: Sequence[Edit]) -> Shape | None:
        """Return what must change on the way of an unfinished answer; normally nothing."""
        http10 = self._request.http10
        chunks = head.framing is Framing.CHUNKED
        if edits and head.event_stream:
            return Edited(edits, chunked_in=chunks, chunked_out=not http10)
        if chunks:
            return Unchunked() if http10 else None
        return Chunked() if head.framing is Framing.UNTIL_CLOSE and not http10 else None

    def _edited_body(self, head: ResponseHead, body: bytes, edits: Sequence[Edit]) -> bytes:
        if head.event_stream:
            shape = Edited(edits, chunked_in=False, chunked_out=False)
            return shape.feed(body) + shape.end()
        return edited_json(body, edits)


def _good(outcome: Outcome) -> bool:
    return isinstance(outcome, Answer) and outcome.head.status < 300


def _renamed(head: bytes, request_id: str, name: str) -> bytes:
    """Return a request head in which the worker reads another request id."""
    line = b"x-request-id: %b\r\n"
    # The last one is ours: the value of a client's header may read like it.
    before, _, after = head.rpartition(line % request_id.encode())
    return before + line % name.encode() + after
