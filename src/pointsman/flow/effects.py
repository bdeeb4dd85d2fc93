"""The vocabulary between a story and its driver.

A story (`attempts`, `cascade`) is a generator that yields commands and gets results back. It does no I/O and knows no
event loop, so a test plays the driver and reads as a dialogue. The driver (`pointsman.net.driver`) performs them on
sockets.

A story ends by returning after a `Relay`, or by raising a `GatewayError`, which the driver answers.
A client that leaves is thrown into the story as `ClientGone`. What must be done whatever becomes of the story, it puts
into `Exchange.after`, and need not wait for: a client that has left gets no command performed any more.

The values are msgspec structs, which are made in C: a request makes half a dozen of them.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from enum import StrEnum
from math import inf
from typing import Protocol, TypeAlias

from msgspec import Struct

from pointsman.domain.router import Target
from pointsman.wire.call import HttpCall, RpcCall
from pointsman.wire.framing import payload
from pointsman.wire.http1 import Framing, ResponseHead

__all__ = [
    "After",
    "Answer",
    "Both",
    "Broken",
    "Call",
    "ClientGone",
    "Command",
    "Done",
    "Encode",
    "Encoded",
    "Flow",
    "Held",
    "Hold",
    "Lost",
    "More",
    "Outcome",
    "Pair",
    "PromptText",
    "Relay",
    "Result",
    "Returned",
    "Send",
    "Status",
    "Tokenizer",
    "Why",
]

UNCHANGED: Mapping[str, bytes] = {}

PromptText: TypeAlias = str | Sequence[Mapping[str, str]]
"""A text, or the messages of a chat, each with `role` and `content`."""


class Why(StrEnum):
    """How an attempt, or a committed answer, failed."""

    REFUSED = "refused"  # no connection
    RESET = "reset"  # the connection ended before the answer did
    TIMED_OUT = "timed out"  # one of the limits of the configuration
    PROTOCOL = "protocol"  # what came is not HTTP/1.1, or not the answer that its head promised
    EVICTED = "evicted"  # the registry gave the worker up
    SHUTDOWN = "shutdown"  # the gateway's own drain deadline passed
    TOKENIZE = "tokenize"  # the prefill worker could not say what the tokens of the prompt are
    PREFILL = "prefill"  # the prefill worker could not compute them, or not hand them over
    HANDLE = "handle"  # the decode worker does not know what was handed over to it


class Send(Struct, frozen=True, eq=False, gc=False):
    """Send the request to the target, and wait for an answer that can be judged.

    That is the head with the first body bytes of an event stream, and the whole of any other answer, up to
    `hold_bytes`, or up to `hold` where that is not 0. `fields` are top-level members of the body to set, as raw JSON;
    `headers` are header lines of the gateway's own; `request_id` is what the worker calls the request, "" for its own
    id. Gives Answer or Lost.
    """

    target: Target
    fields: Mapping[str, bytes] = UNCHANGED
    headers: bytes = b""
    hold: int = 0
    request_id: str = ""


class More(Struct, frozen=True, eq=False, gc=False):
    """Wait for more of an answer that has not been committed, at most until `until` (monotonic seconds).

    Gives the answer as far as it is there then, or Lost.
    """

    answer: "Answer"
    until: float = inf


class Relay(Struct, frozen=True, eq=False, gc=False):
    """Commit to an answer: pass it to the client, and pump the rest of it. Gives Done or Broken.

    `edits` change the JSON of a whole answer, or of every event of a stream, on its way; mostly there are none.
    """

    answer: "Answer"
    edits: Sequence[Callable[[bytes], bytes]] = ()


class Call(Struct, frozen=True, eq=False, gc=False):
    """Ask a worker something beside the request itself. Gives Answer or Lost for HTTP, Returned or Status for gRPC.

    An answer comes whole, whatever its length. Where `settle` is given, a client that leaves does not end the call:
    it goes on, and what `settle` returns for its outcome is called then, so that a worker can be told what it only
    has once it has done what it was asked.
    """

    call: HttpCall | RpcCall
    settle: "Callable[[Outcome], Sequence[HttpCall | RpcCall]] | None" = None


class Both(Struct, frozen=True, eq=False, gc=False):
    """Make a call and send the request, at the same time. Gives a Pair.

    As soon as one of them fails, or is answered by an error, the other is given up.
    """

    call: Call
    send: Send


class Tokenizer(Protocol):
    """A tokenizer of the gateway's own. Long texts take it long, so the driver lets it work in a thread."""

    @property
    def chats(self) -> bool:
        """Whether it knows how messages become a text."""

    def encode(self, prompt: PromptText) -> list[int]:
        """Return the token ids of a prompt. Raises whatever goes wrong; the driver makes that Lost."""


class Encode(Struct, frozen=True, eq=False, gc=False):
    """Let a tokenizer of the gateway's own say what the tokens are. Gives Encoded, or Lost after `timeout_s`."""

    tokenizer: Tokenizer
    prompt: PromptText
    timeout_s: float


class After(Struct, frozen=True, eq=False, gc=False):
    """Calls to make one after another, whatever becomes of the request. `then` hears the outcome of the last one.

    Nobody is worse off without those that are `optional`: only a few are under way at a time, and the end of the
    gateway gives them up.
    """

    calls: Sequence[HttpCall | RpcCall]
    then: "Callable[[Outcome], None] | None" = None
    optional: bool = False


class Hold(Struct, frozen=True, eq=False):
    """Wait until `ready` says that it is time to go on, at most until `until` (monotonic seconds). Gives Held.

    `ready` is asked, with the time, whenever something has changed about who may take requests, and those who have
    waited longer are asked before.
    """

    until: float
    ready: Callable[[float], bool]


class Answer(Struct, frozen=True, eq=False, gc=False):
    """What an engine answered, not yet shown to anybody.

    `body` is what arrived of the body, in the engine's framing; `complete` says whether that is all of it.
    """

    head: ResponseHead
    body: bytes
    complete: bool

    @property
    def payload(self) -> bytes:
        """What arrived of the body, without the framing."""
        return payload(self.body) if self.head.framing is Framing.CHUNKED else self.body

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


class Encoded(Struct, frozen=True, eq=False, gc=False):
    """The token ids of a prompt."""

    ids: list[int]


class Pair(Struct, frozen=True, eq=False, gc=False):
    """What became of a call and a request that were made at once; None for one that was given up."""

    called: "Outcome | None"
    answer: Answer | Lost | None


class Held(Struct, frozen=True, eq=False, gc=False):
    """How waiting ended: `ready`, or because its time was over or there was no room to wait."""

    ready: bool


class Returned(Struct, frozen=True, eq=False, gc=False):
    """What a gRPC call answered: the message, as bytes."""

    message: bytes


class Status(Struct, frozen=True, eq=False, gc=False):
    """How a gRPC call failed: the name of its status.

    `sent` says whether the callee may have seen the call; `stale`, whether it went out on a connection that had served
    before and turned out to be dead; `leg` is which worker the callee blames, "" where it does not say.
    """

    code: str
    detail: str = ""
    sent: bool = True
    stale: bool = False
    leg: str = ""

    def __repr__(self) -> str:
        return f"Status({self.code}, {self.detail!r})"


class ClientGone(Exception):
    """The client closed its connection; nothing more can be said to it."""


Command = Send | More | Relay | Call | Both | Encode | Hold
Outcome = Answer | Lost | Returned | Status
Result = Outcome | Pair | Encoded | Held | Done | Broken
Flow = Generator[Command, Result, None]
