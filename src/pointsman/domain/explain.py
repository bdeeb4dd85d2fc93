"""Why this worker: where a request would go and what spoke for it, or where a past one went.

`explain` runs the very code that routes. It builds a router over the same table, a registry that notes what it is asked
for, and a policy that considers instead of picking; what the three saw is the explanation. So an explanation cannot
drift from what routing does, and nothing is sent, counted or drawn.

`Decision` is the record of a request that is over; `pointsman.observe.decisions` keeps those.

What it does not do: guess. Where only chance or the policy of somebody else decides, it says that and names no pick.
"""

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, cast

from msgspec import Struct
from msgspec.structs import replace

from pointsman.domain.policy.consideration import Consideration, Considers
from pointsman.domain.policy.least_outstanding import LeastOutstanding
from pointsman.domain.ring import hash64, unit
from pointsman.domain.router import Router
from pointsman.domain.routes import Route
from pointsman.domain.worker import Role, Worker, load_of
from pointsman.errors import ModelNotFound, NoCapacity, UnsupportedEndpoint

if TYPE_CHECKING:
    from pointsman.domain.pairing import Pairing
    from pointsman.domain.policy import Policy
    from pointsman.domain.registry import Registry
    from pointsman.domain.request import InferenceRequest

__all__ = [
    "Candidate",
    "Compared",
    "Decision",
    "Draw",
    "Explanation",
    "HandedOff",
    "Judged",
    "Refusal",
    "Share",
    "Tried",
    "Veto",
    "candidates_of",
    "explain",
    "name_of",
]

SILENT = "this policy does not say what it thinks"


class Candidate(Struct, frozen=True, kw_only=True):
    """A worker that the policy could pick: the requests it holds, and how it was judged.

    `score` is None where the policy gives none; what it means is the policy's.
    """

    worker_id: str
    load: int
    score: float | None = None
    note: str = ""


class Veto(Struct, frozen=True, kw_only=True):
    """A live worker that the route could use and that is no candidate for this request."""

    worker_id: str
    why: str


class Share(Struct, frozen=True, kw_only=True):
    """A backend's part of the draw: values from `since` on and below `until`, both 0 to 1."""

    model: str
    weight: float
    since: float
    until: float


class Draw(Struct, frozen=True, kw_only=True):
    """The draw of a canary: `value`, 0 up to 1, is made of the request id alone."""

    value: float
    backends: tuple[Share, ...]


class Refusal(Struct, frozen=True, kw_only=True):
    """The error that the client would get."""

    status: int
    code: str
    message: str


class Compared(Struct, frozen=True, kw_only=True):
    """One way to answer a request, and the seconds that it would cost; `prefill` computes the prompt, None for nobody.

    What is in these seconds is said in `pointsman.domain.pairing`.
    """

    worker_id: str
    prefill: str | None
    seconds: float


class Explanation(Struct, frozen=True, kw_only=True):
    """Where a request would go, and why.

    `route` is the id of its route, None without one; `target` is unified or disaggregated, "" when refused; `rule` is
    how the policy decides, in one sentence; `prefills` are the candidates for `prefill`, which takes the least load,
    or the fewest seconds where `ways` are compared; there are none of these where nothing but the load is looked at.
    `pick` is None when the request is refused and when it cannot be foretold. `reason` is what an answer would be
    counted under, `policy_reason` the policy's own word. `cascade_step` is -1 without a cascade and when refused.
    """

    request_id: str
    model: str
    route: str | None
    served_model: str
    target: str = ""
    policy: str
    draw: Draw | None
    rule: str = ""
    candidates: tuple[Candidate, ...] = ()
    prefills: tuple[Candidate, ...] = ()
    vetoed: tuple[Veto, ...]
    pick: str | None = None
    prefill: str | None = None
    reason: str = ""
    policy_reason: str = ""
    cascade_step: int = -1
    ways: tuple[Compared, ...] = ()
    refusal: Refusal | None


class HandedOff(Struct, frozen=True, kw_only=True):
    """How a prompt went from a prefill worker to the decode worker.

    `outcome` is direct (too short for it), handed_over, recomputed, refused, failed or abandoned; `tokens` are those of
    the prompt, `cached` those that the prefill worker had, `resumed` those that the decode worker says it got, None
    where it says nothing; the times are seconds, None for what did not take place.
    """

    prefill_worker_id: str
    outcome: str
    tokens: int
    cached: int
    resumed: int | None
    tokenize_s: float | None
    prefill_s: float | None


class Judged(Struct, frozen=True, kw_only=True):
    """What a step of a cascade thought of its answer: the score, None where it had none, and what was used for it."""

    value: float | None
    kept: bool
    prompt_tokens: int
    completion_tokens: int


