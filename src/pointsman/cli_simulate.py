"""`pointsman simulate`: which policy would do best, before it serves anybody.

Results go to stdout, everything said about them to stderr. Runs are spread over processes here, and nowhere else; what
needs Rich or matplotlib is imported when the command runs.
"""

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import fields
from enum import StrEnum
from functools import partial
from math import inf
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated, TypeAlias, TypeVar

import typer

if TYPE_CHECKING:
    from pointsman.domain.policy import PolicyOptions
    from pointsman.simulate.compare import Combination, Experiment, Result
    from pointsman.simulate.recorded import Recording

__all__ = ["simulate_command"]

FAILED = 1
DEMO = "sessions:prefixes=40,prefix=lognormal/3000/0.6,turns=geometric/4,think_s=exponential/2"
DEMO_REQUESTS = 1500
DEMO_WORKERS = 4
DEMO_SEEDS = 3
DEMO_LOADS = (12.0, 16.0, 20.0)

WANTED = 0.95
"""The share of good answers at the knee."""

DOUBLINGS = 8
"""How often the first load is doubled or halved to find it: a run at a tiny load is one of heartbeats."""

OTHERWISE = {"load_factor": "affinity_load_factor"}
"""What an option of policies is called in a configuration, where that is something else."""

Runs: TypeAlias = "Callable[[Experiment, Sequence[Combination]], list[Result]]"


class Pairs(StrEnum):
    """What `--pairing` takes."""

    ALWAYS = "always"
    QUICKEST = "quickest"


