"""The ring agrees with the published vectors, and with the rules that they leave open."""

from itertools import cycle, islice

import pytest

from pointsman.domain.ring import Ring, bounded_cap, fnv1a64, hash64, mix64, unit

HASHES = [
    (b"", 0xCBF29CE484222325, 0xF52A15E9A9B5E89B, 0.9576734252420561),
    (b"a", 0xAF63DC4C8601EC8C, 0x02C0BDBF481420F8, 0.010753497314070604),
    (b"b", 0xAF63DF4C8601F1A5, 0x3E35B21BFB9B6405, 0.24300683196234507),
    (b"foobar", 0x85944171F73967E8, 0x404DA9E3B74078C2, 0.2511850529620022),
    (b"hello", 0xA430D84680AABD0B, 0x16FE05A1C75BCD0F, 0.08981356811214802),
    (b"engine-a", 0x0AE492FF625BB939, 0x76AC0D29D368DE0F, 0.46356279631746433),
    (b"engine-a#0", 0x4A010FD5880697FA, 0x4F53E64F1893D550, 0.3098739569764597),
    (b"engine-a#1", 0x4A0110D5880699AD, 0xBF0A2234C052B1D9, 0.7462483767306576),
    (b"r1", 0x08DC8307B57BE76C, 0x15D7FF2B76197532, 0.08532709895198365),
    (b"req-1", 0xFDDBEEF2B6CE4891, 0x0A2881C3268A7392, 0.039680585998704165),
    (b"req-42", 0x2B09B76CA08DD948, 0x303422012213DEDF, 0.18829548385299633),
]

HAND_HASH = {
    "a#0": 10, "a#1": 60, "b#0": 30, "b#1": 80, "c#0": 50, "c#1": 95,
    "k1": 5, "k2": 55, "k3": 85, "k4": 97, "k5": 30,
}  # fmt: skip

EIGHT_BY_160 = "cgbahffcgbhhggehhcadaahhdfagbbehccgcbaffaabdbdfbbchagafdbggf"
FIVE_BY_40 = (
    "dadaccbcdeeccdbcabaebebcaecdcaebdcadbdbebaeadabcbaeeecccdbdabbdedacddeecbeed"
    "abeebdbdebddceecbdeeaabb"
)
SIX_LESS_TWO = (
    "dadaccccdffcffccacafddccaffdcafcfcaffddfdaaadafcffddacccdcfadddffacfdfffcffdac"
    "ffddcffcdfcafcdddfaacc"
)


def engines(letters: str) -> list[str]:
    return [f"engine-{letter}" for letter in letters]


def owners(ring: Ring, keys: list[str]) -> str:
    return "".join(str(ring.owner(key.encode()))[-1] for key in keys)


def placed(ring: Ring, keys: list[str], c: float) -> str:
    """Place the keys one by one, each adding 1 to the load of the node that it went to."""
    loads = dict.fromkeys(ring.nodes, 0)
    letters = ""
    for key in keys:
        node = ring.bounded(key.encode(), loads.__getitem__, c)
        assert node is not None
        loads[node] += 1
        letters += node[-1]
    return letters


def hand_ring() -> Ring:
    return Ring("abc", vnodes=2, hash=lambda data: HAND_HASH[data.decode()])


@pytest.mark.parametrize(("data", "fnv", "finalized", "fraction"), HASHES)
def test_hashes_are_the_published_ones(
    data: bytes, fnv: int, finalized: int, fraction: float
) -> None:
    assert fnv1a64(data) == fnv
    assert hash64(data) == finalized
    assert unit(hash64(data)) == fraction


def test_mix64_is_the_finalizer_of_splitmix64() -> None:
    assert mix64(0) == 0
    assert mix64(1) == 0x5692161D100B05E5


def test_fnv_goes_on_from_any_point() -> None:
    assert fnv1a64(b"bar", fnv1a64(b"foo")) == fnv1a64(b"foobar")


def test_unit_stays_below_one() -> None:
    assert unit(2**64 - 1) == 1 - 2**-53
    assert unit(0) == 0.0


@pytest.mark.parametrize(
    ("total", "n", "c", "cap"),
    [
        (0, 3, 1.25, 1),
        (3, 3, 1.25, 2),
        (5, 3, 1.25, 3),
        (8, 4, 1, 3),
        (7, 4, 1, 2),
        (3, 0, 1, 0),
        (3, 4, 1.25, 2),
        (4, 4, 1.25, 2),
        (7, 4, 0.5, 2),
    ],
)
def test_the_cap_counts_the_request_that_is_placed(total: int, n: int, c: float, cap: int) -> None:
    assert bounded_cap(total, n, c) == cap


def test_a_key_belongs_to_the_first_place_at_or_after_it() -> None:
    ring = hand_ring()
    keys = ["k1", "k2", "k3", "k4", "k5"]
    assert owners(ring, keys) == "aacab"


def test_a_full_owner_is_walked_past_clockwise() -> None:
    ring = hand_ring()
    loads = {"a": 2, "b": 0, "c": 1}
    assert ring.bounded(b"k1", loads.__getitem__, 1.25) == "b"
    assert ring.bounded(b"k3", loads.__getitem__, 1.25) == "c"


