"""From answers to a threshold."""

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pointsman.domain.acceptor import Acceptor
from pointsman.domain.cascade import parse_accept_if
from pointsman.sweep.asking import Answer, SweepError
from pointsman.sweep.reading import Prompt
from pointsman.sweep.sweeping import (
    Costs,
    Judge,
    Judged,
    Match,
    Sweep,
    auc,
    learn,
    metric_of,
    rule,
    sweep,
)

ONE, TEN = Costs(flat=1.0), Costs(flat=10.0)
MEAN = metric_of("mean_logprob")


def answer(
    text: str = "",
    logprobs: tuple[float | None, ...] = (-1.0,),
    margins: tuple[float | None, ...] = (),
    *,
    tokens: int = 1,
    seconds: float = 1.0,
) -> Answer:
    return Answer(text, logprobs, margins, 5, tokens, seconds)


def judged(
    logprob: float | None, small: float, large: float = 1.0, *, seconds: float = 1.0
) -> Judged:
    prompt = Prompt(1, "/v1/completions", {})
    one = answer(logprobs=() if logprob is None else (logprob,), seconds=seconds)
    return Judged(prompt, one, answer(seconds=10 * seconds), small, large)


GOOD = [judged(-0.1 * n, 1.0) for n in range(1, 9)]
BAD = [judged(-2.0 - 0.1 * n, 0.0) for n in range(2)]


def swept(
    answers: list[Judged], *, cost: float | None = None, quality: float | None = None
) -> Sweep:
    return sweep(
        answers,
        MEAN,
        small=ONE,
        large=TEN,
        target_cost=cost,
        target_quality=quality,
        resamples=200,
    )


@pytest.mark.parametrize(
    ("match", "text", "right"),
    [
        (Match.MENTIONS, "I say: Oslo.", 1.0),
        (Match.EQUALS, "I say: Oslo.", 0.0),
        (Match.EQUALS, " oslo.\n", 1.0),
        (Match.MENTIONS, "Bergen", 0.0),
    ],
)
def test_answers_are_judged_by_what_is_expected(match: Match, text: str, right: float) -> None:
    prompt = Prompt(1, "/v1/completions", {}, ("Oslo",))
    found = Judge(match, by_agreement=False).of(prompt, answer(text), answer("Oslo"))
    assert (found.small_quality, found.large_quality) == (right, 1.0)


def test_without_answers_the_large_model_is_right_and_the_small_one_agrees_with_it() -> None:
    prompt = Prompt(1, "/v1/completions", {}, ("Rome",))
    judge = Judge(Match.EQUALS, by_agreement=True)
    found = judge.of(prompt, answer("in Oslo"), answer("Oslo"))
    assert found.small_quality == pytest.approx(2 / 3)
    assert found.large_quality == 1.0


def test_a_perfect_score_has_its_knee_where_only_wrong_answers_are_escalated() -> None:
    found = swept([*BAD, *GOOD], cost=3.5, quality=0.95)
    knee, by_cost, by_quality = found.choices
    assert knee.wish == "knee"
    assert knee.point == by_cost.point == by_quality.point
    assert (knee.point.tau, knee.point.escalated) == (-0.8, 0.2)
    assert (knee.point.cost, knee.point.quality) == (3.0, 1.0)
    assert (found.auc, found.missed, found.unscored) == (1.0, [], 0)
    assert found.apgr == pytest.approx(0.9)


def test_intervals_hold_what_they_are_intervals_of_and_one_seed_gives_one() -> None:
    mixed = [judged(-0.1 * n, float(n % 3 > 0)) for n in range(40)]
    found, again = swept(mixed, quality=0.8), swept(mixed, quality=0.8)
    assert found == again
    assert found.apgr is not None and found.apgr_interval is not None
    assert found.apgr_interval[0] < found.apgr < found.apgr_interval[1]
    for choice in found.choices:
        assert choice.tau is not None and choice.cost is not None and choice.quality is not None
        assert choice.cost[0] <= choice.point.cost <= choice.cost[1]
        assert choice.quality[0] <= choice.point.quality <= choice.quality[1]
        assert choice.quality[0] < choice.quality[1]


def test_a_target_that_no_threshold_reaches_is_named() -> None:
    found = swept([judged(-1.0, 0.0, 0.5), judged(-2.0, 0.0, 0.0)], cost=0.5, quality=0.9)
    assert found.missed == ["knee", "cost of at most 0.5", "quality of at least 0.9"]
    assert found.choices == []


def test_an_answer_without_a_score_is_always_escalated() -> None:
    found = swept([judged(None, 1.0), *GOOD])
    assert found.unscored == 1
    assert found.points[0].escalated == pytest.approx(1 / 9)
    infinite = judged(-math.inf, 1.0)
    assert swept([infinite, *GOOD]).unscored == 1


def test_perplexity_keeps_what_is_low() -> None:
    found = sweep([*BAD, *GOOD], metric_of("perplexity"), small=ONE, large=TEN, resamples=20)
    assert found.keep == "<="
    knee = found.choices[0]
    assert knee.point.tau == pytest.approx(math.exp(0.8))
    assert (knee.point.escalated, found.auc) == (0.2, 1.0)


