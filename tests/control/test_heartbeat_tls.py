"""Heartbeats over TLS: who is let in, and certificates that are replaced while the port is open."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from pointsman.certificates import Pem, TlsError, TlsFiles
from pointsman.control.heartbeat import SERVICE, Credentials, HeartbeatService, serve_registry
from pointsman.domain.registry import Registry
from pointsman.proto.control_pb2 import HeartbeatAck, WorkerStatus
from pointsman.testing.certificates import Authority

pytestmark = pytest.mark.anyio

BEAT = WorkerStatus(
    worker_id="a", http_address="https://engine.example:8000", role="unified", model="m"
).SerializeToString()


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def files(pair: tuple[str, str], ca: str = "") -> TlsFiles:
    return TlsFiles(
        Pem("registry_tls_cert", pair[0]),
        Pem("registry_tls_key", pair[1]),
        Pem("registry_client_ca", ca),
    )


class Port:
    """A registry behind TLS, and engines that connect to it anew for each heartbeat."""

    def __init__(self, credentials: Credentials) -> None:
        self.credentials = credentials
        self.registry = Registry()
        self.number = 0

    async def beat(
        self, authority: Authority | None, pair: tuple[str, str] | None = None
    ) -> HeartbeatAck | None:
        """Send one heartbeat as an engine that trusts a CA and shows a pair; None where it is shut out."""
        target = f"localhost:{self.number}"
        # Connections are shared between channels that are alike, unless they are told not to.
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
        if authority is None:
            channel = grpc.aio.insecure_channel(target, options)
        else:
            root = read(authority.ca)
            shown = (read(pair[1]), read(pair[0])) if pair else (None, None)
            credentials = grpc.ssl_channel_credentials(root, *shown)
            channel = grpc.aio.secure_channel(target, credentials, options)
        async with channel:
            try:
                answer = await channel.unary_unary(f"/{SERVICE}/Heartbeat")(BEAT, timeout=5)
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.UNAVAILABLE, error
                return None
        ack: HeartbeatAck = HeartbeatAck.FromString(answer)
        return ack


def read(path: str) -> bytes:
    return Path(path).read_bytes()


def write(path: str, data: bytes) -> None:
    Path(path).write_bytes(data)


@asynccontextmanager
async def opened(tls: TlsFiles) -> AsyncIterator[Port]:
    port = Port(Credentials(tls))
    service = HeartbeatService(port.registry, lambda: 0.0)
    server, port.number = await serve_registry("localhost:0", service, port.credentials)
    try:
        yield port
    finally:
        await server.stop(None)


async def test_an_engine_is_heard_over_tls_and_not_in_plaintext(
    authority: Authority, tmp_path: Path
) -> None:
    async with opened(files(authority.issue("registry"))) as port:
        assert await port.beat(None) is None
        assert await port.beat(Authority(tmp_path, "other")) is None
        assert port.registry.snapshot() == ()
        assert await port.beat(authority) is not None
        (worker,) = port.registry.snapshot()
        assert (worker.id, worker.tls) == ("a", True)


async def test_with_a_client_ca_only_its_engines_are_heard(
    authority: Authority, tmp_path: Path
) -> None:
    engines = Authority(tmp_path, "engines")
    async with opened(files(authority.issue("registry"), engines.ca)) as port:
        assert await port.beat(authority) is None
        assert await port.beat(authority, authority.issue("stranger")) is None
        assert port.registry.snapshot() == ()
        assert await port.beat(authority, engines.issue("engine")) is not None


async def test_a_rotation_reaches_new_connections_and_a_bad_one_changes_nothing(
    authority: Authority, tmp_path: Path
) -> None:
    pair = authority.issue("registry")
    async with opened(files(pair)) as port:
        assert await port.beat(authority) is not None
        write(pair[1], b"half a rotation")
        with pytest.raises(TlsError, match="registry_tls_key"):
            port.credentials.prepare()()
        assert await port.beat(authority) is not None

        # The next certificate is of another CA, so it shows which one is in use.
        following = Authority(tmp_path, "following")
        following.issue("registry")
        assert await port.beat(following) is None
        commit = port.credentials.prepare()
        assert await port.beat(following) is None
        commit()
        assert await port.beat(following) is not None
        assert await port.beat(following) is not None
        assert await port.beat(authority) is None


async def test_a_client_ca_rotates_as_well(authority: Authority, tmp_path: Path) -> None:
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    before, after = old.issue("before"), new.issue("after")
    async with opened(files(authority.issue("registry"), old.ca)) as port:
        assert await port.beat(authority, before) is not None
        assert await port.beat(authority, after) is None
        write(old.ca, read(new.ca))
        port.credentials.prepare()()
        assert await port.beat(authority, after) is not None
        assert await port.beat(authority, before) is None


def test_credentials_are_not_made_of_what_cannot_be_used(authority: Authority) -> None:
    cert, _ = authority.issue("registry")
    _, key = authority.issue("another")
    with pytest.raises(TlsError, match="not the key of registry_tls_cert"):
        Credentials(files((cert, key)))
