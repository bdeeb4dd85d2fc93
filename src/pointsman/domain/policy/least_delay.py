"""Least delay: a request goes where it adds the least delay, its own and everybody else's.

Others look at what a request finds: how long it waits, what of its prompt is cached. This one also looks at what it
does to those whom it meets. With v the tokens per second that a worker computes, u those of the prompt that it lacks, p
those that wait there, n its requests and r the part of its time that it lately spent on prompts, it costs, in seconds:

    p / v                      its wait, the prompts before it
    WORK x u / v               its own prompt, and the waits of all that come later: work is worth avoiding
    MEETING x n x u / v        every answer that is being written there waits while a prompt is computed
    r x T                      its own answer, of T seconds, waits for the prompts that will come
    CROWD x n                  a larger batch is a slower one

The middle two do what no rule of this kind has to be told: prompts that are long to compute gather where few answers
are written, short ones where little is computed, so that nobody decodes beside a queue of long prompts (size-interval
task assignment: Harchol-Balter, Crovella, Murta, On choosing a task assignment policy for a distributed server system,
JPDC 1999; here nobody sets the intervals). A request that comes later than `ttft_target_s` wherever it goes shall not
make others late: its own wait counts `LATE` of that, and its answer nothing. Where it can be in time, being late costs
`MISS_S` more.

Nothing of the engines is assumed: v of a worker is measured, from when prompts were sent and their answers began, a
part of the fleet's until there is enough of that, so that a new worker is loaded slowly; T is the requests in flight by
those that come per second (Little's law); and of what should be cached at a worker counts what it reports to have found
there.

In a fleet of more than `LOOKED_AT` workers it looks at so many of those that have most of the prompt, and at so many
others, beginning with a random one: the best of 16 is as good as the best of all, as far as can be measured, and
several gateways do not all go for the same worker.

What each term is worth: docs/decisions/0019-the-least-added-delay.md.
"""

from collections.abc import Callable
from math import exp, inf
from operator import attrgetter
from typing import TYPE_CHECKING, ClassVar

from msgspec.structs import replace

from pointsman.domain.placement import Placement
from pointsman.domain.policy.consideration import Consideration
from pointsman.domain.policy.prefix_aware import PrefixAware, cached_tokens
from pointsman.domain.policy.tokens import others_tokens

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pointsman.domain.placement import Heard
    from pointsman.domain.policy import RandomSource
    from pointsman.domain.prefix_index import PrefixIndex
    from pointsman.domain.request import InferenceRequest
    from pointsman.domain.worker import Worker

__all__ = ["LeastDelay"]

_ID = attrgetter("id")

WORK = 4.0
MEETING = 0.5
CROWD = 0.05
"""Seconds for each request that is there."""

LATE = 0.2
MISS_S = 1.0

LOOKED_AT = 16

RECENT_S = 60.0
"""Time constant of what happened lately."""

ANSWER_S = 10.0
"""How long answers are thought to take before any has been seen."""

ANSWER_MAX_S = 60.0

SPEED = 8000.0
"""Prompt tokens per second, before any prompt has been seen."""

KEPT = 0.99
"""What is left of former measurements after each one of a worker."""

KEPT_BY_FLEET = 0.999

ENOUGH = 40.0
"""How many answers, the older the less, tell a worker's own speed."""

UNPROVEN = 0.75
"""The part of the fleet's speed that a worker is trusted with before that."""

KEPT_BY_REPORT = 0.95
"""What is left of former reports after each one."""

DOUBTFUL = 0.8
"""Whoever finds as much of what it should have has it all: caches evict, and what is believed is not exact."""

ALIKE = 1.5
"""Workers whose speeds differ by less than this factor count as alike: one measurement is not so exact."""

SURE_TOKENS = 100_000
"""How many tokens have to be believed to be cached before reports say how much of that is true."""


class _Recent:
    """A sum of what happened lately, the older the less."""

    __slots__ = ("_at", "_sum")

    def __init__(self, at: float = 0.0) -> None:
        self._at = at
        self._sum = 0.0

    def add(self, amount: float, now: float) -> None:
        self._sum = self.until(now) + amount
        self._at = now

    def until(self, now: float) -> float:
        """Return the sum as it is at `now`."""
        return self._sum * exp((self._at - now) / RECENT_S)


