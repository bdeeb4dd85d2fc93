"""What the metrics, the decisions and the spans tell of hand-offs and cascades."""

import weakref
from typing import Any

import pytest

from pointsman.domain.policy.least_outstanding import LeastOutstanding
from pointsman.domain.request import InferenceRequest
from pointsman.domain.router import Target
from pointsman.domain.worker import Role, Worker
from pointsman.flow.exchange import Attempt, Exchange, Transfer, Verdict
from pointsman.observe.decisions import Decisions
from pointsman.observe.metrics import Metrics

P = Worker("p", model="m", http_address="p:80", role=Role.PREFILL, grpc_address="p:51")
D = Worker("d", model="m", http_address="d:80", role=Role.DECODE, kv_address="d:52")
CHAT = "/v1/chat/completions"


def over(*tries: Attempt, error: str = "", first_byte_at: float = 5.0) -> Exchange:
    """A request that came at 1.0 and was over at 6.0."""
    x = Exchange(InferenceRequest("m", "r1"), path=CHAT, operation="chat", started=1.0)
    x.tries = list(tries)
    x.first_byte_at, x.finished_at, x.status, x.error = first_byte_at, 6.0, 200, error
    return x


def handed(transfer: Transfer, **more: Any) -> Attempt:
    return Attempt(Target(D, "m", "load", prefill=P), 1.0, transfer=transfer, **more)


def exposed(metrics: Metrics) -> dict[str, float]:
    """Every sample as `name{labels}`."""
    lines = metrics.render().decode().splitlines()
    found = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in found}


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(lambda: (P, D), [CHAT])


def test_a_hand_off_is_counted_with_its_parts(metrics: Metrics) -> None:
    transfer = Transfer(40, 32, 40, 1.0, 1.5, 3.5, "handed_over")
    metrics.finished(over(handed(transfer)))
    found = exposed(metrics)
    assert found['tl_gateway_handoffs_total{outcome="handed_over"}'] == 1
    for kind, count in (("prompt", 40), ("cached", 32), ("resumed", 40)):
        assert found[f'tl_gateway_handoff_tokens_total{{kind="{kind}"}}'] == count
    for phase, seconds in (("tokenize", 0.5), ("prefill", 2.0), ("resume", 1.5)):
        name = f'tl_gateway_handoff_phase_seconds_%s{{phase="{phase}"}}'
        assert (found[name % "sum"], found[name % "count"]) == (seconds, 1)
    assert found['tl_gateway_handoff_phase_seconds_bucket{le="0.5",phase="tokenize"}'] == 1
    assert found['tl_gateway_handoff_phase_seconds_bucket{le="0.25",phase="tokenize"}'] == 0


def test_p19_a_prompt_computed_twice_has_a_series_of_its_own(metrics: Metrics) -> None:
    metrics.finished(over(handed(Transfer(40, 0, 0, 1.0, 1.5, 3.5, "recomputed"))))
    assert exposed(metrics)['tl_gateway_handoffs_total{outcome="recomputed"}'] == 1


def test_a_failure_is_laid_to_the_worker_that_is_to_blame(metrics: Metrics) -> None:
    failed = handed(Transfer(outcome="failed"), failure="prefill", failed=P, over_at=2.0)
    metrics.finished(over(failed, handed(Transfer(3, 0, -1, 2.0, 2.5, 3.0, "handed_over"))))
    found = exposed(metrics)
    assert found['tl_gateway_worker_requests_total{outcome="prefill",worker_id="p"}'] == 1
    assert found['tl_gateway_worker_requests_total{outcome="answered",worker_id="d"}'] == 1
    assert found['tl_gateway_failovers_total{why="prefill"}'] == 1
    assert found['tl_gateway_handoff_tokens_total{kind="resumed"}'] == 0


def test_a_gateway_without_hand_offs_says_nothing_of_their_parts(metrics: Metrics) -> None:
    assert not [name for name in exposed(metrics) if "handoff_phase" in name]


def test_the_steps_of_cascades_are_counted(metrics: Metrics) -> None:
    counts = metrics.calibrations.of("chat", 0)
    counts.kept, counts.rejected, counts.unscored, counts.failed = 4, 3, 2, 1
    counts.prompt_tokens, counts.completion_tokens, counts.seconds = 50, 60, 1.5
    found = exposed(metrics)
    for verdict, count in (("kept", 4), ("rejected", 3), ("unscored", 2), ("failed", 1)):
        labels = f'{{model="chat",step="0",verdict="{verdict}"}}'
        assert found[f"tl_gateway_cascade_answers_total{labels}"] == count
    name = 'tl_gateway_cascade_rejected_tokens_total{model="chat",step="0",type="%s"}'
    assert (found[name % "input"], found[name % "output"]) == (50, 60)
    assert found['tl_gateway_cascade_rejected_seconds_total{model="chat",step="0"}'] == 1.5


