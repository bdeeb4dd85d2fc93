"""Batching, fairness, cancellation, limits and draining, on a machine that notices the shape of every batch."""

import random
from typing import Any

import pytest

from pointsman.engine.sampling import SamplingParams
from pointsman.engine.scheduler import (
    GRID,
    Draining,
    Failed,
    Finished,
    Load,
    QueueFull,
    Request,
    Scheduler,
    Started,
    Token,
)


class Clock:
    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make(fakes: Any, clock: Clock) -> Any:
    def make(script: Any = None, **options: Any) -> Scheduler:
        settings = {"slots": 4, "context": 512} | options
        return Scheduler(fakes.Machine(script), fakes.Model(), now=clock, **settings)

    return make


def ask(prompt: list[int], *, seed: int = 0, max_tokens: int = 12, **more: Any) -> Request:
    return Request(prompt, SamplingParams(seed=seed, **more), max_tokens)


def finish(scheduler: Scheduler) -> None:
    while scheduler.step():
        pass


def tokens(events: list[Any]) -> list[int]:
    return [event.sampled.token for event in events if isinstance(event, Token)]


def alone(make: Any, request: Request) -> list[int]:
    events: list[Any] = []
    scheduler = make()
    scheduler.submit(request, events.append)
    finish(scheduler)
    return tokens(events)


def prompts(count: int) -> list[list[int]]:
    source = random.Random(4)
    return [[source.randrange(256) for _ in range(source.randrange(1, 150))] for _ in range(count)]


def test_equal_seeds_give_equal_tokens_alone_and_in_any_company(make: Any) -> None:
    requests = [ask(prompt, seed=i) for i, prompt in enumerate(prompts(30))]
    expected = [alone(make, request) for request in requests]
    source = random.Random(8)
    scheduler = make()
    answers: list[list[Any]] = [[] for _ in requests]
    waiting = list(zip(requests, answers, strict=True))
    while waiting or not scheduler.idle:
        for _ in range(source.randrange(3)):
            if waiting:
                request, events = waiting.pop()
                scheduler.submit(request, events.append)
        scheduler.step()
    assert [tokens(events) for events in answers] == expected


def test_a_reused_prefix_changes_the_work_and_not_the_answer(make: Any) -> None:
    prompt = prompts(1)[0][:5] + list(range(100))
    expected = alone(make, ask(prompt))
    scheduler = make()
    for cached in (0, 96):
        events: list[Any] = []
        scheduler.submit(ask(prompt), events.append)
        finish(scheduler)
        assert events[0] == Started(cached)
        assert tokens(events) == expected


def test_generated_tokens_are_not_reused_for_they_were_computed_one_by_one(make: Any) -> None:
    first: list[Any] = []
    scheduler = make()
    prompt = list(range(70))
    scheduler.submit(ask(prompt, max_tokens=60), first.append)
    finish(scheduler)
    longer = [*prompt, *tokens(first), 1, 2, 3]
    second: list[Any] = []
    scheduler.submit(ask(longer), second.append)
    finish(scheduler)
    assert second[0] == Started(64)
    assert tokens(second) == alone(make, ask(longer))


def test_a_prompt_goes_to_the_slot_that_holds_it_and_others_to_the_longest_unused(
    make: Any,
) -> None:
    scheduler = make(slots=2)
    a, b, c = ([letter] * 40 for letter in (1, 2, 3))
    seen = []
    for prompt in (a, b, a, c, a, b):
        events: list[Any] = []
        scheduler.submit(ask(prompt), events.append)
        finish(scheduler)
        seen.append(events[0].cached_tokens)
    assert seen == [0, 0, 32, 0, 32, 0]


def test_a_prompt_that_ends_on_the_grid_still_computes_its_last_token_alone(make: Any) -> None:
    scheduler = make()
    prompt = [7] * (2 * GRID)
    for cached in (0, GRID):
        events: list[Any] = []
        scheduler.submit(ask(prompt, max_tokens=1), events.append)
        finish(scheduler)
        assert events[0] == Started(cached)
        assert len(scheduler._machine.batches[-1]) == 1
        assert tokens(events) == alone(make, ask(prompt, max_tokens=1))


def test_a_long_prompt_does_not_stop_running_streams(make: Any) -> None:
    scheduler = make()
    short: list[Any] = []
    scheduler.submit(ask([1], max_tokens=100), short.append)
    scheduler.step()
    scheduler.submit(ask([2] * 300), lambda event: None)
    for expected in range(2, 8):
        scheduler.step()
        assert len(tokens(short)) == expected


def test_an_answer_ends_at_the_end_token_which_counts_but_is_not_told(
    make: Any, fakes: Any
) -> None:
    events: list[Any] = []
    scheduler = make(fakes.answering("Hi", prompt_length=3))
    scheduler.submit(ask([1, 2, 3], temperature=0), events.append)
    finish(scheduler)
    assert [event.text for event in events if isinstance(event, Token)] == ["H", "i"]
    assert events[-1] == Finished("stop", "", 3)


def test_a_stop_string_ends_the_answer_at_once(make: Any, fakes: Any) -> None:
    events: list[Any] = []
    scheduler = make(fakes.answering("one, two, three", prompt_length=1))
    scheduler.submit(Request([1], SamplingParams(temperature=0), 50, [", t"]), events.append)
    finish(scheduler)
    assert "".join(event.text for event in events[1:]) == "one"
    assert events[-1] == Finished("stop", "", 6)


