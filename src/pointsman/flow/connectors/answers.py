"""What the answers of prefill workers that are asked over HTTP mean for the attempt."""

from typing import TypeGuard

from pointsman.flow.attempts import Failure, stands
from pointsman.flow.effects import Answer, Lost, Result, Why
from pointsman.flow.handover import Handoff
from pointsman.wire.logprobs import usage_of

__all__ = ["failed", "note_usage", "refused", "succeeded"]

REFUSALS = (400, 413, 422)
"""What a worker answers to a request that would be wrong anywhere."""


def refused(outcome: Result) -> TypeGuard[Answer]:
    """Tell whether it is the request that is wrong: the client gets the worker's own words."""
    return isinstance(outcome, Answer) and outcome.complete and outcome.head.status in REFUSALS


def succeeded(outcome: Result) -> TypeGuard[Answer]:
    """Tell whether a worker did what it was asked."""
    return isinstance(outcome, Answer) and outcome.complete and outcome.head.status < 300


def failed(outcome: Result, handoff: Handoff) -> Failure:
    """Return the failure of a prefill worker that neither did what it was asked nor refused the request."""
    worker = handoff.prefill
    if isinstance(outcome, Answer):
        if not stands(outcome):
            return Failure(outcome, worker)
        said = f"it answered {outcome.head.status}"
        return Failure(Lost(Why.PREFILL, f"prefill worker {worker.id} failed: {said}"), worker)
    assert isinstance(outcome, Lost)
    why = Why.TIMED_OUT if outcome.why is Why.TIMED_OUT else Why.PREFILL
    return Failure(Lost(why, f"prefill worker {worker.id} failed: {outcome.detail}"), worker)


def note_usage(handoff: Handoff, outcome: Answer) -> None:
    """Note how long the prompt is, where the prefill worker's answer says so."""
    usage = usage_of(outcome.payload)
    if usage is not None:
        handoff.transfer.tokens = usage[0]
