"""Where a request goes: the inference paths to a story, the lists of models to the registry, the rest to applications.

Whoever asks is looked at first: a good key, and one that may do this. Everything behind this file can rely on it.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple
from urllib.parse import unquote

import msgspec

from pointsman.domain.blocks import root_of
from pointsman.domain.keys import ANONYMOUS, Principal, Scope
from pointsman.domain.request import InferenceRequest
from pointsman.domain.router import Router
from pointsman.domain.routes import Route
from pointsman.domain.worker import Worker
from pointsman.errors import (
    BadRequest,
    GatewayError,
    InsufficientScope,
    InvalidKey,
    MethodNotAllowed,
    NotFound,
)
from pointsman.flow.attempts import attempts
from pointsman.flow.cascade import Cascades
from pointsman.flow.effects import Flow, Tokenizer
from pointsman.flow.exchange import Exchange
from pointsman.flow.handoff import TAIL_PIECES
from pointsman.flow.handover import Handoffs
from pointsman.flow.plan import JUDGED, plan
from pointsman.flow.tokenized import tokenized
from pointsman.net.asgi import AsgiServer
from pointsman.net.calls import Calls
from pointsman.net.clock import Deadlines
from pointsman.net.downstream import Downstream, Request, Responder
from pointsman.net.driver import Drive
from pointsman.net.holding import Holding
from pointsman.net.limits import DownstreamLimits, UpstreamLimits
from pointsman.net.observer import Observer
from pointsman.net.pool import Pool
from pointsman.net.tokenizing import Tokenizing
from pointsman.wire.apis import Api, api_of, is_messages
from pointsman.wire.body import parse_request, says_model_once
from pointsman.wire.form import boundary_of, parse_form
from pointsman.wire.http1 import identity_of, render_request
from pointsman.wire.prompt import prompt_of
from pointsman.wire.replies import error_reply, model_reply, models_reply

__all__ = ["DataPlane", "Mounted", "TokenBlocks"]

MODELS = b"/v1/models"
SALT = b'"cache_salt"'
EMBEDDINGS = "/v1/embeddings"
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    EMBEDDINGS: "embeddings",
}


class Mounted(NamedTuple):
    """An application under a path of its own; `scope` is what a key needs for it, None lets everybody in."""

    path: bytes
    server: AsgiServer
    scope: Scope | None


class TokenBlocks(NamedTuple):
    """How prompts of a model are compared: by the tokens of a tokenizer, in blocks of so many."""

    tokenizer: Tokenizer
    block_tokens: int


class DataPlane:
    """Serves the clients of the API port.

    `token_blocks` says, by the model as engines call it, whose prompts are compared by their tokens; nobody's at first.
    `admit` turns an `Authorization` header and the monotonic time into whoever asks, or raises InvalidKey. With
    `keep_tails` the end of every answer stays in its `Exchange`, for whoever hears that it is over.
    """

    def __init__(
        self,
        router: Router,
        pool: Pool,
        deadlines: Deadlines,
        observer: Observer,
        *,
        paths: Iterable[str],
        limits: DownstreamLimits,
        upstream_limits: UpstreamLimits,
        max_attempts: int = 3,
        affinity_bytes: int = 64,
        block_bytes: int = 512,
        public_models: bool = False,
        hold_s: float = 0.0,
        hold_max: int = 1024,
        admit: Callable[[bytes | None, float], Principal],
        mounts: Sequence[Mounted] = (),
        handoffs: Handoffs,
        cascades: Cascades,
        keep_tails: bool = False,
    ) -> None:
        self.router = router
        self.pool = pool
        self.calls = Calls(pool, deadlines)
        self._handoffs = handoffs
        self._cascades = cascades
        self.deadlines = deadlines
        self.observer = observer
        self.tokenizing = Tokenizing(deadlines, lambda: observer.fault("tokenizer"))
        self.holding = Holding(deadlines, observer, asyncio.get_running_loop().call_soon)
        self.connections: set[Downstream] = set()
        self.empty = asyncio.Event()
        self.empty.set()
        self.draining = False
        self._random = random.Random()
        self._admit = admit
        self._keep_tails = keep_tails
        self.token_blocks: Mapping[str, TokenBlocks] = {}
        # The longest path first, so that one application may live under another.
        self._mounts = sorted(mounts, key=lambda mount: -len(mount.path))
        self.set_options(
            paths=paths,
            limits=limits,
            upstream_limits=upstream_limits,
            max_attempts=max_attempts,
            affinity_bytes=affinity_bytes,
            block_bytes=block_bytes,
            public_models=public_models,
            hold_s=hold_s,
            hold_max=hold_max,
        )

    def set_options(
        self,
        *,
        paths: Iterable[str],
        limits: DownstreamLimits,
        upstream_limits: UpstreamLimits,
        max_attempts: int,
        affinity_bytes: int,
        block_bytes: int,
        public_models: bool,
        hold_s: float,
        hold_max: int,
    ) -> None:
        """Put options in force for the requests that are still to come."""
        self.limits = limits
        self.upstream_limits = upstream_limits
        self.public_models = public_models
        self._max_attempts = max_attempts
        self._affinity_bytes = affinity_bytes
        self._block_bytes = block_bytes
        self._hold_s = hold_s
        self.holding.room = hold_max
        self._paths = {
            path.encode(): (
                path,
                OPERATIONS.get(path, "other"),
                path == EMBEDDINGS,
                api_of(path),
            )
            for path in paths
        }

    def serve(self, client: Downstream, request: Request) -> Responder | None:
        """Answer one request; the returned `Responder` hears of an early end."""
        started = self.deadlines.now()
        headers = request.headers
        known_id, authorization = identity_of(headers)
        random_hex = self._random_hex()
        request_id = known_id or random_hex[48:]
        known = self._paths.get(request.path)
        try:
            if known is None or request.method != b"POST":
                return self._own(client, request, authorization, request_id, started)
            path, operation, embeds, api = known
            principal = self._admit(authorization, started)
            if not (principal.embed if embeds else principal.infer):
                raise InsufficientScope(f"the key has no scope for {path}")
            if api.form:
                inference = self._either(request, request_id, api)
            else:
                inference = parse_request(
                    request.body, request_id, self._affinity_bytes, api, self._block_bytes
                )
            if principal.models:
                self._check_model(principal, inference, request.body)
        except GatewayError as error:
            self._refuse(client, request, error, request_id, started)
            return None
        route = self.router.table.lookup(inference.model)
        plain = route is None or route.plain
        if self.public_models or not plain:
            # Nothing can be read or renamed in what is compressed.
            headers = [each for each in headers if each[0] != b"accept-encoding"]
        head, trace, parent = render_request(headers, request_id, random_hex, principal.upstream)
        x = Exchange(
            inference,
            path,
            operation,
            started,
            started + self.upstream_limits.total_s,
            principal,
            trace,
            parent,
        )
        if self._keep_tails:
            x.tail = deque(maxlen=TAIL_PIECES)
        if known_id is not None:
            x.engine_id = f"{known_id}-{random_hex[48:60]}"
        if self._hold_s:
            x.hold_until = started + self._hold_s
        if route is None or plain:
            story = attempts(x, self.router, self._max_attempts)
        else:
            story = plan(
                *(x, self.router, self._max_attempts, route, request.body),
                handoffs=self._handoffs,
                cascades=self._cascades,
            )
        if self.token_blocks:
            story = self._in_tokens(x, story, route, request.body)
        drive = Drive(self, client, request, story, head, x, x.deadline)
        drive.start()
        return drive

    def _in_tokens(self, x: Exchange, story: Flow, route: Route | None, body: bytes) -> Flow:
        """Return the story of a request whose prompt is compared by its tokens, where they can be known here."""
        request = x.request
        served, adapter = self.router.served_first(request, route)
        blocks = self.token_blocks.get(served)
        # A salt keeps others' caches away from it, and its own from them.
        if blocks is None or x.path not in JUDGED or SALT in body:
            return story
        prompt = prompt_of(request)
        if prompt is None:
            return story
        tokenizer, block_tokens = blocks
        if isinstance(prompt, tuple):
            request.use_tokens(prompt, block_tokens, root_of(adapter))
            return story
        if isinstance(prompt, str) or tokenizer.chats:
            return tokenized(x, story, tokenizer, prompt, block_tokens, adapter)
        return story

    def running(self) -> Iterator[tuple[Worker, float]]:
        """Yield the worker of each request in flight, and when the request came (monotonic seconds)."""
        for client in self.connections:
            drive = client.responder
            if isinstance(drive, Drive) and drive.x.tries:
                yield drive.x.tries[-1].target.worker, drive.x.started

    def drain(self) -> None:
        """Let every answer from now on be the last of its connection, and nobody wait for a worker."""
        self.draining = True
        self.holding.close()
        for mount in self._mounts:
            mount.server.draining = True

    def public_model(self, x: Exchange) -> bytes:
        """Return the model id that the client asked for, as JSON."""
        return msgspec.json.encode(x.model)

    def stop(self) -> None:
        """End every answer now."""
        for client in tuple(self.connections):
            client.stop()

    def _own(
        self,
        client: Downstream,
        request: Request,
        authorization: bytes | None,
        request_id: str,
        started: float,
    ) -> Responder | None:
        """Answer what needs no engine."""
        mount = self._mount_of(request.path)
        if mount is not None:
            principal = self._enter(mount, authorization, started)
            state = {"principal": principal, "request_id": request_id}
            headers = b"x-request-id: %b\r\n" % request_id.encode()
            return mount.server.call(client, request, state, headers)
        principal = self._admit(authorization, started)
        reply = self._models(request, principal, request_id)
        self.observer.answered("GET", "/v1/models", 200, self.deadlines.now() - started)
        client.write(reply)
        client.finish(self._keep(request))
        return None

    def _either(self, request: Request, request_id: str, api: Api) -> InferenceRequest:
        """Read a form, or JSON, whichever the request says that it is."""
        types = [value for name, value in request.headers if name == b"content-type"]
        boundary = boundary_of(types[0]) if types else None
        if boundary is None:
            return parse_request(
                request.body, request_id, self._affinity_bytes, api, self._block_bytes
            )
        if len(types) > 1:
            raise BadRequest("there is more than one Content-Type")
        return parse_form(request.body, boundary, request_id, api.path)

    def _check_model(self, principal: Principal, asked: InferenceRequest, body: bytes) -> None:
        """Raise what a key that is for some models gets for this one."""
        if not self.router.permits(principal.models, asked.model):
            raise InsufficientScope("the key is not for this model")
        # Of two, an engine may read the one that was not looked at here. A form with two was refused already.
        if asked.model_at is None and not says_model_once(body):
            raise BadRequest("`model` must stand in the request once", param="model")

    def _mount_of(self, path: bytes) -> Mounted | None:
        for mount in self._mounts:
            if path.startswith(mount.path) and path[len(mount.path) :][:1] in (b"", b"/"):
                return mount
        return None

    def _enter(self, mount: Mounted, authorization: bytes | None, now: float) -> Principal:
        """Return who asks an application, if it may."""
        if mount.scope is None:
            try:
                return self._admit(authorization, now)
            except InvalidKey:
                return ANONYMOUS
        principal = self._admit(authorization, now)
        if mount.scope not in principal.scopes:
            raise InsufficientScope(f"the key has no scope for {mount.path.decode()}")
        return principal

    def _models(self, request: Request, principal: Principal, request_id: str) -> bytes:
        known = self._paths.get(request.path)
        if known is not None:
            raise MethodNotAllowed(f"{known[0]} takes POST only")
        listed = request.path == MODELS
        if not listed and not request.path.startswith(MODELS + b"/"):
            raise NotFound(f"no such path: {request.path[:256].decode('ascii', 'replace')}")
        if request.method != b"GET":
            raise MethodNotAllowed("/v1/models takes GET only")
        if not principal.infer:
            raise InsufficientScope("the key has no scope for /v1/models")
        models = self.router.models(self.deadlines.now())
        headers = b"x-request-id: %b\r\n" % request_id.encode()
        close = not self._keep(request)
        messages = _speaks_messages(request)
        if listed:
            return models_reply(models, headers, close=close, messages=messages)
        name = unquote(request.path[len(MODELS) + 1 :].decode("ascii", "replace"))
        route = self.router.table.lookup(name)
        model = name if route is None else route.model
        return model_reply(model, models, headers, close=close, messages=messages)

    def _refuse(
        self,
        client: Downstream,
        request: Request,
        error: GatewayError,
        request_id: str,
        started: float,
    ) -> None:
        headers = b"x-request-id: %b\r\n" % request_id.encode()
        known = self._paths.get(request.path)
        if isinstance(error, MethodNotAllowed):
            headers += b"allow: %b\r\n" % (b"POST" if known else b"GET")
        elif isinstance(error, InvalidKey):
            headers += b"www-authenticate: Bearer\r\n"
        keep = self._keep(request)
        method = request.method.decode("ascii", "replace")
        path = request.path.decode("ascii", "replace")
        took = self.deadlines.now() - started
        self.observer.answered(method, path, error.status, took, error.code or error.type)
        messages = _speaks_messages(request)
        reply = error_reply(error, headers, close=not keep, messages=messages)
        if request.method == b"HEAD":
            # Its answer ends with the head, whatever length that announces.
            reply = reply[: reply.index(b"\r\n\r\n") + 4]
        client.write(reply)
        client.finish(keep)

    def _random_hex(self) -> str:
        """Return 80 hex digits: 48 for a trace, 32 for a request id. They are unique, not secret."""
        return self._random.randbytes(40).hex()

    def _keep(self, request: Request) -> bool:
        return request.keep_alive and not self.draining


def _speaks_messages(request: Request) -> bool:
    """Tell whether the client is one of the Messages API, which says its version everywhere."""
    return is_messages(request.path.decode("ascii", "replace")) or any(
        name == b"anthropic-version" for name, _ in request.headers
    )
