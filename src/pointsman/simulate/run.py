"""One simulated run: a workload, gateways that route it, and modelled engines that answer, on a virtual clock.

The registry, the router, the leases and the policy are those of the gateway itself; nothing here knows how they decide.

A hand-off goes as with our own contract (docs/disaggregation.md): the lease of the prefill worker is held until it has
computed the prompt and pushed it, that of the decode worker from the beginning. A worker pushes one prompt after the
other, whoever takes them. What is not modelled: that it keeps room for what it pushes, and that it could push while it
computes.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from heapq import heappop, heappush
from math import inf
from random import Random
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from msgspec import Struct

from pointsman.domain.pairing import Pairing, PairingOptions
from pointsman.domain.policy import PolicyFactory, PolicyOptions, make_policy
from pointsman.domain.registry import Registry, WorkerReport
from pointsman.domain.request import InferenceRequest
from pointsman.domain.router import Router
from pointsman.domain.routes import Route, RouteTable
from pointsman.domain.worker import Role
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

HANDED_OFF = Route(MODEL, targets=("disaggregated", "unified"))
"""The route of a fleet that has prefill and decode workers."""

PAUSE_MAX_S = 86_400.0
"""Nothing is simulated for longer in which no request comes, begins or ends: heartbeats would go on for ever."""

LETTERS = {Role.UNIFIED: "w", Role.PREFILL: "p", Role.DECODE: "d"}

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
    own, with `options`, and its own registry. There are `workers` unified engines of `profile`, and after them
    `prefill_workers` and `decode_workers`, which go together; prompts of less than `disagg_min_tokens` are not handed
    off, and with `pairing` others neither, where that is no gain. `slow` has the numbers of engines that need so many
    times as long, `profiles` of those that are others altogether. Every worker sends a heartbeat to
    every gateway each `heartbeat_s`, which arrives `heartbeat_delay_s` later, if it is not among the
    `heartbeat_loss` (0 to 1) of them that are lost; after `miss_limit` missing ones it is given up. At 0 seconds all
    are known. A request is sent
    `attempts_max` times at most. All randomness comes from `seed`.
    """

    workload: Workload
    policy: str | PolicyFactory = "affinity"
    options: PolicyOptions = OPTIONS
    workers: int = 16
    prefill_workers: int = 0
    decode_workers: int = 0
    disagg_min_tokens: int = 0
    pairing: PairingOptions | None = None
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

    Raises `ValueError` for a number that is out of its range, for a policy that nobody offers, and where no request
    comes, begins or ends for a day.

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
        if scenario.pairing is not None and options.prefix_index is None:
            # Policy and pairing ask one index.
            options = replace(options, prefix_index=options.index())
        policy = (
            make_policy(made, options, random) if isinstance(made, str) else made(options, random)
        )
        self.registry = Registry(scenario.miss_limit, scenario.heartbeat_s, _size_of(scenario))
        table = RouteTable([HANDED_OFF] if scenario.prefill_workers else ())
        pairing = scenario.pairing
        self.router = Router(
            self.registry,
            policy,
            table,
            pairing=None if pairing is None else Pairing(options.index(), pairing),
        )
        self.route = self.router.route
        self.lease = self.router.lease


class _Engine:
    """One place of the fleet: an engine that dies and comes back, and what is known of it in all of its lives."""

    __slots__ = ("id", "incarnation", "model", "outcome", "profile", "role", "sends_at", "up")

    def __init__(self, id: str, role: Role, profile: EngineProfile, entry_tokens: int) -> None:
        self.id = id
        self.role = role
        self.profile = profile
        self.incarnation = 1
        self.model: ModelledEngine[Any] = ModelledEngine(profile, entry_tokens)
        self.outcome = WorkerOutcome(id, role=role)
        # When it has pushed what it pushes now.
        self.sends_at = 0.0
        self.up = True

    def report(self, now: float) -> WorkerReport:
        """Return what this engine says of itself in a heartbeat."""
        model, profile = self.model, self.profile
        room = model.room(now)
        return WorkerReport(
            self.id,
            "127.0.0.1:8000",
            MODEL,
            self.role,
            incarnation=self.incarnation,
            queue_depth=model.queue_depth,
            running=model.running,
            kv_free_blocks=room // profile.block_tokens,
            kv_total_blocks=profile.kv_tokens // profile.block_tokens,
            kv_tokens=profile.kv_tokens,
            # As engines count it: what is cached and not in use is free.
            kv_usage=1 - room / profile.kv_tokens,
            cached_tokens=model.cached_tokens,
        )

    def settle(self) -> None:
        """Put what the present life did to the account of all."""
        model, outcome = self.model, self.outcome
        outcome.computed_tokens += model.computed_tokens
        outcome.cached_tokens += model.cached_tokens
        outcome.received_tokens += model.received_tokens
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

    @property
    def flight(self) -> "_Flight":
        """Itself: so is asked of all that is at an engine."""
        return self

    def close(self) -> None:
        """Leave the worker."""
        self.lease.close()


