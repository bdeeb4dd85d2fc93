"""What every policy keeps to, for any fleet and any loads."""

from math import inf, isfinite, nan
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pointsman.domain.ledger import Lease
from pointsman.domain.placement import Leaves, Places
from pointsman.domain.policy import POLICIES, PolicyOptions, make_policy
from pointsman.domain.policy.consideration import Considers
from pointsman.domain.request import InferenceRequest
from pointsman.domain.ring import Ring
from pointsman.domain.routes import Backend, Route, pick_backend
from pointsman.domain.worker import Worker, load_of

SETTINGS = settings(deadline=None, derandomize=True, max_examples=100)
LOADS = st.dictionaries(
    st.text("abcdefghij0123456789-", min_size=1, max_size=4),
    st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 5000)),
    min_size=1,
    max_size=12,
)


def fleet(loads: dict[str, tuple[int, int, int]]) -> tuple[Worker, ...]:
    workers = []
    for worker_id, (queued, in_flight, blocks) in sorted(loads.items()):
        worker = Worker(worker_id, model="m", http_address="h:1", kv_total_blocks=blocks)
        worker.queue_depth, worker.in_flight = queued, in_flight
        workers.append(worker)
    return tuple(workers)


@SETTINGS
@given(LOADS, st.sampled_from(["smallest", "salted"]), st.binary(max_size=8))
def test_a_pick_is_one_of_the_given_and_the_least_is_the_least(loads, tie_break, salt):  # type: ignore[no-untyped-def]
    workers = fleet(loads)
    options = PolicyOptions(tie_break=tie_break, salt=salt)
    request = InferenceRequest("m", "r", prompt=b'"x"')
    for name in POLICIES:
        worker, _ = make_policy(name, options, Random(1)).pick(workers, load_of, request)
        assert worker in workers
        if name == "least_outstanding":
            least = min(load_of(other) for other in workers)
            assert load_of(worker) == least
            if tie_break == "smallest":
                assert worker.id == min(w.id for w in workers if load_of(w) == least)


@SETTINGS
@given(LOADS, st.binary(max_size=8), st.floats(1.0, 3.0))
def test_affinity_is_the_bounded_ring_of_the_candidates(loads, text, c):  # type: ignore[no-untyped-def]
    workers = fleet(loads)
    request = InferenceRequest("m", "r", prompt=b'"%b"' % text.hex().encode())
    by_id = {worker.id: load_of(worker) for worker in workers}
    ring = Ring(by_id)
    worker, reason = make_policy("affinity", PolicyOptions(load_factor=c), Random(1)).pick(
        workers, load_of, request
    )
    assert worker.id == ring.bounded(request.prefix_key, by_id.__getitem__, c)
    owner = ring.owner(request.prefix_key)
    assert reason == ("affinity" if worker.id == owner else "load")


@SETTINGS
@given(st.lists(st.integers(1, 20), min_size=1, max_size=8))
def test_a_whole_cycle_of_weighted_turns_is_exact_and_no_worker_strays_by_one(weights):  # type: ignore[no-untyped-def]
    workers = fleet({f"w{i}": (0, 0, weight) for i, weight in enumerate(weights)})
    policy = make_policy("weighted", PolicyOptions(), Random(1))
    request = InferenceRequest("m", "r")
    total, counts = sum(weights), dict.fromkeys(workers, 0)
    for turn in range(1, total + 1):
        counts[policy.pick(workers, load_of, request)[0]] += 1
        for worker in workers:
            share = turn * worker.kv_total_blocks / total
            # Smooth turns lag or lead by less than one request per other worker.
            assert abs(counts[worker] - share) < max(len(workers) - 1, 1)
    assert [counts[worker] for worker in workers] == weights


@SETTINGS
@given(
    st.lists(st.floats(0.001, 10), min_size=1, max_size=6),
    st.text(max_size=20),
)
def test_one_request_id_always_draws_one_backend(weights, request_id):  # type: ignore[no-untyped-def]
    backends = tuple(Backend(f"b{index}", weight) for index, weight in enumerate(weights))
    route = Route("m", backends=backends)
    drawn = pick_backend(route, request_id)
    assert drawn in [backend.model for backend in backends]
    assert pick_backend(route, request_id) == drawn


@pytest.mark.parametrize("name", sorted(POLICIES))
@settings(deadline=None, derandomize=True, max_examples=30)
@given(st.integers(0, 1 << 32), st.sampled_from([1, 2, 3, 16, 17]), st.sampled_from([0.5, inf]))
def test_odd_numbers_and_clocks_that_go_back_break_no_policy(
    name: str, seed: int, count: int, ttft_target_s: float
) -> None:
    random = Random(seed)
    options = PolicyOptions(prefix_index_blocks_max=20, ttft_target_s=ttft_target_s)
    policy = make_policy(name, options, Random(1))
    workers = fleet({f"w{number:02}": (0, 0, 0) for number in range(count)})
    leases: list[Lease] = []
    now = 0.0
    for _ in range(40):
        now = random.choice([now, now + 0.01, now + 1e6, now - 1e6, 0.0])
        worker = random.choice(workers)
        worker.queue_depth = random.choice([0, 5, 2**62])
        worker.kv_usage = random.choice([-1.0, 0.5, 1.0, inf, nan])
        worker.kv_tokens = random.choice([0, 100, 10**6])
        worker.cached_tokens = random.choice([-1, 0, 10**9, 2**70])
        blocks = tuple(range(1, random.choice([0, 1, 3, 7]) + 1))
        tokens = random.choice([0, 1, 128 * len(blocks), 10_000_000])
        request = InferenceRequest.of_blocks("m", "r", blocks, tokens, 128)
        request.stream = random.random() < 0.7
        assert isinstance(policy, Considers)
        seen = policy.consider(workers, load_of, request)
        picked, reason = policy.pick(workers, load_of, request)
        assert seen.pick is None or (seen.pick, seen.reason) == (picked, reason)
        assert all(score is None or isfinite(score) for score in seen.scores)
        if isinstance(policy, Leaves) and random.random() < 0.1:
            policy.left(picked)
        placed = policy.placed(picked, request, now) if isinstance(policy, Places) else None
        leases.append(Lease(picked, placed))
        if random.random() < 0.6:
            leases[-1].began(random.choice([now, now + 1.0, now + 1e5, now - 1e5]))
        if random.random() < 0.5:
            leases.pop(random.randrange(len(leases))).close()
    for lease in leases:
        lease.close()
    assert not any(each.in_flight or each.pending_tokens or each.active_tokens for each in workers)
