"""Which story a request gets: the route decides, and what the request asks for.

Nearly every request needs one worker and nothing else; the data plane gives it `attempts` without coming here.
"""

from pointsman.domain.router import Router
from pointsman.domain.routes import Route
from pointsman.flow.attempts import attempts, relay
from pointsman.flow.cascade import Cascades, cascade
from pointsman.flow.effects import Flow
from pointsman.flow.exchange import Exchange
from pointsman.flow.handoff import Legs
from pointsman.flow.handover import Handoffs

__all__ = ["JUDGED", "disaggregated", "plan"]

JUDGED = ("/v1/chat/completions", "/v1/completions")
"""The paths whose answers say how likely each token was, and which can be handed off."""


def plan(
    x: Exchange,
    router: Router,
    max_attempts: int,
    route: Route,
    body: bytes,
    handoffs: Handoffs,
    cascades: Cascades,
) -> Flow:
    """Return the story of a request for a route that is not plain."""
    if route.cascade and x.path not in JUDGED:
        # Nothing tells how sure a model is of an answer of another API: the last one's is always good enough.
        return attempts(x, router, max_attempts, step=len(route.cascade) - 1)
    if route.cascade:
        return cascade(x, router, max_attempts, route, body, handoffs, cascades)
    return disaggregated(x, router, max_attempts, route, body, handoffs)


def disaggregated(
    x: Exchange, router: Router, max_attempts: int, route: Route, body: bytes, handoffs: Handoffs
) -> Flow:
    """Prefill on one worker and decode on another, or have one do both where the request needs that.

    Raises what `attempts` raises, and BadRequest.
    """
    legs = Legs(x, router, handoffs, route, body)
    yield from attempts(x, router, max_attempts, legs.leg(relay(x)), handoff=legs.handoff)
