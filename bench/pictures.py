"""Figures of gateways as pictures (SVG): bars of one figure, and lines of one over another. Needs the extra `plot`."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

__all__ = ["Bar", "Curve", "bars", "can_draw", "curves"]

_OURS, _OTHERS = "C3", "C7"


class Bar(NamedTuple):
    """What is said of one gateway: the median, the least and the most of the repeats."""

    name: str
    middle: float
    least: float
    most: float


class Curve(NamedTuple):
    """A gateway's bars over x. Their names are not used."""

    name: str
    xs: list[float]
    bars: list[Bar]


def can_draw() -> bool:
    """Whether matplotlib is here."""
    return importlib.util.find_spec("matplotlib") is not None


def _style() -> AbstractContextManager[None]:
    import matplotlib as mpl

    # Ids in an SVG are random without a salt, and glyphs as paths are most of its bytes.
    return mpl.rc_context({"svg.hashsalt": "pointsman", "svg.fonttype": "none", "font.size": 9})


def bars(panels: Mapping[str, Sequence[Bar]], path: Path) -> None:
    """Draw a panel of horizontal bars for each title. Scales are logarithmic: some cost a thousand times more."""
    from matplotlib.figure import Figure

    with _style():
        most = max(len(each) for each in panels.values())
        figure = Figure(figsize=(3.1 * len(panels), 0.9 + 0.33 * most), layout="constrained")
        for number, (title, of) in enumerate(panels.items(), 1):
            axes = figure.add_subplot(1, len(panels), number)
            colors = [_OURS if bar.name.startswith("pointsman") else _OTHERS for bar in of]
            middles = [bar.middle for bar in of]
            around = [
                [bar.middle - bar.least for bar in of],
                [bar.most - bar.middle for bar in of],
            ]
            axes.barh([bar.name for bar in of], middles, xerr=around, color=colors, height=0.6)
            axes.set_xscale("log")
            axes.set_xlim(0.5 * min(middles), 40 * max(middles))
            for row, bar in enumerate(of):
                axes.annotate(
                    f"{bar.middle:,.{0 if bar.middle >= 100 else 1 if bar.middle >= 1 else 2}f}",
                    (max(bar.most, bar.middle), row),
                    xytext=(4, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=8,
                )
            axes.invert_yaxis()
            axes.set_title(title, fontsize=9, loc="left")
        figure.savefig(path, metadata={"Date": None})


def curves(panels: Mapping[str, Sequence[Curve]], label: str, path: Path) -> None:
    """Draw a panel for each label of x, with the least and the most of the repeats as a band; both scales are
    logarithmic, and `label` is that of y.
    """
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(curve.name for panel in panels.values() for curve in panel))
    with _style():
        figure = Figure(figsize=(5 * len(panels), 4.2), layout="constrained")
        for number, (x_label, panel) in enumerate(panels.items(), 1):
            axes = figure.add_subplot(1, len(panels), number)
            for curve in panel:
                style = names.index(curve.name)
                color, mark = f"C{style % 10}", "osD^vP*X"[style % 8]
                width = 2.2 if curve.name.startswith("pointsman") else 1.1
                middles = [bar.middle for bar in curve.bars]
                axes.plot(
                    curve.xs, middles, color=color, marker=mark, ms=4, lw=width, label=curve.name
                )
                axes.fill_between(
                    curve.xs,
                    [bar.least for bar in curve.bars],
                    [bar.most for bar in curve.bars],
                    color=color,
                    alpha=0.15,
                    lw=0,
                )
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.set_xlabel(x_label)
            axes.set_ylabel(label)
            axes.grid(alpha=0.25)
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
        figure.savefig(path, metadata={"Date": None})
