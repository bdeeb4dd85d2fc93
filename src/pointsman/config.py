"""The single declaration of every option, and what is made of it: checks, JSON Schema, reference.

An option is one field of `GatewayConfig`: its name, type, range, default, unit and one line of
documentation. `load` reads TOML, environment and `--set`, and refuses whatever the declaration does
not allow with a message that names the key, what is wrong and what would be right. `schema` and
`reference` print the same declaration for machines and for people.

It opens no socket, reads none of the files that options name but certificates, and does not build
the gateway: that is `pointsman.app`.
"""

import difflib
import ipaddress
import json
import math
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, Struct, inspect

from pointsman.certificates import Pem, TlsError, TlsFiles
from pointsman.domain.policy import ENTRY_POINTS, POLICIES
from pointsman.domain.registry import InvalidReport, Registry
from pointsman.domain.routes import Backend, Route, RouteTable, Step, StreamHold
from pointsman.domain.worker import Role, Worker
from pointsman.errors import InvalidRoutes

__all__ = [
    "Address",
    "Config",
    "ConfigError",
    "GatewayConfig",
    "LearnedAcceptor",
    "Mount",
    "StaticWorker",
    "Tls",
    "TokenizerFile",
    "changed_options",
    "load",
    "reference",
    "schema",
    "servable",
    "tls_files",
]

S = TypeVar("S", bound=Struct)


class ConfigError(Exception):
    """A configuration that the gateway refuses; the text is for the person who wrote it."""


# ------------------------------------------------------------------ values


class Address(NamedTuple):
    """Where to listen. `host` is "" for every interface; port 0 lets the kernel choose."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> "Address":
        """Read `host:port`, `:port` or `[IPv6]:port`.

        Raises ValueError with what is wrong.

        >>> Address.parse(":8080")
        Address(host='', port=8080)
        >>> Address.parse("[::1]:80")
        Address(host='::1', port=80)
        """
        host, colon, port = text.rpartition(":")
        if not colon:
            raise ValueError("the port is missing")
        if not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535:
            raise ValueError("the port is not a number in 0..65535")
        if host.startswith("[") and host.endswith("]"):
            try:
                return cls(str(ipaddress.IPv6Address(host[1:-1])), int(port))
            except ValueError:
                raise ValueError("no IPv6 address between the brackets") from None
        if ":" in host:
            raise ValueError("an IPv6 address stands in brackets")
        if host and not re.fullmatch(r"[A-Za-z0-9._-]+", host):
            raise ValueError("not a host name")
        return cls(host, int(port))

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can connect. Names but `localhost` are not looked up.

        >>> Address.parse("127.0.0.1:80").is_loopback, Address.parse(":80").is_loopback
        (True, False)
        """
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def _option(
    doc: str, *, unit: str = "", group: str = "", restart: bool = False, **limits: Any
) -> Meta:
    """Return the declaration of one option beside its type.

    A `group` opens a table of the page; `restart` says that a change takes effect with the next start only.
    """
    made: Meta = Meta(
        description=doc,
        extra={"unit": unit, "group": group, "restart": restart},
        extra_json_schema={"x-unit": unit} if unit else None,
        **limits,
    )
    return made


class StaticWorker(Struct, frozen=True, forbid_unknown_fields=True):
    """An engine that sends no heartbeats: it counts as alive as long as the gateway runs."""

    id: Annotated[str, _option("Name of the worker, unique.", min_length=1)]
    url: Annotated[
        str,
        _option(
            "Where its OpenAI surface is: `http://host:port` or `https://host:port`, or with a path."
        ),
    ]
    model: Annotated[str, _option("Id of the model that it serves.", min_length=1)]
    role: Annotated[Role, _option("What it can be asked to do.")] = Role.UNIFIED
    capacity: Annotated[int, _option("Its weight for the `weighted` policy.", ge=1)] = 1
    grpc_address: Annotated[
        str, _option("`host:port` of its EngineControl service. A prefill worker needs one.")
    ] = ""
    kv_address: Annotated[
        str, _option("`host:port` of its KvTransferService. A decode worker needs one.")
    ] = ""

    def worker(self) -> Worker:
        """Return the worker to add to the registry.

        Raises ValueError where `url` is not one that can be used, or where its role needs an address that is not there.

        >>> StaticWorker(id="a", url="http://10.0.0.7:8000/x/", model="m").worker().base_path
        '/x'
        """
        url = urlsplit(self.url)
        tls = url.scheme == "https"
        if not (tls or url.scheme == "http") or not url.hostname:
            raise ValueError("expected http:// or https://, then host:port or host:port/path")
        if url.query or url.fragment or "@" in url.netloc or re.search(r"\s", self.url):
            raise ValueError("only a host, a port and a path can stand in it")
        for role, key in ((Role.PREFILL, "grpc_address"), (Role.DECODE, "kv_address")):
            address = getattr(self, key)
            if self.role is role and not address:
                raise ValueError(f"a {role} worker needs `{key}` as well")
            if address and not all(Address.parse(address)):
                raise ValueError(f"`{key}` is not host:port")
        host = f"[{url.hostname}]" if ":" in url.hostname else url.hostname
        return Worker(
            self.id,
            model=self.model,
            http_address=f"https://{host}:{url.port or 443}" if tls else f"{host}:{url.port or 80}",
            tls=tls,
            base_path=url.path.rstrip("/"),
            role=self.role,
            grpc_address=self.grpc_address,
            kv_address=self.kv_address,
            kv_total_blocks=self.capacity,
            static=True,
        )


