"""LiteLLM's proxy: its config.yaml.

What it lists under one `model_name` becomes a route over workers. Providers that are no OpenAI-compatible engines have
no counterpart: the gateway translates no APIs.
"""

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import gcd, lcm
from typing import Any, NamedTuple

from pointsman.migrate.documents import items_of
from pointsman.migrate.draft import Draft, Table, Unreadable
from pointsman.migrate.listening import listen
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

__all__ = ["LITELLM_KEYS", "from_litellm"]

PORT = 4000

ENGINES = {
    **{
        "openai": "auto",
        "custom_openai": "auto",
        "openai_like": "auto",
        "text-completion-openai": "auto",
    },
    **{
        "hosted_vllm": "vllm",
        "llamafile": "llamacpp",
        "lm_studio": "openai",
        "litellm_proxy": "openai",
    },
}
"""Providers that speak the API that this gateway speaks, and our dialects for them."""

NO_KEY: tuple[object, ...] = (None, "", "EMPTY", "empty", "none", "None")
"""What people write where a key is asked for and none is needed."""

LIMITED = "limits stand in the keys of callers (rpm and tpm, not enforced yet), not at workers"
NO_REQUEST_CHANGES = "a request is passed on as it is: nothing is added, dropped or translated"
NO_DATABASE = "there is no database; keys stand in keys_file"
NO_REDIS = "gateways share no state: several of them agree without talking"
NO_COOLDOWN = "polling takes a failing worker out and back (poll_miss_limit, poll_hit_limit)"
NO_FALLBACKS = (
    "models do not stand in for each other; "
    "a cascade asks several one after another, by a rule over the answer"
)
NO_CALLBACKS = (
    "there are no callbacks; metrics, spans (otel_endpoint) and the access log say what happened"
)
NO_COSTS = "costs are not counted"
RETRIES = "every attempt goes to another worker, so there are never more than workers"
WEIGHTS = "workers of one served model share by capacity, served models by the weights of the route"


def _attempts(item: Item) -> int:
    return 1 + max(0, whole(item))


def _megabytes(item: Item) -> int:
    return int(number(item) * 1024 * 1024)


