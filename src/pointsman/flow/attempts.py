"""The failover story: ask a worker; if it fails before the client saw anything, ask another one.

The law, in two sentences. Until the first body byte is on its way to the client, a worker that is down, too slow, full
or draining is excluded and the request is routed again. After it, there is no other worker: the answer ends where it
breaks, and the client is told.
"""

from pointsman.domain.ledger import Lease
from pointsman.domain.router import Router
from pointsman.errors import GatewayError, ModelNotFound, NoCapacity, UpstreamTimeout
from pointsman.flow.effects import Answer, Broken, Flow, Lost, Relay, Send, Why
from pointsman.flow.exchange import Attempt, Exchange

__all__ = ["attempts"]

FULL = 429
UNAVAILABLE = 503


def attempts(x: Exchange, router: Router, max_attempts: int) -> Flow:
    """Route the request, at most `max_attempts` workers in all, and relay the first answer that stands.

    An engine's 429 and 503 are tried elsewhere; every other status, errors included, is an answer. If all that were
    asked said 429, the client gets the last of those. Raises ModelNotFound and NoCapacity, and
    UpstreamTimeout where the last worker that was asked did not answer in time.
    """
    target = router.route(x.request, now=x.now)
    all_full = True
    while True:
        worker = target.worker
        attempt = Attempt(target, x.now)
        x.tries.append(attempt)
        with Lease(worker):
            result = yield Send(target)
            if isinstance(result, Answer) and result.head.status not in (FULL, UNAVAILABLE):
                ended = yield Relay(result)
                if isinstance(ended, Broken):
                    x.error = str(ended.why)
                return
        assert isinstance(result, Answer | Lost)
        all_full = all_full and isinstance(result, Answer) and result.head.status == FULL
        attempt.failure = _outcome(result)
        x.excluded.append(worker)
        if len(x.tries) >= max_attempts or x.now >= x.deadline:
            break
        try:
            target = router.route(x.request, x.excluded, now=x.now)
        except (ModelNotFound, NoCapacity):
            break
    if all_full and isinstance(result, Answer) and result.complete:
        yield Relay(result)
        return
    raise _verdict(result)


def _outcome(failure: Answer | Lost) -> str:
    return str(failure.head.status) if isinstance(failure, Answer) else str(failure.why)


def _verdict(failure: Answer | Lost) -> GatewayError:
    """Return the error that the client gets when nobody could take its request."""
    if isinstance(failure, Answer):
        return NoCapacity("no worker could take the request: the engines are full or draining")
    if failure.why is Why.TIMED_OUT:
        return UpstreamTimeout(f"no worker answered in time: {failure.detail}")
    return NoCapacity(f"no worker could take the request: {failure.detail or failure.why}")
