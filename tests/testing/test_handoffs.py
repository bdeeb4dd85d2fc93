"""Fake workers of a hand-off: they fail where a test says, once, and nothing that is lost or kept goes unseen."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import grpc
import grpc.aio
import msgspec
import pytest
from google.protobuf.message import Message

from pointsman.proto.engine_pb2 import (
    CancelRequest,
    CancelResponse,
    DrainRequest,
    DrainResponse,
    InfoRequest,
    InfoResponse,
    PrefillRequest,
    PrefillResponse,
    SamplingParams,
)
from pointsman.proto.kv_pb2 import KvAck, KvChunk, ReleaseRequest, ReleaseResponse
from pointsman.testing.client import Client, Response, post
from pointsman.testing.handoffs import (
    CHAT,
    CLOSE,
    DIE,
    HANG,
    MAX_CONTEXT,
    RESET,
    TEXT,
    FakeDecode,
    FakePrefill,
    FakeUnified,
    Fault,
    Fleet,
    Say,
    Status,
    Then,
    fleet,
    ids_of,
    sampling_of,
    text_of,
    words_of,
)

pytestmark = pytest.mark.anyio

Answer = TypeVar("Answer", bound=Message)

CHATTED: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
WRITTEN: dict[str, Any] = {"model": "m", "prompt": "Once upon a time"}
BODIES = pytest.mark.parametrize(
    ("path", "body"), [(CHAT, CHATTED), (TEXT, WRITTEN), (TEXT, {"model": "m", "prompt": [5, 6]})]
)
STREAM = pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])

FIELDS: list[dict[str, Any]] = [
    {"temperature": 0.5},
    {"top_p": 0.9},
    {"top_k": 5},
    {"min_p": 0.1},
    {"repetition_penalty": 1.1},
    {"presence_penalty": 0.5},
    {"frequency_penalty": 0.5},
    {"seed": 8},
    {"max_tokens": 11},
    {"max_completion_tokens": 11},
    {"stop": "x"},
    {"stop": ["x", "y"]},
]
"""Whatever a body can say about sampling on both paths, each with another value than the default."""

CODES = [code.name for code in grpc.StatusCode if code is not grpc.StatusCode.OK]

ERROR = {"error": {"message": "no", "type": "server_error", "param": None, "code": None}}


def ids_in(body: dict[str, Any]) -> list[int]:
    prompt = body.get("prompt", "")
    return prompt if isinstance(prompt, list) else ids_of(prompt, body.get("messages"))


def place(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


async def http(address: str, path: str, body: object, **headers: str) -> Response:
    """Ask on a connection of its own."""
    named = {key.replace("_", "-"): value for key, value in headers.items()}
    async with asyncio.timeout(5.0), Client(place(address)) as client:
        return await client.ask(post(body, path, named))


async def rpc(
    address: str, method: str, request: Message, answer: type[Answer], timeout_s: float = 5.0
) -> Answer:
    """Call on a channel of its own, as one that was never connected before. Raises AioRpcError."""
    options = (("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1))
    async with grpc.aio.insecure_channel(address, options) as channel:
        call = channel.unary_unary(
            method,
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=answer.FromString,
        )
        result: Answer = await call(request, timeout=timeout_s)
    return result


async def prefill(
    p: FakePrefill, d: FakeDecode, path: str, body: dict[str, Any], name: str = "h"
) -> PrefillResponse:
    ids = ids_in(body)
    order = PrefillRequest(
        request_id=name,
        model="m",
        prompt_ids=ids,
        sampling=sampling_of(path, body, len(ids)),
        decode_target=d.gate.address,
    )
    method = "/tl.engine.v1.EngineControl/Prefill"
    return await rpc(p.gate.address, method, order, PrefillResponse)


async def resume(
    d: FakeDecode, path: str, body: dict[str, Any], handle: str | None = "h"
) -> Response:
    return await http(
        d.http.address, path, body, **({} if handle is None else {"x_tl_kv_handle": handle})
    )


async def release(d: FakeDecode, handle: str, timeout_s: float = 5.0) -> None:
    method = "/tl.kv.v1.KvTransferService/Release"
    request = ReleaseRequest(handle_id=handle)
    await rpc(d.gate.address, method, request, ReleaseResponse, timeout_s)


async def cancel(p: FakePrefill, name: str) -> bool:
    method = "/tl.engine.v1.EngineControl/Cancel"
    answer = await rpc(p.gate.address, method, CancelRequest(request_id=name), CancelResponse)
    return answer.found


async def tokenize(p: FakePrefill, **said: object) -> Response:
    body = {"model": "m", "text": "", "add_special": True, **said}
    return await http(p.http.address, "/v1/tokenize", body)


async def code_of(call: Awaitable[object]) -> str:
    """Return the status that a call ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return str(caught.value.code().name)


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[FakePrefill, FakeDecode]]:
    async with FakePrefill("p") as p, FakeDecode("d") as d:
        yield p, d


