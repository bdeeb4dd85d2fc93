"""The clients that people have, unchanged, through a gateway in front of a real llama.cpp server.

Each of openai, anthropic, LangChain's ChatOpenAI and curl: whole and streamed, with a tool, and with a picture. The
model has no eyes and calls no tools, so those go to an engine that writes down what it gets, and says what a real vLLM
said.
"""

import asyncio
import base64
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pointsman.domain.routes import Backend, Route
from pointsman.domain.worker import Worker
from pointsman.engine.weights import cache_folder, default_weights
from pointsman.testing.gateways import running
from pointsman.testing.llamacpp import llama_server
from pointsman.testing.origin import (
    Conversation,
    Origin,
    Script,
    answers,
    json_answer,
    sse_chunk,
    sse_head,
)

anthropic = pytest.importorskip("anthropic", reason="needs the extra `dev`")
openai = pytest.importorskip("openai", reason="needs the extra `dev`")
langchain_openai = pytest.importorskip("langchain_openai", reason="needs the extra `dev`")
pytest.importorskip("xllamacpp", reason="needs the extra `engine`")
pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

RECORDED = Path(__file__).parent.parent / "recorded" / "vllm"
QUESTION = "What is the weather in Paris?"
MODEL = "public"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"name": "weather", "description": "Tells the weather of a city.", "parameters": CITY}
CHAT_TOOL = {"type": "function", "function": TOOL}
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
PICTURE = base64.b64encode(PNG).decode()
PICTURE_URL = f"data:image/png;base64,{PICTURE}"

CHAT_ANSWER = {
    "id": "1",
    "object": "chat.completion",
    "created": 0,
    "model": "eyes",
    "choices": [
        {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": "A dot."},
        }
    ],
}
MESSAGE_ANSWER = {
    "id": "1",
    "type": "message",
    "role": "assistant",
    "model": "eyes",
    "content": [{"type": "text", "text": "A dot."}],
    "stop_reason": "end_turn",
    "usage": {"input_tokens": 1, "output_tokens": 1},
}
RESPONSE_ANSWER = {
    "id": "1",
    "object": "response",
    "created_at": 0,
    "model": "eyes",
    "status": "completed",
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
    "output": [
        {
            "id": "2",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "A dot.", "annotations": []}],
        }
    ],
}


class Served:
    """A gateway in a thread: `url` leads to it, and `seen` are the bodies that the engine with eyes got."""

    def __init__(self, engine: str, eyes: Script) -> None:
        self._engine = engine
        self._origin = Origin(eyes)
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._over = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(),))
        self.url = ""

    def __enter__(self) -> "Served":
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(60)
        self._loop.close()

    @property
    def seen(self) -> dict[str, Any]:
        """What the engine with eyes was asked last."""
        seen: dict[str, Any] = json.loads(self._origin.requests[-1].body)
        return seen

    async def _run(self) -> None:
        routes = (
            Route(model=MODEL, backends=(Backend(model="smol"),)),
            Route(model="seeing", backends=(Backend(model="eyes"),)),
        )
        options: dict[str, Any] = {"routes": routes, "response_model": "public"}
        async with (
            self._origin as origin,
            running({"llama": self._engine}, model="smol", **options) as gateway,
        ):
            gateway.registry.add(Worker("eyes", model="eyes", http_address=origin.address))
            host, port = gateway.address
            self.url = f"http://{host}:{port}"
            self._ready.set()
            await self._over.wait()


@pytest.fixture(scope="module")
def llama() -> Iterator[str]:
    weights = default_weights(cache_folder(os.environ), Console(quiet=True))
    with llama_server(weights) as address:
        yield address


@pytest.fixture
def served(llama: str) -> Iterator[Served]:
    with Served(llama, answers(CHAT_ANSWER)) as gateway:
        yield gateway


@pytest.fixture
def messages(llama: str) -> Iterator[Served]:
    with Served(llama, answers(MESSAGE_ANSWER)) as gateway:
        yield gateway


