"""The gateway's own answers, to the byte."""

import json
from email.parser import BytesHeaderParser

import pytest

from pointsman.errors import BadRequest, GatewayError, ModelNotFound, NoCapacity
from pointsman.wire.replies import (
    error_body,
    error_reply,
    json_reply,
    model_reply,
    models_reply,
)

SMOL = {"id": "smol", "object": "model", "created": 0, "owned_by": "tinyllm"}


def read(reply: bytes) -> tuple[bytes, dict[str, str], object]:
    """Return the status line, the headers and the JSON of a whole response."""
    head, _, body = reply.partition(b"\r\n\r\n")
    line, _, lines = head.partition(b"\r\n")
    headers = BytesHeaderParser().parsebytes(lines + b"\r\n\r\n")
    assert int(headers["content-length"]) == len(body)
    assert len(headers) == len(set(headers))
    return line, dict(headers), json.loads(body)


def test_a_json_answer_to_the_byte() -> None:
    assert json_reply(200, b"{}", b"x-request-id: r\r\n") == (
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n"
        b"x-request-id: r\r\nconnection: keep-alive\r\n\r\n{}"
    )


def test_an_answer_may_close_the_connection() -> None:
    assert read(json_reply(200, b"{}", close=True))[1]["connection"] == "close"


def test_an_error_has_all_four_keys() -> None:
    assert json.loads(error_body(BadRequest("no", param="model"))) == {
        "error": {"message": "no", "type": "invalid_request_error", "param": "model", "code": None}
    }
    assert json.loads(error_body(NoCapacity("full"))) == {
        "error": {"message": "full", "type": "server_error", "param": None, "code": "no_capacity"}
    }


def test_a_message_may_be_any_text() -> None:
    message = 'a "b"\r\n\x00\u2028 北 \U0001f600'
    assert json.loads(error_body(BadRequest(message)))["error"]["message"] == message


def test_an_error_that_passes_says_when_to_come_back() -> None:
    line, headers, _ = read(error_reply(NoCapacity("full"), b"x-request-id: r\r\n", close=True))
    assert line == b"HTTP/1.1 503 Service Unavailable"
    assert headers == {
        "content-type": "application/json",
        "content-length": headers["content-length"],
        "x-request-id": "r",
        "retry-after": "1",
        "connection": "close",
    }


def test_other_errors_do_not() -> None:
    assert "retry-after" not in read(error_reply(GatewayError("oh")))[1]


def test_models_are_listed_in_the_order_given() -> None:
    line, headers, body = read(models_reply(["smol", "a"], b"x-request-id: r\r\n"))
    assert (line, headers["x-request-id"]) == (b"HTTP/1.1 200 OK", "r")
    assert body == {"object": "list", "data": [SMOL, SMOL | {"id": "a"}]}
    assert read(models_reply([]))[2] == {"object": "list", "data": []}


def test_one_model() -> None:
    assert read(model_reply("smol", ["a", "smol"]))[2] == SMOL
    with pytest.raises(ModelNotFound, match="`b` does not exist"):
        model_reply("b", ["a", "smol"])
