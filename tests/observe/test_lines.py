"""Lines to a descriptor: whole ones, in order, and never a wait for a reader that is stuck."""

import io
import os
import threading
from collections.abc import Iterator
from time import monotonic
from typing import TextIO

import pytest

from pointsman.observe.lines import Lines


@pytest.fixture
def pipe() -> Iterator[tuple[int, TextIO]]:
    """Return the two ends of a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    with os.fdopen(writer, "w") as stream:
        yield reader, stream
    os.close(reader)


def drained(reader: int) -> bytes:
    parts = []
    while True:
        try:
            parts.append(os.read(reader, 1 << 20))
        except BlockingIOError:
            return b"".join(parts)


def test_lines_come_out_whole_and_in_order(pipe: tuple[int, TextIO]) -> None:
    reader, stream = pipe
    wanted = [b"%d %b\n" % (i, b"x" * (i % 97)) for i in range(300)]
    assert Lines(stream).write(wanted) == 300
    assert drained(reader) == b"".join(wanted)


def test_a_full_pipe_takes_some_and_nobody_waits(pipe: tuple[int, TextIO]) -> None:
    reader, stream = pipe
    lines = Lines(stream)
    wanted = [b"%05d%b\n" % (i, b"x" * 194) for i in range(2000)]
    started = monotonic()
    taken = lines.write(wanted)
    assert 0 < taken < 2000
    assert lines.write(wanted[taken:]) == 0
    assert monotonic() - started < 5
    assert drained(reader) == b"".join(wanted[:taken])
    assert lines.write(wanted[taken : taken + 10]) == 10
    assert drained(reader) == b"".join(wanted[taken : taken + 10])


def test_a_line_that_was_cut_off_does_not_spoil_the_next(pipe: tuple[int, TextIO]) -> None:
    reader, stream = pipe
    lines = Lines(stream)
    assert lines.write([b"x" * 1_000_000 + b"\n"]) == 0
    assert set(drained(reader)) == {ord("x")}
    assert lines.write([b"next\n", b"and next\n"]) == 2
    assert drained(reader) == b"\nnext\nand next\n"


def test_a_long_line_goes_out_in_pieces(pipe: tuple[int, TextIO]) -> None:
    reader, stream = pipe
    long = bytes(range(48, 58)) * 3000 + b"\n"
    assert Lines(stream).write([b"a\n", long, b"b\n"]) == 3
    assert drained(reader) == b"a\n" + long + b"b\n"


def test_a_reader_that_is_gone_is_no_error(pipe: tuple[int, TextIO]) -> None:
    reader, stream = pipe
    lines = Lines(stream)
    with open(os.devnull) as other:
        os.dup2(other.fileno(), reader)  # which closes the end that it was
    assert lines.write([b"a\n"]) == 0


def test_a_stream_without_a_descriptor_is_written_to() -> None:
    stream = io.StringIO()
    lines = Lines(stream)
    assert lines.write([b"a\n", "ü\n".encode()]) == 2
    assert stream.getvalue() == "a\nü\n"


def test_lines_of_several_threads_do_not_mix(pipe: tuple[int, TextIO]) -> None:
    reader, stream = pipe
    lines = Lines(stream)

    def write(letter: bytes) -> None:
        for _ in range(50):
            assert lines.write([letter * 150 + b"\n"]) == 1

    threads = [threading.Thread(target=write, args=(letter,)) for letter in (b"a", b"b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = drained(reader).splitlines()
    assert sorted(found) == [b"a" * 150] * 50 + [b"b" * 150] * 50


def test_dropped_lines_are_counted() -> None:
    lines = Lines(io.StringIO())
    lines.drop(2)
    lines.drop(1)
    assert lines.dropped == 3
