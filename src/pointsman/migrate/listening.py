"""Where the gateway listens, and whether its callers need keys: for all sources alike."""

from pointsman.config import Address
from pointsman.migrate.draft import Draft, Unreadable

__all__ = ["address_of", "listen"]

KEYS = (
    "callers need keys of this gateway: make one with `pointsman keys create --keys-file keys.jsonl`; "
    "the old key is not copied"
)


def listen(draft: Draft, host: str, port: int, guarded_by: str = "") -> None:
    """Write where the gateway listens. `guarded_by` is what asked callers for a key, "" where nothing did.

    Raises Unreadable where it is no address.
    """
    read = address_of(host, port)
    draft.gateway.put("listen", str(read))
    if guarded_by:
        draft.note(guarded_by, KEYS, above="keys_file")
        draft.gateway.put("keys_file", "keys.jsonl")
    elif not read.is_loopback:
        draft.gateway.remark(
            "as before: whoever can reach the address may use it", above="allow_unauthenticated"
        )
        draft.gateway.put("allow_unauthenticated", True)


def address_of(host: str, port: int) -> Address:
    """Return the address of a host and a port. Raises Unreadable where it is none."""
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        return Address.parse(address)
    except ValueError as error:
        raise Unreadable(f"{address}: {error}") from None
