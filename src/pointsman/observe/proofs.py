"""Hand-offs of which the answer does not say whether they arrived, by decode worker, beside what its engine counts.

What follows from the two is in `pointsman.domain.proof`. What is kept of a worker goes with it.
"""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric

from pointsman.domain.proof import Proof
from pointsman.domain.worker import Worker

__all__ = ["Proofs"]

KEPT = 1024
"""Workers of which something is kept and that may have left, until somebody looks which of them have."""


class _Unsaid:
    """The hand-offs to one worker."""

    __slots__ = ("count", "proof", "tokens")

    def __init__(self) -> None:
        self.count = 0
        self.tokens = 0
        self.proof = Proof()


class Proofs:
    """Counts hand-offs that nobody confirmed. `live` returns the workers that are there."""

    def __init__(self, live: Callable[[], Iterable[Worker]]) -> None:
        self._live = live
        self._of: dict[Worker, _Unsaid] = {}
        self._max = KEPT

    def handed_over(self, worker: Worker, tokens: int, began: float) -> None:
        """Count a hand-off of so many prompt tokens that is over; `worker` was asked at `began`."""
        unsaid = self._unsaid(worker)
        unsaid.count += 1
        unsaid.tokens += tokens
        unsaid.proof.handed_over(began)

    def read(self, worker: Worker) -> None:
        """Take note of what a worker said just now."""
        if worker.remote_tokens >= 0:
            self._unsaid(worker).proof.read(worker.remote_tokens, worker.last_heartbeat)

    def recomputed(self, worker: Worker) -> int:
        """Return how many hand-offs brought a worker nothing."""
        unsaid = self._of.get(worker)
        return 0 if unsaid is None else unsaid.proof.recomputed

    def families(self) -> Iterator[Metric]:
        """Yield what Prometheus gets."""
        labels = ["worker_id"]
        count = CounterMetricFamily(
            "tl_gateway_handoffs_unconfirmed_total",
            "Hand-offs of which the decode worker's answer does not say whether they arrived.",
            labels=labels,
        )
        tokens = CounterMetricFamily(
            "tl_gateway_handoff_unconfirmed_tokens_total", "Their prompt tokens.", labels=labels
        )
        recomputed = CounterMetricFamily(
            "tl_gateway_handoffs_recomputed_total",
            "Those that brought the decode worker nothing, by its own counter.",
            labels=labels,
        )
        remote = CounterMetricFamily(
            "tl_gateway_worker_remote_tokens_total",
            "Prompt tokens that a worker got from others, as it says itself; begins anew with it.",
            labels=labels,
        )
        self._forget_gone()
        for worker, unsaid in self._of.items():
            place = [worker.id]
            if unsaid.count:
                count.add_metric(place, unsaid.count)
                tokens.add_metric(place, unsaid.tokens)
                recomputed.add_metric(place, unsaid.proof.recomputed)
            if worker.remote_tokens >= 0:
                remote.add_metric(place, worker.remote_tokens)
        yield from (count, tokens, recomputed, remote)

    def _unsaid(self, worker: Worker) -> _Unsaid:
        unsaid = self._of.get(worker)
        if unsaid is None:
            if len(self._of) >= self._max:
                self._forget_gone()
                self._max = KEPT + 2 * len(self._of)
            unsaid = self._of[worker] = _Unsaid()
        return unsaid

    def _forget_gone(self) -> None:
        live = set(self._live())
        for worker in self._of.keys() - live:
            del self._of[worker]