class _Prompt(Sequence):
    """The prompt of a request at the prefill worker of a hand-off, until it is pushed."""

    __slots__ = ("engine", "flight", "lease")

    def __init__(self, flight: _Flight, lease: "Lease", engine: _Engine) -> None:
        super().__init__(flight.blocks, flight.prompt_tokens, 1)
        self.flight = flight
        self.lease = lease
        self.engine = engine

    def close(self) -> None:
        """Leave both workers."""
        self.lease.close()
        self.flight.lease.close()


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
            _Engine(
                f"{LETTERS[role]}{number:04}",
                role,
                _profile_of(scenario, number),
                self._block_tokens,
            )
            for number, role in enumerate(_roles_of(scenario))
        ]
        self._by_id = {engine.id: number for number, engine in enumerate(self._engines)}
        self._outcome = Outcome(workers=[engine.outcome for engine in self._engines])
        workload = scenario.workload
        self._next_after = workload.next_after if isinstance(workload, ClosedLoop) else None
        # What is to happen: when, in which order among equals, what, and to whom.
        self._events: list[tuple[float, int, _Event, Any]] = []
        self._order = 0
        # Prompts that are being pushed.
        self._pushes: dict[_Prompt, None] = {}
        # Requests that are not over, those to come of a closed loop included.
        self._open = 0
        # When something became of a request last.
        self._moved_at = 0.0

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
                if arrival is not None:
                    self._check_pause(arrival.at)
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

    def _check_pause(self, now: float) -> None:
        """Raise `ValueError` where nothing became of any request for too long."""
        if not now - self._moved_at <= PAUSE_MAX_S:
            raise ValueError(
                f"no request comes, begins or ends for {now - self._moved_at:.0f} s, from {self._moved_at:.0f} s on: "
                "a time, the load or a number of the engine cannot be true"
            )

    # Requests.

    def _arrive(self, now: float, arrival: Arrival) -> None:
        self._moved_at = now
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
            flight.lease = lease
            asked: _Flight | _Prompt = flight
            if target.prefill is not None:
                prompt = self._prompt(now, flight, target.prefill)
                if prompt is not None:
                    asked, engine = prompt, prompt.engine
            if engine.up and engine.model.fits(asked):
                self._submit(now, engine, asked)
                return
            asked.close()
            if engine.up:
                # What does not fit is refused, and a refusal is an answer.
                break
            flight.excluded = (*flight.excluded, asked.lease.worker)
        self._open -= 1

    def _submit(self, now: float, engine: _Engine, asked: "_Flight | _Prompt") -> None:
        """Send a worker what it has room for."""
        engine.outcome.requests += 1
        model = engine.model
        due = model.due
        model.submit(asked, now)
        if model.due != due:
            advance = self._computed if engine.role is Role.PREFILL else self._advance
            self._at(model.due, advance, model)

    def _advance(self, now: float, model: ModelledEngine["_Flight"]) -> None:
        if model.due != now:
            # Something came in between.
            return
        began, ended = model.advance(now)
        if began or ended:
            self._moved_at = now
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

    # Hand-offs.

    def _prompt(self, now: float, flight: _Flight, worker: "Worker") -> _Prompt | None:
        """Return what a prefill worker is asked before the decode worker is; nothing where the prompt is too short."""
        lease = flight.gateway.lease(worker, flight.request, now)
        if flight.prompt_tokens < self._scenario.disagg_min_tokens:
            lease.close()
            return None
        flight.lease.relieved()
        return _Prompt(flight, lease, self._engines[self._by_id[worker.id]])

    def _computed(self, now: float, model: ModelledEngine[_Prompt]) -> None:
        """Let prefill workers go on, and push what they have computed."""
        if model.due != now:
            return
        for prompt in model.advance(now)[0]:
            self._moved_at = now
            flight = prompt.flight
            decode = self._engines[self._by_id[flight.lease.worker.id]]
            if decode.up:
                prefill = prompt.engine
                lasts = prefill.profile.transfer_s(decode.model.lacks(flight))
                prefill.sends_at = max(prefill.sends_at, now) + lasts
                self._pushes[prompt] = None
                self._at(prefill.sends_at, self._pushed, prompt)
            else:
                prompt.close()
                self._elsewhere(now, flight, flight.lease.worker)
        if model.due < inf:
            self._at(model.due, self._computed, model)

    def _pushed(self, now: float, prompt: _Prompt) -> None:
        """Have the decode worker go on from what was pushed to it, unless either died meanwhile."""
        if prompt not in self._pushes:
            return
        del self._pushes[prompt]
        prompt.lease.began(now)
        prompt.lease.close()
        flight = prompt.flight
        self._outcome.prefill[flight.index] = self._by_id[prompt.engine.id]
        flight.handed = True
        flight.cached_tokens = prompt.cached_tokens
        decode = self._engines[self._by_id[flight.lease.worker.id]]
        if decode.model.fits(flight):
            self._submit(now, decode, flight)
        else:
            flight.close()
            self._open -= 1

    def _elsewhere(self, now: float, flight: _Flight, failed: "Worker") -> None:
        """Begin again without the worker that failed."""
        flight.reset()
        flight.excluded = (*flight.excluded, failed)
        self._outcome.prefill[flight.index] = -1
        self._send(now, flight)

    # Workers.

    def _beat(self, now: float, engine: _Engine) -> None:
        self._check_pause(now)
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
        lost: list[_Flight | _Prompt] = engine.model.fail()
        engine.model = ModelledEngine(engine.profile, self._block_tokens)
        engine.sends_at = 0.0
        for each in lost:
            each.close()
            if each.first_at >= 0:
                # The client has seen a part of the answer: there is no other worker.
                self._open -= 1
                continue
            self._elsewhere(now, each.flight, each.lease.worker)
        for prompt in [*self._pushes]:
            decode = prompt.flight.lease.worker
            if engine is prompt.engine or engine.id == decode.id:
                del self._pushes[prompt]
                prompt.close()
                failed = prompt.lease.worker if engine is prompt.engine else decode
                self._elsewhere(now, prompt.flight, failed)

    def _come_back(self, now: float, number: int) -> None:
        engine = self._engines[number]
        if not engine.up:
            engine.up = True
            engine.incarnation += 1
            self._tell(engine, now)


