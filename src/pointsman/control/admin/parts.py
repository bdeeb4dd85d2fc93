"""What the admin API works on: the parts of a running gateway, handed in by whoever built them."""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from pointsman.control.admin.shapes import Stats
from pointsman.control.keyfile import KeyFile
from pointsman.control.reload import Configuration, Reload
from pointsman.domain.explain import Decision
from pointsman.domain.registry import Registry
from pointsman.domain.request import InferenceRequest
from pointsman.domain.router import Router
from pointsman.domain.routes import Route, RouteTable
from pointsman.domain.worker import Role, Worker

__all__ = ["AdminParts", "Changes"]


class Changes(Protocol):
    """Makes the changes of operators, one at a time; each is durable before it takes effect.

    Every method raises `StateUnavailable` where a change cannot be kept; it is not made then.
    """

    async def put_routes(
        self, if_match: str | None, routes: Callable[[], Sequence[Route]]
    ) -> RouteTable:
        """Replace the route table by what `routes` returns, if `if_match` is the tag of the one in force.

        Raises `IfMatchRequired`, `EtagMismatch`, then what `routes` raises, then `InvalidRoutes`.
        """

    async def drain(self, model: str, deadline_s: int) -> None:
        """Stop routing to a model, and pass the deadline (seconds) on.

        Raises `NotFound` for a model without a live worker.
        """

    async def undrain(self, model: str) -> None:
        """Take a drain back. Raises `NotFound` for a model that is not drained and has no live worker."""

    async def put_worker(
        self, worker_id: str, *, url: str, model: str, role: Role, capacity: int
    ) -> bool:
        """Add or change a static worker and tell whether it is new.

        Raises `BadRequest` with `param`, and `Conflict` for one that announces itself.
        """

    async def delete_worker(self, worker_id: str) -> None:
        """Remove a static worker. Raises `NotFound`, and `Conflict` for one that announces itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminParts:
    """The parts of a gateway that operators see and change.

    `keys` is None where there is no key file. `running` returns each request that is not over, as its worker and when
    it began. `decisions` finds records, newest first, by the keywords `model`, `worker` and `request_id` (None for
    any), at most `limit`. `parse` reads an inference body, given with the id of the request, as the data plane does.
    `reload` returns what became of it, whatever that is. `now` is monotonic, `wall` is Unix time, both in seconds.
    """

    registry: Registry
    router: Router
    changes: Changes
    keys: KeyFile | None
    running: Callable[[], Iterable[tuple[Worker, float]]]
    decisions: Callable[..., list[Decision]]
    parse: Callable[[bytes, str], InferenceRequest]
    stats: Callable[[], Stats]
    configuration: Callable[[], Configuration]
    reload: Callable[[], Awaitable[Reload]]
    now: Callable[[], float]
    wall: Callable[[], float]
