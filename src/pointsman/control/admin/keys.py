"""API keys: making, listing and revoking them. The file is read and written in threads: a disk may take its time."""

import asyncio
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from pointsman.control.admin.endpoint import Body, Call, endpoint
from pointsman.control.admin.shapes import CreatedKey, KeyInfo, Keys, NewKey
from pointsman.control.keyfile import KeyFile
from pointsman.domain.keys import Key
from pointsman.errors import NotFound, StateUnavailable

__all__ = ["create_key", "list_keys", "revoke_key"]


@endpoint("POST", "/admin/v1/keys", status=201, errors=(NotFound, StateUnavailable))
async def create_key(call: Call, body: Body[NewKey]) -> CreatedKey:
    """Make a key.

    The answer shows it, once: only a digest is kept. 404 if the gateway has no `keys_file`.
    """
    keys = _key_file(call)
    wanted = body.read()
    now = int(call.parts.wall())
    key, text = await asyncio.to_thread(keys.create, **msgspec.structs.asdict(wanted), now=now)
    return CreatedKey(**_shown(key), key=text)


class KeysQuery(Struct, frozen=True):
    """Which keys to list."""

    tenant: Annotated[str, Meta(description="Only those of this tenant.")] = ""


@endpoint("GET", "/admin/v1/keys", errors=(NotFound, StateUnavailable))
async def list_keys(call: Call, query: KeysQuery) -> Keys:
    """List the keys, newest first.

    Revoked ones are among them. 404 if the gateway has no `keys_file`.
    """
    found = await asyncio.to_thread(_key_file(call).list, query.tenant or None)
    return Keys(tuple(KeyInfo(**_shown(key)) for key in found))


@endpoint("DELETE", "/admin/v1/keys/{id}", status=204, errors=(NotFound, StateUnavailable))
async def revoke_key(call: Call, id: str) -> None:
    """Revoke a key.

    This gateway refuses it at once, others that read the same file within seconds.
    """
    if not await asyncio.to_thread(_key_file(call).revoke, id):
        raise NotFound(f"there is no key with the id {id[:256]!r}")


def _key_file(call: Call) -> KeyFile:
    if call.parts.keys is None:
        raise NotFound("this gateway has no `keys_file`, so there are no keys")
    return call.parts.keys


def _shown(key: Key) -> dict[str, Any]:
    return {name: getattr(key, name) for name in KeyInfo.__struct_fields__}
