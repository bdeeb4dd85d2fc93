"""Reading the few fields that the gateway needs of a JSON body, and changing fields without touching any other byte.

`parse_request` reads four top-level fields and skips the rest: unknown fields, order, number formats, escapes and
duplicates stay what the client sent, because nothing is ever re-serialised. `with_fields` and `with_model` splice.

Where a key stands twice, some engines read the first and some the last, so a splice changes every one of them.
"""

import re
from collections.abc import Iterator, Mapping

import msgspec

from pointsman.domain.request import InferenceRequest
from pointsman.errors import BadRequest

__all__ = ["members", "parse_request", "with_fields", "with_model"]

ABSENT = msgspec.Raw(b"")
TRUE = msgspec.Raw(b"true")

STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
TOKEN = re.compile(STRING + rb"|[{}\[\]:,]", re.DOTALL)
STRING_MEMBER = re.compile(rb'"model"\s*+:\s*+(' + STRING + rb")", re.DOTALL)


class Fields(msgspec.Struct):
    """The top-level fields that are read of an inference body."""

    model: str = ""
    stream: msgspec.Raw = ABSENT
    prompt: msgspec.Raw = ABSENT
    messages: msgspec.Raw = ABSENT


decode_fields = msgspec.json.Decoder(Fields).decode


def parse_request(body: bytes, request_id: str, affinity_bytes: int = 64) -> InferenceRequest:
    """Read what routing needs from the body of an inference request.

    Raises BadRequest for anything but a JSON object with a string `model`; `param` is `model` where that is the fault.
    """
    try:
        fields = decode_fields(body)
    except msgspec.ValidationError as error:
        if "$.model" in str(error):
            raise BadRequest("`model` must be a string", param="model") from None
        raise BadRequest("the request body must be a JSON object") from None
    except msgspec.DecodeError as error:
        raise BadRequest(f"the request body is not valid JSON: {error}") from None
    except RecursionError:
        raise BadRequest("the request body is nested too deeply") from None
    if not fields.model:
        raise BadRequest("`model` is missing: it must be a non-empty string", param="model")
    return InferenceRequest(
        fields.model,
        request_id,
        stream=fields.stream == TRUE,
        prompt=fields.prompt or None,
        messages=fields.messages or None,
        affinity_bytes=affinity_bytes,
    )


def with_model(body: bytes, model: str) -> bytes:
    """Return the body with its top-level `model` replaced, every other byte as it was.

    `body` has passed `parse_request`. Where the text `"model"` occurs once and no escape can spell it otherwise, that
    one occurrence must be the top-level key (its five letters all lie in U+0060..U+006F), and no scan is needed.
    """
    value = msgspec.json.encode(model)
    key = body.find(b'"model"')
    if key >= 0 and body.find(b'"model"', key + 1) < 0 and b"\\u006" not in body:
        found = STRING_MEMBER.match(body, key)
        if found is not None:
            start, end = found.span(1)
            return b"%b%b%b" % (body[:start], value, body[end:])
    return with_fields(body, {"model": value})


def with_fields(body: bytes, fields: Mapping[str, bytes]) -> bytes:
    """Return a JSON object with top-level members set to raw JSON values; missing ones are added at its end.

    `body` is a valid JSON object. Everything that is not named keeps its bytes. O(size of the body).

    >>> with_fields(b'{"n": 1.0, "seed": 7}', {"seed": b"8", "top_k": b"2"})
    b'{"n": 1.0, "seed": 8,"top_k":2}'
    """
    parts: list[bytes] = []
    missing = dict(fields)
    position = 0
    empty = True
    for key, start, end in members(body):
        empty = False
        value = fields.get(key)
        if value is not None:
            missing.pop(key, None)
            parts += body[position:start], value
            position = end
    last = body.rindex(b"}")
    parts.append(body[position:last])
    for key, value in missing.items():
        parts += b"" if empty else b",", msgspec.json.encode(key), b":", value
        empty = False
    parts.append(body[last:])
    return b"".join(parts)


def members(body: bytes) -> Iterator[tuple[str, int, int]]:
    """Yield (key, start, end) of every top-level member's value in a valid JSON object, duplicates included.

    >>> [(key, b'{"a": [1, 2] , "b":{}}'[i:j]) for key, i, j in members(b'{"a": [1, 2] , "b":{}}')]
    [('a', b'[1, 2]'), ('b', b'{}')]
    """
    depth = 0
    key: bytes | None = None
    start = 0
    for token in TOKEN.finditer(body):
        text = token.group()
        if text in b"{[":
            depth += 1
        elif text in b"}]":
            depth -= 1
            if depth == 0 and key is not None:
                yield _name(key), start, _trimmed(body, token.start())
        elif depth == 1:
            if text == b":":
                start = _untrimmed(body, token.end())
            elif text == b",":
                assert key is not None
                yield _name(key), start, _trimmed(body, token.start())
                key = None
            elif key is None:
                key = text


def _name(key: bytes) -> str:
    if b"\\" not in key:
        return key[1:-1].decode("utf-8", "replace")
    try:
        return msgspec.json.decode(key, type=str)
    except msgspec.DecodeError:  # half of a surrogate pair: no name of ours
        return ""


def _trimmed(body: bytes, end: int) -> int:
    while body[end - 1] in b" \t\r\n":
        end -= 1
    return end


def _untrimmed(body: bytes, start: int) -> int:
    while body[start] in b" \t\r\n":
        start += 1
    return start
