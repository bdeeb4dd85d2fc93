"""Prompts out of lines of JSON."""

from pathlib import Path

import pytest

from pointsman.sweep.reading import Prompt, PromptsError, prompts, read_prompts

CHAT = b'{"messages": [{"role": "user", "content": "hi"}]'


def read(*lines: bytes, limit: int | None = None) -> list[Prompt]:
    return list(prompts(lines, max_tokens=9, limit=limit))


def test_a_question_is_asked_greedily_and_briefly() -> None:
    [prompt] = read(CHAT + b', "kind": "k", "id": 7, "answer": "yes"}')
    assert prompt.path == "/v1/chat/completions"
    assert prompt.body == {
        "temperature": 0,
        "max_tokens": 9,
        "messages": [{"role": "user", "content": "hi"}],
    }
    assert prompt.answers == ("yes",)


def test_a_questions_own_settings_hold() -> None:
    [prompt] = read(b'{"prompt": "a", "max_tokens": 2, "temperature": 1, "stop": "b"}')
    assert prompt.body == {"prompt": "a", "max_tokens": 2, "temperature": 1, "stop": "b"}


@pytest.mark.parametrize(
    "line",
    [
        CHAT + b', "model": "gpt", "stream": true, "n": 2, "logprobs": true, "user": "u"}',
        b'{"request": ' + CHAT + b', "stream_options": {}, "user": "u"}, "status": 200}',
    ],
)
def test_a_recorded_request_keeps_what_it_says_but_for_what_the_sweep_sets(line: bytes) -> None:
    [prompt] = read(line)
    assert prompt.body == {"messages": [{"role": "user", "content": "hi"}], "user": "u"}
    assert prompt.answers == ()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (b'"answers": ["a", "b"]', ("a", "b")),
        (b'"answer": ["a"]', ("a",)),
        (b'"answer": 4', ("4",)),
        (b'"answer": 2.5', ("2.5",)),
        (b'"answer": null', ()),
        (b'"answers": []', ()),
    ],
)
def test_answers_are_texts_or_numbers(given: bytes, expected: tuple[str, ...]) -> None:
    [prompt] = read(b'{"prompt": "a", ' + given + b"}")
    assert prompt.answers == expected


def test_token_ids_are_one_prompt() -> None:
    [prompt] = read(b'{"prompt": [1, 2, 3]}')
    assert prompt.body["prompt"] == [1, 2, 3]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "line 2: Input data was truncated"),
        (b"[]", "line 2: Expected `object`, got `array`"),
        (b"[" * 5000, "line 2: "),
        (b"{}", "line 2: a prompt has either messages or prompt"),
        (CHAT + b', "prompt": "a"}', "line 2: a prompt has either messages or prompt"),
        (b'{"request": "GET /"}', "line 2: request is not an object"),
        (b'{"prompt": ["a", "b"]}', "line 2: a list of prompts is several requests"),
        (b'{"prompt": "a", "answer": true}', "line 2: answers are texts or numbers"),
        (b'{"prompt": "a", "answers": [{}]}', "line 2: answers are texts or numbers"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(line: bytes, message: str) -> None:
    with pytest.raises(PromptsError) as error:
        read(b"\n", line)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_a_file_is_read_up_to_a_limit_and_its_empty_lines_are_skipped(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_bytes(b'{"prompt": "a"}\n\n{"prompt": "b"}\r\n{"prompt": "c"}')
    found = read_prompts(file, max_tokens=1)
    assert [(prompt.line, prompt.body["prompt"]) for prompt in found] == [
        (1, "a"),
        (3, "b"),
        (4, "c"),
    ]
    assert read_prompts(file, max_tokens=1, limit=2) == found[:2]


def test_a_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(PromptsError, match=r"cannot read .*gone: No such file"):
        read_prompts(tmp_path / "gone", max_tokens=1)
    (tmp_path / "empty").write_bytes(b"\n")
    with pytest.raises(PromptsError, match="empty has no prompts"):
        read_prompts(tmp_path / "empty", max_tokens=1)
    (tmp_path / "bad").write_bytes(b"x")
    with pytest.raises(PromptsError, match="bad: line 1: "):
        read_prompts(tmp_path / "bad", max_tokens=1)
