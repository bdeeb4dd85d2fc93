"""Comparisons as pictures: load against a quantile, hit rate against imbalance, and who had how much when.

Needs the extra `plot`.
"""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pointsman.simulate.compare import Result, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["check_plot", "draw"]

SUFFIXES = (".svg", ".png")
TIMELINES = 6
"""For how many policies timelines are drawn at most."""


def check_plot(path: Path) -> None:
    """Check, before anything is simulated, that a picture can be drawn to `path`. Raises ValueError."""
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path.name}: a plot is one of {', '.join(SUFFIXES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("a plot needs the plot extra: pip install 'pointsman[plot]'")


def draw(
    rows: Sequence[Row],
    results: Sequence[Result],
    path: Path,
    *,
    unit: str,
    at: float | None = None,
) -> None:
    """Draw a comparison to a file, SVG or PNG by its suffix; the same one gives the same bytes.

    `unit` says what a load is. Hit rate and imbalance are of the load `at`, of the highest one if that is not given.
    Timelines are of the first seed at the highest load. Raises OSError.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    highest = max([row.load for row in rows])
    lines = [
        each
        for each in results
        if each.timeline and each.combination.seed == 0 and each.combination.load == highest
    ][:TIMELINES]
    # Ids in an SVG are random without a salt, and glyphs as paths are most of its bytes.
    with mpl.rc_context({"svg.hashsalt": "pointsman", "svg.fonttype": "none", "font.size": 9}):
        height = 4.2 + 1.4 * len(lines) + 0.05 * len({row.policy for row in rows})
        figure = Figure(figsize=(11, height), layout="constrained")
        ratios = [3.0] + [1.0] * len(lines)
        grid = figure.add_gridspec(1 + len(lines), 3, height_ratios=ratios)
        _over_load(figure.add_subplot(grid[0, 0]), rows, "ttft_p99", "TTFT, 99% (s)", unit)
        _over_load(
            figure.add_subplot(grid[0, 1]), rows, "goodput", "good requests per second", unit
        )
        _hits_and_balance(figure.add_subplot(grid[0, 2]), rows, highest if at is None else at)
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=7
        )
        for number, result in enumerate(lines, 1):
            _timeline(figure.add_subplot(grid[number, :]), result)
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def _over_load(axes: "Axes", rows: Sequence[Row], name: str, label: str, unit: str) -> None:
    for policy, style in _styles(rows).items():
        own = sorted([row for row in rows if row.policy == policy], key=lambda row: row.load)
        means = [row.means[name] for row in own]
        loads = [row.load for row in own]
        axes.plot(loads, [each.mean for each in means], ms=3, label=policy, **style)
        axes.fill_between(
            loads,
            [each.mean - each.margin for each in means],
            [each.mean + each.margin for each in means],
            alpha=0.15,
            color=style["color"],
            lw=0,
        )
    axes.set_xlabel(unit)
    axes.set_ylabel(label)
    if name.startswith("ttft"):
        axes.set_yscale("log")


def _hits_and_balance(axes: "Axes", rows: Sequence[Row], load: float) -> None:
    styles = _styles(rows)
    for row in sorted([row for row in rows if row.load == load], key=lambda row: row.policy):
        where = (row.means["imbalance"].mean, row.means["hit_rate"].mean)
        axes.plot(*where, **styles[row.policy])
        name, _, own = row.policy.partition(":")
        label = axes.annotate(
            name + "*" * bool(own), where, xytext=(4, 3), textcoords="offset points", fontsize=7
        )
        # A name may reach over the edge; it shall not take room from the others.
        label.set_in_layout(False)
    axes.set_xlabel(f"busiest worker / mean, at load {load:g}")
    axes.set_ylabel("prompt tokens from caches")


def _styles(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Return how each policy is drawn: there are ten colours, and then another mark and another line."""
    return {
        policy: {
            "color": f"C{number % 10}",
            "marker": "osD^"[number // 10 % 4],
            "linestyle": ("-", "--", ":", "-.")[number // 10 % 4],
        }
        for number, policy in enumerate(sorted({row.policy for row in rows}))
    }


def _timeline(axes: "Axes", result: Result) -> None:
    axes.imshow(result.timeline, aspect="auto", cmap="viridis", interpolation="nearest")
    axes.set_ylabel("worker")
    axes.set_xticks([])
    axes.set_title(
        f"{result.combination.policy}: requests at each worker over time", fontsize=8, loc="left"
    )
