"""For any body, in any chunks, read in any pieces: what a cut gives out is the body, and ends where a chunk ends."""

from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from pointsman.wire.framing import (
    HOLD_LIMIT,
    LAST_CHUNK,
    TRAILER_LIMIT,
    ChunkedCut,
    CountedCut,
    OpenCut,
    chunk,
    payload,
)
from pointsman.wire.http1 import ProtocolError

HELD_AT_MOST = HOLD_LIMIT + 8 + 16 + 4096 + 4  # a chunk of the limit, with the longest line

extensions = st.from_regex(rb"\A[ \t]{0,3}(?:;[ -~\t\x80-\xff]{0,20})?\Z")
sizes = st.sampled_from(["%x", "%X", "%04x", "%08x"])
bodies = st.one_of(
    st.binary(min_size=1, max_size=60),
    st.sampled_from([b"\r\n", b"0\r\n\r\n", b"\r\n0\r\n\r\n", b"5\r\n", b"data: [DONE]\n\n"]),
)
trailers = st.lists(st.from_regex(rb"\A[A-Za-z-]{1,9}: [ -~\t\x80-\xff]{0,20}\Z"), max_size=3)


@st.composite
def chunked(draw: st.DrawFn, content: Any = bodies) -> tuple[list[bytes], bytes]:
    """Return chunks in their framing, the last one with its trailers, and the payload of all."""
    chunks = []
    body = b""
    for data in draw(st.lists(content, max_size=8)):
        size = (draw(sizes) % len(data)).encode()
        chunks.append(b"%b%b\r\n%b\r\n" % (size, draw(extensions), data))
        body += data
    end = b"".join(line + b"\r\n" for line in draw(trailers))
    chunks.append(
        draw(st.sampled_from([b"0", b"000"])) + draw(extensions) + b"\r\n" + end + b"\r\n"
    )
    return chunks, body


@st.composite
def split(draw: st.DrawFn, data: bytes) -> list[bytes]:
    """Return data in pieces, some of which may be empty."""
    cuts = draw(st.lists(st.integers(0, len(data)), max_size=12))
    places = [0, *sorted(cuts), len(data)]
    return [data[a:b] for a, b in pairwise(places)]


def ends(chunks: list[bytes]) -> set[int]:
    """Return the positions where a chunk ends."""
    places = {0}
    for piece in chunks:
        places.add(max(places) + len(piece))
    return places


@given(st.data())
def test_any_split_gives_the_message_back_cut_at_the_ends_of_chunks(data: st.DataObject) -> None:
    chunks, body = data.draw(chunked())
    message = b"".join(chunks)
    boundaries = ends(chunks)
    cut = ChunkedCut()
    out = b""
    for piece in data.draw(split(message)):
        if cut.done:
            assert piece == b""
            break
        out += cut.feed(piece)
        assert len(out) in boundaries
        assert message.startswith(out)
    assert out == message
    assert (cut.done, cut.surplus, cut.held) == (True, False, 0)
    assert payload(out) == body


@given(st.data())
def test_as_much_as_can_be_is_given_out(data: st.DataObject) -> None:
    chunks, _ = data.draw(chunked())
    message = b"".join(chunks)
    read = data.draw(st.integers(0, len(message)))
    whole = max(place for place in ends(chunks) if place <= read)
    cut = ChunkedCut()
    assert cut.feed(message[:read]) == message[:whole]
    assert cut.held == read - whole


@given(st.data(), st.binary(min_size=1, max_size=20))
def test_what_follows_the_message_is_surplus(data: st.DataObject, more: bytes) -> None:
    chunks, _ = data.draw(chunked())
    message = b"".join(chunks)
    at = data.draw(st.integers(0, len(message) - 1))
    cut = ChunkedCut()
    assert cut.feed(message[:at]) + cut.feed(message[at:] + more) == message
    assert (cut.done, cut.surplus) == (True, True)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_larger_chunks_keep_their_payload_and_little_is_held(data: st.DataObject) -> None:
    size = st.integers(HOLD_LIMIT - 20, 3 * HOLD_LIMIT)
    large = size.map(lambda n: bytes(range(256)) * (n // 256) + b"\r" * (n % 256))
    chunks, body = data.draw(chunked(st.one_of(large, bodies)))
    message = b"".join(chunks)
    cut = ChunkedCut()
    out = b""
    for piece in data.draw(split(message)):
        given_out = cut.feed(piece)
        payload(given_out)  # whole chunks, or this raises
        assert given_out == b"" or given_out.endswith(b"\r\n")
        assert cut.held <= HELD_AT_MOST
        out += given_out
    assert payload(out) == body
    assert (cut.done, cut.held) == (True, 0)


@given(st.data())
def test_hostile_bytes_are_refused_or_read_and_never_kept(data: st.DataObject) -> None:
    chunks, _ = data.draw(chunked())
    message = bytearray(b"".join(chunks))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(message) - 1))
        message[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
    cut = ChunkedCut()
    out = b""
    try:
        for piece in data.draw(split(bytes(message))):
            out += cut.feed(piece)
            assert cut.held <= HELD_AT_MOST + TRAILER_LIMIT
            if cut.done:
                break
    except ProtocolError:
        pass
    assert message.startswith(out)
    payload(out)


@given(st.data())
def test_how_it_is_split_does_not_decide_what_is_refused(data: st.DataObject) -> None:
    message = data.draw(st.from_regex(rb"\A[0-9a-fA-F;xX+_ \t\r\n:\x00\xff]{1,30}\Z"))

    def outcome(pieces: list[bytes]) -> tuple[bytes, bool, bool]:
        cut = ChunkedCut()
        out = b""
        for piece in pieces:
            if cut.done:
                break
            try:
                out += cut.feed(piece)
            except ProtocolError:
                return out, True, False
        return out, False, cut.done

    one_by_one = outcome([message[at : at + 1] for at in range(len(message))])
    whole = outcome([message])
    assert whole[1:] == one_by_one[1:]
    assert one_by_one[0].startswith(whole[0])


@given(st.binary(min_size=1))
def test_one_chunk_is_the_data(data: bytes) -> None:
    assert payload(chunk(data) + LAST_CHUNK) == data


@given(st.data(), st.binary(max_size=60), st.binary(max_size=10))
def test_a_counted_body_ends_where_it_says(data: st.DataObject, body: bytes, more: bytes) -> None:
    cut = CountedCut(len(body))
    out = [cut.feed(piece) for piece in data.draw(split(body + more))]
    assert b"".join(out) == body
    assert cut.done
    assert cut.surplus is bool(more)


@given(st.data(), st.binary(max_size=60))
def test_an_open_body_is_what_came(data: st.DataObject, body: bytes) -> None:
    cut = OpenCut()
    assert b"".join([cut.feed(piece) for piece in data.draw(split(body))]) == body
    assert cut.tail == body
    assert not cut.done
