"""Access lines: what is in one, which requests get one, and what happens when nobody reads them."""

import io
import os
from collections.abc import Callable, Sequence
from time import monotonic
from timeit import timeit
from typing import Any, Literal

import msgspec
import pytest

from pointsman.domain.keys import Principal
from pointsman.domain.request import InferenceRequest
from pointsman.domain.router import Target
from pointsman.domain.worker import Worker
from pointsman.flow.exchange import Attempt, Exchange
from pointsman.observe.access import Access
from pointsman.observe.lines import Lines

SECRET = "s3cr3tS3cr3tS3cr3tS3cr3tS3cr3t42"
KEY = f"tl_abcdefGHIJ12_{SECRET}"


class Clock:
    """Calls what is due when it is told to."""

    def __init__(self) -> None:
        self.due: list[tuple[float, Callable[[], None]]] = []

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        self.due.append((seconds, call))

    def tick(self) -> None:
        due, self.due = self.due, []
        for _, call in due:
            call()


class Paper:
    """Takes so many lines."""

    def __init__(self, room: int = 1 << 30) -> None:
        self.room = room
        self.written: list[bytes] = []
        self.writes = 0
        self.dropped = 0

    def write(self, lines: Sequence[bytes]) -> int:
        taken = min(self.room, len(lines))
        self.room -= taken
        self.writes += 1
        self.written += lines[:taken]
        return taken

    def drop(self, count: int) -> None:
        self.dropped += count

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [msgspec.json.decode(line) for line in self.written]


def access(
    paper: Paper | Lines,
    clock: Clock,
    *,
    mode: Literal["sampled", "all"] = "all",
    sample: float = 0.0,
    random: Callable[[], float] = lambda: 0.5,
) -> Access:
    return Access(mode, sample, paper, random, wall=lambda: 1767225600.25, later=clock.later)


def exchange(
    *,
    status: int = 200,
    error: str = "",
    failures: tuple[str, ...] = (),
    answered: bool = True,
    model: str = "smol",
    request_id: str = "r1",
    first_byte: float = 0.1,
) -> Exchange:
    request = InferenceRequest(model, request_id, stream=True, prompt=b'"MARKER"')
    x = Exchange(
        request,
        "/v1/chat/completions",
        "chat",
        started=50.0,
        principal=Principal("abcdefGHIJ12", "acme", frozenset()),
        trace=b"00-" + b"4b" * 16 + b"-" + b"0a" * 8 + b"-01",
    )
    outcomes = (*failures, *([""] if answered else []))
    for i, failure in enumerate(outcomes):
        worker = Worker(f"w{i}", model="smol-v3", http_address="h:1")
        reason = "failover" if i else "affinity"
        x.tries.append(Attempt(Target(worker, "smol-v3", reason), 50.0, failure))
    x.status, x.error = status, error
    x.first_byte_at = 50.0 + first_byte if first_byte else 0.0
    x.finished_at = 50.5
    return x


# ------------------------------------------------------------------ what is in a line


def test_a_line_has_all_that_an_operator_asks_for() -> None:
    paper, clock = Paper(), Clock()
    log = access(paper, clock)
    log.finished(exchange(failures=("reset",)))
    log.flush()
    assert paper.lines == [
        {
            "ts": "2026-01-01T00:00:00.250Z",
            "level": "info",
            "msg": "request",
            "service": "pointsman",
            "trace_id": "4b" * 16,
            "span_id": "0a" * 8,
            "request_id": "r1",
            "key_id": "abcdefGHIJ12",
            "tenant": "acme",
            "method": "POST",
            "path": "/v1/chat/completions",
            "model": "smol",
            "operation": "chat",
            "stream": True,
            "status": 200,
            "error": "",
            "worker_id": "w1",
            "reason": "failover",
            "attempts": 2,
            "failures": ["reset"],
            "first_byte_s": 0.1,
            "seconds": 0.5,
        }
    ]
    assert paper.written[0].endswith(b"}\n")


def test_a_request_that_nobody_could_serve_has_a_line_too() -> None:
    paper, clock = Paper(), Clock()
    log = access(paper, clock)
    log.finished(exchange(status=503, error="no_capacity", answered=False, first_byte=0.0))
    log.flush()
    (line,) = paper.lines
    assert (line["level"], line["status"], line["error"]) == ("error", 503, "no_capacity")
    assert (line["worker_id"], line["attempts"], line["first_byte_s"]) == ("", 0, None)


def test_the_gateways_own_answers_have_lines() -> None:
    paper, clock = Paper(), Clock()
    log = access(paper, clock)
    log.answered("GET", "/v1/models", 200, 0.0012345)
    log.answered("POST", "/x" * 1000, 404, 0.001, "not_found")
    log.answered("GET", "/admin/v1", 500, 0.001)
    log.flush()
    own, unknown, failed = paper.lines
    assert own == {
        "ts": "2026-01-01T00:00:00.250Z",
        "level": "info",
        "msg": "request",
        "service": "pointsman",
        "method": "GET",
        "path": "/v1/models",
        "status": 200,
        "error": "",
        "seconds": 0.001234,
    }
    assert unknown["path"] == "/x" * 128
    assert unknown["error"] == "not_found"
    assert failed["level"] == "error"


