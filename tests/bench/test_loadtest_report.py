"""A report of a load is whole, or it is said what it lacks. The figures are those of a real run, cut short."""

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("gguf", reason="needs the extra `dev`")
sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
try:
    from loadtest import MEASURED, Run, objections, prompts, table
finally:
    sys.path.pop(0)

WHOLE: dict[str, Any] = {
    "aiperf_version": "0.13.0",
    "request_count": {"unit": "requests", "avg": 40.0},
    "request_latency": {"unit": "ms", "avg": 2548.9, "p50": 2546.6, "count": 40, "sum": 101956.7},
    "time_to_first_token": {"unit": "ms", "avg": 979.0, "p50": 770.3, "count": 40, "sum": 39158.8},
    "inter_token_latency": {"unit": "ms", "avg": 72.5, "p50": 77.1, "count": 40, "sum": 2899.7},
    "usage_prompt_tokens": {"unit": "tokens", "avg": 57.25, "count": 40, "sum": 2290},
    "usage_completion_tokens": {"unit": "tokens", "avg": 22.275, "count": 40, "sum": 891},
    "error_summary": [],
}
ENGINES = {"a": 418, "b": 473}


def run(engines: dict[str, int] = ENGINES, /, **changed: Any) -> Run:
    """The real run with other figures; None takes one out."""
    figures = {name: each for name, each in (WHOLE | changed).items() if each is not None}
    raw = msgspec.json.decode(msgspec.json.encode(figures), type=dict[str, msgspec.Raw])
    return Run(requests=40, report=raw, computed=engines)


def test_a_whole_report_has_no_objections() -> None:
    assert objections(run()) == []


@pytest.mark.parametrize("name", MEASURED)
def test_a_figure_that_is_missing_is_named(name: str) -> None:
    assert objections(run(**{name: None})) == [f"{name} is missing"]


@pytest.mark.parametrize("name", MEASURED)
def test_a_figure_that_some_requests_lack_is_named(name: str) -> None:
    (said,) = objections(run(**{name: WHOLE[name] | {"count": 39}}))
    assert said.startswith(f"{name}: 39 requests have one")


@pytest.mark.parametrize("name", MEASURED)
def test_a_figure_that_is_nothing_is_named(name: str) -> None:
    (said,) = objections(run(**{name: WHOLE[name] | {"avg": 0.0}}))
    assert said.endswith("0 on average")


def test_fewer_requests_than_were_asked_for_are_told() -> None:
    fewer = {"unit": "requests", "avg": 39.0}
    assert objections(run(request_count=fewer)) == ["40 requests were asked for, 39 were answered"]
    assert objections(run(request_count=None)) == ["40 requests were asked for, 0 were answered"]


def test_an_error_is_told_in_the_words_of_the_tool() -> None:
    (said,) = objections(run(error_summary=[{"error_details": {"code": 503}, "count": 1}]))
    assert said.startswith("errors: ") and "503" in said


def test_a_report_that_does_not_speak_of_errors_is_not_whole() -> None:
    assert objections(run(error_summary=None)) == ["errors: nothing said"]


def test_tokens_that_no_engine_computed_are_told() -> None:
    (said,) = objections(run({"a": 418, "b": 472}))
    assert said == "the clients were told of 891 tokens, the engines computed 890"


def test_an_engine_without_any_work_is_told() -> None:
    assert objections(run({"a": 891, "b": 0})) == ["b computed nothing"]


def test_the_table_has_a_row_of_each_figure() -> None:
    lines = table(run()).splitlines()
    assert lines[3] == "| time_to_first_token (ms) | 979.0 | 770.3 | 0.0 | 0.0 |"
    assert len(lines) == 2 + len(MEASURED)


def test_each_prompt_is_another_and_half_of_them_begin_alike() -> None:
    texts = [msgspec.json.decode(line)["text"] for line in prompts(40).splitlines()]
    assert len(set(texts)) == 40
    assert sum(text.startswith("You are the guide") for text in texts) == 20
