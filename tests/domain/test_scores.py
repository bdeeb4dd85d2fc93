"""Each score by hand, and what counts as known."""

import math

import pytest

from pointsman.domain.scores import SCORES, Tokens, known

NAN = math.nan


def score(name: str, logprobs: list[float], margins: list[float] | None = None) -> float:
    return SCORES[name].of(Tokens(logprobs, margins or ()))


def test_every_score_goes_by_its_name_and_only_one_needs_margins() -> None:
    assert list(SCORES) == [
        *("mean_logprob", "min_logprob", "perplexity", "mean_margin", "p10_logprob"),
    ]
    assert all(name == score.name for name, score in SCORES.items())
    assert [name for name, score in SCORES.items() if score.needs_margins] == ["mean_margin"]


def test_the_scores_of_a_short_answer() -> None:
    logprobs = [-0.5, -2.0, -0.25, -1.25]
    assert score("mean_logprob", logprobs) == -1.0
    assert score("min_logprob", logprobs) == -2.0
    assert score("perplexity", logprobs) == math.e
    assert score("p10_logprob", logprobs) == -2.0
    assert score("mean_margin", logprobs, [0.5, 0.0, 3.0, 0.5]) == 1.0


@pytest.mark.parametrize(("n", "rank"), [(1, 1), (10, 1), (11, 2), (20, 2), (21, 3), (100, 10)])
def test_the_tenth_percentile_is_the_nearest_rank(n: int, rank: int) -> None:
    # Sorted, these are -n, ..., -2, -1.
    logprobs = [float(-(at * 7 % n) - 1) if math.gcd(7, n) == 1 else -at - 1.0 for at in range(n)]
    assert score("p10_logprob", logprobs) == -n + rank - 1


def test_means_are_plain_left_to_right_sums() -> None:
    # 0.1 ten times is 0.9999999999999999 by plain addition and 1.0 by the compensated sum() of CPython 3.12.
    assert score("mean_logprob", [0.1] * 10) == score("mean_margin", [0.0], [0.1] * 10) < 0.1


@pytest.mark.parametrize("logprob", [-9999.0, -math.inf])
def test_a_perplexity_beyond_all_floats_is_infinite(logprob: float) -> None:
    assert score("perplexity", [logprob]) == math.inf


@pytest.mark.parametrize(
    ("tokens", "alone", "with_margins"),
    [
        (Tokens([]), False, False),
        (Tokens([-1.0]), True, False),
        (Tokens([-1.0], [0.5]), True, True),
        (Tokens([-1.0, -2.0], [0.5]), True, False),
        (Tokens([-1.0], [NAN]), True, False),
        (Tokens([-1.0, NAN], [0.5, 0.5]), False, False),
        (Tokens([], [0.5]), False, False),
    ],
)
def test_what_is_known(tokens: Tokens, alone: bool, with_margins: bool) -> None:
    assert known(tokens, margins=False) is alone
    assert known(tokens, margins=True) is with_margins
