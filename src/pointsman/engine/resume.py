"""The decode worker's side of a hand-off: from a handle to the KV state that a prompt goes on from.

A handle is claimed once, and first of all: whatever becomes of the request after that, its blocks are free again.
The prompt is not believed to be the one that was pushed. It must have as many tokens, and wherever a block came with
a hash, the tokens up to there must have that hash.
"""

from collections.abc import Sequence

from pointsman.engine.kv.blocks import hashes_of
from pointsman.engine.kv.pool import Held, Pool
from pointsman.engine.kv.state import Layout
from pointsman.engine.refusals import EngineError, unknown_handle
from pointsman.engine.scheduler import GRID

__all__ = ["Handles"]


class Handles:
    """What was pushed to this worker, for its HTTP surface. `layout` is that of its machine's KV states."""

    def __init__(self, pool: Pool, layout: Layout) -> None:
        self.pool = pool
        self._layout = layout

    def claim(self, handle_id: str) -> Held:
        """Take what a handle holds.

        Raises:
            EngineError: 404 kv_handle_not_found: never pushed, claimed, released or expired.
        """
        held = self.pool.claim(handle_id)
        if held is None:
            raise unknown_handle()
        return held

    def state(self, held: Held, prompt: Sequence[int]) -> bytes:
        """The KV state of `prompt`.

        Raises:
            EngineError: 409 kv_handle_mismatch: the blocks are those of another prompt.
        """
        own = hashes_of(prompt, whole_chunks=GRID)
        if held.n_tokens != len(prompt):
            raise _mismatch(f"{held.n_tokens} tokens were pushed, the prompt has {len(prompt)}")
        pairs = zip(held.hashes, own, strict=False)
        if len(held.hashes) != len(own) or any(theirs not in (0, ours) for theirs, ours in pairs):
            raise _mismatch("other tokens were pushed than those of the prompt")
        return self._layout.join(held.payloads, held.n_tokens)


def _mismatch(message: str) -> EngineError:
    return EngineError(409, message, code="kv_handle_mismatch")
