"""What the stand-ins of real engines have in common: probes, an OpenAI surface, a load, and a prefix cache.

An engine's words depend on every field of the request but those of its transport, so that one which is lost, changed
or added on the way shows in the answer. What is refused is what the real ones refuse.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, ClassVar

import msgspec

from pointsman.domain.worker import Role, ServedModel
from pointsman.testing.engines.answers import STREAMED, WHOLE, Said
from pointsman.testing.engines.inputs import OTHER, TRANSCRIPTIONS, form_of
from pointsman.testing.handoffs import (
    MAX_CONTEXT,
    FakeUnified,
    Over,
    Say,
    Stage,
    digest_words,
    halved,
    ids_of,
    prompt_of,
    stream_parts,
)
from pointsman.testing.origin import Conversation, json_answer, sse_chunk

__all__ = ["FakeEngine", "Load", "answer_of", "exposed", "order_of", "words_from"]

BLOCK = 16
"""Tokens in a block of the cache."""

TRANSPORT = frozenset(
    {
        *("stream", "stream_options", "rid", "kv_transfer_params"),
        *("bootstrap_host", "bootstrap_port", "bootstrap_room"),
    }
)
"""What says how to answer, and not what."""

LIMITS = frozenset({"max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens"})
"""What a worker that only computes the prompt is told otherwise."""

NOT_FOUND = json_answer({"detail": "Not Found"}, 404)
NOT_ALLOWED = json_answer({"detail": "Method Not Allowed"}, 405)


@dataclass
class Load:
    """What an engine says of its load, beside the requests that are under way: requests, 0 to 1, blocks, adapters."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    blocks: int = 1024
    lora_slots: int = 0


def order_of(path: str, body: Mapping[str, Any]) -> bytes:
    """Return what a prefill worker computes: all of a request but its transport and its limits."""
    kept = {name: body[name] for name in sorted(body) if name not in TRANSPORT | LIMITS}
    return msgspec.json.encode([path, kept], order="deterministic")


def words_from(order: bytes, body: Mapping[str, Any]) -> list[str]:
    """Return what is generated from what was computed, with the limits of a body."""
    limits = {name: body[name] for name in sorted(LIMITS & body.keys())}
    given = [limits[name] for name in LIMITS - {"min_tokens"} if limits.get(name)]
    return digest_words(order + msgspec.json.encode(limits), min(given, default=MAX_CONTEXT))


def answer_of(path: str, body: Mapping[str, Any]) -> str:
    """Return the text that one engine alone answers to a body."""
    return "".join(words_from(order_of(path, body), body))


def exposed(values: Mapping[str, float], labels: str) -> bytes:
    """Return metrics in the text format; a name may have labels of its own, `name{a="b"}`."""
    lines = []
    for name, value in values.items():
        bare, _, own = name.partition("{")
        kind = "counter" if bare.endswith("_total") else "gauge"
        more = f",{own}" if own else "}"
        lines += [f"# TYPE {bare} {kind}", f"{bare}{{{labels}{more} {float(value)}"]
    return "\n".join([*lines, ""]).encode()


