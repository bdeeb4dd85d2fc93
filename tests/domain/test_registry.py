"""Who is alive and who is routable, to the millisecond and through every change."""

import math
from typing import Any

import pytest
from msgspec.structs import replace

from pointsman.domain.observation import Observation
from pointsman.domain.policy.weighted import Weighted
from pointsman.domain.registry import (
    MEMORY_MODELS,
    STATIC,
    Ack,
    InvalidReport,
    Registry,
    RegistryFull,
    WorkerReport,
)
from pointsman.domain.request import InferenceRequest
from pointsman.domain.worker import Role, Worker, load_of


def report(worker_id: str = "a", **changes: object) -> WorkerReport:
    """A plausible heartbeat, with `changes`."""
    plain = WorkerReport(worker_id, f"{worker_id or 'x'}.local:8000", "smol")
    return replace(plain, **changes)


class Log:
    """What the registry told its listeners."""

    def __init__(self, registry: Registry) -> None:
        self.lines: list[str] = []
        self.workers: list[Worker] = []
        registry.on_join.append(lambda worker: self._note("join", worker))
        registry.on_leave.append(lambda worker: self._note("leave", worker))

    def _note(self, what: str, worker: Worker) -> None:
        self.lines.append(f"{what} {worker.id}")
        self.workers.append(worker)


def ids(workers: tuple[Worker, ...]) -> str:
    return "".join(worker.id for worker in workers)


# Liveness.


def test_r01_a_silent_worker_is_there_at_5_999_s_and_gone_at_6_s() -> None:
    registry = Registry()
    log = Log(registry)
    registry.beat(report("a"), 0.0)
    registry.expire(5.999)
    assert ids(registry.routable("smol", Role.UNIFIED)) == "a"
    registry.expire(6.0)
    assert registry.routable("smol", Role.UNIFIED) == ()
    assert registry.snapshot() == ()
    assert registry.models() == []
    assert not registry.any_routable()
    assert log.lines == ["join a", "leave a"]


@pytest.mark.parametrize("start", [0.0, 0.1, 1.7, 12345.678, 1e6 + 1 / 3])
def test_the_boundary_is_that_of_the_difference_however_the_sum_rounds(start: float) -> None:
    registry = Registry()
    registry.beat(report("a"), start)
    edge = start + 6.0
    for now in (math.nextafter(edge, 0), edge, math.nextafter(edge, math.inf)):
        registry.expire(now)
        assert bool(registry.snapshot()) == (now - start < 6.0)


@pytest.mark.parametrize(("misses", "interval", "lifetime"), [(1, 2.0, 2.0), (5, 0.5, 2.5)])
def test_the_lifetime_is_misses_times_interval(
    misses: int, interval: float, lifetime: float
) -> None:
    registry = Registry(misses, interval)
    registry.beat(report("a"), 10.0)
    registry.expire(10.0 + lifetime - 0.001)
    assert ids(registry.snapshot()) == "a"
    registry.expire(10.0 + lifetime)
    assert registry.snapshot() == ()


@pytest.mark.parametrize(("misses", "interval"), [(0, 2.0), (3, 0.0), (3, -1.0)])
def test_a_lifetime_of_nothing_is_refused(misses: int, interval: float) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Registry(misses, interval)


def test_each_worker_expires_by_its_own_heartbeat() -> None:
    registry = Registry()
    for worker_id, at in (("a", 0.0), ("b", 1.0), ("c", 2.0)):
        registry.beat(report(worker_id), at)
    registry.beat(report("a"), 4.0)
    registry.expire(7.0)
    assert ids(registry.snapshot()) == "ac"
    registry.expire(8.0)
    assert ids(registry.snapshot()) == "a"
    registry.expire(10.0)
    assert registry.snapshot() == ()


def test_nothing_is_due_before_next_expiry() -> None:
    registry = Registry()
    assert registry.next_expiry == math.inf
    registry.beat(report("a"), 0.0)
    registry.beat(report("b"), 1.0)
    assert registry.next_expiry == pytest.approx(6.0)
    registry.beat(report("a"), 4.0)
    registry.expire(6.0)
    assert registry.next_expiry == pytest.approx(7.0)
    registry.expire(20.0)
    assert registry.next_expiry == math.inf


