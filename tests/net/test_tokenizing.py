"""Tokenizers of the gateway's own: what they make of files, and threads that leave the loop alone."""

import asyncio
import json
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from pointsman.config import ConfigError, GatewayConfig, TokenizerFile
from pointsman.flow.effects import Encode, Encoded, Lost, PromptText, Why
from pointsman.net.clock import Deadlines
from pointsman.net.tokenizing import LocalTokenizer, TemplateRefused, TokenizerUnusable, Tokenizing
from pointsman.parts import tokenizers

pytest.importorskip("tokenizers", reason="needs the extra: pip install 'pointsman[tokenizers]'")

pytestmark = pytest.mark.anyio

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.role }}:{{ message.content }};"
    "{% endfor %}{% if add_generation_prompt %}!{% endif %}{{ eos_token }}"
)
HI = [{"role": "u", "content": "b"}]


def letters(**changes: Any) -> bytes:
    """A tokenizer of the letters a to z as 0 to 25, of every other character as 26, and of the mark `<s>` as 27."""
    vocabulary = {chr(97 + n): n for n in range(26)} | {"?": 26}
    mark = {
        "id": 27,
        "content": "<s>",
        "special": True,
        **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
    }
    tokenizer = {
        "version": "1.0",
        "added_tokens": [mark],
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "?"},
        **changes,
    }  # fmt: skip
    return json.dumps(tokenizer).encode()


def test_a_text_becomes_ids_and_marks_in_it_count() -> None:
    assert LocalTokenizer(letters()).encode("ab<s>c") == [0, 1, 27, 2]


def test_what_the_file_puts_around_a_prompt_is_put_there() -> None:
    around = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<s>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [27], "tokens": ["<s>"]}},
    }
    tokenizer = LocalTokenizer(letters(post_processor=around), "{{ messages[0].content }}")
    assert tokenizer.encode("ab") == [27, 0, 1]
    assert tokenizer.encode(HI) == [27, 1]


def test_a_prompt_is_neither_cut_nor_filled_up() -> None:
    cut = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    fill = {
        "strategy": {"Fixed": 4},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 26,
        "pad_type_id": 0,
        "pad_token": "?",
    }
    tokenizer = LocalTokenizer(letters(truncation=cut, padding=fill))
    assert tokenizer.encode("abc") == [0, 1, 2]
    assert tokenizer.encode("a") == [0]


def test_messages_go_through_the_template() -> None:
    tokenizer = LocalTokenizer(letters(), TEMPLATE, "<s>", "z")
    assert tokenizer.chats
    assert tokenizer.encode(HI) == tokenizer.encode("<s>u:b;!z") == [27, 20, 26, 1, 26, 26, 25]


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no') }}",
        "{{ messages[7].content.x }}",
        "{{ 1 // 0 }}",
        "{{ messages + 1 }}",
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{% set _ = messages.append('x') %}",
    ],
)
def test_a_template_that_says_no_or_stumbles_or_reaches_out_refuses(template: str) -> None:
    with pytest.raises(TemplateRefused):
        LocalTokenizer(letters(), template).encode(HI)


@pytest.mark.parametrize(
    ("file", "template", "part", "why"),
    [
        (b"{", None, "file", "EOF while parsing"),
        (b"\xff", None, "file", "expected value"),
        (b'{"model": 1}', None, "file", "did not match"),
        (letters(), "a\n{% if %}", "chat_template", "line 2: "),
    ],
)
def test_a_file_of_which_no_tokenizer_can_be_made_is_named(
    file: bytes, template: str | None, part: str, why: str
) -> None:
    with pytest.raises(TokenizerUnusable, match=why) as raised:
        LocalTokenizer(file, template)
    assert raised.value.part == part


# Options.


def options(folder: Path, **keys: str) -> GatewayConfig:
    """Options with one tokenizer, of files in a folder."""
    for name in ("file", "chat_template"):
        if name in keys:
            keys[name] = str(folder / keys[name])
    return GatewayConfig(tokenizers=(TokenizerFile(model="m", **keys),))  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "good.json").write_bytes(letters())
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "good.jinja").write_text(TEMPLATE)
    (tmp_path / "bad.jinja").write_text("{% if %}")
    (tmp_path / "latin.jinja").write_bytes(b"\xe9")
    return tmp_path


