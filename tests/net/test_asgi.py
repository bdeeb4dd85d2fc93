"""The health port over real sockets, and how an ASGI application is served there."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pointsman.domain.registry import WorkerReport
from pointsman.net.asgi import AsgiServer
from pointsman.net.clock import Deadlines, monotonic
from pointsman.net.downstream import Downstream, Request, Responder
from pointsman.net.limits import DownstreamLimits
from pointsman.net.observer import Silent
from pointsman.testing.client import Client, post
from pointsman.testing.gateways import fronted, running
from pointsman.testing.origin import dead_address

pytestmark = pytest.mark.anyio

Send = Callable[[dict[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[dict[str, Any]]]


def get(path: str, method: str = "GET") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nhost: gateway\r\n\r\n".encode()


async def test_readiness_follows_the_workers() -> None:
    async with running() as gateway, Client(gateway.health_address) as client:
        assert (await client.ask(get("/healthz"))).body == b"ok\n"
        response = await client.ask(get("/readyz"))
        assert (response.status, response.body[:9]) == (503, b"not ready")
        gateway.registry.beat(WorkerReport("a", dead_address(), "m"), monotonic())
        response = await client.ask(get("/readyz"))
        assert (response.status, response.body) == (200, b"ready\n")
        gateway.draining = True
        response = await client.ask(get("/readyz"))
        assert (response.status, response.body) == (503, b"draining\n")
        assert (await client.ask(get("/healthz"))).status == 200


async def test_metrics_count_what_the_gateway_did() -> None:
    async with fronted() as (_, gateway, client), Client(gateway.health_address) as health:
        await client.ask(post({"model": "m"}))
        response = await health.ask(get("/metrics"))
        assert response.status == 200
        assert (response.header("content-type") or "").startswith("text/plain; version=0.0.4")
        sample = 'tl_gateway_requests_total{code="200",route="/v1/chat/completions"'
        assert sample.encode() in response.body


async def test_head_and_unknown_paths_keep_the_connection_in_order() -> None:
    async with running() as gateway, Client(gateway.health_address) as client:
        await client.send(get("/healthz", "HEAD"))
        status, headers = await client.head()
        assert (status, dict(headers)["content-length"]) == (200, "3")
        assert (await client.ask(get("/none"))).status == 404
        assert (await client.ask(get("/healthz", "POST"))).status == 405
        assert (await client.ask(get("/healthz"))).body == b"ok\n"


async def test_a_pipeline_on_the_health_port_is_answered_in_order() -> None:
    async with running() as gateway, Client(gateway.health_address) as client:
        await client.send((get("/healthz") + get("/none")) * 20)
        got = [(await client.response()).status for _ in range(40)]
        assert got == [200, 404] * 20


# Applications.


@asynccontextmanager
async def serving(
    application: Any,
    server_class: type[AsgiServer] = AsgiServer,
    observer: Silent | None = None,
    path: str = "",
) -> AsyncIterator[Client]:
    loop = asyncio.get_running_loop()
    deadlines = Deadlines(loop)
    server = server_class(application, deadlines, observer or Silent(), DownstreamLimits(), path)
    listener = await loop.create_server(lambda: Downstream(server), "127.0.0.1", 0)
    try:
        async with Client(listener.sockets[0].getsockname()) as client:
            yield client
    finally:
        listener.close()
        deadlines.close()


async def start(send: Send, *headers: tuple[bytes, bytes], status: int = 200) -> None:
    await send({"type": "http.response.start", "status": status, "headers": list(headers)})


async def body(send: Send, data: bytes, *, more: bool = False) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": more})


async def test_an_answer_of_unknown_length_is_chunked() -> None:
    async def application(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        await start(send)
        await body(send, b"a" * 10, more=True)
        await body(send, b"", more=True)
        await body(send, b"b" * 10)

    async with serving(application) as client:
        for _ in range(2):
            response = await client.ask(get("/"))
            assert (response.body, response.complete) == (b"a" * 10 + b"b" * 10, True)
            assert response.header("transfer-encoding") == "chunked"
        old = await client.ask(get("/").replace(b"HTTP/1.1", b"HTTP/1.0"))
        assert (old.body, old.header("connection")) == (b"a" * 10 + b"b" * 10, "close")


async def test_an_application_sees_the_request() -> None:
    seen: dict[str, Any] = {}

    async def application(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        seen.update(scope, message=await receive())
        await start(send, (b"content-length", b"0"), status=202)
        await body(send, b"")

    async with serving(application) as client:
        assert (await client.ask(post({"a": 1}, "/p%20q?x=%20"))).status == 202
    assert (seen["method"], seen["path"], seen["query_string"]) == ("POST", "/p q", b"x=%20")
    assert (seen["raw_path"], seen["http_version"], seen["type"]) == (b"/p%20q", "1.1", "http")
    assert (b"host", b"localhost") in seen["headers"]
    assert seen["message"]["body"] == b'{"a":1}'


async def test_an_application_that_raises_before_its_answer_is_500(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def application(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        raise RuntimeError("secret")

    async with serving(application) as client:
        response = await client.ask(get("/"))
        assert (response.status, response.error["code"]) == (500, "internal_error")
        assert b"secret" not in response.body
        assert await client.rest() == b""
    assert "the application failed on /" in caplog.text
    caplog.clear()


async def test_an_application_that_raises_in_its_answer_cuts_it_short(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def application(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        await start(send)
        await body(send, b"begun", more=True)
        raise RuntimeError

    async with serving(application) as client:
        response = await client.ask(get("/"))
        assert (response.body, response.complete) == (b"begun", False)
    caplog.clear()


async def test_an_application_that_stops_without_an_answer_is_500() -> None:
    async def application(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        await receive()

    async with serving(application) as client:
        assert (await client.ask(get("/"))).status == 500


async def test_an_application_hears_that_its_client_has_left() -> None:
    heard: list[str] = []
    waits, over = asyncio.Event(), asyncio.Event()

    async def application(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        await receive()
        waits.set()
        heard.append((await receive())["type"])
        await start(send)  # and what it still says goes nowhere
        await body(send, b"x")
        over.set()

    async with serving(application) as client:
        await client.send(get("/"))
        await waits.wait()
        client.leave()
        await over.wait()
    assert heard == ["http.disconnect"]


async def test_an_application_waits_for_a_client_that_does_not_read() -> None:
    sent: list[int] = []

    async def application(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        await start(send)
        for number in range(500):
            await body(send, b"x" * 65536, more=True)
            sent.append(number)
        await body(send, b"")

    async with serving(application) as client:
        await client.send(get("/"))
        client.stop_reading()
        before, still = -1, 0
        while still < 100:
            still = still + 1 if len(sent) == before else 0
            before = len(sent)
            turn = asyncio.Event()
            asyncio.get_running_loop().call_soon(turn.set)
            await turn.wait()
        assert len(sent) < 300
        client.go_on_reading()
        response = await client.response()
        assert (response.complete, len(response.body)) == (True, 500 * 65536)


async def test_an_application_that_is_called_by_another_server_is_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Counting(Silent):
        def answered(
            self, method: str, path: str, status: int, seconds: float, error: str = ""
        ) -> None:
            counted.append((method, path, status, seconds >= 0.0))

    async def application(scope: Any, receive: Receive, send: Send) -> None:
        if scope["path"] == "/mine/broken":
            raise RuntimeError("on purpose")
        assert (scope["scheme"], scope["state"]) == ("http", {"request_id": "r"})
        await start(send, (b"content-length", b"0"), status=202)
        await body(send, b"")

    class Server(AsgiServer):
        def serve(self, client: Downstream, request: Request) -> Responder:
            return self.call(client, request, {"request_id": "r"}, b"x-request-id: r\r\n")

    counted: list[tuple[str, str, int, bool]] = []
    async with serving(application, Server, Counting(), "/mine") as client:
        response = await client.ask(get("/mine"))
        assert (response.status, response.header("x-request-id")) == (202, "r")
        response = await client.ask(get("/mine/broken"))
        assert (response.status, response.header("x-request-id")) == (500, "r")
    caplog.clear()
    assert counted == [("GET", "/mine", 202, True), ("GET", "/mine", 500, True)]


@pytest.mark.parametrize("status", [204, 304])
@pytest.mark.parametrize("headers", [(), ((b"content-length", b"5"),)])
async def test_an_answer_that_can_have_no_body_ends_with_its_head(
    status: int, headers: tuple[tuple[bytes, bytes], ...]
) -> None:
    async def application(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        await start(send, *headers, status=status)
        await body(send, b"never", more=True)
        await body(send, b"")

    async with serving(application) as client:
        for _ in range(3):
            await client.send(get("/"))
            got, named = await client.head()
            assert got == status
            assert "transfer-encoding" not in dict(named)


@pytest.mark.parametrize("parts", [(b"123456",), (b"1234",), (b"123", b"456"), (b"123", b"4")])
async def test_a_body_of_another_length_than_announced_is_not_believed(
    caplog: pytest.LogCaptureFixture, parts: tuple[bytes, ...]
) -> None:
    """It would be the beginning of the next answer, or hold it up."""

    async def application(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        await start(send, (b"content-length", b"5"))
        for part in parts[:-1]:
            await body(send, part, more=True)
        await body(send, parts[-1])

    async with serving(application) as client:
        response = await client.ask(get("/") * 2)
        if len(parts) == 1:
            assert (response.status, response.header("connection")) == (500, "close")
        else:
            assert (response.body, response.complete) == (b"123", False)
        assert await client.rest() == b""
    assert "not as long as its Content-Length" in caplog.text
    caplog.clear()
