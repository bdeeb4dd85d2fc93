"""One prompt on its way from a worker to another one: what is known of it, and who owns what it leaves behind.

From the moment that a prefill is asked for, workers may hold something that only one request knows of. `Handoff` is the
owner of that for one attempt: whoever makes a worker hold something tells it what gives that back, and it does so on
every way out but the clean end of an answer that used it up.

How the cache gets from one engine to the other is a connector (`pointsman.flow.connectors`), one small file each. The
story that they all have in common is `pointsman.flow.handoff`.
"""

from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping
from types import TracebackType
from typing import Protocol, Self, TypeAlias

from msgspec import Struct

from pointsman.dialect import tl
from pointsman.domain.worker import Worker
from pointsman.flow.attempts import Failure
from pointsman.flow.effects import After, Answer, Call, Command, Result, Tokenizer
from pointsman.flow.exchange import Attempt, Exchange, Transfer
from pointsman.wire.call import HttpCall, RpcCall

__all__ = ["PLAIN", "Connector", "Handoff", "Handoffs", "Prefilling", "Prompt", "Ready"]

NAMES_KEPT = 65_536
"""Request ids whose number of hand-offs is remembered: far more than one decode worker can have heard of at a time."""

CONTEXTS_KEPT = 1024
"""Workers whose context length is remembered."""


class Handoffs:
    """What all hand-offs of a gateway share.

    `draw_seed` returns a seed of 63 random bits, `wall` is the time in seconds since 1970; `min_tokens` is the shortest
    prompt that is worth a hand-off; `prefill_s` is how long a prefill may take. `tokenizers` are the gateway's own, by
    the model id that workers report. `slots` are the slots of engines that have numbered ones and are taken.
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
        self.slots: dict[Worker, set[int]] = {}
        self._bootstraps: dict[Worker, Worker] = {}
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

    def bootstrap(self, worker: Worker) -> Worker:
        """Return the bootstrap server of a prefill worker, as somebody who can be asked."""
        server = self._bootstraps.get(worker)
        if server is None:
            server = self._bootstraps[worker] = Worker(
                f"{worker.id} bootstrap",
                model=worker.model,
                http_address=worker.bootstrap,
                source=worker.source,
            )
        return server

    def forget(self, worker: Worker) -> Worker | None:
        """Forget a worker that has left, and return its bootstrap server, which has left with it."""
        self.contexts.pop(worker, None)
        self.slots.pop(worker, None)
        return self._bootstraps.pop(worker, None)


class Prompt(Struct, eq=False):
    """What is to be handed off: a request's path and body.

    `bytes` are those of the prompt as JSON; of fewer bytes than `min_tokens` there are fewer tokens, too. `generation`
    is what `dialect.tl` reads of it, once that was asked.
    """

    path: str
    body: bytes
    bytes: int
    min_tokens: int
    default_max_tokens: int | None
    generation: tl.Generation | None = None


class Ready(Struct, frozen=True, eq=False, gc=False):
    """What the decode worker is told beside the request, once it can be asked.

    `fields` are set in its body, `headers` are whole lines. `request_id` is what both workers call the request, "" for
    its own id. `beside` is what the prefill worker is asked at the same time, where the two work at once. `to_the_end`
    says that what is held is used up by the whole answer, and not by its beginning.
    """

    fields: Mapping[str, bytes]
    headers: bytes = b""
    request_id: str = ""
    beside: Call | None = None
    to_the_end: bool = True


class Handoff:
    """One attempt to hand a prompt over, and the owner of what workers hold for it.

    As a context manager it gives that back, exactly once. The calls for it go into `Exchange.after`: they are made
    whatever becomes of the story and of the client.
    """

    __slots__ = ("_back", "_free", "attempt", "handoffs", "prompt", "transfer", "x")

    def __init__(
        self, x: Exchange, handoffs: Handoffs, prompt: Prompt, attempt: Attempt, transfer: Transfer
    ) -> None:
        self.x = x
        self.handoffs = handoffs
        self.prompt = prompt
        self.attempt = attempt
        self.transfer = transfer
        self._back: tuple[HttpCall | RpcCall, ...] = ()
        self._free: list[Callable[[], None]] = []

    @property
    def prefill(self) -> Worker:
        """The worker that computes the prompt."""
        assert self.attempt.target.prefill is not None
        return self.attempt.target.prefill

    @property
    def decode(self) -> Worker:
        """The worker that answers."""
        return self.attempt.target.worker

    @property
    def served(self) -> str:
        """What the workers call the model."""
        return self.attempt.target.served_model

    def holds(self, *back: HttpCall | RpcCall) -> None:
        """Note what gives back all that workers hold now, in its order; nothing, where they hold nothing."""
        self._back = back

    def frees(self, free: Callable[[], None]) -> None:
        """Have something called when this is over, however it ends."""
        self._free.append(free)

    def give_back(self) -> None:
        """Give back what workers hold now."""
        back, self._back = self._back, ()
        if back:
            self.x.after.append(After(back))

    def close(self) -> None:
        """End: whatever is still held is given back, and what was taken here is free. Idempotent."""
        self.give_back()
        while self._free:
            self._free.pop()()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


PLAIN = Ready({})
"""For a decode worker that is to compute the prompt itself."""

Prefilling: TypeAlias = Generator[Command, Result, Ready | Failure | Answer]
"""A prompt on its way. An answer is what the prefill worker says is wrong with the request."""


class Connector(Protocol):
    """How the cache of a prompt gets from one engine to another."""

    def can(self, prompt: Prompt) -> bool:
        """Tell whether two workers can compute this. Raises BadRequest for what nobody can."""

    def prefill(self, handoff: Handoff) -> Prefilling:
        """Do all that comes before the decode worker is asked."""

    def resumed(self, handoff: Handoff, answer: bytes) -> int:
        """Return how many tokens an answer says the decode worker need not compute, -1 where it does not say.

        `answer` is a whole one, or the last bytes of a stream.
        """

    def unknown(self, answer: Answer) -> bool:
        """Tell whether a decode worker says that it does not have what was handed over to it."""
