"""What least_delay adds up is what its formula says, and what it measures is what happened."""

from math import exp, inf
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pointsman.domain.ledger import Lease
from pointsman.domain.placement import Placement
from pointsman.domain.policy.least_delay import (
    ANSWER_MAX_S,
    ANSWER_S,
    CROWD,
    LATE,
    LOOKED_AT,
    MEETING,
    MISS_S,
    RECENT_S,
    SPEED,
    SURE_TOKENS,
    UNPROVEN,
    WORK,
    LeastDelay,
)
from pointsman.domain.policy.tokens import QUEUED_TOKENS
from pointsman.domain.prefix_index import PrefixIndex
from pointsman.domain.request import InferenceRequest
from pointsman.domain.worker import Worker, load_of
from pointsman.testing.policies import check_policy

BLOCK = 512
START = UNPROVEN * SPEED
"""The speed of a worker of which nothing is known, in a fleet of which nothing is."""


def fleet(count: int = 2, cached_tokens: int = -1) -> tuple[Worker, ...]:
    made = [Worker(f"w{n:04}", model="m", http_address="h:1") for n in range(count)]
    for worker in made:
        worker.cached_tokens = cached_tokens
    return tuple(made)


def policy(target_s: float = 2.0) -> LeastDelay:
    return LeastDelay(PrefixIndex(1 << 16, 3600.0), Random(1), ttft_target_s=target_s)


def of(*blocks: int, tokens: int = 0, stream: bool = True) -> InferenceRequest:
    request = InferenceRequest.of_blocks("m", "r", blocks, tokens or BLOCK * len(blocks), BLOCK)
    request.stream = stream
    return request


def answered(one: LeastDelay, worker: Worker, tokens: int, at: float, seconds: float) -> None:
    """Let a worker compute an unknown prompt in so many seconds, and answer at once."""
    placement = one.placed(worker, of(tokens=tokens), at)
    placement.began(at + seconds)
    placement.ended()


def scores(one: LeastDelay, workers: tuple[Worker, ...], request: InferenceRequest) -> list[float]:
    """Return the added delays in seconds."""
    return [float(each or 0) / 1000 for each in one.consider(workers, load_of, request).scores]


def test_it_keeps_the_contract_of_policies() -> None:
    check_policy(policy)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 20_000)), min_size=1, max_size=LOOKED_AT),
    st.integers(1, 30_000),
    st.sampled_from((0.5, 2.0, inf)),
)
# The first is late, though not for what it waits.
@example([(0, 11_000), (0, 0)], 9000, 2.0)
def test_the_scores_are_the_formula(
    states: list[tuple[int, int]], prompt: int, target_s: float
) -> None:
    one, workers = policy(target_s), fleet(len(states))
    for worker, (count, pending) in zip(workers, states, strict=True):
        worker.in_flight, worker.pending_tokens = count, pending
    late = min(pending + prompt for _, pending in states) / START > target_s
    expected = []
    for count, pending in states:
        own = prompt / START
        cost = (LATE if late else 1.0) * pending / START + (WORK + MEETING * count) * own
        cost += CROWD * count
        if not late and (pending + prompt) / START > target_s:
            cost += MISS_S
        expected.append(cost)
    assert scores(one, workers, of(tokens=prompt)) == pytest.approx(expected)
    picked, reason = one.pick(workers, load_of, of(tokens=prompt))
    assert expected[workers.index(picked)] == pytest.approx(min(expected))
    assert reason == "load"


def test_b09_what_others_have_waiting_there_is_waited_for() -> None:
    one, (a, b) = policy(), fleet()
    a.in_flight, a.queue_depth = 1, 4
    b.in_flight, b.pending_tokens = 1, 3 * QUEUED_TOKENS
    first, second = scores(one, (a, b), of(tokens=500))
    assert first == second
    # Its own are not counted twice.
    a.queue_depth = 1
    expected = second - 3 * QUEUED_TOKENS / START
    assert scores(one, (a, b), of(tokens=500))[0] == pytest.approx(expected)


def test_who_has_the_prompt_computes_less_and_is_affinity_if_that_decides() -> None:
    one, workers = policy(), fleet()
    one.placed(workers[1], of(1, 2), 0.0).ended()
    assert one.pick(workers, load_of, of(1, 2, 3)) == (workers[1], "affinity")
    # A prompt that would wait longer than it takes to compute goes elsewhere.
    workers[1].pending_tokens = 60_000
    assert one.pick(workers, load_of, of(1, 2, 3)) == (workers[0], "load")


def test_long_prompts_gather_where_few_are_answered_and_short_ones_where_little_is_computed() -> (
    None
):
    one, (a, b) = policy(), fleet()
    workers = (a, b)
    a.in_flight = 6
    assert one.pick(workers, load_of, of(tokens=9000))[0] is b
    # So b has computed a lot lately, and those who are going to write an answer keep away from it.
    long = Lease(b, one.placed(b, of(tokens=9000), 1.0))
    long.began(2.0)
    a.in_flight = 2
    short = of(tokens=40)
    assert load_of(b) < load_of(a)
    assert one.pick(workers, load_of, short)[0] is a
    # After some time nobody remembers.
    one.placed(a, of(tokens=1), 600.0).ended()
    assert one.pick(workers, load_of, short)[0] is b