def test_a_worker_that_comes_back_too_late_is_a_new_worker() -> None:
    registry = Registry()
    log = Log(registry)
    registry.beat(report("a"), 0.0)
    registry.beat(report("a"), 6.0)
    assert log.lines == ["join a", "leave a", "join a"]
    assert log.workers[0] is log.workers[1]
    assert registry.snapshot() == (log.workers[2],)


# Routable.


def test_workers_are_sorted_by_id_whatever_order_they_came_in() -> None:
    registry = Registry()
    for worker_id in "cab":
        registry.beat(report(worker_id), 0.0)
    assert ids(registry.snapshot()) == "abc"
    assert ids(registry.routable("smol", Role.UNIFIED)) == "abc"


def test_r03_a_draining_worker_is_not_routable_from_that_beat_on_but_stays_listed() -> None:
    registry = Registry()
    registry.beat(report("a"), 0.0)
    registry.beat(report("a", draining=True), 1.0)
    assert registry.routable("smol", Role.UNIFIED) == ()
    assert not registry.any_routable()
    assert ids(registry.snapshot()) == "a"
    registry.beat(report("a"), 2.0)
    assert ids(registry.routable("smol", Role.UNIFIED)) == "a"


def test_a_worker_that_joins_draining_is_never_routable() -> None:
    registry = Registry()
    registry.beat(report("a", draining=True), 0.0)
    assert registry.routable("smol", Role.UNIFIED) == ()


def test_a_drained_model_is_not_routable_also_for_workers_that_join_later() -> None:
    registry = Registry()
    assert registry.beat(report("a"), 0.0) == Ack(drain=False, route_epoch=0)
    registry.drain("smol")
    registry.route_epoch = 7
    assert registry.beat(report("a"), 1.0) == Ack(drain=True, route_epoch=7)
    assert registry.beat(report("b"), 1.0).drain
    assert not registry.beat(report("c", model="other"), 1.0).drain
    assert registry.drained == {"smol"}
    assert registry.routable("smol", Role.UNIFIED) == ()
    assert registry.models() == ["other"]
    registry.undrain("smol")
    registry.undrain("never drained")
    assert ids(registry.routable("smol", Role.UNIFIED)) == "ab"
    assert not registry.beat(report("a"), 2.0).drain


def test_roles_and_models_are_apart() -> None:
    registry = Registry()
    registry.beat(report("p", role="prefill"), 0.0)
    registry.beat(report("d", role="decode", kv_address="d.local:50052"), 0.0)
    registry.beat(report("u"), 0.0)
    registry.beat(report("x", model="large"), 0.0)
    assert ids(registry.routable("smol", Role.PREFILL)) == "p"
    assert ids(registry.routable("smol", Role.DECODE)) == "d"
    assert ids(registry.routable("smol", Role.UNIFIED)) == "u"
    assert ids(registry.routable("large", Role.UNIFIED)) == "x"
    assert registry.routable("large", Role.DECODE) == ()
    assert registry.models() == ["large", "smol"]


def test_routable_is_the_same_tuple_until_its_own_workers_change() -> None:
    registry = Registry()
    for worker_id in "ab":
        registry.beat(report(worker_id), 0.0)
    before = registry.routable("smol", Role.UNIFIED)
    registry.beat(report("a", queue_depth=3, running=2, kv_free_blocks=5, kv_tokens=9), 1.0)
    assert registry.routable("smol", Role.UNIFIED) is before
    assert (before[0].queue_depth, before[0].running) == (3, 2)
    assert (before[0].kv_free_blocks, before[0].kv_tokens) == (5, 9)
    registry.beat(report("x", model="other"), 1.0)
    assert registry.routable("smol", Role.UNIFIED) is before
    registry.beat(report("c"), 1.0)
    after = registry.routable("smol", Role.UNIFIED)
    assert after is not before
    assert ids(after) == "abc"
    assert ids(before) == "ab"


