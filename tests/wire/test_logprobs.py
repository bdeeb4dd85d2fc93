"""Logprobs asked for, taken out, and collected from streams."""

import json
import math

import pytest

from pointsman.domain.scores import Tokens
from pointsman.wire.body import with_fields
from pointsman.wire.logprobs import (
    StreamTokens,
    asked,
    forced,
    text_of,
    usage_of,
    without_logprobs,
)

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"


class TestAsked:
    @pytest.mark.parametrize(
        ("wish", "chat", "plain"),
        [
            (b"{}", False, False),
            (b'{"logprobs":null}', False, False),
            (b'{"logprobs":false}', False, False),
            (b'{"logprobs":true}', True, True),
            (b'{"logprobs":0}', False, True),
            (b'{"logprobs" : 5 }', False, True),
            (b'{"top_logprobs":5}', False, False),
            (b'{"options":{"logprobs":true}}', False, False),
            (b'{"logpro\\u0062s":true,"x":"\\ud83d"}', True, True),
        ],
    )
    def test_what_a_client_says(self, wish: bytes, chat: bool, plain: bool) -> None:
        assert asked(CHAT, wish) is chat
        assert asked(PLAIN, wish) is plain


class TestForced:
    @pytest.mark.parametrize(
        ("wish", "alone", "with_margins"),
        [
            (b"{}", b"1", b"2"),
            (b'{"logprobs":null}', b"1", b"2"),
            (b'{"logprobs":false}', b"1", b"2"),
            (b'{"logprobs":0}', b"1", b"2"),
            (b'{"logprobs":1}', b"1", b"2"),
            (b'{"logprobs":2}', b"2", b"2"),
            (b'{"logprobs":5}', b"5", b"5"),
            (b'{"logprobs":-5}', b"1", b"2"),
            (b'{"logprobs":5.5}', b"1", b"2"),
            (b'{"logprobs":"5"}', b"1", b"2"),
            (b'{"logprobs":' + b"9" * 5000 + b"}", b"1", b"2"),
        ],
    )
    def test_a_plain_completion(self, wish: bytes, alone: bytes, with_margins: bytes) -> None:
        assert forced(PLAIN, wish, margins=False) == {"logprobs": alone}
        assert forced(PLAIN, wish, margins=True) == {"logprobs": with_margins}

    @pytest.mark.parametrize(
        ("wish", "top"),
        [
            (b"{}", b"2"),
            (b'{"logprobs":false,"top_logprobs":null}', b"2"),
            (b'{"logprobs":true,"top_logprobs":1}', b"2"),
            (b'{"logprobs":true,"top_logprobs":20}', b"20"),
        ],
    )
    def test_a_chat(self, wish: bytes, top: bytes) -> None:
        # Without margins the client's own number stays, whatever it is.
        assert forced(CHAT, wish, margins=False) == {"logprobs": b"true"}
        assert forced(CHAT, wish, margins=True) == {"logprobs": b"true", "top_logprobs": top}

    def test_every_path_but_the_one_of_plain_completions_is_a_chat(self) -> None:
        assert forced("/v1/completions/", b"{}", margins=False) == {"logprobs": b"true"}

    def test_they_go_into_a_body_that_says_otherwise_twice(self) -> None:
        body = b'{"logprobs":null, "model":"m", "logprobs":false}'
        members = forced(CHAT, body, margins=False)
        assert with_fields(body, members) == b'{"logprobs":true, "model":"m", "logprobs":true}'


def both(inner: bytes) -> bytes:
    return b'{"id":1.0,"choices":[' + inner + b'],"usage":{"x":1E5}}'


