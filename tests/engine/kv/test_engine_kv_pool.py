"""The pool of a decode worker: nothing leaks and nothing is lost, whatever happens in whatever order."""

import threading
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pointsman.engine.kv.blocks import Block
from pointsman.engine.kv.pool import BlockGone, HandleReleased, Held, Pool, PoolFull, Push

HOLD_S = 100.0


class Clock:
    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


def block(value: int, n_tokens: int = 16) -> Block:
    return Block(value, n_tokens, b"payload of %d" % value)


def a_pool(capacity: int, clock: Callable[[], float] | None = None) -> Pool:
    return Pool(capacity, now=clock or Clock(), hold_s=HOLD_S)


def pushed(pool: Pool, handle: str, *hashes: int, tail: int = 0) -> None:
    with pool.begin(handle) as push:
        for value in hashes:
            push.add(block(value))
        if tail:
            push.add(block(0, tail))
        push.commit()


def test_a_claim_takes_everything_and_only_once() -> None:
    pool = a_pool(8)
    pushed(pool, "h", 1, 2, tail=5)
    assert (pool.handles, pool.held_blocks) == (frozenset({"h"}), 3)
    assert pool.claim("h") == Held(
        37, (1, 2, 0), (b"payload of 1", b"payload of 2", b"payload of 0")
    )
    assert pool.claim("h") is None
    assert (pool.handles, pool.held_blocks, pool.cached_blocks) == (frozenset(), 0, 2)


@pytest.mark.parametrize("end", ["abort", "error", "nothing"])
def test_a_push_that_is_not_committed_leaves_nothing(end: str) -> None:
    pool = a_pool(8)
    pushed(pool, "other", 1)
    try:
        with pool.begin("h") as push:
            push.reuse(1)
            push.add(block(2))
            push.add(block(0, 3))
            assert pool.held_blocks == 3
            if end == "abort":
                push.abort()
            if end == "error":
                raise OSError
    except OSError:
        pass
    assert (pool.handles, pool.held_blocks, pool.cached_blocks) == (frozenset({"other"}), 1, 0)
    assert pool.has([1, 2]) == [True, False]


def test_blocks_of_an_unfinished_push_are_not_found_by_others() -> None:
    pool = a_pool(8)
    with pool.begin("h") as push:
        push.add(block(1))
        assert pool.has([1]) == [False]
        push.commit()
    assert pool.has([1, 0]) == [True, False]


def test_two_pushes_of_one_block_share_it_in_the_end() -> None:
    pool = a_pool(8)
    with pool.begin("a") as a, pool.begin("b") as b:
        for push in (a, b):
            push.add(block(1))
        assert pool.held_blocks == 2
        a.commit()
        b.commit()
    assert pool.held_blocks == 1
    assert pool.release("a")
    assert pool.held_blocks == 1
    assert pool.claim("b") == Held(16, (1,), (b"payload of 1",))
    assert (pool.held_blocks, pool.cached_blocks) == (0, 1)


def test_a_block_twice_in_one_push_is_one_block() -> None:
    pool = a_pool(8)
    with pool.begin("h") as push:
        push.add(block(1))
        push.add(block(1))
        push.commit()
    assert pool.held_blocks == 1
    held = pool.claim("h")
    assert held is not None and held.hashes == (1, 1)
    assert (pool.held_blocks, pool.cached_blocks) == (0, 1)


def test_a_committed_push_is_over() -> None:
    pool = a_pool(8)
    with pool.begin("h") as push:
        push.commit()
        for again in (push.commit, lambda: push.add(block(1)), lambda: push.reuse(1)):
            with pytest.raises(RuntimeError, match="over"):
                again()
    assert pool.handles == {"h"}


def test_the_cache_gives_way_to_pushes_the_least_recently_used_block_first() -> None:
    pool = a_pool(3)
    pushed(pool, "a", 1, 2, 3)
    assert pool.release("a")
    # The end of a prompt goes before its beginning: without that it is of no use.
    pushed(pool, "b", 4)
    assert pool.has([1, 2, 3, 4]) == [True, True, False, True]
    with pool.begin("c") as push:
        push.reuse(2)
        push.add(block(5))
        assert pool.has([1, 2]) == [False, True]
        with pytest.raises(PoolFull):
            push.add(block(6))
    assert (pool.held_blocks, pool.cached_blocks) == (1, 1)


