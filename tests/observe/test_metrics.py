"""The metrics: names, labels and buckets of the contract, bounded labels, no ghosts, a small price."""

import random
from timeit import timeit

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pointsman.domain.keys import Principal
from pointsman.domain.registry import Registry, WorkerReport
from pointsman.domain.request import InferenceRequest
from pointsman.domain.router import Target
from pointsman.domain.worker import Role, Worker
from pointsman.flow.exchange import Attempt, Exchange
from pointsman.observe.metrics import Metrics, Totals

CHAT = "/v1/chat/completions"
PATHS = (CHAT, "/v1/completions", "/v1/embeddings", "/v1/models")

Sample = tuple[str, tuple[tuple[str, str], ...]]


def exchange(
    *,
    model: str = "m",
    path: str = CHAT,
    operation: str = "chat",
    stream: bool = False,
    status: int = 200,
    error: str = "",
    worker: str = "a",
    reason: str = "load",
    tenant: str = "anonymous",
    failures: tuple[str, ...] = (),
    attempts: int = 1,
    first_byte: float = 0.0,
    took: float = 0.3,
) -> Exchange:
    request = InferenceRequest(model, "r", stream=stream, prompt=None, messages=None)
    principal = Principal("k", tenant, frozenset())
    x = Exchange(request, path=path, operation=operation, started=100.0, principal=principal)
    x.status, x.error = status, error
    target = Target(Worker(worker, model=model, http_address="127.0.0.1:8000"), model, reason)
    outcomes = (*failures, *[""] * (attempts - len(failures)))
    x.tries = [Attempt(target, 100.0, failure) for failure in outcomes]
    x.first_byte_at = 100.0 + first_byte if first_byte else 0.0
    x.finished_at = 100.0 + took
    return x


def samples(metrics: Metrics) -> dict[Sample, float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return samples(metrics).get((name, tuple(sorted(labels.items()))))


def label_values(metrics: Metrics, name: str, label: str) -> set[str]:
    return {dict(labels)[label] for found, labels in samples(metrics) if found == name}


def bounds(metrics: Metrics, name: str) -> list[float]:
    return sorted(float(le) for le in label_values(metrics, f"{name}_bucket", "le"))


def nobody() -> tuple[Worker, ...]:
    return ()


# ------------------------------------------------------------------ the contract


def test_buckets_are_those_of_the_contract() -> None:
    metrics = Metrics(nobody, PATHS)
    metrics.finished(exchange(stream=True, first_byte=0.1))
    inf = float("inf")
    assert bounds(metrics, "gen_ai_server_time_to_first_token_seconds") == [
        *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1),
        *(0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, inf),
    ]
    assert bounds(metrics, "gen_ai_server_request_duration_seconds") == [
        *(0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12),
        *(10.24, 20.48, 40.96, 81.92, inf),
    ]
    assert bounds(metrics, "http_server_request_duration_seconds") == [
        *(0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1),
        *(2.5, 5, 7.5, 10, inf),
    ]


def test_one_request_is_counted_under_the_labels_of_the_contract() -> None:
    metrics = Metrics(nobody, PATHS)
    metrics.finished(exchange(took=0.25))
    of_model = {
        "gen_ai_operation_name": "chat",
        "gen_ai_request_model": "m",
        "tl_engine_role": "gateway",
        "error_type": "",
    }
    of_path = {
        "http_request_method": "POST",
        "http_route": CHAT,
        "http_response_status_code": "200",
    }
    by_model = "gen_ai_server_request_duration_seconds"
    by_path = "http_server_request_duration_seconds"
    assert value(metrics, f"{by_model}_count", **of_model) == 1
    assert value(metrics, f"{by_model}_sum", **of_model) == 0.25
    assert value(metrics, f"{by_model}_bucket", le="0.16", **of_model) == 0
    assert value(metrics, f"{by_model}_bucket", le="0.32", **of_model) == 1
    assert value(metrics, f"{by_path}_bucket", le="0.1", **of_path) == 0
    assert value(metrics, f"{by_path}_bucket", le="0.25", **of_path) == 1
    assert value(metrics, f"{by_path}_sum", **of_path) == 0.25
    assert (
        value(metrics, "tl_gateway_requests_total", route=CHAT, code="200", tenant="anonymous") == 1
    )


