"""The composition root: builds every object of a gateway, starts it, reloads it, drains it and stops it.

Nothing else knows all the parts. The registry and the router are the only objects that the data plane and the control
plane share.
"""

import asyncio
import gc
import logging
import os
import random
import secrets
import signal
import ssl
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from operator import itemgetter
from pathlib import Path
from typing import Any, Protocol

import msgspec
import uvloop

from pointsman import parts
from pointsman.certificates import TlsError
from pointsman.config import (
    Address,
    Config,
    ConfigError,
    GatewayConfig,
    changed_options,
    servable,
    tls_files,
)
from pointsman.control.admin import AdminParts, Stats, admin_app
from pointsman.control.changes import Changes
from pointsman.control.discovery.sources import Sources, SourceSpec
from pointsman.control.health import health_app
from pointsman.control.heartbeat import Credentials, HeartbeatService, serve_registry
from pointsman.control.keyfile import KeyFileError
from pointsman.control.kv_events import KvEvents
from pointsman.control.polling import Poller
from pointsman.control.reload import Configuration, Reload, Watch, fingerprint
from pointsman.control.store import StoreError
from pointsman.control.sweep import Sweeper
from pointsman.dialect.engines import SERVES
from pointsman.dialect.reading import output_tokens_of
from pointsman.domain.blocks import TOKEN_BYTES
from pointsman.domain.keys import Scope
from pointsman.domain.policy import asks_index
from pointsman.domain.registry import Registry
from pointsman.domain.router import Router
from pointsman.domain.routes import RouteTable
from pointsman.domain.worker import Worker
from pointsman.errors import GatewayError, NoCapacity
from pointsman.fleet import asking, source_specs
from pointsman.flow.cascade import Cascades
from pointsman.flow.handover import Handoffs
from pointsman.net.asgi import AsgiServer
from pointsman.net.clock import Deadlines, monotonic
from pointsman.net.dataplane import DataPlane, Mounted
from pointsman.net.downstream import Downstream, Server
from pointsman.net.pool import Pool
from pointsman.net.tls import client_context, server_context
from pointsman.observe.access import Access
from pointsman.observe.decisions import Decisions
from pointsman.observe.lines import Lines
from pointsman.observe.logs import configure
from pointsman.observe.metrics import Metrics
from pointsman.observe.observers import Observers
from pointsman.observe.recording import Recording
from pointsman.observe.tracing import TracingUnavailable, open_tracing
from pointsman.wire.body import parse_request

__all__ = ["Gateway", "serve"]

logger = logging.getLogger(__name__)

BACKLOG = 4096
"""Connections that the kernel may hold until they are accepted; it lowers this to `net.core.somaxconn`."""

SAVE_EVERY_S = 5.0
"""How often the models seen are kept: what a crash may lose of an hour's memory."""

SPANS_S = 2.0
"""How long the end of a gateway may wait for its last spans to be sent."""

GC_THRESHOLD = 10_000
"""Objects more than at the last young collection before there is another. Requests leave no cycles, so few do."""

RELOAD_S = 5.0
"""How long the end of a gateway waits for a reload that has begun."""

THREADS = 64
"""Threads for calls that wait for disks and locks, not for cores."""

ADMIN = "/admin"


class Rotating(Protocol):
    """Certificates that can be read again."""

    def prepare(self) -> Callable[[], None]:
        """Read what the files hold now, and return what puts it in force. Raises TlsError."""


