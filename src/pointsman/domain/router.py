"""From a request to a worker: the route table, the registry and the policy, put together.

`route` decides 404 against 503, draws the canary, clamps the cascade step, keeps to the preferred kind of target,
leaves out the workers that already failed this request, and lets the policy pick among the rest. It never waits and
sends nothing; trying again is the caller's business (with the failed workers in `excluded`), and so are cascades.
"""

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from copy import copy
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from pointsman.domain.ledger import Lease
from pointsman.domain.pairing import best_of
from pointsman.domain.placement import Leaves, Places
from pointsman.domain.policy.least_outstanding import LeastOutstanding
from pointsman.domain.routes import Route, RouteTable, pick_backend
from pointsman.domain.worker import Role, ServedModel, Worker, connector_of, load_of
from pointsman.errors import ModelNotFound, NoCapacity, UnsupportedEndpoint

if TYPE_CHECKING:
    from pointsman.domain.pairing import Pairing, Way
    from pointsman.domain.policy import Policy
    from pointsman.domain.registry import Registry
    from pointsman.domain.request import InferenceRequest

__all__ = ["Router", "Target", "always", "never"]

UNIFIED = Role.UNIFIED
UNIFIED_ONLY: Sequence[str] = ("unified",)

NAMED = 16
"""How many workers an error names at most."""

NO_CONNECTORS: frozenset[str] = frozenset()
ANY_PATH: Mapping[str, frozenset[str]] = {}

KEPT = 1024
"""How many lists of workers that serve a path are kept at most, so that policies meet the same ones again."""

LOADS_KEPT = 64
"""With more candidates than this, a target does not have their loads: noting them would cost more than the pick."""


def always(connector: str) -> bool:
    """Say that a request can be handed off by every connector.

    >>> always("nixl")
    True
    """
    return True


def never(connector: str) -> bool:
    """Say that one worker has to do all of a request.

    >>> never("nixl")
    False
    """
    return False


class Target(Struct, frozen=True, eq=False, gc=False):
    """Where an attempt goes.

    `worker` answers the client (a decode worker when `prefill` is set); `served_model` is what the engine calls the
    model; `reason` is one of affinity, load, canary, cascade, failover, or what a third-party policy says;
    `cascade_step` is -1 without a cascade.

    The rest is for whoever asks why: `policy_reason` is the policy's own word, `candidates` are the workers that it
    picked from, and `loads` what each of them held at that moment, () where they were more than `LOADS_KEPT`. `ways`
    are those that a `Pairing` has compared.
    """

    worker: Worker
    served_model: str
    reason: str
    cascade_step: int = -1
    prefill: Worker | None = None
    policy_reason: str = ""
    candidates: tuple[Worker, ...] = ()
    loads: Sequence[int] = ()
    ways: "Sequence[Way]" = ()

    def __repr__(self) -> str:
        return f"<Target {self.worker.id} {self.served_model} {self.reason}>"


