"""How fast a modelled engine is, and how much it holds.

The defaults are round figures, those of no engine in particular; a profile of a real one has to be measured. How long a
step takes is said in `pointsman.simulate.engine`.
"""

from math import isfinite

from msgspec import Struct
from msgspec.structs import replace

__all__ = ["EngineProfile"]


class EngineProfile(Struct, frozen=True, kw_only=True):
    """The numbers of one engine.

    `prefill_tokens_per_s` is how many prompt tokens it computes per second; a step in which sequences decode takes
    `decode_base_s` seconds and `decode_per_sequence_s` more for each of them. A step computes at most `chunk_tokens`
    prompt tokens, `sequences_max` sequences run at a time, and the KV cache holds `kv_tokens` tokens, in blocks of
    `block_tokens`.

    Raises `ValueError` for a number out of its range, and names it.

    >>> EngineProfile(chunk_tokens=0)
    Traceback (most recent call last):
    ValueError: chunk_tokens must be at least 1
    """

    prefill_tokens_per_s: float = 8000.0
    decode_base_s: float = 0.006
    decode_per_sequence_s: float = 0.00035
    chunk_tokens: int = 2048
    sequences_max: int = 256
    kv_tokens: int = 524_288
    block_tokens: int = 16

    def __post_init__(self) -> None:
        if not (isfinite(self.prefill_tokens_per_s) and self.prefill_tokens_per_s > 0):
            raise ValueError("prefill_tokens_per_s must be a number above 0")
        if not (isfinite(self.decode_base_s) and self.decode_base_s > 0):
            raise ValueError("decode_base_s must be a number above 0")
        if not (isfinite(self.decode_per_sequence_s) and self.decode_per_sequence_s >= 0):
            raise ValueError("decode_per_sequence_s must be a number of 0 or more")
        for name in ("chunk_tokens", "sequences_max", "kv_tokens", "block_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")

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
        )