@pytest.mark.parametrize("change", [{"model": "large"}, {"role": "decode"}])
def test_a_worker_that_changes_its_model_or_role_moves(change: dict[str, str]) -> None:
    registry = Registry()
    log = Log(registry)
    registry.beat(report("a"), 0.0)
    assert ids(registry.routable("smol", Role.UNIFIED)) == "a"
    registry.beat(report("a", **change), 1.0)
    assert registry.routable("smol", Role.UNIFIED) == ()
    moved = registry.routable(change.get("model", "smol"), Role(change.get("role", "unified")))
    assert ids(moved) == "a"
    assert log.lines == ["join a"]


# Lives.


@pytest.mark.parametrize(
    "address", ["http_address", "grpc_address", "kv_address"]
)  # each alone is a move
def test_r05_address_change_replaces_the_worker_at_once(address: str) -> None:
    registry = Registry()
    log = Log(registry)
    registry.beat(report("a"), 0.0)
    old = registry.snapshot()[0]
    old.in_flight += 2
    assert registry.routable("smol", Role.UNIFIED) == (old,)
    registry.beat(report("a", **{address: "10.0.0.9:9000"}), 1.0)
    (new,) = registry.routable("smol", Role.UNIFIED)
    assert new is not old
    assert getattr(new, address) == "10.0.0.9:9000"
    assert registry.snapshot() == (new,)
    assert new.in_flight == 0
    assert old.in_flight == 2
    assert log.lines == ["join a", "leave a", "join a"]
    assert log.workers == [old, old, new]


@pytest.mark.parametrize(
    ("announced", "tls"), [("e:80", False), ("http://e:80", False), ("https://[::1]:443", True)]
)
def test_an_engine_may_announce_that_it_speaks_tls(announced: str, tls: bool) -> None:
    registry = Registry()
    registry.beat(report("a", http_address=announced), 0.0)
    (worker,) = registry.snapshot()
    assert (worker.http_address, worker.tls) == (announced, tls)


def test_listeners_see_the_finished_change() -> None:
    registry = Registry()
    seen: list[str] = []
    registry.on_leave.append(lambda worker: seen.append(ids(registry.snapshot())))
    registry.on_join.append(lambda worker: seen.append(ids(registry.snapshot())))
    registry.beat(report("a"), 0.0)
    registry.beat(report("b"), 0.0)
    registry.beat(report("a", incarnation=4), 1.0)
    registry.expire(6.0)
    assert seen == ["a", "ab", "ab", "ab", "a"]


def test_a_listener_that_fails_keeps_nobody_from_hearing_of_anybody() -> None:
    def fails(worker: Worker) -> None:
        raise RuntimeError(worker.id)

    registry = Registry()
    registry.on_leave.append(fails)
    log = Log(registry)
    for worker_id in "ab":
        registry.beat(report(worker_id), 0.0)
    with pytest.raises(RuntimeError):
        registry.expire(6.0)
    assert log.lines[2:] == ["leave a", "leave b"]
    assert registry.next_expiry == math.inf


def test_workers_that_leave_together_leave_in_the_order_of_their_ids() -> None:
    registry = Registry()
    log = Log(registry)
    for worker_id in "cab":
        registry.beat(report(worker_id), 0.0)
    registry.expire(6.0)
    assert log.lines[3:] == ["leave a", "leave b", "leave c"]


@pytest.mark.parametrize(
    ("incarnations", "lives"),
    [
        ([None, None], 1),
        ([5, 5], 1),
        ([5, None], 1),
        ([5, None, 5], 1),
        ([5, None, 6], 2),
        ([5, 6], 2),
        ([6, 5], 2),
        ([None, 5], 2),
        ([2**64 - 1, 2**64 - 1], 1),
    ],
)
def test_a_new_incarnation_is_a_new_worker_and_an_omitted_one_is_the_known(
    incarnations: list[int | None], lives: int
) -> None:
    registry = Registry()
    log = Log(registry)
    for second, incarnation in enumerate(incarnations):
        registry.beat(report("a", incarnation=incarnation), float(second))
    assert log.lines.count("join a") == lives
    assert log.lines.count("leave a") == lives - 1