class FakeEngine(FakeUnified):
    """An engine as it stands in a fleet: it sends no heartbeats, it is asked.

    What a test may change at any time: `models` (the first is the base one; `max_model_len` of 0 is not said), `key`
    (it is needed on every path), `ready`, `draining`, `load`, `lacks` (paths that this build does not have), `says`
    (what is answered to a path instead, until it is taken back), `says_cached` (whether usage tells of cached tokens),
    `base` (a path before all others). `under_way` counts the requests that it works on, by X-Request-Id.

    Stages beside those of a unified worker: `probed` (a GET has come), `admitted` (the engine knows the request, and
    has told nothing yet; at `asked` only its HTTP front does), `aborted` (a request has ended early).
    """

    stages: ClassVar[Mapping[str, Stage]] = {
        **FakeUnified.stages,
        "probed": Stage.REQUEST,
        "admitted": Stage.REQUEST,
        "aborted": Stage.NOTE,
    }
    dialect: ClassVar[str]
    tokenizers: ClassVar[tuple[str, ...]]
    """The paths that tokenize."""

    def __init__(self, name: str, *, role: Role = Role.UNIFIED, model: str = "m") -> None:
        super().__init__(name)
        self.role = role
        self.models = [ServedModel(model, "", MAX_CONTEXT)]
        self.key = self.base = ""
        self.ready, self.draining, self.says_cached = True, False, True
        self.load = Load()
        self.lacks: set[str] = set()
        self.says: dict[str, Say] = {}
        self.under_way: Counter[str] = Counter()
        self.served = 0
        self.queried = self.cached = self.remote_queried = self.remote = 0
        self._prompts: list[list[int]] = []

    @property
    def max_model_len(self) -> int:
        """The longest context of the base model, in tokens."""
        return self.models[0].max_model_len or MAX_CONTEXT

    @property
    def running(self) -> int:
        """How many requests it says that it is running."""
        return self.load.running + self.under_way.total()

    async def _talk(self, talk: Conversation) -> None:
        method, target, _ = talk.request.line.split(" ")
        path = target.partition("?")[0].removeprefix(self.base)
        try:
            if self.key and talk.request.header("authorization") != f"Bearer {self.key}":
                await talk.send(json_answer({"error": "Unauthorized"}, 401))
            elif not target.startswith(self.base):
                await talk.send(NOT_FOUND)
            elif said := self.says.get(path):
                await talk.send(json_answer(said.body, said.status))
            elif method == "GET":
                await self._pass(talk, "probed")
                await talk.send(self._probe(path) or self._unknown(path))
            else:
                await self._post(talk, path)
        except Over:
            return

    def _probe(self, path: str) -> bytes | None:
        """Return the answer to a GET, None where there is no such path."""
        if path == "/v1/models":
            return json_answer({"object": "list", "data": [self._model(it) for it in self.models]})
        if path == "/health":
            return json_answer(b"", 200 if self.ready and not self.draining else 503)
        return _plain(self._metrics()) if path == "/metrics" else None

    def _unknown(self, path: str) -> bytes:
        posted = path in {*WHOLE, *OTHER, *self.tokenizers, TRANSCRIPTIONS} - self.lacks
        return NOT_ALLOWED if posted else NOT_FOUND

    def _model(self, model: ServedModel) -> dict[str, Any]:
        return {
            "id": model.id,
            "object": "model",
            "created": 1,
            "owned_by": self.dialect,
            "root": model.id,
            "parent": model.parent or None,
            "max_model_len": model.max_model_len or None,
        }

    def _metrics(self) -> bytes:
        raise NotImplementedError

    def _error(self, status: int, message: str, kind: str) -> bytes:
        """Return an error as this engine words it."""
        raise NotImplementedError

    async def _post(self, talk: Conversation, path: str) -> None:
        if path in self.lacks:
            await talk.send(NOT_FOUND)
        elif path in WHOLE:
            await self._asked(talk, path, msgspec.json.decode(talk.request.body))
        elif path == TRANSCRIPTIONS:
            form = form_of(talk.request)
            text = "".join(digest_words(b"\n".join(form[name] for name in sorted(form)), 8))
            refusal = self._refused(form.get("model", b"").decode())
            await talk.send(refusal or json_answer({"text": text}))
        elif path in OTHER or path in self.tokenizers:
            body = msgspec.json.decode(talk.request.body)
            self.bodies.append(body)
            refusal = self._refused(body.get("model", self.models[0].id))
            answer = self._tokenized(body) if path in self.tokenizers else OTHER[path](body)
            await talk.send(refusal or json_answer(answer))
        else:
            await talk.send(NOT_FOUND)

    def _tokenized(self, body: dict[str, Any]) -> dict[str, Any]:
        ids = ids_of(body.get("prompt", ""), body.get("messages"))
        return {"count": len(ids), "max_model_len": self.max_model_len, "tokens": ids}

    def _refused(self, model: str) -> bytes | None:
        """Return the answer to what cannot be served now, or not by this engine."""
        if not self.ready or self.draining:
            return self._error(503, "The server is unavailable.", "ServiceUnavailable")
        if model not in {each.id for each in self.models}:
            return self._error(404, f"The model `{model}` does not exist.", "NotFoundError")
        return None

    def _refusal(self, talk: Conversation, body: dict[str, Any]) -> bytes | None:
        """Return the answer to a request that is none: what real engines say to what would mislead them."""
        unavailable = self._refused(body["model"])
        if unavailable is not None:
            return unavailable
        tokens, limit = len(prompt_of(body)), body.get("max_tokens")
        wrong = ""
        if tokens > self.max_model_len:
            wrong = f"The prompt has {tokens} tokens, the context {self.max_model_len}."
        elif "stream_options" in body and not body.get("stream"):
            wrong = "Stream options can only be defined when `stream=True`."
        elif limit is not None and body.get("min_tokens", 0) > limit:
            wrong = "min_tokens must be less than or equal to max_tokens."
        elif self.under_way[self._id(talk)]:
            wrong = f"Request id {self._id(talk)} is already running."
        return self._error(400, wrong, "BadRequestError") if wrong else None

    def _id(self, talk: Conversation) -> str:
        # Those without a name are told apart by their connections.
        return talk.request.header("x-request-id") or f"connection {talk.request.connection}"

    async def _asked(self, talk: Conversation, path: str, body: dict[str, Any]) -> None:
        self.bodies.append(body)
        await self._pass(talk, "asked")
        refusal = self._refusal(talk, body)
        if refusal is not None:
            await talk.send(refusal)
            return
        name = self._id(talk)
        self.under_way[name] += 1
        try:
            await self._generated(talk, path, body)
        except (Over, ConnectionError):
            self._enter("aborted")
            raise
        finally:
            self.under_way[name] -= 1

    async def _generated(self, talk: Conversation, path: str, body: dict[str, Any]) -> None:
        """Compute and answer. Raises Over where it ends early."""
        await self._pass(talk, "admitted")
        ids = prompt_of(body)
        cached = self._found(ids)
        await self._tell(talk, path, body, words_from(order_of(path, body), body), cached)

    async def _tell(
        self,
        talk: Conversation,
        path: str,
        body: dict[str, Any],
        words: Sequence[str],
        cached: int,
        **extra: object,
    ) -> None:
        """Answer with words, of which so many prompt tokens had not to be computed."""
        said = Said(
            body["model"],
            words,
            prompt_tokens=len(prompt_of(body)),
            cached_tokens=cached if self.says_cached else -1,
            usage=bool((body.get("stream_options") or {}).get("include_usage")),
            extra=extra,
        )
        if body.get("stream"):
            *events, last = map(sse_chunk, STREAMED[path](said))
            await self._answer(talk, stream_parts(events, last))
        else:
            await self._answer(talk, halved(json_answer(WHOLE[path](said))))
        self.served += 1

    def _found(self, ids: list[int]) -> int:
        """Return how many tokens of a prompt are in the cache, in whole blocks; after that all of it is."""
        found = max((_common(ids, other) for other in self._prompts), default=0)
        self._prompts.append(ids)
        found = min(found, len(ids) - 1) // BLOCK * BLOCK
        self.queried += len(ids)
        self.cached += found
        return found


def _plain(text: bytes) -> bytes:
    head = "HTTP/1.1 200 OK\r\ncontent-type: text/plain; version=0.0.4; charset=utf-8\r\n"
    return f"{head}content-length: {len(text)}\r\n\r\n".encode() + text


def _common(some: list[int], other: list[int]) -> int:
    both = zip(some, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))
