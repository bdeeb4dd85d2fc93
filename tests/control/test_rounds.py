"""What rounds of probes say about one engine: the answers are given here, no engine and no clock is needed."""

import pytest

from pointsman.agent import status_of
from pointsman.control.rounds import Rounds
from pointsman.dialect.engines import Probed
from pointsman.domain.observation import Observation
from pointsman.domain.worker import ServedModel, Worker

MODEL_LIST = Probed(200, b'{"data":[{"id":"m","owned_by":"vllm","max_model_len":2048}]}')
ADAPTERS = Probed(
    200,
    b'{"data":[{"id":"fr","owned_by":"vllm","parent":"m"},{"id":"m","owned_by":"vllm"},{"id":"alias"}]}',
)
HEALTHY = Probed(200)
REFUSED = Probed(0, b"", "connection refused")


def metrics(*, running: int = 3, waiting: int = 5, cached: int = 7) -> Probed:
    lines = (
        f"vllm:num_requests_running {running}.0",
        f"vllm:num_requests_waiting {waiting}.0",
        f"vllm:prefix_cache_hits_total {cached}.0",
        "vllm:kv_cache_usage_perc 0.25",
        'vllm:cache_config_info{num_gpu_blocks="1000",block_size="16"} 1.0',
    )
    return Probed(200, "\n".join((*lines, "")).encode())


class Engine:
    """The answers of an engine, and the rounds over it."""

    def __init__(self, model: str = "", dialect: str = "", *, misses: int = 3) -> None:
        self.worker = Worker(
            "a", model=model, http_address="h:1", dialect=dialect, static=True, polled=True
        )
        self.rounds = Rounds(self.worker, misses=misses, hits=2)
        self.answers = {"/health": HEALTHY, "/v1/models": MODEL_LIST, "/metrics": metrics()}
        self.asked: list[list[str]] = []

    def round(self, **changed: Probed) -> Observation:
        """Have one round; the answers that are given are this round's alone."""
        answers = {**self.answers, **{f"/{path}": answer for path, answer in changed.items()}}
        self.asked.append([])
        self.rounds.begin()
        while paths := self.rounds.due():
            self.asked[-1] += paths
            self.rounds.take({path: answers.get(path, Probed(404)) for path in paths})
        return self.rounds.end()

    def gone(self) -> Observation:
        """Have one round in which nobody answers."""
        kept, self.answers = self.answers, dict.fromkeys(("/health", "/metrics"), REFUSED)
        self.answers["/v1/models"] = self.answers["/load"] = REFUSED
        seen = self.round()
        self.answers = kept
        return seen


def test_the_first_good_round_is_enough_and_all_that_is_said_is_taken() -> None:
    seen = Engine().round()
    assert seen == Observation(
        up=True,
        dialect="vllm",
        model="m",
        served=(ServedModel("m", "", 2048),),
        running=3,
        queue_depth=5,
        kv_total_blocks=1000,
        kv_free_blocks=750,
        kv_tokens=16_000,
        max_model_len=2048,
        kv_usage=0.25,
        cached_tokens=7,
    )


def test_a_dialect_that_is_not_known_is_asked_for_first_and_then_kept() -> None:
    engine = Engine()
    for _ in range(6):
        engine.round()
    assert engine.asked[0] == ["/v1/models", "/health", "/metrics", "/load"]
    assert engine.asked[1:5] == [["/health", "/metrics"]] * 4
    assert engine.asked[5] == ["/health", "/metrics", "/v1/models"]


def test_a_dialect_that_is_configured_is_believed() -> None:
    engine = Engine("m", "openai")
    assert engine.round().dialect == "openai"
    assert engine.asked == [["/v1/models"]]


def test_three_misses_and_two_hits() -> None:
    engine = Engine()
    ups = [engine.round().up, *(engine.gone().up for _ in range(3)), engine.round().up]
    assert ups == [True, True, True, False, False]
    assert engine.round().up


def test_one_miss_changes_nothing_at_all() -> None:
    engine = Engine()
    before = engine.round()
    assert engine.gone() is before


def test_what_is_down_says_why_and_what_it_served_but_has_no_load() -> None:
    engine = Engine()
    engine.round()
    seen = [engine.gone() for _ in range(3)][-1]
    assert (seen.degraded, seen.model, seen.running, seen.cached_tokens) == (
        "health: connection refused",
        "m",
        0,
        -1,
    )
    assert seen.served == (ServedModel("m", "", 2048),)


