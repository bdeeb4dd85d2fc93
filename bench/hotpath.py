"""The Python of one request, without sockets: a client's bytes in, an engine's bytes in, everything in between.

    python bench/hotpath.py [--keys] [--profile]

Transports are fakes whose writes cost next to nothing, so what is left is what the gateway itself spends per request
and per streamed chunk. The figure is best compared with itself, before and after a change.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from collections.abc import Callable

import uvloop
from socketless import ANSWER, CHUNK, STREAM_HEAD, Socketless, request


async def measure(count: int, profile: bool, keys: bool) -> None:
    gateway = Socketless(keys=keys, decisions_kept=1000)
    await gateway.start()
    plain = request(key=gateway.key)

    def one_request() -> None:
        gateway.client(plain)
        gateway.engine(ANSWER)

    run("request", one_request, count, profile)

    gateway.client(request(stream=True, key=gateway.key))
    gateway.engine(STREAM_HEAD + CHUNK)
    run("chunk", lambda: gateway.engine(CHUNK), count, profile)
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
    uvloop.run(measure(arguments.count, arguments.profile, arguments.keys))


if __name__ == "__main__":
    main()
