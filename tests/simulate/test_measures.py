"""Quantiles, service levels, intervals and knees."""

import math

import pytest

from pointsman.simulate.knee import knee
from pointsman.simulate.measures import (
    Estimate,
    ServiceLevel,
    estimate,
    measure,
    parse_level,
    quantile,
)
from pointsman.simulate.outcome import Outcome


def outcome(count: int = 100) -> Outcome:
    """Requests one second apart; the later, the slower."""
    made = Outcome(2)
    for number in reversed(range(count)):
        made.at.append(float(number))
        made.ttft.append(number / 100)
        made.tpot.append(0.01)
        made.e2e.append(1.0)
        made.prompt.append(100)
        made.output.append(10)
        made.cached.append(25)
        made.worker.append(0)
        made.attempts.append(2 if number == 50 else 1)
    made.busy_s = [30.0, 10.0]
    return made


def test_the_first_tenth_is_not_judged_and_the_rest_is_by_when_it_came() -> None:
    found = measure(outcome(), ServiceLevel(ttft=0.5))
    assert (found.requests, found.migrations, found.hit_rate) == (90, 1, 0.25)
    assert (found.ttft_p50, found.ttft_p99) == (0.54, 0.99)
    assert found.good == pytest.approx(41 / 90)
    assert found.goodput == pytest.approx(41 / 89)
    assert found.imbalance == 1.5


def test_who_was_refused_was_not_served_well() -> None:
    made = outcome()
    made.refused = 90
    found = measure(made, ServiceLevel())
    assert (found.good, found.refused) == (0.5, 90)
    nothing = measure(Outcome(1), ServiceLevel())
    assert (nothing.good, nothing.goodput, nothing.hit_rate, nothing.imbalance) == (0, 0, 0, 1)


@pytest.mark.parametrize(
    ("text", "word"),
    [("ttft=2", "ttft=2"), ("speed=2s", "'speed'"), ("ttft=fast", "ttft=fast"), ("", "''"),
     ("ttft=-1s", "ttft=-1s"), ("e2e=1s,tpot=", "tpot=")],
)  # fmt: skip
def test_a_service_level_that_is_none_names_the_part(text: str, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        parse_level(text)


def test_service_levels_are_read_in_their_units() -> None:
    assert parse_level(" e2e=10s , tpot=500us") == ServiceLevel(math.inf, 0.0005, 10.0)


def test_a_quantile_is_a_value_that_was_measured() -> None:
    values = [float(number) for number in range(1, 101)]
    assert [quantile(values, share) for share in (0.0, 0.5, 0.95, 1.0)] == [1, 50, 95, 100]
    assert quantile([], 0.5) == 0.0


def test_intervals_are_those_of_student_and_a_single_run_has_none() -> None:
    assert estimate([5.0]) == Estimate(5.0, 0.0)
    assert estimate([4.0, 6.0]).half == pytest.approx(12.706)
    assert estimate([1.0, 3.0] * 50).half == pytest.approx(1.96 * 1.00504 / 10, rel=1e-4)


@pytest.mark.parametrize("at", [0.3, 7.0, 7.9, 900.0])
def test_a_knee_is_found_from_either_side(at: float) -> None:
    tried: list[float] = []

    def good(rate: float) -> float:
        tried.append(rate)
        return 0.99 if rate <= at else 0.5

    found = knee(good, 8.0)
    assert found <= at <= found * 1.02
    assert len(tried) < 20


def test_no_knee_is_made_up() -> None:
    assert knee(lambda rate: 0.5, 8.0) == 0.0
    assert knee(lambda rate: 1.0, 8.0) == 8.0 * 2**11
