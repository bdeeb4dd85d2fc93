"""What the hand-offs of engines that were not built for ours have in common, as pure functions over bodies.

Each of two workers gets a body of its own, spliced out of the client's. What is meant for one never reaches the other:
the prefill worker is to compute a prompt and one token, whatever the client asked for beyond that.
"""

from collections.abc import Mapping

import msgspec
from msgspec import Struct

from pointsman.dialect.paths import CHAT, TEXT
from pointsman.wire.body import readable, with_fields, without_fields

__all__ = ["Wish", "host_and_port", "prefill_body", "prompts_of", "text_prompt", "wish"]

ABSENT = msgspec.Raw(b"")


class Wish(Struct):
    """What of a request decides whether two workers can share it. Whatever it is not read as, is left as it came."""

    n: object = None
    best_of: object = None
    use_beam_search: object = None
    echo: object = None
    logprobs: object = None
    prompt_logprobs: object = None
    return_hidden_states: object = None
    min_tokens: object = None
    prompt: object = None
    messages: object = None
    kv_transfer_params: object = None
    bootstrap_room: object = None
    id_slot: object = None

    @property
    def shared(self) -> bool:
        """Whether there is one answer, of which nothing but the generated tokens is told, and no hand-off in it yet."""
        return not (
            self.n not in (None, 1)
            or self.best_of not in (None, 1)
            or self.use_beam_search
            or self.prompt_logprobs is not None
            or self.return_hidden_states
            or (self.echo and self.logprobs is not None and self.logprobs is not False)
            or self.kv_transfer_params is not None
            or self.bootstrap_room is not None
            or self.id_slot is not None
        )

    @property
    def prompts(self) -> int:
        """How many prompts stand in an array; 0 where there is one, not in an array of prompts."""
        prompt = self.prompt
        if not isinstance(prompt, list) or all(isinstance(item, int) for item in prompt):
            return 0
        return len(prompt)

    @property
    def text_alone(self) -> bool:
        """Whether no message has a part that is anything but text."""
        messages = self.messages if isinstance(self.messages, list) else []
        contents = [message.get("content") for message in messages if isinstance(message, dict)]
        parts = [part for content in contents if isinstance(content, list) for part in content]
        return all(isinstance(part, dict) and part.get("type") == "text" for part in parts)


decode_wish = msgspec.json.Decoder(Wish).decode


def wish(path: str, body: bytes) -> Wish | None:
    """Read what decides about a hand-off, None where there can be none. `body` has passed `parse_request`.

    That skips what it does not look at. So there may be numbers beyond all bounds in it, text that is no UTF-8, and
    levels more than can be read from here: what becomes of those is for one engine to say.

    >>> wish("/v1/completions", b'{"prompt":["a","b"]}').prompts, wish("/v1/completions", b'{"prompt":[1,2]}').prompts
    (2, 0)
    """
    if path not in (CHAT, TEXT):
        return None
    try:
        wished = readable(decode_wish, body)
    except (msgspec.DecodeError, RecursionError):
        return None
    asked = wished.messages if path == CHAT else wished.prompt
    other = wished.prompt if path == CHAT else wished.messages
    # Of two, the workers may read different ones.
    return wished if asked and isinstance(asked, str | list) and other is None else None


def prompts_of(path: str, body: bytes) -> int:
    """Return how many prompts a request has in an array; 0 for the one prompt of most requests."""
    wished = wish(path, body)
    return 0 if wished is None else wished.prompts


def text_prompt(path: str, body: bytes) -> bytes | None:
    """Return the prompt of a completion as a JSON string, None where it is none."""
    if path != TEXT:
        return None
    try:
        prompt = bytes(readable(decode_prompt, body).prompt)
    except RecursionError:
        return None
    return prompt if prompt[:1] == b'"' else None


class _Prompt(Struct):
    prompt: msgspec.Raw = ABSENT


decode_prompt = msgspec.json.Decoder(_Prompt).decode


def prefill_body(path: str, body: bytes, served: str, fields: Mapping[str, bytes]) -> bytes:
    """Return what a prefill worker gets: the client's prompt, one token, no stream, and the fields of the connector.

    A minimum of tokens would keep it generating, or be refused beside a maximum of one. `fields` are raw JSON.
    """
    told = {"model": msgspec.json.encode(served), "stream": b"false", "max_tokens": b"1"}
    if path == CHAT:
        told["max_completion_tokens"] = b"1"
    return with_fields(without_fields(body, ("stream_options", "min_tokens")), {**told, **fields})


def host_and_port(host: str, port: int) -> str:
    """Write an address as URLs do.

    >>> host_and_port("10.0.0.7", 8998), host_and_port("fd00::7", 8998)
    ('10.0.0.7:8998', '[fd00::7]:8998')
    """
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
