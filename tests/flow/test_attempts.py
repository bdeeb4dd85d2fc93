"""The failover story as dialogues: the story says what it wants, the test plays the engines. No sockets."""

from math import inf
from random import Random

import pytest

from pointsman.domain.ledger import Lease
from pointsman.domain.policy import PolicyOptions, make_policy
from pointsman.domain.policy.least_outstanding import LeastOutstanding
from pointsman.domain.registry import Registry, WorkerReport
from pointsman.domain.request import InferenceRequest
from pointsman.domain.router import Router
from pointsman.domain.routes import Backend, Route, RouteTable
from pointsman.domain.worker import Worker
from pointsman.errors import ModelNotFound, NoCapacity, UnsupportedEndpoint, UpstreamTimeout
from pointsman.flow.attempts import Asked, ask, attempts, relay
from pointsman.flow.effects import Answer, Broken, ClientGone, Done, Lost, Relay, Result, Send, Why
from pointsman.flow.exchange import Attempt, Exchange, Stage
from pointsman.testing.stories import Dialogue, answer
from pointsman.wire.http1 import parse_response_head

FULL = answer(429, b'{"error":"full"}')
DRAINING = answer(503)
RESET = Lost(Why.RESET, "worker a closed the connection")
LATE = Lost(Why.TIMED_OUT, "worker a sent no first body byte within the limit")


class Fleet:
    """Workers a, b, ... of one model, and one request to them."""

    def __init__(
        self,
        workers: str = "abc",
        *,
        routes: tuple[Route, ...] = (),
        max_attempts: int = 3,
    ) -> None:
        self.registry = Registry()
        self.workers = {
            id: Worker(id, model="m", http_address=f"{id}:80", static=True) for id in workers
        }
        for worker in self.workers.values():
            self.registry.add(worker)
        self.router = Router(self.registry, LeastOutstanding(), RouteTable(routes))
        self.x = self.exchange()
        self.max_attempts = max_attempts

    def exchange(self, model: str = "m") -> Exchange:
        return Exchange(
            InferenceRequest(model, "r1", path="/v1/chat/completions"),
            path="/v1/chat/completions",
            operation="chat",
            started=10.0,
            now=10.0,
        )

    def dialogue(self) -> Dialogue:
        return Dialogue(attempts(self.x, self.router, self.max_attempts))

    @property
    def in_flight(self) -> dict[str, int]:
        return {id: worker.in_flight for id, worker in self.workers.items() if worker.in_flight}

    @property
    def excluded(self) -> list[str]:
        return [each.failed.id for each in self.x.tries if each.failed is not None]


def test_the_first_worker_answers() -> None:
    fleet = Fleet()
    with fleet.dialogue() as story:
        story.expects_send("a").gets(answer(200)).relays_to_the_end()
    x = fleet.x
    assert (x.attempts, x.worker_id, x.reason, x.failures, x.error) == (1, "a", "load", [], "")
    assert fleet.excluded == []


def test_failover_before_first_byte() -> None:
    fleet = Fleet("abc")
    with fleet.dialogue() as story:
        story.expects_send("a").gets(Lost(Why.REFUSED))
        story.expects_send("b").gets(DRAINING)
        story.expects_send("c").gets(answer(200, stream=True)).relays_to_the_end()
    x = fleet.x
    assert (x.attempts, x.worker_id, x.reason) == (3, "c", "failover")
    assert x.failures == ["refused", "503"]
    assert fleet.excluded == ["a", "b"]
    assert fleet.in_flight == {}


def test_no_splice_after_first_byte() -> None:
    fleet = Fleet("ab")
    with fleet.dialogue() as story:
        story.expects_send("a").gets(answer(200, b"data: The cat\n\n", stream=True))
        story.expects_relay().gets(Broken(Why.RESET)).ends()
    x = fleet.x
    assert (x.attempts, x.worker_id, x.error) == (1, "a", "reset")
    assert fleet.excluded == []
    assert fleet.in_flight == {}


