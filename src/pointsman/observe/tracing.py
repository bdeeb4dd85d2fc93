"""Who makes the spans of requests: nobody, unless there is an endpoint for them.

OpenTelemetry is an extra. It is imported where tracing is wanted and only there, so that whoever goes without pays
neither for its import nor for a single call.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pointsman.observe.spans import Spans

__all__ = ["TracingUnavailable", "open_tracing"]


class TracingUnavailable(Exception):
    """Spans are wanted, and what makes them is not installed."""


def open_tracing(
    endpoint: str,
    sample: float,
    *,
    random_bits: Callable[[int], int],
    wall_ns: Callable[[], int],
) -> "Spans":
    """Return who makes spans of requests and sends them to `endpoint` (OTLP over HTTP) in a thread of its own.

    `sample` is the part of the traces begun here that is sent, 0 to 1; `random_bits` returns so many random bits;
    `wall_ns` nanoseconds since 1970. Raises TracingUnavailable where the extra is missing.
    """
    try:
        from pointsman.observe.spans import Spans, exporter_to
    except ModuleNotFoundError as error:
        raise TracingUnavailable(
            f"otel_endpoint needs {error.name}: install the extra, pointsman[otel]"
        ) from error
    return Spans(exporter_to(endpoint), sample, random_bits=random_bits, wall_ns=wall_ns)
