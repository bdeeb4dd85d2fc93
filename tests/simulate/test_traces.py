"""Traces as workloads, and what is said of a file that is none."""

import gzip
from pathlib import Path

import pytest

from pointsman.simulate.traces import AzureTrace, MooncakeTrace, TraceError
from pointsman.simulate.workload import Arrival

MOONCAKE = (
    b'{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}\n'
    b'{"timestamp": 3000, "input_length": 512, "output_length": 0, "hash_ids": [0]}\n'
)
AZURE = (
    b"TIMESTAMP,ContextTokens,GeneratedTokens\n"
    b"2023-11-16 18:15:46.6805900,33,44\n"
    b"2023-11-16 18:15:47.1805900,16,1\n"
)


def test_mooncake_is_read_at_a_load_and_again_with_prompts_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress(MOONCAKE))
    assert list(MooncakeTrace(path, load=2.0)) == [
        Arrival(0.0, (0, 1), 600, 5),
        Arrival(1.5, (0,), 512, 1),
    ]
    twice = list(MooncakeTrace(path, repeats=2))
    assert [each.at for each in twice] == [0.0, 3.0, 3.0, 6.0]
    assert not {*twice[0].blocks, *twice[1].blocks} & {*twice[2].blocks, *twice[3].blocks}
    assert twice[2].blocks[0] == twice[3].blocks[0]


def test_prompts_of_azure_have_nothing_in_common(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(AZURE)
    first, second = AzureTrace(path, load=0.5)
    assert (first.at, first.blocks, first.prompt_tokens, first.output_tokens) == (
        0.0, (0, 1, 2), 33, 44,
    )  # fmt: skip
    assert second.at == pytest.approx(1.0)
    assert second.blocks == (3,)


@pytest.mark.parametrize(
    ("line", "word"),
    [
        (b'{"timestamp": 2999, "input_length": 9, "output_length": 1, "hash_ids": []}', "earlier"),
        (b'{"timestamp": 4000, "input_length": 0, "output_length": 1, "hash_ids": []}', "tokens"),
        (b'{"timestamp": 4000, "input_length": -9, "output_length": 1, "hash_ids": []}', "tokens"),
        (b'{"timestamp": 4000, "input_length": 9, "output_length": -1, "hash_ids": []}', "tokens"),
        (
            b'{"timestamp": 4000, "input_length": 9, "output_length": 1000000000, "hash_ids": []}',
            "tokens",
        ),
    ],
)
def test_a_line_that_cannot_be_true_is_refused(line: bytes, word: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(MOONCAKE + line + b"\n")
    with pytest.raises(TraceError, match=f"line 3: .*{word}"):
        list(MooncakeTrace(path))


def test_times_are_counted_from_the_first_request_whatever_they_began_with(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(
        MOONCAKE.replace(b": 0, ", b": 1700000000000, ", 1).replace(b": 3000", b": 1700000003000")
    )
    assert [each.at for each in MooncakeTrace(path, load=2.0)] == [0.0, 1.5]


@pytest.mark.parametrize(
    "contents", [gzip.compress(MOONCAKE)[:-9], b"no gzip", b"\x1f\x8b\x08\0\0\0\0\0\0\3zzzz"]
)
def test_a_file_that_was_not_fetched_to_its_end_is_named(contents: bytes, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(contents)
    with pytest.raises(TraceError, match=r"trace\.jsonl\.gz: "):
        list(MooncakeTrace(path))


@pytest.mark.parametrize("trace", [MooncakeTrace, AzureTrace])
def test_a_file_that_is_no_trace_says_which_line(
    trace: type[MooncakeTrace] | type[AzureTrace], tmp_path: Path
) -> None:
    path = tmp_path / "trace"
    path.write_bytes((MOONCAKE if trace is MooncakeTrace else AZURE) + b"nonsense\n")
    line = 3 if trace is MooncakeTrace else 4
    with pytest.raises(TraceError, match=f"line {line}: "):
        list(trace(path))
