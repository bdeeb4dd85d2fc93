"""When a policy hears of an attempt: as it is sent, as an answer that stands has begun, and no later than its end."""

from typing import Any

import pytest

from pointsman.domain.placement import Placement
from pointsman.domain.policy.least_outstanding import LeastOutstanding
from pointsman.domain.registry import Registry
from pointsman.domain.request import InferenceRequest
from pointsman.domain.router import Router
from pointsman.domain.routes import Route, RouteTable
from pointsman.domain.worker import Role, Worker
from pointsman.flow.attempts import attempts
from pointsman.flow.effects import ClientGone, Done, Lost, Pair, Why
from pointsman.flow.exchange import Exchange
from pointsman.flow.handover import Handoffs
from pointsman.flow.plan import disaggregated
from pointsman.testing.stories import Dialogue, answer
from pointsman.wire.body import parse_request

CHAT = "/v1/chat/completions"
BODY = b'{"model":"m","messages":[{"role":"user","content":"Hi"}]}'
RESET = Lost(Why.RESET, "gone")
EVENT = answer(200, b'data: {"x":1}\n\n', stream=True)


class Measuring(LeastOutstanding):
    """A policy that takes every prompt for 100 tokens, 60 of them to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[tuple[str, float]] = []

    def placed(self, worker: Worker, request: InferenceRequest, now: float) -> Placement | None:
        return Placement(worker, 100, 60, now, self._heard)

    def _heard(self, placement: Placement, now: float) -> None:
        self.heard.append((placement.worker.id, now - placement.at))


class Fleet:
    """Workers a and b, or prefill workers p, q and decode workers d, e, whose policy measures."""

    def __init__(self, workers: str = "ab", dialect: str = "vllm", shortest: int = 0) -> None:
        registry = Registry()
        roles = dict.fromkeys("pq", Role.PREFILL) | dict.fromkeys("de", Role.DECODE)
        connector = "nixl" if dialect == "vllm" else ""
        for id in workers:
            worker = Worker(
                id,
                model="m",
                http_address=f"{id}:80",
                role=roles.get(id, Role.UNIFIED),
                dialect=dialect,
                connector=connector,
                bootstrap=f"{id}:8998",
                static=True,
            )
            registry.add(worker)
        self.workers = {worker.id: worker for worker in registry.snapshot()}
        self.policy = Measuring()
        self.route = Route("m", targets=("unified" if "a" in workers else "disaggregated",))
        self.router = Router(registry, self.policy, RouteTable([self.route]))
        request = parse_request(BODY, "r1")
        self.x = Exchange(request, path=CHAT, operation="chat", started=10.0, now=10.0)
        self.handoffs = Handoffs(draw_seed=lambda: 77, wall=lambda: 1000.0, min_tokens=shortest)

    def asks(self) -> Dialogue:
        return Dialogue(attempts(self.x, self.router, 3))

    def hands_off(self) -> Dialogue:
        return Dialogue(disaggregated(self.x, self.router, 3, self.route, BODY, self.handoffs))

    @property
    def counts(self) -> dict[str, tuple[int, int]]:
        """The active and the pending tokens of the workers that have any."""
        each = {id: (w.active_tokens, w.pending_tokens) for id, w in self.workers.items()}
        return {id: counts for id, counts in each.items() if counts != (0, 0)}


def test_a_prompt_is_pending_until_its_answer_begins_and_active_until_it_ends() -> None:
    fleet = Fleet()
    with fleet.asks() as story:
        assert fleet.counts == {"a": (100, 60)}
        fleet.x.now = 10.5
        story.expects_send("a").gets(EVENT).expects_relay()
        assert fleet.counts == {"a": (100, 0)}
        fleet.x.now = 12.0
        story.gets(Done()).ends()
    assert (fleet.counts, fleet.policy.heard) == ({}, [("a", 0.5)])


@pytest.mark.parametrize("failure", [RESET, answer(429), answer(503), Lost(Why.TIMED_OUT)])
def test_a_worker_that_failed_is_told_off_and_measured_by_nobody(failure: Any) -> None:
    fleet = Fleet()
    with fleet.asks() as story:
        story.expects_send("a")
        fleet.x.now = 11.0
        story.gets(failure).expects_send("b")
        assert fleet.counts == {"b": (100, 60)}
        fleet.x.now = 11.5
        story.gets(answer(200)).relays_to_the_end()
    assert (fleet.counts, fleet.policy.heard) == ({}, [("b", 0.5)])


def test_a_refusal_says_nothing_of_how_fast_a_worker_computes() -> None:
    fleet = Fleet()
    with fleet.asks() as story:
        story.expects_send("a").gets(answer(400)).relays_to_the_end(400)
    assert (fleet.counts, fleet.policy.heard) == ({}, [])


@pytest.mark.parametrize("committed", [False, True])
def test_b08_a_client_that_leaves_takes_its_tokens_along(committed: bool) -> None:
    fleet = Fleet()
    with fleet.asks() as story:
        story.expects_send("a")
        if committed:
            story.gets(EVENT).expects_relay()
        story.throws(ClientGone()).raises(ClientGone)
    assert (fleet.counts, bool(fleet.policy.heard)) == ({}, committed)


def test_in_a_hand_off_both_workers_count_each_for_its_own_time() -> None:
    fleet = Fleet("pd")
    with fleet.hands_off() as story:
        story.expects_call("completions", "p")
        # The decode worker has the prompt, and nothing of it to compute.
        assert fleet.counts == {"p": (100, 60), "d": (100, 0)}
        fleet.x.now = 11.0
        prefilled = answer(200, b'{"kv_transfer_params":{"remote_block_ids":[1]}}')
        story.gets(prefilled).expects_send("d")
        assert fleet.counts == {"d": (100, 0)}
        fleet.x.now = 11.25
        story.gets(EVENT).expects_relay()
        assert fleet.counts == {"d": (100, 0)}
        story.gets(Done()).ends()
    assert (fleet.counts, fleet.policy.heard) == ({}, [("p", 1.0), ("d", 1.25)])


def test_a_prompt_that_is_too_short_to_hand_off_is_not_measured_where_it_was_not_computed() -> None:
    fleet = Fleet("pd", shortest=10_000)
    with fleet.hands_off() as story:
        story.expects_send("d")
        assert fleet.counts == {"d": (100, 60)}
        story.gets(answer(200)).relays_to_the_end()
    assert (fleet.counts, fleet.policy.heard) == ({}, [("d", 0.0)])


@pytest.mark.parametrize("status", [200, 404])
def test_in_a_hand_off_only_a_good_answer_is_a_beginning(status: int) -> None:
    fleet = Fleet("pd")
    with fleet.hands_off() as story:
        story.gets(answer(200, b'{"kv_transfer_params":{"x":1}}'))
        story.expects_send("d").gets(answer(status)).relays_to_the_end(status)
    assert fleet.counts == {}
    assert [id for id, _ in fleet.policy.heard] == (["p", "d"] if status == 200 else ["p"])


def test_p05_a_prefill_worker_that_failed_is_not_measured() -> None:
    fleet = Fleet("pqd")
    with fleet.hands_off() as story:
        story.expects_call("completions", "p").gets(RESET)
        story.expects_call("completions", "q")
        assert fleet.counts == {"q": (100, 60), "d": (100, 0)}
        story.throws(ClientGone()).raises(ClientGone)
    assert (fleet.counts, fleet.policy.heard) == ({}, [])


def test_workers_that_are_asked_at_once_are_both_measured() -> None:
    fleet = Fleet("pd", "sglang")
    with fleet.hands_off() as story:
        story.expects_both("p", "d")
        assert fleet.counts == {"p": (100, 60), "d": (100, 0)}
        fleet.x.now = 10.5
        story.gets(Pair(answer(200), EVENT)).expects_relay()
        assert fleet.counts == {"p": (100, 0), "d": (100, 0)}
        story.gets(Done()).ends()
    assert (fleet.counts, fleet.policy.heard) == ({}, [("p", 0.5), ("d", 0.5)])


def test_a_leg_of_one_worker_is_measured_as_without_it() -> None:
    fleet = Fleet("ab")
    with fleet.hands_off() as story:
        story.expects_send("a").gets(answer(400)).relays_to_the_end(400)
    assert (fleet.counts, fleet.policy.heard) == ({}, [])
    with fleet.hands_off() as story:
        fleet.x.now = 11.0
        story.expects_send("a").gets(EVENT).relays_to_the_end()
    assert (fleet.counts, fleet.policy.heard) == ({}, [("a", 1.0)])
