"""The composition root: builds every object of a gateway, starts it, drains it and stops it.

Nothing else knows all the parts. The registry and the router are the only objects that the data plane and the control
plane share.
"""

import asyncio
import gc
import logging
import os
import random
import signal
import socket
import time
from math import inf
from pathlib import Path
from typing import Any

import uvloop

from pointsman.config import Address, Config, ConfigError, GatewayConfig
from pointsman.control.health import health_app
from pointsman.control.heartbeat import HeartbeatService, serve_registry
from pointsman.control.store import Store, StoreError
from pointsman.control.sweep import Sweeper
from pointsman.domain.policy import Policy, PolicyOptions, make_policy
from pointsman.domain.registry import Registry
from pointsman.domain.router import Router
from pointsman.domain.routes import RouteTable
from pointsman.domain.worker import Worker
from pointsman.errors import NoCapacity
from pointsman.net.asgi import AsgiServer
from pointsman.net.clock import Deadlines, monotonic
from pointsman.net.dataplane import DataPlane
from pointsman.net.downstream import Downstream, Server
from pointsman.net.limits import DownstreamLimits, UpstreamLimits
from pointsman.net.pool import Pool
from pointsman.observe.metrics import Metrics

__all__ = ["Gateway", "serve"]

logger = logging.getLogger(__name__)

BACKLOG = 4096
"""Connections that the kernel may hold until they are accepted; it lowers this to `net.core.somaxconn`."""

SAVE_EVERY_S = 5.0
"""How often the models seen are kept: what a crash may lose of an hour's memory."""

GC_THRESHOLD = 10_000
"""Objects more than at the last young collection before there is another. Requests leave no cycles, so few do."""


class Gateway:
    """One gateway: `start`, then `drain` and `stop`. Its addresses are known once it has started.

    `metrics` is the class that counts. Raises ConfigError where the state folder cannot be used.
    """

    def __init__(self, config: Config, metrics: type[Metrics] = Metrics) -> None:
        self.config = options = config.gateway
        self.store = _store(options)
        epoch = self.store.epoch_of(options.routes) if self.store else 1
        self.registry = Registry(miss_limit=options.heartbeat_miss_limit)
        self.router = Router(self.registry, _policy(options), RouteTable(options.routes, epoch))
        self.metrics = metrics(self._live_workers, (*options.paths, "/v1/models"))
        self.address = self.health_address = ("", 0)
        self.registry_port = 0
        self.draining = False
        self._servers: list[asyncio.AbstractServer] = []
        self._grpc: Any = None

    async def start(self) -> None:
        """Build what needs a loop, and listen. Raises OSError where an address cannot be had."""
        options = self.config
        loop = asyncio.get_running_loop()
        self._deadlines = deadlines = Deadlines(loop)
        upstream_limits = _upstream_limits(options)
        self._pool = Pool(upstream_limits, deadlines, self.metrics)
        self.registry.on_join.append(_joined)
        self.registry.on_leave.append(self._left)
        if self.store:
            seen = self.store.seen(wall=time.time(), monotonic=monotonic())
            for model, at in seen.items():
                self.registry.remember(model, at)
        for static in options.workers:
            self.registry.add(static.worker())
        limits = _downstream_limits(options)
        self._plane = DataPlane(
            self.router,
            self._pool,
            deadlines,
            self.metrics,
            paths=options.paths,
            limits=limits,
            upstream_limits=upstream_limits,
            max_attempts=options.max_attempts,
            affinity_bytes=options.affinity_bytes,
            public_models=options.response_model == "public",
        )
        health = AsgiServer(
            health_app(self._not_ready, self.metrics.render), deadlines, self.metrics, limits
        )
        self._sweeper = Sweeper(self.registry, monotonic, loop.call_later)
        self._sweeper.start()
        service = HeartbeatService(
            self.registry, monotonic, lambda: self.metrics.fault("heartbeat")
        )
        self._grpc, self.registry_port = await serve_registry(options.registry_listen, service)
        self.health_address = await self._listen(options.health_listen, health)
        self.address = await self._listen(options.listen, self._plane)
        self._saver = loop.call_later(SAVE_EVERY_S, self._save_often)

    async def drain(self) -> None:
        """Turn unready, take no more connections, and let what runs end until the drain deadline."""
        self.draining = True
        self._plane.draining = True
        await asyncio.sleep(self.config.shutdown_grace_s)
        self._servers[-1].close()
        for client in tuple(self._plane.connections):
            client.close_idle()
        try:
            async with asyncio.timeout(self.config.drain_deadline_s):
                await self._plane.empty.wait()
        except TimeoutError:
            logger.warning("the drain deadline ended %d answers", len(self._plane.connections))
            self._plane.stop()

    async def stop(self) -> None:
        """Close everything, at once but for what is written already."""
        self._saver.cancel()
        self._sweeper.stop()
        self._plane.stop()
        self._pool.close()
        for server in self._servers:
            server.close()
        await asyncio.sleep(0)  # let written bytes leave
        await self._grpc.stop(None)
        self._deadlines.close()
        if self.store:
            self._save()
            self.store.close()

    async def _listen(self, listen: str, server: Server) -> tuple[str, int]:
        address = Address.parse(listen)
        listener = await asyncio.get_running_loop().create_server(
            lambda: Downstream(server),
            address.host or None,
            address.port,
            backlog=BACKLOG,
            reuse_address=True,
        )
        self._servers.append(listener)
        host, port = listener.sockets[0].getsockname()[:2]
        return host, port

    def _live_workers(self) -> tuple[Worker, ...]:
        self.registry.expire(monotonic())
        return self.registry.snapshot()

    def _left(self, worker: Worker) -> None:
        logger.info("worker %s (%s) left", worker.id, worker.model)
        self._pool.leave(worker)

    def _not_ready(self) -> str | None:
        if self.draining:
            return "draining"
        try:
            self.router.ready(monotonic())
        except NoCapacity as error:
            return f"not ready: {error}"
        return None

    def _save_often(self) -> None:
        self._saver = asyncio.get_running_loop().call_later(SAVE_EVERY_S, self._save_often)
        if self.store:
            asyncio.get_running_loop().run_in_executor(None, self._save)

    def _save(self) -> None:
        assert self.store is not None
        try:
            self.store.save_seen(self.registry.seen(), wall=time.time(), monotonic=monotonic())
        except StoreError as error:
            logger.error("%s", error)


