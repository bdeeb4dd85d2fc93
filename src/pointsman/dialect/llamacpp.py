"""llama.cpp's server: what it says of itself, and a hand-off by the slots that it saves and restores.

A slot is a place for one sequence, and its capacity is how many it has: blocks of KV cache are not a thing of its own.
The prefill worker computes a prompt in a slot and saves it to a file; the decode worker, which sees the same folder
(`--slot-save-path` of both), restores it into a slot of its own and is asked for an answer in that one. Neither worker
deletes a file. A slot number that an engine does not have is not refused: it takes any other.

A sequence with an image in it cannot be saved.
"""

from collections.abc import Mapping

import msgspec
from msgspec import Struct

from pointsman.dialect.handing import prefill_body, text_prompt, wish
from pointsman.dialect.paths import (
    CHAT,
    COUNT_TOKENS,
    DETOKENIZE,
    EMBEDDINGS,
    MESSAGES,
    RERANK,
    RESPONSES,
    TEXT,
    TOKENIZE,
    TRANSCRIPTIONS,
)
from pointsman.dialect.reading import (
    HEALTH,
    METRICS,
    MODELS,
    Probe,
    Probed,
    Reading,
    cached_tokens_of,
    fault_of,
    faults,
    first_good,
    fullest,
    health_of,
    read_json,
    served_by,
    token_ids_of,
)
from pointsman.wire.exposition import samples, total

__all__ = [
    "LlamaCpp",
    "slot_decode",
    "slot_erase",
    "slot_prefill",
    "slot_restore",
    "slot_save",
    "slot_tokens",
]

SLOTS = "/slots"
PROPS = "/props"

RUNNING = "llamacpp:requests_processing"
WAITING = "llamacpp:requests_deferred"
CACHED = "llamacpp:prompt_tokens_cached_total"
USAGE = "llamacpp:kv_cache_usage_ratio"
"""Of builds that still tell it."""


class Slot(Struct):
    """One slot, as /slots lists it. Old builds have `state`, which is 0 for an idle one."""

    is_processing: bool | None = None
    state: int = 0
    n_ctx: int | None = None

    @property
    def busy(self) -> bool:
        """Whether it computes something."""
        return self.state != 0 if self.is_processing is None else self.is_processing


class Settings(Struct):
    """Those of a slot that are read."""

    n_ctx: int | None = None


class Props(Struct):
    """What of the answer of /props is read."""

    total_slots: int
    default_generation_settings: Settings | None = None


decode_slots = msgspec.json.Decoder(list[Slot]).decode
decode_props = msgspec.json.Decoder(Props).decode


class LlamaCpp:
    """The dialect `llamacpp`. `kv_total_blocks` is its slots, `kv_free_blocks` those that are idle.

    `kv_tokens` is the context of each slot, for all slots: where they share one (`--kv-unified`), it is too much.
    """

    name = "llamacpp"
    probes = (
        Probe(HEALTH),
        Probe(METRICS),
        Probe(SLOTS, unless=METRICS),
        Probe(MODELS, every=5),
        Probe(PROPS, every=15),
    )
    paths = frozenset(
        (
            *(CHAT, TEXT, RESPONSES, MESSAGES, COUNT_TOKENS, EMBEDDINGS, RERANK, TRANSCRIPTIONS),
            *(TOKENIZE, DETOKENIZE),
        )
    )
    connectors = frozenset(("slots",))

    def read(self, answers: Mapping[str, Probed]) -> Reading:
        """Take load from /metrics, or without the queue from /slots."""
        ready, why = health_of(answers.get(HEALTH))
        models, no_models = served_by(answers)
        text = first_good(answers, METRICS)
        found = samples(text or b"", (RUNNING, WAITING, CACHED, USAGE))
        running, slots, no_load = total(found.get(RUNNING, ())), _slots(answers), ""
        if text is None:
            no_load = faults(
                fault_of("metrics", answers, METRICS), fault_of("slots", answers, SLOTS)
            )
            if slots is not None:
                running = sum(slot.busy for slot in slots)
                no_load += ", load from /slots without the queue"
        elif RUNNING not in found or WAITING not in found:
            no_load = "metrics: no requests_processing or no requests_deferred"
        count, tokens, no_count = _sizes(answers, slots)
        idle = None if count is None or running is None else max(count - running, 0)
        return Reading(
            ready,
            why,
            faults(no_load, no_count, no_models),
            models,
            running=running,
            waiting=total(found.get(WAITING, ())),
            kv_total_blocks=count,
            slots=count,
            kv_free_blocks=idle,
            kv_tokens=tokens,
            kv_usage=fullest(sample.value for sample in found.get(USAGE, ())),
            cached_tokens=total(found.get(CACHED, ())),
        )

    def tokenize(self, served: str, path: str, body: bytes) -> tuple[bytes, bytes] | None:
        """Ask for the tokens of a text, as a completion reads it. A chat would need /apply-template before."""
        prompt = text_prompt(path, body)
        if prompt is None:
            return None
        return TOKENIZE.encode(), b'{"content":%b,"add_special":true,"parse_special":true}' % prompt

    def token_ids(self, answer: bytes) -> list[int]:
        """Read the answer of /tokenize. Raises ValueError."""
        return token_ids_of(answer)

    def cached_tokens(self, answer: bytes) -> int:
        """Read `usage`, or `timings`."""
        return cached_tokens_of(answer)

    def abort(self, request_id: str) -> tuple[bytes, bytes] | None:
        """Nothing: it stops when its connection closes."""
        return None

    def handed_off(self, path: str, body: bytes) -> bool:
        """Tell whether there is one prompt, all of it text, and one answer."""
        wished = wish(path, body)
        return wished is not None and wished.shared and not wished.prompts and wished.text_alone


