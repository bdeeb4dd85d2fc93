"""Continuous batching: one thread, many sequences, and every answer bit for bit as if it had run alone.

One step of the loop admits what waits, computes one chunk of the oldest unfinished prompt, and then one token of
every sequence whose prompt is in the cache. Floating point sums depend on the shape of a batch, so shapes never
depend on company:

* a prompt is computed in chunks on a fixed grid (`GRID` tokens, aligned), one sequence per batch;
* its last token is never in a chunk: it is the first row that the sequence has in a decode batch;
* a decode batch has one row per sequence and no prompt chunks; llama.cpp computes such rows alike in any company;
* a cached prefix is reused only where it was computed by whole chunks.

Hence equal prompts, parameters and seeds give equal tokens, whatever else runs; and wherever: one worker may compute
the prompt (`Request.prefill_only`) and another one generate from it (`Request.resume`). That one loads the state, lets
go of the last token and computes it itself: from there on it is a request whose prefix was in the cache.

Nothing here knows HTTP or llama.cpp: a `Machine` computes logits, and whoever asked is told through a callback.
"""

import functools
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from pointsman.engine.llama import Row
from pointsman.engine.sampling import Sampled, Sampler, SamplingParams
from pointsman.engine.text import TextStream

__all__ = [
    "BLOCK",
    "GRID",
    "Draining",
    "Event",
    "Failed",
    "Finished",
    "Generation",
    "Load",
    "Machine",
    "Prefilled",
    "QueueFull",
    "Request",
    "Scheduler",
    "Started",
    "Token",
    "Vocabulary",
]

log = logging.getLogger(__name__)

GRID = 32
"""Tokens of one prefill chunk. Smaller chunks cost throughput, larger ones make running streams wait longer."""
BLOCK = 16
"""Tokens of one KV block, the unit in which load is reported."""


