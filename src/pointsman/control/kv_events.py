"""Follows the KV events of engines: one task for each rank of each worker that publishes some.

What an engine says goes into the prefix index, which then knows and need not guess. As long as a stream cannot be read,
or what came before it is not known, the index goes on believing what routing tells, and the workers list says why.

An engine that has nothing to do publishes nothing, so silence says nothing. Whether somebody is there, the socket
says: ZeroMQ tells of connections that came and went, and its own heartbeats find out those that went without a word.

No worker waits for another: what one publishes waits in a queue of its own, which is bounded; what it loses there is a
gap like any other. What messages mean is in `pointsman.dialect.kv_stream`. pyzmq is an extra, imported where somebody
is to be followed.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from pointsman.control.per_worker import PerWorker
from pointsman.dialect.kv_events import (
    MalformedEvents,
    read_message,
    read_replayed,
    replay_request,
)
from pointsman.dialect.kv_stream import KvStream, Tally, Union
from pointsman.domain.prefix_index import PrefixIndex
from pointsman.domain.registry import Registry
from pointsman.domain.worker import Worker

if TYPE_CHECKING:
    import zmq.asyncio

__all__ = ["KvEvents"]

logger = logging.getLogger(__name__)

QUEUE = 4096
"""Messages of one rank that may wait. Engines publish one for each step, so these are many seconds."""

REPLAY_QUEUE = 20_000
"""Messages of a replay that may wait: the buffers of both engines have 10,000."""

MESSAGE_BYTES = 16 << 20
"""Longer messages end the connection. A step of 64k tokens has less than a megabyte."""

BURST = 16
"""Messages of one rank that are read before somebody else may do something."""

HEARTBEAT_MS = 3000
SILENT_MS = 9000
"""How often a connection is tried, and when one without an answer has gone."""

RECONNECT_MS = 100
RECONNECT_MAX_MS = 5000

LOOK_S = 1.0
"""How often a task looks whether its worker has another model, or its model another tokenizer."""

RENEW_S = 10.0
"""When a connection that is not there is begun anew. ZeroMQ does that by itself, but never after a message that was too
long."""

REPLAY_S = 5.0
"""Wait for each message of a replay."""

REPLAY_ALL_S = 60.0
"""Wait for all of them: buffers of 10,000 messages take some seconds, and one that has no end is none."""


class KvEvents:
    """Follows the workers of a registry that have `kv_events`, into an index.

    `block_bytes` is the size of our blocks of a model, 0 where its prompts are not compared by tokens, None where
    nobody compares prompts at all. `now` is in monotonic seconds, `blocks_max` how many blocks of an engine are
    remembered. `tally` counts what came; `on_fault` hears of an exception that nobody foresaw.
    """

    def __init__(
        self,
        registry: Registry,
        index: PrefixIndex,
        block_bytes: Callable[[str], int | None],
        *,
        now: Callable[[], float],
        blocks_max: int,
        sleep: Callable[[float], Coroutine[Any, Any, object]] = asyncio.sleep,
        on_fault: Callable[[], None] = lambda: None,
    ) -> None:
        self.index = index
        self.block_bytes = block_bytes
        self.now = now
        self.blocks_max = blocks_max
        self.sleep = sleep
        self.tally = Tally()
        self._on_fault = on_fault
        # The index forgets a worker that leaves by itself, and must not hear of it again.
        self._followed = PerWorker(registry, self._begin, lambda followed: followed.tasks)
        self._context: zmq.asyncio.Context | None = None

    def start(self) -> None:
        """Follow from now on whoever is there and whoever joins. Waits for nobody."""
        self._followed.start()

    async def stop(self) -> None:
        """Follow nobody any more."""
        await self._followed.stop()
        if self._context is not None:
            self._context.destroy(linger=0)

    def followed(self) -> int:
        """Return how many workers' events are read, and known from the beginning."""
        return sum(each.whole for each in self._followed.values())

    def reads(self, worker: Worker) -> bool:
        """Tell whether the events of a worker are read now."""
        followed = self._followed.get(worker)
        return followed is not None and followed.connected

    def has(self, worker: Worker) -> bool:
        """Tell whether a worker is one of those that are followed, and did not leave."""
        return worker in self._followed

    def context(self) -> "zmq.asyncio.Context":
        """Return what sockets are made of. Raises ImportError without the extra."""
        if self._context is None:
            import zmq.asyncio

            self._context = zmq.asyncio.Context()
        return self._context

    def failed(self, worker: Worker) -> None:
        """Hear of an exception that nobody foresaw, while it is handled."""
        logger.exception("the KV events of worker %s failed; they are read anew", worker.id)
        self._on_fault()

    def _begin(self, worker: Worker) -> "_Followed | None":
        return _Followed(self, worker) if worker.kv_events else None