class Mount(Struct, frozen=True, forbid_unknown_fields=True):
    """An ASGI application of yours, served on the API port under a path of its own."""

    path: Annotated[str, _option("Path prefix, such as `/pages`.")]
    app: Annotated[str, _option("Where it is imported from: `package.module:name`.")]
    scope: Annotated[
        Literal["infer", "embed", "admin", "debug", "none"],
        _option("Scope that a key needs for it; `none` lets everybody in."),
    ] = "admin"


class LearnedAcceptor(Struct, frozen=True, forbid_unknown_fields=True):
    """A learned acceptor, which the rules of cascades ask by its name: `accept_if = "score > 0.8"`."""

    name: Annotated[str, _option("What steps call it in `acceptor`, unique.", min_length=1)]
    file: Annotated[str, _option("The file that `pointsman cascade sweep --train` wrote.")]


class TokenizerFile(Struct, frozen=True, forbid_unknown_fields=True):
    """A tokenizer of a model, for hand-offs: the gateway tokenizes, and need not ask the prefill worker for it.

    Its ids must be those of the workers: a decode worker refuses what was computed from others. Needs the extra
    `pointsman[tokenizers]`.
    """

    model: Annotated[
        str, _option("Id of the model as its workers report it, unique.", min_length=1)
    ]
    file: Annotated[str, _option("Its `tokenizer.json`, in the format of Hugging Face.")]
    chat_template: Annotated[
        str,
        _option(
            "File of the Jinja template by which the workers make a text of messages. "
            "Empty: chats are tokenized by the prefill worker."
        ),
    ] = ""
    bos_token: Annotated[str, _option("What the template finds in `bos_token`.")] = ""
    eos_token: Annotated[str, _option("What the template finds in `eos_token`.")] = ""


class GatewayConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Every option of the gateway."""

    listen: Annotated[
        str,
        _option(
            "Address for inference requests: `host:port`, `:port` for every interface, "
            "`[IPv6]:port`. Beyond loopback it needs `keys_file`, or `allow_unauthenticated`.",
            group="Addresses",
            restart=True,
        ),
    ] = ":8080"
    health_listen: Annotated[
        str, _option("Address for /healthz, /readyz and /metrics.", restart=True)
    ] = ":9464"
    registry_listen: Annotated[
        str, _option("Address for the heartbeats of engines (gRPC).", restart=True)
    ] = ":50060"
    allow_unauthenticated: Annotated[
        bool,
        _option("Serve whoever can reach `listen`, although there are no keys.", restart=True),
    ] = False

    heartbeat_miss_limit: Annotated[
        int,
        _option(
            "Heartbeats (one every 2 s) that a worker may miss before it is gone.",
            unit="beats",
            ge=1,
            group="Workers and routing",
            restart=True,
        ),
    ] = 3
    route_policy: Annotated[
        str, _option("How a worker is picked; `docs/policies.md` has the choices.")
    ] = "affinity"
    affinity_load_factor: Annotated[
        float,
        _option(
            "How far above the mean load the owner of a prefix may go before others help.",
            ge=1.0,
        ),
    ] = 1.25
    affinity_bytes: Annotated[
        int, _option("Leading bytes of the prompt that decide its owner.", unit="bytes", ge=1)
    ] = 64
    tie_break: Annotated[
        Literal["smallest", "salted"],
        _option(
            "Among equal loads: the smallest id, or an order of its own for every gateway process."
        ),
    ] = "smallest"
    max_attempts: Annotated[
        int, _option("Workers that are tried for one request.", unit="workers", ge=1)
    ] = 3
    drain_deadline_s: Annotated[
        float,
        _option("How long running requests may go on after SIGTERM.", unit="seconds", ge=0),
    ] = 30.0
    shutdown_grace_s: Annotated[
        float,
        _option(
            "How long to go on accepting connections after SIGTERM, already unready, so that "
            "balancers notice first.",
            unit="seconds",
            ge=0,
        ),
    ] = 0.0
    state_dir: Annotated[
        str,
        _option(
            "Folder for what a restart must not forget (routes and their epoch, static workers put "
            "through the API, drained models, models seen). Empty: nothing is kept.",
            restart=True,
        ),
    ] = ""

    paths: Annotated[
        tuple[str, ...],
        _option("Paths whose POST requests go to engines.", group="Requests and answers"),
    ] = (
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/responses",
        "/v1/messages",
        "/v1/rerank",
        "/v1/score",
    )
    response_model: Annotated[
        Literal["served", "public"],
        _option(
            "The `model` in answers: as the engine sent it, or the id that the client asked for. "
            "For the latter, plain answers are held whole and engines are asked for no encoding."
        ),
    ] = "served"
    max_body_bytes: Annotated[
        int, _option("Largest request body; a larger one is 413.", unit="bytes", ge=1)
    ] = 64 * 1024 * 1024
    hold_bytes: Annotated[
        int,
        _option(
            "A plain answer up to this size is held whole, so that it can still fail over.",
            unit="bytes",
            ge=0,
        ),
    ] = 1024 * 1024

    disagg_min_tokens: Annotated[
        int,
        _option(
            "A prompt of fewer tokens is computed by the decode worker itself. A route may say otherwise.",
            unit="tokens",
            ge=0,
        ),
    ] = 0
    prefill_timeout_s: Annotated[
        float, _option("For a prefill worker to compute a prompt and push it.", unit="s", gt=0)
    ] = 30.0

    connect_timeout_s: Annotated[
        float,
        _option(
            "Wait for a connection to a worker.", unit="seconds", gt=0, group="Towards engines"
        ),
    ] = 5.0
    head_timeout_s: Annotated[
        float,
        _option(
            "Wait for the head of the answer: for a plain answer the whole generation.",
            unit="seconds",
            gt=0,
        ),
    ] = 600.0
    first_byte_timeout_s: Annotated[
        float, _option("Wait for the first body byte after the head.", unit="seconds", gt=0)
    ] = 120.0
    gap_timeout_s: Annotated[
        float, _option("Longest silence between two pieces of an answer.", unit="seconds", gt=0)
    ] = 120.0
    total_timeout_s: Annotated[
        float, _option("Longest time for one request in all; 0 = no limit.", unit="seconds", ge=0)
    ] = 3600.0
    upstream_keepalive_s: Annotated[
        float,
        _option(
            "How long an idle connection is kept; below the limit of the engines (often 5 s).",
            unit="seconds",
            ge=0,
        ),
    ] = 4.0
    upstream_idle_max: Annotated[
        int, _option("Idle connections that are kept per worker.", unit="connections", ge=0)
    ] = 256
    upstream_connections_max: Annotated[
        int, _option("Connections per worker; 0 = no limit.", unit="connections", ge=0)
    ] = 0

    header_timeout_s: Annotated[
        float,
        _option(
            "Wait for the whole head of a request.", unit="seconds", gt=0, group="Towards clients"
        ),
    ] = 10.0
    body_timeout_s: Annotated[
        float, _option("Wait for the whole body of a request.", unit="seconds", gt=0)
    ] = 60.0
    keepalive_timeout_s: Annotated[
        float, _option("How long a client may keep an idle connection.", unit="seconds", gt=0)
    ] = 75.0
    max_header_bytes: Annotated[
        int, _option("Largest request head; a larger one is 431.", unit="bytes", ge=1024)
    ] = 65536
    connections_max: Annotated[
        int, _option("Connections of clients; 0 = no limit.", unit="connections", ge=0)
    ] = 0

    keys_file: Annotated[
        str,
        _option(
            "File of the API keys (JSON Lines), read again when it changes. "
            "Empty: no keys, and every caller may infer.",
            group="Keys and certificates",
            restart=True,
        ),
    ] = ""
    pepper_env: Annotated[
        str, _option("Environment variable with the pepper of the key digests.", restart=True)
    ] = "TL_GATEWAY_PEPPER"
    key_cache_ttl_s: Annotated[
        float,
        _option("How long a verified key is remembered.", unit="seconds", ge=0, le=5, restart=True),
    ] = 5.0
    tls_cert: Annotated[
        str, _option("Certificate chain (PEM) of `listen`. Empty: plaintext HTTP.", restart=True)
    ] = ""
    tls_key: Annotated[str, _option("Private key (PEM) of `tls_cert`.", restart=True)] = ""
    tls_client_ca: Annotated[
        str, _option("Clients of `listen` must show a certificate of this CA (PEM).", restart=True)
    ] = ""
    registry_tls_cert: Annotated[
        str,
        _option(
            "Certificate chain (PEM) of `registry_listen`. Empty: plaintext gRPC.", restart=True
        ),
    ] = ""
    registry_tls_key: Annotated[
        str, _option("Private key (PEM) of `registry_tls_cert`.", restart=True)
    ] = ""
    registry_client_ca: Annotated[
        str, _option("Engines must show a certificate of this CA (PEM) to be heard.", restart=True)
    ] = ""
    upstream_ca: Annotated[
        str,
        _option(
            "CA (PEM) that `https://` engines are trusted by. Empty: those of the system.",
            restart=True,
        ),
    ] = ""
    upstream_cert: Annotated[
        str,
        _option(
            "Certificate chain (PEM) that engines are shown when they ask for one.", restart=True
        ),
    ] = ""
    upstream_key: Annotated[str, _option("Private key (PEM) of `upstream_cert`.", restart=True)] = (
        ""
    )

    watch: Annotated[
        bool,
        _option(
            "Load the configuration file again when it changes, as SIGHUP does.",
            group="Operation",
            restart=True,
        ),
    ] = False
    log_format: Annotated[
        Literal["json", "text"],
        _option("How log lines are written, to standard error.", restart=True),
    ] = "json"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], _option("The least level that is logged.")
    ] = "info"
    access_log: Annotated[
        Literal["off", "sampled", "all"],
        _option(
            "A line for every request, for none, or for those that failed or failed over and a "
            "sample of the others.",
            restart=True,
        ),
    ] = "sampled"
    access_log_sample: Annotated[
        float,
        _option("Part of the uneventful requests that `sampled` logs.", ge=0, le=1, restart=True),
    ] = 0.01
    decisions_kept: Annotated[
        int,
        _option(
            "Requests whose routing can be looked up afterwards.",
            unit="requests",
            ge=0,
            restart=True,
        ),
    ] = 1024
    otel_endpoint: Annotated[
        str,
        _option(
            "Where spans are sent (OTLP over HTTP), such as `http://127.0.0.1:4318`. Empty: none. "
            "Needs the extra `pointsman[otel]`.",
            restart=True,
        ),
    ] = ""
    otel_sample: Annotated[
        float,
        _option(
            "Part of the traces begun here that is sent; others as their caller says.",
            ge=0,
            le=1,
            restart=True,
        ),
    ] = 1.0
    workers_max: Annotated[
        int,
        _option(
            "Workers that may be registered at a time; the next one is refused, loudly.",
            unit="workers",
            ge=1,
            restart=True,
        ),
    ] = 10_000

    cache_entries: Annotated[
        int,
        _option(
            "Answers that the response cache holds.",
            unit="entries",
            ge=0,
            group="Known, without effect in this version",
            restart=True,
        ),
    ] = 4096
    cache_ttl_s: Annotated[
        float, _option("How long a cached answer is used.", unit="seconds", ge=0, restart=True)
    ] = 300.0
    upstream: Annotated[
        str, _option("One engine instead of a registry; must be empty.", restart=True)
    ] = ""
    policy_file: Annotated[
        str, _option("File of the usage policy; must be empty.", restart=True)
    ] = ""
    usage_db: Annotated[str, _option("File of the usage ledger; must be empty.", restart=True)] = ""

    workers: Annotated[
        tuple[StaticWorker, ...], _option("Engines that send no heartbeats.", group="Tables")
    ] = ()
    routes: Annotated[
        tuple[Route, ...],
        _option("Public model ids, their aliases and backends; `docs/routes.md`."),
    ] = ()
    acceptors: Annotated[
        tuple[LearnedAcceptor, ...], _option("Learned acceptors of cascades.")
    ] = ()
    tokenizers: Annotated[
        tuple[TokenizerFile, ...], _option("Tokenizers of the gateway's own, for hand-offs.")
    ] = ()
    mounts: Annotated[
        tuple[Mount, ...],
        _option("Endpoints of your own, served beside the gateway's.", restart=True),
    ] = ()


class Config(Struct, frozen=True, forbid_unknown_fields=True):
    """A whole configuration file."""

    gateway: Annotated[GatewayConfig, _option("The gateway.")] = GatewayConfig()
    ext: Annotated[
        dict[str, Any], _option("Free for others; the gateway does not look inside.")
    ] = msgspec.field(default_factory=dict)


ROUTE_DOCS = {
    Route: {
        "model": "Public model id, unique over ids and aliases.",
        "aliases": "Other names for it.",
        "targets": "`unified` or `disaggregated`, in order of preference.",
        "backends": "What serves it, drawn by request id. Empty: workers of the model id itself.",
        "cascade": "Models to ask one after another, until an answer is good enough.",
        "default_max_tokens": "For requests that set no limit of their own (disaggregated only).",
        "disagg_min_tokens": "A shorter prompt is computed by the decode worker itself.",
        "stream_hold": "Lets every step of the cascade try a streamed request; without it the last one gets it.",
        "shadow": "Fraction of a cascade's requests for which the last model is asked, too, to compare.",
    },
    Backend: {
        "model": "Model id as the workers report it.",
        "weight": "Its share of the requests; the weights of a route sum to 1.",
    },
    Step: {
        "model": "Model id as the workers report it.",
        "accept_if": "When its answer is kept, such as `mean_logprob >= -1.0`.",
        "acceptor": "Name of the learned acceptor that a rule over `score` asks.",
    },
    StreamHold: {
        "tokens": "Tokens after which a held stream is judged.",
        "seconds": "Time after which it is judged by the tokens that are there.",
    },
}
"""What the keys of a route are. They are values of the domain, which the admin API speaks as well."""

NOT_SERVED = ("upstream", "policy_file", "usage_db")
"""Options of the contract whose features do not exist yet: silence would be a lie."""


# ------------------------------------------------------------------ loading

PATH = re.compile(r"(/[A-Za-z0-9._~!$&'()*+,;=:@-]+)+")
ENV_NAME = re.compile(r"TL_([A-Z0-9]+)__(.+)")


def load(path: Path | None, sets: Sequence[str], environ: Mapping[str, str]) -> Config:
    """Return the configuration of a file (None: the defaults), the environment and `--set`.

    `TL_GATEWAY__<KEY>` beats the file, `gateway.key=value` of `sets` beats both; both are for
    scalars. Raises ConfigError for whatever is unknown, of the wrong type, out of its range, not
    served by this version, or open to the world without being said to be.
    """
    document = {} if path is None else _toml(path)
    sections = _fields(Config)
    for section in document:
        if section not in sections:
            raise _unknown(section, "section", section, sections)
    table = document.get("gateway", {})
    if not isinstance(table, dict):
        raise ConfigError(f"gateway = {_shown(table)}: expected a table")

    origin: dict[str, str] = {}
    merged: dict[str, object] = dict(table)
    for key, text, place in [*_from_environment(environ), *_from_sets(sets)]:
        merged[key], origin[key] = text, f"gateway.{key} (from {place})"

    gateway = _read(GatewayConfig, merged, "gateway", origin)
    ext = document.get("ext", {})
    if not isinstance(ext, dict):
        raise ConfigError(f"ext = {_shown(ext)}: expected a table")
    _check(gateway, origin)
    return Config(gateway=gateway, ext=ext)


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not a UTF-8 text") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


def _from_environment(environ: Mapping[str, str]) -> list[tuple[str, object, str]]:
    found = []
    for name in sorted(environ):
        match = ENV_NAME.fullmatch(name)
        if match is None or match[1] == "EXT":
            continue
        if match[1] != "GATEWAY":
            raise _unknown(name, "section", match[1], {"GATEWAY": None, "EXT": None})
        found.append((*_scalar(match[2].lower(), environ[name], name), name))
    return found


def _from_sets(sets: Sequence[str]) -> list[tuple[str, object, str]]:
    found = []
    for assignment in sets:
        name, equals, text = assignment.partition("=")
        section, _, key = name.strip().partition(".")
        if not equals or not key:
            raise ConfigError(f"--set {assignment}: expected gateway.key=value")
        if section != "gateway":
            raise _unknown(f"--set {assignment}", "section", section, {"gateway": None})
        found.append((*_scalar(key, text.strip(), f"--set {assignment}"), "--set"))
    return found


def _scalar(key: str, text: str, place: str) -> tuple[str, object]:
    """Return the key and the value that its declared type reads from the text.

    Text that cannot be read stays text: the check of types, which comes later, refuses it.
    """
    fields = _fields(GatewayConfig)
    if key not in fields:
        raise _unknown(place, "key", key, fields)
    match _plain(fields[key].type):
        case inspect.BoolType():
            return key, {"true": True, "1": True, "false": False, "0": False}.get(
                text.lower(), text
            )
        case inspect.IntType() if re.fullmatch(r"[+-]?[0-9]{1,18}", text):
            return key, int(text)
        case inspect.FloatType() if re.fullmatch(r"[+-]?[0-9.]+([eE][+-]?[0-9]+)?", text):
            try:
                return key, float(text)
            except ValueError:
                return key, text
        case inspect.VarTupleType():
            raise ConfigError(
                f"{place}: gateway.{key} is a list; lists belong in the configuration file"
            )
    return key, text


def _read(kind: type[S], table: object, where: str, origin: Mapping[str, str] | None = None) -> S:
    """Return a struct from a TOML table, checked key by key so that a message can name the key."""
    if not isinstance(table, dict):
        raise ConfigError(f"{where} = {_shown(table)}: expected a table")
    fields = _fields(kind)
    for key in table:
        if key not in fields:
            raise _unknown(f"{where}.{key}", "key", key, fields)
    values = {}
    for key, field in fields.items():
        place = (origin or {}).get(key, f"{where}.{key}")
        if key in table:
            values[field.name] = _value(field.type, table[key], place)
        elif field.required:
            raise ConfigError(f"{place} is missing: expected {_allowed(field.type)}")
    return kind(**values)


def _value(kind: Any, value: object, where: str) -> object:
    item = _item(kind)
    if item is not None and isinstance(value, list):
        return tuple(_read(item, entry, f"{where}[{i}]") for i, entry in enumerate(value))
    table = _table(kind)
    if table is not None and isinstance(value, dict):
        return _read(table, value, where)
    try:
        read: object = msgspec.convert(value, kind)
    except msgspec.ValidationError:
        read = math.nan
    if isinstance(read, float) and not math.isfinite(read):
        raise ConfigError(f"{where} = {_shown(value)}: expected {_allowed(kind)}")
    return read


def _check(gateway: GatewayConfig, origin: Mapping[str, str]) -> None:
    """Refuse what no single key shows: values with a grammar, and values that need others."""

    def refuse(key: str, why: str) -> ConfigError:
        value = getattr(gateway, key)
        return ConfigError(f"{origin.get(key, f'gateway.{key}')} = {_shown(value)}: {why}")

    for key in ("listen", "health_listen", "registry_listen"):
        try:
            Address.parse(getattr(gateway, key))
        except ValueError as error:
            raise refuse(key, f"{error}; expected host:port, :port or [IPv6]:port") from None
    for key in NOT_SERVED:
        if getattr(gateway, key):
            raise refuse(key, "not served by this version; leave it empty")
    policies = sorted({*POLICIES, *(found.name for found in entry_points(group=ENTRY_POINTS))})
    if gateway.route_policy not in policies:
        nearest = _nearest(gateway.route_policy, policies)
        raise refuse(
            "route_policy",
            f"no such policy; the nearest valid name is {nearest} (of {', '.join(policies)})",
        )
    try:
        _check_tls(gateway)
    except TlsError as error:
        raise refuse(error.pem.option, error.why) from None
    _check_paths(gateway.paths)
    _check_mounts(gateway)
    _check_workers(gateway.workers)
    models = [each.model for each in gateway.tokenizers]
    for index, model in enumerate(models):
        if model in models[:index]:
            raise ConfigError(f"gateway.tokenizers[{index}].model: {model!r} is there already")
    names = [each.name for each in gateway.acceptors]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise ConfigError(f"gateway.acceptors[{index}].name: {name!r} is there already")
    _check_routes(gateway.routes, names)
    open_to_all = not (gateway.keys_file or gateway.allow_unauthenticated)
    if open_to_all and not Address.parse(gateway.listen).is_loopback:
        raise refuse(
            "listen",
            "without keys whoever can reach this address may use it. Set gateway.listen to a "
            'loopback address such as "127.0.0.1:8080", give it keys with gateway.keys_file, or say '
            "that this is wanted with gateway.allow_unauthenticated = true",
        )


class Tls(NamedTuple):
    """The files of the three sides that may speak TLS."""

    api: TlsFiles
    registry: TlsFiles
    upstream: TlsFiles


def tls_files(gateway: GatewayConfig) -> Tls:
    """Return which files the options name; nothing is read."""

    def files(*options: str) -> TlsFiles:
        return TlsFiles(*(Pem(option, getattr(gateway, option)) for option in options))

    return Tls(
        api=files("tls_cert", "tls_key", "tls_client_ca"),
        registry=files("registry_tls_cert", "registry_tls_key", "registry_client_ca"),
        upstream=files("upstream_cert", "upstream_key", "upstream_ca"),
    )


def _check_tls(gateway: GatewayConfig) -> None:
    sides = tls_files(gateway)
    sides.api.check(server=True)
    sides.registry.check(server=True)
    sides.upstream.check(server=False)


def _check_paths(paths: Sequence[str]) -> None:
    for index, path in enumerate(paths):
        where = f"gateway.paths[{index}] = {_shown(path)}"
        if not PATH.fullmatch(path):
            raise ConfigError(f"{where}: expected a path such as /v1/chat/completions")
        if path in paths[:index]:
            raise ConfigError(f"{where}: it is there already")


def _check_mounts(gateway: GatewayConfig) -> None:
    for index, mount in enumerate(gateway.mounts):
        where = f"gateway.mounts[{index}]"
        if not PATH.fullmatch(mount.path):
            raise ConfigError(
                f"{where}.path = {_shown(mount.path)}: expected a path such as /pages"
            )
        for taken in ("/admin", "/v1/models", *gateway.paths):
            if f"{mount.path}/".startswith(f"{taken}/") or taken.startswith(f"{mount.path}/"):
                raise ConfigError(f"{where}.path = {_shown(mount.path)}: {taken} is served already")
        if mount.path in [other.path for other in gateway.mounts[:index]]:
            raise ConfigError(f"{where}.path = {_shown(mount.path)}: it is there already")


def _check_workers(workers: Sequence[StaticWorker]) -> None:
    fleet = Registry()
    for index, static in enumerate(workers):
        where = f"gateway.workers[{index}]"
        try:
            worker = static.worker()
        except ValueError as error:
            raise ConfigError(f"{where}.url = {_shown(static.url)}: {error}") from None
        try:
            fleet.add(worker)
        except InvalidReport as error:
            raise ConfigError(f"{where}: {error}") from None


def _check_routes(routes: Sequence[Route], acceptors: Collection[str]) -> None:
    try:
        RouteTable.validate(routes)
        servable(routes, acceptors)
    except InvalidRoutes as error:
        raise ConfigError(f"gateway.{error.message}") from None


def servable(routes: Sequence[Route], acceptors: Collection[str] = ()) -> None:
    """Raise InvalidRoutes for a rule whose learned acceptor is none of the configuration's."""
    for index, route in enumerate(routes):
        for number, step in enumerate(route.cascade):
            if step.acceptor and step.acceptor not in acceptors:
                where = f"routes[{index}].cascade[{number}].acceptor"
                known = ", ".join(sorted(acceptors)) or "none"
                raise InvalidRoutes(
                    f"{where}: there is no acceptor {step.acceptor[:64]!r} in `gateway.acceptors`; "
                    f"there are: {known}",
                    param=where,
                )


