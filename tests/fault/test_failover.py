"""Failover before the first byte, and none after it, over real sockets."""

import pytest

from pointsman.testing.client import Client, post
from pointsman.testing.gateways import counted, running
from pointsman.testing.origin import (
    Origin,
    answers,
    dead_address,
    event,
    resets,
    sse_chunk,
    sse_head,
    streams,
)
from pointsman.wire.sse import ERROR_EVENT

pytestmark = pytest.mark.anyio

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


async def test_failover_before_first_byte() -> None:
    async with Origin(answers({"no": 1}, 503)) as full, Origin(answers({"ok": 1})) as good:
        workers = {"a": dead_address(), "b": full.address, "c": good.address}
        async with running(workers) as gateway, Client(gateway.address) as client:
            response = await client.ask(post(CHAT))
        assert (response.status, response.body) == (200, b'{"ok":1}')
        assert len(full.requests) == 1
        assert len(good.requests) == 1


async def test_no_splice_after_first_byte() -> None:
    dying = resets(sse_head() + sse_chunk(event("The cat")))
    async with Origin(dying) as first, Origin(streams("The", "dog")) as second:
        workers = {"a": first.address, "b": second.address}
        async with running(workers) as gateway, Client(gateway.address) as client:
            response = await client.ask(post(CHAT | {"stream": True}))
        assert response.status == 200
        assert response.body == event("The cat") + ERROR_EVENT
        assert response.complete
        assert second.requests == []


async def test_a_connection_goes_on_after_a_stream_that_broke_in_good_order() -> None:
    dying = resets(sse_head() + sse_chunk(event("The cat")))
    async with (
        Origin(dying, answers({"ok": 1})) as engine,
        running({"a": engine.address}) as gateway,
        Client(gateway.address) as client,
    ):
        broken = await client.ask(post(CHAT | {"stream": True}))
        assert (broken.complete, broken.header("connection")) == (True, "keep-alive")
        assert (await client.ask(post(CHAT))).body == b'{"ok":1}'


@pytest.mark.parametrize("kind", ["503", "refused", "reset"])
async def test_r25_a_worker_that_fails_everybody_costs_each_request_one_attempt_and_shows(
    kind: str,
) -> None:
    """No request asks it twice, none fails for it, and an operator sees it; nothing is remembered between requests."""
    script = resets() if kind == "reset" else answers({"no": 1}, 503)
    async with Origin(script) as bad, Origin(answers({"ok": 1})) as good:
        address = dead_address() if kind == "refused" else bad.address
        workers = {"a": address, "b": good.address}
        async with running(workers) as gateway, Client(gateway.address) as client:
            statuses = [(await client.ask(post(CHAT))).status for _ in range(5)]
            failed = f'tl_gateway_worker_requests_total{{outcome="{kind}",worker_id="a"}}'
            assert counted(gateway, failed) == 5
            assert [decision.attempts[0].outcome for decision in gateway.decisions.find()] == [
                kind
            ] * 5
        assert statuses == [200] * 5
        assert len(bad.requests) == (0 if kind == "refused" else 5)
