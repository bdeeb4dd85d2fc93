"""From an engine to the file of its profile: measured, fitted, and written with where each number comes from.

What cannot be seen from outside and is not told is a default, and the file says which numbers those are.
"""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from random import Random
from typing import NamedTuple

import httpx
import msgspec
from msgspec.structs import asdict, fields

from pointsman import __version__
from pointsman.dialect.engines import Reading
from pointsman.measure.asking import Engine, MeasureError, look
from pointsman.measure.measuring import Measured, Measuring, Settings
from pointsman.measure.prompts import Prompts
from pointsman.simulate.fitting import fit_decoding, fit_prompts
from pointsman.simulate.profile import OF_PAIRS, EngineProfile
from pointsman.tomltext import toml_value

__all__ = ["Profiled", "profile_engine", "profile_from", "written"]

DIGITS = 4
"""Digits of a number that is fitted: more were never measured."""
LONGEST = 2048
ROOM = 0.85
"""The part of a context that the longest prompt takes, if nobody says how long it is to be."""


class Profiled(NamedTuple):
    """A profile, the keys of which `assumed` are neither measured nor told, and how far the fit is from the samples."""

    profile: EngineProfile
    assumed: tuple[str, ...]
    prefill_error: float
    decode_error: float


async def profile_engine(
    client: httpx.AsyncClient,
    model: str,
    *,
    given: Mapping[str, object],
    longest: int | None,
    repeats: int,
    concurrency: int,
    timeout_s: float,
    say: Callable[[str], None],
) -> tuple[Profiled, str]:
    """Measure the engine behind `client`; return its profile and its dialect. `given` are keys that are known.

    Raises:
        MeasureError: it cannot be measured.
        ValueError: what was measured, or what was given, is no profile.
    """
    dialect, reading = await look(client)
    served = {each.id: each.max_model_len for each in reading.models or ()}
    if model not in served:
        raise MeasureError(f"no model is called {model!r}: there are {', '.join(served) or 'none'}")
    context = served[model]
    if longest is None:
        longest = min(LONGEST, int(ROOM * context)) if context else LONGEST
    engine = Engine(client, model, dialect, timeout_s=timeout_s)
    settings = Settings(longest, repeats, concurrency)
    measured = await Measuring(engine, Prompts(Random()), settings, say).run(reading.slots)
    profiled = profile_from(measured, reading, context=context, given=given)
    for sample in measured.prompts:
        fitted = profiled.profile.prompt_s(sample.tokens)
        say(f"prompt of {sample.tokens}: {sample.seconds:.3g} s, by the profile {fitted:.3g} s")
    for step in measured.decodes:
        fitted = profiled.profile.token_s(step.sequences, step.context)
        say(
            f"{step.sequences} answers: {step.seconds * 1000:.3g} ms a token, by the profile {fitted * 1000:.3g} ms"
        )
    return profiled, dialect.name


def profile_from(
    measured: Measured, reading: Reading, *, context: int, given: Mapping[str, object]
) -> Profiled:
    """Fit a profile to what was measured; `context` is the engine's longest in tokens, 0 where it is not known.

    Raises ValueError where nothing fits, or a given number is out of its range.
    """
    prefill = fit_prompts(measured.prompts)
    decoding = fit_decoding(measured.decodes, alone=measured.sequences == 1)
    found: dict[str, object] = {
        "prefill_tokens_per_s": _rounded(prefill.prefill_tokens_per_s),
        "prefill_context_s": _rounded(prefill.prefill_context_s),
        "start_s": _rounded(prefill.start_s),
        "decode_base_s": _rounded(decoding.decode_base_s),
        "decode_per_sequence_s": _rounded(decoding.decode_per_sequence_s),
        "decode_context_s": _rounded(decoding.decode_context_s),
        "prefix_cache": measured.prefix_cache,
    }
    if measured.chunk is not None:
        found["chunk_tokens"] = measured.chunk
    if measured.sequences is not None:
        found["sequences_max"] = measured.sequences
    if reading.block_tokens:
        found["block_tokens"] = reading.block_tokens
    if reading.block_tokens and reading.kv_total_blocks:
        found["kv_tokens"] = reading.kv_total_blocks * reading.block_tokens
    elif measured.prefix_cache == "slots" and context and measured.sequences:
        found["kv_tokens"] = measured.sequences * context
    known = {**found, **given}
    names = [field.name for field in fields(EngineProfile) if field.name not in OF_PAIRS]
    assumed = tuple(name for name in names if name not in known)
    try:
        profile = msgspec.convert(known, EngineProfile, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None
    return Profiled(profile, assumed, prefill.error, decoding.error)


def written(
    profiled: Profiled, *, engine: str, model: str, url: str, now: datetime, note: str = ""
) -> str:
    """Return the text of a profile's file, which `pointsman simulate --profile` reads."""
    source = {
        "engine": engine,
        "model": model,
        "url": url,
        "measured": now.astimezone(UTC).date().isoformat(),
        "by": f"pointsman profile {__version__}",
        "fit": f"relative errors of the fit: prompts {profiled.prefill_error:.1%}, tokens {profiled.decode_error:.1%}",
        "assumed": ", ".join(profiled.assumed),
        "note": note,
    }
    lines = [f"{key} = {toml_value(value)}" for key, value in asdict(profiled.profile).items()]
    about = [f"{key} = {toml_value(value)}" for key, value in source.items() if value]
    return "\n".join([*lines, "", "[source]", *about, ""])


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
