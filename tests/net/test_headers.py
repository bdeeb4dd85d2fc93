"""Headers on their way through the gateway, over real sockets (H08)."""

import re

import pytest

from pointsman.domain.registry import WorkerReport
from pointsman.net.clock import monotonic
from pointsman.testing.client import Client, post
from pointsman.testing.gateways import fronted, running
from pointsman.testing.origin import Origin, answers

pytestmark = pytest.mark.anyio

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"
NEW_TRACE = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-01")


async def test_h08_credentials_and_hop_by_hop_headers_do_not_reach_the_engine() -> None:
    sent = {
        "Authorization": "Bearer secret",
        "Proxy-Authorization": "Basic secret",
        "Connection": "keep-alive, X-Private",
        "X-Private": "of this hop",
        "Keep-Alive": "timeout=5",
        "TE": "trailers",
        "Proxy-Connection": "keep-alive",
        "X-TL-Priority": "forged",
        "X-TL-KV-Handle": "forged",
        "x-tl-anything": "forged",
        "X-End-To-End": "kept",
        "Accept": "text/event-stream",
    }
    async with fronted() as (origin, _, client):
        await client.ask(post(CHAT, headers=sent))
        address = origin.address
    received = dict(origin.requests[0].headers)
    assert len(received) == len(origin.requests[0].headers)
    assert set(received) == {
        "host",
        "content-type",
        "content-length",
        "accept",
        "x-end-to-end",
        "x-request-id",
        "traceparent",
    }
    assert received["host"] == address
    assert received["x-end-to-end"] == "kept"


async def test_h08_headers_of_the_engine_reach_the_client_once() -> None:
    sent = [
        ("Server", "engine/1.0"),
        ("X-Request-Id", "of the engine"),
        ("X-TL-Route", "forged"),
        ("X-TL-Cache", "forged"),
        ("Connection", "keep-alive, X-Private"),
        ("X-Private", "of this hop"),
        ("Keep-Alive", "timeout=5"),
        ("Proxy-Authenticate", "Basic"),
        ("Set-Cookie", "a=1"),
        ("Set-Cookie", "b=2"),
        ("OpenAI-Processing-Ms", "12"),
    ]
    async with fronted(answers({}, headers=sent)) as (_, _, client):
        response = await client.ask(post(CHAT, headers={"x-request-id": "mine"}))
    assert sorted(response.headers) == [
        ("connection", "keep-alive"),
        ("content-length", "2"),
        ("content-type", "application/json"),
        ("openai-processing-ms", "12"),
        ("server", "engine/1.0"),
        ("set-cookie", "a=1"),
        ("set-cookie", "b=2"),
        ("x-request-id", "mine"),
    ]


@pytest.mark.parametrize("given", ["a", "A" * 128, "req-1!~{}"])
async def test_a_good_request_id_is_the_clients_own(given: str) -> None:
    async with fronted() as (_, _, client):
        response = await client.ask(post(CHAT, headers={"X-Request-Id": given}))
        assert response.header("x-request-id") == given
        # Errors of the gateway's own carry it as well.
        refused = await client.ask(post(b"{", headers={"X-Request-Id": given}))
        assert refused.header("x-request-id") == given
        refused = await client.ask(post(CHAT, "/none", headers={"X-Request-Id": given}))
        assert refused.header("x-request-id") == given


@pytest.mark.parametrize("given", ["a", "A" * 128, "req-1!~{}"])
async def test_p16_engines_never_see_an_id_twice(given: str) -> None:
    """P16: engines abort one of two requests of the same id, so theirs is the client's with something behind it."""
    misleading = {"X-Request-Id": given, "X-Note": f"x-request-id: {given}"}
    async with fronted() as (origin, _, client):
        for _ in range(2):
            response = await client.ask(post(CHAT, headers=misleading))
            assert response.header("x-request-id") == given
    seen = [request.header("x-request-id") or "" for request in origin.requests]
    assert all(re.fullmatch(re.escape(given) + "-[0-9a-f]{12}", each) for each in seen)
    assert len(set(seen)) == 2
    assert [request.header("x-note") for request in origin.requests] == [misleading["X-Note"]] * 2


async def test_engines_of_the_contract_are_told_the_clients_id() -> None:
    async with Origin() as origin, running() as gateway, Client(gateway.address) as client:
        gateway.registry.beat(WorkerReport("a", origin.address, "m"), monotonic())
        await client.ask(post(CHAT, headers={"X-Request-Id": "mine"}))
    assert origin.requests[0].header("x-request-id") == "mine"


@pytest.mark.parametrize("given", [None, "", "A" * 129, "two words", "tab\tbed", "é"])
async def test_a_bad_request_id_is_replaced_on_both_sides(given: str | None) -> None:
    headers = {} if given is None else {"X-Request-Id": given}
    async with fronted() as (origin, _, client):
        one = (await client.ask(post(CHAT, headers=headers))).header("x-request-id")
        two = (await client.ask(post(CHAT, headers=headers))).header("x-request-id")
    assert one != two
    for made, request in zip((one, two), origin.requests, strict=True):
        assert made is not None
        assert re.fullmatch("[0-9a-f]{32}", made)
        assert request.header("x-request-id") == made


async def test_a_trace_is_continued_with_a_new_span() -> None:
    headers = {"traceparent": TRACE, "tracestate": "vendor=1"}
    async with fronted() as (origin, _, client):
        await client.ask(post(CHAT, headers=headers))
    got = origin.requests[0].header("traceparent") or ""
    assert got != TRACE
    assert (got[:36], got[-3:]) == (TRACE[:36], "-00")
    assert origin.requests[0].header("tracestate") == "vendor=1"


@pytest.mark.parametrize(
    "given",
    [
        TRACE.upper(),
        TRACE.replace("00-", "01-", 1),
        TRACE[:-1],
        TRACE + "-more",
        "00-" + "0" * 32 + TRACE[35:],
        TRACE[:36] + "0" * 16 + "-01",
        "nonsense",
    ],
)
async def test_a_bad_trace_is_replaced_and_its_state_dropped(given: str) -> None:
    headers = {"traceparent": given, "tracestate": "vendor=1"}
    async with fronted() as (origin, _, client):
        await client.ask(post(CHAT, headers=headers))
    assert NEW_TRACE.fullmatch(origin.requests[0].header("traceparent") or "")
    assert origin.requests[0].header("tracestate") is None


async def test_a_connection_header_cannot_take_the_gateways_own_headers_away() -> None:
    named = (
        "close, host, content-length, x-request-id, traceparent, content-type, transfer-encoding"
    )
    async with fronted() as (origin, _, client):
        response = await client.ask(post(CHAT, headers={"connection": named}))
        assert response.status == 200
    for name in ("host", "content-length", "x-request-id", "traceparent", "content-type"):
        assert origin.requests[0].header(name) is not None, name


async def test_bytes_beyond_ascii_in_a_header_pass_untouched() -> None:
    async with fronted() as (origin, _, client):
        await client.ask(post(CHAT, headers={"x-name": "Zoë\xff"}))
    assert origin.requests[0].header("x-name") == "Zoë\xff"
