"""A simulated run: who gets what, what becomes of those whose worker dies, and what each gateway knows of it."""

from collections.abc import Callable, Iterator
from math import isnan

import pytest

from pointsman.domain.policy.least_outstanding import LeastOutstanding
from pointsman.domain.policy.least_tokens import LeastTokens
from pointsman.domain.request import InferenceRequest
from pointsman.domain.worker import Worker
from pointsman.simulate.outcome import Outcome
from pointsman.simulate.profile import EngineProfile
from pointsman.simulate.run import Failure, Scenario, simulate
from pointsman.simulate.workload import Arrival, Listed

Load = Callable[[Worker], int]


def arrivals(count: int, gap_s: float = 0.1, prompt: int = 800, output: int = 10) -> list[Arrival]:
    return [Arrival(number * gap_s, (), prompt, output) for number in range(count)]


class Watching(LeastOutstanding):
    """A policy that notes what it was shown at each pick."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...]]] = []
        self.seen: set[Worker] = set()

    def pick(
        self, workers: tuple[Worker, ...], load: Load, request: InferenceRequest
    ) -> tuple[Worker, str]:
        self.seen.update(workers)
        self.shown.append(
            (
                tuple(worker.id for worker in workers),
                tuple(worker.in_flight for worker in workers),
                tuple(worker.queue_depth for worker in workers),
            )
        )
        return super().pick(workers, load, request)


class Watch:
    """Makes such policies, and keeps them."""

    def __init__(self) -> None:
        self.policies: list[Watching] = []

    def __call__(self, options: object, random: object) -> Watching:
        self.policies.append(Watching())
        return self.policies[-1]


def test_every_request_is_answered_once() -> None:
    watch = Watch()
    outcome = simulate(Scenario(workload=Listed(arrivals(100)), policy=watch, workers=3))
    assert len(outcome) == 100
    assert list(outcome.attempts) == [1] * 100
    assert not any(outcome.failed(index) for index in range(100))
    assert sum(each.requests for each in outcome.workers) == 100
    assert sum(each.computed_tokens for each in outcome.workers) == 80_000
    assert {worker.in_flight for worker in watch.policies[0].seen} == {0}
    for index in range(100):
        decoded = outcome.tpot[index] * 9
        assert outcome.e2e[index] == pytest.approx(outcome.ttft[index] + decoded)


def test_an_answer_of_one_token_has_no_time_between_tokens() -> None:
    outcome = simulate(Scenario(workload=Listed(arrivals(1, output=1)), workers=1))
    assert outcome.e2e[0] == outcome.ttft[0] == pytest.approx(0.1)
    assert isnan(outcome.tpot[0])


def test_a_request_is_counted_where_it_is_until_it_is_over() -> None:
    watch = Watch()
    simulate(Scenario(workload=Listed(arrivals(3, gap_s=0.01)), policy=watch, workers=2))
    assert [in_flight for _, in_flight, _ in watch.policies[0].shown] == [(0, 0), (1, 0), (1, 1)]


def test_who_loses_its_worker_before_the_first_token_is_sent_elsewhere() -> None:
    # Both have one request at 0.05 s, of which none has begun to answer.
    outcome = simulate(
        Scenario(
            workload=Listed(arrivals(2, gap_s=0.01)),
            policy="least_outstanding",
            workers=2,
            failures=(Failure(0, 0.05),),
        )
    )
    assert list(outcome.attempts) == [2, 1]
    assert list(outcome.worker) == [1, 1]
    assert outcome.ttft[0] == pytest.approx(0.01 + 0.2, abs=0.02)
    assert not outcome.failed(0)


def test_an_answer_that_has_begun_breaks_with_its_worker() -> None:
    outcome = simulate(
        Scenario(
            workload=Listed(arrivals(1, output=1000)),
            workers=2,
            failures=(Failure(0, 0.5), Failure(1, 0.5)),
        )
    )
    assert outcome.ttft[0] == pytest.approx(0.1)
    assert outcome.failed(0)
    assert list(outcome.attempts) == [1]


def test_a_dead_worker_is_asked_until_its_heartbeats_are_missed() -> None:
    watch = Watch()
    outcome = simulate(
        Scenario(
            workload=Listed(arrivals(200)), policy=watch, workers=2, failures=(Failure(0, 1.0),)
        )
    )
    late = [index for index in range(200) if outcome.at[index] >= 7.5]
    early = [index for index in range(200) if 1.2 < outcome.at[index] < 4.9]
    # It has no load, so it is everybody's first choice.
    assert {outcome.attempts[index] for index in early} == {2}
    assert {outcome.attempts[index] for index in late} == {1}
    assert {outcome.worker[index] for index in late} == {1}
    assert not any(outcome.failed(index) for index in range(200))
    assert watch.policies[0].shown[-1][0] == ("w0001",)


def test_a_request_is_not_sent_more_often_than_it_may() -> None:
    outcome = simulate(
        Scenario(
            workload=Listed(arrivals(1)),
            workers=4,
            attempts_max=2,
            failures=tuple(Failure(number, 0.0) for number in range(4)),
        )
    )
    assert list(outcome.attempts) == [2]
    assert outcome.failed(0)
    assert isnan(outcome.ttft[0])


def test_without_a_worker_a_request_fails() -> None:
    outcome = simulate(
        Scenario(
            workload=Listed([Arrival(10.0, (), 10, 1)]), workers=1, failures=(Failure(0, 1.0),)
        )
    )
    assert (outcome.attempts[0], outcome.worker[0], outcome.failed(0)) == (0, -1, True)


def test_a_worker_that_comes_back_has_nothing_cached_and_is_another_one() -> None:
    blocks = tuple(range(50))
    asked = [Arrival(float(at), blocks, 800, 1) for at in (1, 2, 10, 11)]
    watch = Watch()
    outcome = simulate(
        Scenario(
            workload=Listed(asked),
            policy=watch,
            workers=1,
            failures=(Failure(0, 3.0, 5.0), Failure(0, 4.0, 4.5)),
        )
    )
    assert list(outcome.cached) == [0, 799, 0, 799]
    assert sorted(worker.incarnation for worker in watch.policies[0].seen) == [1, 2]
    assert outcome.workers[0].computed_tokens == 2 * 801
    assert outcome.workers[0].requests == 4
    # Its first life counts as well as its second: each computes 800 tokens, and the last one of them again.
    assert outcome.workers[0].busy_s == pytest.approx(2 * (0.1 + 0.006))


def test_a_request_that_no_engine_has_room_for_is_refused() -> None:
    outcome = simulate(
        Scenario(
            workload=Listed([Arrival(0.0, (), 1000, 1)]),
            workers=2,
            profile=EngineProfile(kv_tokens=1000),
        )
    )
    assert (outcome.attempts[0], outcome.failed(0)) == (1, True)


def test_slow_workers_and_those_of_their_own_profile_are_so() -> None:
    outcome = simulate(
        Scenario(
            workload=Listed(arrivals(3, gap_s=0.001, output=1)),
            policy="least_outstanding",
            workers=3,
            slow={1: 3.0},
            profiles={2: EngineProfile(prefill_tokens_per_s=800)},
        )
    )
    assert list(outcome.worker) == [0, 1, 2]
    assert list(outcome.ttft) == pytest.approx([0.1, 0.3, 1.0])


def test_gateways_see_each_others_load_in_heartbeats_alone() -> None:
    watch = Watch()
    outcome = simulate(
        Scenario(
            workload=Listed(arrivals(400, gap_s=0.05, prompt=4000, output=1)),
            policy=watch,
            workers=2,
            gateways=3,
            seed=1,
        )
    )
    assert len(watch.policies) == 3
    counts = [list(outcome.gateway).count(number) for number in range(3)]
    assert sum(counts) == 400
    assert min(counts) > 90
    # More comes than can be answered, so there are queues, and all three hear of them.
    for policy in watch.policies:
        assert max(max(queued) for _, _, queued in policy.shown) > 10
        assert len(policy.seen) == 2


def test_a_heartbeat_tells_how_full_the_cache_is_without_what_nobody_uses_and_what_was_found_there() -> (
    None
):
    used: list[float] = []
    found: list[int] = []

    class Asking(LeastOutstanding):
        def pick(
            self, workers: tuple[Worker, ...], load: Load, request: InferenceRequest
        ) -> tuple[Worker, str]:
            used.append(workers[0].kv_usage)
            found.append(workers[0].cached_tokens)
            return super().pick(workers, load, request)

    blocks = tuple(range(62))
    simulate(
        Scenario(
            # The first one, a prompt of 1000 tokens, is at work for 12 s, and then only cached.
            workload=Listed(
                [
                    Arrival(0.0, blocks, 1000, 1900),
                    Arrival(6.0, (), 10, 1),
                    Arrival(30.0, blocks, 1000, 1),
                    Arrival(40.0, (), 10, 1),
                ]
            ),
            policy=lambda options, random: Asking(),
            profile=EngineProfile(kv_tokens=4000),
            workers=1,
        )
    )
    assert used[0] == 0.0
    # The heartbeat of some moment in the last 2 s said it: the prompt, and a token more each 6.35 ms.
    assert 0.25 + 590 / 4000 < used[1] < 0.25 + 950 / 4000
    assert used[2] == 0.0
    # And what of prompts it had, which is all of that one but its end.
    assert found == [0, 0, 0, 62 * 16]


def test_a_prompt_waits_at_its_worker_until_its_answer_begins() -> None:
    pending: list[int] = []

    class Asking(LeastTokens):
        def pick(
            self, workers: tuple[Worker, ...], load: Load, request: InferenceRequest
        ) -> tuple[Worker, str]:
            pending.append(workers[0].pending_tokens)
            return super().pick(workers, load, request)

    # A prompt of 800 tokens is computed after 0.1 s, and the answer is 0.6 s long.
    simulate(
        Scenario(
            workload=Listed([Arrival(at, (), 800, 100) for at in (0.0, 0.05, 0.5)]),
            policy=lambda options, random: Asking(),
            workers=1,
        )
    )
    assert pending == [0, 800, 0]


def test_a_heartbeat_that_is_late_tells_what_was() -> None:
    shown = {}
    for delay_s in (0.0, 1.9):
        watch = Watch()
        simulate(
            Scenario(
                workload=Listed(
                    [Arrival(0.5 + at / 1000, (), 8000, 1) for at in range(50)]
                    + [Arrival(2.6, (), 10, 1), Arrival(4.4, (), 10, 1)]
                ),
                policy=watch,
                workers=1,
                heartbeat_delay_s=delay_s,
            )
        )
        shown[delay_s] = [queued[0] for _, _, queued in watch.policies[0].shown[50:]]
    assert shown[0.0][0] > 40
    assert shown[1.9][0] == 0
    assert shown[1.9][1] > 40


def test_workers_whose_heartbeats_are_all_lost_are_known_no_longer_than_that() -> None:
    outcome = simulate(Scenario(workload=Listed(arrivals(100)), workers=2, heartbeat_loss=1.0))
    for index, at in enumerate(outcome.at):
        assert outcome.failed(index) == (at >= 6.0)
        assert outcome.attempts[index] == (at < 6.0)


def test_lost_heartbeats_lose_workers_for_a_while() -> None:
    watch = Watch()
    simulate(
        Scenario(
            workload=Listed(arrivals(2000)), policy=watch, workers=4, heartbeat_loss=0.5, seed=3
        )
    )
    sizes = {len(ids) for ids, _, _ in watch.policies[0].shown}
    assert 4 in sizes
    assert min(sizes) < 4


class Talk:
    """Two sessions of three turns; each turn comes a second after the answer before."""

    block_tokens = 16

    def __init__(self) -> None:
        self.answered: list[tuple[int, float]] = []

    def __iter__(self) -> Iterator[Arrival]:
        yield Arrival(0.0, (1,), 100, 5, session=0)
        yield Arrival(0.5, (2,), 100, 5, session=1)

    def next_after(self, arrival: Arrival, now: float) -> Arrival | None:
        self.answered.append((arrival.session, now))
        if sum(session == arrival.session for session, _ in self.answered) == 3:
            return None
        return arrival._replace(at=now + 1.0)


def test_what_follows_an_answer_comes_after_it() -> None:
    talk = Talk()
    outcome = simulate(Scenario(workload=talk, workers=2))
    assert len(outcome) == 6
    assert [session for session, _ in talk.answered] == [0, 1] * 3
    first = [outcome.at[index] for index in (0, 2, 4)]
    assert first[1] == pytest.approx(outcome.e2e[0] + 1.0)
    assert first[2] == pytest.approx(first[1] + outcome.e2e[2] + 1.0)


def test_a_run_of_nothing_is_over_at_once() -> None:
    assert simulate(Scenario(workload=Listed([]))).ended_at == 0.0
    assert len(Outcome()) == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"workers": 0}, "workers"),
        ({"gateways": 0}, "gateways"),
        ({"heartbeat_s": 0.0}, "heartbeat_s"),
        ({"heartbeat_delay_s": -1.0}, "heartbeat_delay_s"),
        ({"heartbeat_loss": 1.1}, "heartbeat_loss"),
        ({"attempts_max": 0}, "attempts_max"),
        ({"slow": {16: 2.0}}, "worker 16: they are 0 to 15"),
        ({"slow": {1: 0.0}}, "slow"),
        ({"failures": (Failure(-1, 1.0),)}, "worker -1"),
        ({"policy": "afinity"}, "did you mean 'affinity'"),
    ],
)
def test_what_makes_no_sense_is_refused(change: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        simulate(Scenario(workload=Listed([]), **change))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arrivals", "profile"),
    [
        ([Arrival(0.0, (), 100, 2), Arrival(1e12, (), 100, 2)], {}),
        ([Arrival(0.0, (), 1000, 2)], {"prefill_tokens_per_s": 0.001}),
    ],
    ids=["a time", "an engine"],
)
def test_what_would_take_for_ever_is_told(
    arrivals: list[Arrival], profile: dict[str, float]
) -> None:
    engine = EngineProfile(**profile)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no request comes, begins or ends for"):
        simulate(Scenario(workload=Listed(arrivals), workers=1, profile=engine))
