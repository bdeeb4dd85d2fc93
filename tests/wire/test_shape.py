"""What the client gets where it cannot get the engine's bytes as they came."""

import msgspec
import pytest

from pointsman.wire.framing import LAST_CHUNK, chunk, payload
from pointsman.wire.logprobs import without_logprobs
from pointsman.wire.shape import (
    Chunked,
    Edited,
    Unchunked,
    edited_json,
    public_json,
)

PUBLIC = b'"smol"'


def public_model(model: bytes, *, chunked_in: bool, chunked_out: bool) -> Edited:
    """Return what writes a model id into every event that names one."""
    return Edited(
        [lambda body: public_json(body, model)], chunked_in=chunked_in, chunked_out=chunked_out
    )


def shaped(stream: bytes, *, step: int | None = None) -> bytes:
    """Return a stream of events as the client gets it, fed in pieces of `step` bytes."""
    shape = public_model(PUBLIC, chunked_in=False, chunked_out=False)
    step = step or len(stream)
    pieces = (stream[at : at + step] for at in range(0, len(stream), step))
    return b"".join([shape.feed(piece) for piece in pieces]) + shape.end()


class TestUnchunked:
    def test_http_1_0_gets_the_payload(self) -> None:
        shape = Unchunked()
        assert (
            shape.feed(chunk(b"data: a\n\n") + chunk(b"data: b\n\n")) == b"data: a\n\ndata: b\n\n"
        )
        assert shape.feed(LAST_CHUNK) == b""
        assert shape.end() == b""


class TestChunked:
    def test_a_body_until_close_is_chunked(self) -> None:
        shape = Chunked()
        assert shape.feed(b"abc") == b"3\r\nabc\r\n"
        assert shape.end() == b"0\r\n\r\n"

    def test_nothing_does_not_end_it(self) -> None:
        assert Chunked().feed(b"") == b""


ANSWERS = {
    "chat": (
        b'{"id":"1","model":"v2","choices":[{"message":{"content":"v2 \\"model\\":\\"v2\\""}}]}',
        b'{"id":"1","model":"smol","choices":[{"message":{"content":"v2 \\"model\\":\\"v2\\""}}]}',
    ),
    "completion": (
        b'{ "model" : "v2" , "choices":[{"text":"v2"}] }',
        b'{ "model" : "smol" , "choices":[{"text":"v2"}] }',
    ),
    "embeddings": (
        b'{"object":"list","data":[{"embedding":[1.0,-0]}],"model":"v2"}\n',
        b'{"object":"list","data":[{"embedding":[1.0,-0]}],"model":"smol"}\n',
    ),
    "responses": (
        b'{"type":"response.created","response":{"model":"v2","tools":[{"model":"v2"}]}}',
        b'{"type":"response.created","response":{"model":"smol","tools":[{"model":"v2"}]}}',
    ),
    "messages": (
        b'{"type":"message_start","message":{"role":"assistant","model":"v2","content":[]}}',
        b'{"type":"message_start","message":{"role":"assistant","model":"smol","content":[]}}',
    ),
    "all places": (
        b'{"model":"v2","message":{"model":"v2"},"response":{"x":1,"model":"v2"}}',
        b'{"model":"smol","message":{"model":"smol"},"response":{"x":1,"model":"smol"}}',
    ),
    "half of a pair beside a nested one": (
        b'{"response":{"model":"v2","text":"\\ud83d"}}',
        b'{"response":{"model":"smol","text":"\\ud83d"}}',
    ),
    "half of a pair": (
        b'{"model":"v2","choices":[{"delta":{"content":"\\ud83d"}}]}',
        b'{"model":"smol","choices":[{"delta":{"content":"\\ud83d"}}]}',
    ),
}

UNTOUCHED = [
    b'{"id":1,"x":"v2"}',
    b'{"choices":[{"model":"v2"}]}',
    b'{"data":{"model":"v2"}}',
    b'{"response":{"response":{"model":"v2"}}}',
    b'{"message":"model"}',
    b'{"message":null,"response":[{"model":"v2"}]}',
    b'{"model":null}',
    b'{"model":{"id":"v2"}}',
    b'{"error":{"message":"the model v2 is gone"}}',
    b'[{"model":"v2"}]',
    b'"model"',
    b'{"model":"v2"',
    b'{"model":"v2","x":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    b"<html>model v2</html>",
    b"",
]


class TestPublicJson:
    @pytest.mark.parametrize(("body", "public"), ANSWERS.values(), ids=ANSWERS)
    def test_h03_the_model_of_an_answer_and_nothing_else(self, body: bytes, public: bytes) -> None:
        assert public_json(body, PUBLIC) == public

    @pytest.mark.parametrize("body", UNTOUCHED, ids=lambda body: body[:40].decode())
    def test_h03_an_answer_without_one_is_untouched(self, body: bytes) -> None:
        assert public_json(body, PUBLIC) == body


