"""The metrics of the gateway: plain counters while requests run, Prometheus families on a scrape.

`finished` is called once per request and costs about half a microsecond: it looks two counters up, finds one bucket and
adds a few integers. Everything that is slow (names, labels, cumulative buckets) happens in `render`, when somebody
asks, and what is seldom (a series that is new, an attempt that failed) in functions of its own.

One list of bounds serves two histograms: it is the union of their buckets, so one search counts a duration for both,
and the counts of either are exact sums over it.

Labels are bounded. A path that the gateway does not serve is `_other`; a model gets a label of its own only once a
worker was asked for it; of models, tenants, errors and reasons the first 64 do. So clients who make names up cannot
fill the memory of the gateway or of its scraper. What is read from live objects (workers, their load) has no memory.
What is counted by worker or by model is forgotten with them: their series end, and what they added to the wider
counters stays, so that no counter ever goes back.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import TypeVar

from msgspec import Struct
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from pointsman.domain.calibration import Calibrations
from pointsman.domain.worker import Role, Worker, load_of
from pointsman.flow.exchange import CLIENT_GONE, Exchange
from pointsman.observe.beyond import HandoffCounts, cascade_families
from pointsman.observe.proofs import Proofs

__all__ = ["Metrics", "Totals"]

K = TypeVar("K")

TTFT_BOUNDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1),
    *(0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
REQUEST_BOUNDS = tuple(0.01 * 2**i for i in range(14))
HTTP_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
"""Buckets in seconds. Source: contract, section 4.7."""

DURATION_BOUNDS = tuple(sorted({*REQUEST_BOUNDS, *HTTP_BOUNDS}))

LABEL_LIMIT = 64
"""Distinct values of a capped label in one process. Source: contract, section 4.7."""

OTHER = "_other"
"""The label of whatever gets none of its own."""

GONE = ""
"""Where the counts of forgotten models and workers stay. No family shows it."""

DEAD_KEPT = 1024
"""Workers that have counts and may be dead, until somebody looks which of them are."""

STATES = ("healthy", "draining", "down")
"""What a live worker can be, for the gauge of them."""

REFUSALS = ("invalid_api_key", "insufficient_scope")
"""The errors that are a matter of keys."""


class Totals(Struct, frozen=True, kw_only=True):
    """What the gateway has done since it started, in a few numbers. None of them goes back but `in_flight`.

    `started_at` and `now` are seconds since 1970; `errors_total` are answers of 5xx and those that broke;
    `first_byte_count` are successful streams, `first_byte_seconds_sum` what they waited for their first byte;
    `workers` has the attempts of each live worker.
    """

    started_at: float
    now: float
    requests_total: int
    errors_total: int
    failovers_total: int
    first_byte_seconds_sum: float
    first_byte_count: int
    in_flight: int
    workers: dict[str, int]


class _Series:
    """Durations with the same labels: how many fell into each bucket, and their sum in seconds."""

    __slots__ = ("counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0


class _Requests(_Series):
    """Requests with the same labels; `waits` are the times to first byte of those that were streams."""

    __slots__ = ("waits",)

    def __init__(self) -> None:
        super().__init__(DURATION_BOUNDS)
        self.waits: _Series | None = None


_Asked = tuple[str, int, str, str, str, str]
"""What tells requests apart: path, status, error, operation, model, tenant."""

_Tried = tuple[str, str, str]
"""What tells the attempts of one worker apart: reason, outcome, model."""


class Metrics:
    """Counts what the gateway does and writes it down for Prometheus.

    `workers` returns the live workers at the moment of a scrape; `paths` are the paths that the gateway serves;
    `route_epoch` and `drained` return the epoch of the routes and the models that are drained; `known` tells of a model
    whether anybody still has it, and a scrape forgets those that nobody has; `wall` is the time in seconds since 1970.

    `held`, `prefix_blocks`, `lines_dropped`, `records_dropped`, `spans` and `calls_dropped` may be set to what returns
    how many requests wait for a worker now, how many blocks workers are believed to have cached, how many log lines
    were dropped and requests not recorded, how many spans ended how, and how many calls of ended requests of which kind
    were not made; `kv_events`, `kv_streams` and `kv_followed` likewise to how many KV events came of which kind, what
    happened to their streams, and how many workers are known by them. `calibrations` are those of the cascades.
    `proofs` are to hear of every new reading of a worker.
    """

    def __init__(
        self,
        workers: Callable[[], Iterable[Worker]],
        paths: Collection[str],
        *,
        route_epoch: Callable[[], int] = lambda: 0,
        drained: Callable[[], Collection[str]] = lambda: (),
        known: Callable[[str], bool] = lambda model: True,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._workers = workers
        self._paths = {path: path for path in paths}
        self._route_epoch = route_epoch
        self._drained = drained
        self._known = known
        self._wall = wall
        self.held: Callable[[], int] = lambda: 0
        self.lines_dropped: Callable[[], int] = lambda: 0
        self.records_dropped: Callable[[], int] = lambda: 0
        self.prefix_blocks: Callable[[], int] = lambda: 0
        self.spans: Callable[[], dict[str, int]] = lambda: {}
        self.kv_events: Callable[[], dict[str, int]] = lambda: {}
        self.kv_streams: Callable[[], dict[str, int]] = lambda: {}
        self.kv_followed: Callable[[], int] = lambda: 0
        self.calibrations = Calibrations()
        self.calls_dropped: Callable[[], dict[str, int]] = lambda: {}
        self.proofs = Proofs(workers)
        self._handoffs = HandoffCounts(self.proofs)
        self._started_at = self._reloaded_at = wall()
        self._models: dict[str, str] = {}
        self._tenants: dict[str, str] = {}
        self._errors: dict[str, str] = {}
        self._reasons: dict[str, str] = {}
        self._source_names: dict[str, str] = {}
        self._requests: dict[_Asked, _Requests] = {}
        self._answers: dict[tuple[str, str, int], _Series] = {}
        self._tries: dict[str, dict[_Tried, int]] = {GONE: {}}
        self._tries_max = DEAD_KEPT
        self._failovers: dict[str, int] = {}
        self._disconnects: dict[str, int] = {}
        self._refusals = dict.fromkeys(REFUSALS, 0)
        self._reloads = {"success": 0, "failure": 0}
        self._reload_worked = True
        self._engine_drains = {"success": 0, "failure": 0}
        self._faults: dict[str, int] = {}
        self._poll_changes: dict[str, int] = {}
        self._left_out: dict[str, int] = {}
        self._sources: dict[str, bool] = {}
        self._connections = {"downstream": 0, "upstream": 0}
        self._holds: dict[str, int] = {}
        self._stale_resends = 0
        self._pool_waits = 0
        self._exposition = CollectorRegistry()
        self._exposition.register(_Families(self))
        ProcessCollector(registry=self._exposition)

    # What the data plane tells.

    def finished(self, x: Exchange) -> None:
        """Count a request that is over, whatever became of it."""
        request = x.request
        model = request.model
        started = x.started
        error = x.error
        try:
            # Where every one of them is a label already, as it nearly always is.
            series = self._requests[x.path, x.status, error, x.operation, model, x.principal.tenant]
        except KeyError:
            series, model = self._new_requests(x)
        duration = x.finished_at - started
        series.counts[bisect_left(DURATION_BOUNDS, duration)] += 1
        series.sum += duration

        if request.stream and x.status == 200 and x.first_byte_at:
            waited = x.first_byte_at - started
            waits = series.waits
            if waits is None:
                waits = series.waits = _Series(TTFT_BOUNDS)
            waits.counts[bisect_left(TTFT_BOUNDS, waited)] += 1
            waits.sum += waited

        tries = x.tries
        if error or len(tries) != 1 or tries[0].failure or tries[0].transfer is not None:
            self._count_tries(x, model)
            return
        target = tries[0].target
        try:
            self._tries[target.worker.id][target.reason, "answered", model] += 1
        except KeyError:
            self._new_tries(target.worker.id, target.reason, "answered", model)

    def answered(
        self, method: str, path: str, status: int, seconds: float, error: str = ""
    ) -> None:
        """Count an answer that no `Exchange` stands for: a list of models, an unknown path, a bad key.

        `error` is the code of the error that it was.
        """
        known = self._paths.get(path, OTHER)
        key = (method if method in _METHODS else OTHER, known, status)
        series = self._answers.get(key)
        if series is None:
            series = self._answers[key] = _Series(DURATION_BOUNDS)
        series.counts[bisect_left(DURATION_BOUNDS, seconds)] += 1
        series.sum += seconds
        if error in self._refusals:
            self._refusals[error] += 1

    def stale_resend(self) -> None:
        """Count a request sent once more because the engine had closed its idle connection."""
        self._stale_resends += 1

    def pool_wait(self) -> None:
        """Count a request that had to wait for a connection, because a worker's limit was reached."""
        self._pool_waits += 1

    def hold_ended(self, outcome: str) -> None:
        """Count a request that waited for a worker, or found no room to."""
        _add(self._holds, outcome)

    def opened(self, side: str) -> None:
        """Count a connection that opened; `side` is downstream or upstream."""
        self._connections[side] += 1

    def closed(self, side: str) -> None:
        """Count a connection that closed."""
        self._connections[side] -= 1

    def fault(self, where: str) -> None:
        """Count an exception that nobody foresaw, caught at one of the last resorts."""
        _add(self._faults, where)

    # What the control plane tells.

    def reloaded(self, *, worked: bool) -> None:
        """Count a configuration that was loaded again, or was not because something is wrong with it."""
        self._reloads["success" if worked else "failure"] += 1
        self._reload_worked = worked
        if worked:
            self._reloaded_at = self._wall()

    def polled(self, worker: Worker) -> None:
        """Count a worker that went up or down, or of which another part can be read than before."""
        _add(self._poll_changes, _polled_state(worker))

    def left_out(self, source: str) -> None:
        """Count a worker that a source found and that could not be taken."""
        _add(self._left_out, _capped(source, self._source_names))

    def source_said(self, source: str, reason: str) -> None:
        """Note why the list of a source may be old or not whole, "" for no reason."""
        self._sources[source] = bool(reason)

    def forget_sources(self, kept: Collection[str]) -> None:
        """End the series of the sources that are not among those `kept`."""
        self._sources = {name: said for name, said in self._sources.items() if name in kept}

    def engine_drained(self, *, worked: bool) -> None:
        """Count an engine that was told to drain, and whether it took that."""
        self._engine_drains["success" if worked else "failure"] += 1

    def forget_worker(self, worker_id: str) -> None:
        """End the series of a worker that is gone."""
        for key, count in self._tries.pop(worker_id, {}).items():
            _add(self._tries[GONE], key, count)

    def forget_models(self, known: Callable[[str], bool]) -> None:
        """End the series of the models that are not `known` any more; others may have their places."""
        gone = {model for model in self._models if not known(model)}
        if not gone:
            return
        for model in gone:
            del self._models[model]
        for key in [key for key in self._requests if key[4] in gone]:
            path, status, error, operation, _, tenant = key
            into = (path, status, error, operation, GONE, tenant)
            series = self._requests.pop(key)
            _add_series(self._requests.setdefault(into, _Requests()), series)
        for counts in self._tries.values():
            for tried in [tried for tried in counts if tried[2] in gone]:
                reason, outcome, _ = tried
                _add(counts, (reason, outcome, GONE), counts.pop(tried))

    # What others ask.

    def render(self) -> bytes:
        """Return the exposition in Prometheus' text format, version 0.0.4."""
        return generate_latest(self._exposition)

    def totals(self) -> Totals:
        """Return the totals since the start."""
        requests = errors = waits = 0
        waited = 0.0
        for (_, status, error, *_), series in self._requests.items():
            count = sum(series.counts)
            requests += count
            # What is wrong with a request is no error of the gateway, nor is it one that its client left.
            if status >= 500 or (error and status < 400 and error != CLIENT_GONE):
                errors += count
            if series.waits is not None:
                waits += sum(series.waits.counts)
                waited += series.waits.sum
        live = tuple(self._workers())
        return Totals(
            started_at=self._started_at,
            now=self._wall(),
            requests_total=requests,
            errors_total=errors,
            failovers_total=sum(self._failovers.values()),
            first_byte_seconds_sum=waited,
            first_byte_count=waits,
            in_flight=sum(worker.in_flight for worker in live),
            workers={each.id: sum(self._tries.get(each.id, {}).values()) for each in live},
        )

    # How labels stay bounded.

    def _new_requests(self, x: Exchange) -> tuple[_Requests, str]:
        """Return the series of a request for which there was none under its own names, and the label of its model."""
        model = self._model_label(x)
        key = (
            self._paths.get(x.path, OTHER),
            x.status,
            _capped(x.error, self._errors),
            x.operation,
            model,
            _capped(x.principal.tenant, self._tenants),
        )
        return self._requests.setdefault(key, _Requests()), model

    def _model_label(self, x: Exchange) -> str:
        """Return the label of a model; it gets one of its own if a worker was asked for it."""
        if x.model in self._models:
            return x.model
        return _capped(x.model, self._models) or OTHER if x.tries else OTHER

    def _count_tries(self, x: Exchange, model: str) -> None:
        """Count the attempts of a request that was not simply answered by the first worker."""
        if x.error == CLIENT_GONE:
            _add(self._disconnects, "relaying" if x.first_byte_at else "waiting")
        ended = CLIENT_GONE if x.error == CLIENT_GONE else "broken" if x.error else "answered"
        for each in x.tries:
            target = each.target
            # In a hand-off the worker to blame may be the other one.
            worker = each.failed or target.worker
            rejected = each.verdict is not None and not each.verdict.kept
            outcome = each.failure or ("rejected" if rejected else ended)
            self._new_tries(worker.id, target.reason, outcome, model)
            if each.transfer is not None:
                self._handoffs.count(x, each)
        for each in x.tries[:-1]:
            if each.failure:
                _add(self._failovers, each.failure)

    def _new_tries(self, worker_id: str, reason: str, outcome: str, model: str) -> None:
        """Count an attempt that may be the first of its kind."""
        counts = self._tries.get(worker_id)
        if counts is None:
            counts = self._tries[worker_id] = {}
        _add(counts, (_capped(reason, self._reasons), outcome, model))
        if len(self._tries) > self._tries_max:
            self._forget_dead()
            self._tries_max = DEAD_KEPT + 2 * len(self._tries)

    def _forget_dead(self) -> None:
        """Forget the workers that are not live: a request may end after its worker has left."""
        live = {GONE, *(worker.id for worker in self._workers())}
        for worker_id in self._tries.keys() - live:
            self.forget_worker(worker_id)

    # What a scrape makes of it.

    def families(self) -> Iterator[Metric]:
        """Fold the counts into Prometheus' families."""
        self.forget_models(self._known)
        self._forget_dead()
        yield from self._durations()
        yield from self._attempts()
        yield from self._counts()
        yield from self._handoffs.families()
        yield from self.proofs.families()
        yield from cascade_families(self.calibrations)
        yield from self._configuration()
        yield from self._live()

    def _durations(self) -> Iterator[Metric]:
        first_byte = HistogramMetricFamily(
            "gen_ai_server_time_to_first_token_seconds",
            "Time to the first body byte of a successful streamed answer.",
            labels=["gen_ai_operation_name", "gen_ai_request_model", "tl_engine_role"],
        )
        request = HistogramMetricFamily(
            "gen_ai_server_request_duration_seconds",
            "Time from the whole request to the end of its answer.",
            labels=[
                "gen_ai_operation_name",
                "gen_ai_request_model",
                "tl_engine_role",
                "error_type",
            ],
        )
        http = HistogramMetricFamily(
            "http_server_request_duration_seconds",
            "Time from the whole request to the end of its answer, by path and status.",
            labels=["http_request_method", "http_route", "http_response_status_code"],
        )
        total = CounterMetricFamily(
            "tl_gateway_requests_total", "Requests.", labels=["route", "code", "tenant"]
        )
        waits: dict[tuple[str, ...], _Series] = {}
        by_model: dict[tuple[str, ...], _Series] = {}
        by_path: dict[tuple[str, ...], _Series] = {}
        by_route: dict[tuple[str, ...], int] = {}
        for (path, status, error, operation, model, tenant), series in self._requests.items():
            _merge(by_path, ("POST", path, str(status)), series)
            _add(by_route, (path, str(status), tenant), sum(series.counts))
            if model != GONE:
                _merge(by_model, (operation, model, "gateway", error), series)
                if series.waits is not None:
                    _merge(waits, (operation, model, "gateway"), series.waits)
        for (method, path, status), answers in self._answers.items():
            _merge(by_path, (method, path, str(status)), answers)
            _add(by_route, (path, str(status), "anonymous"), sum(answers.counts))
        for labels, times in waits.items():
            _histogram(first_byte, labels, times, TTFT_BOUNDS, TTFT_BOUNDS)
        for labels, times in by_model.items():
            _histogram(request, labels, times, DURATION_BOUNDS, REQUEST_BOUNDS)
        for labels, times in by_path.items():
            _histogram(http, labels, times, DURATION_BOUNDS, HTTP_BOUNDS)
        for labels, count in by_route.items():
            total.add_metric(labels, count)
        yield from (first_byte, request, http, total)

    def _attempts(self) -> Iterator[Metric]:
        outcomes: dict[str, int] = {}
        of_worker: dict[tuple[str, str], int] = {}
        decisions: dict[tuple[str, str], int] = {}
        for worker_id, tries in self._tries.items():
            for (reason, outcome, model), count in tries.items():
                _add(outcomes, outcome, count)
                if worker_id != GONE:
                    _add(of_worker, (worker_id, outcome), count)
                if model != GONE:
                    _add(decisions, (reason, model), count)
        for name, doc, labels, counts in (
            ("attempts", "Workers that were asked, by outcome.", ["outcome"],
             {(outcome,): count for outcome, count in outcomes.items()}),
            ("worker_requests", "Attempts of a worker, by outcome.", ["worker_id", "outcome"],
             of_worker),
            ("decisions", "Why workers were picked, by model.", ["reason", "model"], decisions),
        ):  # fmt: skip
            family = CounterMetricFamily(f"tl_gateway_{name}_total", doc, labels=labels)
            for values, count in counts.items():
                family.add_metric(values, count)
            yield family

    def _counts(self) -> Iterator[Metric]:
        for name, doc, label, counts in (
            ("failovers", "Attempts that another one followed.", "why", self._failovers),
            (
                "client_disconnects",
                "Clients that left before their answer was complete.",
                "stage",
                self._disconnects,
            ),
            ("holds", "Requests that waited for a worker, by outcome.", "outcome", self._holds),
            ("auth_refusals", "Requests refused for their key.", "code", self._refusals),
            ("config_reloads", "Configurations loaded again.", "outcome", self._reloads),
            ("engine_drains", "Engines told to drain.", "outcome", self._engine_drains),
            ("spans", "Spans by what became of them.", "outcome", self.spans()),
            ("calls_dropped", "Calls of ended requests not made.", "kind", self.calls_dropped()),
            ("faults", "Exceptions that nobody foresaw.", "where", self._faults),
            ("poll_changes", "What polled workers turned to.", "state", self._poll_changes),
            ("workers_left_out", "Workers found but not taken.", "source", self._left_out),
            ("kv_events", "KV events of engines, by kind.", "kind", self.kv_events()),
            ("kv_streams", "What happened to streams of KV events.", "what", self.kv_streams()),
        ):
            family = CounterMetricFamily(f"tl_gateway_{name}_total", doc, labels=[label])
            for value, count in counts.items():
                family.add_metric([value], count)
            yield family
        yield CounterMetricFamily(
            "tl_gateway_stale_connection_resends_total",
            "Requests sent once more because the engine had closed its idle connection.",
            value=self._stale_resends,
        )
        yield CounterMetricFamily(
            "tl_gateway_pool_waits_total",
            "Requests that waited for a connection to a worker.",
            value=self._pool_waits,
        )
        yield CounterMetricFamily(
            "tl_gateway_log_lines_dropped_total",
            "Log lines that nobody took in time.",
            value=self.lines_dropped(),
        )
        yield CounterMetricFamily(
            "tl_gateway_records_dropped_total",
            "Requests that were not recorded in time.",
            value=self.records_dropped(),
        )
        yield GaugeMetricFamily(
            "tl_gateway_prefix_index_blocks",
            "Blocks of prompts that workers are believed, or known, to have cached.",
            value=self.prefix_blocks(),
        )
        yield GaugeMetricFamily(
            "tl_gateway_kv_followed_workers",
            "Workers of whose cache all is known from their KV events.",
            value=self.kv_followed(),
        )
        yield GaugeMetricFamily(
            "tl_gateway_held", "Requests that wait for a worker now.", value=self.held()
        )
        connections = GaugeMetricFamily(
            "tl_gateway_connections", "Open connections.", labels=["side"]
        )
        for side, count in self._connections.items():
            connections.add_metric([side], count)
        yield connections

    def _configuration(self) -> Iterator[Metric]:
        for name, doc, value in (
            ("config_last_reload_successful", "Whether the last configuration was taken, 1 or 0.",
             self._reload_worked),
            ("config_last_reload_success_timestamp_seconds", "When the one in force was taken.",
             self._reloaded_at),
            ("route_epoch", "Version of the route table in force.", self._route_epoch()),
            ("drained_models", "Models that an operator drains.", len(self._drained())),
        ):  # fmt: skip
            yield GaugeMetricFamily(f"tl_gateway_{name}", doc, value=float(value))

    def _live(self) -> Iterator[Metric]:
        fleet = GaugeMetricFamily("tl_gateway_workers", "Live workers.", labels=["role", "state"])
        in_flight = GaugeMetricFamily(
            "tl_gateway_in_flight", "Requests of this gateway at a worker.", labels=["worker_id"]
        )
        load = GaugeMetricFamily(
            "tl_gateway_worker_load", "In flight plus the worker's queue.", labels=["worker_id"]
        )
        up = GaugeMetricFamily(
            "tl_gateway_worker_up", "Whether a polled worker is up, 1 or 0.", labels=["worker_id"]
        )
        degraded = GaugeMetricFamily(
            "tl_gateway_worker_degraded",
            "Whether some of a polled worker cannot be read, 1 or 0.",
            labels=["worker_id"],
        )
        source = GaugeMetricFamily(
            "tl_gateway_source_degraded",
            "Whether the list of a source may be old or not whole, 1 or 0.",
            labels=["source"],
        )
        states = {(str(role), state): 0 for role in Role for state in STATES}
        for worker in self._workers():
            states[str(worker.role), _state(worker)] += 1
            if worker.polled:
                up.add_metric([worker.id], worker.up)
                degraded.add_metric([worker.id], bool(worker.degraded or worker.kv_fault))
            in_flight.add_metric([worker.id], worker.in_flight)
            load.add_metric([worker.id], load_of(worker))
        for labels, count in states.items():
            fleet.add_metric(labels, count)
        for name, is_degraded in self._sources.items():
            source.add_metric([name], is_degraded)
        yield from (fleet, in_flight, load, up, degraded, source)


