"""Keys: their text, who they stand for, for how long, and that a refusal costs the same for every one of them."""

import ast
import inspect
import itertools
import secrets
import textwrap
from collections.abc import Callable, Iterable
from hmac import compare_digest

import pytest

from pointsman.domain import keys
from pointsman.domain.keys import Key, Keyring, Principal, Scope, digest, make_key, parse_key
from pointsman.errors import InvalidKey

PEPPER = b"pepper"
ID = "abcdefghijkl"
SECRET = 32 * b"A"
TEXT = b"tl_abcdefghijkl_" + SECRET
BEARER = b"Bearer " + TEXT


class Clock:
    """Both clocks of a gateway; they stand still until told otherwise."""

    def __init__(self) -> None:
        self.wall = 1_000_000.0
        self.now = 5.0

    def pass_s(self, seconds: float) -> None:
        self.wall += seconds
        self.now += seconds


def key(**fields: object) -> Key:
    usual = {"key_id": ID, "hmac": digest(PEPPER, SECRET), "tenant": "acme", "name": "laptop"}
    return Key(**(usual | fields))  # type: ignore[arg-type]


def keyring(clock: Clock, *known: Key, ttl_s: float = 5.0) -> Keyring:
    ring = Keyring(PEPPER, ttl_s=ttl_s, wall=lambda: clock.wall, cache_key=bytes(range(16)))
    ring.replace(known)
    return ring


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_the_digest_is_the_one_of_the_contract() -> None:
    wanted = "900c4259ee85eb80ae9c8806518e9b788e7e3dc5e5d5f8fab81feaa126334306"
    assert digest(b"pepper", 32 * b"A") == wanted


def test_a_key_has_48_characters_of_the_right_letters() -> None:
    key_id, text = make_key(secrets.token_bytes)
    assert len(text) == 48
    assert text.startswith(f"tl_{key_id}_")
    assert parse_key(text.encode()) == (key_id, text[-32:].encode())


def test_bytes_beyond_the_alphabet_are_thrown_away() -> None:
    # 62 and 63 are what six bits can say and 62 letters cannot.
    supply = itertools.cycle([62, 63, 255, 61, 0, 128])
    _, text = make_key(lambda count: bytes(next(supply) for _ in range(count)))
    assert set(text[-32:]) == {"9", "A"}


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"tl_", b"tl_bogus_key", b"sk-" + TEXT[3:], TEXT[:-1], TEXT + b"A", TEXT + b"\n"),
        *(b" " + TEXT, TEXT.upper(), TEXT.replace(b"abc", b"ab1"), TEXT.replace(b"_", b"-")),
        TEXT[:-1] + b"\xc3",
    ],
)
def test_what_has_not_the_form_of_a_key_is_none(text: bytes) -> None:
    assert parse_key(text) is None


def test_an_empty_pepper_is_refused() -> None:
    with pytest.raises(ValueError, match="pepper of the key digests is empty"):
        Keyring(b"", wall=lambda: 0.0, cache_key=bytes(16))


def test_a_cache_key_that_can_be_guessed_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 16 bytes"):
        Keyring(PEPPER, wall=lambda: 0.0, cache_key=bytes(15))


def test_a_principal_has_what_the_key_has(clock: Clock) -> None:
    ring = keyring(clock, key(scopes=(Scope.EMBED, Scope.DEBUG), models=("smol",), priority=-7))
    principal = ring.admit(BEARER, clock.now)
    assert (principal.key_id, principal.tenant, principal.models) == (ID, "acme", ("smol",))
    assert principal.scopes == {Scope.EMBED, Scope.DEBUG}
    assert principal.priority == -7
    assert principal.upstream == b"x-tl-priority: -7\r\n"


@pytest.mark.parametrize(
    "header",
    [
        *(BEARER, b"bearer " + TEXT, b"BEARER " + TEXT, b"bEaReR " + TEXT),
        *(b"Bearer    " + TEXT, BEARER + b"  ", b"Bearer" + 200 * b" " + TEXT),
    ],
)
def test_the_scheme_is_read_in_any_case_and_with_any_number_of_spaces(
    clock: Clock, header: bytes
) -> None:
    assert keyring(clock, key()).admit(header, clock.now).key_id == ID


@pytest.mark.parametrize(
    "header",
    [
        *(None, b"", b" ", b"Bearer", b"Bearer ", TEXT, b"Bearer" + TEXT, b"Basic " + TEXT),
        *(b" " + BEARER, b"Bearer\t" + TEXT, BEARER + b"\n", BEARER + b"\0", BEARER + b", x"),
        *(BEARER + b" " + TEXT, b"Bearer Bearer " + TEXT, b"Token " + TEXT, b"\xff\xfe" + BEARER),
        *(b"Bearer " + 65_536 * b"A", 65_536 * b" ", b"Bearer" + 65_536 * b" " + TEXT),
        *(b"Bearer tl_" + 12 * b"\xc3\xa9" + b"_" + SECRET, "Be\u0430rer ".encode() + TEXT),
    ],
)
def test_any_other_header_is_an_invalid_key(clock: Clock, header: bytes | None) -> None:
    with pytest.raises(InvalidKey):
        keyring(clock, key()).admit(header, clock.now)