# What is said depends on all that was asked.


def test_a_change_of_any_sampling_field_or_token_changes_the_words() -> None:
    ids, plain = ids_of("hi"), SamplingParams(max_new_tokens=4, seed=1)
    seen = {tuple(words_of(ids, plain))}
    for each in SamplingParams.DESCRIPTOR.fields:
        other = SamplingParams()
        other.CopyFrom(plain)
        if each.name == "stop":
            other.stop.append("x")
        else:
            setattr(other, each.name, 3)
        seen.add(tuple(words_of(ids, other)))
    for wrong in (ids[:-1], [*ids, 1], ids[::-1]):
        seen.add(tuple(words_of(wrong, plain)))
    assert len(seen) == 1 + len(SamplingParams.DESCRIPTOR.fields) + 3


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_change_of_any_field_of_a_body_changes_what_an_engine_samples_by(path: str) -> None:
    logprobs = {"logprobs": True, "top_logprobs": 2} if path == CHAT else {"logprobs": 2}
    said = [{}, *FIELDS, logprobs]
    seen = {sampling_of(path, fields, 10).SerializeToString() for fields in said}
    # Both names of the limit mean the same.
    assert len(seen) == len(said) - 1
    assert sampling_of(path, {"stop": "x", "seed": None}, 10) == sampling_of(
        path, {"stop": ["x"]}, 10
    )


def test_prompts_that_differ_have_other_tokens() -> None:
    prompts = [("a", None), ("b", None), ("", []), ("", [{"a": 1}]), ("", [{"a": "1"}])]
    assert len({tuple(ids_of(text, messages)) for text, messages in prompts}) == len(prompts)
    assert ids_of("a") == ids_of("a")


@STREAM
@BODIES
async def test_prefill_and_decode_say_what_a_unified_worker_says(
    path: str, body: dict[str, Any], stream: bool
) -> None:
    async with pair() as (p, d), FakeUnified("u") as u:
        for fields in ({}, *FIELDS):
            asked = body | {"seed": 7, "stream": stream} | fields
            answer = await prefill(p, d, path, asked)
            assert (answer.handle.handle_id, answer.prompt_tokens) == ("h", len(ids_in(asked)))
            resumed = await resume(d, path, asked)
            assert resumed.header("x-tl-kv-tokens") == str(answer.prompt_tokens)
            alone = await http(u.http.address, path, asked)
            assert alone.header("x-tl-kv-tokens") is None
            assert text_of(resumed) == text_of(alone)
            assert not d.held
            d.claimed.clear()  # The names of this test are no names of hand-offs.
        assert d.bodies == u.bodies


@STREAM
@BODIES
@pytest.mark.parametrize("fields", FIELDS, ids=msgspec.json.encode)
async def test_a_field_that_one_leg_was_not_told_shows_in_the_answer(
    path: str, body: dict[str, Any], stream: bool, fields: dict[str, Any]
) -> None:
    sent = body | {"seed": 7, "stream": stream}
    async with pair() as (p, d):
        for name, told, asked in (("a", sent, sent | fields), ("b", sent | fields, sent)):
            await prefill(p, d, path, told, name)
            text = text_of(await resume(d, path, asked, name))
            for each in (told, asked):
                ids = ids_in(each)
                assert text != "".join(words_of(ids, sampling_of(path, each, len(ids))))


async def test_another_prompt_than_the_one_computed_shows_in_the_answer() -> None:
    async with pair() as (p, d):
        await prefill(p, d, TEXT, WRITTEN)
        other = WRITTEN | {"prompt": "Twice upon a time"}
        assert text_of(await resume(d, TEXT, other)) == "other tokens"


async def test_a_decode_worker_without_a_handle_answers_as_a_unified_one() -> None:
    async with FakeDecode("d") as d, FakeUnified("u") as u:
        answers = [await http(each.http.address, CHAT, CHATTED) for each in (d, u)]
        assert text_of(answers[0]) == text_of(answers[1])
        assert (d.claimed, d.ended, d.bodies) == ([], [], [CHATTED])


