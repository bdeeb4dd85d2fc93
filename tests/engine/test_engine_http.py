"""The OpenAI surface over real sockets, in front of a machine whose answers are known."""

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
KEYS = {"message", "type", "param", "code"}


@pytest.fixture
def say(serve: Any, fakes: Any) -> Callable[..., Any]:
    """`say("text")`: an engine that answers so to the one-token prompt [1]."""

    def say(text: str, **options: Any) -> Any:
        return serve(fakes.Machine(fakes.answering(text, prompt_length=1)), **options)

    return say


@pytest.fixture
def endless(serve: Any, fakes: Any) -> Any:
    """An engine that never comes to an end."""
    machine = fakes.Machine(lambda tokens: 97, step_s=0.001)
    return serve(machine, context=1_000_000, slots=1, queue_capacity=1)


def post(engine: Any, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(engine.url + path, json={"model": "bytes", **body})


def events(text: str) -> list[Any]:
    blocks = [block for block in text.split("\n\n") if block]
    assert all(block.startswith("data: ") for block in blocks)
    return [block[6:] if block == "data: [DONE]" else json.loads(block[6:]) for block in blocks]


@contextlib.contextmanager
def streaming(engine: Any, path: str = TEXT) -> Iterator[socket.socket]:
    """A raw connection that has sent a streamed request and read the first token of its answer."""
    with raw(engine, path, stream=True) as connection:
        got = b""
        while b"data: " not in got:
            got += connection.recv(4096)
        yield connection


@contextlib.contextmanager
def raw(engine: Any, path: str, *, stream: bool) -> Iterator[socket.socket]:
    host, port = engine.url.removeprefix("http://").split(":")
    body = {"model": "bytes", "stream": stream, "max_tokens": 900_000, "temperature": 0}
    body |= {"prompt": [1]} if path == TEXT else {"messages": [{"role": "user", "content": "a"}]}
    payload = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(payload)}\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.sendall(head.encode() + payload)
        yield connection


