"""The vocabulary between a story and its driver.

A story (`attempts`) is a generator that yields commands and gets results back. It does no I/O and knows no event loop,
so a test plays the driver and reads as a dialogue. The driver (`pointsman.net.driver`) performs them on sockets.

A story ends by returning after a `Relay`, or by raising a `GatewayError`, which the driver answers.
A client that leaves is thrown into the story as `ClientGone`.
"""

from collections.abc import Generator
from enum import StrEnum

from pointsman.domain.router import Target
from pointsman.wire.http1 import ResponseHead

__all__ = [
    "Answer",
    "Broken",
    "ClientGone",
    "Command",
    "Done",
    "Flow",
    "Lost",
    "Relay",
    "Result",
    "Send",
    "Why",
]


class Why(StrEnum):
    """How an attempt, or a committed answer, failed."""

    REFUSED = "refused"  # no connection
    RESET = "reset"  # the connection ended before the answer did
    TIMED_OUT = "timed out"  # one of the limits of the configuration
    PROTOCOL = "protocol"  # what came is not HTTP/1.1, or not the answer that its head promised
    EVICTED = "evicted"  # the registry gave the worker up
    SHUTDOWN = "shutdown"  # the gateway's own drain deadline passed


class Send:
    """Send the request to the target, and wait for an answer that can be judged.

    That is the head with the first body bytes of an event stream, and the whole of any other answer, up to
    `hold_bytes`. Gives Answer or Lost.
    """

    __slots__ = ("target",)

    def __init__(self, target: Target) -> None:
        self.target = target


class Relay:
    """Commit to an answer: pass it to the client, and pump the rest of it. Gives Done or Broken."""

    __slots__ = ("answer",)

    def __init__(self, answer: "Answer") -> None:
        self.answer = answer


class Answer:
    """What an engine answered, not yet shown to anybody.

    `body` is what arrived of the body, in the engine's framing; `complete` says whether that is all of it.
    """

    __slots__ = ("body", "complete", "head")

    def __init__(self, head: ResponseHead, body: bytes, complete: bool) -> None:
        self.head = head
        self.body = body
        self.complete = complete

    def __repr__(self) -> str:
        return f"Answer({self.head.status})"


class Lost:
    """The attempt failed before anything reached the client."""

    __slots__ = ("detail", "why")

    def __init__(self, why: Why, detail: str = "") -> None:
        self.why = why
        self.detail = detail

    def __repr__(self) -> str:
        return f"Lost({self.why}, {self.detail!r})"


class Done:
    """The answer reached the client, to its end."""

    __slots__ = ()


class Broken:
    """The answer broke after the commit; the driver has told the client as far as HTTP allows.

    `told` says whether the client's message could be ended in good order, so that its connection can go on.
    """

    __slots__ = ("told", "why")

    def __init__(self, why: Why, told: bool = False) -> None:
        self.why = why
        self.told = told


class ClientGone(Exception):
    """The client closed its connection; nothing more can be said to it."""


Command = Send | Relay
Result = Answer | Lost | Done | Broken
Flow = Generator[Command, Result, None]
