"""The question set that the project makes itself."""

import json
import re
from collections.abc import Callable

import pytest

from pointsman.domain.judging import equals
from pointsman.sweep.questions import KINDS, Question, questions
from pointsman.sweep.reading import prompts

MANY = questions(1500, seed=3)


def of_kind(kind: str) -> list[Question]:
    return [question for question in MANY if question.kind == kind]


def test_one_seed_gives_one_set_and_a_longer_one_begins_with_it() -> None:
    assert questions(40, seed=3) == MANY[:40]
    assert questions(40, seed=4) != MANY[:40]


def test_the_kinds_come_in_turn() -> None:
    assert [question.kind for question in MANY[: len(KINDS)]] == list(KINDS)


def test_no_question_is_asked_twice_nor_given_away_by_its_examples() -> None:
    texts = [question.text for question in MANY]
    assert len(texts) == len(set(texts)) == 1500
    for question in MANY:
        assert question.text not in {text for text, _ in question.examples}
        assert question.examples[0] != question.examples[1]


def test_kinds_that_are_used_up_are_left_out() -> None:
    assert 1 < len(of_kind("day")) < 14
    assert len(of_kind("addition of 3 digits")) > 200


@pytest.mark.parametrize("digits", [1, 2, 3])
def test_additions_add_up(digits: int) -> None:
    kind = f"addition of {digits} digit{'s' * (digits > 1)}"
    for question in of_kind(kind):
        a, b = re.findall(r"\d+", question.text)
        assert len(a) == len(b) == digits
        assert question.answer == str(int(a) + int(b))


def test_the_other_kinds_are_right_too() -> None:
    checks: dict[str, Callable[[list[int]], int]] = {
        "subtraction": lambda shown: shown[0] - shown[1],
        "comparison": max,
        "sequence": lambda shown: 2 * shown[3] - shown[2],
    }
    for kind, check in checks.items():
        for question in of_kind(kind):
            shown = [int(number) for number in re.findall(r"\d+", question.text)]
            assert question.answer == str(check(shown))
    for question in of_kind("counting"):
        assert question.answer == str(len(question.text.partition(": ")[2].split()))
    for question in of_kind("spelling"):
        assert f'"{question.answer.replace("-", "")}"' in question.text
    right = {question.text: question.answer for question in MANY}
    assert right["Which day comes after Sunday?"] == "Monday"
    assert right["Which month comes before January?"] == "December"
    assert right['What is the plural of "mouse"?'] == "mice"
    assert right['What is the last letter of the word "zebra"?'] == "a"


def test_a_line_is_a_prompt_that_ends_where_the_answer_goes() -> None:
    question = MANY[0]
    line = json.dumps(question.line()).encode()
    [prompt] = prompts([line], max_tokens=16)
    assert prompt.path == "/v1/completions"
    assert set(prompt.body) == {"prompt", "stop", "temperature", "max_tokens"}
    assert prompt.body["prompt"].endswith(f"Question: {question.text}\nAnswer:")
    assert prompt.body["prompt"].count("Question: ") == 3
    assert equals(f" {question.answer}", prompt.answers)
