"""What is written for real-looking configurations loads, and has the workers, sources and routes that it should."""

import re
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from pointsman.cli_import import import_app
from pointsman.config import GatewayConfig, load
from pointsman.domain.routes import Backend

HERE = Path(__file__).parent


def run(*words: str) -> Result:
    return CliRunner().invoke(import_app, list(words))


def written(tmp_path: Path, source: str, name: str, *options: str) -> tuple[GatewayConfig, Result]:
    """Import a sample, and load what was written."""
    target = tmp_path / "gateway.toml"
    done = run(source, *options, "--output", str(target), str(HERE / name))
    assert (done.exit_code, done.stdout) == (0, ""), done.output
    return load(target, [], {}).gateway, done


def noted(done: Result) -> list[str]:
    """Return the items that notes are about, each once."""
    items = re.findall(r"^note: (.+?): ", done.stderr, re.MULTILINE)
    assert len(done.stderr.splitlines()) == len(items)
    return list(dict.fromkeys(items))


def test_litellm_deployments_become_workers_and_routes(tmp_path: Path) -> None:
    gateway, done = written(tmp_path, "litellm", "litellm.yaml")
    llama, qwen = "meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen3-8B"
    found = [
        (each.id, each.url, each.model, each.dialect, each.capacity, each.api_key_env)
        for each in gateway.workers
    ]
    assert found == [
        ("big", "http://10.0.0.1:8000", llama, "vllm", 3, "VLLM_KEY"),
        ("10.0.0.2:8000", "http://10.0.0.2:8000", llama, "vllm", 1, "VLLM_KEY"),
        ("10.0.0.3:30000", "http://10.0.0.3:30000", qwen, "auto", 1, ""),
        ("10.0.0.4:8080", "http://10.0.0.4:8080", "bge-m3", "auto", 1, "ENGINE_API_KEY"),
    ]
    chat, embed = gateway.routes
    assert (chat.model, chat.aliases) == ("chat", ("default", "gpt-3.5-turbo"))
    assert chat.backends == (Backend(llama, 0.8), Backend(qwen, 0.2))
    assert (embed.model, embed.backends) == ("embed", (Backend("bge-m3", 1.0),))
    assert (gateway.listen, gateway.keys_file) == ("0.0.0.0:4000", "keys.jsonl")
    assert (gateway.route_policy, gateway.max_attempts) == (
        "weighted",
        3,
    )  # the router's own number
    assert (gateway.total_timeout_s, gateway.max_body_bytes) == (300, 16 * 1024 * 1024)
    assert not gateway.allow_unauthenticated
    assert noted(done) == [
        *("general_settings.master_key", "model_list[0].litellm_params.rpm"),
        *("model_list[2].litellm_params.temperature", "model_list[3].litellm_params.api_base"),
        *("model_list[3].litellm_params.api_key", "model_list[5].litellm_params.model"),
        *("model_list[6].litellm_params.model", "router_settings.routing_strategy"),
        *("litellm_settings.drop_params", "litellm_settings.num_retries"),
        *("litellm_settings.success_callback", "litellm_settings.cache"),
        *("litellm_settings.cache_params", "general_settings.database_url"),
        *("general_settings.something_new", "router_settings.num_retries"),
        *("router_settings.retry_after", "router_settings.allowed_fails"),
        *("router_settings.cooldown_time", "router_settings.fallbacks"),
        *("router_settings.redis_host", "router_settings.redis_password", "environment_variables"),
    ]


def test_replicas_behind_a_vllm_router_become_workers(tmp_path: Path) -> None:
    gateway, done = written(tmp_path, "vllm-router", "vllm-plain.sh")
    assert [each.url for each in gateway.workers] == [
        *("http://10.0.0.1:8000", "http://10.0.0.2:8000"),
        *("http://[fd00::3]:8000", "http://10.0.0.4:8000"),
    ]
    assert {
        (each.model, each.dialect, each.capacity, each.api_key_env, each.asked)
        for each in gateway.workers
    } == {("auto", "vllm", 1, "VLLM_KEY", "vllm")}
    assert {(each.poll_interval_s, each.poll_timeout_s) for each in gateway.workers} == {(10, 3)}
    assert (gateway.poll_miss_limit, gateway.poll_hit_limit) == (2, 1)
    assert (gateway.listen, gateway.health_listen) == ("0.0.0.0:30000", "0.0.0.0:29000")
    assert (gateway.route_policy, gateway.max_attempts) == ("weighted", 3)
    assert (gateway.total_timeout_s, gateway.log_level) == (900, "warning")
    assert noted(done) == [
        *("--intra-node-data-parallel-size", "--api-key", "--retry-max-retries"),
        *("--retry-initial-backoff-ms", "--cb-failure-threshold", "--queue-size"),
        *("--max-concurrent-requests", "--request-id-headers"),
    ]