def test_both_histograms_of_one_search_equal_a_count_by_hand() -> None:
    draw = random.Random(7)
    durations = [draw.expovariate(1.0) ** 3 for _ in range(500)] + [0.01, 0.25, 81.92, 10.0, 0.0]
    metrics = Metrics(nobody, PATHS)
    for duration in durations:
        x = exchange(took=0.0)
        x.started, x.finished_at = 0.0, duration
        metrics.finished(x)
    found = samples(metrics)
    buckets = [
        (dict(labels)["le"], count) for (name, labels), count in found.items() if "_bucket" in name
    ]
    assert len(buckets) == 15 + 15
    for bound, count in buckets:
        assert count == sum(duration <= float(bound) for duration in durations), bound


def test_errors_are_a_label_of_the_model_and_statuses_one_of_the_path() -> None:
    metrics = Metrics(nobody, PATHS)
    metrics.finished(exchange())
    metrics.finished(exchange(status=503, error="no_capacity"))
    metrics.finished(exchange(status=503, error="no_capacity"))
    assert (
        value(
            metrics,
            "gen_ai_server_request_duration_seconds_count",
            gen_ai_operation_name="chat",
            gen_ai_request_model="m",
            tl_engine_role="gateway",
            error_type="no_capacity",
        )
        == 2
    )
    name = "tl_gateway_requests_total"
    assert value(metrics, name, route=CHAT, code="200", tenant="anonymous") == 1
    assert value(metrics, name, route=CHAT, code="503", tenant="anonymous") == 2


# ------------------------------------------------------------------ time to the first token

TTFT = "gen_ai_server_time_to_first_token_seconds_count"


def test_s15_the_first_token_is_the_first_body_byte_and_not_the_end_of_the_stream() -> None:
    metrics = Metrics(nobody, PATHS)
    metrics.finished(exchange(stream=True, first_byte=0.03, took=60.0))
    labels = {
        "gen_ai_operation_name": "chat",
        "gen_ai_request_model": "m",
        "tl_engine_role": "gateway",
    }
    assert value(metrics, TTFT, **labels) == 1
    name = "gen_ai_server_time_to_first_token_seconds_bucket"
    assert value(metrics, name, le="0.02", **labels) == 0
    assert value(metrics, name, le="0.04", **labels) == 1


@pytest.mark.parametrize(
    "x",
    [
        exchange(stream=False, first_byte=0.1),
        exchange(stream=True, first_byte=0.0),
        exchange(stream=True, first_byte=0.1, status=400),
    ],
    ids=["plain", "nothing came", "an error"],
)
def test_s15_only_successful_streams_have_a_first_token(x: Exchange) -> None:
    metrics = Metrics(nobody, PATHS)
    metrics.finished(x)
    assert TTFT not in {name for name, _ in samples(metrics)}


# ------------------------------------------------------------------ bounded labels


@pytest.mark.slow
def test_o02_ten_thousand_models_make_at_most_64_labels_and_other() -> None:
    metrics = Metrics(nobody, PATHS)
    for i in range(10_000):
        metrics.finished(exchange(model=f"m{i}", stream=True, first_byte=0.1))
    for name in ("gen_ai_server_request_duration_seconds_count", TTFT):
        models = label_values(metrics, name, "gen_ai_request_model")
        assert models == {*(f"m{i}" for i in range(64)), "_other"}


def test_o02_names_that_no_worker_answered_for_cannot_take_the_labels() -> None:
    metrics = Metrics(nobody, PATHS)
    for i in range(1000):
        metrics.finished(
            exchange(model=f"x{i}", worker="", attempts=0, status=404, error="model_not_found")
        )
    metrics.finished(exchange(model="real"))
    metrics.finished(exchange(model="real", worker="", attempts=0, status=503, error="no_capacity"))
    assert label_values(
        metrics, "gen_ai_server_request_duration_seconds_count", "gen_ai_request_model"
    ) == {"_other", "real"}


