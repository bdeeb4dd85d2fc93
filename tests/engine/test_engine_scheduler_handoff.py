"""Prompts computed on one scheduler and generated from on another; cancelling by id; who goes first."""

from typing import Any

import pytest

from pointsman.engine.sampling import Sampled, SamplingParams
from pointsman.engine.scheduler import (
    GRID,
    Failed,
    Finished,
    Prefilled,
    Request,
    Scheduler,
    Started,
    Token,
)

LENGTHS = (1, 2, 16, 17, 31, 32, 33, 64, 65, 100)


@pytest.fixture
def make(fakes: Any) -> Any:
    def make(**options: Any) -> Scheduler:
        settings = {"slots": 4, "context": 512} | options
        return Scheduler(fakes.Machine(), fakes.Model(), now=lambda: 0.0, **settings)

    return make


def prompt_of(length: int) -> list[int]:
    return [(7 * i + length) % 256 for i in range(length)]


def ask(prompt: list[int], *, seed: int = 3, max_tokens: int = 12, **more: Any) -> Request:
    return Request(prompt, SamplingParams(seed=seed, top_logprobs=3), max_tokens, **more)


def play(scheduler: Scheduler, *requests: Request) -> list[list[Any]]:
    """Submit all at once and step to the end; the events of each."""
    answers: list[list[Any]] = [[] for _ in requests]
    for request, events in zip(requests, answers, strict=True):
        scheduler.submit(request, events.append)
    while scheduler.step():
        pass
    return answers


def tokens(events: list[Any]) -> list[Sampled]:
    return [event.sampled for event in events if isinstance(event, Token)]


def prefilled(scheduler: Scheduler, prompt: list[int]) -> Prefilled:
    ((*_, last),) = play(scheduler, ask(prompt, prefill_only=True))
    assert isinstance(last, Prefilled)
    return last


@pytest.mark.parametrize("length", LENGTHS)
def test_a_resumed_prompt_goes_on_as_if_it_had_been_computed_here(make: Any, length: int) -> None:
    prompt = prompt_of(length)
    (unified,) = play(make(), ask(prompt))
    first, state = prefilled(make(), prompt)
    (resumed,) = play(make(), ask(prompt, resume=state))
    assert resumed[0] == Started(length - 1)
    assert tokens(resumed) == tokens(unified)
    assert resumed[-1] == unified[-1]
    assert first == tokens(unified)[0]


