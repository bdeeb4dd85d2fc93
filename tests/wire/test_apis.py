"""Which fields of each API are read, and what key they make: K10, K12 and K14 hold for all of them."""

import msgspec
import pytest

from pointsman.domain.prefix import prefix_key
from pointsman.domain.request import InferenceRequest
from pointsman.wire.apis import JSON, api_of, is_messages
from pointsman.wire.body import parse_request

CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
TOOLS = [{"name": "weather", "description": "Tells the weather.", "input_schema": {}}]
USER = [{"role": "user", "content": "Hi"}]


def read(path: str, **body: object) -> InferenceRequest:
    return parse_request(msgspec.json.encode({"model": "m"} | body), "r1", 64, api_of(path))


def key(path: str, **body: object) -> bytes:
    return read(path, **body).prefix_key


@pytest.mark.parametrize(
    ("path", "body", "made"),
    [
        (CHAT, {"messages": USER}, b"user\nHi\n"),
        ("/v1/completions", {"prompt": "Once"}, b"Once"),
        ("/mine", {"prompt": "Once"}, b"Once"),
        (RESPONSES, {"input": "Hi"}, b"user\nHi\n"),
        (RESPONSES, {"input": USER}, b"user\nHi\n"),
        (RESPONSES, {"instructions": "Be brief.", "input": "Hi"}, b"system\nBe brief.\nuser\nHi\n"),
        (RESPONSES, {"instructions": None, "input": "Hi", "tools": []}, b"user\nHi\n"),
        (RESPONSES + "/input_tokens", {"input": "Hi"}, b"user\nHi\n"),
        (MESSAGES, {"system": "Be brief.", "messages": USER}, b"system\nBe brief.\nuser\nHi\n"),
        (MESSAGES + "/count_tokens", {"messages": USER}, b"user\nHi\n"),
        ("/v1/embeddings", {"input": "some text"}, b"some text"),
        ("/v1/embeddings", {"messages": USER}, b"user\nHi\n"),
        ("/pooling", {"input": "some text"}, b"some text"),
        ("/classify", {"input": "some text"}, b"some text"),
        ("/v1/rerank", {"query": "which", "documents": ["a"]}, b"which"),
        ("/v2/rerank", {"query": "which", "documents": ["a"]}, b"which"),
        ("/v1/score", {"text_1": "which", "text_2": "a"}, b"which"),
        ("/v1/score", {"queries": "which", "documents": ["a"]}, b"which"),
        ("/tokenize", {"prompt": "some text"}, b"some text"),
        ("/tokenize", {"messages": USER}, b"user\nHi\n"),
        ("/v1/audio/transcriptions", {}, b""),
    ],
)
def test_the_key_is_what_the_engine_computes_first(
    path: str, body: dict[str, object], made: bytes
) -> None:
    request = read(path, **body)
    assert (request.path, request.model, request.prefix_key) == (path, "m", made)


def test_system_text_may_be_blocks() -> None:
    blocks = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    assert key(MESSAGES, system=blocks, messages=USER) == key(
        MESSAGES, system="Be brief.", messages=USER
    )


def test_token_ids_of_detokenize_are_told_apart_by_value() -> None:
    assert key("/detokenize", tokens=[1, 2]) != key("/detokenize", tokens=[12])
    assert key("/detokenize", tokens=[1, 2]) == key("/v1/completions", prompt=[1, 2])


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES, CHAT])
def test_requests_with_the_same_tools_share_a_key_whatever_is_asked(path: str) -> None:
    field = "input" if path == RESPONSES else "messages"
    one, two = (
        key(path, tools=TOOLS, **{field: [{"role": "user", "content": text}]})
        for text in ("What is the weather?", "Is it raining?")
    )
    other = key(path, tools=[{**TOOLS[0], "name": "time"}], **{field: USER})
    assert one == two
    assert one.startswith(b"tools\n")
    assert len(one) == 64
    assert other != one


def test_tools_stand_between_a_system_text_and_the_messages() -> None:
    made = key(MESSAGES, system="Be brief.", tools=TOOLS, messages=USER)
    assert made.startswith(b"system\nBe brief.\ntools\n")
    assert made != key(MESSAGES, system="Be brief.", messages=USER)


