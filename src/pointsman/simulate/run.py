"""One simulated run: arrivals through the gateway's own router into modelled engines, event by event.

Workers come and stay by heartbeats, as they do for the gateway: they go into the registry as reports, which may be
late, or lost. A request is routed, leased and sent as `pointsman.flow.attempts` does it: a worker that fails before its
answer is complete costs another attempt, with that worker excluded. (A client would see an answer that breaks after its
first byte; the simulator starts it anew and counts both times, since the work is what it is about.)
"""

import math
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from random import Random
from typing import TYPE_CHECKING

from msgspec import Struct

from pointsman.domain.prefix_index import ENGINE_BLOCK_TOKENS
from pointsman.domain.registry import Registry, WorkerReport
from pointsman.domain.request import InferenceRequest
from pointsman.domain.router import Router
from pointsman.domain.routes import Route, RouteTable
from pointsman.errors import NoCapacity
from pointsman.simulate.engine import ModelledEngine, Sequence
from pointsman.simulate.outcome import Outcome
from pointsman.simulate.profile import EngineProfile
from pointsman.simulate.workload import Arrival

if TYPE_CHECKING:
    from pointsman.domain.ledger import Lease
    from pointsman.domain.policy import Policy
    from pointsman.domain.worker import Worker

__all__ = ["MODEL", "Fault", "Scenario", "simulate"]

MODEL = "simulated"

ARRIVAL, HEARTBEAT, ENGINE, FAULT, REPAIR = range(5)


class Fault(Struct, frozen=True):
    """Engine number `engine` loses everything at `at`, and is back, empty, at `until` (seconds)."""

    engine: int
    at: float
    until: float = math.inf


class Scenario(Struct, frozen=True, kw_only=True):
    """What is simulated.

    `policy` makes a policy from a source of randomness, one for each of `gateways`, which see the same engines and not
    each other. `slowness` makes every step of an engine that many times as long; `profiles`, one for each engine, take
    the place of `profile` and `workers`. A heartbeat comes every `heartbeat_s`, `heartbeat_delay_s` late, and is lost
    with the probability `heartbeat_loss`. `attempts` is how many workers are tried for a request.
    """

    workload: Iterable[Arrival]
    policy: "Callable[[Random], Policy]"
    workers: int = 16
    profile: EngineProfile = EngineProfile()
    profiles: tuple[EngineProfile, ...] = ()
    slowness: tuple[float, ...] = ()
    gateways: int = 1
    heartbeat_s: float = 2.0
    heartbeat_delay_s: float = 0.0
    heartbeat_loss: float = 0.0
    faults: tuple[Fault, ...] = ()
    attempts: int = 3
    block_tokens: int = 512
    seed: int = 0


def simulate(scenario: Scenario) -> Outcome:
    """Run a scenario to the end of its last request. The same scenario and seed give the same bytes."""
    return _Run(scenario).run()


class _Gateway:
    """One gateway's view: its registry, its router, and its policy with whatever that remembers."""

    def __init__(self, policy: "Policy") -> None:
        self.registry = Registry()
        self.router = Router(self.registry, policy, RouteTable([Route(MODEL)]))


class _Call:
    """One request under way, and where it is."""

    __slots__ = (
        "arrival",
        "attempts",
        "engine",
        "excluded",
        "gateway",
        "lease",
        "request",
    )

    def __init__(self, arrival: Arrival, request: InferenceRequest, gateway: _Gateway) -> None:
        self.arrival = arrival
        self.request = request
        self.gateway = gateway
        self.attempts = 0
        self.engine = -1
        self.excluded: list[Worker] = []
        self.lease: Lease | None = None


