"""Each policy keeps the contract of all, and its own promise."""

import math
from collections.abc import Callable
from importlib.metadata import EntryPoint
from random import Random

import pytest

import pointsman.domain.policy
from pointsman.domain.ledger import Lease
from pointsman.domain.policy import POLICIES, Policy, PolicyOptions, RandomSource, make_policy
from pointsman.domain.policy.affinity import SPARE, TUPLES, Affinity
from pointsman.domain.policy.cache_aware import CacheAware
from pointsman.domain.policy.kv_cost import KvCost
from pointsman.domain.policy.least_delay import LeastDelay
from pointsman.domain.policy.least_outstanding import LeastOutstanding
from pointsman.domain.policy.least_tokens import LeastTokens
from pointsman.domain.policy.peak_ewma import PeakEwma
from pointsman.domain.policy.power_of_two import PowerOfTwo
from pointsman.domain.policy.prefix_hash import PrefixHash
from pointsman.domain.policy.sticky_until_saturated import StickyUntilSaturated
from pointsman.domain.policy.weighted import GENERATION, SEATED, Weighted
from pointsman.domain.request import InferenceRequest
from pointsman.domain.ring import Ring, hash64
from pointsman.domain.worker import Worker, load_of
from pointsman.testing.policies import check_policy

Workers = tuple[Worker, ...]
REQUEST = InferenceRequest("m", "r1")


def fleet(*ids: str, blocks: dict[str, int] | None = None) -> Workers:
    return tuple(
        Worker(name, model="m", http_address="h:1", kv_total_blocks=(blocks or {}).get(name, 0))
        for name in sorted(ids)
    )


def prompt(text: str) -> InferenceRequest:
    return InferenceRequest("m", "r1", prompt=f'"{text}"'.encode())


def system(text: str, user: str) -> InferenceRequest:
    messages = (
        f'[{{"role":"system","content":"{text}"}},{{"role":"user","content":"{user}"}}]'.encode()
    )
    return InferenceRequest("m", user, messages=messages)


def picks(policy: Policy, workers: Workers, count: int) -> list[str]:
    return [policy.pick(workers, load_of, REQUEST)[0].id for _ in range(count)]


def even(requests: int, workers: int) -> float:
    """Joining the shortest queue, and taking turns by equal weights, keep all within one request."""
    return math.ceil(requests / workers)


def bounded(requests: int, workers: int) -> float:
    """No node goes above the cap at the time it was last given a request: ceil(c * K / n)."""
    return math.ceil(1.25 * requests / workers)


@pytest.mark.parametrize("tie_break", ["smallest", "salted"])
@pytest.mark.parametrize(
    ("name", "bound"), [("affinity", bounded), ("least_outstanding", even), ("weighted", even)]
)
def test_deterministic_policies_keep_the_contract(
    name: str, bound: Callable[[int, int], float], tie_break: str
) -> None:
    options = PolicyOptions(tie_break=tie_break, salt=b"one")  # type: ignore[arg-type]
    check_policy(lambda: make_policy(name, options, Random(1)), bound=bound)


def test_power_of_two_keeps_the_contract() -> None:
    check_policy(lambda: PowerOfTwo(Random(1)), picks="random")
    # With the same source it is as deterministic as the source.
    check_policy(lambda: PowerOfTwo(Random(1)))


# least_outstanding


def test_least_outstanding_takes_the_minimum_and_the_smallest_id_of_equals() -> None:
    workers = fleet("a", "b", "c")
    a, b, c = workers
    policy = LeastOutstanding()
    assert policy.pick(workers, load_of, REQUEST) == (a, "load")
    a.queue_depth, b.in_flight, c.queue_depth = 2, 1, 1
    assert policy.pick(workers, load_of, REQUEST) == (b, "load")
    b.running = 0
    c.running = 50
    c.queue_depth = 0
    assert policy.pick(workers, load_of, REQUEST) == (c, "load")


def test_b01_fifty_arrivals_between_two_heartbeats_are_spread() -> None:
    for name in ("least_outstanding", "power_of_two", "affinity"):
        workers = fleet("a", "b", "c", "d", "e")
        policy = make_policy(name, PolicyOptions(), Random(5))
        for number in range(50):
            Lease(policy.pick(workers, load_of, prompt(f"{number}"))[0])
        assert max(worker.in_flight for worker in workers) <= 14, name
        assert min(worker.in_flight for worker in workers) >= 6, name


# Ties


