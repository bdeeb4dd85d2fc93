"""Hand-offs of other engines, as dialogues: what each worker is told, who is to blame, and what is given back."""

import json
from typing import Any

import pytest

from pointsman.domain.policy.least_outstanding import LeastOutstanding
from pointsman.domain.registry import Registry
from pointsman.domain.router import Router
from pointsman.domain.routes import Route, RouteTable
from pointsman.domain.worker import Role, Worker
from pointsman.errors import NoCapacity, UpstreamTimeout
from pointsman.flow.connectors.asked import cached_in
from pointsman.flow.effects import Both, Call, ClientGone, Lost, Pair, Send, Status, Why
from pointsman.flow.exchange import Exchange
from pointsman.flow.handover import Handoffs
from pointsman.flow.plan import disaggregated
from pointsman.testing.stories import Dialogue, answer
from pointsman.wire.body import parse_request
from pointsman.wire.call import HttpCall

CHAT = "/v1/chat/completions"
DIALECTS = {"nixl": "vllm", "mooncake": "vllm", "bootstrap": "sglang", "slots": "llamacpp"}
PARAMS = b'{"do_remote_prefill":true, "remote_block_ids":[[1,2]]}'
PREFILLED = answer(200, b'{"usage":{"prompt_tokens":9},"kv_transfer_params":%b}' % PARAMS)
BAD = answer(400, b'{"error":{"message":"too long"}}')
RESET = Lost(Why.RESET, "gone")
EVENT = answer(200, b'data: {"x":1}\n\n', stream=True)


class Fleet:
    """Prefill workers p, q, decode workers d, e and unified u of one connector, and one request to them."""

    def __init__(
        self,
        connector: str,
        workers: str = "pqde",
        *,
        targets: tuple[str, ...] = ("disaggregated",),
        route: dict[str, Any] | None = None,
        shortest: int = 0,
        **body: Any,
    ) -> None:
        registry = Registry()
        roles = dict.fromkeys("pq", Role.PREFILL) | dict.fromkeys("de", Role.DECODE)
        self.workers = {
            id: Worker(
                id,
                model="m",
                http_address=f"{id}:80",
                role=roles.get(id, Role.UNIFIED),
                dialect=DIALECTS[connector],
                connector=connector if DIALECTS[connector] == "vllm" else "",
                bootstrap=f"{id}:8998" if id in "pq" else "",
                static=True,
            )
            for id in workers
        }
        for worker in self.workers.values():
            worker.slots = 1
            # A weight is no number of slots.
            worker.capacity = worker.kv_total_blocks = 8
            registry.add(worker)
        self.route = Route("m", targets=targets, **(route or {}))
        self.router = Router(registry, LeastOutstanding(), RouteTable([self.route]))
        asked = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]} | body
        self.body = json.dumps(asked).encode()
        self.x = Exchange(
            parse_request(self.body, "r1"),
            path=CHAT,
            operation="chat",
            started=10.0,
            now=10.0,
            trace=b"00-1-2-01",
        )
        self.handoffs = Handoffs(draw_seed=lambda: 77, wall=lambda: 1000.0, min_tokens=shortest)

    def dialogue(self) -> Dialogue:
        return Dialogue(disaggregated(self.x, self.router, 3, self.route, self.body, self.handoffs))

    def after(self) -> list[str]:
        """What is done whatever becomes of the request, as `<path> <worker>`."""
        calls = [call for each in self.x.after for call in each.calls]
        assert all(isinstance(call, HttpCall) for call in calls)
        return [f"{told(call)[0]} {call.worker.id}" for call in calls]

    @property
    def outcomes(self) -> list[str]:
        return [each.transfer.outcome for each in self.x.tries if each.transfer is not None]

    @property
    def failed(self) -> list[str]:
        return [each.failed.id for each in self.x.tries if each.failed is not None]

    @property
    def in_flight(self) -> list[str]:
        return [worker.id for worker in self.workers.values() if worker.in_flight]


def told(call: Any) -> tuple[str, Any]:
    """The path and the JSON of a call."""
    return call.path.decode(), json.loads(call.body or b"null")


def asked_of(story: Dialogue) -> HttpCall:
    assert isinstance(story.command, Call)
    assert isinstance(story.command.call, HttpCall)
    return story.command.call


def sent(story: Dialogue) -> Send:
    assert isinstance(story.command, Send)
    return story.command


# ------------------------------------------------------------------ nixl


