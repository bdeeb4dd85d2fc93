"""What a whole gateway tells of a request: an access line, a decision, spans, and no secret in any of them."""

import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from pointsman.app import Gateway
from pointsman.config import Config, GatewayConfig, StaticWorker
from pointsman.observe.lines import Lines
from pointsman.testing.client import Client, post
from pointsman.testing.gateways import ANY, running
from pointsman.testing.origin import Conversation, Origin, dead_address

pytestmark = pytest.mark.anyio

PROMPT = "a marker that nobody may keep"
CHAT = {"model": "m", "messages": [{"role": "user", "content": PROMPT}]}
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"


async def collected(talk: Conversation) -> None:
    """Take spans as a collector does."""
    await talk.send(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
    talk.close()


async def test_spans_of_a_request_reach_the_collector_with_the_id_that_the_engine_saw() -> None:
    async with Origin(collected) as collector, Origin() as origin:
        async with (
            running({"a": origin.address}, otel_endpoint=f"http://{collector.address}") as gateway,
            Client(gateway.address) as client,
        ):
            response = await client.ask(post(CHAT, headers={"traceparent": PARENT}))
            assert response.status == 200
        # The end of a gateway sends what waits.
        sent = ExportTraceServiceRequest.FromString(collector.requests[0].body)
    spans = {
        span.name: span
        for resource in sent.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    }
    seen_by_engine = origin.requests[0].header("traceparent")
    assert seen_by_engine is not None
    assert {span.trace_id.hex() for span in spans.values()} == {TRACE}
    assert spans["gateway.proxy"].span_id.hex() == seen_by_engine.split("-")[2]
    assert spans["POST /v1/chat/completions"].parent_span_id.hex() == PARENT.split("-")[2]
    assert PROMPT.encode() not in collector.requests[0].body


@asynccontextmanager
async def logged(stream: io.StringIO, *addresses: str) -> AsyncIterator[Gateway]:
    workers = tuple(
        StaticWorker(id=name, url=f"http://{address}", model="m")
        for name, address in zip("ab", addresses, strict=True)
    )
    options = GatewayConfig(
        listen=ANY,
        health_listen=ANY,
        registry_listen=ANY,
        route_policy="least_outstanding",
        workers=workers,
        access_log="all",
    )
    gateway = Gateway(Config(gateway=options), lines=Lines(stream))
    await gateway.start()
    try:
        yield gateway
    finally:
        await gateway.stop()


async def test_a_failover_is_told_by_an_access_line_and_by_a_decision() -> None:
    stream = io.StringIO()
    async with (
        Origin() as origin,
        logged(stream, dead_address(), origin.address) as gateway,
        Client(gateway.address) as client,
    ):
        response = await client.ask(post(CHAT, headers={"x-request-id": "req-1"}))
        assert response.status == 200
        ask = b"GET /admin/v1/decisions?request_id=req-1 HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
        answer = await client.ask(ask)
    (decision,) = msgspec.json.decode(answer.body)["data"]
    assert [(each["worker_id"], each["outcome"]) for each in decision["attempts"]] == [
        ("a", "refused"),
        ("b", "answered"),
    ]
    loads = [(each["worker_id"], each["load"]) for each in decision["attempts"][0]["candidates"]]
    assert loads == [("a", 0), ("b", 0)]
    line, own = [msgspec.json.decode(each) for each in stream.getvalue().splitlines()]
    assert (line["request_id"], line["worker_id"], line["failures"]) == ("req-1", "b", ["refused"])
    assert line["trace_id"] == decision["trace_id"]
    assert (own["method"], own["path"], own["status"]) == ("GET", "/admin", 200)
    assert PROMPT not in stream.getvalue() + answer.body.decode()
