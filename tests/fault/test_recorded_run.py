"""A gateway that records a run, with workers that fail: its decisions come again, one by one, and no text was kept."""

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random

import pytest

from pointsman.config import ConfigError
from pointsman.domain.policy import PolicyOptions, make_policy
from pointsman.simulate.recorded import RecordedTraffic, read_recording, replay
from pointsman.testing.client import Client, post
from pointsman.testing.gateways import counted, running
from pointsman.testing.origin import (
    Conversation,
    Origin,
    answers,
    event,
    resets,
    sse_chunk,
    sse_head,
)

pytestmark = pytest.mark.anyio

SECRET = "zanzibar"
USAGE = {"usage": {"prompt_tokens": 9, "completion_tokens": 42}}

whole = answers(USAGE)
lost = resets()


def asked(number: int, *, stream: bool) -> bytes:
    text = f"{SECRET} {number % 5} " * 160 + f"question {number}"
    body = {"model": "m", "stream": stream, "messages": [{"role": "user", "content": text}]}
    return post(json.dumps(body).encode(), "/v1/chat/completions")


async def told(talk: Conversation) -> None:
    await talk.send(sse_head())
    for data in (event("Hello"), f"data: {json.dumps(USAGE)}\n\n".encode(), b"data: [DONE]\n\n"):
        await talk.send(sse_chunk(data))
    await talk.send(b"0\r\n\r\n")


async def either(talk: Conversation) -> None:
    """Answer as asked, a little later, so that requests overlap."""
    await asyncio.sleep(0)
    await (told if b'"stream": true' in talk.request.body else whole)(talk)


async def talks(address: tuple[str, int], seed: int) -> None:
    random = Random(seed)
    async with Client(address) as client:
        for _ in range(12):
            number = random.randrange(1000)
            answer = await client.ask(asked(number, stream=random.random() < 0.5))
            assert answer.status == 200 and answer.complete


@pytest.mark.parametrize("policy", ["affinity", "cache_aware", "kv_cost", "least_outstanding"])
async def test_every_decision_of_a_recorded_run_comes_again(policy: str, tmp_path: Path) -> None:
    path = tmp_path / "recorded.jsonl"
    async with AsyncExitStack() as stack:
        random = Random(5)
        workers = {}
        for name in "abc":
            scripts = [random.choice((either, either, either, lost)) for _ in range(20)]
            # Connections are kept: of a policy that sends most to one worker there are few.
            origin = await stack.enter_async_context(Origin(either, lost, *scripts, either))
            workers[name] = origin.address
        async with running(
            workers, route_policy=policy, record_file=str(path), max_attempts=9
        ) as gateway:
            await asyncio.gather(*(talks(gateway.address, seed) for seed in range(6)))
    recording = read_recording(path.read_bytes().splitlines(keepends=True))
    requests = recording.requests
    again = list(replay(recording, make_policy(policy, PolicyOptions(), Random(0))))
    assert len(requests) == 72 and len(again) == sum(len(each.picks) for each in requests)
    assert [each for each in again if not each.same] == []
    assert any(each.recorded.failure for each in again)
    assert any(max(each.recorded.loads) > 1 for each in again)
    assert [each for each in requests if each.output_tokens != 42] == []
    assert all(len(each.blocks) > 2 for each in RecordedTraffic(recording))
    assert SECRET.encode() not in path.read_bytes()


async def test_a_recording_that_cannot_be_written_is_told_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gateway.record_file: .*No such file"):
        async with running({"a": "127.0.0.1:1"}, record_file=str(tmp_path / "no" / "file")):
            pass


async def test_what_was_not_recorded_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "recorded.jsonl"
    async with (
        Origin(whole) as origin,
        running({"a": origin.address}, record_file=str(path)) as gateway,
    ):
        assert counted(gateway, "tl_gateway_records_dropped_total") == 0
