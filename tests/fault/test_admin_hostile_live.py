"""The admin API of a whole gateway against whoever means it ill: hostile requests, clients that leave, slow ones."""

import asyncio
import fcntl
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pointsman.app import Gateway
from pointsman.control.admin import openapi
from pointsman.testing.client import Client, get, post
from pointsman.testing.gateways import Keys, bearer, configured, running
from pointsman.testing.origin import Origin

pytestmark = pytest.mark.anyio

REQUESTS = 10_000
CONNECTIONS = 4
PIPELINE = 10

OPERATIONS = [
    (method.upper(), path) for path, methods in openapi()["paths"].items() for method in methods
]
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE")
NAMES = (
    *(
        "m",
        "a",
        "nobody",
        "org%2Fm",
        "",
        "..",
        "%2e%2e%2f%2e%2e",
        "%00",
        "%0d%0aX:%20y",
        "%",
        "%zz",
    ),
    *("%ed%a0%80", "m:drain", ":drain:undrain", "{model}", "%25s%25n", "%27%22;--", "m" * 3000),
    *("gr\xf6\xdfe", "..\\..\\", "m?model=m", "m%3fx", "~root", "$(x)", "%c0%af"),
)
BODIES = (
    b'{"deadline_s": 0}',
    b'{"deadline_s": -1}',
    b'{"deadline_s": 1e400}',
    b'{"routes": []}',
    b'{"routes": [{"model": "chat", "aliases": ["m"]}]}',
    b'{"routes": [{"model": "c", "backends": [{"model": "m", "weight": NaN}]}]}',
    b'{"routes": [{"model": "\\ud800"}]}',
    b'{"tenant": "acme", "name": "laptop"}',
    b'{"tenant": "acme", "name": "l", "scopes": ["root"], "expires_at": 1e300}',
    b'{"model": "m", "messages": [{"role": "user", "content": "Once"}]}',
    b'{"model": "m", "prompt": [1, 2, {}]}',
    b'{"url": "http://127.0.0.1:1", "model": "m", "capacity": 99999999999999999999}',
    b'{"url": "http://127.0.0.1:1", "model": "other"}',
    b'{"url": "gopher://[::", "model": "m"}',
    b"",
    b"null",
    b"[]",
    b"\xff\xfe{\0",
    b"[" * 5000,
    b'"' + b"x" * 30_000 + b'"',
)
GOOD = {
    "/admin/v1/models/{model}:drain": BODIES[0],
    "/admin/v1/routes": BODIES[4],
    "/admin/v1/keys": BODIES[7],
    "/admin/v1/route:explain": BODIES[9],
    "/admin/v1/workers/{id}": BODIES[12],
}
HEADERS = (
    'if-match: "routes-1"',
    'if-match: "routes-2"',
    "if-match: *",
    "content-type: text/plain; charset=utf-16",
    "content-encoding: gzip",
    "accept: \xff",
    "cookie: " + "a=b;" * 500,
    "host: evil.example",
    "origin: null",
    "range: bytes=0-",
    "expect: 100-continue",
    "upgrade: h2c",
    "connection: authorization, content-length",
    "x-request-id: \xe9" + "x" * 200,
    "traceparent: 00-0-0-00",
)
SPOILT = (
    b"GET /admin/v1/keys HTTP/9.9\r\nhost: x\r\n\r\n",
    b"GET  /admin/v1/keys HTTP/1.1\r\nhost: x\r\n\r\n",
    b"BREW /admin/v1/keys HTTP/1.1\r\nhost: x\r\n\r\n",
    b"POST /admin/v1/keys HTTP/1.1\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST /admin/v1/keys HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
    b"POST /admin/v1/keys HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab",
    b"POST /admin/v1/keys HTTP/1.1\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    b"POST /admin/v1/keys HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n\r\n",
    b"POST /admin/v1/keys HTTP/1.1\r\ncontent-length: 99999999999\r\n\r\n",
    b"GET /admin/v1/keys HTTP/1.1\r\nx: " + b"y" * 70_000 + b"\r\n\r\n",
    b"GET /admin/v1/keys HTTP/1.1\nhost: x\n\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"CONNECT /admin/v1/keys HTTP/1.1\r\nhost: x\r\n\r\n",
)


