"""Requests find their worker, or the right refusal."""

from random import Random

import pytest

from pointsman.domain.ledger import Lease
from pointsman.domain.policy import Policy, PolicyOptions, make_policy
from pointsman.domain.policy.least_outstanding import LeastOutstanding
from pointsman.domain.registry import Registry, WorkerReport
from pointsman.domain.request import InferenceRequest
from pointsman.domain.router import Router
from pointsman.domain.routes import Backend, Route, RouteTable, Step
from pointsman.domain.worker import ServedModel, Worker
from pointsman.errors import InvalidRoutes, ModelNotFound, NoCapacity, UnsupportedEndpoint

RULE = "mean_logprob > -1.2"


def beat(
    registry: Registry,
    worker_id: str,
    now: float = 0.0,
    *,
    model: str = "smol",
    role: str = "unified",
    queue_depth: int = 0,
    draining: bool = False,
    incarnation: int | None = None,
) -> Worker:
    registry.beat(
        WorkerReport(
            worker_id,
            f"{worker_id}.local:8000",
            model,
            role,
            queue_depth=queue_depth,
            draining=draining,
            incarnation=incarnation,
        ),
        now,
    )
    return next(worker for worker in registry.snapshot() if worker.id == worker_id)


def request(model: str = "smol", request_id: str = "r1") -> InferenceRequest:
    return InferenceRequest(model, request_id)


def fleet(*routes: Route, policy: Policy | None = None) -> tuple[Registry, Router]:
    registry = Registry()
    return registry, Router(registry, policy or LeastOutstanding(), RouteTable(routes))


def test_hand_example() -> None:
    registry, router = fleet()
    for worker_id, depth in (("a", 2), ("b", 0), ("c", 1)):
        beat(registry, worker_id, 0.0, queue_depth=depth)
    # 1. Loads 2, 0, 1.
    target = router.route(request(request_id="r1"), now=0.0)
    assert (target.worker.id, target.reason) == ("b", "load")
    # 2. Two in flight on b: loads 2, 2, 1.
    leases = [Lease(target.worker), Lease(target.worker)]
    assert router.route(request(request_id="r2"), now=0.0).worker.id == "c"
    # 3. Only a goes on.
    beat(registry, "a", 2.0, queue_depth=2)
    beat(registry, "a", 4.0, queue_depth=2)
    # 4. At 5.999 s all three are listed.
    registry.expire(5.999)
    assert [worker.id for worker in registry.snapshot()] == ["a", "b", "c"]
    # 5. At 6 s only a is.
    assert router.route(request(request_id="r3"), now=6.0).worker.id == "a"
    assert [worker.id for worker in registry.snapshot()] == ["a"]
    for lease in leases:
        lease.close()


def test_model_not_found_and_no_capacity() -> None:
    registry, router = fleet(Route("routed", aliases=("alias",)))
    with pytest.raises(ModelNotFound) as missing:
        router.route(request("smol"), now=0.0)
    assert (missing.value.status, missing.value.code) == (404, "model_not_found")
    assert missing.value.param == "model"
    for name in ("routed", "alias"):
        with pytest.raises(NoCapacity) as full:
            router.route(request(name), now=0.0)
        assert (full.value.status, full.value.code) == (503, "no_capacity")
        assert full.value.retry_after == 1
    with pytest.raises(NoCapacity):
        router.ready(0.0)
    beat(registry, "a", 0.0)
    router.ready(0.0)
    assert router.route(request("smol"), now=0.0).worker.id == "a"
    # Its only worker is gone: known, but nobody is there.
    with pytest.raises(NoCapacity):
        router.ready(6.0)
    with pytest.raises(NoCapacity):
        router.route(request("smol"), now=6.0)


def test_r16_404_only_for_a_model_that_nobody_ever_named() -> None:
    canary = Route("public", backends=(Backend("served", 1.0),))
    cascade = Route("auto", cascade=(Step("small", RULE), Step("large")))
    registry, router = fleet(canary, cascade)
    registry.remember("scaled-to-zero", 0.0)
    beat(registry, "d", 0.0, model="draining", draining=True)
    beat(registry, "x", 0.0, model="drained")
    beat(registry, "p", 0.0, model="prefill-only", role="prefill")
    registry.drain("drained")
    known = ["public", "served", "auto", "small", "large", "scaled-to-zero", "draining", "drained"]
    for model in [*known, "prefill-only"]:
        with pytest.raises(NoCapacity):
            router.route(request(model), now=1.0)
    with pytest.raises(ModelNotFound):
        router.route(request("typo"), now=1.0)
    # The memory lasts an hour.
    with pytest.raises(ModelNotFound):
        router.route(request("scaled-to-zero"), now=3601.0)


