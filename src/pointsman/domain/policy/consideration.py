"""What a policy thinks of its candidates: the answer to "why this worker?", for people.

A policy may have a `consider` method beside `pick`. It says what the next pick would be and how each candidate was
judged, and it must leave the policy as it is: no counter moves and no random number is drawn. A policy without it works
all the same; an explanation then shows loads and no scores.

The simplest `consider` that cannot disagree with `pick` lets a copy of the policy pick.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from msgspec import Struct

from pointsman.domain.worker import Worker

if TYPE_CHECKING:
    from pointsman.domain.request import InferenceRequest

__all__ = ["Consideration", "Considers"]


class Consideration(Struct, frozen=True, kw_only=True):
    """How a policy judges its candidates.

    `pick` is the next pick, None where only chance decides; `reason` is the policy's word for it. `scores` and `notes`
    are parallel to the candidates; whether the highest or the lowest score wins is said by `rule`, one sentence. With
    `repeatable` all of this depends on the candidates, their loads and the request alone, so that an old pick can be
    explained from what is known of it.

    >>> a = Worker("a", model="m", http_address="127.0.0.1:8001")
    >>> Consideration(pick=a, reason="turn", scores=(1.0,), notes=("",)).repeatable
    False
    """

    pick: Worker | None
    reason: str
    scores: tuple[float | None, ...]
    notes: tuple[str, ...]
    rule: str = ""
    repeatable: bool = False


@runtime_checkable
class Considers(Protocol):
    """A policy that can say what it thinks."""

    def consider(
        self,
        workers: tuple[Worker, ...],
        load: Callable[[Worker], int],
        request: "InferenceRequest",
    ) -> Consideration:
        """Return what `pick` would answer next to the same arguments, and why, changing nothing."""
        ...
