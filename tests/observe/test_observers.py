"""One observer out of several: each hears what it is for, and what is off costs nothing."""

import io

from pointsman.domain.request import InferenceRequest
from pointsman.flow.exchange import Exchange
from pointsman.net.observer import Observer
from pointsman.observe.access import Access
from pointsman.observe.lines import Lines
from pointsman.observe.metrics import Metrics
from pointsman.observe.observers import Observers


class Notes:
    """Remembers what it heard."""

    def __init__(self) -> None:
        self.heard: list[Exchange] = []

    def finished(self, x: Exchange) -> None:
        self.heard.append(x)


def exchange() -> Exchange:
    return Exchange(InferenceRequest("m", "r1"), "/v1/chat/completions", "chat", started=0.0)


def test_each_hears_of_a_request() -> None:
    metrics, decisions, tracer = Metrics(lambda: (), ["/v1/models"]), Notes(), Notes()
    paper = io.StringIO()
    access = Access(
        "all", 1.0, Lines(paper), lambda: 0.5, wall=lambda: 0.0, later=lambda s, call: None
    )
    observer: Observer = Observers(metrics, decisions=decisions, access=access, tracer=tracer)
    x = exchange()
    observer.finished(x)
    observer.answered("GET", "/v1/models", 200, 0.001)
    access.flush()
    assert decisions.heard == tracer.heard == [x]
    assert metrics.totals().requests_total == 1
    assert paper.getvalue().count("\n") == 2
    assert b'http_route="/v1/models"' in metrics.render()


def test_with_nothing_else_on_the_metrics_are_called_directly() -> None:
    metrics = Metrics(lambda: (), [])
    observers = Observers(metrics)
    assert observers.finished == metrics.finished
    assert observers.answered == metrics.answered
    assert Observers(metrics, tracer=Notes()).answered == metrics.answered


def test_the_other_events_are_for_the_metrics() -> None:
    metrics = Metrics(lambda: (), [])
    observer: Observer = Observers(metrics, decisions=Notes())
    observer.opened("upstream")
    observer.opened("upstream")
    observer.closed("upstream")
    observer.pool_wait()
    observer.stale_resend()
    observer.fault("driver")
    page = metrics.render().decode()
    for line in (
        'tl_gateway_connections{side="upstream"} 1.0',
        "tl_gateway_pool_waits_total 1.0",
        "tl_gateway_stale_connection_resends_total 1.0",
        'tl_gateway_faults_total{where="driver"} 1.0',
    ):
        assert line in page