async def test_tokens_are_those_that_the_other_workers_count() -> None:
    async with FakePrefill("p") as p:
        for said in ({"text": "hi"}, {"messages": CHATTED["messages"]}):
            answer = msgspec.json.decode((await tokenize(p, **said)).body)
            assert answer == {"ids": ids_of(said.get("text", ""), said.get("messages"))}


# The account of what is held.


async def test_a_handle_is_held_until_its_answer_has_ended() -> None:
    async with pair() as (p, d):
        await prefill(p, d, CHAT, CHATTED)
        assert (list(d.held), d.pushed) == (["h"], ["h"])
        assert (await resume(d, CHAT, CHATTED)).status == 200
        assert (d.held, d.claimed, d.ended, d.released) == ({}, ["h"], ["h"], [])


@pytest.mark.parametrize("stage", ["asked", "claimed", "head", "begun", "middle"])
async def test_an_answer_that_breaks_off_frees_nothing_and_a_release_does(stage: str) -> None:
    async with pair() as (p, d):
        await prefill(p, d, CHAT, CHATTED)
        d.fail(stage, HANG)
        async with Client(place(d.http.address)) as client:
            await client.send(post(CHATTED, CHAT, {"x-tl-kv-handle": "h"}))
            await d.reached(stage)
        await d.http.left(1)
        assert (list(d.held), d.ended) == (["h"], [])
        await release(d, "h")
        assert (d.held, d.released) == ({}, ["h"])


@pytest.mark.parametrize("why", ["never pushed", "claimed before", "released"])
async def test_a_handle_that_is_not_there_is_404(why: str) -> None:
    async with pair() as (p, d):
        if why != "never pushed":
            await prefill(p, d, CHAT, CHATTED)
        if why == "claimed before":
            d.fail("claimed", RESET)
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await resume(d, CHAT, CHATTED)
        if why == "released":
            await release(d, "h")
        response = await resume(d, CHAT, CHATTED)
        assert (response.status, response.error["code"]) == (404, "kv_handle_not_found")


async def test_every_release_is_written_down_also_of_unknown_handles() -> None:
    async with FakeDecode("d") as d:
        for name in ("b", "a", "b"):
            await release(d, name)
        assert d.released == ["b", "a", "b"]
        assert d.seen("released") == 3


async def test_what_was_released_before_its_push_ended_is_not_held() -> None:
    async with pair() as (p, d):
        await release(d, "h")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await prefill(p, d, CHAT, CHATTED)
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert (d.held, d.pushed) == ({}, [])


async def test_a_push_that_is_not_whole_is_refused_and_nothing_is_held() -> None:
    async with FakeDecode("d") as d, grpc.aio.insecure_channel(d.gate.address) as channel:
        push = channel.stream_unary(
            "/tl.kv.v1.KvTransferService/PushKv",
            request_serializer=KvChunk.SerializeToString,
            response_deserializer=KvAck.FromString,
        )
        part = KvChunk(handle_id="h", n_blocks_total=2, payload=b"x")
        assert await code_of(push(iter([part]))) == "INVALID_ARGUMENT"
        assert (d.held, d.pushed) == ({}, [])


# What goes wrong, as whoever asks sees it; the next time it goes well.

SILENT: list[Then] = [RESET, CLOSE, DIE]


@pytest.mark.parametrize("stage", ["tokenizing", "tokenized"])
@pytest.mark.parametrize("fault", SILENT, ids=lambda fault: fault.name)
async def test_a_tokenizer_breaks_off_once(stage: str, fault: Fault) -> None:
    async with FakePrefill("p") as p:
        p.fail(stage, fault)
        try:
            broken = await tokenize(p, text="hi")
        except (ConnectionError, asyncio.IncompleteReadError):
            assert stage == "tokenizing" or fault != CLOSE  # A reset loses what was on its way.
        else:
            assert (stage, broken.complete) == ("tokenized", False)
        if fault == DIE:
            with pytest.raises(OSError):
                await tokenize(p, text="hi")
        else:
            assert (await tokenize(p, text="hi")).status == 200


