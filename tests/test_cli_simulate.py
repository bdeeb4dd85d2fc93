"""`pointsman simulate`: what it compares, what it writes, and what it says where something is wrong."""

import csv
import gzip
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from pointsman.cli import app
from pointsman.domain.recorded import RecordedPick, RecordedRequest, RecordedWorker, write_line

QUICK = ["--workers", "2", "--requests", "60", "--seeds", "2", "--jobs", "1"]
KNEE = ["--workload", "poisson", "--load", "1", "--load", "knee", "--workers", "1"]
KNEE += ["--requests", "20", "--seeds", "1", "--jobs", "1"]
TWO = ["--policy", "affinity", "--policy", "least_outstanding"]


def ran(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["simulate", *arguments])


def rows(*arguments: str) -> list[dict[str, dict[str, float]]]:
    result = ran(*arguments, *QUICK, "--json")
    assert result.exit_code == 0, result.output
    found: list[dict[str, dict[str, float]]] = json.loads(result.stdout)
    return found


def recorded(path: Path) -> Path:
    lines = [RecordedWorker(id=name, model="m") for name in "ab"]
    requests = [
        RecordedRequest(
            wall=1e9 + number,
            started=float(number),
            began=number + 0.25,
            ended=number + 1.0,
            model="m",
            stream=number > 0,
            blocks=f"{number % 2:016x}",
            prompt_tokens=200,
            output_tokens=4,
            status=503 if number == 9 else 200,
            picks=(
                RecordedPick(
                    at=float(number),
                    over=number + 1.0,
                    worker="b",
                    reason="load",
                    policy_reason="load",
                    count=2,
                    candidates=("a", "b"),
                    loads=(0, number % 3),
                ),
            ),
        )
        for number in range(10)
    ]
    path.write_bytes(b"".join([*map(write_line, lines), *map(write_line, requests)]))
    return path


def test_policies_are_compared_at_each_load() -> None:
    result = ran("--workload", "shared", *TWO, "--load", "2", "--load", "4", *QUICK)
    assert result.exit_code == 0, result.output
    title, header, *lines = result.stdout.splitlines()
    assert title.startswith(
        "shared on 2 workers, 1 gateway, 2 seeds; load: requests/s; good: ttft=2s"
    )
    assert header.split()[:3] == ["load", "policy", "good/s"]
    assert [line.split()[0] for line in lines if line[:4].strip()] == ["2", "4"]
    assert sum("affinity" in line for line in lines) == 2


def test_prompts_are_handed_off_where_there_are_workers_for_it() -> None:
    roles = ("--prefill", "1", "--decode", "1", "--policy", "affinity", "--load", "2")
    result = ran("--workload", "shared", *roles, *QUICK[2:])
    assert result.exit_code == 0, result.output
    title, header, line = result.stdout.splitlines()
    assert title.startswith("shared on 2 workers")
    assert header.split()[-5:] == ["handed", "P", "busy", "D", "busy"]
    assert "100.0%" in line


def test_only_what_costs_less_that_way_is_handed_off() -> None:
    roles = ("--prefill", "1", "--decode", "1", "--policy", "affinity", "--load", "2")
    result = ran("--workload", "shared", *roles, "--pairing", "quickest", *QUICK[2:], "--json")
    assert result.exit_code == 0, result.output
    assert 0.0 < json.loads(result.stdout)[0]["handed_off"]["mean"] < 1.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--prefill", "1"), "--prefill and --decode are given together"),
        (("--workers", "0"), "there is no worker: give --workers, or --prefill and --decode"),
    ],
)
def test_a_fleet_that_serves_nobody_is_refused(arguments: tuple[str, ...], message: str) -> None:
    result = ran(*arguments)
    assert (result.exit_code, result.stderr) == (1, f"pointsman: {message}\n")


def test_all_policies_are_compared_where_none_is_named() -> None:
    from pointsman.domain.policy import POLICIES

    assert {row["policy"] for row in rows("--workload", "poisson")} == set(POLICIES)  # type: ignore[comparison-overlap]


def test_the_same_seeds_give_the_same_bytes_in_any_number_of_processes() -> None:
    arguments = ["--workload", "agents", "--policy", "kv_cost", "--load", "3", *QUICK, "--json"]
    once, again = ran(*arguments), ran(*arguments, "--jobs", "2")
    assert once.exit_code == again.exit_code == 0
    assert once.stdout == again.stdout