_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})


class _Families(Collector):
    """What prometheus-client wants: an object that collects."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return self._metrics.families()


def _state(worker: Worker) -> str:
    """Return whether a worker may get requests, and why not."""
    if not worker.up:
        return "down"
    return "draining" if worker.draining or worker.terminating else "healthy"


def _polled_state(worker: Worker) -> str:
    """Return what polling says of a worker."""
    if not worker.up:
        return "down"
    return "degraded" if worker.degraded else "up"


def _capped(value: str, known: dict[str, str]) -> str:
    """Return the label of a value: itself for "" and the first `LABEL_LIMIT` values, then `_other`."""
    if value and value not in known:
        if len(known) >= LABEL_LIMIT:
            return OTHER
        known[value] = value
    return value


def _add(counts: dict[K, int], key: K, more: int = 1) -> None:
    counts[key] = counts.get(key, 0) + more


def _merge(into: dict[tuple[str, ...], _Series], key: tuple[str, ...], series: _Series) -> None:
    """Add a series of durations to the one of wider labels."""
    merged = into.get(key)
    if merged is None:
        merged = into[key] = _Series(())
        merged.counts = [0] * len(series.counts)
    _add_counts(merged, series)


def _add_counts(merged: _Series, series: _Series) -> None:
    merged.counts = [a + b for a, b in zip(merged.counts, series.counts, strict=True)]
    merged.sum += series.sum


def _add_series(merged: _Requests, series: _Requests) -> None:
    _add_counts(merged, series)
    if series.waits is not None:
        merged.waits = merged.waits or _Series(TTFT_BOUNDS)
        _add_counts(merged.waits, series.waits)


def _histogram(
    family: HistogramMetricFamily,
    labels: Sequence[str],
    series: _Series,
    counted: Sequence[float],
    wanted: Sequence[float],
) -> None:
    """Add a series to a family. `wanted` are the bounds to show, all of them among `counted`."""
    upto = dict(zip(counted, accumulate(series.counts), strict=False))
    buckets = [(_number(bound), float(upto[bound])) for bound in wanted]
    buckets.append(("+Inf", float(sum(series.counts))))
    family.add_metric(labels, buckets, series.sum)


def _number(bound: float) -> str:
    return repr(round(bound, 6))
