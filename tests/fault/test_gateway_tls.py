"""A whole gateway with certificates everywhere: clients, engines, and the engines' heartbeats."""

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from pointsman.app import Gateway
from pointsman.config import Config, GatewayConfig
from pointsman.control.heartbeat import SERVICE
from pointsman.proto.control_pb2 import WorkerStatus
from pointsman.testing.certificates import Authority
from pointsman.testing.client import Client, post
from pointsman.testing.origin import Origin, answers, event, streams

pytestmark = pytest.mark.anyio

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
ANY = "127.0.0.1:0"
READY = b"GET /readyz HTTP/1.1\r\nhost: gateway\r\n\r\n"


@asynccontextmanager
async def everywhere(authority: Authority, engines: Authority) -> AsyncIterator[Gateway]:
    """Run a gateway that speaks TLS to everybody, and wants certificates of clients and engines."""
    api, registry = authority.issue("api"), authority.issue("registry")
    ours = engines.issue("ours")
    config = GatewayConfig(
        listen=ANY,
        health_listen=ANY,
        registry_listen=ANY,
        access_log="off",
        tls_cert=api[0],
        tls_key=api[1],
        tls_client_ca=authority.ca,
        registry_tls_cert=registry[0],
        registry_tls_key=registry[1],
        registry_client_ca=engines.ca,
        upstream_ca=engines.ca,
        upstream_cert=ours[0],
        upstream_key=ours[1],
    )
    gateway = Gateway(Config(gateway=config), load=lambda: Config(gateway=config))
    await gateway.start()
    try:
        yield gateway
    finally:
        await gateway.stop()


def read(path: str) -> bytes:
    return Path(path).read_bytes()


def spoil(path: Path) -> None:
    path.write_text("half a rotation")


async def serial(gateway: Gateway, trusted: ssl.SSLContext) -> object:
    """Return the number of the certificate that the API shows."""
    async with Client(gateway.address, tls=trusted) as fresh:
        shown = fresh.ssl_object.getpeercert()
        assert shown is not None
        return shown["serialNumber"]


async def beat(gateway: Gateway, origin: Origin, ca: str, pair: tuple[str, str]) -> None:
    """Announce an engine, over a connection of its own. Raises AioRpcError where it is shut out."""
    credentials = grpc.ssl_channel_credentials(read(ca), read(pair[1]), read(pair[0]))
    channel = grpc.aio.secure_channel(
        f"127.0.0.1:{gateway.registry_port}", credentials, [("grpc.use_local_subchannel_pool", 1)]
    )
    status = WorkerStatus(
        worker_id="a", http_address=f"https://{origin.address}", role="unified", model="m"
    )
    async with channel:
        await channel.unary_unary(f"/{SERVICE}/Heartbeat")(status.SerializeToString(), timeout=5)


async def test_heartbeats_answers_and_a_rotation_with_certificates_on_all_sides(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority, engines = Authority(tmp_path, "clients"), Authority(tmp_path, "engines")
    pair = engines.issue("engine")
    context = engines.server(pair, asks=True)
    async with (
        everywhere(authority, engines) as gateway,
        Origin(answers({"id": 1}), streams("a"), tls=context) as origin,
    ):
        async with Client(gateway.health_address) as probe:
            assert (await probe.ask(READY)).status == 503
            await beat(gateway, origin, authority.ca, pair)
            assert (await probe.ask(READY)).status == 200
        trusted = authority.client(authority.issue("client"))
        async with Client(gateway.address, tls=trusted) as client:
            assert (await client.ask(post(CHAT))).body == b'{"id":1}'
            streamed = await client.ask(post(CHAT | {"stream": True}))
            assert streamed.body == event("a") + b"data: [DONE]\n\n"

        # One bad file of one side, and no side changes.
        before = await serial(gateway, trusted)
        authority.issue("api")
        spoil(tmp_path / "registry.key")
        outcome = await gateway.reload("SIGHUP")
        assert (outcome.ok, "registry_tls_key" in outcome.message) == (False, True)
        caplog.clear()
        await beat(gateway, origin, authority.ca, pair)
        assert await serial(gateway, trusted) == before

        # The registry gets a certificate of another CA; who trusts only the former one is shut out.
        following = Authority(tmp_path, "following")
        following.issue("registry")
        assert (await gateway.reload("SIGHUP")).ok
        await beat(gateway, origin, following.ca, pair)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await beat(gateway, origin, authority.ca, pair)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert await serial(gateway, trusted) != before