def test_every_figure_is_in_the_csv_and_a_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    table, picture = tmp_path / "rows.csv", tmp_path / "rows.svg"
    arguments = ["--workload", "rag", *TWO, "--load", "1", "--load", "2", *QUICK]
    pictures = []
    for _ in range(2):
        result = ran(*arguments, "--csv", str(table), "--plot", str(picture))
        assert result.exit_code == 0, result.output
        pictures.append(picture.read_bytes())
    with table.open() as lines:
        found = list(csv.DictReader(lines))
    assert len(found) == 4
    assert all(0 < float(row["hit_rate"]) < 1 and float(row["ttft_p99_ci95"]) >= 0 for row in found)
    assert pictures[0] == pictures[1] and b"least_outstanding" in pictures[0]


def test_the_knee_is_a_load_that_holds_and_little_more_does_not() -> None:
    (row,) = rows("--workload", "poisson", "--policy", "least_outstanding", "--load", "knee")
    assert row["good"]["mean"] >= 0.95
    load = float(row["load"])  # type: ignore[arg-type]
    (above,) = rows(
        *("--workload", "poisson", "--policy", "least_outstanding", "--load", str(load * 1.03))
    )
    assert above["good"]["mean"] < 0.95


def test_a_level_that_nobody_can_meet_has_no_knee() -> None:
    result = ran("--policy", "weighted", *KNEE, "--slo", "ttft=1ms")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == (
        "pointsman: weighted: 95% are good not at any load down to 0.00390625; --load LESS begins below\n"
        "pointsman: there is no load at which 95% meet ttft=1ms\n"
    )


def test_a_level_that_everybody_meets_has_a_load_all_the_same() -> None:
    result = ran("--policy", "weighted", *KNEE, "--slo", "ttft=1000000s", "--json")
    assert (result.exit_code, len(json.loads(result.stdout))) == (0, 1)
    assert result.stderr == (
        "pointsman: weighted: 95% are good at every load up to 256; --load MORE begins above\n"
    )


def test_what_was_written_before_stays_where_a_run_fails(tmp_path: Path) -> None:
    table, missing = tmp_path / "rows.csv", tmp_path / "other.csv"
    table.write_text("before")
    for path in (table, missing):
        assert ran("--load", "1e-9", "--csv", str(path), *QUICK).exit_code == 1
    assert table.read_text() == "before" and not missing.exists()


@pytest.mark.parametrize("name", ["empty.csv", "empty.jsonl.gz"])
def test_a_trace_without_a_request_is_told(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(b"") if path.suffix == ".gz" else b"TIMESTAMP,A,B\n")
    result = ran("--workload", str(path), "--policy", "weighted", *QUICK)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == f"pointsman: workload {path}: there is no request in it\n"


def test_a_trace_is_a_workload(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    line = {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 3]}
    path.write_text("".join(json.dumps({**line, "timestamp": t * 500}) + "\n" for t in range(20)))
    (row,) = rows("--workload", str(path), "--policy", "affinity")
    assert row["requests"]["mean"] == 20 and row["hit_rate"]["mean"] > 0.8
    other = tmp_path / "trace.csv"
    other.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,37,4\n")
    (row,) = rows("--workload", str(other), "--policy", "affinity")
    assert row["requests"]["mean"] == 1


