"""What an engine answers on a path that it does not have, told apart from a model or an object that it does not have.

Both are 404 with most engines, and they are opposites: one says that another worker may do, the other is the answer.
The status does not tell, so the body does. What is not known here is an answer like any other.
"""

import re

import msgspec
from msgspec import Struct

from pointsman.wire.body import readable

__all__ = ["lacks_path"]

NO_PATH = 404
NO_METHOD = 405
NO_SUPPORT = 501

NOT_FOUND = frozenset(("not found", "file not found"))
NOT_SUPPORTED = re.compile(r"(?:this server|the model) does not support\b", re.IGNORECASE)


class _Error(Struct):
    message: object = None
    type: object = None


class _Said(Struct):
    detail: object = None
    error: _Error | str | None = None


decode_said = msgspec.json.Decoder(_Said).decode


def lacks_path(status: int, body: bytes) -> bool:
    """Tell whether an answer says that the engine does not serve the path that it was asked.

    >>> lacks_path(404, b'{"detail":"Not Found"}'), lacks_path(404, b'{"error":{"message":"no model x"}}')
    (True, False)
    """
    if status == NO_METHOD:
        # The path is there, but not for POST: it is something else.
        return True
    if status not in (NO_PATH, NO_SUPPORT):
        return False
    if not body.lstrip().startswith(b"{"):
        # A page or a line of text, or nothing: what a server says before any API is reached.
        return True
    try:
        said = readable(decode_said, body)
    except (msgspec.DecodeError, RecursionError):
        # An object of some other shape, which somebody made for this request.
        return False
    error = said.error
    message = error.message if isinstance(error, _Error) else error or said.detail
    if status == NO_PATH:
        return isinstance(message, str) and message.lower().rstrip(".") in NOT_FOUND
    return (isinstance(error, _Error) and error.type == "not_supported_error") or (
        isinstance(message, str) and NOT_SUPPORTED.match(message) is not None
    )
