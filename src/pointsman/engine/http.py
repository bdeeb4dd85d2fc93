"""The OpenAI surface of the engine, as a Starlette application.

Requests are read by declaration (`ChatRequest`, `CompletionRequest`): a value of the wrong type or out of range
is a 400 that names it. What the engine cannot do (tools, `n` above 1, images) is refused, not ignored. An
answer's head is sent when its request has left the queue, so a gateway can still take it elsewhere until then;
a client that goes away stops its generation at the scheduler's next step, streamed or not.

Three headers are for gateways: `X-Request-Id` is the name to cancel by, `X-TL-Priority` the place in the queue, and
`X-TL-KV-Handle` what another worker has pushed here for this prompt. An answer that went on from there says so.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from pointsman.engine import scheduler as sched
from pointsman.engine.answers import Answer, ChatShape, TextShape
from pointsman.engine.bodies import ChatRequest, CompletionRequest, Generate, TokenizeRequest, read
from pointsman.engine.kv.pool import Held
from pointsman.engine.refusals import EngineError, bad, json_response, unknown_handle
from pointsman.engine.served import Served

__all__ = ["engine_app"]

DEFAULT_COMPLETION_TOKENS = 16
PRIORITIES = range(-100, 101)


class _Told(NamedTuple):
    """What a gateway says in headers. `held`: the KV blocks of the prompt, claimed for this request."""

    request_id: str
    priority: int
    held: Held | None


def _told(request: Request, served: Served) -> _Told:
    headers = request.headers
    held = None
    # First of all: whatever is wrong with the rest, what was handed over is not held any longer.
    if (handle := headers.get("x-tl-kv-handle")) is not None:
        if served.handles is None:
            raise unknown_handle()
        held = served.handles.claim(handle)
    said = headers.get("x-tl-priority", "0")
    if not re.fullmatch(r"[+-]?[0-9]{1,3}", said) or int(said) not in PRIORITIES:
        raise bad("X-TL-Priority is no integer of -100 to 100", "X-TL-Priority")
    return _Told(headers.get("x-request-id", ""), int(said), held)


class _EventStream(Response):
    """A server-sent event stream out of an iterator of whole events."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], headers: dict[str, str]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", **headers})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


class _Answering:
    """An ASGI response that computes an answer for as long as its client listens. `headers` are those of success."""

    def __init__(
        self, answer: Answer, headers: dict[str, str], *, stream: bool, include_usage: bool
    ) -> None:
        self._answer = answer
        self._headers = headers
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
                events = self._answer.stream(include_usage=self._include_usage)
                response = _EventStream(events, self._headers)
            else:
                response = json_response(await self._answer.whole(), headers=self._headers)
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


def engine_app(served: Served) -> Starlette:
    """The ASGI application that serves one model."""

    async def chat(request: Request) -> Any:
        told = _told(request, served)
        body = await read(request, ChatRequest)
        served.require(body.model)
        body.refuse()
        prompt = await asyncio.to_thread(served.chat_tokens, body.messages)
        room = served.room(prompt, "messages")
        top = (body.top_logprobs or 0) if body.logprobs else 0
        shape, wanted = ChatShape(served.model), bool(body.logprobs)
        return await _answering(told, body, prompt, body.limit(room, room), top, shape, wanted)

    async def completions(request: Request) -> Any:
        told = _told(request, served)
        body = await read(request, CompletionRequest)
        served.require(body.model)
        body.refuse()
        prompt = await asyncio.to_thread(served.text_tokens, body.prompt)
        limit = body.limit(served.room(prompt, "prompt"), DEFAULT_COMPLETION_TOKENS)
        wanted = body.logprobs is not None
        top, shape = body.logprobs or 0, TextShape(served.model)
        return await _answering(told, body, prompt, limit, top, shape, wanted)

    async def _answering(
        told: _Told,
        body: Generate,
        prompt: list[int],
        limit: int,
        top_logprobs: int,
        shape: ChatShape | TextShape,
        logprobs: bool,
    ) -> _Answering:
        state, headers = None, {}
        if told.held is not None and served.handles is not None:
            state = await asyncio.to_thread(served.handles.state, told.held, prompt)
            headers["X-TL-KV-Tokens"] = str(told.held.n_tokens)
        request = sched.Request(
            prompt,
            body.sampling(top_logprobs),
            limit,
            body.stops(),
            id=told.request_id,
            priority=told.priority,
            resume=state,
        )
        usage = bool(body.stream_options and body.stream_options.include_usage)
        answer = Answer(served, request, shape, logprobs=logprobs)
        return _Answering(answer, headers, stream=bool(body.stream), include_usage=usage)

    async def tokenize(request: Request) -> Response:
        body = await read(request, TokenizeRequest)
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
        return json_response({"ids": ids})

    def card() -> dict[str, object]:
        return {
            "id": served.name,
            "object": "model",
            "created": served.created,
            "owned_by": "pointsman",
            "max_model_len": served.scheduler.context,
        }

    async def models(request: Request) -> Response:
        return json_response({"object": "list", "data": [card()]})

    async def model(request: Request) -> Response:
        served.require(request.path_params["model"])
        return json_response(card())

    async def health(request: Request) -> Response:
        load = served.load
        held = {}
        if served.handles is not None:
            pool = served.handles.pool
            held = {"kv_handles": len(pool.handles), "kv_held_blocks": pool.held_blocks}
        status = "draining" if load.draining else "ok"
        return json_response(
            {"status": status, **load._asdict(), "kv_block_tokens": sched.BLOCK, **held},
            503 if load.draining else 200,
        )

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
