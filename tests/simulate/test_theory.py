"""The simulator against what is known: queues, balls in bins, and the same seed twice."""

import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from random import Random
from statistics import fmean, stdev

import pytest

from pointsman.domain.policy import PolicyOptions, make_policy
from pointsman.domain.policy.power_of_two import PowerOfTwo
from pointsman.domain.request import InferenceRequest
from pointsman.domain.worker import Worker, load_of
from pointsman.simulate.profile import EngineProfile
from pointsman.simulate.run import Fault, Scenario, simulate
from pointsman.simulate.workload import Arrival

ONE_AT_A_TIME = EngineProfile(
    prefill_tokens_per_s=1000, decode_base_s=0, decode_per_sequence_s=0, chunk_tokens=1 << 30,
    sequences_max=1, kv_tokens=1 << 40,
)  # fmt: skip


class Queue:
    """Poisson arrivals at `rate` per second, whose service takes one second on average."""

    def __init__(self, rate: float, *, exponential: bool, seed: int, count: int = 4000) -> None:
        self.rate, self.exponential, self.seed, self.count = rate, exponential, seed, count

    def __iter__(self) -> Iterator[Arrival]:
        random, at = Random(self.seed), 0.0
        for number in range(self.count):
            at += random.expovariate(self.rate)
            seconds = random.expovariate(1.0) if self.exponential else 1.0
            yield Arrival(at, (number,), max(round(1000 * seconds), 1), 1)


def run(workload: Queue, policy: str = "least_outstanding", **options: object) -> Scenario:
    return Scenario(
        workload=workload,
        policy=lambda random: make_policy(policy, PolicyOptions(), random),
        **{"workers": 1, "profile": ONE_AT_A_TIME, "block_tokens": 1, **options},  # type: ignore[arg-type]
    )


def mean_wait(workload: Queue) -> float:
    outcome = simulate(run(workload))
    # A prompt of n tokens takes n milliseconds, and its answer is there with the last of them.
    return fmean(
        e2e - prompt / 1000 for e2e, prompt in zip(outcome.e2e, outcome.prompt, strict=True)
    )


@pytest.mark.parametrize(
    ("exponential", "expected"),
    # M/M/1: rho / (mu - lambda); M/D/1 (Pollaczek-Khinchine): half of that.
    [(True, 0.7 / 0.3), (False, 0.7 / 0.3 / 2)],
    ids=["M/M/1", "M/D/1"],
)
def test_waits_are_those_of_the_queue(*, exponential: bool, expected: float) -> None:
    waits = [mean_wait(Queue(0.7, exponential=exponential, seed=seed)) for seed in range(12)]
    half = 2.2 * stdev(waits) / math.sqrt(len(waits))  # Student's t of 11 degrees of freedom, 95%
    assert abs(fmean(waits) - expected) <= half + 0.01 * expected
    assert half < 0.25 * expected


def test_with_two_choices_the_fullest_of_n_holds_about_log_log_n_over_log_2_more() -> None:
    """Mitzenmacher, 2001: the maximum of n balls in n bins is ln ln n / ln 2 + O(1), against ln n / ln ln n for one."""
    n = 1000
    most = []
    for seed in range(20):
        workers = tuple(
            Worker(f"w{number:04}", model="m", http_address="w:80") for number in range(n)
        )
        policy = PowerOfTwo(Random(seed))
        for number in range(n):
            policy.pick(workers, load_of, InferenceRequest("m", f"r{number}"))[0].in_flight += 1
        most.append(max(worker.in_flight for worker in workers))
    assert fmean(most) <= math.log(math.log(n)) / math.log(2) + 1
    assert fmean(most) < math.log(n) / math.log(math.log(n))


@pytest.mark.parametrize("policy", ["affinity", "power_of_two", "weighted", "least_outstanding"])
def test_the_same_seed_gives_the_same_bytes_and_another_one_does_not(policy: str) -> None:
    def bytes_of(seed: int) -> bytes:
        queue = Queue(3.0, exponential=True, seed=seed, count=400)
        faults = (Fault(1, at=20.0, until=40.0),)
        scenario = run(
            queue, policy, workers=5, gateways=2, seed=seed, heartbeat_loss=0.1, faults=faults
        )
        return simulate(scenario).to_bytes()

    one, again, other = bytes_of(1), bytes_of(1), bytes_of(2)
    assert one == again
    assert one != other


def test_more_workers_wait_less_and_what_a_failed_one_had_is_answered_by_others() -> None:
    queue = Queue(2.0, exponential=True, seed=5, count=1000)
    waits = [fmean(simulate(run(queue, workers=workers)).e2e) for workers in (3, 4, 8)]
    assert all(more > less for more, less in pairwise(waits))
    outcome = simulate(run(queue, workers=8, faults=(Fault(0, at=100.0, until=200.0),)))
    assert (len(outcome), outcome.refused) == (1000, 0)
    assert max(outcome.attempts) == 2
    while_down = [
        worker for at, worker in zip(outcome.at, outcome.worker, strict=True) if 110 < at < 190
    ]
    assert 0 not in while_down


def test_with_nobody_left_requests_are_refused_and_the_run_still_ends() -> None:
    queue = Queue(1.0, exponential=False, seed=5, count=100)
    outcome = simulate(run(queue, faults=(Fault(0, at=50.0),)))
    assert 30 < outcome.refused < 70
    assert len(outcome) + outcome.refused == 100


def test_heartbeats_that_are_lost_cost_no_request() -> None:
    queue = Queue(2.0, exponential=True, seed=5, count=500)
    outcome = simulate(run(queue, workers=4, heartbeat_loss=0.05))
    assert (len(outcome), outcome.refused) == (500, 0)


def test_a_heartbeat_tells_room_in_the_blocks_of_engines_whatever_those_of_the_workload_are() -> (
    None
):
    seen: set[tuple[int, int]] = set()

    class Looking(PowerOfTwo):
        def pick(
            self,
            workers: tuple[Worker, ...],
            load: Callable[[Worker], int],
            request: InferenceRequest,
        ) -> tuple[Worker, str]:
            seen.update((each.kv_free_blocks, each.kv_total_blocks) for each in workers)
            return super().pick(workers, load, request)

    arrival = Arrival(1.0, (1, 2), 1000, 5, 512)
    scenario = Scenario(workload=[arrival], policy=Looking, workers=2)
    assert len(simulate(scenario)) == 1
    assert seen == {(524_288 // 16, 524_288 // 16)}
