"""Real engines on a small machine, a gateway in front of them, and a client that does not wait for answers.

Engines are llama.cpp's servers with a slot and a thread each. Nothing here knows what is measured, or why.
"""

from __future__ import annotations

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
from math import nan
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import httpx
import msgspec
from fleet_arrivals import BLOCK_TOKENS, KEY_BYTES, Asked, Conditions, text
from harness import Process

from pointsman.domain.blocks import TOKEN_BYTES
from pointsman.simulate.profile import EngineProfile
from pointsman.testing import llamacpp
from pointsman.testing.llamacpp import Setting

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "Answered",
    "Fleet",
    "Setup",
    "Throttle",
    "ask_all",
    "cpu_seconds",
    "prefer",
    "profiled",
    "runqueue_seconds",
]

MODEL = "smol"
STATE_BYTES = 23_058
"""What a token of SmolLM2 takes in a cache."""
POLL_S = 2.0
"""How often engines are asked for their queues: as often as they tell of them in the simulator."""
_TIMEOUT_S = 120.0


class Throttle:
    """Lets each of some processes have `share` (0 to 1) of a core and no more: a context manager.

    A process that has had more CPU time than its share is stopped until it has not. Of what it does not use `SAVED_S`
    are saved, so that it makes up for moments in which others had the core. All go on when this ends, whatever happens.
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
        written = _CONFIG.format(
            policy=self._policy, key=KEY_BYTES, block=block, timeout=_TIMEOUT_S
        )
        for number, address in enumerate(addresses):
            name = f"w{number:04}"
            written += _WORKER.format(name=name, address=address, model=MODEL, interval=POLL_S)
        config.write_text(written)
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


class Answered(NamedTuple):
    ttft: float | None
    tpot: float | None
    e2e: float | None
    output: int
    cached: int
    late_s: float


_NOTHING = (None, None, None, 0, 0)


async def _ask(client: httpx.AsyncClient, asked: Asked, began: float) -> Answered:
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
        return Answered(*_NOTHING, late)
    if not (done and first and usage):
        return Answered(*_NOTHING, late)
    count = usage["completion_tokens"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    pace = (last - first) / (count - 1) if count > 1 else None
    return Answered(first, pace, last, count, cached, late)


async def ask_all(url: str, asked: Sequence[Asked]) -> list[Answered]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    async with httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S, limits=limits) as client:
        began = time.monotonic() + 0.2
        return list(await asyncio.gather(*(_ask(client, each, began) for each in asked)))


def profiled(conditions: Conditions, setup: Setup) -> EngineProfile:
    """Measure the engines while all of them are busy, as they are where it matters: medians of five rounds.

    The time of a prompt token is that of a long prompt less that of a short one, by the tokens that it has more.
    """
    random = Random("profile")
    tokens: list[float] = []
    steps: list[float] = []
    with Fleet(conditions, "least_outstanding", setup) as fleet:

        def ask(prompt: int, answer: int) -> list[Answered]:
            # As many as there are engines, at once: one for each.
            asked = [Asked(0.0, text(random, prompt), answer) for _ in fleet.pids]
            return asyncio.run(ask_all(fleet.url, asked))

        long, short = conditions.context // 2 + 1, BLOCK_TOKENS + 1
        for _ in range(5):
            of_short, of_long, of_answer = ask(short, 1), ask(long, 1), ask(short, 33)
            more = _median_ttft(of_long) - _median_ttft(of_short)
            tokens.append(more / (long - short))
            steps.append(statistics.median(each.tpot or nan for each in of_answer))
    return EngineProfile(
        prefill_tokens_per_s=round(1 / statistics.median(tokens), 2),
        decode_base_s=round(statistics.median(steps), 5),
        decode_per_sequence_s=0.0,
        chunk_tokens=BLOCK_TOKENS,
        sequences_max=1,
        # What is kept, and what is being computed beside it.
        kv_tokens=conditions.cache_mib * 1024 * 1024 // STATE_BYTES + conditions.context // 2,
        block_tokens=16,
    )


def _median_ttft(answers: Sequence[Answered]) -> float:
    return statistics.median(each.ttft or nan for each in answers)