def test_a_completion_has_text_usage_and_a_reason(say: Any) -> None:
    answer = post(say("four"), TEXT, {"prompt": [1]}).json()
    assert answer["object"] == "text_completion"
    assert answer["model"] == "bytes"
    assert answer["choices"] == [
        {"index": 0, "text": "four", "logprobs": None, "finish_reason": "stop"}
    ]
    assert answer["usage"] == {
        "prompt_tokens": 1,
        "completion_tokens": 5,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_a_streamed_completion_says_the_same_in_pieces(say: Any) -> None:
    response = post(say("four"), TEXT, {"prompt": [1], "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, done = events(response.text)
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "four"
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]
    assert all("usage" not in chunk for chunk in chunks)


def test_usage_comes_in_a_chunk_of_its_own_when_asked_for(say: Any) -> None:
    body = {"prompt": [1], "stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage, done = events(post(say("four"), TEXT, body).text)
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 5
    assert all(chunk["usage"] is None for chunk in chunks)


def test_a_chat_stream_begins_with_the_role_and_ends_with_the_reason(
    serve: Any, fakes: Any
) -> None:
    engine = serve(fakes.Machine(lambda tokens: 97))
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "stream": True}
    *chunks, done = events(post(engine, CHAT, body).text)
    assert done == "[DONE]"
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas == [{"role": "assistant", "content": ""}, *[{"content": "a"}] * 3, {}]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_a_chat_takes_text_parts_and_its_limit_is_the_context(serve: Any, fakes: Any) -> None:
    engine = serve(fakes.Machine(lambda tokens: 97), context=128)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    whole = post(engine, CHAT, {"messages": [{"role": "user", "content": parts}]}).json()
    plain = post(engine, CHAT, {"messages": [{"role": "user", "content": "ab"}]}).json()
    assert whole["choices"] == plain["choices"]
    assert whole["usage"]["total_tokens"] == 128


def test_logprobs_in_the_shape_of_each_endpoint(say: Any, serve: Any, fakes: Any) -> None:
    text = post(say("é!"), TEXT, {"prompt": [1], "logprobs": 2, "temperature": 0}).json()
    logprobs = text["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["\ufffd", "\ufffd", "!"]
    assert logprobs["text_offset"] == [0, 1, 2]
    assert [round(value, 3) for value in logprobs["token_logprobs"]] == [0, 0, 0]
    assert logprobs["top_logprobs"][2]["!"] == logprobs["token_logprobs"][2]
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "logprobs": True}
    body |= {"temperature": 0, "top_logprobs": 3}
    chat = post(serve(fakes.Machine(lambda tokens: 0xC3)), CHAT, body).json()
    (first, _) = chat["choices"][0]["logprobs"]["content"]
    assert (first["token"], first["bytes"], len(first["top_logprobs"])) == ("\ufffd", [0xC3], 3)
    assert first["top_logprobs"][0]["logprob"] == first["logprob"]


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_streamed_logprobs_are_those_of_the_whole_answer(serve: Any, fakes: Any, path: str) -> None:
    engine = serve(fakes.Machine())
    body: dict[str, Any] = {"seed": 5, "max_tokens": 9, "stop": ["never"]}
    if path == TEXT:
        body |= {"prompt": "ab", "logprobs": 1}
    else:
        body |= {"messages": [{"role": "user", "content": "ab"}], "logprobs": True}
    whole = post(engine, path, body).json()["choices"][0]["logprobs"]
    *chunks, _ = events(post(engine, path, body | {"stream": True}).text)
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    parts = [part for part in parts if part]
    for key in {"content"} if path == CHAT else set(whole):
        assert [value for part in parts for value in part[key]] == whole[key]


def test_a_stop_string_is_no_part_of_the_answer(say: Any) -> None:
    choice = post(say("one, two"), TEXT, {"prompt": [1], "stop": ", "}).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("one", "stop")


def test_an_unseeded_request_is_random_and_a_seeded_one_is_not(serve: Any, fakes: Any) -> None:
    engine = serve(fakes.Machine())

    def text(**more: Any) -> str:
        body = {"prompt": "abc", "max_tokens": 12, "logprobs": 0, **more}
        return str(post(engine, TEXT, body).json()["choices"][0]["logprobs"]["tokens"])

    assert text() != text()
    assert text(seed=3) == text(seed=3) != text(seed=-3)


def test_one_prompt_in_a_list_is_that_prompt(serve: Any, fakes: Any) -> None:
    engine = serve(fakes.Machine())
    texts = [
        post(engine, TEXT, {"prompt": prompt, "seed": 1}).json()["choices"][0]["text"]
        for prompt in ("a", ["a"], [257, 97], [[257, 97]])
    ]
    assert len(set(texts)) == 1


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (TEXT, {"prompt": "a", "max_tokens": 0}, "max_tokens"),
        (TEXT, {"prompt": "a", "max_tokens": "9"}, "max_tokens"),
        (TEXT, {"prompt": "a", "temperature": -1}, "temperature"),
        (TEXT, {"prompt": "a", "top_p": 0}, "top_p"),
        (TEXT, {"prompt": "a", "logprobs": 21}, "logprobs"),
        (TEXT, {"prompt": "a", "n": 2}, "n"),
        (TEXT, {"prompt": "a", "best_of": 2}, "best_of"),
        (TEXT, {"prompt": "a", "echo": True}, "echo"),
        (TEXT, {"prompt": "a", "logit_bias": {"1": 1}}, "logit_bias"),
        (TEXT, {"prompt": ["a", "b"]}, "prompt"),
        (TEXT, {"prompt": []}, "prompt"),
        (TEXT, {"prompt": [[["a"]]]}, "prompt[0]"),
        (TEXT, {"prompt": [1, 258]}, "prompt[1]"),
        (TEXT, {"prompt": [True]}, "prompt[0]"),
        (TEXT, {"prompt": 5}, "prompt"),
        (TEXT, {}, "prompt"),
        (TEXT, {"prompt": "a", "stop": [1]}, "stop[0]"),
        (TEXT, {"prompt": "a", "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [{"role": "king", "content": "a"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        (CHAT, {"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"messages": [{"role": "user", "content": "a"}], "tools": [{}]}, "tools"),
        (CHAT, {"messages": [{"role": "user"}], "response_format": {"type": "json"}}, "response_format"),
    ],
)  # fmt: skip
def test_a_bad_value_is_a_400_that_names_it(say: Any, path: str, body: Any, param: str) -> None:
    response = post(say("x"), path, body)
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (
        400,
        "invalid_request_error",
        param,
    )
    assert set(error) == KEYS


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'"x"', b"\xff", b"[" * 100_000])
def test_what_is_no_json_object_is_a_400(say: Any, body: bytes) -> None:
    response = httpx.post(say("x").url + TEXT, content=body)
    assert response.status_code == 400
    assert set(response.json()["error"]) == KEYS