def test_refusals_do_not_repeat_a_huge_model_name() -> None:
    _, router = fleet()
    with pytest.raises(ModelNotFound) as caught:
        router.route(request("m" * 100_000), now=0.0)
    assert len(caught.value.message) < 400


def test_an_alias_reaches_the_engine_as_the_served_model() -> None:
    registry, router = fleet(Route("smol-v3", aliases=("smol",)))
    beat(registry, "a", model="smol-v3")
    target = router.route(request("smol"), now=0.0)
    assert (target.served_model, target.reason, target.cascade_step) == ("smol-v3", "load", -1)
    assert target.prefill is None


def test_a_canary_is_drawn_by_request_id_and_does_not_fall_over_to_its_sibling() -> None:
    split = (Backend("v3", 0.5), Backend("v4", 0.5))
    registry, router = fleet(Route("smol", backends=split))
    beat(registry, "a", model="v3")
    # unit("b") is 0.243, unit("engine-a#1") 0.746.
    target = router.route(request(request_id="b"), now=0.0)
    assert (target.worker.id, target.served_model, target.reason) == ("a", "v3", "canary")
    with pytest.raises(NoCapacity):
        router.route(request(request_id="engine-a#1"), now=0.0)


def test_one_backend_is_no_canary() -> None:
    registry, router = fleet(Route("smol", backends=(Backend("v3"),)))
    beat(registry, "a", model="v3")
    assert router.route(request(), now=0.0).reason == "load"


@pytest.mark.parametrize(
    ("step", "model", "index"),
    [(-5, "small", 0), (0, "small", 0), (1, "large", 1), (9, "large", 1)],
)
def test_the_cascade_step_is_clamped_and_names_the_served_model(
    step: int, model: str, index: int
) -> None:
    split = (Backend("v3", 0.5), Backend("v4", 0.5))
    cascade = (Step("small", RULE), Step("large"))
    registry, router = fleet(Route("auto", backends=split, cascade=cascade))
    beat(registry, "s", model="small")
    beat(registry, "l", model="large")
    target = router.route(request("auto"), step=step, now=0.0)
    assert (target.served_model, target.cascade_step, target.reason) == (model, index, "cascade")


def test_without_a_cascade_the_step_does_not_matter() -> None:
    registry, router = fleet()
    beat(registry, "a")
    assert router.route(request(), step=3, now=0.0).cascade_step == -1


# Exclusions.


def test_excluded_workers_are_left_out_and_the_reason_says_failover() -> None:
    split = (Backend("smol", 1.0), Backend("other", 0.0))
    registry, router = fleet(
        Route("canary", backends=split),
        Route("auto", cascade=(Step("smol", RULE), Step("large"))),
    )
    a, b = beat(registry, "a"), beat(registry, "b", queue_depth=9)
    for model in ("smol", "canary", "auto"):
        target = router.route(request(model), (a,), now=0.0)
        assert (target.worker, target.reason) == (b, "failover")
    assert router.route(request(), {b}, now=0.0).worker is a
    with pytest.raises(NoCapacity):
        router.route(request(), [a, b], now=0.0)


def test_a_restarted_worker_may_serve_the_request_that_its_former_life_failed() -> None:
    registry, router = fleet()
    old = beat(registry, "a", incarnation=1)
    new = beat(registry, "a", incarnation=2)
    target = router.route(request(), (old,), now=0.0)
    assert target.worker is new
    assert target.reason == "failover"


