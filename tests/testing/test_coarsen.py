"""A worse model out of a good one."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("gguf")

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, quants

from pointsman.testing.coarsen import coarsen, coarsened

Q4_1 = GGMLQuantizationType.Q4_1


def blocks_of(weights: np.ndarray) -> np.ndarray:
    return quants.quantize(weights, Q4_1).reshape(-1, 20)


def weights_of(blocks: np.ndarray) -> np.ndarray:
    return quants.dequantize(blocks, Q4_1)


@pytest.mark.parametrize("levels", [2, 3, 6, 8, 12, 15])
def test_a_weight_moves_by_half_a_step_at_most(levels: int) -> None:
    blocks = blocks_of(np.random.default_rng(1).normal(size=(64, 32)).astype(np.float32))
    before, after = weights_of(blocks), weights_of(coarsened(blocks, levels=levels))
    span = before.max(axis=1) - before.min(axis=1)
    assert np.abs(after - before).max() > 0
    assert (np.abs(after - before).max(axis=1) <= span / (levels - 1) * 0.501 + 0.002).all()
    assert max(len(np.unique(row)) for row in after) == levels


@pytest.mark.parametrize("levels", [1, 16])
def test_levels_that_make_no_coarser_model_are_refused(levels: int) -> None:
    with pytest.raises(ValueError, match="levels must be 2 to 15"):
        coarsened(blocks_of(np.zeros((1, 32), np.float32)), levels=levels)


def model(path: Path, kind: GGMLQuantizationType) -> Path:
    writer = GGUFWriter(path, "llama")
    weights = np.random.default_rng(2).normal(size=(4, 64)).astype(np.float32)
    writer.add_tensor("w", quants.quantize(weights, kind), raw_dtype=kind)
    writer.add_tensor("norm", np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_only_the_weights_of_a_file_change(tmp_path: Path) -> None:
    source = model(tmp_path / "good.gguf", Q4_1)
    original = source.read_bytes()
    target = tmp_path / "worse.gguf"
    assert coarsen(source, target, levels=4) == 1
    assert source.read_bytes() == original
    assert len(target.read_bytes()) == len(original)
    weights, norm = GGUFReader(target).tensors
    assert norm.data.tolist() == [1.0] * 4
    assert max(len(np.unique(row)) for row in weights_of(weights.data.reshape(-1, 20))) == 4


def test_a_file_without_such_weights_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    source = model(tmp_path / "other.gguf", GGMLQuantizationType.Q8_0)
    with pytest.raises(ValueError, match=r"other\.gguf has no weights of type Q4_1"):
        coarsen(source, tmp_path / "worse.gguf", levels=4)
    assert not (tmp_path / "worse.gguf").exists()


def test_the_command_writes_a_model_or_says_why_not(tmp_path: Path) -> None:
    source, target = model(tmp_path / "good.gguf", Q4_1), tmp_path / "worse.gguf"
    command = [sys.executable, "-m", "pointsman.testing.coarsen", str(source), str(target)]
    done = subprocess.run([*command, "--levels", "4"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"1 tensors with 4 levels: {target}\n")
    assert target.exists()
    command[3] = str(model(tmp_path / "other.gguf", GGMLQuantizationType.Q8_0))
    done = subprocess.run([*command, "--levels", "4"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "other.gguf has no weights of type Q4_1\n")
