"""What an engine answers to requests that generate nothing: embeddings, rankings, scores, counts, and forms.

Every number depends on the whole request, as the words of a generation do.
"""

import hashlib
from collections.abc import Callable
from email import message_from_bytes
from typing import Any

import msgspec

from pointsman.testing.handoffs import prompt_of
from pointsman.testing.origin import Received

__all__ = ["OTHER", "TRANSCRIPTIONS", "form_of"]

TRANSCRIPTIONS = "/v1/audio/transcriptions"

Json = dict[str, Any]


def _figures(*seen: object, count: int) -> list[float]:
    """Return so many numbers, at most 32, from 0 to 1."""
    digest = hashlib.sha256(msgspec.json.encode(seen, order="deterministic")).digest()
    return [byte / 255 for byte in digest[:count]]


def _listed(inputs: Any) -> list[Any]:
    """Return several inputs as they are, and one alone (a text, or the ids of one) as a list of it."""
    alone = isinstance(inputs, str) or (bool(inputs) and isinstance(inputs[0], int))
    return [inputs] if alone else list(inputs)


def _counted(body: Json) -> Json:
    tokens = len(msgspec.json.encode(body))
    return {"model": body["model"], "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}


def _embeddings(body: Json) -> Json:
    data = [
        {"index": n, "object": "embedding", "embedding": _figures(body["model"], each, count=8)}
        for n, each in enumerate(_listed(body["input"]))
    ]
    return {"object": "list", "data": data, **_counted(body)}


def _rerank(body: Json) -> Json:
    scores = [
        _figures(body["model"], body["query"], each, count=1)[0] for each in body["documents"]
    ]
    results = [
        {"index": n, "document": {"text": body["documents"][n]}, "relevance_score": scores[n]}
        for n in sorted(range(len(scores)), key=lambda n: -scores[n])
    ]
    return {"id": "rerank-1", "results": results[: body.get("top_n")], **_counted(body)}


def _score(body: Json) -> Json:
    first, others = body["text_1"], _listed(body["text_2"])
    data = [
        {"index": n, "object": "score", "score": _figures(body["model"], first, each, count=1)[0]}
        for n, each in enumerate(others)
    ]
    return {"object": "list", "data": data, **_counted(body)}


def _count_tokens(body: Json) -> Json:
    return {"input_tokens": len(prompt_of(body))}


OTHER: dict[str, Callable[[Json], Json]] = {
    "/v1/embeddings": _embeddings,
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), _rerank),
    **dict.fromkeys(("/score", "/v1/score"), _score),
    "/v1/messages/count_tokens": _count_tokens,
}
"""What is answered, by path."""


def form_of(request: Received) -> dict[str, bytes]:
    """Return the fields of a multipart form. Raises ValueError where the body is none."""
    kind = (request.header("content-type") or "").encode()
    message = message_from_bytes(b"content-type: " + kind + b"\r\n\r\n" + request.body)
    if not message.is_multipart():
        raise ValueError("no multipart form")
    form: dict[str, bytes] = {}
    for part in message.get_payload():
        assert not isinstance(part, str)
        payload = part.get_payload(decode=True)
        assert isinstance(payload, bytes)
        form[str(part.get_param("name", header="content-disposition"))] = payload
    return form
