"""The conformance test of load balancing policies, for this package's own and for anybody else's.

    def test_my_policy_keeps_the_contract() -> None:
        check_policy(lambda: MyPolicy())

What it demands is the contract of `pointsman.domain.policy.Policy`: a pick is one of the given workers, for any number
of them and any loads, through every change of membership; workers are left as they are; equal input gives equal picks;
and the requests are spread no worse than blind chance would. A policy that has `consider` must mean what it says: its
next pick is the one it named, and considering changes nothing. It does not judge how good a policy is beyond that.
"""

import math
from collections.abc import Callable, Iterator
from typing import Literal

from pointsman.domain.policy import Policy
from pointsman.domain.policy.consideration import Considers
from pointsman.domain.request import InferenceRequest
from pointsman.domain.worker import TL_BLOCK_TOKENS, Worker, load_of

__all__ = ["chance_bound", "check_policy"]

SIZES = (1, 2, 3, 8, 32)
"""The fleets over which the spread is measured."""

REQUESTS_PER_WORKER = 64


def chance_bound(requests: int, workers: int) -> float:
    """Return how many requests the fullest of `workers` may hold if each went to a random one.

    The count X of one worker is a sum of independent 0/1 draws with mean m = requests / workers. Bernstein's inequality
    says P(X >= m + t) <= exp(-t^2 / (2 (m + t / 3))). Over all workers the chance of any excess is at most `workers`
    times that; setting it to 1e-9 and writing L = ln(workers / 1e-9) gives t = L / 3 + sqrt(L^2 / 9 + 2 m L). So a
    policy that is as even as chance fails here once in a billion runs, and one that piles up fails always: sending all
    to one worker of 8 gives 512 where this allows 126.

    >>> int(chance_bound(512, 8))
    126
    """
    mean = requests / workers
    log = math.log(workers / 1e-9)
    return mean + log / 3 + math.sqrt(log * log / 9 + 2 * mean * log)


def check_policy(
    factory: Callable[[], Policy],
    *,
    picks: Literal["deterministic", "random"] = "deterministic",
    bound: Callable[[int, int], float] = chance_bound,
) -> None:
    """Raise `AssertionError`, saying what broke, unless the policies that `factory` makes keep the contract.

    `picks="random"` is for policies with a source of randomness: equal input need not give equal picks then.
    `bound(requests, workers)` is the most that one of equal workers may hold after that many requests were placed one
    after the other and none has ended, each with a prompt of its own. The default is what blind chance keeps to; give a
    tighter one where the policy promises more, as ceil(requests / workers) for the least loaded.
    """
    for size in range(1, 65):
        _check_total(factory(), size)
    _check_membership(factory())
    if picks == "deterministic":
        _check_determinism(factory(), factory(), considering=False)
        _check_determinism(factory(), factory(), considering=True)
    for size in SIZES:
        _check_spread(factory(), size, bound)


def _check_total(policy: Policy, size: int) -> None:
    workers = tuple(_worker(f"w{number:02}") for number in range(size))
    loads: list[Callable[[int], int]] = [
        lambda number: 0,
        lambda number: 5,
        lambda number: number,
        lambda number: size - number,
        lambda number: 10**9 if number % 2 else 0,
    ]
    for case, amount in enumerate(loads):
        for number, worker in enumerate(workers):
            worker.queue_depth = amount(number)
            worker.kv_total_blocks = amount(size - number)
            worker.kv_tokens = worker.kv_total_blocks * TL_BLOCK_TOKENS
        for request in _requests(8, f"total-{case}"):
            _pick(policy, workers, request)


