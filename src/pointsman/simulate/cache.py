"""The KV cache of a modelled engine: which blocks it has, which of them are in use, and which go first.

A block that a sequence uses is pinned, by as many as use it. What nobody uses stays until its room is needed, and goes
in the order of its last use, of one prompt the end before the beginning, as in vLLM and SGLang. Since a block's hash
covers all before it, whoever uses a block uses those, too: no block is there without all before it, and a prompt's
cached beginning is found by bisection.

All blocks have the same size. What is no whole block (the end of a prompt, the tokens of an answer) belongs to one
sequence alone and is counted by whoever has the cache.
"""

from collections.abc import Sequence
from itertools import islice

__all__ = ["BlockCache"]


class BlockCache:
    """Blocks by their hash. A prompt has each of its blocks once.

    >>> cache = BlockCache()
    >>> cache.pin((1, 2), cache.depth((1, 2)))
    >>> cache.pin((1, 3), cache.depth((1, 3)))
    >>> cache.users, len(cache.idle)
    ({1: 2, 2: 1, 3: 1}, 0)
    >>> cache.unpin((1, 2))
    >>> cache.unpin((1, 3))
    >>> cache.evict(2)
    >>> cache.depth((1, 2)), cache.users
    (1, {1: 0})
    """

    __slots__ = ("idle", "users")

    def __init__(self) -> None:
        self.users: dict[int, int] = {}
        """How many use each block that is there. Nobody else may write it."""
        self.idle: dict[int, None] = {}
        """The blocks of them that nobody uses, in the order of their last use. Nobody else may write it."""

    def depth(self, blocks: Sequence[int]) -> int:
        """Return how many of the leading blocks are there."""
        users = self.users
        low, high = 0, len(blocks)
        while low < high:
            middle = (low + high) // 2
            if blocks[middle] in users:
                low = middle + 1
            else:
                high = middle
        return low

    def idle_among(self, blocks: Sequence[int]) -> int:
        """Return how many of some blocks are there and not in use: pinning them takes room from others."""
        idle = self.idle
        return sum([block in idle for block in blocks])

    def pin(self, blocks: Sequence[int], depth: int) -> None:
        """Use all of `blocks`, the first `depth` of which are there, and no others."""
        users, idle = self.users, self.idle
        for block in blocks[:depth]:
            count = users[block]
            if not count:
                del idle[block]
            users[block] = count + 1
        users.update(dict.fromkeys(blocks[depth:], 1))

    def unpin(self, blocks: Sequence[int]) -> None:
        """Use `blocks` no longer; they stay until there is need for room."""
        users, idle = self.users, self.idle
        for block in reversed(blocks):
            count = users[block] - 1
            users[block] = count
            if not count:
                idle[block] = None

    def evict(self, count: int) -> None:
        """Drop the `count` blocks that were used longest ago, or as many as are idle."""
        users, idle = self.users, self.idle
        for block in list(islice(idle, count)):
            del idle[block]
            del users[block]
