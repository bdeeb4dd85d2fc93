"""Two real vLLM that a gateway knows by `pointsman agent` alone: it polls nobody, and has nothing configured."""

import asyncio
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

pytestmark = pytest.mark.anyio

PULLED = "vllm:external_prefix_cache_hits_total"
STORY = " ".join(f"Verse {i}: the ferry waits at the other bank." for i in range(14))
ROUTES = {
    "unified": "[gateway]\n",
    "disaggregated": (
        "[gateway]\ndisagg_min_tokens = 0\n"
        '[[gateway.routes]]\nmodel = "smollm2"\ntargets = ["disaggregated"]\n'
    ),
}


@asynccontextmanager
async def announced(gateway: Any, *engines: tuple[Any, list[str]]) -> AsyncIterator[None]:
    """Run an agent beside each engine, until the gateway has heard of all."""
    (port,) = re.findall(r"heartbeats on port (\d+)", "".join(gateway.gateway.said))
    agents = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "pointsman", "agent", "--engine", engine.url),
            *("--registry", f"127.0.0.1:{port}", *options),
            stderr=asyncio.subprocess.DEVNULL,
        )
        for engine, options in engines
    ]
    try:
        async with asyncio.timeout(60):
            for _ in agents:
                await gateway.gateway.says("joined")
        yield
    finally:
        for each in agents:
            each.terminate()
        for each in agents:
            await each.wait()


async def test_engines_are_announced_with_what_they_serve(pair: Any, front: Any) -> None:
    async with (
        front(ROUTES["unified"], workers=0) as gateway,
        announced(gateway, *((engine, []) for engine in pair)),
    ):
        body = {"model": "smollm2", "prompt": STORY, "max_tokens": 4}
        answer = await gateway.client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        (model,) = (await gateway.client.get("/v1/models")).json()["data"]
        assert model["id"] == "smollm2"


async def test_engines_that_are_announced_hand_over(pair: Any, front: Any) -> None:
    pulled = pair.decode.figure(PULLED)
    options = [["--role", role, "--connector", "nixl"] for role in ("prefill", "decode")]
    async with (
        front(ROUTES["disaggregated"], workers=0) as gateway,
        announced(gateway, *zip(pair, options, strict=True)),
    ):
        body = {"model": "smollm2", "prompt": f"New. {STORY}", "max_tokens": 4}
        answer = await gateway.client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
    assert pair.decode.figure(PULLED) - pulled > 100
