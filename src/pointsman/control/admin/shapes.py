"""What admin requests and answers look like: every field with its meaning, read by programs and by people.

The shapes that others own are not repeated here: routes (`pointsman.domain.routes`), explanations and decisions
(`pointsman.domain.explain`), the configuration (`pointsman.control.reload`).
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from pointsman.domain.keys import Scope
from pointsman.domain.routes import Route
from pointsman.domain.worker import Role

__all__ = [
    "CreatedKey",
    "DrainRequest",
    "Error",
    "ErrorObject",
    "KeyInfo",
    "Keys",
    "ModelState",
    "Models",
    "NewKey",
    "RoutesDocument",
    "RoutesRequest",
    "Stats",
    "WorkerRequest",
    "WorkerState",
    "Workers",
]


def _said(text: str, **limits: Any) -> Meta:
    made: Meta = Meta(description=text, **limits)
    return made


Seconds = Annotated[float, _said("Seconds.")]


class ErrorObject(Struct, frozen=True):
    """What was wrong."""

    message: Annotated[str, _said("For people.")]
    type: Annotated[str, _said("The kind of error.")]
    param: Annotated[str | None, _said("The field or parameter that was wrong, null if none was.")]
    code: Annotated[str | None, _said("For programs, null if the status says it all.")]


class Error(Struct, frozen=True):
    """The error object of the OpenAI API; all four keys are there, null where they say nothing."""

    error: ErrorObject


# ------------------------------------------------------------------ workers


class WorkerState(Struct, frozen=True, kw_only=True):
    """One live worker: what it reported last, and what the gateway holds of it."""

    worker_id: str
    role: Role
    model: Annotated[str, _said("The model that it serves; empty as long as nobody knows.")]
    models: Annotated[
        tuple[str, ...], _said("All model ids that it serves: aliases and loaded adapters, too.")
    ]
    dialect: Annotated[
        str, _said("How it is spoken to; empty where nobody knows, or nothing is asked of it.")
    ]
    source: Annotated[
        str, _said("Who lists it, such as `static` or `dns vllm:8000`; empty: it announces itself.")
    ]
    polled: Annotated[bool, _said("Whether it is asked how it is.")]
    up: Annotated[
        bool, _said("False where polling says that it is gone, or has not heard of it yet.")
    ]
    degraded: Annotated[str, _said("What of it cannot be read, and why; empty for nothing.")]
    http_address: Annotated[str, _said("`host:port` of its OpenAI surface.")]
    grpc_address: Annotated[str, _said("`host:port`, empty if it has none.")]
    kv_address: Annotated[str, _said("`host:port`, empty if it has none.")]
    kv_format: Annotated[int, _said("KV block format that it writes, 1 or more.")]
    queue_depth: Annotated[int, _said("Requests that wait in the engine.")]
    running: Annotated[int, _said("Requests that run in the engine.")]
    kv_free_blocks: Annotated[int, _said("Free KV blocks.")]
    kv_total_blocks: Annotated[
        int, _said("KV blocks, or its capacity where that is configured or nobody tells.")
    ]
    kv_tokens: Annotated[
        int | None, _said("Tokens that its KV cache has room for, null if nobody tells.")
    ]
    kv_usage: Annotated[
        float | None, _said("Part of its KV cache that is in use, 0 to 1; null if nobody tells.")
    ]
    max_model_len: Annotated[
        int | None, _said("Longest context of `model` in tokens, null if nobody tells.")
    ]
    capacity: Annotated[int, _said("The weight that was configured, 0 for the engine's own.")]
    draining: Annotated[bool, _said("Whether the worker, or who lists it, says that it drains.")]
    last_heartbeat_unix_ms: Annotated[
        int, _said("Its last heartbeat, or its last good answer to polling; 0 for never.")
    ]
    static: Annotated[bool, _said("Whether somebody lists it; else it announces itself.")]
    drained: Annotated[bool, _said("Whether an operator drains its model.")]
    in_flight: Annotated[int, _said("Requests that this gateway holds open to it.")]
    load: Annotated[int, _said("What policies compare: in flight here and queued there.")]
    requests_left: Annotated[
        int, _said("Requests of this gateway that are not over, those of its former lives too.")
    ]
    oldest_request_s: Annotated[
        float | None, _said("Age of the oldest of them in seconds, null if there is none.")
    ]
    handoffs_recomputed: Annotated[
        int,
        _said(
            "Hand-offs that brought it no tokens, by its own counter: it computed the prompts again, or had them in "
            "its own cache. 0 where all arrived, or nobody can tell."
        ),
    ]


class Workers(Struct, frozen=True):
    """The live workers, by id."""

    data: tuple[WorkerState, ...]
    route_epoch: Annotated[int, _said("Version of the route table.")]


class WorkerRequest(Struct, frozen=True):
    """A static worker, as in the configuration."""

    url: Annotated[str, _said("Where its OpenAI surface is: `http://host:port`, or with a path.")]
    model: Annotated[
        str,
        _said(
            "Id of the model that it serves; `auto`: the first that it lists.",
            min_length=1,
            max_length=256,
        ),
    ] = "auto"
    dialect: Annotated[
        Literal["", "auto", "tl", "vllm", "sglang", "llamacpp", "openai"],
        _said(
            "How it is spoken to, and asked how it is; `auto`: found out by asking. Empty with a `model`: nothing is "
            "asked, and it counts as alive; empty without one: `auto`."
        ),
    ] = ""
    role: Annotated[Role, _said("What it can be asked to do.")] = Role.UNIFIED
    capacity: Annotated[
        int,
        _said(
            "Its weight for the `weighted` policy; 0: what the engine says.", ge=0, le=1_000_000_000
        ),
    ] = 0
    poll_interval_s: Annotated[float, _said("How often it is asked, seconds.", ge=0.1, le=3600)] = (
        2.0
    )
    poll_timeout_s: Annotated[
        float, _said("Wait for each of these answers, seconds.", ge=0.1, le=3600)
    ] = 2.0
    api_key_env: Annotated[
        str, _said("Environment variable of the gateway with the API key that it wants.")
    ] = ""
    api_key_file: Annotated[str, _said("File with that key, where the gateway runs.")] = ""
    connector: Annotated[
        str, _said("How it hands KV caches over; empty: the only way that its dialect has.")
    ] = ""
    bootstrap_port: Annotated[
        int, _said("Port of the bootstrap server of a prefill worker.", ge=1, le=65535)
    ] = 8998
    grpc_address: Annotated[
        str, _said("`host:port` of its EngineControl service, for a prefill worker of `tl`.")
    ] = ""
    kv_address: Annotated[
        str, _said("`host:port` of its KvTransferService, for a decode worker of `tl`.")
    ] = ""
    kv_events: Annotated[
        str, _said("`tcp://host:port` where it publishes what it caches, empty for nowhere.")
    ] = ""
    kv_replay: Annotated[
        str, _said("`tcp://host:port` where it can be asked for events once more.")
    ] = ""
    kv_ranks: Annotated[
        int, _said("Ranks that publish, each on the port after the one before.", ge=1, le=256)
    ] = 1


# ------------------------------------------------------------------ routes and models


class RoutesDocument(Struct, frozen=True):
    """The route table in force. Fields of a route that are empty or have their default are left out."""

    route_epoch: Annotated[int, _said("Version of the table; the `ETag` says the same.")]
    routes: tuple[Route, ...]


class RoutesRequest(Struct, frozen=True):
    """A whole route table, in place of the one in force. What is not a field of it is ignored."""

    routes: tuple[Route, ...]


class ModelState(Struct, frozen=True, kw_only=True):
    """One model that workers serve, and how far a drain of it has come."""

    model: str
    drained: Annotated[bool, _said("Whether an operator drains it.")]
    workers: Annotated[int, _said("Live workers of it, of any role, draining or not.")]
    routable: Annotated[int, _said("Those that may take requests.")]
    requests_left: Annotated[int, _said("Requests of this gateway that are not over.")]
    oldest_request_s: Annotated[
        float | None, _said("Age of the oldest of them in seconds, null if there is none.")
    ]


class Models(Struct, frozen=True):
    """The models that live workers serve, that are drained, or that have requests left; by id."""

    data: tuple[ModelState, ...]


class DrainRequest(Struct, frozen=True):
    """How long the workers may take to finish what they have."""

    deadline_s: Annotated[
        int, _said("Passed on to the workers that take it, in seconds.", ge=0, le=3600)
    ]


# ------------------------------------------------------------------ the gateway itself


class Stats(Struct, frozen=True, kw_only=True):
    """Counts since the gateway started: the difference of two answers is a rate."""

    started_at: Annotated[float, _said("Unix time, seconds.")]
    now: Annotated[float, _said("Unix time, seconds.")]
    requests_total: Annotated[
        int, _said("Requests for engines that are over, whatever came of them.")
    ]
    errors_total: Annotated[int, _said("Those answered with 5xx, and those whose answer broke.")]
    failovers_total: Annotated[int, _said("Attempts after the first of a request.")]
    first_byte_seconds_sum: Annotated[
        float, _said("Sum of the times to first byte of successful streams, seconds.")
    ]
    first_byte_count: Annotated[int, _said("How many such streams there were.")]
    in_flight: Annotated[int, _said("Requests that are not over.")]
    workers: Annotated[dict[str, int], _said("Attempts by worker id.")]


# ------------------------------------------------------------------ keys

MOST = 1_000_000_000_000
YEAR_10000 = 253_402_300_800


class NewKey(Struct, frozen=True, kw_only=True):
    """A key to make."""

    # The lookahead is for engines, such as Python's, whose `$` also stands before a last line feed.
    tenant: Annotated[
        str, _said("Whose it is.", pattern=r"^[a-z0-9][a-z0-9-]{0,62}(?!\n)$", max_length=63)
    ]
    name: Annotated[str, _said("What people call it.", min_length=1, max_length=128)]
    scopes: Annotated[tuple[Scope, ...], _said("What it may be used for.", min_length=1)] = (
        Scope.INFER,
    )
    rpm: Annotated[int, _said("Requests per minute, 0 for no limit.", ge=0, le=MOST)] = 60
    tpm: Annotated[int, _said("Tokens per minute, 0 for no limit.", ge=0, le=MOST)] = 100_000
    priority: Annotated[int, _said("Told to engines in `X-TL-Priority`.", ge=-100, le=100)] = 0
    models: Annotated[
        tuple[Annotated[str, Meta(min_length=1, max_length=256)], ...],
        _said("Model ids or aliases that it may ask for, none for all."),
    ] = ()
    expires_at: Annotated[
        Annotated[int, Meta(ge=0, lt=YEAR_10000)] | None,
        _said("Unix time in seconds, null for never."),
    ] = None


class KeyInfo(Struct, frozen=True, kw_only=True):
    """A key without its secret, which nobody can show again."""

    key_id: str
    tenant: str
    name: str
    scopes: tuple[Scope, ...]
    rpm: Annotated[int, _said("Requests per minute, 0 for no limit.")]
    tpm: Annotated[int, _said("Tokens per minute, 0 for no limit.")]
    priority: int
    models: Annotated[tuple[str, ...], _said("Model ids or aliases, none for all.")]
    created_at: Annotated[int, _said("Unix time, seconds.")]
    expires_at: Annotated[int | None, _said("Unix time in seconds, null for never.")]
    revoked: bool


class CreatedKey(KeyInfo, frozen=True, kw_only=True):
    """A new key. This answer is the only place where its text ever stands."""

    key: Annotated[str, _said("The whole key, to be sent as `Authorization: Bearer <key>`.")]


class Keys(Struct, frozen=True):
    """The keys, newest first."""

    data: tuple[KeyInfo, ...]
