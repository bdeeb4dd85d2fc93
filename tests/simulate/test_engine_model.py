"""The rules of the modelled engine: by numbers that can be checked by hand, and against one that does every step."""

from math import inf, nan
from random import Random

import pytest
from msgspec.structs import replace

from pointsman.simulate.engine import ModelledEngine, Sequence
from pointsman.simulate.profile import EngineProfile

PROFILE = EngineProfile(
    prefill_tokens_per_s=1000,
    decode_base_s=0.01,
    decode_per_sequence_s=0.001,
    chunk_tokens=100,
    sequences_max=4,
    kv_tokens=1000,
    block_tokens=10,
)


def engine(profile: EngineProfile = PROFILE, entry_tokens: int = 10) -> ModelledEngine[Sequence]:
    return ModelledEngine(profile, entry_tokens)


def run(
    model: ModelledEngine[Sequence], *submitted: tuple[float, Sequence]
) -> dict[Sequence, float]:
    """Submit sequences at their times, do all that is due, and return when each was complete."""
    ends: dict[Sequence, float] = {}
    coming = list(submitted)
    while coming or model.due < inf:
        if coming and coming[0][0] < model.due:
            at, sequence = coming.pop(0)
            model.submit(sequence, at)
        else:
            now = model.due
            ends.update(dict.fromkeys(model.advance(now)[1], now))
    return ends


def blocks(prompt: int, count: int) -> tuple[int, ...]:
    return tuple(range(prompt * 1000, prompt * 1000 + count))


def test_a_prompt_is_computed_in_chunks_and_its_last_one_gives_the_first_token() -> None:
    model = engine()
    asked = Sequence((), 250, 3)
    ends = run(model, (0.0, asked))
    assert asked.first_at == pytest.approx(0.25)
    assert ends[asked] == pytest.approx(0.25 + 2 * 0.011)
    assert model.computed_tokens == 250
    assert model.busy_s == pytest.approx(0.272)


def test_a_step_that_computes_little_takes_as_long_as_one_that_decodes() -> None:
    asked = Sequence((), 1, 1)
    run(engine(), (0.0, asked))
    assert asked.first_at == pytest.approx(0.01)


def test_what_one_prompt_leaves_of_a_chunk_is_the_next_ones() -> None:
    first, second, third = Sequence((), 130, 1), Sequence((), 30, 1), Sequence((), 45, 1)
    run(engine(), (0.0, first), (0.0, second), (0.0, third))
    assert first.first_at == pytest.approx(0.2)
    assert second.first_at == pytest.approx(0.2)
    # 30 + 30 + 40 of it were in that chunk.
    assert third.first_at == pytest.approx(0.21)


def test_prompts_are_computed_in_the_order_in_which_they_came() -> None:
    long, short = Sequence((), 500, 1), Sequence((), 10, 1)
    run(engine(), (0.0, long), (0.05, short))
    assert long.first_at == pytest.approx(0.5)
    assert short.first_at == pytest.approx(0.51)


def test_who_decodes_shares_the_steps_with_chunks() -> None:
    answering, coming = Sequence((), 100, 100), Sequence((), 200, 1)
    run(engine(), (0.0, answering), (0.1001, coming))
    # It waits for the end of a step of 11 ms, and both of its chunks take 1 ms more for the one that decodes.
    assert answering.first_at == pytest.approx(0.1)
    assert coming.first_at == pytest.approx(0.111 + 2 * 0.101)


def test_an_arrival_starts_at_the_end_of_the_step_that_is_going_on() -> None:
    model = engine()
    model.submit(Sequence((), 100, 50), 0.0)
    model.advance(model.due)
    assert model.due == pytest.approx(0.1 + 49 * 0.011)
    model.submit(Sequence((), 100, 1), 0.1 + 3.5 * 0.011)
    assert model.due == pytest.approx(0.1 + 4 * 0.011)
    model.submit(Sequence((), 100, 1), 0.1 + 3.7 * 0.011)
    assert model.due == pytest.approx(0.1 + 4 * 0.011)


def test_an_arrival_in_the_last_step_changes_nothing() -> None:
    model = engine()
    model.submit(Sequence((), 100, 3), 0.0)
    model.advance(model.due)
    due = model.due
    model.submit(Sequence((), 100, 1), due - 0.001)
    assert model.due == due


def test_no_more_run_than_may() -> None:
    model = engine()
    for _ in range(6):
        model.submit(Sequence((), 10, 5), 0.0)
    model.advance(model.due)
    assert (model.running, model.queue_depth) == (4, 2)


