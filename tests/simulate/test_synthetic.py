"""Generated traffic: its order, its rate, what begins alike, and the same seed twice."""

from itertools import pairwise

import pytest

from pointsman.simulate.experiment import WORKLOADS, Experiment, find_knee, run_once, traffic
from pointsman.simulate.measures import ServiceLevel
from pointsman.simulate.synthetic import (
    BLOCK_TOKENS,
    Bursts,
    Conversations,
    Documents,
    SystemPrompts,
)


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_arrivals_are_in_order_at_the_rate_and_the_same_for_a_seed(name: str) -> None:
    make = WORKLOADS[name]
    arrivals = list(make(10.0, 3000, 1))
    assert len(arrivals) == 3000
    assert all(one.at <= other.at for one, other in pairwise(arrivals))
    assert 3000 / arrivals[-1].at == pytest.approx(10.0, rel=0.35)
    assert all(each.output_tokens >= 1 for each in arrivals)
    assert all(each.prompt_tokens == len(each.blocks) * BLOCK_TOKENS for each in arrivals)
    assert list(make(10.0, 3000, 1)) == arrivals
    assert list(make(10.0, 3000, 2)) != arrivals


def test_popular_applications_are_asked_most() -> None:
    arrivals = list(SystemPrompts(rate=1.0, requests=3000, applications=10))
    counts = sorted(
        [
            sum(each.blocks[0] == first for each in arrivals)
            for first in {a.blocks[0] for a in arrivals}
        ]
    )
    assert len(counts) == 10
    # 1 + 1/2 + ... + 1/10 is 2.93: a third of all for the first, a thirtieth for the last.
    assert counts[-1] / 3000 == pytest.approx(1 / 2.93, rel=0.15)
    assert counts[0] / 3000 == pytest.approx(0.1 / 2.93, rel=0.4)


def test_a_conversation_grows_and_a_document_stays() -> None:
    chats = list(Conversations(rate=5.0, requests=500))
    by_first: dict[int, tuple[int, ...]] = {}
    for each in chats:
        before = by_first.get(each.blocks[0], ())
        assert each.blocks[: len(before)] == before
        by_first[each.blocks[0]] = each.blocks
    assert len(by_first) < 250
    documents = list(Documents(rate=5.0, requests=500))
    shared = [each for each in documents if each.blocks[0] == documents[0].blocks[0]]
    heads = {each.blocks[:10] for each in shared}
    assert len(heads) == 1


def test_bursts_come_and_go() -> None:
    arrivals = list(Bursts(rate=10.0, requests=5000))
    per_second = [0] * (int(arrivals[-1].at) + 1)
    for each in arrivals:
        per_second[int(each.at)] += 1
    mean = sum(per_second) / len(per_second)
    variance = sum((each - mean) ** 2 for each in per_second) / len(per_second)
    assert variance > 3 * mean  # a Poisson process has 1
    calm = list(Bursts(rate=10.0, requests=200, burst=10.0, share=0.1))
    assert len(calm) == 200


def test_an_experiment_is_judged_and_has_a_knee() -> None:
    experiment = Experiment(
        policy="affinity",
        traffic=traffic("system_prompts"),
        rate=4.0,
        workers=2,
        requests=300,
        level=ServiceLevel(ttft=2.0, tpot=0.05),
    )
    found = run_once(experiment)
    assert found.good > 0.95
    assert found.hit_rate > 0.3
    assert find_knee(experiment) > 4.0


def test_traffic_that_is_unknown_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean conversations"):
        traffic("conversation")
    with pytest.raises(ValueError, match="there are agents"):
        traffic("xyz")