class Draw:
    """Draws hostile requests, the same ones in the same order for one seed."""

    def __init__(self, seed: int, keys: tuple[str, ...]) -> None:
        self._random = random.Random(seed)
        self._keys = keys

    def pipeline(self) -> tuple[list[tuple[str, str]], bytes, int]:
        """Return method and target of each request, the bytes to send, and how many answers they deserve.

        The last request may be spoilt, or cut short.
        """
        requests = [self._request() for _ in range(PIPELINE)]
        answered = PIPELINE
        end = self._random.random()
        if end < 0.2:
            requests[-1] = ("", "", self._random.choice(SPOILT))
        data = b"".join(each[2] for each in requests)
        if end > 0.8:
            data = data[: -self._random.randrange(1, len(requests[-1][2]))]
            answered -= 1
        return [each[:2] for each in requests], data, answered

    def _request(self) -> tuple[str, str, bytes]:
        draw = self._random
        method, path = draw.choice(OPERATIONS)
        body = draw.choice(BODIES) if draw.random() < 0.7 else GOOD.get(path, b"")
        if draw.random() < 0.1:
            method = draw.choice(METHODS)
        for part in ("{id}", "{model}"):
            path = path.replace(part, draw.choice(NAMES))
        if draw.random() < 0.1:
            at = draw.randrange(1, len(path) + 1)
            path = path[:at] + draw.choice(NAMES) + path[at:]
        if draw.random() < 0.2:
            path += (
                f"?{draw.choice(('limit', 'model', 'exclude', 'step', 'x'))}={draw.choice(NAMES)}"
            )
        lines = draw.choices(HEADERS, k=draw.randrange(3))
        if draw.random() < 0.1:
            lines.append("transfer-encoding: chunked")
            body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if body else b"0\r\n\r\n"
        else:
            lines.append(f"content-length: {len(body)}")
        # Most come with the operator's key, or nothing behind the door would be tried.
        if draw.random() < 0.9:
            lines.append(f"authorization: Bearer {self._keys[0]}")
        elif draw.random() < 0.5:
            lines.append(f"authorization: Bearer {self._keys[1]}")
        head = "".join(f"{line}\r\n" for line in (f"{method} {path} HTTP/1.1", *lines))
        return method, path, head.encode("latin-1") + b"\r\n" + body


async def attack(gateway: Gateway, draw: Draw, pipelines: int, statuses: Counter[int]) -> None:
    """Send pipelines, each on a connection of its own, and judge every answer."""
    for _ in range(pipelines):
        asked, data, answered = draw.pipeline()
        async with Client(gateway.address) as client:
            with suppress(ConnectionError):  # It may have been refused before all of it was sent.
                await client.send(data)
            for method, target in asked[:answered]:
                if method == "HEAD":
                    status, headers = await client.head()
                    closes = ("connection", "close") in headers
                else:
                    response = await client.response()
                    status, closes = response.status, response.header("connection") == "close"
                    assert response.complete, (method, target)
                    if status >= 400:
                        assert response.error["message"], (method, target)
                    elif status != 204:
                        msgspec.json.decode(response.body)
                assert status < 500, (method, target)
                statuses[status] += 1
                if closes:
                    assert status in (400, 405, 413, 431), (status, method, target)
                    # What could not be read as a request is refused as if it were no HEAD.
                    assert method == "HEAD" or await client.rest() == b""
                    break


