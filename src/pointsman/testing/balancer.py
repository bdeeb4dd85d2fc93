"""A stand-in for the load balancer before several gateways: it asks `/readyz`, and passes connections on.

It works on connections, as a cloud's network balancer does: a new one goes to the next ready gateway, and stays there
to its end, whatever becomes of that gateway's readiness.
"""

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

__all__ = ["Backend", "Balancer"]

POLL_S = 0.1
"""How often each gateway is asked."""


@dataclass(eq=False)
class Backend:
    """A gateway: its API address and its health address; `ready` is what it said last."""

    api: tuple[str, int]
    health: tuple[str, int]
    ready: bool = False
    refused: int = 0


@dataclass(eq=False)
class Balancer:
    """Passes connections on; `address` is where it listens, `refused` counts connections that nobody took."""

    backends: list[Backend] = field(default_factory=list)
    refused: int = 0
    address: tuple[str, int] = ("", 0)

    async def __aenter__(self) -> Self:
        self._next = 0
        self._asked = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0, backlog=1024)
        host, port = self._server.sockets[0].getsockname()[:2]
        self.address = host, port
        self._poll = asyncio.get_running_loop().create_task(self._ask_often())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.close()
        for task in (self._poll, *self._tasks):
            task.cancel()
        await asyncio.gather(self._poll, *self._tasks, return_exceptions=True)

    async def until(self, backend: Backend, *, ready: bool) -> None:
        """Wait until a gateway has said that it is ready, or that it is not."""
        async with self._asked:
            await self._asked.wait_for(lambda: backend.ready is ready)

    async def _ask_often(self) -> None:
        while True:
            for backend in tuple(self.backends):
                backend.ready = await _is_ready(backend.health)
            async with self._asked:
                self._asked.notify_all()
            await asyncio.sleep(POLL_S)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._pass_on(reader, writer)
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ready = [backend for backend in self.backends if backend.ready]
        if not ready:
            self.refused += 1
            return
        self._next += 1
        backend = ready[self._next % len(ready)]
        try:
            there, back = await asyncio.open_connection(*backend.api)
        except OSError:
            backend.refused += 1
            self.refused += 1
            return
        try:
            await asyncio.gather(_pump(reader, back), _pump(there, writer))
        finally:
            back.close()


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await source.read(65536):
            sink.write(data)
            await sink.drain()
        if sink.can_write_eof():
            sink.write_eof()


async def _is_ready(address: tuple[str, int]) -> bool:
    try:
        async with asyncio.timeout(1.0):
            reader, writer = await asyncio.open_connection(*address)
            try:
                writer.write(b"GET /readyz HTTP/1.1\r\nhost: gateway\r\nconnection: close\r\n\r\n")
                return (await reader.readline()).split(b" ")[1:2] == [b"200"]
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False
