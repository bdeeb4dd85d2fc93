"""A stand-in of SGLang, written from its documented surface and from field reports of its faults: `FakeSglang`.

Apart, a prefill and a decode worker get the same request at the same time, with a room: they meet there, and neither
answers without the other one. What real ones do badly when that fails, these do too. A leg that is aborted says
nothing to the other one, which waits until it is aborted itself; and a decode worker whose prefill worker refused the
prompt generates nonsense, with status 200.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, ClassVar, Self

import msgspec

from pointsman.domain.worker import Role
from pointsman.testing.client import Client, post
from pointsman.testing.engines.surface import BLOCK, FakeEngine, exposed, order_of, words_from
from pointsman.testing.handoffs import Happened, Over, Stage, digest_words, prompt_of
from pointsman.testing.origin import Conversation, Origin, json_answer

__all__ = ["FakeSglang"]

MEET = "/meet"


class Room:
    """Where two legs meet, at the prefill worker."""

    def __init__(self) -> None:
        self.met = asyncio.Event()  # the decode worker is here
        self.ready = asyncio.Event()  # there is something to take, or never will be
        self.taken = asyncio.Event()
        self.order: bytes | None = None


class FakeSglang(FakeEngine):
    """An engine that answers as SGLang does.

    With the role prefill or decode it takes part in hand-offs, and refuses requests without a room. `held` are the
    rooms in which it waits or holds something, `rooms` all in which it ever was, in order. `input_limit` is the longest
    prompt that a prefill worker takes, in tokens, 0 for that of the context. A `deaf` one does not look at its
    connection while it waits for the other leg: only /abort_request ends that.

    Stages beside those of every engine: `waiting` (it is about to wait for the other leg), `computed` (a prefill worker
    has met a decode worker and computed the prompt, nothing is handed over), `transferred` (it is). `aborted_ids` are
    the ids of the calls of /abort_request.
    """

    dialect = "sglang"
    tokenizers = ("/tokenize", "/v1/tokenize")
    stages: ClassVar[dict[str, Stage]] = {
        **FakeEngine.stages,
        "waiting": Stage.REQUEST,
        "computed": Stage.REQUEST,
        "transferred": Stage.REQUEST,
    }

    def __init__(self, name: str, *, role: Role = Role.UNIFIED, model: str = "m") -> None:
        super().__init__(name, role=role, model=model)
        self.bootstrap = Origin(self._met)
        self.held: set[int] = set()
        self.rooms: list[int] = []
        self.input_limit = 0
        self.deaf = False
        self.aborted_ids: list[str] = []
        self._rooms: dict[int, Room] = {}
        self._by_id: dict[str, asyncio.Task[None]] = {}

    async def __aenter__(self) -> Self:
        await self.bootstrap.__aenter__()
        return await super().__aenter__()

    async def die(self) -> None:
        """End as a killed process does: what it held is gone."""
        self.held.clear()
        await self.bootstrap.stop()
        await super().die()

    # What it tells of itself.

    def _probe(self, path: str) -> bytes | None:
        disaggregation = {Role.UNIFIED: "null", Role.PREFILL: "prefill", Role.DECODE: "decode"}
        match path.replace("/get_model_info", "/model_info").replace("/get_server", "/server"):
            case "/health_generate":
                return self._probe("/health")
            case "/model_info":
                return json_answer({"model_path": self.models[0].id, "is_generation": True})
            case "/server_info":
                info = {
                    "model_path": self.models[0].id,
                    "served_model_name": self.models[0].id,
                    "context_length": self.max_model_len,
                    "max_total_num_tokens": self.load.blocks * BLOCK,
                    "page_size": BLOCK,
                    "enable_lora": bool(self.load.lora_slots),
                    "max_loras_per_batch": self.load.lora_slots,
                    "disaggregation_mode": disaggregation[self.role],
                    "disaggregation_bootstrap_port": int(self.bootstrap.address.split(":")[1]),
                    "version": "0.5.9",
                }
                return json_answer(info)
            case "/v1/loads":
                return json_answer({"version": "0.5.9", "loads": [self._loads()]})
            case "/get_load":
                waiting = self.load.waiting
                load = {"num_reqs": self.running + waiting, "num_waiting_reqs": waiting}
                return json_answer([{"dp_rank": 0, **load, "num_tokens": self._used()}])
        return super()._probe(path)

    def _used(self) -> int:
        return int(self.load.kv_usage * self.load.blocks * BLOCK)

    def _loads(self) -> dict[str, Any]:
        return {
            "dp_rank": 0,
            "num_running_reqs": self.running,
            "num_waiting_reqs": self.load.waiting,
            "num_used_tokens": self._used(),
            "max_total_num_tokens": self.load.blocks * BLOCK,
            "token_usage": self.load.kv_usage,
            "cache_hit_rate": self.cached / max(self.queried, 1),
        }

    def _metrics(self) -> bytes:
        values = {
            "sglang:num_running_reqs": self.running,
            "sglang:num_queue_reqs": self.load.waiting,
            "sglang:token_usage": self.load.kv_usage,
            "sglang:num_used_tokens": self._used(),
            "sglang:max_total_num_tokens": self.load.blocks * BLOCK,
            "sglang:cache_hit_rate": self.cached / max(self.queried, 1),
            "sglang:prompt_tokens_total": self.queried,
            "sglang:cached_tokens_total": self.cached,
            f'sglang:cache_config_info{{page_size="{BLOCK}",num_pages="{self.load.blocks}"}}': 1,
        }
        return exposed(values, f'model_name="{self.models[0].id}",engine_type="{self.role}"')

    def _error(self, status: int, message: str, kind: str) -> bytes:
        error = {"object": "error", "message": message, "type": kind, "param": None, "code": status}
        return json_answer(error, status)

    # What it does.

    async def _post(self, talk: Conversation, path: str) -> None:
        if path == "/abort_request":
            asked = msgspec.json.decode(talk.request.body)
            self.aborted_ids.append(asked["rid"])
            for name, work in self._by_id.items():
                if asked.get("abort_all") or name == asked["rid"]:
                    work.cancel()
            await talk.send(json_answer(b""))
        else:
            await super()._post(talk, path)

    async def _generated(self, talk: Conversation, path: str, body: dict[str, Any]) -> None:
        """Compute and answer, in a task of its own, which others can end by the `rid` of the body."""
        loop = asyncio.get_running_loop()
        work = loop.create_task(self._leg(talk, path, body))
        name = body.get("rid", "")
        self._by_id[name] = work
        try:
            await asyncio.wait((work,))
        finally:
            self._by_id.pop(name, None)
            work.cancel()
        if not work.cancelled():
            work.result()
            return
        if talk.begun:
            talk.close()
        else:
            await talk.send(self._error(503, "Abort in waiting queue", "ServiceUnavailable"))
        raise Over

    async def _leg(self, talk: Conversation, path: str, body: dict[str, Any]) -> None:
        if self.role is Role.UNIFIED:
            await super()._generated(talk, path, body)
            return
        number = body.get("bootstrap_room")
        if number is None:
            wrong = "Disaggregated request received without bootstrap room id."
            await talk.send(self._error(400, wrong, "BadRequestError"))
            return
        self.rooms.append(number)
        self.held.add(number)
        try:
            await self._pass(talk, "admitted")
            await (self._prefill if self.role is Role.PREFILL else self._decode)(
                talk, path, body, number
            )
        finally:
            self.held.discard(number)

    async def _prefill(
        self, talk: Conversation, path: str, body: dict[str, Any], number: int
    ) -> None:
        room = self._room(number)
        ids = prompt_of(body)
        if self.input_limit and len(ids) > self.input_limit:
            room.ready.set()
            wrong = f"Input length ({len(ids)} tokens) exceeds {self.input_limit} tokens."
            await talk.send(self._error(400, wrong, "BadRequestError"))
            return
        await self._pass(talk, "waiting")
        await self._together(talk, room.met.wait())
        await self._pass(talk, "computed")
        cached = self._found(ids)
        room.order = order_of(path, body)
        room.ready.set()
        await self._together(talk, room.taken.wait())
        await self._pass(talk, "transferred")
        await self._tell(talk, path, body, words_from(room.order, body)[:1], cached)

    async def _decode(
        self, talk: Conversation, path: str, body: dict[str, Any], number: int
    ) -> None:
        await self._pass(talk, "waiting")
        order = await self._together(talk, self._meet(body, number))
        await self._pass(talk, "transferred")
        tokens = len(prompt_of(body))
        if order is None:
            await talk.send(self._error(500, "KVTransferError", "InternalServerError"))
            return
        own = order_of(path, body)
        # Nonsense is what real ones generate from a cache that was never filled.
        words = words_from(order, body) if order == own else digest_words(b"nonsense" + own, 8)
        self.remote_queried += tokens
        self.remote += tokens if order == own else 0
        await self._tell(talk, path, body, words, 0)

    async def _together(
        self, talk: Conversation, happens: Coroutine[Any, Any, Happened]
    ) -> Happened:
        """Wait for the other leg. Raises Over where whoever asked leaves, and it is looked at."""
        return await (happens if self.deaf else self._unless_left(talk, happens))

    async def _meet(self, body: dict[str, Any], number: int) -> bytes | None:
        """Wait for what the prefill worker has computed: b"" where it refused, None where it is gone."""
        try:
            async with Client((body["bootstrap_host"], body["bootstrap_port"])) as channel:
                answer = await channel.ask(post({"room": number}, MEET))
        except (OSError, EOFError):
            return None
        return answer.body if answer.complete else None

    def _room(self, number: int) -> Room:
        return self._rooms.setdefault(number, Room())

    async def _met(self, talk: Conversation) -> None:
        """Let a decode worker wait in a room, however long."""
        room = self._room(msgspec.json.decode(talk.request.body)["room"])
        room.met.set()
        try:
            await self._unless_left(talk, room.ready.wait())
        except Over:
            return
        await talk.send(json_answer(room.order or b""))
        room.taken.set()
