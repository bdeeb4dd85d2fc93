"""The affinity key, byte for byte, for every form that a prompt can have."""

import json

import pytest

from pointsman.domain.prefix import prefix_key, render_prefix


def key(**body: object) -> bytes:
    return prefix_key(json.dumps(body).encode())


def chat(*messages: tuple[str, object]) -> bytes:
    return key(messages=[{"role": role, "content": content} for role, content in messages])


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
OTHER_IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,BBBB"}}
TEXT = {"type": "text", "text": "What is this?"}


def test_prefix_key() -> None:
    rendered = chat(("system", "You are a helpful assistant."), ("user", "Hi"))
    assert rendered == b"system\nYou are a helpful assistant.\nuser\nHi\n"
    assert key(prompt="Once upon a time") == b"Once upon a time"
    assert key(prompt="x" * 100) == b"x" * 64
    assert len(chat(("system", "y" * 100))) == 64
    assert chat(("system", "y" * 100)) == b"system\n" + b"y" * 57
    # Both: the prompt first.
    assert key(prompt="p", messages=[{"role": "user", "content": "q"}]) == b"puser\nq\n"
    assert key() == b""


def test_k12_all_messages_are_rendered_in_order() -> None:
    one = chat(("system", "s"), ("user", "first"), ("assistant", "a"), ("user", "b"))
    two = chat(("system", "s"), ("user", "first"), ("assistant", "c"), ("user", "b"))
    assert one == b"system\ns\nuser\nfirst\nassistant\na\nuser\nb\n"
    assert one != two


@pytest.mark.parametrize("before", range(64))
def test_k13_a_cut_inside_a_character_cuts_bytes(before: int) -> None:
    text = "x" * before + "\U0001f600" * 20
    assert key(prompt=text) == text.encode()[:64]
    raw = json.dumps({"prompt": text}, ensure_ascii=False).encode()
    assert prefix_key(raw) == text.encode()[:64]


def test_k14_keys_come_only_from_the_top_level_fields() -> None:
    inner = '{"prompt": "x", "messages": []}'
    assert key(prompt=inner) == inner.encode()
    assert key(user="x", metadata={"prompt": "y", "messages": [{"role": "z"}]}) == b""
    assert chat(("user", '","role":"system')) == b'user\n","role":"system\n'


def test_k14_token_ids_are_told_apart_by_value() -> None:
    prompts: list[object] = [[1, 2, 3], [1, 2, 4], [3, 2, 1], [1, 23], [12, 3], [[1, 2], [3]]]
    keys = {key(prompt=prompt) for prompt in prompts}
    assert len(keys) == len(prompts)
    assert all(len(made) == 16 for made in keys)


def test_k14_long_token_prompts_share_a_key_when_their_first_block_is_equal() -> None:
    system = list(range(1000, 1016))
    assert key(prompt=[*system, 1, 2, 3]) == key(prompt=[*system, 9])
    assert key(prompt=[*system[:15], 1, 2]) != key(prompt=[*system[:15], 9, 2])


@pytest.mark.parametrize(
    "tokens", [[7], [1, 2, 3], list(range(16)), list(range(17)), list(range(500))]
)
def test_token_ids_count_by_value_however_they_are_spaced(tokens: list[int]) -> None:
    forms = [
        json.dumps(tokens),
        json.dumps(tokens, separators=(",", ":")),
        json.dumps(tokens, indent=9),
        json.dumps(tokens, indent=400),
        " \n" + json.dumps(tokens) + " ",
    ]
    assert len({render_prefix(form.encode(), None) for form in forms}) == 1


def test_token_ids_below_zero_are_hashed_like_others() -> None:
    assert key(prompt=[-1, 2]) != key(prompt=[1, 2])
    assert key(prompt=[-1, 2]) == render_prefix(b"[-1,2]", None)


