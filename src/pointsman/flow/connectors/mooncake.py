"""The connector Mooncake of vLLM: the two workers meet under a transfer id that the gateway draws.

The decode worker asks the prefill worker's bootstrap server for the blocks; which engine lives there is asked anew for
every request, since one that was restarted has another id. The prefill worker keeps its blocks until they were asked
for, so they are given back as with NIXL: by a request that asks for them and uses nothing of it.
"""

from collections.abc import Sequence

from pointsman.dialect import vllm
from pointsman.dialect.engines import DIALECTS
from pointsman.flow.attempts import Failure
from pointsman.flow.connectors.answers import failed, note_usage, refused, succeeded
from pointsman.flow.connectors.asked import limit_of, prefill_call
from pointsman.flow.connectors.nixl import given_back
from pointsman.flow.effects import Answer, Call, Lost, Outcome, Why
from pointsman.flow.handover import Handoff, Prefilling, Prompt, Ready
from pointsman.wire.call import HttpCall

__all__ = ["Mooncake"]

QUERY_S = 2.0

GIVE_BACK_S = 0.5
"""A prefill worker that has nothing under a transfer id makes whoever asks wait. What it has it gives up at once."""


class Mooncake:
    """Prefill first, under a transfer id; the decode worker asks for the blocks."""

    def can(self, prompt: Prompt) -> bool:
        """Tell whether there is one prompt and one answer."""
        return DIALECTS["vllm"].handed_off(prompt.path, prompt.body)

    def prefill(self, handoff: Handoff) -> Prefilling:
        """Ask who lives at the bootstrap server, then for one token under a transfer id."""
        x, worker = handoff.x, handoff.prefill
        handoff.transfer.prefill_at = x.now
        asked = yield Call(
            HttpCall(handoff.handoffs.bootstrap(worker), b"/query", b"", QUERY_S, get=True)
        )
        try:
            if not isinstance(asked, Answer) or not succeeded(asked):
                raise ValueError("its bootstrap server does not answer")
            engine_id = vllm.mooncake_engine_id(asked.payload)
        except ValueError as error:
            return Failure(Lost(Why.PREFILL, f"prefill worker {worker.id}: {error}"), worker)
        name = handoff.handoffs.name(x.request_id)
        transfer_id = f"xfer-{name}"
        body = vllm.mooncake_prefill(x.path, handoff.prompt.body, handoff.served, transfer_id)
        fields = vllm.mooncake_decode(transfer_id, engine_id, f"http://{worker.bootstrap}")
        back = given_back(handoff, fields, GIVE_BACK_S)

        def settle(outcome: Outcome) -> Sequence[HttpCall]:
            return (back,) if succeeded(outcome) else ()

        outcome = yield Call(prefill_call(handoff, body, name), settle)
        if refused(outcome):
            return outcome
        if not succeeded(outcome):
            return failed(outcome, handoff)
        note_usage(handoff, outcome)
        handoff.holds(back)
        return Ready({**limit_of(handoff), **fields}, b"", name, to_the_end=False)

    def resumed(self, handoff: Handoff, answer: bytes) -> int:
        """Return -1: no answer says it."""
        return -1

    def unknown(self, answer: Answer) -> bool:
        """Return False: a worker that is not given what it asks for says 500."""
        return False
