"""Reading the few fields that the gateway needs of a JSON body, and changing fields without touching any other byte.

`parse_request` reads a handful of top-level fields, which `pointsman.wire.apis` names, and skips the rest: unknown
fields, order, number formats, escapes and duplicates stay what the client sent, because nothing is ever re-serialised.
`with_fields`, `without_fields` and `with_model` splice.

Where a key stands twice, some engines read the first and some the last, so a splice changes every one of them.
Half of a surrogate pair, which JavaScript sends of a string that was cut inside an emoji, is read as U+FFFD and
forwarded as it is.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TypeVar

import msgspec

from pointsman.domain.request import InferenceRequest
from pointsman.errors import BadRequest
from pointsman.wire.apis import CHAT, Api, api_of

__all__ = [
    "check_model",
    "elements",
    "members",
    "parse_request",
    "readable",
    "says_model_once",
    "with_fields",
    "with_model",
    "without_fields",
]

Decoded = TypeVar("Decoded")

MODEL_LIMIT = 256
"""Characters of a model id, as for routes and workers: records of requests keep it when the body is long gone."""

TRUE = msgspec.Raw(b"true")
NOTHING = (msgspec.Raw(b""), msgspec.Raw(b"null"), msgspec.Raw(b"[]"))
"""What says no more than a field that is not there."""

CHATS = api_of(CHAT)

STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
STRING_MEMBER = re.compile(rb'"model"\s*+:\s*+(' + STRING + rb")", re.DOTALL)
# A member up to its value, which is a string or another scalar (group 2), or begins with a bracket (group 3).
MEMBER = re.compile(
    rb"\s*+(" + STRING + rb")\s*+:\s*+(?:(" + STRING + rb'|[^\s"{}\[\],]++)|([{\[]))', re.DOTALL
)
ELEMENT = re.compile(rb"\s*+(" + STRING + rb'|[^\s"{}\[\],]++)|\s*+([{\[])', re.DOTALL)
# What stands between two brackets.
FLAT = rb'[^"{}\[\]]*+(?:' + STRING + rb'[^"{}\[\]]*+)*+'


def _nested(depth: int) -> bytes:
    """Return the pattern of an object or array that holds at most `depth` further levels."""
    inner = rb"(?:" + _nested(depth - 1) + FLAT + rb")*+" if depth else b""
    return rb"[{\[]" + FLAT + inner + rb"[}\]]"


SHALLOW = re.compile(_nested(7), re.DOTALL)
"""What most values are, in one match. A deeper one is walked bracket by bracket, which takes five times as long."""
BRACKET = re.compile(FLAT + rb"([{}\[\]])", re.DOTALL)

LONE = rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}"
PAIR = rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
# All up to the next half of a pair, or to the end: every byte is read once.
UP_TO_LONE = re.compile(
    rb"((?:[^\\]++|" + PAIR + rb"|\\(?!u[dD][89a-fA-F][0-9a-fA-F]{2}).|\\\Z)*+)(" + LONE + rb")?+",
    re.DOTALL,
)


def parse_request(
    body: bytes,
    request_id: str,
    affinity_bytes: int = 64,
    api: Api = CHATS,
    block_bytes: int = 512,
) -> InferenceRequest:
    """Read what routing needs from the JSON body of an inference request.

    Raises BadRequest for anything but a JSON object with a string `model` of 1 to 256 characters; `param` is `model`
    where that is the fault.
    """
    try:
        fields = readable(api.decode, body)
    except msgspec.ValidationError as error:
        if "$.model" in str(error):
            raise BadRequest("`model` must be a string", param="model") from None
        raise BadRequest("the request body must be a JSON object") from None
    except msgspec.DecodeError as error:
        raise BadRequest(f"the request body is not valid JSON: {error}") from None
    except RecursionError:
        raise BadRequest("the request body is nested too deeply") from None
    model = fields.model
    if not model or len(model) > MODEL_LIMIT:
        check_model(model)
    system, tools = fields.system, fields.tools
    return InferenceRequest(
        model,
        request_id,
        fields.stream == TRUE,
        fields.prompt or None,
        fields.messages or None,
        affinity_bytes,
        api.path,
        system if system and system not in NOTHING else None,
        tools if tools and tools not in NOTHING else None,
        None,
        block_bytes,
    )


def check_model(model: str) -> None:
    """Raise BadRequest for what is no id of a model.

    >>> check_model("")
    Traceback (most recent call last):
    pointsman.errors.BadRequest: `model` is missing: it must be a non-empty string
    """
    if not model:
        raise BadRequest("`model` is missing: it must be a non-empty string", param="model")
    if len(model) > MODEL_LIMIT:
        raise BadRequest(f"`model` has more than {MODEL_LIMIT} characters", param="model")


def says_model_once(body: bytes) -> bool:
    r"""Tell whether the top-level key `model` stands once in a body that has passed `parse_request`.

    >>> says_model_once(b'{"model":"a","x":{"model":"b"}}'), says_model_once(b'{"model":"a","mod\\u0065l":"b"}')
    (True, False)
    """
    if body.count(b'"model"') == 1 and b"\\u006" not in body:
        return True
    return sum(name == "model" for name, _, _ in members(body)) == 1


def with_model(body: bytes, model: str) -> bytes:
    """Return the body with its top-level `model` replaced, every other byte as it was.

    `body` has passed `parse_request`. Where the text `"model"` occurs once and no escape can spell it otherwise, that
    one occurrence must be the top-level key (its five letters all lie in U+0060..U+006F), and no scan is needed.
    """
    value = msgspec.json.encode(model)
    if (
        body.count(b'"model"') == 1
        and b"\\u006" not in body
        and (found := STRING_MEMBER.match(body, body.find(b'"model"'))) is not None
    ):
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


def without_fields(body: bytes, names: Collection[str]) -> bytes:
    """Return a JSON object without some of its top-level members, however often each one stands there.

    `body` is a valid JSON object. A member goes with one comma beside it and with the blanks before its key; every
    other byte stays. O(size of the body).

    >>> without_fields(b'{"n": 1, "seed": 7, "stop": []}', ("n", "stop"))
    b'{ "seed": 7}'
    """
    if not any(name in names for name, _, _ in members(body)):
        return body
    opened = body.index(b"{") + 1
    last = body.rindex(b"}")
    kept: list[bytes] = []
    start = opened
    for name, _, end in members(body):
        comma = body.find(b",", end)
        following = last if comma < 0 else comma
        if name not in names:
            kept.append(body[start:following])
        start = following + 1
    return body[:opened] + b",".join(kept) + body[last:]


def members(body: bytes) -> Iterator[tuple[str, int, int]]:
    """Yield (key, start, end) of every top-level member's value in a valid JSON object, duplicates included.

    >>> [(key, b'{"a": [1, 2] , "b":{}}'[i:j]) for key, i, j in members(b'{"a": [1, 2] , "b":{}}')]
    [('a', b'[1, 2]'), ('b', b'{}')]
    """
    member = MEMBER.match(body, body.index(b"{") + 1)
    while member is not None:
        end = member.end()
        if member[3]:
            end = _closing(body, end)
        yield _name(member[1]), member.start(member.lastindex or 0), end
        comma = body.find(b",", end)
        member = MEMBER.match(body, comma + 1) if comma >= 0 else None


def elements(body: bytes) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of every element of a valid JSON array.

    >>> [b'[1, {"a": [2]} ,"]"]'[i:j] for i, j in elements(b'[1, {"a": [2]} ,"]"]')]
    [b'1', b'{"a": [2]}', b'"]"']
    """
    element = ELEMENT.match(body, body.index(b"[") + 1)
    while element is not None:
        end = element.end()
        if element[2]:
            end = _closing(body, end)
        yield element.start(element.lastindex or 0), end
        comma = body.find(b",", end)
        element = ELEMENT.match(body, comma + 1) if comma >= 0 else None


