"""When a prompt is handed off, and to whom: by hand, and through the router that asks."""

import pytest

from pointsman.domain.explain import Compared, explain
from pointsman.domain.ledger import Lease
from pointsman.domain.pairing import Pairing, PairingOptions, Way, best_of
from pointsman.domain.policy.kv_cost import KvCost
from pointsman.domain.policy.least_outstanding import LeastOutstanding
from pointsman.domain.prefix_index import PrefixIndex
from pointsman.domain.registry import Registry, WorkerReport
from pointsman.domain.request import InferenceRequest
from pointsman.domain.router import Router, Target
from pointsman.domain.routes import Route, RouteTable
from pointsman.domain.worker import Worker
from pointsman.errors import NoCapacity

OPTIONS = PairingOptions(
    prefill_tokens_per_s=1000.0, transfer_tokens_per_s=10_000.0, handoff_s=0.1, stall=0.5
)
ROLES = {"p": "prefill", "q": "prefill", "d": "decode", "e": "decode", "u": "unified"}
BOTH = ("disaggregated", "unified")


class Fleet:
    """Workers by their names, whose first letter is their role, and a router that pairs them."""

    def __init__(
        self,
        names: str,
        *,
        targets: tuple[str, ...] = BOTH,
        policy: LeastOutstanding | KvCost | None = None,
        pairing: bool = True,
        **connectors: str,
    ) -> None:
        self.registry = Registry()
        self.index = PrefixIndex(1024, 60.0)
        for name in names:
            self.registry.beat(
                WorkerReport(
                    name, f"{name}:80", "m", ROLES[name], connector=connectors.get(name, "")
                ),
                0.0,
            )
        self.workers = {worker.id: worker for worker in self.registry.snapshot()}
        self.router = Router(
            self.registry,
            policy or LeastOutstanding(),
            RouteTable([Route("m", targets=targets)]),
            pairing=Pairing(self.index, OPTIONS) if pairing else None,
        )

    def __getitem__(self, name: str) -> Worker:
        return self.workers[name]

    def route(self, tokens: int, *excluded: str, blocks: tuple[int, ...] = ()) -> Target:
        asked = request(tokens, blocks)
        return self.router.route(asked, [self[name] for name in excluded], now=0.0)

    def ways(self, tokens: int, blocks: tuple[int, ...] = ()) -> list[tuple[str, str, float]]:
        return [told(way) for way in self.route(tokens, blocks=blocks).ways]


def request(tokens: int, blocks: tuple[int, ...] = ()) -> InferenceRequest:
    return InferenceRequest.of_blocks("m", "r1", blocks, tokens, 100)


def told(way: Way) -> tuple[str, str, float]:
    return way.worker.id, "" if way.prefill is None else way.prefill.id, round(way.seconds, 6)


def test_each_way_costs_what_the_formula_says() -> None:
    fleet = Fleet("pdu")
    fleet["p"].pending_tokens = 300
    fleet["d"].pending_tokens, fleet["d"].in_flight = 200, 4
    fleet["u"].running = 1
    assert fleet.ways(1000) == [
        # 1 s at d, behind 0.2 s, while 4 others wait for half of it each.
        ("d", "", 0.2 + 1.0 + 0.5 * 4),
        ("d", "p", round(0.3 + 1.0 + 0.1 + 0.1, 6)),
        ("u", "", 1.0 + 0.5),
    ]


def test_a_short_rest_is_not_handed_off() -> None:
    fleet = Fleet("pd")
    # On an idle worker a hand-off is never quicker.
    assert fleet.route(5000).prefill is None
    fleet["d"].in_flight = 2
    assert fleet.route(50).prefill is None
    assert fleet.route(500).prefill is fleet["p"]


def test_what_the_decode_worker_has_cached_is_not_handed_off() -> None:
    fleet = Fleet("pd")
    fleet["d"].in_flight = 2
    blocks = tuple(range(10))
    assert fleet.route(1000, blocks=blocks).prefill is fleet["p"]
    fleet.index.insert(fleet["d"], blocks[:9], 0.0)
    assert fleet.route(1000, blocks=blocks).prefill is None
    # Nor is that which is there sent again.
    assert fleet.ways(1000, blocks)[1] == ("d", "p", 1.0 + 0.1 + 0.01)
    # All of it is there, and yet its last token has to be computed.
    fleet.index.insert(fleet["d"], blocks, 0.0)
    assert fleet.ways(1000, blocks)[0] == ("d", "", 0.002)


def test_the_prefill_worker_that_would_be_done_first_computes_it() -> None:
    fleet = Fleet("pqd")
    fleet["d"].in_flight = 9
    blocks = tuple(range(10))
    fleet["p"].pending_tokens = 400
    assert fleet.route(1000, blocks=blocks).prefill is fleet["q"]
    fleet.index.insert(fleet["p"], blocks[:5], 0.0)
    assert fleet.route(1000, blocks=blocks).prefill is fleet["p"]


def test_a_decode_worker_that_is_behind_keeps_what_was_handed_over_waiting() -> None:
    fleet = Fleet("pd")
    fleet["d"].pending_tokens, fleet["d"].in_flight = 9000, 9
    assert fleet.ways(500)[1] == ("d", "p", 9.0)


@pytest.mark.parametrize("targets", [BOTH, BOTH[::-1]])
def test_of_equal_ways_the_preferred_target_wins(targets: tuple[str, ...]) -> None:
    fleet = Fleet("pdu", targets=targets)
    assert fleet.route(500).worker.id == ("d" if targets is BOTH else "u")


