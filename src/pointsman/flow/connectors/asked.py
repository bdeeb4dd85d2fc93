"""What the connectors have in common that ask prefill workers over HTTP, by the client's own path."""

import re

from pointsman.flow.handover import Handoff
from pointsman.wire.call import HttpCall

__all__ = ["cached_in", "limit_of", "prefill_call"]

CACHED = re.compile(rb'"(?:cached_tokens|cache_n)"\s*:\s*([0-9]{1,9})')
"""How engines say how much of a prompt they had. In the text of an answer its quotes would be escaped."""

LIMITED = re.compile(rb'"max_(?:completion_)?tokens"\s*:\s*[0-9]')


def prefill_call(handoff: Handoff, body: bytes, name: str) -> HttpCall:
    """Return the request to the prefill worker, which calls it `name` as the decode worker will."""
    x = handoff.x
    headers = b"x-request-id: %b\r\n" % name.encode()
    if x.trace:
        headers += b"traceparent: %b\r\n" % x.trace
    timeout_s = min(handoff.handoffs.prefill_s, max(x.deadline - x.now, 0.0))
    return HttpCall(handoff.prefill, x.path.encode(), body, timeout_s, headers)


def limit_of(handoff: Handoff) -> dict[str, bytes]:
    """Return the limit that the route sets where the client may have set none, as members of the body."""
    limit = handoff.prompt.default_max_tokens
    if limit is None or LIMITED.search(handoff.prompt.body):
        return {}
    return {"max_tokens": b"%d" % limit}


def cached_in(answer: bytes) -> int:
    """Return how many tokens of its prompt a worker had, by its own last word on it; -1 where it says nothing.

    `answer` is a whole one, or the last bytes of a stream, with their framing.
    """
    said = CACHED.findall(answer)
    return int(said[-1]) if said else -1
