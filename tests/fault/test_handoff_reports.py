"""Hand-offs as they failed in the field: one test, or a few, for each report and its whole kind."""

import asyncio
from typing import Any

import msgspec
import pytest

from pointsman.testing.client import Client, Response, post
from pointsman.testing.gateways import counted
from pointsman.testing.handoffs import (
    CLOSE,
    DIE,
    HANG,
    RESET,
    Fault,
    Say,
    Status,
    answer_to,
    fleet,
    ids_of,
    text_of,
)

pytestmark = pytest.mark.anyio

PLAIN: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "content": "hello there"}],
    "seed": 7,
    "max_tokens": 20,
}
STREAM = PLAIN | {"stream": True}
BOTH = pytest.mark.parametrize("body", [PLAIN, STREAM], ids=["plain", "stream"])

REFUSAL = {"error": {"message": "too long", "type": "invalid_request_error", "code": "context"}}


@BOTH
@pytest.mark.parametrize(("who", "stage"), [("p", "prefilled"), ("d", "asked"), ("d", "claimed")])
async def test_p01_a_client_that_leaves_between_the_legs_strands_nothing(
    who: str, stage: str, body: dict[str, Any]
) -> None:
    async with fleet() as it:
        it.decode.fail("asked" if who == "p" else stage, HANG)
        await it.client.send(post(body))
        await (it.prefill if who == "p" else it.decode).reached(stage)
        assert it.decode.held
        it.client.leave()
        async with asyncio.timeout(1.0):
            await it.decode.reached("released")
        assert not it.decode.held
    assert it.prefill.cancelled == [] or stage == "prefilled"


@pytest.mark.parametrize("stage", ["prefilling", "pushing", "pushed"])
async def test_p02_a_client_that_leaves_during_the_prefill_frees_both_sides(stage: str) -> None:
    async with fleet() as it:
        it.prefill.fail(stage, HANG)
        await it.client.send(post(PLAIN, headers={"x-request-id": "gone"}))
        await it.prefill.reached(stage)
        it.client.leave()
        async with asyncio.timeout(1.0):
            await it.decode.reached("released")
        assert not it.decode.held and not it.decode.bodies
    assert it.prefill.cancelled == it.decode.released == ["gone"]


@pytest.mark.parametrize("stage", ["prefilling", "pushing", "pushed"])
async def test_p03_a_prefill_worker_that_dies_leaves_no_block_on_decode(stage: str) -> None:
    async with fleet(prefill=2) as it:
        it.prefill.fail(stage, DIE)
        assert text_of(await it.client.ask(post(PLAIN))) == answer_to(PLAIN)
        await it.decode.reached("released")
        assert not it.decode.held
    (lost,), (good,) = ([order.request_id for order in each.prefills] for each in it.prefills)
    assert (it.decode.released, it.decode.ended) == ([lost], [good])


@BOTH
@pytest.mark.parametrize("status", [400, 413, 422, 429, 503])
async def test_p04_a_decode_worker_that_refuses_gets_its_handle_back_and_nobody_else_does(
    status: int, body: dict[str, Any]
) -> None:
    async with fleet(decode=2) as it:
        it.decode.fail("claimed", Say(status, REFUSAL))
        response = await it.client.ask(post(body))
        if status < 429 or status == 422:
            assert (response.status, msgspec.json.decode(response.body)) == (status, REFUSAL)
        else:
            assert text_of(response) == answer_to(body)
            assert it.decodes[1].claimed == [it.prefill.prefills[1].request_id]
    assert it.decode.released == [it.prefill.prefills[0].request_id]


async def test_p05_prefills_that_take_too_long_free_decode_within_a_second() -> None:
    async with fleet(prefill_timeout_s=0.1) as it:
        it.prefill.fail("pushed", *([HANG] * 8))

        async def ask() -> Response:
            async with Client(it.gateway.address) as client:
                return await client.ask(post(PLAIN))

        for response in await asyncio.gather(*(ask() for _ in range(8))):
            assert (response.status, response.error["code"]) == (504, "upstream_timeout")
        async with asyncio.timeout(1.0):
            await it.decode.reached("released", 8)
        assert not it.decode.held and not it.decode.bodies
        assert text_of(await it.client.ask(post(PLAIN))) == answer_to(PLAIN)


