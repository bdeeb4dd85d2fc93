"""The Python of one request, without sockets: a client's bytes in, an engine's bytes in, everything in between.

    python bench/hotpath.py [--keys] [--profile]

Transports are fakes whose writes cost next to nothing, so what is left is what the gateway itself spends per request
and per streamed chunk. The figure is best compared with itself, before and after a change.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import pstats
import tempfile
import time
from collections.abc import Callable
from typing import Any

import msgspec
import uvloop
from gateways import KEY, KEY_TEXT

from pointsman.app import Gateway
from pointsman.config import Config, GatewayConfig, StaticWorker
from pointsman.net.downstream import Downstream
from pointsman.net.upstream import Upstream

SYSTEM = "You are the docs assistant for forge. Answer from the docs and cite them. " * 24
CONTENT = "How do I configure it?"


class FakeTransport:
    """Takes bytes and forgets them."""

    def __init__(self) -> None:
        self.sent = 0

    def write(self, data: bytes) -> None:
        self.sent += 1

    def writelines(self, data: Any) -> None:
        self.sent += 1

    def is_closing(self) -> bool:
        return False

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol: Any = protocol

    def abort(self) -> None:
        pass

    def close(self) -> None:
        pass

    def get_extra_info(self, name: str) -> None:
        return None

    def get_write_buffer_size(self) -> int:
        return 0

    def can_write_eof(self) -> bool:
        return False


def request(stream: bool, key: str) -> bytes:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": CONTENT}]
    body = msgspec.json.encode(
        {"model": "m", "messages": messages, "max_tokens": 64, "stream": stream, "temperature": 0.0}
    )
    authorization = f"Authorization: Bearer {key}\r\n".encode() if key else b""
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:8087\r\n%b"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
        % (authorization, len(body), body)
    )


ANSWER_BODY = b'{"id":"chatcmpl-1","object":"chat.completion","model":"m","x":"%b"}' % (b"0" * 500)
ANSWER = (
    b"HTTP/1.1 200 OK\r\ndate: Mon, 01 Jan 2026 00:00:00 GMT\r\nserver: uvicorn\r\n"
    b"content-length: %d\r\ncontent-type: application/json\r\n\r\n%b"
    % (len(ANSWER_BODY), ANSWER_BODY)
)
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
CHUNK = b"c8\r\n" + b"data: " + b"x" * 192 + b"\n\n\r\n"


async def measure(count: int, profile: bool, keys: str) -> None:
    workers = tuple(
        StaticWorker(id=name, url=f"http://127.0.0.1:{port}", model="m")
        for name, port in (("a", 1), ("b", 2))
    )
    at = "127.0.0.1:0"
    options = GatewayConfig(
        listen=at,
        health_listen=at,
        registry_listen=at,
        workers=workers,
        keys_file=keys,
        access_log="off",
    )
    gateway = Gateway(Config(gateway=options), environ={"TL_GATEWAY_PEPPER": "pepper"})
    await gateway.start()
    plane = gateway._plane
    lanes = [plane.pool.lane(worker) for worker in gateway.registry.snapshot()]
    upstreams = []
    for lane in lanes:
        upstream = Upstream(lane, plane.deadlines)
        upstream.connection_made(FakeTransport())  # type: ignore[arg-type]
        lane.open += 1
        lane.idle.append(upstream)
        upstreams.append(upstream)
    client = Downstream(plane)
    client.connection_made(FakeTransport())  # type: ignore[arg-type]

    key = KEY_TEXT if keys else ""
    plain = request(False, key)

    def one_request() -> None:
        client.data_received(plain)
        upstream = upstreams[0] if not lanes[0].idle else upstreams[1]
        upstream.data_received(ANSWER)

    run("request", one_request, count, profile)

    client.data_received(request(True, key))
    upstream = upstreams[0] if not lanes[0].idle else upstreams[1]
    upstream.data_received(STREAM_HEAD + CHUNK)
    relay: Any = upstream.transport.protocol  # type: ignore[attr-defined]
    run("chunk", lambda: relay.data_received(CHUNK), count, profile)
    await gateway.stop()


def run(name: str, what: Callable[[], None], count: int, profile: bool) -> None:
    for _ in range(count // 10):
        what()
    if profile:
        profiler = cProfile.Profile()
        profiler.enable()
        for _ in range(count):
            what()
        profiler.disable()
        pstats.Stats(profiler).sort_stats("tottime").print_stats(30)
        return
    best = float("inf")
    for _ in range(20):
        start = time.process_time()
        for _ in range(count):
            what()
        best = min(best, (time.process_time() - start) / count)
    print(f"{name}: {best * 1e6:.2f} us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--keys", action="store_true", help="with an API key in every request")
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    with tempfile.NamedTemporaryFile() as file:
        file.write(msgspec.json.encode(KEY) + b"\n")
        file.flush()
        keys = file.name if arguments.keys else ""
        uvloop.run(measure(arguments.count, arguments.profile, keys))


if __name__ == "__main__":
    main()
