"""JSON bodies: what is read of them, and what of them changes; every other byte is the client's."""

import json
import time

import msgspec
import pytest

from pointsman.errors import BadRequest
from pointsman.wire.body import (
    elements,
    members,
    parse_request,
    readable,
    says_model_once,
    with_fields,
    with_model,
)


def read(body: bytes) -> str:
    return parse_request(body, "r1").model


def test_model_rewritten_for_backend() -> None:
    body = (
        b'{ "stream":true,\t"model" : "smol", "temperature":1.0,"seed":7E2, "x_unknown": [1 ,2],\r\n'
        b'  "messages":[{"role":"user","content":"use \\"model\\": \\"smol\\" \\u00e9 \xf0\x9f\x98\x80"}],'
        b'"metadata":{"model":"smol"}, "n":-0 }\n'
    )
    public, served = b'"model" : "smol"', b'"model" : "smol-v2"'
    assert body.count(public) == 1
    assert with_model(body, "smol-v2") == body.replace(public, served)


class TestReading:
    def test_the_fields_that_routing_needs(self) -> None:
        body = b'{"model":"m","stream":true,"prompt":"a","messages":[{"role":"user"}],"n":1}'
        request = parse_request(body, "r1", affinity_bytes=128, block_bytes=64)
        assert (request.model, request.request_id, request.stream) == ("m", "r1", True)
        assert request.prompt is not None
        assert request.messages is not None
        assert (bytes(request.prompt), bytes(request.messages)) == (b'"a"', b'[{"role":"user"}]')
        assert (request.affinity_bytes, request.block_bytes) == (128, 64)

    def test_absent_fields_are_absent(self) -> None:
        request = parse_request(b'{"model":"m"}', "r1")
        assert (request.stream, request.prompt, request.messages) == (False, None, None)

    @pytest.mark.parametrize("value", [b"false", b"null", b"1", b'"true"', b"[true]", b"{}"])
    def test_only_true_asks_for_a_stream(self, value: bytes) -> None:
        assert not parse_request(b'{"model":"m","stream":' + value + b"}", "r").stream

    @pytest.mark.parametrize("space", [b" ", b"\n", b"\t \r\n"])
    def test_space_is_no_part_of_a_value(self, space: bytes) -> None:
        body = b'{"stream":%btrue%b,"model":%b"m"%b}' % (space, space, space, space)
        request = parse_request(space + body + space, "r")
        assert (request.model, request.stream) == ("m", True)

    def test_escapes_in_the_key_and_the_value(self) -> None:
        assert read(rb'{"\u006dodel":"\u006d\n\ud83d\ude00"}') == "m\n\U0001f600"

    def test_the_last_of_several_models_is_the_one(self) -> None:
        assert read(b'{"model":"a","model":"b"}') == "b"

    def test_h01_unknown_fields_are_not_looked_at(self) -> None:
        assert (
            read(b'{"return_token_ids":true,"chat_template_kwargs":{"x":[1]},"model":"m"}') == "m"
        )

    def test_a_model_has_256_characters_at_most(self) -> None:
        """Records of requests keep it: a client must not fill the memory with it."""
        longest = "\u00e9" * 256
        assert read(f'{{"model":"{longest}"}}'.encode()) == longest
        for size in (257, 1_000_000):
            with pytest.raises(BadRequest, match="256 characters") as refused:
                read(b'{"model":"' + b"x" * size + b'"}')
            assert refused.value.param == "model"

    @pytest.mark.parametrize(
        "content",
        [
            b'"text"',
            b"null",
            b"[]",
            b'[{"type":"text","text":"a"}]',
            b'[{"type":"text","text":"a"},{"type":"image_url","image_url":{"url":"data:..."}}]',
            b'[{"type":"input_audio","input_audio":{"data":"","format":"wav"}}]',
            b'"half of a pair \\ud83d"',
            b"7",
            b'{"odd":true}',
        ],
    )
    def test_h14_every_form_of_content(self, content: bytes) -> None:
        tool = b'{"role":"tool","tool_call_id":"c1","content":%b}' % content
        calls = b'{"role":"assistant","content":null,"tool_calls":[{"id":"c1","function":{"arguments":"{}"}}]}'
        messages = b'[{"role":"user","content":%b},%b,%b]' % (content, calls, tool)
        request = parse_request(b'{"model":"m","messages":' + messages + b"}", "r")
        assert request.prefix_key.startswith(b"user\n")

    @pytest.mark.parametrize("prompt", [b'"a"', b"[1,2,3]", b'["a","b"]', b"[[1],[2]]", b"null"])
    def test_h14_every_form_of_prompt(self, prompt: bytes) -> None:
        request = parse_request(b'{"model":"m","prompt":' + prompt + b"}", "r")
        assert isinstance(request.prefix_key, bytes)


