"""KV states of the real model: the same bytes after a way through blocks, and the same logits from there on."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from rich.console import Console

from pointsman.engine import llama
from pointsman.engine.kv.blocks import Shape, hashes_of
from pointsman.engine.kv.state import learn_layout
from pointsman.engine.llama import Row
from pointsman.engine.scheduler import GRID
from pointsman.engine.weights import FetchFailed, cache_folder, default_weights

pytest.importorskip("xllamacpp", reason="needs the [engine] extra: pip install 'pointsman[engine]'")
pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def model() -> Iterator[llama.Model]:
    try:
        path: Path = default_weights(cache_folder(os.environ), Console(stderr=True))
    except FetchFailed as error:
        pytest.skip(str(error))
    with llama.Model(llama.load_library(), path) as model:
        yield model


@pytest.fixture(scope="module")
def prompt(model: llama.Model) -> list[int]:
    text = "A pointsman sets the points of a railway, so that a train takes the right track. "
    return model.tokenize(text * 6, add_special=True, parse_special=False)


@pytest.mark.parametrize("n_tokens", [1, 2, 16, 17, 33, 65])
def test_a_joined_state_is_the_exported_one_and_goes_on_alike(
    model: llama.Model, prompt: list[int], n_tokens: int
) -> None:
    """One context computes, another of another size loads: same bytes, same logits."""
    tokens = prompt[:n_tokens]
    with (
        llama.Context(model, context=256, sequences=3) as prefill,
        llama.Context(model, context=256, sequences=2) as decode,
    ):
        here = learn_layout(prefill, kv_heads=model.kv_heads)
        there = learn_layout(decode, kv_heads=model.kv_heads)
        assert (here.shape, here.n_streams, there.n_streams) == (Shape(30, 3, 64), 3, 2)
        for source, target in ((0, 1), (2, 0)):
            logits = computed(prefill, source, tokens)
            state = prefill.export(source)
            payloads = here.split(state, n_tokens)
            assert source or here.join(payloads, n_tokens) == state
            prefill.load(source, here.join(payloads, n_tokens))
            assert prefill.export(source) == state

            decode.load(target, there.join(payloads, n_tokens))
            assert there.split(decode.export(target), n_tokens) == payloads
            decode.forget(target, n_tokens - 1)
            last = Row(target, n_tokens - 1, tokens[-1], True)
            assert decode.decode([last]).tobytes() == logits.tobytes()


def test_blocks_of_one_hash_are_equal_bit_for_bit(model: llama.Model, prompt: list[int]) -> None:
    """What a decode worker has of one prompt stands in for what another prompt would bring."""
    long, short = prompt[:90], [*prompt[:70], 7, 8]
    with llama.Context(model, context=256, sequences=2) as context:
        layout = learn_layout(context, kv_heads=model.kv_heads)
        blocks = []
        for sequence, tokens in enumerate((long, short)):
            computed(context, sequence, tokens)
            payloads = layout.split(context.export(sequence), len(tokens))
            hashes = hashes_of(tokens, whole_chunks=GRID)
            blocks.append(dict(zip(hashes, payloads, strict=True)))
    shared = (blocks[0].keys() & blocks[1].keys()) - {0}
    assert len(shared) == 4
    assert all(blocks[0][value] == blocks[1][value] for value in shared)


def computed(context: llama.Context, sequence: int, tokens: Sequence[int]) -> NDArray[np.float32]:
    """Compute a prompt on the grid, its last token alone; the logits of that one."""
    context.forget(sequence)
    last = len(tokens) - 1
    for start in range(0, last, GRID):
        chunk = tokens[start : min(start + GRID, last)]
        context.decode([Row(sequence, start + i, token, False) for i, token in enumerate(chunk)])
    return context.decode([Row(sequence, last, tokens[last], True)])
