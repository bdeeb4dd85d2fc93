"""What can be said of an engine, wherever it is listed or found, and the worker that comes of it.

No key is read here: whoever makes a worker brings its credentials.
"""

from typing import Annotated, Literal

from msgspec import Struct

from pointsman.config.option import option
from pointsman.config.values import Address, Surface, Unusable
from pointsman.dialect.engines import DIALECTS
from pointsman.domain.worker import Role, Worker

__all__ = ["AUTO", "EngineOptions", "NamedDialect"]

AUTO = "auto"
"""Whatever the engine says itself, as its model or its dialect."""

LAST_PORT = 65535

NamedDialect = Literal["", "auto", "tl", "vllm", "sglang", "llamacpp", "openai"]


class EngineOptions(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is the same for every engine that somebody lists."""

    model: Annotated[
        str,
        option(
            "Id of the model that it serves. `auto`: the first that it lists. What it lists beside (aliases, adapters) "
            "is served as well.",
            min_length=1,
        ),
    ] = AUTO
    dialect: Annotated[
        NamedDialect,
        option(
            "How it is spoken to, and asked every `poll_interval_s` how it is; `auto`: found out by asking. Empty with "
            "a `model`: nothing is asked, and it counts as alive; empty without one: `auto`."
        ),
    ] = ""
    role: Annotated[Role, option("What it can be asked to do.")] = Role.UNIFIED
    capacity: Annotated[
        int,
        option(
            "Its weight for the `weighted` policy. 0: its KV blocks where it tells them, else 1.",
            ge=0,
            le=1_000_000_000,
        ),
    ] = 0
    poll_interval_s: Annotated[
        float, option("How often it is asked how it is.", unit="seconds", ge=0.1, le=3600)
    ] = 2.0
    poll_timeout_s: Annotated[
        float, option("Wait for each of these answers.", unit="seconds", ge=0.1, le=3600)
    ] = 2.0
    api_key_env: Annotated[
        str,
        option(
            "Environment variable with the API key that it wants, sent as `Authorization: Bearer`."
        ),
    ] = ""
    api_key_file: Annotated[
        str, option("File with that key, read at the start and on every reload.")
    ] = ""
    connector: Annotated[
        str,
        option(
            "How it hands KV caches over: `nixl` or `mooncake` (vllm), `bootstrap` (sglang), `slots` (llamacpp). "
            "Empty: the only way that its dialect has."
        ),
    ] = ""
    bootstrap_port: Annotated[
        int,
        option(
            "Port of the bootstrap server of a prefill worker, on the same host.", ge=1, le=65535
        ),
    ] = 8998
    kv_ranks: Annotated[
        int,
        option(
            "Data-parallel ranks that publish KV events: rank 1 on the port after that of rank 0, and so on.",
            unit="ranks",
            ge=1,
            le=256,
        ),
    ] = 1

    @property
    def asked(self) -> str:
        """The dialect that it is polled in: `auto` for one to be found out, "" for no polling.

        >>> EngineOptions().asked, EngineOptions(model="m").asked, EngineOptions(model="m", dialect="vllm").asked
        ('auto', '', 'vllm')
        """
        return AUTO if self.model == AUTO and not self.dialect else self.dialect

    @property
    def is_own(self) -> bool:
        """Whether it hands over by our own contract, whose addresses must be known."""
        return self.asked in ("", "tl")

    def make(
        self,
        id: str,
        surface: Surface,
        *,
        grpc_address: str = "",
        kv_address: str = "",
        credentials: bytes = b"",
        source: str = "",
        terminating: bool = False,
        kv_events: Address | None = None,
        kv_replay: Address | None = None,
    ) -> Worker:
        """Return the worker, as it is before anybody asked it anything.

        Raises Unusable for what the dialect or the role does not allow.
        """
        if self.api_key_env and self.api_key_file:
            raise Unusable("api_key_file", "of no use beside `api_key_env`: one of the two")
        own = "tl" if grpc_address or kv_address else ""
        meeting = Address(surface.address.host, self.bootstrap_port)
        is_met = self.role is Role.PREFILL and not self.is_own
        return Worker(
            id,
            model="" if self.model == AUTO else self.model,
            http_address=surface.http_address,
            tls=surface.tls,
            base_path=surface.base_path,
            role=self.role,
            grpc_address=grpc_address,
            kv_address=kv_address,
            kv_total_blocks=self.capacity or 1,
            static=True,
            dialect="" if self.asked == AUTO else self.asked or own,
            connector=self._connector(),
            bootstrap=str(meeting) if is_met else "",
            source=source,
            polled=self.asked != "",
            poll_interval_s=self.poll_interval_s,
            poll_timeout_s=self.poll_timeout_s,
            capacity=self.capacity,
            credentials=credentials,
            terminating=terminating,
            kv_events=self._endpoint("kv_events", kv_events),
            kv_replay=self._endpoint("kv_replay", kv_replay),
            kv_ranks=self.kv_ranks,
        )

    def _endpoint(self, key: str, address: Address | None) -> str:
        if address is None:
            return ""
        if not 0 < address.port <= LAST_PORT - self.kv_ranks + 1:
            raise Unusable("kv_ranks", f"so many ranks have no ports from {key} on")
        return f"tcp://{address}"

    def _connector(self) -> str:
        """Return how it hands over; "" where nobody knows yet, and for what its dialect does without a name."""
        dialect = self.asked or "tl"
        if dialect == AUTO:
            known = {name for each in DIALECTS.values() for name in each.connectors}
        else:
            known = set(DIALECTS[dialect].connectors)
        choices = sorted(known - {""})
        if self.connector:
            if self.connector not in choices:
                raise Unusable(
                    "connector",
                    f"engines of the dialect {dialect} have {', '.join(choices) or 'none'}",
                )
            return self.connector
        if self.role is Role.UNIFIED or dialect == AUTO or "" in known:
            return ""
        if not choices:
            raise Unusable("role", f"engines of the dialect {dialect} cannot hand a prompt over")
        if len(choices) > 1:
            raise Unusable(
                "connector",
                f"a {self.role} worker of the dialect {dialect} needs one of {', '.join(choices)}",
            )
        return choices[0]
