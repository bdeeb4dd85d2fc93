"""What cascades have cost and gained so far, and how often the model that was kept agrees with the one that was not.

Every step but the last is counted. Of a sample of requests (`shadow`) the last model is asked as well, and how far the
two answers agree is kept beside the score that decided: the last few thousand of these pairs are the live curve. No
text is kept, only the two numbers.

Agreement is that of `pointsman.domain.judging`. For free text it is a coarse measure; for short answers it is close to
"the same answer".
"""

from collections import deque
from collections.abc import Iterator

from msgspec import Struct

__all__ = ["Calibrations", "Sample", "StepCounts"]

KEPT = 2000
"""Pairs that are kept for a step. A share of them has a standard error of 1.1 % at most."""


class Sample(Struct, frozen=True, gc=False):
    """One shadowed answer: its score (None: it had none), and how far it agrees with the last model's, 0 to 1."""

    value: float | None
    agreement: float


class StepCounts:
    """One step of one route: how many of its answers were kept, rejected for their score, had none, or did not come.

    What a rejected answer cost is in `prompt_tokens`, `completion_tokens` and `seconds`.
    """

    __slots__ = (
        "completion_tokens",
        "failed",
        "kept",
        "prompt_tokens",
        "rejected",
        "samples",
        "seconds",
        "unscored",
    )

    def __init__(self) -> None:
        self.kept = self.rejected = self.unscored = self.failed = 0
        self.prompt_tokens = self.completion_tokens = 0
        self.seconds = 0.0
        self.samples: deque[Sample] = deque(maxlen=KEPT)


class Calibrations:
    """The counts of all steps, by the route's model id and the number of the step."""

    def __init__(self) -> None:
        self._steps: dict[tuple[str, int], StepCounts] = {}

    def of(self, model: str, step: int) -> StepCounts:
        """Return the counts of a step, new ones where there are none.

        >>> calibrations = Calibrations()
        >>> calibrations.of("chat", 0).kept += 1
        >>> calibrations.of("chat", 0).kept
        1
        """
        counts = self._steps.get((model, step))
        if counts is None:
            counts = self._steps[model, step] = StepCounts()
        return counts

    def __iter__(self) -> Iterator[tuple[str, int, StepCounts]]:
        for (model, step), counts in tuple(self._steps.items()):
            yield model, step, counts