class Machine(Protocol):
    """What computes: `pointsman.engine.llama.Context`, or a fake of it."""

    def decode(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        """Run one batch; logits of its output rows."""
        ...

    def forget(self, sequence: int, start: int = 0) -> None:
        """Drop the tokens of `sequence` from `start` on."""
        ...

    def export(self, sequence: int) -> bytes:
        """The KV state of `sequence`."""
        ...

    def load(self, sequence: int, state: bytes) -> None:
        """Replace `sequence` by an exported state."""
        ...


class Vocabulary(Protocol):
    """What the scheduler must know of tokens: `pointsman.engine.llama.Model`, or a fake of it."""

    @property
    def end_of_generation(self) -> frozenset[int]:
        """The tokens after which the model has nothing more to say."""
        ...

    def piece(self, token: int) -> bytes:
        """The bytes of a token."""
        ...


class QueueFull(Exception):
    """As many requests wait as may wait."""


class Draining(Exception):
    """The worker takes no new requests."""


@dataclass(frozen=True, slots=True)
class Request:
    """What to generate: a non-empty prompt of token ids, how to sample, and when to stop.

    `prefill_only` ends with `Prefilled` after the first token. `resume` is the state that such a request has exported
    for the same prompt. `id` is the name to cancel it by; of what waits, the highest `priority` goes first.
    """

    prompt: Sequence[int]
    sampling: SamplingParams
    max_tokens: int
    stops: Sequence[str] = ()
    id: str = ""
    priority: int = 0
    prefill_only: bool = False
    resume: bytes | None = None


class Started(NamedTuple):
    """The request has left the queue; `cached_tokens` of its prompt need no computing."""

    cached_tokens: int


class Token(NamedTuple):
    """One more token. `text` is what it sets free: empty in the middle of a character or of a possible stop string."""

    sampled: Sampled
    text: str


class Finished(NamedTuple):
    """The end: `reason` is "stop" or "length", `text` the rest; an end token counts as a completion token."""

    reason: str
    text: str
    completion_tokens: int


class Prefilled(NamedTuple):
    """The end of a prefill-only request: its first token, and the KV state of the whole prompt."""

    sampled: Sampled
    state: bytes


class Failed(NamedTuple):
    """The end by failure: `reason` is "overloaded" (waited too long), "draining", "cancelled" (by id) or "broken"."""

    reason: str
    message: str


Event = Started | Token | Finished | Prefilled | Failed


class Load(NamedTuple):
    """What a heartbeat says of a worker."""

    queue_depth: int
    running: int
    kv_free_blocks: int
    kv_total_blocks: int
    draining: bool


class Generation:
    """One request on its way. Events come on the scheduler's thread; the last one is Finished, Prefilled or Failed."""

    __slots__ = ("cancelled", "deadline", "deliver", "request", "verdict")

    def __init__(self, request: Request, deliver: Callable[[Event], None], deadline: float) -> None:
        self.request = request
        self.deliver = deliver
        self.deadline = deadline
        self.cancelled = False
        self.verdict: Failed | None = None

    def cancel(self) -> None:
        """Give up; takes effect at the next step, after which no event comes. May be called from any thread."""
        self.cancelled = True


class _Slot:
    """One sequence of the KV cache. `resident` are the tokens at its start that whole chunks have computed."""

    __slots__ = ("index", "resident", "run", "used_at")

    def __init__(self, index: int) -> None:
        self.index = index
        self.resident: list[int] = []
        self.run: _Run | None = None
        self.used_at = 0

    def reusable(self, prompt: Sequence[int]) -> int:
        """How many tokens of `prompt` are here already, in whole chunks and without its last token."""
        limit = min(len(self.resident), len(prompt) - 1)
        for start in range(0, limit - limit % GRID, GRID):
            if self.resident[start : start + GRID] != list(prompt[start : start + GRID]):
                return start
        return limit - limit % GRID


class _Run:
    """A generation that holds a slot.

    `position`: tokens in the cache; `next`: the token to compute there; `state`: what is still to be loaded.
    """

    __slots__ = (
        *("generation", "next", "position", "produced", "prompt", "sampler", "slot", "state"),
        "text",
    )

    def __init__(self, generation: Generation, slot: _Slot, position: int) -> None:
        request = generation.request
        self.generation = generation
        self.slot = slot
        self.prompt = list(request.prompt)
        self.position = position
        self.next = self.prompt[-1]
        self.produced = 0
        self.state = request.resume
        self.sampler = Sampler(request.sampling, self.prompt)
        self.text = TextStream(request.stops)

    @property
    def prefilled(self) -> bool:
        return self.state is None and self.position >= len(self.prompt) - 1


class Scheduler:
    """The loop over one machine with `slots` sequences of `context` tokens each.

    `queue_capacity` requests may wait, each for `queue_deadline` seconds. `now` is a monotonic clock in seconds.
    `step` and `run` are for the thread that computes, everything else for any thread.
    """

    def __init__(
        self,
        machine: Machine,
        vocabulary: Vocabulary,
        *,
        slots: int,
        context: int,
        now: Callable[[], float],
        queue_capacity: int = 256,
        queue_deadline: float = 30.0,
    ) -> None:
        self.context = context
        self._machine = machine
        self._vocabulary = vocabulary
        self._now = now
        self._queue_capacity = queue_capacity
        self._queue_deadline = queue_deadline
        self._slots = [_Slot(index) for index in range(slots)]
        self._running: list[_Run] = []
        self._waiting: list[Generation] = []
        self._ticks = 0
        self._draining = False
        self._stopped = False
        self._changed = threading.Condition()

    def submit(self, request: Request, deliver: Callable[[Event], None]) -> Generation:
        """Queue a request; `deliver` must not block and must not raise.

        Raises:
            ValueError: an empty prompt, one that leaves no room for a token, or max_tokens < 1.
            QueueFull, Draining: as they say.
        """
        if not 0 < len(request.prompt) < self.context or request.max_tokens < 1:
            raise ValueError("the prompt does not fit, or nothing is asked for")
        with self._changed:
            if self._draining or self._stopped:
                raise Draining
            # A free slot takes the request at the next step: such a request does not really wait.
            free = len(self._slots) - len(self._running)
            if len(self._waiting) >= self._queue_capacity + free:
                raise QueueFull
            generation = Generation(request, deliver, self._now() + self._queue_deadline)
            self._waiting.append(generation)
            self._changed.notify_all()
        return generation

    def drain(self) -> None:
        """Take no new requests; what was taken runs on."""
        with self._changed:
            self._draining = True
            self._changed.notify_all()

    def abort(self, message: str) -> int:
        """Fail everything that waits or runs, at the next step; returns how many requests that ends."""
        return self._condemn(lambda request: True, Failed("draining", message))

    def cancel(self, request_id: str) -> bool:
        """Fail the requests of this id at the next step; whether there are any."""
        verdict = Failed("cancelled", "the request was cancelled")
        return self._condemn(lambda request: request.id == request_id, verdict) > 0

    def _condemn(self, which: Callable[[Request], bool], verdict: Failed) -> int:
        with self._changed:
            alive = [*self._waiting, *(run.generation for run in self._running)]
            doomed = [each for each in alive if not each.cancelled and which(each.request)]
            for generation in doomed:
                generation.verdict = verdict
                generation.cancel()
            self._changed.notify_all()
        return len(doomed)

    def stop(self) -> None:
        """End `run` after the step it is in."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def wake(self) -> None:
        """Look at cancellations now, not when the queue next moves."""
        with self._changed:
            self._changed.notify_all()

    @property
    def load(self) -> Load:
        """The figures of this moment."""
        with self._changed:
            total = len(self._slots) * (self.context // BLOCK)
            used = sum(-(-run.position // BLOCK) for run in self._running)
            return Load(len(self._waiting), len(self._running), total - used, total, self._draining)

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing runs."""
        with self._changed:
            return not self._waiting and not self._running

    def wait_idle(self, timeout: float) -> bool:
        """Block until nothing waits and nothing runs, at most `timeout` seconds; whether it came to that."""
        with self._changed:
            return self._changed.wait_for(lambda: self.idle, timeout)

    def run(self) -> None:
        """Step until `stop`; sleeps while there is nothing to do."""
        while not self._stopped:
            if not self.step():
                with self._changed:
                    if not self._waiting and not self._stopped:
                        self._changed.wait()

    def step(self) -> bool:
        """One round: admit, one prefill chunk, one decode batch. False when there was nothing to do."""
        self._turn_over()
        runs = self._running
        if not runs:
            return False
        for run in runs:
            if not run.prefilled:
                self._compute([run], self._prefill)
                break
        ready = [run for run in self._running if run.prefilled]
        if ready:
            self._compute(ready, self._decode)
        return True

    def _turn_over(self) -> None:
        """Let go of what was cancelled or aborted, give free slots to what waits, and send away who waits too long."""
        with self._changed:
            for run in list(self._running):
                if run.generation.cancelled:
                    self._release(run, None)
            gone = [each for each in self._waiting if each.cancelled]
            self._waiting = [each for each in self._waiting if not each.cancelled]
            for generation in gone:
                if generation.verdict is not None:
                    generation.deliver(generation.verdict)
            while self._waiting and len(self._running) < len(self._slots):
                # Among equals the oldest: it is the first.
                first = max(self._waiting, key=lambda waiting: waiting.request.priority)
                self._waiting.remove(first)
                self._admit(first)
            now = self._now()
            while self._waiting and now >= self._waiting[0].deadline:
                late = Failed("overloaded", "the request waited too long")
                self._waiting.pop(0).deliver(late)
            self._changed.notify_all()

    def _admit(self, generation: Generation) -> None:
        """Give the request the free slot that holds most of its prompt; among equals, the one longest unused."""
        prompt = generation.request.prompt
        free = [slot for slot in self._slots if slot.run is None]
        slot = max(free, key=lambda slot: (slot.reusable(prompt), -slot.used_at))
        cached = slot.reusable(prompt) if generation.request.resume is None else 0
        self._machine.forget(slot.index, cached)
        del slot.resident[cached:]
        slot.run = _Run(generation, slot, cached)
        self._running.append(slot.run)
        if generation.request.resume is None:
            generation.deliver(Started(cached))

    def _release(self, run: _Run, event: Event | None) -> None:
        """Free the slot and tell the end; who was condemned before that ends so, whatever the batch has brought."""
        with self._changed:
            self._ticks += 1
            run.slot.used_at = self._ticks
            run.slot.run = None
            self._running.remove(run)
            event = run.generation.verdict or event
            self._changed.notify_all()
        if event is not None:
            run.generation.deliver(event)

    def _compute(self, runs: list[_Run], how: Callable[[list[_Run]], None]) -> None:
        """Run one batch; a failure of the machine ends the sequences in it and no others."""
        try:
            how(runs)
        except Exception:
            log.exception("a batch of %d sequences failed", len(runs))
            for run in runs:
                if run.slot.run is run:
                    run.slot.resident.clear()
                    self._release(run, Failed("broken", "the engine failed to compute"))

    def _prefill(self, runs: list[_Run]) -> None:
        """The next chunk of a prompt, or all of it where another worker has computed it."""
        (run,) = runs
        if run.state is not None:
            self._load(run, run.state)
            return
        start, slot = run.position, run.slot
        end = min(start + GRID, len(run.prompt) - 1)
        chunk = run.prompt[start:end]
        self._machine.decode(
            [Row(slot.index, start + i, token, False) for i, token in enumerate(chunk)]
        )
        run.position = end
        if len(chunk) == GRID:
            slot.resident.extend(chunk)

    def _load(self, run: _Run, state: bytes) -> None:
        cached = len(run.prompt) - 1
        self._machine.load(run.slot.index, state)
        self._machine.forget(run.slot.index, cached)
        run.state = None
        run.position = cached
        run.slot.resident.extend(run.prompt[: cached - cached % GRID])
        run.generation.deliver(Started(cached))

    def _decode(self, runs: list[_Run]) -> None:
        logits = self._machine.decode(
            [Row(run.slot.index, run.position, run.next, True) for run in runs]
        )
        for run, row in zip(runs, logits, strict=True):
            run.position += 1
            if run.generation.cancelled:
                continue
            sampled = run.sampler.pick(row)
            if run.generation.request.prefill_only:
                self._compute([run], functools.partial(self._export, sampled))
            else:
                self._advance(run, sampled)

    def _export(self, sampled: Sampled, runs: list[_Run]) -> None:
        (run,) = runs
        self._release(run, Prefilled(sampled, self._machine.export(run.slot.index)))

    def _advance(self, run: _Run, sampled: Sampled) -> None:
        """Account one new token of `run`: tell it, or end the run."""
        request, text = run.generation.request, run.text
        run.produced += 1
        run.next = sampled.token
        if sampled.token in self._vocabulary.end_of_generation:
            self._release(run, Finished("stop", text.flush(), run.produced))
            return
        run.generation.deliver(Token(sampled, text.push(self._vocabulary.piece(sampled.token))))
        if text.stopped:
            self._release(run, Finished("stop", "", run.produced))
        elif run.produced >= request.max_tokens or run.position + 1 >= self.context:
            tail = text.flush()
            reason = "stop" if text.stopped else "length"
            self._release(run, Finished(reason, tail, run.produced))
