"""A gateway in front of stand-ins of engines that hand prompts over, and the law that holds for every connector.

The law: within a second of the end of a request both of its legs are over, the gateway counts nothing in flight, and
no engine holds anything for it. What the gateway never heard of it cannot give back; a test that arranges such a thing
says so, by letting the time limit of the engine pass (`FakeVllm.expire`).
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from pointsman.app import Gateway
from pointsman.domain.routes import Route
from pointsman.domain.worker import Role, Worker
from pointsman.testing.client import Client
from pointsman.testing.engines.sglang import FakeSglang
from pointsman.testing.engines.vllm import FakeVllm
from pointsman.testing.gateways import running
from pointsman.testing.handoffs import until

__all__ = ["Apart", "apart"]

Engine = FakeVllm | FakeSglang

SOURCE = "the test"

OVER_S = 1.0
"""How soon after the end of a request nothing of it may be left."""


@dataclass(eq=False)
class Apart:
    """Engines of one kind, a gateway that lists them, and a client of it."""

    gateway: Gateway
    client: Client
    connector: str
    prefills: Sequence[Engine]
    decodes: Sequence[Engine]
    unified: Sequence[Engine]

    @property
    def prefill(self) -> Engine:
        """The first prefill worker."""
        return self.prefills[0]

    @property
    def decode(self) -> Engine:
        """The first decode worker."""
        return self.decodes[0]

    @property
    def engines(self) -> list[Engine]:
        """All of them."""
        return [*self.prefills, *self.decodes, *self.unified]

    def left(self) -> dict[str, object]:
        """Return what is left of requests, by whom; nothing, where the law is kept."""
        found: dict[str, object] = {
            worker.id: f"{worker.in_flight} in flight"
            for worker in self.gateway.registry.snapshot()
            if worker.in_flight
        }
        for engine in self.engines:
            legs = +engine.under_way
            if not engine.dead and (legs or engine.held):
                found[f"engine {engine.name}"] = (dict(legs), list(engine.held))
        return found

    async def idle(self) -> None:
        """Wait until the gateway counts nothing in flight, and no leg is under way. Raises TimeoutError."""
        await until(
            lambda: (
                not any(worker.in_flight for worker in self.gateway.registry.snapshot())
                and not any(each.under_way.total() for each in self.engines if not each.dead)
            )
        )

    async def over(self, within_s: float = OVER_S) -> None:
        """Wait until the law is kept. Raises AssertionError where it is not in time."""
        try:
            await until(lambda: not self.left(), within_s)
        except TimeoutError:
            # A machine that stood still is no breach.
            if left := self.left():
                raise AssertionError(f"left behind after {within_s} s: {left}") from None

    def expire(self) -> int:
        """Let the time limits of all leases pass, and return how many there were: none of SGLang, which has none."""
        return sum(each.expire() for each in self.prefills if isinstance(each, FakeVllm))

    def check(self) -> None:
        """Raise AssertionError where anything that belongs to one attempt was used by another one."""
        for engine in self.engines:
            used = engine.rooms if isinstance(engine, FakeSglang) else engine.pulled
            assert len(used) == len(set(used)), (engine.name, used)


def _made(connector: str, name: str, role: Role) -> Engine:
    if connector == "bootstrap":
        return FakeSglang(name, role=role)
    return FakeVllm(name, role=role, connector="" if role is Role.UNIFIED else connector)


def _listed(engine: Engine, connector: str) -> Worker:
    meeting = engine.bootstrap if isinstance(engine, FakeSglang) else engine.side
    return Worker(
        engine.name,
        model=engine.models[0].id,
        http_address=engine.http.address,
        role=engine.role,
        dialect=engine.dialect,
        connector="" if engine.role is Role.UNIFIED else connector,
        bootstrap=meeting.address if engine.role is Role.PREFILL else "",
        source=SOURCE,
        static=True,
    )


@asynccontextmanager
async def apart(
    connector: str,
    *,
    prefill: int = 1,
    decode: int = 1,
    unified: int = 0,
    targets: tuple[str, ...] = ("disaggregated",),
    route: Mapping[str, Any] | None = None,
    busy: bool = False,
    **options: Any,
) -> AsyncIterator[Apart]:
    """Run so many engines (`p1`, `d1`, `u1`, ...) of a connector, and a gateway with one disaggregated route `m`.

    `nixl` and `mooncake` are vLLM's, `bootstrap` is SGLang's. `route` are further members of the route, `options` those
    of the configuration. After a test that went well the law is checked, unless it is `busy`: then the gateway is
    stopped first.
    """
    kinds = {Role.PREFILL: prefill, Role.DECODE: decode, Role.UNIFIED: unified}
    async with AsyncExitStack() as engines:
        made: dict[Role, list[Engine]] = {
            role: [
                await engines.enter_async_context(_made(connector, f"{role[0]}{n + 1}", role))
                for n in range(count)
            ]
            for role, count in kinds.items()
        }
        routes = (Route("m", targets=targets, **(route or {})),)
        async with (
            running(routes=routes, **options) as gateway,
            Client(gateway.address) as client,
        ):
            it = Apart(gateway, client, connector, *made.values())
            workers = [_listed(engine, connector) for engine in it.engines]
            gateway.registry.set_listed(SOURCE, workers)
            yield it
            if not busy:
                await it.over()
        await it.over()
        it.check()
