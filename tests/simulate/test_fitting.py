"""Numbers of profiles from times that were measured: found again through noise, and refused where they say nothing."""

from random import Random

import pytest

from pointsman.simulate.engine import ModelledEngine, Sequence
from pointsman.simulate.fitting import (
    DecodeSample,
    PromptSample,
    chunk_of,
    fit_decoding,
    fit_prompts,
    most_at_once,
    nonnegative_fit,
)
from pointsman.simulate.profile import EngineProfile

CPU = EngineProfile(
    prefill_tokens_per_s=190,
    prefill_context_s=8e-6,
    start_s=0.02,
    decode_base_s=0.002,
    decode_per_sequence_s=0.0105,
    decode_context_s=8e-6,
    chunk_tokens=32,
)
GPU = EngineProfile(
    prefill_tokens_per_s=20_000,
    prefill_context_s=2e-9,
    start_s=0.001,
    decode_base_s=0.03,
    decode_per_sequence_s=0.0003,
    chunk_tokens=8192,
)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("profile", [CPU, GPU], ids=["cpu", "gpu"])
def test_a_profile_is_found_again_through_noise(profile: EngineProfile, seed: int) -> None:
    random = Random(seed)
    lengths = (32, 64, 128, 256, 512, 1024, 2048, 4096)
    prompts = [
        PromptSample(n, profile.prompt_s(n) * random.gauss(1, 0.02)) for n in lengths for _ in "abc"
    ]
    decodes = [
        DecodeSample(k, k * each, profile.token_s(k, k * each) * random.gauss(1, 0.02))
        for k in (1, 2, 4, 8, 16)
        for each in (50, 800)
        for _ in "abc"
    ]
    speed, context_s, start_s, error = fit_prompts(prompts)
    fitted = fit_decoding(decodes)
    assert speed == pytest.approx(profile.prefill_tokens_per_s, rel=0.15)
    assert context_s * 4096 == pytest.approx(profile.prefill_context_s * 4096, rel=0.3, abs=2e-5)
    assert start_s == pytest.approx(profile.start_s, abs=0.05)
    assert error < 0.05 and fitted.error < 0.05
    again = EngineProfile(
        prefill_tokens_per_s=speed,
        prefill_context_s=context_s,
        start_s=start_s,
        decode_base_s=fitted.decode_base_s,
        decode_per_sequence_s=fitted.decode_per_sequence_s,
        decode_context_s=fitted.decode_context_s,
        chunk_tokens=profile.chunk_tokens,
    )
    # What is told by it is right within the noise, also where nothing was measured.
    for n in (700, 3000):
        assert again.prompt_s(n) == pytest.approx(profile.prompt_s(n), rel=0.06)
    for k, each in ((3, 400), (12, 100)):
        assert again.token_s(k, k * each) == pytest.approx(profile.token_s(k, k * each), rel=0.06)


def test_prompts_behind_the_base_of_a_step_are_not_looked_at() -> None:
    prompts = [PromptSample(n, GPU.prompt_s(n)) for n in (16, 32, 64, 128, 1024, 2048, 4096)]
    found = fit_prompts(prompts)
    assert found.prefill_tokens_per_s == pytest.approx(20_000, rel=1e-6)
    assert found.start_s == pytest.approx(0.001, rel=1e-3)


def test_what_the_modelled_engine_does_fits_its_profile() -> None:
    prompts = []
    for n in (100, 200, 400, 800):
        asked = Sequence((), n, 1)
        model: ModelledEngine[Sequence] = ModelledEngine(CPU, 16)
        model.submit(asked, 0.0)
        while not model.advance(model.due)[1]:
            pass
        prompts.append(PromptSample(n, asked.first_at))
    found = fit_prompts(prompts)
    assert found.prefill_tokens_per_s == pytest.approx(190, rel=1e-6)
    assert found.prefill_context_s == pytest.approx(8e-6, rel=1e-6)
    assert found.start_s == pytest.approx(0.02, rel=1e-6)


