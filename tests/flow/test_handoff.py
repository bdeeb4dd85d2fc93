"""The hand-off as dialogues: who is asked what, who is blamed, and what is given back. No sockets."""

import json
from typing import Any

import pytest

from pointsman.domain.pairing import Pairing, PairingOptions
from pointsman.domain.policy.least_outstanding import LeastOutstanding
from pointsman.domain.prefix_index import PrefixIndex
from pointsman.domain.registry import Registry
from pointsman.domain.router import Router
from pointsman.domain.routes import Route, RouteTable
from pointsman.domain.worker import Role, Worker
from pointsman.errors import BadRequest, NoCapacity, UpstreamTimeout
from pointsman.flow.effects import (
    Broken,
    Call,
    ClientGone,
    Done,
    Lost,
    Result,
    Returned,
    Send,
    Status,
    Why,
)
from pointsman.flow.exchange import Exchange
from pointsman.flow.handover import Handoffs
from pointsman.flow.plan import disaggregated
from pointsman.proto.engine_pb2 import (
    CancelRequest,
    InfoResponse,
    KvHandle,
    PrefillRequest,
    PrefillResponse,
)
from pointsman.proto.kv_pb2 import ReleaseRequest
from pointsman.testing.stories import Dialogue, answer
from pointsman.wire.body import parse_request
from pointsman.wire.call import HttpCall, RpcCall
from pointsman.wire.http1 import parse_response_head

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
IDS = [7, 8, 9]
TOKENS = answer(200, b'{"ids":[7,8,9]}')
GONE = Status("UNAVAILABLE", "Socket closed")


def done(handle: str = "r1") -> Returned:
    """What a prefill worker answers."""
    message = PrefillResponse(
        handle=KvHandle(handle_id=handle, n_tokens=3), prompt_tokens=3, cached_prompt_tokens=2
    )
    return Returned(message.SerializeToString())


class Fleet:
    """Prefill workers p, q, decode workers d, e, and unified u, and one request to them."""

    def __init__(
        self,
        workers: str = "pqde",
        *,
        path: str = CHAT,
        targets: tuple[str, ...] = ("disaggregated",),
        shortest: int = 0,
        max_attempts: int = 3,
        route: dict[str, Any] | None = None,
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
                grpc_address=f"{id}:51",
                kv_address=f"{id}:52" if id in "de" else "",
                static=True,
            )
            for id in workers
        }
        for worker in self.workers.values():
            registry.add(worker)
        self.route = Route("m", targets=targets, **(route or {}))
        self.router = Router(registry, LeastOutstanding(), RouteTable([self.route]))
        prompt = {"prompt": "Once"} if path == TEXT else {"messages": [said("user", "Hi")]}
        asked = {"model": "m", "max_tokens": 5} | prompt | body
        self.body = json.dumps({k: v for k, v in asked.items() if v != ...}).encode()
        self.x = Exchange(
            parse_request(self.body, "r1"), path=path, operation="chat", started=10.0, now=10.0
        )
        self.handoffs = Handoffs(draw_seed=lambda: 77, wall=lambda: 1000.0, min_tokens=shortest)
        self.max_attempts = max_attempts

    def dialogue(self) -> Dialogue:
        story = disaggregated(
            self.x, self.router, self.max_attempts, self.route, self.body, self.handoffs
        )
        return Dialogue(story)

    def after(self) -> list[str]:
        """What is done whatever becomes of the request, as `<call> <worker> <name>`."""
        told = []
        for each in self.x.after:
            for call in each.calls:
                assert isinstance(call, RpcCall)
                kind = CancelRequest if call.method.endswith("Cancel") else ReleaseRequest
                message = kind.FromString(call.message)
                name = getattr(message, "request_id", "") or getattr(message, "handle_id", "")
                told.append(f"{call.method.rpartition('/')[2]} {call.worker.id} {name}")
        return told

    @property
    def in_flight(self) -> dict[str, int]:
        return {id: worker.in_flight for id, worker in self.workers.items() if worker.in_flight}

    @property
    def failed(self) -> list[str]:
        return [each.failed.id for each in self.x.tries if each.failed is not None]

    @property
    def outcomes(self) -> list[str]:
        return [each.transfer.outcome for each in self.x.tries if each.transfer is not None]


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def prefill_of(story: Dialogue) -> PrefillRequest:
    assert isinstance(story.command, Call)
    assert isinstance(story.command.call, RpcCall)
    request: PrefillRequest = PrefillRequest.FromString(story.command.call.message)
    return request


