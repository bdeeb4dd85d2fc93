"""An explanation is what routing does, seen from the side: the draw, the candidates, the vetoes, the refusals."""

from collections.abc import Callable
from random import Random

import msgspec
import pytest

from pointsman.domain.explain import (
    SILENT,
    Candidate,
    Explanation,
    Refusal,
    Share,
    Veto,
    explain,
    name_of,
)
from pointsman.domain.policy import POLICIES, Policy, PolicyOptions, make_policy
from pointsman.domain.policy.affinity import Affinity
from pointsman.domain.policy.least_outstanding import LeastOutstanding
from pointsman.domain.policy.power_of_two import PowerOfTwo
from pointsman.domain.policy.weighted import Weighted
from pointsman.domain.registry import Registry, WorkerReport
from pointsman.domain.request import InferenceRequest
from pointsman.domain.router import Router
from pointsman.domain.routes import Backend, Route, RouteTable, Step
from pointsman.domain.worker import Worker

RULE = "mean_logprob > -1.2"


class Fleet:
    """A registry and a router, and the questions to them."""

    def __init__(self, *routes: Route, policy: Policy | None = None) -> None:
        self.registry = Registry()
        table = RouteTable(routes, epoch=7)
        self.router = Router(self.registry, policy or LeastOutstanding(), table)

    def beat(
        self, worker_id: str, model: str = "smol", depth: int = 0, *, role: str = "unified",
        draining: bool = False,
    ) -> Worker:  # fmt: skip
        address = f"{worker_id}.local:8000"
        self.registry.beat(
            WorkerReport(worker_id, address, model, role, queue_depth=depth, draining=draining),
            0.0,
        )
        return next(worker for worker in self.registry.snapshot() if worker.id == worker_id)

    def why(
        self,
        model: str = "smol",
        *excluded: Worker,
        request_id: str = "r1",
        step: int = 0,
        now: float = 0.0,
    ) -> Explanation:
        request = InferenceRequest(model, request_id, prompt=b'"once"')
        return explain(self.router, self.registry, request, excluded=excluded, step=step, now=now)


def vetoes(explanation: Explanation) -> dict[str, str]:
    return {veto.worker_id: veto.why for veto in explanation.vetoed}


def test_the_hand_example_is_explained() -> None:
    fleet = Fleet()
    for worker_id, depth in (("a", 2), ("b", 0), ("c", 1)):
        fleet.beat(worker_id, depth=depth)
    assert fleet.why() == Explanation(
        request_id="r1",
        model="smol",
        route=None,
        served_model="smol",
        target="unified",
        policy="least_outstanding",
        draw=None,
        rule="the lowest load wins, the smallest id among equals",
        candidates=(
            Candidate(worker_id="a", load=2, score=2.0),
            Candidate(worker_id="b", load=0, score=0.0),
            Candidate(worker_id="c", load=1, score=1.0),
        ),
        vetoed=(),
        pick="b",
        reason="load",
        policy_reason="load",
        refusal=None,
    )


def test_every_kind_of_veto_is_told_and_other_models_are_not_mentioned() -> None:
    split = (Backend("v3", 0.5), Backend("v4", 0.5))
    fleet = Fleet(Route("smol", backends=split))
    # unit(hash64("b")) is 0.243: v3 is drawn.
    failed = fleet.beat("failed", "v3")
    fleet.beat("free", "v3")
    fleet.beat("tired", "v3", draining=True)
    fleet.beat("pre", "v3", role="prefill")
    fleet.beat("dec", "v3", role="decode")
    fleet.beat("newer", "v4")
    fleet.beat("stranger", "another")
    explanation = fleet.why("smol", failed, request_id="b")
    assert [candidate.worker_id for candidate in explanation.candidates] == ["free"]
    assert explanation.vetoed == (
        Veto(worker_id="dec", why="role is decode"),
        Veto(worker_id="failed", why="excluded"),
        Veto(worker_id="newer", why="another backend was drawn"),
        Veto(worker_id="pre", why="role is prefill"),
        Veto(worker_id="tired", why="draining"),
    )
    assert (explanation.reason, explanation.policy_reason) == ("failover", "load")
    fleet.registry.drain("v3")
    assert vetoes(fleet.why("smol", failed, request_id="b")) == {
        "dec": "model is drained",
        "failed": "model is drained",
        "free": "model is drained",
        "newer": "another backend was drawn",
        "pre": "model is drained",
        "tired": "draining",
    }


