"""What believing costs: microseconds of a look-up and of an insertion, bytes of a block, milliseconds of forgetting.

Run as `python bench/prefix_index.py [BLOCKS]`, a million by default. Every worker has prompts of 64 blocks, of which
the first 8 are one of 16 system prompts that all workers have, and the rest its own. Figures are the least of a few
rounds of CPU time, as in pick.py; memory is what the interpreter's allocator says, with the hashes themselves.
"""

import sys
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from random import Random

from pointsman.domain.prefix_index import PrefixIndex
from pointsman.domain.request import InferenceRequest
from pointsman.domain.worker import Worker

ROUNDS = 5
DEPTH = 64
SHARED = 8
SYSTEMS = 16
SIZES = (2, 64, 1000)
TEXT = "You are the assistant of the docs. Answer from them.\n"

Prompt = tuple[int, ...]


def microseconds(run: Callable[[], object], calls: int) -> float:
    """Return the least CPU time per call over a few rounds."""
    rounds = []
    for _ in range(ROUNDS):
        began = time.process_time()
        for _ in range(calls):
            run()
        rounds.append((time.process_time() - began) / calls * 1e6)
    return min(rounds)


def prompts_of(count: int, random: Random) -> list[Prompt]:
    """Return prompts of `DEPTH` blocks that begin with one of `SYSTEMS` beginnings."""
    systems = [[random.getrandbits(64) for _ in range(SHARED)] for _ in range(SYSTEMS)]
    own = DEPTH - SHARED
    return [
        (*systems[number % SYSTEMS], *[random.getrandbits(64) for _ in range(own)])
        for number in range(count)
    ]


def filled(size: int, blocks: int) -> tuple[PrefixIndex, tuple[Worker, ...], list[Prompt], float]:
    """Return an index of about `blocks` blocks over `size` workers, with the seconds that it took."""
    workers = tuple(
        Worker(f"w{number:04}", model="m", http_address="h:1") for number in range(size)
    )
    prompts = prompts_of(blocks // (DEPTH - SHARED), Random(1))
    index = PrefixIndex(2 * blocks, 3600.0)
    began = time.process_time()
    for number, prompt in enumerate(prompts):
        # Every worker comes to every system prompt.
        worker = workers[(number // SYSTEMS) % size]
        index.insert(worker, prompt, now=number * 0.001)
    return index, workers, prompts, time.process_time() - began


def look_ups(size: int, blocks: int) -> None:
    """Print what an index of one fleet costs."""
    index, workers, prompts, took = filled(size, blocks)
    random = Random(2)
    strange = tuple([random.getrandbits(64) for _ in range(DEPTH)])
    asked = iter(prompts * 9)
    one = microseconds(lambda: index.match(next(asked), workers), 500)
    none = microseconds(lambda: index.match(strange, workers), 500)
    print(
        f"{size} workers, {len(index)} blocks: {took / len(prompts) / DEPTH * 1e6:.2f} us a block inserted "
        f"({len(prompts) * DEPTH / took / 1e6:.2f} million a second); match of {DEPTH}, the first {SHARED} with "
        f"{len(index.match(prompts[-1], workers))} workers: {one:.1f} us, with none: {none:.2f} us"
    )
    last = time.process_time()
    index.purge(workers[0])
    print(f"  purge of one worker {(time.process_time() - last) * 1e3:.2f} ms", end="")
    last = time.process_time()
    index.expire(1e6)
    print(f", expiry of all {(time.process_time() - last) * 1e3:.0f} ms")


def full(size: int, blocks: int) -> None:
    """Print what insertions cost where there is no room."""
    workers = [Worker(f"w{number}", model="m", http_address="h:1") for number in range(size)]
    index = PrefixIndex(blocks, 3600.0)
    prompts = prompts_of(3 * blocks // (DEPTH - SHARED), Random(3))
    worst = total = 0.0
    for number, prompt in enumerate(prompts):
        began = time.process_time()
        index.insert(workers[number % size], prompt, now=number * 0.001)
        took = time.process_time() - began
        if number > len(prompts) // 2:
            worst, total = max(worst, took), total + took
    each = total / (len(prompts) // 2) / DEPTH * 1e6
    print(
        f"{size} workers, full at {blocks} blocks: {each:.2f} us a block inserted, "
        f"the longest insertion {worst * 1e3:.1f} ms"
    )


def memory(size: int, blocks: int) -> None:
    """Print what a block takes, its hash included."""
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    index, _, prompts, _ = filled(size, blocks)
    del prompts
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    print(f"{size} workers, {len(index)} blocks: {used / len(index):.0f} bytes a block")


def requests() -> None:
    """Print what the blocks of a prompt cost."""
    for size in (2_000, 32_768, 1 << 20):
        text = (TEXT * (size // len(TEXT) + 1))[:size].replace("\n", "\\n")
        us = microseconds(
            partial(blocks_of, b'[{"role":"user","content":"%b"}]' % text.encode()),
            2_000_000 // size + 2,
        )
        print(f"blocks of {size} bytes: {us:.1f} us")


def blocks_of(messages: bytes) -> Prompt:
    """Return the blocks of a prompt, computed anew."""
    return InferenceRequest("m", "r", messages=messages).blocks


def main() -> None:
    """Print the figures."""
    blocks = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    requests()
    for size in SIZES:
        look_ups(size, blocks)
    for size in (1, 64, 1000):
        full(size, blocks // 4)
    memory(64, blocks // 4)


if __name__ == "__main__":
    main()