def test_o02_unknown_paths_methods_and_errors_are_bounded() -> None:
    metrics = Metrics(nobody, PATHS)
    for i in range(1000):
        metrics.answered(f"M{i}", f"/x/{i}", 404, 0.001)
        metrics.finished(exchange(status=500, error=f"e{i}"))
    assert label_values(metrics, "tl_gateway_requests_total", "route") == {CHAT, "_other"}
    durations = "http_server_request_duration_seconds_count"
    assert label_values(metrics, durations, "http_request_method") == {"POST", "_other"}
    errors = label_values(metrics, "gen_ai_server_request_duration_seconds_count", "error_type")
    assert len(errors) == 65
    assert "_other" in errors
    counts = [
        count
        for (name, _), count in samples(metrics).items()
        if name == "gen_ai_server_request_duration_seconds_count"
    ]
    assert sum(counts) == 1000


def test_an_answer_without_an_exchange_counts_by_its_method() -> None:
    metrics = Metrics(nobody, PATHS)
    metrics.answered("GET", "/v1/models", 200, 0.002)
    metrics.answered("GET", "/v1/models", 200, 0.004)
    assert (
        value(
            metrics,
            "http_server_request_duration_seconds_sum",
            http_request_method="GET",
            http_route="/v1/models",
            http_response_status_code="200",
        )
        == 0.006
    )
    name = "tl_gateway_requests_total"
    assert value(metrics, name, route="/v1/models", code="200", tenant="anonymous") == 2


@pytest.mark.slow
def test_o02_ten_thousand_of_everything_that_a_client_can_make_up_stay_a_small_page() -> None:
    """Models, paths, methods, tenants and request ids: all at once, and no name in more than 64 labels."""
    metrics = Metrics(nobody, PATHS)
    for i in range(10_000):
        asked = exchange(model=f"m{i}", path=f"/p{i}", tenant=f"t{i}", reason=f"r{i}", stream=True)
        asked.request.request_id = f"id{i}"
        asked.first_byte_at = 100.1
        metrics.finished(asked)
        metrics.finished(exchange(model=f"x{i}", attempts=0, status=404, error=f"e{i}"))
        metrics.answered(f"M{i}", f"/q{i}", 401, 0.001, f"code{i}")
    page = metrics.render().decode()
    assert len(page.splitlines()) < 7000
    assert "id5" not in page
    for name, label in (
        ("gen_ai_server_request_duration_seconds_count", "gen_ai_request_model"),
        ("gen_ai_server_request_duration_seconds_count", "error_type"),
        ("tl_gateway_requests_total", "tenant"),
        ("tl_gateway_decisions_total", "reason"),
        ("tl_gateway_decisions_total", "model"),
    ):
        values = label_values(metrics, name, label)
        assert "_other" in values
        assert len(values - {"_other", "", "anonymous"}) <= 64, label
    assert label_values(metrics, "tl_gateway_auth_refusals_total", "code") == {
        "invalid_api_key",
        "insufficient_scope",
    }
    total = sum(v for (name, _), v in samples(metrics).items() if name.endswith("_requests_total"))
    assert total == 30_000


def test_o02_the_memory_behind_the_page_is_bounded_too() -> None:
    """Requests may end after their worker left; nobody needs to scrape for that to be forgotten."""
    metrics = Metrics(nobody, PATHS)
    for i in range(10_000):
        metrics.finished(exchange(worker=f"pod-{i}"))
        metrics.forget_worker(f"pod-{i}")
        metrics.finished(exchange(worker=f"pod-{i}"))
    assert len(metrics._tries) <= 1100
    assert value(metrics, "tl_gateway_attempts_total", outcome="answered") == 20_000
    assert value(metrics, "tl_gateway_decisions_total", reason="load", model="m") == 20_000


# ------------------------------------------------------------------ what is gone


def test_the_series_of_a_worker_go_with_it_and_the_wider_counters_stay() -> None:
    registry = Registry()
    metrics = Metrics(registry.snapshot, PATHS)
    registry.on_leave.append(lambda worker: metrics.forget_worker(worker.id))
    registry.beat(WorkerReport("a", "h:1", "m"), 0.0)
    registry.beat(WorkerReport("b", "h:2", "m"), 5.0)
    metrics.finished(exchange(worker="a", failures=("reset",), attempts=2))
    metrics.finished(exchange(worker="b"))
    name = "tl_gateway_worker_requests_total"
    assert value(metrics, name, worker_id="a", outcome="reset") == 1
    assert metrics.totals().workers == {"a": 2, "b": 1}
    registry.expire(6.0)
    metrics.finished(exchange(worker="a"))  # it was in flight when its worker left
    assert label_values(metrics, name, "worker_id") == {"b"}
    assert metrics.totals().workers == {"b": 1}
    assert value(metrics, "tl_gateway_attempts_total", outcome="answered") == 3
    assert value(metrics, "tl_gateway_attempts_total", outcome="reset") == 1
    assert value(metrics, "tl_gateway_decisions_total", reason="load", model="m") == 4
    registry.beat(WorkerReport("a", "h:1", "m"), 7.0)
    metrics.finished(exchange(worker="a"))
    assert value(metrics, name, worker_id="a", outcome="answered") == 1


