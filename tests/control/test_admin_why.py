"""Explanations and decisions through the admin API."""

from typing import Any

import msgspec
import pytest

from pointsman.domain.explain import Candidate, Decision, Tried
from pointsman.domain.routes import Backend, Route
from pointsman.testing.admin import Operated, Operator

pytestmark = pytest.mark.anyio

PATH = "/admin/v1/route:explain"


@pytest.fixture
def gateway() -> Operated:
    return Operated()


@pytest.fixture
def operator(gateway: Operated) -> Operator:
    return Operator(gateway.app)


async def explained(operator: Operator, query: str = "", model: str = "m") -> dict[str, Any]:
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "unknown": 1}
    response = await operator.ask("POST", PATH + query, body)
    assert response.status == 200, response.body
    shown: dict[str, Any] = msgspec.json.decode(response.body)
    return shown


async def test_a_request_is_explained_as_it_would_be_routed(
    gateway: Operated, operator: Operator
) -> None:
    gateway.beat("a", queue_depth=2)
    gateway.beat("b", queue_depth=1)
    why = await explained(operator)
    assert (why["pick"], why["refusal"], why["request_id"]) == ("b", None, "req-of-the-test")
    assert [(c["worker_id"], c["load"]) for c in why["candidates"]] == [("a", 2), ("b", 1)]


async def test_a_worker_can_be_left_out_as_after_a_failure(
    gateway: Operated, operator: Operator
) -> None:
    gateway.beat("a")
    gateway.beat("b")
    gateway.beat("c")
    why = await explained(operator, "?exclude=a&exclude=b")
    assert (why["pick"], why["reason"]) == ("c", "failover")
    assert {veto["worker_id"] for veto in why["vetoed"]} == {"a", "b"}
    refused = await operator.ask("POST", f"{PATH}?exclude=nobody", {"model": "m"})
    assert (refused.status, refused.error["param"]) == (400, "exclude")


async def test_a_request_id_draws_the_backend(gateway: Operated, operator: Operator) -> None:
    gateway.beat("a", "v1")
    gateway.beat("b", "v2")
    gateway.router.set_routes([Route("m", backends=(Backend("v1", 0.5), Backend("v2", 0.5)))])
    picks = {
        (await explained(operator, f"?request_id=r{number}"))["served_model"]
        for number in range(20)
    }
    assert picks == {"v1", "v2"}
    assert (await explained(operator, "?request_id=r1"))["request_id"] == "r1"


async def test_a_request_that_would_be_refused_is_a_good_answer(operator: Operator) -> None:
    why = await explained(operator, model="nobody")
    assert (why["pick"], why["refusal"]["status"]) == (None, 404)
    assert why["refusal"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("query", "body", "param"),
    [
        ("", b"", None),
        ("", b"[]", None),
        ("", b"{}", "model"),
        ("", b'{"model":7}', "model"),
        ("", b'{"model":""}', "model"),
        ("?step=-1", b'{"model":"m"}', "step"),
        ("?step=x", b'{"model":"m"}', "step"),
    ],
)
async def test_what_cannot_be_explained_is_refused_as_by_the_data_path(
    operator: Operator, query: str, body: bytes, param: str | None
) -> None:
    refused = await operator.ask("POST", PATH + query, body)
    assert (refused.status, refused.error["param"]) == (400, param)


DECISION = Decision(
    request_id="r1",
    at=1.7e9,
    path="/v1/completions",
    model="m",
    stream=False,
    status=200,
    error="",
    key_id="k",
    tenant="acme",
    trace_id="",
    seconds=1.5,
    first_byte_s=None,
    attempts=(
        Tried(
            worker_id="a",
            served_model="m",
            reason="load",
            policy_reason="load",
            after_s=0.0,
            outcome="answered",
            candidates=(Candidate(worker_id="a", load=0),),
            candidate_count=1,
        ),
    ),
)


async def test_decisions_are_found_by_what_is_asked_for(
    gateway: Operated, operator: Operator
) -> None:
    gateway.past = [DECISION]
    listed = await operator.get("/admin/v1/decisions?model=org/m&worker=a&request_id=r%201&limit=7")
    assert listed == {"data": [msgspec.json.decode(msgspec.json.encode(DECISION))]}
    assert gateway.searched == {
        "model": "org/m",
        "worker": "a",
        "request_id": "r 1",
        "limit": 7,
    }


async def test_without_a_filter_the_last_hundred_decisions_are_listed(
    gateway: Operated, operator: Operator
) -> None:
    assert await operator.get("/admin/v1/decisions") == {"data": []}
    assert gateway.searched == {
        "model": None,
        "worker": None,
        "request_id": None,
        "limit": 100,
    }