# Nonsense.


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"worker_id": ""}, "worker_id"),
        ({"worker_id": "x" * 257}, "worker_id"),
        ({"worker_id": "two words"}, "worker_id"),
        ({"worker_id": "line\r\nfeed"}, "worker_id"),
        ({"worker_id": "wörker"}, "worker_id"),
        ({"model": ""}, "model"),
        ({"model": "m" * 257}, "model"),
        ({"model": "nul\0"}, "model"),
        ({"model": "lone \ud800"}, "model"),
        ({"role": ""}, "role '' is not one of unified, prefill, decode"),
        ({"role": "Unified"}, "role"),
        ({"role": "x" * 10_000}, "role"),
        ({"http_address": ""}, "http_address"),
        ({"http_address": "http://a"}, "http_address"),
        ({"http_address": "https://a:80/"}, "http_address"),
        ({"http_address": "ftp://a:80"}, "http_address"),
        ({"http_address": "https://https://a:80"}, "http_address"),
        ({"grpc_address": "https://a:80"}, "grpc_address"),
        ({"http_address": "a:80/path"}, "http_address"),
        ({"http_address": "a"}, "http_address"),
        ({"http_address": "a:"}, "http_address"),
        ({"http_address": ":80"}, "http_address"),
        ({"http_address": "a:0"}, "http_address"),
        ({"http_address": "a:65536"}, "http_address"),
        ({"http_address": "a:-1"}, "http_address"),
        ({"http_address": "a:٣"}, "http_address"),
        ({"http_address": "a b:80"}, "http_address"),
        ({"http_address": "a:80\n"}, "http_address"),
        ({"http_address": "h" * 300 + ":80"}, "http_address"),
        ({"grpc_address": "nonsense"}, "grpc_address"),
        ({"kv_address": "nonsense"}, "kv_address"),
        ({"kv_format": -1}, "kv_format"),
        ({"queue_depth": -1}, "queue_depth"),
        ({"running": -1}, "running"),
        ({"kv_free_blocks": -1}, "kv_free_blocks"),
        ({"kv_total_blocks": -1}, "kv_total_blocks"),
        ({"kv_tokens": -1}, "kv_tokens"),
        ({"incarnation": -1}, "incarnation"),
    ],
)
def test_nonsense_is_refused_and_changes_nothing(change: dict[str, object], message: str) -> None:
    registry = Registry()
    log = Log(registry)
    registry.beat(report("a", queue_depth=1), 0.0)
    (worker,) = registry.snapshot()
    with pytest.raises(InvalidReport, match=message):
        registry.beat(report(**({"worker_id": "a", "queue_depth": 2} | change)), 1.0)  # type: ignore[arg-type]
    assert registry.snapshot() == (worker,)
    assert (worker.queue_depth, worker.last_heartbeat) == (1, 0.0)
    assert registry.seen() == {"smol": 0.0}
    assert log.lines == ["join a"]


@pytest.mark.parametrize(
    "address", ["127.0.0.1:1", "[::1]:65535", "[fe80::1%eth0]:80", "pod-1.ns.svc:8000", "a_b:80"]
)
def test_every_form_of_host_and_port_is_taken(address: str) -> None:
    registry = Registry()
    registry.beat(report("a", http_address=address), 0.0)
    assert registry.snapshot()[0].http_address == address


# Static workers.


def static(worker_id: str = "s", port: int = 9001, **changes: Any) -> Worker:
    plain: dict[str, Any] = {"model": "smol", "http_address": f"10.0.0.1:{port}", "static": True}
    return Worker(worker_id, **(plain | changes))


def test_a_static_worker_is_always_live() -> None:
    registry = Registry()
    log = Log(registry)
    registry.add(static())
    assert registry.next_expiry == math.inf
    registry.beat(report("a"), 0.0)
    registry.expire(1e9)
    assert ids(registry.snapshot()) == "s"
    assert ids(registry.routable("smol", Role.UNIFIED)) == "s"
    assert log.lines == ["join s", "join a", "leave a"]
    assert registry.knows("smol", 1e9)


def test_a_heartbeat_cannot_take_over_a_static_id() -> None:
    registry = Registry()
    worker = static()
    registry.add(worker)
    with pytest.raises(InvalidReport, match="static"):
        registry.beat(report("s"), 0.0)
    assert registry.snapshot() == (worker,)


def test_a_static_worker_cannot_take_an_id_that_is_taken_or_malformed() -> None:
    registry = Registry()
    registry.add(static())
    with pytest.raises(InvalidReport, match="taken"):
        registry.add(static())
    with pytest.raises(InvalidReport, match="worker_id"):
        registry.add(static(""))