def serve(config: Config) -> None:
    """Run a gateway until SIGTERM or SIGINT and its drain; a second signal ends it at once."""
    uvloop.run(_serve(config))


async def _serve(config: Config) -> None:
    loop = asyncio.get_running_loop()
    signals: asyncio.Queue[int] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number)
    gateway = Gateway(config)
    try:
        await gateway.start()
    except OSError as error:
        raise ConfigError(f"cannot listen: {error}") from error
    options = config.gateway
    # What exists now stays: the collector need not look at it again, and requests leave no cycles behind.
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD, 20, 20)
    logger.info("serving on %s:%d, health on %s:%d, heartbeats on port %d",
                *gateway.address, *gateway.health_address, gateway.registry_port)  # fmt: skip
    if not options.keys_file:
        logger.warning("no keys_file: there is no authentication, every caller may do everything")
    if not options.state_dir:
        logger.warning("no state_dir: a restart forgets which models were seen")
    await signals.get()
    logger.info(
        "draining for at most %g s; a second signal ends it at once", options.drain_deadline_s
    )
    drain = loop.create_task(gateway.drain())
    second = loop.create_task(signals.get())
    await asyncio.wait((drain, second), return_when=asyncio.FIRST_COMPLETED)
    drain.cancel()
    second.cancel()
    await gateway.stop()
    logger.info("stopped")


def _joined(worker: Worker) -> None:
    logger.info(
        "worker %s (%s, %s) joined at %s", worker.id, worker.model, worker.role, worker.http_address
    )


def _store(options: GatewayConfig) -> Store | None:
    if not options.state_dir:
        return None
    try:
        return Store(Path(options.state_dir))
    except StoreError as error:
        raise ConfigError(str(error)) from error


def _policy(options: GatewayConfig) -> Policy:
    salt = f"{socket.gethostname()} {os.getpid()}".encode()
    return make_policy(
        options.route_policy,
        PolicyOptions(
            load_factor=options.affinity_load_factor, tie_break=options.tie_break, salt=salt
        ),
        random.Random(),
    )


def _upstream_limits(options: GatewayConfig) -> UpstreamLimits:
    return UpstreamLimits(
        connect_s=options.connect_timeout_s,
        head_s=options.head_timeout_s,
        first_byte_s=options.first_byte_timeout_s,
        gap_s=options.gap_timeout_s,
        total_s=options.total_timeout_s or inf,
        keepalive_s=options.upstream_keepalive_s,
        idle_max=options.upstream_idle_max,
        connections=options.upstream_connections_max,
        # A model can only be renamed in an answer that is there in full.
        hold_bytes=options.hold_bytes
        if options.response_model == "served"
        else options.max_body_bytes,
    )


def _downstream_limits(options: GatewayConfig) -> DownstreamLimits:
    return DownstreamLimits(
        head_s=options.header_timeout_s,
        body_s=options.body_timeout_s,
        keepalive_s=options.keepalive_timeout_s,
        head_bytes=options.max_header_bytes,
        body_bytes=options.max_body_bytes,
        connections=options.connections_max,
    )
