"""A client that sees every byte of what it gets: for tests of framing, of broken streams, of bad requests."""

import asyncio
import socket
import ssl
import struct
from types import TracebackType
from typing import Self, cast

import msgspec

__all__ = ["Client", "Response", "get", "post"]


class Response:
    """One response. `complete` says whether its framing ended as HTTP has it; `body` is without the framing."""

    def __init__(
        self, status: int, headers: list[tuple[str, str]], body: bytes, complete: bool
    ) -> None:
        self.status = status
        self.headers = headers
        self.body = body
        self.complete = complete

    def header(self, name: str) -> str | None:
        """Return the only header of a name, or None. Raises ValueError where there are several."""
        found = [value for key, value in self.headers if key == name]
        if len(found) > 1:
            raise ValueError(f"{len(found)} headers are called {name}")
        return found[0] if found else None

    @property
    def error(self) -> dict[str, str | None]:
        """The error object of an OpenAI error answer, all four keys checked."""
        error: dict[str, str | None] = msgspec.json.decode(self.body)["error"]
        assert set(error) == {"message", "type", "param", "code"}, error
        return error


class Client:
    """One connection to a gateway, as an async context manager; over TLS with a context for it.

    Raises OSError on entry where the gateway does not let it in.
    """

    def __init__(self, address: tuple[str, int], *, tls: ssl.SSLContext | None = None) -> None:
        self._address = address
        self._tls = tls

    async def __aenter__(self) -> Self:
        self._reader, self._writer = await asyncio.open_connection(*self._address, ssl=self._tls)
        return self

    @property
    def ssl_object(self) -> ssl.SSLObject:
        """What was negotiated. Raises AssertionError on a plaintext connection."""
        found = self._writer.get_extra_info("ssl_object")
        assert isinstance(found, ssl.SSLObject)
        return found

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._writer.transport.abort()

    async def ask(self, data: bytes) -> Response:
        """Send bytes and read one response."""
        await self.send(data)
        return await self.response()

    async def send(self, data: bytes) -> None:
        """Send bytes as they are."""
        self._writer.write(data)
        await self._writer.drain()

    async def read(self, count: int) -> bytes:
        """Read exactly that many bytes."""
        return await self._reader.readexactly(count)

    async def read_until(self, separator: bytes) -> bytes:
        """Read up to and with a separator."""
        return await self._reader.readuntil(separator)

    async def rest(self) -> bytes:
        """Read until the gateway closes; a reset counts as a close."""
        data = b""
        try:
            while more := await self._reader.read(65536):
                data += more
        except ConnectionError:
            pass
        return data

    def stop_reading(self) -> None:
        """Read nothing from the socket any more, so that the kernel's window fills."""
        cast(asyncio.Transport, self._writer.transport).pause_reading()

    def go_on_reading(self) -> None:
        """Read again after `stop_reading`."""
        cast(asyncio.Transport, self._writer.transport).resume_reading()

    def half_close(self) -> None:
        """Say that nothing more will be sent (FIN), and go on reading."""
        self._writer.write_eof()

    def leave(self) -> None:
        """Close the connection at once, with a reset."""
        raw = self._writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()

    def hang_up(self) -> None:
        """Close the connection in good order (FIN)."""
        self._writer.close()

    async def head(self) -> tuple[int, list[tuple[str, str]]]:
        """Read a response head, past interim ones: the status and the headers, names in lower case."""
        while True:
            text = (await self._reader.readuntil(b"\r\n\r\n"))[:-4].decode("latin-1")
            line, *rest = text.split("\r\n")
            status = int(line.split(" ")[1])
            if status >= 200:
                break
        pairs = [
            (name.lower(), value.strip()) for name, _, value in (x.partition(":") for x in rest)
        ]
        return status, pairs

    async def response(self) -> Response:
        """Read one whole response, or what there is of it when the connection ends."""
        status, headers = await self.head()
        named = dict(headers)
        if status in (204, 304):
            body, complete = b"", True
        elif named.get("transfer-encoding") == "chunked":
            body, complete = await self._chunks()
        elif "content-length" in named:
            length = int(named["content-length"])
            try:
                body, complete = await self._reader.readexactly(length), True
            except asyncio.IncompleteReadError as short:
                body, complete = short.partial, False
        else:
            body, complete = await self.rest(), True
        return Response(status, headers, body, complete)

    async def _chunks(self) -> tuple[bytes, bool]:
        body = b""
        try:
            while True:
                size = int(await self._reader.readuntil(b"\r\n"), 16)
                if size == 0:
                    while await self._reader.readuntil(b"\r\n") != b"\r\n":
                        pass  # a trailer
                    return body, True
                data = await self._reader.readexactly(size + 2)
                assert data.endswith(b"\r\n"), data
                body += data[:-2]
        except (asyncio.IncompleteReadError, ConnectionError):
            return body, False


def get(path: str, headers: dict[str, str] | None = None) -> bytes:
    """Return a GET request."""
    return _request("GET", path, headers, b"")


def post(
    body: object,
    path: str = "/v1/chat/completions",
    headers: dict[str, str] | None = None,
    method: str = "POST",
) -> bytes:
    """Return a request with a body; bytes as `body` are sent as they are, anything else as JSON."""
    content = body if isinstance(body, bytes) else msgspec.json.encode(body)
    sent = {"content-type": "application/json", "content-length": str(len(content))}
    return _request(method, path, sent | (headers or {}), content)


def _request(method: str, path: str, headers: dict[str, str] | None, body: bytes) -> bytes:
    lines = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
    return f"{method} {path} HTTP/1.1\r\nhost: localhost\r\n{lines}\r\n".encode("latin-1") + body
