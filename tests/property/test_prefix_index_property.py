"""The prefix index against a list of everything that is cached, which is looked through from end to end."""

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pointsman.domain.blocks import block_hashes
from pointsman.domain.prefix_index import SHARED_SPARE, SPARE, SWEEPS, PrefixIndex
from pointsman.domain.worker import Worker

PROMPTS = st.text("ab", max_size=9)
WORKERS = st.integers(0, 5)
STEPS = st.floats(0.01, 7.0)


def blocks_of(prompt: str) -> tuple[int, ...]:
    return block_hashes(prompt.encode(), 1)


@dataclass(eq=False)
class Entry:
    """One block at one worker."""

    worker: Worker
    block: int
    used: float
    known: bool = False


class IndexMachine(RuleBasedStateMachine):
    """Everything that may happen to an index; `entries` are in the order of their last use."""

    events = False

    @initialize(
        blocks_max=st.sampled_from([1, 12, 40, 600]),
        ttl_s=st.sampled_from([5.0, 60.0]),
        rooms=st.lists(st.sampled_from([0, 1, 3, 70]), min_size=6, max_size=6),
    )
    def begin(self, blocks_max: int, ttl_s: float, rooms: list[int]) -> None:
        self.now = self.due = 0.0
        self.blocks_max, self.ttl_s, self.speculative_s = blocks_max, ttl_s, 3.0
        self.most = blocks_max
        self.index = PrefixIndex(blocks_max, ttl_s, speculative_s=3.0)
        self.workers = tuple(
            [
                Worker(f"w{number}", model="m", http_address="h:1", kv_tokens=16 * room)
                for number, room in enumerate(rooms)
            ]
        )
        self.entries: list[Entry] = []
        self.followed: set[Worker] = set()

    # What happens.

    @rule(number=WORKERS, prompt=PROMPTS, step=STEPS, block_tokens=st.sampled_from([1, 4, 16, 64]))
    def insert(self, number: int, prompt: str, step: float, block_tokens: int) -> None:
        worker = self.workers[number]
        self._pass(step)
        self.index.insert(worker, blocks_of(prompt), self.now, block_tokens)
        for block in reversed(blocks_of(prompt)):
            if not any(each.known for each in self._entry(worker, block)):
                self._use(Entry(worker, block, self.now))
        room = max(worker.kv_tokens // block_tokens, 1)
        believed = [each for each in self.entries if each.worker is worker and not each.known]
        if worker.kv_tokens and worker not in self.followed and len(believed) > room:
            self._lose(believed[: len(believed) - (room - room // SPARE)])
        self._bound()

    @rule(number=WORKERS)
    def purge(self, number: int) -> None:
        worker = self.workers[number]
        self.index.purge(worker)
        self.followed.discard(worker)
        self._lose([each for each in self.entries if each.worker is worker])

    @rule(blocks_max=st.sampled_from([1, 12, 40, 600]), ttl_s=st.sampled_from([5.0, 60.0]))
    def set_limits(self, blocks_max: int, ttl_s: float) -> None:
        self.index.set_limits(blocks_max, ttl_s)
        self.blocks_max, self.ttl_s, self.due = blocks_max, ttl_s, 0.0
        # What is there stays until something comes in.
        self.most = max(blocks_max, len(self.entries))

    @rule(step=STEPS)
    def expire(self, step: float) -> None:
        self.now += step
        self.index.expire(self.now)
        self._expire()

    @rule(prompt=PROMPTS, asked=st.lists(WORKERS, max_size=6, unique=True) | st.none())
    def match(self, prompt: str, asked: list[int] | None) -> None:
        workers = (
            self.workers if asked is None else tuple([self.workers[number] for number in asked])
        )
        depths = {}
        for worker in workers:
            depth = 0
            for block in blocks_of(prompt):
                if not self._entry(worker, block):
                    break
                depth += 1
            if depth:
                depths[worker] = depth
        found = self.index.match(blocks_of(prompt), workers)
        assert dict(found) == depths
        assert [depth for _, depth in found] == sorted(depths.values(), reverse=True)

    @invariant()
    def every_block_is_counted_once(self) -> None:
        if not hasattr(self, "index"):
            return
        assert len(self.index) == len(self.entries) <= self.most
        for worker in self.workers:
            assert self.index.blocks_of(worker) == sum(e.worker is worker for e in self.entries)
        assert sum(mask.bit_count() for mask in self.index._masks.values()) == len(self.entries)

    # The model.

    def _entry(self, worker: Worker, block: int) -> list[Entry]:
        return [each for each in self.entries if each.worker is worker and each.block == block]

    def _use(self, entry: Entry) -> None:
        self._lose(self._entry(entry.worker, entry.block))
        self.entries.append(entry)

    def _lose(self, entries: list[Entry]) -> None:
        self.entries = [each for each in self.entries if each not in entries]

    def _pass(self, step: float) -> None:
        self.now += step
        if self.now >= self.due:
            self._expire()

    def _expire(self) -> None:
        self.due = self.now + self.ttl_s / SWEEPS

        def over(entry: Entry) -> bool:
            ttl_s = self.speculative_s if entry.worker in self.followed else self.ttl_s
            return not entry.known and entry.used <= self.now - ttl_s

        self._lose([each for each in self.entries if over(each)])

    def _bound(self) -> None:
        self.most = self.blocks_max
        if len(self.entries) > self.blocks_max:
            excess = len(self.entries) - (self.blocks_max - self.blocks_max // SHARED_SPARE)
            self._lose(sorted(self.entries, key=lambda each: each.known)[:excess])


class EventMachine(IndexMachine):
    """The same with events of engines."""

    @rule(number=WORKERS)
    def follow(self, number: int) -> None:
        self.index.follow(self.workers[number])
        self.followed.add(self.workers[number])

    @rule(number=WORKERS, prompt=PROMPTS, start=st.integers(0, 3), step=STEPS)
    def stored(self, number: int, prompt: str, start: int, step: float) -> None:
        worker, blocks = self.workers[number], blocks_of(prompt)[start:]
        self._pass(step)
        self.index.stored(worker, blocks, self.now)
        for block in blocks:
            self._use(Entry(worker, block, self.now, known=True))
        self._bound()

    @rule(number=WORKERS, prompt=PROMPTS, start=st.integers(0, 8))
    def removed(self, number: int, prompt: str, start: int) -> None:
        worker, blocks = self.workers[number], blocks_of(prompt)[start:]
        self.index.removed(worker, blocks)
        for block in blocks:
            self._lose(self._entry(worker, block))

    @rule(number=WORKERS)
    def cleared(self, number: int) -> None:
        worker = self.workers[number]
        self.index.cleared(worker)
        self._lose([each for each in self.entries if each.worker is worker])

    @rule(number=WORKERS, step=STEPS)
    def unfollow(self, number: int, step: float) -> None:
        worker = self.workers[number]
        self._pass(step)
        self.index.unfollow(worker, self.now)
        self.followed.discard(worker)
        known = [each for each in self.entries if each.worker is worker and each.known]
        for entry in reversed(known):
            self._use(Entry(worker, entry.block, self.now))


IndexMachine.TestCase.settings = EventMachine.TestCase.settings = settings(
    deadline=None, derandomize=True, max_examples=120, stateful_step_count=40
)
TestAnIndexOfBeliefs = IndexMachine.TestCase
TestAnIndexWithEvents = EventMachine.TestCase
