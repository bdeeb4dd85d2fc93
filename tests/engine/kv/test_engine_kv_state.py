"""KV states in blocks and back: every number in its place, and no layout but the known one."""

import struct
from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pointsman.engine.kv.blocks import Shape, blocks_of
from pointsman.engine.kv.state import Layout, UnknownLayout, learn_layout
from pointsman.engine.llama import Row

SHAPE = Shape(layers=2, kv_heads=3, head_dim=4)


def exported(
    n_tokens: int, *, sequence: int = 0, streams: int = 2, shape: Shape = SHAPE, at: int = 0
) -> bytes:
    """A state as llama.cpp writes it: each number tells layer, K or V, token, head and dimension."""
    layers, heads, dim = shape[:3]
    parts = [struct.pack("<3I", 0xAF143CD8, sequence, streams)]
    for stream in range(streams):
        if stream != sequence:
            parts.append(struct.pack("<I", 0))
            continue
        parts.append(struct.pack("<I", n_tokens))
        parts += [struct.pack("<iIi", at + i, 1, sequence) for i in range(n_tokens)]
        parts.append(struct.pack("<4I", 1, layers, 0, 0))
        for layer in range(layers):
            parts.append(struct.pack("<iQ", 1, heads * dim * 2))
            for token in range(n_tokens):
                for head in range(heads):
                    parts += [number(layer, 0, token, head, d) for d in range(dim)]
        for layer in range(layers):
            parts.append(struct.pack("<iII", 1, 2, heads * dim))
            for head in range(heads):
                for d in range(dim):
                    parts += [number(layer, 1, token, head, d) for token in range(n_tokens)]
    return b"".join(parts)


def number(layer: int, kind: int, token: int, head: int, d: int) -> bytes:
    return struct.pack("<H", ((((layer * 2 + kind) * 64 + token) * 4 + head) * 8) + d + 1)


def payload(block: int, n_tokens: int) -> bytes:
    """A block as the contract has it: [layer][K, V][head][token][dim], zero behind the last token."""
    return b"".join(
        number(layer, kind, token, head, d) if token < n_tokens else b"\0\0"
        for layer in range(SHAPE.layers)
        for kind in range(2)
        for head in range(SHAPE.kv_heads)
        for token in range(16 * block, 16 * block + 16)
        for d in range(SHAPE.head_dim)
    )


def changed(state: bytes, at: int, field: bytes) -> bytes:
    return state[:at] + field + state[at + len(field) :]


@pytest.mark.parametrize("n_tokens", [1, 2, 15, 16, 17, 32, 33, 50])
def test_every_number_goes_to_its_place_and_back(n_tokens: int) -> None:
    layout = Layout(SHAPE, 2)
    state = exported(n_tokens)
    payloads = layout.split(state, n_tokens)
    assert payloads == [payload(i, n_tokens) for i in range(blocks_of(n_tokens))]
    assert layout.join(payloads, n_tokens) == state


@settings(deadline=None)
@given(
    st.builds(Shape, st.integers(1, 3), st.integers(1, 4), st.integers(1, 5), st.just(16)),
    st.integers(1, 40),
    st.integers(1, 4),
    st.integers(0, 2**32).map(Random),
)
def test_a_state_survives_in_any_shape(
    shape: Shape, n_tokens: int, streams: int, random: Random
) -> None:
    layout = Layout(shape, streams)
    payloads = []
    for start in range(0, n_tokens, 16):
        block = np.frombuffer(random.randbytes(shape.payload_bytes), "<u2").copy()
        block = block.reshape(shape.layers, 2, shape.kv_heads, 16, shape.head_dim)
        block[..., n_tokens - start :, :] = 0
        payloads.append(block.tobytes())
    state = layout.join(payloads, n_tokens)
    assert layout.split(state, n_tokens) == payloads
    assert Layout.read(state, kv_heads=shape.kv_heads) == layout


@pytest.mark.parametrize("sequence", range(3))
def test_blocks_do_not_tell_which_sequence_they_come_from(sequence: int) -> None:
    here, there = Layout(SHAPE, 3), Layout(SHAPE, 1)
    payloads = here.split(exported(20, sequence=sequence, streams=3), 20)
    assert there.join(payloads, 20) == exported(20, streams=1)


@pytest.mark.parametrize("sequence", range(3))
def test_the_layout_is_read_off_a_state(sequence: int) -> None:
    state = exported(3, sequence=sequence, streams=3)
    assert Layout.read(state, kv_heads=3) == Layout(SHAPE, 3)