def test_another_pepper_is_another_key(clock: Clock) -> None:
    with pytest.raises(InvalidKey):
        keyring(clock, key(hmac=digest(b"Pepper", SECRET))).admit(BEARER, clock.now)


def test_the_secret_of_another_key_opens_nothing(clock: Clock) -> None:
    ring = keyring(clock, key(), key(key_id=12 * "b", hmac=digest(PEPPER, 32 * b"B")))
    ring.admit(BEARER, clock.now)
    with pytest.raises(InvalidKey):
        ring.admit(b"Bearer tl_bbbbbbbbbbbb_" + SECRET, clock.now)


def test_no_digest_that_a_file_could_have_opens_an_unknown_id(clock: Clock) -> None:
    with pytest.raises(InvalidKey):
        keyring(clock).admit(b"Bearer tl_aaaaaaaaaaaa_" + SECRET, clock.now)


def test_a_later_record_of_an_id_wins(clock: Clock) -> None:
    ring = keyring(clock, key(tenant="old"), key(tenant="new"))
    assert ring.admit(BEARER, clock.now).tenant == "new"
    known = ring.keys()
    assert [each.tenant for each in known] == ["new"]


def test_the_keys_can_be_read() -> None:
    known = [key(), key(key_id=12 * "b", revoked=True)]
    ring = keyring(Clock(), *known)
    assert ring.keys() == known
    assert ring.get(12 * "b") == known[1]
    assert ring.get("nobody") is None


def test_a_key_is_good_until_the_second_that_it_expires(clock: Clock) -> None:
    ring = keyring(clock, key(expires_at=1_000_002))
    clock.pass_s(1.5)
    ring.admit(BEARER, clock.now)
    clock.pass_s(0.5)
    with pytest.raises(InvalidKey):
        ring.admit(BEARER, clock.now)


def test_a_remembered_key_expires_no_later_than_it_says(clock: Clock) -> None:
    """It was verified a moment before, and would be remembered for five seconds."""
    ring = keyring(clock, key(expires_at=1_000_002))
    for _ in range(8):
        ring.admit(BEARER, clock.now)
        clock.pass_s(0.25)
    with pytest.raises(InvalidKey):
        ring.admit(BEARER, clock.now)


def test_a_revoked_key_is_refused_at_once_although_it_was_remembered(clock: Clock) -> None:
    ring = keyring(clock, key())
    ring.admit(BEARER, clock.now)
    ring.replace([key(revoked=True)])
    with pytest.raises(InvalidKey):
        ring.admit(BEARER, clock.now)


def test_a_key_that_was_replaced_has_its_new_scopes_at_once(clock: Clock) -> None:
    ring = keyring(clock, key())
    assert not ring.admit(BEARER, clock.now).admin
    ring.replace([key(scopes=(Scope.ADMIN,))])
    assert ring.admit(BEARER, clock.now).admin


class Counted:
    """Stands in for a function, and counts its calls."""

    def __init__(self, real: Callable[..., object]) -> None:
        self.real = real
        self.calls: list[tuple[object, ...]] = []

    def __call__(self, *args: object) -> object:
        self.calls.append(args)
        return self.real(*args)


