"""The openai SDK in front of a cascade: what it parses of an answer that was kept, escalated, or held as a stream."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

from pointsman.app import Gateway
from pointsman.config import Config, GatewayConfig, StaticWorker
from pointsman.domain.routes import Route, Step, StreamHold
from pointsman.testing.gateways import ANY, PEPPER
from pointsman.testing.origin import Conversation, Origin, Script, answers, sse_chunk, sse_head

pytestmark = pytest.mark.anyio

WORDS = ["It", " is", " four", "."]
SURE, UNSURE = "What is 2+2?", "What is the meaning of life?"


def engine(model: str) -> Script:
    """Return an engine that is sure of everything but the meaning of life, and gives logprobs where it is asked to."""

    async def script(talk: Conversation) -> None:
        body = json.loads(talk.request.body)
        assert body["model"] == model
        logprob = -0.25 if body["messages"][-1]["content"] == SURE else -3.0
        tokens = [
            {"token": word, "bytes": list(word.encode()), "logprob": logprob, "top_logprobs": []}
            for word in WORDS
        ]
        shared = {"id": "c-1", "created": 1, "model": model}
        if not body.get("stream"):
            choice = {
                "index": 0,
                "message": {"role": "assistant", "content": "".join(WORDS)},
                "logprobs": {"content": tokens} if body.get("logprobs") else None,
                "finish_reason": "stop",
            }
            usage = {"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13}
            whole = {"object": "chat.completion", "choices": [choice], "usage": usage}
            await answers(shared | whole)(talk)
            return
        await talk.send(sse_head())
        for token in tokens:
            choice = {
                "index": 0,
                "delta": {"content": token["token"]},
                "logprobs": {"content": [token]} if body.get("logprobs") else None,
                "finish_reason": "stop" if token is tokens[-1] else None,
            }
            event = shared | {"object": "chat.completion.chunk", "choices": [choice]}
            await talk.send(sse_chunk(b"data: %b\n\n" % json.dumps(event).encode()))
        await talk.send(sse_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    return script


@asynccontextmanager
async def cascade() -> AsyncIterator[AsyncOpenAI]:
    """Run a cascade of two engines, and a client of it."""
    steps = (Step("small", "mean_logprob > -1.0"), Step("large"))
    async with Origin(engine("small")) as small, Origin(engine("large")) as large:
        config = GatewayConfig(
            listen=ANY,
            health_listen=ANY,
            registry_listen=ANY,
            access_log="off",
            workers=(
                StaticWorker("a", f"http://{small.address}", model="small"),
                StaticWorker("b", f"http://{large.address}", model="large"),
            ),
            routes=(Route("m", cascade=steps, stream_hold=StreamHold(3, 30.0)),),
        )
        gateway = Gateway(Config(gateway=config), environ=PEPPER)
        await gateway.start()
        host, port = gateway.address
        try:
            url = f"http://{host}:{port}/v1"
            async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
                yield client
        finally:
            await gateway.stop()


def asking(question: str) -> list[ChatCompletionMessageParam]:
    return [{"role": "user", "content": question}]


@pytest.mark.parametrize(("question", "model"), [(SURE, "small"), (UNSURE, "large")])
async def test_a_plain_answer_is_of_one_model_and_without_logprobs(
    question: str, model: str
) -> None:
    async with cascade() as client:
        answer = await client.chat.completions.create(model="m", messages=asking(question))
    (choice,) = answer.choices
    assert (answer.model, choice.message.content) == (model, "".join(WORDS))
    assert choice.logprobs is None
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4


@pytest.mark.parametrize(("question", "model"), [(SURE, "small"), (UNSURE, "large")])
async def test_logprobs_that_were_asked_for_are_there(question: str, model: str) -> None:
    async with cascade() as client:
        answer = await client.chat.completions.create(
            model="m", messages=asking(question), logprobs=True
        )
    (choice,) = answer.choices
    assert answer.model == model
    assert choice.logprobs is not None
    assert [each.token for each in choice.logprobs.content or ()] == WORDS


@pytest.mark.parametrize("wanted", [False, True], ids=["without logprobs", "with logprobs"])
@pytest.mark.parametrize(("question", "model"), [(SURE, "small"), (UNSURE, "large")])
async def test_a_stream_is_of_one_model(question: str, model: str, wanted: bool) -> None:
    async with cascade() as client:
        stream = await client.chat.completions.create(
            model="m", messages=asking(question), stream=True, logprobs=wanted
        )
        events = [event async for event in stream]
    choices = [event.choices[0] for event in events]
    assert {event.model for event in events} == {model}
    assert [choice.delta.content for choice in choices] == WORDS
    assert [choice.logprobs is not None for choice in choices] == [wanted] * 4
    assert choices[-1].finish_reason == "stop"
