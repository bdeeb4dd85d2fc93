"""The bodies of hand-offs, byte for byte: what each engine is told, and what it must not be told."""

import contextlib
import json
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pointsman.dialect import llamacpp, sglang, tl, vllm
from pointsman.dialect.engines import DIALECTS
from pointsman.dialect.handing import prompts_of
from pointsman.errors import BadRequest
from pointsman.wire.body import parse_request
from pointsman.wire.logprobs import asked, forced

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
ASKED = (
    b'{ "model":"public", "messages":[{"role":"user","content":"\\u00e9"}] , "max_tokens":64,'
    b'"stream":true,"stream_options":{"include_usage":true},"min_tokens":8,"temperature":1.0,"x":1E5}'
)
TOLD = (
    b'{ "model":"served", "messages":[{"role":"user","content":"\\u00e9"}] , "max_tokens":1,'
    b'"stream":false,"temperature":1.0,"x":1E5,"max_completion_tokens":1,%b}'
)
NIXL = (
    b'"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,'
    b'"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}'
)
ROOM = b'"bootstrap_host":"10.0.0.7","bootstrap_port":8998,"bootstrap_room":5'
XFER = (
    b'"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,'
    b'"transfer_id":"xfer-7"}'
)

Prefill = Callable[[str, bytes], bytes]


def nixl(path: str, body: bytes) -> bytes:
    return vllm.nixl_prefill(path, body, "served")


def mooncake(path: str, body: bytes) -> bytes:
    return vllm.mooncake_prefill(path, body, "served", "xfer-7")


def bootstrap(path: str, body: bytes) -> bytes:
    return sglang.prefill(path, body, "served", sglang.bootstrap_fields("10.0.0.7", 8998, 5))


def slots(path: str, body: bytes) -> bytes:
    return llamacpp.slot_prefill(path, body, "served", 3)


PREFILLS: list[tuple[Prefill, bytes]] = [
    (nixl, NIXL),
    (mooncake, XFER),
    (bootstrap, ROOM),
    (slots, b'"id_slot":3,"cache_prompt":true'),
]


@pytest.mark.parametrize(("prefill", "fields"), PREFILLS)
def test_p10_a_prefill_leg_is_one_token_without_a_stream_or_a_minimum(
    prefill: Prefill, fields: bytes
) -> None:
    assert prefill(CHAT, ASKED) == TOLD % fields


@pytest.mark.parametrize(("prefill", "fields"), PREFILLS)
def test_a_completion_gets_the_limit_that_it_knows(prefill: Prefill, fields: bytes) -> None:
    told = b'{"prompt":[1,2],"model":"served","stream":false,"max_tokens":1,%b}' % fields
    assert prefill(TEXT, b'{"prompt":[1,2],"model":"m"}') == told


@settings(deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["seed", "min_tokens", "stream", "tools", "max_tokens", "model", "stop"]),
        st.one_of(st.integers(), st.booleans(), st.text(max_size=3), st.none()),
    )
)
def test_p09_what_the_prefill_leg_is_told_changes_nothing_else(members: dict[str, object]) -> None:
    for prefill, _ in PREFILLS:
        told = json.loads(prefill(CHAT, json.dumps(members).encode()))
        assert (told["max_tokens"], told["max_completion_tokens"], told["stream"]) == (1, 1, False)
        assert "min_tokens" not in told
        for name in members.keys() & {"seed", "tools", "stop"}:
            assert told[name] == members[name]


def test_the_decode_worker_gets_the_parameters_as_they_were_said() -> None:
    said = b'{"remote_port" :5600, "remote_block_ids":[[1 ,2]],"new":1.0}'
    answer = b'{"usage":{},"kv_transfer_params": %b ,"choices":[]}' % said
    params = vllm.transfer_params(answer)
    assert params == said
    assert vllm.nixl_decode(said) == {"kv_transfer_params": said}


