"""What the engine says instead of an answer: errors in the OpenAI shape, each kind made in one place."""

import msgspec
from starlette.responses import Response

from pointsman.engine import scheduler as sched

__all__ = [
    "EngineError",
    "bad",
    "failure",
    "json_response",
    "no_capacity",
    "overloaded",
    "unknown_handle",
]


class EngineError(Exception):
    """An answer that is an error, in the OpenAI shape."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": type, "param": param, "code": code}}
        self.retry_after = retry_after

    def response(self) -> Response:
        """The whole HTTP answer."""
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return json_response(self.body, self.status, headers)


def bad(message: str, param: str | None, code: str | None = None) -> EngineError:
    """A 400; `param` names the field."""
    return EngineError(400, message, param=param, code=code)


def overloaded(message: str) -> EngineError:
    """A 429: too many wait, or this one waited too long."""
    return EngineError(429, message, type="rate_limit_error", code="queue_full", retry_after=1)


def no_capacity(message: str) -> EngineError:
    """A 503: the worker is leaving."""
    return EngineError(503, message, type="server_error", code="no_capacity", retry_after=1)


def unknown_handle() -> EngineError:
    """A 404: never pushed here, or claimed, released or expired."""
    return EngineError(404, "the KV handle is not known here", code="kv_handle_not_found")


def json_response(
    value: object, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """`value` as a JSON answer."""
    return Response(msgspec.json.encode(value), status, headers, "application/json")


def failure(event: sched.Failed) -> EngineError:
    """What a client is told of a generation that failed."""
    if event.reason == "overloaded":
        return overloaded(event.message)
    if event.reason == "draining":
        return no_capacity(event.message)
    if event.reason == "cancelled":
        return EngineError(499, event.message, code="request_cancelled")
    return EngineError(500, event.message, type="server_error", code="internal_error")
