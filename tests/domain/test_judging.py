"""Answers judged by their words."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pointsman.domain.judging import agreement, equals, mentions, words

any_text = st.text(max_size=40)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("?!", []),
        ("Paris, France.", ["paris", "france"]),
        ("1,024", ["1024"]),
        ("1,2,3", ["1,2,3"]),  # a list without blanks, not a number with thousands
        ("1,234,567.5", ["1234567.5"]),
        ("3.14.", ["3.14"]),
        ("5-3", ["5", "3"]),
        ("5 - 3", ["5", "3"]),
        ("-3, \u22123", ["-3", "-3"]),
        ("m-o-u-s-e", ["m", "o", "u", "s", "e"]),
        ("STRASSE straße", ["strasse", "strasse"]),
        ("１２", ["12"]),
        ("x1", ["x1"]),
    ],
)
def test_a_text_is_read_as_words_and_numbers(text: str, expected: list[str]) -> None:
    assert words(text) == expected


def test_an_answer_equals_only_as_a_whole() -> None:
    assert equals(" 12.\n", ["11", "12"])
    assert not equals("12 or 13", ["12"])
    assert not equals("york new", ["New York"])


def test_an_answer_is_mentioned_as_whole_words_side_by_side() -> None:
    assert mentions("The answer is 12.", ["12"])
    assert not mentions("The answer is 112", ["12"])
    assert not mentions("new in york", ["New York"])
    assert not mentions("anything", ["?", ""])
    assert not mentions("anything", [])


@settings(deadline=None)
@given(any_text)
def test_a_text_equals_and_agrees_with_itself(text: str) -> None:
    assert equals(text, [text])
    assert agreement(text, text) == 1.0


@settings(deadline=None)
@given(any_text, any_text)
def test_agreement_is_symmetric_and_within_its_range(one: str, other: str) -> None:
    assert 0.0 <= agreement(one, other) == agreement(other, one) <= 1.0


def test_agreement_counts_words_as_often_as_they_stand_there() -> None:
    assert agreement("no no no", "no") == pytest.approx(0.5)
    assert agreement("", "word") == 0.0