def simulate_command(
    recorded: Annotated[
        Path | None,
        typer.Argument(
            metavar="[RECORDED]", dir_okay=False, help="With --what-if: the gateway's record_file."
        ),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(help="NAME or NAME:option=value,...; repeatable. [default: all]"),
    ] = None,
    workload: Annotated[
        str,
        typer.Option(
            help="poisson, bursty, sessions, shared, agents or rag, maybe with :key=value,...; or a FILE: a trace of "
            "Mooncake or Azure, or a recording. docs/simulator.md"
        ),
    ] = "sessions",
    workers: Annotated[
        int | None,
        typer.Option(min=0, help="Unified engines. [default: 16, beside --prefill none]"),
    ] = None,
    prefill: Annotated[
        int, typer.Option(min=0, help="Prefill engines: prompts are handed off.")
    ] = 0,
    decode: Annotated[int, typer.Option(min=0, help="Decode engines.")] = 0,
    pairing: Annotated[
        Pairs,
        typer.Option(help="Which prompts are handed off, as `disagg_pairing` of a gateway."),
    ] = Pairs.ALWAYS,
    load: Annotated[
        list[str] | None,
        typer.Option(
            help="Requests per second, of a file a multiple of its own rate; repeatable; or `knee`: the highest load "
            "at which 95 % meet --slo. [default: 1 per worker, of a file 1]"
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each policy at each load.")] = 3,
    slo: Annotated[str, typer.Option(help="What a good answer is.")] = "ttft=2s,tpot=50ms",
    profile: Annotated[
        str, typer.Option(help="The engine: key=value,... or a TOML file. [default: a large one]")
    ] = "",
    gateways: Annotated[int, typer.Option(min=1, help="Each with a view of its own.")] = 1,
    requests: Annotated[int, typer.Option(min=1, help="Of a run.")] = 2000,
    csv: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Write every figure here.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(dir_okay=False, help="FILE.svg or FILE.png: extra `plot`.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Rows as JSON, and no table.")] = False,
    jobs: Annotated[int, typer.Option(min=0, help="Processes; 0: one for each core.")] = 0,
    demo: Annotated[
        bool,
        typer.Option("--demo", help="Compare all policies on drawn sessions, in under a minute."),
    ] = False,
    what_if: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            metavar="CONFIG",
            help="What this configuration would have done to RECORDED traffic.",
        ),
    ] = None,
) -> None:
    """Compare policies on a simulated fleet: the gateway's own routing, before modelled engines."""
    from pointsman.cli_output import check_writable, output
    from pointsman.domain.policy import POLICIES, PolicyOptions
    from pointsman.simulate.compare import Experiment, Row, Source, combinations, rows
    from pointsman.simulate.measures import ServiceLevel, means_of
    from pointsman.simulate.plot import check_plot, draw
    from pointsman.simulate.recorded import read_recording
    from pointsman.simulate.report import json_of, table, write_csv
    from pointsman.simulate.sources import measured, profile_of, source_of

    if (what_if is None) != (recorded is None):
        raise typer.BadParameter("--what-if CONFIG and RECORDED are given together")
    console = output()
    try:
        # All that can be wrong without a simulation comes before it.
        if plot is not None:
            check_plot(plot)
        for path in (csv, plot):
            if path is not None:
                check_writable(path)
        level = _named("slo", ServiceLevel.parse, slo)
        engine = profile_of(profile)
        names = policy or sorted(POLICIES)
        options = PolicyOptions()
        known: list[Row] = []
        if demo:
            workload, requests, seeds = DEMO, DEMO_REQUESTS, DEMO_SEEDS
            load = load or [f"{each:g}" for each in DEMO_LOADS]
            workers = workers or (0 if prefill else DEMO_WORKERS)
        if what_if is not None and recorded is not None:
            configured, options = _configured(what_if)
            names = [*dict.fromkeys([configured, *(policy or ())])]
            with recorded.open("rb") as lines:
                recording = read_recording(lines)
            if not recording.requests:
                raise ValueError(f"{recorded}: no request was recorded")
            source = Source(path=str(recorded), kind="recorded")
            workers = workers or max(len(recording.workers), 1)
            requests = len(recording.requests)
            seeds = 1
            known.append(Row("(recorded)", 1.0, 1, means_of([measured(recording, level)])))
            if not json:
                for name in names:
                    console.print(_again(recording, name, options), highlight=False, markup=False)
        else:
            source = source_of(workload)
        for name in names:
            _check_policy(name, options)
        if (prefill == 0) != (decode == 0):
            raise ValueError("--prefill and --decode are given together")
        if workers is None:
            workers = 0 if prefill else 16
        fleet = workers + prefill + decode
        if not fleet:
            raise ValueError("there is no worker: give --workers, or --prefill and --decode")
        experiment = Experiment(
            source=source,
            level=level,
            requests=requests,
            workers=workers,
            prefill_workers=prefill,
            decode_workers=decode,
            pairing=engine.pairing() if pairing is Pairs.QUICKEST else None,
            gateways=gateways,
            profile=engine,
            options=options,
            timelines=plot is not None,
        )
        unit = "requests/s" if source.recipe is not None else "times its own rate"
        loads, find = _loads(load, float(fleet) if source.recipe is not None else 1.0)
        with _spread(jobs) as runs:
            if find:
                results = []
                for name in names:
                    results += _at_the_knee(experiment, name, loads[0], seeds, runs)
                if not results:
                    raise ValueError(f"there is no load at which {WANTED:.0%} meet {slo}")
            else:
                results = runs(experiment, combinations(names, loads, seeds))
        made = [*known, *rows(results)]
        if json:
            typer.echo(json_of(made).decode())
        else:
            title = (
                f"{recorded or workload} on {fleet} workers, {gateways} "
                f"gateway{'s' * (gateways > 1)}, {seeds} seeds; load: {unit}; good: {slo}"
            )
            console.print(table(made, title))
        if csv is not None:
            with csv.open("w", encoding="utf-8", newline="") as target:
                write_csv(made, target)
        if plot is not None:
            draw(rows(results), results, plot, unit=unit)
    except ValueError as error:
        typer.echo(f"pointsman: {error}", err=True)
        raise typer.Exit(FAILED) from None
    except OSError as error:
        typer.echo(f"pointsman: {error.filename}: {error.strerror}", err=True)
        raise typer.Exit(FAILED) from None