LITELLM_KEYS: dict[str, Rule] = {
    "model_list[].model_name": made(
        "[[gateway.routes]]", "no route where the engine serves that name itself"
    ),
    "model_list[].litellm_params.model": made(
        "[[gateway.workers]]", "`openai/`, `hosted_vllm/` and the like; other providers are notes"
    ),
    "model_list[].litellm_params.custom_llm_provider": made(
        "[[gateway.workers]]", "as the part of `model` before the slash"
    ),
    "model_list[].litellm_params.api_base": made(
        "url", "without `/v1`, which the gateway's paths have"
    ),
    "model_list[].litellm_params.base_url": made("url", "the same"),
    "model_list[].litellm_params.api_key": made(
        "api_key_env", "from `os.environ/NAME`; a key that stands there is not copied"
    ),
    "model_list[].litellm_params.weight": made("capacity", WEIGHTS),
    "model_list[].litellm_params.rpm": made(
        "capacity", f"as a weight, where there is none; {LIMITED}"
    ),
    "model_list[].litellm_params.tpm": made(
        "capacity", f"as a weight, where there is no rpm; {LIMITED}"
    ),
    "model_list[].litellm_params.timeout": none("there is one total_timeout_s for all"),
    "model_list[].litellm_params.stream_timeout": none("there is one first_byte_timeout_s for all"),
    "model_list[].litellm_params.max_parallel_requests": none(
        "there is one upstream_connections_max for all"
    ),
    "model_list[].litellm_params.order": none(NO_FALLBACKS),
    "model_list[].litellm_params.tags": none(
        "requests carry no tags; a model id of its own does the same"
    ),
    "model_list[].litellm_params.input_cost_per_token": none(NO_COSTS),
    "model_list[].litellm_params.output_cost_per_token": none(NO_COSTS),
    "model_list[].litellm_params.*": none(NO_REQUEST_CHANGES),
    "model_list[].model_info.id": made("id"),
    "model_list[].model_info.mode": moot("an engine is asked on the paths that it serves"),
    "model_list[].model_info.*": none("engines say what their models are"),
    "router_settings.routing_strategy": made("route_policy", "see the table of policies"),
    "router_settings.model_group_alias": made("aliases", "an alias is never in `GET /v1/models`"),
    "router_settings.num_retries": near("max_attempts", _attempts, RETRIES),
    "router_settings.timeout": same("total_timeout_s", number),
    "router_settings.stream_timeout": near(
        "first_byte_timeout_s",
        number,
        "it is the wait for the first piece of the answer after its head",
    ),
    "router_settings.retry_after": none(
        "a request goes to another worker at once; there is no waiting between attempts"
    ),
    "router_settings.retry_policy": none(
        "what is tried again is fixed: a refused or broken connection, a 429 or 5xx before the first byte"
    ),
    "router_settings.allowed_fails": none(NO_COOLDOWN),
    "router_settings.allowed_fails_policy": none(NO_COOLDOWN),
    "router_settings.cooldown_time": none(NO_COOLDOWN),
    "router_settings.disable_cooldowns": none(NO_COOLDOWN),
    "router_settings.*fallbacks": none(NO_FALLBACKS),
    "router_settings.redis_*": none(NO_REDIS),
    "router_settings.enable_pre_call_checks": none("an engine refuses a prompt that is too long"),
    "router_settings.enable_tag_filtering": none(
        "requests carry no tags; a model id of its own does the same"
    ),
    "router_settings.routing_strategy_args": none("the policies have options of their own"),
    "litellm_settings.num_retries": near("max_attempts", _attempts, RETRIES),
    "litellm_settings.request_timeout": same("total_timeout_s", number),
    "litellm_settings.json_logs": moot("log_format is json already"),
    "litellm_settings.*fallbacks": none(NO_FALLBACKS),
    "litellm_settings.allowed_fails": none(NO_COOLDOWN),
    "litellm_settings.cache": none("answers are not cached"),
    "litellm_settings.cache_params": none("answers are not cached"),
    "litellm_settings.*callback*": none(NO_CALLBACKS),
    "litellm_settings.drop_params": none(NO_REQUEST_CHANGES),
    "litellm_settings.modify_params": none(NO_REQUEST_CHANGES),
    "litellm_settings.set_verbose": none("log_level says how much is logged"),
    "litellm_settings.telemetry": moot("nothing is sent anywhere"),
    "general_settings.master_key": made(
        "keys_file", "callers need keys of this gateway; the old ones are not copied"
    ),
    "general_settings.max_request_size_mb": same("max_body_bytes", _megabytes),
    "general_settings.database_*": none(NO_DATABASE),
    "general_settings.store_model_in_db": none(NO_DATABASE),
    "general_settings.disable_spend_logs": none(NO_COSTS),
    "general_settings.alerting*": none("alerts come from metrics"),
    "general_settings.background_health_checks": moot("workers are polled"),
    "general_settings.health_check_interval": same(
        "each.poll_interval_s", number, "load is read as often; the default is 2 s"
    ),
    "general_settings.*max_parallel_requests": none(
        "the gateway has no limit of requests in flight; engines queue"
    ),
    "environment_variables": none("variables are set where the gateway is started"),
}
"""Its keys; `[]` stands for every entry of the list."""


SECTIONS = ("router_settings", "litellm_settings", "general_settings")
ALIASES = "router_settings.model_group_alias"


class Deployment(NamedTuple):
    """One entry of `model_list` that an engine can serve."""

    name: str
    public: str
    served: str
    dialect: str
    url: str
    key_env: str
    worker_id: str
    weight: Fraction | None
    weighed_by: str