def test_the_beginning_that_is_cached_is_not_computed_again() -> None:
    model = engine()
    first, second = Sequence(blocks(1, 20), 205, 1), Sequence((*blocks(1, 12), 7, 8), 140, 1)
    run(model, (0.0, first), (1.0, second))
    assert (first.cached_tokens, second.cached_tokens) == (0, 120)
    assert second.first_at == pytest.approx(1.02)
    assert (model.computed_tokens, model.cached_tokens) == (225, 120)


def test_of_a_prompt_that_is_cached_in_full_one_token_is_computed() -> None:
    model = engine()
    first, second = Sequence(blocks(1, 20), 200, 1), Sequence(blocks(1, 20), 200, 1)
    run(model, (0.0, first), (1.0, second))
    assert second.cached_tokens == 199
    assert second.first_at == pytest.approx(1.01)


def test_two_that_come_together_compute_their_beginning_once() -> None:
    model = engine()
    first, second = Sequence(blocks(1, 20), 200, 1), Sequence(blocks(1, 20), 205, 1)
    run(model, (0.0, first), (0.0, second))
    assert second.cached_tokens == 200
    assert model.computed_tokens == 205


def test_what_was_used_longest_ago_is_evicted_and_of_it_the_end_first() -> None:
    model = engine()
    for at, prompt in enumerate((1, 2, 3)):
        run(model, (float(at), Sequence(blocks(prompt, 30), 300, 1)))
    # The first is used again, so the second is the oldest; 200 tokens of it go, those at its end.
    run(model, (3.0, Sequence(blocks(1, 30), 300, 1)))
    run(model, (4.0, Sequence(blocks(4, 30), 300, 1)))
    assert model.evicted_tokens == 200
    found = {}
    for at, prompt in enumerate((1, 3, 2)):
        asked = Sequence(blocks(prompt, 30), 300, 1)
        run(model, (5.0 + at, asked))
        found[prompt] = asked.cached_tokens
    assert found == {1: 299, 3: 299, 2: 100}


def test_blocks_in_use_are_not_evicted() -> None:
    model = engine()
    long = Sequence(blocks(1, 30), 300, 600)
    run(model, (0.0, Sequence(blocks(2, 30), 300, 1)))
    model.submit(long, 1.0)
    while model.due < 3.0:
        model.advance(model.due)
    model.submit(Sequence(blocks(3, 30), 300, 1), 3.0)
    while model.queue_depth:
        model.advance(model.due)
    again = Sequence(blocks(1, 30), 301, 1)
    model.submit(again, model.due - 1e-6)
    while again.first_at < 0:
        model.advance(model.due)
    assert again.cached_tokens == 300
    assert model.evicted_tokens > 0


def test_a_prompt_without_room_waits_and_so_do_those_behind_it() -> None:
    model = engine()
    large, larger, small = (
        Sequence(blocks(1, 60), 600, 40),
        Sequence(blocks(2, 50), 500, 1),
        Sequence((), 10, 1),
    )
    ends = run(model, (0.0, large), (0.0, larger), (0.0, small))
    assert larger.first_at == pytest.approx(ends[large] + 0.5)
    assert small.first_at == pytest.approx(ends[large] + 0.51)


def test_what_others_use_already_takes_no_room() -> None:
    model = engine()
    one, same = Sequence(blocks(1, 60), 600, 40), Sequence(blocks(1, 60), 605, 1)
    ends = run(model, (0.0, one), (0.0, same))
    assert same.first_at < ends[one]


def test_an_answer_without_room_costs_the_one_that_started_last_its_place() -> None:
    profile = EngineProfile(
        prefill_tokens_per_s=1000,
        decode_base_s=0.01,
        decode_per_sequence_s=0,
        chunk_tokens=100,
        kv_tokens=300,
    )
    model = engine(profile)
    first, second = Sequence((), 100, 150), Sequence((), 100, 150)
    ends = run(model, (0.0, first), (0.0, second))
    assert model.preemptions == 1
    # The second has 50 tokens of its answer when there are 300 in all; 150 and 150 do not fit beside each other.
    assert second.first_at == pytest.approx(0.2)
    assert ends[first] < ends[second]
    # Its prompt and what it had are computed again when there is room, and nothing is told twice.
    had = model.computed_tokens - 200
    assert 140 <= had <= 155
    assert ends[second] == pytest.approx(ends[first] + had / 1000 + (150 - (had - 100) - 1) * 0.01)


