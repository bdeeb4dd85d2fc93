"""vLLM: what it says of itself, and the hand-offs of its NIXL and Mooncake connectors.

NIXL works in two steps. The prefill worker is asked for one token and answers with `kv_transfer_params`, which name
the blocks that it keeps for a while; the decode worker gets that object as it is, and pulls them. With Mooncake both
are told the same `transfer_id`, and the decode worker where the other one can be met.

Figures come from /metrics. Its names have changed over time, and both are read. Where there are none, /load counts
requests, if the engine was told to.
"""

from collections.abc import Iterable, Mapping

import msgspec
from msgspec import Struct

from pointsman.dialect.handing import prefill_body, wish
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
    TRANSLATIONS,
)
from pointsman.dialect.reading import (
    HEALTH,
    METRICS,
    MODELS,
    Probe,
    Probed,
    Reading,
    cached_tokens_of,
    count_of,
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
from pointsman.wire.body import members, readable, with_fields
from pointsman.wire.exposition import Sample, samples, total

__all__ = [
    "Vllm",
    "give_back",
    "mooncake_decode",
    "mooncake_engine_id",
    "mooncake_prefill",
    "nixl_decode",
    "nixl_prefill",
    "transfer_params",
]

LOAD = "/load"

RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
CACHED = ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total")
REMOTE = ("vllm:external_prefix_cache_hits_total",)
CACHE = "vllm:cache_config_info"
LORA = "vllm:lora_requests_info"
NAMES = (RUNNING, WAITING, *USAGE, *CACHED, *REMOTE, CACHE, LORA)


class Load(Struct):
    """The answer of /load."""

    server_load: int


decode_load = msgspec.json.Decoder(Load).decode


class Vllm:
    """The dialect `vllm`."""

    name = "vllm"
    probes = (Probe(HEALTH), Probe(METRICS), Probe(LOAD, unless=METRICS), Probe(MODELS, every=5))
    paths = frozenset(
        (
            *(CHAT, TEXT, RESPONSES, MESSAGES, COUNT_TOKENS, EMBEDDINGS, RERANK, SCORE),
            *(TRANSCRIPTIONS, TRANSLATIONS, TOKENIZE, DETOKENIZE),
        )
    )
    connectors = frozenset(("nixl", "mooncake"))

    def read(self, answers: Mapping[str, Probed]) -> Reading:
        """Sum over the ranks of a data-parallel engine; of KV usage, the fullest one speaks for all."""
        ready, why = health_of(answers.get(HEALTH))
        models, no_models = served_by(answers)
        text = first_good(answers, METRICS)
        if text is None:
            running, no_load = _load(answers)
            no_metrics = fault_of("metrics", answers, METRICS)
            return Reading(ready, why, faults(no_metrics, no_load, no_models), models, running)
        found = samples(text, NAMES)
        missing = [name for name in (RUNNING, WAITING) if name not in found]
        usage = fullest(sample.value for sample in _first(found, USAGE))
        blocks, tokens, block_tokens = _sizes(found.get(CACHE, ()))
        unread = f"metrics: no {' and no '.join(missing)}" if missing else ""
        return Reading(
            ready,
            why,
            faults(unread, no_models),
            models,
            running=total(found.get(RUNNING, ())),
            waiting=total(found.get(WAITING, ())),
            kv_usage=usage,
            kv_total_blocks=blocks,
            block_tokens=block_tokens,
            kv_free_blocks=free_of(blocks, usage),
            kv_tokens=tokens,
            lora_slots=_lora_slots(found.get(LORA, ())),
            cached_tokens=total(_first(found, CACHED)),
            remote_tokens=total(_first(found, REMOTE)),
        )

    def tokenize(self, served: str, path: str, body: bytes) -> tuple[bytes, bytes] | None:
        """Ask with all that a chat template may read; a completion's prompt must be one text."""
        wished = wish(path, body)
        if wished is None or (path == TEXT and not isinstance(wished.prompt, str)):
            return None
        parts = [b'{"model":', msgspec.json.encode(served)]
        for name, start, end in members(body):
            if name in TEMPLATED[path]:
                parts += b",", msgspec.json.encode(name), b":", body[start:end]
        return TOKENIZE.encode(), b"".join((*parts, b"}"))

    def token_ids(self, answer: bytes) -> list[int]:
        """Read the answer of /tokenize. Raises ValueError."""
        return token_ids_of(answer)

    def cached_tokens(self, answer: bytes) -> int:
        """Read `usage`; it is told with --enable-prompt-tokens-details."""
        return cached_tokens_of(answer)

    def abort(self, request_id: str) -> tuple[bytes, bytes] | None:
        """Nothing: it stops when its connection closes."""
        return None

    def handed_off(self, path: str, body: bytes) -> bool:
        """Tell whether there is one prompt and one answer: a batch would have one object for all its prompts."""
        wished = wish(path, body)
        return wished is not None and wished.shared and not wished.prompts


TEMPLATED = {
    CHAT: frozenset(
        (
            *("messages", "tools", "chat_template", "chat_template_kwargs", "add_special_tokens"),
            *("add_generation_prompt", "continue_final_message", "mm_processor_kwargs"),
        )
    ),
    TEXT: frozenset(("prompt", "add_special_tokens")),
}
"""What of a request changes its tokens."""


def _load(answers: Mapping[str, Probed]) -> tuple[int | None, str]:
    body = first_good(answers, LOAD)
    if body is None:
        return None, fault_of("load", answers, LOAD)
    load = read_json(decode_load, body)
    if load is None:
        return None, "load: /load has no server_load"
    # It is 0 as well where nobody counts.
    return load.server_load, "load from /load, which counts with --enable-server-load-tracking only"


def _first(found: Mapping[str, list[Sample]], names: Iterable[str]) -> list[Sample]:
    return next((found[name] for name in names if name in found), [])


def _sizes(found: Iterable[Sample]) -> tuple[int | None, int | None, int | None]:
    """Return how many blocks there are, the tokens in them, and those in one, the least; None for what is unknown."""
    labels = [sample.labels for sample in found]
    sizes = [
        (count_of(each.get("num_gpu_blocks", "")), count_of(each.get("block_size", "")))
        for each in labels
    ]
    each_has = min((size for _, size in sizes if size is not None), default=None)
    counted = [(blocks, size) for blocks, size in sizes if blocks is not None]
    if not counted:
        return None, None, each_has
    tokens = [blocks * size for blocks, size in counted if size is not None]
    # Without the size of one rank's blocks the sum would be that of the others.
    whole = len(tokens) == len(counted)
    return sum([blocks for blocks, _ in counted]), sum(tokens) if whole else None, each_has


def _lora_slots(found: Iterable[Sample]) -> int | None:
    # The value is the time: a label set of yesterday stays.
    latest = max(found, key=lambda sample: sample.value, default=None)
    return None if latest is None else count_of(latest.labels.get("max_lora", ""))


def nixl_prefill(path: str, body: bytes, served: str) -> bytes:
    """Return the body for a prefill worker that keeps its blocks for whoever asks. `path` is a chat's or a text's."""
    return prefill_body(path, body, served, {"kv_transfer_params": NIXL_PREFILL})


NIXL_PREFILL = (
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,'
    b'"remote_block_ids":null,"remote_host":null,"remote_port":null}'
)


def nixl_decode(params: bytes) -> dict[str, bytes]:
    """Return the members that tell a decode worker where the blocks are: what `transfer_params` found, unchanged."""
    return {"kv_transfer_params": params}


def give_back(served: str, fields: Mapping[str, bytes]) -> bytes:
    """Return the body of a completion for which a decode worker takes up `fields`, and wants nothing of it.

    It pulls the blocks of this one token, and has the prefill worker free all of them.

    >>> give_back("m", nixl_decode(b'{"remote_port":1}'))
    b'{"model":"m","prompt":"x","max_tokens":1,"kv_transfer_params":{"remote_port":1}}'
    """
    body = b'{"model":%b,"prompt":"x","max_tokens":1}' % msgspec.json.encode(served)
    return with_fields(body, fields)


class Prefilled(Struct):
    """A prefill worker's answer."""

    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


decode_prefilled = msgspec.json.Decoder(Prefilled).decode


def transfer_params(answer: bytes) -> bytes | None:
    """Return the bytes of `kv_transfer_params` in a prefill worker's answer, None where there are none.

    >>> transfer_params(b'{"id":"x","kv_transfer_params":{"remote_port": 5600}}')
    b'{"remote_port": 5600}'
    """
    try:
        params = bytes(readable(decode_prefilled, answer).kv_transfer_params)
    except (ValueError, RecursionError):
        return None
    return params if params[:1] == b"{" else None


def mooncake_prefill(path: str, body: bytes, served: str, transfer_id: str) -> bytes:
    """Return the body for a prefill worker that pushes its blocks under a name that the decode worker is told too."""
    params = b'{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":%b}' % (
        msgspec.json.encode(transfer_id)
    )
    return prefill_body(path, body, served, {"kv_transfer_params": params})


def mooncake_decode(transfer_id: str, engine_id: str, bootstrap_url: str) -> dict[str, bytes]:
    """Return the members that tell a decode worker what to wait for: `bootstrap_url` is `http://host:port` of P."""
    params = msgspec.json.encode(
        {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "transfer_id": transfer_id,
            "remote_engine_id": engine_id,
            "remote_bootstrap_addr": bootstrap_url,
        }
    )
    return {"kv_transfer_params": params}


class Rank(Struct):
    """A data-parallel rank of a prefill worker, as its bootstrap server tells of it."""

    engine_id: str


decode_ranks = msgspec.json.Decoder(dict[str, Rank]).decode


def mooncake_engine_id(answer: bytes, rank: int = 0) -> str:
    """Read the engine id of a rank in the answer to GET /query of a bootstrap server. Raises ValueError.

    >>> mooncake_engine_id(b'{"0":{"engine_id":"e_dp0","worker_addr":{}}}')
    'e_dp0'
    """
    ranks = read_json(decode_ranks, answer)
    if ranks is None or str(rank) not in ranks:
        raise ValueError(f"no engine id of rank {rank} in the answer to /query")
    return ranks[str(rank)].engine_id