@pytest.mark.parametrize(
    "answer",
    [
        b'{"choices":[]}',
        b'{"kv_transfer_params":null}',
        b'{"kv_transfer_params":"x"}',
        b"[]",
        b"",
        b'{"kv_transfer_params":{',
        b"[" * 100_000,
    ],
)
def test_p19_an_answer_without_parameters_hands_nothing_over(answer: bytes) -> None:
    assert vllm.transfer_params(answer) is None


def test_the_decode_worker_of_mooncake_is_told_where_the_other_one_is() -> None:
    assert vllm.mooncake_decode("xfer-7", "e_dp0", "http://10.0.0.7:8998") == {
        "kv_transfer_params": b'{"do_remote_decode":false,"do_remote_prefill":true,'
        b'"transfer_id":"xfer-7","remote_engine_id":"e_dp0",'
        b'"remote_bootstrap_addr":"http://10.0.0.7:8998"}'
    }


def test_the_engine_id_of_a_rank() -> None:
    answer = b'{"0":{"engine_id":"e_dp0"},"1":{"engine_id":"e_dp1","worker_addr":{"0":{}}}}'
    assert vllm.mooncake_engine_id(answer, 1) == "e_dp1"


@pytest.mark.parametrize("answer", [b"{}", b"[]", b'{"0":{}}', b'{"1":{"engine_id":"e"}}', b""])
def test_no_engine_id_is_an_error(answer: bytes) -> None:
    with pytest.raises(ValueError, match="no engine id of rank 0"):
        vllm.mooncake_engine_id(answer)


def test_a_room_for_every_prompt_of_an_array() -> None:
    fields = sglang.bootstrap_fields("fd00::7", 8998, sglang.ROOMS - 1, prompts=2)
    assert fields == {
        "bootstrap_host": b'["[fd00::7]","[fd00::7]"]',
        "bootstrap_port": b"[8998,8998]",
        "bootstrap_room": b"[9223372036854775807,0]",
    }


@pytest.mark.parametrize(
    ("body", "prompts"),
    [
        (b'{"prompt":"a"}', 0),
        (b'{"prompt":[1,2,3]}', 0),
        (b'{"prompt":["a"]}', 1),
        (b'{"prompt":[[1],[2,3]]}', 2),
        (b'{"prompt":"a","messages":[1]}', 0),
    ],
)
def test_how_many_prompts_there_are(body: bytes, prompts: int) -> None:
    assert prompts_of(TEXT, body) == prompts


PLAIN = [
    (TEXT, b'{"prompt":"a","n":1,"best_of":1,"echo":true,"logprobs":null}'),
    (TEXT, b'{"prompt":[1,2],"logprobs":2}'),
    (CHAT, b'{"messages":[{"content":[{"type":"text","text":"a"}]}],"n":null,"tools":[],"seed":1}'),
    (CHAT, b'{"messages":[{"content":"a"}],"logprobs":true,"top_logprobs":2}'),
]
ALONE = [
    (TEXT, b'{"prompt":"a","n":2}'),
    (TEXT, b'{"prompt":"a","best_of":3}'),
    (TEXT, b'{"prompt":"a","use_beam_search":true}'),
    (TEXT, b'{"prompt":"a","echo":true,"logprobs":0}'),
    (TEXT, b'{"prompt":"a","prompt_logprobs":0}'),
    (TEXT, b'{"prompt":"a","return_hidden_states":true}'),
    (TEXT, b'{"prompt":"a","kv_transfer_params":{}}'),
    (TEXT, b'{"prompt":"a","bootstrap_room":1}'),
    (TEXT, b'{"prompt":"a","id_slot":0}'),
    (TEXT, b'{"prompt":{"prompt_string":"a"}}'),
    (TEXT, b'{"prompt":"a","messages":[{}]}'),
    (TEXT, b'{"prompt":""}'),
    (TEXT, b"{}"),
    (CHAT, b'{"messages":[],"prompt":null}'),
    ("/v1/embeddings", b'{"input":"a"}'),
    ("/v1/responses", b'{"input":"a"}'),
]
ENGINES = ["vllm", "sglang", "llamacpp"]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("path", "body"), PLAIN)
def test_what_two_workers_can_share(engine: str, path: str, body: bytes) -> None:
    assert DIALECTS[engine].handed_off(path, body)


