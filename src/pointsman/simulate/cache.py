"""The KV cache of a modelled engine: which blocks it has, which of them are in use, and which go first.

A block that a sequence uses is pinned, by as many as use it. What nobody uses stays until its room is needed, and goes
in the order of its last use, of one prompt the end before the beginning, as in vLLM and SGLang.

Blocks that are used together are kept together, as a run: a piece of a prompt that follows on another run, or begins a
prompt (a radix tree). A run is split where a prompt leaves it. So a prompt costs as many steps as there are runs in it,
which are few, and not one for each block. A block's hash covers all before it, so it always stands in the same place of
a prompt; and whoever uses a block uses those before it, so that no run goes before those that follow on it.

All blocks have the same size. What is no whole block (the end of a prompt, the tokens of an answer) belongs to one
sequence alone and is counted by whoever has the cache.
"""

__all__ = ["BlockCache", "Run", "alike"]


class Run:
    """The blocks `start` to `end` of a prompt, behind those of `parent`; `users` is how many use them."""

    __slots__ = ("blocks", "end", "parent", "start", "users")

    def __init__(self, blocks: tuple[int, ...], start: int, end: int, parent: "Run | None") -> None:
        self.blocks = blocks
        self.start = start
        self.end = end
        self.parent = parent
        self.users = 1


class BlockCache:
    """Blocks by their hash: `size` of them are there, `pinned` of these in use. Nobody else may write these.

    >>> cache = BlockCache()
    >>> one, other = cache.pin((1, 2)), cache.pin((1, 3))
    >>> cache.size, cache.pinned
    (3, 3)
    >>> cache.unpin(one)
    >>> cache.unpin(other)
    >>> cache.evict(2)
    >>> cache.depth((1, 2)), cache.size, cache.pinned
    (1, 1, 0)
    """

    __slots__ = ("_idle", "_runs", "pinned", "size")

    def __init__(self) -> None:
        self.size = 0
        self.pinned = 0
        self._runs: dict[int, Run] = {}
        # The keys alone matter, in the order of their last use.
        self._idle: dict[Run, None] = {}

    def depth(self, blocks: tuple[int, ...]) -> int:
        """Return how many of the leading blocks are there."""
        runs = self._runs
        at, size = 0, len(blocks)
        while at < size:
            run = runs.get(blocks[at])
            if run is None:
                break
            at = alike(run, blocks)
            if at < run.end:
                break
        return at

    def in_use(self, blocks: tuple[int, ...]) -> int:
        """Return how many of the leading blocks are in use: pinning those takes no room."""
        at, size = 0, len(blocks)
        while at < size:
            run = self._runs.get(blocks[at])
            if run is None or not run.users:
                break
            at = alike(run, blocks)
            if at < run.end:
                break
        return at

    def pin(self, blocks: tuple[int, ...]) -> Run | None:
        """Use all of `blocks`, which are there afterwards. Return what to unpin; None for no blocks."""
        runs = self._runs
        at, size = 0, len(blocks)
        last: Run | None = None
        while at < size:
            run = runs.get(blocks[at])
            if run is None:
                runs[blocks[at]] = run = Run(blocks, at, size, last)
                self.size += size - at
                self.pinned += size - at
                return run
            end = alike(run, blocks)
            if end < run.end:
                run = self._split(run, end)
            if not run.users:
                self._idle.pop(run, None)
                self.pinned += end - at
            run.users += 1
            last = run
            at = end
        return last

    def unpin(self, run: Run | None) -> None:
        """Use what `pin` answered with no longer; it stays until there is need for room."""
        while run is not None:
            run.users -= 1
            if not run.users:
                self._idle[run] = None
                self.pinned -= run.end - run.start
            run = run.parent

    def evict(self, count: int) -> None:
        """Drop the `count` blocks that were used longest ago, or as many as nobody uses."""
        idle = self._idle
        while count > 0 and idle:
            run = next(iter(idle))
            going = min(run.end - run.start, count)
            if going == run.end - run.start:
                del idle[run]
                del self._runs[run.blocks[run.start]]
            run.end -= going
            self.size -= going
            count -= going

    def _split(self, run: Run, at: int) -> Run:
        """Return the beginning of a run as one of its own; who uses the end of it uses both."""
        # The end keeps the object, so it keeps its place among the idle, and in the hands of those who use it.
        upper = Run(run.blocks, run.start, at, run.parent)
        upper.users = run.users
        self._runs[run.blocks[run.start]] = upper
        self._runs[run.blocks[at]] = run
        run.start = at
        run.parent = upper
        return upper


def alike(run: Run, blocks: tuple[int, ...]) -> int:
    """Return up to where a prompt is that of a run, with whose first block it has come so far."""
    others = run.blocks
    low, high = run.start + 1, min(run.end, len(blocks))
    if others[high - 1] == blocks[high - 1]:
        return high
    while low < high:
        middle = (low + high) // 2
        if others[middle] == blocks[middle]:
            low = middle + 1
        else:
            high = middle
    return low