def test_an_answer_at_its_limit_sets_free_what_was_held(make: Any, fakes: Any) -> None:
    events: list[Any] = []
    scheduler = make(fakes.answering("abcdef", prompt_length=1))
    scheduler.submit(Request([1], SamplingParams(temperature=0), 3, ["bcx"]), events.append)
    finish(scheduler)
    assert events[-1] == Finished("length", "bc", 3)


def test_the_context_is_a_limit_too(make: Any) -> None:
    events: list[Any] = []
    scheduler = make(context=64)
    scheduler.submit(ask([1] * 60, max_tokens=1000), events.append)
    finish(scheduler)
    assert events[-1] == Finished("length", "", 4)


@pytest.mark.parametrize(("length", "limit"), [(0, 1), (512, 1), (3, 0)])
def test_what_cannot_fit_is_refused(make: Any, length: int, limit: int) -> None:
    with pytest.raises(ValueError):
        make().submit(ask([1] * length, max_tokens=limit), lambda event: None)


@pytest.mark.parametrize("steps", [0, 1, 4, 12])
def test_a_cancelled_generation_frees_its_slot_at_the_next_step(make: Any, steps: int) -> None:
    events: list[Any] = []
    scheduler = make(slots=1)
    generation = scheduler.submit(ask([1] * 100, max_tokens=100), events.append)
    other: list[Any] = []
    scheduler.submit(ask([2] * 40), other.append)
    for _ in range(steps):
        scheduler.step()
    told = len(events)
    generation.cancel()
    scheduler.step()
    assert len(events) == told
    assert scheduler.load.running == 1
    finish(scheduler)
    assert tokens(other) == alone(make, ask([2] * 40))


def test_the_queue_is_bounded_and_free_slots_do_not_count_as_queue(make: Any) -> None:
    scheduler = make(slots=2, queue_capacity=1)
    for _ in range(3):
        scheduler.submit(ask([1]), lambda event: None)
    with pytest.raises(QueueFull):
        scheduler.submit(ask([1]), lambda event: None)
    scheduler.step()
    assert scheduler.load[:2] == (1, 2)
    with pytest.raises(QueueFull):
        scheduler.submit(ask([1]), lambda event: None)
    finish(scheduler)
    scheduler.submit(ask([1]), lambda event: None)


def test_who_waits_too_long_is_told(make: Any, clock: Clock) -> None:
    scheduler = make(slots=1, queue_deadline=30.0)
    running: list[Any] = []
    late: list[Any] = []
    scheduler.submit(ask([1], max_tokens=100), running.append)
    scheduler.submit(ask([1]), late.append)
    clock.time = 29.9
    scheduler.step()
    assert late == []
    clock.time = 30.0
    scheduler.step()
    assert [event.reason for event in late] == ["overloaded"]
    assert not isinstance(running[-1], Failed)


def test_draining_refuses_new_work_and_finishes_what_it_has(make: Any) -> None:
    scheduler = make(slots=1)
    answers: list[list[Any]] = [[], []]
    for events in answers:
        scheduler.submit(ask([1] * 40), events.append)
    scheduler.step()
    scheduler.drain()
    with pytest.raises(Draining):
        scheduler.submit(ask([1]), lambda event: None)
    assert scheduler.load.draining
    finish(scheduler)
    assert all(isinstance(events[-1], Finished) for events in answers)
    assert scheduler.wait_idle(0)


def test_an_abort_ends_what_runs_and_what_waits(make: Any) -> None:
    scheduler = make(slots=1)
    answers: list[list[Any]] = [[], []]
    for events in answers:
        scheduler.submit(ask([1] * 40), events.append)
    scheduler.step()
    assert not scheduler.wait_idle(0)
    scheduler.abort("closing")
    assert not scheduler.step()
    assert [events[-1] for events in answers] == [Failed("draining", "closing")] * 2
    assert scheduler.wait_idle(0)


def test_blocks_are_counted_in_sixteens_of_what_is_computed(make: Any) -> None:
    scheduler = make(slots=2, context=256)
    assert scheduler.load == Load(0, 0, 32, 32, False)
    scheduler.submit(ask([1] * 50, max_tokens=20), lambda event: None)
    free = []
    for _ in range(4):
        scheduler.step()
        free.append(scheduler.load.kv_free_blocks)
    # 32 tokens, then the other 17 and the last one, then one more at a time.
    assert free == [30, 28, 28, 28]
    finish(scheduler)
    assert scheduler.load == Load(0, 0, 32, 32, False)


def test_a_failed_batch_ends_its_sequences_and_poisons_no_later_one(make: Any, caplog: Any) -> None:
    scheduler = make()
    events: list[Any] = []
    prompt = [1] * 80
    scheduler.submit(ask(prompt), events.append)
    scheduler.step()
    scheduler._machine.broken = True
    scheduler.step()
    assert [event.reason for event in events[1:]] == ["broken"]
    assert "failed" in caplog.text
    scheduler._machine.broken = False
    again: list[Any] = []
    scheduler.submit(ask(prompt), again.append)
    finish(scheduler)
    assert again[0] == Started(0)
    assert tokens(again) == alone(make, ask(prompt))
