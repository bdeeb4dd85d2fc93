"""Whether a rule about hand-offs pays: against handing off always, never, and having no roles at all.

Run as `python bench/pairing.py [SEEDS]`. Every fleet has six engines of the default profile: three prefill and three
decode workers, and for `unified` six that do both. `never` leaves the prefill workers idle. All meet the same workloads
under the policy `affinity`; `quickest` knows the speeds of the profile, and `doubled` and `halved` take prefill for
twice as fast, and for half. Printed are means over seeds: of the seconds to the first token and to the last one, of the
share of answers within `LEVEL`, and of the prompts that were handed off.
"""

import sys
from collections.abc import Iterator
from math import isnan
from typing import Any

from msgspec.structs import replace

from pointsman.simulate.measures import ServiceLevel, measure
from pointsman.simulate.profile import EngineProfile
from pointsman.simulate.run import Scenario, simulate
from pointsman.simulate.sources import source_of

ENGINES = 6
REQUESTS = 1200
WARMING = 0.2
LEVEL = ServiceLevel.parse("ttft=2s,tpot=50ms")
GBIT_S = (100, 10)
WORKLOADS = (
    ("poisson:question=lognormal/200/1", (8.0, 16.0)),
    ("poisson:question=lognormal/1000/1", (8.0, 16.0)),
    ("poisson:question=lognormal/4000/1", (3.0, 5.0)),
    ("poisson:question=lognormal/16000/1", (0.75, 1.25)),
    ("sessions", (8.0, 16.0)),
    ("agents", (8.0, 14.0)),
    ("rag", (2.5, 5.0)),
)


def fleets(profile: EngineProfile) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what is compared: its name, and what of a scenario makes it."""
    roles = {"workers": 0, "prefill_workers": ENGINES // 2, "decode_workers": ENGINES // 2}
    speed = profile.prefill_tokens_per_s
    yield "unified", {"workers": ENGINES}
    yield "always", roles
    yield "never", {**roles, "disagg_min_tokens": sys.maxsize}
    for name, factor in (("quickest", 1.0), ("doubled", 2.0), ("halved", 0.5)):
        options = replace(profile.pairing(), prefill_tokens_per_s=speed * factor)
        yield name, {**roles, "pairing": options}


def figures(
    workload: str, load: float, seed: int, scenario: dict[str, Any]
) -> tuple[float, float, float, float]:
    """Return the means of one run."""
    drawn = source_of(workload).workload(load, REQUESTS, seed)
    outcome = simulate(Scenario(workload=drawn, policy="affinity", seed=seed, **scenario))
    first = round(len(outcome) * WARMING)
    measures = measure(outcome, LEVEL, WARMING)
    known = [[t for t in times[first:] if not isnan(t)] for times in (outcome.ttft, outcome.e2e)]
    ttft, e2e = [sum(times) / len(times) for times in known]
    return ttft, e2e, measures.good, measures.handed_off


def main() -> None:
    """Print a table for each workload, load and network."""
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    for workload, loads in WORKLOADS:
        for load in loads:
            for gbit_s in GBIT_S:
                profile = EngineProfile(transfer_bytes_per_s=gbit_s * 1e9 / 8)
                print(f"\n{workload}, {load:g}/s, {gbit_s} Gbit/s")
                for name, scenario in fleets(profile):
                    runs = [
                        figures(workload, load, seed, {**scenario, "profile": profile})
                        for seed in range(seeds)
                    ]
                    ttft, e2e, good, handed = [
                        sum(each) / seeds for each in zip(*runs, strict=True)
                    ]
                    print(
                        f"{name:10} ttft {ttft:7.3f}  e2e {e2e:7.2f}  good {good:6.1%}"
                        f"  handed off {handed:6.1%}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
