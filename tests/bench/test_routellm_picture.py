"""The reference picture on verdicts of two models."""

import gzip
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "bench" / "routellm.py"
HEADER = "subject,prompt,weak_correct,strong_correct"


@pytest.fixture(scope="module")
def routellm() -> ModuleType:
    spec = importlib.util.spec_from_file_location("routellm", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """An easy subject, one where the strong model helps, and one that is too hard for both."""
    rows = [HEADER]
    for n in range(300):
        rows.append(f'easy,"a, {n}\nb",{int(n % 10 > 0)},{int(n % 11 > 0)}')
        rows.append(f"gain,{n},{int(n % 4 == 0)},{int(n % 9 > 0)}")
        rows.append(f"hard,{n},{int(n % 7 == 0)},{int(n % 8 == 0)}")
    path = tmp_path / "verdicts.csv.gz"
    path.write_bytes(gzip.compress("\n".join(rows).encode()))
    return path


def test_more_knowledge_recovers_more(routellm: ModuleType, file: Path) -> None:
    found = routellm.verdicts(file)
    assert len(found) == 900
    recovered = {
        name: routellm.apgr(samples) for name, samples in routellm.routed(found, seed=1).items()
    }
    assert recovered["oracle"] > recovered["perfect accept rule"] > 0.9
    assert recovered["by subject, strong's gain"] > 0.7
    assert recovered["by subject, strong's gain"] > recovered["by subject, weak's accuracy"]
    assert recovered["coin"] == pytest.approx(0.5, abs=0.1)


def test_no_question_is_scored_by_its_own_verdict(routellm: ModuleType) -> None:
    verdict = routellm.Verdict
    # Each subject has one question: held out, nothing is known of it but the mean of the others.
    found = [verdict(str(n), float(n < 10), 1.0) for n in range(20)]
    scores = routellm.held_out(found, lambda each: each.weak, 1)
    flipped = [found[0]._replace(weak=0.0), *found[1:]]
    assert routellm.held_out(flipped, lambda each: each.weak, 1)[0] == scores[0]
    assert all(0.3 < score < 0.7 for score in scores)


def test_the_table_has_a_line_for_each_router(file: Path) -> None:
    run = subprocess.run(
        [sys.executable, str(SCRIPT), str(file), "--resamples", "3"],
        capture_output=True,
        text=True,
        check=True,
    )
    lines = run.stdout.splitlines()
    assert lines[0].startswith("900 questions; weak right ")
    assert [line.split(" | ")[0] for line in lines[4:]] == [
        "| oracle",
        "| perfect accept rule",
        "| by subject, weak's accuracy",
        "| by subject, strong's gain",
        "| coin",
    ]
