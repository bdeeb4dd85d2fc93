"""`pointsman cascade` as a user runs it, against models over a real socket."""

import csv
import importlib.util
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from pointsman.cli_cascade import cascade_app
from pointsman.domain.acceptor import acceptor_from_json
from pointsman.domain.cascade import parse_accept_if

Models = Callable[..., Any]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cascade_app, [str(argument) for argument in arguments])


def adding(says: Models, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    """The large model adds; the small one can only add what is below 10, and is unsure about the rest."""
    a, b = map(int, body["prompt"].split("+"))
    if body["model"] == "large":
        return 200, says(path, f" {a + b}", [-0.01])
    sure = a + b < 10
    return 200, says(path, f" {a + b if sure else 0}", [-0.1 * (a + b) - (0 if sure else 5)] * 2)


@pytest.fixture
def sums(tmp_path: Path) -> Path:
    file = tmp_path / "sums.jsonl"
    lines = [{"prompt": f"{a}+{b}", "answer": a + b} for a in range(8) for b in range(8)]
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


def swept(models: Models, says: Models, sums: Path, *more: object) -> tuple[Result, Any]:
    fake = models(lambda path, body: adding(says, path, body))
    common = ("--small", "small", "--large", "large", "--resamples", 50, "--url", fake.url)
    return run("sweep", sums, *common, "--small-cost", 1, "--large-cost", 10, *more), fake


def test_questions_are_written_for_a_sweep_to_read() -> None:
    result = run("questions", "--count", 5, "--seed", 3)
    assert result.exit_code == 0
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [set(line) for line in lines] == [{"kind", "prompt", "stop", "answers"}] * 5
    assert run("questions", "--count", 5, "--seed", 3).stdout == result.stdout
    assert run("questions", "--count", 5, "--seed", 4).stdout != result.stdout


def test_a_sweep_finds_the_threshold_that_keeps_what_is_right(
    models: Models, says: Models, sums: Path, tmp_path: Path
) -> None:
    out = tmp_path / "curve.csv"
    result, fake = swept(models, says, sums, "--target-quality", 1, "--csv", out)
    assert result.exit_code == 0, result.output
    assert "64 prompts; small alone: accuracy 76.6%, cost 1;" in result.stdout
    assert "quality of at least 1: accept_if = " in result.stdout
    [rule] = {
        line.partition('"')[2].rstrip('"')
        for line in result.stdout.splitlines()
        if line.startswith("quality of at least 1")
    }
    accept = parse_accept_if(rule)
    assert accept([-0.9] * 2)
    assert not accept([-6.0] * 2)
    assert len(fake.of("small")) == len(fake.of("large")) == 64
    assert all("logprobs" in body for body in fake.of("small"))
    assert not any("logprobs" in body for body in fake.of("large"))
    points = list(csv.DictReader(out.read_text().splitlines()))
    costs = [float(point["cost"]) for point in points]
    assert all(low < high for low, high in pairwise(costs))
    assert (costs[0], costs[-1]) == (1.0, 11.0)


def test_a_sweep_is_repeated_without_asking(
    models: Models, says: Models, sums: Path, tmp_path: Path
) -> None:
    kept = tmp_path / "answers.jsonl"
    first, fake = swept(models, says, sums, "--answers", kept, "--limit", 10)
    assert len(fake.asked) == 20
    again, fake = swept(models, says, sums, "--answers", kept, "--limit", 10)
    assert again.stdout == first.stdout
    assert fake.asked == []
    assert "small: 10 answers were kept from before" in again.stderr
    _, fake = swept(models, says, sums, "--answers", kept, "--limit", 12)
    assert len(fake.asked) == 4


def test_an_acceptor_is_written_and_can_be_swept(
    models: Models, says: Models, sums: Path, tmp_path: Path
) -> None:
    file = tmp_path / "acceptor.json"
    features = ("--feature", "mean_logprob", "--feature", "mean_margin")
    result, _ = swept(models, says, sums, "--train", file, *features)
    assert result.exit_code == 0, result.output
    assert "learned from 44 answers; right about 100.0% of 20 others" in result.stdout
    assert acceptor_from_json(file.read_bytes()).features == ("mean_logprob", "mean_margin")
    result, _ = swept(models, says, sums, "--score", "score", "--acceptor", file)
    assert result.exit_code == 0, result.output
    assert 'knee: accept_if = "score >= 0.' in result.stdout


def test_without_answers_quality_is_agreement_with_the_large_model(
    models: Models, says: Models, sums: Path, tmp_path: Path
) -> None:
    result, _ = swept(models, says, sums, "--agreement")
    assert "small alone: agreement 76.6%" in result.stdout
    recorded = tmp_path / "recorded.jsonl"
    recorded.write_text('{"model": "gpt", "prompt": "1+1"}\n{"request": {"prompt": "7+7"}}\n')
    result, fake = swept(models, says, recorded)
    assert "2 prompts; small alone: agreement 50.0%" in result.stdout
    assert not any("temperature" in body for _, body in fake.asked)


def test_models_may_be_served_in_two_places(models: Models, says: Models, sums: Path) -> None:
    other = models(lambda path, body: adding(says, path, body))
    result, fake = swept(models, says, sums, "--large-url", other.url, "--limit", 3)
    assert result.exit_code == 0
    assert len(fake.of("small")) == len(other.of("large")) == 3
    assert len(fake.asked) == len(other.asked) == 3


def test_a_key_goes_to_the_server_that_it_is_for_and_to_no_other(
    models: Models, says: Models, sums: Path
) -> None:
    _, fake = swept(models, says, sums, "--limit", 1, "--key", "one")
    assert fake.keys == ["Bearer one"] * 2
    for more, expected in (((), None), (("--large-key", "two"), "Bearer two")):
        other = models(lambda path, body: adding(says, path, body))
        place = ("--large-url", other.url, "--limit", 1, "--key", "one")
        _, fake = swept(models, says, sums, *place, *more)
        assert (fake.keys, other.keys) == (["Bearer one"], [expected])


def test_costs_may_be_prices_or_measured_seconds(models: Models, says: Models, sums: Path) -> None:
    fake = models(lambda path, body: adding(says, path, body))
    models_ = ("--small", "small", "--large", "large", "--url", fake.url)
    common = ("sweep", sums, *models_, "--resamples", 5)
    result = run(*common, "--small-price", 1e6, "--large-price", 5e6)
    assert "cost (price)" in result.stdout
    assert "cost 2; large alone: accuracy 100.0%, cost 5" in result.stdout
    assert "cost (s)" in run(*common).stdout


def test_what_was_not_answered_is_left_out_and_counted(
    models: Models, says: Models, sums: Path
) -> None:
    def script(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if body["model"] == "large" and body["prompt"].startswith("7"):
            return 400, {"error": {"message": "too hard"}}
        return adding(says, path, body)

    fake = models(script)
    result = run("sweep", sums, "--small", "small", "--large", "large", "--url", fake.url)
    assert result.exit_code == 0
    assert "56 prompts;" in result.stdout
    assert "large: 8 without an answer: status 400: too hard" in result.stderr


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs the plot extra")
@pytest.mark.slow
def test_a_plot_is_drawn(models: Models, says: Models, sums: Path, tmp_path: Path) -> None:
    result, _ = swept(models, says, sums, "--plot", tmp_path / "a.svg")
    assert result.exit_code == 0, result.output
    assert "<svg" in (tmp_path / "a.svg").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--score", "luck"), "'luck' is no score"),
        (("--score", "score"), "needs --acceptor"),
        (("--acceptor", "gone"), "cannot read gone: No such file"),
        (("--acceptor", __file__), "acceptor: "),
        (("--plot", "a.pdf"), "a plot is one of .svg, .png"),
        (("--url", "ftp://a"), "is not http://HOST"),
        (("--answers", "/gone/a"), "cannot use /gone/a"),
    ],
)
def test_what_is_wrong_is_one_line_before_anybody_is_asked(
    models: Models, says: Models, sums: Path, arguments: tuple[str, ...], message: str
) -> None:
    result, fake = swept(models, says, sums, *arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith("pointsman: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert fake.asked == []


@pytest.mark.parametrize(
    "arguments",
    [("--small-price", "1"), ("--small-price", "1", "--large-price", "2"), ("--match", "feels")],
)
def test_wrong_usage_is_status_2(
    models: Models, says: Models, sums: Path, arguments: tuple[str, ...]
) -> None:
    result, fake = swept(models, says, sums, *arguments)
    assert result.exit_code == 2
    assert fake.asked == []


def test_a_cost_is_given_for_both_models(sums: Path) -> None:
    result = run("sweep", sums, "--small", "s", "--large", "l", "--small-cost", 1)
    assert result.exit_code == 2
    result = run("sweep", sums, "--small", "s", "--large", "l", "--key", "k\u00e9y")
    assert result.exit_code == 2


def test_prompts_with_and_without_answers_do_not_mix(
    models: Models, says: Models, tmp_path: Path
) -> None:
    file = tmp_path / "mixed.jsonl"
    file.write_text('{"prompt": "1+1", "answer": 2}\n{"prompt": "1+2"}\n')
    result, fake = swept(models, says, file)
    assert result.exit_code == 1
    assert "1 of 2 prompts have no answer" in result.stderr
    assert fake.asked == []


@pytest.mark.slow
def test_a_sweep_whose_models_are_gone_ends_with_the_reason(sums: Path) -> None:
    result = run(
        "sweep",
        sums,
        "--small",
        "s",
        "--large",
        "l",
        "--limit",
        1,
        "--url",
        "http://127.0.0.1:9",
        "--timeout",
        1,
    )
    assert result.exit_code == 1
    assert "s: 1 without an answer: no answer: " in result.stderr
    assert "no prompt was answered by both models" in result.stderr


def test_output_that_cannot_be_written_is_named(models: Models, says: Models, sums: Path) -> None:
    result, _ = swept(models, says, sums, "--csv", "/gone/a.csv")
    assert result.exit_code == 1
    assert "cannot write /gone/a.csv: No such file" in result.stderr


def test_a_model_that_nobody_serves_ends_the_sweep(models: Models, sums: Path) -> None:
    fake = models(lambda *_: (404, {"error": {"message": "no such model"}}))
    result = run(
        "sweep", sums, "--small", "s", "--large", "l", "--url", fake.url, "--concurrency", 1
    )
    assert result.exit_code == 1
    assert result.stderr.strip() in {
        f"pointsman: {model}: status 404: no such model" for model in ("s", "l")
    }
    assert len(fake.asked) <= 2
