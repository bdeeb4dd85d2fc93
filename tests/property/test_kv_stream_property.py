"""An engine that stores, removes, clears, restarts and loses messages: the stream never says more than it has."""

from collections.abc import Sequence
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from pointsman.dialect.kv_events import Message
from pointsman.dialect.kv_stream import KvStream, Union
from pointsman.domain.blocks import block_hashes, pack_tokens

TOKENS = 2
BUFFER = 6


class Told:
    def __init__(self) -> None:
        self.blocks: set[int] = set()

    def stored(self, blocks: Sequence[int]) -> None:
        assert self.blocks.isdisjoint(blocks)
        self.blocks |= set(blocks)

    def removed(self, blocks: Sequence[int]) -> None:
        assert self.blocks.issuperset(blocks)
        self.blocks -= set(blocks)


class Engine:
    """Prompts are paths in a tree of blocks; a block's name is its number in this life."""

    def __init__(self) -> None:
        self.clock = 0.0
        self.restart()

    def restart(self) -> None:
        self.sequence = 0
        self.buffer: list[Message] = []
        self.names: dict[tuple[int, ...], int] = {}
        self.made = 0

    def publish(self, events: list[Any]) -> Message:
        self.clock += 1.0
        message = Message(self.sequence, msgspec.msgpack.encode([self.clock, events]))
        self.sequence += 1
        self.buffer = [*self.buffer, message][-BUFFER:]
        return message

    def store(self, path: tuple[int, ...]) -> Message:
        events = []
        for end in range(1, len(path) + 1):
            if path[:end] not in self.names:
                parent = self.names[path[: end - 1]] if end > 1 else None
                self.made += 1
                self.names[path[:end]] = self.made
                ids = [path[end - 1]] * TOKENS
                events.append(["BlockStored", [self.made], parent, ids, TOKENS, None])
        return self.publish(events)

    def remove(self, pick: int) -> Message:
        leaves = [p for p in self.names if not any(q[:-1] == p for q in self.names)]
        if not leaves:
            return self.publish([])
        gone = leaves[pick % len(leaves)]
        return self.publish([["BlockRemoved", [self.names.pop(gone)]]])

    def clear(self) -> Message:
        self.names = {}
        return self.publish([["AllBlocksCleared"]])

    def blocks(self) -> set[int]:
        return {
            block_hashes(pack_tokens([each for each in path for _ in range(TOKENS)]), 4 * TOKENS)[
                -1
            ]
            for path in self.names
        }


step = st.one_of(
    st.tuples(st.just("store"), st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple)),
    st.tuples(st.just("remove"), st.integers(0, 50)),
    st.tuples(st.sampled_from(["clear", "restart", "reconnect", "fail"]), st.none()),
)


@settings(max_examples=300)
@given(st.lists(st.tuples(step, st.booleans()), max_size=40), st.booleans(), st.booleans())
def test_k04_k07_a_stream_never_says_more_than_its_engine_has(
    steps: list[tuple[tuple[str, Any], bool]], replays: bool, late: bool
) -> None:
    engine, told = Engine(), Told()
    stream = KvStream(Union(told), 4 * TOKENS, blocks_max=1000, replays=replays)
    failing = False
    if late:
        engine.store((0, 1))

    def settle() -> None:
        rounds = 0
        while stream.wants is not None:
            rounds += 1
            assert rounds <= 2
            for each in [] if failing else engine.buffer:
                if each.sequence >= stream.wants:
                    stream.replayed(each)
            stream.replay_over(whole=not failing)

    stream.begin()
    settle()
    heard = True
    for (what, value), lost in steps:
        if what == "fail":
            failing = not failing
            continue
        if what == "restart":
            engine.restart()
        if what in ("restart", "reconnect"):
            stream.begin()
            settle()
            continue
        message = engine.clear() if what == "clear" else getattr(engine, what)(value)
        heard = not lost
        if heard:
            stream.take(message)
            settle()
            # Whatever was lost before, it is up to date now.
            assert told.blocks <= engine.blocks()
            assert stream.last == message.sequence
            if stream.complete:
                assert told.blocks == engine.blocks()
    if replays and not failing:
        stream.begin()
        settle()
        assert told.blocks <= engine.blocks()
        if engine.sequence <= BUFFER:
            assert (told.blocks, stream.complete) == (engine.blocks(), True)
