"""Models asked over HTTP."""

import asyncio
import math
import threading
from collections.abc import Callable
from typing import Any

import pytest

from pointsman.sweep.asking import Answer, Asker, Failure, SweepError, ask_all, client_for
from pointsman.sweep.reading import Prompt

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = Prompt(1, CHAT, {"temperature": 0, "messages": [{"role": "user", "content": "hi"}]})
PLAIN = Prompt(2, TEXT, {"prompt": "hi"})

Models = Callable[..., Any]


def run(
    url: str,
    *prompts: Prompt,
    logprobs: bool = True,
    concurrency: int = 1,
    timeout_s: float = 5.0,
    key: str = "",
) -> tuple[list[Answer | Failure], list[float]]:
    """The answers in the order of the prompts, and the pauses that were made."""
    answers: dict[int, Answer | Failure] = {}
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    async def main() -> None:
        async with client_for(url, key, concurrency=concurrency) as client:
            asker = Asker(client, "m", with_logprobs=logprobs, timeout_s=timeout_s, sleep=sleep)
            await ask_all(
                asker,
                prompts,
                concurrency=concurrency,
                answered=lambda prompt, answer: answers.update({prompt.line: answer}),
            )

    asyncio.run(main())
    return [answers[prompt.line] for prompt in prompts], pauses


@pytest.mark.parametrize("prompt", [HELLO, PLAIN], ids=["chat", "completion"])
def test_an_answer_has_its_text_its_logprobs_and_its_cost(
    models: Models, says: Models, prompt: Prompt
) -> None:
    fake = models(lambda path, body: (200, says(path, " yes ", [-0.5, -0.25], margin=2.0)))
    [answer], pauses = run(fake.url, prompt)
    assert isinstance(answer, Answer)
    assert (answer.text, answer.logprobs, answer.margins) == ("yes", (-0.5, -0.25), (2.0, 2.0))
    assert (answer.prompt_tokens, answer.completion_tokens) == (7, 2)
    assert 0 < answer.seconds < 5
    assert not pauses


def test_the_small_model_is_asked_for_its_logprobs_and_the_large_one_is_not(
    models: Models, says: Models
) -> None:
    fake = models(lambda path, body: (200, says(path, "yes", [])))
    run(fake.url, HELLO, PLAIN)
    run(fake.url, HELLO, PLAIN, logprobs=False)
    assert fake.asked == [
        (CHAT, {"model": "m", **HELLO.body, "logprobs": True, "top_logprobs": 2}),
        (TEXT, {"model": "m", **PLAIN.body, "logprobs": 2}),
        (CHAT, {"model": "m", **HELLO.body}),
        (TEXT, {"model": "m", **PLAIN.body}),
    ]


def test_what_is_unknown_stays_unknown(models: Models, says: Models) -> None:
    fake = models(lambda path, body: (200, says(path, "yes", [-0.5, None])))
    [answer], _ = run(fake.url, HELLO)
    assert isinstance(answer, Answer)
    assert answer.logprobs == (-0.5, None)
    logprobs = answer.tokens().logprobs
    assert logprobs[0] == -0.5
    assert math.isnan(logprobs[1])
    assert math.isnan(answer.tokens().margins[1])


def test_a_tool_call_is_an_answer_that_cannot_be_scored(models: Models, says: Models) -> None:
    def calls(path: str, body: object) -> tuple[int, dict[str, Any]]:
        answer = says(path, None, [-0.1])
        answer["choices"][0]["message"]["tool_calls"] = [{"function": {"name": "f"}}]
        return 200, answer

    [answer], _ = run(models(calls).url, HELLO)
    assert isinstance(answer, Answer)
    assert (answer.text, answer.logprobs, answer.completion_tokens) == ("", (), 1)


def test_an_answer_without_logprobs_or_usage_is_one(models: Models) -> None:
    fake = models(lambda path, body: (200, b'{"choices": [{"text": "a"}]}'))
    [answer], _ = run(fake.url, PLAIN)
    assert isinstance(answer, Answer)
    assert (answer.text, answer.logprobs, answer.prompt_tokens) == ("a", (), 0)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"choices": []}', b"<html>", b"\xff"])
