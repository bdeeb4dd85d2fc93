r"""One engine's events, from its own hashes to ours: what a stream of messages says about what is cached.

An engine names its blocks by hashes that mean nothing to others. A stored block comes with its token ids and the name
of the block before, so the stream knows our hash of it (`pointsman.domain.blocks`) from the one before, and remembers
it under the engine's name: a removal says no more than that. Engines' blocks need not be as long as ours. Ours is
stored with the engine's block in which it ends, and goes with that.

What is told of here never claims too much. Blocks whose beginning is not known, because it was cached before the stream
was read, or on another tier, with a salt, or around an image, are left out, and all that follows on them. Those of a
LoRA adapter belong to a chain that begins with its name, since other weights make another cache of the same tokens.

Messages are numbered. A gap is filled by a replay, where the engine has one, and by forgetting all that is known where
not; a number that comes again with an older time is a duplicate, and with a newer one a new life of the engine. A
replay begins with the last message that is known, which proves that it is the same life. So there is one rule for a
reconnection and for a gap.

                  begin                            take: a number that is not the next
    (not connected) ---> wants = last, or 0 <--------------------------------- following
                              | replayed ..., replay_over                          ^
                              +----------------------------------------------------+

No socket and no clock: `pointsman.control.kv_events` has them.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Protocol, TypeAlias

from msgspec import Struct

from pointsman.dialect.kv_events import (
    Batch,
    BlockHash,
    Cleared,
    Event,
    MalformedEvents,
    Message,
    Removed,
    Stored,
    read_batch,
)
from pointsman.domain.blocks import TOKEN_BYTES, block_hashes, root_of

__all__ = ["Holds", "KvStream", "Tally", "Union"]

SPARE = 64
"""A stream that has as many blocks as it may have forgets one in so many of them at a time."""


class Holds(Protocol):
    """Who hears which of our blocks an engine has."""

    def stored(self, blocks: Sequence[int]) -> None:
        """Note that it has blocks."""

    def removed(self, blocks: Sequence[int]) -> None:
        """Note that it has blocks no more."""


class Tally(Struct):
    """What all streams of a process came to: their events, and what happened to the streams themselves."""

    stored: int = 0
    removed: int = 0
    cleared: int = 0
    left_out: int = 0
    unknown: int = 0
    malformed: int = 0
    duplicates: int = 0
    gaps: int = 0
    restarts: int = 0
    lost: int = 0
    replays: int = 0
    replays_failed: int = 0

    def events(self) -> dict[str, int]:
        """Return how many events there were of which kind: those left out are of no use to a prompt."""
        kinds = ("stored", "removed", "cleared", "left_out", "unknown")
        return {kind: getattr(self, kind) for kind in kinds}

    def streams(self) -> dict[str, int]:
        """Return how often what happened to a stream.

        >>> Tally(gaps=2).streams()["gaps"]
        2
        """
        kinds = self.events()
        return {each: getattr(self, each) for each in self.__struct_fields__ if each not in kinds}


class Union:
    """What all ranks of one worker have: a block is stored with the first of them, and gone with the last.

    >>> class Told:
    ...     stored = removed = lambda self, blocks: print(*blocks)
    >>> union = Union(Told())
    >>> union.stored((7, 8)); union.stored((7,)); union.removed((7, 8))
    7 8
    8
    """

    __slots__ = ("_counts", "_to")

    def __init__(self, to: Holds) -> None:
        self._to = to
        self._counts: dict[int, int] = {}

    def __len__(self) -> int:
        """Return how many blocks there are."""
        return len(self._counts)

    def stored(self, blocks: Sequence[int]) -> None:
        """Note that one of them has blocks, each of them once until it has it no more."""
        counts = self._counts
        new = []
        for block in blocks:
            count = counts.get(block, 0)
            counts[block] = count + 1
            if not count:
                new.append(block)
        if new:
            self._to.stored(new)

    def removed(self, blocks: Sequence[int]) -> None:
        """Note that one of them has blocks no more."""
        counts = self._counts
        gone = []
        for block in blocks:
            count = counts[block]
            if count > 1:
                counts[block] = count - 1
            else:
                del counts[block]
                gone.append(block)
        if gone:
            self._to.removed(gone)

    def tell_again(self) -> None:
        """Say once more what is there, to whoever has forgotten it."""
        if self._counts:
            self._to.stored(list(self._counts))


class _Node(Struct, frozen=True, gc=False):
    """An engine's block that is not one of ours: those that end in it, the last that ended, and what is left over."""

    blocks: tuple[int, ...]
    before: int | None
    rest: bytes


