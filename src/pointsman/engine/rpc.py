"""Starting a gRPC server of the engine: one service on one address, plaintext, messages of at most 4 MiB."""

from typing import Any

import grpc
import grpc.aio

__all__ = ["MESSAGE_LIMIT_BYTES", "serve_rpc"]

MESSAGE_LIMIT_BYTES = 4 << 20
"""Largest message in both directions. Source: contract, section 0."""


async def serve_rpc(listen: str, handler: grpc.GenericRpcHandler) -> tuple[Any, str]:
    """Start a grpc.aio server; returns it, and the host:port that it got. Port 0 of `listen` takes a free one.

    Raises:
        ValueError: `listen` is not host:port.
        OSError: the address cannot be had.
    """
    host, colon, port = listen.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{listen!r} is not host:port")
    host = host or "127.0.0.1"
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", MESSAGE_LIMIT_BYTES),
            ("grpc.max_send_message_length", MESSAGE_LIMIT_BYTES),
            # Two engines on one port would each get half of the calls.
            ("grpc.so_reuseport", 0),
        ]
    )
    server.add_generic_rpc_handlers((handler,))
    try:
        bound = server.add_insecure_port(f"{host}:{port}")
    except RuntimeError:
        raise OSError(f"cannot listen on {listen}") from None
    await server.start()
    return server, f"{host}:{bound}"