def test_a_number_that_would_be_negative_is_none() -> None:
    # A line through them meets 0 tokens below 0 seconds.
    found = fit_prompts([PromptSample(n, n / 100 - 0.1) for n in (20, 40, 80, 160)])
    assert found.start_s == 0 and found.prefill_tokens_per_s > 0
    steps = fit_decoding([DecodeSample(k, k, 0.01 * k - 0.005) for k in (1, 2, 4)])
    assert steps.decode_base_s == 1e-6 and steps.decode_per_sequence_s > 0


def test_an_engine_that_runs_one_at_a_time_has_a_base_alone() -> None:
    steps = [DecodeSample(1, context, 0.01 + 1e-6 * context) for context in (50, 800)]
    found = fit_decoding(steps, alone=True)
    assert found[:3] == pytest.approx((0.01, 0, 1e-6))
    with pytest.raises(ValueError, match="at least 2 numbers"):
        fit_decoding([], alone=True)


def test_without_longer_sequences_what_they_cost_is_not_guessed() -> None:
    steps = [DecodeSample(k, k * 50 + k * k, 0.01 + 0.001 * k + 1e-5 * k * k) for k in (1, 2, 4)]
    assert fit_decoding(steps).decode_context_s == 0
    steps.append(DecodeSample(1, 102, 0.01152))
    assert fit_decoding(steps).decode_context_s == pytest.approx(1e-5)


@pytest.mark.parametrize(
    ("prompts", "error"),
    [
        ([], "prompts of 0 lengths"),
        ([(100, 1.0), (100, 1.1), (200, 2.0)], "prompts of 1 lengths"),
        ([(100, 1.0), (200, 1.0), (400, 1.0)], "prompts of 0 lengths"),
        ([(0, 1.0)], "no prompt of 0 tokens"),
        ([(10, 0.0)], "takes 0 s"),
        ([(10, float("nan"))], "takes nan s"),
        ([(10, float("inf"))], "takes inf s"),
        ([(1, 0.1), (100, 1.0), (200, 4.0), (400, 16.0), (800, 64.0)], "no speed fits"),
    ],
)
def test_prompts_that_say_nothing_are_refused(prompts: list[tuple[int, float]], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        fit_prompts([PromptSample(*each) for each in prompts])


@pytest.mark.parametrize(
    ("steps", "error"),
    [
        ([], "at least 2 numbers"),
        ([(1, 10.0, 0.1), (1, 20.0, 0.2)], "at least 2 numbers"),
        ([(0, 10.0, 0.1)], "no step of 0 sequences"),
        ([(1, -1.0, 0.1)], "with -1 tokens"),
        ([(1, 1.0, float("nan"))], "takes nan s"),
        ([(1, 1.0, 0.0)], "takes 0 s"),
    ],
)
def test_steps_that_say_nothing_are_refused(
    steps: list[tuple[int, float, float]], error: str
) -> None:
    with pytest.raises(ValueError, match=error):
        fit_decoding([DecodeSample(*each) for each in steps])


@pytest.mark.parametrize(("rows", "values"), [([], []), ([(0.0, 0.0)], [1.0]), ([(-1.0,)], [1.0])])
def test_where_nothing_fits_it_is_said(rows: list[tuple[float]], values: list[float]) -> None:
    with pytest.raises(ValueError, match="nothing fits"):
        nonnegative_fit(rows, values)


def test_of_columns_that_say_the_same_one_is_used() -> None:
    found, error = nonnegative_fit([(1, 2), (2, 4), (3, 6)], [5, 10, 15])
    assert sorted(found) == [0, pytest.approx(max(found))] and error < 1e-9


def test_the_size_of_a_chunk_is_a_power_of_two() -> None:
    assert [chunk_of(tokens, steps) for tokens, steps in ((1000, 8), (900, 29), (97, 4))] == [
        *(128, 32),
        *(32,),
    ]
    assert chunk_of(2, 3) is None and chunk_of(4000, 2) is None


def test_spans_are_counted_where_most_of_them_meet() -> None:
    assert most_at_once([]) == 0
    assert most_at_once([(0, 10), (1, 2), (3, 4), (3, 5)]) == 3
    assert most_at_once([(1, 1), (1, 1)]) == 0
