"""vllm-router: the flags of its command line."""

import re
from collections.abc import Sequence

from pointsman.migrate.draft import Draft
from pointsman.migrate.flags import Flags
from pointsman.migrate.routers import NO_WASM, RANKS, ROUTER_FLAGS, Engines, draft_router
from pointsman.migrate.rules import Item, Rule, made, none, text

__all__ = ["VLLM_FLAGS", "VLLM_PROGRAM", "from_vllm_router"]

VLLM_PROGRAM = re.compile(r"\bvllm[-_]router\b")
"""The word of a command that starts it, or its image."""

NO_EVENTS = "engines' KV events are not followed"

VLLM_FLAGS: dict[str, Rule] = {
    **ROUTER_FLAGS,
    "--vllm-pd-disaggregation": made(
        "[[gateway.routes]]", 'a route by model id with targets = ["disaggregated"]; see --model'
    ),
    "--kv-connector": made("connector", "`nixl` and `mooncake`; a note for `moriio`"),
    "--vllm-discovery-address": none(
        "engines do not register over ZMQ: list them, or let `pointsman agent` beside them say where they are"
    ),
    "--intra-node-data-parallel-size": made("", f"{RANKS}; a note unless it is 1"),
    "--router-temperature": none(NO_EVENTS),
    "--kv-*": none(NO_EVENTS),
    "--pd-kv-events": none(NO_EVENTS),
    "--wasm-*": none(NO_WASM),
    "--enable-program-scheduling": none("requests of one program are not scheduled together"),
    "--program-scheduling-config-json": none("requests of one program are not scheduled together"),
}


def from_vllm_router(items: Sequence[Item], *, model: str = "") -> Draft:
    """Return the configuration for the flags of a vllm-router.

    `model` is the id that prefill and decode workers serve. Raises Unreadable.
    """
    draft, flags = Draft("vllm-router"), Flags(items)
    connector = text(flags.one("--kv-connector", "nixl"))
    if connector not in ("nixl", "mooncake"):
        draft.note("--kv-connector", f"hand-offs by {connector} are not known; written as nixl")
        connector = "nixl"
    if flags.one("--intra-node-data-parallel-size", "1").value != "1":
        draft.note("--intra-node-data-parallel-size", RANKS)
    together = "--vllm-pd-disaggregation"
    engines = Engines("vllm", connector, together if together in flags else "")
    draft_router(draft, VLLM_FLAGS, flags, engines, host="127.0.0.1", model=model)
    return draft