Place: TypeAlias = int | _Node
"""An engine's block: our hash, where it is one of ours."""

Key: TypeAlias = BlockHash | tuple[int, BlockHash]
"""An engine's name of a block; with its group, where that is not the first."""


class KvStream:
    """The messages of one publisher: of a worker, or of one of its ranks.

    Our blocks have `block_bytes` bytes, 4 for each token. At most `blocks_max` of the engine's are remembered (1 or
    more): of one that only ever stores, what was stored longest ago is forgotten. `replays` says whether the engine has
    a replay to ask for. What happens is counted in `tally`.

    `wants` is the number from which on a replay is wanted, None for none. As long as it is not None, what `take` is
    given waits: ask for the replay, tell `replayed` each of its messages, and `replay_over` its end. `complete` says
    whether all that the engine has cached since it was empty is known, `last` the number of the last message.

    >>> class Told:
    ...     stored = removed = lambda self, blocks: print(len(blocks))
    >>> import msgspec
    >>> stream = KvStream(Told(), 8, blocks_max=100)
    >>> batch = [1.0, [["BlockStored", [7, 8], None, [1, 2, 3, 4], 2, None], ["BlockRemoved", [8]]]]
    >>> stream.take(Message(0, msgspec.msgpack.encode(batch)))
    2
    1
    >>> len(stream), stream.complete
    (1, True)
    """

    def __init__(
        self,
        to: Holds,
        block_bytes: int,
        *,
        blocks_max: int,
        replays: bool = False,
        tally: Tally | None = None,
    ) -> None:
        self._to = to
        self._size = block_bytes
        self._blocks_max = blocks_max
        self._replays = replays
        self.tally = Tally() if tally is None else tally
        self.complete = False
        self.wants: int | None = None
        self.last: int | None = None
        self._at = 0.0
        self._pending: Message | None = None
        self._unproven = self._disproved = False
        self._places: dict[Key, Place] = {}

    def __len__(self) -> int:
        """Return how many of the engine's blocks are known."""
        return len(self._places)

    def begin(self) -> None:
        """Note that the publisher is connected, for the first time or again: whatever came between, nobody saw."""
        self._pending = None
        if self._replays:
            if not self.complete:
                # Nothing is lost, and from the beginning on it may be whole.
                self._forget()
            self._want()
        elif self.last is not None:
            # It may be another engine, and nothing can prove that it is not.
            self._lose()

    def take(self, message: Message) -> None:
        """Take a message that was published. Raises MalformedEvents; all that is known is lost then."""
        if self.wants is not None:
            self._pending = message
            return
        batch, number = self._read(message), message.sequence
        if self.last is not None and number <= self.last:
            if batch.at <= self._at:
                self.tally.duplicates += 1
                return
            self._restart()
        if self.last is None:
            missing = number > 0
        else:
            missing = number > self.last + 1
            self.tally.gaps += missing
        if missing and self._replays:
            self._want()
            self._pending = message
        else:
            self._apply(number, batch)

    def replayed(self, message: Message) -> None:
        """Take a message of a replay. Raises MalformedEvents as `take` does."""
        if self.wants is None or self._disproved:
            return
        batch, number = self._read(message), message.sequence
        if self._unproven:
            self._unproven = False
            if number != self.last or batch.at != self._at:
                self._disproved = True
                self._other_life(number)
        elif self.last is None or number > self.last:
            self._apply(number, batch)

    def replay_over(self, *, whole: bool) -> None:
        """Note the end of a replay, which is `whole` or broke off. `wants` may want another one then.

        Raises MalformedEvents for the message that waited.
        """
        if self.wants is None:
            return
        unproven, self._unproven = self._unproven, False
        disproved, self._disproved = self._disproved, False
        if whole and unproven:
            self._other_life(0)
        if whole and (unproven or disproved):
            self.wants = 0
            return
        self.wants = None
        if unproven:
            self._lose()
        if self.last is None:
            # Where nothing was published yet, whatever comes is all.
            self.complete = whole
        pending, self._pending = self._pending, None
        if pending is None:
            return
        batch, number = self._read(pending), pending.sequence
        if self.last is None or number > self.last:
            self._apply(number, batch)

    def end(self) -> None:
        """Forget everything: it is not read any more."""
        self._forget()
        self._pending = None
        self.wants = None

    def _want(self) -> None:
        self._unproven = self.last is not None
        self._disproved = False
        self.wants = self.last or 0

    def _read(self, message: Message) -> Batch:
        try:
            return read_batch(message.payload)
        except MalformedEvents:
            self.tally.malformed += 1
            # Whatever it said, it may have been that blocks are gone.
            self._lose()
            self.last = message.sequence
            raise

    def _other_life(self, number: int) -> None:
        """Forget what is known, since the last message is not there any more, and `number` is the first that is."""
        if self.last is not None and number > self.last:
            self._lose()
        else:
            self._restart()

    def _restart(self) -> None:
        self.tally.restarts += 1
        self._forget()

    def _lose(self) -> None:
        self.tally.lost += 1
        self._forget()

    def _forget(self) -> None:
        self.complete = False
        self.last = None
        self._drop(list(self._places))

    def _apply(self, number: int, batch: Batch) -> None:
        """Do what a batch says, with what is known if it is the next one, else from nothing on."""
        if self.last is None:
            self.complete = number == 0
        elif number > self.last + 1:
            self._lose()
        self.last, self._at = number, batch.at
        self.tally.unknown += batch.unknown
        for event in batch.events:
            self._event(event)

    def _event(self, event: Event) -> None:
        tally = self.tally
        if isinstance(event, Cleared):
            tally.cleared += 1
            self._drop(list(self._places))
            # From nothing on, everything is known.
            self.complete = True
        elif not event.usable:
            tally.left_out += 1
        elif isinstance(event, Removed):
            tally.removed += 1
            group = event.group
            self._drop([each if not group else (group, each) for each in event.hashes])
        elif self._store(event):
            tally.stored += 1
        else:
            tally.left_out += 1

    def _store(self, event: Stored) -> bool:
        """Note blocks that are cached; return whether it is known what they follow on."""
        places, group = self._places, event.group
        names: Sequence[Key] = event.hashes
        if len(set(names)) < len(names):
            return False
        parent: Key | None = event.parent
        if group:
            names = [(group, each) for each in event.hashes]
            parent = None if parent is None else (group, event.parent)  # type: ignore[assignment]
        if parent is None:
            before, rest = root_of(event.adapter), b""
        else:
            place = places.get(parent)
            if place is None:
                return False
            before, rest = (place, b"") if isinstance(place, int) else (place.before, place.rest)
        size = self._size
        stored: Sequence[int]
        if not rest and event.block_tokens * TOKEN_BYTES == size:
            stored = block_hashes(event.tokens, size, len(names), before)
            made: Iterable[Place] = stored
        else:
            nodes = list(_nodes(event, size, before, rest))
            stored = [block for node in nodes for block in node.blocks]
            made = nodes
        if any(name in places for name in names):
            # Some versions tell once more of what a prompt found in the cache.
            news = {
                name: place
                for name, place in zip(names, made, strict=True)
                if places.get(name) != place
            }
            self._drop(news)
            stored = [block for place in news.values() for block in _blocks_of(place)]
            places.update(news)
        else:
            places.update(zip(names, made, strict=True))
        if stored:
            self._to.stored(stored)
        if len(places) > self._blocks_max:
            spare = len(places) - self._blocks_max + self._blocks_max // SPARE
            self._drop(list(islice(places, spare)))
        return True

    def _drop(self, names: Iterable[Key]) -> None:
        places = self._places
        gone: list[int] = []
        for name in names:
            place = places.pop(name, None)
            if place is not None:
                gone += _blocks_of(place)
        if gone:
            self._to.removed(gone)


def _blocks_of(place: Place) -> tuple[int, ...]:
    return (place,) if isinstance(place, int) else place.blocks


def _nodes(event: Stored, size: int, before: int | None, rest: bytes) -> Iterator[_Node]:
    """Yield what each block of an engine comes to where its blocks are not as long as ours."""
    step = event.block_tokens * TOKEN_BYTES
    for at in range(0, len(event.tokens), step):
        rest += event.tokens[at : at + step]
        blocks = block_hashes(rest, size, len(rest), before)
        if blocks:
            before = blocks[-1]
            rest = rest[len(blocks) * size :]
        yield _Node(blocks, before, rest)
