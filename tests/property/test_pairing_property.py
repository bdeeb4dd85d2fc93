"""Whatever the fleet holds: a pair can be one, nobody is asked who failed, and no way would have cost less."""

from typing import Any

from hypothesis import event, given, settings
from hypothesis import strategies as st

from pointsman.domain.pairing import Pairing, PairingOptions
from pointsman.domain.policy import PolicyOptions, make_policy
from pointsman.domain.policy.tokens import QUEUED_TOKENS
from pointsman.domain.prefix_index import PrefixIndex
from pointsman.domain.registry import Registry
from pointsman.domain.request import InferenceRequest
from pointsman.domain.router import Router
from pointsman.domain.routes import Route, RouteTable
from pointsman.domain.worker import Role, Worker, connector_of
from pointsman.errors import NoCapacity

SETTINGS = settings(deadline=None, derandomize=True, max_examples=300)
BLOCK = 16
PROMPT = tuple(range(1, 9))

WORKERS = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(list(Role)),
            "connector": st.sampled_from(["nixl", "mooncake"]),
            "excluded": st.integers(0, 4).map(lambda n: n == 0),
            "cached": st.integers(0, len(PROMPT)),
            "in_flight": st.integers(0, 9),
            "running": st.integers(0, 9),
            "queue_depth": st.integers(0, 3),
            "pending_tokens": st.integers(0, 4000),
        }
    ),
    min_size=1,
    max_size=9,
)
OPTIONS = st.builds(
    PairingOptions,
    prefill_tokens_per_s=st.sampled_from([500.0, 8000.0]),
    transfer_tokens_per_s=st.sampled_from([1000.0, 1e6]),
    handoff_s=st.sampled_from([0.0, 0.05]),
    stall=st.sampled_from([0.0, 0.2, 1.0]),
)
TARGETS = st.sampled_from(
    [("disaggregated",), ("disaggregated", "unified"), ("unified", "disaggregated")]
)


@SETTINGS
@given(
    WORKERS,
    OPTIONS,
    TARGETS,
    st.sampled_from(["affinity", "kv_cost", "least_outstanding", "least_tokens"]),
    st.integers(len(PROMPT) * BLOCK, len(PROMPT) * BLOCK + 900),
    st.sampled_from([None, "nixl", "mooncake"]),
)
def test_the_way_that_is_taken_is_one_and_none_costs_less(
    facts: list[dict[str, Any]],
    options: PairingOptions,
    targets: tuple[str, ...],
    policy: str,
    tokens: int,
    only: str | None,
) -> None:
    registry, index = Registry(), PrefixIndex(4096, 60.0)
    depths: dict[Worker, int] = {}
    excluded = []
    for number, fact in enumerate(facts):
        worker = Worker(
            f"w{number}", model="m", http_address="h:1",
            role=fact["role"], dialect="vllm", connector=fact["connector"], static=True,
        )  # fmt: skip
        registry.add(worker)
        depths[worker] = fact["cached"]
        index.insert(worker, PROMPT[: fact["cached"]], 0.0)
        for name in ("in_flight", "running", "queue_depth", "pending_tokens"):
            setattr(worker, name, fact[name])
        if fact["excluded"]:
            excluded.append(worker)
    router = Router(
        registry,
        make_policy(policy, PolicyOptions(prefix_index=index), None),  # type: ignore[arg-type]
        RouteTable([Route("m", targets=targets)]),
        pairing=Pairing(index, options),
    )
    request = InferenceRequest.of_blocks("m", "r", PROMPT, tokens, BLOCK)

    def can(connector: str) -> bool:
        return only is None or connector == only

    try:
        target = router.route(request, excluded, now=0.0, handoff=can)
    except NoCapacity:
        event("nobody")
        return

    def lacks(worker: Worker) -> int:
        return max(tokens - depths[worker] * BLOCK, 1)

    def compute_s(worker: Worker) -> float:
        others = max(worker.queue_depth - worker.in_flight, 0) * QUEUED_TOKENS
        return (worker.pending_tokens + others + lacks(worker)) / options.prefill_tokens_per_s

    def seconds(worker: Worker, prefill: Worker | None) -> float:
        if prefill is None:
            others = max(worker.in_flight, worker.running)
            stalled = others * lacks(worker) / options.prefill_tokens_per_s
            return compute_s(worker) + options.stall * stalled
        pushed = compute_s(prefill) + options.handoff_s
        pushed += lacks(worker) / options.transfer_tokens_per_s
        return max(pushed, compute_s(worker) - lacks(worker) / options.prefill_tokens_per_s)

    asked = [target.worker] if target.prefill is None else [target.worker, target.prefill]
    assert not {*asked} & {*excluded}
    if target.prefill is not None:
        assert target.worker.role is Role.DECODE and target.prefill.role is Role.PREFILL
        assert connector_of(target.worker) == connector_of(target.prefill)
        assert can(connector_of(target.worker))
    if not target.ways:
        event("nothing to compare")
        return
    event("handed off" if target.prefill else str(target.worker.role))
    taken = seconds(target.worker, target.prefill)
    picked = {way.worker for way in target.ways}
    for worker in picked:
        assert taken <= seconds(worker, None) + 1e-9
        for prefill in registry.snapshot():
            if (
                worker.role is Role.DECODE
                and prefill.role is Role.PREFILL
                and prefill not in excluded
                and connector_of(prefill) == connector_of(worker)
            ):
                assert taken <= seconds(worker, prefill) + 1e-9
    for way in target.ways:
        assert abs(way.seconds - seconds(way.worker, way.prefill)) < 1e-9
