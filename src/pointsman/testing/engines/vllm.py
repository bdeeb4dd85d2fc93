"""A stand-in of vLLM, written from its documented surface and from what real ones were seen to answer: `FakeVllm`.

With a connector it hands prompts over. As the prefill worker it holds what it computed under a lease, until another
one has pulled it, or told it that it will not. That goes over a side channel: real sockets, but the words are this
file's own, and what is pulled is the order that the prefill worker got. The decode worker compares it with its own,
so a leg that was told something else shows in the text.

`nixl`: the decode worker is given what the prefill worker answered. `mooncake`: both are given a `transfer_id`, and
the decode worker finds the engine through GET /query.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import msgspec

from pointsman.domain.worker import Role
from pointsman.testing.client import Client, get, post
from pointsman.testing.engines.surface import BLOCK, FakeEngine, exposed, order_of, words_from
from pointsman.testing.handoffs import Over, Stage, prompt_of
from pointsman.testing.origin import Conversation, Origin, json_answer

__all__ = ["FakeVllm", "Lease"]

GONE = (OSError, EOFError)
"""What a call to an engine that dies raises."""

PULL = "/pull"


class Failed(Exception):
    """What was handed over cannot be had; its text says why."""


@dataclass
class Lease:
    """What a prefill worker holds for a decode worker: the order, and whether its answer went out whole."""

    order: bytes
    tokens: int
    told: bool = False


class FakeVllm(FakeEngine):
    """An engine that answers as vLLM does.

    `connector` is "", "nixl" or "mooncake". `held` are the leases by name, `pulled` and `notified` the names of those
    that ended because a decode worker has the blocks, or does not want them any more. A lease that nobody ends stays;
    `expire` is its time limit. As a decode worker: one that `recomputes` pays no attention to what it is given, and
    `on_failure` is what it does where it cannot pull: "fail" or "recompute".

    Stages beside those of every engine: `computed` (a prefill worker holds a lease, and has told nobody), `pulling`
    (a decode worker is about to pull), `pulled` (it has), `linked` (somebody asks on the side channel).
    """

    dialect = "vllm"
    tokenizers = ("/tokenize",)
    stages: ClassVar[dict[str, Stage]] = {
        **FakeEngine.stages,
        "computed": Stage.REQUEST,
        "pulling": Stage.REQUEST,
        "pulled": Stage.REQUEST,
        "linked": Stage.REQUEST,
    }

    def __init__(
        self, name: str, *, role: Role = Role.UNIFIED, model: str = "m", connector: str = ""
    ) -> None:
        super().__init__(name, role=role, model=model)
        self.connector = connector
        self.engine_id = f"engine-{name}"
        self.side = Origin(self._linked)
        self.held: dict[str, Lease] = {}
        self.pulled: list[str] = []
        self.notified: list[str] = []
        self.recomputes = False
        self.on_failure = "fail"
        self._leases = 0
        self._unwanted: set[str] = set()

    async def __aenter__(self) -> Self:
        await self.side.__aenter__()
        return await super().__aenter__()

    async def die(self) -> None:
        """End as a killed process does: what it held is gone."""
        self.held.clear()
        await self.side.stop()
        await super().die()

    def expire(self) -> int:
        """Let the time limit of all leases pass, and return how many there were."""
        count = len(self.held)
        self.held.clear()
        return count

    # What it tells of itself.

    def _probe(self, path: str) -> bytes | None:
        if path == "/version":
            return json_answer({"version": "0.32.0"})
        if path == "/ping":
            return self._probe("/health")
        if path == "/load":
            return json_answer({"server_load": self.running + self.load.waiting})
        return super()._probe(path)

    def _metrics(self) -> bytes:
        base, *others = [model.id for model in self.models]
        adapters = ",".join(others[: self.load.lora_slots])
        values = {
            "vllm:num_requests_running": self.running,
            "vllm:num_requests_waiting": self.load.waiting,
            "vllm:kv_cache_usage_perc": self.load.kv_usage,
            "vllm:prefix_cache_queries_total": self.queried,
            "vllm:prefix_cache_hits_total": self.cached,
            "vllm:external_prefix_cache_queries_total": self.remote_queried,
            "vllm:external_prefix_cache_hits_total": self.remote,
            'vllm:request_success_total{finished_reason="stop"}': self.served,
            f'vllm:cache_config_info{{block_size="{BLOCK}",num_gpu_blocks="{self.load.blocks}"}}': 1,
        }
        if self.load.lora_slots:
            said = f'max_lora="{self.load.lora_slots}",running_lora_adapters="{adapters}"'
            values[f'vllm:lora_requests_info{{{said},waiting_lora_adapters=""}}'] = 1
        return exposed(values, f'engine="0",model_name="{base}"')

    def _error(self, status: int, message: str, kind: str) -> bytes:
        error = {"message": message, "type": kind, "param": None, "code": status}
        return json_answer({"error": error}, status)

    # Its legs of a hand-off.

    async def _generated(self, talk: Conversation, path: str, body: dict[str, Any]) -> None:
        params = body.get("kv_transfer_params") or {}
        if self.connector and params.get("do_remote_decode"):
            await self._prefill(talk, path, body, params)
        elif self.connector and params.get("do_remote_prefill") and not self.recomputes:
            await self._decode(talk, path, body, params)
        else:
            await super()._generated(talk, path, body)

    async def _prefill(
        self, talk: Conversation, path: str, body: dict[str, Any], params: dict[str, Any]
    ) -> None:
        await self._pass(talk, "admitted")
        order, ids = order_of(path, body), prompt_of(body)
        cached = self._found(ids)
        self._leases += 1
        name = params.get("transfer_id") or f"{self.name}-{self._leases}"
        lease = Lease(order, len(ids))
        if name not in self._unwanted:
            self.held[name] = lease
        await self._pass(talk, "computed")
        told = self._handed(name, lease, cached) if self.connector == "nixl" else None
        # A stream does not carry it: whoever wants it asks for a whole answer.
        await self._tell(talk, path, body, words_from(order, body), cached, kv_transfer_params=told)
        lease.told = True

    def _handed(self, name: str, lease: Lease, cached: int) -> dict[str, Any]:
        host, _, port = self.side.address.rpartition(":")
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [_blocks(lease)],
            "remote_engine_id": self.engine_id,
            "remote_request_id": name,
            "remote_host": host,
            "remote_port": int(port),
            "tp_size": 1,
            "remote_num_tokens": lease.tokens,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": cached,
        }

    async def _decode(
        self, talk: Conversation, path: str, body: dict[str, Any], params: dict[str, Any]
    ) -> None:
        tokens = len(prompt_of(body))
        self.remote_queried += tokens
        asked = {
            "engine": params.get("remote_engine_id"),
            "name": params.get("remote_request_id") or params.get("transfer_id"),
            "blocks": params.get("remote_block_ids"),
        }
        try:
            await self._pass(talk, "admitted")
            await self._pass(talk, "pulling")
            order = await self._unless_left(talk, self._pull(params, asked))
        except Over:
            # What it knew of and will not use, it gives back.
            await self._give_back(params, asked)
            raise
        except Failed as failed:
            if self.on_failure == "recompute":
                await super()._generated(talk, path, body)
            else:
                await talk.send(self._error(500, str(failed), "InternalServerError"))
            return
        await self._pass(talk, "pulled")
        self.remote += tokens
        same = order == order_of(path, body)
        words = words_from(order, body) if same else ["prefill ", "was ", "told ", "otherwise"]
        # What came from elsewhere does not count as cached, but for what was cached there.
        cached = params.get("remote_prefill_cached_tokens", 0)
        await self._tell(talk, path, body, words, cached, kv_transfer_params=None)

    async def _pull(self, params: dict[str, Any], asked: dict[str, Any]) -> bytes:
        """Take what a prefill worker holds. Raises Failed."""
        try:
            async with self._channel(params, asked) as channel:
                answer = await channel.ask(post(asked | {"wanted": True}, PULL))
        except GONE as error:
            raise Failed(f"the prefill worker is gone: {error}") from error
        if not answer.complete or answer.status != 200:
            raise Failed(f"the prefill worker answers {answer.body.decode()}")
        return answer.body

    async def _give_back(self, params: dict[str, Any], asked: dict[str, Any]) -> None:
        try:
            async with self._channel(params, asked) as channel:
                await channel.ask(post(asked | {"wanted": False}, PULL))
        except (*GONE, Failed):
            return

    @asynccontextmanager
    async def _channel(
        self, params: dict[str, Any], asked: dict[str, Any]
    ) -> AsyncIterator[Client]:
        if self.connector == "nixl":
            address = (params["remote_host"], params["remote_port"])
        else:
            host, _, port = params["remote_bootstrap_addr"].removeprefix("http://").rpartition(":")
            address = (host, int(port))
        async with Client(address) as channel:
            if self.connector == "mooncake":
                known = await channel.ask(get("/query"))
                engines = [each["engine_id"] for each in msgspec.json.decode(known.body).values()]
                if asked["engine"] not in engines:
                    raise Failed(f"no engine {asked['engine']} among {engines}")
            yield channel

    async def _linked(self, talk: Conversation) -> None:
        """Answer on the side channel, and at the bootstrap server, which are one here."""
        try:
            await self._pass(talk, "linked")
            if talk.request.line.startswith("GET /query "):
                workers = {"0": {"0": f"tcp://{self.side.address}"}}
                entry = {"engine_id": self.engine_id, "worker_addr": workers}
                await talk.send(json_answer({"0": entry}))
                return
            asked = msgspec.json.decode(talk.request.body)
            if self.connector == "mooncake" and asked["wanted"]:  # Either leg may be the first.
                await self._unless_left(talk, self._holds(asked["name"]))
            await talk.send(self._given(asked))
        except Over:
            return

    async def _holds(self, name: str) -> None:
        while name not in self.held:
            await self._changed.wait()

    def _given(self, asked: dict[str, Any]) -> bytes:
        name = asked["name"]
        lease = self.held.get(name)
        if self.connector == "mooncake" and lease is None:
            self._unwanted.add(name)
            return json_answer({})
        if lease is None or asked["engine"] != self.engine_id:
            return json_answer({"error": f"{self.engine_id} does not hold {name}"}, 404)
        if self.connector == "nixl" and asked["blocks"] != [_blocks(lease)]:
            return json_answer({"error": f"{asked['blocks']} are not the blocks of {name}"}, 409)
        del self.held[name]
        (self.pulled if asked["wanted"] else self.notified).append(name)
        return json_answer(lease.order if asked["wanted"] else {})


def _blocks(lease: Lease) -> list[int]:
    return list(range(1, 2 + (lease.tokens - 1) // BLOCK))
