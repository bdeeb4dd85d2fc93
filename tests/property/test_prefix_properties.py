"""The fast rendering of the prefix agrees with the obvious one, and nothing makes it raise."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from pointsman.domain.prefix import prefix_key, render_prefix

ANY_TEXT = st.text(st.characters(), max_size=90)  # lone surrogates included
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | ANY_TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(ANY_TEXT, inner, max_size=4),
    max_leaves=12,
)
PLAIN_TEXT = st.text("ab \u00e9\n", min_size=55, max_size=75)
ROLES = st.sampled_from(["system", "user"]) | ANY_TEXT
MESSAGES = st.lists(st.tuples(ROLES, ANY_TEXT | PLAIN_TEXT | st.none()), max_size=5)
LIMITS = st.sampled_from([1, 5, 64, 200])
SETTINGS = settings(deadline=None, derandomize=True, max_examples=150)


def utf8(text: str) -> bytes:
    # Through UTF-16, so that two escapes that form a pair become one character, as JSON says.
    joined = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return joined.encode()


@SETTINGS
@given(
    st.none() | ANY_TEXT | PLAIN_TEXT, MESSAGES, LIMITS, st.sampled_from([None, 3]), st.booleans()
)
def test_text_is_rendered_as_the_specification_says(prompt, messages, limit, indent, escaped):  # type: ignore[no-untyped-def]
    chat = [{"role": role, "content": content} for role, content in messages]
    fields = {"prompt": prompt, "messages": chat}
    if prompt is None:
        del fields["prompt"]
    text = json.dumps(fields, indent=indent, ensure_ascii=escaped)
    body = text.encode("utf-8", "replace" if not escaped else "strict")
    if not escaped:
        # What no UTF-8 can carry went out as a question mark.
        fields = json.loads(body)
        prompt = fields.get("prompt")
        messages = [(message["role"], message["content"]) for message in fields["messages"]]
    parts = [utf8(prompt or "")]
    for role, content in messages:
        parts += [utf8(role), b"\n", utf8(content or ""), b"\n"]
    assert prefix_key(body, limit) == b"".join(parts)[:limit]


@SETTINGS
@given(JSON, LIMITS)
def test_any_json_has_one_key_however_it_is_spaced(value, limit):  # type: ignore[no-untyped-def]
    loose = json.dumps(value, indent=2).encode()
    tight = json.dumps(value, separators=(",", ":")).encode()
    assert render_prefix(loose, None, limit) == render_prefix(tight, None, limit)
    assert render_prefix(None, loose, limit) == render_prefix(None, tight, limit)
    assert len(render_prefix(tight, tight, limit)) <= limit


@SETTINGS
@given(st.binary(max_size=200), LIMITS)
def test_no_bytes_make_it_raise(body, limit):  # type: ignore[no-untyped-def]
    for key in (prefix_key(body, limit), render_prefix(body, body, limit)):
        assert len(key) <= limit


@SETTINGS
@given(JSON, st.data())
def test_no_cut_or_flipped_byte_makes_it_raise(value, data):  # type: ignore[no-untyped-def]
    raw = json.dumps({"prompt": value, "messages": [{"role": "user", "content": value}]}).encode()
    cut = data.draw(st.integers(0, len(raw)))
    prefix_key(raw[:cut])
    flipped = bytearray(raw)
    flipped[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    prefix_key(bytes(flipped))
    render_prefix(bytes(flipped), raw[:cut])