def test_a_static_worker_can_be_drained_by_its_model() -> None:
    registry = Registry()
    registry.add(static())
    registry.drain("smol")
    assert registry.routable("smol", Role.UNIFIED) == ()


def test_r17_a_static_list_that_changes_twice_leaves_nothing_of_a_removed_worker() -> None:
    registry = Registry()
    log = Log(registry)
    registry.set_static([static("a", 1), static("b", 2)])
    kept, removed = registry.snapshot()
    kept.in_flight += 3
    registry.set_static([static("a", 1), static("c", 3)])
    registry.set_static([static("c", 3), static("a", 1)])
    assert log.lines == ["join a", "join b", "leave b", "join c"]
    assert log.workers[2] is removed
    assert registry.snapshot()[0] is kept
    assert kept.in_flight == 3
    assert ids(registry.snapshot()) == ids(registry.routable("smol", Role.UNIFIED)) == "ac"
    registry.set_static([])
    assert registry.snapshot() == registry.routable("smol", Role.UNIFIED) == ()
    assert log.lines[4:] == ["leave a", "leave c"]
    registry.beat(report("b"), 0.0)  # The id is free again.
    assert ids(registry.snapshot()) == "b"


def test_r17_those_that_announce_themselves_are_not_touched() -> None:
    registry = Registry()
    registry.beat(report("a"), 0.0)
    (announced,) = registry.snapshot()
    registry.set_static([static("s")])
    registry.set_static([])
    assert registry.snapshot() == (announced,)


def test_o08_a_new_capacity_holds_for_the_same_worker_and_the_weighted_policy_follows() -> None:
    registry, policy, request = Registry(), Weighted(), InferenceRequest("smol", "r1")
    registry.set_static([static("a", 1, kv_total_blocks=1), static("b", 2, kv_total_blocks=1)])
    before = registry.snapshot()

    def picks(count: int) -> list[str]:
        workers = registry.routable("smol", Role.UNIFIED)
        return [policy.pick(workers, load_of, request)[0].id for _ in range(count)]

    assert picks(4) == ["a", "b", "a", "b"]
    registry.set_static([static("a", 1, kv_total_blocks=3), static("b", 2, kv_total_blocks=1)])
    assert registry.snapshot() == before
    assert before[0].kv_total_blocks == 3
    assert picks(8) == ["a", "a", "b", "a"] * 2


@pytest.mark.parametrize("change", [{"model": "large"}, {"role": Role.PREFILL}])
def test_o08_a_static_worker_that_gets_another_model_or_role_moves(change: dict[str, Any]) -> None:
    registry = Registry()
    log = Log(registry)
    registry.set_static([static("a")])
    assert ids(registry.routable("smol", Role.UNIFIED)) == "a"
    registry.set_static([static("a", **change)])
    assert registry.routable("smol", Role.UNIFIED) == ()
    moved = registry.routable(change.get("model", "smol"), change.get("role", Role.UNIFIED))
    assert ids(moved) == "a"
    assert log.lines == ["join a"]


@pytest.mark.parametrize(
    "change", [{"http_address": "10.0.0.1:9002"}, {"base_path": "/v"}, {"http_address": "h:9001"}]
)
def test_a_static_worker_with_a_new_address_is_a_new_worker(change: dict[str, Any]) -> None:
    registry = Registry()
    log = Log(registry)
    registry.set_static([static("a")])
    (old,) = registry.snapshot()
    old.in_flight += 1
    registry.set_static([static("a", **change)])
    (new,) = registry.routable("smol", Role.UNIFIED)
    assert new is not old
    assert new.in_flight == 0
    assert log.lines == ["join a", "leave a", "join a"]
    assert log.workers == [old, old, new]


