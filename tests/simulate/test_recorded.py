"""A recorded run: every policy that recorded it decides the same again, and what comes in is what was asked."""

from collections.abc import Callable
from heapq import heappop, heappush
from pathlib import Path
from random import Random

import pytest

from pointsman.domain.ledger import Lease
from pointsman.domain.placement import Placement
from pointsman.domain.policy import POLICIES, Policy, PolicyOptions, make_policy
from pointsman.domain.policy.least_outstanding import LeastOutstanding
from pointsman.domain.recorded import RecordedPick, RecordedRequest, RecordedWorker, write_line
from pointsman.domain.registry import Registry, WorkerReport
from pointsman.domain.request import InferenceRequest
from pointsman.domain.router import Router
from pointsman.domain.routes import RouteTable
from pointsman.domain.worker import Worker
from pointsman.flow.exchange import Attempt, Exchange
from pointsman.observe.recording import Recording
from pointsman.simulate.recorded import RecordedTraffic, read_recording, replay

SYSTEM = [f"You are number {number}. ".encode() * 60 for number in range(6)]


class Gateway:
    """A gateway on a clock of its own: the real registry, router, policy and recording, and engines that are random."""

    def __init__(self, policy: Policy, path: Path, random: Random) -> None:
        self.registry = Registry()
        self.router = Router(self.registry, policy, RouteTable())
        self.random = random
        self.now = 0.0
        self.recording = Recording(path, 1 << 30, wall=lambda: 1e9 + self.now, now=lambda: self.now)
        self.due: list[tuple[float, int, str, Exchange, Lease]] = []
        self.count = 0

    def beat(self) -> None:
        for name in "abcdefg":
            report = WorkerReport(
                name,
                "127.0.0.1:8001",
                "smol",
                queue_depth=self.random.choice((0, 0, 1, 9)),
                kv_total_blocks=100 + 50 * (name > "d"),
                kv_tokens=1600 + 800 * (name > "d"),
            )
            self.registry.beat(report, now=self.now)

    def asked(self) -> None:
        text = self.random.choice(SYSTEM) + b"x" * self.random.randrange(3000)
        messages = b'[{"role":"user","content":"%b"}]' % text
        self.count += 1
        request = InferenceRequest("smol", f"r{self.count}", messages=messages, stream=True)
        self.tried(Exchange(request, "/v1/chat/completions", "chat", self.now), ())

    def tried(self, x: Exchange, excluded: tuple[object, ...]) -> None:
        target = self.router.route(x.request, excluded, now=self.now)  # type: ignore[arg-type]
        x.tries.append(Attempt(target, self.now))
        lease = self.router.lease(target.worker, x.request, self.now)
        what = "fails" if not excluded and self.random.random() < 0.1 else "begins"
        self.later(what, x, lease)

    def later(self, what: str, x: Exchange, lease: Lease) -> None:
        self.count += 1
        due = self.now + self.random.expovariate(1.0)
        heappush(self.due, (due, self.count, what, x, lease))

    def happens(self) -> None:
        self.now, _, what, x, lease = heappop(self.due)
        attempt = x.tries[-1]
        if what == "begins":
            lease.began(self.now)
            x.first_byte_at, x.status = self.now, 200
            self.later("ends", x, lease)
        elif what == "fails":
            lease.close()
            attempt.failure, attempt.failed, attempt.over_at = "connect", lease.worker, self.now
            self.tried(x, (lease.worker,))
        else:
            lease.close()
            x.finished_at = self.now
            self.recording.finished(x)
            x.request.forget()

    def run(self, requests: int) -> None:
        comes, beats = 0.0, 0.0
        while requests or self.due:
            upcoming = self.due[0][0] if self.due else float("inf")
            if requests and min(comes, beats) < upcoming:
                self.now = min(comes, beats)
                if beats <= comes:
                    self.beat()
                    beats += 1.7
                else:
                    self.asked()
                    requests -= 1
                    comes += self.random.expovariate(12.0)
            elif upcoming < beats:
                self.happens()
            else:
                self.now = beats
                self.beat()
                beats += 1.7
        self.recording.close()