def test_o04_what_a_client_chose_is_short_and_has_no_key_and_no_prompt() -> None:
    paper, clock = Paper(), Clock()
    log = access(paper, clock)
    log.finished(exchange(model=KEY, request_id=f"api_key={SECRET}"))
    log.finished(exchange(model="m" * 10_000 + "\udc80\n", request_id='"\n\x00'))
    log.answered(f"Bearer {SECRET}", f"/v1/{KEY}?api_key={SECRET}", 404, 0.0)
    log.flush()
    text = b"".join(paper.written)
    assert SECRET.encode() not in text
    assert b"MARKER" not in text
    assert paper.lines[0]["model"] == "[redacted]"
    assert paper.lines[1]["model"] == "m" * 256
    assert paper.lines[1]["request_id"] == '"\n\x00'
    assert all(line.count(b"\n") == 1 for line in paper.written)


# ------------------------------------------------------------------ who gets a line

EVENTFUL = [
    exchange(status=503, error="no_capacity"),
    exchange(status=400),
    exchange(status=499, error="client_gone"),
    exchange(error="timed out"),
    exchange(failures=("503",)),
    exchange(failures=("503",), answered=False, status=503, error="no_capacity"),
]


@pytest.mark.parametrize("x", EVENTFUL, ids=lambda x: f"{x.status} {x.error} {x.failures}")
def test_whatever_failed_or_failed_over_has_a_line(x: Exchange) -> None:
    paper, clock = Paper(), Clock()
    log = access(paper, clock, mode="sampled", sample=0.0)
    log.finished(x)
    log.flush()
    assert len(paper.lines) == 1


def test_of_the_others_a_sample_has() -> None:
    paper, clock = Paper(), Clock()
    numbers = iter([0.0, 0.24, 0.25, 0.99, 0.1, 0.3])
    log = access(paper, clock, mode="sampled", sample=0.25, random=lambda: next(numbers))
    for i in range(4):
        log.finished(exchange(request_id=f"r{i}"))
    log.answered("GET", "/v1/models", 200, 0.0)
    log.answered("GET", "/v1/models", 200, 0.0)
    log.answered("GET", "/v1/models", 401, 0.0)
    log.flush()
    assert [line.get("request_id", line["status"]) for line in paper.lines] == [
        "r0",
        "r1",
        200,
        401,
    ]


@pytest.mark.parametrize(("sample", "wanted"), [(0.0, 0), (1.0, 10)])
def test_nobody_and_everybody_are_samples(sample: float, wanted: int) -> None:
    paper, clock = Paper(), Clock()
    numbers = iter([0.0, 0.999999] * 5)
    log = access(paper, clock, mode="sampled", sample=sample, random=lambda: next(numbers))
    for _ in range(10):
        log.finished(exchange())
    log.flush()
    assert len(paper.lines) == wanted


# ------------------------------------------------------------------ when lines are written


def test_lines_are_written_together_a_tenth_of_a_second_later() -> None:
    paper, clock = Paper(), Clock()
    log = access(paper, clock)
    for _ in range(20):
        log.finished(exchange())
    assert paper.writes == 0
    assert [seconds for seconds, _ in clock.due] == [0.1]
    clock.tick()
    assert paper.writes == 1
    assert len(paper.written) == 20
    assert clock.due == []
    log.finished(exchange())
    clock.tick()
    assert len(paper.written) == 21


def test_lines_are_written_at_once_when_there_are_many() -> None:
    paper, clock = Paper(), Clock()
    log = access(paper, clock)
    while not paper.written:
        log.finished(exchange())
    assert 65_536 <= sum(map(len, paper.written)) < 67_000
    log.flush()
    assert len(clock.due) == 1


def test_a_reader_that_is_stuck_costs_lines_and_nothing_else() -> None:
    paper, clock = Paper(room=3), Clock()
    log = access(paper, clock)
    for i in range(10_000):
        log.finished(exchange(request_id=f"r{i}"))
    clock.tick()
    assert len(paper.written) == 3
    kept = 10_000 - paper.dropped
    assert 1000 < kept < 5000
    paper.room = 1 << 30
    clock.tick()
    assert [line["request_id"] for line in paper.lines] == [f"r{i}" for i in range(kept)]
    assert clock.due == []
    log.finished(exchange(request_id="again"))
    clock.tick()
    assert paper.lines[-1]["request_id"] == "again"


def test_at_the_end_everything_is_written_or_counted() -> None:
    paper, clock = Paper(room=3), Clock()
    log = access(paper, clock)
    for _ in range(10):
        log.finished(exchange())
    log.close()
    assert len(paper.written) == 3
    assert paper.dropped == 7
    clock.tick()
    assert len(paper.written) == 3
    assert clock.due == []


def test_a_pipe_that_nobody_reads_does_not_stop_the_gateway() -> None:
    """The real thing: a full pipe, whose descriptor blocks."""
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream:
        lines, clock = Lines(stream), Clock()
        log = access(lines, clock)
        started = monotonic()
        for _ in range(10_000):
            log.finished(exchange())
        clock.tick()
        assert monotonic() - started < 10
        assert lines.dropped > 5000
        assert os.get_blocking(writer)
        text = os.read(reader, 1 << 20)
        assert msgspec.json.decode(text.splitlines()[0])["msg"] == "request"
        os.close(reader)


# ------------------------------------------------------------------ the price


def test_a_request_without_a_line_costs_next_to_nothing() -> None:
    """Measured: 0.2 us without a line, 5 us with one. The bounds are wide, so that a busy machine cannot fail them."""
    log = access(Lines(io.StringIO()), Clock(), mode="sampled", sample=0.0)
    x = exchange()
    assert min(timeit(lambda: log.finished(x), number=2000) for _ in range(5)) / 2000 < 5e-6
