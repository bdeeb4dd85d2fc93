"""A lease counts exactly once, whatever happens to the request or to its worker."""

from collections.abc import Generator

import pytest

from pointsman.domain.ledger import Lease
from pointsman.domain.registry import Registry, WorkerReport
from pointsman.domain.worker import Worker, load_of


def worker(worker_id: str = "a") -> Worker:
    return Worker(worker_id, model="m", http_address="127.0.0.1:8000")


def test_a_lease_counts_from_the_moment_it_is_taken() -> None:
    a = worker()
    lease = Lease(a)
    assert a.in_flight == 1
    assert lease.worker is a
    lease.close()
    assert a.in_flight == 0


def test_closing_twice_is_closing_once() -> None:
    a = worker()
    other = Lease(a)
    lease = Lease(a)
    lease.close()
    lease.close()
    assert a.in_flight == 1
    other.close()
    assert a.in_flight == 0


def test_r01_b08_every_exit_gives_the_lease_back() -> None:
    a = worker()

    def fails() -> None:
        with Lease(a):
            raise ConnectionResetError

    def returns() -> int:
        with Lease(a):
            return a.in_flight

    def is_abandoned_at_a_yield() -> None:
        def story() -> Generator[None, None, None]:
            with Lease(a):
                yield

        generator = story()
        next(generator)
        assert a.in_flight == 1
        generator.close()

    for _ in range(100):
        with pytest.raises(ConnectionResetError):
            fails()
        assert returns() == 1
        is_abandoned_at_a_yield()
    assert a.in_flight == 0


def test_b13_a_request_of_the_old_life_never_changes_the_count_of_the_new_one() -> None:
    registry = Registry()

    def beat(incarnation: int, now: float) -> Worker:
        registry.beat(WorkerReport("a", "127.0.0.1:8000", "m", incarnation=incarnation), now)
        return registry.snapshot()[0]

    old = beat(1, 0.0)
    on_old = Lease(old)
    # Evicted, then back under the same id, incarnation and addresses.
    registry.expire(6.0)
    back = beat(1, 7.0)
    assert back is not old
    assert back.in_flight == 0
    on_back = Lease(back)
    # Restarted in place.
    new = beat(2, 8.0)
    assert new is not back
    on_new = Lease(new)
    on_old.close()
    on_back.close()
    assert (old.in_flight, back.in_flight, new.in_flight) == (0, 0, 1)
    on_new.close()
    assert new.in_flight == 0


def test_b01_load_reacts_to_own_requests_at_once_between_two_heartbeats() -> None:
    a = worker()
    a.queue_depth = 2
    leases = [Lease(a) for _ in range(50)]
    assert load_of(a) == 52
    for lease in leases:
        lease.close()
    assert load_of(a) == 2
