"""What there is for each worker: as long as that one is there, and no longer."""

import asyncio

import pytest

from pointsman.control.per_worker import PerWorker
from pointsman.domain.registry import Registry
from pointsman.domain.worker import Worker

pytestmark = pytest.mark.anyio


class Watch:
    """Two tasks for each worker of a registry that is polled; `over` are the workers whose tasks were cancelled."""

    def __init__(self, registry: Registry) -> None:
        self.over: list[str] = []
        self.per_worker = PerWorker(registry, self.begin, lambda tasks: tasks)

    def begin(self, worker: Worker) -> list[asyncio.Task[None]] | None:
        if not worker.polled:
            return None
        loop = asyncio.get_running_loop()
        return [loop.create_task(self.wait(worker)) for _ in range(2)]

    async def wait(self, worker: Worker) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            assert worker not in self.per_worker
            self.over.append(worker.id)


def worker(id: str, *, polled: bool = True) -> Worker:
    return Worker(id, model="m", http_address=f"{id}:80", static=True, polled=polled)


async def turns() -> None:
    """Let tasks come to where they wait, or end."""
    for _ in range(3):
        await asyncio.sleep(0)


async def test_there_is_something_for_a_worker_from_its_joining_to_its_leaving() -> None:
    registry = Registry()
    watch = Watch(registry)
    early, late, other = worker("early"), worker("late"), worker("other", polled=False)
    registry.add(early)
    watch.per_worker.start()
    registry.add(late)
    registry.add(other)
    await turns()
    assert [each in watch.per_worker for each in (early, late, other)] == [True, True, False]
    made = watch.per_worker.get(early)
    assert made is not None and made in watch.per_worker.values()
    registry.set_static([late, other])
    await turns()
    assert watch.over == ["early"] * 2
    assert [each in watch.per_worker for each in (early, late)] == [False, True]
    await watch.per_worker.stop()
    assert watch.over == ["early"] * 2 + ["late"] * 2


async def test_nothing_is_begun_or_ended_any_more_after_a_stop() -> None:
    registry = Registry()
    watch = Watch(registry)
    watch.per_worker.start()
    await watch.per_worker.stop()
    registry.add(worker("a"))
    registry.set_static([])
    await turns()
    assert (watch.over, list(watch.per_worker.values())) == ([], [])
    assert (registry.on_join, registry.on_leave) == ([], [])