def test_costs_are_given_or_priced_or_the_seconds_that_were_measured() -> None:
    found = sweep([judged(-1.0, 1.0, seconds=2.0)], MEAN, small=Costs(), large=Costs(), resamples=1)
    assert [point.cost for point in found.points] == [2.0, 22.0]
    assert Costs(price=2e6).of(answer(tokens=3)) == 6.0
    assert Costs(flat=0.0, price=1.0).of(answer()) == 0.0


@given(
    st.lists(
        st.tuples(
            st.none() | st.floats(-9, 0),
            st.floats(0, 1),
            st.floats(0, 1),
            st.floats(0, 9),
        ),
        min_size=1,
        max_size=30,
    ),
    st.sampled_from(["mean_logprob", "min_logprob", "p10_logprob", "perplexity"]),
)
@settings(max_examples=60, deadline=None)
def test_the_curve_is_monotone_in_cost(
    answers: list[tuple[float | None, float, float, float]], metric: str
) -> None:
    given_answers = [
        judged(value, small, large, seconds=seconds) for value, small, large, seconds in answers
    ]
    found = sweep(given_answers, metric_of(metric), small=Costs(), large=Costs(), resamples=1)
    for low, high in pairwise(found.points):
        assert low.escalated < high.escalated
        assert low.cost <= high.cost
        assert (low.tau < high.tau) == (found.keep == ">=")
    assert found.points[-1].escalated == 1.0


@settings(deadline=None)
@given(st.floats(-1e300, 1e300), st.sampled_from(["mean_logprob", "perplexity"]))
def test_a_rule_is_read_back_to_the_last_bit(tau: float, metric: str) -> None:
    assert parse_accept_if(rule(metric, ">=", tau)).threshold == tau


def test_a_metric_is_a_score_or_what_an_acceptor_says() -> None:
    learned = Acceptor(("mean_logprob",), (0.0,), (1.0,), (1.0,), 0.0)
    accept = metric_of("score", learned)
    assert accept.value(answer().tokens()) == learned.probability(answer().tokens())
    with pytest.raises(SweepError, match="needs --acceptor"):
        metric_of("score")
    with pytest.raises(SweepError, match="'luck' is no score; there are mean_logprob"):
        metric_of("luck")


def test_without_answers_there_is_no_sweep() -> None:
    with pytest.raises(SweepError, match="no prompt was answered by both"):
        swept([])


def test_an_acceptor_is_tested_on_what_it_did_not_learn_from() -> None:
    answers = [judged(-0.5 - (n % 2), 1.0 - n % 2) for n in range(100)]
    learned = learn(answers, MEAN, seed=3)
    assert (learned.trained, learned.tested) == (70, 30)
    assert (learned.accuracy, learned.auc, learned.auc_of_metric) == (1.0, 1.0, 1.0)
    assert 0.5 <= learned.majority < 0.8
    assert learned.acceptor.features == ("mean_logprob", "min_logprob", "p10_logprob")
    assert learned == learn(answers, MEAN, seed=3)
    assert learned.acceptor != learn(answers, MEAN, seed=4).acceptor


def test_an_acceptor_of_noise_is_no_better_than_one_verdict() -> None:
    noise = [judged(-0.01 * (n * 7919 % 97), float(n * 31 % 17 % 3 == 0)) for n in range(300)]
    learned = learn(noise, metric_of("perplexity"))
    assert learned.accuracy == pytest.approx(learned.majority, abs=0.1)
    assert learned.auc == pytest.approx(0.5, abs=0.15)
    assert learned.auc_of_metric == pytest.approx(0.5, abs=0.15)


def test_answers_of_which_a_feature_is_unknown_teach_nothing() -> None:
    blank = [judged(None, 1.0) for _ in range(10)]
    learned = learn([*GOOD, *BAD, *GOOD, *BAD, *blank], MEAN, features=["min_logprob"])
    assert learned.trained + learned.tested == 20
    with pytest.raises(SweepError, match="cannot train an acceptor on 0 answers"):
        learn([*GOOD, *BAD], MEAN, features=["mean_margin"])


def test_what_cannot_be_learned_from_is_said() -> None:
    with pytest.raises(SweepError, match="answers that are wrong"):
        learn(GOOD, MEAN)
    with pytest.raises(SweepError, match="'luck' is no feature"):
        learn(GOOD, MEAN, features=["luck"])


def test_a_metric_that_is_unknown_ranks_below_all_others_in_a_test() -> None:
    answers = [judged(-0.5 - (n % 2), 1.0 - n % 2) for n in range(60)]
    learned = learn(answers, metric_of("mean_margin"))
    assert learned.auc_of_metric == 0.5


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5).map(float), st.booleans()), max_size=20),
)
def test_auc_is_that_of_all_pairs(pairs: list[tuple[float, bool]]) -> None:
    hits = [value for value, right in pairs if right]
    misses = [value for value, right in pairs if not right]
    found = auc([value for value, _ in pairs], [right for _, right in pairs])
    if not hits or not misses:
        assert found is None
    else:
        won = sum((a > b) + (a == b) / 2 for a in hits for b in misses)
        assert found == pytest.approx(won / len(hits) / len(misses))
