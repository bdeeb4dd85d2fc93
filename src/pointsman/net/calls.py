"""Performs calls beside the requests themselves: unary HTTP over the pool's connections, and unary gRPC.

A call that a story waits for can be cancelled, which closes its stream or its connection: so a worker learns at once
that nobody waits. Calls that must be made whatever becomes of a request (`later`) belong to nobody but this object;
the end of the gateway waits for them, for a moment. Those that are optional never take the place of others, and nobody
waits for them.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

import grpc
import grpc.aio

from pointsman.domain.ledger import Lease
from pointsman.domain.worker import Worker
from pointsman.flow.effects import After, Answer, Lost, Outcome, Returned, Status, Why
from pointsman.net.clock import Deadlines
from pointsman.net.pool import Lane, Pool
from pointsman.net.upstream import Upstream
from pointsman.wire.call import HttpCall, RpcCall

__all__ = ["Calling", "Calls"]

WHOLE = 64 << 20
"""The largest answer to a call, in bytes."""

PROBE = 8 << 20
"""The largest answer to a GET, in bytes. It is read between two requests, and nothing else happens meanwhile."""

IDLE_MS = 30_000
"""How long an unused gRPC connection is kept: one that died unseen would cost the next call its time."""

CONNECT_MS = 5_000

LAST_S = 3.0
"""How long the end of the gateway waits for the calls that are still to be made."""

STALE_S = 60.0
"""How long the calls have that are under way on a channel that takes no others any more."""

REQUIRED_MAX = 4096
"""Calls of ended requests under way at a time. Each takes a few seconds at most, even if no worker answers."""

OPTIONAL_MAX = 64
"""The same for those that are optional. Each may take minutes, and a place at an engine that requests could have."""

NEVER_SENT = ("failed to connect", "connections to all backends failing", "DNS resolution failed")
"""How gRPC words that there was no connection: the callee cannot have seen the call."""


class Calling(Protocol):
    """A call under way."""

    def cancel(self) -> None:
        """Give it up; nobody hears of its outcome."""

    def tell(self, done: Callable[[Outcome], None]) -> None:
        """Have somebody else hear of its outcome."""


class Calls:
    """Makes calls to workers. gRPC channels are kept, one per worker and address."""

    def __init__(self, pool: Pool, deadlines: Deadlines) -> None:
        self._pool = pool
        self._deadlines = deadlines
        self._channels: dict[tuple[Worker, str], _Channel] = {}
        self._awaited: set[_Rpc] = set()
        self._required = _Crowd(REQUIRED_MAX)
        self._optional = _Crowd(OPTIONAL_MAX)
        self._closing: dict[asyncio.Task[None], _Channel] = {}

    @property
    def dropped(self) -> dict[str, int]:
        """How many calls of ended requests were not made because too many of their kind were under way."""
        return {"required": self._required.dropped, "optional": self._optional.dropped}

    def call(
        self, call: HttpCall | RpcCall, deadline: float, done: Callable[[Outcome], None]
    ) -> Calling:
        """Make a call for a request that must be over at `deadline`; `done` hears the outcome once."""
        if isinstance(call, HttpCall):
            return _Http(
                self._pool, call, min(deadline, self._deadlines.now() + call.timeout_s), done
            )
        timeout_s = max(min(call.timeout_s, deadline - self._deadlines.now()), 0.0)
        return _Rpc(self.perform(call, timeout_s), call, done, self._awaited)

    async def get(self, worker: Worker, path: str, timeout_s: float) -> Answer | Lost:
        """Ask a worker how it is. It need not have a connection to spare for that; `timeout_s` is for all of it."""
        heard, hear = _hearing()
        call = HttpCall(worker, path.encode(), b"", timeout_s, get=True)
        asking = _Http(self._pool, call, self._deadlines.now() + timeout_s, hear)
        try:
            async with asyncio.timeout(timeout_s):
                outcome = await heard
        except TimeoutError:
            asking.cancel()
            return Lost(Why.TIMED_OUT, f"no answer within {timeout_s:g} s")
        except asyncio.CancelledError:
            asking.cancel()
            raise
        assert isinstance(outcome, Answer | Lost)
        return outcome

    def later(self, after: list[After]) -> None:
        """Take over what must be done for a request; the list is empty then."""
        for each in after:
            crowd = self._optional if each.optional else self._required
            if crowd.admits():
                crowd.add(self._make(each))
        after.clear()

    def settle(
        self, calling: Calling, then: Callable[[Outcome], Sequence[HttpCall | RpcCall]]
    ) -> None:
        """Let a call come to its end though nobody waits for it any more, and make those that its outcome asks for."""
        if self._required.admits():
            self._required.add(self._settle(calling, then))
        else:
            calling.cancel()

    def leave(self, worker: Worker) -> None:
        """Forget a worker that the registry gave up; what waits for it, or for what it is to get, is told so."""
        self.retire(worker, None)
        for each in tuple(self._awaited):
            if each.call.peer is worker:
                each.give_up(Status("UNAVAILABLE", f"worker {worker.id} left", leg="decode"))

    def retire(self, worker: Worker, grace_s: float | None = STALE_S) -> None:
        """Forget a worker that an operator took from the list: what it has been asked it may answer, for a while."""
        for key in [key for key in self._channels if key[0] is worker]:
            self._close_soon(self._channels.pop(key), grace_s)

    async def close(self, wait_s: float = LAST_S) -> None:
        """Wait a moment for what must still be done, and close all channels; what is optional is given up first."""
        given_up = self._optional.cancel()
        if self._required.tasks:
            await asyncio.wait(self._required.tasks, timeout=wait_s)
        given_up |= self._required.cancel()
        if given_up:
            # Each has given up its connection then: the pool, which closes next, tells it nothing more.
            await asyncio.wait(given_up)
        for channel in (*self._channels.values(), *self._closing.values()):
            await channel.close()
        self._channels.clear()

    async def perform(self, call: RpcCall, timeout_s: float) -> Returned | Status:
        """Make a gRPC call."""
        if not call.address:
            detail = f"worker {call.worker.id} announces no address for {call.method}"
            return Status("UNAVAILABLE", detail, sent=False)
        key = (call.worker, call.address)
        channel = self._channels.get(key)
        if channel is None:
            channel = self._channels[key] = _Channel(call.address)
        outcome = await channel.call(call, timeout_s)
        if isinstance(outcome, Status) and outcome.stale and self._channels.get(key) is channel:
            # gRPC itself may put the next call on the same dead connection.
            del self._channels[key]
            self._close_soon(channel, STALE_S)
        return outcome

    async def _settle(
        self, calling: Calling, then: Callable[[Outcome], Sequence[HttpCall | RpcCall]]
    ) -> None:
        heard, hear = _hearing()
        calling.tell(hear)
        try:
            calls = then(await heard)
        except asyncio.CancelledError:
            calling.cancel()
            raise
        if calls:
            await self._make(After(calls))

    async def _tell(self, call: RpcCall) -> Outcome:
        """Make a gRPC call without keeping a channel for it: its worker may have left, and nobody would close it."""
        key = (call.worker, call.address)
        kept = key in self._channels
        try:
            return await self.perform(call, call.timeout_s)
        finally:
            if not kept and key in self._channels:
                self._close_soon(self._channels.pop(key), STALE_S)

    def _close_soon(self, channel: "_Channel", grace_s: float | None = None) -> None:
        task = asyncio.get_running_loop().create_task(channel.close(grace_s))
        self._closing[task] = channel
        task.add_done_callback(self._closing.__delitem__)

    async def _make(self, after: After) -> None:
        outcome: Outcome | None = None
        for call in after.calls:
            if isinstance(call, RpcCall):
                outcome = await self._tell(call)
                if isinstance(outcome, Status) and outcome.stale:
                    # To cancel or to release twice is the same as once.
                    outcome = await self._tell(call)
            else:
                outcome = await self._ask(call)
        if after.then is not None and outcome is not None:
            after.then(outcome)

    async def _ask(self, call: HttpCall) -> Outcome:
        heard, hear = _hearing()
        with Lease(call.worker):
            calling = _Http(self._pool, call, self._deadlines.now() + call.timeout_s, hear)
            try:
                return await heard
            except asyncio.CancelledError:
                calling.cancel()
                raise


def _hearing() -> tuple[asyncio.Future[Outcome], Callable[[Outcome], None]]:
    """Return what a task can wait for, and what is told the outcome."""
    heard: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

    def hear(outcome: Outcome) -> None:
        # A cancelled future comes before the task that is told so, and an answer may come between the two.
        if not heard.done():
            heard.set_result(outcome)

    return heard, hear


class _Crowd:
    """What is under way of one kind: at most `most` tasks."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.tasks: set[asyncio.Task[None]] = set()
        self.dropped = 0

    def admits(self) -> bool:
        """Tell whether there is room for one more; if not, count it as dropped."""
        if len(self.tasks) < self._most:
            return True
        self.dropped += 1
        return False

    def add(self, doing: Coroutine[Any, Any, None]) -> None:
        """Begin with it."""
        task = asyncio.get_running_loop().create_task(doing)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def cancel(self) -> set[asyncio.Task[None]]:
        """Cancel all of it; return what has not ended yet."""
        for task in self.tasks:
            task.cancel()
        return set(self.tasks)


