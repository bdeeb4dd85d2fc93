"""sglang-router, also called SGLang Model Gateway and SMG: the flags of its command line."""

import re
from collections.abc import Sequence

from pointsman.migrate.draft import Draft, Unreadable
from pointsman.migrate.flags import Flags
from pointsman.migrate.routers import (
    NO_QUEUE,
    NO_TREE,
    NO_WASM,
    RANKS,
    ROUTER_FLAGS,
    Engines,
    draft_router,
)
from pointsman.migrate.rules import Item, Rule, made, moot, near, none, number, same, text

__all__ = ["SGLANG_FLAGS", "SGLANG_PROGRAM", "from_sglang_router"]

SGLANG_PROGRAM = re.compile(r"\b(sglang[-_]router|sgl-router|sgl-model-gateway|smg|amg)\b")
"""The word of a command that starts it, or its image."""

NOT_TOKENIZED = (
    "the gateway passes text on as it is: engines tokenize, render templates and parse answers"
)
NO_HISTORY = "nothing of a conversation is stored"
NO_ADMIN_LOGIN = "the admin API takes keys of this gateway with the scope admin: `pointsman keys create --scope admin`"
NO_SHEDDING = "loads are compared by the policy; no worker is shut out for its load"
NO_MESH = "gateways share no state: several of them agree without talking"
NO_MEDIA = "images and sounds are passed on to the engine as they came"
NO_ENCODERS = "there is no role of encoders; engines encode"
BUCKETS = "prompts are not sorted by length"

CONNECTORS = {"sglang": "bootstrap", "vllm": "nixl", "openai": ""}
"""Our dialects for its backends, and how their engines hand KV caches over."""

SGLANG_FLAGS: dict[str, Rule] = {
    **ROUTER_FLAGS,
    "--pd-disaggregation": made(
        "[[gateway.routes]]", 'a route by model id with targets = ["disaggregated"]; see --model'
    ),
    "--backend": made("dialect", "`sglang`, `vllm`, `openai`; a note for others"),
    "--model": made("[[gateway.routes]]", "the id of the route to prefill and decode workers"),
    "--model-path": made("[[gateway.routes]]", "the same, where there is no --model"),
    "--model-alias": made("aliases", "`alias=model`, as a route"),
    "--dp-aware": none(RANKS),
    "--dp-minimum-tokens-scheduler": none(
        "an engine spreads requests over its own data-parallel ranks"
    ),
    "--shutdown-grace-period-secs": same("drain_deadline_s", number),
    "--client-cert-path": same("upstream_cert", text),
    "--client-key-path": same("upstream_key", text),
    "--ca-cert-paths": made("upstream_ca", "one file; several have to be joined into one"),
    "--tls-cert-path": same("tls_cert", text),
    "--tls-key-path": same("tls_key", text),
    "--enable-trace": made("otel_endpoint"),
    "--otlp-traces-endpoint": made("otel_endpoint", "OTLP over HTTP (port 4318), not over gRPC"),
    "--log-json": moot("log_format is json already"),
    "--discovery-provider": made(
        "[[gateway.worker_files]]", "`file`; `kubernetes` as --service-discovery"
    ),
    "--discovery-file": made("file"),
    "--discovery-check-interval-secs": none("files are watched with an interval of their own"),
    "--upstream-pool-idle-timeout-secs": same("upstream_keepalive_s", number),
    "--header-read-timeout-secs": same("header_timeout_s", number),
    "--idle-connection-timeout-secs": same("keepalive_timeout_s", number),
    "--stream-body-stall-timeout-secs": same("gap_timeout_s", number),
    "--pd-admission-wait-secs": near(
        "prefill_timeout_s", number, "it bounds the whole prefill, its wait in the engine included"
    ),
    "--disable-health-check": none(
        'workers are polled; one of `dialect = ""` and with its `model` given is not'
    ),
    "--health-check-port": none("an engine is asked at the address where it serves"),
    "--assignment-mode": none("there are no assignments that are kept"),
    "--max-idle-secs": none("there are no assignments that are kept"),
    "--bucket-adjust-interval-secs": none(BUCKETS),
    "--prometheus-duration-buckets": none("the buckets of the histograms are fixed"),
    "--tokenizer-*": none(NOT_TOKENIZED),
    "--chat-template": none(NOT_TOKENIZED),
    "--disable-tokenizer-autoload": moot("none is loaded"),
    "--reasoning-parser": none(NOT_TOKENIZED),
    "--tool-call-parser": none(NOT_TOKENIZED),
    "--parser": none(NOT_TOKENIZED),
    "--mcp-config-path": none("tools are called by clients"),
    "--history-*": none(NO_HISTORY),
    "--oracle-*": none(NO_HISTORY),
    "--postgres-*": none(NO_HISTORY),
    "--redis-*": none(NO_HISTORY),
    "--control-plane-*": none(NO_ADMIN_LOGIN),
    "--jwt-*": none(NO_ADMIN_LOGIN),
    "--tenant-api-key": made(
        "keys_file", "callers need keys of this gateway; the old ones are not copied"
    ),
    "--tenant-*": none("limits stand in the keys of callers (rpm and tpm, not enforced yet)"),
    "--trust-tenant-header": none("a caller's tenant is that of its key"),
    **dict.fromkeys(("--cache-*", "--spill-*", "--block-size", "--overlap-decay"), none(NO_TREE)),
    **dict.fromkeys(("--selection-*", "--kv-*"), none("engines' KV events are not followed")),
    **dict.fromkeys(
        ("--sticky-*", "--routing-key-*"),
        none("requests are kept together by the beginning of the prompt, not by a header"),
    ),
    "--prefill-*": none(NO_QUEUE),
    "--priority-scheduler-*": none(NO_QUEUE),
    "--overload-*": none(NO_SHEDDING),
    "--load-monitor-interval": none("load is read every poll_interval_s"),
    "--disable-load-monitoring": none("load is read every poll_interval_s"),
    "--remove-unhealthy-workers": moot("a worker that is gone gets nothing, and is asked again"),
    "--no-remove-unhealthy-workers": moot("it is asked again, and comes back"),
    "--no-worker-auto-recovery": none("a worker that answers again gets requests again"),
    "--worker-auto-recovery": moot("a worker that is gone gets nothing, and is asked again"),
    "--model-id-from": none("models are read from the engines, or from labels of the pods"),
    "--sse-keepalive-secs": none("nothing is put into a stream"),
    "--upstream-http2": none("engines are spoken to over HTTP/1.1"),
    "--enable-wasm": none(NO_WASM),
    "--storage-*": none(NO_HISTORY),
    "--schema-config": none(NO_HISTORY),
    "--max-background-responses": none(NO_HISTORY),
    "--epd-disaggregation": none(NO_ENCODERS),
    "--encode*": none(NO_ENCODERS),
    "--worker-*": none(NO_SHEDDING),
    "--disable-worker-*": moot(NO_SHEDDING),
    "--mesh-*": none(NO_MESH),
    "--enable-mesh": none(NO_MESH),
    "--router-selector": none(NO_MESH),
    "--multimodal-*": none(NO_MEDIA),
    "--mm-*": none(NO_MEDIA),
    "--prefix-*": none("the beginning is 256 tokens long; its imbalance is affinity_load_factor"),
    "--least-load-*": none("load counts requests, in flight and waiting"),
    "--power-of-two-load-metric": none("load counts requests, in flight and waiting"),
}


