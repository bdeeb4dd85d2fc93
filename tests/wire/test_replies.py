"""The gateway's own answers, to the byte."""

import json
from email.parser import BytesHeaderParser

import pytest

from pointsman.domain.worker import ServedModel
from pointsman.errors import (
    BadRequest,
    BodyTooLarge,
    GatewayError,
    InsufficientScope,
    InternalError,
    InvalidKey,
    ModelNotFound,
    NoCapacity,
    UpstreamTimeout,
)
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
    line, headers, body = read(
        models_reply([ServedModel("smol"), ServedModel("a")], b"x-request-id: r\r\n")
    )
    assert (line, headers["x-request-id"]) == (b"HTTP/1.1 200 OK", "r")
    assert body == {"object": "list", "data": [SMOL, SMOL | {"id": "a"}]}
    assert read(models_reply([]))[2] == {"object": "list", "data": []}


def test_one_model() -> None:
    models = [ServedModel("a"), ServedModel("smol")]
    assert read(model_reply("smol", models))[2] == SMOL
    with pytest.raises(ModelNotFound, match="`b` does not exist"):
        model_reply("b", models)


def test_h18_what_is_known_of_a_model_is_said() -> None:
    adapter = ServedModel("fr", parent="smol", max_model_len=2048)
    told = SMOL | {"id": "fr", "max_model_len": 2048, "root": "smol", "parent": "smol"}
    assert read(model_reply("fr", [adapter]))[2] == told


def test_clients_of_the_messages_api_read_the_same_list() -> None:
    page = read(models_reply([ServedModel("a"), ServedModel("b")], messages=True))[2]
    assert isinstance(page, dict)
    assert (page["has_more"], page["first_id"], page["last_id"]) == (False, "a", "b")
    assert page["data"][0] == SMOL | {
        "id": "a",
        "type": "model",
        "display_name": "a",
        "created_at": "1970-01-01T00:00:00Z",
    }
    empty = read(models_reply([], messages=True))[2]
    assert empty == {
        "object": "list",
        "data": [],
        "has_more": False,
        "first_id": None,
        "last_id": None,
    }


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (BadRequest("x"), "invalid_request_error"),
        (InvalidKey(), "authentication_error"),
        (InsufficientScope("x"), "permission_error"),
        (ModelNotFound("x"), "not_found_error"),
        (BodyTooLarge("x"), "request_too_large"),
        (NoCapacity("x"), "overloaded_error"),
        (UpstreamTimeout("x"), "timeout_error"),
        (InternalError("x"), "api_error"),
    ],
)
def test_an_error_of_the_messages_api_has_its_type_and_our_keys(
    error: GatewayError, kind: str
) -> None:
    told = json.loads(error_body(error, messages=True))
    assert told == {
        "type": "error",
        "error": {
            "type": kind,
            "message": error.message,
            "param": error.param,
            "code": error.code,
        },
    }