def _check(scenario: Scenario) -> None:
    least = {"gateways": 1, "miss_limit": 1, "attempts_max": 1, "disagg_min_tokens": 0}
    handing = scenario.prefill_workers or scenario.decode_workers
    least |= dict.fromkeys(("prefill_workers", "decode_workers"), 1) if handing else {"workers": 1}
    for name, number in least.items():
        if getattr(scenario, name) < number:
            raise ValueError(f"{name} must be at least {number}")
    if scenario.workers < 0:
        raise ValueError("workers must be at least 0")
    if scenario.heartbeat_s <= 0:
        raise ValueError("heartbeat_s must be above 0")
    if scenario.heartbeat_delay_s < 0:
        raise ValueError("heartbeat_delay_s must be 0 or more")
    if not 0 <= scenario.heartbeat_loss <= 1:
        raise ValueError("heartbeat_loss must be 0 to 1")
    if not all(factor > 0 for factor in scenario.slow.values()):
        raise ValueError("slow must have factors above 0")
    numbers = {*scenario.profiles, *scenario.slow, *(each.worker for each in scenario.failures)}
    size = _size_of(scenario)
    unknown = sorted(numbers - set(range(size)))
    if unknown:
        raise ValueError(f"there is no worker {unknown[0]}: they are 0 to {size - 1}")


def _size_of(scenario: Scenario) -> int:
    return scenario.workers + scenario.prefill_workers + scenario.decode_workers


def _roles_of(scenario: Scenario) -> list[Role]:
    return [
        *[Role.UNIFIED] * scenario.workers,
        *[Role.PREFILL] * scenario.prefill_workers,
        *[Role.DECODE] * scenario.decode_workers,
    ]


def _profile_of(scenario: Scenario, number: int) -> EngineProfile:
    profile = scenario.profiles.get(number, scenario.profile)
    return profile.slower(scenario.slow[number]) if number in scenario.slow else profile
