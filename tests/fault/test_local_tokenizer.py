"""Hand-offs with a tokenizer of the gateway's own, over real sockets: the same tokens, and no worker asked for them."""

import json
import string
from pathlib import Path
from typing import Any

import pytest

from pointsman.config import TokenizerFile
from pointsman.testing.client import Client, post
from pointsman.testing.gateways import configured
from pointsman.testing.handoffs import (
    CHAT,
    TEXT,
    FakeDecode,
    FakePrefill,
    Fleet,
    answer_to,
    fleet,
    ids_of,
    text_of,
)

pytest.importorskip("tokenizers", reason="needs the extra: pip install 'pointsman[tokenizers]'")

pytestmark = pytest.mark.anyio

CHATTED: dict[str, Any] = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hello there"},
    ],
    "seed": 7,
    "max_tokens": 20,
}
WRITTEN: dict[str, Any] = {"model": "m", "prompt": "once upon", "seed": 7, "max_tokens": 20}

TEMPLATE = (
    '[{% for message in messages %}{"role":"{{ message.role }}","content":"{{ message.content }}"}'
    "{% if not loop.last %},{% endif %}{% endfor %}]"
)
"""How the fake workers see messages: as JSON."""


def characters(start: int = 1) -> str:
    """The tokenizer of the fake workers: the id 1, then a byte by itself, for what is printable ASCII."""
    printable = [letter for letter in string.printable if letter.isprintable()]
    vocabulary = {letter: ord(letter) for letter in printable} | {"\u0001": start}
    return json.dumps(
        {
            "version": "1.0",
            "pre_tokenizer": {
                "type": "Split",
                "pattern": {"Regex": "."},
                "behavior": "Isolated",
                "invert": False,
            },
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [
                    {"SpecialToken": {"id": "\u0001", "type_id": 0}},
                    {"Sequence": {"id": "A", "type_id": 0}},
                ],
                "pair": [],
                "special_tokens": {
                    "\u0001": {"id": "\u0001", "ids": [start], "tokens": ["\u0001"]}
                },
            },
            "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "\u0001"},
        }
    )


def put(file: str | Path, text: str) -> None:
    Path(file).write_text(text)


@pytest.fixture
def files(tmp_path: Path) -> TokenizerFile:
    file, template = tmp_path / "tokenizer.json", tmp_path / "chat.jinja"
    file.write_text(characters())
    template.write_text(TEMPLATE)
    return TokenizerFile(model="m", file=str(file), chat_template=str(template))


@pytest.mark.parametrize(
    ("path", "body"), [(CHAT, CHATTED), (TEXT, WRITTEN)], ids=["chat", "text"]
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
async def test_a_hand_off_is_the_same_and_no_worker_tokenizes(
    path: str, body: dict[str, Any], stream: bool, files: TokenizerFile
) -> None:
    async with fleet(tokenizers=(files,)) as it:
        response = await it.client.ask(post(body | {"stream": stream}, path))
        assert (response.status, response.complete) == (200, True)
        assert text_of(response) == answer_to(body, path)
        assert it.prefill.seen("tokenizing") == 0
        (order,) = it.prefill.prefills
        assert list(order.prompt_ids) == ids_of(body.get("prompt", ""), body.get("messages"))
        assert it.decode.ended == [order.request_id]


async def test_messages_that_the_template_refuses_are_tokenized_by_the_worker(
    files: TokenizerFile,
) -> None:
    put(files.chat_template, "{{ raise_exception('no') }}")
    async with fleet(tokenizers=(files,)) as it:
        response = await it.client.ask(post(CHATTED))
        assert text_of(response) == answer_to(CHATTED)
        assert it.prefill.seen("tokenizing") == 1


async def test_a_reload_takes_new_files_and_refuses_bad_ones(
    files: TokenizerFile, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = tmp_path / "gateway.toml"
    route = '[[gateway.routes]]\nmodel = "m"\ntargets = ["disaggregated"]\n'
    options = f"[gateway]\nheartbeat_miss_limit = 1000\n{route}"
    put(source, options)
    async with (
        FakePrefill("p1") as prefill,
        FakeDecode("d1") as decode,
        configured(source) as gateway,
        Client(gateway.address) as client,
    ):
        it = Fleet(gateway, client, [prefill], [decode])
        it.announce(prefill)
        it.announce(decode)

        async def first_token() -> tuple[int, int]:
            """The first token that was prefilled, and how often the worker has tokenized so far."""
            assert (await client.ask(post(WRITTEN, TEXT))).status == 200
            return prefill.prefills[-1].prompt_ids[0], prefill.seen("tokenizing")

        assert await first_token() == (1, 1)
        put(files.file, characters(start=4))
        put(source, f'{options}[[gateway.tokenizers]]\nmodel = "m"\nfile = "{files.file}"\n')
        assert (await gateway.reload("api")).changed == ("tokenizers",)
        assert await first_token() == (4, 1)
        put(files.file, characters(start=5))
        assert (await gateway.reload("api")).ok
        assert await first_token() == (5, 1)
        put(files.file, "{")
        outcome = await gateway.reload("api")
        assert not outcome.ok
        assert f'gateway.tokenizers[0].file = "{files.file}"' in outcome.message
        caplog.clear()
        assert await first_token() == (5, 1)
        put(source, options)
        assert (await gateway.reload("api")).ok
        assert await first_token() == (1, 2)
        await it.idle()
