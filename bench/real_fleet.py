"""Routing policies on real engines, and the same arrivals simulated: is the order the same?

    python bench/real_fleet.py smoke
    python bench/real_fleet.py plan affinity kv_cost --seeds 20
    python bench/real_fleet.py run affinity kv_cost --seed 0 --seed 1 --out runs.jsonl
    python bench/real_fleet.py report runs.jsonl --csv runs.csv

`run` starts, for each seed and each policy, four engines (llama.cpp's server, SmolLM2, one thread each) and one gateway
(`pointsman serve`) as processes of their own, with nothing cached, and sends them what the seed has drawn: prompts that
begin with one of some shared beginnings, in sessions of some turns, at times that are known beforehand and wait for no
answer. Nothing but `route_policy` differs between the policies of a seed. Policies take turns, and each seed begins with
another one, so that a slow quarter of an hour hits all of them. Each run is appended to `--out` as a line of JSON, so a
long measurement can be made in pieces.

Each engine gets the same share of a core, and no more (`Throttle`): on a machine with fewer cores than engines they
would otherwise lend each other what they do not use, and a policy that makes one of them wait for nothing would look no
worse than one that does not.

`report` prints the measured figures with their confidence intervals, the simulated ones of the same arrivals, on a
profile that `run` measured before it began, and both orders. Goodput, hit rate and quantiles are those of the simulator,
by the same code. `plan` only simulates: to choose a load before engines are troubled.

The engines are llama.cpp's because it keeps prompts that are over: those that left its slot stay in `cache_mib` of
memory, the oldest go first, and a new prompt goes on from the one that begins most like it. With one slot that is nearly
a cache of blocks. `pointsman engine` keeps one prompt for each sequence and shares none, so where requests with one
beginning meet, all of them compute it; no engine of a real fleet is like that.

What the simulator has in common with what is measured: the arrivals to the token, the workers' ids, how often they tell
of their queues, and the keys that `affinity` hashes, so that it makes the same choices there. What it has not: its cache
is of blocks and not of whole prompts, and its engines say how much room they have, which llama.cpp does not.

It needs Linux and the extra `engine`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from array import array
from bisect import bisect
from itertools import accumulate, pairwise
from math import isfinite, nan
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import httpx
import msgspec
from harness import Process
from rich.console import Console

from pointsman.domain.blocks import TOKEN_BYTES, block_hashes
from pointsman.domain.prefix import render_prefix, render_prompt
from pointsman.engine.weights import cache_folder, default_weights
from pointsman.simulate.measures import Mean, Measures, ServiceLevel, mean_of, means_of, measure
from pointsman.simulate.outcome import Outcome, WorkerOutcome
from pointsman.simulate.profile import EngineProfile
from pointsman.simulate.run import Scenario, simulate
from pointsman.simulate.sizes import exponential, geometric, uniform
from pointsman.simulate.workload import Arrival, Listed
from pointsman.testing import llamacpp
from pointsman.testing.llamacpp import Setting

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = [
    "Asked",
    "Conditions",
    "Run",
    "Throttle",
    "arrival",
    "drawn",
    "kendall",
    "main",
    "paired",
    "ranking",
    "table",
]

MODEL = "smol"
ENGINES = 4
BLOCK_TOKENS = 32
"""Engines compute prompts in chunks of so many tokens; the gateway compares such blocks."""
STATE_BYTES = 23_058
"""What a token of SmolLM2 takes in a cache."""
POLL_S = 2.0
"""How often engines are asked for their queues: as often as they tell of them in the simulator."""
KEY_BYTES = 8
"""Of the key that `affinity` hashes: as many as a block's hash has, so that the simulator can have the same one."""
WARMING = 0.25
"""The part of a run that is in no figure: caches are cold."""
_TIMEOUT_S = 120.0


class Conditions(msgspec.Struct, frozen=True, kw_only=True):
    """What all runs of a file have in common. Sizes are in tokens, times in seconds.

    A prompt is one of `prefixes` beginnings of `prefix` tokens, the k-th in proportion to 1/k, and what was said since:
    each of on average `turns` turns, `think_s` apart on average, has `question` tokens more or less, and an answer of
    `answer`. There are `rate` requests per second, for `seconds`. An engine has a slot of `context` tokens, and `cache_mib`
    MiB for prompts that are over, on `share` of a core.
    """

    rate: float = 2.5
    seconds: float = 60.0
    prefixes: int = 16
    prefix: int = 256
    question: int = 24
    answer: int = 8
    turns: float = 2.0
    think_s: float = 6.0
    engines: int = ENGINES
    context: int = 512
    cache_mib: int = 32
    share: float = 0.3
    slo: str = "ttft=5s"


