"""What a comparison says of its figures: medians with their spread, what is added, and what was not carried."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
try:
    import compare
    import growth
    from harness import LoadReport, Quantiles
finally:
    sys.path.pop(0)

RATE = compare.MODES["rate"].rate
NONE = Quantiles(count=0, p50=0, p99=0, max=0)


def report(
    *, p50: int = 100, p99: int = 300, rps: float = RATE, chunks: int = 0, errors: int = 0
) -> LoadReport:
    return LoadReport(
        seconds=1.0,
        requests=1000,
        plain=1000,
        streams=0,
        broken_streams=0,
        chunks=chunks,
        bytes=0,
        rps=rps,
        resent=0,
        errors=errors,
        faults={},
        statuses={},
        workers={},
        latency_us=Quantiles(count=1000, p50=p50, p99=p99, max=p99),
        first_event_us=NONE,
        event_delay_us=NONE,
    )


def measured(
    gateway: str, mode: str, cpu_us: float, load: LoadReport, repeat: int = 0
) -> compare.Measurement:
    return compare.Measurement(
        gateway=gateway,
        mode=mode,
        repeat=repeat,
        cpu_us=cpu_us,
        cpu_share=0.5,
        rss_bytes=2**20,
        load=load,
    )


def ran(*measurements: compare.Measurement) -> compare.Run:
    names = list(dict.fromkeys(m.gateway for m in measurements))
    modes = list(dict.fromkeys(m.mode for m in measurements))
    return compare.Run(
        date="2026-01-01",
        machine={},
        seconds=1.0,
        repeat=3,
        modes=[compare.MODES[mode] for mode in modes],
        versions=dict.fromkeys(names, ""),
        skipped={},
        measurements=list(measurements),
    )


def cells(run: compare.Run, gateway: str) -> dict[str, str]:
    headings, rows = compare.table_of(run)
    return next(dict(zip(headings, row, strict=True)) for row in rows if row[0] == gateway)


def test_a_median_is_said_with_the_least_and_the_most() -> None:
    assert compare.spread([3.0, 1.0, 2.0], 1) == "2.0 (1.0 to 3.0)"
    assert compare.spread([3.0], 1) == "3.0"


def test_what_a_gateway_adds_is_what_it_has_beyond_none_in_the_same_repeat() -> None:
    run = ran(
        measured("direct", "rate", 0, report(p50=100, p99=1000), repeat=0),
        measured("direct", "rate", 0, report(p50=200, p99=9000), repeat=1),
        measured("nginx", "rate", 30, report(p50=150, p99=3000), repeat=0),
        measured("nginx", "rate", 40, report(p50=260, p99=10000), repeat=1),
    )
    of = cells(run, "nginx")
    assert of["added p50 ms"] in ("0.06 (0.05 to 0.06)", "0.05 (0.05 to 0.06)")
    assert of["added p99 ms"] == "1.50 (1.00 to 2.00)"


def test_without_the_floor_latencies_are_not_called_added() -> None:
    headings, _ = compare.table_of(ran(measured("nginx", "rate", 30, report())))
    assert "p50 ms" in headings and "added p50 ms" not in headings


def test_a_rate_that_is_not_carried_has_no_latency() -> None:
    of = cells(ran(measured("litellm", "rate", 30, report(rps=0.5 * RATE))), "litellm")
    assert "carries 500/s" in of.values()
    assert not of["p50 ms"] and not of["p99 ms"]


def test_no_cost_is_said_of_chunks_that_never_came() -> None:
    of = cells(ran(measured("litellm", "sse", 9e9, report())), "litellm")
    assert of["sse: µs CPU per chunk"] == "no chunk came"


def test_a_bound_is_judged_by_medians_and_an_error_fails() -> None:
    run = ran(
        *(measured("nginx", "json", us, report(), n) for n, us in enumerate((10, 20, 90))),
        *(measured("pointsman", "json", us, report(), n) for n, us in enumerate((49, 50, 10))),
    )
    assert [holds for _, holds in compare.verdicts(run)] == [True, True]
    bad = ran(
        measured("nginx", "json", 10, report()),
        measured("pointsman", "json", 26, report(errors=1)),
    )
    assert [holds for _, holds in compare.verdicts(bad)] == [False, False]


def point(workers: int, body: int, cpu_us: float, repeat: int = 0) -> growth.Point:
    return growth.Point(
        gateway="nginx",
        workers=workers,
        body_bytes=body,
        repeat=repeat,
        cpu_us=cpu_us,
        idle_share=0.25,
        reached=workers,
        rss_bytes=2**20,
        load=report(),
    )


def test_growth_is_told_per_kib_and_per_number_of_engines() -> None:
    run = growth.Run(
        date="2026-01-01",
        machine={},
        seconds=1.0,
        repeat=2,
        versions={"nginx": "1"},
        skipped={"nginx with 2 engines": "why"},
        points=[
            point(16, 100, 20.0),
            point(16, 2048, 22.0),
            point(16, 2048, 26.0, 1),
            point(16, 100 + 10 * 1024, 45.0),
            point(1000, 2048, 60.0),
        ],
    )
    said = growth.tables_of(run)
    assert "| nginx 1 | 20.0 | 24.0 (22.0 to 26.0) | 45.0 |" in said
    assert "| nginx 1 | 24.0 (22.0 to 26.0) | 60.0 | 1000 | 25.0% | 1 |" in said
    assert "- nginx with 2 engines: why" in said
