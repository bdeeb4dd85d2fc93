"""The gateway's own recording, as a workload, and as a row of decisions that any policy can be asked to make again.

As a workload it says who came when with which prompt, and a fleet that is simulated answers. As decisions it says which
candidates there were and what each held at that moment: `replay` shows a policy exactly that, in the order in which it
happened, and tells it where each request really went. So the policy that recorded it, with the same options, decides
the same, and another one shows where it would have decided otherwise.

What a recording does not have: how much of its cache an engine used, or said that it did, what workers did in between,
requests that were left out when the disk was slow. Hand-offs and rejected steps of cascades are there with the times of
the whole request.
"""

from collections.abc import Iterable, Iterator
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from pointsman.domain.ledger import Lease
from pointsman.domain.placement import Places
from pointsman.domain.recorded import (
    RecordedPick,
    RecordedRequest,
    RecordedWorker,
    hashes_of,
    read_line,
)
from pointsman.domain.request import InferenceRequest
from pointsman.domain.ring import Hashed
from pointsman.domain.worker import Role, Worker, load_of
from pointsman.simulate.traces import TOKENS_MAX
from pointsman.simulate.workload import Arrival

if TYPE_CHECKING:
    from pointsman.domain.policy import Policy

__all__ = ["Again", "RecordedTraffic", "Recording", "read_recording", "replay"]

TOKEN_S = 0.02
"""Seconds that a token of a stream is taken for where the engine did not say how many there were."""

TOKENS = 200
"""Tokens of an answer of which nothing is known."""


class Recording(NamedTuple):
    """What was read: the lines in the order of the file, which is that in which requests were over."""

    lines: tuple[RecordedWorker | RecordedRequest, ...]

    @property
    def requests(self) -> list[RecordedRequest]:
        """The requests, by when they came."""
        found = [line for line in self.lines if isinstance(line, RecordedRequest)]
        return sorted(found, key=lambda each: each.started)

    @property
    def workers(self) -> dict[str, RecordedWorker]:
        """The workers, as they were last."""
        return {line.id: line for line in self.lines if isinstance(line, RecordedWorker)}


def read_recording(lines: Iterable[bytes], *, model: str = "") -> Recording:
    """Read a recording, of all models or of the requests for one.

    Raises ValueError that names the line and what is wrong with it. A last line that was cut off is left out: the
    gateway may be writing it.

    >>> read_recording([b'{"kind":"worker","id":"a","model":"m"}']).workers["a"].model
    'm'
    """
    read: list[RecordedWorker | RecordedRequest] = []
    for number, line in enumerate(lines, 1):
        try:
            each = read_line(line)
            if isinstance(each, RecordedRequest):
                _check(each)
        except ValueError as error:
            if not line.endswith(b"\n"):
                break
            raise ValueError(f"line {number}: {error}") from None
        if isinstance(each, RecordedWorker) or model in ("", each.model):
            read.append(each)
    return Recording(tuple(read))


def _check(request: RecordedRequest) -> None:
    """Raise ValueError for what no gateway writes."""
    hashes_of(request.blocks)
    hashes_of(request.prefix)
    if request.block_tokens < 1:
        raise ValueError("block_tokens is less than 1")
    if not (
        0 <= request.prompt_tokens <= TOKENS_MAX and (request.output_tokens or 0) <= TOKENS_MAX
    ):
        raise ValueError("a number of tokens cannot be true")
    if request.ended < request.started:
        raise ValueError("it is over before it came")
    if any(len(pick.loads) != len(pick.candidates) for pick in request.picks):
        raise ValueError("loads and candidates are not as many")


class RecordedTraffic:
    """A recording as a workload: the same prompts in the same order, `speed` times as fast (more than 0)."""

    def __init__(self, recording: Recording, speed: float = 1.0) -> None:
        self._requests = recording.requests
        self._speed = speed
        self.block_tokens = self._requests[0].block_tokens if self._requests else 128

    def __iter__(self) -> Iterator[Arrival]:
        if not self._requests:
            return
        first = self._requests[0].started
        for each in self._requests:
            yield Arrival(
                (each.started - first) / self._speed,
                hashes_of(each.blocks),
                each.prompt_tokens,
                _output_tokens(each),
            )


