"""The reference picture for a cascade's curve: what an oracle, a coin, and routers by the subject reach on MMLU.

    python bench/routellm.py routellm_mmlu.csv.gz --plot routellm.svg

The file has the verdicts that RouteLLM published (Apache-2.0): for 14,042 MMLU questions, whether Mixtral-8x7B (weak)
and GPT-4-1106 (strong) answered right; columns `subject`, `prompt`, `weak_correct`, `strong_correct`. It has no score
of an answer (no logprobs), so no cascade can be replayed on it. What it allows is a threshold router that sees the
subject of the question alone:

- by accuracy: how often the weak model was right in that subject;
- by gain: how much oftener the strong one was.

Both are learned on nine tenths and applied to the last one, ten times, so no question is scored by its own verdict.
Beside them: the oracle (knows both verdicts), a perfect accept rule (knows the weak model's), and a coin.

Source: Ong et al., RouteLLM, 2024 (data, APGR, CPT).
"""

import argparse
import csv
import gzip
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

from pointsman.domain.curve import Sample, apgr, cpt, curve, interval

FOLDS = 10
RESAMPLES = 200
PRIOR = 20.0
"""Questions' worth of the overall share that every subject starts with."""


class Verdict(NamedTuple):
    """Who was right about a question."""

    subject: str
    weak: float
    strong: float


Quantity = Callable[[Verdict], float]
ROUTERS: dict[str, Quantity] = {
    "by subject, weak's accuracy": lambda verdict: verdict.weak,
    "by subject, strong's gain": lambda verdict: verdict.weak - verdict.strong,
}
"""What is averaged over a subject; a question is escalated where that is low."""


def verdicts(path: Path) -> list[Verdict]:
    """Read the file, gzipped or not."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8", newline="") as file:
        return [
            Verdict(row["subject"], float(row["weak_correct"]), float(row["strong_correct"]))
            for row in csv.DictReader(file)
        ]


def held_out(found: Sequence[Verdict], quantity: Quantity, seed: int) -> list[float]:
    """Score each question by its subject's mean over the other folds, drawn towards the mean of all."""
    order = list(range(len(found)))
    Random(seed).shuffle(order)
    scores = [0.0] * len(found)
    for fold in range(FOLDS):
        asked = order[fold::FOLDS]
        known = [found[at] for other in range(FOLDS) if other != fold for at in order[other::FOLDS]]
        overall = sum(map(quantity, known)) / len(known)
        seen = Counter(verdict.subject for verdict in known)
        totals = dict.fromkeys(seen, 0.0)
        for verdict in known:
            totals[verdict.subject] += quantity(verdict)
        for at in asked:
            subject = found[at].subject
            total = totals.get(subject, 0.0) + PRIOR * overall
            scores[at] = total / (seen[subject] + PRIOR)
    return scores


def routed(found: Sequence[Verdict], seed: int) -> dict[str, list[Sample]]:
    """Return each router's samples; cost is one strong call, since a router asks one model."""
    draws = Random(seed)
    scores: dict[str, list[float]] = {
        "oracle": [verdict.weak - verdict.strong for verdict in found],
        "perfect accept rule": [verdict.weak for verdict in found],
        **{name: held_out(found, quantity, seed) for name, quantity in ROUTERS.items()},
        "coin": [draws.random() for _ in found],
    }
    return {
        name: [
            Sample(value, verdict.weak, verdict.strong, 0.0, 1.0)
            for value, verdict in zip(values, found, strict=True)
        ]
        for name, values in scores.items()
    }


def row(name: str, samples: Sequence[Sample], resamples: int, seed: int) -> str:
    """Return a router's line of the table, in Markdown."""
    bounds = interval(samples, apgr, Random(seed), resamples=resamples)
    around = f"{bounds[0]:.3f} to {bounds[1]:.3f}" if bounds else "none"
    shares = (cpt(samples, gap) for gap in (0.5, 0.8))
    cells = ["none" if share is None else f"{share:.1%}" for share in shares]
    best = max(point.quality for point in curve(samples))
    recovered = apgr(samples)
    return f"| {name} | {recovered:.3f} ({around}) | {' | '.join(cells)} | {best:.1%} |"


def draw(routers: dict[str, list[Sample]], path: Path) -> None:
    """Draw accuracy over the escalated share."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": "pointsman", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(6.5, 4), layout="constrained")
        axes = figure.subplots()
        for (name, samples), style in zip(routers.items(), ("-", "--", "-", "-", ":"), strict=True):
            points = curve(samples)
            # Thousands of thresholds look like hundreds.
            points = [*points[:: max(1, len(points) // 200)], points[-1]]
            axes.plot(
                [point.escalated for point in points],
                [point.quality for point in points],
                style,
                label=name,
            )
        axes.set_xlabel("escalated")
        axes.set_ylabel("accuracy")
        axes.legend(frameon=False, fontsize=8)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    """Print the table, and draw the plot if one is wanted."""
    parser = argparse.ArgumentParser(description="The reference picture on RouteLLM's verdicts.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--plot", type=Path, help="FILE.svg or FILE.png")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--resamples", type=int, default=RESAMPLES)
    arguments = parser.parse_args()
    found = verdicts(arguments.file)
    weak = sum(verdict.weak for verdict in found) / len(found)
    strong = sum(verdict.strong for verdict in found) / len(found)
    print(f"{len(found)} questions; weak right {weak:.1%}, strong right {strong:.1%}\n")
    print("| router | APGR (95 %) | CPT(50 %) | CPT(80 %) | best accuracy |\n|---|---|---|---|---|")
    routers = routed(found, arguments.seed)
    for name, samples in routers.items():
        print(row(name, samples, arguments.resamples, arguments.seed), flush=True)
    if arguments.plot is not None:
        draw(routers, arguments.plot)


if __name__ == "__main__":
    main()
