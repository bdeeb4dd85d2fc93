"""What serves clients: the data plane with all that it works with, over a registry that somebody else keeps.

It is built in `__init__`, goes on once there is a loop in `open` and `start`, and listens last. A reload is prepared
here, where much can fail, and put in force, where nothing can.

What it does not do: find out who is alive, keep anything, or serve operators (see `pointsman.app.gateway`).
"""

import asyncio
import logging
import random
import secrets
import ssl
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from pointsman import parts
from pointsman.config import Address, ConfigError, GatewayConfig, tls_files
from pointsman.control.kv_events import KvEvents
from pointsman.dialect.engines import SERVES
from pointsman.dialect.reading import output_tokens_of
from pointsman.domain.acceptor import Acceptor
from pointsman.domain.blocks import TOKEN_BYTES
from pointsman.domain.keys import Principal
from pointsman.domain.policy import Policy, asks_index
from pointsman.domain.registry import Registry
from pointsman.domain.router import Router
from pointsman.domain.routes import RouteTable
from pointsman.domain.worker import Worker
from pointsman.flow.cascade import Cascades
from pointsman.flow.handover import Handoffs
from pointsman.net.asgi import AsgiServer
from pointsman.net.clock import Deadlines, monotonic
from pointsman.net.dataplane import DataPlane, Mounted
from pointsman.net.downstream import Downstream, Server
from pointsman.net.pool import Pool
from pointsman.net.tls import client_context, server_context
from pointsman.net.tokenizing import LocalTokenizer
from pointsman.observe.access import Access
from pointsman.observe.decisions import Decisions
from pointsman.observe.lines import Lines
from pointsman.observe.metrics import Metrics
from pointsman.observe.observers import Observers
from pointsman.observe.recording import Recording
from pointsman.observe.tracing import TracingUnavailable, open_tracing

__all__ = ["ADMIN", "Prepared", "Rotating", "Serving", "listening"]

logger = logging.getLogger(__name__)

BACKLOG = 4096
"""Connections that the kernel may hold until they are accepted; it lowers this to `net.core.somaxconn`."""

SPANS_S = 2.0
"""How long the end of a gateway may wait for its last spans to be sent."""

ADMIN = "/admin"

OF_POLICY = frozenset(("route_policy", "affinity_load_factor", "tie_break", "ttft_target_s"))
"""The options that make another policy."""


class Rotating(Protocol):
    """Certificates that can be read again."""

    def prepare(self) -> Callable[[], None]:
        """Read what the files hold now, and return what puts it in force. Raises TlsError."""


class Prepared(NamedTuple):
    """What a reload puts in force: all that can fail has been done."""

    policy: Policy | None  # None for the one that is
    rotations: list[Callable[[], None]]
    tokenizers: dict[str, LocalTokenizer]
    acceptors: dict[str, Acceptor]


