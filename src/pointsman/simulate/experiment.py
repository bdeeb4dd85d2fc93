"""An experiment: one policy, one workload, one rate, several seeds. What the command line compares are these."""

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from functools import partial
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from pointsman.domain.policy import PolicyOptions, make_policy
from pointsman.simulate.knee import knee
from pointsman.simulate.measures import Measures, ServiceLevel, measure
from pointsman.simulate.profile import EngineProfile
from pointsman.simulate.run import Scenario, simulate
from pointsman.simulate.synthetic import (
    BLOCK_TOKENS,
    Bursts,
    Conversations,
    Documents,
    SystemPrompts,
)
from pointsman.simulate.traces import AZURE_BLOCK, MOONCAKE_BLOCK, AzureTrace, MooncakeTrace
from pointsman.simulate.workload import Arrival

__all__ = ["WORKLOADS", "Experiment", "Traffic", "find_knee", "run_once", "traffic"]

Maker = Callable[[float, int, int], Iterable[Arrival]]
"""Makes a workload of a rate (requests per second), a number of requests, and a seed."""


class Traffic(Struct, frozen=True):
    """Traffic by name: how it is made, the tokens of its blocks, and its own rate (0 for none)."""

    name: str
    make: Maker
    block_tokens: int = BLOCK_TOKENS
    rate: float = 0.0


WORKLOADS: Mapping[str, Maker] = {
    "agents": partial(Conversations, turns=12, pause_s=2.0, first_tokens=8000),
    "bursts": Bursts,
    "conversations": Conversations,
    "documents": Documents,
    "system_prompts": SystemPrompts,
}
"""The generated workloads by name."""


class Experiment(Struct, frozen=True, kw_only=True):
    """What one run needs, and can be sent to another process. `rate` is in requests per second."""

    policy: str
    traffic: Traffic
    rate: float
    workers: int = 16
    requests: int = 5000
    seed: int = 0
    gateways: int = 1
    level: ServiceLevel = ServiceLevel()
    profile: EngineProfile = EngineProfile()
    options: PolicyOptions = PolicyOptions()


def traffic(name: str) -> Traffic:
    """Return traffic by its name, or of a trace by its path: `.jsonl` (Mooncake) or `.csv` (Azure), maybe `.gz`.

    Raises ValueError for a name that is neither, TraceError, and OSError.
    """
    maker = WORKLOADS.get(name)
    if maker is not None:
        return Traffic(name, maker)
    path = Path(name)
    kind = next((each for each in path.suffixes if each in (".jsonl", ".csv")), "")
    if not kind:
        close = get_close_matches(name, WORKLOADS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(WORKLOADS)}"
        raise ValueError(f"no workload is called {name!r}, {hint} (or a .jsonl or .csv trace)")
    count, last = 0, 0.0
    for count, arrival in enumerate(_trace(path, kind, 1.0), 1):  # noqa: B007
        last = arrival.at
    if not last:
        raise ValueError(f"{name} has no requests that are apart in time")
    rate = count / last
    block = MOONCAKE_BLOCK if kind == ".jsonl" else AZURE_BLOCK
    return Traffic(name, partial(_replayed, path, kind, rate), block, rate)


def run_once(experiment: Experiment) -> Measures:
    """Run an experiment with its seed."""
    scenario = Scenario(
        workload=experiment.traffic.make(experiment.rate, experiment.requests, experiment.seed),
        policy=lambda random: make_policy(experiment.policy, experiment.options, random),
        workers=experiment.workers,
        profile=experiment.profile,
        gateways=experiment.gateways,
        block_tokens=experiment.traffic.block_tokens,
        seed=experiment.seed,
    )
    return measure(simulate(scenario), experiment.level)


def find_knee(experiment: Experiment) -> float:
    """Return the highest rate at which 95% of the requests keep to the service level. `rate` is tried first."""

    def good(rate: float) -> float:
        return run_once(replace(experiment, rate=rate)).good

    return knee(good, experiment.rate)


def _trace(path: Path, kind: str, load: float) -> Iterable[Arrival]:
    return MooncakeTrace(path, load=load) if kind == ".jsonl" else AzureTrace(path, load=load)


def _replayed(
    path: Path, kind: str, own: float, rate: float, requests: int, seed: int
) -> Iterable[Arrival]:
    # A trace is what it is: all of its requests, in its order; a seed only changes what is drawn elsewhere.
    return _trace(path, kind, rate / own)
