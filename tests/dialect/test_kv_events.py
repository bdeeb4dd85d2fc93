"""Reading the messages of engines: both engines, both generations, and everything that is no message."""

import contextlib
from struct import unpack
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pointsman.dialect.kv_events import (
    Batch,
    Cleared,
    MalformedEvents,
    Message,
    Removed,
    Stored,
    read_batch,
    read_message,
    read_replayed,
    replay_request,
)

encode = msgspec.msgpack.encode
STORED = ["BlockStored", [11, 12], None, [1, 2, 3, 4], 2, None]


def batch_of(*events: Any, at: float = 1.5) -> Batch:
    return read_batch(encode([at, list(events), 0]))


def only(*fields: Any) -> Any:
    (event,) = batch_of(list(fields)).events
    return event


def tokens(stored: Stored) -> tuple[int, ...]:
    return unpack(f"<{len(stored.tokens) // 4}I", stored.tokens)


# ------------------------------------------------------------------ generations


@pytest.mark.parametrize(
    "event",
    [
        STORED,
        [*STORED, "GPU"],
        [*STORED, "GPU", None],
        [*STORED, "GPU", None, [None, None], 0, "full_attention", None, "LOCAL", None, "s-1"],
        [*STORED, "GPU", None, "a session", "and what may come yet", 7],
        {
            "type": "BlockStored",
            "block_hashes": [11, 12],
            "parent_block_hash": None,
            "token_ids": [1, 2, 3, 4],
            "block_size": 2,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [None, None],
            "group_idx": 0,
            "something": {"new": 1},
        },
    ],
    ids=["oldest", "with medium", "with a name", "newest", "another's tail", "map"],
)
def test_k07_blocks_are_read_from_arrays_of_every_length_and_from_maps(event: Any) -> None:
    if isinstance(event, list) and len(event) > 9 and isinstance(event[9], str):
        event[9] = None
    (stored,) = batch_of(event).events
    assert isinstance(stored, Stored)
    assert (stored.hashes, stored.parent, tokens(stored)) == ([11, 12], None, (1, 2, 3, 4))
    assert (stored.block_tokens, stored.adapter, stored.group, stored.usable) == (2, "", 0, True)


@pytest.mark.parametrize(
    "batch",
    [
        [2.5, [STORED]],
        [2.5, [STORED], None],
        [2.5, [STORED], 3, "more"],
        {"ts": 2.5, "events": [STORED], "data_parallel_rank": 3},
        {"ts": 2.5, "events": [STORED], "attn_dp_rank": 3},
        {"ts": 2, "events": [STORED]},
    ],
)
def test_k07_batches_are_arrays_or_maps(batch: Any) -> None:
    read = read_batch(encode(batch))
    assert len(read.events) == 1
    assert read.at in (2, 2.5)
    assert read.rank in (None, 3)


def test_hashes_are_integers_of_either_sign_or_bytes() -> None:
    digest = b"\x07" * 32
    stored = only("BlockStored", [-(2**63), 2**64 - 1, digest], digest, [1] * 3, 1, None)
    assert stored.hashes == [-(2**63), 2**64 - 1, digest]
    assert stored.parent == digest
    assert only("BlockRemoved", [digest, -5], "GPU").hashes == [digest, -5]


def test_k07_kinds_that_nobody_knows_are_counted_and_left_out() -> None:
    batch = batch_of(["BlockMoved", [1], "DISK"], STORED, {"type": "Load"}, ["AllBlocksCleared"])
    assert (len(batch.events), batch.unknown) == (2, 2)
    assert isinstance(batch.events[1], Cleared)
    assert isinstance(only("AllBlocksCleared", "and more"), Cleared)


# ------------------------------------------------------------------ what is not on the device, or not of plain tokens


@pytest.mark.parametrize("medium", ["CPU", "CPU_PINNED", "DISK", "EXTERNAL", "STORAGE", "", 7, [1]])
def test_what_is_on_another_tier_is_not_usable(medium: Any) -> None:
    assert not only(*STORED, medium).usable
    assert not only("BlockRemoved", [11], medium).usable
    assert only("BlockRemoved", [11]).usable


@pytest.mark.parametrize(
    "more",
    [
        {"lora_id": 3},
        {"cache_salt": "pepper"},
        {"extra_keys": [["pepper"], None]},
        {"extra_keys": [None, [["an image", 0]]]},
        {"extra_keys": ["what is this"]},
        {"kv_cache_spec_sliding_window": 128},
        {"locality": "REMOTE"},
        {"token_ids": [1, 2, 3]},
        {"block_hashes": [11]},
    ],
)
def test_what_a_plain_prompt_does_not_find_is_not_usable(more: Any) -> None:
    names = ("type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id")
    fields = dict(zip(names, STORED, strict=True))
    assert batch_of(fields).events[0].usable  # type: ignore[union-attr]
    assert not batch_of({**fields, **more}).events[0].usable  # type: ignore[union-attr]


def test_an_adapter_with_a_name_is_told_from_the_base_model() -> None:
    stored = only(*STORED[:5], 1, "GPU", "sql", [["sql"], ["sql"]])
    assert (stored.adapter, stored.usable) == ("sql", True)
    assert not only(*STORED[:5], 1, "GPU", "sql", [["sql", "pepper"], ["sql"]]).usable


