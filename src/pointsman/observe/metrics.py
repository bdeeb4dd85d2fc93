"""The metrics of the gateway: plain counters while requests run, Prometheus families on a scrape.

`finished` is called once per request and costs about half a microsecond: it looks one series up, finds
one bucket and adds a few integers. Everything that is slow (names, labels, cumulative buckets)
happens in `render`, when somebody asks.

One list of bounds serves two histograms: it is the union of their buckets, so one search counts a
duration for both, and the counts of either are exact sums over it.

Labels are bounded. A path that the gateway does not serve is `_other`; a model gets a label of its
own only once a worker was asked for it, and only the first 64 do, so that clients who make names
up cannot fill the memory of the gateway or of its scraper. What is read from live objects (workers,
their load) has no memory: a worker that is gone is gone from the next scrape.
"""

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import TypeVar

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from pointsman.domain.worker import Role, Worker, load_of
from pointsman.flow.exchange import CLIENT_GONE, Exchange

__all__ = ["Metrics"]

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


class _Series:
    """Durations with the same labels: how many fell into each bucket, and their sum in seconds."""

    __slots__ = ("counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0


class Metrics:
    """Counts what the gateway does and writes it down for Prometheus.

    `workers` returns the live workers at the moment of a scrape; `paths` are the paths that the
    gateway serves.
    """

    def __init__(self, workers: Callable[[], Iterable[Worker]], paths: Collection[str]) -> None:
        self._workers = workers
        self._paths = {path: path for path in paths}
        self._models: dict[str, str] = {}
        self._errors: dict[str, str] = {}
        self._requests: dict[tuple[str, int, str, str, str], _Series] = {}
        self._answers: dict[tuple[str, str, int], _Series] = {}
        self._first_bytes: dict[tuple[str, str], _Series] = {}
        self._attempts: dict[str, int] = {}
        self._failovers: dict[str, int] = {}
        self._disconnects: dict[str, int] = {}
        self._faults: dict[str, int] = {}
        self._connections = {"downstream": 0, "upstream": 0}
        self._stale_resends = 0
        self._pool_waits = 0
        self._exposition = CollectorRegistry()
        self._exposition.register(_Families(self))
        ProcessCollector(registry=self._exposition)

    # What the data plane tells.

    def finished(self, x: Exchange) -> None:
        """Count a request that is over, whatever became of it."""
        model = self._models.get(x.model) or self._new_model(x)
        path = self._paths.get(x.path, OTHER)
        key = (path, x.status, x.error, x.operation, model)
        series = self._requests.get(key)
        if series is None:
            error = _capped(x.error, self._errors)
            key = (path, x.status, error, x.operation, model)
            series = self._requests.setdefault(key, _Series(DURATION_BOUNDS))
        duration = x.finished_at - x.started
        series.counts[bisect_left(DURATION_BOUNDS, duration)] += 1
        series.sum += duration

        if x.stream and x.first_byte_at and x.status == 200:
            waited = x.first_byte_at - x.started
            first = self._first_bytes.get((x.operation, model))
            if first is None:
                first = self._first_bytes[x.operation, model] = _Series(TTFT_BOUNDS)
            first.counts[bisect_left(TTFT_BOUNDS, waited)] += 1
            first.sum += waited

        if x.attempts:
            self._count_attempts(x)
        if x.error == CLIENT_GONE:
            _add(self._disconnects, "relaying" if x.first_byte_at else "waiting")

    def answered(self, method: str, path: str, status: int, seconds: float) -> None:
        """Count an answer that no `Exchange` stands for: a list of models, an unknown path."""
        known = self._paths.get(path, OTHER)
        key = (method if method in _METHODS else OTHER, known, status)
        series = self._answers.get(key)
        if series is None:
            series = self._answers[key] = _Series(DURATION_BOUNDS)
        series.counts[bisect_left(DURATION_BOUNDS, seconds)] += 1
        series.sum += seconds

    def stale_resend(self) -> None:
        """Count a request sent once more because the engine had closed its idle connection."""
        self._stale_resends += 1

    def pool_wait(self) -> None:
        """Count a request that had to wait for a connection, because a worker's limit was reached."""
        self._pool_waits += 1

    def opened(self, side: str) -> None:
        """Count a connection that opened; `side` is downstream or upstream."""
        self._connections[side] += 1

    def closed(self, side: str) -> None:
        """Count a connection that closed."""
        self._connections[side] -= 1

    def fault(self, where: str) -> None:
        """Count an exception that nobody foresaw, caught at one of the last resorts."""
        _add(self._faults, where)

    def render(self) -> bytes:
        """Return the exposition in Prometheus' text format, version 0.0.4."""
        return generate_latest(self._exposition)

    # How labels stay bounded.

    def _new_model(self, x: Exchange) -> str:
        """Return the label of a model that has none yet; it gets one if a worker was asked for it."""
        return _capped(x.model, self._models) if x.worker_id else OTHER

    def _count_attempts(self, x: Exchange) -> None:
        failures = x.failures
        for why in failures:
            _add(self._attempts, why)
        for why in failures[: x.attempts - 1]:
            _add(self._failovers, why)
        if x.attempts > len(failures):
            ended = "broken" if x.error else "answered"
            _add(self._attempts, CLIENT_GONE if x.error == CLIENT_GONE else ended)

    # What a scrape makes of it.

    def families(self) -> Iterator[Metric]:
        """Fold the counts into Prometheus' families."""
        yield from self._durations()
        yield from self._counts()
        yield from self._live()

    def _durations(self) -> Iterator[Metric]:
        first_byte = HistogramMetricFamily(
            "gen_ai_server_time_to_first_token_seconds",
            "Time to the first body byte of a successful streamed answer.",
            labels=["gen_ai_operation_name", "gen_ai_request_model", "tl_engine_role"],
        )
        for (operation, model), series in self._first_bytes.items():
            _histogram(first_byte, (operation, model, "gateway"), series, TTFT_BOUNDS, TTFT_BOUNDS)
        yield first_byte

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
        by_model: dict[tuple[str, ...], _Series] = {}
        by_path: dict[tuple[str, ...], _Series] = {}
        by_route: dict[tuple[str, ...], int] = {}
        for (path, status, error, operation, model), series in self._requests.items():
            _merge(by_model, (operation, model, "gateway", error), series)
            _merge(by_path, ("POST", path, str(status)), series)
            _add(by_route, (path, str(status), "anonymous"), sum(series.counts))
        for (method, path, status), series in self._answers.items():
            _merge(by_path, (method, path, str(status)), series)
            _add(by_route, (path, str(status), "anonymous"), sum(series.counts))
        for labels, series in by_model.items():
            _histogram(request, labels, series, DURATION_BOUNDS, REQUEST_BOUNDS)
        for labels, series in by_path.items():
            _histogram(http, labels, series, DURATION_BOUNDS, HTTP_BOUNDS)
        for labels, count in by_route.items():
            total.add_metric(labels, count)
        yield from (request, http, total)

    def _counts(self) -> Iterator[Metric]:
        for name, doc, label, counts in (
            ("attempts", "Workers that were asked, by outcome.", "outcome", self._attempts),
            ("failovers", "Attempts that another one followed.", "why", self._failovers),
            (
                "client_disconnects",
                "Clients that left before their answer was complete.",
                "stage",
                self._disconnects,
            ),
            ("faults", "Exceptions that nobody foresaw.", "where", self._faults),
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
        connections = GaugeMetricFamily(
            "tl_gateway_connections", "Open connections.", labels=["side"]
        )
        for side, count in self._connections.items():
            connections.add_metric([side], count)
        yield connections

    def _live(self) -> Iterator[Metric]:
        fleet = GaugeMetricFamily("tl_gateway_workers", "Live workers.", labels=["role", "state"])
        in_flight = GaugeMetricFamily(
            "tl_gateway_in_flight", "Requests of this gateway at a worker.", labels=["worker_id"]
        )
        load = GaugeMetricFamily(
            "tl_gateway_worker_load", "In flight plus the worker's queue.", labels=["worker_id"]
        )
        states = {(str(role), state): 0 for role in Role for state in ("healthy", "draining")}
        for worker in self._workers():
            states[str(worker.role), "draining" if worker.draining else "healthy"] += 1
            in_flight.add_metric([worker.id], worker.in_flight)
            load.add_metric([worker.id], load_of(worker))
        for labels, count in states.items():
            fleet.add_metric(labels, count)
        yield from (fleet, in_flight, load)


_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})


class _Families(Collector):
    """What prometheus-client wants: an object that collects."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return self._metrics.families()


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
    merged = into.setdefault(key, _Series(DURATION_BOUNDS))
    merged.counts = [a + b for a, b in zip(merged.counts, series.counts, strict=True)]
    merged.sum += series.sum


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
