"""Heartbeats as bytes, and the registry over real gRPC on loopback."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.control.heartbeat import (
    MESSAGE_LIMIT_BYTES,
    SERVICE,
    HeartbeatService,
    serve_registry,
)
from pointsman.domain.registry import InvalidReport, Registry
from pointsman.domain.worker import Role
from pointsman.proto.control_pb2 import HeartbeatAck, WorkerStatus


def status(**fields: Any) -> WorkerStatus:
    whole = {"worker_id": "a", "http_address": "127.0.0.1:8000", "role": "unified", "model": "m"}
    return WorkerStatus(**{**whole, **fields})


class Fleet:
    """A registry behind gRPC, a clock that tests turn, and a client."""

    def __init__(self, workers_max: int = 8) -> None:
        self.registry = Registry(workers_max=workers_max)
        self.now = 0.0
        self.faults = 0
        self.service = HeartbeatService(self.registry, lambda: self.now, self.fault)
        self.call: Callable[[bytes], Awaitable[bytes]]

    def fault(self) -> None:
        self.faults += 1

    async def beat(self, **fields: Any) -> HeartbeatAck:
        answer = await self.call(status(**fields).SerializeToString())
        ack: HeartbeatAck = HeartbeatAck.FromString(answer)
        return ack

    async def refused(self, message: bytes) -> tuple[grpc.StatusCode, str]:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await self.call(message)
        return refused.value.code(), refused.value.details()

    def routable(self) -> list[str]:
        return [worker.id for worker in self.registry.routable("m", Role.UNIFIED)]


@asynccontextmanager
async def over_grpc(workers_max: int = 8) -> AsyncIterator[Fleet]:
    fleet = Fleet(workers_max)
    server, port = await serve_registry("127.0.0.1:0", fleet.service)
    channel = grpc.aio.insecure_channel(
        f"127.0.0.1:{port}", options=[("grpc.max_send_message_length", -1)]
    )
    fleet.call = channel.unary_unary(f"/{SERVICE}/Heartbeat")
    try:
        yield fleet
    finally:
        await channel.close()
        await server.stop(None)


def test_registry_over_grpc() -> None:
    async def story() -> None:
        async with over_grpc() as fleet:
            assert fleet.routable() == []
            ack = await fleet.beat(queue_depth=2, kv_total_blocks=2048)
            assert (ack.drain, ack.route_epoch) == (False, 0)
            assert fleet.routable() == ["a"]
            (worker,) = fleet.registry.snapshot()
            assert (worker.http_address, worker.queue_depth) == ("127.0.0.1:8000", 2)
            assert (worker.kv_total_blocks, worker.kv_tokens) == (2048, 2048 * 16)

            fleet.registry.route_epoch = 7
            fleet.registry.drain("m")
            assert fleet.routable() == []
            ack = await fleet.beat()
            assert (ack.drain, ack.route_epoch) == (True, 7)
            fleet.registry.undrain("m")
            assert not (await fleet.beat()).drain
            assert fleet.routable() == ["a"]

            await fleet.beat(draining=True)
            assert fleet.routable() == []
            assert len(fleet.registry.snapshot()) == 1

    asyncio.run(story())


def test_r01_liveness_is_by_the_last_heartbeat_and_not_by_a_goodbye() -> None:
    async def story() -> None:
        async with over_grpc() as fleet:
            await fleet.beat()
            fleet.now = 5.999
            fleet.registry.expire(fleet.now)
            assert fleet.routable() == ["a"]
            fleet.now = 6.0
            fleet.registry.expire(fleet.now)
            assert (fleet.routable(), fleet.registry.snapshot()) == ([], ())
            await fleet.beat()
            assert fleet.routable() == ["a"]

    asyncio.run(story())


def test_r03_a_worker_takes_nothing_from_the_beat_that_says_draining() -> None:
    async def story() -> None:
        async with over_grpc() as fleet:
            await fleet.beat()
            await fleet.beat(worker_id="b", http_address="127.0.0.1:8001")
            await fleet.beat(draining=True)
            assert fleet.routable() == ["b"]
            await fleet.beat(draining=False)
            assert fleet.routable() == ["a", "b"]

    asyncio.run(story())


@pytest.mark.parametrize(
    "change",
    [
        {"http_address": "127.0.0.1:9000"},
        {"grpc_address": "127.0.0.1:9001"},
        {"kv_address": "127.0.0.1:9002"},
        {"incarnation": 2},
    ],
    ids=str,
)
def test_r05_a_changed_address_or_incarnation_is_a_new_worker_over_the_wire(
    change: dict[str, Any],
) -> None:
    async def story() -> None:
        async with over_grpc() as fleet:
            left: list[str] = []
            fleet.registry.on_leave.append(lambda worker: left.append(worker.http_address))
            await fleet.beat(incarnation=1)
            (old,) = fleet.registry.snapshot()
            old.in_flight = 3
            await fleet.beat(**{"incarnation": 1, **change})
            (new,) = fleet.registry.snapshot()
            assert new is not old
            assert (new.id, new.in_flight, left) == ("a", 0, ["127.0.0.1:8000"])
            assert new.http_address == change.get("http_address", "127.0.0.1:8000")

    asyncio.run(story())


def test_an_engine_that_sends_no_incarnation_stays_one_worker() -> None:
    async def story() -> None:
        async with over_grpc() as fleet:
            await fleet.beat()
            (worker,) = fleet.registry.snapshot()
            await fleet.beat(running=1)
            assert fleet.registry.snapshot() == (worker,)

    asyncio.run(story())


NONSENSE = [
    (b"\xff\xff\xff\xff", "not a WorkerStatus"),
    (b"\x0a\x01\xff", "not a WorkerStatus"),
    (b"", "worker_id is not 1 to 256 printable ASCII characters"),
    (status(worker_id="").SerializeToString(), "worker_id is not"),
    (status(worker_id="x" * 1_000_000).SerializeToString(), "worker_id is not"),
    (status(worker_id="a\nb").SerializeToString(), "worker_id is not"),
    (status(model="").SerializeToString(), "model is not"),
    (status(model="x" * 1_000_000).SerializeToString(), "model is not"),
    (status(role="").SerializeToString(), "role '' is not one of unified, prefill, decode"),
    (status(role="x" * 1_000_000).SerializeToString(), "role 'xxx"),
    (status(role="\u2603" * 10_000).SerializeToString(), "role '\u2603"),
    (status(role="Unified").SerializeToString(), "role 'Unified' is not one of"),
    (status(http_address="").SerializeToString(), "http_address '' is not host:port"),
    (status(http_address="h").SerializeToString(), "http_address 'h' is not host:port"),
    (status(http_address="h:1\r\nX: y").SerializeToString(), "http_address 'h:1"),
    (status(grpc_address="x" * 1_000_000).SerializeToString(), "grpc_address 'xxx"),
    (status(kv_address="h:0").SerializeToString(), "kv_address 'h:0' is not host:port"),
    (status(queue_depth=-1).SerializeToString(), "queue_depth is negative"),
    (status(running=-(2**31)).SerializeToString(), "running is negative"),
    (status(kv_free_blocks=-1).SerializeToString(), "kv_free_blocks is negative"),
    (status(kv_total_blocks=-1).SerializeToString(), "kv_total_blocks is negative"),
]


@pytest.mark.parametrize(
    ("said", "tokens"),
    [
        ({"kv_total_blocks": 4}, 64),
        ({"kv_total_blocks": 4, "dialect": "tl"}, 64),
        ({"kv_total_blocks": 4, "kv_tokens": 80}, 80),
        ({"kv_total_blocks": 4, "kv_tokens": 0}, 0),
        ({"kv_total_blocks": 4, "dialect": "llamacpp"}, 0),
        ({"kv_total_blocks": 4, "dialect": "vllm", "kv_tokens": 2**32 - 1}, 2**32 - 1),
        ({"kv_total_blocks": 2**31 - 1}, 2**35 - 16),
    ],
)
def test_what_a_beat_says_of_the_room_in_tokens(said: dict[str, Any], tokens: int) -> None:
    async def story() -> None:
        async with over_grpc() as fleet:
            for _ in range(2):
                await fleet.beat(**said)
                (worker,) = fleet.registry.snapshot()
                assert worker.kv_tokens == tokens
            # The next beat is believed, too.
            await fleet.beat(**said | {"kv_tokens": 16})
            assert worker.kv_tokens == 16

    asyncio.run(story())


def test_one_worker_too_many_is_resource_exhausted_and_the_others_are_heard() -> None:
    async def story() -> None:
        async with over_grpc(workers_max=1) as fleet:
            await fleet.beat()
            code, details = await fleet.refused(status(worker_id="b").SerializeToString())
            assert (code, "as many as there may be" in details) == (
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                True,
            )
            await fleet.beat(queue_depth=3)
            assert [worker.queue_depth for worker in fleet.registry.snapshot()] == [3]

    asyncio.run(story())


def test_nonsense_over_the_wire_is_invalid_argument_and_changes_nothing() -> None:
    async def story() -> None:
        async with over_grpc() as fleet:
            await fleet.beat(queue_depth=1)
            (before,) = fleet.registry.snapshot()
            for message, reason in NONSENSE:
                code, details = await fleet.refused(message)
                assert code is grpc.StatusCode.INVALID_ARGUMENT, reason
                assert details.startswith(reason)
                assert len(details) <= 512
            assert fleet.registry.snapshot() == (before,)
            assert (before.queue_depth, before.running) == (1, 0)
            assert fleet.faults == 0
            await fleet.beat(queue_depth=2)
            assert before.queue_depth == 2

    asyncio.run(story())


def test_a_message_over_four_mebibytes_is_refused_and_the_next_one_is_heard() -> None:
    async def story() -> None:
        async with over_grpc() as fleet:
            code, _ = await fleet.refused(b"\0" * (MESSAGE_LIMIT_BYTES + 1))
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
            await fleet.beat()
            assert fleet.routable() == ["a"]

    asyncio.run(story())


def test_a_fault_of_the_gateway_is_counted_and_answered_internal(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def story() -> None:
        async with over_grpc() as fleet:

            def broken(worker: object) -> None:
                raise RuntimeError("secret")

            fleet.registry.on_join.append(broken)
            code, details = await fleet.refused(status().SerializeToString())
            assert code is grpc.StatusCode.INTERNAL
            assert details == "the gateway failed on this heartbeat"
            assert fleet.faults == 1
            fleet.registry.on_join.remove(broken)
            await fleet.beat()
            assert fleet.faults == 1

    asyncio.run(story())
    assert "a heartbeat failed" in caplog.text


def test_an_unknown_call_is_unimplemented() -> None:
    async def story() -> None:
        fleet = Fleet()
        server, port = await serve_registry("127.0.0.1:0", fleet.service)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            fleet.call = channel.unary_unary(f"/{SERVICE}/Goodbye")
            assert (await fleet.refused(b""))[0] is grpc.StatusCode.UNIMPLEMENTED
        await server.stop(None)

    asyncio.run(story())


def test_a_port_that_is_taken_is_an_error_and_not_half_of_the_beats() -> None:
    async def story() -> None:
        service = Fleet().service
        server, port = await serve_registry("127.0.0.1:0", service)
        with pytest.raises(OSError, match=f"127.0.0.1:{port} for heartbeats: it is taken"):
            await serve_registry(f"127.0.0.1:{port}", service)
        await server.stop(None)

    asyncio.run(story())


def test_a_port_alone_listens_on_every_interface() -> None:
    async def story() -> None:
        fleet = Fleet()
        server, port = await serve_registry(":0", fleet.service)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            fleet.call = channel.unary_unary(f"/{SERVICE}/Heartbeat")
            await fleet.beat()
        assert fleet.routable() == ["a"]
        await server.stop(None)

    asyncio.run(story())


@given(st.binary(max_size=300))
def test_any_bytes_are_a_beat_or_an_invalid_report(message: bytes) -> None:
    registry = Registry()
    try:
        HeartbeatService(registry, lambda: 0.0).beat(message)
    except InvalidReport:
        assert registry.snapshot() == ()


@given(st.data())
def test_a_sound_message_with_spoilt_bytes_is_a_beat_or_an_invalid_report(
    data: st.DataObject,
) -> None:
    message = bytearray(
        status(
            grpc_address="h:1", kv_address="h:2", queue_depth=3, incarnation=9
        ).SerializeToString()
    )
    for _ in range(data.draw(st.integers(1, 4))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    registry = Registry()
    try:
        HeartbeatService(registry, lambda: 0.0).beat(bytes(message))
    except InvalidReport:
        assert registry.snapshot() == ()
    else:
        (worker,) = registry.snapshot()
        assert worker.queue_depth >= 0
