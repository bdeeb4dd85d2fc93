"""What every dialect shares: what is asked of an engine to know how it is, and what its answers say.

A dialect names its probes, somebody performs them (`pointsman.control`), and `Dialect.read` turns the answers into a
`Reading`. No answer is trusted to be there or to be well-formed. What an engine does not say stays None and is named
in `degraded`: an engine that can be asked for a token is used, however little else it tells.

This file knows no engine. What is said here of JSON is what several of them have in common.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, Protocol, TypeVar

import msgspec
from msgspec import Struct

from pointsman.domain.registry import MAX_NAME
from pointsman.domain.worker import ServedModel

__all__ = [
    "HEALTH",
    "METRICS",
    "MODELS",
    "Dialect",
    "Model",
    "Probe",
    "Probed",
    "Reading",
    "cached_tokens_of",
    "count_of",
    "due",
    "fault_of",
    "faults",
    "first_good",
    "free_of",
    "fullest",
    "health_of",
    "models_of",
    "output_tokens_of",
    "read_json",
    "served_by",
    "token_ids_of",
]

HEALTH = "/health"
MODELS = "/v1/models"
METRICS = "/metrics"

SAID_LIMIT = 120
"""Characters of an engine's own words that are shown."""

MODELS_MAX = 1000
"""Models of one engine that are read: names and adapters, of which an engine has tens."""

CONTEXT_MAX = 2**31 - 1
"""The longest context that is believed, in tokens: heartbeats, by which agents tell it on, have no room for more."""

COUNT_MAX = 2**53
"""The highest count that is read out of a text or computed with: more is a mistake."""

Value = TypeVar("Value")


class Probe(NamedTuple):
    """A GET of `path` in every `every`-th round; not needed where the last answer of the path `unless` was good."""

    path: str
    every: int = 1
    unless: str = ""


class Probed(NamedTuple):
    """The answer to a probe. Status 0: there was none, and `error` says why, in words that an operator reads."""

    status: int
    body: bytes = b""
    error: str = ""

    @property
    def good(self) -> bool:
        """Whether it was answered with a success."""
        return 200 <= self.status < 300

    @property
    def fault(self) -> str:
        """What was wrong with it in one word or two, "" where it is good."""
        return "" if self.good else f"{self.status}" if self.status else self.error or "no answer"


class Reading(Struct, frozen=True):
    """What the answers of one engine say. Numbers that it does not say are None; see `Worker` for their units.

    `why` is why it is not ready, `degraded` what of it cannot be read. `cached_tokens` (prompt tokens found in its own
    cache) and `remote_tokens` (those that came from another worker) count since its start. `block_tokens` is how many
    tokens a block of the KV cache holds.
    """

    ready: bool
    why: str = ""
    degraded: str = ""
    models: tuple[ServedModel, ...] | None = None
    running: int | None = None
    waiting: int | None = None
    kv_total_blocks: int | None = None
    kv_free_blocks: int | None = None
    kv_tokens: int | None = None
    block_tokens: int | None = None
    kv_usage: float | None = None
    lora_slots: int | None = None
    slots: int | None = None
    draining: bool = False
    cached_tokens: int | None = None
    remote_tokens: int | None = None


