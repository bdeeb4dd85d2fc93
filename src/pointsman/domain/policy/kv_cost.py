"""The lowest sum of prompt to compute and cache to hold, as the KV router of NVIDIA Dynamo has it.

    cost = prefill_load_scale x max(pending + prompt - cached, 0) + active + prompt     (the lowest wins)

`pending` are the uncached tokens that wait for their first byte on the worker, `cached` what the prefix index has of
this prompt there, `active` the tokens that the worker holds for requests in flight. Dynamo counts blocks, which gives
the same order. Its credit for cached blocks is 1.0 on the device, 0.75 on the host and 0.25 on disk; the index here
knows one place, so the credit is 1.0. Its temperature is 0 here: the lowest cost, never a draw.

Source: the formula and the defaults of the KV mode of Dynamo's router, 2026.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

from pointsman.domain.policy.prefix_aware import PrefixAware, cached_tokens
from pointsman.domain.policy.tokens import others_tokens

if TYPE_CHECKING:
    from pointsman.domain.policy.consideration import Consideration
    from pointsman.domain.prefix_index import PrefixIndex
    from pointsman.domain.request import InferenceRequest
    from pointsman.domain.worker import Worker

__all__ = ["KvCost"]


class KvCost(PrefixAware):
    """The minimum cost; `prefill_load_scale` (0 or more) is what a token to compute weighs against one to hold."""

    __slots__ = ("_scale",)

    name: ClassVar[str] = "kv_cost"

    def __init__(
        self,
        index: "PrefixIndex",
        *,
        prefill_load_scale: float = 1.0,
        rank: Callable[[str], int] | None = None,
    ) -> None:
        super().__init__(index, rank)
        self._scale = prefill_load_scale

    def pick(
        self,
        workers: "tuple[Worker, ...]",
        load: "Callable[[Worker], int]",
        request: "InferenceRequest",
    ) -> "tuple[Worker, str]":
        """Return the worker of the lowest cost, reason `affinity` where it has some of the prompt, else `load`.

        >>> from pointsman.domain.prefix_index import PrefixIndex
        >>> from pointsman.domain.request import InferenceRequest
        >>> from pointsman.domain.worker import Worker, load_of
        >>> policy = KvCost(PrefixIndex(1024, 60.0))
        >>> fleet = tuple(Worker(name, model="m", http_address="127.0.0.1:8001") for name in "ab")
        >>> request = InferenceRequest.of_blocks("m", "r1", (7, 8), 1024, 512)
        >>> policy.placed(fleet[1], request, 1.0).ended()
        >>> policy.pick(fleet, load_of, request)
        (<Worker b unified m routable load 0>, 'affinity')
        """
        reached = self.index.reached(request.blocks, workers)
        costs = self._loads(workers)
        return self._cheapest(workers, reached, load, request, costs, self._scale)

    def consider(
        self,
        workers: "tuple[Worker, ...]",
        load: "Callable[[Worker], int]",
        request: "InferenceRequest",
    ) -> "Consideration":
        """Return the next pick; the scores are the costs, in tokens.

        >>> from pointsman.domain.prefix_index import PrefixIndex
        >>> from pointsman.domain.request import InferenceRequest
        >>> from pointsman.domain.worker import Worker, load_of
        >>> policy = KvCost(PrefixIndex(1024, 60.0))
        >>> fleet = tuple(Worker(name, model="m", http_address="127.0.0.1:8001") for name in "ab")
        >>> request = InferenceRequest.of_blocks("m", "r1", (7, 8), 1024, 512)
        >>> policy.placed(fleet[1], request, 1.0).ended()
        >>> policy.consider(fleet, load_of, request).scores
        (2048.0, 1024.0)
        """
        depths = dict(self.index.match(request.blocks, workers))
        scale, prompt = self._scale, request.prompt_tokens
        costs = [
            cost + scale * (prompt - cached_tokens(request, depths.get(worker, 0))) + prompt
            for worker, cost in zip(workers, self._loads(workers), strict=True)
        ]
        rule = "the lowest sum of tokens to compute and tokens to hold wins"
        return self._consider(workers, self.pick(workers, load, request), costs, request, rule)

    def _loads(self, workers: "Sequence[Worker]") -> list[float]:
        scale = self._scale
        return [
            worker.active_tokens + scale * worker.pending_tokens
            if worker.queue_depth <= worker.in_flight
            else worker.active_tokens + scale * worker.pending_tokens + others_tokens(worker)
            for worker in workers
        ]