@pytest.mark.slow
def test_the_series_of_a_model_that_nobody_has_go_and_its_place_is_free_again() -> None:
    kept = {f"m{i}" for i in range(64)}
    metrics = Metrics(nobody, PATHS, known=lambda model: model in kept)
    for model in (*sorted(kept), "late"):
        metrics.finished(exchange(model=model, stream=True, first_byte=0.1, took=0.5))
        metrics.finished(exchange(model=model, status=503, error="no_capacity"))
    model_labels = {
        "gen_ai_server_request_duration_seconds_count": "gen_ai_request_model",
        TTFT: "gen_ai_request_model",
        "tl_gateway_decisions_total": "model",
    }
    before = metrics.totals()
    for name, label in model_labels.items():
        assert label_values(metrics, name, label) == {*kept, "_other"}
    kept -= {"m7", "m8"}
    kept |= {"late"}
    for name, label in model_labels.items():
        assert label_values(metrics, name, label) == {*kept, "_other"} - {"late"}
    metrics.finished(exchange(model="late"))
    metrics.finished(exchange(model="m7", attempts=0, status=404, error="model_not_found"))
    durations = "gen_ai_server_request_duration_seconds_count"
    assert label_values(metrics, durations, "gen_ai_request_model") == {*kept, "_other"}
    # Nothing that is counted otherwise has gone back.
    after = metrics.totals()
    assert after.requests_total == before.requests_total + 2 == 132
    assert after.first_byte_count == before.first_byte_count == 65
    assert after.first_byte_seconds_sum == pytest.approx(6.5)
    name = "tl_gateway_requests_total"
    assert value(metrics, name, route=CHAT, code="200", tenant="anonymous") == 66
    assert value(metrics, name, route=CHAT, code="503", tenant="anonymous") == 65


def test_models_may_be_forgotten_on_demand() -> None:
    metrics = Metrics(nobody, PATHS)
    metrics.finished(exchange(model="a"))
    metrics.finished(exchange(model="b"))
    metrics.finished(exchange(model="b", stream=True, first_byte=0.1))
    metrics.forget_models(lambda model: model == "a")
    assert label_values(metrics, "tl_gateway_decisions_total", "model") == {"a"}
    metrics.finished(exchange(model="b"))
    metrics.finished(exchange(model="b", stream=True, first_byte=0.1))
    metrics.forget_models(lambda model: model == "a")
    assert label_values(metrics, "tl_gateway_decisions_total", "model") == {"a"}
    assert metrics.totals().requests_total == 5
    assert metrics.totals().first_byte_count == 2


# ------------------------------------------------------------------ who asked, and what it was told


def test_requests_are_counted_by_tenant() -> None:
    metrics = Metrics(nobody, PATHS)
    for tenant in ("acme", "acme", "globex"):
        metrics.finished(exchange(tenant=tenant))
    name = "tl_gateway_requests_total"
    assert value(metrics, name, route=CHAT, code="200", tenant="acme") == 2
    assert value(metrics, name, route=CHAT, code="200", tenant="globex") == 1


def test_refused_keys_are_counted_by_code_and_other_errors_are_not() -> None:
    metrics = Metrics(nobody, PATHS)
    for status, code in (
        *((401, "invalid_api_key"), (401, "invalid_api_key"), (403, "insufficient_scope")),
        *((404, "not_found"), (403, "")),
    ):
        metrics.answered("POST", CHAT, status, 0.001, code)
    assert value(metrics, "tl_gateway_auth_refusals_total", code="invalid_api_key") == 2
    assert value(metrics, "tl_gateway_auth_refusals_total", code="insufficient_scope") == 1


