"""Workers behind a DNS name, looked up again and again: every address of it, or every target of its SRV records.

A resolver that fails says nothing about engines, so the last list stays, for as long as it fails. A name that is said
not to exist may be a fleet of none (a headless service without ready pods), or a zone in repair: the last list stays
for a minute more. Whether the engines of a list are alive is the business of polling.

Where a name has IPv4 and IPv6 addresses only the former are taken: they are the same engines nearly always, and none
shall be counted twice. Priorities and weights of SRV records are left alone, for the gateway balances by load.
"""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from pointsman.control.discovery.found import Found

if TYPE_CHECKING:
    from dns.asyncresolver import Resolver

__all__ = ["Dns", "Endpoint", "Lookup", "LookupFailed", "NameGone", "addresses", "targets"]

logger = logging.getLogger(__name__)

GONE_S = 60.0
"""How long the last list outlives its name."""

LIFETIME_S = 5.0
"""How long a query for SRV records may take."""


class LookupFailed(Exception):
    """There was no answer; the text says why."""


class NameGone(LookupFailed):
    """The answer is that there is no such name, or nothing under it."""


class Endpoint(NamedTuple):
    """Where a name leads: what the engine shall be called, and its address and port."""

    name: str
    host: str
    port: int

    @property
    def address(self) -> str:
        """Return `host:port`, an IPv6 host in brackets.

        >>> Endpoint("a", "fd00::7", 8000).address
        '[fd00::7]:8000'
        """
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


Lookup: TypeAlias = Callable[[], Awaitable[Iterable[Endpoint]]]
"""What asks the DNS once. Raises LookupFailed."""


class Dns:
    """The engines that a lookup finds, every `interval_s` seconds.

    `name` is what log lines call it; `now` (monotonic) and `sleep` are in seconds.
    """

    def __init__(
        self,
        name: str,
        lookup: Lookup,
        *,
        interval_s: float,
        now: Callable[[], float],
        sleep: Callable[[float], Coroutine[Any, Any, object]],
    ) -> None:
        self._name = name
        self._lookup = lookup
        self._interval_s = interval_s
        self._now = now
        self._sleep = sleep
        self._answered = 0.0
        self._failing = ""

    async def run(self, found: Callable[[list[Found]], None]) -> None:
        """Hand over the whole list whenever it changed, until cancelled."""
        known: list[Found] | None = None
        self._answered = self._now()
        while True:
            seen = await self._look()
            if seen is not None and seen != known:
                known = seen
                found(seen)
            await self._sleep(self._interval_s)

    async def _look(self) -> list[Found] | None:
        """Return what there is, None where that cannot be said."""
        try:
            endpoints = set(await self._lookup())
        except LookupFailed as error:
            gone = isinstance(error, NameGone)
            if gone and self._now() - self._answered >= GONE_S:
                self._fails(f"{error}; it has no workers any more")
                return []
            self._fails(f"{error}; its workers stay as they were")
            return None
        self._answered = self._now()
        if self._failing:
            logger.info("%s: it answers again", self._name)
            self._failing = ""
        return [Found(each.name, each.address) for each in sorted(endpoints)]

    def _fails(self, why: str) -> None:
        """Say why, once for each reason."""
        if why != self._failing:
            logger.warning("%s: %s", self._name, why)
            self._failing = why


class GetAddrInfo(Protocol):
    """How the machine looks up a name; the loop's, if nothing else is given."""

    async def __call__(
        self, host: str, port: None, *, type: socket.SocketKind
    ) -> list[tuple[Any, ...]]:
        """Return what `socket.getaddrinfo` does. Raises OSError."""
        ...


def addresses(name: str, port: int, getaddrinfo: GetAddrInfo | None = None) -> Lookup:
    """Look up the addresses of a name, as the machine does it; an engine is called by its address and port."""

    async def lookup() -> list[Endpoint]:
        hosts = await _hosts(name, getaddrinfo)
        return [Endpoint(Endpoint("", host, port).address, host, port) for host in hosts]

    return lookup


def targets(
    name: str, resolver: "Resolver | None" = None, getaddrinfo: GetAddrInfo | None = None
) -> Lookup:
    """Look up the targets of SRV records, and their addresses; an engine is called by its target and port.

    The records are asked for by `resolver`, None for one that is set up as the machine's is. A target that does not
    exist is left out, as long as there are others. Raises LookupFailed at once where the extra is missing.
    """
    try:
        from dns.asyncresolver import Resolver
        from dns.exception import DNSException
        from dns.resolver import NXDOMAIN, NoAnswer
    except ImportError as error:
        raise LookupFailed(f"{error.name} is missing: install the extra, pointsman[dns]") from None
    asked = Resolver() if resolver is None else resolver

    async def lookup() -> list[Endpoint]:
        try:
            answer = await asked.resolve(name, "SRV", lifetime=LIFETIME_S)
        except (NXDOMAIN, NoAnswer):
            raise NameGone("there are no SRV records") from None
        except DNSException as error:
            raise LookupFailed(f"the lookup failed: {type(error).__name__}") from None
        pairs = sorted({(str(each.target).rstrip("."), int(each.port)) for each in answer})
        hosts = await asyncio.gather(*(_hosts_if_any(target, getaddrinfo) for target, _ in pairs))
        if not any(hosts):
            raise NameGone("no target of the SRV records exists")
        return [
            Endpoint(f"{target}:{port}", each[0], port)
            for (target, port), each in zip(pairs, hosts, strict=True)
            if each
        ]

    return lookup


async def _hosts_if_any(name: str, getaddrinfo: GetAddrInfo | None) -> list[str]:
    try:
        return await _hosts(name, getaddrinfo)
    except NameGone:
        return []


async def _hosts(name: str, getaddrinfo: GetAddrInfo | None) -> list[str]:
    """Return the addresses of a name, of one kind and in order. Raises LookupFailed."""
    ask = getaddrinfo or asyncio.get_running_loop().getaddrinfo
    try:
        answers = await ask(name, None, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        none = error.errno in (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))
        kind = NameGone if none else LookupFailed
        raise kind(f"the lookup failed: {error.strerror}") from None
    except (OSError, UnicodeError) as error:
        raise LookupFailed(f"the lookup failed: {type(error).__name__}") from None
    hosts = {str(answer[4][0]) for answer in answers}
    old = {host for host in hosts if ":" not in host}
    return sorted(old or hosts, key=lambda host: ip_address(host).packed)
