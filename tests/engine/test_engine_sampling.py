"""The generator and the sampling order, vector by vector."""

import math
import random

import numpy as np
import pytest

from pointsman.engine.sampling import (
    SAMPLE,
    Pcg32,
    Sampler,
    SamplingParams,
    _nucleus,
    child_seed,
    stream,
)

M = 2**63 - 1
X = np.array([1.0, 3.0, 2.0, 3.0, -1.0], np.float32)


def greedy(**more: float) -> SamplingParams:
    return SamplingParams(temperature=0, **more)  # type: ignore[arg-type]


def test_pcg32_gives_the_published_words() -> None:
    random42, random0 = Pcg32(42), Pcg32(0)
    words = [random42.next() for _ in range(6)]
    assert [f"{word:08x}" for word in words] == [
        "a15c02b7", "7b47f409", "ba1d3330", "83d2f293", "bfa4784b", "cbed606e",
    ]  # fmt: skip
    assert [random0.next() for _ in range(4)] == [1203932051, 3113183783, 2101201694, 4034269462]


@pytest.mark.parametrize(
    ("seed", "child", "uniforms"),
    [
        (0, 0xF88BB8A8724C81EC, [0.8020949661137535, 0.5753080192559342, 0.3536325443338164, 0.15149505622840476]),
        (1, 0x71C18690EE42C90B, [0.7862116605501065, 0.33651468719692, 0.5529155781624499, 0.04220113837353867]),
        (7, 0x953AEB70673E29CB, [0.2777772068769715, 0.3827307730539452, 0.38417148281937397, 0.6294108160424986]),
        (77, 0x326BB017690269BB, [0.06486027583456122, 0.043030660159278034, 0.6705962063118663, 0.30847830064208037]),
        (1234, 0x4E6241F252D0A033, [0.26644276892701657, 0.5008362331013435, 0.8475931778953685, 0.5897054782901996]),
        (M, 0x2020319894995BFB, [0.463733728726497, 0.9101558468480733, 0.5053155098345786, 0.22758302603091396]),
    ],
)  # fmt: skip
def test_the_sample_stream_of_a_seed(seed: int, child: int, uniforms: list[float]) -> None:
    # Every uniform is a multiple of 2**-53, which also tells a misprinted digit.
    assert all((value * 2**53).is_integer() for value in uniforms)
    assert child_seed(seed, SAMPLE) == child
    generator = stream(seed, SAMPLE)
    assert [generator.uniform() for _ in range(4)] == uniforms


def test_worked_example_keeps_two_tokens() -> None:
    samplers = (Sampler(SamplingParams(top_k=3, top_p=0.8, seed=seed)) for seed in range(200))
    assert {sampler.pick(X).token for sampler in samplers} == {1, 3}


def test_a_negative_seed_is_taken_modulo_two_to_the_64() -> None:
    assert stream(-1, SAMPLE).uniform() == stream(2**64 - 1, SAMPLE).uniform()


def test_worked_example_of_the_sampling_order() -> None:
    chosen = Sampler(SamplingParams(top_k=3, top_p=0.8, seed=0)).pick(X)
    assert chosen.token == 3
    assert chosen.logprob == pytest.approx(-0.92487, abs=5e-6)


def test_greedy_takes_the_lowest_id_among_equals_and_draws_nothing() -> None:
    sampler = Sampler(greedy())
    assert [sampler.pick(X).token for _ in range(3)] == [1, 1, 1]
    assert sampler._random.uniform() == stream(0, SAMPLE).uniform()


def test_every_sampled_token_costs_one_uniform_and_skip_passes_over_them() -> None:
    whole, later = (Sampler(SamplingParams(seed=9)) for _ in range(2))
    tokens = [whole.pick(X).token for _ in range(40)]
    later.skip(10)
    assert [later.pick(X).token for _ in range(30)] == tokens[10:]


def test_top_k_keeps_the_lower_id_among_equals() -> None:
    tokens = {Sampler(SamplingParams(top_k=1, seed=seed)).pick(X).token for seed in range(50)}
    assert tokens == {1}


