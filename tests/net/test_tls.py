"""TLS on both sides of the data plane: what is negotiated, that bytes arrive, and that a cut is not an end."""

import asyncio
import ssl
import warnings
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from pointsman.app import Gateway
from pointsman.certificates import Pem, TlsError, TlsFiles
from pointsman.domain.worker import Worker
from pointsman.flow.effects import Lost
from pointsman.net.clock import Deadlines
from pointsman.net.limits import UpstreamLimits
from pointsman.net.observer import Silent
from pointsman.net.pool import Pool
from pointsman.net.tls import client_context, server_context, system_context
from pointsman.net.upstream import Upstream
from pointsman.testing.certificates import Authority
from pointsman.testing.client import Client, post
from pointsman.testing.gateways import counted, running, secured
from pointsman.testing.origin import (
    Conversation,
    Origin,
    Script,
    answers,
    event,
    json_answer,
    sse_chunk,
    sse_head,
    streams,
)

pytestmark = pytest.mark.anyio

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
STREAM = CHAT | {"stream": True}
MODELS = b"GET /v1/models HTTP/1.1\r\nhost: gateway\r\n\r\n"
UNTIL_CLOSE = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\nconnection: close\r\n\r\n"
DONE = b"data: [DONE]\n\n"

Fronted = tuple[Origin, Gateway, Client]
Ending = Callable[[Conversation], None]
ENDINGS = pytest.mark.parametrize(
    "ends", [Conversation.close, Conversation.cut], ids=["close_notify", "fin"]
)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def files(pair: tuple[str, str] = ("", ""), ca: str = "") -> TlsFiles:
    return TlsFiles(Pem("tls_cert", pair[0]), Pem("tls_key", pair[1]), Pem("tls_client_ca", ca))


@asynccontextmanager
async def fronted(authority: Authority, *scripts: Script) -> AsyncIterator[Fronted]:
    """Run an origin, a gateway with that one worker and a client, with TLS between all of them."""
    async with (
        secured(authority, *scripts) as (origin, gateway),
        Client(gateway.address, tls=authority.client()) as client,
    ):
        yield origin, gateway, client


def address_of(origin: Origin) -> tuple[str, int]:
    host, _, port = origin.address.rpartition(":")
    return host, int(port)