def test_its_own_answer_waits_for_the_prompts_that_come_as_often_as_they_came_lately() -> None:
    one, (a, b) = policy(), fleet()
    leases = [Lease(b, one.placed(b, of(tokens=3000, stream=False), 0.0)) for _ in range(2)]
    for lease in leases:
        lease.began(0.0)
    one.placed(a, of(tokens=1), 30.0).ended()
    kept = exp(-30.0 / RECENT_S)
    answer_s = min(2 * RECENT_S / (2 * kept + 1), ANSWER_MAX_S)
    busy = 6000 * kept / START / RECENT_S
    plain = (WORK + MEETING * 2) * 0.0 + CROWD * 2
    assert scores(one, (a, b), of(tokens=0))[1] == pytest.approx(plain + answer_s * busy)
    # Of a fleet that has answered nothing yet something is assumed.
    fresh = policy()
    assert fresh._answer_s() == ANSWER_S


def test_requests_that_are_late_anywhere_hold_up_those_that_are() -> None:
    one, (a, b) = policy(), fleet()
    workers = (a, b)
    a.pending_tokens, b.pending_tokens = 20_000, 13_000
    a.in_flight, b.in_flight = 1, 3
    # Nowhere in time: it joins the longer queue, where fewer answers are written.
    assert one.pick(workers, load_of, of(tokens=20_000))[0] is a
    # In time nowhere but with nobody who cares.
    assert policy(inf).pick(workers, load_of, of(tokens=4_000))[0] is b


def test_the_speed_of_a_worker_is_measured_and_a_slow_one_gets_less() -> None:
    one, (a, b, c) = policy(), fleet(3)
    random = Random(2)
    for number in range(200):
        tokens = random.randrange(100, 9000)
        # What it takes whatever the tokens is no part of the speed.
        answered(one, a, tokens, 20.0 * number, 0.2 + tokens / 6000)
        answered(one, b, tokens, 20.0 * number + 10, 0.2 + tokens / 1500)
    assert one._paces[a].speed == pytest.approx(6000)
    assert one._paces[b].speed == pytest.approx(1500)
    # The fleet's, as of a line through both.
    assert one._speed == pytest.approx(2400, rel=0.1)
    one._now = 10_000.0
    fast, slow, new = scores(one, (a, b, c), of(tokens=1000))
    assert fast == pytest.approx(WORK * 1000 / 6000)
    assert slow == pytest.approx(4 * fast)
    # One that is new counts as slower than the fleet until it has shown otherwise.
    assert new == pytest.approx(WORK * 1000 / (UNPROVEN * one._speed))


def test_workers_that_are_nearly_alike_are_alike() -> None:
    one, (a, b) = policy(), fleet()
    for number in range(100):
        for worker, speed in ((a, 8000), (b, 7000)):
            answered(one, worker, 100 * (number % 50), 20.0 * number, number % 50 / speed * 100)
    # That of the fleet when each was last heard of, and not 8000 and 7000.
    assert one._paces[a].speed == pytest.approx(one._paces[b].speed, rel=0.01)
    assert one._paces[b].speed == one._speed


def test_a_speed_is_of_all_that_was_to_be_computed_before_the_answer() -> None:
    one, (a,) = policy(), fleet(1)
    for at in range(0, 300, 3):
        first = one.placed(a, of(tokens=8000), float(at))
        second = one.placed(a, of(tokens=4000), float(at))
        first.began(at + 2.0)
        second.began(at + 3.0)
        first.ended()
        second.ended()
    assert one._paces[a].speed == one._speed == pytest.approx(4000)


def test_an_answer_that_comes_whole_says_nothing_of_its_prompt() -> None:
    one, (a,) = policy(), fleet(1)
    placement = one.placed(a, of(tokens=8000, stream=False), 0.0)
    placement.began(30.0)
    assert one._paces[a].line.count == 0.0
    assert a.pending_tokens == 0


@pytest.mark.parametrize("seconds", [0.0, 0.5])
def test_what_shows_no_speed_is_the_speed_of_the_fleet(seconds: float) -> None:
    one, (a, b) = policy(), fleet()
    for number in range(100):
        # All of one length, and longer ones no slower.
        answered(one, a, 100, float(number), seconds)
        answered(one, b, number + 1, float(number), seconds / (number + 1))
    assert one._paces[a].speed == 0.0
    assert all(0 < score < inf for score in scores(one, (a, b), of(tokens=10)))


