"""What is read of engines that are not well: each fault is named, and none of them is a silent guess."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pointsman.dialect.engines import DIALECTS, Probed, detect
from pointsman.dialect.reading import (
    Probe,
    cached_tokens_of,
    due,
    free_of,
    health_of,
    models_of,
    served_by,
)
from pointsman.domain.worker import ServedModel

OK = Probed(200)
MODELS = Probed(200, b'{"data":[{"id":"m"}]}')


def metrics(*lines: str) -> Probed:
    return Probed(200, "".join(f"{line}\n" for line in lines).encode())


@pytest.mark.parametrize("name", ["tl", "vllm", "sglang", "llamacpp"])
@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (Probed(401), "health 401: credentials"),
        (Probed(403, b'{"error":"no"}'), "health 403: credentials"),
        (Probed(503), "health 503"),
        (Probed(500, b'{"error":{"message":"engine \\u0000 died"}}'), "health 500: engine  died"),
        (Probed(503, b'{"error":"starting"}'), "health 503: starting"),
        (Probed(0, error="connection refused"), "health: connection refused"),
        (Probed(0), "health: no answer"),
    ],
)
def test_r12_a_failed_health_probe_says_why(name: str, answer: Probed, why: str) -> None:
    reading = DIALECTS[name].read({"/health": answer, "/v1/models": MODELS})
    assert (reading.ready, reading.why) == (False, why)
    assert reading.models == (ServedModel("m"),)


@pytest.mark.parametrize("status", [401, 403])
def test_r13_what_may_not_be_introspected_is_used_and_says_so(status: int) -> None:
    answers = {path: Probed(status) for path in ("/server_info", "/get_server_info", "/v1/loads")}
    reading = DIALECTS["sglang"].read({"/health": OK, "/get_load": Probed(status), **answers})
    assert reading.ready
    assert reading.degraded == f"load {status}, introspection {status}"
    reading = DIALECTS["vllm"].read({"/health": OK, "/metrics": Probed(status)})
    assert reading.ready
    assert reading.degraded == f"metrics {status}"
    reading = DIALECTS["openai"].read({"/v1/models": Probed(status)})
    assert (reading.ready, reading.degraded) == (True, f"models {status}")


LOADS = {"/v1/loads": Probed(404), "/get_load": Probed(404)}


def test_b02_a_load_that_nobody_tells_is_no_load_of_nought() -> None:
    reading = DIALECTS["sglang"].read({"/health": OK, **LOADS})
    assert reading.degraded == "load: /v1/loads 404, /get_load 404"
    assert (reading.running, reading.waiting, reading.kv_usage) == (None, None, None)
    reading = DIALECTS["vllm"].read({"/health": OK, "/metrics": Probed(404), "/load": Probed(404)})
    assert reading.degraded == "metrics 404, load 404"
    assert (reading.running, reading.waiting) == (None, None)


def test_b02_what_stands_in_for_the_load_is_named() -> None:
    figures = metrics("sglang:num_running_reqs 3", "sglang:num_queue_reqs 1")
    reading = DIALECTS["sglang"].read({"/health": OK, **LOADS, "/metrics": figures})
    assert (reading.running, reading.waiting) == (3, 1)
    assert reading.degraded == "load: /v1/loads 404, /get_load 404, read from /metrics"
    reading = DIALECTS["sglang"].read({"/health": OK, "/metrics": figures})
    assert (reading.running, reading.degraded) == (3, "")
    load = Probed(200, b'{"server_load":7}')
    reading = DIALECTS["vllm"].read({"/health": OK, "/metrics": Probed(404), "/load": load})
    assert (reading.running, reading.waiting) == (7, None)
    said = "metrics 404, load from /load, which counts with --enable-server-load-tracking only"
    assert reading.degraded == said


@pytest.mark.parametrize(
    ("path", "body", "degraded"),
    [
        ("/v1/loads", b'{"server_load":7}', "load: no ranks in the answer"),
        ("/v1/loads", b'{"loads":[]}', "load: no ranks in the answer"),
        ("/get_load", b'{"waiting":0,"running":0}', "load: no ranks in the answer"),
        ("/metrics", b"other 1\n", "metrics: no sglang:num_running_reqs"),
        ("/server_info", b"[]", "introspection: no sizes in the answer"),
        ("/v1/models", b'{"models":[]}', "models: not a list of them"),
    ],
)
def test_b02_an_answer_of_another_shape_is_named(path: str, body: bytes, degraded: str) -> None:
    reading = DIALECTS["sglang"].read({"/health": OK, path: Probed(200, body)})
    assert (reading.ready, reading.degraded) == (True, degraded)


def test_vllm_by_its_old_and_its_new_names() -> None:
    config = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1'
    head = ("vllm:num_requests_running 1", "vllm:num_requests_waiting 2", config)
    new = metrics(*head, "vllm:kv_cache_usage_perc 0.25", "vllm:prefix_cache_hits_total 8")
    old = metrics(*head, "vllm:gpu_cache_usage_perc 0.25", "vllm:gpu_prefix_cache_hits_total 8")
    readings = [DIALECTS["vllm"].read({"/health": OK, "/metrics": said}) for said in (new, old)]
    assert readings[0] == readings[1]
    assert (readings[0].kv_usage, readings[0].kv_free_blocks) == (0.25, 75)
    assert readings[0].kv_tokens == 1600
    assert (readings[0].cached_tokens, readings[0].remote_tokens) == (8, None)


def test_vllm_over_its_ranks_and_with_adapters() -> None:
    said = metrics(
        'vllm:num_requests_running{engine="0"} 1',
        'vllm:num_requests_running{engine="1"} 4',
        'vllm:num_requests_waiting{engine="0"} 0',
        'vllm:kv_cache_usage_perc{engine="0"} 0.5',
        'vllm:kv_cache_usage_perc{engine="1"} 0.75',
        'vllm:cache_config_info{engine="0",num_gpu_blocks="100"} 1',
        'vllm:cache_config_info{engine="1",num_gpu_blocks="None",block_size="16"} 1',
        'vllm:lora_requests_info{max_lora="2",running_lora_adapters=""} 100',
        'vllm:lora_requests_info{max_lora="4",running_lora_adapters="sql"} 200',
    )
    reading = DIALECTS["vllm"].read({"/health": OK, "/metrics": said})
    assert (reading.running, reading.waiting, reading.kv_usage) == (5, 0, 0.75)
    assert (reading.kv_total_blocks, reading.kv_free_blocks, reading.lora_slots) == (100, 25, 4)


@pytest.mark.parametrize(
    ("labels", "blocks", "tokens"),
    [
        (['num_gpu_blocks="100",block_size="32"'], 100, 3200),
        (
            ['num_gpu_blocks="100",block_size="16"', 'num_gpu_blocks="50",block_size="32"'],
            150,
            3200,
        ),
        (['num_gpu_blocks="100",block_size="16"', 'num_gpu_blocks="50"'], 150, None),
        (['num_gpu_blocks="100",block_size="None"'], 100, None),
        (['num_gpu_blocks="None",block_size="16"'], None, None),
    ],
)
def test_the_room_of_a_vllm_is_in_tokens_where_it_says_how_large_its_blocks_are(
    labels: list[str], blocks: int | None, tokens: int | None
) -> None:
    said = metrics(*[f"vllm:cache_config_info{{{each}}} 1" for each in labels])
    reading = DIALECTS["vllm"].read({"/health": OK, "/metrics": said})
    assert (reading.kv_total_blocks, reading.kv_tokens) == (blocks, tokens)


def test_vllm_without_its_figures() -> None:
    reading = DIALECTS["vllm"].read({"/health": OK, "/metrics": metrics("python_info 1")})
    assert reading.degraded == (
        "metrics: no vllm:num_requests_running and no vllm:num_requests_waiting"
    )
    assert (reading.running, reading.kv_total_blocks, reading.lora_slots) == (None, None, None)
    reading = DIALECTS["vllm"].read(
        {"/health": OK, "/metrics": Probed(404), "/load": Probed(200, b"[]")}
    )
    assert reading.degraded == "metrics 404, load: /load has no server_load"


def test_llamacpp_of_old_builds() -> None:
    figures = metrics(
        "llamacpp:kv_cache_usage_ratio 0.5",
        "llamacpp:requests_processing 3",
        "llamacpp:requests_deferred 0",
    )
    props = Probed(200, b'{"total_slots":2}')
    reading = DIALECTS["llamacpp"].read({"/health": OK, "/metrics": figures, "/props": props})
    assert (reading.kv_usage, reading.kv_free_blocks, reading.degraded) == (0.5, 0, "")
    slots = Probed(200, b'[{"id":0,"state":1},{"id":1,"state":0}]')
    reading = DIALECTS["llamacpp"].read(
        {"/health": OK, "/metrics": Probed(501), "/slots": slots, "/props": Probed(404)}
    )
    assert (reading.running, reading.kv_total_blocks, reading.kv_free_blocks) == (1, 2, 1)
    assert reading.kv_tokens is None


@pytest.mark.parametrize(
    ("path", "said", "slots", "tokens"),
    [
        ("/props", b'{"total_slots":4,"default_generation_settings":{"n_ctx":512}}', 4, 2048),
        ("/props", b'{"total_slots":4,"default_generation_settings":{}}', 4, None),
        ("/props", b'{"total_slots":4}', 4, None),
        ("/slots", b'[{"id":0,"n_ctx":512},{"id":1,"n_ctx":512}]', 2, 1024),
        ("/slots", b"[]", 0, None),
    ],
)
def test_the_room_of_a_llamacpp_is_that_of_all_its_slots(
    path: str, said: bytes, slots: int, tokens: int | None
) -> None:
    reading = DIALECTS["llamacpp"].read({"/health": OK, path: Probed(200, said)})
    assert (reading.slots, reading.kv_tokens) == (slots, tokens)


def test_llamacpp_without_its_figures() -> None:
    answers = {"/metrics": metrics("other 1"), "/props": Probed(200, b"{}")}
    reading = DIALECTS["llamacpp"].read({"/health": OK, **answers})
    assert reading.degraded == (
        "metrics: no requests_processing or no requests_deferred, props: no total_slots"
    )


TL = '{"status":"%s","queue_depth":2,"running":1,"kv_free_blocks":3,"kv_total_blocks":4}'


@pytest.mark.parametrize(("status", "code"), [("ok", 200), ("draining", 503)])
def test_our_own_engine_where_it_is_listed(status: str, code: int) -> None:
    health = Probed(code, (TL % status).encode())
    reading = DIALECTS["tl"].read({"/health": health, "/v1/models": MODELS})
    assert (reading.ready, reading.why, reading.degraded) == (True, "", "")
    assert reading.draining is (status == "draining")
    assert (reading.waiting, reading.running) == (2, 1)
    assert (reading.kv_free_blocks, reading.kv_total_blocks, reading.kv_tokens) == (3, 4, 64)


def test_our_own_engine_that_says_little() -> None:
    reading = DIALECTS["tl"].read({"/health": OK})
    assert (reading.ready, reading.degraded) == (True, "health: no load in it")
    assert DIALECTS["tl"].cached_tokens(b"{}") == -1


@pytest.mark.parametrize(
    ("answer", "ready", "why", "degraded"),
    [
        (MODELS, True, "", ""),
        (Probed(404), True, "", "models 404"),
        (Probed(200, b"<html>"), True, "", "models: not a list of them"),
        (Probed(502), False, "models 502", "models 502"),
        (Probed(0, error="timed out"), False, "models: timed out", "models: timed out"),
    ],
)
def test_an_engine_of_which_nothing_is_known(
    answer: Probed, ready: bool, why: str, degraded: str
) -> None:
    reading = DIALECTS["openai"].read({"/v1/models": answer})
    assert (reading.ready, reading.why, reading.degraded) == (ready, why, degraded)
    assert DIALECTS["openai"].cached_tokens(b"") == -1


def test_nobody_asked_openai_yet() -> None:
    reading = DIALECTS["openai"].read({})
    assert (reading.ready, reading.why) == (False, "models: not asked yet")


def test_h18_adapters_keep_their_parent_and_its_context() -> None:
    body = (
        b'{"data":[{"id":"base","max_model_len":8192,"parent":null},{"id":"base-alias",'
        b'"max_model_len":8192},{"id":"sql","parent":"base"},{"id":"own","parent":"base",'
        b'"max_model_len":4096},{"id":"odd","parent":"odd"},{"id":"n","meta":{"n_ctx":512},'
        b'"aliases":["n","nn"]},{"id":"neg","max_model_len":-1},{"id":"s","meta":{"n_ctx":"x"}}]}'
    )
    models, fault = served_by({"/v1/models": Probed(200, body)})
    assert fault == ""
    assert models == (
        ServedModel("base", "", 8192),
        ServedModel("base-alias", "", 8192),
        ServedModel("sql", "base", 8192),
        ServedModel("own", "base", 4096),
        ServedModel("odd", "", 0),
        ServedModel("n", "", 512),
        ServedModel("nn", "", 512),
        ServedModel("neg", "", 0),
        ServedModel("s", "", 0),
    )


def test_models_that_were_not_asked_for_are_no_fault() -> None:
    assert served_by({}) == (None, "")
    assert models_of(None) is None


@pytest.mark.parametrize(
    ("owner", "dialect"),
    [
        (b'"pointsman"', "tl"),
        (b'"vllm"', "vllm"),
        (b'"sglang"', "sglang"),
        (b'"llamacpp"', "llamacpp"),
        (b'"somebody"', "openai"),
        (b"7", "openai"),
        (b"null", "openai"),
    ],
)
def test_an_engine_is_known_by_its_owner(owner: bytes, dialect: str) -> None:
    assert detect(Probed(200, b'{"data":[{"id":"m","owned_by":%b}]}' % owner)) == dialect


@pytest.mark.parametrize("answer", [Probed(401), Probed(0), Probed(200, b"[]"), Probed(200)])
def test_an_engine_that_tells_nothing_is_openais(answer: Probed) -> None:
    assert detect(answer) == "openai"


@pytest.mark.parametrize(
    ("answer", "cached"),
    [
        (b'{"usage":{"prompt_tokens_details":{"cached_tokens":8}}}', 8),
        (b'{"usage":{"input_tokens_details":{"cached_tokens":7}}}', 7),
        (b'{"type":"response.completed","response":{"usage":{"input_tokens_details":'
         b'{"cached_tokens":6}}}}', 6),
        (b'{"type":"message_start","message":{"usage":{"cache_read_input_tokens":5}}}', 5),
        (b'{"usage":{"cache_read_input_tokens":4}}', 4),
        (b'{"usage":{"prompt_tokens":9},"timings":{"cache_n":3}}', 3),
        (b'{"usage":{"prompt_tokens_details":{"cached_tokens":null}}}', -1),
        (b'{"usage":{"prompt_tokens_details":{"cached_tokens":-9}}}', -1),
        (b'{"usage":null,"choices":[]}', -1),
        (b'{"response":null}', -1),
        (b"[DONE]", -1),
        (b'{"usage":7}', -1),
    ],
)  # fmt: skip
def test_cached_tokens_are_read_of_every_api(answer: bytes, cached: int) -> None:
    assert cached_tokens_of(answer) == cached


def test_health_that_nobody_asked_for() -> None:
    assert health_of(None) == (False, "health: not asked yet")


def test_what_failed_is_asked_again_in_the_next_round() -> None:
    probes = (Probe("/v1/models", every=5),)
    assert not due(probes, 1, {"/v1/models": OK})
    assert due(probes, 1, {"/v1/models": Probed(503)}) == list(probes)
    assert due(probes, 5, {"/v1/models": OK}) == list(probes)


BODIES = st.one_of(
    st.binary(max_size=40),
    st.sampled_from([b"{}", b"[]", b"null", b"[" * 3000, b'{"loads":[{}]}', b'{"data":[{}]}']),
)


@settings(deadline=None)
@given(st.data(), st.sampled_from(sorted(DIALECTS)))
def test_no_answer_makes_a_dialect_raise(data: st.DataObject, name: str) -> None:
    dialect = DIALECTS[name]
    asked = data.draw(st.sets(st.sampled_from([probe.path for probe in dialect.probes])))
    answers = {
        path: Probed(data.draw(st.sampled_from([0, 200, 503])), data.draw(BODIES)) for path in asked
    }
    reading = dialect.read(answers)
    assert reading.ready is not bool(reading.why) or reading.draining
    body = data.draw(BODIES)
    assert dialect.cached_tokens(body) >= -1


def listed(*models: str) -> dict[str, Probed]:
    data = [{"id": each, "owned_by": "vllm"} for each in models]
    return {"/v1/models": Probed(200, msgspec.json.encode({"data": data}))}


@pytest.mark.parametrize("name", ["", "a\n2026 INFO b", "a\x1b[31m", 257 * "x"])
def test_names_that_no_worker_may_have_are_left_out_and_that_is_said(name: str) -> None:
    served, fault = served_by(listed("m", name))
    assert served == (ServedModel("m"),)
    assert fault == "models: 1 are left out"


def test_an_engine_has_1000_models_at_most() -> None:
    served, fault = served_by(listed(*(f"m{number}" for number in range(1003))))
    assert served is not None
    assert [each.id for each in served] == [f"m{number}" for number in range(1000)]
    assert fault == "models: 3 are left out"


def test_aliases_count_as_models() -> None:
    names = [f"a{number}" for number in range(1001)]
    data = [{"id": "m", "aliases": names}]
    answer = Probed(200, msgspec.json.encode({"data": data}))
    served, fault = served_by({"/v1/models": answer})
    assert served is not None
    assert len(served) == 1000
    assert fault == "models: 2 are left out"


def test_an_adapter_of_a_model_that_has_no_name_is_left_out() -> None:
    data = [{"id": "a", "parent": "m\n"}, {"id": "m"}]
    answer = Probed(200, msgspec.json.encode({"data": data}))
    assert served_by({"/v1/models": answer})[0] == (ServedModel("m"),)


@pytest.mark.parametrize(
    "lines",
    [
        b'vllm:num_requests_running{e="0"} 1e308\nvllm:num_requests_running{e="1"} 1e308\n',
        b'vllm:cache_config_info{num_gpu_blocks="' + 5000 * b"9" + b'"} 1\n',
        b'vllm:cache_config_info{num_gpu_blocks="' + 400 * b"9" + b'"} 1\n'
        b"vllm:kv_cache_usage_perc 0.5\n",
        b'vllm:cache_config_info{num_gpu_blocks="' + 400 * b"9" + b'",block_size="16"} 1\n',
        b'vllm:lora_requests_info{max_lora="' + 5000 * b"9" + b'"} 1\n',
    ],
)
def test_numbers_beyond_all_measure_make_nobody_raise(lines: bytes) -> None:
    reading = DIALECTS["vllm"].read({"/health": Probed(200), "/metrics": Probed(200, lines)})
    assert reading.ready
    assert (reading.kv_total_blocks, reading.kv_tokens) == (None, None)
    assert reading.lora_slots is None
    assert reading.running in (None, 2**53)


def test_a_size_beyond_all_measure_has_a_share_too() -> None:
    assert free_of(10**400, 0.5) == 2**52
