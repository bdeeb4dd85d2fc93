"""What workers are believed to have cached: who has how much, what goes first, and that nothing is left of the gone."""

from collections.abc import Sequence

import pytest

from pointsman.domain.blocks import block_hashes
from pointsman.domain.prefix_index import DENSE, FLEETS, PrefixIndex
from pointsman.domain.registry import Registry, WorkerReport
from pointsman.domain.worker import Role, Worker


def worker(worker_id: str = "a", kv_tokens: int = 0) -> Worker:
    return Worker(worker_id, model="m", http_address="127.0.0.1:8000", kv_tokens=kv_tokens)


def chain(text: str) -> tuple[int, ...]:
    """The blocks of a prompt whose blocks are the characters of a text."""
    return block_hashes(text.encode(), 1)


def found(index: PrefixIndex, text: str, workers: Sequence[Worker]) -> dict[str, int]:
    matched = index.match(chain(text), tuple(workers))
    depths = [depth for _, depth in matched]
    assert depths == sorted(depths, reverse=True)
    assert len({worker for worker, _ in matched}) == len(matched)
    return {worker.id: depth for worker, depth in matched}


# ------------------------------------------------------------------ who has how much


def test_a_match_is_how_much_of_the_beginning_a_worker_has() -> None:
    a, b, c, d = fleet = [worker(id) for id in "abcd"]
    index = PrefixIndex(1000, 60.0)
    for each, text in ((a, "once upon a time"), (b, "once more"), (c, "twice")):
        index.insert(each, chain(text), 0.0)
    assert found(index, "once upon", fleet) == {"a": 9, "b": 5}
    assert found(index, "once", fleet) == {"a": 4, "b": 4}
    assert found(index, "once upon a time and again", [a, d]) == {"a": 16}
    assert found(index, "twice", [a, b, d]) == {}
    assert found(index, "else", fleet) == found(index, "", fleet) == found(index, "once", []) == {}
    # The whole of it, and not the text that one ends with.
    assert found(index, "upon a time", fleet) == {}


def test_the_most_come_first() -> None:
    fleet = tuple([worker(id) for id in "abcde"])
    index = PrefixIndex(1000, 60.0)
    for each, length in zip(fleet, (2, 5, 1, 5, 3), strict=True):
        index.insert(each, chain("prefix"[:length]), 0.0)
    depths = [(each.id, depth) for each, depth in index.match(chain("prefix"), fleet)]
    assert depths == [("b", 5), ("d", 5), ("e", 3), ("a", 2), ("c", 1)]


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("count", [1, DENSE - 1, DENSE, DENSE + 1, 70, 200])
def test_any_number_of_workers_may_have_a_block(count: int, told: bool) -> None:
    fleet = tuple([worker(f"w{number:03}") for number in range(count)])
    index = PrefixIndex(10_000, 60.0)
    if told:
        index.follow(worker("z"))
    for number, each in enumerate(fleet):
        index.insert(each, chain("prefix"[: 1 + number % 6]), 0.0)
    expected = {each.id: 1 + number % 6 for number, each in enumerate(fleet)}
    assert found(index, "prefix", fleet) == expected
    assert found(index, "prefix", fleet[::2]) == {each.id: expected[each.id] for each in fleet[::2]}


def test_a_fleet_that_is_known_by_its_tuple_is_looked_at_anew_when_somebody_joins_or_leaves() -> (
    None
):
    fleet = tuple([worker(id) for id in "abcdefgh"])
    index = PrefixIndex(1000, 60.0)
    index.insert(fleet[0], chain("x"), 0.0)
    assert [each.id for each, _ in index.match(chain("x"), fleet)] == ["a"]
    index.insert(fleet[7], chain("x"), 1.0)
    assert [each.id for each, _ in index.match(chain("x"), fleet)] == ["a", "h"]
    index.purge(fleet[0])
    assert [each.id for each, _ in index.match(chain("x"), fleet)] == ["h"]
    # Another one takes the place of the one that left, in the index and nowhere else.
    other = worker("i")
    index.insert(other, chain("x"), 2.0)
    assert [each.id for each, _ in index.match(chain("x"), fleet)] == ["h"]
    assert found(index, "x", [*fleet, other]) == {"h": 1, "i": 1}


