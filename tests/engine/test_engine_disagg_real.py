"""The real model behind a real gateway: who was handed over gets the answer of a unified worker, token for token.

Three engines and a gateway, all processes of their own; see `bench/handoff.py`, which asks 200 prompts in place of the
few here, and measures.
"""

import importlib.util
import json
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("xllamacpp", reason="needs the [engine] extra: pip install 'pointsman[engine]'")
pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(300)]

BENCH = Path(__file__).resolve().parents[2] / "bench"
WITHIN_S = 20.0
IDLE = {"handles": 0, "held_blocks": 0, "decoding": 0, "prefilling": 0}
PATHS = ("chat", "text")
KINDS = ("greedy", "seeded", "unseeded")


@pytest.fixture(scope="module")
def handoff() -> Iterator[Any]:
    """The module `bench/handoff.py`."""
    spec = importlib.util.spec_from_file_location("bench_handoff", BENCH / "handoff.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Its dataclasses look themselves up there.
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def fleet(handoff: Any, weights: Path) -> Iterator[Any]:
    with handoff.Fleet("--model", str(weights)) as running:
        yield running


@pytest.fixture
def request_id(request: pytest.FixtureRequest) -> str:
    name: str = request.node.name
    return name.translate(str.maketrans("[]", "--"))


def comes_true(condition: Callable[[], bool]) -> bool:
    """Whether it does, in time: what other processes do has no clock that a test could turn."""
    deadline = time.monotonic() + WITHIN_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", KINDS)
def test_disaggregated_equals_unified(
    fleet: Any, handoff: Any, path: str, kind: str, request_id: str
) -> None:
    tokens = 0
    for i, prompt in enumerate(handoff.prompts(3)):
        verdict = handoff.compare(fleet, path, kind, prompt, f"{request_id}{i}")
        assert verdict.wrong == []
        tokens += verdict.tokens
    # Some answers end at once; not all may.
    assert tokens > 20
    assert fleet.held() == IDLE


def test_the_ways_to_ask_are_those_of_the_script(handoff: Any) -> None:
    assert (tuple(handoff.PATHS), tuple(handoff.KINDS)) == (PATHS, KINDS)


def test_the_prompts_are_all_different(handoff: Any) -> None:
    assert len(set(handoff.prompts(200))) == 200
    with pytest.raises(ValueError, match="there are 200"):
        handoff.prompts(201)


def test_without_a_seed_every_request_is_given_another_one(
    fleet: Any, handoff: Any, request_id: str
) -> None:
    body = {"model": "apart", "prompt": "A seed is", "max_tokens": 1, "temperature": 0.8}
    seeds = set()
    for i in range(4):
        fleet.ask(handoff.PATHS["text"], body, f"{request_id}{i}")
        seeds.add(fleet.tap.told[f"{request_id}{i}"].seed)
    assert len(seeds) == 4
    assert None not in seeds


def test_a_difference_would_be_seen(fleet: Any, handoff: Any, request_id: str) -> None:
    body = {"prompt": "The old clock", "max_tokens": 16, "logprobs": 0, "temperature": 0.8}
    path = handoff.PATHS["text"]
    whole = fleet.ask(path, {"model": "whole", "seed": 1, **body}, f"{request_id}1")
    apart = fleet.ask(path, {"model": "apart", "seed": 2, **body}, f"{request_id}2")
    assert any("logprobs" in each for each in handoff.differences(whole, apart))


def test_what_was_not_handed_over_would_be_seen(
    fleet: Any, handoff: Any, request_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The decode worker computes the prompt itself where the gateway must not touch the request.
    monkeypatch.setitem(handoff.KINDS, "greedy", {"temperature": 0, "seed": 1, "logit_bias": {}})
    verdict = handoff.compare(fleet, "text", "greedy", "A quiet library is", request_id)
    assert [each.partition(":")[0] for each in verdict.wrong] == ["not handed over"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", ["greedy", "seeded"])
def test_disaggregated_streams_equal_unified_ones(
    fleet: Any, handoff: Any, path: str, kind: str, request_id: str
) -> None:
    story = "Once upon a time there was a little fox who lived at the edge of a wide river. " * 3
    asked: dict[str, Any] = {"prompt": story + "One day the", "logprobs": 2}
    if path == "chat":
        messages = [{"role": "user", "content": story + "Go on with the story."}]
        asked = {"messages": messages, "logprobs": True, "top_logprobs": 2}
    asked |= {"max_tokens": 24, "stream": True, "stream_options": {"include_usage": True}}
    streams = [
        events(fleet, handoff, path, {"model": model, **asked, **handoff.KINDS[kind]}, request_id)
        for model in ("whole", "apart")
    ]
    assert fleet.tap.told[request_id].handle
    assert streams[0] == streams[1]
    assert len(streams[0]) > 10
    assert fleet.held() == IDLE


def events(
    fleet: Any, handoff: Any, path: str, body: dict[str, Any], request_id: str
) -> list[dict[str, Any]]:
    """The events of a stream, without what is different for every answer and what the cache did for it."""
    url = fleet.url + handoff.PATHS[path]
    response = httpx.post(url, json=body, headers={"X-Request-Id": request_id}, timeout=120)
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    made = []
    for line in lines:
        event = json.loads(line)
        assert event.pop("id")
        assert event.pop("created")
        if event.get("usage"):
            del event["usage"]["prompt_tokens_details"]
        made.append(event)
    return made


def leaving(fleet: Any, handoff: Any, body: dict[str, Any], request_id: str) -> socket.socket:
    """A client that has sent a completion and read nothing yet."""
    content = json.dumps({"model": "apart", "stream": True, **body}).encode()
    host, _, port = fleet.url.removeprefix("http://").rpartition(":")
    client = socket.create_connection((host, int(port)), timeout=WITHIN_S)
    head = (
        f"POST {handoff.PATHS['text']} HTTP/1.1\r\nhost: pointsman\r\nx-request-id: {request_id}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    client.sendall(head.encode() + content)
    return client


def test_disaggregated_release_on_abort_while_the_prompt_is_computed(
    fleet: Any, handoff: Any, request_id: str
) -> None:
    body = {"prompt": handoff.text_of_length(fleet, 1500), "max_tokens": 8}
    with leaving(fleet, handoff, body, request_id):
        assert comes_true(lambda: fleet.held()["prefilling"] == 1)
    assert comes_true(lambda: fleet.held() == IDLE)
    assert request_id not in fleet.tap.told


def test_disaggregated_release_on_abort_while_the_answer_streams(
    fleet: Any, handoff: Any, request_id: str
) -> None:
    body = {"prompt": handoff.text_of_length(fleet, 40), "max_tokens": 1500, "temperature": 0}
    with leaving(fleet, handoff, body, request_id) as client:
        seen = b""
        while b"data: " not in seen:
            seen += client.recv(4096) or pytest.fail(f"the stream ended: {seen!r}")
        assert fleet.held()["decoding"] == 1
    assert comes_true(lambda: fleet.held() == IDLE)


def test_the_parts_of_a_handoff_are_those_of_its_time(
    fleet: Any, handoff: Any, request_id: str
) -> None:
    text = handoff.text_of_length(fleet, 100)
    assert len(fleet.tokenize(text)) == 100
    began = time.perf_counter()
    split = handoff.split(fleet, text, request_id)
    took = (time.perf_counter() - began) * 1000
    assert split.cached == 0
    assert all(part > 0 for part in split[:4])
    assert split.prefill < sum(split[:4]) < took


def test_a_cost_is_measured_in_both_ways_and_told_in_a_table(fleet: Any, handoff: Any) -> None:
    measured = handoff.cost(fleet, 40, repeat=1)
    each = (measured.unified, measured.disaggregated, measured.splits)
    assert [len(times) for times in each] == [1, 1, 1]
    *_, row = handoff.table([measured])
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[0] == "40"
    assert len(cells) == 7
    assert all(float(cell.split(" ")[0]) >= 0 for cell in cells[1:])