def test_what_the_prefill_worker_says_goes_to_the_decode_worker_unchanged() -> None:
    fleet = Fleet("nixl", max_tokens=9)
    with fleet.dialogue() as story:
        call = asked_of(story.expects_call("completions", "p"))
        assert told(call)[1]["kv_transfer_params"]["do_remote_decode"] is True
        assert call.headers == b"x-request-id: r1\r\ntraceparent: 00-1-2-01\r\n"
        command = sent(story.gets(PREFILLED).expects_send("d"))
        assert dict(command.fields) == {"kv_transfer_params": PARAMS}
        assert (command.request_id, command.headers) == ("r1", b"")
        story.gets(answer(200)).relays_to_the_end()
    assert (fleet.after(), fleet.outcomes, fleet.in_flight) == ([], ["handed_over"], [])
    assert fleet.x.tries[0].transfer is not None
    assert (fleet.x.tries[0].transfer.tokens, fleet.x.tries[0].transfer.resumed) == (9, -1)


def test_p10_the_prefill_leg_asks_for_one_token_and_no_stream() -> None:
    options = {"include_usage": True}
    fleet = Fleet("nixl", stream=True, stream_options=options, min_tokens=4, max_tokens=9)
    with fleet.dialogue() as story:
        body = told(asked_of(story))[1]
        assert (body["stream"], body["max_tokens"], body["max_completion_tokens"]) == (False, 1, 1)
        assert not body.keys() & {"stream_options", "min_tokens"}
        fields = sent(story.gets(PREFILLED)).fields
        assert not fields.keys() & {"stream", "max_tokens", "min_tokens", "stream_options"}
        story.gets(EVENT).relays_to_the_end()


def test_a_route_limits_what_the_client_does_not() -> None:
    fleet = Fleet("nixl", route={"default_max_tokens": 7})
    with fleet.dialogue() as story:
        assert sent(story.gets(PREFILLED)).fields["max_tokens"] == b"7"
        story.gets(answer(200)).relays_to_the_end()
    fleet = Fleet("nixl", route={"default_max_tokens": 7}, max_completion_tokens=3)
    with fleet.dialogue() as story:
        assert "max_tokens" not in sent(story.gets(PREFILLED)).fields
        story.gets(answer(200)).relays_to_the_end()


def test_p06_what_the_prefill_worker_refuses_is_the_clients_and_no_decode_begins() -> None:
    fleet = Fleet("nixl")
    with fleet.dialogue() as story:
        story.gets(BAD).relays_to_the_end(400)
    assert (fleet.after(), fleet.outcomes, fleet.failed) == ([], ["refused"], [])


@pytest.mark.parametrize("result", [RESET, answer(500), answer(404), answer(503), answer(429)])
def test_p13_a_prefill_worker_that_fails_is_replaced(result: Any) -> None:
    fleet = Fleet("nixl")
    with fleet.dialogue() as story:
        story.gets(result).expects_call("completions", "q").gets(PREFILLED).expects_send("d")
        assert sent(story).request_id == "r1-2"
        story.gets(answer(200)).relays_to_the_end()
    assert (fleet.failed, fleet.outcomes, fleet.after()) == (["p"], ["failed", "handed_over"], [])


def test_a_prefill_that_takes_too_long_is_a_timeout() -> None:
    fleet = Fleet("nixl", "pd")
    with fleet.dialogue() as story:
        story.gets(Lost(Why.TIMED_OUT, "slow")).raises(UpstreamTimeout)


def test_p19_a_prefill_worker_that_kept_nothing_is_seen() -> None:
    fleet = Fleet("nixl")
    with fleet.dialogue() as story:
        story.gets(answer(200, b'{"kv_transfer_params":null}')).expects_send("d")
        assert sent(story).fields == {}
        story.gets(answer(200)).relays_to_the_end()
    assert fleet.outcomes == ["recomputed"]


@pytest.mark.parametrize("result", [RESET, answer(503)])
def test_blocks_that_a_decode_worker_did_not_take_are_given_back(result: Any) -> None:
    fleet = Fleet("nixl")
    with fleet.dialogue() as story:
        story.gets(PREFILLED).expects_send("d").gets(result).expects_call("completions", "p")
        story.gets(PREFILLED).expects_send("e").gets(answer(200)).relays_to_the_end()
    assert (fleet.failed, fleet.after()) == (["d"], ["/v1/completions d"])
    (back,) = fleet.x.after[0].calls
    assert isinstance(back, HttpCall)
    assert told(back)[1]["kv_transfer_params"] == json.loads(PARAMS)
    assert told(back)[1]["max_tokens"] == 1