def test_fleets_in_a_list_and_more_fleets_than_are_remembered() -> None:
    fleet = [worker(id) for id in "abcdefgh"]
    index = PrefixIndex(1000, 60.0)
    for each in fleet:
        index.insert(each, chain("x"), 0.0)
    assert len(index.match(chain("x"), fleet)) == 8
    fleet.pop()
    assert len(index.match(chain("x"), fleet)) == 7
    tuples = [(*fleet, worker("z")) for _ in range(3 * FLEETS)]
    for workers in [*tuples, *tuples]:
        assert len(index.match(chain("x"), workers)) == 7
    assert len(index._fleets) <= FLEETS


# ------------------------------------------------------------------ who goes first


def test_what_was_used_longest_ago_goes_first_and_of_a_prompt_its_end() -> None:
    a = worker(kv_tokens=16)
    index = PrefixIndex(1000, 60.0)
    # Room for 8 blocks of 2 tokens.
    index.insert(a, chain("12345"), 0.0, 2)
    index.insert(a, chain("abc"), 1.0, 2)
    assert index.blocks_of(a) == 8
    index.insert(a, chain("12"), 2.0, 2)
    index.insert(a, chain("xyz"), 3.0, 2)
    assert found(index, "12345", [a]) == {"a": 2}
    assert found(index, "abc", [a]) == {"a": 3}
    index.insert(a, chain("XYZ"), 4.0, 2)
    assert found(index, "abc", [a]) == {}
    assert found(index, "12", [a]) == {"a": 2}
    assert (index.blocks_of(a), len(index)) == (8, 8)


def test_of_a_prompt_longer_than_the_room_the_beginning_is_believed() -> None:
    a = worker(kv_tokens=16)
    index = PrefixIndex(1000, 60.0)
    index.insert(a, chain("a long prompt"), 0.0, 4)
    assert found(index, "a long prompt", [a]) == {"a": 4}
    index.insert(a, chain("b"), 0.0, 1024)
    assert (index.blocks_of(a), found(index, "b", [a])) == (1, {"a": 1})


def test_a_worker_that_does_not_tell_has_room_for_all_and_one_that_tells_later_has_not() -> None:
    a = worker()
    index = PrefixIndex(1000, 60.0)
    index.insert(a, chain("0123456789" * 9), 0.0)
    assert index.blocks_of(a) == 90
    a.kv_tokens = 80 * 16
    index.insert(a, chain("x"), 1.0)
    assert index.blocks_of(a) == 10


def test_a_worker_with_much_room_gives_a_part_of_it_at_a_time() -> None:
    a = worker(kv_tokens=640 * 16)
    index = PrefixIndex(10_000, 1e9)
    sizes = []
    for number in range(300):
        index.insert(a, range(4 * number, 4 * number + 4), float(number), 16)
        sizes.append(index.blocks_of(a))
    assert max(sizes) == 640
    assert min(sizes[200:]) == 640 - 640 // 32
    assert index.match(range(1196, 1200), (a,)) == [(a, 4)]


def test_k01_memory_is_bounded_however_many_workers_and_unique_prompts_there_are() -> None:
    index = PrefixIndex(2560, 1e9)
    fleet = [worker(f"w{number}") for number in range(16)]
    for number in range(4000):
        index.insert(fleet[number % 16], chain(f"{number:08}"), float(number))
        assert len(index) <= 2560
    held = [index.blocks_of(each) for each in fleet]
    assert sum(held) == len(index) >= 2560 - 10 - 8
    assert max(held) - min(held) <= 16
    # Nothing is kept beside what is counted.
    assert sum(mask.bit_count() for mask in index._masks.values()) == len(index)
    assert [each.id for each, depth in index.match(chain("00003999"), fleet) if depth == 8] == [
        "w15"
    ]
    assert found(index, "00000000", fleet)["w0"] < 8


