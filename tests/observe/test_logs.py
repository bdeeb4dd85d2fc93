"""Log lines: their fields, and that no key is in any of them, whoever wrote it and however (O04)."""

import io
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.observe import logs
from pointsman.observe.logs import configure, from_outside, redact, timestamp
from pointsman.testing.client import Client
from pointsman.testing.gateways import running
from pointsman.testing.origin import Origin

SECRET = "s3cr3tS3cr3tS3cr3tS3cr3tS3cr3t42"
KEY = f"tl_abcdefGHIJ12_{SECRET}"

logger = logging.getLogger("some.library")


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """Let everything be logged as JSON, at debug level, into a text."""
    root = logging.getLogger()
    level = root.level
    stream = io.StringIO()
    configure("debug", "json", stream)
    yield stream
    root.handlers[:] = [each for each in root.handlers if not isinstance(each, logs._Output)]
    root.setLevel(level)


@contextmanager
def no_other_handler() -> Iterator[None]:
    """Keep pytest's own out: they raise where a record cannot be formatted."""
    root = logging.getLogger()
    handlers = root.handlers[:]
    root.handlers[:] = [each for each in handlers if isinstance(each, logs._Output)]
    yield
    root.handlers[:] = handlers


def lines(stream: io.StringIO) -> list[dict[str, str]]:
    return [msgspec.json.decode(line) for line in stream.getvalue().splitlines()]


# ------------------------------------------------------------------ the fields


def test_a_line_has_the_fields_of_the_contract(stream: io.StringIO) -> None:
    logger.warning("worker %s left", "a", extra={"trace_id": "4b" * 16, "span_id": "00" * 8})
    (line,) = lines(stream)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("ts"))
    assert line == {
        "level": "warning",
        "msg": "worker a left",
        "service": "pointsman",
        "logger": "some.library",
        "trace_id": "4b" * 16,
        "span_id": "00" * 8,
    }


def test_a_line_without_a_trace_has_no_fields_for_it(stream: io.StringIO) -> None:
    logger.info("serving")
    (line,) = lines(stream)
    assert set(line) == {"ts", "level", "msg", "service", "logger"}


def test_an_exception_is_one_field_of_one_line(stream: io.StringIO) -> None:
    try:
        raise ValueError("first\nsecond")
    except ValueError:
        logger.exception("failed", stack_info=True)
    (line,) = lines(stream)
    assert line["msg"] == "failed"
    assert line["level"] == "error"
    assert line["exception"].startswith("Traceback")
    assert "ValueError: first\nsecond\nStack (most recent call last):" in line["exception"]


def test_text_that_utf_8_cannot_have_is_logged_all_the_same(stream: io.StringIO) -> None:
    logger.info("file \udc80 and \x00")
    assert lines(stream)[0]["msg"] == "file ? and \x00"


