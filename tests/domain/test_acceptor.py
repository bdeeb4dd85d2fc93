"""A learned acceptor finds the minimum, judges as its file says, and names what is wrong with a file."""

import json
import math
from random import Random

import pytest

from pointsman.domain.acceptor import Acceptor, acceptor_from_json, acceptor_to_json, train
from pointsman.domain.scores import SCORES, Tokens
from pointsman.errors import BadRule

LINE = Acceptor(("mean_logprob",), (-1.0,), (0.5,), (2.0,), bias=1.0)


def drawn(n: int, seed: int = 11) -> list[tuple[Tokens, bool]]:
    """Draw answers of known odds: logit(right) = 3 + 2 * the level of the logprobs."""
    random = Random(seed)
    samples = []
    for _ in range(n):
        level = random.uniform(-3, 0)
        logprobs = [level * random.uniform(0.8, 1.2) for _ in range(random.randrange(1, 9))]
        margins = [random.uniform(0, 2) for _ in logprobs]
        right = random.random() < 1 / (1 + math.exp(-(3 + 2 * level)))
        samples.append((Tokens(logprobs, margins), right))
    return samples


def log_loss(acceptor: Acceptor, samples: list[tuple[Tokens, bool]], ridge: float) -> float:
    loss = ridge / 2 * sum(weight**2 for weight in acceptor.weights)
    for tokens, right in samples:
        p = acceptor.probability(tokens)
        loss -= math.log(p if right else 1 - p)
    return loss


def moved(acceptor: Acceptor, at: int, by: float) -> Acceptor:
    """Return the acceptor with one weight, or for -1 the bias, changed."""
    weights = list(acceptor.weights)
    if at >= 0:
        weights[at] += by
    bias = acceptor.bias + (by if at < 0 else 0)
    return Acceptor(acceptor.features, acceptor.means, acceptor.scales, tuple(weights), bias)


class TestProbability:
    def test_it_is_the_sigmoid_of_the_standardised_features(self) -> None:
        # 1 + 2 * (-1.5 + 1) / 0.5 = -1
        assert LINE.probability(Tokens([-1.0, -2.0])) == pytest.approx(1 / (1 + math.e))

    def test_every_feature_counts(self) -> None:
        both = Acceptor(("min_logprob", "mean_margin"), (0, 1), (1, 2), (1.0, 4.0), bias=0.5)
        # 0.5 + (-2) + 4 * (2 - 1) / 2 = 0.5
        tokens = Tokens([-2.0, -1.0], [1.0, 3.0])
        assert both.probability(tokens) == pytest.approx(1 / (1 + math.exp(-0.5)))

    def test_margins_are_needed_where_a_feature_needs_them(self) -> None:
        assert not LINE.needs_margins
        assert Acceptor(("mean_margin",), (0,), (1,), (1,), 0).needs_margins

    @pytest.mark.parametrize(("logprob", "expected"), [(0.0, 1.0), (-1e300, 0.0), (-math.inf, 0.0)])
    def test_a_wild_score_says_no_more_than_a_far_one(
        self, logprob: float, expected: float
    ) -> None:
        steep = Acceptor(("min_logprob",), (-1.0,), (1e-3,), (500.0,), bias=0.0)
        assert steep.probability(Tokens([logprob])) == pytest.approx(expected, abs=1e-300)
        assert 0 < LINE.probability(Tokens([logprob])) < 1


