"""Workloads that are drawn: the same from one seed, as many as asked, and prompts that begin alike as they should."""

from itertools import pairwise
from math import inf, isclose
from random import Random
from statistics import fmean, pvariance

import pytest

from pointsman.simulate.prompts import Prompt
from pointsman.simulate.sizes import (
    Size,
    constant,
    exponential,
    geometric,
    lognormal,
    nearest,
    uniform,
)
from pointsman.simulate.synthetic import RECIPES, Recipe, Synthetic, recipe_of
from pointsman.simulate.workload import Arrival, ClosedLoop


def played(workload: Synthetic, answer_s: float = 0.5) -> list[Arrival]:
    """Return all arrivals where every answer takes the same time."""
    found = []
    for arrival in workload:
        following: Arrival | None = arrival
        while following is not None:
            found.append(following)
            following = workload.next_after(following, following.at + answer_s)
    return sorted(found, key=lambda each: each.at)


def drawn(recipe: Recipe, *, rate: float = 10.0, requests: int = 2000, seed: int = 1) -> Synthetic:
    return Synthetic(recipe, rate, requests, Random(seed))


@pytest.mark.parametrize("name", RECIPES)
def test_one_seed_draws_one_workload(name: str) -> None:
    recipe = RECIPES[name]
    assert played(drawn(recipe)) == played(drawn(recipe))
    assert played(drawn(recipe)) != played(drawn(recipe, seed=2))


