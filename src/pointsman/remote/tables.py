"""Answers of the admin API as tables and sentences for people.

Every text that came over the network goes through `printable`: model ids are chosen by clients, worker ids by engines.
"""

from collections.abc import Iterable
from datetime import datetime
from math import isfinite

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pointsman.domain.explain import Candidate, Compared, Decision, Draw, Explanation, Tried
from pointsman.remote.answers import Configuration, ModelRow, WorkerRow, Workers
from pointsman.remote.client import printable

__all__ = [
    "columns",
    "decisions_table",
    "drain_line",
    "explanation",
    "reload_lines",
    "seconds",
    "state_cell",
    "workers_table",
]

REASONS = {
    "affinity": "the prompt's beginning is at home there",
    "load": "it has the least to do",
    "canary": "the draw by request id chose the model {served}",
    "cascade": "it serves step {step} of the cascade",
    "failover": "the excluded workers are out",
}
"""Why a worker is picked, for the reasons of a target that this version knows."""

STATES = {
    "up": "green",
    "degraded": "yellow",
    "draining": "yellow",
    "drained": "yellow",
    "down": "red",
}


def columns(*names: str) -> Table:
    """Return an empty table; a name that begins with `>` is of a column of numbers."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in names:
        number = name.startswith(">")
        table.add_column(name.lstrip(">"), justify="right" if number else "left", no_wrap=number)
    return table


def workers_table(workers: Workers) -> RenderableType:
    """Return the live workers, one per line."""
    if not workers.data:
        return Text("no live worker")
    table = columns(
        *("worker", "model", "role", "dialect", "state", ">load", ">in flight", ">queued"),
        *(">running", ">KV used", ">oldest", "address"),
    )
    for worker in workers.data:
        table.add_row(
            _cell(worker.worker_id),
            _cell(worker.model),
            _cell(worker.role),
            _cell(worker.dialect or "-"),
            state_cell(worker),
            str(worker.load),
            str(worker.in_flight),
            str(worker.queue_depth),
            str(worker.running),
            _kv_used(worker),
            seconds(worker.oldest_request_s),
            _cell(worker.http_address + _source(worker)),
        )
    return table


def state_cell(worker: WorkerRow) -> Text:
    """Return whether a worker gets requests, coloured, and what is wrong with it."""
    wrong = [printable(worker.degraded)] if worker.degraded else []
    if worker.handoffs_recomputed:
        wrong.append(f"{_count(worker.handoffs_recomputed, 'hand-off')} brought it nothing")
    why = f": {'; '.join(wrong)}" if wrong else ""
    return Text(worker.state + why, style=STATES[worker.state])


def drain_line(row: ModelRow, *, drained: bool) -> str:
    """Return how far the drain of a model is, in one sentence."""
    model = printable(row.model)
    workers = _count(row.workers, "worker")
    if not drained:
        return f"{model} takes requests again: {workers}"
    if row.requests_left == 0:
        return f"{model} is drained: {workers}, no requests left"
    left = f"{_count(row.requests_left, 'request')} left"
    oldest = "" if row.oldest_request_s is None else f", the oldest {seconds(row.oldest_request_s)}"
    return f"{model} is draining: {workers}, {left}{oldest}"


def reload_lines(configuration: Configuration) -> str:
    """Return what a reload changed, in a few lines."""
    reload = configuration.last_reload
    if reload is None:
        return "nothing was reloaded"
    source = f" from {configuration.source}" if configuration.source else ""
    lines = [f"reloaded{source}" if reload.ok else "the reload failed"]
    lines[0] += f": {reload.message}" if reload.message else ""
    lines.append(f"changed: {', '.join(reload.changed) or 'nothing'}")
    if reload.needs_restart:
        lines.append(f"waits for a restart: {', '.join(reload.needs_restart)}")
    return "\n".join(map(printable, lines))


def explanation(answer: Explanation) -> RenderableType:
    """Return an explanation as a person reads it: the way of the request from its model id to a worker."""
    parts: list[RenderableType] = [Text(_way(answer))]
    if answer.draw is not None:
        parts.append(Text(_draw(answer.draw, answer.served_model)))
    if answer.candidates:
        rule = f": {answer.rule}" if answer.rule else ""
        parts.append(Text(printable(f"policy {answer.policy}{rule}")))
        parts.append(_candidates(answer.candidates, answer.pick))
    if answer.prefills:
        parts += [Text("for the prefill:"), _candidates(answer.prefills, answer.prefill)]
    if answer.ways:
        parts += [Text("the ways:"), _ways(answer.ways)]
    if answer.vetoed:
        vetoes = ", ".join(f"{veto.worker_id} ({veto.why})" for veto in answer.vetoed)
        parts.append(Text(printable(f"not considered: {vetoes}")))
    parts.append(Text(_verdict(answer), style="bold"))
    return Group(*parts)


def decisions_table(decisions: Iterable[Decision]) -> RenderableType:
    """Return real decisions, one per line, the attempts of each from first to last."""
    table = columns(
        *("time", "request", "model", ">status", "attempts", "reason", ">first byte", ">whole"),
        "tenant",
    )
    for decision in decisions:
        last = decision.attempts[-1] if decision.attempts else None
        table.add_row(
            _clock(decision.at),
            _cell(decision.request_id),
            _cell(decision.model),
            _cell(f"{decision.status} {decision.error}".strip()),
            _cell(_attempts(decision.attempts)),
            _cell(_why(last) if last else ""),
            seconds(decision.first_byte_s),
            seconds(decision.seconds),
            _cell(decision.tenant),
        )
    return table if table.row_count else Text("no such decision is kept")


def seconds(value: float | None) -> str:
    """Return a duration with as many digits as are worth reading, "-" for None and what is no duration.

    >>> seconds(0.01234), seconds(3.21), seconds(75.0), seconds(7300.0)
    ('12 ms', '3.2 s', '1 min 15 s', '2 h 1 min')
    """
    if value is None or not isfinite(value):
        return "-"
    if value < 1:
        return f"{value * 1000:.0f} ms"
    if value < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(int(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def _clock(at: float) -> str:
    try:
        return datetime.fromtimestamp(at).strftime("%H:%M:%S")
    except (ArithmeticError, OSError, ValueError):
        return "-"  # no calendar has this year


def _way(answer: Explanation) -> str:
    if answer.route is None:
        way = f"{answer.model} has no route and is its own"
    elif answer.route == answer.model:
        way = f"{answer.model} is a route"
    else:
        way = f"{answer.model} is an alias of the route {answer.route}"
    served = "" if answer.refusal else f", served as {answer.served_model} ({answer.target})"
    return printable(f"request {answer.request_id}: {way}{served}")


def _draw(draw: Draw, served: str) -> str:
    shares = "   ".join(
        f"{'>' if share.model == served else ' '} {share.model} [{share.since:.6g}, {share.until:.6g})"
        for share in draw.backends
    )
    return printable(f"draw {draw.value:.6f}: {shares}")


def _candidates(candidates: Iterable[Candidate], pick: str | None) -> Table:
    table = columns("", "worker", ">load", ">score", "note")
    for candidate in candidates:
        picked = candidate.worker_id == pick
        table.add_row(
            ">" if picked else "",
            _cell(candidate.worker_id),
            str(candidate.load),
            _score(candidate),
            _cell(candidate.note),
            style="bold" if picked else "",
        )
    return table


def _ways(ways: Iterable[Compared]) -> Table:
    table = columns("worker", "prefill", ">seconds")
    for way in ways:
        table.add_row(_cell(way.worker_id), _cell(way.prefill or "-"), f"{way.seconds:.3f}")
    return table


def _score(candidate: Candidate) -> str:
    return "-" if candidate.score is None else f"{candidate.score:.6g}"


def _verdict(answer: Explanation) -> str:
    if answer.refusal is not None:
        refusal = answer.refusal
        return printable(f"It is refused: {refusal.message} ({refusal.status} {refusal.code})")
    if answer.pick is None:
        return "It would go to one of these candidates; which one cannot be foretold."
    prefill = f" after the prefill of {answer.prefill}" if answer.prefill else ""
    why = REASONS.get(answer.reason, "its policy says so")
    why = why.format(served=answer.served_model, step=answer.cascade_step)
    reason = answer.reason
    if answer.policy_reason not in ("", reason):
        reason = f"{reason}; the policy: {answer.policy_reason}"
    return printable(f"It would go to {answer.pick}{prefill}, because {why} ({reason}).")


def _attempts(attempts: Iterable[Tried]) -> str:
    return ", ".join(f"{tried.worker_id} {tried.outcome}" for tried in attempts)


def _why(tried: Tried) -> str:
    return " ".join(dict.fromkeys(word for word in (tried.reason, tried.policy_reason) if word))


def _source(worker: WorkerRow) -> str:
    source = worker.source or ("static" if worker.static else "")
    return f" ({source})" if source else ""


def _kv_used(worker: WorkerRow) -> str:
    if worker.kv_usage is not None:
        return f"{100 * worker.kv_usage:.0f}%" if isfinite(worker.kv_usage) else "-"
    # Of a static worker nobody has told; its capacity is a weight.
    total = 0 if worker.static else worker.kv_total_blocks
    return f"{100 * (total - worker.kv_free_blocks) / total:.0f}%" if total else "-"


def _count(number: int, noun: str) -> str:
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'}"


def _cell(text: str) -> Text:
    return Text(printable(text))
