"""The real model, over loopback: what fakes cannot promise."""

import asyncio
import ctypes
import json
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from pointsman.engine import llama

pytest.importorskip("xllamacpp", reason="needs the [engine] extra: pip install 'pointsman[engine]'")
pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(300)]

HELLO: Any = [{"role": "user", "content": "Write one sentence about rivers."}]


@pytest.fixture(scope="module")
def engine(launch: Any) -> Iterator[Any]:
    process = launch("--context", "4096", "--parallel", "8")
    yield process
    assert process.stop() == 0


def tokens(engine: Any, prompt: str, seed: int, count: int = 24) -> list[tuple[str, float]]:
    """Tokens with their log-probabilities: equal only where the logits are equal to the last bit."""
    answer = engine.post(
        "/v1/completions", prompt=prompt, seed=seed, max_tokens=count, temperature=0.9, logprobs=0
    )
    logprobs = answer["choices"][0]["logprobs"]
    return list(zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True))


PROMPTS = [f"{n} brothers went to sea. " + "They sailed and sailed. " * n for n in range(1, 22, 4)]


def test_equal_seeds_give_bit_equal_answers_alone_among_others_and_from_the_cache(
    engine: Any,
) -> None:
    alone = [tokens(engine, prompt, seed) for seed, prompt in enumerate(PROMPTS)]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        jobs = [pool.submit(tokens, engine, prompt, seed) for seed, prompt in enumerate(PROMPTS)]
        assert [job.result() for job in jobs] == alone


def test_rows_of_a_decode_batch_are_bit_equal_to_rows_computed_alone(weights: Path) -> None:
    with (
        llama.Model(llama.load_library(), weights) as model,
        llama.Context(model, context=512, sequences=4) as context,
    ):
        lengths = (3, 40, 100, 290)

        def prefill(sequence: int, length: int) -> None:
            for start in range(0, length, 32):
                end = min(start + 32, length)
                context.decode(
                    [llama.Row(sequence, i, 50 + 7 * i, False) for i in range(start, end)]
                )

        alone = []
        for length in lengths:
            context.forget(0)
            prefill(0, length)
            alone.append(context.decode([llama.Row(0, length, 99, True)])[0])
        context.forget(0)
        for sequence, length in enumerate(lengths):
            prefill(sequence, length)
        rows = [llama.Row(i, length, 99, True) for i, length in enumerate(lengths)]
        together = context.decode(rows)
        assert all((a == b).all() for a, b in zip(together, alone, strict=True))


def test_an_exported_sequence_goes_on_bit_equally_elsewhere(weights: Path) -> None:
    with llama.Model(llama.load_library(), weights) as model:
        options: Any = {"context": 256, "sequences": 2}
        with llama.Context(model, **options) as here, llama.Context(model, **options) as there:
            here.decode([llama.Row(0, i, 60 + i, False) for i in range(20)])
            state = here.export(0)
            there.load(1, state)
            here.copy(0, 1)
            next_here = here.decode([llama.Row(1, 20, 7, True)])
            assert (next_here == there.decode([llama.Row(1, 20, 7, True)])).all()
            with pytest.raises(llama.LlamaError):
                there.load(0, state[: len(state) // 2])


def test_a_library_of_another_layout_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(llama._CONTEXT_DEFAULTS, "n_batch", 4096)
    with pytest.raises(llama.LayoutChanged, match="n_batch = 2048"):
        llama.load_library()
    monkeypatch.setitem(llama._PROTOTYPES, "llama_from_the_future", (ctypes.c_int, ()))
    with pytest.raises(llama.LayoutChanged, match="llama_from_the_future"):
        llama.load_library()


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF nonsense")
    with pytest.raises(llama.LlamaError, match="cannot load"):
        llama.Model(llama.load_library(), tmp_path / "x.gguf")


def test_a_batch_over_its_size_and_a_gap_in_positions_are_errors(weights: Path) -> None:
    with (
        llama.Model(llama.load_library(), weights) as model,
        llama.Context(model, context=256, sequences=1, batch=8) as context,
    ):
        with pytest.raises(ValueError, match="1 to 8 rows"):
            context.decode([llama.Row(0, i, 1, False) for i in range(9)])
        context.decode([llama.Row(0, 0, 1, False)])
        with pytest.raises(llama.LlamaError, match="llama_decode"):
            context.decode([llama.Row(0, 5, 1, False)])


def test_streamed_and_whole_answers_are_equal(engine: Any) -> None:
    body = {"messages": HELLO, "seed": 11, "max_tokens": 32}
    whole = engine.post("/v1/chat/completions", **body)["choices"][0]
    response = httpx.post(
        engine.url + "/v1/chat/completions",
        json={"model": "smollm2", "stream": True, **body},
        timeout=120,
    )
    chunks = [
        json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")
    ]
    deltas = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert "".join(deltas) == whole["message"]["content"]
    assert chunks[-1]["choices"][0]["finish_reason"] == whole["finish_reason"]


def test_the_model_knows_the_capital_of_france(engine: Any) -> None:
    messages = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "What is the capital of France?"},
    ]
    answer = engine.post("/v1/chat/completions", messages=messages, temperature=0)
    assert answer["choices"][0]["message"]["content"] == "The capital of France is Paris."
    assert answer["choices"][0]["finish_reason"] == "stop"
    ids = engine.post("/v1/tokenize", messages=messages)["ids"]
    assert answer["usage"]["prompt_tokens"] == len(ids)
    asked = engine.post("/v1/completions", prompt=ids, temperature=0)
    assert asked["choices"][0]["text"] == "The capital of France is Paris."


