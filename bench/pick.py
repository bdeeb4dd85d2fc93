"""What routing costs one request: microseconds of `Router.route`, `Policy.pick` and the prefix key.

Run as `python bench/pick.py`. Each figure is the best of 7 rounds of CPU time, so it is the cost without disturbance,
not a mean; requests are made before the clock starts, and every request has a prompt of its own out of 1000, 32 blocks
long. A pick changes no load, so the bounded walk is not in the figures. No heartbeats arrive meanwhile.

The prefix index is warm: it has `WARM` blocks. `pick` is with half of each prompt cached on one worker; `pick, shared`
is with the first block of it cached on every worker, as by a system prompt of all, which is the worst that it can be.
`pick, idle` is that of a fleet without any load, where all workers are equal.
"""

import json
import time
from collections.abc import Callable, Iterable
from functools import partial
from random import Random

from pointsman.domain.policy import POLICIES, Policy, PolicyOptions, make_policy
from pointsman.domain.prefix import render_prefix
from pointsman.domain.prefix_index import PrefixIndex
from pointsman.domain.registry import Registry, WorkerReport
from pointsman.domain.request import InferenceRequest
from pointsman.domain.ring import Ring
from pointsman.domain.router import Router
from pointsman.domain.routes import RouteTable
from pointsman.domain.worker import Role, Worker, load_of

ROUNDS = 7
REQUESTS = 1000
SIZES = (2, 16, 64, 1000)
WARM = 1_000_000
SHARED = 20
SYSTEM = "You are a helpful assistant, number {}. " * 5


def microseconds(
    run: Callable[[InferenceRequest], object], requests: Iterable[InferenceRequest]
) -> float:
    """Return the least CPU time per call over a few rounds."""
    calls = list(requests)
    rounds = []
    for _ in range(ROUNDS):
        began = time.process_time()
        for request in calls:
            run(request)
        rounds.append((time.process_time() - began) / len(calls) * 1e6)
    return min(rounds)


def requests_of(size: int) -> list[InferenceRequest]:
    """Return chats of about `size` bytes with distinct system prompts."""
    made = []
    for number in range(REQUESTS):
        system = {"role": "system", "content": SYSTEM.format(*[number] * 5)}
        user = {"role": "user", "content": "Tell me a story.\n" * (size // 18)}
        made.append(
            InferenceRequest("m", f"r{number}", messages=json.dumps([system, user]).encode())
        )
    return made


def registry_of(size: int) -> Registry:
    """Return a registry of `size` workers of one model."""
    registry = Registry()
    for number in range(size):
        registry.beat(WorkerReport(f"w{number:04}", f"10.0.0.1:{8000 + number}", "m"), now=0.0)
    return registry


def warm_index(workers: tuple[Worker, ...], requests: list[InferenceRequest]) -> PrefixIndex:
    """Return an index of `WARM` blocks in which each prompt is half cached on one worker, and `SHARED` on all."""
    index = PrefixIndex(2 * WARM, 3600.0)
    for number, request in enumerate(requests):
        index.insert(workers[number % len(workers)], request.blocks[:16], 0.0)
    for worker in workers:
        for request in requests[:SHARED]:
            index.insert(worker, request.blocks[:1], 0.0)
    random, rest = Random(2), (WARM - len(index)) // len(workers)
    for worker in workers:
        index.insert(worker, [random.getrandbits(64) for _ in range(rest)], 0.0)
    return index


def load_up(workers: tuple[Worker, ...]) -> None:
    """Give the workers loads that are all different in tokens, and queues to some."""
    random = Random(3)
    for worker in workers:
        worker.in_flight = random.randrange(2, 8)
        worker.queue_depth = random.randrange(4)
        worker.active_tokens = random.randrange(1 << 16)
        worker.pending_tokens = random.randrange(1 << 13)
        worker.kv_usage = random.random()


def costs(size: int, requests: list[InferenceRequest]) -> dict[str, list[float]]:
    """Return, for each policy, what its picks, a route, and a route after one failure cost with `size` workers."""
    registry = registry_of(size)
    workers = registry.routable("m", Role.UNIFIED)
    options = PolicyOptions(prefix_index=warm_index(workers, requests))
    shared, own = requests[:SHARED], requests[SHARED : SHARED + max(200_000 // size, 200)]
    found = {}
    for name in POLICIES:
        policy = make_policy(name, options, Random(1))
        router = Router(registry, policy, RouteTable())
        failed = (workers[0],)

        def pick(request: InferenceRequest, policy: Policy = policy) -> object:
            return policy.pick(workers, load_of, request)

        idle = microseconds(pick, own)
        load_up(workers)
        found[name] = [
            microseconds(pick, own),
            microseconds(pick, shared),
            idle,
            microseconds(partial(router.route, now=1.0), own),
            microseconds(partial(router.route, excluded=failed, now=1.0), own),
        ]
        for worker in workers:
            worker.in_flight = worker.queue_depth = 0
            worker.active_tokens = worker.pending_tokens = 0
            worker.kv_usage = -1.0
    return found


def main() -> None:
    """Print the table."""
    requests = requests_of(17_000)
    for request in requests:
        assert request.prefix_key
        assert len(request.blocks) > 16
    print("us per call".ljust(44) + "".join(f"{size:>10}" for size in SIZES))
    columns = [costs(size, requests) for size in SIZES]
    labels = ("pick", "pick, shared", "pick, idle", "route", "route, one failed")
    for name in POLICIES:
        rows = zip(*[column[name] for column in columns], strict=True)
        for label, row in zip(labels, rows, strict=True):
            print(f"{name}, {label}".ljust(44) + "".join(f"{us:>10.2f}" for us in row))
    for size in SIZES:
        names = [f"worker-{number:04}" for number in range(size)]
        began = time.process_time()
        ring = Ring(names)
        built = time.process_time()
        ring.add("worker-new")
        added = time.process_time()
        print(
            f"ring of {size}: {(built - began) * 1e3:.2f} ms, one more {(added - built) * 1e3:.2f} ms"
        )
    for size in (2_000, 100_000, 1_000_000):
        us = microseconds(lambda r: render_prefix(r.prompt, r.messages), requests_of(size)[:50])
        print(f"prefix key of {size} bytes: {us:.2f} us")


if __name__ == "__main__":
    main()