@pytest.mark.parametrize(
    ("stage", "fault"),
    [
        ("tokenizing", Say(400, REFUSAL)),
        ("prefilling", Status("INVALID_ARGUMENT")),
        ("prefilling", Status("OUT_OF_RANGE")),
        ("pushing", Status("INTERNAL")),
        ("pushing", RESET),
        ("pushed", Status("CANCELLED")),
    ],
)
async def test_p06_decode_is_not_asked_unless_the_prefill_succeeded(
    stage: str, fault: Fault
) -> None:
    async with fleet() as it:
        it.prefill.fail(stage, fault)
        assert (await it.client.ask(post(STREAM))).status in (400, 503)
    assert it.decode.http.requests == []


@BOTH
async def test_p09_decode_gets_the_clients_own_limits(body: dict[str, Any]) -> None:
    sent = body | {"max_tokens": 5, "max_completion_tokens": 6, "stop": ["x"], "user": "u"}
    async with fleet() as it:
        assert text_of(await it.client.ask(post(sent))) == answer_to(sent)
        assert it.decode.bodies == [sent]
        assert it.prefill.prefills[0].sampling.max_new_tokens == 6


async def test_p10_the_prefill_is_told_nothing_of_streams() -> None:
    sent = STREAM | {"stream_options": {"include_usage": True}}
    async with fleet() as it:
        assert text_of(await it.client.ask(post(sent))) == answer_to(sent)
        asked = msgspec.json.decode(it.prefill.http.requests[0].body)
        assert asked.keys() == {"model", "text", "add_special", "messages"}
        assert it.decode.bodies == [sent]


@pytest.mark.parametrize("unknown", [{"min_tokens": 4}, {"ignore_eos": True}])
async def test_p10_what_a_prefill_cannot_be_told_is_not_handed_off(unknown: dict[str, Any]) -> None:
    async with fleet() as it:
        assert text_of(await it.client.ask(post(STREAM | unknown))) == answer_to(STREAM)
        assert it.prefill.prefills == [] and it.decode.bodies == [STREAM | unknown]


@BOTH
@pytest.mark.parametrize(
    ("stage", "fault"),
    [
        ("tokenizing", Say(500, REFUSAL)),
        ("prefilling", Status("INTERNAL")),
        ("pushing", Status("UNKNOWN")),
        ("pushed", Status("INTERNAL")),
    ],
)
async def test_p13_a_prefill_that_fails_is_known_at_once(
    stage: str, fault: Fault, body: dict[str, Any]
) -> None:
    async with fleet(prefill=2) as it:
        it.prefill.fail(stage, fault)
        async with asyncio.timeout(1.0):
            assert text_of(await it.client.ask(post(body))) == answer_to(body)
        assert len(it.decode.bodies) == 1


@BOTH
async def test_p14_a_control_connection_that_died_idle_costs_no_worker(
    body: dict[str, Any],
) -> None:
    async with fleet() as it:
        assert text_of(await it.client.ask(post(body))) == answer_to(body)
        it.prefill.gate.spoil()
        assert text_of(await it.client.ask(post(body))) == answer_to(body)
        assert counted(it.gateway, "tl_gateway_failovers_total") == 0


@pytest.mark.parametrize("way", ["release", "cancel"])
async def test_p14_what_gives_back_is_said_again_on_a_fresh_connection(way: str) -> None:
    """A first failure opens the connections for it, which then die unseen."""
    async with fleet() as it:
        for count in (1, 2):
            it.prefill.fail("pushed", Status("INTERNAL") if way == "release" else HANG)
            async with Client(it.gateway.address) as client:
                await client.send(post(PLAIN))
                await it.prefill.reached("pushed", count)
                if count == 2:
                    it.prefill.gate.spoil() if way == "cancel" else it.decode.gate.spoil()
                client.leave()
                await it.decode.reached("released", count)
        assert not it.decode.held
    assert it.prefill.cancelled == it.decode.released


@BOTH
async def test_p14_an_http_connection_that_died_idle_costs_no_worker(body: dict[str, Any]) -> None:
    async with fleet() as it:
        assert text_of(await it.client.ask(post(body))) == answer_to(body)
        it.prefill.fail("tokenizing", CLOSE)
        it.decode.fail("asked", CLOSE)
        assert text_of(await it.client.ask(post(body))) == answer_to(body)
        assert counted(it.gateway, "tl_gateway_failovers_total") == 0


