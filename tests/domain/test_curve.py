"""The curve, its knee, the targets and the gap recovered, against examples worked by hand."""

import math
from collections.abc import Sequence
from random import Random

import pytest

from pointsman.domain.cascade import CascadeSample, cascade_curve
from pointsman.domain.curve import (
    Point,
    Sample,
    apgr,
    best_for,
    cheapest_for,
    cpt,
    curve,
    interval,
    knee,
)


def sample(value: float | None, small: float, large: float) -> Sample:
    """Return a sample of a small answer for 1 and a large one for 10."""
    return Sample(value, small, large, small_cost=1.0, large_cost=10.0)


# In the order of their values: c (no value) and b escalate first.
A, B, C, D = sample(-0.5, 1, 1), sample(-2.0, 0, 1), sample(None, 0.5, 0.25), sample(-0.5, 0, 1)
FOUR = [A, B, C, D]


def triples(points: Sequence[Point]) -> list[tuple[float, float, float]]:
    return [(p.escalated, p.cost, p.quality) for p in points]


class TestCurve:
    def test_four_prompts_by_hand(self) -> None:
        assert curve(FOUR) == [
            # All but C are kept: 1 + 0 + 0.25 + 0.
            Point(-2.0, 0.25, 3.5, 0.3125),
            # A and D are kept: 1 + 1 + 0.25 + 0.
            Point(-0.5, 0.5, 6.0, 0.5625),
            # None is: 1 + 1 + 0.25 + 1.
            Point(0.5, 1.0, 11.0, 0.8125),
        ]

    def test_an_answer_at_the_threshold_is_kept(self) -> None:
        points = curve(FOUR, [-0.5, math.nextafter(-0.5, 0), math.nextafter(-0.5, -1), -9.0])
        assert [p.escalated for p in points] == [0.5, 1.0, 0.5, 0.25]
        assert [p.tau for p in points][-1] == -9.0

    def test_a_score_that_falls_with_doubt_turned_around_is_the_same_curve(self) -> None:
        turned = [
            Sample(
                None if s.value is None else -s.value,
                s.small_quality,
                s.large_quality,
                s.small_cost,
                s.large_cost,
            )
            for s in FOUR
        ]
        points = curve(turned, keep="<=")
        assert triples(points) == triples(curve(FOUR))
        assert [p.tau for p in points] == [2.0, 0.5, -0.5]
        assert triples(curve(turned, [0.5], keep="<=")) == triples(curve(FOUR, [-0.5]))

    def test_answers_without_a_value_alone_are_all_escalated(self) -> None:
        assert curve([C, C]) == [Point(0.0, 1.0, 11.0, 0.25)]

    def test_no_samples_have_no_curve(self) -> None:
        with pytest.raises(ValueError, match="no samples"):
            curve([])

    def test_it_agrees_with_the_curve_of_the_specification(self) -> None:
        random = Random(3)
        published = [
            CascadeSample([random.uniform(-3, 0)], random.random() < 0.5, random.random() < 0.9)
            for _ in range(300)
        ]
        samples = [
            Sample(s.small_logprobs[0], s.small_correct, s.large_correct, 0.1, 1.0)
            for s in published
        ]
        taus = [-3.0 + 0.25 * step for step in range(13)]
        for mine, theirs in zip(
            curve(samples, taus), cascade_curve(published, taus, 0.1), strict=True
        ):
            assert mine.escalated == theirs.escalated
            assert mine.cost == pytest.approx(theirs.cost)
            assert mine.quality == pytest.approx(theirs.accuracy)

    def test_more_is_escalated_and_paid_from_point_to_point(self) -> None:
        random = Random(4)
        points = curve(
            [
                Sample(
                    round(random.uniform(-3, 0), 1),
                    *(random.random() for _ in range(4)),
                )
                for _ in range(500)
            ]
        )
        assert len(points) == 32
        for axis in ("tau", "escalated", "cost"):
            values = [getattr(point, axis) for point in points]
            assert values == sorted(values)


