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

    from pointsman.engine.scheduler import Scheduler
    from pointsman.proto import control_pb2

__all__ = ["EngineOptions", "engine", "run"]

log = logging.getLogger(__name__)

_KEEP_ALIVE_S = 75
"""Idle connections live longer here than in any gateway's pool, so that it is the gateway which closes them."""
_GRACE_S = 5
_MISSING = "pointsman engine needs the engine extra: pip install 'pointsman[engine]'"


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How to run a worker. Addresses are host:port, `context` counts tokens over all sequences."""

    model: Path | None = None
    served_model: str | None = None
    listen: str = "127.0.0.1:8000"
    advertise: str | None = None
    registry: str | None = None
    worker_id: str | None = None
    role: str = "unified"
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
    role: Annotated[str, typer.Option(help="unified is the only role so far.")] = "unified",
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
    from rich.console import Console

    from pointsman.engine.heartbeat import Heartbeat
    from pointsman.engine.http import engine_app
    from pointsman.engine.llama import Context, Model, load_library
    from pointsman.engine.scheduler import Scheduler
    from pointsman.engine.served import Served
    from pointsman.engine.weights import DEFAULT_MODEL, cache_folder, default_weights

    if options.role != "unified":
        raise ValueError(f"the role {options.role!r} is not supported; unified is")
    name = options.served_model or (options.model.stem if options.model else DEFAULT_MODEL)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(_listener(options.listen))
        path = options.model or default_weights(cache_folder(os.environ), Console(stderr=True))
        model = stack.enter_context(Model(load_library(), path))
        each = options.context // options.parallel
        context = stack.enter_context(
            Context(model, context=each, sequences=options.parallel, threads=options.threads)
        )
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
        address = options.advertise or _address(listener)
        worker_id = options.worker_id or f"engine-{listener.getsockname()[1]}"
        server = _server(engine_app(Served(name, model, scheduler)))

        def on_failure() -> None:
            server.should_exit = True

        failed = stack.enter_context(_computing(scheduler, on_failure))
        async with asyncio.TaskGroup() as tasks:
            heartbeat: Heartbeat | None = None
            background = []
            if options.registry is not None:
                status = functools.partial(
                    _status, scheduler, worker_id=worker_id, address=address, name=name
                )
                heartbeat = Heartbeat(options.registry, status, on_drain=scheduler.drain)
                background.append(tasks.create_task(heartbeat.run()))
            beat_soon = heartbeat.soon if heartbeat else lambda: None
            background.append(
                tasks.create_task(_leave(server, scheduler, beat_soon, options.drain_deadline_s))
            )
            typer.echo(f"engine {worker_id} serves {name} on {address}")
            sys.stdout.flush()
            await server.serve(sockets=[listener])
            for task in background:
                task.cancel()
    return 1 if failed.is_set() else 0


async def _leave(
    server: "uvicorn.Server", scheduler: "Scheduler", beat_soon: Callable[[], None], deadline: float
) -> None:
    """On the first signal drain for up to `deadline` seconds, then stop the server; on the second stop at once."""
    signals = asyncio.Semaphore(0)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.release)
    await signals.acquire()
    scheduler.drain()
    beat_soon()
    idle = loop.run_in_executor(None, scheduler.wait_idle, deadline)
    again = loop.create_task(signals.acquire())
    waits: set[asyncio.Future[Any]] = {idle, again}
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    again.cancel()
    if not scheduler.idle:
        log.warning("the requests that still run are ended")
    scheduler.abort("the worker is shutting down")
    server.should_exit = True


def _status(
    scheduler: "Scheduler", *, worker_id: str, address: str, name: str
) -> "control_pb2.WorkerStatus":
    from pointsman.proto import control_pb2

    load = scheduler.load
    return control_pb2.WorkerStatus(
        worker_id=worker_id,
        http_address=address,
        role="unified",
        model=name,
        kv_format=1,
        queue_depth=load.queue_depth,
        running=load.running,
        kv_free_blocks=load.kv_free_blocks,
        kv_total_blocks=load.kv_total_blocks,
        draining=load.draining,
    )


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
    return socket.create_server((host, int(port)), family=family, backlog=1024)


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
