"""Cuts the KV state that llama.cpp exports of a sequence into blocks, and joins blocks to a state that it loads.

The layout was read off exports of the build that the [engine] extra pins; no header has it. Little-endian throughout:

    u32 magic, u32 sequence, u32 n_streams
    for each stream: u32 n_cells, for each cell: i32 position, u32 1, i32 sequence
        followed, unless there is no cell, by u32 1, u32 n_layers, u32 0, u32 0
        for each layer: i32 type (1: f16), u64 row bytes, K as [cell][head][dim]
        for each layer: i32 type (1: f16), u32 element bytes, u32 row elements, V as [head][dim][cell]

A sequence has a stream of its own, so all others are empty here. Nothing is guessed: a state that differs from this in
any byte that is not a key or a value is refused. Models with two caches (sliding windows) or with recurrent layers are
among those.

Between K and V here and in a block only the order differs; no number is touched.
"""

import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from pointsman.engine.kv.blocks import BLOCK_TOKENS, Shape, blocks_of
from pointsman.engine.llama import Row

__all__ = ["Exporting", "Layout", "UnknownLayout", "learn_layout"]

_START = struct.Struct("<3I")
_COUNT = struct.Struct("<I")
_CELL = np.dtype([("position", "<i4"), ("n_sequences", "<u4"), ("sequence", "<i4")])
_CACHE = struct.Struct("<4I")
_KEYS = struct.Struct("<iQ")
_VALUES = struct.Struct("<iII")

_MAGIC = 0xAF143CD8
_F16 = 1


class UnknownLayout(ValueError):
    """A KV state that is not laid out as written down here."""


