"""The real model in three processes: what a prefill worker computes goes on in a decode worker, to the last bit."""

from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import pytest

from pointsman.engine.control import SERVICE
from pointsman.proto import engine_pb2

pytest.importorskip("xllamacpp", reason="needs the [engine] extra: pip install 'pointsman[engine]'")
pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(300)]

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
LENGTHS = (1, 2, 16, 17, 31, 32, 33, 48, 64, 65, 100, 160)
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "seed": 77}
PENALIZED = {"temperature": 1.1, "top_k": 40, "min_p": 0.02, "repetition_penalty": 1.2, "seed": 5}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": SAMPLED,
    "penalized": PENALIZED | {"presence_penalty": 0.4, "frequency_penalty": 0.2},
}
STORY = "Once upon a time there was a little fox who lived at the edge of a wide river. " * 18


@pytest.fixture(scope="module")
def trio(launch: Any) -> Iterator[Any]:
    """A unified, a prefill and a decode worker, of different sizes: those must not matter."""
    options = (
        ("--role", "unified", "--context", "2048", "--parallel", "4"),
        ("--role", "prefill", "--context", "1536", "--parallel", "3"),
        ("--role", "decode", "--context", "1024", "--parallel", "2"),
    )
    processes = [launch(*each) for each in options]
    yield processes
    assert [process.stop() for process in processes] == [0, 0, 0]


def prefill(trio: Any, ids: list[int], name: str, sampling: dict[str, Any]) -> Any:
    _, worker, decode = trio
    given = {"temperature": 1.0, "top_p": 1.0} | sampling
    message = engine_pb2.PrefillRequest(
        request_id=name,
        model="smollm2",
        prompt_ids=ids,
        decode_target=decode.kv,
        sampling=engine_pb2.SamplingParams(max_new_tokens=24, **given),
    )
    with grpc.insecure_channel(worker.control) as channel:
        return channel.unary_unary(
            f"/{SERVICE}/Prefill",
            request_serializer=engine_pb2.PrefillRequest.SerializeToString,
            response_deserializer=engine_pb2.PrefillResponse.FromString,
        )(message, timeout=120)


def nothing_is_held(trio: Any) -> bool:
    health = trio[2].health()
    return (health["kv_handles"], health["kv_held_blocks"], health["running"]) == (0, 0, 0)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_disaggregated_completions_equal_unified_ones(trio: Any, sampling: str) -> None:
    unified, worker, decode = trio
    chosen = SAMPLINGS[sampling]
    whole = worker.post("/v1/tokenize", text=STORY, add_special=True)["ids"]
    for length in LENGTHS:
        ids = whole[length : 2 * length]
        body = {"prompt": ids, "max_tokens": 24, "logprobs": 4, **chosen}
        answer = prefill(trio, ids, f"{sampling}-{length}", chosen)
        resumed = decode.post(TEXT, {"X-TL-KV-Handle": answer.handle.handle_id}, **body)
        expected = unified.post(TEXT, **body)
        assert resumed["choices"] == expected["choices"], length
        assert resumed["usage"]["prompt_tokens_details"] == {"cached_tokens": length - 1}
        first = expected["choices"][0]["logprobs"]["token_logprobs"][0]
        assert answer.first_logprob == pytest.approx(first, rel=1e-6)
    assert nothing_is_held(trio)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("stream", [False, True])
def test_disaggregated_chats_equal_unified_ones(trio: Any, sampling: str, stream: bool) -> None:
    unified, worker, decode = trio
    chosen = SAMPLINGS[sampling]
    for i, question in enumerate(("Hi.", "Write one sentence about rivers.", STORY + " Why?")):
        messages = [{"role": "user", "content": question}]
        asked = worker.post("/v1/tokenize", messages=messages, text="", add_special=True)
        body: dict[str, Any] = {"model": "smollm2", "messages": messages, "max_tokens": 24}
        body |= {"logprobs": True, "top_logprobs": 2, "stream": stream, "stop": ["river"]} | chosen
        answer = prefill(trio, asked["ids"], f"{sampling}-{stream}-{i}", chosen)
        texts = []
        for engine, headers in (
            (decode, {"X-TL-KV-Handle": answer.handle.handle_id}),
            (unified, {}),
        ):
            response = httpx.post(engine.url + CHAT, json=body, headers=headers, timeout=120)
            assert response.status_code == 200
            assert response.headers.get("x-tl-kv-tokens") == (
                str(len(asked["ids"])) if headers else None
            )
            texts.append(comparable(response))
        assert texts[0] == texts[1]
    assert nothing_is_held(trio)


def comparable(response: httpx.Response) -> Any:
    """All of an answer that is not different for every answer."""
    import json

    if not response.headers["content-type"].startswith("text/event-stream"):
        return response.json()["choices"]
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line)["choices"] for line in lines[:-1]]