def test_k05_a_worker_that_does_not_find_what_it_should_have_is_believed_less() -> None:
    one, (a, b) = policy(), fleet(cached_tokens=0)
    blocks = tuple(range(40))
    cached = 40 * BLOCK
    for _ in range(40):
        for worker, found in ((a, cached // 4), (b, cached)):
            placement = one.placed(worker, of(*blocks), 0.0)
            placement.began(0.1)
            placement.ended()
            # It tells a little later.
            worker.cached_tokens += found
    assert one._paces[a].trust == pytest.approx(0.25, abs=0.03)
    assert one._paces[b].trust == 1.0
    assert one.pick((a, b), load_of, of(*blocks)) == (b, "affinity")
    assert one.placed(a, of(*blocks), 1.0).uncached_tokens == pytest.approx(0.75 * cached, rel=0.1)
    assert one.placed(b, of(*blocks), 1.0).uncached_tokens == 0


@pytest.mark.parametrize("late", [0, 10])
def test_k05_what_has_not_begun_is_not_missed_and_neither_is_what_was_not_told_yet(
    late: int,
) -> None:
    one, (a,) = policy(), fleet(1, cached_tokens=0)
    blocks = tuple(range(40))
    cached = 40 * BLOCK
    waiting = []
    for number in range(60):
        waiting.append(one.placed(a, of(*blocks), 0.0))
        if number >= 20:
            # A queue of twenty; and what the worker found is told after every tenth only, or after the one after it.
            waiting.pop(0).began(0.1)
            if number % 10 == 0:
                a.cached_tokens = max(number - 19 - late, 0) * cached
    assert one._paces[a].judged > SURE_TOKENS
    assert one._paces[a].trust == 1.0


def test_k05_a_counter_that_begins_anew_and_one_that_is_not_there_say_nothing() -> None:
    one, (a, b) = policy(), fleet(cached_tokens=50_000_000)
    b.cached_tokens = -1
    blocks = tuple(range(40))
    for number in range(60):
        for worker in (a, b):
            placement = one.placed(worker, of(*blocks), 0.0)
            placement.began(0.1)
            placement.ended()
        a.cached_tokens = (a.cached_tokens + 40 * BLOCK) if number else 0
    assert one._paces[a].trust == 1.0
    assert one._paces[b].trust == 1.0


def test_what_has_ended_is_ended_once_and_who_left_is_forgotten() -> None:
    one, (a,) = policy(), fleet(1)
    placement = one.placed(a, of(1, 2), 0.0)
    assert one._open == 1
    placement.ended()
    placement.ended()
    assert (one._open, a.active_tokens, a.pending_tokens) == (0, 0, 0)
    late = one.placed(a, of(1, 2), 1.0)
    one.left(a)
    # Its answer may still come.
    late.began(2.0)
    late.ended()
    one.left(a)
    assert (one._paces, len(one.index), one._open) == ({}, 0, 0)


def test_in_a_large_fleet_some_of_those_that_have_most_and_some_others_are_looked_at() -> None:
    one, workers = policy(), fleet(500)
    for worker in workers[100:200]:
        one.placed(worker, of(1), 0.0).ended()
    for worker in workers[490:]:
        one.placed(worker, of(1, 2, 3, 4), 0.0).ended()
    for worker in workers:
        worker.in_flight = 1
    picked = [one.pick(workers, load_of, of(1, 2, 3, 4, 5)) for _ in range(50)]
    assert {reason for _, reason in picked} == {"affinity"}
    assert {worker for worker, _ in picked} <= set(workers[490:])
    # All that have it are busy, so somebody else gets it, and not always the same one.
    for worker in workers[490:]:
        worker.pending_tokens = 500_000
    others = {one.pick(workers, load_of, of(1, 2, 3, 4, 5))[0] for _ in range(50)}
    assert len(others) > 5
    assert not others & set(workers[490:])


def test_in_a_large_fleet_the_row_that_is_looked_at_goes_round_the_end() -> None:
    class Highest:
        def random(self) -> float:
            return 0.999

    one, workers = LeastDelay(PrefixIndex(1024, 60.0), Highest()), fleet(40)
    for worker in workers[1:]:
        worker.in_flight = 1
    assert one.pick(workers, load_of, of(1)) == (workers[0], "load")


def test_in_a_large_fleet_what_everybody_has_is_nobodys_gain() -> None:
    one, workers = policy(), fleet(60)
    for worker in workers:
        one.placed(worker, of(1), 0.0).ended()
    for worker in workers[:-1]:
        worker.in_flight = 20
    found = {one.pick(workers, load_of, of(1, 2)) for _ in range(200)}
    assert (workers[-1], "affinity") in found
    assert {reason for _, reason in found} == {"affinity"}
    considered = one.consider(workers, load_of, of(1, 2))
    assert considered.pick is None
    assert "drawn at random" in considered.rule
    assert (len(considered.scores), considered.notes[0]) == (60, "has 512 of 1024 tokens")


def test_a_retry_is_counted_where_it_went() -> None:
    one, (a, b) = policy(), fleet()
    first = Lease(a, one.placed(a, of(tokens=900), 0.0))
    first.close()
    second = Lease(b, one.placed(b, of(tokens=900), 1.0))
    assert (a.pending_tokens, b.pending_tokens) == (0, 900)
    second.close()


def test_a_placement_of_somebody_else_teaches_it_nothing() -> None:
    one, (a,) = policy(), fleet(1)
    one.placed(a, of(tokens=10), 0.0).ended()
    one._heard(Placement(a, 10, 10, 0.0), 1.0)
    assert one._paces[a].line.count == 0.0
