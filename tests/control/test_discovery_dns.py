"""Names that lead to engines: a resolver that is a function here, and once a real one that answers over UDP."""

import asyncio
import builtins
import logging
import socket
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any, cast

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset
import pytest
from dns.asyncresolver import Resolver

from pointsman.control.discovery.dns import (
    Dns,
    Endpoint,
    LookupFailed,
    NameGone,
    addresses,
    targets,
)
from pointsman.control.discovery.found import Found
from pointsman.testing.clock import Clock

pytestmark = pytest.mark.anyio

A, B = Endpoint("a:80", "10.0.0.1", 80), Endpoint("b:80", "10.0.0.2", 80)


class Name:
    """A name that leads where the test says, looked up every 5 s."""

    def __init__(self, *answer: Endpoint) -> None:
        self.clock = Clock()
        self.answer: Iterable[Endpoint] | Exception = answer
        self.lookups = 0
        self.told: list[list[str]] = []
        self.dns = Dns(
            "dns engines:80", self.lookup, interval_s=5, now=self.clock.now, sleep=self.clock.sleep
        )

    async def lookup(self) -> Iterable[Endpoint]:
        self.lookups += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.get_running_loop().create_task(self.dns.run(self.found))
        await self.clock.settle()
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()

    def found(self, found: list[Found]) -> None:
        self.told.append([each.id for each in found])


async def test_a_name_is_looked_up_again_and_only_changes_are_told() -> None:
    name = Name(B, A)
    async with name.running():
        await name.clock.advance(20)
        assert name.lookups == 5
        name.answer = (A, B)
        await name.clock.advance(5)
        name.answer = (B,)
        await name.clock.advance(5)
        assert name.told == [["a:80", "b:80"], ["b:80"]]


async def test_a_resolver_that_fails_keeps_the_workers_for_ever_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "pointsman.control.discovery")
    name = Name(A)
    async with name.running():
        name.answer = LookupFailed("the lookup failed: try again")
        await name.clock.advance(3600)
        assert name.told == [["a:80"]]
        name.answer = (A, B)
        await name.clock.advance(5)
        assert name.told == [["a:80"], ["a:80", "b:80"]]
    assert [each.getMessage() for each in caplog.records] == [
        "dns engines:80: the lookup failed: try again; its workers stay as they were",
        "dns engines:80: it answers again",
    ]


async def test_a_name_that_does_not_exist_keeps_the_workers_for_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    name = Name(A)
    async with name.running():
        name.answer = NameGone("no such name")
        await name.clock.advance(55)
        assert name.told == [["a:80"]]
        await name.clock.advance(10)
        assert name.told == [["a:80"], []]
        await name.clock.advance(600)
        assert name.told == [["a:80"], []]
        name.answer = (A,)
        await name.clock.advance(5)
        assert name.told == [["a:80"], [], ["a:80"]]
    assert len(caplog.records) == 2


async def test_the_minute_begins_anew_with_each_answer_and_a_failure_is_none() -> None:
    name = Name(A)
    async with name.running():
        for _ in range(5):
            name.answer = NameGone("no such name")
            await name.clock.advance(50)
            name.answer = (A,)
            await name.clock.advance(5)
        assert name.told == [["a:80"]]
        name.answer = LookupFailed("try again")
        await name.clock.advance(300)
        assert name.told == [["a:80"]]


async def test_r14_a_name_that_nobody_knows_at_the_start_is_looked_up_until_it_is_there() -> None:
    name = Name()
    name.answer = LookupFailed("the lookup failed")
    async with name.running():
        await name.clock.advance(30)
        assert name.told == []
        name.answer = (A,)
        await name.clock.advance(5)
        assert name.told == [["a:80"]]


async def test_addresses_are_those_of_the_machine_ipv6_in_brackets() -> None:
    assert await addresses("127.0.0.1", 8000)() == [Endpoint("127.0.0.1:8000", "127.0.0.1", 8000)]
    (found,) = await addresses("::1", 8000)()
    assert found == Endpoint("[::1]:8000", "::1", 8000)
    assert found.address == "[::1]:8000"


def machine(*hosts: str, error: Exception | None = None) -> Any:
    """Return a resolver of the machine that knows one name, or raises."""

    async def getaddrinfo(
        host: str, port: None, *, type: socket.SocketKind
    ) -> list[tuple[Any, ...]]:
        if error is not None:
            raise error
        if host == "no-such-host":
            raise socket.gaierror(socket.EAI_NONAME, "unknown")
        return [(socket.AF_INET, type, 6, "", (each, 0)) for each in hosts]

    return getaddrinfo


