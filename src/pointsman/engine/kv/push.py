"""Pushes the KV blocks of a prompt to a decode worker: asks what it has, sends the rest.

Whether a push arrived is known only from its answer, so whatever else happened, the same push may be made again: a
decode worker replaces what the handle held. This is used twice. A block that the worker said it had may be gone when
it is referenced: everything is sent then. And a connection that was good may have died unseen while nobody used it: the
push is made once more, over a new one.

A cancelled push ends at once, and its call with it; the decode worker gives back what it had taken.
"""

import asyncio
from collections.abc import AsyncIterator, Collection, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import grpc
import grpc.aio

from pointsman.engine.kv import KV_FORMAT, envelope
from pointsman.engine.kv.blocks import Block, Shape, blocks_of
from pointsman.engine.kv.service import SERVICE
from pointsman.engine.rpc import MESSAGE_LIMIT_BYTES
from pointsman.proto import kv_pb2

__all__ = ["PushFailed", "Pushed", "Pusher"]

LINES_MAX = 64
"""Connections that are kept for decode workers; the one unused for longest is closed first."""

_CHUNK_FIELDS = 1024
"""Bytes of a message that are not payload; a handle id is most of them."""

_OPTIONS = (
    ("grpc.max_send_message_length", MESSAGE_LIMIT_BYTES),
    ("grpc.max_receive_message_length", MESSAGE_LIMIT_BYTES),
    ("grpc.min_reconnect_backoff_ms", 5_000),  # also how long a connection may take
    ("grpc.client_idle_timeout_ms", 30_000),
    ("grpc.enable_http_proxy", 0),  # a proxy to the outside does not lead to engines
    # A new channel would share the connection, and its wait before the next attempt, with the one that failed.
    ("grpc.use_local_subchannel_pool", 1),
)

Code = grpc.StatusCode

_DEAD = {Code.UNAVAILABLE, Code.INTERNAL}
"""What a dead connection is told as: INTERNAL where it breaks a stream in the middle."""

_OUR_FAULT = {Code.INVALID_ARGUMENT, Code.ABORTED}
"""What is said to a push that is wrong, or of a handle that was released. Another worker would not take it either."""


