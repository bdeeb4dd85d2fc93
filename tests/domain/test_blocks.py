"""The whole rendered prompt, and its blocks: what two prompts have in common, and what parts them."""

import json
from hashlib import blake2b
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pointsman.domain.blocks import BLOCKS_MAX, block_hashes, tokens_in
from pointsman.domain.prefix import render_prefix, render_prompt
from pointsman.domain.request import BLOCKS_KEPT, InferenceRequest
from pointsman.wire.apis import api_of
from pointsman.wire.body import parse_request

SETTINGS = settings(deadline=None, derandomize=True, max_examples=150)
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
OTHER_IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,BBBB"}}


def request(path: str = "/v1/chat/completions", **body: Any) -> InferenceRequest:
    return parse_request(json.dumps({"model": "m"} | body).encode(), "r1", api=api_of(path))


def said(*contents: Any) -> list[dict[str, Any]]:
    """A dialogue that begins with a system text."""
    roles = ["system", *(["user", "assistant"] * len(contents))]
    return [{"role": role, "content": each} for role, each in zip(roles, contents, strict=False)]


def rendered(*contents: Any, **more: Any) -> bytes:
    given = request(messages=said(*contents), **more)
    return render_prompt(given.prompt, given.messages, given.system, given.tools)


def common(one: InferenceRequest, other: InferenceRequest) -> int:
    """How many leading blocks are the same. Behind the first that differs, none may be."""
    same = [a == b for a, b in zip(one.blocks, other.blocks, strict=False)]
    assert same == sorted(same, reverse=True)
    return sum(same)


# ------------------------------------------------------------------ hashes


def test_a_hash_covers_its_block_and_all_before_it() -> None:
    text = bytes(range(256)) * 8
    hashes = block_hashes(text, 512)
    assert len(hashes) == len(set(hashes)) == 4
    before = b""
    for number, found in enumerate(hashes):
        block = text[number * 512 : number * 512 + 512]
        before = blake2b(block, digest_size=8, salt=before).digest()
        assert found == int.from_bytes(before, "big")
    # The blocks are all alike, and it is the hash before that parts them.
    assert block_hashes(text[512:], 512) == hashes[:3]
    assert block_hashes(b"x" + text[1:], 512)[3] != hashes[3]


def test_the_hash_is_the_same_in_every_process_and_version() -> None:
    assert block_hashes(b"once upon a time", 8) == (0xFB810FA522A36C43, 0x3AF6D7896FEB40A6)


def test_only_whole_blocks_count() -> None:
    assert block_hashes(b"", 4) == block_hashes(b"abc", 4) == ()
    assert len(block_hashes(b"abcd", 4)) == 1
    assert block_hashes(b"abcdefg", 4) == block_hashes(b"abcd", 4)


def test_a_prompt_has_only_so_many_blocks() -> None:
    text = bytes(4 * (BLOCKS_MAX + 9))
    assert len(block_hashes(text, 4)) == BLOCKS_MAX
    assert block_hashes(text, 4, 3) == block_hashes(text, 4)[:3]


@SETTINGS
@given(st.binary(max_size=60), st.binary(max_size=60), st.binary(max_size=60), st.integers(1, 9))
def test_prompts_share_the_blocks_that_their_common_beginning_fills(start, one, other, size):  # type: ignore[no-untyped-def]
    a, b = start + one, start + other
    alike = next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    alike = min(len(a), len(b)) if alike is None else alike
    pairs = zip(block_hashes(a, size), block_hashes(b, size), strict=False)
    assert [x == y for x, y in pairs].count(True) == alike // size


def test_tokens_are_rounded_up() -> None:
    assert [tokens_in(size) for size in (0, 1, 4, 5, 512)] == [0, 1, 1, 2, 128]


# ------------------------------------------------------------------ what is rendered


def test_the_whole_of_a_dialogue_is_rendered() -> None:
    assert rendered("Be brief.", "Hi", "Ho") == b"system\nBe brief.\nuser\nHi\nassistant\nHo\n"
    assert rendered("Zeile\n\u00e4\u4f60") == "system\nZeile\n\u00e4\u4f60\n".encode()


