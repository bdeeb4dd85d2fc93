"""What a KV block is, and the name it can be found by: a hash of its tokens and of all tokens before it.

A hash promises more than equal tokens. Whoever has a block of that hash may use it in place of one that is sent, so its
bits must be equal too, and the bits of a KV cache depend on the shape of the batch that computed them. Blocks whose
shape is not certain are therefore nameless: their hash is 0.
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple

from pointsman.domain.ring import fnv1a64

__all__ = ["BLOCK_TOKENS", "Block", "Shape", "block_hash", "blocks_of", "hashes_of"]

BLOCK_TOKENS = 16
"""Tokens of one KV block. Source: contract, section 5.3."""


class Shape(NamedTuple):
    """The dimensions of a block: those of the model's KV cache, and how many tokens a block has."""

    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int = BLOCK_TOKENS

    @property
    def payload_bytes(self) -> int:
        """The size of one payload: f16, [layers][K, V][kv_heads][block_tokens][head_dim]."""
        return self.layers * 2 * self.kv_heads * self.block_tokens * self.head_dim * 2


class Block(NamedTuple):
    """A block and its name. `hash` 0: nameless; `n_tokens`: 1 to a whole block, the payload is zero behind them."""

    hash: int
    n_tokens: int
    payload: bytes


def block_hash(parent: int, tokens: Sequence[int]) -> int:
    """Return the hash of a full block with `tokens` after the block of hash `parent` (0: it is the first). Never 0.

    >>> hex(block_hash(0, [1, 2]))
    '0xa91ab0c1027b9366'
    """
    return fnv1a64(struct.pack(f"<Q{len(tokens)}I", parent, *tokens)) or 1


def blocks_of(n_tokens: int) -> int:
    """Return how many blocks `n_tokens` need, the partial one at the end included.

    >>> [blocks_of(n) for n in (0, 16, 17)]
    [0, 1, 2]
    """
    return -(-n_tokens // BLOCK_TOKENS)


def hashes_of(tokens: Sequence[int], *, whole_chunks: int) -> list[int]:
    """Return the hash of each block of a prompt, the partial one at the end included; 0: it must not have a name.

    A prompt is computed in chunks of `whole_chunks` tokens, its last token alone. Whole chunks were computed in one
    shape wherever that was; the shorter rest was not.

    >>> [bool(value) for value in hashes_of(range(65), whole_chunks=32)]
    [True, True, True, True, False]
    >>> [bool(value) for value in hashes_of(range(64), whole_chunks=32)]
    [True, True, False, False]
    """
    chunked = max(len(tokens) - 1, 0)
    named = (chunked - chunked % whole_chunks) // BLOCK_TOKENS
    hashes = [0] * blocks_of(len(tokens))
    parent = 0
    for i in range(named):
        parent = block_hash(parent, tokens[i * BLOCK_TOKENS : (i + 1) * BLOCK_TOKENS])
        hashes[i] = parent
    return hashes
