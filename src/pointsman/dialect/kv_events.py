"""What vLLM and SGLang publish of their caches (KV events), read into values: the frames, the batches, the events.

Both publish over ZeroMQ, three frames a message: topic, sequence number, and a batch as MessagePack. The batch is an
array, or a map in some versions, and so is each of its events. They have grown over the years, and each engine its own
way, so that an array is read by position, as far as it goes, and what is not known behind that is left alone. Events of
a kind that nobody here knows are counted and left out.

Whatever else a publisher says, or whoever takes its place, is `MalformedEvents` and never another exception. What
events come to is `pointsman.dialect.kv_stream`.
"""

from collections.abc import Mapping, Sequence
from struct import error as PackError
from typing import Any, TypeAlias

import msgspec
from msgspec import Struct

from pointsman.domain.blocks import pack_tokens

__all__ = [
    "Batch",
    "BlockHash",
    "Cleared",
    "Event",
    "MalformedEvents",
    "Message",
    "Removed",
    "Stored",
    "read_batch",
    "read_message",
    "read_replayed",
    "replay_request",
]

SEQUENCE_BYTES = 8
END = b"\xff" * SEQUENCE_BYTES
"""The sequence number behind the last one of a replay: -1."""

HASH_BYTES_MAX = 64
BLOCK_TOKENS_MAX = 1 << 20
"""Larger hashes and blocks are no engine's."""

ON_DEVICE = (None, "GPU", "gpu")
"""Where a block must lie to be had at once. Engines say GPU of whatever they compute on, a CPU too."""

HERE = (None, "LOCAL")

BlockHash: TypeAlias = int | bytes
"""An engine's own hash of a block, which says nothing to anybody else."""


class MalformedEvents(ValueError):
    """What came is no message of this protocol. Its text never quotes a prompt."""


class Message(Struct, frozen=True, gc=False):
    """One message: its place in the sequence of its publisher, and the batch."""

    sequence: int
    payload: bytes


class Stored(Struct, frozen=True, gc=False):
    """Blocks that were cached, one after another: `tokens` has the ids of all of them, 4 bytes each.

    `parent` is the block before the first one, None at the beginning of a prompt; `adapter` is the LoRA adapter, ""
    for none; `group` is that of the layers whose cache it is. `usable` is false where it is no block on the device that
    any prompt of these tokens would find: another tier, a salt, an image, a window, an adapter without a name.
    """

    hashes: Sequence[BlockHash]
    parent: BlockHash | None
    tokens: bytes
    block_tokens: int
    adapter: str = ""
    group: int = 0
    usable: bool = True


class Removed(Struct, frozen=True, gc=False):
    """Blocks that are cached no more; not `usable` where they were on another tier than the device."""

    hashes: Sequence[BlockHash]
    group: int = 0
    usable: bool = True


class Cleared(Struct, frozen=True, gc=False):
    """Nothing is cached any more."""


Event: TypeAlias = Stored | Removed | Cleared


class Batch(Struct, frozen=True, gc=False):
    """What one step of an engine did to its cache, at `at` (seconds of its wall clock).

    `rank` is the data-parallel rank as the engine says it, None where it does not; `unknown` is how many events were
    of kinds that are not known here.
    """

    at: float
    events: Sequence[Event]
    rank: int | None = None
    unknown: int = 0


STORED = (
    *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
    *("lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind"),
    *("kv_cache_spec_sliding_window", "locality", "ownership", "session_id"),
)
REMOVED = ("block_hashes", "medium", "group_idx", "locality", "ownership")
BATCH = ("ts", "events", "data_parallel_rank")
"""The fields of arrays, in their order. SGLang's go as far as `medium`; its rank is `attn_dp_rank`."""

CLEARED = Cleared()


def read_message(frames: Sequence[bytes]) -> Message:
    """Read the frames of a message: topic, sequence number, batch. Raises MalformedEvents.

    >>> read_message([b"kv", bytes(7) + b"\\x05", b"..."])
    Message(sequence=5, payload=b'...')
    """
    if len(frames) != 3:
        raise MalformedEvents(f"a message of {len(frames)} frames, expected 3")
    return _message(frames[1], frames[2])


def read_replayed(frames: Sequence[bytes]) -> Message | None:
    """Read the frames of an answer to `replay_request`, None for the end. Raises MalformedEvents.

    Some versions send the topic as well, so what counts stands in the last two.

    >>> read_replayed([b"", b"kv", bytes(7) + b"\\x05", b"..."])
    Message(sequence=5, payload=b'...')
    >>> read_replayed([b"", b"\\xff" * 8, b""])
    """
    if not 3 <= len(frames) <= 4:
        raise MalformedEvents(f"a replay of {len(frames)} frames, expected 3 or 4")
    if frames[-2] == END:
        return None
    return _message(frames[-2], frames[-1])


def replay_request(first: int) -> list[bytes]:
    """Return the frames that ask for all batches from sequence number `first` on that are still there.

    >>> replay_request(5)[1].hex()
    '0000000000000005'
    """
    return [b"", first.to_bytes(SEQUENCE_BYTES, "big")]


