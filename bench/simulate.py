"""How many requests a second of one core simulates, policy by policy.

Run as `python bench/simulate.py TRACE.jsonl[.gz]` with a Mooncake trace. The fleet is 16 workers of the default
profile; the trace is read, decoded and gone through at each of `LOADS` times its own rate. Each figure is the best of 3
rounds of CPU time, all included, so it is the cost without disturbance, not a mean. The last line is the memory of the
whole process after all of them, and after the first policy has gone through the trace 8 times in a row.
"""

import resource
import sys
import time
from pathlib import Path
from random import Random

from pointsman.domain.policy import POLICIES
from pointsman.simulate.run import Scenario, simulate
from pointsman.simulate.traces import MooncakeTrace

FIRST = "least_outstanding"
LOADS = (1.0, 2.0, 3.0)
ROUNDS = 3


def per_second(trace: Path, policy: str, load: float, repeat: int = 1) -> float:
    """Return how many requests were simulated per second of CPU time."""
    workload = MooncakeTrace(trace, load, repeat, Random(1))
    began = time.process_time()
    outcome = simulate(Scenario(workload=workload, policy=policy))
    return len(outcome) / (time.process_time() - began)


def megabytes() -> int:
    """Return the most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def main() -> None:
    """Print the table."""
    trace = Path(sys.argv[1])
    print("requests/s, load".ljust(24) + "".join(f"{load:>10g}" for load in LOADS))
    for policy in sorted(POLICIES, key=lambda name: (name != FIRST, name)):
        best = [max(per_second(trace, policy, load) for _ in range(ROUNDS)) for load in LOADS]
        print(policy.ljust(24) + "".join(f"{each:>10,.0f}" for each in best), flush=True)
    before = megabytes()
    longer = per_second(trace, FIRST, LOADS[-1], 8)
    print(f"8 times in a row: {longer:,.0f}/s; {before} MB, and {megabytes()} MB after it")


if __name__ == "__main__":
    main()
