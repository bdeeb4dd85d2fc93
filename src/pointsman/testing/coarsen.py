"""A worse model out of a good one: the weights of a GGUF file rounded to fewer levels, in place, for a cascade to test.

`python -m pointsman.testing.coarsen SOURCE TARGET --levels 6` writes a copy that any llama.cpp runs: size, type and
speed stay, only quality goes. Only blocks of type Q4_1 are rounded (the default model's are). Needs the package `gguf`.
"""

import shutil
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from gguf import GGMLQuantizationType, GGUFReader

__all__ = ["coarsen", "coarsened"]

LEVELS = 16
"""Levels of a Q4_1 block of 32 weights: weight = scale * level + least, both float16, then the levels, two a byte."""
BLOCK_BYTES = 20


def coarsen(source: Path, target: Path, *, levels: int) -> int:
    """Write `source` to `target` with `levels` (2 to 15) instead of 16 levels per block; return the tensors changed.

    Raises:
        ValueError: `levels` is out of range, or `source` has no tensor of type Q4_1; then there is no `target`.
    """
    shutil.copyfile(source, target)
    changed = 0
    for tensor in GGUFReader(target, "r+").tensors:
        if tensor.tensor_type == GGMLQuantizationType.Q4_1:
            blocks = tensor.data.reshape(-1, BLOCK_BYTES)
            blocks[:] = coarsened(blocks, levels=levels)
            changed += 1
    if not changed:
        target.unlink()
        raise ValueError(f"{source.name} has no weights of type Q4_1")
    return changed


def coarsened(blocks: np.ndarray, *, levels: int) -> np.ndarray:
    """Return Q4_1 blocks, one per row of bytes, whose weights were rounded to `levels` (2 to 15) of their range.

    >>> block = np.array([[0, 60, 0, 0] + [0xF4] * 16], np.uint8)  # from 0.0 to 15.0; 4.0 and 15.0 in turn
    >>> new = coarsened(block, levels=2)
    >>> new[0, :2].view(np.float16), [hex(byte) for byte in set(new[0, 4:].tolist())]
    (array([15.], dtype=float16), ['0x10'])

    Raises:
        ValueError: `levels` is out of range.
    """
    if not 2 <= levels < LEVELS:
        raise ValueError(f"levels must be 2 to {LEVELS - 1}, not {levels}")
    ratio = (levels - 1) / (LEVELS - 1)
    rounded = np.rint(np.arange(LEVELS) * ratio).astype(np.uint8)
    pairs = (rounded[:, None] << 4 | rounded).reshape(-1)
    new = blocks.copy()
    new[:, :2] = (blocks[:, :2].copy().view(np.float16) / np.float16(ratio)).view(np.uint8)
    new[:, 4:] = pairs[blocks[:, 4:]]
    return new


def _main(
    source: Annotated[Path, typer.Argument(exists=True, dir_okay=False)],
    target: Path,
    levels: Annotated[int, typer.Option(min=2, max=LEVELS - 1, help="Levels per block.")],
) -> None:
    """Write a copy of a GGUF model with coarser weights."""
    try:
        changed = coarsen(source, target, levels=levels)
    except ValueError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    typer.echo(f"{changed} tensors with {levels} levels: {target}")


if __name__ == "__main__":
    typer.run(_main)
