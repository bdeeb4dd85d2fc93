"""Records conversations with real vLLM as golden bytes: one JSON file for each exchange, in tests/recorded/vllm.

    POINTSMAN_RECORD=1 make interop

Each file holds a request (method, path, headers, body) and its response (status, headers, body as text, a stream
without its chunk framing). Folders of the machine are taken out; ids, times and engine ids stay as they were said.
"""

import json
import re
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

FOLDER = Path(__file__).resolve().parents[1] / "recorded" / "vllm"
SENT = ("content-type", "x-request-id", "authorization")
ANSWERED = ("content-type", "content-length", "transfer-encoding", "x-request-id", "allow")
LOCAL_PATH = re.compile(r"(?:/[\w.-]+)+(?=/smollm2\b)")

MODEL = "smollm2"
CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "What is the capital of France?"},
    ],
    "max_tokens": 8,
    "temperature": 0,
}
TEXT: dict[str, Any] = {
    "model": MODEL,
    "prompt": "The capital of France is",
    "max_tokens": 6,
    "temperature": 0,
}
LONG = {**TEXT, "prompt": " ".join(f"Line {i}: the river runs to the sea." for i in range(12))}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
ASKED_OF_P = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
SYSTEM = {"system": "Be brief."}

GETS = {
    "health": "/health",
    "models": "/v1/models",
    "version": "/version",
    "load": "/load",
    "metrics_idle": "/metrics",
    "unknown_path": "/v1/nothing",
    "method_not_allowed": "/v1/chat/completions",
}
POSTS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "tokenize_prompt": ("/tokenize", {"model": MODEL, "prompt": TEXT["prompt"]}),
    "tokenize_messages": ("/tokenize", {"model": MODEL, "messages": CHAT["messages"]}),
    "tokenize_tools": (
        "/tokenize",
        {"model": MODEL, "messages": CHAT["messages"], "tools": [TOOL]},
    ),
    "detokenize": ("/detokenize", {"model": MODEL, "tokens": [504, 3575, 282]}),
    "chat": ("/v1/chat/completions", CHAT),
    "chat_stream": ("/v1/chat/completions", {**CHAT, **STREAMED}),
    "chat_stream_no_usage": ("/v1/chat/completions", {**CHAT, "stream": True}),
    "chat_logprobs": ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2}),
    "chat_logprobs_stream": (
        "/v1/chat/completions",
        {**CHAT, **STREAMED, "logprobs": True, "top_logprobs": 1},
    ),
    "chat_two": ("/v1/chat/completions", {**CHAT, "n": 2, "temperature": 0.9, "seed": 7}),
    "chat_token_ids": ("/v1/chat/completions", {**CHAT, "return_token_ids": True}),
    "chat_tools": (
        "/v1/chat/completions",
        {**CHAT, "tools": [TOOL], "tool_choice": "auto"},
    ),
    "chat_tool_forced": (
        "/v1/chat/completions",
        {
            **CHAT,
            "max_tokens": 60,
            "tools": [TOOL],
            "tool_choice": {"type": "function", "function": {"name": "weather"}},
        },
    ),
    "chat_tool_forced_stream": (
        "/v1/chat/completions",
        {
            **CHAT,
            **STREAMED,
            "max_tokens": 60,
            "tools": [TOOL],
            "tool_choice": {"type": "function", "function": {"name": "weather"}},
        },
    ),
    "completions": ("/v1/completions", TEXT),
    "completions_stream": ("/v1/completions", {**TEXT, **STREAMED}),
    "completions_logprobs": ("/v1/completions", {**TEXT, "logprobs": 2}),
    "completions_logprobs_stream": ("/v1/completions", {**TEXT, **STREAMED, "logprobs": 1}),
    "completions_ids": ("/v1/completions", {**TEXT, "prompt": [504, 3575, 282, 4649, 314]}),
    "completions_cold": ("/v1/completions", LONG),
    "completions_warm": ("/v1/completions", LONG),
    "error_bad_value": ("/v1/chat/completions", {**CHAT, "temperature": -1}),
    "error_missing_field": ("/v1/chat/completions", {"model": MODEL}),
    "error_unknown_model": ("/v1/chat/completions", {**CHAT, "model": "nobody"}),
    "error_too_long": ("/v1/completions", {**TEXT, "prompt": "word " * 1100}),
    "error_max_tokens_too_long": ("/v1/completions", {**TEXT, "max_tokens": 4000}),
    "error_stream_bad_value": ("/v1/chat/completions", {**CHAT, **STREAMED, "temperature": -1}),
    "responses": ("/v1/responses", {"model": MODEL, "input": "Say hello.", "max_output_tokens": 8}),
    "responses_stream": (
        "/v1/responses",
        {"model": MODEL, "input": "Say hello.", "max_output_tokens": 8, "stream": True},
    ),
    "messages": (
        "/v1/messages",
        {"model": MODEL, "max_tokens": 8, **SYSTEM, "messages": CHAT["messages"][1:]},
    ),
    "messages_stream": (
        "/v1/messages",
        {
            "model": MODEL,
            "max_tokens": 8,
            **SYSTEM,
            "messages": CHAT["messages"][1:],
            "stream": True,
        },
    ),
    "messages_error": (
        "/v1/messages",
        {"model": "nobody", "max_tokens": 8, "messages": CHAT["messages"][1:]},
    ),
    "messages_count_tokens": (
        "/v1/messages/count_tokens",
        {"model": MODEL, **SYSTEM, "messages": CHAT["messages"][1:]},
    ),
    "not_served_embeddings": ("/v1/embeddings", {"model": MODEL, "input": "hello"}),
    "not_served_rerank": (
        "/v1/rerank",
        {"model": MODEL, "query": "hello", "documents": ["a", "b"]},
    ),
    "not_served_score": ("/v1/score", {"model": MODEL, "text_1": "a", "text_2": "b"}),
    "not_served_speech": ("/v1/audio/transcriptions", {"model": MODEL}),
}