class Router:
    """Pick a worker for each request; hold the route table.

    `serves` has the API paths that engines of a dialect can serve; one of another dialect is thought to serve any. With
    a `pairing` that decides whether a prompt is handed off, and who computes it; without, every one is, if it can be,
    and the prefill worker of the lowest load computes it.
    """

    def __init__(
        self,
        registry: "Registry",
        policy: "Policy",
        table: RouteTable,
        serves: Mapping[str, frozenset[str]] = ANY_PATH,
        pairing: "Pairing | None" = None,
    ) -> None:
        self._registry = registry
        self._policy = policy
        self._pairing = pairing
        self._table = table
        self._tell()
        self._prefill_policy = LeastOutstanding()
        self._serves = serves
        self._known = frozenset[str]().union(*serves.values())
        # The paths that somebody may lack: for all others nobody is looked at.
        self._lacked = {path for path in self._known if any(path not in s for s in serves.values())}
        self._serving: dict[tuple[str, str, Role], tuple[Worker, ...]] = {}
        registry.route_epoch = table.epoch
        registry.on_leave.append(self._worker_left)

    @property
    def policy(self) -> "Policy":
        """The policy in force."""
        return self._policy

    @policy.setter
    def policy(self, policy: "Policy") -> None:
        self._policy = policy
        self._tell()

    @property
    def pairing(self) -> "Pairing | None":
        """What decides about hand-offs, if there is anything to decide."""
        return self._pairing if self._table.hands_off else None

    @pairing.setter
    def pairing(self, pairing: "Pairing | None") -> None:
        self._pairing = pairing
        self._tell()

    @property
    def table(self) -> RouteTable:
        """The routes in force."""
        return self._table

    def set_routes(self, routes: Sequence[Route]) -> int:
        """Replace the whole table and return the new epoch, the former one plus 1.

        Raises `InvalidRoutes`; the table in force stays then.
        """
        self.adopt(RouteTable(routes, self._table.epoch + 1))
        return self._table.epoch

    def adopt(self, table: RouteTable) -> None:
        """Put a table in force, with the epoch that it has."""
        self._table = table
        self._tell()
        self._registry.renew(table.epoch)

    def seen_by(self, registry: "Registry", policy: "Policy") -> "Router":
        """Return a router that does the same with another view of the workers, and another policy."""
        router = copy(self)
        router._registry = registry
        router.policy = policy
        return router

    def lack(self, worker: Worker, path: str) -> None:
        """Note that a worker turned out not to serve an API path; it gets no more requests for that in this life."""
        worker.lacks.add(path)
        self._lacked.add(path)

    def lacks(self, worker: Worker, path: str) -> bool:
        """Tell whether a worker is known not to serve an API path: it said so itself, or its dialect does."""
        if path in worker.lacks:
            return True
        serves = self._serves.get(worker.dialect)
        return serves is not None and path in self._known and path not in serves

    def route(
        self,
        request: "InferenceRequest",
        excluded: Collection[Worker] = (),
        step: int = 0,
        *,
        now: float,
        handoff: Callable[[str], bool] = always,
    ) -> Target:
        """Return where to send `request`, leaving out the `excluded` workers (compared by identity).

        `step` is the cascade step, clamped to the route's cascade. The reason is `failover` whenever a worker is
        excluded, then `cascade`, then `canary` for a route of several backends, else the policy's own. A request that
        can be handed off by no connector that is there (`handoff` says by which it can) prefers a unified worker; a
        decode worker has to do all of it. With a pairing, what the policy picks for each target is compared.

        Workers that do not serve the path of the request are left out too.

        Raises `ModelNotFound` if no route, no live worker and no worker of the last hour names the model, `NoCapacity`
        if it is known but nobody can take the request, and `UnsupportedEndpoint` if that is for the path alone.

        >>> from pointsman.domain.policy.least_outstanding import LeastOutstanding
        >>> from pointsman.domain.registry import Registry, WorkerReport
        >>> from pointsman.domain.request import InferenceRequest
        >>> registry = Registry()
        >>> _ = registry.beat(WorkerReport("a", "127.0.0.1:8001", "smol"), now=0.0)
        >>> router = Router(registry, LeastOutstanding(), RouteTable())
        >>> router.route(InferenceRequest("smol", "r1"), now=5.999)
        <Target a smol load>
        >>> router.route(InferenceRequest("smol", "r2"), now=6.0)
        Traceback (most recent call last):
        pointsman.errors.NoCapacity: no worker can take a request for the model 'smol' now
        """
        registry = self._registry
        if now >= registry.next_expiry:
            registry.expire(now)
        route = self._table.lookup(request.model)
        cascade_step = -1
        reason = ""
        if route is None:
            served = request.model
            targets = UNIFIED_ONLY
        else:
            targets = route.targets
            if route.cascade:
                cascade_step = min(max(step, 0), len(route.cascade) - 1)
                served = route.cascade[cascade_step].model
                reason = "cascade"
            else:
                served = pick_backend(route, request.request_id)
                if len(route.backends) > 1:
                    reason = "canary"
        lacked = request.path in self._lacked
        connectors = NO_CONNECTORS
        if "disaggregated" in targets:
            both = (
                *registry.routable(served, Role.PREFILL),
                *registry.routable(served, Role.DECODE),
            )
            connectors = frozenset(each for each in map(connector_of, both) if handoff(each))
            if not connectors:
                # One worker has to do all of it, and a decode worker where there is no other.
                targets = sorted(targets, key="unified".__ne__)
        pairing = self.pairing if connectors else None
        found: list[tuple[Target, tuple[Worker, ...]]] = []
        for target in targets:
            prefills: tuple[Worker, ...] = ()
            if target == "unified":
                workers = registry.routable(served, UNIFIED)
            else:
                workers = registry.routable(served, Role.DECODE)
                if connectors:
                    prefills = _without(registry.routable(served, Role.PREFILL), excluded)
                    # Whom a decode worker takes a prompt from is settled when it is picked.
                    workers = _by(connectors & set(map(connector_of, prefills)), workers)
            if lacked:
                workers = self._able_to_serve(workers, request.path, served)
            if excluded:
                workers = _without(workers, excluded)
                reason = "failover"
            if workers:
                worker, why = self._policy.pick(workers, load_of, request)
                loads = (
                    [each.in_flight + each.queue_depth for each in workers]
                    if len(workers) <= LOADS_KEPT
                    else ()
                )
                prefill = None
                if prefills:
                    prefills = _by({connector_of(worker)}, prefills)
                    if pairing is None:
                        prefill = self._prefill_policy.pick(prefills, load_of, request)[0]
                made = Target(
                    worker, served, reason or why, cascade_step, prefill, why, workers, loads
                )
                if pairing is None:
                    return made
                found.append((made, prefills))
        if pairing is not None and found:
            return _best(pairing, request, found)
        if lacked:
            self._check_path(request, served, targets)
        raise self._refusal(request.model, now)

    def lease(self, worker: Worker, request: "InferenceRequest", now: float) -> Lease:
        """Return a lease on a worker of a target, to which `request` is sent at `now` (monotonic seconds).

        The policy hears of it, where it wants to.

        >>> from pointsman.domain.policy.least_outstanding import LeastOutstanding
        >>> from pointsman.domain.registry import Registry
        >>> from pointsman.domain.request import InferenceRequest
        >>> worker = Worker("a", model="smol", http_address="127.0.0.1:8000")
        >>> router = Router(Registry(), LeastOutstanding(), RouteTable())
        >>> with router.lease(worker, InferenceRequest("smol", "r1"), 0.0):
        ...     worker.in_flight
        1
        """
        placed = self._placed
        if placed is None:
            return Lease(worker)
        return Lease(worker, placed(worker, request, now))

    def permits(self, models: Collection[str], asked: str) -> bool:
        """Tell whether a list of ids and aliases, empty for all, has `asked`, under whichever name of its route.

        >>> from pointsman.domain.policy.least_outstanding import LeastOutstanding
        >>> from pointsman.domain.registry import Registry
        >>> table = RouteTable([Route("smol-v3", aliases=("smol",))])
        >>> router = Router(Registry(), LeastOutstanding(), table)
        >>> router.permits(["smol-v3"], "smol"), router.permits(["smol-v3"], "other")
        (True, False)
        """
        if not models or asked in models:
            return True
        route = self._table.lookup(asked)
        return route is not None and any(self._table.lookup(each) is route for each in models)

    def served_first(self, request: "InferenceRequest", route: Route | None) -> tuple[str, str]:
        """Return what engines call the model that a request goes to first, and the adapter that this is, "" for none.

        >>> from pointsman.domain.policy.least_outstanding import LeastOutstanding
        >>> from pointsman.domain.registry import Registry
        >>> from pointsman.domain.request import InferenceRequest
        >>> Router(Registry(), LeastOutstanding(), RouteTable()).served_first(InferenceRequest("m", "r1"), None)
        ('m', '')
        """
        if route is None:
            served = request.model
        elif route.cascade:
            served = route.cascade[0].model
        else:
            served = pick_backend(route, request.request_id)
        return served, served if self._registry.served(served).parent else ""

    def ready(self, now: float) -> None:
        """Raise `NoCapacity` if no worker of any role is routable."""
        self._registry.expire(now)
        if not self._registry.any_routable():
            raise NoCapacity("no worker is routable")

    def models(self, now: float) -> list[ServedModel]:
        """Return what `GET /v1/models` lists, sorted by id: the models of the table and those of routable workers.

        A route's context is the shortest of its models. It is no adapter, whatever stands behind it.
        """
        registry = self._registry
        registry.expire(now)
        models = {model: registry.served(model) for model in registry.models()}
        for name in self._table.models():
            route = self._table.lookup(name)
            if route is not None and not (name in models and _serves_itself(route)):
                behind = [each.model for each in route.cascade or route.backends] or [name]
                lengths = [registry.served(each).max_model_len for each in behind]
                models[name] = ServedModel(
                    name, "", min([length for length in lengths if length], default=0)
                )
        return [models[name] for name in sorted(models)]

    def _tell(self) -> None:
        """Settle who keeps account of prompts: the policy, or the pairing for one that does not."""
        policy, pairing = self._policy, self.pairing
        places = policy if isinstance(policy, Places) else pairing
        self._placed = None if places is None else places.placed
        leaves = policy if isinstance(policy, Leaves) else pairing
        self._left = None if leaves is None else leaves.left

    def _worker_left(self, worker: Worker) -> None:
        if self._left is not None:
            self._left(worker)

    def _able_to_serve(
        self, workers: tuple[Worker, ...], path: str, served: str
    ) -> tuple[Worker, ...]:
        """Leave out those that lack a path. The tuple is the same object as before while its workers are the same."""
        able = tuple([worker for worker in workers if not self.lacks(worker, path)])
        if len(able) == len(workers) or not able:
            return workers if able else able
        key = (path, served, able[0].role)
        before = self._serving.get(key)
        if before == able:
            return before
        if len(self._serving) >= KEPT:
            self._serving.clear()
        self._serving[key] = able
        return able

    def _check_path(self, request: "InferenceRequest", served: str, targets: Sequence[str]) -> None:
        """Raise `UnsupportedEndpoint` where there are workers that could take the request, but for its path."""
        roles = {UNIFIED if target == "unified" else Role.DECODE for target in targets}
        workers = [each for role in roles for each in self._registry.routable(served, role)]
        if not workers or not all(self.lacks(worker, request.path) for worker in workers):
            return
        names = sorted(
            f"{worker.id} ({worker.dialect})" if worker.dialect else worker.id for worker in workers
        )
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        raise UnsupportedEndpoint(
            f"no worker of the model {request.model!r} serves {request.path}: "
            + ", ".join(names[:NAMED])
            + more
        )

    def _refusal(self, model: str, now: float) -> ModelNotFound | NoCapacity:
        shown = model if len(model) <= 256 else model[:256] + "..."
        if self._table.names(model) or self._registry.knows(model, now):
            return NoCapacity(f"no worker can take a request for the model {shown!r} now")
        return ModelNotFound(f"the model {shown!r} does not exist")


def _best(
    pairing: "Pairing", request: "InferenceRequest", found: list[tuple[Target, tuple[Worker, ...]]]
) -> Target:
    """Return the target whose way is the best, of those that each kind has."""
    ways = pairing.ways(request, [(target.worker, prefills) for target, prefills in found])
    best = best_of(ways)
    target = next(target for target, _ in found if target.worker is best.worker)
    return replace(target, prefill=best.prefill, ways=ways)


def _serves_itself(route: Route) -> bool:
    """Tell whether a route says no more of a model than that it is there."""
    return not route.cascade and all(each.model == route.model for each in route.backends)


def _by(connectors: Set[str], workers: tuple[Worker, ...]) -> tuple[Worker, ...]:
    able = tuple([worker for worker in workers if connector_of(worker) in connectors])
    return able if len(able) < len(workers) else workers


def _without(workers: tuple[Worker, ...], excluded: Collection[Worker]) -> tuple[Worker, ...]:
    left = tuple([worker for worker in workers if worker not in excluded])
    # The same object where nothing was taken out: policies recognise tuples by identity.
    return left if len(left) < len(workers) else workers