def changed_options(old: GatewayConfig, new: GatewayConfig) -> tuple[list[str], list[str]]:
    """Return the options that differ: those that can change while the gateway runs, and those that need a restart."""
    live: list[str] = []
    restart: list[str] = []
    for key, field in _fields(GatewayConfig).items():
        if getattr(old, key) != getattr(new, key):
            (restart if _declared(GatewayConfig, field).restart else live).append(key)
    return live, restart


# ------------------------------------------------------------------ the declaration, read


def _fields(kind: type[Struct]) -> dict[str, msgspec.structs.FieldInfo]:
    return {field.encode_name: field for field in msgspec.structs.fields(kind)}


def _plain(kind: Any) -> inspect.Type:
    """Return the type without its declaration."""
    found = inspect.type_info(kind)
    return found.type if isinstance(found, inspect.Metadata) else found


def _item(kind: Any) -> type[Struct] | None:
    """Return the struct that a list holds, None for every other type."""
    plain = _plain(kind)
    if isinstance(plain, inspect.VarTupleType) and isinstance(plain.item_type, inspect.StructType):
        return plain.item_type.cls
    return None


def _table(kind: Any) -> type[Struct] | None:
    """Return the struct that a key may hold beside nothing, None for every other type."""
    plain = _plain(kind)
    if isinstance(plain, inspect.UnionType):
        for each in plain.types:
            if isinstance(each, inspect.StructType):
                return each.cls
    return None