def test_tools_stand_behind_a_system_text_and_before_what_is_said() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    shown = b'tools\n[{"type":"function","function":{"name":"f"}}]\n'
    assert rendered("S", "Hi", tools=tools) == b"system\nS\n" + shown + b"user\nHi\n"
    user = [{"role": "user", "content": "Hi"}]
    given = request("/v1/messages", system="S", messages=user, tools=tools)
    assert (
        render_prompt(None, given.messages, given.system, given.tools)
        == b"system\nS\n" + shown + b"user\nHi\n"
    )
    assert render_prompt(None, json.dumps(user).encode(), None, json.dumps(tools).encode()) == (
        shown + b"user\nHi\n"
    )
    assert render_prompt(None, None, b'"S"', b"[ 1 ]") == b"system\nS\ntools\n[1]\n"
    assert render_prompt(b'"p"', None, None, b"[1]") == b"tools\n[1]\np"


def test_calls_of_tools_are_part_of_a_history() -> None:
    def history(argument: str) -> bytes:
        call = {"id": "1", "function": {"name": "f", "arguments": argument}}
        answer = {"role": "assistant", "content": None, "tool_calls": [call]}
        return render_prompt(None, json.dumps([answer, {"role": "tool", "content": "42"}]).encode())

    assert history("{}") == (
        b'assistant\n\n[{"id":"1","function":{"name":"f","arguments":"{}"}}]\ntool\n42\n'
    )
    assert history("{}") != history("[]")
    nothing = json.dumps([{"role": "assistant", "content": "x", "tool_calls": None}]).encode()
    assert render_prompt(None, nothing) == b"assistant\nx\n"


def test_items_without_role_and_content_are_told_apart() -> None:
    call = {"type": "function_call", "name": "f", "arguments": "{}"}
    one, two = (json.dumps([call | {"name": name}]).encode() for name in "fg")
    assert render_prompt(None, one) != render_prompt(None, two)
    assert render_prompt(None, b'["hi", null, {"role": 7}]') == b"\nhi\n\n\n\n\n"


def test_token_ids_are_four_bytes_each_and_counted_exactly() -> None:
    ids = list(range(1000, 1300))
    given = request("/v1/completions", prompt=ids)
    assert (given.prompt_tokens, given.block_tokens, len(given.blocks)) == (300, 128, 2)
    for form in (ids, [ids], [[ids]]):
        assert request("/v1/completions", prompt=form).blocks == given.blocks
    spaced = json.dumps(ids, indent=7).encode()
    assert InferenceRequest("m", "r", prompt=b" " + spaced + b"\n").blocks == given.blocks


@pytest.mark.parametrize("at", [0, 127, 128, 255])
def test_k14_token_ids_are_hashed_by_value_in_blocks(at: int) -> None:
    ids = list(range(1000, 1256))
    other = ids.copy()
    other[at] += 1
    one, two = (request("/v1/completions", prompt=each) for each in (ids, other))
    assert common(one, two) == at // 128
    assert one.prompt_tokens == two.prompt_tokens


@pytest.mark.parametrize(
    "prompt", [[-1, 2], [1 << 32], ["a", "b"], [[1, 2], [3]], [True, 1], [1.5], 7, {"a": 1}, [None]]
)
def test_what_is_neither_text_nor_token_ids_is_a_digest_of_its_value(prompt: Any) -> None:
    loose, tight = json.dumps(prompt, indent=2), json.dumps(prompt, separators=(",", ":"))
    assert render_prompt(loose.encode(), None) == render_prompt(tight.encode(), None)
    assert len(render_prompt(tight.encode(), None)) == 16


def test_one_prompt_in_a_list_is_that_prompt() -> None:
    assert render_prompt(b'["only"]', None) == render_prompt(b'[["only"]]', None) == b"only"
    assert render_prompt(b"[]", None) == render_prompt(b"null", None) == b""


