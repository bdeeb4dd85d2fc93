"""Any engine that has OpenAI's paths, and of which nothing else is known: it is alive if it answers.

It has no load and no cache to read, which is no fault of it: the gateway's own count of what is in flight is all.
"""

from collections.abc import Mapping

from pointsman.dialect.paths import (
    CHAT,
    COUNT_TOKENS,
    EMBEDDINGS,
    MESSAGES,
    RERANK,
    RESPONSES,
    SCORE,
    TEXT,
    TRANSCRIPTIONS,
    TRANSLATIONS,
)
from pointsman.dialect.reading import MODELS, Probe, Probed, Reading, cached_tokens_of, served_by

__all__ = ["OpenAi"]


class OpenAi:
    """The dialect `openai`. `paths` are all that such an engine may have; what one lacks it says itself."""

    name = "openai"
    probes = (Probe(MODELS),)
    paths = frozenset(
        (
            *(CHAT, TEXT, RESPONSES, MESSAGES, COUNT_TOKENS, EMBEDDINGS, RERANK, SCORE),
            *(TRANSCRIPTIONS, TRANSLATIONS),
        )
    )
    connectors: frozenset[str] = frozenset()

    def read(self, answers: Mapping[str, Probed]) -> Reading:
        """Take any answer of a server that is not at fault for life: not all list their models, or to everybody."""
        answer = answers.get(MODELS, Probed(0, error="not asked yet"))
        models, unread = served_by(answers)
        alive = 0 < answer.status < 500
        return Reading(alive, "" if alive else unread or f"models: {answer.fault}", unread, models)

    def tokenize(self, served: str, path: str, body: bytes) -> tuple[bytes, bytes] | None:
        """Nothing: there is no such path."""
        return None

    def token_ids(self, answer: bytes) -> list[int]:
        """Raise ValueError: nothing was asked."""
        raise ValueError("an engine of the dialect openai tokenizes nothing")

    def cached_tokens(self, answer: bytes) -> int:
        """Read `usage`."""
        return cached_tokens_of(answer)

    def abort(self, request_id: str) -> tuple[bytes, bytes] | None:
        """Nothing: closing its connection is all that can be done."""
        return None

    def handed_off(self, path: str, body: bytes) -> bool:
        """Nothing is."""
        return False
