"""The longest cached prefix while the fleet is balanced, else the least loaded: the classic policy of SGLang's router.

    imbalanced = (max load - min load) > balance_abs and max load > balance_rel x min load
    imbalanced                               -> the least loaded
    matched / prompt > cache_threshold       -> the worker that has most of the prompt
    otherwise                                -> the least loaded

Theirs keeps a radix tree of characters for each worker; here it is the prefix index, so matches are whole blocks. Older
versions sent a miss to the worker of the smallest tree, even if that was the busiest: here a miss goes by load, as in
theirs of today.

Source: cache_aware of sglang-router 0.3.2 and SMG 1.13, with their defaults (0.3, 64, 1.5).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from pointsman.domain.policy.prefix_aware import PrefixAware, cached_tokens
from pointsman.domain.policy.tokens import lightest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pointsman.domain.policy.consideration import Consideration
    from pointsman.domain.prefix_index import PrefixIndex
    from pointsman.domain.request import InferenceRequest
    from pointsman.domain.worker import Worker

__all__ = ["CacheAware"]


class CacheAware(PrefixAware):
    """Affinity above a `cache_threshold` (0 to 1), given up above `balance_abs` requests and `balance_rel` times."""

    __slots__ = ("_balance_abs", "_balance_rel", "_threshold")

    name: ClassVar[str] = "cache_aware"

    def __init__(
        self,
        index: "PrefixIndex",
        *,
        cache_threshold: float = 0.3,
        balance_abs: int = 64,
        balance_rel: float = 1.5,
        rank: Callable[[str], int] | None = None,
    ) -> None:
        super().__init__(index, rank)
        self._threshold = cache_threshold
        self._balance_abs = balance_abs
        self._balance_rel = balance_rel

    def pick(
        self,
        workers: "tuple[Worker, ...]",
        load: "Callable[[Worker], int]",
        request: "InferenceRequest",
    ) -> "tuple[Worker, str]":
        """Return the worker that has most of the prompt, reason `affinity`, or the least loaded, reason `load`.

        >>> from pointsman.domain.prefix_index import PrefixIndex
        >>> from pointsman.domain.request import InferenceRequest
        >>> from pointsman.domain.worker import Worker, load_of
        >>> policy = CacheAware(PrefixIndex(1024, 60.0))
        >>> fleet = tuple(Worker(name, model="m", http_address="127.0.0.1:8001") for name in "ab")
        >>> request = InferenceRequest.of_blocks("m", "r1", (7, 8), 1024, 512)
        >>> policy.placed(fleet[1], request, 1.0).ended()
        >>> policy.pick(fleet, load_of, request)
        (<Worker b unified m routable load 0>, 'affinity')
        >>> fleet[1].in_flight = 65
        >>> policy.pick(fleet, load_of, request)
        (<Worker a unified m routable load 0>, 'load')
        """
        loads = list(map(load, workers))
        reached = self.index.reached(request.blocks, workers)
        if reached:
            depth, deepest = reached[0]
            enough = cached_tokens(request, depth) > self._threshold * request.prompt_tokens
            if enough and not self._is_imbalanced(loads):
                _, equals = lightest(deepest.workers, deepest.of(loads))
                return self._least.first(equals), "affinity"
        return self._least.first(lightest(workers, loads)[1]), "load"

    def consider(
        self,
        workers: "tuple[Worker, ...]",
        load: "Callable[[Worker], int]",
        request: "InferenceRequest",
    ) -> "Consideration":
        """Return the next pick; the scores are the loads.

        >>> from pointsman.domain.prefix_index import PrefixIndex
        >>> from pointsman.domain.request import InferenceRequest
        >>> from pointsman.domain.worker import Worker, load_of
        >>> policy = CacheAware(PrefixIndex(1024, 60.0))
        >>> fleet = tuple(Worker(name, model="m", http_address="127.0.0.1:8001") for name in "ab")
        >>> fleet[0].in_flight = 65
        >>> policy.consider(fleet, load_of, InferenceRequest("m", "r1")).rule
        'imbalanced, so the lowest load wins; the lowest load, then the smallest id, among equals'
        """
        loads = list(map(load, workers))
        rule = (
            f"the most of the prompt wins above {self._threshold:.0%} of it, else the lowest load"
        )
        if self._is_imbalanced(loads):
            rule = "imbalanced, so the lowest load wins"
        return self._consider(workers, self.pick(workers, load, request), loads, request, rule)

    def _is_imbalanced(self, loads: "Sequence[int]") -> bool:
        most, least = max(loads), min(loads)
        return most - least > self._balance_abs and most > self._balance_rel * least