BEFORE = [
    *(pytest.param(Lost(why), str(why), id=str(why)) for why in Why),
    pytest.param(DRAINING, "503", id="503"),
    pytest.param(FULL, "429", id="429"),
    pytest.param(answer(503, stream=True), "503", id="503 unfinished"),
    pytest.param(answer(429, stream=True), "429", id="429 unfinished"),
]


class TestTruthTable:
    """docs/failover.md, row by row: the failures before the commit, the answers that stand, the failures after it."""

    @pytest.mark.parametrize(("failure", "outcome"), BEFORE)
    def test_f11_a_failure_before_the_first_byte_goes_to_another_worker(
        self, failure: Answer | Lost, outcome: str
    ) -> None:
        fleet = Fleet("ab")
        with fleet.dialogue() as story:
            story.expects_send("a")
            assert fleet.in_flight == {"a": 1}
            story.gets(failure).expects_send("b")
            assert fleet.in_flight == {"b": 1}
            story.gets(answer(200)).relays_to_the_end()
        assert fleet.x.failures == [outcome]
        assert fleet.excluded == ["a"]
        assert fleet.in_flight == {}

    @pytest.mark.parametrize(
        "status", [200, 201, 204, 301, 400, 401, 404, 408, 413, 422, 499, 500, 502, 504, 599]
    )
    def test_r08_every_other_status_is_an_answer(self, status: int) -> None:
        fleet = Fleet("ab")
        with fleet.dialogue() as story:
            story.expects_send("a").gets(answer(status)).relays_to_the_end(status)
        assert (fleet.x.attempts, fleet.excluded, fleet.x.failures) == (1, [], [])

    @pytest.mark.parametrize("why", list(Why))
    @pytest.mark.parametrize("stream", [True, False])
    def test_f03_a_failure_after_the_commit_ends_the_story(self, why: Why, stream: bool) -> None:
        fleet = Fleet()
        with fleet.dialogue() as story:
            story.expects_send("a").gets(answer(200, stream=stream))
            story.expects_relay()
            assert fleet.in_flight == {"a": 1}
            story.gets(Broken(why)).ends()
        assert fleet.x.error == str(why)
        assert fleet.in_flight == {}

    @pytest.mark.parametrize("why", [why for why in Why if why is not Why.TIMED_OUT])
    def test_when_all_are_lost_the_client_gets_503(self, why: Why) -> None:
        fleet = Fleet("ab")
        with fleet.dialogue() as story:
            story.expects_send("a").gets(LATE).expects_send("b").gets(Lost(why))
            error = story.raises(NoCapacity)
        assert str(why) in str(error)
        assert fleet.in_flight == {}

    def test_a_timeout_of_the_last_one_is_504(self) -> None:
        fleet = Fleet("ab")
        with fleet.dialogue() as story:
            story.expects_send("a").gets(RESET).expects_send("b").gets(LATE)
            error = story.raises(UpstreamTimeout)
        assert "first body byte" in str(error)

    @pytest.mark.parametrize("others", [RESET, LATE, FULL, DRAINING])
    def test_when_the_last_one_is_draining_the_client_gets_503(self, others: Result) -> None:
        with Fleet("ab").dialogue() as story:
            story.expects_send("a").gets(others).expects_send("b").gets(DRAINING)
            story.raises(NoCapacity)


class TestEverybodyFull:
    def test_the_client_gets_the_last_429(self) -> None:
        fleet = Fleet("abc")
        full = Answer(
            parse_response_head(b"HTTP/1.1 429 X\r\ncontent-length: 2\r\nretry-after: 7\r\n\r\n"),
            b"no",
            True,
        )
        with fleet.dialogue() as story:
            story.expects_send("a").gets(FULL).expects_send("b").gets(FULL)
            story.expects_send("c").gets(full).expects_relay(429)
            assert isinstance(story.command, Relay)
            assert story.command.answer is full
            assert fleet.in_flight == {}
            story.gets(Done()).ends()
        assert fleet.x.failures == ["429", "429", "429"]

    @pytest.mark.parametrize("other", [RESET, DRAINING])
    def test_but_not_if_one_of_them_only_failed(self, other: Result) -> None:
        with Fleet("ab").dialogue() as story:
            story.expects_send("a").gets(other).expects_send("b").gets(FULL)
            story.raises(NoCapacity)

    def test_nor_if_its_body_is_not_here(self) -> None:
        with Fleet("a").dialogue() as story:
            story.expects_send("a").gets(answer(429, stream=True))
            story.raises(NoCapacity)


