"""`pointsman simulate`: policies compared on modelled engines, before anybody's traffic depends on them.

Runs are independent, so they are spread over the processors. Results go to stdout, what is said of them to stderr.
"""

import csv
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from random import Random
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, TypeVar

import msgspec
import typer

from pointsman.cli_output import output
from pointsman.domain.policy import POLICIES, PolicyOptions, make_policy

if TYPE_CHECKING:
    from pointsman.simulate.experiment import Experiment
    from pointsman.simulate.measures import Measures

__all__ = ["simulate_command"]

Result = TypeVar("Result")

FAILED = 1
SHOWN = ("goodput", "good", "ttft_p50", "ttft_p95", "tpot_p95", "hit_rate", "imbalance")
TIMES = ("ttft", "tpot", "e2e")
DEMO_REQUESTS = 2000


def simulate_command(
    policy: Annotated[
        list[str] | None,
        typer.Option(help="A policy; may be given several times. [default: all that there are]"),
    ] = None,
    workload: Annotated[
        str,
        typer.Option(
            help="agents, bursts, conversations, documents, system_prompts, or a trace: "
            "a .jsonl of Mooncake's or a .csv of Azure's, maybe .gz."
        ),
    ] = "conversations",
    workers: Annotated[int, typer.Option(min=1, max=4096, help="Engines.")] = 16,
    rate: Annotated[
        list[float] | None,
        typer.Option(
            min=0.001,
            help="Requests per second; may be given several times. "
            "[default: a trace's own, else 1 for each worker]",
        ),
    ] = None,
    knee: Annotated[
        bool, typer.Option("--knee", help="Find the highest rate at which 95% keep to --slo.")
    ] = False,
    seeds: Annotated[int, typer.Option(min=1, max=1000, help="Runs of each, for intervals.")] = 3,
    requests: Annotated[
        int, typer.Option(min=10, help="Requests of a run; a trace has its own number.")
    ] = 5000,
    slo: Annotated[str, typer.Option(help="What counts as good.")] = "ttft=2s,tpot=50ms",
    gateways: Annotated[int, typer.Option(min=1, help="Gateways that do not see each other.")] = 1,
    profile: Annotated[
        Path | None,
        typer.Option(dir_okay=False, exists=True, help="A TOML file with an engine's numbers."),
    ] = None,
    csv_file: Annotated[
        Path | None, typer.Option("--csv", dir_okay=False, help="Write every run there.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Every run as a line of JSON.")] = False,
    jobs: Annotated[
        int, typer.Option(min=1, help="Processes.", show_default="one per processor")
    ] = os.cpu_count() or 1,
    demo: Annotated[
        bool, typer.Option("--demo", help="A short comparison on generated traffic.")
    ] = False,
) -> None:
    """Compare policies: the gateway's own routing code, modelled engines, a virtual clock."""
    from pointsman.simulate.experiment import Experiment, run_once, traffic
    from pointsman.simulate.measures import parse_level
    from pointsman.simulate.profile import EngineProfile
    from pointsman.simulate.traces import TraceError

    if knee and csv_file is not None:
        raise typer.BadParameter("--knee has no runs to write into --csv")
    names = policy or sorted(POLICIES)
    if demo:
        workload, seeds, requests = "system_prompts", 2, DEMO_REQUESTS
    try:
        for name in names:
            make_policy(name, PolicyOptions(), Random(0))
        level = parse_level(slo)
        engine = (
            msgspec.toml.decode(profile.read_bytes(), type=EngineProfile)
            if profile
            else EngineProfile()
        )
        asked = traffic(workload)
    except (ValueError, TraceError, OSError) as error:
        typer.echo(f"pointsman simulate: {error}", err=True)
        raise typer.Exit(FAILED) from None
    experiments = [
        Experiment(
            policy=name,
            traffic=asked,
            rate=each,
            workers=workers,
            requests=requests,
            seed=seed,
            gateways=gateways,
            level=level,
            profile=engine,
        )
        for each in rate or [asked.rate or float(workers)]
        for name in names
        for seed in range(seeds)
    ]
    if knee:
        _show_knees(experiments, jobs, as_json=as_json)
        return
    runs = list(zip(experiments, _spread(run_once, experiments, jobs), strict=True))
    if csv_file is not None:
        _write(csv_file, runs)
    if as_json:
        for experiment, measures in runs:
            line = {**_named(experiment), **msgspec.to_builtins(measures)}
            typer.echo(msgspec.json.encode(line).decode())
    else:
        _show(runs)


