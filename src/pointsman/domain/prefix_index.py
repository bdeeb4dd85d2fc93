"""What each worker is believed to have cached, in blocks of prompts, and who has how much of the beginning of one.

A worker that was sent a prompt has its blocks afterwards, until it needs the room: so much is known from routing alone.
The index forgets as engines do, what was used longest ago first, and of a prompt its end before its beginning. It keeps
no more for a worker than that one has room for, where it tells, and no more in all than `blocks_max`; what was not
asked for within `ttl_s` is not believed any longer. A worker that left is forgotten at once: what comes back under its
name or address is another object, with an empty cache.

Where engines publish what they cache (KV events), that is known and not only believed: room and time take none of it,
the engine does. What was routed since is then believed for `speculative_s`, until the event of it arrives. Only
`blocks_max` holds for all, so that nobody can make the gateway's memory grow; what is known goes last.

Who has how much comes in groups: at most one for each block, and each has in it all that have more. So a group is
mostly the whole fleet or a few of it, the same ones again and again, and is kept with what it takes to pick them out.

Who has a block is one int per block, a bit for each worker: a step of a look-up is one `dict.get` and one `&`, however
many workers there are. A hash covers all blocks before its own, so it never stands behind two different ones; and since
the end of a prompt goes before its beginning, whoever is believed to have a block has all before it. So a look-up need
not step from block to block. Of what is known no such thing is sure, and once there were events it does.

Room is made for a few more than needed at a time, since that costs as much as for one. No clock: times are arguments,
in monotonic seconds. One that goes back counts as the latest.
"""

from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heappop, heapreplace
from itertools import compress, count, islice, repeat
from math import inf
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from pointsman.domain.worker import Worker

__all__ = ["Group", "PrefixIndex"]

SPARE = 32
"""A worker that is full gives one block in so many of its room at a time."""

SHARED_SPARE = 256
"""The same of the room of all."""

SWEEPS = 64
"""How often within the time to live an insertion looks for what is over it."""

FLEETS = 256
"""How many tuples of candidates are remembered with their bits."""

SMALL = 4
"""So few workers are no fleet, and are not remembered."""

DENSE = 16
"""From so many bits on all of them are looked at, and not one after the other."""

KEPT = 1 << 18
"""How many members the groups that are kept may have in sum; one costs 16 bytes, so this is 4 MB."""

_BITS = bytes.maketrans(b"01", b"\x00\x01")

Value = TypeVar("Value")


class _Cache:
    """What one worker has: hashes with the time of their last use, the latest last; none stands in both."""

    __slots__ = ("believed", "bit", "known", "slot")

    def __init__(self, slot: int, bit: int) -> None:
        self.slot = slot
        self.bit = bit
        self.believed: dict[int, float] = {}
        self.known: dict[int, float] = {}

    @property
    def size(self) -> int:
        return len(self.believed) + len(self.known)


class _Fleet:
    """A tuple of candidates: the bits of those that have anything, where each of them stands, and groups by bits."""

    __slots__ = ("bits", "groups", "places", "workers")

    def __init__(self, workers: "Sequence[Worker]", places: dict[int, int], bits: int) -> None:
        self.workers = workers
        self.places = places
        self.bits = bits
        self.groups: dict[int, Group] = {}


class Group:
    """Some of a tuple of candidates, in their order. It holds until the index changes.

    >>> from pointsman.domain.worker import Worker
    >>> fleet = tuple(Worker(id, model="m", http_address="127.0.0.1:8001") for id in "abc")
    >>> index = PrefixIndex(1024, 60.0)
    >>> index.insert(fleet[2], (11, 12), now=0.0)
    >>> index.insert(fleet[0], (11,), now=0.0)
    >>> [(depth, group.of("xyz")) for depth, group in index.reached((11, 12, 13), fleet)]
    [(2, 'z'), (1, ('x', 'z'))]
    """

    __slots__ = ("_bits", "_fleet", "_pick")

    def __init__(self, fleet: _Fleet, bits: int) -> None:
        self._fleet = fleet
        self._bits = bits
        self._pick: itemgetter[Any] | None = None

    def __len__(self) -> int:
        """Return how many they are, at least 1."""
        return self._bits.bit_count()

    @property
    def workers(self) -> "tuple[Worker, ...]":
        """The workers, in the order of the candidates."""
        return tuple(self.of(self._fleet.workers))

    def of(self, values: "Sequence[Value]") -> "Sequence[Value]":
        """Return the values of these, out of a sequence that is parallel to the candidates."""
        pick = self._pick
        if pick is None:
            places = self._fleet.places
            own = sorted([places[slot] for slot in _slots_of(self._bits)])
            # All in a row are, for one, the whole fleet, and any that is alone: of such there is no tuple otherwise.
            in_a_row = own[-1] - own[0] < len(own)
            pick = itemgetter(slice(own[0], own[-1] + 1)) if in_a_row else itemgetter(*own)
            self._pick = pick
        return cast("Sequence[Value]", pick(values))