def test_what_is_no_completion_is_a_failure(models: Models, body: bytes) -> None:
    [answer], pauses = run(models(lambda *_: (200, body)).url, HELLO)
    assert answer == Failure("the answer is not a completion")
    assert not pauses


def test_a_busy_model_is_asked_again_after_pauses_that_grow(models: Models, says: Models) -> None:
    statuses = [503, 502, 504, 200]
    fake = models(lambda path, body: (statuses.pop(0), says(path, "yes", [])))
    [answer], pauses = run(fake.url, HELLO)
    assert isinstance(answer, Answer)
    assert pauses == [0.5, 1.0, 2.0]


def test_a_model_is_left_alone_as_long_as_it_wants(models: Models, says: Models) -> None:
    statuses = [429, 200]
    fake = models(lambda path, body: (statuses.pop(0), says(path, "yes", [])))
    _, pauses = run(fake.url, HELLO)
    assert pauses == [3.0]


def test_a_question_that_stays_without_an_answer_is_a_failure_and_the_next_is_asked(
    models: Models, says: Models
) -> None:
    def script(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        error = {"error": {"message": "no\nroom"}}
        return (503, error) if path == CHAT else (200, says(path, "yes", []))

    fake = models(script)
    [lost, kept], pauses = run(fake.url, HELLO, PLAIN)
    assert lost == Failure("status 503: no room")
    assert isinstance(kept, Answer)
    assert len(pauses) == 3
    assert len(fake.asked) == 5


def test_a_refused_question_is_not_asked_again(models: Models) -> None:
    fake = models(lambda *_: (400, b"what?"))
    [answer], pauses = run(fake.url, HELLO)
    assert answer == Failure("status 400: Bad Request")
    assert not pauses


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_model_that_refuses_everybody_ends_the_sweep(models: Models, status: int) -> None:
    fake = models(lambda *_: (status, {"error": {"message": "go away"}}))
    with pytest.raises(SweepError, match=rf"m: status {status}: go away"):
        run(fake.url, HELLO, PLAIN)
    assert len(fake.asked) == 1


def test_nobody_there_is_a_failure(models: Models) -> None:
    [answer], pauses = run("http://127.0.0.1:9", HELLO)
    assert isinstance(answer, Failure)
    assert answer.reason.startswith("no answer: ")
    assert len(pauses) == 3


def test_a_model_that_never_answers_is_given_up(models: Models, says: Models) -> None:
    def script(path: str, body: object) -> tuple[int, Any]:
        released.wait(10)
        return 200, says(path, "late", [])

    released = threading.Event()
    fake = models(script)
    try:
        [answer], pauses = run(fake.url, HELLO, timeout_s=0.02)
    finally:
        released.set()
    assert answer == Failure("no answer: TimeoutError")
    assert len(pauses) == 3


def test_no_more_are_asked_at_a_time_than_wanted(models: Models, says: Models) -> None:
    together = threading.Barrier(3)

    def script(path: str, body: object) -> tuple[int, Any]:
        together.wait(5)
        return 200, says(path, "yes", [])

    fake = models(script)
    prompts = [Prompt(line, TEXT, {"prompt": str(line)}) for line in range(9)]
    answers, _ = run(fake.url, *prompts, concurrency=3)
    assert len(answers) == 9
    assert fake.most == 3


@pytest.mark.parametrize("tail", ["", "/", "/v1", "/v1/"])
def test_the_key_goes_to_the_server_whatever_the_form_of_its_url(
    models: Models, says: Models, tail: str
) -> None:
    fake = models(lambda path, body: (200, says(path, "yes", [])))
    run(fake.url + tail, HELLO, key="k")
    assert fake.keys == ["Bearer k"]
    assert fake.asked[0][0] == CHAT


@pytest.mark.parametrize("url", ["localhost:80", "ftp://a", "http://", "http://a:b"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(SweepError):
        client_for(url, "", concurrency=1)
