"""Policies that look at a fleet in groups and lists decide what their formulas say, worker by worker."""

from collections.abc import Callable
from random import Random

import pytest

from pointsman.domain.policy import POLICIES, PolicyOptions, make_policy
from pointsman.domain.policy.cache_aware import CacheAware
from pointsman.domain.policy.kv_cost import KvCost
from pointsman.domain.policy.sticky_until_saturated import StickyUntilSaturated
from pointsman.domain.policy.weighted import SEATED, Weighted
from pointsman.domain.prefix_index import PrefixIndex
from pointsman.domain.request import InferenceRequest
from pointsman.domain.worker import Worker, load_of

Rank = Callable[[str], int] | None
Judged = tuple[Worker, str]

QUEUED = 1024
GAP = 3000.0


def others(worker: Worker) -> int:
    return max(worker.queue_depth - worker.in_flight, 0) * QUEUED


class Formulas:
    """What is written down of three policies, in the most obvious way."""

    def __init__(self, index: PrefixIndex, rank: Rank, scale: float) -> None:
        self.index = index
        self.rank = rank
        self.scale = scale

    def cached(self, request: InferenceRequest, workers: tuple[Worker, ...]) -> dict[Worker, int]:
        cached = dict.fromkeys(workers, 0)
        for worker in workers:
            for _, depth in self.index.match(request.blocks, (worker,)):
                cached[worker] = min(depth * request.block_tokens, request.prompt_tokens)
        return cached

    def first(self, workers: list[Worker]) -> Worker:
        """The lowest load, then the smallest id, or this process's own order."""
        rank = self.rank
        return min(workers, key=lambda each: (load_of(each), rank(each.id) if rank else 0, each.id))

    def cheapest(self, costs: dict[Worker, float], cached: dict[Worker, int]) -> Judged:
        least = min(costs.values())
        equals = [worker for worker in costs if costs[worker] == least]
        having = [worker for worker in equals if cached[worker]]
        return (self.first(having), "affinity") if having else (self.first(equals), "load")

    def kv_cost(self, request: InferenceRequest, workers: tuple[Worker, ...]) -> Judged:
        cached = self.cached(request, workers)
        costs = {
            worker: worker.active_tokens
            + self.scale * (worker.pending_tokens - cached[worker])
            + others(worker)
            for worker in workers
        }
        return self.cheapest(costs, cached)

    def sticky_until_saturated(
        self, request: InferenceRequest, workers: tuple[Worker, ...]
    ) -> Judged:
        cached = self.cached(request, workers)
        depths = {
            worker: max(
                (depth for _, depth in self.index.match(request.blocks, (worker,))), default=0
            )
            for worker in workers
        }
        waiting = {worker: worker.pending_tokens + others(worker) for worker in workers}
        sticky = [each for each in workers if 0 < depths[each] >= 0.8 * len(request.blocks)]
        rest = [waiting[worker] for worker in workers if worker not in sticky]
        if sticky and rest and min(waiting[each] for each in sticky) - min(rest) > GAP:
            sticky = []
        return self.cheapest(
            {worker: waiting[worker] - cached[worker] for worker in sticky or workers}, cached
        )

    def cache_aware(self, request: InferenceRequest, workers: tuple[Worker, ...]) -> Judged:
        cached = self.cached(request, workers)
        loads = [load_of(worker) for worker in workers]
        imbalanced = max(loads) - min(loads) > 6 and max(loads) > 1.5 * min(loads)
        most = max(cached.values())
        if most > 0.3 * request.prompt_tokens and not imbalanced:
            depth = max(depth for _, depth in self.index.match(request.blocks, workers))
            deepest = [
                each for each, own in self.index.match(request.blocks, workers) if own == depth
            ]
            return self.first(deepest), "affinity"
        return self.first(list(workers)), "load"


def policies(
    index: PrefixIndex, rank: Rank, scale: float
) -> dict[str, CacheAware | KvCost | StickyUntilSaturated]:
    return {
        "kv_cost": KvCost(index, prefill_load_scale=scale, rank=rank),
        "sticky_until_saturated": StickyUntilSaturated(
            index, prefill_tokens_per_s=GAP, ttft_penalty_s=1.0, rank=rank
        ),
        "cache_aware": CacheAware(index, balance_abs=6, rank=rank),
    }


def moved(worker: Worker, random: Random, *, busy: bool) -> None:
    """Give a worker other numbers: few of them, so that many are equal."""
    worker.in_flight = random.choice((0, 1, 2, 9)) if busy else 0
    worker.queue_depth = random.choice((0, 0, 1, 3)) if busy else 0
    worker.pending_tokens = random.choice((0, 128, 256, 384, 512, 4096, 9000)) if busy else 0
    worker.active_tokens = random.choice((0, 128, 256, 4096)) if busy else 0


