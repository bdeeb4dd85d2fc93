"""For any stream of events, in any line ends, read in any pieces: the same events, and every byte of them."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from pointsman.wire.sse import EventCut, data_of, ends_event, with_data

line_ends = st.sampled_from([b"\n", b"\r\n", b"\r"])
texts = st.one_of(
    st.text(max_size=12).map(lambda text: text.encode().translate(None, b"\r\n")),
    st.sampled_from(
        [b"[DONE]", b"data: x", "北\u2028\U0001f600".encode(), b"\xe5\x8c", b" x", b":"]
    ),
)
lines = st.one_of(
    texts.map(lambda text: b"data: " + text),
    texts.map(lambda text: b"data:" + text),
    texts.map(lambda text: b": " + text),
    texts.map(lambda text: b"id: " + text),
    st.just(b"data"),
    texts.filter(bool),
)
events = st.lists(st.lists(lines.filter(bool), min_size=1, max_size=4), max_size=5)


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    """Return a stream whose every line has a line end of its own kind."""
    parts: list[bytes] = []
    for event in draw(events):
        for line in [*event, b""]:
            parts += line, draw(line_ends)
    parts.append(draw(texts))
    return b"".join(parts)


@st.composite
def pieces(draw: st.DrawFn, data: bytes) -> list[bytes]:
    cuts = draw(st.lists(st.integers(0, len(data)), max_size=12))
    return [data[a:b] for a, b in pairwise([0, *sorted(cuts), len(data)])]


def reference(stream: bytes) -> list[list[bytes]]:
    """Return the lines of every event that a blank line ends, read byte by byte, as the standard has it."""
    found: list[list[bytes]] = []
    event: list[bytes] = []
    line = b""
    at = 0
    while at < len(stream):
        byte = stream[at : at + 1]
        at += 1
        if byte == b"\r" and stream[at : at + 1] == b"\n":
            at += 1
        if byte in b"\r\n":
            if line:
                event.append(line)
            else:
                found.append(event)
                event = []
            line = b""
        else:
            line += byte
    return found


def reference_data(event: list[bytes]) -> bytes | None:
    values = []
    for line in event:
        name, _, value = line.partition(b":")
        if name == b"data":
            values.append(value.removeprefix(b" "))
    return b"\n".join(values) if values else None


@given(st.data())
def test_s01_s02_any_split_gives_the_same_events(data: st.DataObject) -> None:
    # A byte that is no line end behind it, so that no carriage return is left undecided.
    stream = data.draw(streams()) + b"x"
    cut = EventCut()
    found = [event for piece in data.draw(pieces(stream)) for event in cut.feed(piece)]
    assert b"".join(found) + cut.rest() == stream
    assert all(map(ends_event, found))
    want = [d for d in map(reference_data, reference(stream)) if d is not None]
    assert [d for d in map(data_of, found) if d is not None] == want


@given(st.data(), st.integers(0, 20))
def test_s12_no_more_than_the_limit_is_held(data: st.DataObject, limit: int) -> None:
    stream = data.draw(streams())
    cut = EventCut(limit)
    out = b""
    fed = 0
    for piece in data.draw(pieces(stream)):
        out += b"".join(cut.feed(piece))
        fed += len(piece)
        assert fed - len(out) <= limit
    assert out + cut.rest() == stream


@given(streams())
def test_data_put_back_changes_nothing(stream: bytes) -> None:
    data = data_of(stream)
    if data is not None:
        assert with_data(stream, data) == stream
