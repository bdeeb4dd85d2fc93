"""A modelled engine: continuous batching with chunked prefill, and a paged prefix cache with LRU eviction.

What it does as real ones do: prompts wait in the order of arrival; a step decodes one token of every sequence that is
past its prompt and fills the rest of `chunk_tokens` with prompts; blocks of a prompt that are cached are not computed
again; blocks in use stay, the others go in the order of their last use, the ends of prompts before their beginnings.

What it does not: room for the whole answer is taken when a prompt begins, so nobody is preempted; a prompt's blocks
are found by others once all of it is computed, and its answer's are not. Room is counted in whole blocks of the
workload.

Steps are not computed one by one: nothing changes while the same sequences decode, or while the prompt at the head of
the line fills whole chunks, so such stretches are one event.
"""

import math
from collections import deque
from heapq import heappop, heappush

from pointsman.simulate.profile import EngineProfile

__all__ = ["ModelledEngine", "Sequence"]


class Sequence:
    """One request at an engine. `cached_tokens` is what it found in the cache, -1 as long as it waits."""

    __slots__ = (
        "blocks",
        "cached_tokens",
        "depth",
        "first_at",
        "left_tokens",
        "number",
        "output_tokens",
        "prompt_tokens",
    )

    def __init__(
        self, number: int, blocks: tuple[int, ...], prompt_tokens: int, output_tokens: int
    ) -> None:
        self.number = number
        self.blocks = blocks
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.cached_tokens = -1
        self.left_tokens = prompt_tokens
        self.first_at = 0.0
        self.depth = 0