def test_h14_content_of_text_parts_reads_like_the_text() -> None:
    parts = [{"type": "text", "text": "Hello, "}, {"type": "input_text", "text": "world"}]
    assert rendered(parts) == rendered("Hello, world")


@pytest.mark.parametrize("prompt", [b"", b"x", b"[1,", b"[" * 100_000, b"nul", b"{", b'"\\q"'])
def test_a_broken_prompt_gives_nothing_and_never_an_exception(prompt: bytes) -> None:
    assert render_prompt(prompt, None) == b""
    assert InferenceRequest("m", "r", prompt=prompt).blocks == ()
    assert render_prompt(None, b"[]", b'"s"', prompt) in (b"system\ns\n", b"system\ns\ntools\n\n")


def test_a_broken_message_ends_the_rendering_there() -> None:
    assert render_prompt(b'"p"', b"[{") == b"p"
    deep = b'[{"role":"user","content":"a"},{"role":"user","content":%b}]' % (b"[" * 5000)
    assert render_prompt(b'"p"', deep) in (b"p", b"puser\na\n")


def test_lone_surrogates_become_the_replacement_character() -> None:
    assert render_prompt(b'"a\\ud800b"', None) == "a\ufffdb".encode()
    parts = b'[{"role":"user","content":[{"type":"text","text":"\\udfff"}]}]'
    assert render_prompt(None, parts) == "user\n\ufffd\n".encode()


def test_bytes_that_are_no_utf8_stay_where_nothing_has_to_be_decoded() -> None:
    assert render_prompt(b'"a\xffb"', None) == b"a\xffb"
    assert render_prompt(b'"a\\n\xffb"', None) == b"a\n\xef\xbf\xbdb"


ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=90)
MESSAGES = st.lists(
    st.tuples(st.sampled_from(["system", "user"]) | ANY_TEXT, ANY_TEXT | st.none()), max_size=5
)


@SETTINGS
@given(st.none() | ANY_TEXT, MESSAGES, st.none() | ANY_TEXT, st.booleans(), st.integers(1, 200))
def test_of_texts_the_affinity_key_is_the_beginning(prompt, messages, system, ascii_only, limit):  # type: ignore[no-untyped-def]
    def raw(value: Any) -> bytes | None:
        return None if value is None else json.dumps(value, ensure_ascii=ascii_only).encode()

    chat = raw([{"role": role, "content": content} for role, content in messages])
    whole = render_prompt(raw(prompt), chat, raw(system))
    assert whole[:limit] == render_prefix(raw(prompt), chat, limit, raw(system))


# ------------------------------------------------------------------ field reports

LONG = "Answer from the documents and cite them. " * 50


