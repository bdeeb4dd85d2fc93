"""The story of a cascade: ask a small model first, keep its answer where it is sure of it, else ask the next one.

Every step but the last is asked with logprobs, whatever the client sent. Its answer is held whole and judged by the
step's rule; one that is kept is the engine's, byte for byte, but for logprobs that nobody asked for. One that is not,
or that cannot be judged, or that does not come, is dropped, and the next step begins. Within a step a worker that
fails is replaced by another one; only a step without any is skipped. The last step is the failover story as ever.

A stream cannot be taken back once it has begun, so streams go to the last step at once. With `stream_hold` the stream
of a step is held back for a few tokens and judged by those; then it is let through or dropped, never both.

With `shadow`, a sample of the answers is compared with what the last model says. Its client waits for neither.
"""

from collections.abc import Generator, Mapping

import msgspec

from pointsman.domain.acceptor import Acceptor
from pointsman.domain.calibration import Calibrations, Sample, StepCounts
from pointsman.domain.cascade import Accept, parse_accept_if, tokens_of
from pointsman.domain.judging import agreement
from pointsman.domain.ring import hash64, unit
from pointsman.domain.router import Router, never
from pointsman.domain.routes import Route, Step
from pointsman.domain.scores import Tokens
from pointsman.errors import GatewayError
from pointsman.flow.attempts import Receive, Received, attempts, relay
from pointsman.flow.effects import After, Answer, Command, Flow, Lost, More, Outcome, Result, Send
from pointsman.flow.exchange import Attempt, Exchange, Verdict
from pointsman.flow.handoff import Legs
from pointsman.flow.handover import Handoffs
from pointsman.wire.body import with_fields
from pointsman.wire.call import HttpCall
from pointsman.wire.logprobs import (
    StreamTokens,
    asked,
    forced,
    text_of,
    usage_of,
    without_logprobs,
)

__all__ = ["Cascades", "cascade"]

HOLD = 64 << 20
"""Bytes of an answer that is held to be judged. A larger one is not kept; a stream is judged by what is there then."""

SHADOW_S = 120.0
"""Seconds that the last model has for an answer that only serves to compare."""

OK = 200


class Cascades:
    """What all cascades of a gateway share: the learned acceptors by name, and what has been counted."""

    def __init__(self, acceptors: Mapping[str, Acceptor] | None = None) -> None:
        self.calibrations = Calibrations()
        self._rules: dict[Step, Accept] = {}
        self.acceptors = acceptors or {}

    @property
    def acceptors(self) -> Mapping[str, Acceptor]:
        """The learned acceptors, by name."""
        return self._acceptors

    @acceptors.setter
    def acceptors(self, acceptors: Mapping[str, Acceptor]) -> None:
        self._acceptors = acceptors
        self._rules.clear()

    def rule(self, step: Step) -> Accept:
        """Return the rule of a step. Raises BadRule, also where its acceptor is not known."""
        rule = self._rules.get(step)
        if rule is None:
            acceptor = self._acceptors.get(step.acceptor) if step.acceptor else None
            rule = self._rules[step] = parse_accept_if(step.accept_if, acceptor)
        return rule


def cascade(
    x: Exchange,
    router: Router,
    max_attempts: int,
    route: Route,
    body: bytes,
    handoffs: Handoffs,
    cascades: Cascades,
) -> Flow:
    """Ask the models of a cascade in order until an answer is kept; the last one's is, whatever it is.

    Raises what `attempts` raises for the last step, and BadRequest.
    """
    last = len(route.cascade) - 1
    legs = Legs(x, router, handoffs, route, body)
    trials: list[_Trial] = []
    if not x.request.stream or route.stream_hold is not None:
        for number, step in enumerate(route.cascade[:last]):
            try:
                rule = cascades.rule(step)
            except GatewayError:
                continue
            counts = cascades.calibrations.of(route.model, number)
            trial = _Trial(x, route, rule, counts, body)
            trials.append(trial)
            leg = legs.leg(trial.receive, trial.send)
            try:
                yield from attempts(
                    x, router, max_attempts, leg, number, handoff=legs.handoff, final=False
                )
            except GatewayError:
                counts.failed += 1
                continue
            if trial.kept:
                if _shadowed(x, route):
                    _compare_later(x, router, body, trial, last)
                return
    receive = relay(x)
    if trials and _shadowed(x, route):
        receive = _comparing(receive, trials)
    yield from attempts(x, router, max_attempts, legs.leg(receive), last, handoff=legs.handoff)