class ModelledEngine:
    """One engine of a profile, for blocks of `block_tokens`. `slowness` makes every step that many times as long.

    `next_at` is when its next event is due, in seconds, infinity while it has nothing to do: `advance` then, and it
    says who has begun to answer and who has ended. A failed one is idle until `restart`.
    """

    __slots__ = (
        "_decoding",
        "_idle",
        "_per_step",
        "_pinned",
        "_prefilling",
        "_room",
        "_since",
        "_steps",
        "_taken",
        "_tokens",
        "block_tokens",
        "busy_s",
        "down",
        "next_at",
        "profile",
        "slowness",
        "waiting",
    )

    def __init__(
        self, profile: EngineProfile, block_tokens: int = 512, slowness: float = 1.0
    ) -> None:
        self.profile = profile
        self.block_tokens = block_tokens
        self.slowness = slowness
        self.busy_s = 0.0
        self.down = False
        self._room = profile.kv_tokens // block_tokens
        self._empty()

    def _empty(self) -> None:
        self.waiting: deque[Sequence] = deque()
        self.next_at = math.inf
        self._prefilling: deque[Sequence] = deque()
        # By the step in which its last token comes; steps are counted from the beginning of the engine's life.
        self._decoding: list[tuple[int, int, Sequence]] = []
        self._pinned: dict[int, int] = {}
        self._idle: dict[int, None] = {}
        self._taken = 0  # blocks of answers, and those of prompts that are pinned
        self._steps = 0
        self._since = 0.0
        self._per_step = 0.0
        self._tokens = 0  # prompt tokens of each step of the stretch under way, 0 for pure decoding

    @property
    def running(self) -> int:
        """Sequences in the batch."""
        return len(self._prefilling) + len(self._decoding)

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody uses, cached ones included; 0 also where one that is too large for the engine is alone."""
        return max(self._room - self._taken, 0)

    @property
    def total_blocks(self) -> int:
        """Blocks that there are."""
        return self._room

    def cached(self, block: int) -> bool:
        """Tell whether a block is in the cache."""
        return block in self._pinned or block in self._idle

    def submit(self, sequence: Sequence, now: float) -> None:
        """Take a request at `now`; it begins with the next step."""
        self.waiting.append(sequence)
        if self.next_at == math.inf:
            self._begin(now)
        elif not self._tokens and not self._prefilling:
            # Nothing but decoding goes on: it joins at the end of the step under way.
            per_step = self._per_step
            steps = math.ceil((now - self._since) / per_step - 1e-9) if per_step else 0
            self.next_at = min(self.next_at, self._since + max(steps, 1) * per_step)

    def fail(self) -> list[Sequence]:
        """Lose everything, and return what was there."""
        lost = [*self.waiting, *self._prefilling, *(each for _, _, each in self._decoding)]
        self._empty()
        self.down = True
        return lost

    def restart(self) -> None:
        """Come back, with an empty cache."""
        self.down = False

    def advance(self) -> tuple[list[Sequence], list[Sequence]]:
        """Do what is due at `next_at`; return who has begun to answer then, and who has ended."""
        now = self.next_at
        per_step = self._per_step
        steps = round((now - self._since) / per_step) if per_step else 1
        self.busy_s += now - self._since
        self._steps += steps
        began: list[Sequence] = []
        ended: list[Sequence] = []
        decoding = self._decoding
        while decoding and decoding[0][0] <= self._steps:
            ended.append(heappop(decoding)[2])
        budget = self._tokens * steps
        prefilling = self._prefilling
        while budget and prefilling:
            head = prefilling[0]
            taken = min(head.left_tokens, budget)
            head.left_tokens -= taken
            budget -= taken
            if head.left_tokens:
                break
            prefilling.popleft()
            self._computed(head)
            head.first_at = now
            began.append(head)
            if head.output_tokens > 1:
                heappush(decoding, (self._steps + head.output_tokens - 1, head.number, head))
            else:
                ended.append(head)
        for sequence in ended:
            self._leave(sequence)
        self._begin(now)
        return began, ended

    def _begin(self, now: float) -> None:
        """Begin the next stretch of equal steps."""
        profile = self.profile
        while self.waiting and self.running < profile.sequences_max and self._admit():
            pass
        decoding = len(self._decoding)
        prefilling = self._prefilling
        self._since = now
        if prefilling:
            chunk = max(profile.chunk_tokens - decoding, 1)
            whole = prefilling[0].left_tokens // chunk
            if whole > 1 and self._decoding:
                whole = min(whole, self._decoding[0][0] - self._steps)
            if whole >= 1:
                tokens, steps = chunk, whole
            else:
                # The head ends here, and those behind it may use what it leaves of the chunk.
                tokens, steps = 0, 1
                for each in prefilling:
                    tokens += each.left_tokens
                    if tokens >= chunk:
                        tokens = chunk
                        break
        elif decoding:
            tokens, steps = 0, self._decoding[0][0] - self._steps
        else:
            self._tokens = 0
            self.next_at = math.inf
            return
        self._tokens = tokens
        self._per_step = profile.step_s(decoding=decoding, prompt_tokens=tokens) * self.slowness
        self.next_at = now + steps * self._per_step

    def _admit(self) -> bool:
        """Let the first in line begin, if there is room for its prompt and its answer, or nothing else is there."""
        sequence = self.waiting[0]
        pinned, idle = self._pinned, self._idle
        blocks = sequence.blocks
        depth = woken = 0
        for block in blocks:
            if block in idle:
                woken += 1
            elif block not in pinned:
                break
            depth += 1
        fresh = len(blocks) - depth + self._answer(sequence)
        if self._taken + woken + fresh > self._room and self.running:
            return False
        for block in blocks[:depth]:
            if block in pinned:
                pinned[block] += 1
            else:
                del idle[block]
                pinned[block] = 1
        self._taken += woken + fresh
        for _ in range(min(self._taken + len(idle) - self._room, len(idle))):
            del idle[next(iter(idle))]
        sequence.depth = depth
        sequence.cached_tokens = min(depth * self.block_tokens, sequence.prompt_tokens - 1)
        sequence.left_tokens = sequence.prompt_tokens - sequence.cached_tokens
        self._prefilling.append(self.waiting.popleft())
        return True

    def _computed(self, sequence: Sequence) -> None:
        """Let others find the blocks of a prompt."""
        pinned, idle = self._pinned, self._idle
        for block in sequence.blocks[sequence.depth :]:
            if block in pinned:
                # Two computed the same at once, and one of the two copies goes.
                pinned[block] += 1
                self._taken -= 1
            else:
                idle.pop(block, None)
                pinned[block] = 1

    def _leave(self, sequence: Sequence) -> None:
        """Free what a sequence has used. What it pinned stays cached, its end the first to go."""
        pinned, idle = self._pinned, self._idle
        self._taken -= self._answer(sequence)
        for block in reversed(sequence.blocks):
            users = pinned[block] - 1
            if users:
                pinned[block] = users
            else:
                del pinned[block]
                idle[block] = None
                self._taken -= 1

    def _answer(self, sequence: Sequence) -> int:
        return -(-sequence.output_tokens // self.block_tokens)
