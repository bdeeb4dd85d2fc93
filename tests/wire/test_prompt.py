"""The prompt of a request as a tokenizer takes it, or none."""

from typing import Any

import pytest

from pointsman.wire.body import parse_request
from pointsman.wire.prompt import prompt_of

HI = '{"role":"user","content":"Hi"}'


def read(fields: str) -> Any:
    return prompt_of(
        parse_request(b'{"model":"m",%b}' % fields.encode("utf-8", "surrogatepass"), "r1")
    )


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ('"prompt":"Once"', "Once"),
        ('"prompt":[1,2,4294967295]', (1, 2, 4294967295)),
        (f'"messages":[{HI}]', [{"role": "user", "content": "Hi"}]),
        (
            '"messages":[{"role":"developer","content":[{"type":"text","text":"Be "},{"type":"text","text":"brief."}]},'
            '{"role":"assistant"}]',
            [{"role": "system", "content": "Be brief."}, {"role": "assistant", "content": ""}],
        ),
        (f'"messages":[{HI}],"tools":[]', [{"role": "user", "content": "Hi"}]),
    ],
)
def test_texts_chats_and_tokens_are_prompts(fields: str, prompt: Any) -> None:
    assert read(fields) == prompt


@pytest.mark.parametrize(
    "fields",
    [
        '"stream":true',
        '"prompt":""',
        '"prompt":[]',
        '"prompt":7',
        '"prompt":["a","b"]',
        '"prompt":[[1],[2]]',
        '"prompt":[-1]',
        '"prompt":[4294967296]',
        '"messages":[]',
        '"messages":"Hi"',
        '"messages":[{"content":"Hi"}]',
        '"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}]',
        '"messages":[{"role":"assistant","tool_calls":[]}]',
        f'"messages":[{HI}],"prompt":"Once"',
        f'"messages":[{HI}],"tools":[{{"type":"function"}}]',
        '"messages":' + '[{"role":"user","content":' + "[" * 500 + "]" * 500 + "}]",
    ],
)
def test_what_is_not_text_alone_is_none(fields: str) -> None:
    assert read(fields) is None
