"""The contracts `tl.engine.v1` and `tl.kv.v1`: tokenize, prefill, cancel, release, as calls and values.

A hand-off is exact because both workers are told the same: every sampling field that the client set, and the
contract's default for every one that it did not, since proto3 knows no "unset". A request with anything else in it
that may change the tokens (tools, a grammar, a bias, fields unknown here) cannot be handed off; `read` says so.

The prefill worker gets a message of its own. The client's body goes to the decode worker alone, and nothing that is
meant for one of them ever reaches the other.
"""

from typing import Annotated, Literal

import msgspec
from google.protobuf.message import DecodeError
from msgspec import Meta, Struct

from pointsman.dialect.paths import CHAT, TEXT
from pointsman.domain.worker import Worker
from pointsman.errors import BadRequest
from pointsman.proto.engine_pb2 import (
    CancelRequest,
    InfoRequest,
    InfoResponse,
    PrefillRequest,
    PrefillResponse,
    SamplingParams,
)
from pointsman.proto.kv_pb2 import ReleaseRequest
from pointsman.wire.body import members, readable
from pointsman.wire.call import HttpCall, RpcCall
from pointsman.wire.prompt import Message, TokenId, chat_of

__all__ = [
    "HANDLE",
    "TOKENIZE",
    "Generation",
    "Prefilled",
    "cancel",
    "context_of",
    "info",
    "prefill",
    "prefilled",
    "prompt_text",
    "read",
    "release",
    "token_ids",
    "tokenize",
    "tokenize_body",
]

HANDLE = b"x-tl-kv-handle: %b\r\n"
"""The header that tells a decode worker what to resume from."""

TOKENIZE_S = 10.0
INFO_S = 2.0
RELEASE_S = 2.0
"""Seconds that a call may take. Source: contract, section 2.10."""

GRACE_S = 1.0
"""How much longer than its deadline a prefill is waited for: the worker's own refusal says more than a timeout."""

TOKENIZE = b"/v1/tokenize"

COMPLETION_TOKENS = 16
CHAT_TOKENS = 2048
"""How many tokens an answer may have where nobody says: plain completions, and chats on an unknown context."""

INT32 = (1 << 31) - 1

_Int32 = Annotated[int, Meta(ge=-INT32, le=INT32)]


class Generation(Struct, forbid_unknown_fields=True):
    """What a request asks to generate, where it can be handed off. None is "not said"."""

    model: str
    prompt: str | list[TokenId] | None = None
    messages: list[Message] | None = None
    stream: bool | None = None
    stream_options: dict[str, object] | None = None
    max_tokens: _Int32 | None = None
    max_completion_tokens: _Int32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: _Int32 | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    n: Literal[1] | None = None
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    logprobs: bool | int | None = None
    top_logprobs: _Int32 | None = None
    user: object = None
    metadata: object = None
    store: object = None
    service_tier: object = None

    @property
    def limit(self) -> int | None:
        """How many tokens the client wants at most."""
        least = self.max_completion_tokens
        return self.max_tokens if least is None else least

    @property
    def ids(self) -> list[int] | None:
        """The prompt, where the client sent tokens."""
        return self.prompt if isinstance(self.prompt, list) else None


class Prefilled(Struct, frozen=True, gc=False):
    """What a prefill worker did: the handle, the tokens of the prompt, and those of them that it had in its cache."""

    handle: str
    tokens: int
    cached: int


decode_generation = msgspec.json.Decoder(Generation).decode


class Seed(Struct):
    """The one field that must be right where a request may be handed off."""

    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] | None = None


decode_seed = msgspec.json.Decoder(Seed).decode


def read(path: str, body: bytes) -> Generation | None:
    """Read an inference request as far as a hand-off needs it; None where it cannot be handed off.

    `body` has passed `parse_request`. Raises BadRequest for a seed that is no integer of 0 to 2**63-1.
    """
    if path not in (CHAT, TEXT):
        return None
    try:
        readable(decode_seed, body)
    except RecursionError:
        return None
    except msgspec.DecodeError:
        raise BadRequest("`seed` must be an integer of 0 to 2**63-1", param="seed") from None
    try:
        generation = readable(decode_generation, body)
    except (msgspec.DecodeError, RecursionError):
        return None
    asked = generation.messages if path == CHAT else generation.prompt
    other = generation.prompt if path == CHAT else generation.messages
    # Of two, the workers may read different ones.
    return generation if asked and other is None and _each_once(body) else None


def tokenize(worker: Worker, served: str, path: str, body: bytes) -> HttpCall:
    """Ask a worker for the tokens of a prompt."""
    return HttpCall(worker, TOKENIZE, tokenize_body(served, path, body), TOKENIZE_S)


def tokenize_body(served: str, path: str, body: bytes) -> bytes:
    """Return what asks for the tokens of a prompt. The text goes as the client wrote it, escapes and all."""
    key, field = ("messages", b"messages") if path == CHAT else ("prompt", b"text")
    value = next(body[start:end] for name, start, end in members(body) if name == key)
    text = b'"text":"",' if path == CHAT else b""
    return b'{"model":%b,%b"add_special":true,"%b":%b}' % (
        msgspec.json.encode(served),
        text,
        field,
        value,
    )


