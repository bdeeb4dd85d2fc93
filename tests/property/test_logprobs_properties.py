"""For any answer, however it is written, only the logprobs of its choices change; for any stream, cut anywhere, the
same tokens.
"""

import json
import math
from random import Random
from typing import TypeAlias

from hypothesis import given, settings
from hypothesis import strategies as st

from pointsman.domain.cascade import tokens_of
from pointsman.domain.scores import Tokens
from pointsman.wire.logprobs import StreamTokens, asked, forced, without_logprobs
from pointsman.wire.shape import Edited, edited_json

SPACES = ("", "", "", " ", "\n", "\t", "\r\n ", "  ")
SCALARS = ("1.0", "1E5", "-0", "0", "null", "true", "false", "12345678901234567890")
TEXTS = st.one_of(
    st.text(max_size=4),
    st.sampled_from(
        [
            *("logprobs", '"logprobs":1', "choices", '{"choices":[{"logprobs":1}]}'),
            *("\\", '\\"', "}", "],", "{", ":", "\ud83d", "\U0001f600"),
        ]
    ),
)
KEYS = st.sampled_from(["logprobs", "logprobs", "choices", "text", '"logprobs"', "\ud83d", ""])


class Scalar(str):
    """A number or word, as it is written."""

    __slots__ = ()


class Pairs(list[tuple[str, "Tree"]]):
    """The members of an object: keys may stand twice."""

    __slots__ = ()


Tree: TypeAlias = "Scalar | str | list[Tree] | Pairs"

trees: st.SearchStrategy[Tree] = st.recursive(
    st.one_of(TEXTS, st.sampled_from(SCALARS).map(Scalar)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2), st.lists(st.tuples(KEYS, inner), max_size=2).map(Pairs)
    ),
    max_leaves=3,
)
choices = st.one_of(st.lists(st.tuples(KEYS, trees), max_size=3).map(Pairs), trees)
members = st.one_of(
    st.tuples(st.just("choices"), st.lists(choices, max_size=2)), st.tuples(KEYS, trees)
)


class Writer:
    """Writes JSON with any whitespace and any escapes, twice at once: as it is, and as it should become."""

    def __init__(self, random: Random) -> None:
        self.random = random
        # Half of all answers escape nothing that need not be, as most engines do.
        self.plainly = random.choice([0.8, 1.0])
        self.before: list[str] = []
        self.after: list[str] = []

    def answer(self, pairs: Pairs) -> tuple[bytes, bytes]:
        self._object(pairs, 0)
        return "".join(self.before).encode(), "".join(self.after).encode()

    def _put(self, text: str) -> None:
        self.before.append(text)
        self.after.append(text)

    def _space(self) -> None:
        self._put(self.random.choice(SPACES))

    def _value(self, tree: Tree, depth: int) -> None:
        """`depth`: 0 is the answer, 1 its `choices`, 2 a choice, 3 anything else."""
        match tree:
            case Scalar():
                self._put(tree)
            case str():
                self._put(self._string(tree))
            case Pairs():
                self._object(tree, 2 if depth == 2 else 3)
            case _:
                self._put("[")
                for at, item in enumerate(tree):
                    self._put("," if at else "")
                    self._space()
                    self._value(item, 2 if depth == 1 else 3)
                    self._space()
                self._put("]")

    def _object(self, pairs: Pairs, depth: int) -> None:
        self._space()
        self._put("{")
        for at, (key, value) in enumerate(pairs):
            self._put("," if at else "")
            self._space()
            self._put(self._string(key))
            self._space()
            self._put(":")
            self._space()
            mark = len(self.after)
            self._value(value, 1 if depth == 0 and key == "choices" else 3)
            if depth == 2 and key == "logprobs":
                # What stands around the value stays.
                written = "".join(self.after[mark:])
                left = len(written) - len(written.lstrip(" \n\t\r"))
                right = len(written.rstrip(" \n\t\r"))
                self.after[mark:] = [written[:left], "null", written[right:]]
            self._space()
        self._put("}")
        self._space()

    def _string(self, text: str) -> str:
        out = []
        for char in text:
            raw = char.encode("utf-16-be", "surrogatepass")
            escaped = "".join(f"\\u{raw[at]:02x}{raw[at + 1]:02X}" for at in range(0, len(raw), 2))
            plain = char not in '"\\' and char >= " " and not "\ud800" <= char <= "\udfff"
            out.append(char if plain and self.random.random() < self.plainly else escaped)
        return f'"{"".join(out)}"'


answers = st.builds(
    lambda pairs, random: Writer(random).answer(Pairs(pairs)),
    st.lists(members, max_size=3),
    st.randoms(use_true_random=True),
)
"""An answer as it is written, and as it should become."""


@given(answers)
def test_only_the_logprobs_of_choices_become_null(pair: tuple[bytes, bytes]) -> None:
    before, after = pair
    json.loads(before)
    assert without_logprobs(before) == after
    assert without_logprobs(after) == after


@given(st.one_of(answers.map(lambda pair: pair[0][1:]), st.binary(max_size=40)))
def test_whatever_else_comes_never_fails(body: bytes) -> None:
    edited = without_logprobs(body)
    try:
        before = json.loads(body)
    except ValueError:
        return
    if not isinstance(before, dict) or "choices" not in before:
        assert json.loads(edited) == before


