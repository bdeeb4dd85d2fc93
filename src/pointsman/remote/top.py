"""`pointsman top`: what a gateway does right now, from two looks at its counters.

A rate is the difference of two looks over the time between them by the gateway's own clock. Counters of two lives of a
gateway are never compared: after a restart the rates come back one interval later.
"""

from collections.abc import Callable
from math import inf

from msgspec import Struct
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from pointsman.remote.answers import Stats, WorkerRow, Workers
from pointsman.remote.client import AdminClient, Refused, Unreachable, printable
from pointsman.remote.tables import columns, seconds, state_cell

__all__ = ["Look", "Rates", "Top", "look_at", "rates"]

FOR_GOOD = (401, 403, 404)
"""Statuses of a refusal that another look will not change."""


class Look(Struct, frozen=True):
    """A gateway's counters and workers at one moment."""

    stats: Stats
    workers: tuple[WorkerRow, ...] = ()


class Rates(Struct, frozen=True):
    """What happened between two looks, per second; `first_byte_s` is a mean, None where no answer began."""

    requests: float | None = None
    errors: float | None = None
    failovers: float | None = None
    first_byte_s: float | None = None
    workers: dict[str, float] = {}


UNKNOWN = Rates()
"""What is known of one look alone."""


def look_at(client: AdminClient) -> Look:
    """Take one look. Raises as `AdminClient.ask` does."""
    stats = client.get("/stats").read(Stats)
    return Look(stats, client.get("/workers").read(Workers).data)


def rates(before: Stats, after: Stats) -> Rates:
    """Return what happened between two looks; nothing is known where they are of two lives, or of one moment."""
    interval = after.now - before.now
    if before.started_at != after.started_at or interval <= 0:
        return UNKNOWN
    began = after.first_byte_count - before.first_byte_count
    waited = after.first_byte_seconds_sum - before.first_byte_seconds_sum
    return Rates(
        requests=(after.requests_total - before.requests_total) / interval,
        errors=(after.errors_total - before.errors_total) / interval,
        failovers=(after.failovers_total - before.failovers_total) / interval,
        first_byte_s=waited / began if began else None,
        workers={
            # A worker that is new, or new under an old id, counts from nothing.
            name: max(total - before.workers.get(name, 0), 0) / interval
            for name, total in after.workers.items()
        },
    )


class Top:
    """Looks again and again, and draws what it saw last.

    `look` takes a look, `pause` waits one interval. A gateway that cannot be reached is tried again; a key that is
    refused is not.
    """

    def __init__(self, url: str, look: Callable[[], Look], pause: Callable[[], None]) -> None:
        self._url = url
        self._look = look
        self._pause = pause
        self._last: Look | None = None
        self._rates = UNKNOWN
        self._trouble = ""

    def once(self) -> RenderableType:
        """Return one frame, after one interval. Raises as `AdminClient.ask` does."""
        self._see(self._look())
        self._pause()
        self._see(self._look())
        return self.frame()

    def run(self, console: Console, *, frames: float = inf) -> None:
        """Draw one frame per interval until KeyboardInterrupt, or that many. Raises `Refused` for a refused key."""
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while frames > 0:
                self.step()
                live.update(self.frame(), refresh=True)
                self._pause()
                frames -= 1

    def step(self) -> None:
        """Look once more, or note why that was not possible."""
        try:
            self._see(self._look())
            self._trouble = ""
        except (Unreachable, Refused) as error:
            if isinstance(error, Refused) and error.status in FOR_GOOD:
                raise
            self._trouble = str(error)

    def frame(self) -> RenderableType:
        """Return what was seen last."""
        parts: list[RenderableType] = []
        if self._trouble:
            parts.append(Text(f"unreachable, trying again: {self._trouble}", style="red"))
        if self._last is not None:
            parts += [self._totals(self._last.stats), self._workers(self._last.workers)]
        return Group(*parts)

    def _see(self, look: Look) -> None:
        self._rates = rates(self._last.stats, look.stats) if self._last else UNKNOWN
        self._last = look

    def _totals(self, stats: Stats) -> Text:
        now = self._rates
        figures = (
            f"{_rate(now.requests)} requests/s, {stats.in_flight} in flight",
            f"first byte {seconds(now.first_byte_s)}",
            f"{_rate(now.failovers)} failovers/s",
            f"{_rate(now.errors)} errors/s",
        )
        up = seconds(stats.now - stats.started_at)
        return Text(f"{printable(self._url)}  up {up}\n{'   '.join(figures)}\n")

    def _workers(self, workers: tuple[WorkerRow, ...]) -> RenderableType:
        table = columns("worker", "model", "state", ">load", ">in flight", ">requests/s", ">oldest")
        for worker in sorted(workers, key=lambda each: (-each.load, each.worker_id)):
            table.add_row(
                Text(printable(worker.worker_id)),
                Text(printable(worker.model)),
                state_cell(worker),
                str(worker.load),
                str(worker.in_flight),
                _rate(self._rates.workers.get(worker.worker_id)),
                seconds(worker.oldest_request_s),
            )
        return table


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