class Dialect(Protocol):
    """How one kind of engine is spoken to. `paths` are the API paths that it can serve, in any of its builds."""

    @property
    def name(self) -> str:
        """What configurations call it."""
        ...

    @property
    def probes(self) -> tuple[Probe, ...]:
        """What is asked of it, most important first."""
        ...

    @property
    def paths(self) -> frozenset[str]:
        """The API paths that it can serve."""
        ...

    @property
    def connectors(self) -> frozenset[str]:
        """The ways of handing a prompt over that it has; "" is the dialect's own."""
        ...

    def read(self, answers: Mapping[str, Probed]) -> Reading:
        """Turn the last answer of every probe, by its path, into a reading. Raises nothing.

        Those of earlier rounds stay in `answers`; a path that was never asked is unknown, which is no fault.
        """
        ...

    def tokenize(self, served: str, path: str, body: bytes) -> tuple[bytes, bytes] | None:
        """Return the path and the JSON body that ask for a prompt's tokens, None where it cannot be asked.

        `body` has passed `parse_request`, `path` is the client's, `served` the model's name at the engine.
        """
        ...

    def token_ids(self, answer: bytes) -> list[int]:
        """Read the answer to `tokenize`. Raises ValueError."""
        ...

    def cached_tokens(self, answer: bytes) -> int:
        """Return how many prompt tokens an answer says were cached, -1 where it does not say.

        `answer` is a whole JSON answer, or the data of the event of a stream that tells of usage.
        """
        ...

    def abort(self, request_id: str) -> tuple[bytes, bytes] | None:
        """Return the path and the JSON body that end a request, None where closing its connection does."""
        ...

    def handed_off(self, path: str, body: bytes) -> bool:
        """Tell whether a request can be computed by two workers. `body` has passed `parse_request`."""
        ...


def due(probes: Iterable[Probe], round: int, answers: Mapping[str, Probed]) -> list[Probe]:
    """Return the probes of a round (0 for the first), with the last answers at hand.

    >>> probes = Probe("/v1/loads"), Probe("/get_load", unless="/v1/loads"), Probe("/v1/models", every=5)
    >>> [probe.path for probe in due(probes, 0, {})]
    ['/v1/loads', '/get_load', '/v1/models']
    >>> [probe.path for probe in due(probes, 1, {"/v1/loads": Probed(200)})]
    ['/v1/loads']
    """
    return [
        probe
        for probe in probes
        if not (probe.unless in answers and answers[probe.unless].good)
        # What failed is asked again at once: an engine that starts is known as soon as it can be.
        and (round % probe.every == 0 or not answers.get(probe.path, Probed(0)).good)
    ]


def health_of(answer: Probed | None) -> tuple[bool, str]:
    """Tell whether a health probe says ready, and why not.

    >>> health_of(Probed(200)), health_of(Probed(401)), health_of(Probed(0, b"", "connection refused"))
    ((True, ''), (False, 'health 401: credentials'), (False, 'health: connection refused'))
    >>> health_of(Probed(503, b'{"error":{"message":"Loading model"}}'))
    (False, 'health 503: Loading model')
    """
    if answer is None:
        return False, "health: not asked yet"
    if answer.good:
        return True, ""
    if not answer.status:
        return False, f"health: {answer.fault}"
    said = "credentials" if answer.status in (401, 403) else _said(answer.body)
    return False, f"health {answer.status}" + (f": {said}" if said else "")


class _Message(Struct):
    message: str = ""


class _Complaint(Struct):
    error: _Message | str = ""


decode_complaint = msgspec.json.Decoder(_Complaint).decode


def _said(body: bytes) -> str:
    """Return what an error says, as far as it can be shown."""
    error = read_json(decode_complaint, body)
    said = "" if error is None else error.error
    text = said if isinstance(said, str) else said.message
    return "".join(char for char in text[:SAID_LIMIT] if char.isprintable())


class Model(Struct, gc=False):
    """A model as engines list it: a name of the base model, or an adapter of `parent`. `aliases` and `meta` are
    llama.cpp's."""

    id: str
    owned_by: object = None
    parent: str | None = None
    max_model_len: int | None = None
    aliases: list[str] = []
    meta: dict[str, object] | None = None

    @property
    def context(self) -> int:
        """Its longest context in tokens, 0 where it does not say."""
        said = (self.meta or {}).get("n_ctx") if self.max_model_len is None else self.max_model_len
        return max(0, min(said, CONTEXT_MAX)) if isinstance(said, int) else 0


class _Models(Struct):
    data: list[Model]


decode_models = msgspec.json.Decoder(_Models).decode


