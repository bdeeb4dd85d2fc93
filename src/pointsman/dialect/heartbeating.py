"""Engines of our own contract, where somebody lists them and they send no heartbeats: what `/health` says is read.

How they are told to hand off is in `pointsman.dialect.tl`.
"""

from collections.abc import Mapping

import msgspec
from msgspec import Struct

from pointsman.dialect import tl
from pointsman.dialect.paths import CHAT, TEXT
from pointsman.dialect.reading import (
    HEALTH,
    MODELS,
    Probe,
    Probed,
    Reading,
    cached_tokens_of,
    faults,
    health_of,
    read_json,
    served_by,
)
from pointsman.domain.worker import TL_BLOCK_TOKENS
from pointsman.errors import BadRequest

__all__ = ["Heartbeating"]


class Load(Struct):
    """What /health says of an engine, draining or not."""

    status: str = ""
    queue_depth: int | None = None
    running: int | None = None
    kv_total_blocks: int | None = None
    kv_free_blocks: int | None = None
    kv_block_tokens: int | None = None


decode_load = msgspec.json.Decoder(Load).decode


class Heartbeating:
    """The dialect `tl`."""

    name = "tl"
    probes = (Probe(HEALTH), Probe(MODELS, every=5))
    paths = frozenset((CHAT, TEXT))
    connectors = frozenset(("",))

    def read(self, answers: Mapping[str, Probed]) -> Reading:
        """Take everything from /health, whose 503 tells of draining and still has the numbers."""
        health = answers.get(HEALTH)
        ready, why = health_of(health)
        load = read_json(decode_load, health.body) if health is not None and health.status else None
        models, no_models = served_by(answers)
        unread = "health: no load in it" if ready and (load is None or load.running is None) else ""
        load = load or Load()
        draining = load.status == "draining"
        blocks = load.kv_total_blocks
        return Reading(
            # It answers, and what it has in work goes on: a drain is no death.
            ready or draining,
            "" if draining else why,
            faults(no_models, unread),
            models,
            running=load.running,
            waiting=load.queue_depth,
            kv_total_blocks=blocks,
            kv_free_blocks=load.kv_free_blocks,
            kv_tokens=None if blocks is None else blocks * TL_BLOCK_TOKENS,
            block_tokens=load.kv_block_tokens,
            draining=draining,
        )

    def tokenize(self, served: str, path: str, body: bytes) -> tuple[bytes, bytes] | None:
        """Ask as a hand-off does, where the prompt is no list of tokens already."""
        generation = _generation(path, body)
        if generation is None or generation.ids is not None:
            return None
        return tl.TOKENIZE, tl.tokenize_body(served, path, body)

    def token_ids(self, answer: bytes) -> list[int]:
        """Read the answer of /v1/tokenize. Raises ValueError."""
        return tl.token_ids(answer)

    def cached_tokens(self, answer: bytes) -> int:
        """Read `usage`."""
        return cached_tokens_of(answer)

    def abort(self, request_id: str) -> tuple[bytes, bytes] | None:
        """Nothing: it stops when its connection closes."""
        return None

    def handed_off(self, path: str, body: bytes) -> bool:
        """Tell whether the contract has words for the whole request."""
        return _generation(path, body) is not None


def _generation(path: str, body: bytes) -> tl.Generation | None:
    try:
        return tl.read(path, body)
    except BadRequest:
        return None
