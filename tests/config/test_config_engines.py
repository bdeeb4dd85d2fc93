"""Engines in the configuration: listed one by one or found by sources, with every refusal in its words."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pointsman.config import (
    ConfigError,
    DnsSource,
    EngineOptions,
    GatewayConfig,
    KubernetesSource,
    SourceOptions,
    StaticWorker,
    Unusable,
    WorkerFile,
    changed_options,
    load,
)
from pointsman.control.admin.shapes import WorkerRequest
from pointsman.domain.worker import Role, Worker

ENGINE = '[[gateway.workers]]\nid = "a"\nurl = "http://h:8000"\n'
DNS = '[[gateway.dns]]\nname = "vllm"\nport = 8000\n'
FILE = '[[gateway.worker_files]]\nfile = "engines.json"\n'
PODS = '[[gateway.kubernetes]]\nselector = "app=vllm"\n'
EVERY_ENGINE = {
    "model": "smol",
    "dialect": "vllm",
    "role": "prefill",
    "capacity": 4,
    "poll_interval_s": 0.5,
    "poll_timeout_s": 1.5,
    "api_key_env": "VLLM_KEY",
    "api_key_file": "",
    "connector": "nixl",
    "bootstrap_port": 9000,
}
"""Every key that all engines have, none with its default."""


def gateway(tmp_path: Path, lines: str) -> GatewayConfig:
    file = tmp_path / "pointsman.toml"
    file.write_text(f'[gateway]\nlisten = "127.0.0.1:0"\n{lines}')
    return load(file, [], {}).gateway


def toml(values: dict[str, Any]) -> str:
    return "".join(
        f"{key} = {msgspec.json.encode(value).decode()}\n" for key, value in values.items()
    )


def worker(**keys: Any) -> Worker:
    return msgspec.convert({"id": "a", "url": "http://h:8000", **keys}, StaticWorker).worker()


# ------------------------------------------------------------------ what is accepted


@pytest.mark.parametrize("table", [ENGINE, DNS, FILE, PODS])
def test_every_table_takes_the_keys_that_all_engines_have(tmp_path: Path, table: str) -> None:
    found = gateway(tmp_path, table + toml(EVERY_ENGINE))
    lists: list[Sequence[EngineOptions]] = [
        *(found.workers, found.dns, found.worker_files, found.kubernetes)
    ]
    (engine,) = (each for listed in lists for each in listed)
    assert {key: getattr(engine, key) for key in EVERY_ENGINE} == EVERY_ENGINE


def test_the_defaults_of_a_listed_engine_and_of_a_source(tmp_path: Path) -> None:
    found = gateway(tmp_path, ENGINE + DNS + FILE + PODS)
    common = {
        **{"model": "auto", "role": "unified", "capacity": 0, "connector": ""},
        **{"poll_interval_s": 2.0, "poll_timeout_s": 2.0, "bootstrap_port": 8998},
        **{"api_key_env": "", "api_key_file": "", "kv_ranks": 1},
    }
    source = common | {
        **{"dialect": "auto", "scheme": "http", "path": ""},
        **{"kv_events_port": 0, "kv_replay_port": 0},
    }
    assert msgspec.to_builtins(found.workers[0]) == common | {
        **{"id": "a", "url": "http://h:8000", "dialect": "", "grpc_address": "", "kv_address": ""},
        **{"kv_events": "", "kv_replay": ""},
    }
    assert msgspec.to_builtins(found.dns[0]) == source | {
        **{"name": "vllm", "port": 8000, "record": "address", "interval_s": 5.0}
    }
    assert msgspec.to_builtins(found.worker_files[0]) == source | {"file": "engines.json"}
    assert msgspec.to_builtins(found.kubernetes[0]) == source | {
        **{"namespace": "", "selector": "app=vllm", "inference_pool": "", "port": 0}
    }


def test_sources_of_every_kind_stand_beside_each_other(tmp_path: Path) -> None:
    found = gateway(
        tmp_path,
        DNS
        + DNS.replace("8000", "8001")
        + '[[gateway.dns]]\nname = "_http._tcp.vllm"\nrecord = "srv"\ninterval_s = 1\n'
        + FILE
        + PODS
        + '[[gateway.kubernetes]]\ninference_pool = "pool"\nnamespace = "ai"\nport = 8000\n',
    )
    assert [
        *(each.source for each in found.dns),
        *(each.source for each in found.worker_files),
        *(each.source for each in found.kubernetes),
    ] == [
        "dns vllm:8000",
        "dns vllm:8001",
        "dns _http._tcp.vllm",
        "file engines.json",
        "kubernetes app=vllm",
        "kubernetes ai pool",
    ]


def test_sources_can_change_while_the_gateway_runs() -> None:
    new = GatewayConfig(
        dns=(DnsSource("vllm", 8000),),
        worker_files=(WorkerFile("f"),),
        kubernetes=(KubernetesSource(selector="a=b"),),
        poll_miss_limit=4,
        poll_hit_limit=1,
    )
    live, restart = changed_options(GatewayConfig(), new)
    assert live == ["dns", "worker_files", "kubernetes"]
    assert restart == ["poll_miss_limit", "poll_hit_limit"]


# ------------------------------------------------------------------ the workers that come of it


@pytest.mark.parametrize(
    ("keys", "polled", "dialect", "model"),
    [
        ({}, True, "", ""),
        ({"model": "auto"}, True, "", ""),
        ({"model": "auto", "dialect": ""}, True, "", ""),
        ({"dialect": "vllm"}, True, "vllm", ""),
        ({"model": "m"}, False, "", "m"),
        ({"model": "m", "dialect": ""}, False, "", "m"),
        ({"model": "m", "dialect": "auto"}, True, "", "m"),
        ({"model": "m", "dialect": "tl"}, True, "tl", "m"),
        ({"model": "m", "grpc_address": "h:1"}, False, "tl", "m"),
        ({"model": "m", "kv_address": "h:1"}, False, "tl", "m"),
    ],
)
def test_an_engine_is_asked_where_something_of_it_is_to_be_found_out(
    keys: dict[str, str], polled: bool, dialect: str, model: str
) -> None:
    made = worker(**keys)
    assert (made.polled, made.dialect, made.model) == (polled, dialect, model)
    assert made.up is not polled, "who is asked is up once it has answered"
    assert (made.static, made.source) == (True, "static")


def test_a_worker_has_what_was_configured() -> None:
    made = worker(**EVERY_ENGINE, url="https://[::1]:8443/v/")
    assert (made.http_address, made.tls, made.base_path) == ("https://[::1]:8443", True, "/v")
    assert (made.model, made.dialect, made.role) == ("smol", "vllm", Role.PREFILL)
    assert (made.capacity, made.kv_total_blocks) == (4, 4)
    assert (made.poll_interval_s, made.poll_timeout_s) == (0.5, 1.5)
    assert (made.connector, made.bootstrap) == ("nixl", "[::1]:9000")
    assert made.credentials == b"", "no key is read here"


@pytest.mark.parametrize(("capacity", "weight"), [(0, 1), (1, 1), (7, 7)])
def test_an_engine_weighs_one_where_nobody_says_more(capacity: int, weight: int) -> None:
    made = worker(model="m", capacity=capacity)
    assert (made.capacity, made.kv_total_blocks) == (capacity, weight)


@pytest.mark.parametrize(
    ("keys", "connector", "bootstrap"),
    [
        ({"dialect": "vllm"}, "", ""),
        ({"dialect": "vllm", "connector": "nixl"}, "nixl", ""),
        ({"dialect": "vllm", "role": "prefill", "connector": "mooncake"}, "mooncake", "h:8998"),
        ({"dialect": "vllm", "role": "decode", "connector": "nixl"}, "nixl", ""),
        ({"dialect": "sglang", "role": "prefill"}, "bootstrap", "h:8998"),
        ({"dialect": "sglang", "role": "decode"}, "bootstrap", ""),
        ({"dialect": "sglang"}, "", ""),
        ({"dialect": "llamacpp", "role": "prefill", "connector": "slots"}, "slots", "h:8998"),
        ({"dialect": "llamacpp", "role": "decode"}, "slots", ""),
        ({"dialect": "auto", "role": "prefill"}, "", "h:8998"),
        ({"dialect": "auto", "role": "decode", "connector": "nixl"}, "nixl", ""),
        ({"model": "m", "role": "prefill", "grpc_address": "h:1"}, "", ""),
        ({"dialect": "tl", "role": "decode", "kv_address": "h:1"}, "", ""),
    ],
)
def test_a_connector_is_the_only_one_of_the_dialect_or_the_named_one(
    keys: dict[str, str], connector: str, bootstrap: str
) -> None:
    made = worker(**keys)
    assert (made.connector, made.bootstrap) == (connector, bootstrap)


@pytest.mark.parametrize(
    ("options", "address", "http_address", "base_path"),
    [
        (SourceOptions(), "10.0.0.7:8000", "10.0.0.7:8000", ""),
        (SourceOptions(), "[fd00::7]:8000", "[fd00::7]:8000", ""),
        (SourceOptions(scheme="https"), "h:8000", "https://h:8000", ""),
        (SourceOptions(path="/x/"), "h:8000", "h:8000", "/x"),
    ],
)
def test_a_found_engine_is_where_its_source_says(
    options: SourceOptions, address: str, http_address: str, base_path: str
) -> None:
    made = options.found("a", address, source="dns x", terminating=True)
    assert (made.http_address, made.base_path) == (http_address, base_path)
    assert (made.source, made.terminating, made.polled) == ("dns x", True, True)


def test_labels_of_a_found_engine_come_before_what_its_table_says() -> None:
    labels = {
        **{"model": "smol", "role": "decode", "dialect": "vllm", "scheme": "https", "path": "/x"},
        **{"capacity": "4", "connector": "nixl", "bootstrap_port": "9000"},
    }
    table = DnsSource("vllm", 8000, model="other", api_key_env="KEY")
    found = table.labelled(labels)
    assert {key: str(getattr(found, key)) for key in labels} == labels
    assert found == msgspec.convert(
        msgspec.to_builtins(table) | labels | {"capacity": 4, "bootstrap_port": 9000}, DnsSource
    )


def test_labels_that_mean_nothing_and_those_of_credentials_are_left_alone() -> None:
    table = SourceOptions()
    labels = {"job": "vllm", "__meta": "x", "api_key_env": "PEPPER", "api_key_file": "/key"}
    assert table.labelled({**labels, "poll_interval_s": "0"}) == table


# ------------------------------------------------------------------ refusals

ONE_OF = '"" or "auto" or "llamacpp" or "openai" or "sglang" or "tl" or "vllm"'
OWN = "a {} worker of this dialect is listed in `workers`, or sends heartbeats"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        # each key by itself
        (ENGINE + 'model = ""', '.model = "": expected a string that is not empty'),
        (ENGINE + 'dialect = "vlm"', f'.dialect = "vlm": expected {ONE_OF}'),
        (ENGINE + "capacity = -1", ".capacity = -1: expected an integer in 0..1000000000"),
        (ENGINE + "poll_interval_s = 0", ".poll_interval_s = 0: expected a number in 0.1..3600"),
        (ENGINE + "poll_timeout_s = 0", ".poll_timeout_s = 0: expected a number in 0.1..3600"),
        (
            ENGINE + "bootstrap_port = 65536",
            ".bootstrap_port = 65536: expected an integer in 1..65535",
        ),
        (ENGINE + "api_key = 1", ".api_key: unknown key; the nearest valid name is api_key_env"),
        # what does not go together
        (
            ENGINE + 'api_key_env = "A"\napi_key_file = "b"',
            '.api_key_file = "b": of no use beside `api_key_env`: one of the two',
        ),
        (
            ENGINE + 'model = "m"\nrole = "prefill"',
            '.grpc_address = "": a prefill worker needs one, or the `dialect` of its engine',
        ),
        (
            ENGINE + 'dialect = "tl"\nrole = "decode"',
            '.kv_address = "": a decode worker needs one, or the `dialect` of its engine',
        ),
        (ENGINE + 'kv_address = "h"', '.kv_address = "h": the port is missing; expected host:port'),
        (
            ENGINE + 'grpc_address = ":1"',
            '.grpc_address = ":1": host or port is missing; expected host:port',
        ),
        (
            ENGINE + 'dialect = "vllm"\nrole = "prefill"',
            '.connector = "": a prefill worker of the dialect vllm needs one of mooncake, nixl',
        ),
        (
            ENGINE + 'dialect = "vllm"\nrole = "decode"',
            '.connector = "": a decode worker of the dialect vllm needs one of mooncake, nixl',
        ),
        (
            ENGINE + 'dialect = "vllm"\nconnector = "slots"',
            '.connector = "slots": engines of the dialect vllm have mooncake, nixl',
        ),
        (
            ENGINE + 'dialect = "sglang"\nconnector = "nixl"',
            '.connector = "nixl": engines of the dialect sglang have bootstrap',
        ),
        (
            ENGINE + 'model = "m"\nconnector = "nixl"',
            '.connector = "nixl": engines of the dialect tl have none',
        ),
        (
            ENGINE + 'connector = "nxl"',
            '.connector = "nxl": engines of the dialect auto have bootstrap, mooncake, nixl, slots',
        ),
        (
            ENGINE + 'dialect = "openai"\nrole = "decode"',
            '.role = "decode": engines of the dialect openai cannot hand a prompt over',
        ),
        # where they are
        (
            ENGINE.replace("8000", "0"),
            '.url = "http://h:0": 0 is no port to connect to',
        ),
        (
            ENGINE.replace("http:", "HTTP:").replace("h:8000", "h:8000/ü"),
            '.url = "HTTP://h:8000/ü": only a host, a port and a path can stand in it',
        ),
        (ENGINE.replace("h:8000", "[::1"), '.url = "http://[::1": Invalid IPv6 URL'),
        # sources
        (
            DNS.replace("8000", "0"),
            ".port = 0: address records have no port: expected one in 1..65535",
        ),
        (
            DNS + 'record = "srv"',
            '.port = 8000: of no use where `record = "srv"`: those records have ports',
        ),
        (DNS + 'record = "txt"', '.record = "txt": expected "address" or "srv"'),
        (DNS + "interval_s = 0", ".interval_s = 0: expected a number in 0.1..3600"),
        (DNS.replace('"vllm"', '""'), '.name = "": expected a string that is not empty'),
        (DNS + 'scheme = "ftp"', '.scheme = "ftp": expected "http" or "https"'),
        (DNS + 'path = "x"', '.path = "x": expected a path such as /engine'),
        (DNS + 'path = "/x?y"', '.path = "/x?y": only a host, a port and a path can stand in it'),
        (DNS + 'role = "decode"\ndialect = "tl"', f'.role = "decode": {OWN.format("decode")}'),
        (
            DNS + 'role = "prefill"\ndialect = "vllm"',
            '.connector = "": a prefill worker of the dialect vllm needs one of mooncake, nixl',
        ),
        (FILE.replace("engines.json", ""), '.file = "": expected a string that is not empty'),
        (
            FILE + 'role = "prefill"\nmodel = "m"\ndialect = ""',
            f'.role = "prefill": {OWN.format("prefill")}',
        ),
        ("[[gateway.worker_files]]", ".file is missing: expected a string that is not empty"),
        ("[[gateway.kubernetes]]", '.selector = "": expected one, or an `inference_pool`'),
        (
            PODS + 'inference_pool = "p"',
            '.inference_pool = "p": of no use beside `selector`: one of the two',
        ),
        (
            '[[gateway.kubernetes]]\nnamespace = "*"\ninference_pool = "p"',
            '.namespace = "*": an InferencePool stands in one namespace: name it',
        ),
        (PODS + "port = -1", ".port = -1: expected an integer in 0..65535"),
        (
            ENGINE + 'kv_replay = "tcp://h:5558"',
            '.kv_replay = "tcp://h:5558": of no use without `kv_events`',
        ),
        (
            ENGINE + 'kv_events = "h:5557"',
            '.kv_events = "h:5557": scheme, host or port is missing; expected tcp://host:port',
        ),
        (
            ENGINE + 'kv_events = "tcp://*:5557"',
            '.kv_events = "tcp://*:5557": not a host name; expected tcp://host:port',
        ),
        (
            ENGINE + 'kv_events = "tcp://:5557"',
            '.kv_events = "tcp://:5557": scheme, host or port is missing; expected tcp://host:port',
        ),
        (
            ENGINE + 'kv_events = "tcp://h:65535"\nkv_ranks = 2',
            ".kv_ranks = 2: so many ranks have no ports from kv_events on",
        ),
        (
            FILE + "kv_replay_port = 5558",
            ".kv_replay_port = 5558: of no use without `kv_events_port`",
        ),
    ],
)
def test_a_refusal_names_the_key_and_what_would_be_right(
    tmp_path: Path, lines: str, message: str
) -> None:
    table = re.match(r"\[\[(.+)]]", lines)
    assert table is not None
    with pytest.raises(ConfigError) as refused:
        gateway(tmp_path, lines)
    assert str(refused.value) == f"{table[1]}[0]{message}"


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (DNS, "gateway.dns[1].name: 'vllm' is there already"),
        (FILE, "gateway.worker_files[1].file: 'engines.json' is there already"),
        (PODS, "gateway.kubernetes[1].namespace: '' is there already"),
    ],
)
def test_no_source_is_there_twice(tmp_path: Path, table: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        gateway(tmp_path, table + table)
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("poll_miss_limit", "gateway.poll_miss_limit = 0: expected an integer of at least 1"),
        ("poll_hit_limit", "gateway.poll_hit_limit = 0: expected an integer of at least 1"),
    ],
)
def test_a_limit_of_polls_is_at_least_one(tmp_path: Path, key: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        gateway(tmp_path, f"{key} = 0")
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("label", "text", "why"),
    [
        ("model", "", 'the label is "": expected a string that is not empty'),
        ("role", "boss", 'the label is "boss": expected "unified" or "prefill" or "decode"'),
        ("dialect", "vlm", f'the label is "vlm": expected {ONE_OF}'),
        ("scheme", "ftp", 'the label is "ftp": expected "http" or "https"'),
        ("capacity", "-1", 'the label is "-1": expected an integer in 0..1000000000'),
        ("capacity", "many", 'the label is "many": expected an integer in 0..1000000000'),
        ("kv_events_port", "x", 'the label is "x": expected an integer in 0..65535'),
        ("bootstrap_port", "0", 'the label is "0": expected an integer in 1..65535'),
    ],
)
def test_a_label_that_cannot_be_used_is_named(label: str, text: str, why: str) -> None:
    with pytest.raises(Unusable) as refused:
        SourceOptions().labelled({label: text})
    assert (refused.value.key, str(refused.value)) == (label, why)


def test_where_an_engine_publishes_is_said_by_its_table_or_by_labels(tmp_path: Path) -> None:
    lines = 'kv_events = "tcp://[::1]:5557"\nkv_replay = "tcp://h:5558"\nkv_ranks = 2\n'
    worker = gateway(tmp_path, ENGINE + lines).workers[0].worker()
    assert (worker.kv_events, worker.kv_replay) == ("tcp://[::1]:5557", "tcp://h:5558")
    assert (worker.kv_ranks, worker.kv_fault) == (2, "")
    source = SourceOptions(kv_events_port=5557)
    labelled = source.labelled({"kv_replay_port": "6000", "kv_ranks": "4"})
    found = labelled.found("a", "10.0.0.7:8000")
    assert (found.kv_events, found.kv_replay) == ("tcp://10.0.0.7:5557", "tcp://10.0.0.7:6000")
    assert found.kv_ranks == 4
    assert source.labelled({"kv_events_port": "0"}).found("a", "h:1").kv_events == ""


# ------------------------------------------------------------------ the admin API


def test_the_admin_api_takes_the_keys_of_the_configuration_and_their_values() -> None:
    ours = {each.name: each for each in msgspec.structs.fields(StaticWorker) if each.name != "id"}
    theirs = {each.name: each for each in msgspec.structs.fields(WorkerRequest)}
    assert set(theirs) == set(ours)
    for name, field in theirs.items():
        assert (field.default, field.required) == (ours[name].default, ours[name].required)
        plain, limits = msgspec.inspect.type_info(field.type), ours[name].type
        expected = msgspec.inspect.type_info(limits)
        assert isinstance(plain, msgspec.inspect.Metadata)
        assert isinstance(expected, msgspec.inspect.Metadata)
        if name != "model":  # Its length is checked by the registry; the API says so beforehand.
            assert plain.type == expected.type
