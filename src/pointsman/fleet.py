"""Who lists the fleet, and how it is asked: from options to what `Sources` and `Poller` are made with.

The control plane says what is asked of an engine, the data plane has the connections; here they meet.
"""

import asyncio
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeAlias

from pointsman import parts
from pointsman.config import (
    ConfigError,
    DnsSource,
    GatewayConfig,
    KubernetesSource,
    SourceOptions,
    WorkerFile,
)
from pointsman.control.discovery.cluster import ApiServer, KubernetesMissing
from pointsman.control.discovery.dns import Dns, Lookup, LookupFailed, addresses, targets
from pointsman.control.discovery.file import File
from pointsman.control.discovery.found import Found
from pointsman.control.discovery.informer import Clock
from pointsman.control.discovery.kubernetes import Kubernetes
from pointsman.control.discovery.sources import Source, SourceSpec
from pointsman.control.polling import Ask
from pointsman.dialect.reading import Probed
from pointsman.domain.worker import Worker
from pointsman.errors import BadRequest
from pointsman.flow.effects import Lost
from pointsman.net.calls import Calls
from pointsman.net.clock import monotonic

__all__ = ["asking", "source_specs"]

Said: TypeAlias = Callable[[str, str], None]
"""Hears what a source says of its list."""


def source_specs(
    options: GatewayConfig, on_fault: Callable[[], None], said: Said
) -> list[SourceSpec]:
    """Return the sources of the configuration. Nothing is started.

    `said` gets the name of a source of Kubernetes, and "" or why its list may be old or not whole.

    Raises ConfigError for one whose extra is not installed.
    """
    try:
        return [
            *(_spec(each, partial(_dns, each, _lookup(each))) for each in options.dns),
            *(_spec(each, partial(_file, each, on_fault)) for each in options.worker_files),
            *(
                _spec(each, partial(_Cluster, each, ApiServer(), said))
                for each in options.kubernetes
            ),
        ]
    except (KubernetesMissing, LookupFailed) as error:
        raise ConfigError(str(error)) from error


def asking(calls: Calls) -> Ask:
    """Return how a worker is asked: over its own connections, by its base path, with its credentials."""

    async def ask(worker: Worker, path: str, timeout_s: float) -> Probed:
        answer = await calls.get(worker, path, timeout_s)
        if isinstance(answer, Lost):
            return Probed(0, b"", answer.detail or str(answer.why))
        # It is too large, or a stream: half an answer would be read as a whole one.
        if not answer.complete:
            return Probed(0, b"", "an answer without an end")
        return Probed(answer.head.status, answer.payload)

    return ask


def _spec(
    options: DnsSource | WorkerFile | KubernetesSource, make: Callable[[], Source]
) -> SourceSpec:
    return SourceSpec(options.source, options, make, _builder(options, options.source))


def _builder(options: SourceOptions, name: str) -> Callable[[Found], Worker]:
    def build(found: Found) -> Worker:
        try:
            return parts.found_worker(options, found, name)
        except BadRequest as error:
            raise ValueError(error.message) from None

    return build


def _lookup(options: DnsSource) -> Lookup:
    if options.record == "srv":
        return targets(options.name)
    return addresses(options.name, options.port)


def _dns(options: DnsSource, lookup: Lookup) -> Dns:
    return Dns(
        options.source,
        lookup,
        interval_s=options.interval_s,
        now=monotonic,
        sleep=asyncio.sleep,
    )


def _file(options: WorkerFile, on_fault: Callable[[], None]) -> File:
    return File(Path(options.file), sleep=asyncio.sleep, on_fault=on_fault)


class _Cluster:
    """The pods of a Kubernetes cluster, as one of several sources."""

    def __init__(self, options: KubernetesSource, server: ApiServer, said: Said) -> None:
        self._options = options
        self._server = server
        self._said = said

    async def run(self, found: Callable[[list[Found]], None]) -> None:
        """Follow them until cancelled."""
        options = self._options
        pods = Kubernetes(
            self._server,
            clock=Clock(random.random, monotonic),
            found=found,
            namespace=options.namespace,
            selector=options.selector,
            inference_pool=options.inference_pool,
            port=options.port,
            on_degraded=partial(self._said, options.source),
        )
        self._said(options.source, "")
        pods.start()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await pods.stop()
            await self._server.close()
