"""The configuration: what it accepts, how layers beat each other, and every message of refusal."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from pointsman import config
from pointsman.cli_config import config_app
from pointsman.config import (
    Address,
    Config,
    ConfigError,
    DnsSource,
    GatewayConfig,
    KubernetesSource,
    LearnedAcceptor,
    Mount,
    StaticWorker,
    TokenizerFile,
    WorkerFile,
    load,
)
from pointsman.domain.routes import Backend, Route, Step, StreamHold
from pointsman.domain.worker import Role

LOOPBACK = 'listen = "127.0.0.1:0"'
CHAT = '[[gateway.routes]]\nmodel = "chat"\n'
WORKER = '[[gateway.workers]]\nid = "a"\nurl = "http://h:8000"\nmodel = "m"\n'
REFERENCE = Path(__file__).parents[2] / "docs" / "config.md"


def read(tmp_path: Path, text: str, *sets: str, **environ: str) -> Config:
    file = tmp_path / "pointsman.toml"
    file.write_text(text, encoding="utf-8")
    return load(file, sets, environ)


def gateway(tmp_path: Path, lines: str) -> GatewayConfig:
    return read(tmp_path, f"[gateway]\n{LOOPBACK}\n{lines}").gateway


# ------------------------------------------------------------------ what is accepted


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("pages", "expected a path such as /pages"),
        ("/pages/", "expected a path such as /pages"),
        ("/admin", "/admin is served already"),
        ("/admin/v2", "/admin is served already"),
        ("/v1", "/v1/models is served already"),
        ("/v1/chat/completions", "/v1/chat/completions is served already"),
        ("/mine", "it is there already"),
    ],
)
def test_a_mount_takes_no_path_that_is_served_already(tmp_path: Path, path: str, why: str) -> None:
    mount = '[[gateway.mounts]]\npath = "{}"\napp = "mine:app"\n'
    with pytest.raises(ConfigError, match=re.escape(why)):
        gateway(tmp_path, mount.format("/mine") + mount.format(path))
    assert gateway(tmp_path, mount.format("/mine")).mounts == (Mount("/mine", "mine:app"),)


def test_keys_make_an_address_beyond_loopback_fit_to_listen_on(tmp_path: Path) -> None:
    assert read(tmp_path, '[gateway]\nlisten = ":0"\nkeys_file = "keys.jsonl"').gateway.keys_file


def test_the_options_that_changed_are_told_by_whether_they_need_a_restart() -> None:
    old, new = GatewayConfig(), GatewayConfig(listen=":1", max_attempts=2, routes=(Route("m"),))
    assert config.changed_options(old, new) == (["max_attempts", "routes"], ["listen"])
    assert config.changed_options(old, old) == ([], [])


def test_the_defaults_are_those_of_the_contract() -> None:
    found = load(None, [], {"TL_GATEWAY__ALLOW_UNAUTHENTICATED": "true"}).gateway
    assert found == GatewayConfig(allow_unauthenticated=True)
    assert (found.listen, found.health_listen, found.registry_listen) == (
        ":8080",
        ":9464",
        ":50060",
    )
    assert (found.pepper_env, found.key_cache_ttl_s) == ("TL_GATEWAY_PEPPER", 5.0)
    assert (found.cache_entries, found.cache_ttl_s) == (4096, 300.0)
    assert (found.heartbeat_miss_limit, found.route_policy) == (3, "affinity")
    assert (found.affinity_load_factor, found.drain_deadline_s) == (1.25, 30.0)
    assert (found.response_model, found.hold_bytes) == ("served", 1 << 20)
    assert (found.max_body_bytes, found.tie_break, found.affinity_bytes) == (
        64 << 20,
        "smallest",
        64,
    )
    assert (found.poll_miss_limit, found.poll_hit_limit) == (3, 2)
    assert found.paths == (
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/responses/input_tokens",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/embeddings",
        "/v1/rerank",
        "/v2/rerank",
        "/rerank",
        "/v1/score",
        "/score",
        "/classify",
        "/pooling",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/tokenize",
        "/detokenize",
    )


def test_a_file_sets_options_workers_and_routes(tmp_path: Path) -> None:
    found = gateway(
        tmp_path,
        """
        max_attempts = 2
        gap_timeout_s = 30
        tie_break = "salted"
        paths = ["/v1/chat/completions"]
        [[gateway.workers]]
        id = "a"
        url = "http://10.0.0.7:8000"
        model = "m"
        capacity = 4
        [[gateway.routes]]
        model = "chat"
        aliases = ["c"]
        targets = ["disaggregated", "unified"]
        backends = [{ model = "m", weight = 0.9 }, { model = "n", weight = 0.1 }]
        default_max_tokens = 64
        """,
    )
    assert (found.max_attempts, found.gap_timeout_s, found.tie_break) == (2, 30.0, "salted")
    assert type(found.gap_timeout_s) is float
    assert found.paths == ("/v1/chat/completions",)
    assert found.workers == (StaticWorker("a", "http://10.0.0.7:8000", model="m", capacity=4),)
    assert found.routes == (
        Route(
            "chat",
            aliases=("c",),
            targets=("disaggregated", "unified"),
            backends=(Backend("m", 0.9), Backend("n", 0.1)),
            default_max_tokens=64,
        ),
    )


def test_the_section_ext_is_free(tmp_path: Path) -> None:
    found = read(tmp_path, f"[gateway]\n{LOOPBACK}\n[ext.mine]\nx = [1]", TL_EXT__Y="1")
    assert found.ext == {"mine": {"x": [1]}}


def test_a_byte_order_mark_is_no_part_of_a_key(tmp_path: Path) -> None:
    assert read(tmp_path, f"\ufeff[gateway]\n{LOOPBACK}").gateway.listen == "127.0.0.1:0"


def test_a_listener_beyond_loopback_is_fine_when_it_is_wanted(tmp_path: Path) -> None:
    found = read(tmp_path, '[gateway]\nlisten = "0.0.0.0:80"\nallow_unauthenticated = true')
    assert not Address.parse(found.gateway.listen).is_loopback


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "127.8.9.1:1", "localhost:80", "[::1]:80"])
def test_a_loopback_listener_needs_no_keys(tmp_path: Path, listen: str) -> None:
    assert read(tmp_path, f'[gateway]\nlisten = "{listen}"').gateway.listen == listen


# ------------------------------------------------------------------ layers


def test_the_environment_beats_the_file_and_set_beats_both(tmp_path: Path) -> None:
    text = f"[gateway]\n{LOOPBACK}\nmax_attempts = 2\nhold_bytes = 2\naffinity_bytes = 2"
    found = read(
        tmp_path,
        text,
        "gateway.affinity_bytes=4",
        TL_GATEWAY__AFFINITY_BYTES="3",
        TL_GATEWAY__HOLD_BYTES="3",
    ).gateway
    assert (found.max_attempts, found.hold_bytes, found.affinity_bytes) == (2, 3, 4)


def test_the_last_of_two_sets_counts(tmp_path: Path) -> None:
    text = f"[gateway]\n{LOOPBACK}"
    found = read(tmp_path, text, "gateway.max_attempts=4", "gateway.max_attempts=5")
    assert found.gateway.max_attempts == 5


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("allow_unauthenticated", "true", True),
        ("allow_unauthenticated", "TRUE", True),
        ("allow_unauthenticated", "1", True),
        ("allow_unauthenticated", "false", False),
        ("allow_unauthenticated", "0", False),
        ("max_attempts", "7", 7),
        ("max_attempts", "+7", 7),
        ("gap_timeout_s", "7", 7.0),
        ("gap_timeout_s", "0.5", 0.5),
        ("gap_timeout_s", "1e3", 1000.0),
        ("state_dir", "12", "12"),
        ("state_dir", "", ""),
        ("state_dir", "a=b", "a=b"),
        ("route_policy", "weighted", "weighted"),
        ("response_model", "public", "public"),
    ],
)
def test_text_is_read_by_the_declared_type(
    tmp_path: Path, name: str, text: str, value: object
) -> None:
    toml = f"[gateway]\n{LOOPBACK}"
    by_environment = read(tmp_path, toml, **{f"TL_GATEWAY__{name.upper()}": text})
    by_set = read(tmp_path, toml, f"gateway.{name}={text}")
    assert getattr(by_environment.gateway, name) == value
    assert getattr(by_set.gateway, name) == value
    assert type(getattr(by_set.gateway, name)) is type(value)


def test_variables_without_two_underscores_are_none_of_ours(tmp_path: Path) -> None:
    toml = f"[gateway]\n{LOOPBACK}"
    found = read(tmp_path, toml, TL_GATEWAY_PEPPER="x", TL_API_KEY="y", TL_X="z", PATH="p")
    assert found.gateway == gateway(tmp_path, "")


# ------------------------------------------------------------------ refusals


def refusal(tmp_path: Path, text: str, *sets: str, **environ: str) -> str:
    with pytest.raises(ConfigError) as refused:
        read(tmp_path, text, *sets, **environ)
    return str(refused.value)


UNAUTHENTICATED = (
    "without keys whoever can reach this address may use it. Set gateway.listen to a loopback "
    'address such as "127.0.0.1:8080", give it keys with gateway.keys_file, or say that this is wanted with '
    "gateway.allow_unauthenticated = true"
)
ADDRESS = "expected host:port, :port or [IPv6]:port"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        # names
        (
            "max_atempts = 2",
            "gateway.max_atempts: unknown key; the nearest valid name is max_attempts",
        ),
        (
            WORKER + "capcity = 2",
            "gateway.workers[0].capcity: unknown key; the nearest valid name is capacity",
        ),
        (
            CHAT + 'alias = ["x"]',
            "gateway.routes[0].alias: unknown key; the nearest valid name is aliases",
        ),
        (
            CHAT + 'backends = [{ model = "m", weigth = 1.0 }]',
            "gateway.routes[0].backends[0].weigth: unknown key; the nearest valid name is weight",
        ),
        (
            '[[gateway.routes]]\naliases = ["x"]',
            "gateway.routes[0].model is missing: expected a string",
        ),
        (
            '[[gateway.workers]]\nid = "a"\nmodel = "m"',
            "gateway.workers[0].url is missing: expected a string",
        ),
        # types and ranges
        ('max_attempts = "2"', 'gateway.max_attempts = "2": expected an integer of at least 1'),
        ("max_attempts = 0", "gateway.max_attempts = 0: expected an integer of at least 1"),
        ("max_attempts = 2.5", "gateway.max_attempts = 2.5: expected an integer of at least 1"),
        ("max_attempts = true", "gateway.max_attempts = true: expected an integer of at least 1"),
        (
            "max_attempts = 2026-01-01",
            "gateway.max_attempts = 2026-01-01: expected an integer of at least 1",
        ),
        (
            "affinity_load_factor = 0.9",
            "gateway.affinity_load_factor = 0.9: expected a number of at least 1",
        ),
        (
            "affinity_load_factor = inf",
            "gateway.affinity_load_factor = Infinity: expected a number of at least 1",
        ),
        ("gap_timeout_s = nan", "gateway.gap_timeout_s = NaN: expected a number above 0"),
        ("gap_timeout_s = 0", "gateway.gap_timeout_s = 0: expected a number above 0"),
        ("key_cache_ttl_s = 6", "gateway.key_cache_ttl_s = 6: expected a number in 0..5"),
        ("state_dir = 8080", "gateway.state_dir = 8080: expected a string"),
        ("allow_unauthenticated = 1", "gateway.allow_unauthenticated = 1: expected true or false"),
        ('tie_break = "large"', 'gateway.tie_break = "large": expected "salted" or "smallest"'),
        ('paths = "/v1"', 'gateway.paths = "/v1": expected a list of strings'),
        ("paths = [1]", "gateway.paths = [1]: expected a list of strings"),
        ("routes = 1", "gateway.routes = 1: expected a list of tables"),
        ("workers = [1]", "gateway.workers[0] = 1: expected a table"),
        (
            CHAT + "default_max_tokens = 1.5",
            "gateway.routes[0].default_max_tokens = 1.5: expected an integer",
        ),
        (
            CHAT + 'backends = [{ model = "m", weight = inf }]',
            "gateway.routes[0].backends[0].weight = Infinity: expected a number",
        ),
        (
            '[[gateway.workers]]\nid = ""\nurl = "http://h"\nmodel = "m"',
            'gateway.workers[0].id = "": expected a string that is not empty',
        ),
        (
            WORKER + 'role = "boss"',
            'gateway.workers[0].role = "boss": expected "unified" or "prefill" or "decode"',
        ),
        (
            "hold_bytes = " + f'"{"x" * 200}"',
            f'gateway.hold_bytes = "{"x" * 76}...: expected an integer of at least 0',
        ),
        # grammars
        (
            'health_listen = "9464"',
            f'gateway.health_listen = "9464": the port is missing; {ADDRESS}',
        ),
        (
            'health_listen = ":65536"',
            f'gateway.health_listen = ":65536": the port is not a number in 0..65535; {ADDRESS}',
        ),
        (
            'health_listen = ":http"',
            f'gateway.health_listen = ":http": the port is not a number in 0..65535; {ADDRESS}',
        ),
        (
            'registry_listen = "::1:80"',
            f'gateway.registry_listen = "::1:80": an IPv6 address stands in brackets; {ADDRESS}',
        ),
        (
            'registry_listen = "[x]:80"',
            f'gateway.registry_listen = "[x]:80": no IPv6 address between the brackets; {ADDRESS}',
        ),
        (
            'registry_listen = "http//h:80"',
            f'gateway.registry_listen = "http//h:80": not a host name; {ADDRESS}',
        ),
        ('paths = ["v1"]', 'gateway.paths[0] = "v1": expected a path such as /v1/chat/completions'),
        (
            'paths = ["/a?b"]',
            'gateway.paths[0] = "/a?b": expected a path such as /v1/chat/completions',
        ),
        ('paths = ["/a", "/a"]', 'gateway.paths[1] = "/a": it is there already'),
        (
            'route_policy = "afinity"',
            'gateway.route_policy = "afinity": no such policy; the nearest valid name is affinity '
            "(of affinity, cache_aware, kv_cost, least_delay, least_outstanding, least_tokens, peak_ewma, "
            "power_of_two, prefix_hash, sticky_until_saturated, weighted)",
        ),
        # certificates
        ('tls_cert = "c"', 'gateway.tls_key = "": needed beside tls_cert'),
        ('tls_key = "k"', 'gateway.tls_key = "k": of no use without tls_cert'),
        ('tls_client_ca = "ca"', 'gateway.tls_client_ca = "ca": of no use without tls_cert'),
        (
            'registry_tls_cert = "c"',
            'gateway.registry_tls_key = "": needed beside registry_tls_cert',
        ),
        (
            'registry_client_ca = "ca"',
            'gateway.registry_client_ca = "ca": of no use without registry_tls_cert',
        ),
        ('upstream_cert = "c"', 'gateway.upstream_key = "": needed beside upstream_cert'),
        (
            'upstream_ca = "no/such/ca.pem"',
            'gateway.upstream_ca = "no/such/ca.pem": No such file or directory',
        ),
        # workers
        (
            WORKER.replace("http://h", "h"),
            'gateway.workers[0].url = "h:8000": expected http:// or https://, '
            "then host:port or host:port/path",
        ),
        (
            WORKER.replace("http:", "grpc:"),
            'gateway.workers[0].url = "grpc://h:8000": expected http:// or https://, '
            "then host:port or host:port/path",
        ),
        (
            WORKER.replace("h:8000", "h:8000/?x=1"),
            'gateway.workers[0].url = "http://h:8000/?x=1": only a host, a port and a path can stand in it',
        ),
        (
            WORKER.replace("h:8000", "me:secret@h:8000"),
            'gateway.workers[0].url = "http://me:secret@h:8000": only a host, a port and a path can stand in it',
        ),
        (
            WORKER.replace("h:8000", "h:80000"),
            'gateway.workers[0].url = "http://h:80000": Port out of range 0-65535',
        ),
        (WORKER + WORKER, "gateway.workers[1]: worker_id 'a' is taken"),
        (
            WORKER.replace('"a"', '"a b"'),
            "gateway.workers[0]: worker_id is not 1 to 256 printable ASCII characters",
        ),
        (
            WORKER + 'role = "decode"',
            'gateway.workers[0].kv_address = "": a decode worker needs one, or the `dialect` of its engine',
        ),
        # routes
        (CHAT + CHAT, "gateway.routes[1].model: 'chat' is already the name of routes[0].model"),
        (
            CHAT + 'backends = [{ model = "m", weight = -1.0 }]',
            "gateway.routes[0].backends[0].weight: must be a number of 0 or more",
        ),
        (
            CHAT
            + 'cascade = [{ model = "s", accept_if = "score > 0.5", acceptor = "x" }, { model = "l" }]',
            "gateway.routes[0].cascade[0].acceptor: there is no acceptor 'x' in `gateway.acceptors`; there are: none",
        ),
        (
            '[[gateway.tokenizers]]\nmodel = "m"\nfile = "a"\n' * 2,
            "gateway.tokenizers[1].model: 'm' is there already",
        ),
        # features of the contract that do not exist yet
        ('upstream = "u"', 'gateway.upstream = "u": not served by this version; leave it empty'),
        ('usage_db = "k"', 'gateway.usage_db = "k": not served by this version; leave it empty'),
        (
            'policy_file = "p"',
            'gateway.policy_file = "p": not served by this version; leave it empty',
        ),
        ('usage_db = "d"', 'gateway.usage_db = "d": not served by this version; leave it empty'),
    ],
)
def test_the_message_names_the_key_and_what_is_allowed(
    tmp_path: Path, lines: str, message: str
) -> None:
    assert refusal(tmp_path, f"[gateway]\n{LOOPBACK}\n{lines}") == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[gatway]", "gatway: unknown section; the nearest valid name is gateway"),
        ("listen = 1", "listen: unknown section; the nearest valid name is gateway"),
        ("gateway = 1", "gateway = 1: expected a table"),
        ("[gateway]\nlisten = 8080", "gateway.listen = 8080: expected a string"),
        ("ext = 1\n[gateway]\n" + LOOPBACK, "ext = 1: expected a table"),
        ("", f'gateway.listen = ":8080": {UNAUTHENTICATED}'),
        ('[gateway]\nlisten = "0.0.0.0:80"', f'gateway.listen = "0.0.0.0:80": {UNAUTHENTICATED}'),
        ('[gateway]\nlisten = "myhost:80"', f'gateway.listen = "myhost:80": {UNAUTHENTICATED}'),
        ('[gateway]\nlisten = "[::]:80"', f'gateway.listen = "[::]:80": {UNAUTHENTICATED}'),
    ],
)
def test_a_whole_file_is_refused_with_what_is_wrong(
    tmp_path: Path, text: str, message: str
) -> None:
    assert refusal(tmp_path, text) == message


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "TL_GATEWAY__LISTN",
            "x",
            "TL_GATEWAY__LISTN: unknown key; the nearest valid name is listen",
        ),
        (
            "TL_GATWAY__LISTEN",
            "x",
            "TL_GATWAY__LISTEN: unknown section; the nearest valid name is GATEWAY",
        ),
        (
            "TL_GATEWAY__MAX_ATTEMPTS",
            "two",
            'gateway.max_attempts (from TL_GATEWAY__MAX_ATTEMPTS) = "two": expected an integer of at least 1',
        ),
        (
            "TL_GATEWAY__MAX_ATTEMPTS",
            "9" * 5000,
            f'gateway.max_attempts (from TL_GATEWAY__MAX_ATTEMPTS) = "{"9" * 76}...: '
            "expected an integer of at least 1",
        ),
        (
            "TL_GATEWAY__GAP_TIMEOUT_S",
            "nan",
            'gateway.gap_timeout_s (from TL_GATEWAY__GAP_TIMEOUT_S) = "nan": expected a number above 0',
        ),
        (
            "TL_GATEWAY__GAP_TIMEOUT_S",
            "1.2.3",
            'gateway.gap_timeout_s (from TL_GATEWAY__GAP_TIMEOUT_S) = "1.2.3": expected a number above 0',
        ),
        (
            "TL_GATEWAY__GAP_TIMEOUT_S",
            "1e999",
            "gateway.gap_timeout_s (from TL_GATEWAY__GAP_TIMEOUT_S) = Infinity: expected a number above 0",
        ),
        (
            "TL_GATEWAY__ALLOW_UNAUTHENTICATED",
            "yes",
            "gateway.allow_unauthenticated (from TL_GATEWAY__ALLOW_UNAUTHENTICATED) = "
            '"yes": expected true or false',
        ),
        (
            "TL_GATEWAY__ROUTES",
            "[]",
            "TL_GATEWAY__ROUTES: gateway.routes is a list; lists belong in the configuration file",
        ),
        (
            "TL_GATEWAY__USAGE_DB",
            "k",
            'gateway.usage_db (from TL_GATEWAY__USAGE_DB) = "k": not served by this version; leave it empty',
        ),
        (
            "TL_GATEWAY__LISTEN",
            ":1",
            f'gateway.listen (from TL_GATEWAY__LISTEN) = ":1": {UNAUTHENTICATED}',
        ),
    ],
)
def test_a_variable_is_refused_by_its_name(
    tmp_path: Path, name: str, value: str, message: str
) -> None:
    assert refusal(tmp_path, f"[gateway]\n{LOOPBACK}", **{name: value}) == message


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("gateway.listen", "--set gateway.listen: expected gateway.key=value"),
        ("listen=x", "--set listen=x: expected gateway.key=value"),
        (
            "gatway.listen=x",
            "--set gatway.listen=x: unknown section; the nearest valid name is gateway",
        ),
        (
            "gateway.listn=x",
            "--set gateway.listn=x: unknown key; the nearest valid name is listen",
        ),
        (
            "gateway.paths=/v1",
            "--set gateway.paths=/v1: gateway.paths is a list; lists belong in the configuration file",
        ),
        (
            "gateway.max_attempts=-1",
            "gateway.max_attempts (from --set) = -1: expected an integer of at least 1",
        ),
    ],
)
def test_a_set_is_refused_with_what_is_wrong(tmp_path: Path, assignment: str, message: str) -> None:
    assert refusal(tmp_path, f"[gateway]\n{LOOPBACK}", assignment) == message


def test_the_default_configuration_says_what_to_set() -> None:
    with pytest.raises(ConfigError, match=re.escape("gateway.allow_unauthenticated = true")):
        load(None, [], {})


def test_a_missing_file_a_folder_and_a_broken_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: No such file or directory"):
        load(tmp_path / "none.toml", [], {})
    with pytest.raises(ConfigError, match="Is a directory"):
        load(tmp_path, [], {})
    assert "not valid TOML: " in refusal(tmp_path, "[gateway")
    latin = tmp_path / "latin.toml"
    latin.write_bytes(b"# \xe9")
    with pytest.raises(ConfigError, match="not a UTF-8 text"):
        load(latin, [], {})


# ------------------------------------------------------------------ addresses and workers


@pytest.mark.parametrize(
    ("text", "address", "loopback"),
    [
        (":8080", Address("", 8080), False),
        ("0.0.0.0:1", Address("0.0.0.0", 1), False),
        ("127.0.0.1:0", Address("127.0.0.1", 0), True),
        ("localhost:80", Address("localhost", 80), True),
        ("host.example:65535", Address("host.example", 65535), False),
        ("[::1]:80", Address("::1", 80), True),
        ("[::]:80", Address("::", 80), False),
    ],
)
def test_an_address_is_parsed_and_written_again(
    text: str, address: Address, loopback: bool
) -> None:
    parsed = Address.parse(text)
    assert (parsed, str(parsed), parsed.is_loopback) == (address, text, loopback)


@pytest.mark.parametrize(
    ("url", "address", "base_path"),
    [
        ("http://h:8000", "h:8000", ""),
        ("http://h:8000/", "h:8000", ""),
        ("http://h", "h:80", ""),
        ("http://h:8000/a/b/", "h:8000", "/a/b"),
        ("http://[::1]:8000", "[::1]:8000", ""),
        ("https://h", "https://h:443", ""),
        ("https://[::1]:8000/a/", "https://[::1]:8000", "/a"),
    ],
)
def test_a_static_worker_is_a_worker_that_never_expires(
    url: str, address: str, base_path: str
) -> None:
    worker = StaticWorker("a", url, model="m", capacity=3).worker()
    assert (worker.http_address, worker.base_path) == (address, base_path)
    assert (worker.id, worker.model, worker.role, worker.static) == ("a", "m", Role.UNIFIED, True)
    assert worker.kv_total_blocks == 3
    assert worker.tls is url.startswith("https")


# ------------------------------------------------------------------ what is printed


def test_the_reference_page_is_fresh() -> None:
    assert REFERENCE.read_text(encoding="utf-8") == config.reference(), (
        "run `pointsman config reference > docs/config.md`"
    )


def test_every_option_is_on_the_reference_page_with_its_documentation() -> None:
    rows = re.findall(r"^\| `(\w+)` \| .+ \| .+ \| .* \| (.+) \|$", config.reference(), re.M)
    expected = [
        key
        for kind in (
            *(GatewayConfig, StaticWorker, Mount, LearnedAcceptor, TokenizerFile),
            *(DnsSource, WorkerFile, KubernetesSource),
            *(Route, Backend, Step, StreamHold),
        )
        for key in kind.__struct_fields__
    ]
    assert sorted(key for key, _ in rows) == sorted(expected)
    assert all(doc.strip() for _, doc in rows)


def test_the_file_on_the_reference_page_loads(tmp_path: Path) -> None:
    match = re.search(r"```toml\n(.*?)```", config.reference(), re.S)
    assert match is not None
    assert read(tmp_path, match[1]).gateway.workers[0].id == "a"


def test_the_schema_documents_every_option_and_its_unit() -> None:
    definitions = config.schema()["$defs"]
    for kind in (
        *(GatewayConfig, StaticWorker, Mount, LearnedAcceptor, TokenizerFile),
        *(DnsSource, WorkerFile, KubernetesSource),
        *(Route, Backend, Step, StreamHold),
    ):
        made = definitions[kind.__name__]
        assert made["additionalProperties"] is False
        assert set(made["properties"]) == set(kind.__struct_fields__)
        assert all(option["description"] for option in made["properties"].values())
    options = definitions["GatewayConfig"]["properties"]
    assert options["max_attempts"]["minimum"] == 1
    assert options["gap_timeout_s"]["x-unit"] == "seconds"
    assert options["tie_break"]["enum"] == ["salted", "smallest"]


def violations(value: Any, rule: dict[str, Any], root: dict[str, Any]) -> list[str]:
    """Check a value against the few keywords of JSON Schema that the schema uses."""
    if "$ref" in rule:
        return violations(value, root["$defs"][rule["$ref"].rpartition("/")[2]], root)
    if "anyOf" in rule:
        branches = [violations(value, branch, root) for branch in rule["anyOf"]]
        return [] if [] in branches else branches[0]
    kinds: dict[str, Any] = {
        "object": dict,
        "array": list,
        "string": str,
        "integer": int,
        "number": (int, float),
        "boolean": bool,
        "null": type(None),
    }
    if "type" in rule and not isinstance(value, kinds[rule["type"]]):
        return [f"{value!r} is no {rule['type']}"]
    found = []
    if "enum" in rule and value not in rule["enum"]:
        found.append(f"{value!r} is not in {rule['enum']}")
    if "minimum" in rule and value < rule["minimum"]:
        found.append(f"{value!r} is too small")
    if "exclusiveMinimum" in rule and value <= rule["exclusiveMinimum"]:
        found.append(f"{value!r} is too small")
    if "maximum" in rule and value > rule["maximum"]:
        found.append(f"{value!r} is too large")
    if "minLength" in rule and len(value) < rule["minLength"]:
        found.append("too short")
    if isinstance(value, list):
        for item in value:
            found += violations(item, rule["items"], root)
    if isinstance(value, dict):
        properties = rule.get("properties", {})
        found += [f"{key} is missing" for key in rule.get("required", []) if key not in value]
        for key, item in value.items():
            if key in properties:
                found += violations(item, properties[key], root)
            elif rule.get("additionalProperties") is False:
                found.append(f"{key} is unknown")
    return found


GOOD = f"""
[gateway]
{LOOPBACK}
gap_timeout_s = 3
{WORKER}
{CHAT}
backends = [{{ model = "m", weight = 1.0 }}]
[ext]
x = 1
"""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("gap_timeout_s = 3", "gap_timeout_s = 0"),
        ("gap_timeout_s = 3", "gap_timeot_s = 3"),
        ("gap_timeout_s = 3", 'tie_break = "x"'),
        ("gap_timeout_s = 3", "max_attempts = 0"),
        ("gap_timeout_s = 3", "key_cache_ttl_s = 6"),
        ('id = "a"', 'id = ""'),
        ('id = "a"', 'role = "unified"'),
        ("weight = 1.0", 'weight = "1"'),
        ("[ext]", "[ex]"),
    ],
)
def test_the_schema_refuses_what_load_refuses(tmp_path: Path, before: str, after: str) -> None:
    schema = config.schema()
    assert violations(tomllib.loads(GOOD), schema, schema) == []
    assert read(tmp_path, GOOD)
    bad = GOOD.replace(before, after)
    assert violations(tomllib.loads(bad), schema, schema)
    assert refusal(tmp_path, bad)


def test_the_defaults_satisfy_the_schema() -> None:
    schema = config.schema()
    assert violations(json.loads(msgspec.json.encode(Config())), schema, schema) == []


def test_the_commands_print_both() -> None:
    runner = CliRunner()
    assert json.loads(runner.invoke(config_app, ["schema"]).stdout) == config.schema()
    assert runner.invoke(config_app, ["reference"]).stdout == config.reference()
