"""The OpenAI surface of the engine, as a Starlette application.

Requests are read by declaration (`ChatRequest`, `CompletionRequest`): a value of the wrong type or out of range
is a 400 that names it. What the engine cannot do (tools, `n` above 1, images) is refused, not ignored. An
answer's head is sent when its request has left the queue, so a gateway can still take it elsewhere until then;
a client that goes away stops its generation at the scheduler's next step, streamed or not.
"""

import asyncio
import contextlib
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Annotated, Any, Literal, Protocol, TypeVar

import msgspec
from msgspec import Meta, Struct
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from pointsman.engine import scheduler as sched
from pointsman.engine.chat import CHATML, ChatTemplate, TemplateRefused
from pointsman.engine.sampling import Sampled, SamplingParams

__all__ = ["Language", "Served", "engine_app"]

MAX_BODY = 8 << 20
"""Bytes of a request body. The context is a few thousand tokens: more text cannot be of use."""
PING_AFTER_S = 15.0
"""Seconds of silence after which a stream says that it lives."""
DEFAULT_COMPLETION_TOKENS = 16

_Penalty = Annotated[float, Meta(ge=-2, le=2)]
_Count = Annotated[int, Meta(ge=1)]
_Top = Annotated[int, Meta(ge=0, le=20)]
_Seed = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
_Body = TypeVar("_Body", bound="Struct")


class StreamOptions(Struct):
    """Options of a streamed answer."""

    include_usage: bool | None = None


class _Generate(Struct, kw_only=True):
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
            raise _bad("one choice per request is what this engine gives", "n")
        if self.logit_bias:
            raise _bad("logit_bias is not supported", "logit_bias")

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


class ChatRequest(_Generate, kw_only=True):
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
            raise _bad("the model knows no tools", "tools")
        if self.response_format and self.response_format.get("type") != "text":
            raise _bad("only plain text can be asked for", "response_format")
        if self.top_logprobs and not self.logprobs:
            raise _bad("top_logprobs needs logprobs: true", "top_logprobs")


class CompletionRequest(_Generate, kw_only=True):
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
                raise _bad(f"{name} is not supported", name)
        if self.best_of not in (None, 1):
            raise _bad("one choice per request is what this engine gives", "best_of")


class TokenizeRequest(Struct):
    """POST /v1/tokenize: a text, or chat messages as the chat endpoint would see them."""

    model: str | None = None
    text: str = ""
    add_special: bool = False
    messages: list[Message] | None = None


class EngineError(Exception):
    """An answer that is an error, in the OpenAI shape."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": type, "param": param, "code": code}}
        self.retry_after = retry_after

    def response(self) -> Response:
        """The whole HTTP answer."""
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return _json(self.body, self.status, headers)


def _bad(message: str, param: str | None, code: str | None = None) -> EngineError:
    return EngineError(400, message, param=param, code=code)


def _overloaded(message: str) -> EngineError:
    return EngineError(429, message, type="rate_limit_error", code="queue_full", retry_after=1)


def _no_capacity(message: str) -> EngineError:
    return EngineError(503, message, type="server_error", code="no_capacity", retry_after=1)


def _json(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, "application/json")


class Language(sched.Vocabulary, Protocol):
    """What the surface must know of a model: `pointsman.engine.llama.Model`, or a fake of it."""

    n_vocab: int
    bos: int
    eos: int
    chat_template: str | None

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """The token ids of `text`."""
        ...

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes of a token; those of control tokens only when `special`."""
        ...


class Served:
    """A model under its public name, with the scheduler that runs it."""

    def __init__(self, name: str, model: Language, scheduler: sched.Scheduler) -> None:
        self.name = name
        self.model = model
        self.scheduler = scheduler
        self.created = int(time.time())
        self._template = ChatTemplate(
            model.chat_template or CHATML,
            bos_token=_text(model.piece(model.bos, special=True)) if model.bos >= 0 else "",
            eos_token=_text(model.piece(model.eos, special=True)) if model.eos >= 0 else "",
        )

    def require(self, model: str | None) -> None:
        """Raise 404 for a model that is not this one."""
        if model is not None and model != self.name:
            raise EngineError(
                404,
                f"the model {model!r} does not exist; this worker serves {self.name!r}",
                param="model",
                code="model_not_found",
            )

    def chat_tokens(self, messages: Sequence[Message]) -> list[int]:
        """The prompt of a chat."""
        plain = []
        for i, message in enumerate(messages):
            content = message.content
            if isinstance(content, list):
                for j, part in enumerate(content):
                    if part.type != "text" or part.text is None:
                        raise _bad(
                            f"the model reads text, not {part.type}", f"messages[{i}].content[{j}]"
                        )
                content = "".join(part.text or "" for part in content)
            role = "system" if message.role == "developer" else message.role
            plain.append({"role": role, "content": content or ""})
        try:
            text = self._template.render(plain)
        except TemplateRefused as error:
            raise _bad(f"the chat template refuses these messages: {error}", "messages") from None
        return self.model.tokenize(text, add_special=True, parse_special=True)

    def text_tokens(self, prompt: str | list[Any]) -> list[int]:
        """The prompt of a plain completion: text, token ids, or a list of just one of them."""
        if isinstance(prompt, str):
            return self.model.tokenize(prompt, add_special=True, parse_special=True)
        if prompt and isinstance(prompt[0], str | list):
            if len(prompt) > 1:
                raise _bad("one prompt per request is what this engine takes", "prompt")
            prompt = prompt[0]
            if isinstance(prompt, str):
                return self.text_tokens(prompt)
        for i, token in enumerate(prompt):
            if type(token) is not int or not 0 <= token < self.model.n_vocab:
                raise _bad(f"not a token id of 0 to {self.model.n_vocab - 1}", f"prompt[{i}]")
        return prompt

    def room(self, prompt: Sequence[int], param: str) -> int:
        """How many tokens the context has left after `prompt`."""
        if not prompt:
            raise _bad("the prompt is empty", param)
        room = self.scheduler.context - len(prompt)
        if room < 1:
            raise _bad(
                f"the prompt has {len(prompt)} tokens; with an answer it must fit into "
                f"{self.scheduler.context}",
                param,
                "context_length_exceeded",
            )
        return room