class TestWithoutLogprobs:
    @pytest.mark.parametrize(
        ("before", "after"),
        [
            (both(b'{"logprobs":{"content":[]}}'), both(b'{"logprobs":null}')),
            (both(b'{ "logprobs" : 7 , "index":0}'), both(b'{ "logprobs" : null , "index":0}')),
            (
                both(b'{"logprobs":[1],"text":"}],"}, {"logprobs":"]"}'),
                both(b'{"logprobs":null,"text":"}],"}, {"logprobs":null}'),
            ),
            # However often and however the keys are written.
            (
                both(b'{"logprobs":1,"\\u006cogprobs":2}'),
                both(b'{"logprobs":null,"\\u006cogprobs":null}'),
            ),
            (b'{"\\u0063hoices":[{"logprobs":1}]}', b'{"\\u0063hoices":[{"logprobs":null}]}'),
            (
                b'{"choices":[{"logprobs":1}],"choices":[{"logprobs":2}]}',
                b'{"choices":[{"logprobs":null}],"choices":[{"logprobs":null}]}',
            ),
            (
                b' {"choices" :\n[ {"logprobs":1} ] } \n',
                b' {"choices" :\n[ {"logprobs":null} ] } \n',
            ),
            # A half of a surrogate pair beside it.
            (both(b'{"text":"\\ud83d","logprobs":1}'), both(b'{"text":"\\ud83d","logprobs":null}')),
        ],
    )
    def test_those_of_every_choice_become_null(self, before: bytes, after: bytes) -> None:
        assert without_logprobs(before) == after
        assert without_logprobs(after) == after

    @pytest.mark.parametrize(
        "body",
        [
            b"",
            b"[DONE]",
            b"{",
            b"\xff",
            b'"logprobs"',
            b'[{"choices":[{"logprobs":1}]}]',
            b'{"choices":[{"logprobs":1}}',
            b'{"choices":[{"logprobs":1}]} x',
            b'{"logprobs":1,"choices":[]}',
            b'{"choices":{"logprobs":1}}',
            b'{"choices":null,"logprobs":1}',
            b'{"choices":[null,7,"logprobs",["logprobs"],[{"logprobs":1}]]}',
            b'{"choices":[{"message":{"logprobs":1}}]}',
            b'{"choices":[{"text":"\\"logprobs\\":1"}]}',
            b'{"x":{"choices":[{"logprobs":1}]}}',
            b'{"choices":[{"text":"logprobs"}]}',
            b'{"choices":[{"logprobs":' + b"[" * 100_000 + b"]" * 100_000 + b"}]}",
        ],
    )
    def test_others_stay_and_so_does_what_cannot_be_read(self, body: bytes) -> None:
        assert without_logprobs(body) == body


def event(*choices: dict[str, object], **fields: object) -> bytes:
    return b"data: " + json.dumps({"choices": choices, **fields}).encode() + b"\n\n"


def part(*logprobs: float, **fields: object) -> dict[str, object]:
    """Return a choice of a chat's event, each token's runner-up 1 below it."""
    content = [
        {"token": "a", "logprob": p, "top_logprobs": [{"logprob": p}, {"logprob": p - 1}]}
        for p in logprobs
    ]
    return {"index": 0, "delta": {"content": "a"}, "logprobs": {"content": content}, **fields}


def fed(*events: bytes) -> StreamTokens:
    stream = StreamTokens()
    for piece in events:
        stream.feed(piece)
    return stream


