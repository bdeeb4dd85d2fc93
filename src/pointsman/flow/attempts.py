"""The failover story: ask a worker; if it fails before the client saw anything, ask another one.

The law, in two sentences. Until the first body byte is on its way to the client, a worker that is down, too slow, full
or draining is excluded and the request is routed again. After it, there is no other worker: the answer ends where it
breaks, and the client is told.

Before anybody was asked, a request may wait a while for its first worker: a fleet that was scaled to zero comes back.

How one worker is asked, and what becomes of its answer, is a leg. The usual one, a request and the relay of its answer,
is written out here, since nearly every request takes it; a hand-off and a step of a cascade bring their own.
"""

from collections.abc import Callable, Generator, Sequence
from typing import TypeAlias

from msgspec import Struct

from pointsman.domain.ledger import Lease
from pointsman.domain.router import Router, Target, always
from pointsman.domain.worker import Worker
from pointsman.errors import GatewayError, ModelNotFound, NoCapacity, UpstreamTimeout
from pointsman.flow.effects import (
    Answer,
    Broken,
    Command,
    Flow,
    Hold,
    Lost,
    Relay,
    Result,
    Send,
    Why,
)
from pointsman.flow.exchange import Attempt, Exchange
from pointsman.wire.unserved import lacks_path

__all__ = [
    "Asked",
    "Failure",
    "Leg",
    "Receive",
    "Received",
    "ask",
    "attempts",
    "relay",
    "stands",
    "unserved",
]

ERRORS = 400
FULL = 429
UNAVAILABLE = 503


class Failure(Struct, frozen=True, eq=False, gc=False):
    """How an attempt failed, and which worker is to blame and must not be asked again."""

    result: Answer | Lost
    worker: Worker


Asked: TypeAlias = Generator[Command, Result, Failure | None]
"""One target being asked: None once the request needs no other worker."""

Leg: TypeAlias = Callable[[Attempt, Lease], Asked]
"""Asks the target of an attempt, and takes its answer to wherever that goes; tells the lease when there is one."""

Received: TypeAlias = bool | Lost
"""Whether an answer came to its end in good order, or how it was lost before anybody saw it."""

Receive: TypeAlias = Callable[[Answer], Generator[Command, Result, Received]]
"""Takes an answer that stands to wherever it goes."""


def attempts(
    x: Exchange,
    router: Router,
    max_attempts: int,
    leg: Leg | None = None,
    step: int = 0,
    *,
    handoff: Callable[[str], bool] = always,
    final: bool = True,
) -> Flow:
    """Route the request, at most `max_attempts` workers in all, and relay the first answer that stands.

    An engine's 429 and 503 are tried elsewhere, and so is an answer that says that the engine does not serve the path,
    which counts as no attempt. Every other status, errors included, is an answer. If all that were asked said 429, the
    client gets the last of those. `step` is that of a cascade, whose other steps do not count; `handoff` says by which
    connectors the request can be handed off, `final` whether the client gets what nobody could better: else a 429 is no
    answer, and nobody is waited for either, since there is another step.

    Raises ModelNotFound, NoCapacity and UnsupportedEndpoint, and UpstreamTimeout where the last worker that was asked
    did not answer in time.
    """
    try:
        target = router.route(x.request, (), step, now=x.now, handoff=handoff)
    except NoCapacity as error:
        if not final or x.tries or x.now >= x.hold_until:
            raise
        target = yield from _held(
            x, error, lambda now: router.route(x.request, (), step, now=now, handoff=handoff)
        )
    excluded: list[Worker] = []
    failed: Answer | Lost | None = None
    failures = 0
    all_full = True
    while True:
        worker = target.worker
        attempt = Attempt(target, x.now)
        x.tries.append(attempt)
        with router.lease(target, x.request, x.now) as lease:
            if leg is None:
                result = yield Send(target)
                if isinstance(result, Answer) and (
                    result.head.status < ERRORS or (stands(result) and not unserved(result))
                ):
                    if lease.placement is not None and result.head.status < ERRORS:
                        lease.began(x.now)
                    ended = yield Relay(result)
                    if isinstance(ended, Broken):
                        x.error = str(ended.why)
                    return
                assert isinstance(result, Answer | Lost)
            else:
                failure = yield from leg(attempt, lease)
                if failure is None:
                    return
                result, worker = failure.result, failure.worker
        attempt.failure = _outcome(result)
        attempt.failed = worker
        attempt.over_at = x.now
        excluded.append(worker)
        if isinstance(result, Answer) and worker is target.worker and unserved(result):
            router.lack(worker, x.request.path)
        else:
            if isinstance(result, Lost):
                # It may be about to begin a new life, with more paths than it had.
                worker.lacks.clear()
            failed = result
            failures += 1
            all_full = all_full and isinstance(result, Answer) and result.head.status == FULL
            if failures >= max_attempts or x.now >= x.deadline:
                break
        try:
            target = router.route(x.request, excluded, step, now=x.now, handoff=handoff)
        except (ModelNotFound, NoCapacity):
            if failed is None:
                raise
            break
    assert failed is not None, "what was no attempt does not end the story"
    if final and all_full and isinstance(failed, Answer) and failed.complete:
        yield Relay(failed)
        return
    raise _verdict(failed)


def _held(
    x: Exchange, refusal: GatewayError, route: Callable[[float], Target]
) -> Generator[Command, Result, Target]:
    """Wait until the request can be routed, and return where to. Raises `refusal`, or what came in place of it."""
    target: Target | None = None

    def ready(now: float) -> bool:
        nonlocal target, refusal
        try:
            target = route(now)
        except GatewayError as error:
            refusal = error
            return not isinstance(error, NoCapacity)
        return True

    yield Hold(min(x.hold_until, x.deadline), ready)
    if target is None:
        raise refusal
    return target


def ask(x: Exchange, lease: Lease, command: Send, receive: Receive) -> Asked:
    """Ask the worker of a lease, and hand what stands to `receive`."""
    result = yield command
    assert isinstance(result, Answer | Lost)
    if isinstance(result, Answer) and stands(result) and not unserved(result):
        if result.head.status < ERRORS:
            lease.began(x.now)
        received = yield from receive(result)
        if not isinstance(received, Lost):
            return None
        result = received
    return Failure(result, lease.worker)


def relay(x: Exchange, edits: Sequence[Callable[[bytes], bytes]] = ()) -> Receive:
    """Return what commits to an answer, and relays it, with `edits` on its way."""

    def receive(answer: Answer) -> Generator[Command, Result, Received]:
        ended = yield Relay(answer, edits)
        if isinstance(ended, Broken):
            x.error = str(ended.why)
            return False
        return True

    return receive


def stands(answer: Answer) -> bool:
    """Tell whether an answer is one, or the news that the engine is full or draining."""
    return answer.head.status not in (FULL, UNAVAILABLE)


def unserved(answer: Answer) -> bool:
    """Tell whether an answer says that the engine does not have the path, whatever the request."""
    head = answer.head
    return answer.complete and not head.encoded and lacks_path(head.status, answer.payload)


def _outcome(failure: Answer | Lost) -> str:
    return str(failure.head.status) if isinstance(failure, Answer) else str(failure.why)


def _verdict(failure: Answer | Lost) -> GatewayError:
    """Return the error that the client gets when nobody could take its request."""
    if isinstance(failure, Answer):
        return NoCapacity("no worker could take the request: the engines are full or draining")
    if failure.why is Why.TIMED_OUT:
        return UpstreamTimeout(f"no worker answered in time: {failure.detail}")
    return NoCapacity(f"no worker could take the request: {failure.detail or failure.why}")
