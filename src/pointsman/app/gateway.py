"""A whole gateway: the control plane, and with it the data plane of `pointsman.app.serving`, over one registry.

It is started, reloaded, drained and stopped here. The registry and the router are the only objects that the two planes
share.
"""

import asyncio
import logging
import os
import random
import sys
import time
from collections.abc import Callable, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec

from pointsman import parts
from pointsman.app.serving import ADMIN, Rotating, Serving, listening
from pointsman.certificates import TlsError
from pointsman.config import (
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
from pointsman.control.polling import Poller
from pointsman.control.reload import Configuration, Reload, Watch, fingerprint
from pointsman.control.store import StoreError
from pointsman.control.sweep import Sweeper
from pointsman.domain.keys import Scope
from pointsman.domain.registry import Registry
from pointsman.domain.router import Router
from pointsman.domain.worker import Worker
from pointsman.errors import GatewayError, NoCapacity
from pointsman.fleet import asking, source_specs
from pointsman.net.asgi import AsgiServer
from pointsman.net.clock import monotonic
from pointsman.net.dataplane import Mounted
from pointsman.observe.decisions import Decisions
from pointsman.observe.lines import Lines
from pointsman.observe.metrics import Metrics
from pointsman.wire.body import parse_request

__all__ = ["Gateway"]

logger = logging.getLogger(__name__)

SAVE_EVERY_S = 5.0
"""How often the models seen are kept: what a crash may lose of an hour's memory."""

RELOAD_S = 5.0
"""How long the end of a gateway waits for a reload that has begun."""


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
        self._keys = parts.key_file(options, environ)
        self.store = parts.store(options)
        self.registry = Registry(options.heartbeat_miss_limit, workers_max=options.workers_max)
        self.serving = Serving(options, self.registry, lines or Lines(sys.stderr), metrics)
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

    @property
    def router(self) -> Router:
        """Where requests go."""
        return self.serving.router

    @property
    def metrics(self) -> Metrics:
        """What has been counted."""
        return self.serving.metrics

    @property
    def decisions(self) -> Decisions:
        """The last decisions."""
        return self.serving.decisions

    async def start(self) -> None:
        """Build what needs a loop, and listen.

        Raises OSError where an address cannot be had, and ConfigError.
        """
        options, serving = self.config, self.serving
        loop = asyncio.get_running_loop()
        self._reloading = asyncio.Lock()
        serving.open()
        self.registry.on_join.append(_joined)
        self.registry.on_leave.append(_left)
        await self._remember()
        serving.start(
            self._keys[1].admit if self._keys else parts.whoever(options), [self._admin()]
        )
        self._health = AsgiServer(
            health_app(self._not_ready, self.metrics.render),
            serving.deadlines,
            self.metrics,
            serving.plane.limits,
        )
        self._sweeper = Sweeper(self.registry, monotonic, loop.call_later)
        self._sweeper.start()
        self._poller = Poller(
            self.registry,
            asking(serving.plane.calls),
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
        files = tls_files(options).registry
        credentials = Credentials(files) if files else None
        if credentials is not None:
            self._rotating.append(credentials)
        service = HeartbeatService(
            self.registry, monotonic, lambda: self.metrics.fault("heartbeat")
        )
        self._grpc, self.registry_port = await serve_registry(
            options.registry_listen, service, credentials
        )
        listener, self.health_address = await listening(options.health_listen, self._health)
        self._servers.append(listener)
        self.address = await serving.listen()
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
        await self.serving.drain()

    async def stop(self) -> None:
        """Close everything, at once but for what is written already."""
        self._saver.cancel()
        self._sweeper.stop()
        await self._sources.stop()
        await self._poller.stop()
        for watch in self._watches:
            watch.stop()
        self.serving.plane.stop()
        if self._reloads:
            await asyncio.wait(self._reloads, timeout=RELOAD_S)
        for server in self._servers:
            server.close()
        await self.serving.stop()
        await self._grpc.stop(None)
        await self._changes.stop()
        await self.serving.close()
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

    async def _remember(self) -> None:
        """Take up what the last life of this gateway left, and what the file says."""
        try:
            seen = self.store.seen(wall=time.time(), monotonic=monotonic())
        except StoreError as error:
            raise ConfigError(str(error)) from error
        for model, at in sorted(seen.items(), key=itemgetter(1)):
            self.registry.remember(model, at)
        # The learned acceptors that routes may name: those in force, or those of a reload that is about to be.
        self._acceptors = self.serving.acceptors
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

    def _admin(self) -> Mounted:
        """Return the admin API."""
        serving = self.serving
        application = admin_app(
            AdminParts(
                registry=self.registry,
                router=self.router,
                changes=self._changes,
                keys=self._keys[0] if self._keys else None,
                running=lambda: serving.plane.running(),
                decisions=self.decisions.find,
                parse=lambda body, request_id: parse_request(
                    body,
                    request_id,
                    self.config.affinity_bytes,
                    block_bytes=self.config.prefix_block_bytes,
                ),
                calibrations=serving.cascades.calibrations,
                recomputed=self.metrics.proofs.recomputed,
                stats=lambda: Stats(**msgspec.structs.asdict(self.metrics.totals())),
                configuration=self.configuration,
                reload=lambda: self.reload("api"),
                now=monotonic,
                wall=time.time,
            )
        )
        limits = parts.downstream_limits(self.config)
        server = AsgiServer(application, serving.deadlines, serving.observers, limits, ADMIN)
        return Mounted(ADMIN.encode(), server, Scope.ADMIN)

    def _source_specs(self, options: GatewayConfig) -> list[SourceSpec]:
        return source_specs(
            options, lambda: self.metrics.fault("discovery"), self.metrics.source_said
        )

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
        serving = self.serving
        prepared = await serving.prepare(wanted, changed)
        rotations = [await asyncio.to_thread(each.prepare) for each in self._rotating]
        if self._keys:
            await asyncio.to_thread(self._keys[0].check)
        sources = self._source_specs(wanted)
        former, self._acceptors = self._acceptors, prepared.acceptors
        try:
            # The last that can fail, for it is the first that changes anything.
            await self._changes.adopt(wanted.routes, _plain(wanted.workers))
            former = self._acceptors
        finally:
            self._acceptors = former
        for rotate in rotations:
            rotate()
        self._sources.set(sources)
        self.metrics.forget_sources({each.name for each in sources})
        values = {key: getattr(wanted, key) for key in changed}
        self.config = msgspec.structs.replace(self.config, **values)
        serving.adopt(self.config, wanted, prepared)
        self._health.limits = serving.plane.limits
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

    def _polled(self, worker: Worker) -> None:
        self.metrics.polled(worker)
        # Whatever answers there next may be another engine, with an empty cache; if not, its events say so.
        if not worker.up and not self.serving.kv_events.reads(worker):
            self.serving.index.cleared(worker)

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


def _joined(worker: Worker) -> None:
    logger.info(
        "worker %s (%s, %s) joined at %s",
        worker.id,
        worker.model or "model not known yet",
        worker.role,
        worker.http_address,
    )


def _left(worker: Worker) -> None:
    logger.info("worker %s (%s) left", worker.id, worker.model)


def _plain(workers: tuple[Any, ...]) -> list[dict[str, Any]]:
    """Return static workers as plain values."""
    return [msgspec.to_builtins(worker) for worker in workers]