class _Line:
    """A straight line through what was measured, the older the less: seconds until an answer by tokens to compute.

    What it costs whatever the tokens (the step that is going on, those who decode) is no part of the slope.
    """

    __slots__ = ("_kept", "_x", "_xx", "_xy", "_y", "count")

    def __init__(self, kept: float) -> None:
        self._kept = kept
        self.count = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, tokens: float, seconds: float) -> None:
        kept = self._kept
        self.count = kept * self.count + 1.0
        self._x = kept * self._x + tokens
        self._y = kept * self._y + seconds
        self._xx = kept * self._xx + tokens * tokens
        self._xy = kept * self._xy + tokens * seconds

    def speed(self) -> float:
        """Return the tokens per second, 0 where nothing tells."""
        spread = self.count * self._xx - self._x * self._x
        rise = self.count * self._xy - self._x * self._y
        # All of one length, or longer ones quicker: chance, or nothing.
        return spread / rise if spread > 1e-6 * self.count * self._xx and rise > 0 else 0.0


class _Pace:
    """What has been measured of one worker."""

    __slots__ = (
        "believed",
        "judged",
        "line",
        "recent",
        "reported",
        "reported_at",
        "speed",
        "trust",
    )

    def __init__(self, now: float, reported: int) -> None:
        self.line = _Line(KEPT)
        # Prompt tokens per second, 0 until that is known.
        self.speed = 0.0
        # Tokens sent to it that it has to compute.
        self.recent = _Recent(now)
        # Tokens believed to be cached of prompts that began to be answered, as many of them as are judged by; those
        # reported, and the counter's last value.
        self.believed = 0.0
        self.judged = 0.0
        self.reported = 0.0
        self.reported_at = reported
        self.trust = 1.0


class _Placement(Placement):
    """A placement that knows what was to be computed before it, and says when it has ended."""

    __slots__ = ("_ended", "believed", "work")

    def __init__(
        self,
        worker: "Worker",
        prompt_tokens: int,
        uncached_tokens: int,
        at: float,
        heard: "Heard | None",
        ended: Callable[[], None],
        believed: int,
    ) -> None:
        super().__init__(worker, prompt_tokens, uncached_tokens, at, heard)
        self.work = worker.pending_tokens
        self.believed = believed
        self._ended: Callable[[], None] | None = ended

    def ended(self) -> None:
        super().ended()
        ended, self._ended = self._ended, None
        if ended is not None:
            ended()