def test_the_draw_shows_why_this_backend() -> None:
    split = (Backend("v3", 0.9), Backend("never", 0.0), Backend("v4", 0.1))
    fleet = Fleet(Route("smol", aliases=("s",), backends=split))
    fleet.beat("a", "v3")
    fleet.beat("b", "v4")
    explanation = fleet.why("s", request_id="a")
    assert explanation.draw is not None
    assert explanation.draw.value == 0.010753497314070604
    assert explanation.draw.backends == (
        Share(model="v3", weight=0.9, since=0.0, until=0.9),
        Share(model="never", weight=0.0, since=0.9, until=0.9),
        Share(model="v4", weight=0.1, since=0.9, until=1.0),
    )
    assert (explanation.model, explanation.route) == ("s", "smol")
    assert (explanation.served_model, explanation.pick, explanation.reason) == ("v3", "a", "canary")


def test_one_backend_and_a_cascade_are_no_draw() -> None:
    cascade = (Step("small", RULE), Step("large"))
    split = (Backend("v3", 0.5), Backend("v4", 0.5))
    fleet = Fleet(
        Route("smol", backends=(Backend("v3"),)), Route("auto", backends=split, cascade=cascade)
    )
    fleet.beat("a", "v3")
    fleet.beat("s", "small")
    fleet.beat("l", "large")
    assert fleet.why("smol").draw is None
    first, last = fleet.why("auto"), fleet.why("auto", step=9)
    assert (first.draw, last.draw) == (None, None)
    assert (first.pick, first.cascade_step, first.reason) == ("s", 0, "cascade")
    assert (last.pick, last.cascade_step, last.reason) == ("l", 1, "cascade")
    assert vetoes(first) == {"l": "another step of the cascade"}


def test_a_pair_has_candidates_for_both_legs() -> None:
    fleet = Fleet(Route("smol", targets=("disaggregated", "unified")))
    fleet.beat("d1", role="decode", depth=1)
    d2 = fleet.beat("d2", role="decode")
    p1 = fleet.beat("p1", role="prefill", depth=2)
    fleet.beat("p2", role="prefill", depth=3)
    fleet.beat("u")
    explanation = fleet.why()
    assert (explanation.target, explanation.pick, explanation.prefill) == (
        "disaggregated", "d2", "p1",
    )  # fmt: skip
    assert [(each.worker_id, each.score) for each in explanation.prefills] == [
        ("p1", 2.0), ("p2", 3.0),
    ]  # fmt: skip
    assert vetoes(explanation) == {"u": "role is unified"}
    retried = fleet.why("smol", d2, p1)
    assert (retried.pick, retried.prefill) == ("d1", "p2")
    assert vetoes(retried) == {"d2": "excluded", "p1": "excluded", "u": "role is unified"}


@pytest.mark.parametrize(
    ("role", "why"),
    [("decode", "no prefill worker to go with"), ("prefill", "no decode worker to go with")],
)
def test_half_a_pair_is_told_what_is_missing(role: str, why: str) -> None:
    fleet = Fleet(Route("smol", targets=("disaggregated",)))
    fleet.beat("half", role=role)
    explanation = fleet.why()
    assert vetoes(explanation) == {"half": why}
    assert (explanation.target, explanation.pick, explanation.prefill) == ("", None, None)


def test_a_worker_that_cannot_have_the_request_is_told_by_its_own_reason() -> None:
    fleet = Fleet()
    down = Worker("down", model="smol", http_address="h:1", static=True, polled=True)
    going = Worker("going", model="smol", http_address="h:2", static=True, terminating=True)
    lacks = Worker("lacks", model="smol", http_address="h:3", static=True)
    fleet.registry.set_listed("static", [down, going, lacks])
    fleet.router.lack(lacks, "/v1/rerank")
    fleet.beat("well", depth=9)
    request = InferenceRequest("smol", "r1", path="/v1/rerank")
    explanation = explain(fleet.router, fleet.registry, request, now=0.0)
    assert explanation.pick == "well"
    assert vetoes(explanation) == {
        "down": "down",
        "going": "draining",
        "lacks": "it does not serve /v1/rerank",
    }


