"""What a modelled engine can do: the numbers that `pointsman.simulate.engine` computes with."""

from typing import Annotated

from msgspec import Meta, Struct

__all__ = ["EngineProfile"]


class EngineProfile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The speed and the room of one engine.

    One step takes `decode_base_s` plus `decode_per_sequence_s` for each sequence that decodes (nothing where none
    does), plus the prompt tokens of the step over `prefill_tokens_per_s`. A step has at most `chunk_tokens`, those of
    decoding sequences included; `sequences_max` are in the batch at a time. `kv_tokens` is the room for KV caches.

    The defaults are those of the realistic mock worker in the field that simulates on a CPU.

    >>> EngineProfile().step_s(decoding=10, prompt_tokens=2000)
    0.2595
    """

    prefill_tokens_per_s: Annotated[float, Meta(gt=0)] = 8000.0
    decode_base_s: Annotated[float, Meta(ge=0)] = 0.006
    decode_per_sequence_s: Annotated[float, Meta(ge=0)] = 0.00035
    chunk_tokens: Annotated[int, Meta(ge=1)] = 2048
    sequences_max: Annotated[int, Meta(ge=1)] = 256
    kv_tokens: Annotated[int, Meta(ge=1)] = 524_288

    def step_s(self, *, decoding: int, prompt_tokens: int) -> float:
        """Return how long a step takes, in seconds.

        The two parts add up because both are one forward pass: a prompt's tokens are bound by arithmetic, those of
        decoding sequences by reading weights and caches.
        """
        return prompt_tokens / self.prefill_tokens_per_s + (
            self.decode_base_s + self.decode_per_sequence_s * decoding if decoding else 0.0
        )
