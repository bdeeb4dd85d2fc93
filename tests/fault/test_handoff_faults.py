"""What fails at which stage of a hand-off, and what becomes of it: over real sockets, with a strict account.

`fleet` checks the law after each of these tests: nothing is held by the decode workers, nothing is in flight, each
handle was generated from to its end or released once, and none was ever used by two attempts.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from pointsman.testing.client import Client, Response, post
from pointsman.testing.gateways import counted
from pointsman.testing.handoffs import (
    CHAT,
    CLOSE,
    DIE,
    HANG,
    MAX_CONTEXT,
    RESET,
    TEXT,
    FakePrefill,
    Fault,
    Fleet,
    Say,
    Status,
    answer_to,
    fleet,
    ids_of,
    sampling_of,
    text_of,
    words_of,
)
from pointsman.wire.sse import ERROR_EVENT

pytestmark = pytest.mark.anyio

PLAIN: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "content": "hello there"}],
    "seed": 7,
    "max_tokens": 20,
}
STREAM = PLAIN | {"stream": True}
BOTH = pytest.mark.parametrize("body", [PLAIN, STREAM], ids=["plain", "stream"])

REFUSAL = {
    "error": {
        "message": "too long",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "context",
    }
}

CODES = (
    *("CANCELLED", "UNKNOWN", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS"),
    *("PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE"),
    *("UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED"),
)
"""Every status of gRPC but OK, and INVALID_ARGUMENT, by which a prefill worker says that the client is wrong."""

Arrange = Callable[[Fleet], Awaitable[None]]


def at(who: str, stage: str, fault: Fault) -> Arrange:
    """Let the first worker of a role fail at a stage, the first time."""

    async def arrange(it: Fleet) -> None:
        worker = it.prefill if who == "p" else it.decode
        worker.fail(stage, fault)

    return arrange


async def no_tokenizer(it: Fleet) -> None:
    await it.prefill.http.stop()


async def no_control(it: Fleet) -> None:
    it.prefill.gate.shut()


async def no_kv(it: Fleet) -> None:
    it.decode.gate.shut()


async def no_http(it: Fleet) -> None:
    await it.decode.http.stop()


P_FAILS: dict[str, Arrange] = {
    "tokenize refused": no_tokenizer,
    **{
        f"{stage}: {fault.name}": at("p", stage, fault)
        for stage in ("tokenizing", "tokenized")
        for fault in (RESET, CLOSE, DIE)
    },
    **{
        f"tokenize answers {status}": at("p", "tokenizing", Say(status, REFUSAL))
        for status in (401, 404, 500, 502)
    },
    "tokenize answers 503": at("p", "tokenizing", Say(503, REFUSAL)),
    "tokenize answers nonsense": at("p", "tokenizing", Say(200, {"ids": "many"})),
    "tokenize answers no token": at("p", "tokenizing", Say(200, {"ids": []})),
    "control refused": no_control,
    **{
        f"{stage}: {fault.name}": at("p", stage, fault)
        for stage in ("prefilling", "pushing", "pushed")
        for fault in (RESET, DIE)
    },
    **{f"prefilling: {code}": at("p", "prefilling", Status(code)) for code in CODES},
    **{
        f"{stage}: {code}": at("p", stage, Status(code))
        for stage in ("pushing", "pushed")
        for code in ("INTERNAL", "UNAVAILABLE", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED")
    },
}
"""What is laid to the prefill worker."""

D_FAILS_THE_PUSH: dict[str, Arrange] = {
    "prefill says that it is decode": at("p", "prefilling", Status("UNAVAILABLE", leg="decode")),
    "kv refused": no_kv,
    **{
        f"{stage}: {fault.name}": at("d", stage, fault)
        for stage in ("receiving", "received")
        for fault in (RESET, DIE)
    },
    **{
        f"{stage}: {code}": at("d", stage, Status(code))
        for stage in ("receiving", "received")
        for code in ("RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "DATA_LOSS", "INTERNAL")
    },
}

D_FAILS: dict[str, Arrange] = {
    "refused": no_http,
    **{
        f"{stage}: {fault.name}": at("d", stage, fault)
        for stage in ("asked", "claimed", "head")
        for fault in (RESET, CLOSE, DIE)
    },
    **{
        f"{stage}: {status}": at("d", stage, Say(status, REFUSAL))
        for stage in ("asked", "claimed")
        for status in (429, 503)
    },
    "handle unknown": at("d", "asked", Say(404, {"error": {"code": "kv_handle_not_found"}})),
    "not this prompt": at("d", "asked", Say(409, {"error": {"code": "kv_handle_mismatch"}})),
}
"""What the decode worker does with the request itself, before a byte of the body has left."""

D_FAILS_LATER: dict[str, Arrange] = {
    f"{stage}: {fault.name}": at("d", stage, fault)
    for stage in ("begun", "middle")
    for fault in (RESET, CLOSE, DIE)
}

BEFORE_THE_COMMIT = {
    **{f"p, {name}": arrange for name, arrange in P_FAILS.items()},
    **{f"d, push, {name}": arrange for name, arrange in D_FAILS_THE_PUSH.items()},
    **{f"d, {name}": arrange for name, arrange in D_FAILS.items()},
}


def refused(response: Response, status: int = 503, code: str | None = "no_capacity") -> None:
    """Check that an answer is one clean error."""
    assert (response.status, response.complete) == (status, True)
    assert response.error["code"] == code, response.error


def leased(it: Fleet) -> dict[str, int]:
    return {each.id: each.in_flight for each in it.gateway.registry.snapshot() if each.in_flight}


async def another_answers(it: Fleet, body: dict[str, Any]) -> None:
    """Check that the failure did not reach the client, and that its connection is as good as new."""
    assert text_of(await it.client.ask(post(body))) == answer_to(body)
    assert counted(it.gateway, "tl_gateway_failovers_total") == 1
    assert text_of(await it.client.ask(post(body))) == answer_to(body)


@BOTH
async def test_each_worker_counts_while_it_works(body: dict[str, Any]) -> None:
    stages = [("p", "tokenizing"), ("p", "prefilling"), ("p", "pushed"), ("d", "claimed")]
    for who, stage in stages:
        async with fleet() as it:
            await at(who, stage, HANG)(it)
            await it.client.send(post(body))
            await (it.prefill if who == "p" else it.decode).reached(stage)
            assert leased(it) == ({"d1": 1, "p1": 1} if who == "p" else {"d1": 1})
            it.client.leave()


# One fails, another one of its kind takes over.


@BOTH
@pytest.mark.parametrize("failure", P_FAILS)
async def test_another_prefill_worker_takes_over(failure: str, body: dict[str, Any]) -> None:
    async with fleet(prefill=2) as it:
        await P_FAILS[failure](it)
        await another_answers(it, body)
        # The decode worker did nothing wrong, and is asked again.
        assert len(it.decode.ended) == 2
        assert it.prefills[1].prefills
    assert len(it.decode.bodies) == 2


@BOTH
@pytest.mark.parametrize("failure", [*D_FAILS_THE_PUSH, *D_FAILS])
async def test_another_decode_worker_takes_over(failure: str, body: dict[str, Any]) -> None:
    async with fleet(decode=2) as it:
        await (D_FAILS_THE_PUSH | D_FAILS)[failure](it)
        assert text_of(await it.client.ask(post(body))) == answer_to(body)
        # The prefill worker did nothing wrong, and is asked again: for a new handle.
        assert len(it.prefill.prefills) == 2
        assert len(it.decodes[1].ended) == 1


@pytest.mark.parametrize("failure", D_FAILS_LATER)
async def test_a_plain_answer_that_breaks_is_asked_of_another_one(failure: str) -> None:
    async with fleet(decode=2) as it:
        await D_FAILS_LATER[failure](it)
        assert text_of(await it.client.ask(post(PLAIN))) == answer_to(PLAIN)
        assert len(it.prefill.prefills) == 2
        assert it.decodes[1].ended == [it.prefill.prefills[1].request_id]


# There is no other one.


@BOTH
@pytest.mark.parametrize("failure", BEFORE_THE_COMMIT)
async def test_a_unified_worker_takes_over(failure: str, body: dict[str, Any]) -> None:
    async with fleet(unified=1, targets=("disaggregated", "unified")) as it:
        await BEFORE_THE_COMMIT[failure](it)
        assert text_of(await it.client.ask(post(body))) == answer_to(body)
        assert len(it.unified[0].bodies) == 1
        assert it.unified[0].http.requests[0].header("x-tl-kv-handle") is None


async def test_what_is_held_in_vain_is_given_back_before_the_next_worker_has_answered() -> None:
    async with fleet(unified=1, targets=("disaggregated", "unified")) as it:
        it.decode.fail("asked", Say(503, REFUSAL))
        it.unified[0].fail("middle", HANG)
        await it.client.send(post(STREAM))
        await it.unified[0].reached("middle")
        async with asyncio.timeout(1.5):
            await it.decode.reached("released")
        it.client.leave()
        await it.idle()


@BOTH
@pytest.mark.parametrize("failure", BEFORE_THE_COMMIT)
async def test_alone_the_client_gets_one_clean_error(failure: str, body: dict[str, Any]) -> None:
    async with fleet() as it:
        await BEFORE_THE_COMMIT[failure](it)
        response = await it.client.ask(post(body))
        if "429" in failure:
            assert (response.status, msgspec.json.decode(response.body)) == (429, REFUSAL)
        elif "DEADLINE_EXCEEDED" in failure:
            refused(response, 504, "upstream_timeout")
        else:
            refused(response)
        assert leased(it) == {}
        assert (await it.client.ask(b"GET /v1/models HTTP/1.1\r\n\r\n")).status == 200


@BOTH
async def test_what_every_pair_fails_at_ends_after_three_workers(body: dict[str, Any]) -> None:
    async with fleet(prefill=2, decode=3) as it:
        it.prefill.fail("pushed", Status("INTERNAL"))
        for decode in it.decodes:
            decode.fail("claimed", RESET)
        refused(await it.client.ask(post(body)))
        assert [len(each.prefills) for each in it.prefills] == [1, 2]
        names = [order.request_id for each in it.prefills for order in each.prefills]
        assert names == [names[0], f"{names[0]}-2", f"{names[0]}-3"]
    assert sorted(name for each in it.decodes for name in each.released) == sorted(names)


# What a worker says about the request is the client's, and nobody else is asked.


@BOTH
@pytest.mark.parametrize("status", [400, 413, 422])
async def test_the_tokenizers_word_about_the_prompt_is_relayed(
    status: int, body: dict[str, Any]
) -> None:
    async with fleet(prefill=2, unified=1, targets=("disaggregated", "unified")) as it:
        it.prefill.fail("tokenizing", Say(status, REFUSAL))
        response = await it.client.ask(post(body))
        assert (response.status, msgspec.json.decode(response.body)) == (status, REFUSAL)
        assert leased(it) == {}
        assert not it.prefills[1].http.requests and not it.unified[0].bodies
    assert not it.decode.bodies and not it.decode.released


@BOTH
async def test_a_prompt_that_prefill_refuses_is_400(body: dict[str, Any]) -> None:
    async with fleet(prefill=2, unified=1, targets=("disaggregated", "unified")) as it:
        it.prefill.fail("prefilling", Status("INVALID_ARGUMENT", "the prompt is too long"))
        response = await it.client.ask(post(body))
        refused(response, 400, None)
        assert response.error["message"] == "the prompt is too long"
        assert not it.prefills[1].prefills and not it.unified[0].bodies
    assert not it.decode.bodies


@BOTH
@pytest.mark.parametrize("stage", ["asked", "claimed"])
@pytest.mark.parametrize("status", [400, 401, 404, 409, 413, 422, 500, 502, 504])
async def test_what_decode_answers_is_relayed_and_the_handle_released(
    status: int, stage: str, body: dict[str, Any]
) -> None:
    async with fleet(decode=2) as it:
        it.decode.fail(stage, Say(status, REFUSAL))
        response = await it.client.ask(post(body))
        assert (response.status, msgspec.json.decode(response.body)) == (status, REFUSAL)
        assert not it.decodes[1].bodies
    assert it.decode.released == [it.prefill.prefills[0].request_id]


# After the commit there is no other worker.


@pytest.mark.parametrize("failure", D_FAILS_LATER)
async def test_a_stream_that_breaks_ends_with_the_error_event(failure: str) -> None:
    async with fleet(decode=2, unified=1, targets=("disaggregated", "unified")) as it:
        await D_FAILS_LATER[failure](it)
        response = await it.client.ask(post(STREAM))
        assert (response.status, response.complete) == (200, True)
        assert response.body.count(ERROR_EVENT) == 1
        assert response.body.endswith(ERROR_EVENT) and b"[DONE]" not in response.body
        assert leased(it) == {}
        if "die" not in failure:
            async with asyncio.timeout(1.0):
                await it.decode.reached("released")
    assert not it.decodes[1].bodies and not it.unified[0].bodies


async def test_disaggregated_release_on_abort() -> None:
    """The seed's: D dies mid-stream, Release is called with the handle, and nothing stays held."""
    async with fleet() as it:
        it.decode.fail("middle", RESET)
        response = await it.client.ask(post(STREAM, headers={"x-request-id": "abc"}))
        assert response.body.endswith(ERROR_EVENT)
        await it.decode.reached("released")
        assert not it.decode.held
    assert it.decode.released == ["abc"]


