"""Hand-offs of engines that were not built for ours, and everything that fails in them, for each connector.

`apart` checks the law after each test: within a second both legs are over, nothing is in flight, and no engine holds
anything. Where only the time limit of an engine can free something, because the gateway never heard of it or nobody is
left who could be told, the test says so with `expire`.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest

from pointsman.dialect.engines import DIALECTS, Probed
from pointsman.testing.client import Client, Response, get, post
from pointsman.testing.engines import FakeVllm, answer_of
from pointsman.testing.engines.fleet import Apart, apart
from pointsman.testing.gateways import counted
from pointsman.testing.handoffs import (
    CHAT,
    CLOSE,
    DIE,
    HANG,
    RESET,
    TEXT,
    Fault,
    Pause,
    Say,
    prompt_of,
    text_of,
)
from pointsman.wire.sse import ERROR_EVENT

pytestmark = pytest.mark.anyio

PLAIN: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "content": "hello there"}],
    "temperature": 0.7,
    "max_tokens": 20,
}
STREAM = PLAIN | {"stream": True}
TOLD = STREAM | {"stream_options": {"include_usage": True}}
WRITTEN: dict[str, Any] = {"model": "m", "prompt": "Once upon a time", "seed": 7, "odd": {"a": 1}}

REFUSAL = {"error": {"message": "too long", "type": "BadRequestError", "param": None, "code": 400}}

VLLM = ("nixl", "mooncake")
CONNECTORS = pytest.mark.parametrize("connector", [*VLLM, "bootstrap"])
OF_VLLM = pytest.mark.parametrize("connector", VLLM)
BOTH = pytest.mark.parametrize("body", [PLAIN, STREAM], ids=["plain", "stream"])
WAYS = pytest.mark.parametrize("way", [Client.leave, Client.hang_up], ids=["reset", "closed"])

BEYOND = {
    "nixl": ("asked", "admitted", "computed"),
    "mooncake": ("asked", "admitted", "computed"),
    "bootstrap": ("asked", "admitted", "waiting", "computed", "transferred"),
}
"""The stages of a prefill worker before it says anything."""

WITHIN = {
    "nixl": ("asked", "admitted", "pulling", "pulled"),
    "mooncake": ("asked", "admitted", "pulling", "pulled"),
    "bootstrap": ("asked", "admitted", "waiting", "transferred"),
}
"""The stages of a decode worker before it says anything."""

ENDS = (RESET, CLOSE, DIE)
FAILS = (*ENDS, Say(500, REFUSAL), Say(503, REFUSAL))


def named(fault: Fault) -> str:
    return f"answers {fault.status}" if isinstance(fault, Say) else getattr(fault, "name", "")


def cases(
    stages: Mapping[str, tuple[str, ...]], faults: tuple[Fault, ...], *answers: str
) -> pytest.MarkDecorator:
    """Each fault at each stage of each connector; what ends a connection, at those of an answer as well."""
    found = [
        (connector, stage, fault)
        for connector, before in stages.items()
        for stage, kinds in (
            *((each, faults) for each in before),
            *((each, ENDS) for each in answers),
        )
        for fault in kinds
    ]
    ids = [f"{connector}, {stage}: {named(fault)}" for connector, stage, fault in found]
    return pytest.mark.parametrize(("connector", "stage", "fault"), found, ids=ids)


P_FAILS = cases(BEYOND, FAILS, "head", "begun", "middle")
D_FAILS = cases(WITHIN, FAILS, "head")
D_FAILS_LATER = cases(dict.fromkeys(WITHIN, ()), (), "begun", "middle")


def waits(stages: Mapping[str, tuple[str, ...]], *answers: str) -> pytest.MarkDecorator:
    found = [(connector, each) for connector in stages for each in (*stages[connector], *answers)]
    return pytest.mark.parametrize(("connector", "stage"), found)


P_WAITS = waits(BEYOND, "head", "middle")
D_WAITS = waits(WITHIN, "head", "begun", "middle")


PROMPT_TOKENS = 'tl_gateway_handoff_tokens_total{kind="prompt"}'


def handed(it: Apart, outcome: str = "handed_over") -> float:
    return counted(it.gateway, f'tl_gateway_handoffs_total{{outcome="{outcome}"}}')


def failed(response: Response) -> None:
    """Check that an answer is one clean error, and that it is not laid to the client."""
    assert response.complete and response.status in (500, 502, 503, 504), response.body
    assert msgspec.json.decode(response.body)["error"]["message"]


# What it is all for.


@CONNECTORS
@pytest.mark.parametrize("stream", [{}, {"stream": True}, {"stream": True, "usage": True}])
@pytest.mark.parametrize(("path", "body"), [(CHAT, PLAIN), (TEXT, WRITTEN)], ids=["chat", "text"])
async def test_apart_says_what_one_alone_says_and_the_cache_was_used(
    connector: str, path: str, body: dict[str, Any], stream: dict[str, Any]
) -> None:
    asked = body | {"stream": bool(stream)}
    if "usage" in stream:
        asked["stream_options"] = {"include_usage": True}
    async with apart(connector) as it:
        for count in (1, 2):
            assert text_of(await it.client.ask(post(asked, path))) == answer_of(path, body)
            await it.over()
            assert (handed(it), it.decode.remote > 0) == (count, True)
        # No answer says how many tokens came from elsewhere; the counter of the engine does.
        assert it.decode.remote == 2 * len(prompt_of(body))
        assert counted(it.gateway, PROMPT_TOKENS) == it.decode.remote


@CONNECTORS
async def test_many_at_once_are_not_mixed_up(connector: str) -> None:
    async with apart(connector, prefill=2, decode=2) as it:

        async def ask(number: int) -> None:
            body = PLAIN | {"seed": number, "stream": bool(number % 2)}
            async with Client(it.gateway.address) as client:
                assert text_of(await client.ask(post(body))) == answer_of(CHAT, body)

        await asyncio.gather(*(ask(number) for number in range(16)))
        assert handed(it) == 16


@BOTH
async def test_p19_a_prefill_worker_that_keeps_nothing_is_counted_as_recomputed(
    body: dict[str, Any],
) -> None:
    """It has no connector, so its answer says nothing of blocks, and the decode worker computes the prompt."""
    async with apart("nixl") as it:
        it.prefill.connector = ""  # type: ignore[union-attr]
        assert text_of(await it.client.ask(post(body))) == answer_of(CHAT, body)
        await it.over()
        assert (handed(it, "recomputed"), handed(it), it.decode.remote) == (1, 0, 0)


@OF_VLLM
@pytest.mark.parametrize("body", [PLAIN, TOLD], ids=["plain", "stream"])
async def test_p19_a_decode_worker_that_recomputes_is_told_by_its_counter(
    connector: str, body: dict[str, Any]
) -> None:
    """It pays no attention to what it is given: what the gateway reads of it does not grow."""
    async with apart(connector) as it:
        counter = await remote_tokens(it)
        assert text_of(await it.client.ask(post(body))) == answer_of(CHAT, body)
        assert await remote_tokens(it) == counter + len(prompt_of(body))
        it.decode.recomputes = True  # type: ignore[union-attr]
        assert text_of(await it.client.ask(post(body))) == answer_of(CHAT, body)
        assert await remote_tokens(it) == counter + len(prompt_of(body))
        await it.idle()
        assert it.expire() == 1  # One that pays no attention gives nothing back.


async def remote_tokens(it: Apart) -> int:
    """Read the counter as polling does."""
    host, _, port = it.decode.http.address.rpartition(":")
    async with Client((host, int(port))) as client:
        metrics = await client.ask(get("/metrics"))
    probed = {"/metrics": Probed(metrics.status, metrics.body)}
    return DIALECTS["vllm"].read(probed).remote_tokens or 0


# What each leg is told.


@CONNECTORS
async def test_p10_the_prefill_leg_computes_one_token_and_does_not_stream(connector: str) -> None:
    body = TOLD | {"max_completion_tokens": 30}
    if connector in VLLM:
        body |= {"min_tokens": 5}
    async with apart(connector) as it:
        assert text_of(await it.client.ask(post(body))) == answer_of(CHAT, body)
        (told,), (own,) = it.prefill.bodies, it.decode.bodies
        assert (told["max_tokens"], told["max_completion_tokens"], told["stream"]) == (1, 1, False)
        assert not {"stream_options", "min_tokens"} & told.keys()
        assert {name: own[name] for name in body} == body


@CONNECTORS
@BOTH
async def test_p16_twins_get_names_of_their_own_and_the_same_on_both_legs(
    connector: str, body: dict[str, Any]
) -> None:
    async with apart(connector) as it, Client(it.gateway.address) as other:
        pauses = Pause(), Pause()
        it.prefill.fail("admitted", *pauses)
        asked = post(body, headers={"x-request-id": "twin"})
        await it.client.send(asked)
        await other.send(asked)
        await it.prefill.reached("admitted", 2)
        for pause in pauses:
            pause.go_on()
        for client in (it.client, other):
            response = await client.response()
            assert text_of(response) == answer_of(CHAT, body)
            assert response.header("x-request-id") == "twin"
        names = [
            sorted(request.header("x-request-id") or "" for request in engine.http.requests)
            for engine in (it.prefill, it.decode)
        ]
        assert names[0] == names[1] and len(set(names[0])) == 2 and "" not in names[0]


@CONNECTORS
@BOTH
async def test_p17_an_image_is_in_each_leg_once(connector: str, body: dict[str, Any]) -> None:
    url = "data:image/png;base64," + "iVBORw0KGgo" * 1000
    parts = [
        {"type": "text", "text": "What is it?"},
        {"type": "image_url", "image_url": {"url": url}},
    ]
    body = body | {"messages": [{"role": "user", "content": parts}]}
    async with apart(connector) as it:
        for engine in it.engines:
            engine.models = [engine.models[0]._replace(max_model_len=1 << 20)]
        assert text_of(await it.client.ask(post(body))) == answer_of(CHAT, body)
        for engine in (it.prefill, it.decode):
            (request,) = engine.http.requests
            assert request.body.count(url.encode()) == 1
        assert handed(it) == 1


# The prefill worker fails.


@BOTH
@P_FAILS
async def test_p13_another_prefill_worker_takes_over(
    connector: str, stage: str, fault: Fault, body: dict[str, Any]
) -> None:
    async with apart(connector, prefill=2) as it:
        it.prefill.fail(stage, fault)
        assert text_of(await it.client.ask(post(body))) == answer_of(CHAT, body)
        assert it.prefills[1].bodies
        await unheard(it)
        # The decode worker did nothing wrong, and is asked again.
        assert text_of(await it.client.ask(post(body))) == answer_of(CHAT, body)


@BOTH
@P_FAILS
async def test_p13_alone_the_client_gets_one_clean_error(
    connector: str, stage: str, fault: Fault, body: dict[str, Any]
) -> None:
    async with apart(connector) as it:
        it.prefill.fail(stage, fault)
        failed(await it.client.ask(post(body)))
        await unheard(it)
        assert (await it.client.ask(get("/v1/models"))).status == 200


async def unheard(it: Apart) -> None:
    """Free what a prefill worker held whose answer the gateway did not get: nobody else knows of that."""
    await it.idle()
    for engine in it.prefills:
        if isinstance(engine, FakeVllm) and engine.held:
            assert not any(lease.told for lease in engine.held.values())
            engine.expire()


@CONNECTORS
@BOTH
@pytest.mark.parametrize("status", [400, 413, 422])
async def test_p06_what_prefill_finds_wrong_is_the_clients_and_decode_is_not_heard(
    connector: str, status: int, body: dict[str, Any]
) -> None:
    async with apart(connector, prefill=2, decode=2) as it:
        it.prefill.fail("asked", Say(status, REFUSAL))
        response = await it.client.ask(post(body))
        assert (response.status, msgspec.json.decode(response.body)) == (status, REFUSAL)
        assert not it.prefills[1].bodies and not it.decodes[1].bodies
        assert not it.decode.served
        await it.over()
        assert text_of(await it.client.ask(post(body))) == answer_of(CHAT, body)


@BOTH
async def test_p06_nonsense_from_a_cache_that_was_never_filled_reaches_nobody(
    body: dict[str, Any],
) -> None:
    async with apart("bootstrap") as it:
        it.prefill.input_limit = 10  # type: ignore[union-attr]
        # The decode worker has answered in full before the refusal is out.
        pause = Pause()
        it.prefill.fail("asked", pause)
        await it.client.send(post(body))
        await it.decode.reached("waiting")
        pause.go_on()
        response = await it.client.response()
        assert response.status == 400
        assert b"exceeds 10 tokens" in response.body


# The decode worker fails.


@BOTH
@D_FAILS
async def test_another_decode_worker_takes_over(
    connector: str, stage: str, fault: Fault, body: dict[str, Any]
) -> None:
    async with apart(connector, decode=2, prefill=2) as it:
        it.decode.fail(stage, fault)
        response = await it.client.ask(post(body))
        if isinstance(fault, Say) and fault.status == 500:
            # An answer is an answer: as without a hand-off, it is not asked for elsewhere.
            assert (response.status, msgspec.json.decode(response.body)) == (500, REFUSAL)
        else:
            assert text_of(response) == answer_of(CHAT, body)
            assert it.decodes[1].bodies
        await dead(it)


@D_FAILS_LATER
async def test_a_plain_answer_that_breaks_is_asked_of_another_one(
    connector: str, stage: str, fault: Fault
) -> None:
    async with apart(connector, decode=2) as it:
        it.decode.fail(stage, fault)
        assert text_of(await it.client.ask(post(PLAIN))) == answer_of(CHAT, PLAIN)
        assert len(it.prefill.bodies) == 2


@D_FAILS_LATER
async def test_a_stream_that_breaks_ends_with_the_error_event(
    connector: str, stage: str, fault: Fault
) -> None:
    async with apart(connector, decode=2) as it:
        it.decode.fail(stage, fault)
        response = await it.client.ask(post(STREAM))
        assert (response.status, response.complete) == (200, True)
        assert response.body.count(ERROR_EVENT) == 1 and response.body.endswith(ERROR_EVENT)
        assert not it.decodes[1].bodies


async def dead(it: Apart) -> None:
    """Free what is held for a decode worker that has died: it can give nothing back."""
    await it.idle()
    if it.decode.dead:
        it.expire()


@OF_VLLM
@BOTH
@pytest.mark.parametrize("status", [400, 404, 413, 422])
async def test_p04_a_decode_worker_that_refuses_is_heard_and_nothing_stays_held(
    connector: str, status: int, body: dict[str, Any]
) -> None:
    async with apart(connector, decode=2) as it:
        it.decode.fail("asked", Say(status, REFUSAL))
        response = await it.client.ask(post(body))
        assert (response.status, msgspec.json.decode(response.body)) == (status, REFUSAL)
        assert not it.decodes[1].bodies


@OF_VLLM
@BOTH
async def test_a_prefill_worker_that_dies_before_the_pull_is_replaced(
    connector: str, body: dict[str, Any]
) -> None:
    async with apart(connector, prefill=2) as it:
        it.prefill.fail("linked", DIE)
        response = await it.client.ask(post(body))
        if response.status == 200:
            assert text_of(response) == answer_of(CHAT, body)
        else:
            failed(response)


# Who hangs.

PATIENCE: dict[str, Any] = {
    "prefill_timeout_s": 0.2,
    "head_timeout_s": 0.3,
    "first_byte_timeout_s": 0.3,
    "gap_timeout_s": 0.3,
}


@BOTH
@P_WAITS
async def test_a_prefill_worker_that_hangs_is_given_up(
    connector: str, stage: str, body: dict[str, Any]
) -> None:
    async with apart(connector, unified=1, targets=("disaggregated", "unified"), **PATIENCE) as it:
        it.prefill.fail(stage, HANG)
        assert text_of(await it.client.ask(post(body))) == answer_of(CHAT, body)
        await unheard(it)


@BOTH
@D_WAITS
async def test_a_decode_worker_that_hangs_is_given_up(
    connector: str, stage: str, body: dict[str, Any]
) -> None:
    async with apart(connector, unified=1, targets=("disaggregated", "unified"), **PATIENCE) as it:
        it.decode.fail(stage, HANG)
        response = await it.client.ask(post(body))
        if stage in ("begun", "middle") and "stream" in body:
            assert response.body.endswith(ERROR_EVENT)
        else:
            assert text_of(response) == answer_of(CHAT, body)


# The client leaves, or the gateway is stopped, at every point where the story waits.


@WAYS
@BOTH
@P_WAITS
async def test_p02_a_client_that_leaves_during_the_prefill_strands_nothing(
    connector: str, stage: str, body: dict[str, Any], way: Callable[[Client], None]
) -> None:
    """The prefill worker goes on, if it is let: what it holds then is given back."""
    async with apart(connector) as it:
        pause = Pause()
        it.prefill.fail(stage, pause)
        await it.client.send(post(body))
        await it.prefill.reached(stage)
        way(it.client)
        await disconnected(it)
        pause.go_on()
        await it.over()
        async with Client(it.gateway.address) as other:
            assert text_of(await other.ask(post(body))) == answer_of(CHAT, body)


@WAYS
@BOTH
@D_WAITS
async def test_p01_a_client_that_leaves_after_it_strands_nothing(
    connector: str, stage: str, body: dict[str, Any], way: Callable[[Client], None]
) -> None:
    async with apart(connector) as it:
        it.decode.fail(stage, HANG)
        await it.client.send(post(body))
        await it.decode.reached(stage)
        way(it.client)
        await it.over()
        async with Client(it.gateway.address) as other:
            assert text_of(await other.ask(post(body))) == answer_of(CHAT, body)


async def disconnected(it: Apart) -> None:
    """Wait until the gateway has seen that the client has left."""
    async with asyncio.timeout(5.0):
        while not counted(it.gateway, "tl_gateway_client_disconnects_total"):  # noqa: ASYNC110
            await asyncio.sleep(0.002)


@BOTH
@pytest.mark.parametrize("who", ["p", "d"])
@pytest.mark.parametrize("stage", ["admitted", "waiting"])
async def test_p05_cancelling_one_leg_cancels_the_other_within_a_second(
    stage: str, who: str, body: dict[str, Any]
) -> None:
    async with apart("bootstrap", prefill=2, decode=2) as it:
        one, other = (it.prefill, it.decode) if who == "p" else (it.decode, it.prefill)
        one.fail(stage, RESET)
        await it.client.send(post(body))
        await one.reached("aborted")
        async with asyncio.timeout(1.0):
            await other.reached("aborted")
        assert text_of(await it.client.response()) == answer_of(CHAT, body)


async def test_p05_a_storm_of_aborts_leaves_the_engines_free() -> None:
    async with apart("bootstrap") as it:
        it.prefill.fail("waiting", *([HANG] * 8))
        clients = [Client(it.gateway.address) for _ in range(8)]
        for client in clients:
            await client.__aenter__()
            await client.send(post(PLAIN))
        await it.prefill.reached("waiting", 8)
        await it.decode.reached("waiting", 8)
        for client in clients:
            client.leave()
        await it.over()
        assert text_of(await it.client.ask(post(PLAIN))) == answer_of(CHAT, PLAIN)


@WAYS
@BOTH
@pytest.mark.parametrize("who", ["p", "d"])
async def test_p05_legs_that_do_not_look_at_their_connections_are_told_to_abort(
    who: str, body: dict[str, Any], way: Callable[[Client], None]
) -> None:
    async with apart("bootstrap") as it:
        for engine in (it.prefill, it.decode):
            engine.deaf = True  # type: ignore[union-attr]
        one, other = (it.prefill, it.decode) if who == "p" else (it.decode, it.prefill)
        one.fail("admitted", HANG)  # So the other one waits in the room.
        await it.client.send(post(body))
        await one.reached("admitted")
        await other.reached("waiting")
        way(it.client)
        await it.over()
        async with Client(it.gateway.address) as again:
            assert text_of(await again.ask(post(body))) == answer_of(CHAT, body)


@BOTH
@D_WAITS
async def test_a_stop_leaves_nothing_behind(
    connector: str, stage: str, body: dict[str, Any]
) -> None:
    """`apart` stops the gateway while the request is at that stage."""
    async with apart(connector, busy=True, drain_deadline_s=0.0, shutdown_grace_s=0.0) as it:
        it.decode.fail(stage, HANG)
        await it.client.send(post(body))
        await it.decode.reached(stage)
