"""The rendered prompt in blocks of equal size, each known by a hash that covers all before it, too.

Engines keep the KV cache of a prompt in blocks, and two prompts share as many of them as they begin alike. A hash of 64
bits for each piece of the prompt, made of the piece and of the hash before, says so without the text: equal hashes at
one place mean that all up to there is equal, but for one in 2^64. Only whole blocks count, since engines cache no
others. The pieces are cut as bytes, maybe inside a character, and never decoded.

The hash is BLAKE2b, with the hash before as its salt. It is the same in every process and on every machine, so that
gateways which do not know of each other agree. It takes about 1.3 us per kilobyte.
"""

from collections.abc import Sequence
from hashlib import blake2b
from struct import Struct, pack

__all__ = ["BLOCKS_MAX", "TOKEN_BYTES", "block_hashes", "pack_tokens", "root_of", "tokens_in"]

BLOCKS_MAX = 2048
"""How many blocks of a prompt are hashed at most: a megabyte, or about 260,000 tokens, in blocks of 512 bytes."""

TOKEN_BYTES = 4
"""Bytes of text that are taken for a token. Token ids are rendered in as many bytes, so they are counted exactly."""


def block_hashes(
    prompt: bytes, size: int, limit: int = BLOCKS_MAX, parent: int | None = None
) -> tuple[int, ...]:
    """Return the hashes of the first `limit` blocks of `size` bytes (1 or more); what is left over has none.

    `parent` is the hash of the block before, of what goes on, or the root of a prompt that has one; None for none.

    >>> one, other = block_hashes(b"once upon a time", 8), block_hashes(b"once upon a mat", 7)
    >>> len(one), len(other), one[0] == block_hashes(b"once upo", 8)[0]
    (2, 2, True)
    >>> block_hashes(b"n a time", 8, parent=one[0]) == one[1:]
    True
    """
    count = min(len(prompt) // size, limit)
    before = b"" if parent is None else parent.to_bytes(8, "big")
    digests = []
    for at in range(0, count * size, size):
        before = blake2b(prompt[at : at + size], digest_size=8, salt=before).digest()
        digests.append(before)
    return Struct(f">{count}Q").unpack(b"".join(digests))


def root_of(adapter: str) -> int | None:
    """Return what the chain of a prompt for an adapter begins with, None for "": other weights make another cache.

    >>> root_of(""), root_of("sql") == root_of("sql"), root_of("sql") == root_of("chat")
    (None, True, False)
    """
    if not adapter:
        return None
    digest = blake2b(adapter.encode("utf-8", "surrogatepass"), digest_size=8, person=b"adapter")
    return int.from_bytes(digest.digest(), "big")


def pack_tokens(ids: Sequence[int]) -> bytes:
    """Render token ids, 4 bytes each. Raises `struct.error` for what is no integer of 0 to 2^32 - 1.

    >>> pack_tokens([1, 258]).hex()
    '0100000002010000'
    """
    return pack(f"<{len(ids)}I", *ids)


def tokens_in(size: int) -> int:
    """Return how many tokens are in `size` bytes of a rendered prompt, rounded up: an estimate, unless it is of ids.

    >>> tokens_in(512), tokens_in(1), tokens_in(0)
    (128, 1, 0)
    """
    return -(-size // TOKEN_BYTES)
