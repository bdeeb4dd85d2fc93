"""The prompt of a request as a tokenizer takes it: a text, the messages of a chat, or token ids.

Only what is text alone has a rendering that everybody agrees on. Messages with images, calls of tools or anything
unknown have none here, and neither has a chat with tools, whose template decides how they are written.
"""

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from pointsman.domain.request import InferenceRequest

__all__ = ["Message", "TokenId", "chat_of", "prompt_of"]

TokenId = Annotated[int, Meta(ge=0, le=0xFFFFFFFF)]


class Part(Struct, forbid_unknown_fields=True):
    """A part of a message that is text; other kinds do not pass."""

    type: Literal["text"]
    text: str


class Message(Struct, forbid_unknown_fields=True):
    """A message that consists of text alone."""

    role: str
    content: str | list[Part] | None = None
    name: str | None = None


_PROMPT = msgspec.json.Decoder(str | tuple[TokenId, ...])
_MESSAGES = msgspec.json.Decoder(list[Message])


def prompt_of(request: InferenceRequest) -> str | list[dict[str, str]] | tuple[int, ...] | None:
    """Return the prompt of a request for completions or chat completions, None where it is not text or tokens alone.

    >>> prompt_of(InferenceRequest("m", "r1", messages=b'[{"role": "user", "content": "Hi"}]'))
    [{'role': 'user', 'content': 'Hi'}]
    >>> prompt_of(InferenceRequest("m", "r1", prompt=b"[1, 2]"))
    (1, 2)
    """
    prompt, messages = request.prompt, request.messages
    if (prompt is None) == (messages is None) or request.system or request.tools:
        return None
    try:
        if prompt is not None:
            return _PROMPT.decode(prompt) or None
        assert messages is not None
        return chat_of(_MESSAGES.decode(messages)) or None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def chat_of(messages: Sequence[Message]) -> list[dict[str, str]]:
    """Return messages as chat templates read them: text alone, and `system` for `developer`.

    >>> chat_of([Message("developer", [Part("text", "Be "), Part("text", "brief.")])])
    [{'role': 'system', 'content': 'Be brief.'}]
    """
    return [
        {
            "role": "system" if message.role == "developer" else message.role,
            "content": _text(message.content),
        }
        for message in messages
    ]


def _text(content: str | list[Part] | None) -> str:
    if isinstance(content, list):
        return "".join(part.text for part in content)
    return content or ""
