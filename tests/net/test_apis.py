"""Every API over real sockets: routed alike, failed over alike, spliced alike, whatever it looks like."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pointsman.config import GatewayConfig
from pointsman.domain.observation import Observation
from pointsman.domain.registry import WorkerReport
from pointsman.domain.routes import Backend, Route, Step
from pointsman.domain.worker import ServedModel
from pointsman.net.clock import monotonic
from pointsman.testing.client import Client, get, post
from pointsman.testing.gateways import Keys, fronted, running
from pointsman.testing.origin import (
    Conversation,
    Origin,
    Script,
    answers,
    resets,
    sse_chunk,
    sse_head,
)
from pointsman.wire.sse import MESSAGES_ERROR_EVENT

pytestmark = pytest.mark.anyio

PATHS = GatewayConfig().paths
JSON_PATHS = [path for path in PATHS if "audio" not in path]
FORM_PATHS = [path for path in PATHS if "audio" in path]
ALIAS = (Route(model="public", backends=(Backend(model="m"),)),)
NO_PATH = answers({"detail": "Not Found"}, 404)
FORM = {"content-type": "multipart/form-data; boundary=b"}
MESSAGES = "/v1/messages"


def form(model: bytes = b"public") -> bytes:
    return (
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="model"\r\n\r\n'
        b'\x00\xff\r\n--bX\r\n{"model":"public"}\r\n'
        b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\n' + model + b"\r\n--b--\r\n"
    )


@asynccontextmanager
async def two(
    first: Script, second: Script, **options: Any
) -> AsyncIterator[tuple[Origin, Origin, Client]]:
    """Run two workers, `a` asked before `b`, a gateway, and a client of it."""
    async with Origin(first) as a, Origin(second) as b:
        workers = {"a": a.address, "b": b.address}
        async with running(workers, **options) as gateway, Client(gateway.address) as client:
            yield a, b, client


@pytest.mark.parametrize("path", JSON_PATHS)
async def test_every_api_fails_over_and_has_its_model_spliced(path: str) -> None:
    body = b'{ "model":"public", "x": {"model":"public"}, "n": 1.0 }'
    async with two(resets(), answers({"ok": path}), routes=ALIAS) as (a, b, client):
        response = await client.ask(post(body, path))
    assert (response.status, response.body) == (200, msgspec.json.encode({"ok": path}))
    assert [len(origin.requests) for origin in (a, b)] == [1, 1]
    assert b.requests[0].line == f"POST {path} HTTP/1.1"
    assert b.requests[0].body == body.replace(b'"public"', b'"m"', 1)


@pytest.mark.parametrize("path", FORM_PATHS)
async def test_a_form_fails_over_and_has_its_model_spliced(path: str) -> None:
    async with two(resets(), answers({"text": "hi"}), routes=ALIAS) as (_, b, client):
        response = await client.ask(post(form(), path, FORM))
        assert (response.status, response.body) == (200, b'{"text":"hi"}')
    request = b.requests[0]
    assert request.body == form(b"m")
    assert request.header("content-length") == str(len(form(b"m")))
    assert request.header("content-type") == FORM["content-type"]


@pytest.mark.parametrize(
    ("body", "headers", "code"),
    [
        (form(b""), FORM, "model"),
        (form(b"m\r\n--b\r\nContent-Disposition: form-data; name=model\r\n\r\nn"), FORM, "model"),
        (form(), {"content-type": "multipart/form-data"}, None),
        (form(), {"content-type": "application/json"}, None),
        (b'{"model":"m"}', FORM, None),
    ],
)
async def test_a_form_that_cannot_be_read_is_400(
    body: bytes, headers: dict[str, str], code: str | None
) -> None:
    async with two(answers({}), answers({})) as (a, b, client):
        response = await client.ask(post(body, FORM_PATHS[0], headers))
        assert (response.status, response.error["param"]) == (400, code)
        twice = post(form(b"m"), FORM_PATHS[0], FORM | {"Content-Type": "text/plain"})
        assert (await client.ask(twice)).status == 400
    assert not (a.requests or b.requests)


async def test_audio_may_be_asked_for_in_json_and_other_paths_take_forms_too() -> None:
    paths = ("/v1/audio/transcriptions", "/v1/images/edits")
    async with two(answers({}), answers({}), paths=paths) as (a, _, client):
        assert (await client.ask(post({"model": "m"}, paths[0]))).status == 200
        bare = b"POST /v1/images/edits HTTP/1.1\r\nhost: h\r\ncontent-length: 13\r\n\r\n"
        assert (await client.ask(bare + b'{"model":"m"}')).status == 200
        assert (await client.ask(post(form(b"m"), paths[1], FORM))).status == 200
        assert (await client.ask(post(form(b"m"), paths[1]))).status == 400
    assert [request.body[:3] for request in a.requests] == [b'{"m', b'{"m', b"--b"]


async def test_a_form_is_as_large_as_any_body_may_be() -> None:
    async with two(answers({}), answers({}), max_body_bytes=64) as (_, _, client):
        assert (await client.ask(post(form(), FORM_PATHS[0], FORM))).status == 413


async def test_a_key_for_some_models_holds_for_forms(tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    key = {"x-api-key": keys.make("infer", models=["public"])}
    async with two(answers({}), answers({}), routes=ALIAS, **keys.options) as (_, _, client):
        assert (await client.ask(post(form(), FORM_PATHS[0], FORM | key))).status == 200
        refused = await client.ask(post(form(b"m"), FORM_PATHS[0], FORM | key))
        assert (refused.status, refused.error["code"]) == (403, "insufficient_scope")


async def test_an_engine_without_the_path_is_left_for_one_that_has_it() -> None:
    async with two(NO_PATH, answers({"ok": 1}), max_attempts=1) as (a, b, client):
        for _ in range(3):
            assert (await client.ask(post({"model": "m"}, "/v1/rerank"))).status == 200
    assert [len(origin.requests) for origin in (a, b)] == [1, 3]


async def test_where_no_engine_has_the_path_the_client_is_told_which_do_not() -> None:
    async with two(NO_PATH, answers(b"404 page not found", 404)) as (a, b, client):
        for _ in range(2):
            response = await client.ask(post({"model": "m"}, "/v1/rerank"))
            error = response.error
            assert (response.status, error["code"]) == (404, "unsupported_endpoint")
            assert error["message"] == "no worker of the model 'm' serves /v1/rerank: a, b"
            assert response.header("retry-after") is None
    assert [len(origin.requests) for origin in (a, b)] == [1, 1]


async def test_an_engine_whose_dialect_lacks_the_path_is_not_asked_until_it_is_another() -> None:
    async with Origin() as origin, running() as gateway, Client(gateway.address) as client:
        report = WorkerReport("a", origin.address, "m", dialect="llamacpp")
        gateway.registry.beat(report, monotonic())
        response = await client.ask(post({"model": "m"}, "/v1/audio/translations"))
        assert response.error["message"] == (
            "no worker of the model 'm' serves /v1/audio/translations: a (llamacpp)"
        )
        assert (await client.ask(post({"model": "m"}))).status == 200
    assert len(origin.requests) == 1


async def test_an_engine_that_was_down_is_asked_again() -> None:
    async with fronted(NO_PATH, answers({})) as (_, gateway, client):
        assert (await client.ask(post({"model": "m"}, "/v1/rerank"))).status == 404
        (worker,) = gateway.registry.snapshot()
        for up in (False, True):
            seen = Observation(up=up, dialect="", model="m")
            gateway.registry.observe(worker, seen, monotonic())
        assert (await client.ask(post({"model": "m"}, "/v1/rerank"))).status == 200


async def test_a_cascade_asks_its_last_model_where_nothing_tells_how_sure_one_is() -> None:
    rule = Step("small", "mean_logprob > -1.2")
    route = Route("auto", cascade=(rule, Step("m")))
    async with two(answers({}), answers({}), routes=(route,)) as (a, _, client):
        assert (await client.ask(post({"model": "auto"}, "/v1/embeddings"))).status == 200
        form_response = await client.ask(post(form(b"auto"), FORM_PATHS[0], FORM))
        assert form_response.status == 200
    assert [request.body for request in a.requests] == [b'{"model":"m"}', form(b"m")]


# Clients of the Messages API.


async def test_x_api_key_is_a_bearer_key_and_never_reaches_an_engine(tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    good, other = keys.make("infer"), keys.make("infer")
    async with two(answers({}), answers({}), **keys.options) as (a, _, client):
        for headers, status in (
            ({"x-api-key": good}, 200),
            ({"x-api-key": good, "authorization": f"Bearer {good}"}, 200),
            ({"x-api-key": good, "authorization": f"Bearer {other}"}, 401),
            ({"x-api-key": good, "X-Api-Key": other}, 401),
            ({"x-api-key": "none"}, 401),
            ({}, 401),
        ):
            assert (await client.ask(post({"model": "m"}, MESSAGES, headers))).status == status
    assert all(request.header("x-api-key") is None for request in a.requests)
    assert all(request.header("authorization") is None for request in a.requests)


async def test_errors_of_the_gateway_are_those_of_the_messages_api() -> None:
    async with two(answers({}, 503), answers({}, 503)) as (_, _, client):
        for body, status, kind, code in (
            ({"model": "none"}, 404, "not_found_error", "model_not_found"),
            ({"model": ""}, 400, "invalid_request_error", None),
            ({"model": "m"}, 503, "overloaded_error", "no_capacity"),
        ):
            for path in (MESSAGES, MESSAGES + "/count_tokens"):
                response = await client.ask(post(body, path))
                told = msgspec.json.decode(response.body)
                assert (response.status, told["type"]) == (status, "error")
                assert (told["error"]["type"], response.error["code"]) == (kind, code)


async def test_a_broken_stream_of_the_messages_api_ends_with_its_error_event() -> None:
    start = b'event: message_start\ndata: {"type":"message_start"}\n\n'
    async with two(resets(sse_head(), sse_chunk(start)), answers({})) as (_, b, client):
        response = await client.ask(post({"model": "m", "stream": True}, MESSAGES))
    assert response.complete
    assert response.body == start + MESSAGES_ERROR_EVENT
    assert not b.requests


async def test_h18_h19_models_are_listed_for_both_kinds_of_clients() -> None:
    """H17, H18, H19: from what is known, with context and parent, and no engine is asked."""
    version = {"anthropic-version": "2023-06-01"}
    async with Origin() as origin, running() as gateway, Client(gateway.address) as client:
        served = (ServedModel("fr", "m", 2048),)
        report = WorkerReport("a", origin.address, "m", served=served, max_model_len=4096)
        gateway.registry.beat(report, monotonic())
        one = {"object": "model", "created": 0, "owned_by": "tinyllm"}
        adapter = {"id": "fr", **one, "max_model_len": 2048, "root": "m", "parent": "m"}
        listed = [adapter, {"id": "m", **one, "max_model_len": 4096}]
        response = await client.ask(get("/v1/models"))
        assert msgspec.json.decode(response.body) == {"object": "list", "data": listed}
        page = msgspec.json.decode((await client.ask(get("/v1/models", version))).body)
        assert [each["display_name"] for each in page["data"]] == ["fr", "m"]
        assert page["has_more"] is False
        found = await client.ask(get("/v1/models/fr", version))
        assert msgspec.json.decode(found.body)["type"] == "model"
        missing = await client.ask(get("/v1/models/none", version))
        assert msgspec.json.decode(missing.body)["type"] == "error"
    assert origin.connections == 0


# The public model (H03).

TEXT = "I am m, and m is my name."


EVENTS: list[tuple[str, list[dict[str, Any]]]] = [
    (
        "/v1/responses",
        [
            {"type": "response.created", "response": {"id": "r", "model": "m"}},
            {"type": "response.output_text.delta", "delta": TEXT},
            {"type": "response.completed", "response": {"model": "m", "output": [{"text": TEXT}]}},
        ],
    ),
    (
        MESSAGES,
        [
            {"type": "message_start", "message": {"id": "1", "model": "m", "content": []}},
            {"type": "content_block_delta", "delta": {"type": "text_delta", "text": TEXT}},
            {"type": "message_stop"},
        ],
    ),
]


@pytest.mark.parametrize(("path", "said"), EVENTS)
async def test_h03_the_public_model_stands_in_the_events_of_every_api(
    path: str, said: list[dict[str, Any]]
) -> None:
    def told(model: str) -> bytes:
        named = [msgspec.json.encode(each) for each in said]
        renamed = [each.replace(b'"model":"m"', b'"model":"%b"' % model.encode()) for each in named]
        pairs = zip(said, renamed, strict=True)
        return b"".join(
            b"event: %b\ndata: %b\n\n" % (each["type"].encode(), data) for each, data in pairs
        )

    async def script(talk: Conversation) -> None:
        await talk.send(sse_head() + sse_chunk(told("m")) + b"0\r\n\r\n")

    async with two(script, script, routes=ALIAS, response_model="public") as (_, _, client):
        response = await client.ask(post({"model": "public", "stream": True}, path))
    assert response.body == told("public")


@pytest.mark.parametrize("path", PATHS)
async def test_h03_the_public_model_stands_in_the_answer_of_every_api(path: str) -> None:
    plain = {"model": "m", "content": [{"text": TEXT, "model": "m"}]}
    headers = FORM if path in FORM_PATHS else {}
    body: object = form() if path in FORM_PATHS else {"model": "public"}
    async with two(answers(plain), answers({}), routes=ALIAS, response_model="public") as (
        _,
        _,
        client,
    ):
        response = await client.ask(post(body, path, headers))
    assert msgspec.json.decode(response.body) == plain | {"model": "public"}


async def test_h03_a_transcript_that_is_no_json_is_left_alone() -> None:
    async with two(answers(b"m"), answers({}), routes=ALIAS, response_model="public") as (
        _,
        _,
        client,
    ):
        response = await client.ask(post(form(), FORM_PATHS[0], FORM))
    assert response.body == b"m"
