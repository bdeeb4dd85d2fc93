"""Logprobs in requests and answers: asking for what a cascade's rule needs, and taking out what no client asked for.

Nothing is re-serialised: a request gets members, an answer loses values, every other byte stays. What the numbers mean
is in `pointsman.domain.scores`; reading a whole answer is `pointsman.domain.cascade.tokens_of`.
"""

import math
import re
from collections.abc import Sequence

import msgspec

from pointsman.domain.cascade import Logprobs
from pointsman.domain.scores import Tokens
from pointsman.wire.body import elements, members, readable, with_fields
from pointsman.wire.sse import DONE, EventCut, data_of

__all__ = ["StreamTokens", "asked", "forced", "text_of", "usage_of", "without_logprobs"]

COMPLETIONS = "/v1/completions"
ABSENT = msgspec.Raw(b"")
TRUE = b"true"
NULL = b"null"
NOTHING = {b"", b"null", b"false"}


class Wanted(msgspec.Struct):
    """What a request says of logprobs."""

    logprobs: msgspec.Raw = ABSENT
    top_logprobs: msgspec.Raw = ABSENT


decode_wanted = msgspec.json.Decoder(Wanted).decode


def asked(path: str, body: bytes) -> bool:
    """Tell whether the client wants logprobs. `body` has passed `parse_request`.

    For a plain completion 0 is a wish, too: the logprobs of the tokens, and no others.

    >>> asked("/v1/completions", b'{"logprobs":0}'), asked("/v1/chat/completions", b'{"logprobs":false}')
    (True, False)
    """
    wish = bytes(_wanted(body).logprobs)
    return wish not in NOTHING if path == COMPLETIONS else wish == TRUE


def forced(path: str, body: bytes, *, margins: bool) -> dict[str, bytes]:
    """Return the top-level members to set in a request so that the answer tells of every token.

    With `margins` the two best tokens of every position are asked for. A client's larger number stays. `body` has
    passed `parse_request`.

    >>> forced("/v1/completions", b'{"logprobs":5}', margins=True), forced("/v1/completions", b"{}", margins=True)
    ({'logprobs': b'5'}, {'logprobs': b'2'})
    >>> forced("/v1/chat/completions", b"{}", margins=False)
    {'logprobs': b'true'}
    """
    wanted = _wanted(body)
    if path == COMPLETIONS:
        return {"logprobs": _at_least(2 if margins else 1, wanted.logprobs)}
    if not margins:
        return {"logprobs": TRUE}
    return {"logprobs": TRUE, "top_logprobs": _at_least(2, wanted.top_logprobs)}


def _wanted(body: bytes) -> Wanted:
    try:
        return readable(decode_wanted, body)
    # Of the levels that `parse_request` could read there are fewer to be had from here.
    except RecursionError:
        return Wanted()


def _at_least(number: int, wish: msgspec.Raw) -> bytes:
    raw = bytes(wish)
    # Digits alone: no sign, fraction or exponent, none of which an engine takes.
    return raw if raw.isdigit() and len(raw) < 10 and int(raw) > number else b"%d" % number


KEY = re.compile(rb'"logprobs"\s*+:\s*+')
LETTER = re.compile(rb"\\u00[67]")
"""The escapes of lower-case letters, which may spell any key."""


class Told(msgspec.Struct):
    """A choice with what it tells of its tokens."""

    logprobs: msgspec.Raw = ABSENT


class Choices(msgspec.Struct):
    """The choices of an answer or event."""

    choices: list[Told] = []


class Object(msgspec.Struct):
    """Any JSON object."""


decode_choices = msgspec.json.Decoder(Choices).decode
decode_object = msgspec.json.Decoder(Object).decode


