"""A modelled engine: continuous batching with chunked prefill, over a paged prefix cache, step by step.

In one step every running sequence gets its next token, and up to `chunk_tokens` prompt tokens are computed, first come,
first served: one prompt after the other, the next one in what the last one left of the chunk. The step that computes
the end of a prompt gives the first token of the answer.

How long a step takes: max(`decode_base_s`, prompt tokens / `prefill_tokens_per_s`) + `decode_per_sequence_s` x the
number of running sequences + `start_s` x the number of those that start in it. Decoding waits for memory and prefill
for arithmetic, and in a step that does both the weights are read once, so the base of decoding is hidden behind a
chunk; the caches of the running sequences are read anyway, so their share is added. That is why chunked prefill pays
(Agrawal et al., Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve, OSDI 2024: a decode costs far
less beside a chunk than in a step of its own). Worked number, by the default profile: 40 sequences decode in 20 ms a
step, and in 270 ms beside a chunk of 2048.

Attention makes long prompts dearer: each token reads those before it. What that costs is `prefill_context_s` for each
token of a prompt and each one before it, which counts as computing the prompt, and `decode_context_s` for each running
sequence and each token that it has so far. So steps become longer as answers grow, by the same amount each.

What is kept of prompts: `prefix_cache` says whether blocks are shared by all (`paged`), whether each place for a
sequence keeps its last prompt, and only an idle one can be taken up (`slots`, as llama.cpp and our own engine do), or
`none`. With slots each sequence has its part of the cache, so nobody waits for room, and nobody loses it.

Room: a prompt starts when all of it fits, besides a hundredth of the cache that is left free for the answers of those
who run; until then it waits, and all behind it. An answer takes a token of room per step. If there is none, the
sequence that started last loses its place: it goes back to the front of the queue, and its prompt and what it has of
its answer are computed again, except what is still cached then. A request that is larger than the whole cache is
refused. First come, first served and preemption by recomputing are the defaults of vLLM.

A prompt that another engine hands over (`Sequence.handed`) waits for room as any other, and takes it. Only its last
token is computed, which gives the first one of the answer.

What it leaves out: the few tokens that the last page of a sequence wastes, and that answers are cached, too (a trace
does not say their hashes).

It costs nothing to let time pass: as long as the same sequences run, steps are not simulated one by one but counted, up
to the moment when somebody is done, or comes.
"""

from collections import deque
from heapq import heapify, heappop, heappush
from math import ceil, inf, sqrt
from typing import TYPE_CHECKING, Generic, TypeVar

from pointsman.simulate.cache import BlockCache, Run
from pointsman.simulate.slots import SlotCache

if TYPE_CHECKING:
    from pointsman.simulate.profile import EngineProfile

__all__ = ["ModelledEngine", "Sequence"]

SPARE = 100
"""One of so many tokens of the cache is kept free for answers when a prompt starts beside others."""


class Sequence:
    """One request at an engine: a prompt of which `blocks` are the whole blocks, and an answer of `output_tokens`.

    `cached_tokens` is what of the prompt was in the cache when it first started, `first_at` when its first token was
    there, in seconds, below 0 before that. One that is `handed` over comes with its prompt computed, but for the last
    token, and with `cached_tokens` of where that was done.
    """

    __slots__ = (
        "_held",
        "_joined",
        "_order",
        "_produced",
        "_remaining",
        "_run",
        "blocks",
        "cached_tokens",
        "first_at",
        "handed",
        "output_tokens",
        "prompt_tokens",
    )

    def __init__(self, blocks: tuple[int, ...], prompt_tokens: int, output_tokens: int) -> None:
        self.blocks = blocks
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.reset()

    def reset(self) -> None:
        """Forget what an engine did: another one has to begin again."""
        self.cached_tokens = 0
        self.first_at = -1.0
        self.handed = False
        self._order = -1
        # Prompt tokens still to be computed; tokens of the answer when it last began to decode, and at which step.
        self._remaining = 0
        self._produced = 0
        self._joined = 0
        # What it uses of the cache, and the tokens of room that it took for itself when it started.
        self._run: Run | None = None
        self._held = 0


