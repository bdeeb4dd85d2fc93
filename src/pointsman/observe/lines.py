"""Whole lines to standard error, without ever waiting for whoever reads them.

A log goes to a pipe, and a pipe whose reader is stuck is full after 64 KiB: the next write would stop the process, and
with it every request. So a line is written only while the kernel says that there is room, and is dropped and counted
where there is none. The file descriptor stays a blocking one, because others share it.

It does not format anything and keeps nothing: see `logs` and `access`.
"""

import os
import select
import threading
from collections.abc import Sequence
from typing import TextIO

__all__ = ["Lines"]

ROOM = min(select.PIPE_BUF, 4096)
"""Bytes that a descriptor takes without blocking once it polls as writable. Source: pipe(7), poll(2)."""


class Lines:
    """Lines to a text stream; `dropped` is how many were not taken. May be used by several threads.

    A stream without a file descriptor, as tests have, is simply written to.
    """

    def __init__(self, stream: TextIO) -> None:
        self.dropped = 0
        self._stream = stream
        self._lock = threading.Lock()
        self._torn = False
        self._poll: select.poll | None = None
        try:
            self._fd = stream.fileno()
        except (OSError, ValueError):
            return
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLOUT)

    def write(self, lines: Sequence[bytes]) -> int:
        """Write as many of some lines as there is room for, and return how many were taken.

        Every line ends with a line feed. A line longer than `ROOM` may be cut off in its middle; it counts as dropped.
        """
        with self._lock:
            if self._poll is None:
                self._stream.write(b"".join(lines).decode("utf-8", "replace"))
                return len(lines)
            taken = 0
            while taken < len(lines):
                batch = _batch(lines, taken)
                if not self._put(b"".join(lines[taken:batch])):
                    break
                taken = batch
            return taken

    def drop(self, count: int) -> None:
        """Count lines that nobody will write."""
        with self._lock:
            self.dropped += count

    def _put(self, data: bytes) -> bool:
        """Write some bytes in pieces that cannot block. Returns whether all of them went out."""
        if self._torn:
            data = b"\n" + data
        sent = 0
        while sent < len(data):
            if not self._writable():
                break
            try:
                sent += os.write(self._fd, data[sent : sent + ROOM])
            except OSError:
                break  # a reader that is gone, a disk that is full: nobody is left to tell
        if sent:
            self._torn = sent < len(data)
        return sent == len(data)

    def _writable(self) -> bool:
        assert self._poll is not None
        return any(event & select.POLLOUT for _, event in self._poll.poll(0))


def _batch(lines: Sequence[bytes], start: int) -> int:
    """Return the end of the longest run of lines that goes out at once: at least one, else at most `ROOM` bytes."""
    size = len(lines[start])
    end = start + 1
    # One byte is left for the end of a line that was torn.
    while end < len(lines) and size + len(lines[end]) < ROOM:
        size += len(lines[end])
        end += 1
    return end
