"""A sweep as a table for people, and as CSV for programs: every threshold has a line there, some have one here."""

import csv
from collections.abc import Sequence
from typing import TextIO

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pointsman.domain.curve import Point
from pointsman.sweep.sweeping import Choice, Interval, Learned, Sweep, rule

__all__ = ["learned_lines", "report", "shown", "write_csv"]

HEADER = ("tau", "escalated", "cost", "quality", "marked")


def report(sweep: Sweep, *, unit: str, quality: str, rows: int) -> RenderableType:
    """Return the two models alone, about `rows` thresholds, and the choices with their rules.

    `unit` is what costs are counted in, `quality` what quality is called.
    """
    marks = _marks(sweep)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in (sweep.metric, "escalated", f"cost ({unit})", quality):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for point in shown(sweep, rows):
        table.add_row(
            f"{sweep.keep} {point.tau:.4g}",
            f"{point.escalated:.1%}",
            f"{point.cost:.4g}",
            f"{point.quality:.1%}",
            ", ".join(marks.get(point, [])),
        )
    n = len(sweep.samples)
    small = (
        sum(s.small_quality for s in sweep.samples) / n,
        sum(s.small_cost for s in sweep.samples) / n,
    )
    large = (
        sum(s.large_quality for s in sweep.samples) / n,
        sum(s.large_cost for s in sweep.samples) / n,
    )
    lines = [
        f"{n} prompts; small alone: {quality} {small[0]:.1%}, cost {small[1]:.4g}; "
        f"large alone: {quality} {large[0]:.1%}, cost {large[1]:.4g}",
        f"gap recovered (APGR): {_number(sweep.apgr)} {_interval(sweep.apgr_interval, '.3f')}, at random 0.5; "
        f"the score tells right from wrong (AUC): {_number(sweep.auc)}, a coin 0.5",
    ]
    if sweep.unscored:
        lines.append(f"small answers without a {sweep.metric}, always escalated: {sweep.unscored}")
    after = [line for choice in sweep.choices for line in _choice_lines(sweep, choice, quality)]
    after += [
        "no knee: no threshold does better than escalating at random"
        if wish == "knee"
        else f"{wish}: no threshold does"
        for wish in sweep.missed
    ]
    return Group(Text("\n".join(lines)), "", table, "", Text("\n".join(after)))


def learned_lines(learned: Learned) -> str:
    """Return how well an acceptor learned, in two lines."""
    return (
        f"acceptor of {', '.join(learned.acceptor.features)}: learned from {learned.trained} answers; "
        f"right about {learned.accuracy:.1%} of {learned.tested} others\n"
        f"(one verdict for all of them: {learned.majority:.1%}); AUC there {_number(learned.auc)}, "
        f"of the score alone {_number(learned.auc_of_metric)}"
    )


def write_csv(sweep: Sweep, file: TextIO) -> None:
    """Write one line per threshold, numbers with every bit."""
    marks = _marks(sweep)
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(HEADER)
    for point in sweep.points:
        numbers = (point.tau, point.escalated, point.cost, point.quality)
        writer.writerow([*map(repr, numbers), "; ".join(marks.get(point, []))])


def shown(sweep: Sweep, rows: int) -> Sequence[Point]:
    """Return about `rows` points, spread over the escalated share, with both ends and all that are marked."""
    points = sweep.points
    steps = max(1, min(rows, len(points)) - 1)
    chosen = {round(at * (len(points) - 1) / steps) for at in range(steps + 1)}
    marks = _marks(sweep)
    return [point for at, point in enumerate(points) if at in chosen or point in marks]


def _marks(sweep: Sweep) -> dict[Point, list[str]]:
    marks: dict[Point, list[str]] = {}
    for choice in sweep.choices:
        marks.setdefault(choice.point, []).append(choice.wish)
    return marks


def _choice_lines(sweep: Sweep, choice: Choice, quality: str) -> list[str]:
    point = choice.point
    return [
        f'{choice.wish}: accept_if = "{rule(sweep.metric, sweep.keep, point.tau)}"',
        f"  threshold {point.tau:.4g} {_interval(choice.tau, '.4g')}, "
        f"cost {point.cost:.4g} {_interval(choice.cost, '.4g')}, "
        f"{quality} {point.quality:.1%} {_interval(choice.quality, '.1%')}",
    ]


def _interval(found: Interval, form: str) -> str:
    """Return a 95 % interval."""
    return "(no interval)" if found is None else f"({found[0]:{form}} to {found[1]:{form}})"


def _number(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.3f}"
