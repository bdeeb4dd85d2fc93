"""What is asked of one engine that sends no heartbeats, round by round, and what its answers come to.

It is pure: `pointsman.control.polling` has the sockets and the time. A round is judged by its most important probe, the
first of the dialect. An engine that answers there at all can be used, unless it says that it cannot (5xx); what it
refuses to tell is said in `degraded`. Of the other probes an answer that is lost is not the end of what is known: the
last good one stands until as many were lost in a row as would make the worker go down. An engine under load is slow to
tell of it, and would look idle otherwise.
"""

from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from pointsman.dialect.engines import DIALECTS, Dialect, Probed, Reading, detect, due
from pointsman.dialect.reading import MODELS, faults
from pointsman.domain.observation import Health, Observation
from pointsman.domain.worker import ServedModel, Worker

__all__ = ["Rounds"]

FALLBACK = "openai"
"""How an engine is spoken to that does not want to say what it is."""

COUNT_MAX = 2**31 - 1
"""The highest count that is believed: the protocol of heartbeats, which agents tell it on by, has room for no more."""

COUNTER_MAX = 2**63 - 1
"""The same for what counts since an engine's start."""

NAMED = 3
"""How many models are named where the right one is missing."""


class Rounds:
    """The rounds of one worker.

    A round is `begin`, then `take` for the answers to all that is `due`, until nothing is, then `end`. After `misses`
    bad ones the worker is down, after `hits` good ones it is back, as a new engine of which nothing is known.
    """

    def __init__(
        self,
        worker: Worker,
        *,
        misses: int,
        hits: int,
        dialects: Mapping[str, Dialect] = DIALECTS,
    ) -> None:
        self.worker = worker
        self._misses = misses
        self._health = Health(misses=misses, hits=hits)
        self._dialects = dialects
        self._round = -1
        self._asked: set[str] = set()
        self._why = ""
        self._name = ""
        self._seen = Observation(
            up=False, dialect=worker.configured_dialect, model=worker.configured_model
        )
        self._forget()

    def begin(self) -> None:
        """Begin the next round."""
        self._round += 1
        self._asked.clear()

    def due(self) -> list[str]:
        """Return the paths to ask next, all at once; none when the round is over."""
        dialect = self._dialect()
        if dialect is None:
            return [] if MODELS in self._asked else [MODELS]
        probes = due(dialect.probes, self._round, self._latest)
        return [probe.path for probe in probes if probe.path not in self._asked]

    def take(self, answers: Mapping[str, Probed]) -> None:
        """Take note of answers, by path."""
        for path, answer in answers.items():
            self._asked.add(path)
            self._latest[path] = answer
            lost = not answer.status or answer.status >= 500
            self._lost[path] = self._lost.get(path, 0) + 1 if lost else 0
            if not lost or self._lost[path] >= self._misses or path not in self._standing:
                self._standing[path] = answer
        if not self._name and (models := self._latest[MODELS]).good:
            self._name = detect(models)

    def end(self) -> Observation:
        """Return what is known of the worker now."""
        dialect = self._dialect()
        if dialect is None:
            return self.miss(f"models: {self._latest[MODELS].fault}")
        vital = dialect.probes[0].path
        answer = self._latest.get(vital, Probed(0))
        reading = dialect.read({**self._standing, vital: answer})
        if not reading.ready and not 300 <= answer.status < 500:
            return self.miss(reading.why)
        up = self._health.after(good=True)
        self._seen = self._observed(dialect.name, reading)
        return self._seen if up else self._gone()

    def miss(self, why: str) -> Observation:
        """End a round that came to nothing, and return what is known of the worker now."""
        self._why = why
        was_up = self._health.up
        if self._health.after(good=False):
            return self._seen
        if was_up:
            # Whatever answers there next may be another engine.
            self._forget()
        return self._gone()

    def _forget(self) -> None:
        self._name = self.worker.configured_dialect
        self._latest: dict[str, Probed] = {}
        self._standing: dict[str, Probed] = {}
        self._lost: dict[str, int] = {}

    def _dialect(self) -> Dialect | None:
        """Return how the engine is spoken to; None where it did not say yet, and may still."""
        if self._name:
            return self._dialects[self._name]
        refused = 300 <= self._latest.get(MODELS, Probed(0)).status < 500
        return self._dialects[FALLBACK] if refused and MODELS in self._asked else None

    def _gone(self) -> Observation:
        """Return the state of a worker that is not up: what it served is still said, its numbers are not."""
        seen = self._seen
        return Observation(
            up=False,
            dialect=seen.dialect,
            model=self.worker.configured_model or seen.model,
            served=seen.served,
            degraded=self._why,
            lora_slots=seen.lora_slots,
            max_model_len=seen.max_model_len,
        )

    def _observed(self, dialect: str, reading: Reading) -> Observation:
        served = self._seen.served if reading.models is None else reading.models
        model = self.worker.configured_model or next(
            (each.id for each in served if not each.parent), ""
        )
        lengths = (each.max_model_len for each in served if each.id == model)
        seen = Observation(
            up=True,
            dialect=dialect,
            model=model,
            served=served,
            draining=reading.draining,
            degraded=faults(
                "" if reading.ready else reading.why,
                reading.degraded,
                _missing(model, served, told=reading.models is not None),
            ),
            max_model_len=next(lengths, 0),
            stale=any(self._lost[path] for path in self._asked),
        )
        told = {
            "running": _at_most(COUNT_MAX, reading.running),
            "queue_depth": _at_most(COUNT_MAX, reading.waiting),
            "kv_free_blocks": _at_most(COUNT_MAX, reading.kv_free_blocks),
            "kv_total_blocks": _at_most(COUNT_MAX, reading.kv_total_blocks),
            "kv_tokens": _at_most(COUNT_MAX, reading.kv_tokens),
            "lora_slots": _at_most(COUNT_MAX, reading.lora_slots),
            "slots": _at_most(COUNT_MAX, reading.slots),
            "kv_usage": reading.kv_usage,
            "cached_tokens": _at_most(COUNTER_MAX, reading.cached_tokens),
            "remote_tokens": _at_most(COUNTER_MAX, reading.remote_tokens),
        }
        return replace(seen, **{name: value for name, value in told.items() if value is not None})


def _at_most(most: int, count: int | None) -> int | None:
    """Return a count that can be true: engines have said that less than nothing waits."""
    return None if count is None else max(0, min(count, most))


def _missing(model: str, served: Iterable[ServedModel], *, told: bool) -> str:
    """Say what is wrong with the model of an engine, "" where it lists it, or lists nothing at all."""
    ids = [each.id for each in served]
    if not model:
        return "it lists no model" if told else "its model is not known"
    if not ids or model in ids:
        return ""
    more = f" and {len(ids) - NAMED} more" if len(ids) > NAMED else ""
    return f"the engine lists {', '.join(ids[:NAMED])}{more}, not {model}"
