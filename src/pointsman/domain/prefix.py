"""The rendered prompt: its leading bytes, which an affinity policy hashes, and the whole of it.

Engines cache the KV of prompts in blocks of 16 tokens, about 64 bytes of text, and two requests share a cached block
only if they begin alike. So the key is the first 64 bytes of the prompt of a plain completion, or of the chat messages
written as `role LF content LF` in order. A system text that stands in a field of its own comes before the messages, as
if it were the first of them, and tools come between the two, as a digest that is as long as their text would be. Tools
beside messages that begin with a system text are not looked at: the specification's key is of the messages alone, and
that text comes first in the engine's prompt as well.

Content that is no text contributes a digest of its value: token ids (the first limit / 4 of them, the same length of
prompt), lists of prompts, and multimodal content, so that chats about different images part. Content made of text parts
alone reads like the same text as a string.

The key is bytes and is cut as bytes, maybe inside a character; it is hashed and never decoded. Lone surrogates become
U+FFFD. Nothing here raises: what is malformed contributes nothing.

The whole prompt is rendered by the same rules, but where a digest would hide that two long prompts begin alike, or how
long they are: tools, and the calls of tools, are JSON without spaces, token ids are 4 bytes each, and of multimodal
content the text is text, so that only what is none (an image, say) is a digest. Tools beside messages that begin with a
system text come after that.
"""

import json
import re
from functools import lru_cache
from hashlib import sha256
from typing import Annotated, Any

import msgspec

from pointsman.domain.blocks import pack_tokens

__all__ = ["prefix_key", "render_prefix", "render_prompt"]

_TEXT_PARTS = ("text", "input_text", "output_text")
_UNREADABLE = (msgspec.DecodeError, ValueError, RecursionError)

# The longest run of whole characters and escapes: where a JSON string that was cut anywhere can be read up to.
_WHOLE = re.compile(r'(?:[^"\\]+|\\u[0-9a-fA-F]{4}|\\["\\/bfnrt])*')
_LONE = re.compile("[\ud800-\udfff]")
_FIRST_ROLE = re.compile(rb'\s*+\[\s*+\{\s*+"role"\s*+:\s*+"([a-z]*+)"')
_SYSTEM = (b"system", b"developer")
_ESCAPE = re.compile(
    rb"\\(?:(u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)


_ABSENT = msgspec.Raw(b"")


class _Message(msgspec.Struct):
    role: msgspec.Raw = _ABSENT
    content: msgspec.Raw = _ABSENT
    tool_calls: msgspec.Raw = _ABSENT


class _Body(msgspec.Struct):
    prompt: msgspec.Raw = msgspec.Raw(b"null")
    messages: msgspec.Raw = msgspec.Raw(b"[]")


_BODY = msgspec.json.Decoder(_Body)
_MESSAGE = msgspec.json.Decoder(_Message)
_MESSAGES = msgspec.json.Decoder(list[_Message])
_ITEMS = msgspec.json.Decoder(list[msgspec.Raw])
_Tokens = list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]]
_TOKENS = msgspec.json.Decoder(_Tokens)
_NULL = msgspec.Raw(b"null")


def prefix_key(body: bytes, limit: int = 64) -> bytes:
    r"""Return the affinity key of a whole request body, empty for a body that is no JSON object.

    Source: specification, section 2.3.

    >>> prefix_key(b'{"messages": [{"role": "user", "content": "Hi"}]}')
    b'user\nHi\n'
    """
    try:
        try:
            parsed = _BODY.decode(body)
        except msgspec.DecodeError:
            parsed = _BODY.decode(_mended(body))
    except _UNREADABLE:
        return b""
    return render_prefix(parsed.prompt, parsed.messages, limit)


