"""A gateway without sockets: a client's bytes in, an engine's bytes in, and transports that forget what is written.

All of the gateway is there, as `pointsman serve` builds it; what the kernel and the loop would do is not.
"""

from __future__ import annotations

import asyncio
import gc
import tempfile
from random import Random
from typing import Any

import msgspec
from gateways import KEY, KEY_TEXT

from pointsman.app import Gateway
from pointsman.config import Config, GatewayConfig, StaticWorker
from pointsman.domain.policy import PolicyOptions, make_policy
from pointsman.net.downstream import Downstream
from pointsman.net.upstream import Upstream

__all__ = ["ANSWER", "CHUNK", "LAST", "REFUSAL", "STREAM_HEAD", "Clock", "Socketless", "request"]

SYSTEM = "You are the docs assistant for forge. Answer from the docs and cite them. " * 24
CONTENT = "How do I configure it?"
_ANSWER_BODY = b'{"id":"chatcmpl-1","object":"chat.completion","model":"m","x":"%b"}' % (b"0" * 500)
ANSWER = (
    b"HTTP/1.1 200 OK\r\ndate: Mon, 01 Jan 2026 00:00:00 GMT\r\nserver: uvicorn\r\n"
    b"content-length: %d\r\ncontent-type: application/json\r\n\r\n%b"
    % (len(_ANSWER_BODY), _ANSWER_BODY)
)
REFUSAL = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 4\r\n\r\nfull"
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
CHUNK = b"c8\r\n" + b"data: " + b"x" * 192 + b"\n\n\r\n"
LAST = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


def request(*, stream: bool = False, key: str = "", system: str = SYSTEM) -> bytes:
    """Return a chat request, whose body is that of `system` and some 150 bytes more."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": CONTENT}]
    body = msgspec.json.encode(
        {"model": "m", "messages": messages, "max_tokens": 64, "stream": stream, "temperature": 0.0}
    )
    authorization = f"Authorization: Bearer {key}\r\n".encode() if key else b""
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:8087\r\n%b"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
        % (authorization, len(body), body)
    )


class Clock:
    """Monotonic seconds that pass when somebody says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Transport:
    """Takes bytes and forgets them, but for who wrote last to an engine."""

    def __init__(self, asked: list[Transport]) -> None:
        self._asked = asked
        self.protocol: Any = None

    def write(self, data: bytes) -> None:
        self._asked[0] = self

    def writelines(self, data: Any) -> None:
        self._asked[0] = self

    def is_closing(self) -> bool:
        return False

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

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


class Socketless:
    """One gateway, one client, and one open connection to each of its workers.

    `client(data)` is what a client sends, `engine(data)` what the engine that was asked last sends. Chance is seeded;
    with a `clock` there is no other time. Few decisions are kept, so that soon the oldest makes room for the next, as
    in a gateway that has run for a while.
    """

    def __init__(
        self,
        *,
        workers: int = 2,
        policy: str = "affinity",
        keys: bool = False,
        decisions_kept: int = 8,
        clock: Clock | None = None,
    ) -> None:
        self.key = KEY_TEXT if keys else ""
        self._clock = clock
        self._file = tempfile.NamedTemporaryFile()  # noqa: SIM115  # `stop` closes it
        self._file.write(msgspec.json.encode(KEY) + b"\n")
        self._file.flush()
        at = "127.0.0.1:0"
        options = GatewayConfig(
            listen=at,
            health_listen=at,
            registry_listen=at,
            route_policy=policy,
            workers=tuple(
                StaticWorker(id=f"w{n:04}", url=f"http://127.0.0.1:{n + 1}", model="m")
                for n in range(workers)
            ),
            keys_file=self._file.name if keys else "",
            decisions_kept=decisions_kept,
            access_log="off",
        )
        self._gateway = Gateway(Config(gateway=options), environ={"TL_GATEWAY_PEPPER": "pepper"})

    async def start(self) -> None:
        """Start the gateway, and connect a client and the workers to it."""
        gateway = self._gateway
        await gateway.start()
        plane = gateway.serving.plane
        if self._clock is not None:
            plane.deadlines.now = self._clock
        self.use(gateway.config.route_policy)
        nobody: Any = None
        self._asked: list[Transport] = [nobody]
        for worker in gateway.registry.snapshot():
            lane = plane.pool.lane(worker)
            upstream = Upstream(lane, plane.deadlines)
            transport = Transport(self._asked)
            transport.protocol = upstream
            upstream.connection_made(transport)  # type: ignore[arg-type]
            lane.open += 1
            lane.idle.append(upstream)
        client = Downstream(plane)
        client.connection_made(Transport([nobody]))  # type: ignore[arg-type]
        self.client = client.data_received
        gc.collect()

    def use(self, policy: str) -> None:
        """Let requests be placed by a policy, from now on; what has been cached is forgotten."""
        gateway = self._gateway
        for worker in gateway.registry.snapshot():
            gateway.serving.index.purge(worker)
        made = make_policy(policy, PolicyOptions(prefix_index=gateway.serving.index), Random(1))
        gateway.router.policy = made
        gateway.decisions.uses(made)

    async def stop(self) -> None:
        """Stop the gateway."""
        await self._gateway.stop()
        self._file.close()

    def engine(self, data: bytes) -> None:
        """Take bytes from the engine that was asked last."""
        self._asked[0].protocol.data_received(data)
