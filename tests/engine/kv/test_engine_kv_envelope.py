"""Envelopes: the contract's worked examples byte for byte, and every way for one to be broken."""

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pointsman.engine.kv.blocks import Block, Shape
from pointsman.engine.kv.envelope import Corrupt, UnknownVersion, crc32c, decode, encode

SHAPE = Shape(1, 1, 2, block_tokens=2)

FULL = Block(0xA91AB0C1027B9366, 2, struct.pack("<8e", 1, 2, 3, 4, 0.5, -1, 0, 0.25))
FULL_BYTES = bytes.fromhex(
    "54 4c 4b 56 01 00 01 00 01 00 00 00 02 00 00 00 01 00 00 00 01 00 00 00 02 00 00 00 66 93 7b 02 c1 b0 1a a9 "
    "02 00 00 00 00 3c 00 40 00 42 00 44 00 38 00 bc 00 00 00 34 1c 54 0b 4f"
)
TAIL = Block(0, 1, struct.pack("<8e", 1, 1, 0, 0, 2, 2, 0, 0))
TAIL_BYTES = bytes.fromhex(
    "54 4c 4b 56 01 00 01 00 01 00 00 00 02 00 00 00 01 00 00 00 01 00 00 00 02 00 00 00 00 00 00 00 00 00 00 00 "
    "01 00 00 00 00 3c 00 3c 00 00 00 00 00 40 00 40 00 00 00 00 dd 3b f1 03"
)


def sealed(body: bytes) -> bytes:
    return body + struct.pack("<I", crc32c(body))


def changed(at: int, field: bytes, envelope: bytes = FULL_BYTES) -> bytes:
    """An envelope with a field replaced, and a checksum that is right again."""
    return sealed(envelope[:at] + field + envelope[at + len(field) : -4])


@pytest.mark.parametrize(
    ("block", "envelope"), [(FULL, FULL_BYTES), (TAIL, TAIL_BYTES)], ids=["full", "tail"]
)
def test_an_envelope_is_the_bytes_of_the_contract(block: Block, envelope: bytes) -> None:
    assert encode([block], SHAPE) == envelope
    assert decode(envelope, SHAPE) == [block]


def test_the_checksum_is_crc_32c() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(b"") == 0


@settings(deadline=None)
@given(
    st.builds(Shape, st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(1, 4)),
    st.data(),
)
def test_what_is_encoded_is_decoded(shape: Shape, data: st.DataObject) -> None:
    def a_block() -> st.SearchStrategy[Block]:
        payload = st.binary(min_size=shape.payload_bytes, max_size=shape.payload_bytes)
        return st.one_of(
            st.builds(Block, st.integers(0, 2**64 - 1), st.just(shape.block_tokens), payload),
            st.builds(Block, st.just(0), st.integers(1, shape.block_tokens), payload),
        )

    blocks = data.draw(st.lists(a_block(), max_size=3))
    assert decode(encode(blocks, shape), shape) == blocks


@settings(deadline=None)
@given(st.integers(0, len(FULL_BYTES) * 8 - 1))
def test_no_flipped_bit_goes_unseen(bit: int) -> None:
    broken = bytearray(FULL_BYTES)
    broken[bit // 8] ^= 1 << bit % 8
    with pytest.raises(Corrupt):
        decode(bytes(broken), SHAPE)


@pytest.mark.parametrize("length", range(len(FULL_BYTES)))
def test_a_part_of_an_envelope_is_refused(length: int) -> None:
    with pytest.raises(Corrupt):
        decode(FULL_BYTES[:length], SHAPE)


@pytest.mark.parametrize(
    ("envelope", "why"),
    [
        (changed(0, b"TLKW"), "magic"),
        (changed(8, struct.pack("<I", 2)), "2 blocks do not take"),
        (changed(8, struct.pack("<I", 2**32 - 1)), "blocks do not take"),
        (changed(12, struct.pack("<I", 4)), "shape"),
        (changed(16, struct.pack("<I", 2)), "shape"),
        (changed(20, struct.pack("<I", 3)), "shape"),
        (changed(24, struct.pack("<I", 1)), "shape"),
        (changed(36, struct.pack("<I", 0)), "0 tokens"),
        (changed(36, struct.pack("<I", 3)), "3 tokens"),
        (changed(36, struct.pack("<I", 1)), "only full ones"),
        (sealed(FULL_BYTES[:-4] + b"\0"), "1 blocks do not take"),
    ],
)
def test_a_sound_checksum_does_not_excuse_a_wrong_envelope(envelope: bytes, why: str) -> None:
    with pytest.raises(Corrupt, match=why):
        decode(envelope, SHAPE)


@pytest.mark.parametrize(("version", "dtype"), [(2, 3), (2, 1), (1, 3), (0, 1), (1, 0)])
def test_another_version_or_dtype_is_refused_by_name(version: int, dtype: int) -> None:
    with pytest.raises(UnknownVersion, match=f"version {version}, dtype {dtype}"):
        decode(changed(4, struct.pack("<HH", version, dtype)), SHAPE)


def test_a_broken_envelope_of_another_version_is_broken_first_of_all() -> None:
    with pytest.raises(Corrupt):
        decode(FULL_BYTES[:4] + b"\2" + FULL_BYTES[5:], SHAPE)


@pytest.mark.parametrize(
    "block",
    [
        FULL._replace(payload=FULL.payload[:-1]),
        FULL._replace(n_tokens=1),
        TAIL._replace(n_tokens=0),
        TAIL._replace(n_tokens=3),
    ],
)
def test_what_no_reader_would_take_is_not_written(block: Block) -> None:
    with pytest.raises(ValueError, match=r"block|payload"):
        encode([block], SHAPE)