class PrefixIndex:
    """At most `blocks_max` blocks (1 or more), counted once for each worker that has them.

    `ttl_s` and `speculative_s` are in seconds, above 0. Raises `ValueError` for values out of range.

    >>> from pointsman.domain.worker import Worker
    >>> a, b = [Worker(id, model="m", http_address="127.0.0.1:8001") for id in "ab"]
    >>> index = PrefixIndex(1024, 60.0)
    >>> index.insert(a, (11, 12, 13), now=0.0)
    >>> index.insert(b, (11, 12, 99), now=1.0)
    >>> [(worker.id, depth) for worker, depth in index.match((11, 12, 13, 14), (a, b))]
    [('a', 3), ('b', 2)]
    >>> index.purge(a)
    >>> len(index), index.blocks_of(b)
    (3, 3)
    """

    def __init__(self, blocks_max: int, ttl_s: float, *, speculative_s: float = 30.0) -> None:
        if speculative_s <= 0:
            raise ValueError("speculative_s must be above 0")
        self.set_limits(blocks_max, ttl_s)
        self._speculative_s = speculative_s
        self._size = 0
        self._latest = -inf
        self._masks: dict[int, int] = {}
        self._caches: dict[Worker, _Cache] = {}
        self._followed: set[Worker] = set()
        self._told = False
        self._slots: list[Worker | None] = []
        # The bit of one worker is one object for all of its blocks: those of late slots are long.
        self._bits: list[int] = []
        self._free: list[int] = []
        # By the id of the tuple; the entry holds the tuple itself, so no other object can have that id meanwhile.
        self._fleets: dict[int, _Fleet] = {}
        self._kept = 0

    def set_limits(self, blocks_max: int, ttl_s: float) -> None:
        """Set how much is kept, and for how long, from the next insertion on. Raises `ValueError` as the index does."""
        if blocks_max < 1 or ttl_s <= 0:
            raise ValueError("blocks_max must be at least 1, and ttl_s above 0")
        self._blocks_max = blocks_max
        self._ttl_s = ttl_s
        self._due = -inf

    def __len__(self) -> int:
        """Return how many blocks are kept, each counted once for every worker that has it."""
        return self._size

    def blocks_of(self, worker: "Worker") -> int:
        """Return how many blocks a worker has."""
        cache = self._caches.get(worker)
        return 0 if cache is None else cache.size

    # What policies ask.

    def match(
        self, blocks: "Sequence[int]", workers: "Sequence[Worker]"
    ) -> "list[tuple[Worker, int]]":
        """Return those of `workers` that have the first of `blocks`, each with how many in a row, most first."""
        found: list[tuple[Worker, int]] = []
        more = 0
        for depth, bits in self._depths(blocks, self._fleet_of(workers).bits):
            new = map(self._slots.__getitem__, _slots_of(bits ^ more))
            found += zip(cast("Iterator[Worker]", new), repeat(depth))
            more = bits
        return found

    def reached(
        self, blocks: "Sequence[int]", workers: "Sequence[Worker]"
    ) -> "list[tuple[int, Group]]":
        """Return how many of the first `blocks` some of `workers` have, most first, each with who has as many or more.

        Quickest for a tuple that was asked for before, as the same object.
        """
        fleet = self._fleets.get(id(workers)) or self._fleet_of(workers)
        groups = fleet.groups
        return [
            (depth, groups.get(bits) or self._group_of(fleet, bits))
            for depth, bits in self._depths(blocks, fleet.bits)
        ]

    # What routing tells.

    def insert(
        self, worker: "Worker", blocks: "Sequence[int]", now: float, block_tokens: int = 128
    ) -> None:
        """Believe that a worker has all of `blocks`, those of a prompt of `block_tokens` each that was sent to it.

        Where it tells how much it has room for, it is believed to have no more than that.
        """
        now = self._time(now)
        cache = self._cache_of(worker)
        believed, known, bit, masks = cache.believed, cache.known, cache.bit, self._masks
        before = len(believed)
        # The beginning comes last, so that it is the last to go.
        for block in reversed(blocks):
            if believed.pop(block, None) is None:
                if block in known:
                    continue
                mask = masks.get(block)
                masks[block] = bit if mask is None else mask | bit
            believed[block] = now
        self._size += len(believed) - before
        if worker.kv_tokens > 0 and worker not in self._followed:
            room = max(worker.kv_tokens // block_tokens, 1)
            if len(believed) > room:
                self._drop(
                    cache, believed, list(islice(believed, len(believed) - _goal(room, SPARE)))
                )
        if self._size > self._blocks_max:
            self._make_room()

    def expire(self, now: float) -> None:
        """Drop what was last used `ttl_s` ago or longer. An insertion does it too, now and then."""
        now = max(now, self._latest)
        self._due = now + self._ttl_s / SWEEPS
        for worker, cache in self._caches.items():
            kept_s = self._speculative_s if worker in self._followed else self._ttl_s
            oldest = now - kept_s
            self._drop(cache, cache.believed, list(_until(cache.believed, oldest)))

    def purge(self, worker: "Worker") -> None:
        """Forget a worker: it left, or its cache turned out to be gone."""
        cache = self._caches.pop(worker, None)
        if cache is not None:
            self._empty(cache)
            self._followed.discard(worker)
            self._slots[cache.slot] = None
            self._free.append(cache.slot)
            self._fleets.clear()

    # What events tell.

    def follow(self, worker: "Worker") -> None:
        """Take a worker's events for all that it has, from now on: what was routed is believed until its event is due.

        Without that, events add to what routing tells: for a worker of which the events from the beginning are missing.
        """
        self._told = True
        self._followed.add(worker)
        self._cache_of(worker)

    def unfollow(self, worker: "Worker", now: float) -> None:
        """Take no more events for it: they have stopped. What was known is believed, as if it had been used now."""
        now = self._time(now)
        cache = self._caches.get(worker)
        if cache is not None:
            self._followed.discard(worker)
            known, cache.known = cache.known, {}
            # What an engine stored first is the beginning of something, and shall be the last to go.
            cache.believed.update(dict.fromkeys(reversed(known), now))

    def stored(self, worker: "Worker", hashes: "Iterable[int]", now: float) -> None:
        """Note that a worker says that it has blocks."""
        now = self._time(now)
        self._told = True
        cache = self._cache_of(worker)
        believed, known, bit, masks = cache.believed, cache.known, cache.bit, self._masks
        before = cache.size
        for block in hashes:
            if believed.pop(block, None) is None and known.pop(block, None) is None:
                masks[block] = masks.get(block, 0) | bit
            known[block] = now
        self._size += cache.size - before
        if self._size > self._blocks_max:
            self._make_room()

    def removed(self, worker: "Worker", hashes: "Iterable[int]") -> None:
        """Note that a worker says that it has blocks no more."""
        cache = self._caches.get(worker)
        if cache is not None:
            for block in hashes:
                for held in (cache.known, cache.believed):
                    if block in held:
                        self._drop(cache, held, (block,))

    def cleared(self, worker: "Worker") -> None:
        """Note that a worker says that it has nothing any more."""
        cache = self._caches.get(worker)
        if cache is not None:
            self._empty(cache)

    def _time(self, now: float) -> float:
        """Return the time to stamp with: what is used later stands behind what was used before."""
        if now > self._latest:
            self._latest = now
            if now >= self._due:
                self.expire(now)
        return self._latest

    def _cache_of(self, worker: "Worker") -> _Cache:
        cache = self._caches.get(worker)
        if cache is not None:
            return cache
        if self._free:
            slot = self._free.pop()
        else:
            slot = len(self._slots)
            self._slots.append(None)
            self._bits.append(1 << slot)
        self._slots[slot] = worker
        cache = self._caches[worker] = _Cache(slot, self._bits[slot])
        self._fleets.clear()
        return cache

    def _fleet_of(self, workers: "Sequence[Worker]") -> _Fleet:
        known = self._fleets.get(id(workers))
        if known is not None:
            return known
        bits = 0
        places = {}
        for place, worker in enumerate(workers):
            cache = self._caches.get(worker)
            if cache is not None:
                bits |= cache.bit
                places[cache.slot] = place
        fleet = _Fleet(workers, places, bits)
        if len(workers) > SMALL and type(workers) is tuple:
            if len(self._fleets) >= FLEETS:
                del self._fleets[next(iter(self._fleets))]
            self._fleets[id(workers)] = fleet
        return fleet

    def _group_of(self, fleet: _Fleet, bits: int) -> Group:
        if self._kept >= KEPT:
            self._kept = 0
            for each in self._fleets.values():
                each.groups.clear()
        self._kept += bits.bit_count()
        group = fleet.groups[bits] = Group(fleet, bits)
        return group

    def _depths(self, blocks: "Sequence[int]", asked: int) -> list[tuple[int, int]]:
        """Return how many of the first blocks somebody has, most first, and the bits of those with as many or more."""
        having = asked & self._masks.get(blocks[0], 0) if blocks else 0
        if not having:
            return []
        depths = self._walked(blocks, having) if self._told else self._bisected(blocks, having)
        depths.reverse()
        return depths

    def _walked(self, blocks: "Sequence[int]", having: int) -> list[tuple[int, int]]:
        """Return the same from the fewest on, with a look at every block."""
        get = self._masks.get
        depths = []
        for depth, block in enumerate(blocks):
            still = having & get(block, 0)
            if still != having:
                depths.append((depth, having))
                having = still
                if not still:
                    return depths
        depths.append((len(blocks), having))
        return depths

    def _bisected(self, blocks: "Sequence[int]", having: int) -> list[tuple[int, int]]:
        """Return the same where whoever has a block has all before it, too, with a look at a few of them only."""
        get = self._masks.get
        end = len(blocks)
        depths = []
        depth = 1
        while having and depth < end:
            # `having` have the block before `depth`, and `still` are those of them that have the one before `beyond`.
            beyond, still = end, having & get(blocks[-1], 0)
            if still == having:
                break
            while depth + 1 < beyond:
                middle = (depth + beyond) // 2
                there = having & get(blocks[middle - 1], 0)
                if there == having:
                    depth = middle
                else:
                    beyond, still = middle, there
            depths.append((depth, having))
            having, depth = still, beyond
        if having:
            depths.append((end, having))
        return depths

    def _drop(self, cache: _Cache, held: dict[int, float], blocks: "Sequence[int]") -> None:
        masks, bit = self._masks, cache.bit
        for block in blocks:
            del held[block]
            mask = masks[block] ^ bit
            if not mask:
                del masks[block]
            elif mask.bit_count() == 1:
                masks[block] = self._bits[mask.bit_length() - 1]
            else:
                masks[block] = mask
        self._size -= len(blocks)

    def _empty(self, cache: _Cache) -> None:
        for held in (cache.believed, cache.known):
            self._drop(cache, held, list(held))

    def _make_room(self) -> None:
        """Drop what was used longest ago by anybody, what is believed before what is known."""
        goal = _goal(self._blocks_max, SHARED_SPARE)
        oldest = [
            (known, _first(held), cache.slot, cache, held)
            for cache in self._caches.values()
            for known, held in ((False, cache.believed), (True, cache.known))
            if held
        ]
        heapify(oldest)
        while self._size > goal:
            known, _, slot, cache, held = oldest[0]
            # All that goes before what the next one has.
            following = min([each[:2] for each in oldest[1:3]], default=(True, inf))
            last = following[1] if following[0] == known else inf
            self._drop(cache, held, list(islice(_until(held, last), self._size - goal)))
            if held:
                heapreplace(oldest, (known, _first(held), slot, cache, held))
            else:
                heappop(oldest)


def _slots_of(bits: int) -> Iterable[int]:
    """Return where the bits are that are set, from the lowest on."""
    if bits.bit_count() >= DENSE:
        return compress(count(), format(bits, "b").encode().translate(_BITS)[::-1])
    slots = []
    while bits:
        lowest = bits & -bits
        bits ^= lowest
        slots.append(lowest.bit_length() - 1)
    return slots


def _first(held: dict[int, float]) -> float:
    return next(iter(held.values()))


def _until(held: dict[int, float], last: float) -> Iterator[int]:
    """Yield what was last used until then."""
    for block, used in held.items():
        if used > last:
            return
        yield block


def _goal(room: int, spare: int) -> int:
    return room - room // spare
