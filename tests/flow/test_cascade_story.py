"""Cascades as dialogues: what is asked, what is kept, and what the client never sees. No sockets."""

import json
from typing import Any

import pytest

from pointsman.domain.policy.least_outstanding import LeastOutstanding
from pointsman.domain.registry import Registry
from pointsman.domain.router import Router
from pointsman.domain.routes import Route, RouteTable, Step, StreamHold
from pointsman.domain.worker import Role, Worker
from pointsman.errors import NoCapacity
from pointsman.flow.cascade import Cascades, cascade
from pointsman.flow.effects import Answer, Broken, ClientGone, Done, Lost, More, Relay, Send, Why
from pointsman.flow.exchange import Exchange
from pointsman.flow.handover import Handoffs
from pointsman.testing.stories import Dialogue, answer
from pointsman.wire.body import parse_request
from pointsman.wire.call import HttpCall
from pointsman.wire.shape import edited_json

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
RULE = "mean_logprob > -1.0"


def chat(*logprobs: float | None, text: str = "four", used: tuple[int, int] = (3, 2)) -> Answer:
    """A chat answer with these token logprobs."""
    content: list[Any] = [{"token": "t", "logprob": each, "top_logprobs": []} for each in logprobs]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text},
        "logprobs": {"content": content},
    }
    usage = {"prompt_tokens": used[0], "completion_tokens": used[1]}
    return answer(200, json.dumps({"choices": [choice], "usage": usage}).encode())


SURE = chat(-0.5, -0.5)
UNSURE = chat(-2.0, -2.0)


def event(*logprobs: float, text: str = "x") -> bytes:
    """A chunk of a chat stream with these token logprobs."""
    content = [{"token": "t", "logprob": each, "top_logprobs": []} for each in logprobs]
    choice = {"index": 0, "delta": {"content": text}, "logprobs": {"content": content}}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


def streamed(*events: bytes) -> Answer:
    """A stream as far as it has come."""
    head = answer(200, b"x", stream=True).head
    body = b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in events)
    return Answer(head, body, complete=False)


class Fleet:
    """Workers s, t of the small model, l, n of the large one, and one request to the cascade of both."""

    def __init__(
        self,
        workers: str = "stln",
        *,
        path: str = CHAT,
        rule: str = RULE,
        hold: StreamHold | None = None,
        shadow: float = 0.0,
        **body: Any,
    ) -> None:
        registry = Registry()
        self.workers = {
            id: Worker(
                id,
                model="small" if id in "st" else "middle" if id == "m" else "large",
                http_address=f"{id}:80",
                role=Role.UNIFIED,
                static=True,
            )
            for id in workers
        }
        for worker in self.workers.values():
            registry.add(worker)
        middle = (Step("middle", rule),) if "m" in workers else ()
        self.route = Route(
            "m",
            cascade=(Step("small", rule), *middle, Step("large")),
            stream_hold=hold,
            shadow=shadow,
        )
        self.router = Router(registry, LeastOutstanding(), RouteTable([self.route]))
        asked = {"model": "m", "messages": [{"role": "user", "content": "2+2?"}]} | body
        if path == TEXT:
            asked = {"model": "m", "prompt": "2+2="} | body
        self.body = json.dumps(asked).encode()
        self.x = Exchange(
            parse_request(self.body, "r1"), path=path, operation="chat", started=10.0, now=10.0
        )
        self.cascades = Cascades()

    def dialogue(self) -> Dialogue:
        handoffs = Handoffs(draw_seed=lambda: 77, wall=lambda: 1000.0)
        return Dialogue(
            cascade(self.x, self.router, 3, self.route, self.body, handoffs, self.cascades)
        )

    @property
    def counts(self) -> tuple[int, int, int, int]:
        counts = self.cascades.calibrations.of("m", 0)
        return counts.kept, counts.rejected, counts.unscored, counts.failed

    @property
    def in_flight(self) -> dict[str, int]:
        return {id: worker.in_flight for id, worker in self.workers.items() if worker.in_flight}


def fields(story: Dialogue) -> dict[str, bytes]:
    assert isinstance(story.command, Send)
    return dict(story.command.fields)


def relayed(story: Dialogue) -> bytes:
    """What the client gets of a whole answer."""
    assert isinstance(story.command, Relay)
    return edited_json(story.command.answer.payload, story.command.edits)


