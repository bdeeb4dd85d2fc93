"""The story of a hand-off: one worker computes the prompt, another one generates from it.

What engines have to be told for that differs, and stands in their connectors (`pointsman.flow.connectors`). What is the
same for all of them stands here: who is asked when, what becomes of a failure on either side, and that nothing stays
behind (`pointsman.flow.handover`).

When either worker fails before the client saw anything, that one is excluded, and another attempt begins from the
start. What the prefill worker finds wrong with the request itself is the client's, and no decode begins.
"""

from collections import deque
from collections.abc import Callable

from pointsman.domain.ledger import Lease
from pointsman.domain.router import Router
from pointsman.domain.routes import Route
from pointsman.domain.worker import connector_of
from pointsman.errors import GatewayError
from pointsman.flow.attempts import Asked, Failure, Leg, Receive, ask, stands
from pointsman.flow.connectors import CONNECTORS
from pointsman.flow.connectors.answers import failed, note_usage, refused, succeeded
from pointsman.flow.effects import Answer, Both, Lost, Pair, Send, Why
from pointsman.flow.exchange import Attempt, Exchange, Transfer
from pointsman.flow.handover import PLAIN, Handoff, Handoffs, Prefilling, Prompt, Ready

__all__ = ["Legs"]

TAIL_PIECES = 4
"""Last pieces of a stream that are looked through: one has the usage, and after it come the last event and chunk."""

TOKEN_BYTES = 4
"""Bytes of a prompt that are taken for a token, where nobody counts them."""


class Legs:
    """How each target of a route is asked for one request, whatever is to become of the answer."""

    __slots__ = ("_can", "_handoffs", "_prompt", "_router", "_x")

    def __init__(
        self, x: Exchange, router: Router, handoffs: Handoffs, route: Route, body: bytes
    ) -> None:
        self._x = x
        self._router = router
        self._handoffs = handoffs
        request = x.request
        minimum = route.disagg_min_tokens
        self._prompt = Prompt(
            x.path,
            body,
            len(request.prompt or b"") + len(request.messages or b""),
            handoffs.min_tokens if minimum is None else minimum,
            route.default_max_tokens,
        )
        self._can: dict[str, bool] = {}

    def handoff(self, connector: str) -> bool:
        """Tell whether the request can be handed off this way. Raises BadRequest, see `dialect.tl.read`."""
        can = self._can.get(connector)
        if can is None:
            known = CONNECTORS.get(connector)
            can = self._can[connector] = known is not None and known.can(self._prompt)
        return can

    def leg(
        self,
        receive: Receive,
        send: Callable[[Attempt], Send] = lambda attempt: Send(attempt.target),
    ) -> Leg:
        """Return the leg that hands what stands to `receive`; `send` says how a worker is asked.

        It raises BadRequest where the prefill worker says that the request itself is wrong.
        """

        def leg(attempt: Attempt, lease: Lease) -> Asked:
            if attempt.target.prefill is None:
                return ask(self._x, lease, send(attempt), receive)
            return self._hand_off(attempt, lease, send(attempt), receive)

        return leg

    def _hand_off(self, attempt: Attempt, lease: Lease, asked: Send, receive: Receive) -> Asked:
        x = self._x
        attempt.transfer = transfer = Transfer()
        with Handoff(x, self._handoffs, self._prompt, attempt, transfer) as handoff:
            try:
                with self._router.lease(handoff.prefill, x.request, x.now) as prefill:
                    ready = yield from _prepare(handoff, lease)
                    if isinstance(ready, Ready) and ready.beside is not None:
                        leases = (prefill, lease)
                        return (yield from _at_once(handoff, leases, ready, asked, receive))
                    if isinstance(ready, Ready) and ready is not PLAIN:
                        prefill.began(x.now)
                if isinstance(ready, Answer):  # The prefill worker's own word about the request.
                    transfer.outcome = "refused"
                    yield from receive(ready)
                    return None
                if isinstance(ready, Failure):
                    transfer.outcome = "failed"
                    return ready
                transfer.decode_at = x.now
                result = yield _command(ready, asked)
                assert isinstance(result, Answer | Lost)
                return (yield from _resume(handoff, lease, ready, result, receive))
            except GatewayError:
                transfer.outcome = "refused"
                raise
            finally:
                # Whatever else ended it came from outside: the client left, or the gateway is shutting down.
                transfer.outcome = transfer.outcome or "abandoned"


