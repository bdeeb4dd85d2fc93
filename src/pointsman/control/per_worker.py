"""What there is once for each worker of a registry: begun as it joins, and its tasks cancelled as it leaves."""

import asyncio
from collections.abc import Callable, Iterable, ValuesView
from typing import Generic, TypeVar

from pointsman.domain.registry import Registry
from pointsman.domain.worker import Worker

__all__ = ["PerWorker"]

Made = TypeVar("Made")


class PerWorker(Generic[Made]):
    """Keeps what `begin` makes for each worker, None where there is nothing to do for it; `tasks` are those of that.

    A worker that has left is not `in` it any more when its tasks are cancelled.
    """

    def __init__(
        self,
        registry: Registry,
        begin: Callable[[Worker], Made | None],
        tasks: Callable[[Made], Iterable[asyncio.Task[None]]],
    ) -> None:
        self._registry = registry
        self._begin = begin
        self._tasks = tasks
        self._made: dict[Worker, Made] = {}

    def __contains__(self, worker: Worker) -> bool:
        """Tell whether there is something for a worker, which did not leave."""
        return worker in self._made

    def get(self, worker: Worker) -> Made | None:
        """Return what there is for a worker."""
        return self._made.get(worker)

    def values(self) -> ValuesView[Made]:
        """Return what there is for all."""
        return self._made.values()

    def start(self) -> None:
        """Begin for whoever is there, and from now on for whoever joins. Waits for nobody."""
        self._registry.on_join.append(self._joined)
        self._registry.on_leave.append(self._left)
        for worker in self._registry.snapshot():
            self._joined(worker)

    async def stop(self) -> None:
        """Cancel all tasks, wait until they are over, and begin nothing more."""
        self._registry.on_join.remove(self._joined)
        self._registry.on_leave.remove(self._left)
        tasks = [task for made in self._made.values() for task in self._tasks(made)]
        self._made.clear()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _joined(self, worker: Worker) -> None:
        made = self._begin(worker)
        if made is not None:
            self._made[worker] = made

    def _left(self, worker: Worker) -> None:
        made = self._made.pop(worker, None)
        if made is not None:
            for task in self._tasks(made):
                task.cancel()
