"""The prefix cache of an engine that has slots: each keeps the last prompt that was computed in it, and no other.

A prompt takes the idle slot that has most of its beginning, among equals the one longest unused, and what that one had
beyond it is gone. So what a running sequence has is nobody else's, and two prompts that share a beginning have it
twice. llama.cpp and our own engine do so.
"""

from pointsman.simulate.cache import BlockCache, Run, alike

__all__ = ["SlotCache"]


class SlotCache(BlockCache):
    """So many slots (at least 1), each with room of its own. `size` counts what is in use alone.

    >>> cache = SlotCache(2)
    >>> cache.unpin(cache.pin((1, 2)))
    >>> cache.depth((1, 2, 3)), cache.depth((1, 4))
    (2, 1)
    >>> first, second = cache.pin((1, 2, 3)), cache.pin((1, 4))
    >>> cache.pinned, cache.depth((1, 2, 3))
    (5, 0)
    """

    __slots__ = ()

    def __init__(self, slots: int) -> None:
        super().__init__()
        self._idle = dict.fromkeys([_slot(()) for _ in range(slots)])

    def depth(self, blocks: tuple[int, ...]) -> int:
        """Return how many of the leading blocks an idle slot has."""
        return max([_depth(slot, blocks) for slot in self._idle], default=0)

    def in_use(self, blocks: tuple[int, ...]) -> int:
        """Return 0: what is in use is shared with nobody."""
        return 0

    def pin(self, blocks: tuple[int, ...]) -> Run:
        """Take a slot for `blocks`, of which there must be one; return what to unpin."""
        # The oldest is first, and the first of the best is taken.
        slot = max(self._idle, key=lambda slot: _depth(slot, blocks))
        del self._idle[slot]
        self.size += len(blocks)
        self.pinned += len(blocks)
        return _slot(blocks)

    def unpin(self, run: Run | None) -> None:
        """Make a slot idle; it keeps its prompt until it is taken."""
        if run is not None:
            self._idle[run] = None
            self.size -= run.end
            self.pinned -= run.end

    def evict(self, count: int) -> None:
        """Do nothing: a slot has room for what is in it."""


def _slot(blocks: tuple[int, ...]) -> Run:
    return Run(blocks, 0, len(blocks), None)


def _depth(slot: Run, blocks: tuple[int, ...]) -> int:
    if not slot.end or not blocks or slot.blocks[0] != blocks[0]:
        return 0
    return alike(slot, blocks)