@pytest.mark.parametrize("stage", ["asked", "claimed", "head", "begun", "middle"])
@pytest.mark.parametrize("fault", SILENT, ids=lambda fault: fault.name)
@STREAM
async def test_a_decode_worker_breaks_off_once(stage: str, fault: Fault, stream: bool) -> None:
    body = CHATTED | {"stream": stream}
    async with pair() as (p, d):
        d.fail(stage, fault)
        await prefill(p, d, CHAT, body)
        try:
            broken = await resume(d, CHAT, body)
        except (ConnectionError, asyncio.IncompleteReadError):
            assert stage in ("asked", "claimed") or fault != CLOSE
        else:
            assert stage in ("head", "begun", "middle")
            assert not broken.complete
            assert bool(broken.body) <= (stage != "head")
        if fault == DIE:
            assert not d.held
            with pytest.raises(OSError):
                await resume(d, CHAT, body)
            assert await code_of(release(d, "h")) == "UNAVAILABLE"
        else:
            assert list(d.held) == ["h"]
            await prefill(p, d, CHAT, body, "again")
            assert text_of(await resume(d, CHAT, body, "again"))


@pytest.mark.parametrize("status", [400, 404, 409, 429, 500, 503])
async def test_a_worker_answers_what_the_test_says_once(status: int) -> None:
    async with pair() as (p, d):
        p.fail("tokenizing", Say(status, ERROR))
        d.fail("asked", Say(status, ERROR))
        asks: list[Callable[[], Awaitable[Response]]] = [
            lambda: tokenize(p, text="hi"),
            lambda: resume(d, CHAT, CHATTED, None),
        ]
        for ask in asks:
            answer = await ask()
            assert (answer.status, msgspec.json.decode(answer.body)) == (status, ERROR)
            assert (await ask()).status == 200