def test_p01_a_client_that_leaves_between_the_legs_leaves_no_blocks() -> None:
    fleet = Fleet("nixl")
    with fleet.dialogue() as story:
        story.gets(PREFILLED).expects_send("d").throws(ClientGone()).raises(ClientGone)
    assert (fleet.after(), fleet.outcomes) == (["/v1/completions d"], ["abandoned"])


def test_p02_a_prefill_that_a_client_leaves_is_settled_by_its_answer() -> None:
    fleet = Fleet("nixl")
    with fleet.dialogue() as story:
        assert isinstance(story.command, Call)
        settle = story.command.settle
        story.throws(ClientGone()).raises(ClientGone)
    assert settle is not None
    (back,) = settle(PREFILLED)
    assert (told(back)[0], back.worker.id) == ("/v1/completions", "d")
    assert [*settle(RESET), *settle(BAD), *settle(Status("UNAVAILABLE"))] == []


def test_what_was_pulled_is_not_given_back_though_the_answer_breaks() -> None:
    fleet = Fleet("nixl", stream=True)
    with fleet.dialogue() as story:
        story.gets(PREFILLED).gets(EVENT).expects_relay().throws(ClientGone()).raises(ClientGone)
    assert fleet.after() == []


def test_a_short_prompt_is_not_handed_off() -> None:
    fleet = Fleet("nixl", shortest=100)
    with fleet.dialogue() as story:
        story.expects_send("d").gets(answer(200)).relays_to_the_end()
    assert fleet.outcomes == ["direct"]


@pytest.mark.parametrize("connector", list(DIALECTS))
def test_what_has_several_answers_goes_to_one_worker(connector: str) -> None:
    fleet = Fleet(connector, "pdu", targets=("disaggregated", "unified"), n=2)
    with fleet.dialogue() as story:
        story.expects_send("u").gets(answer(200)).relays_to_the_end()
    fleet = Fleet(connector, "pd", n=2)
    with fleet.dialogue() as story:
        story.expects_send("d").gets(answer(200)).relays_to_the_end()
    assert fleet.outcomes == []


def test_workers_of_different_connectors_are_no_pair() -> None:
    fleet = Fleet("nixl", "pqde")
    fleet.workers["p"].connector = fleet.workers["e"].connector = "mooncake"
    with fleet.dialogue() as story:
        story.expects_call("completions", "q").gets(PREFILLED).expects_send("d").gets(RESET)
        # Nobody else pulls: the other pair is asked.
        story.expects_call("query", "p bootstrap").throws(ClientGone()).raises(ClientGone)
    fleet = Fleet("nixl", "pd")
    fleet.workers["p"].connector = "mooncake"
    with fleet.dialogue() as story:
        story.raises(NoCapacity)


def test_a_connector_that_nobody_knows_hands_nothing_over() -> None:
    fleet = Fleet("nixl", "pd")
    for worker in fleet.workers.values():
        worker.connector = "pigeon"
    with fleet.dialogue() as story:
        story.expects_send("d").gets(answer(200)).relays_to_the_end()


# ------------------------------------------------------------------ mooncake

RANKS = answer(200, b'{"0":{"engine_id":"e0","worker_addr":{}}}')


def test_the_two_meet_under_a_transfer_id() -> None:
    fleet = Fleet("mooncake")
    with fleet.dialogue() as story:
        query = asked_of(story.expects_call("query", "p bootstrap"))
        assert (query.get, query.worker.http_address) == (True, "p:8998")
        prefill = told(asked_of(story.gets(RANKS).expects_call("completions", "p")))[1]
        assert prefill["kv_transfer_params"]["transfer_id"] == "xfer-r1"
        params = json.loads(
            sent(story.gets(answer(200)).expects_send("d")).fields["kv_transfer_params"]
        )
        assert (params["transfer_id"], params["remote_engine_id"]) == ("xfer-r1", "e0")
        assert params["remote_bootstrap_addr"] == "http://p:8998"
        story.gets(answer(200)).relays_to_the_end()
    assert (fleet.after(), fleet.outcomes) == ([], ["handed_over"])


@pytest.mark.parametrize(
    "result", [RESET, answer(500), answer(200, b"{}"), answer(200, b"nonsense")]
)
def test_a_bootstrap_server_that_says_nothing_is_its_workers_fault(result: Any) -> None:
    fleet = Fleet("mooncake")
    with fleet.dialogue() as story:
        story.gets(result).expects_call("query", "q bootstrap").gets(RANKS).gets(answer(200))
        story.expects_send("d").gets(answer(200)).relays_to_the_end()
    assert fleet.failed == ["p"]


