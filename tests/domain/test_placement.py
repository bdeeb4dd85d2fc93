"""What a prompt costs the worker that it was sent to, counted exactly once, whatever becomes of it."""

from collections.abc import Callable
from random import Random

import pytest

from pointsman.domain.explain import explain
from pointsman.domain.ledger import Lease
from pointsman.domain.placement import Leaves, Placement, Places
from pointsman.domain.policy.least_outstanding import LeastOutstanding
from pointsman.domain.registry import Registry, WorkerReport
from pointsman.domain.request import InferenceRequest
from pointsman.domain.router import Router, Target
from pointsman.domain.routes import RouteTable
from pointsman.domain.worker import Worker

REQUEST = InferenceRequest("m", "r1")


class Measuring(LeastOutstanding):
    """A policy that takes every prompt for 100 tokens, 60 of them to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.began: list[tuple[str, float]] = []
        self.gone: list[Worker] = []
        self.asked: list[tuple[str, str, float]] = []

    def placed(self, worker: Worker, request: InferenceRequest, now: float) -> Placement | None:
        self.asked.append((worker.id, request.request_id, now))
        return Placement(worker, 100, 60, now, self._heard)

    def left(self, worker: Worker) -> None:
        self.gone.append(worker)

    def _heard(self, placement: Placement, now: float) -> None:
        self.began.append((placement.worker.id, now - placement.at))


def worker(worker_id: str = "a") -> Worker:
    return Worker(worker_id, model="m", http_address="127.0.0.1:8000", static=True)


def counts(of: Worker) -> tuple[int, int]:
    return of.active_tokens, of.pending_tokens


def test_a_placement_counts_from_its_making_until_it_has_ended() -> None:
    a = worker()
    placement = Placement(a, 100, 60, at=1.0)
    other = Placement(a, 7, 7, at=1.0)
    assert counts(a) == (107, 67)
    placement.began(1.5)
    assert counts(a) == (107, 7)
    placement.ended()
    assert counts(a) == (7, 7)
    other.ended()
    assert counts(a) == (0, 0)


@pytest.mark.parametrize("seed", range(20))
def test_b08_whatever_is_said_in_whatever_order_and_how_often_nothing_stays(seed: int) -> None:
    random = Random(seed)
    a = worker()
    heard: list[Placement] = []
    placements = [
        Placement(a, random.randrange(9), random.randrange(9), 0.0, lambda p, now: heard.append(p))
        for _ in range(9)
    ]
    words: list[Callable[[Placement], None]] = [lambda p: p.began(1.0), lambda p: p.ended()]
    for _ in range(40):
        random.choice(words)(random.choice(placements))
        assert min(counts(a)) >= 0
    for placement in placements:
        placement.ended()
    assert counts(a) == (0, 0)
    assert len(heard) == len(set(heard))


def test_who_listens_hears_of_the_beginning_once() -> None:
    heard: list[tuple[int, float]] = []
    placement = Placement(
        worker(), 9, 4, 1.0, lambda p, now: heard.append((p.uncached_tokens, now))
    )
    placement.began(2.0)
    placement.began(3.0)
    assert heard == [(4, 2.0)]


def test_an_attempt_that_ended_without_an_answer_teaches_nothing() -> None:
    heard: list[float] = []
    placement = Placement(worker(), 9, 4, 1.0, lambda p, now: heard.append(now))
    placement.ended()
    placement.began(2.0)
    assert heard == []


def test_a_lease_ends_its_placement_once() -> None:
    a = worker()
    lease = Lease(a, Placement(a, 100, 60, 0.0))
    assert (a.in_flight, *counts(a)) == (1, 100, 60)
    lease.began(0.5)
    assert (a.in_flight, *counts(a)) == (1, 100, 0)
    lease.close()
    lease.close()
    lease.began(0.7)
    assert (a.in_flight, *counts(a)) == (0, 0, 0)


def test_a_lease_without_a_placement_counts_the_request_alone() -> None:
    a = worker()
    with Lease(a) as lease:
        lease.began(1.0)
        assert (a.in_flight, *counts(a)) == (1, 0, 0)


def test_the_router_asks_the_policy_what_a_request_costs() -> None:
    registry = Registry()
    policy = Measuring()
    router = Router(registry, policy, RouteTable())
    a, p = worker("a"), worker("p")
    registry.add(a)
    target = router.route(REQUEST, now=1.0)
    assert policy.asked == []
    with router.lease(target, REQUEST, 1.0) as lease:
        assert counts(a) == (100, 60)
        lease.began(1.25)
    assert counts(a) == (0, 0)
    pair = Target(a, "m", "load", prefill=p)
    with router.lease_prefill(pair, REQUEST, 2.0):
        assert (p.in_flight, *counts(p)) == (1, 100, 60)
        assert (a.in_flight, *counts(a)) == (0, 0, 0)
    assert counts(p) == (0, 0)
    assert policy.asked == [("a", "r1", 1.0), ("p", "r1", 2.0)]
    assert policy.began == [("a", 0.25)]


def test_a_policy_that_does_not_measure_is_not_asked() -> None:
    router = Router(Registry(), LeastOutstanding(), RouteTable())
    a, p = worker("a"), worker("p")
    pair = Target(a, "m", "load", prefill=p)
    with (
        router.lease(pair, REQUEST, 0.0) as lease,
        router.lease_prefill(pair, REQUEST, 0.0) as other,
    ):
        assert lease.placement is None
        assert other.placement is None
        assert (a.in_flight, p.in_flight) == (1, 1)
    assert not isinstance(router.policy, Places | Leaves)


def test_a_policy_that_came_with_a_reload_is_asked_from_then_on_and_the_former_no_more() -> None:
    registry = Registry()
    former, present = Measuring(), Measuring()
    router = Router(registry, former, RouteTable())
    a = worker()
    registry.add(a)
    target = router.route(REQUEST, now=0.0)
    lease = router.lease(target, REQUEST, 0.0)
    router.policy = present
    # What was counted by the former one is taken off by it, too.
    lease.close()
    assert counts(a) == (0, 0)
    router.lease(target, REQUEST, 1.0).close()
    assert (len(former.asked), len(present.asked)) == (1, 1)
    registry.set_static(())
    assert (former.gone, present.gone) == ([], [a])
    router.policy = LeastOutstanding()
    registry.add(worker())
    registry.set_static(())
    assert present.gone == [a]


def test_b13_k04_a_worker_that_restarted_has_left() -> None:
    registry = Registry()
    policy = Measuring()
    router = Router(registry, policy, RouteTable())

    def beat(incarnation: int, now: float) -> Worker:
        registry.beat(WorkerReport("a", "127.0.0.1:8000", "m", incarnation=incarnation), now)
        return registry.snapshot()[0]

    old = beat(1, 0.0)
    lease = router.lease(router.route(REQUEST, now=0.0), REQUEST, 0.0)
    new = beat(2, 1.0)
    assert policy.gone == [old]
    assert (counts(old), counts(new)) == ((100, 60), (0, 0))
    lease.close()
    assert (counts(old), counts(new)) == ((0, 0), (0, 0))
    registry.expire(60.0)
    assert policy.gone == [old, new]


def test_an_explanation_places_nothing_and_listens_to_nobody() -> None:
    registry = Registry()
    policy = Measuring()
    router = Router(registry, policy, RouteTable())
    a = worker()
    registry.add(a)
    for _ in range(9):
        assert explain(router, registry, REQUEST, now=1.0).pick == "a"
    assert policy.asked == []
    assert counts(a) == (0, 0)
    assert len(registry.on_leave) == 1