class TestLimits:
    @pytest.mark.parametrize("most", [1, 2, 3, 5])
    def test_no_more_workers_are_asked_than_allowed(self, most: int) -> None:
        fleet = Fleet("abcdef", max_attempts=most)
        with fleet.dialogue() as story:
            for id in "abcdef"[:most]:
                story.expects_send(id).gets(RESET)
            story.raises(NoCapacity)
        assert fleet.x.attempts == most
        assert fleet.excluded == list("abcdef"[:most])

    def test_f01_no_worker_is_asked_twice(self) -> None:
        fleet = Fleet("ab", max_attempts=10)
        with fleet.dialogue() as story:
            story.expects_send("a").gets(RESET).expects_send("b").gets(RESET)
            story.raises(NoCapacity)
        assert fleet.x.attempts == 2

    def test_f01_affinity_does_not_bring_a_failed_worker_back(self) -> None:
        fleet = Fleet("ab")
        policy = make_policy("affinity", PolicyOptions(), Random(0))
        fleet.router = Router(fleet.registry, policy, RouteTable())
        with fleet.dialogue() as story:
            assert isinstance(story.command, Send)
            owner = story.command.target.worker.id
            other = {"a": "b", "b": "a"}[owner]
            story.expects_send(owner).gets(RESET).expects_send(other).gets(answer(200))
            story.relays_to_the_end()
        assert fleet.x.reason == "failover"

    def test_a_request_past_its_deadline_is_not_tried_again(self) -> None:
        fleet = Fleet()
        fleet.x.deadline = 12.0
        with fleet.dialogue() as story:
            story.expects_send("a")
            fleet.x.now = 12.0
            story.gets(LATE).raises(UpstreamTimeout)
        assert fleet.x.attempts == 1

    def test_without_a_deadline_there_is_none(self) -> None:
        assert Fleet().x.deadline == inf


