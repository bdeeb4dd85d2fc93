"""Workers are made of options with the credentials of their engines, which nothing ever shows."""

import re
from pathlib import Path

import pytest

from pointsman.config import (
    DnsSource,
    GatewayConfig,
    KubernetesSource,
    SourceOptions,
    StaticWorker,
    WorkerFile,
)
from pointsman.control.discovery.found import Found
from pointsman.errors import BadRequest
from pointsman.parts import found_worker, permit_key, static_worker

ENGINE = {"id": "a", "url": "http://h:8000", "model": "m"}
SECRET = "sk-not-for-your-eyes"
LINE = b"authorization: Bearer sk-not-for-your-eyes\r\n"


def test_an_engine_without_a_key_is_sent_none() -> None:
    assert static_worker(ENGINE).credentials == b""


def test_a_key_comes_from_the_environment_or_a_file_and_is_a_whole_header_line(
    tmp_path: Path,
) -> None:
    file = tmp_path / "key"
    file.write_text(f"{SECRET}\n")
    by_environment = static_worker(ENGINE | {"api_key_env": "KEY"}, {"KEY": SECRET})
    by_file = static_worker(ENGINE | {"api_key_file": str(file)}, {})
    found = found_worker(SourceOptions(api_key_env="KEY"), Found("b", "h:1"), "x", {"KEY": SECRET})
    for worker in (by_environment, by_file, found):
        assert worker.credentials == LINE
        assert SECRET not in repr(worker)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({}, "there is no environment variable VLLM_KEY"),
        ({"VLLM_KEY": ""}, "VLLM_KEY has no API key: expected printable ASCII without spaces"),
        (
            {"VLLM_KEY": f"{SECRET}\r\nx-admin: 1"},
            "VLLM_KEY has no API key: expected printable ASCII without spaces",
        ),
        (
            {"VLLM_KEY": f"{SECRET}\udcff"},
            "VLLM_KEY has no API key: expected printable ASCII without spaces",
        ),
    ],
)
def test_a_variable_without_a_key_is_refused_by_worker_key_and_name(
    environ: dict[str, str], message: str
) -> None:
    with pytest.raises(BadRequest) as refused:
        static_worker(ENGINE | {"api_key_env": "VLLM_KEY"}, environ)
    assert refused.value.message == f"worker a: api_key_env: {message}"
    assert refused.value.param == "api_key_env"
    with pytest.raises(BadRequest, match=re.escape(f"worker b: api_key_env: {message}")):
        found_worker(SourceOptions(api_key_env="VLLM_KEY"), Found("b", "h:1"), "x", environ)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file or directory"),
        (b"", "has no API key: expected printable ASCII without spaces"),
        (SECRET.encode() + b" x", "has no API key: expected printable ASCII without spaces"),
    ],
)
def test_a_file_without_a_key_is_refused_by_worker_key_and_name(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(BadRequest) as refused:
        static_worker(ENGINE | {"api_key_file": str(file)}, {})
    assert refused.value.message.startswith(f"worker a: api_key_file: {file}")
    assert refused.value.message.endswith(message)
    assert SECRET not in refused.value.message


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"url": "h:8000"}, "url"),
        ({"role": "prefill"}, "grpc_address"),
        ({"dialect": "vllm", "role": "prefill"}, "connector"),
        ({"capacity": -1}, None),
        ({"no_such_key": 1}, None),
    ],
)
def test_values_that_make_no_worker_are_refused(change: dict[str, object], param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        static_worker(ENGINE | change)
    assert refused.value.param == param


def test_a_found_engine_has_what_its_table_its_labels_and_its_source_say() -> None:
    labels = {"id": "gpu-7", "model": "smol", "capacity": "4", "job": "vllm"}
    found = Found("10.0.0.7:8000", "10.0.0.7:8000", labels, draining=True)
    worker = found_worker(SourceOptions(dialect="vllm"), found, "file engines.json")
    assert (worker.id, worker.http_address, worker.source) == (
        *("gpu-7", "10.0.0.7:8000", "file engines.json"),
    )
    assert (worker.model, worker.dialect, worker.capacity) == ("smol", "vllm", 4)
    assert (worker.static, worker.polled, worker.terminating) == (True, True, True)
    plain = found_worker(SourceOptions(), Found("x", "h:1"), "dns vllm")
    assert (plain.id, plain.model, plain.dialect, plain.terminating) == ("x", "", "", False)


@pytest.mark.parametrize(
    ("found", "param"),
    [
        (Found("a", "h:1", {"role": "boss"}), "role"),
        (Found("a", "h:1", {"capacity": "x"}), "capacity"),
        (Found("a", "h:1", {"path": "x"}), "path"),
        (Found("a", "h:1", {"role": "prefill", "dialect": "vllm"}), "connector"),
        (Found("a", "h:1", {"role": "decode", "dialect": "tl"}), "role"),
        (Found("a", "h:99999"), "address"),
        (Found("a", "u:p@h:1"), "address"),
    ],
)
def test_what_a_source_found_and_cannot_be_used_is_an_error_that_names_it(
    found: Found, param: str
) -> None:
    with pytest.raises(BadRequest, match=f"worker a: {param}: ") as refused:
        found_worker(SourceOptions(), found, "x")
    assert refused.value.param == param


KEYED = GatewayConfig(
    workers=(StaticWorker(id="a", url="http://h:8000", api_key_env="A_KEY"),),
    dns=(DnsSource(name="engines", port=8000, api_key_env="B_KEY"),),
    worker_files=(WorkerFile(file="engines.json", api_key_file="/keys/c"),),
    kubernetes=(KubernetesSource(selector="app=x", api_key_file="/keys/d"),),
    keys_file="/keys/callers",
)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"api_key_env": "", "api_key_file": ""},
        {"api_key_env": "A_KEY"},
        {"api_key_env": "B_KEY"},
        {"api_key_file": "/keys/c"},
        {"api_key_file": "/keys/d"},
    ],
)
def test_a_key_that_the_configuration_uses_may_be_named_by_others(values: dict[str, str]) -> None:
    permit_key(ENGINE | values, KEYED)


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("api_key_env", KEYED.pepper_env),
        ("api_key_env", "PATH"),
        ("api_key_env", "/keys/c"),
        ("api_key_file", "A_KEY"),
        ("api_key_file", "/keys/callers"),
        ("api_key_file", "/keys/./c"),
        ("api_key_file", "/etc/hostname"),
    ],
)
def test_no_other_variable_or_file_can_be_named_and_nothing_is_said_of_it(
    key: str, name: str
) -> None:
    with pytest.raises(BadRequest) as refused:
        permit_key(ENGINE | {key: name}, KEYED)
    assert refused.value.param == key
    assert name not in refused.value.message