class Gateway:
    """One gateway: `start`, then `drain` and `stop`. Its addresses are known once it has started.

    `metrics` is the class that counts; `load` reads the configuration again, from `source`; `environ` has the pepper;
    access lines go to `lines`. Raises ConfigError for what the configuration asks for and cannot be had.
    """

    def __init__(
        self,
        config: Config,
        metrics: type[Metrics] = Metrics,
        *,
        load: Callable[[], Config] | None = None,
        source: str = "",
        environ: Mapping[str, str] = os.environ,
        lines: Lines | None = None,
    ) -> None:
        self.config = options = config.gateway
        self._load = load
        self._source = source
        self._lines = lines or Lines(sys.stderr)
        self._keys = parts.key_file(options, environ)
        self._applications = parts.mounts(options)
        parts.check_kv_events(options)
        self.store = parts.store(options)
        self.registry = Registry(options.heartbeat_miss_limit, workers_max=options.workers_max)
        self._index = index = parts.prefix_index(options)
        self.registry.on_leave.append(index.purge)
        self.router = Router(
            self.registry,
            parts.policy(options, index),
            RouteTable(),
            SERVES,
            parts.pairing(options, index),
        )
        self.metrics = metrics(
            self._live_workers,
            (*options.paths, "/v1/models", ADMIN, *(mount.path for mount in options.mounts)),
            route_epoch=lambda: self.router.table.epoch,
            drained=lambda: self.registry.drained,
            known=self._knows,
        )
        self.metrics.lines_dropped = lambda: self._lines.dropped
        self.metrics.prefix_blocks = lambda: len(index)
        self.decisions = Decisions(options.decisions_kept, time.time, monotonic)
        self.decisions.uses(self.router.policy)
        self._handoffs = Handoffs(draw_seed=lambda: secrets.randbits(63), wall=time.time)
        self._handoffs.tokenizers = self._tokenizers = parts.tokenizers(options)
        self._set_handoffs()
        self._acceptors = parts.acceptors(options)
        self._cascades = Cascades(self._acceptors)
        self.metrics.calibrations = self._cascades.calibrations
        self.address = self.health_address = ("", 0)
        self.registry_port = 0
        self.draining = False
        self.last_reload: Reload | None = None
        self._loaded_at = time.time()
        self._servers: list[asyncio.AbstractServer] = []
        self._watches: list[Watch] = []
        self._rotating: list[Rotating] = []
        self._grpc: Any = None
        self._reloads: set[asyncio.Task[Reload]] = set()

    async def start(self) -> None:
        """Build what needs a loop, and listen.

        Raises OSError where an address cannot be had, and ConfigError.
        """
        options = self.config
        loop = asyncio.get_running_loop()
        self._reloading = asyncio.Lock()
        self._deadlines = deadlines = Deadlines(loop)
        self._observe()
        self._pool = self._build_pool()
        self.registry.on_join.append(_joined)
        self.registry.on_leave.append(self._left)
        self.registry.on_reading.append(self.metrics.proofs.read)
        await self._remember()
        limits = parts.downstream_limits(options)
        self._plane = DataPlane(
            self.router,
            self._pool,
            deadlines,
            self._observers,
            admit=self._keys[1].admit if self._keys else parts.whoever(options),
            mounts=self._mounts(),
            handoffs=self._handoffs,
            cascades=self._cascades,
            keep_tails=bool(options.record_file),
            **self._plane_options(),
        )
        self.metrics.calls_dropped = lambda: self._plane.calls.dropped
        self.metrics.held = lambda: len(self._plane.holding)
        self.registry.on_change.append(self._plane.holding.changed)
        self._health = AsgiServer(
            health_app(self._not_ready, self.metrics.render), deadlines, self.metrics, limits
        )
        self._sweeper = Sweeper(self.registry, monotonic, loop.call_later)
        self._sweeper.start()
        self._kv_events = KvEvents(
            self.registry,
            self._index,
            self._block_bytes,
            now=monotonic,
            blocks_max=options.prefix_index_blocks_max,
            on_fault=lambda: self.metrics.fault("kv_events"),
        )
        self._use_tokens()
        self._kv_events.start()
        self.metrics.kv_events = self._kv_events.tally.events
        self.metrics.kv_streams = self._kv_events.tally.streams
        self.metrics.kv_followed = self._kv_events.followed
        self._poller = Poller(
            self.registry,
            asking(self._plane.calls),
            now=monotonic,
            sleep=asyncio.sleep,
            random=random.random,
            miss_limit=options.poll_miss_limit,
            hit_limit=options.poll_hit_limit,
            on_change=self._polled,
            on_fault=lambda: self.metrics.fault("polling"),
        )
        self._poller.start()
        self._sources = Sources(
            self.registry,
            sleep=asyncio.sleep,
            on_left_out=self.metrics.left_out,
            on_fault=lambda: self.metrics.fault("discovery"),
        )
        self._sources.set(self._source_specs(options))
        tls = tls_files(options)
        credentials = Credentials(tls.registry) if tls.registry else None
        context = server_context(tls.api) if tls.api else None
        self._rotating += [each for each in (credentials, context) if each is not None]
        service = HeartbeatService(
            self.registry, monotonic, lambda: self.metrics.fault("heartbeat")
        )
        self._grpc, self.registry_port = await serve_registry(
            options.registry_listen, service, credentials
        )
        self.health_address = await self._listen(options.health_listen, self._health)
        self.address = await self._listen(options.listen, self._plane, context)
        self._saver = loop.call_later(SAVE_EVERY_S, self._save_often)
        self._watch()
        if options.watch and self._load is not None:
            # What changed between its reading and the watch's first look would never be a change.
            await self.reload("watch")

    async def reload(self, trigger: str) -> Reload:
        """Read the configuration again and put it in force: all of it, or nothing where something is wrong.

        Requests that are under way are not touched. `trigger` is SIGHUP, watch or api. What needs a restart is named,
        and waits for it. Once begun it is brought to its end, also where whoever asked for it goes away.
        """
        task = asyncio.get_running_loop().create_task(self._report(trigger))
        self._reloads.add(task)
        task.add_done_callback(self._reloads.discard)
        return await asyncio.shield(task)

    async def drain(self) -> None:
        """Turn unready, take no more connections, and let what runs end until the drain deadline."""
        self.draining = True
        self._plane.drain()
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
        await self._sources.stop()
        await self._poller.stop()
        await self._kv_events.stop()
        for watch in self._watches:
            watch.stop()
        self._plane.stop()
        if self._reloads:
            await asyncio.wait(self._reloads, timeout=RELOAD_S)
        await self._plane.calls.close()
        self._plane.tokenizing.close()
        self._pool.close()
        for server in self._servers:
            server.close()
        await asyncio.sleep(0)  # let written bytes leave
        await self._grpc.stop(None)
        await self._changes.stop()
        self._deadlines.close()
        if self._access is not None:
            self._access.close()
        if self._recording is not None:
            await asyncio.to_thread(self._recording.close)
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close, SPANS_S)
        self._save()
        self.store.close()

    @property
    def reloading(self) -> bool:
        """Whether a reload has begun and not ended."""
        return bool(self._reloads)

    def configuration(self) -> Configuration:
        """Return what is in force."""
        return Configuration(
            source=self._source,
            loaded_at=self._loaded_at,
            config=msgspec.to_builtins(self.config),
            last_reload=self.last_reload,
        )

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
        self._observers = Observers(
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
            self._rotating.append(context)
        return Pool(parts.upstream_limits(options), self._deadlines, self._observers, context)

    def _set_handoffs(self) -> None:
        """Put the options of hand-offs in force."""
        self._handoffs.min_tokens = self.config.disagg_min_tokens
        self._handoffs.prefill_s = self.config.prefill_timeout_s

    async def _remember(self) -> None:
        """Take up what the last life of this gateway left, and what the file says."""
        try:
            seen = self.store.seen(wall=time.time(), monotonic=monotonic())
        except StoreError as error:
            raise ConfigError(str(error)) from error
        for model, at in sorted(seen.items(), key=itemgetter(1)):
            self.registry.remember(model, at)
        self._changes = Changes(
            self.registry,
            self.router,
            self.store,
            build=parts.static_worker,
            permit=lambda values: parts.permit_key(values, self.config),
            servable=lambda routes: servable(routes, self._acceptors),
            now=monotonic,
            drained=lambda worked: self.metrics.engine_drained(worked=worked),
        )
        try:
            await self._changes.restore()
            await self._changes.adopt(self.config.routes, _plain(self.config.workers))
        except GatewayError as error:
            raise ConfigError(error.message) from error

    def _mounts(self) -> list[Mounted]:
        """Return the applications beside the inference paths: the admin API, and those of the configuration."""
        options = self.config
        admin = admin_app(
            AdminParts(
                registry=self.registry,
                router=self.router,
                changes=self._changes,
                keys=self._keys[0] if self._keys else None,
                running=lambda: self._plane.running(),
                decisions=self.decisions.find,
                parse=lambda body, request_id: parse_request(
                    body,
                    request_id,
                    self.config.affinity_bytes,
                    block_bytes=self.config.prefix_block_bytes,
                ),
                calibrations=self._cascades.calibrations,
                recomputed=self.metrics.proofs.recomputed,
                stats=lambda: Stats(**msgspec.structs.asdict(self.metrics.totals())),
                configuration=self.configuration,
                reload=lambda: self.reload("api"),
                now=monotonic,
                wall=time.time,
            )
        )
        ours: list[parts.Application] = [(ADMIN, admin, Scope.ADMIN)]
        limits = parts.downstream_limits(options)
        return [
            Mounted(
                path.encode(),
                AsgiServer(application, self._deadlines, self._observers, limits, path),
                scope,
            )
            for path, application, scope in (*ours, *self._applications)
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
        self._plane.token_blocks = parts.token_blocks(
            self.config, self._tokenizers, self.router.policy
        )

    def _block_bytes(self, model: str) -> int | None:
        """Return the size of a block of a model's prompts in tokens, 0 for one that is compared in bytes.

        None where no policy compares prompts.
        """
        if not asks_index(self.router.policy):
            return None
        blocks = self._plane.token_blocks.get(model)
        return 0 if blocks is None else blocks.block_tokens * TOKEN_BYTES

    def _source_specs(self, options: GatewayConfig) -> list[SourceSpec]:
        return source_specs(
            options, lambda: self.metrics.fault("discovery"), self.metrics.source_said
        )

    async def _listen(
        self, listen: str, server: Server, context: ssl.SSLContext | None = None
    ) -> tuple[str, int]:
        address = Address.parse(listen)
        listener = await asyncio.get_running_loop().create_server(
            lambda: Downstream(server),
            address.host or None,
            address.port,
            backlog=BACKLOG,
            reuse_address=True,
            ssl=context,
            ssl_handshake_timeout=None if context is None else server.limits.head_s,
        )
        self._servers.append(listener)
        host, port = listener.sockets[0].getsockname()[:2]
        return host, port

    # Reloading.

    def _watch(self) -> None:
        """Follow the key file, and the configuration file where that is wanted."""
        if self._keys:
            # A revocation must act within seconds, whether or not anything else is watched.
            keys = self._keys[0]
            self._watches.append(
                Watch(keys.changes_seen, self._reload_keys, on_fault=self._watch_failed)
            )
        if self.config.watch and self._source:
            tls = tls_files(self.config)
            files = [Path(self._source)]
            files += [
                Path(pem.path)
                for side in (tls.api, tls.registry, tls.upstream)
                for pem in (side.cert, side.key, side.ca)
                if pem.path
            ]
            self._watches.append(
                Watch(
                    lambda: fingerprint(files),
                    lambda: self.reload("watch"),
                    on_fault=self._watch_failed,
                )
            )
        for watch in self._watches:
            watch.start()

    async def _report(self, trigger: str) -> Reload:
        """Reload, and tell everywhere what became of it."""
        async with self._reloading:
            try:
                changed, restart = await self._reload()
            except Exception as error:
                message = str(error)
                if not isinstance(error, ConfigError | GatewayError | TlsError):
                    # Whatever a file holds, the gateway goes on with what it has.
                    message = f"the gateway failed on it: {type(error).__name__}: {error}"
                    self.metrics.fault("reload")
                    logger.exception("a reload failed")
                outcome = Reload(at=time.time(), ok=False, trigger=trigger, message=message)
                logger.error("the configuration was not taken (%s): %s", trigger, message)
            else:
                outcome = Reload(
                    at=time.time(),
                    ok=True,
                    trigger=trigger,
                    message="the configuration is in force",
                    changed=tuple(changed),
                    needs_restart=tuple(restart),
                )
                self._loaded_at = outcome.at
                logger.info(
                    "the configuration was read again (%s): changed %s; waiting for a restart: %s",
                    trigger,
                    ", ".join(changed) or "nothing",
                    ", ".join(restart) or "nothing",
                )
            self.last_reload = outcome
            self.metrics.reloaded(worked=outcome.ok)
            return outcome

    async def _reload(self) -> tuple[list[str], list[str]]:
        """Return the options that changed, and those that wait for a restart."""
        if self._load is None:
            raise ConfigError("the gateway was started without a configuration file")
        wanted = (await asyncio.to_thread(self._load)).gateway
        changed, restart = changed_options(self.config, wanted)
        policy = self.router.policy
        if {"route_policy", "affinity_load_factor", "tie_break", "ttft_target_s"} & set(changed):
            policy = parts.policy(wanted, self._index)
        rotations = [await asyncio.to_thread(each.prepare) for each in self._rotating]
        if self._keys:
            await asyncio.to_thread(self._keys[0].check)
        parts.check_kv_events(wanted)
        sources = self._source_specs(wanted)
        tokenizers = await asyncio.to_thread(parts.tokenizers, wanted, self._tokenizers)
        former, self._acceptors = self._acceptors, await asyncio.to_thread(parts.acceptors, wanted)
        try:
            # The last that can fail, for it is the first that changes anything.
            await self._changes.adopt(wanted.routes, _plain(wanted.workers))
            former = self._acceptors
        finally:
            self._acceptors = former
        self._cascades.acceptors = self._acceptors
        self._handoffs.tokenizers = self._tokenizers = tokenizers
        for rotate in rotations:
            rotate()
        self._sources.set(sources)
        self.metrics.forget_sources({each.name for each in sources})
        values = {key: getattr(wanted, key) for key in changed}
        self.config = msgspec.structs.replace(self.config, **values)
        if policy is not self.router.policy:
            self.router.policy = policy
            self.decisions.uses(policy)
        self.router.pairing = parts.pairing(wanted, self._index)
        self._use_tokens()
        self._kv_events.blocks_max = wanted.prefix_index_blocks_max
        self._index.set_limits(wanted.prefix_index_blocks_max, wanted.prefix_index_ttl_s)
        self._plane.set_options(**self._plane_options())
        self._set_handoffs()
        self._health.limits = self._plane.limits
        self._pool.set_limits(parts.upstream_limits(self.config))
        if "log_level" in changed:
            logging.getLogger().setLevel(self.config.log_level.upper())
        if self._keys:
            # A file of its own, followed by itself: should it have gone bad since, that is told like any other time.
            await self._reload_keys()
        return changed, restart

    async def _reload_keys(self) -> None:
        assert self._keys is not None
        try:
            await asyncio.to_thread(self._keys[0].load)
        except KeyFileError as error:
            logger.error("the keys were not read again, the former ones stay: %s", error)
            self.metrics.reloaded(worked=False)
        else:
            logger.info("the keys were read again")
            # Good keys say nothing about a configuration that was refused.
            if self.last_reload is None or self.last_reload.ok:
                self.metrics.reloaded(worked=True)

    # What others ask, or tell.

    def _watch_failed(self) -> None:
        self.metrics.fault("watch")

    def _live_workers(self) -> tuple[Worker, ...]:
        return self.registry.live(monotonic())

    def _knows(self, model: str) -> bool:
        known = self.router.table.lookup(model) is not None
        return known or self.registry.knows(model, monotonic())

    def _polled(self, worker: Worker) -> None:
        self.metrics.polled(worker)
        # Whatever answers there next may be another engine, with an empty cache; if not, its events say so.
        if not worker.up and not self._kv_events.reads(worker):
            self._index.cleared(worker)

    def _left(self, worker: Worker) -> None:
        logger.info("worker %s (%s) left", worker.id, worker.model)
        if worker.static:  # An operator removed it, and it is none the worse for that.
            self._pool.retire(worker)
            self._plane.calls.retire(worker)
        else:
            self._pool.leave(worker)
            self._plane.calls.leave(worker)
        bootstrap = self._handoffs.forget(worker)
        if bootstrap is not None:
            self._pool.retire(bootstrap)
        self.metrics.forget_worker(worker.id)

    def _not_ready(self) -> str | None:
        if self.draining:
            return "draining"
        try:
            self.router.ready(monotonic())
        except NoCapacity as error:
            return f"not ready: {error}"
        return None

    def _save_often(self) -> None:
        loop = asyncio.get_running_loop()
        self._saver = loop.call_later(SAVE_EVERY_S, self._save_often)
        loop.run_in_executor(None, self._save)

    def _save(self) -> None:
        try:
            self.store.save_seen(self.registry.seen(), wall=time.time(), monotonic=monotonic())
        except StoreError as error:
            logger.error("%s", error)


def serve(config: Config, load: Callable[[], Config] | None = None, source: str = "") -> None:
    """Run a gateway until SIGTERM or SIGINT and its drain; a second signal ends it at once.

    `load` reads the configuration again, from the file `source`, on SIGHUP.
    """
    uvloop.run(_serve(config, load, source))


async def _serve(config: Config, load: Callable[[], Config] | None, source: str) -> None:
    options = config.gateway
    lines = configure(options.log_level, options.log_format)
    loop = asyncio.get_running_loop()
    signals: asyncio.Queue[int] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number)
    hangup = asyncio.Event()
    loop.add_signal_handler(signal.SIGHUP, hangup.set)
    loop.set_default_executor(ThreadPoolExecutor(THREADS))
    gateway = Gateway(config, load=load, source=source, lines=lines)
    try:
        await gateway.start()
    except OSError as error:
        raise ConfigError(f"cannot listen: {error}") from error
    except TlsError as error:  # The files were good when the configuration was read.
        raise ConfigError(str(error)) from error
    # What exists now stays: the collector need not look at it again, and requests leave no cycles behind.
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD, 20, 20)
    logger.info("serving on %s:%d, health on %s:%d, heartbeats on port %d",
                *gateway.address, *gateway.health_address, gateway.registry_port)  # fmt: skip
    if not options.keys_file:
        logger.warning("no keys_file: there is no authentication, every caller may infer")
    if not options.state_dir:
        logger.warning("no state_dir: a restart forgets routes, drains and models seen")
    reloads = loop.create_task(_reload_on(hangup, gateway))
    await signals.get()
    reloads.cancel()
    logger.info(
        "draining for at most %g s; a second signal ends it at once",
        gateway.config.drain_deadline_s,
    )
    drain = loop.create_task(gateway.drain())
    second = loop.create_task(signals.get())
    await asyncio.wait((drain, second), return_when=asyncio.FIRST_COMPLETED)
    drain.cancel()
    second.cancel()
    await gateway.stop()
    logger.info("stopped")
    if gateway.reloading:
        # A thread that waits for a file, on a network that is gone perhaps, cannot be ended in another way.
        os._exit(0)


async def _reload_on(hangup: asyncio.Event, gateway: Gateway) -> None:
    """Reload when the event is set; what comes while one runs is one more."""
    while True:
        await hangup.wait()
        hangup.clear()
        await gateway.reload("SIGHUP")


def _joined(worker: Worker) -> None:
    logger.info(
        "worker %s (%s, %s) joined at %s",
        worker.id,
        worker.model or "model not known yet",
        worker.role,
        worker.http_address,
    )


def _plain(workers: tuple[Any, ...]) -> list[dict[str, Any]]:
    """Return static workers as plain values."""
    return [msgspec.to_builtins(worker) for worker in workers]
