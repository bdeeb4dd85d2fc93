"""How a worker is picked: the contract of a policy, and the table of policies by name.

A policy is one synchronous function over an immutable tuple. It may keep counters of its own; it may not sleep, log, do
I/O, or change a worker. What a worker's load is comes in as a function, so a new measure of load is no new policy.

A policy may also say what it thinks, for explanations: see `pointsman.domain.policy.consideration`. What an explanation
calls it is its attribute `name`, else the name of its class.

To write one, see docs/policies.md; to test it, `pointsman.testing.policies.check_policy`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Literal, Protocol

from pointsman.domain.policy.affinity import Affinity
from pointsman.domain.policy.cache_aware import CacheAware
from pointsman.domain.policy.kv_cost import KvCost
from pointsman.domain.policy.least_delay import LeastDelay
from pointsman.domain.policy.least_outstanding import LeastOutstanding
from pointsman.domain.policy.least_tokens import LeastTokens
from pointsman.domain.policy.peak_ewma import PeakEwma
from pointsman.domain.policy.power_of_two import PowerOfTwo
from pointsman.domain.policy.prefix_hash import PrefixHash
from pointsman.domain.policy.sticky_until_saturated import StickyUntilSaturated
from pointsman.domain.policy.weighted import Weighted
from pointsman.domain.prefix_index import PrefixIndex
from pointsman.domain.ring import hash64

if TYPE_CHECKING:
    from pointsman.domain.request import InferenceRequest
    from pointsman.domain.worker import Worker

__all__ = [
    "ENTRY_POINTS",
    "POLICIES",
    "Policy",
    "PolicyFactory",
    "PolicyOptions",
    "RandomSource",
    "asks_index",
    "make_policy",
]

ENTRY_POINTS = "pointsman.policies"
"""The entry-point group in which installed packages offer policies: name = "module:factory"."""


class Policy(Protocol):
    """A choice among workers that can all serve the request."""

    def pick(
        self,
        workers: "tuple[Worker, ...]",
        load: "Callable[[Worker], int]",
        request: "InferenceRequest",
    ) -> "tuple[Worker, str]":
        """Return one of `workers` (not empty, sorted by id, never changed) and a one-word reason.

        The same tuple object comes back from request to request while the fleet stays the same, so what was derived
        from it can be kept by identity. On a retry it lacks the workers that failed. `load` counts the requests a
        worker holds, without the one being placed.
        """
        ...


def asks_index(policy: Policy) -> bool:
    """Tell whether a policy asks a prefix index: those have it as their attribute `index`.

    >>> from random import Random
    >>> [asks_index(make_policy(name, PolicyOptions(), Random(1))) for name in ("kv_cost", "weighted")]
    [True, False]
    """
    return isinstance(getattr(policy, "index", None), PrefixIndex)


class RandomSource(Protocol):
    """Where a policy gets its randomness: `random.Random` is one."""

    def random(self) -> float:
        """Return a number drawn uniformly from [0, 1)."""
        ...


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """What the configuration says to every policy.

    `load_factor` is c of bounded loads (1 or more). With `tie_break` "smallest" equal workers go to the smallest id;
    with "salted" the order among equals is drawn from `salt`, so that each gateway process has its own.

    `prefix_index` is what policies ask for cached prefixes; None for one of their own, of at most
    `prefix_index_blocks_max` blocks that are believed for `prefix_index_ttl_s` seconds. `ttft_target_s` is when a first
    token is late, in seconds. All others are the constants of
    one policy each, with the defaults of those who invented it; the module of the policy says what they mean.
    """

    load_factor: float = 1.25
    tie_break: Literal["smallest", "salted"] = "smallest"
    salt: bytes = b""
    prefix_index: PrefixIndex | None = None
    prefix_index_blocks_max: int = 262_144
    prefix_index_ttl_s: float = 3600.0
    ttft_target_s: float = 2.0
    cache_threshold: float = 0.3
    balance_abs: int = 64
    balance_rel: float = 1.5
    load_margin: int = 10
    prefix_tokens: int = 256
    prefill_load_scale: float = 1.0
    sticky_score: float = 0.8
    prefill_tokens_per_s: float = 15_928.0
    ttft_penalty_s: float = 18.0
    tokens_per_s: float = 2000.0
    decay_s: float = 10.0

    def index(self) -> PrefixIndex:
        """Return the index to ask.

        >>> len(PolicyOptions().index())
        0
        """
        given = self.prefix_index
        if given is not None:
            return given
        return PrefixIndex(self.prefix_index_blocks_max, self.prefix_index_ttl_s)

    def rank(self) -> Callable[[str], int] | None:
        """Return the order among equal workers, as a key by worker id; None for the order of the ids themselves.

        >>> rank = PolicyOptions(tie_break="salted", salt=b"1").rank()
        >>> min(["a", "b", "c"], key=rank)
        'b'
        """
        if self.tie_break == "smallest":
            return None
        salt = self.salt

        @lru_cache(maxsize=8192)
        def rank(worker_id: str) -> int:
            return hash64(salt + worker_id.encode())

        return rank


PolicyFactory = Callable[[PolicyOptions, RandomSource], Policy]

POLICIES: Mapping[str, PolicyFactory] = {
    "affinity": lambda options, random: Affinity(options.load_factor),
    "cache_aware": lambda options, random: CacheAware(
        options.index(),
        cache_threshold=options.cache_threshold,
        balance_abs=options.balance_abs,
        balance_rel=options.balance_rel,
        rank=options.rank(),
    ),
    "kv_cost": lambda options, random: KvCost(
        options.index(), prefill_load_scale=options.prefill_load_scale, rank=options.rank()
    ),
    "least_delay": lambda options, random: LeastDelay(
        options.index(), random, ttft_target_s=options.ttft_target_s, rank=options.rank()
    ),
    "least_outstanding": lambda options, random: LeastOutstanding(options.rank()),
    "least_tokens": lambda options, random: LeastTokens(options.tokens_per_s, options.rank()),
    "peak_ewma": lambda options, random: PeakEwma(random, options.decay_s),
    "power_of_two": lambda options, random: PowerOfTwo(random),
    "prefix_hash": lambda options, random: PrefixHash(
        options.load_factor,
        load_margin=options.load_margin,
        prefix_tokens=options.prefix_tokens,
    ),
    "sticky_until_saturated": lambda options, random: StickyUntilSaturated(
        options.index(),
        sticky_score=options.sticky_score,
        prefill_tokens_per_s=options.prefill_tokens_per_s,
        ttft_penalty_s=options.ttft_penalty_s,
        rank=options.rank(),
    ),
    "weighted": lambda options, random: Weighted(options.rank()),
}


def make_policy(name: str, options: PolicyOptions, random: RandomSource) -> Policy:
    """Build the policy `name`: one of `POLICIES`, else one that an installed package offers.

    Raises `ValueError` for a name that nobody offers; the message has the nearest one.

    >>> from random import Random
    >>> make_policy("afinity", PolicyOptions(), Random(1))
    Traceback (most recent call last):
    ValueError: no policy is called 'afinity', did you mean 'affinity'?
    """
    factory = POLICIES.get(name)
    if factory is not None:
        return factory(options, random)
    offered = {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}
    if name in offered:
        made: Policy = offered[name].load()(options, random)
        return made
    names = sorted({*POLICIES, *offered})
    close = get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(names)}"
    raise ValueError(f"no policy is called {name!r}, {hint}")