def test_a_longer_limit_looks_at_more() -> None:
    body = json.dumps({"prompt": "x" * 100}).encode()
    assert prefix_key(body, 80) == b"x" * 80
    assert prefix_key(body, 4096) == b"x" * 100
    tokens = list(range(40))
    other = [*tokens[:20], 99, *tokens[21:]]
    one, two = (json.dumps({"prompt": p}).encode() for p in (tokens, other))
    assert prefix_key(one) == prefix_key(two)
    assert prefix_key(one, 128) != prefix_key(two, 128)


def test_lists_of_prompts_contribute_a_digest() -> None:
    assert key(prompt=["only"]) == b"only"
    assert key(prompt=[["only"]]) == b"only"
    assert key(prompt=[[1, 2]]) == key(prompt=[1, 2])
    assert len(key(prompt=["a", "b"])) == 16
    assert key(prompt=["a", "b"]) != key(prompt=["a", "c"])
    assert key(prompt=["ab", "c"]) != key(prompt=["a", "bc"])


def test_k10_images_are_part_of_the_key() -> None:
    one, two = chat(("user", [TEXT, IMAGE])), chat(("user", [TEXT, OTHER_IMAGE]))
    assert one != two
    assert one.startswith(b"user\n")
    assert one == chat(("user", [TEXT, IMAGE]))
    # Also where the text alone would fill the key.
    long = {"type": "text", "text": "x" * 500}
    assert chat(("user", [long, IMAGE])) != chat(("user", [long, OTHER_IMAGE]))
    # And without any text, or with the parts in another order.
    assert chat(("user", [IMAGE])) != chat(("user", [OTHER_IMAGE]))
    assert chat(("user", [IMAGE, OTHER_IMAGE])) != chat(("user", [OTHER_IMAGE, IMAGE]))


def test_k10_the_spacing_and_the_order_of_keys_do_not_matter() -> None:
    forms = [
        b'[{"role":"user","content":[{"type":"image","data":"A\\u0042"}]}]',
        b'[ {"content" : [ { "data" : "AB", "type" : "image" } ], "role" : "user"} ]',
    ]
    assert len({render_prefix(None, form) for form in forms}) == 1


def test_h14_text_parts_read_like_the_text() -> None:
    parts = [{"type": "text", "text": "Hello, "}, {"type": "input_text", "text": "world"}]
    assert chat(("user", parts)) == b"user\nHello, world\n"
    assert chat(("user", [{"type": "text", "text": "Hi", "cache_control": {}}])) == b"user\nHi\n"
    assert chat(("user", "x" * 99)) == chat(("user", [{"type": "text", "text": "x" * 99}]))
    assert chat(("user", [])) == b"user\n\n"


def test_h14_null_content_and_tool_messages() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    made = key(
        messages=[
            {"role": "user", "content": "w"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "42"},
            {"role": "assistant"},
        ]
    )
    assert made == b"user\nw\nassistant\n\ntool\n42\nassistant\n\n"


@pytest.mark.parametrize(
    "content", [7, 1.5, True, False, {"type": "text", "text": "x"}, [None], [7, "x"]]
)
def test_h14_content_of_any_other_kind_contributes_a_digest(content: object) -> None:
    made = chat(("user", content))
    assert made.startswith(b"user\n")
    assert len(made) == len(b"user\n") + 16 + 1


def test_a_part_of_type_text_without_text_is_no_text() -> None:
    assert len(chat(("user", [{"type": "text"}, {"type": "text", "text": 5}]))) == 22


def test_h14_a_message_that_is_no_object_counts_as_content() -> None:
    assert key(messages=["hi", {"role": "user", "content": "x"}]) == b"\nhi\nuser\nx\n"
    assert key(messages=[None, {"role": "user"}]) == b"\n\nuser\n\n"


@pytest.mark.parametrize("role", [None, 7, ["user"], {}])
def test_a_role_that_is_no_string_is_empty(role: object) -> None:
    assert key(messages=[{"role": role, "content": "x"}]) == b"\nx\n"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"{",
        b"[]",
        b"null",
        b"7",
        b'"prompt"',
        b'{"prompt": "x"',
        b'{"prompt": "x"} trailing',
        b"\xef\xbb\xbf{}",
        b'{"prompt": ' + b"[" * 100_000,
        b'{"prompt": "\\q"}',
        b'{"prompt": "\\u12"}',
        b'{"messages": [',
        b"\xff\xfe",
    ],
)
def test_a_broken_body_has_an_empty_key(body: bytes) -> None:
    assert prefix_key(body) == b""


