"""Asks engines that send no heartbeats how they are: one task for each worker, from its joining to its leaving.

No worker waits for another, and nothing waits for a worker: a probe that fails, raises or never ends is a miss of its
worker alone, and is tried again for ever. One log line is written when a worker goes up, down, or is read in part.

It opens no connection and knows no dialect: how a path is asked comes from outside, what answers mean is in
`pointsman.control.rounds`, and what follows for requests in `Registry.observe`.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Any, Protocol

from pointsman.control.per_worker import PerWorker
from pointsman.control.rounds import Rounds
from pointsman.dialect.engines import DIALECTS, Dialect, Probed
from pointsman.domain.observation import Observation
from pointsman.domain.registry import Registry
from pointsman.domain.worker import Worker

__all__ = ["Ask", "Poller"]

logger = logging.getLogger(__name__)

SPREAD = 0.1
"""The first round comes within this part of an interval, so that a fleet is not asked at one moment."""

JITTER = 0.1
"""How much shorter or longer than its interval a round can be, as a part of it."""

SHORTEST = 0.25
"""The least pause after a round that took its time, as a part of the interval."""


class Ask(Protocol):
    """How an engine is asked."""

    def __call__(self, worker: Worker, path: str, timeout_s: float) -> Awaitable[Probed]:
        """GET a path under the worker's base path, with its credentials. Status 0 where there is no answer."""
        ...


class Poller:
    """Polls the workers of a registry that are `polled`.

    `now` (monotonic) and `sleep` are in seconds, `random` is from 0 to 1. `miss_limit` bad rounds in a row take a
    worker out, `hit_limit` good ones take it back. `on_change` hears of a worker that went up or down, or is read in
    another part than before; `on_fault` of an exception that nobody foresaw.
    """

    def __init__(
        self,
        registry: Registry,
        ask: Ask,
        *,
        now: Callable[[], float],
        sleep: Callable[[float], Coroutine[Any, Any, object]],
        random: Callable[[], float],
        miss_limit: int = 3,
        hit_limit: int = 2,
        on_change: Callable[[Worker], None] = lambda worker: None,
        on_fault: Callable[[], None] = lambda: None,
        dialects: Mapping[str, Dialect] = DIALECTS,
    ) -> None:
        self._registry = registry
        self._polled = PerWorker(registry, self._begin, lambda task: (task,))
        self._ask = ask
        self._now = now
        self._sleep = sleep
        self._random = random
        self._miss_limit = miss_limit
        self._hit_limit = hit_limit
        self._on_change = on_change
        self._on_fault = on_fault
        self._dialects = dialects

    def start(self) -> None:
        """Poll from now on whoever is there and whoever joins. Waits for nobody."""
        self._polled.start()

    async def stop(self) -> None:
        """Poll nobody any more."""
        await self._polled.stop()

    def _begin(self, worker: Worker) -> asyncio.Task[None] | None:
        if not worker.polled:
            return None
        return asyncio.get_running_loop().create_task(self._poll(worker))

    async def _poll(self, worker: Worker) -> None:
        rounds = Rounds(
            worker, misses=self._miss_limit, hits=self._hit_limit, dialects=self._dialects
        )
        told: Observation | None = None
        failing = False
        await self._sleep(self._random() * SPREAD * worker.poll_interval_s)
        while True:
            began = self._now()
            try:
                seen = await self._round(rounds)
                failing = False
            except Exception as error:
                seen = rounds.miss(f"the gateway failed on what it said: {type(error).__name__}")
                if not failing:
                    logger.exception("a round of worker %s failed; there will be others", worker.id)
                    self._on_fault()
                failing = True
            if seen is not told:  # A miss that changes nothing is no news, and no sign of life.
                self._registry.observe(worker, seen, self._now())
                if _tell(worker, told, seen):
                    self._on_change(worker)
                told = seen
            pause = worker.poll_interval_s * (1 + JITTER * (2 * self._random() - 1))
            await self._sleep(max(pause - (self._now() - began), SHORTEST * worker.poll_interval_s))

    async def _round(self, rounds: Rounds) -> Observation:
        rounds.begin()
        while paths := rounds.due():
            rounds.take(await self._probe(rounds.worker, paths))
        return rounds.end()

    async def _probe(self, worker: Worker, paths: Iterable[str]) -> dict[str, Probed]:
        """Ask for some paths at once, and give all of them up when their time is over."""
        loop = asyncio.get_running_loop()
        asking = {path: loop.create_task(self._probe_one(worker, path)) for path in paths}
        # What it gathers it returns: nobody looks for an exception in it when the polling itself ends.
        all_answers = asyncio.gather(*asking.values(), return_exceptions=True)
        # Whoever asks keeps the limit as well, and says more; but a probe that forgot to end shall not end the polling.
        limit = loop.create_task(self._sleep(worker.poll_timeout_s))
        try:
            await asyncio.wait((all_answers, limit), return_when=asyncio.FIRST_COMPLETED)
            late = Probed(0, error=f"no answer in {worker.poll_timeout_s:g} s")
            return {path: task.result() if task.done() else late for path, task in asking.items()}
        finally:
            for task in (*asking.values(), limit):
                task.cancel()

    async def _probe_one(self, worker: Worker, path: str) -> Probed:
        if worker not in self._polled:  # It left between the decision to ask and this moment.
            return Probed(0, error="it left")
        try:
            return await self._ask(worker, path, worker.poll_timeout_s)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return Probed(0, error="given up")  # Not by us: its connection went away under it.
        except Exception as error:
            # Its text may quote a header, and so a key.
            return Probed(0, error=type(error).__name__)


def _tell(worker: Worker, before: Observation | None, seen: Observation) -> bool:
    """Log what changed about a worker, in one line; return whether something did."""
    name = seen.model if seen.up and seen.model else worker.http_address
    if before is None or before.up != seen.up:
        if not seen.up:
            logger.warning("worker %s (%s) is down: %s", worker.id, name, seen.degraded)
        elif seen.degraded:
            logger.warning("worker %s (%s) is up, degraded: %s", worker.id, name, seen.degraded)
        else:
            logger.info("worker %s (%s) is up", worker.id, name)
        return True
    if not seen.up or before.degraded == seen.degraded:
        return False
    if seen.degraded:
        logger.warning("worker %s (%s) is degraded: %s", worker.id, name, seen.degraded)
    else:
        logger.info("worker %s (%s) is not degraded any more", worker.id, name)
    return True