@pytest.mark.parametrize("seed", range(24))
def test_what_a_policy_decides_in_groups_is_what_its_formula_says_of_each(seed: int) -> None:
    random = Random(seed)
    size = random.choice((2, 3, 5, 17, 40, 130))
    everybody = [Worker(f"w{number:03}", model="m", http_address="h:1") for number in range(size)]
    index = PrefixIndex(random.choice((400, 100_000)), 60.0)
    options = PolicyOptions(tie_break="salted", salt=b"%d" % seed)
    rank = options.rank() if seed % 2 else None
    scale = random.choice((0.0, 0.5, 1.0, 2.0))
    formulas = Formulas(index, rank, scale)
    made = policies(index, rank, scale)
    if seed % 3 == 0:
        index.follow(everybody[0])
    fleets = [tuple(everybody), tuple(everybody[1:]), tuple(everybody[::2])]
    # The order in which the index meets them is not that of their ids.
    for worker in random.sample(everybody, size):
        if random.random() < 0.9:
            index.insert(worker, (1, 2) if random.random() < 0.7 else (1,), 0.0)
    reasons = set()
    for turn in range(60):
        for worker in random.sample(everybody, max(size // 4, 1)):
            moved(worker, random, busy=turn % 7 > 1)
        stem = (1, 2, *range(10, 10 + random.randrange(12)))
        request = InferenceRequest.of_blocks(
            "m",
            f"r{turn}",
            stem[: random.randrange(len(stem) + 1)],
            random.choice((50, 900, 1500)),
            128,
        )
        workers = random.choice(fleets)
        for name, policy in made.items():
            decided = policy.pick(workers, load_of, request)
            assert decided == getattr(formulas, name)(request, workers), (name, turn)
            assert policy.consider(workers, load_of, request).pick is decided[0]
            reasons.add(decided[1])
        for worker in random.sample(workers, min(len(workers), 3)):
            index.insert(worker, request.blocks, float(turn))
        if turn % 20 == 19:
            index.purge(random.choice(everybody))
    assert reasons == {"affinity", "load"}


@pytest.mark.parametrize("seed", range(12))
def test_turns_are_those_of_counters_by_id_whatever_tuples_they_are_asked_for(seed: int) -> None:
    random = Random(seed)
    everybody = [Worker(f"w{number:02}", model="m", http_address="h:1") for number in range(30)]
    rank = PolicyOptions(tie_break="salted", salt=b"%d" % seed).rank() if seed % 2 else None
    policy = Weighted(rank)
    counters = dict.fromkeys([worker.id for worker in everybody], 0)
    whole = tuple(everybody)
    tuples = [whole, tuple(everybody), whole[:10], whole[10:], whole[5:15]]
    tuples += [whole[number : number + 1] for number in range(30)] + [
        whole[number:] for number in range(20)
    ]
    for _ in range(600):
        random.choice(everybody).kv_total_blocks = random.choice((-1, 0, 1, 3, 7))
        workers = random.choice(tuples) if random.random() < 0.5 else whole
        weights = [max(worker.kv_total_blocks, 1) for worker in workers]
        for worker, weight in zip(workers, weights, strict=True):
            counters[worker.id] += weight
        key = rank or (lambda worker_id: 0)
        best = min(workers, key=lambda each: (-counters[each.id], key(each.id), each.id))
        scores = [float(counters[worker.id]) for worker in workers]
        counters[best.id] -= sum(weights)
        seen = policy.consider(workers, load_of, InferenceRequest("m", "r"))
        assert (seen.pick, list(seen.scores)) == (best, scores)
        assert policy.pick(workers, load_of, InferenceRequest("m", "r")) == (best, "load")
        assert len(policy._rounds) <= SEATED


def test_the_order_among_equals_is_the_same_however_many_there_are() -> None:
    options = PolicyOptions(tie_break="salted", salt=b"x")
    rank = options.rank()
    assert rank is not None
    random = Random(1)
    workers = tuple(
        [Worker(f"w{number:02}", model="m", http_address="h:1") for number in range(50)]
    )
    policy = make_policy("least_outstanding", options, random)
    assert "least_outstanding" in POLICIES
    for _ in range(200):
        random.choice(workers).in_flight = random.choice((0, 1, 2))
        best = min(workers, key=lambda each: (load_of(each), rank(each.id)))
        assert policy.pick(workers, load_of, InferenceRequest("m", "r")) == (best, "load")
