"""What a stream of messages comes to: sequence numbers, gaps, replays, new lives, and the blocks behind them."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pointsman.dialect.kv_events import MalformedEvents, Message, read_message, read_replayed
from pointsman.dialect.kv_stream import KvStream, Tally, Union
from pointsman.domain.blocks import block_hashes, pack_tokens, root_of

RECORDED = Path(__file__).parent.parent / "recorded" / "kv_events"
BLOCK = 4
"""Tokens in a block of ours."""


class Told:
    """Who hears of it: the blocks that are there. Nothing is stored twice, and nothing removed that is not there."""

    def __init__(self) -> None:
        self.blocks: set[int] = set()

    def stored(self, blocks: Sequence[int]) -> None:
        assert self.blocks.isdisjoint(blocks)
        assert len(set(blocks)) == len(blocks) > 0
        self.blocks |= set(blocks)

    def removed(self, blocks: Sequence[int]) -> None:
        assert self.blocks.issuperset(blocks)
        self.blocks -= set(blocks)


def ours(ids: Iterable[int], *, adapter: str = "", block: int = BLOCK) -> set[int]:
    return set(block_hashes(pack_tokens(list(ids)), 4 * block, parent=root_of(adapter)))


def message(number: int, *events: Any, at: float | None = None) -> Message:
    return Message(number, msgspec.msgpack.encode([float(number) if at is None else at, events]))


def store(
    names: Sequence[int | bytes],
    ids: Iterable[int],
    parent: int | bytes | None = None,
    block: int = BLOCK,
    *more: Any,
) -> list[Any]:
    return ["BlockStored", list(names), parent, list(ids), block, *(more or (None,))]


def remove(*names: int | bytes, group: int | None = None) -> list[Any]:
    return ["BlockRemoved", list(names), "GPU", group]


CLEAR = ["AllBlocksCleared"]


def stream(*, replays: bool = False, blocks_max: int = 1000) -> tuple[KvStream, Told]:
    told = Told()
    made = KvStream(Union(told), 4 * BLOCK, blocks_max=blocks_max, replays=replays)
    made.begin()
    return made, told


def followed(*messages: Message, **options: Any) -> tuple[KvStream, Told]:
    made, told = stream(**options)
    for each in messages:
        made.take(each)
    return made, told


# ------------------------------------------------------------------ blocks


def test_stored_blocks_are_known_by_our_hashes_and_removed_by_the_engines() -> None:
    made, told = followed(
        message(0, store((7, 8), range(8))), message(1, store((9,), range(8, 12), 8))
    )
    assert told.blocks == ours(range(12))
    made.take(message(2, remove(9, 1234)))
    assert told.blocks == ours(range(8))
    made.take(message(3, store((9,), range(20, 24), 7)))
    assert told.blocks == ours(range(8)) | ours([*range(4), *range(20, 24)])
    made.take(message(4, CLEAR))
    assert (told.blocks, len(made), made.complete) == (set(), 0, True)
    tally = made.tally
    assert (tally.stored, tally.removed, tally.cleared, tally.left_out) == (3, 1, 1, 0)


@pytest.mark.parametrize("theirs", [1, 2, 3, 4, 6, 8, 12, 24])
def test_blocks_of_engines_may_be_of_any_size(theirs: int) -> None:
    made, told = stream()
    names = list(range(100, 100 + 48 // theirs))
    for number, name in enumerate(names):
        ids = range(number * theirs, (number + 1) * theirs)
        parent = names[number - 1] if number else None
        made.take(message(number, store((name,), ids, parent, theirs)))
    assert told.blocks == ours(range(48))
    # And all at once.
    assert followed(message(0, store(names, range(48), None, theirs)))[1].blocks == ours(range(48))
    # Ours goes with the block of theirs in which it ends.
    for number, name in reversed(list(enumerate(names))):
        assert made.last is not None
        made.take(message(made.last + 1, remove(name)))
        assert told.blocks == ours(range(number * theirs))
    assert len(made) == 0


def test_what_follows_on_something_unknown_is_left_out() -> None:
    salted = store((7,), range(4), None, 4, None, "GPU", None, [["pepper"]])
    on_disk = store((17,), range(4), None, 4, None, "DISK")
    made, told = followed(
        message(0, salted, store((8,), range(4, 8), 7)),
        message(1, on_disk, store((18,), range(4, 8), 17)),
        message(2, store((5,), range(4), 12345)),
        message(3, store((6, 6), range(8))),
        message(4, ["BlockRemoved", [7], "DISK"]),
    )
    assert (told.blocks, len(made), made.tally.left_out) == (set(), 0, 7)


def test_adapters_have_chains_of_their_own() -> None:
    with_adapter = store((7,), range(4), None, 4, 1, "GPU", "sql", [["sql"]])
    made, told = followed(
        message(0, store((6,), range(4)), with_adapter),
        message(1, store((8,), range(4, 8), 7, 4, 1, "GPU", "sql", [["sql"]])),
    )
    assert told.blocks == ours(range(4)) | ours(range(8), adapter="sql")
    assert ours(range(4)).isdisjoint(ours(range(8), adapter="sql"))
    made.take(message(2, remove(7, 8)))
    assert told.blocks == ours(range(4))


def test_blocks_of_other_groups_have_names_of_their_own() -> None:
    other = store((7,), range(4), None, 4, None, "GPU", None, None, 1)
    made, told = followed(
        message(0, store((7,), range(4)), other),
        message(1, store((8,), range(4, 8), 7, 4, None, "GPU", None, None, 1)),
        message(2, remove(7)),
    )
    assert told.blocks == ours(range(8))
    made.take(message(3, remove(7, 8, group=1)))
    assert told.blocks == set()


def test_what_is_told_twice_is_there_once() -> None:
    made, told = followed(
        message(0, store((7, 8), range(8))),
        message(1, store((7, 8, 9), range(12))),
        message(2, store((7,), range(50, 54))),
    )
    # A name that means something else now: it was forgotten before.
    assert told.blocks == (ours(range(12)) - ours(range(4))) | ours(range(50, 54))
    made.take(message(3, remove(7, 8, 9)))
    assert told.blocks == set()


def test_k01_an_engine_that_only_ever_stores_is_no_way_to_more_memory() -> None:
    made, told = stream(blocks_max=640)
    union = made._to
    assert isinstance(union, Union)
    for number in range(5000):
        made.take(message(number, store((number,), range(number * 4, number * 4 + 4))))
        assert len(made) <= 640
        assert len(told.blocks) == len(made) == len(union)
    assert ours(range(4 * 4999, 4 * 5000)) <= told.blocks
    # One event with all of it as well.
    made.take(message(5000, store(range(10_000, 20_000), [7] * 40_000)))
    assert len(told.blocks) == len(made) <= 640


# ------------------------------------------------------------------ numbers


def test_a_gap_without_a_replay_forgets_everything_and_begins_anew() -> None:
    made, told = followed(
        message(0, store((7,), range(4))),
        message(2, store((8,), range(10, 14)), store((9,), range(4, 8), 7)),
    )
    assert told.blocks == ours(range(10, 14))
    assert (made.tally.gaps, made.tally.lost, made.complete, made.last) == (1, 1, False, 2)
    made.take(message(3, CLEAR))
    assert made.complete


def test_a_stream_that_is_read_late_is_not_complete() -> None:
    made, told = followed(message(5, store((7,), range(4))))
    assert (made.complete, told.blocks, made.tally.gaps) == (False, ours(range(4)), 0)
    assert followed(message(0))[0].complete


def test_duplicates_are_left_alone() -> None:
    first = message(0, store((7,), range(4)))
    made, told = followed(first, message(1, remove(7)), first, message(1, remove(7)))
    assert (told.blocks, made.tally.duplicates, made.last) == (set(), 2, 1)


def test_k04_a_sequence_that_begins_again_is_a_new_life() -> None:
    made, told = followed(
        *(message(n, store((n,), range(n * 4, n * 4 + 4))) for n in range(3)),
        message(0, store((70,), range(40, 44)), at=100.0),
    )
    assert (told.blocks, made.complete, made.tally.restarts) == (ours(range(40, 44)), True, 1)
    # And where its first messages were published before anybody listened.
    made.take(message(1, at=101.0))
    made.take(message(2, at=102.0))
    made.take(message(1, store((80,), range(80, 84)), at=200.0))
    assert (told.blocks, made.complete, made.tally.restarts) == (ours(range(80, 84)), False, 2)


def test_k04_a_reconnection_without_a_replay_is_a_new_life() -> None:
    made, told = followed(message(0, store((7,), range(4))))
    made.begin()
    assert (told.blocks, made.last, made.wants) == (set(), None, None)
    # The very number that was due would prove nothing.
    made.take(message(1, store((8,), range(4, 8), 7)))
    assert (told.blocks, made.complete) == (set(), False)


def test_a_batch_that_cannot_be_read_may_have_said_that_blocks_are_gone() -> None:
    made, told = followed(message(0, store((7,), range(4))))
    with pytest.raises(MalformedEvents):
        made.take(Message(1, b"\xc1"))
    assert (told.blocks, made.complete, made.tally.malformed) == (set(), False, 1)
    made.take(message(2, store((8,), range(4))))
    assert told.blocks == ours(range(4))
    # A number from nowhere is overtaken by time.
    with pytest.raises(MalformedEvents):
        made.take(Message(2**60, b""))
    made.take(message(3, store((9,), range(4))))
    assert (told.blocks, made.last) == (ours(range(4)), 3)


# ------------------------------------------------------------------ replays


def replay(made: KvStream, *messages: Message, whole: bool = True) -> int:
    assert made.wants is not None
    wanted = made.wants
    for each in messages:
        if each.sequence >= wanted:
            made.replayed(each)
    made.replay_over(whole=whole)
    return wanted


LIFE = [message(n, store((n,), range(n * 4, n * 4 + 4))) for n in range(8)]


def known(*numbers: int) -> set[int]:
    return {block for n in numbers for block in ours(range(n * 4, n * 4 + 4))}


def test_what_came_before_is_asked_for_at_the_beginning() -> None:
    made, told = stream(replays=True)
    assert replay(made, *LIFE[:3]) == 0
    assert (told.blocks, made.complete, made.wants, made.last) == (known(0, 1, 2), True, None, 2)
    # What was published meanwhile comes twice.
    for each in LIFE[1:4]:
        made.take(each)
    assert (told.blocks, made.tally.duplicates) == (known(0, 1, 2, 3), 2)


def test_where_nothing_was_published_whatever_comes_is_all() -> None:
    made, told = stream(replays=True)
    assert replay(made) == 0
    assert (made.complete, made.last, made.wants) == (True, None, None)
    made.take(LIFE[0])
    assert (told.blocks, made.complete) == (known(0), True)


def test_a_replay_that_begins_late_does_not_make_it_complete() -> None:
    made, told = stream(replays=True)
    replay(made, *LIFE[2:4])
    assert (told.blocks, made.complete) == (known(2, 3), False)


def test_a_gap_is_filled_by_a_replay() -> None:
    made, told = stream(replays=True)
    replay(made, LIFE[0])
    made.take(LIFE[4])
    assert told.blocks == known(0)
    assert replay(made, *LIFE[:5]) == 0
    assert (told.blocks, made.complete, made.last) == (known(0, 1, 2, 3, 4), True, 4)
    made.take(LIFE[5])
    # The message that showed the gap may not be in the replay yet.
    made.take(LIFE[7])
    assert replay(made, LIFE[5], LIFE[6]) == 5
    assert (told.blocks, made.complete) == (known(*range(8)), True)
    assert (made.tally.gaps, made.tally.lost, made.tally.restarts) == (2, 0, 0)


def test_what_waited_for_a_replay_is_not_done_again_where_the_replay_had_it() -> None:
    made, told = stream(replays=True)
    replay(made, LIFE[0])
    made.take(LIFE[2])
    # Meanwhile its block has gone.
    replay(made, *LIFE[:3], message(3, remove(2)))
    assert (told.blocks, made.last) == (known(0, 1), 3)


def test_a_gap_that_a_replay_cannot_fill_forgets_everything() -> None:
    made, told = stream(replays=True)
    replay(made, LIFE[0])
    made.take(LIFE[7])
    # The last that is known has dropped out of the engine's buffer.
    assert replay(made, *LIFE[5:7]) == 0
    assert (told.blocks, made.wants) == (set(), 0)
    assert replay(made, *LIFE[5:7]) == 0
    assert (told.blocks, made.complete, made.last) == (known(5, 6, 7), False, 7)
    assert (made.tally.lost, made.tally.restarts) == (1, 0)


def test_a_hole_in_a_replay_loses_what_came_before_it() -> None:
    made, told = stream(replays=True)
    replay(made, LIFE[0], LIFE[1], LIFE[3])
    assert (told.blocks, made.complete, made.tally.lost) == (known(3), False, 1)


def test_a_replay_that_breaks_off_loses_what_it_was_to_prove() -> None:
    made, told = stream(replays=True)
    replay(made, LIFE[0])
    made.take(LIFE[3])
    replay(made, whole=False)
    assert (told.blocks, made.complete, made.wants, made.last) == (known(3), False, None, 3)
    # One that proved it, and broke off then, leaves the hole that it did not fill.
    made.take(LIFE[6])
    replay(made, LIFE[3], LIFE[4], whole=False)
    assert (told.blocks, made.last) == (known(6), 6)
    made.begin()
    replay(made, whole=False)
    assert (told.blocks, made.complete, made.last) == (set(), False, None)
    made.take(LIFE[0])
    assert made.complete


def test_a_reconnection_goes_on_where_a_replay_proves_that_it_is_the_same_life() -> None:
    made, told = stream(replays=True)
    replay(made, *LIFE[:3])
    made.begin()
    assert told.blocks == known(0, 1, 2)
    assert replay(made, *LIFE[:5]) == 2
    assert (told.blocks, made.complete, made.wants) == (known(0, 1, 2, 3, 4), True, None)
    assert (made.tally.restarts, made.tally.lost) == (0, 0)


@pytest.mark.parametrize("more", range(6))
def test_k04_a_reconnection_to_a_new_life_is_found_out_however_long_that_is(more: int) -> None:
    made, told = stream(replays=True)
    replay(made, *LIFE[:3])
    other = [
        message(n, store((n,), range(n * 4 + 400, n * 4 + 404)), at=100.0 + n) for n in range(more)
    ]
    made.begin()
    assert replay(made, *other) == 2
    assert (told.blocks, made.wants) == (set(), 0)
    replay(made, *other)
    assert told.blocks == {
        block for n in range(more) for block in ours(range(n * 4 + 400, n * 4 + 404))
    }
    assert (made.complete, made.tally.restarts) == (True, 1)


def test_k04_a_new_life_whose_beginning_nobody_heard_is_replayed() -> None:
    made, told = stream(replays=True)
    replay(made, *LIFE)
    other = [message(n, store((n,), range(400, 404)), at=100.0 + n) for n in range(3)]
    made.take(other[2])
    assert (told.blocks, made.tally.restarts) == (set(), 1)
    assert replay(made, *other) == 0
    assert (made.complete, made.last) == (True, 2)


def test_a_malformed_batch_in_a_replay_loses_what_came_before() -> None:
    made, told = stream(replays=True)
    made.replayed(LIFE[0])
    with pytest.raises(MalformedEvents):
        made.replayed(Message(1, b""))
    made.replayed(LIFE[2])
    made.replay_over(whole=True)
    assert (told.blocks, made.complete, made.last) == (known(2), False, 2)


def test_what_nobody_asked_for_is_left_alone() -> None:
    made, told = followed(LIFE[0])
    made.replayed(LIFE[1])
    made.replay_over(whole=True)
    assert (told.blocks, made.last) == (known(0), 0)
    made, told = stream(replays=True)
    made.take(LIFE[0])
    made.take(LIFE[1])
    replay(made, LIFE[0])
    made.replayed(LIFE[2])
    assert told.blocks == known(0, 1)
    made.begin()
    made.replayed(LIFE[1])
    made.replayed(LIFE[0])
    assert told.blocks == known(0, 1)


def test_a_stream_that_ends_has_nothing() -> None:
    made, told = stream(replays=True)
    replay(made, LIFE[0])
    made.take(LIFE[2])
    made.end()
    assert (told.blocks, len(made), made.complete, made.wants) == (set(), 0, False, None)
    assert sum(made.tally.events().values()) == 1
    assert made.tally.streams()["gaps"] == 1


# ------------------------------------------------------------------ ranks


def test_what_two_ranks_have_is_gone_when_neither_has_it() -> None:
    told = Told()
    union = Union(told)
    one, other = (KvStream(union, 4 * BLOCK, blocks_max=10, tally=Tally()) for _ in range(2))
    one.take(message(0, store((7, 8), range(8))))
    other.take(message(0, store((70,), range(4))))
    third = KvStream(union, 4 * BLOCK, blocks_max=10)
    third.take(message(0, store((71,), range(4))))
    one.take(message(1, CLEAR))
    third.take(message(1, CLEAR))
    assert (told.blocks, len(union)) == (ours(range(4)), 1)
    # A new life of one of them is none of the other's.
    one.take(message(0, store((9,), range(4)), at=9.0))
    other.begin()
    assert told.blocks == ours(range(4))
    told.blocks.clear()
    union.tell_again()
    assert told.blocks == ours(range(4))
    one.begin()
    union.tell_again()
    assert told.blocks == set()


# ------------------------------------------------------------------ a real engine's


def recording(name: str) -> Any:
    return json.loads((RECORDED / name).read_bytes())


@pytest.mark.parametrize("name", ["vllm_integers.json", "vllm_bytes.json"])
@pytest.mark.parametrize("block", [16, 32, 64])
def test_what_vllm_published_is_what_it_had_cached(name: str, block: int) -> None:
    recorded = recording(name)
    told = Told()
    made = KvStream(Union(told), 4 * block, blocks_max=1000)
    published = {what: frames for what, *frames in recorded["published"]}
    prompts = {}
    for asked in recorded["asked"]:
        ids = asked["tokens"]
        blocks = block_hashes(pack_tokens(ids), 4 * block)
        # What the engine says that it found in its cache is what the index would have said before.
        depth = next((n for n, each in enumerate(blocks) if each not in told.blocks), len(blocks))
        step = max(block, 32)
        if asked["name"] != "salted":
            assert depth * block // step * step == asked["cached"] // step * step
        if asked["name"] in published:
            made.take(read_message([bytes.fromhex(each) for each in published[asked["name"]]]))
        prompts[asked["name"]] = set(blocks[: len(ids) // step * (step // block)])
        if asked["name"] not in ("salted", "longer"):
            assert prompts[asked["name"]] <= told.blocks
        if asked["name"] == "longer":
            # It had no room for both: some of what was there before has gone.
            assert not prompts["first"] <= told.blocks
    # The cache was emptied before the last one.
    assert told.blocks == prompts["after reset"]
    assert (made.complete, made.tally.cleared) == (True, 1)
    assert made.tally.left_out > 0  # those with a salt
    assert (made.tally.malformed, made.tally.unknown) == (0, 0)


@pytest.mark.parametrize("name", ["vllm_integers.json", "vllm_bytes.json"])
def test_what_vllm_replays_is_what_it_published(name: str) -> None:
    recorded = recording(name)
    published = [
        read_message([bytes.fromhex(each) for each in frames])
        for _, *frames in recorded["published"]
    ]
    replayed = [
        read_replayed([bytes.fromhex(each) for each in frames]) for frames in recorded["replayed"]
    ]
    assert replayed == [*published[recorded["replayed_from"] :], None]


def test_a_reconnection_of_a_stream_that_was_read_late_may_make_it_whole() -> None:
    made, told = stream(replays=True)
    replay(made, whole=False)
    made.take(LIFE[2])
    replay(made, whole=False)
    assert (told.blocks, made.complete) == (known(2), False)
    made.begin()
    assert replay(made, *LIFE[:4]) == 0
    assert (told.blocks, made.complete, made.tally.lost) == (known(0, 1, 2, 3), True, 0)
