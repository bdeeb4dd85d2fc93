"""What vllm-router and sglang-router have in common: one is a fork of the other, and so are most of their flags."""

import re
from collections.abc import Mapping
from typing import NamedTuple

from pointsman.migrate.draft import Draft, Table
from pointsman.migrate.flags import Flags
from pointsman.migrate.listening import address_of, listen
from pointsman.migrate.policies import choose
from pointsman.migrate.rules import (
    Item,
    Rule,
    apply,
    made,
    moot,
    near,
    none,
    number,
    place,
    same,
    text,
    whole,
)

__all__ = [
    "NO_QUEUE",
    "NO_TREE",
    "NO_WASM",
    "RANKS",
    "ROUTER_FLAGS",
    "Engines",
    "draft_router",
    "log_level",
]

NO_WASM = (
    "there is no WebAssembly; an ASGI application can be mounted, a policy can be a Python package"
)
RANKS = "an engine spreads requests over its own data-parallel ranks"
NO_WAITING = "a request goes to another worker at once; there is no waiting between attempts"
NO_BREAKER = "there is no circuit breaker: polling takes a failing worker out, and a request never meets one twice"
NO_TREE = "cache_aware has their defaults; how much its index holds is prefix_index_blocks_max"
NO_MODEL = (
    "a hand-off needs a route by the id of the model, which the flags do not say: "
    "import again with --model ID before them"
)
NO_QUEUE = "the gateway has no queue and no limit of requests in flight; engines queue"
BY_POLLING = "the gateway starts without its workers and polls them"


def log_level(item: Item) -> str:
    """Read a log level; those beyond ours become the nearest one. Raises Unreadable for what is no string."""
    read = text(item).lower()
    return {"warn": "warning", "critical": "error", "trace": "debug"}.get(read, read)


def _attempts(item: Item) -> int:
    return max(1, whole(item))


ROUTER_FLAGS: dict[str, Rule] = {
    "--host": made("listen"),
    "--port": made("listen"),
    "--worker-urls": made("[[gateway.workers]]", "their models are read from the engines"),
    "--prefill": made("[[gateway.workers]]", 'with role = "prefill" and its bootstrap_port'),
    "--decode": made("[[gateway.workers]]", 'with role = "decode"'),
    "--policy": made("route_policy", "see the table of policies"),
    "--decode-policy": made(
        "route_policy", "instead of --policy, where prefill and decode are apart"
    ),
    "--prefill-policy": none("of prefill workers the least loaded one is taken"),
    "--mini-lb": none("a balancer for debugging; there is one gateway only"),
    "--api-key": made(
        "api_key_env",
        "the key is not copied: put it into that variable; callers need keys of this gateway",
    ),
    "--service-discovery": made("[[gateway.kubernetes]]"),
    "--selector": made("selector"),
    "--prefill-selector": made("selector", 'in a table with role = "prefill"'),
    "--decode-selector": made("selector", 'in a table with role = "decode"'),
    "--service-discovery-port": made("port"),
    "--service-discovery-namespace": made("namespace", "without it `*`, all of them"),
    "--max-payload-size": same("max_body_bytes", whole),
    "--request-timeout-secs": same("total_timeout_s", number),
    "--retry-max-retries": near(
        "max_attempts",
        _attempts,
        "every attempt goes to another worker, so there are never more than workers",
    ),
    "--disable-retries": made("max_attempts", "as 1"),
    "--retry-*": none(NO_WAITING),
    "--disable-circuit-breaker": moot("there is none"),
    "--cb-*": none(NO_BREAKER),
    "--health-failure-threshold": same("poll_miss_limit", whole),
    "--health-success-threshold": same("poll_hit_limit", whole),
    "--health-check-timeout-secs": same("each.poll_timeout_s", number),
    "--health-check-interval-secs": same(
        "each.poll_interval_s", number, "load is read as often; the default is 2 s"
    ),
    "--health-check-endpoint": made(
        "", "each dialect knows what to ask of its engines; a note unless it is /health"
    ),
    "--cache-threshold": none(NO_TREE),
    "--balance-*": none(NO_TREE),
    "--eviction-interval-secs": none(NO_TREE),
    "--max-tree-size": none(NO_TREE),
    "--max-concurrent-requests": made("", "a note unless it is -1: " + NO_QUEUE),
    "--queue-*": none(NO_QUEUE),
    "--rate-limit-tokens-per-second": none(
        "limits stand in the keys of callers (rpm and tpm, not enforced yet)"
    ),
    "--worker-startup-*": none(BY_POLLING),
    "--enable-igw": moot("one gateway serves any number of models"),
    "--log-dir": none("logs go to stderr"),
    "--log-level": same("log_level", log_level),
    "--prometheus-host": made("health_listen", "with /healthz and /readyz beside /metrics"),
    "--prometheus-port": made("health_listen", "with /healthz and /readyz beside /metrics"),
    "--request-id-headers": made("", "X-Request-Id is the one that is read; a note for any other"),
    "--cors-allowed-origins": none("no CORS headers are sent; a balancer in front can add them"),
}
"""The flags of both."""


