"""One simulated run: a workload, gateways that route it, and modelled engines that answer, on a virtual clock.

The registry, the router, the leases and the policy are those of the gateway itself; nothing here knows how they decide.
"""

from collections.abc import Mapping
from math import inf
from types import MappingProxyType
from typing import NamedTuple

from msgspec import Struct

from pointsman.domain.policy import PolicyFactory, PolicyOptions
from pointsman.simulate.outcome import Outcome
from pointsman.simulate.profile import EngineProfile
from pointsman.simulate.workload import Workload

__all__ = ["Failure", "Scenario", "simulate"]

PROFILE = EngineProfile()
OPTIONS = PolicyOptions()


class Failure(NamedTuple):
    """The worker of this number (from 0) dies at `at` seconds, and comes back, with nothing cached, at `back_at`."""

    worker: int
    at: float
    back_at: float = inf


class Scenario(Struct, frozen=True, kw_only=True):
    """What is simulated. Times are in seconds of the virtual clock.

    `workload` can be gone through once. `policy` is the name of one, or what makes one; each of the `gateways` has its
    own, with `options`, and its own registry. There are `workers` engines of `profile`; `slow` has the numbers of those
    that need so many times as long, `profiles` of those that are others altogether. Every worker sends a heartbeat to
    every gateway each `heartbeat_s`, which arrives `heartbeat_delay_s` later, if it is not among the
    `heartbeat_loss` (0 to 1) of them that are lost; after `miss_limit` missing ones it is given up. A request is sent
    `attempts_max` times at most. All randomness comes from `seed`.
    """

    workload: Workload
    policy: str | PolicyFactory = "affinity"
    options: PolicyOptions = OPTIONS
    workers: int = 16
    profile: EngineProfile = PROFILE
    profiles: Mapping[int, EngineProfile] = MappingProxyType({})
    slow: Mapping[int, float] = MappingProxyType({})
    failures: tuple[Failure, ...] = ()
    gateways: int = 1
    heartbeat_s: float = 2.0
    heartbeat_delay_s: float = 0.0
    heartbeat_loss: float = 0.0
    miss_limit: int = 3
    attempts_max: int = 3
    seed: int = 0


def simulate(scenario: Scenario) -> Outcome:
    """Run a scenario to its end, and return what became of every request."""
    raise NotImplementedError
