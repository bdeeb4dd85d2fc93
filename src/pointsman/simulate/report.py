"""Comparisons as a table, as Markdown, as CSV and as JSON: figures of `Measures`, by policy and load."""

import csv
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import TextIO

import msgspec
from rich.table import Table

from pointsman.simulate.compare import Row
from pointsman.simulate.measures import Mean

__all__ = ["json_of", "markdown", "table", "write_csv"]

COLUMNS = {
    "goodput": "good/s",
    "good": "good",
    "ttft_p50": "ttft p50",
    "ttft_p99": "ttft p99",
    "tpot_p99": "tpot p99",
    "e2e_p99": "e2e p99",
    "hit_rate": "cached",
    "imbalance": "max/mean",
    "migrations": "moved",
    "cost": "cost",
}
"""What a table has room for, with what it is called there."""

ROLES = {"handed_off": "handed", "prefill_busy": "P busy", "decode_busy": "D busy"}
"""The same where there are workers that hand prompts over."""

SHARES = ("good", "hit_rate", *ROLES)


def table(rows: Sequence[Row], title: str) -> Table:
    """Return a table of some rows; the highest goodput at each load is bold."""
    made = Table(title=title, title_justify="left", box=None, pad_edge=False)
    made.add_column("load", justify="right")
    made.add_column("policy")
    roles = any(isfinite(row.means["prefill_busy"].mean) for row in rows)
    columns = {**COLUMNS, **ROLES} if roles else COLUMNS
    for name in columns.values():
        made.add_column(name, justify="right")
    load = None
    for row in rows:
        first = row.load != load
        made.add_row(
            f"{row.load:g}" if first else "",
            row.policy,
            *(_shown(name, row.means[name]) for name in columns),
            style="bold" if first else None,
        )
        load = row.load
    return made


def markdown(
    rows: Sequence[Row], columns: Sequence[str], more: Mapping[str, Sequence[str]] | None = None
) -> str:
    """Return some rows as a table in Markdown, with these figures, and `more` columns with a cell for each row.

    >>> print(markdown([Row("affinity", 2.0, 3, {"good": Mean(0.9, 0.1)})], ["good"], {"is": ["ours"]}))
    | load | policy | good | is |
    | ---: | --- | ---: | ---: |
    | 2 | affinity | 90.0% | ours |
    <BLANKLINE>
    """
    more = more or {}
    names = [COLUMNS[name] for name in columns]
    lines = [
        ["load", "policy", *names, *more],
        ["---:", "---", *["---:"] * (len(names) + len(more))],
    ]
    for at, row in enumerate(rows):
        figures = [_shown(name, row.means[name]) for name in columns]
        lines.append(
            [f"{row.load:g}", row.policy, *figures, *[cells[at] for cells in more.values()]]
        )
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def write_csv(rows: Sequence[Row], target: TextIO) -> None:
    """Write all figures of some rows, a mean and half of its confidence interval each."""
    names = list(rows[0].means) if rows else []
    writer = csv.writer(target, lineterminator="\n")
    writer.writerow(
        ["policy", "load", "seeds", *(each for name in names for each in (name, f"{name}_ci95"))]
    )
    for row in rows:
        figures = [f"{each:.9g}" for name in names for each in row.means[name]]
        writer.writerow([row.policy, f"{row.load:.9g}", row.seeds, *figures])


def json_of(rows: Sequence[Row]) -> bytes:
    """Return some rows as JSON; what is not known, and what is infinite, is null.

    >>> json_of([Row("affinity", 2.0, 1, {"good": Mean(1.0, float("nan"))})])
    b'[{"policy":"affinity","load":2.0,"seeds":1,"good":{"mean":1.0,"ci95":null}}]'
    """
    return msgspec.json.encode(
        [
            {
                "policy": row.policy,
                "load": row.load,
                "seeds": row.seeds,
                **{
                    name: {"mean": each.mean, "ci95": each.margin}
                    for name, each in row.means.items()
                },
            }
            for row in rows
        ]
    )


def _shown(name: str, value: Mean) -> str:
    mean, margin = value
    if not isfinite(mean):
        return "-"
    if name in SHARES:
        return f"{mean:.1%}"
    if name.startswith(("ttft", "tpot", "e2e")):
        return f"{mean * 1000:.0f} ms" if mean < 1 else f"{mean:.2f} s"
    if name == "imbalance":
        return f"{mean:.2f}"
    shown = f"{mean:.0f}" if abs(mean) >= 100 or mean == int(mean) else f"{mean:.2f}"
    return f"{shown} ± {margin:.2g}" if name == "goodput" and isfinite(margin) else shown