def _text(piece: bytes) -> str:
    return piece.decode("utf-8", "replace")


class _Chat:
    """The shapes of a chat answer."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    prefix = "chatcmpl"

    def __init__(self, model: Language) -> None:
        self._model = model

    def head(self) -> dict[str, object] | None:
        return self._choice("delta", {"role": "assistant", "content": ""}, None, None)

    def _choice(
        self, key: str, value: object, logprobs: object, reason: str | None
    ) -> dict[str, object]:
        return {"index": 0, key: value, "logprobs": logprobs, "finish_reason": reason}

    def part(self, text: str, logprobs: object, reason: str | None) -> dict[str, object]:
        return self._choice("delta", {"content": text} if text else {}, logprobs, reason)

    def whole(self, text: str, logprobs: object, reason: str) -> dict[str, object]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return self._choice("message", message, logprobs, reason)

    def logprobs(self, tokens: Sequence[Sampled], offset: int) -> object:
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
        return {"token": _text(piece), "logprob": logprob, "bytes": list(piece)}


class _Text:
    """The shapes of a plain completion."""

    kind = "text_completion"
    chunk_kind = "text_completion"
    prefix = "cmpl"

    def __init__(self, model: Language) -> None:
        self._model = model

    def head(self) -> dict[str, object] | None:
        return None

    def part(self, text: str, logprobs: object, reason: str | None) -> dict[str, object]:
        return {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": reason}

    whole = part

    def logprobs(self, tokens: Sequence[Sampled], offset: int) -> object:
        pieces = [_text(self._model.piece(sampled.token, special=True)) for sampled in tokens]
        offsets = []
        for piece in pieces:
            offsets.append(offset)
            offset += len(piece)
        return {
            "tokens": pieces,
            "token_logprobs": [sampled.logprob for sampled in tokens],
            "top_logprobs": [
                {
                    _text(self._model.piece(token, special=True)): logprob
                    for token, logprob in sampled.top
                }
                for sampled in tokens
            ],
            "text_offset": offsets,
        }


class _Answer:
    """One request between the scheduler's thread and the event loop."""

    def __init__(
        self, served: Served, request: sched.Request, shape: _Chat | _Text, *, logprobs: bool
    ) -> None:
        self.shape = shape
        self._served = served
        self._request = request
        self._logprobs = logprobs
        self._events: asyncio.Queue[sched.Event] = asyncio.Queue()
        self._generation: sched.Generation | None = None
        self._cached = 0
        self._id = f"{shape.prefix}-{secrets.token_hex(12)}"
        self._created = int(time.time())

    async def start(self) -> None:
        """Submit, and wait until the request runs.

        Raises:
            EngineError: 429 when too many wait or it waited too long, 503 while draining.
        """
        loop = asyncio.get_running_loop()

        def deliver(event: sched.Event) -> None:
            # The loop is closed when the server stopped without waiting: then nobody listens any more.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._events.put_nowait, event)

        try:
            self._generation = self._served.scheduler.submit(self._request, deliver)
        except sched.QueueFull:
            raise _overloaded("too many requests are waiting") from None
        except sched.Draining:
            raise _no_capacity("the worker is draining") from None
        event = await self._events.get()
        if isinstance(event, sched.Failed):
            raise _failure(event)
        assert isinstance(event, sched.Started)
        self._cached = event.cached_tokens

    def cancel(self) -> None:
        """Stop generating. Harmless at any time."""
        if self._generation is not None:
            self._generation.cancel()
            self._served.scheduler.wake()

    async def whole(self) -> dict[str, object]:
        """The answer as one JSON value."""
        parts: list[str] = []
        tokens: list[Sampled] = []
        while True:
            match await self._events.get():
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
                    raise _failure(failed)

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
                    event = await self._events.get()
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
                        offset += len(_text(self._served.model.piece(sampled.token, special=True)))
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
                    yield _event(_failure(failed).body)
                    return

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