def sent(story: Dialogue) -> tuple[dict[str, bytes], bytes]:
    assert isinstance(story.command, Send)
    return dict(story.command.fields), story.command.headers


def to_decode(story: Dialogue, p: str = "p", d: str = "d", handle: str = "r1") -> Dialogue:
    """Play a hand-off that works, up to the decode worker's turn."""
    story.expects_call("tokenize", p).gets(TOKENS)
    return story.expects_call("Prefill", p).gets(done(handle)).expects_send(d)


def test_a_prompt_is_tokenized_prefilled_and_answered_elsewhere() -> None:
    fleet = Fleet(seed=5)
    with fleet.dialogue() as story:
        assert fleet.in_flight == {"p": 1, "d": 1}
        to_decode(story)
        assert fleet.in_flight == {"d": 1}
        assert sent(story) == ({}, b"x-tl-kv-handle: r1\r\n")
        story.gets(answer(200)).relays_to_the_end()
    assert (fleet.after(), fleet.in_flight, fleet.outcomes) == ([], {}, ["handed_over"])
    transfer = fleet.x.tries[0].transfer
    assert transfer is not None
    assert (transfer.tokens, transfer.cached) == (3, 2)


def test_disaggregated_equals_unified() -> None:
    """Both workers are told the same: the prompt's ids, the defaults, one seed; and P is told where D's blocks go."""
    fleet = Fleet()
    with fleet.dialogue() as story:
        story.expects_call("tokenize", "p").gets(TOKENS).expects_call("Prefill", "p")
        request = prefill_of(story)
        assert list(request.prompt_ids) == IDS
        assert request.decode_target == "d:52"
        assert (request.sampling.temperature, request.sampling.top_p) == (1.0, 1.0)
        assert (request.sampling.seed, request.sampling.max_new_tokens) == (77, 5)
        story.gets(done())
        assert sent(story) == ({"seed": b"77"}, b"x-tl-kv-handle: r1\r\n")
        story.gets(answer(200)).relays_to_the_end()
    assert fleet.after() == []


@pytest.mark.parametrize("seed", [-1, 1 << 63, 1.5, "7", True, [1]])
def test_a_seed_that_no_worker_could_use_is_refused(seed: object) -> None:
    with Fleet(seed=seed).dialogue() as story:
        error = story.raises(BadRequest)
    assert isinstance(error, BadRequest)
    assert error.param == "seed"


def test_p09_p10_every_sampling_field_goes_to_the_prefill_and_nothing_of_it_to_the_decode_worker() -> (
    None
):
    fields: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 3,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.75,
        "frequency_penalty": -0.5,
        "seed": 9,
        "max_tokens": 40,
        "stop": ["a", "b"],
        "logprobs": True,
        "top_logprobs": 4,
        "stream": True,
    }
    fleet = Fleet(**fields)
    with fleet.dialogue() as story:
        story.expects_call("tokenize", "p").gets(TOKENS)
        request = prefill_of(story)
        sampling = request.sampling
        assert (request.request_id, request.model, list(request.prompt_ids)) == ("r1", "m", IDS)
        assert (request.decode_target, request.deadline_unix_ms) == ("d:52", 1_030_000)
        assert [getattr(sampling, name) for name in list(fields)[:7]] == list(fields.values())[:7]
        assert (sampling.seed, sampling.max_new_tokens, sampling.logprobs) == (9, 40, 4)
        assert list(sampling.stop) == ["a", "b"]
        story.gets(done())
        assert sent(story)[0] == {}, "the decode worker gets the client's own values"
        story.gets(answer(200, b"data: x\n\n", stream=True)).relays_to_the_end()