class TestPublicEvents:
    STREAM = b"".join(
        b"data: %b\n\n" % body.strip()
        for body, _ in [*ANSWERS.values(), *((b, b) for b in UNTOUCHED)]
    )
    PUBLIC_STREAM = b"".join(
        b"data: %b\n\n" % body.strip()
        for _, body in [*ANSWERS.values(), *((b, b) for b in UNTOUCHED)]
    )
    SMALL = (
        b': {"model":"v2"}\r\nevent: x\r\nid: {"model":"v2"}\r\ndata:{"model":"v2","t":"\xe5\x8c\x97"}\r\n\r\n'
        b': ping\n\ndata: {"id":1,\ndata: "model":\ndata:   "v2"}\n\ndata: {"x":1}\n\ndata: [DONE]\n\n'
    )
    PUBLIC_SMALL = (
        b': {"model":"v2"}\r\nevent: x\r\nid: {"model":"v2"}\r\ndata:{"model":"smol","t":"\xe5\x8c\x97"}\r\n\r\n'
        b': ping\n\ndata: {"id":1,\ndata: "model":\ndata:   "smol"}\n\ndata: {"x":1}\n\ndata: [DONE]\n\n'
    )

    @pytest.mark.parametrize("step", [None, 4096])
    def test_h03_every_event(self, step: int | None) -> None:
        assert shaped(self.STREAM, step=step) == self.PUBLIC_STREAM

    def test_h03_split_anywhere(self) -> None:
        for at in range(len(self.SMALL) + 1):
            shape = public_model(PUBLIC, chunked_in=False, chunked_out=False)
            out = shape.feed(self.SMALL[:at]) + shape.feed(self.SMALL[at:]) + shape.end()
            assert out == self.PUBLIC_SMALL

    def test_h03_byte_by_byte(self) -> None:
        assert shaped(self.SMALL, step=1) == self.PUBLIC_SMALL

    def test_an_event_that_was_never_ended_comes_at_the_end(self) -> None:
        shape = public_model(PUBLIC, chunked_in=False, chunked_out=False)
        assert shape.feed(b'data: {"model":"v2"}\n') == b""
        assert shape.end() == b'data: {"model":"smol"}\n'
        assert shaped(b"data: half") == b"data: half"

    def test_lines_that_an_edit_leaves_out_are_empty(self) -> None:
        event = b'data: {"model":{\ndata:},"model":"v2"}\n\n'
        assert shaped(event) == b'data: {"model":"smol","model":"smol"}\ndata:\n\n'

    @pytest.mark.parametrize("chunked_in", [True, False])
    @pytest.mark.parametrize("chunked_out", [True, False])
    def test_h03_in_every_framing(self, chunked_in: bool, chunked_out: bool) -> None:
        shape = public_model(PUBLIC, chunked_in=chunked_in, chunked_out=chunked_out)
        out = []
        for at in range(0, len(self.SMALL), 7):
            piece = self.SMALL[at : at + 7]
            out.append(shape.feed(chunk(piece) if chunked_in else piece))
        out.append(shape.feed(LAST_CHUNK) if chunked_in else b"")
        out.append(shape.end())
        got = b"".join(out)
        if chunked_out:
            assert got.endswith(LAST_CHUNK)
            assert got.count(LAST_CHUNK) == 1
            got = payload(got)
        assert got == self.PUBLIC_SMALL

    def test_the_public_id_is_escaped_as_json(self) -> None:
        shape = public_model(msgspec.json.encode('a"b'), chunked_in=False, chunked_out=False)
        assert shape.feed(b'data: {"model":"v2"}\n\n') == b'data: {"model":"a\\"b"}\n\n'


class TestEdited:
    EVENT = b'data: {"model":"v2","choices":[{"text":"a","logprobs":{"content":[]}}]}\n\n'
    BOTH = b'data: {"model":"smol","choices":[{"text":"a","logprobs":null}]}\n\n'

    def test_all_edits_in_their_order(self) -> None:
        assert edited_json(b"x", []) == b"x"
        assert edited_json(b"x", [lambda body: body + b"1", lambda body: body + b"2"]) == b"x12"

    def test_two_edits_of_one_stream(self) -> None:
        edits = (lambda body: public_json(body, PUBLIC), without_logprobs)
        for at in range(len(self.EVENT) + 1):
            shape = Edited(edits, chunked_in=False, chunked_out=True)
            pieces = (self.EVENT[:at], self.EVENT[at:], b": ping\n\ndata: [DONE]\n\n")
            out = b"".join([shape.feed(piece) for piece in pieces]) + shape.end()
            assert payload(out) == self.BOTH + b": ping\n\ndata: [DONE]\n\n"

    def test_logprobs_over_several_lines_do_not_get_through(self) -> None:
        shape = Edited([without_logprobs], chunked_in=False, chunked_out=False)
        event = (
            b'id: 1\r\ndata: {"choices":[{"logprobs":{\r\ndata: "content":[]\r\ndata: }}]}\r\n\r\n'
        )
        assert shape.feed(event) == (
            b'id: 1\r\ndata: {"choices":[{"logprobs":null}]}\r\ndata: \r\ndata: \r\n\r\n'
        )

    def test_an_edit_that_adds_lines_is_not_made(self) -> None:
        shape = Edited([lambda body: body + b"\n"], chunked_in=False, chunked_out=False)
        assert shape.feed(b"data: 1\n\n") == b"data: 1\n\n"
