"""The connector of `tl.engine.v1`: the gateway says what the tokens are, and the prefill worker pushes their cache.

The decode worker is told a handle. A handle belongs to one attempt: another attempt begins with a new prefill under a
new name, and what was pushed for the former one is released.
"""

from collections.abc import Generator

from pointsman.dialect import tl
from pointsman.errors import BadRequest
from pointsman.flow.attempts import Failure, stands
from pointsman.flow.connectors.answers import refused
from pointsman.flow.effects import (
    Answer,
    Call,
    Command,
    Encode,
    Encoded,
    Lost,
    Result,
    Returned,
    Status,
    Why,
)
from pointsman.flow.handover import PLAIN, Handoff, Prefilling, Prompt, Ready

__all__ = ["Tl"]

ENCODE_S = 5.0
"""Seconds that a tokenizer of the gateway's own may take, in the queue for its threads or at work."""

ANSWERED = frozenset(
    ("INVALID_ARGUMENT", "FAILED_PRECONDITION", "RESOURCE_EXHAUSTED", "UNIMPLEMENTED", "NOT_FOUND")
)
"""Statuses that only the worker itself can have said: after them it computes nothing any more."""

UNKNOWN_HANDLE = b"kv_handle_"
"""How the codes begin by which a decode worker says that what was handed over is not there, or not this prompt."""


class Tl:
    """Prefill by `EngineControl`, and a handle for the decode worker."""

    def can(self, prompt: Prompt) -> bool:
        """Tell whether it has nothing in it that may change the tokens and cannot be told to the prefill worker."""
        prompt.generation = tl.read(prompt.path, prompt.body)
        return prompt.generation is not None

    def prefill(self, handoff: Handoff) -> Prefilling:
        """Tokenize and prefill. Raises BadRequest where the worker says that the request itself is wrong."""
        x, prompt, transfer, handoffs = (
            handoff.x,
            handoff.prompt,
            handoff.transfer,
            handoff.handoffs,
        )
        generation = _generation(prompt)
        worker = handoff.prefill
        ids = generation.ids
        if ids is None:
            transfer.tokenize_at = x.now
            ids = yield from _encoded(handoff)
        if ids is None:
            answer = yield Call(tl.tokenize(worker, handoff.served, prompt.path, prompt.body))
            assert isinstance(answer, Answer | Lost)
            if refused(answer):
                return answer
            tokens = _tokens(answer, handoff)
            if isinstance(tokens, Failure):
                return tokens
            ids = tokens
        transfer.tokens = len(ids)
        if len(ids) < prompt.min_tokens:
            transfer.outcome = "direct"
            return PLAIN
        seed = generation.seed
        fields: dict[str, bytes] = {}
        if seed is None:
            seed = handoffs.draw_seed()
            fields["seed"] = b"%d" % seed
        if generation.limit is None and prompt.default_max_tokens is not None:
            fields["max_tokens"] = b"%d" % prompt.default_max_tokens
        limit = yield from _limit(handoff, len(ids))
        for again in (False, True):
            name = handoffs.name(x.request_id)
            transfer.prefill_at = x.now
            timeout_s = min(handoffs.prefill_s, max(x.deadline - x.now, 0.0))
            release = tl.release(handoff.decode, name)
            # First the one that may still push: what is released must not be pushed again after that.
            handoff.holds(tl.cancel(worker, name), release)
            result = yield Call(
                tl.prefill(
                    worker,
                    generation,
                    served=handoff.served,
                    ids=ids,
                    seed=seed,
                    max_new_tokens=limit,
                    decode=handoff.decode,
                    decode_target=handoff.decode.kv_address,
                    request_id=name,
                    deadline_unix_ms=int((handoffs.wall() + timeout_s) * 1000),
                    timeout_s=timeout_s,
                    priority=x.principal.priority or 0,
                    traceparent=x.trace,
                )
            )
            if isinstance(result, Returned):
                return _ready(result, handoff, fields)
            assert isinstance(result, Status)
            if not result.sent:
                handoff.holds()
            elif result.code in ANSWERED:
                handoff.holds(release)
            if not result.stale or again:
                break
            # The connection had died while nobody used it, which says nothing of the worker.
            handoff.give_back()
        assert isinstance(result, Status)
        return _refused(result, handoff)

    def resumed(self, handoff: Handoff, answer: bytes) -> int:
        """Return -1: a decode worker says it in the head of its answer."""
        return -1

    def unknown(self, answer: Answer) -> bool:
        """Tell whether a worker does not know the handle, or knows it for another prompt."""
        return (
            answer.complete and answer.head.status in (404, 409) and UNKNOWN_HANDLE in answer.body
        )


