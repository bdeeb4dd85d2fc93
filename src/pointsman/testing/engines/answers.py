"""The answers of an engine in the shape of each API: whole, or as the events of a stream.

What is said comes from elsewhere; here is only how. Each path has one function that makes the whole answer, and those
that can be streamed have one that makes the events, in the order and with the names that clients of that API expect.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from pointsman.testing.handoffs import CHAT, TEXT

__all__ = ["MESSAGES", "RESPONSES", "STREAMED", "WHOLE", "Said"]

RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"

Json = dict[str, Any]


class Said(msgspec.Struct, frozen=True):
    """What was generated for a model, and what is counted: tokens; `cached_tokens` is -1 where that is not said.

    `usage` asks a stream for a last event with the counts; `extra` are further members of a whole answer.
    """

    model: str
    words: Sequence[str]
    prompt_tokens: int
    cached_tokens: int = -1
    finish: str = "stop"
    usage: bool = False
    extra: Mapping[str, object] = {}

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.words)


def _usage(said: Said) -> Json:
    made = len(said.words)
    details = None if said.cached_tokens < 0 else {"cached_tokens": said.cached_tokens}
    return {
        "prompt_tokens": said.prompt_tokens,
        "total_tokens": said.prompt_tokens + made,
        "completion_tokens": made,
        "prompt_tokens_details": details,
    }


def _input_usage(said: Said) -> Json:
    return {
        "input_tokens": said.prompt_tokens,
        "input_tokens_details": {"cached_tokens": max(said.cached_tokens, 0)},
        "output_tokens": len(said.words),
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": said.prompt_tokens + len(said.words),
    }


def _cache_usage(said: Said) -> Json:
    usage = {"input_tokens": said.prompt_tokens, "output_tokens": len(said.words)}
    return (
        usage if said.cached_tokens < 0 else usage | {"cache_read_input_tokens": said.cached_tokens}
    )


def _choice(**members: object) -> list[Json]:
    return [{"index": 0, **members}]


def _chat(said: Said) -> Json:
    message = {"role": "assistant", "content": said.text, "tool_calls": []}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "model": said.model,
        "choices": _choice(message=message, logprobs=None, finish_reason=said.finish),
        "usage": _usage(said),
        **said.extra,
    }


def _text(said: Said) -> Json:
    return {
        "id": "cmpl-1",
        "object": "text_completion",
        "model": said.model,
        "choices": _choice(text=said.text, logprobs=None, finish_reason=said.finish),
        "usage": _usage(said),
        **said.extra,
    }


def _response(said: Said, *, status: str = "completed") -> Json:
    content = [{"type": "output_text", "text": said.text, "annotations": []}]
    message = {"id": "msg-1", "type": "message", "role": "assistant", "content": content}
    done = status == "completed"
    return {
        "id": "resp-1",
        "object": "response",
        "model": said.model,
        "status": status,
        "output": [message] if done else [],
        "usage": _input_usage(said) if done else None,
    }


def _message(said: Said) -> Json:
    return {
        "id": "msg-1",
        "type": "message",
        "role": "assistant",
        "model": said.model,
        "content": [{"type": "text", "text": said.text}],
        "stop_reason": "end_turn",
        "usage": _cache_usage(said),
    }


def _data(event: object) -> bytes:
    return b"data: %b\n\n" % msgspec.json.encode(event)


def _named(event: Json) -> bytes:
    return b"event: %b\n%b" % (event["type"].encode(), _data(event))


DONE = b"data: [DONE]\n\n"


def _chat_events(said: Said) -> list[bytes]:
    def chunk(choices: list[Json], **members: object) -> bytes:
        kind = "chat.completion.chunk"
        return _data(
            {"id": "chatcmpl-1", "object": kind, "model": said.model, "choices": choices, **members}
        )

    deltas = [{"role": "assistant", "content": ""}, *({"content": word} for word in said.words)]
    events = [chunk(_choice(delta=delta, finish_reason=None)) for delta in deltas]
    events.append(chunk(_choice(delta={"content": ""}, finish_reason=said.finish)))
    return [*events, *([chunk([], usage=_usage(said))] if said.usage else []), DONE]


def _text_events(said: Said) -> list[bytes]:
    def chunk(choices: list[Json], **members: object) -> bytes:
        kind = "text_completion"
        return _data(
            {"id": "cmpl-1", "object": kind, "model": said.model, "choices": choices, **members}
        )

    last = len(said.words) - 1
    events = [
        chunk(_choice(text=word, finish_reason=said.finish if n == last else None))
        for n, word in enumerate(said.words)
    ]
    return [*events, *([chunk([], usage=_usage(said))] if said.usage else []), DONE]


def _response_events(said: Said) -> list[bytes]:
    def numbered(events: Sequence[Json]) -> list[bytes]:
        return [_named(event | {"sequence_number": n}) for n, event in enumerate(events)]

    place = {"item_id": "msg-1", "output_index": 0, "content_index": 0}
    begun, ended = _response(said, status="in_progress"), _response(said)
    (item,) = ended["output"]
    (part,) = item["content"]
    empty, blank = item | {"content": []}, part | {"text": ""}
    deltas = [{"type": "response.output_text.delta", "delta": word, **place} for word in said.words]
    return numbered(
        [
            {"type": "response.created", "response": begun},
            {"type": "response.in_progress", "response": begun},
            {"type": "response.output_item.added", "item": empty, "output_index": 0},
            {"type": "response.content_part.added", "part": blank, **place},
            *deltas,
            {"type": "response.output_text.done", "text": said.text, **place},
            {"type": "response.content_part.done", "part": part, **place},
            {"type": "response.output_item.done", "item": item, "output_index": 0},
            {"type": "response.completed", "response": ended},
        ]
    )


def _message_events(said: Said) -> list[bytes]:
    begun = _message(said) | {"content": [], "stop_reason": None}
    block = {"type": "text", "text": ""}
    deltas = [{"type": "text_delta", "text": word} for word in said.words]
    end = {"stop_reason": "end_turn"}
    return [
        _named({"type": "message_start", "message": begun}),
        _named({"type": "content_block_start", "index": 0, "content_block": block}),
        *(_named({"type": "content_block_delta", "index": 0, "delta": each}) for each in deltas),
        _named({"type": "content_block_stop", "index": 0}),
        _named({"type": "message_delta", "delta": end, "usage": _cache_usage(said)}),
        _named({"type": "message_stop"}),
    ]


WHOLE: dict[str, Callable[[Said], Json]] = {
    CHAT: _chat,
    TEXT: _text,
    RESPONSES: _response,
    MESSAGES: _message,
}
"""How a whole answer looks, by path."""

STREAMED: dict[str, Callable[[Said], list[bytes]]] = {
    CHAT: _chat_events,
    TEXT: _text_events,
    RESPONSES: _response_events,
    MESSAGES: _message_events,
}
"""What the events of a stream are, by path."""