def test_cascade_accepts_or_escalates() -> None:
    kept = Fleet()
    with kept.dialogue() as story:
        story.expects_send("s")
        assert fields(story) == {"logprobs": b"true"}
        story.gets(SURE).expects_relay()
        assert relayed(story) == SURE.body.replace(
            SURE.body[SURE.body.index(b'{"content": [{"token"') : SURE.body.index(b'}], "usage"')],
            b"null",
        )
        story.gets(Done()).ends()
    assert [each.target.served_model for each in kept.x.tries] == ["small"]

    escalated = Fleet()
    with escalated.dialogue() as story:
        story.expects_send("s").gets(UNSURE).expects_send("l")
        assert fields(story) == {}
        story.gets(answer(200)).relays_to_the_end()

    with Fleet(stream=True).dialogue() as story:
        story.expects_send("l")
        assert fields(story) == {}
        story.gets(answer(200, b"data: x\n\n", stream=True)).relays_to_the_end()


def test_an_answer_without_tokens_is_never_kept() -> None:
    fleet = Fleet(rule="mean_logprob > -100")
    with fleet.dialogue() as story:
        story.gets(chat()).expects_send("l").gets(answer(200)).relays_to_the_end()
    assert fleet.counts == (0, 0, 1, 0)


@pytest.mark.parametrize(
    "unreadable",
    [
        chat(-0.1, None),
        answer(200, b'{"choices":[{"message":{"tool_calls":[{}]}}]}'),
        answer(200, b"no json"),
        answer(200, b'{"choices":[]}'),
        answer(400),
        answer(500),
        Answer(SURE.head, SURE.body[:40], complete=False),
    ],
)
def test_an_answer_that_cannot_be_judged_is_not_kept(unreadable: Answer) -> None:
    fleet = Fleet()
    with fleet.dialogue() as story:
        story.expects_send("s").gets(unreadable).expects_send("l")
        story.gets(answer(200)).relays_to_the_end()
    assert fleet.counts == (0, 0, 1, 0)


def test_logprobs_that_the_client_asked_for_stay() -> None:
    fleet = Fleet(logprobs=True, top_logprobs=3)
    with fleet.dialogue() as story:
        assert fields(story).get("logprobs") in (None, b"true")
        story.gets(SURE).expects_relay()
        assert relayed(story) == SURE.body
        story.gets(Done()).ends()


def test_the_classic_form_of_logprobs_is_read_as_well() -> None:
    fleet = Fleet(path=TEXT)
    body = b'{"choices":[{"text":"4","logprobs":{"tokens":["4"],"token_logprobs":[-0.25]}}]}'
    with fleet.dialogue() as story:
        assert fields(story) == {"logprobs": b"1"}
        story.gets(answer(200, body)).expects_relay()
        assert relayed(story) == b'{"choices":[{"text":"4","logprobs":null}]}'
        story.gets(Done()).ends()


def test_a_small_worker_that_fails_is_replaced_by_another_small_one() -> None:
    fleet = Fleet()
    with fleet.dialogue() as story:
        story.expects_send("s").gets(Lost(Why.RESET)).expects_send("t")
        assert fields(story) == {"logprobs": b"true"}
        story.gets(SURE).relays_to_the_end()
    assert [each.failure for each in fleet.x.tries] == ["reset", ""]
    assert fleet.counts == (1, 0, 0, 0)


@pytest.mark.parametrize("result", [Lost(Why.RESET), answer(503), answer(429)])
def test_a_step_whose_workers_all_fail_is_skipped(result: Answer | Lost) -> None:
    fleet = Fleet()
    with fleet.dialogue() as story:
        story.expects_send("s").gets(result).expects_send("t").gets(result)
        story.expects_send("l").gets(answer(200)).relays_to_the_end()
    assert fleet.counts == (0, 0, 0, 1)
    assert fleet.x.reason == "cascade", "the failures of a step are not those of the next"


def test_a_step_without_a_worker_is_skipped() -> None:
    with Fleet("ln").dialogue() as story:
        story.expects_send("l").gets(answer(200)).relays_to_the_end()


