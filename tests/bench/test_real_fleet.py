"""What a fleet of real engines is asked, and what is made of the answers: all that needs no engine."""

import signal
import subprocess
import sys
import time
from collections import Counter
from math import isnan, nan
from pathlib import Path

import msgspec
import pytest

from pointsman.domain.request import InferenceRequest
from pointsman.simulate.profile import EngineProfile
from pointsman.simulate.sizes import Size

pytest.importorskip("httpx", reason="needs the extra `dev`")
sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
try:
    from fleet_arrivals import BLOCK_TOKENS, KEY_BYTES, Conditions, arrival, drawn, simulated
    from fleet_engines import Throttle, cpu_seconds
    from fleet_figures import Run, certain, csv_lines, kendall, paired, ranking, table
finally:
    sys.path.pop(0)

PREFIX = 256
CONDITIONS = Conditions(seconds=400.0, prefix=f"constant/{PREFIX}")
SHORT = Conditions(seconds=40.0)
PROFILE = EngineProfile(
    prefill_tokens_per_s=88.0,
    decode_base_s=0.027,
    decode_per_sequence_s=0.0,
    chunk_tokens=BLOCK_TOKENS,
    sequences_max=1,
    kv_tokens=1711,
)


def test_a_seed_draws_the_same_for_everybody() -> None:
    assert drawn(CONDITIONS, 1) == drawn(CONDITIONS, 1) != drawn(CONDITIONS, 2)


def test_what_is_drawn_has_the_rate_and_the_sizes_that_were_asked_for() -> None:
    asked = [each for seed in range(5) for each in drawn(CONDITIONS, seed)]
    assert len(asked) / (5 * CONDITIONS.seconds) == pytest.approx(CONDITIONS.rate, rel=0.1)
    assert all(0 <= each.at < CONDITIONS.seconds for each in asked)
    assert all(len(each.ids) + each.answer <= CONDITIONS.context for each in asked)
    assert min(len(each.ids) for each in asked) >= PREFIX + 12
    # About every second one is the first of a session of two turns on average.
    firsts = sum(len(each.ids) <= PREFIX + 36 for each in asked)
    assert firsts / len(asked) == pytest.approx(1 / Size.parse(CONDITIONS.turns).mean, abs=0.1)


def test_a_beginning_leaves_room_for_a_question() -> None:
    long = msgspec.structs.replace(CONDITIONS, prefix="lognormal/400/1")
    assert len({tuple(each.ids[:10]) for each in drawn(long, 1)}) == CONDITIONS.prefixes


def test_the_rate_is_the_same_at_the_beginning_and_at_the_end() -> None:
    times = [each.at for seed in range(8) for each in drawn(CONDITIONS, seed)]
    early = sum(at < CONDITIONS.seconds / 2 for at in times)
    assert early / len(times) == pytest.approx(0.5, abs=0.04)


def test_beginnings_are_as_popular_as_zipf_has_it() -> None:
    asked = [each for seed in range(1) for each in drawn(CONDITIONS, seed)]
    counts = Counter(tuple(each.ids[:PREFIX]) for each in asked)
    assert len(counts) == CONDITIONS.prefixes
    (_, most), *_, (_, least) = counts.most_common()
    assert most > 5 * least


def test_a_later_turn_begins_with_all_of_an_earlier_one() -> None:
    asked = drawn(CONDITIONS, 3)
    longest = max(asked, key=lambda each: len(each.ids))
    before = [each for each in asked if each.ids == longest.ids[: len(each.ids)]]
    assert len(before) > 1
    assert [len(each.ids) for each in before] == sorted(len(each.ids) for each in before)