class Recorder:
    """One connection to an engine; each exchange becomes a file, and is returned."""

    def __init__(self, base: str) -> None:
        self._client = httpx.Client(base_url=base, timeout=300)

    def get(self, name: str, path: str) -> httpx.Response:
        return self._keep(name, self._client.get(path))

    def post(self, name: str, path: str, body: Mapping[str, Any], **headers: str) -> httpx.Response:
        sent = {key.replace("_", "-"): value for key, value in headers.items()}
        return self._keep(name, self._client.post(path, json=dict(body), headers=sent))

    def _keep(self, name: str, answer: httpx.Response) -> httpx.Response:
        request = answer.request
        exchange = {
            "request": {
                "method": request.method,
                "path": request.url.raw_path.decode(),
                "headers": {key: request.headers[key] for key in SENT if key in request.headers},
                "body": request.content.decode(),
            },
            "response": {
                "status": answer.status_code,
                "headers": {key: answer.headers[key] for key in ANSWERED if key in answer.headers},
                "body": LOCAL_PATH.sub("/models", answer.text),
            },
        }
        text = json.dumps(exchange, indent=1, ensure_ascii=False) + "\n"
        FOLDER.mkdir(parents=True, exist_ok=True)
        (FOLDER / f"{name}.json").write_text(text, encoding="utf-8")
        return answer


def record_surface(engine: Recorder) -> None:
    """What one engine answers on its own."""
    for name, path in GETS.items():
        engine.get(name, path)
    for name, (path, body) in POSTS.items():
        engine.post(name, path, body)
    engine.post("chat_request_id", "/v1/chat/completions", CHAT, x_request_id="req-1")


def record_load(engine: Recorder, base: str) -> None:
    """Its metrics while more is asked than it runs at once (--max-num-seqs 8)."""
    body = {**LONG, "max_tokens": 120, "ignore_eos": True}
    asks = [
        threading.Thread(
            target=httpx.post,
            args=(f"{base}/v1/completions",),
            kwargs={"json": {**body, "prompt": f"{i} {LONG['prompt']}"}, "timeout": 300},
        )
        for i in range(10)
    ]
    for ask in asks:
        ask.start()
    while "waiting{" not in (text := httpx.get(f"{base}/metrics").text) or not re.search(
        r"num_requests_waiting\{[^}]*\} [1-9]", text
    ):
        time.sleep(0.05)
    engine.get("metrics_loaded", "/metrics")
    for ask in asks:
        ask.join()


def record_handoff(prefill: Recorder, decode: Recorder) -> None:
    """A hand-off over NIXL of a completion, of a chat that is streamed, and what both metrics say after it."""
    for name, path, body, more in (
        ("completions", "/v1/completions", {**LONG, "max_tokens": 12}, {}),
        (
            "chat",
            "/v1/chat/completions",
            {
                **CHAT,
                "max_tokens": 12,
                "messages": [
                    {"role": "user", "content": f"Summarise in a sentence. {LONG['prompt']}"}
                ],
            },
            STREAMED,
        ),
    ):
        first = prefill.post(
            f"nixl_{name}_prefill",
            path,
            {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": ASKED_OF_P},
            x_request_id=f"handoff-{name}",
        )
        decode.post(
            f"nixl_{name}_decode",
            path,
            {**body, **more, "kv_transfer_params": first.json()["kv_transfer_params"]},
            x_request_id=f"handoff-{name}",
        )
    prefill.get("nixl_metrics_prefill", "/metrics")
    decode.get("nixl_metrics_decode", "/metrics")


def record_refusals(prefill: Recorder, decode: Recorder) -> None:
    """How a hand-off is given back unused (the decode worker refuses it), and what is said where none can be read."""
    body = {**LONG, "prompt": f"Again. {LONG['prompt']}", "kv_transfer_params": ASKED_OF_P}
    first = prefill.post("nixl_unused_prefill", "/v1/completions", {**body, "max_tokens": 1})
    prefill.get("nixl_metrics_held", "/metrics")
    handed = first.json()["kv_transfer_params"]
    refused = {"model": "nobody", "prompt": "x", "kv_transfer_params": handed}
    decode.post("nixl_unused_decode", "/v1/completions", refused)
    gone = {**handed, "remote_engine_id": "00000000-0000-0000-0000-000000000000", "remote_port": 1}
    decode.post("nixl_decode_prefill_gone", "/v1/completions", {**body, "kv_transfer_params": gone})


def test_conversations_are_recorded(pair: Any) -> None:
    prefill, decode = Recorder(pair.prefill.url), Recorder(pair.decode.url)
    record_surface(prefill)
    record_load(prefill, pair.prefill.url)
    record_handoff(prefill, decode)
    record_refusals(prefill, decode)
    written = [path.read_text(encoding="utf-8") for path in FOLDER.glob("*.json")]
    assert [text for text in written if str(Path.home()) in text] == []
