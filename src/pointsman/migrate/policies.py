"""Which of our policies stands for theirs. The page about policies says what ours do."""

from typing import NamedTuple

from pointsman.migrate.draft import Draft
from pointsman.migrate.rules import Item, text

__all__ = ["POLICIES", "Choice", "choose"]


class Choice(NamedTuple):
    """Our policy, what differs ("" for nothing), and whether all workers are given the same weight."""

    policy: str
    why: str = ""
    even: bool = False


THEIRS = "its thresholds are theirs by default, and cannot be set"
HEADER = (
    "requests are kept together by the beginning of the prompt, not by a header; "
    "conversations keep their worker, since their turns begin alike"
)

POLICIES = {
    "round_robin": Choice("weighted", even=True),
    "roundrobin": Choice("weighted", even=True),
    "simple_shuffle": Choice(
        "weighted", "the same shares, in turns instead of by chance", even=True
    ),
    "random": Choice("power_of_two", "of two random workers the less loaded one is taken"),
    "power_of_two": Choice("power_of_two"),
    "cache_aware": Choice("cache_aware", THEIRS),
    "prefix_hash": Choice("prefix_hash", "the hash is over bytes of the prompt, not over tokens"),
    "prefixaware": Choice("cache_aware", "loads count too, where one worker has many more"),
    "kv_aware": Choice("kv_cost", "what is cached where is known from routing"),
    "kvaware": Choice(
        "kv_cost", "LMCache is not asked; what is cached where is known from routing"
    ),
    "consistent_hash": Choice("affinity", HEADER),
    "consistent_hashing": Choice("affinity", HEADER),
    "sticky_least_loaded": Choice("affinity", HEADER),
    "session": Choice("affinity", HEADER),
    "manual": Choice("affinity", HEADER),
    "least_load": Choice("least_tokens", THEIRS),
    "least_busy": Choice("least_outstanding"),
    "disaggregated_prefill": Choice(
        "affinity", "it picks the decode worker; the prefill worker is the least loaded"
    ),
    "usage_based_routing": Choice(
        "least_outstanding", "by requests in flight and waiting, not by tokens per minute"
    ),
    "usage_based_routing_v2": Choice(
        "least_outstanding", "by requests in flight and waiting, not by tokens per minute"
    ),
    "latency_based_routing": Choice(
        "peak_ewma", "of two random workers the one with the lower latency times load is taken"
    ),
    "cost_based_routing": Choice(
        "least_outstanding", "costs are not known; by requests in flight and waiting"
    ),
}
"""Their names, with `_` for `-`."""


def choose(draft: Draft, item: Item) -> None:
    """Write the policy that stands for theirs. Raises Unreadable where it is no name."""
    theirs = text(item)
    found = POLICIES.get(theirs.replace("-", "_"))
    if found is None:
        draft.note(
            item.name, f"the policy {theirs} has no counterpart; ours is the default, affinity"
        )
        return
    if found.why:
        draft.note(item.name, f"{theirs} becomes {found.policy}: {found.why}", above="route_policy")
    draft.gateway.put("route_policy", found.policy)
    if found.even:
        draft.each("capacity", 1)