def test_the_simulator_is_told_what_the_gateway_works_out_of_the_body() -> None:
    for asked in drawn(CONDITIONS, 1)[:50]:
        body = msgspec.json.encode(asked.ids)
        real = InferenceRequest(
            "m", "r", prompt=body, affinity_bytes=KEY_BYTES, block_bytes=BLOCK_TOKENS * 4
        )
        told = arrival(asked)
        modelled = InferenceRequest.of_blocks(
            "m", "r", told.blocks, told.prompt_tokens, BLOCK_TOKENS
        )
        assert modelled.prefix_key == real.prefix_key
        assert modelled.blocks[1:] == real.blocks[1:]
        assert modelled.prompt_tokens == real.prompt_tokens == len(asked.ids)


def test_blocks_are_shared_as_far_as_prompts_are() -> None:
    by_beginning: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
    whole = PREFIX // BLOCK_TOKENS
    for asked in drawn(CONDITIONS, 1):
        shared = arrival(asked).blocks[:whole]
        by_beginning.setdefault(tuple(asked.ids[:PREFIX]), set()).add(shared)
    assert all(len(each) == 1 for each in by_beginning.values())
    assert len(set.union(*by_beginning.values())) == CONDITIONS.prefixes


def test_a_policy_that_knows_caches_wins_where_caches_matter() -> None:
    warm = simulated(CONDITIONS, PROFILE, "cache_aware", 1)
    cold = simulated(CONDITIONS, PROFILE, "least_outstanding", 1)
    assert warm.hit_rate > cold.hit_rate + 0.1
    assert warm.goodput > cold.goodput


# Orders.


def test_a_ranking_is_by_the_figure_and_then_by_the_name() -> None:
    assert ranking({"b": 1.0, "a": 1.0, "c": 2.0}) == ["c", "a", "b"]


