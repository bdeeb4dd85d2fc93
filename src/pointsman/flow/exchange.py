"""The facts of one request, from its arrival to its end.

The driver writes times and outcomes, the story writes attempts; metrics read it once, when it is over. Times are
seconds of the monotonic clock, 0.0 where something has not happened.
"""

from enum import Enum
from math import inf

from pointsman.domain.request import InferenceRequest
from pointsman.domain.worker import Worker

__all__ = ["Exchange", "Stage"]


class Stage(Enum):
    """How far a request is; it only ever moves forward."""

    OPEN = "open"  # nothing has reached the client: another worker may still answer
    COMMITTED = "committed"  # the first bytes are on their way: there is no other worker any more
    CLOSED = "closed"


class Exchange:
    """One request and what became of it.

    `operation` is chat, text_completion, embeddings or other; `status` is what the client got, 499 if it left first;
    `error` is the code or type of an error answer, or how a committed answer broke; `failures` are the outcomes of
    the failed attempts, in order; `excluded` are the workers that must not be asked again; `now` is the time of the
    last event, for the story; `deadline` is when the whole request must be over.
    """

    __slots__ = (
        "attempts",
        "deadline",
        "error",
        "excluded",
        "failures",
        "finished_at",
        "first_byte_at",
        "model",
        "now",
        "operation",
        "path",
        "reason",
        "request",
        "request_id",
        "stage",
        "started",
        "status",
        "stream",
        "worker_id",
    )

    def __init__(
        self,
        request: InferenceRequest,
        path: str,
        operation: str,
        started: float,
        deadline: float = inf,
    ) -> None:
        self.request = request
        self.request_id = request.request_id
        self.model = request.model
        self.stream = request.stream
        self.path = path
        self.operation = operation
        self.started = started
        self.now = started
        self.deadline = deadline
        self.first_byte_at = 0.0
        self.finished_at = 0.0
        self.stage = Stage.OPEN
        self.status = 0
        self.error = ""
        self.reason = ""
        self.worker_id = ""
        self.attempts = 0
        self.failures: list[str] = []
        self.excluded: list[Worker] = []
