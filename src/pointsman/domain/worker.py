"""What a worker is: one life of one engine process, as the gateway knows it.

A `Worker` is compared by identity, not by id. A restarted engine (a new incarnation, or new addresses under an old
id) becomes a new `Worker` object, so whatever still refers to the old one (a request in flight, an exclusion, a pool
of connections) cannot touch the counts of the new one.

The numbers that heartbeats move (`queue_depth`, `running`, the KV blocks) are updated in place. `in_flight` is the
gateway's own count and belongs to `pointsman.domain.ledger` alone.
"""

from enum import StrEnum

__all__ = ["Role", "Worker", "load_of"]


class Role(StrEnum):
    """What a worker can be asked to do."""

    UNIFIED = "unified"
    PREFILL = "prefill"
    DECODE = "decode"


class Worker:
    """One live engine.

    `http_address` is what was announced: `host:port`, or that after `http://` or `https://`; `tls` says whether the
    engine is spoken to over TLS. `grpc_address` and `kv_address` are `host:port` ("" where the engine has none).
    `base_path` is put before every request path ("" or `/x`); `queue_depth`, `running` and `in_flight` count requests;
    `kv_total_blocks` is the capacity that the weighted policy uses; `kv_format` is the KV block format that it writes;
    `incarnation` is 0 where the engine sends none; `last_heartbeat` is in seconds of the monotonic clock; `static`
    workers never expire.
    """

    __slots__ = (
        "base_path",
        "draining",
        "grpc_address",
        "http_address",
        "id",
        "in_flight",
        "incarnation",
        "kv_address",
        "kv_format",
        "kv_free_blocks",
        "kv_total_blocks",
        "last_heartbeat",
        "model",
        "queue_depth",
        "role",
        "running",
        "static",
        "tls",
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
        draining: bool = False,
        incarnation: int = 0,
        last_heartbeat: float = 0.0,
        static: bool = False,
        tls: bool = False,
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
        self.draining = draining
        self.incarnation = incarnation
        self.last_heartbeat = last_heartbeat
        self.static = static
        self.tls = tls
        self.in_flight = 0

    def __repr__(self) -> str:
        state = "draining" if self.draining else "routable"
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
