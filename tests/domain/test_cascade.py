"""Accept rules decide as written, and the curve is the published one to the last bit."""

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from random import Random
from typing import TypeAlias

import pytest

from pointsman.domain.acceptor import Acceptor
from pointsman.domain.cascade import (
    CascadeSample,
    CurvePoint,
    cascade_curve,
    check_accept_if,
    logprobs_of,
    parse_accept_if,
    tokens_of,
)
from pointsman.domain.scores import Tokens
from pointsman.errors import BadRule

SMALL_COST = 0.1
TAUS = [-3.0 + 0.25 * step for step in range(13)]
SHA256 = "e3b1cc9d69641ce90fc20e34726f56f6e80be13011414829ff3b73857a5a0c29"
GENERATOR = "course/oracle/gw.05/cascade_sweep.py"

CURVE = [
    (-3.0, 0.0, 0.10000000000000007, 0.54),
    (-2.75, 0.0, 0.10000000000000007, 0.54),
    (-2.5, 0.025, 0.12500000000000042, 0.56),
    (-2.25, 0.115, 0.21500000000000064, 0.61),
    (-2.0, 0.19, 0.2900000000000009, 0.66),
    (-1.75, 0.295, 0.3949999999999999, 0.715),
    (-1.5, 0.44, 0.5399999999999985, 0.77),
    (-1.25, 0.525, 0.6249999999999978, 0.81),
    (-1.0, 0.64, 0.7399999999999973, 0.865),
    (-0.75, 0.74, 0.8399999999999969, 0.92),
    (-0.5, 0.82, 0.9199999999999967, 0.935),
    (-0.25, 0.925, 1.0249999999999964, 0.935),
    (0.0, 1.0, 1.0999999999999963, 0.935),
]


def samples() -> list[CascadeSample]:
    """Draw the 200 prompts of the fixture: the contract describes how, down to the seed."""
    random = Random(20261009)
    drawn = []
    for _ in range(200):
        difficulty = random.random()
        level = -(0.05 + 2.5 * difficulty)
        logprobs = [round(level * random.uniform(0.5, 1.5), 6) for _ in range(8)]
        small = random.random() < 0.95 - 0.8 * difficulty
        large = random.random() < 0.92
        drawn.append(CascadeSample(logprobs, small, large))
    return drawn


def fixture(drawn: list[CascadeSample], curve: list[CurvePoint]) -> bytes:
    """Write the fixture file as its publisher did."""
    content = {
        "generator": GENERATOR,
        "small_cost": SMALL_COST,
        "taus": TAUS,
        "samples": [
            {
                "small_logprobs": s.small_logprobs,
                "small_correct": s.small_correct,
                "large_correct": s.large_correct,
            }
            for s in drawn
        ],
        "curve": [
            {"tau": p.tau, "escalated": p.escalated, "cost": p.cost, "accuracy": p.accuracy}
            for p in curve
        ],
    }
    return json.dumps(content, separators=(",", ":")).encode() + b"\n"


def test_cascade_curve_matches_fixture() -> None:
    drawn = samples()
    curve = cascade_curve(drawn, TAUS, SMALL_COST)
    assert [(p.tau, p.escalated, p.cost, p.accuracy) for p in curve] == CURVE
    # The whole published file follows from the samples and this curve, to the byte.
    assert hashlib.sha256(fixture(drawn, curve)).hexdigest() == SHA256


def test_the_curve_agrees_with_the_five_points_of_the_specification() -> None:
    points = {p.tau: p for p in cascade_curve(samples(), TAUS, SMALL_COST)}
    table = {
        -3.0: (0.000, 0.100, 0.540),
        -2.0: (0.190, 0.290, 0.660),
        -1.0: (0.640, 0.740, 0.865),
        -0.5: (0.820, 0.920, 0.935),
        0.0: (1.000, 1.100, 0.935),
    }
    for tau, expected in table.items():
        point = points[tau]
        assert (point.escalated, point.cost, point.accuracy) == pytest.approx(expected)


