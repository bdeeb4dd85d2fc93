"""Restart every gateway behind a balancer, one after another, under load, and read every answer.

    python bench/rolling.py --streams 40 --stream-s 60 --rate 50

Two gateways stand behind a stand-in balancer that asks `/readyz`. Streams run all the time, and plain requests come at
a fixed rate; each gateway in turn gets SIGTERM, and a new one takes its place. Besides, a prober asks the gateway that
goes directly, on new connections, from its SIGTERM until its listener is closed.

Passes (exit 0) when no connection was refused that the balancer passed on, every plain request and every probe got its
200, every stream ended with `[DONE]` or with the gateway's error event, and some of both kinds did.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import socket
import sys
import time
from collections import Counter
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from pointsman.testing.balancer import Backend, Balancer
from pointsman.testing.client import Client, post
from pointsman.testing.origin import Conversation, Origin, event, json_answer, sse_chunk, sse_head

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

__all__ = ["Report", "main", "objections", "roll"]

DONE = b"data: [DONE]\n\n"
ERROR_EVENT = b'data: {"error":{"message":"the upstream stream failed"'
EVENT_S = 0.25


class Report:
    """What the clients saw."""

    def __init__(self) -> None:
        self.plain: Counter[str] = Counter()
        self.streams: Counter[str] = Counter()
        self.probes: Counter[str] = Counter()
        self.refused = 0
        self.restarts = 0
        self.drains_s: list[float] = []


class Gateway:
    """A gateway process and its ports."""

    def __init__(self, process: asyncio.subprocess.Process, backend: Backend) -> None:
        self.process = process
        self.backend = backend


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, as the kernel gives them."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


async def start(engine: str, grace_s: float, drain_s: float) -> Gateway:
    """A new gateway in front of that engine."""
    api, health, registry = free_ports(3)
    settings = {
        "listen": f"127.0.0.1:{api}",
        "health_listen": f"127.0.0.1:{health}",
        "registry_listen": f"127.0.0.1:{registry}",
        "shutdown_grace_s": grace_s,
        "drain_deadline_s": drain_s,
        "log_level": "error",
        "access_log": "off",
    }
    config = "".join(f"{key} = {value!r}\n".replace("'", '"') for key, value in settings.items())
    worker = f'[[gateway.workers]]\nid = "a"\nurl = "http://{engine}"\nmodel = "m"\n'
    # A pipe as the file: it is read once, and nothing is left behind.
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pointsman", "serve", "--config", "/dev/stdin",
        stdin=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None
    process.stdin.write(f"[gateway]\n{config}{worker}".encode())
    process.stdin.close()
    return Gateway(process, Backend(("127.0.0.1", api), ("127.0.0.1", health)))


@asynccontextmanager
async def engine(stream_s: float) -> AsyncIterator[str]:
    """An engine whose streams last that long."""

    async def script(talk: Conversation) -> None:
        if b'"stream":true' not in talk.request.body:
            await talk.send(json_answer({"ok": True}))
            return
        await talk.send(sse_head())
        for index in range(max(1, round(stream_s / EVENT_S))):
            await talk.send(sse_chunk(event(str(index))))
            await asyncio.sleep(EVENT_S)
        await talk.send(sse_chunk(DONE) + b"0\r\n\r\n")

    async with Origin(script) as origin:
        yield origin.address


async def stream(address: tuple[str, int], report: Report) -> None:
    """Ask for one stream and read it to its end."""
    try:
        async with Client(address) as client:
            response = await client.ask(post({"model": "m", "stream": True}))
    except (OSError, asyncio.IncompleteReadError):
        report.streams["no answer"] += 1
        return
    if response.status != 200:
        report.streams[f"status {response.status}"] += 1
    elif response.body.endswith(DONE):
        report.streams["whole"] += 1
    elif ERROR_EVENT in response.body[-300:] and response.complete:
        report.streams["ended by the error event"] += 1
    else:
        report.streams["cut off"] += 1


async def ask(address: tuple[str, int], counts: Counter[str]) -> None:
    """Ask one plain request on a connection of its own."""
    try:
        async with Client(address) as client:
            response = await client.ask(post({"model": "m"}, headers={"connection": "close"}))
    except (OSError, asyncio.IncompleteReadError) as error:
        counts[f"no answer: {type(error).__name__}"] += 1
    else:
        counts["200" if response.complete and response.status == 200 else "bad"] += 1


async def probe(gateway: Gateway, report: Report) -> None:
    """Ask a gateway that was told to go, until it takes no connections any more."""
    while True:
        try:
            async with Client(gateway.backend.api) as client:
                response = await client.ask(post({"model": "m"}))
        except ConnectionRefusedError:
            return
        except (OSError, asyncio.IncompleteReadError) as error:
            # Accepted by the kernel in the moment that the listener closed: nobody ever saw it.
            report.probes[f"lost at the close: {type(error).__name__}"] += 1
            return
        report.probes["200" if response.status == 200 else f"status {response.status}"] += 1
        await asyncio.sleep(0.02)


async def roll(
    *, streams: int, stream_s: float, rate: float, rounds: int, grace_s: float, drain_s: float
) -> Report:
    """Restart both gateways `rounds` times under load, and return what the clients saw."""
    report = Report()
    going = True

    async def keep_streaming(address: tuple[str, int], after_s: float) -> None:
        await asyncio.sleep(after_s)
        while going:
            await stream(address, report)

    async def keep_asking(address: tuple[str, int], tasks: asyncio.TaskGroup) -> None:
        while going:
            tasks.create_task(ask(address, report.plain))
            await asyncio.sleep(1 / rate)

    async with engine(stream_s) as origin, Balancer() as balancer:
        gateways = [await start(origin, grace_s, drain_s) for _ in range(2)]
        try:
            balancer.backends = [gateway.backend for gateway in gateways]
            for gateway in gateways:
                await balancer.until(gateway.backend, ready=True)
            async with asyncio.TaskGroup() as tasks:
                for number in range(streams):
                    # Spread over a stream's time, so that a restart finds streams of every age.
                    after_s = stream_s * number / streams
                    tasks.create_task(keep_streaming(balancer.address, after_s))
                tasks.create_task(keep_asking(balancer.address, tasks))
                await asyncio.sleep(stream_s)  # until streams of every age are under way
                for index in [0, 1] * rounds:
                    await asyncio.sleep(min(2.0, stream_s / 2))
                    new = await start(origin, grace_s, drain_s)
                    balancer.backends.append(new.backend)
                    await balancer.until(new.backend, ready=True)
                    old, gateways[index] = gateways[index], new
                    began = time.monotonic()
                    old.process.send_signal(signal.SIGTERM)
                    tasks.create_task(probe(old, report))
                    await old.process.wait()
                    report.drains_s.append(time.monotonic() - began)
                    report.restarts += 1
                    balancer.backends.remove(old.backend)
                going = False
            report.refused = balancer.refused
        finally:
            for gateway in gateways:
                if gateway.process.returncode is None:
                    gateway.process.kill()
                    await gateway.process.wait()
    return report


def objections(report: Report) -> list[str]:
    """What is wrong with the run; empty if nothing is."""
    said = []
    if report.refused:
        said.append(f"{report.refused} connections were refused")
    if set(report.plain) != {"200"}:
        said.append(f"plain requests: {dict(report.plain)}")
    bad = {kind for kind in report.probes if not kind.startswith(("200", "lost at the close"))}
    if bad or not report.probes["200"]:
        said.append(f"probes: {dict(report.probes)}")
    if set(report.streams) - {"whole", "ended by the error event"}:
        said.append(f"streams: {dict(report.streams)}")
    if not report.streams["whole"]:
        said.append("no stream was whole: this run shows little")
    return said


def main(arguments: Sequence[str]) -> int:
    """Run it and print what happened."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=40, help="streams at a time")
    parser.add_argument("--stream-s", type=float, default=60, help="how long a stream lasts")
    parser.add_argument("--rate", type=float, default=50, help="plain requests a second")
    parser.add_argument("--rounds", type=int, default=1, help="restarts of each gateway")
    parser.add_argument("--grace-s", type=float, default=2, help="shutdown_grace_s")
    parser.add_argument("--drain-s", type=float, default=30, help="drain_deadline_s")
    args = parser.parse_args(arguments)
    report = asyncio.run(roll(**vars(args)))
    print(
        f"rolling: {report.restarts} restarts, drains of {min(report.drains_s):.1f} to "
        f"{max(report.drains_s):.1f} s; plain {dict(report.plain)}; streams {dict(report.streams)}; "
        f"probes of gateways that were going {dict(report.probes)}; {report.refused} refused"
    )
    said = objections(report)
    for text in said:
        print("FAILS " + text)
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
