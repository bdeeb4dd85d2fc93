"""Every dialect understands what its engine said, and what it reads of it is what the engine meant."""

from pathlib import Path

import pytest

from pointsman.dialect import vllm
from pointsman.dialect.engines import DIALECTS, detect
from pointsman.domain.worker import ServedModel
from pointsman.testing.dialects import Recording, check_dialect, recordings
from pointsman.wire.sse import data_of

FOLDER = Path(__file__).resolve().parents[1] / "recorded"
ENGINES = ["vllm", "sglang", "llamacpp"]


def said(engine: str) -> dict[str, Recording]:
    return {recording.name: recording for recording in recordings(FOLDER / engine)}


@pytest.mark.parametrize("engine", ENGINES)
def test_a_dialect_understands_its_engine(engine: str) -> None:
    check_dialect(DIALECTS[engine], recordings(FOLDER / engine))


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_is_known_by_its_models(engine: str) -> None:
    assert detect(said(engine)["models"].probed) == engine


def test_what_sglang_says_was_said_by_nobody_and_says_so() -> None:
    assert all("not recorded" in recording.note for recording in recordings(FOLDER / "sglang"))


def test_vllm_under_load() -> None:
    engine = said("vllm")
    names = {"/health": "health", "/metrics": "metrics_loaded", "/v1/models": "models"}
    reading = DIALECTS["vllm"].read({path: engine[name].probed for path, name in names.items()})
    assert (reading.ready, reading.why, reading.degraded) == (True, "", "")
    assert reading.running == 8
    assert reading.waiting
    assert (reading.kv_total_blocks, reading.kv_tokens) == (728, 728 * 32)
    assert reading.kv_usage
    assert reading.kv_free_blocks == round(728 * (1 - reading.kv_usage))
    assert reading.models == (ServedModel("smollm2", "", 1024),)
    assert reading.remote_tokens == 0


def test_p19_tokens_that_came_from_another_vllm_are_counted() -> None:
    reading = DIALECTS["vllm"].read({"/metrics": said("vllm")["nixl_metrics_decode"].probed})
    assert reading.remote_tokens
    assert reading.cached_tokens == 0


@pytest.mark.parametrize("kind", ["completions", "chat"])
def test_what_a_vllm_prefill_worker_answered_is_what_the_decode_worker_got(kind: str) -> None:
    engine = said("vllm")
    answer = engine[f"nixl_{kind}_prefill"].response.body.encode()
    params = vllm.transfer_params(answer)
    assert params is not None
    assert b'"do_remote_prefill":true' in params
    assert params in answer


def test_sglang_over_its_ranks() -> None:
    engine = said("sglang")
    names = ("health", "metrics", "models", "server_info")
    answers = {engine[name].request.path: engine[name].probed for name in names}
    reading = DIALECTS["sglang"].read({**answers, "/v1/loads": engine["loads_aggregated"].probed})
    assert (reading.ready, reading.degraded) == (True, "")
    assert (reading.running, reading.waiting, reading.kv_usage) == (6, 2, 0.5)
    assert (reading.kv_total_blocks, reading.kv_free_blocks) == (200_000 // 16, 100_000 // 16)
    assert reading.kv_tokens == 200_000
    assert (reading.lora_slots, reading.cached_tokens) == (8, 1024)
    assert reading.models == (ServedModel("qwen", "", 32768), ServedModel("sql", "qwen", 32768))
    old = DIALECTS["sglang"].read({**answers, "/get_load": engine["get_load"].probed})
    assert (old.running, old.waiting, old.kv_usage, old.degraded) == (5, 2, None, "")
    # The size comes from /server_info then.
    assert (old.kv_total_blocks, old.kv_tokens) == (100_000 // 16, 100_000)


def test_llamacpp_with_and_without_its_metrics() -> None:
    engine = said("llamacpp")
    names = ("health", "metrics", "models", "props")
    answers = {engine[name].request.path: engine[name].probed for name in names}
    reading = DIALECTS["llamacpp"].read(answers)
    assert (reading.ready, reading.degraded) == (True, "")
    assert (reading.running, reading.waiting) == (0, 0)
    assert (reading.kv_total_blocks, reading.kv_free_blocks, reading.kv_tokens) == (2, 2, 4096)
    assert reading.cached_tokens
    assert reading.models == (ServedModel("smol", "", 2048),)
    off = {**answers, "/metrics": engine["metrics_off"].probed}
    slots = DIALECTS["llamacpp"].read({**off, "/slots": engine["slots"].probed})
    assert (slots.running, slots.waiting, slots.kv_tokens) == (0, None, 4096)
    assert slots.degraded == "metrics 501, load from /slots without the queue"
    nothing = DIALECTS["llamacpp"].read({**off, "/slots": engine["slots_off"].probed})
    assert (nothing.running, nothing.kv_free_blocks) == (None, None)
    assert nothing.degraded == "metrics 501, slots 501"


@pytest.mark.parametrize(
    ("engine", "name", "cached"),
    [
        ("vllm", "nixl_chat_prefill", 0),
        ("sglang", "chat", 8),
        ("sglang", "completions_batch_in_rooms", -1),
        ("sglang", "error_too_long", -1),
        ("llamacpp", "completions_cold", 0),
    ],
)
def test_cached_tokens_of_an_answer(engine: str, name: str, cached: int) -> None:
    answer = said(engine)[name].response.body.encode()
    assert DIALECTS[engine].cached_tokens(answer) == cached


@pytest.mark.parametrize(
    ("engine", "name"),
    [
        ("vllm", "completions_warm"),
        ("sglang", "chat_stream"),
        ("llamacpp", "completions_stream"),
        ("llamacpp", "messages"),
        ("llamacpp", "messages_stream"),
    ],
)
def test_cached_tokens_are_told_somewhere_in_an_answer_from_a_cache(engine: str, name: str) -> None:
    body = said(engine)[name].response.body.encode()
    events = [data_of(event + b"\n\n") for event in body.split(b"\n\n")]
    told = [DIALECTS[engine].cached_tokens(data) for data in events if data] or [
        DIALECTS[engine].cached_tokens(body)
    ]
    assert max(told) > 0
