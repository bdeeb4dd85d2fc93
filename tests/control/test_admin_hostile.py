"""Ten thousand hostile requests: no answer of the admin API is a fault of its own, and none is cut short.

They are called on the application itself, always the same ones; most are near misses of requests that are good.
"""

import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from pointsman.control.admin import openapi
from pointsman.testing.admin import ADMIN, Operated, call

pytestmark = pytest.mark.anyio

REQUESTS = 10_000
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW", "get", "")
OPERATIONS: list[tuple[str, str]] = [
    (method.upper(), path) for path, methods in openapi()["paths"].items() for method in methods
]

GOOD: tuple[dict[bytes, bytes], ...] = (
    {b"deadline_s": b"30"},
    {b"routes": b'[{"model": "m"}]'},
    {b"tenant": b'"acme"', b"name": b'"laptop"'},
    {b"model": b'"m"', b"prompt": b'"Once"', b"stream": b"true"},
    {b"url": b'"http://h:8000"', b"model": b'"m"'},
)

NAMES = (
    b"m",
    b"a",
    b"org%2Fm",
    b"org/m",
    b"",
    b"..",
    b"../../etc/passwd",
    b"%2e%2e%2f%2e%2e%2f",
    b"..%5c..",
    b"%00",
    b"%0a%0d",
    b"%",
    b"%zz",
    b"%f0%28%8c%28",
    b"%ed%a0%80",
    b"%c0%af",
    b"m:drain",
    b":drain:undrain",
    b"{model}",
    b"%25s%25n",
    b"'%22;--",
    b"m" * 5000,
    "größe/模型".encode(),
    b"\xff\xfe",
)

VALUES = (
    b"0",
    b"-0",
    b"30",
    b"-1",
    b"3601",
    b"1.5",
    b"1e400",
    b"-1e400",
    b"1e-400",
    b"9" * 400,
    b"0x10",
    b"NaN",
    b"Infinity",
    b"null",
    b"true",
    b'""',
    b'"infer"',
    b'["infer"]',
    b'["infer", null]',
    b'"\\ud800"',
    b'"\\udfff\\ud800"',
    b'"\\u0000"',
    b'"\xff"',
    b'"\xed\xa0\x80"',
    b'"a\nb"',
    b"{}",
    b"[]",
    b"[[]]",
    b"[{}]",
    b'[{"model": "m"}]',
    b'[{"model": "m", "backends": [{"model": "x", "weight": 1e308}, {"model": "y"}]}]',
    b'[{"model": "m", "backends": [{"model": "x", "weight": NaN}]}]',
    b'[{"model": "m", "cascade": [{"model": "s", "accept_if": "mean_logprob > 1e999"}, 7]}]',
    b'[{"model": "m", "cascade": [{"model": "s", "accept_if": "mean_logprob > -1"}, {"model": "l"}]}]',
    b'[{"model": "\\ud800"}]',
    b"[" * 20_000,
    b'{"a":' * 5000,
    b'"' + b"x" * 100_000 + b'"',
    b'"' + b"\\" * 999,
)

FIELDS = (
    *(b"deadline_s", b"routes", b"tenant", b"name", b"scopes", b"rpm", b"tpm", b"priority"),
    *(b"models", b"expires_at", b"model", b"url", b"role", b"capacity", b"messages", b"prompt"),
    *(b"stream", b"", b"\\u0000", b"__proto__", b"\\ud800"),
)

HEADERS = (
    (b"if-match", b'"routes-1"'),
    (b"if-match", b'"routes-2"'),
    (b"if-match", b"\xff\x00"),
    (b"if-match", b"*"),
    (b"content-type", b"text/plain"),
    (b"content-type", b"application/json; charset=utf-16"),
    (b"content-type", b"multipart/form-data; boundary=x"),
    (b"content-length", b"-1"),
    (b"content-encoding", b"gzip"),
    (b"host", b"evil.example"),
    (b"host", b"[::1"),
    (b"host", b"\xff"),
    (b"origin", b"http://evil.example:99999"),
    (b"accept", b"\xff"),
    (b"cookie", b"a=b;" * 1000),
    (b"x-forwarded-prefix", b"/.."),
    (b"range", b"bytes=0-"),
    (b"expect", b"100-continue"),
)

QUERIES = (
    *(b"limit=", b"limit=1", b"limit=9999999999999999999999", b"limit=1e3", b"step=-1"),
    *(b"step=5", b"model=m", b"model=%", b"model=%ff", b"worker=%00", b"request_id=%ed%a0%80"),
    *(b"exclude=a", b"exclude=", b"exclude=nobody", b"&&;;==", b"a[b]=c", b"\xff", b"tenant=%0a"),
)


class Draw:
    """Draws the parts of a request, always the same ones in the same order."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def target(self) -> tuple[str, bytes]:
        """Return method and path: those of an operation, mostly, with a name that may be anything."""
        method, operation = self.random.choice(OPERATIONS)
        if self.random.random() < 0.1:
            method = self.random.choice(METHODS)
        path = operation.encode()
        for name in (b"{id}", b"{model}"):
            path = path.replace(name, self.random.choice(NAMES))
        if self.random.random() < 0.1:
            at = self.random.randrange(len(path) + 1)
            path = path[:at] + self.random.choice(NAMES) + path[at:]
        if self.random.random() < 0.3:
            path += b"?" + b"&".join(self.random.choices(QUERIES, k=self.random.randint(1, 3)))
        return method, path

    def value(self) -> bytes:
        return self.random.choice(VALUES)

    def record(self) -> bytes:
        """Return a body that is good, but for what stands in some of its fields."""
        members = dict(self.random.choice(GOOD))
        for _ in range(self.random.randrange(3)):
            members[self.random.choice((*FIELDS, *members))] = self.value()
        return b"{%b}" % b",".join(b'"%b":%b' % member for member in members.items())

    def body(self) -> bytes:
        kinds: tuple[Callable[[], bytes], ...] = (
            lambda: b"",
            self.value,
            *[self.record] * 6,
            lambda: self.record()[: self.random.randrange(40)],
            lambda: b"\xef\xbb\xbf" + self.record(),
            lambda: self.record().decode("latin-1").encode("utf-16"),
            lambda: self.random.randbytes(self.random.randrange(200)),
        )
        return self.random.choice(kinds)()

    def headers(self) -> list[tuple[bytes, bytes]]:
        return self.random.choices(HEADERS, k=self.random.randrange(4))


@pytest.mark.slow
async def test_hostile_requests_meet_no_fault(tmp_path: Path) -> None:
    gateway = Operated(tmp_path / "keys.jsonl")
    draw = Draw(1)
    statuses: dict[int, int] = {}
    for _ in range(REQUESTS):
        gateway.beat("a", "m")
        gateway.beat("b", "org/m")
        (method, path), body, headers = draw.target(), draw.body(), draw.headers()
        state = {"principal": ADMIN, "request_id": "r1"}
        response = await call(gateway.app, method, path, body, headers, state)
        asked = (method, path[:300], body[:300], headers)
        assert response.status < 500 or response.status == 503, asked
        if response.status >= 400:
            assert response.error["message"], asked
            assert response.header("content-type") == "application/json", asked
        elif response.status != 204:
            msgspec.json.decode(response.body)
        statuses[response.status] = statuses.get(response.status, 0) + 1
    # They came past the door: good answers and every kind of refusal are among them.
    assert {200, 201, 202, 400, 404, 405, 412, 428} <= statuses.keys(), statuses
