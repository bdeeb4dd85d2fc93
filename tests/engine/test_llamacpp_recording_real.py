"""What real llama.cpp servers say is what is recorded of them, and is understood.

With $POINTSMAN_RECORD=1 the golden bytes in tests/recorded/llamacpp are recorded anew: as those of vLLM, each file
holds a request and its response, a stream without its chunk framing.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from pointsman.dialect import llamacpp
from pointsman.dialect.engines import DIALECTS
from pointsman.testing.dialects import Message, Recording, check_dialect, recordings
from pointsman.testing.llamacpp import llama_server

pytest.importorskip("xllamacpp", reason="needs the [engine] extra: pip install 'pointsman[engine]'")
pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(300)]

FOLDER = Path(__file__).resolve().parents[1] / "recorded" / "llamacpp"
LOCAL_PATH = re.compile(r"(?:/[\w.-]+)+(?=/[\w.-]+\.gguf\b)")
KEPT = ("content-type", "keep-alive")

MODEL = "smol"
LONG = " ".join(f"Line {number}: the river runs to the sea." for number in range(5))
TEXT: dict[str, Any] = {"model": MODEL, "prompt": LONG, "max_tokens": 4, "temperature": 0}
CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": f"Summarise: {LONG}"}],
    "max_tokens": 4,
    "temperature": 0,
}
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}

GETS = {
    "health": "/health",
    "models": "/v1/models",
    "metrics": "/metrics",
    "slots": "/slots",
    "props": "/props",
    "unknown_path": "/v1/nothing",
}
POSTS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "tokenize": ("/tokenize", {"content": LONG, "add_special": True, "parse_special": True}),
    "completions_cold": ("/v1/completions", TEXT),
    "completions_warm": ("/v1/completions", TEXT),
    "completions_stream": ("/v1/completions", {**TEXT, **STREAMED}),
    "completions_logprobs": ("/v1/completions", {**TEXT, "logprobs": 1}),
    "chat": ("/v1/chat/completions", CHAT),
    "chat_stream": ("/v1/chat/completions", {**CHAT, **STREAMED}),
    "messages": ("/v1/messages", CHAT),
    "messages_stream": ("/v1/messages", {**CHAT, "stream": True}),
    "messages_count_tokens": ("/v1/messages/count_tokens", CHAT),
    "responses": ("/v1/responses", {"model": MODEL, "input": "Hello", "max_output_tokens": 4}),
    "not_served_embeddings": ("/v1/embeddings", {"model": MODEL, "input": "hello"}),
    "not_served_rerank": ("/v1/rerank", {"model": MODEL, "query": "a", "documents": ["b"]}),
    "not_served_score": ("/v1/score", {"model": MODEL, "text_1": "a", "text_2": "b"}),
    "error_no_prompt": ("/v1/completions", {"model": MODEL}),
}


class Recorder:
    """Asks a server; what was said is in `said`, by the name of the exchange."""

    def __init__(self, address: str, said: dict[str, Recording]) -> None:
        # The server closes what is idle for five seconds.
        fresh = httpx.Limits(max_keepalive_connections=0)
        self._client = httpx.Client(base_url=f"http://{address}", timeout=120, limits=fresh)
        self._said = said

    def get(self, name: str, path: str) -> None:
        self._keep(name, self._client.get(path))

    def post(self, name: str, path: str, body: bytes) -> None:
        headers = {"content-type": "application/json"}
        self._keep(name, self._client.post(path, content=body, headers=headers))

    def _keep(self, name: str, answer: httpx.Response) -> None:
        sent = answer.request
        self._said[name] = Recording(
            Message(sent.content.decode(), {}, sent.method, sent.url.raw_path.decode()),
            Message(
                LOCAL_PATH.sub("/models", answer.text),
                {key: answer.headers[key] for key in KEPT if key in answer.headers},
                status=answer.status_code,
            ),
            name=name,
        )


@pytest.fixture(scope="module")
def said(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Recording]]:
    """Every exchange with two servers that share a folder, the second one telling nothing of its load."""
    folder = str(tmp_path_factory.mktemp("slots"))
    said: dict[str, Recording] = {}
    with (
        llama_server(weights, slot_folder=folder) as one,
        llama_server(weights, slot_folder=folder, introspection=False) as two,
    ):
        prefill, decode = Recorder(one, said), Recorder(two, said)
        for name, (path, body) in POSTS.items():
            prefill.post(name, path, json.dumps(body).encode())
        for name, path in GETS.items():
            prefill.get(name, path)
        decode.get("metrics_off", "/metrics")
        decode.get("slots_off", "/slots")
        for kind, path, body in (
            ("completions", "/v1/completions", TEXT),
            ("chat", "/v1/chat/completions", CHAT),
        ):
            asked, file = json.dumps(body).encode(), f"{kind}.bin"
            prefill.post(
                f"slots_{kind}_prefill", path, llamacpp.slot_prefill(path, asked, MODEL, 1)
            )
            for engine, name, call in (
                (prefill, "save", llamacpp.slot_save(1, file)),
                (decode, "restore", llamacpp.slot_restore(0, file)),
            ):
                engine.post(f"slots_{kind}_{name}", call[0].decode(), call[1])
            resumed = json.dumps({**body, "id_slot": 0, "cache_prompt": True}).encode()
            decode.post(f"slots_{kind}_decode", path, resumed)
        path_of, empty = llamacpp.slot_erase(0)
        decode.post("slots_erase", path_of.decode(), empty)
        path_of, missing = llamacpp.slot_restore(0, "nothing.bin")
        decode.post("slots_restore_missing", path_of.decode(), missing)
    if os.environ.get("POINTSMAN_RECORD"):
        write(said)
    yield said


def write(said: Mapping[str, Recording]) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, exchange in said.items():
        request, response = exchange.request, exchange.response
        kept = {
            "request": {"method": request.method, "path": request.path, "headers": {}}
            | {"body": request.body},
            "response": {"status": response.status, "headers": response.headers}
            | {"body": response.body},
        }
        text = json.dumps(kept, indent=1, ensure_ascii=False) + "\n"
        (FOLDER / f"{name}.json").write_text(text, encoding="utf-8")


def test_its_dialect_understands_it(said: dict[str, Recording]) -> None:
    check_dialect(DIALECTS["llamacpp"], list(said.values()))


def test_it_says_what_is_recorded(said: dict[str, Recording]) -> None:
    recorded = {recording.name: recording for recording in recordings(FOLDER)}
    assert recorded.keys() == said.keys()
    for name, exchange in said.items():
        kept = recorded[name]
        assert exchange.request == without_headers(kept.request), name
        assert exchange.response.status == kept.response.status, name
        assert shape(exchange.response.body) == shape(kept.response.body), name


def without_headers(message: Message) -> Message:
    return Message(message.body, {}, message.method, message.path)


def shape(body: str) -> object:
    """Return the keys of a JSON answer, or the names of metrics: what values do not change."""
    try:
        answer = json.loads(body)
    except ValueError:
        return sorted(set(re.findall(r"^(?:data: \[DONE\]|\w+:\w+)", body, re.MULTILINE)))
    return sorted(answer) if isinstance(answer, dict) else len(answer)


@pytest.mark.parametrize("kind", ["completions", "chat"])
def test_p19_a_prompt_that_was_handed_over_is_not_computed_again(
    said: dict[str, Recording], kind: str
) -> None:
    saved, restored, answer = (
        said[f"slots_{kind}_{name}"].response.body.encode()
        for name in ("save", "restore", "decode")
    )
    tokens = llamacpp.slot_tokens(saved)
    assert llamacpp.slot_tokens(restored) == tokens > 40
    assert DIALECTS["llamacpp"].cached_tokens(answer) == tokens - 1
