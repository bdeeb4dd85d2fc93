"""What the gateway can tell a client, as one tree of exceptions.

GatewayError
├── BadRequest              400
│   ├── BadRule             400  an accept_if that does not parse
│   └── InvalidRoutes       400  a route table that breaks a rule, `param` names it
├── InvalidKey              401  invalid_api_key
├── InsufficientScope       403  insufficient_scope
├── ModelNotFound           404  model_not_found
├── UnsupportedEndpoint     404  unsupported_endpoint
├── NotFound                404  not_found
├── MethodNotAllowed        405
├── RequestTimeout          408  the client was too slow to send its request
├── Conflict                409  conflict
├── EtagMismatch            412  etag_mismatch
├── BodyTooLarge            413
├── IfMatchRequired         428  if_match_required
├── HeadTooLarge            431
├── InternalError           500  internal_error
├── StateUnavailable        503  state_unavailable
├── NoCapacity              503  no_capacity
└── UpstreamTimeout         504  upstream_timeout

Only *answers to the client* are exceptions. The failure of one attempt is a value (`pointsman.flow.effects.Lost`).
The JSON that a client sees is made by `pointsman.wire.replies.error_reply`, from the attributes below alone.
"""

__all__ = [
    "BadRequest",
    "BadRule",
    "BodyTooLarge",
    "Conflict",
    "EtagMismatch",
    "GatewayError",
    "HeadTooLarge",
    "IfMatchRequired",
    "InsufficientScope",
    "InternalError",
    "InvalidKey",
    "InvalidRoutes",
    "MethodNotAllowed",
    "ModelNotFound",
    "NoCapacity",
    "NotFound",
    "RequestTimeout",
    "StateUnavailable",
    "UnsupportedEndpoint",
    "UpstreamTimeout",
]


class GatewayError(Exception):
    """An answer that is an error: `status` and the four keys of OpenAI's error object.

    `retry_after` is whole seconds for the header of that name, None for no header.
    """

    status = 500
    type = "server_error"
    code: str | None = None
    param: str | None = None
    retry_after: int | None = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        if param is not None:
            self.param = param


class BadRequest(GatewayError):
    """The request cannot be understood; sending it again will not help."""

    status = 400
    type = "invalid_request_error"


class BadRule(BadRequest):
    """An `accept_if` rule that does not follow `<metric> <op> <number>`."""

    param = "accept_if"


class InvalidRoutes(BadRequest):
    """A route table that breaks a rule; `param` names the place, such as `routes[1].backends[0].weight`."""

    param = "routes"


class InvalidKey(GatewayError):
    """No key, or none that is good; one message for all of them, so that nobody learns which it was."""

    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"

    def __init__(self) -> None:
        super().__init__("a valid API key is needed: Authorization: Bearer <key>")


class InsufficientScope(GatewayError):
    """The key is good, but not for this path or model."""

    status = 403
    type = "permission_error"
    code = "insufficient_scope"


class ModelNotFound(GatewayError):
    """No route, no live worker and no worker of the last hour has ever named this model."""

    status = 404
    type = "invalid_request_error"
    code = "model_not_found"
    param = "model"


class UnsupportedEndpoint(GatewayError):
    """There are workers for the model, and none of them has the path."""

    status = 404
    type = "invalid_request_error"
    code = "unsupported_endpoint"


class NotFound(GatewayError):
    """No such path or object."""

    status = 404
    type = "invalid_request_error"
    code = "not_found"


class MethodNotAllowed(GatewayError):
    """The path exists, but not for this method."""

    status = 405
    type = "invalid_request_error"


class RequestTimeout(GatewayError):
    """The client took too long to send its request."""

    status = 408
    type = "invalid_request_error"
    code = "request_timeout"


class Conflict(GatewayError):
    """The object is somebody else's to change."""

    status = 409
    type = "invalid_request_error"
    code = "conflict"


class EtagMismatch(GatewayError):
    """Somebody else changed the route table since it was read."""

    status = 412
    type = "invalid_request_error"
    code = "etag_mismatch"


class BodyTooLarge(GatewayError):
    """The request body is over `max_body_bytes`."""

    status = 413
    type = "invalid_request_error"
    code = "request_too_large"


class IfMatchRequired(GatewayError):
    """A change of the route table must say which version it changes."""

    status = 428
    type = "invalid_request_error"
    code = "if_match_required"


class HeadTooLarge(GatewayError):
    """The request line and headers are over the limit."""

    status = 431
    type = "invalid_request_error"
    code = "headers_too_large"


class InternalError(GatewayError):
    """A fault of the gateway itself."""

    status = 500
    code = "internal_error"


class StateUnavailable(GatewayError):
    """The change could not be kept, so it was not made."""

    status = 503
    code = "state_unavailable"
    retry_after = 1


class NoCapacity(GatewayError):
    """The model is known, but no worker can take the request now."""

    status = 503
    code = "no_capacity"
    retry_after = 1


class UpstreamTimeout(GatewayError):
    """The last worker that was tried did not answer in time."""

    status = 504
    code = "upstream_timeout"