def test_a_prompt_that_leaves_no_room_is_a_400(say: Any) -> None:
    response = post(say("x", context=64), TEXT, {"prompt": "a" * 64})
    assert (response.status_code, response.json()["error"]["code"]) == (
        400,
        "context_length_exceeded",
    )


def test_a_body_over_the_limit_is_a_413(say: Any) -> None:
    response = httpx.post(say("x").url + TEXT, content=b" " * (8 << 20) + b"{}")
    assert (response.status_code, set(response.json()["error"])) == (413, KEYS)


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/none", 404, "not_found"),
        ("GET", TEXT, 405, None),
        ("GET", "/v1/models/other", 404, "model_not_found"),
    ],
)
def test_other_paths_and_methods_are_refused_in_the_same_shape(
    say: Any, method: str, path: str, status: int, code: str | None
) -> None:
    response = httpx.request(method, say("x").url + path)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert set(response.json()["error"]) == KEYS


@pytest.mark.parametrize("path", [TEXT, CHAT, "/v1/tokenize"])
def test_another_model_is_a_404(say: Any, path: str) -> None:
    body = {"model": "other", "prompt": "a", "messages": [{"role": "user", "content": "a"}]}
    response = post(say("x"), path, body)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (
        404,
        "model_not_found",
        "model",
    )


def test_the_model_is_listed(say: Any) -> None:
    engine = say("x")
    listed = httpx.get(engine.url + "/v1/models").json()
    one = httpx.get(engine.url + "/v1/models/bytes").json()
    assert listed == {"object": "list", "data": [one]}
    assert (one["id"], one["object"]) == ("bytes", "model")


def test_tokenize_gives_what_the_endpoints_would_compute(say: Any) -> None:
    engine = say("x")
    assert post(engine, "/v1/tokenize", {"text": "ab"}).json() == {"ids": [97, 98]}
    assert post(engine, "/v1/tokenize", {"text": "a", "add_special": True}).json() == {
        "ids": [257, 97]
    }
    messages = [{"role": "user", "content": "Hi"}]
    ids = post(engine, "/v1/tokenize", {"messages": messages}).json()["ids"]
    usage = post(engine, CHAT, {"messages": messages, "max_tokens": 1}).json()["usage"]
    assert usage["prompt_tokens"] == len(ids)
    assert bytes(ids[1:]).startswith(b"<|im_start|>user\nHi")


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_a_client_that_leaves_a_stream_stops_the_generation(endless: Any, path: str) -> None:
    with streaming(endless, path):
        assert endless.scheduler.load.running == 1
    assert endless.settled(lambda: endless.scheduler.idle, within=1.0)


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_a_client_that_leaves_before_the_answer_stops_the_generation(
    endless: Any, path: str
) -> None:
    with raw(endless, path, stream=False):
        assert endless.settled(lambda: endless.scheduler.load.running == 1)
    assert endless.settled(lambda: endless.scheduler.idle, within=1.0)


def test_a_client_that_leaves_the_queue_gives_its_place_back(endless: Any) -> None:
    with streaming(endless):
        with raw(endless, TEXT, stream=True):
            assert endless.settled(lambda: endless.scheduler.load.queue_depth == 1)
        assert endless.settled(lambda: endless.scheduler.load.queue_depth == 0)


def test_a_full_queue_is_a_429_that_says_when_to_come_back(endless: Any) -> None:
    with streaming(endless), raw(endless, TEXT, stream=False):
        assert endless.settled(lambda: endless.scheduler.load.queue_depth == 1)
        response = post(endless, TEXT, {"prompt": [1]})
        assert (response.status_code, response.headers["retry-after"]) == (429, "1")
        assert response.json()["error"]["type"] == "rate_limit_error"


def test_waiting_too_long_is_a_429_and_no_broken_stream(serve: Any, fakes: Any) -> None:
    machine = fakes.Machine(lambda tokens: 97, step_s=0.001)
    engine = serve(machine, context=1_000_000, slots=1, queue_deadline=0.0)
    with streaming(engine):
        assert post(engine, TEXT, {"prompt": [1], "stream": True}).status_code == 429