async def test_a_plain_answer_over_the_hold_breaks_for_the_client() -> None:
    async with fleet(decode=2, hold_bytes=16) as it:
        it.decode.fail("middle", RESET)
        response = await it.client.ask(post(PLAIN))
        assert (response.status, response.complete) == (200, False)
        await it.decode.reached("released")
    assert not it.decodes[1].bodies


# Who hangs.

PATIENCE: dict[str, Any] = {
    "head_timeout_s": 0.2,
    "first_byte_timeout_s": 0.2,
    "gap_timeout_s": 0.2,
}

HANGS = [
    *(("p", stage) for stage in ("tokenizing", "tokenized", "prefilling", "pushing", "pushed")),
    *(("d", stage) for stage in ("receiving", "received", "asked", "claimed", "head")),
]


@BOTH
@pytest.mark.parametrize(("who", "stage"), HANGS)
async def test_one_that_hangs_is_given_up(who: str, stage: str, body: dict[str, Any]) -> None:
    options: dict[str, Any] = {"unified": 1, "targets": ("disaggregated", "unified")}
    async with fleet(**options, prefill_timeout_s=0.1, **PATIENCE) as it:
        await at(who, stage, HANG)(it)
        assert text_of(await it.client.ask(post(body))) == answer_to(body)
        assert len(it.unified[0].bodies) == 1


