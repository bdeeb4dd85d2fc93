"""What a command line says of a simulation, read: workloads, engines, and a configuration's policy.

Everything here raises ValueError with one line that names what is wrong, and the nearest that is right.
"""

import tomllib
from collections.abc import Iterable, Mapping
from math import nan
from pathlib import Path

import msgspec
from msgspec.structs import fields, replace

from pointsman.simulate.compare import Source
from pointsman.simulate.measures import Measures, ServiceLevel, measure
from pointsman.simulate.outcome import Outcome, WorkerOutcome
from pointsman.simulate.profile import EngineProfile
from pointsman.simulate.recorded import Recording
from pointsman.simulate.sizes import nearest
from pointsman.simulate.synthetic import RECIPES, recipe_of

__all__ = ["measured", "profile_keys", "profile_names", "profile_of", "source_of"]

PROFILES = Path(__file__).parent / "profiles"

SOURCE = (
    *("engine", "model", "hardware", "url", "title", "published", "figures", "measured", "by"),
    *("fit", "assumed", "note"),
)
"""What the file of a profile says of where its numbers come from."""

KEYS = {"hash_ids": "mooncake", "kind": "recorded"}
"""What a JSON line has that tells what it is of."""


def source_of(text: str) -> Source:
    """Return the workload NAME, NAME:key=value,..., or FILE: a trace of Mooncake or Azure, or a gateway's recording.

    >>> source_of("rag:prefixes=10").recipe.prefixes
    10
    """
    if text.partition(":")[0] in RECIPES:
        return Source(recipe=recipe_of(text))
    path = Path(text)
    if not path.is_file():
        if "/" in text or path.suffix:
            raise ValueError(f"workload {text}: there is no such file")
        return Source(recipe=recipe_of(text))
    return Source(path=text, kind=_kind_of(path))


def _kind_of(path: Path) -> str:
    if path.name.endswith((".csv", ".csv.gz")):
        return "azure"
    if path.suffix == ".gz":
        return "mooncake"
    try:
        with path.open("rb") as lines:
            first = msgspec.json.decode(next(lines, b""))
    except OSError as error:
        raise ValueError(f"workload {path}: {error.strerror}") from None
    except ValueError:
        first = None
    for key, kind in KEYS.items():
        if isinstance(first, dict) and key in first:
            return kind
    raise ValueError(
        f"workload {path}: neither a trace of Mooncake or Azure (.csv) nor a recording of the gateway"
    )


def profile_of(text: str) -> EngineProfile:
    """Return the engine `key=value,...`, that of a TOML file with these keys, or one of those that come with this.

    A file may have a table `source` of texts, which says where its numbers come from. "" is the default engine.

    >>> profile_of("kv_tokens=100000").kv_tokens, profile_of("smollm2-cpu").sequences_max
    (100000, 8)
    """
    if not text:
        return EngineProfile()
    if "=" in text:
        return _profile("profile", profile_keys(text.split(",")))
    named = PROFILES / f"{text}.toml"
    path = named if text in profile_names() else Path(text)
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if "/" in text or path.suffix:
            raise ValueError(f"profile {text}: {error.strerror}") from None
        raise ValueError(
            f"no profile is called {text!r}, {nearest(text, profile_names())}"
        ) from None
    except OSError as error:
        raise ValueError(f"profile {text}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"profile {text}: not valid TOML: {error}") from None
    _check_source(text, values.pop("source", {}))
    return _profile(f"profile {text}", values)


def profile_names() -> list[str]:
    """Return the names of the profiles that come with this.

    >>> "smollm2-cpu" in profile_names()
    True
    """
    return sorted([path.stem for path in PROFILES.glob("*.toml")])


def profile_keys(pairs: Iterable[str]) -> dict[str, str]:
    """Read numbers of a profile, each written key=value.

    >>> profile_keys(["kv_tokens=100000"])
    {'kv_tokens': '100000'}
    """
    values = dict(each.partition("=")[::2] for each in pairs)
    _check_keys("profile", values)
    return values


def _check_keys(where: str, values: Iterable[str]) -> None:
    known = [field.name for field in fields(EngineProfile)]
    for key in values:
        if key not in known:
            raise ValueError(f"{where}: there is no {key!r}, {nearest(key, known)}")


def _check_source(name: str, source: object) -> None:
    if not isinstance(source, dict):
        raise ValueError(f"profile {name}: source is not a table")
    for key, value in source.items():
        if key not in SOURCE:
            raise ValueError(f"profile {name}: source has no {key!r}, {nearest(key, SOURCE)}")
        if not isinstance(value, str):
            raise ValueError(f"profile {name}: source.{key} is not a text")


def _profile(where: str, values: Mapping[str, object]) -> EngineProfile:
    _check_keys(where, values)
    try:
        # A command line has texts only; a file must have numbers where numbers are meant.
        return msgspec.convert(values, EngineProfile, strict=where != "profile")
    except msgspec.ValidationError as error:
        raise ValueError(f"{where}: {error}") from None


def measured(recording: Recording, level: ServiceLevel) -> Measures:
    """Return the figures of what the gateway itself saw, as far as it could: of streams, and without caches.

    >>> measured(Recording(()), ServiceLevel()).requests
    0
    """
    workers = sorted(recording.workers)
    numbers = {name: number for number, name in enumerate(workers)}
    outcome = Outcome(workers=[WorkerOutcome(name) for name in workers])
    for each in recording.requests:
        tokens = each.output_tokens or 0
        index = outcome.begin(each.started, prompt=each.prompt_tokens, output=tokens, gateway=0)
        outcome.attempts[index] = len(each.picks)
        if each.picks:
            outcome.worker[index] = numbers.get(each.picks[-1].worker, -1)
        if each.status >= 400 or not each.began:
            continue
        outcome.e2e[index] = each.ended - each.started
        # The first byte of an answer that comes whole says nothing of its first token.
        if each.stream:
            outcome.ttft[index] = each.began - each.started
            if tokens > 1:
                outcome.tpot[index] = (each.ended - each.began) / (tokens - 1)
    return replace(measure(outcome, level), hit_rate=nan)