def test_what_comes_back_may_be_another_engine() -> None:
    engine = Engine()
    engine.round()
    for _ in range(3):
        engine.gone()
    engine.answers["/v1/models"] = Probed(200, b'{"data":[{"id":"other","owned_by":"x"}]}')
    engine.round()
    seen = engine.round()
    assert (seen.up, seen.dialect, seen.model) == (True, "openai", "other")


def test_r14_an_engine_that_was_never_there_is_down_and_says_so() -> None:
    engine = Engine()
    seen = engine.gone()
    assert (seen.up, seen.dialect, seen.model) == (False, "", "")
    assert seen.degraded == "models: connection refused"


def test_an_engine_that_is_loading_is_not_up_yet() -> None:
    engine = Engine("m", "llamacpp")
    loading = Probed(503, b'{"error":{"message":"Loading model","type":"unavailable_error"}}')
    seen = engine.round(health=loading)
    assert not seen.up
    assert "Loading model" in seen.degraded


@pytest.mark.parametrize("status", [401, 403])
def test_r13_an_engine_that_tells_nothing_is_used_and_says_so(status: int) -> None:
    """A key that is missing must not keep a worker out, nor in silence."""
    engine = Engine("m", "vllm")
    engine.answers = dict.fromkeys(("/health", "/metrics", "/load", "/v1/models"), Probed(status))
    seen = engine.round()
    assert seen.up
    assert seen.model == "m"
    assert f"health {status}: credentials" in seen.degraded
    assert f"metrics {status}" in seen.degraded
    assert f"models {status}" in seen.degraded


def test_r13_an_engine_that_refuses_to_say_what_it_is_is_used_as_any_other() -> None:
    engine = Engine("m")
    engine.answers = {"/v1/models": Probed(401)}
    seen = engine.round()
    assert (seen.up, seen.dialect, seen.degraded) == (True, "openai", "models 401")
    # And it is asked again, until it says it.
    engine.answers = {"/health": HEALTHY, "/v1/models": MODEL_LIST, "/metrics": metrics()}
    seen = engine.round()
    assert (seen.dialect, seen.degraded, seen.running) == ("vllm", "", 3)


def test_r13_without_a_list_of_models_an_auto_worker_gets_nothing_and_says_why() -> None:
    engine = Engine()
    engine.answers = {"/v1/models": Probed(401)}
    seen = engine.round()
    assert (seen.up, seen.model) == (True, "")
    assert seen.degraded == "models 401, its model is not known"
    engine.answers = {"/v1/models": Probed(200, b'{"data":[]}')}
    assert engine.round().degraded == "it lists no model"


@pytest.mark.parametrize("status", [500, 503])
def test_r04_health_that_says_no_is_believed_whatever_else_answers(status: int) -> None:
    engine = Engine("m", "vllm")
    engine.round()
    ups = [engine.round(health=Probed(status)).up for _ in range(3)]
    assert ups == [True, True, False]


def test_r04_an_engine_that_says_it_drains_is_drained_at_once_though_it_is_healthy() -> None:
    engine = Engine("m", "tl")
    engine.answers["/health"] = Probed(200, b'{"status":"ok","running":1}')
    assert not engine.round().draining
    seen = engine.round(health=Probed(503, b'{"status":"draining","running":1}'))
    assert (seen.up, seen.draining) == (True, True)


@pytest.mark.parametrize("answer", [Probed(404), Probed(401), Probed(200, b"<html>")])
def test_b02_load_that_cannot_be_read_is_said_at_once_and_counts_as_none(answer: Probed) -> None:
    engine = Engine("m", "vllm")
    engine.answers |= {"/metrics": answer, "/load": Probed(404)}
    seen = engine.round()
    assert seen.up
    assert "metrics" in seen.degraded
    assert seen.queue_depth == 0


def test_b02_the_other_endpoint_of_load_is_asked_in_the_round_in_which_the_first_one_fails() -> (
    None
):
    engine = Engine("m", "vllm")
    engine.round()
    engine.answers |= {"/metrics": Probed(404), "/load": Probed(200, b'{"server_load":9}')}
    seen = engine.round()
    assert engine.asked[-1] == ["/health", "/metrics", "/load"]
    assert seen.running == 9
    assert "metrics 404" in seen.degraded