def test_a_draining_worker_refuses_new_requests_and_finishes_old_ones(endless: Any) -> None:
    with streaming(endless) as connection:
        endless.scheduler.drain()
        response = post(endless, TEXT, {"prompt": [1]})
        error = response.json()["error"]
        assert (response.status_code, error["type"], error["code"]) == (
            503,
            "server_error",
            "no_capacity",
        )
        assert httpx.get(endless.url + "/health").status_code == 503
        assert connection.recv(4096)
        assert endless.scheduler.load.running == 1


def test_an_aborted_stream_ends_with_an_error_event(endless: Any) -> None:
    with streaming(endless) as connection:
        endless.scheduler.abort("closing")
        rest = b""
        while not rest.endswith(b"0\r\n\r\n"):
            rest += connection.recv(65536)
    last = rest.split(b"data: ")[-1].split(b"\n\n")[0]
    assert json.loads(last)["error"]["code"] == "no_capacity"
    assert b"[DONE]" not in rest


def test_a_broken_machine_is_a_500_in_the_openai_shape(serve: Any, fakes: Any) -> None:
    machine = fakes.Machine()
    machine.broken = True
    response = post(serve(machine), TEXT, {"prompt": [1]})
    assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")


def test_a_silent_stream_says_that_it_lives(serve: Any, fakes: Any, monkeypatch: Any) -> None:
    import threading

    from pointsman.engine import answers

    assert answers.PING_AFTER_S == 15
    monkeypatch.setattr(answers, "PING_AFTER_S", 0.01)
    pinged = threading.Event()

    def slow(tokens: list[int]) -> int:
        pinged.wait(5)
        return 97

    body = {"model": "bytes", "prompt": [1], "max_tokens": 2, "stream": True}
    text = b""
    with httpx.stream("POST", serve(fakes.Machine(slow)).url + TEXT, json=body) as response:
        for piece in response.iter_bytes():
            text += piece
            if b": ping\n\n" in text:
                pinged.set()
    assert text.startswith(b": ping\n\n")
    assert text.endswith(b"data: [DONE]\n\n")


def test_health_shows_the_load(say: Any) -> None:
    assert httpx.get(say("x").url + "/health").json() == {
        "status": "ok",
        "queue_depth": 0,
        "running": 0,
        "kv_free_blocks": 128,
        "kv_total_blocks": 128,
        "draining": False,
        "kv_block_tokens": 16,
    }


def test_fifty_requests_at_once_are_each_answered_as_alone(serve: Any, fakes: Any) -> None:
    engine = serve(fakes.Machine())

    def text(seed: int) -> str:
        body = {"prompt": f"prompt number {seed}", "seed": seed, "max_tokens": 10}
        return str(post(engine, TEXT, body).json()["choices"][0]["text"])

    alone = [text(seed) for seed in range(50)]
    with ThreadPoolExecutor(50) as pool:
        assert list(pool.map(text, range(50))) == alone


def test_the_openai_sdk_is_at_home(serve: Any, fakes: Any) -> None:
    engine = serve(fakes.Machine(lambda tokens: 97))

    async def main() -> None:
        async with openai.AsyncOpenAI(
            base_url=engine.url + "/v1", api_key="-", max_retries=0
        ) as sdk:
            hello: Any = [{"role": "user", "content": "Hi"}]
            whole = await sdk.chat.completions.create(
                model="bytes", messages=hello, max_tokens=4, logprobs=True
            )
            assert whole.choices[0].message.content == "aaaa"
            assert whole.choices[0].logprobs is not None
            stream = await sdk.chat.completions.create(
                model="bytes", messages=hello, max_completion_tokens=4, stream=True
            )
            chunks = [chunk async for chunk in stream]
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "aaaa"
            completion = await sdk.completions.create(
                model="bytes", prompt="x", max_tokens=2, logprobs=1
            )
            assert completion.choices[0].text == "aa"
            assert [model.id async for model in sdk.models.list()] == ["bytes"]
            with pytest.raises(openai.NotFoundError):
                await sdk.models.retrieve("none")
            with pytest.raises(openai.BadRequestError) as caught:
                await sdk.chat.completions.create(model="bytes", messages=hello, n=2)
            assert caught.value.param == "n"

    asyncio.run(main())


def test_no_part_of_an_answer_waits_for_an_acknowledgement() -> None:
    from pointsman.engine.command import _listener

    with _listener("127.0.0.1:0") as listener:
        client = socket.create_connection(listener.getsockname())
        connection, _ = listener.accept()
        with client, connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
