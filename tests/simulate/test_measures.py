"""Figures of runs: each as its definition says, on runs that can be worked out by hand."""

from math import inf, isnan, nan

import pytest

from pointsman.domain.worker import Role
from pointsman.simulate.knee import DOUBLINGS, find_knee
from pointsman.simulate.measures import (
    Mean,
    ServiceLevel,
    mean_of,
    means_of,
    measure,
    quantile,
    timeline,
)
from pointsman.simulate.outcome import Outcome, WorkerOutcome

Line = tuple[float, float, float, float]


def outcome(*lines: Line, busy: tuple[float, ...] = (3.0, 1.0)) -> Outcome:
    """Return a run of requests that came at, and took until the first token, between two, and in all."""
    made = Outcome(workers=[WorkerOutcome(f"w{n}", busy_s=each) for n, each in enumerate(busy)])
    for at, ttft, tpot, e2e in lines:
        index = made.begin(at, prompt=100, output=2, gateway=0)
        made.ttft[index], made.tpot[index], made.e2e[index] = ttft, tpot, e2e
        made.attempts[index] = 1
        made.worker[index] = index % len(busy)
        if not isnan(e2e):
            made.ended_at = max(made.ended_at, at + e2e)
    return made


def test_a_good_answer_keeps_every_limit() -> None:
    made = outcome(
        (0.0, 1.0, 0.05, 2.0),
        (1.0, 2.1, 0.05, 3.0),
        (2.0, 1.0, 0.06, 2.0),
        (3.0, 1.0, nan, 1.0),
        (4.0, 1.0, 0.01, nan),
    )
    level = ServiceLevel(ttft=2.0, tpot=0.05)
    assert [level.met(made, index) for index in range(5)] == [True, False, False, True, False]
    assert [ServiceLevel(e2e=1.5).met(made, index) for index in range(5)] == [
        *(False, False, False),
        *(True, False),
    ]
    seen = measure(made, level)
    assert (seen.requests, seen.failed, seen.good, seen.goodput) == (5, 1, 0.4, 0.5)
    # 2 workers for 4 seconds, and 2 good requests.
    assert seen.cost == 1000 * 2 * 4 / 2


def test_shares_balance_and_moves() -> None:
    made = outcome((0.0, 1.0, 0.1, 2.0), (2.0, 3.0, 0.3, 6.0))
    made.cached[0] = 50
    made.attempts[1] = 3
    seen = measure(made, ServiceLevel())
    assert (seen.hit_rate, seen.imbalance, seen.variation, seen.migrations) == (0.25, 1.5, 0.5, 2)
    assert seen.ttft_p50 == 2.0 and seen.e2e_p90 == pytest.approx(5.6)
    assert seen.tpot_p99 == pytest.approx(0.298)


def test_the_first_part_of_a_run_can_be_left_out() -> None:
    made = outcome(*[(float(at), 9.0 if at < 2 else 1.0, nan, 9.0) for at in range(11)])
    level = ServiceLevel(ttft=2.0)
    assert measure(made, level).good == pytest.approx(9 / 11)
    seen = measure(made, level, skip=0.2)
    assert (seen.requests, seen.good, seen.ttft_p99) == (9, 1.0, 1.0)
    assert seen.goodput == pytest.approx(9 / 8)


def test_what_is_left_out_counts_nowhere() -> None:
    made = outcome(*[(float(at), 1.0, nan, nan if at == 1 else 2.0) for at in range(11)])
    for index in range(2):
        made.cached[index], made.attempts[index], made.prefill[index] = 100, 3, 0
    seen = measure(made, ServiceLevel(), skip=0.2)
    assert (seen.requests, seen.failed, seen.good) == (9, 0, 1.0)
    assert (seen.hit_rate, seen.migrations, seen.handed_off) == (0.0, 0, 0.0)


def test_workers_are_compared_with_those_of_their_role() -> None:
    made = outcome((0.0, 1.0, nan, 2.0), (1.0, 1.0, nan, 3.0), busy=(1.0, 3.0, 1.0))
    for worker, role in zip(made.workers, (Role.PREFILL, Role.DECODE, Role.DECODE), strict=True):
        worker.role = role
    # The first request was handed off by the first worker.
    made.prefill[0] = 0
    seen = measure(made, ServiceLevel())
    assert (seen.imbalance, seen.variation, seen.handed_off) == (1.5, 0.5, 0.5)
    assert (seen.prefill_busy, seen.decode_busy) == (0.25, 0.5)


