"""What a source of discovery found: an address, and what is known of the engine behind it.

A source hands over its whole list, so what is not in it is gone. It says what it saw and judges nothing; who makes
workers of it is `pointsman.parts`.
"""

from collections.abc import Mapping

from msgspec import Struct

__all__ = ["Found"]


class Found(Struct, frozen=True):
    """One engine, as a source knows it.

    `id` is unique in its source; `address` is `host:port`, an IPv6 host in brackets. `labels` are what the source says
    about it: model, role, dialect, scheme, path, capacity, connector, bootstrap_port, or another id. `draining` ones
    are about to go: they finish what they have, and get nothing new.
    """

    id: str
    address: str
    labels: Mapping[str, str] = {}
    draining: bool = False
