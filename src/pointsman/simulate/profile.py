"""How fast a modelled engine is, and how much it holds.

The defaults are round figures, those of no engine in particular. Profiles of real engines are files, some of which come
with this package; `pointsman profile` measures others. How long a step takes is said in `pointsman.simulate.engine`.
A token of 128 KiB is one of Llama 3.1 8B in 16 bits (32 layers, 8 heads of keys and of values, 128 numbers each), and
the network that carries it does 100 Gbit/s.
"""

from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from pointsman.domain.pairing import PairingOptions

__all__ = ["OF_PAIRS", "EngineProfile"]

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
    "kv_bytes_per_token": (1, 2**30),
    "transfer_bytes_per_s": (1, 1e15),
    "handoff_s": (0, 3600),
}
"""What can be true of an engine, both ends included. More is a mistake, of units as a rule."""

OF_PAIRS = frozenset(("kv_bytes_per_token", "transfer_bytes_per_s", "handoff_s"))
"""What takes two engines, and is not measured of one."""


class EngineProfile(Struct, frozen=True, kw_only=True):
    """The numbers of one engine.

    `prefill_tokens_per_s` is how many prompt tokens it computes per second; a step in which sequences decode takes
    `decode_base_s` seconds and `decode_per_sequence_s` more for each of them. Each token of a prompt costs
    `prefill_context_s` more for each token before it, each sequence that decodes `decode_context_s` for each token that
    it has, and each request costs `start_s` once. A step computes at most `chunk_tokens` prompt tokens, `sequences_max`
    sequences run at a time, and the KV cache holds `kv_tokens` tokens, in blocks of `block_tokens`; `prefix_cache` is
    what is kept of prompts: blocks for all (`paged`), the last prompt of each place (`slots`), or `none`.
    An engine that hands a prompt over needs `handoff_s` seconds for that, and for every token that the other one lacks
    `kv_bytes_per_token` bytes at `transfer_bytes_per_s`.

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
    kv_bytes_per_token: int = 131_072
    transfer_bytes_per_s: float = 12.5e9
    handoff_s: float = 0.01
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
            prefill_context_s=self.prefill_context_s * factor,
            decode_context_s=self.decode_context_s * factor,
            start_s=self.start_s * factor,
        )