def test_what_mooncake_keeps_is_given_back() -> None:
    fleet = Fleet("mooncake")
    with fleet.dialogue() as story:
        story.gets(RANKS)
        assert isinstance(story.command, Call)
        assert story.command.settle is not None
        assert [each.worker.id for each in story.command.settle(answer(200))] == ["d"]
        assert story.command.settle(RESET) == ()
        story.gets(answer(200)).expects_send("d").throws(ClientGone()).raises(ClientGone)
    assert fleet.after() == ["/v1/completions d"]


@pytest.mark.parametrize(("result", "status"), [(BAD, 400), (answer(500), 200)])
def test_a_prefill_of_mooncake_that_is_refused_or_fails(result: Any, status: int) -> None:
    fleet = Fleet("mooncake")
    with fleet.dialogue() as story:
        story.gets(RANKS).gets(result)
        if status == 200:
            story.expects_call("query", "q bootstrap").gets(RANKS).gets(answer(200))
            story.expects_send("d").gets(answer(200))
        story.relays_to_the_end(status)


def test_a_bootstrap_server_leaves_with_its_worker() -> None:
    fleet = Fleet("mooncake")
    server = fleet.handoffs.bootstrap(fleet.workers["p"])
    assert fleet.handoffs.bootstrap(fleet.workers["p"]) is server
    assert fleet.handoffs.forget(fleet.workers["p"]) is server
    assert fleet.handoffs.forget(fleet.workers["p"]) is None


# ------------------------------------------------------------------ bootstrap (SGLang)