@pytest.mark.parametrize("name", ["least_outstanding", "weighted"])
def test_b10_salted_ties_spread_over_gateways_and_plain_ones_do_not(name: str) -> None:
    workers = fleet(*"abcdefgh")

    def first_pick(options: PolicyOptions, seed: int) -> str:
        return make_policy(name, options, Random(seed)).pick(workers, load_of, REQUEST)[0].id

    plain = {first_pick(PolicyOptions(), gateway) for gateway in range(10)}
    assert plain == {"a"}
    salted = {
        first_pick(PolicyOptions(tie_break="salted", salt=b"gateway-%d" % gateway), gateway)
        for gateway in range(10)
    }
    assert len(salted) >= 4
    # One process stays with its order.
    options = PolicyOptions(tie_break="salted", salt=b"gateway-1")
    assert len({first_pick(options, seed) for seed in range(10)}) == 1


def test_b10_power_of_two_spreads_ties_by_itself() -> None:
    workers = fleet(*"abcdefgh")
    firsts = {PowerOfTwo(Random(s)).pick(workers, load_of, REQUEST)[0].id for s in range(10)}
    assert len(firsts) >= 4


def test_a_salt_never_overrules_the_load() -> None:
    workers = fleet("a", "b", "c")
    for salt in range(20):
        policy = LeastOutstanding(PolicyOptions(tie_break="salted", salt=bytes([salt])).rank())
        for idle in workers:
            for worker in workers:
                worker.queue_depth = 0 if worker is idle else 1
            assert policy.pick(workers, load_of, REQUEST)[0] is idle


# weighted


def test_weighted_by_capacity() -> None:
    workers = fleet("big", "small", blocks={"big": 3, "small": 1})
    expected = ["big", "big", "small", "big", "big", "big", "small", "big"]
    assert picks(Weighted(), workers, 8) == expected
    assert Weighted().pick(workers, load_of, REQUEST)[1] == "load"


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        ({"a": 5, "b": 1, "c": 1}, "aabacaa"),
        ({"a": 1, "b": 1}, "abab"),
        ({"a": 0, "b": 0}, "abab"),
        ({"a": -7, "b": 0}, "abab"),
        ({"a": 2, "b": 2}, "abab"),
        ({"a": 1}, "aaa"),
    ],
)
def test_weighted_takes_smooth_turns(blocks: dict[str, int], expected: str) -> None:
    assert "".join(picks(Weighted(), fleet(*blocks, blocks=blocks), len(expected))) == expected


def test_weighted_follows_a_capacity_that_changes() -> None:
    workers = fleet("a", "b", blocks={"a": 1, "b": 1})
    policy = Weighted()
    picks(policy, workers, 100)
    workers[0].kv_total_blocks = 9
    made = picks(policy, workers, 100)
    assert 89 <= made.count("a") <= 91


def test_counters_go_on_through_a_retry_without_the_failed_worker() -> None:
    workers = fleet("a", "b", "c")
    policy = Weighted()
    made = []
    for number in range(300):
        given = workers if number % 10 else workers[1:]
        made.append(policy.pick(given, load_of, REQUEST)[0].id)
    assert abs(made.count("b") - made.count("c")) <= 1


def test_counters_of_workers_that_are_gone_are_dropped_and_none_that_stays_is_lost() -> None:
    policy = Weighted()
    stays = fleet("big", "small", blocks={"big": 3, "small": 1})
    made = []
    for number in range(4 * GENERATION):
        made.append(policy.pick(stays, load_of, REQUEST)[0].id)
        policy.pick(fleet(f"gone-{number}"), load_of, REQUEST)
    # The pattern of every four is unbroken through all generations.
    assert made == ["big", "big", "small", "big"] * GENERATION
    assert len(policy._counters) <= GENERATION + 2
    assert len(policy._rounds) <= SEATED


# power_of_two


class Scripted:
    """A source of given numbers."""

    def __init__(self, *numbers: float) -> None:
        self._numbers = list(numbers)

    def random(self) -> float:
        return self._numbers.pop(0)


@pytest.mark.parametrize(
    ("first", "second", "pair"),
    [
        (0.0, 0.0, (0, 1)),
        (0.0, 0.99, (0, 3)),
        (0.99, 0.0, (3, 0)),
        (0.99, 0.99, (3, 2)),
        (0.5, 0.5, (2, 1)),
        (0.5, 0.7, (2, 3)),
    ],
)
def test_power_of_two_looks_at_two_distinct_workers(
    first: float, second: float, pair: tuple[int, int]
) -> None:
    workers = fleet(*"abcd")
    looked: list[Worker] = []

    def load(worker: Worker) -> int:
        looked.append(worker)
        return 0

    picked = PowerOfTwo(Scripted(first, second)).pick(workers, load, REQUEST)
    assert looked == [workers[pair[0]], workers[pair[1]]]
    # Equal loads: the one drawn first.
    assert picked == (workers[pair[0]], "load")


