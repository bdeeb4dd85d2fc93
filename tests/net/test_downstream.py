"""What clients may send, over real sockets: framing, pipelines, limits, and what is refused."""

import asyncio
import random
from typing import Any

import msgspec
import pytest

from pointsman.testing.client import Client, post
from pointsman.testing.gateways import fronted, running
from pointsman.testing.origin import Conversation, Origin, answers, hangs, json_answer

pytestmark = pytest.mark.anyio

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: gateway\r\n"
BODY = msgspec.json.encode(CHAT)
MODELS = b"GET /v1/models HTTP/1.1\r\nhost: gateway\r\n\r\n"


async def echo(talk: Conversation) -> None:
    """Answer with the body that came."""
    await talk.send(json_answer(talk.request.body))


def numbered(number: int) -> bytes:
    return post(CHAT | {"n": number})


def number_in(body: bytes) -> int:
    number: int = msgspec.json.decode(body)["n"]
    return number


# Connections and messages.


async def test_a_connection_serves_many_requests() -> None:
    async with fronted(echo) as (origin, _, client):
        for number in range(5):
            response = await client.ask(numbered(number))
            assert (response.status, number_in(response.body)) == (200, number)
            assert response.header("connection") == "keep-alive"
    assert origin.connections == 1


async def test_connection_close_is_obeyed() -> None:
    async with fronted(echo) as (_, _, client):
        response = await client.ask(post(CHAT, headers={"connection": "close"}))
        assert response.status == 200
        assert response.header("connection") == "close"
        assert await client.rest() == b""


@pytest.mark.parametrize("count", [2, 16, 17, 100])
async def test_a_pipeline_is_answered_in_order(count: int) -> None:
    async with fronted(echo) as (origin, _, client):
        await client.send(b"".join(map(numbered, range(count))))
        got = [number_in((await client.response()).body) for _ in range(count)]
    assert got == list(range(count))
    assert len(origin.requests) == count


async def test_a_pipeline_of_own_answers_and_engine_answers_stays_in_order() -> None:
    async with fronted(echo) as (_, _, client):
        await client.send((numbered(1) + MODELS + post(b"{") + MODELS + numbered(2)) * 30)
        for _ in range(30):
            statuses = [(await client.response()).status for _ in range(5)]
            assert statuses == [200, 200, 400, 200, 200]


async def test_a_pipeline_stops_being_answered_while_its_client_does_not_read() -> None:
    large = b'"%b"' % (b"x" * 500_000)
    async with (
        fronted(answers(large)) as (origin, gateway, client),
        Client(gateway.address) as other,
    ):
        client.stop_reading()
        await client.send(numbered(1) * 200)
        # The kernel takes a few megabytes; after that the gateway must leave the rest of the pipeline alone.
        seen, still = -1, 0
        while still < 50:
            still = still + 1 if len(origin.requests) == seen else 0
            seen = len(origin.requests)
            assert (await other.ask(MODELS)).status == 200
        assert seen < 100


async def test_large_bodies_of_a_pipeline_do_not_pile_up() -> None:
    free = asyncio.Event()

    async def waits(talk: Conversation) -> None:
        await free.wait()
        await talk.send(json_answer({}))

    large = post(CHAT | {"image": "A" * (4 << 20)})
    async with fronted(waits) as (origin, gateway, client), Client(gateway.address) as other:
        await client.send(numbered(1))
        await origin.received(1)
        sending = asyncio.get_running_loop().create_task(client.send(large * 12))
        for _ in range(300):
            assert (await other.ask(MODELS)).status == 200
        assert not sending.done()  # so that most of them are still the client's
        free.set()
        for _ in range(13):
            assert (await client.response()).status == 200
        await sending
    assert len(origin.requests) == 13


async def test_a_request_may_come_byte_by_byte() -> None:
    async with fronted(echo) as (_, _, client):
        for byte in numbered(7):
            await client.send(bytes((byte,)))
        assert number_in((await client.response()).body) == 7


