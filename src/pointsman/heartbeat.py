"""How an engine, or an agent beside it, says that it lives: `tl.control.v1.WorkerRegistry/Heartbeat`.

At once, then every two seconds, whatever happens. A beat reads its status fresh, uses a connection of its own and is
bounded by a timeout; a failed one is counted and the next comes all the same. The answer's `drain` is latched: it is
set once and never taken back. What to do about it is the caller's.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

import grpc
import grpc.aio

from pointsman.proto import control_pb2

__all__ = ["METHOD", "Heartbeat"]

log = logging.getLogger(__name__)

METHOD = "/tl.control.v1.WorkerRegistry/Heartbeat"


class Heartbeat:
    """Beats to `registry` (host:port, or a URL of it) until its task is cancelled.

    `status` is called for every beat; `on_drain` once, when the gateway first asks for a drain. Times are in seconds.
    Without `credentials` it speaks plaintext.
    """

    def __init__(
        self,
        registry: str,
        status: Callable[[], control_pb2.WorkerStatus],
        on_drain: Callable[[], None],
        *,
        interval: float = 2.0,
        timeout: float = 1.5,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self._target = registry.split("://", 1)[-1].rstrip("/")
        self._status = status
        self._on_drain = on_drain
        self._interval = interval
        self._timeout = timeout
        self._credentials = credentials
        self._again = asyncio.Event()
        self.incarnation = time.time_ns()
        self.drain = False
        self.route_epoch = 0
        self.beats = 0
        self.failures = 0
        self.failing = False

    def soon(self) -> None:
        """Beat now, not at the next tick: something changed that the gateway should know."""
        self._again.set()

    async def run(self) -> None:
        """Beat for ever. A late beat delays the next one; there are no bursts."""
        while True:
            self._again.clear()
            await self.beat()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval):
                    await self._again.wait()

    async def beat(self) -> bool:
        """One beat; whether the gateway answered."""
        status = self._status()
        status.incarnation = self.incarnation
        try:
            async with self._channel() as channel:
                call = channel.unary_unary(
                    METHOD,
                    request_serializer=control_pb2.WorkerStatus.SerializeToString,
                    response_deserializer=control_pb2.HeartbeatAck.FromString,
                )
                ack = await call(status, timeout=self._timeout)
        # Whatever went wrong, the next beat is the remedy: a worker that stops beating is lost to its gateway.
        except Exception as error:
            if not self.failing:
                log.warning("no heartbeat to %s: %s", self._target, _reason(error))
            self.failing = True
            self.failures += 1
            return False
        if self.failing:
            log.info("heartbeats to %s again", self._target)
        self.failing = False
        self.beats += 1
        self.route_epoch = ack.route_epoch
        if ack.drain and not self.drain:
            self.drain = True
            self._on_drain()
            self.soon()
        return True

    def _channel(self) -> grpc.aio.Channel:
        if self._credentials is None:
            return grpc.aio.insecure_channel(self._target)
        return grpc.aio.secure_channel(self._target, self._credentials)


def _reason(error: Exception) -> str:
    return str(error.details()) if isinstance(error, grpc.aio.AioRpcError) else repr(error)