class Serving:
    """The data plane and its parts: `open`, `start`, then `listen`; at the end `drain` and `stop`.

    `metrics` is the class that counts, `known` tells of a model whether anybody still has it; access lines go to
    `lines`. Raises ConfigError for what the configuration asks for and cannot be had.
    """

    plane: DataPlane
    pool: Pool
    deadlines: Deadlines
    observers: Observers
    kv_events: KvEvents

    def __init__(
        self,
        options: GatewayConfig,
        registry: Registry,
        lines: Lines,
        metrics: type[Metrics] = Metrics,
    ) -> None:
        self.config = options
        self.registry = registry
        self._lines = lines
        self._applications = parts.mounts(options)
        parts.check_kv_events(options)
        self.index = index = parts.prefix_index(options)
        registry.on_leave.append(index.purge)
        self.router = Router(
            registry,
            parts.policy(options, index),
            RouteTable(),
            SERVES,
            parts.pairing(options, index),
        )
        self.metrics = metrics(
            lambda: registry.live(monotonic()),
            (*options.paths, "/v1/models", ADMIN, *(mount.path for mount in options.mounts)),
            route_epoch=lambda: self.router.table.epoch,
            drained=lambda: registry.drained,
            known=self._knows,
        )
        self.metrics.lines_dropped = lambda: lines.dropped
        self.metrics.prefix_blocks = lambda: len(index)
        self.decisions = Decisions(options.decisions_kept, time.time, monotonic)
        self.decisions.uses(self.router.policy)
        self.handoffs = Handoffs(draw_seed=lambda: secrets.randbits(63), wall=time.time)
        self.handoffs.tokenizers = self._tokenizers = parts.tokenizers(options)
        self._set_handoffs()
        self.acceptors = parts.acceptors(options)
        self.cascades = Cascades(self.acceptors)
        self.metrics.calibrations = self.cascades.calibrations
        self.rotating: list[Rotating] = []
        self._listener: asyncio.AbstractServer | None = None

    def open(self) -> None:
        """Build what needs a loop and no worker."""
        self.deadlines = Deadlines(asyncio.get_running_loop())
        self._observe()
        self.pool = self._build_pool()
        self.registry.on_leave.append(self._left)
        self.registry.on_reading.append(self.metrics.proofs.read)

    def start(
        self, admit: Callable[[bytes | None, float], Principal], mounts: Sequence[Mounted] = ()
    ) -> None:
        """Build the data plane: it lets in whom `admit` does, and serves `mounts` and those of the configuration."""
        options = self.config
        self.plane = DataPlane(
            self.router,
            self.pool,
            self.deadlines,
            self.observers,
            admit=admit,
            mounts=(*mounts, *self._mounts()),
            handoffs=self.handoffs,
            cascades=self.cascades,
            keep_tails=bool(options.record_file),
            **self._plane_options(),
        )
        self.metrics.calls_dropped = lambda: self.plane.calls.dropped
        self.metrics.held = lambda: len(self.plane.holding)
        self.registry.on_change.append(self.plane.holding.changed)
        self.kv_events = KvEvents(
            self.registry,
            self.index,
            self.block_bytes,
            now=monotonic,
            blocks_max=options.prefix_index_blocks_max,
            on_fault=lambda: self.metrics.fault("kv_events"),
        )
        self._use_tokens()
        self.metrics.kv_events = self.kv_events.tally.events
        self.metrics.kv_streams = self.kv_events.tally.streams
        self.metrics.kv_followed = self.kv_events.followed
        self.kv_events.start()

    async def listen(self, *, shared: bool = False) -> tuple[str, int]:
        """Take connections, and return where; a `shared` port is one that other processes listen on, too.

        Raises OSError where the address cannot be had, and TlsError.
        """
        files = tls_files(self.config).api
        context = server_context(files) if files else None
        if context is not None:
            self.rotating.append(context)
        self._listener, address = await listening(
            self.config.listen, self.plane, context, shared=shared
        )
        return address

    # Reloading.

    async def prepare(self, wanted: GatewayConfig, changed: Sequence[str]) -> Prepared:
        """Make what a new configuration needs, of which `changed` are the options that differ.

        Nothing is changed. Raises ConfigError and TlsError.
        """
        policy = parts.policy(wanted, self.index) if OF_POLICY & set(changed) else None
        rotations = [await asyncio.to_thread(each.prepare) for each in self.rotating]
        parts.check_kv_events(wanted)
        tokenizers = await asyncio.to_thread(parts.tokenizers, wanted, self._tokenizers)
        acceptors = await asyncio.to_thread(parts.acceptors, wanted)
        return Prepared(policy, rotations, tokenizers, acceptors)

    def adopt(self, config: GatewayConfig, wanted: GatewayConfig, prepared: Prepared) -> None:
        """Put it in force. `config` is what holds from now on: `wanted` but for what waits for a restart."""
        self.config = config
        self.acceptors = self.cascades.acceptors = prepared.acceptors
        self.handoffs.tokenizers = self._tokenizers = prepared.tokenizers
        for rotate in prepared.rotations:
            rotate()
        if prepared.policy is not None:
            self.router.policy = prepared.policy
            self.decisions.uses(prepared.policy)
        self.router.pairing = parts.pairing(wanted, self.index)
        self._use_tokens()
        self.kv_events.blocks_max = wanted.prefix_index_blocks_max
        self.index.set_limits(wanted.prefix_index_blocks_max, wanted.prefix_index_ttl_s)
        self.plane.set_options(**self._plane_options())
        self._set_handoffs()
        self.pool.set_limits(parts.upstream_limits(config))

    # The end.

    async def drain(self) -> None:
        """Take no more connections, and let what runs end until the drain deadline."""
        self.plane.drain()
        await asyncio.sleep(self.config.shutdown_grace_s)
        if self._listener is not None:
            self._listener.close()
        for client in tuple(self.plane.connections):
            client.close_idle()
        try:
            async with asyncio.timeout(self.config.drain_deadline_s):
                await self.plane.empty.wait()
        except TimeoutError:
            logger.warning("the drain deadline ended %d answers", len(self.plane.connections))
            self.plane.stop()

    async def stop(self) -> None:
        """End every answer and connection, at once but for what is written already."""
        await self.kv_events.stop()
        self.plane.stop()
        await self.plane.calls.close()
        self.plane.tokenizing.close()
        self.pool.close()
        if self._listener is not None:
            self._listener.close()
        await asyncio.sleep(0)  # let written bytes leave

    async def close(self) -> None:
        """Close what hears of requests, when none can end any more."""
        self.deadlines.close()
        if self._access is not None:
            self._access.close()
        if self._recording is not None:
            await asyncio.to_thread(self._recording.close)
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close, SPANS_S)

    # What is asked of it.

    def block_bytes(self, model: str) -> int | None:
        """Return the size of a block of a model's prompts in tokens, 0 for one that is compared in bytes.

        None where no policy compares prompts.
        """
        if not asks_index(self.router.policy):
            return None
        blocks = self.plane.token_blocks.get(model)
        return 0 if blocks is None else blocks.block_tokens * TOKEN_BYTES

    # Building.

    def _observe(self) -> None:
        """Build who hears of what happens."""
        options = self.config
        self._access = None
        if options.access_log != "off":
            self._access = Access(
                options.access_log,
                options.access_log_sample,
                self._lines,
                random.random,
                wall=time.time,
                later=asyncio.get_running_loop().call_later,
            )
        self._tracer = None
        if options.otel_endpoint:
            try:
                self._tracer = open_tracing(
                    options.otel_endpoint,
                    options.otel_sample,
                    random_bits=random.getrandbits,
                    wall_ns=time.time_ns,
                )
            except TracingUnavailable as error:
                raise ConfigError(str(error)) from error
            self.metrics.spans = self._tracer.outcomes
        self._recording = recording = None
        if options.record_file:
            try:
                self._recording = recording = Recording(
                    Path(options.record_file),
                    options.record_max_bytes,
                    wall=time.time,
                    now=monotonic,
                    output_tokens=output_tokens_of,
                )
            except OSError as error:
                raise ConfigError(f"gateway.record_file: {error}") from None
            self.metrics.records_dropped = lambda: recording.dropped
        self.observers = Observers(
            self.metrics,
            recording=self._recording,
            decisions=self.decisions if options.decisions_kept else None,
            access=self._access,
            tracer=self._tracer,
        )

    def _build_pool(self) -> Pool:
        options = self.config
        files = tls_files(options).upstream
        context = None
        if files:
            context = client_context(files)
            self.rotating.append(context)
        return Pool(parts.upstream_limits(options), self.deadlines, self.observers, context)

    def _mounts(self) -> list[Mounted]:
        """Return the applications of the configuration."""
        limits = parts.downstream_limits(self.config)
        return [
            Mounted(
                path.encode(),
                AsgiServer(application, self.deadlines, self.observers, limits, path),
                scope,
            )
            for path, application, scope in self._applications
        ]

    def _plane_options(self) -> dict[str, Any]:
        """Return the options of the data plane that a reload can change."""
        options = self.config
        return {
            "paths": options.paths,
            "limits": parts.downstream_limits(options),
            "upstream_limits": parts.upstream_limits(options),
            "max_attempts": options.max_attempts,
            "affinity_bytes": options.affinity_bytes,
            "block_bytes": options.prefix_block_bytes,
            "public_models": options.response_model == "public",
            "hold_s": options.hold_timeout_s,
            "hold_max": options.hold_max,
        }

    def _use_tokens(self) -> None:
        """Let prompts be compared by their tokens, where that can be and somebody compares them."""
        self.plane.token_blocks = parts.token_blocks(
            self.config, self._tokenizers, self.router.policy
        )

    def _set_handoffs(self) -> None:
        """Put the options of hand-offs in force."""
        self.handoffs.min_tokens = self.config.disagg_min_tokens
        self.handoffs.prefill_s = self.config.prefill_timeout_s

    def _knows(self, model: str) -> bool:
        known = self.router.table.lookup(model) is not None
        return known or self.registry.knows(model, monotonic())

    def _left(self, worker: Worker) -> None:
        if worker.static:  # An operator removed it, and it is none the worse for that.
            self.pool.retire(worker)
            self.plane.calls.retire(worker)
        else:
            self.pool.leave(worker)
            self.plane.calls.leave(worker)
        bootstrap = self.handoffs.forget(worker)
        if bootstrap is not None:
            self.pool.retire(bootstrap)
        self.metrics.forget_worker(worker.id)


async def listening(
    listen: str, server: Server, context: ssl.SSLContext | None = None, *, shared: bool = False
) -> tuple[asyncio.AbstractServer, tuple[str, int]]:
    """Listen for the connections of a server; return the listener, and its host and port. Raises OSError."""
    address = Address.parse(listen)
    listener = await asyncio.get_running_loop().create_server(
        lambda: Downstream(server),
        address.host or None,
        address.port,
        backlog=BACKLOG,
        reuse_address=True,
        reuse_port=shared or None,
        ssl=context,
        ssl_handshake_timeout=None if context is None else server.limits.head_s,
    )
    host, port = listener.sockets[0].getsockname()[:2]
    return listener, (host, port)