def models_of(answer: Probed | None) -> list[Model] | None:
    """Return the models of an answer to GET /v1/models, None where it has none that can be read.

    >>> models_of(Probed(200, b'{"data":[{"id":"m","max_model_len":8}]}'))[0].max_model_len
    8
    """
    if answer is None or not answer.good:
        return None
    listed = read_json(decode_models, answer.body)
    return None if listed is None else listed.data


def served_by(answers: Mapping[str, Probed]) -> tuple[tuple[ServedModel, ...] | None, str]:
    """Return the models that GET /v1/models lists, and what is wrong with its answer.

    An adapter's context is that of its parent where it has none of its own. Names that no worker may have (see
    `Registry.beat`) are left out, and so are those after the first 1000.

    >>> served_by({"/v1/models": Probed(200, b'{"data":[{"id":"m","max_model_len":8},{"id":"a","parent":"m"}]}')})[0]
    (ServedModel(id='m', parent='', max_model_len=8), ServedModel(id='a', parent='m', max_model_len=8))
    >>> served_by({"/v1/models": Probed(401)})
    (None, 'models 401')
    """
    answer = answers.get(MODELS)
    if answer is None:
        return None, ""
    listed = models_of(answer)
    if listed is None:
        return None, fault_of("models", answers, MODELS) or "models: not a list of them"
    over = len(listed) - MODELS_MAX
    del listed[MODELS_MAX:]
    contexts = {model.id: model.context for model in listed}
    named = [
        ServedModel(name, parent, model.context or contexts.get(parent, 0))
        for model in listed
        # What names itself as its parent is no adapter.
        for parent in [model.parent if model.parent and model.parent != model.id else ""]
        for name in dict.fromkeys((model.id, *model.aliases))
    ]
    sound = [each for each in named if each.id and _sound(each.id) and _sound(each.parent)]
    served = tuple(sound[:MODELS_MAX])
    lost = len(named) - len(served) + max(over, 0)
    return served, f"models: {lost} are left out" if lost else ""


def _sound(name: str) -> bool:
    return len(name) <= MAX_NAME and name.isprintable()


def first_good(answers: Mapping[str, Probed], *paths: str) -> bytes | None:
    """Return the body of the first of some paths that was answered well, None where none was."""
    return next(
        (answers[path].body for path in paths if path in answers and answers[path].good), None
    )


def fullest(usages: Iterable[float]) -> float | None:
    """Return the highest of some shares of 0 to 1, None where none is one.

    >>> fullest([0.25, 0.5, float("nan")]), fullest([])
    (0.5, None)
    """
    return max((usage for usage in usages if 0 <= usage <= 1), default=None)


def free_of(blocks: int | None, usage: float | None) -> int | None:
    """Return how many blocks are free, None where either number is unknown.

    >>> free_of(728, 0.25), free_of(728, None)
    (546, None)
    """
    return None if blocks is None or usage is None else round(min(blocks, COUNT_MAX) * (1 - usage))


def count_of(text: str) -> int | None:
    """Return the count that a label holds, None where it holds none, or none that can be true.

    >>> count_of("728"), count_of("None"), count_of("9" * 5000)
    (728, None, None)
    """
    # Python refuses to read thousands of digits.
    count = int(text) if text.isdecimal() and len(text) <= len(str(COUNT_MAX)) else None
    return count if count is None or count <= COUNT_MAX else None


def fault_of(what: str, answers: Mapping[str, Probed], *paths: str) -> str:
    """Say that none of some paths was answered well, "" where one was or none was asked.

    >>> fault_of("metrics", {"/metrics": Probed(401)}, "/metrics")
    'metrics 401'
    >>> fault_of("load", {"/v1/loads": Probed(404), "/get_load": Probed(404)}, "/v1/loads", "/get_load")
    'load: /v1/loads 404, /get_load 404'
    """
    asked = [(path, answers[path]) for path in paths if path in answers]
    if not asked or any(answer.good for _, answer in asked):
        return ""
    barred = next((answer for _, answer in asked if answer.status in (401, 403)), None)
    if barred is not None or len(asked) == 1:
        answer = asked[0][1] if barred is None else barred
        return f"{what} {answer.fault}" if answer.status else f"{what}: {answer.fault}"
    return f"{what}: " + ", ".join(f"{path} {answer.fault}" for path, answer in asked)