class LeastDelay(PrefixAware):
    """Least added delay; `ttft_target_s` (above 0) is when a first token is late, infinity for never."""

    __slots__ = (
        "_arrived",
        "_line",
        "_now",
        "_open",
        "_paces",
        "_random",
        "_speed",
        "_target_s",
    )

    name: ClassVar[str] = "least_delay"

    def __init__(
        self,
        index: "PrefixIndex",
        random: "RandomSource",
        *,
        ttft_target_s: float = 2.0,
        rank: Callable[[str], int] | None = None,
    ) -> None:
        super().__init__(index, rank)
        self._random = random
        self._target_s = ttft_target_s
        self._paces: dict[Worker, _Pace] = {}
        self._now = 0.0
        # Of the fleet: its speed, requests in flight, and those that came lately.
        self._line = _Line(KEPT_BY_FLEET)
        self._speed = SPEED
        self._open = 0
        self._arrived = _Recent()

    def pick(
        self,
        workers: "tuple[Worker, ...]",
        load: "Callable[[Worker], int]",
        request: "InferenceRequest",
    ) -> "tuple[Worker, str]":
        """Return the worker of the least added delay; reason `affinity` if it has some of the prompt, else `load`.

        >>> from random import Random
        >>> from pointsman.domain.prefix_index import PrefixIndex
        >>> from pointsman.domain.request import InferenceRequest
        >>> from pointsman.domain.worker import Worker, load_of
        >>> policy = LeastDelay(PrefixIndex(1024, 60.0), Random(1))
        >>> fleet = tuple(Worker(name, model="m", http_address="127.0.0.1:8001") for name in "ab")
        >>> request = InferenceRequest.of_blocks("m", "r1", (7, 8), 1024, 512)
        >>> policy.placed(fleet[1], request, 1.0).ended()
        >>> policy.pick(fleet, load_of, request)
        (<Worker b unified m routable load 0>, 'affinity')
        >>> fleet[1].pending_tokens = 40_000
        >>> policy.pick(fleet, load_of, request)
        (<Worker a unified m routable load 0>, 'load')
        """
        looked_at, cached = self._looked_at(workers, request)
        costs = self._costs(looked_at, cached, request)
        least = min(costs)
        number = costs.index(least)
        if costs.count(least) == 1:
            worker = looked_at[number]
            return worker, "affinity" if cached[number] else "load"
        equals = {
            w: c for w, c, cost in zip(looked_at, cached, costs, strict=True) if cost == least
        }
        worker = self._lightest(tuple(sorted(equals, key=_ID)), load, request)
        return worker, "affinity" if equals[worker] else "load"

    def consider(
        self,
        workers: "tuple[Worker, ...]",
        load: "Callable[[Worker], int]",
        request: "InferenceRequest",
    ) -> "Consideration":
        """Return the next pick; the scores are the delays, in milliseconds.

        >>> from random import Random
        >>> from pointsman.domain.prefix_index import PrefixIndex
        >>> from pointsman.domain.request import InferenceRequest
        >>> from pointsman.domain.worker import Worker, load_of
        >>> policy = LeastDelay(PrefixIndex(1024, 60.0), Random(1))
        >>> fleet = tuple(Worker(name, model="m", http_address="127.0.0.1:8001") for name in "ab")
        >>> fleet[0].in_flight = 2
        >>> request = InferenceRequest.of_blocks("m", "r1", (7, 8), 800)
        >>> [round(score) for score in policy.consider(fleet, load_of, request).scores]
        [767, 533]
        """
        depths = dict(self.index.match(request.blocks, workers))
        cached = [cached_tokens(request, depths.get(worker, 0)) for worker in workers]
        costs = [1000 * cost for cost in self._costs(workers, cached, request)]
        rule = "the least added delay, its own and that of others, in ms, wins"
        if len(workers) <= LOOKED_AT:
            return self._consider(workers, self.pick(workers, load, request), costs, request, rule)
        # Nothing is drawn here, so it is not known who will be looked at.
        rule += f" among {LOOKED_AT} with and {LOOKED_AT} without the prompt, drawn at random"
        return replace(
            self._consider(workers, (workers[0], "load"), costs, request, rule), pick=None
        )

    def placed(self, worker: "Worker", request: "InferenceRequest", now: float) -> Placement:
        """Count `request` as sent to `worker`, and believe from now on that its prompt is cached there."""
        # A clock that goes back counts as the latest.
        self._now = now = max(self._now, now)
        cached = self._cached(request, worker)
        self.index.insert(worker, request.blocks, now, request.block_tokens)
        pace = self._paces.get(worker)
        if pace is None:
            pace = self._paces[worker] = _Pace(now, worker.cached_tokens)
        uncached = request.prompt_tokens - round(pace.trust * cached)
        pace.recent.add(uncached, now)
        _compare(pace, worker.cached_tokens)
        self._arrived.add(1.0, now)
        self._open += 1
        # The first byte of an answer that comes whole says nothing of its prompt.
        heard = self._heard if request.stream else None
        prompt = request.prompt_tokens
        return _Placement(worker, prompt, uncached, now, heard, self._ended, cached)

    def left(self, worker: "Worker") -> None:
        """Forget all about a worker that is gone."""
        super().left(worker)
        self._paces.pop(worker, None)

    def _heard(self, placement: Placement, now: float) -> None:
        pace = self._paces.get(placement.worker)
        if pace is None or not isinstance(placement, _Placement):
            return
        pace.believed += placement.believed
        seconds = max(now - placement.at, 0.0)
        self._line.add(placement.work, seconds)
        if self._line.count >= ENOUGH:
            self._speed = self._line.speed() or self._speed
        pace.line.add(placement.work, seconds)
        if pace.line.count >= ENOUGH:
            speed = pace.line.speed()
            pace.speed = (
                self._speed if self._speed < ALIKE * speed < ALIKE**2 * self._speed else speed
            )

    def _ended(self) -> None:
        self._open -= 1

    def _answer_s(self) -> float:
        """Return how long requests are here, on average, in seconds."""
        arrived = self._arrived.until(self._now)
        return min(self._open * RECENT_S / arrived, ANSWER_MAX_S) if arrived else ANSWER_S

    def _looked_at(
        self, workers: "tuple[Worker, ...]", request: "InferenceRequest"
    ) -> "tuple[Sequence[Worker], list[int]]":
        """Return the workers to choose from, and how many tokens of the prompt each of them has."""
        depths: dict[Worker, int] = {}
        everybody = 0
        if len(workers) <= LOOKED_AT:
            depths.update(self.index.match(request.blocks, workers))
        else:
            for depth, group in self.index.reached(request.blocks, workers):
                if len(group) == len(workers):
                    everybody = depth
                    break
                if len(depths) < LOOKED_AT:
                    for worker in self._some(group.workers):
                        depths.setdefault(worker, depth)
            # What one of these has beyond what everybody has is not worth the look.
            for worker in self._some(workers):
                depths.setdefault(worker, everybody)
            workers = tuple(depths)
        tokens = {depth: cached_tokens(request, depth) for depth in {*depths.values(), 0}}
        get = depths.get
        return workers, [tokens[get(worker, 0)] for worker in workers]

    def _some(self, workers: "tuple[Worker, ...]") -> "tuple[Worker, ...]":
        """Return as many as are looked at, in a row from a random one on, round the end."""
        count = len(workers)
        if count <= LOOKED_AT:
            return workers
        start = int(self._random.random() * count)
        found = workers[start : start + LOOKED_AT]
        return found + workers[: LOOKED_AT - len(found)]

    def _costs(
        self, workers: "Iterable[Worker]", cached: "Iterable[int]", request: "InferenceRequest"
    ) -> list[float]:
        """Return the added delay at each worker, in seconds."""
        prompt, now, paces, target_s = request.prompt_tokens, self._now, self._paces, self._target_s
        unproven = UNPROVEN * self._speed
        answers = self._answer_s() / RECENT_S
        soonest = inf
        parts = []
        for worker, tokens in zip(workers, cached, strict=True):
            have: float = tokens
            count, pending = worker.in_flight, worker.pending_tokens
            if worker.queue_depth > count:
                pending += others_tokens(worker)
            speed, lately = unproven, 0.0
            pace = paces.get(worker)
            if pace is not None:
                have = tokens * pace.trust
                speed = pace.speed or speed
                lately = pace.recent.until(now)
            wait_s = pending / speed
            own_s = (prompt - have) / speed
            if wait_s + own_s < soonest:
                soonest = wait_s + own_s
            others_s = (WORK + MEETING * count) * own_s + CROWD * count
            parts.append((wait_s, own_s, others_s, answers * lately / speed))
        if soonest > target_s:
            return [LATE * wait_s + others_s for wait_s, _, others_s, _ in parts]
        return [
            wait_s + others_s + answer_s + (MISS_S if wait_s + own_s > target_s else 0.0)
            for wait_s, own_s, others_s, answer_s in parts
        ]


def _compare(pace: _Pace, reported: int) -> None:
    """Learn how much of what is believed to be cached a worker finds; `reported` is its counter of tokens, or -1.

    A counter tells now and then, of all that has started since. So it is judged by what had begun to be answered when
    it was told the time before: whatever is wrong with that is in the worker's favour.
    """
    if reported < 0 or reported == pace.reported_at:
        return
    # One that went back began anew.
    pace.reported += max(reported - pace.reported_at, 0)
    pace.reported_at = reported
    if pace.judged >= SURE_TOKENS:
        found = pace.reported / pace.judged
        pace.trust = found if found < DOUBTFUL else 1.0
        pace.reported *= KEPT_BY_REPORT
        pace.believed *= KEPT_BY_REPORT
    pace.judged = pace.believed
