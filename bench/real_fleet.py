"""Routing policies on real engines, and the same arrivals simulated: is the order the same?

    python bench/real_fleet.py smoke
    python bench/real_fleet.py plan affinity kv_cost --seeds 20
    python bench/real_fleet.py run affinity kv_cost --seed 0 --seed 1 --out runs.jsonl
    python bench/real_fleet.py report runs.jsonl --csv runs.csv

`run` starts, for each seed and each policy, four engines (llama.cpp's server, SmolLM2, one thread each) and one
gateway (`pointsman serve`) as processes of their own, with nothing cached, and sends them what the seed has drawn:
prompts that begin with one of some shared beginnings, in sessions of some turns, at times that are known beforehand and
wait for no answer. Nothing but `route_policy` differs between the policies of a seed. Policies take turns, and each
seed begins with another one, so that a slow quarter of an hour hits all of them. Each seed is appended to `--out` as
lines of JSON, so a long measurement can be made in pieces.

Each engine gets the same share of a core, and no more (`Throttle`): on a machine with fewer cores than engines they
would otherwise lend each other what they do not use, and to leave an engine idle would cost nothing.

`report` prints the measured figures with their confidence intervals, the simulated ones of the same arrivals, on a
profile that `run` measured before it began, and both orders. Goodput, hit rate and quantiles are those of the
simulator, by the same code. `plan` only simulates: to choose a load before engines are troubled.

The engines are llama.cpp's because it keeps prompts that are over: those that left its slot stay in `cache_mib` of
memory, the oldest go first, and a new prompt goes on from the one that begins most like it. With one slot that is
nearly a cache of blocks. `pointsman engine` keeps one prompt for each sequence and shares none, so where requests with
one beginning meet, all of them compute it.

What the simulator has in common with what is measured: the arrivals to the token, the workers' ids, how often they tell
of their queues, and the keys that `affinity` hashes, so that it makes the same choices there. What it has not: its
cache is of blocks and not of whole prompts, and its engines say how much room they have, which llama.cpp does not.

It needs Linux and the extra `engine`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from fleet_arrivals import Conditions, drawn, simulated
from fleet_engines import Fleet, Setup, ask_all, cpu_seconds, profiled, runqueue_seconds
from fleet_figures import COLUMNS, Run, cell, csv_lines, ranking, table, values
from rich.console import Console

from pointsman.engine.weights import cache_folder, default_weights
from pointsman.simulate.measures import means_of
from pointsman.simulate.profile import EngineProfile

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main", "measured"]


def measured(
    conditions: Conditions, profile: EngineProfile, policy: str, seed: int, setup: Setup
) -> Run:
    """Make one run, with engines of its own."""
    asked = drawn(conditions, seed)
    began, load = time.strftime("%Y-%m-%d %H:%M"), os.getloadavg()[0]
    with Fleet(conditions, policy, setup) as fleet:
        used = [cpu_seconds(pid) for pid in fleet.pids]
        waited = sum(map(runqueue_seconds, fleet.pids))
        answers = asyncio.run(ask_all(fleet.url, asked))
        busy = [cpu_seconds(pid) - so_far for pid, so_far in zip(fleet.pids, used, strict=True)]
        waited = sum(map(runqueue_seconds, fleet.pids)) - waited
    return Run(
        policy=policy,
        seed=seed,
        conditions=conditions,
        profile=profile,
        at=[round(each.at, 4) for each in asked],
        ttft=[_rounded(each.ttft) for each in answers],
        tpot=[_rounded(each.tpot) for each in answers],
        e2e=[_rounded(each.e2e) for each in answers],
        prompt=[len(each.ids) for each in asked],
        output=[each.output for each in answers],
        cached=[each.cached for each in answers],
        busy_s=[round(each, 3) for each in busy],
        waited=round(waited / (waited + sum(busy)), 4),
        late_s=round(max(each.late_s for each in answers), 4),
        load=round(load, 2),
        began=began,
    )


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)


def _setup(args: argparse.Namespace) -> Setup:
    weights = args.model or default_weights(cache_folder(os.environ), Console(stderr=True))
    return Setup(weights, args.nice)


def _run(args: argparse.Namespace, conditions: Conditions) -> int:
    setup = _setup(args)
    profile = profiled(conditions, setup)
    print(f"profile: {values(profile)}", file=sys.stderr, flush=True)
    until = time.monotonic() + args.minutes * 60
    for seed in args.seed or [0]:
        if time.monotonic() + len(args.policies) * (conditions.seconds + 15) > until:
            print(f"no time for seed {seed}", file=sys.stderr)
            return 3
        turn = seed % len(args.policies)
        runs = []
        for policy in args.policies[turn:] + args.policies[:turn]:
            run = measured(conditions, profile, policy, seed, setup)
            runs.append(run)
            figures = run.measures()
            print(
                f"{seed} {policy}: goodput {figures.goodput:.2f}/s, {figures.good:.0%} good, hit rate "
                f"{figures.hit_rate:.2f}, ttft {figures.ttft_p50:.2f} {figures.ttft_p90:.2f}, failed "
                f"{figures.failed:.0f}, waited {run.waited:.0%}",
                file=sys.stderr,
                flush=True,
            )
        # A seed that is not there for all policies is worth nothing.
        with args.out.open("ab") as file:
            file.writelines(msgspec.json.encode(run) + b"\n" for run in runs)
    return 0


def _plan(args: argparse.Namespace, conditions: Conditions) -> int:
    found = {
        policy: means_of(
            [simulated(conditions, args.profile, policy, seed, seed) for seed in range(args.seeds)]
        )
        for policy in args.policies
    }
    print(f"| policy | {' | '.join(COLUMNS)} |\n| --- |{' ---: |' * len(COLUMNS)}")
    for policy in ranking({policy: means["goodput"].mean for policy, means in found.items()}):
        cells = [cell(found[policy][column]) for column in COLUMNS]
        print(f"| `{policy}` | {' | '.join(cells)} |")
    return 0


def _report(args: argparse.Namespace) -> int:
    decoder = msgspec.json.Decoder(Run)
    runs = [decoder.decode(line) for path in args.files for line in path.open("rb")]
    print("\n".join(table(runs, args.profile, args.chances)))
    if args.csv is not None:
        args.csv.write_text("\n".join(csv_lines(runs)) + "\n")
    return 0


def _smoke(args: argparse.Namespace, conditions: Conditions) -> int:
    """Two engines, two policies, ten seconds each: everything is there, and nothing fails."""
    setup = _setup(args)
    small = msgspec.structs.replace(conditions, engines=2, seconds=10.0, rate=1.0, prefixes=2)
    profile = profiled(small, setup)
    runs = [
        measured(small, profile, policy, 0, setup) for policy in ("affinity", "least_outstanding")
    ]
    print("\n".join(table(runs)))
    return int(any(None in run.e2e or not sum(run.cached) for run in runs))


def _profile(text: str) -> EngineProfile:
    pairs = dict(each.split("=") for each in text.split(","))
    return msgspec.convert(pairs, EngineProfile, strict=False)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    engine = argparse.ArgumentParser(add_help=False)
    engine.add_argument(
        "--model", type=Path, help="a GGUF file, instead of SmolLM2 as it is shipped"
    )
    engine.add_argument("--nice", type=int, default=0, help="priority of engines and gateway")
    workload = argparse.ArgumentParser(add_help=False)
    for name, default in msgspec.structs.asdict(Conditions()).items():
        flag = "--" + name.replace("_", "-")
        workload.add_argument(flag, type=type(default), default=default)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("smoke", parents=[engine, workload], help="about a minute")
    plan = commands.add_parser("plan", parents=[workload], help="simulate only")
    plan.add_argument("policies", nargs="+")
    plan.add_argument("--seeds", type=int, default=10)
    plan.add_argument("--profile", type=_profile, required=True, help="key=value,...")
    run = commands.add_parser("run", parents=[engine, workload], help="measure")
    run.add_argument("policies", nargs="+")
    run.add_argument("--seed", type=int, action="append", help="repeatable")
    run.add_argument("--out", type=Path, required=True, help="a file of lines of JSON to append to")
    run.add_argument("--minutes", type=float, default=600, help="begin no seed that takes longer")
    report = commands.add_parser("report", help="compare with the simulator")
    report.add_argument("files", type=Path, nargs="+")
    report.add_argument("--csv", type=Path)
    report.add_argument("--profile", type=_profile, help="simulate on another one: key=value,...")
    report.add_argument("--chances", type=int, default=8)
    return parser


def main(arguments: Sequence[str]) -> int:
    """Do what the command line says."""
    args = _parser().parse_args(arguments)
    # Whoever ends this ends the engines, too: an exit unwinds all that was started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if args.command == "report":
        return _report(args)
    conditions = Conditions(**{name: getattr(args, name) for name in Conditions.__struct_fields__})
    commands = {"run": _run, "plan": _plan, "smoke": _smoke}
    return commands[args.command](args, conditions)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