@pytest.mark.parametrize("stage", ["prefilling", "pushing", "pushed"])
@pytest.mark.parametrize("code", CODES)
async def test_a_prefill_ends_with_any_status_once(stage: str, code: str) -> None:
    async with pair() as (p, d):
        p.fail(stage, Status(code, "why"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await prefill(p, d, CHAT, CHATTED, "first")
        assert (caught.value.code().name, caught.value.details()) == (code, "why")
        assert "x-tl-failed-leg" not in dict(caught.value.trailing_metadata() or ())
        # What was pushed whole is there, and is the gateway's to release.
        assert list(d.held) == (["first"] if stage == "pushed" else [])
        await prefill(p, d, CHAT, CHATTED, "second")
        assert "second" in d.held


async def test_a_prefill_says_that_it_is_the_other_leg() -> None:
    async with pair() as (p, d):
        p.fail("prefilling", Status("UNAVAILABLE", leg="decode"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await prefill(p, d, CHAT, CHATTED)
        assert dict(caught.value.trailing_metadata() or ())["x-tl-failed-leg"] == "decode"


@pytest.mark.parametrize("stage", ["receiving", "received"])
@pytest.mark.parametrize("fault", [Status("RESOURCE_EXHAUSTED"), Status("DATA_LOSS"), RESET, DIE])
async def test_a_push_that_the_decode_worker_fails_is_laid_to_it(stage: str, fault: Fault) -> None:
    async with pair() as (p, d):
        d.fail(stage, fault)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await prefill(p, d, CHAT, CHATTED)
        assert dict(caught.value.trailing_metadata() or ())["x-tl-failed-leg"] == "decode"
        code = fault.code if isinstance(fault, Status) else "UNAVAILABLE"
        # gRPC calls it INTERNAL where the push was just writing into the call that ended.
        assert caught.value.code().name in (code, "INTERNAL")
        assert not d.held
        assert d.dead == (fault == DIE)


@pytest.mark.parametrize("stage", ["prefilling", "pushing", "pushed"])
async def test_a_prefill_worker_that_dies_leaves_what_it_had_pushed_whole(stage: str) -> None:
    async with pair() as (p, d):
        p.fail(stage, DIE)
        assert await code_of(prefill(p, d, CHAT, CHATTED)) == "UNAVAILABLE"
        assert p.dead
        assert list(d.held) == (["h"] if stage == "pushed" else [])
        with pytest.raises(OSError):
            await tokenize(p, text="hi")
        assert await code_of(prefill(p, d, CHAT, CHATTED)) == "UNAVAILABLE"


@pytest.mark.parametrize("stage", ["prefilling", "pushing", "pushed"])
async def test_a_cancel_is_answered_when_nothing_can_be_pushed_any_more(stage: str) -> None:
    async with pair() as (p, d):
        p.fail(stage, HANG)
        asking = asyncio.ensure_future(prefill(p, d, CHAT, CHATTED))
        await p.reached(stage)
        assert await cancel(p, "h")
        assert await code_of(asking) == "CANCELLED"
        assert list(d.held) == (["h"] if stage == "pushed" else [])
        assert not await cancel(p, "h")
        assert p.cancelled == ["h", "h"]


@pytest.mark.parametrize("stage", ["prefilling", "pushing"])
async def test_a_prefill_that_nobody_waits_for_ends(stage: str) -> None:
    async with pair() as (p, d):
        p.fail(stage, HANG)
        asking = asyncio.ensure_future(prefill(p, d, CHAT, CHATTED))
        await p.reached(stage)
        asking.cancel()
        await asyncio.wait((asking,))
        # The next one goes through, and the first one leaves nothing.
        await prefill(p, d, CHAT, CHATTED, "next")
        assert (list(d.held), d.pushed) == (["next"], ["next"])


@pytest.mark.parametrize("fault", [Status("UNAVAILABLE"), RESET, HANG], ids=repr)
async def test_a_release_that_fails_is_written_down_and_frees_nothing(fault: Fault) -> None:
    async with pair() as (p, d):
        await prefill(p, d, CHAT, CHATTED)
        d.fail("releasing", fault)
        code = "DEADLINE_EXCEEDED" if fault == HANG else "UNAVAILABLE"
        assert await code_of(release(d, "h", timeout_s=0.1 if fault == HANG else 5.0)) == code
        assert (list(d.held), d.released, d.seen("released")) == (["h"], ["h"], 0)
        await release(d, "h")
        assert not d.held


async def test_a_prefill_worker_tells_its_context_and_drains() -> None:
    async with FakePrefill("p") as p:
        p.fail("informing", Status("UNIMPLEMENTED"))
        info = "/tl.engine.v1.EngineControl/Info"
        asked = rpc(p.gate.address, info, InfoRequest(), InfoResponse)
        assert await code_of(asked) == "UNIMPLEMENTED"
        answer = await rpc(p.gate.address, info, InfoRequest(), InfoResponse)
        assert (answer.max_context, list(answer.roles)) == (MAX_CONTEXT, ["prefill"])
        drain = "/tl.engine.v1.EngineControl/Drain"
        drained = await rpc(p.gate.address, drain, DrainRequest(deadline_ms=1), DrainResponse)
        assert drained.aborted == 0


async def test_a_connection_that_died_unseen_fails_when_it_is_used() -> None:
    async with pair() as (p, d), grpc.aio.insecure_channel(p.gate.address) as channel:
        call = channel.unary_unary(
            "/tl.engine.v1.EngineControl/Cancel",
            request_serializer=CancelRequest.SerializeToString,
            response_deserializer=CancelResponse.FromString,
        )
        await call(CancelRequest(request_id="a"))
        p.gate.spoil()
        assert await code_of(call(CancelRequest(request_id="b"))) == "UNAVAILABLE"
        await prefill(p, d, CHAT, CHATTED)  # A new one is let through.
        assert p.cancelled == ["a"]


# Scripts.


async def test_faults_come_in_turn_and_none_is_one_that_goes_well() -> None:
    async with FakeUnified("u") as u:
        u.fail("asked", Say(500), None, Say(503))
        u.fail("asked", Say(429))
        got = [(await http(u.http.address, CHAT, CHATTED)).status for _ in range(5)]
        assert got == [500, 200, 503, 429, 200]
        assert u.seen("asked") == 5


async def test_a_test_waits_for_a_stage_and_acts_there() -> None:
    async with pair() as (p, d):
        waiting = asyncio.ensure_future(p.reached("pushing", 2))
        p.fail("pushing", None, HANG)
        await prefill(p, d, CHAT, CHATTED, "first")
        assert not waiting.done()
        asking = asyncio.ensure_future(prefill(p, d, CHAT, CHATTED, "second"))
        await waiting
        assert (list(d.held), p.seen("pushed")) == (["first"], 1)
        await p.reached("pushing")  # It was, and so this does not wait.
        await p.die()
        assert await code_of(asking) == "UNAVAILABLE"


# The fleet, and its law.


async def test_a_fleet_is_announced_by_its_roles_and_addresses() -> None:
    async with fleet(prefill=2, decode=1, unified=1) as it:
        known = {each.id: each for each in it.gateway.registry.snapshot()}
        assert {key: each.role for key, each in known.items()} == {
            "p1": "prefill",
            "p2": "prefill",
            "d1": "decode",
            "u1": "unified",
        }
        assert known["p2"].grpc_address == it.prefills[1].gate.address
        assert known["d1"].kv_address == it.decode.gate.address
        assert text_of(await it.client.ask(post(CHATTED | {"seed": 7})))
        assert it.decode.ended == [it.prefill.prefills[0].request_id]


def held(it: Fleet) -> None:
    it.decode.held["h"] = b""


def released_after_its_end(it: Fleet) -> None:
    it.decode.released += it.decode.ended


def released_twice(it: Fleet) -> None:
    it.decode.released += ["h", "h"]


def neither_ended_nor_released(it: Fleet) -> None:
    it.decode.pushed.append("h")


def named_twice(it: Fleet) -> None:
    it.prefill.prefills += it.prefill.prefills


def sent_twice(it: Fleet) -> None:
    it.decode.http.requests += it.decode.http.requests


BREACHES = [
    *(held, released_after_its_end, released_twice),
    *(neither_ended_nor_released, named_twice, sent_twice),
]


@pytest.mark.parametrize("breach", BREACHES, ids=lambda breach: breach.__name__)
async def test_a_breach_of_the_law_fails_the_test(breach: Callable[[Fleet], None]) -> None:
    with pytest.raises(AssertionError):
        async with fleet() as it:
            assert text_of(await it.client.ask(post(CHATTED)))
            it.check()
            breach(it)


def test_a_text_is_only_read_from_an_answer_that_is_whole() -> None:
    kind = [("content-type", "text/event-stream")]
    event = b'data: {"choices":[{"delta":{"content":"hi"}}]}\n\n'
    assert text_of(Response(200, kind, event + b"data: [DONE]\n\n", True)) == "hi"
    for wrong in (
        Response(200, kind, event, True),
        Response(200, kind, event + b"data: [DONE]\n\n", False),
        Response(503, kind, event + b"data: [DONE]\n\n", True),
    ):
        with pytest.raises(AssertionError):
            text_of(wrong)


IMPOSSIBLE = [
    *((FakePrefill, stage, Say(500)) for stage in ("tokenized", "prefilling", "pushing")),
    *((FakePrefill, stage, Status("ABORTED")) for stage in ("tokenizing", "tokenized")),
    *((FakePrefill, stage, CLOSE) for stage in ("prefilling", "pushing", "pushed", "cancelling")),
    *((FakeDecode, stage, CLOSE) for stage in ("receiving", "received", "releasing")),
    *((FakeDecode, stage, Say(500)) for stage in ("head", "begun", "middle", "releasing")),
    *((FakeUnified, stage, Status("ABORTED")) for stage in ("asked", "head")),
    *((FakePrefill, "prefilled", fault) for fault in (HANG, RESET, DIE, Status("ABORTED"))),
    *((FakeDecode, stage, HANG) for stage in ("ended", "released")),
    *((worker, "no such stage", HANG) for worker in (FakePrefill, FakeDecode, FakeUnified)),
    *((FakeUnified, stage, HANG) for stage in ("claimed", "receiving")),
]


@pytest.mark.parametrize(("worker", "stage", "fault"), IMPOSSIBLE)
def test_what_could_never_happen_cannot_be_scripted(
    worker: type[FakePrefill | FakeDecode | FakeUnified], stage: str, fault: Fault
) -> None:
    with pytest.raises(ValueError, match=stage):
        worker("w").fail(stage, None, fault)


async def test_nobody_waits_for_a_stage_that_there_is_not() -> None:
    with pytest.raises(ValueError, match="'pushin' is none of the stages"):
        await FakePrefill("p").reached("pushin")
    with pytest.raises(ValueError, match="'claimd' is none of the stages"):
        FakeDecode("d").seen("claimd")


async def test_a_unified_worker_that_dies_within_is_gone_without_a_trace() -> None:
    before = asyncio.all_tasks()
    async with FakeUnified("u") as u:
        u.fail("begun", DIE)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError, AssertionError)):
            text_of(await http(u.http.address, CHAT, CHATTED))
    assert asyncio.all_tasks() <= before


async def test_a_push_that_ends_within_a_dead_worker_is_not_held() -> None:
    async with FakeDecode("d") as d:
        d.dead = True  # And its server has not noticed: that of a real process ends with it.
        async with grpc.aio.insecure_channel(d.gate.address) as channel:
            push = channel.stream_unary(
                "/tl.kv.v1.KvTransferService/PushKv",
                request_serializer=KvChunk.SerializeToString,
                response_deserializer=KvAck.FromString,
            )
            whole = KvChunk(handle_id="h", n_blocks_total=1, payload=b"x")
            assert await code_of(push(iter([whole]))) == "UNAVAILABLE"
        assert (d.held, d.pushed) == ({}, [])
