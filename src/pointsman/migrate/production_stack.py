"""vLLM's production-stack: the flags of its router, its dynamic configuration, and the values of its Helm chart.

What the chart says about deployments (images, replicas, volumes) stays with the chart.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pointsman.migrate.documents import items_of
from pointsman.migrate.draft import Draft, Table, Unreadable
from pointsman.migrate.flags import Flags, flag_items
from pointsman.migrate.listening import listen
from pointsman.migrate.policies import choose
from pointsman.migrate.routers import log_level
from pointsman.migrate.rules import (
    Item,
    Rule,
    apply,
    made,
    moot,
    none,
    number,
    place,
    same,
    text,
    whole,
)

__all__ = [
    "STACK_FLAGS",
    "STACK_PROGRAM",
    "STACK_VALUES",
    "from_production_stack",
    "settings_of_stack",
]

STACK_PROGRAM = re.compile(r"\b(vllm[-_]router|lmstack-router|production-stack)\b")
"""The word of a command that starts it, or its image."""

DISAGGREGATED = "disaggregated_prefill"

NO_LMCACHE = "LMCache's controller is not asked"
NO_FILES = "there are no batches and files"
NO_SENTRY = "errors are in the log and the metrics"
OWN_STATS = "the gateway measures by itself; see docs/metrics.md"
OF_THE_CHART = "how things are deployed stays with the chart"
NO_SELECTOR = "pods are left out: without a label selector all of them would be taken for engines"
HANDED_BY_NIXL = (
    "hand-offs are asked for as vLLM's NIXL connector understands them; engines are started with it"
)

STACK_FLAGS: dict[str, Rule] = {
    "--host": made("listen"),
    "--port": made("listen"),
    "--service-discovery": made(
        "[[gateway.workers]]", "`static`; `k8s` as `[[gateway.kubernetes]]`"
    ),
    "--static-backends": made(
        "[[gateway.workers]]", "workers are polled, so one that is gone gets nothing"
    ),
    "--static-models": made("model"),
    "--static-aliases": made("aliases", "an alias is never in `GET /v1/models`"),
    "--static-model-labels": made("role", "by --prefill-model-labels and --decode-model-labels"),
    "--static-model-types": moot("engines are asked how they are, and no request is made up"),
    "--static-backend-health-checks": moot("workers are polled"),
    "--backend-health-check-timeout-seconds": same("each.poll_timeout_s", number),
    "--k8s-port": made("port"),
    "--k8s-namespace": made("namespace"),
    "--k8s-label-selector": made("selector"),
    "--k8s-service-discovery-type": made("", "pods are addressed; a note for `service-name`"),
    "--k8s-watcher-timeout-seconds": moot(
        "watches are renewed, and the pods listed again, by themselves"
    ),
    "--routing-logic": made("route_policy", "see the table of policies"),
    "--session-key": none(
        "no header keeps requests together: conversations keep their worker, since their turns begin alike"
    ),
    "--prefill-model-labels": made("role", "`prefill`; in Kubernetes by the label `model`"),
    "--decode-model-labels": made("role", "`decode`; in Kubernetes by the label `model`"),
    "--lmcache-*": none(NO_LMCACHE),
    "--kv-aware-threshold": none(NO_LMCACHE),
    "--engine-stats-interval": same("each.poll_interval_s", number, "the default is 2 s"),
    "--request-stats-window": none(OWN_STATS),
    "--log-stats": none(OWN_STATS),
    "--log-stats-interval": none(OWN_STATS),
    "--log-level": same("log_level", log_level),
    "--dynamic-config-*": none(
        "give that file to this command; ours is read again when it changes, with watch = true"
    ),
    "--callbacks": none("there are no callbacks; an ASGI application can be mounted"),
    "--request-rewriter": made("", "a note unless it is `noop`"),
    "--enable-batch-api": none(NO_FILES),
    "--file-storage-*": none(NO_FILES),
    "--batch-processor": none(NO_FILES),
    "--feature-gates": none("there is no semantic cache, and no detection of personal data"),
    "--semantic-cache-*": none("there is no semantic cache"),
    "--sentry-*": none(NO_SENTRY),
    "--otel-endpoint": made("otel_endpoint", "OTLP over HTTP (port 4318), not over gRPC"),
    "--otel-service-name": none(
        "the service is called pointsman; OTEL_RESOURCE_ATTRIBUTES can say more"
    ),
    "--otel-secure": moot("the endpoint says https://"),
}
"""The flags of its router. Its dynamic configuration has the same names, with `_`."""

STACK_VALUES: dict[str, Rule] = {
    "routerSpec.containerPort": made("listen"),
    "routerSpec.serviceDiscovery": made("[[gateway.kubernetes]]", "as --service-discovery"),
    "routerSpec.k8sServiceDiscoveryType": made("", "as --k8s-service-discovery-type"),
    "routerSpec.staticBackends": made("[[gateway.workers]]", "as --static-backends"),
    "routerSpec.staticModels": made("model", "as --static-models"),
    "routerSpec.routingLogic": made("route_policy", "as --routing-logic"),
    "routerSpec.sessionKey": made("", "as --session-key"),
    "routerSpec.engineScrapeInterval": made("poll_interval_s", "as --engine-stats-interval"),
    "routerSpec.requestStatsWindow": made("", "as --request-stats-window"),
    "routerSpec.lmcacheControllerPort": made("", "as --lmcache-controller-port"),
    "routerSpec.extraArgs": made("", "read as flags"),
    "routerSpec.otel": made("otel_endpoint", "as --otel-endpoint"),
    "routerSpec.vllmApiKey": made(
        "api_key_env", "VLLM_API_KEY, from the secret; callers need keys of this gateway"
    ),
    "routerSpec.rootPath": none("the gateway's paths begin at /v1"),
    "routerSpec.enableRouter": moot("it is the router that is being replaced"),
    "routerSpec.*": none(OF_THE_CHART),
    "servingEngineSpec.labels": made("selector"),
    "servingEngineSpec.containerPort": made("port"),
    "servingEngineSpec.vllmApiKey": made(
        "api_key_env", "VLLM_API_KEY, from the secret; callers need keys of this gateway"
    ),
    "servingEngineSpec.enableEngine": moot("engines are found either way"),
    "servingEngineSpec.*": none(OF_THE_CHART),
    "cacheserverSpec": none("LMCache's server is the engines' affair"),
    "loraAdapters": none(
        "adapters that engines report are models; loading them stays with the chart"
    ),
    "loraController": none(
        "adapters that engines report are models; loading them stays with the chart"
    ),
    "sharedStorage": none(OF_THE_CHART),
}
"""The values of its Helm chart."""

AS_FLAGS = {
    "routerSpec.containerPort": "--port",
    "routerSpec.serviceDiscovery": "--service-discovery",
    "routerSpec.k8sServiceDiscoveryType": "--k8s-service-discovery-type",
    "routerSpec.staticBackends": "--static-backends",
    "routerSpec.staticModels": "--static-models",
    "routerSpec.routingLogic": "--routing-logic",
    "routerSpec.sessionKey": "--session-key",
    "routerSpec.engineScrapeInterval": "--engine-stats-interval",
    "routerSpec.requestStatsWindow": "--request-stats-window",
    "routerSpec.lmcacheControllerPort": "--lmcache-controller-port",
    "routerSpec.otel.endpoint": "--otel-endpoint",
    "routerSpec.otel.serviceName": "--otel-service-name",
    "routerSpec.otel.secure": "--otel-secure",
    "servingEngineSpec.containerPort": "--k8s-port",
}
"""The values that the chart passes on as flags."""


def settings_of_stack(draft: Draft, document: Mapping[str, Any]) -> list[Item]:
    """Return the flags that a file means: a Helm chart's values, else a dynamic configuration in JSON or YAML.

    What the values say beyond flags is written, or noted, at once. Raises Unreadable.
    """
    if "routerSpec" in document or "servingEngineSpec" in document:
        return [*_values(draft, document)]
    if isinstance(document.get("static_models"), Mapping):
        document = _flattened(document)
    return [
        Item(key, f"--{key.replace('_', '-')}", value)
        for key, value in document.items()
        if value is not None
    ]


def from_production_stack(draft: Draft, items: Sequence[Item], *, model: str = "") -> Draft:
    """Fill a draft from the flags of the router. `model` is what disaggregated pods serve, "" where nobody said.

    Raises Unreadable.
    """
    flags = Flags(items)
    guard = flags.one("api-key")
    listen(
        draft,
        text(flags.one("--host", "0.0.0.0")),
        whole(flags.one("--port", "8001")),
        guard.name if guard.value else "",
    )
    if guard.value:
        draft.each("api_key_env", "VLLM_API_KEY")
    if "--routing-logic" in flags:
        choose(draft, flags.one("--routing-logic"))
    apply(draft, STACK_FLAGS, (item for item in items if item.key != "api-key"))
    if flags.one("--request-rewriter", "noop").value != "noop":
        draft.note(flags.one("--request-rewriter").name, "a request is passed on as it is")
    _tracing(draft, flags)
    if flags.one("--service-discovery", "static").value == "k8s":
        _kubernetes(draft, flags)
    else:
        _static(draft, flags)
    _routes(draft, flags, model)
    return draft


# ------------------------------------------------------------------ files


def _values(draft: Draft, document: Mapping[str, Any]) -> Iterator[Item]:
    yield Item("routerSpec.serviceDiscovery", "--service-discovery", "k8s")
    for section, settings in document.items():
        if section not in ("routerSpec", "servingEngineSpec"):
            apply(draft, STACK_VALUES, [Item(section, section, settings)])
            continue
        for item in items_of(settings, section):
            yield from _value(draft, item)


def _value(draft: Draft, item: Item) -> Iterator[Item]:
    """Yield the flags that one value of the chart means."""
    if item.key in AS_FLAGS:
        if item.value not in (None, "", False):
            yield item._replace(key=AS_FLAGS[item.key])
    elif item.key == "routerSpec.otel":
        for inner in items_of(item.value, item.key):
            yield from _value(draft, inner)
    elif item.key == "routerSpec.extraArgs":
        words = item.value or []
        if not isinstance(words, list):
            raise Unreadable(f"{item.name}: expected a list")
        for flag in flag_items([str(word) for word in words]):
            yield flag._replace(name=f"{item.name} {flag.name}")
    elif item.key == "servingEngineSpec.labels":
        labels = [
            f"{label.key.removeprefix(item.key)[1:]}={text(label)}"
            for label in items_of(item.value, item.key)
        ]
        yield Item(item.name, "--k8s-label-selector", ",".join(labels))
    elif item.key.endswith(".vllmApiKey"):
        if item.value and (
            isinstance(item.value, str) or any(i.value for i in items_of(item.value, item.name))
        ):
            yield Item(item.name, "api-key", True)
    else:
        apply(draft, STACK_VALUES, [item])


def _flattened(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a dynamic configuration in YAML, which lists engines by model, in the words of the flags."""
    flat = {
        key: value
        for key, value in document.items()
        if key not in ("static_models", "static_aliases")
    }
    urls: list[str] = []
    models: list[str] = []
    labels: list[str] = []
    for item in items_of(document["static_models"], "static_models"):
        name = item.name.partition(".")[2]
        fields = {
            inner.name.removeprefix(f"{item.name}."): inner
            for inner in items_of(item.value, item.name)
        }
        backends = fields.pop("static_backends", Item("", "", [])).value
        label = fields.pop("static_model_label", Item("", "", "")).value
        fields.pop(
            "static_model_type", None
        )  # as --static-model-types, it is for made-up requests only
        flat |= {inner.name: inner.value for inner in fields.values()}
        here = backends if isinstance(backends, list) else [backends]
        urls += [text(Item(f"{item.name}.static_backends", "", url)) for url in here]
        models += [name] * len(here)
        labels += [str(label)] * len(here)
    flat["static_backends"], flat["static_models"] = ",".join(urls), ",".join(models)
    if any(labels):
        flat["static_model_labels"] = ",".join(labels)
    aliases = items_of(document.get("static_aliases"), "static_aliases")
    pairs = [f"{alias.name.partition('.')[2]}:{text(alias)}" for alias in aliases]
    return flat | ({"static_aliases": ",".join(pairs)} if pairs else {})


