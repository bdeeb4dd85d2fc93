"""Pushing over a real socket: what is sent and what is not, and decode workers that forget, refuse, hang and die."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc
import grpc.aio
import pytest

from pointsman.engine.kv import KV_FORMAT
from pointsman.engine.kv import push as push_module
from pointsman.engine.kv.blocks import Shape, blocks_of, hashes_of
from pointsman.engine.kv.pool import Pool
from pointsman.engine.kv.push import Pushed, Pusher, PushFailed
from pointsman.engine.kv.service import KvTransfer
from pointsman.engine.rpc import serve_rpc
from pointsman.engine.scheduler import GRID
from pointsman.proto import kv_pb2

Code = grpc.StatusCode

SHAPE = Shape(1, 1, 2)
ENVELOPE_BYTES = 28 + 12 + SHAPE.payload_bytes + 4
TOKENS = list(range(100, 170))
"""70 tokens: four blocks with a hash, and a tail of six tokens."""


class Clock:
    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


class Decode(KvTransfer):
    """A decode worker that tells which calls it got, and that can be given faults."""

    def __init__(self, capacity: int = 16, shape: Shape = SHAPE) -> None:
        self.clock = Clock()
        self.pool = Pool(capacity, now=self.clock, hold_s=120)
        super().__init__(self.pool, shape)
        self.calls: list[str] = []
        self.claims_to_have: set[int] = set()
        self.hangs: asyncio.Event | None = None
        self.address = "127.0.0.1:0"
        self._server: Any = None

    async def has_blocks(
        self, request: kv_pb2.HasBlocksRequest, context: Any
    ) -> kv_pb2.HasBlocksResponse:
        self.calls.append("HasBlocks")
        answer = await super().has_blocks(request, context)
        present = [
            here or value in self.claims_to_have
            for value, here in zip(request.block_hashes, answer.present, strict=True)
        ]
        return kv_pb2.HasBlocksResponse(present=present)

    async def push_kv(self, chunks: AsyncIterator[kv_pb2.KvChunk], context: Any) -> kv_pb2.KvAck:
        self.calls.append("PushKv")
        if self.hangs is not None:
            await anext(chunks)
            self.hangs.set()
            await asyncio.Event().wait()
        return await super().push_kv(chunks, context)

    async def start(self) -> None:
        self._server, self.address = await serve_rpc(self.address, self.generic_handler())

    async def stop(self) -> None:
        await self._server.stop(None)

    async def restart(self) -> None:
        """Begin anew at the same address, without any block."""
        await self.stop()
        self._pool = self.pool = Pool(self.pool.capacity_blocks, now=self.clock)
        await self.start()


def push(
    pusher: Pusher,
    decode: Decode | str,
    tokens: Sequence[int] = TOKENS,
    *,
    handle_id: str = "h",
    timeout_s: float = 10.0,
) -> Awaitable[Pushed]:
    target = decode if isinstance(decode, str) else decode.address
    hashes = hashes_of(tokens, whole_chunks=GRID)
    return pusher(target, handle_id, len(tokens), payloads(tokens), hashes, timeout_s=timeout_s)


def payloads(tokens: Sequence[int]) -> list[bytes]:
    return [bytes([tokens[i * 16]]) * SHAPE.payload_bytes for i in range(blocks_of(len(tokens)))]


@contextlib.asynccontextmanager
async def served(capacity: int = 16) -> AsyncIterator[tuple[Pusher, Decode]]:
    pusher, decode = Pusher(SHAPE), Decode(capacity)
    await decode.start()
    try:
        yield pusher, decode
    finally:
        await pusher.close()
        await decode.stop()


def talk(story: Callable[[Pusher, Decode], Awaitable[None]], *, capacity: int = 16) -> None:
    async def told() -> None:
        async with served(capacity) as (pusher, decode):
            await story(pusher, decode)

    asyncio.run(told())


async def failure(call: Awaitable[Pushed]) -> PushFailed:
    with pytest.raises(PushFailed) as info:
        await call
    return info.value


def test_a_push_makes_the_decode_worker_hold_the_prompt() -> None:
    async def story(pusher: Pusher, decode: Decode) -> None:
        assert await push(pusher, decode) == Pushed(5, 0, 5 * ENVELOPE_BYTES)
        held = decode.pool.claim("h")
        assert held is not None
        assert held.n_tokens == len(TOKENS)
        assert list(held.hashes) == hashes_of(TOKENS, whole_chunks=GRID)
        assert list(held.payloads) == payloads(TOKENS)

    talk(story)


@pytest.mark.parametrize("n_tokens", [1, 15, 16, 17, 64])
def test_a_prompt_of_any_length_arrives_whole(n_tokens: int) -> None:
    async def story(pusher: Pusher, decode: Decode) -> None:
        await push(pusher, decode, TOKENS[:n_tokens])
        held = decode.pool.claim("h")
        assert held is not None
        assert (held.n_tokens, list(held.payloads)) == (n_tokens, payloads(TOKENS[:n_tokens]))

    talk(story)


def test_blocks_that_are_there_are_not_sent() -> None:
    async def story(pusher: Pusher, decode: Decode) -> None:
        await push(pusher, decode, handle_id="first")
        # The same first 64 tokens, then others.
        other = [*TOKENS[:64], *range(40)]
        assert await push(pusher, decode, other) == Pushed(3, 4, 3 * ENVELOPE_BYTES)
        held = decode.pool.claim("h")
        assert held is not None
        assert list(held.payloads) == payloads(other)

    talk(story)


def test_a_block_that_is_gone_after_all_makes_the_whole_push_be_made_once_more() -> None:
    async def story(pusher: Pusher, decode: Decode) -> None:
        decode.claims_to_have = set(hashes_of(TOKENS, whole_chunks=GRID)) - {0}
        assert await push(pusher, decode) == Pushed(5, 0, 5 * ENVELOPE_BYTES)
        assert decode.calls == ["HasBlocks", "PushKv", "PushKv"]
        assert decode.pool.held_blocks == 5

    talk(story)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["full", "gone"])
def test_a_refusal_in_the_middle_of_a_large_push_is_heard(fault: str) -> None:
    """A peer that is still writing when the answer comes must not lose it over a write that fails."""

    async def told() -> None:
        shape = Shape(30, 3, 64)
        tokens = range(16 * 24)
        large = [bytes(shape.payload_bytes)] * 24
        pusher, decode = Pusher(shape), Decode(2 if fault == "full" else 32, shape)
        await decode.start()
        for i in range(5):
            if fault == "gone":
                hashes = [i + 1] + [0] * 23
                decode.claims_to_have = {i + 1}
                pushed = await pusher(decode.address, "h", len(tokens), large, hashes, timeout_s=10)
                assert pushed.blocks_sent == 24
                assert decode.pool.claim("h") is not None
            else:
                call = pusher(decode.address, "h", len(tokens), large, [0] * 24, timeout_s=10)
                assert (await failure(call)).code is Code.RESOURCE_EXHAUSTED
        await pusher.close()
        await decode.stop()

    asyncio.run(told())


class Abrupt(Decode):
    """Ends a push at its first chunk with `says`, while more are on their way, and reads no further."""

    says: grpc.StatusCode | None = None

    async def push_kv(self, chunks: AsyncIterator[kv_pb2.KvChunk], context: Any) -> kv_pb2.KvAck:
        if self.says is None:
            return await super().push_kv(chunks, context)
        says, self.says = self.says, None
        await anext(aiter(chunks))
        await context.abort(says, "no more of it")
        raise AssertionError("abort returned")


LARGE = Shape(30, 3, 64)
RETRIED = (Code.NOT_FOUND, Code.UNAVAILABLE)


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [*RETRIED, Code.RESOURCE_EXHAUSTED, Code.FAILED_PRECONDITION, Code.DATA_LOSS, Code.ABORTED],
    ids=lambda code: code.name,
)
def test_what_a_peer_says_that_reads_no_further_is_heard_every_time(code: Any) -> None:
    """A write into a call that has just ended fails, a few times in a hundred, and must not hide why it ended."""

    async def told() -> None:
        large = [bytes(LARGE.payload_bytes)] * 24
        hashes = [7] + [0] * 23
        pusher, decode = Pusher(LARGE), Abrupt(64, LARGE)
        await decode.start()
        # It has the first block from now on, and the connection has worked.
        await pusher(decode.address, "first", 16 * 24, large, hashes, timeout_s=10)
        for i in range(100):
            decode.says = code
            call = pusher(decode.address, f"h{i}", 16 * 24, large, hashes, timeout_s=10)
            if code in RETRIED:
                sent = 24 if code is Code.NOT_FOUND else 23
                assert (await call).blocks_sent == sent
                assert decode.pool.release(f"h{i}")
            else:
                failed = await failure(call)
                assert (failed.code, failed.details) == (code, "no more of it")
        await pusher.close()
        await decode.stop()

    asyncio.run(told())


def test_a_full_pool_is_the_fault_of_the_decode_worker() -> None:
    async def story(pusher: Pusher, decode: Decode) -> None:
        failed = await failure(push(pusher, decode))
        assert (failed.code, failed.decode_fault) == (Code.RESOURCE_EXHAUSTED, True)
        assert failed.details in str(failed)
        assert decode.pool.held_blocks == 0
        assert decode.calls == ["HasBlocks", "PushKv"]

    talk(story, capacity=4)


def test_a_released_handle_is_nobodys_fault() -> None:
    async def story(pusher: Pusher, decode: Decode) -> None:
        decode.pool.release("h")
        failed = await failure(push(pusher, decode))
        assert (failed.code, failed.decode_fault) == (Code.ABORTED, False)

    talk(story)


def test_an_empty_handle_id_is_not_the_fault_of_the_decode_worker() -> None:
    async def story(pusher: Pusher, decode: Decode) -> None:
        failed = await failure(push(pusher, decode, handle_id=""))
        assert (failed.code, failed.decode_fault) == (Code.INVALID_ARGUMENT, False)

    talk(story)


def test_a_decode_worker_of_another_format_is_told_from_a_dead_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story(pusher: Pusher, decode: Decode) -> None:
        monkeypatch.setattr(push_module, "KV_FORMAT", KV_FORMAT + 1)
        failed = await failure(push(pusher, decode))
        assert (failed.code, failed.decode_fault) == (Code.FAILED_PRECONDITION, True)
        assert decode.calls == ["HasBlocks"]

    talk(story)


def test_a_decode_worker_that_cannot_be_reached_is_unavailable() -> None:
    async def story(pusher: Pusher, decode: Decode) -> None:
        await decode.stop()
        for _ in range(2):
            failed = await failure(push(pusher, decode))
            assert (failed.code, failed.decode_fault) == (Code.UNAVAILABLE, True)
        # It is asked as soon as it is there, without a wait that a failed connection has earned.
        await decode.start()
        await push(pusher, decode)
        assert decode.calls == ["HasBlocks", "PushKv"]

    talk(story)


def test_a_decode_worker_that_does_not_answer_costs_no_more_than_the_timeout() -> None:
    async def story(pusher: Pusher, decode: Decode) -> None:
        decode.hangs = asyncio.Event()
        failed = await failure(push(pusher, decode, timeout_s=0.2))
        assert (failed.code, failed.decode_fault) == (Code.DEADLINE_EXCEEDED, True)
        assert decode.hangs.is_set()

    talk(story)


class Relay:
    """A way to a decode worker on which connections can die as behind a firewall: seen only by whoever uses them."""

    def __init__(self, target: str) -> None:
        self._host, _, self._port = target.rpartition(":")
        self._dead: set[asyncio.StreamWriter] = set()
        self._client_sides: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.connections = 0
        self.address = ""

    def forget(self) -> None:
        """From now on what comes over the connections of this moment is answered by a reset."""
        self._dead |= self._client_sides

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._client_sides.add(writer)
        there, back = await asyncio.open_connection(self._host, int(self._port))
        answers = asyncio.ensure_future(self._pass_on(there, writer))
        self._tasks.add(answers)
        while data := await reader.read(1 << 16):
            if writer in self._dead:
                break
            back.write(data)
        for side in (writer, back):
            side.transport.abort()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                if writer not in self._dead:
                    writer.write(data)

    async def __aenter__(self) -> "Relay":
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.address = f"{host}:{port}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        for side in self._client_sides:
            side.transport.abort()
        await asyncio.gather(*self._tasks)


@pytest.mark.parametrize("pushes", [1, 3])
def test_p14_a_connection_that_died_unseen_costs_no_request(pushes: int) -> None:
    async def story(pusher: Pusher, decode: Decode) -> None:
        async with Relay(decode.address) as relay:
            for round_ in range(3):
                names = [f"{round_}-{i}" for i in range(pushes)]
                await asyncio.gather(
                    *(push(pusher, relay.address, handle_id=name) for name in names)
                )
                for name in names:
                    assert decode.pool.release(name)
                relay.forget()
            assert relay.connections == 3
            await pusher.close()

    talk(story, capacity=32)


def test_p14_a_worker_that_was_restarted_costs_no_request() -> None:
    async def story(pusher: Pusher, decode: Decode) -> None:
        for _ in range(3):
            # A new process at the same address knows nothing of any block.
            await decode.restart()
            assert (await push(pusher, decode)).blocks_sent == 5
            assert decode.pool.handles == {"h"}

    talk(story)


def test_p14_a_connection_that_dies_under_a_push_costs_no_request() -> None:
    async def story(pusher: Pusher, decode: Decode) -> None:
        await push(pusher, decode)
        decode.hangs = asyncio.Event()
        again = asyncio.ensure_future(push(pusher, decode, handle_id="i"))
        await decode.hangs.wait()
        decode.hangs = None
        await decode.restart()
        assert (await again).blocks_sent == 5
        assert decode.pool.handles == {"i"}

    talk(story)


def test_p14_a_connection_that_never_worked_is_not_tried_twice() -> None:
    """A server that closes every connection is asked once for each push."""

    async def told() -> None:
        connections = 0

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal connections
            connections += 1
            writer.close()

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        pusher = Pusher(SHAPE)
        for pushes in (1, 2):
            failed = await failure(push(pusher, f"{host}:{port}"))
            assert (failed.code, failed.decode_fault) == (Code.UNAVAILABLE, True)
            assert connections == pushes
        await pusher.close()
        server.close()
        await server.wait_closed()

    asyncio.run(told())


def test_a_cancelled_push_leaves_nothing_and_is_over() -> None:
    async def story(pusher: Pusher, decode: Decode) -> None:
        decode.hangs = asyncio.Event()
        task = asyncio.ensure_future(push(pusher, decode))
        await decode.hangs.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        decode.hangs = None
        await push(pusher, decode, handle_id="i")
        assert decode.pool.handles == {"i"}

    talk(story)


def test_the_trouble_of_one_push_does_not_end_another_one() -> None:
    """Two pushes share a connection; one is refused and one goes on over it."""

    async def story(pusher: Pusher, decode: Decode) -> None:
        decode.pool.release("bad")
        results = await asyncio.gather(
            push(pusher, decode, handle_id="bad"),
            *(push(pusher, decode, handle_id=str(i)) for i in range(5)),
            return_exceptions=True,
        )
        assert [getattr(result, "code", None) for result in results] == [Code.ABORTED] + [None] * 5
        assert decode.pool.handles == set("01234")

    # Until they are over, pushes of one prompt do not share its blocks.
    talk(story, capacity=6 * 5)


def test_no_more_connections_are_kept_than_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(pusher: Pusher, decode: Decode) -> None:
        monkeypatch.setattr(push_module, "LINES_MAX", 1)
        async with served() as (_, other):
            for target in (decode, other, decode, decode):
                await push(pusher, target)
            # One that is in use is not closed, but not kept either.
            decode.hangs = asyncio.Event()
            hanging = asyncio.ensure_future(push(pusher, decode, timeout_s=0.2))
            await decode.hangs.wait()
            await push(pusher, other)
            assert not hanging.done()
            assert list(pusher._lines) == [other.address]
            assert (await failure(hanging)).code is Code.DEADLINE_EXCEEDED

    talk(story)


@pytest.mark.parametrize(
    ("n_tokens", "blocks", "hashes"), [(0, 0, 0), (17, 1, 1), (16, 2, 2), (17, 2, 1)]
)
def test_what_does_not_belong_together_is_not_pushed(
    n_tokens: int, blocks: int, hashes: int
) -> None:
    async def told() -> None:
        with pytest.raises(ValueError, match="blocks"):
            await Pusher(SHAPE)(
                "127.0.0.1:1", "h", n_tokens, [b""] * blocks, [0] * hashes, timeout_s=1
            )

    asyncio.run(told())


def test_blocks_that_no_message_holds_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="do not fit into a message"):
        Pusher(Shape(64, 8, 128))