def _prepare(handoff: Handoff, decode: Lease) -> Prefilling:
    """Do what comes before the decode worker is asked, unless the prompt is too short to be worth it."""
    prompt = handoff.prompt
    connector = connector_of(handoff.prefill)
    # There is a token for every byte at most; a gateway that does not tokenize goes by what is usual.
    bytes_each = 1 if connector == "tl" else TOKEN_BYTES
    if prompt.bytes < prompt.min_tokens * bytes_each:
        handoff.transfer.outcome = "direct"
        return PLAIN
    decode.relieved()
    return (yield from CONNECTORS[connector].prefill(handoff))


def _command(ready: Ready, asked: Send) -> Send:
    return Send(
        asked.target,
        {**asked.fields, **ready.fields},
        asked.headers + ready.headers,
        asked.hold,
        ready.request_id,
    )


def _at_once(
    handoff: Handoff, leases: tuple[Lease, Lease], ready: Ready, asked: Send, receive: Receive
) -> Asked:
    """Ask both workers at once. Nothing of the answer is looked at before the prefill has succeeded."""
    prefill, decode = leases
    transfer = handoff.transfer
    transfer.prefill_at = transfer.decode_at = handoff.x.now
    assert ready.beside is not None
    pair = yield Both(ready.beside, _command(ready, asked))
    assert isinstance(pair, Pair)
    if pair.called is not None:
        if refused(pair.called):
            transfer.outcome = "refused"
            yield from receive(pair.called)
            return None
        if not succeeded(pair.called):
            transfer.outcome = "failed"
            return failed(pair.called, handoff)
        note_usage(handoff, pair.called)
        prefill.began(handoff.x.now)
    assert pair.answer is not None, "one of the two has ended"
    return (yield from _resume(handoff, decode, ready, pair.answer, receive))


def _resume(
    handoff: Handoff, lease: Lease, ready: Ready, result: Answer | Lost, receive: Receive
) -> Asked:
    """Take the decode worker's answer, and give up what is held only where it has been used."""
    worker, transfer, x = handoff.decode, handoff.transfer, handoff.x
    connector = CONNECTORS[connector_of(handoff.prefill)]
    handed = transfer.outcome not in ("direct", "recomputed")
    if isinstance(result, Lost) or not stands(result):
        transfer.outcome = "failed" if handed else transfer.outcome
        return Failure(result, worker)
    if handed and connector.unknown(result):
        transfer.outcome = "failed"
        detail = f"worker {worker.id} does not have what was handed over to it"
        return Failure(Lost(Why.HANDLE, detail), worker)
    good = result.head.status < 300
    if good:
        lease.began(x.now)
    if good and not ready.to_the_end:
        handoff.holds()
    if handed and good:
        _judge(transfer, _said(result))
        x.tail = deque((result.body,), maxlen=TAIL_PIECES)
    elif handed:
        transfer.outcome = "refused"
    received = yield from receive(result)
    if isinstance(received, Lost):
        transfer.outcome = "failed"
        return Failure(received, worker)
    if handed and good and x.tail is not None and transfer.resumed < 0:
        _judge(transfer, connector.resumed(handoff, b"".join(x.tail)))
    # A worker that computed the prompt itself has not used up what was pushed to it.
    if received and good and transfer.outcome != "recomputed":
        handoff.holds()
    return None


def _judge(transfer: Transfer, resumed: int) -> None:
    """Note how many tokens of the prompt the decode worker need not compute, -1 where it does not say."""
    transfer.resumed = resumed
    transfer.outcome = "recomputed" if resumed == 0 else "handed_over"


def _said(answer: Answer) -> int:
    """Return how many tokens a decode worker says that it got, in the head of its answer; -1 where it does not."""
    said = answer.head.get(b"x-tl-kv-tokens")
    return int(said) if said is not None and said.isdigit() else -1
