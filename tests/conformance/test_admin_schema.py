"""The admin API under schemathesis: whatever its OpenAPI document allows or forbids, the answer is one it declares.

Requests are made of the document, good ones and bad ones, always the same. The application stands behind a gate that
knows one key, as the data plane does, so that a request without it is seen to be refused.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.config import SchemathesisConfig
from schemathesis.specs.openapi import checks

from pointsman.domain.keys import Principal
from pointsman.testing.admin import ADMIN, Operated

AUTHORIZATION = "Bearer tl_abcdefghijkl_the-key-of-this-test"

CONFIG = SchemathesisConfig.from_dict(
    {
        "seed": 1,
        # The key is added to every request; parameters that nobody knows are ignored, as the page says.
        "generation": {"with-security-parameters": False, "allow-extra-parameters": False},
        "checks": {
            # The tag of a table is judged before its body, and has statuses of its own.
            "negative_data_rejection": {
                "expected-statuses": ["400", "401", "404", "405", "412", "428"]
            },
            "missing_required_header": {"expected-statuses": [428]},
            # What a document cannot say of good data: the tag in force, the rules of a table, who is alive.
            "positive_data_acceptance": {
                "expected-statuses": ["2XX", "400", "401", "404", "409", "412", "428"]
            },
        },
    }
)


class Gate:
    """Lets whoever has the key be the operator."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            given = dict(scope["headers"]).get(b"authorization")
            principal: Principal | None = ADMIN if given == AUTHORIZATION.encode() else None
            scope["state"] = {"principal": principal, "request_id": "r1"}
        await self._app(scope, receive, send)


FOLDER = tempfile.TemporaryDirectory()


@pytest.fixture(scope="module", autouse=True)
def nothing_stays() -> Iterator[None]:
    """The schema is read while tests are collected, before there is a fixture that could give a folder."""
    yield
    FOLDER.cleanup()


def application() -> Gate:
    gateway = Operated(Path(FOLDER.name, "keys.jsonl"))
    gateway.beat("a", "m")
    gateway.beat("b", "org/m:2")
    return Gate(gateway.app)


schema = schemathesis.openapi.from_asgi(
    "/admin/v1/openapi.json",
    application(),
    config=CONFIG,
    headers={"Authorization": AUTHORIZATION},
)


@pytest.mark.slow
@schema.parametrize()
@settings(
    max_examples=40,
    derandomize=True,
    database=None,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
def test_every_answer_is_one_that_the_document_declares(case: "schemathesis.Case[Any]") -> None:
    # A drain has no 405 (specification, section 2.6).
    drain = case.operation.path.endswith((":drain", ":undrain"))
    case.call_and_validate(
        headers={"Authorization": AUTHORIZATION},
        excluded_checks=[checks.unsupported_method] if drain else [],
    )