def prompt_text(generation: Generation) -> str | list[dict[str, str]]:
    """Return the text of a prompt, or its messages as chat templates read them, as a worker does for `tokenize`.

    There is text alone then, and `system` for `developer`.
    """
    if generation.messages is None:
        assert isinstance(generation.prompt, str)
        return generation.prompt
    return chat_of(generation.messages)


class Tokens(Struct):
    """The answer of /v1/tokenize."""

    ids: list[TokenId]


decode_tokens = msgspec.json.Decoder(Tokens).decode


def token_ids(answer: bytes) -> list[int]:
    """Read the answer to `tokenize`. Raises ValueError.

    >>> token_ids(b'{"ids": [1, 2]}')
    [1, 2]
    """
    try:
        return decode_tokens(answer).ids
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise ValueError("no token ids in the answer to /v1/tokenize") from None


def prefill(
    worker: Worker,
    generation: Generation,
    *,
    served: str,
    ids: list[int],
    seed: int,
    max_new_tokens: int,
    decode: Worker,
    decode_target: str,
    request_id: str,
    deadline_unix_ms: int,
    timeout_s: float,
    priority: int = 0,
    traceparent: bytes = b"",
) -> RpcCall:
    """Ask a worker to compute a prompt and push it to `decode_target`, the KV address of the worker `decode`.

    `seed` is the client's or the one that the decode worker is told; `deadline_unix_ms` is the wall clock's, and
    `timeout_s` the same on the monotonic one.
    """
    request = PrefillRequest(
        request_id=request_id,
        model=served,
        prompt_ids=ids,
        sampling=_sampling(generation, seed, max_new_tokens),
        decode_target=decode_target,
        deadline_unix_ms=deadline_unix_ms,
        priority=priority,
    )
    metadata = (("traceparent", traceparent.decode()),) if traceparent else ()
    return RpcCall(
        worker,
        worker.grpc_address,
        "/tl.engine.v1.EngineControl/Prefill",
        request.SerializeToString(),
        timeout_s + GRACE_S,
        metadata,
        decode,
    )


def prefilled(message: bytes) -> Prefilled:
    """Read the answer to `prefill`. Raises ValueError."""
    try:
        answer = PrefillResponse.FromString(message)
    except DecodeError as error:
        raise ValueError("the answer to Prefill cannot be read") from error
    handle = answer.handle.handle_id
    # It goes into a header.
    if not (handle and handle.isascii() and handle.isprintable()):
        raise ValueError("the answer to Prefill has no handle that can be used")
    return Prefilled(handle, answer.prompt_tokens, answer.cached_prompt_tokens)


def cancel(worker: Worker, request_id: str) -> RpcCall:
    """Tell a prefill worker that nobody waits for a prefill any more."""
    message = CancelRequest(request_id=request_id).SerializeToString()
    method = "/tl.engine.v1.EngineControl/Cancel"
    return RpcCall(worker, worker.grpc_address, method, message, RELEASE_S)


def release(worker: Worker, handle: str) -> RpcCall:
    """Give back what a decode worker holds for a handle. One that it does not know is no error."""
    message = ReleaseRequest(handle_id=handle).SerializeToString()
    method = "/tl.kv.v1.KvTransferService/Release"
    return RpcCall(worker, worker.kv_address, method, message, RELEASE_S)


def info(worker: Worker) -> RpcCall:
    """Ask an engine what it is."""
    message = InfoRequest().SerializeToString()
    method = "/tl.engine.v1.EngineControl/Info"
    return RpcCall(worker, worker.grpc_address, method, message, INFO_S)


def context_of(message: bytes) -> int:
    """Return the longest context, in tokens, that an answer to `info` names; 0 where it names none."""
    try:
        return max(int(InfoResponse.FromString(message).max_context), 0)
    except DecodeError:
        return 0


def _sampling(generation: Generation, seed: int, max_new_tokens: int) -> SamplingParams:
    def given(value: float | None, default: float) -> float:
        return default if value is None else value

    stop = generation.stop
    logprobs = generation.logprobs
    return SamplingParams(
        temperature=given(generation.temperature, 1.0),
        top_p=given(generation.top_p, 1.0),
        top_k=generation.top_k or 0,
        min_p=given(generation.min_p, 0.0),
        repetition_penalty=given(generation.repetition_penalty, 1.0),
        presence_penalty=given(generation.presence_penalty, 0.0),
        frequency_penalty=given(generation.frequency_penalty, 0.0),
        seed=seed,
        max_new_tokens=max_new_tokens,
        stop=[stop] if isinstance(stop, str) else stop or [],
        logprobs=(generation.top_logprobs or 0) if logprobs is True else int(logprobs or 0),
    )


def _each_once(body: bytes) -> bool:
    names = [name for name, _, _ in members(body)]
    return len(names) == len(set(names))