@pytest.fixture
def responses(llama: str) -> Iterator[Served]:
    with Served(llama, answers(RESPONSE_ANSWER)) as gateway:
        yield gateway


async def recorded(talk: Conversation) -> None:
    """Say what a real vLLM said when it had to call a tool, but for the arguments: its model was too small for them."""
    stream = json.loads(talk.request.body).get("stream")
    name = "chat_tool_forced_stream" if stream else "chat_tool_forced"
    said = json.loads((RECORDED / f"{name}.json").read_text())["response"]["body"].encode()
    said = said.replace(rb'"\"french\""', rb'"{\"city\":\"Paris\"}"')
    await talk.send(sse_head() + sse_chunk(said) + b"0\r\n\r\n" if stream else json_answer(said))


@pytest.fixture
def calling(llama: str) -> Iterator[Served]:
    with Served(llama, recorded) as gateway:
        yield gateway


def chat(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


# openai


def an_openai(gateway: Served) -> Any:
    return openai.OpenAI(base_url=gateway.url + "/v1", api_key="none", max_retries=0)


def test_openai_streamed_and_not(served: Served) -> None:
    with an_openai(served) as client:
        asked = {"model": MODEL, "messages": chat(QUESTION), "max_tokens": 8, "temperature": 0}
        whole = client.chat.completions.create(**asked)
        chunks = list(client.chat.completions.create(**asked, stream=True))
        assert whole.model == chunks[0].model == MODEL
        assert whole.choices[0].message.content == "".join(
            chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices
        )
        assert [model.id for model in client.models.list()] == ["eyes", MODEL, "seeing", "smol"]


def test_openai_calls_a_tool_streamed_and_not(calling: Served) -> None:
    with an_openai(calling) as client:
        asked = {"messages": chat(QUESTION), "tools": [CHAT_TOOL], "tool_choice": "required"}
        whole = client.chat.completions.create(model="seeing", **asked)
        (call,) = whole.choices[0].message.tool_calls
        assert (whole.model, call.function.name) == ("seeing", "weather")
        assert calling.seen["tools"] == [CHAT_TOOL]
        deltas = [
            part.function
            for chunk in client.chat.completions.create(model="seeing", **asked, stream=True)
            for choice in chunk.choices
            for part in choice.delta.tool_calls or ()
        ]
        assert "".join(delta.name or "" for delta in deltas) == "weather"
        assert json.loads("".join(delta.arguments or "" for delta in deltas))
        # And the real engine takes them.
        assert client.chat.completions.create(model=MODEL, max_tokens=4, **asked).model == MODEL


def test_openai_shows_a_picture(served: Served) -> None:
    part = {"type": "image_url", "image_url": {"url": PICTURE_URL}}
    with an_openai(served) as client:
        seen = [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, part]}]
        answer = client.chat.completions.create(model="seeing", messages=seen)
        assert (answer.model, answer.choices[0].message.content) == ("seeing", "A dot.")
        assert (served.seen["model"], served.seen["messages"]) == ("eyes", seen)
        # An engine without eyes says so, and its word arrives.
        with pytest.raises(openai.APIStatusError, match="image input is not supported"):
            client.chat.completions.create(model=MODEL, messages=seen)


def test_openai_responses_streamed_and_not(responses: Served) -> None:
    with an_openai(responses) as client:
        asked = {"model": MODEL, "input": QUESTION, "max_output_tokens": 8, "temperature": 0}
        whole = client.responses.create(**asked)
        events = list(client.responses.create(**asked, stream=True))
        # Not every event names it, with every engine.
        assert {whole.model, events[-1].response.model} == {MODEL}
        said = [e.delta for e in events if e.type == "response.output_text.delta"]
        assert whole.output_text == "".join(said)
        part = {"type": "input_image", "image_url": PICTURE_URL, "detail": "auto"}
        seen = [{"role": "user", "content": [{"type": "input_text", "text": "What?"}, part]}]
        assert client.responses.create(model="seeing", input=seen).output_text == "A dot."
        assert responses.seen["input"] == seen


