"""What a worker is: one life of one engine process, as the gateway knows it.

A `Worker` is compared by identity, not by id. A restarted engine (a new incarnation, or new addresses under an old
id) becomes a new `Worker` object, so whatever still refers to the old one (a request in flight, an exclusion, a pool
of connections) cannot touch the counts of the new one.

The numbers that heartbeats move (`queue_depth`, `running`, the KV blocks) are updated in place. `in_flight` is the
gateway's own count and belongs to `pointsman.domain.ledger` alone, as the counts of tokens belong to
`pointsman.domain.placement`.
"""

from enum import StrEnum
from typing import NamedTuple

__all__ = ["TL_BLOCK_TOKENS", "Role", "ServedModel", "Worker", "connector_of", "load_of"]

TL_BLOCK_TOKENS = 16
"""Tokens in a KV block of an engine of the dialect `tl`, as its contract has it."""

CONNECTORS = {"": "tl", "tl": "tl", "sglang": "bootstrap", "llamacpp": "slots"}
"""The connector of a dialect that has one. vLLM has several, and a worker must say which."""


class Role(StrEnum):
    """What a worker can be asked to do."""

    UNIFIED = "unified"
    PREFILL = "prefill"
    DECODE = "decode"


class ServedModel(NamedTuple):
    """One model that an engine lists: an alias, or an adapter of the model `parent`.

    `max_model_len` is its longest context in tokens, 0 where the engine does not say.
    """

    id: str
    parent: str = ""
    max_model_len: int = 0


