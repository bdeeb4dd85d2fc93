"""Which story a request gets, by its route and its path."""

import pytest

from pointsman.domain.policy.least_outstanding import LeastOutstanding
from pointsman.domain.registry import Registry
from pointsman.domain.request import InferenceRequest
from pointsman.domain.router import Router
from pointsman.domain.routes import Route, RouteTable, Step
from pointsman.domain.worker import Worker
from pointsman.flow.cascade import Cascades
from pointsman.flow.exchange import Exchange
from pointsman.flow.handover import Handoffs
from pointsman.flow.plan import plan
from pointsman.testing.stories import Dialogue, answer

CASCADE = Route("auto", cascade=(Step("small", "mean_logprob > -1.2"), Step("large")))
PLAIN = Route("auto", targets=("unified", "disaggregated"))


def dialogue(route: Route, path: str, models: str) -> Dialogue:
    registry = Registry()
    for model in models.split():
        registry.add(Worker(model, model=model, http_address=f"{model}:80", static=True))
    router = Router(registry, LeastOutstanding(), RouteTable((route,)))
    x = Exchange(InferenceRequest("auto", "r1", path=path), path, "other", started=0.0)
    body = b'{"model":"auto"}'
    handoffs = Handoffs(draw_seed=lambda: 7, wall=lambda: 0.0)
    return Dialogue(plan(x, router, 3, route, body, handoffs=handoffs, cascades=Cascades()))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_cascade_tries_its_small_model_where_the_answer_tells_how_sure_it_is(path: str) -> None:
    with dialogue(CASCADE, path, "small large") as story:
        story.expects_send("small").gets(answer(500))
        story.expects_send("large").gets(answer(200)).relays_to_the_end()


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/messages", "/v1/audio/transcriptions"])
def test_a_cascade_asks_its_last_model_for_everything_else(path: str) -> None:
    with dialogue(CASCADE, path, "small large") as story:
        story.expects_send("large").gets(answer(200)).relays_to_the_end()


def test_without_a_cascade_the_targets_decide() -> None:
    with dialogue(PLAIN, "/v1/messages", "auto") as story:
        story.expects_send("auto").gets(answer(200)).relays_to_the_end()
