"""The examples on the page about explanations are what the code says, value by value."""

import json
import re
from pathlib import Path
from random import Random

import msgspec
import pytest

from pointsman.domain.explain import Decision, Explanation, explain
from pointsman.domain.policy import POLICIES, Policy, PolicyOptions, make_policy
from pointsman.domain.policy.least_outstanding import LeastOutstanding
from pointsman.domain.registry import Registry, WorkerReport
from pointsman.domain.request import InferenceRequest
from pointsman.domain.router import Router
from pointsman.domain.routes import Backend, Route, RouteTable
from pointsman.flow.attempts import attempts
from pointsman.flow.effects import Done, Lost, Why
from pointsman.flow.exchange import Exchange
from pointsman.observe.decisions import Decisions
from pointsman.testing.stories import Dialogue, answer

PAGE = (Path(__file__).parents[2] / "docs" / "explain.md").read_text()


def fleet(policy: Policy, *routes: Route, **models: str) -> tuple[Registry, Router]:
    registry = Registry()
    for worker_id, model in models.items():
        registry.beat(WorkerReport(worker_id, f"{worker_id}.local:8000", model), 0.0)
    return registry, Router(registry, policy, RouteTable(routes))


def canary() -> Explanation:
    split = (Backend("smol-v3", 0.9), Backend("smol-v4", 0.1))
    registry, router = fleet(
        make_policy("affinity", PolicyOptions(), Random(1)),
        Route("smol", aliases=("default",), backends=split),
        **dict.fromkeys("abcd", "smol-v3"), x="smol-v4",
    )  # fmt: skip
    registry.beat(WorkerReport("e", "e.local:8000", "smol-v3", draining=True), 0.0)
    registry.snapshot()[3].in_flight = 3
    request = InferenceRequest("default", "req-1", prompt=b'"Once upon a time"')
    return explain(router, registry, request, now=1.0)


def refused() -> Explanation:
    registry, router = fleet(LeastOutstanding(), a="smol", b="smol")
    registry.drain("smol")
    return explain(router, registry, InferenceRequest("smol", "req-1"), now=1.0)


def decision() -> Decision:
    policy = LeastOutstanding()
    registry, router = fleet(policy, a="smol", b="smol")
    registry.snapshot()[1].in_flight = 2
    time = 0.0
    decisions = Decisions(1024, wall=lambda: 1767225600.0 + time, now=lambda: time)
    decisions.uses(policy)
    x = Exchange(
        InferenceRequest("smol", "req-7"),
        path="/v1/completions",
        operation="text_completion",
        started=0.0,
        trace=b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    )
    dialogue = Dialogue(attempts(x, router, 3)).expects_send("a")
    x.now = 1.0
    dialogue.gets(Lost(Why.RESET)).expects_send("b")
    time = x.now = x.first_byte_at = x.finished_at = 3.0
    x.status = 200
    dialogue.gets(answer(200)).expects_relay().gets(Done()).ends()
    decisions.finished(x)
    return decisions.find(request_id="req-7")[0]


EXAMPLES = {"canary": canary, "refused": refused, "decision": decision}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_of_the_page_is_what_the_code_says(name: str) -> None:
    shown = re.findall(rf"<!-- example: {name} -->\n```json\n(.*?)```", PAGE, re.DOTALL)
    assert len(shown) == 1
    said = msgspec.to_builtins(EXAMPLES[name]())
    # Also in the order of the keys.
    assert json.dumps(json.loads(shown[0])) == json.dumps(said)


def test_no_example_goes_untested_and_every_policy_has_its_score() -> None:
    assert set(re.findall(r"<!-- example: (\w+) -->", PAGE)) == set(EXAMPLES)
    assert PAGE.count("```json") == len(EXAMPLES)
    table = PAGE[PAGE.index("| policy | score |") : PAGE.index("A policy of your own shows")]
    assert sorted(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == sorted(POLICIES)
