"""Decisions are kept at the price of an append, and tell what was decided and what came of it, without the prompt."""

import tracemalloc
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
import pytest

from pointsman.domain.explain import Candidate, Decision
from pointsman.domain.keys import Principal, Scope
from pointsman.domain.policy import POLICIES, Policy, PolicyOptions, make_policy
from pointsman.domain.policy.least_outstanding import LeastOutstanding
from pointsman.domain.registry import Registry, WorkerReport
from pointsman.domain.request import InferenceRequest
from pointsman.domain.router import LOADS_KEPT, Router
from pointsman.domain.routes import Backend, Route, RouteTable
from pointsman.domain.worker import Worker
from pointsman.errors import ModelNotFound, NoCapacity
from pointsman.flow.attempts import attempts
from pointsman.flow.effects import Broken, ClientGone, Done, Lost, Result, Why
from pointsman.flow.exchange import CLIENT_GONE, Exchange
from pointsman.observe.decisions import POLICIES_KEPT, Decisions
from pointsman.testing.stories import Dialogue, answer

TRACE = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
SECRET = "tl_abcdefghijkl_" + 32 * "s"
MARKER = "swordfish"


class Gateway:
    """A fleet, a clock, stories without sockets, and the decisions that they leave."""

    def __init__(
        self,
        workers: str | list[str] = "abc",
        *routes: Route,
        policy: Policy | None = None,
        kept: int = 100,
    ) -> None:
        self.time = 50.0
        self.registry = Registry()
        for name in workers:
            self.registry.add(Worker(name, model="m", http_address=f"{name}:80"))
        policy = policy or LeastOutstanding()
        self.router = Router(self.registry, policy, RouteTable(routes))
        # The wall clock was at 1,000 s when the monotonic one was at 0.
        self.decisions = Decisions(kept, wall=lambda: 1000.0 + self.time, now=lambda: self.time)
        self.decisions.uses(policy)

    def worker(self, name: str) -> Worker:
        return next(each for each in self.registry.snapshot() if each.id == name)

    def begin(
        self, request_id: str = "r1", *, model: str = "m", prompt: bytes = b'"once"'
    ) -> Exchange:
        return Exchange(
            InferenceRequest(model, request_id, stream=True, prompt=prompt),
            path="/v1/completions",
            operation="text_completion",
            started=self.time,
            now=self.time,
            principal=Principal("k1", "acme", frozenset((Scope.INFER,))),
            trace=TRACE,
        )

    def tell(self, x: Exchange, *results: Result) -> Dialogue:
        """Run the story of a request; a second passes before each result."""
        dialogue = Dialogue(attempts(x, self.router, 3))
        for result in results:
            self.time += 1.0
            x.now = self.time
            if isinstance(result, Done | Broken):
                x.status, x.first_byte_at = 200, x.now - 0.5
            dialogue.gets(result)
        return dialogue

    def end(self, x: Exchange) -> Decision:
        x.finished_at = x.now
        self.decisions.finished(x)
        return self.decisions.find(limit=1)[0]

    def ask(self, request_id: str = "r1", **facts: Any) -> Decision:
        """Return what a request leaves that the first worker answers."""
        x = self.begin(request_id, **facts)
        self.tell(x, answer(200), Done()).ends()
        return self.end(x)


def test_a_decision_tells_who_asked_what_was_tried_and_what_came_of_it() -> None:
    gateway = Gateway()
    gateway.worker("c").queue_depth = 4
    x = gateway.begin()
    reset = Lost(Why.RESET, "worker a closed the connection")
    gateway.tell(x, reset, answer(200), Done()).ends()
    gateway.time += 60.0
    decision = gateway.end(x)
    assert decision.at == pytest.approx(1050.0)
    assert (decision.seconds, decision.first_byte_s) == (3.0, 2.5)
    assert (decision.request_id, decision.path, decision.model) == ("r1", "/v1/completions", "m")
    assert (decision.stream, decision.status, decision.error) == (True, 200, "")
    assert (decision.key_id, decision.tenant) == ("k1", "acme")
    assert decision.trace_id == "4bf92f3577b34da6a3ce929d0e0e4736"
    first, second = decision.attempts
    assert (first.worker_id, first.outcome, first.after_s) == ("a", "reset", 0.0)
    assert (first.reason, first.policy_reason, first.served_model) == ("load", "load", "m")
    assert first.candidates == (
        Candidate(worker_id="a", load=0, score=0.0),
        Candidate(worker_id="b", load=0, score=0.0),
        Candidate(worker_id="c", load=4, score=4.0),
    )
    assert (second.worker_id, second.outcome, second.after_s) == ("b", "answered", 1.0)
    assert (second.reason, second.policy_reason, second.candidate_count) == ("failover", "load", 2)
    assert [candidate.worker_id for candidate in second.candidates] == ["b", "c"]


