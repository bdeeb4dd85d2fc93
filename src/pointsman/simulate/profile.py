"""How fast a modelled engine is, and how much it holds.

The defaults are round figures, those of no engine in particular; a profile of a real one has to be measured. How long a
step takes is said in `pointsman.simulate.engine`. A token of 128 KiB is one of Llama 3.1 8B in 16 bits (32 layers, 8
heads of keys and of values, 128 numbers each), and the network that carries it does 100 Gbit/s.
"""

from math import isfinite

from msgspec import Struct
from msgspec.structs import replace

from pointsman.domain.pairing import PairingOptions

__all__ = ["EngineProfile"]

COUNTS = ("chunk_tokens", "sequences_max", "kv_tokens", "block_tokens", "kv_bytes_per_token")


class EngineProfile(Struct, frozen=True, kw_only=True):
    """The numbers of one engine.

    `prefill_tokens_per_s` is how many prompt tokens it computes per second; a step in which sequences decode takes
    `decode_base_s` seconds and `decode_per_sequence_s` more for each of them. A step computes at most `chunk_tokens`
    prompt tokens, `sequences_max` sequences run at a time, and the KV cache holds `kv_tokens` tokens, in blocks of
    `block_tokens`. An engine that hands a prompt over needs `handoff_s` seconds for that, and for every token that the
    other one lacks `kv_bytes_per_token` bytes at `transfer_bytes_per_s`.

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
    kv_bytes_per_token: int = 131_072
    transfer_bytes_per_s: float = 12.5e9
    handoff_s: float = 0.01

    def __post_init__(self) -> None:
        if not (isfinite(self.prefill_tokens_per_s) and self.prefill_tokens_per_s > 0):
            raise ValueError("prefill_tokens_per_s must be a number above 0")
        if not (isfinite(self.decode_base_s) and self.decode_base_s > 0):
            raise ValueError("decode_base_s must be a number above 0")
        if not (isfinite(self.decode_per_sequence_s) and self.decode_per_sequence_s >= 0):
            raise ValueError("decode_per_sequence_s must be a number of 0 or more")
        if not (isfinite(self.transfer_bytes_per_s) and self.transfer_bytes_per_s > 0):
            raise ValueError("transfer_bytes_per_s must be a number above 0")
        if not (isfinite(self.handoff_s) and self.handoff_s >= 0):
            raise ValueError("handoff_s must be a number of 0 or more")
        for name in COUNTS:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")

    def transfer_s(self, tokens: int) -> float:
        """Return how long it takes to hand so many tokens over.

        >>> EngineProfile().transfer_s(8000)
        0.09388608
        """
        return self.handoff_s + tokens * self.kv_bytes_per_token / self.transfer_bytes_per_s

    def pairing(self) -> PairingOptions:
        """Return what a gateway that knows these speeds is told of hand-offs.

        >>> EngineProfile(transfer_bytes_per_s=1.25e9).pairing().transfer_tokens_per_s
        9536.7431640625
        """
        return PairingOptions(
            prefill_tokens_per_s=self.prefill_tokens_per_s,
            transfer_tokens_per_s=self.transfer_bytes_per_s / self.kv_bytes_per_token,
            handoff_s=self.handoff_s,
        )

    def slower(self, factor: float) -> "EngineProfile":
        """Return the profile of an engine that needs `factor` (above 0) times as long for all that it computes.

        >>> EngineProfile().slower(2).prefill_tokens_per_s
        4000.0
        """
        return replace(
            self,
            prefill_tokens_per_s=self.prefill_tokens_per_s / factor,
            decode_base_s=self.decode_base_s * factor,
            decode_per_sequence_s=self.decode_per_sequence_s * factor,
        )
