"""The conformance function fails each kind of dialect that misreads its engine, and says why."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from msgspec.structs import replace

from pointsman.dialect.engines import Probed, Reading
from pointsman.dialect.vllm import Vllm
from pointsman.testing.dialects import Recording, check_dialect, recordings

FOLDER = Path(__file__).resolve().parents[1] / "recorded" / "vllm"


@pytest.fixture(scope="module")
def recorded() -> list[Recording]:
    return recordings(FOLDER)


class Eager(Vllm):
    """It takes an engine that nobody asked for one that is well."""

    def read(self, answers: Mapping[str, Probed]) -> Reading:
        return replace(super().read(answers), ready=True, why="")


class Blind(Vllm):
    """It keeps to itself what it could not read."""

    def read(self, answers: Mapping[str, Probed]) -> Reading:
        return replace(super().read(answers), degraded="")


class Gloomy(Vllm):
    """It takes no engine for well."""

    def read(self, answers: Mapping[str, Probed]) -> Reading:
        return replace(super().read(answers), ready=False, why="perhaps")


class Boastful(Vllm):
    """It has more free than there is."""

    def read(self, answers: Mapping[str, Probed]) -> Reading:
        return replace(super().read(answers), kv_free_blocks=10**6)


class Negative(Vllm):
    """It counts backwards."""

    def read(self, answers: Mapping[str, Probed]) -> Reading:
        return replace(super().read(answers), running=-1)


class Percent(Vllm):
    """It takes a share for a percentage."""

    def read(self, answers: Mapping[str, Probed]) -> Reading:
        return replace(super().read(answers), kv_usage=25.0)


class Unlisted(Vllm):
    """It knows of no models."""

    def read(self, answers: Mapping[str, Probed]) -> Reading:
        return replace(super().read(answers), models=())


class Narrow(Vllm):
    """It thinks that the engine has no chats."""

    paths = frozenset(("/v1/completions",))


class Wordless(Vllm):
    """It reads no tokens."""

    def token_ids(self, answer: bytes) -> list[int]:
        return []


class Owing(Vllm):
    """It reads a negative number of cached tokens."""

    def cached_tokens(self, answer: bytes) -> int:
        return -2


@pytest.mark.parametrize(
    ("dialect", "said"),
    [
        (Eager(), "an engine that nobody asked is not ready"),
        (Blind(), "is read as if nothing were wrong"),
        (Gloomy(), "an engine that is well is ready, and not: perhaps"),
        (Boastful(), "1000000 of 728 free"),
        (Negative(), "running is -1"),
        (Percent(), "kv_usage is 25.0"),
        (Unlisted(), "no model is read"),
        (Narrow(), "is served, and not one of its paths"),
        (Wordless(), "no token ids"),
        (Owing(), "fewer than no tokens were cached"),
    ],
)
def test_a_dialect_that_misreads_its_engine_fails(
    dialect: Vllm, said: str, recorded: list[Recording]
) -> None:
    with pytest.raises(AssertionError, match=said):
        check_dialect(dialect, recorded)


def test_a_sound_dialect_passes(recorded: list[Recording]) -> None:
    check_dialect(Vllm(), recorded)


def test_what_must_be_recorded(recorded: list[Recording], tmp_path: Path) -> None:
    some = [recording for recording in recorded if recording.request.path != "/metrics"]
    with pytest.raises(AssertionError, match=r"no good answer to \['/metrics'\] is recorded"):
        check_dialect(Vllm(), some)
    with pytest.raises(ValueError, match="no recordings in"):
        recordings(tmp_path)