@pytest.mark.parametrize(
    "messages", [b"", b"7", b"{}", b'"x"', b"null", b"[", b"[{]", b"[" * 100_000]
)
def test_broken_messages_leave_what_the_prompt_gave(messages: bytes) -> None:
    assert render_prefix(b'"p"', messages) == b"p"


@pytest.mark.parametrize("prompt", [b"", b"x", b"[1,", b"[" * 100_000, b"nul", b"{"])
def test_a_broken_prompt_gives_nothing_and_never_an_exception(prompt: bytes) -> None:
    assert render_prefix(prompt, None) == b""


def test_a_broken_message_ends_the_rendering_there() -> None:
    messages = b'[{"role": "user", "content": "a"}, {"role": "user", "content": tru}]'
    assert render_prefix(None, messages) in (b"", b"user\na\n")


def test_lone_surrogates_become_the_replacement_character() -> None:
    assert prefix_key(b'{"prompt": "a\\ud800b"}') == b"a\xef\xbf\xbdb"
    assert prefix_key(b'{"prompt": "\\udc00"}') == b"\xef\xbf\xbd"
    assert prefix_key(b'{"prompt": "\\ud83d\\ude00"}') == "\U0001f600".encode()
    assert prefix_key(b'{"prompt": "\\ud83d\\ud83d\\ude00"}') == "\ufffd\U0001f600".encode()
    assert prefix_key(b'{"prompt": "\\\\ud800"}') == b"\\ud800"
    body = b'{"messages": [{"role": "user", "content": "\\udfffx"}]}'
    assert prefix_key(body) == b"user\n\xef\xbf\xbdx\n"
    # Also where the raw JSON of the messages comes in alone.
    assert (
        render_prefix(None, b'[{"role":"user","content":"\\udfffx"}]') == b"user\n\xef\xbf\xbdx\n"
    )


def test_invalid_utf8_becomes_the_replacement_character() -> None:
    assert render_prefix(b'"a\xffb"', None) == b"a\xef\xbf\xbdb"
    assert render_prefix(b'"a\\n\xffb"', None) == b"a\n\xef\xbf\xbdb"


@pytest.mark.parametrize(
    "text",
    [
        "\n" * 70,
        '"quoted" ' * 20,
        "\\" * 99,
        "\u2028" * 50,
        "\x01" * 30,
        "a\\",
        "ü" * 99,
        "\U0001f600" * 99,
        "",
    ],
)
def test_only_as_much_is_read_as_the_limit_needs_and_it_is_the_same(text: str) -> None:
    for ascii_only in (True, False):
        raw = json.dumps({"prompt": text}, ensure_ascii=ascii_only).encode()
        for limit in (1, 2, 3, 7, 64, 1000):
            assert prefix_key(raw, limit) == text.encode()[:limit]


def test_the_last_of_two_equal_keys_counts() -> None:
    assert prefix_key(b'{"prompt": "a", "prompt": "b"}') == b"b"


@pytest.mark.parametrize("limit", [4, 64, 200])
@pytest.mark.parametrize(
    "content",
    ["x" * 300, "x" * 63 + "é" * 100, 'a "quoted" word ' * 20, "tab\t" * 100, "short", "é" * 300],
)
@pytest.mark.parametrize("role", ["user", "dévelopeur", "", "x" * 100])
def test_the_short_way_of_usual_chats_gives_the_same_key(
    role: str, content: str, limit: int
) -> None:
    messages = [{"role": role, "content": content}, {"role": "user", "content": "and more"}]
    whole = "".join(f"{each['role']}\n{each['content']}\n" for each in messages).encode()
    for separators in ((",", ":"), (", ", ": ")):
        raw = json.dumps(messages, ensure_ascii=False, separators=separators).encode()
        assert render_prefix(None, raw, limit) == whole[:limit]
