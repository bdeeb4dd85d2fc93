"""The spans of a request, made after the fact from what is known of it when it is over.

Nothing is opened, closed or carried about while a request runs, so a trace costs nothing until its end, and an untraced
request costs one comparison. The span of the call to the engine has the id that the engine saw as its parent; the
others get theirs here.

Sending is the work of a thread. A collector that cannot be reached costs spans, which are counted and, once a minute,
logged; it never costs a request. Attributes have neither prompt nor key.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.util.types import AttributeValue

from pointsman import __version__
from pointsman.flow.exchange import CLIENT_GONE, Attempt, Exchange
from pointsman.observe.logs import SERVICE, from_outside

__all__ = ["Spans", "exporter_to", "sampled"]

logger = logging.getLogger(__name__)

WAITING_MAX = 8192
"""Spans that wait to be sent, or are being sent. A request that comes on top of them is not traced."""

BATCH = 512

SEND_TIMEOUT_S = 5.0

COMPLAIN_EVERY_S = 60.0

NANOS = 1_000_000_000
UNSET = Status(StatusCode.UNSET)
SAMPLED = TraceFlags(TraceFlags.SAMPLED)
SCOPE = InstrumentationScope(SERVICE, __version__)

Attributes = dict[str, AttributeValue]


def exporter_to(endpoint: str) -> SpanExporter:
    """Return what sends spans to a collector, `http://host:4318` or with the whole path."""
    base = endpoint.rstrip("/")
    url = base if base.endswith("/v1/traces") else f"{base}/v1/traces"
    return OTLPSpanExporter(endpoint=url, timeout=SEND_TIMEOUT_S)


def sampled(trace: bytes, parent: bytes, sample: float) -> bool:
    """Tell whether a trace is sent: as the caller's flag says, and `sample` of those begun here.

    Which of those is decided by the trace id alone, so everybody who uses the same part picks the same traces.

    >>> begun = b"00-000000000000000040000000000000ff-00000000000000aa-01"
    >>> sampled(begun, b"", 0.5), sampled(begun, b"", 0.1)
    (True, False)
    >>> sampled(begun, b"00-000000000000000040000000000000ff-00000000000000bb-00", 1.0)
    False
    """
    if parent:
        return bool(int(parent[53:55], 16) & 1)
    return int(trace[19:35], 16) < round(sample * (1 << 64))


class Spans:
    """Makes spans of the requests that are over, and has them sent.

    The arguments are those of `tracing.open_tracing`; `exporter` may be any that OpenTelemetry has.
    """

    def __init__(
        self,
        exporter: SpanExporter,
        sample: float,
        *,
        random_bits: Callable[[int], int],
        wall_ns: Callable[[], int],
    ) -> None:
        self._sample = sample
        self._random_bits = random_bits
        self._wall_ns = wall_ns
        self._made = self._dropped = 0
        self._exporter = _Counted(exporter)
        # It tells of every failure and of every retry; `_Counted` says it once a minute.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self._processor = BatchSpanProcessor(
            self._exporter, max_queue_size=2 * WAITING_MAX, max_export_batch_size=BATCH
        )
        self._resource = Resource.create({"service.name": SERVICE, "service.version": __version__})

    def finished(self, x: Exchange) -> None:
        """Make the spans of a request, if its trace is sent."""
        if not x.trace or not sampled(x.trace, x.parent, self._sample):
            return
        if self._made - self._exporter.done > WAITING_MAX:
            self._dropped += 3 + bool(x.tries) + sum(each.transfer is not None for each in x.tries)
            return
        for span in self._spans(x):
            self._made += 1
            self._processor.on_end(span)

    def outcomes(self) -> dict[str, int]:
        """Return how many spans were `sent`, were lost (`failed`), and were not made as too many waited (`dropped`)."""
        exporter = self._exporter
        return {"sent": exporter.sent, "failed": exporter.failed, "dropped": self._dropped}

    def close(self, deadline_s: float) -> None:
        """Send what waits, for at most so many seconds, and end. It blocks: call it in a thread."""
        last = threading.Thread(target=self._processor.shutdown, daemon=True)
        last.start()
        last.join(deadline_s)
        if last.is_alive():
            self._exporter.shutdown()

    def _spans(self, x: Exchange) -> list[ReadableSpan]:
        trace_id = int(x.trace[3:35], 16)
        ended = self._wall_ns()

        def at(moment: float) -> int:
            return ended - int((x.finished_at - moment) * NANOS)

        def context(span_id: int) -> SpanContext:
            return SpanContext(trace_id, span_id, is_remote=False, trace_flags=SAMPLED)

        def span(
            name: str,
            of: SpanContext,
            parent: SpanContext | None,
            kind: SpanKind,
            start: float,
            end: float,
            attributes: Attributes,
            events: Sequence[Event] = (),
            status: Status = UNSET,
        ) -> ReadableSpan:
            return ReadableSpan(
                name,
                of,
                parent,
                self._resource,
                attributes,
                events,
                kind=kind,
                status=status,
                start_time=at(start),
                end_time=at(end),
                instrumentation_scope=SCOPE,
            )

        server, auth, route = (context(self._random_bits(64) or 1) for _ in range(3))
        failed = x.status >= 500 or (x.error and x.status < 400 and x.error != CLIENT_GONE)
        status = Status(StatusCode.ERROR, x.error) if failed else UNSET
        begun = x.tries[0].at if x.tries else x.started
        spans = [
            span(
                f"POST {x.path}",
                server,
                _remote(x.parent) if x.parent else None,
                SpanKind.SERVER,
                x.started,
                x.finished_at,
                _of_request(x),
                status=status,
            ),
            span("gateway.auth", auth, server, SpanKind.INTERNAL, x.started, begun, {}),
        ]
        decided: Attributes = {}
        if x.tries:
            target = x.tries[-1].target
            decided = {
                "tl.route.worker_id": target.worker.id,
                "tl.route.reason": target.reason,
                "tl.route.cascade_step": target.cascade_step,
            }
        spans.append(
            span("gateway.route", route, server, SpanKind.INTERNAL, begun, x.finished_at, decided)
        )
        if x.tries:
            proxy = context(int(x.trace[36:52], 16))
            spans.append(
                span(
                    "gateway.proxy",
                    proxy,
                    route,
                    SpanKind.CLIENT,
                    begun,
                    x.finished_at,
                    _of_call(x),
                    _failures(x, at),
                    status,
                )
            )
        for each in x.tries:
            transfer = each.transfer
            if transfer is None or not transfer.prefill_at:
                continue
            prefill = context(self._random_bits(64) or 1)
            ended_at = transfer.decode_at or each.over_at or x.finished_at
            spans.append(
                span(
                    "tl.engine.v1.EngineControl/Prefill",
                    prefill,
                    route,
                    SpanKind.CLIENT,
                    transfer.prefill_at,
                    ended_at,
                    _of_prefill(each),
                    status=UNSET if transfer.decode_at else Status(StatusCode.ERROR, each.failure),
                )
            )
        return spans


class _Counted(SpanExporter):
    """Counts what another exporter does, and says once a minute that it cannot. Used by the sending thread."""

    def __init__(self, exporter: SpanExporter, now: Callable[[], float] = time.monotonic) -> None:
        self._exporter = exporter
        self._now = now
        self._lock = threading.Lock()
        self._shut = False
        self._quiet_until = 0.0
        self.sent = self.failed = 0

    @property
    def done(self) -> int:
        """The spans that do not wait any more."""
        return self.sent + self.failed

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send some spans."""
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            if result is SpanExportResult.SUCCESS:
                self.sent += len(spans)
            else:
                self.failed += len(spans)
                self._complain()
        return result

    def shutdown(self) -> None:
        """End the other exporter, once: at the deadline of `Spans.close`, or when all was sent."""
        with self._lock:
            if not self._shut:
                self._shut = True
                self._exporter.shutdown()

    def _complain(self) -> None:
        now = self._now()
        if now >= self._quiet_until:
            self._quiet_until = now + COMPLAIN_EVERY_S
            logger.warning("spans cannot be sent; %d were lost so far", self.failed)


