"""The story of a hand-off: one worker computes the prompt, another one generates from it.

The prefill worker says what the tokens are, computes them, and pushes the result to the decode worker; that one gets
the request itself, with a handle. From the moment the prefill is sent, the decode worker may hold something that only
this story knows of. `Handoff` owns it, and gives it back on every way out but one: the clean end of an answer that
was generated from it.

A handle belongs to one attempt. When either worker fails before the client saw anything, that one is excluded, and
another attempt begins with a new prefill under a new name.
"""

from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping
from enum import Enum
from types import TracebackType
from typing import Self

from msgspec import Struct

from pointsman.dialect import tl
from pointsman.domain.ledger import Lease
from pointsman.domain.routes import Route
from pointsman.domain.worker import Worker
from pointsman.errors import BadRequest, GatewayError
from pointsman.flow.attempts import Asked, Failure, Leg, Receive, ask, stands
from pointsman.flow.effects import (
    After,
    Answer,
    Call,
    Command,
    Encode,
    Encoded,
    Lost,
    Result,
    Returned,
    Send,
    Status,
    Tokenizer,
    Why,
)
from pointsman.flow.exchange import Attempt, Exchange, Transfer

__all__ = ["Handoffs", "Legs"]

NAMES_KEPT = 65_536
"""Request ids whose number of hand-offs is remembered: far more than one decode worker can have heard of at a time."""

CONTEXTS_KEPT = 1024
"""Workers whose context length is remembered."""

ENCODE_S = 5.0
"""Seconds that a tokenizer of the gateway's own may take, in the queue for its threads or at work."""

ANSWERED = frozenset(
    ("INVALID_ARGUMENT", "FAILED_PRECONDITION", "RESOURCE_EXHAUSTED", "UNIMPLEMENTED", "NOT_FOUND")
)
"""Statuses that only the worker itself can have said: after them it computes nothing any more."""

UNKNOWN_HANDLE = b"kv_handle_"
"""How the codes begin by which a decode worker says that what was handed over is not there, or not this prompt."""


class Handoffs:
    """What all hand-offs of a gateway share.

    `draw_seed` returns a seed of 63 random bits, `wall` is the time in seconds since 1970; `min_tokens` is the shortest
    prompt that is worth a hand-off; `prefill_s` is how long a prefill may take. `tokenizers` are the gateway's own, by
    the model id that workers report.
    """

    def __init__(
        self,
        *,
        draw_seed: Callable[[], int],
        wall: Callable[[], float],
        min_tokens: int = 0,
        prefill_s: float = 30.0,
        tokenizers: Mapping[str, Tokenizer] | None = None,
    ) -> None:
        self.draw_seed = draw_seed
        self.wall = wall
        self.min_tokens = min_tokens
        self.prefill_s = prefill_s
        self.tokenizers = tokenizers or {}
        self.contexts: dict[Worker, int] = {}
        self._names: OrderedDict[str, int] = OrderedDict()

    def name(self, request_id: str) -> str:
        """Return what workers are to call the next hand-off of a request: its id, then `<id>-2`, `<id>-3`, ...

        Clients choose request ids, and two may choose the same: no name is given twice, as long as it is remembered.

        >>> handoffs = Handoffs(draw_seed=lambda: 7, wall=lambda: 0.0)
        >>> [handoffs.name(request_id) for request_id in ("r", "r", "q")]
        ['r', 'r-2', 'q']
        """
        names = self._names
        number = names.pop(request_id, 0) + 1
        names[request_id] = number
        if len(names) > NAMES_KEPT:
            names.popitem(last=False)
        if number == 1:
            return request_id
        # `r-2` may be a client's own word, too.
        return name if (name := f"{request_id}-{number}") not in names else self.name(name)

    def keep_context(self, worker: Worker, tokens: int) -> None:
        """Remember the context length of a worker."""
        if len(self.contexts) >= CONTEXTS_KEPT:
            self.contexts.clear()
        self.contexts[worker] = tokens


class Held(Enum):
    """What a decode worker may hold, as far as the owner knows."""

    NOTHING = "nothing"
    UNSURE = "unsure"  # the prefill is on its way: it may still push, or have pushed
    SETTLED = "settled"  # the prefill has ended, well or not: nothing is pushed any more


