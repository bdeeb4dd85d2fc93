"""The gateway's own answers, as whole HTTP/1.1 responses in bytes."""

from collections.abc import Sequence

import msgspec

from pointsman.domain.worker import ServedModel
from pointsman.errors import GatewayError, ModelNotFound
from pointsman.wire.http1 import status_line

__all__ = ["error_body", "error_reply", "json_reply", "model_reply", "models_reply"]

MESSAGES_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""What the Messages API calls an error of a status; any other is an `api_error`."""

EPOCH = "1970-01-01T00:00:00Z"
"""When a model was made, which no engine says: 0, as in `created`."""


def error_body(error: GatewayError, *, messages: bool = False) -> bytes:
    """Return OpenAI's error object, all four keys present; for the Messages API, its own around the same keys.

    >>> error_body(ModelNotFound("no model `x`"))
    b'{"error":{"message":"no model `x`","type":"invalid_request_error","param":"model","code":"model_not_found"}}'
    >>> error_body(ModelNotFound("no"), messages=True)
    b'{"type":"error","error":{"message":"no","type":"not_found_error","param":"model","code":"model_not_found"}}'
    """
    told = {
        "message": error.message,
        "type": MESSAGES_TYPES.get(error.status, "api_error") if messages else error.type,
        "param": error.param,
        "code": error.code,
    }
    return msgspec.json.encode({"type": "error", "error": told} if messages else {"error": told})


def json_reply(status: int, body: bytes, headers: bytes = b"", *, close: bool = False) -> bytes:
    """Return a whole JSON response; `headers` are further whole lines."""
    return (
        b"%bcontent-type: application/json\r\ncontent-length: %d\r\n%bconnection: %b\r\n\r\n%b"
        % (
            status_line(status),
            len(body),
            headers,
            b"close" if close else b"keep-alive",
            body,
        )
    )


def error_reply(
    error: GatewayError, headers: bytes = b"", *, close: bool = False, messages: bool = False
) -> bytes:
    """Return the whole response for an error, with Retry-After where the error has one."""
    if error.retry_after is not None:
        headers += b"retry-after: %d\r\n" % error.retry_after
    return json_reply(error.status, error_body(error, messages=messages), headers, close=close)


def models_reply(
    models: Sequence[ServedModel],
    headers: bytes = b"",
    *,
    close: bool = False,
    messages: bool = False,
) -> bytes:
    """Return the answer to GET /v1/models, in the order given; with `messages`, clients of that API can read it too."""
    listed: dict[str, object] = {
        "object": "list",
        "data": [_model(model, messages=messages) for model in models],
    }
    if messages:
        listed["has_more"] = False
        listed["first_id"] = models[0].id if models else None
        listed["last_id"] = models[-1].id if models else None
    return json_reply(200, msgspec.json.encode(listed), headers, close=close)


def model_reply(
    name: str,
    models: Sequence[ServedModel],
    headers: bytes = b"",
    *,
    close: bool = False,
    messages: bool = False,
) -> bytes:
    """Return the answer to GET /v1/models/{id}. Raises ModelNotFound for an id that is not among `models`."""
    model = next((each for each in models if each.id == name), None)
    if model is None:
        raise ModelNotFound(f"the model `{name}` does not exist")
    body = msgspec.json.encode(_model(model, messages=messages))
    return json_reply(200, body, headers, close=close)


def _model(model: ServedModel, *, messages: bool) -> dict[str, object]:
    told: dict[str, object] = {
        "id": model.id,
        "object": "model",
        "created": 0,
        "owned_by": "tinyllm",
    }
    if model.max_model_len:
        told["max_model_len"] = model.max_model_len
    if model.parent:
        told["root"] = told["parent"] = model.parent
    if messages:
        told |= {"type": "model", "display_name": model.id, "created_at": EPOCH}
    return told