def _remote(parent: bytes) -> SpanContext:
    """Return the client's span, from its traceparent."""
    return SpanContext(
        int(parent[3:35], 16), int(parent[36:52], 16), is_remote=True, trace_flags=SAMPLED
    )


def _of_request(x: Exchange) -> Attributes:
    attributes: Attributes = {
        "http.request.method": "POST",
        "http.route": x.path,
        "http.response.status_code": x.status,
        "tl.request_id": from_outside(x.request_id),
        "tl.model": from_outside(x.model),
        "tl.operation": x.operation,
        "tl.stream": x.stream,
        "tl.tenant": x.principal.tenant,
        "tl.key_id": x.principal.key_id,
        "tl.attempts": len(x.tries),
    }
    if x.error:
        attributes["error.type"] = x.error
    return attributes


def _of_call(x: Exchange) -> Attributes:
    last = x.tries[-1]
    host, _, port = last.target.worker.http_address.rpartition(":")
    attributes: Attributes = {
        "server.address": host.strip("[]"),
        "server.port": int(port),
        "tl.route.worker_id": last.target.worker.id,
        "tl.proxy.served_model": last.target.served_model,
    }
    if x.first_byte_at and not last.failure:
        attributes["tl.proxy.first_byte_ms"] = round((x.first_byte_at - x.tries[0].at) * 1000, 3)
    return attributes


def _of_prefill(attempt: Attempt) -> Attributes:
    transfer, prefill = attempt.transfer, attempt.target.prefill
    assert transfer is not None
    assert prefill is not None
    return {
        "rpc.system": "grpc",
        "rpc.service": "tl.engine.v1.EngineControl",
        "rpc.method": "Prefill",
        "tl.route.worker_id": prefill.id,
        "tl.prefill.decode_worker_id": attempt.target.worker.id,
        "tl.prefill.tokens": transfer.tokens,
        "tl.prefill.cached_tokens": transfer.cached,
        "tl.prefill.outcome": transfer.outcome,
    }


def _failures(x: Exchange, at: Callable[[float], int]) -> list[Event]:
    """Return an event for each attempt that failed, at the moment when it did."""
    over = [*(each.at for each in x.tries[1:]), x.finished_at]
    return [
        Event(
            "attempt failed",
            {
                "tl.route.worker_id": each.target.worker.id,
                "tl.route.reason": each.target.reason,
                "tl.attempt.outcome": each.failure,
            },
            at(moment),
        )
        for each, moment in zip(x.tries, over, strict=True)
        if each.failure
    ]