def test_a_worker_becomes_static_whatever_its_flag_said() -> None:
    registry = Registry()
    registry.set_static([static("a", static=False)])
    assert registry.snapshot()[0].static
    registry.expire(1e9)
    assert ids(registry.snapshot()) == "a"


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        ([static("new"), static("beats")], "'beats' is taken"),
        ([static("new"), static("new")], "'new' is taken"),
        ([static("new"), static("two words")], "worker_id"),
        ([static("new"), static("n", model="")], "model"),
        ([static(str(number)) for number in range(4)], "there are 4 workers"),
    ],
)
def test_a_static_list_that_makes_no_sense_changes_nothing(wanted: list[Worker], why: str) -> None:
    registry = Registry(workers_max=4)
    registry.beat(report("beats"), 0.0)
    registry.set_static([static("s")])
    log = Log(registry)
    before = registry.snapshot()
    for check in (registry.check_static, registry.set_static):
        with pytest.raises(InvalidReport, match=why):
            check(wanted)
    with pytest.raises(InvalidReport, match=why), registry.reserved(wanted):
        raise AssertionError("nothing is reserved")
    assert registry.snapshot() == before
    assert log.lines == []
    registry.beat(report("new"), 0.0)  # Nothing is left reserved.


def test_no_heartbeat_takes_the_id_or_the_room_that_is_reserved() -> None:
    registry = Registry(workers_max=4)
    registry.set_static([static("s")])
    registry.beat(report("a"), 0.0)
    wanted = [static("s"), static("t")]
    with registry.reserved(wanted):
        with pytest.raises(InvalidReport, match="'t' belongs to a static worker"):
            registry.beat(report("t"), 0.0)
        registry.beat(report("a"), 1.0)
        registry.beat(report("b"), 1.0)
        with pytest.raises(RegistryFull):
            registry.beat(report("c"), 1.0)
        registry.set_static(wanted)
    assert ids(registry.snapshot()) == "abst"


def test_what_was_reserved_in_vain_is_free_again() -> None:
    registry = Registry(workers_max=1)
    with pytest.raises(OSError, match="disk"), registry.reserved([static("t")]):
        raise OSError("disk")
    registry.beat(report("t"), 0.0)
    assert ids(registry.snapshot()) == "t"


# How many there may be.


def test_o12_three_thousand_workers_are_all_visible_and_routable() -> None:
    registry = Registry()
    names = sorted(f"w{number}" for number in range(3000))
    for second in (0.0, 2.0):
        for name in names:
            registry.beat(report(name), second)
    assert [worker.id for worker in registry.snapshot()] == names
    assert [worker.id for worker in registry.routable("smol", Role.UNIFIED)] == names


def test_o12_one_worker_too_many_is_refused_in_words_and_the_others_go_on() -> None:
    registry = Registry(workers_max=3000)
    for number in range(3000):
        registry.beat(report(f"w{number}"), 0.0)
    log = Log(registry)
    with pytest.raises(RegistryFull, match="there are 3000 workers, as many as there may be"):
        registry.beat(report("late", model="never seen"), 1.0)
    with pytest.raises(RegistryFull):
        registry.add(static())
    assert len(registry.snapshot()) == 3000
    assert not registry.knows("never seen", 1.0)
    assert log.lines == []
    assert not registry.beat(report("w7", queue_depth=3), 1.0).drain
    # A new life under an old id needs no room, and one that leaves makes some.
    registry.beat(report("w7", incarnation=2), 1.0)
    registry.expire(6.5)
    assert ids(registry.snapshot()) == "w7"
    registry.beat(report("late"), 6.5)
    assert ids(registry.snapshot()) == "latew7"


def test_o12_a_registry_for_nobody_is_refused() -> None:
    with pytest.raises(ValueError, match="workers_max"):
        Registry(workers_max=0)


# The memory of the last hour.


def test_r16_a_model_is_known_for_an_hour_after_its_last_worker() -> None:
    registry = Registry()
    assert not registry.knows("smol", 0.0)
    registry.beat(report("a"), 0.0)
    registry.beat(report("a"), 5.0)
    registry.expire(100.0)
    assert registry.snapshot() == ()
    assert registry.knows("smol", 3605.0)
    assert not registry.knows("smol", 3605.1)


def test_r16_what_the_store_remembers_is_known_after_a_restart() -> None:
    registry = Registry()
    registry.remember("smol", 100.0)
    registry.remember("smol", 50.0)
    assert registry.seen() == {"smol": 100.0}
    assert registry.knows("smol", 3700.0)
    registry.beat(report("a"), 200.0)
    assert registry.seen() == {"smol": 200.0}