def test_a_pool_without_room_takes_nothing() -> None:
    with a_pool(0).begin("h") as push, pytest.raises(PoolFull):
        push.add(block(1))


def test_a_block_that_is_gone_is_told() -> None:
    pool = a_pool(1)
    pushed(pool, "a", 1)
    pool.release("a")
    pushed(pool, "b", 2)
    with pool.begin("c") as push, pytest.raises(BlockGone, match="0x0000000000000001"):
        push.reuse(1)


def test_a_repeated_handle_replaces_the_old_one() -> None:
    pool = a_pool(4)
    pushed(pool, "h", 1, tail=2)
    pushed(pool, "h", 3)
    assert (pool.held_blocks, pool.cached_blocks) == (1, 1)
    held = pool.claim("h")
    assert held is not None and held.hashes == (3,)


def test_a_handle_that_nobody_claims_is_freed_in_time() -> None:
    clock = Clock()
    pool = a_pool(4, clock)
    pushed(pool, "old", 1)
    clock.time = 60
    pushed(pool, "young", 2)
    clock.time = HOLD_S
    assert pool.expire() == 1
    assert pool.handles == {"young"}
    clock.time = 60 + HOLD_S
    assert pool.claim("young") is None
    assert pool.held_blocks == 0


def test_a_handle_that_is_pushed_again_is_held_from_then_on() -> None:
    clock = Clock()
    pool = a_pool(4, clock)
    pushed(pool, "h", 1)
    pushed(pool, "other", 2)
    clock.time = HOLD_S - 1
    pushed(pool, "h", 3)
    clock.time = HOLD_S
    assert pool.expire() == 1
    assert pool.handles == {"h"}


def test_room_that_a_late_handle_takes_is_there_for_a_push() -> None:
    clock = Clock()
    pool = a_pool(1, clock)
    pushed(pool, "h", 1)
    clock.time = HOLD_S
    pushed(pool, "g", 2)
    assert pool.handles == {"g"}


def test_a_release_is_the_last_word_on_pushes_that_come_later() -> None:
    clock = Clock()
    pool = a_pool(4, clock)
    assert not pool.release("h")
    with pytest.raises(HandleReleased):
        pool.begin("h")
    clock.time = 60
    assert not pool.release("h")
    clock.time = HOLD_S + 59
    with pytest.raises(HandleReleased):
        pool.begin("h")
    clock.time = HOLD_S + 60
    pushed(pool, "h", 1)
    assert pool.handles == {"h"}


@pytest.mark.parametrize("step", ["add", "reuse", "commit"])
def test_a_release_is_the_last_word_on_pushes_that_are_under_way(step: str) -> None:
    pool = a_pool(4)
    pushed(pool, "other", 1)
    with pool.begin("h") as push:
        push.add(block(2))
        assert not pool.release("h")
        with pytest.raises(HandleReleased):
            {
                "add": lambda: push.add(block(3)),
                "reuse": lambda: push.reuse(1),
                "commit": push.commit,
            }[step]()
    assert (pool.handles, pool.held_blocks, pool.cached_blocks) == (frozenset({"other"}), 1, 0)


def test_threads_leave_a_pool_as_it_was() -> None:
    pool = a_pool(6)
    failures = []

    def work(seed: int) -> None:
        for i in range(300):
            name = f"{seed}-{i}"
            try:
                with pool.begin(name) as push:
                    for value in (1, 2, 10 + (seed * 7 + i) % 5):
                        push.add(block(value))
                    push.add(block(0, 4))
                    if i % 3:
                        push.commit()
            except PoolFull:
                continue
            held = pool.claim(name) if i % 2 else None
            if held is not None and held.n_tokens != 52:
                failures.append(held)
            pool.release(name)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert (pool.handles, pool.held_blocks) == (frozenset(), 0)
    assert pool.cached_blocks <= 6