class TestRouting:
    def test_an_unknown_model_is_not_asked_for(self) -> None:
        fleet = Fleet()
        fleet.x = fleet.exchange("unknown")
        with fleet.dialogue() as story:
            story.raises(ModelNotFound)
        assert (fleet.x.attempts, fleet.x.worker_id) == (0, "")

    def test_a_known_model_without_a_worker_is_503(self) -> None:
        fleet = Fleet()
        fleet.router.set_routes([Route("other", backends=(Backend("nobody"),))])
        fleet.x = fleet.exchange("other")
        with fleet.dialogue() as story:
            story.raises(NoCapacity)

    def test_the_served_model_is_the_targets(self) -> None:
        fleet = Fleet(routes=(Route("public", backends=(Backend("m"),)),))
        fleet.x = fleet.exchange("public")
        with fleet.dialogue() as story:
            assert isinstance(story.command, Send)
            assert story.command.target.served_model == "m"
            story.expects_send("a").gets(answer(200)).relays_to_the_end()
        assert fleet.x.model == "public"

    def test_r20_a_worker_that_leaves_before_the_first_byte_is_failed_over(self) -> None:
        fleet = Fleet("")
        for id in "ab":
            fleet.registry.beat(WorkerReport(id, f"{id}:80", "m"), now=10.0)
        with fleet.dialogue() as story:
            story.expects_send("a")
            fleet.registry.beat(WorkerReport("b", "b:80", "m"), now=15.9)
            fleet.x.now = 16.0
            story.gets(Lost(Why.EVICTED, "worker a left")).expects_send("b")
            story.gets(answer(200)).relays_to_the_end()

    def test_r20_when_all_have_left_the_client_gets_503_and_not_404(self) -> None:
        fleet = Fleet("")
        fleet.registry.beat(WorkerReport("a", "a:80", "m"), now=10.0)
        with fleet.dialogue() as story:
            story.expects_send("a")
            fleet.x.now = 16.0
            story.gets(Lost(Why.EVICTED)).raises(NoCapacity)

    def test_a_model_that_is_forgotten_during_failover_is_503_too(self) -> None:
        fleet = Fleet("")
        fleet.registry.beat(WorkerReport("a", "a:80", "m"), now=10.0)
        with fleet.dialogue() as story:
            story.expects_send("a")
            fleet.x.now = 10.0 + 2 * 3600
            story.gets(LATE).raises(UpstreamTimeout)

    def test_a_restarted_worker_is_another_one(self) -> None:
        fleet = Fleet("")
        fleet.registry.beat(WorkerReport("a", "a:80", "m", incarnation=1), now=10.0)
        with fleet.dialogue() as story:
            story.expects_send("a")
            fleet.registry.beat(WorkerReport("a", "a:80", "m", incarnation=2), now=11.0)
            story.gets(RESET).expects_send("a").gets(answer(200)).relays_to_the_end()
        assert fleet.x.attempts == 2

    def test_the_load_of_an_attempt_counts_at_once(self) -> None:
        fleet = Fleet("ab")
        with fleet.dialogue() as first:
            first.expects_send("a")
            fleet.x = fleet.exchange()
            with fleet.dialogue() as second:
                second.expects_send("b").gets(answer(200)).relays_to_the_end()
            first.gets(answer(200)).relays_to_the_end()


class TestTheClientLeaves:
    def test_f07_while_an_engine_is_asked(self) -> None:
        fleet = Fleet()
        with fleet.dialogue() as story:
            story.expects_send("a").throws(ClientGone()).raises(ClientGone)
        assert fleet.in_flight == {}
        assert fleet.x.attempts == 1

    def test_d04_while_an_answer_is_relayed(self) -> None:
        fleet = Fleet()
        with fleet.dialogue() as story:
            story.expects_send("a").gets(answer(200, stream=True)).expects_relay()
            assert fleet.in_flight == {"a": 1}
            story.throws(ClientGone()).raises(ClientGone)
        assert fleet.in_flight == {}

    def test_d04_after_a_failover(self) -> None:
        fleet = Fleet()
        with fleet.dialogue() as story:
            story.expects_send("a").gets(RESET).expects_send("b")
            story.throws(ClientGone()).raises(ClientGone)
        assert fleet.in_flight == {}

    def test_b08_a_story_that_is_closed_gives_its_lease_back(self) -> None:
        fleet = Fleet()
        story = attempts(fleet.x, fleet.router, 3)
        next(story)
        assert fleet.in_flight == {"a": 1}
        story.close()
        assert fleet.in_flight == {}


class TestTheVocabulary:
    def test_an_exchange_begins_open(self) -> None:
        x = Fleet().x
        assert x.stage is Stage.OPEN
        assert (x.request_id, x.model, x.stream, x.operation) == ("r1", "m", False, "chat")
        assert (x.started, x.now, x.first_byte_at, x.finished_at) == (10.0, 10.0, 0.0, 0.0)

    def test_results_show_what_they_are(self) -> None:
        assert repr(answer(200)) == "Answer(200)"
        assert repr(Lost(Why.REFUSED, "x")) == "Lost(refused, 'x')"


NO_PATH = answer(404, b'{"detail":"Not Found"}')
NO_MODEL = answer(404, b'{"error":{"message":"The model `m` does not exist.","code":404}}')


