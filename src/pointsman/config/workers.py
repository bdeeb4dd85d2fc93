"""The engines that the configuration lists."""

import re
from typing import Annotated
from urllib.parse import urlsplit

from msgspec import Struct

from pointsman.config.option import option
from pointsman.config.values import Address
from pointsman.domain.worker import Role, Worker

__all__ = ["StaticWorker"]


class StaticWorker(Struct, frozen=True, forbid_unknown_fields=True):
    """An engine that sends no heartbeats: it counts as alive as long as the gateway runs."""

    id: Annotated[str, option("Name of the worker, unique.", min_length=1)]
    url: Annotated[
        str,
        option(
            "Where its OpenAI surface is: `http://host:port` or `https://host:port`, or with a path."
        ),
    ]
    model: Annotated[str, option("Id of the model that it serves.", min_length=1)]
    role: Annotated[Role, option("What it can be asked to do.")] = Role.UNIFIED
    capacity: Annotated[int, option("Its weight for the `weighted` policy.", ge=1)] = 1
    grpc_address: Annotated[
        str, option("`host:port` of its EngineControl service. A prefill worker needs one.")
    ] = ""
    kv_address: Annotated[
        str, option("`host:port` of its KvTransferService. A decode worker needs one.")
    ] = ""

    def worker(self) -> Worker:
        """Return the worker to add to the registry.

        Raises ValueError where `url` is not one that can be used, or where its role needs an address that is not there.

        >>> StaticWorker(id="a", url="http://10.0.0.7:8000/x/", model="m").worker().base_path
        '/x'
        """
        url = urlsplit(self.url)
        tls = url.scheme == "https"
        if not (tls or url.scheme == "http") or not url.hostname:
            raise ValueError("expected http:// or https://, then host:port or host:port/path")
        if url.query or url.fragment or "@" in url.netloc or re.search(r"\s", self.url):
            raise ValueError("only a host, a port and a path can stand in it")
        for role, key in ((Role.PREFILL, "grpc_address"), (Role.DECODE, "kv_address")):
            address = getattr(self, key)
            if self.role is role and not address:
                raise ValueError(f"a {role} worker needs `{key}` as well")
            if address and not all(Address.parse(address)):
                raise ValueError(f"`{key}` is not host:port")
        host = f"[{url.hostname}]" if ":" in url.hostname else url.hostname
        return Worker(
            self.id,
            model=self.model,
            http_address=f"https://{host}:{url.port or 443}" if tls else f"{host}:{url.port or 80}",
            tls=tls,
            base_path=url.path.rstrip("/"),
            role=self.role,
            grpc_address=self.grpc_address,
            kv_address=self.kv_address,
            kv_total_blocks=self.capacity,
            static=True,
        )
