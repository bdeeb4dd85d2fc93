"""Policies with constants of their own: what a command line can say, and what it is told where that is wrong."""

import pytest

from pointsman.domain.policy import PolicyOptions
from pointsman.simulate.compare import Combination, Experiment, Source, combinations, run
from pointsman.simulate.measures import ServiceLevel
from pointsman.simulate.synthetic import recipe_of
from pointsman.simulate.variants import variant_of


def test_a_bare_name_leaves_the_options_as_they_are() -> None:
    options = PolicyOptions(load_factor=2.0)
    assert variant_of("affinity", options) == ("affinity", options)
    assert variant_of("affinity", options)[1] is options


def test_options_are_changed_and_the_others_stay() -> None:
    name, options = variant_of(
        "cache_aware:balance_abs=8,balance_rel=1.1", PolicyOptions(tie_break="salted", salt=b"1")
    )
    assert name == "cache_aware"
    assert options == PolicyOptions(tie_break="salted", salt=b"1", balance_abs=8, balance_rel=1.1)
    assert type(options.balance_abs) is int


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("a:balance_ab=1", "policy a: there is no 'balance_ab', did you mean balance_abs?"),
        ("a:salt=1", "policy a: there is no 'salt', there are .*"),
        ("a:prefix_index=1", "policy a: there is no 'prefix_index', did you mean .*"),
        ("a:balance_abs=1.5", "policy a: balance_abs: '1.5' is no whole number"),
        ("a:balance_rel=x", "policy a: balance_rel: 'x' is no number"),
        ("a:balance_rel=", "policy a: balance_rel: '' is no number"),
        ("a:balance_rel=-1", "policy a: balance_rel: '-1' is less than 0, or no finite number"),
        ("a:balance_rel=inf", "policy a: balance_rel: 'inf' is less than 0, or no finite number"),
    ],
)
def test_what_is_wrong_is_told_in_a_line(text: str, error: str) -> None:
    with pytest.raises(ValueError, match=f"^{error}$".replace("?", r"\?")):
        variant_of(text, PolicyOptions())


def test_a_variant_is_the_policy_with_these_options() -> None:
    source = Source(recipe=recipe_of("shared:prefixes=5"))
    experiment = Experiment(source=source, level=ServiceLevel(), requests=300, workers=4)
    changed = Experiment(
        source=source,
        level=ServiceLevel(),
        requests=300,
        workers=4,
        options=PolicyOptions(prefill_load_scale=50.0),
    )
    plain, variant = "kv_cost", "kv_cost:prefill_load_scale=50"
    first, other = (run(experiment, each) for each in combinations([plain, variant], [8.0], 1))
    assert other.combination == Combination(variant, 8.0, 0)
    assert other.measures == run(changed, Combination(plain, 8.0, 0)).measures
    assert other.measures.hit_rate > first.measures.hit_rate
