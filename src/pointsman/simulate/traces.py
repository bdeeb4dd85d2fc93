"""Public traces of requests as workloads: Mooncake's, whose block ids tell which prompts begin alike, and Azure's.

Lines are read as they are needed, so that a trace of any length takes no memory.
"""

import gzip
import zlib
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import msgspec

from pointsman.simulate.workload import Arrival

__all__ = ["AzureTrace", "MooncakeTrace", "TraceError"]

MOONCAKE_BLOCK = 512
AZURE_BLOCK = 16

REPEAT = 1 << 40
"""What is added to the ids of blocks with every repetition, so that no prompt of one begins like one of another."""

TOKENS_MAX = 100_000_000
"""No prompt and no answer is as long: a number above is a mistake, and would be simulated for ever."""


class TraceError(ValueError):
    """A file that is no trace of its kind; says which line, and why."""


class _Request(NamedTuple):
    """A line of a trace; `at` is in seconds, counted from wherever the trace does."""

    at: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: list[int]


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
        """Yield the requests from time 0 on. Raises TraceError, and OSError where there is no such file."""
        beginning = end = 0.0
        for repeat in range(self._repeats):
            shift = repeat * REPEAT
            for each in _requests(self._path, _mooncake):
                end = beginning + each.at / self._load
                blocks = tuple([id + shift for id in each.hash_ids]) if shift else each.hash_ids
                yield Arrival(
                    end, tuple(blocks), each.prompt_tokens, each.output_tokens, MOONCAKE_BLOCK
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
        """Yield the requests from time 0 on. Raises TraceError, and OSError where there is no such file."""
        fresh = 0
        for each in _requests(self._path, _azure, head=1):
            count = -(-each.prompt_tokens // AZURE_BLOCK)
            blocks = tuple(range(fresh, fresh + count))
            fresh += count
            yield Arrival(
                each.at / self._load, blocks, each.prompt_tokens, each.output_tokens, AZURE_BLOCK
            )


def _mooncake(line: bytes) -> _Request:
    row = _ROW.decode(line)
    return _Request(row.timestamp / 1000, row.input_length, row.output_length, row.hash_ids)


def _azure(line: bytes) -> _Request:
    stamp, context, generated = line.decode().strip().split(",")
    at = datetime.fromisoformat(stamp[:26]).timestamp()
    return _Request(at, int(context), int(generated), [])


def _requests(
    path: Path, read: Callable[[bytes], _Request], *, head: int = 0
) -> Iterator[_Request]:
    """Yield what the lines after the first `head` say, with times counted from the first one.

    An answer without tokens counts as one of a single token, which every request takes.
    """
    first = last = None
    for number, line in enumerate(_lines(path), 1):
        if number <= head:
            continue
        try:
            each = read(line)
            if last is not None and each.at < last:
                raise ValueError("it is earlier than the one before")
            if (
                not 1 <= each.prompt_tokens <= TOKENS_MAX
                or not 0 <= each.output_tokens <= TOKENS_MAX
            ):
                raise ValueError("a number of tokens cannot be true")
        except (ValueError, msgspec.MsgspecError) as error:
            raise TraceError(f"{path}, line {number}: {error}") from error
        first, last = each.at if first is None else first, each.at
        yield each._replace(at=each.at - first, output_tokens=max(each.output_tokens, 1))


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
            yield from lines
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(f"{path}: {error}") from error