def test_an_answer_that_was_not_kept_is_no_failure_of_its_worker(metrics: Metrics) -> None:
    rejected = Attempt(Target(D, "m", "cascade", 0), 1.0, verdict=Verdict(-2.0, kept=False))
    metrics.finished(over(rejected, Attempt(Target(P, "l", "cascade", 1), 3.0)))
    found = exposed(metrics)
    assert found['tl_gateway_attempts_total{outcome="rejected"}'] == 1
    assert found['tl_gateway_attempts_total{outcome="answered"}'] == 1
    assert not [name for name in found if name.startswith("tl_gateway_failovers_total{")]


def test_a_decision_tells_of_the_hand_off_and_of_the_verdict() -> None:
    decisions = Decisions(8, wall=lambda: 0.0, now=lambda: 0.0)
    decisions.uses(LeastOutstanding())
    failed = handed(Transfer(3, 1, -1, 1.0, 1.5, 0.0, "failed"), failure="prefill", failed=P)
    judged = Attempt(
        Target(D, "m", "cascade", 0), 3.0, verdict=Verdict(-2.0, kept=False, prompt_tokens=7)
    )
    decisions.finished(over(failed, judged, Attempt(Target(P, "l", "cascade", 1), 4.0)))
    first, second, third = decisions.find()[0].attempts
    assert (first.outcome, first.failed_worker_id) == ("prefill", "p")
    assert first.handoff is not None
    assert (first.handoff.prefill_worker_id, first.handoff.outcome) == ("p", "failed")
    assert (first.handoff.tokens, first.handoff.cached, first.handoff.resumed) == (3, 1, None)
    assert (first.handoff.tokenize_s, first.handoff.prefill_s) == (0.5, None)
    assert (second.outcome, second.cascade_step) == ("rejected", 0)
    assert second.verdict is not None
    assert (second.verdict.value, second.verdict.kept, second.verdict.prompt_tokens) == (
        -2,
        False,
        7,
    )
    assert (third.outcome, third.verdict, third.handoff) == ("answered", None, None)


def reading(worker: Worker, tokens: int, at: float) -> Worker:
    """The worker, as polling leaves it."""
    worker.remote_tokens, worker.last_heartbeat = tokens, at
    return worker


def test_p19_hand_offs_that_nobody_confirms_are_held_against_the_worker_s_own_counter() -> None:
    decode = Worker("d2", model="m", http_address="d2:80", role=Role.DECODE, connector="nixl")
    live = [P, decode]
    metrics = Metrics(lambda: live, [CHAT])
    metrics.proofs.read(reading(decode, 128, 1.0))
    for resumed, outcome in ((-1, "handed_over"), (40, "handed_over"), (-1, "direct")):
        transfer = Transfer(40, 0, resumed, 0.0, 1.5, 2.0, outcome)
        metrics.finished(
            over(Attempt(Target(decode, "m", "load", prefill=P), 1.5, transfer=transfer))
        )
    found = exposed(metrics)
    label = '{worker_id="d2"}'
    assert found[f"tl_gateway_handoffs_unconfirmed_total{label}"] == 1
    assert found[f"tl_gateway_handoff_unconfirmed_tokens_total{label}"] == 40
    assert found[f"tl_gateway_worker_remote_tokens_total{label}"] == 128
    assert found[f"tl_gateway_handoffs_recomputed_total{label}"] == 0
    for at in (7.0, 9.0, 11.0):
        metrics.proofs.read(reading(decode, 128, at))
    assert exposed(metrics)[f"tl_gateway_handoffs_recomputed_total{label}"] == 1
    assert metrics.proofs.recomputed(decode) == 1
    assert metrics.proofs.recomputed(P) == 0
    live.remove(decode)
    assert not any(label in name for name in exposed(metrics))


def test_p19_a_worker_that_counts_nothing_has_its_hand_offs_counted_and_no_verdict() -> None:
    decode = Worker("d2", model="m", http_address="d2:80", role=Role.DECODE, connector="nixl")
    metrics = Metrics(lambda: [decode], [CHAT])
    transfer = Transfer(40, 0, -1, 0.0, 1.5, 2.0, "handed_over")
    metrics.finished(over(Attempt(Target(decode, "m", "load", prefill=P), 1.5, transfer=transfer)))
    for at in (7.0, 9.0, 11.0, 13.0):
        metrics.proofs.read(reading(decode, -1, at))
    found = exposed(metrics)
    assert found['tl_gateway_handoffs_unconfirmed_total{worker_id="d2"}'] == 1
    assert found['tl_gateway_handoffs_recomputed_total{worker_id="d2"}'] == 0
    assert not any(name.startswith("tl_gateway_worker_remote_tokens_total{") for name in found)


def test_workers_that_left_take_no_memory_between_two_scrapes() -> None:
    class Watched(Worker):
        __slots__ = ("__weakref__",)

    metrics = Metrics(lambda: (), [CHAT])
    kept = []
    for number in range(3000):
        worker = Watched(f"w{number}", model="m", http_address="h:1")
        metrics.proofs.handed_over(worker, 1, 1.0)
        kept.append(weakref.ref(worker))
    del worker
    assert sum(each() is not None for each in kept) <= 1024
