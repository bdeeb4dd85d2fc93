"""What became of a simulated run: plain arrays, one place for each request, in the order in which they came.

Quantiles, goodput and tables are made of it elsewhere. A request costs 88 bytes, whatever its prompt is.
"""

from array import array
from math import nan

from msgspec import Struct, field

from pointsman.domain.worker import Role

__all__ = ["Outcome", "WorkerOutcome"]


def _doubles() -> "array[float]":
    return array("d")


def _counts() -> "array[int]":
    return array("q")


class WorkerOutcome(Struct):
    """What one worker did in all of its lives.

    `requests` is how many it was sent; `computed_tokens` of prompts it computed, `cached_tokens` it found in its cache;
    `evicted_tokens` left the cache to make room; `preemptions` is how often a sequence lost its place for lack of room;
    `busy_s` is how long it had anything to compute, in seconds; `received_tokens` of prompts were handed over to it.
    """

    id: str
    requests: int = 0
    computed_tokens: int = 0
    cached_tokens: int = 0
    evicted_tokens: int = 0
    preemptions: int = 0
    busy_s: float = 0.0
    role: Role = Role.UNIFIED
    received_tokens: int = 0


class Outcome(Struct):
    """What became of every request, as parallel arrays, and of every worker.

    `at` is when it came; `ttft` until the end of the step that gave its first token; `tpot` between two tokens of its
    answer on average; `e2e` until its last one; all in seconds, nan where there was none (`tpot` of an answer of one
    token, everything of a request that failed, but for the first token where it had one). `prompt`, `output` and
    `cached` are tokens, `cached` those that whoever computed its prompt found in its cache. `worker` is the place in
    `workers` of the one that answered, or was asked last, -1 for none; `prefill` is that of the one that computed the
    prompt for it, -1 where it did so itself; `gateway` is the one that it came through; `attempts` is how often it was
    sent. `ended_at` is when the last event happened.

    >>> outcome = Outcome()
    >>> outcome.begin(0.5, prompt=100, output=3, gateway=0)
    0
    >>> len(outcome), outcome.failed(0)
    (1, True)
    """

    at: "array[float]" = field(default_factory=_doubles)
    ttft: "array[float]" = field(default_factory=_doubles)
    tpot: "array[float]" = field(default_factory=_doubles)
    e2e: "array[float]" = field(default_factory=_doubles)
    prompt: "array[int]" = field(default_factory=_counts)
    output: "array[int]" = field(default_factory=_counts)
    cached: "array[int]" = field(default_factory=_counts)
    worker: "array[int]" = field(default_factory=_counts)
    prefill: "array[int]" = field(default_factory=_counts)
    gateway: "array[int]" = field(default_factory=_counts)
    attempts: "array[int]" = field(default_factory=_counts)
    workers: list[WorkerOutcome] = []
    ended_at: float = 0.0

    def __len__(self) -> int:
        """Return how many requests came."""
        return len(self.at)

    def begin(self, at: float, *, prompt: int, output: int, gateway: int) -> int:
        """Make room for a request that comes at `at`, and return its place."""
        self.at.append(at)
        self.ttft.append(nan)
        self.tpot.append(nan)
        self.e2e.append(nan)
        self.prompt.append(prompt)
        self.output.append(output)
        self.cached.append(0)
        self.worker.append(-1)
        self.prefill.append(-1)
        self.gateway.append(gateway)
        self.attempts.append(0)
        return len(self.at) - 1

    def failed(self, index: int) -> bool:
        """Tell whether a request had no complete answer."""
        end = self.e2e[index]
        return end != end
