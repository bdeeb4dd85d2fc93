"""What a fleet is asked: arrivals in the order of time."""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

__all__ = ["Arrival", "Workload"]


class Arrival(NamedTuple):
    """One request: when it comes (seconds from the beginning), and what it takes.

    `blocks` are the ids of the prompt's blocks of `block_tokens` tokens, the last one maybe not full; two prompts that
    begin with equal ids begin with equal text, so an id stands for all the text up to its end. `output_tokens` is at
    least 1.
    """

    at: float
    blocks: tuple[int, ...]
    prompt_tokens: int
    output_tokens: int
    block_tokens: int = 512


class Workload(Protocol):
    """Requests that come whatever becomes of those before them. Each iteration begins anew."""

    def __iter__(self) -> Iterator[Arrival]:
        """Yield arrivals in the order of time."""
        ...
