"""Comparisons: differences that are paired by seed, and tables of rows."""

from math import isnan

from msgspec.structs import fields

from pointsman.simulate.compare import Combination, Result, difference, rows
from pointsman.simulate.measures import Mean, Measures, mean_of
from pointsman.simulate.report import markdown


def result(policy: str, load: float, seed: int, goodput: float) -> Result:
    values = {field.name: 0.5 for field in fields(Measures)} | {"goodput": goodput}
    return Result(Combination(policy, load, seed), Measures(**values), [])


def test_what_a_seed_does_to_both_is_not_in_the_interval_of_their_difference() -> None:
    ours, theirs = (12.0, 22.0, 33.0), (10.0, 20.0, 30.0)
    results = [
        result(policy, 1.0, seed, value)
        for policy, values in (("ours", ours), ("theirs", theirs))
        for seed, value in enumerate(values)
    ]
    first, second = rows(results)
    assert (first.policy, second.policy) == ("ours", "theirs")
    seen = difference(results, first, second)
    assert seen == mean_of([2.0, 2.0, 3.0])
    assert seen.margin < first.means["goodput"].margin / 10
    assert difference(results, second, first).mean == -seen.mean


def test_seeds_that_only_one_has_are_left_out_and_loads_may_differ() -> None:
    results = [
        *(result("a", 1.0, seed, 5.0) for seed in (0, 1, 2)),
        *(result("b", 2.0, seed, 4.0) for seed in (1, 2, 3)),
        result("c", 2.0, 9, 4.0),
    ]
    by_name = {row.policy: row for row in rows(results)}
    assert difference(results, by_name["a"], by_name["b"]) == Mean(1.0, 0.0)
    assert isnan(difference(results, by_name["a"], by_name["c"]).mean)


def test_a_table_in_markdown_has_the_figures_that_were_asked_for() -> None:
    made = rows([result("a", 1.5, seed, 5.0 + seed) for seed in (0, 1)])
    text = markdown(made, ["goodput", "hit_rate"], {"more": ["x"]})
    assert text.splitlines() == [
        "| load | policy | good/s | cached | more |",
        "| ---: | --- | ---: | ---: | ---: |",
        "| 1.5 | a | 5.50 ± 6.4 | 50.0% | x |",
    ]
    assert markdown([], ["good"]).count("\n") == 2