def test_refusals_are_part_of_the_explanation() -> None:
    fleet = Fleet(Route("smol", backends=(Backend("v3"),)))
    missing = fleet.why("typo")
    assert missing.refusal == Refusal(
        status=404, code="model_not_found", message="the model 'typo' does not exist"
    )
    fleet.beat("a", "v3", draining=True)
    full = fleet.why()
    assert full.refusal is not None
    assert (full.refusal.status, full.refusal.code) == (503, "no_capacity")
    assert (full.route, full.served_model, full.candidates) == ("smol", "v3", ())
    assert (full.pick, full.reason, full.policy, full.cascade_step) == (
        None, "", "least_outstanding", -1,
    )  # fmt: skip
    assert vetoes(full) == {"a": "draining"}


def test_a_worker_that_is_due_is_gone_and_one_of_a_past_life_excludes_nobody() -> None:
    fleet = Fleet()
    fleet.beat("a")
    past = Worker("a", model="smol", http_address="h:1")
    explanation = fleet.why("smol", past)
    assert (explanation.pick, explanation.reason, explanation.vetoed) == ("a", "failover", ())
    assert fleet.why(now=6.0).refusal is not None


class Silent:
    """A policy of somebody else, which only picks."""

    def pick(
        self,
        workers: tuple[Worker, ...],
        load: Callable[[Worker], int],
        request: InferenceRequest,
    ) -> tuple[Worker, str]:
        raise AssertionError("an explanation must not pick")


def test_a_policy_that_does_not_look_ahead_shows_loads_and_no_pick() -> None:
    fleet = Fleet(policy=Silent())
    fleet.beat("a", depth=3)
    fleet.beat("b", depth=1)
    explanation = fleet.why()
    assert (explanation.policy, explanation.rule) == ("Silent", SILENT)
    assert explanation.candidates == (
        Candidate(worker_id="a", load=3), Candidate(worker_id="b", load=1),
    )  # fmt: skip
    assert (explanation.pick, explanation.reason, explanation.refusal) == (None, "", None)


def test_every_policy_of_ours_is_called_what_the_configuration_calls_it() -> None:
    made = {name: make_policy(name, PolicyOptions(), Random(1)) for name in POLICIES}
    assert {name: name_of(policy) for name, policy in made.items()} == {n: n for n in POLICIES}


@pytest.mark.parametrize("name", POLICIES)
def test_an_explanation_takes_nothing_from_the_requests_that_follow(name: str) -> None:
    def picks(*, explained: bool) -> list[str]:
        fleet = Fleet(policy=make_policy(name, PolicyOptions(), Random(3)))
        for number in range(5):
            fleet.beat(f"w{number}").kv_total_blocks = number
        made = []
        for number in range(100):
            if explained:
                fleet.why()
            request = InferenceRequest("smol", f"r{number}", prompt=b'"%d"' % number)
            worker = fleet.router.route(request, now=0.0).worker
            worker.in_flight += 1
            made.append(worker.id)
        return made

    assert picks(explained=True) == picks(explained=False)


def test_the_route_epoch_stays() -> None:
    fleet = Fleet()
    fleet.registry.route_epoch = 41
    fleet.why()
    assert fleet.registry.route_epoch == 41


def test_it_is_json_that_can_be_read_back() -> None:
    fleet = Fleet(Route("smol", backends=(Backend("v3", 0.5), Backend("v4", 0.5))))
    fleet.beat("a", "v3")
    for request_id in ("b", "engine-a#1"):
        explanation = fleet.why(request_id=request_id)
        assert (
            msgspec.json.decode(msgspec.json.encode(explanation), type=Explanation) == explanation
        )


# What the policies consider.


def workers(**loads: int) -> tuple[Worker, ...]:
    return tuple(
        Worker(name, model="m", http_address="h:1", queue_depth=load)
        for name, load in sorted(loads.items())
    )


def load_of(worker: Worker) -> int:
    return worker.queue_depth


REQUEST = InferenceRequest("m", "r1", prompt=b'"once"')


def test_salted_ties_are_said_to_be_salted() -> None:
    options = PolicyOptions(tie_break="salted", salt=b"1")
    for policy in (LeastOutstanding(options.rank()), Weighted(options.rank())):
        seen = policy.consider(workers(a=0, b=0, c=0), load_of, REQUEST)
        # The order among equals that `PolicyOptions.rank` shows.
        assert seen.pick is not None
        assert seen.pick.id == "b"
        assert seen.rule.endswith("this process's own order among equals")


