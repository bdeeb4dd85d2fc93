"""The answers that are errors: status, type, code and param of each, as the contract has them."""

import re

import pytest

from pointsman import errors
from pointsman.errors import GatewayError, InvalidRoutes, NoCapacity

TABLE = {
    "GatewayError": (500, "server_error", None, None),
    "BadRequest": (400, "invalid_request_error", None, None),
    "BadRule": (400, "invalid_request_error", None, "accept_if"),
    "InvalidRoutes": (400, "invalid_request_error", None, "routes"),
    "ModelNotFound": (404, "invalid_request_error", "model_not_found", "model"),
    "NotFound": (404, "invalid_request_error", "not_found", None),
    "MethodNotAllowed": (405, "invalid_request_error", None, None),
    "RequestTimeout": (408, "invalid_request_error", "request_timeout", None),
    "EtagMismatch": (412, "invalid_request_error", "etag_mismatch", None),
    "BodyTooLarge": (413, "invalid_request_error", "request_too_large", None),
    "IfMatchRequired": (428, "invalid_request_error", "if_match_required", None),
    "HeadTooLarge": (431, "invalid_request_error", "headers_too_large", None),
    "InternalError": (500, "server_error", "internal_error", None),
    "NoCapacity": (503, "server_error", "no_capacity", None),
    "UpstreamTimeout": (504, "server_error", "upstream_timeout", None),
}


def test_the_table_is_complete() -> None:
    assert sorted(TABLE) == errors.__all__


@pytest.mark.parametrize("name", TABLE)
def test_the_four_keys_and_the_status(name: str) -> None:
    error = getattr(errors, name)("what happened")
    assert isinstance(error, GatewayError)
    assert (error.status, error.type, error.code, error.param) == TABLE[name]
    assert (error.message, str(error)) == ("what happened", "what happened")


@pytest.mark.parametrize("name", TABLE)
def test_only_a_lack_of_capacity_says_when_to_come_back(name: str) -> None:
    error = getattr(errors, name)("")
    assert error.retry_after == (1 if isinstance(error, NoCapacity) else None)


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
