"""Shares come out as probability says they must. The inputs are fixed, so these never flake; each bound is derived."""

import math
from random import Random

import pytest

from pointsman.domain.policy.affinity import Affinity
from pointsman.domain.policy.power_of_two import PowerOfTwo
from pointsman.domain.request import InferenceRequest
from pointsman.domain.ring import Ring, hash64
from pointsman.domain.routes import Backend, Route, pick_backend
from pointsman.domain.worker import Worker, load_of


def fleet(size: int) -> tuple[Worker, ...]:
    return tuple(Worker(f"w{i:03}", model="m", http_address="h:1") for i in range(size))


@pytest.mark.parametrize("form", ["req-{}", "{:032x}", "chatcmpl-{}-x"])
@pytest.mark.parametrize("weight", [0.01, 0.1, 0.5])
def test_a_canary_gets_its_weight_within_four_standard_deviations(form: str, weight: float) -> None:
    """The count is binomial: mean n w, variance n w (1 - w). Beyond 4 sd lies 6e-5 of it."""
    n = 10_000
    route = Route("m", backends=(Backend("old", 1 - weight), Backend("new", weight)))
    new = sum(pick_backend(route, form.format(number)) == "new" for number in range(n))
    assert abs(new - n * weight) <= 4 * math.sqrt(n * weight * (1 - weight))


def arcs(ring: Ring) -> dict[str, float]:
    """Return each node's share of the circle, from the distances between places."""
    shares = dict.fromkeys(ring.nodes, 0.0)
    positions = ring._positions
    for index, position in enumerate(positions):
        gap = (position - positions[index - 1]) % 2**64
        shares[ring._names[index]] += gap / 2**64
    return shares


def test_a_ninth_node_takes_only_its_own_arc() -> None:
    """Keys are uniform on the circle, so the number that moves is binomial with the newcomer's share."""
    ring = Ring([f"engine-{letter}" for letter in "abcdefgh"])
    keys = [b"key-%d" % number for number in range(20_000)]
    before = [ring.owner(key) for key in keys]
    ring.add("engine-i")
    after = [ring.owner(key) for key in keys]
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {"engine-i"}
    share = arcs(ring)["engine-i"]
    assert 0.5 / 9 <= share <= 1.5 / 9
    assert abs(len(moved) - 20_000 * share) <= 4 * math.sqrt(20_000 * share * (1 - share))


def test_keys_follow_the_arcs() -> None:
    """Chi-square of 20,000 keys against the arc shares; 24.32 is the 0.999 quantile at 7 degrees of freedom."""
    ring = Ring([f"engine-{letter}" for letter in "abcdefgh"])
    counts = dict.fromkeys(ring.nodes, 0)
    for number in range(20_000):
        owner = ring.owner(b"key-%d" % number)
        assert owner is not None
        counts[owner] += 1
    expected = {node: 20_000 * share for node, share in arcs(ring).items()}
    assert sum((counts[n] - expected[n]) ** 2 / expected[n] for n in counts) < 24.32


@pytest.mark.parametrize("size", [4, 16, 64])
def test_arcs_are_within_five_standard_deviations_of_equal(size: int) -> None:
    """A share is about a sum of 160 exponential gaps: relative deviation 1 / sqrt(160), 7.9 %."""
    for share in arcs(Ring([f"worker-{number}" for number in range(size)])).values():
        assert abs(share * size - 1) < 5 / math.sqrt(160)


def test_bits_of_the_hash_are_even() -> None:
    """Each bit of 4096 hashes is binomial with p = 1/2: sd 32, so 5 sd are 160."""
    hashes = [hash64(b"engine-%d#%d" % (node, place)) for node in range(64) for place in range(64)]
    for bit in range(64):
        ones = sum(value >> bit & 1 for value in hashes)
        assert abs(ones - 2048) <= 160


def test_prefixes_spread_over_all_workers_by_their_arcs() -> None:
    """4000 idle prefixes on 4 workers: binomial by arc; a share is 0.25 +- 5 * 0.02 of the circle, plus 4 sd (109)."""
    workers, policy = fleet(4), Affinity()
    counts = dict.fromkeys(workers, 0)
    for number in range(4000):
        request = InferenceRequest("m", "r", prompt=b'"prompt %d"' % number)
        worker, reason = policy.pick(workers, load_of, request)
        assert reason == "affinity"
        counts[worker] += 1
    shares = arcs(Ring([worker.id for worker in workers]))
    for worker, count in counts.items():
        share = shares[worker.id]
        assert abs(count - 4000 * share) <= 4 * math.sqrt(4000 * share * (1 - share))


@pytest.mark.parametrize("size", [16, 64, 256])
def test_two_choices_keep_the_fullest_far_below_one_choice(size: int) -> None:
    """n balls into n bins, the better of two: the fullest holds ln ln n / ln 2 + O(1), Mitzenmacher 2001.

    With O(1) taken as 2 that is 4 (n = 16), 5 (64 and 256). One random choice fills the fullest to about
    ln n / ln ln n, which 20 rounds of the same size exceed on average.
    """
    random = Random(11)
    most_of_two, most_of_one = [], []
    for _ in range(20):
        workers, policy = fleet(size), PowerOfTwo(random)
        ones = [0] * size
        for _ in range(size):
            worker, _ = policy.pick(workers, load_of, InferenceRequest("m", "r"))
            worker.in_flight += 1
            ones[random.randrange(size)] += 1
        most_of_two.append(max(worker.in_flight for worker in workers))
        most_of_one.append(max(ones))
    assert max(most_of_two) <= math.ceil(math.log(math.log(size)) / math.log(2) + 2)
    assert sum(most_of_two) < sum(most_of_one)


def test_two_choices_draw_every_pair_alike() -> None:
    """With all loads equal the first drawn wins: 6000 picks of 6 workers, 1000 each, sd 28.9, 5 sd are 145."""
    workers, policy = fleet(6), PowerOfTwo(Random(3))
    counts = dict.fromkeys(workers, 0)
    looked: dict[frozenset[str], int] = {}
    for _ in range(6000):
        pair: list[str] = []

        def load(worker: Worker, pair: list[str] = pair) -> int:
            pair.append(worker.id)
            return 0

        counts[policy.pick(workers, load, InferenceRequest("m", "r"))[0]] += 1
        looked[frozenset(pair)] = looked.get(frozenset(pair), 0) + 1
    assert all(abs(count - 1000) <= 145 for count in counts.values())
    # 15 pairs, 400 each, sd 19.3.
    assert len(looked) == 15
    assert all(abs(count - 400) <= 5 * 19.4 for count in looked.values())