Read = TypeVar("Read")


def _named(name: str, read: Callable[[str], Read], text: str) -> Read:
    try:
        return read(text)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _check_policy(name: str, options: "PolicyOptions") -> None:
    from pointsman.domain.policy import make_policy
    from pointsman.simulate.variants import variant_of

    plain, own = variant_of(name, options)
    _named("policy", lambda name: make_policy(name, own, Random(0)), plain)


def _loads(texts: list[str] | None, default: float) -> tuple[list[float], bool]:
    """Return the loads, and whether the knee is looked for, beginning at the first one."""
    loads = []
    for text in texts or ():
        if text == "knee":
            continue
        try:
            loads.append(float(text))
        except ValueError:
            raise ValueError(f"load: {text!r} is neither a number nor knee") from None
        if not 0 < loads[-1] < inf:
            raise ValueError(f"load: {text!r} is not more than 0")
    return loads or [default], "knee" in (texts or ())


def _at_the_knee(
    experiment: "Experiment", policy: str, first: float, seeds: int, runs: Runs
) -> "list[Result]":
    """Return the runs of a policy at its knee, none where there is no load that it can take, which is said."""
    from pointsman.simulate.compare import combinations
    from pointsman.simulate.knee import find_knee

    made: dict[float, list[Result]] = {}

    def share(load: float) -> float:
        results = made[load] = runs(experiment, combinations([policy], [load], seeds))
        return sum([each.measures.good for each in results]) / len(results)

    knee = find_knee(share, first, wanted=WANTED, doublings=DOUBLINGS)
    if not knee.load:
        said = f"not at any load down to {knee.above:g}; --load LESS begins below"
    elif knee.above == inf:
        said = f"at every load up to {knee.load:g}; --load MORE begins above"
    else:
        return made[knee.load]
    typer.echo(f"pointsman: {policy}: {WANTED:.0%} are good {said}", err=True)
    return made.get(knee.load, [])


@contextmanager
def _spread(jobs: int) -> Iterator[Runs]:
    """Yield what makes runs, in so many processes; 0 for one for each core."""
    from pointsman.simulate.compare import run

    count = jobs or os.cpu_count() or 1
    if count == 1:
        yield lambda experiment, which: [run(experiment, each) for each in which]
        return
    # A fork would copy the threads' locks, and a spawned process imports everything again: half a second, once.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, mp_context=context) as pool:
        try:
            yield lambda experiment, which: list(pool.map(partial(run, experiment), which))
        finally:
            pool.shutdown(cancel_futures=True)


def _configured(path: Path) -> "tuple[str, PolicyOptions]":
    """Return the policy of a configuration file and its options."""
    from pointsman.config import ConfigError, load
    from pointsman.domain.policy import PolicyOptions

    try:
        # Nothing listens here, so it does not matter that a gateway would be open to the world.
        gateway = load(path, ["gateway.listen=127.0.0.1:8080"], {}).gateway
    except ConfigError as error:
        raise ValueError(str(error)) from None
    values = {
        each.name: getattr(gateway, OTHERWISE.get(each.name, each.name))
        for each in fields(PolicyOptions)
        if hasattr(gateway, OTHERWISE.get(each.name, each.name))
    }
    return gateway.route_policy, PolicyOptions(**values)


def _again(recording: "Recording", name: str, options: "PolicyOptions") -> str:
    """Return in one line how a policy would have decided where another one did."""
    from pointsman.domain.policy import make_policy
    from pointsman.simulate.recorded import replay

    picks = [each.same for each in replay(recording, make_policy(name, options, Random(0)))]
    total = sum([len(each.picks) for each in recording.requests])
    return f"{name} decides {sum(picks)} of {len(picks)} recorded decisions alike ({total - len(picks)} have no loads)"
