"""The vocabulary between a story and its driver.

A story (`attempts`) is a generator that yields commands and gets results back. It does no I/O and knows no event loop,
so a test plays the driver and reads as a dialogue. The driver (`pointsman.net.driver`) performs them on sockets.

A story ends by returning after a `Relay`, or by raising a `GatewayError`, which the driver answers.
A client that leaves is thrown into the story as `ClientGone`.

The values are msgspec structs, which are made in C: a request makes half a dozen of them.
"""

from collections.abc import Generator
from enum import StrEnum

from msgspec import Struct

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


class Send(Struct, frozen=True, eq=False, gc=False):
    """Send the request to the target, and wait for an answer that can be judged.

    That is the head with the first body bytes of an event stream, and the whole of any other answer, up to
    `hold_bytes`. Gives Answer or Lost.
    """

    target: Target


class Relay(Struct, frozen=True, eq=False, gc=False):
    """Commit to an answer: pass it to the client, and pump the rest of it. Gives Done or Broken."""

    answer: "Answer"


class Answer(Struct, frozen=True, eq=False, gc=False):
    """What an engine answered, not yet shown to anybody.

    `body` is what arrived of the body, in the engine's framing; `complete` says whether that is all of it.
    """

    head: ResponseHead
    body: bytes
    complete: bool

    def __repr__(self) -> str:
        return f"Answer({self.head.status})"


class Lost(Struct, frozen=True, eq=False, gc=False):
    """The attempt failed before anything reached the client."""

    why: Why
    detail: str = ""

    def __repr__(self) -> str:
        return f"Lost({self.why}, {self.detail!r})"


class Done(Struct, frozen=True, eq=False, gc=False):
    """The answer reached the client, to its end."""


class Broken(Struct, frozen=True, eq=False, gc=False):
    """The answer broke after the commit; the driver has told the client as far as HTTP allows.

    `told` says whether the client's message could be ended in good order, so that its connection can go on.
    """

    why: Why
    told: bool = False


class ClientGone(Exception):
    """The client closed its connection; nothing more can be said to it."""


Command = Send | Relay
Result = Answer | Lost | Done | Broken
Flow = Generator[Command, Result, None]
