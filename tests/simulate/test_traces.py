"""Traces as workloads: their own times, their own blocks, however often and however fast they are gone through."""

import gzip
from pathlib import Path
from random import Random

import pytest

from pointsman.simulate.traces import AzureTrace, MooncakeTrace

MOONCAKE = (
    b'{"timestamp": 6000, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]}\n'
    b'{"timestamp": 6000, "input_length": 1024, "output_length": 0, "hash_ids": [0, 3]}\n'
    b'{"timestamp": 9000, "input_length": 300, "output_length": 7, "hash_ids": [4], "x": 1}\n'
)
AZURE = (
    b"TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    b"2023-11-16 23:59:59.5000000,374,44\r\n"
    b"2023-11-17 00:00:01.2500000,0,109\r\n"
)


@pytest.fixture
def mooncake(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(MOONCAKE)
    return path


def test_a_line_of_mooncake_is_an_arrival_with_its_whole_blocks(mooncake: Path) -> None:
    trace = MooncakeTrace(mooncake)
    assert trace.block_tokens == 512
    assert [tuple(each) for each in trace] == [
        (0.0, (0, 1), 1100, 5, -1),
        (0.0, (0, 3), 1024, 1, -1),
        (3.0, (), 300, 7, -1),
    ]


def test_a_load_makes_it_faster(mooncake: Path) -> None:
    assert [each.at for each in MooncakeTrace(mooncake, 1.5)] == [0.0, 0.0, 2.0]


def test_a_repetition_begins_a_gap_later_with_blocks_of_its_own(mooncake: Path) -> None:
    arrivals = list(MooncakeTrace(mooncake, 1.0, 3))
    assert [each.at for each in arrivals] == [0.0, 0.0, 3.0, 4.5, 4.5, 7.5, 9.0, 9.0, 12.0]
    first = [each.blocks[0] for each in arrivals if each.blocks]
    assert len(set(first)) == 3
    assert first[0::2] == first[1::2]


def test_a_trace_can_be_gone_through_again(mooncake: Path) -> None:
    trace = MooncakeTrace(mooncake)
    assert list(trace) == list(trace)


def test_requests_of_one_time_are_spread_up_to_the_next(mooncake: Path) -> None:
    arrivals = list(MooncakeTrace(mooncake, 1.0, 1, Random(1)))
    assert [each.prompt_tokens for each in arrivals] == [1100, 1024, 300]
    ats = [each.at for each in arrivals]
    assert ats == sorted(ats)
    assert ats[0] == 0.0 < ats[1] < ats[2]
    assert ats != [each.at for each in MooncakeTrace(mooncake, 1.0, 1, Random(2))]


def test_a_file_may_be_compressed(mooncake: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress(MOONCAKE))
    assert list(MooncakeTrace(path)) == list(MooncakeTrace(mooncake))


def test_a_line_of_azure_has_no_blocks(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(AZURE)
    assert [tuple(each) for each in AzureTrace(path)] == [
        (0.0, (), 374, 44, -1),
        (1.75, (), 1, 109, -1),
    ]


def test_an_empty_file_is_no_arrival(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(b"")
    assert list(AzureTrace(path, 1.0, 2)) == []
    assert list(AzureTrace(path, 1.0, 2, Random(1))) == []


@pytest.mark.parametrize("line", [b"{}\n", b"[]\n", b"nonsense", b'{"timestamp": "x"}'])
def test_a_line_that_cannot_be_read_is_named(mooncake: Path, line: bytes) -> None:
    mooncake.write_bytes(MOONCAKE + line)
    with pytest.raises(ValueError, match=r"trace\.jsonl: line 4: "):
        list(MooncakeTrace(mooncake))


@pytest.mark.parametrize("line", [b"a,b\n", b"2023-11-17,1,x\n", b"\xff,1,1\n", b"\n"])
def test_a_line_of_azure_that_cannot_be_read_is_named(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(AZURE + line)
    with pytest.raises(ValueError, match=r"trace\.csv: line 4: "):
        list(AzureTrace(path))


@pytest.mark.parametrize(("load", "repeat"), [(0.0, 1), (-1.0, 1), (float("nan"), 1), (1.0, 0)])
def test_numbers_out_of_range_are_refused(load: float, repeat: int) -> None:
    with pytest.raises(ValueError, match="load must be above 0"):
        MooncakeTrace(Path("x"), load, repeat)


@pytest.mark.parametrize(
    ("at", "prompt", "output", "word"),
    [
        (8999, 9, 1, "earlier"),
        (9000 + 86_400_001, 9, 1, "86400 s after"),
        (9000, -1, 1, "tokens"),
        (9000, 9, -1, "tokens"),
        (9000, 1_000_000_000, 1, "tokens"),
        (9000, 9, 1_000_000_000, "tokens"),
    ],
)
def test_a_line_that_cannot_be_true_is_named(
    at: int, prompt: int, output: int, word: str, mooncake: Path
) -> None:
    line = f'{{"timestamp": {at}, "input_length": {prompt}, "output_length": {output}}}\n'
    mooncake.write_bytes(MOONCAKE + line.encode())
    with pytest.raises(ValueError, match=rf"trace\.jsonl: line 4: .*{word}"):
        list(MooncakeTrace(mooncake))


@pytest.mark.parametrize(
    "contents", [gzip.compress(MOONCAKE)[:-9], b"no gzip", b"\x1f\x8b\x08\0\0\0\0\0\0\3zzzz"]
)
def test_a_file_that_was_not_fetched_to_its_end_is_named(contents: bytes, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(contents)
    with pytest.raises(ValueError, match=r"trace\.jsonl\.gz: "):
        list(MooncakeTrace(path))
