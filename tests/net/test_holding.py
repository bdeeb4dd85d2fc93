"""Requests that wait for a worker (A10): who goes first, how many may wait, and how each wait ends. A clock by hand."""

import asyncio
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.flow.effects import Held, Hold
from pointsman.net.clock import Deadlines
from pointsman.net.holding import Holding
from pointsman.net.observer import Silent


class Noting(Silent):
    """Keeps how waits ended."""

    def __init__(self) -> None:
        self.ends: list[str] = []

    def hold_ended(self, outcome: str) -> None:
        self.ends.append(outcome)


class Place:
    """Where requests wait, with room for `free` of them at the workers, and everything that happened."""

    def __init__(self, room: int = 3) -> None:
        self.now = 0.0
        self.free = 0
        self.told: list[tuple[str, bool]] = []
        self.soon: list[Callable[[], None]] = []
        self.observer = Noting()
        self.deadlines = Deadlines(asyncio.new_event_loop(), lambda: self.now)
        self.holding = Holding(self.deadlines, self.observer, self.soon.append)
        self.holding.room = room

    def asks(self, name: str, until: float = 10.0) -> Callable[[], None] | None:
        def ready(now: float) -> bool:
            if not self.free:
                return False
            self.free -= 1
            return True

        def tell(held: Held) -> None:
            self.told.append((name, held.ready))

        return self.holding.hold(Hold(until, ready), tell)

    def changes(self, free: int) -> None:
        """Let room appear, and the loop do what it was asked to."""
        self.free = free
        self.holding.changed()
        self.turn()

    def turn(self) -> None:
        while self.soon:
            self.soon.pop(0)()

    def passes(self, until: float) -> None:
        self.now = until
        self.deadlines._tick()

    def close(self) -> None:
        self.deadlines.close()
        self.deadlines._loop.close()


@pytest.fixture
def place() -> Iterator[Place]:
    place = Place()
    yield place
    place.close()


def test_a10_those_who_came_first_go_first(place: Place) -> None:
    for name in "abc":
        place.asks(name)
    place.changes(free=2)
    assert place.told == [("a", True), ("b", True)]
    assert len(place.holding) == 1
    place.changes(free=1)
    assert place.told[2:] == [("c", True)]
    assert place.observer.ends == ["routed"] * 3


def test_a10_a_full_room_takes_nobody_and_says_so(place: Place) -> None:
    assert all(place.asks(name) is not None for name in "abc")
    assert place.asks("d") is None
    assert (place.told, place.observer.ends) == ([], ["refused"])
    place.changes(free=1)
    assert place.asks("d") is not None


def test_a10_nobody_waits_longer_than_it_may(place: Place) -> None:
    place.asks("a", until=1.0)
    place.asks("b", until=2.0)
    place.passes(until=1.5)
    assert (place.told, len(place.holding)) == ([("a", False)], 1)
    place.changes(free=1)
    assert place.told == [("a", False), ("b", True)]
    place.passes(until=99.0)
    assert place.observer.ends == ["timed_out", "routed"]


def test_a10_who_gives_up_is_told_nothing(place: Place) -> None:
    give_up = place.asks("a")
    assert give_up is not None
    give_up()
    give_up()
    place.changes(free=1)
    place.passes(until=99.0)
    assert (place.told, place.observer.ends, len(place.holding)) == ([], ["abandoned"], 0)


def test_a10_a_gateway_that_drains_lets_all_go_and_takes_nobody(place: Place) -> None:
    place.asks("a")
    place.asks("b")
    place.holding.close()
    assert place.told == [("a", False), ("b", False)]
    assert place.asks("c") is None
    assert place.observer.ends == ["drained", "drained", "refused"]


def test_a10_one_whose_look_fails_goes_on_at_once_and_the_others_are_looked_at(
    place: Place,
) -> None:
    def fails(now: float) -> bool:
        raise RuntimeError("a mistake")

    def tell(held: Held) -> None:
        place.told.append(("a", held.ready))

    place.holding.hold(Hold(10.0, fails), tell)
    place.asks("b")
    with pytest.raises(RuntimeError):
        place.changes(free=1)
    place.turn()
    assert place.told == [("a", True), ("b", True)]


def test_many_changes_at_once_are_one_look(place: Place) -> None:
    place.holding.changed()
    assert place.soon == []
    place.asks("a")
    for _ in range(5):
        place.holding.changed()
    assert len(place.soon) == 1


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("ask"), st.integers(1, 20)),
            st.tuples(st.just("leave"), st.integers(0, 30)),
            st.tuples(st.just("free"), st.integers(0, 3)),
            st.tuples(st.just("pass"), st.integers(1, 4)),
        ),
        max_size=60,
    )
)
def test_a10_every_wait_ends_once_and_those_that_are_routed_are_so_in_order(
    events: list[tuple[str, int]],
) -> None:
    place = Place()
    asked, left, refused = 0, set(), 0
    ways: dict[str, Callable[[], None]] = {}
    for what, number in events:
        if what == "ask":
            name = f"{asked:04}"
            give_up = place.asks(name, until=place.now + number)
            asked += 1
            if give_up is None:
                refused += 1
            else:
                ways[name] = give_up
        elif what == "leave" and f"{number:04}" in ways:
            name = f"{number:04}"
            if name not in {told for told, _ in place.told}:
                left.add(name)
            ways[name]()
        elif what == "free":
            place.changes(free=number)
        elif what == "pass":
            place.passes(until=place.now + number)
    told = [name for name, _ in place.told]
    routed = [name for name, ready in place.told if ready]
    assert len(told) == len(set(told))
    assert not left & set(told)
    assert routed == sorted(routed)
    assert asked == len(told) + len(left) + refused + len(place.holding)
    assert len(place.observer.ends) == asked - len(place.holding)
    place.close()
