"""How fast a modelled engine is, and how much it holds.

The defaults are round figures, those of no engine in particular. Profiles of real engines are files, some of which come
with this package; `pointsman profile` measures others. How long a step takes is said in `pointsman.simulate.engine`.
"""

from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

__all__ = ["EngineProfile"]

RANGES: dict[str, tuple[float, float]] = {
    "prefill_tokens_per_s": (1e-3, 1e9),
    "decode_base_s": (1e-12, 60),
    "decode_per_sequence_s": (0, 60),
    "prefill_context_s": (0, 1),
    "decode_context_s": (0, 1),
    "start_s": (0, 3600),
    "chunk_tokens": (1, 2**30),
    "sequences_max": (1, 2**20),
    "kv_tokens": (1, 2**36),
    "block_tokens": (1, 2**20),
}
"""What can be true of an engine, both ends included. More is a mistake, of units as a rule."""


class EngineProfile(Struct, frozen=True, kw_only=True):
    """The numbers of one engine.

    `prefill_tokens_per_s` is how many prompt tokens it computes per second; a step in which sequences decode takes
    `decode_base_s` seconds and `decode_per_sequence_s` more for each of them. Each token of a prompt costs
    `prefill_context_s` more for each token before it, each sequence that decodes `decode_context_s` for each token that
    it has, and each request costs `start_s` once. A step computes at most `chunk_tokens` prompt tokens, `sequences_max`
    sequences run at a time, and the KV cache holds `kv_tokens` tokens, in blocks of `block_tokens`; `prefix_cache` is
    what is kept of prompts: blocks for all (`paged`), the last prompt of each place (`slots`), or `none`.

    Raises `ValueError` for a number out of its range, and names it.

    >>> EngineProfile(chunk_tokens=0)
    Traceback (most recent call last):
    ValueError: chunk_tokens must be 1 to 1073741824, not 0
    """

    prefill_tokens_per_s: float = 8000.0
    decode_base_s: float = 0.006
    decode_per_sequence_s: float = 0.00035
    prefill_context_s: float = 0.0
    decode_context_s: float = 0.0
    start_s: float = 0.0
    chunk_tokens: int = 2048
    sequences_max: int = 256
    kv_tokens: int = 524_288
    block_tokens: int = 16
    prefix_cache: Literal["paged", "slots", "none"] = "paged"

    def __post_init__(self) -> None:
        for name, (least, most) in RANGES.items():
            value = getattr(self, name)
            # Whatever is no number is in no range.
            if not least <= value <= most:
                raise ValueError(f"{name} must be {least:.12g} to {most:.12g}, not {value:.12g}")
        if self.prefix_cache == "slots" and self.kv_tokens < self.sequences_max:
            raise ValueError("kv_tokens must be sequences_max or more where prefix_cache is slots")

    def prompt_s(self, tokens: int) -> float:
        """Return the seconds until the first token of a prompt that is alone at the engine, of which nothing is cached.

        >>> EngineProfile().prompt_s(10_000), EngineProfile().prompt_s(1)
        (1.25, 0.006)
        """
        seconds, before, base = self.start_s, 0, self.decode_base_s
        while before < tokens:
            chunk = min(self.chunk_tokens, tokens - before)
            read = chunk * (before + chunk / 2)
            seconds += max(base, chunk / self.prefill_tokens_per_s + self.prefill_context_s * read)
            before += chunk
        return seconds

    def token_s(self, sequences: int, context: float) -> float:
        """Return the seconds between two tokens of so many `sequences` that have `context` tokens together.

        >>> round(EngineProfile(decode_context_s=1e-6).token_s(40, 4000), 6)
        0.024
        """
        return (
            self.decode_base_s
            + self.decode_per_sequence_s * sequences
            + self.decode_context_s * context
        )

    def slower(self, factor: float) -> "EngineProfile":
        """Return the profile of an engine that needs `factor` (above 0) times as long for everything.

        >>> EngineProfile().slower(2).prefill_tokens_per_s
        4000.0
        """
        return replace(
            self,
            prefill_tokens_per_s=self.prefill_tokens_per_s / factor,
            decode_base_s=self.decode_base_s * factor,
            decode_per_sequence_s=self.decode_per_sequence_s * factor,
            prefill_context_s=self.prefill_context_s * factor,
            decode_context_s=self.decode_context_s * factor,
            start_s=self.start_s * factor,
        )
