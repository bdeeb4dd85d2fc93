"""The registry's wire side: `tl.control.v1.WorkerRegistry/Heartbeat` over gRPC.

Bytes become a `WorkerReport`, the pure `Registry` judges it, its `Ack` becomes bytes. Whatever an
engine sends, the worst that happens is a status: INVALID_ARGUMENT for nonsense and
RESOURCE_EXHAUSTED for one worker too many, which change nothing, and INTERNAL for a fault of the
gateway, which is counted.

The contract's default is plaintext on a trusted network; `Credentials` are for all others. Who may
say what about which worker is not decided here: an engine that is let in is believed.
"""

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from pointsman.certificates import TlsFiles
from pointsman.domain.registry import InvalidReport, Registry, RegistryFull, WorkerReport
from pointsman.domain.worker import TL_BLOCK_TOKENS, ServedModel
from pointsman.proto.control_pb2 import HeartbeatAck, WorkerStatus

__all__ = [
    "MESSAGE_LIMIT_BYTES",
    "SERVICE",
    "Credentials",
    "HeartbeatService",
    "serve_registry",
]

logger = logging.getLogger(__name__)

SERVICE = "tl.control.v1.WorkerRegistry"

MESSAGE_LIMIT_BYTES = 4 * 1024 * 1024
"""Largest message in both directions. Source: contract, section 0."""

DEGRADED_LIMIT = 512
"""Longest text that is kept of what a worker says about itself, in characters."""

REASON_LIMIT = 512
"""Longest reason in a status: it travels in a header, whose size HTTP/2 peers limit."""


class HeartbeatService:
    """Turns heartbeats into beats of a registry.

    `now` is in seconds of the monotonic clock; `on_fault` is called for an exception that nobody
    foresaw.
    """

    def __init__(
        self,
        registry: Registry,
        now: Callable[[], float],
        on_fault: Callable[[], None] = lambda: None,
    ) -> None:
        self._registry = registry
        self._now = now
        self._on_fault = on_fault

    def beat(self, message: bytes) -> bytes:
        """Return the serialized ack of one serialized WorkerStatus.

        Raises InvalidReport, and changes nothing, where the bytes are no sound report.
        """
        ack = self._registry.beat(_report(message), self._now())
        answer = HeartbeatAck(drain=ack.drain, route_epoch=ack.route_epoch)
        return bytes(answer.SerializeToString())

    async def heartbeat(self, message: bytes, context: Any) -> bytes:
        """Answer one call of grpc.aio."""
        try:
            return self.beat(message)
        except RegistryFull as error:
            code, reason = grpc.StatusCode.RESOURCE_EXHAUSTED, str(error)[:REASON_LIMIT]
        except InvalidReport as error:
            code, reason = grpc.StatusCode.INVALID_ARGUMENT, str(error)[:REASON_LIMIT]
        except Exception:
            self._on_fault()
            logger.exception("a heartbeat failed")
            code, reason = grpc.StatusCode.INTERNAL, "the gateway failed on this heartbeat"
        await context.abort(code, reason)
        raise AssertionError("abort returned")

    def generic_handler(self) -> Any:
        """Return the service for `grpc.aio.Server.add_generic_rpc_handlers`.

        Messages stay bytes until `beat`, so that nonsense gets a status of ours.
        """
        method = grpc.unary_unary_rpc_method_handler(self.heartbeat)
        return grpc.method_handlers_generic_handler(SERVICE, {"Heartbeat": method})


class Credentials:
    """Whom the registry's port shows itself as, and whom it lets in, as files that may be replaced.

    With a CA only engines that show a certificate of it are let in. Raises TlsError for files that
    cannot be used.
    """

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        # gRPC takes from it, in a thread of its own.
        self._fresh: deque[Any] = deque(maxlen=1)
        self.server = grpc.dynamic_ssl_server_credentials(
            self._read(), self._changed, require_client_authentication=bool(files.ca.path)
        )
        """What gRPC wants for a port."""

    def prepare(self) -> Callable[[], None]:
        """Read the files again, and return what puts them in force for new connections.

        What is returned cannot fail. Raises TlsError.
        """
        fresh = self._read()
        return lambda: self._fresh.append(fresh)

    def _read(self) -> Any:
        files = self._files
        files.check(server=True)
        pair = (files.key.read(), files.cert.read())
        return grpc.ssl_server_certificate_configuration([pair], files.ca.read() or None)

    def _changed(self) -> Any:
        """Return what is new since the last connection, None for nothing. gRPC asks before each."""
        try:
            return self._fresh.pop()
        except IndexError:
            return None


async def serve_registry(
    listen: str, service: HeartbeatService, credentials: Credentials | None = None
) -> tuple[Any, int]:
    """Start a grpc.aio server and return it with the port that it got.

    `listen` is `host:port`, `:port` (every interface) or `[IPv6]:port`; port 0 lets the kernel
    choose. Without credentials it speaks plaintext. Raises OSError where the address cannot be had.
    """
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", MESSAGE_LIMIT_BYTES),
            ("grpc.max_send_message_length", MESSAGE_LIMIT_BYTES),
            # Two gateways on one port would each see half of the beats, and evict every worker.
            ("grpc.so_reuseport", 0),
        ]
    )
    server.add_generic_rpc_handlers((service.generic_handler(),))
    address = f"[::]{listen}" if listen[0] == ":" else listen
    try:
        port: int = (
            server.add_insecure_port(address)
            if credentials is None
            else server.add_secure_port(address, credentials.server)
        )
    except RuntimeError:
        raise OSError(
            f"{listen} for heartbeats: it is taken, or no address of this machine"
        ) from None
    await server.start()
    return server, port


def _report(message: bytes) -> WorkerReport:
    try:
        status = WorkerStatus.FromString(message)
    except DecodeError:
        raise InvalidReport("not a WorkerStatus") from None
    return WorkerReport(
        worker_id=status.worker_id,
        http_address=status.http_address,
        grpc_address=status.grpc_address,
        kv_address=status.kv_address,
        role=status.role,
        model=status.model,
        kv_format=status.kv_format,
        queue_depth=status.queue_depth,
        running=status.running,
        kv_free_blocks=status.kv_free_blocks,
        kv_total_blocks=status.kv_total_blocks,
        kv_tokens=_kv_tokens(status),
        draining=status.draining,
        incarnation=status.incarnation if status.HasField("incarnation") else None,
        dialect=status.dialect or "tl",
        base_path=status.base_path,
        connector=status.connector,
        bootstrap=status.bootstrap,
        served=tuple(
            ServedModel(each.id, each.parent, each.max_model_len) for each in status.served
        ),
        max_model_len=status.max_model_len,
        lora_slots=status.lora_slots,
        slots=status.slots,
        kv_usage=status.kv_usage if status.HasField("kv_usage") else -1.0,
        cached_tokens=status.cached_tokens if status.HasField("cached_tokens") else -1,
        remote_tokens=status.remote_tokens if status.HasField("remote_tokens") else -1,
        degraded=status.degraded[:DEGRADED_LIMIT],
    )


def _kv_tokens(status: WorkerStatus) -> int:
    if status.HasField("kv_tokens"):
        return status.kv_tokens
    return status.kv_total_blocks * TL_BLOCK_TOKENS if status.dialect in ("", "tl") else 0
