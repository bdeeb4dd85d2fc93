"""Bodies on their way, one case per rule; what holds for every body and every cut is in tests/property."""

import time

import pytest

from pointsman.wire.framing import (
    HOLD_LIMIT,
    LAST_CHUNK,
    TAIL,
    TRAILER_LIMIT,
    ChunkedCut,
    CountedCut,
    OpenCut,
    chunk,
    cut_for,
    payload,
)
from pointsman.wire.http1 import ProtocolError, parse_response_head


def fed(*pieces: bytes) -> tuple[ChunkedCut, list[bytes]]:
    cut = ChunkedCut()
    return cut, [cut.feed(piece) for piece in pieces]


class TestChunked:
    def test_whole_chunks_pass_as_the_same_object(self) -> None:
        data = chunk(b"data: 1\n\n") + chunk(b"data: 2\n\n")
        cut = ChunkedCut()
        assert cut.feed(data) is data
        assert (cut.done, cut.held) == (False, 0)

    def test_the_beginning_of_a_chunk_waits_for_its_end(self) -> None:
        cut, outputs = fed(b"3\r\nabc\r\n5\r\nde", b"f", b"gh\r\n")
        assert outputs == [b"3\r\nabc\r\n", b"", b"5\r\ndefgh\r\n"]
        assert cut.held == 0

    def test_the_last_chunk_ends_the_body(self) -> None:
        cut, outputs = fed(b"1\r\na\r\n0\r\n", b"\r\n")
        assert outputs == [b"1\r\na\r\n", b"0\r\n\r\n"]
        assert (cut.done, cut.surplus) == (True, False)

    def test_bytes_after_the_last_chunk_are_surplus(self) -> None:
        cut, outputs = fed(b"0\r\n\r\nHTTP/1.1 200 OK\r\n")
        assert outputs == [b"0\r\n\r\n"]
        assert (cut.done, cut.surplus) == (True, True)

    def test_sizes_may_have_leading_zeros_and_either_case(self) -> None:
        data = b"0000000a\r\n0123456789\r\nA\r\n0123456789\r\n000\r\n\r\n"
        cut, outputs = fed(data)
        assert outputs == [data]
        assert cut.done

    def test_extensions_pass(self) -> None:
        data = b'3;a=b;c="d e"\r\nabc\r\n2 ;x\r\nde\r\n0;last\r\n\r\n'
        cut, outputs = fed(data)
        assert outputs == [data]
        assert cut.done
        assert payload(data) == b"abcde"

    def test_trailers_pass(self) -> None:
        data = b"1\r\na\r\n0\r\nX-Sum: 1\r\nX-More: \xff\t2\r\n\r\n"
        cut, outputs = fed(data)
        assert outputs == [data]
        assert (cut.done, cut.surplus) == (True, False)

    def test_trailers_are_held_until_they_are_whole(self) -> None:
        cut, outputs = fed(b"0\r\nX-Sum: 1\r", b"\n\r", b"\nrest")
        assert outputs == [b"", b"", b"0\r\nX-Sum: 1\r\n\r\n"]
        assert (cut.done, cut.surplus) == (True, True)

    @pytest.mark.parametrize("size", [HOLD_LIMIT, HOLD_LIMIT + 1])
    def test_a_chunk_passes_as_it_is_where_it_arrives_whole(self, size: int) -> None:
        data = chunk(b"x" * size)
        assert fed(data)[1] == [data]

    def test_a_chunk_of_the_hold_limit_is_held(self) -> None:
        data = chunk(b"x" * HOLD_LIMIT)
        cut, outputs = fed(data[:-1], data[-1:])
        assert outputs == [b"", data]
        assert not cut.done

    def test_a_larger_chunk_becomes_several(self) -> None:
        body = b"x" * (3 * HOLD_LIMIT)
        data = chunk(b"before") + chunk(body) + chunk(b"after") + LAST_CHUNK
        half = len(data) // 2
        cut, outputs = fed(data[:half], data[half:])
        assert outputs[0].startswith(chunk(b"before"))
        assert outputs[1].endswith(chunk(b"after") + LAST_CHUNK)
        assert payload(outputs[0]) + payload(outputs[1]) == b"before" + body + b"after"
        assert cut.done

    def test_the_end_of_a_larger_chunk_may_be_cut_anywhere(self) -> None:
        body = b"x" * (2 * HOLD_LIMIT)
        data = chunk(body) + LAST_CHUNK
        end = len(data) - len(LAST_CHUNK)
        for first in range(end - 4, end):
            for second in range(first, end + 1):
                cut, outputs = fed(data[: HOLD_LIMIT + 9], data[HOLD_LIMIT + 9 : first])
                assert cut.inside
                outputs += [cut.feed(piece) for piece in (data[first:second], data[second:])]
                assert b"".join(map(payload, outputs)) == body
                assert (cut.done, cut.held) == (True, 0)

    @pytest.mark.parametrize("pieces", [1, 2])
    def test_a_larger_chunk_must_end_where_its_size_says(self, pieces: int) -> None:
        data = chunk(b"x" * (2 * HOLD_LIMIT))[:-2] + b"\n\n"
        cut = ChunkedCut()
        cut.feed(data[: HOLD_LIMIT + 9])
        with pytest.raises(ProtocolError):
            for piece in (data[HOLD_LIMIT + 9 : -pieces + 1 or None], data[-pieces + 1 :]):
                cut.feed(piece)


