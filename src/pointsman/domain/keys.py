"""API keys: what one looks like, what it may do, and how one is checked without telling anything about the others.

A key is `tl_<id>_<secret>`. Only its digest is kept, HMAC-SHA256 of the secret under a pepper that lives outside the
key file, so a stolen file opens nothing. Every refusal is the same error with the same words.

What it does not do: read or write the key file (see `pointsman.control.keyfile`), or tell the time.
"""

from enum import StrEnum

import msgspec

__all__ = ["ANONYMOUS", "Key", "Principal", "Scope"]


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
    for never.
    """

    key_id: str
    hmac: str
    tenant: str
    name: str
    scopes: tuple[Scope, ...] = (Scope.INFER,)
    rpm: int = 60
    tpm: int = 100_000
    priority: int = 0
    models: tuple[str, ...] = ()
    created_at: int = 0
    expires_at: int | None = None
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