def render_prefix(
    prompt: bytes | msgspec.Raw | None,
    messages: bytes | msgspec.Raw | None,
    limit: int = 64,
    system: bytes | msgspec.Raw | None = None,
    tools: bytes | msgspec.Raw | None = None,
) -> bytes:
    r"""Return the first `limit` bytes of the rendered prompt, from the raw JSON of what stands in it.

    That is `system`, `tools`, `prompt` and `messages`, in this order. A string is read only as far as the limit needs.

    >>> render_prefix(None, b'[{"role": "system", "content": "Be brief."}, {"role": "user"}]')
    b'system\nBe brief.\nuser\n\n'
    >>> render_prefix(None, b'[{"role": "user", "content": "Hi"}]', system=b'"Be brief."')
    b'system\nBe brief.\nuser\nHi\n'
    """
    if prompt is None and messages is not None and system is None and tools is None:
        # The usual chat: its first message alone is long enough, plain, and begins with its role.
        first = _opening(limit).match(messages)
        if first is not None and first[2].isascii():
            return (b"%b\n%b" % first.groups())[:limit]
    out = b""
    try:
        if system is not None:
            out = b"system\n%b\n" % _rendered(system, limit)
        if tools is not None and (system is not None or not _begins_with_system(messages)):
            out += b"tools\n%b\n" % sha256(tools).hexdigest().encode()
        if prompt is not None and len(out) < limit:
            out += _rendered(prompt, limit)
        if messages is not None and len(out) < limit:
            for number, message in enumerate(_messages(messages)):
                role = _rendered(message.role, limit) if _is_string(message.role) else b""
                content = message.content
                if not message.role and not content:
                    # A call of a tool, say, or its result, which in some APIs stand among the messages.
                    content = _items(messages)[number]
                out += b"%b\n%b\n" % (role, _rendered(content, limit))
                if len(out) >= limit:
                    break
    except _UNREADABLE:
        pass
    return out[:limit]


def render_prompt(
    prompt: bytes | msgspec.Raw | None,
    messages: bytes | msgspec.Raw | None,
    system: bytes | msgspec.Raw | None = None,
    tools: bytes | msgspec.Raw | None = None,
) -> bytes:
    r"""Return the whole rendered prompt, from the raw JSON of what stands in it.

    >>> render_prompt(None, b'[{"role": "system", "content": "Be brief."}, {"role": "user"}]', tools=b"[ 1 ]")
    b'system\nBe brief.\ntools\n[1]\nuser\n\n'
    >>> render_prompt(b"[1, 2]", None)
    b'\x01\x00\x00\x00\x02\x00\x00\x00'
    """
    pieces: list[bytes | memoryview] = []
    try:
        if system is not None:
            pieces += (b"system\n", _whole(system), b"\n")
        if tools is not None and (system is not None or not _begins_with_system(messages)):
            pieces += (b"tools\n", _compact(tools), b"\n")
            tools = None
        if prompt is not None:
            pieces.append(_whole(prompt))
        if messages is not None:
            for number, message in enumerate(_messages(messages)):
                content, calls = message.content, message.tool_calls
                if not message.role and not content and not calls:
                    content = _items(messages)[number]
                pieces += (_role(message.role), b"\n", _whole(content), b"\n")
                if calls and calls != _NULL:
                    pieces += (_compact(calls), b"\n")
                if tools is not None:
                    pieces += (b"tools\n", _compact(tools), b"\n")
                    tools = None
    except _UNREADABLE:
        pass
    return b"".join(pieces)


def _begins_with_system(messages: bytes | msgspec.Raw | None) -> bool:
    if messages is None:
        return False
    first = _FIRST_ROLE.match(messages)
    if first is not None:
        return first[1] in _SYSTEM
    return any(_rendered(message.role, 16) in _SYSTEM for message in _messages(messages)[:1])


@lru_cache(maxsize=8)
def _opening(limit: int) -> re.Pattern[bytes]:
    role = rb'\s*+\[\s*+\{\s*+"role"\s*+:\s*+"([a-z]*+)"'
    return re.compile(role + rb'\s*+,\s*+"content"\s*+:\s*+"([^"\\\x00-\x1f]{%d})' % limit)


def _messages(raw: bytes | msgspec.Raw) -> list[_Message]:
    try:
        return _MESSAGES.decode(raw)
    except msgspec.DecodeError:
        # Something in the list is no object: what it is then counts as content without a role.
        return [
            _MESSAGE.decode(item) if _head(item, 1) == b"{" else _Message(content=item)
            for item in _items(raw)
        ]


def _items(raw: bytes | msgspec.Raw) -> list[msgspec.Raw]:
    try:
        return _ITEMS.decode(raw)
    except msgspec.DecodeError:
        return _ITEMS.decode(_mended(bytes(raw)))


