"""What routing costs one request: microseconds of `Router.route`, `Policy.pick` and the prefix key.

Run as `python bench/pick.py`. Each figure is the best of 7 rounds of CPU time, so it is the cost without disturbance,
not a mean; requests are made before the clock starts, and every request has a prompt of its own out of 1000. A pick
changes no load, so the bounded walk is not in the figures. No heartbeats arrive meanwhile.
"""

import json
import time
from collections.abc import Callable, Iterable
from random import Random

from pointsman.domain.policy import POLICIES, PolicyOptions, make_policy
from pointsman.domain.prefix import render_prefix
from pointsman.domain.registry import Registry, WorkerReport
from pointsman.domain.request import InferenceRequest
from pointsman.domain.ring import Ring
from pointsman.domain.router import Router
from pointsman.domain.routes import RouteTable
from pointsman.domain.worker import Role, load_of

ROUNDS = 7
REQUESTS = 1000
SIZES = (2, 16, 64, 1000)
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


def costs(name: str, size: int, requests: list[InferenceRequest]) -> tuple[float, float, float]:
    """Return what a pick, a route, and a route after one failure cost with `size` workers."""
    registry = registry_of(size)
    workers = registry.routable("m", Role.UNIFIED)
    policy = make_policy(name, PolicyOptions(), Random(1))
    router = Router(registry, policy, RouteTable())
    failed = (workers[0],)
    return (
        microseconds(lambda request: policy.pick(workers, load_of, request), requests),
        microseconds(lambda request: router.route(request, now=1.0), requests),
        microseconds(lambda request: router.route(request, failed, now=1.0), requests),
    )


def main() -> None:
    """Print the table."""
    requests = requests_of(2000)
    for request in requests:
        assert request.prefix_key
    print("us per call".ljust(38) + "".join(f"{size:>10}" for size in SIZES))
    for name in POLICIES:
        columns = [costs(name, size, requests[: 200_000 // size]) for size in SIZES]
        for label, row in zip(
            ("pick", "route", "route, one failed"), zip(*columns, strict=True), strict=True
        ):
            print(f"{name}, {label}".ljust(38) + "".join(f"{us:>10.2f}" for us in row))
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