def read_batch(payload: bytes) -> Batch:
    """Read the batch of a message. Raises MalformedEvents, and nothing else.

    >>> batch = read_batch(msgspec.msgpack.encode([1.5, [["BlockStored", [7], None, [1, 2], 2, None]], 0]))
    >>> batch.at, batch.rank, batch.events[0].hashes, batch.events[0].block_tokens
    (1.5, 0, [7], 2)
    """
    try:
        fields = msgspec.msgpack.decode(payload)
    # A map may have a key that cannot be one here, and anything can be nested too deep.
    except (msgspec.DecodeError, RecursionError, TypeError, ValueError) as error:
        raise MalformedEvents(f"no MessagePack: {type(error).__name__}") from None
    if isinstance(fields, list):
        fields = dict(zip(BATCH, fields, strict=False))
    if not isinstance(fields, dict):
        raise MalformedEvents("the batch is neither an array nor a map")
    at, items = fields.get("ts"), fields.get("events")
    rank = fields.get("data_parallel_rank", fields.get("attn_dp_rank"))
    if not isinstance(at, float | int) or isinstance(at, bool) or not isinstance(items, list):
        raise MalformedEvents("the batch has no time or no events")
    if rank is not None and type(rank) is not int:
        raise MalformedEvents("the rank is no integer")
    events = [_event(item) for item in items]
    known = [event for event in events if event is not None]
    return Batch(float(at), known, rank, len(events) - len(known))


def _message(sequence: bytes, payload: bytes) -> Message:
    if len(sequence) != SEQUENCE_BYTES:
        raise MalformedEvents(f"a sequence number of {len(sequence)} bytes, expected 8")
    number = int.from_bytes(sequence, "big")
    if number >> 63:
        raise MalformedEvents("a negative sequence number")
    return Message(number, payload)


def _event(item: Any) -> Event | None:
    """Read an event, None for one of an unknown kind."""
    if isinstance(item, list):
        kind = item[0] if item else None
    elif isinstance(item, dict):
        kind = item.get("type")
    else:
        raise MalformedEvents("an event is neither an array nor a map")
    if type(kind) is not str:
        raise MalformedEvents("an event does not say its kind")
    if kind == "BlockStored":
        return _stored(_fields(item, STORED))
    if kind == "BlockRemoved":
        return _removed(_fields(item, REMOVED))
    return CLEARED if kind == "AllBlocksCleared" else None


def _fields(item: list[Any] | dict[Any, Any], names: Sequence[str]) -> Mapping[Any, Any]:
    return item if isinstance(item, dict) else dict(zip(names, item[1:], strict=False))


def _stored(fields: Mapping[Any, Any]) -> Stored:
    hashes = _hashes(fields)
    parent = fields.get("parent_block_hash")
    ids, block_tokens = fields.get("token_ids"), fields.get("block_size")
    if parent is not None:
        _check_hash(parent)
    if type(block_tokens) is not int or not 0 < block_tokens <= BLOCK_TOKENS_MAX:
        raise MalformedEvents("the size of blocks is none")
    if not isinstance(ids, list):
        raise MalformedEvents("there are no token ids")
    try:
        tokens = pack_tokens(ids)
    except PackError:
        raise MalformedEvents("a token id is none") from None
    adapter = fields.get("lora_name") or ""
    if not isinstance(adapter, str):
        raise MalformedEvents("the name of an adapter is no text")
    usable = (
        _usable(fields)
        # Blocks that are not all there: which of the tokens belong to which of the others, nobody says.
        and len(ids) == len(hashes) * block_tokens
        and (bool(adapter) or fields.get("lora_id") is None)
        and not fields.get("cache_salt")
        and fields.get("kv_cache_spec_sliding_window") is None
        and _plain(fields.get("extra_keys"), adapter)
    )
    return Stored(hashes, parent, tokens, block_tokens, adapter, _group(fields), usable)


def _removed(fields: Mapping[Any, Any]) -> Removed:
    return Removed(_hashes(fields), _group(fields), _usable(fields))


def _hashes(fields: Mapping[Any, Any]) -> list[BlockHash]:
    hashes = fields.get("block_hashes")
    if not isinstance(hashes, list):
        raise MalformedEvents("there are no hashes of blocks")
    for each in hashes:
        _check_hash(each)
    return hashes


def _check_hash(value: Any) -> None:
    kind = type(value)
    if kind is not int and not (kind is bytes and 0 < len(value) <= HASH_BYTES_MAX):
        raise MalformedEvents("the hash of a block is neither an integer nor bytes")


def _group(fields: Mapping[Any, Any]) -> int:
    group = fields.get("group_idx")
    if group is None:
        return 0
    if type(group) is not int:
        raise MalformedEvents("the group of a block is no integer")
    return group


def _usable(fields: Mapping[Any, Any]) -> bool:
    """Tell whether blocks lie on the device of the engine that tells of them."""
    return fields.get("medium") in ON_DEVICE and fields.get("locality") in HERE


def _plain(extra_keys: Any, adapter: str) -> bool:
    """Tell whether nothing but the tokens, and the name of the adapter, went into the engine's hashes.

    Where an array says something else in this place (SGLang: a session), that is no key.
    """
    if not isinstance(extra_keys, list):
        return True
    return all(
        keys is None or (isinstance(keys, list) and all(key == adapter for key in keys))
        for keys in extra_keys
    )