# ------------------------------------------------------------------ what is asked


class Asked(NamedTuple):
    """A request that is sent `at` seconds after the start: its prompt as token ids, and how much is to be answered."""

    at: float
    ids: list[int]
    answer: int


def drawn(conditions: Conditions, seed: int) -> list[Asked]:
    """Draw what is asked, in order: the same for everybody who has the seed."""
    random = Random(f"real fleet {seed}")
    beginnings = [_text(random, conditions.prefix) for _ in range(conditions.prefixes)]
    popularity = list(accumulate(1 / rank for rank in range(1, conditions.prefixes + 1)))
    question = uniform(conditions.question / 2, conditions.question * 3 / 2)
    turns, think = geometric(conditions.turns), exponential(conditions.think_s)
    asked: list[Asked] = []
    # Sessions that began before have turns to come: the first ones start so early that most are over at 0.
    at = -10.0 * conditions.think_s * conditions.turns
    while (at := at + random.expovariate(conditions.rate / conditions.turns)) < conditions.seconds:
        due = at
        ids = beginnings[bisect(popularity, random.random() * popularity[-1])]
        for _ in range(turns.tokens(random)):
            ids = ids + _text(random, question.tokens(random))
            if len(ids) + conditions.answer > conditions.context or due >= conditions.seconds:
                break
            if due >= 0:
                asked.append(Asked(due, ids, conditions.answer))
            # What an engine answers is not known beforehand, so something else of that length stands for it.
            ids = ids + _text(random, conditions.answer)
            due += think.draw(random)
    return sorted(asked, key=lambda each: each.at)


def _text(random: Random, tokens: int) -> list[int]:
    # Ids of ordinary words: the first ones of a vocabulary are marks and single bytes.
    return [random.randrange(1000, 40_000) for _ in range(tokens)]


def arrival(asked: Asked) -> Arrival:
    """Return what the simulator is told of a request: the gateway's own blocks, and its own key as the first of them."""
    raw = msgspec.json.encode(asked.ids)
    blocks = block_hashes(render_prompt(raw, None), BLOCK_TOKENS * TOKEN_BYTES)
    key = int.from_bytes(render_prefix(raw, None, KEY_BYTES), "big")
    return Arrival(asked.at, (key, *blocks[1:]), len(asked.ids), asked.answer)


# ------------------------------------------------------------------ what became of it


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """A measured run. Lists have a place for each request, in order: seconds, nan where there was none, and tokens.

    `busy_s` is CPU time of each engine. `waited` is the part of the engines' wanted time in which others had the cores,
    `late_s` how late the latest request was sent, and `load` the load average of the machine at the start.
    """

    policy: str
    seed: int
    conditions: Conditions
    profile: EngineProfile
    at: list[float]
    ttft: list[float | None]
    tpot: list[float | None]
    e2e: list[float | None]
    prompt: list[int]
    output: list[int]
    cached: list[int]
    busy_s: list[float]
    waited: float
    late_s: float
    load: float
    began: str

    def measures(self) -> Measures:
        """Return the figures of this run, as the simulator has them."""
        outcome = Outcome(
            at=array("d", self.at),
            ttft=array("d", [nan if each is None else each for each in self.ttft]),
            tpot=array("d", [nan if each is None else each for each in self.tpot]),
            e2e=array("d", [nan if each is None else each for each in self.e2e]),
            prompt=array("q", self.prompt),
            output=array("q", self.output),
            cached=array("q", self.cached),
            worker=array("q", [-1] * len(self.at)),
            gateway=array("q", [0] * len(self.at)),
            attempts=array("q", [1] * len(self.at)),
            workers=[
                WorkerOutcome(f"w{number:04}", busy_s=busy)
                for number, busy in enumerate(self.busy_s)
            ],
            ended_at=self.conditions.seconds,
        )
        return measure(outcome, ServiceLevel.parse(self.conditions.slo), WARMING)


def simulated(
    conditions: Conditions, profile: EngineProfile, policy: str, seed: int, chance: int = 0
) -> Measures:
    """Simulate what `run` measures; `chance` is the seed of a policy that draws at random."""
    listed = Listed([arrival(each) for each in drawn(conditions, seed)], BLOCK_TOKENS)
    scenario = Scenario(
        workload=listed, policy=policy, workers=conditions.engines, profile=profile, seed=chance
    )
    return measure(simulate(scenario), ServiceLevel.parse(conditions.slo), WARMING)


