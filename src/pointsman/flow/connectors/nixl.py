"""The connector NIXL of vLLM: the prefill worker's answer has what the decode worker needs to pull the blocks.

The prefill worker keeps them under a lease until they were pulled, or for 30 s. So what it has begun it is let finish,
also when the client has left: only its answer can be used to give the blocks back. That is done by asking the decode
worker for one token of another prompt with the same parameters: it pulls nothing that matters, and has the prefill
worker free all of them.

No answer says how much was pulled: vLLM tells as `cached_tokens` what the prefill worker had in its own cache. The
proof that blocks travel is the decode worker's counter, which polling reads (`Worker.remote_tokens`).
"""

from collections.abc import Sequence

from pointsman.dialect import vllm
from pointsman.dialect.engines import DIALECTS
from pointsman.flow.connectors.answers import failed, note_usage, refused, succeeded
from pointsman.flow.connectors.asked import limit_of, prefill_call
from pointsman.flow.effects import Answer, Call, Outcome
from pointsman.flow.handover import PLAIN, Handoff, Prefilling, Prompt, Ready
from pointsman.wire.call import HttpCall

__all__ = ["Nixl", "given_back"]

GIVE_BACK_S = 10.0


class Nixl:
    """Prefill first; the decode worker pulls."""

    def can(self, prompt: Prompt) -> bool:
        """Tell whether there is one prompt and one answer."""
        return DIALECTS["vllm"].handed_off(prompt.path, prompt.body)

    def prefill(self, handoff: Handoff) -> Prefilling:
        """Ask for one token, and take where the blocks are from the answer."""
        x = handoff.x
        name = handoff.handoffs.name(x.request_id)
        body = vllm.nixl_prefill(x.path, handoff.prompt.body, handoff.served)
        handoff.transfer.prefill_at = x.now

        def settle(outcome: Outcome) -> Sequence[HttpCall]:
            params = _params(outcome)
            return () if params is None else (given_back(handoff, vllm.nixl_decode(params)),)

        outcome = yield Call(prefill_call(handoff, body, name), settle)
        if refused(outcome):
            return outcome
        if not succeeded(outcome):
            return failed(outcome, handoff)
        note_usage(handoff, outcome)
        params = _params(outcome)
        if params is None:
            # It computed the prompt and kept nothing: whoever configured it shall see that.
            handoff.transfer.outcome = "recomputed"
            return PLAIN
        fields = vllm.nixl_decode(params)
        handoff.holds(given_back(handoff, fields))
        return Ready({**limit_of(handoff), **fields}, b"", name, to_the_end=False)

    def resumed(self, handoff: Handoff, answer: bytes) -> int:
        """Return -1: no answer says it."""
        return -1

    def unknown(self, answer: Answer) -> bool:
        """Return False: a worker that cannot pull says 500, which is no word about the handle."""
        return False


def given_back(
    handoff: Handoff, fields: dict[str, bytes], timeout_s: float = GIVE_BACK_S
) -> HttpCall:
    """Return the request that makes the decode worker have the prefill worker free what it keeps."""
    return HttpCall(
        handoff.decode, b"/v1/completions", vllm.give_back(handoff.served, fields), timeout_s
    )


def _params(outcome: Outcome) -> bytes | None:
    return (
        vllm.transfer_params(outcome.payload)
        if isinstance(outcome, Answer) and succeeded(outcome)
        else None
    )
