"""The answers that are errors: status, type, code and param of each, as the contract has them."""

import re

import pytest

from pointsman import errors
from pointsman.errors import (
    GatewayError,
    InvalidKey,
    InvalidRoutes,
    NoCapacity,
    StateUnavailable,
)

TABLE = {
    "GatewayError": (500, "server_error", None, None),
    "BadRequest": (400, "invalid_request_error", None, None),
    "BadRule": (400, "invalid_request_error", None, "accept_if"),
    "InvalidRoutes": (400, "invalid_request_error", None, "routes"),
    "InvalidKey": (401, "invalid_request_error", "invalid_api_key", None),
    "InsufficientScope": (403, "permission_error", "insufficient_scope", None),
    "ModelNotFound": (404, "invalid_request_error", "model_not_found", "model"),
    "UnsupportedEndpoint": (404, "invalid_request_error", "unsupported_endpoint", None),
    "NotFound": (404, "invalid_request_error", "not_found", None),
    "MethodNotAllowed": (405, "invalid_request_error", None, None),
    "RequestTimeout": (408, "invalid_request_error", "request_timeout", None),
    "Conflict": (409, "invalid_request_error", "conflict", None),
    "EtagMismatch": (412, "invalid_request_error", "etag_mismatch", None),
    "BodyTooLarge": (413, "invalid_request_error", "request_too_large", None),
    "IfMatchRequired": (428, "invalid_request_error", "if_match_required", None),
    "HeadTooLarge": (431, "invalid_request_error", "headers_too_large", None),
    "InternalError": (500, "server_error", "internal_error", None),
    "StateUnavailable": (503, "server_error", "state_unavailable", None),
    "NoCapacity": (503, "server_error", "no_capacity", None),
    "UpstreamTimeout": (504, "server_error", "upstream_timeout", None),
}


def made(name: str) -> GatewayError:
    kind = getattr(errors, name)
    error = kind() if kind is InvalidKey else kind("what happened")
    assert isinstance(error, GatewayError)
    return error


def test_the_table_is_complete() -> None:
    assert sorted(TABLE) == errors.__all__


def test_every_bad_key_is_told_the_same() -> None:
    assert InvalidKey().message == "a valid API key is needed: Authorization: Bearer <key>"


@pytest.mark.parametrize("name", TABLE)
def test_the_four_keys_and_the_status(name: str) -> None:
    error = made(name)
    assert (error.status, error.type, error.code, error.param) == TABLE[name]
    if name != "InvalidKey":
        assert (error.message, str(error)) == ("what happened", "what happened")


@pytest.mark.parametrize("name", TABLE)
def test_only_a_lack_of_capacity_says_when_to_come_back(name: str) -> None:
    error = made(name)
    assert error.retry_after == (1 if isinstance(error, NoCapacity | StateUnavailable) else None)


def test_a_param_can_be_named_exactly() -> None:
    assert InvalidRoutes("", param="routes[1].model").param == "routes[1].model"
    assert InvalidRoutes("").param == "routes"


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    assert errors.__doc__ is not None
    drawn = re.findall(r"── (\w+) +(\d{3})", errors.__doc__)
    assert drawn == [(name, str(TABLE[name][0])) for name in TABLE if name != "GatewayError"]
    for name in re.findall(r"^[├└]── (\w+)", errors.__doc__, re.MULTILINE):
        assert getattr(errors, name).__base__ is errors.GatewayError
    for name in re.findall(r"^│   [├└]── (\w+)", errors.__doc__, re.MULTILINE):
        assert getattr(errors, name).__base__ is errors.BadRequest
