"""The admin API without a socket: calls that are checked, each answer against the OpenAPI document.

`Operator` calls the application as the ASGI bridge does. An answer that the document does not allow fails the test that
asked for it, so that no test has to think of it. `jsonschema-rs` judges; it comes with the extra `dev`.
"""

import re
from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes
from weakref import finalize

import msgspec

from pointsman.control.admin import AdminParts, Stats, admin_app, openapi
from pointsman.control.changes import Changes
from pointsman.control.keyfile import KeyFile
from pointsman.control.reload import Configuration, Reload
from pointsman.control.store import Store
from pointsman.domain.calibration import Calibrations
from pointsman.domain.explain import Decision
from pointsman.domain.keys import Keyring, Principal, Scope
from pointsman.domain.policy.least_outstanding import LeastOutstanding
from pointsman.domain.registry import Registry, WorkerReport
from pointsman.domain.router import Router
from pointsman.domain.routes import RouteTable
from pointsman.domain.worker import Worker
from pointsman.parts import static_worker
from pointsman.testing.client import Response
from pointsman.wire.body import parse_request

__all__ = ["ADMIN", "Operated", "Operator", "call"]

ADMIN = Principal("abcdefghijkl", "ops", frozenset((Scope.ADMIN,)))
"""Whoever operates the gateway with a key."""

ELSEWHERE = {404, 405}
"""Statuses of paths and methods that the document does not have."""