def test_groups_of_layers_are_told_apart() -> None:
    assert only(*STORED, "GPU", None, None, 2).group == 2
    assert only("BlockRemoved", [11], "GPU", 2).group == 2


# ------------------------------------------------------------------ frames


def test_a_message_has_three_frames() -> None:
    assert read_message([b"kv@pod@model", bytes(7) + b"\x09", b"x"]) == Message(9, b"x")
    for frames in ([], [b"", bytes(8)], [b"", bytes(8), b"x", b""], [b"", bytes(7), b"x"]):
        with pytest.raises(MalformedEvents):
            read_message(frames)
    with pytest.raises(MalformedEvents, match="negative"):
        read_message([b"", b"\xff" * 8, b""])


@pytest.mark.parametrize("topic", [[], [b"kv-events"]])
def test_a_replay_may_have_the_topic_and_ends_with_minus_one(topic: list[bytes]) -> None:
    assert read_replayed([b"", *topic, bytes(7) + b"\x09", b"x"]) == Message(9, b"x")
    assert read_replayed([b"", *topic, b"\xff" * 8, b""]) is None
    assert replay_request(258) == [b"", bytes(6) + b"\x01\x02"]
    with pytest.raises(MalformedEvents):
        read_replayed([b"x"])


# ------------------------------------------------------------------ everything else


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        encode("text"),
        encode(7),
        encode([]),
        encode([1.0]),
        encode([1.0, "events"]),
        encode(["now", []]),
        encode([True, []]),
        encode([None, []]),
        encode([1.0, [], "rank"]),
        encode({"events": []}),
        encode([1.0, [7]]),
        encode([1.0, [[]]]),
        encode([1.0, [{}]]),
        encode([1.0, [[["BlockStored"]]]]),
        encode([1.0, [["BlockStored"]]]),
        encode([1.0, [["BlockStored", 5, None, [1], 1]]]),
        encode([1.0, [["BlockStored", ["text"], None, [1], 1]]]),
        encode([1.0, [["BlockStored", [True], None, [1], 1]]]),
        encode([1.0, [["BlockStored", [b""], None, [1], 1]]]),
        encode([1.0, [["BlockStored", [b"x" * 65], None, [1], 1]]]),
        encode([1.0, [["BlockStored", [1], "parent", [1], 1]]]),
        encode([1.0, [["BlockStored", [1], None, "tokens", 1]]]),
        encode([1.0, [["BlockStored", [1], None, [-1], 1]]]),
        encode([1.0, [["BlockStored", [1], None, [2**32], 1]]]),
        encode([1.0, [["BlockStored", [1], None, ["a"], 1]]]),
        encode([1.0, [["BlockStored", [1], None, [1.5], 1]]]),
        encode([1.0, [["BlockStored", [1], None, [1], 0]]]),
        encode([1.0, [["BlockStored", [1], None, [1], 2**30]]]),
        encode([1.0, [["BlockStored", [1], None, [1], None]]]),
        encode([1.0, [["BlockStored", [1], None, [1], 1, None, "GPU", 7]]]),
        encode([1.0, [["BlockStored", [1], None, [1], 1, None, "GPU", None, None, "group"]]]),
        encode([1.0, [["BlockRemoved"]]]),
        encode([1.0, [["BlockRemoved", None]]]),
        b"\x91" * 100_000,
        b"\x81" * 100_000,
        b"\x81\x91\x01\x01",
        b"\x81\x80\x01",
    ],
    ids=lambda payload: payload[:24].hex(),
)
def test_k07_malformed_batches_raise_one_error(payload: bytes) -> None:
    with pytest.raises(MalformedEvents):
        read_batch(payload)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.binary(max_size=70)
    | st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "GPU", "type", ""]),
    lambda inner: (
        st.lists(inner, max_size=6)
        | st.dictionaries(
            st.sampled_from(["type", "ts", "events", "block_hashes", "token_ids", "block_size"])
            | st.integers(0, 3),
            inner,
            max_size=6,
        )
    ),
    max_leaves=12,
)
events = st.lists(values, max_size=3).map(lambda more: ["BlockStored", *more]) | st.lists(
    values, max_size=3
).map(lambda more: ["BlockRemoved", *more])


@settings(max_examples=400)
@given(st.one_of(values, st.tuples(st.floats(), st.lists(events, max_size=3))), st.data())
def test_k07_nothing_that_comes_raises_anything_else(value: Any, data: st.DataObject) -> None:
    payload = bytearray(encode(value))
    if payload and data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(payload) - 1))
        payload[at] ^= data.draw(st.integers(1, 255))
    try:
        batch = read_batch(bytes(payload))
    except MalformedEvents:
        return
    for event in batch.events:
        assert isinstance(event, Stored | Removed | Cleared)
        if isinstance(event, Stored) and event.usable:
            assert len(event.tokens) == 4 * event.block_tokens * len(event.hashes)


@given(st.lists(st.binary(max_size=12), max_size=5))
def test_k07_frames_of_any_kind_raise_nothing_else(frames: list[bytes]) -> None:
    for read in (read_message, read_replayed):
        with contextlib.suppress(MalformedEvents):
            read(frames)