def test_weighted_considers_its_counters_through_a_change_of_generation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pointsman.domain.policy.weighted.GENERATION", 3)
    policy = Weighted()
    big, small = workers(big=0, small=0)
    big.kv_total_blocks, small.kv_total_blocks = 3, -1
    for number in range(40):
        policy.pick(workers(**{f"gone{number}": 0}), load_of, REQUEST)
        seen = policy.consider((big, small), load_of, REQUEST)
        assert seen == policy.consider((big, small), load_of, REQUEST)
        assert seen.notes == ("weight 3", "weight 1")
        assert seen.rule == "the highest counter wins and pays 4, the smallest id among equals"
        assert not seen.repeatable
        best = max(score for score in seen.scores if score is not None)
        picked, _ = policy.pick((big, small), load_of, REQUEST)
        assert seen.pick is picked
        assert seen.scores[(big, small).index(picked)] == best


def test_affinity_names_the_owner_and_who_is_full() -> None:
    policy = Affinity()
    fleet = workers(a=0, b=0, c=0, d=0)
    idle = policy.consider(fleet, load_of, REQUEST)
    assert (idle.pick, idle.reason) == (fleet[3], "affinity")
    assert idle.notes == ("", "", "", "owner")
    fleet[3].queue_depth = 3
    spilt = policy.consider(fleet, load_of, REQUEST)
    assert (spilt.pick, spilt.reason) == (fleet[0], "load")
    assert spilt.scores == (1.0, 3.0, 2.0, 0.0)
    assert spilt.notes == ("", "", "", "owner; full, the cap is 2")
    assert spilt.rule == "the first clockwise from the prompt's beginning with a load below 2 wins"


def test_affinity_keeps_nothing_of_what_it_considers() -> None:
    policy = Affinity()
    fleet = workers(**{f"w{number:02}": 0 for number in range(12)})
    policy.pick(fleet[:4], load_of, REQUEST)
    rings = [(ring, ring.nodes) for ring in policy._rings]
    kept = (len(policy._fleets), policy._kept, policy._latest)
    seen = policy.consider(fleet, load_of, REQUEST)
    policy.consider(fleet[1:3], load_of, REQUEST)
    assert [(ring, ring.nodes) for ring in policy._rings] == rings
    assert (len(policy._fleets), policy._kept, policy._latest) == kept
    assert sorted(score for score in seen.scores if score is not None) == list(range(12))
    assert policy.pick(fleet, load_of, REQUEST) == (seen.pick, seen.reason)


class Untouchable:
    """A source of randomness that nobody may draw from."""

    def random(self) -> float:
        raise AssertionError("a random number was drawn")


@pytest.mark.parametrize(
    ("loads", "scores", "pick"),
    [
        ({"a": 4}, (1.0,), "a"),
        ({"a": 4, "b": 5}, (1.0, 0.0), "a"),
        ({"a": 4, "b": 4}, (0.5, 0.5), None),
        ({"a": 2, "b": 1, "c": 3}, (1 / 3, 2 / 3, 0.0), None),
        ({"a": 1, "b": 1, "c": 1, "d": 9}, (1 / 3, 1 / 3, 1 / 3, 0.0), None),
    ],
)
def test_power_of_two_gives_chances_and_draws_nothing(
    loads: dict[str, int], scores: tuple[float, ...], pick: str | None
) -> None:
    fleet = workers(**loads)
    seen = PowerOfTwo(Untouchable()).consider(fleet, load_of, REQUEST)
    assert seen.scores == pytest.approx(scores)
    assert (None if seen.pick is None else seen.pick.id) == pick


def test_the_chances_are_those_of_many_picks() -> None:
    fleet = workers(a=2, b=1, c=3, d=1, e=2)
    policy = PowerOfTwo(Random(11))
    seen = policy.consider(fleet, load_of, REQUEST)
    draws = 20_000
    made = [policy.pick(fleet, load_of, REQUEST)[0] for _ in range(draws)]
    for worker, chance in zip(fleet, seen.scores, strict=True):
        assert chance is not None
        # Five standard deviations of a share.
        assert made.count(worker) / draws == pytest.approx(chance, abs=5 * 0.5 / draws**0.5)
