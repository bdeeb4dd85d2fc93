"""From the scheduler's events to an OpenAI answer, whole or streamed.

Two shapes know the JSON of their endpoint and nothing else; `Answer` waits for the events and puts them into one.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence

import msgspec

from pointsman.engine import scheduler as sched
from pointsman.engine.asking import Asked
from pointsman.engine.refusals import failure, no_capacity, overloaded
from pointsman.engine.sampling import Sampled
from pointsman.engine.served import Language, Served, text_of

__all__ = ["Answer", "ChatShape", "TextShape"]

PING_AFTER_S = 15.0
"""Seconds of silence after which a stream says that it lives."""


class ChatShape:
    """The shapes of a chat answer."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    prefix = "chatcmpl"

    def __init__(self, model: Language) -> None:
        self._model = model

    def head(self) -> dict[str, object] | None:
        """The choice that begins a stream, None where there is none."""
        return self._choice("delta", {"role": "assistant", "content": ""}, None, None)

    def _choice(
        self, key: str, value: object, logprobs: object, reason: str | None
    ) -> dict[str, object]:
        return {"index": 0, key: value, "logprobs": logprobs, "finish_reason": reason}

    def part(self, text: str, logprobs: object, reason: str | None) -> dict[str, object]:
        """A choice of a streamed chunk."""
        return self._choice("delta", {"content": text} if text else {}, logprobs, reason)

    def whole(self, text: str, logprobs: object, reason: str) -> dict[str, object]:
        """The choice of a whole answer."""
        message = {"role": "assistant", "content": text, "refusal": None}
        return self._choice("message", message, logprobs, reason)

    def logprobs(self, tokens: Sequence[Sampled], offset: int) -> object:
        """The log-probabilities of `tokens`; `offset`: characters of the answer before them."""
        return {
            "content": [
                {
                    **self._entry(sampled.token, sampled.logprob),
                    "top_logprobs": [self._entry(token, logprob) for token, logprob in sampled.top],
                }
                for sampled in tokens
            ],
            "refusal": None,
        }

    def _entry(self, token: int, logprob: float) -> dict[str, object]:
        piece = self._model.piece(token, special=True)
        return {"token": text_of(piece), "logprob": logprob, "bytes": list(piece)}


class TextShape:
    """The shapes of a plain completion."""

    kind = "text_completion"
    chunk_kind = "text_completion"
    prefix = "cmpl"

    def __init__(self, model: Language) -> None:
        self._model = model

    def head(self) -> dict[str, object] | None:
        """The choice that begins a stream, None where there is none."""
        return None

    def part(self, text: str, logprobs: object, reason: str | None) -> dict[str, object]:
        """A choice of a streamed chunk."""
        return {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": reason}

    whole = part

    def logprobs(self, tokens: Sequence[Sampled], offset: int) -> object:
        """The log-probabilities of `tokens`; `offset`: characters of the answer before them."""
        pieces = [text_of(self._model.piece(sampled.token, special=True)) for sampled in tokens]
        offsets = []
        for piece in pieces:
            offsets.append(offset)
            offset += len(piece)
        return {
            "tokens": pieces,
            "token_logprobs": [sampled.logprob for sampled in tokens],
            "top_logprobs": [
                {
                    text_of(self._model.piece(token, special=True)): logprob
                    for token, logprob in sampled.top
                }
                for sampled in tokens
            ],
            "text_offset": offsets,
        }


class Answer:
    """One request between the scheduler's thread and the event loop."""

    def __init__(
        self,
        served: Served,
        request: sched.Request,
        shape: ChatShape | TextShape,
        *,
        logprobs: bool,
    ) -> None:
        self.shape = shape
        self._served = served
        self._request = request
        self._logprobs = logprobs
        self._asked: Asked | None = None
        self._cached = 0
        self._id = f"{shape.prefix}-{secrets.token_hex(12)}"
        self._created = int(time.time())

    async def start(self) -> None:
        """Submit, and wait until the request runs.

        Raises:
            EngineError: 429 when too many wait or it waited too long, 503 while draining.
        """
        try:
            self._asked = asked = Asked(self._served.scheduler, self._request)
        except sched.QueueFull:
            raise overloaded("too many requests are waiting") from None
        except sched.Draining:
            raise no_capacity("the worker is draining") from None
        event = await asked.next()
        if isinstance(event, sched.Failed):
            raise failure(event)
        assert isinstance(event, sched.Started)
        self._cached = event.cached_tokens

    def cancel(self) -> None:
        """Stop generating. Harmless at any time."""
        if self._asked is not None:
            self._asked.cancel()

    async def whole(self) -> dict[str, object]:
        """The answer as one JSON value."""
        parts: list[str] = []
        tokens: list[Sampled] = []
        while True:
            match await self._next():
                case sched.Token(sampled, text):
                    tokens.append(sampled)
                    parts.append(text)
                case sched.Finished(reason, text, count):
                    parts.append(text)
                    logprobs = self.shape.logprobs(tokens, 0) if self._logprobs else None
                    return self._envelope(
                        self.shape.kind,
                        [self.shape.whole("".join(parts), logprobs, reason)],
                        usage=self._usage(count),
                    )
                case sched.Failed() as failed:
                    raise failure(failed)

    async def stream(self, *, include_usage: bool) -> AsyncIterator[bytes]:
        """The answer as server-sent events, the last one `[DONE]`, or an error event."""
        blank: dict[str, object] = {"usage": None} if include_usage else {}

        def chunk(choice: dict[str, object]) -> bytes:
            return _event(self._envelope(self.shape.chunk_kind, [choice], **blank))

        # Not before the first token: until then a gateway may still take the request elsewhere.
        head = self.shape.head()
        offset = 0
        while True:
            try:
                async with asyncio.timeout(PING_AFTER_S):
                    event = await self._next()
            except TimeoutError:
                yield b": ping\n\n"
                continue
            if head is not None and not isinstance(event, sched.Failed):
                yield chunk(head)
                head = None
            match event:
                case sched.Token(sampled, text):
                    logprobs = None
                    if self._logprobs:
                        logprobs = self.shape.logprobs([sampled], offset)
                        offset += len(
                            text_of(self._served.model.piece(sampled.token, special=True))
                        )
                    if text or logprobs:
                        yield chunk(self.shape.part(text, logprobs, None))
                case sched.Finished(reason, text, count):
                    if text:
                        yield chunk(self.shape.part(text, None, None))
                    yield chunk(self.shape.part("", None, reason))
                    if include_usage:
                        envelope = self._envelope(
                            self.shape.chunk_kind, [], usage=self._usage(count)
                        )
                        yield _event(envelope)
                    yield b"data: [DONE]\n\n"
                    return
                case sched.Failed() as failed:
                    yield _event(failure(failed).body)
                    return

    async def _next(self) -> sched.Event:
        assert self._asked is not None, "started"
        return await self._asked.next()

    def _envelope(self, kind: str, choices: list[object], **more: object) -> dict[str, object]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._served.name,
            "choices": choices,
            **more,
        }

    def _usage(self, completion_tokens: int) -> dict[str, object]:
        prompt_tokens = len(self._request.prompt)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self._cached},
        }


def _event(value: object) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