class _Channel:
    """A gRPC channel to one address of one worker."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(
            address,
            (
                ("grpc.min_reconnect_backoff_ms", CONNECT_MS),  # also bounds the first attempt
                ("grpc.max_reconnect_backoff_ms", CONNECT_MS),
                ("grpc.initial_reconnect_backoff_ms", 100),
                ("grpc.client_idle_timeout_ms", IDLE_MS),
                ("grpc.enable_http_proxy", 0),  # a proxy to the outside does not lead to engines
                ("grpc.use_local_subchannel_pool", 1),  # a new channel is a new connection
            ),
        )
        self._served = False

    async def call(self, call: RpcCall, timeout_s: float) -> Returned | Status:
        served = self._served
        method = self._channel.unary_unary(call.method)
        try:
            message = await method(call.message, timeout=timeout_s, metadata=call.metadata)
        except grpc.aio.AioRpcError as error:
            code, detail = error.code().name, error.details() or ""
            metadata = dict(error.trailing_metadata() or ())
            leg = str(metadata.get("x-tl-failed-leg", ""))
            sent = code != "UNAVAILABLE" or not any(words in detail for words in NEVER_SENT)
            stale = served and code == "UNAVAILABLE" and sent and not leg
            # The next one is on a new connection, and is judged by that.
            self._served = self._served and code != "UNAVAILABLE"
            return Status(code, detail, sent, stale, leg)
        except grpc.aio.UsageError as error:  # The channel was closed: the worker has left.
            return Status("UNAVAILABLE", str(error), sent=False)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # Not whoever waits was cancelled but the call, by the end of its channel.
            return Status("CANCELLED", "the worker left")
        self._served = True
        return Returned(message)

    async def close(self, grace_s: float | None = None) -> None:
        """Close; calls under way have that many seconds more."""
        await self._channel.close(grace_s)


class _Rpc:
    """A gRPC call that a story waits for."""

    def __init__(
        self,
        outcome: Coroutine[Any, Any, Returned | Status],
        call: RpcCall,
        done: Callable[[Outcome], None],
        awaited: "set[_Rpc]",
    ) -> None:
        self.call = call
        self._done = done
        self._awaited = awaited
        self._task = asyncio.get_running_loop().create_task(outcome)
        self._task.add_done_callback(self._over)
        awaited.add(self)

    def cancel(self) -> None:
        self._awaited.discard(self)
        self._task.remove_done_callback(self._over)
        self._task.cancel()

    def tell(self, done: Callable[[Outcome], None]) -> None:
        self._done = done

    def give_up(self, status: Status) -> None:
        """Cancel it, and tell whoever waits why."""
        self.cancel()
        self._done(status)

    def _over(self, task: "asyncio.Task[Returned | Status]") -> None:
        self._awaited.discard(self)
        if not task.cancelled():  # The loop itself is ending.
            self._done(task.result())


class _Http:
    """An HTTP call: the judge of its own connection."""

    def __init__(
        self, pool: Pool, call: HttpCall, deadline: float, done: Callable[[Outcome], None]
    ) -> None:
        self.deadline = deadline
        self.hold = PROBE if call.get else WHOLE
        self._done = done
        self._lane: Lane = pool.lane(call.worker)
        self._upstream: Upstream | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._body = call.body
        # How a worker is must not wait until it has less to do.
        self._at_once = call.get
        if call.get:
            self._head = b"%b%b\r\n" % (self._lane.getting(call.path), call.headers)
        else:
            self._head = b"%b%d\r\ncontent-type: application/json\r\n%b\r\n" % (
                self._lane.opening(call.path),
                len(call.body),
                call.headers,
            )
        upstream = self._lane.take()
        if upstream is None:
            self._connecting = self._lane.connect(self, at_once=self._at_once)
        else:
            self._upstream = upstream
            upstream.ask(self, self._head, self._body)

    def cancel(self) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
        if self._upstream is not None:
            self._upstream.abort()
        self._connecting = self._upstream = None

    def tell(self, done: Callable[[Outcome], None]) -> None:
        self._done = done

    def connected(self, upstream: Upstream) -> None:
        self._connecting = None
        self._upstream = upstream
        upstream.ask(self, self._head, self._body)

    def unreachable(self, lost: Lost) -> None:
        self._connecting = None
        self._done(lost)

    def answered(self, answer: Answer) -> None:
        upstream, self._upstream = self._upstream, None
        if not answer.complete:
            assert upstream is not None
            upstream.abort()
        self._done(answer)

    def lost(self, lost: Lost) -> None:
        self._upstream = None
        self._done(lost)

    def stale(self) -> None:
        self._upstream = None
        self._connecting = self._lane.connect(self, at_once=self._at_once)
