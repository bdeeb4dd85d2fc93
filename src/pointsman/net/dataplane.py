"""Where a request goes: the inference paths to a story, the lists of models to the registry, the rest to 404."""

import asyncio
import random
from collections.abc import Iterable
from urllib.parse import unquote

import msgspec

from pointsman.domain.router import Router
from pointsman.errors import GatewayError, MethodNotAllowed, NotFound
from pointsman.flow.attempts import attempts
from pointsman.flow.exchange import Exchange
from pointsman.net.clock import Deadlines
from pointsman.net.downstream import Downstream, Request, Responder
from pointsman.net.driver import Drive
from pointsman.net.limits import DownstreamLimits, UpstreamLimits
from pointsman.net.observer import Observer
from pointsman.net.pool import Pool
from pointsman.wire.body import parse_request
from pointsman.wire.http1 import render_request, request_id_of
from pointsman.wire.replies import error_reply, model_reply, models_reply

__all__ = ["DataPlane"]

MODELS = b"/v1/models"
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}


class DataPlane:
    """Serves the clients of the API port."""

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
        public_models: bool = False,
    ) -> None:
        self.router = router
        self.pool = pool
        self.deadlines = deadlines
        self.observer = observer
        self.limits = limits
        self.upstream_limits = upstream_limits
        self.public_models = public_models
        self.draining = False
        self.connections: set[Downstream] = set()
        self.empty = asyncio.Event()
        self.empty.set()
        self._random = random.Random()
        self._paths = {path.encode(): (path, OPERATIONS.get(path, "other")) for path in paths}
        self._max_attempts = max_attempts
        self._affinity_bytes = affinity_bytes

    def serve(self, client: Downstream, request: Request) -> Responder | None:
        """Answer one request; the returned `Responder` hears of an early end."""
        known = self._paths.get(request.path)
        if known is None or request.method != b"POST":
            self._own(client, request, known[0] if known else None)
            return None
        path, operation = known
        if self.public_models:
            # Nothing can be renamed in what is compressed.
            request.headers = [each for each in request.headers if each[0] != b"accept-encoding"]
        random_hex = self._random_hex()
        request_id = request_id_of(request.headers) or random_hex[48:]
        try:
            inference = parse_request(request.body, request_id, self._affinity_bytes)
        except GatewayError as error:
            self._refuse(client, request, path, error, request_id)
            return None
        started = self.deadlines.now()
        x = Exchange(inference, path, operation, started, started + self.upstream_limits.total_s)
        drive = Drive(
            self,
            client,
            request,
            attempts(x, self.router, self._max_attempts),
            render_request(request.headers, request_id, random_hex),
            x,
            x.deadline,
        )
        drive.start()
        return drive

    def public_model(self, x: Exchange) -> bytes:
        """Return the model id that the client asked for, as JSON."""
        return msgspec.json.encode(x.model)

    def stop(self) -> None:
        """End every answer now."""
        for client in tuple(self.connections):
            client.stop()

    def _own(self, client: Downstream, request: Request, path: str | None) -> None:
        """Answer what needs no engine."""
        try:
            reply = self._models(request, path)
        except GatewayError as error:
            request_id = request_id_of(request.headers) or self._random_hex()[48:]
            self._refuse(client, request, path or "", error, request_id)
        else:
            self.observer.answered("GET", "/v1/models", 200, 0.0)
            client.write(reply)
            client.finish(self._keep(request))

    def _models(self, request: Request, path: str | None) -> bytes:
        if path is not None:
            raise MethodNotAllowed(f"{path} takes POST only")
        listed = request.path == MODELS
        if not listed and not request.path.startswith(MODELS + b"/"):
            raise NotFound(f"no such path: {request.path[:256].decode('ascii', 'replace')}")
        if request.method != b"GET":
            raise MethodNotAllowed("/v1/models takes GET only")
        models = self.router.models(self.deadlines.now())
        request_id = request_id_of(request.headers) or self._random_hex()[48:]
        headers = b"x-request-id: %b\r\n" % request_id.encode()
        close = not self._keep(request)
        if listed:
            return models_reply(models, headers, close=close)
        model = unquote(request.path[len(MODELS) + 1 :].decode("ascii", "replace"))
        return model_reply(model, models, headers, close=close)

    def _refuse(
        self, client: Downstream, request: Request, path: str, error: GatewayError, request_id: str
    ) -> None:
        headers = b"x-request-id: %b\r\n" % request_id.encode()
        if isinstance(error, MethodNotAllowed):
            headers += b"allow: %b\r\n" % (b"POST" if path else b"GET")
        keep = self._keep(request)
        method = request.method.decode("ascii", "replace")
        self.observer.answered(method, path, error.status, 0.0)
        reply = error_reply(error, headers, close=not keep)
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