def _failure(event: sched.Failed) -> EngineError:
    if event.reason == "overloaded":
        return _overloaded(event.message)
    if event.reason == "draining":
        return _no_capacity(event.message)
    return EngineError(500, event.message, type="server_error", code="internal_error")


def _event(value: object) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


class _EventStream(Response):
    """A server-sent event stream out of an iterator of whole events."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


class _Answering:
    """An ASGI response that computes an answer for as long as its client listens."""

    def __init__(self, answer: _Answer, *, stream: bool, include_usage: bool) -> None:
        self._answer = answer
        self._stream = stream
        self._include_usage = include_usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _while_connected(receive, self._respond(scope, receive, send))
        finally:
            self._answer.cancel()

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._answer.start()
            response: Response
            if self._stream:
                response = _EventStream(self._answer.stream(include_usage=self._include_usage))
            else:
                response = _json(await self._answer.whole())
        except EngineError as error:
            response = error.response()
        await response(scope, receive, send)


async def _while_connected(receive: Receive, work: Awaitable[None]) -> None:
    """Await `work`, but drop it when the client goes away."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()
        await asyncio.wait((working, leaving))
    if not working.cancelled():
        working.result()


async def _read(request: Request, kind: type[_Body]) -> _Body:
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
        raise _bad(*_named(str(error))) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _bad(f"the body is not valid JSON: {error}", None) from None


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


def engine_app(served: Served) -> Starlette:
    """The ASGI application that serves one model."""

    async def chat(request: Request) -> Any:
        body = await _read(request, ChatRequest)
        served.require(body.model)
        body.refuse()
        prompt = await asyncio.to_thread(served.chat_tokens, body.messages)
        room = served.room(prompt, "messages")
        top = (body.top_logprobs or 0) if body.logprobs else 0
        return _answering(
            body, prompt, body.limit(room, room), top, _Chat(served.model), bool(body.logprobs)
        )

    async def completions(request: Request) -> Any:
        body = await _read(request, CompletionRequest)
        served.require(body.model)
        body.refuse()
        prompt = await asyncio.to_thread(served.text_tokens, body.prompt)
        limit = body.limit(served.room(prompt, "prompt"), DEFAULT_COMPLETION_TOKENS)
        wanted = body.logprobs is not None
        return _answering(body, prompt, limit, body.logprobs or 0, _Text(served.model), wanted)

    def _answering(
        body: _Generate,
        prompt: list[int],
        limit: int,
        top_logprobs: int,
        shape: _Chat | _Text,
        logprobs: bool,
    ) -> _Answering:
        request = sched.Request(prompt, body.sampling(top_logprobs), limit, body.stops())
        usage = bool(body.stream_options and body.stream_options.include_usage)
        answer = _Answer(served, request, shape, logprobs=logprobs)
        return _Answering(answer, stream=bool(body.stream), include_usage=usage)

    async def tokenize(request: Request) -> Response:
        body = await _read(request, TokenizeRequest)
        served.require(body.model)
        if body.messages:
            ids = await asyncio.to_thread(served.chat_tokens, body.messages)
        else:
            ids = await asyncio.to_thread(
                served.model.tokenize,
                body.text,
                add_special=body.add_special,
                parse_special=True,
            )
        return _json({"ids": ids})

    def card() -> dict[str, object]:
        return {
            "id": served.name,
            "object": "model",
            "created": served.created,
            "owned_by": "pointsman",
            "max_model_len": served.scheduler.context,
        }

    async def models(request: Request) -> Response:
        return _json({"object": "list", "data": [card()]})

    async def model(request: Request) -> Response:
        served.require(request.path_params["model"])
        return _json(card())

    async def health(request: Request) -> Response:
        load = served.scheduler.load
        status = "draining" if load.draining else "ok"
        return _json({"status": status, **load._asdict()}, 503 if load.draining else 200)

    async def on_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, EngineError)
        return error.response()

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        code = "not_found" if error.status_code == 404 else None
        response = EngineError(error.status_code, error.detail, code=code).response()
        response.headers.update(error.headers or {})
        return response

    async def on_gone(request: Request, error: Exception) -> Response:
        return Response(status_code=499)

    async def on_bug(request: Request, error: Exception) -> Response:
        return EngineError(
            500, "internal error", type="server_error", code="internal_error"
        ).response()

    handlers: dict[Any, Callable[[Request, Exception], Awaitable[Response]]] = {
        EngineError: on_error,
        HTTPException: on_http_error,
        ClientDisconnect: on_gone,
        Exception: on_bug,
    }
    return Starlette(
        routes=[
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/tokenize", tokenize, methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/models/{model:path}", model),
            Route("/health", health),
        ],
        exception_handlers=handlers,
    )
