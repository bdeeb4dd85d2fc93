"""An engine that does what a test says, byte for byte: `Origin`, and the scripts to feed it.

A script is a coroutine function that gets one `Conversation` per request, after the request has been read whole. It
sends what it likes, and closes or resets the connection if the test wants that. One script per request, in order; the
last one is repeated.
"""

import asyncio
import os
import socket
import ssl
import struct
from collections.abc import Awaitable, Callable, Iterable
from types import TracebackType
from typing import Self

import msgspec

__all__ = [
    "Conversation",
    "Origin",
    "Received",
    "Script",
    "answers",
    "dead_address",
    "event",
    "hangs",
    "json_answer",
    "resets",
    "sse_chunk",
    "sse_head",
    "streams",
]

LINGER_NONE = struct.pack("ii", 1, 0)


class Received:
    """A request as the origin read it. Header names are lower case; `connection` counts from 1."""

    def __init__(
        self, line: str, headers: list[tuple[str, str]], body: bytes, connection: int
    ) -> None:
        self.line = line
        self.headers = headers
        self.body = body
        self.connection = connection

    def header(self, name: str) -> str | None:
        """Return the only header of a name, or None. Raises ValueError where there are several."""
        found = [value for key, value in self.headers if key == name]
        if len(found) > 1:
            raise ValueError(f"{len(found)} headers are called {name}")
        return found[0] if found else None


class Conversation:
    """The origin's side of one request."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: Received
    ) -> None:
        self._reader = reader
        self._writer = writer
        self.request = request
        self.begun = False  # whether anything was sent

    async def send(self, data: bytes) -> None:
        """Send bytes, and wait until the kernel has them. Raises ConnectionError where the gateway has left."""
        if self._writer.transport.is_closing():
            raise ConnectionResetError
        self.begun = True
        self._writer.write(data)
        await self._writer.drain()

    def close(self) -> None:
        """Close in good order (FIN)."""
        self._writer.close()

    def reset(self) -> None:
        """Close with a reset (RST), as a killed process does with unread data."""
        raw = self._writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_NONE)
        self._writer.transport.abort()

    def cut(self) -> None:
        """End the connection with a FIN alone; over TLS that is no end that could be believed."""
        raw = self._writer.get_extra_info("socket")
        with socket.socket(fileno=os.dup(raw.fileno())) as twin:
            twin.shutdown(socket.SHUT_WR)

    async def peer_closed(self) -> None:
        """Wait until the gateway closes the connection."""
        try:
            await self._reader.read()
        except ConnectionError:
            return


Script = Callable[[Conversation], Awaitable[None]]


class Origin:
    """An engine as an async context manager: at `address`, or on a loopback port of the kernel's choice.

    `requests` are all it read, `connections` how many were ever opened, `closed` how many of those have ended.
    With `tls` it speaks TLS; connections then count from the end of their handshakes.
    """

    def __init__(
        self, *scripts: Script, tls: ssl.SSLContext | None = None, address: str = "127.0.0.1:0"
    ) -> None:
        self.scripts = list(scripts) or [answers({})]
        self.requests: list[Received] = []
        self.connections = 0
        self.address = address
        self._tls = tls
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.closed = 0
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Self:
        wanted, _, port = self.address.rpartition(":")
        self._server = await asyncio.start_server(self._connected, wanted, port, ssl=self._tls)
        host, port = self._server.sockets[0].getsockname()
        self.address = f"{host}:{port}"
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Stop listening, and drop every connection: a death. Safe to repeat."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def received(self, count: int) -> None:
        """Wait until that many requests have been read."""
        await self._until(lambda: len(self.requests) >= count)

    async def left(self, count: int) -> None:
        """Wait until that many connections have ended."""
        await self._until(lambda: self.closed >= count)

    async def _until(self, happened: Callable[[], bool]) -> None:
        while not happened():
            await self._changed.wait()

    def _change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        number = self.connections
        try:
            while True:
                request = await _read_request(reader, number)
                if request is None:
                    return
                script = self.scripts[min(len(self.requests), len(self.scripts) - 1)]
                self.requests.append(request)
                self._change()
                await script(Conversation(reader, writer, request))
                if writer.is_closing():
                    return
        except (ConnectionError, asyncio.IncompleteReadError):
            return
        except asyncio.CancelledError:
            # Swallowed: the streams machinery reports a cancelled connection as an error.
            writer.transport.abort()
        finally:
            self._tasks.discard(task)
            writer.close()
            self.closed += 1
            self._change()


async def _read_request(reader: asyncio.StreamReader, connection: int) -> Received | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    line, *rest = head[:-4].decode("latin-1").split("\r\n")
    pairs = [
        (name.lower(), value.strip()) for name, _, value in (each.partition(":") for each in rest)
    ]
    length = next((int(value) for name, value in pairs if name == "content-length"), 0)
    return Received(line, pairs, await reader.readexactly(length), connection)


def dead_address() -> str:
    """Return a loopback address where nobody listens: bound, noted, closed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        host, port = probe.getsockname()
    return f"{host}:{port}"


def json_answer(
    body: object, status: int = 200, headers: Iterable[tuple[str, str]] = (), reason: str = "X"
) -> bytes:
    """Return a whole JSON response; bytes as `body` are sent as they are."""
    content = body if isinstance(body, bytes) else msgspec.json.encode(body)
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
    return (
        f"HTTP/1.1 {status} {reason}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\n{lines}\r\n"
    ).encode("latin-1") + content


def sse_head(extra: str = "") -> bytes:
    """Return the head of a chunked event stream; `extra` are further whole lines."""
    return (
        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
        f"transfer-encoding: chunked\r\n{extra}\r\n"
    ).encode("latin-1")


def sse_chunk(data: bytes) -> bytes:
    """Return bytes as one HTTP chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(text: str) -> bytes:
    """Return a chat completion event with one piece of text."""
    delta = {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]}
    return b"data: %b\n\n" % msgspec.json.encode({"object": "chat.completion.chunk", **delta})


def answers(body: object, status: int = 200, headers: Iterable[tuple[str, str]] = ()) -> Script:
    """Answer with JSON."""
    whole = json_answer(body, status, headers)

    async def script(talk: Conversation) -> None:
        await talk.send(whole)

    return script


def streams(*texts: str, done: bool = True) -> Script:
    """Stream one event per text, each in a chunk of its own, then `[DONE]`, and end in good order."""

    async def script(talk: Conversation) -> None:
        await talk.send(sse_head())
        for text in texts:
            await talk.send(sse_chunk(event(text)))
        end = sse_chunk(b"data: [DONE]\n\n") if done else b""
        await talk.send(end + b"0\r\n\r\n")

    return script


def resets(*parts: bytes) -> Script:
    """Send bytes as they are, then reset the connection."""

    async def script(talk: Conversation) -> None:
        for part in parts:
            await talk.send(part)
        talk.reset()

    return script


def hangs(*parts: bytes) -> Script:
    """Send bytes as they are, then say nothing until the gateway gives up."""

    async def script(talk: Conversation) -> None:
        for part in parts:
            await talk.send(part)
        await talk.peer_closed()

    return script
