"""What a worker serves beside HTTP, by its role: EngineControl always, KvTransferService for decode.

A role is no other engine. Every one of them answers the whole HTTP surface by the same code; prefill computes prompts
for others on top of that, and decode takes them.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple, Self

from pointsman.engine.control import EngineControl, Push
from pointsman.engine.kv import KV_FORMAT
from pointsman.engine.kv.push import Pusher
from pointsman.engine.kv.service import KvTransfer
from pointsman.engine.kv.state import Layout
from pointsman.engine.rpc import serve_rpc
from pointsman.engine.served import Served
from pointsman.proto import control_pb2

__all__ = ["ROLES", "Ports", "serve_role", "status_of"]

ROLES = ("unified", "prefill", "decode")
EXPIRE_EVERY_S = 1.0


class Ports(NamedTuple):
    """A served role, and where it is called beside HTTP, as host:port; `kv_address` is empty unless it decodes."""

    role: str
    control: EngineControl
    grpc_address: str
    kv_address: str

    def at(self, host: str) -> Self:
        """The same ports as they are reached from outside."""

        def moved(address: str) -> str:
            return address and f"{host}:{address.rpartition(':')[2]}"

        return self._replace(
            grpc_address=moved(self.grpc_address), kv_address=moved(self.kv_address)
        )


@contextlib.asynccontextmanager
async def serve_role(
    served: Served,
    *,
    role: str,
    layout: Layout | None,
    push: Push | None = None,
    grpc_listen: str,
    kv_listen: str,
    on_drain: Callable[[], None] = lambda: None,
) -> AsyncIterator[Ports]:
    """Serve a role until the context ends; then calls that still run are ended.

    `layout` is that of the machine's KV states, None for a unified worker; `push` is there to be replaced in tests.

    Raises:
        ValueError, OSError: as `serve_rpc` does.
    """
    async with contextlib.AsyncExitStack() as stack:
        if role == "prefill" and layout is not None and push is None:
            push = Pusher(layout.shape)
            stack.push_async_callback(push.close)
        control = EngineControl(served, role=role, layout=layout, push=push, on_drain=on_drain)
        server, grpc_address = await serve_rpc(grpc_listen, control.generic_handler())
        stack.push_async_callback(server.stop, None)
        kv_address = ""
        if served.handles is not None and layout is not None:
            transfer = KvTransfer(
                served.handles.pool, layout.shape, leaving=lambda: served.scheduler.load.draining
            )
            server, kv_address = await serve_rpc(kv_listen, transfer.generic_handler())
            stack.push_async_callback(server.stop, None)
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            expiring = tasks.create_task(_expire(served.handles.pool.expire))
            stack.callback(expiring.cancel)
        yield Ports(role, control, grpc_address, kv_address)


def status_of(
    served: Served, ports: Ports, *, worker_id: str, address: str
) -> control_pb2.WorkerStatus:
    """What a heartbeat says of this moment. The blocks that handles hold are not free."""
    load = served.load
    return control_pb2.WorkerStatus(
        worker_id=worker_id,
        http_address=address,
        grpc_address=ports.grpc_address,
        kv_address=ports.kv_address,
        role=ports.role,
        model=served.name,
        kv_format=KV_FORMAT,
        queue_depth=load.queue_depth,
        running=load.running,
        kv_free_blocks=load.kv_free_blocks,
        kv_total_blocks=load.kv_total_blocks,
        draining=load.draining,
    )


async def _expire(expire: Callable[[], object]) -> None:
    while True:
        await asyncio.sleep(EXPIRE_EVERY_S)
        expire()
