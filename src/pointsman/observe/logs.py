"""How log lines look: JSON or text, one line or one exception each, and never with a key in it.

Redaction happens in the formatter, after a record has become text. So it holds for every logger of the process, those
of libraries too, for arguments of any type and for exceptions. It errs on the side of hiding: what stands behind
`Authorization:` is gone up to the end of the line. Prompts are another matter: no code of the gateway hands one to a
logger, which a test sees to.

Access lines, one per request, do not come this way: see `access`.
"""

import logging
import re
import sys
import time
from typing import Literal, TextIO

import msgspec

from pointsman.observe.lines import Lines

__all__ = ["JsonFormatter", "TextFormatter", "configure", "from_outside", "redact", "timestamp"]

Level = Literal["debug", "info", "warning", "error"]
Format = Literal["json", "text"]

SERVICE = "pointsman"

HIDDEN = "[redacted]"

TEXT_MAX = 256
"""Characters that are kept of a text from outside."""

_KEY = re.compile(r"tl_[A-Za-z0-9]{12}_[A-Za-z0-9]{1,32}")
_VALUE = r"[^\s'\"\\,;)}\]&]+"
_BEARER = re.compile(rf"(?i)(\bbearer(?:\s|%20|\+)+)(?!\[redacted){_VALUE}")


def _named(name: str, bare: str) -> re.Pattern[str]:
    """Return a pattern of a name and its value, as headers, mappings, pairs, JSON and queries have them.

    Its value is a quoted text, whose opening quote is the last group, or else `bare`.
    """
    return re.compile(
        rf"""(?ix) (?<! invalid_) ({name})
        ( \\* ["']?                                                         # the name's closing quote
          (?: ,\s* \\* ["'] value \\* ["'] \s*: | \s* [:=] >?+ | (?<= ["']) \s*, )
          \s*+ (?: b(?=['\"]))? )                                                          # what stands between
        (?: (\\* ["']) (?: (?!\3) . )* | (?! \[redacted\]) {bare} )"""
    )


_AUTHORIZATION = _named(r"authorization", r"[^\r\n]+")
_API_KEY = _named(r"api[-_]?key | pepper", _VALUE)


def redact(text: str) -> str:
    """Return a text without the keys in it: `tl_...`, `Bearer ...`, and the values of `authorization` and `api_key`.

    >>> redact("GET /v1/models with Bearer sk-1234")
    'GET /v1/models with Bearer [redacted]'
    >>> redact("{'x-api-key': 'sk-1234', 'n': 1}")
    "{'x-api-key': '[redacted]', 'n': 1}"
    """
    # Nearly every text has none of these words, and looking for them costs a tenth of looking for the patterns.
    lower = text.lower()
    if "authorization" in lower:
        text = _AUTHORIZATION.sub(rf"\1\2\3{HIDDEN}", text)
    if "key" in lower or "pepper" in lower:
        text = _API_KEY.sub(rf"\1\2\3{HIDDEN}", text)
    if "bearer" in lower:
        text = _BEARER.sub(rf"\1{HIDDEN}", text)
    if "tl_" in lower:
        text = _KEY.sub(HIDDEN, text)
    return text


def from_outside(text: str) -> str:
    """Return a text that a client chose as a log may have it: no longer than 256 characters, and without a key.

    >>> from_outside("tl_abcdefghijkl_" + 32 * "s")
    '[redacted]'
    """
    # Cut after the redaction: half a key would not be known as one.
    return _clean(text[: 2 * TEXT_MAX])[:TEXT_MAX]


def timestamp(at: float) -> str:
    """Return seconds since 1970 as RFC 3339 with milliseconds, in UTC.

    >>> timestamp(1767225600.25)
    '2026-01-01T00:00:00.250Z'
    """
    millis = int(at * 1000)
    day = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(millis // 1000))
    return f"{day}.{millis % 1000:03d}Z"


class _Line(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One log line."""

    ts: str
    level: str
    msg: str
    service: str
    logger: str
    trace_id: str = ""
    span_id: str = ""
    exception: str = ""


class JsonFormatter(logging.Formatter):
    """One JSON object per record. `trace_id` and `span_id` are there where the record has them."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without its line feed."""
        line = _Line(
            ts=timestamp(record.created),
            level=record.levelname.lower(),
            msg=_clean(record.getMessage()),
            service=SERVICE,
            logger=record.name,
            trace_id=_clean(str(getattr(record, "trace_id", ""))),
            span_id=_clean(str(getattr(record, "span_id", ""))),
            exception=_clean(self._exception(record)),
        )
        return msgspec.json.encode(line).decode()

    def _exception(self, record: logging.LogRecord) -> str:
        parts = [self.formatException(record.exc_info)] if record.exc_info else []
        if record.stack_info:
            parts.append(self.formatStack(record.stack_info))
        return "\n".join(parts)


class TextFormatter(logging.Formatter):
    """Lines for people: time, level, message, and the exception below."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without its line feed."""
        text = _clean(super().format(record))
        # What is kept of an exception here would reach the next handler's line as it is.
        record.exc_text = None
        return text


class _Output(logging.Handler):
    """Writes records as lines that never wait for their reader."""

    def __init__(self, lines: Lines) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
        except Exception as error:
            # Logging's own way is to print the arguments, and whatever is in them, to standard error.
            text = self.format(_unreadable(record, error))
        if not self._lines.write([text.encode("utf-8", "replace") + b"\n"]):
            self._lines.drop(1)


def configure(level: Level, format: Format, stream: TextIO | None = None) -> Lines:
    """Let every logger of the process write to a stream, by default standard error, and return the lines it writes.

    Others may write lines of their own there. It may be called again; the last call counts.
    """
    lines = Lines(stream or sys.stderr)
    output = _Output(lines)
    output.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
    root = logging.getLogger()
    for handler in root.handlers[:]:
        if isinstance(handler, _Output):
            root.removeHandler(handler)
    root.addHandler(output)
    root.setLevel(level.upper())
    return lines


def _clean(text: str) -> str:
    """Return a text without keys that UTF-8 can have: lone surrogates become `?`."""
    return redact(text.encode("utf-8", "replace").decode())


def _unreadable(record: logging.LogRecord, error: Exception) -> logging.LogRecord:
    """Return what is said of a record that cannot be formatted: where it came from, not what it held."""
    return logging.LogRecord(
        record.name,
        logging.ERROR,
        record.pathname,
        record.lineno,
        "a log line cannot be formatted (%s, %s line %d)",
        (type(error).__name__, record.filename, record.lineno),
        None,
    )