def faults(*said: str) -> str:
    """Join what is wrong, each thing once, in order.

    >>> faults("metrics 401", "", "models 401", "metrics 401")
    'metrics 401, models 401'
    """
    return ", ".join(dict.fromkeys(fault for fault in said if fault))


def read_json(decode: Callable[[bytes], Value], body: bytes) -> Value | None:
    """Decode what an engine sent, None where it is not what it should be.

    >>> read_json(msgspec.json.decode, b"[1]"), read_json(msgspec.json.decode, b"[1")
    ([1], None)
    """
    try:
        return decode(body)
    except (ValueError, RecursionError):
        return None


class _Tokens(Struct):
    tokens: list[int]


decode_tokens = msgspec.json.Decoder(_Tokens).decode


def token_ids_of(answer: bytes) -> list[int]:
    """Read the answer of POST /tokenize, as vLLM, SGLang and llama.cpp give it. Raises ValueError.

    >>> token_ids_of(b'{"count":2,"tokens":[1,2]}')
    [1, 2]
    """
    read = read_json(decode_tokens, answer)
    if read is None:
        raise ValueError("no token ids in the answer to /tokenize")
    return read.tokens


class _Details(Struct):
    cached_tokens: int | None = None


class _Usage(Struct):
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: int | None = None


class _Timings(Struct):
    cache_n: int | None = None


class _Inner(Struct):
    usage: _Usage | None = None


class _Told(Struct):
    usage: _Usage | None = None
    response: _Inner | None = None
    message: _Inner | None = None
    timings: _Timings | None = None


OUTPUT_TOKENS = re.compile(
    rb'"(?:completion_tokens|output_tokens|predicted_n)"\s*+:\s*+([0-9]{1,9})'
)
"""What completions, responses and messages, and llama.cpp call it."""

decode_told = msgspec.json.Decoder(_Told).decode


def output_tokens_of(tail: bytes) -> int:
    """Return how many tokens an answer says that it has, from its last bytes, whole or not; -1 where they do not say.

    A text that speaks of tokens says nothing: in JSON its quotes are not alone.

    >>> output_tokens_of(b'"stop"}],"usage":{"prompt_tokens":9,"completion_tokens":8}}\\n\\ndata: [DONE]')
    8
    >>> output_tokens_of(b'{"text":"\\\\"completion_tokens\\\\":8"}')
    -1
    """
    said = OUTPUT_TOKENS.findall(tail)
    return int(said[-1]) if said else -1


def cached_tokens_of(answer: bytes) -> int:
    """Return how many prompt tokens an answer says were cached, -1 where it does not say.

    Completions have `prompt_tokens_details`, responses `input_tokens_details` (in a stream within `response`), messages
    `cache_read_input_tokens` (in a stream within `message`), and llama.cpp `timings.cache_n`.

    >>> cached_tokens_of(b'{"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":8}}}')
    8
    >>> cached_tokens_of(b'{"usage":{"prompt_tokens":9,"prompt_tokens_details":null}}')
    -1
    """
    told = read_json(decode_told, answer)
    if told is None:
        return -1
    usages = [told.usage, *(inner.usage for inner in (told.response, told.message) if inner)]
    for usage in usages:
        if usage is None:
            continue
        details = usage.prompt_tokens_details or usage.input_tokens_details
        cached = usage.cache_read_input_tokens if details is None else details.cached_tokens
        if cached is not None:
            return max(cached, -1)
    cached = told.timings.cache_n if told.timings else None
    return -1 if cached is None else max(cached, -1)
