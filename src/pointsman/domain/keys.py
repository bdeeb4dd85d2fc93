"""API keys: what one looks like, what it may do, and how one is checked without telling anything about the others.

A key is `tl_<id>_<secret>`. Only its digest is kept, HMAC-SHA256 of the secret under a pepper that lives outside the
key file, so a stolen file opens nothing. Every refusal is the same error with the same words, and every key of the
right form costs one digest and one comparison in constant time before it is refused, whether its id is known or not.

What it does not do: read or write the key file (see `pointsman.control.keyfile`), tell the time, or make randomness.
"""

import hmac
import re
from collections.abc import Callable, Iterable
from enum import StrEnum
from hashlib import blake2b
from hmac import compare_digest
from math import inf
from typing import Annotated

import msgspec
from msgspec import Meta

from pointsman.errors import InvalidKey

__all__ = [
    "ANONYMOUS",
    "Key",
    "Keyring",
    "Principal",
    "Scope",
    "digest",
    "make_key",
    "parse_key",
]

END_OF_TIME = 253_402_300_800
"""The first second, since 1970, that RFC 3339 cannot write: the year 10000."""

Limit = Annotated[int, Meta(ge=0)]
Moment = Annotated[int, Meta(ge=0, lt=END_OF_TIME)]

ID_LETTERS = "abcdefghijklmnopqrstuvwxyz234567"
SECRET_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
_KEY = re.compile(rb"tl_([a-z2-7]{12})_([A-Za-z0-9]{32})")
_BEARER = re.compile(rb"(?i:bearer) +([^ ]+) *")

LONGEST = 256
"""Bytes of an `Authorization` header that are looked at. A key has 48; the rest is for spaces."""

REMEMBERED = 16_384
"""Header values that are remembered as good at a time. One key has many spellings: `Bearer`, `bearer`, more spaces."""


class Scope(StrEnum):
    """What a key may be used for."""

    INFER = "infer"
    EMBED = "embed"
    ADMIN = "admin"
    DEBUG = "debug"


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """One record of the key file. It has the digest, never the secret.

    `hmac` is 64 hex digits; `rpm` and `tpm` are requests and tokens per minute, 0 for no limit; `models` are the ids or
    aliases that it may ask for, empty for all; `created_at` and `expires_at` are seconds since 1970, `expires_at` None
    for never. The bounds are checked where msgspec makes one, not where it is called.
    """

    key_id: Annotated[str, Meta(pattern=r"\A[a-z2-7]{12}\Z")]
    hmac: Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
    tenant: Annotated[str, Meta(pattern=r"\A[a-z0-9][a-z0-9-]{0,62}\Z")]
    name: Annotated[str, Meta(min_length=1, max_length=128)]
    scopes: Annotated[tuple[Scope, ...], Meta(min_length=1)] = (Scope.INFER,)
    rpm: Limit = 60
    tpm: Limit = 100_000
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0
    models: tuple[Annotated[str, Meta(min_length=1)], ...] = ()
    created_at: Moment = 0
    expires_at: Moment | None = None
    revoked: bool = False


class Principal:
    """Who a request comes from, once its key has been verified.

    `models` are the ids or aliases that it may ask for, empty for all; `priority` is None for whoever came without a
    key. What the data plane asks of it for every request is worked out once: `infer`, `embed`, `admin` and `debug` say
    whether it has that scope, and `upstream` are the header lines that tell an engine of its priority.
    """

    __slots__ = (
        *("admin", "debug", "embed", "infer", "key_id"),
        *("models", "priority", "scopes", "tenant", "upstream"),
    )

    def __init__(
        self,
        key_id: str,
        tenant: str,
        scopes: frozenset[Scope],
        models: tuple[str, ...] = (),
        priority: int | None = None,
    ) -> None:
        self.key_id = key_id
        self.tenant = tenant
        self.scopes = scopes
        self.models = models
        self.priority = priority
        self.infer = Scope.INFER in scopes
        self.embed = Scope.EMBED in scopes
        self.admin = Scope.ADMIN in scopes
        self.debug = Scope.DEBUG in scopes
        self.upstream = b"" if priority is None else b"x-tl-priority: %d\r\n" % priority


ANONYMOUS = Principal("", "anonymous", frozenset((Scope.INFER, Scope.EMBED)))
"""Whoever asks a gateway that has no keys."""


def make_key(random_bytes: Callable[[int], bytes]) -> tuple[str, str]:
    """Return the id of a new key and its whole text, every letter as likely as any other.

    `random_bytes` returns as many uniform bytes as it is asked for, such as `secrets.token_bytes`.

    >>> make_key(lambda count: bytes(range(count)))
    ('abcdefghijkl', 'tl_abcdefghijkl_ABCDEFGHIJKLMNOPQRSTUVWXYZabcdef')
    """
    key_id = _letters(ID_LETTERS, 12, random_bytes)
    return key_id, f"tl_{key_id}_{_letters(SECRET_LETTERS, 32, random_bytes)}"


def _letters(alphabet: str, count: int, random_bytes: Callable[[int], bytes]) -> str:
    # Numbers beyond the alphabet are thrown away: a modulo would make its first letters likelier.
    mask = (1 << (len(alphabet) - 1).bit_length()) - 1
    letters = ""
    while len(letters) < count:
        numbers = (byte & mask for byte in random_bytes(count))
        letters += "".join(alphabet[number] for number in numbers if number < len(alphabet))
    return letters[:count]


