"""One simulated run: a workload, gateways that route it, and modelled engines that answer, on a virtual clock.

The registry, the router, the leases and the policy are those of the gateway itself; nothing here knows how they decide.
"""

from collections.abc import Callable, Mapping
from heapq import heappop, heappush
from math import inf
from random import Random
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from msgspec import Struct

from pointsman.domain.policy import PolicyFactory, PolicyOptions, make_policy
from pointsman.domain.registry import Registry, WorkerReport
from pointsman.domain.request import InferenceRequest
from pointsman.domain.router import Router
from pointsman.domain.routes import RouteTable
from pointsman.errors import GatewayError
from pointsman.simulate.engine import ModelledEngine, Sequence
from pointsman.simulate.outcome import Outcome, WorkerOutcome
from pointsman.simulate.profile import EngineProfile
from pointsman.simulate.workload import Arrival, ClosedLoop, Workload

if TYPE_CHECKING:
    from pointsman.domain.ledger import Lease
    from pointsman.domain.worker import Worker

__all__ = ["Failure", "Scenario", "simulate"]

MODEL = "m"
"""What all workers serve, and all requests ask for."""

_Event: TypeAlias = Callable[[float, Any], None]

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
    `heartbeat_loss` (0 to 1) of them that are lost; after `miss_limit` missing ones it is given up. At 0 seconds all
    are known. A request is sent
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
    """Run a scenario to its end, and return what became of every request.

    Raises `ValueError` for a number that is out of its range, and for a policy that nobody offers.

    >>> from pointsman.simulate.workload import Arrival, Listed
    >>> outcome = simulate(Scenario(workload=Listed([Arrival(0.0, (), 8000, 2)]), workers=1))
    >>> round(outcome.ttft[0], 3), round(outcome.tpot[0], 5), outcome.attempts[0]
    (1.0, 0.00635, 1)
    """
    return _Run(scenario).outcome()


class _Gateway:
    """One gateway: its own view of the fleet, and its own policy."""

    __slots__ = ("lease", "registry", "route", "router")

    def __init__(self, scenario: Scenario, random: Random) -> None:
        made = scenario.policy
        options = scenario.options
        policy = (
            make_policy(made, options, random) if isinstance(made, str) else made(options, random)
        )
        self.registry = Registry(scenario.miss_limit, scenario.heartbeat_s, scenario.workers)
        self.router = Router(self.registry, policy, RouteTable())
        self.route = self.router.route
        self.lease = self.router.lease


class _Engine:
    """One place of the fleet: an engine that dies and comes back, and what is known of it in all of its lives."""

    __slots__ = ("id", "incarnation", "model", "outcome", "profile", "up")

    def __init__(self, id: str, profile: EngineProfile, entry_tokens: int) -> None:
        self.id = id
        self.profile = profile
        self.incarnation = 1
        self.model: ModelledEngine[_Flight] = ModelledEngine(profile, entry_tokens)
        self.outcome = WorkerOutcome(id)
        self.up = True

    def report(self, now: float) -> WorkerReport:
        """Return what this engine says of itself in a heartbeat."""
        model, profile = self.model, self.profile
        room = model.room(now)
        return WorkerReport(
            self.id,
            "127.0.0.1:8000",
            MODEL,
            incarnation=self.incarnation,
            queue_depth=model.queue_depth,
            running=model.running,
            kv_free_blocks=room // profile.block_tokens,
            kv_total_blocks=profile.kv_tokens // profile.block_tokens,
            # As engines count it: what is cached and not in use is free.
            kv_usage=1 - room / profile.kv_tokens,
            cached_tokens=model.cached_tokens,
        )

    def settle(self) -> None:
        """Put what the present life did to the account of all."""
        model, outcome = self.model, self.outcome
        outcome.computed_tokens += model.computed_tokens
        outcome.cached_tokens += model.cached_tokens
        outcome.evicted_tokens += model.evicted_tokens
        outcome.preemptions += model.preemptions
        outcome.busy_s += model.busy_s