class TestTraining:
    @pytest.mark.parametrize("ridge", [0.01, 1.0, 50.0])
    def test_no_step_in_any_direction_makes_it_better(self, ridge: float) -> None:
        samples = drawn(200)
        acceptor = train(samples, tuple(SCORES), ridge)
        best = log_loss(acceptor, samples, ridge)
        for at in range(-1, len(acceptor.weights)):
            for by in (-1e-3, 1e-3):
                assert log_loss(moved(acceptor, at, by), samples, ridge) > best

    def test_it_finds_the_odds_that_the_answers_were_drawn_with(self) -> None:
        acceptor = train(drawn(4000), ("mean_logprob",), 1e-3)
        slope = acceptor.weights[0] / acceptor.scales[0]
        assert slope == pytest.approx(2, abs=0.2)
        assert acceptor.bias - slope * acceptor.means[0] == pytest.approx(3, abs=0.3)

    def test_two_answers_by_hand(self) -> None:
        # Features -1 and -3 are -1 and 1 after standardising; by symmetry the bias is 0 and the weight w solves
        # w = 2 * (1 - sigmoid(w)), which is 0.8353 (ridge 1).
        acceptor = train([(Tokens([-1.0]), True), (Tokens([-3.0]), False)], ("min_logprob",))
        assert (acceptor.means, acceptor.scales) == ((-2.0,), (1.0,))
        weight = acceptor.weights[0]
        assert weight == pytest.approx(2 * (1 - 1 / (1 + math.exp(-weight))))
        assert acceptor.bias == pytest.approx(0, abs=1e-9)

    def test_the_same_answers_give_the_same_weights(self) -> None:
        assert acceptor_to_json(train(drawn(60))) == acceptor_to_json(train(drawn(60)))

    def test_answers_that_a_line_separates_have_an_end(self) -> None:
        samples = [(Tokens([-0.001 * at]), at < 50) for at in range(100)]
        acceptor = train(samples, ridge=1e-6)
        assert all((acceptor.probability(tokens) > 0.5) is right for tokens, right in samples)

    def test_full_steps_that_would_run_away_are_halved(self) -> None:
        answers = [(-1.0, 0.0, True), (-9.0, 2.0, False), (-9.0, 2.0, False), (-8.0, 1.0, False)]
        answers.append((-8.0, 2.0, True))
        samples = [(Tokens([logprob], [margin]), right) for logprob, margin, right in answers]
        features, ridge = ("min_logprob", "mean_margin"), 1e-6
        acceptor = train(samples, features, ridge)
        best = log_loss(acceptor, samples, ridge)
        assert best < log_loss(moved(acceptor, 0, -acceptor.weights[0]), samples, ridge)
        for tokens, right in samples:
            assert (acceptor.probability(tokens) > 0.9) is right

    def test_a_feature_that_never_varies_weighs_nothing(self) -> None:
        samples = [(Tokens([-0.1, -0.1], [0.7, 0.7]), right) for right in (True, False, True)]
        acceptor = train(samples, ("mean_logprob", "mean_margin"))
        assert acceptor.weights == pytest.approx((0, 0))
        assert acceptor.probability(samples[0][0]) == pytest.approx(2 / 3)

    def test_one_wild_answer_does_not_outvote_the_others(self) -> None:
        wild = [(Tokens([-200.0]), True)]
        acceptor = train([*drawn(300), *wild], ("mean_logprob", "perplexity"))
        assert acceptor.probability(Tokens([-0.5])) > 0.8
        assert acceptor.probability(Tokens([-2.5])) < 0.2

    @pytest.mark.parametrize(
        ("samples", "features", "ridge", "message"),
        [
            ([], ("min_logprob",), 1.0, "answers that are wrong"),
            ([(Tokens([-1.0]), True)] * 3, ("min_logprob",), 1.0, "answers that are wrong"),
            (drawn(30), (), 1.0, "features are some of"),
            (drawn(30), ("loudness",), 1.0, "features are some of"),
            (drawn(30), ("min_logprob", "min_logprob"), 1.0, "features are some of"),
            (drawn(30), ("min_logprob",), 0.0, "ridge"),
            (drawn(30), ("min_logprob",), math.inf, "ridge"),
            (drawn(30), ("min_logprob",), math.nan, "ridge"),
            ([*drawn(30), (Tokens([]), True)], ("min_logprob",), 1.0, "no tokens"),
            ([*drawn(30), (Tokens([math.nan]), True)], ("min_logprob",), 1.0, "no tokens"),
            ([*drawn(30), (Tokens([-1.0]), True)], ("mean_margin",), 1.0, "no tokens"),
            ([*drawn(30), (Tokens([-math.inf]), True)], ("min_logprob",), 1.0, "too large"),
            ([*drawn(30), (Tokens([-9999.0]), True)], ("perplexity",), 1.0, "too large"),
        ],
    )
    def test_what_nothing_can_be_learned_from_is_refused(
        self,
        samples: list[tuple[Tokens, bool]],
        features: tuple[str, ...],
        ridge: float,
        message: str,
    ) -> None:
        with pytest.raises(ValueError, match=message):
            train(samples, features, ridge)


class TestFile:
    def test_every_bit_comes_back(self) -> None:
        acceptor = train(drawn(50), tuple(SCORES))
        assert acceptor_from_json(acceptor_to_json(acceptor)) == acceptor

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"features": []}, "`features` is empty"),
            ({"features": ["mean_logprob", "mean_logprob"]}, "names one twice"),
            ({"features": ["loudness"]}, "'loudness' is not one of mean_logprob"),
            ({"features": "mean_logprob"}, "Expected `array`"),
            ({"means": []}, "`means` has not as many"),
            ({"scales": [1, 2]}, "`scales` has not as many"),
            ({"weights": []}, "`weights` has not as many"),
            ({"scales": [0]}, "`scales` must be above 0"),
            ({"scales": [-1]}, "`scales` must be above 0"),
            ({"bias": "0"}, "$.bias"),
            ({"bias": None}, "$.bias"),
            ({"wieghts": [1]}, "wieghts"),
        ],
    )
    def test_what_is_wrong_is_named(self, change: dict[str, object], message: str) -> None:
        content = {**json.loads(acceptor_to_json(LINE)), **change}
        with pytest.raises(BadRule) as caught:
            acceptor_from_json(json.dumps(content).encode())
        assert message in caught.value.message
        assert caught.value.message.startswith("acceptor: ")

    @pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b'{"bias": NaN}'])
    def test_what_is_no_acceptor_is_refused(self, data: bytes) -> None:
        with pytest.raises(BadRule, match="acceptor: "):
            acceptor_from_json(data)
