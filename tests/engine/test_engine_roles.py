"""What a role serves, where, and what is announced of it."""

import asyncio
import socket
from typing import Any

import grpc
import pytest

from pointsman.engine.control import SERVICE
from pointsman.engine.roles import Ports
from pointsman.engine.rpc import serve_rpc

ANY: Any = None


def test_ports_are_announced_at_the_host_that_is_advertised() -> None:
    ports = Ports("decode", ANY, "0.0.0.0:50051", "[::1]:50052").at("engine-7.local")
    assert ports[2:] == ("engine-7.local:50051", "engine-7.local:50052")
    assert Ports("prefill", ANY, "127.0.0.1:1", "").at("h").kv_address == ""


@pytest.mark.parametrize("listen", ["nowhere", "host:", "host:x", "127.0.0.1:65536", ":-1"])
def test_a_port_that_is_none_is_refused(listen: str) -> None:
    with pytest.raises(ValueError, match="host:port"):
        asyncio.run(serve_rpc(listen, grpc.method_handlers_generic_handler(SERVICE, {})))


def test_a_port_that_is_taken_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(OSError, match="cannot listen"):
            asyncio.run(serve_rpc(listen, grpc.method_handlers_generic_handler(SERVICE, {})))


def test_a_port_without_a_host_is_on_loopback() -> None:
    async def main() -> str:
        handler = grpc.method_handlers_generic_handler(SERVICE, {})
        server, address = await serve_rpc(":0", handler)
        await server.stop(None)
        return address

    assert asyncio.run(main()).startswith("127.0.0.1:")


def test_only_a_decode_worker_has_a_transfer_port(worker: Any) -> None:
    ports = {role: worker(role).ports for role in ("unified", "prefill", "decode")}
    assert [bool(each.kv_address) for each in ports.values()] == [False, False, True]
    assert all(each.grpc_address for each in ports.values())
    for role, each in ports.items():
        addresses = [each.grpc_address, each.kv_address]
        served = [address for address in addresses if address and serves_transfer(address)]
        assert served == ([each.kv_address] if role == "decode" else [])


def serves_transfer(address: str) -> bool:
    with grpc.insecure_channel(address) as channel:
        call = channel.unary_unary("/tl.kv.v1.KvTransferService/Release").future(b"", timeout=5)
        return call.exception() is None