async def test_a_chunked_request_body_reaches_the_engine_with_its_length() -> None:
    pieces = [BODY[at : at + 7] for at in range(0, len(BODY), 7)]
    chunks = b"".join(b"%x;ext=1\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    request = HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"
    async with fronted(echo) as (origin, _, client):
        assert (await client.ask(request)).body == BODY
        assert (await client.ask(request)).body == BODY
    assert origin.requests[0].header("content-length") == str(len(BODY))
    assert origin.requests[0].header("transfer-encoding") is None


async def test_trailers_of_a_request_do_not_become_headers() -> None:
    chunked = b"%x\r\n%b\r\n0\r\nx-late: 1\r\nx-request-id: late\r\n\r\n" % (len(BODY), BODY)
    request = HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunked
    async with fronted(echo) as (origin, _, client):
        assert (await client.ask(request)).status == 200
    assert origin.requests[0].header("x-late") is None
    assert origin.requests[0].header("x-request-id") != "late"


async def test_expect_100_continue_is_answered_before_the_body() -> None:
    head = HEAD + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(BODY)
    async with fronted(echo) as (origin, _, client):
        await client.send(head)
        assert await client.read_until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert (await client.ask(BODY)).body == BODY
        # A client that does not wait is served as well.
        assert (await client.ask(head + BODY)).body == BODY
    assert origin.requests[0].header("expect") is None


async def test_a_pipelined_expect_is_answered_after_the_answer_before_it() -> None:
    head = HEAD + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(BODY)
    async with fronted(echo) as (_, _, client):
        await client.send(numbered(1) + head)
        assert number_in((await client.response()).body) == 1
        assert await client.read_until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert (await client.ask(BODY)).body == BODY


async def test_a_body_that_is_refused_is_not_invited() -> None:
    async with fronted(echo, max_body_bytes=10) as (origin, _, client):
        await client.send(HEAD + b"expect: 100-continue\r\ncontent-length: 11\r\n\r\n")
        assert (await client.rest()).startswith(b"HTTP/1.1 413 ")
    assert origin.requests == []


async def test_query_strings_reach_the_engine() -> None:
    async with fronted(echo) as (origin, _, client):
        await client.ask(post(CHAT, "/v1/chat/completions?a=1&b=%2F?c"))
        await client.ask(post(CHAT, "http://gateway:80/v1/completions?x"))
    assert [request.line for request in origin.requests] == [
        "POST /v1/chat/completions?a=1&b=%2F?c HTTP/1.1",
        "POST /v1/completions?x HTTP/1.1",
    ]


async def test_http10_is_answered_and_closed_unless_it_asks_otherwise() -> None:
    old = post(CHAT).replace(b"HTTP/1.1", b"HTTP/1.0")
    kept = post(CHAT, headers={"connection": "keep-alive"}).replace(b"HTTP/1.1", b"HTTP/1.0")
    async with fronted(echo) as (_, _, client):
        response = await client.ask(kept)
        assert (response.status, response.header("connection")) == (200, "keep-alive")
        response = await client.ask(old)
        assert (response.status, response.header("connection")) == (200, "close")
        assert await client.rest() == b""


async def test_a_half_closed_connection_counts_as_closed() -> None:
    async with fronted(hangs()) as (origin, gateway, client):
        await client.send(post(CHAT))
        await origin.received(1)
        client.half_close()
        assert await client.rest() == b""
        await origin.left(1)
        assert gateway.registry.snapshot()[0].in_flight == 0


# Invitations to other protocols.


@pytest.mark.parametrize("framing", ["content-length", "chunked"])
async def test_an_invitation_to_upgrade_is_ignored(framing: str) -> None:
    inner = msgspec.json.encode(CHAT | {"x": "\r\n\r\nGET /v1/models HTTP/1.1\r\n\r\n"})
    if framing == "chunked":
        framed = b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(inner), inner)
    else:
        framed = b"content-length: %d\r\n\r\n%b" % (len(inner), inner)
    request = HEAD + b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: x\r\n"
    async with fronted(echo) as (origin, _, client):
        await client.send((request + framed) * 3 + numbered(4))
        assert [(await client.response()).body for _ in range(3)] == [inner] * 3
        assert number_in((await client.response()).body) == 4
    assert len(origin.requests) == 4
    assert origin.requests[0].header("upgrade") is None
    assert origin.requests[0].header("http2-settings") is None


async def test_a_body_behind_an_invitation_is_never_read_as_a_request() -> None:
    smuggled = b"GET /v1/models HTTP/1.1\r\nhost: gateway\r\n\r\n"
    request = HEAD + b"connection: upgrade\r\nupgrade: h2c\r\ncontent-length: %d\r\n\r\n%b"
    async with fronted(echo) as (_, _, client):
        await client.send(request % (len(smuggled), smuggled) + numbered(1))
        assert (await client.response()).status == 400
        assert number_in((await client.response()).body) == 1


