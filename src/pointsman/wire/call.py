"""A call to a worker beside the request itself, as a value: what to tokenize, prefill, release or ask.

Who makes one (`pointsman.dialect`) does no I/O, and who performs it (`pointsman.net.calls`) does not know what it says.
"""

from msgspec import Struct

from pointsman.domain.worker import Worker

__all__ = ["HttpCall", "RpcCall"]


class HttpCall(Struct, frozen=True, eq=False, gc=False):
    """POST a JSON body to a path of a worker, or `get` it, and take the whole answer. `headers` are whole lines."""

    worker: Worker
    path: bytes
    body: bytes
    timeout_s: float
    headers: bytes = b""
    get: bool = False


class RpcCall(Struct, frozen=True, eq=False, gc=False):
    """Call a unary gRPC method of a worker: `method` is `/package.Service/Method`, `message` the encoded request.

    `address` is host:port; it is one of the worker's, who may leave before the call is over. `peer` is another worker
    that it needs for that.
    """

    worker: Worker
    address: str
    method: str
    message: bytes
    timeout_s: float
    metadata: tuple[tuple[str, str], ...] = ()
    peer: Worker | None = None
