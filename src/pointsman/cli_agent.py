"""`pointsman agent`: heartbeats for an engine that sends none."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pointsman.domain.worker import Role

if TYPE_CHECKING:
    import grpc

__all__ = ["agent"]

BAD_ARGUMENTS = 2


def agent(
    engine: Annotated[
        str, typer.Option(help="URL of the engine, such as http://127.0.0.1:8000.")
    ] = "http://127.0.0.1:8000",
    registry: Annotated[
        list[str] | None,
        typer.Option(help="host:port of a gateway's registry; once for each gateway."),
    ] = None,
    advertise: Annotated[
        str | None,
        typer.Option(help="host:port where gateways reach the engine. [default: that of --engine]"),
    ] = None,
    worker_id: Annotated[
        str | None, typer.Option(help="The name to be known by. [default: what is advertised]")
    ] = None,
    model: Annotated[str, typer.Option(help="Id of its model; auto: the first it lists.")] = "auto",
    dialect: Annotated[
        str, typer.Option(help="auto, vllm, sglang, llamacpp, openai or tl.")
    ] = "auto",
    role: Annotated[Role, typer.Option(help="What it can be asked to do.")] = Role.UNIFIED,
    connector: Annotated[
        str, typer.Option(help="How it hands KV caches over: nixl, mooncake, bootstrap, slots.")
    ] = "",
    bootstrap_port: Annotated[
        int, typer.Option(min=1, max=65535, help="Port of a prefill worker's bootstrap server.")
    ] = 8998,
    capacity: Annotated[
        int, typer.Option(min=0, help="Weight for the weighted policy. 0: the engine's own.")
    ] = 0,
    interval: Annotated[
        float, typer.Option(min=0.1, help="Seconds between two looks at the engine.")
    ] = 0.2,
    api_key_env: Annotated[
        str, typer.Option(help="Environment variable with the key that the engine wants.")
    ] = "",
    registry_ca: Annotated[
        Path | None,
        typer.Option(help="CA (PEM) that registries are trusted by. Without it: plaintext."),
    ] = None,
    registry_cert: Annotated[
        Path | None, typer.Option(help="Certificate chain (PEM) that registries are shown.")
    ] = None,
    registry_key: Annotated[
        Path | None, typer.Option(help="Private key (PEM) of --registry-cert.")
    ] = None,
) -> None:
    """Ask the engine beside it how it is, and send heartbeats for it, until SIGTERM."""
    from pointsman.agent import Agent, run_agent
    from pointsman.domain.registry import InvalidReport
    from pointsman.errors import BadRequest
    from pointsman.parts import static_worker

    if not registry:
        raise _refused("--registry is missing: host:port of a gateway's registry")
    for each in registry:
        _check_registry(each)
    # Not with a user and a password, which are refused: the refusal names the worker.
    where = advertise or engine.rpartition("//")[2].partition("/")[0].rpartition("@")[2]
    values = {
        "id": worker_id or where,
        "url": engine,
        "model": model,
        "dialect": dialect,
        "role": role.value,
        "connector": connector,
        "bootstrap_port": bootstrap_port,
        "capacity": capacity,
        "poll_interval_s": interval,
        "api_key_env": api_key_env,
    }
    try:
        worker = static_worker(values, os.environ)
        credentials = _credentials(registry_ca, registry_cert, registry_key)
        if worker.bootstrap and advertise:
            worker.bootstrap = f"{advertise.rpartition(':')[0]}:{bootstrap_port}"
        scheme = "https://" if worker.tls else ""
        sidecar = Agent(worker, registry, address=f"{scheme}{where}", credentials=credentials)
    except (BadRequest, InvalidReport, OSError) as error:
        raise _refused(str(error)) from None
    run_agent(sidecar)


def _check_registry(address: str) -> None:
    from pointsman.config import Address

    try:
        if not all(Address.parse(address)):
            raise ValueError("host or port is missing")
    except ValueError as error:
        raise _refused(f"--registry {address}: {error}; expected host:port") from None


def _credentials(
    ca: Path | None, cert: Path | None, key: Path | None
) -> "grpc.ChannelCredentials | None":
    """Return what gRPC wants for TLS, None for plaintext. Raises OSError for a file that cannot be read."""
    import grpc

    if ca is None:
        return None
    return grpc.ssl_channel_credentials(
        ca.read_bytes(),
        key.read_bytes() if key is not None else None,
        cert.read_bytes() if cert is not None else None,
    )


def _refused(why: str) -> typer.Exit:
    typer.echo(f"pointsman: {why}", err=True)
    return typer.Exit(BAD_ARGUMENTS)