def test_prefill_and_decode_of_a_vllm_router_become_roles_and_a_route(tmp_path: Path) -> None:
    gateway, done = written(tmp_path, "vllm-router", "vllm-pd.sh", "--model", "llama")
    assert [
        (each.id, each.role, each.connector, each.bootstrap_port) for each in gateway.workers
    ] == [
        ("10.0.1.1:8100", "prefill", "mooncake", 9001),
        ("10.0.1.2:8100", "prefill", "mooncake", 8998),
        ("10.0.2.1:8200", "decode", "mooncake", 8998),
        ("10.0.2.2:8200", "decode", "mooncake", 8998),
    ]
    assert [(each.model, each.targets) for each in gateway.routes] == [
        ("llama", ("disaggregated",))
    ]
    assert (gateway.listen, gateway.route_policy) == ("127.0.0.1:30000", "affinity")
    assert noted(done) == ["--policy", "--prefill-policy"]


def test_prefill_and_decode_of_an_sglang_router_become_roles_and_a_route(tmp_path: Path) -> None:
    gateway, done = written(tmp_path, "sglang-router", "sglang-pd.sh")
    assert [(each.id, each.role, each.dialect, each.connector) for each in gateway.workers] == [
        ("10.1.0.1:30001", "prefill", "sglang", "bootstrap"),
        ("10.1.0.2:30001", "prefill", "sglang", "bootstrap"),
        ("10.1.1.1:30002", "decode", "sglang", "bootstrap"),
    ]
    assert [(each.model, each.targets) for each in gateway.routes] == [
        ("Qwen/Qwen3-8B", ("disaggregated",))
    ]
    assert (gateway.route_policy, gateway.max_attempts) == ("power_of_two", 1)
    assert (gateway.drain_deadline_s, gateway.otel_endpoint) == (60, "http://collector:4318")
    assert noted(done) == [
        *("--cache-threshold", "--balance-abs-threshold", "--balance-rel-threshold"),
        *("--tokenizer-path", "--enable-trace"),
    ]


def test_smg_in_kubernetes_becomes_a_source_of_pods(tmp_path: Path) -> None:
    gateway, done = written(tmp_path, "sglang-router", "smg-kubernetes.sh")
    [pods] = gateway.kubernetes
    assert (pods.namespace, pods.selector, pods.port) == ("inference", "app=engine,tier=gpu", 8000)
    assert (pods.dialect, pods.model) == ("vllm", "auto")
    assert [(each.model, each.aliases) for each in gateway.routes] == [
        ("meta-llama/Llama-3.1-8B-Instruct", ("chat",))
    ]
    assert (gateway.keys_file, gateway.route_policy) == ("keys.jsonl", "least_tokens")
    assert gateway.gap_timeout_s == 45
    assert noted(done) == [
        *("--tenant-api-key", "--policy", "--enable-mesh", "--mesh-port", "--mesh-peer-urls"),
        "--no-such-flag",
    ]


def test_values_of_a_helm_chart_become_a_source_of_pods(tmp_path: Path) -> None:
    gateway, done = written(tmp_path, "production-stack", "stack-values.yaml")
    [pods] = gateway.kubernetes
    assert (pods.namespace, pods.selector, pods.port) == (
        *("", "environment=production,release=stack"),
        8000,
    )
    assert (pods.dialect, pods.api_key_env, pods.poll_interval_s) == ("vllm", "VLLM_API_KEY", 15)
    assert [(each.model, each.aliases) for each in gateway.routes] == [
        ("meta-llama/Llama-3.1-8B-Instruct", ("chat",))
    ]
    assert (gateway.listen, gateway.keys_file) == ("0.0.0.0:8001", "keys.jsonl")
    assert (gateway.route_policy, gateway.log_level) == ("affinity", "debug")
    assert gateway.otel_endpoint == "http://otel-collector:4318"
    assert noted(done) == [
        *("servingEngineSpec.modelSpec", "routerSpec.repository", "routerSpec.tag"),
        *("routerSpec.replicaCount", "routerSpec.servicePort", "routerSpec.resources"),
        *("cacheserverSpec", "servingEngineSpec.vllmApiKey", "routerSpec.routingLogic"),
        *("routerSpec.sessionKey", "routerSpec.requestStatsWindow"),
        *("routerSpec.extraArgs --lmcache-worker-timeout", "routerSpec.otel.serviceName"),
        "routerSpec.otel.endpoint",
    ]


