"""What goes wrong with TLS: engines that nobody can trust, peers that speak something else, files that change."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from pointsman.app import Gateway
from pointsman.config import Config, ConfigError, GatewayConfig, StaticWorker, load
from pointsman.domain.registry import WorkerReport
from pointsman.net.clock import monotonic
from pointsman.testing.certificates import Authority
from pointsman.testing.client import Client, post
from pointsman.testing.gateways import counted, running, secured
from pointsman.testing.origin import (
    Conversation,
    Origin,
    answers,
    event,
    hangs,
    sse_chunk,
    sse_head,
)

pytestmark = pytest.mark.anyio

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
STREAM = CHAT | {"stream": True}
MODELS = b"GET /v1/models HTTP/1.1\r\nhost: gateway\r\n\r\n"
A = answers({"from": "a"})
B = answers({"from": "b"})


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


# Engines.


@asynccontextmanager
async def speaks_plaintext() -> AsyncIterator[str]:
    """Listen, and answer whatever comes as an HTTP server does that does not understand it."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as listener:
        yield f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"


@asynccontextmanager
async def speaks_tls_1_1(authority: Authority) -> AsyncIterator[str]:
    context = authority.server(authority.issue("old"))
    context.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning):
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    async with Origin(A, tls=context) as origin:
        yield origin.address


@asynccontextmanager
async def shows(issuer: Authority, *names: str) -> AsyncIterator[str]:
    """Show a certificate of this CA for these names."""
    async with Origin(A, tls=issuer.server(issuer.issue("bad", *names))) as origin:
        yield origin.address