# ------------------------------------------------------------------ what is written


def _list(flags: Flags, flag: str) -> list[str]:
    """Return the values between commas."""
    if flag not in flags:
        return []
    return [word.strip() for word in text(flags.one(flag)).rstrip(", ").split(",")]


def _tracing(draft: Draft, flags: Flags) -> None:
    if "--otel-endpoint" in flags:
        item = flags.one("--otel-endpoint")
        host = text(item).rpartition("://")[2].rpartition(":")[0] or text(item)
        why = "spans are sent as OTLP over HTTP, usually to port 4318, and not over gRPC"
        draft.note(item.name, why, above="otel_endpoint")
        draft.gateway.put("otel_endpoint", f"http{'s' * ('--otel-secure' in flags)}://{host}:4318")


def _disaggregated(flags: Flags) -> bool:
    return flags.one("--routing-logic").value == DISAGGREGATED


def _roles(flags: Flags) -> dict[str, str]:
    """Return the role that each label gives."""
    if not _disaggregated(flags):
        return {}
    prefill = dict.fromkeys(_list(flags, "--prefill-model-labels"), "prefill")
    return prefill | dict.fromkeys(_list(flags, "--decode-model-labels"), "decode")


def _describe(draft: Draft, table: Table, role: str) -> None:
    table.put("dialect", "vllm")
    if role:
        table.put("role", role)
        table.put("connector", "nixl")
        draft.note("--routing-logic", HANDED_BY_NIXL)