class _Flight(Sequence):
    """A request on its way through the fleet."""

    __slots__ = ("arrival", "excluded", "gateway", "index", "lease", "request")

    def __init__(
        self, arrival: Arrival, index: int, gateway: _Gateway, request: InferenceRequest
    ) -> None:
        super().__init__(arrival.blocks, arrival.prompt_tokens, arrival.output_tokens)
        self.arrival = arrival
        self.index = index
        self.gateway = gateway
        self.request = request
        self.excluded: tuple[Worker, ...] = ()
        # It has one whenever it is at an engine.
        self.lease: Lease


class _Run:
    """A run, from its first event to its last."""

    def __init__(self, scenario: Scenario) -> None:
        _check(scenario)
        self._scenario = scenario
        seed = scenario.seed
        # Every use of chance has a source of its own: what one of them draws changes no other.
        self._draw = Random(f"gateways {seed}").random
        self._lost = Random(f"heartbeats {seed}").random
        self._gateways = [
            _Gateway(scenario, Random(f"policy {seed} {number}"))
            for number in range(scenario.gateways)
        ]
        self._workload = scenario.workload
        self._block_tokens = scenario.workload.block_tokens
        self._engines = [
            _Engine(f"w{number:04}", _profile_of(scenario, number), self._block_tokens)
            for number in range(scenario.workers)
        ]
        self._by_id = {engine.id: number for number, engine in enumerate(self._engines)}
        self._outcome = Outcome(workers=[engine.outcome for engine in self._engines])
        workload = scenario.workload
        self._next_after = workload.next_after if isinstance(workload, ClosedLoop) else None
        # What is to happen: when, in which order among equals, what, and to whom.
        self._events: list[tuple[float, int, _Event, Any]] = []
        self._order = 0
        # Requests that are not over, those to come of a closed loop included.
        self._open = 0

    def outcome(self) -> Outcome:
        """Let everything happen."""
        scenario = self._scenario
        phase = Random(f"phases {scenario.seed}").random
        for engine in self._engines:
            # The fleet was there before, and everybody knows it.
            report = engine.report(0.0)
            for gateway in self._gateways:
                gateway.registry.beat(report, 0.0)
            self._at(phase() * scenario.heartbeat_s, self._beat, engine)
        for failure in scenario.failures:
            self._at(failure.at, self._fail, failure.worker)
            if failure.back_at < inf:
                self._at(failure.back_at, self._come_back, failure.worker)
        events = self._events
        arrivals = iter(self._workload)
        arrival = next(arrivals, None)
        now = 0.0
        while True:
            if arrival is not None and (not events or arrival.at < events[0][0]):
                now = arrival.at
                self._open += 1
                self._arrive(now, arrival)
                arrival = next(arrivals, None)
            elif arrival is not None or self._open:
                now, _, happen, whom = heappop(events)
                happen(now, whom)
            else:
                break
        for engine in self._engines:
            engine.settle()
        self._outcome.ended_at = now
        return self._outcome

    def _at(self, when: float, event: "_Event", whom: Any) -> None:
        self._order += 1
        heappush(self._events, (when, self._order, event, whom))

    # Requests.

    def _arrive(self, now: float, arrival: Arrival) -> None:
        gateways = self._gateways
        count = len(gateways)
        number = int(self._draw() * count) if count > 1 else 0
        _, blocks, prompt_tokens, output_tokens, _ = arrival
        index = self._outcome.begin(now, prompt=prompt_tokens, output=output_tokens, gateway=number)
        request = InferenceRequest.of_blocks(
            MODEL, f"r{index}", blocks, prompt_tokens, self._block_tokens
        )
        request.stream = True
        self._send(now, _Flight(arrival, index, gateways[number], request))

    def _send(self, now: float, flight: _Flight) -> None:
        """Route a request, and send it, until a worker takes it or there are no more attempts."""
        outcome = self._outcome
        gateway, request, index = flight.gateway, flight.request, flight.index
        while outcome.attempts[index] < self._scenario.attempts_max:
            try:
                target = gateway.route(request, flight.excluded, now=now)
            except GatewayError:
                break
            worker = target.worker
            lease = gateway.lease(worker, request, now)
            number = self._by_id[worker.id]
            engine = self._engines[number]
            outcome.attempts[index] += 1
            outcome.worker[index] = number
            model = engine.model
            if engine.up and model.fits(flight):
                engine.outcome.requests += 1
                flight.lease = lease
                due = model.due
                model.submit(flight, now)
                if model.due != due:
                    self._at(model.due, self._advance, model)
                return
            lease.close()
            if engine.up:
                # What does not fit is refused, and a refusal is an answer.
                break
            flight.excluded = (*flight.excluded, worker)
        self._open -= 1

    def _advance(self, now: float, model: ModelledEngine["_Flight"]) -> None:
        if model.due != now:
            # Something came in between.
            return
        began, ended = model.advance(now)
        outcome = self._outcome
        for flight in began:
            index = flight.index
            outcome.ttft[index] = now - flight.arrival.at
            outcome.cached[index] = flight.cached_tokens
            flight.lease.began(now)
        for flight in ended:
            index = flight.index
            flight.lease.close()
            outcome.e2e[index] = now - flight.arrival.at
            if flight.output_tokens > 1:
                outcome.tpot[index] = (now - flight.first_at) / (flight.output_tokens - 1)
            self._open -= 1
            if self._next_after is not None:
                following = self._next_after(flight.arrival, now)
                if following is not None:
                    self._open += 1
                    self._at(following.at, self._arrive, following)
        if model.due < inf:
            self._at(model.due, self._advance, model)

    # Workers.

    def _beat(self, now: float, engine: _Engine) -> None:
        if engine.up:
            self._tell(engine, now)
        self._at(now + self._scenario.heartbeat_s, self._beat, engine)

    def _tell(self, engine: _Engine, now: float) -> None:
        """Send a heartbeat to every gateway."""
        scenario = self._scenario
        report = engine.report(now)
        for gateway in self._gateways:
            if scenario.heartbeat_loss and self._lost() < scenario.heartbeat_loss:
                continue
            if scenario.heartbeat_delay_s:
                self._at(now + scenario.heartbeat_delay_s, self._hear, (gateway, report))
            else:
                gateway.registry.beat(report, now)

    def _hear(self, now: float, heard: tuple[_Gateway, WorkerReport]) -> None:
        gateway, report = heard
        gateway.registry.beat(report, now)

    def _fail(self, now: float, number: int) -> None:
        engine = self._engines[number]
        if not engine.up:
            return
        engine.up = False
        engine.settle()
        lost = engine.model.fail()
        engine.model = ModelledEngine(engine.profile, self._block_tokens)
        for flight in lost:
            lease = flight.lease
            lease.close()
            if flight.first_at >= 0:
                # The client has seen a part of the answer: there is no other worker.
                self._open -= 1
                continue
            flight.reset()
            flight.excluded = (*flight.excluded, lease.worker)
            self._send(now, flight)

    def _come_back(self, now: float, number: int) -> None:
        engine = self._engines[number]
        if not engine.up:
            engine.up = True
            engine.incarnation += 1
            self._tell(engine, now)


def _check(scenario: Scenario) -> None:
    for name in ("workers", "gateways", "miss_limit", "attempts_max"):
        if getattr(scenario, name) < 1:
            raise ValueError(f"{name} must be at least 1")
    if scenario.heartbeat_s <= 0:
        raise ValueError("heartbeat_s must be above 0")
    if scenario.heartbeat_delay_s < 0:
        raise ValueError("heartbeat_delay_s must be 0 or more")
    if not 0 <= scenario.heartbeat_loss <= 1:
        raise ValueError("heartbeat_loss must be 0 to 1")
    if not all(factor > 0 for factor in scenario.slow.values()):
        raise ValueError("slow must have factors above 0")
    numbers = {*scenario.profiles, *scenario.slow, *(each.worker for each in scenario.failures)}
    unknown = sorted(numbers - set(range(scenario.workers)))
    if unknown:
        raise ValueError(f"there is no worker {unknown[0]}: they are 0 to {scenario.workers - 1}")


def _profile_of(scenario: Scenario, number: int) -> EngineProfile:
    profile = scenario.profiles.get(number, scenario.profile)
    return profile.slower(scenario.slow[number]) if number in scenario.slow else profile
