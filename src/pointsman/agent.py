"""The agent: a sidecar that asks the engine beside it how it is, and says so to every gateway by heartbeats.

So gateways need not poll, and all of them share one view that is as old as the agent's last look, a fifth of a second.
It asks in the engine's own dialect, by the same code with which a gateway polls, and beats when what it sees differs
from what it said last; else every two seconds.

An engine that is gone, or that was never there, is not announced: gateways evict it as they evict any worker that does
not beat. The last beat before that says that it drains, which stops new requests at once.
"""

import asyncio
import random
import signal
import time
from collections.abc import Sequence
from math import inf

import grpc
import uvloop

from pointsman.control.polling import Poller
from pointsman.domain.registry import STATIC, Registry
from pointsman.domain.worker import Worker
from pointsman.fleet import asking
from pointsman.heartbeat import Heartbeat
from pointsman.net.calls import Calls
from pointsman.net.clock import Deadlines, monotonic
from pointsman.net.limits import UpstreamLimits
from pointsman.net.observer import Silent
from pointsman.net.pool import Pool
from pointsman.proto.control_pb2 import ServedModel, WorkerStatus

__all__ = ["Agent", "run_agent", "status_of"]

LAST_BEAT_S = 2.0
"""How long the end of an agent waits for the beats that say so."""

LIMITS = UpstreamLimits(
    connect_s=2.0,
    head_s=5.0,
    first_byte_s=5.0,
    gap_s=5.0,
    total_s=inf,
    keepalive_s=4.0,
    idle_max=4,
    connections=0,
    hold_bytes=16 << 20,
)


class Agent:
    """Watches one engine, and beats to `registries` (host:port each).

    `worker` says where the engine is and how it is polled; `address` is where gateways reach it. `beat_s` is the
    longest time between two beats. Without `credentials` beats are plaintext. Raises InvalidReport for a worker that no
    registry takes.
    """

    def __init__(
        self,
        worker: Worker,
        registries: Sequence[str],
        *,
        address: str,
        beat_s: float = 2.0,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self._worker = worker
        self._address = address
        self._registry = Registry()
        self._registry.set_listed(STATIC, [worker])
        self._said: WorkerStatus | None = None
        self._was_up = False
        self._stopping = False
        self._beats = [
            Heartbeat(each, self._status, lambda: None, interval=beat_s, credentials=credentials)
            for each in registries
        ]

    async def run(self) -> None:
        """Watch and beat until cancelled; then tell every gateway that the engine drains."""
        deadlines = Deadlines(asyncio.get_running_loop())
        pool = Pool(LIMITS, deadlines, Silent())
        calls = Calls(pool, deadlines)
        poller = Poller(
            self._registry, asking(calls), now=monotonic, sleep=asyncio.sleep, random=random.random
        )
        poller.start()
        try:
            await self._watch()
        finally:
            self._stopping = True
            await poller.stop()
            if self._was_up:
                await self._beat_now(LAST_BEAT_S)
            await calls.close()
            pool.close()
            deadlines.close()

    async def _watch(self) -> None:
        """Let beats run while the engine is up."""
        tasks: list[asyncio.Task[None]] = []
        async with asyncio.TaskGroup() as beating:
            while True:
                await asyncio.sleep(self._worker.poll_interval_s)
                up = self._worker.up and bool(self._worker.model)
                if up and not self._was_up:
                    # Another life of the engine, as far as anybody can tell.
                    incarnation = time.time_ns()
                    for each in self._beats:
                        each.incarnation = incarnation
                    tasks = [beating.create_task(each.run()) for each in self._beats]
                elif self._was_up and not up:
                    for task in tasks:
                        task.cancel()
                    await self._beat_now(LAST_BEAT_S)
                elif up and self._said != self._now():
                    for each in self._beats:
                        each.soon()
                self._was_up = up

    async def _beat_now(self, within_s: float) -> None:
        """Say once how it is now; whoever does not listen will miss beats anyway."""
        beats = [asyncio.ensure_future(each.beat()) for each in self._beats]
        await asyncio.wait(beats, timeout=within_s)

    def _status(self) -> WorkerStatus:
        """Return what is to be said now, and note that it was said."""
        status = self._now()
        self._said = self._now()
        return status

    def _now(self) -> WorkerStatus:
        status = status_of(self._worker, self._address)
        status.draining = status.draining or self._stopping or not self._worker.up
        return status


def status_of(worker: Worker, address: str) -> WorkerStatus:
    """Return what gateways are told of a worker that they reach at `address`, `host:port` or a URL of it.

    >>> status_of(Worker("a", model="m", http_address="127.0.0.1:8000", dialect="vllm"), "10.0.0.7:8000").dialect
    'vllm'
    """
    status = WorkerStatus(
        worker_id=worker.id,
        http_address=address,
        role=worker.role.value,
        model=worker.model,
        kv_format=worker.kv_format,
        queue_depth=max(worker.queue_depth, 0),
        running=max(worker.running, 0),
        kv_free_blocks=max(worker.kv_free_blocks, 0),
        kv_total_blocks=max(worker.kv_total_blocks, 0),
        draining=worker.draining,
        dialect=worker.dialect,
        connector=worker.connector,
        bootstrap=worker.bootstrap,
        base_path=worker.base_path,
        served=[
            ServedModel(id=each.id, parent=each.parent, max_model_len=each.max_model_len)
            for each in worker.served
        ],
        max_model_len=worker.max_model_len,
        lora_slots=worker.lora_slots,
        slots=worker.slots,
        degraded=worker.degraded,
    )
    if worker.kv_tokens > 0:
        status.kv_tokens = worker.kv_tokens
    if worker.kv_usage >= 0:
        status.kv_usage = worker.kv_usage
    if worker.cached_tokens >= 0:
        status.cached_tokens = worker.cached_tokens
    if worker.remote_tokens >= 0:
        status.remote_tokens = worker.remote_tokens
    return status


def run_agent(agent: Agent) -> None:
    """Run an agent until SIGTERM or SIGINT."""
    uvloop.run(_run(agent))


async def _run(agent: Agent) -> None:
    loop = asyncio.get_running_loop()
    running = loop.create_task(agent.run())
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, running.cancel)
    try:
        await running
    except asyncio.CancelledError:
        if not running.cancelled():
            raise