def test_k01_one_endless_prompt_is_no_way_around_it() -> None:
    index = PrefixIndex(100, 60.0)
    a = worker()
    blocks = tuple(range(1, 5000))
    index.insert(a, blocks, 0.0)
    assert (len(index), index.match(blocks, (a,))) == (100, [(a, 100)])
    index.stored(a, range(10_000, 20_000), 1.0)
    assert len(index) == len(index._masks) == 100


def test_room_is_made_by_whoever_used_something_longest_ago() -> None:
    a, b, c = fleet = [worker(id) for id in "abc"]
    index = PrefixIndex(9, 60.0)
    index.insert(a, chain("111"), 0.0)
    index.insert(b, chain("222"), 1.0)
    index.insert(a, chain("333"), 2.0)
    index.insert(c, chain("44"), 3.0)
    assert [index.blocks_of(each) for each in fleet] == [4, 3, 2]
    index.insert(c, chain("5555"), 4.0)
    assert [index.blocks_of(each) for each in fleet] == [3, 0, 6]
    assert found(index, "333", fleet) == {"a": 3}


def test_what_is_not_asked_for_any_more_is_not_believed() -> None:
    a, b = fleet = [worker(id) for id in "ab"]
    index = PrefixIndex(1000, 60.0)
    index.insert(a, chain("old"), 0.0)
    index.insert(b, chain("old"), 10.0)
    index.expire(59.999)
    assert found(index, "old", fleet) == {"a": 3, "b": 3}
    index.expire(60.0)
    assert found(index, "old", fleet) == {"b": 3}
    index.insert(b, chain("ol"), 69.0)
    index.expire(70.0)
    assert found(index, "old", fleet) == {"b": 2}
    index.expire(1e9)
    assert (len(index), index._masks) == (0, {})


def test_an_insertion_lets_go_of_what_is_over() -> None:
    a = worker()
    index = PrefixIndex(1000, 64.0)
    index.insert(a, chain("old"), 0.0)
    index.insert(a, chain("1"), 63.9)
    assert index.blocks_of(a) == 4
    # It looks only once a second, but then for all.
    index.insert(a, chain("2"), 64.8)
    assert index.blocks_of(a) == 5
    index.insert(a, chain("3"), 64.9)
    assert index.blocks_of(a) == 3


def test_a_clock_that_goes_back_makes_nothing_older() -> None:
    a = worker()
    index = PrefixIndex(6, 60.0)
    index.insert(a, chain("one"), 100.0)
    index.insert(a, chain("two"), 50.0)
    index.insert(a, chain("sum"), 50.0)
    assert found(index, "one", [a]) == {}
    assert found(index, "two", [a]) == found(index, "sum", [a]) == {"a": 3}
    index.expire(159.0)
    assert len(index) == 6
    index.expire(50.0)
    assert len(index) == 6


@pytest.mark.parametrize("bad", [(0, 1.0, 1.0), (1, 0.0, 1.0), (1, 1.0, 0.0), (-1, 1.0, 1.0)])
def test_limits_that_make_no_sense_are_refused(bad: tuple[int, float, float]) -> None:
    with pytest.raises(ValueError, match="must be a"):
        PrefixIndex(bad[0], bad[1], speculative_s=bad[2])


def test_new_limits_hold_from_the_next_insertion_on() -> None:
    a = worker("a")
    index = PrefixIndex(1000, 1000.0)
    index.insert(a, chain("one"), 0.0)
    index.set_limits(1000, 10.0)
    index.insert(a, chain("two"), 11.0)
    assert found(index, "one", [a]) == {}
    index.set_limits(2, 10.0)
    index.insert(a, chain("sum"), 12.0)
    assert len(index) <= 2
    with pytest.raises(ValueError, match="at least 1"):
        index.set_limits(0, 10.0)


def test_the_room_of_a_worker_is_in_tokens_and_its_weight_is_no_limit() -> None:
    # And neither is what it counts its cache in: slots, or pages of any size.
    listed = Worker("a", model="m", http_address="h:1", static=True, kv_total_blocks=1)
    index = PrefixIndex(1000, 1000.0)
    index.insert(listed, chain("one"), 0.0)
    assert found(index, "one", [listed]) == {"a": 3}
    listed.kv_tokens = 256
    index.insert(listed, chain("one"), 1.0)
    assert found(index, "one", [listed]) == {"a": 2}


