"""What is measured of an engine whose numbers are known, on a clock that does not run by itself."""

import asyncio
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from pointsman.dialect.engines import Reading
from pointsman.measure.asking import Answered, MeasureError
from pointsman.measure.measuring import Measured, Measuring, Settings, pace
from pointsman.measure.profiling import profile_from
from pointsman.measure.prompts import Prompts
from pointsman.simulate.profile import EngineProfile

SLOTTED = EngineProfile(
    prefill_tokens_per_s=200,
    prefill_context_s=6e-6,
    start_s=0.015,
    decode_base_s=0.004,
    decode_per_sequence_s=0.01,
    decode_context_s=5e-6,
    chunk_tokens=32,
    sequences_max=6,
    kv_tokens=6144,
    prefix_cache="slots",
)
PAGED = EngineProfile(
    prefill_tokens_per_s=5000,
    start_s=0.002,
    decode_base_s=0.01,
    decode_per_sequence_s=0.0003,
    chunk_tokens=512,
    prefix_cache="paged",
)


def measured(
    engine: Any, slots: int | None = None, concurrency: int = 16, longest: int = 800
) -> Measured:
    settings = Settings(longest, repeats=2, concurrency=concurrency)
    prompts = Prompts(Random(1))
    return asyncio.run(Measuring(engine, prompts, settings, lambda line: None).run(slots))


@pytest.mark.parametrize("tells", [True, False])
@pytest.mark.parametrize("profile", [SLOTTED, PAGED], ids=["slots", "paged"])
def test_the_numbers_of_an_engine_are_found(
    steps: Any, profile: EngineProfile, tells: bool
) -> None:
    longest = 800 if profile is SLOTTED else 4000
    seen = measured(steps(profile, tells=tells), longest=longest)
    found, assumed, prefill_error, decode_error = profile_from(
        seen, Reading(True), context=1024, given={}
    )
    assert found.prefill_tokens_per_s == pytest.approx(profile.prefill_tokens_per_s, rel=0.02)
    assert found.prefill_context_s == pytest.approx(profile.prefill_context_s, rel=0.05, abs=1e-8)
    assert found.start_s == pytest.approx(profile.start_s, abs=0.005)
    assert found.decode_base_s == pytest.approx(profile.decode_base_s, rel=0.05)
    assert found.decode_per_sequence_s == pytest.approx(profile.decode_per_sequence_s, rel=0.05)
    assert found.decode_context_s == pytest.approx(profile.decode_context_s, rel=0.1, abs=1e-8)
    assert found.chunk_tokens == profile.chunk_tokens
    assert found.prefix_cache == profile.prefix_cache
    assert prefill_error < 0.02 and decode_error < 0.02
    if profile is SLOTTED:
        assert (found.sequences_max, found.kv_tokens, assumed) == (6, 6144, ("block_tokens",))
    else:
        assert assumed == ("sequences_max", "kv_tokens", "block_tokens")


@pytest.mark.parametrize("told", [None, 1])
def test_an_engine_that_runs_one_at_a_time_can_be_measured(steps: Any, told: int | None) -> None:
    profile = replace(SLOTTED, sequences_max=1)
    seen = measured(steps(profile), slots=told)
    found = profile_from(seen, Reading(True), context=1024, given={}).profile
    assert (found.sequences_max, found.kv_tokens, found.prefix_cache) == (1, 1024, "slots")
    assert found.token_s(1, 500) == pytest.approx(profile.token_s(1, 500), rel=0.02)


def test_limits_between_powers_of_two_are_measured_where_they_are(steps: Any) -> None:
    for limit in (3, 5, 6, 7):
        seen = measured(steps(replace(SLOTTED, sequences_max=limit)))
        assert seen.sequences == limit == max(each.sequences for each in seen.decodes)


def test_what_the_engine_tells_is_believed(steps: Any) -> None:
    seen = measured(steps(SLOTTED), slots=6)
    assert [each.sequences for each in seen.decodes] == [1, 2, 4, 6, 1, 2]
    reading = Reading(True, kv_total_blocks=100, block_tokens=32)
    given = {"chunk_tokens": "64"}
    found = profile_from(seen, reading, context=0, given=given).profile
    assert (found.kv_tokens, found.block_tokens) == (3200, 32)
    assert found.chunk_tokens == 64


def test_no_prompt_is_asked_twice_but_the_one_that_is_to_be_found(steps: Any) -> None:
    engine = steps(SLOTTED)
    measured(engine)
    again = [text for text in set(engine.texts) if engine.texts.count(text) > 1]
    assert len(again) == 1 and engine.texts.count(again[0]) == 3
    assert len({tuple(text.split()[:16]) for text in engine.texts}) == len(set(engine.texts))


def test_an_engine_without_a_prefix_cache_is_told_from_others(steps: Any) -> None:
    profile = EngineProfile(
        prefill_tokens_per_s=1000, decode_base_s=0.01, chunk_tokens=64, prefix_cache="none"
    )
    for tells in (True, False):
        assert measured(steps(profile, tells=tells)).prefix_cache == "none"


def test_answers_that_are_over_too_soon_are_no_queue(steps: Any) -> None:
    # 16 prompts take longer to be computed than an answer of 48 tokens.
    profile = EngineProfile(
        prefill_tokens_per_s=500, decode_base_s=0.001, decode_per_sequence_s=0, chunk_tokens=16
    )
    assert measured(steps(profile), concurrency=128).sequences is None


def test_answers_that_say_nothing_are_no_measurement(steps: Any) -> None:
    with pytest.raises(MeasureError, match="answers end before"):
        measured(steps(SLOTTED, most=4))


def test_a_cache_that_knows_what_was_never_asked_is_no_measurement(steps: Any) -> None:
    with pytest.raises(MeasureError, match="never asked before"):
        measured(steps(SLOTTED, claims=5))


def test_a_pace_is_that_of_the_time_in_which_all_were_there() -> None:
    first = Answered(0.0, (*(0.1 * at for at in range(10)), 5.0, 5.5), 100, 12, -1)
    second = Answered(0.0, tuple(0.05 + 0.1 * at for at in range(10)), 50, 10, -1)
    sample = pace([first, second])
    assert sample is not None
    assert sample.seconds == pytest.approx(0.1)
    assert sample.context == pytest.approx(100 + 1 + 4.5 + 50 + 0 + 5)
    assert pace([first, Answered(0.0, (20.0, 21.0), 5, 2, -1)]) is None


def test_numbers_that_cannot_be_are_named(steps: Any) -> None:
    seen = measured(steps(SLOTTED))
    with pytest.raises(ValueError, match="chunk_tokens must be 1 to"):
        profile_from(seen, Reading(True), context=0, given={"chunk_tokens": "0"})
    with pytest.raises(ValueError, match="kv_tokens"):
        profile_from(seen, Reading(True), context=0, given={"kv_tokens": "many"})