def test_a_dynamic_configuration_in_json_has_no_notes(tmp_path: Path) -> None:
    gateway, done = written(tmp_path, "production-stack", "stack-dynamic.json", "--strict")
    assert [(each.id, each.model, each.capacity) for each in gateway.workers] == [
        ("localhost:9001", "facebook/opt-125m", 1),
        ("localhost:9002", "meta-llama/Llama-3.1-8B-Instruct", 1),
        ("localhost:9003", "facebook/opt-125m", 1),
    ]
    assert (gateway.route_policy, gateway.allow_unauthenticated) == ("weighted", True)
    assert noted(done) == []


def test_a_dynamic_configuration_in_yaml_lists_engines_by_model(tmp_path: Path) -> None:
    gateway, done = written(tmp_path, "production-stack", "stack-dynamic.yaml")
    assert [(each.url, each.model) for each in gateway.workers] == [
        ("http://10.0.0.15:8000", "facebook/bart-large-mnli"),
        ("http://10.0.0.16:8000", "facebook/bart-large-mnli"),
        ("https://vision.internal/engines/blip", "facebook/blip"),
    ]
    assert [(each.model, each.aliases) for each in gateway.routes] == [
        ("facebook/bart-large-mnli", ("text",)),
        ("facebook/blip", ("image",)),
    ]
    assert noted(done) == ["callbacks"]


def test_labels_of_static_engines_become_roles(tmp_path: Path) -> None:
    gateway, done = written(tmp_path, "production-stack", "stack-router.sh")
    assert [(each.id, each.role, each.connector) for each in gateway.workers] == [
        ("10.0.0.1:8000", "prefill", "nixl"),
        ("10.0.0.2:8000", "decode", "nixl"),
        ("10.0.0.3:8000", "decode", "nixl"),
    ]
    assert [(each.model, each.targets) for each in gateway.routes] == [
        ("llama3", ("disaggregated",))
    ]
    assert noted(done) == ["--routing-logic", "--log-stats", "--sentry-dsn"]


SAMPLES = [
    *(("litellm", "litellm.yaml"), ("vllm-router", "vllm-plain.sh")),
    *(("vllm-router", "vllm-pd.sh"), ("sglang-router", "sglang-pd.sh")),
    *(("sglang-router", "smg-kubernetes.sh"), ("production-stack", "stack-values.yaml")),
    *(("production-stack", "stack-dynamic.yaml"), ("production-stack", "stack-router.sh")),
]
each_sample = pytest.mark.parametrize(("source", "name"), SAMPLES)


@each_sample
def test_every_note_stands_in_the_file_and_on_stderr(source: str, name: str) -> None:
    done = run(source, str(HERE / name))
    unfolded = re.sub(r"\n#   ", " ", done.stdout)
    notes = done.stderr.splitlines()
    assert notes
    assert sorted(notes) == sorted(re.findall(r"^# (note: .*)$", unfolded, re.MULTILINE))


@each_sample
def test_strictly_a_note_is_an_error_and_nothing_is_written(
    tmp_path: Path, source: str, name: str
) -> None:
    target = tmp_path / "gateway.toml"
    done = run(source, "--strict", "--output", str(target), str(HERE / name))
    assert (done.exit_code, done.stdout, target.exists()) == (1, "", False)
    assert re.fullmatch(
        r"pointsman: nothing is written: \d+ notes?, with --strict", done.stderr.splitlines()[-1]
    )


@each_sample
def test_no_secret_is_copied(source: str, name: str) -> None:
    done = run(source, str(HERE / name))
    for secret in ("not-a-real-key", "not-the-master-key", "secret-value", "k@sentry"):
        assert secret not in done.output + done.stderr


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    target = tmp_path / "gateway.toml"
    target.write_text("precious")
    done = run("litellm", str(HERE / "litellm.yaml"), "--output", str(target))
    assert (done.exit_code, target.read_text()) == (1, "precious")
    assert done.stderr.splitlines()[-1] == f"pointsman: {target}: File exists"


def test_flags_can_stand_on_the_command_line(tmp_path: Path) -> None:
    target = tmp_path / "gateway.toml"
    flags = ("--worker-urls", "10.0.0.1:8000", "--policy=power_of_two")
    assert run("vllm-router", "--output", str(target), "--", *flags).exit_code == 0
    gateway = load(target, [], {}).gateway
    assert [each.url for each in gateway.workers] == ["http://10.0.0.1:8000"]
    assert gateway.route_policy == "power_of_two"


def test_the_command_line_has_the_command() -> None:
    from pointsman.cli import app

    assert "import" in typer.main.get_command(app).commands  # type: ignore[attr-defined]