def _allowed(kind: Any) -> str:
    """Return in words what an option may be.

    >>> _allowed(Annotated[int, Meta(ge=1)])
    'an integer of at least 1'
    """
    return _in_words(_plain(kind))


def _in_words(kind: inspect.Type) -> str:
    match kind:
        case inspect.IntType():
            return "an integer" + _range(kind)
        case inspect.FloatType():
            return "a number" + _range(kind)
        case inspect.BoolType():
            return "true or false"
        case inspect.StrType():
            return "a string" if not kind.min_length else "a string that is not empty"
        case inspect.LiteralType():
            return " or ".join(map(_shown, kind.values))
        case inspect.EnumType():
            return " or ".join(_shown(member.value) for member in kind.cls)
        case inspect.VarTupleType() if isinstance(kind.item_type, inspect.StructType):
            return "a list of tables"
        case inspect.StructType():
            return "a table"
        case inspect.UnionType():
            return _in_words(kind.types[0])
        case _:
            return "a list of strings"


def _range(kind: inspect.IntType | inspect.FloatType) -> str:
    if kind.ge is not None and kind.le is not None:
        return f" in {kind.ge:g}..{kind.le:g}"
    if kind.ge is not None:
        return f" of at least {kind.ge:g}"
    if kind.gt is not None:
        return f" above {kind.gt:g}"
    return ""