def test_a_unified_worker_is_asked_only_where_the_route_has_it_for_a_target() -> None:
    fleet = Fleet("pdu", targets=("disaggregated",))
    fleet["p"].pending_tokens = fleet["d"].pending_tokens = 90_000
    assert {way.worker.id for way in fleet.route(500).ways} == {"d"}


def test_workers_of_other_connectors_are_no_pair() -> None:
    fleet = Fleet("pqd", p="nixl", q="mooncake", d="nixl")
    fleet["d"].in_flight = 9
    fleet["p"].pending_tokens = 500
    assert fleet.route(1000).prefill is fleet["p"]


def test_without_a_prefill_worker_no_decode_worker_is_asked() -> None:
    fleet = Fleet("pdu")
    target = fleet.route(1000, "p")
    assert (target.worker.id, target.reason) == ("u", "failover")
    assert [told(way)[:2] for way in target.ways] == [("u", "")]
    alone = Fleet("pd")
    with pytest.raises(NoCapacity):
        alone.route(1000, "p")


def test_where_nobody_is_left_there_is_nothing_to_compare() -> None:
    fleet = Fleet("pd")
    with pytest.raises(NoCapacity):
        fleet.route(1000, "d")


def test_what_cannot_be_handed_off_is_not_compared() -> None:
    fleet = Fleet("pdu")
    target = fleet.router.route(request(1000), now=0.0, handoff=lambda connector: False)
    assert (target.worker.id, target.prefill, target.ways) == ("u", None, ())


def test_without_pairing_the_least_loaded_prefill_worker_takes_every_prompt() -> None:
    fleet = Fleet("pqd", pairing=False)
    fleet["p"].in_flight = 1
    target = fleet.route(1)
    assert (target.prefill, target.ways) == (fleet["q"], ())


def test_prompts_are_accounted_for_where_the_policy_does_not() -> None:
    fleet = Fleet("pd")
    blocks = tuple(range(10))
    with fleet.router.lease(fleet["p"], request(1000, blocks), 0.0) as lease:
        assert fleet["p"].pending_tokens == 1000
        lease.began(1.0)
        assert fleet["p"].pending_tokens == 0
    assert fleet.index.match(blocks, (fleet["p"],)) == [(fleet["p"], 10)]
    fleet.registry.expire(100.0)
    assert len(fleet.index) == 0


def test_a_policy_that_accounts_for_prompts_goes_on_doing_so() -> None:
    index = PrefixIndex(64, 60.0)
    fleet = Fleet("pd", policy=KvCost(index))
    fleet.router.lease(fleet["p"], request(200, (1, 2)), 0.0).close()
    assert (len(index), len(fleet.index)) == (2, 0)


def test_nothing_is_accounted_for_where_no_route_hands_off() -> None:
    fleet = Fleet("pdu")
    fleet.router.set_routes([Route("m")])
    assert fleet.router.pairing is None
    assert fleet.router.lease(fleet["u"], request(100), 0.0).placement is None
    fleet.router.set_routes([Route("m"), Route("n", targets=BOTH)])
    assert fleet.router.lease(fleet["u"], request(100), 0.0).placement is not None
    fleet.router.pairing = None
    assert fleet.router.lease(fleet["u"], request(100), 0.0).placement is None


def test_a_prompt_that_another_worker_computes_is_not_pending() -> None:
    fleet = Fleet("pd")
    with fleet.router.lease(fleet["d"], request(700), 0.0) as lease:
        lease.relieved()
        lease.relieved()
        assert (fleet["d"].pending_tokens, fleet["d"].active_tokens) == (0, 700)
        lease.began(1.0)
        lease.relieved()
    assert (fleet["d"].pending_tokens, fleet["d"].active_tokens) == (0, 0)
    with Lease(fleet["d"]) as plain:
        plain.relieved()


def test_an_explanation_shows_the_ways() -> None:
    fleet = Fleet("pqdu")
    fleet["d"].in_flight, fleet["u"].in_flight, fleet["p"].pending_tokens = 2, 3, 300
    why = explain(fleet.router, fleet.registry, request(1000), now=0.0)
    assert (why.pick, why.prefill, why.target) == ("d", "q", "disaggregated")
    assert why.ways == (
        Compared(worker_id="d", prefill=None, seconds=2.0),
        Compared(worker_id="d", prefill="q", seconds=1.2),
        Compared(worker_id="u", prefill=None, seconds=2.5),
    )
    assert [each.worker_id for each in why.candidates] == ["d"]
    assert [(each.worker_id, each.score) for each in why.prefills] == [("p", 1.3), ("q", 1.0)]
    assert why.vetoed == ()


def test_an_explanation_shows_the_candidates_of_the_target_that_won() -> None:
    fleet = Fleet("pdu")
    fleet["d"].in_flight, fleet["p"].pending_tokens = 9, 9000
    why = explain(fleet.router, fleet.registry, request(1000), now=0.0)
    assert (why.pick, why.prefill, why.target) == ("u", None, "unified")
    assert [each.worker_id for each in why.candidates] == ["u"]
    assert [each.worker_id for each in why.prefills] == ["p"]


def test_the_first_of_equal_ways_is_the_best() -> None:
    a, b = (Worker(name, model="m", http_address="h:1") for name in "ab")
    assert best_of([Way(a, None, 1.0), Way(b, None, 1.0), Way(b, a, 2.0)]).worker is a