async def test_thousands_of_pipelined_invitations_are_answered() -> None:
    invitation = b"GET /v1/models HTTP/1.1\r\nconnection: upgrade\r\nupgrade: a\r\n\r\n"
    async with running() as gateway, Client(gateway.address) as client:
        sending = asyncio.get_running_loop().create_task(client.send(invitation * 3000))
        for _ in range(3000):
            assert (await client.response()).status == 200
        await sending


async def test_connect_is_refused() -> None:
    async with running() as gateway, Client(gateway.address) as client:
        await client.send(b"CONNECT example.org:443 HTTP/1.1\r\nhost: example.org\r\n\r\nx")
        assert (await client.response()).status == 405
        assert await client.rest() == b""


# What is not HTTP/1.1.


@pytest.mark.parametrize(
    "request_bytes",
    [
        HEAD + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\ncontent-length: 2\r\n\r\n0\r\n\r\n",
        HEAD + b"content-length: 2\r\ncontent-length: 2\r\n\r\n{}",
        HEAD + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}",
        HEAD + b"content-length: 2, 2\r\n\r\n{}",
        HEAD + b"content-length: +2\r\n\r\n{}",
        HEAD + b"content-length: 0x2\r\n\r\n{}",
        HEAD + b"content-length: -2\r\n\r\n{}",
        HEAD + b"content-length: 99999999999999999999999\r\n\r\n{}",
        HEAD + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
        HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        HEAD + b"transfer-encoding : chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\n2\n{}\r\n0\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\n-2\r\n{}\r\n0\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\n{}\r\n0\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\nfffffffffffffffff\r\n{}\r\n0\r\n\r\n",
        HEAD.replace(b"1.1", b"1.0") + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"x-bare: lf\n\r\n",
        HEAD.replace(b"\r\n", b"\n") + b"content-length: 0\n\n",
        HEAD + b"x-folded: a\r\n b\r\n\r\n",
        HEAD + b" x-leading: a\r\n\r\n",
        HEAD + b"x bad: 1\r\n\r\n",
        HEAD + b"x-bad(: 1\r\n\r\n",
        HEAD + b": 1\r\n\r\n",
        HEAD + b"no colon\r\n\r\n",
        HEAD + b"x-nul: a\0b\r\n\r\n",
        HEAD + b"x-cr: a\rb\r\n\r\n",
        b"POST /v1/a b HTTP/1.1\r\n\r\n",
        b"POST /v1/\0 HTTP/1.1\r\n\r\n",
        b"FETCH /v1/models HTTP/1.1\r\n\r\n",
        b"GET /v1/models HTTP/3.0\r\n\r\n",
        b"GET /v1/models HTTP/2.0\r\n\r\n",
        b"GET /v1/models HTTP/0.9\r\n\r\n",
        b"GET /v1/models\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"\xff\xfe\xfd\r\n\r\n",
    ],
)
async def test_what_smuggling_is_made_of_is_refused(request_bytes: bytes) -> None:
    async with fronted(echo) as (origin, _, client):
        # What follows on the same connection must not be read as a request.
        await client.send(request_bytes + MODELS)
        response = await client.response()
        assert response.status == 400, response.body
        assert response.error["type"] == "invalid_request_error"
        assert response.header("connection") == "close"
        assert await client.rest() == b""
    assert origin.requests == []


async def test_requests_before_a_malformed_one_are_answered_first() -> None:
    async with fronted(echo) as (origin, _, client):
        await client.send(numbered(1) + numbered(2) + b"nonsense\r\n\r\n" + numbered(3))
        assert number_in((await client.response()).body) == 1
        assert number_in((await client.response()).body) == 2
        assert (await client.response()).status == 400
        assert await client.rest() == b""
    assert len(origin.requests) == 2


# Limits.


