"""Simulated hand-offs: what each worker does, how long it takes, and what becomes of a hand-off that fails."""

from collections.abc import Callable
from math import isnan
from random import Random

import pytest

from pointsman.domain.policy.kv_cost import KvCost
from pointsman.domain.request import InferenceRequest
from pointsman.domain.worker import Worker
from pointsman.simulate.outcome import Outcome
from pointsman.simulate.profile import EngineProfile
from pointsman.simulate.run import Failure, Scenario, simulate
from pointsman.simulate.synthetic import RECIPES, Synthetic
from pointsman.simulate.workload import Arrival, Listed

BLOCKS = tuple(range(1, 63))
"""Of a prompt of 8,000 tokens, all but its end."""


def one(count: int = 1, gap_s: float = 3.0, blocks: tuple[int, ...] = BLOCKS) -> Listed:
    return Listed([Arrival(number * gap_s, blocks, 8000, 101) for number in range(count)], 128)


def run(workload: Listed, **values: object) -> Outcome:
    values = {"workers": 0, "prefill_workers": 1, "decode_workers": 1, **values}
    return simulate(Scenario(workload=workload, policy="least_outstanding", **values))  # type: ignore[arg-type]


def test_a_prompt_is_computed_here_pushed_and_answered_there() -> None:
    outcome = run(one())
    prefill, decode = outcome.workers
    transfer = EngineProfile().transfer_s(8000)
    # 8,000 tokens at 8,000 tokens/s, the push, and a step for the last token.
    assert outcome.ttft[0] == pytest.approx(1.0 + transfer + 0.006)
    assert outcome.tpot[0] == pytest.approx(0.00635)
    assert (list(outcome.worker), list(outcome.prefill), list(outcome.attempts)) == ([1], [0], [1])
    assert (prefill.requests, prefill.computed_tokens, prefill.received_tokens) == (1, 8000, 0)
    assert (decode.requests, decode.computed_tokens, decode.received_tokens) == (1, 1, 7999)


def test_only_what_the_decode_worker_lacks_is_pushed() -> None:
    outcome = run(one(2))
    # Both have the 62 blocks of the first one.
    assert outcome.workers[1].received_tokens == 7999 + 8000 - 1 - 62 * 128
    assert list(outcome.cached) == [0, 62 * 128]
    assert outcome.ttft[1] == pytest.approx(
        64 / 8000 + EngineProfile().transfer_s(8000 - 62 * 128) + 0.006, abs=1e-4
    )


def test_a_short_prompt_is_computed_by_the_decode_worker() -> None:
    outcome = run(one(), disagg_min_tokens=8001)
    assert (list(outcome.worker), list(outcome.prefill)) == ([1], [-1])
    assert [each.requests for each in outcome.workers] == [0, 1]


def test_one_prompt_is_pushed_after_the_other() -> None:
    slow = EngineProfile(transfer_bytes_per_s=131_072 * 4000, chunk_tokens=16_000)
    outcome = run(Listed([Arrival(0.0, (), 8000, 2) for _ in range(2)], 128), profile=slow)
    # Both are computed in one step, but the wire takes two seconds for each.
    first, second = sorted(outcome.ttft)
    assert second - first == pytest.approx(2.0 + slow.handoff_s, abs=0.02)


def test_a_prefill_worker_is_free_again_when_it_has_pushed() -> None:
    outcome = run(one(3), prefill_workers=2)
    assert list(outcome.prefill) == [0, 0, 0]


def test_a_prefill_worker_that_comes_back_has_nothing_to_push() -> None:
    slow = EngineProfile(transfer_bytes_per_s=131_072 * 800)
    outcome = run(one(2), profile=slow, failures=(Failure(0, 1.5, 2.0),))
    # The push of the first one, of ten seconds, ended with it.
    assert outcome.failed(0)
    assert outcome.ttft[1] == pytest.approx(1.0 + slow.transfer_s(8000) + 0.006)


def test_what_a_prefill_worker_computes_does_not_wait_at_the_decode_worker() -> None:
    pending: list[tuple[int, ...]] = []

    class Asking(KvCost):
        def pick(
            self,
            workers: tuple[Worker, ...],
            load: Callable[[Worker], int],
            request: InferenceRequest,
        ) -> tuple[Worker, str]:
            pending.append(tuple(worker.pending_tokens for worker in workers))
            return super().pick(workers, load, request)

    simulate(
        Scenario(
            workload=one(2, gap_s=0.1),
            policy=lambda options, random: Asking(options.index()),
            workers=0,
            prefill_workers=1,
            decode_workers=1,
        )
    )
    assert pending == [(0,), (0,)]


def test_a_decode_worker_takes_a_prompt_when_it_has_room() -> None:
    small = EngineProfile(kv_tokens=8200)
    outcome = run(Listed([Arrival(n * 0.001, (), 8000, 100) for n in range(2)], 128), profile=small)
    assert outcome.ttft[1] > outcome.e2e[0]
    assert not isnan(outcome.e2e[1])


def test_what_was_handed_over_is_computed_where_it_lost_its_place() -> None:
    # Room for both prompts, and not for both answers.
    small = EngineProfile(kv_tokens=4300)
    arrivals = [Arrival(n * 0.001, (), 2000, 250) for n in range(2)]
    outcome = run(Listed(arrivals, 128), profile=small)
    decode = outcome.workers[1]
    assert decode.preemptions == 1
    assert decode.computed_tokens > 2000
    assert not any(map(isnan, outcome.e2e))