class Costs:
    """Counts what a check costs: digests, and comparisons in constant time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.digests = Counted(digest)
        self.compared = Counted(compare_digest)
        monkeypatch.setattr(keys, "digest", self.digests)
        monkeypatch.setattr(keys, "compare_digest", self.compared)

    def take(self) -> tuple[int, int]:
        counts = len(self.digests.calls), len(self.compared.calls)
        self.digests.calls.clear()
        self.compared.calls.clear()
        return counts


@pytest.fixture
def costs(monkeypatch: pytest.MonkeyPatch) -> Costs:
    return Costs(monkeypatch)


@pytest.mark.parametrize(
    ("known", "header"),
    [
        ([], BEARER),
        ([key(revoked=True)], BEARER),
        ([key(expires_at=999_999)], BEARER),
        ([key()], BEARER[:-1] + b"B"),
        ([key(revoked=True)], BEARER[:-1] + b"B"),
        ([key(expires_at=999_999, revoked=True)], BEARER),
    ],
    ids=["unknown", "revoked", "expired", "wrong", "revoked and wrong", "revoked and expired"],
)
def test_every_bad_key_costs_one_digest_and_one_comparison(
    clock: Clock, costs: Costs, known: Iterable[Key], header: bytes
) -> None:
    ring = keyring(clock, *known)
    for _ in range(2):  # Refusals are not remembered.
        with pytest.raises(InvalidKey):
            ring.admit(header, clock.now)
        assert [len(str(side)) for args in costs.compared.calls for side in args] == [64, 64]
        assert costs.take() == (1, 1)


def test_a_verified_key_costs_nothing_for_as_long_as_it_is_remembered(
    clock: Clock, costs: Costs
) -> None:
    ring = keyring(clock, key())
    first = ring.admit(BEARER, clock.now)
    assert costs.take() == (1, 1)
    clock.pass_s(4.875)
    assert ring.admit(BEARER, clock.now) is first
    assert costs.take() == (0, 0)
    clock.pass_s(0.125)
    assert ring.admit(BEARER, clock.now) is first
    assert costs.take() == (1, 1)


def test_without_a_time_to_remember_each_request_is_checked(clock: Clock, costs: Costs) -> None:
    ring = keyring(clock, key(), ttl_s=0.0)
    for _ in range(3):
        ring.admit(BEARER, clock.now)
    assert costs.take() == (3, 3)


def spellings() -> Iterable[bytes]:
    """Yield headers of one key that differ: the case of six letters, and spaces before and after."""
    cases = [bytes(each) for each in itertools.product(*zip(b"bearer", b"BEARER", strict=True))]
    for before, after in itertools.product(range(1, 100), range(100)):
        for scheme in cases:
            yield scheme + before * b" " + TEXT + after * b" "


def test_the_spellings_of_one_key_do_not_fill_the_memory(clock: Clock, costs: Costs) -> None:
    ring = keyring(clock, key())
    for header in itertools.islice(spellings(), keys.REMEMBERED + 100):
        ring.admit(header, clock.now)
    assert 100 <= len(ring._verified) <= keys.REMEMBERED
    costs.take()
    ring.admit(BEARER, clock.now)
    ring.admit(BEARER, clock.now)
    assert costs.take() == (1, 1)


def test_a_key_verified_while_the_keys_are_replaced_is_not_remembered(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keys come from another thread: here they change between the check and the remembering."""
    ring = keyring(clock, key())

    def meanwhile(pepper: bytes, secret: bytes) -> str:
        ring.replace([key(revoked=True)])
        return digest(pepper, secret)

    monkeypatch.setattr(keys, "digest", meanwhile)
    ring.admit(BEARER, clock.now)  # It began before the keys were replaced.
    with pytest.raises(InvalidKey):
        ring.admit(BEARER, clock.now)


def syntax(function: Callable[..., object]) -> ast.AST:
    return ast.parse(textwrap.dedent(inspect.getsource(function)))


CHECKING = (Keyring.admit, Keyring._verify, parse_key, digest)
"""All that a secret or its digest goes through when it is checked."""


def names_called(trees: Iterable[ast.AST]) -> list[str]:
    nodes = itertools.chain.from_iterable(map(ast.walk, trees))
    return [
        node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
        for node in nodes
        if isinstance(node, ast.Call)
    ]


def test_secrets_are_compared_in_constant_time_only() -> None:
    """No operator there looks at what a text is; what is compared are sizes, moments and None."""
    trees = [syntax(function) for function in CHECKING]
    assert not [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Match)]
    compared = {
        ast.unparse(node)
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare)
    }
    for comparison in compared:
        assert not {"==", "!=", "in"} & set(comparison.split()), comparison
    ordered = {each for each in compared if "None" not in each}
    assert ordered == {
        "len(authorization) > LONGEST",
        "now < known[1]",
        "len(verified) >= REMEMBERED",
        "left_s <= 0",
    }


def test_secrets_are_handed_to_nothing_that_compares_them_otherwise() -> None:
    called = names_called(syntax(function) for function in CHECKING)
    assert called.count("compare_digest") == 1
    assert set(called) == {
        *("_verify", "parse_key", "digest", "compare_digest"),
        *("fullmatch", "decode", "hex"),
        *("copy", "update", "clear", "len", "min", "_wall"),
        # It finds by the id, which is no secret, and by a hash that nobody outside can foresee.
        "get",
    }


def test_the_cache_is_searched_by_a_keyed_hash_alone(clock: Clock) -> None:
    """Two keyrings put one header in different places, and no header stands in either."""
    places = set()
    for cache_key in (16 * b"a", 16 * b"b"):
        ring = Keyring(PEPPER, wall=lambda: clock.wall, cache_key=cache_key)
        ring.replace([key()])
        ring.admit(BEARER, clock.now)
        places |= set(ring._verified)
    assert [len(place) for place in places] == [16, 16]


def test_a_principal_is_made_once_for_all_requests(clock: Clock) -> None:
    ring = keyring(clock, key())
    admitted: list[Principal] = [ring.admit(BEARER, clock.now)]
    admitted.append(ring.admit(b"bearer " + TEXT, clock.now))
    assert admitted[0] is admitted[1]