STATE = exported(3, sequence=1, streams=3)
# Where the fields of STATE are: the start, an empty stream, the count, three cells, the cache, the layers.
COUNT, CELLS = 16, 20
CACHE = CELLS + 3 * 12
KEYS = CACHE + 16
VALUES = KEYS + 2 * (12 + 3 * 24)


@pytest.mark.parametrize(
    "broken",
    [
        b"",
        STATE[:11],
        STATE[:-1],
        STATE + b"\0",
        exported(3, streams=2),
        exported(3, streams=3, at=1),
        exported(4, sequence=1, streams=3),
        changed(STATE, 0, b"\0"),  # another magic
        changed(STATE, 4, b"\2"),  # of a sequence whose stream is empty
        changed(STATE, 4, b"\xff\xff\xff\xff"),
        changed(STATE, 8, b"\4"),
        changed(STATE, COUNT, b"\2"),
        changed(STATE, CELLS, b"\1"),  # two tokens at one position
        changed(STATE, CELLS + 4, b"\2"),  # a cell that two sequences share
        changed(STATE, CELLS + 8, b"\0"),
        changed(STATE, CACHE, b"\0"),  # V is not transposed
        changed(STATE, CACHE + 4, b"\3"),
        changed(STATE, CACHE + 8, b"\1"),
        changed(STATE, CACHE + 12, b"\1"),
        changed(STATE, KEYS, b"\0"),  # f32
        changed(STATE, KEYS + 4, b"\x30"),
        changed(STATE, KEYS + 12 + 3 * 24, b"\0"),  # the second layer's
        changed(STATE, VALUES, b"\0"),
        changed(STATE, VALUES + 4, b"\4"),
        changed(STATE, VALUES + 8, b"\6"),
        changed(STATE, len(STATE) - 4, b"\1"),  # something in the last stream
    ],
)
def test_a_state_of_another_layout_is_refused(broken: bytes) -> None:
    with pytest.raises(UnknownLayout):
        Layout(SHAPE, 3).split(broken, 3)


@pytest.mark.parametrize("broken", [STATE[:8], STATE[:CACHE], STATE[: KEYS + 4], STATE[:-1]])
def test_nothing_is_learned_of_a_part_of_a_state(broken: bytes) -> None:
    with pytest.raises(UnknownLayout):
        Layout.read(broken, kv_heads=3)


@pytest.mark.parametrize(
    ("state", "kv_heads"),
    [
        (STATE, 5),
        (changed(STATE, KEYS + 4, struct.pack("<Q", 0)), 3),
        (changed(STATE, CACHE + 4, struct.pack("<I", 0)), 3),
        (exported(0, streams=1), 3),
    ],
)
def test_nothing_is_learned_of_a_state_that_does_not_fit_the_model(
    state: bytes, kv_heads: int
) -> None:
    with pytest.raises(UnknownLayout):
        Layout.read(state, kv_heads=kv_heads)


@pytest.mark.parametrize("n_tokens", [0, -1, 15, 33, 64])
def test_blocks_that_are_not_those_of_so_many_tokens_are_not_joined(n_tokens: int) -> None:
    layout = Layout(SHAPE, 2)
    with pytest.raises(ValueError, match="2 blocks"):
        layout.join(layout.split(exported(20), 20), n_tokens)


def test_blocks_of_another_model_are_not_joined() -> None:
    layout = Layout(SHAPE, 2)
    payloads = layout.split(exported(20), 20)
    with pytest.raises(ValueError, match="bytes"):
        layout.join([payloads[0], payloads[1][:-2]], 20)


class Exports:
    """A context that exports a known state, and tells what was done to it."""

    def __init__(self, state: bytes) -> None:
        self.state = state
        self.cells = 0

    def decode(self, rows: Sequence[Row]) -> None:
        assert [(row.sequence, row.position) for row in rows] == [(0, 0)]
        self.cells = 1

    def export(self, sequence: int) -> bytes:
        assert (sequence, self.cells) == (0, 1)
        return self.state

    def forget(self, sequence: int, start: int = 0) -> None:
        assert (sequence, start) == (0, 0)
        self.cells = 0


def test_a_context_is_as_empty_as_before_when_its_layout_is_known() -> None:
    context = Exports(exported(1))
    assert learn_layout(context, kv_heads=3) == Layout(SHAPE, 2)
    assert context.cells == 0


def test_a_context_is_as_empty_as_before_when_its_layout_is_refused() -> None:
    context = Exports(exported(1) + b"\0")
    with pytest.raises(UnknownLayout):
        learn_layout(context, kv_heads=3)
    assert context.cells == 0