# ------------------------------------------------------------------ who is gone


def test_a_purge_leaves_nothing_of_a_worker_and_all_of_the_others() -> None:
    a, b, c = fleet = [worker(id) for id in "abc"]
    index = PrefixIndex(1000, 60.0)
    for each in fleet:
        index.insert(each, chain("shared" + each.id), 0.0)
    index.stored(a, chain("known"), 1.0)
    index.purge(a)
    index.purge(a)
    assert (index.blocks_of(a), len(index)) == (0, 14)
    assert found(index, "shareda", fleet) == {"b": 6, "c": 6}
    index.purge(b)
    assert found(index, "sharedc", fleet) == {"c": 7}
    index.purge(c)
    assert (len(index), index._masks) == (0, {})
    assert len(index._slots) == 3
    # Their places are taken by others.
    for each in (d := worker("d"), worker("e"), worker("f")):
        index.insert(each, chain("x"), 2.0)
    assert len(index._slots) == 3
    assert found(index, "x", [d, a]) == {"d": 1}


def test_k04_k05_a_restarted_engine_has_nothing_cached() -> None:
    registry = Registry()
    index = PrefixIndex(1000, 60.0)
    registry.on_leave.append(index.purge)

    def beat(incarnation: int, now: float) -> tuple[Worker, ...]:
        registry.beat(WorkerReport("a", "127.0.0.1:8000", "m", incarnation=incarnation), now)
        return registry.routable("m", Role.UNIFIED)

    (first,) = beat(1, 0.0)
    index.insert(first, chain("cached"), 0.0)
    assert index.match(chain("cached"), beat(1, 1.0)) == [(first, 6)]
    # In place, at the same address.
    assert index.match(chain("cached"), beat(2, 2.0)) == []
    assert len(index) == 0
    # And after it was away for a while.
    (second,) = beat(2, 3.0)
    index.stored(second, chain("cached"), 3.0)
    registry.expire(60.0)
    assert len(index) == 0
    assert index.match(chain("cached"), beat(2, 61.0)) == []


def test_k09_two_workers_behind_one_address_have_each_its_own() -> None:
    one, other = worker("a"), worker("b")
    twin = worker("a")
    index = PrefixIndex(1000, 60.0)
    index.insert(one, chain("text"), 0.0)
    index.stored(other, chain("te"), 0.0)
    assert index.match(chain("text"), (one, other, twin)) == [(one, 4), (other, 2)]
    index.purge(twin)
    index.cleared(other)
    assert index.match(chain("text"), (one, other, twin)) == [(one, 4)]


# ------------------------------------------------------------------ events


def test_what_an_engine_says_is_known_until_it_says_otherwise() -> None:
    a = worker(kv_tokens=16)
    index = PrefixIndex(1000, 60.0)
    index.stored(a, chain("a long prompt"), 0.0)
    index.expire(1e6)
    assert found(index, "a long prompt", [a]) == {"a": 13}
    blocks = chain("a long prompt")
    index.removed(a, blocks[9:])
    assert found(index, "a long prompt", [a]) == {"a": 9}
    # What is missing in the middle makes the rest useless.
    index.removed(a, (blocks[4], blocks[4], 12345))
    assert (found(index, "a long prompt", [a]), index.blocks_of(a)) == ({"a": 4}, 8)
    index.cleared(a)
    assert (len(index), index._masks) == (0, {})