def _rendered(raw: bytes | msgspec.Raw, limit: int) -> bytes:
    # An escape takes at most 6 raw bytes for each byte of text, and a pair of them 12 for one character.
    head = _head(raw, 6 * limit + 16)
    match head[:1]:
        case b'"':
            return _leading_text(head, limit)
        case b"" | b"n":
            return b""
        case b"[" if tokens := _leading_tokens(head, limit):
            return tokens
        case b" " | b"\t" | b"\r" | b"\n":
            return _rendered(bytes(raw).strip(), limit)
    value = _value(raw)
    while isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str):
        return _utf8(value)[:limit]
    if isinstance(value, list):
        if value and all(type(item) is int for item in value):
            return _digest(b",".join(b"%d" % token for token in value[: _tokens_in(limit)]))
        if all(_is_text_part(item) for item in value):
            return _utf8("".join(part["text"] for part in value))[:limit]
    return _digest(msgspec.json.encode(value, order="deterministic"))


def _leading_text(head: bytes, limit: int) -> bytes:
    end = head.find(b'"', 1)
    plain = head[1:end] if end > 0 else head[1:]
    if b"\\" not in plain:
        # The cut may fall inside a character, which then lies beyond the limit.
        return plain[:limit] if plain.isascii() else _utf8(str(plain, "utf-8", "replace"))[:limit]
    whole = _WHOLE.match(str(head, "utf-8", "replace"), 1)
    text = json.loads(f'"{whole[0]}"', strict=False) if whole else ""
    return _utf8(text)[:limit]


def _leading_tokens(head: bytes, limit: int) -> bytes | None:
    # A prompt of token ids may be long, and its first few are all that is needed.
    count = _tokens_in(limit)
    pieces = head[1:].split(b",", count)
    if len(pieces) <= count:
        last = pieces[-1].rstrip()
        if not last.endswith(b"]"):
            return None
        pieces[-1] = last[:-1]
    tokens = [piece.strip() for piece in pieces[:count]]
    if not all(token.isdigit() for token in tokens):
        return None
    return _digest(b",".join(tokens))


def _role(raw: msgspec.Raw) -> bytes | memoryview:
    return _whole(raw) if _is_string(raw) else b""


def _whole(raw: bytes | msgspec.Raw) -> bytes | memoryview:
    data = bytes(raw).strip()
    match data[:1]:
        case b'"':
            # Bytes that are no UTF-8 stay as they are: to find them would take as long as decoding all.
            return str(_value(data)).encode() if b"\\" in data else memoryview(data)[1:-1]
        case b"" | b"n":
            return b""
        case b"[":
            try:
                return pack_tokens(_TOKENS.decode(data))
            except msgspec.DecodeError:
                pass
    value = _value(data)
    while isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, list):
        try:
            return pack_tokens(msgspec.convert(value, _Tokens))
        except msgspec.ValidationError:
            pass
        if any(isinstance(item, dict) for item in value):
            return b"".join([_part(item) for item in value])
    return _digest(msgspec.json.encode(value, order="deterministic"))


def _part(part: Any) -> bytes:
    if _is_text_part(part):
        return str(part["text"]).encode()
    return _digest(msgspec.json.encode(part, order="deterministic"))


def _compact(raw: bytes | msgspec.Raw) -> bytes:
    return msgspec.json.format(bytes(raw), indent=-1)


def _tokens_in(limit: int) -> int:
    return max(limit // 4, 1)


def _is_string(raw: bytes | msgspec.Raw) -> bool:
    return _head(raw, 1) == b'"'


def _is_text_part(part: Any) -> bool:
    return (
        isinstance(part, dict)
        and part.get("type") in _TEXT_PARTS
        and isinstance(part.get("text"), str)
    )


def _head(raw: bytes | msgspec.Raw, size: int) -> bytes:
    return bytes(memoryview(raw)[:size])


def _digest(data: bytes) -> bytes:
    # SHA-256 because processors have it built in: half the time of the others on an image of a megabyte.
    return sha256(data).hexdigest()[:16].encode()


def _utf8(text: str) -> bytes:
    return _LONE.sub("\ufffd", text).encode()


def _value(raw: bytes | msgspec.Raw) -> Any:
    try:
        return msgspec.json.decode(raw)
    except msgspec.DecodeError:
        return msgspec.json.decode(_mended(bytes(raw)))


def _mended(raw: bytes) -> bytes:
    # JSON that breaks no rule but that of Unicode: lone surrogates, and bytes that are no UTF-8.
    raw = str(raw, "utf-8", "replace").encode()
    return _ESCAPE.sub(lambda m: b"\\ufffd" if m[2] else m[0], raw)