# ------------------------------------------------------------------ orders


def ranking(figures: Mapping[str, float]) -> list[str]:
    """Return the names, the highest figure first, equals by name."""
    return sorted(figures, key=lambda name: (-figures[name], name))


def kendall(one: Mapping[str, float], other: Mapping[str, float]) -> float:
    """Return Kendall's tau-b of two figures of the same names: 1 the same order, -1 the reverse, nan if one has none.

    Raises ValueError if the names are not the same.
    """
    if one.keys() != other.keys():
        raise ValueError("the orders are of different names")
    names = sorted(one)
    agree, only_one, only_other = 0, 0, 0
    for at, left in enumerate(names):
        for right in names[at + 1 :]:
            first = _sign(one[left] - one[right])
            second = _sign(other[left] - other[right])
            agree += first * second
            only_one += first != 0
            only_other += second != 0
    return agree / (only_one * only_other) ** 0.5 if only_one and only_other else nan


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)


def paired(one: Mapping[int, float], other: Mapping[int, float]) -> Mean:
    """Return the mean of `one - other` over the seeds that both have, with its 95% interval.

    What a seed makes hard is hard for both, so this is much narrower than the intervals of the two.

    Raises ValueError where there is no such seed.
    """
    seeds = sorted(one.keys() & other.keys())
    if not seeds:
        raise ValueError("no seed is in both")
    return mean_of([one[seed] - other[seed] for seed in seeds])


# ------------------------------------------------------------------ the fleet