def test_what_if_answers_from_the_recorded_traffic(tmp_path: Path) -> None:
    path = recorded(tmp_path / "recorded.jsonl")
    config = tmp_path / "config.toml"
    config.write_text('[gateway]\nroute_policy = "least_outstanding"\naffinity_load_factor = 2.0\n')
    result = ran("--what-if", str(config), str(path), "--policy", "affinity", "--jobs", "1")
    assert result.exit_code == 0, result.output
    first, second, *_ = result.stdout.splitlines()
    # The recorded gateway took b always; the least loaded, and the smallest id among equals, is a.
    assert first == "least_outstanding decides 0 of 10 recorded decisions alike (0 have no loads)"
    assert second.startswith("affinity decides ")
    assert "(recorded)" in result.stdout and "on 2 workers" in result.stdout
    result = ran("--what-if", str(config), str(path), "--jobs", "1", "--json")
    before, after = json.loads(result.stdout)
    assert (before["policy"], after["policy"]) == ("(recorded)", "least_outstanding")
    assert before["requests"]["mean"] == after["requests"]["mean"] == 10
    assert (before["failed"]["mean"], before["ttft_p50"]["mean"]) == (1, 0.25)
    assert before["hit_rate"]["mean"] is None


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (
            ["--policy", "afinity"],
            "policy: no policy is called 'afinity', did you mean 'affinity'?",
        ),
        (
            ["--policy", "kv_cost:prefill_scale=1"],
            "policy kv_cost: there is no 'prefill_scale', did you mean prefill_load_scale?",
        ),
        (["--workload", "sesions"], "no workload is called 'sesions', did you mean sessions?"),
        (["--workload", "no/such"], "workload no/such: there is no such file"),
        (["--workload", "rag:zip=1"], "workload rag: there is no 'zip', did you mean zipf?"),
        (["--slo", "ttf=2s"], "slo: there is no 'ttf', did you mean ttft?"),
        (["--profile", "kv_token=1"], "profile: there is no 'kv_token', did you mean kv_tokens?"),
        (["--profile", "kv_tokens=0"], "profile: kv_tokens must be 1 to 68719476736, not 0"),
        (["--profile", "kv_tokens=x"], "profile: Expected `int`, got `str` - at `$.kv_tokens`"),
        (["--profile", "none.toml"], "profile none.toml: No such file or directory"),
        (["--profile", "smollm2"], "no profile is called 'smollm2', did you mean smollm2-cpu?"),
        (["--load", "much"], "load: 'much' is neither a number nor knee"),
        (["--load", "0"], "load: '0' is not more than 0"),
        (["--plot", "x.pdf"], "x.pdf: a plot is one of .svg, .png"),
        (["--csv", "no/such/x.csv"], "no/such/x.csv: No such file or directory"),
        (["--load", "1e12"], "load: 1e+12 would take 350000000000000 requests"),
        (["--load", "1e-9"], "load: 1e-09 is less than one request a day"),
    ],
)
def test_what_is_wrong_is_told_in_a_line(arguments: list[str], error: str) -> None:
    result = ran(*arguments, *QUICK)
    assert (result.exit_code, result.stderr) == (1, f"pointsman: {error}\n")
    assert result.stdout == ""


def test_files_that_cannot_be_understood_are_told(tmp_path: Path) -> None:
    path, profile = tmp_path / "x.jsonl", tmp_path / "x.toml"
    path.write_text("[]\n")
    profile.write_text("kv_tokens = \n")
    assert "neither a trace of Mooncake" in ran("--workload", str(path), *QUICK).stderr
    assert "not valid TOML" in ran("--profile", str(profile), *QUICK).stderr
    profile.write_text("kv_tokens = 100000\n")
    assert ran("--profile", str(profile), "--policy", "weighted", *QUICK).exit_code == 0
    for text, error in (
        ("kv_token = 1", "there is no 'kv_token', did you mean kv_tokens?"),
        ("kv_tokens = '1'", "Expected `int`, got `str` - at `$.kv_tokens`"),
        ("decode_base_s = 100", "decode_base_s must be 1e-12 to 60, not 100"),
        ("prefix_cache = 'page'", "Invalid enum value 'page' - at `$.prefix_cache`"),
        ("source = 1", "source is not a table"),
        ("[source]\nengines = ''", "source has no 'engines', did you mean engine?"),
        ("[source]\nengine = 1", "source.engine is not a text"),
    ):
        profile.write_text(text)
        said = ran("--profile", str(profile), *QUICK).stderr
        assert said == f"pointsman: profile {profile}: {error}\n"
    bad = recorded(tmp_path / "bad.jsonl")
    config = tmp_path / "config.toml"
    config.write_text("[gateway]\nroute_polcy = 1\n")
    assert "route_policy" in ran("--what-if", str(config), str(bad)).stderr
    config.write_text("[gateway]\n")
    bad.write_text('{"kind":"worker","id":"a","model":"m"}\n')
    assert "no request was recorded" in ran("--what-if", str(config), str(bad)).stderr
    assert "given together" in ran("--what-if", str(config)).output
    result = ran("--csv", str(tmp_path / "no" / "x"), "--policy", "weighted", *QUICK)
    assert "No such file" in result.stderr and result.exit_code == 1


@pytest.mark.slow
def test_the_demo_compares_all_policies() -> None:
    result = ran("--demo")
    assert result.exit_code == 0, result.output
    assert "3 seeds" in result.stdout and "sticky_until_saturated" in result.stdout