@pytest.mark.parametrize("length", LENGTHS)
def test_what_is_exported_does_not_depend_on_what_was_cached(make: Any, length: int) -> None:
    prompt = prompt_of(length)
    warm = make(slots=1)
    assert prefilled(warm, prompt) == prefilled(warm, prompt)
    (again,) = play(warm, ask(prompt, prefill_only=True))
    assert again[0] == Started((length - 1) // GRID * GRID)


def test_a_state_that_was_computed_otherwise_is_noticed_by_these_tests(
    make: Any, fakes: Any
) -> None:
    prompt = prompt_of(40)
    (unified,) = play(make(), ask(prompt))
    odd = fakes.Machine()
    from pointsman.engine.llama import Row

    for i, token in enumerate(prompt):
        odd.decode([Row(0, i, token, False)])
    (resumed,) = play(make(), ask(prompt, resume=odd.export(0)))
    assert tokens(resumed) != tokens(unified)


def test_a_loaded_prefix_is_as_good_as_a_computed_one(make: Any) -> None:
    prompt = prompt_of(100)
    worker = make(slots=1)
    play(worker, ask(prompt, resume=prefilled(make(), prompt).state))
    longer = [*prompt, 1, 2, 3]
    (after,) = play(worker, ask(longer))
    assert after[0] == Started(96)
    assert tokens(after) == tokens(play(make(), ask(longer))[0])


def test_resumed_prefill_only_and_whole_requests_do_not_disturb_each_other(make: Any) -> None:
    prompts = [prompt_of(length) for length in LENGTHS]
    whole = [ask(prompt) for prompt in prompts]
    alone = [tokens(play(make(), request)[0]) for request in whole]
    resumed = [ask(prompt, resume=prefilled(make(), prompt).state) for prompt in prompts]
    handed = [ask(prompt, prefill_only=True) for prompt in prompts]
    mixed = [request for three in zip(whole, resumed, handed, strict=True) for request in three]
    answers = play(make(), *mixed)
    assert [tokens(events) for events in answers[0::3]] == alone
    assert [tokens(events) for events in answers[1::3]] == alone
    assert [events[-1].sampled for events in answers[2::3]] == [all_[0] for all_ in alone]


def test_a_prefill_tells_no_token_and_frees_its_slot(make: Any) -> None:
    scheduler = make(slots=1)
    (events,) = play(scheduler, ask(prompt_of(40), prefill_only=True))
    assert [type(event) for event in events] == [Started, Prefilled]
    assert scheduler.idle


def test_a_state_that_cannot_be_loaded_fails_its_request_and_no_other(
    make: Any, caplog: Any
) -> None:
    prompt = prompt_of(40)
    scheduler = make()
    bad, good = play(scheduler, ask(prompt, resume=b"x"), ask(prompt))
    assert [event.reason for event in bad] == ["broken"]
    assert tokens(good) == tokens(play(make(), ask(prompt))[0])
    assert "failed" in caplog.text


def test_a_state_that_cannot_be_exported_fails_its_request_and_no_other(
    make: Any, monkeypatch: Any, caplog: Any
) -> None:
    scheduler = make()

    def refuse(sequence: int) -> bytes:
        raise RuntimeError("no memory")

    monkeypatch.setattr(scheduler._machine, "export", refuse)
    bad, good = play(scheduler, ask([1], prefill_only=True), ask([2]))
    assert isinstance(bad[-1], Failed)
    assert tokens(good) == tokens(play(make(), ask([2]))[0])
    assert "failed" in caplog.text


@pytest.mark.parametrize("steps", [0, 1, 2, 6])
def test_a_request_is_cancelled_by_its_id_wherever_it_is(make: Any, steps: int) -> None:
    scheduler = make(slots=1)
    events: list[Any] = []
    other: list[Any] = []
    scheduler.submit(ask(prompt_of(80), max_tokens=400, id="a"), events.append)
    scheduler.submit(ask([1], id="b"), other.append)
    for _ in range(steps):
        scheduler.step()
    assert scheduler.cancel("a")
    assert not scheduler.cancel("a"), "it is on its way out"
    assert not scheduler.cancel("c")
    while scheduler.step():
        pass
    assert isinstance(events[-1], Failed)
    assert events[-1].reason == "cancelled"
    assert isinstance(other[-1], Finished)


def test_a_waiting_request_is_cancelled_by_its_id(make: Any) -> None:
    scheduler = make(slots=1)
    scheduler.submit(ask([1], max_tokens=400), lambda event: None)
    scheduler.step()
    events: list[Any] = []
    scheduler.submit(ask([1], id="b"), events.append)
    assert scheduler.cancel("b")
    scheduler.step()
    assert [event.reason for event in events] == ["cancelled"]
    assert scheduler.load.queue_depth == 0


def test_an_abort_counts_what_it_ends_and_nothing_twice(make: Any) -> None:
    scheduler = make(slots=1)
    ends: list[list[Any]] = [[], [], []]
    given_up = scheduler.submit(ask([1], max_tokens=400), lambda event: None)
    for events in ends:
        scheduler.submit(ask([1], max_tokens=400), events.append)
    scheduler.step()
    given_up.cancel()
    assert scheduler.abort("closing") == 3
    assert scheduler.abort("closing") == 0
    assert not scheduler.step()
    assert [events[-1] for events in ends] == [Failed("draining", "closing")] * 3


def test_who_is_condemned_while_its_last_batch_runs_does_not_end_well(
    make: Any, monkeypatch: Any
) -> None:
    scheduler = make()
    events: list[Any] = []
    scheduler.submit(ask([1], prefill_only=True), events.append)
    export = scheduler._machine.export

    def slow(sequence: int) -> bytes:
        assert scheduler.abort("closing") == 1
        return bytes(export(sequence))

    monkeypatch.setattr(scheduler._machine, "export", slow)
    scheduler.step()
    assert events[-1] == Failed("draining", "closing")


def test_a_higher_priority_goes_first_and_among_equals_the_older(make: Any) -> None:
    scheduler = make(slots=1)
    order: list[str] = []
    for name, priority in (("a", 0), ("b", -5), ("c", 7), ("d", 7), ("e", 0)):
        request = ask([1], max_tokens=1, id=name, priority=priority)
        scheduler.submit(
            request,
            lambda event, name=name: order.append(name) if isinstance(event, Started) else None,
        )
    while scheduler.step():
        pass
    assert order == ["c", "d", "a", "e", "b"]