def _unknown(where: str, what: str, name: str, valid: Mapping[str, object]) -> ConfigError:
    return ConfigError(
        f"{where}: unknown {what}; the nearest valid name is {_nearest(name, valid)}"
    )


def _nearest(name: str, valid: Mapping[str, object] | Sequence[str]) -> str:
    return difflib.get_close_matches(name, list(valid), n=1, cutoff=0.0)[0]


def _shown(value: object) -> str:
    """Return a value as one would write it in TOML, at most 80 characters."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."


# ------------------------------------------------------------------ the declaration, printed


def schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a configuration file; `x-unit` names units."""
    made: dict[str, Any] = json.loads(msgspec.json.encode(msgspec.json.schema(Config)))
    for kind, docs in ROUTE_DOCS.items():
        for key, doc in docs.items():
            made["$defs"][kind.__name__]["properties"][key]["description"] = doc
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Pointsman configuration",
        **made,
    }


INTRODUCTION = """\
# Configuration

<!-- Made by `pointsman config reference`. Do not edit: the declaration is src/pointsman/config.py. -->

The gateway reads one TOML file: `pointsman serve --config FILE`. Every option has a default; an
option that does not exist is an error, and so is a section other than `gateway` and `ext`.

An environment variable `TL_GATEWAY__<KEY>` (such as `TL_GATEWAY__MAX_ATTEMPTS=2`) beats the file,
and `--set gateway.<key>=<value>` on the command line beats both. Both are for single values; lists
and tables belong in the file. Truth values are written true, false, 1 or 0.

`pointsman config schema` prints the same as a JSON Schema.

The file is read again on SIGHUP, on `POST /admin/v1/config:reload`, and when it changes where `watch = true`: all of it
takes effect or nothing does. What is marked *Restart* waits for the next start; the answer and the log name it.

A small file:

```toml
[gateway]
listen = "127.0.0.1:8080"
route_policy = "affinity"

[[gateway.workers]]
id = "a"
url = "http://127.0.0.1:8000"
model = "m"

[[gateway.routes]]
model = "chat"
backends = [{ model = "m" }]
```
"""