def test_stop_and_a_repeated_prompt(engine: Any) -> None:
    body: dict[str, Any] = {
        "prompt": "Count: one, two, three, four, " * 6,
        "temperature": 0,
        "max_tokens": 12,
    }
    text = engine.post("/v1/completions", **body)["choices"][0]["text"]
    stop = text[5:8]
    again = engine.post("/v1/completions", stop=[stop], **body)
    assert again["choices"][0]["text"] == text[: text.index(stop)]
    assert again["choices"][0]["finish_reason"] == "stop"
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 32


def test_closing_the_connection_frees_the_slot_within_a_second(engine: Any) -> None:
    # With the template's own system prompt the model goes round in circles until the context is full.
    question = [{"role": "user", "content": "What is the capital of France?"}]
    body = {"model": "smollm2", "messages": question, "stream": True, "temperature": 0}
    with httpx.stream(
        "POST", engine.url + "/v1/chat/completions", json=body, timeout=60
    ) as response:
        # Kept in a variable: collecting a line iterator would close the connection.
        lines = response.iter_lines()
        next(lines)
        assert engine.running() == 1
    deadline = time.monotonic() + 1.0
    while engine.running():
        assert time.monotonic() < deadline


def test_the_openai_sdk_talks_to_the_real_engine(engine: Any) -> None:
    async def main() -> None:
        async with openai.AsyncOpenAI(
            base_url=engine.url + "/v1", api_key="-", max_retries=0
        ) as sdk:
            assert [model.id async for model in sdk.models.list()] == ["smollm2"]
            chat = await sdk.chat.completions.create(
                model="smollm2", messages=HELLO, max_tokens=8, logprobs=True, top_logprobs=2
            )
            assert chat.usage is not None
            assert chat.choices[0].logprobs is not None
            entries = chat.choices[0].logprobs.content or []
            text = b"".join(bytes(entry.bytes or []) for entry in entries).decode(
                "utf-8", "replace"
            )
            assert text == chat.choices[0].message.content
            assert all(entry.logprob <= 0 and len(entry.top_logprobs) == 2 for entry in entries)
            stream = await sdk.chat.completions.create(
                model="smollm2",
                messages=HELLO,
                max_tokens=8,
                stream=True,
                stream_options={"include_usage": True},
            )
            chunks = [chunk async for chunk in stream]
            assert chunks[-1].usage is not None
            assert chunks[-1].usage.completion_tokens <= 8
            plain = await sdk.completions.create(model="smollm2", prompt="Once", max_tokens=4)
            assert plain.usage is not None
            assert (
                plain.usage.total_tokens
                == plain.usage.prompt_tokens + plain.usage.completion_tokens
            )

    asyncio.run(main())


def test_sigterm_lets_a_running_answer_end_refuses_new_ones_and_exits_0(launch: Any) -> None:
    engine = launch("--context", "2048", "--parallel", "2")
    said: queue.Queue[str | None] = queue.Queue()

    def listen() -> None:
        body = {"model": "smollm2", "prompt": "Once", "max_tokens": 120, "stream": True, "seed": 1}
        with httpx.stream(
            "POST", engine.url + "/v1/completions", json=body, timeout=60
        ) as response:
            for line in response.iter_lines():
                said.put(line)
        said.put(None)

    listener = threading.Thread(target=listen)
    listener.start()
    first = said.get(timeout=30)
    assert first is not None
    assert first.startswith("data: {")
    engine.process.send_signal(signal.SIGTERM)
    while httpx.get(engine.url + "/health").status_code != 503:
        pass
    refused = httpx.post(engine.url + "/v1/completions", json={"model": "smollm2", "prompt": "a"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_capacity")
    listener.join()
    lines = [line for line in iter(said.get, None) if line]
    assert lines[-1] == "data: [DONE]"
    assert engine.stop() == 0


def test_the_drain_deadline_ends_what_does_not_end_itself(launch: Any) -> None:
    engine = launch("--drain-deadline", "0")
    body = {
        "model": "smollm2",
        "prompt": "Once",
        "max_tokens": 1000,
        "stream": True,
        "temperature": 1.9,
        "seed": 1,
    }
    with httpx.stream("POST", engine.url + "/v1/completions", json=body, timeout=60) as response:
        lines = (line for line in response.iter_lines() if line)
        next(lines)
        engine.process.send_signal(signal.SIGTERM)
        *_, last = lines
    assert json.loads(last[6:])["error"]["code"] == "no_capacity"
    assert engine.stop() == 0


def test_a_port_that_is_taken_and_a_model_that_is_missing_exit_2(tmp_path: Path) -> None:
    def start(*options: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "pointsman.engine", *options]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60)
        return result.returncode, result.stderr

    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, message = start("--listen", f"127.0.0.1:{taken.getsockname()[1]}")
        assert (code, "in use" in message) == (2, True)
    code, message = start("--listen", "127.0.0.1:0", "--model", str(tmp_path / "none.gguf"))
    assert (code, "cannot load" in message) == (2, True)
    code, message = start("--listen", "nowhere")
    assert (code, "host:port" in message) == (2, True)
    code, message = start("--listen", "127.0.0.1:0", "--role", "king")
    assert (code, "unified, prefill, decode" in message) == (2, True)
