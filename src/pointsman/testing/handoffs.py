"""Workers of a disaggregated fleet that do what a test says: `FakePrefill`, `FakeDecode`, `FakeUnified`, and `fleet`.

They live in the test's own event loop and speak HTTP and gRPC over loopback. What a worker does goes through stages
with names. A test can wait until one is reached, and say beforehand what goes wrong there: for each time in turn.

A prefill worker really pushes to the decode worker, and what it pushes is its own order: the tokens and the sampling
fields. The decode worker compares that with the request that it gets itself, and its text depends on both, so a field
that is lost or changed on either way shows in the answer. A unified worker computes the same text from its request.

The decode worker is a strict accountant. What was pushed stays held until it has generated from it to a clean end, or
is told to release it; that a client or the gateway left frees nothing. `Fleet.check` is the law of hand-offs.
"""

import asyncio
import hashlib
import socket
import time
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, Self, TypeVar

import grpc
import grpc.aio
import msgspec

from pointsman.app import Gateway
from pointsman.domain.registry import WorkerReport
from pointsman.domain.routes import Route
from pointsman.domain.worker import Role
from pointsman.proto.engine_pb2 import (
    CancelRequest,
    CancelResponse,
    DrainRequest,
    DrainResponse,
    InfoRequest,
    InfoResponse,
    KvHandle,
    PrefillRequest,
    PrefillResponse,
    SamplingParams,
)
from pointsman.proto.kv_pb2 import (
    HasBlocksRequest,
    HasBlocksResponse,
    KvAck,
    KvChunk,
    ReleaseRequest,
    ReleaseResponse,
)
from pointsman.testing.client import Client, Response
from pointsman.testing.gateways import counted, running
from pointsman.testing.origin import (
    LINGER_NONE,
    Conversation,
    Origin,
    json_answer,
    sse_chunk,
    sse_head,
)

__all__ = [
    "CHAT",
    "CLOSE",
    "DIE",
    "HANG",
    "MAX_CONTEXT",
    "RESET",
    "TEXT",
    "FakeDecode",
    "FakePrefill",
    "FakeUnified",
    "Fault",
    "Fleet",
    "Happened",
    "Over",
    "Pause",
    "Say",
    "Stage",
    "Status",
    "Then",
    "answer_to",
    "digest_words",
    "fleet",
    "halved",
    "ids_of",
    "prompt_of",
    "sampling_of",
    "stream_parts",
    "text_of",
    "until",
    "words_of",
]

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"

MAX_CONTEXT = 4096
"""What the workers say about the length of their context, in tokens."""

CHUNK_BYTES = 24
"""How much of its order a prefill worker pushes in one chunk: little, so that there are several."""

PATIENCE_S = 10.0
"""How long a test waits for what must happen."""

