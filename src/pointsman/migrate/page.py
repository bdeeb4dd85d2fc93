"""The tables of the page about migrating: what becomes of every key and flag that is known."""

from collections.abc import Mapping

from pointsman.migrate.litellm import LITELLM_KEYS
from pointsman.migrate.policies import POLICIES
from pointsman.migrate.production_stack import STACK_FLAGS, STACK_VALUES
from pointsman.migrate.rules import Rule, table_of
from pointsman.migrate.sglang_router import SGLANG_FLAGS
from pointsman.migrate.vllm_router import VLLM_FLAGS

__all__ = ["RULES", "migration_tables"]

RULES: dict[str, Mapping[str, Rule]] = {
    "LiteLLM": LITELLM_KEYS,
    "vllm-router": VLLM_FLAGS,
    "sglang-router and SMG": SGLANG_FLAGS,
    "production-stack: flags and dynamic configuration": STACK_FLAGS,
    "production-stack: values of the Helm chart": STACK_VALUES,
}
"""Every table of rules, by the heading of the page."""


def migration_tables() -> str:
    """Return a section with a table for each source, and one for the policies."""
    sections = [f"## {name}\n\n{table_of(rules)}" for name, rules in RULES.items()]
    lines = ["## Policies\n", "| theirs | ours | what differs |", "| --- | --- | --- |"]
    for theirs, choice in POLICIES.items():
        why = choice.why or ("with `capacity = 1` for every worker" if choice.even else "")
        lines.append(f"| `{theirs}` | `{choice.policy}` | {why} |")
    return "\n".join([*sections, *lines]) + "\n"
