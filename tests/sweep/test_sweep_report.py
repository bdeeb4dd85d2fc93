"""A sweep as a table, as CSV and as a picture."""

import csv
import importlib.util
import io
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from pointsman.domain.curve import Point, Sample, curve
from pointsman.sweep.asking import SweepError
from pointsman.sweep.plot import check_plot, draw
from pointsman.sweep.report import learned_lines, report, shown, write_csv
from pointsman.sweep.sweeping import Choice, Learned, Sweep

SAMPLES = [
    Sample(None if n == 0 else -0.01 * n, float(n % 3 > 0), 1.0, 1.0, 10.0) for n in range(60)
]
POINTS = curve(SAMPLES)
KNEE = Choice("knee", POINTS[31], (-0.4, -0.2), (3.0, 8.0), None)
SWEEP = Sweep(
    "mean_logprob", ">=", SAMPLES, POINTS, 0.7, (0.6, 0.8), None, [KNEE], ["cost of at most 0.5"]
)

needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="needs the plot extra"
)


def text_of(sweep: Sweep, rows: int = 8) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(report(sweep, unit="calls", quality="accuracy", rows=rows))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_table_has_both_models_some_thresholds_and_the_rule_to_use() -> None:
    text = text_of(SWEEP)
    assert "60 prompts; small alone: accuracy 66.7%, cost 1; large alone: accuracy 100.0%" in text
    assert "gap recovered (APGR): 0.700 (0.600 to 0.800), at random 0.5" in text
    assert "(AUC): undefined" in text
    assert "small answers without a mean_logprob, always escalated: 1" in text
    assert f'knee: accept_if = "mean_logprob >= {KNEE.point.tau}"' in text
    assert "(-0.4 to -0.2)" in text
    assert "(no interval)" in text
    assert "cost of at most 0.5: no threshold does" in text
    [marked] = [line for line in text.splitlines() if line.rstrip().endswith("knee")]
    assert f"{KNEE.point.escalated:.1%}" in marked


def test_a_curve_without_a_knee_says_so() -> None:
    text = text_of(Sweep("m", ">=", SAMPLES, POINTS, 0.5, None, 0.5, [], ["knee"]))
    assert "no knee: no threshold does better than escalating at random" in text


@pytest.mark.parametrize("rows", [2, 3, 8, 59, 60, 1000])
def test_about_as_many_thresholds_are_shown_as_wanted_and_all_that_are_marked(rows: int) -> None:
    found = shown(SWEEP, rows)
    assert min(rows, len(POINTS)) <= len(found) <= min(rows, len(POINTS)) + 1
    assert {POINTS[0], POINTS[-1], KNEE.point} <= set(found)
    assert found == sorted(found, key=lambda point: point.escalated)


def test_one_threshold_is_shown_as_one() -> None:
    single = [Point(0.0, 1.0, 11.0, 1.0)]
    assert shown(Sweep("m", ">=", SAMPLES[:1], single, None, None, None, [], []), 12) == single


def test_csv_has_every_threshold_with_every_bit() -> None:
    file = io.StringIO()
    write_csv(SWEEP, file)
    rows = list(csv.DictReader(io.StringIO(file.getvalue())))
    found = [
        Point(*(float(row[name]) for name in ("tau", "escalated", "cost", "quality")))
        for row in rows
    ]
    assert found == POINTS
    assert [row["marked"] for row in rows if row["marked"]] == ["knee"]
    costs = [point.cost for point in found]
    assert costs == sorted(costs)


def test_what_was_learned_is_told_beside_what_it_must_beat() -> None:
    from pointsman.domain.acceptor import Acceptor

    acceptor = Acceptor(("mean_logprob", "min_logprob"), (0.0,) * 2, (1.0,) * 2, (1.0,) * 2, 0.0)
    text = learned_lines(Learned(acceptor, 70, 30, 0.8, 0.7, 0.9, None))
    assert text == (
        "acceptor of mean_logprob, min_logprob: learned from 70 answers; right about 80.0% of 30 others\n"
        "(one verdict for all of them: 70.0%); AUC there 0.900, of the score alone undefined"
    )


@needs_matplotlib
@pytest.mark.slow
def test_a_picture_names_what_it_shows_and_is_the_same_again(tmp_path: Path) -> None:
    one, two = tmp_path / "a.svg", tmp_path / "b.svg"
    for path in (one, two):
        draw(SWEEP, path, unit="calls", quality="accuracy")
    assert one.read_bytes() == two.read_bytes()
    words = [node.text for node in ElementTree.parse(one).iter() if node.text]
    assert {"small alone", "large alone", "knee", "accuracy", "cost per prompt (calls)"} <= set(
        words
    )


@needs_matplotlib
@pytest.mark.slow
def test_a_picture_may_be_pixels_and_of_a_falling_score(tmp_path: Path) -> None:
    falling = Sweep("perplexity", "<=", SAMPLES[:1], curve(SAMPLES[:1]), None, None, None, [], [])
    draw(falling, tmp_path / "a.png", unit="s", quality="agreement")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SweepError, match=r"cannot write .*a\.svg: No such file"):
        draw(SWEEP, tmp_path / "gone" / "a.svg", unit="s", quality="agreement")


def test_a_picture_that_cannot_be_drawn_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SweepError, match=r"a\.pdf: a plot is one of \.svg, \.png"):
        check_plot(Path("a.pdf"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SweepError, match=r"pip install 'pointsman\[plot\]'"):
        check_plot(Path("a.svg"))