def test_a_prompt_that_is_being_computed_gives_way_first() -> None:
    profile = EngineProfile(
        prefill_tokens_per_s=1000,
        decode_base_s=0.01,
        decode_per_sequence_s=0,
        chunk_tokens=10,
        kv_tokens=300,
    )
    model = engine(profile)
    first, second = Sequence((), 10, 100), Sequence((), 285, 2)
    ends = run(model, (0.0, first), (0.02, second))
    assert model.preemptions >= 1
    assert second.first_at > ends[first]
    assert second.cached_tokens == 0


def test_who_is_larger_than_the_cache_does_not_fit() -> None:
    model = engine()
    assert model.fits(Sequence((), 990, 10))
    assert not model.fits(Sequence((), 990, 11))


def test_an_engine_that_fails_loses_all_in_the_order_in_which_it_began() -> None:
    model = engine()
    decoding, head, waiting = Sequence((), 50, 100), Sequence((), 500, 1), Sequence((), 10, 1)
    model.submit(decoding, 0.0)
    model.advance(model.due)
    model.submit(head, 0.06)
    model.advance(model.due)
    model.submit(waiting, 0.08)
    assert model.fail() == [decoding, head, waiting]
    assert (model.due, model.running, model.queue_depth, model.room(1.0)) == (inf, 0, 0, 1000)
    assert model.fail() == []


def test_an_engine_that_fails_loses_those_whose_prompts_are_nearly_done() -> None:
    model = engine()
    asked = Sequence((), 50, 100)
    model.submit(asked, 0.0)
    assert model.running == 1
    assert model.fail() == [asked]


def test_the_room_that_is_told_shrinks_while_answers_grow() -> None:
    model = engine()
    model.submit(Sequence(blocks(1, 10), 105, 50), 0.0)
    while not model.advance(model.due)[0]:
        pass
    start = model.due - 49 * 0.011
    assert model.room(start) == 895
    assert model.room(start + 10.5 * 0.011) == 885
    model.submit(Sequence((), 200, 1), start + 10.5 * 0.011)
    model.advance(model.due)
    assert model.room(start + 11 * 0.011) == 884 - 200


def test_a_token_costs_more_the_more_are_before_it() -> None:
    profile = replace(PROFILE, prefill_context_s=1e-5, decode_context_s=1e-6)
    asked = Sequence((), 200, 3)
    ends = run(engine(profile), (0.0, asked))
    # Each of 200 tokens reads those before it, half of them on average; then 201 and 202 are read.
    assert asked.first_at == pytest.approx(0.2 + 1e-5 * 200 * 100)
    assert asked.first_at == pytest.approx(profile.prompt_s(200))
    assert ends[asked] - asked.first_at == pytest.approx(2 * 0.011 + 1e-6 * (201 + 202))
    assert profile.token_s(1, 201) == pytest.approx(0.011 + 1e-6 * 201)


def test_a_request_costs_something_when_it_starts() -> None:
    profile = replace(PROFILE, start_s=0.5)
    first, second = Sequence((), 250, 1), Sequence((), 30, 1)
    run(engine(profile), (0.0, first), (0.0, second))
    assert first.first_at == second.first_at == pytest.approx(2 * 0.5 + 0.28)
    alone = Sequence((), 250, 1)
    run(engine(profile), (0.0, alone))
    assert alone.first_at == pytest.approx(profile.prompt_s(250))


def test_an_arrival_finds_the_end_of_a_step_that_grows() -> None:
    profile = replace(PROFILE, decode_context_s=1e-4)
    model = engine(profile)
    model.submit(Sequence((), 100, 50), 0.0)
    start = model.due
    model.advance(start)
    ends = [start]
    for step in range(5):
        ends.append(ends[-1] + 0.011 + 1e-4 * (101 + step))
    model.submit(Sequence((), 10, 1), (ends[3] + ends[4]) / 2)
    assert model.due == pytest.approx(ends[4])
    assert model.room(ends[2] + 1e-6) == 1000 - 100 - 2


def test_an_engine_without_a_prefix_cache_computes_everything_again() -> None:
    model = engine(replace(PROFILE, prefix_cache="none"))
    first, second = Sequence(blocks(1, 20), 205, 1), Sequence(blocks(1, 20), 205, 1)
    run(model, (0.0, first), (1.0, second))
    assert (second.cached_tokens, model.computed_tokens) == (0, 410)
    assert model.room(2.0) == 1000


def test_a_slot_keeps_its_last_prompt_and_is_nobody_elses_while_it_runs() -> None:
    model = engine(replace(PROFILE, prefix_cache="slots", sequences_max=2))
    first, beside = Sequence(blocks(1, 20), 205, 100), Sequence(blocks(1, 20), 205, 1)
    run(model, (0.0, first), (0.001, beside))
    assert beside.cached_tokens == 0
    again = Sequence((*blocks(1, 12), 7, 8), 140, 1)
    run(model, (9.0, again))
    assert again.cached_tokens == 120
    # That was the slot of the one that ended first, and it has a new end now.
    both = [Sequence(blocks(1, 20), 205, 1), Sequence((*blocks(1, 12), 7, 8), 145, 1)]
    run(model, (10.0, both[0]), (10.0, both[1]))
    assert [each.cached_tokens for each in both] == [200, 140]