async def call(
    app: Any,
    method: str,
    target: str | bytes,
    body: bytes = b"",
    headers: list[tuple[bytes, bytes]] | None = None,
    state: dict[str, Any] | None = None,
) -> Response:
    """Call an ASGI application with one request, as the bridge does. `target` is a path, escaped, with its query.

    What the application raises is raised here, after it answered.
    """
    raw = target.encode() if isinstance(target, str) else target
    path, _, query = raw.partition(b"?")
    scope: MutableMapping[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": unquote_to_bytes(path).decode("utf-8", "replace"),
        "raw_path": path,
        "query_string": query,
        "root_path": "",
        "headers": headers or [],
        "client": ("127.0.0.1", 40000),
        "server": ("127.0.0.1", 8080),
        "state": {} if state is None else state,
    }
    came = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[MutableMapping[str, Any]] = []

    async def receive() -> MutableMapping[str, Any]:
        return came.pop() if came else {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    await app(scope, receive, send)
    start, *parts = sent
    names = [(name.decode(), value.decode("latin-1")) for name, value in start["headers"]]
    return Response(start["status"], names, b"".join(each["body"] for each in parts), True)


class Operated:
    """The parts of a gateway without its sockets, and the admin application over them.

    The clock stands at `now` (monotonic) and 1,700,000,000 s (Unix) until a test moves it. `live` are the requests in
    flight, `past` the decisions; `reloaded` is what becomes of the next reload. There are keys where `keys_file` is
    given, which is made. `engines_asked` are the engines that were asked to drain, and their deadlines.
    """

    def __init__(self, keys_file: Path | None = None) -> None:
        self.now = 1000.0
        self.registry = Registry()
        self.router = Router(self.registry, LeastOutstanding(), RouteTable())
        self.live: list[tuple[Worker, float]] = []
        self.past: list[Decision] = []
        self.recomputed: dict[Worker, int] = {}
        self.searched: dict[str, Any] = {}
        self.reloaded = Reload(at=1.0, ok=True, trigger="api", message="")
        self.store = Store(None)
        finalize(self, self.store.close)
        self.engines_asked: list[tuple[str, float]] = []
        self.changes = Changes(
            self.registry,
            self.router,
            self.store,
            build=static_worker,
            permit=lambda values: None,
            servable=lambda routes: None,
            now=lambda: self.now,
            drain_engine=self._drain_engine,
        )
        self.keyring = Keyring(b"pepper", wall=self._wall, cache_key=bytes(16))
        self.keys: KeyFile | None = None
        if keys_file is not None:
            keys_file.touch()
            self.keys = KeyFile(keys_file, self.keyring)
            self.keys.load()
        self.parts = AdminParts(
            registry=self.registry,
            router=self.router,
            changes=self.changes,
            keys=self.keys,
            running=lambda: self.live,
            decisions=self._decisions,
            parse=parse_request,
            calibrations=Calibrations(),
            recomputed=lambda worker: self.recomputed.get(worker, 0),
            stats=self._stats,
            configuration=self._configuration,
            reload=self._reload,
            now=lambda: self.now,
            wall=self._wall,
        )
        self.app = admin_app(self.parts)

    def rebuilt(self, **parts: Any) -> Any:
        """Return the application with other parts."""
        return admin_app(replace(self.parts, **parts))

    def beat(self, worker_id: str, model: str = "m", **fields: Any) -> Worker:
        """Take a heartbeat of a worker and return it."""
        report = WorkerReport(worker_id, "127.0.0.1:8001", model, **fields)
        self.registry.beat(report, self.now)
        return next(each for each in self.registry.snapshot() if each.id == worker_id)

    def _wall(self) -> float:
        return 1_699_999_000.0 + self.now

    async def _drain_engine(self, address: str, deadline_s: float) -> int:
        self.engines_asked.append((address, deadline_s))
        return 0

    def _decisions(self, **wanted: Any) -> list[Decision]:
        self.searched = wanted
        return self.past

    def _stats(self) -> Stats:
        return Stats(
            started_at=1.7e9,
            now=self._wall(),
            requests_total=7,
            errors_total=1,
            failovers_total=2,
            first_byte_seconds_sum=0.5,
            first_byte_count=6,
            in_flight=len(self.live),
            workers={"a": 7},
        )

    def _configuration(self) -> Configuration:
        return Configuration(
            source="pointsman.toml",
            loaded_at=1.7e9,
            config={"gateway": {"listen": ":8080"}},
            last_reload=self.reloaded,
        )

    async def _reload(self) -> Reload:
        return self.reloaded


class Operator:
    """Calls an admin application as `principal`, None for nobody, and checks every answer."""

    def __init__(self, app: Any, principal: Principal | None = ADMIN) -> None:
        self.app = app
        self.principal = principal
        self.document = openapi()

    async def ask(
        self, method: str, target: str, body: object = b"", **headers: str | None
    ) -> Response:
        """Send one request and return its answer; a body that is no bytes is sent as JSON.

        Headers are keywords with `_` for `-`; those that are None are left out.
        """
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        lines = [
            (name.replace("_", "-").encode(), value.encode())
            for name, value in headers.items()
            if value is not None
        ]
        state = {"principal": self.principal, "request_id": "req-of-the-test"}
        response = await call(self.app, method, target, data, lines, state)
        self._check(method, target, response)
        return response

    async def get(self, target: str, **headers: str | None) -> Any:
        """Return the JSON of a good answer to GET."""
        response = await self.ask("GET", target, **headers)
        assert response.status == 200, response.body
        return msgspec.json.decode(response.body)

    def _check(self, method: str, target: str, response: Response) -> None:
        declared = self._declared(method, target)
        known = {} if declared is None else declared["responses"]
        if str(response.status) not in known:
            assert response.status in ELSEWHERE or (declared is None and response.status < 500), (
                f"{method} {target} is not declared to answer {response.status}"
            )
            assert response.error
            return
        answer = known[str(response.status)]
        for name in answer.get("headers", {}):
            assert response.header(name.lower()) is not None, f"{name} is missing"
        if "content" not in answer:
            assert response.body == b""
            return
        assert response.header("content-type") == "application/json"
        schema = answer["content"]["application/json"]["schema"]
        self._judge(schema, msgspec.json.decode(response.body))

    def _declared(self, method: str, target: str) -> Mapping[str, Any] | None:
        path = target.partition("?")[0]
        for template, methods in self.document["paths"].items():
            pattern = re.sub(r"\\{\w+\\}", ".+", re.escape(template))
            operation: Mapping[str, Any] | None = methods.get(
                "get" if method == "HEAD" else method.lower()
            )
            if operation is not None and re.fullmatch(pattern, path):
                return operation
        return None

    def _judge(self, schema: dict[str, Any], value: object) -> None:
        from jsonschema_rs import Draft202012Validator

        # The document lets a newer gateway say more; this one says nothing that is not in it.
        components = _closed(self.document["components"])
        Draft202012Validator({**schema, "components": components}).validate(value)


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and "type" in schema:
        closed.setdefault("additionalProperties", False)
    return closed
