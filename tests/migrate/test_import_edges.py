"""What cannot be read is one line, and what reads in more than one way is read as the other gateway reads it."""

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from pointsman.cli_import import import_app
from pointsman.config import GatewayConfig, load
from pointsman.migrate.draft import Draft
from pointsman.migrate.flags import flag_items


def run(*words: str) -> Result:
    return CliRunner().invoke(import_app, list(words))


def flags(tmp_path: Path, source: str, words: str, *options: str) -> tuple[GatewayConfig, str]:
    """Import flags, load what comes of it, and return that and the notes."""
    target = tmp_path / "gateway.toml"
    target.unlink(missing_ok=True)
    done = run(source, *options, "--output", str(target), "--", *words.split())
    assert done.exit_code == 0, done.output
    return load(target, [], {}).gateway, done.stderr


def litellm(tmp_path: Path, document: object) -> tuple[GatewayConfig, str]:
    """Import a config.yaml, load what comes of it, and return that and the notes."""
    source, target = tmp_path / "config.yaml", tmp_path / "gateway.toml"
    source.write_text(json.dumps(document))
    target.unlink(missing_ok=True)
    done = run("litellm", "--output", str(target), str(source))
    assert done.exit_code == 0, done.output
    return load(target, [], {}).gateway, done.stderr


def deployment(name: str, model: str, **params: object) -> dict[str, object]:
    return {"model_name": name, "litellm_params": {"model": model, **params}}


# ------------------------------------------------------------------ what cannot be read


@pytest.mark.parametrize(
    ("source", "text", "told"),
    [
        ("litellm", "a: [", "not a YAML text in line 1"),
        ("litellm", "- a", "expected keys and values"),
        ("litellm", "1: a", "expected keys and values"),
        ("litellm", "model_list: 7", "model_list: expected a list"),
        ("litellm", "model_list: [7]", "model_list[0]: expected keys and values"),
        ("litellm", "model_list: [{model_name: a}]", "expected model_name and litellm_params"),
        ("litellm", "model_list: [{model_name: a, litellm_params: {}}]", "expected model"),
        ("litellm", "general_settings: 7", "general_settings: expected keys and values"),
        ("litellm", "router_settings: {num_retries: two}", "expected a number, not 'two'"),
        ("litellm", "router_settings: {num_retries: 1.5}", "expected an integer, not 1.5"),
        ("litellm", "router_settings: {num_retries: true}", "expected one value"),
        ("litellm", "router_settings: {timeout: 1e30}", "out of range"),
        ("litellm", "router_settings: {timeout: .nan}", "out of range"),
        ("litellm", "router_settings: {timeout: os.environ/T}", "write it out"),
        ("litellm", "\ud800", "not a YAML text"),
        (
            "litellm",
            "model_list: [{model_name: a, litellm_params: {model: openai/a, weight: -1}}]",
            "weight: expected a number of at least 0",
        ),
        ("production-stack", "routerSpec: {extraArgs: --x}", "extraArgs: expected a list"),
        ("production-stack", "static_backends: 'http://a,http://b'\nstatic_models: m", "2 of them"),
    ],
)
def test_a_file_that_is_no_good_is_one_line(
    tmp_path: Path, source: str, text: str, told: str
) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    done = run(source, str(path))
    assert (done.exit_code, done.stdout) == (1, "")
    line = done.stderr.splitlines()[-1]
    assert line.startswith("pointsman: ")
    assert told in line


@pytest.mark.parametrize(
    ("source", "words", "told"),
    [
        ("vllm-router", "--port http", "--port: expected a number"),
        ("vllm-router", "--port 70000", "127.0.0.1:70000: the port is not a number in 0..65535"),
        ("vllm-router", "--port $PORT", "--port: the value of $PORT is not known here"),
        ("vllm-router", "--port 1 2", "--port: expected one value"),
        ("vllm-router", "--worker-urls http://u:p@a:1", "expected http://host:port"),
        ("vllm-router", "--worker-urls http://a:b", "expected http://host:port"),
        ("vllm-router", "--prefill http://a:1 x", "--prefill: expected a number"),
        ("sglang-router", "--model-alias chat", "expected alias=model"),
        ("production-stack", "--static-aliases chat", "expected alias:model"),
    ],
)
def test_flags_that_are_no_good_are_one_line(source: str, words: str, told: str) -> None:
    done = run(source, "--", *words.split())
    assert (done.exit_code, done.stdout) == (1, "")
    assert told in done.stderr
    assert "u:p" not in done.stderr


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("echo hello", "no command here starts it with flags"),
        ("vllm-router", "no command here starts it with flags"),
        ("vllm-router --port 'x", "not a shell script"),
        ("vllm-router --port 1\nvllm-router --port 2", "more than one command"),
    ],
)
def test_a_script_starts_the_router_once(tmp_path: Path, script: str, told: str) -> None:
    path = tmp_path / "start.sh"
    path.write_text(script)
    done = run("vllm-router", str(path))
    assert (done.exit_code, done.stdout) == (1, "")
    assert told in done.stderr