@pytest.mark.parametrize("engine", [*ENGINES, "openai"])
@pytest.mark.parametrize(("path", "body"), ALONE)
def test_what_one_worker_must_do_alone(engine: str, path: str, body: bytes) -> None:
    assert not DIALECTS[engine].handed_off(path, body)


@pytest.mark.parametrize(
    ("path", "body", "engines"),
    [
        (TEXT, b'{"prompt":["a","b"]}', ["sglang"]),
        (TEXT, b'{"prompt":"a","min_tokens":4}', ["vllm", "llamacpp"]),
        (CHAT, b'{"messages":[{"content":[{"type":"image_url"}]}]}', ["vllm", "sglang"]),
        (CHAT, b'{"messages":[{"content":["a"]}]}', ["vllm", "sglang"]),
    ],
)
def test_what_only_some_engines_can_share(path: str, body: bytes, engines: list[str]) -> None:
    assert [name for name in ENGINES if DIALECTS[name].handed_off(path, body)] == engines


UNREAD = [b"9" * 5000, b"1e999", b'"\xff"', b'[{"role":"user","content":-1e999}]']
"""What JSON allows, or what a reader that skips it cannot see."""


@pytest.mark.parametrize("engine", DIALECTS)
@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("name", ["messages", "prompt", "logprobs", "kv_transfer_params"])
@pytest.mark.parametrize("value", UNREAD)
def test_what_cannot_be_read_is_left_to_one_worker(
    engine: str, path: str, name: str, value: bytes
) -> None:
    body = b'{"model":"m","%b":%b}' % (name.encode(), value)
    parse_request(body, "r1")
    assert not DIALECTS[engine].handed_off(path, body)


@pytest.mark.parametrize("value", UNREAD)
def test_a_seed_that_cannot_be_read_is_the_clients_fault(value: bytes) -> None:
    with pytest.raises(BadRequest) as refused:
        tl.read(TEXT, b'{"model":"m","prompt":"a","seed":%b}' % value)
    assert refused.value.param == "seed"


def deepest(body: Callable[[int], bytes]) -> bytes:
    """Return the body with as many levels as `parse_request` can read from here."""
    for levels in reversed(range(2000)):
        with contextlib.suppress(BadRequest):
            parse_request(body(levels), "r1")
            return body(levels)
    raise AssertionError("it reads none")


def further_down(call: Callable[[], object], frames: int = 50) -> object:
    """Call from where the stack has so many frames more."""
    return further_down(call, frames - 1) if frames else call()


@pytest.mark.parametrize("engine", DIALECTS)
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_more_levels_than_can_be_read_are_left_to_one_worker(engine: str, path: str) -> None:
    body = deepest(lambda levels: b'{"model":"m","prompt":%b%b}' % (b"[" * levels, b"]" * levels))
    assert not further_down(lambda: DIALECTS[engine].handed_off(path, body))
    assert further_down(lambda: DIALECTS[engine].tokenize("m", path, body)) is None
    assert further_down(lambda: asked(path, body)) is False
    assert further_down(lambda: forced(path, body, margins=False))


def test_our_own_engines_share_what_their_contract_has_words_for() -> None:
    assert DIALECTS["tl"].handed_off(TEXT, b'{"model":"m","prompt":"a"}')
    assert not DIALECTS["tl"].handed_off(TEXT, b'{"model":"m","prompt":"a","tools":[]}')


def test_both_legs_of_a_request_have_the_name_by_which_it_is_ended() -> None:
    assert sglang.named('r"7') == {"rid": b'"r\\"7"'}
    assert sglang.named("r", prompts=2) == {"rid": b'["r_0","r_1"]'}
    assert sglang.names_of("r", 2) == ["r_0", "r_1"]


