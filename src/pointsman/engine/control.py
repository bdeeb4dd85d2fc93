"""`tl.engine.v1.EngineControl`: what a gateway asks of an engine beside the HTTP surface.

Prefill runs a prompt to its first token, exports the KV state and pushes it to a decode worker. It is one task from
its admission to the end of the push, so whoever ends it (the deadline, Cancel, Drain, a gateway that goes away) ends
all of it, and nothing of it runs on. Cancel answers when that task is over: a Release that is sent to the decode
worker afterwards cannot be overtaken by the push.

What a decode worker does with the blocks is not decided here; see `pointsman.engine.resume`.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NoReturn, Protocol

import grpc
import numpy as np

from pointsman.engine import scheduler as sched
from pointsman.engine.asking import Asked
from pointsman.engine.kv import KV_FORMAT
from pointsman.engine.kv.blocks import BLOCK_TOKENS, hashes_of
from pointsman.engine.kv.push import PushFailed
from pointsman.engine.kv.state import Layout
from pointsman.engine.sampling import SamplingParams
from pointsman.engine.served import Served
from pointsman.proto import engine_pb2

__all__ = ["FAILED_LEG", "SERVICE", "EngineControl", "Push", "sampling_of"]

SERVICE = "tl.engine.v1.EngineControl"

FAILED_LEG = "x-tl-failed-leg"
"""Trailing metadata of a Prefill that failed because of the decode worker; its value is "decode"."""

PUSH_S = 30.0
"""Seconds that a push may take where the request has no deadline."""

Code = grpc.StatusCode

_PASSED_ON = {
    *(Code.FAILED_PRECONDITION, Code.RESOURCE_EXHAUSTED, Code.INVALID_ARGUMENT),
    *(Code.DATA_LOSS, Code.NOT_FOUND, Code.UNAVAILABLE),
}
"""The decode worker's own words. Anything else that may come of a push means that it cannot be had."""

_FAILED = {
    "overloaded": Code.RESOURCE_EXHAUSTED,
    "draining": Code.UNAVAILABLE,
    "cancelled": Code.CANCELLED,
    "broken": Code.INTERNAL,
}


class Push(Protocol):
    """Sends the blocks of a prompt to a decode worker: `pointsman.engine.kv.push`, or a fake of it."""

    async def __call__(
        self,
        target: str,
        handle_id: str,
        n_tokens: int,
        payloads: Sequence[bytes],
        hashes: Sequence[int],
        *,
        timeout_s: float,
    ) -> object:
        """Return when the decode worker holds all of it. Raises PushFailed."""
        ...


class _Refused(Exception):
    """A call that ends with a status; `decode_fault`: the decode worker is why."""

    def __init__(self, code: grpc.StatusCode, details: str, *, decode_fault: bool = False) -> None:
        super().__init__(details)
        self.code = code
        self.details = details
        self.decode_fault = decode_fault


class _Job:
    """A Prefill on its way. `verdict` is what its caller is told when somebody else ends it."""

    def __init__(self, request_id: str, work: Awaitable[engine_pb2.PrefillResponse]) -> None:
        self.request_id = request_id
        self.task = asyncio.ensure_future(work)
        self.verdict: _Refused | None = None

    def end(self, code: grpc.StatusCode, details: str) -> None:
        self.verdict = self.verdict or _Refused(code, details)
        self.task.cancel()


