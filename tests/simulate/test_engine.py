"""The modelled engine: what a step takes, who waits, what is cached and what goes."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.simulate.engine import ModelledEngine, Sequence
from pointsman.simulate.profile import EngineProfile

PROFILE = EngineProfile(kv_tokens=16 * 100)


class Played:
    """An engine with blocks of 16 tokens, run until it has nothing to do."""

    def __init__(self, profile: EngineProfile = PROFILE) -> None:
        self.engine = ModelledEngine(profile, 16)
        self.first: dict[int, float] = {}
        self.last: dict[int, float] = {}
        self.cached: dict[int, int] = {}

    def ask(self, number: int, blocks: range, *, output: int = 1, at: float = 0.0) -> None:
        self.until(at)
        tokens = len(blocks) * 16
        self.engine.submit(Sequence(number, tuple(blocks), tokens, output), at)

    def until(self, end: float = math.inf) -> "Played":
        engine = self.engine
        while engine.next_at < end:
            now = engine.next_at
            began, ended = engine.advance()
            for each in began:
                self.first[each.number] = now
                self.cached[each.number] = each.cached_tokens
            for each in ended:
                self.last[each.number] = now
        return self


def test_a_prompt_takes_its_tokens_and_an_answer_its_steps() -> None:
    played = Played()
    played.ask(1, range(50), output=11)
    played.until()
    assert played.first[1] == pytest.approx(800 / 8000)
    assert played.last[1] == pytest.approx(0.1 + 10 * 0.00635)
    assert played.engine.busy_s == pytest.approx(played.last[1])


def test_a_long_prompt_is_computed_in_chunks_beside_those_that_decode() -> None:
    profile = EngineProfile(chunk_tokens=160, kv_tokens=16 * 10_000)
    played = Played(profile)
    played.ask(1, range(1), output=1000)
    # It comes amid the first step of the other one's answer.
    played.ask(2, range(100, 200), at=0.004)
    played.until()
    joined = 16 / 8000 + profile.step_s(decoding=1, prompt_tokens=0)
    # 1600 tokens at 159 a step, since the other one decodes: ten steps, and one for what is left.
    steps = 10 * profile.step_s(decoding=1, prompt_tokens=159)
    assert played.first[2] == pytest.approx(
        joined + steps + profile.step_s(decoding=1, prompt_tokens=10)
    )


def test_who_came_first_is_first_and_a_full_batch_waits() -> None:
    played = Played(EngineProfile(sequences_max=2, kv_tokens=16 * 1000))
    for number in range(4):
        played.ask(number, range(100 * number, 100 * number + 10), output=5)
    assert (played.engine.running, len(played.engine.waiting)) == (1, 3)
    played.until()
    assert sorted(played.first, key=played.first.__getitem__) == [0, 1, 2, 3]
    assert played.first[2] >= min(played.last[0], played.last[1])


def test_one_that_comes_while_others_decode_joins_at_the_end_of_the_step() -> None:
    played = Played()
    played.ask(1, range(10), output=1000)
    start = 0.02
    step = 0.00635
    played.ask(2, range(20, 21), at=start + 2.5 * step)
    played.until(start + 5 * step + 0.01)
    assert played.first[2] == pytest.approx(start + 3 * step + 16 / 8000 + step, rel=1e-6)


def test_what_is_cached_is_not_computed_again_but_for_one_token() -> None:
    played = Played()
    played.ask(1, range(50))
    played.ask(2, range(50), at=1.0)
    played.ask(3, range(30), at=2.0)
    other = Sequence(4, (*range(20), *range(70, 100)), 800, 1)
    played.until(3.0)
    played.engine.submit(other, 3.0)
    played.until()
    assert played.cached == {1: 0, 2: 799, 3: 479, 4: 320}
    assert played.first[2] == pytest.approx(1.0 + 1 / 8000)


def test_the_block_that_was_used_longest_ago_goes_first_and_ends_before_beginnings() -> None:
    played = Played()
    played.ask(1, range(40))
    played.ask(2, range(50, 90), at=1.0)
    # 81 of 100 blocks with those of its answer: 22 have to go, all of the first prompt and from its end.
    played.ask(3, range(100, 140), at=2.0)
    played.until()
    kept = [block for block in range(40) if played.engine.cached(block)]
    assert kept == list(range(19))
    assert all(played.engine.cached(block) for block in range(50, 90))


def test_blocks_in_use_stay_and_who_finds_no_room_waits() -> None:
    played = Played()
    played.ask(1, range(60), output=200)
    played.ask(2, range(100, 160), output=1, at=0.5)
    assert (played.engine.running, len(played.engine.waiting)) == (1, 1)
    played.until()
    assert played.first[2] > played.last[1]


def test_two_that_compute_the_same_at_once_keep_one_copy() -> None:
    played = Played()
    played.ask(0, range(90, 91), output=20)
    played.ask(1, range(20), output=50)
    played.ask(2, range(20), output=50)
    played.until()
    assert (played.cached[1], played.cached[2]) == (0, 0)
    assert played.engine.free_blocks == played.engine.total_blocks == 100


def test_one_that_fails_loses_all_and_comes_back_empty() -> None:
    played = Played()
    played.ask(1, range(10), output=500)
    played.ask(2, range(20, 30), output=500)
    played.until(0.1)
    assert sorted(each.number for each in played.engine.fail()) == [1, 2]
    assert (played.engine.next_at, played.engine.down) == (math.inf, True)
    played.engine.restart()
    played.ask(3, range(10), at=1.0)
    played.until()
    assert played.cached[3] == 0


@given(
    st.lists(
        st.tuples(st.floats(0, 0.3), st.integers(0, 4), st.integers(1, 30), st.integers(1, 80)),
        max_size=30,
    )
)
def test_every_request_ends_once_and_nothing_stays_in_use(
    asked: list[tuple[float, int, int, int]],
) -> None:
    played = Played(EngineProfile(chunk_tokens=64, sequences_max=4, kv_tokens=16 * 40))
    at = 0.0
    for number, (wait, begin, length, output) in enumerate(asked):
        at += wait
        played.ask(number, range(begin * 10, begin * 10 + length), output=output, at=at)
    engine = played.until().engine
    assert played.first.keys() == played.last.keys() == set(range(len(asked)))
    assert all(played.first[number] <= played.last[number] for number in played.first)
    assert engine.free_blocks == engine.total_blocks
    assert (engine.running, len(engine.waiting)) == (0, 0)
    assert sum(map(engine.cached, range(100))) <= engine.total_blocks