def made(name: str) -> Policy:
    return make_policy(name, PolicyOptions(), Random(7))


def recorded(policy: Policy, path: Path, requests: int = 300) -> Path:
    Gateway(policy, path, Random(3)).run(requests)
    return path


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_decides_again_as_the_gateway_did_decision_by_decision(
    name: str, tmp_path: Path
) -> None:
    path = recorded(made(name), tmp_path / "recorded.jsonl")
    with path.open("rb") as lines:
        again = list(replay(read_recording(lines), made(name)))
    assert len(again) > 300
    assert [each for each in again if not each.same] == []
    assert any(each.recorded.failure for each in again)
    assert len({each.worker for each in again}) > 4


def test_another_policy_would_have_decided_otherwise(tmp_path: Path) -> None:
    path = recorded(made("affinity"), tmp_path / "recorded.jsonl")
    recording = read_recording(path.read_bytes().splitlines(keepends=True))
    other = [each.same for each in replay(recording, made("least_outstanding"))]
    assert 0 < sum(other) + 1 < len(other)


def test_as_a_workload_it_is_what_was_asked(tmp_path: Path) -> None:
    path = recorded(made("least_outstanding"), tmp_path / "recorded.jsonl", 50)
    recording = read_recording(path.read_bytes().splitlines(keepends=True))
    traffic = RecordedTraffic(recording, speed=2.0)
    arrivals = list(traffic)
    times = [arrival.at for arrival in arrivals]
    assert len(arrivals) == 50 and traffic.block_tokens == 128
    assert times == sorted(times) and times[0] == 0.0
    last = recording.requests[-1].started - recording.requests[0].started
    assert times[-1] == pytest.approx(last / 2)
    assert all(len(each.blocks) == each.prompt_tokens // 128 for each in arrivals)
    assert len({each.blocks[:2] for each in arrivals}) == len(SYSTEM)
    assert all(each.output_tokens >= 1 and each.session == -1 for each in arrivals)
    assert set(recording.workers) == set("abcdefg")


def request(**more: object) -> RecordedRequest:
    values: dict[str, object] = {"wall": 0.0, "started": 1.0, "ended": 3.0, "model": "m"}
    return RecordedRequest(**{**values, **more})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("more", "tokens"),
    [
        ({"output_tokens": 7}, 7),
        ({"output_tokens": 0}, 1),
        ({"stream": True, "began": 2.0}, 50),
        ({"stream": True}, 200),
        ({"began": 2.0}, 200),
    ],
)
def test_tokens_of_an_answer_are_known_or_thought_of(more: dict[str, object], tokens: int) -> None:
    (arrival,) = RecordedTraffic(read_recording([write_line(request(**more))]))
    assert arrival.output_tokens == tokens


def test_a_model_can_be_looked_at_alone() -> None:
    lines = [write_line(request(model=name)) for name in ("m", "n", "m")]
    assert len(read_recording(lines).requests) == 3
    assert len(read_recording(lines, model="m").requests) == 2


def test_nothing_recorded_is_no_traffic() -> None:
    assert list(RecordedTraffic(read_recording([]))) == []


