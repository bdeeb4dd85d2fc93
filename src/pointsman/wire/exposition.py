r"""Reading samples out of the text format of Prometheus: those that were asked for, and nothing else.

An engine tells of hundreds of series, most of them buckets of histograms, and a gateway wants ten of them, several
times a second. So lines are found by name, and only theirs are taken apart. What cannot be read is left out: a line
that was cut off, a value that is no number. Types, help texts, timestamps and exemplars are skipped.

Source: the exposition format, version 0.0.4, and OpenMetrics as far as it looks the same.
"""

import math
import re
from collections.abc import Iterable
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

__all__ = ["Sample", "samples", "total"]


SAMPLES_MAX = 10_000
"""Samples that are taken of one text: a rank or a set of adapters has one of each, and no engine has so many."""

MOST = 2.0**53
"""The highest sum of counts; a float knows no more whole numbers without gaps."""


class Sample(NamedTuple):
    """One series at one moment."""

    labels: dict[str, str]
    value: float


LABELS = rb'\{(?:[^"}]++|"(?:[^"\\\n]++|\\.)*+")*+\}'
LABEL = re.compile(rb'([^\s"={},]++)[ \t]*+=[ \t]*+"((?:[^"\\]++|\\.)*+)"')
ESCAPE = re.compile(r"\\(.)", re.DOTALL)
NUMBER = re.compile(rb"[+-]?+(?:[0-9]++\.?+[0-9]*+|\.[0-9]++)(?:[eE][+-]?+[0-9]++)?+\Z")
WORDS = {b"nan": "nan", b"inf": "inf", b"+inf": "inf", b"-inf": "-inf"}


@lru_cache(maxsize=64)
def _lines(names: frozenset[str]) -> re.Pattern[bytes]:
    """Return a pattern of the lines of some metrics: name, labels, value. A line ends with a line feed, or is cut."""
    either = b"|".join(re.escape(name.encode()) for name in sorted(names))
    return re.compile(
        rb"^[ \t]*+("
        + either
        + rb")(?=[ \t{])[ \t]*+("
        + LABELS
        + rb")?+[ \t]*+([^\s{}#]++)[^\n]*+\n",
        re.MULTILINE,
    )


def samples(text: bytes, names: Iterable[str]) -> dict[str, list[Sample]]:
    r"""Return the samples of some metrics by name, in the order of the text. Names that have none are missing.

    `names` are whole names, as they stand in the lines: a counter's ends in `_total`. O(size of the text). Of more than
    10,000 samples the first ones are taken.

    >>> text = b'# TYPE up gauge\nup{job="a\\"b"} 1 1700000000000\nup NaN\nupper 3\nup{job="cut o'
    >>> samples(text, ["up", "down"])
    {'up': [Sample(labels={'job': 'a"b'}, value=1.0), Sample(labels={}, value=nan)]}
    """
    wanted = frozenset(names)
    found: dict[str, list[Sample]] = {}
    if not wanted:
        return found
    for line in islice(_lines(wanted).finditer(text), SAMPLES_MAX):
        name, labels, number = line.groups(b"")
        value = _number(number)
        if value is not None:
            found.setdefault(name.decode(), []).append(Sample(_labels(labels), value))
    return found


def total(found: Iterable[Sample]) -> int | None:
    """Return the sum of counts over all series of a metric, at most 2**53, None where no series has one.

    >>> total([Sample({"engine": "0"}, 2.0), Sample({"engine": "1"}, 1.0)]), total([Sample({}, float("nan"))])
    (3, None)
    """
    counts = [sample.value for sample in found if 0 <= sample.value < math.inf]
    return int(min(sum(counts), MOST)) if counts else None


def _number(text: bytes) -> float | None:
    word = WORDS.get(text.lower())
    if word is not None:
        return float(word)
    return float(text) if NUMBER.match(text) else None


def _labels(text: bytes) -> dict[str, str]:
    return {
        name.decode("utf-8", "replace"): _unescaped(value.decode("utf-8", "replace"))
        for name, value in LABEL.findall(text)
    }


def _unescaped(value: str) -> str:
    if "\\" not in value:
        return value
    return ESCAPE.sub(lambda found: "\n" if found[1] == "n" else _kept(found[1]), value)


def _kept(char: str) -> str:
    return char if char in '"\\' else "\\" + char
