"""Consistent hashing with bounded loads.

Every node is put on a circle of 2^64 positions at `vnodes` places, the hashes of `<node>#0`, `<node>#1`, ... A key
belongs to the node of the first place at or after the key's own hash, so a node that joins or leaves moves only
the keys around its own places. With 160 places each, shares of the circle stay within about 8 % (one standard
deviation, 1/sqrt(160)) of equal.

A bounded pick walks on from there past every node that holds its fair share already. For a total load of m over n nodes
and a factor c, the cap is ceil(c * (m + 1) / n), the + 1 being the request that is placed. Worked number: 4 nodes,
c = 1.25, 3 requests in flight on the owner: the cap is ceil(1.25 * 4 / 4) = 2, so the owner is passed over.

Source: Mirrokni, Thorup, Zadimoghaddam, Consistent Hashing with Bounded Loads, 2016. Hash: FNV-1a 64 with the finalizer
of SplitMix64; bare FNV-1a clusters for labels that differ in their last bytes only.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import lru_cache

__all__ = [
    "Hashed",
    "Ring",
    "bounded_cap",
    "fnv1a64",
    "hash64",
    "mix64",
    "place_of",
    "unit",
]

_MASK = (1 << 64) - 1
_FNV_START = 0xCBF29CE484222325


def fnv1a64(data: bytes, start: int = _FNV_START) -> int:
    """Return the 64-bit FNV-1a hash of `data`, going on from `start`, the hash of what came before.

    >>> hex(fnv1a64(b"foobar"))
    '0x85944171f73967e8'
    """
    h = start
    for byte in data:
        h = (h ^ byte) * 0x100000001B3 & _MASK
    return h


def mix64(z: int) -> int:
    """Spread the 64 bits of `z` over each other: the finalizer of SplitMix64, a bijection.

    >>> hex(mix64(1))
    '0x5692161d100b05e5'
    """
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return z ^ (z >> 31)


def hash64(data: bytes) -> int:
    """Return the hash of the ring and of the canary draw: `mix64(fnv1a64(data))`.

    >>> hex(hash64(b"engine-a#0"))
    '0x4f53e64f1893d550'
    """
    return mix64(fnv1a64(data))


class Hashed(bytes):
    """A key of which no more is left than its hash: the 8 bytes of that, the most significant first."""

    __slots__ = ()


def place_of(key: bytes) -> int:
    """Return the hash of a key, also of one of which no more than that is left.

    >>> place_of(Hashed(hash64(b"once").to_bytes(8, "big"))) == place_of(b"once") == hash64(b"once")
    True
    """
    return int.from_bytes(key, "big") if type(key) is Hashed else hash64(key)


def unit(h: int) -> float:
    """Map a 64-bit hash to [0, 1) by its top 53 bits, exactly.

    >>> unit(hash64(b"a"))
    0.010753497314070604
    """
    return (h >> 11) / (1 << 53)


def bounded_cap(total: int, n: int, c: float) -> int:
    """Return the load at which a node is passed over: ceil(c * (total + 1) / n), 0 for no nodes.

    `total` is the present load of all `n` nodes without the request that is being placed; c below 1 counts as 1.

    >>> bounded_cap(3, 4, 1.25)
    2
    """
    if n <= 0:
        return 0
    return math.ceil(max(c, 1.0) * (total + 1) / n)


class Ring:
    """A circle of nodes. Answers do not depend on the order in which nodes joined.

    Places that collide go to the smaller name. Not for concurrent use. Raises `ValueError` for fewer than one place.
    """

    __slots__ = ("_hash", "_names", "_nodes", "_positions", "_vnodes")

    def __init__(
        self,
        nodes: Iterable[str] = (),
        vnodes: int = 160,
        hash: Callable[[bytes], int] = hash64,
    ) -> None:
        if vnodes < 1:
            raise ValueError("vnodes must be at least 1")
        self._vnodes = vnodes
        self._hash = hash
        self._nodes = set(nodes)
        self._arrange([place for node in self._nodes for place in self._places(node)])

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, node: object) -> bool:
        return node in self._nodes

    @property
    def nodes(self) -> list[str]:
        """The members, sorted."""
        return sorted(self._nodes)

    def add(self, node: str) -> None:
        """Add a member; one that is there already changes nothing."""
        if node not in self._nodes:
            self._nodes.add(node)
            self._arrange([*zip(self._positions, self._names, strict=True), *self._places(node)])

    def remove(self, node: str) -> None:
        """Remove a member; an unknown one changes nothing."""
        if node in self._nodes:
            self._nodes.remove(node)
            places = zip(self._positions, self._names, strict=True)
            self._arrange([place for place in places if place[1] != node])

    def owner(self, key: bytes) -> str | None:
        """Return the member that `key` belongs to, None on an empty ring.

        >>> Ring(["a", "b", "c", "d"]).owner(b"once")
        'd'
        """
        if not self._names:
            return None
        return self._names[self._at(self._hash(key))]

    def bounded(self, key: bytes, load: Callable[[str], int], c: float) -> str | None:
        """Return the first member from `key` on whose load is below the cap, None on an empty ring.

        >>> Ring(["a", "b", "c", "d"]).bounded(b"once", {"a": 0, "b": 0, "c": 0, "d": 3}.__getitem__, 1.25)
        'a'
        """
        if not self._names:
            return None
        return self.place(self._hash(key), {node: load(node) for node in self._nodes}, c)[1]

    def place(self, position: int, loads: Mapping[str, int], c: float) -> tuple[str, str]:
        """Return the owner of `position` and the bounded pick, among the members that have a load.

        Members without a load are walked past as if they were not on the ring: a ring of more nodes answers for any
        subset of them, which is how a request is routed again without its failed workers at no cost.

        Raises `LookupError` if no member has a load.
        """
        cap = bounded_cap(sum(loads.values()), len(loads), c)
        names = self._names
        start = self._at(position)
        owner = None
        # Indices below zero count from the end: one lap over all places, beginning at `start`.
        for index in range(start - len(names), start):
            name = names[index]
            load = loads.get(name)
            if load is None:
                continue
            if owner is None:
                owner = name
            if load < cap:
                return owner, name
        if owner is None:
            raise LookupError("no member of the ring has a load")
        return owner, owner

    def clockwise(self, position: int, among: Collection[str], count: int) -> list[str]:
        """Return the first `count` distinct members from `position` on that are `among` the given ones.

        >>> Ring(["a", "b", "c", "d"]).clockwise(hash64(b"once"), {"a", "b", "d"}, 2)
        ['d', 'a']
        """
        names = self._names
        start = self._at(position)
        found: dict[
            str, None
        ] = {}  # a set that keeps its order: all of a large ring may be asked for
        for index in range(start - len(names), start):
            name = names[index]
            if name in among and name not in found:
                found[name] = None
                if len(found) == count:
                    break
        return list(found)

    def _at(self, position: int) -> int:
        index = bisect_left(self._positions, position)
        return index if index < len(self._positions) else 0

    def _places(self, node: str) -> list[tuple[int, str]]:
        places = _hash64_places if self._hash is hash64 else self._places_by_hash
        return [(position, node) for position in places(node, self._vnodes)]

    def _places_by_hash(self, node: str, vnodes: int) -> list[int]:
        return [self._hash(f"{node}#{index}".encode()) for index in range(vnodes)]

    def _arrange(self, places: list[tuple[int, str]]) -> None:
        places.sort()
        self._positions = [position for position, _ in places]
        self._names = [name for _, name in places]


@lru_cache(maxsize=4096)
def _hash64_places(node: str, vnodes: int) -> tuple[int, ...]:
    # All labels of a node begin alike, and FNV goes on from any point. A worker that comes back pays nothing.
    stem = fnv1a64(f"{node}#".encode())
    return tuple([mix64(fnv1a64(b"%d" % index, stem)) for index in range(vnodes)])
