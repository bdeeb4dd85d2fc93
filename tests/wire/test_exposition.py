"""Samples are read as the official parser reads them; what cannot be read is left out, and nothing raises."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from pointsman.wire.exposition import Sample, samples, total

NAMES = st.sampled_from(["up", "uptime", "vllm:num_requests_running", "up_total", "down"])
LABELS = st.dictionaries(
    st.sampled_from(["job", "engine", "le", "_x1"]),
    st.text(
        st.one_of(
            st.sampled_from('\\"{}=,# nN/'), st.characters(exclude_characters="\r", codec="utf-8")
        ),
        max_size=8,
    ),
    max_size=3,
)
NUMBERS = st.one_of(
    st.floats().map(repr),
    st.integers(-(10**18), 10**18).map(str),
    st.sampled_from(
        ["+Inf", "-Inf", "NaN", "Nan", "inf", "1e3", "1E-3", "+2.", "-.5", "0x10", "x"]
    ),
)
BLANKS = st.sampled_from(["", " ", "\t", "  "])


@st.composite
def series(draw: st.DrawFn) -> str:
    """Return one line as exporters write it, with any value, blanks between its parts, and perhaps a timestamp."""
    labels = [
        f'{name}="{value}"'
        for name, value in (
            (name, value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n"))
            for name, value in draw(LABELS).items()
        )
    ]
    empty = draw(st.booleans())
    braces = "{" + ",".join(labels) + "}" if labels or empty else ""
    gap = draw(BLANKS) if braces else " "
    stamp = draw(st.sampled_from(["", " 1700000000000", " -5"]))
    return f"{draw(NAMES)}{draw(BLANKS) if braces else ''}{braces}{gap}{draw(NUMBERS)}{stamp}"


OTHERS = st.sampled_from(["", "# HELP up whether up 1 {", "# TYPE up gauge", "#", "# up 3"])
TEXTS = st.lists(st.one_of(series(), OTHERS), max_size=8).map("\n".join)


def official(text: str) -> list[tuple[str, dict[str, str], float]]:
    """Read one line after the other: the official parser gives up at the first that it cannot read."""
    read = []
    for line in text.split("\n"):
        try:
            families = list(text_string_to_metric_families(line + "\n"))
        except ValueError:
            continue
        read += [(s.name, s.labels, float(s.value)) for family in families for s in family.samples]
    return read


def same(left: float, right: float) -> bool:
    return left == right or (math.isnan(left) and math.isnan(right))


@settings(deadline=None)
@given(TEXTS, st.sets(NAMES))
def test_samples_are_those_of_the_official_parser(text: str, names: set[str]) -> None:
    expected: dict[str, list[Sample]] = {}
    for name, labels, value in official(text):
        if name in names:
            expected.setdefault(name, []).append(Sample(labels, value))
    found = samples(text.encode() + b"\n", names)
    assert found.keys() == expected.keys()
    for name, listed in found.items():
        assert [sample.labels for sample in listed] == [s.labels for s in expected[name]]
        assert all(same(s.value, t.value) for s, t in zip(listed, expected[name], strict=True))


@settings(deadline=None)
@given(TEXTS, st.data())
def test_a_text_that_was_cut_off_gives_the_samples_of_its_whole_lines(
    text: str, data: st.DataObject
) -> None:
    whole = (text + "\n").encode()
    cut = whole[: data.draw(st.integers(0, len(whole)))]
    names = ("up", "uptime", "vllm:num_requests_running", "up_total", "down")
    lines = cut[: cut.rfind(b"\n") + 1]
    assert repr(samples(cut, names)) == repr(samples(lines, names))


@settings(deadline=None)
@given(st.binary(max_size=60), st.binary(max_size=20))
def test_no_bytes_make_it_raise(text: bytes, tail: bytes) -> None:
    samples(text + b"\nup{" + tail + b"} 1\n" + text, ["up"])


@pytest.mark.parametrize(
    ("line", "sample"),
    [
        (rb'up{a="x\"y\\z\nw\t"} 1', Sample({"a": 'x"y\\z\nw\\t'}, 1.0)),
        (b'up{a="}",b=" # {"} 2.5e-3', Sample({"a": "}", "b": " # {"}, 0.0025)),
        (b'up 3 # {trace_id="a"} 1.0', Sample({}, 3.0)),
        (b"  up\t4\t1700000000000", Sample({}, 4.0)),
        (b"up 5\r", Sample({}, 5.0)),
        (b'up{a="\xff"} 6', Sample({"a": "�"}, 6.0)),
    ],
)
def test_a_line_is_read(line: bytes, sample: Sample) -> None:
    assert samples(b"# up 0\n%b\nupper 9\n" % line, ["up"]) == {"up": [sample]}


@pytest.mark.parametrize(
    "line", [b"up", b"up ", b"up x", b"up{ 1", b'up{a="1} 1', b"up 0x1", b"up 1_000", b"xup 1"]
)
def test_a_line_that_cannot_be_read_is_left_out(line: bytes) -> None:
    assert samples(b"%b\nup{} 7\n" % line, ["up"])["up"] == [Sample({}, 7.0)]


def test_nothing_asked_for_is_nothing_found() -> None:
    assert samples(b"up 1\n", []) == {}


def test_only_counts_are_added_up() -> None:
    counts = [Sample({}, value) for value in (1.0, math.nan, math.inf, -1.0, 2.0)]
    assert total(counts) == 3
    assert total([]) is None


def test_the_first_10000_samples_are_taken() -> None:
    text = b"".join(b'up{n="%d"} 1\n' % number for number in range(10_001))
    found = samples(text, ["up"])["up"]
    assert len(found) == 10_000
    assert found[-1].labels == {"n": "9999"}


def test_a_sum_stays_a_number() -> None:
    assert total([Sample({}, 1e308), Sample({}, 1e308)]) == 2**53
