"""Is a simulated second a real one? An engine and its profile, under the same arrivals.

Run as `python bench/profile_validation.py --model smollm2 --profile smollm2-cpu [--url http://127.0.0.1:8000]` against
an engine that does nothing else. Requests come in a Poisson process, whether or not others are answered, at `--loads`
times what the engine can do by its profile. Their sizes are drawn: a question, an answer, and in front of `--shared` of
them one of `DOCUMENTS` texts that they have in common. What was really asked (when, how many tokens of prompt and
answer the engine counted) is then simulated, and both are looked at in the same way. The table is Markdown: measured,
simulated, and how far the latter is off.

An engine is not always as fast as when it was measured, least of all on a machine that others use. So before and after
each run a few requests are asked alone. How much longer they take than by the profile is the column `alone`; the second
error is that of a profile which is slower by as much.

Each request is asked once. Of few requests the 90% quantile is one or two of them: take `--requests` as large as time
allows.
"""

import argparse
import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path
from random import Random
from statistics import median

from pointsman.measure.asking import Answered, Engine, look
from pointsman.measure.prompts import Prompts
from pointsman.simulate.measures import ServiceLevel, measure
from pointsman.simulate.outcome import Outcome, WorkerOutcome
from pointsman.simulate.profile import EngineProfile
from pointsman.simulate.run import Scenario, simulate
from pointsman.simulate.sizes import lognormal
from pointsman.simulate.sources import profile_of
from pointsman.simulate.workload import Arrival, Listed
from pointsman.sweep.asking import client_for

BLOCK = 32
DOCUMENTS = 6
DOCUMENT = 96
"""Tokens of each document."""
QUESTION = lognormal(60, 0.7)
ANSWER = lognormal(24, 0.6)
ALONE = 3
LEAST, MOST = 4, 400
"""Tokens of the shortest and of the longest question or answer."""


