"""The transfer service over a real socket: every refusal of the contract, and nothing kept of what was refused."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any

import grpc
import grpc.aio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pointsman.engine.kv import KV_FORMAT, envelope
from pointsman.engine.kv.blocks import Block, Shape, block_hash
from pointsman.engine.kv.pool import Pool
from pointsman.engine.kv.service import DRAIN_CHUNKS, SERVICE, KvTransfer
from pointsman.engine.rpc import MESSAGE_LIMIT_BYTES, serve_rpc
from pointsman.proto import kv_pb2

Code = grpc.StatusCode

SHAPE = Shape(1, 1, 2)
HASHES = [block_hash(0, range(16)), block_hash(1, range(16))]


class Clock:
    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


class Peer:
    """A prefill worker of the contract, as wrong as a test wants it, with the pool it pushes to."""

    def __init__(self, channel: Any, pool: Pool, clock: Clock) -> None:
        self.pool = pool
        self.clock = clock
        self.has = channel.unary_unary(
            f"/{SERVICE}/HasBlocks",
            kv_pb2.HasBlocksRequest.SerializeToString,
            kv_pb2.HasBlocksResponse.FromString,
        )
        self.stream = channel.stream_unary(
            f"/{SERVICE}/PushKv", kv_pb2.KvChunk.SerializeToString, kv_pb2.KvAck.FromString
        )
        self.drop = channel.unary_unary(
            f"/{SERVICE}/Release",
            kv_pb2.ReleaseRequest.SerializeToString,
            kv_pb2.ReleaseResponse.FromString,
        )

    async def push(self, chunks: Iterable[kv_pb2.KvChunk]) -> Any:
        return await self.stream(iter(chunks))

    async def present(self, *hashes: int, kv_format: int = KV_FORMAT) -> list[bool]:
        request = kv_pb2.HasBlocksRequest(block_hashes=hashes, kv_format=kv_format)
        return list((await self.has(request)).present)

    async def release(self, handle_id: str) -> None:
        await self.drop(kv_pb2.ReleaseRequest(handle_id=handle_id))


def talk(
    story: Callable[[Peer], Awaitable[None]],
    *,
    capacity: int = 8,
    idle_s: float = 30.0,
    drain_s: float = 30.0,
    leaving: Callable[[], bool] = lambda: False,
) -> None:
    """Tell a story over loopback; at its end nothing may be held."""

    async def told() -> None:
        clock = Clock()
        pool = Pool(capacity, now=clock, hold_s=120)
        service = KvTransfer(pool, SHAPE, leaving=leaving, idle_s=idle_s, drain_s=drain_s)
        server, address = await serve_rpc("127.0.0.1:0", service.generic_handler())
        try:
            async with grpc.aio.insecure_channel(address) as channel:
                await story(Peer(channel, pool, clock))
        finally:
            await server.stop(None)
        clock.time += 120
        assert pool.held_blocks == 0

    asyncio.run(told())


def payload(i: int) -> bytes:
    return bytes([i + 1]) * SHAPE.payload_bytes


def sent(
    i: int, total: int, value: int = 0, *, n_tokens: int = 16, handle_id: str = "h"
) -> kv_pb2.KvChunk:
    data = envelope.encode([Block(value, n_tokens, payload(i))], SHAPE)
    return chunk(i, total, value, data, handle_id=handle_id)


def chunk(
    i: int, total: int, value: int = 0, data: bytes = b"", *, handle_id: str = "h"
) -> kv_pb2.KvChunk:
    return kv_pb2.KvChunk(
        handle_id=handle_id,
        block_hash=value,
        block_index=i,
        n_blocks_total=total,
        kv_format=KV_FORMAT,
        payload=data,
        crc32c=envelope.crc32c(data),
    )


def but(of: kv_pb2.KvChunk, **fields: Any) -> kv_pb2.KvChunk:
    changed = kv_pb2.KvChunk()
    changed.CopyFrom(of)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


async def refused(call: Awaitable[Any]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as info:
        await call
    return info.value.code(), info.value.details() or ""


@contextlib.asynccontextmanager
async def half_a_push(peer: Peer, *chunks: kv_pb2.KvChunk) -> AsyncIterator[Any]:
    """A stream whose first chunks have arrived and that goes on."""
    before = peer.pool.held_blocks
    call = peer.stream()
    for each in chunks:
        await call.write(each)
    await until(lambda: peer.pool.held_blocks == before + len(chunks))
    yield call


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not true():  # noqa: ASYNC110 - what is waited for happens on the other side of a socket
            await asyncio.sleep(0.001)


def test_what_is_pushed_can_be_claimed() -> None:
    async def story(peer: Peer) -> None:
        assert await peer.present(*HASHES) == [False, False]
        ack = await peer.push(
            [sent(0, 3, HASHES[0]), sent(1, 3, HASHES[1]), sent(2, 3, n_tokens=5)]
        )
        assert ack == kv_pb2.KvAck(handle_id="h", blocks_received=3, blocks_deduped=0)
        assert await peer.present(HASHES[1], 7, HASHES[0]) == [True, False, True]
        assert peer.pool.held_blocks == 3
        held = peer.pool.claim("h")
        assert held == (37, (*HASHES, 0), (payload(0), payload(1), payload(2)))

    talk(story)


def test_a_block_that_is_there_need_not_be_sent() -> None:
    async def story(peer: Peer) -> None:
        await peer.push([sent(0, 1, HASHES[0], handle_id="earlier")])
        await peer.release("earlier")
        ack = await peer.push([chunk(0, 2, HASHES[0]), sent(1, 2, n_tokens=1)])
        assert (ack.blocks_received, ack.blocks_deduped) == (2, 1)
        assert peer.pool.claim("h") == (17, (HASHES[0], 0), (payload(0), payload(1)))

    talk(story)


def test_a_block_without_a_hash_in_its_envelope_is_known_by_that_of_its_chunk() -> None:
    async def story(peer: Peer) -> None:
        await peer.push([but(sent(0, 1), block_hash=HASHES[0])])
        assert await peer.present(HASHES[0]) == [True]

    talk(story)


def test_full_blocks_may_have_no_name() -> None:
    async def story(peer: Peer) -> None:
        await peer.push([sent(0, 2), sent(1, 2)])
        assert peer.pool.claim("h") == (32, (0, 0), (payload(0), payload(1)))

    talk(story)


GOOD = sent(0, 2, HASHES[0])
LAST = sent(1, 2, HASHES[1])
BODY = LAST.payload
TWO = envelope.encode([Block(0, 16, payload(1)), Block(0, 16, payload(2))], SHAPE)
NONE = envelope.encode([], SHAPE)
V2 = BODY[:4] + b"\2\0\3\0" + BODY[8:-4]
OTHER_SHAPE = envelope.encode([Block(0, 16, bytes(256))], Shape(2, 1, 2))

REFUSED: dict[str, tuple[Sequence[kv_pb2.KvChunk], grpc.StatusCode]] = {
    "empty stream": ([], Code.INVALID_ARGUMENT),
    "no handle": ([but(GOOD, handle_id="")], Code.INVALID_ARGUMENT),
    "no blocks promised": ([but(GOOD, n_blocks_total=0)], Code.INVALID_ARGUMENT),
    "begins with another index": ([LAST], Code.INVALID_ARGUMENT),
    "an index twice": ([GOOD, GOOD], Code.INVALID_ARGUMENT),
    "an index left out": ([GOOD, but(LAST, block_index=2)], Code.INVALID_ARGUMENT),
    "two handles": ([GOOD, but(LAST, handle_id="i")], Code.INVALID_ARGUMENT),
    "another total": ([GOOD, but(LAST, n_blocks_total=3)], Code.INVALID_ARGUMENT),
    "too few": ([GOOD], Code.INVALID_ARGUMENT),
    "too many": ([GOOD, LAST, but(LAST, block_index=2)], Code.INVALID_ARGUMENT),
    "neither payload nor hash": ([GOOD, chunk(1, 2)], Code.INVALID_ARGUMENT),
    "another format": ([but(GOOD, kv_format=1)], Code.FAILED_PRECONDITION),
    "another format later": ([GOOD, but(LAST, kv_format=1)], Code.FAILED_PRECONDITION),
    "another version": (
        [GOOD, chunk(1, 2, 0, V2 + envelope.crc32c(V2).to_bytes(4, "little"))],
        Code.FAILED_PRECONDITION,
    ),
    "a block that is gone": ([GOOD, chunk(1, 2, HASHES[1])], Code.NOT_FOUND),
    "the chunk's checksum": ([GOOD, but(LAST, crc32c=LAST.crc32c ^ 1)], Code.DATA_LOSS),
    "a checksum of nothing": ([GOOD, but(LAST, payload=b"")], Code.DATA_LOSS),
    "the envelope's checksum": (
        [GOOD, chunk(1, 2, HASHES[1], BODY[:-1] + bytes([BODY[-1] ^ 1]))],
        Code.DATA_LOSS,
    ),
    "half an envelope": ([GOOD, chunk(1, 2, HASHES[1], BODY[:40])], Code.DATA_LOSS),
    "another shape": ([GOOD, chunk(1, 2, 0, OTHER_SHAPE)], Code.DATA_LOSS),
    "two blocks in one": ([GOOD, chunk(1, 2, 0, TWO)], Code.DATA_LOSS),
    "no block in one": ([GOOD, chunk(1, 2, 0, NONE)], Code.DATA_LOSS),
    "another hash": ([GOOD, but(LAST, block_hash=HASHES[0])], Code.DATA_LOSS),
    "a hash within only": ([GOOD, but(LAST, block_hash=0)], Code.DATA_LOSS),
    "a partial block with a hash": (
        [GOOD, but(sent(1, 2, n_tokens=15), block_hash=HASHES[1])],
        Code.DATA_LOSS,
    ),
    "a partial block before the last": (
        [sent(0, 2, n_tokens=15), LAST],
        Code.DATA_LOSS,
    ),
}


@pytest.mark.parametrize("chunks, code", REFUSED.values(), ids=REFUSED.keys())
def test_a_push_that_is_refused_leaves_nothing(
    chunks: Sequence[kv_pb2.KvChunk], code: grpc.StatusCode
) -> None:
    async def story(peer: Peer) -> None:
        assert (await refused(peer.push(chunks)))[0] is code
        assert peer.pool.held_blocks == peer.pool.cached_blocks == 0
        # The same handle, pushed as it should be, is taken.
        await peer.push([GOOD, LAST])
        assert peer.pool.handles == {"h"}

    talk(story)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whatever_is_pushed_nothing_is_kept_of_a_refused_push(data: st.DataObject) -> None:
    good = [sent(i, 3, value) for i, value in enumerate((*HASHES, 0))]
    field = st.sampled_from(
        [
            *("handle_id", "block_hash", "block_index", "n_blocks_total"),
            *("kv_format", "payload", "crc32c"),
        ]
    )

    async def story(peer: Peer) -> None:
        at, name = data.draw(st.integers(0, 2)), data.draw(field)
        old = getattr(good[at], name)
        kinds: dict[type, st.SearchStrategy[Any]] = {
            str: st.text(max_size=3),
            bytes: st.binary(max_size=99),
            int: st.integers(0, 2**32 - 1),
        }
        new = data.draw(kinds[type(old)].filter(lambda value: value != old))
        broken = [*good[:at], but(good[at], **{name: new}), *good[at + 1 :]]
        try:
            await peer.push(broken)
        except grpc.aio.AioRpcError as error:
            assert error.code() is not Code.UNKNOWN
            assert peer.pool.held_blocks == peer.pool.cached_blocks == 0
        else:
            # The one change that is legal: a full block that gets a name, or another one that is its own.
            assert (at, name) == (2, "block_hash")
            assert peer.pool.held_blocks == 3

    talk(story)


def test_another_format_is_not_asked_for() -> None:
    async def story(peer: Peer) -> None:
        code, details = await refused(peer.present(1, kv_format=1))
        assert code is Code.FAILED_PRECONDITION
        assert "kv_format 1 is not read here" in details

    talk(story)


def test_a_full_pool_refuses_and_gives_back_what_the_push_took() -> None:
    async def story(peer: Peer) -> None:
        await peer.push([sent(0, 2, handle_id="first"), sent(1, 2, handle_id="first")])
        chunks = [sent(i, 2) for i in range(2)]
        assert (await refused(peer.push(chunks)))[0] is Code.RESOURCE_EXHAUSTED
        assert (peer.pool.handles, peer.pool.held_blocks) == (frozenset({"first"}), 2)
        await peer.release("first")
        await peer.push(chunks)

    talk(story, capacity=3)


def test_a_repeated_handle_replaces_the_old_blocks() -> None:
    async def story(peer: Peer) -> None:
        await peer.push([sent(0, 2), sent(1, 2)])
        await peer.push([sent(0, 1, n_tokens=3)])
        assert peer.pool.held_blocks == 1
        assert peer.pool.claim("h") == (3, (0,), (payload(0),))

    talk(story)


def test_a_release_frees_a_handle_and_one_of_an_unknown_handle_is_no_error() -> None:
    async def story(peer: Peer) -> None:
        await peer.push([GOOD, LAST])
        for _ in range(2):
            await peer.release("h")
        assert (peer.pool.handles, peer.pool.held_blocks) == (frozenset(), 0)

    talk(story)


def test_a_release_that_overtakes_its_push_is_the_last_word() -> None:
    async def story(peer: Peer) -> None:
        await peer.release("h")
        assert (await refused(peer.push([GOOD, LAST])))[0] is Code.ABORTED
        assert peer.pool.held_blocks == 0
        peer.clock.time += 120
        await peer.push([GOOD, LAST])

    talk(story)


def test_a_release_in_the_middle_of_a_push_is_the_last_word() -> None:
    async def story(peer: Peer) -> None:
        async with half_a_push(peer, GOOD) as call:
            await peer.release("h")
            await call.write(LAST)
            await call.done_writing()
            assert (await refused(call))[0] is Code.ABORTED
        await until(lambda: peer.pool.held_blocks == 0)
        assert await peer.present(HASHES[0]) == [False]

    talk(story)


def test_a_cancelled_push_leaves_nothing() -> None:
    async def story(peer: Peer) -> None:
        async with half_a_push(peer, GOOD) as call:
            call.cancel()
            await until(lambda: peer.pool.held_blocks == 0)
        assert (peer.pool.handles, peer.pool.cached_blocks) == (frozenset(), 0)

    talk(story)


def test_a_push_whose_worker_dies_leaves_nothing() -> None:
    async def story(peer: Peer) -> None:
        service = KvTransfer(peer.pool, SHAPE)
        server, address = await serve_rpc("127.0.0.1:0", service.generic_handler())
        channel = grpc.aio.insecure_channel(address)
        async with half_a_push(Peer(channel, peer.pool, peer.clock), GOOD):
            await channel.close()
            await until(lambda: peer.pool.held_blocks == 0)
        await server.stop(None)
        assert (peer.pool.handles, peer.pool.cached_blocks) == (frozenset(), 0)

    talk(story)


def test_a_push_that_stalls_gives_its_blocks_back() -> None:
    async def story(peer: Peer) -> None:
        async with half_a_push(peer, GOOD) as call:
            code, details = await refused(call)
        assert (code, details) == (Code.DEADLINE_EXCEEDED, "the push has stalled")
        assert peer.pool.held_blocks == peer.pool.cached_blocks == 0

    talk(story, idle_s=0.1, drain_s=0.1)


def test_a_message_over_the_limit_is_refused() -> None:
    async def story(peer: Peer) -> None:
        big = chunk(0, 1, 0, bytes(MESSAGE_LIMIT_BYTES))
        assert (await refused(peer.push([big])))[0] is Code.RESOURCE_EXHAUSTED

    talk(story)


def test_a_refused_push_holds_nothing_while_the_rest_of_it_comes() -> None:
    async def story(peer: Peer) -> None:
        async with half_a_push(peer, sent(0, 9)) as call:
            await call.write(sent(5, 9))
            await until(lambda: peer.pool.held_blocks == 0)
            for i in range(2, 9):
                await call.write(sent(i, 9))
            await call.done_writing()
            assert (await refused(call))[0] is Code.INVALID_ARGUMENT

    talk(story)


def test_a_refused_push_that_does_not_end_is_ended() -> None:
    async def story(peer: Peer) -> None:
        async with half_a_push(peer, sent(0, 9)) as call:
            await call.write(sent(5, 9))
            assert (await refused(call))[0] is Code.INVALID_ARGUMENT

    talk(story, drain_s=0.1)


def test_a_refused_push_without_end_is_not_read_for_ever() -> None:
    async def story(peer: Peer) -> None:
        async with half_a_push(peer, sent(0, 9)) as call:
            bad = chunk(5, 9)
            with pytest.raises((grpc.aio.AioRpcError, asyncio.InvalidStateError)):
                for _ in range(10 * DRAIN_CHUNKS):
                    await call.write(bad)

    talk(story)


def test_a_worker_that_leaves_takes_no_push_and_says_so_before_one_is_sent() -> None:
    async def story(peer: Peer) -> None:
        for call in (peer.present(HASHES[0]), peer.push([sent(0, 1)])):
            assert await refused(call) == (Code.UNAVAILABLE, "the worker is draining")

    talk(story, leaving=lambda: True)


def test_a_worker_that_begins_to_leave_gives_back_what_half_a_push_has_brought() -> None:
    leaves: list[bool] = []

    async def story(peer: Peer) -> None:
        async with half_a_push(peer, sent(0, 2)) as call:
            leaves.append(True)
            await call.write(sent(1, 2))
            await until(lambda: peer.pool.held_blocks == 0)
            await call.done_writing()
            assert (await refused(call))[0] is Code.UNAVAILABLE
        assert not peer.pool.handles

    talk(story, leaving=lambda: bool(leaves))
