"""Runs in a CSV file: one line each, so that a long comparison that was cut off goes on where it was.

Figures have six digits there. The same runs give the same bytes, in whatever order they were made: a file is written in
the order in which it was made, and put into that of the loads, policies and seeds when all is there.
"""

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Self

from msgspec.structs import fields

from pointsman.simulate.compare import Combination, Result
from pointsman.simulate.measures import Measures

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["KeptRuns", "read_runs", "write_runs"]

FIGURES = tuple([field.name for field in fields(Measures)])
HEADER = ["policy", "load", "seed", *FIGURES]


def read_runs(path: Path) -> list[Result]:
    """Return the runs of a file, none where there is none; a last line that was cut off is no run.

    Raises `ValueError` for a file of something else, `OSError` for one that cannot be read.
    """
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    header, *lines = csv.reader(whole.splitlines() or [""])
    if header and header != HEADER:
        raise ValueError(f"{path.name}: these are no runs")
    return [_result(line, f"{path.name}: line {at}") for at, line in enumerate(lines, 2)]


def write_runs(results: Iterable[Result], path: Path) -> None:
    """Write runs to a file, in order of load, policy and seed, in place of what was there."""
    ordered = sorted(results, key=lambda each: (each.combination.load, each.combination))
    with path.open("w", encoding="utf-8", newline="") as target:
        writer = csv.writer(target, lineterminator="\n")
        writer.writerow(HEADER)
        writer.writerows(map(_line, ordered))


class KeptRuns:
    """The runs of a file, to which others are added, each as soon as it is there.

    >>> from tempfile import TemporaryDirectory
    >>> from pointsman.simulate.compare import Experiment, Source, run
    >>> from pointsman.simulate.measures import ServiceLevel
    >>> from pointsman.simulate.synthetic import Recipe
    >>> source = Source(recipe=Recipe())
    >>> experiment = Experiment(source=source, level=ServiceLevel(), requests=9, workers=1)
    >>> with TemporaryDirectory() as folder:
    ...     with KeptRuns(Path(folder, "runs.csv")) as kept:
    ...         kept.add(run(experiment, Combination("affinity", 1.0, 0)))
    ...     KeptRuns(Path(folder, "runs.csv")).lacking([Combination("affinity", 1.0, n) for n in (0, 1)])
    [Combination(policy='affinity', load=1.0, seed=1)]
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._runs = {each.combination: each for each in read_runs(path)}

    @property
    def results(self) -> list[Result]:
        """All runs."""
        return list(self._runs.values())

    def lacking(self, wanted: Iterable[Combination]) -> list[Combination]:
        """Return which of some runs are still to be made."""
        return [each for each in wanted if each not in self._runs]

    def __enter__(self) -> Self:
        """Begin to add."""
        write_runs(self._runs.values(), self._path)
        self._target = self._path.open("a", encoding="utf-8", newline="")
        return self

    def add(self, result: Result) -> None:
        """Add a run; it is in the file when this returns."""
        line = _line(result)
        csv.writer(self._target, lineterminator="\n").writerow(line)
        self._target.flush()
        # As it will be read, so that what is made of it does not depend on when that was.
        self._runs[result.combination] = _result(line, "")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: "TracebackType | None",
    ) -> None:
        """Put the file into order."""
        self._target.close()
        write_runs(self._runs.values(), self._path)


def _line(result: Result) -> list[str]:
    policy, load, seed = result.combination
    figures = [f"{getattr(result.measures, name):.6g}" for name in FIGURES]
    return [policy, repr(load), str(seed), *figures]


def _result(line: list[str], where: str) -> Result:
    try:
        policy, load, seed, *figures = line
        values = dict(zip(FIGURES, map(float, figures), strict=True))
        return Result(Combination(policy, float(load), int(seed)), Measures(**values), [])
    except ValueError:
        raise ValueError(f"{where}: this is no run") from None
