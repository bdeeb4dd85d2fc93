"""Hand-offs between two real vLLM over NIXL: the same answers, blocks that really travel, and none left behind."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.anyio

MODEL = "smollm2"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PULLED = "vllm:external_prefix_cache_hits_total"
HELD = "vllm:kv_cache_usage_perc"
EXPIRED = "vllm:nixl_num_kv_expired_reqs_total"
HANDED_OVER = 'tl_gateway_handoffs_total{outcome="handed_over"}'
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.9, "seed": 1234},
}
WITHIN_S = 20.0
"""Shorter than the 30 s for which a prefill worker keeps blocks that nobody asks for."""

number = count(1)


def story(lines: int = 14) -> str:
    """A prompt that no worker has seen."""
    return f"Story {next(number)}. " + " ".join(
        f"Line {i}: the river runs on to the sea." for i in range(lines)
    )


def asked(path: str, prompt: str, **more: Any) -> dict[str, Any]:
    what: dict[str, Any] = (
        {"prompt": prompt} if path == TEXT else {"messages": [{"role": "user", "content": prompt}]}
    )
    return {"model": MODEL, "max_tokens": 16, **what, **more}


def disaggregated(prefill: str, decode: str) -> str:
    workers = "".join(
        f'[[gateway.workers]]\nid = "{role}"\nurl = "http://{address}"\nrole = "{role}"\n'
        'dialect = "vllm"\nconnector = "nixl"\npoll_interval_s = 0.5\npoll_timeout_s = 10\n'
        for role, address in (("prefill", prefill), ("decode", decode))
    )
    route = '[[gateway.routes]]\nmodel = "smollm2"\ntargets = ["disaggregated"]\n'
    return f"[gateway]\ndisagg_min_tokens = 0\n{workers}{route}"


class Turnstile:
    """A relay in front of an engine that can stop requests on their way, as if the network were slow.

    `seen` is set by the next POST; with `holds` it goes no further, and its connection ends with the client's.
    """

    def __init__(self, address: str) -> None:
        self._host, _, self._port = address.rpartition(":")
        self.seen = asyncio.Event()
        self.holds = False

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[str]:
        """Listen, and say where."""
        self._tasks: set[asyncio.Task[None]] = set()
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        try:
            host, port = server.sockets[0].getsockname()
            yield f"{host}:{port}"
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        back, forth = await asyncio.open_connection(self._host, int(self._port))
        answering = asyncio.ensure_future(self._copy(back, writer))
        try:
            while data := await reader.read(1 << 16):
                if data.startswith(b"POST"):
                    self.seen.set()
                    if self.holds:
                        self.holds = False
                        while await reader.read(1 << 16):
                            pass
                        break
                forth.write(data)
        except ConnectionError:
            pass
        finally:
            answering.cancel()
            forth.close()
            writer.close()
            self._tasks.discard(task)

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
        writer.close()


async def comes_true(condition: Callable[[], bool]) -> bool:
    """Whether it does, in time: what other processes do has no clock that a test could turn."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + WITHIN_S
    while not await asyncio.to_thread(condition):
        if loop.time() > deadline:
            return False
        await asyncio.sleep(0.1)
    return True


async def nothing_stays(pair: Any, expired: float) -> None:
    """Nobody computes, nobody keeps a block, and no lease had to end for it."""
    assert await comes_true(
        lambda: all(
            engine.figure(HELD) == engine.figure("vllm:num_requests_running") == 0
            for engine in pair
        )
    )
    assert pair.prefill.figure(EXPIRED) == expired


def ids(answer: httpx.Response) -> list[int]:
    """The tokens of an answer, streamed or not."""
    if answer.headers["content-type"].startswith("application/json"):
        found: list[int] = answer.json()["choices"][0]["token_ids"]
        return found
    events = [json.loads(line[6:]) for line in answer.text.split("\n") if line[:7] == "data: {"]
    choices = [choice for event in events for choice in event["choices"]]
    return [token for choice in choices for token in choice.get("token_ids") or ()]


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("path", [CHAT, TEXT], ids=["chat", "text"])
async def test_who_was_handed_over_gets_the_answer_of_a_warm_unified_worker(
    pair: Any, front: Any, path: str, sampling: str, streamed: bool
) -> None:
    body = asked(path, story(), **SAMPLINGS[sampling], return_token_ids=True, stream=streamed)
    pulled, expired = pair.decode.figure(PULLED), pair.prefill.figure(EXPIRED)
    config = disaggregated(pair.prefill.address, pair.decode.address)
    async with front(config) as gateway:
        answer = await gateway.client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        assert await gateway.figure(HANDED_OVER) == 1
        unified = await gateway.client.post(pair.prefill.url + path, json=body)
        assert ids(answer) == ids(unified)
        assert len(ids(answer)) > 4
        assert 'kv_transfer_params":{' not in answer.text
        assert pair.decode.figure(PULLED) - pulled > 100
        await nothing_stays(pair, expired)


