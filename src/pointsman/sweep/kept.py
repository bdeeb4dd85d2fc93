"""Answers that were asked for once: a JSONL file by which a sweep goes on where it stopped, or runs again unasked.

An answer is found by a digest of all that was asked (model, path, body), so that another prompt, model or setting is
another question. Prompts are not in the file; answers are. Lines are added as answers come, and none is rewritten.
"""

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import msgspec

from pointsman.sweep.asking import Answer, Asker, SweepError
from pointsman.sweep.reading import Prompt

__all__ = ["Kept", "digest"]


_BEGINNING = b'{"model":'


class _Line(msgspec.Struct):
    model: str
    digest: str
    answer: Answer


class Kept:
    """The answers of a file, as a context manager; without a path, of this run alone."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._answers: dict[str, Answer] = {}
        self._file: BinaryIO | None = None

    def __enter__(self) -> Self:
        if self._path is not None:
            with _explained(self._path), ExitStack() as stack:
                file = stack.enter_context(self._path.open("ab+"))
                self._load(file)
                self._file = file
                stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.close()

    def find(self, asker: Asker, prompt: Prompt) -> Answer | None:
        """Return the answer to this question, None where it was not asked yet."""
        return self._answers.get(digest(asker, prompt))

    def add(self, asker: Asker, prompt: Prompt, answer: Answer) -> None:
        """Keep an answer. Raises `SweepError` where the file cannot be written."""
        key = digest(asker, prompt)
        self._answers[key] = answer
        if self._file is not None and self._path is not None:
            line = msgspec.json.encode(_Line(asker.model, key, answer))
            with _explained(self._path):
                self._file.write(line + b"\n")
                self._file.flush()

    def _load(self, file: BinaryIO) -> None:
        file.seek(0)
        lines = file.read().split(b"\n")
        for number, line in enumerate(lines, 1):
            if not line:
                continue
            try:
                kept = msgspec.json.decode(line, type=_Line)
            except (msgspec.DecodeError, RecursionError) as error:
                if number == len(lines) and line.startswith(_BEGINNING[: len(line)]):
                    # Whoever wrote it was stopped in the middle of a line: that is asked again.
                    file.truncate(sum(map(len, lines[:-1])) + number - 1)
                    return
                raise SweepError(f"{self._path}: line {number}: {error}") from None
            self._answers[kept.digest] = kept.answer
        if lines[-1]:
            file.write(b"\n")


def digest(asker: Asker, prompt: Prompt) -> str:
    """Return what names a question: SHA-256 in hex over path and body, the order of members aside."""
    body = msgspec.json.encode(msgspec.json.decode(asker.body(prompt)), order="sorted")
    return hashlib.sha256(prompt.path.encode() + b"\0" + body).hexdigest()


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SweepError(f"cannot use {path}: {error.strerror}") from None