class _Followed:
    """One worker and its ranks: the index knows when all of them are known."""

    def __init__(self, events: KvEvents, worker: Worker) -> None:
        self.events = events
        self.worker = worker
        self.union = Union(self)
        self.connected = self.whole = False
        self.ranks = [_Rank(self, number) for number in range(worker.kv_ranks)]
        loop = asyncio.get_running_loop()
        self.tasks = [loop.create_task(rank.run()) for rank in self.ranks]

    # What the streams say.

    def stored(self, blocks: Sequence[int]) -> None:
        """Note that the worker has blocks."""
        self.events.index.stored(self.worker, blocks, self.events.now())

    def removed(self, blocks: Sequence[int]) -> None:
        """Note that it has blocks no more."""
        self.events.index.removed(self.worker, blocks)

    def settle(self) -> None:
        """Let the index know, or believe, whatever holds now."""
        index, worker = self.events.index, self.worker
        faults = dict.fromkeys(rank.fault for rank in self.ranks if rank.fault)
        connected = all(rank.connected for rank in self.ranks)
        whole = connected and all(
            rank.stream is not None and rank.stream.complete for rank in self.ranks
        )
        if (connected, whole) != (self.connected, self.whole):
            if self.connected and not whole:
                index.unfollow(worker, self.events.now())
            if connected:
                self.union.tell_again()
            if whole:
                index.follow(worker)
            self.connected, self.whole = connected, whole
        fault = "KV events: " + "; ".join(faults) if faults else ""
        if fault != worker.kv_fault:
            worker.kv_fault = fault
            if fault:
                logger.warning("worker %s: %s", worker.id, fault)
            else:
                logger.info("the KV events of worker %s are read", worker.id)


