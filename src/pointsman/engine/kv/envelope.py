"""The envelope that KV blocks travel in: a header, a record for each block, and a checksum. Little-endian.

Offsets and fields: contract, section 5.3. Version 1 with f16 is written and read; version 2, e4m3, is refused by name.
"""

import struct
from collections.abc import Sequence

import google_crc32c

from pointsman.engine.kv.blocks import Block, Shape

__all__ = ["Corrupt", "UnknownVersion", "crc32c", "decode", "encode"]

_HEADER = struct.Struct("<4sHH5I")
"""Magic, version, dtype, n_blocks, block_tokens, layers, kv_heads, head_dim."""
_RECORD = struct.Struct("<QI")
"""Hash and n_tokens, before the payload."""
_CRC = struct.Struct("<I")

_MAGIC = b"TLKV"
_V1_F16 = (1, 1)


class Corrupt(ValueError):
    """Not what was sent, or not a block of this model: DATA_LOSS on the wire."""


class UnknownVersion(ValueError):
    """An envelope that is sound, of a version or dtype that is not read here: FAILED_PRECONDITION on the wire."""


def crc32c(data: bytes) -> int:
    """Return the CRC-32C (Castagnoli) of `data`.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    value: int = google_crc32c.value(data)
    return value


def encode(blocks: Sequence[Block], shape: Shape) -> bytes:
    """Return the envelope of `blocks`, all of `shape`.

    Raises:
        ValueError: a payload has another size, or n_tokens is not of a block.
    """
    parts = [
        _HEADER.pack(_MAGIC, *_V1_F16, len(blocks), shape.block_tokens, *shape[:3]),
    ]
    for block in blocks:
        if len(block.payload) != shape.payload_bytes:
            raise ValueError(
                f"a payload of {len(block.payload)} bytes where {shape.payload_bytes} belong"
            )
        if wrong := _wrong_count(block.hash, block.n_tokens, shape):
            raise ValueError(wrong)
        parts += _RECORD.pack(block.hash, block.n_tokens), block.payload
    data = b"".join(parts)
    return data + _CRC.pack(crc32c(data))


def decode(data: bytes, shape: Shape) -> list[Block]:
    """Return the blocks of an envelope.

    Raises:
        Corrupt: too short or too long, another magic or checksum, or blocks of another shape.
        UnknownVersion: another version or dtype.
    """
    if len(data) < _HEADER.size + _CRC.size:
        raise Corrupt(f"{len(data)} bytes are no envelope")
    magic, version, dtype, count, tokens, *dimensions = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise Corrupt("the envelope has another magic")
    body = data[: -_CRC.size]
    if _CRC.unpack_from(data, len(body)) != (crc32c(body),):
        raise Corrupt("the checksum of the envelope is wrong")
    if (version, dtype) != _V1_F16:
        raise UnknownVersion(f"envelopes of version {version}, dtype {dtype} are not read")
    if (*dimensions, tokens) != shape:
        raise Corrupt(f"blocks of shape {(*dimensions, tokens)}, those here have {tuple(shape)}")
    record = _RECORD.size + shape.payload_bytes
    if len(body) != _HEADER.size + count * record:
        raise Corrupt(f"{count} blocks do not take {len(data)} bytes")
    blocks = []
    for at in range(_HEADER.size, len(body), record):
        value, n_tokens = _RECORD.unpack_from(body, at)
        if wrong := _wrong_count(value, n_tokens, shape):
            raise Corrupt(wrong)
        blocks.append(Block(value, n_tokens, body[at + _RECORD.size : at + record]))
    return blocks


def _wrong_count(value: int, n_tokens: int, shape: Shape) -> str:
    """What is wrong with the number of tokens of a block of hash `value`; empty: nothing."""
    if not 1 <= n_tokens <= shape.block_tokens:
        return f"a block of {n_tokens} tokens, where 1 to {shape.block_tokens} fit"
    if value and n_tokens != shape.block_tokens:
        return f"a block of {n_tokens} tokens with a hash: only full ones have one"
    return ""
