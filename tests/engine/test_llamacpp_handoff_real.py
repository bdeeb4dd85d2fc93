"""Real llama.cpp servers as workers: polled, spoken to in their dialect, and handing prompts over by slots."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pointsman.app import Gateway
from pointsman.config import StaticWorker
from pointsman.domain.routes import Route
from pointsman.domain.worker import Role
from pointsman.testing.gateways import bearer, counted, running
from pointsman.testing.llamacpp import llama_server

pytest.importorskip("xllamacpp", reason="needs the [engine] extra: pip install 'pointsman[engine]'")
pytestmark = [pytest.mark.anyio, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(300)]

STORY = "The pointsman sets the switches, and the trains go where they should. " * 8
KEY = "an-engine-key"


@pytest.fixture(scope="module")
def pair(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The addresses of two servers that share a folder for slots, and want a key."""
    folder = str(tmp_path_factory.mktemp("slots"))
    with (
        llama_server(weights, slot_folder=folder, api_key=KEY) as one,
        llama_server(weights, slot_folder=folder, api_key=KEY) as two,
    ):
        yield one, two


def listed(id: str, address: str, role: Role) -> dict[str, Any]:
    return {
        "id": id,
        "url": f"http://{address}",
        "dialect": "llamacpp",
        "role": role,
        "poll_interval_s": 0.1,
        "api_key_env": "ENGINE_KEY",
    }


@pytest.fixture
async def gateway(pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("ENGINE_KEY", KEY)
    workers = (
        StaticWorker(**listed("p", pair[0], Role.PREFILL)),
        StaticWorker(**listed("d", pair[1], Role.DECODE)),
    )
    route = Route("smol", targets=("disaggregated",))
    async with running(routes=(route,), listed=workers) as gateway:
        yield gateway


async def up(gateway: Gateway, count: int) -> None:
    """Wait until so many workers are up: how long a process takes has no clock that a test could turn."""
    for _ in range(1500):
        if sum(worker.up for worker in gateway.registry.snapshot()) >= count:
            return
        await asyncio.sleep(0.02)
    raise AssertionError("the servers were not found up")


def asked(path: str, *, stream: bool, temperature: float) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": "smol",
        "max_tokens": 12,
        "temperature": temperature,
        "seed": 11,
        "stream": stream,
    }
    if path.endswith("chat/completions"):
        return body | {"messages": [{"role": "user", "content": STORY}]}
    return body | {"prompt": STORY}


def text_of(answer: httpx.Response) -> str:
    """Return the text of an answer, plain or streamed."""
    documents = (
        [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        if answer.headers["content-type"].startswith("text/event-stream")
        else [answer.json()]
    )
    text = ""
    for choice in (choice for each in documents for choice in each["choices"]):
        said = choice.get("delta") or choice.get("message") or choice
        text += said.get("content") or said.get("text") or ""
    return text


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("temperature", [0.0, 0.9], ids=["greedy", "sampled"])
async def test_p19_a_prompt_that_moves_by_slots_gives_the_answer_of_one_warm_server(
    gateway: Gateway, pair: tuple[str, str], path: str, stream: bool, temperature: float
) -> None:
    await up(gateway, 2)
    body = asked(path, stream=stream, temperature=temperature)
    async with httpx.AsyncClient(timeout=60) as client:
        # A server whose cache is warm computes the last token alone, as a decode worker does. It ends connections
        # after a stream without saying so.
        headers = bearer(KEY) | {"connection": "close"}
        for _ in range(2):
            alone = await client.post(f"http://{pair[0]}{path}", json=body, headers=headers)
        host, port = gateway.address
        handed = await client.post(f"http://{host}:{port}{path}", json=body)
    assert handed.status_code == 200
    assert text_of(handed) == text_of(alone) != ""
    attempt = gateway.decisions.find(limit=1)[0].attempts[0]
    assert attempt.handoff is not None
    assert (attempt.handoff.outcome, (attempt.handoff.resumed or 0) > 100) == ("handed_over", True)


async def test_slots_and_models_are_read_of_a_real_server(gateway: Gateway) -> None:
    await up(gateway, 2)
    worker = gateway.registry.snapshot()[0]
    assert (worker.model, worker.dialect, worker.degraded) == ("smol", "llamacpp", "")
    assert (worker.kv_total_blocks, worker.max_model_len) == (2, 2048)
    assert counted(gateway, "tl_gateway_requests_total") == 0
