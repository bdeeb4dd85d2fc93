"""What the client gets where it cannot get the engine's bytes as they came.

A shape takes what a cut returned, in the engine's framing, and gives what goes to the client. Normally there is none.
There is one for a client of HTTP/1.0, which knows no chunks; for an engine whose body ends with the connection, which
is chunked so that the client can tell an end from a break; and for `response_model = "public"`.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import msgspec

from pointsman.wire.body import members, readable, with_fields
from pointsman.wire.framing import LAST_CHUNK, chunk, payload
from pointsman.wire.sse import DONE, EventCut, data_of, with_data

__all__ = [
    "Chunked",
    "Edit",
    "Edited",
    "Shape",
    "Unchunked",
    "edited_json",
    "public_json",
]

Edit: TypeAlias = Callable[[bytes], bytes]
"""Changes a JSON text; what it cannot read it returns as it is."""


class Shape(Protocol):
    """A change of form on the way to the client."""

    def feed(self, data: bytes) -> bytes:
        """Return what the client gets now."""

    def end(self) -> bytes:
        """Return what ends the body, after all that `feed` gave."""


class Unchunked:
    """Chunks to plain bytes, ended by the connection."""

    __slots__ = ()

    def feed(self, data: bytes) -> bytes:
        """Return the payload of whole chunks."""
        return payload(data)

    def end(self) -> bytes:
        """Nothing: the connection closes."""
        return b""


class Chunked:
    """Plain bytes to chunks."""

    __slots__ = ()

    def feed(self, data: bytes) -> bytes:
        """Return the data as one chunk; of nothing, nothing: an empty chunk would end the body."""
        return chunk(data) if data else b""

    def end(self) -> bytes:
        """Return the last chunk."""
        return LAST_CHUNK


class Edited:
    """Changes the JSON of every event: the public model id into it, say, or the logprobs out of it.

    Comments and `[DONE]` pass untouched, and so does an event whose data an edit would break over more lines. Where an
    edit leaves fewer, the last ones are empty, which is whitespace behind the JSON.
    """

    __slots__ = ("_chunked_in", "_chunked_out", "_edits", "_events")

    def __init__(self, edits: Sequence[Edit], *, chunked_in: bool, chunked_out: bool) -> None:
        self._edits = edits
        self._events = EventCut()
        self._chunked_in = chunked_in
        self._chunked_out = chunked_out

    def feed(self, data: bytes) -> bytes:
        """Return the events that are whole now, as one chunk."""
        plain = payload(data) if self._chunked_in else data
        return self._out(b"".join(map(self._edited, self._events.feed(plain))))

    def end(self) -> bytes:
        """Return the event that was never ended, if there is one, and the last chunk."""
        rest = self._out(self._edited(self._events.rest()))
        return rest + LAST_CHUNK if self._chunked_out else rest

    def _out(self, data: bytes) -> bytes:
        return chunk(data) if data and self._chunked_out else data

    def _edited(self, event: bytes) -> bytes:
        data = data_of(event)
        if not data or data == DONE:
            return event
        edited = edited_json(data, self._edits)
        missing = data.count(b"\n") - edited.count(b"\n")
        return with_data(event, edited + b"\n" * missing) if missing >= 0 else event


def edited_json(body: bytes, edits: Sequence[Edit]) -> bytes:
    """Return a JSON answer, or the data of an event, after all edits.

    >>> edited_json(b'{"model":"a"}', [lambda body: public_json(body, b'"b"')])
    b'{"model":"b"}'
    """
    for edit in edits:
        body = edit(body)
    return body


ABSENT = msgspec.Raw(b"")


class Named(msgspec.Struct):
    """The places where an answer names its model: at the top, or in the object of the Responses and Messages APIs."""

    model: msgspec.Raw = ABSENT
    response: msgspec.Raw = ABSENT
    message: msgspec.Raw = ABSENT


decode_named = msgspec.json.Decoder(Named).decode


def public_json(body: bytes, model: bytes) -> bytes:
    """Return a JSON answer or event with its `model`, and that of a nested `response` or `message`, replaced.

    `model` is raw JSON. Only strings are replaced. What is no JSON object passes untouched, and so does text that
    merely mentions a model.

    >>> public_json(b'{"id":1,"model":"served-v2","x":"served-v2"}', b'"smol"')
    b'{"id":1,"model":"smol","x":"served-v2"}'
    """
    named = _named(body)
    if named is None:
        return body
    fields: dict[str, bytes] = {}
    if bytes(named.model)[:1] == b'"':
        fields["model"] = model
    for key, value in (("response", named.response), ("message", named.message)):
        nested = _named(bytes(value)) if value else None
        if nested is not None and bytes(nested.model)[:1] == b'"':
            # From the body itself: what was decoded may have been mended.
            written = {name: body[start:end] for name, start, end in members(body)}[key]
            fields[key] = with_fields(written, {"model": model})
    return with_fields(body, fields) if fields else body


def _named(body: bytes) -> Named | None:
    """Return where a JSON object names its model, None for what is none."""
    try:
        return readable(decode_named, body)
    except (msgspec.DecodeError, RecursionError):
        return None