HOSTILE_LINES = [
    b"\r\n",
    b"\n",
    b" 5\r\n",
    b"+5\r\n",
    b"-5\r\n",
    b"0x5\r\n",
    b"1_0\r\n",
    b"5 5\r\n",
    b"5\n",
    b"5\r5",
    b"5;a\n",
    b"5;\x00\r\n",
    b"5" + b" " * 17 + b"\r\n",
    b"zz",
    b"5 x",
    b"HTTP/1.1 200 OK\r\n",
    b";ext\r\n",
    b"\xff\r\n",
    b"fffffffffffffff\r\n",
    b"100000000\r\n",
    b"000000000",
    b"5;" + b"x" * 4097,
    b"5;" + b"x" * 4097 + b"\r\n",
]


class TestHostileFraming:
    @pytest.mark.parametrize("line", HOSTILE_LINES)
    def test_what_can_never_be_a_size_is_refused_at_once(self, line: bytes) -> None:
        with pytest.raises(ProtocolError):
            fed(line)

    @pytest.mark.parametrize("line", HOSTILE_LINES)
    def test_also_after_good_chunks_and_byte_by_byte(self, line: bytes) -> None:
        cut = ChunkedCut()
        with pytest.raises(ProtocolError):
            for byte in chunk(b"good") + line:
                cut.feed(bytes((byte,)))

    @pytest.mark.parametrize("end", [b"xx", b"\n\r", b"\r\r", b"\nx", b"00"])
    def test_a_chunk_must_end_where_its_size_says(self, end: bytes) -> None:
        with pytest.raises(ProtocolError):
            fed(b"3\r\nabc" + end)

    @pytest.mark.parametrize(
        "trailers",
        [b"X: 1\n\n", b"X: 1\r\r\n", b"X: \x00\r\n\r\n", b"\rx", b"X: 1\r\n\n", b"\n"],
    )
    def test_malformed_trailers_are_refused(self, trailers: bytes) -> None:
        with pytest.raises(ProtocolError):
            fed(b"0\r\n" + trailers)

    @pytest.mark.parametrize("step", [1, 1000, 1 << 20])
    @pytest.mark.parametrize("line", [b"X: " + b"y" * 100 + b"\r\n", b"y"])
    def test_endless_trailers_are_refused(self, line: bytes, step: int) -> None:
        trailers = line * (TRAILER_LIMIT // len(line) + 2)
        data = b"0\r\n" + trailers
        with pytest.raises(ProtocolError):
            fed(*(data[at : at + step] for at in range(0, len(data), step)))

    def test_trailers_over_the_limit_are_refused_even_where_they_are_whole(self) -> None:
        with pytest.raises(ProtocolError):
            fed(b"0\r\nX: " + b"y" * TRAILER_LIMIT + b"\r\n\r\n")


@pytest.mark.slow
class TestCost:
    """Time grows with the body, not with its square: these bounds are ten times what they take, and n squared fails."""

    @pytest.mark.parametrize("read", [4096, 65536])
    def test_a_chunk_of_64_mib(self, read: int) -> None:
        size = 64 << 20
        piece = b"x" * read
        cut = ChunkedCut()
        began = time.process_time()
        cut.feed(b"%x\r\n" % size)
        most = seen = 0
        for _ in range(size // read):
            seen += len(payload(cut.feed(piece)))
            most = max(most, cut.held)
        seen += len(payload(cut.feed(b"\r\n" + LAST_CHUNK)))
        assert (seen, cut.done) == (size, True)
        assert most <= HOLD_LIMIT + 16
        assert time.process_time() - began < 5

    def test_chunks_of_one_byte(self) -> None:
        data = chunk(b"x") * 100_000 + LAST_CHUNK
        began = time.process_time()
        cut, outputs = fed(data)
        assert outputs == [data]
        assert cut.done
        assert time.process_time() - began < 2

    def test_reads_of_one_byte(self) -> None:
        data = chunk(b"x" * (HOLD_LIMIT - 10)) * 3 + chunk(b"y" * (HOLD_LIMIT + 99)) + LAST_CHUNK
        began = time.process_time()
        cut, outputs = fed(*(data[at : at + 1] for at in range(len(data))))
        assert len(payload(b"".join(outputs))) == 4 * HOLD_LIMIT + 69
        assert cut.done
        assert time.process_time() - began < 5

    def test_the_tail_of_an_open_body(self) -> None:
        cut = OpenCut()
        began = time.process_time()
        for _ in range(300_000):
            cut.feed(b"x")
        assert cut.tail == b"x" * TAIL
        assert time.process_time() - began < 3


class TestCounted:
    def test_it_passes_as_it_comes(self) -> None:
        cut = CountedCut(5)
        assert not cut.done
        assert (cut.feed(b"ab"), cut.done) == (b"ab", False)
        assert (cut.feed(b""), cut.done) == (b"", False)
        assert (cut.feed(b"cde"), cut.done, cut.surplus) == (b"cde", True, False)

    def test_what_exceeds_the_length_is_surplus(self) -> None:
        cut = CountedCut(3)
        assert (cut.feed(b"abcd"), cut.done, cut.surplus) == (b"abc", True, True)
        assert (cut.feed(b"more"), cut.done, cut.surplus) == (b"", True, True)

    def test_nothing_is_done_at_once(self) -> None:
        cut = CountedCut(0)
        assert cut.done
        assert (cut.feed(b""), cut.surplus) == (b"", False)
        assert (cut.feed(b"x"), cut.surplus) == (b"", True)


class TestOpen:
    def test_it_passes_and_its_tail_is_kept(self) -> None:
        cut = OpenCut()
        assert cut.tail == b""
        assert [cut.feed(b"abc"), cut.feed(b"def")] == [b"abc", b"def"]
        assert (cut.tail, cut.done, cut.surplus) == (b"abcdef", False, False)

    def test_the_tail_is_bounded(self) -> None:
        cut = OpenCut()
        for piece in (b"a" * TAIL, b"b" * TAIL, b"c" * 10, b"d"):
            cut.feed(piece)
        assert cut.tail == b"b" * (TAIL - 11) + b"c" * 10 + b"d"


class TestChoice:
    @pytest.mark.parametrize(
        ("lines", "kind", "done"),
        [
            (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n", ChunkedCut, False),
            (b"HTTP/1.1 200 OK\r\ncontent-length: 7\r\n", CountedCut, False),
            (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n", CountedCut, True),
            (b"HTTP/1.1 200 OK\r\n", OpenCut, False),
            (b"HTTP/1.1 204 No Content\r\n", CountedCut, True),
            (b"HTTP/1.1 304 Not Modified\r\ncontent-length: 5\r\n", CountedCut, True),
        ],
    )
    def test_the_head_decides(self, lines: bytes, kind: type, done: bool) -> None:
        cut = cut_for(parse_response_head(lines + b"\r\n"))
        assert type(cut) is kind
        assert cut.done is done


class TestPayload:
    def test_chunks_are_undone(self) -> None:
        assert payload(b"2;x\r\nab\r\n1\r\nc\r\n0\r\nX: 1\r\n\r\n") == b"abc"
        assert payload(b"") == b""

    def test_what_is_no_chunk_is_refused(self) -> None:
        with pytest.raises(ProtocolError):
            payload(b"nothing")