class Engines(NamedTuple):
    """What kind of engines a router is in front of.

    `connector` is how they hand KV caches over ("" for the usual way of the dialect), `together` the flag that said
    that prefill and decode workers serve requests together, "" for none.
    """

    dialect: str
    connector: str = ""
    together: str = ""


def draft_router(
    draft: Draft,
    rules: Mapping[str, Rule],
    flags: Flags,
    engines: Engines,
    *,
    host: str,
    model: str,
) -> None:
    """Fill a draft from the flags of a router that listens on `host`:30000 where they do not say.

    `model` is the id that prefill and decode workers serve, "" where nobody said. Raises Unreadable.
    """
    guards = (flag for flag in ("--api-key", "--tenant-api-key") if flag in flags)
    host, port = text(flags.one("--host", host)), whole(flags.one("--port", "30000"))
    listen(draft, host, port, next(guards, ""))
    if "--prometheus-port" in flags or "--prometheus-host" in flags:
        host = text(flags.one("--prometheus-host", "127.0.0.1"))
        health = address_of(host, whole(flags.one("--prometheus-port", "29000")))
        draft.gateway.put("health_listen", str(health))
    apart = bool(engines.together) or "--prefill" in flags
    policy = "--decode-policy" if "--decode-policy" in flags and apart else "--policy"
    if policy in flags:
        choose(draft, flags.one(policy))
    apply(draft, rules, flags)
    if "--disable-retries" in flags:
        draft.gateway.put("max_attempts", 1)
    _said_otherwise(draft, flags)
    if "--api-key" in flags:
        key = flags.one("--api-key")
        draft.each("api_key_env", draft.variable(key.name, str(key.value)))
    _workers(draft, flags, engines)
    _kubernetes(draft, flags, engines)
    if apart:
        _disaggregated(draft, model, engines.together or "--prefill")


def _said_otherwise(draft: Draft, flags: Flags) -> None:
    """Note the flags that mean nothing at their usual value."""
    endpoint = flags.one("--health-check-endpoint", "/health")
    if endpoint.value != "/health":
        draft.note(endpoint.name, "each dialect knows what to ask of its engines")
    limit = flags.one("--max-concurrent-requests", "-1")
    if limit.value != "-1":
        draft.note(limit.name, NO_QUEUE)
    for header in flags.words("--request-id-headers"):
        if text(header).lower() != "x-request-id":
            draft.note(header.name, f"{text(header)} is not read; X-Request-Id is")


def _worker(draft: Draft, item: Item, engines: Engines, role: str = "") -> Table | None:
    url = text(item)
    address, at, rank = url.rpartition("@")
    if at and rank.isdigit():
        draft.note(item.name, f"{url}: {RANKS}")
        item = item._replace(value=address)
    if re.match(r"(?!https?:)[a-z]+://", url):
        draft.note(item.name, f"{url} is left out: engines are spoken to over http and https only")
        return None
    table = draft.worker(place(item))
    _describe(table, engines, role)
    return table


def _workers(draft: Draft, flags: Flags, engines: Engines) -> None:
    for item in flags.words("--worker-urls"):
        if item.value is not True:
            _worker(draft, item, engines)
    for item in flags.all("--prefill"):
        url, *port = item.value if isinstance(item.value, list) else [item.value]
        table = _worker(draft, item._replace(value=url), engines, "prefill")
        if table is not None and port and str(port[0]).lower() != "none":
            table.put("bootstrap_port", whole(item._replace(value=port[0])))
    for item in flags.words("--decode"):
        _worker(draft, item, engines, "decode")


def _kubernetes(draft: Draft, flags: Flags, engines: Engines) -> None:
    provider = flags.one("--discovery-provider").value
    wanted = "--service-discovery" in flags or provider == "kubernetes"
    roles = {"--selector": "", "--prefill-selector": "prefill", "--decode-selector": "decode"}
    for flag, role in roles.items():
        words = [word for item in flags.words(flag) for word in text(item).split()]
        if words and not wanted:
            draft.note(flag, "without --service-discovery it has no effect, there or here")
        elif words:
            table = draft.engines("[[gateway.kubernetes]]")
            table.put("namespace", text(flags.one("--service-discovery-namespace", "*")))
            table.put("selector", ",".join(words))
            table.put("port", whole(flags.one("--service-discovery-port", "80")))
            _describe(table, engines, role)


def _describe(table: Table, engines: Engines, role: str) -> None:
    table.put("dialect", engines.dialect)
    if role:
        table.put("role", role)
        if engines.connector:
            table.put("connector", engines.connector)


def _disaggregated(draft: Draft, model: str, flag: str) -> None:
    if not model:
        draft.note(flag, NO_MODEL)
    else:
        draft.route(model).put("targets", ["disaggregated"])