@pytest.mark.parametrize("pieces", [1, 50])
async def test_an_oversized_head_is_431(pieces: int) -> None:
    lines = [b"x-%d: %b\r\n" % (number, b"y" * 1000) for number in range(100)]
    async with running(max_header_bytes=65536) as gateway, Client(gateway.address) as client:
        data = HEAD + b"".join(lines) + b"content-length: 0\r\n\r\n"
        size = -(-len(data) // pieces)
        for at in range(0, len(data), size):
            await client.send(data[at : at + size])
        response = await client.response()
        assert (response.status, response.error["code"]) == (431, "headers_too_large")
        assert await client.rest() == b""


@pytest.mark.parametrize(
    "endless",
    [
        b"GET /" + b"a" * 9000,
        HEAD + b"x" * 9000,
        HEAD + b"x: " + b"y" * 9000,
        HEAD + b"x: y\r\n" * 1500,
        HEAD + b"transfer-encoding: chunked\r\n\r\n2;" + b"e" * 9000,
        HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n" + b"x: y\r\n" * 1500,
        HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nx: " + b"y" * 9000,
    ],
)
async def test_endless_heads_chunk_lines_and_trailers_are_431(endless: bytes) -> None:
    async with (
        fronted(max_header_bytes=4096) as (_, gateway, client),
        Client(gateway.address) as other,
    ):
        for at in range(0, len(endless), 1000):
            await client.send(endless[at : at + 1000])
            # Once another client has its answer, the gateway has read this piece.
            assert (await other.ask(MODELS)).status == 200
        assert (await client.response()).status == 431


async def test_a_large_head_within_the_limit_passes() -> None:
    async with fronted(echo, max_header_bytes=4096) as (_, _, client):
        large = post(CHAT | {"pad": "x" * 200_000}, headers={"x": "y" * 3800})
        assert (await client.ask(large)).status == 200


async def test_an_oversized_body_is_413_before_it_is_sent() -> None:
    async with running(max_body_bytes=1000) as gateway, Client(gateway.address) as client:
        response = await client.ask(HEAD + b"content-length: 1001\r\n\r\n")
        assert (response.status, response.error["code"]) == (413, "request_too_large")


async def test_an_oversized_chunked_body_is_413() -> None:
    async with fronted(echo, max_body_bytes=1000) as (origin, _, client):
        await client.send(HEAD + b"transfer-encoding: chunked\r\n\r\n")
        for _ in range(11):
            await client.send(b"64\r\n%b\r\n" % (b" " * 100))
        response = await client.response()
        assert (response.status, response.error["code"]) == (413, "request_too_large")
    assert origin.requests == []


async def test_an_answer_survives_a_body_that_is_still_being_sent() -> None:
    async with running(max_body_bytes=1000) as gateway, Client(gateway.address) as client:
        await client.send(HEAD + b"content-length: 5000000\r\n\r\n" + b" " * 5_000_000)
        assert (await client.response()).status == 413


@pytest.mark.parametrize("chunked", [False, True])
async def test_h12_a_body_of_12_mib_passes_by_default_and_whole(chunked: bool) -> None:
    body = msgspec.json.encode(CHAT | {"image": "A" * (12 << 20)})
    if chunked:
        pieces = [body[at : at + 100_000] for at in range(0, len(body), 100_000)]
        framed = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
        request = HEAD + b"transfer-encoding: chunked\r\n\r\n" + framed
    else:
        request = post(body)
    async with fronted(answers({})) as (origin, _, client):
        assert (await client.ask(request)).status == 200
    assert origin.requests[0].body == body


@pytest.mark.parametrize(
    "begun", [b"", HEAD, HEAD + b"content-length: 10\r\n\r\n{", b"\r\n\r\n"], ids=repr
)
async def test_a_client_that_is_too_slow_is_limited(begun: bytes) -> None:
    limits: Any = {"header_timeout_s": 0.2, "body_timeout_s": 0.2, "keepalive_timeout_s": 0.2}
    async with running(**limits) as gateway, Client(gateway.address) as client:
        await client.send(begun)
        if begun.startswith(b"POST"):
            response = await client.response()
            assert (response.status, response.error["code"]) == (408, "request_timeout")
        assert await client.rest() == b""


async def test_a_byte_now_and_then_does_not_extend_the_limit() -> None:
    async with (
        fronted(header_timeout_s=0.2) as (_, gateway, client),
        Client(gateway.address) as other,
    ):
        await client.send(HEAD + b"x-endless: ")
        response = asyncio.get_running_loop().create_task(client.response())
        while not response.done():
            await client.send(b"x")
            assert (await other.ask(MODELS)).status == 200
        assert response.result().status == 408


async def test_an_idle_connection_is_closed() -> None:
    async with running(keepalive_timeout_s=0.2) as gateway, Client(gateway.address) as client:
        assert (await client.ask(MODELS)).status == 200
        assert await client.rest() == b""


async def test_a_slow_reader_gets_its_answer_past_the_idle_limit() -> None:
    large = b'"%b"' % (b"x" * 20_000_000)
    options: Any = {"keepalive_timeout_s": 0.1, "hold_bytes": 1 << 26}
    async with (
        fronted(answers(large), **options) as (origin, gateway, client),
        Client(gateway.address) as other,
    ):
        await client.send(post(CHAT))
        client.stop_reading()
        await origin.received(1)
        # These two run into the limit, one after the other, while the first does not read.
        assert (await other.ask(MODELS)).status == 200
        assert await other.rest() == b""
        async with Client(gateway.address) as third:
            assert (await third.ask(MODELS)).status == 200
            assert await third.rest() == b""
        client.go_on_reading()
        response = await client.response()
        assert (response.complete, len(response.body)) == (True, len(large))


async def test_connections_over_the_maximum_are_refused_and_come_back() -> None:
    async with running(connections_max=1) as gateway, Client(gateway.address) as first:
        assert (await first.ask(MODELS)).status == 200
        async with Client(gateway.address) as second:
            response = await second.response()
            assert (response.status, response.error["code"]) == (503, "no_capacity")
            assert await second.rest() == b""
        assert (await first.ask(MODELS)).status == 200


# Methods and paths.


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH"])
async def test_a_wrong_method_is_405_with_allow(method: str) -> None:
    request = f"{method} /v1/chat/completions HTTP/1.1\r\nhost: gateway\r\n\r\n".encode()
    async with running() as gateway, Client(gateway.address) as client:
        await client.send(request)
        status, headers = await client.head()
        assert (status, dict(headers)["allow"]) == (405, "POST")
        if method != "HEAD":
            body = await client.read(int(dict(headers)["content-length"]))
            assert set(msgspec.json.decode(body)["error"]) == {"message", "type", "param", "code"}
        # An answer to HEAD that carried a body would be read as the beginning of this one.
        assert (await client.ask(MODELS)).status == 200


async def test_posting_to_the_list_of_models_is_405() -> None:
    async with running() as gateway, Client(gateway.address) as client:
        for path in ("/v1/models", "/v1/models/m"):
            response = await client.ask(post({}, path))
            assert (response.status, response.header("allow")) == (405, "GET")
            assert response.error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/v1",
        "/v1/chat/completions/",
        "/v1/chat/../models",
        "/v1/tokenize",
        "/v1/modelsx",
        "/%76%31/models",
        "//v1/models",
        "/metrics",
        "*",
    ],
)
async def test_unknown_paths_are_404(path: str) -> None:
    async with fronted(echo) as (origin, _, client):
        response = await client.ask(post(CHAT, path))
        assert (response.status, response.error["code"]) == (404, "not_found")
        assert (await client.ask(MODELS)).status == 200
    assert origin.requests == []


