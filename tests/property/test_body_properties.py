"""For any JSON object, however it is written: only the values of the named top-level keys change."""

import json

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pointsman.errors import BadRequest
from pointsman.wire.body import members, parse_request, with_fields, with_model, without_fields
from pointsman.wire.shape import public_json

SPACE = st.sampled_from(["", "", "", " ", "\n", "\t", "\r\n ", "  "])
NUMBERS = st.sampled_from(
    ["1.0", "1E5", "-0", "0", "1e-2", "-0.0E+1", "123456789012345678901", "7"]
)
TEXTS = st.one_of(
    st.text(max_size=8),
    st.sampled_from(
        [
            "model",
            '"model"',
            'x"model',
            '"model":"m"',
            "\\",
            '\\"',
            "}",
            "],",
            "{",
            ":",
            "\ud83d",
            "\U0001f600",
        ]
    ),
)
KEYS = st.one_of(
    TEXTS, st.sampled_from(["model", "model", "Model", "stream", "seed", "logprobs", ""])
)


@st.composite
def strings(draw: st.DrawFn, texts: st.SearchStrategy[str] = TEXTS) -> str:
    """Return a JSON string of a text, each of whose characters may be escaped in any way."""
    out = []
    for char in draw(texts):
        units = [f"\\u{unit:04x}" for unit in _utf16(char)]
        ways = ["".join(units), "".join(unit[:2] + unit[2:].upper() for unit in units)]
        if char in '"\\/':
            ways.append("\\" + char)
        if char in "\b\f\n\r\t":
            ways.append("\\" + "bfnrt"["\b\f\n\r\t".index(char)])
        if char not in '"\\' and char >= " " and not "\ud800" <= char <= "\udfff":
            ways += [char] * 4
        out.append(draw(st.sampled_from(ways)))
    return f'"{"".join(out)}"'


def _utf16(char: str) -> list[int]:
    raw = char.encode("utf-16-be", "surrogatepass")
    return [int.from_bytes(raw[at : at + 2], "big") for at in range(0, len(raw), 2)]


@st.composite
def containers(draw: st.DrawFn, inner: st.SearchStrategy[str]) -> str:
    if draw(st.booleans()):
        items = draw(st.lists(inner, max_size=3))
        return "[" + ",".join(draw(SPACE) + item + draw(SPACE) for item in items) + "]"
    pairs = [
        f"{draw(SPACE)}{draw(strings(KEYS))}{draw(SPACE)}:{draw(SPACE)}{draw(inner)}"
        for _ in range(draw(st.integers(0, 3)))
    ]
    return "{" + ",".join(pairs) + draw(SPACE) + "}"


values = st.recursive(
    st.one_of(strings(), NUMBERS, st.sampled_from(["true", "false", "null"])),
    containers,
    max_leaves=6,
)


class Member:
    """A member as it is written, and what its key means."""

    def __init__(self, before: str, key: str, between: str, value: str, after: str) -> None:
        self.before, self.between, self.value, self.after = before, between, value, after
        self.key = key
        self.name = json.loads(key)

    def text(self, value: str | None = None) -> str:
        return self.before + self.key + self.between + (value or self.value) + self.after


@st.composite
def objects(draw: st.DrawFn, *, model: bool = False) -> tuple[str, list[Member], str]:
    """Return the text around an object's members, and those; one of them a `model` where that is asked for."""
    count = draw(st.integers(0, 5))
    found = [_member(draw, draw(strings(KEYS)), draw(values)) for _ in range(count)]
    if model:
        # parse_request wants every `model` to be a string, the last one not empty.
        found = [m for m in found if m.name != "model" or m.value.startswith('"')]
        key, value = draw(strings(st.just("model"))), draw(strings(st.text(min_size=1, max_size=5)))
        found.append(_member(draw, key, value))
        others = draw(st.permutations(found[:-1]))
        at = draw(st.integers(0, len(others)))
        found = list(others[:at]) + found[-1:] + [m for m in others[at:] if m.name != "model"]
    return draw(SPACE), found, draw(SPACE)


def _member(draw: st.DrawFn, key: str, value: str) -> Member:
    between = draw(SPACE) + ":" + draw(SPACE)
    return Member(draw(SPACE), key, between, value, draw(SPACE))


