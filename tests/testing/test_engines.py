"""Stand-ins of engines: they answer as the surface says, hand over as told, and hold what nobody ends."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from pointsman.dialect.engines import DIALECTS, Probed, detect
from pointsman.dialect.handing import prefill_body
from pointsman.dialect.sglang import bootstrap_fields, named
from pointsman.dialect.vllm import (
    mooncake_decode,
    mooncake_engine_id,
    mooncake_prefill,
    nixl_decode,
    nixl_prefill,
    transfer_params,
)
from pointsman.domain.worker import Role, ServedModel
from pointsman.testing.client import Client, Response, get, post
from pointsman.testing.engines import FakeSglang, FakeVllm, answer_of
from pointsman.testing.engines.surface import FakeEngine
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
    Stage,
    text_of,
    until,
)
from pointsman.wire.body import with_fields

pytestmark = pytest.mark.anyio

CHATTED: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "content": "hello there, how are you?"}],
    "max_tokens": 20,
    "temperature": 0.5,
}
WRITTEN: dict[str, Any] = {"model": "m", "prompt": "Once upon a time", "top_p": 0.5}
BODIES = pytest.mark.parametrize(("path", "body"), [(CHAT, CHATTED), (TEXT, WRITTEN)])
STREAM = pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
KINDS = pytest.mark.parametrize("kind", [FakeVllm, FakeSglang])

Make = Callable[[str], FakeEngine]


def place(engine: FakeEngine) -> tuple[str, int]:
    host, _, port = engine.http.address.rpartition(":")
    return host, int(port)


async def ask(engine: FakeEngine, request: bytes) -> Response:
    """Ask on a connection of its own."""
    async with asyncio.timeout(5.0), Client(place(engine)) as client:
        return await client.ask(request)


@asynccontextmanager
async def asking(engine: FakeEngine, body: object, path: str = CHAT) -> AsyncIterator[Client]:
    """Ask, and leave in the end, without having waited for an answer."""
    async with Client(place(engine)) as client:
        await client.send(post(body, path))
        yield client
        client.leave()


async def settled(*engines: FakeEngine) -> None:
    """Wait until no request is under way."""
    await until(lambda: not any(engine.under_way.total() for engine in engines))


async def read(engine: FakeEngine) -> Any:
    """Read an engine as the gateway does."""
    dialect = DIALECTS[engine.dialect]
    answers = {}
    for probe in dialect.probes:
        answer = await ask(engine, get(probe.path))
        answers[probe.path] = Probed(answer.status, answer.body)
    return dialect.read(answers)


# The surface.


@KINDS
async def test_an_engine_is_known_and_read_by_its_dialect(kind: Make) -> None:
    async with kind("e") as engine:
        models = await ask(engine, get("/v1/models"))
        assert detect(Probed(200, models.body)) == engine.dialect
        reading = await read(engine)
        assert (reading.ready, reading.degraded, reading.running, reading.waiting) == (
            *(True, ""),
            *(0, 0),
        )
        assert reading.models == (ServedModel("m", "", 4096),)
        engine.load.running, engine.load.waiting = 3, 2
        engine.load.kv_usage, engine.load.lora_slots = 0.25, 4
        engine.models.append(ServedModel("adapter", "m", 4096))
        reading = await read(engine)
        assert (reading.running, reading.waiting, reading.lora_slots) == (3, 2, 4)
        assert (reading.kv_usage, reading.kv_total_blocks) == (0.25, 1024)
        assert reading.models[1:] == (ServedModel("adapter", "m", 4096),)


@KINDS
async def test_requests_under_way_are_part_of_the_load(kind: Make) -> None:
    async with kind("e") as engine:
        engine.fail("admitted", HANG)
        async with asking(engine, CHATTED):
            await engine.reached("admitted")
            assert (await read(engine)).running == 1
        await engine.reached("aborted")
        assert (await read(engine)).running == 0


@KINDS
@pytest.mark.parametrize("change", ["ready", "draining"])
async def test_one_that_is_not_ready_or_drains_takes_nothing(kind: Make, change: str) -> None:
    async with kind("e") as engine:
        setattr(engine, change, change == "draining")
        assert not (await read(engine)).ready
        assert (await ask(engine, post(CHATTED))).status == 503


@KINDS
async def test_a_key_is_needed_on_every_path(kind: Make) -> None:
    async with kind("e") as engine:
        engine.key = "k"
        for request in (get("/health"), get("/metrics"), get("/v1/models"), post(CHATTED)):
            assert (await ask(engine, request)).status == 401
        assert (await ask(engine, get("/health", {"authorization": "Bearer k"}))).status == 200


@KINDS
async def test_a_path_can_be_answered_otherwise_or_be_missing_or_below_another(kind: Make) -> None:
    async with kind("e") as engine:
        engine.says["/metrics"] = Say(401, {"error": "Unauthorized"})
        assert (await ask(engine, get("/metrics"))).status == 401
        engine.lacks.add("/v1/embeddings")
        for path in ("/v1/embeddings", "/v1/nothing"):
            missing = await ask(engine, post({"model": "m", "input": "x"}, path))
            assert (missing.status, missing.body) == (404, b'{"detail":"Not Found"}')
        assert (await ask(engine, get("/v1/embeddings"))).status == 404
        assert (await ask(engine, get(CHAT))).status == 405
        engine.base = "/below"
        assert (await ask(engine, get("/health"))).status == 404
        assert (await ask(engine, get("/below/health"))).status == 200


@KINDS
@STREAM
@BODIES
async def test_a_text_depends_on_every_field_but_those_of_transport(
    kind: Make, path: str, body: dict[str, Any], stream: bool
) -> None:
    async with kind("e") as engine:
        texts = set()
        for fields in ({}, {"seed": 1}, {"odd": {"b": 1}}, {"min_p": 0.1}, {"stop": ["x"]}):
            said = text_of(await ask(engine, post(body | fields | {"stream": stream}, path)))
            assert said == answer_of(path, body | fields)
            texts.add(said)
        assert len(texts) == 5
        alike = body | {"stream": True, "stream_options": {"include_usage": True}, "rid": "r"}
        assert answer_of(path, alike) == answer_of(path, body)


@KINDS
async def test_cached_tokens_are_told_where_the_engine_tells_them(kind: Make) -> None:
    async with kind("e") as engine:
        dialect = DIALECTS[engine.dialect]
        usage = {"stream_options": {"include_usage": True}, "stream": True}
        first = await ask(engine, post(CHATTED))
        assert dialect.cached_tokens(first.body) == 0
        again = await ask(engine, post(CHATTED))
        assert dialect.cached_tokens(again.body) > 0
        streamed = await ask(engine, post(CHATTED | usage))
        (event,) = [line for line in streamed.body.split(b"\n") if b'"usage"' in line]
        assert dialect.cached_tokens(event.removeprefix(b"data: ")) > 0
        assert (await read(engine)).cached_tokens > 0
        engine.says_cached = False
        assert dialect.cached_tokens((await ask(engine, post(CHATTED))).body) == -1


@KINDS
@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"model": "other"}, 404),
        ({"stream_options": {"include_usage": True}}, 400),
        ({"max_tokens": 1, "min_tokens": 2}, 400),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, 400),
    ],
)
async def test_what_real_ones_refuse_is_refused(
    kind: Make, fields: dict[str, Any], status: int
) -> None:
    async with kind("e") as engine:
        assert (await ask(engine, post(CHATTED | fields))).status == status
        assert not engine.under_way.total()


@KINDS
async def test_a_request_id_that_is_running_is_refused(kind: Make) -> None:
    async with kind("e") as engine:
        engine.fail("admitted", HANG)
        async with Client(place(engine)) as client:
            await client.send(post(CHATTED, headers={"x-request-id": "r"}))
            await engine.reached("admitted")
            twin = await ask(engine, post(CHATTED, headers={"x-request-id": "r"}))
            assert twin.status == 400
            other = await ask(engine, post(CHATTED, headers={"x-request-id": "s"}))
            assert other.status == 200
            client.leave()
        await settled(engine)
        assert (await ask(engine, post(CHATTED, headers={"x-request-id": "r"}))).status == 200


@KINDS
async def test_the_other_paths_answer_what_depends_on_what_they_are_asked(kind: Make) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/embeddings": {"input": ["a", "b"]},
        "/v1/rerank": {"query": "q", "documents": ["a", "b", "c"], "top_n": 2},
        "/v1/score": {"text_1": "a", "text_2": ["b", "c"]},
        "/v1/messages/count_tokens": {"messages": CHATTED["messages"]},
        "/tokenize": {"prompt": "hello"},
        "/v1/responses": {"input": "hello"},
        "/v1/messages": {"messages": CHATTED["messages"], "max_tokens": 8, "system": "s"},
    }
    async with kind("e") as engine:
        for path, body in bodies.items():
            asked = {"model": "m", **body}
            answers = [
                (await ask(engine, post(each, path))).body
                for each in (asked, {**asked, **_changed(body)})
            ]
            assert answers[0] != answers[1], path
            assert (await ask(engine, post(asked | {"model": "no"}, path))).status == 404


def _changed(body: dict[str, Any]) -> dict[str, Any]:
    name, value = next(iter(body.items()))
    return {name: [*value, value[0]] if isinstance(value, list) else value + "!"}


async def test_a_form_is_transcribed_by_its_fields() -> None:
    async with FakeVllm("e") as engine:
        texts = []
        for sound in (b"RIFF1", b"RIFF2"):
            body = (
                b'--x\r\ncontent-disposition: form-data; name="model"\r\n\r\nm\r\n--x\r\n'
                b'content-disposition: form-data; name="file"; filename="a.wav"\r\n\r\n%b\r\n--x--\r\n'
            ) % sound
            headers = {"content-type": "multipart/form-data; boundary=x"}
            request = post(body, "/v1/audio/transcriptions", headers)
            answer = await ask(engine, request)
            assert answer.status == 200, answer.body
            texts.append(msgspec.json.decode(answer.body)["text"])
        assert texts[0] != texts[1]


@pytest.mark.parametrize(
    ("path", "first", "last"),
    [
        ("/v1/responses", b"event: response.created", b"event: response.completed"),
        ("/v1/messages", b"event: message_start", b"event: message_stop"),
    ],
)
async def test_streams_of_the_other_apis_begin_and_end_as_theirs(
    path: str, first: bytes, last: bytes
) -> None:
    body = {"model": "m", "stream": True, "max_tokens": 8, "messages": [], "input": "x"}
    async with FakeVllm("e") as engine:
        streamed = await ask(engine, post(body, path))
        events = streamed.body.removesuffix(b"\n\n").split(b"\n\n")
        assert events[0].startswith(first) and events[-1].startswith(last)
        assert answer_of(path, body).split(" ")[0].encode() in streamed.body


# A pause.


async def test_a_pause_ends_when_the_test_says_so_or_whoever_asked_has_left() -> None:
    async with FakeVllm("e") as engine:
        pauses = [Pause(), Pause(), Pause()]
        engine.fail("asked", *pauses[:2])
        engine.fail("middle", pauses[2])
        async with Client(place(engine)) as client:
            await client.send(post(CHATTED))
            await engine.reached("asked")
            pauses[0].go_on()
            await engine.reached("middle")
            pauses[2].go_on()
            assert text_of(await client.response()) == answer_of(CHAT, CHATTED)
        async with asking(engine, CHATTED):
            await engine.reached("asked", 2)
        await settled(engine)
        assert engine.seen("admitted") == 1


def test_a_pause_is_nothing_for_a_call_or_a_note() -> None:
    allowed = [stage for stage in Stage if stage.allows(Pause())]
    assert allowed == [Stage.REQUEST, Stage.ANSWER]


# Hand-offs: NIXL.


def raw(body: dict[str, Any]) -> bytes:
    return msgspec.json.encode(body)


@asynccontextmanager
async def pair(connector: str) -> AsyncIterator[tuple[FakeVllm, FakeVllm]]:
    async with (
        FakeVllm("p", role=Role.PREFILL, connector=connector) as p,
        FakeVllm("d", role=Role.DECODE, connector=connector) as d,
    ):
        yield p, d


async def prefilled(p: FakeVllm, path: str, body: dict[str, Any]) -> dict[str, bytes]:
    """Ask a prefill worker, and return what its answer tells to the decode worker."""
    answer = await ask(p, post(nixl_prefill(path, raw(body), "m"), path))
    params = transfer_params(answer.body)
    assert params is not None, answer.body
    return nixl_decode(params)


@STREAM
@BODIES
async def test_nixl_pulls_what_was_computed_and_answers_from_it(
    path: str, body: dict[str, Any], stream: bool
) -> None:
    async with pair("nixl") as (p, d):
        fields = await prefilled(p, path, body)
        assert list(p.held) == ["p-1"] and p.held["p-1"].told
        whole = with_fields(raw(body | {"stream": stream}), fields)
        assert text_of(await ask(d, post(whole, path))) == answer_of(path, body)
        assert (p.held, p.pulled, p.notified) == ({}, ["p-1"], [])
        assert (await read(d)).remote_tokens == d.remote > 0


async def test_nixl_shows_a_leg_that_was_told_something_else() -> None:
    async with pair("nixl") as (p, d):
        fields = await prefilled(p, CHAT, CHATTED | {"temperature": 0.6})
        other = text_of(await ask(d, post(with_fields(raw(CHATTED), fields))))
        assert other == "prefill was told otherwise"


async def test_nixl_params_are_of_use_once_and_unchanged() -> None:
    async with pair("nixl") as (p, d):
        fields = await prefilled(p, CHAT, CHATTED)
        params = msgspec.json.decode(fields["kv_transfer_params"])
        for name, value in (
            *(("remote_block_ids", [[9]]), ("remote_engine_id", "x")),
            ("remote_request_id", "x"),
        ):
            wrong = CHATTED | {"kv_transfer_params": params | {name: value}}
            assert (await ask(d, post(wrong))).status == 500
        assert p.held
        whole = post(with_fields(raw(CHATTED), fields))
        assert (await ask(d, whole)).status == 200
        assert (await ask(d, whole)).status == 500


async def test_a_stream_of_a_prefill_worker_tells_no_params() -> None:
    async with pair("nixl") as (p, _):
        params = {"do_remote_decode": True, "do_remote_prefill": False}
        answer = await ask(p, post(CHATTED | {"stream": True, "kv_transfer_params": params}))
        assert b"kv_transfer_params" not in answer.body
        assert p.expire() == 1 and not p.held


@pytest.mark.parametrize("stage", ["admitted", "pulling"])
@pytest.mark.parametrize("connector", ["nixl", "mooncake"])
async def test_a_decode_worker_that_knew_of_it_gives_it_back(connector: str, stage: str) -> None:
    async with pair(connector) as (p, d):
        fields = await handed(connector, p, CHATTED)
        d.fail(stage, HANG)
        async with asking(d, with_fields(raw(CHATTED), fields)):
            await d.reached(stage)
            assert p.held
        await settled(d)
        assert not p.held and len(p.notified) == 1 and not p.pulled


async def handed(connector: str, p: FakeVllm, body: dict[str, Any]) -> dict[str, bytes]:
    if connector == "nixl":
        return await prefilled(p, CHAT, body)
    assert (await ask(p, post(mooncake_prefill(CHAT, raw(body), "m", "xfer-1")))).status == 200
    return mooncake_decode("xfer-1", p.engine_id, f"http://{p.side.address}")


@pytest.mark.parametrize("fault", [Say(400, {}), RESET, CLOSE, HANG])
async def test_one_that_did_not_know_of_it_leaves_it_held(fault: Fault) -> None:
    async with pair("nixl") as (p, d):
        fields = await prefilled(p, CHAT, CHATTED)
        d.fail("asked", fault)
        async with asking(d, with_fields(raw(CHATTED), fields)):
            await d.reached("asked")
        assert p.held


async def test_a_prefill_that_is_aborted_before_its_end_holds_nothing() -> None:
    async with pair("nixl") as (p, _):
        p.fail("admitted", HANG)
        async with asking(p, nixl_prefill(CHAT, raw(CHATTED), "m")):
            await p.reached("admitted")
        await p.reached("aborted")
        assert not p.held


async def test_one_that_is_aborted_after_it_holds_what_nobody_was_told_of() -> None:
    async with pair("nixl") as (p, _):
        p.fail("computed", HANG)
        async with asking(p, nixl_prefill(CHAT, raw(CHATTED), "m")):
            await p.reached("computed")
        await settled(p)
        (lease,) = p.held.values()
        assert not lease.told


@pytest.mark.parametrize("way", ["fail", "recompute"])
async def test_a_dead_prefill_worker_cannot_be_pulled_from(way: str) -> None:
    async with pair("nixl") as (p, d):
        d.on_failure = way
        fields = await prefilled(p, CHAT, CHATTED)
        await p.die()
        assert not p.held
        answer = await ask(d, post(with_fields(raw(CHATTED), fields)))
        if way == "fail":
            assert answer.status == 500
        else:
            assert text_of(answer) == answer_of(CHAT, CHATTED)
            assert d.remote == 0


async def test_one_that_dies_while_it_is_asked_on_the_side_fails_the_pull() -> None:
    async with pair("nixl") as (p, d):
        fields = await prefilled(p, CHAT, CHATTED)
        p.fail("linked", DIE)
        assert (await ask(d, post(with_fields(raw(CHATTED), fields)))).status == 500


async def test_p19_one_that_recomputes_says_nothing_of_it_and_frees_nothing() -> None:
    async with pair("nixl") as (p, d):
        d.recomputes = True
        fields = await prefilled(p, CHAT, CHATTED)
        answer = await ask(d, post(with_fields(raw(CHATTED), fields)))
        assert text_of(answer) == answer_of(CHAT, CHATTED)
        assert (await read(d)).remote_tokens == 0
        assert p.held


# Mooncake.


@STREAM
@pytest.mark.parametrize("order", ["pd", "dp"])
async def test_mooncake_legs_meet_in_either_order(order: str, stream: bool) -> None:
    async with pair("mooncake") as (p, d):
        async with Client(("127.0.0.1", int(p.side.address.split(":")[1]))) as bootstrap:
            engine = mooncake_engine_id((await bootstrap.ask(get("/query"))).body)
        fields = mooncake_decode("xfer-1", engine, f"http://{p.side.address}")
        legs = {
            "p": (p, post(mooncake_prefill(CHAT, raw(CHATTED), "m", "xfer-1"))),
            "d": (d, post(with_fields(raw(CHATTED | {"stream": stream}), fields))),
        }
        async with asyncio.TaskGroup() as group:
            first = group.create_task(ask(*legs[order[0]]))
            await legs[order[0]][0].reached("computed" if order[0] == "p" else "pulling")
            second = group.create_task(ask(*legs[order[1]]))
        answers = dict(zip(order, (first.result(), second.result()), strict=True))
        assert text_of(answers["d"]) == answer_of(CHAT, CHATTED)
        assert msgspec.json.decode(answers["p"].body)["kv_transfer_params"] is None
        assert (p.held, p.pulled) == ({}, ["xfer-1"])


async def test_a_mooncake_decode_worker_that_leaves_first_wants_nothing_later() -> None:
    async with pair("mooncake") as (p, d):
        fields = mooncake_decode("xfer-1", p.engine_id, f"http://{p.side.address}")
        async with asking(d, with_fields(raw(CHATTED), fields)):
            await p.reached("linked", 2)
        await settled(d)
        assert (
            await ask(p, post(mooncake_prefill(CHAT, raw(CHATTED), "m", "xfer-1")))
        ).status == 200
        assert not p.held


async def test_a_mooncake_decode_worker_needs_the_engine_of_the_bootstrap_server() -> None:
    async with pair("mooncake") as (p, d):
        fields = mooncake_decode("xfer-1", "another", f"http://{p.side.address}")
        assert (await ask(d, post(with_fields(raw(CHATTED), fields)))).status == 500


# SGLang.


@asynccontextmanager
async def apart() -> AsyncIterator[tuple[FakeSglang, FakeSglang]]:
    async with (
        FakeSglang("p", role=Role.PREFILL) as p,
        FakeSglang("d", role=Role.DECODE) as d,
    ):
        yield p, d


def legs(p: FakeSglang, body: dict[str, Any], room: int = 7) -> tuple[bytes, bytes]:
    """Return the bodies of both legs."""
    host, _, port = p.bootstrap.address.rpartition(":")
    fields = bootstrap_fields(host, int(port), room) | named(f"r-{room}")
    return prefill_body(CHAT, raw(body), "m", fields), with_fields(raw(body), fields)


@STREAM
@pytest.mark.parametrize("order", ["pd", "dp"])
async def test_sglang_legs_wait_for_each_other(order: str, stream: bool) -> None:
    async with apart() as (p, d):
        bodies = dict(zip("pd", legs(p, CHATTED | {"stream": stream}), strict=True))
        workers: dict[str, FakeSglang] = {"p": p, "d": d}
        async with asyncio.TaskGroup() as group:
            tasks = {}
            for name in order:
                tasks[name] = group.create_task(ask(workers[name], post(bodies[name])))
                await workers[name].reached("waiting")
                if name == order[0]:
                    assert workers[name].held == {7}
        assert text_of(tasks["d"].result()) == answer_of(CHAT, CHATTED)
        assert tasks["p"].result().status == 200
        assert not p.held and not d.held and d.remote > 0


@pytest.mark.parametrize(
    ("who", "stage"),
    [("p", "admitted"), ("p", "waiting"), ("p", "computed"), ("d", "admitted"), ("d", "waiting")],
)
@pytest.mark.parametrize("way", ["close", "abort"])
async def test_p05_an_aborted_leg_leaves_the_other_one_waiting(
    who: str, stage: str, way: str
) -> None:
    async with apart() as (p, d):
        to_p, to_d = legs(p, CHATTED)
        one, other = (p, d) if who == "p" else (d, p)
        one.fail(stage, HANG)
        async with asking(other, to_d if other is d else to_p):
            async with asking(one, to_p if one is p else to_d) as client:
                await one.reached(stage)
                await other.reached("waiting")
                if way == "abort":
                    await ask(one, post({"rid": "r-7"}, "/abort_request"))
                    assert (await client.response()).status == 503
            await settled(one)
            assert not one.held
            # It hears nothing of it, however long it waits.
            await asyncio.sleep(0.02)
            assert other.held == {7} and other.under_way.total() == 1
            await ask(other, post({"rid": "r-7"}, "/abort_request"))
            await settled(other)
        assert not other.held
        assert other.aborted_ids == ["r-7"]


async def test_p06_a_prompt_that_is_refused_makes_decode_generate_nonsense() -> None:
    async with apart() as (p, d):
        p.input_limit = 10
        to_p, to_d = legs(p, CHATTED)
        refusal = await ask(p, post(to_p))
        nonsense = text_of(await ask(d, post(to_d)))
        assert refusal.status == 400 and nonsense and nonsense != answer_of(CHAT, CHATTED)
        assert d.remote == 0


async def test_sglang_shows_a_leg_that_was_told_something_else() -> None:
    async with apart() as (p, d):
        to_p, _ = legs(p, CHATTED | {"temperature": 0.6})
        _, to_d = legs(p, CHATTED)
        _, answer = await asyncio.gather(ask(p, post(to_p)), ask(d, post(to_d)))
        assert text_of(answer) != answer_of(CHAT, CHATTED)


async def test_a_dead_prefill_worker_fails_the_request_of_the_decode_worker() -> None:
    async with apart() as (p, d):
        to_p, to_d = legs(p, CHATTED)
        p.fail("computed", DIE)
        async with asking(p, to_p):
            assert (await ask(d, post(to_d))).status == 500
        assert not p.held


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_a_leg_without_a_room_is_refused(role: Role) -> None:
    async with FakeSglang("e", role=role) as engine:
        assert (await ask(engine, post(CHATTED))).status == 400


async def test_an_abort_breaks_off_what_was_begun() -> None:
    async with FakeSglang("e") as engine:
        engine.fail("middle", HANG)
        async with asking(engine, CHATTED | {"rid": "r"}) as client:
            await engine.reached("middle")
            await ask(engine, post({"rid": "", "abort_all": True}, "/abort_request"))
            assert not (await client.response()).complete
