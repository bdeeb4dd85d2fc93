"""Whether to hand a prompt off, and to which prefill worker: the way that costs the fewest seconds.

The policy picks a decode worker and, where the route has such a target, a unified one, as ever: it keeps caches warm
and loads even. What is left to decide are three ways to the first token:

    handed off   max(compute at P + handoff_s + lacks at D / transfer_tokens_per_s, pending at D)
    D alone      compute at D + stall x others at D x lacks at D / prefill_tokens_per_s
    unified      the same at the unified worker

    compute = (pending + lacks) / prefill_tokens_per_s

`pending` are the tokens that wait at a worker for their first byte, and `lacks` is what the prefix index does not have
of this prompt there. P is the prefill worker with the least to compute, of those that the decode worker can take a
prompt from. `others` is who is being answered there: each of them waits as long as a prompt is computed, and `stall`
says what a second of theirs weighs against one of the request's own. It is why prompts are handed off at all, so
without it a decode worker would compute whatever it could begin with first.

A way that is not quicker than a simpler one is not taken: of equals the first in the order of the route's targets wins,
and a worker alone before a pair.

What it does not do: measure speeds. They are configured, and so is the same for all workers.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct

from pointsman.domain.policy.prefix_aware import PrefixAware
from pointsman.domain.policy.tokens import pending_loads
from pointsman.domain.worker import Worker, load_of

if TYPE_CHECKING:
    from pointsman.domain.prefix_index import PrefixIndex
    from pointsman.domain.request import InferenceRequest

__all__ = ["Pairing", "PairingOptions", "Way", "best_of"]


class PairingOptions(Struct, frozen=True, kw_only=True):
    """What hand-offs cost: `handoff_s` (0 or more) seconds each, and tokens per second (above 0) of both sides.

    `stall` (0 or more) is what a second weighs that somebody waits who is being answered.
    """

    prefill_tokens_per_s: float = 8000.0
    transfer_tokens_per_s: float = 100_000.0
    handoff_s: float = 0.01
    stall: float = 0.2


class Way(NamedTuple):
    """One way to answer a request: by `worker`, which gets the prompt from `prefill`, None where it computes that too.

    `seconds` is what it costs.
    """

    worker: Worker
    prefill: Worker | None
    seconds: float


class Pairing(PrefixAware):
    """The rule, and what of prompts is cached where. Where the policy keeps account of prompts, this does not.

    >>> from pointsman.domain.prefix_index import PrefixIndex
    >>> from pointsman.domain.request import InferenceRequest
    >>> pairing = Pairing(PrefixIndex(1024, 60.0), PairingOptions())
    >>> p, q, d = (Worker(name, model="m", http_address="127.0.0.1:8001") for name in "pqd")
    >>> p.pending_tokens, d.in_flight = 4000, 10
    >>> request = InferenceRequest.of_blocks("m", "r1", (7, 8), 1000, 500)
    >>> [(way.prefill, round(way.seconds, 3)) for way in pairing.ways(request, [(d, (p, q))])]
    [(None, 0.375), (<Worker q unified m routable load 0>, 0.145)]
    >>> pairing.placed(d, request, 1.0).ended()
    >>> [round(way.seconds, 4) for way in pairing.ways(request, [(d, (p, q))])]
    [0.0004, 0.135]
    """

    __slots__ = ("options",)

    def __init__(self, index: "PrefixIndex", options: PairingOptions) -> None:
        super().__init__(index)
        self.options = options

    def ways(
        self, request: "InferenceRequest", asked: Sequence[tuple[Worker, tuple[Worker, ...]]]
    ) -> list[Way]:
        """Return what each way costs: each worker alone, and with the best of the prefill workers beside it, if any."""
        options = self.options
        found = []
        for worker, prefills in asked:
            lacks = self._lacks(request, worker)
            alone = lacks / options.prefill_tokens_per_s
            waits = pending_loads((worker,))[0] / options.prefill_tokens_per_s
            others = max(worker.in_flight, worker.running)
            found.append(Way(worker, None, waits + alone * (1.0 + options.stall * others)))
            if prefills:
                prefill = self._quickest(request, prefills)
                ready = self.prefill_s(request, prefill)
                ready += options.handoff_s + lacks / options.transfer_tokens_per_s
                found.append(Way(worker, prefill, max(ready, waits)))
        return found

    def prefill_s(self, request: "InferenceRequest", worker: Worker) -> float:
        """Return in how many seconds a prefill worker would have computed a prompt."""
        tokens = pending_loads((worker,))[0] + self._lacks(request, worker)
        return tokens / self.options.prefill_tokens_per_s

    def _quickest(self, request: "InferenceRequest", prefills: tuple[Worker, ...]) -> Worker:
        reached = self.index.reached(request.blocks, prefills)
        return self._cheapest(prefills, reached, load_of, request, pending_loads(prefills))[0]

    def _lacks(self, request: "InferenceRequest", worker: Worker) -> int:
        """Return how many tokens a worker would have to compute. The last one always is."""
        return max(request.prompt_tokens - self._cached(request, worker), 1)


def best_of(ways: Sequence[Way]) -> Way:
    """Return the way that costs the least, the first of equals."""
    return min(ways, key=lambda way: way.seconds)