def test_a_line_that_cannot_be_formatted_says_where_and_not_what(
    stream: io.StringIO, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken:
        def __str__(self) -> str:
            raise RuntimeError(KEY)

    with no_other_handler():
        logger.info("%d", KEY)
        logger.info("%s", Broken())
    first, second = lines(stream)
    assert re.fullmatch(
        r"a log line cannot be formatted \(TypeError, test_logs\.py line \d+\)", first["msg"]
    )
    assert "RuntimeError" in second["msg"]
    assert SECRET not in stream.getvalue() + "".join(capsys.readouterr())


def test_the_level_counts_and_the_last_call_does(stream: io.StringIO) -> None:
    later = io.StringIO()
    configure("error", "text", later)
    logger.warning("too little")
    logger.error("enough")
    assert stream.getvalue() == ""
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ERROR enough\n", later.getvalue())


def test_a_log_that_nobody_reads_costs_lines_and_never_the_process(stream: io.StringIO) -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as full:
        output = configure("info", "json", full)
        for i in range(2000):
            logger.info("%d %s", i, "x" * 100)
        assert output.dropped > 1000
        assert b'"msg":"0 xxx' in os.read(reader, 1 << 20)
        dropped = output.dropped
        logger.info("again")
        assert output.dropped == dropped
        assert os.read(reader, 1 << 20).endswith(b'"logger":"some.library"}\n')
        os.close(reader)
    configure("info", "json", stream)


def test_times_are_rfc_3339_with_milliseconds() -> None:
    assert timestamp(0.0) == "1970-01-01T00:00:00.000Z"
    assert timestamp(1767225599.9996) == "2025-12-31T23:59:59.999Z"


# ------------------------------------------------------------------ O04: keys

SPELLED = [
    *("{key}", "a {key} b", "[{key}]", "key={key}", "'{key}'", "/v1/{key}/x", "{key}{key}"),
    *("Bearer {x}", "bearer {x}", "BEARER  {x}", "Bearer%20{x}", "Bearer+{x}", '"Bearer {x}"'),
    *("Authorization: Bearer {x}", "authorization: Basic {x}", "Authorization:{x}"),
    *("Proxy-Authorization: Digest username=u, response={x}", "Authorization={x}"),
    *("api_key={x}", "api-key: {x}", "apikey={x}", "API_KEY={x}", "OPENAI_API_KEY={x}"),
    *("x-api-key: {x}", "X-API-Key:{x}", "x_api_key = {x}", "api_key => {x}", "api_key='{x}'"),
    *("GET /v1/models?api_key={x}&n=1 HTTP/1.1", "GET /?a=1&api-key={x} HTTP/1.1"),
    *('{{"api_key": "{x}"}}', '{{"Authorization":"Bearer {x}"}}', "{{'x-api-key': '{x}'}}"),
    *(r"{{\"api_key\": \"{x}\"}}", r"{{\\\"authorization\\\": \\\"Basic {x}\\\"}}"),
    *("[(b'authorization', b'Bearer {x}')]", "(b'x-api-key', b'{x}')", '("api-key", "{x}")'),
    *("[['Authorization', 'Basic {x}'], ['host', 'h']]", "{{b'api-key': b'{x}'}}"),
    *('{{"name": "authorization", "value": "Basic {x}"}}',),
    *("{{'headers': {{'authorization': ['Basic {x}', 'y']}}}}",),
    *("POST / HTTP/1.1\r\nAuthorization: Basic {x}\r\nHost: h",),
    *(r"b'POST / HTTP/1.1\r\nAuthorization: Basic {x}\r\nHost: h'",),
    *("api_key={x} and api_key={x}, Bearer {x}", "TL_GATEWAY_PEPPER={x}", "pepper='{x}'"),
]


@pytest.mark.parametrize("text", SPELLED)
def test_o04_a_key_is_hidden_however_it_is_spelled(text: str) -> None:
    shown = redact(text.format(key=KEY, x=SECRET))
    assert SECRET not in shown
    assert "[redacted]" in shown
    assert redact(shown) == shown


@pytest.mark.parametrize(
    "text",
    [
        "serving on 127.0.0.1:8080, health on 127.0.0.1:8081, heartbeats on port 50051",
        "worker tl_gateway_1 (smol, unified) joined at 10.0.0.1:8000",
        "tl_gateway_requests_total 4",
        '{"code": "invalid_api_key", "param": null}',
        "no keys_file: there is no authentication, every caller may do everything",
        "the key has no scope for /v1/chat/completions",
    ],
)
def test_what_is_no_key_stays(text: str) -> None:
    assert redact(text) == text


def test_what_stands_beside_a_key_stays() -> None:
    assert redact("?api_key=abc&n=1") == "?api_key=[redacted]&n=1"
    assert (
        redact("{'authorization': 'Bearer abc', 'n': 1}")
        == "{'authorization': '[redacted]', 'n': 1}"
    )
    assert redact("Authorization: Basic abc\r\nHost: h") == "Authorization: [redacted]\r\nHost: h"


@given(st.text(), st.text())
def test_o04_a_key_is_hidden_in_any_text(before: str, after: str) -> None:
    assert SECRET not in redact(f"{before}{KEY} {after}")
    assert SECRET not in redact(f"{before}x-api-key: {SECRET} {after}")


WORDS = ("api_key", "authorization", "bearer", "invalid_", "pepper", "tl_", "abcdefGHIJ12", "x")
MARKS = (*"_:=,'\"\\{ \n", "b'", "[redacted]")
PIECES = st.sampled_from([*WORDS, *MARKS])


@given(st.lists(PIECES, max_size=20).map("".join))
def test_o04_redacting_any_mix_of_such_words_hides_keys_and_ends(text: str) -> None:
    shown = redact(f"{text}\nx {KEY}\napi_key={SECRET}")
    assert SECRET not in shown
    assert shown.endswith("\napi_key=[redacted]")


@pytest.mark.parametrize("padding", [0, 200, 240, 250, 256, 300])
def test_o04_half_a_key_is_not_left_at_the_end_of_what_a_client_chose(padding: int) -> None:
    shown = from_outside("x" * padding + KEY)
    assert SECRET[:4] not in shown
    assert len(shown) <= 256
    assert from_outside("\udc80") == "?"


class Headers(dict[str, str]):
    """What libraries hand to their loggers."""


def fail() -> None:
    try:
        try:
            raise KeyError(f"Authorization: Bearer {SECRET}")
        except KeyError as error:
            raise ValueError({"api_key": SECRET}) from error
    except ValueError:
        raise RuntimeError(KEY)  # noqa: B904  # the context is what is looked at


@pytest.mark.parametrize("format", ["json", "text"])
@pytest.mark.parametrize("name", ["pointsman.net.driver", "asyncio", "httpx", "some.library", ""])
def test_o04_no_logger_writes_a_key(name: str, format: logs.Format, stream: io.StringIO) -> None:
    """At debug level: arguments of every type, nested, pairs, exceptions and what they came from."""
    configure("debug", format, stream)
    library = logging.getLogger(name)
    headers = Headers(authorization=f"Bearer {SECRET}", host="h")
    library.debug("headers %s", headers)
    library.debug("headers %(authorization)s", headers)
    library.debug("headers %r", [(b"authorization", b"Bearer " + SECRET.encode())])
    library.debug("nested %s", {"a": [{"b": ("x-api-key", SECRET)}], "c": {"api_key": SECRET}})
    library.debug("%s: %s", "Authorization", SECRET)
    library.debug("key %s of %d", KEY, 1)
    library.debug(headers)
    library.debug(ValueError(KEY))
    library.debug("no arguments, api_key=" + SECRET)
    library.debug(KEY.encode())
    with no_other_handler():
        library.debug("%d", KEY)
    library.debug("body %s", msgspec.json.encode({"api_key": SECRET}))
    library.debug("body %s", msgspec.json.encode(msgspec.json.encode({"api_key": SECRET}).decode()))
    try:
        fail()
    except RuntimeError:
        library.exception("failed with %s", KEY)
        library.warning("failed", exc_info=True, stack_info=True)
    text = stream.getvalue()
    assert SECRET not in text
    assert text.count("[redacted]") >= 14
    assert "RuntimeError" in text
    assert "ValueError" in text


def test_o04_an_exception_that_another_handler_has_formatted_is_redacted_too() -> None:
    """The standard formatter keeps its text with the record, where the next one finds it."""
    try:
        fail()
    except RuntimeError as error:
        record = logger.makeRecord(
            "x", logging.ERROR, "f.py", 1, "m", (), (type(error), error, error.__traceback__)
        )
    logging.Formatter().format(record)
    for formatter in (logs.JsonFormatter(), logs.TextFormatter()):
        text = formatter.format(record)
        assert "RuntimeError" in text
        assert SECRET not in text
    assert SECRET in logging.Formatter().format(record)  # its own business


# ------------------------------------------------------------------ O04: a whole gateway

PROMPT = "MARKER-of-a-prompt-that-nobody-may-log"


@pytest.mark.slow
@pytest.mark.anyio
async def test_o04_a_gateway_at_debug_level_logs_neither_keys_nor_prompts(
    stream: io.StringIO, capfd: pytest.CaptureFixture[str]
) -> None:
    """Good requests, refused ones, broken ones, engines that fail: whatever is logged is searched."""
    body = msgspec.json.encode({"model": "m", "messages": [{"role": "user", "content": PROMPT}]})
    auth = f"authorization: Bearer {KEY}\r\nx-api-key: {SECRET}\r\napi-key: {SECRET}\r\n".encode()
    head = b"host: h\r\n" + auth

    def request(line: bytes, body: bytes) -> bytes:
        return b"%b HTTP/1.1\r\n%bcontent-length: %d\r\n\r\n%b" % (line, head, len(body), body)

    chat = b"POST /v1/chat/completions"
    asked = [
        request(chat, body),
        request(chat, body.replace(b'"m"', b'"' + KEY.encode() + b'"')),
        request(chat, body[:-1]),
        request(chat, b"[" + body + b"]"),
        request(b"POST /v1/" + KEY.encode(), body),
        request(b"GET /v1/models?api_key=" + SECRET.encode(), b""),
        request(b"GET /v1/models/" + KEY.encode(), b""),
        request(b"GET /admin/v1/keys", b""),
        request(chat + b"?api_key=" + SECRET.encode(), body),
        request(chat, body).replace(b"host: h", b"x-request-id: " + KEY.encode()),
        request(chat, body).replace(b"HTTP/1.1", b"HTTP/9.9"),
        request(chat, body).replace(b"content-length", b"content-length: 1\r\ncontent-length"),
    ]
    statuses = []
    async with (
        Origin() as good,
        running({"a": "127.0.0.1:1", "b": good.address}, access_log="all") as gateway,
    ):
        for data in asked:
            async with Client(gateway.address) as client:
                statuses.append((await client.ask(data)).status)
    written = stream.getvalue() + "".join(capfd.readouterr())
    assert SECRET not in written
    assert PROMPT not in written
    assert len(lines(stream)) > 0
    # It was all understood, or else there was nothing to find.
    assert statuses == [200, 404, 400, 400, 404, 200, 404, 403, 200, 200, 400, 400]
    assert PROMPT.encode() in good.requests[0].body
