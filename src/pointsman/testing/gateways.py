"""A whole gateway on loopback ports of the kernel's choice, for tests over real sockets."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from pointsman.app import Gateway
from pointsman.config import Config, GatewayConfig, StaticWorker
from pointsman.testing.client import Client
from pointsman.testing.origin import Origin, Script

__all__ = ["counted", "fronted", "running"]

ANY = "127.0.0.1:0"
PEPPER = {"TL_GATEWAY_PEPPER": "pepper"}
"""What the gateways of tests find in their environment."""


@asynccontextmanager
async def running(
    workers: Mapping[str, str] | None = None, *, model: str = "m", **options: Any
) -> AsyncIterator[Gateway]:
    """Run a gateway over static workers, given as id -> `host:port` or a URL, that all serve `model`.

    `options` are those of the configuration. The default policy is least_outstanding, so that ties go to the smallest
    id and a test knows who is asked first.
    """
    static = tuple(
        StaticWorker(id=name, url=address if "://" in address else f"http://{address}", model=model)
        for name, address in (workers or {}).items()
    )
    options.setdefault("route_policy", "least_outstanding")
    options.setdefault("access_log", "off")
    config = GatewayConfig(
        listen=ANY, health_listen=ANY, registry_listen=ANY, workers=static, **options
    )
    gateway = Gateway(Config(gateway=config), environ=PEPPER)
    await gateway.start()
    try:
        yield gateway
    finally:
        await gateway.stop()


@asynccontextmanager
async def fronted(
    *scripts: Script, **options: Any
) -> AsyncIterator[tuple[Origin, Gateway, Client]]:
    """Run an origin, a gateway with that one worker (its id is `a`), and a client of it."""
    async with (
        Origin(*scripts) as origin,
        running({"a": origin.address}, **options) as gateway,
        Client(gateway.address) as client,
    ):
        yield origin, gateway, client


def counted(gateway: Gateway, name: str) -> float:
    """Return the sum of all samples of a metric, 0.0 if it has none. `name` may go on into the labels."""
    lines = gateway.metrics.render().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))