class PushFailed(Exception):
    """A push that the decode worker did not take; `decode_fault`: another decode worker might."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(f"{code.name}: {details}")
        self.code = code
        self.details = details
        self.decode_fault = code not in _OUR_FAULT


class Pushed(NamedTuple):
    """What a push took; `bytes_sent` counts whole envelopes."""

    blocks_sent: int
    blocks_deduped: int
    bytes_sent: int


class Pusher:
    """Pushes blocks of `shape`. Belongs to one event loop; keeps its connections until `close`.

    Raises:
        ValueError: such a block does not fit into a message.
    """

    def __init__(self, shape: Shape) -> None:
        if shape.payload_bytes + _CHUNK_FIELDS > MESSAGE_LIMIT_BYTES:
            raise ValueError(f"KV blocks of {shape.payload_bytes} bytes do not fit into a message")
        self._shape = shape
        # Least recently used first.
        self._lines: dict[str, _Line] = {}

    async def __call__(
        self,
        target: str,
        handle_id: str,
        n_tokens: int,
        payloads: Sequence[bytes],
        hashes: Sequence[int],
        *,
        timeout_s: float,
    ) -> Pushed:
        """Make `target` (host:port) hold the blocks of `n_tokens` tokens under `handle_id`.

        There are as many `payloads` as `hashes`, 0 for a block without one. `timeout_s` is for all of it.

        Raises:
            PushFailed: the decode worker refuses, cannot be reached, or takes too long.
            ValueError: payloads, hashes and tokens do not belong to each other.
        """
        if not 0 < len(payloads) == len(hashes) == blocks_of(n_tokens):
            raise ValueError(f"{len(payloads)} blocks, {len(hashes)} hashes, {n_tokens} tokens")
        full = self._shape.block_tokens
        sizes = [min(full, n_tokens - full * i) for i in range(len(payloads))]
        blocks = [Block(*block) for block in zip(hashes, sizes, payloads, strict=True)]
        sending = _Sending(handle_id, blocks, self._shape)
        try:
            async with asyncio.timeout(timeout_s):
                return await self._push(target, sending)
        except TimeoutError:
            raise PushFailed(Code.DEADLINE_EXCEEDED, f"{target} did not answer in time") from None
        except grpc.aio.AioRpcError as error:
            code = Code.UNAVAILABLE if error.code() in _DEAD else error.code()
            raise PushFailed(code, error.details() or "") from None

    async def close(self) -> None:
        """Close the connections. No push may be under way."""
        for target in list(self._lines):
            await self._drop(target)

    async def _push(self, target: str, sending: "_Sending") -> Pushed:
        worked = False
        try:
            async with self._line(target) as line:
                worked = line.worked
                return await sending.over(line.channel)
        except grpc.aio.AioRpcError as error:
            if not worked or error.code() not in _DEAD:
                raise
        async with self._line(target) as line:
            return await sending.over(line.channel)

    @asynccontextmanager
    async def _line(self, target: str) -> AsyncIterator["_Line"]:
        """A connection to `target`, not to be used again by anybody if it turns out to be dead."""
        line = self._lines.pop(target, None) or _Line(target)
        self._lines[target] = line
        line.users += 1
        try:
            if len(self._lines) > LINES_MAX:
                await self._drop(next(iter(self._lines)))
            yield line
            line.worked = True
        except grpc.aio.AioRpcError as error:
            line.worked = error.code() not in _DEAD
            if not line.worked and self._lines.get(target) is line:
                del self._lines[target]
            raise
        finally:
            line.users -= 1
            if self._lines.get(target) is not line:
                await line.close_unless_used()

    async def _drop(self, target: str) -> None:
        await self._lines.pop(target).close_unless_used()


class _Line:
    """A channel; `worked`: its last call was answered; `users`: the pushes that use it now."""

    def __init__(self, target: str) -> None:
        self.channel: Any = grpc.aio.insecure_channel(target, _OPTIONS)
        self.worked = False
        self.users = 0

    async def close_unless_used(self) -> None:
        # Closing would cancel the calls of others; the last of them closes it.
        if not self.users:
            await self.channel.close()


class _Sending:
    """One push, for as many attempts as it takes."""

    def __init__(self, handle_id: str, blocks: Sequence[Block], shape: Shape) -> None:
        self._handle_id = handle_id
        self._blocks = blocks
        self._shape = shape

    async def over(self, channel: Any) -> Pushed:
        """Make the push over a channel."""
        present = await self._present(channel)
        try:
            return await self._send(channel, present)
        except grpc.aio.AioRpcError as error:
            if not present or error.code() is not Code.NOT_FOUND:
                raise
        return await self._send(channel, ())

    async def _present(self, channel: Any) -> Collection[int]:
        """The hashes of blocks that the worker has."""
        hashes = [block.hash for block in self._blocks if block.hash]
        ask = channel.unary_unary(
            f"/{SERVICE}/HasBlocks",
            kv_pb2.HasBlocksRequest.SerializeToString,
            kv_pb2.HasBlocksResponse.FromString,
        )
        answer = await ask(kv_pb2.HasBlocksRequest(block_hashes=hashes, kv_format=KV_FORMAT))
        return {value for value, here in zip(hashes, answer.present, strict=False) if here}

    async def _send(self, channel: Any, present: Collection[int]) -> Pushed:
        sent: list[int] = []
        send = channel.stream_unary(
            f"/{SERVICE}/PushKv",
            kv_pb2.KvChunk.SerializeToString,
            kv_pb2.KvAck.FromString,
        )
        call = send(self._chunks(present, sent))
        ends: list[grpc.aio.AioRpcError] = []
        call.add_done_callback(lambda over: ends.append(_end_of(over)))
        try:
            ack = await call
        except grpc.aio.AioRpcError as error:
            # To gRPC for asyncio a call ends again, INTERNAL, when a write into it fails because the peer has ended it.
            said = (end for end in ends if end.code() is not Code.INTERNAL)
            raise next(said, error) from None
        return Pushed(len(sent), ack.blocks_deduped, sum(sent))

    def _chunks(self, present: Collection[int], sent: list[int]) -> Iterator[kv_pb2.KvChunk]:
        """The chunks of the stream; notes the size of each envelope in `sent`."""
        for i, block in enumerate(self._blocks):
            payload = b""
            if block.hash not in present:
                payload = envelope.encode([block], self._shape)
                sent.append(len(payload))
            yield kv_pb2.KvChunk(
                handle_id=self._handle_id,
                block_hash=block.hash,
                block_index=i,
                n_blocks_total=len(self._blocks),
                kv_format=KV_FORMAT,
                payload=payload,
                crc32c=envelope.crc32c(payload),
            )


def _end_of(call: Any) -> grpc.aio.AioRpcError:
    """How a call that is over has ended, as of now."""
    code, details = _at_once(call.code()), _at_once(call.details())
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)


def _at_once(answer: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that has nothing to wait for: a moment later it might be another one."""
    try:
        answer.send(None)
    except StopIteration as result:
        return result.value
    raise AssertionError("the call is not over")
