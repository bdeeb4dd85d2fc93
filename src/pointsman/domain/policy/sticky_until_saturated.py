"""Stay where the prompt is cached until the wait there costs too much: the default of llm-d's guide.

    sticky    = the workers that have at least sticky_score of the prompt's blocks (none: all workers)
    ttft(w)   = pending tokens of w / prefill_tokens_per_s
    all again   if least ttft of the sticky - least ttft of the others > ttft_penalty_s
    the lowest  pending tokens + prompt - cached tokens  among these wins

`pending` are the uncached tokens whose first byte has not come, so a prompt is released at its first streamed chunk, as
theirs is. The product of the two constants decides: 15,928 tokens/s x 18 s = 286,704 tokens more than elsewhere. Both
are of one deployment (Qwen3-32B on H100); they say themselves that it must not be copied to another.

Source: sticky-until-saturated of the llm-d router, 2026.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from pointsman.domain.policy.prefix_aware import PrefixAware, cached_tokens
from pointsman.domain.policy.tokens import pending_loads, those_at

if TYPE_CHECKING:
    from pointsman.domain.policy.consideration import Consideration
    from pointsman.domain.prefix_index import PrefixIndex
    from pointsman.domain.request import InferenceRequest
    from pointsman.domain.worker import Worker

__all__ = ["StickyUntilSaturated"]


class StickyUntilSaturated(PrefixAware):
    """Sticky from `sticky_score` (0 to 1) on, at most `ttft_penalty_s` slower at `prefill_tokens_per_s`."""

    __slots__ = ("_gap", "_sticky_score")

    name: ClassVar[str] = "sticky_until_saturated"

    def __init__(
        self,
        index: "PrefixIndex",
        *,
        sticky_score: float = 0.8,
        prefill_tokens_per_s: float = 15_928.0,
        ttft_penalty_s: float = 18.0,
        rank: Callable[[str], int] | None = None,
    ) -> None:
        super().__init__(index, rank)
        self._sticky_score = sticky_score
        # Times are only compared with each other, so tokens do as well as seconds.
        self._gap = prefill_tokens_per_s * ttft_penalty_s

    def pick(
        self,
        workers: "tuple[Worker, ...]",
        load: "Callable[[Worker], int]",
        request: "InferenceRequest",
    ) -> "tuple[Worker, str]":
        """Return the first to be done with the prompt, reason `affinity` where it has some of it, else `load`.

        >>> from pointsman.domain.prefix_index import PrefixIndex
        >>> from pointsman.domain.request import InferenceRequest
        >>> from pointsman.domain.worker import Worker, load_of
        >>> policy = StickyUntilSaturated(PrefixIndex(1024, 60.0))
        >>> fleet = tuple(Worker(name, model="m", http_address="127.0.0.1:8001") for name in "ab")
        >>> request = InferenceRequest.of_blocks("m", "r1", (7, 8), 1024, 512)
        >>> policy.placed(fleet[1], request, 1.0).ended()
        >>> fleet[1].pending_tokens = 286_704
        >>> policy.pick(fleet, load_of, request)
        (<Worker b unified m routable load 0>, 'affinity')
        >>> fleet[1].pending_tokens += 1
        >>> policy.pick(fleet, load_of, request)
        (<Worker a unified m routable load 0>, 'load')
        """
        blocks = request.blocks
        reached = self.index.reached(blocks, workers)
        enough = self._sticky_score * len(blocks)
        sticky = [each for each in reached if each[0] >= enough]
        if not sticky:
            return self._cheapest(workers, reached, load, request, pending_loads(workers))
        kept = sticky[-1][1].workers
        waiting = pending_loads(kept)
        least = min(waiting)
        if least > self._gap:
            # The least of all is the least of the others wherever it matters: where it is below the least of the kept.
            everywhere = pending_loads(workers)
            if least - min(everywhere) > self._gap:
                return self._cheapest(workers, reached, load, request, everywhere)
        if len(sticky) == 1:
            # All of them have the same of it.
            equals = those_at(least, kept, waiting)
        else:
            everywhere = pending_loads(workers)
            floor = min(everywhere)
            _, equals = self._cheapest_having(workers, sticky, request, everywhere, floor)
        return self._lightest(equals, load, request), "affinity"

    def consider(
        self,
        workers: "tuple[Worker, ...]",
        load: "Callable[[Worker], int]",
        request: "InferenceRequest",
    ) -> "Consideration":
        """Return the next pick; the scores are the tokens to compute, this prompt's with those that wait.

        >>> from pointsman.domain.prefix_index import PrefixIndex
        >>> from pointsman.domain.request import InferenceRequest
        >>> from pointsman.domain.worker import Worker, load_of
        >>> policy = StickyUntilSaturated(PrefixIndex(1024, 60.0))
        >>> fleet = tuple(Worker(name, model="m", http_address="127.0.0.1:8001") for name in "ab")
        >>> request = InferenceRequest.of_blocks("m", "r1", (7, 8), 1024, 512)
        >>> policy.placed(fleet[1], request, 1.0).ended()
        >>> policy.consider(fleet, load_of, request).scores
        (1024.0, 0.0)
        """
        depths = dict(self.index.match(request.blocks, workers))
        waiting = pending_loads(workers)
        costs = [
            tokens + request.prompt_tokens - cached_tokens(request, depths.get(worker, 0))
            for worker, tokens in zip(workers, waiting, strict=True)
        ]
        rule = (
            f"the fewest tokens to compute win, among those that have {self._sticky_score:.0%} of the prompt "
            f"unless {self._gap:.0f} more wait there than elsewhere"
        )
        return self._consider(workers, self.pick(workers, load, request), costs, request, rule)