def test_the_loads_are_those_of_the_moment_and_a_past_life_is_shown_by_its_id() -> None:
    gateway = Gateway([])
    beat = gateway.registry.beat
    beat(WorkerReport("a", "a:80", "m", queue_depth=2, incarnation=1), 50.0)
    x = gateway.begin()
    gateway.tell(x, answer(200), Done()).ends()
    beat(WorkerReport("a", "a:80", "m", queue_depth=9, incarnation=2), 52.0)
    (tried,) = gateway.end(x).attempts
    assert (tried.worker_id, tried.candidates) == (
        "a",
        (Candidate(worker_id="a", load=2, score=2.0),),
    )


def gone(gateway: Gateway, x: Exchange) -> None:
    gateway.tell(x).throws(ClientGone()).raises(ClientGone)
    x.error, x.status = CLIENT_GONE, 499


def broken(gateway: Gateway, x: Exchange) -> None:
    gateway.tell(x, answer(200, b"data: 1\n\n", stream=True), Broken(Why.TIMED_OUT)).ends()


def exhausted(gateway: Gateway, x: Exchange) -> None:
    lost = Lost(Why.REFUSED, "")
    x.error = gateway.tell(x, lost, answer(503), lost).raises(NoCapacity).code or ""  # type: ignore[attr-defined]
    x.status = 503


def full(gateway: Gateway, x: Exchange) -> None:
    gateway.tell(x, answer(429), answer(429), answer(429), Done()).ends()


def failed_in_the_gateway(gateway: Gateway, x: Exchange) -> None:
    gateway.tell(x, answer(200))
    x.error = "internal_error"


@pytest.mark.parametrize(
    ("story", "outcomes"),
    [
        (gone, ["client_gone"]),
        (broken, ["broken: timed out"]),
        (exhausted, ["refused", "503", "refused"]),
        (full, ["429", "429", "429"]),
        (failed_in_the_gateway, ["broken: internal_error"]),
    ],
)
def test_every_end_of_an_attempt_has_its_word(
    story: Callable[[Gateway, Exchange], None], outcomes: list[str]
) -> None:
    gateway = Gateway()
    x = gateway.begin()
    story(gateway, x)
    assert [tried.outcome for tried in gateway.end(x).attempts] == outcomes


def test_a_request_that_nobody_was_asked_for_has_no_attempts() -> None:
    gateway = Gateway([])
    x = gateway.begin()
    gateway.tell(x).raises(ModelNotFound)
    x.trace, x.status, x.error = b"", 404, "model_not_found"
    decision = gateway.end(x)
    assert (decision.attempts, decision.first_byte_s, decision.trace_id) == ((), None, "")


# Looking them up.


def test_they_come_newest_first_and_the_oldest_fall_out() -> None:
    gateway = Gateway(kept=3)
    for number in range(5):
        gateway.ask(f"r{number}")
    assert [each.request_id for each in gateway.decisions.find()] == ["r4", "r3", "r2"]
    assert [each.request_id for each in gateway.decisions.find(limit=2)] == ["r4", "r3"]
    assert gateway.decisions.find(limit=0) == []
    assert gateway.decisions.find(request_id="r0") == []


def test_they_are_found_by_request_by_any_worker_asked_and_by_either_model() -> None:
    split = (Backend("m", 1.0), Backend("other", 0.0))
    gateway = Gateway("abc", Route("public", aliases=("alias",), backends=split))
    gateway.ask("plain")
    x = gateway.begin("moved", model="alias")
    gateway.tell(x, Lost(Why.RESET), answer(200), Done()).ends()
    gateway.end(x)

    def found(**wanted: str) -> list[str]:
        return [each.request_id for each in gateway.decisions.find(**wanted)]  # type: ignore[arg-type]

    assert found(request_id="plain") == ["plain"]
    assert found(worker="a") == ["moved", "plain"]
    assert found(worker="b") == ["moved"]
    assert found(worker="c") == []
    assert found(model="alias") == ["moved"]
    assert found(model="m") == ["moved", "plain"]
    assert found(model="public") == []
    assert found(model="m", worker="b", request_id="plain") == []


def test_none_are_kept_where_none_are_wanted() -> None:
    gateway = Gateway(kept=0)
    gateway.decisions.finished(gateway.begin())
    assert gateway.decisions.find() == []


# What they do not tell.


@pytest.mark.parametrize("name", POLICIES)
def test_neither_a_prompt_nor_a_key_is_kept(name: str) -> None:
    gateway = Gateway(policy=make_policy(name, PolicyOptions(), Random(1)))
    prompt = msgspec.json.encode(f"{MARKER} begins the text, and {MARKER} is its end" * 20)
    x = gateway.begin(SECRET, model=SECRET, prompt=prompt)
    x.request.messages = prompt
    gateway.registry.add(Worker("z", model=SECRET, http_address="z:80"))
    gateway.tell(x, answer(200), Done()).ends()
    shown = msgspec.json.encode(gateway.end(x)).decode()
    assert '"worker_id":"z"' in shown
    assert MARKER not in shown
    assert "ssss" not in shown
    assert x.request.prompt is None
    assert x.request.messages is None


# Scores.


def scores(decision: Decision) -> list[float | None]:
    return [candidate.score for candidate in decision.attempts[0].candidates]