@pytest.mark.parametrize("name", RECIPES)
def test_there_are_as_many_requests_as_asked_for_at_the_rate_asked_for(name: str) -> None:
    recipe = RECIPES[name]
    arrivals = played(drawn(recipe, rate=10.0, requests=20_000), answer_s=0.0)
    if recipe.turns == constant(1):
        assert len(arrivals) == 20_000
    assert isclose(len(arrivals), 20_000, rel_tol=0.1)
    assert isclose(len(arrivals) / arrivals[-1].at, 10.0, rel_tol=0.15)
    assert all(each.prompt_tokens >= 1 and each.output_tokens >= 1 for each in arrivals)
    assert all(len(each.blocks) == each.prompt_tokens // 128 for each in arrivals)


def test_bursts_are_unlike_a_poisson_process_of_the_same_rate() -> None:
    def dispersion(recipe: Recipe) -> float:
        """The variance of arrivals per second in their mean: 1 for a Poisson process."""
        counts = [0] * 1001
        for each in drawn(recipe, requests=10_000):
            counts[min(int(each.at), 1000)] += 1
        return pvariance(counts[:900]) / fmean(counts[:900])

    assert isclose(dispersion(RECIPES["shared"]), 1.0, rel_tol=0.2)
    assert dispersion(RECIPES["bursty"]) > 5


def test_the_next_prompt_begins_with_the_former_one_and_its_answer() -> None:
    recipe = Recipe(
        turns=constant(4), question=constant(200), answer=constant(100), think_s=constant(2)
    )
    workload = drawn(recipe, requests=400)
    assert isinstance(workload, ClosedLoop)
    first = next(iter(workload))
    turns = [first]
    while (turn := workload.next_after(turns[-1], turns[-1].at + 1.0)) is not None:
        turns.append(turn)
    assert [each.prompt_tokens for each in turns] == [200, 500, 800, 1100]
    assert all(b.blocks[: len(a.blocks)] == a.blocks for a, b in pairwise(turns))
    assert [b.at - a.at for a, b in pairwise(turns)] == pytest.approx([3.0] * 3)
    assert {each.session for each in turns} == {first.session}


def test_a_session_ends_with_its_context_and_with_the_time() -> None:
    recipe = Recipe(turns=constant(9), question=constant(300), answer=constant(100), context=1000)
    workload = drawn(recipe, requests=900)
    first = next(iter(workload))
    second = workload.next_after(first, 1.0)
    assert second is not None and workload.next_after(second, 2.0) is None
    # What is longer than the context from the beginning is asked once.
    (only, *_) = drawn(Recipe(turns=constant(9), question=constant(2000), context=1000))
    assert only.prompt_tokens == 2000
    late = drawn(recipe, requests=900)
    first = next(iter(late))
    assert late.next_after(first, 1e9) is None
    assert late.next_after(first, 1.0) is None


def test_popular_beginnings_are_popular_as_zipf_says() -> None:
    recipe = Recipe(prefixes=50, prefix=constant(256), question=constant(128))
    counts: dict[tuple[int, ...], int] = {}
    for each in drawn(recipe, requests=20_000):
        counts[each.blocks[:2]] = counts.get(each.blocks[:2], 0) + 1
    ranked = sorted(counts.values(), reverse=True)
    assert len(ranked) == 50
    assert isclose(ranked[0] / ranked[1], 2.0, rel_tol=0.15)
    assert isclose(ranked[0] / ranked[9], 10.0, rel_tol=0.2)


def test_a_preamble_is_what_all_begin_with() -> None:
    first, *others = drawn(RECIPES["rag"], requests=50)
    assert all(each.blocks[:2] == first.blocks[:2] for each in others)


def test_prompts_share_blocks_exactly_as_far_as_their_texts_do() -> None:
    system = Prompt.empty(16).plus(1, 20)
    assert system.blocks == Prompt.empty(16).plus(1, 40).blocks[:1]
    one, other = system.plus(2, 50), system.plus(2, 12)
    assert (len(one.blocks), len(other.blocks)) == (4, 2)
    assert one.blocks[:2] == other.blocks
    # The same text at another place is something else.
    assert Prompt.empty(16).plus(2, 32).blocks[0] not in one.blocks
    assert (
        Prompt.empty(16).plus(1, 16).plus(2, 16).blocks[1] != Prompt.empty(16).plus(1, 32).blocks[1]
    )
    assert system.plus(3, 0).blocks == system.blocks


@pytest.mark.parametrize(
    ("size", "mean", "least"),
    [
        (constant(200), 200, 200),
        (uniform(100, 300), 200, 100),
        (exponential(200), 200, 0),
        (geometric(8), 8, 1),
        (geometric(1), 1, 1),
        (lognormal(200, 0.5), 226.6, 0),
    ],
)
def test_a_size_has_its_mean(size: Size, mean: float, least: float) -> None:
    random = Random(1)
    draws = [size.draw(random) for _ in range(20_000)]
    assert isclose(fmean(draws), mean, rel_tol=0.03)
    assert isclose(size.mean, mean, rel_tol=0.001)
    assert min(draws) >= least
    assert Size.parse(str(size)) == size


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("lognormal/200", "lognormal has 2 numbers, not 1"),
        ("lognorml/200/1", "did you mean lognormal?"),
        ("zzz/1", "there are constant, exponential"),
        ("constant/x", "x are no numbers"),
        ("constant/-1", "0 or more"),
        ("constant/inf", "0 or more"),
        ("lognormal/0/1", "a median must be more than 0"),
        ("uniform/3/1", "3 is more than 1"),
        ("", "are no numbers"),
    ],
)
def test_a_size_that_is_none_is_told(text: str, error: str) -> None:
    with pytest.raises(ValueError, match=error.replace("?", r"\?")):
        Size.parse(text)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("sesions", "no workload is called 'sesions', did you mean sessions?"),
        ("zzz", "no workload is called 'zzz', there are agents, bursty"),
        ("rag:prefixs=3", "workload rag: there is no 'prefixs', did you mean prefixes?"),
        ("rag:prefixes=1.5", "workload rag: prefixes: '1.5' is no whole number"),
        ("rag:zipf=x", "workload rag: zipf: 'x' is no number"),
        ("rag:zipf=-1", "workload rag: zipf: '-1' is less than 0"),
        ("rag:burst=0.5", "workload rag: burst: '0.5' is less than 1"),
        ("rag:calm_s=0", "workload rag: calm_s: '0' is not more than 0"),
        ("rag:turns=uniform/1", "workload rag: turns: 'uniform/1': uniform has 2 numbers, not 1"),
    ],
)
def test_a_recipe_that_is_none_is_told_with_what_was_meant(text: str, error: str) -> None:
    with pytest.raises(ValueError) as raised:
        recipe_of(text)
    assert str(raised.value).startswith(error)
    assert "\n" not in str(raised.value)


def test_a_recipe_is_changed_by_its_keys() -> None:
    recipe = recipe_of("bursty:burst=3,prefixes=7,prefix=constant/9,zipf=0")
    assert (recipe.burst, recipe.prefixes, str(recipe.prefix)) == (3.0, 7, "constant/9")
    assert recipe_of("bursty") == RECIPES["bursty"]
    assert nearest("x", ["b", "a"]) == "there are a, b"
    assert inf > recipe.calm_s
