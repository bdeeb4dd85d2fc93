"""The simulator against what is known exactly, or proven: queues, two choices, bounded loads, and that chance repeats.

Means of queues are compared by their 99% confidence intervals, from the means of batches (Student, 19 degrees).
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from hashlib import sha256
from math import ceil, log
from random import Random
from statistics import fmean, stdev

import pytest
from msgspec.structs import astuple

from pointsman.domain.policy import PolicyOptions, make_policy
from pointsman.domain.policy.affinity import Affinity
from pointsman.domain.registry import Registry, WorkerReport
from pointsman.domain.request import InferenceRequest
from pointsman.domain.router import Router
from pointsman.domain.routes import RouteTable
from pointsman.domain.worker import Worker
from pointsman.simulate.outcome import Outcome
from pointsman.simulate.profile import EngineProfile
from pointsman.simulate.run import Failure, Scenario, simulate
from pointsman.simulate.workload import Arrival, Listed

BATCHES = 20
STUDENT = 2.861
TOKENS_PER_S = 1_000_000
SERVICE_S = 0.1

ONE_AT_A_TIME = EngineProfile(
    prefill_tokens_per_s=TOKENS_PER_S,
    decode_base_s=1e-9,
    decode_per_sequence_s=0,
    chunk_tokens=1_000_000_000,
    sequences_max=1,
    kv_tokens=1_000_000_000,
)
"""An engine that is a single server: the service time of a request is that of its prompt."""


def waits(load: float, service: Callable[[Random], float], seed: int) -> list[float]:
    """Return the mean wait of each batch of a queue with Poisson arrivals, in seconds; the first batch warms up."""
    random = Random(seed)

    def arrivals() -> Iterator[Arrival]:
        at = 0.0
        for _ in range((BATCHES + 1) * 1000):
            at += random.expovariate(load / SERVICE_S)
            yield Arrival(at, (), max(round(service(random) * TOKENS_PER_S), 1), 1)

    outcome = simulate(
        Scenario(workload=Listed(arrivals()), workers=1, profile=ONE_AT_A_TIME, seed=seed)
    )
    waited = [
        ttft - prompt / TOKENS_PER_S
        for ttft, prompt in zip(outcome.ttft, outcome.prompt, strict=True)
    ]
    assert min(waited) > -1e-6
    return [fmean(waited[at : at + 1000]) for at in range(1000, len(waited), 1000)]


def interval(batches: list[float]) -> tuple[float, float]:
    half = STUDENT * stdev(batches) / len(batches) ** 0.5
    return fmean(batches) - half, fmean(batches) + half


@pytest.mark.slow
@pytest.mark.parametrize("load", [0.3, 0.5])
def test_a_queue_of_random_services_waits_as_long_as_theory_says(load: float) -> None:
    low, high = interval(waits(load, lambda random: random.expovariate(1 / SERVICE_S), seed=1))
    assert low < SERVICE_S * load / (1 - load) < high
    assert high - low < 0.5 * low


@pytest.mark.slow
@pytest.mark.parametrize("load", [0.3, 0.5])
def test_a_queue_of_equal_services_waits_half_as_long(load: float) -> None:
    low, high = interval(waits(load, lambda random: SERVICE_S, seed=2))
    assert low < SERVICE_S * load / (1 - load) / 2 < high
    assert high - low < 0.5 * low


def fleet(count: int) -> Registry:
    registry = Registry()
    for number in range(count):
        registry.beat(WorkerReport(f"w{number:04}", "127.0.0.1:8000", "m"), 0.0)
    return registry


def fullest(policy: str, bins: int, balls: int, seed: int) -> int:
    """Return the load of the fullest worker after so many requests that stay."""
    registry = fleet(bins)
    router = Router(registry, make_policy(policy, PolicyOptions(), Random(seed)), RouteTable())
    request = InferenceRequest("m", "r")
    for _ in range(balls):
        router.lease(router.route(request, now=1.0).worker, request, 1.0)
    return max(worker.in_flight for worker in registry.snapshot())


@pytest.mark.slow
def test_with_two_choices_the_fullest_has_log_log_n_more_than_its_share() -> None:
    # The constant beside log log n / log 2 is about 1 here, for as many balls as bins and for ten times as many.
    for bins, balls in ((64, 64), (512, 512), (64, 640)):
        over = [fullest("power_of_two", bins, balls, seed) - balls / bins for seed in range(10)]
        expected = log(log(bins)) / log(2)
        half = 3.25 * stdev(over) / len(over) ** 0.5
        assert expected - 1 - half <= fmean(over) <= expected + 1 + half, (bins, balls, over)
        # One choice alone has sqrt(2 m ln(n) / n) more for many balls, and about ln n / ln ln n for few.
        random = Random(bins)
        counts = [0] * bins
        for _ in range(balls):
            counts[int(random.random() * bins)] += 1
        assert max(counts) - balls / bins > fmean(over) + half


class Watched(Affinity):
    """The ring, with an eye on how full its picks are, by a formula of its own."""

    def __init__(self, load_factor: float) -> None:
        super().__init__(load_factor)
        self.factor = load_factor
        self.spilt = 0

    def pick(
        self,
        workers: tuple[Worker, ...],
        load: Callable[[Worker], int],
        request: InferenceRequest,
    ) -> tuple[Worker, str]:
        worker, why = super().pick(workers, load, request)
        total = sum(load(each) for each in workers) + 1
        assert load(worker) + 1 <= ceil(self.factor * total / len(workers))
        self.spilt += why == "load"
        return worker, why


def zipf(count: int, seed: int, gap_s: float = 0.02) -> Listed:
    """Return arrivals of which a few beginnings are most."""
    random = Random(seed)
    weights = [1 / rank for rank in range(1, 51)]
    first = random.choices(range(50), weights, k=count)
    ats = [random.expovariate(1 / gap_s) for _ in range(count)]
    made = []
    at = 0.0
    for number, (gap, key) in enumerate(zip(ats, first, strict=True)):
        at += gap
        prompt = (*range(key * 100, key * 100 + 40), 10_000 + number)
        made.append(Arrival(at, prompt, 700, random.randrange(1, 200)))
    return Listed(made)


@pytest.mark.parametrize("factor", [1.0, 1.25, 2.0])
def test_no_worker_of_the_ring_has_more_than_its_bound(factor: float) -> None:
    made: list[Watched] = []

    def policy(options: object, random: object) -> Watched:
        made.append(Watched(factor))
        return made[-1]

    outcome = simulate(Scenario(workload=zipf(2000, 3), policy=policy, workers=8))
    assert sum(outcome.attempts) == 2000
    assert made[0].spilt > 0


def digest(outcome: Outcome) -> str:
    """Return a hash of all that came out."""
    arrays = (
        outcome.at,
        outcome.ttft,
        outcome.tpot,
        outcome.e2e,
        outcome.cached,
        outcome.worker,
        outcome.gateway,
        outcome.attempts,
    )
    told = repr(([astuple(each)[:7] for each in outcome.workers], outcome.ended_at))
    return sha256(b"".join(each.tobytes() for each in arrays) + told.encode()).hexdigest()


def eventful(seed: int, policy: str = "power_of_two") -> Outcome:
    """Return a run in which everything happens that can."""
    return simulate(
        Scenario(
            workload=zipf(600, 5),
            policy=policy,
            workers=5,
            gateways=2,
            slow={1: 2.0},
            failures=(Failure(2, 1.5, 4.0), Failure(0, 3.0)),
            heartbeat_loss=0.2,
            heartbeat_delay_s=0.1,
            seed=seed,
        )
    )


def test_the_same_seed_is_the_same_run_byte_for_byte() -> None:
    assert digest(eventful(1)) == digest(eventful(1))
    assert digest(eventful(1)) != digest(eventful(2))


PINNED = {
    "affinity": "89e86a98edd8bbb7b2f9d236eaacdfa6f943a54a6854db0fc68e5634a44eecdc",
    "kv_cost": "0ddd6492e469041fc79e5a5c8e953e5e5bd99e44fbd96dd4b1460427eb29617d",
    "least_tokens": "5d6adde06b581762600526a06b0cfdfca337dd8a90b58968591562537fcb5bb0",
    "power_of_two": "6966dec57c3093c262025f2d2bb6dd079782abaa7f3b6651c15f5f3e0507a0b6",
}


@pytest.mark.parametrize("policy", PINNED)
def test_what_a_fleet_without_hand_offs_does_is_pinned(policy: str) -> None:
    """A change of this is a change of the model, or of a policy, and has to be meant."""
    assert digest(eventful(1, policy)) == PINNED[policy]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["power_of_two", "kv_cost", "sticky_until_saturated"])
def test_another_process_does_the_same(policy: str) -> None:
    here = digest(eventful(1, policy))
    code = (
        "import importlib.util, sys\n"
        "spec = importlib.util.spec_from_file_location('theory', sys.argv[1])\n"
        "theory = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(theory)\n"
        "print(theory.digest(theory.eventful(1, sys.argv[2])))\n"
    )
    for hash_seed in ("0", "7"):
        done = subprocess.run(
            [sys.executable, "-c", code, __file__, policy],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == here