async def test_of_a_name_with_both_kinds_of_addresses_no_engine_is_taken_twice() -> None:
    both = machine("10.0.0.10", "fd00::1", "10.0.0.9", "10.0.0.9")
    assert [each.host for each in await addresses("engines", 80, both)()] == [
        "10.0.0.9",
        "10.0.0.10",
    ]
    new = machine("fd00::2", "fd00::1")
    assert [each.name for each in await addresses("engines", 80, new)()] == [
        "[fd00::1]:80",
        "[fd00::2]:80",
    ]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (socket.gaierror(socket.EAI_NONAME, "unknown"), NameGone),
        (socket.gaierror(socket.EAI_AGAIN, "try again"), LookupFailed),
        (OSError("no"), LookupFailed),
        (UnicodeError("no such label"), LookupFailed),
    ],
)
async def test_the_machine_says_that_a_name_is_not_there_or_that_it_does_not_know(
    error: Exception, kind: type[Exception]
) -> None:
    with pytest.raises(LookupFailed) as raised:
        await addresses("engines", 80, machine(error=error))()
    assert type(raised.value) is kind


class Server(asyncio.DatagramProtocol):
    """A name server: what it knows, by name; the name `broken` fails."""

    def __init__(self, srv: Mapping[str, list[str]]) -> None:
        self.srv = srv
        self.transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str | Any, int]) -> None:
        query = dns.message.from_wire(data)
        (question,) = query.question
        name = str(question.name)
        answer = dns.message.make_response(query)
        answer.flags |= dns.flags.RA
        if name == "broken.":
            answer.set_rcode(dns.rcode.SERVFAIL)
        elif name not in self.srv:
            answer.set_rcode(dns.rcode.NXDOMAIN)
        elif records := self.srv[name]:
            answer.answer.append(dns.rrset.from_text(question.name, 5, "IN", "SRV", *records))
        assert self.transport is not None
        self.transport.sendto(answer.to_wire(), addr)


@asynccontextmanager
async def serving(srv: Mapping[str, list[str]]) -> AsyncIterator[Resolver]:
    """Serve some SRV records, and yield a resolver that asks for them."""
    transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
        lambda: Server(srv), ("127.0.0.1", 0)
    )
    resolver = Resolver(configure=False)
    resolver.nameservers = ["127.0.0.1"]
    resolver.port = transport.get_extra_info("sockname")[1]
    try:
        yield resolver
    finally:
        transport.close()


SRV = {
    "engines.": [
        "0 10 8001 here.",
        "9 10 8000 here.",
        "0 10 8002 no-such-host.",
    ],
    "gone.": ["0 10 8002 no-such-host."],
    "empty.": [],
}


async def test_srv_records_say_host_and_port_and_a_target_that_is_not_there_is_left_out() -> None:
    async with serving(SRV) as resolver:
        assert await targets("engines.", resolver, machine("fd00::1", "10.0.0.9"))() == [
            Endpoint("here:8000", "10.0.0.9", 8000),
            Endpoint("here:8001", "10.0.0.9", 8001),
        ]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("missing.", NameGone),
        ("empty.", NameGone),
        ("gone.", NameGone),
        ("broken.", LookupFailed),
    ],
)
async def test_srv_records_that_are_not_there_and_a_server_that_fails_are_two_things(
    name: str, kind: type[Exception]
) -> None:
    async with serving(SRV) as resolver:
        with pytest.raises(LookupFailed) as raised:
            await targets(name, resolver, machine("10.0.0.9"))()
        assert type(raised.value) is kind


async def test_a_target_that_cannot_be_looked_up_now_is_no_target_that_is_gone() -> None:
    async with serving(SRV) as resolver:
        again = machine(error=socket.gaierror(socket.EAI_AGAIN, "try again"))
        with pytest.raises(LookupFailed) as raised:
            await targets("engines.", resolver, again)()
        assert type(raised.value) is LookupFailed


def test_without_the_extra_srv_records_say_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any) -> Any:
        if name.startswith("dns."):
            raise ModuleNotFoundError("no", name="dns")
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(LookupFailed, match=r"dns is missing: install the extra, pointsman\[dns\]"):
        targets("engines.")
