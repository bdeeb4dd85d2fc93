"""The curve of a sweep as a picture: quality over cost, and what each threshold does. Needs the extra `plot`."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from pointsman.domain.curve import Point, Sample, curve
from pointsman.sweep.asking import SweepError
from pointsman.sweep.report import shown
from pointsman.sweep.sweeping import Sweep

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["check_plot", "draw"]

SUFFIXES = (".svg", ".png")
BAND_POINTS = 24
BAND_RESAMPLES = 200
BLUE, RED, GREY = "#1f5fa8", "#b5442e", "#777777"


def check_plot(path: Path) -> None:
    """Check, before anybody is asked, that a picture can be drawn to `path`.

    Raises:
        SweepError: its suffix is of no picture that is drawn here, or matplotlib is missing.
    """
    if path.suffix not in SUFFIXES:
        raise SweepError(f"{path.name}: a plot is one of {', '.join(SUFFIXES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise SweepError("a plot needs the plot extra: pip install 'pointsman[plot]'")


def draw(sweep: Sweep, path: Path, *, unit: str, quality: str, seed: int = 0) -> None:
    """Draw a sweep to a file, SVG or PNG by its suffix; the same sweep gives the same bytes.

    Raises:
        SweepError: the file cannot be written.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    # Ids in an SVG are random without a salt, and glyphs as paths are most of its bytes.
    with mpl.rc_context({"svg.hashsalt": "pointsman", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(9, 3.8), layout="constrained")
        left, right = figure.subplots(1, 2)
        _quality_over_cost(left, sweep, unit, quality, seed)
        _over_threshold(right, sweep, quality)
        try:
            figure.savefig(
                path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None
            )
        except OSError as error:
            raise SweepError(f"cannot write {path}: {error.strerror}") from None


def _quality_over_cost(axes: "Axes", sweep: Sweep, unit: str, quality: str, seed: int) -> None:
    few = shown(sweep, BAND_POINTS)
    bands = _bands(sweep, few, seed)
    axes.fill_between(
        [point.cost for point in few],
        [low for low, _ in bands],
        [high for _, high in bands],
        color=BLUE,
        alpha=0.15,
        linewidth=0,
        label="95 % of resamples",
    )
    axes.plot(_of(sweep.points, "cost"), _of(sweep.points, "quality"), color=BLUE, label="cascade")
    small = _alone(sweep.samples, "small")
    large = _alone(sweep.samples, "large")
    axes.plot(
        [small[0], small[0] + large[0]],
        [small[1], large[1]],
        color=GREY,
        linestyle="--",
        label="escalated at random",
    )
    axes.plot(*small, "o", color=GREY, label="small alone")
    axes.plot(*large, "s", color=GREY, label="large alone")
    for choice, mark in zip(sweep.choices, "D^v", strict=False):
        axes.plot(choice.point.cost, choice.point.quality, mark, color=RED, label=choice.wish)
    axes.set_xlabel(f"cost per prompt ({unit})")
    axes.set_ylabel(quality)
    axes.legend(frameon=False, fontsize=7)


def _over_threshold(axes: "Axes", sweep: Sweep, quality: str) -> None:
    # The last point stands for every threshold that keeps nothing; its distance says nothing.
    points = sweep.points[:-1] or sweep.points
    taus = _of(points, "tau")
    dearest = max(point.cost for point in sweep.points) or 1.0
    axes.plot(taus, _of(points, "escalated"), color=GREY, label="escalated")
    axes.plot(
        taus,
        [point.cost / dearest for point in points],
        color=RED,
        linestyle=":",
        label="cost, of the highest",
    )
    axes.plot(taus, _of(points, "quality"), color=BLUE, label=quality)
    for choice in sweep.choices:
        if choice.wish == "knee":
            axes.axvline(choice.point.tau, color=RED, linewidth=0.8, label="knee")
    if sweep.keep == "<=":
        axes.invert_xaxis()
    axes.set_xlabel(f"threshold of {sweep.metric}")
    axes.set_ylim(0, 1.02)
    axes.legend(frameon=False, fontsize=7)


def _bands(sweep: Sweep, points: Sequence[Point], seed: int) -> list[tuple[float, float]]:
    """Return between what qualities 95 % of resamples lie at each point's threshold."""
    random, samples = Random(seed), sweep.samples
    taus = [point.tau for point in points]
    drawn = (random.choices(samples, k=len(samples)) for _ in range(BAND_RESAMPLES))
    curves = [curve(each, taus, keep=sweep.keep) for each in drawn]
    columns = (sorted(_of(column, "quality")) for column in zip(*curves, strict=True))
    out = BAND_RESAMPLES // 40
    return [(qualities[out], qualities[-1 - out]) for qualities in columns]


def _alone(samples: Sequence[Sample], model: str) -> tuple[float, float]:
    costs = [getattr(sample, f"{model}_cost") for sample in samples]
    qualities = [getattr(sample, f"{model}_quality") for sample in samples]
    return sum(costs) / len(samples), sum(qualities) / len(samples)


def _of(points: Sequence[Point], field: str) -> list[float]:
    return [getattr(point, field) for point in points]