class Tried(Struct, frozen=True, kw_only=True):
    """One attempt of a past request.

    `after_s` is when it began, in seconds from the request's arrival. `outcome` is "answered", "client_gone", "broken:"
    and why, how the attempt failed, or "rejected" for an answer that a cascade did not keep. `cascade_step` is -1
    without a cascade. `failed_worker_id` is who is to blame, which in a hand-off may be the prefill worker.
    `candidates` are all that the policy picked from, with the loads of that moment; of more than 64 only their count is
    known.
    """

    worker_id: str
    served_model: str
    reason: str
    policy_reason: str
    after_s: float
    outcome: str
    candidates: tuple[Candidate, ...]
    candidate_count: int
    cascade_step: int = -1
    failed_worker_id: str | None = None
    handoff: HandedOff | None = None
    verdict: Judged | None = None


class Decision(Struct, frozen=True, kw_only=True):
    """A request that is over: who asked, what was tried, what came of it.

    `at` is its arrival in seconds since 1970; `seconds` is how long it took in all, `first_byte_s` until its first
    byte went out, None where none did; `status` and `error` are as in the metrics, 499 being a client that left first.
    """

    request_id: str
    at: float
    path: str
    model: str
    stream: bool
    status: int
    error: str
    key_id: str
    tenant: str
    trace_id: str
    seconds: float
    first_byte_s: float | None
    attempts: tuple[Tried, ...]


def explain(
    router: Router,
    registry: "Registry",
    request: "InferenceRequest",
    *,
    excluded: Collection[Worker] = (),
    step: int = 0,
    now: float,
) -> Explanation:
    """Return where `router` would send `request` at `now` (monotonic seconds), and why; it changes nothing.

    `excluded` and `step` are as in `Router.route`. A request that would be refused has a `refusal`. Workers that are
    due at `now` are expired, as by every look at the registry.

    >>> from pointsman.domain.registry import Registry, WorkerReport
    >>> from pointsman.domain.request import InferenceRequest
    >>> from pointsman.domain.routes import RouteTable
    >>> registry = Registry()
    >>> for name, depth in (("a", 2), ("b", 1)):
    ...     _ = registry.beat(WorkerReport(name, "127.0.0.1:8001", "smol", queue_depth=depth), now=0.0)
    >>> router = Router(registry, LeastOutstanding(), RouteTable())
    >>> why = explain(router, registry, InferenceRequest("smol", "r1"), now=1.0)
    >>> why.pick, why.rule, [candidate.load for candidate in why.candidates]
    ('b', 'the lowest load wins, the smallest id among equals', [2, 1])
    """
    asked, witness = _Asked(registry), _Witness(router.policy)
    # The router asks the registry nothing that `_Asked` does not pass on.
    stand_in = router.seen_by(cast("Registry", asked), witness)
    refusal = target = None
    try:
        target = stand_in.route(request, excluded, step, now=now)
    except (ModelNotFound, NoCapacity, UnsupportedEndpoint) as error:
        refusal = Refusal(status=error.status, code=error.code or error.type, message=error.message)
    prefills: tuple[Worker, ...] = ()
    if target is not None and (target.prefill is not None or target.ways):
        able = registry.routable(target.served_model, Role.PREFILL)
        prefills = tuple([worker for worker in able if worker not in excluded])
    route = router.table.lookup(request.model)
    explanation = Explanation(
        request_id=request.request_id,
        model=request.model,
        route=None if route is None else route.model,
        served_model=asked.model,
        policy=name_of(router.policy),
        draw=_draw(route, request.request_id),
        vetoed=_vetoes(router, request, route, asked, {*witness.workers, *prefills}, excluded),
        refusal=refusal,
    )
    if target is None:
        return explanation
    workers, seen = next(each for each in witness.shown if target.worker in each[0])
    prefill = target.prefill
    return replace(
        explanation,
        target="unified" if prefill is None else "disaggregated",
        rule=seen.rule,
        candidates=candidates_of(workers, load_of, seen),
        # A policy that cannot foretell its pick still had to name a worker, for the router to go on.
        pick=None if seen.pick is None else target.worker.id,
        prefills=_by_seconds(router.pairing, prefills, request)
        if target.ways and router.pairing is not None
        else _by_load(prefills, request),
        prefill=None if prefill is None else prefill.id,
        reason=target.reason,
        policy_reason=target.policy_reason,
        cascade_step=target.cascade_step,
        ways=tuple(
            [
                Compared(
                    worker_id=way.worker.id,
                    prefill=None if way.prefill is None else way.prefill.id,
                    seconds=way.seconds,
                )
                for way in target.ways
            ]
        ),
    )