class Throttle:
    """Lets each of some processes have `share` (0 to 1) of a core and no more: a context manager.

    A process that has had more CPU time than its share is stopped until it has not. Of what it does not use `SAVED_S` are
    saved, so that it makes up for moments in which others had the core. All go on when this ends, whatever happens.
    """

    TICK_S = 0.005
    SAVED_S = 0.05

    def __init__(self, pids: Sequence[int], share: float) -> None:
        self._pids = list(pids)
        self._share = share
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="throttle")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._thread.join()
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def _run(self) -> None:
        used = {pid: cpu_seconds(pid) for pid in self._pids}
        credit = dict.fromkeys(self._pids, 0.0)
        stopped: set[int] = set()
        at = time.monotonic()
        while not self._ended.wait(self.TICK_S):
            now = time.monotonic()
            for pid in self._pids:
                before, used[pid] = used[pid], cpu_seconds(pid)
                earned = (now - at) * self._share
                credit[pid] = min(credit[pid] + earned, self.SAVED_S) - (used[pid] - before)
                with contextlib.suppress(ProcessLookupError):
                    if credit[pid] < 0 and pid not in stopped:
                        os.kill(pid, signal.SIGSTOP)
                        stopped.add(pid)
                    elif credit[pid] >= 0 and pid in stopped:
                        os.kill(pid, signal.SIGCONT)
                        stopped.discard(pid)
            at = now


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process so far, exactly; 0 of one that is gone."""
    try:
        # The clock of another process, as clock_getcpuclockid(3) makes it.
        return time.clock_gettime(~pid << 3 | 2)
    except OSError:
        return 0.0


def runqueue_seconds(pid: int) -> float:
    """Return how long the threads of a process have waited for a core; 0 of one that is gone."""
    waited = 0
    for thread in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):
            waited += int(thread.read_text().split()[1])
    return waited / 1e9


_CONFIG = """\
[gateway]
listen = "127.0.0.1:0"
health_listen = "127.0.0.1:0"
registry_listen = "127.0.0.1:0"
log_format = "text"
route_policy = "{policy}"
affinity_bytes = {key}
prefix_block_bytes = {block}
first_byte_timeout_s = {timeout}
"""

_WORKER = """
[[gateway.workers]]
id = "{name}"
url = "http://{address}"
model = "{model}"
dialect = "llamacpp"
poll_interval_s = {interval}
poll_timeout_s = 10.0
"""


class Engine:
    """A llama.cpp server that is ready; it ends with us, by its standard input, if nobody ends it before."""

    def __init__(self, conditions: Conditions, weights: Path) -> None:
        setting = Setting(
            weights=str(weights),
            alias=MODEL,
            slots=1,
            context=conditions.context,
            batch=BLOCK_TOKENS,
            cache_mib=conditions.cache_mib,
        )
        command = [sys.executable, "-m", llamacpp.__name__, msgspec.json.encode(setting).decode()]
        # A session of its own is a group of its own for the kernel's scheduler, too.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        self.pid = self._process.pid

    def address(self) -> str:
        """Return where it listens, when it does."""
        assert self._process.stdout is not None
        if found := self._process.stdout.readline().strip():
            return found
        raise SystemExit("an engine did not start")

    def stop(self) -> None:
        """End it at once: it has nothing to lose."""
        self._process.kill()
        self._process.communicate()


def prefer(pid: int, nice: int) -> None:
    """Give a process that leads its session a priority (-20 to 19; less than 0 is for root)."""
    os.setpriority(os.PRIO_PROCESS, pid, nice)
    group = Path(f"/proc/{pid}/autogroup")
    if group.exists():
        # Sessions share the cores first, their processes second: sched(7), autogroup.
        group.write_text(str(nice))


class Setup(NamedTuple):
    """What is the same for all fleets, and is no part of the conditions."""

    weights: Path
    nice: int


class Fleet:
    """A gateway with a policy and its engines: a context manager, ready when it is entered."""

    def __init__(self, conditions: Conditions, policy: str, setup: Setup) -> None:
        self._conditions = conditions
        self._policy = policy
        self._setup = setup
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        conditions, setup = self._conditions, self._setup
        with self._stack as stack:
            engines = []
            for _ in range(conditions.engines):
                engine = Engine(conditions, setup.weights)
                stack.callback(engine.stop)
                engines.append(engine)
                if setup.nice:
                    prefer(engine.pid, setup.nice)
            self.pids = [engine.pid for engine in engines]
            self.url = f"http://{self._gateway([engine.address() for engine in engines])}"
            self._wait_for(len(engines))
            stack.enter_context(Throttle(self.pids, conditions.share))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def _gateway(self, addresses: Sequence[str]) -> str:
        """Start the gateway; return where it listens."""
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="fleet-")))
        config, log = folder / "gateway.toml", folder / "log"
        block = BLOCK_TOKENS * TOKEN_BYTES
        text = _CONFIG.format(policy=self._policy, key=KEY_BYTES, block=block, timeout=_TIMEOUT_S)
        for number, address in enumerate(addresses):
            name = f"w{number:04}"
            text += _WORKER.format(name=name, address=address, model=MODEL, interval=POLL_S)
        config.write_text(text)
        with log.open("wb") as output:
            command = [sys.executable, "-m", "pointsman", "serve", "--config", str(config)]
            process = Process(command, output)
        self._stack.callback(process.stop)
        if self._setup.nice:
            prefer(process.child.pid, self._setup.nice)
        deadline = time.monotonic() + _TIMEOUT_S
        while process.alive and time.monotonic() < deadline:
            if found := re.search(r"serving on ([^\s,]+)", log.read_text(errors="replace")):
                return found[1]
            time.sleep(0.05)
        raise SystemExit(f"the gateway did not start: {log.read_text(errors='replace')[-600:]}")

    def _wait_for(self, count: int) -> None:
        deadline = time.monotonic() + _TIMEOUT_S
        while time.monotonic() < deadline:
            found = httpx.get(f"{self.url}/admin/v1/workers").json()["data"]
            if [each["up"] for each in found] == [True] * count:
                return
            time.sleep(0.1)
        raise SystemExit(f"the gateway does not see all engines: {found}")


class _Answered(NamedTuple):
    ttft: float | None
    tpot: float | None
    e2e: float | None
    output: int
    cached: int
    late_s: float


_NOTHING = (None, None, None, 0, 0)


async def _ask(client: httpx.AsyncClient, asked: Asked, began: float) -> _Answered:
    """Send a request when it is due, and read its answer; times count from when it was due."""
    await asyncio.sleep(max(began + asked.at - time.monotonic(), 0.0))
    due = began + asked.at
    late = time.monotonic() - due
    body = {"model": MODEL, "prompt": asked.ids, "max_tokens": asked.answer, "temperature": 0}
    body |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    first = last = 0.0
    usage: dict[str, Any] = {}
    done = False
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    done = True
                elif line.startswith("data: {") and response.status_code == 200:
                    event = msgspec.json.decode(line[6:])
                    if event.get("choices"):
                        last = time.monotonic() - due
                        first = first or last
                    usage = event.get("usage") or usage
    except httpx.HTTPError:
        return _Answered(*_NOTHING, late)
    if not (done and first and usage):
        return _Answered(*_NOTHING, late)
    count = usage["completion_tokens"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    pace = (last - first) / (count - 1) if count > 1 else None
    return _Answered(first, pace, last, count, cached, late)


async def _ask_all(url: str, asked: Sequence[Asked]) -> list[_Answered]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    async with httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S, limits=limits) as client:
        began = time.monotonic() + 0.2
        return list(await asyncio.gather(*(_ask(client, each, began) for each in asked)))


def measured(
    conditions: Conditions, profile: EngineProfile, policy: str, seed: int, setup: Setup
) -> Run:
    """Make one run, with engines of its own."""
    asked = drawn(conditions, seed)
    began, load = time.strftime("%Y-%m-%d %H:%M"), os.getloadavg()[0]
    with Fleet(conditions, policy, setup) as fleet:
        used = [cpu_seconds(pid) for pid in fleet.pids]
        waited = sum(map(runqueue_seconds, fleet.pids))
        answers = asyncio.run(_ask_all(fleet.url, asked))
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


# ------------------------------------------------------------------ the profile


def profiled(conditions: Conditions, setup: Setup) -> EngineProfile:
    """Measure one engine as it is throttled in a run: medians of five.

    The time of a prompt token is that of a long prompt less that of a short one, by the tokens that it has more.
    """
    alone = msgspec.structs.replace(conditions, engines=1)
    random = Random("profile")
    tokens, steps = [], []
    with Fleet(alone, "least_outstanding", setup) as fleet:

        def ask(prompt: int, answer: int) -> _Answered:
            (answered,) = asyncio.run(
                _ask_all(fleet.url, [Asked(0.0, _text(random, prompt), answer)])
            )
            return answered

        long, short = conditions.prefix + 1, BLOCK_TOKENS + 1
        for _ in range(5):
            of_short, of_long, of_answer = ask(short, 1), ask(long, 1), ask(short, 33)
            tokens.append(((of_long.ttft or nan) - (of_short.ttft or nan)) / (long - short))
            steps.append(of_answer.tpot or nan)
    return EngineProfile(
        prefill_tokens_per_s=round(1 / statistics.median(tokens), 2),
        decode_base_s=round(statistics.median(steps), 5),
        decode_per_sequence_s=0.0,
        chunk_tokens=BLOCK_TOKENS,
        sequences_max=1,
        # What is kept, and what is being computed beside it.
        kv_tokens=conditions.cache_mib * 1024 * 1024 // STATE_BYTES + conditions.prefix,
        block_tokens=16,
    )


# ------------------------------------------------------------------ reports

_COLUMNS = ("goodput", "good", "ttft_p50", "ttft_p90", "hit_rate", "imbalance")


def _cell(mean: Mean, digits: int = 2) -> str:
    around = f" ± {mean.margin:.{digits}f}" if isfinite(mean.margin) else ""
    return f"{mean.mean:.{digits}f}{around}"


def table(runs: Sequence[Run], chances: int = 1) -> list[str]:
    """Return the report of runs under the same conditions as Markdown, the policy of the highest goodput first.

    Simulated figures are of the same seeds, and means over `chances` draws of policies that draw at random.

    Raises ValueError for runs under different conditions, and where a policy lacks a seed.
    """
    conditions = runs[0].conditions
    if any(each.conditions != conditions for each in runs):
        raise ValueError("the runs are of different conditions")
    found: dict[str, dict[int, Measures]] = {}
    for each in runs:
        found.setdefault(each.policy, {})[each.seed] = each.measures()
    seeds = sorted({each.seed for each in runs})
    for policy, of_seeds in found.items():
        if sorted(of_seeds) != seeds:
            raise ValueError(f"{policy} does not have all the seeds")
    profile = _typical([each.profile for each in runs])
    models = {
        policy: means_of(
            [
                simulated(conditions, profile, policy, seed, chance)
                for seed in seeds
                for chance in range(chances)
            ]
        )
        for policy in found
    }
    real = {policy: means_of(list(of_seeds.values())) for policy, of_seeds in found.items()}
    goodput = {policy: means["goodput"].mean for policy, means in real.items()}
    expected = {policy: means["goodput"].mean for policy, means in models.items()}
    order, foreseen = ranking(goodput), ranking(expected)
    lines = [
        f"| policy | {' | '.join(_COLUMNS)} | to the next one, paired | simulated goodput | hit_rate | place |",
        f"| --- |{' ---: |' * (len(_COLUMNS) + 4)}",
    ]
    by_seed = {
        policy: {seed: each.goodput for seed, each in of_seeds.items()}
        for policy, of_seeds in found.items()
    }
    ahead = {one: _cell(paired(by_seed[one], by_seed[other])) for one, other in pairwise(order)}
    for policy in order:
        cells = [_cell(real[policy][column]) for column in _COLUMNS]
        model = models[policy]
        cells += [ahead.get(policy, ""), f"{expected[policy]:.2f}", f"{model['hit_rate'].mean:.2f}"]
        cells += [str(foreseen.index(policy) + 1)]
        lines.append(f"| `{policy}` | {' | '.join(cells)} |")
    tau = kendall(goodput, expected)
    lines += [
        "",
        f"Measured: {', '.join(order)}.",
        f"Simulated: {', '.join(foreseen)}.",
        f"Kendall's tau {tau:.2f}; the first three are {'the same' if order[:3] == foreseen[:3] else 'not the same'}.",
        "",
        f"{len(seeds)} seeds, {len(runs)} runs from {min(each.began for each in runs)} to "
        f"{max(each.began for each in runs)}; load average {min(each.load for each in runs):.1f} to "
        f"{max(each.load for each in runs):.1f} before a run; engines waited for a core in "
        f"{min(each.waited for each in runs):.0%} to {max(each.waited for each in runs):.0%} of the time in which they "
        f"wanted one; no request was sent more than {max(each.late_s for each in runs):.2f} s late; "
        f"{sum(each.e2e.count(None) for each in runs)} failed.",
        f"Engine: {_values(profile)}.",
        f"Workload: {_values(conditions)}.",
    ]
    return lines


def _values(settings: msgspec.Struct) -> str:
    return ", ".join(f"{name} {value}" for name, value in msgspec.structs.asdict(settings).items())


def _typical(profiles: Sequence[EngineProfile]) -> EngineProfile:
    """Return a profile with the medians of some: each piece of a measurement has measured its own."""
    numbers = [msgspec.structs.asdict(each) for each in profiles]
    middle = {name: statistics.median([each[name] for each in numbers]) for name in numbers[0]}
    return msgspec.convert(
        {name: type(numbers[0][name])(value) for name, value in middle.items()}, EngineProfile
    )


def csv_lines(runs: Sequence[Run]) -> Iterator[str]:
    """Yield the figures of every run as CSV, a line each."""
    names = Measures.__struct_fields__
    yield ",".join(["policy", "seed", "waited", "load", *names])
    for each in runs:
        measures = each.measures()
        numbers = [each.waited, each.load, *(getattr(measures, name) for name in names)]
        yield ",".join([each.policy, str(each.seed), *(f"{number:.6g}" for number in numbers)])


# ------------------------------------------------------------------ command line


def _setup(args: argparse.Namespace) -> Setup:
    weights = args.model or default_weights(cache_folder(os.environ), Console(stderr=True))
    return Setup(weights, args.nice)


def _run(args: argparse.Namespace, conditions: Conditions) -> int:
    setup = _setup(args)
    profile = profiled(conditions, setup)
    print(f"profile: {_values(profile)}", file=sys.stderr, flush=True)
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
    profile = msgspec.convert(dict(args.profile), EngineProfile, strict=False)
    found = {
        policy: means_of(
            [simulated(conditions, profile, policy, seed, seed) for seed in range(args.seeds)]
        )
        for policy in args.policies
    }
    print(f"| policy | {' | '.join(_COLUMNS)} |\n| --- |{' ---: |' * len(_COLUMNS)}")
    for policy in ranking({policy: means["goodput"].mean for policy, means in found.items()}):
        cells = [_cell(found[policy][column]) for column in _COLUMNS]
        print(f"| `{policy}` | {' | '.join(cells)} |")
    return 0


def _report(args: argparse.Namespace) -> int:
    decoder = msgspec.json.Decoder(Run)
    runs = [decoder.decode(line) for path in args.files for line in path.open("rb")]
    print("\n".join(table(runs, args.chances)))
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
    plan.add_argument(
        "--profile", type=lambda text: [each.split("=") for each in text.split(",")], required=True
    )
    run = commands.add_parser("run", parents=[engine, workload], help="measure")
    run.add_argument("policies", nargs="+")
    run.add_argument("--seed", type=int, action="append", help="repeatable")
    run.add_argument("--out", type=Path, required=True, help="a file of lines of JSON to append to")
    run.add_argument("--minutes", type=float, default=600, help="begin no seed that takes longer")
    report = commands.add_parser("report", help="compare with the simulator")
    report.add_argument("files", type=Path, nargs="+")
    report.add_argument("--csv", type=Path)
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