async def test_configured_paths_are_the_only_ones() -> None:
    async with fronted(echo, paths=("/v1/own",)) as (_, _, client):
        assert (await client.ask(post(CHAT, "/v1/own"))).status == 200
        assert (await client.ask(post(CHAT))).status == 404


# Noise.


def noise(seed: int) -> bytes:
    """Return a request with bytes changed, lost, doubled or put in, or nothing but random bytes."""
    dice = random.Random(seed)
    if seed % 4 == 0:
        return dice.randbytes(dice.randrange(1, 2000))
    chunked = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
    data = bytearray(
        dice.choice((post(CHAT), MODELS, HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunked))
    )
    for _ in range(dice.randrange(1, 6)):
        at = dice.randrange(len(data))
        match dice.randrange(4):
            case 0:
                data[at] = dice.randrange(256)
            case 1:
                del data[at : at + dice.randrange(1, 20)]
            case 2:
                data[at:at] = data[at : at + dice.randrange(1, 20)]
            case _:
                data[at:at] = dice.choice((b"\r\n", b"\n", b"\0", b"\r\n\r\n", b":", b" ", b"\xff"))
    return bytes(data)


async def test_noise_never_kills_the_gateway_and_never_gives_a_500() -> None:
    async def send(address: tuple[str, int], seed: int) -> None:
        async with Client(address) as client:
            await client.send(noise(seed))
            said = await client.rest()
            assert b"HTTP/1.1 5" not in said, (seed, said)

    limits: Any = {"header_timeout_s": 0.2, "body_timeout_s": 0.2, "keepalive_timeout_s": 0.2}
    async with Origin(echo) as origin, running({"a": origin.address}, **limits) as gateway:
        for group in range(6):
            await asyncio.gather(
                *(send(gateway.address, seed) for seed in range(group * 100, group * 100 + 100))
            )
        async with Client(gateway.address) as client:
            assert (await client.ask(numbered(1))).status == 200
        text = gateway.metrics.render().decode()
    assert "tl_gateway_faults_total{" not in text