def shake(
    server: ssl.SSLContext, client: ssl.SSLContext, session: ssl.SSLSession | None = None
) -> tuple[ssl.SSLObject, ssl.SSLObject]:
    """Shake hands in memory, and return both ends, the server's first. Raises ssl.SSLError."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    near = server.wrap_bio(up, down, server_side=True)
    far = client.wrap_bio(down, up, server_hostname="localhost", session=session)
    for _ in range(4):
        for end in (far, near):
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
    near.write(b"x")
    assert far.read(1) == b"x"  # With it come the tickets of TLS 1.3.
    far.write(b"y")
    assert near.read(1) == b"y"  # A client's certificate is judged by now.
    return near, far


# Contexts, without a socket.


def test_http_1_is_negotiated_over_a_modern_version(authority: Authority) -> None:
    near, far = shake(
        server_context(files(authority.issue("api"))), client_context(files(ca=authority.ca))
    )
    assert near.selected_alpn_protocol() == far.selected_alpn_protocol() == "http/1.1"
    assert near.version() == "TLSv1.3"


@pytest.mark.parametrize("side", ["server", "client"])
def test_tls_1_1_is_not_spoken(authority: Authority, side: str) -> None:
    pair = authority.issue("api")
    contexts = {"server": authority.server(pair), "client": authority.client()}
    live = (
        server_context(files(pair)) if side == "server" else client_context(files(ca=authority.ca))
    )
    other = contexts["client" if side == "server" else "server"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        other.minimum_version = other.maximum_version = ssl.TLSVersion.TLSv1_1
    other.set_ciphers("ALL:@SECLEVEL=0")
    ours, theirs = (live, other) if side == "server" else (other, live)
    with pytest.raises(ssl.SSLError):
        shake(ours, theirs)


@pytest.mark.parametrize("shown", ["none", "another CA's", "good"])
def test_a_ca_lets_in_only_who_shows_a_certificate_of_it(
    authority: Authority, tmp_path: Path, shown: str
) -> None:
    server = server_context(files(authority.issue("api"), authority.ca))
    client = authority.client()
    if shown == "good":
        client.load_cert_chain(*authority.issue("client"))
        near, _ = shake(server, client)
        assert near.getpeercert()
        return
    if shown != "none":
        client.load_cert_chain(*Authority(tmp_path, "other").issue("stranger"))
    with pytest.raises(ssl.SSLError):
        shake(server, client)


def test_an_engine_is_not_trusted_by_another_ca_nor_under_another_name(
    authority: Authority, tmp_path: Path
) -> None:
    engine = authority.server(authority.issue("engine"))
    elsewhere = authority.server(authority.issue("elsewhere", "elsewhere.example"))
    stranger = Authority(tmp_path, "other")
    for server, client in (
        (engine, client_context(files(ca=stranger.ca))),
        (elsewhere, client_context(files(ca=authority.ca))),
        (engine, client_context(files())),
        (engine, system_context()),
    ):
        with pytest.raises(ssl.SSLCertVerificationError):
            shake(server, client)


def test_a_rotation_reaches_new_connections_and_a_bad_one_changes_nothing(
    authority: Authority,
) -> None:
    pair = authority.issue("api")
    server, client = server_context(files(pair)), authority.client()

    def serial() -> object:
        shown = shake(server, client)[1].getpeercert()
        assert shown is not None
        return shown["serialNumber"]

    first = serial()
    authority.issue("api")
    assert serial() == first
    server.prepare()()
    second = serial()
    assert second != first
    Path(pair[1]).write_text("half a rot")
    with pytest.raises(TlsError, match="tls_key"):
        server.prepare()()
    assert serial() == second
    authority.issue("api")
    commit = server.prepare()
    assert serial() == second
    commit()
    assert serial() not in (first, second)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_a_ca_that_is_gone_lets_nobody_in_not_even_by_an_old_session(
    authority: Authority, tmp_path: Path, version: ssl.TLSVersion
) -> None:
    old = Authority(tmp_path, "clients")
    server = server_context(files(authority.issue("api"), old.ca))
    client = authority.client(old.issue("client"))
    client.minimum_version = client.maximum_version = version
    session = shake(server, client)[1].session
    assert session is not None
    assert shake(server, client, session)[1].session_reused
    Authority(tmp_path, "clients")
    server.prepare()()
    with pytest.raises(ssl.SSLError):
        shake(server, client, session)


# Over sockets.


async def test_a_request_and_a_stream_pass_over_tls_on_both_sides(authority: Authority) -> None:
    scripts = answers({"id": 1}), streams("a", "b")
    async with fronted(authority, *scripts) as (origin, gateway, client):
        assert client.ssl_object.selected_alpn_protocol() is None  # It had no wish.
        response = await client.ask(post(CHAT))
        assert (response.status, response.body) == (200, b'{"id":1}')
        response = await client.ask(post(STREAM))
        assert (response.complete, response.body) == (True, event("a") + event("b") + DONE)
        assert origin.requests[0].header("host") == origin.address
        assert origin.connections == 1
        assert counted(gateway, "tl_gateway_faults_total") == 0


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("engine.example:1", "engine.example"),
        ("https://engine.example.:1", "engine.example"),
        ("https://[fe80::1%eth0]:1", "fe80::1"),
    ],
)
async def test_a_name_in_a_certificate_has_no_final_dot_and_no_zone(
    address: str, name: str
) -> None:
    deadlines = Deadlines(asyncio.get_running_loop())
    pool = Pool(UpstreamLimits(), deadlines, Silent())
    assert pool.lane(Worker("a", model="m", http_address=address)).name == name
    deadlines.close()


async def test_many_chunks_for_a_client_that_stops_and_goes_on(authority: Authority) -> None:
    """64 MB: more than all buffers between engine and client, so both sides pause and resume."""
    sent: list[int] = []

    async def floods(talk: Conversation) -> None:
        await talk.send(sse_head())
        for number in range(1000):
            await talk.send(sse_chunk(b"data: %08d%b\n\n" % (number, b"x" * 65520)))
            sent.append(number)
        await talk.send(b"0\r\n\r\n")

    async with (
        fronted(authority, floods) as (_, gateway, client),
        Client(gateway.address, tls=authority.client()) as other,
    ):
        await client.send(post(STREAM))
        await client.head()
        client.stop_reading()
        before = -1
        while len(sent) != before:
            before = len(sent)
            for _ in range(50):
                await other.ask(MODELS)
        assert len(sent) * 65536 < 24 << 20
        client.go_on_reading()
        for number in range(1000):
            assert await client.read_until(b"\r\n") == b"10000\r\n"
            assert (await client.read(65538))[:14] == b"data: %08d" % number
        assert await client.read(5) == b"0\r\n\r\n"
        assert (await client.ask(MODELS)).status == 200


class Reader(asyncio.Protocol):
    """Has a connection in the place of a relay."""

    def __init__(self) -> None:
        self.body = b""
        self.ended = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        self.body += data

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set()


class Asker:
    """Waits for a connection."""

    def __init__(self) -> None:
        self.upstream: asyncio.Future[Upstream] = asyncio.get_running_loop().create_future()

    def connected(self, upstream: Upstream) -> None:
        self.upstream.set_result(upstream)

    def unreachable(self, lost: Lost) -> None:
        raise AssertionError(lost)


async def test_nothing_is_lost_when_an_engine_closes_while_its_client_is_behind(
    authority: Authority,
) -> None:
    """What a paused transport had read already would be gone with its connection."""
    request = b"POST / HTTP/1.1\r\n\r\n"
    body = bytes(100_000)

    async def closes(talk: Conversation) -> None:
        await talk.send(body)
        talk.close()
        talk.cut()  # Many engines do not wait for the answer to their close_notify.

    context = authority.server(authority.issue("engine"))
    async with Origin(closes, tls=context) as origin, Origin() as idle:
        deadlines = Deadlines(asyncio.get_running_loop())
        tls = client_context(files(ca=authority.ca))
        pool = Pool(UpstreamLimits(), deadlines, Silent(), tls)
        lane = pool.lane(Worker("a", model="m", http_address=f"https://{origin.address}", tls=True))
        asker, reader = Asker(), Reader()
        lane.connect(asker)
        upstream = await asker.upstream
        upstream.hand_over(reader)
        upstream.transport.pause_reading()
        upstream.transport.write(request)
        await origin.left(1)
        for _ in range(20):  # Whatever has arrived is read, if anything reads.
            async with Client(address_of(idle)) as other:
                await other.ask(request)
        assert not reader.ended.is_set()
        upstream.transport.resume_reading()
        await reader.ended.wait()
        assert len(reader.body) == len(body)
        upstream.relay_lost()
        pool.close()
        deadlines.close()


@ENDINGS
async def test_a_stream_that_only_the_connection_ends_must_end_by_a_close_notify(
    authority: Authority, ends: Ending
) -> None:
    """A FIN can be forged; over plaintext there is nothing better to go by."""

    async def script(talk: Conversation) -> None:
        await talk.send(UNTIL_CLOSE % b"text/event-stream" + event("a") + DONE)
        ends(talk)
        await talk.peer_closed()

    async with fronted(authority, script) as (_, gateway, client):
        response = await client.ask(post(STREAM))
        whole = ends is Conversation.close
        assert response.body.startswith(event("a") + DONE)
        assert (b"upstream" in response.body) is not whole
        outcome = "answered" if whole else "broken"
        assert counted(gateway, f'tl_gateway_attempts_total{{outcome="{outcome}"}}') == 1


@ENDINGS
async def test_a_held_body_that_only_a_fin_ends_is_lost_and_asked_for_elsewhere(
    authority: Authority, ends: Ending
) -> None:
    async def script(talk: Conversation) -> None:
        await talk.send(UNTIL_CLOSE % b"application/json" + b'{"from":"a"}')
        ends(talk)
        await talk.peer_closed()

    async with (
        Origin(script, tls=authority.server(authority.issue("engine"))) as first,
        Origin(answers({"from": "b"})) as second,
        running(
            {"a": f"https://{first.address}", "b": second.address}, upstream_ca=authority.ca
        ) as gateway,
        Client(gateway.address) as client,
    ):
        response = await client.ask(post(CHAT))
        want = b"a" if ends is Conversation.close else b"b"
        assert (response.status, response.body) == (200, b'{"from":"%b"}' % want)


async def test_a_cut_does_not_matter_where_the_framing_says_what_is_whole(
    authority: Authority,
) -> None:
    async def script(talk: Conversation) -> None:
        await talk.send(json_answer({"from": "a"}))
        talk.cut()
        await talk.peer_closed()

    async with fronted(authority, script) as (_, gateway, client):
        assert (await client.ask(post(CHAT))).body == b'{"from":"a"}'
        assert (await client.ask(post(CHAT))).body == b'{"from":"a"}'
        assert counted(gateway, 'tl_gateway_attempts_total{outcome="answered"}') == 2
