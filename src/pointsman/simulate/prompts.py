"""Prompts of which no more exists than which texts they are made of, and the blocks that come of it.

A prompt is a row of texts; a text is a number and a length in tokens. Two prompts share their leading blocks exactly as
far as they are made of the same texts, as with real ones: each block's hash covers all before it. Only whole blocks
have a hash, since engines cache no others.

The hash is that of SplitMix64 over the former hash and the piece, the same in every process.
"""

from typing import NamedTuple

__all__ = ["Prompt"]

_MASK = (1 << 64) - 1


class Prompt(NamedTuple):
    """The beginning of a prompt, `tokens` long, in blocks of `block_tokens`.

    >>> system = Prompt.empty(128).plus(1, 300)
    >>> one, other = system.plus(2, 100), system.plus(3, 100)
    >>> len(one.blocks), one.blocks[:2] == other.blocks[:2], one.blocks[2] == other.blocks[2]
    (3, True, False)
    """

    block_tokens: int
    tokens: int
    blocks: tuple[int, ...]
    before: int
    """The hash of all so far, those tokens included that make no whole block."""

    @classmethod
    def empty(cls, block_tokens: int) -> "Prompt":
        """Return a prompt without tokens; a block has `block_tokens`, at least 1."""
        return cls(block_tokens, 0, (), 0)

    def plus(self, text: int, tokens: int) -> "Prompt":
        """Return this prompt with the first `tokens` tokens of a text behind it."""
        size, total, blocks, before = self
        room = size - total % size
        made = []
        at = 0
        while tokens - at >= room:
            at += room
            before = _mixed(before, text, at)
            made.append(before)
            room = size
        if at < tokens:
            before = _mixed(before, text, tokens)
        return Prompt(size, total + tokens, (*blocks, *made), before)


def _mixed(before: int, text: int, end: int) -> int:
    # Where a piece begins follows from where the pieces before it ended, which `before` has.
    word = (before ^ (text * 0xD1342543DE82EF95) ^ (end << 40)) + 0x9E3779B97F4A7C15 & _MASK
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _MASK
    return word ^ word >> 31
