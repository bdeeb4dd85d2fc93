"""SGLang: what it says of itself, and its hand-off, in which both workers are asked at the same time.

Both are told where the prefill worker's bootstrap server is and the same `room`, where they meet. The prefill worker
samples the first token, so both must be told alike what decides about it; it computes no other one, whatever the
request says.

Load comes from /v1/loads or, in older builds, /get_load; what is in the cache from /metrics, which has to be switched
on; the sizes from /server_info or /get_server_info.
"""

from collections.abc import Mapping
from typing import NamedTuple

import msgspec
from msgspec import Struct

from pointsman.dialect.handing import host_and_port, prefill_body, text_prompt, wish
from pointsman.dialect.paths import (
    CHAT,
    COUNT_TOKENS,
    DETOKENIZE,
    EMBEDDINGS,
    MESSAGES,
    RERANK,
    RESPONSES,
    SCORE,
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
    free_of,
    fullest,
    health_of,
    read_json,
    served_by,
    token_ids_of,
)
from pointsman.wire.exposition import Sample, samples, total

__all__ = ["ROOMS", "SgLang", "bootstrap_fields", "named", "names_of", "prefill"]

ROOMS = 1 << 63
"""How many rooms there are, from 0 on."""

LOADS = ("/v1/loads", "/get_load")
INFO = ("/server_info", "/get_server_info")

RUNNING = "sglang:num_running_reqs"
WAITING = "sglang:num_queue_reqs"
USAGE = "sglang:token_usage"
CACHED = "sglang:cached_tokens_total"


class Rank(Struct):
    """The load of one data-parallel rank. /get_load has `num_reqs`, which run or wait, for `num_running_reqs`."""

    num_waiting_reqs: int
    num_running_reqs: int | None = None
    num_reqs: int | None = None
    token_usage: float | None = None
    max_total_num_tokens: int | None = None

    @property
    def running(self) -> int | None:
        """Requests that are computed."""
        if self.num_running_reqs is not None or self.num_reqs is None:
            return self.num_running_reqs
        return self.num_reqs - self.num_waiting_reqs


class Loads(Struct):
    """The answer of /v1/loads."""

    loads: list[Rank]


class Info(Struct):
    """The sizes in the answer of /server_info: tokens that fit into the cache, and tokens of a page."""

    max_total_num_tokens: int | None = None
    page_size: int | None = None
    enable_lora: bool | None = None
    max_loras_per_batch: int | None = None


decode_loads = msgspec.json.Decoder(Loads | list[Rank]).decode
decode_info = msgspec.json.Decoder(Info).decode


class Load(NamedTuple):
    """What is known of the load, whoever said it."""

    running: int | None = None
    waiting: int | None = None
    usage: float | None = None
    tokens: int | None = None


class SgLang:
    """The dialect `sglang`."""

    name = "sglang"
    probes = (
        Probe(HEALTH),
        Probe(LOADS[0]),
        Probe(LOADS[1], unless=LOADS[0]),
        Probe(METRICS),
        Probe(MODELS, every=5),
        Probe(INFO[0], every=15),
        Probe(INFO[1], every=15, unless=INFO[0]),
    )
    paths = frozenset(
        (
            *(CHAT, TEXT, RESPONSES, MESSAGES, COUNT_TOKENS, EMBEDDINGS, RERANK, SCORE),
            *(TRANSCRIPTIONS, TOKENIZE, DETOKENIZE),
        )
    )
    connectors = frozenset(("bootstrap",))

    def read(self, answers: Mapping[str, Probed]) -> Reading:
        """Sum over the ranks of a data-parallel engine; of KV usage, the fullest one speaks for all."""
        ready, why = health_of(answers.get(HEALTH))
        models, no_models = served_by(answers)
        found = samples(first_good(answers, METRICS) or b"", (RUNNING, WAITING, USAGE, CACHED))
        load, no_load = _load(answers, found)
        info, no_info = _info(answers)
        tokens = load.tokens or info.max_total_num_tokens
        pages = None if not tokens else tokens // max(info.page_size or 1, 1)
        no_metrics = fault_of("metrics", answers, METRICS)
        if RUNNING not in found and METRICS in answers and not no_metrics:
            no_metrics = f"metrics: no {RUNNING}"
        return Reading(
            ready,
            why,
            faults(no_load, no_metrics, no_info, no_models),
            models,
            running=load.running,
            waiting=load.waiting,
            kv_total_blocks=pages,
            kv_free_blocks=free_of(pages, load.usage),
            kv_tokens=tokens,
            block_tokens=info.page_size,
            kv_usage=load.usage,
            lora_slots=info.max_loras_per_batch if info.enable_lora else None,
            cached_tokens=total(found.get(CACHED, ())),
        )

    def tokenize(self, served: str, path: str, body: bytes) -> tuple[bytes, bytes] | None:
        """Ask for the tokens of a text; it has no path for those of a chat."""
        prompt = text_prompt(path, body)
        if prompt is None:
            return None
        asked = b'{"model":%b,"prompt":%b}' % (msgspec.json.encode(served), prompt)
        return TOKENIZE.encode(), asked

    def token_ids(self, answer: bytes) -> list[int]:
        """Read the answer of /tokenize. Raises ValueError."""
        return token_ids_of(answer)

    def cached_tokens(self, answer: bytes) -> int:
        """Read `usage`; it is told with --enable-cache-report."""
        return cached_tokens_of(answer)

    def abort(self, request_id: str) -> tuple[bytes, bytes] | None:
        """Ask by the name that its body gave it (`named`); a request that waits in a room hears nothing else."""
        return b"/abort_request", b'{"rid":%b}' % msgspec.json.encode(request_id)

    def handed_off(self, path: str, body: bytes) -> bool:
        """Tell whether there is one answer per prompt, and its first token is free.

        A minimum of tokens forbids some first tokens, and a prefill worker cannot be told of one.
        """
        wished = wish(path, body)
        return wished is not None and wished.shared and not wished.min_tokens


