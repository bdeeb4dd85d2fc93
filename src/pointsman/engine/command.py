"""`pointsman engine`: put the parts together, run until SIGTERM, drain, leave.

Importing this module imports neither llama.cpp nor numpy: the command line always knows the command, whether or not the
`engine` extra is there.
"""

import asyncio
import contextlib
import functools
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import uvicorn
    from starlette.applications import Starlette

    from pointsman.engine.control import EngineControl
    from pointsman.engine.kv.state import Layout
    from pointsman.engine.scheduler import Scheduler
    from pointsman.engine.served import Served

__all__ = ["EngineOptions", "engine", "run"]

log = logging.getLogger(__name__)

_KEEP_ALIVE_S = 75
"""Idle connections live longer here than in any gateway's pool, so that it is the gateway which closes them."""
_GRACE_S = 5
_MISSING = "pointsman engine needs the engine extra: pip install 'pointsman[engine]'"


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How to run a worker. Addresses are host:port, `context` counts tokens over all sequences.

    None for `grpc_listen` and `kv_listen`: a free port beside `listen`; for `kv_blocks`: as many as the cache has.
    """

    model: Path | None = None
    served_model: str | None = None
    listen: str = "127.0.0.1:8000"
    advertise: str | None = None
    registry: str | None = None
    worker_id: str | None = None
    role: str = "unified"
    grpc_listen: str | None = None
    kv_listen: str | None = None
    kv_blocks: int | None = None
    kv_hold_s: float = 120.0
    threads: int = 1
    context: int = 8192
    parallel: int = 8
    queue_capacity: int = 256
    queue_deadline_s: float = 30.0
    drain_deadline_s: float = 30.0


def engine(
    model: Annotated[
        Path | None,
        typer.Option(help="A GGUF file. Without it SmolLM2-135M-Instruct is fetched once."),
    ] = None,
    served_model: Annotated[
        str | None,
        typer.Option(help="The model id to serve. [default: smollm2, or the file's name]"),
    ] = None,
    listen: Annotated[
        str, typer.Option(help="host:port; port 0 takes a free one.")
    ] = "127.0.0.1:8000",
    advertise: Annotated[
        str | None, typer.Option(help="host:port that the gateway is told. [default: --listen]")
    ] = None,
    registry: Annotated[
        str | None,
        typer.Option(help="host:port of the gateway's registry. Without it: no heartbeats."),
    ] = None,
    worker_id: Annotated[
        str | None, typer.Option(help="The name to be known by. [default: engine-<port>]")
    ] = None,
    role: Annotated[
        str,
        typer.Option(
            help="unified; prefill computes prompts for others; decode goes on from computed prompts, too."
        ),
    ] = "unified",
    grpc_listen: Annotated[
        str | None,
        typer.Option(help="host:port of EngineControl. [default: a free port beside --listen]"),
    ] = None,
    kv_listen: Annotated[
        str | None,
        typer.Option(
            help="host:port of KvTransferService; role decode only. [default: a free port beside --listen]"
        ),
    ] = None,
    kv_blocks: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Blocks of 16 tokens to take from others. [default: as many as --context has]",
        ),
    ] = None,
    kv_hold: Annotated[
        float, typer.Option(min=0, help="Seconds that pushed blocks are held for who resumes them.")
    ] = 120.0,
    threads: Annotated[int, typer.Option(min=1, help="Threads of llama.cpp.")] = 1,
    context: Annotated[
        int, typer.Option(min=64, help="Tokens of KV cache in all, shared out over --parallel.")
    ] = 8192,
    parallel: Annotated[int, typer.Option(min=1, max=64, help="Sequences at a time.")] = 8,
    queue_capacity: Annotated[int, typer.Option(min=0, help="Requests that may wait.")] = 256,
    queue_deadline: Annotated[
        float, typer.Option(min=0, help="Seconds a request may wait.")
    ] = 30.0,
    drain_deadline: Annotated[
        float, typer.Option(min=0, help="Seconds that running requests get after SIGTERM.")
    ] = 30.0,
) -> None:
    """Run a real engine worker in the foreground until SIGTERM."""
    options = EngineOptions(
        model=model,
        served_model=served_model,
        listen=listen,
        advertise=advertise,
        registry=registry,
        worker_id=worker_id,
        role=role,
        grpc_listen=grpc_listen,
        kv_listen=kv_listen,
        kv_blocks=kv_blocks,
        kv_hold_s=kv_hold,
        threads=threads,
        context=context,
        parallel=parallel,
        queue_capacity=queue_capacity,
        queue_deadline_s=queue_deadline,
        drain_deadline_s=drain_deadline,
    )
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s"
    )
    raise typer.Exit(run(options))


def run(options: EngineOptions) -> int:
    """Load the model and serve it until SIGTERM or SIGINT.

    Returns the exit code: 0 after a drain, 1 when the scheduling loop died, 2 when it cannot start.
    """
    try:
        import google_crc32c  # noqa: F401
        import jinja2  # noqa: F401
        import numpy  # noqa: F401
        import uvicorn  # noqa: F401
        import xllamacpp  # noqa: F401
    except ImportError as error:
        typer.echo(f"{_MISSING} ({error.name} is missing)", err=True)
        return 2
    from pointsman.engine.llama import LlamaError
    from pointsman.engine.weights import FetchFailed

    try:
        return asyncio.run(_serve(options))
    except (FetchFailed, LlamaError, OSError, ValueError) as error:
        typer.echo(f"pointsman engine: {error}", err=True)
        return 2


async def _serve(options: EngineOptions) -> int:
    from pointsman.engine.http import engine_app
    from pointsman.engine.roles import ROLES, serve_role, status_of
    from pointsman.heartbeat import Heartbeat

    if options.role not in ROLES:
        raise ValueError(f"the role {options.role!r} is not supported; {', '.join(ROLES)} are")
    async with contextlib.AsyncExitStack() as stack:
        listener = stack.enter_context(_listener(options.listen))
        served, layout = _load(options, stack)
        server = _server(engine_app(served))
        heartbeats: list[Heartbeat] = []

        def beat_soon() -> None:
            for heartbeat in heartbeats:
                heartbeat.soon()

        def on_failure() -> None:
            server.should_exit = True

        failed = stack.enter_context(_computing(served.scheduler, on_failure))
        beside = _beside(listener)
        ports = await stack.enter_async_context(
            serve_role(
                served,
                role=options.role,
                layout=layout,
                grpc_listen=options.grpc_listen or beside,
                kv_listen=options.kv_listen or beside,
                on_drain=beat_soon,
            )
        )
        address = options.advertise or _address(listener)
        worker_id = options.worker_id or f"engine-{listener.getsockname()[1]}"
        if options.advertise is not None:
            ports = ports.at(options.advertise.rpartition(":")[0])
        async with asyncio.TaskGroup() as tasks:
            background = []
            if options.registry is not None:
                status = functools.partial(
                    status_of, served, ports, worker_id=worker_id, address=address
                )
                heartbeat = Heartbeat(options.registry, status, on_drain=served.scheduler.drain)
                heartbeats.append(heartbeat)
                background.append(tasks.create_task(heartbeat.run()))
            leaving = _leave(server, ports.control, options.drain_deadline_s)
            background.append(tasks.create_task(leaving))
            typer.echo(f"engine {worker_id} serves {served.name} on {address}")
            kv = f", KV on {ports.kv_address}" if ports.kv_address else ""
            typer.echo(f"{options.role}: control on {ports.grpc_address}{kv}")
            sys.stdout.flush()
            await server.serve(sockets=[listener])
            for task in background:
                task.cancel()
    return 1 if failed.is_set() else 0


def _load(
    options: EngineOptions, stack: contextlib.AsyncExitStack
) -> "tuple[Served, Layout | None]":
    """The model with its scheduler, and the layout of its KV states where the role hands them over."""
    from rich.console import Console

    from pointsman.engine.kv.pool import Pool
    from pointsman.engine.kv.state import learn_layout
    from pointsman.engine.llama import Context, Model, load_library
    from pointsman.engine.resume import Handles
    from pointsman.engine.scheduler import Scheduler
    from pointsman.engine.served import Served
    from pointsman.engine.weights import DEFAULT_MODEL, cache_folder, default_weights

    name = options.served_model or (options.model.stem if options.model else DEFAULT_MODEL)
    path = options.model or default_weights(cache_folder(os.environ), Console(stderr=True))
    model = stack.enter_context(Model(load_library(), path))
    each = options.context // options.parallel
    context = stack.enter_context(
        Context(model, context=each, sequences=options.parallel, threads=options.threads)
    )
    layout = None
    if options.role != "unified":
        layout = learn_layout(context, kv_heads=model.kv_heads)
    scheduler = Scheduler(
        context,
        model,
        slots=options.parallel,
        # llama.cpp rounds the size of its cache up; what was asked for is what is served.
        context=min(each, context.n_ctx_seq),
        now=time.monotonic,
        queue_capacity=options.queue_capacity,
        queue_deadline=options.queue_deadline_s,
    )
    handles = None
    if options.role == "decode" and layout is not None:
        blocks = options.kv_blocks or scheduler.load.kv_total_blocks
        handles = Handles(Pool(blocks, now=time.monotonic, hold_s=options.kv_hold_s), layout)
    return Served(name, model, scheduler, handles), layout


async def _leave(server: "uvicorn.Server", control: "EngineControl", deadline: float) -> None:
    """On the first signal drain for up to `deadline` seconds, then stop the server; on the second stop at once."""
    signals = asyncio.Semaphore(0)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.release)
    await signals.acquire()
    draining = loop.create_task(control.leave(deadline))
    again = loop.create_task(signals.acquire())
    waits: set[asyncio.Future[Any]] = {draining, again}
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    again.cancel()
    ended = 0 if draining.done() else await control.end("the worker is shutting down")
    if ended := ended + await draining:
        log.warning("%d requests that still ran were ended", ended)
    server.should_exit = True


@contextlib.contextmanager
def _computing(scheduler: "Scheduler", on_failure: Callable[[], None]) -> Iterator[threading.Event]:
    """Run the loop in a thread of its own. A loop that dies sets the event: a worker must not beat on without it."""
    failed, leaving = threading.Event(), threading.Event()

    def compute() -> None:
        try:
            scheduler.run()
        finally:
            if not leaving.is_set():
                log.critical("the scheduling loop has died")
                failed.set()
                on_failure()

    thread = threading.Thread(target=compute, name="scheduler", daemon=True)
    thread.start()
    try:
        yield failed
    finally:
        leaving.set()
        scheduler.stop()
        thread.join()


def _server(app: "Starlette") -> "uvicorn.Server":
    import uvicorn

    class Server(uvicorn.Server):
        """Leaves signals alone: they mean a drain first, and only then a stop."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    config = uvicorn.Config(
        app,
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_GRACE_S,
    )
    return Server(config)


def _listener(listen: str) -> socket.socket:
    """A listening socket on host:port; connections made from now on wait for the server."""
    host, colon, port = listen.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"--listen {listen!r} is not host:port")
    host = host.strip("[]") or "127.0.0.1"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, int(port)), family=family, backlog=1024)
    # Connections inherit it. asyncio does not see that they are TCP, and then each answer's body, and each token after
    # the first, could wait 40 ms for an acknowledgement.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _beside(listener: socket.socket) -> str:
    """Any free port of the host of `listener`."""
    return _address(listener).rpartition(":")[0] + ":0"
