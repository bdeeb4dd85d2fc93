"""Prompts compared by their tokens through the whole gateway, and engines whose events say who has them."""

import asyncio
import json
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pointsman.app import Gateway
from pointsman.config import ConfigError, GatewayConfig, StaticWorker, TokenizerFile, WorkerFile
from pointsman.domain.blocks import block_hashes, pack_tokens
from pointsman.net.tokenizing import LocalTokenizer
from pointsman.parts import check_kv_events
from pointsman.testing.client import Client, post
from pointsman.testing.gateways import configured, counted, fronted, running
from pointsman.testing.kv_events import Publisher, stored
from pointsman.testing.origin import Origin

pytest.importorskip("tokenizers", reason="needs the extra: pip install 'pointsman[tokenizers]'")

pytestmark = pytest.mark.anyio

BLOCK = 16
TEXT = "abcdefgh" * 12
CHAT = "/v1/chat/completions"
TEXTS = "/v1/completions"


def ids_of(text: str) -> list[int]:
    return [ord(letter) for letter in text]


@pytest.fixture
def tokenizer(tmp_path: Path) -> TokenizerFile:
    """One id for each letter, its number in ASCII."""
    letters = {letter: ord(letter) for letter in string.printable} | {"?": 63}
    split = {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False}
    model = {"type": "WordLevel", "vocab": letters, "unk_token": "?"}
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"version": "1.0", "pre_tokenizer": split, "model": model})
    )
    (tmp_path / "template.jinja").write_text(
        "{% for each in messages %}{{ each.role }}:{{ each.content }};{% endfor %}"
    )
    return TokenizerFile(
        model="m",
        file=str(tmp_path / "tokenizer.json"),
        chat_template=str(tmp_path / "template.jinja"),
        block_tokens=BLOCK,
    )


def body(prompt: Any, **more: Any) -> bytes:
    return json.dumps({"model": "m", "prompt": prompt, **more}).encode()


class Seen:
    """The blocks that a policy with an index was asked about."""

    def __init__(self, gateway: Gateway) -> None:
        self.requests: list[Any] = []
        policy: Any = gateway.router.policy
        placed = policy.placed

        def listen(worker: Any, request: Any, now: float) -> Any:
            self.requests.append((request.block_tokens, request.blocks))
            return placed(worker, request, now)

        gateway.router._placed = listen


