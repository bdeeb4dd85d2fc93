"""Public traces of requests as workloads: Mooncake's, whose block ids tell which prompts begin alike, and Azure's.

Lines are read as they are needed, so that a trace of any length takes no memory.
"""

import gzip
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import msgspec

from pointsman.simulate.workload import Arrival

__all__ = ["AzureTrace", "MooncakeTrace", "TraceError"]

MOONCAKE_BLOCK = 512
AZURE_BLOCK = 16

REPEAT = 1 << 40
"""What is added to the ids of blocks with every repetition, so that no prompt of one begins like one of another."""


class TraceError(ValueError):
    """A file that is no trace of its kind; says which line, and why."""


class _Row(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


_ROW = msgspec.json.Decoder(_Row)


class MooncakeTrace:
    """A trace of kvcache-ai/Mooncake (JSON lines, maybe gzipped), `load` times as fast, `repeats` times in a row.

    Its ids stand for blocks of 512 tokens.
    """

    def __init__(self, path: Path, *, load: float = 1.0, repeats: int = 1) -> None:
        self._path = path
        self._load = load
        self._repeats = repeats

    def __iter__(self) -> Iterator[Arrival]:
        """Yield the requests. Raises TraceError, and OSError where there is no such file."""
        beginning = end = 0.0
        for repeat in range(self._repeats):
            shift = repeat * REPEAT
            for number, line in enumerate(_lines(self._path), 1):
                try:
                    row = _ROW.decode(line)
                except msgspec.DecodeError as error:
                    raise TraceError(f"{self._path}, line {number}: {error}") from error
                end = beginning + row.timestamp / 1000 / self._load
                blocks = tuple([each + shift for each in row.hash_ids]) if shift else row.hash_ids
                yield Arrival(
                    end, tuple(blocks), row.input_length, max(row.output_length, 1), MOONCAKE_BLOCK
                )
            beginning = end


class AzureTrace:
    """A trace of Azure/AzurePublicDataset (CSV, maybe gzipped), `load` times as fast.

    No two of its prompts begin alike, since it tells nothing of what they say.
    """

    def __init__(self, path: Path, *, load: float = 1.0) -> None:
        self._path = path
        self._load = load

    def __iter__(self) -> Iterator[Arrival]:
        """Yield the requests. Raises TraceError, and OSError where there is no such file."""
        first = None
        fresh = 0
        for number, line in enumerate(_lines(self._path), 1):
            if number == 1:
                continue
            try:
                stamp, context, generated = line.decode().strip().split(",")
                at = datetime.fromisoformat(stamp[:26]).timestamp()
                prompt, output = int(context), int(generated)
            except ValueError as error:
                raise TraceError(f"{self._path}, line {number}: {error}") from error
            first = at if first is None else first
            count = -(-prompt // AZURE_BLOCK)
            blocks = tuple(range(fresh, fresh + count))
            fresh += count
            yield Arrival((at - first) / self._load, blocks, prompt, max(output, 1), AZURE_BLOCK)


def _lines(path: Path) -> Iterator[bytes]:
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
        yield from lines
