from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerStatus(_message.Message):
    __slots__ = ("worker_id", "http_address", "grpc_address", "kv_address", "role", "model", "kv_format", "queue_depth", "running", "kv_free_blocks", "kv_total_blocks", "draining", "incarnation")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    HTTP_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    GRPC_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    KV_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    KV_FORMAT_FIELD_NUMBER: _ClassVar[int]
    QUEUE_DEPTH_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    KV_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    KV_TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    http_address: str
    grpc_address: str
    kv_address: str
    role: str
    model: str
    kv_format: int
    queue_depth: int
    running: int
    kv_free_blocks: int
    kv_total_blocks: int
    draining: bool
    incarnation: int
    def __init__(self, worker_id: _Optional[str] = ..., http_address: _Optional[str] = ..., grpc_address: _Optional[str] = ..., kv_address: _Optional[str] = ..., role: _Optional[str] = ..., model: _Optional[str] = ..., kv_format: _Optional[int] = ..., queue_depth: _Optional[int] = ..., running: _Optional[int] = ..., kv_free_blocks: _Optional[int] = ..., kv_total_blocks: _Optional[int] = ..., draining: bool = ..., incarnation: _Optional[int] = ...) -> None: ...

class HeartbeatAck(_message.Message):
    __slots__ = ("drain", "route_epoch")
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    ROUTE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    drain: bool
    route_epoch: int
    def __init__(self, drain: bool = ..., route_epoch: _Optional[int] = ...) -> None: ...