def written(parts: tuple[str, list[Member], str], fields: dict[str, str] | None = None) -> bytes:
    """Return the object as text, with other values for the members named so."""
    before, found, after = parts
    inner = ",".join(member.text((fields or {}).get(member.name)) for member in found)
    return f"{before}{{{inner}}}{after}".encode()


@given(objects(model=True), st.text(min_size=1, max_size=8))
def test_only_the_model_changes(parts: tuple[str, list[Member], str], model: str) -> None:
    body = written(parts)
    last = [json.loads(m.value) for m in parts[1] if m.name == "model"][-1]
    assert parse_request(body, "r").model == _replaced(last)
    value = msgspec.json.encode(model).decode()
    assert with_model(body, model) == written(parts, {"model": value})
    assert parse_request(with_model(body, model), "r").model == model


@given(objects(), st.dictionaries(st.sampled_from(["model", "seed", "logprobs"]), values))
def test_only_the_named_fields_change(
    parts: tuple[str, list[Member], str], fields: dict[str, str]
) -> None:
    body = written(parts)
    raw = {name: value.encode() for name, value in fields.items()}
    names = {member.name for member in parts[1]}
    changed = with_fields(body, raw)
    if fields.keys() <= names:
        assert changed == written(parts, fields)
    want = json.loads(body) | {name: json.loads(value) for name, value in fields.items()}
    assert json.loads(changed) == want
    end = body.rindex(b"}")
    assert changed.endswith(body[end:])
    if not fields.keys() & names:
        assert changed.startswith(body[:end])


@given(objects(), st.sets(st.sampled_from(["model", "seed", "stream", ""])))
def test_only_the_named_fields_go(parts: tuple[str, list[Member], str], names: set[str]) -> None:
    body = written(parts)
    left = without_fields(body, names)
    kept = [member for member in parts[1] if member.name not in names]
    if len(kept) == len(parts[1]):
        assert left == body
        return
    before, _, after = parts
    inner = ",".join(member.text() for member in kept)
    assert left == f"{before}{{{inner}}}{after}".encode()


@given(objects())
def test_members_are_what_the_object_has(parts: tuple[str, list[Member], str]) -> None:
    body = written(parts)
    found = [(key, body[start:end].decode()) for key, start, end in members(body)]
    assert found == [(_replaced(member.name), member.value) for member in parts[1]]


@given(objects(), st.sampled_from(["response", "message"]))
def test_h03_only_the_places_that_name_the_model_change(
    parts: tuple[str, list[Member], str], nested: str
) -> None:
    names = [member.name for member in parts[1]]
    models = [member for member in parts[1] if member.name == "model"]
    assume(names.count("model") <= 1)
    assume(not {"response", "message"} & set(names))
    body = written(parts)
    public = written(parts, {"model": '"p"'})
    named = bool(models) and models[0].value.startswith('"')
    assert public_json(body, b'"p"') == (public if named else body)
    outer = b'{"type":"x", "%b" : %b}'
    changed = outer % (nested.encode(), (public if named else body).strip())
    assert public_json(outer % (nested.encode(), body.strip()), b'"p"') == changed


@given(objects(model=True), st.data())
def test_mangled_bodies_are_refused_or_spliced_and_nothing_else(
    parts: tuple[str, list[Member], str], data: st.DataObject
) -> None:
    body = bytearray(written(parts))
    at = data.draw(st.integers(0, len(body) - 1))
    body[at : at + data.draw(st.integers(0, 3))] = data.draw(
        st.one_of(
            st.binary(max_size=3), st.sampled_from([b'"', b"\\", b"{", b"}", b",", b":", b"]"])
        )
    )
    mangled = bytes(body)
    try:
        model = parse_request(mangled, "r").model
    except BadRequest:
        return
    changed = with_model(mangled, model + "2")
    assert parse_request(changed, "r").model == model + "2"
    kept = [(key, mangled[i:j]) for key, i, j in members(mangled) if key != "model"]
    assert [(key, changed[i:j]) for key, i, j in members(changed) if key != "model"] == kept


@given(st.binary(max_size=40))
def test_h13_any_bytes_are_a_request_or_a_bad_one(body: bytes) -> None:
    with pytest.raises(BadRequest):
        parse_request(body, "r")


def _replaced(text: str) -> str:
    """Return a text with U+FFFD in the place of every half of a surrogate pair."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
