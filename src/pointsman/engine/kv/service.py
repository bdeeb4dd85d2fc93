"""`tl.kv.v1.KvTransferService`: takes the KV blocks that prefill workers push, into a pool.

Every chunk is checked before anything of it is kept: its order, its checksums, the shape and the hash of its block. Any
refusal, and any end of the stream before its last chunk, gives back all blocks that the push took.

Who resumes from them, and whether the tokens are the right ones, is not known here; see `pointsman.engine.resume`.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from pointsman.engine.kv import KV_FORMAT, envelope
from pointsman.engine.kv.blocks import Block, Shape
from pointsman.engine.kv.pool import BlockGone, HandleReleased, Pool, PoolFull, Push
from pointsman.proto import kv_pb2

__all__ = ["SERVICE", "KvTransfer"]

SERVICE = "tl.kv.v1.KvTransferService"

IDLE_S = 30.0
"""How long a push may pause between two chunks: a peer that hangs must not keep blocks."""

DRAIN_S = 5.0
"""How long the rest of a refused push is read, and thrown away, before the refusal is sent anyway."""

DRAIN_CHUNKS = 4096
"""How many chunks of it are read at most: a prompt of 65,536 tokens."""

Code = grpc.StatusCode

_CODES: dict[type[Exception], grpc.StatusCode] = {
    envelope.Corrupt: Code.DATA_LOSS,
    envelope.UnknownVersion: Code.FAILED_PRECONDITION,
    BlockGone: Code.NOT_FOUND,
    PoolFull: Code.RESOURCE_EXHAUSTED,
    HandleReleased: Code.ABORTED,
    TimeoutError: Code.DEADLINE_EXCEEDED,
}

_LEAVING = "the worker is draining"


class _Refused(Exception):
    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.code = code


class KvTransfer:
    """The service over `pool`, for blocks of `shape`, the one of this worker's model.

    While the worker is `leaving` it takes nothing more: nobody could resume from it.
    """

    def __init__(
        self,
        pool: Pool,
        shape: Shape,
        *,
        leaving: Callable[[], bool] = lambda: False,
        idle_s: float = IDLE_S,
        drain_s: float = DRAIN_S,
    ) -> None:
        self._pool = pool
        self._shape = shape
        self._leaving = leaving
        self._idle_s = idle_s
        self._drain_s = drain_s

    def generic_handler(self) -> grpc.GenericRpcHandler:
        """The service for `serve_rpc`."""
        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.stream_unary_rpc_method_handler
        methods = {
            name: kind(
                call,
                request_deserializer=message.FromString,
                response_serializer=lambda answer: answer.SerializeToString(),
            )
            for name, kind, call, message in (
                ("HasBlocks", unary, self.has_blocks, kv_pb2.HasBlocksRequest),
                ("PushKv", stream, self.push_kv, kv_pb2.KvChunk),
                ("Release", unary, self.release, kv_pb2.ReleaseRequest),
            )
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def has_blocks(
        self, request: kv_pb2.HasBlocksRequest, context: Any
    ) -> kv_pb2.HasBlocksResponse:
        """Tell which blocks need not be sent."""
        if self._leaving():
            await context.abort(Code.UNAVAILABLE, _LEAVING)
        if request.kv_format != KV_FORMAT:
            await context.abort(Code.FAILED_PRECONDITION, _format(request.kv_format))
        return kv_pb2.HasBlocksResponse(present=self._pool.has(request.block_hashes))

    async def push_kv(self, chunks: AsyncIterator[kv_pb2.KvChunk], context: Any) -> kv_pb2.KvAck:
        """Take the blocks of one handle: all of them or none."""
        stream = aiter(chunks)
        try:
            return await self._take(stream)
        except _Refused as refused:
            code, details = refused.code, str(refused)
        except tuple(_CODES) as error:
            code, details = _CODES[type(error)], str(error) or "the push has stalled"
        await self._drain(stream)
        await context.abort(code, details)
        raise AssertionError("abort returned")

    async def release(self, request: kv_pb2.ReleaseRequest, context: Any) -> kv_pb2.ReleaseResponse:
        """Give back what a handle holds, now or later: a push of it that is still on its way is refused."""
        self._pool.release(request.handle_id)
        return kv_pb2.ReleaseResponse()

    async def _take(self, chunks: AsyncIterator[kv_pb2.KvChunk]) -> kv_pb2.KvAck:
        first = await self._next(chunks)
        if first is None:
            raise _Refused(Code.INVALID_ARGUMENT, "the stream is empty")
        if not first.handle_id:
            raise _Refused(Code.INVALID_ARGUMENT, "handle_id is empty")
        total, index, deduped, whole = first.n_blocks_total, 0, 0, True
        with self._pool.begin(first.handle_id) as push:
            chunk: kv_pb2.KvChunk | None = first
            while chunk is not None:
                if self._leaving():
                    raise _Refused(Code.UNAVAILABLE, _LEAVING)
                _expect(chunk, first.handle_id, index, total)
                if not whole:
                    raise envelope.Corrupt(f"block {index - 1} is not full, and not the last one")
                whole = self._keep(push, chunk)
                deduped += not chunk.payload
                index += 1
                chunk = await self._next(chunks)
            if index != total:
                raise _Refused(Code.INVALID_ARGUMENT, f"{index} blocks came, {total} were promised")
            push.commit()
        return kv_pb2.KvAck(
            handle_id=first.handle_id, blocks_received=index, blocks_deduped=deduped
        )

    async def _drain(self, chunks: AsyncIterator[kv_pb2.KvChunk]) -> None:
        """Let the peer have its say: gRPC for asyncio hides a status that comes while it still writes."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._drain_s):
                for _ in range(DRAIN_CHUNKS):
                    if await anext(chunks, None) is None:
                        break

    async def _next(self, chunks: AsyncIterator[kv_pb2.KvChunk]) -> kv_pb2.KvChunk | None:
        async with asyncio.timeout(self._idle_s):
            return await anext(chunks, None)

    def _keep(self, push: Push, chunk: kv_pb2.KvChunk) -> bool:
        """Take the block of a chunk; returns whether it is full."""
        if envelope.crc32c(chunk.payload) != chunk.crc32c:
            raise envelope.Corrupt(f"the checksum of block {chunk.block_index} is wrong")
        if not chunk.payload:
            if not chunk.block_hash:
                raise _Refused(Code.INVALID_ARGUMENT, "a block with neither payload nor hash")
            push.reuse(chunk.block_hash)
            return True
        blocks = envelope.decode(chunk.payload, self._shape)
        if len(blocks) != 1:
            raise envelope.Corrupt(f"{len(blocks)} blocks in one chunk")
        (sent,) = blocks
        if sent.hash not in (0, chunk.block_hash):
            raise envelope.Corrupt(f"block {chunk.block_index} has another hash than its chunk")
        full = sent.n_tokens == self._shape.block_tokens
        if chunk.block_hash and not full:
            raise envelope.Corrupt("a block with a hash is not full")
        push.add(Block(chunk.block_hash, sent.n_tokens, sent.payload))
        return full


def _expect(chunk: kv_pb2.KvChunk, handle_id: str, index: int, total: int) -> None:
    """Refuse a chunk that does not belong at `index` of this push."""
    if chunk.kv_format != KV_FORMAT:
        raise _Refused(Code.FAILED_PRECONDITION, _format(chunk.kv_format))
    for wrong, what in (
        (chunk.handle_id != handle_id, "the stream is of more than one handle"),
        (chunk.n_blocks_total != total, "n_blocks_total has changed"),
        (chunk.block_index != index, f"block {chunk.block_index} came where {index} was due"),
        (index >= total, f"more blocks than the {total} promised"),
    ):
        if wrong:
            raise _Refused(Code.INVALID_ARGUMENT, what)


def _format(found: int) -> str:
    return f"kv_format {found} is not read here, only {KV_FORMAT}"
