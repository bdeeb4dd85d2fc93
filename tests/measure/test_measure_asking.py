"""One request to an engine: its tokens, their times, and every way in which it cannot be measured."""

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from pointsman.dialect.engines import DIALECTS
from pointsman.measure.asking import Answered, Engine, MeasureError, look

USAGE = {"prompt_tokens": 7, "completion_tokens": 2}
Handler = Callable[[httpx.Request], httpx.Response]


def event(data: object) -> bytes:
    return b"data: " + (data if isinstance(data, bytes) else json.dumps(data).encode()) + b"\n\n"


def token(text: str, finish: str | None = None) -> bytes:
    return event({"choices": [{"text": text, "finish_reason": finish}]})


class Pieces(httpx.AsyncByteStream):
    def __init__(self, *pieces: bytes) -> None:
        self.pieces = pieces

    async def __aiter__(self) -> Any:
        for piece in self.pieces:
            yield piece


def answers(*pieces: bytes) -> Handler:
    return lambda request: httpx.Response(200, stream=Pieces(*pieces))


def ask(
    handler: Handler, dialect: str = "openai", began: Callable[[], None] | None = None
) -> Answered:
    async def main() -> Answered:
        transport = httpx.MockTransport(handler)
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
            clock: Iterator[float] = iter([float(second) for second in range(100)])
            engine = Engine(client, "m", DIALECTS[dialect], timeout_s=1.0, now=lambda: next(clock))
            return await engine.ask("the prompt", 2, began)

    return asyncio.run(main())


def test_each_token_has_its_time_and_the_engine_counts() -> None:
    begun: list[int] = []
    usage = USAGE | {"prompt_tokens_details": {"cached_tokens": 3}}
    seen = ask(
        answers(
            b": ping\n\n",
            token("a"),
            token("")[:9],
            token("")[9:] + token("", "length"),
            event({"choices": [], "usage": usage}),
            event(b"[DONE]"),
        ),
        began=lambda: begun.append(1),
    )
    # The clock goes on by one for each piece: a comment, a token, half of one, its other half and the end.
    assert seen == Answered(0.0, (2.0, 4.0), 7, 2, 3)
    assert (seen.first_s, begun) == (2.0, [1])


def test_a_last_token_may_come_with_the_reason_why_it_is_the_last() -> None:
    seen = ask(answers(token("a"), token("b", "stop"), event({"choices": [], "usage": USAGE})))
    assert (len(seen.times), seen.cached_tokens) == (2, -1)


@pytest.mark.parametrize(("dialect", "told"), [("openai", False), ("vllm", True), ("tl", True)])
def test_engines_that_know_of_it_are_asked_not_to_stop(dialect: str, told: bool) -> None:
    bodies = []

    def handler(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        return answers(token("a"), event({"choices": [], "usage": USAGE}))(request)

    ask(handler, dialect)
    assert bodies[0]["max_tokens"] == 2 and bodies[0]["stream_options"] == {"include_usage": True}
    assert bodies[0].get("ignore_eos", False) is told


def lost(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("connection refused")


def late(request: httpx.Request) -> httpx.Response:
    raise TimeoutError


@pytest.mark.parametrize(
    ("handler", "error"),
    [
        (lambda request: httpx.Response(404, text="no\nmodel"), "status 404: nomodel"),
        (lost, "no answer: connection refused"),
        (late, "no whole answer within 1 s"),
        (answers(token("a")), "a stream without usage"),
        (answers(event({"choices": [], "usage": USAGE})), "a stream without a token"),
        (answers(event(b"{")), "an event that is no completion"),
        (answers(event({"error": {"message": "x"}})), "failed in the middle"),
    ],
)
def test_what_cannot_be_measured_is_told(handler: Handler, error: str) -> None:
    with pytest.raises(MeasureError, match=error):
        ask(handler)


def looked(handler: Handler) -> Any:
    async def main() -> Any:
        transport = httpx.MockTransport(handler)
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
            return await look(client)

    return asyncio.run(main())


def test_an_engine_is_known_by_its_models_and_asked_what_it_tells() -> None:
    pages = {
        "/v1/models": {"data": [{"id": "m", "owned_by": "pointsman", "max_model_len": 99}]},
        "/health": {"status": "ok", "running": 0, "kv_total_blocks": 8, "kv_block_tokens": 16},
    }
    dialect, reading = looked(lambda request: httpx.Response(200, json=pages[request.url.path]))
    assert (dialect.name, reading.kv_total_blocks, reading.block_tokens) == ("tl", 8, 16)
    assert reading.models[0].max_model_len == 99


def test_an_engine_that_cannot_be_asked_is_told() -> None:
    with pytest.raises(MeasureError, match="/v1/models: connection refused"):
        looked(lost)
    with pytest.raises(MeasureError, match="/v1/models: 401"):
        looked(lambda request: httpx.Response(401))
