"""The lower expected wait of two random workers, by latencies that are remembered: Peak EWMA of Finagle and Linkerd.

    cost    = latency x (outstanding + 1)                       (the lower of two random workers wins)
    latency = l                         if the new l is above it: a peak counts at once
              latency x w + l x (1 - w) otherwise, w = exp(-seconds since the last one / decay_s)

Latency is the time until an answer's first byte, since how long an answer goes on is the client's wish. Between answers
it decays towards 0, so a worker that was slow is tried again. A worker that never answered gets one request, and no
second one while others have answered. A request that failed teaches nothing.

Source: the Peak EWMA balancer of Finagle (decay 10 s), which Linkerd took over; both draw two and compare.
"""

from collections.abc import Callable
from math import exp
from typing import TYPE_CHECKING, ClassVar

from pointsman.domain.placement import Placement
from pointsman.domain.policy.consideration import Consideration
from pointsman.domain.policy.power_of_two import draw_two

if TYPE_CHECKING:
    from pointsman.domain.policy import RandomSource
    from pointsman.domain.request import InferenceRequest
    from pointsman.domain.worker import Worker

__all__ = ["PeakEwma"]

UNKNOWN_S = 1e6
"""What a worker costs that is busy with its first request: more than any latency."""


class _Latency:
    """The latency of one worker: seconds, as of `at`."""

    __slots__ = ("at", "seconds")

    def __init__(self, at: float) -> None:
        self.seconds = 0.0
        self.at = at


class PeakEwma:
    """The lower cost of two; `decay_s` (above 0) is how long it takes a latency to fall to 1/e."""

    __slots__ = ("_decay_s", "_latencies", "_now", "_random")

    name: ClassVar[str] = "peak_ewma"

    def __init__(self, random: "RandomSource", decay_s: float = 10.0) -> None:
        self._random = random
        self._decay_s = decay_s
        self._latencies: dict[Worker, _Latency] = {}
        self._now = 0.0

    def placed(self, worker: "Worker", request: "InferenceRequest", now: float) -> Placement:
        """Begin to measure: the first byte of what `worker` answers ends it."""
        self._now = max(self._now, now)
        if worker not in self._latencies:
            self._latencies[worker] = _Latency(self._now)
        return Placement(worker, request.prompt_tokens, request.prompt_tokens, now, self._heard)

    def left(self, worker: "Worker") -> None:
        """Forget how fast a worker that is gone was."""
        self._latencies.pop(worker, None)

    def pick(
        self,
        workers: "tuple[Worker, ...]",
        load: "Callable[[Worker], int]",
        request: "InferenceRequest",
    ) -> "tuple[Worker, str]":
        """Return the cheaper of two random workers, reason `load`; of two equals the one drawn first.

        >>> from random import Random
        >>> from pointsman.domain.request import InferenceRequest
        >>> from pointsman.domain.worker import Worker, load_of
        >>> a, b = (Worker(name, model="m", http_address="127.0.0.1:8001") for name in "ab")
        >>> policy, request = PeakEwma(Random(1)), InferenceRequest("m", "r1")
        >>> for worker, seconds in ((b, 1.0), (a, 4.0)):
        ...     policy.placed(worker, request, 0.0).began(seconds)
        >>> policy.pick((a, b), load_of, request)[0].id
        'b'
        >>> b.in_flight = 7
        >>> policy.pick((a, b), load_of, request)[0].id
        'a'
        """
        if len(workers) == 1:
            return workers[0], "load"
        first, second = draw_two(workers, self._random)
        return (first if self._cost(first, load) <= self._cost(second, load) else second), "load"

    def consider(
        self,
        workers: "tuple[Worker, ...]",
        load: "Callable[[Worker], int]",
        request: "InferenceRequest",
    ) -> Consideration:
        """Return the costs as scores, in seconds; nothing is drawn, so there is a pick only where it is certain.

        >>> from random import Random
        >>> from pointsman.domain.request import InferenceRequest
        >>> from pointsman.domain.worker import Worker, load_of
        >>> a, b = (Worker(name, model="m", http_address="127.0.0.1:8001") for name in "ab")
        >>> policy, request = PeakEwma(Random(1)), InferenceRequest("m", "r1")
        >>> policy.placed(a, request, 0.0).began(2.0)
        >>> b.in_flight = 1
        >>> policy.consider((a, b), load_of, request).notes
        ('', 'has not answered yet')
        """
        costs = [self._cost(worker, load) for worker in workers]
        certain = len(workers) == 1 or (len(workers) == 2 and costs[0] != costs[1])
        return Consideration(
            pick=workers[costs.index(min(costs))] if certain else None,
            reason="load",
            scores=tuple(costs),
            notes=tuple(
                ["" if self._seconds(worker) else "has not answered yet" for worker in workers]
            ),
            rule="two are drawn at random and the lower latency x (load + 1) of them wins",
        )

    def _cost(self, worker: "Worker", load: "Callable[[Worker], int]") -> float:
        seconds, outstanding = self._seconds(worker), load(worker)
        if seconds or not outstanding:
            return seconds * (outstanding + 1)
        return UNKNOWN_S + outstanding

    def _seconds(self, worker: "Worker") -> float:
        latency = self._latencies.get(worker)
        if latency is None:
            return 0.0
        return latency.seconds * exp((latency.at - self._now) / self._decay_s)

    def _heard(self, placement: Placement, now: float) -> None:
        latency = self._latencies.get(placement.worker)
        if latency is None:
            # It left meanwhile.
            return
        seconds = max(now - placement.at, 0.0)
        # A clock that goes back counts as the latest.
        self._now = now = max(self._now, now)
        if seconds < latency.seconds:
            kept = exp((latency.at - now) / self._decay_s)
            seconds += (latency.seconds - seconds) * kept
        latency.seconds, latency.at = seconds, now