@BOTH
@pytest.mark.parametrize(("who", "stage"), HANGS)
async def test_alone_one_that_hangs_is_504(who: str, stage: str, body: dict[str, Any]) -> None:
    async with fleet(prefill_timeout_s=0.1, **PATIENCE) as it:
        await at(who, stage, HANG)(it)
        refused(await it.client.ask(post(body)), 504, "upstream_timeout")


@pytest.mark.parametrize("stage", ["begun", "middle"])
async def test_a_stream_that_hangs_is_broken_off(stage: str) -> None:
    async with fleet(gap_timeout_s=0.2) as it:
        it.decode.fail(stage, HANG)
        response = await it.client.ask(post(STREAM))
        assert response.complete and response.body.endswith(ERROR_EVENT)
    assert it.decode.released == it.decode.claimed


# The client leaves, or the gateway is stopped, at every point where the story waits.

WAITS = [*HANGS, ("d", "begun"), ("d", "middle")]
WAYS = pytest.mark.parametrize("way", [Client.leave, Client.hang_up], ids=["reset", "closed"])


@WAYS
@BOTH
@pytest.mark.parametrize(("who", "stage"), WAITS)
async def test_a_client_that_leaves_leaves_nothing_behind(
    who: str, stage: str, body: dict[str, Any], way: Callable[[Client], None]
) -> None:
    async with fleet() as it:
        await at(who, stage, HANG)(it)
        await it.client.send(post(body))
        await (it.prefill if who == "p" else it.decode).reached(stage)
        way(it.client)
        await it.idle()
        async with Client(it.gateway.address) as other:
            assert text_of(await other.ask(post(body))) == answer_to(body)
        if stage.startswith("token"):
            assert it.decode.released == []
        else:
            async with asyncio.timeout(1.5):
                await it.decode.reached("released")
    before = stage in ("prefilling", "pushing", "pushed", "receiving", "received")
    # Who may still push is told first.
    assert it.prefill.cancelled == (it.decode.released if before else [])
    assert counted(it.gateway, "tl_gateway_client_disconnects_total") == 1


