"""Asking an engine to drain: `tl.engine.v1.EngineControl/Drain` over gRPC.

The engine stops admitting, runs what it has up to the deadline, and then answers how many requests it aborted. A drain
of the gateway does not depend on it: an engine that cannot be asked hears of the drain in its next heartbeat.
"""

import grpc

from pointsman.proto.engine_pb2 import DrainRequest, DrainResponse

__all__ = ["DRAIN", "EngineUnavailable", "drain_engine"]

DRAIN = "/tl.engine.v1.EngineControl/Drain"

PATIENCE_S = 10.0
"""How long an engine may take beyond the deadline that it was given."""

CONNECT_S = 5.0
"""How long connecting may take; no engine of the same network needs longer."""


class EngineUnavailable(Exception):
    """The engine could not be asked, or did not answer in time; the text says which."""


async def drain_engine(
    address: str, deadline_s: float, *, patience_s: float = PATIENCE_S, connect_s: float = CONNECT_S
) -> int:
    """Ask the engine at `address` (host:port) to drain within `deadline_s`; return how many requests it aborted.

    Raises EngineUnavailable where it cannot be connected to within `connect_s` seconds, or has not answered
    `patience_s` seconds after the deadline.
    """
    options = [
        ("grpc.min_reconnect_backoff_ms", round(connect_s * 1000)),  # also bounds the first attempt
        ("grpc.enable_http_proxy", 0),  # a proxy to the outside does not lead to engines
    ]
    async with grpc.aio.insecure_channel(address, options) as channel:
        call = channel.unary_unary(
            DRAIN,
            request_serializer=DrainRequest.SerializeToString,
            response_deserializer=DrainResponse.FromString,
        )
        try:
            answer = await call(
                DrainRequest(deadline_ms=round(deadline_s * 1000)), timeout=deadline_s + patience_s
            )
        except grpc.aio.AioRpcError as error:
            raise EngineUnavailable(f"{error.code().name}: {error.details()}") from None
    return int(answer.aborted)
