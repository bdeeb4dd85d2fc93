"""The metrics of what goes beyond one worker: hand-offs, and the steps of cascades.

Hand-offs are counted when a request is over. Cascades count themselves (`pointsman.domain.calibration`), and are read
at a scrape.
"""

from bisect import bisect_left
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from pointsman.domain.calibration import Calibrations
from pointsman.flow.exchange import Attempt, Exchange
from pointsman.observe.proofs import Proofs

__all__ = ["HandoffCounts", "cascade_families"]

PHASE_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Buckets in seconds: from a tokenizer's millisecond to the longest prefill that is waited for."""

PHASES = ("tokenize", "prefill", "resume")

TOKENS = ("prompt", "cached", "resumed")


class HandoffCounts:
    """Counts hand-offs by how they ended, and how long their parts took.

    `proofs` hears of those that seem to have worked, where the decode worker does not say so.
    """

    def __init__(self, proofs: Proofs) -> None:
        self._proofs = proofs
        self._outcomes: dict[str, int] = {}
        self._tokens = dict.fromkeys(TOKENS, 0)
        self._counts = {phase: [0] * (len(PHASE_BOUNDS) + 1) for phase in PHASES}
        self._sums = dict.fromkeys(PHASES, 0.0)

    def count(self, x: Exchange, attempt: Attempt) -> None:
        """Count the hand-off of one attempt of a request that is over."""
        transfer = attempt.transfer
        assert transfer is not None
        outcome = transfer.outcome
        self._outcomes[outcome] = self._outcomes.get(outcome, 0) + 1
        self._tokens["prompt"] += transfer.tokens
        self._tokens["cached"] += transfer.cached
        self._tokens["resumed"] += max(transfer.resumed, 0)
        if outcome == "handed_over" and transfer.resumed < 0:
            self._proofs.handed_over(attempt.target.worker, transfer.tokens, transfer.decode_at)
        if transfer.tokenize_at and transfer.prefill_at:
            self._took("tokenize", transfer.prefill_at - transfer.tokenize_at)
        if transfer.prefill_at and transfer.decode_at:
            self._took("prefill", transfer.decode_at - transfer.prefill_at)
        if transfer.decode_at and x.first_byte_at and outcome in ("handed_over", "recomputed"):
            self._took("resume", x.first_byte_at - transfer.decode_at)

    def families(self) -> Iterator[Metric]:
        """Yield what Prometheus gets."""
        outcomes = CounterMetricFamily(
            "tl_gateway_handoffs_total",
            "Hand-offs from a prefill to a decode worker, by outcome.",
            labels=["outcome"],
        )
        for outcome, count in self._outcomes.items():
            outcomes.add_metric([outcome], count)
        tokens = CounterMetricFamily(
            "tl_gateway_handoff_tokens_total",
            "Prompt tokens of hand-offs: all, those the prefill worker had, those the decode worker says it got.",
            labels=["kind"],
        )
        for kind, count in self._tokens.items():
            tokens.add_metric([kind], count)
        phases = HistogramMetricFamily(
            "tl_gateway_handoff_phase_seconds",
            "What the parts of a hand-off took.",
            labels=["phase"],
        )
        for phase, counts in self._counts.items():
            if not any(counts):  # Most gateways hand nothing off.
                continue
            running = 0
            buckets = []
            for bound, count in zip((*map(repr, PHASE_BOUNDS), "+Inf"), counts, strict=True):
                running += count
                buckets.append((bound, float(running)))
            phases.add_metric([phase], buckets, self._sums[phase])
        yield from (outcomes, tokens, phases)

    def _took(self, phase: str, seconds: float) -> None:
        self._counts[phase][bisect_left(PHASE_BOUNDS, seconds)] += 1
        self._sums[phase] += seconds


def cascade_families(calibrations: Calibrations) -> Iterator[Metric]:
    """Yield what Prometheus gets of cascades. `step` counts from 0; the last step of a cascade has no series."""
    labels = ["model", "step"]
    answers = CounterMetricFamily(
        "tl_gateway_cascade_answers_total",
        "Answers of a step: kept, rejected for their score, unscored, or failed.",
        labels=[*labels, "verdict"],
    )
    tokens = CounterMetricFamily(
        "tl_gateway_cascade_rejected_tokens_total",
        "Tokens of answers that were not kept.",
        labels=[*labels, "type"],
    )
    seconds = CounterMetricFamily(
        "tl_gateway_cascade_rejected_seconds_total",
        "Time that clients waited for answers that were not kept.",
        labels=labels,
    )
    for model, step, counts in calibrations:
        place = [model, str(step)]
        for verdict in ("kept", "rejected", "unscored", "failed"):
            answers.add_metric([*place, verdict], getattr(counts, verdict))
        tokens.add_metric([*place, "input"], counts.prompt_tokens)
        tokens.add_metric([*place, "output"], counts.completion_tokens)
        seconds.add_metric(place, counts.seconds)
    yield from (answers, tokens, seconds)