class Handoff:
    """The owner of what a decode worker holds for one attempt. As a context manager it gives it back, exactly once.

    The calls for that go into `Exchange.after`: they are made whatever becomes of the story and of the client.
    """

    __slots__ = ("_decode", "_held", "_name", "_prefill", "_x")

    def __init__(self, x: Exchange, prefill: Worker, decode: Worker) -> None:
        self._x = x
        self._prefill = prefill
        self._decode = decode
        self._name = ""
        self._held = Held.NOTHING

    def sent(self, name: str) -> None:
        """Note that the prefill of this name is about to be sent."""
        self._name = name
        self._held = Held.UNSURE

    def settled(self, handle: str) -> None:
        """Note that the prefill has ended, well or not: nothing more will be pushed than what is there."""
        self._name = handle
        self._held = Held.SETTLED

    def finished(self) -> None:
        """Note that nothing is held: the worker has used it up, or never heard of it."""
        self._held = Held.NOTHING

    def close(self) -> None:
        """Give back what is held. Idempotent."""
        held, self._held = self._held, Held.NOTHING
        if held is Held.NOTHING:
            return
        release = tl.release(self._decode, self._name)
        if held is Held.UNSURE:
            # First the one that may still push: what is released must not be pushed again after that.
            self._x.after.append(After((tl.cancel(self._prefill, self._name), release)))
        else:
            self._x.after.append(After((release,)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Prompt(Struct, eq=False):
    """What is to be handed off: the request as it was read, its path and its body.

    `bytes` are those of the prompt as JSON; of fewer bytes than `min_tokens` there are fewer tokens, too.
    """

    generation: tl.Generation
    path: str
    body: bytes
    bytes: int
    min_tokens: int
    default_max_tokens: int | None


class Legs:
    """How each target of a route is asked for one request, whatever is to become of the answer.

    `handoff` says whether the request can be handed off; where the route does not want that, it does not matter.
    Raises BadRequest, see `tl.read`.
    """

    __slots__ = ("_handoffs", "_prompt", "_x", "handoff")

    def __init__(self, x: Exchange, handoffs: Handoffs, route: Route, body: bytes) -> None:
        self._x = x
        self._handoffs = handoffs
        self._prompt: Prompt | None = None
        self.handoff = True
        if "disaggregated" not in route.targets:
            return
        generation = tl.read(x.path, body)
        if generation is None:
            self.handoff = False
            return
        request = x.request
        minimum = route.disagg_min_tokens
        self._prompt = Prompt(
            generation,
            x.path,
            body,
            len(request.prompt or b"") + len(request.messages or b""),
            handoffs.min_tokens if minimum is None else minimum,
            route.default_max_tokens,
        )

    def leg(
        self,
        receive: Receive,
        send: Callable[[Attempt], Send] = lambda attempt: Send(attempt.target),
    ) -> Leg:
        """Return the leg that hands what stands to `receive`; `send` says how a worker is asked.

        It raises BadRequest where the prefill worker says that the request itself is wrong.
        """

        def leg(attempt: Attempt) -> Asked:
            if attempt.target.prefill is None or self._prompt is None:
                return ask(attempt, send(attempt), receive)
            return _hand_off(self._x, self._handoffs, self._prompt, attempt, send(attempt), receive)

        return leg


def _hand_off(
    x: Exchange,
    handoffs: Handoffs,
    prompt: Prompt,
    attempt: Attempt,
    asked: Send,
    receive: Receive,
) -> Asked:
    target = attempt.target
    assert target.prefill is not None
    attempt.transfer = transfer = Transfer()
    with Handoff(x, target.prefill, target.worker) as handoff:
        try:
            ready: Ready | Failure | Answer = PLAIN
            if prompt.bytes < prompt.min_tokens:
                transfer.outcome = "direct"
            else:
                with Lease(target.prefill):
                    ready = yield from _prefill(x, handoffs, prompt, attempt, handoff, transfer)
            if isinstance(ready, Answer):  # The prefill worker's own word about the prompt.
                transfer.outcome = "refused"
                yield from receive(ready)
                return None
            if isinstance(ready, Failure):
                transfer.outcome = "failed"
                return ready
            transfer.decode_at = x.now
            fields = {**asked.fields, **ready.fields}
            command = Send(target, fields, asked.headers + ready.headers, asked.hold)
            return (yield from _resume(attempt, command, receive, handoff, transfer))
        except GatewayError:
            transfer.outcome = "refused"
            raise
        finally:
            # Whatever else ended it came from outside: the client left, or the gateway is shutting down.
            transfer.outcome = transfer.outcome or "abandoned"


class Ready(Struct, frozen=True, eq=False, gc=False):
    """What the decode worker is told beside the request."""

    fields: Mapping[str, bytes]
    headers: bytes


PLAIN = Ready({}, b"")


def _prefill(
    x: Exchange,
    handoffs: Handoffs,
    prompt: Prompt,
    attempt: Attempt,
    handoff: Handoff,
    transfer: Transfer,
) -> Generator[Command, Result, Ready | Failure | Answer]:
    """Tokenize and prefill. An answer is what the worker says is wrong with the prompt."""
    target, generation = attempt.target, prompt.generation
    worker = target.prefill
    assert worker is not None
    ids = generation.ids
    if ids is None:
        transfer.tokenize_at = x.now
        ids = yield from _encoded(handoffs, generation, target.served_model)
    if ids is None:
        call = tl.tokenize(worker, target.served_model, prompt.path, prompt.body)
        answer = yield Call(call)
        assert isinstance(answer, Answer | Lost)
        if isinstance(answer, Answer) and answer.complete and answer.head.status in (400, 413, 422):
            return answer
        tokens = _tokens(answer, worker)
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
    limit = yield from _limit(handoffs, prompt, worker, len(ids))
    for again in (False, True):
        name = handoffs.name(x.request_id)
        transfer.prefill_at = x.now
        timeout_s = min(handoffs.prefill_s, max(x.deadline - x.now, 0.0))
        handoff.sent(name)
        result = yield Call(
            tl.prefill(
                worker,
                generation,
                served=target.served_model,
                ids=ids,
                seed=seed,
                max_new_tokens=limit,
                decode=target.worker,
                decode_target=target.worker.kv_address,
                request_id=name,
                deadline_unix_ms=int((handoffs.wall() + timeout_s) * 1000),
                timeout_s=timeout_s,
                priority=x.principal.priority or 0,
                traceparent=x.trace,
            )
        )
        if isinstance(result, Returned):
            return _ready(result, handoff, transfer, worker, fields)
        assert isinstance(result, Status)
        if not result.sent:
            handoff.finished()
        elif result.code in ANSWERED:
            handoff.settled(name)
        if not result.stale or again:
            break
        # The connection had died while nobody used it, which says nothing of the worker.
        handoff.close()
    assert isinstance(result, Status)
    return _refused(result, attempt)


def _encoded(
    handoffs: Handoffs, generation: tl.Generation, served: str
) -> Generator[Command, Result, list[int] | None]:
    """Return the tokens where a tokenizer of the gateway's own knows them. What it does not, the worker shall say."""
    tokenizer = handoffs.tokenizers.get(served)
    if tokenizer is None or not (generation.messages is None or tokenizer.chats):
        return None
    result = yield Encode(tokenizer, tl.prompt_text(generation), ENCODE_S)
    assert isinstance(result, Encoded | Lost)
    return result.ids or None if isinstance(result, Encoded) else None


def _tokens(answer: Answer | Lost, worker: Worker) -> list[int] | Failure:
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


def _limit(
    handoffs: Handoffs, prompt: Prompt, worker: Worker, tokens: int
) -> Generator[Command, Result, int]:
    """Return how many tokens the answer may have. Source: contract, section 8, decision 4."""
    limit = prompt.generation.limit
    if limit is None:
        limit = prompt.default_max_tokens
    if limit is not None:
        return max(limit, 1)
    if prompt.path != tl.CHAT:
        return tl.COMPLETION_TOKENS
    context = handoffs.contexts.get(worker)
    if context is None:
        result = yield Call(tl.info(worker))
        context = tl.context_of(result.message) if isinstance(result, Returned) else 0
        if isinstance(result, Returned):
            handoffs.keep_context(worker, context)
    return max(context - tokens, 1) if context else tl.CHAT_TOKENS


def _ready(
    result: Returned,
    handoff: Handoff,
    transfer: Transfer,
    worker: Worker,
    fields: dict[str, bytes],
) -> Ready | Failure:
    try:
        done = tl.prefilled(result.message)
    except ValueError as error:
        return Failure(Lost(Why.PREFILL, f"prefill worker {worker.id}: {error}"), worker)
    handoff.settled(done.handle)
    transfer.cached = done.cached
    return Ready(fields, tl.HANDLE % done.handle.encode())


def _refused(status: Status, attempt: Attempt) -> Failure:
    """Say which worker a failed prefill is to be laid to. Raises BadRequest where it is the client."""
    target = attempt.target
    assert target.prefill is not None
    if status.code == "INVALID_ARGUMENT":
        raise BadRequest(status.detail or "the prefill worker refuses the request")
    decode = status.leg == "decode"
    detail = f"prefill on {target.prefill.id} for {target.worker.id}: {status.code} {status.detail}"
    why = Why.TIMED_OUT if status.code == "DEADLINE_EXCEEDED" else Why.PREFILL
    return Failure(Lost(why, detail.rstrip()), target.worker if decode else target.prefill)


def _resume(
    attempt: Attempt, command: Send, receive: Receive, handoff: Handoff, transfer: Transfer
) -> Asked:
    """Let the decode worker answer, and give the handle up only where it has used it."""
    worker = attempt.target.worker
    handed = transfer.outcome != "direct"
    result = yield command
    assert isinstance(result, Answer | Lost)
    if isinstance(result, Lost) or not stands(result):
        transfer.outcome = transfer.outcome or "failed"
        return Failure(result, worker)
    if handed and _unknown_handle(result):
        transfer.outcome = "failed"
        detail = f"worker {worker.id} does not have what was handed over to it"
        return Failure(Lost(Why.HANDLE, detail), worker)
    if handed and result.head.status < 300:
        transfer.resumed = _resumed(result)
        transfer.outcome = "recomputed" if transfer.resumed == 0 else "handed_over"
    elif handed:
        transfer.outcome = "refused"
    received = yield from receive(result)
    if isinstance(received, Lost):
        transfer.outcome = "failed"
        return Failure(received, worker)
    # A worker that computed the prompt itself has not used up what was pushed to it.
    if received and result.head.status < 300 and transfer.outcome != "recomputed":
        handoff.finished()
    return None


def _unknown_handle(answer: Answer) -> bool:
    return answer.complete and answer.head.status in (404, 409) and UNKNOWN_HANDLE in answer.body


def _resumed(answer: Answer) -> int:
    """Return how many tokens a decode worker says that it got, -1 where it says nothing."""
    said = answer.head.get(b"x-tl-kv-tokens")
    return int(said) if said is not None and said.isdigit() else -1