def test_an_empty_answer_escalates_and_an_empty_set_has_no_curve() -> None:
    empty = CascadeSample([], small_correct=True, large_correct=False)
    assert cascade_curve([empty], [-100.0], 0.25) == [CurvePoint(-100.0, 1.0, 1.25, 0.0)]
    with pytest.raises(ValueError, match="no samples"):
        cascade_curve([], TAUS, SMALL_COST)


def test_parse_accept_if() -> None:
    mean = parse_accept_if("mean_logprob > -1.2")
    assert mean([-1.0, -1.3])
    assert not mean([-1.2])
    assert not mean([-2.0, -1.0])
    least = parse_accept_if("min_logprob >= -2")
    assert least([-2.0, -0.1])
    assert not least([-2.1, -0.1])
    # An answer without tokens is never accepted, whatever the rule.
    for rule in ("mean_logprob > -100", "min_logprob < 100", "mean_logprob <= 0"):
        assert not parse_accept_if(rule)([])


@pytest.mark.parametrize(
    ("operator", "below", "equal", "above"),
    [
        (">", False, False, True),
        (">=", False, True, True),
        ("<", True, False, False),
        ("<=", True, True, False),
    ],
)
@pytest.mark.parametrize("metric", ["mean_logprob", "min_logprob"])
def test_each_operator_at_its_boundary(
    metric: str, operator: str, below: bool, equal: bool, above: bool
) -> None:
    accept = parse_accept_if(f"{metric} {operator} -1.5")
    assert [accept([-1.75]), accept([-1.5]), accept([-1.25])] == [below, equal, above]


@pytest.mark.parametrize(
    ("number", "value"),
    [
        ("-1.2", -1.2),
        ("0", 0.0),
        ("+3", 3.0),
        (".5", 0.5),
        ("-.5", -0.5),
        ("2.", 2.0),
        ("007", 7.0),
    ],
)
def test_plain_decimals_are_taken(number: str, value: float) -> None:
    assert parse_accept_if(f"mean_logprob > {number}").threshold == value


@pytest.mark.parametrize(
    "rule",
    [
        "",
        "mean_logprob",
        "mean_logprob >",
        "mean_logprob > -1 -2",
        "mean_logprob>-1",
        "max_logprob > -1",
        "MEAN_LOGPROB > -1",
        "mean_logprob == -1",
        "mean_logprob => -1",
        "mean_logprob > x",
        "mean_logprob > .",
        "mean_logprob > -",
        "mean_logprob > 1e-3",
        "mean_logprob > inf",
        "mean_logprob > nan",
        "mean_logprob > 0x1p-2",
        "mean_logprob > 1_000",
        "mean_logprob > 1,5",
        "mean_logprob > ١",
        "mean_logprob > " + "9" * 400,
    ],
)
def test_other_rules_are_refused_with_the_parameter_named(rule: str) -> None:
    with pytest.raises(BadRule) as caught:
        parse_accept_if(rule)
    assert caught.value.param == "accept_if"
    assert caught.value.status == 400
    assert len(caught.value.message) < 200


def test_fields_may_be_spaced_freely() -> None:
    accept = parse_accept_if("\t min_logprob   <=\n-0.5 ")
    assert (accept.metric, accept.operator, accept.threshold) == ("min_logprob", "<=", -0.5)


def test_means_are_plain_left_to_right_sums() -> None:
    # 0.1 ten times is 0.9999999999999999 by plain addition and 1.0 by the compensated sum() of CPython 3.12.
    assert not parse_accept_if("mean_logprob >= 0.1")([0.1] * 10)


@pytest.mark.parametrize("rule", ["mean_logprob > -100", "min_logprob < 100", "min_logprob > -100"])
def test_an_unknown_logprob_makes_an_answer_unacceptable(rule: str) -> None:
    for values in ([math.nan], [-1.0, math.nan], [math.nan, -1.0]):
        assert not parse_accept_if(rule)(values)


def body(logprobs: object) -> bytes:
    return json.dumps({"choices": [{"logprobs": logprobs}, {"logprobs": None}]}).encode()