async def test_the_gateway_tells_what_was_pulled(pair: Any, front: Any) -> None:
    config = disaggregated(pair.prefill.address, pair.decode.address)
    async with front(config) as gateway:
        answer = await gateway.client.post(TEXT, json=asked(TEXT, story()))
        prompt_tokens = answer.json()["usage"]["prompt_tokens"]
        assert (
            await gateway.figure('tl_gateway_handoff_tokens_total{kind="prompt"}') == prompt_tokens
        )


async def test_a_prompt_that_is_too_long_is_refused_with_the_words_of_the_engine(
    pair: Any, front: Any
) -> None:
    expired = pair.prefill.figure(EXPIRED)
    config = disaggregated(pair.prefill.address, pair.decode.address)
    async with front(config) as gateway:
        # The prefill worker sees that the prompt does not fit, the decode worker that the answer does not.
        for body, words in (
            (asked(TEXT, "word " * 1100), "maximum context length is 1024"),
            (asked(TEXT, story(), max_tokens=4000), "max_tokens=4000 cannot be greater"),
        ):
            answer = await gateway.client.post(TEXT, json=body)
            assert answer.status_code == 400, answer.text
            assert words in answer.json()["error"]["message"]
        await nothing_stays(pair, expired)


@asynccontextmanager
async def watched(pair: Any, front: Any) -> AsyncIterator[tuple[Any, Turnstile, Turnstile]]:
    """A gateway with a turnstile on the way to either engine; what it must leave behind is nothing."""
    before, between = Turnstile(pair.prefill.address), Turnstile(pair.decode.address)
    expired = pair.prefill.figure(EXPIRED)
    async with (
        before.opened() as prefill,
        between.opened() as decode,
        front(disaggregated(prefill, decode)) as gateway,
    ):
        yield gateway, before, between
        await nothing_stays(pair, expired)
        # It still works, and the blocks still travel.
        pulled = pair.decode.figure(PULLED)
        (await gateway.client.post(TEXT, json=asked(TEXT, story()))).raise_for_status()
        assert pair.decode.figure(PULLED) - pulled > 100
        await nothing_stays(pair, expired)


async def leaves(gateway: Any, body: dict[str, Any], when: asyncio.Event, after_s: float) -> None:
    """Ask, and close the connection so long after an event."""
    host, port = gateway.gateway.address
    _, writer = await asyncio.open_connection(host, port)
    payload = json.dumps(body).encode()
    head = f"POST {TEXT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    try:
        writer.write(f"{head}content-length: {len(payload)}\r\n\r\n".encode() + payload)
        async with asyncio.timeout(WITHIN_S):
            await when.wait()
        await asyncio.sleep(after_s)
    finally:
        writer.close()
        await writer.wait_closed()


async def test_a_client_that_leaves_before_the_prefill_leaves_nothing(
    pair: Any, front: Any
) -> None:
    async with watched(pair, front) as (gateway, before, _):
        before.holds = True
        await leaves(gateway, asked(TEXT, story()), before.seen, 0.2)


@pytest.mark.parametrize("after_s", [0.0, 0.3, 1.0])
async def test_a_client_that_leaves_during_the_prefill_leaves_nothing(
    pair: Any, front: Any, after_s: float
) -> None:
    async with watched(pair, front) as (gateway, before, _):
        await leaves(gateway, asked(TEXT, story(70)), before.seen, after_s)


async def test_a_client_that_leaves_between_the_legs_leaves_nothing(pair: Any, front: Any) -> None:
    async with watched(pair, front) as (gateway, _, between):
        between.holds = True
        await leaves(gateway, asked(TEXT, story()), between.seen, 0.2)


@pytest.mark.parametrize("after_s", [0.0, 0.05, 0.3])
async def test_a_client_that_leaves_while_the_blocks_are_pulled_leaves_nothing(
    pair: Any, front: Any, after_s: float
) -> None:
    async with watched(pair, front) as (gateway, _, between):
        body = asked(TEXT, story(), max_tokens=200, ignore_eos=True)
        await leaves(gateway, body, between.seen, after_s)


async def test_a_client_that_leaves_after_the_first_byte_leaves_nothing(
    pair: Any, front: Any
) -> None:
    async with watched(pair, front) as (gateway, _, _):
        body = asked(TEXT, story(), max_tokens=200, ignore_eos=True, stream=True)
        async with gateway.client.stream("POST", TEXT, json=body) as answer:
            assert answer.status_code == 200
            await anext(answer.aiter_bytes())