def test_decisions_are_counted_by_reason_and_model() -> None:
    metrics = Metrics(nobody, PATHS)
    for reason in ("affinity", "affinity", "canary"):
        metrics.finished(exchange(reason=reason))
    name = "tl_gateway_decisions_total"
    assert value(metrics, name, reason="affinity", model="m") == 2
    assert value(metrics, name, reason="canary", model="m") == 1


# ------------------------------------------------------------------ the control plane


def test_reloads_are_counted_and_the_last_one_is_a_gauge() -> None:
    clock = [1000.0]
    metrics = Metrics(nobody, PATHS, wall=lambda: clock[0])
    last = "tl_gateway_config_last_reload_success"
    assert value(metrics, f"{last}ful") == 1
    assert value(metrics, f"{last}_timestamp_seconds") == 1000
    clock[0] = 1100.0
    metrics.reloaded(worked=False)
    assert value(metrics, f"{last}ful") == 0
    assert value(metrics, f"{last}_timestamp_seconds") == 1000
    metrics.reloaded(worked=True)
    assert value(metrics, f"{last}ful") == 1
    assert value(metrics, f"{last}_timestamp_seconds") == 1100
    for outcome in ("success", "failure"):
        assert value(metrics, "tl_gateway_config_reloads_total", outcome=outcome) == 1


def test_what_others_know_is_asked_on_a_scrape() -> None:
    drained: set[str] = set()
    epochs = iter((4, 5))
    metrics = Metrics(nobody, PATHS, route_epoch=lambda: next(epochs), drained=lambda: drained)
    assert value(metrics, "tl_gateway_route_epoch") == 4
    assert value(metrics, "tl_gateway_route_epoch") == 5
    metrics = Metrics(nobody, PATHS, drained=lambda: drained)
    drained |= {"a", "b"}
    metrics.lines_dropped = lambda: 7
    metrics.records_dropped = lambda: 8
    metrics.prefix_blocks = lambda: 9
    metrics.spans = lambda: {"sent": 3, "failed": 1}
    metrics.calls_dropped = lambda: {"required": 0, "optional": 5}
    metrics.engine_drained(worked=True)
    metrics.engine_drained(worked=False)
    metrics.engine_drained(worked=False)
    assert value(metrics, "tl_gateway_drained_models") == 2
    assert value(metrics, "tl_gateway_log_lines_dropped_total") == 7
    assert value(metrics, "tl_gateway_records_dropped_total") == 8
    assert value(metrics, "tl_gateway_prefix_index_blocks") == 9
    assert value(metrics, "tl_gateway_spans_total", outcome="sent") == 3
    assert value(metrics, "tl_gateway_calls_dropped_total", kind="required") == 0
    assert value(metrics, "tl_gateway_calls_dropped_total", kind="optional") == 5
    assert value(metrics, "tl_gateway_engine_drains_total", outcome="success") == 1
    assert value(metrics, "tl_gateway_engine_drains_total", outcome="failure") == 2


def test_the_totals_of_a_gateway() -> None:
    clock = [1000.0]
    worker = Worker("a", model="m", http_address="h:1")
    metrics = Metrics(lambda: (worker,), PATHS, wall=lambda: clock[0])
    clock[0] = 1060.5
    worker.in_flight = 2
    for x in (
        exchange(),
        exchange(stream=True, first_byte=0.25, failures=("reset", "503"), attempts=3),
        exchange(stream=True, first_byte=0.5, error="timed out"),  # broke
        exchange(status=502),  # relayed
        exchange(attempts=0, status=503, error="no_capacity"),
        exchange(attempts=0, status=404, error="model_not_found"),  # the client's own
        exchange(status=400),
        exchange(status=499, error="client_gone"),
        exchange(status=200, error="client_gone", stream=True, first_byte=0.125),
        exchange(worker="gone"),
    ):
        metrics.finished(x)
    assert metrics.totals() == Totals(
        started_at=1000.0,
        now=1060.5,
        requests_total=10,
        errors_total=3,
        failovers_total=2,
        first_byte_seconds_sum=0.875,
        first_byte_count=3,
        in_flight=2,
        workers={"a": 9},
    )


# ------------------------------------------------------------------ attempts and events


