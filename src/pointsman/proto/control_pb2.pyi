from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerStatus(_message.Message):
    __slots__ = ("worker_id", "http_address", "grpc_address", "kv_address", "role", "model", "kv_format", "queue_depth", "running", "kv_free_blocks", "kv_total_blocks", "draining", "incarnation", "dialect", "connector", "bootstrap", "base_path", "served", "max_model_len", "lora_slots", "kv_usage", "cached_tokens", "remote_tokens", "degraded", "slots", "kv_tokens")
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
    DIALECT_FIELD_NUMBER: _ClassVar[int]
    CONNECTOR_FIELD_NUMBER: _ClassVar[int]
    BOOTSTRAP_FIELD_NUMBER: _ClassVar[int]
    BASE_PATH_FIELD_NUMBER: _ClassVar[int]
    SERVED_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    LORA_SLOTS_FIELD_NUMBER: _ClassVar[int]
    KV_USAGE_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REMOTE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DEGRADED_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
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
    dialect: str
    connector: str
    bootstrap: str
    base_path: str
    served: _containers.RepeatedCompositeFieldContainer[ServedModel]
    max_model_len: int
    lora_slots: int
    kv_usage: float
    cached_tokens: int
    remote_tokens: int
    degraded: str
    slots: int
    kv_tokens: int
    def __init__(self, worker_id: _Optional[str] = ..., http_address: _Optional[str] = ..., grpc_address: _Optional[str] = ..., kv_address: _Optional[str] = ..., role: _Optional[str] = ..., model: _Optional[str] = ..., kv_format: _Optional[int] = ..., queue_depth: _Optional[int] = ..., running: _Optional[int] = ..., kv_free_blocks: _Optional[int] = ..., kv_total_blocks: _Optional[int] = ..., draining: bool = ..., incarnation: _Optional[int] = ..., dialect: _Optional[str] = ..., connector: _Optional[str] = ..., bootstrap: _Optional[str] = ..., base_path: _Optional[str] = ..., served: _Optional[_Iterable[_Union[ServedModel, _Mapping]]] = ..., max_model_len: _Optional[int] = ..., lora_slots: _Optional[int] = ..., kv_usage: _Optional[float] = ..., cached_tokens: _Optional[int] = ..., remote_tokens: _Optional[int] = ..., degraded: _Optional[str] = ..., slots: _Optional[int] = ..., kv_tokens: _Optional[int] = ...) -> None: ...

class ServedModel(_message.Message):
    __slots__ = ("id", "parent", "max_model_len")
    ID_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    id: str
    parent: str
    max_model_len: int
    def __init__(self, id: _Optional[str] = ..., parent: _Optional[str] = ..., max_model_len: _Optional[int] = ...) -> None: ...

class HeartbeatAck(_message.Message):
    __slots__ = ("drain", "route_epoch")
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    ROUTE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    drain: bool
    route_epoch: int
    def __init__(self, drain: bool = ..., route_epoch: _Optional[int] = ...) -> None: ...