class Worker:
    """One live engine.

    `http_address` is what was announced: `host:port`, or that after `http://` or `https://`; `tls` says whether the
    engine is spoken to over TLS. `grpc_address` and `kv_address` are `host:port` ("" where the engine has none).
    `base_path` is put before every request path ("" or `/x`); `queue_depth`, `running` and `in_flight` count requests;
    `kv_total_blocks` is the capacity that the weighted policy uses, in whatever its engine counts; `kv_tokens` is the
    room of its KV cache in tokens, 0 where nobody tells; `kv_format` is the KV block format that it writes;
    `incarnation` is 0 where the engine sends none; `last_heartbeat` is in seconds of the monotonic clock, that of the
    last good round for a worker that is polled.

    `static` workers are listed by a `source` and send no heartbeats, so they never expire. `polled` ones are asked
    every `poll_interval_s` seconds, each probe for at most `poll_timeout_s`; `up` is what came of it, `degraded` what
    could not be read, "" for nothing. `dialect` is how the engine is spoken to, "" as long as nobody knows; `connector`
    is how it hands over KV caches, `bootstrap` the host:port where others meet it for that. `served` are the models
    that it lists, `max_model_len` is the longest context of `model`, `lora_slots` how many adapters it can have loaded,
    `slots` how many numbered places for requests it has (0: none, or unknown), `lacks` the API paths that it turned out
    not to serve. `kv_usage` is 0 to 1; it, `cached_tokens` (prompt tokens that were in its cache) and `remote_tokens`
    (those that came from other engines), both since its start, are -1 where unknown. `capacity` is the weight that was
    configured, 0 for the engine's own. `credentials` is a header line.

    `pending_tokens` are those of prompts that were sent to it, that it has to compute, and whose answers have not
    begun; `active_tokens` are those of all prompts that it has in flight. Both are 0 where no policy measures them.

    `kv_events` is where it publishes what it caches, `kv_replay` where that can be asked for again, both of rank 0 as
    `tcp://host:port`, "" for none; each further one of its `kv_ranks` has the next port. `kv_fault` is why that cannot
    be read, "" for nothing.

    `configured_model` ("" for whatever it serves) and `configured_dialect` ("" for whatever it turns out to be) are
    what it began with. `terminating` is the word of its source that it is about to go.
    """

    __slots__ = (
        "active_tokens",
        "base_path",
        "bootstrap",
        "cached_tokens",
        "capacity",
        "configured_dialect",
        "configured_model",
        "connector",
        "credentials",
        "degraded",
        "dialect",
        "draining",
        "grpc_address",
        "http_address",
        "id",
        "in_flight",
        "incarnation",
        "kv_address",
        "kv_events",
        "kv_fault",
        "kv_format",
        "kv_free_blocks",
        "kv_ranks",
        "kv_replay",
        "kv_tokens",
        "kv_total_blocks",
        "kv_usage",
        "lacks",
        "last_heartbeat",
        "lora_slots",
        "max_model_len",
        "model",
        "pending_tokens",
        "poll_interval_s",
        "poll_timeout_s",
        "polled",
        "queue_depth",
        "remote_tokens",
        "role",
        "running",
        "served",
        "slots",
        "source",
        "static",
        "terminating",
        "tls",
        "up",
    )

    def __init__(
        self,
        id: str,
        *,
        model: str,
        http_address: str,
        role: Role = Role.UNIFIED,
        grpc_address: str = "",
        kv_address: str = "",
        base_path: str = "",
        kv_format: int = 1,
        queue_depth: int = 0,
        running: int = 0,
        kv_free_blocks: int = 0,
        kv_total_blocks: int = 0,
        kv_tokens: int = 0,
        draining: bool = False,
        incarnation: int = 0,
        last_heartbeat: float = 0.0,
        static: bool = False,
        tls: bool = False,
        dialect: str = "tl",
        connector: str = "",
        bootstrap: str = "",
        source: str = "",
        polled: bool = False,
        poll_interval_s: float = 2.0,
        poll_timeout_s: float = 2.0,
        capacity: int = 0,
        credentials: bytes = b"",
        terminating: bool = False,
        kv_events: str = "",
        kv_replay: str = "",
        kv_ranks: int = 1,
    ) -> None:
        self.id = id
        self.model = model
        self.http_address = http_address
        self.role = role
        self.grpc_address = grpc_address
        self.kv_address = kv_address
        self.base_path = base_path
        self.kv_format = kv_format
        self.queue_depth = queue_depth
        self.running = running
        self.kv_free_blocks = kv_free_blocks
        self.kv_total_blocks = kv_total_blocks
        self.kv_tokens = kv_tokens
        self.draining = draining
        self.incarnation = incarnation
        self.last_heartbeat = last_heartbeat
        self.static = static
        self.tls = tls
        self.dialect = self.configured_dialect = dialect
        self.configured_model = model
        self.connector = connector
        self.bootstrap = bootstrap
        self.source = source
        self.polled = polled
        self.poll_interval_s = poll_interval_s
        self.poll_timeout_s = poll_timeout_s
        self.capacity = capacity
        self.credentials = credentials
        self.terminating = terminating
        self.kv_events = kv_events
        self.kv_replay = kv_replay
        self.kv_ranks = kv_ranks
        self.kv_fault = ""
        # Nobody is sent to a worker that has not answered yet.
        self.up = not polled
        self.degraded = ""
        self.served: tuple[ServedModel, ...] = ()
        self.max_model_len = 0
        self.lora_slots = 0
        self.slots = 0
        self.kv_usage = -1.0
        self.cached_tokens = -1
        self.remote_tokens = -1
        self.lacks: set[str] = set()
        self.in_flight = 0
        self.pending_tokens = 0
        self.active_tokens = 0

    def __repr__(self) -> str:
        state = (
            "down"
            if not self.up
            else "draining"
            if self.draining or self.terminating
            else "routable"
        )
        return f"<Worker {self.id} {self.role} {self.model} {state} load {load_of(self)}>"


def load_of(worker: Worker) -> int:
    """Return how many requests a worker holds: the gateway's in-flight count plus the engine's queue.

    In flight reacts at once; the queue depth shows the load that other gateways put there. Requests that run are not
    added: those of this gateway are in flight already. Source: specification, section 2.2.

    >>> worker = Worker("a", model="m", http_address="127.0.0.1:8000", queue_depth=2)
    >>> worker.in_flight += 1
    >>> load_of(worker)
    3
    """
    return worker.in_flight + worker.queue_depth


def connector_of(worker: Worker) -> str:
    """Return how a worker hands over the caches of prompts, "" where it does not.

    >>> connector_of(Worker("a", model="m", http_address="127.0.0.1:8000", dialect="sglang"))
    'bootstrap'
    """
    return worker.connector or CONNECTORS.get(worker.dialect, "")
