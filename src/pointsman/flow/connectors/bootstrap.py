"""The connector of SGLang: both workers are asked at once, and meet in a room of the prefill worker's bootstrap server.

Each waits for the other one, so the end of one must be the end of both: whatever way out is taken but the clean end,
both are told to abort, by the name that their bodies gave the request. A worker that waits in a room does not look at
its connection.
"""

from pointsman.dialect import sglang
from pointsman.dialect.engines import DIALECTS
from pointsman.dialect.handing import prompts_of
from pointsman.domain.worker import Worker
from pointsman.flow.attempts import Failure
from pointsman.flow.connectors.asked import limit_of, prefill_call
from pointsman.flow.effects import Answer, Call, Lost, Why
from pointsman.flow.handover import Handoff, Prefilling, Prompt, Ready
from pointsman.wire.call import HttpCall

__all__ = ["Bootstrap"]

ABORT_S = 2.0


class Bootstrap:
    """Both at once, in a room."""

    def can(self, prompt: Prompt) -> bool:
        """Tell whether there is one answer per prompt, and its first token is free."""
        return DIALECTS["sglang"].handed_off(prompt.path, prompt.body)

    def prefill(self, handoff: Handoff) -> Prefilling:
        """Draw a room. Nobody is asked yet."""
        x, prompt = handoff.x, handoff.prompt
        host, _, port = handoff.prefill.bootstrap.rpartition(":")
        if not host:
            detail = f"prefill worker {handoff.prefill.id} has no bootstrap server"
            return Failure(Lost(Why.PREFILL, detail), handoff.prefill)
        name = handoff.handoffs.name(x.request_id)
        prompts = prompts_of(x.path, prompt.body)
        room = handoff.handoffs.draw_seed()
        fields = {
            **sglang.bootstrap_fields(host, int(port), room, prompts),
            **sglang.named(name, prompts),
        }
        handoff.holds(
            *(
                abort(worker, each)
                for worker in (handoff.prefill, handoff.decode)
                for each in sglang.names_of(name, prompts)
            )
        )
        body = sglang.prefill(x.path, prompt.body, handoff.served, fields)
        beside = Call(prefill_call(handoff, body, name))
        return Ready({**limit_of(handoff), **fields}, b"", name, beside)
        yield  # What makes it a generator, like the others.

    def resumed(self, handoff: Handoff, answer: bytes) -> int:
        """Return -1: a decode worker cannot begin without the cache."""
        return -1

    def unknown(self, answer: Answer) -> bool:
        """Return False: there is no handle."""
        return False


def abort(worker: Worker, name: str) -> HttpCall:
    """Return the request that ends one of a worker's."""
    asked = DIALECTS["sglang"].abort(name)
    assert asked is not None, "SGLang has a path for it"
    return HttpCall(worker, *asked, ABORT_S)