@BOTH
@pytest.mark.parametrize(("who", "stage"), WAITS)
async def test_a_drain_deadline_ends_a_hand_off(who: str, stage: str, body: dict[str, Any]) -> None:
    async with fleet(drain_deadline_s=0.0, shutdown_grace_s=0.0) as it:
        await at(who, stage, HANG)(it)
        await it.client.send(post(body))
        await (it.prefill if who == "p" else it.decode).reached(stage)
        if stage in ("begun", "middle") and "stream" in body:
            await it.client.head()
            await it.gateway.drain()
            assert ERROR_EVENT in await it.client.rest()
        else:
            await it.gateway.drain()
            refused(await it.client.response())
        if not stage.startswith("token"):
            await it.decode.reached("released")


@BOTH
@pytest.mark.parametrize(("who", "stage"), WAITS)
async def test_a_stop_gives_back_what_is_held(who: str, stage: str, body: dict[str, Any]) -> None:
    """`fleet` stops the gateway while the request is at that stage."""
    async with fleet(busy=True) as it:
        await at(who, stage, HANG)(it)
        await it.client.send(post(body))
        await (it.prefill if who == "p" else it.decode).reached(stage)
    assert len(it.decode.released) == (not stage.startswith("token"))


# A worker leaves the fleet.


@BOTH
@pytest.mark.parametrize("stage", ["tokenizing", "tokenized", "prefilling", "pushing", "pushed"])
async def test_a_prefill_worker_that_is_given_up_is_not_waited_for(
    stage: str, body: dict[str, Any]
) -> None:
    async with fleet(prefill=2) as it:
        it.prefill.fail(stage, HANG)
        await it.client.send(post(body))
        await it.prefill.reached(stage)
        it.announce(it.prefill)
        assert text_of(await it.client.response()) == answer_to(body)
        # Its next life may be asked again, and is not taken for the one that failed.
        assert text_of(await it.client.ask(post(body))) == answer_to(body)