def test_nothing_is_no_figure() -> None:
    seen = measure(Outcome(), ServiceLevel())
    assert (seen.requests, seen.cost) == (0, inf)
    assert (
        isnan(seen.good) and isnan(seen.goodput) and isnan(seen.imbalance) and isnan(seen.ttft_p50)
    )
    # All at once: what was good came in the time until all was over.
    assert measure(outcome((0.0, 1.0, nan, 2.0)), ServiceLevel()).goodput == 0.5


@pytest.mark.parametrize(
    ("values", "q", "value"), [((), 0.5, nan), ((3.0,), 0.99, 3.0), ((1.0, 3.0), 1.0, 3.0)]
)
def test_quantiles_of_few(values: tuple[float, ...], q: float, value: float) -> None:
    assert quantile(values, q) == pytest.approx(value, nan_ok=True)


def test_the_interval_of_a_mean_is_that_of_student() -> None:
    # From a table: t(0.975) is 2.262 for 9 degrees of freedom, 2.086 for 20, 2.000 for 60.
    for count, t in ((10, 2.262), (21, 2.086), (61, 2.000)):
        values = [float(each % 2) for each in range(count)]
        mean = sum(values) / count
        deviation = (sum((each - mean) ** 2 for each in values) / (count - 1)) ** 0.5
        assert mean_of(values).margin == pytest.approx(t * deviation / count**0.5, rel=5e-4)
    assert mean_of([5.0]).mean == 5.0 and isnan(mean_of([5.0]).margin)
    assert mean_of([inf, 1.0]).mean == inf and isnan(mean_of([inf, 1.0]).margin)
    made = [measure(outcome((0.0, ttft, nan, 2.0)), ServiceLevel()) for ttft in (1.0, 3.0)]
    assert means_of(made)["ttft_p50"] == pytest.approx(Mean(2.0, 12.706))


def test_a_timeline_counts_who_is_there() -> None:
    made = outcome(
        (0.0, 1.0, nan, 4.0), (2.0, 1.0, nan, 1.0), (3.0, 1.0, nan, 1.0), (1.0, nan, nan, nan)
    )
    assert timeline(made, 4) == [[1, 1, 1, 2], [0, 0, 1, 1]]
    assert timeline(Outcome(workers=[WorkerOutcome("a")]), 2) == [[0, 0]]


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("ttft=2s,tpot=50ms", ServiceLevel(2.0, 0.05)),
        ("e2e=30", ServiceLevel(e2e=30.0)),
        (" ttft=0.5s , e2e=1s", ServiceLevel(ttft=0.5, e2e=1.0)),
    ],
)
def test_a_service_level_is_read(text: str, level: ServiceLevel) -> None:
    assert ServiceLevel.parse(text) == level


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("ttf=2s", "there is no 'ttf', did you mean ttft?"),
        ("", "there is no '', there are e2e, tpot, ttft"),
        ("ttft=2m", "ttft: '2m' is no time such as 2s or 50ms"),
        ("ttft=fast", "ttft: 'fast' is no time such as 2s or 50ms"),
        ("ttft=0", "ttft: '0' is not more than 0"),
        ("ttft=inf", "ttft: 'inf' is not more than 0"),
    ],
)
def test_a_service_level_that_is_none_is_told(text: str, error: str) -> None:
    with pytest.raises(ValueError) as raised:
        ServiceLevel.parse(text)
    assert str(raised.value) == error


@pytest.mark.parametrize("first", [0.01, 1.0, 13.0, 500.0])
def test_the_knee_is_found_from_anywhere(first: float) -> None:
    knee = find_knee(lambda load: 0.95 if load <= 13 else 0.94, first)
    assert 13 / 1.02 <= knee.load <= 13 < knee.above <= 13 * 1.02


def test_no_knee_is_told() -> None:
    assert find_knee(lambda load: 1.0, 1.0).above == inf
    nothing = find_knee(lambda load: 0.0, 1.0)
    assert nothing.load == 0.0 and nothing.tried == DOUBLINGS + 1