def from_litellm(document: Mapping[str, Any]) -> Draft:
    """Return the configuration for a config.yaml. Raises Unreadable."""
    draft = Draft("litellm")
    router, library, general = (
        list(items_of(document.get(section), section)) for section in SECTIONS
    )
    guards = (item.name for item in general if item.key == "general_settings.master_key")
    listen(draft, "0.0.0.0", PORT, next(guards, ""))
    entries = document.get("model_list") or []
    if not isinstance(entries, list):
        raise Unreadable("model_list: expected a list")
    deployments = [
        found for index, entry in enumerate(entries) if (found := _deployment(draft, index, entry))
    ]
    strategy = [item for item in router if item.key == "router_settings.routing_strategy"]
    choose(draft, strategy[0] if strategy else Item("", "", "round_robin"))
    known = {"model_list", *SECTIONS}
    rest = (Item(key, key, value) for key, value in document.items() if key not in known)
    # What router_settings say wins over the others.
    apply(draft, LITELLM_KEYS, (*library, *general, *router, *rest))
    _workers(draft, deployments)
    _routes(draft, deployments)
    for item in router:
        if item.key == ALIASES:
            _aliases(draft, item.value)
    return draft


def _deployment(draft: Draft, index: int, entry: object) -> Deployment | None:
    """Read one entry; None, and a note, for what no engine can serve."""
    where = f"model_list[{index}]"
    own = {item.key.rpartition(".")[2]: item for item in items_of(entry, where)}
    if not {"model_name", "litellm_params"} <= own.keys():
        raise Unreadable(f"{where}: expected model_name and litellm_params")
    params = list(
        items_of(
            own["litellm_params"].value,
            f"{where}.litellm_params",
            key="model_list[].litellm_params",
        )
    )
    info = list(
        items_of(
            own["model_info"].value if "model_info" in own else None,
            f"{where}.model_info",
            key="model_list[].model_info",
        )
    )
    said = {item.key.rpartition("].")[2]: item for item in (*params, *info)}
    public = text(own["model_name"])
    if "litellm_params.model" not in said:
        raise Unreadable(f"{where}.litellm_params: expected model")
    model = said["litellm_params.model"]
    base = said.get("litellm_params.api_base", said.get("litellm_params.base_url"))
    provider, served = _provider(text(model), said.get("litellm_params.custom_llm_provider"))
    if provider not in ENGINES:
        why = f"{public} is left out: {provider or 'the provider'} is no OpenAI-compatible engine"
        draft.note(model.name, why)
        return None
    if "*" in public or "*" in served:
        draft.note(
            f"{where}.model_name",
            f"{public} is left out: a model is named in full, or read from its engine",
        )
        return None
    apart = ("model_name", "litellm_params", "model_info")
    rest = (
        item._replace(key=f"model_list[].{name}") for name, item in own.items() if name not in apart
    )
    apply(draft, LITELLM_KEYS, (*params, *info, *rest))
    given = (said.get(f"litellm_params.{name}") for name in ("weight", "rpm", "tpm"))
    weight = next((item for item in given if item is not None), None)
    for name in ("rpm", "tpm"):
        if f"litellm_params.{name}" in said:
            draft.note(f"{where}.litellm_params.{name}", LIMITED)
    return Deployment(
        where,
        public,
        served,
        ENGINES[provider],
        _url(draft, base),
        _key_env(draft, said.get("litellm_params.api_key")),
        text(said["model_info.id"]) if "model_info.id" in said else "",
        _weight(weight),
        weight.name if weight is not None else "",
    )


def _weight(item: Item | None) -> Fraction | None:
    if item is None:
        return None
    weight = Fraction(str(number(item)))
    if weight < 0:
        raise Unreadable(f"{item.name}: expected a number of at least 0")
    return weight


def _provider(model: str, named: Item | None) -> tuple[str, str]:
    """Return the provider and what it calls the model. A bare name is one of OpenAI's, as far as it looks like one."""
    if named is not None:
        provider = text(named)
        return provider, model.removeprefix(f"{provider}/")
    provider, slash, served = model.partition("/")
    if slash:
        return provider, served
    return ("openai" if re.match(r"gpt-|o[0-9]|chatgpt-|text-embedding-", model) else ""), model