@pytest.mark.parametrize("source", ["litellm", "vllm-router", "sglang-router", "production-stack"])
def test_a_file_that_is_not_there_is_one_line(tmp_path: Path, source: str) -> None:
    for name in ("gone.yaml", "gone.sh"):
        done = run(source, str(tmp_path / name))
        assert done.exit_code == 1
        assert done.stderr == f"pointsman: {tmp_path / name}: No such file or directory\n"


def test_one_file_is_read_at_a_time() -> None:
    done = run("vllm-router", "a.sh", "b.sh")
    assert (done.exit_code, done.stderr) == (
        1,
        "pointsman: b.sh: expected one file, or flags after `--`\n",
    )


def test_without_the_extra_the_message_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    done = run("litellm", str(tmp_path / "config.yaml"))
    assert done.exit_code == 1
    assert "pip install 'pointsman[migrate]'" in done.stderr


# ------------------------------------------------------------------ flags


def test_a_word_of_the_shell_ends_a_command() -> None:
    read = [
        (item.key, item.value)
        for item in flag_items(["launch", "--a_b=1", "--c", "2", "3", "--d", "2>&1"])
    ]
    assert read == [("--a-b", "1"), ("--c", ["2", "3"]), ("--d", True)]


def test_an_engine_that_speaks_no_http_is_left_out_with_a_note(tmp_path: Path) -> None:
    gateway, notes = flags(tmp_path, "sglang-router", "--worker-urls grpc://a:1 http://b:2@3")
    assert [each.url for each in gateway.workers] == ["http://b:2"]
    assert "grpc://a:1 is left out" in notes
    assert "http://b:2@3: an engine spreads" in notes


def test_a_prefill_engine_that_speaks_no_http_is_left_out_with_a_note(tmp_path: Path) -> None:
    gateway, notes = flags(tmp_path, "sglang-router", "--prefill grpc://a:1 9000 --model m")
    assert gateway.workers == ()
    assert "grpc://a:1 is left out" in notes


def test_workers_are_listed_without_any(tmp_path: Path) -> None:
    assert flags(tmp_path, "vllm-router", "--worker-urls --port 8000")[0].workers == ()


def test_workers_of_one_address_have_ids_of_their_own(tmp_path: Path) -> None:
    gateway, _ = flags(tmp_path, "vllm-router", "--worker-urls http://a:1 https://a:1/ http://a:1")
    assert [each.id for each in gateway.workers] == ["a:1", "a:1-2", "a:1-3"]


def test_a_hand_off_without_a_model_is_a_note(tmp_path: Path) -> None:
    gateway, notes = flags(tmp_path, "vllm-router", "--prefill http://a:1 --decode http://b:1")
    assert gateway.routes == ()
    assert "--prefill: a hand-off needs a route by the id of the model" in notes


def test_a_connector_that_is_not_known_is_a_note(tmp_path: Path) -> None:
    words = "--vllm-pd-disaggregation --kv-connector moriio --decode http://b:1"
    gateway, notes = flags(tmp_path, "vllm-router", words, "--model", "m")
    assert [each.connector for each in gateway.workers] == ["nixl"]
    assert "--kv-connector: hand-offs by moriio are not known" in notes


@pytest.mark.parametrize(
    ("backend", "dialect", "connector", "told"),
    [
        ("vllm", "vllm", "nixl", "NIXL connector"),
        ("tokenspeed", "auto", "", "no dialect for tokenspeed"),
    ],
)
def test_smg_in_front_of_other_engines(
    tmp_path: Path, backend: str, dialect: str, connector: str, told: str
) -> None:
    words = f"--backend {backend} --pd-disaggregation --decode http://b:1"
    gateway, notes = flags(tmp_path, "sglang-router", words, "--model", "m")
    assert [(each.dialect, each.connector) for each in gateway.workers] == [(dialect, connector)]
    assert told in notes


def test_pods_are_found_by_role_and_in_all_namespaces(tmp_path: Path) -> None:
    words = "--service-discovery --prefill-selector a=p --decode-selector a=d"
    gateway, _ = flags(tmp_path, "sglang-router", f"--pd-disaggregation --model m {words}")
    assert [
        (each.namespace, each.selector, each.role, each.port) for each in gateway.kubernetes
    ] == [
        ("*", "a=p", "prefill", 80),
        ("*", "a=d", "decode", 80),
    ]


