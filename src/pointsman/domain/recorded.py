"""What the gateway writes down of a request that is over, one JSON line each, so that it can be simulated later.

There is all that a policy looked at (the blocks of the prompt, the candidates and their loads at that moment) and what
became of it, and no text: of a prompt there are hashes. They are the same for the same text, so whoever can guess a
prompt can see whether it was asked; a recording is to be kept like an access log.

Times are in seconds of the gateway's monotonic clock, but for `wall`. Who writes is `pointsman.observe.recording`, who
reads `pointsman.simulate.recorded`.
"""

from struct import Struct as Packed

import msgspec
from msgspec import Struct

__all__ = [
    "RecordedPick",
    "RecordedRequest",
    "RecordedWorker",
    "hashes_of",
    "read_line",
    "text_of",
    "write_line",
]


class RecordedWorker(Struct, frozen=True, kw_only=True, tag="worker", tag_field="kind"):
    """A worker as it was when a request first met it; it stands before that request."""

    id: str
    model: str
    role: str = "unified"
    kv_total_blocks: int = 0
    kv_tokens: int = 0


class RecordedPick(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One attempt: `worker` was picked at `at` for the policy's reason, and had the request until `over`.

    `reason` is what the pick is counted under, `policy_reason` the policy's own word. `loads` are parallel to
    `candidates`, whose number is `count`; both are empty where there were more than 64. `failure` is how it failed, ""
    where it did not.
    """

    at: float
    over: float
    worker: str
    reason: str
    policy_reason: str = ""
    count: int = 0
    candidates: tuple[str, ...] = ()
    loads: tuple[int, ...] = ()
    failure: str = ""


class RecordedRequest(
    Struct, frozen=True, kw_only=True, omit_defaults=True, tag="request", tag_field="kind"
):
    """One request: it came at `started` (`wall` in seconds since 1970) and was over at `ended`.

    `began` is when its first byte went out, 0.0 where none did. `prefix` is the hash of what the affinity policy looks
    at, `blocks` those of the leading blocks (see `hashes_of`); tokens of the prompt are an estimate, those of the
    answer are None where it did not say. `status` is what the client got.
    """

    wall: float
    started: float
    ended: float
    began: float = 0.0
    model: str
    status: int = 200
    stream: bool = False
    prefix: str = ""
    blocks: str = ""
    block_tokens: int = 128
    prompt_tokens: int = 0
    output_tokens: int | None = None
    picks: tuple[RecordedPick, ...] = ()


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(RecordedWorker | RecordedRequest)


def write_line(line: RecordedWorker | RecordedRequest) -> bytes:
    r"""Return the line, with its line feed.

    >>> write_line(RecordedWorker(id="a", model="m"))
    b'{"kind":"worker","id":"a","model":"m","role":"unified","kv_total_blocks":0,"kv_tokens":0}\n'
    """
    return _ENCODER.encode(line) + b"\n"


def read_line(line: bytes) -> RecordedWorker | RecordedRequest:
    """Read a line. Raises ValueError that says what is wrong with it.

    >>> read_line(write_line(RecordedWorker(id="a", model="m"))).id
    'a'
    """
    try:
        return _DECODER.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(str(error)) from None


def text_of(hashes: tuple[int, ...]) -> str:
    """Return hashes as text, 16 hexadecimal digits each.

    >>> text_of((10, 255))
    '000000000000000a00000000000000ff'
    """
    return Packed(f">{len(hashes)}Q").pack(*hashes).hex()


def hashes_of(text: str) -> tuple[int, ...]:
    """Return the hashes in a text. Raises ValueError where it is none.

    >>> hashes_of("000000000000000a00000000000000ff")
    (10, 255)
    """
    data = bytes.fromhex(text)
    if len(data) % 8:
        raise ValueError(f"{len(text)} digits are no whole number of hashes")
    return Packed(f">{len(data) // 8}Q").unpack(data)