def test_what_the_client_does_not_say_is_the_contracts_default() -> None:
    fleet = Fleet(path=TEXT, max_tokens=..., stop="x", logprobs=2)
    with fleet.dialogue() as story:
        story.expects_call("tokenize", "p").gets(TOKENS)
        sampling = prefill_of(story).sampling
        assert (sampling.temperature, sampling.top_p, sampling.repetition_penalty) == (1, 1, 1)
        assert (sampling.top_k, sampling.min_p, sampling.max_new_tokens) == (0, 0, 16)
        assert (sampling.presence_penalty, sampling.frequency_penalty) == (0, 0)
        assert (list(sampling.stop), sampling.logprobs) == (["x"], 2)
        story.throws(ClientGone()).raises(ClientGone)


def test_the_limit_of_a_chat_is_what_the_context_has_left() -> None:
    fleet = Fleet(max_tokens=...)
    info = Returned(InfoResponse(max_context=100).SerializeToString())
    for _ in range(2):  # The second time it is known.
        with fleet.dialogue() as story:
            story.expects_call("tokenize", "p").gets(TOKENS)
            if not fleet.handoffs.contexts:
                story.expects_call("Info", "p").gets(info)
            assert prefill_of(story).sampling.max_new_tokens == 97
            story.throws(ClientGone()).raises(ClientGone)


@pytest.mark.parametrize(
    ("body", "route", "limit"),
    [
        ({"max_completion_tokens": 3, "max_tokens": 9}, {}, 3),
        ({"max_tokens": 0}, {}, 1),
        ({"max_tokens": ...}, {"default_max_tokens": 12}, 12),
    ],
)
def test_the_limit_is_the_clients_then_the_routes(
    body: dict[str, Any], route: dict[str, Any], limit: int
) -> None:
    with Fleet(route=route, **body).dialogue() as story:
        story.expects_call("tokenize", "p").gets(TOKENS)
        assert prefill_of(story).sampling.max_new_tokens == limit
        story.gets(done())
        told = sent(story)[0].get("max_tokens")
        assert told == (b"12" if route else None), "both workers have the route's limit"
        story.gets(answer(200)).relays_to_the_end()


def test_the_limit_of_a_chat_on_an_unknown_context_is_the_contracts() -> None:
    fleet = Fleet(max_tokens=...)
    for told in (GONE, Returned(b"\xff"), Returned(b"")):
        fleet.handoffs.contexts.clear()
        with fleet.dialogue() as story:
            story.expects_call("tokenize", "p").gets(TOKENS).expects_call("Info", "p").gets(told)
            assert prefill_of(story).sampling.max_new_tokens == 2048
            story.throws(ClientGone()).raises(ClientGone)


def test_tokens_that_the_client_sent_need_no_tokenizing() -> None:
    with Fleet(path=TEXT, prompt=[4, 5]).dialogue() as story:
        story.expects_call("Prefill", "p")
        assert list(prefill_of(story).prompt_ids) == [4, 5]
        story.gets(done()).expects_send("d").gets(answer(200)).relays_to_the_end()


def test_the_text_is_tokenized_as_the_client_wrote_it() -> None:
    with Fleet(path=TEXT, prompt="a\u00e9").dialogue() as story:
        assert isinstance(story.command, Call)
        assert isinstance(story.command.call, HttpCall)
        asked = b'{"model":"m","add_special":true,"text":"a\\u00e9"}'
        assert story.command.call.body == asked
        story.throws(ClientGone()).raises(ClientGone)