FORMAT = 1
LOCAL = (("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1))


class Then(msgspec.Struct, frozen=True):
    """What a connection, or a process, does at a stage instead of going on."""

    name: str


HANG = Then("hang")
"""Say nothing more, until whoever asked goes away."""
RESET = Then("reset")
"""End the connection with a reset."""
CLOSE = Then("close")
"""End the connection in good order, in the middle of whatever was said. HTTP only."""
DIE = Then("die")
"""End the process: all its connections, its listeners, its calls to others and what it holds."""


class Say(msgspec.Struct, frozen=True):
    """Answer an HTTP request with this instead of going on."""

    status: int
    body: object = None


class Status(msgspec.Struct, frozen=True):
    """End a gRPC call with this status, by name; `leg` is what `x-tl-failed-leg` says."""

    code: str
    detail: str = "as the test says"
    leg: str = ""


class Pause:
    """Wait at a stage until the test has called `go_on`, or whoever asked has gone; then go on. HTTP only."""

    def __init__(self) -> None:
        self._over = asyncio.Event()

    def go_on(self) -> None:
        """Let it go on. Safe to repeat."""
        self._over.set()

    async def over(self) -> None:
        """Wait until it may go on."""
        await self._over.wait()


Fault = Then | Say | Status | Pause

Happened = TypeVar("Happened")


class Stage(Enum):
    """What is going on at a stage, and with that, what can go wrong there."""

    REQUEST = "an HTTP request to which nothing is said yet"
    ANSWER = "an HTTP answer of which something is out"
    CALL = "a gRPC call"
    NOTE = "something that is over"

    def allows(self, fault: Fault) -> bool:
        """Say whether a fault can be told from going well, and from another one, by whoever asks."""
        match self:
            case Stage.REQUEST:
                return not isinstance(fault, Status)
            case Stage.ANSWER:
                return isinstance(fault, Then | Pause)
            case Stage.CALL:
                return isinstance(fault, Status) or fault in (HANG, RESET, DIE)
            case Stage.NOTE:
                return False


class Over(Exception):
    """A conversation has ended early, as the test wanted."""


class Refused(Exception):
    """A call ends with a status."""

    def __init__(self, status: Status) -> None:
        self.status = status


# What a prompt is, and what is said to it.


def ids_of(text: str, messages: object = None) -> list[int]:
    """Return the tokens of a text or of messages. Other prompts have other ones."""
    content = text.encode() if messages is None else msgspec.json.encode(messages)
    return [1, *content]


def sampling_of(path: str, body: Mapping[str, Any], tokens: int) -> SamplingParams:
    """Return how an engine samples for a body with a prompt of so many tokens: the contract's defaults, written out."""

    def given(key: str, default: Any) -> Any:
        value = body.get(key)
        return default if value is None else value

    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    stop = given("stop", [])
    logprobs = body.get("logprobs")
    return SamplingParams(
        temperature=given("temperature", 1.0),
        top_p=given("top_p", 1.0),
        top_k=given("top_k", 0),
        min_p=given("min_p", 0.0),
        repetition_penalty=given("repetition_penalty", 1.0),
        presence_penalty=given("presence_penalty", 0.0),
        frequency_penalty=given("frequency_penalty", 0.0),
        seed=given("seed", 0),
        max_new_tokens=limit or (16 if path == TEXT else MAX_CONTEXT - tokens),
        stop=[stop] if isinstance(stop, str) else stop,
        logprobs=given("top_logprobs", 0) if logprobs is True else int(logprobs or 0),
    )


def prompt_of(body: Mapping[str, Any]) -> list[int]:
    """Return the tokens of the prompt of a body."""
    prompt = body.get("prompt", "")
    said = body.get("messages", body.get("input"))
    return prompt if isinstance(prompt, list) else ids_of(prompt, said)


def words_of(ids: Sequence[int], sampling: SamplingParams) -> list[str]:
    """Return what is generated: words that depend on every token and every field. At most eight."""
    seen = repr(list(ids)).encode() + sampling.SerializeToString(deterministic=True)
    return digest_words(seen, sampling.max_new_tokens)


def digest_words(seen: bytes, count: int) -> list[str]:
    """Return so many words, at most eight, that depend on every byte of what was seen."""
    digest = hashlib.sha256(seen).hexdigest()
    return [f"{digest[n * 8 : n * 8 + 8]} " for n in range(min(8, count))]


def answer_to(body: Mapping[str, Any], path: str = CHAT) -> str:
    """Return the text that one worker alone answers to a body."""
    ids = prompt_of(body)
    return "".join(words_of(ids, sampling_of(path, body, len(ids))))


def text_of(response: Response) -> str:
    """Return the text of an answer, streamed or not. Raises AssertionError where it is none, or not whole."""
    assert (response.status, response.complete) == (200, True), (response.status, response.body)
    if response.header("content-type") == "application/json":
        choice = msgspec.json.decode(response.body)["choices"][0]
        return str(choice["message"]["content"] if "message" in choice else choice["text"])
    *events, last = response.body.removesuffix(b"\n\n").split(b"\n\n")
    assert last == b"data: [DONE]", response.body
    # That of the usage has no choice.
    choices = [
        choice
        for each in events
        for choice in msgspec.json.decode(each.removeprefix(b"data: "))["choices"][:1]
    ]
    return "".join(
        each["delta"].get("content", "") if "delta" in each else each["text"] for each in choices
    )


# The workers.


class Gate:
    """A door before a gRPC server: what passes it can be cut off without a word, as the death of a process does."""

    def __init__(self) -> None:
        self.address = ""
        self._behind = ""
        self._server: asyncio.Server | None = None
        self._passing: set[asyncio.StreamWriter] = set()
        self._pumps: set[asyncio.Task[None]] = set()
        self._spoilt: set[asyncio.StreamWriter] = set()

    async def open(self, behind: str) -> None:
        """Let connections through to an address."""
        self._behind = behind
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.address = f"{host}:{port}"

    def reset(self) -> None:
        """Reset every connection; new ones are let through."""
        for writer in self._passing:
            raw = writer.get_extra_info("socket")
            with suppress(OSError):
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_NONE)
            writer.transport.abort()

    def spoil(self) -> None:
        """Reset every connection that there is now, once anything more is sent on it: it has died unseen."""
        self._spoilt |= self._passing

    def shut(self) -> None:
        """Reset every connection, and refuse new ones."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self.reset()

    async def close(self) -> None:
        """Shut, and wait until nothing passes."""
        self.shut()
        for task in self._pumps:
            task.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self._behind.rpartition(":")
        there, back = await asyncio.open_connection(host, int(port))
        if self._server is None:  # It was shut while this one was let in.
            back.transport.abort()
            writer.transport.abort()
            return
        self._passing |= {writer, back}
        loop = asyncio.get_running_loop()
        for source, sink, other in ((reader, back, writer), (there, writer, back)):
            task = loop.create_task(self._pump(source, sink, other))
            self._pumps.add(task)
            task.add_done_callback(self._pumps.discard)

    async def _pump(
        self,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        other: asyncio.StreamWriter,
    ) -> None:
        try:
            while data := await source.read(65536):
                if other in self._spoilt:
                    self._passing -= {sink, other}
                    raw = other.get_extra_info("socket")
                    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_NONE)
                    return
                sink.write(data)
                await sink.drain()
        except ConnectionError:
            return
        finally:
            for writer in (sink, other):
                self._passing.discard(writer)
                writer.transport.abort()


class _Worker:
    """What all workers have: a name, an HTTP surface, and stages."""

    role = Role.UNIFIED
    stages: ClassVar[Mapping[str, Stage]]

    def __init__(self, name: str) -> None:
        self.name = name
        self.http = Origin(self._talk)
        self.dead = False
        self._faults: dict[str, deque[Fault | None]] = defaultdict(deque)
        self._seen: Counter[str] = Counter()
        self._changed = asyncio.Event()
        self._dying: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self.http.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.die()
        if self._dying is not None:
            await self._dying

    def fail(self, stage: str, *faults: Fault | None) -> None:
        """Say what goes wrong at a stage, the next times that it is reached; None for nothing.

        Raises ValueError for a stage that the worker does not have, and for what cannot go wrong there: a test whose
        fault never happens could not fail.
        """
        kind = self._known(stage)
        for fault in faults:
            if fault is not None and not kind.allows(fault):
                raise ValueError(f"{fault} cannot happen at {stage!r}: it is {kind.value}")
        self._faults[stage] += faults

    async def reached(self, stage: str, times: int = 1) -> None:
        """Wait until a stage has been reached so many times in all. Raises TimeoutError where it never is."""
        self._known(stage)
        async with asyncio.timeout(PATIENCE_S):
            while self._seen[stage] < times:
                await self._changed.wait()

    def seen(self, stage: str) -> int:
        """Return how many times a stage has been reached."""
        self._known(stage)
        return self._seen[stage]

    async def die(self) -> None:
        """End as a killed process does. Safe to repeat."""
        self.dead = True
        await self.http.stop()

    def described(self) -> WorkerReport:
        """Return the worker as it announces itself."""
        return WorkerReport(self.name, self.http.address, "m", role=self.role)

    def _known(self, stage: str) -> Stage:
        kind = self.stages.get(stage)
        if kind is None:
            raise ValueError(f"{stage!r} is none of the stages {', '.join(self.stages)}")
        return kind

    def _enter(self, stage: str) -> Fault | None:
        self._seen[stage] += 1
        self._changed.set()
        self._changed = asyncio.Event()
        faults = self._faults[stage]
        return faults.popleft() if faults else None

    async def _perish(self) -> None:
        """Die, from within: in a task of its own, since this one is among those that end."""
        self._dying = asyncio.get_running_loop().create_task(self.die())
        await asyncio.Event().wait()

    async def _talk(self, talk: Conversation) -> None:
        path = talk.request.line.split(" ")[1]
        with suppress(Over):
            await self._serve(talk, path, msgspec.json.decode(talk.request.body))

    async def _serve(self, talk: Conversation, path: str, body: dict[str, Any]) -> None:
        raise NotImplementedError

    async def _pass(self, talk: Conversation, stage: str) -> None:
        """Go through a stage of an HTTP request. Raises Over where it ends there."""
        fault = self._enter(stage)
        if fault is None:
            return
        if isinstance(fault, Say):
            await talk.send(json_answer(fault.body, fault.status))
        elif isinstance(fault, Pause):
            await self._unless_left(talk, fault.over())
            return
        elif fault == DIE:
            await self._perish()
        elif fault == RESET:
            talk.reset()
        elif fault == CLOSE:
            talk.close()
        else:
            assert fault == HANG, fault
            await talk.peer_closed()
        raise Over

    async def _unless_left(
        self, talk: Conversation, happens: Coroutine[Any, Any, Happened]
    ) -> Happened:
        """Wait for something while nothing is said. Raises Over where whoever asked leaves before."""
        loop = asyncio.get_running_loop()
        work, left = loop.create_task(happens), loop.create_task(talk.peer_closed())
        try:
            await asyncio.wait((work, left), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise Over
            return work.result()
        finally:
            for task in (work, left):
                task.cancel()
            await asyncio.gather(work, left, return_exceptions=True)


class _RpcWorker(_Worker):
    """A worker with a gRPC service behind a gate."""

    service = ""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.gate = Gate()

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        methods = self._methods()
        handler = grpc.method_handlers_generic_handler(self.service, methods)
        self._server.add_generic_rpc_handlers((handler,))
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        await self.gate.open(f"127.0.0.1:{port}")
        return self

    async def __aexit__(self, *_: object) -> None:
        await super().__aexit__()
        await self.gate.close()
        await self._server.stop(None)

    async def die(self) -> None:
        """End as a killed process does. Safe to repeat."""
        self.gate.shut()
        await super().die()

    def _methods(self) -> dict[str, Any]:
        raise NotImplementedError

    async def _pass_rpc(self, stage: str) -> None:
        """Go through a stage of a gRPC call. Raises Refused where it ends there with a status."""
        fault = self._enter(stage)
        if fault is None:
            return
        if isinstance(fault, Status):
            raise Refused(fault)
        if fault == DIE:
            await self._perish()
        if fault == RESET:
            self.gate.reset()
        await asyncio.Event().wait()


async def _abort(context: Any, status: Status) -> None:
    metadata = (("x-tl-failed-leg", status.leg),) if status.leg else ()
    await context.abort(grpc.StatusCode[status.code], status.detail, metadata)


def _unary(method: Any, request: Any) -> Any:
    return grpc.unary_unary_rpc_method_handler(
        method, request.FromString, lambda answer: answer.SerializeToString()
    )


class FakePrefill(_RpcWorker):
    """A prefill worker.

    Its stages: `tokenizing` (read, nothing said), `tokenized` (half of the answer is out); `prefilling` (a Prefill
    came, nothing is pushed), `pushing` (the first chunk is out), `pushed` (the decode worker has all, the gateway has
    no answer), `prefilled` (it has), `abandoned` (whoever asked has gone); `informing`, `cancelling`, `draining`.
    `prefills` are the orders that came, `cancelled` the request ids of the Cancel calls.
    """

    role = Role.PREFILL
    service = "tl.engine.v1.EngineControl"
    stages: ClassVar[Mapping[str, Stage]] = {
        "tokenizing": Stage.REQUEST,
        "tokenized": Stage.ANSWER,
        "prefilling": Stage.CALL,
        "pushing": Stage.CALL,
        "pushed": Stage.CALL,
        "prefilled": Stage.NOTE,
        "abandoned": Stage.NOTE,
        "informing": Stage.CALL,
        "cancelling": Stage.CALL,
        "draining": Stage.CALL,
    }

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.prefills: list[PrefillRequest] = []
        self.cancelled: list[str] = []
        self._running: dict[str, asyncio.Task[PrefillResponse]] = {}

    async def die(self) -> None:
        """End as a killed process does: what it was pushing breaks off."""
        for work in self._running.values():
            work.cancel()
        await super().die()

    def described(self) -> WorkerReport:
        """Return the worker as it announces itself."""
        return msgspec.structs.replace(super().described(), grpc_address=self.gate.address)

    def _methods(self) -> dict[str, Any]:
        return {
            "Prefill": _unary(self._prefill, PrefillRequest),
            "Info": _unary(self._info, InfoRequest),
            "Cancel": _unary(self._cancel, CancelRequest),
            "Drain": _unary(self._drain, DrainRequest),
        }

    async def _serve(self, talk: Conversation, path: str, body: dict[str, Any]) -> None:
        await self._pass(talk, "tokenizing")
        assert (path, body["model"], body["add_special"]) == ("/v1/tokenize", "m", True), body
        answer = json_answer({"ids": ids_of(body["text"], body.get("messages"))})
        half = len(answer) - 4
        await talk.send(answer[:half])
        await self._pass(talk, "tokenized")
        await talk.send(answer[half:])

    async def _prefill(self, request: PrefillRequest, context: Any) -> PrefillResponse:
        self.prefills.append(request)
        if request.request_id in self._running:
            await _abort(context, Status("ALREADY_EXISTS"))
        work = asyncio.get_running_loop().create_task(self._compute(request))
        self._running[request.request_id] = work
        try:
            await asyncio.wait((work,))
        except asyncio.CancelledError:  # Whoever asked has gone.
            self._enter("abandoned")
            raise
        finally:
            work.cancel()
            with suppress(asyncio.CancelledError, Refused):
                await work
            del self._running[request.request_id]
        if work.cancelled():
            await _abort(context, Status("CANCELLED", "cancelled"))
        error = work.exception()
        if isinstance(error, Refused):
            await _abort(context, error.status)
        self._enter("prefilled")
        return work.result()

    async def _compute(self, request: PrefillRequest) -> PrefillResponse:
        await self._pass_rpc("prefilling")
        async with grpc.aio.insecure_channel(request.decode_target, LOCAL) as channel:
            try:
                await self._push(channel, request)
            except grpc.aio.AioRpcError as error:
                detail = f"push: {error.details()}"
                raise Refused(Status(error.code().name, detail, "decode")) from error
        await self._pass_rpc("pushed")
        tokens = len(request.prompt_ids)
        handle = KvHandle(handle_id=request.request_id, n_tokens=tokens, kv_format=FORMAT)
        return PrefillResponse(handle=handle, prompt_tokens=tokens)

    async def _push(self, channel: Any, request: PrefillRequest) -> None:
        order = request.SerializeToString()
        payloads = [order[n : n + CHUNK_BYTES] for n in range(0, len(order), CHUNK_BYTES)]
        has_blocks = channel.unary_unary("/tl.kv.v1.KvTransferService/HasBlocks")
        hashes = list(range(1, len(payloads) + 1))
        there = HasBlocksResponse.FromString(
            await has_blocks(
                HasBlocksRequest(block_hashes=hashes, kv_format=FORMAT).SerializeToString()
            )
        )
        assert not any(there.present), "every order is another one"
        call = channel.stream_unary("/tl.kv.v1.KvTransferService/PushKv")()
        try:
            for index, payload in enumerate(payloads):
                chunk = KvChunk(
                    handle_id=request.request_id,
                    block_hash=hashes[index],
                    block_index=index,
                    n_blocks_total=len(payloads),
                    kv_format=FORMAT,
                    payload=payload,
                )
                await call.write(chunk.SerializeToString())
                if index == 0:
                    await self._pass_rpc("pushing")
            await call.done_writing()
            ack = KvAck.FromString(await call)
        except asyncio.InvalidStateError:  # It ended while there was more to write.
            ack = KvAck.FromString(await call)
        finally:
            call.cancel()
        assert ack.blocks_received == len(payloads)

    async def _info(self, request: InfoRequest, context: Any) -> InfoResponse:
        await self._answering(context, "informing")
        return InfoResponse(model="m", roles=["prefill"], kv_format=1, max_context=MAX_CONTEXT)

    async def _cancel(self, request: CancelRequest, context: Any) -> CancelResponse:
        self.cancelled.append(request.request_id)
        await self._answering(context, "cancelling")
        work = self._running.get(request.request_id)
        if work is not None:
            work.cancel()
            await asyncio.wait((work,))
        return CancelResponse(found=work is not None)

    async def _drain(self, request: DrainRequest, context: Any) -> DrainResponse:
        await self._answering(context, "draining")
        return DrainResponse(aborted=0)

    async def _answering(self, context: Any, stage: str) -> None:
        try:
            await self._pass_rpc(stage)
        except Refused as refused:
            await _abort(context, refused.status)


class FakeUnified(_Worker):
    """A worker that does it all.

    Its stages: `asked` (read, nothing said), `head` (that is out), `begun` (the first bytes of the body are),
    `middle` (half of it is), `ended`. `bodies` are the requests that came.
    """

    stages: ClassVar[Mapping[str, Stage]] = {
        "asked": Stage.REQUEST,
        "head": Stage.ANSWER,
        "begun": Stage.ANSWER,
        "middle": Stage.ANSWER,
        "ended": Stage.NOTE,
    }

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.bodies: list[dict[str, Any]] = []

    async def _serve(self, talk: Conversation, path: str, body: dict[str, Any]) -> None:
        self.bodies.append(body)
        await self._pass(talk, "asked")
        await self._generate(talk, path, body, self._words(path, body))

    def _words(self, path: str, body: dict[str, Any]) -> list[str]:
        ids = prompt_of(body)
        return words_of(ids, sampling_of(path, body, len(ids)))

    async def _generate(
        self,
        talk: Conversation,
        path: str,
        body: dict[str, Any],
        words: list[str],
        extra: str = "",
    ) -> None:
        say = _streamed if body.get("stream") else _whole
        await self._answer(talk, say(path, words, extra))

    async def _answer(self, talk: Conversation, parts: Sequence[bytes]) -> None:
        """Send an answer in its four parts, through the stages between them."""
        for stage, part in zip(("head", "begun", "middle"), parts, strict=False):
            await talk.send(part)
            await self._pass(talk, stage)
        await talk.send(parts[-1])
        self._enter("ended")


def _whole(path: str, words: list[str], extra: str) -> tuple[bytes, ...]:
    text = "".join(words)
    said = {"message": {"role": "assistant", "content": text}} if path == CHAT else {"text": text}
    kind = "chat.completion" if path == CHAT else "text_completion"
    choice = {"index": 0, "finish_reason": "stop"} | said
    headers = [tuple(line.split(": ")) for line in extra.split("\r\n") if line]
    answer = json_answer({"object": kind, "model": "m", "choices": [choice]}, headers=headers)  # type: ignore[arg-type]
    return halved(answer)


def halved(answer: bytes) -> tuple[bytes, ...]:
    """Return the four parts of a whole answer: the head, a byte, up to the half of the body, and the rest."""
    head = answer.index(b"\r\n\r\n") + 4
    half = (head + len(answer)) // 2
    return answer[:head], answer[head : head + 1], answer[head + 1 : half], answer[half:]


def _streamed(path: str, words: list[str], extra: str) -> tuple[bytes, ...]:
    def event(word: str) -> bytes:
        said = {"delta": {"content": word}} if path == CHAT else {"text": word}
        choice = {"index": 0, "finish_reason": None} | said
        return sse_chunk(b"data: %b\n\n" % msgspec.json.encode({"model": "m", "choices": [choice]}))

    end = sse_chunk(b"data: [DONE]\n\n")
    return stream_parts([event(word) for word in words], end, extra)


def stream_parts(chunks: Sequence[bytes], end: bytes, extra: str = "") -> tuple[bytes, ...]:
    """Return the four parts of a stream: the head, a chunk, those up to the half, and the rest with the end."""
    half = (len(chunks) + 1) // 2
    return (
        sse_head(extra),
        chunks[0],
        b"".join(chunks[1:half]),
        b"".join(chunks[max(half, 1) :]) + end + b"0\r\n\r\n",
    )


class FakeDecode(FakeUnified, _RpcWorker):
    """A decode worker. Without a handle it answers as a unified one does.

    Its stages, beside those of a unified one: `claimed` (it has found the handle, nothing is said); `receiving` (the
    first chunk of a push is there), `received` (all of it is, nothing is said); `releasing`. `held` are the handles
    that hold blocks, `pushed` those that came whole, `claimed` those that were asked for by requests, `ended` those
    that were generated from to a clean end, and `released` those of the Release calls; each in order. One that
    `recomputes` computes the prompt itself, and leaves what was pushed where it is.
    """

    role = Role.DECODE
    service = "tl.kv.v1.KvTransferService"
    stages: ClassVar[Mapping[str, Stage]] = {
        **FakeUnified.stages,
        "claimed": Stage.REQUEST,
        "receiving": Stage.CALL,
        "received": Stage.CALL,
        "releasing": Stage.CALL,
        "released": Stage.NOTE,
    }

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.recomputes = False
        self.held: dict[str, bytes] = {}
        self.pushed: list[str] = []
        self.claimed: list[str] = []
        self.ended: list[str] = []
        self.released: list[str] = []

    async def die(self) -> None:
        """End as a killed process does: what it held is gone."""
        self.held.clear()
        await super().die()

    def described(self) -> WorkerReport:
        """Return the worker as it announces itself."""
        return msgspec.structs.replace(super().described(), kv_address=self.gate.address)

    def _methods(self) -> dict[str, Any]:
        return {
            "HasBlocks": _unary(self._has_blocks, HasBlocksRequest),
            "PushKv": grpc.stream_unary_rpc_method_handler(
                self._push_kv, KvChunk.FromString, lambda ack: ack.SerializeToString()
            ),
            "Release": _unary(self._release, ReleaseRequest),
        }

    async def _has_blocks(self, request: HasBlocksRequest, context: Any) -> HasBlocksResponse:
        return HasBlocksResponse(present=[False] * len(request.block_hashes))

    async def _push_kv(self, chunks: Any, context: Any) -> KvAck:
        parts: list[bytes] = []
        name, total = "", 0
        try:
            async for chunk in chunks:
                name, total = chunk.handle_id, chunk.n_blocks_total
                parts.append(chunk.payload)
                if len(parts) == 1:
                    await self._pass_rpc("receiving")
            await self._pass_rpc("received")
            if len(parts) != total:
                raise Refused(Status("INVALID_ARGUMENT", "the push is not whole"))
            if name in self.released:
                raise Refused(Status("FAILED_PRECONDITION", "the handle was released"))
            if self.dead:  # The last of it was already on its way inwards.
                raise Refused(Status("UNAVAILABLE", "dead"))
        except Refused as refused:
            async for _ in chunks:
                pass  # Whoever writes to a call that has ended may not hear what it ended with.
            await _abort(context, refused.status)
        self.held[name] = b"".join(parts)
        self.pushed.append(name)
        return KvAck(handle_id=name, blocks_received=len(parts))

    async def _release(self, request: ReleaseRequest, context: Any) -> ReleaseResponse:
        self.released.append(request.handle_id)
        try:
            await self._pass_rpc("releasing")
        except Refused as refused:
            await _abort(context, refused.status)
        self.held.pop(request.handle_id, None)
        self._enter("released")
        return ReleaseResponse()

    async def _serve(self, talk: Conversation, path: str, body: dict[str, Any]) -> None:
        handle = talk.request.header("x-tl-kv-handle")
        if handle is None:
            await super()._serve(talk, path, body)
            return
        self.bodies.append(body)
        await self._pass(talk, "asked")
        order = None if handle in self.claimed else self.held.get(handle)
        if order is None:
            error = {"message": "no such handle", "type": "invalid_request_error", "param": None}
            await talk.send(json_answer({"error": {**error, "code": "kv_handle_not_found"}}, 404))
            return
        prefill = PrefillRequest.FromString(order)
        came = len(prefill.prompt_ids)
        if self.recomputes:
            came = 0
        else:
            self.claimed.append(handle)
            await self._pass(talk, "claimed")
        words = self._resumed(path, body, prefill)
        await self._generate(talk, path, body, words, f"x-tl-kv-tokens: {came}\r\n")
        if not self.recomputes:
            self.held.pop(handle, None)
            self.ended.append(handle)

    def _resumed(self, path: str, body: dict[str, Any], prefill: PrefillRequest) -> list[str]:
        """Return what is generated: that of the request, where the prefill worker was told the same."""
        ids = prompt_of(body)
        sampling = sampling_of(path, body, len(ids))
        if list(prefill.prompt_ids) != ids:
            return ["other ", "tokens"]
        if prefill.sampling != sampling:
            return [f"prefill was told {prefill.sampling}, ", f"decode {sampling}"]
        return words_of(ids, sampling)


# The fleet.


async def until(happened: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
    """Wait for what nobody tells the changes of. Raises TimeoutError where it never happens."""
    async with asyncio.timeout(timeout_s):
        while not happened():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


@dataclass(eq=False)
class Fleet:
    """Workers, a gateway that knows them, and a client of it."""

    gateway: Gateway
    client: Client
    prefills: list[FakePrefill] = field(default_factory=list)
    decodes: list[FakeDecode] = field(default_factory=list)
    unified: list[FakeUnified] = field(default_factory=list)
    lives: int = 0

    @property
    def prefill(self) -> FakePrefill:
        """The first prefill worker."""
        return self.prefills[0]

    @property
    def decode(self) -> FakeDecode:
        """The first decode worker."""
        return self.decodes[0]

    def announce(self, worker: _Worker) -> None:
        """Let the gateway hear of a worker; one that it knows has another life, and the old one is given up."""
        self.lives += 1
        report = msgspec.structs.replace(worker.described(), incarnation=self.lives)
        self.gateway.registry.beat(report, time.monotonic())

    async def idle(self) -> None:
        """Wait until the gateway counts nothing in flight. Raises TimeoutError where it never does."""
        await until(
            lambda: not any(worker.in_flight for worker in self.gateway.registry.snapshot())
        )

    def check(self) -> None:
        """Raise AssertionError where the law of hand-offs is broken, once the gateway has done all that it owes.

        Nothing is held; what was pushed was either generated from to a clean end or released, once; no name was given
        to two prefills, and no handle sent with two requests.
        """
        names = [order.request_id for prefill in self.prefills for order in prefill.prefills]
        assert len(names) == len(set(names)), names
        used = [
            value
            for decode in self.decodes
            for request in decode.http.requests
            for key, value in request.headers
            if key == "x-tl-kv-handle"
        ]
        # What an idle connection swallowed is sent once more: the same attempt.
        again = counted(self.gateway, "tl_gateway_stale_connection_resends_total")
        assert len(used) - len(set(used)) <= again, used
        released = [name for decode in self.decodes for name in decode.released]
        assert len(released) == len(set(released)), released
        for decode in self.decodes:
            assert not decode.held, decode.held.keys()
            assert not set(decode.ended) & set(decode.released), (decode.ended, decode.released)
            if not decode.dead:
                assert set(decode.pushed) <= {*decode.ended, *decode.released}


@asynccontextmanager
async def fleet(
    *,
    prefill: int = 1,
    decode: int = 1,
    unified: int = 0,
    targets: tuple[str, ...] = ("disaggregated",),
    route: Mapping[str, Any] | None = None,
    busy: bool = False,
    **options: Any,
) -> AsyncIterator[Fleet]:
    """Run so many workers (`p1`, `d1`, `u1`, ...) and a gateway with one disaggregated route `m` over them.

    `route` are further members of the route, `options` those of the configuration. At the end of a test that went well,
    nothing may be in flight, unless it is `busy`, and the law of hand-offs is checked when the gateway has stopped.
    """
    async with AsyncExitStack() as workers:
        enter = workers.enter_async_context
        prefills = [await enter(FakePrefill(f"p{n + 1}")) for n in range(prefill)]
        decodes = [await enter(FakeDecode(f"d{n + 1}")) for n in range(decode)]
        alone = [await enter(FakeUnified(f"u{n + 1}")) for n in range(unified)]
        options.setdefault("heartbeat_miss_limit", 1000)  # one heartbeat is enough
        routes = (Route("m", targets=targets, **(route or {})),)
        async with (
            running(routes=routes, **options) as gateway,
            Client(gateway.address) as client,
        ):
            all_of_them = Fleet(gateway, client, prefills, decodes, alone)
            for worker in (*prefills, *decodes, *alone):
                all_of_them.announce(worker)
            yield all_of_them
            if not busy:
                await all_of_them.idle()
        await all_of_them.idle()
        all_of_them.check()