def parse_key(text: bytes) -> tuple[str, bytes] | None:
    """Return the id and the secret of a key, None if the text has not the form of one.

    >>> parse_key(b"tl_abcdefghijkl_" + 32 * b"A") == ("abcdefghijkl", 32 * b"A")
    True
    >>> parse_key(b"sk-somebody-elses")
    """
    found = _KEY.fullmatch(text)
    return None if found is None else (found[1].decode(), found[2])


def digest(pepper: bytes, secret: bytes) -> str:
    """Return what is kept of a secret: its HMAC-SHA256 under the pepper, as 64 hex digits.

    >>> digest(b"pepper", 32 * b"A")
    '900c4259ee85eb80ae9c8806518e9b788e7e3dc5e5d5f8fab81feaa126334306'
    """
    return hmac.digest(pepper, secret, "sha256").hex()


NOBODY = Key(key_id="", hmac=64 * "0", tenant="", name="", revoked=True)
"""Whom the secret of an unknown id is compared with."""


class Keyring:
    """The keys of a gateway, and whether a request has one of them.

    `pepper` must not be empty, or ValueError. A key that was verified is taken as good for at most `ttl_s` seconds
    (0 or more), but not beyond the moment that it expires, and not beyond `replace`. `wall` returns the seconds since
    1970. `cache_key` is 16 to 64 random bytes: they blind the place of a header in the cache, so that a lookup
    compares no secrets.

    `replace` may be called from another thread than `admit`.

    >>> key = Key(key_id=12 * "a", hmac=digest(b"pepper", 32 * b"A"), tenant="acme", name="laptop")
    >>> keyring = Keyring(b"pepper", wall=lambda: 0.0, cache_key=bytes(range(16)))
    >>> keyring.replace([key])
    >>> keyring.admit(b"Bearer tl_aaaaaaaaaaaa_" + 32 * b"A", now=0.0).tenant
    'acme'
    """

    def __init__(
        self,
        pepper: bytes,
        *,
        ttl_s: float = 5.0,
        wall: Callable[[], float],
        cache_key: bytes,
    ) -> None:
        if not pepper:
            raise ValueError("the pepper of the key digests is empty")
        if len(cache_key) < 16:
            raise ValueError("cache_key must have at least 16 bytes")
        self._pepper = pepper
        self._ttl_s = ttl_s
        self._wall = wall
        self._blinding = blake2b(key=cache_key, digest_size=16)
        self._holders: dict[str, tuple[Key, Principal]] = {}
        self._nobody = NOBODY, ANONYMOUS
        self._verified: dict[bytes, tuple[Principal, float]] = {}

    def replace(self, keys: Iterable[Key]) -> None:
        """Take these keys instead of the ones before, at once; of two records with one id, the later one."""
        self._holders = {key.key_id: (key, _holder(key)) for key in keys}
        # After the keys, and a new one: an `admit` in another thread that still read the old keys
        # remembers what it found in the old cache, which nobody reads any more.
        self._verified = {}

    def keys(self) -> list[Key]:
        """Return all keys, also the revoked and the expired ones."""
        return [key for key, _ in self._holders.values()]

    def get(self, key_id: str) -> Key | None:
        """Return the key of this id, None if there is none."""
        return self._holders.get(key_id, (None, None))[0]

    def digest(self, secret: bytes) -> str:
        """Return what is kept of a secret under the pepper of this keyring."""
        return digest(self._pepper, secret)

    def admit(self, authorization: bytes | None, now: float) -> Principal:
        """Return whoever an `Authorization` header stands for, `now` in monotonic seconds.

        The header may be anything. Raises InvalidKey unless it is `Bearer` (in any case), one space or more, and a key
        that is known, neither revoked nor expired. A key that was verified lately costs no digest.
        """
        if authorization is None or len(authorization) > LONGEST:
            raise InvalidKey
        verified = self._verified
        blinded = self._blinding.copy()
        blinded.update(authorization)
        place = blinded.digest()
        known = verified.get(place)
        if known is not None and now < known[1]:
            return known[0]
        principal, left_s = self._verify(authorization)
        if len(verified) >= REMEMBERED:
            verified.clear()
        verified[place] = principal, now + min(self._ttl_s, left_s)
        return principal

    def _verify(self, authorization: bytes) -> tuple[Principal, float]:
        """Return who it is and for how many seconds the key is still good. Raises InvalidKey."""
        bearer = _BEARER.fullmatch(authorization)
        key_text = None if bearer is None else parse_key(bearer[1])
        if key_text is None:
            raise InvalidKey
        key_id, secret = key_text
        key, principal = self._holders.get(key_id, self._nobody)
        # Always first, and for everybody: whether an id is known, revoked or expired must not show
        # in how long the refusal takes.
        right = compare_digest(digest(self._pepper, secret), key.hmac)
        left_s = inf if key.expires_at is None else key.expires_at - self._wall()
        if not right or key.revoked or left_s <= 0:
            raise InvalidKey
        return principal, left_s


def _holder(key: Key) -> Principal:
    return Principal(key.key_id, key.tenant, frozenset(key.scopes), key.models, key.priority)
