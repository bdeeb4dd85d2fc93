"""The heartbeat client against a real gRPC server."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
import pytest

from pointsman.heartbeat import Heartbeat
from pointsman.proto import control_pb2

Answer = Callable[[control_pb2.WorkerStatus], control_pb2.HeartbeatAck]


@contextlib.asynccontextmanager
async def registry(answer: Answer, port: int = 0) -> AsyncIterator[int]:
    async def beat(request: Any, context: Any) -> Any:
        return answer(request)

    server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
    methods = {
        "Heartbeat": grpc.unary_unary_rpc_method_handler(
            beat,
            request_deserializer=control_pb2.WorkerStatus.FromString,
            response_serializer=control_pb2.HeartbeatAck.SerializeToString,
        )
    }
    service = grpc.method_handlers_generic_handler("tl.control.v1.WorkerRegistry", methods)
    server.add_generic_rpc_handlers((service,))
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield bound
    finally:
        await server.stop(None)


class Gateway:
    """Records beats and answers with `drain` and `epoch`; `arrived(n)` waits for the n-th."""

    def __init__(self) -> None:
        self.beats: list[control_pb2.WorkerStatus] = []
        self.drain = False
        self.epoch = 3
        self._more = asyncio.Event()

    def __call__(self, status: control_pb2.WorkerStatus) -> control_pb2.HeartbeatAck:
        self.beats.append(status)
        self._more.set()
        return control_pb2.HeartbeatAck(drain=self.drain, route_epoch=self.epoch)

    async def arrived(self, count: int) -> None:
        async with asyncio.timeout(5):
            while len(self.beats) < count:
                self._more.clear()
                await self._more.wait()


def status(**more: Any) -> control_pb2.WorkerStatus:
    return control_pb2.WorkerStatus(worker_id="w1", role="unified", model="m", **more)


@contextlib.asynccontextmanager
async def beating(heartbeat: Heartbeat) -> AsyncIterator[None]:
    task = asyncio.ensure_future(heartbeat.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


def test_the_first_beat_comes_at_once_and_each_reads_its_status_fresh() -> None:
    async def main() -> None:
        gateway = Gateway()
        running = iter(range(100))
        async with registry(gateway) as port:
            heartbeat = Heartbeat(
                f"http://127.0.0.1:{port}/",
                lambda: status(running=next(running)),
                lambda: None,
                interval=0.01,
            )
            async with beating(heartbeat):
                await gateway.arrived(3)
            assert [beat.running for beat in gateway.beats[:3]] == [0, 1, 2]
            assert {beat.incarnation for beat in gateway.beats} == {heartbeat.incarnation}
            assert heartbeat.route_epoch == 3

    asyncio.run(main())


def test_the_defaults_are_a_beat_in_two_seconds_each_shorter_than_that() -> None:
    heartbeat = Heartbeat("x:1", status, lambda: None)
    assert heartbeat._interval == 2.0
    assert heartbeat._timeout < 2.0


def test_two_lives_of_a_worker_have_different_incarnations() -> None:
    lives = {Heartbeat("x:1", status, lambda: None).incarnation for _ in range(3)}
    assert len(lives) == 3


def test_a_drain_is_latched_acted_on_once_and_reported_at_once() -> None:
    async def main() -> None:
        gateway = Gateway()
        gateway.drain = True
        drains: list[int] = []
        async with registry(gateway) as port:
            heartbeat = Heartbeat(
                f"127.0.0.1:{port}",
                lambda: status(draining=bool(drains)),
                lambda: drains.append(1),
                interval=3600,
            )
            async with beating(heartbeat):
                await gateway.arrived(2)
                assert [beat.draining for beat in gateway.beats] == [False, True]
                gateway.drain = False
                heartbeat.soon()
                await gateway.arrived(3)
            assert heartbeat.drain
            assert drains == [1]

    asyncio.run(main())


def test_a_gateway_that_is_away_is_met_again_when_it_returns(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as reserved:
            port = reserved.getsockname()[1]
        gateway = Gateway()
        heartbeat = Heartbeat(f"127.0.0.1:{port}", status, lambda: None, interval=0.01, timeout=0.5)
        assert not await heartbeat.beat()
        assert not await heartbeat.beat()
        assert (heartbeat.failures, heartbeat.beats) == (2, 0)
        async with registry(gateway, port), beating(heartbeat):
            await gateway.arrived(1)
        assert len([each for each in caplog.records if "no heartbeat" in each.message]) == 1

    asyncio.run(main())


def test_a_gateway_that_hangs_costs_no_more_than_the_timeout() -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            port = silent.getsockname()[1]
            heartbeat = Heartbeat(f"127.0.0.1:{port}", status, lambda: None, timeout=0.1)
            async with asyncio.timeout(5):
                assert not await heartbeat.beat()
            assert heartbeat.failures == 1

    asyncio.run(main())
