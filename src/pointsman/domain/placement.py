"""What one request costs the worker that it was sent to, in tokens of its prompt, as long as it is there.

A count of requests takes a prompt of ten tokens for as much work as one of a hundred thousand. A policy that can tell
them apart has a `placed` method, which is asked once for every attempt, right before it is sent, and answers with a
`Placement`: what the prompt is in all, and how much of it the worker has to compute. The lease of the attempt
(`pointsman.domain.ledger`) tells it what became of it. A policy that remembers something of workers has a `left`
method, and forgets there.

`pick` and `consider` may not do any of that: an explanation asks them too, and nothing is sent then.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    from pointsman.domain.request import InferenceRequest
    from pointsman.domain.worker import Worker

__all__ = ["Heard", "Leaves", "Placement", "Places"]

Heard: TypeAlias = Callable[["Placement", float], None]
"""Hears of a placement whose worker has begun to answer, and when (monotonic seconds)."""


class Placement:
    """One prompt at one worker, from its making until `ended`.

    `prompt_tokens` is the whole prompt, `uncached_tokens` what of it has to be computed, both estimates, at least 0;
    `at` is when it was sent, in monotonic seconds. Its making counts: `Worker.active_tokens` and
    `Worker.pending_tokens` are the sums of these, and nothing else may write them.

    `heard` is called once, when the first byte of the answer has come. An answer that is no stream comes whole, so
    that of such a one tells of decoding as well: who measures how fast prompts are computed listens to streams only.

    >>> from pointsman.domain.worker import Worker
    >>> worker = Worker("a", model="m", http_address="127.0.0.1:8000")
    >>> placement = Placement(worker, 900, 100, at=5.0)
    >>> worker.active_tokens, worker.pending_tokens
    (900, 100)
    >>> placement.began(5.2)
    >>> worker.active_tokens, worker.pending_tokens
    (900, 0)
    >>> placement.ended()
    >>> worker.active_tokens, worker.pending_tokens
    (0, 0)
    """

    __slots__ = (
        "_active",
        "_heard",
        "_pending",
        "at",
        "prompt_tokens",
        "uncached_tokens",
        "worker",
    )

    def __init__(
        self,
        worker: "Worker",
        prompt_tokens: int,
        uncached_tokens: int,
        at: float,
        heard: Heard | None = None,
    ) -> None:
        worker.active_tokens += prompt_tokens
        worker.pending_tokens += uncached_tokens
        self.worker = worker
        self.prompt_tokens = prompt_tokens
        self.uncached_tokens = uncached_tokens
        self.at = at
        self._heard = heard
        self._active = True
        self._pending = True

    def began(self, now: float) -> None:
        """Take the prompt off what is still to be computed: an answer has begun. Only the first call counts.

        One that has ended without that (its worker failed, its client left) has taught nobody anything.
        """
        if self._pending:
            self._pending = False
            self.worker.pending_tokens -= self.uncached_tokens
            heard, self._heard = self._heard, None
            if heard is not None:
                heard(self, now)

    def relieved(self) -> None:
        """Take the prompt off what is to be computed: another worker does that, and hands it over.

        >>> from pointsman.domain.worker import Worker
        >>> worker = Worker("a", model="m", http_address="127.0.0.1:8000")
        >>> placement = Placement(worker, 900, 100, at=5.0)
        >>> placement.relieved()
        >>> worker.active_tokens, worker.pending_tokens, placement.uncached_tokens
        (900, 0, 0)
        """
        if self._pending:
            self.worker.pending_tokens -= self.uncached_tokens
            self.uncached_tokens = 0

    def ended(self) -> None:
        """Take the prompt off the worker. Idempotent."""
        if self._active:
            self._active = False
            self.worker.active_tokens -= self.prompt_tokens
            if self._pending:
                self._pending = False
                self.worker.pending_tokens -= self.uncached_tokens


@runtime_checkable
class Places(Protocol):
    """A policy that wants to know where requests were really sent."""

    def placed(self, worker: "Worker", request: "InferenceRequest", now: float) -> Placement | None:
        """Take note that `request` is about to be sent to `worker`, and say what that costs it, None for nothing.

        It is called for a prefill worker, too, and for the decode worker of the same request, which may be one that
        this policy did not pick.
        """
        ...


@runtime_checkable
class Leaves(Protocol):
    """A policy that has something to forget of a worker that has left."""

    def left(self, worker: "Worker") -> None:
        """Forget a worker: it is gone, or has begun its next life as another object."""
        ...