def test_openai_responses_carry_a_tool(responses: Served) -> None:
    tool = {"type": "function", "strict": False, **TOOL}
    with an_openai(responses) as client:
        asked = {"input": QUESTION, "tools": [tool], "tool_choice": "required"}
        assert client.responses.create(model="seeing", **asked).output_text == "A dot."
        assert responses.seen["tools"] == [tool]
        answer = client.responses.create(model=MODEL, max_output_tokens=4, **asked)
        assert answer.model == MODEL


def test_openai_is_told_which_engines_lack_a_path(served: Served) -> None:
    with an_openai(served) as client, pytest.raises(openai.NotFoundError) as missing:
        client.embeddings.create(model=MODEL, input="x")
    assert missing.value.code == "unsupported_endpoint"
    assert "serves /v1/embeddings: llama" in missing.value.message
    with an_openai(served) as client, pytest.raises(openai.NotFoundError) as missing:
        client.audio.transcriptions.create(model=MODEL, file=("a.wav", b"RIFF\r\n--"))
    assert missing.value.code == "unsupported_endpoint"


# anthropic


def an_anthropic(gateway: Served) -> Any:
    return anthropic.Anthropic(base_url=gateway.url, api_key="none", max_retries=0)


def test_anthropic_streamed_and_not(messages: Served) -> None:
    with an_anthropic(messages) as client:
        asked = {"model": MODEL, "messages": chat(QUESTION), "max_tokens": 8}
        asked["system"] = [{"type": "text", "text": "Be brief."}]
        asked["extra_body"] = {"temperature": 0}
        whole = client.messages.create(**asked)
        assert whole.model == MODEL
        with client.messages.stream(**asked) as stream:
            text = "".join(stream.text_stream)
            assert stream.get_final_message().model == MODEL
        assert whole.content[0].text == text
        del asked["max_tokens"], asked["extra_body"]
        assert client.messages.count_tokens(**asked).input_tokens > 8


def test_anthropic_carries_a_tool_streamed_and_not(messages: Served) -> None:
    tool = {"name": "weather", "description": "Tells the weather.", "input_schema": CITY}
    with an_anthropic(messages) as client:
        asked = {"messages": chat(QUESTION), "max_tokens": 4, "tools": [tool]}
        asked["tool_choice"] = {"type": "any"}
        assert client.messages.create(model="seeing", **asked).content[0].text == "A dot."
        assert messages.seen["tools"] == [tool]
        assert client.messages.create(model=MODEL, **asked).model == MODEL
        with client.messages.stream(model=MODEL, **asked) as stream:
            assert stream.get_final_message().model == MODEL


def test_anthropic_shows_a_picture(messages: Served) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": PICTURE}
    seen = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    with an_anthropic(messages) as client:
        answer = client.messages.create(model="seeing", messages=seen, max_tokens=8)
    assert (answer.model, answer.content[0].text) == ("seeing", "A dot.")
    assert (messages.seen["model"], messages.seen["messages"]) == ("eyes", seen)


def test_anthropic_reads_our_errors_and_models(messages: Served) -> None:
    with an_anthropic(messages) as client:
        with pytest.raises(anthropic.NotFoundError) as missing:
            client.messages.create(model="none", messages=chat("x"), max_tokens=1)
        told = missing.value.body
        assert told["type"] == "error"
        assert (told["error"]["type"], told["error"]["code"]) == (
            "not_found_error",
            "model_not_found",
        )
        listed = list(client.models.list())
        assert [model.id for model in listed] == ["eyes", MODEL, "seeing", "smol"]
        assert {model.type for model in listed} == {"model"}
        assert client.models.retrieve(MODEL).display_name == MODEL


