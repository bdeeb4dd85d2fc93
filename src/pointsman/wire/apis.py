"""The APIs that the gateway routes, as a table: which fields of a body say the model, and which make the affinity key.

Only those top-level fields are read, and the rest of a body is never looked at. Every API has the text that an engine
computes first under names of its own: `messages`, `input`, `query`. Here they become the four that
`pointsman.domain.prefix` knows. A path that stands in no table is read like the chat and completions APIs.

What it does not do: say which engine serves what (`pointsman.dialect`), or check a body beyond what routing needs.
"""

import re
from collections.abc import Callable
from typing import ClassVar, Protocol

import msgspec
from msgspec import Struct, field

__all__ = ["CHAT", "MESSAGES", "Api", "Fields", "api_of", "is_messages"]

CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"

ABSENT = msgspec.Raw(b"")
USER = b'[{"role":"user","content":%b}]'


class Fields(Protocol):
    """What is read of a body: the model, whether it is to be streamed, and what the key is made of, as raw JSON."""

    @property
    def model(self) -> str:
        """The model that is asked for, "" where the body does not say."""

    @property
    def stream(self) -> msgspec.Raw:
        """The raw JSON of `stream`."""

    @property
    def system(self) -> msgspec.Raw:
        """A system text that is none of the messages."""

    @property
    def tools(self) -> msgspec.Raw:
        """The tools that the model may call."""

    @property
    def prompt(self) -> msgspec.Raw:
        """A text, token ids, or several of them."""

    @property
    def messages(self) -> msgspec.Raw:
        """The messages of a dialogue, in order."""


class _Asked(Struct):
    model: str = ""
    stream: msgspec.Raw = ABSENT


class _Chat(_Asked):
    prompt: msgspec.Raw = ABSENT
    messages: msgspec.Raw = ABSENT
    tools: msgspec.Raw = ABSENT
    system: ClassVar[msgspec.Raw] = ABSENT


class _Responses(_Asked):
    system: msgspec.Raw = field(default=ABSENT, name="instructions")
    tools: msgspec.Raw = ABSENT
    input: msgspec.Raw = ABSENT
    prompt: ClassVar[msgspec.Raw] = ABSENT

    @property
    def messages(self) -> msgspec.Raw:
        """The items of the input; a text alone is a message of the user."""
        given = self.input
        text = bytes(memoryview(given)[:1]) == b'"'
        return msgspec.Raw(USER % bytes(given)) if text else given


class _Messages(_Asked):
    system: msgspec.Raw = ABSENT
    tools: msgspec.Raw = ABSENT
    messages: msgspec.Raw = ABSENT
    prompt: ClassVar[msgspec.Raw] = ABSENT


class _Input(_Asked):
    prompt: msgspec.Raw = field(default=ABSENT, name="input")
    messages: msgspec.Raw = ABSENT
    system: ClassVar[msgspec.Raw] = ABSENT
    tools: ClassVar[msgspec.Raw] = ABSENT


class _Query(_Asked):
    query: msgspec.Raw = ABSENT
    queries: msgspec.Raw = ABSENT
    text_1: msgspec.Raw = ABSENT
    messages: ClassVar[msgspec.Raw] = ABSENT
    system: ClassVar[msgspec.Raw] = ABSENT
    tools: ClassVar[msgspec.Raw] = ABSENT

    @property
    def prompt(self) -> msgspec.Raw:
        """What all of the documents are compared with, under the first of its names that is there."""
        return self.query or self.text_1 or self.queries


class _Tokens(_Asked):
    prompt: msgspec.Raw = field(default=ABSENT, name="tokens")
    messages: ClassVar[msgspec.Raw] = ABSENT
    system: ClassVar[msgspec.Raw] = ABSENT
    tools: ClassVar[msgspec.Raw] = ABSENT


class Api(Struct, frozen=True):
    """One path: how its JSON is read, and whether it also takes forms."""

    path: str
    decode: Callable[[bytes], Fields]
    form: bool = False


_decode_chat: Callable[[bytes], Fields] = msgspec.json.Decoder(_Chat).decode
_decode_responses: Callable[[bytes], Fields] = msgspec.json.Decoder(_Responses).decode
_decode_messages: Callable[[bytes], Fields] = msgspec.json.Decoder(_Messages).decode
_decode_input: Callable[[bytes], Fields] = msgspec.json.Decoder(_Input).decode
_decode_query: Callable[[bytes], Fields] = msgspec.json.Decoder(_Query).decode
_decode_tokens: Callable[[bytes], Fields] = msgspec.json.Decoder(_Tokens).decode

JSON: dict[str, Callable[[bytes], Fields]] = {
    "chat/completions": _decode_chat,
    "completions": _decode_chat,
    "responses": _decode_responses,
    "responses/input_tokens": _decode_responses,
    "messages": _decode_messages,
    "messages/count_tokens": _decode_messages,
    "embeddings": _decode_input,
    "pooling": _decode_input,
    "classify": _decode_input,
    "rerank": _decode_query,
    "score": _decode_query,
    "tokenize": _decode_chat,
    "detokenize": _decode_tokens,
}
"""By path, without the version that stands before it."""

VERSION = re.compile(r"/(?:v\d+/)?")


def api_of(path: str) -> Api:
    """Return how a path is read.

    >>> api_of("/v1/rerank").decode == api_of("/v2/rerank").decode == api_of("/rerank").decode
    True
    >>> api_of("/v1/chat/completions").form, api_of("/v1/audio/transcriptions").form, api_of("/mine").form
    (False, True, True)
    """
    decode = JSON.get(VERSION.sub("", path, count=1))
    return Api(path, decode or _decode_chat, form=decode is None)


def is_messages(path: str) -> bool:
    """Tell whether a path is one of the Messages API, whose clients expect other errors and events.

    >>> is_messages("/v1/messages"), is_messages("/v1/messages/count_tokens"), is_messages("/v1/messages_of_mine")
    (True, True, False)
    """
    return path == MESSAGES or path.startswith(MESSAGES + "/")