class TestRefusing:
    @pytest.mark.parametrize(
        "body",
        [
            b"",
            b" ",
            b"{",
            b"}",
            b"null",
            b"[]",
            b'"m"',
            b"7",
            b'[{"model":"m"}]',
            b"not json",
            b"{'model':'m'}",
            b"{model:1}",
            b'{"model":"m"',
            b'{"model":"m"}}',
            b'{"model":"m"} {}',
            b'{"model":"m",}',
            b'{"model":"m","x":}',
            b'{"model":"m" "x":1}',
            b'{"model":"m","x":NaN}',
            b'{"model":"m","x":-Infinity}',
            b'{"model":NaN}',
            b'{"model":"m","x":01}',
            b'{"model":"m","x":1.}',
            b'{"model":"m","x":tru}',
            b'{"model":"m","x":"\n"}',
            b'{"model":"m","x":"\\q"}',
            b'{"model":"m","x":"\\u12"}',
            b'{"model":"m","x":"\\',
            b'{"model":"m","x":"\\ud83d',
            b'{"model":"m","x":"\\ud83d"',
            b'{"model":"\xff"}',
            b'{"model":"m"\x00}',
            b'\xef\xbb\xbf{"model":"m"}',
            '{"model":"m"}'.encode("utf-16"),
            '{"model":"m"}'.encode("utf-16-be"),
            b"[" * 200_000,
            b'{"model":"m","x":' + b"[" * 200_000,
            b'{"model":"m","x":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
            b'{"model":"m","x":"\\ud83d","y":' + b'{"a":' * 200_000 + b"1" + b"}" * 200_001,
        ],
    )
    def test_h13_what_is_no_json_object_is_a_bad_request(self, body: bytes) -> None:
        with pytest.raises(BadRequest) as raised:
            read(body)
        assert (raised.value.status, raised.value.code, raised.value.param) == (400, None, None)

    @pytest.mark.parametrize(
        "body",
        [
            b"{}",
            b'{"Model":"m"}',
            b'{"MODEL":"m"}',
            b'{"model ":"m"}',
            b'{"x":{"model":"m"}}',
            b'{"model":null}',
            b'{"model":""}',
            b'{"model":7}',
            b'{"model":true}',
            b'{"model":["m"]}',
            b'{"model":{"id":"m"}}',
            b'{"model":7,"model":"m"}',
            b'{"model":"m","model":null}',
            b'{"x":"\\ud83d","model":7}',
        ],
    )
    def test_h13_a_missing_or_odd_model_is_named(self, body: bytes) -> None:
        with pytest.raises(BadRequest) as raised:
            read(body)
        assert (raised.value.status, raised.value.param) == (400, "model")

    @pytest.mark.slow
    def test_a_hostile_body_is_refused_in_time(self) -> None:
        began = time.process_time()
        for unit in (rb"\ud83d", rb"\\", rb"\ud83d\ude00", b"x", rb"\n", rb"\u", rb"\uD8"):
            with pytest.raises(BadRequest):
                read(b'{"model":"m","x":"' + unit * ((1 << 20) // len(unit)))
        assert time.process_time() - began < 5


class TestHalvesOfPairs:
    def test_they_read_as_the_replacement_character(self) -> None:
        assert read(rb'{"model":"a\ud83db","x":"\ude00"}') == "a\ufffdb"
        assert read(rb'{"\ud83d":1,"model":"m"}') == "m"

    def test_they_are_forwarded_as_they_are(self) -> None:
        body = rb'{"\ud83d":"\ude00\ud83d","model":"m","x":"\\ud83d","y":"\ud83d\ude00"}'
        assert with_model(body, "n") == body.replace(b'"m"', b'"n"')
        assert with_fields(body, {"model": b'"n"'}) == body.replace(b'"m"', b'"n"')

    @pytest.mark.parametrize(
        "text",
        [
            rb"\ud83d",
            rb"\uDE00",
            rb"\ude00\ud83d",
            rb"\ud83d\ud83d\ude00",
            rb"\ud83d\u0041",
            rb"\ud83d\n",
            rb"\\\ud83d",
            rb"\\ud83d",
            rb"\"\ud83d\"",
            rb"\ud83dude00",
            rb"a\ud7ff\ue000",
        ],
    )
    def test_pairs_are_told_from_halves(self, text: bytes) -> None:
        quoted = b'"' + text + b'"'
        lenient = json.loads(quoted).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        assert readable(msgspec.json.decode, quoted) == lenient


class TestChanging:
    def test_one_model_in_sight_is_spliced(self) -> None:
        assert with_model(b'{"model":"a"}', 'b"\n\u00e9') == '{"model":"b\\"\\n\u00e9"}'.encode()

    @pytest.mark.parametrize(
        ("body", "changed"),
        [
            (b'{"model":"a","model":"b"}', b'{"model":"X","model":"X"}'),
            (rb'{"\u006dodel":"a"}', rb'{"\u006dodel":"X"}'),
            (rb'{"model":"a","mode\u006C":"b"}', rb'{"model":"X","mode\u006C":"X"}'),
            (b'{"x":{"model":"a"},"model":"b"}', b'{"x":{"model":"a"},"model":"X"}'),
            (b'{"x":["model","a"],"model":"b"}', b'{"x":["model","a"],"model":"X"}'),
            (b'{"x":"model","model":"b"}', b'{"x":"model","model":"X"}'),
            (b'{"model":"model"}', b'{"model":"X"}'),
            (rb'{"x":"\"model\":\"a\"","model":"b"}', rb'{"x":"\"model\":\"a\"","model":"X"}'),
            (rb'{"x\"model":1,"model":"b"}', rb'{"x\"model":1,"model":"X"}'),
            (rb'{"x":"\\","model":"b\\"}', rb'{"x":"\\","model":"X"}'),
            (b'{"x":"}],{[:","model":"b"}', b'{"x":"}],{[:","model":"X"}'),
            (b' {\n"model"\t:\r "b" } ', b' {\n"model"\t:\r "X" } '),
            (b'{"\xff\\n":1,"model":"a","model":"b"}', b'{"\xff\\n":1,"model":"X","model":"X"}'),
        ],
    )
    def test_every_top_level_model_and_nothing_else(self, body: bytes, changed: bytes) -> None:
        assert read(body)
        assert with_model(body, "X") == changed

    def test_several_fields_at_once(self) -> None:
        body = b'{"seed": 1.0 ,"a":[{"seed":2}], "logprobs":null}'
        fields = {"logprobs": b"true", "seed": b"9"}
        assert with_fields(body, fields) == (b'{"seed": 9 ,"a":[{"seed":2}], "logprobs":true}')

    @pytest.mark.parametrize(
        ("body", "changed"),
        [
            (b"{}", b'{"a":1,"b":2}'),
            (b" { } ", b' { "a":1,"b":2} '),
            (b'{"x":{}}', b'{"x":{},"a":1,"b":2}'),
            (b'{"b":0 }', b'{"b":2 ,"a":1}'),
        ],
    )
    def test_missing_fields_are_added_at_the_end(self, body: bytes, changed: bytes) -> None:
        assert with_fields(body, {"a": b"1", "b": b"2"}) == changed

    def test_nothing_to_change_changes_nothing(self) -> None:
        body = b' { "a" : [ 1 , {"b":"c"} ] , "d":-0.0E+1}\n'
        assert with_fields(body, {}) == body

    def test_the_members_of_an_object(self) -> None:
        body = b' {"a":"x,}" , "b" : [ [] , {"c":1} ],"d":-1.5e3,"a":{} , "e":null }\n'
        assert [(key, body[start:end]) for key, start, end in members(body)] == [
            ("a", b'"x,}"'),
            ("b", b'[ [] , {"c":1} ]'),
            ("d", b"-1.5e3"),
            ("a", b"{}"),
            ("e", b"null"),
        ]
        assert list(members(b" { } ")) == []

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("array", "items"),
        [
            (b"[]", []),
            (b" [ ] ", []),
            (b"[1]", [b"1"]),
            (b'[ null ,\n"a,]\\"" ]', [b"null", b'"a,]\\""']),
            (b'[[],{"a":[1,2]} , {}]', [b"[]", b'{"a":[1,2]}', b"{}"]),
        ],
    )
    def test_the_elements_of_an_array(self, array: bytes, items: list[bytes]) -> None:
        assert [array[start:end] for start, end in elements(array)] == items

    @pytest.mark.parametrize("depth", [*range(1, 13), 100, 900])
    def test_a_value_may_be_nested_as_deeply_as_it_likes(self, depth: int) -> None:
        inner = b"[" * depth + b'1,"]"' + b"]" * depth
        mixed = inner.replace(b"[", b'{"a":[', 1)[:-1] + b"]}"
        for value in (inner, mixed, b"[%b,%b]" % (inner, mixed)):
            body = b'{"a":%b , "b":7}' % value
            assert [body[i:j] for _, i, j in members(body)] == [value, b"7"]
            array = b"[%b,7]" % value
            assert [array[i:j] for i, j in elements(array)] == [value, b"7"]

    def test_large_bodies_are_spliced_in_time(self) -> None:
        tokens = b"[" + b"1," * 500_000 + b"1]"
        image = b'[{"image_url":"data:' + b"A" * (8 << 20) + b'"}]'
        schema = b'{"properties":{"model":{"type":"string"}}}'
        body = b'{"prompt":%b,"messages":%b,"schema":%b,"model":"a"}' % (tokens, image, schema)
        began = time.process_time()
        assert with_model(body, "b") == body[:-3] + b'b"}'
        assert time.process_time() - began < 1


@pytest.mark.parametrize(
    ("body", "once"),
    [
        (b'{"model":"a"}', True),
        (b'{"x":{"model":"b"},"model":"a"}', True),
        (b'{"prompt":"\\"model\\": \\u0065","model":"a"}', True),
        (b'{"model":"a","model":"a"}', False),
        (b'{"model":"n","x":[1],"mod\\u0065l":"m"}', False),
    ],
)
def test_whether_the_model_is_said_once(body: bytes, once: bool) -> None:
    assert says_model_once(body) is once
