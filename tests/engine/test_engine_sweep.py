"""A sweep over two real models: the default one, and a coarser rounding of its weights."""

import csv
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pointsman.cli_cascade import cascade_app

pytest.importorskip("xllamacpp", reason="needs the [engine] extra: pip install 'pointsman[engine]'")
pytest.importorskip("gguf", reason="needs the [dev] extra: a coarser model is made with gguf")
pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(300)]


@contextmanager
def running(engine: Any) -> Iterator[Any]:
    try:
        yield engine
    finally:
        engine.stop()


def test_a_cascade_of_two_real_models_is_swept(
    launch: Callable[..., Any], weights: Path, tmp_path: Path
) -> None:
    from pointsman.testing.coarsen import coarsen

    coarse = tmp_path / "coarse.gguf"
    assert coarsen(weights, coarse, levels=11) == 210
    questions = CliRunner().invoke(cascade_app, ["questions", "--count", "10"]).stdout
    file, kept, curve = (tmp_path / name for name in ("q.jsonl", "answers.jsonl", "curve.csv"))
    file.write_text(questions)
    size = ("--context", "2048", "--parallel", "4")
    # Of an option that is given twice the last one holds.
    with running(launch(*size)) as large, running(launch("--model", str(coarse), *size)) as small:
        arguments = (
            *("sweep", file, "--small", "smollm2", "--large", "smollm2", "--match", "equals"),
            *("--url", small.url, "--large-url", large.url, "--answers", kept, "--csv", curve),
            *("--score", "mean_margin", "--max-tokens", 8, "--resamples", 20),
        )
        result = CliRunner().invoke(cascade_app, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    assert "10 prompts; small alone: accuracy " in result.stdout
    answers = [json.loads(line)["answer"] for line in kept.read_text().splitlines()]
    assert len(answers) == 20
    assert all(answer["seconds"] > 0 and 0 < answer["completion_tokens"] <= 8 for answer in answers)
    scored = [answer for answer in answers if answer["logprobs"]]
    assert len(scored) == 10
    for answer in scored:
        assert len(answer["margins"]) == len(answer["logprobs"])
        # Greedy: what was chosen is the best of the two.
        assert all(margin >= 0 for margin in answer["margins"])
    points = list(csv.DictReader(curve.read_text().splitlines()))
    assert len(points) > 6
    assert all(float(low["cost"]) <= float(high["cost"]) for low, high in pairwise(points))
    assert [float(points[at]["escalated"]) for at in (0, -1)] == [0.0, 1.0]