@pytest.mark.parametrize(
    ("x", "attempts", "failovers"),
    [
        (exchange(), {"answered": 1}, {}),
        (
            exchange(failures=("reset", "503"), attempts=3),
            {"reset": 1, "503": 1, "answered": 1},
            {"reset": 1, "503": 1},
        ),
        (
            exchange(failures=("refused", "refused"), attempts=2, status=503, error="no_capacity"),
            {"refused": 2},
            {"refused": 1},
        ),
        (
            exchange(failures=("reset",), attempts=2, error="timed out", first_byte=0.1),
            {"reset": 1, "broken": 1},
            {"reset": 1},
        ),
        (exchange(status=499, error="client_gone"), {"client_gone": 1}, {}),
        (exchange(attempts=0, worker="", status=503, error="no_capacity"), {}, {}),
    ],
    ids=["answered", "failed over", "gave up", "broke", "client left", "nobody to ask"],
)
def test_every_attempt_and_every_failover_is_counted_once(
    x: Exchange, attempts: dict[str, int], failovers: dict[str, int]
) -> None:
    metrics = Metrics(nobody, PATHS)
    metrics.finished(x)
    found = samples(metrics)
    counted = {
        name: {
            dict(labels)[label]: count
            for (sample, labels), count in found.items()
            if sample == f"tl_gateway_{name}_total"
        }
        for name, label in (("attempts", "outcome"), ("failovers", "why"))
    }
    assert counted == {"attempts": attempts, "failovers": failovers}


def test_an_attempt_that_answered_and_was_followed_by_another_is_no_failover() -> None:
    metrics = Metrics(nobody, PATHS)
    metrics.finished(exchange(attempts=2, reason="cascade"))
    found = {name for name, _ in samples(metrics)}
    assert "tl_gateway_failovers_total" not in found
    assert value(metrics, "tl_gateway_attempts_total", outcome="answered") == 2
    assert value(metrics, "tl_gateway_decisions_total", reason="cascade", model="m") == 2


def test_clients_that_leave_are_counted_by_stage() -> None:
    metrics = Metrics(nobody, PATHS)
    metrics.finished(exchange(status=499, error="client_gone"))
    metrics.finished(exchange(status=200, error="client_gone", first_byte=0.1, stream=True))
    for stage in ("waiting", "relaying"):
        assert value(metrics, "tl_gateway_client_disconnects_total", stage=stage) == 1


def test_events_of_the_data_plane_are_counted() -> None:
    metrics = Metrics(nobody, PATHS)
    metrics.stale_resend()
    metrics.pool_wait()
    metrics.pool_wait()
    metrics.fault("heartbeat")
    metrics.opened("downstream")
    metrics.opened("downstream")
    metrics.closed("downstream")
    metrics.opened("upstream")
    assert value(metrics, "tl_gateway_stale_connection_resends_total") == 1
    assert value(metrics, "tl_gateway_pool_waits_total") == 2
    assert value(metrics, "tl_gateway_faults_total", where="heartbeat") == 1
    assert value(metrics, "tl_gateway_connections", side="downstream") == 1
    assert value(metrics, "tl_gateway_connections", side="upstream") == 1


def test_the_gateways_own_memory_and_processor_time_are_shown() -> None:
    metrics = Metrics(nobody, PATHS)
    assert (value(metrics, "process_resident_memory_bytes") or 0) > 1e6
    assert value(metrics, "process_cpu_seconds_total") is not None


# ------------------------------------------------------------------ live workers


def test_workers_are_counted_by_role_and_state() -> None:
    def fleet() -> tuple[Worker, ...]:
        return (
            Worker("a", model="m", http_address="h:1"),
            Worker("b", model="m", http_address="h:2", draining=True),
            Worker("c", model="m", http_address="h:3", role=Role.DECODE),
            Worker("d", model="m", http_address="h:4", polled=True, role=Role.DECODE),
            Worker("e", model="m", http_address="h:5", terminating=True, role=Role.PREFILL),
        )

    metrics = Metrics(fleet, PATHS)
    counts = {
        (role, state): value(metrics, "tl_gateway_workers", role=role, state=state)
        for role in ("unified", "prefill", "decode")
        for state in ("healthy", "draining", "down")
    }
    assert counts == {
        ("unified", "healthy"): 1,
        ("unified", "draining"): 1,
        ("unified", "down"): 0,
        ("prefill", "healthy"): 0,
        ("prefill", "draining"): 1,
        ("prefill", "down"): 0,
        ("decode", "healthy"): 1,
        ("decode", "draining"): 0,
        ("decode", "down"): 1,
    }