def without_logprobs(body: bytes) -> bytes:
    """Return a JSON answer, or an event's data, with every choice's `logprobs` null and every other byte as it was.

    What is no JSON object passes untouched, and so do `logprobs` elsewhere. O(size of the body).

    >>> without_logprobs(b'{"choices":[ {"text":"a","logprobs": {"content":[]}} ],"logprobs":1}')
    b'{"choices":[ {"text":"a","logprobs": null} ],"logprobs":1}'
    """
    written = body.count(b'"logprobs"')
    spelled = LETTER.search(body) is not None
    if not written and not spelled:
        return body
    if not spelled and (lengths := _lengths(body)) is not None and len(lengths) == written:
        # As many as there are choices with the key, each of which has it at least once: these are the keys. The values
        # are most of an answer, and this skips them at the speed of the decoder.
        return _spliced(body, lengths)
    try:
        readable(decode_object, body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body
    parts: list[bytes] = []
    position = 0
    for key, start, end in members(body):
        if key == "choices" and body.startswith(b"[", start):
            parts += body[position:start], _choices_without(body[start:end])
            position = end
    parts.append(body[position:])
    return b"".join(parts)


def _lengths(body: bytes) -> list[int] | None:
    """Return the length of each choice's `logprobs`, None for what is no answer."""
    try:
        choices = readable(decode_choices, body).choices
    except (ValueError, RecursionError):
        return None
    return [len(bytes(choice.logprobs)) for choice in choices if choice.logprobs]


def _spliced(body: bytes, lengths: Sequence[int]) -> bytes:
    """Return the body with null for the values, of these lengths, of all keys `logprobs`."""
    parts: list[bytes] = []
    position = 0
    for key, length in zip(KEY.finditer(body), lengths, strict=True):
        parts += body[position : key.end()], NULL
        position = key.end() + length
    parts.append(body[position:])
    return b"".join(parts)


def _choices_without(choices: bytes) -> bytes:
    parts: list[bytes] = []
    position = 0
    for start, end in elements(choices):
        choice = choices[start:end]
        if choice.startswith(b"{") and any(key == "logprobs" for key, _, _ in members(choice)):
            parts += choices[position:start], with_fields(choice, {"logprobs": NULL})
            position = end
    parts.append(choices[position:])
    return b"".join(parts)


class Part(msgspec.Struct):
    """One choice of an event."""

    index: int = 0
    logprobs: Logprobs | None = None
    finish_reason: str | None = None


class Event(msgspec.Struct):
    """What is read of an event of a stream: the other fields may be anything."""

    choices: list[Part] | None = None
    error: msgspec.Raw = ABSENT


decode_event = msgspec.json.Decoder(Event).decode


class StreamTokens:
    """Collects what a stream says of the tokens of its first choice, as it arrives.

    Events without choices, comments, and deltas without logprobs add nothing. An event that cannot be read, or tells of
    an error, counts as one token of which nothing is known: no rule accepts what it cannot see whole.
    """

    __slots__ = ("_events", "_logprobs", "_margins", "ended")

    ended: bool
    """Whether the choice has a finish reason, or the stream its last event."""

    def __init__(self) -> None:
        self._events = EventCut()
        self._logprobs: list[float] = []
        self._margins: list[float] = []
        self.ended = False

    @property
    def count(self) -> int:
        """Tokens so far."""
        return len(self._logprobs)

    @property
    def tokens(self) -> Tokens:
        """What is said of the tokens so far; later events do not change it."""
        return Tokens(tuple(self._logprobs), tuple(self._margins))

    def feed(self, data: bytes) -> None:
        """Take a piece of the body, plain SSE, cut anywhere."""
        for event in self._events.feed(data):
            if (content := data_of(event)) == DONE:
                self.ended = True
            elif content:
                self._read(content)

    def _read(self, content: bytes) -> None:
        try:
            event = readable(decode_event, content)
            if bytes(event.error) not in NOTHING:
                self._add(UNKNOWN)
            for part in event.choices or ():
                if part.index == 0:
                    if part.logprobs is not None and not part.logprobs.silent:
                        self._add(part.logprobs.tokens())
                    # Some engines write "" for none.
                    self.ended = self.ended or bool(part.finish_reason)
        except (ValueError, RecursionError):
            self._add(UNKNOWN)

    def _add(self, tokens: Tokens) -> None:
        self._logprobs += tokens.logprobs
        self._margins += tokens.margins or [math.nan] * len(tokens.logprobs)


UNKNOWN = Tokens((math.nan,))


class Counts(msgspec.Struct):
    """The tokens of a JSON answer; embeddings have no completion."""

    prompt_tokens: int
    completion_tokens: int = 0


class Call(msgspec.Struct):
    """A tool call, of which nothing is read."""


class Message(msgspec.Struct):
    """What a model said in a chat."""

    content: str | None = None
    tool_calls: list[Call] | None = None


class Said(msgspec.Struct):
    """One choice of an answer."""

    text: str | None = None
    message: Message | None = None


class Answer(msgspec.Struct):
    """The choices of an answer."""

    choices: list[Said]


class Used(msgspec.Struct):
    """The usage of an answer."""

    usage: Counts


decode_answer = msgspec.json.Decoder(Answer).decode
decode_used = msgspec.json.Decoder(Used).decode


def usage_of(body: bytes) -> tuple[int, int] | None:
    """Return the prompt's and the completion's tokens of a JSON answer, None where it does not say.

    >>> usage_of(b'{"usage":{"prompt_tokens":7,"completion_tokens":2,"total_tokens":9}}'), usage_of(b"{}")
    ((7, 2), None)
    """
    try:
        usage = readable(decode_used, body).usage
    except (ValueError, RecursionError):
        return None
    return usage.prompt_tokens, usage.completion_tokens


def text_of(body: bytes) -> str | None:
    """Return what the first choice of a JSON answer says, None where it says nothing or calls a tool.

    >>> text_of(b'{"choices":[{"message":{"content":"Oslo"}}]}'), text_of(b'{"choices":[{"text":" Oslo"}]}')
    ('Oslo', ' Oslo')
    """
    try:
        choice = readable(decode_answer, body).choices[0]
    except (ValueError, IndexError, RecursionError):
        return None
    if choice.message is None:
        return choice.text
    return None if choice.message.tool_calls else choice.message.content