class _Trial:
    """One step that may be the last: how it is asked, and what is thought of its answer."""

    def __init__(
        self, x: Exchange, route: Route, rule: Accept, counts: StepCounts, body: bytes
    ) -> None:
        self._x = x
        self._hold = route.stream_hold if x.request.stream else None
        self._rule = rule
        self.counts = counts
        self._fields = forced(x.path, body, margins=rule.needs_margins)
        self._edits = () if asked(x.path, body) else (without_logprobs,)
        self.kept = False
        self.value: float | None = None
        self.text: str | None = None

    def send(self, attempt: Attempt) -> Send:
        """Ask for an answer that can be judged."""
        return Send(attempt.target, self._fields, hold=HOLD)

    def receive(self, answer: Answer) -> Generator[Command, Result, Received]:
        """Judge an answer; commit to it where it is kept, and else drop it."""
        tokens: Tokens | None = None
        used = (0, 0)
        if answer.head.status != OK:
            pass
        elif self._hold is not None:
            seen = yield from self._listen(answer)
            if isinstance(seen, Lost):
                return seen
            answer, tokens = seen
            used = (0, len(tokens.logprobs))
        elif answer.complete:
            payload = answer.payload
            used = usage_of(payload) or used
            self.text = text_of(payload)
            try:
                tokens = tokens_of(payload)
            except ValueError:
                tokens = None
        self.value = None if tokens is None else self._rule.value(tokens)
        self.kept = self._rule.holds(self.value)
        self._note(used)
        if not self.kept:
            return answer.complete
        return (yield from relay(self._x, self._edits)(answer))

    def _listen(self, answer: Answer) -> Generator[Command, Result, tuple[Answer, Tokens] | Lost]:
        """Hold a stream until enough of it is there."""
        hold = self._hold
        assert hold is not None
        until = self._x.tries[-1].at + hold.seconds
        stream = StreamTokens()
        seen = 0
        while True:
            # What came last are whole chunks; to read all of them again and again would be quadratic.
            stream.feed(Answer(answer.head, answer.body[seen:], answer.complete).payload)
            seen = len(answer.body)
            if (
                answer.complete
                or stream.ended
                or stream.count >= hold.tokens
                or seen >= HOLD
                or self._x.now >= until
            ):
                return answer, stream.tokens
            result = yield More(answer, until)
            if isinstance(result, Lost):
                return result
            assert isinstance(result, Answer)
            answer = result

    def _note(self, used: tuple[int, int]) -> None:
        x, counts = self._x, self.counts
        attempt = x.tries[-1]
        attempt.verdict = Verdict(self.value, self.kept, *used)
        if self.kept:
            counts.kept += 1
            return
        attempt.over_at = x.now
        if self.value is None:
            counts.unscored += 1
        else:
            counts.rejected += 1
        counts.prompt_tokens += used[0]
        counts.completion_tokens += used[1]
        counts.seconds += x.now - attempt.at


def _shadowed(x: Exchange, route: Route) -> bool:
    """Tell whether a request is one of the sample: its id decides, as for a canary, but otherwise than there."""
    if not route.shadow or x.request.stream:
        return False
    return unit(hash64(b"shadow " + x.request_id.encode("utf-8", "replace"))) < route.shadow


def _comparing(receive: Receive, trials: list[_Trial]) -> Receive:
    """Compare the last step's answer with those that were not kept; it is asked anyway."""

    def compared(answer: Answer) -> Generator[Command, Result, Received]:
        if answer.complete and answer.head.status == OK:
            large = text_of(answer.payload)
            for trial in trials:
                _record(trial, large)
        return (yield from receive(answer))

    return compared


def _compare_later(x: Exchange, router: Router, body: bytes, trial: _Trial, last: int) -> None:
    """Ask the last model, too, once the client has its answer."""
    try:
        target = router.route(x.request, (), last, now=x.now, handoff=never)
    except GatewayError:
        return
    asked_too = with_fields(body, {"model": msgspec.json.encode(target.served_model)})

    def then(outcome: Outcome) -> None:
        if isinstance(outcome, Answer) and outcome.complete and outcome.head.status == OK:
            _record(trial, text_of(outcome.payload))

    call = HttpCall(target.worker, x.path.encode(), asked_too, SHADOW_S, x.principal.upstream)
    x.after.append(After((call,), then))


def _record(trial: _Trial, large: str | None) -> None:
    if trial.text is not None and large is not None:
        trial.counts.samples.append(Sample(trial.value, agreement(trial.text, large)))