def test_logprobs_are_read_from_both_formats() -> None:
    chat = {"content": [{"token": "a", "logprob": -0.25}, {"token": "b", "logprob": -1}]}
    assert logprobs_of(body(chat)) == [-0.25, -1.0]
    assert logprobs_of(body({"token_logprobs": [-0.5, -2], "tokens": ["a", "b"]})) == [-0.5, -2.0]
    assert logprobs_of(body({"content": None, "token_logprobs": [-3.5]})) == [-3.5]
    assert logprobs_of(body({"content": []})) == []
    assert logprobs_of(body({"content": [{"logprob": -1.5}], "token_logprobs": [-9.0]})) == [-1.5]


def test_a_null_logprob_is_unknown_and_not_certainty() -> None:
    for logprobs in ({"token_logprobs": [None, -0.5]}, {"content": [{"logprob": None}]}):
        values = logprobs_of(body(logprobs))
        assert math.isnan(values[0])
        assert not parse_accept_if("mean_logprob > -100")(values)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff",
        b"[" * 100_000,
        b"{}",
        b'{"choices": []}',
        b'{"choices": {}}',
        b'{"choices": [{}]}',
        b'{"choices": [7]}',
        body(None),
        body([]),
        body({}),
        body({"token_logprobs": None}),
        body({"token_logprobs": 7}),
        body({"token_logprobs": ["x"]}),
        body({"token_logprobs": [True]}),
        body({"content": 7}),
        body({"content": [7]}),
        body({"content": [{}]}),
        body({"content": [{"logprob": "-1"}]}),
    ],
)
def test_an_answer_without_readable_logprobs_is_a_value_error(answer: bytes) -> None:
    with pytest.raises(ValueError, match="no readable logprobs"):
        logprobs_of(answer)


ACCEPTOR = Acceptor(("mean_logprob",), (-1.0,), (1.0,), (4.0,), bias=0.0)
NAN = math.nan


@pytest.mark.parametrize(
    ("rule", "kept", "dropped"),
    [
        ("mean_logprob > -1", [-0.5, -1.25], [-0.5, -1.75]),
        ("min_logprob >= -2", [-2.0, 0.0], [-2.5, 0.0]),
        ("perplexity < 3", [-1.0], [-1.5]),
        ("p10_logprob > -2", [-9.0] + [-1.0] * 10, [-9.0] + [-1.0] * 9),
        ("score > 0.8", [-0.5], [-1.0]),
    ],
)
def test_a_rule_may_name_any_score(rule: str, kept: list[float], dropped: list[float]) -> None:
    accept = parse_accept_if(rule, ACCEPTOR)
    assert not accept.needs_margins
    assert accept(kept)
    assert not accept(dropped)


def test_a_rule_over_margins_needs_them() -> None:
    accept = parse_accept_if("mean_margin >= 1")
    assert accept.needs_margins
    assert accept.value(Tokens([-1.0, -1.0], [0.5, 2.0])) == 1.25
    assert accept.holds(1.25)
    assert not accept.holds(0.75)
    for unknown in (Tokens([-1.0]), Tokens([-1.0], [NAN]), Tokens([NAN], [1.0]), Tokens([], [])):
        assert accept.value(unknown) is None
    assert not accept.holds(None)
    assert not accept([-1.0])


def test_the_value_is_what_a_decision_reports() -> None:
    assert parse_accept_if("mean_logprob > -1").value(Tokens([-2.0, -1.0])) == -1.5
    assert parse_accept_if("score > 0.8", ACCEPTOR).value(Tokens([-1.0])) == 0.5
    # The mean of two infinities that cancel is no number.
    assert parse_accept_if("mean_logprob > -1").value(Tokens([math.inf, -math.inf])) is None


def test_an_acceptor_over_margins_needs_them() -> None:
    acceptor = Acceptor(("mean_margin",), (1.0,), (1.0,), (1.0,), bias=0.0)
    accept = parse_accept_if("score >= 0.5", acceptor)
    assert accept.needs_margins
    assert accept.value(Tokens([-1.0], [1.0])) == 0.5
    assert accept.value(Tokens([-1.0])) is None


def test_a_metric_of_its_own_asks_no_acceptor() -> None:
    assert parse_accept_if("min_logprob > -1", ACCEPTOR).acceptor is None