def from_sglang_router(items: Sequence[Item], *, model: str = "") -> Draft:
    """Return the configuration for the flags of an sglang-router or SMG.

    `model` is the id that prefill and decode workers serve, where the flags do not say. Raises Unreadable.
    """
    draft, flags = Draft("sglang-router"), Flags(items)
    dialect = text(flags.one("--backend", "sglang"))
    if dialect not in CONNECTORS:
        draft.note(
            "--backend", f"there is no dialect for {dialect}; workers find out what they are"
        )
        dialect = "auto"
    said = [text(flags.one(flag)) for flag in ("--model", "--model-path") if flag in flags]
    together = "--pd-disaggregation"
    engines = Engines(
        dialect,
        connector=CONNECTORS.get(dialect, ""),
        together=together if together in flags else "",
    )
    draft_router(
        draft, SGLANG_FLAGS, flags, engines, host="0.0.0.0", model=model or next(iter(said), "")
    )
    if dialect == "vllm" and any(table.values.get("connector") for table in draft.engine_tables):
        draft.note("--backend", "hand-offs are asked for as vLLM's NIXL connector understands them")
    _authorities(draft, flags)
    _tracing(draft, flags)
    _discovery_file(draft, flags, engines)
    _aliases(draft, flags)
    return draft


def _authorities(draft: Draft, flags: Flags) -> None:
    files = [text(item) for item in flags.words("--ca-cert-paths")]
    if files:
        draft.gateway.put("upstream_ca", files[0])
    if len(files) > 1:
        why = f"one file is read: join {', '.join(files)} into it"
        draft.note("--ca-cert-paths", why, above="upstream_ca")


def _tracing(draft: Draft, flags: Flags) -> None:
    if "--enable-trace" not in flags:
        return
    endpoint = text(flags.one("--otlp-traces-endpoint", "localhost:4317"))
    host = endpoint.rpartition("://")[2].rpartition(":")[0]
    why = "spans are sent as OTLP over HTTP, usually to port 4318, and not over gRPC"
    draft.note("--enable-trace", why, above="otel_endpoint")
    draft.gateway.put("otel_endpoint", f"http://{host}:4318")


def _discovery_file(draft: Draft, flags: Flags, engines: Engines) -> None:
    if "--discovery-file" in flags:
        table = draft.engines("[[gateway.worker_files]]")
        table.put("file", text(flags.one("--discovery-file")))
        table.put("dialect", engines.dialect)


def _aliases(draft: Draft, flags: Flags) -> None:
    models: dict[str, list[str]] = {}
    for item in flags.words("--model-alias"):
        alias, equals, model = text(item).partition("=")
        if not equals:
            raise Unreadable(f"{item.name}: expected alias=model, not {alias!r}")
        models.setdefault(model, []).append(alias)
    for model, aliases in models.items():
        draft.route(model).put("aliases", aliases)
