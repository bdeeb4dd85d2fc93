"""Two real vLLM behind `pointsman serve`, found by polling: what clients get, and what happens when one dies."""

import asyncio
import json
import signal
from collections.abc import Iterable
from typing import Any

import pytest

pytestmark = pytest.mark.anyio

MODEL = "smollm2"
CHAT_PATH = "/v1/chat/completions"
TEXT_PATH = "/v1/completions"
CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Name three rivers of Europe."}],
    "max_tokens": 16,
    "temperature": 0,
}
TEXT: dict[str, Any] = {
    "model": MODEL,
    "prompt": "The longest river of Europe is",
    "max_tokens": 12,
    "temperature": 0,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
FORCED = {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "weather"}}}
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
ASKED = {
    "chat": (CHAT_PATH, CHAT),
    "chat with logprobs": (CHAT_PATH, {**CHAT, "logprobs": True, "top_logprobs": 2}),
    "chat with a tool": (CHAT_PATH, {**CHAT, **FORCED, "max_tokens": 40}),
    "completion": (TEXT_PATH, TEXT),
    "completion with logprobs": (TEXT_PATH, {**TEXT, "logprobs": 2}),
    "completion of tokens": (TEXT_PATH, {**TEXT, "prompt": [504, 3575, 282, 4649, 314]}),
    "refused": (CHAT_PATH, {**CHAT, "temperature": -1}),
}
OF_ITS_OWN = {"id", "created", "created_at", "system_fingerprint", "usage"}
"""What two answers to one request differ in; how much was cached is in `usage`."""
GENERATED = {"arguments", "content", "text"}
INDEXED = {"choices", "tool_calls"}


MESSAGES = [{"role": "user", "content": "Say hello."}]
OTHERS: dict[str, dict[str, Any]] = {
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 8, "temperature": 0},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/v1/responses": {"input": "Say hello.", "max_output_tokens": 8, "temperature": 0},
    "/tokenize": {"messages": MESSAGES},
    "/detokenize": {"tokens": [504, 3575, 282]},
}


def fleet(pair: Any, *, more: str = "") -> str:
    workers = "".join(
        f'[[gateway.workers]]\nid = "{name}"\nurl = "{engine.url}"\npoll_interval_s = 0.5\npoll_timeout_s = 10\n'
        for name, engine in zip(("a", "b"), pair, strict=True)
    )
    return f'[gateway]\nroute_policy = "affinity"\n{more}\n{workers}'