@BOTH
@pytest.mark.parametrize("stage", ["receiving", "received", "asked", "claimed", "head"])
async def test_a_decode_worker_that_is_given_up_is_not_waited_for(
    stage: str, body: dict[str, Any]
) -> None:
    async with fleet(decode=2) as it:
        it.decode.fail(stage, HANG)
        await it.client.send(post(body))
        await it.decode.reached(stage)
        it.announce(it.decode)
        assert text_of(await it.client.response()) == answer_to(body)
        # The prefill worker is not to blame, and computes the prompt again.
        assert len(it.prefill.prefills) == 2


@pytest.mark.parametrize("who", ["p", "d"])
async def test_a_worker_that_leaves_does_not_end_a_stream_that_has_begun(who: str) -> None:
    async with fleet() as it:
        it.decode.fail("begun", HANG)
        await it.client.send(post(STREAM))
        await it.client.read_until(b"data: ")
        it.announce(it.prefill if who == "p" else it.decode)
        async with Client(it.gateway.address) as other:
            assert text_of(await other.ask(post(STREAM))) == answer_to(STREAM)
        assert not it.decode.released
        it.client.leave()
        await it.decode.reached("released")


# The calls that give back fail themselves.


@pytest.mark.parametrize("fault", [Status("UNAVAILABLE"), Status("INTERNAL"), RESET, HANG])
async def test_a_release_that_fails_hurts_no_request(fault: Fault) -> None:
    async with fleet() as it:
        it.decode.fail("claimed", RESET)
        it.decode.fail("releasing", fault)
        refused(await it.client.ask(post(PLAIN)))
        await it.decode.reached("releasing")
        assert text_of(await it.client.ask(post(PLAIN))) == answer_to(PLAIN)
        assert list(it.decode.held) == it.decode.released
        it.decode.held.clear()  # What the time limit of the decode worker is for.


@pytest.mark.parametrize("fault", [Status("UNAVAILABLE"), RESET, HANG])
async def test_a_cancel_that_fails_does_not_keep_the_release_back(fault: Fault) -> None:
    async with fleet() as it:
        it.prefill.fail("prefilling", HANG)
        it.prefill.fail("cancelling", fault)
        await it.client.send(post(PLAIN))
        await it.prefill.reached("prefilling")
        it.client.leave()
        async with asyncio.timeout(1.0):
            await it.prefill.reached("abandoned")
        await it.decode.reached("released")
    assert it.decode.released == it.prefill.cancelled


# What it is all for.