def test_of_slots_that_have_nothing_of_a_prompt_the_longest_unused_is_taken() -> None:
    model = engine(replace(PROFILE, prefix_cache="slots", sequences_max=2))
    run(model, (0.0, Sequence(blocks(1, 20), 200, 1)))
    run(model, (1.0, Sequence(blocks(2, 20), 200, 1)))
    run(model, (2.0, Sequence((), 9, 1)))
    kept, gone = Sequence(blocks(2, 20), 200, 1), Sequence(blocks(1, 20), 200, 1)
    run(model, (3.0, kept))
    run(model, (4.0, gone))
    assert (kept.cached_tokens, gone.cached_tokens) == (199, 0)


def test_with_slots_a_sequence_has_its_part_of_the_cache() -> None:
    model = engine(replace(PROFILE, prefix_cache="slots", sequences_max=4))
    assert model.fits(Sequence((), 240, 10)) and not model.fits(Sequence((), 240, 11))
    asked = [Sequence(blocks(number, 24), 240, 10) for number in range(4)]
    ends = run(model, *[(0.0, each) for each in asked])
    assert model.preemptions == 0 and len(ends) == 4
    assert (model.running, model.room(99.0), model.evicted_tokens) == (0, 1000, 0)


@pytest.mark.parametrize(
    "change",
    [
        {"prefill_tokens_per_s": 0.0},
        {"prefill_tokens_per_s": inf},
        {"prefill_tokens_per_s": nan},
        {"decode_base_s": 0.0},
        {"decode_base_s": 61.0},
        {"decode_per_sequence_s": -1.0},
        {"prefill_context_s": 1.5},
        {"decode_context_s": -1e-9},
        {"start_s": 1e9},
        {"sequences_max": 0},
        {"kv_tokens": 2**50},
        {"kv_tokens": 100, "prefix_cache": "slots"},
    ],
)
def test_a_profile_has_numbers_that_can_be(change: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        EngineProfile(**change)  # type: ignore[arg-type]


class Stepwise:
    """The same rules, written down step by step and without any thought of speed."""

    def __init__(self, profile: EngineProfile, entry_tokens: int) -> None:
        self.profile = profile
        self.size = entry_tokens
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.left: dict[Sequence, int] = {}
        self.own: dict[Sequence, int] = {}
        self.made: dict[Sequence, int] = {}
        self.idle: list[int] = []
        self.slots: list[tuple[int, ...]] = [()] * profile.sequences_max
        self.firsts: dict[Sequence, float] = {}
        self.ends: dict[Sequence, float] = {}

    def kept(self, sequence: Sequence) -> tuple[int, ...]:
        return () if self.profile.prefix_cache == "none" else sequence.blocks

    def used(self) -> set[int]:
        return {block for each in self.running for block in self.kept(each)}

    def room(self) -> int:
        return (
            self.profile.kv_tokens
            - len(self.used()) * self.size
            - sum(self.own[each] for each in self.running)
        )

    def evict(self) -> None:
        while len(self.idle) * self.size > self.room():
            self.idle.pop(0)

    def leave(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        if self.profile.prefix_cache == "slots":
            self.slots.append(sequence.blocks)
            return
        used = self.used()
        self.idle += [block for block in reversed(self.kept(sequence)) if block not in used]

    def start_in_slot(self) -> bool:
        if len(self.running) >= self.profile.sequences_max:
            return False
        sequence = self.waiting.pop(0)
        depths = []
        for slot in self.slots:
            depth = 0
            while depth < min(len(slot), len(sequence.blocks)):
                if slot[depth] != sequence.blocks[depth]:
                    break
                depth += 1
            depths.append(depth)
        del self.slots[depths.index(max(depths))]
        self.running.append(sequence)
        self.own[sequence] = 0
        self.left[sequence] = max(sequence.prompt_tokens - max(depths) * self.size, 1)
        return True

    def start(self) -> bool:
        if self.profile.prefix_cache == "slots":
            return self.start_in_slot()
        sequence = self.waiting[0]
        blocks = self.kept(sequence)
        used = self.used()
        there = used | set(self.idle)
        depth = 0
        while depth < len(blocks) and blocks[depth] in there:
            depth += 1
        tokens = sequence.prompt_tokens + self.made.get(sequence, 0)
        new = len(set(blocks) - used) * self.size
        own = tokens - len(blocks) * self.size
        running = len(self.running)
        spare = running + self.profile.kv_tokens // 100 if running else 0
        if running >= self.profile.sequences_max or new + own > self.room() - spare:
            return False
        self.waiting.pop(0)
        self.running.append(sequence)
        self.idle = [block for block in self.idle if block not in blocks]
        self.own[sequence] = own
        self.left[sequence] = max(tokens - depth * self.size, 1)
        self.evict()
        return True

    def step(self, now: float) -> float:
        """Do one step from `now` on, and return when it ends."""
        profile = self.profile
        decoding = [each for each in self.running if not self.left[each]]
        while self.profile.prefix_cache != "slots" and self.room() < len(decoding):
            last = self.running[-1]
            self.leave(last)
            self.waiting.insert(0, last)
            decoding = [each for each in self.running if not self.left[each]]
        budget = profile.chunk_tokens
        read, started = 0.0, 0
        context = sum(each.prompt_tokens + self.made[each] for each in decoding)
        done: list[Sequence] = []
        while budget:
            heads = [each for each in self.running if self.left[each]]
            if not heads:
                if not self.waiting or not self.start():
                    break
                started += 1
                heads = [self.running[-1]]
            head = heads[0]
            tokens = min(budget, self.left[head])
            before = head.prompt_tokens + self.made.get(head, 0) - self.left[head]
            read += sum(before + number + 0.5 for number in range(tokens))
            self.left[head] -= tokens
            budget -= tokens
            if not self.left[head]:
                done.append(head)
        prompt = profile.chunk_tokens - budget
        computing = prompt / profile.prefill_tokens_per_s + profile.prefill_context_s * read
        now += max(profile.decode_base_s, computing)
        now += profile.decode_per_sequence_s * len(decoding) + profile.decode_context_s * context
        now += profile.start_s * started
        for each in decoding:
            self.made[each] += 1
            self.own[each] += 1
        self.evict()
        for each in done:
            self.firsts.setdefault(each, now)
            self.made[each] = self.made.get(each, 0) + 1
        # Those that decode leave by when they started, and then those whose answers are one token.
        for each in [*decoding, *done]:
            if self.made[each] == each.output_tokens:
                self.leave(each)
                self.ends[each] = now
        return now

    def run(self, submitted: list[tuple[float, Sequence]]) -> None:
        coming = list(submitted)
        now = 0.0
        while coming or self.waiting or self.running:
            if not self.waiting and not self.running:
                now = max(now, coming[0][0])
            while coming and coming[0][0] <= now:
                self.waiting.append(coming.pop(0)[1])
            now = self.step(now)


@pytest.mark.parametrize("seed", range(60))
def test_steps_that_are_counted_end_as_steps_that_are_done(seed: int) -> None:
    random = Random(seed)
    profile = EngineProfile(
        prefill_tokens_per_s=1000,
        decode_base_s=0.01,
        decode_per_sequence_s=0.0017,
        chunk_tokens=random.choice((37, 100, 256)),
        sequences_max=random.choice((3, 8, 100)),
        kv_tokens=random.choice((600, 900, 2000)),
    )
    if seed % 2:
        profile = replace(
            profile,
            prefill_context_s=random.choice((0, 2e-5)),
            decode_context_s=random.choice((0, 1e-5)),
            start_s=random.choice((0, 0.03)),
            prefix_cache=random.choice(("paged", "none")),
        )
    if seed >= 40:
        slots = random.choice((2, 5))
        profile = replace(profile, prefix_cache="slots", sequences_max=slots, kv_tokens=slots * 520)
    submitted: list[tuple[float, Sequence]] = []
    at = 0.0
    for _ in range(80):
        at += random.expovariate(random.choice((1, 10)))
        size = random.randrange(1, 30)
        shared = random.randrange(size + 1)
        prompt = (
            *blocks(random.randrange(4), shared),
            *(random.getrandbits(60) for _ in range(size - shared)),
        )
        asked = Sequence(prompt, size * 10 + random.randrange(10), random.randrange(1, 200))
        submitted.append((at, asked))
    reference = Stepwise(profile, 10)
    reference.run(submitted)
    model = engine(profile)
    ends = run(model, *submitted)
    assert len(ends) == 80
    for _, asked in submitted:
        assert asked.first_at == pytest.approx(reference.firsts[asked], rel=1e-9)
        assert ends[asked] == pytest.approx(reference.ends[asked], rel=1e-9)
    assert model.room(at) == profile.kv_tokens
