"""Two real vLLM that publish what they cache: prompts go to whoever has them, and the gateway knows when they went."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.anyio

MODEL = "smollm2"
TEXT = " ".join(f"The {n}th river of Europe flows into the sea." for n in range(1, 16))
OTHER = "Once upon a time there was a mill at a river. " * 14
BLOCK = 32


def config(folder: Path, engines: Any, policy: str) -> str:
    workers = "".join(
        f'[[gateway.workers]]\nid = "{name}"\nurl = "{engine.url}"\npoll_interval_s = 0.5\npoll_timeout_s = 10\n'
        f'kv_events = "tcp://127.0.0.1:{engine.events}"\nkv_replay = "tcp://127.0.0.1:{engine.replay}"\n'
        for name, engine in zip("ab", engines, strict=True)
    )
    return (
        f'[gateway]\nroute_policy = "{policy}"\n'
        f'[[gateway.tokenizers]]\nmodel = "{MODEL}"\nfile = "{folder}/tokenizer.json"\n'
        f'chat_template = "{folder}/chat_template.jinja"\nblock_tokens = {BLOCK}\n{workers}'
    )


def body(prompt: str) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": 1, "temperature": 0}


def chat(prompt: str) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": prompt}], "max_tokens": 1}


async def direct(engine: Any, path: str, asked: dict[str, Any]) -> None:
    """Ask an engine behind the gateway's back."""
    async with httpx.AsyncClient(timeout=300) as client:
        (await client.post(engine.url + path, json=asked)).raise_for_status()


async def emptied(engine: Any) -> None:
    """Have an engine forget its prompts, and say so: it does with its next step."""
    await direct(engine, "/reset_prefix_cache", {})
    await direct(engine, "/v1/completions", body("Hello."))


async def asked(front: Any, path: str, ask: dict[str, Any]) -> tuple[str, int]:
    """Ask through the gateway, and return who answered and how many tokens that one had."""
    before = [
        await front.figure(
            f'tl_gateway_worker_requests_total{{outcome="answered",worker_id="{w}"}}'
        )
        for w in "ab"
    ]
    answer = (await front.client.post(path, json=ask)).raise_for_status().json()
    after = [
        await front.figure(
            f'tl_gateway_worker_requests_total{{outcome="answered",worker_id="{w}"}}'
        )
        for w in "ab"
    ]
    (who,) = [w for w, x, y in zip("ab", before, after, strict=True) if y > x]
    return who, int((answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0)


async def becomes(front: Any, name: str, value: float) -> None:
    async with asyncio.timeout(30):
        while await front.figure(name) != value:  # noqa: ASYNC110
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("policy", ["kv_cost", "cache_aware"])
async def test_a_prompt_goes_to_the_engine_that_says_that_it_has_it(
    publishing: Any, front: Any, policy: str
) -> None:
    a, b = publishing
    for engine in publishing:
        await emptied(engine)
    folder = Path(os.environ["POINTSMAN_INTEROP"]) / MODEL
    async with front(config(folder, publishing, policy)) as gateway:
        await becomes(gateway, "tl_gateway_kv_followed_workers", 2)
        # Nobody has it, and equals go to the smallest id. What the gateway did not send, it knows from b alone.
        await direct(b, "/v1/completions", body(TEXT))
        await direct(b, "/v1/chat/completions", chat(OTHER))
        await asyncio.sleep(1)
        assert await asked(gateway, "/v1/completions", body(TEXT)) == ("b", 160)
        who, cached = await asked(gateway, "/v1/chat/completions", chat(OTHER))
        assert (who, cached > 100) == ("b", True)
        # Emptied, and what a has counts.
        await emptied(b)
        await direct(a, "/v1/completions", body(TEXT))
        await asyncio.sleep(1)
        assert await asked(gateway, "/v1/completions", body(TEXT)) == ("a", 160)
        assert await gateway.figure("tl_gateway_kv_streams_total") == await gateway.figure(
            'tl_gateway_kv_streams_total{what="replays"}'
        )


async def test_k04_k05_an_engine_that_was_killed_has_nothing_any_more(
    publishing: Any, front: Any
) -> None:
    _a, b = publishing
    folder = Path(os.environ["POINTSMAN_INTEROP"]) / MODEL
    for engine in publishing:
        await emptied(engine)
    async with front(config(folder, publishing, "kv_cost")) as gateway:
        await becomes(gateway, "tl_gateway_kv_followed_workers", 2)
        await direct(b, "/v1/completions", body(TEXT))
        await asyncio.sleep(1)
        assert (await asked(gateway, "/v1/completions", body(TEXT)))[0] == "b"
        b.end(signal.SIGKILL)
        await becomes(gateway, "tl_gateway_kv_followed_workers", 1)
        b.start()
        await asyncio.to_thread(b.ready)
        await becomes(gateway, "tl_gateway_kv_followed_workers", 2)
        await becomes(gateway, 'tl_gateway_worker_up{worker_id="b"}', 1)
        # It is another life, at the same addresses: nobody has it, and equals go to the smallest id.
        assert await asked(gateway, "/v1/completions", body(TEXT)) == ("a", 0)