@pytest.mark.parametrize("name", ["affinity", "least_outstanding", "power_of_two", "weighted"])
def test_r22_a_dead_or_failed_owner_is_never_picked_whatever_the_policy_prefers(name: str) -> None:
    registry, router = fleet(policy=make_policy(name, PolicyOptions(), Random(7)))
    for worker_id in "abc":
        beat(registry, worker_id, 0.0)
    hot = InferenceRequest("smol", "r1", prompt=b'"the hottest prefix of all"')
    owner = router.route(hot, now=0.0).worker
    # It failed this request.
    for _ in range(50):
        assert router.route(hot, (owner,), now=1.0).worker is not owner
    # It died.
    for worker in registry.snapshot():
        if worker is not owner:
            beat(registry, worker.id, 5.0)
    for _ in range(50):
        assert router.route(hot, now=6.0).worker is not owner


def test_policies_see_the_same_tuple_while_nothing_is_taken_out() -> None:
    seen: list[tuple[Worker, ...]] = []

    class Spy(LeastOutstanding):
        def pick(self, workers, load, request):  # type: ignore[no-untyped-def]
            seen.append(workers)
            return super().pick(workers, load, request)

    registry, router = fleet(policy=Spy())
    beat(registry, "a")
    gone = Worker("gone", model="smol", http_address="h:1")
    router.route(request(), now=0.0)
    router.route(request(), (gone,), now=0.0)
    assert seen[0] is seen[1]


# Targets.


def split_fleet(*targets: str) -> tuple[Registry, Router]:
    return fleet(Route("smol", targets=targets))


def test_a_disaggregated_target_is_a_decode_worker_and_the_least_loaded_prefill_worker() -> None:
    registry, router = split_fleet("disaggregated")
    beat(registry, "d1", role="decode", queue_depth=1)
    d2 = beat(registry, "d2", role="decode")
    beat(registry, "p1", role="prefill", queue_depth=2)
    p2, p3 = beat(registry, "p2", role="prefill"), beat(registry, "p3", role="prefill")
    beat(registry, "u", role="unified")
    target = router.route(request(), now=0.0)
    assert (target.worker, target.prefill) == (d2, p2)
    lease = Lease(p2)
    assert router.route(request(), now=0.0).prefill is p3
    lease.close()


def test_only_the_leg_that_failed_is_excluded() -> None:
    registry, router = split_fleet("disaggregated")
    d = beat(registry, "d", role="decode")
    p1, p2 = beat(registry, "p1", role="prefill"), beat(registry, "p2", role="prefill")
    target = router.route(request(), (p1,), now=0.0)
    assert (target.worker, target.prefill, target.reason) == (d, p2, "failover")
    with pytest.raises(NoCapacity):
        router.route(request(), (d,), now=0.0)
    with pytest.raises(NoCapacity):
        router.route(request(), (p1, p2), now=0.0)


def test_targets_are_an_order_of_preference() -> None:
    registry, router = split_fleet("disaggregated", "unified")
    u = beat(registry, "u")
    assert router.route(request(), now=0.0).worker is u
    d = beat(registry, "d", role="decode")
    # A decode worker alone is no pair.
    assert router.route(request(), now=0.0).worker is u
    p = beat(registry, "p", role="prefill")
    target = router.route(request(), now=0.0)
    assert (target.worker, target.prefill) == (d, p)
    # A prefill worker alone is none either.
    target = router.route(request(), (d,), now=0.0)
    assert (target.worker, target.prefill) == (u, None)


def test_unified_first_falls_back_to_the_pair() -> None:
    registry, router = split_fleet("unified", "disaggregated")
    d, p = beat(registry, "d", role="decode"), beat(registry, "p", role="prefill")
    target = router.route(request(), now=0.0)
    assert (target.worker, target.prefill) == (d, p)
    u = beat(registry, "u")
    target = router.route(request(), now=0.0)
    assert (target.worker, target.prefill) == (u, None)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_prefill_and_decode_workers_never_serve_a_unified_route(role: str) -> None:
    registry, router = fleet()
    beat(registry, "a", role=role)
    with pytest.raises(NoCapacity):
        router.route(request(), now=0.0)
    router.ready(0.0)


# The table.


def test_the_epoch_starts_at_one_and_grows_with_every_table() -> None:
    registry, router = fleet()
    assert registry.route_epoch == 1
    assert router.table.etag == '"routes-1"'
    assert router.set_routes([Route("public")]) == 2
    assert registry.route_epoch == 2
    assert router.table.models() == ["public"]
    assert registry.beat(WorkerReport("a", "h:1", "m"), 0.0).route_epoch == 2


