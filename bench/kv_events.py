"""What following engines costs: KV events applied per second, and bytes of a block that is known.

Run as `python bench/kv_events.py [BLOCKS]`, 200,000 by default. Batches are those of a step of an engine that computes
prompts: some prompts of 64 blocks of 16 tokens in one batch, an event for each, and from the time that the engine is
full a removal of one block for every block that is stored, an event for each as vLLM has it. Everything is done that a
gateway does with a message, from its bytes to the index; no socket. CPU time, the best of a few rounds; memory is what
the interpreter's allocator says.
"""

import sys
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from random import Random

import msgspec

from pointsman.dialect.kv_events import Message, read_batch
from pointsman.dialect.kv_stream import KvStream, Union
from pointsman.domain.blocks import TOKEN_BYTES
from pointsman.domain.prefix_index import PrefixIndex
from pointsman.domain.worker import Worker

ROUNDS = 3
BLOCK_TOKENS = 16
DEPTH = 64
PROMPTS = 8
"""Prompts in a batch."""


class Into:
    """The index, as the streams of one worker see it."""

    def __init__(self, index: PrefixIndex) -> None:
        self.index = index
        self.worker = Worker("w", model="m", http_address="h:1")

    def stored(self, blocks: Sequence[int]) -> None:
        self.index.stored(self.worker, blocks, 0.0)

    def removed(self, blocks: Sequence[int]) -> None:
        self.index.removed(self.worker, blocks)


def batches(blocks: int, *, room: int, wide: bool) -> Iterator[bytes]:
    """Yield batches that store `blocks` blocks in an engine with room for so many; `wide` hashes have 32 bytes."""
    random = Random(1)
    held: list[int | bytes] = []
    gone = 0
    for _ in range(0, blocks, PROMPTS * DEPTH):
        events: list[object] = []
        for _ in range(PROMPTS):
            names = [random.randbytes(32) if wide else random.getrandbits(64) for _ in range(DEPTH)]
            ids = [random.randrange(128_000) for _ in range(DEPTH * BLOCK_TOKENS)]
            held += names
            while len(held) - gone > room:
                events.append(
                    {"type": "BlockRemoved", "block_hashes": [held[gone]], "medium": "GPU"}
                )
                gone += 1
            events.append(
                {
                    "type": "BlockStored",
                    "block_hashes": names,
                    "parent_block_hash": None,
                    "token_ids": ids,
                    "block_size": BLOCK_TOKENS,
                    "lora_id": None,
                    "medium": "GPU",
                    "lora_name": None,
                    "extra_keys": [None] * DEPTH,
                    "group_idx": 0,
                }
            )
        yield msgspec.msgpack.encode([1.0, events, 0])


def applied(payloads: Sequence[bytes], ours: int) -> tuple[float, KvStream, PrefixIndex]:
    """Return the CPU seconds that messages take, and what came of them."""
    index = PrefixIndex(10_000_000, 3600.0)
    stream = KvStream(Union(Into(index)), ours * TOKEN_BYTES, blocks_max=10_000_000)
    messages = [Message(number, payload) for number, payload in enumerate(payloads)]
    began = time.process_time()
    for message in messages:
        stream.take(message)
    return time.process_time() - began, stream, index


def speed(blocks: int, *, wide: bool, ours: int) -> None:
    """Print how much of an engine that is full a gateway can follow."""
    payloads = list(batches(blocks, room=blocks // 4, wide=wide))
    events = sum(len(read_batch(each).events) for each in payloads)
    took = min(applied(payloads, ours)[0] for _ in range(ROUNDS))
    kind = "32 bytes" if wide else "integers"
    print(
        f"  {kind:9}  ours {ours:3} tokens  {events / took:9,.0f} events/s  {blocks / took:9,.0f} blocks stored/s  "
        f"{took / len(payloads) * 1e3:6.2f} ms a batch of {events / len(payloads):.0f} events"
    )


def memory(blocks: int, *, wide: bool) -> None:
    """Print what a block costs: what the stream knows of it, and the index."""
    payloads = list(batches(blocks, room=blocks, wide=wide))
    tracemalloc.start()
    _, stream, index = applied(payloads, BLOCK_TOKENS)
    both = tracemalloc.get_traced_memory()[0]
    known = len(stream)
    del stream
    alone = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    kind = "32 bytes" if wide else "integers"
    print(
        f"  {kind:9}  {both / known:5.0f} bytes a block, {alone / len(index):5.0f} of them in the index"
    )


def main() -> None:
    """Measure."""
    blocks = int(sys.argv[1]) if len(sys.argv) > 1 else 200_000
    print(
        f"{blocks:,} blocks of {BLOCK_TOKENS} tokens, {PROMPTS} prompts of {DEPTH} blocks a batch"
    )
    print("events of an engine that is full:")
    for wide in (False, True):
        speed(blocks, wide=wide, ours=BLOCK_TOKENS)
    speed(blocks, wide=False, ours=4 * BLOCK_TOKENS)
    print("memory:")
    for wide in (False, True):
        memory(blocks // 4, wide=wide)


if __name__ == "__main__":
    main()
