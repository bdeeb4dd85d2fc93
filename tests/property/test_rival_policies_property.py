"""Whatever the fleet has cached and holds: the rivals pick what their formulas say, worked out one worker at a time."""

from random import Random
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from pointsman.domain.policy import PolicyOptions, make_policy
from pointsman.domain.policy.consideration import Consideration, Considers
from pointsman.domain.policy.prefix_aware import PrefixAware
from pointsman.domain.policy.tokens import QUEUED_TOKENS
from pointsman.domain.prefix_index import PrefixIndex
from pointsman.domain.request import InferenceRequest
from pointsman.domain.worker import Worker, load_of

SETTINGS = settings(deadline=None, derandomize=True, max_examples=300)
BLOCK = 16
PROMPT = tuple(range(1, 9))

WORKERS = st.lists(
    st.fixed_dictionaries(
        {
            "cached": st.integers(0, len(PROMPT)),
            "in_flight": st.integers(0, 4),
            "queue_depth": st.integers(0, 6),
            "active_tokens": st.integers(0, 300),
            "pending_tokens": st.integers(0, 300),
            "kv_usage": st.sampled_from([-1.0, 0.0, 0.25, 0.5, 1.0]),
        }
    ),
    min_size=1,
    max_size=9,
)
TOKENS = st.integers(len(PROMPT) * BLOCK - 5, len(PROMPT) * BLOCK + 40)


class Case:
    """A fleet, what it has cached, and one prompt."""

    def __init__(self, facts: list[dict[str, Any]], tokens: int, **options: Any) -> None:
        self.workers = tuple(
            Worker(f"w{number}", model="m", http_address="h:1") for number in range(len(facts))
        )
        self.options = PolicyOptions(prefix_index=PrefixIndex(4096, 60.0), **options)
        self.request = InferenceRequest.of_blocks("m", "r", PROMPT, tokens, BLOCK)
        self.tokens = tokens
        self.cached: dict[Worker, int] = {}
        self.depth: dict[Worker, int] = {}
        for worker, fact in zip(self.workers, facts, strict=True):
            depth = fact["cached"]
            self.options.index().insert(worker, PROMPT[:depth], 0.0)
            self.depth[worker] = depth
            self.cached[worker] = min(depth * BLOCK, tokens)
            for name in set(fact) - {"cached"}:
                setattr(worker, name, fact[name])

    def others(self, worker: Worker) -> int:
        return max(worker.queue_depth - worker.in_flight, 0) * QUEUED_TOKENS

    def picked(self, name: str) -> tuple[Worker, Consideration]:
        policy = make_policy(name, self.options, Random(1))
        assert isinstance(policy, Considers)
        seen = policy.consider(self.workers, load_of, self.request)
        pick = policy.pick(self.workers, load_of, self.request)
        assert (seen.pick, seen.reason) == pick
        if isinstance(policy, PrefixAware):
            assert pick[1] == "load" or self.cached[pick[0]]
        return pick[0], seen


@SETTINGS
@given(WORKERS, TOKENS, st.sampled_from([0.0, 0.5, 1.0, 3.0]))
def test_kv_cost_has_the_lowest_cost(facts, tokens, scale):  # type: ignore[no-untyped-def]
    case = Case(facts, tokens, prefill_load_scale=scale)
    costs = {
        worker: scale * (worker.pending_tokens + tokens - case.cached[worker])
        + worker.active_tokens
        + tokens
        + case.others(worker)
        for worker in case.workers
    }
    picked, seen = case.picked("kv_cost")
    assert seen.scores == tuple(costs.values())
    assert costs[picked] == min(costs.values())
    event(seen.reason)


@SETTINGS
@given(WORKERS, TOKENS, st.sampled_from([0.0, 0.5, 0.8, 1.0]), st.integers(1, 3000))
def test_sticky_until_saturated_has_the_fewest_tokens_of_the_candidates(  # type: ignore[no-untyped-def]
    facts, tokens, score, gap
):
    case = Case(
        facts, tokens, sticky_score=score, prefill_tokens_per_s=float(gap), ttft_penalty_s=1.0
    )
    waits = {worker: worker.pending_tokens + case.others(worker) for worker in case.workers}
    # Even a score of 0 wants one block.
    sticky = [
        worker
        for worker in case.workers
        if case.depth[worker] and case.depth[worker] >= score * len(PROMPT)
    ]
    others = [worker for worker in case.workers if worker not in sticky]
    kept = sticky or others
    if sticky and others:
        best = min(waits[worker] for worker in sticky)
        if best - min(waits[worker] for worker in others) > gap:
            kept = list(case.workers)
            event("saturated")
        else:
            event("sticky")
    costs = {worker: waits[worker] + tokens - case.cached[worker] for worker in case.workers}
    picked, seen = case.picked("sticky_until_saturated")
    assert seen.scores == tuple(costs.values())
    assert picked in kept
    assert costs[picked] == min(costs[worker] for worker in kept)


@SETTINGS
@given(
    WORKERS,
    TOKENS,
    st.sampled_from([0.0, 0.3, 0.9]),
    st.integers(0, 12),
    st.sampled_from([1.0, 1.5, 4.0]),
)
def test_cache_aware_follows_the_match_while_the_fleet_is_balanced(  # type: ignore[no-untyped-def]
    facts, tokens, threshold, balance_abs, balance_rel
):
    case = Case(
        facts,
        tokens,
        cache_threshold=threshold,
        balance_abs=balance_abs,
        balance_rel=balance_rel,
    )
    loads = [load_of(worker) for worker in case.workers]
    imbalanced = max(loads) - min(loads) > balance_abs and max(loads) > balance_rel * min(loads)
    deepest = max(case.depth.values())
    matches = min(deepest * BLOCK, tokens) > threshold * tokens and deepest > 0
    picked, seen = case.picked("cache_aware")
    among = list(case.workers)
    if matches and not imbalanced:
        among = [worker for worker in among if case.depth[worker] == deepest]
    event(seen.reason)
    assert seen.reason == ("affinity" if matches and not imbalanced else "load")
    assert picked is min(among, key=load_of)


@SETTINGS
@given(WORKERS)
def test_least_tokens_has_the_fewest_seconds_of_work(facts):  # type: ignore[no-untyped-def]
    case = Case(facts, 100)
    scores = []
    for worker in case.workers:
        k = min(max(worker.kv_usage, 0.0), 0.99)
        seconds = (worker.active_tokens + case.others(worker)) / 2000 + 0.15 * k / (1 - k)
        scores.append(seconds)
    picked, seen = case.picked("least_tokens")
    assert seen.scores == pytest.approx(scores)
    assert scores[case.workers.index(picked)] <= min(scores) + 1e-9


@SETTINGS
@given(WORKERS, st.floats(1.0, 3.0), st.integers(0, 12))
def test_prefix_hash_is_the_first_clockwise_below_its_bound(facts, factor, margin):  # type: ignore[no-untyped-def]
    case = Case(facts, 100, load_factor=factor, load_margin=margin)
    bound = factor * sum(map(load_of, case.workers)) / len(case.workers) + margin
    picked, seen = case.picked("prefix_hash")
    places = {worker: score or 0.0 for worker, score in zip(case.workers, seen.scores, strict=True)}
    fitting = [worker for worker in case.workers if load_of(worker) <= bound]
    assert picked is min(fitting, key=places.__getitem__)