def test_top_p_includes_the_token_that_reaches_it_and_no_more() -> None:
    q = np.exp(X) / np.exp(X).sum()
    reach = float(q[1] + q[3])

    def sample(p: float) -> set[int]:
        return {Sampler(SamplingParams(top_p=p, seed=s)).pick(X).token for s in range(300)}

    assert sample(reach - 0.01) == {1, 3}
    assert sample(reach + 0.01) == {1, 2, 3}
    assert sample(1e-9) == {1}


def test_top_p_looks_beyond_its_first_guess_when_the_distribution_is_flat() -> None:
    flat = np.zeros(1000)
    tokens = {Sampler(SamplingParams(top_p=0.5, seed=seed)).pick(flat).token for seed in range(400)}
    assert max(tokens) < 501
    assert len(tokens) > 100
    nearly = {Sampler(SamplingParams(top_p=1 - 1e-16, seed=s)).pick(flat).token for s in range(200)}
    assert max(nearly) > 900


def test_top_p_above_a_rounded_sum_keeps_everything() -> None:
    assert sorted(_nucleus(np.array([0.5, 0.25, 0.125]), 0.99)) == [0, 1, 2]


def test_min_p_is_measured_against_the_most_likely_token_that_is_left() -> None:
    tokens = {Sampler(SamplingParams(min_p=0.5, seed=seed)).pick(X).token for seed in range(300)}
    assert tokens == {1, 3}


def test_repetition_penalty_divides_positive_and_multiplies_negative_scores_once_per_id() -> None:
    scores = np.array([4.0, 3.0, -1.0])
    sampler = Sampler(greedy(repetition_penalty=2, top_logprobs=3), prompt=[0, 0, 2])
    chosen = sampler.pick(scores)
    assert chosen.token == 1
    expected = np.array([2.0, 3.0, -2.0])
    expected -= math.log(sum(math.exp(value) for value in expected))
    assert dict(chosen.top) == pytest.approx(dict(enumerate(expected)))


def test_presence_and_frequency_count_generated_tokens_only() -> None:
    scores = np.array([1.0, 0.9])
    sampler = Sampler(greedy(presence_penalty=0.05, frequency_penalty=0.1), prompt=[0, 0, 0])
    # 0: 1.0, then 1.0-0.15; 1: 0.9, then 0.9-0.15; 0 again at 0.85, then at 0.75.
    assert [sampler.pick(scores).token for _ in range(4)] == [0, 1, 0, 0]


def test_logprobs_come_before_the_temperature_and_alternatives_best_first() -> None:
    cold = Sampler(SamplingParams(temperature=0.1, seed=3, top_logprobs=4)).pick(X)
    total = sum(math.exp(value) for value in X)
    assert cold.logprob == pytest.approx(math.log(math.exp(X[cold.token]) / total))
    assert [token for token, _ in cold.top] == [1, 3, 2, 0]


def test_the_logits_are_left_as_they_were() -> None:
    logits = X.astype(np.float64)
    Sampler(SamplingParams(presence_penalty=1, repetition_penalty=2), prompt=[1]).pick(logits)
    assert (logits == X).all()


def test_a_draw_above_a_rounded_sum_takes_the_last_possible_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sampler = Sampler(SamplingParams(top_k=2))
    monkeypatch.setattr(type(sampler._random), "uniform", lambda self: 1.0)
    assert sampler.pick(np.array([5.0, 1.0, 4.0, 0.0])).token == 2


def test_frequencies_follow_the_softmax() -> None:
    sampler = Sampler(SamplingParams(temperature=2, seed=random.Random(5).getrandbits(63)))
    n = 20_000
    counts = np.bincount([sampler.pick(X).token for _ in range(n)], minlength=5)
    q = np.exp(X / 2)
    q /= q.sum()
    # 4 degrees of freedom: P(chi2 > 18.47) = 0.001, and the seed is fixed.
    assert float(((counts - n * q) ** 2 / (n * q)).sum()) < 18.47
