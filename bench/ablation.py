"""What each term of least_delay is worth: goodput with all of them, and without one at a time.

    python bench/ablation.py TRACE [--seeds 2]

TRACE is Mooncake's conversation trace (JSON lines, maybe gzipped), on 16 workers of the default profile at multiples of
its own rate; beside it two drawn workloads near their knees. Good is a first token within 2 s and 50 ms per token. The
table is Markdown: share of good requests.
"""

import argparse
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from math import inf
from statistics import fmean
from typing import NamedTuple

from pointsman.domain.policy import least_delay
from pointsman.simulate.compare import Combination, Experiment, run
from pointsman.simulate.measures import ServiceLevel
from pointsman.simulate.sources import source_of

WITHOUT: Mapping[str, Mapping[str, float]] = {
    "all of it": {},
    "work is worth avoiding (WORK 4 -> 1)": {"WORK": 1.0},
    "those who are answered wait (MEETING)": {"MEETING": 0.0},
    "its answer waits for others' prompts": {"ANSWER_MAX_S": 0.0},
    "a larger batch is slower (CROWD)": {"CROWD": 0.0},
    "who is late anyway holds nobody up (LATE)": {"LATE": 1.0},
    "being late costs (MISS_S)": {"MISS_S": 0.0},
    "both of the target": {"LATE": 1.0, "MISS_S": 0.0},
    "measured speeds": {"ENOUGH": inf, "UNPROVEN": 1.0},
    "reported hits": {"SURE_TOKENS": inf},
    "all but WORK": {
        "MEETING": 0.0, "ANSWER_MAX_S": 0.0, "CROWD": 0.0, "LATE": 1.0, "MISS_S": 0.0,
    },
}  # fmt: skip
LEVEL = ServiceLevel(ttft=2.0, tpot=0.05)


class Point(NamedTuple):
    """A workload at a load."""

    workload: str
    load: float
    requests: int


def points(trace: str) -> list[Point]:
    """Return the columns of the table."""
    moon = [Point(trace, load, 12_031) for load in (2.0, 3.0, 3.3)]
    return [*moon, Point("shared", 100.0, 4000), Point("agents", 120.0, 4000)]


def good(without: str, point: Point, seed: int) -> float:
    """Return the share of good requests of one run."""
    former = {name: getattr(least_delay, name) for name in WITHOUT[without]}
    try:
        for name, value in WITHOUT[without].items():
            setattr(least_delay, name, value)
        experiment = Experiment(
            source=source_of(point.workload), level=LEVEL, requests=point.requests
        )
        return run(experiment, Combination("least_delay", point.load, seed)).measures.good
    finally:
        for name, value in former.items():
            setattr(least_delay, name, value)


def table(columns: Sequence[Point], seeds: int) -> str:
    """Return the table, a row for each of what is left out."""
    names = [
        f"{'trace' if each.requests > 4000 else each.workload} {each.load:g}" for each in columns
    ]
    lines = [f"| without | {' | '.join(names)} |", "| --- |" + " --- |" * len(names)]
    with ProcessPoolExecutor() as pool:
        runs = {
            (without, point): [pool.submit(good, without, point, seed) for seed in range(seeds)]
            for without in WITHOUT
            for point in columns
        }
        for without in WITHOUT:
            cells = [fmean(each.result() for each in runs[without, point]) for point in columns]
            lines.append(f"| {without} | {' | '.join(f'{cell:.3f}' for cell in cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace")
    parser.add_argument("--seeds", type=int, default=2)
    arguments = parser.parse_args()
    print(table(points(arguments.trace), arguments.seeds))