def tokens(ids: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    return BLOCK, block_hashes(pack_tokens(ids), 4 * BLOCK)


@pytest.mark.parametrize("long", [1, 40], ids=["at once", "in a thread"])
async def test_prompts_are_compared_by_their_tokens(tokenizer: TokenizerFile, long: int) -> None:
    text = TEXT * long
    chat = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()
    async with fronted(route_policy="kv_cost", tokenizers=(tokenizer,)) as (_, gateway, client):
        seen = Seen(gateway)
        for data in (
            post(body(text), TEXTS),
            post(chat, CHAT),
            post(body(ids_of(text)), TEXTS),
        ):
            assert (await client.ask(data)).status == 200
    assert seen.requests == [
        tokens(ids_of(text)),
        tokens(ids_of(f"user:{text};")),
        tokens(ids_of(text)),
    ]


@pytest.mark.parametrize(
    "asked",
    [
        body(TEXT, cache_salt="pepper"),
        body([TEXT, TEXT]),
        body(""),
        json.dumps({"model": "other", "prompt": TEXT}).encode(),
    ],
    ids=["salted", "several", "empty", "another model"],
)
async def test_what_is_not_known_by_its_tokens_is_compared_as_bytes(
    tokenizer: TokenizerFile, asked: bytes
) -> None:
    async with Origin() as origin:
        listed = [
            StaticWorker(id=model, url=f"http://{origin.address}", model=model)
            for model in ("m", "other")
        ]
        options: Any = {"route_policy": "cache_aware", "tokenizers": (tokenizer,)}
        async with running(listed=listed, **options) as gateway, Client(gateway.address) as client:
            seen = Seen(gateway)
            assert (await client.ask(post(asked, TEXTS))).status == 200
    assert [each for each, _ in seen.requests] == [128]


async def test_a_tokenizer_that_fails_is_no_reason_to_refuse(
    tokenizer: TokenizerFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(self: LocalTokenizer, prompt: Any) -> list[int]:
        raise RuntimeError("no")

    monkeypatch.setattr(LocalTokenizer, "encode", encode)
    async with fronted(route_policy="kv_cost", tokenizers=(tokenizer,)) as (_, gateway, client):
        seen = Seen(gateway)
        for text in (TEXT, TEXT * 40):
            assert (await client.ask(post(body(text), TEXTS))).status == 200
        assert counted(gateway, 'tl_gateway_faults_total{where="tokenizer"}') == 2
    assert [each for each, _ in seen.requests] == [128, 128]


@pytest.mark.parametrize("policy", ["least_outstanding", "prefix_hash", "affinity"])
async def test_nothing_is_tokenized_where_no_policy_asks_an_index(
    tokenizer: TokenizerFile, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalTokenizer, "encode", None)
    async with fronted(route_policy=policy, tokenizers=(tokenizer,)) as (_, gateway, client):
        assert gateway.serving.plane.token_blocks == {}
        assert (await client.ask(post(body(TEXT), TEXTS))).status == 200


async def test_a_reload_decides_anew_who_is_compared_by_tokens(
    tokenizer: TokenizerFile, tmp_path: Path
) -> None:
    source = tmp_path / "gateway.toml"

    def write(policy: str, block_tokens: int) -> None:
        source.write_text(
            f'[gateway]\nroute_policy = "{policy}"\n[[gateway.tokenizers]]\nmodel = "m"\n'
            f'file = "{tokenizer.file}"\nblock_tokens = {block_tokens}\n'
        )

    write("affinity", 16)
    async with configured(source) as gateway:
        assert (gateway.serving.plane.token_blocks, gateway.serving.block_bytes("m")) == ({}, None)
        for policy, block_tokens, expected in (
            ("kv_cost", 16, 64),
            ("kv_cost", 0, 0),
            ("kv_cost", 32, 128),
            ("weighted", 32, None),
        ):
            write(policy, block_tokens)
            assert (await gateway.reload("api")).ok
            assert gateway.serving.block_bytes("m") == expected
            assert gateway.serving.block_bytes("other") == (None if expected is None else 0)


# ------------------------------------------------------------------ events


class Engine:
    """An origin that publishes events."""

    def __init__(self) -> None:
        self.origin = Origin()
        self.events = Publisher()

    async def __aenter__(self) -> "Engine":
        await self.origin.__aenter__()
        await self.events.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.events.__aexit__()
        await self.origin.stop()

    def listed(self, name: str) -> StaticWorker:
        return StaticWorker(
            id=name,
            url=f"http://{self.origin.address}",
            model="m",
            kv_events=self.events.endpoint,
            kv_replay=self.events.replay_endpoint,
        )


async def becomes(gateway: Gateway, name: str, value: float) -> None:
    async with asyncio.timeout(10):
        while counted(gateway, name) != value:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("policy", ["kv_cost", "cache_aware", "sticky_until_saturated"])
async def test_a_prompt_goes_to_the_engine_that_says_that_it_has_it(
    tokenizer: TokenizerFile, policy: str
) -> None:
    async with Engine() as a, Engine() as b:
        engines = {"a": a, "b": b}
        options: Any = {"route_policy": policy, "tokenizers": (tokenizer,)}
        listed = [engine.listed(name) for name, engine in engines.items()]
        async with running(listed=listed, **options) as gateway, Client(gateway.address) as client:
            await becomes(gateway, "tl_gateway_kv_followed_workers", 2)
            ids = ids_of(TEXT)
            await b.events.publish(stored(range(6), ids))
            await becomes(gateway, 'tl_gateway_kv_events_total{kind="stored"}', 1)
            assert (await client.ask(post(body(TEXT), TEXTS))).status == 200
            assert [len(each.origin.requests) for each in (a, b)] == [0, 1]
            # It went: equals go to the smallest id.
            await b.events.publish(["AllBlocksCleared"])
            await becomes(gateway, 'tl_gateway_kv_events_total{kind="cleared"}', 1)
            assert (await client.ask(post(body(TEXT), TEXTS))).status == 200
            assert [len(each.origin.requests) for each in (a, b)] == [1, 1]
            assert counted(gateway, "tl_gateway_prefix_index_blocks") == 6


async def test_k05_a_polled_engine_that_was_down_is_believed_to_have_nothing(
    tokenizer: TokenizerFile,
) -> None:
    async with fronted(route_policy="kv_cost", tokenizers=(tokenizer,)) as (_, gateway, client):
        assert (await client.ask(post(body(TEXT), TEXTS))).status == 200
        (worker,) = gateway.registry.snapshot()
        assert gateway.serving.index.blocks_of(worker) == 6
        gateway._polled(worker)
        assert gateway.serving.index.blocks_of(worker) == 6
        worker.up = False
        gateway._polled(worker)
        assert gateway.serving.index.blocks_of(worker) == 0


async def test_a_worker_whose_events_are_of_no_use_says_so() -> None:
    async with Engine() as a, running(listed=[a.listed("a")], route_policy="kv_cost") as gateway:
        (worker,) = gateway.registry.snapshot()
        async with asyncio.timeout(10):
            while not worker.kv_fault:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert worker.kv_fault == "KV events: there is no tokenizer with block_tokens for m"


def test_events_without_the_extra_are_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pointsman.parts.find_spec", lambda name: None)
    check_kv_events(GatewayConfig())
    plain = StaticWorker(id="a", url="http://h:1")
    listed = StaticWorker(id="b", url="http://h:2", kv_events="tcp://h:5557")
    with pytest.raises(ConfigError) as refused:
        check_kv_events(GatewayConfig(workers=(plain, listed)))
    assert str(refused.value) == (
        "gateway.workers[1].kv_events: install the extra, pointsman[kv-events]"
    )
    with pytest.raises(ConfigError, match=r"gateway\.worker_files\[0]\.kv_events_port"):
        check_kv_events(GatewayConfig(worker_files=(WorkerFile(file="x", kv_events_port=1),)))