def test_power_of_two_takes_the_lower_load() -> None:
    workers = fleet("a", "b")
    a, b = workers
    b.queue_depth = 1
    for seed in range(20):
        assert PowerOfTwo(Random(seed)).pick(workers, load_of, REQUEST)[0] is a
    assert PowerOfTwo(Scripted()).pick((b,), load_of, REQUEST) == (b, "load")


# affinity


def test_affinity_keeps_prefix_together() -> None:
    workers = fleet("w1", "w2", "w3", "w4")
    policy = Affinity()
    text = "You are a helpful assistant with a long enough common system prompt."
    shared = {policy.pick(workers, load_of, system(text, f"question {i}")) for i in range(20)}
    assert len(shared) == 1
    owner, reason = shared.pop()
    assert reason == "affinity"
    distinct = {
        policy.pick(workers, load_of, system(f"tenant {i} has its own prompt", "x"))[0]
        for i in range(40)
    }
    assert len(distinct) >= 3
    # 3 in flight on the owner, none elsewhere: the cap is ceil(1.25 * 4 / 4) = 2.
    leases = [Lease(owner) for _ in range(3)]
    other, reason = policy.pick(workers, load_of, system(text, "one more"))
    assert reason == "load"
    assert other is not owner
    for lease in leases:
        lease.close()
    assert policy.pick(workers, load_of, system(text, "again")) == (owner, "affinity")


def test_the_affinity_example_of_the_contract_picks_the_same_workers() -> None:
    workers = fleet(*"abcd")
    hello = system("You are a helpful assistant.", "Hi")
    policy = Affinity(1.25)
    assert policy.pick(workers, load_of, hello) == (workers[3], "affinity")
    workers[3].in_flight = 3
    assert policy.pick(workers, load_of, hello) == (workers[1], "load")
    assert policy.pick(workers, load_of, REQUEST) == (workers[2], "affinity")


def test_b05_a_prefix_shared_by_all_requests_does_not_pile_up_on_one_worker() -> None:
    workers = fleet("a", "b", "c", "d")
    policy = Affinity(1.25)
    text = "x" * 2000
    for number in range(400):
        Lease(policy.pick(workers, load_of, system(text, f"q{number}"))[0])
    assert max(worker.in_flight for worker in workers) <= math.ceil(1.25 * 400 / 4)
    assert sum(worker.in_flight for worker in workers) == 400


def test_a_load_factor_below_one_counts_as_one() -> None:
    workers = fleet("a", "b")
    policy = Affinity(0.1)
    for _ in range(10):
        Lease(policy.pick(workers, load_of, prompt("hot"))[0])
    assert [worker.in_flight for worker in workers] == [5, 5]


def test_a_retry_and_a_departure_are_answered_as_by_a_ring_of_those_left() -> None:
    workers = fleet(*[f"w{number:02}" for number in range(12)])
    policy = Affinity()
    for number in range(60):
        request = prompt(f"prompt {number}")
        owner, _ = policy.pick(workers, load_of, request)
        left = tuple(worker for worker in workers if worker is not owner)
        expected = Ring([worker.id for worker in left]).owner(request.prefix_key)
        assert policy.pick(left, load_of, request)[0].id == expected
    # All of these were served by the one ring.
    assert len(policy._rings) == 1


def test_workers_that_join_are_added_to_the_ring_and_answers_stay_exact() -> None:
    policy = Affinity()
    ids = [f"w{number:02}" for number in range(8)]
    requests = [prompt(f"prompt {number}") for number in range(40)]
    for number in range(8, 40):
        ids = sorted([*ids[1:], f"w{number:02}"])
        workers = fleet(*ids)
        exact = Ring(ids)
        for request in requests:
            picked, reason = policy.pick(workers, load_of, request)
            assert (picked.id, reason) == (exact.owner(request.prefix_key), "affinity")
    assert all(len(ring) <= 8 + SPARE for ring in policy._rings)


