"""Hand-offs with a tokenizer of the gateway's own, as dialogues: what it is given, and when the worker is asked."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from pointsman.domain.policy.least_outstanding import LeastOutstanding
from pointsman.domain.registry import Registry
from pointsman.domain.router import Router
from pointsman.domain.routes import Backend, Route, RouteTable
from pointsman.domain.worker import Role, Worker
from pointsman.flow.effects import Call, ClientGone, Encode, Encoded, Lost, Returned, Send, Why
from pointsman.flow.exchange import Exchange
from pointsman.flow.handover import Handoffs
from pointsman.flow.plan import disaggregated
from pointsman.proto.engine_pb2 import KvHandle, PrefillRequest, PrefillResponse
from pointsman.testing.stories import Dialogue, answer
from pointsman.wire.body import parse_request
from pointsman.wire.call import RpcCall

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HI = [{"role": "user", "content": "Hi"}]
IDS = [4, 5]
FAILED = Lost(Why.TOKENIZE, "the tokenizer failed: TemplateRefused")


class Words:
    """A tokenizer that nobody calls: the driver would."""

    def __init__(self, *, chats: bool = True) -> None:
        self.chats = chats

    def encode(self, prompt: str | Sequence[Mapping[str, str]]) -> list[int]:
        raise AssertionError("a story performs nothing")


class Asked:
    """One request for the public model `m`, which workers serve as `served`, with a tokenizer for `tokenized`."""

    def __init__(
        self,
        tokenizer: Words | None = None,
        *,
        path: str = CHAT,
        tokenized: str = "served",
        shortest: int = 0,
        **body: Any,
    ) -> None:
        registry = Registry()
        self.workers = [
            Worker(
                id,
                model="served",
                http_address=f"{id}:80",
                role=role,
                grpc_address=f"{id}:51",
                kv_address=f"{id}:52",
                static=True,
            )
            for id, role in (("p", Role.PREFILL), ("d", Role.DECODE))
        ]
        for worker in self.workers:
            registry.add(worker)
        route = Route("m", targets=("disaggregated",), backends=(Backend("served"),))
        router = Router(registry, LeastOutstanding(), RouteTable([route]))
        asked = {"model": "m", "max_tokens": 5, "seed": 1, **body}
        encoded = json.dumps(asked).encode()
        self.x = Exchange(
            parse_request(encoded, "r1"), path=path, operation="chat", started=10.0, now=10.0
        )
        handoffs = Handoffs(
            draw_seed=lambda: 77,
            wall=lambda: 1000.0,
            min_tokens=shortest,
            tokenizers={tokenized: tokenizer} if tokenizer else {},
        )
        self.dialogue = Dialogue(disaggregated(self.x, router, 3, route, encoded, handoffs))

    @property
    def leases(self) -> int:
        return sum(worker.in_flight for worker in self.workers)


def encoded(story: Dialogue, tokenizer: Words) -> object:
    """The prompt that this tokenizer is to encode now."""
    assert isinstance(story.command, Encode), story.command
    assert story.command.tokenizer is tokenizer
    assert 0 < story.command.timeout_s <= 10
    return story.command.prompt


def prefilled(story: Dialogue) -> list[int]:
    """The ids that the prefill worker is to compute now; it does, and the decode worker answers."""
    story.expects_call("Prefill", "p")
    assert isinstance(story.command, Call)
    assert isinstance(story.command.call, RpcCall)
    ids = list(PrefillRequest.FromString(story.command.call.message).prompt_ids)
    handle = KvHandle(handle_id="r1", n_tokens=len(ids))
    done = PrefillResponse(handle=handle, prompt_tokens=len(ids)).SerializeToString()
    story.gets(Returned(done)).expects_send("d").gets(answer(200)).relays_to_the_end()
    return ids


@pytest.mark.parametrize(
    ("path", "asked", "prompt"),
    [
        (TEXT, {"prompt": "Once \u00fcpon"}, "Once \u00fcpon"),
        (CHAT, {"messages": HI}, HI),
        (
            CHAT,
            {
                "messages": [
                    {"role": "developer", "content": "Be brief.", "name": "Eve"},
                    {
                        "role": "user",
                        "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
                    },
                    {"role": "assistant", "content": None},
                    {"role": "user"},
                ]
            },
            [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "ab"},
                {"role": "assistant", "content": ""},
                {"role": "user", "content": ""},
            ],
        ),
    ],
    ids=["text", "chat", "parts and roles"],
)
def test_the_tokenizer_of_the_served_model_encodes_and_no_worker_is_asked(
    path: str, asked: dict[str, Any], prompt: object
) -> None:
    words = Words()
    it = Asked(words, path=path, **asked)
    with it.dialogue as story:
        assert encoded(story, words) == prompt
        assert prefilled(story.gets(Encoded(IDS))) == IDS
    (attempt,) = it.x.tries
    assert attempt.transfer is not None
    assert (attempt.transfer.tokens, attempt.transfer.tokenize_at) == (2, 10.0)
    assert (it.x.after, it.leases) == ([], 0)


@pytest.mark.parametrize(
    "failed", [FAILED, Lost(Why.TIMED_OUT, "too long"), Encoded([])], ids=["fails", "late", "empty"]
)
def test_what_the_tokenizer_cannot_say_the_worker_is_asked(failed: Lost | Encoded) -> None:
    words = Words()
    with Asked(words, messages=HI).dialogue as story:
        encoded(story, words)
        story.gets(failed).expects_call("tokenize", "p")
        assert prefilled(story.gets(answer(200, b'{"ids":[7,8]}'))) == [7, 8]


def test_messages_that_no_template_takes_are_refused_in_the_words_of_the_worker() -> None:
    with Asked(Words(), messages=HI).dialogue as story:
        story.gets(FAILED).expects_call("tokenize", "p")
        story.gets(answer(400, b'{"error":{}}')).relays_to_the_end(400)


@pytest.mark.parametrize(
    ("tokenizer", "tokenized", "asked"),
    [
        (None, "served", {"messages": HI}),
        (Words(), "m", {"messages": HI}),
        (Words(chats=False), "served", {"messages": HI}),
    ],
    ids=["no tokenizer", "of the public id", "no template"],
)
def test_without_a_tokenizer_for_it_the_worker_is_asked_at_once(
    tokenizer: Words | None, tokenized: str, asked: dict[str, Any]
) -> None:
    with Asked(tokenizer, tokenized=tokenized, **asked).dialogue as story:
        story.expects_call("tokenize", "p")
        assert prefilled(story.gets(answer(200, b'{"ids":[7]}'))) == [7]


def test_a_text_needs_no_template() -> None:
    words = Words(chats=False)
    with Asked(words, path=TEXT, prompt="Once").dialogue as story:
        assert encoded(story, words) == "Once"
        assert prefilled(story.gets(Encoded(IDS))) == IDS


def test_a_prompt_of_tokens_is_not_encoded() -> None:
    with Asked(Words(), path=TEXT, prompt=[9, 9, 9]).dialogue as story:
        assert prefilled(story) == [9, 9, 9]


def test_a_prompt_too_short_for_a_hand_off_goes_to_the_decode_worker_without_one() -> None:
    words = Words()
    with Asked(words, path=TEXT, prompt="Once upon a time", shortest=3).dialogue as story:
        encoded(story, words)
        story.gets(Encoded(IDS)).expects_send("d")
        assert isinstance(story.command, Send)
        assert b"kv-handle" not in story.command.headers
        story.gets(answer(200)).relays_to_the_end()


def test_a_client_that_leaves_while_its_prompt_is_encoded_leaves_nothing_behind() -> None:
    it = Asked(Words(), messages=HI)
    with it.dialogue as story:
        story.throws(ClientGone()).raises(ClientGone)
    assert (it.x.after, it.leases) == ([], 0)
