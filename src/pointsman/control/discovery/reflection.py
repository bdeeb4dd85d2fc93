"""A copy of some objects of a cluster, kept by a list and the events that follow it.

The list is the truth: whatever it does not have is gone, whether or not anybody saw it go. Events only carry on from
there, and as soon as one could be missing, `Gap` says that the list has to be read again. Nothing here has a socket.
"""

from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar

import msgspec
from msgspec import Raw, Struct

from pointsman.control.discovery.pods import Metadata

__all__ = ["Gap", "Kept", "Page", "Reflection", "page", "refusal"]


class Kept(Protocol):
    """An object of a cluster."""

    @property
    def metadata(self) -> Metadata:
        """What every object has."""


T = TypeVar("T", bound=Kept)

REASON = 200
"""How much is told of what the API says, in characters."""


class Gap(Exception):
    """Events were lost, or may have been. `status` is that of the API where it said why, 0 otherwise."""

    def __init__(self, reason: str, status: int = 0) -> None:
        super().__init__(reason)
        self.status = status


class Page(Struct, frozen=True):
    """A part of a list: its objects, the version it shows, and what to ask for the next part with ("" at the end)."""

    items: tuple[Raw, ...]
    version: str
    following: str


class _ListMeta(Struct, frozen=True, rename="camel"):
    resource_version: str = ""
    following: str = msgspec.field(default="", name="continue")


class _List(Struct, frozen=True):
    metadata: _ListMeta = _ListMeta()
    items: tuple[Raw, ...] | None = None


class _Event(Struct, frozen=True):
    type: str
    object: Raw


class _Status(Struct, frozen=True):
    message: str = ""
    reason: str = ""
    code: int = 0


def page(body: bytes) -> Page:
    """Return what an answer to a list request has. Raises Gap where it is none, or none to watch on from."""
    try:
        listed = msgspec.json.decode(body, type=_List)
    except msgspec.DecodeError as error:
        raise Gap(f"an answer that is no list: {error}") from None
    if not listed.metadata.resource_version:
        raise Gap("a list without a resourceVersion")
    return Page(listed.items or (), listed.metadata.resource_version, listed.metadata.following)


def refusal(body: bytes) -> str:
    """Return why the API refused, in one line, from the beginning of its answer.

    >>> refusal(b'{"kind": "Status", "message": "pods is forbidden", "code": 403}')
    'pods is forbidden'
    >>> refusal(b"upstream\\n  connect error")
    'upstream connect error'
    """
    try:
        said = msgspec.json.decode(body, type=_Status).message
    except msgspec.DecodeError:
        said = body.decode(errors="replace")
    return " ".join(said.split())[:REASON]


class Reflection(Generic[T]):
    """The objects of one kind, by namespace and name. `unreadable` counts those of the last list that made no sense."""

    def __init__(self, kind: type[T]) -> None:
        self._decoder = msgspec.json.Decoder(kind)
        self._objects: dict[tuple[str, str], T] = {}
        self.unreadable = 0

    @property
    def objects(self) -> list[T]:
        """Return what there is."""
        return list(self._objects.values())

    def replace(self, items: Iterable[Raw]) -> None:
        """Take a whole list as the truth. An object that makes no sense is left out: it is no obstacle to others."""
        objects: dict[tuple[str, str], T] = {}
        self.unreadable = 0
        for item in items:
            try:
                each = self._decoder.decode(item)
            except msgspec.DecodeError:
                self.unreadable += 1
            else:
                objects[_key(each)] = each
        self._objects = objects

    def apply(self, line: bytes) -> bool:
        """Take one event of a watch; return whether it can have changed the objects.

        Raises Gap where events may be missing, also for an event that makes no sense.
        """
        try:
            event = msgspec.json.decode(line, type=_Event)
            match event.type:
                case "BOOKMARK":
                    return False
                case "ADDED" | "MODIFIED":
                    each = self._decoder.decode(event.object)
                    self._objects[_key(each)] = each
                case "DELETED":
                    self._objects.pop(_key(self._decoder.decode(event.object)), None)
                case "ERROR":
                    said = msgspec.json.decode(event.object, type=_Status)
                    raise Gap(said.message or said.reason or "an error event", said.code)
                case other:
                    raise Gap(f"an event of type {other[:40]!r}")
        except msgspec.DecodeError as error:
            raise Gap(f"an event that cannot be read: {error}") from None
        return True


def _key(each: Kept) -> tuple[str, str]:
    return each.metadata.namespace, each.metadata.name
