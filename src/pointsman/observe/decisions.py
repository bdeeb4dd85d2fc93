"""The last decisions: where requests went, what spoke for it, and what came of each attempt.

A request that is over costs one append: its record is kept as it is, without the client's text, and the oldest one
falls out. Everything that is shown is worked out when somebody asks. Scores are worked out by the policy itself, from
the loads that the router noted and the prefix key that the request has kept; only where the policy depends on nothing
else, and only where it agrees with what was done.

What it does not do: keep prompts, keys or answers; survive a restart.
"""

from collections import deque
from collections.abc import Callable

from pointsman.domain.explain import (
    Candidate,
    Decision,
    HandedOff,
    Judged,
    Tried,
    candidates_of,
)
from pointsman.domain.policy import Policy
from pointsman.domain.policy.consideration import Considers
from pointsman.flow.exchange import CLIENT_GONE, Attempt, Exchange
from pointsman.observe.logs import from_outside

__all__ = ["Decisions"]

POLICIES_KEPT = 4
"""A policy may have rings of megabytes; decisions made under an older one than these have no scores."""


class Decisions:
    """A ring of the last `kept` requests (0 or more) that are over.

    `wall` returns seconds since 1970, `now` those of the monotonic clock that requests are timed by.
    """

    def __init__(self, kept: int, wall: Callable[[], float], now: Callable[[], float]) -> None:
        self._wall = wall
        self._now = now
        self._over: deque[Exchange] = deque(maxlen=kept)
        self._policies: deque[tuple[float, Policy]] = deque(maxlen=POLICIES_KEPT)

    def uses(self, policy: Policy) -> None:
        """Note that requests are placed by `policy` from now on; called at the start and after a change."""
        self._policies.append((self._now(), policy))

    def finished(self, x: Exchange) -> None:
        """Keep the record of a request that is over."""
        x.request.forget()
        self._over.append(x)

    def find(
        self,
        *,
        model: str | None = None,
        worker: str | None = None,
        request_id: str | None = None,
        limit: int = 100,
    ) -> list[Decision]:
        """Return at most `limit` decisions that match everything given, the newest first.

        `model` is what the client asked for or what an engine was asked for, `worker` is any that was asked.
        """
        found: list[Decision] = []
        # Newest first by when they ended, which is when they are known.
        for x in reversed(self._over):
            if len(found) >= limit:
                break
            targets = [each.target for each in x.tries]
            if (
                (request_id is None or x.request_id == request_id)
                and (model in (None, x.model) or any(t.served_model == model for t in targets))
                and (worker is None or any(t.worker.id == worker for t in targets))
            ):
                found.append(self._decision(x))
        return found

    def _decision(self, x: Exchange) -> Decision:
        last = len(x.tries) - 1
        return Decision(
            request_id=from_outside(x.request_id),
            at=self._wall() - (self._now() - x.started),
            path=from_outside(x.path),
            model=from_outside(x.model),
            stream=x.stream,
            status=x.status,
            error=x.error,
            key_id=x.principal.key_id,
            tenant=x.principal.tenant,
            trace_id=x.trace[3:35].decode("ascii"),
            seconds=x.finished_at - x.started,
            first_byte_s=x.first_byte_at - x.started if x.first_byte_at else None,
            attempts=tuple(
                [
                    self._tried(x, attempt, _outcome(x) if index == last else _ended(attempt))
                    for index, attempt in enumerate(x.tries)
                ]
            ),
        )

    def _tried(self, x: Exchange, attempt: Attempt, outcome: str) -> Tried:
        target = attempt.target
        return Tried(
            worker_id=target.worker.id,
            served_model=from_outside(target.served_model),
            reason=target.reason,
            policy_reason=target.policy_reason,
            after_s=attempt.at - x.started,
            outcome=outcome,
            candidates=self._candidates(x, attempt),
            candidate_count=len(target.candidates),
            cascade_step=target.cascade_step,
            failed_worker_id=None if attempt.failed is None else attempt.failed.id,
            handoff=_handed_off(attempt),
            verdict=_judged(attempt),
        )

    def _candidates(self, x: Exchange, attempt: Attempt) -> tuple[Candidate, ...]:
        target = attempt.target
        if not target.loads:
            return ()
        loads = dict(zip(target.candidates, target.loads, strict=True))
        policy = self._policy_at(attempt.at)
        if isinstance(policy, Considers):
            seen = policy.consider(target.candidates, loads.__getitem__, x.request)
            if (
                seen.repeatable
                and seen.pick in (None, target.worker)
                and seen.reason == target.policy_reason
            ):
                return candidates_of(target.candidates, loads.__getitem__, seen)
        return tuple([Candidate(worker_id=worker.id, load=load) for worker, load in loads.items()])

    def _policy_at(self, at: float) -> Policy | None:
        for since, policy in reversed(self._policies):
            if since <= at:
                return policy
        return None


def _handed_off(attempt: Attempt) -> HandedOff | None:
    transfer, prefill = attempt.transfer, attempt.target.prefill
    if transfer is None or prefill is None:
        return None

    def between(start: float, end: float) -> float | None:
        return end - start if start and end else None

    return HandedOff(
        prefill_worker_id=prefill.id,
        outcome=transfer.outcome,
        tokens=transfer.tokens,
        cached=transfer.cached,
        resumed=None if transfer.resumed < 0 else transfer.resumed,
        tokenize_s=between(transfer.tokenize_at, transfer.prefill_at),
        prefill_s=between(transfer.prefill_at, transfer.decode_at),
    )


def _judged(attempt: Attempt) -> Judged | None:
    verdict = attempt.verdict
    if verdict is None:
        return None
    return Judged(
        value=verdict.value,
        kept=verdict.kept,
        prompt_tokens=verdict.prompt_tokens,
        completion_tokens=verdict.completion_tokens,
    )


def _ended(attempt: Attempt) -> str:
    rejected = attempt.verdict is not None and not attempt.verdict.kept
    return attempt.failure or ("rejected" if rejected else "")


def _outcome(x: Exchange) -> str:
    failure = _ended(x.tries[-1])
    if failure:
        return failure
    if x.error in ("", CLIENT_GONE):
        return x.error or "answered"
    return f"broken: {x.error}"