@pytest.mark.parametrize(
    ("nodes", "vnodes", "keys", "expected"),
    [
        (
            "abc",
            4,
            [f"key-{i}" for i in range(64)],
            "abcccbaabcaaaaccaabbaabcaabcaccccacaaabcaababacaacbbaaaacaabccaa",
        ),
        ("abcdefgh", 160, [f"prefix-{i:04}" for i in range(60)], EIGHT_BY_160),
        ("edcba", 40, [f"k{i}" for i in range(100)], FIVE_BY_40),
    ],
)
def test_owners_agree_with_the_golden_rings(
    nodes: str, vnodes: int, keys: list[str], expected: str
) -> None:
    assert owners(Ring(engines(nodes), vnodes), keys) == expected


def test_removing_two_agrees_with_the_golden_ring() -> None:
    ring = Ring(engines("abcdef"), 40)
    ring.remove("engine-b")
    ring.remove("engine-e")
    assert owners(ring, [f"k{i}" for i in range(100)]) == SIX_LESS_TWO


def test_a_single_node_owns_everything() -> None:
    ring = Ring(["only"], 3)
    assert [ring.owner(key) for key in (b"", b"a", b"b", b"zzz")] == ["only"] * 4


@pytest.mark.parametrize(
    ("nodes", "vnodes", "c", "keys", "expected"),
    [
        (
            "abcd",
            40,
            1.25,
            list(islice(cycle(["hot-0", "hot-1", "hot-2"]), 60)),
            "dba" * 5 + "cda" * 5 + "cba" + "dba" * 4 + "dbc" + "dba" * 4,
        ),
        ("abcd", 40, 1.0, list(islice(cycle(["hot-0", "hot-1"]), 41)), ("dbca" * 11)[:41]),
        (
            "abcde",
            80,
            2.0,
            [f"s{i}" for i in range(60)],
            "cbbacdeadecacbeecddceaccaaaceebbbbdbeeeabbcecedebaaccabcecab",
        ),
    ],
)
def test_bounded_sequences_agree_with_the_golden_ones(
    nodes: str, vnodes: int, c: float, keys: list[str], expected: str
) -> None:
    assert placed(Ring(engines(nodes), vnodes), keys, c) == expected


def test_the_affinity_example_of_the_contract() -> None:
    ring = Ring("abcd")
    key = b"system\nYou are a helpful assistant.\nuser\nHi\n"
    assert hash64(key) == 0x539EF193B14F6F0F
    assert ring.owner(key) == "d"
    assert ring.bounded(key, {"a": 0, "b": 0, "c": 0, "d": 3}.__getitem__, 1.25) == "b"
    assert ring.bounded(key, {"a": 0, "b": 3, "c": 0, "d": 3}.__getitem__, 1.25) == "a"
    assert ring.bounded(key, {"a": 9, "b": 9, "c": 0, "d": 9}.__getitem__, 1.25) == "c"
    assert ring.owner(b"") == "c"
    assert Ring(["w1", "w2", "w3", "w4"]).owner(key) == "w1"


def test_without_load_the_bounded_pick_is_the_owner() -> None:
    ring = Ring(engines("abcd"), 40)
    for number in range(50):
        key = b"k%d" % number
        assert ring.bounded(key, lambda node: 0, 1.0) == ring.owner(key)


def test_an_empty_ring_answers_none() -> None:
    ring = Ring()
    assert ring.owner(b"x") is None
    assert ring.bounded(b"x", lambda node: 0, 1.25) is None
    assert len(ring) == 0
    assert ring.nodes == []


def test_adding_twice_and_removing_a_stranger_change_nothing() -> None:
    ring = Ring("ab", vnodes=4)
    before = owners(ring, [f"k{i}" for i in range(50)])
    ring.add("a")
    ring.remove("z")
    assert len(ring) == 2
    assert "a" in ring
    assert "z" not in ring
    assert ring.nodes == ["a", "b"]
    assert owners(ring, [f"k{i}" for i in range(50)]) == before


@pytest.mark.parametrize("vnodes", [0, -1])
def test_a_node_needs_at_least_one_place(vnodes: int) -> None:
    with pytest.raises(ValueError, match="vnodes"):
        Ring("a", vnodes=vnodes)


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_places_that_collide_go_to_the_smaller_name_in_any_order(order: str) -> None:
    ring = Ring((), vnodes=1, hash=lambda data: 7)
    for node in order:
        ring.add(node)
    assert ring.owner(b"x") == "a"
    ring.remove("a")
    assert ring.owner(b"x") == "b"


def test_place_answers_for_a_subset_as_the_ring_of_that_subset_would() -> None:
    whole, part = Ring("abcdef", vnodes=8), Ring("bdf", vnodes=8)
    loads = {"b": 3, "d": 0, "f": 1}
    for number in range(100):
        key = b"k%d" % number
        expected = (part.owner(key), part.bounded(key, loads.__getitem__, 1.25))
        assert whole.place(hash64(key), loads, 1.25) == expected


def test_clockwise_gives_as_many_members_as_there_are() -> None:
    ring = hand_ring()
    assert ring.clockwise(55, {"a", "b", "c"}, 2) == ["a", "b"]
    assert ring.clockwise(55, {"b", "c"}, 9) == ["b", "c"]
    assert Ring().clockwise(55, {"a"}, 1) == []


def test_place_needs_a_member_with_a_load() -> None:
    for ring in (Ring(), Ring("a")):
        with pytest.raises(LookupError):
            ring.place(0, {}, 1.25)


def test_where_every_member_is_over_the_cap_the_owner_takes_the_request() -> None:
    # Cannot happen with loads that sum up; a ring whose caller forgot the load of others must still answer.
    ring = hand_ring()
    assert ring.place(5, {"a": 1, "stranger": -9}, 1.0) == ("a", "a")
