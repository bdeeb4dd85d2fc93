"""The recording: what a line has and what never, what happens to a full file and to a slow or full disk."""

import errno
import threading
from collections import deque
from collections.abc import Callable
from copy import copy
from io import FileIO
from pathlib import Path
from shutil import rmtree

import pytest

from pointsman.domain.recorded import (
    RecordedRequest,
    RecordedWorker,
    hashes_of,
    read_line,
    text_of,
)
from pointsman.domain.request import InferenceRequest
from pointsman.domain.ring import hash64
from pointsman.domain.router import Target
from pointsman.domain.worker import Worker
from pointsman.flow.exchange import Attempt, Exchange
from pointsman.observe import recording as module
from pointsman.observe.recording import Recording

SECRET = "correct horse battery staple"
PROMPT = b'[{"role": "user", "content": "%b"}]' % (SECRET * 50).encode()


def recording(path: Path, max_bytes: int = 1 << 20, **more: Callable[[bytes], int]) -> Recording:
    return Recording(path, max_bytes, wall=lambda: 1_000_100.0, now=lambda: 100.0, **more)


def fleet(names: str = "abc") -> tuple[Worker, ...]:
    return tuple(
        Worker(name, model="m", http_address="127.0.0.1:8001", kv_total_blocks=9) for name in names
    )


def exchange(
    workers: tuple[Worker, ...],
    *,
    failed: bool = False,
    prompt: bytes = PROMPT,
    answered: bool = True,
) -> Exchange:
    x = Exchange(InferenceRequest("m", "r1", messages=prompt, stream=True), "/v1", "chat", 90.0)
    loads = [1, 2, 3][: len(workers)]
    if failed:
        x.tries.append(
            Attempt(
                Target(
                    workers[1], "m", "load", candidates=workers, loads=loads, policy_reason="load"
                ),
                90.5,
                failure="connect",
                failed=workers[1],
                over_at=91.0,
            )
        )
    if answered:
        target = Target(
            workers[0], "m", "canary", candidates=workers, loads=loads, policy_reason="affinity"
        )
        x.tries.append(Attempt(target, 91.0))
        x.first_byte_at, x.status = 92.0, 200
    x.finished_at = 95.0
    return x


def lines(path: Path) -> list[RecordedWorker | RecordedRequest]:
    return [read_line(line) for line in path.read_bytes().splitlines(keepends=True)]


def requests(path: Path) -> list[RecordedRequest]:
    return [line for line in lines(path) if isinstance(line, RecordedRequest)]


def test_a_line_has_what_a_pick_depended_on(tmp_path: Path) -> None:
    path = tmp_path / "recorded.jsonl"
    written = recording(path)
    x = exchange(fleet(), failed=True)
    request = copy(x.request)
    written.finished(x)
    x.request.forget()  # as the ring of decisions does right after
    written.close()
    *workers, line = lines(path)
    assert [each.id for each in workers if isinstance(each, RecordedWorker)] == ["a", "b", "c"]
    assert isinstance(line, RecordedRequest)
    assert (line.wall, line.started, line.began, line.ended) == (1_000_090.0, 90.0, 92.0, 95.0)
    assert hashes_of(line.blocks) == request.blocks and request.blocks
    assert line.prefix == text_of((hash64(request.prefix_key),))
    assert (line.prompt_tokens, line.block_tokens) == (request.prompt_tokens, 128)
    assert (line.stream, line.status, line.output_tokens) == (True, 200, None)
    first, second = line.picks
    assert (first.at, first.over, first.worker, first.failure) == (90.5, 91.0, "b", "connect")
    assert (second.at, second.over, second.worker, second.failure) == (91.0, 95.0, "a", "")
    assert (second.reason, second.policy_reason) == ("canary", "affinity")
    assert (second.candidates, second.loads, second.count) == (("a", "b", "c"), (1, 2, 3), 3)


def test_a_line_has_no_text(tmp_path: Path) -> None:
    path = tmp_path / "recorded.jsonl"
    written = recording(path)
    written.finished(exchange(fleet()))
    written.close()
    data = path.read_bytes()
    assert not any(word.encode() in data for word in (*SECRET.split(), "r1", "user"))
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_worker_is_described_once_and_again_when_it_has_changed(tmp_path: Path) -> None:
    path = tmp_path / "recorded.jsonl"
    written = recording(path)
    workers = fleet("ab")
    written.finished(exchange(workers))
    written.finished(exchange(workers))
    written.close()
    written = recording(path)
    workers[1].kv_total_blocks, workers[1].kv_tokens = 10, 160
    written.finished(exchange(workers))
    written.close()
    described = [line for line in lines(path) if isinstance(line, RecordedWorker)]
    # The second life of the gateway does not know what the file has.
    assert [(each.id, each.kv_total_blocks, each.kv_tokens) for each in described] == [
        ("a", 9, 0),
        ("b", 9, 0),
        ("a", 9, 0),
        ("b", 10, 160),
    ]
    assert len(requests(path)) == 3


