"""What polling found out about an engine that sends no heartbeats, and what it means for who is up.

One answer says little: a probe that is lost once is no death, and an engine that answered once may still be starting.
So it takes `misses` bad rounds in a row to give a worker up, and `hits` good ones to take it back. A worker that has
never been up is taken with its first good round: nobody waits for a fleet that is there.
"""

from msgspec import Struct

from pointsman.domain.worker import ServedModel

__all__ = ["Health", "Observation"]


class Observation(Struct, frozen=True, kw_only=True):
    """The state of a worker after a round of probes, in the words of `Worker`.

    -1 stands for a number that the engine does not say, "" for a text. `stale` says that some of it is from an earlier
    round, as an answer was lost.
    """

    up: bool
    dialect: str
    model: str
    served: tuple[ServedModel, ...] = ()
    draining: bool = False
    degraded: str = ""
    running: int = 0
    queue_depth: int = 0
    kv_free_blocks: int = 0
    kv_total_blocks: int = 0
    kv_tokens: int = 0
    lora_slots: int = 0
    slots: int = 0
    max_model_len: int = 0
    kv_usage: float = -1.0
    cached_tokens: int = -1
    remote_tokens: int = -1
    stale: bool = False


class Health:
    """Whether a worker is up, by what became of its rounds.

    `misses` and `hits` are 1 or more.

    >>> health = Health(misses=3, hits=2)
    >>> [health.after(good=good) for good in (True, False, False, False, True, True)]
    [True, True, True, False, False, True]
    """

    __slots__ = ("_hits", "_known", "_misses", "_run", "up")

    def __init__(self, *, misses: int, hits: int) -> None:
        self._misses = misses
        self._hits = hits
        self._known = False
        self._run = 0
        self.up = False

    def after(self, *, good: bool) -> bool:
        """Take note of a round, and return whether the worker is up."""
        if good == self.up:
            self._run = 0
            return self.up
        self._run += 1
        if good and (not self._known or self._run >= self._hits):
            self.up, self._known, self._run = True, True, 0
        elif not good and self._run >= self._misses:
            self.up, self._run = False, 0
        return self.up
