"""A10: a request for a model that has no worker yet waits for one, as dialogues. No sockets, no clock."""

import pytest

from pointsman.domain.policy.least_outstanding import LeastOutstanding
from pointsman.domain.registry import Registry, WorkerReport
from pointsman.domain.request import InferenceRequest
from pointsman.domain.router import Router, Target
from pointsman.domain.routes import Route, RouteTable, Step
from pointsman.domain.worker import Worker
from pointsman.errors import ModelNotFound, NoCapacity, UnsupportedEndpoint
from pointsman.flow.attempts import attempts
from pointsman.flow.effects import ClientGone, Held, Lost, Why
from pointsman.flow.exchange import Attempt, Exchange
from pointsman.testing.stories import Dialogue, answer

NOW = 10.0
UNTIL = 40.0
RESET = Lost(Why.RESET, "worker a closed the connection")


class Empty:
    """A table that names the model `m`, no worker, and one request that may wait."""

    def __init__(self, *, model: str = "m", until: float = UNTIL, deadline: float = 1e9) -> None:
        self.registry = Registry()
        self.router = Router(self.registry, LeastOutstanding(), RouteTable([Route("m")]))
        self.x = Exchange(
            InferenceRequest(model, "r1", path="/v1/chat/completions"),
            path="/v1/chat/completions",
            operation="chat",
            started=NOW,
            now=NOW,
            deadline=deadline,
            hold_until=until,
        )

    def comes(self, id: str, *, draining: bool = False) -> None:
        self.registry.beat(WorkerReport(id, f"{id}:80", "m", draining=draining), now=NOW)

    def dialogue(self, *, final: bool = True) -> Dialogue:
        return Dialogue(attempts(self.x, self.router, 3, final=final))


def test_a10_a_request_waits_for_the_first_worker_of_its_model() -> None:
    fleet = Empty()
    with fleet.dialogue() as story:
        story.expects_hold(UNTIL).looks_again(NOW + 1).expects_hold(UNTIL)
        fleet.comes("a", draining=True)
        story.looks_again(NOW + 1).expects_hold(UNTIL)
        fleet.comes("a")
        story.looks_again(NOW + 2).expects_send("a").gets(answer(200)).relays_to_the_end()
    assert fleet.x.attempts == 1
    assert [worker.in_flight for worker in fleet.registry.snapshot()] == [0]


def test_a10_who_waits_in_vain_gets_the_usual_503() -> None:
    fleet = Empty()
    with fleet.dialogue() as story:
        story.expects_hold(UNTIL).gets(Held(ready=False)).raises(NoCapacity)
    with Empty(until=0.0).dialogue() as story:
        story.raises(NoCapacity)


def test_a10_nobody_waits_longer_than_the_request_may_take() -> None:
    with Empty(deadline=12.0).dialogue() as story:
        story.expects_hold(12.0).gets(Held(ready=False)).raises(NoCapacity)


def test_a10_an_unknown_model_is_not_waited_for() -> None:
    with Empty(model="other").dialogue() as story:
        story.raises(ModelNotFound)


def test_a10_a_model_that_is_deleted_meanwhile_is_not_waited_for_any_longer() -> None:
    fleet = Empty()
    with fleet.dialogue() as story:
        story.expects_hold(UNTIL)
        fleet.router.set_routes([])
        story.looks_again(NOW + 1).raises(ModelNotFound)


def test_a10_a_worker_that_comes_but_does_not_serve_the_path_ends_the_wait() -> None:
    fleet = Empty()
    with fleet.dialogue() as story:
        story.expects_hold(UNTIL)
        fleet.comes("a")
        fleet.router.lack(fleet.registry.snapshot()[0], fleet.x.request.path)
        story.looks_again(NOW + 1).raises(UnsupportedEndpoint)


def test_a10_a_client_that_leaves_while_it_waits_leaves_nothing() -> None:
    fleet = Empty()
    with fleet.dialogue() as story:
        story.expects_hold(UNTIL).throws(ClientGone()).raises(ClientGone)
    assert fleet.x.tries == []


def test_a10_a_request_that_has_failed_somewhere_does_not_wait_again() -> None:
    fleet = Empty()
    with fleet.dialogue() as story:
        story.expects_hold(UNTIL)
        fleet.comes("a")
        story.looks_again(NOW + 1).expects_send("a").gets(RESET).raises(NoCapacity)


def test_a10_a_policy_that_fails_fails_the_request_that_waits_and_at_once() -> None:
    class Broken:
        def pick(self, *_: object) -> tuple[Worker, str]:
            raise RuntimeError("a mistake")

    fleet = Empty()
    with fleet.dialogue() as story:
        story.expects_hold(UNTIL)
        fleet.comes("a")
        fleet.router.policy = Broken()
        with pytest.raises(RuntimeError):
            story.looks_again(NOW + 1)
        story.gets(Held(ready=True)).raises(RuntimeError)


def test_a10_the_last_step_of_a_cascade_is_waited_for_though_others_were_asked() -> None:
    fleet = Empty()
    small = Target(Worker("s", model="s", http_address="s:80"), "s", "cascade")
    fleet.x.tries.append(Attempt(small, NOW))
    with fleet.dialogue() as story:
        story.expects_hold(UNTIL)
        fleet.comes("a")
        story.looks_again(NOW + 1).expects_send("a").gets(answer(200)).relays_to_the_end()


def test_a10_a_step_of_a_cascade_that_has_a_next_one_is_not_waited_for() -> None:
    fleet = Empty()
    fleet.router.set_routes([Route("m", cascade=(Step("s", "mean_logprob > -1"), Step("m")))])
    with fleet.dialogue(final=False) as story:
        story.raises(NoCapacity)