def test_models_that_alternate_keep_their_rings() -> None:
    policy = Affinity()
    fleets = [fleet(f"{model}1", f"{model}2") for model in ("x", "y", "z")]
    for number in range(30):
        policy.pick(fleets[number % 3], load_of, prompt(f"{number}"))
    assert len(policy._rings) == 3
    assert len(policy._fleets) == 3


def test_what_affinity_remembers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pointsman.domain.policy.affinity, "MEMBERS", 20)
    policy = Affinity()
    for number in range(TUPLES + 50):
        policy.pick(fleet(f"only-{number}"), load_of, REQUEST)
    assert len(policy._fleets) == TUPLES
    assert sum(len(ring) for ring in policy._rings) == 20
    # A single fleet above the limit is served all the same.
    policy.pick(fleet(*[f"w{number}" for number in range(30)]), load_of, REQUEST)
    assert [len(ring) for ring in policy._rings] == [30]


def test_keys_are_remembered_up_to_a_limit_and_answers_stay_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pointsman.domain.policy.affinity, "KEYS", 10)
    policy, fleets = Affinity(), [fleet("a", "b", "c", "d"), fleet("x", "y", "z")]
    rings = [Ring(worker.id for worker in workers) for workers in fleets]
    for _ in range(2):
        for number in range(25):
            request = prompt(f"prompt {number}")
            for workers, ring in zip(fleets, rings, strict=True):
                picked = policy.pick(workers, load_of, request)[0].id
                assert picked == ring.owner(request.prefix_key)
            assert sum(len(known.orders) for known in policy._fleets.values()) <= 10


def test_a_pick_goes_past_all_remembered_workers_when_they_are_full() -> None:
    workers = fleet("a", "b", "c", "d", "e")
    order = Ring([worker.id for worker in workers]).clockwise(
        hash64(REQUEST.prefix_key), {worker.id for worker in workers}, 5
    )
    by_id = {worker.id: worker for worker in workers}
    for name in order[:4]:
        by_id[name].in_flight = 9
    assert Affinity(1.0).pick(workers, load_of, REQUEST) == (by_id[order[4]], "load")


# The table


def test_every_policy_is_made_by_name() -> None:
    kinds = {name: type(make_policy(name, PolicyOptions(), Random(1))) for name in POLICIES}
    assert kinds == {
        "affinity": Affinity,
        "cache_aware": CacheAware,
        "kv_cost": KvCost,
        "least_delay": LeastDelay,
        "least_outstanding": LeastOutstanding,
        "least_tokens": LeastTokens,
        "peak_ewma": PeakEwma,
        "power_of_two": PowerOfTwo,
        "prefix_hash": PrefixHash,
        "sticky_until_saturated": StickyUntilSaturated,
        "weighted": Weighted,
    }


def test_options_reach_the_policy() -> None:
    workers = fleet("a", "b")
    request = prompt("hot")
    owner, _ = make_policy("affinity", PolicyOptions(load_factor=9.0), Random(1)).pick(
        workers, load_of, request
    )
    owner.in_flight = 3
    strict, loose = (
        make_policy("affinity", PolicyOptions(load_factor=c), Random(1)) for c in (1.0, 9.0)
    )
    assert loose.pick(workers, load_of, request) == (owner, "affinity")
    assert strict.pick(workers, load_of, request)[0] is not owner


@pytest.mark.parametrize(
    ("name", "says"),
    [("least-outstanding", "did you mean 'least_outstanding'?"), ("zzz", "there are affinity, ")],
)
def test_an_unknown_name_is_refused_with_the_nearest(name: str, says: str) -> None:
    with pytest.raises(ValueError, match="no policy is called") as caught:
        make_policy(name, PolicyOptions(), Random(1))
    assert says in str(caught.value)


class Last:
    """A policy from another package."""

    def pick(
        self, workers: Workers, load: Callable[[Worker], int], request: InferenceRequest
    ) -> tuple[Worker, str]:
        return workers[-1], "last"


def last(options: PolicyOptions, random: RandomSource) -> Policy:
    """Its factory."""
    return Last()


def test_installed_packages_may_offer_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    def offered(group: str) -> list[EntryPoint]:
        assert group == "pointsman.policies"
        return [EntryPoint("last", f"{__name__}:last", group)]

    monkeypatch.setattr(pointsman.domain.policy, "entry_points", offered)
    workers = fleet("a", "b")
    made = make_policy("last", PolicyOptions(), Random(1))
    assert made.pick(workers, load_of, REQUEST) == (workers[1], "last")
    with pytest.raises(ValueError, match="did you mean 'last'"):
        make_policy("lats", PolicyOptions(), Random(1))