def _slots(answers: Mapping[str, Probed]) -> list[Slot] | None:
    body = first_good(answers, SLOTS)
    return None if body is None else read_json(decode_slots, body)


def _sizes(
    answers: Mapping[str, Probed], slots: list[Slot] | None
) -> tuple[int | None, int | None, str]:
    """Return how many slots there are, the tokens in all of them, and why the former is unknown."""
    body = first_good(answers, PROPS)
    props = None if body is None else read_json(decode_props, body)
    if props is not None:
        settings = props.default_generation_settings
        each = None if settings is None else settings.n_ctx
        return props.total_slots, None if each is None else props.total_slots * each, ""
    if slots is not None:
        contexts = [slot.n_ctx for slot in slots if slot.n_ctx is not None]
        return len(slots), sum(contexts) if contexts else None, ""
    return (
        None,
        None,
        fault_of("props", answers, PROPS) if body is None else "props: no total_slots",
    )


def slot_prefill(path: str, body: bytes, served: str, slot: int) -> bytes:
    """Return the body for a prefill worker that computes the prompt in a slot. `path` is a chat's or a text's."""
    return prefill_body(path, body, served, slot_decode(slot))


def slot_decode(slot: int) -> dict[str, bytes]:
    """Return the members that make a worker go on from what is in a slot.

    >>> slot_decode(3)
    {'id_slot': b'3', 'cache_prompt': b'true'}
    """
    return {"id_slot": b"%d" % slot, "cache_prompt": b"true"}


def slot_save(slot: int, filename: str) -> tuple[bytes, bytes]:
    """Return the path and the JSON body that write a slot to a file of its worker's folder.

    >>> slot_save(0, "h1.bin")
    (b'/slots/0?action=save', b'{"filename":"h1.bin"}')
    """
    return b"/slots/%d?action=save" % slot, msgspec.json.encode({"filename": filename})


def slot_restore(slot: int, filename: str) -> tuple[bytes, bytes]:
    """Return the path and the JSON body that read a slot from a file of its worker's folder."""
    return b"/slots/%d?action=restore" % slot, msgspec.json.encode({"filename": filename})


def slot_erase(slot: int) -> tuple[bytes, bytes]:
    """Return the path and the JSON body that empty a slot."""
    return b"/slots/%d?action=erase" % slot, b"{}"


class Moved(Struct):
    """The answer to a call about a slot."""

    n_saved: int | None = None
    n_restored: int | None = None
    n_erased: int | None = None


decode_moved = msgspec.json.Decoder(Moved).decode


def slot_tokens(answer: bytes) -> int:
    """Return how many tokens were saved, restored or erased. Raises ValueError.

    >>> slot_tokens(b'{"id_slot":0,"filename":"h1.bin","n_restored":60,"n_read":1384136}')
    60
    """
    moved = read_json(decode_moved, answer) or Moved()
    for number in (moved.n_saved, moved.n_restored, moved.n_erased):
        if number is not None:
            return number
    raise ValueError("no number of tokens in the answer about a slot")