def test_k12_every_message_parts_histories_and_not_the_first_alone() -> None:
    base = [LONG, LONG + "one", LONG + "two", LONG + "three"]
    whole = request(messages=said(*base))
    for number in range(4):
        changed = base.copy()
        changed[number] = "!" + changed[number]
        other = request(messages=said(*changed))
        before = len(rendered(*base[:number])) + len("assistant\n" if number == 2 else "user\n")
        assert common(whole, other) in (before // 512, (before + 2) // 512)
        assert whole.blocks != other.blocks


def test_k12_a_turn_more_keeps_all_blocks_of_the_turns_before() -> None:
    turns = [LONG, LONG, "short", LONG, LONG]
    for count in range(1, 5):
        shorter, longer = (request(messages=said(*turns[:n])) for n in (count, count + 1))
        assert common(shorter, longer) == len(shorter.blocks)


@pytest.mark.parametrize("before", range(8))
def test_k13_a_block_that_ends_inside_a_character_is_cut_as_bytes(before: int) -> None:
    text = "x" * before + "\U0001f600" * 400
    plain = block_hashes(text.encode(), 512)
    for ascii_only in (True, False):
        raw = json.dumps(text, ensure_ascii=ascii_only).encode()
        assert InferenceRequest("m", "r", prompt=raw).blocks == plain
    other = text[:-1] + "\U0001f601"
    assert InferenceRequest("m", "r", prompt=json.dumps(other).encode()).blocks[:3] == plain[:3]


def test_k10_different_images_part_and_the_text_before_them_does_not() -> None:
    def asked(image: Any, *after: str) -> InferenceRequest:
        parts = [
            {"type": "text", "text": LONG},
            image,
            *({"type": "text", "text": t} for t in after),
        ]
        return request(messages=said("S", parts))

    one, two = asked(IMAGE, LONG), asked(OTHER_IMAGE, LONG)
    assert common(one, two) == len(b"system\nS\nuser\n" + LONG.encode()) // 512
    assert common(one, asked(IMAGE, LONG)) == len(one.blocks) == len(two.blocks)
    # What comes behind an image is not the same with another one before it.
    assert common(asked(IMAGE, LONG), asked(IMAGE, LONG + "x")) == len(one.blocks)
    first = request(messages=said([IMAGE, {"type": "text", "text": LONG}]))
    other = request(messages=said([OTHER_IMAGE, {"type": "text", "text": LONG}]))
    assert common(first, other) == 0
    # A picture of megabytes is not a prompt of as many tokens.
    huge = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 99_999}}
    assert asked(huge).prompt_tokens == asked(IMAGE).prompt_tokens


def test_k10_the_spacing_and_the_order_of_keys_do_not_matter() -> None:
    forms = [
        b'[{"role":"user","content":[{"type":"image","data":"A\\u0042"}]}]',
        b'[ {"content" : [ { "data" : "AB", "type" : "image" } ], "role" : "user"} ]',
    ]
    assert len({render_prompt(None, form) for form in forms}) == 1


# ------------------------------------------------------------------ requests


def test_blocks_and_tokens_are_those_of_the_whole_prompt() -> None:
    given = request(messages=said("S" * 1000, "U" * 1000))
    whole = rendered("S" * 1000, "U" * 1000)
    assert given.prompt_tokens == tokens_in(len(whole)) == 504
    assert given.blocks is given.blocks
    assert given.blocks == block_hashes(whole, 512)
    assert request(messages=said("S" * 1000, "U" * 1000)).blocks == given.blocks
    # In the other order, too.
    again = request(messages=said("S" * 1000, "U" * 1000))
    assert (len(again.blocks), again.prompt_tokens) == (3, 504)


def test_the_size_of_a_block_is_an_option() -> None:
    given = InferenceRequest("m", "r", prompt=b'"%b"' % (b"x" * 64), block_bytes=16)
    assert (given.block_tokens, len(given.blocks)) == (4, 4)


def test_a_request_of_blocks_is_known_by_these_alone() -> None:
    given = InferenceRequest.of_blocks("m", "r1", (7, 1 << 63), 1100)
    assert (given.blocks, given.block_tokens, given.prompt_tokens) == ((7, 1 << 63), 512, 1100)
    assert given.prefix_key == bytes(7) + b"\x07"
    assert InferenceRequest.of_blocks("m", "r1", (7,), 9).prefix_key == given.prefix_key
    assert InferenceRequest.of_blocks("m", "r1", (8,), 9).prefix_key != given.prefix_key
    short = InferenceRequest.of_blocks("m", "r1", (), 9, block_tokens=16)
    assert (short.blocks, short.block_tokens, short.prompt_tokens, short.prefix_key) == (
        *((), 16, 9),
        b"",
    )


def test_a_record_of_a_request_keeps_a_few_blocks_and_no_text() -> None:
    given = request(messages=said("x" * 512 * 40))
    blocks, tokens = given.blocks, given.prompt_tokens
    given.forget()
    assert given.blocks == blocks[:BLOCKS_KEPT]
    assert given.prompt_tokens == tokens
    never_asked = request(messages=said("x" * 512 * 40))
    never_asked.forget()
    assert (never_asked.blocks, never_asked.prompt_tokens) == ((), 0)
