"""What clients send, by declaration: a value of the wrong type or out of range is a 400 that names it.

What the engine understands and does not offer (tools, `n` above 1) is refused, not ignored; unknown fields are ignored.
"""

import re
import secrets
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request

from pointsman.engine.refusals import EngineError, bad
from pointsman.engine.sampling import SamplingParams

__all__ = [
    "ChatRequest",
    "CompletionRequest",
    "ContentPart",
    "Generate",
    "Message",
    "StreamOptions",
    "TokenizeRequest",
    "read",
]

MAX_BODY = 8 << 20
"""Bytes of a request body. The context is a few thousand tokens: more text cannot be of use."""

_Penalty = Annotated[float, Meta(ge=-2, le=2)]
_Count = Annotated[int, Meta(ge=1)]
_Top = Annotated[int, Meta(ge=0, le=20)]
_Seed = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
_Body = TypeVar("_Body", bound="Struct")


class StreamOptions(Struct):
    """Options of a streamed answer."""

    include_usage: bool | None = None


class Generate(Struct, kw_only=True):
    """The fields that chat and plain completions share. None is "not given"."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: _Count | None = None
    max_completion_tokens: _Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    seed: _Seed | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    logit_bias: dict[str, float] | None = None

    def refuse(self) -> None:
        """Raise for what is understood but not offered."""
        if self.n not in (None, 1):
            raise bad("one choice per request is what this engine gives", "n")
        if self.logit_bias:
            raise bad("logit_bias is not supported", "logit_bias")

    def limit(self, room: int, default: int) -> int:
        """How many tokens may be generated when `room` are left in the context."""
        return min(self.max_completion_tokens or self.max_tokens or default, room)

    def stops(self) -> Sequence[str]:
        """The stop strings."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    def sampling(self, top_logprobs: int) -> SamplingParams:
        """The sampling parameters; without a seed, one is drawn."""

        def given(value: float | None, default: float) -> float:
            return default if value is None else value

        return SamplingParams(
            temperature=given(self.temperature, 1.0),
            top_p=given(self.top_p, 1.0),
            top_k=max(self.top_k or 0, 0),
            min_p=given(self.min_p, 0.0),
            repetition_penalty=given(self.repetition_penalty, 1.0),
            presence_penalty=given(self.presence_penalty, 0.0),
            frequency_penalty=given(self.frequency_penalty, 0.0),
            seed=secrets.randbits(63) if self.seed is None else self.seed,
            top_logprobs=top_logprobs,
        )


class ContentPart(Struct):
    """A part of a message's content."""

    type: str
    text: str | None = None


class Message(Struct):
    """A chat message."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None


class ChatRequest(Generate, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    logprobs: bool | None = None
    top_logprobs: _Top | None = None
    tools: list[Any] | None = None
    response_format: dict[str, Any] | None = None

    def refuse(self) -> None:
        """Raise for what is understood but not offered."""
        super().refuse()
        if self.tools:
            raise bad("the model knows no tools", "tools")
        if self.response_format and self.response_format.get("type") != "text":
            raise bad("only plain text can be asked for", "response_format")
        if self.top_logprobs and not self.logprobs:
            raise bad("top_logprobs needs logprobs: true", "top_logprobs")


class CompletionRequest(Generate, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[Any]
    logprobs: _Top | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None

    def refuse(self) -> None:
        """Raise for what is understood but not offered."""
        super().refuse()
        for name in ("echo", "suffix"):
            if getattr(self, name):
                raise bad(f"{name} is not supported", name)
        if self.best_of not in (None, 1):
            raise bad("one choice per request is what this engine gives", "best_of")


class TokenizeRequest(Struct):
    """POST /v1/tokenize: a text, or chat messages as the chat endpoint would see them."""

    model: str | None = None
    text: str = ""
    add_special: bool = False
    messages: list[Message] | None = None


async def read(request: Request, kind: type[_Body]) -> _Body:
    """The body as `kind`.

    Raises:
        EngineError: 413, or 400 with `param` naming what is wrong.
    """
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY:
            raise EngineError(413, f"the body is over {MAX_BODY} bytes", code="request_too_large")
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise bad(*_named(str(error))) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad(f"the body is not valid JSON: {error}", None) from None


def _named(message: str) -> tuple[str, str | None]:
    """Split msgspec's "… - at `$.path`" into message and param.

    >>> _named("Expected `int`, got `str` - at `$.max_tokens`")
    ('max_tokens: Expected `int`, got `str`', 'max_tokens')
    >>> _named("Object missing required field `model`")
    ('model: Object missing required field `model`', 'model')
    """
    what, _, path = message.partition(" - at `$")
    param = path.rstrip("`").lstrip(".").replace("[...]", "") or None
    if missing := re.search(r"missing required field `(\w+)`", what):
        param = f"{param}.{missing[1]}" if param else missing[1]
    return (f"{param}: {what}" if param else what), param