class TestKnee:
    def test_it_is_the_point_farthest_above_the_chord(self) -> None:
        # Scaled: (0, 0), (0.1, 0.3), (0.3, 0.75), (0.6, 0.95), (1, 1): 0.2, 0.45 and 0.35 above.
        costs, qualities = (2.0, 3.0, 5.0, 8.0, 12.0), (0.4, 0.52, 0.7, 0.78, 0.8)
        points = [
            Point(at, at / 4, cost, quality)
            for at, (cost, quality) in enumerate(zip(costs, qualities, strict=True))
        ]
        assert knee(points) == points[2]
        assert knee(points[::-1]) == points[2]

    def test_of_two_as_far_the_cheaper_is_taken(self) -> None:
        points = [Point(at, 0, at, at) for at in (0.0, 4.0)]
        points += [Point(1, 0, 1.0, 2.0), Point(2, 0, 2.0, 3.0)]
        found = knee(points)
        assert found is not None
        assert found.tau == 1

    @pytest.mark.parametrize(
        "points",
        [
            [],
            [Point(0, 0, 1, 0.5)],
            [Point(at, 0, at * 0.1, at * 0.3) for at in range(10)],
            [Point(0, 0, 1, 0.5), Point(1, 0.5, 2, 0.5), Point(2, 1, 3, 0.5)],
            [Point(0, 0, 1, 0.5), Point(1, 0.5, 2, 0.9), Point(2, 1, 3, 0.4)],
            [Point(0, 0, 1, 0.1), Point(1, 0.5, 2, 0.2), Point(2, 1, 3, 0.9)],
            [Point(0, 0, 1, 0.1), Point(1, 0.5, 1, 0.9)],
        ],
        ids=["none", "one", "line", "flat", "falling", "below", "upright"],
    )
    def test_some_curves_have_none(self, points: list[Point]) -> None:
        assert knee(points) is None


POINTS = [
    Point(0, 0.0, 1, 0.5),
    Point(1, 0.3, 4, 0.8),
    Point(2, 0.6, 7, 0.8),
    Point(3, 0.8, 9, 0.95),
    Point(4, 1.0, 11, 0.9),
]


@pytest.mark.parametrize(
    ("quality", "tau"),
    [(0.0, 0), (0.5, 0), (0.51, 1), (0.8, 1), (0.85, 3), (0.95, 3), (0.96, None)],
)
def test_the_cheapest_point_of_a_quality(quality: float, tau: float | None) -> None:
    found = cheapest_for(POINTS, quality)
    assert (found and found.tau) == tau


@pytest.mark.parametrize(
    ("cost", "tau"), [(0.9, None), (1, 0), (3.9, 0), (4, 1), (8, 1), (9, 3), (99, 3)]
)
def test_the_best_point_of_a_cost(cost: float, tau: float | None) -> None:
    found = best_for(POINTS, cost)
    assert (found and found.tau) == tau


class TestGapRecovered:
    # Escalated fraction and quality from the least sure on: 0: 1/4, 1/4: 1/4, 2/4: 2/4, 3/4: 3/4, 1: 3/4.
    # Small model 1/4, large model 3/4, so recovered: 0, 0, 1/2, 1, 1.
    SAMPLES = (sample(-4, 0, 0), sample(-3, 0, 1), sample(-2, 0, 1), sample(-1, 1, 1))

    def test_its_average_by_hand(self) -> None:
        # Trapezoids of width 1/4: (0 + 0.25 + 0.75 + 1) / 4.
        assert apgr(self.SAMPLES) == 0.5

    @pytest.mark.parametrize(
        ("gap", "fraction"), [(0, 0), (0.25, 0.375), (0.5, 0.5), (0.75, 0.625), (1, 0.75)]
    )
    def test_the_calls_for_a_part_of_it_by_hand(self, gap: float, fraction: float) -> None:
        assert cpt(self.SAMPLES, gap) == fraction

    def test_an_oracle_escalates_what_the_small_model_gets_wrong(self) -> None:
        samples = [sample(float(small), small, 1) for small in (0, 0, 1, 1, 1, 1, 1, 1)]
        # Up to (1/4, 1), then flat.
        assert apgr(samples) == 1 - 0.25 / 2
        assert cpt(samples, 1) == 0.25

    def test_a_score_that_says_nothing_gives_one_half(self) -> None:
        assert apgr([sample(-1.0, at % 2, 1) for at in range(10)]) == 0.5
        random = Random(5)
        average = apgr([sample(random.random(), random.random() < 0.4, 1) for _ in range(4000)])
        assert average == pytest.approx(0.5, abs=0.02)

    def test_answers_without_a_value_are_escalated_in_no_order(self) -> None:
        # The line goes from (0, 0) straight to (1/2, 1).
        samples = [sample(None, 0, 1), sample(None, 0, 1), sample(-1, 1, 1), sample(-2, 1, 1)]
        assert apgr(samples) == 0.75
        assert cpt(samples, 0.5) == 0.25

    def test_it_may_pass_the_large_model(self) -> None:
        # The large model breaks what the small one got right: recovered 0, 2, 1.
        samples = [sample(-2, 0, 1), sample(-2, 0, 1), sample(-1, 1, 0), sample(-1, 0, 0)]
        assert apgr(samples) == 1.25
        assert cpt(samples, 1) == 0.25

    def test_both_senses_of_a_score(self) -> None:
        turned = [sample(-(s.value or 0), s.small_quality, s.large_quality) for s in self.SAMPLES]
        assert apgr(turned, keep="<=") == apgr(self.SAMPLES)
        assert cpt(turned, 0.25, keep="<=") == 0.375

    @pytest.mark.parametrize("large", [0.5, 0.25])
    def test_without_a_gap_there_is_nothing_to_recover(self, large: float) -> None:
        samples = [sample(-1, 0.5, large), sample(-2, 0.5, large)]
        assert apgr(samples) is None
        assert cpt(samples, 0.5) is None

    @pytest.mark.parametrize("gap", [-0.1, 1.1, math.nan])
    def test_a_gap_is_a_fraction(self, gap: float) -> None:
        with pytest.raises(ValueError, match="0 to 1"):
            cpt(self.SAMPLES, gap)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


