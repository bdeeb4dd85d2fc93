"""The conformance test of dialects: conversations of real engines are replayed, and no answer may be misunderstood.

    def test_my_dialect_understands_its_engine() -> None:
        check_dialect(MyDialect(), recordings(Path("recorded/my-engine")))

A recording is a JSON file: a request (method, path, headers, body) and its response (status, headers, body, a stream
without its chunk framing). `note` says where it comes from if no engine said it.

What it demands is the contract of `pointsman.dialect.reading.Dialect`: an engine that is well is ready and its numbers
are possible; one whose answer is missing, refused or cut off never raises, and is not read as if nothing were wrong;
what it is asked for tokens is what it answers; and what it serves is in `paths`.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from pointsman.dialect.engines import Dialect, Probed, Reading
from pointsman.wire.body import parse_request
from pointsman.wire.sse import data_of

__all__ = ["Message", "Recording", "check_dialect", "recordings"]

HEALTH = "/health"
REFUSALS = (
    Probed(0, error="connection refused"),
    Probed(401),
    Probed(404),
    Probed(500),
    Probed(503),
)


class Message(msgspec.Struct, frozen=True):
    """One side of a conversation; a request has `method` and `path`, a response `status`."""

    body: str = ""
    headers: dict[str, str] = {}
    method: str = ""
    path: str = ""
    status: int = 0


class Recording(msgspec.Struct, frozen=True):
    """One request and its response."""

    request: Message
    response: Message
    note: str = ""
    name: str = ""

    @property
    def good(self) -> bool:
        """Whether it was answered with a success."""
        return 200 <= self.response.status < 300

    @property
    def probed(self) -> Probed:
        """The response, as a probe sees it."""
        return Probed(self.response.status, self.response.body.encode())


decode_recording = msgspec.json.Decoder(Recording).decode


def recordings(folder: Path) -> list[Recording]:
    """Read the recordings of a folder, by name. Raises ValueError where one cannot be read, or there is none."""
    found = [
        msgspec.structs.replace(decode_recording(file.read_bytes()), name=file.stem)
        for file in sorted(folder.glob("*.json"))
    ]
    if not found:
        raise ValueError(f"no recordings in {folder}")
    return found


def check_dialect(dialect: Dialect, recorded: Sequence[Recording]) -> None:
    """Raise `AssertionError`, saying what broke, unless a dialect understands what was recorded of its engine.

    There must be a good answer to every probe but those that stand in for another one, and to GET /v1/models.
    """
    probes = {probe.path: probe for probe in dialect.probes}
    told = [recording for recording in recorded if recording.request.path in probes]
    well = {recording.request.path: recording.probed for recording in told if recording.good}
    missing = [path for path, probe in probes.items() if path not in well and not probe.unless]
    assert not missing, f"no good answer to {missing} is recorded"
    _check_nothing_asked(dialect)
    # What stands in for another probe is asked only where that one is not answered well.
    usual = {path: answer for path, answer in well.items() if not probes[path].unless}
    for recording in told:
        path = recording.request.path
        if recording.good:
            answers = {**usual, probes[path].unless: Probed(404), path: recording.probed}
            _check_well(dialect, answers, recording.name)
    for path, answer in well.items():
        instead_of = probes[path].unless
        answers = {**usual, instead_of: Probed(404), path: answer} if instead_of else usual
        _check_unwell(dialect, answers, path, excused=_stands_in(dialect, well, path))
    for recording in recorded:
        if recording.request.method == "POST":
            _check_answer(dialect, recording)


def _check_nothing_asked(dialect: Dialect) -> None:
    reading = dialect.read({})
    assert not reading.ready, "an engine that nobody asked is not ready"
    assert reading.why, "what is not ready says why"


def _check_well(dialect: Dialect, answers: Mapping[str, Probed], name: str) -> None:
    reading = dialect.read(answers)
    assert reading.ready, f"{name}: an engine that is well is ready, and not: {reading.why}"
    assert not reading.why, f"{name}: {reading.why}"
    _check_numbers(reading, name)
    assert reading.models, f"{name}: no model is read"
    assert all(model.id for model in reading.models), f"{name}: a model has no name"


def _check_numbers(reading: Reading, name: str) -> None:
    numbers = {
        field: getattr(reading, field)
        for field in ("running", "waiting", "kv_total_blocks", "kv_free_blocks", "lora_slots")
    }
    numbers["kv_tokens"] = reading.kv_tokens
    numbers |= {"cached_tokens": reading.cached_tokens, "remote_tokens": reading.remote_tokens}
    for field, number in numbers.items():
        assert number is None or number >= 0, f"{name}: {field} is {number}"
    usage = reading.kv_usage
    assert usage is None or 0 <= usage <= 1, f"{name}: kv_usage is {usage}"
    free, total = reading.kv_free_blocks, reading.kv_total_blocks
    assert free is None or (total is not None and free <= total), f"{name}: {free} of {total} free"


def _check_unwell(
    dialect: Dialect, answers: Mapping[str, Probed], path: str, *, excused: bool
) -> None:
    """One answer is bad: the reading says so, unless it is excused by another one that says the same."""
    sound = dialect.read(answers)
    for refusal in (*REFUSALS, Probed(200, b"<html>"), Probed(200, b"")):
        reading = dialect.read({**answers, path: refusal})
        _check_numbers(reading, path)
        told = not reading.ready or reading.degraded != sound.degraded
        # Of a health probe the status is all.
        told = told or excused or (refusal.good and path == HEALTH)
        assert told, f"{path}: {refusal} is read as if nothing were wrong"
    whole = answers[path].body
    for end in range(0, len(whole), max(len(whole) // 200, 1)):
        _check_numbers(dialect.read({**answers, path: Probed(200, whole[:end])}), path)


def _stands_in(dialect: Dialect, well: Mapping[str, Probed], path: str) -> bool:
    return any(probe.unless == path and probe.path in well for probe in dialect.probes)


def _check_answer(dialect: Dialect, recording: Recording) -> None:
    request, name = recording.request, recording.name
    body, answer = request.body.encode(), recording.response.body.encode()
    path = request.path.partition("?")[0]
    for told in _told(answer):
        assert dialect.cached_tokens(told) >= -1, f"{name}: fewer than no tokens were cached"
    if not recording.good:
        return
    if path.startswith("/v1/"):
        assert path in dialect.paths, f"{name}: {path} is served, and not one of its paths"
    if path.startswith("/v1/") and path.endswith("completions"):
        served = parse_request(body, name).model
        asked = dialect.tokenize(served, path, body)
        assert asked is None or msgspec.json.decode(asked[1]), f"{name}: {asked!r}"
        assert isinstance(dialect.handed_off(path, body), bool)
    if path == "/tokenize":
        assert dialect.token_ids(answer), f"{name}: no token ids"


def _told(answer: bytes) -> Iterator[bytes]:
    """Yield a whole answer, or the data of every event of a stream."""
    if not answer.startswith((b"data:", b"event:")):
        yield answer
        return
    for event in answer.split(b"\n\n"):
        data = data_of(event + b"\n\n") if event else None
        if data is not None:
            yield data