def test_tau_is_one_for_the_same_order_and_minus_one_for_the_reverse() -> None:
    one = {"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0}
    assert kendall(one, {name: value**2 for name, value in one.items()}) == 1.0
    assert kendall(one, {name: -value for name, value in one.items()}) == -1.0
    # One pair of six is the other way round.
    assert kendall(one, {**one, "a": 2.0, "b": 1.0}) == pytest.approx(4 / 6)


def test_tau_leaves_ties_out_on_both_sides() -> None:
    one, tied = {"a": 1.0, "b": 2.0, "c": 3.0}, {"a": 1.0, "b": 1.0, "c": 3.0}
    assert kendall(one, tied) == pytest.approx(2 / 6**0.5)
    assert kendall(one, tied) == kendall(tied, one)
    assert isnan(kendall(one, dict.fromkeys(one, 1.0)))


def test_orders_of_different_names_are_refused() -> None:
    with pytest.raises(ValueError, match="different names"):
        kendall({"a": 1.0}, {"b": 1.0})


def test_what_is_paired_is_narrower_than_what_is_not() -> None:
    hard = {0: 1.0, 1: 5.0, 2: 9.0}
    mean, margin = paired({seed: value + 1 for seed, value in hard.items()}, hard)
    assert (mean, margin) == (1.0, 0.0)
    with pytest.raises(ValueError, match="no seed"):
        paired({1: 1.0}, {2: 1.0})


# Reports.


def run(policy: str, seed: int, slow: float, **changed: object) -> Run:
    fields: dict[str, object] = {
        "policy": policy,
        "seed": seed,
        "conditions": SHORT,
        "profile": PROFILE,
        "at": [0.0, 10.0, 20.0, 30.0, 40.0],
        "ttft": [0.1, 1.0, 2.0 * slow, 3.0 * slow, None],
        "tpot": [0.1, 0.1, 0.1, None, None],
        "e2e": [0.2, 2.0, 3.0 * slow, 4.0 * slow, None],
        "prompt": [280] * 5,
        "output": [8, 8, 8, 1, 0],
        "cached": [0, 140, 140, 140, 0],
        "busy_s": [1.0, 1.0, 1.0, 5.0],
        "waited": 0.1,
        "late_s": 0.01,
        "load": 1.5,
        "began": "2026-12-03 08:00",
        **changed,
    }
    return msgspec.convert(fields, Run)


def test_the_figures_of_a_run_are_those_of_its_answers_without_the_warming_up() -> None:
    figures = run("affinity", 0, 2.0).measures()
    assert (figures.requests, figures.failed) == (4, 1)
    assert figures.good == 2 / 4, "one is lost, and one took 6 s"
    assert figures.goodput == pytest.approx(2 / 30)
    assert figures.hit_rate == pytest.approx(3 * 140 / (4 * 280))
    assert figures.ttft_p50 == 4.0
    assert figures.imbalance == 2.5


def test_a_run_comes_back_from_its_line() -> None:
    one = run("affinity", 0, 1.0)
    assert msgspec.json.decode(msgspec.json.encode(one), type=Run) == one


def test_a_report_has_both_orders_and_says_whether_they_agree() -> None:
    runs = [
        run(policy, seed, slow)
        for seed in (0, 1)
        for policy, slow in (("least_outstanding", 3.0), ("cache_aware", 1.0))
    ]
    lines = table(runs)
    assert lines[2].startswith("| `cache_aware` | 0.10 ± 0.00 |")
    assert "Measured: cache_aware, least_outstanding." in lines
    assert "Simulated: cache_aware, least_outstanding." in lines
    assert "Kendall's tau 1.00; the first three are the same." in lines
    assert (
        "In 1 of 1 pairs the simulator tells which is better, over 20 seeds; in 1 of these it is so measured."
        in lines
    )
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1


def test_pairs_that_only_chance_orders_are_in_no_order() -> None:
    pairs = certain(SHORT, PROFILE, ["cache_aware", "least_outstanding", "power_of_two"])
    assert ("cache_aware", "least_outstanding") in pairs
    assert ("cache_aware", "power_of_two") in pairs
    assert ("least_outstanding", "cache_aware") not in pairs
    assert certain(SHORT, PROFILE, ["affinity", "affinity"]) == []


def test_a_report_of_what_cannot_be_compared_is_refused() -> None:
    runs = [run("affinity", 0, 1.0), run("kv_cost", 0, 1.0), run("kv_cost", 1, 1.0)]
    with pytest.raises(ValueError, match="affinity does not have all the seeds"):
        table(runs)
    with pytest.raises(ValueError, match="different conditions"):
        table([*runs[:2], run("kv_cost", 1, 1.0, conditions=Conditions(rate=9.0))])


def test_the_figures_as_csv_have_a_line_for_each_run() -> None:
    head, *lines = csv_lines([run("affinity", 0, 1.0), run("kv_cost", 0, nan)])
    assert head.startswith("policy,seed,waited,load,requests,")
    assert [line.split(",")[:2] for line in lines] == [["affinity", "0"], ["kv_cost", "0"]]
    assert {line.count(",") for line in lines} == {head.count(",")}


# Shares of a core.


def test_a_throttled_process_gets_its_share_and_goes_on_afterwards() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            with Throttle([process.pid], 0.1):
                time.sleep(0.3)
                before, began = cpu_seconds(process.pid), time.monotonic()
                time.sleep(0.7)
                used = cpu_seconds(process.pid) - before
                seconds = time.monotonic() - began
            # On a busy machine it may get less, but never more than what was saved.
            assert 0 < used < 0.1 * seconds + Throttle.SAVED_S + 0.05
            before = cpu_seconds(process.pid)
            deadline = time.monotonic() + 10
            while cpu_seconds(process.pid) == before and time.monotonic() < deadline:
                time.sleep(0.01)
            assert cpu_seconds(process.pid) > before
        finally:
            process.send_signal(signal.SIGKILL)


def test_a_process_that_is_gone_has_used_nothing_and_stops_no_other() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    with Throttle([process.pid], 0.5):
        time.sleep(0.02)
    assert cpu_seconds(process.pid) == 0.0


def test_text_of_seeds_is_no_text_of_others() -> None:
    assert not {tuple(each.ids[:32]) for each in drawn(CONDITIONS, 1)} & {
        tuple(each.ids[:32]) for each in drawn(CONDITIONS, 2)
    }
