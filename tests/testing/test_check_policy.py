"""The conformance function fails each kind of broken policy, and says why."""

from collections.abc import Callable
from random import Random

import pytest
from msgspec.structs import replace

from pointsman.domain.policy import Policy
from pointsman.domain.policy.consideration import Consideration
from pointsman.domain.request import InferenceRequest
from pointsman.domain.worker import Worker
from pointsman.testing.policies import chance_bound, check_policy

Workers = tuple[Worker, ...]
Load = Callable[[Worker], int]
Pick = tuple[Worker, str]


class Turns:
    """A plain round robin, the sound base of the broken ones."""

    def __init__(self) -> None:
        self.count = 0

    def pick(self, workers: Workers, load: Load, request: InferenceRequest) -> Pick:
        self.count += 1
        return workers[self.count % len(workers)], "turn"


class Favourite(Turns):
    def pick(self, workers: Workers, load: Load, request: InferenceRequest) -> Pick:
        return workers[0], "favourite"


class Sticky(Turns):
    """Keeps the worker object that it picked for an id first."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[str, Worker] = {}

    def pick(self, workers: Workers, load: Load, request: InferenceRequest) -> Pick:
        worker, reason = super().pick(workers, load, request)
        return self.known.setdefault(worker.id, worker), reason


class Counting(Turns):
    def pick(self, workers: Workers, load: Load, request: InferenceRequest) -> Pick:
        worker, reason = super().pick(workers, load, request)
        worker.in_flight += 1
        return worker, reason


class Nosy(Turns):
    def pick(self, workers: Workers, load: Load, request: InferenceRequest) -> Pick:
        load(Worker("stranger", model="m", http_address="h:1"))
        return super().pick(workers, load, request)


class Wordy(Turns):
    def pick(self, workers: Workers, load: Load, request: InferenceRequest) -> Pick:
        return super().pick(workers, load, request)[0], "it was its turn"


class Pair(Turns):
    def pick(self, workers: Workers, load: Load, request: InferenceRequest) -> Pick:
        first, second = workers[:2]
        return min(first, second, key=load), "load"


class Thoughtful(Turns):
    """Says truly whose turn is next; the base of those that do not."""

    def consider(self, workers: Workers, load: Load, request: InferenceRequest) -> Consideration:
        n = len(workers)
        pick = workers[(self.count + 1) % n]
        return Consideration(pick=pick, reason="turn", scores=(None,) * n, notes=("",) * n)


class Mistaken(Thoughtful):
    def consider(self, workers: Workers, load: Load, request: InferenceRequest) -> Consideration:
        return replace(super().consider(workers, load, request), pick=workers[0])


class Misspoken(Thoughtful):
    def consider(self, workers: Workers, load: Load, request: InferenceRequest) -> Consideration:
        return replace(super().consider(workers, load, request), reason="load")


class Spendthrift(Thoughtful):
    """Takes a turn whenever it is asked."""

    def consider(self, workers: Workers, load: Load, request: InferenceRequest) -> Consideration:
        self.count += 1
        return super().consider(workers, load, request)


class Sly(Thoughtful):
    """Takes a turn when asked, and names no pick that could be held against it."""

    def consider(self, workers: Workers, load: Load, request: InferenceRequest) -> Consideration:
        self.count += 1
        return replace(super().consider(workers, load, request), pick=None)


class Short(Thoughtful):
    def consider(self, workers: Workers, load: Load, request: InferenceRequest) -> Consideration:
        return replace(super().consider(workers, load, request), notes=())


class Marking(Thoughtful):
    def consider(self, workers: Workers, load: Load, request: InferenceRequest) -> Consideration:
        workers[0].kv_free_blocks += 1
        return super().consider(workers, load, request)


class Fickle(Turns):
    """Random, with a source that no two instances share."""

    seeds = iter(range(1000))

    def __init__(self) -> None:
        super().__init__()
        self.random = Random(next(self.seeds))

    def pick(self, workers: Workers, load: Load, request: InferenceRequest) -> Pick:
        return self.random.choice(workers), "chance"


@pytest.mark.parametrize(
    ("factory", "says"),
    [
        (Favourite, "of 128 requests went to one of 2 equal workers"),
        (Sticky, "picked <Worker w3"),
        (Counting, "a worker was changed"),
        (Nosy, "load of another worker"),
        (Wordy, "not one word"),
        (Fickle, "equal input gave different picks"),
        (Mistaken, "considered <Worker w00 .* for turn, then picked <Worker w01"),
        (Misspoken, "for load, then picked .* for turn"),
        (Spendthrift, "considering twice differs"),
        (Sly, "considering changed the picks that follow"),
        (Short, "not parallel to the workers"),
        (Marking, "considering changed a worker"),
    ],
)
def test_a_broken_policy_fails_with_the_reason(factory: Callable[[], Policy], says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        check_policy(factory)


def test_a_policy_that_needs_two_workers_fails() -> None:
    with pytest.raises(ValueError, match="unpack"):
        check_policy(Pair)


def test_a_sound_policy_passes() -> None:
    check_policy(Turns)
    check_policy(Turns, bound=lambda requests, workers: requests / workers)
    check_policy(Thoughtful)


def test_a_random_policy_passes_when_it_says_so() -> None:
    check_policy(Fickle, picks="random")


def test_a_tighter_bound_is_kept_to() -> None:
    with pytest.raises(AssertionError, match="allowed"):
        check_policy(Fickle, picks="random", bound=lambda requests, workers: requests / workers)


def test_the_default_bound_is_loose_for_few_and_tight_for_many() -> None:
    assert chance_bound(64, 1) >= 64
    assert chance_bound(512, 8) < 512 / 4
    assert chance_bound(10**6, 10) < 1.03 * 10**5