def _url(draft: Draft, base: Item | None) -> str:
    if base is None:
        return "https://api.openai.com"
    url = place(base).rstrip("/")
    if url.endswith("/v1"):
        return url.removesuffix("/v1")
    draft.note(
        base.name, f"{url} does not end in /v1: the gateway asks for {url}/v1/chat/completions"
    )
    return url


def _key_env(draft: Draft, key: Item | None) -> str:
    """Return the environment variable with the key of an engine, "" for none."""
    if key is None or key.value in NO_KEY:
        return ""
    return draft.variable(key.name, str(key.value))


def _workers(draft: Draft, deployments: Sequence[Deployment]) -> None:
    """Write a worker for each address and key; one that serves several models is asked for them."""
    engines: dict[tuple[str, str], list[Deployment]] = {}
    for each in deployments:
        engines.setdefault((each.url, each.key_env), []).append(each)
    weighted = draft.gateway.values.get("route_policy") == "weighted"
    shares = _shares([group[0] for group in engines.values()])
    for (url, key_env), group in engines.items():
        first = group[0]
        table = draft.worker(url, first.worker_id)
        models = list(dict.fromkeys(each.served for each in group))
        table.put("model", models[0] if len(models) == 1 else "auto")
        table.put("dialect", first.dialect)
        if key_env:
            table.put("api_key_env", key_env)
        if weighted:
            table.put("capacity", shares[first])
        for each in group:
            _warn_of_weight(draft, each, table, weighted=weighted)


def _warn_of_weight(draft: Draft, each: Deployment, table: Table, *, weighted: bool) -> None:
    if each.weight is None:
        return
    if not weighted:
        why = "among the workers of one model only the policy weighted looks at weights"
        draft.note(each.weighed_by, why, table=table)
    elif each.weight == 0:
        why = "0 is no weight of a worker: leave it out, or drain it"
        draft.note(each.weighed_by, why, table=table)


def _shares(deployments: Sequence[Deployment]) -> dict[Deployment, int]:
    """Return small integers in proportion to the weights, for each served model by itself; without a weight it is 1."""
    shares: dict[Deployment, int] = {}
    for served in {each.served for each in deployments}:
        alike = [each for each in deployments if each.served == served]
        weights = [each.weight if each.weight else Fraction(1) for each in alike]
        common = lcm(*(weight.denominator for weight in weights))
        whole_ones = [int(weight * common) for weight in weights]
        divisor = gcd(*whole_ones)
        shares |= {each: share // divisor for each, share in zip(alike, whole_ones, strict=True)}
    return shares


def _routes(draft: Draft, deployments: Sequence[Deployment]) -> None:
    """Write a route for each public name that is not simply what its engines serve."""
    groups: dict[str, dict[str, Fraction]] = {}
    for each in deployments:
        served = groups.setdefault(each.public, {})
        weight = Fraction(1) if each.weight is None else each.weight
        served[each.served] = served.get(each.served, Fraction(0)) + weight
    for public, served in groups.items():
        if list(served) != [public]:
            total = sum(served.values()) or Fraction(1)
            shares = {model: round(float(weight / total), 6) for model, weight in served.items()}
            backends = [{"model": model, "weight": share} for model, share in shares.items()]
            draft.route(public).put("backends", backends)


def _aliases(draft: Draft, aliases: object) -> None:
    by_model: dict[str, list[str]] = {}
    for item in items_of(aliases, ALIASES):
        value = item.value.get("model") if isinstance(item.value, dict) else item.value
        by_model.setdefault(text(item._replace(value=value)), []).append(
            item.key.removeprefix(f"{ALIASES}.")
        )
    for model, names in by_model.items():
        draft.route(model).put("aliases", names)
