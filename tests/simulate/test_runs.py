"""Runs in a file: nothing is made twice, and the bytes do not depend on when what was made."""

from math import inf, isnan, nan
from pathlib import Path

import pytest
from msgspec.structs import fields

from pointsman.simulate.compare import Combination, Result
from pointsman.simulate.measures import Measures
from pointsman.simulate.runs import KeptRuns, read_runs, write_runs


def result(policy: str, load: float, seed: int, goodput: float = 1.0) -> Result:
    values = {field.name: 0.5 for field in fields(Measures)}
    values |= {"goodput": goodput, "tpot_p99": nan, "cost": inf}
    return Result(Combination(policy, load, seed), Measures(**values), [])


ALL = [result("b", 0.1 + 0.2, 0), result("a", 2.0, 1), result("a:x=1,y=2", 2.0, 0, 1 / 3)]


def test_runs_come_back_as_they_were_to_six_digits(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    write_runs(ALL, path)
    read = read_runs(path)
    assert [each.combination for each in read] == [
        Combination("b", 0.1 + 0.2, 0),
        Combination("a", 2.0, 1),
        Combination("a:x=1,y=2", 2.0, 0),
    ]
    assert read[2].measures.goodput == 0.333333
    assert isnan(read[0].measures.tpot_p99)
    assert read[0].measures.cost == inf


def test_the_order_in_which_runs_were_made_is_not_in_the_file(tmp_path: Path) -> None:
    one, other = tmp_path / "one.csv", tmp_path / "other.csv"
    with KeptRuns(one) as kept:
        for each in ALL:
            kept.add(each)
    with KeptRuns(other) as kept:
        kept.add(ALL[2])
    with KeptRuns(other) as kept:
        for each in ALL[:2]:
            kept.add(each)
    assert one.read_bytes() == other.read_bytes()
    # What was made now is as what was read: tables of both are the same.
    assert {each.measures.goodput for each in kept.results} == {1.0, 0.333333}


def test_only_what_is_lacking_has_to_be_made(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    wanted = [each.combination for each in ALL]
    kept = KeptRuns(path)
    assert (kept.lacking(wanted), kept.results) == (wanted, [])
    with kept:
        kept.add(ALL[1])
        assert [each.combination for each in read_runs(path)] == [wanted[1]]
    assert KeptRuns(path).lacking(wanted) == [wanted[0], wanted[2]]


def test_what_is_there_survives_an_error_and_a_line_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    with pytest.raises(KeyboardInterrupt), KeptRuns(path) as kept:
        kept.add(ALL[0])
        raise KeyboardInterrupt
    whole = path.read_bytes()
    path.write_bytes(whole + b"a,2.0,1,0.5")
    assert [each.combination for each in read_runs(path)] == [ALL[0].combination]
    with KeptRuns(path):
        pass
    assert path.read_bytes() == whole
    path.write_bytes(b"")
    assert read_runs(path) == []


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("policy,load\na,1\n")
    with pytest.raises(ValueError, match=r"^x\.csv: these are no runs$"):
        read_runs(path)
    write_runs(ALL, path)
    path.write_text(path.read_text() + "a,much,0\n")
    with pytest.raises(ValueError, match=r"^x\.csv: line 5: this is no run$"):
        read_runs(path)
