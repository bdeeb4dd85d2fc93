"""Public traces as workloads: who asked when, for how much, and which prompts begin alike; no texts.

Mooncake: one JSON line per request, `timestamp` (ms), `input_length` and `output_length` (tokens), and `hash_ids`, one
for each 512 tokens of the prompt, the last of them for less; an id stands for all up to there. Azure: CSV lines of a
date, the tokens of the prompt and of the answer; nothing is known there of prompts that begin alike. A file may be
compressed with gzip.

Both are read as they are simulated, line by line, however often they are repeated.
"""

import gzip
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from datetime import UTC, datetime
from math import inf
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.json import Decoder

from pointsman.simulate.workload import Arrival

if TYPE_CHECKING:
    from pathlib import Path
    from random import Random

__all__ = ["AzureTrace", "MooncakeTrace", "Trace"]

MOONCAKE_TOKENS = 512
"""Tokens of a block of a Mooncake trace."""

REPETITION = 1 << 40
"""What is added to the ids of blocks with every repetition; no trace has that many."""

TOKENS_MAX = 100_000_000
"""No prompt and no answer is as long: a number above is a mistake, and would be simulated for ever."""

PAUSE_MAX_S = 86_400.0
"""No trace is silent for longer: a time that is far off is a mistake, and would be waited for by every heartbeat."""


class Row(Struct, frozen=True, gc=False):
    """A line of a Mooncake trace."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


class Trace(ABC):
    """A trace at `load` times its own rate (above 0), `repeat` times in a row, each time with prompts of its own.

    Traces have few different times and many requests at each: those of Mooncake are 3 s apart. With `random`, the
    requests of one time are spread evenly at random up to the next one; without, they come together, as it is written.

    Raises `ValueError` for numbers out of range and, while it is gone through, for a line that cannot be read.
    """

    block_tokens = MOONCAKE_TOKENS

    def __init__(
        self, path: "Path", load: float = 1.0, repeat: int = 1, random: "Random | None" = None
    ) -> None:
        if not load > 0 or repeat < 1:
            raise ValueError("load must be above 0, and repeat at least 1")
        self._path = path
        self._load = load
        self._repeat = repeat
        self._random = random

    def __iter__(self) -> Iterator[Arrival]:
        begin = 0.0
        for repetition in range(self._repeat):
            first = at = -inf
            count = 0
            for row in self._spread():
                if not count:
                    first = row.at
                at = max(begin + (row.at - first) / self._load, at)
                count += 1
                blocks = row.blocks
                if repetition and blocks:
                    added = repetition * REPETITION
                    blocks = tuple([block + added for block in blocks])
                yield Arrival(at, blocks, row.prompt_tokens, row.output_tokens)
            # The next one begins as long after the last request as requests are apart on average.
            if count:
                begin = at + (at - begin) / max(count - 1, 1)

    def _spread(self) -> Iterator[Arrival]:
        """Yield the rows of the file, spread if they are to be."""
        rows = self._rows()
        random = self._random
        if random is None:
            yield from rows
            return
        together: list[Arrival] = []
        for row in rows:
            if together and row.at > together[0].at:
                at, length = together[0].at, row.at - together[0].at
                draws = sorted([random.random() for _ in together])
                for each, draw in zip(together, draws, strict=True):
                    yield each._replace(at=at + draw * length)
                together.clear()
            together.append(row)
        yield from together

    def _rows(self) -> Iterator[Arrival]:
        """Yield what the file says, in seconds of its own clock."""
        last: float | None = None
        for number, line in enumerate(self._lines(), 1):
            try:
                row = self._row(line)
                if row is None:
                    continue
                row = _checked(row, row.at if last is None else last)
            except ValueError as error:
                raise ValueError(f"{self._path.name}: line {number}: {error}") from None
            last = row.at
            yield row

    def _lines(self) -> Iterator[bytes]:
        opened = gzip.open if self._path.suffix == ".gz" else open
        try:
            with opened(self._path, "rb") as file:
                yield from file
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{self._path.name}: {error}") from None

    @abstractmethod
    def _row(self, line: bytes) -> Arrival | None:
        """Read a line; None for one that is no request. Raises ValueError."""


class MooncakeTrace(Trace):
    """A trace of Mooncake. Of its ids those of whole blocks are taken: the gateway hashes no others."""

    def __init__(
        self, path: "Path", load: float = 1.0, repeat: int = 1, random: "Random | None" = None
    ) -> None:
        super().__init__(path, load, repeat, random)
        self._decode = Decoder(Row).decode

    def _row(self, line: bytes) -> Arrival:
        row = self._decode(line)
        tokens = row.input_length
        blocks = row.hash_ids[: max(tokens, 0) // MOONCAKE_TOKENS]
        return Arrival(row.timestamp / 1000, blocks, tokens, row.output_length)


class AzureTrace(Trace):
    """A trace of Azure: no prompt begins like another one."""

    def _row(self, line: bytes) -> Arrival | None:
        when, prompt, output = line.decode().strip().split(",")
        if when == "TIMESTAMP":
            return None
        # They have seven digits behind the point, and Python reads six.
        moment = datetime.fromisoformat(when[:26]).replace(tzinfo=UTC)
        return Arrival(moment.timestamp(), (), int(prompt), int(output))


def _checked(row: Arrival, last: float) -> Arrival:
    """Return a row that may come after one at `last`, of at least a token each way, or raise ValueError."""
    if row.at < last:
        raise ValueError("it is earlier than the one before")
    if not row.at - last <= PAUSE_MAX_S:
        raise ValueError(f"it is {row.at - last:.0f} s after the one before")
    prompt, output = row.prompt_tokens, row.output_tokens
    if not (0 <= prompt <= TOKENS_MAX and 0 <= output <= TOKENS_MAX):
        raise ValueError("a number of tokens cannot be true")
    if prompt and output:
        return row
    return row._replace(prompt_tokens=max(prompt, 1), output_tokens=max(output, 1))
