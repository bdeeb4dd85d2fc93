"""The gateway as a process: signals, and what is set up once."""

import asyncio
import gc
import logging
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import uvloop

from pointsman.app.gateway import Gateway
from pointsman.certificates import TlsError
from pointsman.config import Config, ConfigError
from pointsman.observe.logs import configure

__all__ = ["serve"]

logger = logging.getLogger(__name__)

GC_THRESHOLD = 10_000
"""Objects more than at the last young collection before there is another. Requests leave no cycles, so few do."""

THREADS = 64
"""Threads for calls that wait for disks and locks, not for cores."""


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
