"""The tokenizer of a GGUF file as the `tokenizer.json` that Hugging Face's libraries read: one family, byte-level BPE.

It reads what `gguf.GGUFReader(path).fields` holds, and knows one way to split text, the default model's; it refuses
others. Chat templates and special tokens by role are no part of a `tokenizer.json`.
"""

from typing import Any

__all__ = ["byte_letters", "tokenizer_json"]

_CONTROL = 3
"""How GGUF marks tokens that are no text, such as `<|im_start|>`."""


def byte_letters() -> list[str]:
    """The character that stands for each byte in the vocabularies of byte-level BPE."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = iter(range(0x100, 0x200))
    return [chr(byte if byte in shown else next(hidden)) for byte in range(256)]


def tokenizer_json(fields: Any) -> dict[str, Any]:
    """Return the `tokenizer.json` of the vocabulary and the merges in a GGUF file.

    The pattern that llama.cpp calls `smollm`: each digit by itself, then words as in GPT-2. The vocabulary lacks some
    bytes. llama.cpp drops them after it has merged; `tokenizers` would before, and merge what is then side by side.

    Raises:
        ValueError: the file holds a tokenizer of another kind.
    """

    def value(key: str) -> Any:
        return fields[f"tokenizer.{key}"].contents()

    if (kind := (value("ggml.model"), value("ggml.pre"))) != ("gpt2", "smollm"):
        raise ValueError(f"a tokenizer of the kind {kind} is not known")
    tokens = value("ggml.tokens")
    lacking = "".join(sorted(set(byte_letters()) - set(tokens)))
    marks = [
        {
            "id": id,
            "content": tokens[id],
            "special": True,
            **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
        }
        for id, mark in enumerate(value("ggml.token_type"))
        if mark == _CONTROL
    ]
    steps = [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        {
            "type": "Split",
            "pattern": {"Regex": f"[{lacking}]"},
            "behavior": "Isolated",
            "invert": False,
        },
    ]
    vocabulary = {token: id for id, token in enumerate(tokens)}
    return {
        "version": "1.0",
        "added_tokens": marks,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": value("ggml.merges")},
    }
