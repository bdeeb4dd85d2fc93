"""No way of a request costs more than its bound. Nothing is timed: see bench/costs.py for what is counted.

The gateway is counted in a process of its own, where nothing else has filled caches and nothing else traces.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
try:
    from costs import BOUNDS, COMMAND, VERSION, Cost, bounds_of, count, objections, written
finally:
    sys.path.pop(0)

BENCH = Path(__file__).parents[2] / "bench" / "costs.py"
MEBIBYTE = 1 << 20
bounds = bounds_of(BOUNDS.read_text())


def counted(*arguments: str, seed: str = "random") -> dict[str, Cost]:
    command = [sys.executable, str(BENCH), "--json", *arguments]
    environ = {**os.environ, "PYTHONHASHSEED": seed}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {name: Cost(*figures) for name, figures in json.loads(done.stdout).items()}


@pytest.fixture(scope="module")
def costs() -> dict[str, Cost]:
    return counted()


@pytest.mark.slow
@pytest.mark.skipif(VERSION not in bounds, reason=f"Python {VERSION} has no bounds: {COMMAND}")
def test_nothing_costs_more_than_its_bound(costs: dict[str, Cost]) -> None:
    found = objections(costs, bounds[VERSION])
    if found:
        pytest.fail("\n".join([*found, f"If it is worth that: {COMMAND}"]), pytrace=False)


@pytest.mark.slow
def test_a_body_of_a_mebibyte_is_copied_once_and_costs_what_a_small_one_does(
    costs: dict[str, Cost],
) -> None:
    small, large = costs["json, 100 B"], costs["json, 1 MiB"]
    assert large.instructions < small.instructions + 150
    assert large.bytes < small.bytes + MEBIBYTE + 4096


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["power_of_two", "peak_ewma", "least_delay"])
def test_a_policy_that_draws_looks_at_no_more_of_a_thousand_workers_than_of_sixteen(
    policy: str, costs: dict[str, Cost]
) -> None:
    few, many = costs[f"{policy}, 16 workers"], costs[f"{policy}, 1000 workers"]
    assert many.instructions < 1.1 * few.instructions


@pytest.mark.slow
def test_neither_the_hash_seed_nor_the_loop_nor_another_run_changes_a_count() -> None:
    ways = ("--only", "json with")
    first = counted(*ways, seed="1")
    assert counted(*ways, seed="2") == first
    assert counted(*ways, "--loop", "asyncio", seed="3") == first


# What the counter sees.

BODY = msgspec.json.encode({"messages": [{"content": "x" * 100}] * 100})
SMALL = {"a": 1, "b": 2}


def nothing() -> None:
    pass


def plain() -> None:
    msgspec.json.decode(BODY, type=msgspec.Raw)


def copying() -> None:
    msgspec.json.decode(BODY, type=msgspec.Raw)
    dict(SMALL)


def calling() -> None:
    msgspec.json.decode(BODY, type=msgspec.Raw)
    nothing()


def decoding() -> None:
    msgspec.json.decode(BODY, type=dict[str, Any])


def copying_bytes() -> None:
    msgspec.json.decode(BODY[1:] and BODY, type=msgspec.Raw)


@pytest.mark.parametrize("dearer", [copying, calling])
def test_one_more_copy_or_call_is_seen(dearer: Callable[[], None]) -> None:
    assert count(dearer)[0] >= count(plain)[0] + 3


@pytest.mark.parametrize("dearer", [decoding, copying_bytes])
def test_work_inside_one_call_of_c_is_seen_by_what_it_allocates(dearer: Callable[[], None]) -> None:
    assert count(dearer)[1] > count(plain)[1] + len(BODY)


def test_the_same_work_has_the_same_count() -> None:
    assert len({count(copying)[0] for _ in range(5)}) == 1


# What is said of it.


def test_a_cost_above_its_bound_is_named_with_both_figures() -> None:
    (said,) = objections({"json": Cost(2301, 900)}, {"json": Cost(2295, 900)})
    assert said == "json: instructions grew from 2,295 to 2,301"


def test_a_bound_follows_what_has_become_cheaper() -> None:
    assert objections({"json": Cost(995, 995)}, {"json": Cost(1000, 1000)}) == []
    (said,) = objections({"json": Cost(900, 1000)}, {"json": Cost(1000, 1000)})
    assert said == "json: instructions fell from 1,000 to 900, and may stay there"


def test_a_block_that_stays_has_no_bound() -> None:
    (said,) = objections({"json": Cost(1, 1, 100)}, {"json": Cost(1, 1)})
    assert said == "json: blocks grew from 0 to 100"


def test_a_way_without_a_bound_and_a_bound_without_a_way_are_named() -> None:
    said = objections({"new": Cost(1, 1)}, {"old": Cost(1, 1)})
    assert said == ["old: there is no such way any more", "new: it has no bound"]


def test_bounds_are_read_as_they_were_written() -> None:
    some = {"3.9": {"json, 1 MiB": Cost(1, 2)}, "3.11": {"chunk": Cost(3, 4)}}
    assert bounds_of(written(some)) == some
    assert list(bounds_of(written(some))) == ["3.9", "3.11"]