def _check_membership(policy: Policy) -> None:
    fleet = [_worker(f"w{number}") for number in range(6)]
    restarted = _worker("w3")
    steps = {
        "the whole fleet": fleet,
        "without a failed worker": fleet[:1] + fleet[2:],
        "the whole fleet again": fleet,
        "after one left": fleet[:5],
        "after one restarted under its id": [*fleet[:3], restarted, *fleet[4:5]],
        "after others joined": sorted([*fleet, _worker("a"), _worker("z")], key=lambda w: w.id),
        "all others": [_worker("x"), _worker("y")],
        "one alone": [fleet[0]],
    }
    for step, workers in steps.items():
        given = tuple(workers)
        for request in _requests(64, step):
            _pick(policy, given, request)


def _check_determinism(one: Policy, other: Policy, *, considering: bool) -> None:
    # One of them is also asked what it thinks: if that changes anything, the two part ways.
    fleets = [_fleet(5), _fleet(5)]
    what = (
        "considering changed the picks that follow"
        if considering
        else "equal input gave different picks"
    )
    for request in _requests(200, "twice"):
        a, why_a = _pick(one, fleets[0], request, considering=considering)
        b, why_b = _pick(other, fleets[1], request, considering=False)
        _demand((a.id, why_a) == (b.id, why_b), what)
        a.in_flight += 1
        b.in_flight += 1


def _check_spread(policy: Policy, size: int, bound: Callable[[int, int], float]) -> None:
    workers = _fleet(size)
    count = REQUESTS_PER_WORKER * size
    for request in _requests(count, f"spread-{size}"):
        worker, _ = _pick(policy, workers, request, considering=False)
        worker.in_flight += 1
    fullest = max(worker.in_flight for worker in workers)
    most = bound(count, size)
    _demand(
        fullest <= most,
        f"{fullest} of {count} requests went to one of {size} equal workers, {most:.0f} allowed",
    )


def _pick(
    policy: Policy,
    workers: tuple[Worker, ...],
    request: InferenceRequest,
    *,
    considering: bool = True,
) -> tuple[Worker, str]:
    def load(worker: Worker) -> int:
        _demand(any(worker is given for given in workers), "asked for the load of another worker")
        return load_of(worker)

    before = [_state(worker) for worker in workers]
    seen = None
    if considering and isinstance(policy, Considers):
        seen = policy.consider(workers, load, request)
        _demand(seen == policy.consider(workers, load, request), "considering twice differs")
        _demand(
            len(seen.scores) == len(seen.notes) == len(workers),
            "scores and notes are not parallel to the workers",
        )
        _demand(before == [_state(given) for given in workers], "considering changed a worker")
    worker, reason = policy.pick(workers, load, request)
    _demand(any(worker is given for given in workers), f"picked {worker!r}, not one of {workers}")
    _demand(before == [_state(given) for given in workers], "a worker was changed")
    _demand(reason.isidentifier(), f"the reason {reason!r} is not one word")
    if seen is not None and seen.pick is not None:
        _demand(
            worker is seen.pick and reason == seen.reason,
            f"considered {seen.pick!r} for {seen.reason}, then picked {worker!r} for {reason}",
        )
    return worker, reason


def _state(worker: Worker) -> list[object]:
    return [getattr(worker, name) for name in Worker.__slots__]


def _fleet(size: int) -> tuple[Worker, ...]:
    return tuple(_worker(f"w{number:02}") for number in range(size))


def _worker(worker_id: str) -> Worker:
    tokens = 2048 * TL_BLOCK_TOKENS
    return Worker(worker_id, model="m", http_address="h:1", kv_total_blocks=2048, kv_tokens=tokens)


def _requests(count: int, label: str) -> Iterator[InferenceRequest]:
    # The first has no prompt at all, as a request for embeddings.
    yield InferenceRequest("m", f"{label}-0")
    for number in range(1, count):
        prompt = f'"{label}: prompt {number}"'.encode()
        yield InferenceRequest("m", f"{label}-{number}", prompt=prompt)


def _demand(condition: bool, text: str) -> None:
    # Not an assert statement: this must also hold under `python -O`.
    if not condition:
        raise AssertionError(text)
