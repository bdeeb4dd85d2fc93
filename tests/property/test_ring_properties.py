"""The laws of consistent hashing with bounded loads, for any nodes, keys and loads."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from pointsman.domain.ring import Ring, bounded_cap, hash64, mix64

SETTINGS = settings(deadline=None, derandomize=True, max_examples=100)

NODES = st.sets(st.text(st.characters(codec="utf-8"), max_size=6), min_size=1, max_size=8)
KEYS = st.lists(st.binary(max_size=8), min_size=1, max_size=20)
FACTORS = st.floats(0.5, 4.0)


def ring_of(nodes: set[str] | list[str]) -> Ring:
    return Ring(nodes, vnodes=5)


@SETTINGS
@given(NODES, KEYS, st.randoms(use_true_random=False))
def test_owners_do_not_depend_on_the_order_of_joining(nodes, keys, random):  # type: ignore[no-untyped-def]
    shuffled = sorted(nodes)
    random.shuffle(shuffled)
    grown = ring_of([])
    for node in shuffled:
        grown.add(node)
    built = ring_of(nodes)
    assert [grown.owner(key) for key in keys] == [built.owner(key) for key in keys]


@SETTINGS
@given(NODES, KEYS, st.text(st.characters(codec="utf-8"), max_size=6))
def test_a_join_moves_keys_only_to_the_newcomer_and_a_leave_undoes_it(nodes, keys, newcomer):  # type: ignore[no-untyped-def]
    nodes.discard(newcomer)
    ring = ring_of(nodes)
    before = [ring.owner(key) for key in keys]
    ring.add(newcomer)
    for old, key in zip(before, keys, strict=True):
        assert ring.owner(key) in (old, newcomer)
    ring.remove(newcomer)
    assert [ring.owner(key) for key in keys] == before


@SETTINGS
@given(NODES, st.binary(max_size=8), FACTORS, st.data())
def test_a_bounded_pick_is_below_the_cap_and_nothing_before_it_is(nodes, key, c, data):  # type: ignore[no-untyped-def]
    loads = {node: data.draw(st.integers(0, 9)) for node in sorted(nodes)}
    ring = ring_of(nodes)
    picked = ring.bounded(key, loads.__getitem__, c)
    assert picked is not None
    assert loads[picked] < bounded_cap(sum(loads.values()), len(nodes), c)
    owner, placed = ring.place(hash64(key), loads, c)
    assert (owner, placed) == (ring.owner(key), picked)
    if loads[owner] < bounded_cap(sum(loads.values()), len(nodes), c):
        assert picked == owner


@SETTINGS
@given(NODES, st.binary(max_size=8), FACTORS, st.data())
def test_a_larger_ring_answers_for_a_subset_as_its_own_ring_does(nodes, key, c, data):  # type: ignore[no-untyped-def]
    part = data.draw(st.sets(st.sampled_from(sorted(nodes)), min_size=1))
    loads = {node: data.draw(st.integers(0, 9)) for node in sorted(part)}
    small = ring_of(part)
    expected = (small.owner(key), small.bounded(key, loads.__getitem__, c))
    assert ring_of(nodes).place(hash64(key), loads, c) == expected


@SETTINGS
@given(NODES, KEYS, FACTORS)
def test_no_node_ever_holds_more_than_its_bounded_share(nodes, keys, c):  # type: ignore[no-untyped-def]
    # When the k-th key is placed the cap is ceil(c k / n), so a node that takes it holds at most that afterwards.
    ring = ring_of(nodes)
    loads = dict.fromkeys(nodes, 0)
    for key in keys * 3:
        node = ring.bounded(key, loads.__getitem__, c)
        assert node is not None
        loads[node] += 1
    assert max(loads.values()) <= math.ceil(max(c, 1.0) * len(keys) * 3 / len(nodes))


@SETTINGS
@given(st.sets(st.integers(0, 2**64 - 1), min_size=2, max_size=50))
def test_mix64_is_a_bijection(values):  # type: ignore[no-untyped-def]
    assert len({mix64(value) for value in values}) == len(values)
    assert all(0 <= mix64(value) < 2**64 for value in values)
