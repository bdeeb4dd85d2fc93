"""The gateway's own answers, as whole HTTP/1.1 responses in bytes."""

from collections.abc import Iterable

import msgspec

from pointsman.errors import GatewayError, ModelNotFound
from pointsman.wire.http1 import status_line

__all__ = ["error_body", "error_reply", "json_reply", "model_reply", "models_reply"]


def error_body(error: GatewayError) -> bytes:
    """Return OpenAI's error object, all four keys present.

    >>> error_body(ModelNotFound("no model `x`"))
    b'{"error":{"message":"no model `x`","type":"invalid_request_error","param":"model","code":"model_not_found"}}'
    """
    return msgspec.json.encode(
        {
            "error": {
                "message": error.message,
                "type": error.type,
                "param": error.param,
                "code": error.code,
            }
        }
    )


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


def error_reply(error: GatewayError, headers: bytes = b"", *, close: bool = False) -> bytes:
    """Return the whole response for an error, with Retry-After where the error has one."""
    if error.retry_after is not None:
        headers += b"retry-after: %d\r\n" % error.retry_after
    return json_reply(error.status, error_body(error), headers, close=close)


def models_reply(models: Iterable[str], headers: bytes = b"", *, close: bool = False) -> bytes:
    """Return the answer to GET /v1/models, in the order given."""
    data = [_model(model) for model in models]
    body = msgspec.json.encode({"object": "list", "data": data})
    return json_reply(200, body, headers, close=close)


def model_reply(
    model: str, models: Iterable[str], headers: bytes = b"", *, close: bool = False
) -> bytes:
    """Return the answer to GET /v1/models/{id}. Raises ModelNotFound for an id that is not among `models`."""
    if model not in models:
        raise ModelNotFound(f"the model `{model}` does not exist")
    return json_reply(200, msgspec.json.encode(_model(model)), headers, close=close)


def _model(model: str) -> dict[str, str | int]:
    return {"id": model, "object": "model", "created": 0, "owned_by": "tinyllm"}