class Story(RuleBasedStateMachine):
    """Pushes, claims, releases and time in any order, beside a model that keeps plain lists."""

    capacity = 5

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.pool = Pool(self.capacity, now=self.clock, hold_s=HOLD_S)
        self.open: list[tuple[str, Push, list[int]]] = []
        self.handles: dict[str, tuple[list[int], float]] = {}
        self.released: dict[str, float] = {}

    def is_released(self, name: str) -> bool:
        return self.released.get(name, 0.0) > self.clock.time

    @rule(name=st.sampled_from("abc"))
    def begin(self, name: str) -> None:
        try:
            self.open.append((name, self.pool.begin(name), []))
        except HandleReleased:
            assert self.is_released(name)
        else:
            assert not self.is_released(name)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), value=st.integers(0, 4))
    def add(self, data: st.DataObject, value: int) -> None:
        name, push, taken = data.draw(st.sampled_from(self.open))
        try:
            push.add(block(value))
        except HandleReleased:
            assert self.is_released(name)
        except PoolFull:
            assert self.pool.held_blocks == self.capacity
            assert not self.pool.has([value])[0]
        else:
            taken.append(value)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), value=st.integers(1, 4))
    def reuse(self, data: st.DataObject, value: int) -> None:
        name, push, taken = data.draw(st.sampled_from(self.open))
        try:
            push.reuse(value)
        except HandleReleased:
            assert self.is_released(name)
        except BlockGone:
            assert not self.pool.has([value])[0]
        else:
            taken.append(value)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), how=st.sampled_from(["commit", "abort"]))
    def end(self, data: st.DataObject, how: str) -> None:
        each = data.draw(st.sampled_from(self.open))
        self.open.remove(each)
        name, push, taken = each
        with push:
            if how == "commit":
                try:
                    push.commit()
                except HandleReleased:
                    assert self.is_released(name)
                else:
                    self.handles[name] = (taken, self.clock.time + HOLD_S)

    @rule(name=st.sampled_from("abc"))
    def claim(self, name: str) -> None:
        taken, until = self.handles.pop(name, ([], 0.0))
        held = self.pool.claim(name)
        if until <= self.clock.time:
            assert held is None
        else:
            assert held is not None
            assert held.hashes == tuple(taken)
            assert held.payloads == tuple(block(value).payload for value in taken)
            assert held.n_tokens == 16 * len(taken)

    @rule(name=st.sampled_from("abc"))
    def release(self, name: str) -> None:
        _, until = self.handles.pop(name, ([], 0.0))
        assert self.pool.release(name) == (until > self.clock.time)
        self.released[name] = self.clock.time + HOLD_S

    @rule(seconds=st.sampled_from([1.0, 40.0, 100.0]))
    def wait(self, seconds: float) -> None:
        self.clock.time += seconds

    @rule()
    def expire(self) -> None:
        self.pool.expire()

    @invariant()
    def holds_what_is_referenced_and_no_more_than_fits(self) -> None:
        live = {k: v for k, (v, until) in self.handles.items() if until > self.clock.time}
        assert self.pool.handles == set(live)
        named = {value for taken in live.values() for value in taken if value}
        nameless = sum(taken.count(0) for taken in live.values())
        least = len(named) + nameless
        most = least + sum(len(taken) for _, _, taken in self.open)
        assert least <= self.pool.held_blocks <= most
        assert self.pool.held_blocks + self.pool.cached_blocks <= self.capacity
        assert all(self.pool.has(sorted(named)))

    def teardown(self) -> None:
        for _, push, _ in self.open:
            push.abort()
        self.clock.time += HOLD_S
        self.pool.expire()
        assert (self.pool.held_blocks, self.pool.handles) == (0, frozenset())
        # All of it can be had again.
        with self.pool.begin("z") as push:
            for _ in range(self.capacity):
                push.add(block(0))
            push.commit()


TestStory = pytest.mark.slow(Story.TestCase)
TestStory.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
