"""Whatever a key is made of, it comes back; whatever is changed in it, and whatever else is sent, is refused."""

import string

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pointsman.domain.keys import Key, Keyring, digest, make_key, parse_key
from pointsman.errors import InvalidKey

SETTINGS = settings(deadline=None, derandomize=True, max_examples=150)
PEPPER = b"pepper"
PRINTABLE = string.printable.encode()


class Bytes:
    """Random bytes that are the same each time; each call goes on where the last one stopped."""

    def __init__(self, seed: bytes) -> None:
        self.seed = seed
        self.calls = 0

    def __call__(self, count: int) -> bytes:
        self.calls += 1
        drawn = b""
        while len(drawn) < count:
            drawn += bytes.fromhex(digest(self.seed, b"%d %d" % (self.calls, len(drawn))))
        return drawn[:count]


SEEDS = st.binary(min_size=1, max_size=8)


def keyring_of(text: str) -> Keyring:
    parsed = parse_key(text.encode())
    assert parsed is not None
    keyring = Keyring(PEPPER, wall=lambda: 0.0, cache_key=bytes(16))
    keyring.replace(
        [Key(key_id=parsed[0], hmac=digest(PEPPER, parsed[1]), tenant="acme", name="n")]
    )
    return keyring


@SETTINGS
@given(SEEDS)
def test_a_key_is_read_as_it_was_made(seed: bytes) -> None:
    key_id, text = make_key(Bytes(seed))
    parsed = parse_key(text.encode())
    assert parsed is not None
    assert parsed[0] == key_id
    assert f"tl_{parsed[0]}_{parsed[1].decode()}" == text
    assert len(text) == 48
    assert keyring_of(text).admit(f"Bearer {text}".encode(), 0.0).key_id == key_id


@settings(deadline=None, derandomize=True, max_examples=20)
@given(SEEDS)
def test_every_change_of_one_character_is_refused(seed: bytes) -> None:
    _, text = make_key(Bytes(seed))
    keyring = keyring_of(text)
    good = text.encode()
    keyring.admit(b"Bearer " + good, 0.0)  # A remembered key must not vouch for its neighbours.
    mutants = {
        mutant
        for at in range(len(good) + 1)
        for letter in PRINTABLE + b"\0\x80\xff"
        for mutant in (
            good[:at] + bytes([letter]) + good[at + 1 :],
            good[:at] + bytes([letter]) + good[at:],
            good[:at] + good[at + 1 :],
        )
    }
    # Spaces before and after the key belong to the header.
    accepted = {good, b" " + good, good + b" "}
    assert accepted <= mutants
    for mutant in mutants - accepted:
        with pytest.raises(InvalidKey):
            keyring.admit(b"Bearer " + mutant, 0.0)


PIECES = st.sampled_from(
    [b"Bearer", b"bearer", b"Basic", b" ", b"\t", b",", b"tl_", b"_", b"abcdefghijkl", 32 * b"A"]
)
HEADERS = (
    st.none()
    | st.binary(max_size=400)
    | st.lists(PIECES | st.binary(max_size=40), max_size=8).map(b"".join)
    | st.text(max_size=80).map(lambda text: b"Bearer " + text.encode("utf-8", "surrogatepass"))
    | st.builds(
        lambda piece, times: b"Bearer " + piece * times, st.binary(max_size=64), st.just(1024)
    )
)
KNOWN = "tl_abcdefghijkl_" + 32 * "B"


@settings(SETTINGS, max_examples=1000)
@given(HEADERS, st.floats())
@example(b"Bearer " + 65_529 * b"A", 0.0)
@example(b"Bearer tl_abcdefghijkl_" + 32 * b"A", 0.0)
def test_any_authorization_header_is_an_invalid_key_and_nothing_worse(
    header: bytes | None, now: float
) -> None:
    with pytest.raises(InvalidKey):
        keyring_of(KNOWN).admit(header, now)
