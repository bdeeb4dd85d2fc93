"""The recording: one line per request that is over, with all that its routing depended on, for the simulator.

A request that is over costs one append to a queue. A thread takes it from there, works out the hashes of its prompt,
writes the line and lets go of the prompt. What waits is bounded: where the disk is slower than the traffic, requests
are left out and counted. So is the file: a full one becomes `FILE.1`, in place of the one before it. One that somebody
took away, as logrotate does, is begun anew.

Neither a prompt nor an answer is written, nor who asked; see `pointsman.domain.recorded`.
"""

import logging
import os
import threading
from collections.abc import Callable
from copy import copy
from io import FileIO
from pathlib import Path
from queue import SimpleQueue
from typing import TypeAlias

from pointsman.domain.recorded import (
    RecordedPick,
    RecordedRequest,
    RecordedWorker,
    text_of,
    write_line,
)
from pointsman.domain.request import InferenceRequest
from pointsman.domain.ring import hash64
from pointsman.domain.worker import Worker
from pointsman.flow.exchange import Attempt, Exchange
from pointsman.observe.logs import from_outside

__all__ = ["Recording"]

WAITING_BYTES = 32 << 20
"""Bytes of prompts that wait for the thread; a request counts `LINE_BYTES` besides."""

LINE_BYTES = 2048
BATCH = 256
"""Lines that are written at once at most."""

_Over: TypeAlias = tuple[Exchange, InferenceRequest, float, int]

logger = logging.getLogger(__name__)


class Recording:
    """Records to a file, appended to where it exists; one of more than `max_bytes` is full.

    `wall` returns seconds since 1970, `now` those of the clock that requests are timed by; `output_tokens` reads the
    tokens of an answer from its last bytes, -1 where they do not say. Raises OSError where the file cannot be opened.

    It must hear of a request before anybody makes it forget its prompt.
    """

    def __init__(
        self,
        path: Path,
        max_bytes: int,
        *,
        wall: Callable[[], float],
        now: Callable[[], float],
        output_tokens: Callable[[bytes], int] = lambda tail: -1,
    ) -> None:
        self.dropped = 0
        self._path = path
        self._max = max_bytes
        self._wall = wall
        self._now = now
        self._output_tokens = output_tokens
        self._known: dict[str, RecordedWorker] = {}
        self._queue: SimpleQueue[_Over | None] = SimpleQueue()
        # One of them is written by the loop alone, the other by the thread.
        self._put = self._taken = 0
        self._failing = False
        self._file = self._opened()
        self._size = self._file.tell()
        self._thread = threading.Thread(target=self._run, name="recording", daemon=True)
        self._thread.start()

    def finished(self, x: Exchange) -> None:
        """Record a request that is over, if it was sent to anybody."""
        if not x.tries:
            return
        request = x.request
        size = LINE_BYTES + sum(
            [
                len(memoryview(each))
                for each in (request.prompt, request.messages, request.system, request.tools)
                if each is not None
            ]
        )
        if self._put - self._taken + size > WAITING_BYTES:
            self.dropped += 1
            return
        self._put += size
        # The record itself is kept by others, who take the prompt from it.
        self._queue.put((x, copy(request), self._wall() - self._now(), size))

    def close(self) -> None:
        """Write what waits, and close the file. The last call."""
        self._queue.put(None)
        self._thread.join()
        self._file.close()

    # The thread.

    def _run(self) -> None:
        while (over := self._queue.get()) is not None:
            fine = self._renew()
            lines: list[bytes] = []
            requests = 0
            while over is not None:
                lines += self._lines_of(*over[:3])
                self._taken += over[3]
                requests += 1
                if requests == BATCH or self._queue.empty():
                    break
                over = self._queue.get()
            if self._write(b"".join(lines), requests) and fine:
                self._failing = False
            if over is None:
                return

    def _lines_of(self, x: Exchange, request: InferenceRequest, offset: float) -> list[bytes]:
        lines = []
        for attempt in x.tries:
            target = attempt.target
            # Of a fleet that is too large to have its loads noted, only who was asked is.
            for worker in target.candidates if target.loads else (target.worker,):
                facts = _facts(worker)
                if self._known.get(worker.id) != facts:
                    self._known[worker.id] = facts
                    lines.append(write_line(facts))
        output = -1 if x.tail is None else self._output_tokens(b"".join(x.tail))
        last = len(x.tries) - 1
        line = RecordedRequest(
            wall=round(x.started + offset, 6),
            started=x.started,
            ended=x.finished_at,
            began=x.first_byte_at,
            model=from_outside(x.model),
            status=x.status,
            stream=x.stream,
            prefix=text_of((hash64(request.prefix_key),)),
            blocks=text_of(request.blocks),
            block_tokens=request.block_tokens,
            prompt_tokens=request.prompt_tokens,
            output_tokens=None if output < 0 else output,
            picks=tuple(
                [
                    _pick(attempt, x.finished_at if index == last else attempt.over_at)
                    for index, attempt in enumerate(x.tries)
                ]
            ),
        )
        lines.append(write_line(line))
        return lines

    def _write(self, data: bytes, requests: int) -> bool:
        try:
            left = memoryview(data)
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            self.dropped += requests
            self._failed(error)
            return False
        self._size += len(data)
        return True

    def _renew(self) -> bool:
        """Begin another file where this one is full, or where somebody took it away; False where that failed."""
        try:
            if self._is_there():
                if self._size <= self._max:
                    return True
                self._path.replace(self._path.with_name(self._path.name + ".1"))
            former, self._file = self._file, self._opened()
        except OSError as error:
            self._failed(error)
            return False
        former.close()
        self._size = self._file.tell()
        # A file can be read without the one before it.
        self._known.clear()
        return True

    def _is_there(self) -> bool:
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False

    def _failed(self, error: OSError) -> None:
        if not self._failing:
            logger.error("requests are not recorded: %s: %s", self._path, error.strerror)
        self._failing = True

    def _opened(self) -> FileIO:
        # Without a buffer of its own: what was written is there, and a failure is one of this write.
        return FileIO(self._path, "ab", opener=lambda path, flags: os.open(path, flags, 0o600))


def _facts(worker: Worker) -> RecordedWorker:
    return RecordedWorker(
        id=worker.id,
        model=worker.model,
        role=worker.role.value,
        kv_total_blocks=worker.kv_total_blocks,
        kv_tokens=worker.kv_tokens,
    )


def _pick(attempt: Attempt, over: float) -> RecordedPick:
    target = attempt.target
    return RecordedPick(
        at=attempt.at,
        over=over,
        worker=target.worker.id,
        reason=target.reason,
        policy_reason=target.policy_reason,
        count=len(target.candidates),
        candidates=tuple([each.id for each in target.candidates]) if target.loads else (),
        loads=tuple(target.loads),
        failure=attempt.failure,
    )