def test_a_selector_without_discovery_has_no_effect(tmp_path: Path) -> None:
    gateway, notes = flags(tmp_path, "vllm-router", "--selector a=b --worker-urls http://a:1")
    assert gateway.kubernetes == ()
    assert "--selector: without --service-discovery it has no effect" in notes


def test_smg_reads_engines_from_a_file(tmp_path: Path) -> None:
    words = "--discovery-provider file --discovery-file /etc/smg/workers.yaml"
    gateway, notes = flags(tmp_path, "sglang-router", words)
    [source] = gateway.worker_files
    assert (source.file, source.dialect, notes) == ("/etc/smg/workers.yaml", "sglang", "")


def test_several_authorities_are_to_be_joined() -> None:
    done = run("sglang-router", "--", "--ca-cert-paths", "a.pem", "b.pem")
    assert 'upstream_ca = "a.pem"' in done.stdout
    assert "--ca-cert-paths: one file is read: join a.pem, b.pem into it" in done.stderr


def test_of_prefill_and_decode_the_policy_is_that_of_decode(tmp_path: Path) -> None:
    words = "--policy cache_aware --decode-policy power_of_two --decode http://a:1"
    apart = f"--pd-disaggregation --model m {words}"
    assert flags(tmp_path, "sglang-router", apart)[0].route_policy == "power_of_two"
    assert flags(tmp_path, "sglang-router", words)[0].route_policy == "cache_aware"


def test_a_policy_that_is_not_known_is_a_note(tmp_path: Path) -> None:
    gateway, notes = flags(tmp_path, "vllm-router", "--policy astrology")
    assert gateway.route_policy == "affinity"
    assert "--policy: the policy astrology has no counterpart" in notes


def test_what_means_nothing_is_no_note(tmp_path: Path) -> None:
    words = "--health-check-endpoint /health --max-concurrent-requests -1 --disable-circuit-breaker"
    assert flags(tmp_path, "sglang-router", words)[1] == ""
    assert flags(tmp_path, "sglang-router", "--health-check-endpoint /ok")[1] != ""


def test_health_may_listen_on_an_ipv6_address(tmp_path: Path) -> None:
    gateway, _ = flags(tmp_path, "vllm-router", "--host ::1 --prometheus-host ::")
    assert (gateway.listen, gateway.health_listen) == ("[::1]:30000", "[::]:29000")


# ------------------------------------------------------------------ production-stack


def test_pods_of_production_stack_have_roles_by_the_label_of_their_model(tmp_path: Path) -> None:
    words = (
        "--service-discovery k8s --k8s-label-selector app=e --routing-logic disaggregated_prefill"
    )
    labels = "--prefill-model-labels p,q --decode-model-labels d"
    gateway, notes = flags(tmp_path, "production-stack", f"{words} {labels}", "--model", "m")
    assert [(each.namespace, each.selector, each.role) for each in gateway.kubernetes] == [
        ("default", "app=e,model in (p,q)", "prefill"),
        ("default", "app=e,model=d", "decode"),
    ]
    assert [each.model for each in gateway.routes] == ["m"]
    assert "NIXL" in notes
    assert "--model ID" in flags(tmp_path, "production-stack", f"{words} {labels}")[1]


def test_pods_without_a_selector_are_a_note(tmp_path: Path) -> None:
    gateway, notes = flags(
        tmp_path,
        "production-stack",
        "--service-discovery k8s --k8s-service-discovery-type service-name --request-rewriter x",
    )
    assert gateway.kubernetes == ()
    assert "--service-discovery: pods are left out" in notes
    assert "--k8s-service-discovery-type: pods are found" in notes
    assert "--request-rewriter: a request is passed on as it is" in notes


def test_labels_of_engines_by_model_become_roles(tmp_path: Path) -> None:
    path = tmp_path / "dynamic.yaml"
    path.write_text(
        "routing_logic: disaggregated_prefill\nprefill_model_labels: p\ndecode_model_labels: d\n"
        "static_models:\n  m:\n    static_backends: [http://a:1]\n    static_model_label: p\n"
        "  n:\n    static_backends: http://b:1\n    static_model_label: d\n    price: 7\n"
    )
    target = tmp_path / "gateway.toml"
    done = run("production-stack", "--output", str(target), str(path))
    assert done.exit_code == 0, done.output
    workers = load(target, [], {}).gateway.workers
    assert [(each.id, each.model, each.role) for each in workers] == [
        ("a:1", "m", "prefill"),
        ("b:1", "n", "decode"),
    ]
    assert "note: static_models.n.price: not known here" in done.stderr


def test_a_key_of_the_chart_asks_callers_for_keys_only_where_there_is_one(tmp_path: Path) -> None:
    path = tmp_path / "values.yaml"
    for key, guarded in (("{secretName: '', secretKey: ''}", False), ("plain", True)):
        path.write_text(
            f"routerSpec: {{vllmApiKey: {key}, serviceDiscovery: '', otel: {{secure: false}}}}"
        )
        done = run("production-stack", str(path))
        assert ('keys_file = "keys.jsonl"' in done.stdout) is guarded
        assert "plain" not in done.output