class _Run:
    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        profiles = scenario.profiles or (scenario.profile,) * scenario.workers
        self.engines = [
            ModelledEngine(
                profile,
                scenario.block_tokens,
                scenario.slowness[number] if number < len(scenario.slowness) else 1.0,
            )
            for number, profile in enumerate(profiles)
        ]
        self.ids = [f"w{number:04}" for number in range(len(profiles))]
        self.index = {id: number for number, id in enumerate(self.ids)}
        # Draws of their own for each purpose: another policy must not change which heartbeats are lost.
        self.losses, self.choices = (
            Random(f"{scenario.seed} losses"),
            Random(f"{scenario.seed} gateways"),
        )
        self.gateways = [
            _Gateway(scenario.policy(Random(f"{scenario.seed} policy {number}")))
            for number in range(scenario.gateways)
        ]
        self.outcome = Outcome(len(self.engines))
        self.events: list[tuple[float, int, int, int]] = []
        self.order = 0
        self.calls: dict[int, _Call] = {}
        self.arrivals = iter(scenario.workload)
        self.next: Arrival | None = None
        self.number = 0

    def run(self) -> Outcome:
        scenario, events, engines = self.scenario, self.events, self.engines
        for number in range(len(engines)):
            self._beat(number, 0.0)
            # Spread over the interval, as those of a real fleet are.
            self._push(scenario.heartbeat_s * (number + 1) / len(engines), HEARTBEAT, number)
        for number, fault in enumerate(scenario.faults):
            self._push(fault.at, FAULT, number)
            if fault.until < math.inf:
                self._push(fault.until, REPAIR, number)
        self._await_next()
        outcome = self.outcome
        while self.next is not None or self.calls:
            now, kind, _, what = heappop(events)
            if kind == ENGINE:
                if engines[what].next_at == now:
                    self._advance(what, now)
            elif kind == ARRIVAL:
                arrival = self.next
                assert arrival is not None
                self._arrive(arrival)
                self._await_next()
            elif kind == HEARTBEAT:
                self._heartbeat(what, now)
            elif kind == FAULT:
                self._fail(scenario.faults[what].engine, now)
            else:
                engines[scenario.faults[what].engine].restart()
            outcome.span_s = now
        outcome.busy_s = [engine.busy_s for engine in engines]
        return outcome

    def _push(self, at: float, kind: int, what: int) -> None:
        # Among events of the same moment the kind decides, then who was first.
        self.order += 1
        heappush(self.events, (at, kind, self.order, what))

    def _await_next(self) -> None:
        self.next = next(self.arrivals, None)
        if self.next is not None:
            self._push(self.next.at, ARRIVAL, 0)

    def _arrive(self, arrival: Arrival) -> None:
        self.number += 1
        gateways = self.gateways
        gateway = gateways[0] if len(gateways) == 1 else self.choices.choice(gateways)
        request = InferenceRequest.of_blocks(
            MODEL, f"r{self.number}", arrival.blocks, arrival.prompt_tokens, arrival.block_tokens
        )
        self._send(self.number, _Call(arrival, request, gateway), arrival.at)

    def _send(self, number: int, call: _Call, now: float) -> None:
        router = call.gateway.router
        try:
            if call.attempts >= self.scenario.attempts:
                raise NoCapacity("every attempt failed")
            target = router.route(call.request, call.excluded, now=now)
        except NoCapacity:
            self.calls.pop(number, None)
            self.outcome.refused += 1
            return
        worker = target.worker
        call.attempts += 1
        call.lease = router.lease(worker, call.request, now)
        call.engine = self.index[worker.id]
        self.calls[number] = call
        engine = self.engines[call.engine]
        if engine.down:
            # Refused at once: the heartbeats have not stopped for long enough.
            self._lost(number, call, now)
            return
        arrival = call.arrival
        before = engine.next_at
        engine.submit(
            Sequence(number, arrival.blocks, arrival.prompt_tokens, arrival.output_tokens), now
        )
        if engine.next_at != before:
            self._push(engine.next_at, ENGINE, call.engine)

    def _advance(self, which: int, now: float) -> None:
        engine = self.engines[which]
        began, ended = engine.advance()
        for sequence in began:
            lease = self.calls[sequence.number].lease
            assert lease is not None
            lease.began(now)
        for sequence in ended:
            call = self.calls.pop(sequence.number)
            lease = call.lease
            assert lease is not None
            lease.close()
            self._note(call, sequence, which, now)
        if engine.next_at < math.inf:
            self._push(engine.next_at, ENGINE, which)

    def _note(self, call: _Call, sequence: Sequence, which: int, now: float) -> None:
        outcome, at = self.outcome, call.arrival.at
        first, output = sequence.first_at, sequence.output_tokens
        outcome.at.append(at)
        outcome.ttft.append(first - at)
        outcome.tpot.append((now - first) / (output - 1) if output > 1 else 0.0)
        outcome.e2e.append(now - at)
        outcome.prompt.append(sequence.prompt_tokens)
        outcome.output.append(output)
        outcome.cached.append(sequence.cached_tokens)
        outcome.worker.append(which)
        outcome.attempts.append(call.attempts)

    def _fail(self, which: int, now: float) -> None:
        for sequence in self.engines[which].fail():
            self._lost(sequence.number, self.calls[sequence.number], now)

    def _lost(self, number: int, call: _Call, now: float) -> None:
        lease = call.lease
        assert lease is not None
        lease.close()
        call.excluded.append(lease.worker)
        self._send(number, call, now)

    def _heartbeat(self, which: int, now: float) -> None:
        scenario = self.scenario
        if not self.engines[which].down:
            self._beat(which, now)
        self._push(now + scenario.heartbeat_s, HEARTBEAT, which)

    def _beat(self, which: int, now: float) -> None:
        engine, scenario = self.engines[which], self.scenario
        id = self.ids[which]
        report = WorkerReport(
            id,
            f"{id}:80",
            MODEL,
            queue_depth=len(engine.waiting),
            running=engine.running,
            kv_free_blocks=engine.free_blocks * engine.block_tokens // ENGINE_BLOCK_TOKENS,
            kv_total_blocks=engine.profile.kv_tokens // ENGINE_BLOCK_TOKENS,
        )
        for gateway in self.gateways:
            if not scenario.heartbeat_loss or self.losses.random() >= scenario.heartbeat_loss:
                gateway.registry.beat(report, now)