def test_r01_the_gauges_of_a_dead_worker_go_with_it() -> None:
    registry = Registry()
    metrics = Metrics(registry.snapshot, PATHS)
    registry.beat(WorkerReport("a", "h:1", "m", queue_depth=2), 0.0)
    registry.snapshot()[0].in_flight = 3
    assert value(metrics, "tl_gateway_in_flight", worker_id="a") == 3
    assert value(metrics, "tl_gateway_worker_load", worker_id="a") == 5
    registry.expire(6.0)
    assert value(metrics, "tl_gateway_in_flight", worker_id="a") is None
    assert value(metrics, "tl_gateway_worker_load", worker_id="a") is None
    assert value(metrics, "tl_gateway_workers", role="unified", state="healthy") == 0


def test_a_polled_worker_is_up_or_not_and_read_in_full_or_not_as_long_as_it_is_there() -> None:
    polled = Worker("p", model="m", http_address="h:1", polled=True)
    fleet = [polled, Worker("s", model="m", http_address="h:2", static=True)]
    metrics = Metrics(lambda: fleet, PATHS)
    said = []
    for up, degraded in ((False, "health: refused"), (True, "metrics 404"), (True, "")):
        polled.up, polled.degraded = up, degraded
        metrics.polled(polled)
        said.append(
            tuple(
                value(metrics, f"tl_gateway_worker_{name}", worker_id="p")
                for name in ("up", "degraded")
            )
        )
    assert said == [(0, 1), (1, 1), (1, 0)]
    for state in ("down", "degraded", "up"):
        assert value(metrics, "tl_gateway_poll_changes_total", state=state) == 1
    assert value(metrics, "tl_gateway_worker_up", worker_id="s") is None
    fleet.remove(polled)
    assert value(metrics, "tl_gateway_worker_up", worker_id="p") is None
    assert value(metrics, "tl_gateway_worker_degraded", worker_id="p") is None


def test_what_a_source_lists_is_told_by_source_and_ends_with_it() -> None:
    metrics = Metrics(nobody, PATHS)
    for _ in range(2):
        metrics.left_out("dns engines:8000")
    metrics.source_said("kubernetes a", "403")
    metrics.source_said("kubernetes b", "")
    assert value(metrics, "tl_gateway_workers_left_out_total", source="dns engines:8000") == 2
    assert value(metrics, "tl_gateway_source_degraded", source="kubernetes a") == 1
    assert value(metrics, "tl_gateway_source_degraded", source="kubernetes b") == 0
    metrics.source_said("kubernetes a", "")
    assert value(metrics, "tl_gateway_source_degraded", source="kubernetes a") == 0
    metrics.forget_sources({"kubernetes b"})
    assert value(metrics, "tl_gateway_source_degraded", source="kubernetes a") is None
    assert value(metrics, "tl_gateway_source_degraded", source="kubernetes b") == 0


def test_o02_sources_without_end_share_one_label() -> None:
    metrics = Metrics(nobody, PATHS)
    for number in range(100):
        metrics.left_out(f"file {number}")
    assert value(metrics, "tl_gateway_workers_left_out_total", source="_other") == 36


def test_a_label_from_outside_cannot_break_the_exposition() -> None:
    metrics = Metrics(nobody, PATHS)
    metrics.finished(exchange(model='a"b\\c\nd'))
    assert label_values(
        metrics, "gen_ai_server_request_duration_seconds_count", "gen_ai_request_model"
    ) == {'a"b\\c\nd'}


# ------------------------------------------------------------------ the price


def test_counting_a_request_is_cheap() -> None:
    """The promise is 2 us; the bound is wide, so that a busy machine cannot fail it."""
    metrics = Metrics(nobody, PATHS)
    x = exchange(stream=True, first_byte=0.1)
    best = min(timeit(lambda: metrics.finished(x), number=2000) for _ in range(5)) / 2000
    assert best < 20e-6
