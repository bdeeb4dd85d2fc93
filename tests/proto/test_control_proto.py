"""The generated messages are those of the source, and the source is the contract."""

import importlib.util
from pathlib import Path

import pytest

from pointsman.proto import control_pb2
from pointsman.proto.__main__ import ROOT, generate

needs_generator = pytest.mark.skipif(
    importlib.util.find_spec("grpc_tools") is None,
    reason="grpcio-tools is not installed: cannot compare the generated messages with their source",
)


@needs_generator
def test_the_generated_files_are_what_the_generator_makes_of_the_sources(tmp_path: Path) -> None:
    for made in generate(tmp_path):
        assert made.read_bytes() == (ROOT / made.relative_to(tmp_path)).read_bytes()


@needs_generator
def test_a_source_that_does_not_compile_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pointsman.proto.__main__.ROOT", tmp_path)
    monkeypatch.setattr("pointsman.proto.__main__.PACKAGE", tmp_path)
    (tmp_path / "broken.proto").write_text("message {")
    with pytest.raises(RuntimeError, match="protoc failed"):
        generate(tmp_path)


def test_worker_status_has_the_field_numbers_of_the_contract() -> None:
    fields = {field.number: field.name for field in control_pb2.WorkerStatus.DESCRIPTOR.fields}
    assert fields == {
        1: "worker_id",
        2: "http_address",
        3: "grpc_address",
        4: "kv_address",
        5: "role",
        6: "model",
        7: "kv_format",
        8: "queue_depth",
        9: "running",
        10: "kv_free_blocks",
        11: "kv_total_blocks",
        12: "draining",
        101: "incarnation",
        102: "dialect",
        103: "connector",
        104: "bootstrap",
        105: "base_path",
        106: "served",
        107: "max_model_len",
        108: "lora_slots",
        109: "kv_usage",
        110: "cached_tokens",
        111: "remote_tokens",
        112: "degraded",
        113: "slots",
        114: "kv_tokens",
    }


def test_heartbeat_ack_has_the_field_numbers_of_the_contract() -> None:
    fields = {field.number: field.name for field in control_pb2.HeartbeatAck.DESCRIPTOR.fields}
    assert fields == {1: "drain", 2: "route_epoch"}


def test_worker_status_reads_the_bytes_that_an_engine_of_the_contract_sends() -> None:
    status = control_pb2.WorkerStatus.FromString(
        b"\x0a\x01a"  # 1 worker_id
        b"\x12\x06h:8000"  # 2 http_address
        b"\x2a\x07unified"  # 5 role
        b"\x32\x01m"  # 6 model
        b"\x38\x01"  # 7 kv_format
        b"\x40\x02"  # 8 queue_depth
        b"\x58\x80\x10"  # 11 kv_total_blocks
    )
    assert status == control_pb2.WorkerStatus(
        worker_id="a",
        http_address="h:8000",
        role="unified",
        model="m",
        kv_format=1,
        queue_depth=2,
        kv_total_blocks=2048,
    )
    assert not status.HasField("incarnation")


def test_the_service_has_one_unary_call() -> None:
    service = control_pb2.DESCRIPTOR.services_by_name["WorkerRegistry"]
    call = service.methods_by_name["Heartbeat"]
    assert service.full_name == "tl.control.v1.WorkerRegistry"
    assert (call.input_type.name, call.output_type.name) == ("WorkerStatus", "HeartbeatAck")
    assert not call.client_streaming and not call.server_streaming
