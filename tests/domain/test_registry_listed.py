"""Workers that a source lists: who is up, what they serve, what becomes of them when the list changes."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.domain.ledger import Lease
from pointsman.domain.observation import Health, Observation
from pointsman.domain.policy.least_outstanding import LeastOutstanding
from pointsman.domain.policy.weighted import Weighted
from pointsman.domain.registry import InvalidReport, Registry, RegistryFull, WorkerReport
from pointsman.domain.request import InferenceRequest
from pointsman.domain.router import Router
from pointsman.domain.routes import RouteTable
from pointsman.domain.worker import Role, ServedModel, Worker, connector_of, load_of

SOURCE = "dns engines"
UNIFIED = Role.UNIFIED


def listed(id: str, model: str = "m", **fields: object) -> Worker:
    fields = {"polled": True, "dialect": "vllm", "http_address": f"{id}:80"} | fields
    return Worker(id, model=model, **fields)  # type: ignore[arg-type]


def seen(model: str = "m", **fields: object) -> Observation:
    return Observation(**({"up": True, "dialect": "vllm", "model": model} | fields))  # type: ignore[arg-type]


def ids(registry: Registry, model: str = "m", role: Role = UNIFIED) -> str:
    return "".join(worker.id for worker in registry.routable(model, role))


def fleet(*workers: Worker, **observed: object) -> Registry:
    registry = Registry()
    registry.set_listed(SOURCE, workers)
    for worker in workers:
        registry.observe(worker, seen(worker.model, **observed), now=1.0)
    return registry


# ------------------------------------------------------------------ lists


def test_a_worker_that_nobody_has_heard_of_yet_gets_nothing() -> None:
    registry = Registry()
    registry.set_listed(SOURCE, [listed("a"), listed("b", polled=False)])
    assert ids(registry) == "b"
    assert [worker.source for worker in registry.snapshot()] == [SOURCE, SOURCE]


def test_sources_do_not_touch_each_others_workers() -> None:
    registry = fleet(listed("a"), listed("b"))
    registry.set_static([listed("s", polled=False)])
    registry.beat(WorkerReport("h", "h:80", "m"), now=1.0)
    registry.set_listed(SOURCE, [listed("b")])
    assert ids(registry) == "bhs"
    registry.set_static([])
    assert ids(registry) == "bh"


def test_an_id_belongs_to_one_source() -> None:
    registry = fleet(listed("a"))
    with pytest.raises(InvalidReport, match="'a' is taken"):
        registry.set_listed("file x", [listed("a")])
    with pytest.raises(InvalidReport, match="static"):
        registry.beat(WorkerReport("a", "a:80", "m"), now=1.0)
    registry.beat(WorkerReport("h", "h:80", "m"), now=1.0)
    with pytest.raises(InvalidReport, match="'h' is taken"):
        registry.set_listed(SOURCE, [listed("h")])
    assert ids(registry) == "ah"


def test_a_list_that_is_too_long_changes_nothing() -> None:
    registry = Registry(workers_max=2)
    registry.set_listed(SOURCE, [listed("a", polled=False)])
    with pytest.raises(RegistryFull):
        registry.set_listed(SOURCE, [listed(id, polled=False) for id in "bcd"])
    assert ids(registry) == "a"


def test_only_a_worker_that_is_asked_may_be_without_a_model() -> None:
    registry = Registry()
    with pytest.raises(InvalidReport, match="model"):
        registry.set_listed(SOURCE, [listed("a", "", polled=False)])
    worker = listed("a", "")
    registry.set_listed(SOURCE, [worker])
    registry.observe(worker, seen(""), now=1.0)
    assert registry.models() == []
    registry.observe(worker, seen("found"), now=2.0)
    assert registry.models() == ["found"]


def test_a_worker_that_stays_keeps_its_object_and_takes_what_is_new() -> None:
    worker = listed("a")
    registry = fleet(worker, kv_total_blocks=7)
    again = listed("a", "n", role=Role.DECODE, capacity=3, kv_total_blocks=3)
    registry.set_listed(SOURCE, [again])
    assert registry.snapshot() == (worker,)
    assert (worker.model, worker.role, worker.kv_total_blocks) == ("n", Role.DECODE, 3)


def test_a_model_that_was_found_out_stays_when_the_list_is_read_again() -> None:
    worker = listed("a", "")
    registry = Registry()
    registry.set_listed(SOURCE, [worker])
    registry.observe(worker, seen("found", kv_total_blocks=9), now=1.0)
    registry.set_listed(SOURCE, [listed("a", "")])
    assert (worker.model, worker.kv_total_blocks, ids(registry, "found")) == ("found", 9, "a")


@pytest.mark.parametrize(
    "change",
    [
        {"http_address": "elsewhere:80"},
        {"base_path": "/x"},
        {"credentials": b"authorization: Bearer y\r\n"},
        {"dialect": "sglang"},
        {"connector": "nixl"},
        {"bootstrap": "a:9000"},
        {"poll_interval_s": 9.0},
        {"polled": False},
    ],
)
def test_a_worker_that_is_spoken_to_in_another_way_is_another_worker(
    change: dict[str, object],
) -> None:
    worker = listed("a")
    registry = fleet(worker)
    left: list[Worker] = []
    registry.on_leave.append(left.append)
    registry.set_listed(SOURCE, [listed("a", **change)])  # type: ignore[arg-type]
    assert left == [worker]


# ------------------------------------------------------------------ who is up


def test_r03_a_worker_that_its_source_calls_terminating_gets_nothing_though_it_is_healthy() -> None:
    worker = listed("a")
    registry = fleet(worker)
    registry.set_listed(SOURCE, [listed("a", terminating=True)])
    registry.observe(worker, seen(), now=2.0)
    assert (worker.up, ids(registry)) == (True, "")
    registry.set_listed(SOURCE, [listed("a")])
    assert ids(registry) == "a"


def test_r04_a_worker_that_is_down_gets_nothing_and_is_still_there() -> None:
    worker = listed("a")
    registry = fleet(worker)
    registry.observe(worker, seen(up=False, degraded="down: 503"), now=2.0)
    assert (ids(registry), registry.snapshot(), worker.last_heartbeat) == ("", (worker,), 1.0)
    registry.observe(worker, seen(draining=True), now=3.0)
    assert ids(registry) == ""
    registry.observe(worker, seen(), now=4.0)
    assert (ids(registry), worker.degraded) == ("a", "")


def test_what_is_said_of_a_worker_that_has_left_is_not_heard() -> None:
    worker = listed("a")
    registry = fleet(worker)
    registry.set_listed(SOURCE, [listed("a", http_address="b:80")])
    registry.observe(worker, seen(), now=2.0)
    assert ids(registry) == ""


def test_numbers_alone_leave_the_tuples_as_they_are() -> None:
    worker = listed("a")
    registry = fleet(worker)
    before = registry.routable("m", UNIFIED)
    registry.observe(worker, seen(running=3, queue_depth=2, kv_usage=0.5), now=2.0)
    assert registry.routable("m", UNIFIED) is before
    assert (worker.running, worker.queue_depth, worker.kv_usage) == (3, 2, 0.5)


@given(st.lists(st.booleans()), st.integers(1, 5), st.integers(1, 5))
def test_it_takes_a_run_of_rounds_to_change_a_mind(
    rounds: list[bool], misses: int, hits: int
) -> None:
    health = Health(misses=misses, hits=hits)
    for number, good in enumerate(rounds):
        up = health.up
        after = health.after(good=good)
        if up and not after:
            assert rounds[max(number + 1 - misses, 0) : number + 1] == [False] * misses
        elif after and not up and True in rounds[:number]:
            assert rounds[max(number + 1 - hits, 0) : number + 1] == [True] * hits


# ------------------------------------------------------------------ aliases and adapters

FR = ServedModel("fr", "m", 512)


def test_every_model_of_a_worker_is_one_that_can_be_asked_for() -> None:
    registry = fleet(
        listed("a"), served=(ServedModel("m"), ServedModel("alias"), FR), max_model_len=99
    )
    assert registry.models() == ["alias", "fr", "m"]
    assert ids(registry, "fr") == "a"
    assert registry.served("m") == ServedModel("m", "", 99)
    assert registry.knows("alias", now=1.0)
    assert registry.served("other") == ServedModel("other")


def test_h18_what_workers_say_of_a_model_is_joined_whatever_their_order() -> None:
    for order in ("ab", "ba"):
        workers = [listed(id) for id in order]
        registry = Registry()
        registry.set_listed(SOURCE, workers)
        for worker in workers:
            length = 512 if worker.id == "a" else 4096
            served = (ServedModel("fr", "m" if worker.id == "b" else "", length),)
            registry.observe(worker, seen(served=served), now=1.0)
        assert registry.served("fr") == ServedModel("fr", "m", 512)


def test_an_adapter_is_asked_where_it_is_loaded_and_else_where_it_can_be() -> None:
    one, two, three = listed("a"), listed("b"), listed("c")
    registry = Registry()
    registry.set_listed(SOURCE, [one, two, three])
    registry.observe(one, seen(served=(FR,), lora_slots=2), now=1.0)
    registry.observe(two, seen(lora_slots=2), now=1.0)
    registry.observe(three, seen(), now=1.0)
    assert ids(registry, "fr") == "a"
    registry.observe(one, seen(up=False), now=2.0)
    assert ids(registry, "fr") == "b"
    registry.drain("fr")
    assert ids(registry, "fr") == ""
    registry.undrain("fr")
    registry.observe(two, seen(), now=3.0)
    assert ids(registry, "fr") == ""
    assert registry.knows("fr", now=3.0)


def test_a_drained_adapter_leaves_its_model_alone() -> None:
    registry = fleet(listed("a"), served=(FR,))
    registry.drain("fr")
    assert (ids(registry, "fr"), ids(registry)) == ("", "a")


def test_an_adapter_of_a_heartbeat_is_a_model_too() -> None:
    registry = Registry()
    report = WorkerReport("a", "a:80", "m", dialect="vllm", served=(FR,), base_path="/engine")
    registry.beat(report, now=0.0)
    worker = registry.snapshot()[0]
    assert (ids(registry, "fr"), worker.base_path, worker.dialect) == ("a", "/engine", "vllm")
    registry.beat(WorkerReport("a", "a:80", "m", dialect="vllm", base_path="/engine"), now=1.0)
    assert (ids(registry, "fr"), registry.snapshot()) == ("", (worker,))
    for wrong in ({"base_path": "engine"}, {"bootstrap": "x"}, {"served": (ServedModel(""),)}):
        with pytest.raises(InvalidReport):
            registry.beat(WorkerReport("b", "b:80", "m", **wrong), now=1.0)


def test_the_slots_of_an_engine_are_not_its_weight() -> None:
    worker = listed("a", capacity=8)
    fleet(worker, kv_total_blocks=2, slots=2, kv_tokens=4096)
    assert (worker.kv_total_blocks, worker.slots, worker.kv_tokens) == (8, 2, 4096)


def test_of_too_many_models_those_seen_longest_ago_are_forgotten() -> None:
    registry = Registry()
    for number in range(4097):
        registry.beat(WorkerReport("a", "a:80", f"m{number}"), now=float(number) / 1000)
        registry.beat(WorkerReport("b", "b:80", "always"), now=float(number) / 1000)
    assert {"m0", "m1"} & registry.seen().keys() == set()
    assert {"m2050", "m4096", "always"} <= registry.seen().keys()


@pytest.mark.parametrize(
    ("dialect", "connector", "way"),
    [
        ("tl", "", "tl"),
        ("", "", "tl"),
        ("vllm", "", ""),
        ("vllm", "nixl", "nixl"),
        ("sglang", "", "bootstrap"),
        ("llamacpp", "", "slots"),
        ("openai", "", ""),
    ],
)
def test_how_a_worker_hands_over(dialect: str, connector: str, way: str) -> None:
    assert connector_of(listed("a", dialect=dialect, connector=connector)) == way


# ------------------------------------------------------------------ load


def routed(router: Router, count: int) -> str:
    return "".join(
        sorted(
            router.route(InferenceRequest("m", f"r{n}"), now=1.0).worker.id for n in range(count)
        )
    )


def test_b09_what_other_gateways_put_in_the_engines_queue_counts() -> None:
    workers = [listed("a"), listed("b")]
    registry = fleet(*workers)
    registry.observe(workers[0], seen(queue_depth=5), now=2.0)
    router = Router(registry, LeastOutstanding(), RouteTable())
    assert routed(router, 1) == "b"
    assert load_of(workers[0]) == 5


def test_b11_engines_of_4_to_1_capacity_get_traffic_of_4_to_1() -> None:
    workers = [listed("a"), listed("b")]
    registry = fleet(*workers)
    registry.observe(workers[0], seen(kv_total_blocks=8000), now=2.0)
    registry.observe(workers[1], seen(kv_total_blocks=2000), now=2.0)
    router = Router(registry, Weighted(), RouteTable())
    assert routed(router, 50) == "a" * 40 + "b" * 10
    # What the operator says counts more than what the engine does.
    registry.set_listed(SOURCE, [listed("a", capacity=1), listed("b", capacity=1)])
    for worker in workers:
        registry.observe(worker, seen(kv_total_blocks=8000), now=3.0)
    assert routed(router, 50) == "a" * 25 + "b" * 25


def test_b15_days_of_long_answers_and_restarts_leave_no_count_behind() -> None:
    """Leases that end in any order, over engines that restart, move and are polled: no worker keeps a count."""
    draw = random.Random(15)
    registry = Registry()
    router = Router(registry, LeastOutstanding(), RouteTable())
    running: list[Lease] = []
    lives: set[Worker] = set()
    for hour in range(2000):
        if hour % 20 == 0:
            port = 8000 + hour if draw.random() < 0.5 else 8000
            workers = [listed(id, http_address=f"{id}:{port}") for id in "abc"]
            registry.set_listed(SOURCE, workers)
        for worker in registry.snapshot():
            lives.add(worker)
            registry.observe(worker, seen(up=draw.random() < 0.9, running=draw.randrange(9)), hour)
        if ids(registry):
            target = router.route(InferenceRequest("m", f"r{hour}"), now=float(hour))
            lease = Lease(target.worker)
            lease.__enter__()
            running.append(lease)
        while running and draw.random() < 0.5:
            running.pop(draw.randrange(len(running))).__exit__(None, None, None)
        assert sum(worker.in_flight for worker in lives) == len(running)
    for lease in running:
        lease.__exit__(None, None, None)
    assert not any(worker.in_flight for worker in lives)
    assert len(lives) > 100