def test_the_epoch_of_the_store_goes_on() -> None:
    registry = Registry()
    router = Router(registry, LeastOutstanding(), RouteTable([Route("m")], epoch=41))
    assert registry.route_epoch == 41
    assert router.set_routes([]) == 42


def test_a_bad_table_changes_nothing() -> None:
    registry, router = fleet(Route("public"))
    with pytest.raises(InvalidRoutes):
        router.set_routes([Route("")])
    assert router.table.models() == ["public"]
    assert (router.table.epoch, registry.route_epoch) == (1, 1)


def test_a_table_that_is_adopted_keeps_its_epoch_and_workers_hear_of_it() -> None:
    registry, router = fleet(Route("public"))
    table = RouteTable([Route("other", aliases=("o",))], epoch=9)
    router.adopt(table)
    assert router.table is table
    assert registry.beat(WorkerReport("a", "h:1", "other"), 0.0).route_epoch == 9
    assert router.route(request("o"), now=0.0).worker.id == "a"
    with pytest.raises(ModelNotFound):
        router.route(request("public"), now=0.0)
    assert router.set_routes([]) == 10


def test_a_new_policy_picks_from_the_next_request_on() -> None:
    registry, router = fleet()
    beat(registry, "a", queue_depth=1)
    beat(registry, "b")
    assert router.route(request(), now=0.0).worker.id == "b"
    router.policy = weighted = make_policy("weighted", PolicyOptions(), Random(1))
    assert router.policy is weighted
    assert router.route(request(), now=0.0).worker.id == "a"


@pytest.mark.parametrize(
    ("listed", "asked", "permitted"),
    [
        ((), "anything", True),
        (("smol-v3",), "smol-v3", True),
        (("smol-v3",), "smol", True),
        (("smol",), "smol-v3", True),
        (("smol",), "tiny", True),
        (("other", "tiny"), "smol", True),
        (("other",), "smol", False),
        (("other",), "nobody", False),
        (("nobody",), "nobody", True),
        (("nobody",), "nobody-else", False),
        (("smol",), "engine", False),
    ],
)
def test_a_list_of_models_permits_every_name_of_their_routes_and_no_other(
    listed: tuple[str, ...], asked: str, permitted: bool
) -> None:
    route = Route("smol-v3", aliases=("smol", "tiny"), backends=(Backend("engine"),))
    _, router = fleet(route, Route("other"))
    assert router.permits(listed, asked) == permitted


def test_models_are_those_of_the_table_and_of_routable_workers() -> None:
    registry, router = fleet(Route("public", aliases=("alias",)), Route("smol"))
    beat(registry, "a", 0.0, model="smol")
    beat(registry, "b", 0.0, model="internal")
    beat(registry, "c", 0.0, model="hidden", draining=True)
    assert [each.id for each in router.models(1.0)] == ["internal", "public", "smol"]
    assert [each.id for each in router.models(6.0)] == ["public", "smol"]


def test_a_target_shows_where_it_goes() -> None:
    registry, router = fleet()
    beat(registry, "a")
    assert repr(router.route(request(), now=0.0)) == "<Target a smol load>"


SERVES = {"vllm": frozenset(("/chat", "/rerank")), "llamacpp": frozenset(("/chat", "/count"))}


def typed(*workers: tuple[str, str]) -> tuple[dict[str, Worker], Router]:
    """Return workers of one model, given as id and dialect, and a router that knows what dialects serve."""
    registry = Registry()
    made = {
        name: Worker(name, model="m", http_address=f"{name}:80", dialect=dialect, static=True)
        for name, dialect in workers
    }
    for worker in made.values():
        registry.add(worker)
    return made, Router(registry, LeastOutstanding(), RouteTable(), SERVES)


def asked(path: str) -> InferenceRequest:
    return InferenceRequest("m", "r1", path=path)


@pytest.mark.parametrize(
    ("path", "candidates"),
    [
        ("/chat", "abcd"),
        ("/rerank", "bcd"),
        ("/count", "acd"),
        # What no dialect knows, anybody may serve.
        ("/mine", "abcd"),
        ("", "abcd"),
    ],
)
def test_workers_whose_dialect_lacks_the_path_are_not_asked(path: str, candidates: str) -> None:
    _, router = typed(("a", "llamacpp"), ("b", "vllm"), ("c", ""), ("d", "openai"))
    target = router.route(asked(path), now=0.0)
    assert "".join(worker.id for worker in target.candidates) == candidates
    # The same tuple again: policies recognise it by identity.
    assert router.route(asked(path), now=0.0).candidates is target.candidates