class TestStreamTokens:
    def test_the_parts_of_a_chat_add_up(self) -> None:
        stream = fed(
            b": ping\n\n",
            event({"index": 0, "delta": {"role": "assistant", "content": ""}}),
            event(part(-0.5)),
            event(part(-0.25, -0.75)),
            event({"index": 0, "delta": {"content": "b"}, "logprobs": None, "finish_reason": None}),
        )
        assert stream.tokens == Tokens((-0.5, -0.25, -0.75), (1.0, 1.0, 1.0))
        assert stream.count == 3
        assert not stream.ended

    def test_the_parts_of_a_plain_completion_add_up(self) -> None:
        first = {"token_logprobs": [-0.5], "top_logprobs": [{"a": -0.5, "b": -2.0}]}
        stream = fed(
            event({"text": "a", "logprobs": first}),
            event({"text": "b", "logprobs": {"token_logprobs": [-1.0], "top_logprobs": None}}),
            event({"text": "c", "logprobs": {"token_logprobs": [None]}}),
        )
        assert stream.tokens.logprobs == pytest.approx((-0.5, -1.0, math.nan), nan_ok=True)
        assert stream.tokens.margins == pytest.approx((1.5, math.nan, math.nan), nan_ok=True)

    @pytest.mark.parametrize(
        "end", [event({"index": 0, "delta": {}, "finish_reason": "stop"}), b"data: [DONE]\n\n"]
    )
    def test_it_ends_with_a_finish_reason_or_the_last_event(self, end: bytes) -> None:
        stream = fed(event(part(-0.5)), end)
        assert stream.ended
        assert stream.count == 1
        stream.feed(event(usage={"completion_tokens": 1}))
        assert stream.ended

    def test_the_last_token_may_come_with_the_finish_reason(self) -> None:
        stream = fed(event(part(-0.5, finish_reason="length")))
        assert (stream.count, stream.ended) == (1, True)

    def test_usage_without_choices_is_neither(self) -> None:
        stream = fed(event(usage={"completion_tokens": 1}), b'data: {"usage":{}}\n\n')
        assert (stream.count, stream.ended) == (0, False)

    def test_other_choices_are_not_of_the_answer(self) -> None:
        stream = fed(
            event(part(-0.5, index=1, finish_reason="stop"), part(-0.25)),
            event(part(-0.75, index=2)),
        )
        assert stream.tokens.logprobs == (-0.25,)
        assert not stream.ended

    @pytest.mark.parametrize(
        "broken",
        [
            b"data: {\n\n",
            b"data: [1]\n\n",
            b'data: {"error":{"message":"out of memory"}}\n\n',
            b'event: error\ndata: {"error":"x","choices":[]}\n\n',
            event({"index": 0, "logprobs": {"content": 7}}),
            event({"index": 0, "logprobs": {"content": [{}]}}),
            b"data: " + b"[" * 100_000 + b"\n\n",
        ],
    )
    def test_what_cannot_be_read_is_a_token_of_which_nothing_is_known(self, broken: bytes) -> None:
        stream = fed(event(part(-0.5)), broken)
        assert stream.count == 2
        assert math.isnan(stream.tokens.logprobs[1])
        assert math.isnan(stream.tokens.margins[1])

    @pytest.mark.parametrize(
        "quiet",
        [
            event({"index": 0, "logprobs": {}}),
            event({"index": 0, "logprobs": {"content": None, "refusal": None}}),
            event({"index": 0, "logprobs": {"content": []}}),
            event({"index": 0, "delta": {"tool_calls": [{"index": 0}]}}),
            b'data: {"choices":null,"usage":{}}\n\n',
            b"event: ping\ndata: {}\n\n",
            b"data:\n\n",
        ],
    )
    def test_what_brings_no_token_adds_none(self, quiet: bytes) -> None:
        stream = fed(event(part(-0.5)), quiet, event(part(-0.25)))
        assert stream.tokens == Tokens((-0.5, -0.25), (1.0, 1.0))
        assert not stream.ended

    @pytest.mark.parametrize("reason", [None, ""])
    def test_an_empty_finish_reason_is_none(self, reason: str | None) -> None:
        assert not fed(event(part(-0.5, finish_reason=reason))).ended

    def test_an_error_that_is_null_is_none(self) -> None:
        assert fed(event(part(-0.5), error=None)).tokens.logprobs == (-0.5,)

    def test_an_event_that_is_not_whole_yet_does_not_count(self) -> None:
        whole = event(part(-0.5))
        stream = fed(whole[:-1])
        assert stream.count == 0
        stream.feed(whole[-1:])
        assert stream.count == 1

    def test_what_was_handed_out_stays(self) -> None:
        stream = fed(event(part(-0.5)))
        tokens = stream.tokens
        stream.feed(event(part(-0.75)))
        assert tokens == Tokens((-0.5,), (1.0,))


class TestUsage:
    @pytest.mark.parametrize(
        ("body", "usage"),
        [
            (b'{"usage":{"prompt_tokens":7,"completion_tokens":2}}', (7, 2)),
            (b'{"x":"\\ud83d","usage":{"prompt_tokens":7,"completion_tokens":2}}', (7, 2)),
            (b'{"usage":{"prompt_tokens":7,"total_tokens":7}}', (7, 0)),
            (b'{"usage":{"completion_tokens":7}}', None),
            (b'{"usage":null}', None),
            (b'{"usage":{"prompt_tokens":"7"}}', None),
            (b"{}", None),
            (b"", None),
            (b"\xff", None),
            (b"[" * 100_000, None),
        ],
    )
    def test_it_is_read_or_none(self, body: bytes, usage: tuple[int, int] | None) -> None:
        assert usage_of(body) == usage


class TestText:
    @pytest.mark.parametrize(
        ("body", "text"),
        [
            (both(b'{"text":"Oslo"},{"text":"Rome"}'), "Oslo"),
            (both(b'{"text":""}'), ""),
            (both(b'{"message":{"role":"assistant","content":"Oslo"}}'), "Oslo"),
            (both(b'{"message":{"content":"Oslo \\ud83d","tool_calls":[]}}'), "Oslo \ufffd"),
            (both(b'{"message":{"content":"I ask","tool_calls":[{"id":"1"}]}}'), None),
            (both(b'{"message":{"content":null,"tool_calls":[{"id":"1"}]}}'), None),
            (both(b'{"message":{"content":null,"refusal":"no"}}'), None),
            (both(b'{"message":{"content":[{"type":"text"}]}}'), None),
            (both(b'{"text":null}'), None),
            (both(b"{}"), None),
            (both(b""), None),
            (b'{"error":{}}', None),
            (b"", None),
            (b"[" * 100_000, None),
        ],
    )
    def test_it_is_what_the_first_choice_says(self, body: bytes, text: str | None) -> None:
        assert text_of(body) == text