def test_scores_are_worked_out_again_where_a_policy_depends_on_nothing_else() -> None:
    for name, expected in {
        "affinity": [1.0, 3.0, 2.0, 0.0],
        "least_outstanding": [0.0, 0.0, 0.0, 3.0],
        "power_of_two": [1 / 3, 1 / 3, 1 / 3, 0.0],
        "weighted": [None, None, None, None],
    }.items():
        gateway = Gateway("abcd", policy=make_policy(name, PolicyOptions(), Random(1)))
        gateway.worker("d").in_flight = 3
        decision = gateway.ask()
        assert scores(decision) == pytest.approx(expected), name
        assert [each.load for each in decision.attempts[0].candidates] == [0, 0, 0, 3]
        if name == "affinity":
            assert decision.attempts[0].policy_reason == "load"
            assert decision.attempts[0].candidates[3].note == "owner; full, the cap is 2"


def test_a_decision_is_explained_by_the_policy_that_made_it() -> None:
    gateway = Gateway()
    gateway.worker("a").queue_depth = 1
    gateway.ask("before")
    affinity = make_policy("affinity", PolicyOptions(), Random(1))
    gateway.router.policy = affinity
    gateway.decisions.uses(affinity)
    gateway.ask("after")
    after, before = gateway.decisions.find()
    assert scores(before) == [1.0, 0.0, 0.0]
    assert sorted(scores(after)) == [0.0, 1.0, 2.0]  # type: ignore[type-var]


def test_what_cannot_be_explained_truly_has_no_scores() -> None:
    # By a policy that is not kept any more, by one that nobody told of, and by one that would have picked another.
    gateway = Gateway()
    assert scores(gateway.ask()) == [0.0, 0.0, 0.0]
    for _ in range(POLICIES_KEPT):
        gateway.time += 1.0
        gateway.decisions.uses(LeastOutstanding())
    assert scores(gateway.decisions.find()[0]) == [None, None, None]
    gateway.router.policy = LeastOutstanding({"a": 2, "b": 1, "c": 0}.__getitem__)
    decision = gateway.ask()
    assert (decision.attempts[0].worker_id, scores(decision)) == ("c", [None, None, None])


def test_a_policy_that_does_not_say_what_it_thinks_leaves_loads() -> None:
    class Last:
        def pick(self, workers: Any, load: Any, request: Any) -> tuple[Worker, str]:
            return workers[-1], "last"

    gateway = Gateway(policy=Last())
    (tried,) = gateway.ask().attempts
    assert (tried.worker_id, tried.policy_reason) == ("c", "last")
    assert tried.candidates[0] == Candidate(worker_id="a", load=0)


def test_of_many_candidates_the_count_is_kept() -> None:
    gateway = Gateway([f"w{number:03}" for number in range(LOADS_KEPT + 1)])
    (tried,) = gateway.ask().attempts
    assert (tried.worker_id, tried.candidates, tried.candidate_count) == ("w000", (), 65)


def test_o09_each_of_1500_requests_leaves_a_record_that_tells_why() -> None:
    gateway = Gateway(
        "abcde", policy=make_policy("affinity", PolicyOptions(), Random(1)), kept=1500
    )
    random = Random(9)
    told: dict[str, list[tuple[str, str]]] = {}
    for number in range(1500):
        for worker in gateway.registry.snapshot():
            worker.queue_depth = random.randrange(4)
        x = gateway.begin(f"r{number}", prompt=b'"conversation %d"' % random.randrange(200))
        failures = [Lost(Why.RESET)] * (random.random() < 0.1)
        gateway.tell(x, *failures, answer(200), Done()).ends()
        told[x.request_id] = [(each.target.worker.id, each.target.reason) for each in x.tries]
        x.finished_at = x.now
        gateway.decisions.finished(x)
    kept = gateway.decisions.find(limit=1500)
    assert [each.request_id for each in kept] == [f"r{number}" for number in reversed(range(1500))]
    reasons = set()
    for decision in kept:
        assert [(t.worker_id, t.reason) for t in decision.attempts] == told[decision.request_id]
        for tried in decision.attempts:
            reasons.add(tried.reason)
            assert tried.candidate_count == len(tried.candidates) >= 4
            by_place = sorted(tried.candidates, key=lambda each: each.score or 0.0)
            assert [each.score for each in by_place] == list(range(len(by_place)))
            # The record alone tells why: the first clockwise that is not full.
            free = [each for each in by_place if "full" not in each.note]
            assert free[0].worker_id == tried.worker_id
            owner = by_place[0]
            assert owner.note.startswith("owner")
            if tried.reason == "affinity":
                assert owner.worker_id == tried.worker_id
    assert reasons == {"affinity", "load", "failover"}


def test_a_record_is_small() -> None:
    gateway = Gateway("abcdefghijklmnop", kept=2000)
    # What is shared is there already.
    gateway.ask()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(1000):
            x = gateway.begin(f"r{number}", prompt=b'"%d"' % number + b"x" * 100_000)
            gateway.tell(x, answer(200), Done()).ends()
            gateway.decisions.finished(x)
        del x
        each = (tracemalloc.get_traced_memory()[0] - before) / 1000
    finally:
        tracemalloc.stop()
    # The prompt of 100 kB is not in it.
    assert each < 2048