@pytest.mark.parametrize("role", ["system", "developer"])
def test_tools_beside_a_system_message_leave_the_key_of_the_specification(role: str) -> None:
    chat = [{"role": role, "content": "Be brief."}, *USER]
    assert key(CHAT, messages=chat, tools=TOOLS) == f"{role}\nBe brief.\nuser\nHi\n".encode()
    turned = [{"content": "Be brief.", "role": role}, *USER]
    assert key(CHAT, messages=turned, tools=TOOLS) == f"{role}\nBe brief.\nuser\nHi\n".encode()
    assert key(CHAT, messages=chat, tools=TOOLS) == prefix_key(
        msgspec.json.encode({"messages": chat})
    )


def test_tools_alone_make_a_key() -> None:
    assert key(CHAT, tools=TOOLS).startswith(b"tools\n")
    assert key(CHAT, tools=TOOLS, messages=[]).startswith(b"tools\n")
    assert key(CHAT, tools=TOOLS, prompt="x") == key(CHAT, tools=TOOLS)


def test_k10_images_are_part_of_the_key_of_every_api() -> None:
    def image(data: str) -> list[object]:
        source = {"type": "base64", "media_type": "image/png", "data": data}
        text = {"type": "text", "text": "What is this?"}
        return [{"role": "user", "content": [text, {"type": "image", "source": source}]}]

    for path, field in ((MESSAGES, "messages"), (RESPONSES, "input")):
        assert key(path, **{field: image("AAAA")}) != key(path, **{field: image("BBBB")})


def test_k12_all_messages_count_in_order() -> None:
    def asked(said: str) -> list[object]:
        return [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": said},
            {"role": "user", "content": "b"},
        ]

    for path, field in ((MESSAGES, "messages"), (RESPONSES, "input")):
        assert key(path, **{field: asked("x")}) == b"user\na\nassistant\nx\nuser\nb\n"


def test_k12_items_that_are_no_messages_count_as_well() -> None:
    def called(arguments: str) -> bytes:
        call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": arguments}
        return key(RESPONSES, input=[*USER, call])

    assert called("{}") != called('{"x":1}')
    assert called("{}").startswith(b"user\nHi\n\n")
    lone = b'{"model":"m","input":[{"type":"x","y":"\\ud800"},7]}'
    assert parse_request(lone, "r", 64, api_of(RESPONSES)).prefix_key.startswith(b"\n")


def test_k14_a_key_comes_only_from_the_fields_of_the_api() -> None:
    inner = {"input": "x", "messages": USER, "query": "x", "system": "x"}
    for path in ("/v1/rerank", RESPONSES, MESSAGES, "/v1/embeddings", CHAT):
        assert key(path, metadata=inner, user='"input":"x"') == b""
    # Nor from those of another one.
    assert key(RESPONSES, messages=USER, prompt={"id": "pmpt_1"}) == b""
    assert key(MESSAGES, prompt="x", input="x") == b""
    assert key("/v1/rerank", input="x", messages=USER) == b""


@pytest.mark.parametrize("nothing", [None, []])
def test_what_says_nothing_is_as_if_it_were_not_there(nothing: object) -> None:
    assert key(MESSAGES, system=nothing, tools=nothing, messages=USER) == b"user\nHi\n"


def test_the_text_is_let_go_of() -> None:
    request = read(MESSAGES, system="Be brief.", tools=TOOLS, messages=USER)
    request.forget()
    assert (request.system, request.tools, request.messages) == (None, None, None)


@pytest.mark.parametrize("path", JSON)
def test_every_api_streams_for_true_alone(path: str) -> None:
    assert read(f"/v1/{path}", stream=True).stream
    assert not read(f"/v1/{path}", stream="true").stream
    assert not api_of(f"/v1/{path}").form


def test_paths_of_the_messages_api() -> None:
    assert [is_messages(path) for path in (MESSAGES, MESSAGES + "/count_tokens", CHAT)] == [
        True,
        True,
        False,
    ]
