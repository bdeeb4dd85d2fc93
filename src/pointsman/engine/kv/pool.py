"""Where a decode worker keeps the KV blocks that were pushed to it, until the request they belong to resumes.

A handle is what a push leaves behind: the blocks of one prompt, for one claim. A push that is not committed leaves
nothing, whatever it had added. Full blocks with a hash outlive their handles as a cache, least recently used first out,
so that a prompt with a known beginning need not be sent whole.

A Release is meant to be the last word on a handle, but it can overtake the push of it, which comes from another worker.
So it is remembered for as long as a handle would be kept, and such a push is refused.

Sizes are in blocks: a pool knows nothing of what is in them.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import NamedTuple, Self

from pointsman.engine.kv.blocks import Block

__all__ = ["BlockGone", "HandleReleased", "Held", "Pool", "PoolFull", "Push"]


class PoolFull(Exception):
    """Every block is referenced by a handle or by a push."""


class BlockGone(Exception):
    """No block of that hash is here (any more); the whole prompt must be sent."""


class HandleReleased(Exception):
    """The handle was released before its push was over."""


class Held(NamedTuple):
    """What a handle held, block by block; a `hashes` entry is 0 for a block without one."""

    n_tokens: int
    hashes: tuple[int, ...]
    payloads: tuple[bytes, ...]


class _Kept:
    """A block in the pool; `users`: how many handles and pushes reference it."""

    __slots__ = ("block", "users")

    def __init__(self, block: Block) -> None:
        self.block = block
        self.users = 0


class _Handle(NamedTuple):
    blocks: list[_Kept]
    until: float


class Pool:
    """At most `capacity_blocks` KV blocks, for any number of threads.

    `now` is a clock in seconds. A handle that nobody claims is freed after `hold_s` seconds, by the next call of any
    method. Capacity counts every block once, however many handles share it.

    >>> pool = Pool(2, now=lambda: 0.0)
    >>> with pool.begin("h") as push:
    ...     push.add(Block(0, 3, b"abc"))
    ...     push.commit()
    >>> pool.claim("h")
    Held(n_tokens=3, hashes=(0,), payloads=(b'abc',))
    >>> pool.claim("h") is None
    True
    """

    def __init__(
        self, capacity_blocks: int, *, now: Callable[[], float], hold_s: float = 120.0
    ) -> None:
        self.capacity_blocks = capacity_blocks
        self.hold_s = hold_s
        self._now = now
        self._lock = threading.RLock()
        self._named: dict[int, _Kept] = {}
        # In the order of their end, as both are kept equally long.
        self._handles: dict[str, _Handle] = {}
        self._released: dict[str, float] = {}
        # Of `_named`, what nobody references, least recently used first.
        self._idle: dict[int, _Kept] = {}
        self._held = 0

    @property
    def held_blocks(self) -> int:
        """Blocks that handles and unfinished pushes reference: what is not free."""
        with self._lock:
            self.expire()
            return self._held

    @property
    def cached_blocks(self) -> int:
        """Blocks that nobody references, kept for pushes to come."""
        with self._lock:
            return len(self._idle)

    @property
    def handles(self) -> frozenset[str]:
        """The handles that can be claimed."""
        with self._lock:
            self.expire()
            return frozenset(self._handles)

    def begin(self, handle_id: str) -> "Push":
        """Begin a push; leaving its `with` block without a commit gives back all that it took.

        Raises:
            HandleReleased: the handle was released already.
        """
        push = Push(self, handle_id)
        with self._lock:
            self._refuse_released(handle_id)
        return push

    def has(self, hashes: Sequence[int]) -> list[bool]:
        """Tell which blocks are here now. Takes no reference: each may be gone a moment later."""
        with self._lock:
            return [value in self._named for value in hashes]

    def claim(self, handle_id: str) -> Held | None:
        """Take what a handle holds and forget the handle; None: unknown."""
        with self._lock:
            self.expire()
            handle = self._handles.pop(handle_id, None)
            if handle is None:
                return None
            blocks = [kept.block for kept in handle.blocks]
            self._free(handle.blocks)
        return Held(
            sum(block.n_tokens for block in blocks),
            tuple(block.hash for block in blocks),
            tuple(block.payload for block in blocks),
        )

    def release(self, handle_id: str) -> bool:
        """Free a handle; True if there was one. For `hold_s` seconds from now no push of it can begin or end."""
        with self._lock:
            self.expire()
            self._released.pop(handle_id, None)
            self._released[handle_id] = self._now() + self.hold_s
            handle = self._handles.pop(handle_id, None)
            self._free(handle.blocks if handle else [])
        return handle is not None

    def expire(self) -> int:
        """Free the handles that were not claimed in time; returns how many."""
        with self._lock:
            now = self._now()
            late = list(takewhile(lambda name: self._handles[name].until <= now, self._handles))
            for name in late:
                self._free(self._handles.pop(name).blocks)
            for name in list(takewhile(lambda name: self._released[name] <= now, self._released)):
                del self._released[name]
        return len(late)

    # What follows is for `Push`, and for callers that hold the lock.

    def _refuse_released(self, handle_id: str) -> None:
        self.expire()
        if handle_id in self._released:
            raise HandleReleased(f"the handle {handle_id!r} was released")

    def _add(self, block: Block) -> _Kept:
        if kept := self._named.get(block.hash):
            return self._reference(kept)
        if self._held >= self.capacity_blocks:
            raise PoolFull(f"all {self.capacity_blocks} blocks are in use")
        if self._held + len(self._idle) >= self.capacity_blocks:
            oldest = next(iter(self._idle))
            del self._idle[oldest], self._named[oldest]
        return self._reference(_Kept(block))

    def _reference(self, kept: _Kept) -> _Kept:
        if not kept.users:
            self._held += 1
            self._idle.pop(kept.block.hash, None)
        kept.users += 1
        return kept

    def _free(self, blocks: Sequence[_Kept]) -> None:
        # The last ones first: a block is of use only while those before it are here.
        for kept in reversed(blocks):
            kept.users -= 1
            if not kept.users:
                self._held -= 1
                if self._named.get(kept.block.hash) is kept:
                    self._idle[kept.block.hash] = kept

    def _name(self, kept: _Kept) -> _Kept:
        """Let others find the block; the one to use in its place if there is one of that name already."""
        if not kept.block.hash:
            return kept
        found = self._named.setdefault(kept.block.hash, kept)
        if found is not kept:
            self._reference(found)
            self._free([kept])
        return found

    def _commit(self, handle_id: str, blocks: Sequence[_Kept]) -> None:
        self._refuse_released(handle_id)
        named = [self._name(kept) for kept in blocks]
        if replaced := self._handles.pop(handle_id, None):
            self._free(replaced.blocks)
        self._handles[handle_id] = _Handle(named, self._now() + self.hold_s)


class Push:
    """The blocks of one handle on their way into a pool, in order. See `Pool.begin`."""

    def __init__(self, pool: Pool, handle_id: str) -> None:
        self._pool = pool
        self._handle_id = handle_id
        self._blocks: list[_Kept] = []
        self._over = False

    def add(self, block: Block) -> None:
        """Take the next block; others can find it by its hash once the push is committed.

        Raises:
            PoolFull: there is no room, nor a block that nobody references.
            HandleReleased: the handle was released in the meantime.
        """
        with self._going_on():
            self._blocks.append(self._pool._add(block))

    def reuse(self, value: int) -> None:
        """Take the block of hash `value`, which is here, as the next one.

        Raises:
            BlockGone: it is not here.
            HandleReleased: the handle was released in the meantime.
        """
        with self._going_on():
            kept = self._pool._named.get(value)
            if kept is None:
                raise BlockGone(f"no block has the hash {value:#018x}")
            self._blocks.append(self._pool._reference(kept))

    def commit(self) -> None:
        """Make the handle claimable; one of the same id is replaced, and its blocks freed.

        Raises:
            HandleReleased: the handle was released in the meantime.
        """
        with self._going_on():
            self._pool._commit(self._handle_id, self._blocks)
            self._over = True

    def abort(self) -> None:
        """Give back all that was taken, unless the push is over already."""
        with self._pool._lock:
            if not self._over:
                self._over = True
                self._pool._free(self._blocks)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.abort()

    @contextmanager
    def _going_on(self) -> Iterator[None]:
        with self._pool._lock:
            if self._over:
                raise RuntimeError("the push is over")
            self._pool._refuse_released(self._handle_id)
            yield
