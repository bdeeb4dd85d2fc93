"""The access log: one JSON line for each request that is over, for all of them or for those worth a look.

Lines are made when a request ends, kept, and written together: ten times a second, or earlier when 64 KiB have come up.
Where nobody takes them they wait, up to a mebibyte, and are dropped and counted from there on: a log that is stuck must
not be felt by a request.

A line has neither prompt nor key. What the client chose itself (its request id, the model, an unknown path) is cut to
a length, and redacted in case somebody put a key there.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import msgspec

from pointsman.flow.exchange import Exchange
from pointsman.observe.logs import SERVICE, from_outside, timestamp

__all__ = ["Access", "Output"]

Mode = Literal["sampled", "all"]

EVERY_S = 0.1
BATCH_BYTES = 65_536
"""When lines are written: so long after the first one, or as soon as there are so many bytes."""

WAITING_BYTES = 1 << 20
"""Bytes of lines that wait for a reader that is stuck. The rest is dropped."""


class Output(Protocol):
    """Where lines go; it never blocks."""

    def write(self, lines: Sequence[bytes]) -> int:
        """Write some lines, and return how many of them, from the first on, were taken."""

    def drop(self, count: int) -> None:
        """Count lines that are not written."""


class _Request(msgspec.Struct, kw_only=True):
    """The line of a request that went to an engine, or was to."""

    ts: str
    level: str
    msg: str = "request"
    service: str = SERVICE
    trace_id: str
    span_id: str
    request_id: str
    key_id: str
    tenant: str
    method: str = "POST"
    path: str
    model: str
    operation: str
    stream: bool
    status: int
    error: str
    worker_id: str
    reason: str
    attempts: int
    failures: list[str]
    first_byte_s: float | None
    seconds: float


class _Own(msgspec.Struct, kw_only=True):
    """The line of an answer that the gateway gave itself."""

    ts: str
    level: str
    msg: str = "request"
    service: str = SERVICE
    method: str
    path: str
    status: int
    error: str
    seconds: float


class Access:
    """Writes a line per request: of `all`, or `sampled`: of those that failed or failed over, and some of the others.

    `sample` is the part of the others, 0 to 1; `random` returns numbers from 0 up to 1, `wall` seconds since 1970;
    `later` calls a function after so many seconds, in the thread that calls everything here.
    """

    def __init__(
        self,
        mode: Mode,
        sample: float,
        output: Output,
        random: Callable[[], float],
        *,
        wall: Callable[[], float],
        later: Callable[[float, Callable[[], None]], object],
    ) -> None:
        self._sample = 1.0 if mode == "all" else sample
        self._output = output
        self._random = random
        self._wall = wall
        self._later = later
        self._encoder = msgspec.json.Encoder()
        self._lines: deque[bytes] = deque()
        self._bytes = 0
        self._scheduled = False

    def finished(self, x: Exchange) -> None:
        """Write of a request that is over."""
        tries = x.tries
        eventful = x.status >= 400 or x.error or len(tries) > 1
        if not eventful and self._random() >= self._sample:
            return
        trace = x.trace.decode("ascii")
        commit = x.first_byte_at
        self._put(
            _Request(
                ts=timestamp(self._wall()),
                level="error" if x.status >= 500 else "info",
                trace_id=trace[3:35],
                span_id=trace[36:52],
                request_id=from_outside(x.request_id),
                key_id=x.principal.key_id,
                tenant=x.principal.tenant,
                path=x.path,
                model=from_outside(x.model),
                operation=x.operation,
                stream=x.stream,
                status=x.status,
                error=x.error,
                worker_id=x.worker_id,
                reason=x.reason,
                attempts=len(tries),
                failures=x.failures,
                first_byte_s=round(commit - x.started, 6) if commit else None,
                seconds=round(x.finished_at - x.started, 6),
            )
        )

    def answered(
        self, method: str, path: str, status: int, seconds: float, error: str = ""
    ) -> None:
        """Write of an answer that the gateway gave itself."""
        if status < 400 and self._random() >= self._sample:
            return
        self._put(
            _Own(
                ts=timestamp(self._wall()),
                level="error" if status >= 500 else "info",
                method=from_outside(method),
                path=from_outside(path),
                status=status,
                error=error,
                seconds=round(seconds, 6),
            )
        )

    def flush(self) -> None:
        """Write what waits, as far as somebody takes it."""
        taken = self._output.write(tuple(self._lines))
        for _ in range(taken):
            self._bytes -= len(self._lines.popleft())

    def close(self) -> None:
        """Write what waits; what nobody takes now is dropped. The last call."""
        self.flush()
        self._output.drop(len(self._lines))
        self._lines.clear()
        self._bytes = 0

    def _put(self, line: _Request | _Own) -> None:
        data = self._encoder.encode(line) + b"\n"
        if self._bytes + len(data) > WAITING_BYTES:
            self._output.drop(1)
            return
        before = self._bytes
        self._lines.append(data)
        self._bytes += len(data)
        if before // BATCH_BYTES != self._bytes // BATCH_BYTES:
            self.flush()
        self._schedule()

    def _due(self) -> None:
        self._scheduled = False
        self.flush()
        if self._lines:
            self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._later(EVERY_S, self._due)