def test_without_prefill_workers_a_unified_one_is_asked() -> None:
    failures = (Failure(1, 0.0),)
    outcome = run(one(1), workers=1, failures=failures)
    assert (list(outcome.worker), list(outcome.attempts)) == ([0], [2])
    assert not isnan(outcome.e2e[0])


@pytest.mark.parametrize("at", [0.5, 1.05])
def test_a_prefill_worker_that_dies_computing_or_pushing_is_left_out(at: float) -> None:
    outcome = run(one(), prefill_workers=2, failures=(Failure(0, at),))
    assert (list(outcome.prefill), list(outcome.worker), list(outcome.attempts)) == ([1], [2], [2])
    assert outcome.ttft[0] == pytest.approx(at + 1.1, abs=0.01)
    assert not isnan(outcome.e2e[0])


@pytest.mark.parametrize("at", [0.5, 1.05, 1.098])
def test_a_decode_worker_that_dies_before_its_answer_has_begun_is_left_out(at: float) -> None:
    outcome = run(one(), decode_workers=2, failures=(Failure(1, at),))
    assert (list(outcome.worker), list(outcome.attempts)) == ([2], [2])
    assert not isnan(outcome.e2e[0])
    # The prefill worker still has the prompt.
    assert outcome.cached[0] == 62 * 128


def test_what_is_pushed_elsewhere_does_not_mind_who_dies() -> None:
    both = Listed([Arrival(0.0, (), 8000, 2) for _ in range(2)], 128)
    outcome = run(both, prefill_workers=2, decode_workers=2, failures=(Failure(0, 1.05),))
    assert sorted(outcome.attempts) == [1, 2]
    assert list(outcome.prefill) == [1, 1]


def test_an_answer_that_has_begun_breaks_with_its_decode_worker() -> None:
    outcome = run(one(), decode_workers=2, failures=(Failure(1, 1.2),))
    assert outcome.failed(0)
    assert list(outcome.attempts) == [1]


def test_attempts_are_bounded() -> None:
    failures = tuple(Failure(number, 0.0) for number in range(4))
    outcome = run(one(), prefill_workers=4, decode_workers=4, failures=failures)
    assert outcome.failed(0)
    assert list(outcome.attempts) == [3]


def test_a_prompt_that_no_decode_worker_has_room_for_is_refused() -> None:
    small = {1: EngineProfile(kv_tokens=4000)}
    outcome = run(one(), profiles=small)
    assert outcome.failed(0)
    assert list(outcome.attempts) == [1]


def test_a_prompt_that_the_prefill_worker_has_no_room_for_is_refused() -> None:
    outcome = run(one(), profiles={0: EngineProfile(kv_tokens=4000)})
    assert outcome.failed(0)
    assert [each.requests for each in outcome.workers] == [0, 0]


def test_everything_comes_back_whatever_fails() -> None:
    arrivals = [Arrival(n * 0.05, (n,) * 8, 1200, 60) for n in range(400)]
    failures = (Failure(1, 2.0, 6.0), Failure(2, 3.0, 5.0), Failure(3, 7.0, 12.0))
    outcome = run(
        Listed(arrivals, 128),
        workers=1,
        prefill_workers=2,
        decode_workers=2,
        failures=failures,
        heartbeat_loss=0.1,
        gateways=2,
    )
    lost = sum(map(outcome.failed, range(400)))
    assert 0 < lost < 60
    assert {*outcome.worker} == {0, 3, 4}
    assert {*outcome.prefill} == {-1, 1, 2}


@pytest.mark.parametrize("missing", ["prefill_workers", "decode_workers"])
def test_prefill_and_decode_workers_go_together(missing: str) -> None:
    with pytest.raises(ValueError, match=f"^{missing} must be at least 1$"):
        run(one(), **{missing: 0})


def test_numbers_of_a_scenario_are_checked() -> None:
    with pytest.raises(ValueError, match=r"^workers must be at least 0$"):
        run(one(), workers=-1)
    with pytest.raises(ValueError, match=r"^disagg_min_tokens must be at least 0$"):
        run(one(), disagg_min_tokens=-1)


def test_pairing_hands_off_what_would_make_others_wait() -> None:
    """While nobody is being answered, a hand-off costs time and gains nothing."""
    arrivals = [Arrival(0.0, (), 400, 400), *(Arrival(0.5, (), 8000, 10) for _ in range(2))]
    outcome = run(Listed(arrivals, 128), pairing=EngineProfile().pairing())
    assert outcome.prefill[0] == -1
    assert 0 in list(outcome.prefill)[1:]


@pytest.mark.parametrize("load", [4.0, 14.0])
@pytest.mark.parametrize("bytes_per_s", [12.5e9, 1.25e9])
def test_answers_are_complete_earlier_than_with_hand_offs_always_and_never(
    load: float, bytes_per_s: float
) -> None:
    """docs/disaggregation.md has more of these figures, of `bench/pairing.py`."""
    profile = EngineProfile(transfer_bytes_per_s=bytes_per_s)
    means = []
    for values in (
        {"pairing": profile.pairing()},
        {},
        {"disagg_min_tokens": 1_000_000},
    ):
        drawn = Synthetic(RECIPES["agents"], load, 600, Random(1))
        scenario = Scenario(
            workload=drawn,
            workers=0,
            prefill_workers=3,
            decode_workers=3,
            profile=profile,
            **values,
        )
        outcome = simulate(scenario)
        means.append(sum(outcome.e2e) / len(outcome))
    assert means[0] < min(means[1:])