NUMBERS = st.one_of(st.none(), st.floats(-20, 0).map(lambda value: round(value, 3)))
POSITIONS = st.tuples(NUMBERS, st.one_of(st.none(), st.lists(NUMBERS, max_size=3)))


def chat(position: tuple[float | None, list[float | None] | None]) -> dict[str, object]:
    logprob, top = position
    entries = None if top is None else [{"token": "t", "logprob": value} for value in top]
    return {"content": [{"token": "a", "logprob": logprob, "top_logprobs": entries}]}


def plain(position: tuple[float | None, list[float | None] | None]) -> dict[str, object]:
    logprob, top = position
    entries = None if top is None else {f"t{at}": value for at, value in enumerate(top)}
    return {"token_logprobs": [logprob], "top_logprobs": [entries]}


def joined(parts: list[dict[str, object]]) -> dict[str, object]:
    whole: dict[str, list[object]] = {}
    for part in parts:
        for key, value in part.items():
            assert isinstance(value, list)
            whole.setdefault(key, []).extend(value)
    return dict(whole)


def same(left: Tokens, right: Tokens) -> bool:
    """Tell whether two tokens say the same, NaN being NaN."""
    return [repr(value) for value in (*left.logprobs, *left.margins)] == [
        repr(value) for value in (*right.logprobs, *right.margins)
    ]


def event(choice: dict[str, object] | None, end: str) -> bytes:
    content = json.dumps({"choices": [] if choice is None else [choice]})
    return f"data: {content}{end}{end}".encode()


@st.composite
def streams(draw: st.DrawFn) -> tuple[bytes, Tokens]:
    """Return a stream in one of both forms, with what carries no tokens strewn in, and what it says of its tokens."""
    form = draw(st.sampled_from([chat, plain]))
    end = draw(st.sampled_from(["\n", "\r\n", "\r"]))
    parts = [form(position) for position in draw(st.lists(POSITIONS, min_size=1, max_size=6))]
    noise = st.sampled_from(
        [
            b"",
            f": ping{end}{end}".encode(),
            event(None, end),
            event({"index": 0, "delta": {"role": "assistant"}}, end),
            event({"index": 1, "logprobs": form((-1.0, None))}, end),
        ]
    )
    pieces: list[bytes] = []
    for part in parts:
        pieces += draw(noise), event({"index": 0, "logprobs": part}, end)
    pieces.append(f"data: [DONE]{end}{end}".encode())
    body = json.dumps({"choices": [{"logprobs": joined(parts)}]}).encode()
    return b"".join(pieces), tokens_of(body)


@st.composite
def cut(draw: st.DrawFn, data: bytes) -> list[bytes]:
    cuts = sorted(draw(st.sets(st.integers(0, len(data)), max_size=12)))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


# Byte by byte takes its time on a busy machine.
@settings(deadline=None)
@given(streams(), st.data())
def test_a_stream_says_what_the_whole_answer_says(
    pair: tuple[bytes, Tokens], data: st.DataObject
) -> None:
    content, expected = pair
    for pieces in (data.draw(cut(content)), [content[at : at + 1] for at in range(len(content))]):
        stream = StreamTokens()
        for piece in pieces:
            stream.feed(piece)
        # A CR at the very end may be half of a CRLF: the last event, which has no token, is then still open.
        assert stream.ended or content.endswith(b"\r")
        assert stream.count == len(expected.logprobs)
        assert same(stream.tokens, expected)


@settings(deadline=None)
@given(streams(), st.data())
def test_a_stream_whose_logprobs_are_taken_out_is_the_same_stream(
    pair: tuple[bytes, Tokens], data: st.DataObject
) -> None:
    content, _ = pair
    shape = Edited([without_logprobs], chunked_in=False, chunked_out=False)
    shaped = b"".join([shape.feed(piece) for piece in data.draw(cut(content))]) + shape.end()
    stream = StreamTokens()
    stream.feed(shaped)
    assert stream.count == 0
    for before, after in zip(content.splitlines(), shaped.splitlines(), strict=True):
        if before.startswith(b"data: {"):
            was = json.loads(before[6:])
            for choice in was["choices"]:
                if "logprobs" in choice:
                    choice["logprobs"] = None
            assert json.loads(after[6:]) == was
        else:
            assert after == before


@given(answers, st.booleans(), st.sampled_from(["/v1/completions", "/v1/chat/completions"]))
def test_what_is_forced_is_asked(pair: tuple[bytes, bytes], margins: bool, path: str) -> None:
    body = pair[0]
    members = forced(path, body, margins=margins)
    sent = json.dumps({name: json.loads(value) for name, value in members.items()}).encode()
    assert asked(path, sent)
    # Forced once, nothing more is forced.
    assert forced(path, sent, margins=margins) == members
    assert edited_json(body, [without_logprobs]) == pair[1]


@given(st.lists(POSITIONS, max_size=6))
def test_both_forms_say_the_same(
    positions: list[tuple[float | None, list[float | None] | None]],
) -> None:
    told = []
    for form in (chat, plain):
        logprobs = joined([form(position) for position in positions])
        logprobs = logprobs or {"content": []}
        told.append(tokens_of(json.dumps({"choices": [{"logprobs": logprobs}]}).encode()))
    assert same(*told)
    assert all(margin >= 0 or math.isnan(margin) for margin in told[0].margins)
