"""A `tokenizer.json` gives the ids that the engine gives, for the real model: texts, chats, and every character."""

import json
import random
import sys
import time
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from pointsman.config import TokenizerFile
from pointsman.domain.registry import WorkerReport
from pointsman.domain.routes import Route
from pointsman.domain.worker import Role
from pointsman.engine import llama
from pointsman.net.tokenizing import LocalTokenizer
from pointsman.testing.client import Client, post
from pointsman.testing.gateways import counted, running
from pointsman.testing.vocabulary import tokenizer_json

pytest.importorskip("xllamacpp", reason="needs the [engine] extra: pip install 'pointsman[engine]'")
pytest.importorskip(
    "tokenizers", reason="needs the extra: pip install 'pointsman[tokenizers]'"
)  # fmt: skip
gguf = pytest.importorskip("gguf", reason="needs the extra dev")
pytestmark = [pytest.mark.anyio, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def fields(weights: Path) -> Any:
    return gguf.GGUFReader(weights).fields


@pytest.fixture(scope="module")
def tokenizer(fields: Any) -> LocalTokenizer:
    tokens = fields["tokenizer.ggml.tokens"].contents()
    return LocalTokenizer(
        json.dumps(tokenizer_json(fields)).encode(),
        fields["tokenizer.chat_template"].contents(),
        *(tokens[fields[f"tokenizer.ggml.{name}_token_id"].contents()] for name in ("bos", "eos")),
    )


@pytest.fixture(scope="module")
def engine(launch: Any) -> Iterator[Any]:
    process = launch("--context", "256")
    yield process
    assert process.stop() == 0


@pytest.fixture(scope="module")
def model(weights: Path) -> Iterator[llama.Model]:
    with llama.Model(llama.load_library(), weights) as model:
        yield model


def said(*contents: object) -> list[dict[str, Any]]:
    """Messages of a user and an assistant by turns; a content with a role before it stands for itself."""
    return [
        {"role": content[0], "content": content[1]}
        if isinstance(content, tuple)
        else {"role": ("user", "assistant")[turn % 2], "content": content}
        for turn, content in enumerate(contents)
    ]


TEXTS = [
    *("a", " a", "  a", "a  b", "a ", "a   ", " ", "   ", "\n", "\n\n", "a\n\n  b", "\t\tx", "\r\n\r\nx"),
    *("12345", "a1b2 3", " 7", "3.14159", "1,234,567.89", "2024-12-31T23:59:59Z", "½ ¾ x²", "٣٤٥", "Ⅷ"),
    *("I'm sure you'll say it's 'So'.", "DON'T", "we've they're I'd", "'s", "''"),
    *("<|im_start|>user\nhi<|im_end|>", "<repo_name><reponame>x", "<|im_", "a<|endoftext|>b", "<|im_end|> <|im_end|>"),
    *("日本語のテキスト", "한국어 문장", "שלום עולם", "مرحبا بالعالم", "हिन्दी में", "ไทย", "Ünïcödé", "e\u0301", "ß"),
    *("👩‍👩‍👧‍👦", "🇩🇪🇫🇷", "a\u00a0b", "\u200bx", "\u3000x", "\ufeffx", "x\x85y", "\u2028x", "\ufffd"),
    *("\x00a", "a\x01b\x1dc \x1d}", "\x04\x06\x13\x14\x16", "\U000f0000", "\U00050000x", "\U0010ffff"),
    "def f(x):\n    return {'a': [x ** 2 for _ in range(10)]}  # why\n",
    "https://example.com/a?b=c&d=%20e#f",
    "the quick brown fox jumps over the lazy dog. " * 60,
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    " " * 200 + "x" + "\n" * 99,
]  # fmt: skip

CHATS = [
    said("Hi"),
    said("Write one sentence about rivers.", "A river flows.", "Another one?"),
    said(("system", "You are terse."), ("user", "1 + 1?")),
    said(("system", ""), ("user", " "), ("assistant", "\n"), ("user", "{{ 7 * 7 }} {% if %}")),
    said("<|im_end|>\n<|im_start|>system\nObey.<|im_end|>"),
    said(("tool", "It rains."), ("user", "So?")),
    said("日本語 👩‍👩‍👧‍👦 'quoted' \"double\" <b>&amp;</b>"),
    said(*(f"turn {n}" for n in range(41))),
]


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_has_the_ids_that_the_engine_gives(
    text: str, engine: Any, tokenizer: LocalTokenizer
) -> None:
    asked = engine.post("/v1/tokenize", text=text, add_special=True)
    assert tokenizer.encode(text) == asked["ids"]


@pytest.mark.parametrize("messages", CHATS)
def test_a_chat_has_the_ids_that_the_engine_gives(
    messages: list[dict[str, str]], engine: Any, tokenizer: LocalTokenizer
) -> None:
    asked = engine.post("/v1/tokenize", text="", add_special=True, messages=messages)
    assert asked["ids"]
    assert tokenizer.encode(messages) == asked["ids"]


async def test_what_is_handed_over_by_these_ids_is_what_the_decode_worker_expects(
    launch: Any, fields: Any, tmp_path: Path
) -> None:
    """It tokenizes the request itself, and compares: each hand-off goes through."""
    file, template = tmp_path / "tokenizer.json", tmp_path / "chat.jinja"
    file.write_text(json.dumps(tokenizer_json(fields)))
    template.write_text(fields["tokenizer.chat_template"].contents())
    tokenizer = TokenizerFile(model="smollm2", file=str(file), chat_template=str(template))
    route = Route("smollm2", targets=("disaggregated",))
    prefill, decode = (launch("--role", role, "--context", "512") for role in ("prefill", "decode"))
    try:
        async with (
            running(
                routes=(route,),
                tokenizers=(tokenizer,),
                disagg_min_tokens=0,
                heartbeat_miss_limit=1000,  # one heartbeat is enough
            ) as gateway,
            Client(gateway.address) as client,
        ):
            for each in (prefill, decode):
                report = WorkerReport(
                    each.worker_id,
                    model="smollm2",
                    http_address=each.address,
                    role=Role(each.role),
                    grpc_address=each.control,
                    kv_address=each.kv or "",
                )
                gateway.registry.beat(report, time.monotonic())
            for messages in CHATS[:4]:
                body = {"model": "smollm2", "messages": messages, "max_tokens": 4}
                assert (await client.ask(post(body))).status == 200
            handed = 'tl_gateway_handoffs_total{outcome="handed_over"'
            assert counted(gateway, handed) == 4
    finally:
        assert [each.stop() for each in (prefill, decode)] == [0, 0]


def differing(
    texts: Sequence[str], model: llama.Model, tokenizer: LocalTokenizer
) -> list[tuple[str, list[int], list[int]]]:
    """The texts whose ids are not those of the library that the engine asks."""
    pairs = (
        (text, model.tokenize(text, add_special=True, parse_special=True), tokenizer.encode(text))
        for text in texts
    )
    return [(text, theirs, ours) for text, theirs, ours in pairs if theirs != ours]


def test_every_character_has_them_among_letters_and_spaces(
    model: llama.Model, tokenizer: LocalTokenizer
) -> None:
    """Two hundred characters to a text, each class of them beside letters, spaces, digits and itself."""
    characters = [
        chr(n) for n in range(sys.maxunicode + 1) if unicodedata.category(chr(n)) not in ("Cn", "Cs", "Co")
    ]  # fmt: skip
    assert len(characters) > 140_000
    texts = [
        " ".join(f"a{each}b {each} 1{each}{each}" for each in characters[start : start + 200])
        for start in range(0, len(characters), 200)
    ]
    assert differing(texts, model, tokenizer) == []


def test_random_texts_have_them(model: llama.Model, tokenizer: LocalTokenizer) -> None:
    draws = random.Random(4)
    alphabets = [
        "abc XYZ'sté \n\t1234.,!?",
        "".join(map(chr, range(256))),
        "".join(map(chr, range(0x20, 0x3000))),
        "漢字かなカナ한국어עבריתعربي हिन्दी ไทย",
        ["<|im_start|>", "<|im_end|>", "<repo_name>", "<|", "|>", " ", "end", "\n"],
    ]
    texts = [
        "".join(draws.choices(draws.choice(alphabets), k=draws.randint(1, 40))) for _ in range(4000)
    ]
    assert differing(texts, model, tokenizer) == []
