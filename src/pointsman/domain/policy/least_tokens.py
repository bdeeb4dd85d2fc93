"""The fewest seconds of work, counted in tokens and not in requests: the least_load of SMG.

    score = (queued + in-flight tokens) / tokens_per_s + 0.15 s x k / (1 - k)     (the lowest wins)

`k` is the usage of the engine's KV cache, 0 where it does not tell. The tokens are those of the prompts that this
gateway has in flight, and 1,024 for each request that others have waiting there. It does not ask what is cached.

Source: least_load of SMG, with its defaults (2,000 tokens/s, 0.15 s). Theirs asks engines every 10 seconds how many
tokens they have; here they are counted as they are sent, so nothing is late.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from pointsman.domain.placement import Placement
from pointsman.domain.policy.consideration import Consideration
from pointsman.domain.policy.least_outstanding import LeastOutstanding
from pointsman.domain.policy.prefix_aware import ties_of
from pointsman.domain.policy.tokens import others_tokens

if TYPE_CHECKING:
    from pointsman.domain.request import InferenceRequest
    from pointsman.domain.worker import Worker

__all__ = ["LeastTokens"]

PRESSURE_S = 0.15
"""What a KV cache that is half full is worth, in seconds."""

FULL = 0.99
"""A cache is never thought to be fuller: the formula has no value for one that is quite full."""


class LeastTokens:
    """The minimum score at `tokens_per_s`; among equals the lowest load, then the smallest id or `rank`."""

    __slots__ = ("_least", "_rank", "_tokens_per_s")

    name: ClassVar[str] = "least_tokens"

    def __init__(
        self, tokens_per_s: float = 2000.0, rank: Callable[[str], int] | None = None
    ) -> None:
        self._tokens_per_s = tokens_per_s
        self._rank = rank
        self._least = LeastOutstanding(rank)

    def placed(self, worker: "Worker", request: "InferenceRequest", now: float) -> Placement:
        """Count the tokens of `request` as sent to `worker`.

        >>> from pointsman.domain.request import InferenceRequest
        >>> from pointsman.domain.worker import Worker
        >>> a = Worker("a", model="m", http_address="127.0.0.1:8001")
        >>> _ = LeastTokens().placed(a, InferenceRequest.of_blocks("m", "r1", (7,), 700), 1.0)
        >>> a.active_tokens
        700
        """
        return Placement(worker, request.prompt_tokens, request.prompt_tokens, now)

    def pick(
        self,
        workers: "tuple[Worker, ...]",
        load: "Callable[[Worker], int]",
        request: "InferenceRequest",
    ) -> "tuple[Worker, str]":
        """Return the worker of the lowest score, reason `load`.

        >>> from pointsman.domain.request import InferenceRequest
        >>> from pointsman.domain.worker import Worker, load_of
        >>> a, b = (Worker(name, model="m", http_address="127.0.0.1:8001") for name in "ab")
        >>> a.in_flight, a.active_tokens, b.in_flight, b.active_tokens = 1, 9000, 3, 600
        >>> LeastTokens().pick((a, b), load_of, InferenceRequest("m", "r1"))
        (<Worker b unified m routable load 3>, 'load')
        """
        scale = PRESSURE_S * self._tokens_per_s
        least = math.inf
        equals: list[Worker] = []
        for worker in workers:
            # What it costs with an empty cache and without others' requests, so at least: most need not be looked at.
            cost = worker.active_tokens + scale
            if cost > least:
                continue
            if worker.kv_usage > 0.0 or worker.queue_depth > worker.in_flight:
                cost = self._cost(worker)
            if cost < least:
                least = cost
                equals = [worker]
            elif cost == least:
                equals.append(worker)
        if len(equals) == 1:
            return equals[0], "load"
        # The very tuple of the fleet stands for what is known of it.
        tied = workers if len(equals) == len(workers) else tuple(equals)
        return self._least.pick(tied, load, request)

    def consider(
        self,
        workers: "tuple[Worker, ...]",
        load: "Callable[[Worker], int]",
        request: "InferenceRequest",
    ) -> Consideration:
        """Return the next pick; the scores are seconds of work.

        >>> from pointsman.domain.request import InferenceRequest
        >>> from pointsman.domain.worker import Worker, load_of
        >>> a, b = (Worker(name, model="m", http_address="127.0.0.1:8001") for name in "ab")
        >>> a.active_tokens, b.kv_usage = 9000, 0.75
        >>> seen = LeastTokens().consider((a, b), load_of, InferenceRequest("m", "r1"))
        >>> [round(seconds, 3) for seconds in seen.scores]
        [4.5, 0.45]
        """
        pick, reason = self.pick(workers, load, request)
        return Consideration(
            pick=pick,
            reason=reason,
            scores=tuple([self._cost(each) / self._tokens_per_s - PRESSURE_S for each in workers]),
            notes=("",) * len(workers),
            rule=f"the fewest seconds of work win; {ties_of(self._rank)}",
        )

    def _cost(self, worker: "Worker") -> float:
        """Return the score in tokens, too high by `PRESSURE_S`: k / (1 - k) is 1 / (1 - k) - 1."""
        tokens = worker.active_tokens
        if worker.queue_depth > worker.in_flight:
            tokens += others_tokens(worker)
        # In this order nan, which no engine should tell, is 0 too.
        usage = min(FULL, max(0.0, worker.kv_usage))
        return tokens + PRESSURE_S * self._tokens_per_s / (1.0 - usage)