SequenceT = TypeVar("SequenceT", bound=Sequence)


class ModelledEngine(Generic[SequenceT]):
    """One engine of a profile; the blocks of its prompts have `entry_tokens` tokens (at least 1).

    `due` is when `advance` has to be called next, infinity where there is nothing to do. Times are in seconds and do
    not go back.

    >>> from pointsman.simulate.profile import EngineProfile
    >>> engine = ModelledEngine(EngineProfile(), entry_tokens=16)
    >>> asked = Sequence((), 8000, 2)
    >>> engine.submit(asked, now=0.0)
    >>> engine.due, engine.advance(engine.due)
    (0.768, ([], []))
    >>> began, ended = engine.advance(engine.due)
    >>> asked.first_at, began == [asked], ended
    (1.0, True, [])
    >>> engine.advance(engine.due)[1] == [asked], engine.due
    (True, inf)
    """

    __slots__ = (
        "_arrived",
        "_cache",
        "_context",
        "_decoding",
        "_finishing",
        "_growth_s",
        "_head",
        "_head_tokens",
        "_interruptible",
        "_kv_tokens",
        "_private",
        "_profile",
        "_slots",
        "_starts",
        "_step",
        "_step_s",
        "_steps",
        "_stretch_at",
        "_stretch_s",
        "_waiting",
        "busy_s",
        "cached_tokens",
        "computed_tokens",
        "due",
        "entry_tokens",
        "evicted_tokens",
        "preemptions",
        "received_tokens",
    )

    def __init__(self, profile: "EngineProfile", entry_tokens: int) -> None:
        self._profile = profile
        self._kv_tokens = profile.kv_tokens
        self.entry_tokens = entry_tokens
        self._slots = profile.prefix_cache == "slots"
        self._cache = self._empty()
        self.due = inf
        self.busy_s = 0.0
        self.cached_tokens = 0
        self.computed_tokens = 0
        self.evicted_tokens = 0
        self.preemptions = 0
        self.received_tokens = 0
        self._waiting: deque[SequenceT] = deque()
        # Who decodes, by the step that gives the last token.
        self._decoding: list[tuple[int, int, SequenceT]] = []
        # The prompt that is computed in part, and those that this step computes to their end.
        self._head: SequenceT | None = None
        self._finishing: list[SequenceT] = []
        # Tokens of room that belong to one sequence each.
        self._private = 0
        # Tokens that those who decode have, prompts and answers.
        self._context = 0
        self._starts = 0
        self._step = 0
        # The stretch of steps that is going on: when it began, how many, how long the first one is, how much longer
        # each other one than the one before, and how long all of them are.
        self._stretch_at = 0.0
        self._steps = 0
        self._step_s = 0.0
        self._growth_s = 0.0
        self._stretch_s = 0.0
        self._head_tokens = 0
        self._interruptible = False

    # What is reported.

    @property
    def queue_depth(self) -> int:
        """How many sequences wait."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """How many sequences run, those whose prompts are being computed included."""
        return len(self._decoding) + len(self._finishing) + (self._head is not None)

    def room(self, now: float) -> int:
        """Return for how many tokens the cache has room at `now`; what is cached and not in use counts as room."""
        grown = 0
        if self._decoding and self.due < inf:
            steps = min(int(self._steps_until(now)), self._steps)
            grown = steps * len(self._decoding)
        return self._room() - grown

    # What happens.

    def fits(self, sequence: SequenceT) -> bool:
        """Tell whether a sequence could run here, if it were alone."""
        profile = self._profile
        room = profile.kv_tokens // profile.sequences_max if self._slots else profile.kv_tokens
        return sequence.prompt_tokens + sequence.output_tokens <= room

    def lacks(self, sequence: SequenceT) -> int:
        """Return how many tokens of a prompt are not in the cache."""
        return sequence.prompt_tokens - self._cache.depth(sequence.blocks) * self.entry_tokens

    def submit(self, sequence: SequenceT, now: float) -> None:
        """Take a sequence, which must fit. `due` may be earlier afterwards."""
        waiting = self._waiting
        waiting.append(sequence)
        if self.due == inf:
            self._plan(now)
        elif self._interruptible and len(waiting) == 1:
            # It starts with the next step. Whoever finds others waiting has to wait for what they wait for.
            steps = max(ceil(self._steps_until(now)), 1)
            if steps < self._steps:
                self._take(steps)

    def advance(self, now: float) -> tuple[list[SequenceT], list[SequenceT]]:
        """Do what is due at `now`, which is `due`; return whose answers began, and whose are complete."""
        decoding = self._decoding
        steps = self._steps
        step = self._step = self._step + steps
        if decoding:
            self._make_room(steps * len(decoding))
            self._context += steps * len(decoding)
        self.busy_s += self._stretch_s
        head = self._head
        if head is not None:
            head._remaining -= self._head_tokens
        ended: list[SequenceT] = []
        while decoding and decoding[0][0] <= step:
            sequence = heappop(decoding)[2]
            self._private -= sequence._held + step - sequence._joined
            self._context -= sequence.prompt_tokens + sequence.output_tokens
            self._cache.unpin(sequence._run)
            ended.append(sequence)
        began: list[SequenceT] = []
        finishing = self._finishing
        if finishing:
            self._finishing = []
            for sequence in finishing:
                if sequence.first_at < 0:
                    sequence.first_at = now
                    began.append(sequence)
                sequence._produced += 1
                left = sequence.output_tokens - sequence._produced
                if left > 0:
                    sequence._joined = step
                    self._context += sequence.prompt_tokens + sequence._produced
                    heappush(decoding, (step + left, sequence._order, sequence))
                else:
                    self._private -= sequence._held
                    self._cache.unpin(sequence._run)
                    ended.append(sequence)
        self._plan(now)
        return began, ended

    def fail(self) -> list[SequenceT]:
        """Lose everything, and return the sequences that were here, in the order in which they started or came."""
        lost = [each[2] for each in self._decoding] + self._finishing
        if self._head is not None:
            lost.append(self._head)
        lost.sort(key=lambda sequence: sequence._order)
        lost += self._waiting
        self._waiting.clear()
        self._decoding.clear()
        self._finishing = []
        self._head = None
        self._cache = self._empty()
        self._private = 0
        self._context = 0
        self.due = inf
        return lost

    # How.

    def _empty(self) -> BlockCache:
        return SlotCache(self._profile.sequences_max) if self._slots else BlockCache()

    def _take(self, steps: int) -> None:
        """Say that so many steps are taken, of the length that is known."""
        self._steps = steps
        self._stretch_s = steps * self._step_s + self._growth_s * (steps * (steps - 1) / 2)
        self.due = self._stretch_at + self._stretch_s

    def _steps_until(self, now: float) -> float:
        """Return how many steps of the stretch there are until `now`: `_take` the other way round."""
        elapsed = now - self._stretch_at
        growth = self._growth_s
        if not growth:
            return elapsed / self._step_s
        half = self._step_s - growth / 2
        return 2 * elapsed / (half + sqrt(half * half + 2 * growth * elapsed))

    def _room(self) -> int:
        return self._kv_tokens - self._cache.pinned * self.entry_tokens - self._private

    def _make_room(self, tokens: int) -> None:
        """Take room for `tokens` of one sequence. Nobody looks during a stretch, so its end is early enough."""
        self._private = private = self._private + tokens
        cache = self._cache
        size = self.entry_tokens
        over = cache.size * size + private - self._kv_tokens
        if over > 0:
            blocks = -(-over // size)
            cache.evict(blocks)
            self.evicted_tokens += blocks * size

    def _plan(self, now: float) -> None:
        """Decide what the next steps are, from `now` on."""
        profile = self._profile
        decoding = self._decoding
        room = self._room()
        while room < len(decoding):
            self._preempt()
            room = self._room()
        running = len(decoding)
        chunk = left = profile.chunk_tokens
        context_s = profile.prefill_context_s
        read = 0.0
        started = self._starts
        finishing = self._finishing
        head = self._head
        while left:
            if head is None:
                if not self._waiting:
                    break
                head = self._start(running + len(finishing))
                if head is None:
                    break
            remaining = head._remaining
            if remaining > left:
                break
            left -= remaining
            if context_s:
                read += _read(head, remaining)
            finishing.append(head)
            head = None
        self._head = head
        self._interruptible = False
        steps = 1
        self._growth_s = profile.decode_context_s * running
        if head is None and not finishing:
            if not running:
                self.due = inf
                return
            self._interruptible = not self._waiting
            steps = decoding[0][0] - self._step
            if steps * running > room:
                steps = room // running
            step_s = profile.decode_base_s
        else:
            prompt_tokens = chunk - left
            if head is not None:
                self._head_tokens = left
                prompt_tokens = chunk
                if context_s:
                    read += _read(head, left)
            step_s = prompt_tokens / profile.prefill_tokens_per_s + context_s * read
            starting_s = profile.start_s * (self._starts - started)
            # Steps that are behind the base grow only when they come out of it.
            alike = not starting_s
            if step_s < profile.decode_base_s:
                step_s = profile.decode_base_s
                alike = alike and not context_s
            step_s += starting_s
            if alike and head is not None and not finishing:
                # Nothing changes until its last chunk, or until somebody is done.
                steps = (head._remaining - 1) // chunk
                if running and steps > 1:
                    room = self._room()
                    steps = min(steps, decoding[0][0] - self._step, max(room // running, 1))
                self._head_tokens = steps * chunk
                self._growth_s += context_s * chunk * chunk
            self.computed_tokens += steps * prompt_tokens
        self._step_s = (
            step_s
            + profile.decode_per_sequence_s * running
            + profile.decode_context_s * self._context
        )
        self._stretch_at = now
        self._take(steps)

    def _start(self, running: int) -> SequenceT | None:
        """Start the sequence that waits first, if it has room beside the `running` others."""
        waiting = self._waiting
        profile = self._profile
        if running >= profile.sequences_max:
            return None
        sequence = waiting[0]
        blocks = sequence.blocks if profile.prefix_cache != "none" else ()
        cache = self._cache
        size = self.entry_tokens
        depth = cache.depth(blocks)
        tokens = sequence.prompt_tokens + sequence._produced
        held = tokens - len(blocks) * size
        if not self._slots:
            spare = running + profile.kv_tokens // SPARE if running else 0
            room = self._room() - spare
            # The quick answer first: most have room even if nothing of them is in use by others.
            if tokens > room and tokens - cache.in_use(blocks) * size > room:
                return None
        waiting.popleft()
        sequence._run = cache.pin(blocks)
        self._make_room(held)
        cached = min(depth * size, tokens - 1)
        self.cached_tokens += cached
        if sequence.handed:
            # If it loses its place, what was handed over is lost with it.
            sequence.handed = False
            self.received_tokens += tokens - 1 - cached
            cached = tokens - 1
        elif sequence._order < 0:
            sequence.cached_tokens = cached
        sequence._remaining = tokens - cached
        sequence._held = held
        self._starts += 1
        sequence._order = self._starts
        return sequence

    def _preempt(self) -> None:
        """Take its place from the sequence that started last."""
        self.preemptions += 1
        sequence = self._head
        if sequence is not None:
            self._head = None
            self._private -= sequence._held
        else:
            decoding = self._decoding
            newest = max(decoding, key=lambda each: each[1])
            decoding.remove(newest)
            heapify(decoding)
            sequence = newest[2]
            tokens = self._step - sequence._joined
            sequence._produced += tokens
            self._context -= sequence.prompt_tokens + sequence._produced
            self._private -= sequence._held + tokens
        self._cache.unpin(sequence._run)
        self._waiting.appendleft(sequence)


def _read(sequence: Sequence, tokens: int) -> float:
    """Return how many tokens the next `tokens` of a prompt read, which is how many are before each of them."""
    before = sequence.prompt_tokens + sequence._produced - sequence._remaining
    return tokens * (before + tokens / 2)