UNHANDED: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"n": 2}),
    (TEXT, {"best_of": 2}),
    (TEXT, {"echo": True}),
    (TEXT, {"suffix": "x"}),
    (TEXT, {"prompt": ["a", "b"]}),
    (CHAT, {"tools": [{"type": "function"}]}),
    (CHAT, {"response_format": {"type": "json_object"}}),
    (CHAT, {"logit_bias": {"1": 5}}),
    (CHAT, {"min_tokens": 3}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": []}]}),
    (CHAT, {"temperature": "hot"}),
    (CHAT, {"prompt": "both"}),
    ("/v1/embeddings", {"input": "x"}),
]


@pytest.mark.parametrize(("path", "body"), UNHANDED)
def test_p10_p17_what_cannot_be_handed_off_goes_to_one_worker_untouched(
    path: str, body: dict[str, Any]
) -> None:
    fleet = Fleet("pdu", path=path, targets=("disaggregated", "unified"), **body)
    with fleet.dialogue() as story:
        story.expects_send("u")
        assert sent(story) == ({}, b"")
        story.gets(answer(200)).relays_to_the_end()
    with Fleet("pd", path=path, **body).dialogue() as story:
        story.expects_send("d").gets(answer(200)).relays_to_the_end()


def test_a_field_that_stands_twice_is_not_handed_off() -> None:
    fleet = Fleet("pd")
    fleet.body = fleet.body.replace(b'"max_tokens"', b'"max_tokens": 4, "max_tokens"')
    with fleet.dialogue() as story:
        story.expects_send("d").gets(answer(200)).relays_to_the_end()


@pytest.mark.parametrize("minimum", [4, 1000])
def test_a_short_prompt_is_computed_by_the_decode_worker_itself(minimum: int) -> None:
    fleet = Fleet(shortest=minimum)
    with fleet.dialogue() as story:
        if minimum == 4:  # Of so many bytes there could be as many tokens.
            story.expects_call("tokenize", "p").gets(TOKENS)
        story.expects_send("d")
        assert sent(story) == ({}, b"")
        story.gets(answer(200)).relays_to_the_end()
    assert (fleet.after(), fleet.outcomes) == ([], ["direct"])


def test_a_route_says_for_itself_what_is_short() -> None:
    with Fleet(shortest=1000, route={"disagg_min_tokens": 3}).dialogue() as story:
        to_decode(story).gets(answer(200)).relays_to_the_end()


def test_what_a_decode_worker_does_for_less_alone_fails_over_like_anything_else() -> None:
    fleet = Fleet("pdeu", targets=("disaggregated", "unified"))
    fleet.router.pairing = Pairing(PrefixIndex(64, 60.0), PairingOptions())
    with fleet.dialogue() as story:
        # Nobody is busy.
        story.expects_send("d").gets(Lost(Why.RESET, "gone"))
        # At e there are others, who would wait for the prompt; at u there are even more.
        assert (fleet.in_flight, sent(story)) == ({"e": 1}, ({}, b""))
        fleet.workers["e"].running, fleet.workers["u"].running = 9_000, 10_000
        story.expects_send("e").gets(Lost(Why.RESET, "gone"))
        story.expects_send("u").gets(answer(200)).relays_to_the_end()
    assert (fleet.failed, fleet.outcomes, fleet.after()) == (["d", "e"], [], [])
    assert not any(worker.pending_tokens for worker in fleet.workers.values())


def test_who_computes_a_prompt_is_decided_anew_where_a_worker_failed() -> None:
    fleet = Fleet("pde")
    fleet.router.pairing = Pairing(PrefixIndex(64, 60.0), PairingOptions())
    fleet.workers["e"].running = 9_000
    with fleet.dialogue() as story:
        story.expects_send("d").gets(Lost(Why.RESET, "gone"))
        to_decode(story, d="e").gets(answer(200)).relays_to_the_end()
    assert (fleet.failed, fleet.outcomes) == (["d"], ["handed_over"])


