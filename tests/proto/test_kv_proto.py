"""The messages of a KV transfer are the contract, number by number and type by type."""

import pytest
from google.protobuf.descriptor import FieldDescriptor

from pointsman.proto import kv_pb2

TYPES = {
    getattr(FieldDescriptor, f"TYPE_{name.upper()}"): name
    for name in ("bool", "string", "bytes", "uint32", "uint64")
}

CONTRACT = {
    "HasBlocksRequest": "1 block_hashes repeated uint64, 2 kv_format uint32",
    "HasBlocksResponse": "1 present repeated bool",
    "KvChunk": "1 handle_id string, 2 block_hash uint64, 3 block_index uint32, 4 n_blocks_total uint32, "
    "5 kv_format uint32, 6 payload bytes, 7 crc32c uint32",
    "KvAck": "1 handle_id string, 2 blocks_received uint32, 3 blocks_deduped uint32",
    "ReleaseRequest": "1 handle_id string",
    "ReleaseResponse": "",
}


def described(field: FieldDescriptor) -> str:
    repeated = "repeated " if field.is_repeated else ""
    return f"{field.number} {field.name} {repeated}{TYPES[field.type]}"


@pytest.mark.parametrize("name", CONTRACT)
def test_a_message_has_the_fields_of_the_contract(name: str) -> None:
    fields = kv_pb2.DESCRIPTOR.message_types_by_name[name].fields
    assert ", ".join(described(field) for field in fields) == CONTRACT[name]


def test_there_are_no_other_messages() -> None:
    assert set(kv_pb2.DESCRIPTOR.message_types_by_name) == set(CONTRACT)


def test_only_the_push_is_a_stream_and_only_from_the_client() -> None:
    service = kv_pb2.DESCRIPTOR.services_by_name["KvTransferService"]
    assert service.full_name == "tl.kv.v1.KvTransferService"
    assert [
        (
            call.name,
            call.input_type.name,
            call.output_type.name,
            call.client_streaming,
            call.server_streaming,
        )
        for call in service.methods
    ] == [
        ("HasBlocks", "HasBlocksRequest", "HasBlocksResponse", False, False),
        ("PushKv", "KvChunk", "KvAck", True, False),
        ("Release", "ReleaseRequest", "ReleaseResponse", False, False),
    ]


def test_a_chunk_is_the_bytes_that_a_decode_worker_of_the_contract_reads() -> None:
    chunk = kv_pb2.KvChunk(
        handle_id="h",
        block_hash=1,
        block_index=2,
        n_blocks_total=3,
        kv_format=101,
        payload=b"xy",
        crc32c=5,
    )
    assert chunk.SerializeToString() == bytes.fromhex("0a0168 1001 1802 2003 2865 32027879 3805")