def test_a_request_that_nobody_was_asked_for_is_not_recorded(tmp_path: Path) -> None:
    path = tmp_path / "recorded.jsonl"
    written = recording(path)
    written.finished(exchange(fleet(), answered=False))
    written.close()
    assert path.read_bytes() == b""


def test_of_a_fleet_whose_loads_were_not_noted_only_the_chosen_is_there(tmp_path: Path) -> None:
    path = tmp_path / "recorded.jsonl"
    written = recording(path)
    workers = fleet()
    x = exchange(workers, answered=False)
    x.tries.append(Attempt(Target(workers[2], "m", "load", candidates=workers), 91.0))
    written.finished(x)
    written.close()
    worker, line = lines(path)
    assert isinstance(worker, RecordedWorker) and isinstance(line, RecordedRequest)
    assert worker.id == "c"
    assert (line.picks[0].count, line.picks[0].candidates, line.picks[0].loads) == (3, (), ())


def test_the_tokens_of_an_answer_are_read_from_its_end(tmp_path: Path) -> None:
    path = tmp_path / "recorded.jsonl"
    written = recording(path, output_tokens=lambda tail: int(tail))
    x = exchange(fleet())
    x.tail = deque((b"4", b"2"))
    written.finished(x)
    written.finished(exchange(fleet()))
    written.close()
    assert [each.output_tokens for each in requests(path)] == [42, None]


def test_a_full_file_becomes_the_former_one(tmp_path: Path) -> None:
    path = tmp_path / "recorded.jsonl"
    workers = fleet("a")
    for _ in range(3):
        written = recording(path, max_bytes=10)
        written.finished(exchange(workers))
        written.close()
    former = tmp_path / "recorded.jsonl.1"
    for each in (path, former):
        assert [type(line) for line in lines(each)] == [RecordedWorker, RecordedRequest]
    assert sorted(tmp_path.iterdir()) == [path, former]


def test_what_would_wait_too_long_is_left_out_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "recorded.jsonl"
    monkeypatch.setattr(module, "WAITING_BYTES", module.LINE_BYTES + 100)
    written = recording(path)
    written.finished(exchange(fleet(), prompt=b"[" + b" " * 200 + b"]"))
    written.finished(exchange(fleet(), prompt=b"[]"))
    written.close()
    assert written.dropped == 1
    assert len(requests(path)) == 1


def test_a_full_disk_is_told_once_and_harms_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Full:
        def __init__(self, file: FileIO) -> None:
            self.fileno = file.fileno
            self.close = file.close

        def write(self, data: memoryview) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    written = recording(tmp_path / "recorded.jsonl")
    written._file = Full(written._file)  # type: ignore[assignment]
    for _ in range(3):
        written.finished(exchange(fleet()))
    written.close()
    assert written.dropped == 3
    assert [record.message for record in caplog.records] == [
        f"requests are not recorded: {tmp_path / 'recorded.jsonl'}: No space left on device"
    ]


def test_a_file_that_cannot_be_rotated_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "recorded.jsonl"
    (tmp_path / "recorded.jsonl.1").mkdir()
    for _ in range(2):
        written = recording(path, max_bytes=10)
        written.finished(exchange(fleet()))
        written.close()
    assert len(requests(path)) == 2
    assert "Is a directory" in caplog.text


def settle(written: Recording) -> None:
    """Let the thread write all that waits, and go on."""
    written._queue.put(None)
    written._thread.join()
    written._thread = threading.Thread(target=written._run)
    written._thread.start()


@pytest.mark.parametrize("max_bytes", [10, 1 << 20], ids=["full", "not full"])
@pytest.mark.parametrize("moved", [False, True], ids=["deleted", "moved away"])
def test_a_file_that_somebody_took_away_is_begun_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, max_bytes: int, moved: bool
) -> None:
    path = tmp_path / "recorded.jsonl"
    written = recording(path, max_bytes)
    workers = fleet("a")
    written.finished(exchange(workers))
    settle(written)
    if moved:
        path.rename(tmp_path / "elsewhere")
    else:
        path.unlink()
    written.finished(exchange(workers))
    written.close()
    # It can be read alone.
    assert [type(line) for line in lines(path)] == [RecordedWorker, RecordedRequest]
    assert (caplog.records, written.dropped) == ([], 0)


def test_a_folder_that_is_gone_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    written = recording(folder / "recorded.jsonl")
    rmtree(folder)
    for _ in range(3):
        written.finished(exchange(fleet("a")))
        settle(written)
    written.close()
    assert len(caplog.records) == 1


def test_a_file_that_cannot_be_opened_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        recording(tmp_path / "nowhere" / "recorded.jsonl")


def test_bad_lines_and_bad_hashes_are_told() -> None:
    with pytest.raises(ValueError, match="kind"):
        read_line(b'{"kind":"other"}')
    with pytest.raises(ValueError, match="no whole number"):
        hashes_of("00")