def test_a_prefill_that_fails_excludes_the_prefill_worker_alone() -> None:
    fleet = Fleet()
    with fleet.dialogue() as story:
        story.expects_call("tokenize", "p").gets(TOKENS).expects_call("Prefill", "p").gets(GONE)
        story.expects_call("tokenize", "q").gets(TOKENS).expects_call("Prefill", "q")
        assert prefill_of(story).request_id == "r1-2"
        assert prefill_of(story).decode_target == "d:52"
        story.gets(done("r1-2")).expects_send("d").gets(answer(200)).relays_to_the_end()
    assert fleet.failed == ["p"]
    assert fleet.after() == ["Cancel p r1", "Release d r1"]


def test_a_decode_that_fails_excludes_the_decode_worker_alone_and_never_reuses_the_handle() -> None:
    fleet = Fleet()
    with fleet.dialogue() as story:
        to_decode(story).gets(Lost(Why.RESET))
        story.expects_call("tokenize", "p").gets(TOKENS).expects_call("Prefill", "p")
        assert prefill_of(story).decode_target == "e:52"
        story.gets(done("r1-2")).expects_send("e")
        assert sent(story)[1] == b"x-tl-kv-handle: r1-2\r\n"
        story.gets(answer(200)).relays_to_the_end()
    assert (fleet.failed, fleet.after()) == (["d"], ["Release d r1"])


def test_the_prefill_worker_may_blame_the_decode_worker() -> None:
    fleet = Fleet()
    with fleet.dialogue() as story:
        story.expects_call("tokenize", "p").gets(TOKENS)
        story.gets(Status("RESOURCE_EXHAUSTED", "the pool is full", leg="decode"))
        to_decode(story, d="e", handle="r1-2").gets(answer(200)).relays_to_the_end()
    assert (fleet.failed, fleet.after()) == (["d"], ["Release d r1"])


def test_without_another_prefill_worker_a_route_falls_back_to_unified_ones() -> None:
    fleet = Fleet("pdu", targets=("disaggregated", "unified"))
    with fleet.dialogue() as story:
        story.expects_call("tokenize", "p").gets(Lost(Why.REFUSED))
        story.expects_send("u")
        assert sent(story) == ({}, b"")
        story.gets(answer(200)).relays_to_the_end()
    assert (fleet.failed, fleet.after()) == (["p"], [])


def test_r10_no_decode_worker_is_touched_where_there_is_no_prefill_worker() -> None:
    fleet = Fleet("de")
    with fleet.dialogue() as story:
        story.raises(NoCapacity)
    assert (fleet.x.tries, fleet.in_flight) == ([], {})


def test_p14_a_connection_that_had_died_unseen_costs_nobody_the_request() -> None:
    fleet = Fleet("pd")
    with fleet.dialogue() as story:
        story.expects_call("tokenize", "p").gets(TOKENS).expects_call("Prefill", "p")
        story.gets(Status("UNAVAILABLE", "Socket closed", stale=True)).expects_call("Prefill", "p")
        assert prefill_of(story).request_id == "r1-2"
        story.gets(done("r1-2")).expects_send("d").gets(answer(200)).relays_to_the_end()
    assert (fleet.failed, fleet.after()) == ([], ["Cancel p r1", "Release d r1"])


def test_p14_a_second_dead_connection_is_a_dead_worker() -> None:
    fleet = Fleet("pd")
    stale = Status("UNAVAILABLE", "Socket closed", stale=True)
    with fleet.dialogue() as story:
        story.expects_call("tokenize", "p").gets(TOKENS).gets(stale).gets(stale)
        story.raises(NoCapacity)
    assert fleet.failed == ["p"]


def test_a_prefill_that_was_never_sent_leaves_nothing_to_release() -> None:
    fleet = Fleet("pd")
    with fleet.dialogue() as story:
        story.expects_call("tokenize", "p").gets(TOKENS)
        story.gets(Status("UNAVAILABLE", "failed to connect", sent=False)).raises(NoCapacity)
    assert fleet.after() == []