def test_a_bad_line_is_named_and_one_that_is_being_written_left_out() -> None:
    good = write_line(request())
    assert len(read_recording([good, good[:20]]).requests) == 1
    with pytest.raises(ValueError, match=r"^line 2: "):
        read_recording([good, good[:20] + b"\n", good])
    with pytest.raises(ValueError, match=r"^line 1: 2 digits are no whole number of hashes"):
        read_recording([write_line(request(blocks="ab"))])


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ({"block_tokens": 0}, "block_tokens is less than 1"),
        ({"prompt_tokens": -1}, "a number of tokens cannot be true"),
        ({"output_tokens": 1 << 60}, "a number of tokens cannot be true"),
        ({"ended": 0.5}, "it is over before it came"),
        (
            {"picks": (RecordedPick(at=1.0, over=2.0, worker="a", reason="load", loads=(1,)),)},
            "loads and candidates are not as many",
        ),
    ],
)
def test_what_no_gateway_writes_is_named(more: dict[str, object], error: str) -> None:
    with pytest.raises(ValueError, match=f"^line 1: {error}"):
        read_recording([write_line(request(**more))])


def test_a_pick_whose_loads_are_not_known_counts_and_is_not_judged() -> None:
    def pick(at: float, over: float, **more: object) -> RecordedPick:
        return RecordedPick(at=at, over=over, worker="a", reason="load", **more)  # type: ignore[arg-type]

    fleet = {"candidates": ("a", "b"), "loads": (1, 0), "policy_reason": "load", "count": 2}
    lines = [
        write_line(RecordedWorker(id="a", model="m", role="unified")),
        # Its answer was an error, so nothing began.
        write_line(request(started=0.0, ended=9.0, began=9.0, status=503, picks=(pick(0.0, 9.0),))),
        write_line(request(picks=(pick(1.0, 1.0, **fleet), pick(1.0, 1.0, **fleet)))),
    ]
    again = list(replay(read_recording(lines), made("least_outstanding")))
    assert [(each.worker, each.same) for each in again] == [("b", False), ("b", False)]


class Noting(LeastOutstanding):
    """A policy that notes what it is told, and what was in flight when it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.placements: list[Placement] = []
        self.heard: list[float] = []
        self.in_flight: list[int] = []

    def pick(
        self,
        workers: tuple[Worker, ...],
        load: Callable[[Worker], int],
        request: InferenceRequest,
    ) -> tuple[Worker, str]:
        self.in_flight.append(sum(worker.in_flight for worker in workers))
        return super().pick(workers, load, request)

    def placed(self, worker: Worker, request: InferenceRequest, now: float) -> Placement:
        self.placements.append(
            Placement(worker, 10, 10, now, lambda placement, at: self.heard.append(at))
        )
        return self.placements[-1]


def noted(*requests: RecordedRequest) -> Noting:
    policy = Noting()
    for _ in replay(read_recording(map(write_line, requests)), policy):
        pass
    return policy


def to(worker: str, at: float, over: float, *loads: int) -> RecordedPick:
    """Return a pick of one of two workers, by whatever policy."""
    return RecordedPick(
        at=at, over=over, worker=worker, reason="load", candidates=("a", "b"), loads=loads
    )


def test_a_policy_is_told_where_requests_went_and_not_where_it_would_have_sent_them() -> None:
    policy = noted(request(picks=(to("b", 1.0, 3.0, 0, 5),)))
    (placement,) = policy.placements
    assert (placement.worker.id, placement.worker.active_tokens) == ("b", 0)


def test_only_an_answer_that_stands_has_begun() -> None:
    failed, stood = to("a", 1.0, 2.0, 0, 0), to("b", 2.0, 3.0, 0, 0)
    assert noted(request(began=2.5, picks=(failed, stood))).heard == [2.5]
    assert noted(request(began=2.5, status=503, picks=(failed, stood))).heard == []


def test_who_is_over_at_the_moment_of_a_pick_is_over_before_it() -> None:
    first, second = to("a", 1.0, 3.0, 0, 0), to("b", 3.0, 4.0, 0, 0)
    assert noted(request(picks=(first,)), request(picks=(second,))).in_flight == [0, 0]


def test_the_first_of_a_workload_comes_at_once() -> None:
    lines = [write_line(request(started=at, ended=at)) for at in (70.0, 75.0)]
    assert [each.at for each in RecordedTraffic(read_recording(lines), speed=2.0)] == [0.0, 2.5]
