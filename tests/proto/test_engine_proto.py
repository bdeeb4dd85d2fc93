"""The messages that engines are sent are the contract, number by number and type by type."""

import pytest
from google.protobuf.descriptor import FieldDescriptor

from pointsman.proto import engine_pb2

TYPES = {
    getattr(FieldDescriptor, f"TYPE_{name.upper()}"): name
    for name in ("bool", "string", "int32", "int64", "uint32", "uint64", "float", "double")
}

CONTRACT = {
    "SamplingParams": "1 temperature float, 2 top_p float, 3 top_k int32, 4 min_p float, 5 repetition_penalty float, "
    "6 presence_penalty float, 7 frequency_penalty float, 8 seed uint64, 9 max_new_tokens int32, "
    "10 stop repeated string, 11 logprobs int32",
    "PrefillRequest": "1 request_id string, 2 model string, 3 prompt_ids repeated uint32, 4 sampling SamplingParams, "
    "5 decode_target string, 6 deadline_unix_ms int64, 7 priority int32",
    "PrefillResponse": "1 handle KvHandle, 2 first_token uint32, 3 first_logprob float, 4 prompt_tokens int32, "
    "5 cached_prompt_tokens int32, 6 ttft_ms double",
    "KvHandle": "1 handle_id string, 2 decode_target string, 3 n_tokens uint32, 4 block_hashes repeated uint64, "
    "5 kv_format uint32, 6 first_token uint32, 7 prompt_tokens uint32, 8 rng_draws_consumed uint32",
    "InfoRequest": "",
    "InfoResponse": "1 model string, 2 roles repeated string, 3 kv_format uint32, 4 max_context int32, "
    "5 block_size int32, 6 abi uint32, 7 kv_formats_read repeated uint32",
    "CancelRequest": "1 request_id string",
    "CancelResponse": "1 found bool",
    "DrainRequest": "1 deadline_ms int64",
    "DrainResponse": "1 aborted int32",
}


def described(field: FieldDescriptor) -> str:
    kind = field.message_type.name if field.message_type else TYPES[field.type]
    return f"{field.number} {field.name} {'repeated ' if field.is_repeated else ''}{kind}"


@pytest.mark.parametrize("name", CONTRACT)
def test_a_message_has_the_fields_of_the_contract(name: str) -> None:
    fields = engine_pb2.DESCRIPTOR.message_types_by_name[name].fields
    assert ", ".join(described(field) for field in fields) == CONTRACT[name]


def test_there_are_no_other_messages() -> None:
    assert set(engine_pb2.DESCRIPTOR.message_types_by_name) == set(CONTRACT)


def test_the_service_has_the_four_unary_calls_of_the_contract() -> None:
    service = engine_pb2.DESCRIPTOR.services_by_name["EngineControl"]
    assert service.full_name == "tl.engine.v1.EngineControl"
    assert [
        (call.name, call.input_type.name, call.output_type.name) for call in service.methods
    ] == [
        (name, f"{name}Request", f"{name}Response")
        for name in ("Prefill", "Info", "Cancel", "Drain")
    ]
    assert not any(call.client_streaming or call.server_streaming for call in service.methods)


def test_a_drain_is_the_bytes_that_an_engine_of_the_contract_reads() -> None:
    assert engine_pb2.DrainRequest(deadline_ms=300).SerializeToString() == b"\x08\xac\x02"
    assert engine_pb2.DrainResponse.FromString(b"\x08\x07").aborted == 7
