"""The limits of both sides, as values. Times are seconds, `inf` for no limit."""

from dataclasses import dataclass
from math import inf

__all__ = ["DownstreamLimits", "UpstreamLimits"]


@dataclass(frozen=True, slots=True)
class UpstreamLimits:
    """What an engine may take.

    `connect_s` is for a new connection, waiting for a free one included. `head_s` runs from the request to the end of
    the response head, `first_byte_s` from there to the first body byte, `gap_s` between body bytes, `total_s` over the
    whole request with all its attempts. `connections` per worker, 0 for no limit; `idle_max` idle ones per worker, each
    for `keepalive_s` at most. `hold_bytes` of a plain answer are held before it commits.
    """

    connect_s: float = 5.0
    head_s: float = 600.0
    first_byte_s: float = 120.0
    gap_s: float = 120.0
    total_s: float = inf
    keepalive_s: float = 4.0
    idle_max: int = 256
    connections: int = 0
    hold_bytes: int = 1 << 20


@dataclass(frozen=True, slots=True)
class DownstreamLimits:
    """What a client may take.

    `head_s` and `body_s` for sending a request's head and body, `keepalive_s` between two requests, `stall_s` without
    taking a single byte of an answer. `head_bytes` and `body_bytes` bound the request, `connections` how many there are
    at a time, 0 for no limit.
    """

    head_s: float = 10.0
    body_s: float = 60.0
    keepalive_s: float = 75.0
    stall_s: float = 300.0
    head_bytes: int = 65536
    body_bytes: int = 64 << 20
    connections: int = 0
