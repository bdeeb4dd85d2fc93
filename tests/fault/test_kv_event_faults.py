"""Following engines over real ZeroMQ sockets: connections that come and go, gaps, restarts, ranks, and nonsense."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from time import monotonic
from typing import Any

import msgspec
import pytest

from pointsman.control.kv_events import KvEvents
from pointsman.domain.blocks import block_hashes, pack_tokens
from pointsman.domain.prefix_index import PrefixIndex
from pointsman.domain.registry import Registry
from pointsman.domain.worker import Worker
from pointsman.testing.kv_events import Publisher, consecutive_ports, stored

pytestmark = pytest.mark.anyio

BLOCK = 16
SOON_S = 10.0
A = list(range(64))
B = list(range(1000, 1064))


def ours(ids: Sequence[int]) -> tuple[int, ...]:
    return block_hashes(pack_tokens(ids), 4 * BLOCK)


class Fleet:
    """A registry, an index, and who follows."""

    def __init__(self) -> None:
        self.registry = Registry()
        self.index = PrefixIndex(10_000, 3600.0, speculative_s=0.05)
        self.registry.on_leave.append(self.index.purge)
        self.sizes: dict[str, int | None] = {"m": 4 * BLOCK}
        self.faults = 0
        self.events = KvEvents(
            self.registry,
            self.index,
            lambda model: self.sizes.get(model, 0),
            now=monotonic,
            blocks_max=10_000,
            sleep=lambda seconds: asyncio.sleep(min(seconds, 0.02)),
            on_fault=self._fault,
        )

    def _fault(self) -> None:
        self.faults += 1

    def join(self, *publishers: Publisher, id: str = "a", **more: Any) -> Worker:
        first = publishers[0]
        worker = Worker(
            id,
            model="m",
            http_address="127.0.0.1:1",
            static=True,
            kv_events=first.endpoint,
            kv_replay=first.replay_endpoint,
            kv_ranks=len(publishers),
            **more,
        )
        self.registry.add(worker)
        return worker

    def depth(self, worker: Worker, ids: Sequence[int] = A) -> int:
        return dict(self.index.match(ours(ids), (worker,))).get(worker, 0)

    async def has(self, worker: Worker, depth: int, ids: Sequence[int] = A) -> None:
        """Wait until a worker is said to have so many blocks of a prompt."""
        await self.becomes(lambda: self.depth(worker, ids) == depth)

    async def whole(self, count: int = 1) -> None:
        await self.becomes(lambda: self.events.followed() == count)

    async def becomes(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(SOON_S):
            while not true():  # noqa: ASYNC110
                await asyncio.sleep(0.005)


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    made = Fleet()
    made.events.start()
    yield made
    await made.events.stop()
    assert made.faults == 0


@pytest.mark.parametrize("as_map", [False, True], ids=["arrays", "maps"])
@pytest.mark.parametrize("topic", [False, True], ids=["older replays", "newer replays"])
async def test_k07_what_an_engine_publishes_is_known(
    fleet: Fleet, as_map: bool, topic: bool
) -> None:
    async with Publisher(topic_in_replays=topic) as engine:
        # Before anybody listens, and after.
        await engine.publish(stored([1, 2], A[:32], as_map=as_map))
        worker = fleet.join(engine)
        await fleet.has(worker, 2)
        await fleet.whole()
        await engine.publish(stored([b"3", b"4"], A[32:], 2, as_map=as_map))
        await fleet.has(worker, 4)
        await engine.publish(["BlockRemoved", [b"4"], "GPU"], ["Whatever"])
        await fleet.has(worker, 3)
        await engine.publish(["AllBlocksCleared"])
        await fleet.has(worker, 0)
        assert fleet.events.tally.unknown == 1
        assert (worker.kv_fault, engine.asked) == ("", [0])


async def test_a_gap_is_filled_by_a_replay(fleet: Fleet) -> None:
    async with Publisher() as engine:
        worker = fleet.join(engine)
        await fleet.whole()
        await engine.publish(stored([1], A[:16]))
        await fleet.has(worker, 1)
        await engine.publish(stored([2], A[16:32], 1), lost=True)
        await engine.publish(stored([3], A[32:48], 2))
        await fleet.has(worker, 3)
        assert engine.asked == [0, 0]
        tally = fleet.events.tally
        assert (tally.gaps, tally.lost, tally.replays, tally.replays_failed) == (1, 0, 2, 0)


async def test_a_gap_that_nobody_fills_forgets_what_was_known(fleet: Fleet) -> None:
    async with Publisher(replay_port=None) as engine:
        worker = fleet.join(engine)
        await engine.subscribed()
        await engine.publish(stored([1], A[:16]))
        await fleet.whole()
        await engine.publish(["BlockRemoved", [1], "GPU"], lost=True)
        await engine.publish(stored([2], B[:16]))
        await fleet.has(worker, 1, B)
        assert fleet.depth(worker) == 0
        assert (fleet.events.followed(), fleet.events.reads(worker)) == (0, True)
        # From nothing on, all is known again.
        await engine.publish(["AllBlocksCleared"])
        await fleet.whole()


async def test_a_replay_that_nobody_answers_does_not_end_anything(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pointsman.control.kv_events.REPLAY_S", 0.05)
    async with Publisher() as engine:
        engine.answers = False
        worker = fleet.join(engine)
        await fleet.becomes(lambda: fleet.events.reads(worker))
        await engine.publish(stored([1], A[:16]))
        await fleet.has(worker, 1)
        assert fleet.events.tally.replays_failed > 0


@pytest.mark.parametrize("payload", [b"\xc1", msgspec.msgpack.encode([1.0, []])])
async def test_a_replay_without_an_end_does_not_end_anything(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, payload: bytes
) -> None:
    monkeypatch.setattr("pointsman.control.kv_events.REPLAY_ALL_S", 0.0)
    async with Publisher() as engine:
        engine._buffer.extend((number, payload) for number in range(10_000))
        worker = fleet.join(engine)
        await fleet.becomes(lambda: fleet.events.reads(worker))
        assert fleet.events.tally.replays_failed == 1


async def test_who_sent_a_message_that_is_too_long_is_read_again(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pointsman.control.kv_events.RENEW_S", 0.0)
    monkeypatch.setattr("pointsman.control.kv_events.LOOK_S", 0.05)
    monkeypatch.setattr("pointsman.control.kv_events.MESSAGE_BYTES", 100_000)
    async with Publisher() as engine:
        worker = fleet.join(engine)
        await engine.publish(stored([1], A[:16]))
        await fleet.has(worker, 1)
        await engine.send([b"kv", bytes(7) + b"\x01", bytes(200_000)])
        await fleet.becomes(lambda: worker.kv_fault != "")
        await fleet.whole()
        await engine.publish(stored([2], A[16:32], 1))
        await fleet.has(worker, 2)


async def test_k04_a_restart_at_the_same_address_forgets_the_old_life(fleet: Fleet) -> None:
    async with Publisher() as engine:
        worker = fleet.join(engine)
        await engine.publish(stored([1, 2], A[:32]))
        await fleet.has(worker, 2)
        await engine.restart()
        await fleet.has(worker, 0)
        await fleet.whole()
        await engine.publish(stored([1], B[:16]))
        await fleet.has(worker, 1, B)
        assert fleet.events.tally.restarts == 1


@pytest.mark.parametrize("more", [1, 3, 6])
async def test_k04_without_replays_too_however_long_the_new_life_is(
    fleet: Fleet, more: int
) -> None:
    async with Publisher(replay_port=None) as engine:
        worker = fleet.join(engine)
        await engine.subscribed()
        for number in range(3):
            await engine.publish(
                stored([number], A[number * 16 : number * 16 + 16], number - 1 if number else None)
            )
        await fleet.has(worker, 3)
        await engine.close()
        await fleet.becomes(lambda: worker.kv_fault != "")
        # What was known is believed while nobody tells otherwise.
        assert fleet.depth(worker) == 3
        engine._begin()
        await engine.open()
        await engine.subscribed()
        for number in range(more):
            await engine.publish(stored([number], B[:16]))
        await fleet.has(worker, 1, B)
        assert fleet.depth(worker) == 0


async def test_events_that_stop_leave_what_routing_tells(fleet: Fleet) -> None:
    async with Publisher() as engine:
        worker = fleet.join(engine)
        await fleet.whole()
        await engine.publish(stored([1, 2], A[:32]))
        await fleet.has(worker, 2)
        # Followed: what was routed is believed until its event is due.
        fleet.index.insert(worker, ours(B), monotonic(), BLOCK)
        await asyncio.sleep(0.06)
        fleet.index.expire(monotonic())
        assert fleet.depth(worker, B) == 0
        await engine.close()
        await fleet.becomes(lambda: "is not connected" in worker.kv_fault)
        assert not fleet.events.reads(worker)
        fleet.index.insert(worker, ours(B), monotonic(), BLOCK)
        await asyncio.sleep(0.06)
        fleet.index.expire(monotonic())
        assert (fleet.depth(worker), fleet.depth(worker, B)) == (2, 4)
        # The same life, after a network that was away: it goes on where it was.
        await engine.open()
        await fleet.whole()
        # What it had is known again, and not only believed until its event is due.
        fleet.index.expire(monotonic() + 1.0)
        assert (fleet.depth(worker), fleet.depth(worker, B)) == (2, 0)
        await engine.publish(["BlockRemoved", [2], "GPU"])
        await fleet.has(worker, 1)
        assert (worker.kv_fault, fleet.events.tally.restarts) == ("", 0)


async def test_k09_two_workers_are_told_apart_whatever_they_have_in_common(fleet: Fleet) -> None:
    async with Publisher() as one, Publisher() as other:
        a, b = fleet.join(one), fleet.join(other, id="b")
        await fleet.whole(2)
        # The same address, the same names of blocks, the same numbers.
        await one.publish(stored([1, 2], A[:32]))
        await other.publish(stored([1, 2], B[:32]))
        await fleet.has(a, 2)
        await fleet.has(b, 2, B)
        assert (fleet.depth(a, B), fleet.depth(b, A)) == (0, 0)
        await other.publish(["BlockRemoved", [1, 2], "GPU"])
        await fleet.has(b, 0, B)
        assert fleet.depth(a) == 2


async def test_k09_another_life_under_the_same_name_begins_with_nothing(fleet: Fleet) -> None:
    async with Publisher() as engine, Publisher() as successor:
        former = fleet.join(engine)
        await engine.publish(stored([1, 2], A[:32]))
        await fleet.has(former, 2)
        fleet.registry.set_static([])
        await engine.publish(stored([3], A[32:48], 2))
        worker = fleet.join(successor)
        await fleet.whole()
        assert (fleet.depth(worker), fleet.depth(former), len(fleet.index)) == (0, 0, 0)


async def test_ranks_publish_on_ports_in_a_row(fleet: Fleet) -> None:
    port, replays = consecutive_ports(2), consecutive_ports(2)
    ranks = [Publisher(port=port + n, replay_port=replays + n) for n in range(2)]
    async with ranks[0], ranks[1]:
        worker = fleet.join(*ranks)
        await fleet.whole()
        for rank in ranks:
            await rank.publish(stored([1, 2], A[:32]))
        await ranks[1].publish(stored([3], B[:16]))
        await fleet.has(worker, 2)
        await fleet.has(worker, 1, B)
        await ranks[0].publish(["AllBlocksCleared"])
        await ranks[0].publish(stored([9], B[16:32], 3))
        await fleet.becomes(lambda: fleet.events.tally.left_out == 1)
        assert fleet.depth(worker) == 2
        # One of them goes: what is known is only believed.
        await ranks[1].close()
        await fleet.becomes(lambda: str(port + 1) in worker.kv_fault)
        assert (fleet.events.followed(), fleet.depth(worker)) == (0, 2)
        await ranks[1].open()
        await fleet.whole()
        await ranks[1].publish(["AllBlocksCleared"])
        await fleet.has(worker, 0)


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"kv", b"short", b""],
        [b"kv", b"\xff" * 8, b""],
        [b"kv", bytes(7) + b"\x05", b"\xc1"],
        [b"kv", bytes(7) + b"\x05", b"\x91" * 5000],
        [b"a", b"b", b"c", b"d"],
        [],
    ],
    ids=["one frame", "short", "negative", "no pack", "deep", "four", "nothing"],
)
async def test_k07_nonsense_is_said_and_gone_with_the_next_batch(
    fleet: Fleet, frames: list[bytes]
) -> None:
    async with Publisher() as engine:
        worker = fleet.join(engine)
        await fleet.whole()
        await engine.send(frames or [b""])
        await fleet.becomes(lambda: "malformed" in worker.kv_fault)
        await engine.publish(stored([1], A[:16]))
        await fleet.has(worker, 1)
        await fleet.becomes(lambda: worker.kv_fault == "")
        assert fleet.events.tally.malformed == 1


async def test_a_flood_of_one_engine_does_not_hold_up_another(fleet: Fleet) -> None:
    async with Publisher() as loud, Publisher() as quiet:
        a, b = fleet.join(loud), fleet.join(quiet, id="b")
        await fleet.whole(2)
        for number in range(2000):
            await loud.publish(stored([number], [number] * 16))
        began = monotonic()
        await quiet.publish(stored([1], A[:16]))
        await fleet.has(b, 1)
        assert monotonic() - began < 2.0
        await fleet.has(a, 1, [1999] * 16)
        assert fleet.events.tally.lost == 0


async def test_who_publishes_nothing_is_not_followed(fleet: Fleet) -> None:
    worker = Worker("a", model="m", http_address="127.0.0.1:1", static=True)
    fleet.registry.add(worker)
    assert (fleet.events.has(worker), fleet.events.reads(worker), worker.kv_fault) == (
        False,
        False,
        "",
    )
    fleet.index.insert(worker, ours(A), 0.0, BLOCK)
    fleet.index.expire(3599.0)
    assert fleet.depth(worker) == 4


async def test_who_cannot_be_followed_says_why(fleet: Fleet) -> None:
    async with Publisher() as engine:
        fleet.sizes = {"m": 0}
        worker = fleet.join(engine)
        await fleet.becomes(lambda: "no tokenizer with block_tokens for m" in worker.kv_fault)
        # Where no policy asks, it is no fault.
        fleet.sizes = {"m": None}
        await fleet.becomes(lambda: worker.kv_fault == "")
        fleet.sizes = {"m": 4 * BLOCK}
        await engine.publish(stored([1, 2], A[:32]))
        await fleet.has(worker, 2)
        # Other blocks: everything anew.
        fleet.sizes = {"m": 8 * BLOCK}
        await fleet.has(worker, 0)
        larger = block_hashes(pack_tokens(A), 8 * BLOCK)
        await fleet.becomes(lambda: bool(fleet.index.match(larger, (worker,))))


async def test_k06_a_gateway_that_restarts_knows_the_caches_again(fleet: Fleet) -> None:
    async with Publisher() as engine:
        for number in range(200):
            await engine.publish(stored([number], [number] * 16))
        await engine.publish(["BlockRemoved", list(range(100)), "GPU"])
        worker = fleet.join(engine)
        await fleet.whole()
        another = Fleet()
        another.events.start()
        twin = another.join(engine)
        await another.whole()
        try:
            for number in range(200):
                has = int(number >= 100)
                assert another.depth(twin, [number] * 16) == has
                assert fleet.depth(worker, [number] * 16) == has
        finally:
            await another.events.stop()
