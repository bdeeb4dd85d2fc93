"""Request bodies end to end: what the engine gets is what the client sent, but for the model (H01, H03, H13, H14)."""

import msgspec
import pytest

from pointsman.domain.routes import Backend, Route
from pointsman.testing.client import post
from pointsman.testing.gateways import counted, fronted
from pointsman.testing.origin import answers

pytestmark = pytest.mark.anyio

PATHS = ["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
PATHS += ["/v1/messages", "/v1/rerank", "/v1/score"]

STRANGE = (
    b' \n{"return_token_ids":true, "temperature":1.0E+2,"seed":123456789012345678901234567890,\r\n'
    b'\t"model" :\t"%b" , "chat_template_kwargs":{"model":"inner", "a":[1.50,-0.0]},"dup":1,"dup":2,'
    b'"text":"\\u00e9\\/ \xe5\x8c\x97 \\"model\\": \\"m\\"","messages":[{"role":"user","content":"model"}]} \n'
)
ROUTES = (Route(model="public", aliases=("alias",), backends=(Backend(model="m"),)),)


@pytest.mark.parametrize("path", PATHS)
async def test_h01_every_byte_of_a_body_reaches_the_engine(path: str) -> None:
    async with fronted() as (origin, _, client):
        assert (await client.ask(post(STRANGE % b"m", path))).status == 200
    assert origin.requests[0].body == STRANGE % b"m"
    assert origin.requests[0].line == f"POST {path} HTTP/1.1"


@pytest.mark.parametrize("asked", ["public", "alias"])
async def test_model_rewritten_for_backend(asked: str) -> None:
    """H01, H03: the engine's own id, and every other byte as it came."""
    async with fronted(routes=ROUTES) as (origin, _, client):
        assert (await client.ask(post(STRANGE % asked.encode()))).status == 200
    assert origin.requests[0].body == STRANGE % b"m"
    assert origin.requests[0].header("content-length") == str(len(STRANGE % b"m"))


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"alias","model":"alias"}',
        b'{"m\\u006fdel":"alias"}',
        b'{"a":{"model":"x"},"model":"alias"}',
        b'{"a":"\\"model\\":\\"x\\"","\\u006dodel" : "al\\u0069as"}',
    ],
)
async def test_the_model_is_rewritten_however_it_is_written(body: bytes) -> None:
    async with fronted(routes=ROUTES) as (origin, _, client):
        assert (await client.ask(post(body))).status == 200
    assert b"alias" not in origin.requests[0].body
    assert msgspec.json.decode(origin.requests[0].body)["model"] == "m"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b" ", None),
        (b"{", None),
        (b"}", None),
        (b"[]", None),
        (b'"m"', None),
        (b"null", None),
        (b"1", None),
        (b"{'model': 'm'}", None),
        (b'{"model":"m",}', None),
        (b'{"model":"m"}{"model":"m"}', None),
        (b'{"model":"m"} x', None),
        (b'{"model":"m","x":NaN}', None),
        (b'{"model":"m","x":Infinity}', None),
        (b'{"model":"m","x":01}', None),
        (b'{"model":"m","x":"\x00"}', None),
        (b'{"model":"m","x":"\n"}', None),
        (b'{"model":"m\xff"}', None),
        (b'\xef\xbb\xbf{"model":"m"}', None),
        (b'{"model":"m"}'.decode().encode("utf-16"), None),
        (b'{"model":"m","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}", None),
        (b'{"x":' * 100_000, None),
        (b"{}", "model"),
        (b'{"Model":"m"}', "model"),
        (b'{"model":""}', "model"),
        (b'{"model":null}', "model"),
        (b'{"model":1}', "model"),
        (b'{"model":["m"]}', "model"),
        (b'{"model":{"model":"m"}}', "model"),
        (b'{"x":{"model":"m"}}', "model"),
    ],
    ids=lambda value: repr(value[:40]) if value else repr(value),
)
async def test_h13_what_is_no_request_is_400_in_openais_shape(
    body: bytes, param: str | None
) -> None:
    async with fronted() as (origin, gateway, client):
        response = await client.ask(post(body))
        assert response.status == 400
        assert response.error["type"] == "invalid_request_error"
        assert response.error["param"] == param
        assert response.header("connection") == "keep-alive"
        assert (await client.ask(post({"model": "m"}))).status == 200
        assert counted(gateway, "tl_gateway_faults_total") == 0
    assert len(origin.requests) == 1


@pytest.mark.parametrize(
    "messages",
    [
        b'[{"role":"user","content":[{"type":"text","text":"hi"}]}]',
        b'[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:,A"}}]}]',
        b'[{"role":"assistant","content":null,"tool_calls":[{"id":"1","function":{}}]}]',
        b'[{"role":"tool","tool_call_id":"1","content":"72 F"}]',
        b'[{"role":"user"}]',
        b'[{"content":"no role"}]',
        b'[{"role":7,"content":{"odd":true}}]',
        b'[null, 1, "x", [], {}]',
        b"[]",
        b"null",
        b'"text"',
        b"{}",
        b'[{"role":"user","content":"\\ud800 lone"}]',
        b'[{"role":"user","content":[[[]]]}]',
    ],
)
@pytest.mark.parametrize("policy", ["affinity", "least_outstanding"])
async def test_h14_every_form_of_content_is_passed_on(messages: bytes, policy: str) -> None:
    """What a message may be is the engine's to judge."""
    body = b'{"model":"m","messages":%b}' % messages
    async with fronted(route_policy=policy) as (origin, _, client):
        assert (await client.ask(post(body))).status == 200
    assert origin.requests[0].body == body


@pytest.mark.parametrize(
    "prompt", [b'"x"', b"[1,2,3]", b'["a","b"]', b"[[1],[2]]", b"null", b"{}", b"7"]
)
async def test_h14_every_form_of_prompt_is_passed_on(prompt: bytes) -> None:
    body = b'{"model":"m","prompt":%b}' % prompt
    async with fronted(route_policy="affinity") as (origin, _, client):
        assert (await client.ask(post(body, "/v1/completions"))).status == 200
    assert origin.requests[0].body == body


@pytest.mark.parametrize("size", [65_535, 65_536, 1 << 20, 12 << 20])
async def test_h12_large_bodies_and_rewritten_ones_arrive_whole(size: int) -> None:
    image = b"A" * size
    body = b'{"image":"%b","model":"%b","z":1}'
    async with fronted(answers({}), routes=ROUTES) as (origin, _, client):
        assert (await client.ask(post(body % (image, b"m")))).status == 200
        assert (await client.ask(post(body % (image, b"alias")))).status == 200
    assert [request.body for request in origin.requests] == [body % (image, b"m")] * 2


async def test_h03_a_large_plain_answer_names_the_public_model_too() -> None:
    answer = {"text": "x" * 3_000_000, "model": "m"}
    options = {"routes": (Route("smol", backends=(Backend("m"),)),), "response_model": "public"}
    async with fronted(answers(answer), **options) as (engine, _, client):
        response = await client.ask(post({"model": "smol"}, headers={"accept-encoding": "gzip"}))
    assert msgspec.json.decode(response.body) == answer | {"model": "smol"}
    assert engine.requests[0].header("accept-encoding") is None
