"""A prompt that is told in tokens before its request is routed, as a dialogue."""

from collections.abc import Sequence

import pytest

from pointsman.domain.blocks import block_hashes, pack_tokens, root_of
from pointsman.domain.request import InferenceRequest
from pointsman.errors import NoCapacity
from pointsman.flow.effects import ClientGone, Encode, Encoded, Flow, Lost, PromptText, Why
from pointsman.flow.exchange import Exchange
from pointsman.flow.tokenized import tokenized

IDS = list(range(10))


class Fixed:
    chats = True

    def encode(self, prompt: PromptText) -> list[int]:
        raise AssertionError("the driver lets it work, and nobody else")


def exchange() -> Exchange:
    request = InferenceRequest("m", "r1", prompt=b'"Once upon a time"', block_bytes=8)
    return Exchange(request, "/v1/completions", "text_completion", 0.0)


def story(seen: list[Sequence[int]], x: Exchange) -> Flow:
    seen.append(x.request.blocks)
    raise NoCapacity("nobody is there")
    yield


def told(outcome: Encoded | Lost, adapter: str = "") -> tuple[Exchange, Sequence[int]]:
    x, seen = exchange(), list[Sequence[int]]()
    flow = tokenized(x, story(seen, x), Fixed(), "Once upon a time", 4, adapter)
    command = next(flow)
    assert isinstance(command, Encode)
    assert command.prompt == "Once upon a time"
    with pytest.raises(NoCapacity):
        flow.send(outcome)
    (blocks,) = seen
    return x, blocks


def test_the_blocks_of_the_story_are_those_of_the_tokens() -> None:
    x, blocks = told(Encoded(IDS))
    assert blocks == block_hashes(pack_tokens(IDS), 16)
    assert (x.request.block_tokens, x.request.prompt_tokens) == (4, 10)
    assert told(Encoded(IDS), "sql")[1] == block_hashes(pack_tokens(IDS), 16, parent=root_of("sql"))


@pytest.mark.parametrize("outcome", [Lost(Why.TOKENIZE), Lost(Why.TIMED_OUT), Encoded([])])
def test_what_cannot_be_tokenized_is_compared_as_bytes(outcome: Encoded | Lost) -> None:
    assert told(outcome)[1] == block_hashes(b"Once upon a time", 8)


def test_a_client_that_leaves_meanwhile_is_sent_to_nobody() -> None:
    x, seen = exchange(), list[Sequence[int]]()
    flow = tokenized(x, story(seen, x), Fixed(), "Once upon a time", 4)
    next(flow)
    with pytest.raises(ClientGone):
        flow.throw(ClientGone())
    assert seen == []
