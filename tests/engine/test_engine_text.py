"""Characters stay whole, and stop strings never leak."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.engine.text import TextStream


def run(pieces: list[bytes], stops: list[str]) -> tuple[list[str], bool]:
    text = TextStream(stops)
    parts = [text.push(piece) for piece in pieces]
    return [*parts, text.flush()], text.stopped


def test_a_character_is_never_cut() -> None:
    raw = "é→😀".encode()
    parts, _ = run([bytes([byte]) for byte in raw], [])
    assert [part for part in parts if part] == ["é", "→", "😀"]


def test_half_a_character_at_the_end_becomes_the_replacement_character() -> None:
    assert run(["😀".encode()[:2]], []) == (["", "�"], False)


def test_a_possible_stop_is_held_and_set_free_when_it_is_none() -> None:
    assert run([b"a#", b"#b", b"c"], ["##c"])[0] == ["a", "##b", "c", ""]


def test_what_is_held_at_the_end_is_part_of_the_answer() -> None:
    assert run([b"done STO"], ["STOP"]) == (["done ", "STO"], False)


def test_the_earliest_stop_wins_and_nothing_follows_it() -> None:
    assert run([b"one two three", b" four"], ["three", "two", ""]) == (["one ", "", ""], True)


def test_an_incomplete_character_can_complete_a_stop() -> None:
    parts, stopped = run([b"x\xc3", b"\xa9y"], ["é"])
    assert ("".join(parts), stopped) == ("x", True)


@given(
    st.text("ab\u00e9", max_size=12),
    st.lists(st.text("ab\u00e9", min_size=1, max_size=3), max_size=3),
    st.integers(1, 4),
)
def test_however_bytes_arrive_the_text_ends_before_the_first_stop(
    text: str, stops: list[str], size: int
) -> None:
    raw = text.encode()
    pieces = [raw[i : i + size] for i in range(0, len(raw), size)]
    parts, stopped = run(pieces, stops)
    ends = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
    got = "".join(parts)
    assert stopped == bool(ends)
    assert text.startswith(got)
    if not ends:
        assert got == text
    else:
        assert len(got) <= max(at for _, at in ends)
        assert not any(stop in got for stop in stops)


@pytest.mark.parametrize("cut", [*itertools.product([1, 2, 3], repeat=2)])
def test_streaming_never_releases_the_beginning_of_a_stop_that_comes(cut: tuple[int, int]) -> None:
    raw = b"abcSTOPdef"
    text = TextStream(["STOP"])
    released = ""
    at = 0
    for size in itertools.cycle(cut):
        if at >= len(raw):
            break
        released += text.push(raw[at : at + size])
        assert "abc".startswith(released)
        at += size
    assert released == "abc"
