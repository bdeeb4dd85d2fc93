"""A whole gateway on loopback ports of the kernel's choice, for tests over real sockets."""

import asyncio
import os
import re
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pointsman.app import Gateway
from pointsman.config import Config, GatewayConfig, StaticWorker, load
from pointsman.control.keyfile import KeyFile
from pointsman.domain.keys import Keyring, Scope
from pointsman.testing.client import Client
from pointsman.testing.origin import Origin, Script

if TYPE_CHECKING:
    from pointsman.testing.certificates import Authority  # it needs trustme

__all__ = [
    "ANY",
    "PEPPER",
    "SETS",
    "Keys",
    "Served",
    "bearer",
    "configured",
    "counted",
    "fronted",
    "running",
    "secured",
    "served",
]

ANY = "127.0.0.1:0"
SETS = [f"gateway.{key}={ANY}" for key in ("listen", "health_listen", "registry_listen")]
PEPPER = {"TL_GATEWAY_PEPPER": "pepper"}
"""What the gateways of tests find in their environment."""


class Keys:
    """A new key file in a folder, for gateways that are given its `options`. `file` is what it is changed through."""

    def __init__(self, folder: Path) -> None:
        path = folder / "keys.jsonl"
        path.touch()
        (pepper,) = PEPPER.values()
        keyring = Keyring(pepper.encode(), wall=time.time, cache_key=bytes(16))
        self.file = KeyFile(path, keyring)
        self.options: dict[str, Any] = {"keys_file": str(path)}

    def make(
        self,
        *scopes: str,
        priority: int = 0,
        models: Sequence[str] = (),
        expires_at: int | None = None,
    ) -> str:
        """Make a key and return its text; `expires_at` is in seconds since 1970, None for never."""
        _, text = self.file.create(
            tenant="acme",
            name="test",
            scopes=[Scope(scope) for scope in scopes],
            rpm=0,
            tpm=0,
            priority=priority,
            models=models,
            expires_at=expires_at,
            now=int(time.time()),
        )
        return text


def bearer(key: str) -> dict[str, str]:
    """Return the header that a key travels in."""
    return {"authorization": f"Bearer {key}"}


@asynccontextmanager
async def running(
    workers: Mapping[str, str] | None = None,
    *,
    model: str = "m",
    listed: Sequence[StaticWorker] = (),
    **options: Any,
) -> AsyncIterator[Gateway]:
    """Run a gateway over static workers: `listed` ones, and those given as id -> `host:port` or a URL of `model`.

    `options` are those of the configuration; those of `Keys` give it keys. The default policy is least_outstanding, so
    that ties go to the smallest id and a test knows who is asked first.
    """
    static = tuple(
        StaticWorker(id=name, url=address if "://" in address else f"http://{address}", model=model)
        for name, address in (workers or {}).items()
    )
    options.setdefault("route_policy", "least_outstanding")
    options.setdefault("access_log", "off")
    options = {"listen": ANY, "health_listen": ANY, "registry_listen": ANY, **options}
    config = GatewayConfig(workers=(*static, *listed), **options)
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


@asynccontextmanager
async def secured(
    authority: "Authority", *scripts: Script, **options: Any
) -> AsyncIterator[tuple[Origin, Gateway]]:
    """Run an origin and a gateway with that one worker, with TLS towards both sides."""
    cert, key = pair = authority.issue("all")
    options = {"upstream_ca": authority.ca, "tls_cert": cert, "tls_key": key, **options}
    async with (
        Origin(*scripts, tls=authority.server(pair)) as origin,
        running({"a": f"https://{origin.address}"}, **options) as gateway,
    ):
        yield origin, gateway


def counted(gateway: Gateway, name: str) -> float:
    """Return the sum of all samples of a metric, 0.0 if it has none. `name` may go on into the labels."""
    lines = gateway.metrics.render().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


@asynccontextmanager
async def configured(source: Path) -> AsyncIterator[Gateway]:
    """Run a gateway from a configuration file, on ports of the kernel's choice. It can be loaded again."""

    def read() -> Config:
        return load(source, SETS, {})

    gateway = Gateway(read(), load=read, source=str(source), environ=PEPPER)
    await gateway.start()
    try:
        yield gateway
    finally:
        await gateway.stop()


class Served:
    """A gateway that is a process of its own. `said` are the lines of its log so far."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.said: list[str] = []
        self.address = self.health_address = ("", 0)

    async def says(self, text: str) -> str:
        """Wait for the next line with a text, and return it. Raises EOFError where the process ends before."""
        assert self.process.stderr is not None
        while line := (await self.process.stderr.readline()).decode():
            self.said.append(line)
            if text in line:
                return line
        raise EOFError("".join(self.said))


@asynccontextmanager
async def served(source: Path) -> AsyncIterator[Served]:
    """Run `pointsman serve` from a configuration file, on ports of the kernel's choice, until the end or its own."""
    sets = [word for each in (*SETS, "gateway.log_format=text") for word in ("--set", each)]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pointsman", "serve", "--config", str(source), *sets),
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | PEPPER,
    )
    gateway = Served(process)
    try:
        found = re.findall(r"on ([\d.]+):(\d+)", await gateway.says("serving on"))
        gateway.address, gateway.health_address = [(host, int(port)) for host, port in found]
        yield gateway
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()