def test_p06_a_prompt_that_the_prefill_worker_refuses_is_the_clients_and_no_decode_begins() -> None:
    fleet = Fleet()
    with fleet.dialogue() as story:
        story.expects_call("tokenize", "p").gets(TOKENS)
        error = story.gets(Status("INVALID_ARGUMENT", "too long")).raises(BadRequest)
    assert str(error) == "too long"
    assert (fleet.after(), fleet.in_flight, fleet.outcomes) == (["Release d r1"], {}, ["refused"])


def test_the_tokenizers_own_word_about_a_prompt_reaches_the_client() -> None:
    fleet = Fleet()
    with fleet.dialogue() as story:
        story.expects_call("tokenize", "p").gets(answer(400, b'{"error":{}}'))
        story.relays_to_the_end(400)
    assert fleet.after() == []


@pytest.mark.parametrize(
    "result",
    [
        answer(500),
        answer(404),
        answer(200, b"no json"),
        answer(200, b'{"ids":[]}'),
        answer(200, b'{"ids":["a"]}'),
        answer(503),
        Lost(Why.RESET),
        Lost(Why.TIMED_OUT),
    ],
)
def test_p13_a_prefill_worker_that_cannot_tokenize_is_replaced(result: Any) -> None:
    fleet = Fleet()
    with fleet.dialogue() as story:
        story.expects_call("tokenize", "p").gets(result)
        to_decode(story, p="q").gets(answer(200)).relays_to_the_end()
    assert (fleet.failed, fleet.after(), fleet.outcomes) == (["p"], [], ["failed", "handed_over"])


@pytest.mark.parametrize(
    "broken", [b"\xff", b"", done("a\r\nx: y").message, done("\u00e9").message]
)
def test_an_answer_to_prefill_that_cannot_be_read_is_a_failure_and_is_released(
    broken: bytes,
) -> None:
    fleet = Fleet("pd")
    with fleet.dialogue() as story:
        story.expects_call("tokenize", "p").gets(TOKENS).gets(Returned(broken)).raises(NoCapacity)
    assert fleet.after() == ["Cancel p r1", "Release d r1"]


def test_a_prefill_that_takes_too_long_is_a_timeout() -> None:
    fleet = Fleet("pd")
    with fleet.dialogue() as story:
        story.expects_call("tokenize", "p").gets(TOKENS)
        story.gets(Status("DEADLINE_EXCEEDED")).raises(UpstreamTimeout)
    assert fleet.after() == ["Cancel p r1", "Release d r1"]


def test_the_whole_request_bounds_its_prefill() -> None:
    fleet = Fleet("pd")
    fleet.x.deadline = 14.0
    with fleet.dialogue() as story:
        story.expects_call("tokenize", "p").gets(TOKENS)
        assert prefill_of(story).deadline_unix_ms == 1_004_000
        story.throws(ClientGone()).raises(ClientGone)


@pytest.mark.parametrize("status", [400, 413, 422, 500])
def test_p04_what_the_decode_worker_refuses_is_relayed_and_released(status: int) -> None:
    fleet = Fleet()
    with fleet.dialogue() as story:
        to_decode(story).gets(answer(status)).relays_to_the_end(status)
    assert (fleet.after(), fleet.outcomes) == (["Release d r1"], ["refused"])


@pytest.mark.parametrize("status", [404, 409])
def test_p04_a_handle_that_the_decode_worker_does_not_know_is_prefilled_again(status: int) -> None:
    fleet = Fleet()
    lost = answer(status, b'{"error":{"code":"kv_handle_not_found"}}')
    with fleet.dialogue() as story:
        to_decode(story).gets(lost)
        to_decode(story, d="e", handle="r1-2").gets(answer(200)).relays_to_the_end()
    assert (fleet.failed, fleet.after()) == (["d"], ["Release d r1"])


@pytest.mark.parametrize("status", [429, 503])
def test_a_decode_worker_that_is_full_or_draining_is_replaced(status: int) -> None:
    fleet = Fleet()
    with fleet.dialogue() as story:
        to_decode(story).gets(answer(status))
        to_decode(story, d="e", handle="r1-2").gets(answer(200)).relays_to_the_end()
    assert fleet.after() == ["Release d r1"]