def test_a_worker_that_turned_out_to_lack_a_path_gets_no_more_of_it() -> None:
    workers, router = typed(("a", ""), ("b", ""))
    router.lack(workers["a"], "/mine")
    assert router.route(asked("/mine"), now=0.0).worker.id == "b"
    assert router.route(asked("/chat"), now=0.0).worker.id == "a"
    # Until its next life.
    workers["a"].lacks.clear()
    assert router.route(asked("/mine"), now=0.0).worker.id == "a"


def test_where_nobody_serves_a_path_the_client_is_told_who_does_not() -> None:
    workers, router = typed(("b", ""), ("a", "llamacpp"), ("c", "vllm"))
    for name in "bc":
        router.lack(workers[name], "/rerank")
    with pytest.raises(UnsupportedEndpoint) as refused:
        router.route(asked("/rerank"), now=0.0)
    assert (refused.value.status, refused.value.code) == (404, "unsupported_endpoint")
    assert refused.value.message == (
        "no worker of the model 'm' serves /rerank: a (llamacpp), b, c (vllm)"
    )
    # Also where they were asked for this request.
    with pytest.raises(UnsupportedEndpoint):
        router.route(asked("/rerank"), [workers["b"]], now=0.0)


def test_a_worker_that_failed_may_serve_the_path_another_time() -> None:
    workers, router = typed(("a", "llamacpp"), ("b", "vllm"))
    with pytest.raises(NoCapacity):
        router.route(asked("/rerank"), [workers["b"]], now=0.0)


def test_a_long_list_of_those_that_lack_a_path_is_cut() -> None:
    _, router = typed(*((f"w{number:02}", "llamacpp") for number in range(20)))
    with pytest.raises(UnsupportedEndpoint, match=r"w15 \(llamacpp\) and 4 more"):
        router.route(asked("/rerank"), now=0.0)


def test_a_path_for_a_model_that_nobody_has_is_no_matter_of_the_path() -> None:
    _, router = typed()
    with pytest.raises(ModelNotFound):
        router.route(asked("/rerank"), now=0.0)


def test_the_lists_of_those_that_serve_a_path_do_not_grow_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pointsman.domain.router.KEPT", 1)
    workers, router = typed(("a", ""), ("b", ""))
    for path in ("/one", "/two", "/one"):
        router.lack(workers["a"], path)
        assert router.route(asked(path), now=0.0).worker.id == "b"


def test_decode_workers_that_lack_the_path_take_no_hand_off() -> None:
    registry, router = fleet(Route("m", targets=("disaggregated",)))
    beat(registry, "p", role="prefill", model="m")
    decode = beat(registry, "d", role="decode", model="m")
    router.lack(decode, "/mine")
    with pytest.raises(UnsupportedEndpoint, match=r"d \(tl\)"):
        router.route(asked("/mine"), now=0.0)


def test_h18_models_are_the_union_with_what_is_known_of_them() -> None:
    routes = (
        Route("chat", backends=(Backend("smol", 0.5), Backend("large", 0.5))),
        Route("auto", cascade=(Step("smol", RULE), Step("large"))),
        Route("smol", aliases=("s",)),
        Route("idle"),
    )
    registry, router = fleet(*routes)
    adapter = ServedModel("fr", "smol", 2048)
    for name, model, length, served in (
        ("b", "smol", 4096, (adapter,)),
        ("a", "smol", 2048, ()),
        ("c", "large", 8192, ()),
    ):
        registry.beat(
            WorkerReport(name, f"{name}:80", model, served=served, max_model_len=length), 0.0
        )
    listed = [
        ServedModel("auto", "", 2048),
        ServedModel("chat", "", 2048),
        ServedModel("fr", "smol", 2048),
        ServedModel("idle"),
        ServedModel("large", "", 8192),
        ServedModel("smol", "", 2048),
    ]
    assert router.models(0.0) == listed
    assert router.models(0.0) == listed