def test_a_worker_without_the_path_is_passed_over_and_is_no_attempt() -> None:
    fleet = Fleet("abcde", max_attempts=2)
    with fleet.dialogue() as story:
        story.expects_send("a").gets(NO_PATH)
        story.expects_send("b").gets(NO_PATH)
        story.expects_send("c").gets(RESET)
        story.expects_send("d").gets(answer(200)).relays_to_the_end()
    assert fleet.x.failures == ["404", "404", "reset"]
    assert fleet.x.reason == "failover"
    assert fleet.in_flight == {}
    # The next request does not ask them.
    fleet.x = fleet.exchange()
    with fleet.dialogue() as story:
        story.expects_send("c").gets(answer(200)).relays_to_the_end()


def test_where_nobody_has_the_path_the_client_hears_who_does_not() -> None:
    fleet = Fleet("ab")
    with fleet.dialogue() as story:
        story.expects_send("a").gets(NO_PATH)
        story.expects_send("b").gets(answer(405, b'{"detail":"Method Not Allowed"}'))
        error = story.raises(UnsupportedEndpoint)
    assert str(error) == "no worker of the model 'm' serves /v1/chat/completions: a (tl), b (tl)"
    fleet.x = fleet.exchange()
    with fleet.dialogue() as story:
        story.raises(UnsupportedEndpoint)


def test_a_model_that_an_engine_does_not_have_is_an_answer() -> None:
    fleet = Fleet("ab")
    with fleet.dialogue() as story:
        story.expects_send("a").gets(NO_MODEL).relays_to_the_end(404)
    assert fleet.workers["a"].lacks == set()


@pytest.mark.parametrize("first", [True, False])
def test_the_verdict_is_of_those_that_have_the_path(first: bool) -> None:
    fleet = Fleet("ab")
    with fleet.dialogue() as story:
        story.expects_send("a").gets(NO_PATH if first else FULL)
        story.expects_send("b").gets(FULL if first else NO_PATH)
        story.relays_to_the_end(429)
    fleet = Fleet("ab")
    with fleet.dialogue() as story:
        story.expects_send("a").gets(NO_PATH if first else LATE)
        story.expects_send("b").gets(LATE if first else NO_PATH)
        story.raises(UpstreamTimeout)


def test_a_worker_that_is_lost_may_come_back_with_more_paths() -> None:
    fleet = Fleet("a")
    with fleet.dialogue() as story:
        story.expects_send("a").gets(NO_PATH).raises(UnsupportedEndpoint)
    fleet.x = fleet.exchange()
    fleet.x.request.path = "/v1/completions"
    with fleet.dialogue() as story:
        story.expects_send("a").gets(RESET).raises(NoCapacity)
    fleet.x = fleet.exchange()
    with fleet.dialogue() as story:
        story.expects_send("a").gets(answer(200)).relays_to_the_end()


def test_the_last_worker_may_leave_while_it_says_that_it_lacks_the_path() -> None:
    fleet = Fleet("a")
    with fleet.dialogue() as story:
        story.expects_send("a")
        fleet.registry.remember("m", 0.0)
        fleet.registry.set_static(())
        story.gets(NO_PATH).raises(NoCapacity)


def test_what_cannot_be_read_is_an_answer() -> None:
    head = b"HTTP/1.1 404 X\r\ncontent-encoding: gzip\r\ncontent-length: 2\r\n\r\n"
    packed = Answer(parse_response_head(head), b"\x1f\x8b", complete=True)
    for given in (packed, answer(404, b"x", stream=True)):
        fleet = Fleet("ab")
        with fleet.dialogue() as story:
            story.expects_send("a").gets(given).relays_to_the_end(404)


def test_a_leg_passes_over_a_worker_without_the_path_too() -> None:
    fleet = Fleet("ab")
    x = fleet.x

    def leg(attempt: Attempt, lease: Lease) -> Asked:
        return ask(x, lease, Send(attempt.target), relay(x))

    with Dialogue(attempts(x, fleet.router, 1, leg)) as story:
        story.expects_send("a").gets(NO_PATH)
        story.expects_send("b").gets(answer(200)).relays_to_the_end()
    assert fleet.workers["a"].lacks == {"/v1/chat/completions"}