def test_only_a_last_step_without_a_worker_is_no_capacity() -> None:
    with Fleet("st").dialogue() as story:
        story.expects_send("s").gets(UNSURE).raises(NoCapacity)
    with Fleet("st").dialogue() as story:
        story.expects_send("s").gets(SURE).relays_to_the_end()


def test_three_models_are_asked_in_order() -> None:
    fleet = Fleet("sml")
    with fleet.dialogue() as story:
        story.expects_send("s").gets(UNSURE).expects_send("m")
        assert fields(story) == {"logprobs": b"true"}
        story.gets(SURE).relays_to_the_end()
    assert [each.target.cascade_step for each in fleet.x.tries] == [0, 1]


def test_the_last_step_fails_over_like_any_other_request() -> None:
    with Fleet().dialogue() as story:
        story.expects_send("s").gets(UNSURE).expects_send("l").gets(Lost(Why.REFUSED))
        story.expects_send("n").gets(answer(200)).relays_to_the_end()


def test_what_a_rejected_answer_cost_is_counted() -> None:
    fleet = Fleet()
    with fleet.dialogue() as story:
        story.expects_send("s")
        fleet.x.now = 12.5
        story.gets(UNSURE).gets(answer(200)).relays_to_the_end()
    counts = fleet.cascades.calibrations.of("m", 0)
    assert (counts.prompt_tokens, counts.completion_tokens, counts.seconds) == (3, 2, 2.5)
    verdict = fleet.x.tries[0].verdict
    assert verdict is not None
    assert (verdict.value, verdict.kept) == (-2.0, False)
    assert (verdict.prompt_tokens, verdict.completion_tokens) == (3, 2)
    assert fleet.x.tries[1].verdict is None


def test_a_rule_whose_acceptor_is_gone_is_no_reason_to_fail() -> None:
    fleet = Fleet()
    step = Step("small", "score > 0.5", acceptor="gone")
    fleet.route = Route("m", cascade=(step, Step("large")))
    with fleet.dialogue() as story:
        story.expects_send("l").gets(answer(200)).relays_to_the_end()


@pytest.mark.parametrize("after", range(3))
def test_a_client_that_leaves_leaves_nothing_in_flight(after: int) -> None:
    fleet = Fleet()
    with fleet.dialogue() as story:
        for result in (UNSURE, answer(200))[:after]:
            story.gets(result)
        story.throws(ClientGone()).raises(ClientGone)
    assert fleet.in_flight == {}


def test_a_kept_answer_that_breaks_on_its_way_is_over() -> None:
    fleet = Fleet()
    with fleet.dialogue() as story:
        story.gets(SURE).expects_relay().gets(Broken(Why.SHUTDOWN)).ends()
    assert fleet.x.error == "shutdown"


# ------------------------------------------------------------------ streams


HOLD = StreamHold(tokens=3, seconds=2.0)


def test_a_stream_is_held_until_it_has_said_enough_and_is_let_through() -> None:
    fleet = Fleet(hold=HOLD, stream=True)
    first, second = event(-0.1), event(-0.1, -0.2)
    with fleet.dialogue() as story:
        story.expects_send("s")
        assert fields(story) == {"logprobs": b"true"}
        story.gets(streamed(first)).expects_more()
        assert isinstance(story.command, More)
        assert story.command.until == 12.0
        story.gets(streamed(first, second)).expects_relay()
        assert isinstance(story.command, Relay)
        assert len(story.command.edits) == 1
        story.gets(Done()).ends()
    assert fleet.counts == (1, 0, 0, 0)


def test_a_stream_that_is_unsure_is_dropped_and_the_large_one_begins() -> None:
    fleet = Fleet(hold=HOLD, stream=True)
    with fleet.dialogue() as story:
        story.gets(streamed(event(-3.0, -3.0, -3.0))).expects_send("l")
        assert fields(story) == {}
        story.gets(answer(200, b"data: x\n\n", stream=True)).relays_to_the_end()
    assert fleet.counts == (0, 1, 0, 0)


def test_a_stream_is_judged_by_what_is_there_when_its_time_is_up() -> None:
    fleet = Fleet(hold=HOLD, stream=True)
    with fleet.dialogue() as story:
        story.gets(streamed(event(-0.1))).expects_more()
        fleet.x.now = 12.0
        story.gets(streamed(event(-0.1))).relays_to_the_end()