def readable(decode: Callable[[bytes], Decoded], body: bytes) -> Decoded:
    r"""Decode JSON; what is half of a surrogate pair is read as U+FFFD. Raises what `decode` raises.

    >>> readable(msgspec.json.decode, rb'["\ud83d", "\ud83d\ude00", "\\ud83d"]')
    ['�', '😀', '\\ud83d']
    """
    try:
        return decode(body)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        return decode(_mended(body))


def _mended(body: bytes) -> bytes:
    """Replace every escaped half of a surrogate pair by the escape of U+FFFD, at equal length."""
    return UP_TO_LONE.sub(lambda found: found[1] + (b"\\ufffd" if found[2] else b""), body)


def _closing(body: bytes, position: int) -> int:
    """Return the end of an object or array, from behind its opening bracket."""
    shallow = SHALLOW.match(body, position - 1)
    if shallow is not None:
        return shallow.end()
    depth = 1
    while depth:
        bracket = BRACKET.match(body, position)
        assert bracket is not None, "valid JSON closes what it opens"
        depth += 1 if bracket[1] in b"{[" else -1
        position = bracket.end()
    return position


def _name(key: bytes) -> str:
    if b"\\" not in key:
        return key[1:-1].decode("utf-8", "replace")
    return msgspec.json.decode(_mended(key).decode("utf-8", "replace"), type=str)
