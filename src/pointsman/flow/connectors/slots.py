"""The connector of llama.cpp: a slot is saved to a file of a folder that both workers see, and restored.

Slots have numbers, and the gateway says which: one of a worker's is taken for the time of a hand-off, so that no other
request of this gateway comes between. Where none is free the decode worker computes the prompt itself. A file is named
after the slot that it is restored to, and the next one for it is written over it: there are as many files as slots.
"""

from functools import partial
from hashlib import sha256

from pointsman.dialect import llamacpp
from pointsman.dialect.engines import DIALECTS
from pointsman.domain.worker import Worker
from pointsman.flow.attempts import Failure
from pointsman.flow.connectors.answers import failed, note_usage, refused, succeeded
from pointsman.flow.connectors.asked import cached_in, limit_of, prefill_call
from pointsman.flow.effects import Answer, Call, Lost, Why
from pointsman.flow.handover import PLAIN, Handoff, Prefilling, Prompt, Ready
from pointsman.wire.call import HttpCall

__all__ = ["Slots"]

MOVE_S = 10.0


class Slots:
    """Prefill, save, restore; the decode worker goes on from its slot."""

    def can(self, prompt: Prompt) -> bool:
        """Tell whether there is one prompt, all of it text, and one answer."""
        return DIALECTS["llamacpp"].handed_off(prompt.path, prompt.body)

    def prefill(self, handoff: Handoff) -> Prefilling:
        """Compute the prompt in a slot of the prefill worker, and move it to one of the decode worker."""
        x, transfer = handoff.x, handoff.transfer
        source, target = (_take(handoff, each) for each in (handoff.prefill, handoff.decode))
        if source is None or target is None:
            transfer.outcome = "direct"
            return PLAIN
        name = handoff.handoffs.name(x.request_id)
        body = llamacpp.slot_prefill(x.path, handoff.prompt.body, handoff.served, source)
        transfer.prefill_at = x.now
        outcome = yield Call(prefill_call(handoff, body, name))
        if refused(outcome):
            return outcome
        if not succeeded(outcome):
            return failed(outcome, handoff)
        note_usage(handoff, outcome)
        filename = _filename(handoff.decode, target)
        saved = yield Call(HttpCall(handoff.prefill, *llamacpp.slot_save(source, filename), MOVE_S))
        if not succeeded(saved):
            return failed(saved, handoff)
        restore = HttpCall(handoff.decode, *llamacpp.slot_restore(target, filename), MOVE_S)
        restored = yield Call(restore)
        if not succeeded(restored):
            detail = f"worker {handoff.decode.id} did not restore what was saved for it"
            return Failure(Lost(Why.HANDLE, detail), handoff.decode)
        fields = {**limit_of(handoff), **llamacpp.slot_decode(target)}
        return Ready(fields, b"", name)

    def resumed(self, handoff: Handoff, answer: bytes) -> int:
        """Return how many tokens were in the slot."""
        return cached_in(answer)

    def unknown(self, answer: Answer) -> bool:
        """Return False: a slot is always known."""
        return False


def _take(handoff: Handoff, worker: Worker) -> int | None:
    """Take a free slot of a worker until the hand-off is over, None where all that it tells of are taken."""
    taken = handoff.handoffs.slots.setdefault(worker, set())
    for slot in range(max(worker.slots, 1)):
        if slot not in taken:
            taken.add(slot)
            handoff.frees(partial(taken.discard, slot))
            return slot
    return None


def _filename(worker: Worker, slot: int) -> str:
    # Ids may have characters in them that no file name has.
    return f"pointsman-{sha256(worker.id.encode()).hexdigest()[:16]}-{slot}.bin"