def test_a_stream_without_a_token_in_time_is_dropped() -> None:
    fleet = Fleet(hold=HOLD, stream=True)
    role = b'data: {"choices":[{"delta":{"role":"assistant"}}]}\n\n'
    with fleet.dialogue() as story:
        story.gets(streamed(role)).expects_more()
        fleet.x.now = 12.0
        story.gets(streamed(role)).expects_send("l").gets(answer(200)).relays_to_the_end()


def test_a_stream_that_talks_without_tokens_is_not_held_without_bounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pointsman.flow.cascade.HOLD", 1000)
    pings = [b": ping\n\n"] * 100
    with Fleet(hold=HOLD, stream=True).dialogue() as story:
        story.gets(streamed(*pings[:50])).expects_more()
        story.gets(streamed(*pings)).expects_send("l").gets(answer(200)).relays_to_the_end()


def test_a_short_stream_is_judged_at_its_end() -> None:
    with Fleet(hold=HOLD, stream=True).dialogue() as story:
        story.gets(streamed(event(-0.1), b"data: [DONE]\n\n")).relays_to_the_end()


def test_a_held_stream_that_breaks_is_asked_of_another_small_worker() -> None:
    fleet = Fleet(hold=HOLD, stream=True)
    with fleet.dialogue() as story:
        story.expects_send("s").gets(streamed(event(-0.1))).expects_more()
        story.gets(Lost(Why.RESET)).expects_send("t").gets(streamed(event(-0.1, -0.1, -0.1)))
        story.relays_to_the_end()
    assert [each.failure for each in fleet.x.tries] == ["reset", ""]


def test_a_client_may_leave_while_its_stream_is_held() -> None:
    fleet = Fleet(hold=HOLD, stream=True)
    with fleet.dialogue() as story:
        story.gets(streamed(event(-0.1))).expects_more()
        story.throws(ClientGone()).raises(ClientGone)
    assert fleet.in_flight == {}


# ------------------------------------------------------------------ the shadow


def test_a_kept_answer_of_the_sample_is_compared_once_the_client_has_it() -> None:
    fleet = Fleet(shadow=1.0)
    with fleet.dialogue() as story:
        story.gets(SURE).relays_to_the_end()
    (after,) = fleet.x.after
    assert after.optional
    (call,) = after.calls
    assert isinstance(call, HttpCall)
    assert (call.worker.id, json.loads(call.body)["model"]) == ("l", "large")
    assert after.then is not None
    after.then(chat(-0.1, text="Four!"))
    after.then(Lost(Why.RESET))
    samples = fleet.cascades.calibrations.of("m", 0).samples
    assert [(each.value, each.agreement) for each in samples] == [(-0.5, 1.0)]


def test_a_rejected_answer_of_the_sample_is_compared_with_the_one_that_was_asked_for_anyway() -> (
    None
):
    fleet = Fleet(shadow=1.0)
    with fleet.dialogue() as story:
        story.gets(UNSURE).expects_send("l").gets(chat(-0.1, text="five")).relays_to_the_end()
    assert fleet.x.after == []
    samples = fleet.cascades.calibrations.of("m", 0).samples
    assert [(each.value, each.agreement) for each in samples] == [(-2.0, 0.0)]


def test_a_sample_is_what_it_says() -> None:
    compared = 0
    for number in range(2000):
        fleet = Fleet(shadow=0.1)
        fleet.x.request.request_id = f"r{number}"
        with fleet.dialogue() as story:
            story.gets(SURE).relays_to_the_end()
        compared += len(fleet.x.after)
    # Binomial: 200 expected, standard deviation 13.4; five of them.
    assert 133 <= compared <= 267


def test_a_shadow_without_a_worker_is_no_ones_problem() -> None:
    fleet = Fleet("st", shadow=1.0)
    with fleet.dialogue() as story:
        story.gets(SURE).relays_to_the_end()
    assert fleet.x.after == []


def test_what_has_no_text_is_not_compared() -> None:
    fleet = Fleet(shadow=1.0)
    tool = answer(200, b'{"choices":[{"message":{"content":null,"tool_calls":[{}]}}]}')
    with fleet.dialogue() as story:
        story.gets(tool).expects_send("l").gets(chat(-0.1)).relays_to_the_end()
    assert list(fleet.cascades.calibrations.of("m", 0).samples) == []