def _spread(
    work: "Callable[[Experiment], Result]", experiments: "Sequence[Experiment]", jobs: int
) -> "list[Result]":
    if jobs == 1 or len(experiments) == 1:
        return [work(each) for each in experiments]
    with ProcessPoolExecutor(min(jobs, len(experiments))) as pool:
        return list(pool.map(work, experiments))


def _show_knees(experiments: "Sequence[Experiment]", jobs: int, *, as_json: bool) -> None:
    from rich.table import Table

    from pointsman.simulate.experiment import find_knee
    from pointsman.simulate.measures import estimate

    found = _spread(find_knee, experiments, jobs)
    table = Table("policy", "knee, requests/s", title=f"{experiments[0].traffic.name}, the knee")
    for name in dict.fromkeys(each.policy for each in experiments):
        of = [at for each, at in zip(experiments, found, strict=True) if each.policy == name]
        mean = estimate(of)
        if as_json:
            line = {"policy": name, "knee": mean.mean, "half": mean.half, "seeds": len(of)}
            typer.echo(msgspec.json.encode(line).decode())
        table.add_row(name, f"{mean.mean:.2f} ± {mean.half:.2f}")
    if not as_json:
        output().print(table)


def _show(runs: "Sequence[tuple[Experiment, Measures]]") -> None:
    from rich.table import Table

    from pointsman.simulate.measures import estimate

    console = output()
    for rate in dict.fromkeys(experiment.rate for experiment, _ in runs):
        of_rate = [run for run in runs if run[0].rate == rate]
        first = of_rate[0][0]
        table = Table(title=f"{first.traffic.name}, {first.workers} workers, {rate:g} requests/s")
        table.add_column("policy", no_wrap=True)
        for name in SHOWN:
            table.add_column(name.replace("_", " "), justify="right", no_wrap=True)
        by_policy = {
            name: [measures for experiment, measures in of_rate if experiment.policy == name]
            for name in dict.fromkeys(experiment.policy for experiment, _ in of_rate)
        }
        for name, found in sorted(
            by_policy.items(), key=lambda each: -fmean([run.goodput for run in each[1]])
        ):
            cells = []
            for column in SHOWN:
                value = estimate([getattr(each, column) for each in found])
                cells.append(_cell(column, value.mean, value.half))
            table.add_row(name, *cells)
        console.print(table)
    console.print(
        f"{len(runs)} runs of {runs[0][1].requests} judged requests; ± is the 95% interval."
    )


def _cell(column: str, mean: float, half: float) -> str:
    if column.startswith(TIMES):
        return f"{mean * 1000:.0f} ms" if mean < 1 else f"{mean:.3g} s"
    if column in ("good", "hit_rate"):
        return f"{mean:.1%}"
    return f"{mean:.2f} ±{half:.2f}" if column == "goodput" and half else f"{mean:.2f}"


def _named(experiment: "Experiment") -> dict[str, object]:
    return {
        "policy": experiment.policy,
        "traffic": experiment.traffic.name,
        **{name: getattr(experiment, name) for name in ("rate", "workers", "gateways", "seed")},
    }


def _write(path: Path, runs: "Sequence[tuple[Experiment, Measures]]") -> None:
    try:
        with path.open("w", newline="") as file:
            lines = [{**_named(each), **msgspec.to_builtins(measures)} for each, measures in runs]
            writer = csv.DictWriter(file, lines[0])
            writer.writeheader()
            writer.writerows(lines)
    except OSError as error:
        typer.echo(f"pointsman simulate: {path}: {error.strerror}", err=True)
        sys.exit(FAILED)