def test_r16_a_draining_worker_makes_its_model_known() -> None:
    registry = Registry()
    registry.add(static())
    registry.snapshot()[0].draining = True
    assert registry.knows("smol", 1e9)


def test_the_memory_is_bounded_and_forgets_the_oldest_first() -> None:
    registry = Registry()
    for number in range(MEMORY_MODELS):
        registry.remember(f"m{number}", float(number))
    registry.remember("m0", 1e6)
    for number in range(10):
        registry.remember(f"n{number}", 2e6)
    seen = registry.seen()
    assert len(seen) == MEMORY_MODELS
    assert "m0" in seen
    assert "m10" not in seen
    assert "m11" in seen


# Several who list workers.


def test_what_is_reserved_for_an_operator_no_source_takes_nor_its_room() -> None:
    registry = Registry(workers_max=3)
    registry.set_listed("dns", [static("a")])
    released: list[str] = []
    registry.on_release.append(lambda: released.append(ids(registry.snapshot())))
    with registry.reserved([static("t")]):
        with pytest.raises(InvalidReport, match="'t' belongs to a static worker"):
            registry.set_listed("dns", [static("a"), static("t")])
        assert (registry.room("dns"), registry.room("file"), registry.room(STATIC)) == (2, 1, 2)
        with pytest.raises(RegistryFull):
            registry.set_listed("file", [static("b"), static("c")])
        registry.set_listed("dns", [static("a"), static("b")])
        registry.set_static([static("t")])
    assert ids(registry.snapshot()) == "abt"
    assert released == ["abt"]


def test_a_source_keeps_the_id_that_an_operator_s_change_is_about_to_take_until_it_does() -> None:
    registry = Registry()
    registry.set_listed("dns", [static("a")])
    with pytest.raises(OSError, match="disk"), registry.reserved([static("a")]):
        registry.set_listed("dns", [static("a")])
        raise OSError("disk")
    assert [each.source for each in registry.snapshot()] == ["dns"]


@pytest.mark.parametrize("port", [9001, 9002])
def test_the_worker_of_an_operator_takes_the_place_of_one_that_was_found(port: int) -> None:
    registry = Registry(workers_max=2)
    found, other = static("a"), static("b")
    registry.set_listed("dns", [found, other])
    log = Log(registry)
    wanted = static("a", port)
    registry.check_static([wanted])
    registry.set_static([wanted])
    assert [(each.id, each.source) for each in registry.snapshot()] == [("a", STATIC), ("b", "dns")]
    assert log.lines == ["leave a", "join a"]
    assert log.workers == [found, wanted]
    with pytest.raises(InvalidReport, match="'a' is taken"):
        registry.set_listed("dns", [static("a")])
    with pytest.raises(InvalidReport, match="'b' is taken"):
        registry.set_listed("file", [static("b")])
    registry.set_static([])
    registry.set_listed("dns", [static("a"), static("b")])
    assert [each.source for each in registry.snapshot()] == ["dns", "dns"]


def test_no_operator_takes_the_place_of_a_worker_that_announces_itself() -> None:
    registry = Registry()
    registry.beat(report("a"), 0.0)
    with pytest.raises(InvalidReport, match="'a' is taken"):
        registry.set_static([static("a")])


# What is read.


def test_p19_a_reading_is_told_where_it_is_new_and_whole() -> None:
    registry = Registry()
    told: list[tuple[str, int, float]] = []
    registry.on_reading.append(
        lambda worker: told.append((worker.id, worker.remote_tokens, worker.last_heartbeat))
    )
    polled = static("p", polled=True, dialect="vllm")
    registry.set_static([polled])
    good = Observation(up=True, dialect="vllm", model="smol", remote_tokens=7)
    registry.observe(polled, good, 1.0)
    registry.observe(polled, replace(good, stale=True), 3.0)
    registry.observe(polled, replace(good, up=False), 5.0)
    registry.observe(static("p"), good, 7.0)
    registry.beat(report("b", remote_tokens=9), 9.0)
    registry.beat(report("b", remote_tokens=9), 10.0)
    assert told == [("p", 7, 1.0)]