def reference() -> str:
    """Return the reference page of all options, as Markdown."""
    return INTRODUCTION + "".join(_section("[gateway]", GatewayConfig))


def _section(title: str, kind: type[Struct]) -> list[str]:
    """Return the section of one table, followed by those of the tables inside it."""
    lines = [f"\n## {title}\n\n{(kind.__doc__ or '').strip().partition(chr(10))[0]}\n"]
    inner: list[str] = []
    for index, (key, field) in enumerate(_fields(kind).items()):
        doc, unit, group, restart = _declared(kind, field)
        if restart:
            doc += " *Restart.*"
        if group:
            lines.append(f"\n### {group}\n")
        if group or index == 0:
            lines.append("\n| key | allowed | default | unit | meaning |\n|---|---|---|---|---|\n")
        lines.append(f"| `{key}` | {_allowed(field.type)} | {_default(field)} | {unit} | {doc} |\n")
        item = _item(field.type)
        if item is not None:
            inner += _section(f"[[{title.strip('[]')}.{key}]]", item)
        table = _table(field.type)
        if table is not None:
            inner += _section(f"[{title.strip('[]')}.{key}]", table)
    return lines + inner


class _Declaration(NamedTuple):
    """What is said of an option beside its type; `unit` and `group` are "" for none."""

    doc: str
    unit: str = ""
    group: str = ""
    restart: bool = False


def _declared(kind: type[Struct], field: msgspec.structs.FieldInfo) -> _Declaration:
    declared = inspect.type_info(field.type)
    if isinstance(declared, inspect.Metadata):
        extra = declared.extra or {}
        doc = (declared.extra_json_schema or {})["description"]
        return _Declaration(doc, extra["unit"], extra["group"], extra["restart"])
    return _Declaration(ROUTE_DOCS[kind][field.name])


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "required"
    return "none" if field.default is None else f"`{json.dumps(field.default)}`"
