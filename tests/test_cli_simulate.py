"""`pointsman simulate` as its users meet it."""

import csv
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pointsman.cli import app

RUNNER = CliRunner()
SMALL = ["--requests", "200", "--workers", "2", "--seeds", "2", "--jobs", "1"]
TRACE = '{"timestamp": %d, "input_length": 600, "output_length": 5, "hash_ids": [0, %d]}\n'


def test_policies_are_compared_in_a_table_and_every_run_is_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    args = ["--policy", "affinity", "--policy", "power_of_two", "--rate", "1", "--csv", str(path)]
    result = RUNNER.invoke(app, ["simulate", *SMALL, *args], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "conversations, 2 workers, 1 requests/s" in result.output
    assert "4 runs of 180 judged requests" in result.output
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert [(row["policy"], row["seed"]) for row in rows] == [
        ("affinity", "0"), ("affinity", "1"), ("power_of_two", "0"), ("power_of_two", "1"),
    ]  # fmt: skip
    assert all(float(row["goodput"]) > 0 for row in rows)


def test_a_trace_is_replayed_at_its_own_rate(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(TRACE % (1000 * number, number % 3 + 1) for number in range(50)))
    args = ["--workload", str(path), "--policy", "affinity", "--json"]
    result = RUNNER.invoke(app, ["simulate", *SMALL, *args])
    assert result.exit_code == 0, result.output
    first = json.loads(result.output.splitlines()[0])
    assert first["rate"] == pytest.approx(50 / 49)
    assert (first["requests"], first["refused"]) == (45, 0)
    assert first["hit_rate"] > 0.5


def test_a_profile_is_read_and_a_slower_engine_is_slower(tmp_path: Path) -> None:
    profile = tmp_path / "engine.toml"
    profile.write_text("prefill_tokens_per_s = 1000\n")
    args = ["simulate", *SMALL, "--policy", "affinity", "--rate", "0.2", "--json"]
    fast = json.loads(RUNNER.invoke(app, args).output.splitlines()[0])
    slow = json.loads(RUNNER.invoke(app, [*args, "--profile", str(profile)]).output.splitlines()[0])
    assert slow["ttft_p50"] > 3 * fast["ttft_p50"]


def test_knees_are_found() -> None:
    args = ["--knee", "--policy", "least_outstanding", "--json", "--workload", "system_prompts"]
    result = RUNNER.invoke(app, ["simulate", *SMALL, *args])
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["knee"] > 1
    table = RUNNER.invoke(app, ["simulate", *SMALL, *args[:3], *args[4:]])
    assert "least_outstanding" in table.output


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--policy", "afinity"], "did you mean 'affinity'"),
        (["--workload", "agent"], "did you mean agents"),
        (["--workload", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--slo", "ttft=soon"], "ttft=soon"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(args: list[str], words: str) -> None:
    result = RUNNER.invoke(app, ["simulate", *SMALL, *args])
    assert result.exit_code == 1
    assert words in result.output
    assert len(result.output.splitlines()) == 1


def test_a_knee_has_no_runs_to_write(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    result = RUNNER.invoke(app, ["simulate", *SMALL, "--knee", "--csv", str(path)])
    assert (result.exit_code, path.exists()) == (2, False)


def test_prompts_that_are_larger_than_the_engine_are_served_one_by_one(tmp_path: Path) -> None:
    profile = tmp_path / "engine.toml"
    profile.write_text("kv_tokens = 4096\n")
    args = ["--profile", str(profile), "--policy", "affinity", "--json"]
    result = RUNNER.invoke(app, ["simulate", *SMALL, *args])
    assert result.exit_code == 0, result.output
    assert json.loads(result.output.splitlines()[0])["refused"] == 0


def test_a_profile_with_an_unknown_number_names_it(tmp_path: Path) -> None:
    profile = tmp_path / "engine.toml"
    profile.write_text("prefill_speed = 1000\n")
    result = RUNNER.invoke(app, ["simulate", *SMALL, "--profile", str(profile)])
    assert (result.exit_code, "prefill_speed" in result.output) == (1, True)


def test_a_file_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    args = ["--policy", "affinity", "--csv", str(tmp_path / "none" / "runs.csv")]
    result = RUNNER.invoke(app, ["simulate", *SMALL, *args])
    assert (result.exit_code, "No such file" in result.output) == (1, True)


def test_the_demo_needs_nothing() -> None:
    result = RUNNER.invoke(app, ["simulate", "--demo", "--jobs", "1"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "system_prompts, 16 workers" in result.output
