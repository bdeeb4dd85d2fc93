"""The openai SDK in front of the gateway over two real engines, with nothing changed but `base_url`."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

pytest.importorskip("xllamacpp", reason="needs the [engine] extra: pip install 'pointsman[engine]'")
pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

MESSAGES: list[ChatCompletionMessageParam] = [
    {"role": "user", "content": "Tell me a story about a lighthouse."}
]


@pytest.fixture(scope="module")
def client() -> Iterator[OpenAI]:
    """A client of `pointsman demo`: a gateway and two engines, on free ports."""
    command = [sys.executable, "-u", "-m", "pointsman", "demo", "--port", "0"]
    environment = os.environ | {"COLUMNS": "200"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, cwd=Path(__file__).parent
    )
    assert process.stdout is not None
    url = ""
    for line in process.stdout:
        if "base_url=" in line:
            url = line.split('"')[1]
            break
    # The live table goes on being drawn: somebody has to read it.
    reader = threading.Thread(target=process.stdout.read)
    reader.start()
    with OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client
    process.terminate()
    assert process.wait(30) == 0
    reader.join()
    process.stdout.close()


def ask(client: OpenAI, seed: int = 1) -> str:
    answer = client.chat.completions.create(
        model="smollm2", messages=MESSAGES, max_tokens=12, temperature=0.8, seed=seed
    )
    return answer.choices[0].message.content or ""


def test_chat(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="smollm2", messages=MESSAGES, max_tokens=12, temperature=0, logprobs=True
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12
    assert choice.logprobs is not None
    assert len(choice.logprobs.content or []) == 12


def test_stream_equals_plain(client: OpenAI) -> None:
    plain = client.chat.completions.create(
        model="smollm2", messages=MESSAGES, max_tokens=24, temperature=0
    )
    stream = client.chat.completions.create(
        model="smollm2",
        messages=MESSAGES,
        max_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == plain.choices[0].message.content
    usage = [chunk.usage for chunk in chunks if chunk.usage is not None]
    assert [each.completion_tokens for each in usage] == [24]


def test_completions(client: OpenAI) -> None:
    plain = client.completions.create(
        model="smollm2", prompt="Once upon a time", max_tokens=8, temperature=0
    )
    stream = client.completions.create(
        model="smollm2", prompt="Once upon a time", max_tokens=8, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == plain.choices[0].text


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["smollm2"]
    assert client.models.retrieve("smollm2").id == "smollm2"


def test_errors(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="no-such-model", messages=MESSAGES)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("no-such-model")
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="smollm2", messages=MESSAGES, temperature=-1)
    assert bad.value.param == "temperature"


def test_fifty_at_once(client: OpenAI) -> None:
    alone = {seed: ask(client, seed) for seed in range(5)}
    with ThreadPoolExecutor(50) as threads:
        texts = list(threads.map(lambda number: ask(client, number % 5), range(50)))
    assert texts == [alone[number % 5] for number in range(50)]
    assert len(set(texts)) > 1


def test_a_stream_that_its_reader_leaves_frees_the_engine(client: OpenAI) -> None:
    for _ in range(20):  # far more than the engines have places for
        stream = client.chat.completions.create(
            model="smollm2", messages=MESSAGES, max_tokens=900, temperature=0, stream=True
        )
        next(iter(stream))
        stream.close()
    assert ask(client)
