"""What the admin API works on: the parts of a running gateway, handed in by whoever built them."""

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from pointsman.control.admin.shapes import Stats
from pointsman.control.changes import Changes
from pointsman.control.keyfile import KeyFile
from pointsman.control.reload import Configuration, Reload
from pointsman.domain.calibration import Calibrations
from pointsman.domain.explain import Decision
from pointsman.domain.registry import Registry
from pointsman.domain.request import InferenceRequest
from pointsman.domain.router import Router
from pointsman.domain.worker import Worker

__all__ = ["AdminParts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminParts:
    """The parts of a gateway that operators see and change.

    `keys` is None where there is no key file. `running` returns each request that is not over, as its worker and when
    it began. `decisions` finds records, newest first, by the keywords `model`, `worker` and `request_id` (None for
    any), at most `limit`. `parse` reads an inference body, given with the id of the request, as the data plane does.
    `reload` returns what became of it, whatever that is. `now` is monotonic, `wall` is Unix time, both in seconds.
    `recomputed` returns how many hand-offs brought a worker nothing.
    """

    registry: Registry
    router: Router
    changes: Changes
    keys: KeyFile | None
    running: Callable[[], Iterable[tuple[Worker, float]]]
    decisions: Callable[..., list[Decision]]
    parse: Callable[[bytes, str], InferenceRequest]
    calibrations: Calibrations
    stats: Callable[[], Stats]
    configuration: Callable[[], Configuration]
    reload: Callable[[], Awaitable[Reload]]
    now: Callable[[], float]
    wall: Callable[[], float]
    recomputed: Callable[[Worker], int] = lambda worker: 0