def test_what_is_handed_over_for_nothing_is_taken_up_for_one_token() -> None:
    told = vllm.give_back('m"', vllm.nixl_decode(b'{"remote_port":1}'))
    assert told == (
        b'{"model":"m\\"","prompt":"x","max_tokens":1,"kv_transfer_params":{"remote_port":1}}'
    )


def test_calls_about_a_slot() -> None:
    assert llamacpp.slot_save(0, "h1.bin") == (b"/slots/0?action=save", b'{"filename":"h1.bin"}')
    assert llamacpp.slot_restore(1, 'h"1.bin') == (
        b"/slots/1?action=restore",
        b'{"filename":"h\\"1.bin"}',
    )
    assert llamacpp.slot_erase(1) == (b"/slots/1?action=erase", b"{}")


def test_tokens_of_a_slot() -> None:
    assert llamacpp.slot_tokens(b'{"n_saved":0}') == 0
    assert llamacpp.slot_tokens(b'{"n_erased":3}') == 3
    for answer in (b"{}", b"", b'{"error":{"code":400}}'):
        with pytest.raises(ValueError, match="no number of tokens"):
            llamacpp.slot_tokens(answer)


@pytest.mark.parametrize(
    ("engine", "path", "body", "asked"),
    [
        (
            "vllm",
            CHAT,
            b'{"model":"p","messages":[{"content":"\\u00e9"}],"tools":[ {} ],"max_tokens":3}',
            (b"/tokenize", b'{"model":"s","messages":[{"content":"\\u00e9"}],"tools":[ {} ]}'),
        ),
        (
            "vllm",
            TEXT,
            b'{"model":"p","prompt":"a","add_special_tokens":false}',
            (b"/tokenize", b'{"model":"s","prompt":"a","add_special_tokens":false}'),
        ),
        ("vllm", TEXT, b'{"prompt":[1]}', None),
        ("vllm", "/v1/embeddings", b'{"input":"a"}', None),
        ("sglang", TEXT, b'{"prompt":"a"}', (b"/tokenize", b'{"model":"s","prompt":"a"}')),
        ("sglang", TEXT, b'{"prompt":["a"]}', None),
        ("sglang", CHAT, b'{"messages":[{"content":"a"}]}', None),
        (
            "llamacpp",
            TEXT,
            b'{"prompt":"a"}',
            (b"/tokenize", b'{"content":"a","add_special":true,"parse_special":true}'),
        ),
        ("llamacpp", CHAT, b'{"messages":[{"content":"a"}]}', None),
        ("openai", TEXT, b'{"prompt":"a"}', None),
        (
            "tl",
            TEXT,
            b'{"model":"p","prompt":"a"}',
            (b"/v1/tokenize", b'{"model":"s","add_special":true,"text":"a"}'),
        ),
        ("tl", TEXT, b'{"model":"p","prompt":[1]}', None),
        ("tl", TEXT, b'{"model":"p","prompt":"a","tools":[]}', None),
        ("tl", TEXT, b'{"model":"p","prompt":"a","seed":"x"}', None),
    ],
)
def test_how_tokens_are_asked_for(
    engine: str, path: str, body: bytes, asked: tuple[bytes, bytes] | None
) -> None:
    assert DIALECTS[engine].tokenize("s", path, body) == asked


@pytest.mark.parametrize("engine", DIALECTS)
def test_an_answer_without_tokens_is_an_error(engine: str) -> None:
    for answer in (b"{}", b"", b'{"tokens":["a"]}', b"[1]"):
        with pytest.raises(ValueError, match="token"):
            DIALECTS[engine].token_ids(answer)


def test_tokens_of_an_answer() -> None:
    assert DIALECTS["tl"].token_ids(b'{"ids":[1,2]}') == [1, 2]


def test_only_sglang_is_told_to_abort() -> None:
    told = {name: dialect.abort('r"7') for name, dialect in DIALECTS.items()}
    assert told.pop("sglang") == (b"/abort_request", b'{"rid":"r\\"7"}')
    assert set(told.values()) == {None}