def said(answer: Any) -> Any:
    """What an answer comes to, without what is its own: a stream is put together, for its pieces depend on the load."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return without_its_own(answer.json())
    lines = [line for line in answer.text.split("\n") if line]
    assert lines[-1] == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert len(events[-1]["usage"]) > 2
    return joined([without_its_own(event) for event in events])


def joined(pieces: list[Any], name: str = "") -> Any:
    """One value for many: what is generated one after another, objects by their members, of all else the last word."""
    pieces = [piece for piece in pieces if piece is not None]
    match pieces:
        case []:
            return None
        case [{}, *_]:
            names = {name for piece in pieces for name in piece}
            return {name: joined([piece.get(name) for piece in pieces], name) for name in names}
        case [[*_], *_]:
            members = [member for piece in pieces for member in piece]
            if name not in INDEXED:
                return members
            indices = sorted({member["index"] for member in members})
            return [joined([m for m in members if m["index"] == index]) for index in indices]
    return "".join(pieces) if name in GENERATED else pieces[-1]


def without_its_own(said: Any) -> Any:
    if isinstance(said, list):
        return [without_its_own(each) for each in said]
    if not isinstance(said, dict):
        return said
    kept = {key: without_its_own(value) for key, value in said.items() if key not in OF_ITS_OWN}
    # A call's id is drawn anew.
    if "function" in kept:
        kept.pop("id", None)
    return kept


def total(engines: Iterable[Any], name: str) -> float:
    figures: list[float] = [engine.figure(name) for engine in engines]
    return sum(figures)


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", ASKED)
async def test_clients_get_what_the_engine_says(
    pair: Any, front: Any, name: str, streamed: bool
) -> None:
    path, body = ASKED[name]
    body = {**body, **(STREAMED if streamed else {})}
    async with front(fleet(pair)) as gateway:
        direct = await gateway.client.post(pair.prefill.url + path, json=body)
        answer = await gateway.client.post(path, json=body)
        assert answer.status_code == direct.status_code
        assert said(answer) == said(direct)


async def test_polling_finds_out_what_the_engines_are(pair: Any, front: Any) -> None:
    async with front(fleet(pair)) as gateway:
        (model,) = (await gateway.client.get("/v1/models")).json()["data"]
        assert model["id"] == MODEL
        assert model["max_model_len"] == 1024


@pytest.mark.parametrize("path", OTHERS)
async def test_other_apis_are_passed_through(pair: Any, front: Any, path: str) -> None:
    async with front(fleet(pair)) as gateway:
        body = {"model": MODEL, **OTHERS[path]}
        direct = await gateway.client.post(pair.prefill.url + path, json=body)
        answer = await gateway.client.post(path, json=body)
        assert (answer.status_code, direct.status_code) == (200, 200), answer.text
        assert said(answer) == said(direct)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank", "/v1/score"])
async def test_an_api_that_no_engine_serves_is_refused_in_words(
    pair: Any, front: Any, path: str
) -> None:
    async with front(fleet(pair)) as gateway:
        body = {"model": MODEL, "input": "x", "query": "x", "documents": ["x"], "text_1": "x"}
        answer = await gateway.client.post(path, json=body)
        assert answer.status_code == 404
        assert path in answer.json()["error"]["message"]


async def test_a_stream_has_usage_only_where_it_was_asked_for(pair: Any, front: Any) -> None:
    async with front(fleet(pair)) as gateway:
        for options, expected in ((STREAMED, 1), ({"stream": True}, 0)):
            answer = await gateway.client.post(CHAT_PATH, json={**CHAT, **options})
            assert answer.text.count('"usage":{"prompt_tokens"') == expected


async def test_a_prompt_that_comes_again_finds_its_prefix_cache(pair: Any, front: Any) -> None:
    system = " ".join(f"Rule {i}: answer with care." for i in range(20))
    hits = total(pair, "vllm:prefix_cache_hits_total")
    async with front(fleet(pair)) as gateway:
        cached = []
        for question in ("Who?", "What?", "Where?"):
            messages = [
                {"role": "system", "content": system},
                {"role": "user", "content": question},
            ]
            answer = await gateway.client.post(CHAT_PATH, json={**CHAT, "messages": messages})
            cached.append(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
    first, *later = cached
    assert first == 0
    assert min(later) >= 96
    assert total(pair, "vllm:prefix_cache_hits_total") == hits + sum(later)


async def test_what_a_client_left_is_not_computed_to_the_end(pair: Any, front: Any) -> None:
    async with front(fleet(pair)) as gateway:
        body = {**TEXT, "stream": True, "max_tokens": 900, "ignore_eos": True}
        async with gateway.client.stream("POST", TEXT_PATH, json=body) as answer:
            await anext(answer.aiter_bytes())
        for _ in range(100):
            if not total(pair, "vllm:num_requests_running"):
                break
            await asyncio.sleep(0.1)
        assert total(pair, "vllm:num_requests_running") == 0


async def test_an_engine_that_is_killed_fails_over_and_comes_back(pair: Any, front: Any) -> None:
    async with front(fleet(pair)) as gateway:
        # One after another, so that both are asked; then all at once while one of them dies.
        bodies = [{**TEXT, "prompt": f"{i} is a number that"} for i in range(8)]
        for body in bodies:
            (await gateway.client.post(TEXT_PATH, json=body)).raise_for_status()

        async def dies() -> None:
            await asyncio.sleep(0.5)
            pair.decode.end(signal.SIGKILL)

        try:
            asks = [
                gateway.client.post(TEXT_PATH, json={**body, "max_tokens": 24}) for body in bodies
            ]
            *answers, _ = await asyncio.gather(*asks, dies())
            assert [answer.status_code for answer in answers] == [200] * len(bodies)
            await gateway.gateway.says("is down")
            for body in bodies:
                (await gateway.client.post(TEXT_PATH, json=body)).raise_for_status()
            assert await gateway.figure("tl_gateway_failovers_total") > 0
        finally:
            pair.decode.start()
            await asyncio.to_thread(pair.decode.ready)
        await gateway.gateway.says(") is up")