# LangChain


def a_langchain(gateway: Served, model: str = MODEL) -> Any:
    return langchain_openai.ChatOpenAI(
        base_url=gateway.url + "/v1",
        api_key="none",
        model=model,
        max_tokens=8,
        temperature=0,
        max_retries=0,
    )


def test_langchain_streamed_and_not(served: Served) -> None:
    client = a_langchain(served)
    whole = client.invoke(QUESTION)
    assert whole.response_metadata["model_name"] == MODEL
    assert whole.content == "".join(chunk.content for chunk in client.stream(QUESTION))


def test_langchain_calls_a_tool(calling: Served) -> None:
    client = a_langchain(calling, "seeing").bind_tools([CHAT_TOOL], tool_choice="required")
    whole = client.invoke(QUESTION)
    assert [call["name"] for call in whole.tool_calls] == ["weather"]
    streamed = None
    for chunk in client.stream(QUESTION):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed is not None
    assert [call["name"] for call in streamed.tool_call_chunks] == ["weather"]
    assert calling.seen["tools"] == [CHAT_TOOL]


def test_langchain_shows_a_picture(served: Served) -> None:
    part = {"type": "image_url", "image_url": {"url": PICTURE_URL}}
    seen = [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, part]}]
    assert a_langchain(served, "seeing").invoke(seen).content == "A dot."
    assert served.seen["messages"][0]["content"][1]["image_url"]["url"] == PICTURE_URL


# curl


def curl(gateway: Served, path: str, *arguments: str) -> str:
    program = shutil.which("curl")
    if program is None:
        pytest.skip("there is no curl")
    command = [program, "--silent", "--show-error", "--no-buffer", *arguments, gateway.url + path]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def sent(body: object) -> tuple[str, ...]:
    return ("--header", "content-type: application/json", "--data", json.dumps(body))


def test_curl_streamed_and_not(served: Served) -> None:
    asked = {"model": MODEL, "messages": chat(QUESTION), "max_tokens": 8, "temperature": 0}
    whole = json.loads(curl(served, "/v1/chat/completions", *sent(asked)))
    assert whole["model"] == MODEL
    said = curl(served, "/v1/chat/completions", *sent(asked | {"stream": True}))
    events = [line[6:] for line in said.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    assert whole["choices"][0]["message"]["content"] == "".join(
        json.loads(each)["choices"][0]["delta"].get("content") or "" for each in events[:-1]
    )


def test_curl_calls_a_tool(calling: Served) -> None:
    asked = {"model": "seeing", "messages": chat(QUESTION), "tools": [CHAT_TOOL]}
    whole = json.loads(curl(calling, "/v1/chat/completions", *sent(asked)))
    assert whole["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "weather"
    assert calling.seen == asked | {"model": "eyes"}
    said = curl(calling, "/v1/chat/completions", *sent(asked | {"stream": True}))
    assert '"name":"weather"' in said
    assert said.endswith("data: [DONE]\n\n")


def test_curl_shows_a_picture(served: Served) -> None:
    part = {"type": "image_url", "image_url": {"url": PICTURE_URL}}
    asked = {"model": "seeing", "messages": [{"role": "user", "content": [part]}]}
    assert json.loads(curl(served, "/v1/chat/completions", *sent(asked)))["model"] == "seeing"
    assert served.seen == asked | {"model": "eyes"}


def test_curl_sends_a_form(served: Served, tmp_path: Path) -> None:
    audio = tmp_path / "a.wav"
    audio.write_bytes(b"RIFF\x00\r\n--\xff")
    fields = ("--form", f"file=@{audio}", "--form", "model=seeing", "--form", "stream=false")
    assert json.loads(curl(served, "/v1/audio/transcriptions", *fields))["model"] == "seeing"
    body = served._origin.requests[-1].body
    assert b'name="model"\r\n\r\neyes\r\n--' in body
    assert audio.read_bytes() in body