def test_the_options_say_which_model_has_which_tokenizer(folder: Path) -> None:
    found = tokenizers(options(folder, file="good.json", chat_template="good.jinja", bos_token="a"))
    assert found["m"].encode(HI)[:2] == [0, 20]
    assert not tokenizers(options(folder, file="good.json"))["m"].chats


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"file": "none.json"}, r'\[0\]\.file = ".*none\.json": No such file'),
        ({"file": "bad.json"}, r'\[0\]\.file = ".*bad\.json": Cannot instantiate'),
        (
            {"file": "good.json", "chat_template": "none.jinja"},
            r'\[0\]\.chat_template = ".*none\.jinja": No such file',
        ),
        (
            {"file": "good.json", "chat_template": "bad.jinja"},
            r'\[0\]\.chat_template = ".*bad\.jinja": line 1: ',
        ),
        (
            {"file": "good.json", "chat_template": "latin.jinja"},
            r'\[0\]\.chat_template = ".*latin\.jinja": .*utf-8',
        ),
    ],
)
def test_a_file_that_is_bad_or_not_there_is_told_by_its_key(
    folder: Path, keys: dict[str, str], why: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^gateway\.tokenizers{why}"):
        tokenizers(options(folder, **keys))


@pytest.mark.parametrize(("module", "key"), [("tokenizers", "file"), ("jinja2", "chat_template")])
def test_a_missing_extra_is_told_with_its_remedy(
    module: str, key: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # None in sys.modules is what makes an import fail.
    monkeypatch.setitem(sys.modules, module, None)
    why = rf"tokenizers\[0\]\.{key} = .*: {module} is missing: install the extra, pointsman\[tokenizers\]"
    with pytest.raises(ConfigError, match=why):
        tokenizers(options(folder, file="good.json", chat_template="good.jinja"))


def test_files_that_have_not_changed_are_not_made_into_tokenizers_again(folder: Path) -> None:
    asked = options(folder, file="good.json", chat_template="good.jinja")
    first = tokenizers(asked)
    assert tokenizers(asked, first)["m"] is first["m"]
    (folder / "good.jinja").write_text("{{ messages[0].content }}")
    second = tokenizers(asked, first)
    assert second["m"].encode(HI) == [1]
    (folder / "good.json").write_bytes(letters(added_tokens=[]))
    assert tokenizers(asked, second)["m"].encode("<s>") == [26, 18, 26]


# Threads.


class Scripted:
    """A tokenizer that waits to be let go, and then returns ids or raises."""

    chats = True

    def __init__(self, outcome: list[int] | BaseException, *, held: bool = False) -> None:
        self.outcome = outcome
        self.prompts: list[object] = []
        self.free = threading.Event()
        if not held:
            self.free.set()

    def encode(self, prompt: str | Sequence[Mapping[str, str]]) -> list[int]:
        self.prompts.append(prompt)
        assert self.free.wait(20)
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome


class Desk:
    """A `Tokenizing` of one thread, its outcomes, and the faults that it told of."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.deadlines = Deadlines(loop)
        self.faults = 0
        self.tokenizing = Tokenizing(self.deadlines, self._fault, threads=1)
        self.outcomes: asyncio.Queue[Encoded | Lost] = asyncio.Queue()

    def encode(
        self,
        tokenizer: Any,
        prompt: PromptText = "x",
        *,
        timeout_s: float = 20.0,
        left_s: float = 60.0,
    ) -> Any:
        command = Encode(tokenizer, prompt, timeout_s)
        deadline = self.deadlines.now() + left_s
        return self.tokenizing.encode(command, deadline, self.outcomes.put_nowait)

    async def outcome(self) -> Encoded | Lost:
        async with asyncio.timeout(20):
            return await self.outcomes.get()

    def _fault(self) -> None:
        self.faults += 1

    def close(self) -> None:
        self.tokenizing.close()
        self.deadlines.close()


async def test_ids_come_back_from_the_thread() -> None:
    desk = Desk()
    desk.encode(Scripted([1, 2]))
    outcome = await desk.outcome()
    assert isinstance(outcome, Encoded)
    assert (outcome.ids, desk.faults) == ([1, 2], 0)
    desk.close()


@pytest.mark.parametrize(
    ("error", "faults"), [(TemplateRefused("secret"), 0), (RuntimeError("secret"), 1)]
)
async def test_what_fails_is_lost_without_its_words_which_may_quote_the_prompt(
    error: Exception, faults: int
) -> None:
    desk = Desk()
    desk.encode(Scripted(error))
    outcome = await desk.outcome()
    assert isinstance(outcome, Lost)
    assert outcome.why is Why.TOKENIZE
    assert type(error).__name__ in outcome.detail
    assert "secret" not in outcome.detail
    assert desk.faults == faults
    desk.close()


@pytest.mark.parametrize(("timeout_s", "left_s"), [(0.0, 60.0), (20.0, 0.0), (20.0, -1.0)])
async def test_what_takes_longer_than_it_may_is_lost_and_told_once(
    timeout_s: float, left_s: float
) -> None:
    desk = Desk()
    slow = Scripted([1], held=True)
    desk.encode(slow, timeout_s=timeout_s, left_s=left_s)
    outcome = await desk.outcome()
    assert isinstance(outcome, Lost)
    assert outcome.why is Why.TIMED_OUT
    slow.free.set()
    desk.encode(Scripted([2]))
    outcome = await desk.outcome()
    assert isinstance(outcome, Encoded)
    assert (outcome.ids, desk.faults) == ([2], 0)
    desk.close()


async def test_what_is_cancelled_is_never_heard_of_and_what_had_not_begun_never_begins() -> None:
    desk = Desk()
    slow, queued = Scripted([1], held=True), Scripted([2])
    first, second = desk.encode(slow), desk.encode(queued)
    first.cancel()
    second.cancel()
    await asyncio.sleep(0)  # asyncio tells the thread's side a turn later
    slow.free.set()
    desk.encode(Scripted([3]))
    outcome = await desk.outcome()
    assert isinstance(outcome, Encoded)
    assert (outcome.ids, queued.prompts, desk.outcomes.empty()) == ([3], [], True)
    desk.close()


@pytest.mark.slow
async def test_the_loop_goes_on_while_a_long_prompt_is_encoded() -> None:
    desk = Desk()
    text = "the quick brown fox " * 20_000
    desk.encode(LocalTokenizer(letters()), text)
    turns = 0
    while desk.outcomes.empty():
        turns += 1
        await asyncio.sleep(0.001)
    outcome = await desk.outcome()
    assert isinstance(outcome, Encoded)
    assert len(outcome.ids) == len(text)
    # While the interpreter is held there is no turn at all.
    assert turns > 10
    desk.close()
