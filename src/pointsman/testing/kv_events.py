"""A publisher of KV events that behaves as an engine's does, and as badly as a test wants.

It has the sockets of vLLM and SGLang, numbers its messages and keeps the last of them for replays. It caches nothing:
a test says which events it publishes.
"""

import asyncio
import socket
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Self

import msgspec
import zmq
import zmq.asyncio

__all__ = ["Publisher", "consecutive_ports", "stored"]

HOST = "tcp://127.0.0.1"
END = b"\xff" * 8
BIND_S = 10.0


class Publisher:
    """One rank of an engine. As a context manager it publishes on `port`, and answers replays on `replay_port`.

    A port of 0 is chosen once; `replay_port` None is for no replays. At most `kept` messages are kept for them;
    `topic_in_replays` is how newer engines answer. `asked` has the first number of every replay that was asked for.
    """

    def __init__(
        self,
        *,
        port: int = 0,
        replay_port: int | None = 0,
        kept: int = 10_000,
        topic_in_replays: bool = True,
    ) -> None:
        self.port = port
        self.replay_port = replay_port
        self.kept = kept
        self.topic_in_replays = topic_in_replays
        self.asked: list[int] = []
        self.answers = True
        self._context = zmq.asyncio.Context()
        self._begin()

    @property
    def endpoint(self) -> str:
        """Where it publishes."""
        return f"{HOST}:{self.port}"

    @property
    def replay_endpoint(self) -> str:
        """Where it answers replays, "" for nowhere."""
        return "" if self.replay_port is None else f"{HOST}:{self.replay_port}"

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
        self._context.term()

    async def open(self) -> None:
        """Listen, on the same ports as before."""
        self._pub = self._context.socket(zmq.XPUB)
        self.port = await _bound(self._pub, self.port)
        if self.replay_port is not None:
            self._router = self._context.socket(zmq.ROUTER)
            self.replay_port = await _bound(self._router, self.replay_port)
            self._replaying = asyncio.ensure_future(self._replay())

    async def close(self) -> None:
        """Close the sockets; what is kept stays."""
        self._pub.close(linger=0)
        if self.replay_port is not None:
            self._replaying.cancel()
            await asyncio.wait([self._replaying])
            self._router.close(linger=0)

    async def restart(self) -> None:
        """Begin a new life at the same ports."""
        await self.close()
        self._begin()
        await self.open()

    async def subscribed(self) -> None:
        """Wait for a subscriber that was not there before."""
        async with asyncio.timeout(BIND_S):
            while await self._pub.recv() != b"\x01":
                pass

    async def publish(self, *events: Any, lost: bool = False) -> int:
        """Publish a batch, unless it is to be `lost`, and return its number."""
        payload = msgspec.msgpack.encode([time.time(), list(events), 0])
        return await self.publish_raw(payload, lost=lost)

    async def publish_raw(self, payload: bytes, *, lost: bool = False) -> int:
        """Publish whatever bytes as a batch."""
        number = self._next
        self._next += 1
        self._buffer.append((number, payload))
        if not lost:
            await self.send([b"kv", number.to_bytes(8, "big"), payload])
        return number

    async def send(self, frames: Sequence[bytes]) -> None:
        """Send frames, whatever they are."""
        await self._pub.send_multipart(list(frames))

    def _begin(self) -> None:
        self._next: int = 0
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=self.kept)

    async def _replay(self) -> None:
        while True:
            who, _, first = await self._router.recv_multipart()
            self.asked.append(int.from_bytes(first, "big"))
            if not self.answers:
                continue
            topic = [b"kv"] if self.topic_in_replays else []
            for number, payload in list(self._buffer):
                if number >= self.asked[-1]:
                    frames = [who, b"", *topic, number.to_bytes(8, "big"), payload]
                    await self._router.send_multipart(frames)
            end = [who, b"", *([b""] if self.topic_in_replays else []), END, b""]
            await self._router.send_multipart(end)


def stored(
    names: Sequence[int | bytes],
    ids: Sequence[int],
    parent: int | bytes | None = None,
    *,
    block_tokens: int = 16,
    as_map: bool = False,
    **more: Any,
) -> Any:
    """Return an event of blocks that were cached, as one generation of engines writes it, or the other.

    >>> stored([7], [1, 2], block_tokens=2)
    ['BlockStored', [7], None, [1, 2], 2, None, 'GPU']
    """
    if as_map:
        return {
            "type": "BlockStored",
            "block_hashes": list(names),
            "parent_block_hash": parent,
            "token_ids": list(ids),
            "block_size": block_tokens,
            "lora_id": None,
            "medium": "GPU",
            **more,
        }
    return ["BlockStored", list(names), parent, list(ids), block_tokens, None, "GPU"]


def consecutive_ports(count: int) -> int:
    """Return the first of so many free ports in a row."""
    while True:
        sockets: list[socket.socket] = []
        try:
            first = 0
            for number in range(count):
                sockets.append(socket.socket())
                sockets[-1].bind(("127.0.0.1", first + number if number else 0))
                first = first or sockets[-1].getsockname()[1]
        except (OSError, OverflowError):
            continue
        else:
            return first
        finally:
            for each in sockets:
                each.close()


async def _bound(made: zmq.asyncio.Socket, port: int) -> int:
    if not port:
        return int(made.bind_to_random_port(HOST))
    async with asyncio.timeout(BIND_S):
        while True:
            try:
                made.bind(f"{HOST}:{port}")
            except zmq.ZMQError:
                # The former socket is closed by a thread of ZeroMQ's own.
                await asyncio.sleep(0.01)
            else:
                return port
