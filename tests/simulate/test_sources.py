"""What a command line says of a workload, and what a recording says of the gateway itself."""

import gzip
from math import isnan
from pathlib import Path

import pytest

from pointsman.domain.recorded import RecordedPick, RecordedRequest, RecordedWorker, write_line
from pointsman.simulate.compare import Source
from pointsman.simulate.measures import ServiceLevel
from pointsman.simulate.recorded import read_recording
from pointsman.simulate.sources import measured, source_of
from pointsman.simulate.synthetic import RECIPES


@pytest.mark.parametrize(
    ("name", "line", "kind"),
    [
        (
            "t.jsonl",
            b'{"timestamp":0,"input_length":1,"output_length":1,"hash_ids":[]}',
            "mooncake",
        ),
        ("t.jsonl.gz", b"", "mooncake"),
        ("t.csv", b"", "azure"),
        ("t.csv.gz", b"", "azure"),
        ("recorded", write_line(RecordedWorker(id="a", model="m")), "recorded"),
    ],
)
def test_a_file_is_known_by_what_it_has(name: str, line: bytes, kind: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(line) if name.endswith(".gz") else line)
    assert source_of(str(path)) == Source(path=str(path), kind=kind)


def test_a_name_is_a_recipe_also_where_a_file_is_called_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rag").write_text("")
    assert source_of("rag").recipe == RECIPES["rag"]
    for text in ("", "{", "{}"):
        (tmp_path / "other").write_text(text)
        with pytest.raises(ValueError, match="workload other: neither a trace"):
            source_of("other")


def test_the_gateway_is_measured_as_far_as_it_could_see() -> None:
    def line(at: float, **more: object) -> bytes:
        values: dict[str, object] = {"wall": 0.0, "model": "m", "started": at, "ended": at + 2}
        return write_line(RecordedRequest(**{**values, **more}))  # type: ignore[arg-type]

    pick = RecordedPick(at=0.0, over=1.0, worker="a", reason="load")
    recording = read_recording(
        [
            write_line(RecordedWorker(id="a", model="m")),
            line(0.0, began=0.5, stream=True, output_tokens=4, picks=(pick, pick)),
            line(1.0, began=1.25, stream=True, output_tokens=1),
            line(2.0, began=4.0),  # whole: nobody knows when its first token came
            line(4.0, began=4.1, status=503),
        ]
    )
    seen = measured(recording, ServiceLevel(ttft=0.4))
    assert (seen.requests, seen.failed, seen.migrations) == (4, 1, 1)
    assert (seen.ttft_p50, seen.tpot_p50, seen.e2e_p99) == (0.375, 0.5, 2.0)
    assert seen.good == 0.5 and isnan(seen.hit_rate)