class Cycle:
    """A source of randomness that gives the same numbers round and round."""

    def __init__(self, *numbers: float) -> None:
        self.numbers = numbers
        self.at = -1

    def random(self) -> float:
        self.at = (self.at + 1) % len(self.numbers)
        return self.numbers[self.at]


class TestInterval:
    def test_every_draw_is_one_sample(self) -> None:
        # Three sets of two: (a, a), (a, b), (b, b).
        source = Cycle(0.0, 0.49, 0.2, 0.5, 0.7, 0.99)
        assert interval([0.0, 1.0], mean, source, resamples=3, level=0.95) == (0.0, 1.0)
        assert interval([0.0, 1.0], mean, source, resamples=3, level=0.3) == (0.5, 0.5)

    def test_the_ends_are_left_out(self) -> None:
        # Of 20 results, 1 at either end: resamples of one sample are the sample.
        source = Cycle(*(0.5 + at / 1000 for at in range(20)))
        drawn: list[float] = []

        def each(values: Sequence[float]) -> float:
            drawn.append(values[0])
            return float(len(drawn))

        assert interval([7.0], each, source, resamples=20, level=0.9) == (2.0, 19.0)
        assert drawn == [7.0] * 20

    def test_it_covers_the_truth_as_often_as_it_says(self) -> None:
        random = Random(6)
        covered = 0
        for _ in range(200):
            found = interval(
                [random.gauss(3, 1) for _ in range(40)], mean, random, resamples=200, level=0.9
            )
            assert found is not None
            covered += found[0] <= 3 <= found[1]
        # Binomial(200, 0.9) less what 40 samples cost: 5 standard deviations are 21.
        assert 155 <= covered <= 198

    def test_sets_without_a_result_do_not_count(self) -> None:
        results = iter([None, 1.0, 2.0, None, 3.0, 4.0])
        found = interval([0.0], lambda _: next(results), Cycle(0.0), resamples=6, level=0.01)
        assert found == (2.0, 3.0)

    def test_where_most_have_none_there_is_no_interval(self) -> None:
        results = iter([None, 1.0, None])
        assert interval([0.0], lambda _: next(results), Cycle(0.0), resamples=3) is None

    @pytest.mark.parametrize(
        ("samples", "resamples", "level"),
        [([], 10, 0.9), ([1.0], 0, 0.9), ([1.0], 10, 0.0), ([1.0], 10, 1.0), ([1.0], 10, math.nan)],
    )
    def test_what_makes_no_interval_is_refused(
        self, samples: list[float], resamples: int, level: float
    ) -> None:
        with pytest.raises(ValueError, match="an interval needs"):
            interval(samples, mean, Cycle(0.0), resamples=resamples, level=level)