def test_score_without_an_acceptor_is_refused() -> None:
    with pytest.raises(BadRule, match="`score` needs an acceptor"):
        parse_accept_if("score > 0.8")
    with pytest.raises(BadRule, match="`score` needs an acceptor"):
        check_accept_if("score > 0.8", acceptor_named=False)
    check_accept_if("score > 0.8", acceptor_named=True)
    for named in (False, True):
        check_accept_if("mean_margin > 0.8", acceptor_named=named)
        with pytest.raises(BadRule, match="'scores' is not one of mean_logprob"):
            check_accept_if("scores > 0.8", acceptor_named=named)


Position: TypeAlias = tuple[float | None, Sequence[float | None] | None]


def chat(*tokens: Position) -> bytes:
    """Return a chat's answer whose tokens have these logprobs and best entries."""
    return body(
        {
            "content": [
                {
                    "token": "a",
                    "bytes": [97],
                    "logprob": logprob,
                    "top_logprobs": None if top is None else [{"logprob": value} for value in top],
                }
                for logprob, top in tokens
            ]
        }
    )


def plain(*tokens: Position) -> bytes:
    """Return a plain completion's answer whose tokens have these logprobs and best entries."""
    return body(
        {
            "token_logprobs": [logprob for logprob, _ in tokens],
            "top_logprobs": [
                None if top is None else {f"t{at}": value for at, value in enumerate(top)}
                for _, top in tokens
            ],
        }
    )


@pytest.mark.parametrize("form", [chat, plain])
@pytest.mark.parametrize(
    ("chosen", "top", "margin"),
    [
        (-0.5, [-0.5, -2.0], 1.5),
        (-2.0, [-2.0, -0.5], 1.5),
        (-0.5, [-0.5, -2.0, -1.0, -3.0], 0.5),
        # The chosen one is not among the best, and still counts.
        (-4.0, [-0.5, -2.0], 1.5),
        (-4.0, [-0.5], 3.5),
        # Two as good as each other.
        (-0.75, [-0.75, -0.75], 0.0),
        # Only one is known.
        (-0.5, [-0.5], NAN),
        (-0.5, [], NAN),
        (-0.5, None, NAN),
        (-0.5, [-0.5, None], NAN),
        (None, [-0.5, -2.0], NAN),
    ],
)
def test_a_margin_is_the_best_less_the_second_best(
    form: Callable[..., bytes],
    chosen: float | None,
    top: list[float | None] | None,
    margin: float,
) -> None:
    tokens = tokens_of(form((-0.25, [-0.25, -1.25]), (chosen, top)))
    assert tokens.margins == pytest.approx([1.0, margin], nan_ok=True)
    assert tokens.logprobs == pytest.approx([-0.25, NAN if chosen is None else chosen], nan_ok=True)


@pytest.mark.parametrize("top", [None, [], [{"a": -0.5, "b": -1.0}]])
def test_entries_that_belong_to_no_token_are_no_margins(top: object) -> None:
    tokens = tokens_of(body({"token_logprobs": [-0.5, -1.0], "top_logprobs": top}))
    assert tokens == Tokens([-0.5, -1.0], [])


def test_a_tool_call_without_logprobs_is_a_value_error() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    choice = {"message": message, "logprobs": None, "finish_reason": "tool_calls"}
    with pytest.raises(ValueError, match="no readable logprobs"):
        tokens_of(json.dumps({"choices": [choice]}).encode())


def test_what_some_engines_write_and_json_does_not_know_is_read() -> None:
    half = (
        rb'{"choices":[{"logprobs":{"token_logprobs":[-1],"top_logprobs":[{"\ud83d":-1,"b":-2}]}}]}'
    )
    assert tokens_of(half) == Tokens([-1.0], [1.0])
    assert logprobs_of(b'{"choices":[{"logprobs":{"token_logprobs":[-Infinity]}}]}') == [-math.inf]


def test_a_long_answer_is_read_whole() -> None:
    tokens = tokens_of(chat(*[(-0.5, [-0.5, -1.5])] * 2000))
    assert tokens == Tokens([-0.5] * 2000, [1.0] * 2000)
