"""Async tests run on uvloop, as the gateway does; tests of sockets also fail where an error is logged."""

import logging
from collections.abc import Iterator

import pytest

SOCKETS = {"net", "fault"}


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(autouse=True)
def no_error_is_logged(
    request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> Iterator[None]:
    """A callback that failed shows nowhere but in the log. A test that expects an error there clears `caplog`."""
    yield
    if request.path.parent.name in SOCKETS:
        logged = [record for when in ("setup", "call") for record in caplog.get_records(when)]
        assert [each.getMessage() for each in logged if each.levelno >= logging.ERROR] == []