async def test_p16_requests_of_one_id_are_told_apart() -> None:
    async with fleet() as it:

        async def ask() -> str:
            async with Client(it.gateway.address) as client:
                return text_of(await client.ask(post(PLAIN, headers={"x-request-id": "twin"})))

        assert await asyncio.gather(*(ask() for _ in range(4))) == [answer_to(PLAIN)] * 4
        names = {order.request_id for order in it.prefill.prefills}
        assert names == {"twin", "twin-2", "twin-3", "twin-4"}
        # Both legs are told the same name.
        assert set(it.decode.claimed) == names


async def test_p16_a_twin_is_not_hurt_by_an_abort_that_is_pending() -> None:
    async with fleet() as it:
        it.prefill.fail("pushed", HANG)
        it.prefill.fail("cancelling", HANG)
        request = post(PLAIN, headers={"x-request-id": "twin"})
        await it.client.send(request)
        await it.prefill.reached("pushed")
        it.client.leave()
        await it.prefill.reached("cancelling")
        async with Client(it.gateway.address) as other:
            assert text_of(await other.ask(request)) == answer_to(PLAIN)
    assert it.decode.released == ["twin"]
    assert it.decode.ended == ["twin-2"]


async def test_p17_content_that_is_not_text_is_sent_once_and_not_to_prefill() -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 50_000}}
    body = PLAIN | {"messages": [{"role": "user", "content": [picture]}]}
    async with fleet() as it:
        assert text_of(await it.client.ask(post(body))) == answer_to(body)
        assert it.decode.bodies == [body]
    assert it.prefill.http.requests == [] and it.prefill.prefills == []


async def test_p17_each_leg_gets_the_prompt_once() -> None:
    long = "word " * 2000
    body = PLAIN | {"messages": [{"role": "user", "content": long}]}
    async with fleet() as it:
        assert text_of(await it.client.ask(post(body))) == answer_to(body)
        (asked,), (sent,) = it.prefill.http.requests, it.decode.http.requests
        assert asked.body.count(long.encode()) == sent.body.count(long.encode()) == 1
        assert len(it.prefill.prefills[0].prompt_ids) == len(ids_of("", body["messages"]))


@BOTH
@pytest.mark.parametrize("recomputes", [False, True])
async def test_p19_a_hand_off_that_transferred_nothing_is_seen(
    recomputes: bool, body: dict[str, Any]
) -> None:
    outcome = "recomputed" if recomputes else "handed_over"
    async with fleet() as it:
        it.decode.recomputes = recomputes
        assert text_of(await it.client.ask(post(body))) == answer_to(body)
        assert counted(it.gateway, f'tl_gateway_handoffs_total{{outcome="{outcome}"}}') == 1
        assert counted(it.gateway, "tl_gateway_handoffs_total") == 1
        tokens = len(it.prefill.prefills[0].prompt_ids)
        came = counted(it.gateway, 'tl_gateway_handoff_tokens_total{kind="resumed"}')
        assert came == (0 if recomputes else tokens)
    # What was not generated from is given back.
    pushed, nothing = it.decode.pushed, list[str]()
    given_back, used = (pushed, nothing) if recomputes else (nothing, pushed)
    assert (it.decode.released, it.decode.ended) == (given_back, used)


async def test_r10_clients_that_leave_do_not_make_a_prefill_worker_look_dead() -> None:
    async with fleet() as it:
        it.prefill.fail("prefilling", *([HANG] * 6))
        for count in range(6):
            async with Client(it.gateway.address) as client:
                await client.send(post(PLAIN))
                await it.prefill.reached("prefilling", count + 1)
                client.leave()
        await it.decode.reached("released", 6)
        assert text_of(await it.client.ask(post(PLAIN))) == answer_to(PLAIN)


async def test_r10_a_decode_worker_that_fails_to_be_pushed_to_does_not_cost_the_prefill_worker() -> (
    None
):
    async with fleet(decode=2) as it:
        it.decode.fail("receiving", RESET)
        assert text_of(await it.client.ask(post(PLAIN))) == answer_to(PLAIN)
        assert len(it.prefill.prefills) == 2


async def test_r10_without_a_prefill_worker_decode_is_not_touched() -> None:
    async with fleet(prefill=0) as it:
        response = await it.client.ask(post(PLAIN))
        assert (response.status, response.error["code"]) == (503, "no_capacity")
    assert it.decode.http.requests == []