@pytest.mark.slow
async def test_ten_thousand_hostile_requests_leave_a_gateway_that_serves(tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    operator, outsider = keys.make("admin"), keys.make("infer", "embed", "debug")
    statuses: Counter[int] = Counter()
    async with Origin() as origin:
        source = tmp_path / "pointsman.toml"
        source.write_text(
            f"""[gateway]
            keys_file = "{keys.options["keys_file"]}"
            state_dir = "{tmp_path / "state"}"
            access_log = "off"
            routes = [{{ model = "chat", backends = [{{ model = "m" }}] }}]
            workers = [{{ id = "a", url = "http://{origin.address}", model = "m" }}]
            """
        )
        async with configured(source) as gateway:
            pipelines = REQUESTS // PIPELINE // CONNECTIONS
            async with asyncio.TaskGroup() as group:
                for seed in range(CONNECTIONS):
                    draw = Draw(seed, (operator, outsider))
                    group.create_task(attack(gateway, draw, pipelines, statuses))
            # They came past the door: good answers and every kind of refusal are among them.
            assert {200, 201, 202, 204, 400, 401, 403, 404, 405, 412, 428} <= statuses.keys()
            assert statuses.total() > REQUESTS * 0.8, statuses
            async with Client(gateway.address) as client:
                worker = {"url": f"http://{origin.address}", "model": "fine"}
                path = "/admin/v1/workers/fine"
                put = await client.ask(post(worker, path, bearer(operator), "PUT"))
                assert put.status == 201
                chat = await client.ask(post({"model": "fine"}, headers=bearer(outsider)))
                assert chat.status == 200
                stats = await client.ask(get("/admin/v1/stats", bearer(operator)))
                assert msgspec.json.decode(stats.body)["in_flight"] == 0


# Clients that leave, and slow ones.


async def underway(client: Client, request: bytes, operator: dict[str, str]) -> None:
    """Send a request and return when the application works on it."""
    # The answer to the first of a pipeline tells that the other one has come, and the gateway starts
    # that before it reads what is sent after the answer.
    assert (await client.ask(get("/admin/v1/stats", operator) + request)).status == 200


@contextmanager
def locked(keys: Keys) -> Iterator[None]:
    """Hold the lock of the key file, as another process that rewrites it does."""
    with open(keys.options["keys_file"] + ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.mark.parametrize("way", [Client.leave, Client.hang_up])
async def test_a_change_is_made_though_its_client_left(
    tmp_path: Path, way: Callable[[Client], None]
) -> None:
    keys = Keys(tmp_path)
    operator = bearer(keys.make("admin"))
    async with running(**keys.options) as gateway, Client(gateway.address) as other:

        async def ask(path: str) -> Any:
            return msgspec.json.decode((await other.ask(get(path, operator))).body)

        with locked(keys):
            async with Client(gateway.address) as client:
                wanted = {"tenant": "acme", "name": "made"}
                await underway(client, post(wanted, "/admin/v1/keys", operator), operator)
                assert len((await ask("/admin/v1/keys"))["data"]) == 1
                way(client)
                await ask("/admin/v1/stats")
        while len((await ask("/admin/v1/keys"))["data"]) == 1:
            pass
        async with Client(gateway.address) as client:
            table = {"routes": [{"model": "chat"}]}
            tag = {"if-match": '"routes-1"'}
            put = post(table, "/admin/v1/routes", operator | tag, "PUT")
            await underway(client, put, operator)
            await ask("/admin/v1/stats")
            way(client)
        while (await ask("/admin/v1/routes"))["route_epoch"] == 1:
            pass
        assert (await ask("/admin/v1/routes"))["routes"] == [{"model": "chat"}]


async def test_a_gateway_that_stops_says_so_to_who_waits_for_the_admin_api(tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    operator = bearer(keys.make("admin"))
    with locked(keys):
        async with AsyncExitStack() as stack:
            async with running(**keys.options) as gateway, Client(gateway.address) as other:
                client = await stack.enter_async_context(Client(gateway.address))
                wanted = {"tenant": "acme", "name": "made"}
                await underway(client, post(wanted, "/admin/v1/keys", operator), operator)
                assert (await other.ask(get("/admin/v1/stats", operator))).status == 200
            response = await client.response()
            assert (response.status, response.error["code"]) == (503, "no_capacity")
            assert response.header("connection") == "close"


@pytest.mark.slow
@pytest.mark.parametrize("cut", [10, -1, -10])
async def test_a_slow_client_of_the_admin_api_is_given_up(tmp_path: Path, cut: int) -> None:
    keys = Keys(tmp_path)
    operator = bearer(keys.make("admin"))
    limits: dict[str, Any] = {"header_timeout_s": 0.2, "body_timeout_s": 0.2}
    async with running(**keys.options, **limits) as gateway, Client(gateway.address) as client:
        request = post({"tenant": "acme", "name": "made"}, "/admin/v1/keys", operator)
        response = await client.ask(request[:cut])
        assert (response.status, response.header("connection")) == (408, "close")
        assert await client.rest() == b""
        assert len(keys.file.list()) == 1


async def test_a_body_over_the_limits_of_the_admin_api_or_of_all_is_413(tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    operator = bearer(keys.make("admin"))
    options = {**keys.options, "max_body_bytes": 5 << 20}
    async with running(**options) as gateway:
        for size, connection in (((4 << 20) + 1, "keep-alive"), ((5 << 20) + 1, "close")):
            async with Client(gateway.address) as client:
                await client.send(post(b" " * size, "/admin/v1/keys", operator))
                response = await client.response()
                assert (response.status, response.header("connection")) == (413, connection)


@pytest.mark.slow
async def test_who_does_not_read_the_answers_gets_them_later_and_nobody_waits(
    tmp_path: Path,
) -> None:
    keys = Keys(tmp_path)
    operator = bearer(keys.make("admin"))
    async with running(**keys.options) as gateway, Client(gateway.address) as slow:
        document = get("/admin/v1/openapi.json", operator)
        slow.stop_reading()
        await slow.send(document * 300)
        async with Client(gateway.address) as client:
            for _ in range(20):
                assert (await client.ask(get("/admin/v1/stats", operator))).status == 200
        slow.go_on_reading()
        for _ in range(300):
            response = await slow.response()
            assert (response.status, response.complete) == (200, True)


async def test_what_operators_changed_outlives_a_restart(tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    operator = bearer(keys.make("admin"))
    options = {**keys.options, "state_dir": str(tmp_path / "state")}
    table = [{"model": "chat", "backends": [{"model": "m", "weight": 1.0}]}]
    async with Origin() as origin:
        workers = {"a": origin.address}
        for epoch in (2, 3):
            async with running(workers, **options) as gateway, Client(gateway.address) as client:
                tag = {"if-match": f'"routes-{epoch - 1}"'}
                request = post({"routes": table}, "/admin/v1/routes", operator | tag, "PUT")
                assert (await client.ask(request)).header("etag") == f'"routes-{epoch}"'
                path = "/admin/v1/models/chat:drain"
                drained = await client.ask(post({"deadline_s": 0}, path, operator))
                assert drained.status == 202
        async with running(workers, **options) as gateway, Client(gateway.address) as client:
            routes = await client.ask(get("/admin/v1/routes", operator))
            assert msgspec.json.decode(routes.body) == {"route_epoch": 3, "routes": table}
            model = await client.ask(get("/admin/v1/models/m", operator))
            state = msgspec.json.decode(model.body)
            assert (state["drained"], state["routable"]) == (True, 0)