def _static(draft: Draft, flags: Flags) -> None:
    urls, models = flags.one("--static-backends"), _list(flags, "--static-models")
    labels, roles = _list(flags, "--static-model-labels"), _roles(flags)
    backends = _list(flags, "--static-backends")
    if len(models) != len(backends):
        raise Unreadable(f"{urls.name}: {len(backends)} of them for {len(models)} static models")
    for index, url in enumerate(backends):
        table = draft.worker(place(urls._replace(value=url)))
        table.put("model", models[index])
        _describe(draft, table, roles.get(labels[index], "") if index < len(labels) else "")


def _kubernetes(draft: Draft, flags: Flags) -> None:
    if flags.one("--k8s-service-discovery-type", "pod-ip").value == "service-name":
        name = flags.one("--k8s-service-discovery-type").name
        draft.note(name, "pods are found and addressed; services can be listed as [[gateway.dns]]")
    by_role: dict[str, list[str]] = {}
    for label, role in _roles(flags).items():
        by_role.setdefault(role, []).append(label)
    if not by_role and not flags.one("--k8s-label-selector").value:
        draft.note(flags.one("--service-discovery").name, NO_SELECTOR)
        return
    from_chart = any(item.name.startswith("routerSpec") for item in flags)
    common = text(flags.one("--k8s-label-selector"))
    for role, labels in by_role.items() or [("", [])]:
        own = f"model in ({','.join(labels)})" if len(labels) > 1 else f"model={''.join(labels)}"
        table = draft.engines("[[gateway.kubernetes]]")
        if not from_chart:  # a chart looks into the namespace that it is installed in
            table.put("namespace", text(flags.one("--k8s-namespace", "default")))
        table.put("selector", ",".join(part for part in (common, own if labels else "") if part))
        table.put("port", whole(flags.one("--k8s-port", "8000")))
        _describe(draft, table, role)


def _routes(draft: Draft, flags: Flags, model: str) -> None:
    if _disaggregated(flags):
        models = list(dict.fromkeys(_list(flags, "--static-models"))) or ([model] if model else [])
        if not models:
            why = "a hand-off needs a route by the id of the model: import again with --model ID"
            draft.note(flags.one("--routing-logic").name, why)
        for each in models:
            draft.route(each).put("targets", ["disaggregated"])
    aliases: dict[str, list[str]] = {}
    for pair in _list(flags, "--static-aliases"):
        alias, colon, named = pair.partition(":")
        if not colon:
            raise Unreadable(f"--static-aliases: expected alias:model, not {alias!r}")
        aliases.setdefault(named, []).append(alias)
    for named, names in aliases.items():
        draft.route(named).put("aliases", names)
