"""Where the error event may stand: never inside a compressed stream, never joined to the event that broke."""

import gzip

import pytest

from pointsman.testing.client import Client, post
from pointsman.testing.gateways import running
from pointsman.testing.origin import Origin, resets, sse_chunk, sse_head
from pointsman.wire.sse import ERROR_EVENT, EventCut, data_of

pytestmark = pytest.mark.anyio

STREAM = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
ERROR = data_of(ERROR_EVENT)


@pytest.mark.parametrize(
    "chunks",
    [
        [b"data: x\n\n"],
        [b"data: x", b"\n\n"],
        [b"data: x\n", b"\n"],
        [b"data: x\n"],
        [b"data: x", b"\n"],
        [b"data: x\r\n"],
        [b"data: x", b"\r\n"],
        [b"data: x\r", b"\n"],
        [b"data: x", b"\r"],
        [b"data: x"],
    ],
)
async def test_f16_the_error_is_an_event_of_its_own(chunks: list[bytes]) -> None:
    dying = resets(sse_head() + b"".join(map(sse_chunk, chunks)))
    async with (
        Origin(dying) as engine,
        running({"a": engine.address}) as gateway,
        Client(gateway.address) as client,
    ):
        response = await client.ask(post(STREAM))
    data = [d for d in map(data_of, EventCut().feed(response.body)) if d is not None]
    assert data == [b"x", ERROR]


async def test_a_compressed_stream_that_breaks_just_breaks() -> None:
    packed = gzip.compress(b"data: x\n\n")
    dying = resets(sse_head("content-encoding: gzip\r\n") + sse_chunk(packed))
    async with (
        Origin(dying) as engine,
        running({"a": engine.address}) as gateway,
        Client(gateway.address) as client,
    ):
        await client.send(post(STREAM))
        head, body = (await client.rest()).split(b"\r\n\r\n", 1)
    assert b"content-encoding: gzip" in head
    assert body == sse_chunk(packed)