class Again(NamedTuple):
    """A pick of a recording, and what a policy picks in its place."""

    recorded: RecordedPick
    worker: str
    policy_reason: str

    @property
    def same(self) -> bool:
        """Whether both picked the same worker for the same reason."""
        recorded = self.recorded
        return (self.worker, self.policy_reason) == (recorded.worker, recorded.policy_reason)


def replay(recording: Recording, policy: "Policy") -> Iterator[Again]:
    """Ask `policy` for every pick of a recording of which the loads are known, in order.

    Whatever it says, the request goes where it went: each pick is judged alone, from the state that the gateway had.
    """
    placed = policy.placed if isinstance(policy, Places) else None
    workers: dict[str, Worker] = {}
    fleets: dict[tuple[str, ...], tuple[Worker, ...]] = {}
    leases: dict[int, Lease] = {}

    def worker_of(worker_id: str, model: str) -> Worker:
        worker = workers.get(worker_id)
        if worker is None:
            worker = workers[worker_id] = Worker(worker_id, model=model, http_address="recorded:1")
        return worker

    for event in _events(recording):
        if event.facts is not None:
            facts = event.facts
            worker = worker_of(facts.id, facts.model)
            worker.role = Role(facts.role)
            worker.kv_total_blocks = facts.kv_total_blocks
            worker.kv_tokens = facts.kv_tokens
            continue
        request, pick = event.request, event.pick
        assert request is not None and pick is not None, "what is no fact is of a request"
        if event.rank == _ENDED:
            leases.pop(id(pick)).close()
        elif event.rank == _BEGAN:
            leases[id(pick)].began(event.at)
        else:
            asked = _asked(request)
            if pick.candidates:
                fleet = fleets.get(pick.candidates)
                if fleet is None:
                    fleet = tuple([worker_of(each, request.model) for each in pick.candidates])
                    fleets[pick.candidates] = fleet
                for worker, load in zip(fleet, pick.loads, strict=True):
                    # What is not in flight here was in the engine's queue, or came from requests that are not recorded.
                    worker.queue_depth = load - worker.in_flight
                chosen, reason = policy.pick(fleet, load_of, asked)
                yield Again(pick, chosen.id, reason)
            worker = worker_of(pick.worker, request.model)
            placement = None if placed is None else placed(worker, asked, pick.at)
            leases[id(pick)] = Lease(worker, placement)


_FACT, _BEGAN, _ENDED, _PICKED = range(4)


class _Event(NamedTuple):
    at: float
    rank: int
    facts: RecordedWorker | None = None
    request: RecordedRequest | None = None
    pick: RecordedPick | None = None


def _events(recording: Recording) -> list[_Event]:
    """Return all that happened, in order."""
    events: list[_Event] = []
    facts: list[RecordedWorker] = []
    known: set[str] = set()
    for line in recording.lines:
        if isinstance(line, RecordedWorker):
            facts.append(line)
            continue
        # A request has met the workers that are described right before it; others that came earlier may, too, and are
        # over later. So what is said first of a worker is true from the beginning.
        for fact in facts:
            events.append(_Event(line.started if fact.id in known else -inf, _FACT, fact))
            known.add(fact.id)
        facts.clear()
        last = len(line.picks) - 1
        for index, pick in enumerate(line.picks):
            events.append(_Event(pick.at, _PICKED, None, line, pick))
            if index == last and line.began and line.status < 400:
                events.append(_Event(max(line.began, pick.at), _BEGAN, None, line, pick))
            events.append(_Event(max(pick.over, pick.at), _ENDED, None, line, pick))
    # Whoever is done at the moment of another's pick is done before it, but not before its own.
    events.sort(key=_order)
    return events


def _order(event: _Event) -> tuple[float, int]:
    rank = event.rank
    if event.pick is not None and rank != _PICKED and event.at <= event.pick.at:
        rank += _PICKED
    return event.at, rank


def _asked(request: RecordedRequest) -> InferenceRequest:
    asked = InferenceRequest.of_blocks(
        request.model,
        "",
        hashes_of(request.blocks),
        request.prompt_tokens,
        request.block_tokens,
        Hashed(bytes.fromhex(request.prefix)) if request.prefix else None,
    )
    asked.stream = request.stream
    return asked


def _output_tokens(request: RecordedRequest) -> int:
    if request.output_tokens is not None:
        return max(request.output_tokens, 1)
    if request.stream and request.began:
        return max(round((request.ended - request.began) / TOKEN_S), 1)
    return TOKENS
