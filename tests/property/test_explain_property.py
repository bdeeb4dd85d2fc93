"""Whatever the fleet, the table and the request: an explanation says what routing then does, and changes nothing."""

import msgspec
from hypothesis import event, given, settings
from hypothesis import strategies as st

from pointsman.domain.explain import explain
from pointsman.domain.pairing import Pairing, PairingOptions
from pointsman.domain.policy import PolicyOptions, make_policy
from pointsman.domain.prefix_index import PrefixIndex
from pointsman.domain.registry import Registry, WorkerReport
from pointsman.domain.request import InferenceRequest
from pointsman.domain.router import Router
from pointsman.domain.routes import Backend, Route, RouteTable, Step
from pointsman.domain.worker import Role, Worker
from pointsman.errors import ModelNotFound, NoCapacity

SETTINGS = settings(deadline=None, derandomize=True, max_examples=300)

SERVED = ("v1", "v2", "v3")
MODELS = st.sampled_from(SERVED)

WORKERS = st.lists(
    st.fixed_dictionaries(
        {
            "model": MODELS,
            "role": st.sampled_from(list(Role)),
            "depth": st.integers(0, 4),
            "in_flight": st.integers(0, 4),
            "blocks": st.integers(-1, 6),
            "draining": st.integers(0, 4).map(lambda n: n == 0),
            "excluded": st.integers(0, 3).map(lambda n: n == 0),
        }
    ),
    max_size=9,
)

SPLITS = st.sampled_from([(), (1.0,), (0.9, 0.1), (0.7, 0.2, 0.1), (0.0, 1.0)])
TARGETS = st.sampled_from(
    [
        ("unified",),
        ("disaggregated",),
        ("disaggregated", "unified"),
        ("unified", "disaggregated"),
    ]
)


@st.composite
def tables(draw):  # type: ignore[no-untyped-def]
    weights = draw(SPLITS)
    steps = draw(st.lists(MODELS, min_size=2, max_size=3))
    return RouteTable(
        [
            Route(
                "public",
                aliases=("alias",),
                targets=draw(TARGETS),
                backends=tuple(map(Backend, SERVED, weights)),
            ),
            Route(
                "auto",
                targets=draw(TARGETS),
                cascade=(*[Step(m, "mean_logprob > -1") for m in steps[:-1]], Step(steps[-1])),
            ),
        ],
        epoch=draw(st.integers(1, 9)),
    )


def state(worker: Worker) -> list[object]:
    return [getattr(worker, name) for name in Worker.__slots__]


@SETTINGS
@given(
    st.sampled_from(["affinity", "least_outstanding", "weighted"]),
    st.sampled_from(["smallest", "salted"]),
    WORKERS,
    tables(),
    st.sets(MODELS, max_size=1),
    st.booleans(),
    st.lists(
        st.tuples(
            st.sampled_from(["public", "alias", "auto", "v1", "v2", "typo"]),
            st.text(max_size=8),
            st.integers(-1, 4),
        ),
        min_size=1,
        max_size=6,
    ),
)
def test_an_explanation_says_what_routing_then_does(  # type: ignore[no-untyped-def]
    name, tie, fleet, table, drained, paired, asked
):
    registry = Registry()
    for number, facts in enumerate(fleet):
        registry.beat(
            WorkerReport(
                f"w{number}", f"h:{8000 + number}", facts["model"], facts["role"].value,
                queue_depth=facts["depth"], kv_total_blocks=max(facts["blocks"], 0),
                draining=facts["draining"],
            ),
            0.0,
        )  # fmt: skip
    excluded = []
    for worker, facts in zip(registry.snapshot(), fleet, strict=True):
        worker.in_flight = facts["in_flight"]
        if facts["excluded"]:
            excluded.append(worker)
    for model in drained:
        registry.drain(model)
    options = PolicyOptions(tie_break=tie, salt=b"salt")
    pairing = Pairing(PrefixIndex(64, 60.0), PairingOptions()) if paired else None
    policy = make_policy(name, options, None)  # type: ignore[arg-type]
    router = Router(registry, policy, table, pairing=pairing)
    for model, request_id, step in asked:
        request = InferenceRequest(model, request_id, prompt=msgspec.json.encode(request_id))
        live = registry.snapshot()
        before = (
            [state(worker) for worker in live], registry.route_epoch, registry.drained,
            registry.seen(), registry.next_expiry,
        )  # fmt: skip
        why = explain(router, registry, request, excluded=excluded, step=step, now=1.0)
        again = explain(router, registry, request, excluded=excluded, step=step, now=1.0)
        assert why == again
        assert registry.snapshot() is live
        assert before == (
            [state(worker) for worker in live], registry.route_epoch, registry.drained,
            registry.seen(), registry.next_expiry,
        )  # fmt: skip
        told = {candidate.worker_id for candidate in (*why.candidates, *why.prefills)}
        assert not told & {veto.worker_id for veto in why.vetoed}
        if why.draw is not None:
            # A sum of weights is off by a rounding, and so is an end of a share.
            share = next(each for each in why.draw.backends if each.model == why.served_model)
            assert share.since - 1e-15 <= why.draw.value < share.until + 1e-15
        try:
            target = router.route(request, excluded, step, now=1.0)
        except (ModelNotFound, NoCapacity) as error:
            event("refused")
            assert why.refusal is not None
            assert (why.refusal.status, why.refusal.code) == (error.status, error.code)
            assert (why.pick, why.candidates, why.target) == (None, (), "")
            continue
        event(why.target)
        assert why.refusal is None
        assert why.pick == target.worker.id
        assert why.prefill == (target.prefill.id if target.prefill else None)
        assert (why.served_model, why.reason, why.policy_reason, why.cascade_step) == (
            target.served_model, target.reason, target.policy_reason, target.cascade_step,
        )  # fmt: skip
        assert [candidate.worker_id for candidate in why.candidates] == [
            worker.id for worker in target.candidates
        ]
        assert [candidate.load for candidate in why.candidates] == target.loads
        target.worker.in_flight += 1
