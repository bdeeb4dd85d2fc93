"""What became of simulated requests, a number per request and kind, in the order in which they ended."""

from array import array
from collections.abc import Sequence

__all__ = ["Outcome"]


class Outcome:
    """The requests of one run. Times are in seconds; a request that nobody could take is in `refused` alone.

    `at` is when it came, `ttft` how long until its first token, `e2e` until its last, `tpot` the time per token in
    between (0 for one token), `prompt` and `cached` its tokens and those that were found in a cache, `worker` the index
    of the engine that answered, `attempts` how many it was sent to. `busy_s` has the seconds that each engine computed,
    `span_s` is when the last request ended.
    """

    def __init__(self, engines: int) -> None:
        self.at = array("d")
        self.ttft = array("d")
        self.tpot = array("d")
        self.e2e = array("d")
        self.prompt = array("q")
        self.output = array("q")
        self.cached = array("q")
        self.worker = array("i")
        self.attempts = array("i")
        self.refused = 0
        self.busy_s: Sequence[float] = [0.0] * engines
        self.span_s = 0.0

    def __len__(self) -> int:
        return len(self.at)

    def to_bytes(self) -> bytes:
        """Return all of it, to compare runs."""
        arrays = (self.at, self.ttft, self.tpot, self.e2e, self.prompt, self.cached, self.worker)
        return b"".join(each.tobytes() for each in arrays)