# ------------------------------------------------------------------ LiteLLM


def test_one_engine_of_several_models_is_one_worker(tmp_path: Path) -> None:
    at = {"api_base": "http://a:1/v1"}
    gateway, _ = litellm(
        tmp_path,
        {"model_list": [deployment("x", "openai/m", **at), deployment("y", "openai/n", **at)]},
    )
    assert [(each.url, each.model) for each in gateway.workers] == [("http://a:1", "auto")]
    assert [each.model for each in gateway.routes] == ["x", "y"]


def test_a_model_that_is_served_by_its_name_needs_no_route(tmp_path: Path) -> None:
    entry = deployment("org/m", "hosted_vllm/org/m", api_base="http://a:1/v1")
    gateway, notes = litellm(tmp_path, {"model_list": [entry]})
    assert (gateway.routes, notes) == ((), "")
    assert (gateway.route_policy, gateway.workers[0].capacity) == ("weighted", 1)
    assert gateway.allow_unauthenticated


def test_the_provider_may_stand_apart(tmp_path: Path) -> None:
    entry = deployment("m", "org/m", custom_llm_provider="openai", base_url="http://a:1/v1")
    gateway, _ = litellm(tmp_path, {"model_list": [entry]})
    assert [each.model for each in gateway.workers] == ["org/m"]


def test_a_bare_name_is_one_of_openai_if_it_looks_so(tmp_path: Path) -> None:
    entries = [deployment("gpt-x", "gpt-x", api_key="os.environ/K"), deployment("m", "claude-x")]
    gateway, notes = litellm(tmp_path, {"model_list": entries})
    assert [(each.url, each.api_key_env) for each in gateway.workers] == [
        ("https://api.openai.com", "K")
    ]
    assert "m is left out: the provider is no OpenAI-compatible engine" in notes


def test_keys_that_stand_in_the_file_get_variables_of_their_own(tmp_path: Path) -> None:
    entries = [
        deployment("m", "openai/m", api_base=f"http://{host}:1/v1", api_key=key)
        for host, key in (("a", "sk-1"), ("b", "sk-2"), ("c", "sk-1"), ("d", "EMPTY"))
    ]
    gateway, notes = litellm(tmp_path, {"model_list": entries})
    assert [each.api_key_env for each in gateway.workers] == [
        *("ENGINE_API_KEY", "ENGINE_API_KEY_2", "ENGINE_API_KEY", ""),
    ]
    assert "sk-" not in notes


def test_weights_count_for_the_policy_that_looks_at_them(tmp_path: Path) -> None:
    entries = [
        deployment("m", "openai/m", api_base="http://a:1/v1", rpm=300),
        deployment("m", "openai/m", api_base="http://b:1/v1", rpm=100),
        deployment("m", "openai/m", api_base="http://c:1/v1", weight=0),
    ]
    gateway, notes = litellm(tmp_path, {"model_list": entries})
    assert [each.capacity for each in gateway.workers] == [300, 100, 1]
    assert "model_list[2].litellm_params.weight: 0 is no weight" in notes
    least = {"model_list": entries, "router_settings": {"routing_strategy": "least-busy"}}
    gateway, notes = litellm(tmp_path, least)
    assert gateway.route_policy == "least_outstanding"
    assert [each.capacity for each in gateway.workers] == [0, 0, 0]
    assert "model_list[0].litellm_params.rpm: among the workers" in notes


def test_a_pattern_of_models_is_left_out_with_a_note(tmp_path: Path) -> None:
    gateway, notes = litellm(tmp_path, {"model_list": [deployment("*", "openai/*")]})
    assert gateway.workers == ()
    assert "model_list[0].model_name: * is left out" in notes


def test_a_key_beside_the_known_ones_is_a_note(tmp_path: Path) -> None:
    entry = deployment("m", "openai/m", api_base="http://a:1/v1") | {"color": "red"}
    _, notes = litellm(tmp_path, {"model_list": [entry], "include": ["x"], "guardrails": []})
    assert "note: model_list[0].color: not known here" in notes
    assert "note: include: not known here" in notes
    assert "guardrails" not in notes  # empty says nothing


# ------------------------------------------------------------------ the text


def test_a_name_cannot_break_out_of_its_comment() -> None:
    draft = Draft("litellm")
    draft.note('evil"\n[gateway.workers]\nx\x00 = 1', "why\r\nso")
    lines = draft.text().splitlines()
    assert [line for line in lines if line and not line.startswith("#")] == ["[gateway]"]
