"""Every option of the gateway, declared once."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Struct

from pointsman.config.option import declaration_of, fields_of, option
from pointsman.config.sources import DnsSource, KubernetesSource, WorkerFile
from pointsman.config.tables import LearnedAcceptor, Mount, TokenizerFile
from pointsman.config.workers import StaticWorker
from pointsman.domain.routes import Route

__all__ = ["Config", "GatewayConfig", "changed_options"]


class GatewayConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Every option of the gateway."""

    listen: Annotated[
        str,
        option(
            "Address for inference requests: `host:port`, `:port` for every interface, "
            "`[IPv6]:port`. Beyond loopback it needs `keys_file`, or `allow_unauthenticated`.",
            group="Addresses",
            restart=True,
        ),
    ] = ":8080"
    health_listen: Annotated[
        str, option("Address for /healthz, /readyz and /metrics.", restart=True)
    ] = ":9464"
    registry_listen: Annotated[
        str, option("Address for the heartbeats of engines (gRPC).", restart=True)
    ] = ":50060"
    allow_unauthenticated: Annotated[
        bool,
        option("Serve whoever can reach `listen`, although there are no keys.", restart=True),
    ] = False

    heartbeat_miss_limit: Annotated[
        int,
        option(
            "Heartbeats (one every 2 s) that a worker may miss before it is gone.",
            unit="beats",
            ge=1,
            group="Workers and routing",
            restart=True,
        ),
    ] = 3
    poll_miss_limit: Annotated[
        int,
        option(
            "Polls in a row that a worker may fail before it counts as gone.",
            unit="polls",
            ge=1,
            restart=True,
        ),
    ] = 3
    poll_hit_limit: Annotated[
        int,
        option(
            "Polls in a row that it must answer well before it counts as back.",
            unit="polls",
            ge=1,
            restart=True,
        ),
    ] = 2
    route_policy: Annotated[
        str, option("How a worker is picked; `docs/policies.md` has the choices.")
    ] = "affinity"
    affinity_load_factor: Annotated[
        float,
        option(
            "How far above the mean load the owner of a prefix may go before others help.",
            ge=1.0,
        ),
    ] = 1.25
    affinity_bytes: Annotated[
        int, option("Leading bytes of the prompt that decide its owner.", unit="bytes", ge=1)
    ] = 64
    prefix_block_bytes: Annotated[
        int,
        option(
            "Size of the blocks in which cached prompts are compared; 4 bytes are taken for a token.",
            unit="bytes",
            ge=64,
        ),
    ] = 512
    prefix_index_blocks_max: Annotated[
        int,
        option(
            "Cached blocks that policies with a prefix index remember, of all workers together.",
            unit="blocks",
            ge=1,
        ),
    ] = 262_144
    prefix_index_ttl_s: Annotated[
        float,
        option(
            "How long a worker is believed to have cached what it was sent.", unit="seconds", gt=0
        ),
    ] = 3600.0
    ttft_target_s: Annotated[
        float,
        option(
            "When a first token is late: `least_delay` lets a request that is late anywhere make no other one late.",
            unit="seconds",
            gt=0,
        ),
    ] = 2.0
    tie_break: Annotated[
        Literal["smallest", "salted"],
        option(
            "Among equal loads: the smallest id, or an order of its own for every gateway process."
        ),
    ] = "smallest"
    max_attempts: Annotated[
        int, option("Workers that are tried for one request.", unit="workers", ge=1)
    ] = 3
    hold_timeout_s: Annotated[
        float,
        option(
            "How long a request for a known model waits for a worker where there is none; 0 = it is 503 at once.",
            unit="seconds",
            ge=0,
        ),
    ] = 0.0
    hold_max: Annotated[
        int,
        option(
            "Requests that wait so at a time; the next one is 503 at once.", unit="requests", ge=1
        ),
    ] = 1024
    drain_deadline_s: Annotated[
        float,
        option("How long running requests may go on after SIGTERM.", unit="seconds", ge=0),
    ] = 30.0
    shutdown_grace_s: Annotated[
        float,
        option(
            "How long to go on accepting connections after SIGTERM, already unready, so that "
            "balancers notice first.",
            unit="seconds",
            ge=0,
        ),
    ] = 0.0
    state_dir: Annotated[
        str,
        option(
            "Folder for what a restart must not forget (routes and their epoch, static workers put "
            "through the API, drained models, models seen). Empty: nothing is kept.",
            restart=True,
        ),
    ] = ""

    paths: Annotated[
        tuple[str, ...],
        option("Paths whose POST requests go to engines.", group="Requests and answers"),
    ] = (
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/responses/input_tokens",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/embeddings",
        "/v1/rerank",
        "/v2/rerank",
        "/rerank",
        "/v1/score",
        "/score",
        "/classify",
        "/pooling",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/tokenize",
        "/detokenize",
    )
    response_model: Annotated[
        Literal["served", "public"],
        option(
            "The `model` in answers: as the engine sent it, or the id that the client asked for. "
            "For the latter, plain answers are held whole and engines are asked for no encoding."
        ),
    ] = "served"
    max_body_bytes: Annotated[
        int, option("Largest request body; a larger one is 413.", unit="bytes", ge=1)
    ] = 64 * 1024 * 1024
    hold_bytes: Annotated[
        int,
        option(
            "A plain answer up to this size is held whole, so that it can still fail over.",
            unit="bytes",
            ge=0,
        ),
    ] = 1024 * 1024

    disagg_min_tokens: Annotated[
        int,
        option(
            "A prompt of fewer tokens is computed by the decode worker itself. A route may say otherwise.",
            unit="tokens",
            ge=0,
        ),
    ] = 0
    disagg_pairing: Annotated[
        Literal["always", "quickest"],
        option(
            "Whether every prompt is handed off that can be, or only where that costs less than one worker alone."
        ),
    ] = "always"
    disagg_prefill_tokens_per_s: Annotated[
        float,
        option(
            "How fast a worker computes prompts, for `quickest`.", unit="tokens per second", gt=0
        ),
    ] = 8000.0
    disagg_transfer_tokens_per_s: Annotated[
        float,
        option(
            "How fast computed prompts get to a decode worker, for `quickest`.",
            unit="tokens per second",
            gt=0,
        ),
    ] = 100_000.0
    disagg_handoff_s: Annotated[
        float,
        option("What a hand-off takes beside that, for `quickest`.", unit="seconds", ge=0),
    ] = 0.01
    disagg_stall_weight: Annotated[
        float,
        option(
            "What a second weighs that a running answer waits for a prompt, for `quickest`.", ge=0
        ),
    ] = 0.2
    prefill_timeout_s: Annotated[
        float, option("For a prefill worker to compute a prompt and push it.", unit="s", gt=0)
    ] = 30.0

    connect_timeout_s: Annotated[
        float,
        option("Wait for a connection to a worker.", unit="seconds", gt=0, group="Towards engines"),
    ] = 5.0
    head_timeout_s: Annotated[
        float,
        option(
            "Wait for the head of the answer: for a plain answer the whole generation.",
            unit="seconds",
            gt=0,
        ),
    ] = 600.0
    first_byte_timeout_s: Annotated[
        float, option("Wait for the first body byte after the head.", unit="seconds", gt=0)
    ] = 120.0
    gap_timeout_s: Annotated[
        float, option("Longest silence between two pieces of an answer.", unit="seconds", gt=0)
    ] = 120.0
    total_timeout_s: Annotated[
        float, option("Longest time for one request in all; 0 = no limit.", unit="seconds", ge=0)
    ] = 3600.0
    upstream_keepalive_s: Annotated[
        float,
        option(
            "How long an idle connection is kept; below the limit of the engines (often 5 s).",
            unit="seconds",
            ge=0,
        ),
    ] = 4.0
    upstream_idle_max: Annotated[
        int, option("Idle connections that are kept per worker.", unit="connections", ge=0)
    ] = 256
    upstream_connections_max: Annotated[
        int, option("Connections per worker; 0 = no limit.", unit="connections", ge=0)
    ] = 0

    header_timeout_s: Annotated[
        float,
        option(
            "Wait for the whole head of a request.", unit="seconds", gt=0, group="Towards clients"
        ),
    ] = 10.0
    body_timeout_s: Annotated[
        float, option("Wait for the whole body of a request.", unit="seconds", gt=0)
    ] = 60.0
    keepalive_timeout_s: Annotated[
        float, option("How long a client may keep an idle connection.", unit="seconds", gt=0)
    ] = 75.0
    max_header_bytes: Annotated[
        int, option("Largest request head; a larger one is 431.", unit="bytes", ge=1024)
    ] = 65536
    connections_max: Annotated[
        int, option("Connections of clients; 0 = no limit.", unit="connections", ge=0)
    ] = 0

    keys_file: Annotated[
        str,
        option(
            "File of the API keys (JSON Lines), read again when it changes. "
            "Empty: no keys, and every caller may infer.",
            group="Keys and certificates",
            restart=True,
        ),
    ] = ""
    pepper_env: Annotated[
        str, option("Environment variable with the pepper of the key digests.", restart=True)
    ] = "TL_GATEWAY_PEPPER"
    key_cache_ttl_s: Annotated[
        float,
        option("How long a verified key is remembered.", unit="seconds", ge=0, le=5, restart=True),
    ] = 5.0
    tls_cert: Annotated[
        str, option("Certificate chain (PEM) of `listen`. Empty: plaintext HTTP.", restart=True)
    ] = ""
    tls_key: Annotated[str, option("Private key (PEM) of `tls_cert`.", restart=True)] = ""
    tls_client_ca: Annotated[
        str, option("Clients of `listen` must show a certificate of this CA (PEM).", restart=True)
    ] = ""
    registry_tls_cert: Annotated[
        str,
        option(
            "Certificate chain (PEM) of `registry_listen`. Empty: plaintext gRPC.", restart=True
        ),
    ] = ""
    registry_tls_key: Annotated[
        str, option("Private key (PEM) of `registry_tls_cert`.", restart=True)
    ] = ""
    registry_client_ca: Annotated[
        str, option("Engines must show a certificate of this CA (PEM) to be heard.", restart=True)
    ] = ""
    upstream_ca: Annotated[
        str,
        option(
            "CA (PEM) that `https://` engines are trusted by. Empty: those of the system.",
            restart=True,
        ),
    ] = ""
    upstream_cert: Annotated[
        str,
        option(
            "Certificate chain (PEM) that engines are shown when they ask for one.", restart=True
        ),
    ] = ""
    upstream_key: Annotated[str, option("Private key (PEM) of `upstream_cert`.", restart=True)] = ""

    watch: Annotated[
        bool,
        option(
            "Load the configuration file again when it changes, as SIGHUP does.",
            group="Operation",
            restart=True,
        ),
    ] = False
    log_format: Annotated[
        Literal["json", "text"],
        option("How log lines are written, to standard error.", restart=True),
    ] = "json"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], option("The least level that is logged.")
    ] = "info"
    access_log: Annotated[
        Literal["off", "sampled", "all"],
        option(
            "A line for every request, for none, or for those that failed or failed over and a "
            "sample of the others.",
            restart=True,
        ),
    ] = "sampled"
    access_log_sample: Annotated[
        float,
        option("Part of the uneventful requests that `sampled` logs.", ge=0, le=1, restart=True),
    ] = 0.01
    decisions_kept: Annotated[
        int,
        option(
            "Requests whose routing can be looked up afterwards.",
            unit="requests",
            ge=0,
            restart=True,
        ),
    ] = 1024
    record_file: Annotated[
        str,
        option(
            "File that every request is recorded to, for `pointsman simulate`: hashes of its prompt, candidates, "
            "loads and times, and no text. Empty: none; see `docs/simulator.md`.",
            restart=True,
        ),
    ] = ""
    record_max_bytes: Annotated[
        int,
        option(
            "Size at which `record_file` becomes `<record_file>.1`, in place of the one before it.",
            unit="bytes",
            ge=65536,
            restart=True,
        ),
    ] = 256 * 1024 * 1024
    otel_endpoint: Annotated[
        str,
        option(
            "Where spans are sent (OTLP over HTTP), such as `http://127.0.0.1:4318`. Empty: none. "
            "Needs the extra `pointsman[otel]`.",
            restart=True,
        ),
    ] = ""
    otel_sample: Annotated[
        float,
        option(
            "Part of the traces begun here that is sent; others as their caller says.",
            ge=0,
            le=1,
            restart=True,
        ),
    ] = 1.0
    workers_max: Annotated[
        int,
        option(
            "Workers that may be registered at a time; the next one is refused, loudly.",
            unit="workers",
            ge=1,
            restart=True,
        ),
    ] = 10_000

    cache_entries: Annotated[
        int,
        option(
            "Answers that the response cache holds.",
            unit="entries",
            ge=0,
            group="Known, without effect in this version",
            restart=True,
        ),
    ] = 4096
    cache_ttl_s: Annotated[
        float, option("How long a cached answer is used.", unit="seconds", ge=0, restart=True)
    ] = 300.0
    upstream: Annotated[
        str, option("One engine instead of a registry; must be empty.", restart=True)
    ] = ""
    policy_file: Annotated[
        str, option("File of the usage policy; must be empty.", restart=True)
    ] = ""
    usage_db: Annotated[str, option("File of the usage ledger; must be empty.", restart=True)] = ""

    workers: Annotated[
        tuple[StaticWorker, ...], option("Engines, one by one.", group="Tables")
    ] = ()
    dns: Annotated[
        tuple[DnsSource, ...],
        option("Engines behind DNS names."),
    ] = ()
    worker_files: Annotated[
        tuple[WorkerFile, ...],
        option("Engines that files list."),
    ] = ()
    kubernetes: Annotated[
        tuple[KubernetesSource, ...],
        option("Engines in the pods of a Kubernetes cluster."),
    ] = ()
    routes: Annotated[
        tuple[Route, ...],
        option("Public model ids, their aliases and backends; `docs/routes.md`."),
    ] = ()
    acceptors: Annotated[tuple[LearnedAcceptor, ...], option("Learned acceptors of cascades.")] = ()
    tokenizers: Annotated[
        tuple[TokenizerFile, ...], option("Tokenizers of the gateway's own, for hand-offs.")
    ] = ()
    mounts: Annotated[
        tuple[Mount, ...],
        option("Endpoints of your own, served beside the gateway's.", restart=True),
    ] = ()


class Config(Struct, frozen=True, forbid_unknown_fields=True):
    """A whole configuration file."""

    gateway: Annotated[GatewayConfig, option("The gateway.")] = GatewayConfig()
    ext: Annotated[dict[str, Any], option("Free for others; the gateway does not look inside.")] = (
        msgspec.field(default_factory=dict)
    )


def changed_options(old: GatewayConfig, new: GatewayConfig) -> tuple[list[str], list[str]]:
    """Return the options that differ: those that can change while the gateway runs, and those that need a restart."""
    live: list[str] = []
    restart: list[str] = []
    for key, field in fields_of(GatewayConfig).items():
        if getattr(old, key) != getattr(new, key):
            (restart if declaration_of(GatewayConfig, field).restart else live).append(key)
    return live, restart
