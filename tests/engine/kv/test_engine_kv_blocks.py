"""The names of KV blocks: the contract's vectors, and which blocks must not have one."""

import doctest
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pointsman.engine.kv import blocks, envelope, pool
from pointsman.engine.kv.blocks import BLOCK_TOKENS, Shape, block_hash, blocks_of, hashes_of
from pointsman.engine.scheduler import BLOCK, GRID


def chain(tokens: Sequence[int], size: int) -> list[int]:
    hashes, parent = [], 0
    for start in range(0, len(tokens) - size + 1, size):
        parent = block_hash(parent, tokens[start : start + size])
        hashes.append(parent)
    return hashes


@pytest.mark.parametrize(
    ("tokens", "size", "hashes"),
    [
        (range(1, 6), 2, [0xA91AB0C1027B9366, 0x03DF829571605C60]),
        (range(32), 16, [0xA64E06B258C823C5, 0x57ED377274DA589D]),
        (range(1, 41), 16, [0x6EBCBDC2CF112AB5, 0x396E07B772B02689]),
    ],
)
def test_hashes_are_those_of_the_contract(
    tokens: Sequence[int], size: int, hashes: list[int]
) -> None:
    assert chain(tokens, size) == hashes


def test_a_hash_is_never_the_zero_that_means_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pointsman.engine.kv.blocks.fnv1a64", lambda data: 0)
    assert block_hash(0, [1]) == 1


def test_the_scheduler_counts_in_the_blocks_that_are_sent() -> None:
    assert BLOCK_TOKENS == BLOCK == 16


def test_a_payload_has_keys_and_values_of_every_layer() -> None:
    assert Shape(30, 3, 64).payload_bytes == 30 * 2 * 3 * 16 * 64 * 2
    assert Shape(1, 1, 2, block_tokens=2).payload_bytes == 16


@settings(deadline=None)
@given(st.lists(st.integers(0, 49151), max_size=200))
def test_a_block_has_a_hash_only_within_whole_chunks_before_the_last_token(
    tokens: list[int],
) -> None:
    hashes = hashes_of(tokens, whole_chunks=GRID)
    assert len(hashes) == blocks_of(len(tokens))
    whole = max(len(tokens) - 1, 0) // GRID * GRID
    for i, value in enumerate(hashes):
        assert bool(value) == ((i + 1) * BLOCK_TOKENS <= whole)
    named = sum(map(bool, hashes))
    assert hashes[:named] == chain(tokens, BLOCK_TOKENS)[:named]


def test_the_hash_of_a_block_tells_what_came_before_it() -> None:
    one, other = list(range(65)), [7, *range(1, 65)]
    ours, theirs = (hashes_of(tokens, whole_chunks=GRID) for tokens in (one, other))
    assert all(a != b for a, b in zip(ours[:4], theirs[:4], strict=True))
    assert ours[4] == theirs[4] == 0


def test_the_examples_of_these_modules_run_as_shown() -> None:
    for module in (blocks, envelope, pool):
        assert doctest.testmod(module).failed == 0