class _Rank:
    """One publisher of a worker."""

    def __init__(self, of: _Followed, number: int) -> None:
        self._of = of
        self._worker = of.worker
        self._endpoint = _on_port(of.worker.kv_events, number)
        self._replay = _on_port(of.worker.kv_replay, number)
        self.stream: KvStream | None = None
        self.connected = False
        self.fault = ""

    async def run(self) -> None:
        """Follow it until cancelled."""
        events = self._of.events
        while True:
            size = events.block_bytes(self._worker.model) if self._worker.model else None
            if size:
                try:
                    await self._follow(size)
                except ImportError:
                    self._say("pyzmq is missing: install the extra, pointsman[kv-events]")
                except Exception as error:
                    events.failed(self._worker)
                    self._say(f"reading them failed: {type(error).__name__}")
            elif size == 0:
                self._say(f"there is no tokenizer with block_tokens for {self._worker.model}")
            else:
                self._say("")
            await events.sleep(LOOK_S)

    async def _follow(self, size: int) -> None:
        """Read what it publishes, as long as our blocks are of `size` bytes."""
        import zmq.asyncio
        from zmq.utils.monitor import parse_monitor_message

        events = self._of.events
        socket = events.context().socket(zmq.SUB)
        _set(socket, QUEUE)
        socket.subscribe(b"")
        came, went = zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_DISCONNECTED
        monitor = socket.get_monitor_socket(came | went)
        poller = zmq.asyncio.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        self.stream = stream = KvStream(
            self._of.union,
            size,
            blocks_max=events.blocks_max,
            replays=bool(self._replay),
            tally=events.tally,
        )
        self._say(f"{self._endpoint} is not connected")
        try:
            socket.connect(self._endpoint)
            begun = events.now()
            while events.block_bytes(self._worker.model) == size:
                ready = dict(await poller.poll(int(LOOK_S * 1000)))
                if self.connected:
                    begun = events.now()
                elif not ready and events.now() - begun >= RENEW_S:
                    begun = events.now()
                    with suppress(zmq.ZMQError):
                        socket.disconnect(self._endpoint)
                    socket.connect(self._endpoint)
                # What was published before a connection ended comes before its end, and nothing before its beginning.
                if monitor in ready and not (self.connected and socket in ready):
                    what = parse_monitor_message(await monitor.recv_multipart())["event"]
                    await self._turned(connected=what == came)
                elif socket in ready:
                    for _ in range(BURST):
                        if not await socket.poll(0):
                            break
                        await self._take(await socket.recv_multipart())
                    await events.sleep(0)
        finally:
            socket.disable_monitor()
            socket.close(linger=0)
            self.stream, self.connected = None, False
            if events.has(self._of.worker):
                stream.end()
                self._of.settle()

    async def _turned(self, *, connected: bool) -> None:
        """Take note of a connection that came or went."""
        assert self.stream is not None
        if connected:
            self.stream.begin()
            await self._fill()
        self.connected = connected
        self._say("" if connected else f"{self._endpoint} is not connected")

    async def _take(self, frames: Sequence[bytes]) -> None:
        stream = self.stream
        assert stream is not None
        fault = ""
        try:
            try:
                message = read_message(frames)
            except MalformedEvents:
                stream.tally.malformed += 1
                raise
            stream.take(message)
            await self._fill()
        except MalformedEvents as error:
            fault = f"malformed: {error}"
        if self.connected:
            self._say(fault)

    async def _fill(self) -> None:
        """Ask for what is missing, as long as there is something."""
        stream = self.stream
        assert stream is not None
        while stream.wants is not None:
            whole = await self._replayed(stream)
            stream.replay_over(whole=whole)

    async def _replayed(self, stream: KvStream) -> bool:
        """Read one replay, and tell whether it came to its end."""
        import zmq

        assert stream.wants is not None
        stream.tally.replays += 1
        socket = self._of.events.context().socket(zmq.DEALER)
        try:
            _set(socket, REPLAY_QUEUE)
            socket.connect(self._replay)
            await socket.send_multipart(replay_request(stream.wants))
            until = self._of.events.now() + REPLAY_ALL_S
            while self._of.events.now() < until and await socket.poll(int(REPLAY_S * 1000)):
                message = read_replayed(await socket.recv_multipart())
                if message is None:
                    return True
                # One that is malformed is counted there, and what it broke is lost; what comes after it may be good.
                with suppress(MalformedEvents):
                    stream.replayed(message)
                await self._of.events.sleep(0)
        except MalformedEvents:
            stream.tally.malformed += 1
        finally:
            socket.close(linger=0)
        stream.tally.replays_failed += 1
        return False

    def _say(self, fault: str) -> None:
        self.fault = fault
        self._of.settle()


def _set(socket: "zmq.asyncio.Socket", queue: int) -> None:
    import zmq

    for option, value in (
        (zmq.RCVHWM, queue),
        (zmq.MAXMSGSIZE, MESSAGE_BYTES),
        (zmq.LINGER, 0),
        (zmq.IPV6, 1),
        (zmq.HEARTBEAT_IVL, HEARTBEAT_MS),
        (zmq.HEARTBEAT_TIMEOUT, SILENT_MS),
        (zmq.HANDSHAKE_IVL, SILENT_MS),
        (zmq.RECONNECT_IVL, RECONNECT_MS),
        (zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS),
    ):
        socket.setsockopt(option, value)


def _on_port(endpoint: str, rank: int) -> str:
    """Return the endpoint of a rank, "" for none."""
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + rank}" if endpoint else ""