@pytest.mark.parametrize("fault", ["another CA", "another name", "plaintext", "old version"])
async def test_an_engine_that_cannot_be_trusted_is_refused_and_the_next_one_asked(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    bads: dict[str, Callable[[], AbstractAsyncContextManager[str]]] = {
        "another CA": lambda: shows(Authority(tmp_path, "other")),
        "another name": lambda: shows(authority, "elsewhere.example"),
        "plaintext": speaks_plaintext,
        "old version": lambda: speaks_tls_1_1(authority),
    }
    async with (
        bads[fault]() as address,
        Origin(B, tls=authority.server(authority.issue("good"))) as good,
        running(
            {"a": f"https://{address}", "b": f"https://{good.address}"}, upstream_ca=authority.ca
        ) as gateway,
        Client(gateway.address) as client,
    ):
        for _ in range(3):
            assert (await client.ask(post(CHAT))).body == b'{"from":"b"}'
        assert counted(gateway, 'tl_gateway_attempts_total{outcome="refused"}') == 3
        assert counted(gateway, 'tl_gateway_failovers_total{why="refused"}') == 3
        assert counted(gateway, 'tl_gateway_connections{side="upstream"}') == 1
    untrusted = [each.getMessage() for each in caplog.records if "not trusted" in each.getMessage()]
    # It is said once, and not for each request.
    assert len(untrusted) == (1 if fault.startswith("another") else 0)
    for each in untrusted:
        assert each.startswith("no connection to a: its certificate is not trusted: ")


async def test_the_client_learns_that_the_only_engine_is_not_trusted(authority: Authority) -> None:
    pair = authority.issue("engine", "elsewhere.example")
    async with (
        Origin(A, tls=authority.server(pair)) as origin,
        running({"a": f"https://{origin.address}"}, upstream_ca=authority.ca) as gateway,
        Client(gateway.address) as client,
    ):
        response = await client.ask(post(CHAT))
        assert response.status == 503
        assert "its certificate is not trusted" in str(response.error["message"])


async def test_an_engine_is_verified_and_named_by_its_host_name(authority: Authority) -> None:
    named: list[str | None] = []
    context = authority.server(authority.issue("engine", "localhost"))
    context.sni_callback = lambda connection, name, of: named.append(name)
    async with (
        Origin(A, tls=context) as origin,
        running(upstream_ca=authority.ca) as gateway,
        Client(gateway.address) as client,
    ):
        port = origin.address.rpartition(":")[2]
        report = WorkerReport("a", f"https://localhost:{port}", "m")
        gateway.registry.beat(report, monotonic())
        assert (await client.ask(post(CHAT))).body == b'{"from":"a"}'
        assert named == ["localhost"]
        assert origin.requests[0].header("host") == f"localhost:{port}"


async def test_an_engine_that_announces_a_plain_url_is_spoken_to_in_plaintext() -> None:
    async with (
        Origin(A) as origin,
        running() as gateway,
        Client(gateway.address) as client,
    ):
        gateway.registry.beat(WorkerReport("a", f"http://{origin.address}", "m"), monotonic())
        assert (await client.ask(post(CHAT))).body == b'{"from":"a"}'
        assert origin.requests[0].header("host") == origin.address


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize("shown", ["none", "another CA's", "good"])
async def test_an_engine_may_ask_who_the_gateway_is(
    authority: Authority, tmp_path: Path, shown: str, version: ssl.TLSVersion
) -> None:
    issuer = authority if shown == "good" else Authority(tmp_path, "other")
    cert, key = ("", "") if shown == "none" else issuer.issue("gateway")
    context = authority.server(authority.issue("engine"), asks=True)
    context.maximum_version = version
    async with (
        Origin(A, tls=context) as first,
        Origin(B) as second,
        running(
            {"a": f"https://{first.address}", "b": second.address},
            upstream_ca=authority.ca,
            upstream_cert=cert,
            upstream_key=key,
        ) as gateway,
        Client(gateway.address) as client,
    ):
        want = b'{"from":"a"}' if shown == "good" else b'{"from":"b"}'
        assert (await client.ask(post(CHAT))).body == want
        assert len(first.requests) == (1 if shown == "good" else 0)


async def test_an_engine_that_never_shakes_hands_is_given_up_in_time(authority: Authority) -> None:
    taken = asyncio.Event()
    ended = asyncio.Event()

    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        taken.set()
        await reader.read()
        writer.close()
        ended.set()

    listener = await asyncio.start_server(mute, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    async with (
        Origin(B) as second,
        running(
            {"a": f"https://127.0.0.1:{port}", "b": second.address},
            upstream_ca=authority.ca,
            connect_timeout_s=0.1,
        ) as gateway,
        Client(gateway.address) as client,
    ):
        assert (await client.ask(post(CHAT))).body == b'{"from":"b"}'
        await taken.wait()
        await ended.wait()
        assert counted(gateway, 'tl_gateway_attempts_total{outcome="timed out"}') == 1
        assert counted(gateway, 'tl_gateway_connections{side="upstream"}') == 1
    listener.close()


async def test_a_stream_that_is_reset_under_tls_ends_with_an_error_event(
    authority: Authority,
) -> None:
    async def breaks(talk: Conversation) -> None:
        await talk.send(sse_head() + sse_chunk(event("a")))
        talk.reset()

    async with (
        secured(authority, breaks) as (_, gateway),
        Client(gateway.address, tls=authority.client()) as client,
    ):
        response = await client.ask(post(STREAM))
        assert response.body.startswith(event("a"))
        assert b'"error"' in response.body
        assert counted(gateway, 'tl_gateway_attempts_total{outcome="broken"}') == 1


# Clients.


@pytest.mark.parametrize("way", [Client.leave, Client.hang_up], ids=["reset", "in order"])
@pytest.mark.parametrize("body", [CHAT, STREAM], ids=["plain", "stream"])
async def test_a_client_that_leaves_ends_what_its_engine_does(
    authority: Authority, body: object, way: Callable[[Client], None]
) -> None:
    started = sse_head() + sse_chunk(event("a")) if body is STREAM else b""
    async with secured(authority, hangs(started)) as (origin, gateway):
        async with Client(gateway.address, tls=authority.client()) as client:
            await client.send(post(body))
            await origin.received(1)
            if started:
                await client.head()
            way(client)
            await origin.left(1)
        assert [worker.in_flight for worker in gateway.registry.snapshot()] == [0]
        assert counted(gateway, 'tl_gateway_connections{side="upstream"}') == 0
        assert counted(gateway, "tl_gateway_faults_total") == 0


@pytest.mark.parametrize("said", [MODELS, b"", b"\x16\x03\x01\x00\x05hello"])
async def test_who_does_not_speak_tls_is_shut_out_and_harms_nobody(
    authority: Authority, said: bytes
) -> None:
    """Plaintext at once, silence after the limit for a head, and what only begins like a handshake."""
    async with secured(authority, A, header_timeout_s=0.2) as (_, gateway):
        async with Client(gateway.address) as stranger:
            await stranger.send(said)
            assert b"HTTP" not in await stranger.rest()
        async with Client(gateway.address, tls=authority.client()) as client:
            assert (await client.ask(post(CHAT))).body == b'{"from":"a"}'
        assert counted(gateway, "tl_gateway_faults_total") == 0


async def test_a_refused_request_is_answered_before_the_connection_ends(
    authority: Authority,
) -> None:
    async with secured(authority, A) as (_, gateway):
        async with Client(gateway.address, tls=authority.client()) as client:
            response = await client.ask(b"nonsense\r\n\r\n")
            assert (response.status, response.complete) == (400, True)
        async with Client(gateway.address, tls=authority.client()) as client:
            response = await client.ask(post(CHAT).replace(b"HTTP/1.1", b"HTTP/1.0", 1))
            assert (response.status, response.body) == (200, b'{"from":"a"}')
            assert await client.rest() == b""


@pytest.mark.parametrize("shown", ["none", "another CA's", "good"])
async def test_a_client_must_show_a_certificate_where_there_is_a_client_ca(
    authority: Authority, tmp_path: Path, shown: str
) -> None:
    pair = {
        "none": None,
        "another CA's": Authority(tmp_path, "other").issue("stranger"),
        "good": authority.issue("client"),
    }[shown]
    async with secured(authority, A, tls_client_ca=authority.ca) as (origin, gateway):
        try:
            async with Client(gateway.address, tls=authority.client(pair)) as client:
                answer = (await client.ask(post(CHAT))).body
        except (OSError, asyncio.IncompleteReadError):
            answer = b"shut out"
        assert answer == (b'{"from":"a"}' if shown == "good" else b"shut out")
        assert len(origin.requests) == (1 if shown == "good" else 0)


# Rotation.


def spoil(path: str) -> None:
    Path(path).write_text("half a rotation")


def replace(path: str, by: str) -> None:
    Path(path).write_bytes(Path(by).read_bytes())


@asynccontextmanager
async def reloadable(config: GatewayConfig) -> AsyncIterator[Gateway]:
    gateway = Gateway(Config(gateway=config), load=lambda: Config(gateway=config))
    await gateway.start()
    try:
        yield gateway
    finally:
        await gateway.stop()


async def test_certificates_of_all_sides_rotate_without_a_restart(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A stream that runs is not touched, a bad pair changes nothing, new connections see the new files."""
    api, engine, ours = authority.issue("api"), authority.issue("engine"), authority.issue("ours")
    go_on = asyncio.Event()

    async def waits(talk: Conversation) -> None:
        await talk.send(sse_head() + sse_chunk(event("a")))
        await go_on.wait()
        await talk.send(sse_chunk(event("b")) + b"0\r\n\r\n")

    def tls() -> ssl.SSLContext:
        return authority.server(engine, asks=True)

    async with Origin(waits, A, tls=tls()) as origin:
        config = GatewayConfig(
            listen="127.0.0.1:0",
            health_listen="127.0.0.1:0",
            registry_listen="127.0.0.1:0",
            access_log="off",
            workers=(StaticWorker(id="a", url=f"https://{origin.address}", model="m"),),
            tls_cert=api[0],
            tls_key=api[1],
            upstream_ca=authority.ca,
            upstream_cert=ours[0],
            upstream_key=ours[1],
        )
        async with reloadable(config) as gateway:

            async def serial() -> object:
                async with Client(gateway.address, tls=authority.client()) as fresh:
                    shown = fresh.ssl_object.getpeercert()
                    assert shown is not None
                    return shown["serialNumber"]

            before = await serial()
            async with Client(gateway.address, tls=authority.client()) as client:
                await client.send(post(STREAM))
                await client.head()

                spoil(api[1])
                refused = await gateway.reload("SIGHUP")
                assert (refused.ok, "tls_key" in refused.message) == (False, True)
                caplog.clear()
                assert await serial() == before

                authority.issue("api")
                assert (await gateway.reload("SIGHUP")).ok
                assert await serial() != before

                # Engines are now of another CA, and the gateway's certificate must be of it as well.
                old = authority.ca
                authority = Authority(tmp_path, "next")
                replace(old, authority.ca)
                engine = authority.issue("engine")
                authority.issue("ours")
                assert (await gateway.reload("SIGHUP")).ok
                async with Origin(B, tls=tls()) as moved:
                    report = WorkerReport("b", f"https://{moved.address}", "m")
                    gateway.registry.beat(report, monotonic())
                    authority_of_api = ssl.create_default_context()
                    authority_of_api.check_hostname = False
                    authority_of_api.verify_mode = ssl.CERT_NONE
                    async with Client(gateway.address, tls=authority_of_api) as other:
                        assert (await other.ask(post(CHAT))).body == b'{"from":"b"}'

                go_on.set()
                assert (await client.read_until(b"0\r\n\r\n")).count(b"data: ") == 2


def test_a_configuration_whose_key_is_another_ones_is_refused(authority: Authority) -> None:
    cert, _ = authority.issue("api")
    _, key = authority.issue("another")
    with pytest.raises(ConfigError) as refused:
        load(None, [f"gateway.tls_cert={cert}", f"gateway.tls_key={key}"], {})
    assert str(refused.value) == f'gateway.tls_key (from --set) = "{key}": not the key of tls_cert'
