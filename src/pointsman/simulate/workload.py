"""What comes to a fleet that is simulated: arrivals, in the order of their time.

A workload is gone through once. One whose clients wait for answers has `next_after`, too.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol, runtime_checkable

__all__ = ["Arrival", "ClosedLoop", "Listed", "Workload"]


class Arrival(NamedTuple):
    """A request that comes at `at` seconds, of which no more is known than the blocks and tokens of its prompt.

    `blocks` are hashes of its whole blocks, each covering all before it, too; both counts of tokens are at least 1.
    `session` is -1 for a request that nothing follows.
    """

    at: float
    blocks: tuple[int, ...]
    prompt_tokens: int
    output_tokens: int
    session: int = -1


class Workload(Protocol):
    """Arrivals in order of `at`; a block has `block_tokens`."""

    block_tokens: int

    def __iter__(self) -> Iterator[Arrival]:
        """Yield the arrivals that wait for nobody."""
        ...


@runtime_checkable
class ClosedLoop(Protocol):
    """A workload in which answers bring further requests."""

    def next_after(self, arrival: Arrival, now: float) -> Arrival | None:
        """Return what follows the answer to `arrival`, complete at `now`, if anything does; its `at` is not before."""
        ...


class Listed:
    """Arrivals that are known beforehand, in order of `at`.

    >>> [each.at for each in Listed([Arrival(0.5, (), 10, 1)])]
    [0.5]
    """

    def __init__(self, arrivals: Iterable[Arrival], block_tokens: int = 16) -> None:
        self._arrivals = arrivals
        self.block_tokens = block_tokens

    def __iter__(self) -> Iterator[Arrival]:
        return iter(self._arrivals)
