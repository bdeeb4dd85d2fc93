"""Forms (multipart/form-data, RFC 7578), as the audio APIs take them: reading the model, and writing another one.

A form is never taken apart and put together again. What is found is where the value of its `model` field stands, and
another value goes there; the audio, the order of the parts and every header keep their bytes.

This reader and that of an engine must not come to different models. So what could be read in two ways is refused: two
fields called `model`, a name that is given twice or in another charset, a part that is encoded, a delimiter with blanks
behind it, lines that end with LF alone.
"""

import re
from collections.abc import Iterator

from pointsman.domain.request import InferenceRequest
from pointsman.errors import BadRequest
from pointsman.wire.body import check_model

__all__ = ["boundary_of", "parse_form", "with_model_at"]

PARTS_LIMIT = 1000
"""Parts of a form, which is also what usual frameworks allow; and as many times the text of the delimiter."""

HEADERS_LIMIT = 1 << 17
"""Bytes of the headers of all parts: they are read one by one, which takes a hundred times as long as the content."""

TRUE = (b"true", b"1", b"on", b"yes", b"t", b"y")

TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]++"
PARAMETER = re.compile(
    rb"[ \t]*+;[ \t]*+(?:(" + TOKEN + rb")=(?:(" + TOKEN + rb')|"((?:[^"\\]|\\.)*+)"))?+', re.DOTALL
)
ESCAPED = re.compile(rb"\\(.)", re.DOTALL)
HEADER = re.compile(rb"(" + TOKEN + rb"):[ \t]*+([^\r\n\x00]*+)\r\n")
PLAIN = (b"", b"7bit", b"8bit", b"binary")


def boundary_of(content_type: bytes) -> bytes | None:
    """Return the boundary of a form, by its Content-Type; None for another type of body.

    Raises BadRequest for a form without one boundary of 1 to 70 characters.

    >>> boundary_of(b'multipart/form-data; boundary="a b"'), boundary_of(b"application/json")
    (b'a b', None)
    """
    kind, _, _ = content_type.partition(b";")
    if kind.strip(b" \t").lower() != b"multipart/form-data":
        return None
    given = _parameters(content_type, len(kind)).get(b"boundary", [])
    if len(given) != 1 or not 0 < len(given[0]) <= 70 or b"\n" in given[0] or b"\r" in given[0]:
        raise BadRequest("a form needs one boundary of 1 to 70 characters in its Content-Type")
    return given[0]


def parse_form(body: bytes, boundary: bytes, request_id: str, path: str) -> InferenceRequest:
    r"""Read what routing needs from a form: its fields `model` and `stream`. O(size of the body).

    Raises BadRequest for what is no form with one field `model` of 1 to 256 characters; `param` is `model` where that
    is the fault.

    >>> part = b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper\r\n--x--'
    >>> parse_form(part, b"x", "r1", "/v1/audio/transcriptions").model
    'whisper'
    """
    place: tuple[int, int] | None = None
    stream = False
    room = HEADERS_LIMIT
    for start, end in _parts(body, boundary):
        name, value, plain = _headers(body, start, end, room)
        room -= value - start
        if name == b"model":
            if place is not None:
                raise BadRequest("`model` must stand in the request once", param="model")
            if not plain:
                raise BadRequest("`model` must be a plain field of the form", param="model")
            place = value, end
        elif name == b"stream":
            stream = body[value:end].lower() in TRUE
    try:
        model = "" if place is None else body[slice(*place)].decode()
    except UnicodeDecodeError:
        raise BadRequest("`model` is not UTF-8", param="model") from None
    check_model(model)
    return InferenceRequest(model, request_id, stream, path=path, model_at=place)


def with_model_at(body: bytes, place: tuple[int, int], model: str) -> bytes:
    """Return a form with another model where `parse_form` found one, every other byte as it was.

    >>> with_model_at(b"...old...", (3, 6), "newer")
    b'...newer...'
    """
    start, end = place
    return b"%b%b%b" % (body[:start], model.encode(), body[end:])


def _parts(body: bytes, boundary: bytes) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of every part, its headers included and the line end before the next delimiter not."""
    delimiter = b"\r\n--" + boundary
    count = 0
    start = -1
    # The first delimiter needs no line end before it where it begins the body.
    found = 0 if body.startswith(delimiter[2:]) else body.find(delimiter)
    width = len(delimiter) - 2 if found == 0 else len(delimiter)
    while found >= 0:
        count += 1
        if count > PARTS_LIMIT:
            raise BadRequest(f"the form has more than {PARTS_LIMIT} parts")
        behind = found + width
        follows = body[behind : behind + 2]
        if follows in (b"\r\n", b"--"):
            if start >= 0:
                yield start, found
            if follows == b"--":
                return
            start = behind + 2
            # A part may be empty to its headers: the line end behind a delimiter is then the one before the next.
            found = body.find(delimiter, behind)
        elif follows[:1] in (b" ", b"\t"):
            raise BadRequest("the form has blanks behind a delimiter")
        else:
            # It only begins like a delimiter, and is content.
            found = body.find(delimiter, found + 1)
        width = len(delimiter)
    raise BadRequest("the request body is no form that ends with its boundary")


def _headers(body: bytes, start: int, end: int, room: int) -> tuple[bytes, int, bool]:
    """Return the name of a part, where its value begins, and whether that is a plain field and no file.

    Its headers may have `room` bytes.
    """
    name: bytes | None = None
    plain = True
    limit = start + room
    while (line := HEADER.match(body, start, min(end, limit))) is not None:
        key = line[1].lower()
        if key == b"content-disposition":
            if name is not None:
                raise BadRequest("a part of the form has two names")
            name, file = _name(line[2])
            plain = plain and not file
        elif key == b"content-transfer-encoding":
            plain = plain and line[2].strip(b" \t").lower() in PLAIN
        start = line.end()
    if body[start : min(start + 2, end)] != b"\r\n":
        if end > limit:
            raise BadRequest(f"the headers of the form have more than {HEADERS_LIMIT} bytes")
        raise BadRequest("a part of the form has headers that cannot be read")
    return name or b"", start + 2, plain


def _name(disposition: bytes) -> tuple[bytes, bool]:
    """Return the name of a part, and whether it is a file."""
    kind, _, _ = disposition.partition(b";")
    given = _parameters(disposition, len(kind))
    names = given.get(b"name", [])
    if kind.strip(b" \t").lower() != b"form-data" or len(names) != 1 or b"name*" in given:
        raise BadRequest("a part of the form does not have one name")
    return names[0], b"filename" in given or b"filename*" in given


def _parameters(value: bytes, start: int) -> dict[bytes, list[bytes]]:
    """Return the parameters of a header's value, from their first semicolon on. Names are lower case."""
    given: dict[bytes, list[bytes]] = {}
    while (found := PARAMETER.match(value, start)) is not None:
        if found[1] is not None:
            text = found[2] if found[2] is not None else ESCAPED.sub(rb"\1", found[3])
            given.setdefault(found[1].lower(), []).append(text)
        start = found.end()
    if value[start:].strip(b" \t"):
        raise BadRequest("a parameter in the headers of the form cannot be read")
    return given