def both(story: Dialogue) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the two legs are told."""
    assert isinstance(story.command, Both)
    fields = {key: json.loads(value) for key, value in story.command.send.fields.items()}
    return told(story.command.call.call)[1], fields


def test_both_are_asked_at_once_and_meet_in_a_room() -> None:
    fleet = Fleet("bootstrap", stream=True)
    with fleet.dialogue() as story:
        prefill, decode = both(story.expects_both("p", "d"))
        assert fleet.in_flight == ["p", "d"]
        meeting = {"bootstrap_host": "p", "bootstrap_port": 8998, "bootstrap_room": 77, "rid": "r1"}
        assert decode == meeting
        assert {key: prefill[key] for key in meeting} == meeting
        assert prefill["stream"] is False
        story.gets(Pair(answer(200, b'{"usage":{"prompt_tokens":4}}'), EVENT)).relays_to_the_end()
    assert (fleet.after(), fleet.outcomes, fleet.in_flight) == ([], ["handed_over"], [])


ABORTS = ["/abort_request p", "/abort_request d"]


@pytest.mark.parametrize("result", [RESET, answer(500), answer(503), Lost(Why.TIMED_OUT)])
def test_p05_p13_a_prefill_that_fails_ends_the_decode_and_both_are_told(result: Any) -> None:
    fleet = Fleet("bootstrap")
    with fleet.dialogue() as story:
        story.gets(Pair(result, None)).expects_both("q", "d")
        assert both(story)[1]["rid"] == "r1-2"
        story.gets(Pair(answer(200), answer(200))).relays_to_the_end()
    assert (fleet.failed, fleet.after()) == (["p"], ABORTS)


def test_p06_a_prompt_that_p_refuses_is_not_answered_by_d() -> None:
    fleet = Fleet("bootstrap")
    with fleet.dialogue() as story:
        story.gets(Pair(BAD, None)).relays_to_the_end(400)
    assert (fleet.outcomes, fleet.after()) == (["refused"], ABORTS)


@pytest.mark.parametrize("result", [RESET, answer(503)])
def test_a_decode_worker_that_fails_ends_the_prefill_and_is_replaced(result: Any) -> None:
    fleet = Fleet("bootstrap")
    with fleet.dialogue() as story:
        story.gets(Pair(None, result)).expects_both("p", "e")
        story.gets(Pair(answer(200), answer(200))).relays_to_the_end()
    assert (fleet.failed, fleet.after()) == (["d"], ABORTS)


def test_what_the_decode_worker_refuses_is_the_clients() -> None:
    fleet = Fleet("bootstrap")
    with fleet.dialogue() as story:
        story.gets(Pair(None, BAD)).relays_to_the_end(400)
    assert (fleet.outcomes, fleet.after()) == (["refused"], ABORTS)


@pytest.mark.parametrize("stage", ["both", "relay"])
def test_p05_a_client_that_leaves_ends_both(stage: str) -> None:
    fleet = Fleet("bootstrap", stream=True)
    with fleet.dialogue() as story:
        story.expects_both("p", "d")
        if stage == "relay":
            story.gets(Pair(answer(200), EVENT)).expects_relay()
        story.throws(ClientGone()).raises(ClientGone)
    assert fleet.after() == ABORTS


def test_a_prefill_worker_without_a_bootstrap_server_is_of_no_use() -> None:
    fleet = Fleet("bootstrap")
    fleet.workers["p"].bootstrap = ""
    with fleet.dialogue() as story:
        story.expects_both("q", "d").gets(Pair(answer(200), answer(200))).relays_to_the_end()
    assert fleet.failed == ["p"]


# ------------------------------------------------------------------ slots (llama.cpp)

MOVED = answer(200, b'{"id_slot":0,"n_saved":9,"n_restored":9}')
RESUMED = answer(200, b'{"usage":{"prompt_tokens_details":{"cached_tokens":8}}}')


def test_a_slot_is_saved_restored_and_gone_on_from() -> None:
    fleet = Fleet("slots")
    with fleet.dialogue() as story:
        assert told(asked_of(story.expects_call("completions", "p")))[1]["id_slot"] == 0
        _, body = told(asked_of(story.gets(answer(200)).expects_call("0?action=save", "p")))
        restore = asked_of(story.gets(MOVED).expects_call("0?action=restore", "d"))
        assert told(restore)[1] == body
        assert body["filename"].startswith("pointsman-")
        fields = sent(story.gets(MOVED).expects_send("d")).fields
        assert fields == {"id_slot": b"0", "cache_prompt": b"true"}
        story.gets(RESUMED).relays_to_the_end()
    transfer = fleet.x.tries[0].transfer
    assert transfer is not None
    assert (transfer.outcome, transfer.resumed, fleet.after()) == ("handed_over", 8, [])


def test_a_slot_that_is_taken_is_not_taken_twice_and_is_free_afterwards() -> None:
    fleet = Fleet("slots", "pd")
    with fleet.dialogue() as story:
        assert fleet.handoffs.slots == {fleet.workers["p"]: {0}, fleet.workers["d"]: {0}}
        second = Dialogue(
            disaggregated(
                Exchange(fleet.x.request, CHAT, "chat", 10.0, now=10.0),
                *(fleet.router, 3, fleet.route, fleet.body, fleet.handoffs),
            )
        )
        with second:
            second.expects_send("d").gets(answer(200)).relays_to_the_end()
        story.throws(ClientGone()).raises(ClientGone)
    assert not any(fleet.handoffs.slots.values())


@pytest.mark.parametrize(
    ("results", "blamed"),
    [
        ([answer(500)], "p"),
        ([answer(200), answer(500)], "p"),
        ([answer(200), RESET], "p"),
        ([answer(200), MOVED, answer(400)], "d"),
        ([answer(200), MOVED, MOVED, RESET], "d"),
    ],
)
def test_whoever_fails_in_moving_a_slot_is_replaced(results: list[Any], blamed: str) -> None:
    fleet = Fleet("slots")
    with fleet.dialogue() as story:
        for result in results:
            story.gets(result)
        story.gets(answer(200)).gets(MOVED).gets(MOVED).gets(RESUMED).relays_to_the_end()
    assert fleet.failed == [blamed]
    assert not any(fleet.handoffs.slots.values())


def test_what_the_prefill_worker_of_a_slot_refuses_is_the_clients() -> None:
    with Fleet("slots").dialogue() as story:
        story.gets(BAD).relays_to_the_end(400)


def test_p19_a_slot_that_was_of_no_use_is_seen() -> None:
    fleet = Fleet("slots")
    with fleet.dialogue() as story:
        story.gets(answer(200)).gets(MOVED).gets(MOVED)
        story.gets(answer(200, b'{"timings":{"cache_n":0}}')).relays_to_the_end()
    assert fleet.outcomes == ["recomputed"]


def test_the_last_word_about_the_cache_counts_and_text_is_no_word() -> None:
    assert cached_in(b'{"cached_tokens": 3} {"cache_n":4}') == 4
    assert cached_in(rb'{"content":"\"cached_tokens\": 7"}') == -1
    assert cached_in(b"") == -1
