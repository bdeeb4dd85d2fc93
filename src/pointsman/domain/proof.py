"""Whether prompts that were handed over really arrived: read off a counter, where answers do not say it.

A hand-off can go wrong without any error: the decode worker cannot fetch what was computed for it, computes the prompt
again, and answers as if nothing had been. Some engines only tell of it by a counter of all prompt tokens that they got
from others. A hand-off that worked moves it. So where it stood still from before a hand-off began to two readings that
lie wholly after it, that hand-off brought nothing.

It errs to one side: one hand-off that worked hides all others that were under way with it, so what it counts is too
little and never too much, with one exception. An engine whose own cache has all of a prompt need not fetch anything.

It reads no counter and knows no worker; see `pointsman.observe.proofs`.
"""

import math

__all__ = ["Proof"]

READINGS = 3
"""Readings for a verdict: the first one may have begun before the hand-off ended, two lie wholly after it."""


class Proof:
    """The hand-offs to one engine, against its counter. All times are seconds of one monotonic clock.

    `recomputed` is how many of them brought nothing; it never goes back.

    >>> proof = Proof()
    >>> proof.read(700, now=1.0)
    >>> proof.handed_over(began=2.0)
    >>> for now in (3.0, 5.0, 7.0):
    ...     proof.read(700, now=now)
    >>> proof.recomputed
    1
    """

    __slots__ = ("_counter", "_moved_at", "_waiting", "recomputed")

    def __init__(self) -> None:
        self.recomputed = 0
        self._counter = -1
        self._moved_at = math.inf
        # By how many readings they have seen. Which hand-offs those are does not matter.
        self._waiting = [0] * READINGS

    def handed_over(self, began: float) -> None:
        """Take note of a hand-off that is over; the decode worker was asked at `began`.

        >>> proof = Proof()
        >>> proof.handed_over(began=2.0)  # nobody knows where the counter stood
        >>> proof.recomputed
        0
        """
        if self._moved_at <= began:
            self._waiting[0] += 1

    def read(self, counter: int, now: float) -> None:
        """Take note of a new reading; -1 where the engine did not say.

        A counter that fell is that of an engine which began anew.

        >>> proof = Proof()
        >>> proof.read(700, now=1.0)
        >>> proof.handed_over(began=2.0)
        >>> for now in (3.0, 5.0, 7.0):
        ...     proof.read(828, now=now)
        >>> proof.recomputed
        0
        """
        if counter < 0:
            return
        if counter != self._counter:
            self._counter = counter
            self._moved_at = now
            self._waiting = [0] * READINGS
            return
        self.recomputed += self._waiting.pop()
        self._waiting.insert(0, 0)