def test_what_was_routed_is_believed_until_its_event_arrives_or_does_not() -> None:
    a = worker(kv_tokens=16)
    index = PrefixIndex(1000, 3600.0, speculative_s=10.0)
    index.follow(a)
    index.insert(a, chain("routed and long"), 0.0)
    assert found(index, "routed and long", [a]) == {"a": 15}
    index.stored(a, chain("routed"), 1.0)
    assert index.blocks_of(a) == 15
    # Routed once more: what is known stays known.
    index.insert(a, chain("routed"), 2.0)
    index.expire(12.5)
    assert (found(index, "routed and long", [a]), len(index)) == ({"a": 6}, 6)
    # What is gone is gone, whether an event has told of it or not.
    index.insert(a, chain("routed again"), 13.0)
    index.removed(a, chain("routed a")[7:])
    assert found(index, "routed again", [a]) == {"a": 7}


def test_when_events_stop_what_was_known_is_believed_for_a_while() -> None:
    a, b = worker("a", 16), worker("b")
    index = PrefixIndex(1000, 60.0)
    index.stored(a, chain("0123456789"), 0.0)
    index.unfollow(a, 100.0)
    index.unfollow(b, 100.0)
    index.expire(159.0)
    assert found(index, "0123456789", [a]) == {"a": 10}
    # Its room is believed again, too, and the end goes first.
    index.insert(a, chain("x"), 159.0, 2)
    assert found(index, "0123456789", [a]) == {"a": 7}
    index.expire(160.0)
    assert found(index, "0123456789", [a]) == {}


def test_events_of_nobody_are_no_trouble() -> None:
    a = worker()
    index = PrefixIndex(1000, 60.0)
    index.removed(a, (1, 2))
    index.cleared(a)
    index.unfollow(a, 0.0)
    index.purge(a)
    assert (len(index), index.blocks_of(a), index.match((1,), (a,))) == (0, 0, [])


def test_what_is_believed_makes_room_for_what_is_known() -> None:
    a, b = fleet = [worker(id) for id in "ab"]
    index = PrefixIndex(8, 60.0)
    index.stored(a, chain("known"), 0.0)
    for number in range(9):
        index.insert(b, chain(f"{number}xy"), 1.0 + number)
    assert found(index, "known", fleet) == {"a": 5}
    assert found(index, "8xy", fleet) == {"b": 3}
    index.stored(a, chain("more to know"), 20.0)
    assert (len(index), index.blocks_of(b)) == (8, 0)


def test_a_worker_that_is_purged_is_followed_no_more() -> None:
    a = worker(kv_tokens=16)
    index = PrefixIndex(1000, 60.0)
    index.follow(a)
    index.purge(a)
    index.insert(a, chain("0123456789"), 0.0, 4)
    assert index.blocks_of(a) == 4


def test_events_add_to_what_routing_tells_where_the_first_of_them_are_missing() -> None:
    a = worker(kv_tokens=160)
    index = PrefixIndex(1000, 60.0, speculative_s=10.0)
    index.insert(a, chain("routed"), 0.0, 16)
    index.stored(a, chain("told"), 1.0)
    index.expire(59.0)
    assert (found(index, "routed", [a]), found(index, "told", [a])) == ({"a": 6}, {"a": 4})
    index.expire(1000.0)
    assert (found(index, "routed", [a]), found(index, "told", [a])) == ({}, {"a": 4})
    # From where all is known, only what is known counts for long.
    index.follow(a)
    index.insert(a, chain("routed"), 1001.0, 16)
    index.expire(1012.0)
    assert found(index, "routed", [a]) == {}


def test_bounds_hold_while_the_clock_stands_still() -> None:
    workers = tuple([Worker(name, model="m", http_address="h:1") for name in "abc"])
    index = PrefixIndex(300, 60.0)
    for number in range(3000):
        worker = workers[number % 3]
        blocks = range(10 * number, 10 * number + 10)
        if number % 2:
            index.insert(worker, tuple(blocks), 5.0)
        else:
            index.stored(worker, blocks, 5.0)
        if number == 1500:
            index.set_limits(20, 0.5)
        assert len(index) <= (300 if number <= 1500 else 20)
        assert len(index) == sum(index.blocks_of(each) for each in workers)
    # Nothing is older than another, and nothing ends before time goes on.
    index.expire(5.0)
    assert len(index) > 0
    index.expire(5.5)
    assert len(index) == sum(len(cache.known) for cache in index._caches.values())
