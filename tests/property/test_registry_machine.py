"""The registry agrees with a naive model of it through any history of heartbeats, drains, static lists and silence."""

import math
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pointsman.domain.ledger import Lease
from pointsman.domain.registry import (
    MEMORY_S,
    InvalidReport,
    Registry,
    RegistryFull,
    WorkerReport,
)
from pointsman.domain.worker import Role, Worker

IDS = st.sampled_from("abcde")
MODELS = ("smol", "large")
ROLES = tuple(Role)
WORKERS_MAX = 5


@dataclass
class Life:
    """What the model knows of one worker."""

    number: int
    model: str
    role: Role
    address: str
    incarnation: int
    draining: bool
    last: float
    static: bool = False
    in_flight: int = 0


class RegistryMachine(RuleBasedStateMachine):
    """Time moves in eighths of a second, so that all sums are exact and the boundary of 6 s is often hit."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.registry = Registry(workers_max=WORKERS_MAX)
        self.lives: dict[str, Life] = {}
        self.drained: set[str] = set()
        self.seen: dict[str, float] = {}
        self.births = 0
        self.objects: dict[int, Worker] = {}
        self.leases: list[tuple[Lease, Life]] = []
        self.expected: list[tuple[str, str]] = []
        self.told: list[tuple[str, str]] = []
        self.registry.on_join.append(self._joined)
        self.registry.on_leave.append(lambda worker: self.told.append(("leave", worker.id)))

    def _joined(self, worker: Worker) -> None:
        self.told.append(("join", worker.id))
        self.objects[len(self.objects) + 1] = worker

    def _expire(self) -> None:
        for worker_id, life in sorted(self.lives.items()):
            if not life.static and self.now - life.last >= 6:
                del self.lives[worker_id]
                self.expected.append(("leave", worker_id))

    @rule(
        worker_id=IDS,
        model=st.sampled_from(MODELS),
        role=st.sampled_from(ROLES),
        draining=st.booleans(),
        address=st.sampled_from(["h:1", "h:1", "h:2"]),
        incarnation=st.sampled_from([None, None, 1, 2]),
        depth=st.integers(0, 5),
    )
    def beat(
        self,
        worker_id: str,
        model: str,
        role: Role,
        draining: bool,
        address: str,
        incarnation: int | None,
        depth: int,
    ) -> None:
        report = WorkerReport(
            worker_id,
            address,
            model,
            role.value,
            draining=draining,
            incarnation=incarnation,
            queue_depth=depth,
        )
        self._expire()
        former = self.lives.get(worker_id)
        if former is not None and former.static:
            with pytest.raises(InvalidReport):
                self.registry.beat(report, self.now)
            return
        if former is None and len(self.lives) == WORKERS_MAX:
            with pytest.raises(RegistryFull):
                self.registry.beat(report, self.now)
            return
        ack = self.registry.beat(report, self.now)
        assert ack.drain == (model in self.drained)
        self.seen[model] = self.now
        same = (
            former is not None
            and former.address == address
            and incarnation in (None, former.incarnation)
        )
        if former is not None and same:
            former.model, former.role = model, role
            former.draining, former.last = draining, self.now
        else:
            if former is not None:
                self.expected.append(("leave", worker_id))
            self.expected.append(("join", worker_id))
            self.births += 1
            self.lives[worker_id] = Life(
                self.births, model, role, address, incarnation or 0, draining, self.now
            )
        assert self.objects[self.lives[worker_id].number].queue_depth == depth

    @rule(worker_id=IDS)
    def nonsense(self, worker_id: str) -> None:
        self._expire()
        self.registry.expire(self.now)
        before = self.registry.snapshot()
        with pytest.raises(InvalidReport):
            self.registry.beat(WorkerReport(worker_id, "h:1", "m", running=-1), self.now)
        assert self.registry.snapshot() is before

    @rule(worker_id=st.sampled_from("st"), model=st.sampled_from(MODELS))
    def add_static(self, worker_id: str, model: str) -> None:
        worker = Worker(worker_id, model=model, http_address="h:9")
        # `add` does not look at the clock, and whoever is due still takes room.
        self._expire()
        self.registry.expire(self.now)
        if worker_id in self.lives or len(self.lives) == WORKERS_MAX:
            with pytest.raises(InvalidReport):
                self.registry.add(worker)
            return
        self.registry.add(worker)
        self._born_static(worker)

    @rule(
        listed=st.lists(
            st.tuples(
                st.sampled_from("aest"), st.sampled_from(MODELS), st.sampled_from(["h:8", "h:9"])
            ),
            max_size=4,
        )
    )
    def set_static(self, listed: list[tuple[str, str, str]]) -> None:
        self._expire()
        self.registry.expire(self.now)
        workers = [Worker(each, model=model, http_address=at) for each, model, at in listed]
        wanted = {worker.id for worker in workers}
        beating = {each for each, life in self.lives.items() if not life.static}
        if len(wanted) < len(workers) or wanted & beating or len(wanted | beating) > WORKERS_MAX:
            before = self.registry.snapshot()
            with pytest.raises(InvalidReport):
                self.registry.set_static(workers)
            assert self.registry.snapshot() is before
            return
        self.registry.set_static(workers)
        for gone in sorted(self.lives.keys() - wanted - beating):
            del self.lives[gone]
            self.expected.append(("leave", gone))
        for worker in workers:
            life = self.lives.get(worker.id)
            if life is not None and life.address == worker.http_address:
                life.model = worker.model
                continue
            if life is not None:
                self.expected.append(("leave", worker.id))
            self._born_static(worker)

    def _born_static(self, worker: Worker) -> None:
        self.expected.append(("join", worker.id))
        self.births += 1
        address = worker.http_address
        self.lives[worker.id] = Life(
            self.births, worker.model, Role.UNIFIED, address, 0, False, last=0.0, static=True
        )

    @rule(eighths=st.integers(0, 56))
    def wait(self, eighths: int) -> None:
        self.now += eighths / 8

    @rule(model=st.sampled_from(MODELS))
    def drain(self, model: str) -> None:
        self.registry.drain(model)
        self.drained.add(model)

    @rule(model=st.sampled_from(MODELS))
    def undrain(self, model: str) -> None:
        self.registry.undrain(model)
        self.drained.discard(model)

    @rule(worker_id=IDS)
    def begin_a_request(self, worker_id: str) -> None:
        life = self.lives.get(worker_id)
        if life is not None:
            life.in_flight += 1
            self.leases.append((Lease(self.objects[life.number]), life))

    @rule(which=st.integers(0, 100))
    def end_a_request(self, which: int) -> None:
        if self.leases:
            lease, life = self.leases.pop(which % len(self.leases))
            life.in_flight -= 1
            lease.close()
            lease.close()

    @invariant()
    def the_registry_agrees_with_the_model(self) -> None:
        self._expire()
        self.registry.expire(self.now)
        workers = [self.objects[life.number] for _, life in sorted(self.lives.items())]
        assert list(self.registry.snapshot()) == workers
        groups: dict[tuple[str, Role], list[Worker]] = {}
        for _, life in sorted(self.lives.items()):
            if not life.draining and life.model not in self.drained:
                key = (life.model, life.role)
                groups.setdefault(key, []).append(self.objects[life.number])
        for model in MODELS:
            for role in ROLES:
                routable = self.registry.routable(model, role)
                assert list(routable) == groups.get((model, role), [])
                assert self.registry.routable(model, role) is routable
            live = any(life.model == model for life in self.lives.values())
            seen = self.now - self.seen.get(model, -math.inf) <= MEMORY_S
            assert self.registry.knows(model, self.now) == (live or seen)
        assert self.registry.models() == sorted({model for model, _ in groups})
        assert self.registry.any_routable() == bool(groups)
        assert self.registry.drained == self.drained

    @invariant()
    def nobody_is_due_before_the_next_expiry(self) -> None:
        self._expire()
        self.registry.expire(self.now)
        due = [life.last + 6 for life in self.lives.values() if not life.static]
        assert self.registry.next_expiry <= min(due, default=math.inf)
        assert self.now < self.registry.next_expiry or self.registry.next_expiry == math.inf

    @invariant()
    def listeners_were_told_each_change_once_and_in_order(self) -> None:
        assert self.told == self.expected

    @invariant()
    def each_life_counts_its_own_requests(self) -> None:
        for life in self.lives.values():
            assert self.objects[life.number].in_flight == life.in_flight
        assert all(worker.in_flight >= 0 for worker in self.objects.values())


RegistryMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True
)
test_the_registry_follows_its_model = RegistryMachine.TestCase