def test_load_that_is_late_stands_for_two_rounds_and_is_unknown_in_the_third() -> None:
    """Whoever has most to do answers last: to take that for no load would send it more."""
    engine = Engine("m", "vllm")
    engine.round()
    late = {"metrics": Probed(0, b"", "no answer in 2 s"), "load": REFUSED}
    seen = [engine.round(**late) for _ in range(3)]
    assert [each.queue_depth for each in seen] == [5, 5, 0]
    assert [each.degraded for each in seen[:2]] == ["", ""]
    assert "metrics: no answer in 2 s" in seen[2].degraded
    assert engine.round().degraded == ""


def test_a_list_of_models_that_fails_leaves_what_is_served() -> None:
    engine = Engine()
    engine.round()
    engine.answers["/v1/models"] = Probed(401)
    seen = [engine.round() for _ in range(5)][-1]
    assert (seen.model, seen.served) == ("m", (ServedModel("m", "", 2048),))
    assert seen.degraded == "models 401"


def test_the_model_of_an_auto_worker_is_the_first_that_is_no_adapter() -> None:
    engine = Engine()
    engine.answers["/v1/models"] = ADAPTERS
    seen = engine.round()
    assert seen.model == "m"
    assert [each.id for each in seen.served] == ["fr", "m", "alias"]


def test_a_model_that_the_engine_does_not_list_is_served_and_said() -> None:
    engine = Engine("n", "vllm")
    seen = engine.round()
    assert (seen.up, seen.model, seen.degraded) == (True, "n", "the engine lists m, not n")
    names = ",".join(f'{{"id":"m{n}"}}' for n in range(5))
    engine = Engine("n", "openai")
    engine.answers["/v1/models"] = Probed(200, f'{{"data":[{names}]}}'.encode())
    assert engine.round().degraded == "the engine lists m0, m1, m2 and 2 more, not n"


def test_a_configured_model_whose_engine_lists_none_is_no_fault() -> None:
    engine = Engine("n", "openai")
    engine.answers["/v1/models"] = Probed(200, b'{"data":[]}')
    assert engine.round().degraded == ""


def test_counters_that_go_back_are_those_of_an_engine_that_restarted() -> None:
    engine = Engine()
    assert engine.round(metrics=metrics(cached=100)).cached_tokens == 100
    seen = engine.round(metrics=metrics(cached=2))
    assert (seen.up, seen.cached_tokens, seen.degraded) == (True, 2, "")


def test_p19_what_was_lost_this_time_is_told_again_and_said_to_be_stale() -> None:
    engine = Engine("m")
    seen = [engine.round(), engine.round(metrics=REFUSED), engine.round()]
    assert [each.cached_tokens for each in seen] == [7, 7, 7]
    assert [each.stale for each in seen] == [False, True, False]


def test_counts_are_within_what_an_agent_can_tell_on() -> None:
    engine = Engine(dialect="vllm")
    body = b'{"data":[{"id":"m","max_model_len":9000000000000000000}]}'
    engine.answers["/v1/models"] = Probed(200, body)
    lines = (
        b"vllm:num_requests_running 1e300\n"
        b'vllm:cache_config_info{num_gpu_blocks="9999999999",block_size="16"} 1\n'
    )
    seen = engine.round(metrics=Probed(200, lines))
    counts = (seen.running, seen.kv_total_blocks, seen.kv_tokens, seen.max_model_len)
    assert counts == 4 * (2**31 - 1,)
    status = status_of(tell(seen), "h:1")
    assert (status.running, status.kv_tokens) == 2 * (2**31 - 1,)


def test_an_engine_on_which_less_than_nothing_runs_is_idle() -> None:
    engine = Engine(dialect="vllm")
    seen = engine.round(metrics=Probed(404), load=Probed(200, b'{"server_load":-5}'))
    assert seen.running == 0


def tell(seen: Observation) -> Worker:
    worker = Worker("a", model="m", http_address="h:1", dialect="vllm", polled=True)
    worker.running, worker.kv_total_blocks = seen.running, seen.kv_total_blocks
    worker.max_model_len, worker.kv_tokens = seen.max_model_len, seen.kv_tokens
    return worker
