"""Consistent hashing of a longer beginning with a looser bound: the prefix_hash of SMG.

    key  = the first prefix_tokens tokens of the prompt (256), in whole blocks
    walk clockwise past workers whose load > load_factor x mean load + load_margin       (1.25, 10)

It is `affinity` with another key and another cap. The margin lets a quiet fleet stay sticky: with 4 workers and nothing
else going on, the owner takes 15 requests before the next worker gets one (10 + 1.25 x 14 / 4 = 14.4).

Source: prefix_hash of SMG 1.13, formula and defaults. Theirs hashes 256 tokens, or 1,024 characters over HTTP.
"""

import math
from typing import TYPE_CHECKING, ClassVar

from pointsman.domain.policy.affinity import Affinity

if TYPE_CHECKING:
    from pointsman.domain.request import InferenceRequest

__all__ = ["PrefixHash"]


class PrefixHash(Affinity):
    """The ring with `load_factor` (less than 1 counts as 1), `load_margin` requests, and a key of `prefix_tokens`.

    >>> from pointsman.domain.request import InferenceRequest
    >>> from pointsman.domain.worker import Worker, load_of
    >>> fleet = tuple(Worker(name, model="m", http_address="127.0.0.1:8001") for name in "abcd")
    >>> request = InferenceRequest("m", "r1", prompt=b'"once"')
    >>> fleet[3].in_flight = 14
    >>> PrefixHash().pick(fleet, load_of, request)
    (<Worker d unified m routable load 14>, 'affinity')
    >>> fleet[3].in_flight = 15
    >>> PrefixHash().pick(fleet, load_of, request)
    (<Worker a unified m routable load 0>, 'load')
    """

    __slots__ = ("_load_margin", "_prefix_tokens")

    name: ClassVar[str] = "prefix_hash"

    def __init__(
        self, load_factor: float = 1.25, *, load_margin: int = 10, prefix_tokens: int = 256
    ) -> None:
        super().__init__(load_factor)
        self._load_margin = load_margin
        self._prefix_tokens = prefix_tokens

    def _key_of(self, request: "InferenceRequest") -> bytes:
        blocks = request.blocks
        if not blocks:
            return request.prefix_key
        # A block's hash covers all before it, so the last one stands for all of them.
        count = max(self._prefix_tokens // request.block_tokens, 1)
        return b"%d" % blocks[min(count, len(blocks)) - 1]

    def _cap_of(self, total: int, n: int) -> int:
        return math.floor(max(self._load_factor, 1.0) * total / n + self._load_margin) + 1