class EngineControl:
    """The service for one engine.

    Only a prefill worker needs `layout` and `push`. `wall` is the time in seconds since 1970; `on_drain` is called when
    a drain begins, so that the gateway hears of it at once.
    """

    def __init__(
        self,
        served: Served,
        *,
        role: str,
        layout: Layout | None,
        push: Push | None,
        wall: Callable[[], float] = time.time,
        on_drain: Callable[[], None] = lambda: None,
    ) -> None:
        self._served = served
        self._scheduler = served.scheduler
        self._role = role
        self._layout = layout
        self._push = push
        self._wall = wall
        self._on_drain = on_drain
        self._jobs: set[_Job] = set()

    def generic_handler(self) -> grpc.GenericRpcHandler:
        """The service for `serve_rpc`."""
        calls: dict[str, tuple[Any, Any]] = {
            "Prefill": (self.prefill, engine_pb2.PrefillRequest),
            "Info": (self.info, engine_pb2.InfoRequest),
            "Cancel": (self.cancel, engine_pb2.CancelRequest),
            "Drain": (self.drain, engine_pb2.DrainRequest),
        }
        methods = {
            name: grpc.unary_unary_rpc_method_handler(
                call,
                request_deserializer=message.FromString,
                response_serializer=lambda answer: answer.SerializeToString(),
            )
            for name, (call, message) in calls.items()
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def prefill(
        self, request: engine_pb2.PrefillRequest, context: Any
    ) -> engine_pb2.PrefillResponse:
        """Run a prompt, push its KV blocks, and tell the handle that they are claimed by."""
        try:
            return await self._follow(request)
        except _Refused as refused:
            await _abort(context, refused)

    async def info(self, request: engine_pb2.InfoRequest, context: Any) -> engine_pb2.InfoResponse:
        """What this engine is."""
        return engine_pb2.InfoResponse(
            model=self._served.name,
            roles=[self._role],
            kv_format=KV_FORMAT,
            max_context=self._scheduler.context,
            block_size=BLOCK_TOKENS,
            kv_formats_read=[KV_FORMAT],
        )

    async def cancel(
        self, request: engine_pb2.CancelRequest, context: Any
    ) -> engine_pb2.CancelResponse:
        """End what runs under a request id, on either surface. A push of it is over when this answers."""
        jobs = [job for job in self._jobs if job.request_id == request.request_id]
        for job in jobs:
            job.end(Code.CANCELLED, "the request was cancelled")
        if jobs:
            await asyncio.wait([job.task for job in jobs])
        running = bool(request.request_id) and self._scheduler.cancel(request.request_id)
        return engine_pb2.CancelResponse(found=running or bool(jobs))

    async def drain(
        self, request: engine_pb2.DrainRequest, context: Any
    ) -> engine_pb2.DrainResponse:
        """Admit nothing more, let run what runs until the deadline, and tell how many requests that has ended."""
        if request.deadline_ms < 0:
            await _abort(context, _Refused(Code.INVALID_ARGUMENT, "deadline_ms is negative"))
        return engine_pb2.DrainResponse(aborted=await self.leave(request.deadline_ms / 1000))

    async def leave(self, seconds: float) -> int:
        """Drain for at most so many seconds, then `end` the rest; returns how many requests did not end themselves."""
        deadline = time.monotonic() + seconds
        self._scheduler.drain()
        self._on_drain()
        await asyncio.to_thread(self._scheduler.wait_idle, seconds)
        # What is computed may still be on its way to a decode worker.
        if self._jobs:
            rest = max(deadline - time.monotonic(), 0)
            await asyncio.wait([job.task for job in self._jobs], timeout=rest)
        return await self.end("the worker is draining")

    async def end(self, message: str) -> int:
        """End whatever waits, runs or is pushed, now; returns how many requests that were."""
        jobs = [job for job in self._jobs if not job.task.done()]
        for job in jobs:
            job.end(Code.UNAVAILABLE, message)
        if jobs:
            await asyncio.wait([job.task for job in jobs])
        return len(jobs) + self._scheduler.abort(message)

    async def _follow(self, request: engine_pb2.PrefillRequest) -> engine_pb2.PrefillResponse:
        wanted = self._wanted(request)
        job = _Job(request.request_id, self._hand_over(request, wanted))
        self._jobs.add(job)
        try:
            # A caller that goes away cancels this, and so the task.
            return await job.task
        except asyncio.CancelledError:
            if job.verdict is None:
                raise
            raise job.verdict from None
        finally:
            self._jobs.discard(job)

    def _wanted(self, request: engine_pb2.PrefillRequest) -> sched.Request:
        """What to ask of the scheduler. Raises _Refused, in the contract's order."""
        if self._role != "prefill":
            raise _Refused(Code.FAILED_PRECONDITION, f"the role of this engine is {self._role}")
        if request.model not in ("", self._served.name):
            raise _Refused(
                Code.FAILED_PRECONDITION, f"this engine serves {self._served.name}, nothing else"
            )
        prompt, vocabulary = list(request.prompt_ids), self._served.model.n_vocab
        room = self._scheduler.context - len(prompt)
        for wrong, what in (
            (not prompt, "prompt_ids is empty"),
            (not request.decode_target, "decode_target is empty"),
            (room < 1, f"with a token the prompt must fit into {self._scheduler.context}"),
            (max(prompt, default=0) >= vocabulary, f"a token id is not below {vocabulary}"),
            (not -100 <= request.priority <= 100, "priority is not in -100..100"),
        ):
            if wrong:
                raise _Refused(Code.INVALID_ARGUMENT, what)
        if request.deadline_unix_ms and self._left(request) <= 0:
            raise _Refused(Code.DEADLINE_EXCEEDED, "the deadline has passed")
        return sched.Request(
            prompt,
            sampling_of(request.sampling),
            max_tokens=1,
            id=request.request_id,
            priority=request.priority,
            prefill_only=True,
        )

    def _left(self, request: engine_pb2.PrefillRequest) -> float:
        """Seconds until the deadline of a request that has one."""
        return request.deadline_unix_ms / 1000 - self._wall()

    async def _hand_over(
        self, request: engine_pb2.PrefillRequest, wanted: sched.Request
    ) -> engine_pb2.PrefillResponse:
        """The whole of a Prefill, from the queue to the last block."""
        began = time.monotonic()
        cached, first = await self._computed(request, wanted)
        ttft = time.monotonic() - began
        prompt, sampling = wanted.prompt, wanted.sampling
        assert self._layout is not None, "a prefill worker has one"
        payloads = await asyncio.to_thread(self._layout.split, first.state, len(prompt))
        hashes = hashes_of(prompt, whole_chunks=sched.GRID)
        handle_id = request.request_id or f"h{sampling.seed:x}"
        await self._pushed(request, handle_id, payloads, hashes)
        token = first.sampled.token
        return engine_pb2.PrefillResponse(
            handle=engine_pb2.KvHandle(
                handle_id=handle_id,
                decode_target=request.decode_target,
                n_tokens=len(prompt),
                block_hashes=[value for value in hashes if value],
                kv_format=KV_FORMAT,
                first_token=token,
                prompt_tokens=len(prompt),
                rng_draws_consumed=0 if sampling.temperature == 0 else 1,
            ),
            first_token=token,
            first_logprob=first.sampled.logprob,
            prompt_tokens=len(prompt),
            cached_prompt_tokens=cached,
            ttft_ms=ttft * 1000,
        )

    async def _computed(
        self, request: engine_pb2.PrefillRequest, wanted: sched.Request
    ) -> tuple[int, sched.Prefilled]:
        """How much was cached, and the state. Raises _Refused where the queue, the deadline or the machine forbids."""
        try:
            asked = Asked(self._scheduler, wanted)
        except sched.QueueFull:
            raise _Refused(Code.RESOURCE_EXHAUSTED, "too many requests are waiting") from None
        except sched.Draining:
            raise _Refused(Code.UNAVAILABLE, "the worker is draining") from None
        cached: int | None = None
        try:
            async with asyncio.timeout(self._left(request) if request.deadline_unix_ms else None):
                while True:
                    match await asked.next():
                        case sched.Started(cached_tokens):
                            cached = cached_tokens
                        case sched.Prefilled() as first:
                            return cached or 0, first
                        case sched.Failed(reason, message):
                            raise _Refused(_FAILED[reason], message)
        except TimeoutError:
            if cached is None:
                waited = "no KV blocks were free before the deadline"
                raise _Refused(Code.RESOURCE_EXHAUSTED, waited) from None
            raise _Refused(Code.DEADLINE_EXCEEDED, "the prompt took too long") from None
        finally:
            asked.cancel()

    async def _pushed(
        self,
        request: engine_pb2.PrefillRequest,
        handle_id: str,
        payloads: Sequence[bytes],
        hashes: Sequence[int],
    ) -> None:
        left = min(PUSH_S, self._left(request)) if request.deadline_unix_ms else PUSH_S
        if left <= 0:
            raise _Refused(Code.DEADLINE_EXCEEDED, "the prompt took too long")
        tokens, target = len(request.prompt_ids), request.decode_target
        assert self._push is not None, "a prefill worker has one"
        try:
            await self._push(target, handle_id, tokens, payloads, hashes, timeout_s=left)
        except PushFailed as failed:
            code = failed.code if failed.code in _PASSED_ON else Code.UNAVAILABLE
            raise _Refused(code, failed.details, decode_fault=failed.decode_fault) from None


def sampling_of(message: engine_pb2.SamplingParams) -> SamplingParams:
    """The sampling parameters of a message; a top_p or repetition_penalty of 0 is read as 1.

    The message has floats of 32 bits. What a client wrote as 0.8 is 0.8 again here, not the nearest float of 32 bits:
    both workers must draw from the same distribution.

    Raises:
        _Refused: INVALID_ARGUMENT, for what is out of range.
    """
    values = {
        name: float(str(np.float32(getattr(message, name))))
        for name in (
            *("temperature", "top_p", "min_p"),
            *("repetition_penalty", "presence_penalty", "frequency_penalty"),
        )
    }
    for name in ("top_p", "repetition_penalty"):
        values[name] = values[name] or 1.0
    for name, sound in {
        "temperature": 0 <= values["temperature"] <= 2,
        "top_p": 0 < values["top_p"] <= 1,
        "top_k": message.top_k >= 0,
        "min_p": 0 <= values["min_p"] <= 1,
        "repetition_penalty": 0 < values["repetition_penalty"] < math.inf,
        "presence_penalty": -2 <= values["presence_penalty"] <= 2,
        "frequency_penalty": -2 <= values["frequency_penalty"] <= 2,
        "max_new_tokens": message.max_new_tokens >= 1,
        "logprobs": 0 <= message.logprobs <= 20,
    }.items():
        if not sound:
            raise _Refused(Code.INVALID_ARGUMENT, f"sampling.{name} is out of range")
    return SamplingParams(
        **values, top_k=message.top_k, seed=message.seed, top_logprobs=message.logprobs
    )


async def _abort(context: Any, refused: _Refused) -> NoReturn:
    trailing = ((FAILED_LEG, "decode"),) if refused.decode_fault else ()
    await context.abort(refused.code, refused.details, trailing)
    raise AssertionError("abort returned")