def test_disaggregated_release_on_abort() -> None:
    fleet = Fleet()
    with fleet.dialogue() as story:
        to_decode(story).gets(answer(200, b"data: x\n\n", stream=True)).expects_relay()
        story.gets(Broken(Why.RESET)).ends()
    assert (fleet.after(), fleet.x.error) == (["Release d r1"], "reset")


@pytest.mark.parametrize("after", range(5))
def test_p01_p02_a_client_that_leaves_at_any_point_leaves_nothing_behind(after: int) -> None:
    fleet = Fleet(max_tokens=...)
    steps: list[Result] = [TOKENS, GONE, done(), answer(200, b"data: x\n\n", stream=True)]
    with fleet.dialogue() as story:
        for result in steps[:after]:
            story.gets(result)
        story.throws(ClientGone()).raises(ClientGone)
    sure, unsure = ["Release d r1"], ["Cancel p r1", "Release d r1"]
    assert fleet.after() == [[], [], unsure, sure, sure][after]
    assert fleet.in_flight == {}
    assert (
        fleet.outcomes
        == [["abandoned"], ["abandoned"], ["abandoned"], ["abandoned"], ["handed_over"]][after]
    )


def test_p16_two_requests_of_one_id_are_two_hand_offs() -> None:
    fleet = Fleet()
    with fleet.dialogue() as story, fleet.dialogue() as twin:
        story.expects_call("tokenize", "p").gets(TOKENS)
        assert isinstance(twin.command, Call)
        twin.gets(TOKENS)
        assert [prefill_of(each).request_id for each in (story, twin)] == ["r1", "r1-2"]
        for each in (story, twin):
            each.throws(ClientGone()).raises(ClientGone)


def test_p16_a_name_that_a_client_took_is_not_given_again() -> None:
    handoffs = Handoffs(draw_seed=lambda: 7, wall=lambda: 0.0)
    names = [handoffs.name(each) for each in ("r", "r-2", "r", "r", "r-2")]
    assert len(set(names)) == 5
    assert names[:2] == ["r", "r-2"]


def resumed(tokens: bytes) -> Any:
    head = b"HTTP/1.1 200 X\r\ncontent-length: 2\r\nx-tl-kv-tokens: %b\r\n\r\n" % tokens
    plain = answer(200)
    return type(plain)(parse_response_head(head), plain.body, complete=True)


@pytest.mark.parametrize(
    ("said", "outcome", "tokens"),
    [(b"3", "handed_over", 3), (b"0", "recomputed", 0), (b"x", "handed_over", -1)],
)
def test_p19_a_prompt_that_was_computed_twice_is_told(
    said: bytes, outcome: str, tokens: int
) -> None:
    fleet = Fleet()
    with fleet.dialogue() as story:
        to_decode(story).gets(resumed(said)).relays_to_the_end()
    transfer = fleet.x.tries[0].transfer
    assert transfer is not None
    assert (transfer.outcome, transfer.resumed) == (outcome, tokens)


def test_at_most_so_many_attempts_are_made() -> None:
    fleet = Fleet(max_attempts=1)
    with fleet.dialogue() as story:
        to_decode(story).gets(Lost(Why.RESET)).raises(NoCapacity)
    assert fleet.after() == ["Release d r1"]


def test_a_gateway_that_stops_releases_too() -> None:
    fleet = Fleet()
    story = disaggregated(fleet.x, fleet.router, 3, fleet.route, fleet.body, fleet.handoffs)
    next(story)
    story.send(TOKENS)
    story.close()
    assert fleet.after() == ["Cancel p r1", "Release d r1"]


def test_an_end_in_good_order_gives_nothing_back_twice() -> None:
    fleet = Fleet()
    with fleet.dialogue() as story:
        to_decode(story).gets(answer(200, b"data: x\n\n", stream=True)).expects_relay()
        story.gets(Done()).ends()
    assert fleet.after() == []