def _load(answers: Mapping[str, Probed], found: Mapping[str, list[Sample]]) -> tuple[Load, str]:
    body = first_good(answers, *LOADS)
    loads = None if body is None else read_json(decode_loads, body)
    ranks = loads.loads if isinstance(loads, Loads) else loads
    if ranks:
        return _of_ranks(ranks), ""
    fault = fault_of("load", answers, *LOADS) if body is None else "load: no ranks in the answer"
    if RUNNING in found and WAITING in found:
        usage = fullest(sample.value for sample in found.get(USAGE, ()))
        fault += ", read from /metrics" if fault else ""
        return Load(total(found[RUNNING]), total(found[WAITING]), usage), fault
    return Load(), fault


def _of_ranks(ranks: list[Rank]) -> Load:
    running = [rank.running for rank in ranks if rank.running is not None]
    usages = (rank.token_usage for rank in ranks if rank.token_usage is not None)
    tokens = [rank.max_total_num_tokens or 0 for rank in ranks]
    return Load(
        max(sum(running), 0) if running else None,
        sum(rank.num_waiting_reqs for rank in ranks),
        fullest(usages),
        sum(tokens) or None,
    )


def _info(answers: Mapping[str, Probed]) -> tuple[Info, str]:
    body = first_good(answers, *INFO)
    if body is None:
        return Info(), fault_of("introspection", answers, *INFO)
    info = read_json(decode_info, body)
    return (Info(), "introspection: no sizes in the answer") if info is None else (info, "")


def bootstrap_fields(host: str, port: int, room: int, prompts: int = 0) -> dict[str, bytes]:
    """Return the members that both legs get: where the bootstrap server of P is, and the room to meet in.

    `room` is 0 to 2**63-1, never the same for two requests at a time. A request with an array of `prompts`
    (`handing.prompts_of`) takes as many rooms, one after the other.

    >>> bootstrap_fields("10.0.0.7", 8998, 5)
    {'bootstrap_host': b'"10.0.0.7"', 'bootstrap_port': b'8998', 'bootstrap_room': b'5'}
    >>> bootstrap_fields("10.0.0.7", 8998, 5, prompts=2)["bootstrap_room"]
    b'[5,6]'
    """
    # An IPv6 address stands in brackets, as in a URL, but without the port.
    host = host_and_port(host, port).rpartition(":")[0]
    values: dict[str, object] = {
        "bootstrap_host": host,
        "bootstrap_port": port,
        "bootstrap_room": room,
    }
    if prompts:
        values = {
            "bootstrap_host": [host] * prompts,
            "bootstrap_port": [port] * prompts,
            "bootstrap_room": [(room + number) % ROOMS for number in range(prompts)],
        }
    return {name: msgspec.json.encode(value) for name, value in values.items()}


def named(request_id: str, prompts: int = 0) -> dict[str, bytes]:
    """Return the member that gives a request the name by which `SgLang.abort` ends it.

    >>> named("r-7"), named("r-7", prompts=2)
    ({'rid': b'"r-7"'}, {'rid': b'["r-7_0","r-7_1"]'})
    """
    names = names_of(request_id, prompts)
    return {"rid": msgspec.json.encode(names if prompts else request_id)}


def names_of(request_id: str, prompts: int = 0) -> list[str]:
    """Return the names that `named` gives, each of which has to be ended by itself.

    >>> names_of("r-7"), names_of("r-7", prompts=2)
    (['r-7'], ['r-7_0', 'r-7_1'])
    """
    return [f"{request_id}_{number}" for number in range(prompts)] or [request_id]


def prefill(path: str, body: bytes, served: str, fields: Mapping[str, bytes]) -> bytes:
    """Return the body of the prefill leg: the client's with `fields` (of `bootstrap_fields`), one token, no stream."""
    return prefill_body(path, body, served, fields)