SAMPLING: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.95, "max_tokens": 40},
    {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "max_tokens": 3},
    {"presence_penalty": 0.5, "frequency_penalty": -0.5, "stop": "x"},
    {"stop": ["x", "y"], "seed": (1 << 63) - 1},
    {"seed": 0, "max_tokens": 1, "n": 1},
    {"logprobs": True, "top_logprobs": 3, "user": "u"},
    {"temperature": None, "stop": None, "top_p": None},
]
PROMPTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": [{"role": "system", "content": "é"}, {"role": "user", "content": "\u2028\t\"'"}]}),
    "parts": (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}),
    "text": (TEXT, {"prompt": "Once upon a time"}),
    "tokens": (TEXT, {"prompt": [5, 6, 4_000_000_000]}),
}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("prompt", PROMPTS)
async def test_disaggregated_equals_unified(prompt: str, stream: bool) -> None:
    """The seed's: with every sampling field, and with a seed of the gateway's own that reaches both workers."""
    path, said = PROMPTS[prompt]
    async with (
        fleet() as apart,
        fleet(prefill=0, decode=0, unified=1, targets=("unified",)) as together,
    ):
        for fields in SAMPLING:
            body = {"model": "m", **said, **fields, "stream": stream}
            answer = text_of(await apart.client.ask(post(body, path)))
            order = apart.prefill.prefills[-1]
            assert order.decode_target == apart.decode.gate.address
            sent = apart.decode.bodies[-1]
            assert sent == body | {"seed": order.sampling.seed}
            assert order.sampling.seed == fields.get("seed", order.sampling.seed)
            # Without a seed in the request, it is read back from what the decode worker was told.
            assert answer == text_of(await together.client.ask(post(sent, path)))
        seeds = {order.sampling.seed for order in apart.prefill.prefills}
        assert len(seeds) == len(SAMPLING)
    assert len(apart.decode.ended) == len(SAMPLING)


async def test_a_chat_without_a_limit_may_use_the_context_of_the_prefill_worker() -> None:
    body = {key: value for key, value in PLAIN.items() if key != "max_tokens"}
    async with fleet() as it:
        for _ in range(2):
            assert text_of(await it.client.ask(post(body))) == answer_to(body)
        limit = MAX_CONTEXT - len(it.prefill.prefills[0].prompt_ids)
        assert [each.sampling.max_new_tokens for each in it.prefill.prefills] == [limit] * 2
        assert it.prefill.seen("informing") == 1


@BOTH
@pytest.mark.parametrize(
    "field", [{"n": 2}, {"tools": []}, {"logit_bias": {}}, {"response_format": {}}, {"odd": 1}]
)
async def test_what_cannot_be_handed_off_is_for_a_unified_worker(
    field: dict[str, Any], body: dict[str, Any]
) -> None:
    async with fleet(unified=1, targets=("disaggregated", "unified")) as it:
        assert text_of(await it.client.ask(post(body | field))) == answer_to(body)
        assert it.unified[0].bodies == [body | field]
    async with fleet() as it:
        assert text_of(await it.client.ask(post(body | field))) == answer_to(body)
        assert it.decode.bodies == [body | field]
        assert it.decode.http.requests[0].header("x-tl-kv-handle") is None
    assert not it.prefill.http.requests and not it.prefill.prefills


@BOTH
@pytest.mark.parametrize("least", [30, 40, 1000])
async def test_a_short_prompt_is_not_handed_off(least: int, body: dict[str, Any]) -> None:
    """It has 41 tokens and 42 bytes; only what may be long enough is tokenized."""
    async with fleet(route={"disagg_min_tokens": least}) as it:
        tokens = len(ids_of("", body["messages"]))
        assert text_of(await it.client.ask(post(body))) == answer_to(body)
        assert len(it.prefill.prefills) == (tokens >= least)
        assert len(it.prefill.http.requests) == (least < 1000)


@BOTH
async def test_what_one_worker_does_for_less_is_not_handed_off(body: dict[str, Any]) -> None:
    async with fleet(decode=2, disagg_pairing="quickest") as it:
        # Nobody else waits, so a hand-off would only cost; d1 fails, and it is the same with d2.
        it.decode.fail("asked", RESET)
        assert text_of(await it.client.ask(post(body))) == answer_to(body)
        assert it.decodes[1].bodies == [body]
        assert not it.prefill.http.requests and not it.prefill.prefills
        workers = it.gateway.registry.snapshot()
        for worker in workers:
            worker.running = 1000 * (worker.role == "decode")
        assert text_of(await it.client.ask(post(body))) == answer_to(body)
        assert len(it.prefill.prefills) == 1
        assert [(each.pending_tokens, each.active_tokens) for each in workers] == [(0, 0)] * 3


def test_the_fakes_would_show_a_field_that_is_lost() -> None:
    ids = ids_of("hi")
    texts = {
        "".join(words_of(ids, sampling_of(TEXT, {"seed": 1} | fields, len(ids))))
        for fields in [*SAMPLING, {"logprobs": 2}, {"seed": 2}, {"max_tokens": 9}]
    }
    assert len(texts) == len(SAMPLING) + 2  # two mean the same
    assert FakePrefill("p").described().role == "prefill"