def candidates_of(
    workers: Sequence[Worker], load: Callable[[Worker], int], seen: Consideration
) -> tuple[Candidate, ...]:
    """Return the workers that a policy considered, as they are shown.

    >>> a = Worker("a", model="m", http_address="127.0.0.1:8001")
    >>> seen = Consideration(pick=a, reason="turn", scores=(1.0,), notes=("",))
    >>> candidates_of((a,), load_of, seen)
    (Candidate(worker_id='a', load=0, score=1.0, note=''),)
    """
    judged = zip(workers, seen.scores, seen.notes, strict=True)
    return tuple(
        [
            Candidate(worker_id=worker.id, load=load(worker), score=score, note=note)
            for worker, score, note in judged
        ]
    )


def name_of(policy: "Policy") -> str:
    """Return what a policy is called: its `name`, else the name of its class.

    >>> name_of(LeastOutstanding())
    'least_outstanding'
    """
    return str(getattr(policy, "name", type(policy).__name__))


class _Asked:
    """A registry that notes which workers a router asks it for. What the router writes stays here."""

    def __init__(self, registry: "Registry") -> None:
        self._registry = registry
        self.model = ""
        self.roles: set[Role] = set()

    def routable(self, model: str, role: Role) -> tuple[Worker, ...]:
        self.model = model
        self.roles.add(role)
        return self._registry.routable(model, role)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._registry, name)


class _Witness:
    """A policy that considers where the real one would pick, and remembers what it was shown."""

    def __init__(self, policy: "Policy") -> None:
        self._policy = policy
        self.shown: list[tuple[tuple[Worker, ...], Consideration]] = []

    @property
    def workers(self) -> list[Worker]:
        """All that it was shown."""
        return [worker for workers, _ in self.shown for worker in workers]

    def pick(
        self,
        workers: tuple[Worker, ...],
        load: Callable[[Worker], int],
        request: "InferenceRequest",
    ) -> tuple[Worker, str]:
        policy = self._policy
        seen = _silent(workers)
        if isinstance(policy, Considers):
            seen = policy.consider(workers, load, request)
        self.shown.append((workers, seen))
        return workers[0] if seen.pick is None else seen.pick, seen.reason


def _silent(workers: tuple[Worker, ...]) -> Consideration:
    n = len(workers)
    return Consideration(pick=None, reason="", scores=(None,) * n, notes=("",) * n, rule=SILENT)


def _by_load(workers: tuple[Worker, ...], request: "InferenceRequest") -> tuple[Candidate, ...]:
    if not workers:
        return ()
    return candidates_of(workers, load_of, LeastOutstanding().consider(workers, load_of, request))


def _by_seconds(
    pairing: "Pairing", workers: tuple[Worker, ...], request: "InferenceRequest"
) -> tuple[Candidate, ...]:
    return tuple(
        [
            Candidate(
                worker_id=worker.id, load=load_of(worker), score=pairing.prefill_s(request, worker)
            )
            for worker in workers
        ]
    )


def _draw(route: Route | None, request_id: str) -> Draw | None:
    if route is None or route.cascade or len(route.backends) < 2:
        return None
    total = sum([backend.weight for backend in route.backends])
    shares, running = [], 0.0
    for backend in route.backends:
        since = running
        running += backend.weight
        shares.append(
            Share(
                model=backend.model,
                weight=backend.weight,
                since=since / total,
                until=running / total,
            )
        )
    value = unit(hash64(request_id.encode("utf-8", "replace")))
    return Draw(value=value, backends=tuple(shares))


def _vetoes(
    router: "Router",
    request: "InferenceRequest",
    route: Route | None,
    asked: _Asked,
    considered: Collection[Worker],
    excluded: Collection[Worker],
) -> tuple[Veto, ...]:
    models = {asked.model}
    elsewhere = ""
    if route is not None and route.cascade:
        models.update([step.model for step in route.cascade])
        elsewhere = "another step of the cascade"
    elif route is not None:
        models.update([backend.model for backend in route.backends])
        elsewhere = "another backend was drawn"
    vetoes = []
    for worker in asked.snapshot():
        if worker.model not in models or worker in considered:
            continue
        if worker.model != asked.model:
            why = elsewhere
        elif not worker.up:
            why = "down"
        elif worker.draining or worker.terminating:
            why = "draining"
        elif worker.model in asked.drained:
            why = "model is drained"
        elif worker in excluded:
            why = "excluded"
        elif worker.role not in asked.roles:
            why = f"role is {worker.role}"
        elif router.lacks(worker, request.path):
            why = f"it does not serve {request.path}"
        elif worker.role is Role.PREFILL:
            why = "no decode worker to go with"
        else:
            why = "no prefill worker to go with"
        vetoes.append(Veto(worker_id=worker.id, why=why))
    return tuple(vetoes)