@dataclass(frozen=True)
class Request:
    """What is to be asked: when, by how much text, behind which document (-1 for none)."""

    at: float
    question: int
    answer: int
    document: int

    def arrival(self, number: int, prompt: int, answer: int) -> Arrival:
        """Return it as it is simulated, with the tokens that were counted."""
        size = prompt // BLOCK
        shared = min(DOCUMENT // BLOCK, size) if self.document >= 0 else 0
        blocks = [
            (self.document if place < shared else DOCUMENTS + number) << 16 | place
            for place in range(size)
        ]
        return Arrival(self.at, tuple(blocks), prompt, answer)


def drawn(random: Random, count: int, rate: float, shared: float) -> list[Request]:
    """Draw the requests of a run, so many per second."""
    requests, at = [], 0.0
    for _ in range(count):
        at += random.expovariate(rate)
        question, answer = (
            min(max(each.tokens(random), LEAST), MOST) for each in (QUESTION, ANSWER)
        )
        document = random.randrange(DOCUMENTS) if random.random() < shared else -1
        requests.append(Request(at, question, answer, document))
    return requests


def simulated(profile: EngineProfile, arrivals: Sequence[Arrival]) -> Outcome:
    """Return what the modelled engine makes of it."""
    listed = Listed(arrivals, BLOCK)
    return simulate(Scenario(workload=listed, workers=1, profile=profile, policy="weighted"))


def capacity(profile: EngineProfile, requests: Sequence[Request]) -> float:
    """Return how many of such requests per second the engine does by its profile, if there are always more."""
    arrivals = [
        Request(0.0, each.question, each.answer, each.document).arrival(
            number, each.question + DOCUMENT * (each.document >= 0), each.answer
        )
        for number, each in enumerate(requests)
    ]
    return len(arrivals) / simulated(profile, arrivals).ended_at


async def asked(engine: Engine, prompts: Prompts, requests: Sequence[Request]) -> list[Answered]:
    """Ask all requests, each when its time comes."""
    documents = [prompts.text(DOCUMENT) for _ in range(DOCUMENTS)]
    start = engine.now()

    async def ask(request: Request) -> Answered:
        question = prompts.text(request.question)
        text = question if request.document < 0 else f"{documents[request.document]} {question}"
        await asyncio.sleep(start + request.at - engine.now())
        return await engine.ask(text, request.answer)

    return list(await asyncio.gather(*map(ask, requests)))


def outcome_of(requests: Sequence[Request], answers: Sequence[Answered]) -> Outcome:
    """Return what the engine did, as a simulation would tell it."""
    outcome = Outcome(workers=[WorkerOutcome("engine")])
    start = answers[0].asked - requests[0].at
    for request, each in zip(requests, answers, strict=True):
        index = outcome.begin(
            request.at, prompt=each.prompt_tokens, output=each.output_tokens, gateway=0
        )
        sent = start + request.at
        outcome.ttft[index] = each.times[0] - sent
        outcome.e2e[index] = each.times[-1] - sent
        outcome.tpot[index] = (
            (each.times[-1] - each.times[0]) / (each.output_tokens - 1)
            if each.output_tokens > 1
            else nan
        )
        outcome.cached[index] = max(each.cached_tokens, 0)
        outcome.attempts[index] = 1
    return outcome


FIGURES = ("ttft_p50", "ttft_p90", "tpot_p50", "tpot_mean", "tokens/s", "hit_rate")


def figures(outcome: Outcome) -> dict[str, float]:
    """Return what is compared of a run."""
    measures = measure(outcome, ServiceLevel())
    ends = [at + lasted for at, lasted in zip(outcome.at, outcome.e2e, strict=True)]
    found = {name: getattr(measures, name, nan) for name in FIGURES}
    decoding = sum(outcome.e2e) - sum(outcome.ttft)
    gaps = sum(outcome.output) - len(outcome)
    return found | {
        "tokens/s": sum(outcome.output) / (max(ends) - outcome.at[0]),
        "tpot_mean": decoding / gaps,
    }


async def alone(engine: Engine, prompts: Prompts, profile: EngineProfile) -> list[float]:
    """Return how many times as long as by the profile some requests take that are alone."""
    ratios = []
    for _ in range(ALONE):
        answered = await engine.ask(prompts.text(2 * DOCUMENT), round(ANSWER.first))
        tokens = answered.output_tokens
        seconds = profile.prompt_s(answered.prompt_tokens) + sum(
            profile.token_s(1, answered.prompt_tokens + number) for number in range(1, tokens)
        )
        ratios.append((answered.times[-1] - answered.asked) / seconds)
    return ratios


async def compared(arguments: argparse.Namespace) -> list[object]:
    """Print the table; return what was asked and answered."""
    profile = profile_of(arguments.profile)
    random = Random(arguments.seed)
    most = capacity(profile, drawn(random, 200, 1.0, arguments.shared))
    print(f"by its profile the engine does {most:.2f} of these requests per second\n")
    print("| load | requests/s | alone | " + " | ".join(FIGURES) + " |")
    print("| --- " * (len(FIGURES) + 3) + "|")
    kept: list[object] = []
    async with client_for(arguments.url, "", concurrency=arguments.requests) as client:
        dialect, _ = await look(client)
        engine = Engine(client, arguments.model, dialect, timeout_s=600)
        for load in arguments.loads:
            prompts = Prompts(Random())
            for _ in range(2):
                text = prompts.text(2 * DOCUMENT)
                prompts.learn(text, (await engine.ask(text, 1)).prompt_tokens)
            requests = drawn(random, arguments.requests, load * most, arguments.shared)
            ratios = await alone(engine, prompts, profile)
            answers = await asked(engine, prompts, requests)
            ratios += await alone(engine, prompts, profile)
            drift = median(ratios)
            real = figures(outcome_of(requests, answers))
            arrivals = [
                request.arrival(number, each.prompt_tokens, each.output_tokens)
                for number, (request, each) in enumerate(zip(requests, answers, strict=True))
            ]
            model = figures(simulated(profile, arrivals))
            drifted = figures(simulated(profile.slower(drift), arrivals))
            cells = [f"{load:g}", f"{load * most:.2f}", f"x {drift:.2f}"]
            for name in FIGURES:
                errors = [each[name] / real[name] - 1 for each in (model, drifted) if real[name]]
                off = ", ".join([f"{error:+.0%}" for error in errors])
                cells.append(f"{real[name]:.3g}, {model[name]:.3g} ({off})")
            print(f"| {' | '.join(cells)} |", flush=True)
            kept.append((load, ratios, arrivals, answers))
    return kept


def main() -> None:
    """Read the arguments, and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--profile", required=True)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--shared", type=float, default=0.5)
    parser.add_argument("--raw", help="a JSON file for what was asked, and when each token came")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--loads",
        type=lambda text: [float(each) for each in text.split(",")],
        default="0.3,0.5,0.7,0.9,1.2",
    )
    arguments = parser.parse_args()
    kept = asyncio.run(compared(arguments))
    if arguments.raw:
        Path(arguments.raw).write_text(json.dumps(kept), encoding="utf-8")


if __name__ == "__main__":
    main()