class Layout(NamedTuple):
    """The layout of the states of one context: `shape` comes of the model, `n_streams` of the context.

    States of contexts that differ in `n_streams` cannot be exchanged as they are, but by way of blocks they can.
    """

    shape: Shape
    n_streams: int

    @classmethod
    def read(cls, state: bytes, *, kv_heads: int) -> "Layout":
        """The layout of an exported state of at least one token; `kv_heads`: the model's heads of keys and values.

        Raises:
            UnknownLayout: it is another one than this module knows.
        """
        try:
            _, sequence, n_streams = _START.unpack_from(state)
            at = _START.size + sequence * _COUNT.size
            (n_tokens,) = _COUNT.unpack_from(state, at)
            at += _COUNT.size + n_tokens * _CELL.itemsize
            _, layers, _, _ = _CACHE.unpack_from(state, at)
            _, row_bytes = _KEYS.unpack_from(state, at + _CACHE.size)
        except struct.error:
            raise UnknownLayout(f"a KV state of {len(state)} bytes is cut off") from None
        head_dim, rest = divmod(row_bytes, 2 * kv_heads)
        if rest or not head_dim:
            raise UnknownLayout(f"rows of {row_bytes} bytes are not {kv_heads} heads of f16")
        layout = cls(Shape(layers, kv_heads, head_dim), n_streams)
        layout.split(state, n_tokens)
        return layout

    def split(self, state: bytes, n_tokens: int) -> list[bytes]:
        """The payloads of the blocks of a state, in order; behind the last token the last one is zero.

        Raises:
            UnknownLayout: the state is not of this layout, or not of the tokens 0 to `n_tokens` - 1 in order.
        """
        keys, values = self._checked(state, n_tokens)
        payloads = []
        for tokens in _blocks(n_tokens):
            block = np.zeros(self._block, "<u2")
            size = tokens.stop - tokens.start
            block[:, 0, :, :size] = keys["cells"][:, tokens].transpose(0, 2, 1, 3)
            block[:, 1, :, :size] = values["cells"][..., tokens].transpose(0, 1, 3, 2)
            payloads.append(block.tobytes())
        return payloads

    def join(self, payloads: Sequence[bytes], n_tokens: int) -> bytes:
        """The state of `n_tokens` tokens, to be loaded into any sequence. After `split` it is the state of sequence 0.

        Raises:
            ValueError: there are more or fewer payloads than `n_tokens` need, or one has another size.
        """
        if n_tokens < 1 or len(payloads) != blocks_of(n_tokens):
            raise ValueError(f"{len(payloads)} blocks are not those of {n_tokens} tokens")
        if any(len(payload) != self.shape.payload_bytes for payload in payloads):
            raise ValueError(f"a block has not {self.shape.payload_bytes} bytes")
        before, after = self._frame(0, n_tokens)
        state = np.empty(self._size(n_tokens), np.uint8)
        state[: len(before)] = np.frombuffer(before, np.uint8)
        state[len(state) - len(after) :] = np.frombuffer(after, np.uint8)
        keys, values = self._sections(state, len(before), n_tokens)
        keys["head"], values["head"] = map(np.void, self._heads)
        for tokens, payload in zip(_blocks(n_tokens), payloads, strict=True):
            block = np.frombuffer(payload, "<u2").reshape(self._block)
            size = tokens.stop - tokens.start
            keys["cells"][:, tokens] = block[:, 0, :, :size].transpose(0, 2, 1, 3)
            values["cells"][..., tokens] = block[:, 1, :, :size].transpose(0, 1, 3, 2)
        return state.tobytes()

    def _checked(self, state: bytes, n_tokens: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """The keys and the values of a state of which everything else is as expected. Raises UnknownLayout."""
        if n_tokens < 1 or len(state) != self._size(n_tokens):
            raise UnknownLayout(f"{len(state)} bytes are no KV state of {n_tokens} tokens")
        sequence = _START.unpack_from(state)[1]
        if sequence >= self.n_streams:
            raise UnknownLayout(f"a KV state of sequence {sequence} of {self.n_streams}")
        before, after = self._frame(sequence, n_tokens)
        keys, values = self._sections(state, len(before), n_tokens)
        heads = [head * self.shape.layers for head in self._heads]
        if not (
            state.startswith(before)
            and [keys["head"].tobytes(), values["head"].tobytes()] == heads
            and state.endswith(after)
        ):
            raise UnknownLayout("a KV state is not laid out as expected")
        return keys, values

    @property
    def _block(self) -> tuple[int, ...]:
        shape = self.shape
        return (shape.layers, 2, shape.kv_heads, shape.block_tokens, shape.head_dim)

    @property
    def _row(self) -> int:
        """How many numbers a token has in a layer, as key and as value."""
        return self.shape.kv_heads * self.shape.head_dim

    @property
    def _heads(self) -> tuple[bytes, bytes]:
        """What precedes the keys and the values of each layer."""
        return _KEYS.pack(_F16, self._row * 2), _VALUES.pack(_F16, 2, self._row)

    def _frame(self, sequence: int, n_tokens: int) -> tuple[bytes, bytes]:
        """What precedes the first layer and what follows the last one."""
        cells = np.zeros(n_tokens, _CELL)
        cells["position"] = np.arange(n_tokens)
        cells["n_sequences"] = 1
        cells["sequence"] = sequence
        empty = _COUNT.pack(0)
        before = (
            _START.pack(_MAGIC, sequence, self.n_streams)
            + empty * sequence
            + _COUNT.pack(n_tokens)
            + cells.tobytes()
            + _CACHE.pack(1, self.shape.layers, 0, 0)
        )
        return before, empty * (self.n_streams - 1 - sequence)

    def _size(self, n_tokens: int) -> int:
        frame = _START.size + self.n_streams * _COUNT.size + _CACHE.size
        layer = _KEYS.size + _VALUES.size + 2 * 2 * self._row * n_tokens
        return frame + n_tokens * _CELL.itemsize + self.shape.layers * layer

    def _sections(self, state: Any, at: int, n_tokens: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """The keys and the values of a state, layer by layer, as views of its bytes from `at` on."""
        layers, kv_heads, head_dim = self.shape[:3]
        keys = np.dtype(
            [("head", f"V{_KEYS.size}"), ("cells", "<u2", (n_tokens, kv_heads, head_dim))]
        )
        values = np.dtype(
            [("head", f"V{_VALUES.size}"), ("cells", "<u2", (kv_heads, head_dim, n_tokens))]
        )
        return (
            np.frombuffer(state, keys, layers, at),
            np.frombuffer(state, values, layers, at + layers * keys.itemsize),
        )


class Exporting(Protocol):
    """What a layout is learned of: `pointsman.engine.llama.Context`."""

    def decode(self, rows: Sequence[Row]) -> object:
        """Compute a batch."""
        ...

    def export(self, sequence: int) -> bytes:
        """The state of a sequence."""
        ...

    def forget(self, sequence: int, start: int = 0) -> None:
        """Drop the tokens of a sequence from `start` on."""
        ...


def learn_layout(context: Exporting, *, kv_heads: int) -> Layout:
    """The layout of the states of a context that nobody uses yet, read off the state of one token.

    Raises:
        UnknownLayout: the model's states are laid out otherwise: it can serve, but not hand over.
    """
    context.decode([Row(sequence=0, position=0, token=0, output=True)])
    try:
        return Layout.read(context.export(0), kv_heads=kv_heads)
    finally:
        context.forget(0)


def _blocks(n_tokens: int) -> Iterator[slice]:
    """The tokens of each block."""
    for start in range(0, n_tokens, BLOCK_TOKENS):
        yield slice(start, min(start + BLOCK_TOKENS, n_tokens))
