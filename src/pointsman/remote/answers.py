"""What the admin API answers, as far as the command line shows it.

Fields that are not shown are not here, and those that a gateway of another version may lack have a default, so that a
command line and a gateway need not be of the same version. Explanations and decisions are the domain's own shapes: for
these two, both sides must know the same fields.
"""

from typing import Annotated

from msgspec import Meta, Struct

from pointsman.domain.explain import Decision

__all__ = [
    "Configuration",
    "Decisions",
    "ModelRow",
    "Reload",
    "Stats",
    "WorkerRow",
    "Workers",
]


Count = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
"""A number that arithmetic cannot choke on."""


class WorkerRow(Struct, frozen=True, kw_only=True):
    """One live worker; `drained` says that its model is, `oldest_request_s` is None while it has no request.

    `source` is who lists it, `degraded` what of it cannot be read, `handoffs_recomputed` how many hand-offs brought it
    nothing.
    """

    worker_id: str
    model: str
    role: str
    http_address: str
    draining: bool
    drained: bool = False
    static: bool = False
    source: str = ""
    dialect: str = ""
    up: bool = True
    degraded: str = ""
    kv_usage: float | None = None
    queue_depth: Count = 0
    running: Count = 0
    kv_free_blocks: Count = 0
    kv_total_blocks: Count = 0
    in_flight: Count = 0
    load: Count = 0
    oldest_request_s: float | None = None
    handoffs_recomputed: Count = 0

    @property
    def state(self) -> str:
        """Whether it gets requests, and why not, in one word: `up` and `degraded` ones do."""
        if not self.up:
            return "down"
        if self.draining:
            return "draining"
        return "drained" if self.drained else "degraded" if self.degraded else "up"


class Workers(Struct, frozen=True):
    """The live workers and the epoch of the route table."""

    data: tuple[WorkerRow, ...]
    route_epoch: Count = 0


class ModelRow(Struct, frozen=True, kw_only=True):
    """What is left to do for a model; `workers` counts its live ones, `oldest_request_s` is None without requests."""

    model: str
    workers: Count
    requests_left: Count
    oldest_request_s: float | None = None
    drained: bool = False
    routable: Count = 0


class Decisions(Struct, frozen=True):
    """Real decisions, newest first."""

    data: tuple[Decision, ...]


class Stats(Struct, frozen=True, kw_only=True):
    """Counters since the gateway started; both times are seconds since 1970 by the gateway's clock."""

    started_at: float
    now: float
    requests_total: Count
    errors_total: Count
    failovers_total: Count
    first_byte_seconds_sum: float
    first_byte_count: Count
    in_flight: Count
    workers: dict[str, Count] = {}


class Reload(Struct, frozen=True, kw_only=True):
    """How a reload went: the options that changed, and those that wait for a restart."""

    ok: bool
    message: str = ""
    changed: tuple[str, ...] = ()
    needs_restart: tuple[str, ...] = ()


class Configuration(Struct, frozen=True, kw_only=True):
    """Where the configuration in force came from, and its last reload."""

    source: str | None = None
    last_reload: Reload | None = None