def _generation(prompt: Prompt) -> tl.Generation:
    assert prompt.generation is not None, "what cannot be handed off is not"
    return prompt.generation


def _encoded(handoff: Handoff) -> Generator[Command, Result, list[int] | None]:
    """Return the tokens where a tokenizer of the gateway's own knows them. What it does not, the worker shall say."""
    generation = _generation(handoff.prompt)
    tokenizer = handoff.handoffs.tokenizers.get(handoff.served)
    if tokenizer is None or not (generation.messages is None or tokenizer.chats):
        return None
    result = yield Encode(tokenizer, tl.prompt_text(generation), ENCODE_S)
    assert isinstance(result, Encoded | Lost)
    return result.ids or None if isinstance(result, Encoded) else None


def _tokens(answer: Answer | Lost, handoff: Handoff) -> list[int] | Failure:
    worker = handoff.prefill
    if isinstance(answer, Lost):
        detail = f"prefill worker {worker.id} did not tokenize: {answer.detail or answer.why}"
        why = Why.TIMED_OUT if answer.why is Why.TIMED_OUT else Why.TOKENIZE
        return Failure(Lost(why, detail), worker)
    if not stands(answer):
        return Failure(answer, worker)
    if answer.head.status == 200:
        try:
            ids = tl.token_ids(answer.payload)
        except ValueError:
            ids = []
        if ids:
            return ids
    detail = f"prefill worker {worker.id} did not tokenize: it answered {answer.head.status}"
    return Failure(Lost(Why.TOKENIZE, detail), worker)


def _limit(handoff: Handoff, tokens: int) -> Generator[Command, Result, int]:
    """Return how many tokens the answer may have. Source: contract, section 8, decision 4."""
    prompt, worker, handoffs = handoff.prompt, handoff.prefill, handoff.handoffs
    limit = _generation(prompt).limit
    if limit is None:
        limit = prompt.default_max_tokens
    if limit is not None:
        return max(limit, 1)
    if prompt.path != "/v1/chat/completions":
        return tl.COMPLETION_TOKENS
    context = handoffs.contexts.get(worker)
    if context is None:
        result = yield Call(tl.info(worker))
        context = tl.context_of(result.message) if isinstance(result, Returned) else 0
        if isinstance(result, Returned):
            handoffs.keep_context(worker, context)
    return max(context - tokens, 1) if context else tl.CHAT_TOKENS


def _ready(result: Returned, handoff: Handoff, fields: dict[str, bytes]) -> Ready | Failure:
    worker = handoff.prefill
    try:
        done = tl.prefilled(result.message)
    except ValueError as error:
        return Failure(Lost(Why.PREFILL, f"prefill worker {worker.id}: {error}"), worker)
    handoff.holds(tl.release(handoff.decode, done.handle))
    handoff.transfer.cached = done.cached
    return Ready(fields, tl.HANDLE % done.handle.encode())


def _refused(status: Status, handoff: Handoff) -> Failure:
    """Say which worker a failed prefill is to be laid to. Raises BadRequest where it is the client."""
    if status.code == "INVALID_ARGUMENT":
        raise BadRequest(status.detail or "the prefill worker refuses the request")
    prefill, decode = handoff.prefill, handoff.decode
    detail = f"prefill on {prefill.id} for {decode.id}: {status.code} {status.detail}"
    why = Why.TIMED_OUT if status.code == "DEADLINE_EXCEEDED" else Why.PREFILL
    return Failure(Lost(why, detail.rstrip()), decode if status.leg == "decode" else prefill)
