"""The facts of one request, from its arrival to its end.

The driver writes times and outcomes, the story writes attempts; metrics read it once, when it is over. Times are
seconds of the monotonic clock, 0.0 where something has not happened.
"""

from collections import deque
from enum import Enum
from math import inf

from msgspec import Struct, field

from pointsman.domain.keys import ANONYMOUS, Principal
from pointsman.domain.request import InferenceRequest
from pointsman.domain.router import Target
from pointsman.domain.worker import Worker
from pointsman.flow.effects import After

__all__ = ["CLIENT_GONE", "Attempt", "Exchange", "Stage", "Transfer", "Verdict"]

CLIENT_GONE = "client_gone"
"""The `error` of a request whose client left before its answer was complete."""


class Stage(Enum):
    """How far a request is; it only ever moves forward."""

    OPEN = "open"  # nothing has reached the client: another worker may still answer
    COMMITTED = "committed"  # the first bytes are on their way: there is no other worker any more
    CLOSED = "closed"


class Transfer(Struct, eq=False, gc=False):
    """How a prompt went from a prefill worker to a decode worker. Times are moments, 0.0 where it did not come to that.

    `tokens` are those of the prompt, `cached` those that the prefill worker need not compute, `resumed` those that the
    decode worker says it got (-1 where it does not say); `outcome` is one of direct (the prompt was too short for it),
    handed_over, recomputed (the decode worker computed the prompt again), refused (a worker says that the request is
    wrong), failed, abandoned (the client left, or the gateway stopped).
    """

    tokens: int = 0
    cached: int = 0
    resumed: int = -1
    tokenize_at: float = 0.0
    prefill_at: float = 0.0
    decode_at: float = 0.0
    outcome: str = ""


class Verdict(Struct, frozen=True, eq=False, gc=False):
    """What a cascade thought of the answer of a step: its score, None where it had none, and whether it was kept.

    `prompt_tokens` and `completion_tokens` are those of that answer, 0 where it does not say.
    """

    value: float | None
    kept: bool
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Attempt(Struct, eq=False, gc=False):
    """One worker that was asked, and when; `failure` is how that failed, "" where it did not.

    `failed` is the worker that is to blame for it, which in a hand-off may be the prefill worker; `over_at` is when
    the attempt had failed or its answer was judged, 0.0 for one whose answer the client got; `transfer` and `verdict`
    are those of a hand-off and of a cascade.
    """

    target: Target
    at: float
    failure: str = ""
    failed: Worker | None = None
    over_at: float = 0.0
    transfer: Transfer | None = None
    verdict: Verdict | None = None


class Exchange(Struct, eq=False):
    """One request and what became of it.

    `operation` is chat, text_completion, embeddings or other; `status` is what the client got, 499 if it left first;
    `error` is the code or type of an error answer, or how a committed answer broke; `tries` are the workers that were
    asked, in order; `after` is what must be done whatever becomes of the request, until the driver takes it over; `now`
    is the time of the last event, for the story; `deadline` is when the whole request must be over; `trace` is the
    traceparent that engines see, `parent` the client's own, empty where it sent none that is valid. `tail` gets the
    last pieces of a stream, where the story wants to look at them. `engine_id` is what engines call a request whose
    client chose its id, "" where they call it as the gateway does: clients send the same id twice, and engines then
    abort the one for the other. `hold_until` is how long it may wait for its first worker where there is none, 0.0 for
    not at all.
    """

    request: InferenceRequest
    path: str
    operation: str
    started: float
    deadline: float = inf
    principal: Principal = ANONYMOUS
    trace: bytes = b""
    parent: bytes = b""
    now: float = 0.0
    first_byte_at: float = 0.0
    finished_at: float = 0.0
    stage: Stage = Stage.OPEN
    status: int = 0
    error: str = ""
    tries: list[Attempt] = field(default_factory=list)
    after: list[After] = field(default_factory=list)
    tail: deque[bytes] | None = None
    engine_id: str = ""
    hold_until: float = 0.0

    @property
    def request_id(self) -> str:
        """The client's request id, or the one that it was given."""
        return self.request.request_id

    @property
    def model(self) -> str:
        """The model that the client asked for."""
        return self.request.model

    @property
    def stream(self) -> bool:
        """Whether the client asked for a stream."""
        return self.request.stream

    @property
    def attempts(self) -> int:
        """How many workers were asked."""
        return len(self.tries)

    @property
    def worker_id(self) -> str:
        """The worker that was asked last, "" if none was."""
        return self.tries[-1].target.worker.id if self.tries else ""

    @property
    def reason(self) -> str:
        """Why that one was picked."""
        return self.tries[-1].target.reason if self.tries else ""

    @property
    def failures(self) -> list[str]:
        """How attempts failed, in order."""
        return [each.failure for each in self.tries if each.failure]
