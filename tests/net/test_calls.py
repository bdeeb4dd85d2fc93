"""Calls beside requests, over real sockets: unary gRPC and HTTP, given up at any moment, to workers that leave."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from math import inf
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio
import pytest

from pointsman.domain.worker import Role, Worker
from pointsman.flow.effects import After, Answer, Lost, Outcome, Returned, Status, Why
from pointsman.net.calls import Calls
from pointsman.net.clock import Deadlines
from pointsman.net.limits import UpstreamLimits
from pointsman.net.observer import Silent
from pointsman.net.pool import Pool
from pointsman.testing.origin import Conversation, Origin, answers, dead_address, hangs, resets
from pointsman.wire.call import HttpCall, RpcCall

pytestmark = pytest.mark.anyio

Answering = Callable[[bytes], Awaitable[bytes]]


async def echo(message: bytes) -> bytes:
    """Answer with the question."""
    return message


async def never(message: bytes) -> bytes:
    """Answer when it is too late."""
    await asyncio.Event().wait()
    return message


class Callee:
    """A gRPC server whose every method does what a test says. `calls` are the messages it got, in order."""

    def __init__(self, answer: Answering = echo, address: str = "127.0.0.1:0") -> None:
        self._answer = answer
        self._address = address
        self.calls: list[bytes] = []
        self.metadata: list[dict[str, Any]] = []
        self.cancelled = asyncio.Event()
        self.came = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        self._server.add_generic_rpc_handlers((self,))
        port = self._server.add_insecure_port(self._address)
        self.address = f"127.0.0.1:{port}"
        await self._server.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._server.stop(None)

    def service(self, details: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(self._called)

    async def _called(self, message: bytes, context: Any) -> bytes:
        self.calls.append(message)
        self.metadata.append(dict(context.invocation_metadata()))
        self.came.set()
        try:
            return await self._answer(message)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


class Wire:
    """A TCP path to a server that can be cut: after `cut`, what comes over it meets a reset."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._is_cut = False
        self.connections = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._opened, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Let the connections that there are die with the next byte of the caller."""
        self._is_cut = True

    async def _opened(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        self._is_cut = False
        host, _, port = self._target.rpartition(":")
        near, far = await asyncio.open_connection(host, port)
        back = asyncio.get_running_loop().create_task(self._pump(near, writer))
        try:
            while data := await reader.read(65536):
                if self._is_cut:
                    break
                far.write(data)
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            back.cancel()
            writer.transport.abort()
            far.transport.abort()
            self._tasks.discard(task)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)


def worker(id: str = "p", address: str = "127.0.0.1:1") -> Worker:
    return Worker(id, model="m", http_address=address, role=Role.UNIFIED, static=True)


def rpc(to: Worker, address: str, message: bytes = b"hello", timeout_s: float = 20.0) -> RpcCall:
    return RpcCall(to, address, "/t.S/M", message, timeout_s)


class Told:
    """Who waits for one outcome, and hears it once."""

    def __init__(self) -> None:
        self.outcome: Outcome | None = None
        self._told = asyncio.Event()

    def __call__(self, outcome: Outcome) -> None:
        assert self.outcome is None, "an outcome is told once"
        self.outcome = outcome
        self._told.set()

    async def status(self) -> Status:
        await self._told.wait()
        assert isinstance(self.outcome, Status), self.outcome
        return self.outcome

    async def message(self) -> bytes:
        await self._told.wait()
        assert isinstance(self.outcome, Returned), self.outcome
        return self.outcome.message


class Endless:
    """A call under way of whose outcome nobody ever hears."""

    def __init__(self) -> None:
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True

    def tell(self, done: Callable[[Outcome], None]) -> None:
        """Nobody will be told."""


@asynccontextmanager
async def calling() -> AsyncIterator[Calls]:
    """Make calls; nothing is under way at the end."""
    deadlines = Deadlines(asyncio.get_running_loop())
    pool = Pool(UpstreamLimits(), deadlines, Silent())
    calls = Calls(pool, deadlines)
    try:
        yield calls
    finally:
        await calls.close(0.1)
        pool.close()
        await asyncio.sleep(0)
        deadlines.close()


# Questions how a worker is.


async def test_an_answer_that_comes_in_the_turn_in_which_the_question_is_given_up_is_no_fault() -> (
    None
):
    deadlines = Deadlines(asyncio.get_running_loop())
    pool = Pool(UpstreamLimits(), deadlines, Silent())
    calls, asked = Calls(pool, deadlines), worker()
    asking = asyncio.get_running_loop().create_task(calls.get(asked, "/health", 20.0))
    await asyncio.sleep(0)  # It connects now.
    asking.cancel()
    pool.leave(asked)  # Whoever waits for a connection is told so, in this very turn.
    with pytest.raises(asyncio.CancelledError):
        await asking
    await calls.close(0.1)
    pool.close()
    deadlines.close()


async def test_a_call_that_settles_in_the_turn_in_which_it_is_given_up_is_no_fault() -> None:
    deadlines = Deadlines(asyncio.get_running_loop())
    pool = Pool(UpstreamLimits(), deadlines, Silent())
    calls, asked = Calls(pool, deadlines), worker()
    heard: list[Outcome] = []
    calling = calls.call(HttpCall(asked, b"/x", b"", 20.0), inf, heard.append)
    calls.settle(calling, lambda outcome: ())
    await asyncio.sleep(0)  # It is waited for now.
    (settling,) = calls._required.tasks
    settling.cancel()
    pool.leave(asked)  # Whoever waits for a connection is told so, in this very turn.
    await calls.close(0.1)
    assert heard == []
    pool.close()
    deadlines.close()


# gRPC calls that a story waits for.


async def test_a_call_returns_what_the_callee_says() -> None:
    async with Callee() as callee, calling() as calls:
        for _ in range(3):
            told = Told()
            calls.call(rpc(worker(), callee.address), inf, told)
            assert await told.message() == b"hello"


async def test_a_callee_that_nobody_can_reach_has_not_seen_the_call() -> None:
    async with calling() as calls:
        for address in (dead_address(), ""):
            told = Told()
            calls.call(rpc(worker(), address), inf, told)
            status = await told.status()
            assert (status.code, status.sent, status.stale) == ("UNAVAILABLE", False, False)


@pytest.mark.parametrize("which", ["timeout of the call", "deadline of the request"])
async def test_a_call_that_takes_too_long_is_given_up_on_both_sides(which: str) -> None:
    async with Callee(never) as callee, calling() as calls:
        told = Told()
        timeout_s = 0.2 if which.startswith("timeout") else 60.0
        deadline = inf if which.startswith("timeout") else calls._deadlines.now() + 0.2
        calls.call(rpc(worker(), callee.address, timeout_s=timeout_s), deadline, told)
        status = await told.status()
        assert (status.code, status.sent, status.stale) == ("DEADLINE_EXCEEDED", True, False)
        await callee.cancelled.wait()


async def test_a_call_that_is_cancelled_ends_at_the_callee_and_nobody_is_told() -> None:
    async with Callee(never) as callee, calling() as calls:
        told = Told()
        call = calls.call(rpc(worker(), callee.address), inf, told)
        await callee.came.wait()
        call.cancel()
        await callee.cancelled.wait()
        assert told.outcome is None


async def test_a_worker_that_leaves_during_a_call_ends_it() -> None:
    async with Callee(never) as callee, calling() as calls:
        leaving = worker()
        told = Told()
        calls.call(rpc(leaving, callee.address), inf, told)
        await callee.came.wait()
        calls.leave(leaving)
        assert (await told.status()).code == "CANCELLED"
        await callee.cancelled.wait()


async def test_a_connection_that_died_unseen_is_told_from_a_worker_that_is_down() -> None:
    async with Callee() as callee, Wire(callee.address) as wire, calling() as calls:
        to = worker()
        told = Told()
        calls.call(rpc(to, wire.address), inf, told)
        await told.message()
        wire.cut()
        told = Told()
        calls.call(rpc(to, wire.address), inf, told)
        status = await told.status()
        assert (status.code, status.sent, status.stale) == ("UNAVAILABLE", True, True)
        told = Told()
        calls.call(rpc(to, wire.address), inf, told)
        assert await told.message() == b"hello"
        assert wire.connections == 2


async def test_a_server_that_started_again_is_found_again() -> None:
    async with calling() as calls:
        to = worker()
        async with Callee() as callee:
            told = Told()
            calls.call(rpc(to, callee.address), inf, told)
            await told.message()
        async with Callee(address=callee.address):
            for _ in range(50):
                told = Told()
                calls.call(rpc(to, callee.address), inf, told)
                await told._told.wait()
                if isinstance(told.outcome, Returned):
                    break
                # Nobody can have seen it, or the connection is the old one: both may be tried again.
                status = await told.status()
                assert status.code == "UNAVAILABLE"
                assert status.stale or not status.sent
                await asyncio.sleep(0.05)
            assert await told.message() == b"hello"


# Calls that must be made.


async def test_calls_are_made_in_order_and_the_last_outcome_is_told() -> None:
    async def slowly(message: bytes) -> bytes:
        if message == b"1":
            await asyncio.sleep(0.05)
        return message

    async with Callee(slowly) as callee, calling() as calls:
        told = Told()
        after = [After([rpc(worker(), callee.address, b"%d" % n) for n in (1, 2, 3)], told)]
        calls.later(after)
        assert after == []
        assert await told.message() == b"3"
        assert callee.calls == [b"1", b"2", b"3"]


async def test_a_call_that_fails_does_not_keep_the_next_from_being_made() -> None:
    async with Callee() as callee, calling() as calls:
        told = Told()
        lost = rpc(worker(), dead_address())
        calls.later([After([lost, rpc(worker("d"), callee.address, b"release")], told)])
        assert await told.message() == b"release"


async def test_a_worker_that_leaves_does_not_keep_the_next_call_from_being_made() -> None:
    async with Callee(never) as leaving, Callee() as staying, calling() as calls:
        told = Told()
        first = worker()
        cancel = rpc(first, leaving.address, b"cancel")
        calls.later([After([cancel, rpc(worker("d"), staying.address, b"release")], told)])
        await leaving.came.wait()
        calls.leave(first)
        assert await told.message() == b"release"


async def test_what_must_be_made_is_made_again_on_a_fresh_connection() -> None:
    async with Callee() as callee, Wire(callee.address) as wire, calling() as calls:
        to = worker()
        told = Told()
        calls.call(rpc(to, wire.address), inf, told)
        await told.message()
        wire.cut()
        told = Told()
        calls.later([After([rpc(to, wire.address, b"release")], told)])
        assert await told.message() == b"release"
        assert callee.calls == [b"hello", b"release"]


async def test_the_end_waits_for_what_must_be_made() -> None:
    async def slowly(message: bytes) -> bytes:
        await asyncio.sleep(0.2)
        return message

    async with Callee(slowly) as callee, calling() as calls:
        told = Told()
        calls.later([After([rpc(worker(), callee.address, b"%d" % n) for n in (1, 2)], told)])
        await calls.close()
        assert isinstance(told.outcome, Returned)
        assert callee.calls == [b"1", b"2"]


@pytest.mark.parametrize("kind", ["rpc", "http"])
async def test_the_end_does_not_wait_for_ever(kind: str) -> None:
    async with Callee(never) as callee, Origin(hangs()) as origin, calling() as calls:
        told = Told()
        to = worker(address=origin.address)
        call = rpc(to, callee.address) if kind == "rpc" else HttpCall(to, b"/x", b"{}", 60.0)
        calls.later([After([call], told)])
        await (callee.came.wait() if kind == "rpc" else origin.received(1))
        await asyncio.wait_for(calls.close(0.05), 2)
        await (callee.cancelled.wait() if kind == "rpc" else origin.left(1))
        assert told.outcome is None
        assert to.in_flight == 0


# Calls that nobody is worse off without.


async def test_optional_calls_that_hang_are_few_and_keep_none_that_must_be_made() -> None:
    async with Callee() as callee, Origin(hangs()) as origin, calling() as calls:
        to, told = worker(address=origin.address), Told()
        hanging = HttpCall(to, b"/x", b"{}", 60.0)
        calls.later([After([hanging], optional=True) for _ in range(5000)])
        await origin.received(64)
        calls.later([After([rpc(worker("d"), callee.address, b"release")], told)])
        assert await told.message() == b"release"
        assert to.in_flight == 64
        assert calls.dropped == {"required": 0, "optional": 5000 - 64}


async def test_calls_that_must_be_made_are_many_and_keep_no_optional_one_from_being_made() -> None:
    async with Origin(answers({})) as origin, calling() as calls:
        hanging = [Endless() for _ in range(4097)]
        for each in hanging:
            calls.settle(each, lambda outcome: ())
        assert [each.cancelled for each in hanging] == [False] * 4096 + [True]
        call, told = HttpCall(worker(address=origin.address), b"/x", b"{}", 20.0), Told()
        calls.later([After([call]), After([call], told, optional=True)])
        await told._told.wait()
        assert isinstance(told.outcome, Answer)
        assert calls.dropped == {"required": 2, "optional": 0}
    assert all(each.cancelled for each in hanging)


async def test_an_optional_call_that_is_over_makes_room_for_another_one() -> None:
    free = asyncio.Event()

    async def slow(talk: Conversation) -> None:
        await free.wait()
        await answers({})(talk)

    async with Origin(slow) as origin, calling() as calls:
        call = HttpCall(worker(address=origin.address), b"/x", b"{}", 20.0)
        first = [Told() for _ in range(64)]
        calls.later([After([call], told, optional=True) for told in first])
        free.set()
        for told in first:
            await told._told.wait()
        await asyncio.sleep(0)  # let the last of them end
        last = Told()
        calls.later([After([call], last, optional=True)])
        await last._told.wait()
        assert isinstance(last.outcome, Answer)
        assert calls.dropped == {"required": 0, "optional": 0}


async def test_the_end_gives_optional_calls_up_before_it_waits_for_the_others() -> None:
    async with Origin(hangs()) as origin, calling() as calls:

        async def then(message: bytes) -> bytes:
            await origin.left(1)
            return message

        async with Callee(then) as callee:
            to, compared, released = worker(address=origin.address), Told(), Told()
            optional = After([HttpCall(to, b"/x", b"{}", 60.0)], compared, optional=True)
            calls.later([optional, After([rpc(worker("d"), callee.address)], released)])
            await origin.received(1)
            await calls.close()
            assert await released.message() == b"hello"
            assert compared.outcome is None
            assert to.in_flight == 0


async def test_the_end_does_not_wait_for_optional_calls() -> None:
    async with Origin(hangs()) as origin, calling() as calls:
        to, told = worker(address=origin.address), Told()
        calls.later([After([HttpCall(to, b"/x", b"{}", 60.0)], told, optional=True)])
        await origin.received(1)
        # Without a limit: it would wait as long as the call has.
        await asyncio.wait_for(calls.close(inf), 5)
        await origin.left(1)
        assert told.outcome is None
        assert to.in_flight == 0


# HTTP calls.


async def http(calls: Calls, to: Worker, timeout_s: float = 20.0) -> Outcome:
    told = Told()
    calls.call(HttpCall(to, b"/v1/tokenize", b'{"a":1}', timeout_s, b"x-a: b\r\n"), inf, told)
    await told._told.wait()
    assert told.outcome is not None
    return told.outcome


async def test_an_http_call_gets_the_whole_answer_over_connections_that_are_kept() -> None:
    large = {"tokens": "x" * 3_000_000}
    async with Origin(answers({"n": 1}), answers(large)) as origin, calling() as calls:
        to = worker(address=origin.address)
        for _ in range(2):
            outcome = await http(calls, to)
            assert isinstance(outcome, Answer)
            assert outcome.complete
            last = outcome.payload
        assert len(last) > 3_000_000
        assert origin.connections == 1
        (request, _) = origin.requests
        assert request.line == "POST /v1/tokenize HTTP/1.1"
        assert (request.header("x-a"), request.body) == ("b", b'{"a":1}')


async def test_an_http_call_that_fails_says_how() -> None:
    async with calling() as calls:
        outcome = await http(calls, worker(address=dead_address()))
        assert isinstance(outcome, Lost)
        assert outcome.why is Why.REFUSED
        for script, why in ((resets(), Why.RESET), (hangs(), Why.TIMED_OUT)):
            async with Origin(script) as origin:
                outcome = await http(calls, worker(address=origin.address), 0.2)
                assert isinstance(outcome, Lost)
                assert outcome.why is why


async def test_an_http_call_meets_a_closed_connection_and_is_sent_once_more() -> None:
    gone = asyncio.Event()

    async def closes_late(talk: Conversation) -> None:
        if len(origin.requests) == 1:
            await answers({})(talk)
        elif talk.request.connection == 1:
            gone.set()
            talk.reset()
        else:
            await answers({"again": 1})(talk)

    async with Origin(closes_late) as origin, calling() as calls:
        to = worker(address=origin.address)
        await http(calls, to)
        outcome = await http(calls, to)
        assert isinstance(outcome, Answer)
        assert outcome.payload == b'{"again":1}'
        assert gone.is_set()


@pytest.mark.parametrize("moment", ["connecting", "waiting", "idle connection"])
async def test_an_http_call_that_is_cancelled_closes_its_connection(moment: str) -> None:
    first = answers({}) if moment == "idle connection" else hangs()
    async with AsyncExitStack() as stack:
        origin = await stack.enter_async_context(Origin(first, hangs()))
        calls = await stack.enter_async_context(calling())
        to = worker(address=origin.address)
        if moment == "idle connection":
            await http(calls, to)
        told = Told()
        call = calls.call(HttpCall(to, b"/x", b"{}", 20.0), inf, told)
        if moment != "connecting":
            await origin.received(2 if moment == "idle connection" else 1)
        call.cancel()
        if moment != "connecting":
            await origin.left(1)
        assert told.outcome is None
